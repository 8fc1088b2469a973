#include "core/graph/collective_kind.h"

namespace chorus {
namespace {

constexpr bool RowsStandAtTheirNumbers() {
  for (size_t i = 0; i < kNumCollectiveKinds; ++i) {
    if (static_cast<size_t>(kCollectives[i].kind) != i) return false;
  }
  return true;
}
static_assert(RowsStandAtTheirNumbers(), "a kind's number is its row");

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
