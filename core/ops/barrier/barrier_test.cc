#include <cstdint>
#include <string>
#include <vector>

#include "core/autograd/testing/gradient_check.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckAdjoint;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;

TEST(BarrierTest, ShapeTable) {
  Collective c;
  c.kind = CollectiveKind::kBarrier;
  EXPECT_EQ(InferText("barrier", {}, {}, &c, 2), "");
  EXPECT_EQ(InferText("barrier", {TensorType(DType::kF32, {})}, {}, &c, 2),
            "barrier: expected 0 inputs, got 1");
}

TEST(BarrierTest, LetsGradientsPassByIt) {
  CheckAdjoint(3, {TensorType(DType::kF32, {2})}, [](RankBuilder& b, const Values& x) {
    b.Barrier();
    const ValueIndex y = b.AllReduce(x[0]);
    b.Barrier();
    return Values{y};
  });
}

}  // namespace
}  // namespace chorus
