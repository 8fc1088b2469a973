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

}  // namespace

}  // namespace chorus
