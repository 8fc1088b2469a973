#include "core/runtime/size_class.h"

#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(SizeClassTest, EveryClassHoldsWhatItIsForAndWastesLittle) {
  int last = -1;
  int64_t last_bytes = 0;
  for (int64_t bytes = 0; bytes < 70000; ++bytes) {
    const SizeClass c = SizeClass::Of(bytes);
    ASSERT_GE(c.bytes, bytes);
    ASSERT_EQ(c.bytes % 64, 0);
    if (bytes > 512) {
      ASSERT_LE(c.bytes * 8, bytes * 9 + 8);
    }
    if (c.index == last) {
      ASSERT_EQ(c.bytes, last_bytes);
    } else {
      ASSERT_EQ(c.index, last + 1);
      ASSERT_GT(c.bytes, last_bytes);
    }
    last = c.index;
    last_bytes = c.bytes;
  }
  for (int power = 6; power <= 40; ++power) {
    EXPECT_EQ(SizeClass::Of(int64_t{1} << power).bytes, int64_t{1} << power);
  }
  EXPECT_LT(SizeClass::Of(SizeClass::kLargestBytes).index, SizeClass::kCount);
}

}  // namespace
}  // namespace chorus
