#include "core/collective/instance.h"

#include <algorithm>
#include <iostream>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/collective/test_rows.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

// Requests are of the step of the call.
InstanceKey Key(int32_t group, CallPosition at, const std::vector<int64_t>& path) {
  InstanceKey key;
  key.group = GroupId(group);
  key.since = Epoch(1);
  key.at = at;
  for (const int64_t request : path) key.path.push_back({at.step, request});
  return key;
}

InstanceKey Pair(int32_t source, int32_t destination, int64_t tag) {
  InstanceKey key = Key(2, {9, 1}, {});
  key.source = GroupRank(source);
  key.destination = GroupRank(destination);
  key.tag = tag;
  return key;
}

InstanceKey Since(int64_t epoch, InstanceKey key) {
  key.since = Epoch(epoch);
  return key;
}

TEST(CallPositionTest, OrderIsThatOfTheProgram) {
  const std::vector<CallPosition> in_order = {{0, 0, 0}, {0, 0, 1}, {0, 1, 0},
                                              {1, 0, 0}, {1, 0, 7}, {1, 2, 0}};
  for (size_t i = 0; i < in_order.size(); ++i) {
    for (size_t j = 0; j < in_order.size(); ++j) {
      EXPECT_EQ(in_order[i] < in_order[j], i < j) << i << " " << j;
      EXPECT_EQ(in_order[i] == in_order[j], i == j) << i << " " << j;
    }
  }
}

TEST(CallPositionTest, TextLeavesOutWhatIsZero) {
  EXPECT_EQ((CallPosition{0, 0, 0}).ToString(), "call 0");
  EXPECT_EQ((CallPosition{3, 17, 0}).ToString(), "step 3 call 17");
  EXPECT_EQ((CallPosition{3, 17, 2}).ToString(), "step 3 call 17 part 2");
  EXPECT_EQ((CallPosition{0, 17, 2}).ToString(), "call 17 part 2");
}

TEST(InstanceKeyTest, TextNamesAllOfIt) {
  EXPECT_EQ(Key(0, {3, 17}, {}).ToString(), "group 0 step 3 call 17");
  EXPECT_EQ(Key(0, {3, 17, 1}, {0, 1}).ToString(), "group 0 step 3 call 17 part 1, gradient 0.1");
  EXPECT_EQ(Key(0, {3, 17}, {0}).Gradient({5, 1}).ToString(),
            "group 0 step 3 call 17, gradient 0.1@5");
  EXPECT_EQ(Pair(1, 2, 7).ToString(), "group 2 from 1 to 2 tag 7 step 9 call 1");
  EXPECT_EQ(Since(5, Key(0, {0, 1}, {})).ToString(), "group 0 (since epoch 5) call 1");
}

TEST(InstanceKeyTest, GradientAndParentAreInverse) {
  const InstanceKey key = Key(1, {2, 3}, {4});
  EXPECT_EQ(key.Gradient({2, 5}), Key(1, {2, 3}, {4, 5}));
  EXPECT_NE(key.Gradient({3, 5}), Key(1, {2, 3}, {4, 5}));
  EXPECT_EQ(key.Gradient({3, 5}).Parent(), key);
  EXPECT_TRUE(key < key.Gradient({2, 0}));
  EXPECT_FALSE(key.Gradient({2, 0}) < key);
  EXPECT_TRUE(key.Gradient({2, 1}) < key.Gradient({3, 0}));
}

// A call is made in its own step, a gradient in that of its last request.
TEST(InstanceKeyTest, StepIsThatOfWhoAsks) {
  EXPECT_EQ(Key(0, {3, 1}, {}).step(), 3);
  EXPECT_EQ(Key(0, {3, 1}, {0}).step(), 3);
  EXPECT_EQ(Key(0, {3, 1}, {}).Gradient({5, 0}).step(), 5);
}

// Names of one position in the program are equal, and no two differ in nothing but what is
// compared: each field tells them apart.
TEST(InstanceKeyTest, EveryFieldTellsKeysApart) {
  const std::vector<InstanceKey> keys = {
      Key(0, {1, 2, 3}, {}),
      Key(1, {1, 2, 3}, {}),
      Key(0, {2, 2, 3}, {}),
      Key(0, {1, 3, 3}, {}),
      Key(0, {1, 2, 4}, {}),
      Since(2, Key(0, {1, 2, 3}, {})),
      Key(0, {1, 2, 3}, {0}),
      Key(0, {1, 2, 3}, {1}),
      Key(0, {1, 2, 3}, {}).Gradient({4, 0}),
      Pair(0, 1, 7),
      Pair(1, 0, 7),
      Pair(0, 1, 8),
      Key(0, {1, 2, 3}, {0, 0}),
      Pair(0, 1, 7).Gradient({9, 0}),
  };
  for (size_t i = 0; i < keys.size(); ++i) {
    for (size_t j = 0; j < keys.size(); ++j) {
      EXPECT_EQ(keys[i] == keys[j], i == j) << i << " " << j;
      EXPECT_EQ(keys[i] < keys[j] || keys[j] < keys[i], i != j) << i << " " << j;
      EXPECT_FALSE(keys[i] < keys[j] && keys[j] < keys[i]) << i << " " << j;
    }
  }
}

TEST(InstanceKeyTest, DecodesWhatItEncodes) {
  const int64_t most = kMaxCallNumber - 1;
  const std::vector<InstanceKey> keys = {
      Key(0, {0, 0}, {}), Since(1LL << 40, Key(7, {most, most, 2147483647}, {})),
      Key(1, {2, 3}, {0, most, 1}), Pair(0, 0, -5), Pair(3, 1, 1LL << 60).Gradient({11, 2})};
  ByteWriter out;
  for (const InstanceKey& key : keys) EncodeInstanceKey(key, &out);
  ByteReader in(out.bytes());
  for (const InstanceKey& key : keys) EXPECT_EQ(DecodeInstanceKey(&in), key);
  EXPECT_TRUE(in.Done());
}

TEST(InstanceKeyTest, EveryTruncationFails) {
  ByteWriter out;
  EncodeInstanceKey(Pair(3, 1, 300).Gradient({11, 2}), &out);
  for (size_t size = 0; size < out.size(); ++size) {
    ByteReader in(absl::string_view(out.bytes()).substr(0, size));
    DecodeInstanceKey(&in);
    EXPECT_FALSE(in.ok()) << size;
  }
}

TEST(InstanceKeyTest, NumbersOutOfRangeFail) {
  const auto fails = [](const InstanceKey& key) {
    ByteWriter out;
    EncodeInstanceKey(key, &out);
    ByteReader in(out.bytes());
    DecodeInstanceKey(&in);
    return !in.ok();
  };
  EXPECT_FALSE(fails(Key(0, {0, 0}, {})));
  EXPECT_TRUE(fails(Key(-1, {0, 0}, {})));
  EXPECT_TRUE(fails(Since(-1, Key(0, {0, 0}, {}))));
  EXPECT_TRUE(fails(Key(0, {-1, 0}, {})));
  EXPECT_TRUE(fails(Key(0, {0, -1}, {})));
  EXPECT_TRUE(fails(Key(0, {0, 0, -1}, {})));
  EXPECT_TRUE(fails(Key(0, {kMaxCallNumber, 0}, {})));
  EXPECT_TRUE(fails(Key(0, {0, kMaxCallNumber}, {})));
  EXPECT_TRUE(fails(Key(0, {0, 0}, {-1})));
  EXPECT_TRUE(fails(Key(0, {0, 0}, {kMaxCallNumber})));
  EXPECT_TRUE(fails(Key(0, {0, 0}, {}).Gradient({-1, 0})));
  EXPECT_TRUE(fails(Key(0, {0, 0}, {}).Gradient({kMaxCallNumber, 0})));
  EXPECT_TRUE(fails(Pair(0, -1, 0)));
  EXPECT_TRUE(fails(Key(0, {0, 0}, std::vector<int64_t>(kMaxGradientOrder + 1, 0))));
}

TEST(DescriptorTest, TextNamesWhatIsSet) {
  Descriptor descriptor;
  descriptor.kind = CollectiveKind::kAllReduce;
  descriptor.reduction = Reduction::kSum;
  descriptor.dtype = DType::kF32;
  descriptor.dims = {4};
  EXPECT_EQ(descriptor.ToString(), "all_reduce SUM f32[4]");
  descriptor = Descriptor();
  descriptor.kind = CollectiveKind::kBroadcast;
  descriptor.root = GroupRank(2);
  descriptor.dtype = DType::kF64;
  descriptor.dims = {3, 3};
  EXPECT_EQ(descriptor.ToString(), "broadcast root=2 f64[3,3]");
  descriptor = Descriptor();
  descriptor.kind = CollectiveKind::kBarrier;
  EXPECT_EQ(descriptor.ToString(), "barrier");
}

// --- What contradicts ---------------------------------------------------------------------------

Descriptor Rows(CollectiveKind kind, std::vector<int64_t> sends, std::vector<int64_t> receives) {
  Descriptor descriptor;
  descriptor.kind = kind;
  descriptor.dtype = DType::kF32;
  descriptor.dims = {Descriptor::kRowsDiffer, 3};
  descriptor.sends = std::move(sends);
  descriptor.receives = std::move(receives);
  if (IsReducing(kind)) descriptor.reduction = Reduction::kSum;
  return descriptor;
}

// Between members 0 and 2 of three.
std::string DifferenceText(const Descriptor& expected, const Descriptor& got) {
  const absl::optional<Difference> difference =
      FirstDifference(GroupRank(0), expected, GroupRank(2), got);
  if (!difference.has_value()) return "";
  EXPECT_EQ(difference->what, "counts");
  return difference->expected + " / " + difference->got;
}

// Member 1 says nothing: it is absent. What the others have for it must have one size.
TEST(FirstDifferenceTest, APieceThatAllGetHasTheSameRowsForAll) {
  const CollectiveKind kind = CollectiveKind::kAllGather;
  EXPECT_EQ(DifferenceText(Rows(kind, {2}, {2, 3, 2}), Rows(kind, {2}, {2, 3, 2})), "");
  EXPECT_EQ(DifferenceText(Rows(kind, {2}, {2, 3, 2}), Rows(kind, {2}, {2, 1000, 2})),
            "receives 3 rows from member 1 / receives 1000 rows from member 1");
  // One says that all pieces are alike.
  EXPECT_EQ(DifferenceText(Rows(kind, {2}, {2}), Rows(kind, {2}, {2, 1, 2})),
            "receives 2 rows from member 1 / receives 1 row from member 1");
  Descriptor alike = Rows(kind, {}, {});
  alike.dims = {2, 3};
  EXPECT_EQ(DifferenceText(alike, Rows(kind, {2}, {2, 0, 2})),
            "receives 2 rows from member 1 / receives 0 rows from member 1");
  EXPECT_EQ(DifferenceText(Rows(kind, {2}, {2, 0, 2}), alike),
            "receives 0 rows from member 1 / receives 2 rows from member 1");
  EXPECT_EQ(DifferenceText(alike, Rows(kind, {2}, {2})), "");
}

TEST(FirstDifferenceTest, APieceThatAllGiveHasTheSameRowsFromAll) {
  const CollectiveKind kind = CollectiveKind::kReduceScatter;
  EXPECT_EQ(DifferenceText(Rows(kind, {2, 3, 2}, {2}), Rows(kind, {2, 3, 2}, {2})), "");
  EXPECT_EQ(DifferenceText(Rows(kind, {2, 3, 2}, {2}), Rows(kind, {2, 5, 2}, {2})),
            "sends 3 rows to member 1 / sends 5 rows to member 1");
  // What each gets itself may differ.
  EXPECT_EQ(DifferenceText(Rows(kind, {2, 3, 7}, {2}), Rows(kind, {2, 3, 7}, {7})), "");
}

// Each of these pieces is one member's business with one other.
TEST(FirstDifferenceTest, PiecesOfPairsAreComparedBetweenTheirEnds) {
  const CollectiveKind each = CollectiveKind::kAllToAll;
  EXPECT_EQ(DifferenceText(Rows(each, {1, 2, 3}, {1, 5, 6}), Rows(each, {6, 7, 8}, {3, 9, 8})), "");
  EXPECT_EQ(DifferenceText(Rows(each, {1, 2, 3}, {1, 5, 6}), Rows(each, {6, 7, 8}, {4, 9, 8})),
            "sends 3 rows to member 2 / receives 4 rows from member 0");
  // Off the root nobody knows the others' pieces.
  const CollectiveKind gather = CollectiveKind::kGather;
  EXPECT_EQ(DifferenceText(Rows(gather, {1}, {1, 5, 6}), Rows(gather, {6}, {})), "");
  EXPECT_EQ(DifferenceText(Rows(gather, {1}, {}), Rows(gather, {6}, {})), "");
  const CollectiveKind scatter = CollectiveKind::kScatter;
  EXPECT_EQ(DifferenceText(Rows(scatter, {1, 5, 6}, {1}), Rows(scatter, {}, {6})), "");
  EXPECT_EQ(DifferenceText(Rows(scatter, {}, {1}), Rows(scatter, {}, {6})), "");
}

// A member with those that have come before it, of whom no two contradict each other; some are
// absent.
TEST(RowsCheckTest, FindsWhatIsThereWithAnyOfTheOthers) {
  int contradict = 0;
  int agree = 0;
  for (uint64_t seed = 1; seed <= 3000; ++seed) {
    SCOPED_TRACE(seed);
    const auto members = static_cast<int32_t>(1 + seed % 9);
    RandomRows rows(seed, members, /*mistakes_of=*/8);
    std::mt19937_64 random(seed);
    std::vector<int32_t> order(static_cast<size_t>(members));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    order.resize(static_cast<size_t>(members) - seed % 3 % static_cast<size_t>(members));
    std::vector<std::pair<GroupRank, Descriptor>> said;
    for (const int32_t next : order) {
      const GroupRank member(next);
      const Descriptor asked = rows.Of(next);
      const bool expected = std::any_of(said.begin(), said.end(), [&](const auto& other) {
        return FirstDifference(other.first, other.second, member, asked).has_value();
      });
      std::shuffle(said.begin(), said.end(), random);
      RowsCheck check(member, asked);
      const bool found = std::any_of(said.begin(), said.end(), [&](const auto& other) {
        return check.Contradicts(other.first, other.second);
      });
      EXPECT_EQ(found, expected) << next << ": " << asked.ToString();
      EXPECT_FALSE(check.is_silent() && expected);
      ++(expected ? contradict : agree);
      if (!expected) said.emplace_back(member, asked);
    }
  }
  std::cout << contradict << " contradict, " << agree << " agree" << std::endl;
  EXPECT_GT(contradict, 1000);
  EXPECT_GT(agree, 5000);
}

}  // namespace
}  // namespace chorus
