// Lets two threads start the same step at the same moment, again and again, for tests of races.
//
// Threads: two, as said. Ownership: it outlives both. Errors: none.
#ifndef CHORUS_CORE_TRANSPORT_RENDEZVOUS_H_
#define CHORUS_CORE_TRANSPORT_RENDEZVOUS_H_

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace chorus {

// Passes a few nanoseconds.
inline void Dither(uint64_t n) {
  for (; n > 0; --n) std::atomic_signal_fence(std::memory_order_seq_cst);
}

class Rendezvous {
 public:
  // `side` is 0 or 1. Returns when the other side has come as often.
  void Meet(int side) {
    const int64_t own_count = came_[side].count.fetch_add(1) + 1;
    for (int looks = 1; came_[1 - side].count.load() < own_count; ++looks) {
      // Only where both threads share a processor.
      if (looks % 4096 == 0) sched_yield();
    }
  }

  // Meets, then delays the side that has lately been too early, and both by a little at random:
  // what the two do next happens within nanoseconds of each other, first the one, then the other.
  void Race(int side, uint64_t random) {
    Meet(side);
    const int64_t delay = side == 0 ? delay_.load() : -delay_.load();
    Dither(random % 64 + static_cast<uint64_t>(delay > 0 ? delay : 0));
  }
  // After a race, by one of the sides: which of them was first.
  void First(int side) { delay_.fetch_add(side == 0 ? 4 : -4); }

 private:
  struct alignas(128) Count {
    std::atomic<int64_t> count{0};
  };
  Count came_[2];
  std::atomic<int64_t> delay_{0};  // of side 0; negative: of side 1
};

// Keeps the calling thread on the n-th processor that it may use, as long as this lives. Two
// threads that share a processor never race by the nanosecond, and the kernel likes to put them on
// one.
class Pinned {
 public:
  explicit Pinned(int n) {
    sched_getaffinity(0, sizeof(before_), &before_);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &before_) || n-- > 0) continue;
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      sched_setaffinity(0, sizeof(one), &one);
      return;
    }
  }
  ~Pinned() { sched_setaffinity(0, sizeof(before_), &before_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  cpu_set_t before_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_RENDEZVOUS_H_
