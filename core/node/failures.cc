#include "core/node/failures.h"

#include <cstdint>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"

namespace chorus::node {
namespace {

// The rank that a failure is of: the culprit where one is known; else the caller, unless several
// ranks are concerned.
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

void Failures::Record(const Session* session, const World* world, Error* error) {
  if (error->id != ErrorId()) return;
  Record(session != nullptr ? session->tenant->name : world->tenant,
         WhereIs(session, world, *error), error);
}

void Failures::Record(const std::string& tenant, const FailureOrigin& failure, Error* error) {
  if (!errors_->Record(tenant, error) || log_ == nullptr) return;
  // The error that peers of a refused call get: the refusal has its line.
  if (error->reason == Reason::kPeerRefused) return;
  log_(tenant, FailureLine(failure, *error));
}

absl::Status Failures::RecordStatus(const Session* session, const absl::Status& status) {
  if (status.ok()) return status;
  Error error = ErrorOf(status);
  if (error.id != ErrorId()) return status;
  Record(session, nullptr, &error);
  return ToStatus(error);
}

absl::Status Failures::RecordStatus(const std::string& tenant, const FailureOrigin& failure,
                                    const absl::Status& status) {
  if (status.ok()) return status;
  Error error = ErrorOf(status);
  if (error.id != ErrorId()) return status;
  Record(tenant, failure, &error);
  return ToStatus(error);
}

void Failures::NoteGivenUp(World* world, const LaunchedInstance& instance, Ticket ticket,
                           absl::Time now) {
  using Where = std::pair<int32_t, absl::string_view>;
  for (const LaunchedInstance::GivenUp& part : instance.given_up) {
    if (world->given_up.size() >= World::kMostGivenUp) world->given_up.clear();
    const Where where(part.rank.value(), part.what->source);
    ErrorId& error_id = world->given_up[absl::Hash<Where>()(where)];
    if (!errors_->Find(error_id, "").has_value()) {
      Error error(Reason::kGradientLost);
      error.culprit.rank = part.rank.value();
      error.culprit.pid = world->members[static_cast<size_t>(part.rank.value())].pid;
      error.op = part.what->op;
      error.source = part.what->source;
      error.message = absl::StrCat(
          "rank ", part.rank.value(), " gave up its part of the gradient of ", part.what->what,
          " at ", part.what->source,
          " (dropped, used up or not recorded), and others asked for it: they have it without this "
          "rank's part of the loss, which is right for them, and what this rank differentiates "
          "there lacks theirs. Call Backward there as well, or make the call under NoGrad");
      errors_->Record(world->tenant, &error);
      error_id = error.id;
    }
    Note(FlightKind::kGradientGivenUp, now, nullptr, world, Sequence(), ticket, error_id);
  }
}

void Failures::Note(FlightKind kind, absl::Time now, const Session* session, const World* world,
                    Sequence sequence, Ticket ticket, ErrorId error) {
  FlightEvent event;
  event.time = now;
  event.kind = kind;
  if (session != nullptr) event.session = session->id;
  if (world != nullptr) {
    event.world = world->id;
    if (world->formed()) event.epoch = world->agreement->epoch();
  }
  event.sequence = sequence;
  event.ticket = ticket;
  event.error = error;
  flight_.Add(event);
}

}  // namespace chorus::node
