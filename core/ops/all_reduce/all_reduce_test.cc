#include <cstdint>
#include <string>
#include <vector>

#include "core/ops/op.h"
#include "core/ops/testing/gradient_check.h"
#include "core/ops/testing/rank_builder.h"
#include "core/ops/testing/reduction_check.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

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

const int32_t kRanks[] = {1, 2, 3, 5, 8};
const TensorType kX(DType::kF64, {2, 3});

Collective Sum(int32_t rank) {
  Collective c;
  c.kind = CollectiveKind::kAllReduce;
  c.rank = GroupRank(rank);
  c.reduction = Reduction::kSum;
  return c;
}

TEST(AllReduceTest, ShapeTable) {
  Collective c = Sum(2);
  EXPECT_EQ(InferText("all_reduce", {kX}, {}, &c, 3), "f64[2,3]");
  EXPECT_EQ(InferText("all_reduce", {TensorType(DType::kI64, {0})}, {}, &c, 3), "i64[0]");
  EXPECT_EQ(InferText("all_reduce", {kX}, {}, &c, 2),
            "all_reduce: expected a rank within the group of 2, got 2");
  EXPECT_EQ(InferText("all_reduce", {kX}), "all_reduce: expected a collective, got none");
  EXPECT_EQ(InferText("all_reduce", {TensorType(DType::kComplex64, {4})}, {}, &c, 3),
            "all_reduce: input 0 is c64[4]; this build computes with f16, bf16, f32, f64, i8, u8, "
            "i16, i32, i64 and bool");
  EXPECT_EQ(InferText("all_reduce", {TensorType(DType::kF32, {Dim::Symbol(0, 4)})}, {}, &c, 3),
            "all_reduce: input 0 is f32[s0<=4]; this build runs fixed dimensions only");
  EXPECT_EQ(InferText("add", {kX, kX}, {}, &c, 3),
            "add: expected no collective: it is a local op, got one");
  c.reduction = Reduction::kNone;
  EXPECT_EQ(InferText("all_reduce", {kX}, {}, &c, 3), "all_reduce: expected a reduction, got none");
  c = Sum(0);
  c.root = GroupRank(1);
  EXPECT_EQ(InferText("all_reduce", {kX}, {}, &c, 3), "all_reduce: expected no root, got root 1");
  c = Sum(0);
  c.tag = 4;
  EXPECT_EQ(InferText("all_reduce", {kX}, {}, &c, 3),
            "all_reduce: expected neither peer nor tag, got peer -1, tag 4");
  c = Sum(0);
  c.counts = {1, 2, 3};
  EXPECT_EQ(InferText("all_reduce", {kX}, {}, &c, 3), "all_reduce: expected no counts, got 3");
  c = Sum(0);
  c.kind = CollectiveKind::kBroadcast;
  EXPECT_EQ(InferText("all_reduce", {kX}, {}, &c, 3),
            "all_reduce: expected collective kind all_reduce, got broadcast");
}

TEST(AllReduceTest, EqualsItsAdjoint) {
  for (const int32_t ranks : kRanks) {
    for (const TensorType& type : {kX, TensorType(DType::kF32, {}), TensorType(DType::kF32, {0})}) {
      CheckAdjoint(ranks, {type},
                   [](RankBuilder& b, const Values& x) { return Values{b.AllReduce(x[0])}; });
    }
  }
}

TEST(AllReduceTest, GradientsEqualDifferencesBetweenLocalOps) {
  for (const int32_t ranks : kRanks) {
    CheckGradients(ranks, {kX, kX}, [](RankBuilder& b, const Values& x) {
      const ValueIndex y = b.AllReduce(b.Op("mul", {b.Op("sin", {x[0]}), x[1]}));
      const ValueIndex z = b.AllReduce(b.Op("mul", {y, x[1]}));
      return Values{b.Op("mul", {z, b.Op("cos", {y})})};
    });
  }
}

// One rank uses the result twice, the others once or not at all.
TEST(AllReduceTest, RanksMayComputeDifferentThings) {
  for (const int32_t ranks : kRanks) {
    CheckGradients(ranks, {kX}, [](RankBuilder& b, const Values& x) {
      const ValueIndex y = b.AllReduce(b.rank() == 1 ? b.Op("sin", {x[0]}) : x[0]);
      if (b.rank() == 0) return Values{b.Op("mul", {y, y}), y};
      if (b.rank() == 2) return Values{x[0]};
      return Values{b.Op("mul", {y, x[0]})};
    });
  }
}

TEST(AllReduceTest, ReductionsTakeWhatTheyCan) { CheckReductionTexts("all_reduce"); }

TEST(AllReduceTest, EveryReductionsGradientsEqualDifferences) {
  for (const int32_t ranks : kRanks) {
    CheckReductionGradients(ranks, ReducingOp{"all_reduce"});
  }
}

TEST(AllReduceTest, AProductOfZerosHasGradients) { CheckProductOfZeros(ReducingOp{"all_reduce"}); }

TEST(AllReduceTest, ValuesAndGradientsEqualTheFormulas) {
  CheckReductionValues(ReducingOp{"all_reduce"});
}

TEST(AllReduceTest, EachDTypeReducesInItsWay) { CheckReductionDTypes(ReducingOp{"all_reduce"}); }

TEST(AllReduceTest, AbandonedRanksCountAsZeros) {
  CheckAbandonedReductions(ReducingOp{"all_reduce"});
}

}  // namespace
}  // namespace chorus
