#include "core/node/failures.h"

#include <cstdint>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "core/base/work.h"

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

// A part that is gone: looked for and noted; and its error, written and recorded.
constexpr int64_t kWorkPerGivenUp = 2;
constexpr int64_t kWorkPerTold = 64;

constexpr absl::string_view kWhatOfIt =
    ": they have it without this rank's part of the loss, which is right for them, and what this "
    "rank differentiates there lacks theirs. Call Backward there as well, or make the call under "
    "NoGrad";

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

int64_t Failures::NoteGivenUp(World* world, absl::Span<const LaunchedInstance> instances,
                              Ticket ticket, absl::Time now) {
  using Where = std::pair<int32_t, absl::string_view>;
  int64_t given_up = 0;
  int told = 0;
  const LaunchedInstance::GivenUp* first_untold = nullptr;
  int64_t untold = 0;
  // Where the last launch came to, if it did not tell of all: of a loop's each has its turn.
  const size_t begin = world->given_up_next < instances.size() ? world->given_up_next : 0;
  for (size_t i = 0; i < instances.size(); ++i) {
    const size_t at = begin + i < instances.size() ? begin + i : begin + i - instances.size();
    for (const LaunchedInstance::GivenUp& part : instances[at].given_up) {
      ++given_up;
      const uint64_t where = absl::Hash<Where>()(Where(part.rank.value(), part.what->source));
      auto it = world->given_up.find(where);
      if (it == world->given_up.end() || !errors_->Has(it->second, world->tenant)) {
        if (told == kMostToldAtOnce) {
          if (untold++ > 0) continue;
          first_untold = &part;
          world->given_up_next = at;
          continue;
        }
        ++told;
        if (it == world->given_up.end() && world->given_up.size() >= World::kMostGivenUp) {
          world->given_up.clear();
        }
        it = world->given_up.insert_or_assign(where, TellGivenUp(*world, part, kWhatOfIt)).first;
      }
      Note(FlightKind::kGradientGivenUp, now, nullptr, world, Sequence(), ticket, it->second);
    }
  }
  CountWork(kWorkPerGivenUp * given_up);
  if (untold == 0) return given_up;
  const ErrorId error_id = TellGivenUp(
      *world, *first_untold,
      absl::StrCat(". So it is with ", untold,
                   " parts of gradients of this launch, of which this "
                   "is the first: events of later launches of these calls tell of the others, ",
                   kMostToldAtOnce, " at a time"));
  Note(FlightKind::kGradientGivenUp, now, nullptr, world, Sequence(), ticket, error_id);
  return given_up;
}

ErrorId Failures::TellGivenUp(const World& world, const LaunchedInstance::GivenUp& part,
                              absl::string_view what_of_it) {
  CountWork(kWorkPerTold);
  Error error(Reason::kGradientLost);
  error.culprit.rank = part.rank.value();
  error.culprit.pid = world.members[static_cast<size_t>(part.rank.value())].pid;
  error.op = part.what->op;
  error.source = part.what->source;
  error.message =
      absl::StrCat("rank ", part.rank.value(), " gave up its part of the gradient of ",
                   part.what->what, " at ", part.what->source,
                   " (dropped, used up or not recorded), and others asked for it", what_of_it);
  errors_->Record(world.tenant, &error);
  return error.id;
}

void Failures::NoteTold(const World& world, const Error& error) {
  if (error.id == ErrorId() || !errors_->Has(error.id, world.tenant)) return;
  // One loss is the failure of all that stood on the device, each of which looks the same.
  if (error.reason == Reason::kDeviceLost) return;
  errors_->NoteTold(error.id, world.id);
}

bool Failures::HasTold(const World& world, const Error& error) const {
  const auto is_of_world = [&world](const Error::EndedEpoch& e) { return e.world == world.id; };
  return absl::c_any_of(error.ended, is_of_world) || errors_->HasTold(error.id, world.id);
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
  flight_.Add(event, session != nullptr ? absl::string_view(session->tenant->name)
                     : world != nullptr ? absl::string_view(world->tenant)
                                        : absl::string_view());
}

}  // namespace chorus::node
