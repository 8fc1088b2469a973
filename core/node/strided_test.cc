#include "core/node/strided.h"

#include <limits>
#include <numeric>
#include <vector>

#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

std::vector<float> Copied(const TensorType& type, const std::vector<int64_t>& strides) {
  std::vector<float> from(100);
  std::iota(from.begin(), from.end(), 0.0f);
  std::vector<float> to(static_cast<size_t>(type.num_elements()));
  EXPECT_TRUE(CheckStrided(type, strides, 0, 400).ok());
  CopyStrided(type, strides, reinterpret_cast<const char*>(from.data()),
              reinterpret_cast<char*>(to.data()));
  return to;
}

TEST(StridedTest, RowMajorIsContiguous) {
  const TensorType type(DType::kF32, {2, 3});
  EXPECT_TRUE(CheckStrided(type, {}, 4, 28)->contiguous);
  EXPECT_TRUE(CheckStrided(type, {3, 1}, 0, 24)->contiguous);
  EXPECT_THAT(Copied(type, {}), testing::ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST(StridedTest, TransposedAndExpandedAreCopied) {
  const TensorType type(DType::kF32, {2, 3});
  EXPECT_FALSE(CheckStrided(type, {1, 2}, 0, 24)->contiguous);
  EXPECT_THAT(Copied(type, {1, 2}), testing::ElementsAre(0, 2, 4, 1, 3, 5));
  EXPECT_FALSE(CheckStrided(type, {0, 1}, 0, 12)->contiguous);
  EXPECT_THAT(Copied(type, {0, 1}), testing::ElementsAre(0, 1, 2, 0, 1, 2));
  EXPECT_THAT(Copied(type, {10, 2}), testing::ElementsAre(0, 2, 4, 10, 12, 14));
}

TEST(StridedTest, WhatLeavesTheArenaIsRefused) {
  const TensorType type(DType::kF32, {2, 3});
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_FALSE(CheckStrided(type, {}, 0, 23).ok());
  EXPECT_FALSE(CheckStrided(type, {}, 4, 24).ok());
  EXPECT_FALSE(CheckStrided(type, {}, -4, 24).ok());
  EXPECT_FALSE(CheckStrided(type, {}, huge, 24).ok());
  EXPECT_FALSE(CheckStrided(type, {4, 1}, 0, 24).ok());
  EXPECT_FALSE(CheckStrided(type, {huge, 1}, 0, 24).ok());
  EXPECT_FALSE(CheckStrided(type, {huge / 2, huge / 4}, 0, 24).ok());
  EXPECT_FALSE(CheckStrided(type, {-1, 1}, 0, 24).ok());
  EXPECT_FALSE(CheckStrided(type, {1}, 0, 24).ok());
}

TEST(StridedTest, NoElementsFitAnywhere) {
  EXPECT_TRUE(CheckStrided(TensorType(DType::kF32, {0, 3}), {}, 0, 0).ok());
  EXPECT_TRUE(CheckStrided(TensorType(DType::kF32, {}), {}, 0, 4)->contiguous);
  EXPECT_FALSE(CheckStrided(TensorType(DType::kF32, {}), {}, 0, 3).ok());
}

}  // namespace
}  // namespace chorus::node
