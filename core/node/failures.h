// Failures: recorded once, passed on with their id, one line each in the daemon's log; and the
// flight record.
//
// Threads: the node thread. Ownership: errors are copied into the record. Errors: none of its own.
#ifndef CHORUS_CORE_NODE_FAILURES_H_
#define CHORUS_CORE_NODE_FAILURES_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/collective/decisions.h"
#include "core/node/records.h"
#include "core/node/session.h"
#include "core/node/world.h"

namespace chorus::node {

class Failures {
 public:
  using LogLine = std::function<void(absl::string_view tenant, absl::string_view line)>;
  // `errors` outlives it. `log` gets one line a failure; null: none is written.
  Failures(ErrorStore* errors, LogLine log) : errors_(errors), log_(std::move(log)) {}
  Failures(const Failures&) = delete;
  Failures& operator=(const Failures&) = delete;

  // Gives `error` its id, unless it has one, and the log its line, unless the cause has one.
  // `session`: the call that failed is its; null: the failure is the world's. `world` may be null
  // where `session` is not.
  void Record(const Session* session, const World* world, Error* error);
  void Record(const std::string& tenant, const FailureOrigin& failure, Error* error);
  // `status`, with its error recorded unless it is OK, for the caller whose call has failed.
  absl::Status RecordStatus(const Session* session, const absl::Status& status);
  absl::Status RecordStatus(const std::string& tenant, const FailureOrigin& failure,
                            const absl::Status& status);

  // `error` has ended an epoch of `world`: all its ranks have been told of it. One that is not
  // recorded is no other's, and not looked for.
  void NoteTold(const World& world, const Error& error);
  // By its number, or because it is what came of one that was, which says so itself.
  bool HasTold(const World& world, const Error& error) const;

  // Into the flight record. `session` and `world` may be null.
  void Note(FlightKind kind, absl::Time now, const Session* session, const World* world,
            Sequence sequence = Sequence(), Ticket ticket = Ticket(), ErrorId error = ErrorId());
  // Notes the ranks whose part of a gradient of this launch is gone: their own results are smaller
  // than they could be. An error would hit each loop that drops a metric; but it is not silent. How
  // many these are. Some lines are told of in one launch; those beyond are counted in an event of
  // their own, and told of in launches that come.
  static constexpr int kMostToldAtOnce = 16;
  int64_t NoteGivenUp(World* world, absl::Span<const LaunchedInstance> instances, Ticket ticket,
                      absl::Time now);

  const FlightRecord& flight() const { return flight_; }

 private:
  ErrorId TellGivenUp(const World& world, const LaunchedInstance::GivenUp& part,
                      absl::string_view what_of_it);

  ErrorStore* const errors_;
  const LogLine log_;
  FlightRecord flight_{65536};
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_FAILURES_H_
