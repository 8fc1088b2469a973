#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/autograd/testing/gradient_check.h"
#include "core/autograd/testing/reduction_check.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "core/ops/testing/value.h"
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

// T(lo, n) of what is there.
absl::optional<float> TreeSum(const std::vector<absl::optional<float>>& x, size_t lo, size_t n) {
  if (n == 1) return x[lo];
  size_t p = 1;
  while (2 * p < n) p *= 2;
  const absl::optional<float> left = TreeSum(x, lo, p);
  const absl::optional<float> right = TreeSum(x, lo + p, n - p);
  if (left.has_value() && right.has_value()) return *left + *right;
  return left.has_value() ? left : right;
}

TEST(AllReduceTest, IsOneTreeOverAllPlacesForwardAndBackwardWhoeverIsAbsent) {
  const TensorType type(DType::kF32, {64});
  const auto element = [](size_t rank, size_t i) {
    return 1.0f / static_cast<float>(3 + 7 * rank + i) * (i % 2 == 0 ? 1e3f : 1.0f);
  };
  for (size_t ranks = 1; ranks <= 9; ++ranks) {
    for (size_t a = 0; a <= ranks; ++a) {
      for (size_t b = a; b <= ranks; ++b) {
        const size_t missing = a == ranks ? 0 : a == b ? 1 : 2;
        if ((a == ranks) != (b == ranks) || missing >= ranks) continue;
        for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg}) {
          SCOPED_TRACE(absl::StrCat(ReductionName(reduction), ", ", ranks, " ranks without ", a,
                                    " and ", b));
          std::vector<float> all;
          std::vector<float> present;
          for (size_t i = 0; i < 64; ++i) {
            std::vector<absl::optional<float>> x;
            for (size_t r = 0; r < ranks; ++r) x.push_back(element(r, i));
            const float divisor = reduction == Reduction::kAvg ? static_cast<float>(ranks) : 1;
            all.push_back(*TreeSum(x, 0, ranks) / divisor);
            if (a < ranks) x[a] = x[b] = absl::nullopt;
            present.push_back(*TreeSum(x, 0, ranks) / divisor);
          }
          std::vector<testing::RankCase> cases(ranks);
          for (size_t r = 0; r < ranks; ++r) {
            std::vector<float> x;
            for (size_t i = 0; i < 64; ++i) x.push_back(element(r, i));
            cases[r].inputs = {testing::MakeValue(type, x)};
            cases[r].grads = cases[r].inputs;
            cases[r].takes_part = r != a && r != b;
          }
          const auto results =
              testing::RunBackward(cases, [&](RankBuilder& builder, const Values& x) {
                RankBuilder::How how;
                how.reduction = reduction;
                return Values{builder.ApplyCollective("all_reduce", x, how)[0]};
              });
          ASSERT_EQ(results.size(), ranks);
          for (size_t r = 0; r < ranks; ++r) {
            EXPECT_EQ(testing::Elements<float>(results[r].outputs[0]), all);
            if (!cases[r].takes_part) continue;
            EXPECT_EQ(testing::Elements<float>(results[r].gradients[0]), present);
          }
        }
      }
    }
  }
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
