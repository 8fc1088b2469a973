#include <cstdint>
#include <string>
#include <vector>

#include "core/autograd/testing/gradient_check.h"
#include "core/autograd/testing/reduction_check.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckAbandoned;
using testing::CheckAbandonedReductions;
using testing::CheckAdjoint;
using testing::CheckGradients;
using testing::CheckProductOfZeros;
using testing::CheckReductionDTypes;
using testing::CheckReductionGradients;
using testing::CheckReductionTexts;
using testing::CheckReductionValues;
using testing::InferText;
using testing::RankBuilder;
using testing::ReducingOp;
using Values = std::vector<ValueIndex>;
using Ints = std::vector<int64_t>;

const int32_t kRanks[] = {1, 2, 3, 5, 8};
const TensorType kX(DType::kF64, {2, 3});

TensorType Rows(int64_t n) { return TensorType(DType::kF64, {n, 3}); }

TEST(AllGatherTest, ShapeTable) {
  for (const bool list : {true, false}) {
    const std::string op = list ? "all_gather" : "all_gather_into_tensor";
    const auto infer = [&](const std::vector<TensorType>& xs, Ints counts = {}) {
      Collective c;
      c.kind = CollectiveKind::kAllGather;
      c.rank = GroupRank(1);
      c.counts = std::move(counts);
      return InferText(op, xs, {}, &c, 3);
    };
    EXPECT_EQ(infer({kX}), list ? "f64[2,3] f64[2,3] f64[2,3]" : "f64[6,3]");
    EXPECT_EQ(infer({kX, kX}), op + ": expected 1 input, got 2");
    EXPECT_EQ(infer({kX}, {4, 2, 0}), list ? "f64[4,3] f64[2,3] f64[0,3]" : "f64[6,3]");
    EXPECT_EQ(infer({kX}, {2, 4, 2}),
              op + ": expected 4 rows as input 0, by the counts, got f64[2,3]");
    EXPECT_EQ(infer({kX}, {2, 2}),
              op + ": expected 1 counts for each of 3 members, or none, got 2");
    EXPECT_EQ(infer({kX}, {2, 2, -3}),
              op + ": expected counts of 0 or more, 1099511627776 in all, got -3 as count 2");
    EXPECT_EQ(infer({kX}, {int64_t{1} << 62, 2, int64_t{1} << 62}),
              op + ": expected counts of 0 or more, 1099511627776 in all, got 4611686018427387904 "
                   "as count 0");
    // The counts are within bounds, what they make is not.
    EXPECT_EQ(infer({kX}, {int64_t{1} << 39, 2, 0}),
              op + ": expected a valid type as output 0, got f64[" +
                  (list ? "549755813888" : "549755813890") +
                  ",3] is larger than the limit of 1099511627776 bytes");
    const TensorType scalar(DType::kF64, {});
    const std::string no_rows =
        op + ": expected a tensor with rows, which has at least one dimension, got f64[]";
    EXPECT_EQ(infer({scalar}), list ? "f64[] f64[] f64[]" : no_rows);
    EXPECT_EQ(infer({scalar}, {1, 1, 1}),
              list ? op + ": expected 1 rows as input 0, by the counts, got f64[]" : no_rows);
  }
}

TEST(ReduceScatterTest, ShapeTable) {
  const auto infer = [](const std::vector<TensorType>& xs, int32_t ranks, Ints counts = {}) {
    Collective c;
    c.kind = CollectiveKind::kReduceScatter;
    c.reduction = Reduction::kSum;
    c.counts = std::move(counts);
    return InferText("reduce_scatter", xs, {}, &c, ranks);
  };
  EXPECT_EQ(infer({kX, kX}, 2), "f64[2,3]");
  EXPECT_EQ(infer({Rows(0), kX}, 2), "f64[0,3]");
  EXPECT_EQ(infer({kX, kX}, 3), "reduce_scatter: expected one input for each of 3 members, got 2");
  EXPECT_EQ(infer({kX, kX, kX}, 2),
            "reduce_scatter: expected one input for each of 2 members, got 3");
  EXPECT_EQ(infer({}, 3), "reduce_scatter: expected at least 1 inputs, got 0");
  EXPECT_EQ(infer({kX, TensorType(DType::kF64, {3, 2})}, 2),
            "reduce_scatter: expected inputs like f64[2,3] but for dimension 0, got f64[3,2] as "
            "input 1");
  EXPECT_EQ(infer({kX, kX}, 2, {2, 2}), "reduce_scatter: expected no counts, got 2");
}

TEST(ReduceScatterTensorTest, ShapeTable) {
  const auto infer = [](const TensorType& x, Ints counts = {}) {
    Collective c;
    c.kind = CollectiveKind::kReduceScatter;
    c.rank = GroupRank(1);
    c.reduction = Reduction::kSum;
    c.counts = std::move(counts);
    return InferText("reduce_scatter_tensor", {x}, {}, &c, 3);
  };
  EXPECT_EQ(infer(Rows(6)), "f64[2,3]");
  EXPECT_EQ(infer(Rows(6), {1, 5, 0}), "f64[5,3]");
  EXPECT_EQ(infer(Rows(7)),
            "reduce_scatter_tensor: expected counts, or rows that divide by 3 members, got "
            "f64[7,3]");
  EXPECT_EQ(infer(Rows(7), {1, 5, 0}),
            "reduce_scatter_tensor: expected 6 rows as input 0, by the counts, got f64[7,3]");
  EXPECT_EQ(infer(Rows(6), {1, 5}),
            "reduce_scatter_tensor: expected 1 counts for each of 3 members, or none, got 2");
  EXPECT_EQ(infer(Rows(6), {1, 6, -1}),
            "reduce_scatter_tensor: expected counts of 0 or more, 1099511627776 in all, got -1 as "
            "count 2");
  EXPECT_EQ(infer(TensorType(DType::kF64, {})),
            "reduce_scatter_tensor: expected a tensor with rows, which has at least one dimension, "
            "got f64[]");
}

// Rows of member r's piece, made of x.
int64_t UnevenRows(int32_t r) { return r == 1 ? 0 : 1 + r % 3; }
Values UnevenAllGather(RankBuilder& b, const std::string& op, ValueIndex x) {
  RankBuilder::How how;
  for (int32_t r = 0; r < b.size(); ++r) how.counts.push_back(UnevenRows(r));
  const Attributes range = {
      {"axis", int64_t{0}}, {"begin", int64_t{0}}, {"end", UnevenRows(b.rank())}};
  return b.ApplyCollective(op, {b.Op("slice", {x}, range)}, how);
}

TEST(AllGatherTest, UnevenPiecesEqualTheirAdjoint) {
  for (const int32_t ranks : kRanks) {
    for (const char* op : {"all_gather", "all_gather_into_tensor"}) {
      CheckAdjoint(ranks, {Rows(3)},
                   [&](RankBuilder& b, const Values& x) { return UnevenAllGather(b, op, x[0]); });
      CheckAdjoint(ranks, {kX},
                   [&](RankBuilder& b, const Values& x) { return b.ApplyCollective(op, {x[0]}); });
    }
  }
}

// Lists and tensors meet, in forward and in backward.
TEST(AllGatherTest, FormsMeetInOneInstance) {
  for (const int32_t ranks : {2, 3, 5}) {
    CheckGradients(ranks, {Rows(3)}, [&](RankBuilder& b, const Values& x) {
      const bool list = b.rank() % 2 == 1;
      const std::string op = list ? "all_gather" : "all_gather_into_tensor";
      Values parts = UnevenAllGather(b, op, b.Op("sin", {x[0]}));
      for (ValueIndex& part : parts) part = b.Op("mul", {part, part});
      const ReducingOp back{list ? "reduce_scatter" : "reduce_scatter_tensor", true};
      const ValueIndex whole = list ? b.Op("concat", parts, {{"axis", int64_t{0}}}) : parts[0];
      const ValueIndex y = back.ApplyReduction(b, Reduction::kProduct, whole)[0];
      return Values{b.Op("mul", {y, y}), whole};
    });
  }
}

TEST(AllGatherTest, AbandonedRanksCountAsZeros) {
  for (const int32_t ranks : {1, 2, 3}) {
    for (const char* op : {"all_gather", "all_gather_into_tensor"}) {
      CheckAbandoned(ranks, {Rows(3)},
                     [&](RankBuilder& b, const Values& x) { return UnevenAllGather(b, op, x[0]); });
    }
  }
}

TEST(AllGatherTest, EqualsItsAdjoint) {
  for (const int32_t ranks : kRanks) {
    CheckAdjoint(ranks, {kX}, [](RankBuilder& b, const Values& x) { return b.AllGather(x[0]); });
    // Each rank uses one of the results only.
    CheckAdjoint(ranks, {kX}, [](RankBuilder& b, const Values& x) {
      return Values{b.AllGather(x[0])[(b.rank() + 1) % b.size()]};
    });
  }
}

TEST(ReduceScatterTest, EqualsItsAdjoint) {
  for (const int32_t ranks : kRanks) {
    CheckAdjoint(ranks, std::vector<TensorType>(ranks, kX),
                 [](RankBuilder& b, const Values& x) { return Values{b.ReduceScatter(x)}; });
  }
}

TEST(AllGatherTest, GradientsEqualDifferencesBetweenLocalOps) {
  for (const int32_t ranks : kRanks) {
    CheckGradients(ranks, {kX}, [](RankBuilder& b, const Values& x) {
      Values parts = b.AllGather(b.Op("sin", x));
      for (ValueIndex& part : parts) part = b.Op("mul", {part, x[0]});
      const ValueIndex y = b.ReduceScatter(parts);
      return Values{b.Op("mul", {y, y})};
    });
  }
}

TEST(ReduceScatterTest, ReductionsTakeWhatTheyCan) {
  CheckReductionTexts("reduce_scatter");
  CheckReductionTexts("reduce_scatter_tensor");
}

TEST(ReduceScatterTest, EveryReductionsGradientsEqualDifferences) {
  for (const int32_t ranks : kRanks) {
    CheckReductionGradients(ranks, ReducingOp{"reduce_scatter"});
    CheckReductionGradients(ranks, ReducingOp{"reduce_scatter", true});
    CheckReductionGradients(ranks, ReducingOp{"reduce_scatter_tensor"});
    CheckReductionGradients(ranks, ReducingOp{"reduce_scatter_tensor", true});
  }
}

TEST(ReduceScatterTest, AProductOfZerosHasGradients) {
  CheckProductOfZeros(ReducingOp{"reduce_scatter"});
  CheckProductOfZeros(ReducingOp{"reduce_scatter", true});
  CheckProductOfZeros(ReducingOp{"reduce_scatter_tensor"});
  CheckProductOfZeros(ReducingOp{"reduce_scatter_tensor", true});
}

TEST(ReduceScatterTest, ValuesAndGradientsEqualTheFormulas) {
  CheckReductionValues(ReducingOp{"reduce_scatter"});
  CheckReductionValues(ReducingOp{"reduce_scatter", true});
  CheckReductionValues(ReducingOp{"reduce_scatter_tensor"});
  CheckReductionValues(ReducingOp{"reduce_scatter_tensor", true});
}

TEST(ReduceScatterTest, EachDTypeReducesInItsWay) {
  CheckReductionDTypes(ReducingOp{"reduce_scatter"});
  CheckReductionDTypes(ReducingOp{"reduce_scatter", true});
  CheckReductionDTypes(ReducingOp{"reduce_scatter_tensor"});
  CheckReductionDTypes(ReducingOp{"reduce_scatter_tensor", true});
}

TEST(ReduceScatterTest, AbandonedRanksCountAsZeros) {
  CheckAbandonedReductions(ReducingOp{"reduce_scatter"});
  CheckAbandonedReductions(ReducingOp{"reduce_scatter", true});
  CheckAbandonedReductions(ReducingOp{"reduce_scatter_tensor"});
  CheckAbandonedReductions(ReducingOp{"reduce_scatter_tensor", true});
}

}  // namespace
}  // namespace chorus
