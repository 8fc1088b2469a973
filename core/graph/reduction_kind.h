// The reductions between ranks: what "all_reduce SUM" says behind its collective's kind. How each
// is taken, in which order, is core/backend/reduction.h's.
//
// Users see it: client/collectives.h includes it.
//
// Threads: constants and pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_GRAPH_REDUCTION_KIND_H_
#define CHORUS_CORE_GRAPH_REDUCTION_KIND_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace chorus {

// Numbers are part of the wire formats: append only.
enum class Reduction : uint8_t {
  kNone = 0,
  kSum = 1,
  kAvg = 2,
  kProduct = 3,
  kMin = 4,
  kMax = 5,
  kPremulSum = 6,
  kBand = 7,
  kBor = 8,
  kBxor = 9,
};
inline constexpr Reduction kLastReduction = Reduction::kBxor;
absl::string_view ReductionName(Reduction reduction);  // "SUM"

// Whether zeros change nothing, so that members may be missing.
constexpr bool ZeroIsNeutral(Reduction reduction) {
  return reduction != Reduction::kProduct && reduction != Reduction::kMin &&
         reduction != Reduction::kMax && reduction != Reduction::kBand;
}

}  // namespace chorus

#endif  // CHORUS_CORE_GRAPH_REDUCTION_KIND_H_
