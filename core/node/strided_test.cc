#include "core/node/strided.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
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
  const auto copy = [&](int64_t begin, int64_t end) {
    CopyStrided(type, strides, begin, end, reinterpret_cast<const char*>(from.data()),
                reinterpret_cast<char*>(to.data()));
  };
  copy(0, type.num_elements());
  // In two parts it is the same, wherever they meet.
  const std::vector<float> whole = to;
  for (int64_t cut = 0; cut <= type.num_elements(); ++cut) {
    std::fill(to.begin(), to.end(), -1.0f);
    copy(cut, type.num_elements());
    copy(0, cut);
    EXPECT_EQ(to, whole) << "cut at " << cut;
  }
  return whole;
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
  // Dimensions that go on where the next one ends, or have one element, beside one that does not.
  EXPECT_THAT(Copied(TensorType(DType::kF32, {2, 1, 2, 2}), {10, 7, 2, 1}),
              testing::ElementsAre(0, 1, 2, 3, 10, 11, 12, 13));
  EXPECT_THAT(Copied(TensorType(DType::kF32, {2, 2, 2}), {0, 3, 20}),
              testing::ElementsAre(0, 20, 3, 23, 0, 20, 3, 23));
  EXPECT_THAT(Copied(TensorType(DType::kF32, {1, 1}), {5, 5}), testing::ElementsAre(0));
  EXPECT_THAT(Copied(TensorType(DType::kF32, {}), {}), testing::ElementsAre(0));
  EXPECT_THAT(Copied(TensorType(DType::kF32, {0, 2}), {2, 1}), testing::IsEmpty());
}

// Each byte of the copy is one of an element, whatever size elements have.
TEST(StridedTest, ElementsOfEverySizeAreCopiedWhole) {
  for (const DType dtype :
       {DType::kU8, DType::kF16, DType::kF32, DType::kF64, DType::kComplex128}) {
    const auto bytes = static_cast<size_t>(DTypeBytes(dtype));
    const TensorType type(dtype, {2, 3});
    std::vector<char> from(6 * bytes);
    std::iota(from.begin(), from.end(), static_cast<char>(0));
    std::vector<char> to(6 * bytes, -1);
    ASSERT_TRUE(CheckStrided(type, {1, 2}, 0, static_cast<int64_t>(from.size())).ok());
    CopyStrided(type, {1, 2}, 0, 6, from.data(), to.data());
    std::vector<char> expected;
    for (const size_t element : {0, 2, 4, 1, 3, 5}) {
      for (size_t b = 0; b < bytes; ++b) expected.push_back(static_cast<char>(element * bytes + b));
    }
    EXPECT_EQ(to, expected) << DTypeName(dtype);
  }
}

// What is spread comes back by a copy, whatever its cut, and nothing else is written.
TEST(StridedTest, SpreadingIsTheOtherWay) {
  const TensorType type(DType::kF32, {2, 3, 2});
  for (const std::vector<int64_t>& strides :
       std::vector<std::vector<int64_t>>{{}, {6, 2, 1}, {1, 2, 6}, {20, 3, 1}, {1, 20, 3}}) {
    ASSERT_TRUE(CheckNoOverlap(type, strides).ok());
    std::vector<float> from(12);
    std::iota(from.begin(), from.end(), 1.0f);
    for (int64_t cut = 0; cut <= 12; ++cut) {
      std::vector<float> spread(64, -1.0f);
      const auto part = [&](int64_t begin, int64_t end) {
        SpreadStrided(type, strides, begin, end, reinterpret_cast<const char*>(from.data()),
                      reinterpret_cast<char*>(spread.data()));
      };
      part(cut, 12);
      EXPECT_EQ(std::count(spread.begin(), spread.end(), -1.0f), 64 - (12 - cut));
      part(0, cut);
      EXPECT_EQ(std::count(spread.begin(), spread.end(), -1.0f), 64 - 12);
      std::vector<float> back(12);
      CopyStrided(type, strides, 0, 12, reinterpret_cast<const char*>(spread.data()),
                  reinterpret_cast<char*>(back.data()));
      EXPECT_EQ(back, from) << "cut at " << cut;
    }
  }
}

TEST(StridedTest, WhereElementsShareAPlaceNothingIsWritten) {
  const TensorType type(DType::kF32, {2, 3});
  EXPECT_TRUE(CheckNoOverlap(type, {1, 2}).ok());
  EXPECT_TRUE(CheckNoOverlap(type, {3, 1}).ok());
  EXPECT_TRUE(CheckNoOverlap(TensorType(DType::kF32, {2, 1}), {1, 0}).ok());
  EXPECT_TRUE(CheckNoOverlap(TensorType(DType::kF32, {0, 3}), {0, 0}).ok());
  for (const std::vector<int64_t>& strides :
       std::vector<std::vector<int64_t>>{{0, 1}, {2, 1}, {1, 1}, {1, 0}}) {
    EXPECT_FALSE(CheckNoOverlap(type, strides).ok());
  }
  EXPECT_THAT(std::string(CheckNoOverlap(type, {2, 1}).message()),
              testing::HasSubstr("dimension 0 goes on in steps of 2, expected at least 3"));
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
