// How long to look again and again before going to sleep.
//
// A wait that is over within a few microseconds is cheapest when the waiter keeps looking, giving
// the processor away between two looks (sched_yield); a longer one is cheapest asleep. Which it
// will be is guessed from what waits have lately been like, on two accounts:
//   the bound   of one spin follows recent waits: near their 90th percentile, doubled;
//   the budget  is processor time. A wait that ends while spinning earns `credit` (what going to
//               sleep and being woken would have cost) and pays what it used, one that does not
//               pays the bound, and time passing earns a small share. A waiter that
//               cannot pay a bound sleeps at once.
// So spinning goes on as long as it pays for itself, and a process whose waits last longer than
// that spends at most `credit` a wait plus `share` of its time on it. With the defaults and one
// wait a millisecond that is 2 % of the time. A waiter that has waited for at least as long as it
// has worked before has nothing better to do: a wait that ends while it spins costs it nothing.
// Processor time is counted by rounds: a round that took longer than looking takes went to another
// thread, which is what yielding is for.
//
// Threads: any number may spin with one object; the accounts are then approximate.
// Ownership: refers to the clock. Errors: none.
#ifndef CHORUS_CORE_BASE_ADAPTIVE_SPIN_H_
#define CHORUS_CORE_BASE_ADAPTIVE_SPIN_H_

#include <atomic>
#include <cstdint>

namespace chorus {

// Time and the processor, so that tests can replace them. All calls from any thread.
class SpinClock {
 public:
  virtual ~SpinClock() = default;
  virtual int64_t NowNanos() = 0;  // monotonic
  virtual void Yield() = 0;        // lets others run
  // The machine's.
  static SpinClock* Real();
};

struct AdaptiveSpinOptions {
  int64_t credit_ns = 16000;
  double share = 0.004;  // of the time that passes
  int64_t min_bound_ns = 10000;
  int64_t max_bound_ns = 400000;
  int64_t burst_ns = 800000;  // most that the budget holds, and what it starts with
  int64_t round_ns = 1000;    // most processor time that one look and one yield can take
};

class AdaptiveSpin {
 public:
  // `clock` outlives this.
  explicit AdaptiveSpin(SpinClock* clock, const AdaptiveSpinOptions& options = {});

  // Looks until `ready()`, at most for the bound. True: it is ready. False: sleep now, and tell
  // WaitEnded() afterwards; `*start_ns`, if given, is when the wait began, by the clock.
  // `ready` was called at least once.
  template <typename Ready>
  bool Spin(const Ready& ready, int64_t* start_ns = nullptr) {
    if (ready()) return true;
    const int64_t start = clock_->NowNanos();
    if (start_ns != nullptr) *start_ns = start;
    const int64_t bound = Begin(start);
    int64_t now = start;
    int64_t used = 0;
    while (now - start < bound) {
      clock_->Yield();
      const bool done = ready();
      const int64_t before = now;
      now = clock_->NowNanos();
      used += now - before < options_.round_ns ? now - before : options_.round_ns;
      if (done) {
        Succeeded(start, now, used, bound);
        return true;
      }
    }
    Earn(-bound);
    return false;
  }

  // After a false Spin: the whole wait lasted this long.
  void WaitEnded(int64_t waited_ns) {
    ended_.store(clock_->NowNanos(), std::memory_order_relaxed);
    Learn(waited_ns);
  }

  // For tests and diagnostics.
  int64_t bound_ns() const;
  int64_t budget_ns() const { return budget_.load(std::memory_order_relaxed); }

 private:
  // The bound of the spin that starts now; 0: none.
  int64_t Begin(int64_t now);
  void Succeeded(int64_t start, int64_t now, int64_t used_ns, int64_t bound);
  void Learn(int64_t waited_ns);
  void Earn(int64_t ns);

  SpinClock* const clock_;
  const AdaptiveSpinOptions options_;
  // Relaxed everywhere: an update lost between two threads only makes a guess a little worse.
  std::atomic<int64_t> budget_;
  std::atomic<int64_t> typical_;  // near the 90th percentile of recent waits
  std::atomic<int64_t> last_;     // when the share was last earned
  std::atomic<int64_t> ended_;    // when the last wait was over
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_ADAPTIVE_SPIN_H_
