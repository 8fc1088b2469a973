#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/autograd/testing/gradient_check.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;

Attributes Axis(int64_t axis) { return {{"axis", axis}}; }

TEST(SoftmaxTest, ShapeTable) {
  for (const std::string op : {"softmax", "log_softmax"}) {
    const TensorType x(DType::kBF16, {2, 0, 5});
    EXPECT_EQ(InferText(op, {x}, Axis(2)), "bf16[2,0,5]");
    EXPECT_EQ(InferText(op, {x}, Axis(3)),
              op + ": expected an axis within the 3 dimensions of bf16[2,0,5], got 3");
    EXPECT_EQ(InferText(op, {x}, Axis(-1)),
              op + ": expected an axis within the 3 dimensions of bf16[2,0,5], got -1");
    EXPECT_EQ(InferText(op, {TensorType(DType::kF32, {})}, Axis(0)),
              op + ": expected an axis within the 0 dimensions of f32[], got 0");
    EXPECT_EQ(InferText(op, {x}), op + ": expected an integer as 'axis', got none");
    EXPECT_EQ(InferText(op, {TensorType(DType::kI32, {2})}, Axis(0)),
              op + ": input 0 is i32[2]; the op takes f16, bf16, f32 and f64");
  }
}

TEST(SoftmaxTest, ShapesOfCenter) {
  for (const std::string op : {"center", "center_grad", "softmax_grad"}) {
    const TensorType x(DType::kBF16, {2, 0, 5});
    EXPECT_EQ(InferText(op, {x, x}, Axis(2)), "bf16[2,0,5]");
    EXPECT_EQ(InferText(op, {x, x}, Axis(3)),
              op + ": expected an axis within the 3 dimensions of bf16[2,0,5], got 3");
    EXPECT_EQ(InferText(op, {x, TensorType(DType::kBF16, {2, 0})}, Axis(0)),
              op + ": expected bf16[2,0,5] as input 1, got bf16[2,0]");
    EXPECT_EQ(InferText(op, {x}, Axis(0)), op + ": expected 2 inputs, got 1");
  }
}

TEST(SoftmaxTest, GradientsOfCenterEqualDifferences) {
  const TensorType x(DType::kF64, {2, 3, 4});
  for (const std::string op : {"center", "center_grad"}) {
    for (int64_t axis = 0; axis < 3; ++axis) {
      SCOPED_TRACE(op);
      SCOPED_TRACE(axis);
      CheckGradients(1, {x, x}, [&](RankBuilder& b, const Values& in) {
        return Values{b.Op(op, in, Axis(axis))};
      });
      CheckGradients(1, {x}, [&](RankBuilder& b, const Values& in) {
        return Values{b.Op("sin", {b.Op(op, {b.Op("sin", {in[0]}), in[0]}, Axis(axis))})};
      });
    }
  }
}

TEST(SoftmaxTest, GradientsOfSoftmaxGradEqualDifferences) {
  const TensorType x(DType::kF64, {2, 3, 4});
  for (int64_t axis = 0; axis < 3; ++axis) {
    SCOPED_TRACE(axis);
    CheckGradients(1, {x, x}, [&](RankBuilder& b, const Values& in) {
      return Values{
          b.Op("softmax_grad", {b.Op("softmax", {in[0]}, Axis(axis)), in[1]}, Axis(axis))};
    });
  }
}

TEST(SoftmaxTest, GradientsEqualDifferences) {
  for (const std::string op : {"softmax", "log_softmax"}) {
    for (int64_t axis = 0; axis < 3; ++axis) {
      SCOPED_TRACE(op);
      SCOPED_TRACE(axis);
      CheckGradients(1, {TensorType(DType::kF64, {2, 3, 4})}, [&](RankBuilder& b, const Values& x) {
        return Values{b.Op(op, x, Axis(axis))};
      });
    }
    CheckGradients(1, {TensorType(DType::kF64, {3, 1})}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op(op, x, Axis(1)), b.Op("sin", {b.Op(op, x, Axis(0))})};
    });
  }
}

// g_i - softmax_i sum_j g_j, exactly, of one row.
std::vector<double> LogSoftmaxGradient(const std::vector<double>& x, const std::vector<double>& g) {
  double powers = 0;
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    powers += std::exp(x[i]);
    sum += g[i];
  }
  std::vector<double> result;
  for (size_t i = 0; i < x.size(); ++i) result.push_back(g[i] - std::exp(x[i]) / powers * sum);
  return result;
}

// The weights of many classes, each rounded to its type, add up to another number than 1.
TEST(SoftmaxTest, GradientsOfLogSoftmaxOfHalfTypesAreRoundedOnce) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int64_t classes : {1, 2, 7, 1009}) {
      SCOPED_TRACE(DTypeName(dtype));
      SCOPED_TRACE(classes);
      const TensorType type(dtype, {1, classes});
      std::vector<double> x(static_cast<size_t>(classes), 0);
      std::vector<double> g(x.size(), 0);
      for (size_t i = 0; i < x.size() && i < 5; ++i) x[i] = static_cast<double>(i) / 4;
      g[0] = -1;
      g[x.size() / 2] += 0.25;
      testing::RankCase c;
      c.inputs = {testing::FromDoubles(type, x)};
      c.grads = {testing::FromDoubles(type, g)};
      const auto results = testing::RunBackward({c}, [](RankBuilder& b, const Values& in) {
        return Values{b.Op("log_softmax", in, Axis(1))};
      });
      ASSERT_EQ(results.size(), 1u);
      EXPECT_EQ(testing::ToDoubles(results[0].gradients[0]),
                testing::ToDoubles(testing::FromDoubles(type, LogSoftmaxGradient(x, g))));
    }
  }
}

}  // namespace
}  // namespace chorus
