#include "core/graph/reduction_kind.h"

#include <cstddef>

namespace chorus {
namespace {

constexpr absl::string_view kReductions[] = {"none", "SUM",        "AVG",  "PRODUCT", "MIN",
                                             "MAX",  "PREMUL_SUM", "BAND", "BOR",     "BXOR"};
static_assert(sizeof(kReductions) / sizeof(kReductions[0]) ==
                  static_cast<size_t>(kLastReduction) + 1,
              "a name for each");

}  // namespace

absl::string_view ReductionName(Reduction reduction) {
  return reduction <= kLastReduction ? kReductions[static_cast<size_t>(reduction)] : "unknown";
}

}  // namespace chorus
