// Every other source of this test is one public header: that they compile is the test. What runs is
// that one program can have them all, in the standard that it is built for.
#include "chorus/chorus.h"
#include "gtest/gtest.h"

namespace {

TEST(HeadersTest, AnUndefinedTensorSaysSoInEveryStandard) {
  EXPECT_FALSE(chorus::Tensor().defined());
  EXPECT_EQ(chorus::Tensor().Wait().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
