// Failures: recorded once, told with their id, one line each in the log.
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

}  // namespace

absl::Status DrainingError() {
  return MakeError(absl::StatusCode::kUnavailable, Reason::kDraining,
                   "the daemon is shutting down");
}

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
