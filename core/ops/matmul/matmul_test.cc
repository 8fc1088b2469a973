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
using Ints = std::vector<int64_t>;
using Values = std::vector<ValueIndex>;

const Attributes kFlags[] = {{},
                             {{"transpose_a", int64_t{1}}},
                             {{"transpose_b", int64_t{1}}},
                             {{"transpose_a", int64_t{1}}, {"transpose_b", int64_t{1}}}};

TensorType Left(DType dtype, int flags) {
  return flags & 1 ? TensorType(dtype, {3, 2}) : TensorType(dtype, {2, 3});
}
TensorType Right(DType dtype, int flags) {
  return flags & 2 ? TensorType(dtype, {4, 3}) : TensorType(dtype, {3, 4});
}

TEST(MatmulTest, ShapeTable) {
  for (int flags = 0; flags < 4; ++flags) {
    EXPECT_EQ(
        InferText("matmul", {Left(DType::kF32, flags), Right(DType::kF32, flags)}, kFlags[flags]),
        "f32[2,4]");
  }
  const TensorType a(DType::kF32, {2, 3});
  EXPECT_EQ(InferText("matmul", {TensorType(DType::kI64, {2, 0}), TensorType(DType::kI64, {0, 5})}),
            "i64[2,5]");
  EXPECT_EQ(InferText("matmul", {a, a}),
            "matmul: expected as many columns on the left as rows on the right (transpose_a=0, "
            "transpose_b=0), got f32[2,3] and f32[2,3]");
  EXPECT_EQ(InferText("matmul", {a, TensorType(DType::kF32, {3})}),
            "matmul: expected two matrices, or two tensors of them with equal leading dimensions, "
            "got f32[2,3] and f32[3]");
  const std::string batches =
      "matmul: expected two matrices, or two tensors of them with equal leading dimensions, got ";
  const auto infer = [](const Ints& left, const Ints& right, int flags = 0) {
    TensorType l(DType::kBF16, {}), r(DType::kBF16, {});
    for (const int64_t size : left) l.dims.emplace_back(size);
    for (const int64_t size : right) r.dims.emplace_back(size);
    return InferText("matmul", {l, r}, kFlags[flags]);
  };
  EXPECT_EQ(infer({5, 2, 3}, {5, 3, 4}), "bf16[5,2,4]");
  EXPECT_EQ(infer({6, 5, 3, 2}, {6, 5, 4, 3}, 3), "bf16[6,5,2,4]");
  EXPECT_EQ(infer({0, 2, 3}, {0, 3, 4}), "bf16[0,2,4]");
  EXPECT_EQ(infer({5, 2, 3}, {6, 3, 4}), batches + "bf16[5,2,3] and bf16[6,3,4]");
  EXPECT_EQ(infer({1, 2, 3}, {6, 3, 4}), batches + "bf16[1,2,3] and bf16[6,3,4]");
  EXPECT_EQ(infer({5, 2, 3}, {3, 4}), batches + "bf16[5,2,3] and bf16[3,4]");
  EXPECT_EQ(infer({}, {}), batches + "bf16[] and bf16[]");
  EXPECT_EQ(infer({3}, {3}), batches + "bf16[3] and bf16[3]");
  EXPECT_EQ(infer({5, 2, 3}, {5, 2, 3}),
            "matmul: expected as many columns on the left as rows on the right (transpose_a=0, "
            "transpose_b=0), got bf16[5,2,3] and bf16[5,2,3]");
  EXPECT_EQ(InferText("matmul", {a, TensorType(DType::kF64, {3, 1})}),
            "matmul: expected inputs of one dtype, got f32[2,3] and f64[3,1]");
  EXPECT_EQ(InferText("matmul", {a, a}, {{"transpose_b", int64_t{2}}}),
            "matmul: expected 0 or 1 as 'transpose_b', got 2");
  EXPECT_EQ(InferText("matmul", {a, a}, {{"transpose_b", 1.0}}),
            "matmul: expected an integer as 'transpose_b', got a value of another kind");
  EXPECT_EQ(InferText("matmul", {a, a}, {{"alpha", int64_t{2}}}),
            "matmul: expected attributes among 'transpose_a' 'transpose_b', got 'alpha'");
}

// With that many dimensions of size 2 in front.
TensorType Batched(TensorType type, int batch_dims) {
  type.dims.insert(type.dims.begin(), static_cast<size_t>(batch_dims), Dim(2));
  return type;
}

TEST(MatmulTest, GradientsEqualDifferences) {
  for (int flags = 0; flags < 4; ++flags) {
    for (int batch_dims = 0; batch_dims < 3; ++batch_dims) {
      SCOPED_TRACE(flags);
      SCOPED_TRACE(batch_dims);
      CheckGradients(1,
                     {Batched(Left(DType::kF64, flags), batch_dims),
                      Batched(Right(DType::kF64, flags), batch_dims)},
                     [&](RankBuilder& b, const Values& x) {
                       return Values{b.Op("matmul", x, kFlags[flags])};
                     });
    }
  }
}

TEST(MatmulTest, EqualsItsAdjointInEachFactor) {
  for (int flags = 0; flags < 4; ++flags) {
    SCOPED_TRACE(flags);
    const auto filled = [&](RankBuilder& b, const TensorType& type) {
      Attributes attributes = TypeAttributes(type);
      attributes.push_back({"value", 3.0});
      return b.Op("fill", {}, attributes);
    };
    CheckAdjoint(1, {Left(DType::kF32, flags)}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op("matmul", {x[0], filled(b, Right(DType::kF32, flags))}, kFlags[flags])};
    });
    CheckAdjoint(1, {Right(DType::kF32, flags)}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op("matmul", {filled(b, Left(DType::kF32, flags)), x[0]}, kFlags[flags])};
    });
  }
}

}  // namespace
}  // namespace chorus
