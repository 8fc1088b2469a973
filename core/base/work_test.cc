#include "core/base/work.h"

#include <thread>

#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(WorkTest, TheLargestSliceIsOfItsThreadAlone) {
  std::thread([] {
    CountWork(1000);  // in no slice
    EXPECT_EQ(SliceWork(), 0);
    EXPECT_EQ(LargestSliceWork(), 0);
    {
      WorkSlice outer;
      CountWork(3);
      {
        WorkSlice inner;
        CountWork(5);
        CountWork(2);
        EXPECT_EQ(SliceWork(), 7);
        std::thread([] { CountWork(1000); }).join();
      }
      EXPECT_EQ(LargestSliceWork(), 7);
      CountWork(1);
      EXPECT_EQ(SliceWork(), 4);
    }
    EXPECT_EQ(LargestSliceWork(), 7);
    ForgetLargestSlice();
    EXPECT_EQ(LargestSliceWork(), 0);
    {
      WorkSlice next;
      CountWork(2);
    }
    EXPECT_EQ(LargestSliceWork(), 2);
  }).join();
  EXPECT_EQ(LargestSliceWork(), 0);
}

}  // namespace
}  // namespace chorus
