#include "benchmarks/pattern.h"

#include <vector>

#include "gtest/gtest.h"

namespace chorus {
namespace bench {
namespace {

TEST(PatternTest, SumsAreCheckedElementByElement) {
  const int64_t count = 1000;
  std::vector<float> sum(count);
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<float> one(count);
    FillPattern(rank, one.data(), count);
    EXPECT_TRUE(CheckPattern(rank, one.data(), count).ok());
    EXPECT_FALSE(CheckPattern(rank + 1, one.data(), count).ok());
    for (int64_t i = 0; i < count; ++i) {
      EXPECT_EQ(one[i], PatternValue(rank, i));
      sum[i] += one[i];
    }
  }
  EXPECT_TRUE(CheckPatternSum(3, sum.data(), count).ok());
  EXPECT_FALSE(CheckPatternSum(2, sum.data(), count).ok());
  for (const int64_t at : {int64_t{0}, int64_t{250}, int64_t{251}, count - 1}) {
    sum[at] += 1;
    const absl::Status status = CheckPatternSum(3, sum.data(), count);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_NE(status.message().find("element " + std::to_string(at) + ":"), std::string::npos);
    sum[at] -= 1;
  }
}

TEST(PatternTest, AMeanIsTheSumByTheRanks) {
  const int64_t count = 1000;
  std::vector<float> mean(count);
  for (int64_t i = 0; i < count; ++i) {
    mean[i] = (PatternValue(0, i) + PatternValue(1, i) + PatternValue(2, i)) / 3;
  }
  EXPECT_TRUE(CheckPatternMean(3, mean.data(), count).ok());
  EXPECT_FALSE(CheckPatternMean(2, mean.data(), count).ok());
  EXPECT_FALSE(CheckPatternSum(3, mean.data(), count).ok());
  mean[999] += 1;
  EXPECT_EQ(CheckPatternMean(3, mean.data(), count).code(), absl::StatusCode::kDataLoss);
}

TEST(PatternTest, ReadAllDependsOnEveryWord) {
  std::vector<uint64_t> data(64, 1);
  const uint64_t before = ReadAll(data.data(), 512);
  for (size_t i = 0; i < data.size(); ++i) {
    ++data[i];
    EXPECT_NE(ReadAll(data.data(), 512), before) << i;
    --data[i];
  }
  // Also what is no whole line.
  const uint64_t of_four = ReadAll(data.data(), 4);
  reinterpret_cast<char*>(data.data())[3] = 1;
  EXPECT_NE(ReadAll(data.data(), 4), of_four);
}

TEST(PatternTest, MoreRoundsOfComputingAreOtherNumbers) {
  EXPECT_NE(Compute(1000), Compute(1001));
  EXPECT_GT(ComputeRoundsFor(1000000), 1000);
}

}  // namespace
}  // namespace bench
}  // namespace chorus
