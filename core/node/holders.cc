#include "core/node/holders.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "core/graph/graph.h"
#include "core/node/world.h"

namespace chorus::node {
namespace {

std::string NameOf(const Session& session) {
  std::string name;
  for (const Session::Membership& membership : session.memberships) {
    absl::StrAppend(&name, name.empty() ? "" : " and ", "rank ", membership.rank.value(), " of \"",
                    membership.world->name, "\"");
  }
  if (name.empty()) name = absl::StrCat("session \"", session.request.label, "\"");
  return absl::StrCat(name, " (pid ", session.request.pid, ")");
}

void Locate(absl::string_view op, absl::string_view source, Error* error) {
  error->op = std::string(op);
  error->source = Printable(source);
  const bool has_source = !error->source.empty();
  error->message = absl::StrCat(op, has_source ? " (" : "", error->source, has_source ? ")" : "",
                                ": ", error->message);
}

// The node with the largest result is what most of a run's memory is for.
void NameLargest(const Graph& graph, Error* error) {
  const Node* largest = nullptr;
  int64_t largest_bytes = -1;
  for (const Node& node : graph.nodes) {
    int64_t bytes = 0;
    for (const TensorType& type : node.outputs) bytes += type.num_bytes();
    if (bytes <= largest_bytes) continue;
    largest_bytes = bytes;
    largest = &node;
  }
  if (largest != nullptr) Locate(largest->op, largest->source, error);
}

}  // namespace

void Holders::Explain(const Session& caller, const RunState* run, Error* error) {
  if (error->reason != Reason::kOutOfMemory || error->id != ErrorId()) return;
  if (run != nullptr && run->graph != nullptr) NameLargest(run->graph->graph, error);
  Name(caller, error);
}

void Holders::Explain(const Session& caller, const CreateTensor& create, Error* error) {
  if (error->reason != Reason::kOutOfMemory || error->id != ErrorId()) return;
  Locate("from_host", create.call_site, error);
  Name(caller, error);
}

void Holders::Name(const Session& caller, Error* error) {
  Tenant* const tenant = caller.tenant.get();
  // To look for them is work for each tensor, and a client may ask for too much again and again.
  if (clock_->now >= tenant->holders_at + absl::Seconds(1)) {
    tenant->holders = TextOf(*tenant);
    tenant->holders_at = clock_->now;
  }
  error->message += tenant->holders;
}

std::string Holders::TextOf(const Tenant& tenant) {
  constexpr size_t kNamed = 3;
  std::vector<std::pair<int64_t, std::string>> holders;
  sessions_->ForEach([&](const std::shared_ptr<Session>& session) {
    if (session->tenant.get() != &tenant) return;
    const int64_t bytes = BytesOf(*session);
    if (bytes > 0) holders.emplace_back(-bytes, NameOf(*session));
  });
  std::sort(holders.begin(), holders.end());
  std::string text;
  for (size_t i = 0; i < std::min(holders.size(), kNamed); ++i) {
    absl::StrAppend(&text, i == 0 ? "; the largest holders are " : ", ", holders[i].second,
                    " with ", -holders[i].first, " bytes");
  }
  return text;
}

// Each buffer once, whatever names it has; of a run under way those that it has bound.
int64_t Holders::BytesOf(const Session& session) {
  int64_t bytes = session.staging_bytes;
  absl::flat_hash_set<const Buffer*> counted;
  const auto count = [&](const BufferRef& buffer) {
    if (buffer.get() == nullptr || buffer->state() == Buffer::State::kStaging) return;
    if (counted.insert(buffer.get()).second) bytes += buffer->bytes();
  };
  session.names.ForEachCell([&](const Cell& cell) { count(cell.buffer); });
  for (const RunHandle handle : session.runs) {
    for (const BufferRef& buffer : runs_->Find(handle)->refs) count(buffer);
  }
  return bytes;
}

}  // namespace chorus::node
