// Which images are in which batch.
#include "examples/07_resnet/images.h"

#include <cstdint>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/job.h"

namespace resnet {
namespace {

using chorus::conformance::Job;
using chorus::conformance::Values;
using ::testing::HasSubstr;

TEST(ImagesTest, AnEpochHasEveryImageOnceAndTheNextAnotherOrder) {
  Job job({"Host", chorus::conformance::DirectCluster("host")}, 1);
  const chorus::World& world = job.world(0);
  constexpr int64_t kSize = 1666;  // of 5,000 on each rank: two are left over
  std::vector<absl::StatusOr<Images>> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.push_back(Images::Open("t10k", world, kSize, r, 2));
    ASSERT_TRUE(ranks.back().ok()) << ranks.back().status();
  }
  std::vector<int> seen(10, 0);
  std::vector<std::vector<uint8_t>> labels;
  double edge[10] = {};
  for (int i = 0; i < 4; ++i) {
    for (absl::StatusOr<Images>& images : ranks) {
      const auto batch = images->Next();
      ASSERT_TRUE(batch.ok()) << batch.status();
      ASSERT_EQ(batch->size(), 2u);
      EXPECT_EQ((*batch)[0].shape(), chorus::Shape({kSize, 1, 28, 28}));
      labels.push_back(Values<uint8_t>((*batch)[1]));
      ASSERT_EQ(labels.back().size(), static_cast<size_t>(kSize));
      if (i == 3) continue;
      for (const uint8_t label : labels.back()) ++seen[label];
      const auto pixels = Values<uint8_t>((*batch)[0]);
      for (size_t n = 0; n < static_cast<size_t>(kSize); ++n) {
        for (size_t row = 0; row < 28; ++row) {
          edge[labels.back()[n]] += pixels[n * 784 + row * 28 + 3];
        }
      }
    }
  }
  // There are 1,000 of each class, and two on each rank are left over.
  int missing = 0;
  for (const int count : seen) {
    EXPECT_LE(count, 1000);
    missing += 1000 - count;
  }
  EXPECT_EQ(missing, 4);
  EXPECT_NE(labels[0], labels[1]);
  EXPECT_NE(labels[0], labels[2]);
  EXPECT_NE(labels[0], labels[6]);
  // Trousers are brighter in the middle than at the left edge, bags are wide: images and labels
  // belong together.
  EXPECT_LT(10 * edge[1], edge[8]);
}

TEST(ImagesTest, WhatThereIsNotIsAnError) {
  Job job({"Host", chorus::conformance::DirectCluster("host")}, 1);
  const auto error = [&](int64_t size, const std::string& directory = Images::kDirectory) {
    return std::string(
        Images::Open("t10k", job.world(0), size, 0, 3, directory).status().message());
  };
  EXPECT_THAT(error(1, "/no/such"), HasSubstr("/no/such/t10k-images-idx3-ubyte.gz"));
  EXPECT_THAT(error(3335), HasSubstr("at most 3334 images on each of 3 ranks, got 3335"));
  EXPECT_THAT(error(0), HasSubstr("got 0"));
}

}  // namespace
}  // namespace resnet
