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
using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;
using Ints = std::vector<int64_t>;

const TensorType kX(DType::kF32, {2, 3, 4});

TEST(ShapeOpsTest, ShapeTable) {
  EXPECT_EQ(InferText("copy", {kX}), "f32[2,3,4]");
  EXPECT_EQ(InferText("reshape", {kX}, {{"dims", Ints{6, 4}}}), "f32[6,4]");
  EXPECT_EQ(InferText("reshape", {TensorType(DType::kI64, {1})}, {{"dims", Ints{}}}), "i64[]");
  EXPECT_EQ(InferText("reshape", {TensorType(DType::kI64, {0, 3})}, {{"dims", Ints{0}}}), "i64[0]");
  EXPECT_EQ(InferText("reshape", {kX}, {{"dims", Ints{5, 5}}}),
            "reshape: expected dims with the 24 elements of f32[2,3,4], got [5,5]");
  EXPECT_EQ(InferText("reshape", {kX}, {{"dims", Ints{-6, -4}}}),
            "reshape: expected dims with the 24 elements of f32[2,3,4], got [-6,-4]");
  // 2^62 * 2^61 * ... would come out as 24 elements modulo 2^64.
  EXPECT_EQ(InferText("reshape", {kX}, {{"dims", Ints{int64_t{1} << 62, int64_t{1} << 62, 24}}})
                .substr(0, 70),
            "reshape: expected dims with the 24 elements of f32[2,3,4], got [461168");
  EXPECT_EQ(InferText("transpose", {kX}, {{"perm", Ints{2, 0, 1}}}), "f32[4,2,3]");
  for (const Ints& perm :
       {Ints{0, 1}, Ints{0, 1, 1}, Ints{0, 1, 3}, Ints{-1, 0, 1}, Ints{0, 1, 2, 3}}) {
    EXPECT_EQ(InferText("transpose", {kX}, {{"perm", perm}}).substr(0, 73),
              "transpose: expected a permutation of the 3 dimensions of f32[2,3,4], got ");
  }
}

TEST(ShapeOpsTest, EqualTheirAdjoints) {
  CheckAdjoint(1, {kX}, [](RankBuilder& b, const Values& x) { return Values{b.Op("copy", x)}; });
  CheckAdjoint(1, {kX}, [](RankBuilder& b, const Values& x) {
    return Values{b.Op("reshape", x, {{"dims", Ints{4, 6}}})};
  });
  for (const Ints& perm : {Ints{0, 1, 2}, Ints{1, 2, 0}, Ints{2, 0, 1}, Ints{2, 1, 0}}) {
    CheckAdjoint(1, {kX}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op("transpose", x, {{"perm", perm}})};
    });
  }
}

// The gradient of a value is on the value's device.
TEST(ShapeOpsTest, CopyBringsGradientsBackToTheirDevice) {
  CheckGradients(1, {TensorType(DType::kF64, {3})}, [](RankBuilder& b, const Values& x) {
    const ValueIndex there = b.Op("copy", x, {}, /*device_slot=*/1);
    const ValueIndex sin = b.Op("sin", {there}, {}, 1);
    const ValueIndex square = b.Op("mul", {sin, sin}, {}, 1);
    const ValueIndex back = b.Op("copy", {square}, {}, 0);
    return Values{b.Op("mul", {back, x[0]})};
  });
}

}  // namespace
}  // namespace chorus
