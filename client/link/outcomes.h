// Outcomes of commands, as gRPC transports learn them.
//
// Threads: any.
// Ownership: plain values. Errors: each function says them.
#ifndef CHORUS_CLIENT_LINK_OUTCOMES_H_
#define CHORUS_CLIENT_LINK_OUTCOMES_H_

#include <cstdint>
#include <vector>

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

  void Set(Sequence sequence, absl::Status status);
  // All waits, now and later, give `why`.
  void Lose(const absl::Status& why);

  // NOT_FOUND kOutcomeForgotten: a later one has its place.
  absl::StatusOr<absl::optional<absl::Status>> Peek(Sequence sequence) const;
  // The outcome. DEADLINE_EXCEEDED kTransportTimeout; `why` of Lose; kOutcomeForgotten.
  absl::Status Wait(Sequence sequence, absl::Duration timeout);

 private:
  struct Entry {
    int64_t sequence = 0;
    absl::Status status;
  };
  absl::StatusOr<absl::optional<absl::Status>> PeekLocked(Sequence sequence) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_) = std::vector<Entry>(kKept);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_LINK_OUTCOMES_H_
