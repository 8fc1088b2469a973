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

absl::StatusOr<GraphId> Graphs::Register(const std::string& encoded) {
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
  absl::StatusOr<Sequence> sequence = Sequence();
  Sequence* reader = nullptr;
  if (encoded.size() <= kMaxInlineBytes) {
    body.encoded = encoded;
  } else {
    absl::StatusOr<StagingPool::Placement> placement = staging_->Put(encoded);
    if (placement.ok()) {
      body.staged = std::move(placement->range);
      body.staged_bytes = static_cast<int64_t>(encoded.size());
      reader = placement->reader;
    } else {
      sequence = placement.status();
    }
  }
  if (sequence.ok()) sequence = log_->Submit(std::move(body));
  if (!sequence.ok()) {
    log_->graphs().GiveBack(*id);
    return sequence.status();
  }
  if (reader != nullptr) *reader = *sequence;
  return *id;
}

absl::StatusOr<GraphId> Graphs::OfFragment(std::string encoded) {
  const auto row = of_fragments_.find(encoded);
  if (row != of_fragments_.end()) return row->second;
  if (of_fragments_.size() >=
      std::min(kMaxOfFragments, static_cast<size_t>(log_->graphs().most()) / 4)) {
    for (const auto& entry : of_fragments_) Release({entry.second});
    of_fragments_.clear();
  }
  CHORUS_ASSIGN_OR_RETURN(const GraphId id, Register(encoded));
  of_fragments_.emplace(std::move(encoded), id);
  return id;
}

absl::StatusOr<CallEntry*> Graphs::RegisterCalls(absl::Span<const CallPart> parts, int device_count,
                                                 Interner* interner) {
  GroupCore* const group = parts[0].group;
  // Counts that change with every call must not fill the daemon with graphs.
  if (group->calls.size() >= CallTable::kMax) ForgetCalls(group);
  Graph graph;
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<CallEntry> entry,
                          MakeEntry(parts, device_count, interner, &graph));
  CHORUS_ASSIGN_OR_RETURN(entry->draft.run().graph, Register(EncodeGraph(graph)));
  ++of_calls_;
  return group->calls.Add(parts, std::move(entry));
}

void Graphs::ForgetCalls(GroupCore* group) {
  Release(group->calls.graphs());
  of_calls_ -= static_cast<int32_t>(group->calls.size());
  group->calls.Clear();
}

void Graphs::ReleaseLeft() {
  const Releases::Graphs left = releases_->TakeGraphs();
  of_calls_ -= left.of_calls;
  Release(left.ids);
}

void Graphs::Release(absl::Span<const GraphId> graphs) {
  for (size_t begin = 0; begin < graphs.size(); begin += kGraphsPerFrame) {
    const absl::Span<const GraphId> frame = graphs.subspan(begin, kGraphsPerFrame);
    chorus::Release release;
    release.graphs.assign(frame.begin(), frame.end());
    if (!log_->Submit(std::move(release)).ok()) return;
    for (const GraphId graph : frame) log_->graphs().Release(graph);
  }
}

}  // namespace internal
}  // namespace chorus
