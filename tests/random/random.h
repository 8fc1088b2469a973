// Random draws, the same from the same seed with every standard library: the distributions of
// <random> are each library's own, and a program that fails is named by its seed.
//
// Threads: thread-compatible. Ownership: plain values. Errors: none; what is drawn from must not be
// empty.
#ifndef CHORUS_TESTS_RANDOM_RANDOM_H_
#define CHORUS_TESTS_RANDOM_RANDOM_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <utility>
#include <vector>

namespace chorus {
namespace random_programs {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  // In [0, n), for an n that is small beside 2^64.
  uint64_t Below(uint64_t n) { return engine_() % n; }
  // In [0, 1).
  double Unit() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  bool Chance(double p) { return Unit() < p; }
  // In [lo, hi].
  int Between(int lo, int hi) {
    return lo + static_cast<int>(Below(static_cast<uint64_t>(hi - lo + 1)));
  }
  template <typename T>
  T Any(const std::vector<T>& list) {
    return list[Below(list.size())];
  }
  template <typename T>
  T AnyOf(std::initializer_list<T> list) {
    return *(list.begin() + static_cast<std::ptrdiff_t>(Below(list.size())));
  }
  template <typename T>
  std::vector<T> Shuffled(std::vector<T> list) {
    for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[Below(i)]);
    return list;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_RANDOM_H_
