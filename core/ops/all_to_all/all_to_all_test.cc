#include "core/ops/all_to_all/all_to_all.h"

#include <cstdint>
#include <string>
#include <vector>

#include "core/autograd/testing/gradient_check.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckAbandoned;
using testing::CheckAdjoint;
using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;
using Ints = std::vector<int64_t>;

const int32_t kRanks[] = {1, 2, 3, 5, 8};
const TensorType kX(DType::kF64, {2, 3});
const TensorType kScalar(DType::kF64, {});

TensorType Rows(int64_t n) { return TensorType(DType::kF64, {n, 3}); }

std::string Infer(absl::string_view op, const std::vector<TensorType>& xs, Ints counts = {}) {
  Collective c;
  c.kind = CollectiveKind::kAllToAll;
  c.rank = GroupRank(1);
  c.counts = std::move(counts);
  return InferText(op, xs, {}, &c, 3);
}

TEST(AllToAllTest, ShapeTable) {
  const auto infer = [](const std::vector<TensorType>& xs, Ints counts = {}) {
    return Infer("all_to_all", xs, std::move(counts));
  };
  EXPECT_EQ(infer({kX, kX, kX}), "f64[2,3] f64[2,3] f64[2,3]");
  EXPECT_EQ(infer({kScalar, kScalar, kScalar}), "f64[] f64[] f64[]");
  EXPECT_EQ(infer({Rows(1), kX, Rows(0)}, {4, 2, 7}), "f64[4,3] f64[2,3] f64[7,3]");
  EXPECT_EQ(infer({kX, kX}), "all_to_all: expected one input for each of 3 members, got 2");
  EXPECT_EQ(infer({kX, kX, kX, kX}), "all_to_all: expected one input for each of 3 members, got 4");
  EXPECT_EQ(infer({}), "all_to_all: expected at least 1 inputs, got 0");
  EXPECT_EQ(
      infer({kX, kX, Rows(3)}),
      "all_to_all: expected counts, or inputs of one type, f64[2,3], got f64[3,3] as input 2");
  EXPECT_EQ(infer({kX, kX, TensorType(DType::kF64, {2, 4})}, {2, 2, 2}),
            "all_to_all: expected inputs like f64[2,3] but for dimension 0, got f64[2,4] as input "
            "2");
  EXPECT_EQ(infer({kX, kX, kX}, {4, 3, 7}),
            "all_to_all: expected 3 rows as input 1, by the counts, got f64[2,3]");
  EXPECT_EQ(infer({kScalar, kScalar, kScalar}, {1, 1, 1}),
            "all_to_all: expected 1 rows as input 1, by the counts, got f64[]");
  EXPECT_EQ(infer({kX, kX, kX}, {4, 2}),
            "all_to_all: expected 1 counts for each of 3 members, or none, got 2");
  EXPECT_EQ(infer({kX, kX, kX}, {4, 2, -7}),
            "all_to_all: expected counts of 0 or more, 1099511627776 in all, got -7 as count 2");
  EXPECT_EQ(infer({kX, kX, kX}, {int64_t{1} << 40, 2, 0}),
            "all_to_all: expected counts of 0 or more, 1099511627776 in all, got 2 as count 1");
  // Each is within bounds, but not the value that they make.
  EXPECT_EQ(infer({kX, kX, kX}, {int64_t{1} << 39, 2, 0}),
            "all_to_all: expected a valid type as output 0, got f64[549755813888,3] is larger than "
            "the limit of 1099511627776 bytes");
}

TEST(AllToAllSingleTest, ShapeTable) {
  const auto infer = [](const TensorType& x, Ints counts = {}) {
    return Infer("all_to_all_single", {x}, std::move(counts));
  };
  EXPECT_EQ(infer(Rows(6)), "f64[6,3]");
  EXPECT_EQ(infer(Rows(6), {1, 5, 0, 4, 5, 7}), "f64[16,3]");
  EXPECT_EQ(infer(Rows(0), {0, 0, 0, 0, 0, 0}), "f64[0,3]");
  EXPECT_EQ(infer(Rows(7)),
            "all_to_all_single: expected counts, or rows that divide by 3 members, got f64[7,3]");
  EXPECT_EQ(infer(Rows(7), {1, 5, 0, 4, 5, 7}),
            "all_to_all_single: expected 6 rows as input 0, by the counts, got f64[7,3]");
  EXPECT_EQ(infer(Rows(6), {1, 5, 0, 4, 4, 7}),
            "all_to_all_single: expected 5 rows from rank 1, which it sends to itself, got 4");
  EXPECT_EQ(infer(Rows(6), {1, 5, 0}),
            "all_to_all_single: expected 2 counts for each of 3 members, or none, got 3");
  EXPECT_EQ(infer(Rows(6), {1, 5, 0, 4, 5, -1}),
            "all_to_all_single: expected counts of 0 or more, 1099511627776 in all, got -1 as "
            "count 5");
  EXPECT_EQ(infer(Rows(6), {1, 5, 0, 1, 5, int64_t{1} << 40}),
            "all_to_all_single: expected counts of 0 or more, 1099511627776 in all, got "
            "1099511627776 as count 5");
  EXPECT_EQ(infer(kScalar),
            "all_to_all_single: expected a tensor with rows, which has at least one dimension, got "
            "f64[]");
  EXPECT_EQ(Infer("all_to_all_single", {kX, kX, kX}), "all_to_all_single: expected 1 input, got 3");
}

// Rows that `from` sends to `to`: not symmetric, and sometimes none.
int64_t Sent(int32_t from, int32_t to) { return (2 * from + to) % 4; }

Values Exchange(RankBuilder& b, const std::string& op, ValueIndex x) {
  Values pieces;
  RankBuilder::How how;
  const bool single = op == "all_to_all_single";
  for (int32_t to = 0; to < b.size(); ++to) {
    const int64_t rows = Sent(b.rank(), to);
    pieces.push_back(
        b.Op("slice", {x}, {{"axis", int64_t{0}}, {"begin", int64_t{0}}, {"end", rows}}));
    if (single) how.counts.push_back(rows);
  }
  for (int32_t from = 0; from < b.size(); ++from) how.counts.push_back(Sent(from, b.rank()));
  if (!single) return b.ApplyCollective(op, pieces, how);
  return b.ApplyCollective(op, {b.Op("concat", pieces, {{"axis", int64_t{0}}})}, how);
}

TEST(AllToAllTest, EqualsItsAdjoint) {
  for (const int32_t ranks : kRanks) {
    for (const TensorType& type : {kX, kScalar, TensorType(DType::kF32, {0})}) {
      CheckAdjoint(
          ranks, std::vector<TensorType>(ranks, type),
          [](RankBuilder& b, const Values& x) { return b.ApplyCollective("all_to_all", x); });
    }
    // One of the results only.
    CheckAdjoint(ranks, std::vector<TensorType>(ranks, kX), [](RankBuilder& b, const Values& x) {
      return Values{b.ApplyCollective("all_to_all", x)[(b.rank() + 1) % b.size()]};
    });
    CheckAdjoint(ranks, {Rows(2 * ranks)}, [](RankBuilder& b, const Values& x) {
      return b.ApplyCollective("all_to_all_single", x);
    });
    if (ranks == 1) continue;  // member 0 would send itself nothing
    for (const char* op : {"all_to_all", "all_to_all_single"}) {
      CheckAdjoint(ranks, {Rows(3)},
                   [&](RankBuilder& b, const Values& x) { return Exchange(b, op, x[0]); });
    }
  }
}

// What a member sends is all of one size, what comes to it is not.
TEST(AllToAllTest, EvenPiecesMeetUnevenOnes) {
  for (const int32_t ranks : {2, 3, 5}) {
    CheckAdjoint(ranks, {Rows(ranks)}, [](RankBuilder& b, const Values& x) {
      const ValueIndex piece =
          b.Op("slice", {x[0]},
               {{"axis", int64_t{0}}, {"begin", int64_t{0}}, {"end", int64_t{1} + b.rank()}});
      RankBuilder::How how;
      for (int32_t from = 0; from < b.size(); ++from) how.counts.push_back(1 + from);
      return b.ApplyCollective("all_to_all", Values(b.size(), piece), how);
    });
  }
}

// The two forms meet, in forward and in backward.
TEST(AllToAllTest, FormsMeetInOneInstance) {
  for (const int32_t ranks : {2, 3, 5}) {
    CheckGradients(ranks, {Rows(3)}, [&](RankBuilder& b, const Values& x) {
      const bool single = b.rank() % 2 == 1;
      Values y = Exchange(b, single ? "all_to_all_single" : "all_to_all", b.Op("sin", {x[0]}));
      for (ValueIndex& part : y) part = b.Op("mul", {part, part});
      return y;
    });
  }
}

TEST(AllToAllTest, AbandonedRanksCountAsZeros) {
  for (const int32_t ranks : {2, 3}) {
    for (const char* op : {"all_to_all", "all_to_all_single"}) {
      CheckAbandoned(ranks, {Rows(3)},
                     [&](RankBuilder& b, const Values& x) { return Exchange(b, op, x[0]); });
    }
  }
}

}  // namespace
}  // namespace chorus
