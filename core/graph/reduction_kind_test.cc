#include "core/graph/reduction_kind.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::ElementsAre;

Reduction Numbered(int number) { return static_cast<Reduction>(number); }

TEST(ReductionKindTest, EachNumberHasItsName) {
  std::vector<std::string> names;
  for (int i = 0; i <= static_cast<int>(kLastReduction); ++i) {
    names.emplace_back(ReductionName(Numbered(i)));
  }
  EXPECT_THAT(names, ElementsAre("none", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM",
                                 "BAND", "BOR", "BXOR"));
  EXPECT_EQ(ReductionName(Numbered(static_cast<int>(kLastReduction) + 1)), "unknown");
  EXPECT_EQ(ReductionName(Numbered(255)), "unknown");
}

// Members may be missing from a sum, and from "or" and "xor"; a missing factor is not 0.
TEST(ReductionKindTest, ZeroChangesNoSum) {
  std::vector<std::string> neutral;
  for (int i = 1; i <= static_cast<int>(kLastReduction); ++i) {
    if (ZeroIsNeutral(Numbered(i))) neutral.emplace_back(ReductionName(Numbered(i)));
  }
  EXPECT_THAT(neutral, ElementsAre("SUM", "AVG", "PREMUL_SUM", "BOR", "BXOR"));
}

}  // namespace
}  // namespace chorus
