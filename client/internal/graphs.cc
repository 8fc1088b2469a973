#include "client/internal/graphs.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "client/internal/calls.h"
#include "core/base/error.h"
#include "core/graph/encoding.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {
namespace {

constexpr size_t kMaxOfFragments = 1024;
// Larger graphs go through staging memory: a frame must fit the ring more than once.
constexpr size_t kMaxInlineBytes = 32 * 1024;
constexpr size_t kGraphsPerFrame = 512;

}  // namespace

bool RegistrationFailed(Link* link, Sequence* command) {
  if (*command == Sequence()) return false;
  const absl::optional<bool> well = WentWell(link, *command);
  if (!well.has_value()) return false;
  *command = Sequence();
  return !*well;
}

absl::StatusOr<Graphs::Registered> Graphs::Register(const std::string& encoded) {
  if (log_->graphs().empty()) ReleaseLeft();
  const absl::optional<GraphId> id = log_->graphs().Take();
  if (!id.has_value()) {
    return MakeError(
        Reason::kQuota,
        absl::StrCat("the session has ", log_->graphs().most(),
                     " graphs, as many as it may: most are of "
                     "compiled functions, drop some, or give them inputs of fewer types"));
  }
  RegisterGraph body;
  body.graph = *id;
  absl::StatusOr<Sequence> command = Sequence();
  if (encoded.size() <= kMaxInlineBytes) {
    body.encoded = encoded;
    command = log_->Submit(std::move(body));
  } else {
    command = staging_->Send(encoded, [&](const ExternalRange& range) {
      body.staged = range;
      body.staged_bytes = static_cast<int64_t>(encoded.size());
      return log_->Submit(std::move(body));
    });
  }
  if (!command.ok()) {
    log_->graphs().GiveBack(*id);
    return command.status();
  }
  return Registered{*id, *command};
}

absl::StatusOr<GraphId> Graphs::OfFragment(std::string encoded) {
  const auto row = of_fragments_.find(encoded);
  if (row != of_fragments_.end()) {
    if (!RegistrationFailed(link_, &row->second.command)) return row->second.graph;
    Release({row->second.graph});
    of_fragments_.erase(row);
  }
  if (of_fragments_.size() >=
      std::min(kMaxOfFragments, static_cast<size_t>(log_->graphs().most()) / 4)) {
    for (const auto& entry : of_fragments_) Release({entry.second.graph});
    of_fragments_.clear();
  }
  CHORUS_ASSIGN_OR_RETURN(const Registered registered, Register(encoded));
  of_fragments_.emplace(std::move(encoded), registered);
  return registered.graph;
}

absl::StatusOr<CallEntry*> Graphs::RegisterCalls(absl::Span<const CallPart> parts, int device_count,
                                                 Interner* interner) {
  GroupCore* const group = parts[0].group;
  // Counts that change with every call must not fill the daemon with graphs.
  if (group->calls.size() >= CallTable::kMax) ForgetCalls(group);
  Graph graph;
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<CallEntry> entry,
                          MakeEntry(parts, device_count, interner, &graph));
  CHORUS_ASSIGN_OR_RETURN(const Registered registered, Register(EncodeGraph(graph)));
  entry->draft.run().graph = registered.graph;
  entry->registration = registered.command;
  ++of_calls_;
  return group->calls.Add(parts, std::move(entry));
}

bool Graphs::IsRegistered(CallEntry* entry, GroupCore* group) {
  if (!RegistrationFailed(link_, &entry->registration)) return true;
  ForgetCalls(group);
  return false;
}

void Graphs::ForgetCalls(GroupCore* group) {
  Release(group->calls.graphs());
  of_calls_ -= static_cast<int32_t>(group->calls.size());
  group->calls.Clear();
}

void Graphs::ReleaseLeft() {
  const Releases::Graphs graphs = releases_->TakeGraphs();
  of_calls_ -= graphs.of_calls;
  Release(graphs.ids);
}

void Graphs::Release(absl::Span<const GraphId> graphs) {
  for (size_t begin = 0; begin < graphs.size(); begin += kGraphsPerFrame) {
    const absl::Span<const GraphId> frame = graphs.subspan(begin, kGraphsPerFrame);
    chorus::Release release;
    release.graphs.assign(frame.begin(), frame.end());
    // One wait in vain is enough.
    const bool is_taken = !log_->has_no_room() && log_->Submit(std::move(release)).ok();
    if (log_->has_no_room()) releases_->Add(graphs.subspan(begin), /*of_calls=*/false);
    if (!is_taken) return;
    for (const GraphId graph : frame) log_->graphs().Release(graph);
  }
}

}  // namespace internal
}  // namespace chorus
