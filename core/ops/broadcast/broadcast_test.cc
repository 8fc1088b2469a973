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

const int32_t kRanks[] = {1, 2, 3, 5, 8};
const TensorType kX(DType::kF64, {2, 3});

Collective Rooted(CollectiveKind kind, int32_t rank, int32_t root) {
  Collective c;
  c.kind = kind;
  c.rank = GroupRank(rank);
  c.root = GroupRank(root);
  if (kind == CollectiveKind::kReduce) c.reduction = Reduction::kSum;
  return c;
}

TEST(BroadcastTest, ShapeTable) {
  Collective root = Rooted(CollectiveKind::kBroadcast, 1, 1);
  Collective other = Rooted(CollectiveKind::kBroadcast, 0, 1);
  EXPECT_EQ(InferText("broadcast", {kX}, {}, &root, 3), "f64[2,3]");
  EXPECT_EQ(InferText("broadcast", {}, TypeAttributes(kX), &other, 3), "f64[2,3]");
  EXPECT_EQ(InferText("broadcast", {}, {}, &root, 3),
            "broadcast: expected one input on the root, got none");
  EXPECT_EQ(InferText("broadcast", {kX}, TypeAttributes(kX), &root, 3),
            "broadcast: expected no attributes on the root, got 'dims' or 'dtype'");
  EXPECT_EQ(InferText("broadcast", {kX}, {}, &other, 3),
            "broadcast: expected no input on rank 0, as the root is 1, got one");
  EXPECT_EQ(
      InferText("broadcast", {}, {}, &other, 3),
      "broadcast: expected attributes 'dims' and 'dtype', for want of an input, got no 'dims'");
  EXPECT_EQ(InferText("broadcast", {kX, kX}, {}, &root, 3),
            "broadcast: expected 0 to 1 inputs, got 2");
  root.root = GroupRank(-1);
  EXPECT_EQ(InferText("broadcast", {kX}, {}, &root, 3),
            "broadcast: expected a root within the group of 3, got -1");
  other.reduction = Reduction::kSum;
  EXPECT_EQ(InferText("broadcast", {}, TypeAttributes(kX), &other, 3),
            "broadcast: expected no reduction, got SUM");
}

TEST(ReduceTest, ShapeTable) {
  const Collective root = Rooted(CollectiveKind::kReduce, 2, 2);
  const Collective other = Rooted(CollectiveKind::kReduce, 0, 2);
  EXPECT_EQ(InferText("reduce", {kX}, {}, &root, 3), "f64[2,3]");
  EXPECT_EQ(InferText("reduce", {kX}, {}, &other, 3), "");
  EXPECT_EQ(InferText("reduce", {kX}, {}, &root, 2),
            "reduce: expected a rank within the group of 2, got 2");
}

TEST(BroadcastTest, EqualsItsAdjoint) {
  for (const int32_t ranks : kRanks) {
    for (int32_t root = 0; root < ranks; ++root) {
      CheckAdjoint(ranks, {kX}, [&](RankBuilder& b, const Values& x) {
        return Values{b.Broadcast(x[0], kX, root)};
      });
    }
  }
}

TEST(ReduceTest, EqualsItsAdjoint) {
  for (const int32_t ranks : kRanks) {
    for (int32_t root = 0; root < ranks; ++root) {
      CheckAdjoint(ranks, {kX},
                   [&](RankBuilder& b, const Values& x) { return b.Reduce(x[0], root); });
    }
  }
}

TEST(BroadcastTest, GradientsEqualDifferencesBetweenLocalOps) {
  for (const int32_t ranks : kRanks) {
    const int32_t root = ranks - 1;
    CheckGradients(ranks, {kX, kX}, [&](RankBuilder& b, const Values& x) {
      const ValueIndex y = b.Broadcast(b.Op("sin", {x[0]}), kX, root);
      Values sums = b.Reduce(b.Op("mul", {y, b.Op("cos", {x[1]})}), 0);
      for (ValueIndex& sum : sums) sum = b.Op("mul", {sum, b.Op("sin", {sum})});
      return sums;
    });
  }
}

TEST(ReduceTest, ReductionsTakeWhatTheyCan) { CheckReductionTexts("reduce"); }

TEST(ReduceTest, EveryReductionsGradientsEqualDifferences) {
  for (const int32_t ranks : kRanks) {
    CheckReductionGradients(ranks, ReducingOp{"reduce"});
  }
}

TEST(ReduceTest, AProductOfZerosHasGradients) { CheckProductOfZeros(ReducingOp{"reduce"}); }

TEST(ReduceTest, ValuesAndGradientsEqualTheFormulas) { CheckReductionValues(ReducingOp{"reduce"}); }

TEST(ReduceTest, EachDTypeReducesInItsWay) { CheckReductionDTypes(ReducingOp{"reduce"}); }

TEST(ReduceTest, AbandonedRanksCountAsZeros) { CheckAbandonedReductions(ReducingOp{"reduce"}); }

TEST(BroadcastTest, AbandonedRanksCountAsZeros) {
  for (const int32_t ranks : {1, 2, 3}) {
    for (int32_t root = 0; root < ranks; ++root) {
      CheckAbandoned(ranks, {kX}, [&](RankBuilder& b, const Values& x) {
        return Values{b.Broadcast(x[0], kX, root)};
      });
    }
  }
}

}  // namespace
}  // namespace chorus
