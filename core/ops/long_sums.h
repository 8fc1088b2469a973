// Sums of however many terms, for kernels of the host and of GPUs: at most kMostTerms are added up
// in f32, one after the other, and these sums in f64.
//
// Threads: plain values. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_LONG_SUMS_H_
#define CHORUS_CORE_OPS_LONG_SUMS_H_

#include <cstdint>
#include <type_traits>

#include "core/base/device.h"

namespace chorus {

// How many terms are added up in f32, one after the other, at most. What is small beside their sum
// gets lost, so that of more than 2^24 equal ones nothing more would be added: such parts are put
// together in f64.
constexpr int64_t kMostTerms = 4096;

// Of terms in A, which is float or double, up to kCount sums side by side. Those in f64 are added
// up as they are.
template <typename A, int64_t kCount = 1>
class LongSums {
 public:
  // Where each sum's next term is to be added, if it has one: at most one to each.
  CHORUS_DEVICE A* Next() {
    if constexpr (std::is_same<A, float>::value) {
      if (terms_ == kMostTerms) PutTogether();
      ++terms_;
    }
    return parts_;
  }
  // Most sums are short.
  CHORUS_DEVICE A At(int64_t i) const {
    return in_parts_ ? static_cast<A>(totals_[i] + static_cast<double>(parts_[i])) : parts_[i];
  }

 private:
  CHORUS_DEVICE void PutTogether() {
    for (int64_t i = 0; i < kCount; ++i) {
      totals_[i] += static_cast<double>(parts_[i]);
      parts_[i] = 0;
    }
    in_parts_ = true;
    terms_ = 0;
  }

  A parts_[kCount] = {};
  double totals_[kCount] = {};  // of the parts before
  bool in_parts_ = false;       // whether there are any
  int64_t terms_ = 0;           // in a part, at most
};

// Of what parts gave, [begin, end).
template <typename T>
CHORUS_DEVICE T SumOfResults(const T* from, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(from[i]);
  return static_cast<T>(sum);
}

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_LONG_SUMS_H_
