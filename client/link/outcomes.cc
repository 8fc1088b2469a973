#include "client/link/outcomes.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

void Outcomes::Set(Sequence sequence, absl::Status status) {
  MutexLock lock(&mutex_);
  Entry& entry = entries_[static_cast<size_t>(sequence.value() % kKept)];
  if (entry.sequence >= sequence.value()) return;
  entry.sequence = sequence.value();
  entry.status = std::move(status);
  changed_.SignalAll();
}

void Outcomes::Lose(const absl::Status& why) {
  MutexLock lock(&mutex_);
  if (lost_.ok()) lost_ = why;
  changed_.SignalAll();
}

absl::StatusOr<absl::optional<absl::Status>> Outcomes::PeekLocked(Sequence sequence) const {
  const Entry& entry = entries_[static_cast<size_t>(sequence.value() % kKept)];
  if (entry.sequence == sequence.value()) return absl::optional<absl::Status>(entry.status);
  if (entry.sequence > sequence.value()) {
    return MakeError(
        Reason::kOutcomeForgotten,
        absl::StrCat("the outcome of command ", sequence.value(), " is no longer kept"));
  }
  return absl::optional<absl::Status>();
}

absl::StatusOr<absl::optional<absl::Status>> Outcomes::Peek(Sequence sequence) const {
  MutexLock lock(&mutex_);
  return PeekLocked(sequence);
}

absl::Status Outcomes::Wait(Sequence sequence, absl::Duration timeout) {
  const absl::Time deadline = SteadyNow() + timeout;
  MutexLock lock(&mutex_);
  while (true) {
    const absl::StatusOr<absl::optional<absl::Status>> outcome = PeekLocked(sequence);
    CHORUS_RETURN_IF_ERROR(outcome.status());
    if (outcome->has_value()) return **outcome;
    CHORUS_RETURN_IF_ERROR(lost_);
    const absl::Duration left = deadline - SteadyNow();
    if (left <= absl::ZeroDuration()) {
      return MakeError(Reason::kTransportTimeout,
                       absl::StrCat("command ", sequence.value(),
                                    " is not done yet; its outcome is still to be had"));
    }
    changed_.WaitFor(&mutex_, left);
  }
}

}  // namespace internal
}  // namespace chorus
