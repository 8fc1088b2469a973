#include "core/base/release_queue.h"

#include <memory>
#include <vector>

#include "core/base/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Some pieces of work, each half a turn's.
struct Pieces {
  int left = 0;
  int name = 0;
  std::vector<int>* released = nullptr;

  bool Release() {
    for (; left > 0 && SliceHasTime(); --left) {
      CountWork(kTurnWork / 2);
      released->push_back(name);
    }
    return left == 0;
  }
};

class ReleaseQueueTest : public ::testing::Test {
 protected:
  bool Turn() {
    const WorkSlice slice;
    released_.clear();
    return queue_->Continue();
  }

  std::vector<int> released_;
  std::unique_ptr<ReleaseQueue<Pieces>> queue_ = std::make_unique<ReleaseQueue<Pieces>>();
};

TEST_F(ReleaseQueueTest, ReleasesTheOldestFirstATurnsShareAtATime) {
  {
    const WorkSlice slice;
    queue_->Add({1, 1, &released_});
    queue_->Add({5, 2, &released_});
    EXPECT_THAT(released_, ElementsAre(1, 2, 2)) << "as long as there is time";
    queue_->Add({2, 3, &released_});
  }
  EXPECT_TRUE(Turn());
  EXPECT_THAT(released_, ElementsAre(2, 2, 2));
  EXPECT_TRUE(Turn());
  EXPECT_THAT(released_, ElementsAre(3, 3));
  EXPECT_FALSE(Turn());
}

TEST_F(ReleaseQueueTest, WhoWaitsIsToldBehindWhatWasThere) {
  int told = 0;
  queue_->After([&] { ++told; });
  EXPECT_EQ(told, 1) << "there is nothing";
  {
    const WorkSlice slice;
    CountWork(2 * kTurnWork);
    queue_->Add({3, 1, &released_});
    queue_->After([&] { ++told; });
    queue_->Add({3, 2, &released_});
  }
  EXPECT_THAT(released_, IsEmpty());
  EXPECT_EQ(told, 1);
  EXPECT_TRUE(Turn());
  EXPECT_THAT(released_, ElementsAre(1, 1, 1));
  EXPECT_EQ(told, 2);
}

TEST_F(ReleaseQueueTest, WhatIsLeftAtItsEndIsReleased) {
  {
    const WorkSlice slice;
    CountWork(2 * kTurnWork);
    queue_->Add({9, 1, &released_});
  }
  queue_ = nullptr;
  EXPECT_EQ(released_.size(), 9u);
}

}  // namespace
}  // namespace chorus
