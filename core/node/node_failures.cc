// Failures: recorded once, told with their id, one line each in the log.
#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "core/node/node_impl.h"

namespace chorus {
namespace {

// Whose failure it is: the culprit's where one is known; else the caller's, unless several ranks
// are concerned.
FailureOrigin WhereIs(const Session* session, const World* world, const Error& error) {
  FailureOrigin failure;
  const Session::Membership* caller = nullptr;
  if (session != nullptr) {
    for (const Session::Membership& membership : session->memberships) {
      if (world != nullptr && membership.world.get() != world) continue;
      if (caller != nullptr) {
        caller = nullptr;  // one of several members: which is not known
        break;
      }
      caller = &membership;
    }
  }
  if (world == nullptr && caller != nullptr) world = caller->world.get();
  if (world != nullptr) failure.job = world->name;
  if (error.culprit.rank >= 0 || error.culprit.pid >= 0) {
    failure.rank = error.culprit.rank;
    failure.pid = error.culprit.pid;
  } else if (session != nullptr && error.instance.empty()) {
    if (caller != nullptr) failure.rank = static_cast<int32_t>(caller->rank.value());
    failure.pid = session->request.pid;
  }
  return failure;
}

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
  const bool known = !error->source.empty();
  error->message =
      absl::StrCat(op, known ? " (" : "", error->source, known ? ")" : "", ": ", error->message);
}

// The node with the largest result is what most of a run's memory is for.
void NameLargest(const Graph& graph, Error* error) {
  const Node* largest = nullptr;
  int64_t most = -1;
  for (const Node& node : graph.nodes) {
    int64_t bytes = 0;
    for (const TensorType& type : node.outputs) bytes += type.num_bytes();
    if (bytes <= most) continue;
    most = bytes;
    largest = &node;
  }
  if (largest != nullptr) Locate(largest->op, largest->source, error);
}

}  // namespace

void LocalNode::Impl::ExplainMemory(const Session& caller, const RunState* run, Error* error) {
  if (error->reason != Reason::kOutOfMemory || error->id != ErrorId()) return;
  if (run != nullptr && run->graph != nullptr) NameLargest(run->graph->graph, error);
  NameHolders(caller, error);
}

void LocalNode::Impl::ExplainMemory(const Session& caller, const CreateTensor& create,
                                    Error* error) {
  if (error->reason != Reason::kOutOfMemory || error->id != ErrorId()) return;
  Locate("from_host", create.call_site, error);
  NameHolders(caller, error);
}

void LocalNode::Impl::NameHolders(const Session& caller, Error* error) {
  Tenant* const tenant = caller.tenant.get();
  // To look for them is work for each tensor, and a client may ask for too much again and again.
  if (now_ >= tenant->holders_at + absl::Seconds(1)) {
    tenant->holders = HoldersText(*tenant);
    tenant->holders_at = now_;
  }
  error->message += tenant->holders;
}

std::string LocalNode::Impl::HoldersText(const Tenant& tenant) {
  constexpr size_t kNamed = 3;
  std::vector<std::pair<int64_t, std::string>> holders;
  for (const auto& entry : sessions_) {
    const Session& session = *entry.second;
    if (session.tenant.get() != &tenant) continue;
    const int64_t bytes = BytesOf(session);
    if (bytes > 0) holders.emplace_back(-bytes, NameOf(session));
  }
  std::sort(holders.begin(), holders.end());
  std::string text;
  for (size_t i = 0; i < std::min(holders.size(), kNamed); ++i) {
    absl::StrAppend(&text, i == 0 ? "; the largest holders are " : ", ", holders[i].second,
                    " with ", -holders[i].first, " bytes");
  }
  return text;
}

// Each buffer once, whatever names it has; of a run under way those that it has bound.
int64_t LocalNode::Impl::BytesOf(const Session& session) {
  int64_t bytes = session.staging_bytes;
  absl::flat_hash_set<const Buffer*> counted;
  const auto count = [&](const BufferRef& buffer) {
    if (buffer.get() == nullptr || buffer->state() == Buffer::State::kStaging) return;
    if (counted.insert(buffer.get()).second) bytes += buffer->bytes();
  };
  for (const Session::TensorSlot& slot : session.tensors) {
    if (slot.cell != nullptr) count(slot.cell->buffer);
  }
  runs_.ForEach([&](RunState* run) {
    if (run->session.get() != &session) return;
    for (const BufferRef& buffer : run->refs) count(buffer);
  });
  return bytes;
}

absl::Status DrainingError() { return MakeError(Reason::kDraining, "the daemon is shutting down"); }

void LocalNode::Impl::RecordFailure(Session* session, const World* world, Error* error) {
  if (error->id != ErrorId()) return;
  RecordFailure(session != nullptr ? session->tenant->name : world->tenant,
                WhereIs(session, world, *error), error);
}

void LocalNode::Impl::RecordFailure(const std::string& tenant, const FailureOrigin& failure,
                                    Error* error) {
  if (!errors.Record(tenant, error) || options.log_failure == nullptr) return;
  // What the peers of a refused call are told: the refusal has its line.
  if (error->reason == Reason::kPeerRefused) return;
  int64_t left_out = 0;
  if (!lines_[tenant].Take(now_, &left_out)) return;
  if (left_out > 0) {
    options.log_failure(absl::StrCat("failure: ", left_out, " more of ", tenant,
                                     " were too many for the log; Diagnostics has them"));
  }
  options.log_failure(FailureLine(failure, *error));
}

absl::Status LocalNode::Impl::Told(Session* session, const absl::Status& status) {
  if (status.ok()) return status;
  Error error = ErrorOf(status);
  if (error.id != ErrorId()) return status;
  RecordFailure(session, nullptr, &error);
  return ToStatus(error);
}

absl::Status LocalNode::Impl::Told(const std::string& tenant, const FailureOrigin& failure,
                                   const absl::Status& status) {
  if (status.ok()) return status;
  Error error = ErrorOf(status);
  if (error.id != ErrorId()) return status;
  RecordFailure(tenant, failure, &error);
  return ToStatus(error);
}

}  // namespace chorus
