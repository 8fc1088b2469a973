#include "core/base/adaptive_spin.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

namespace chorus {
namespace {

constexpr std::memory_order kRelaxed = std::memory_order_relaxed;

class RealClock : public SpinClock {
 public:
  int64_t NowNanos() override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  void Yield() override { sched_yield(); }
};

}  // namespace

SpinClock* SpinClock::Real() {
  static RealClock* const clock = new RealClock;  // lives as long as the process
  return clock;
}

AdaptiveSpin::AdaptiveSpin(SpinClock* clock, const AdaptiveSpinOptions& options)
    : clock_(clock),
      options_(options),
      budget_(options.burst_ns),
      typical_(options.max_bound_ns / 2),
      last_(clock->NowNanos()),
      ended_(last_.load(kRelaxed)) {}

int64_t AdaptiveSpin::bound_ns() const {
  return std::min(std::max(2 * typical_.load(kRelaxed), options_.min_bound_ns),
                  options_.max_bound_ns);
}

int64_t AdaptiveSpin::Begin(int64_t now) {
  const int64_t elapsed = now - last_.load(kRelaxed);
  last_.store(now, kRelaxed);
  Earn(static_cast<int64_t>(static_cast<double>(std::max<int64_t>(elapsed, 0)) * options_.share));
  const int64_t bound = bound_ns();
  return budget_.load(kRelaxed) >= bound ? bound : 0;
}

void AdaptiveSpin::Succeeded(int64_t start, int64_t now, int64_t used_ns, int64_t bound) {
  const int64_t wait_ns = now - start;
  const bool mostly_waits = wait_ns >= start - ended_.load(kRelaxed);
  ended_.store(now, kRelaxed);
  // A round that lasted beyond the bound gave the processor to a thread with long work: asleep this
  // thread would have been woken ahead of it.
  Earn(wait_ns <= bound ? options_.credit_ns - (mostly_waits ? 0 : used_ns) : -bound);
  Learn(wait_ns);
}

// A step up is 7 times a step down, so the value rests where one wait in eight is longer.
void AdaptiveSpin::Learn(int64_t waited_ns) {
  const int64_t typical = typical_.load(kRelaxed);
  const int64_t next = waited_ns > typical ? typical + typical / 4 + 1 : typical - typical / 28;
  typical_.store(std::min(std::max(next, options_.min_bound_ns / 2), options_.max_bound_ns),
                 kRelaxed);
}

void AdaptiveSpin::Earn(int64_t ns) {
  budget_.store(std::min(budget_.load(kRelaxed) + ns, options_.burst_ns), kRelaxed);
}

}  // namespace chorus
