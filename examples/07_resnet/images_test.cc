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

using chorus::Tensor;
using chorus::conformance::Job;
using chorus::conformance::Values;
using ::testing::HasSubstr;

TEST(ImagesTest, AnEpochHasEveryImageOnceAndTheNextAnotherOrder) {
  absl::StatusOr<Images> images = Images::Read("t10k");
  ASSERT_TRUE(images.ok()) << images.status();
  ASSERT_EQ(images->count(), 10000);
  Job job({"Host", chorus::conformance::DirectCluster("host")}, 1);
  const chorus::World& world = job.world(0);
  constexpr int64_t kSize = 3333;  // an image is left over
  std::vector<int> seen(10, 0);
  std::vector<std::vector<uint8_t>> labels;
  for (const int64_t number : {0, 1, 2, 3, 0}) {
    const std::vector<Tensor> batch = images->Batch(world, number, kSize);
    ASSERT_EQ(batch.size(), 2u);
    EXPECT_EQ(batch[0].shape(), chorus::Shape({kSize, 1, 28, 28}));
    labels.push_back(Values<uint8_t>(batch[1]));
    ASSERT_EQ(labels.back().size(), static_cast<size_t>(kSize));
    if (labels.size() > 3) continue;
    for (const uint8_t label : labels.back()) ++seen[label];
  }
  // There are 1,000 of each class.
  int missing = 0;
  for (const int count : seen) {
    EXPECT_LE(count, 1000);
    missing += 1000 - count;
  }
  EXPECT_EQ(missing, 1);
  EXPECT_NE(labels[0], labels[1]);
  EXPECT_NE(labels[0], labels[3]);
  EXPECT_EQ(labels[0], labels[4]);
  // Trousers are brighter in the middle than at the left edge, bags are wide: images and labels
  // belong together.
  const std::vector<Tensor> batch = images->Batch(world, 0, 1000);
  const auto pixels = Values<uint8_t>(batch[0]);
  const auto classes = Values<uint8_t>(batch[1]);
  double edge[10] = {};
  for (size_t i = 0; i < 1000; ++i) {
    for (size_t row = 0; row < 28; ++row) edge[classes[i]] += pixels[i * 784 + row * 28 + 3];
  }
  EXPECT_LT(10 * edge[1], edge[8]);
}

TEST(ImagesTest, WhatThereIsNotIsAnError) {
  EXPECT_THAT(std::string(Images::Read("t10k", "/no/such").status().message()),
              HasSubstr("cannot open /no/such/t10k"));
  absl::StatusOr<Images> images = Images::Read("t10k");
  ASSERT_TRUE(images.ok()) << images.status();
  Job job({"Host", chorus::conformance::DirectCluster("host")}, 1);
  for (const int64_t size : {0, -1, 10001}) {
    for (const Tensor& tensor : images->Batch(job.world(0), 0, size)) {
      EXPECT_THAT(std::string(tensor.status().message()),
                  HasSubstr("expected batches of 1 to 10000 images, got " + std::to_string(size)));
    }
  }
}

}  // namespace
}  // namespace resnet
