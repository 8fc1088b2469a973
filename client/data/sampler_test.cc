#include "chorus/data/sampler.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Options = DistributedSampler::Options;
using Indices = std::vector<int64_t>;

std::shared_ptr<DistributedSampler> Make(int64_t size, int rank, int replicas, bool shuffle,
                                         bool drop_last = false, uint64_t seed = 5) {
  Options options;
  options.rank = rank;
  options.replicas = replicas;
  options.shuffle = shuffle;
  options.drop_last = drop_last;
  options.seed = seed;
  return *DistributedSampler::Create(size, options);
}

Indices All(const Sampler& sampler) {
  Indices all;
  for (int64_t i = 0; i < sampler.size(); ++i) all.push_back(sampler.At(i));
  return all;
}

TEST(EpochOrderTest, APermutationThatIsTheSameEverywhere) {
  for (const int64_t size : {0, 1, 2, 97, 1000}) {
    Indices order = EpochOrder(size, 7, 2);
    EXPECT_EQ(order, EpochOrder(size, 7, 2));
    std::sort(order.begin(), order.end());
    Indices expected(static_cast<size_t>(size));
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(order, expected);
  }
  EXPECT_NE(EpochOrder(1000, 7, 2), EpochOrder(1000, 7, 3));
  EXPECT_NE(EpochOrder(1000, 7, 2), EpochOrder(1000, 8, 2));
  // Seed and epoch are not added up.
  EXPECT_NE(EpochOrder(1000, 7, 3), EpochOrder(1000, 8, 2));
  EXPECT_THAT(EpochOrder(8, 1, 0), ElementsAre(4, 2, 0, 5, 6, 1, 7, 3));
}

// Each of the 24 orders of four comes about as often as the others: of 24,000, 1,000 +- 31 each.
TEST(EpochOrderTest, EveryOrderIsAsLikely) {
  std::map<Indices, int> counts;
  for (int64_t epoch = 0; epoch < 24000; ++epoch) ++counts[EpochOrder(4, 3, epoch)];
  EXPECT_EQ(counts.size(), 24u);
  for (const auto& count : counts) {
    EXPECT_GT(count.second, 850);
    EXPECT_LT(count.second, 1150);
  }
}

// PyTorch's own rule, by its words: the order, filled up from its beginning or cut, by turns.
Indices Naive(int64_t size, int rank, int replicas, Indices order, bool drop_last) {
  const auto round = static_cast<size_t>(replicas);
  if (drop_last) {
    order.resize(order.size() / round * round);
  } else {
    for (size_t i = 0; !order.empty() && order.size() % round != 0; ++i) order.push_back(order[i]);
  }
  Indices mine;
  for (size_t i = static_cast<size_t>(rank); i < order.size(); i += round) mine.push_back(order[i]);
  (void)size;
  return mine;
}

TEST(DistributedSamplerTest, RanksTakeTurnsAndGetAsMany) {
  for (const int64_t size : {0, 1, 2, 7, 24, 25}) {
    for (const int replicas : {1, 2, 3, 8}) {
      for (const bool drop_last : {false, true}) {
        for (const bool shuffle : {false, true}) {
          for (int rank = 0; rank < replicas; ++rank) {
            const auto sampler = Make(size, rank, replicas, shuffle, drop_last);
            for (const int64_t epoch : {0, 3}) {
              sampler->SetEpoch(epoch);
              Indices order = EpochOrder(size, 5, epoch);
              if (!shuffle) std::iota(order.begin(), order.end(), 0);
              EXPECT_EQ(All(*sampler), Naive(size, rank, replicas, order, drop_last))
                  << size << " samples, rank " << rank << " of " << replicas;
            }
          }
        }
      }
    }
  }
}

TEST(DistributedSamplerTest, ARestoredOneGoesOnAsIfNothingHadBeen) {
  for (const int64_t size : {1, 7, 24, 25}) {
    for (const int replicas : {1, 2, 3}) {
      for (const bool drop_last : {false, true}) {
        for (int rank = 0; rank < replicas; ++rank) {
          const auto whole = Make(size, rank, replicas, true, drop_last);
          whole->SetEpoch(4);
          const Indices expected = All(*whole);
          for (int64_t received = 0; received <= whole->size(); ++received) {
            // Of another seed and another rank: the state's counts, and this one's.
            State state = Make(size, 0, replicas, true, drop_last)->StateAfter(0);
            const auto saver = Make(size, replicas - 1, replicas, true, drop_last);
            saver->SetEpoch(4);
            state = saver->StateAfter(received);
            state["step"] = "12";
            const auto restored = Make(size, rank, replicas, true, drop_last, /*seed=*/99);
            ASSERT_TRUE(restored->Restore(state).ok());
            EXPECT_EQ(restored->epoch(), 4);
            EXPECT_EQ(All(*restored), Indices(expected.begin() + received, expected.end()));
            for (int64_t i = 0; i < restored->size(); ++i) {
              EXPECT_EQ(restored->SeedAt(i), whole->SeedAt(received + i));
            }
            // Once more, from the middle of the rest; and the next epoch is whole again.
            const auto again = Make(size, rank, replicas, true, drop_last, /*seed=*/1);
            const int64_t more = restored->size() / 2;
            ASSERT_TRUE(again->Restore(restored->StateAfter(more)).ok());
            EXPECT_EQ(All(*again), Indices(expected.begin() + received + more, expected.end()));
            again->SetEpoch(5);
            const auto next = Make(size, rank, replicas, true, drop_last);
            next->SetEpoch(5);
            EXPECT_EQ(All(*again), All(*next));
          }
        }
      }
    }
  }
}

// How often each sample is received in an epoch that `before` ranks begin and `after` others end.
std::map<int64_t, int> Counts(int64_t size, int before, int64_t received, int after,
                              bool drop_last) {
  std::map<int64_t, int> counts;
  State state;
  for (int rank = 0; rank < before; ++rank) {
    const auto sampler = Make(size, rank, before, true, drop_last);
    for (int64_t i = 0; i < received; ++i) ++counts[sampler->At(i)];
    state = sampler->StateAfter(received);
  }
  int64_t each = -1;
  for (int rank = 0; rank < after; ++rank) {
    const auto sampler = Make(size, rank, after, true, drop_last);
    EXPECT_TRUE(sampler->Restore(state).ok());
    for (const int64_t index : All(*sampler)) ++counts[index];
    EXPECT_TRUE(each < 0 || sampler->size() == each);
    each = sampler->size();
  }
  return counts;
}

TEST(DistributedSamplerTest, OtherRanksShareWhatIsLeftSoThatEachSampleComesOnce) {
  for (const int64_t size : {1, 13, 24, 101}) {
    for (const int before : {1, 2, 3, 5}) {
      for (const int after : {1, 2, 4, 7}) {
        for (const int64_t received : {int64_t{0}, size / before / 3, size / before}) {
          const std::map<int64_t, int> padded = Counts(size, before, received, after, false);
          int64_t more = 0;
          for (int64_t i = 0; i < size; ++i) {
            ASSERT_EQ(padded.count(i), 1u) << i << " of " << size << " is lost";
            more += padded.at(i) - 1;
          }
          EXPECT_LT(more, after);
          const std::map<int64_t, int> dropped = Counts(size, before, received, after, true);
          for (const auto& count : dropped) EXPECT_EQ(count.second, 1);
          EXPECT_GT(static_cast<int64_t>(dropped.size()), size - after);
        }
      }
    }
  }
}

TEST(DistributedSamplerTest, AFilledUpEpochThatEndedHasNothingLeftForOthers) {
  const auto sampler = Make(10, 0, 4, true);
  ASSERT_EQ(sampler->size(), 3);  // 12 of 10
  for (const int replicas : {1, 3, 4}) {
    const auto other = Make(10, replicas - 1, replicas, true);
    ASSERT_TRUE(other->Restore(sampler->StateAfter(3)).ok());
    EXPECT_EQ(other->size(), 0);
  }
}

TEST(DistributedSamplerTest, SeedsAreTheSamplesOwnInEachEpoch) {
  std::set<uint64_t> seeds;
  std::map<int64_t, uint64_t> of_index;
  for (int rank = 0; rank < 3; ++rank) {
    const auto sampler = Make(100, rank, 3, true);
    for (int64_t i = 0; i < sampler->size(); ++i) {
      const auto first = of_index.emplace(sampler->At(i), sampler->SeedAt(i));
      EXPECT_EQ(first.first->second, sampler->SeedAt(i));
      seeds.insert(sampler->SeedAt(i));
    }
    sampler->SetEpoch(1);
    for (int64_t i = 0; i < sampler->size(); ++i) EXPECT_EQ(seeds.count(sampler->SeedAt(i)), 0u);
  }
  EXPECT_EQ(seeds.size(), 100u);
  // Ranks of another number, and no shuffling, give a sample the same one.
  const auto alone = Make(100, 0, 1, false);
  EXPECT_EQ(alone->SeedAt(17), of_index.at(17));
}

TEST(DistributedSamplerTest, WhatMakesNoSenseIsRefusedAndChangesNothing) {
  const auto created = [](int64_t size, int rank, int replicas) {
    Options options;
    options.rank = rank;
    options.replicas = replicas;
    return std::string(DistributedSampler::Create(size, options).status().message());
  };
  EXPECT_THAT(created(-1, 0, 1), HasSubstr("0 samples or more, got -1"));
  EXPECT_THAT(created(5, 2, 2), HasSubstr("got rank 2 of 2"));
  EXPECT_THAT(created(5, -1, 2), HasSubstr("got rank -1 of 2"));
  EXPECT_THAT(created(5, 0, 0), HasSubstr("got rank 0 of 0"));

  const auto sampler = Make(10, 1, 2, true);
  sampler->SetEpoch(3);
  const Indices before = All(*sampler);
  const auto refused = [&](const std::string& key, const std::string& value) {
    State state = sampler->StateAfter(1);
    if (value.empty()) {
      state.erase(key);
    } else {
      state[key] = value;
    }
    const absl::Status status = sampler->Restore(state);
    EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType) << status;
    EXPECT_EQ(All(*sampler), before);
    EXPECT_EQ(sampler->epoch(), 3);
    return std::string(status.message());
  };
  for (const char* key : {"size", "shuffle", "seed", "epoch", "received"}) {
    const std::string name = absl::StrCat("sampler.", key);
    EXPECT_THAT(refused(name, ""), HasSubstr("\"" + name + "\" is missing"));
    EXPECT_THAT(refused(name, "1x"), HasSubstr("expected a number, got \"1x\""));
  }
  EXPECT_THAT(refused("sampler.size", "11"), HasSubstr("expected 10 samples, got 11"));
  EXPECT_THAT(refused("sampler.shuffle", "0"), HasSubstr("expected shuffle 1, got 0"));
  EXPECT_THAT(refused("sampler.epoch", "-1"), HasSubstr("no epoch -1"));
  EXPECT_THAT(refused("sampler.epoch", "9223372036854775807"), HasSubstr("no epoch 9223372036"));
  EXPECT_THAT(refused("sampler.received", "-1"), HasSubstr("with -1 samples received"));
  EXPECT_THAT(refused("sampler.received", "9223372036854775807"), HasSubstr("samples received"));
}

}  // namespace
}  // namespace data
}  // namespace chorus
