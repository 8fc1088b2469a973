#include "client/link/outcomes.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {

Outcomes::Outcomes() : entries_(static_cast<size_t>(kKept)) {
  // As if the sequences below 1 had come.
  for (int64_t i = 1; i < kKept; ++i) entries_[static_cast<size_t>(i)].sequence = i - kKept;
}

void Outcomes::Set(Sequence sequence, absl::Status status) {
  MutexLock lock(&mutex_);
  Entry& entry = entries_[static_cast<size_t>(sequence.value() % kKept)];
  if (entry.sequence >= sequence.value()) {
    if (late_.erase(sequence.value()) > 0) changed_.SignalAll();
    return;
  }
  for (int64_t late = entry.sequence + kKept; late < sequence.value(); late += kKept) {
    late_.insert(late);
  }
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
  if (entry.sequence > sequence.value() && !late_.contains(sequence.value())) {
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
