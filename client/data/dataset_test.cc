#include "chorus/data/dataset.h"

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "chorus/chorus.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <typename T>
std::vector<T> Read(const HostTensor& tensor) {
  const absl::StatusOr<std::vector<T>> values = tensor.Read<T>();
  EXPECT_TRUE(values.ok()) << values.status();
  return values.ok() ? *values : std::vector<T>();
}

std::shared_ptr<const TensorDataset> Three() {
  return *TensorDataset::Create({HostTensor::Of<float>({0, 1, 10, 11, 20, 21}, {3, 1, 2}),
                                 HostTensor::Of<int64_t>({7, 8, 9}, {3})},
                                {"image", "label"});
}

TEST(TensorDatasetTest, ASampleIsARowOfEachArray) {
  const std::shared_ptr<const TensorDataset> dataset = Three();
  EXPECT_EQ(dataset->size(), 3);
  EXPECT_THAT(dataset->names(), ElementsAre("image", "label"));
  for (int64_t i = 0; i < 3; ++i) {
    const absl::StatusOr<HostTensors> sample = dataset->Get(i, 0);
    ASSERT_TRUE(sample.ok()) << sample.status();
    ASSERT_EQ(sample->size(), 2u);
    EXPECT_EQ((*sample)[0].shape(), Shape({1, 2}));
    EXPECT_EQ((*sample)[1].shape(), Shape());
    const auto first = static_cast<float>(10 * i);
    EXPECT_THAT(Read<float>((*sample)[0]), ElementsAre(first, first + 1));
    EXPECT_THAT(Read<int64_t>((*sample)[1]), ElementsAre(7 + i));
  }
}

TEST(TensorDatasetTest, ASampleOutlivesItsDataset) {
  std::shared_ptr<const TensorDataset> dataset = Three();
  const absl::StatusOr<HostTensors> sample = dataset->Get(2, 0);
  dataset = nullptr;
  EXPECT_THAT(Read<float>((*sample)[0]), ElementsAre(20, 21));
}

TEST(TensorDatasetTest, RowsMayBeEmptyAndThereMayBeNone) {
  const auto empty = TensorDataset::Create({HostTensor::Of<float>({}, {0, 4})});
  ASSERT_TRUE(empty.ok()) << empty.status();
  EXPECT_EQ((*empty)->size(), 0);
  EXPECT_EQ(ErrorOf((*empty)->Get(0, 0).status()).reason, Reason::kBadType);
  const auto thin = TensorDataset::Create({HostTensor::Of<float>({}, {4, 0})});
  ASSERT_TRUE(thin.ok()) << thin.status();
  EXPECT_EQ((*(*thin)->Get(3, 0))[0].shape(), Shape({0}));
}

TEST(TensorDatasetTest, WhatDoesNotFitIsRefused) {
  const auto refused = [](HostTensors arrays, std::vector<std::string> names = {}) {
    const absl::Status status = TensorDataset::Create(std::move(arrays), std::move(names)).status();
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  };
  const HostTensor two = HostTensor::Of<float>({1, 2}, {2});
  EXPECT_THAT(refused({}), HasSubstr("expected an array or more, got none"));
  EXPECT_THAT(refused({two}, {"a", "b"}), HasSubstr("a name for each of 1 arrays, got 2"));
  EXPECT_THAT(refused({two, HostTensor::Of<float>({1, 2, 3}, {3})}),
              HasSubstr("array 1: expected 2 rows, as array 0 has, got 3"));
  EXPECT_THAT(refused({HostTensor::Of<float>({1}, {})}), HasSubstr("array 0: a tensor of no dim"));
  EXPECT_THAT(refused({HostTensor::Of<float>({1}, {2})}), HasSubstr("array 0: HostTensor"));
  EXPECT_THAT(refused({two, HostTensor()}), HasSubstr("array 1: an undefined"));
  for (const int64_t index : {-1, 3}) {
    EXPECT_THAT(std::string(Three()->Get(index, 0).status().message()),
                HasSubstr("a dataset of 3 samples has none with index " + std::to_string(index)));
  }
}

TEST(TransformedDatasetTest, SamplesAreChangedByTheirSeedAndNamed) {
  int calls = 0;
  const TransformedDataset dataset(
      Three(),
      [&calls](HostTensors sample, uint64_t seed) -> absl::StatusOr<HostTensors> {
        ++calls;
        if (seed == 13) return BadType("unlucky");
        sample.push_back(HostTensor::Of<int64_t>({static_cast<int64_t>(seed)}, {}));
        return sample;
      },
      {"image", "label", "seed"});
  EXPECT_EQ(dataset.size(), 3);
  EXPECT_THAT(dataset.names(), ElementsAre("image", "label", "seed"));
  const absl::StatusOr<HostTensors> sample = dataset.Get(1, 5);
  ASSERT_TRUE(sample.ok()) << sample.status();
  EXPECT_THAT(Read<int64_t>((*sample)[1]), ElementsAre(8));
  EXPECT_THAT(Read<int64_t>((*sample)[2]), ElementsAre(5));
  EXPECT_THAT(std::string(dataset.Get(1, 13).status().message()), HasSubstr("unlucky"));
  EXPECT_FALSE(dataset.Get(3, 5).ok());
  EXPECT_EQ(calls, 2);
  // Transforms of transforms; names go through.
  const TransformedDataset twice(
      std::make_shared<TransformedDataset>(
          Three(), [](HostTensors s, uint64_t) -> absl::StatusOr<HostTensors> { return s; }),
      [](HostTensors s, uint64_t) -> absl::StatusOr<HostTensors> { return HostTensors{s[1]}; });
  EXPECT_THAT(twice.names(), ElementsAre("image", "label"));
  EXPECT_EQ(twice.Get(0, 0)->size(), 1u);
}

TEST(TransformedDatasetTest, NoTransformIsRefused) {
  const absl::Status status = TransformedDataset(Three(), nullptr).Get(0, 0).status();
  EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType);
  EXPECT_THAT(std::string(status.message()), HasSubstr("expected a transform, got none"));
}

// Two that flip half of all images each must flip some twice, some once and some not at all.
TEST(TransformedDatasetTest, EachTransformOfTransformsHasASeedOfItsOwn) {
  std::vector<uint64_t> seeds;
  const auto keep = [&seeds](HostTensors sample, uint64_t seed) -> absl::StatusOr<HostTensors> {
    seeds.push_back(seed);
    return sample;
  };
  const auto once = std::make_shared<TransformedDataset>(Three(), keep);
  const auto twice = std::make_shared<TransformedDataset>(once, keep);
  const TransformedDataset thrice(twice, keep);
  for (const uint64_t seed : {uint64_t{0}, uint64_t{5}, ~uint64_t{0}}) {
    seeds.clear();
    ASSERT_TRUE(thrice.Get(1, seed).ok());
    const std::vector<uint64_t> first = seeds;
    ASSERT_EQ(first.size(), 3u);
    EXPECT_EQ(first[2], seed) << "the last one's is the sample's";
    EXPECT_EQ(std::set<uint64_t>(first.begin(), first.end()).size(), 3u);
    seeds.clear();
    ASSERT_TRUE(thrice.Get(1, seed).ok());
    EXPECT_EQ(seeds, first);
  }
}

}  // namespace
}  // namespace data
}  // namespace chorus
