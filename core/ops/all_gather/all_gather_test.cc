#include <cstdint>
#include <string>
#include <vector>

#include "core/ops/op.h"
#include "core/ops/testing/gradient_check.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckAdjoint;
using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;

const int32_t kRanks[] = {1, 2, 3, 5};
const TensorType kX(DType::kF64, {2, 3});

TEST(AllGatherTest, ShapeTable) {
  Collective c;
  c.kind = CollectiveKind::kAllGather;
  EXPECT_EQ(InferText("all_gather", {kX}, {}, &c, 3), "f64[2,3] f64[2,3] f64[2,3]");
  EXPECT_EQ(InferText("all_gather", {kX, kX}, {}, &c, 3), "all_gather: expected 1 input, got 2");
}

TEST(ReduceScatterTest, ShapeTable) {
  Collective c;
  c.kind = CollectiveKind::kReduceScatter;
  c.reduction = Reduction::kSum;
  EXPECT_EQ(InferText("reduce_scatter", {kX, kX}, {}, &c, 2), "f64[2,3]");
  EXPECT_EQ(InferText("reduce_scatter", {kX, kX}, {}, &c, 3),
            "reduce_scatter: expected one input for each of 3 members, got 2");
  EXPECT_EQ(InferText("reduce_scatter", {}, {}, &c, 3),
            "reduce_scatter: expected at least 1 inputs, got 0");
  EXPECT_EQ(
      InferText("reduce_scatter", {kX, TensorType(DType::kF64, {3, 2})}, {}, &c, 2),
      "reduce_scatter: expected inputs like f64[2,3] but for dimension 0, got f64[3,2] as input 1");
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

}  // namespace
}  // namespace chorus
