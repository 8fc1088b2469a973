// What softmax needs of a row, as it comes out of any of its parts, for kernels of GPUs.
//
// Threads: plain values. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_SOFTMAX_EXP_SUM_H_
#define CHORUS_CORE_OPS_SOFTMAX_EXP_SUM_H_

#include <cmath>
#include <limits>

#include "core/base/device.h"

namespace chorus {
namespace cuda {

// The largest finite element, and the sum of exp(x - most) of all but that one, which is 1: added
// to small ones it would swallow them, and with them log_softmax of a class that is all but
// certain. A NaN or +inf makes the sum NaN; of nothing but -inf there is no most, and x - most is
// NaN.
template <typename A>
struct ExpSum {
  A most = -std::numeric_limits<A>::infinity();
  A beside = 0;

  CHORUS_DEVICE void Take(A x) {
    if (x == -std::numeric_limits<A>::infinity()) return;
    if (!(x - x == 0)) {
      beside += x - x;
      return;
    }
    // One exp, whichever of the two is the larger.
    const A above = x - most;
    const A exp = std::exp(above > 0 ? -above : above);
    beside = above > 0 ? (1 + beside) * exp : beside + exp;
    most = above > 0 ? x : most;
  }

  CHORUS_DEVICE void Merge(const ExpSum& other) {
    if (other.most == -std::numeric_limits<A>::infinity()) {
      beside += other.beside;
      return;
    }
    const A above = other.most - most;
    const A exp = std::exp(above > 0 ? -above : above);
    beside = above > 0 ? (1 + beside) * exp + other.beside : beside + (1 + other.beside) * exp;
    most = above > 0 ? other.most : most;
  }
};

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SOFTMAX_EXP_SUM_H_
