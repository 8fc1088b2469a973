// Outcomes of commands, as gRPC transports learn them.
//
// Threads: any.
// Ownership: plain values. Errors: each function says them.
#ifndef CHORUS_CLIENT_LINK_OUTCOMES_H_
#define CHORUS_CLIENT_LINK_OUTCOMES_H_

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/ids.h"
#include "core/base/mutex.h"

namespace chorus {
namespace internal {

class Outcomes {
 public:
  // As many as a daemon remembers, and some more.
  static constexpr int64_t kKept = 4096;

  Outcomes();

  // Of one of the session's commands, each of which gets one, in any order.
  void Set(Sequence sequence, absl::Status status);
  // All waits, now and later, give `why`.
  void Lose(const absl::Status& why);

  // NOT_FOUND kOutcomeForgotten: it has come, and a later one has its slot.
  absl::StatusOr<absl::optional<absl::Status>> Peek(Sequence sequence) const;
  // The outcome. DEADLINE_EXCEEDED kTransportTimeout; `why` of Lose; kOutcomeForgotten.
  absl::Status Wait(Sequence sequence, absl::Duration timeout);

 private:
  struct Entry {
    int64_t sequence = 0;  // below 1: none has come
    absl::Status status;
  };
  absl::StatusOr<absl::optional<absl::Status>> PeekLocked(Sequence sequence) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);  // by sequence % kKept
  // Those that have not come though a later one has their slot.
  absl::flat_hash_set<int64_t> late_ ABSL_GUARDED_BY(mutex_);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_LINK_OUTCOMES_H_
