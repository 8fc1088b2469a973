#include "server/line_budget.h"

#include "gtest/gtest.h"

namespace chorus::server {
namespace {

TEST(LineBudgetTest, CountsWhatItLeavesOut) {
  LineBudget budget;
  const absl::Time start = absl::FromUnixSeconds(1000);
  int64_t left_out = -1;
  for (int i = 0; i < LineBudget::kLinesPerSecond; ++i) {
    ASSERT_TRUE(budget.Take(start, &left_out));
    ASSERT_EQ(left_out, 0);
  }
  for (int i = 0; i < 7; ++i) EXPECT_FALSE(budget.Take(start + absl::Milliseconds(999), &left_out));
  EXPECT_TRUE(budget.Take(start + absl::Seconds(1), &left_out));
  EXPECT_EQ(left_out, 7);
  EXPECT_TRUE(budget.Take(start + absl::Seconds(1), &left_out));
  EXPECT_EQ(left_out, 0);
}

}  // namespace
}  // namespace chorus::server
