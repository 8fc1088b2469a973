// What the node remembers for diagnostics: errors and the flight record. Bounded, always on.
//
// Threads: the node thread. Ownership: copies of what they are given. Errors: none.
#ifndef CHORUS_CORE_NODE_RECORDS_H_
#define CHORUS_CORE_NODE_RECORDS_H_

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/container/node_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/error.h"
#include "core/base/ids.h"

namespace chorus::node {

enum class FlightKind : uint8_t {
  kSessionOpened = 1,
  kSessionEnded = 2,
  kWorldFormed = 3,
  kVoted = 4,
  kLaunched = 5,
  kPublished = 6,
  kFailed = 7,
  kEpochEnded = 8,
  kReformed = 9,
  // A gradient went on with zeros for a rank that had given its part up; `error` says which rank
  // and where.
  kGradientGivenUp = 10,
  // The ranks of an instance call it in different lines: `error` says which.
  kCallSitesDiffer = 11,
};
absl::string_view FlightKindName(FlightKind kind);

// One entry: fixed size, so that recording costs tens of nanoseconds.
struct FlightEvent {
  absl::Time time;
  FlightKind kind = FlightKind::kVoted;
  SessionId session;
  WorldId world;
  Sequence sequence;  // of the session's command
  Ticket ticket;
  Epoch epoch;
  ErrorId error;
};

// The newest `capacity` events, of all tenants together.
class FlightRecord {
 public:
  explicit FlightRecord(size_t capacity) : ring_(capacity) {}
  // `tenant`: whose session or world it is of; "": nobody's.
  void Add(const FlightEvent& event, absl::string_view tenant);
  // The newest last; at most `limit`.
  std::vector<FlightEvent> Latest(size_t limit) const;
  // Of those of `tenant`, also of its sessions and worlds that are gone. It looks at no others.
  std::vector<FlightEvent> LatestOf(absl::string_view tenant, size_t limit) const;

 private:
  struct Row {
    FlightEvent event;
    uint64_t before = 0;  // its tenant's event before this one, counted from 1; 0: it is the first
  };
  std::pair<const std::string, uint64_t>& LastOf(absl::string_view tenant);
  bool IsKept(uint64_t number) const { return number > 0 && number + ring_.size() > count_; }
  const Row& RowOf(uint64_t number) const {
    return ring_[static_cast<size_t>((number - 1) % ring_.size())];
  }

  std::vector<Row> ring_;
  uint64_t count_ = 0;
  // The last event of each tenant, counted from 1; and that tenant's of which the newest one is,
  // null: there is none.
  absl::node_hash_map<std::string, uint64_t> last_;
  std::pair<const std::string, uint64_t>* newest_ = nullptr;
};

// Errors that a node keeps.
inline constexpr size_t kMaxErrors = 2048;

// Gives errors their ids and keeps `capacity` of them, each in Error::kMaxBytes at most. Where
// there are more, the tenant that has most loses its oldest: nobody's failures displace another's.
// The same cause told to many runs is recorded once: so are failures that look the same.
class ErrorStore {
 public:
  explicit ErrorStore(size_t capacity) : capacity_(capacity) {}
  // Sets error->id. `tenant` may ask for it later. False: the cause was there already.
  bool Record(absl::string_view tenant, Error* error);
  absl::optional<Error> Find(ErrorId id, absl::string_view tenant) const;
  // Whether it is there still, of that tenant.
  bool Has(ErrorId id, absl::string_view tenant) const;

  // All ranks of `world` have been told of this failure, if it is kept: until another is recorded
  // that looks the same, of which they have not. Of one failure the last kMostWorldsTold are known.
  static constexpr size_t kMostWorldsTold = 16;
  void NoteTold(ErrorId id, WorldId world);
  bool HasTold(ErrorId id, WorldId world) const;

 private:
  struct Kept {
    ErrorId id;
    std::string bytes;  // encoded, without its id
  };
  using Errors = std::deque<Kept>;  // by id
  static const Kept* FindIn(const Errors& errors, ErrorId id);
  void ForgetOne();

  size_t capacity_;
  int64_t next_ = 1;
  size_t count_ = 0;
  absl::flat_hash_map<std::string, Errors> of_tenant_;                  // of those that have some
  absl::flat_hash_map<ErrorId, absl::InlinedVector<WorldId, 1>> told_;  // of those kept
};

// A failure for the daemon's log: one line (OneLine), whatever bytes its texts have. Numbers that
// are not known (-1) are "-", and so is an empty job.
struct FailureOrigin {
  absl::string_view job;
  int32_t rank = -1;
  int32_t pid = -1;
};
std::string FailureLine(const FailureOrigin& failure, const Error& error);

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_RECORDS_H_
