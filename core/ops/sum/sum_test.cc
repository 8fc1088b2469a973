#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/autograd/testing/gradient_check.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "core/ops/testing/value.h"
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

TEST(SumTest, ShapeTable) {
  EXPECT_EQ(InferText("sum", {kX}), "f32[]");
  EXPECT_EQ(InferText("sum", {kX}, {{"axes", Ints{}}, {"keep_dims", int64_t{1}}}), "f32[1,1,1]");
  EXPECT_EQ(InferText("sum", {kX}, {{"axes", Ints{1}}}), "f32[2,4]");
  EXPECT_EQ(InferText("sum", {kX}, {{"axes", Ints{0, 2}}, {"keep_dims", int64_t{1}}}),
            "f32[1,3,1]");
  EXPECT_EQ(InferText("sum", {TensorType(DType::kI64, {})}), "i64[]");
  for (const Ints& axes : {Ints{3}, Ints{-1}, Ints{1, 0}, Ints{1, 1}}) {
    EXPECT_EQ(InferText("sum", {kX}, {{"axes", axes}}).substr(0, 70),
              "sum: expected ascending axes within the 3 dimensions of f32[2,3,4], go");
  }
  EXPECT_EQ(InferText("sum", {kX}, {{"keep_dims", int64_t{7}}}),
            "sum: expected 0 or 1 as 'keep_dims', got 7");
  EXPECT_EQ(InferText("sum", {kX}, {{"keep_dims", int64_t{1}}, {"axes", Ints{0}}}),
            "sum: expected attributes sorted by name, no name twice, got 'axes' after 'keep_dims'");
}

TEST(ReductionsTest, ShapeTable) {
  for (const char* op : {"max", "mean", "min", "prod"}) {
    EXPECT_EQ(InferText(op, {kX}), "f32[]");
    EXPECT_EQ(InferText(op, {kX}, {{"axes", Ints{0, 2}}, {"keep_dims", int64_t{1}}}), "f32[1,3,1]");
    EXPECT_EQ(InferText(op, {kX}, {{"axes", Ints{3}}}),
              std::string(op) +
                  ": expected ascending axes within the 3 dimensions of f32[2,3,4], got [3]");
  }
  const TensorType i64(DType::kI64, {2});
  EXPECT_EQ(InferText("max", {i64}), "i64[]");
  EXPECT_EQ(InferText("prod", {i64}), "i64[]");
  EXPECT_EQ(InferText("mean", {i64}), "mean: expected floating point, got i64[2]");
  EXPECT_EQ(InferText("spread", {i64}, {{"dims", Ints{3, 2}}}),
            "spread: expected floating point, got i64[2]");
  const TensorType empty(DType::kF32, {0, 2});
  for (const char* op : {"max", "min"}) {
    EXPECT_EQ(InferText(op, {empty}),
              std::string(op) + ": expected at least one element to choose from, got f32[0,2]");
    EXPECT_EQ(InferText(op, {empty}, {{"axes", Ints{1}}}), "f32[0]");
  }
  EXPECT_EQ(InferText("mean", {empty}), "f32[]");
  EXPECT_EQ(InferText("prod", {empty}, {{"axes", Ints{0}}}), "f32[2]");
}

TEST(ExpandTest, ShapeTable) {
  const TensorType x(DType::kF32, {3, 1});
  EXPECT_EQ(InferText("expand", {x}, {{"dims", Ints{3, 5}}}), "f32[3,5]");
  EXPECT_EQ(InferText("expand", {x}, {{"dims", Ints{2, 3, 1}}}), "f32[2,3,1]");
  EXPECT_EQ(InferText("expand", {x}, {{"dims", Ints{3, 0}}}), "f32[3,0]");
  EXPECT_EQ(InferText("expand", {TensorType(DType::kF32, {})}, {{"dims", Ints{4}}}), "f32[4]");
  for (const Ints& dims : {Ints{3}, Ints{2, 1}, Ints{3, 1, 1}, Ints{}}) {
    EXPECT_EQ(InferText("expand", {x}, {{"dims", dims}}).substr(0, 57),
              "expand: expected dims that end with those of f32[3,1], wh");
  }
  EXPECT_EQ(
      InferText("expand", {x}, {{"dims", Ints{3, -2}}}),
      "expand: expected a valid type as output 0, got f32[3,-2] has a negative dimension, -2");
  EXPECT_EQ(InferText("expand", {x}, {{"dims", Ints{int64_t{1} << 62, 3, 1}}}).substr(0, 50),
            "expand: expected a valid type as output 0, got f32");
  EXPECT_EQ(InferText("expand", {x}), "expand: expected a list of integers as 'dims', got none");
}

TEST(SumTest, EqualsItsAdjoint) {
  for (const Ints& axes :
       {Ints{}, Ints{0}, Ints{1}, Ints{2}, Ints{0, 1}, Ints{1, 2}, Ints{0, 1, 2}}) {
    for (const int64_t keep_dims : {0, 1}) {
      CheckAdjoint(1, {kX}, [&](RankBuilder& b, const Values& x) {
        return Values{b.Op("sum", x, {{"axes", axes}, {"keep_dims", keep_dims}})};
      });
    }
  }
  for (const TensorType& type : {TensorType(DType::kF64, {}), TensorType(DType::kF64, {1, 5}),
                                 TensorType(DType::kF64, {0, 2})}) {
    CheckAdjoint(1, {type, TensorType(DType::kF64, {})}, [](RankBuilder& b, const Values& x) {
      return Values{b.Op("add", {b.Op("sum", {x[0]}), x[1]})};
    });
  }
}

TEST(ExpandTest, EqualsItsAdjoint) {
  const struct {
    TensorType type;
    Ints dims;
  } cases[] = {
      {TensorType(DType::kF32, {}), {}},
      {TensorType(DType::kF32, {}), {2, 3}},
      {TensorType(DType::kF32, {1}), {4}},
      {TensorType(DType::kF32, {3, 1}), {3, 5}},
      {TensorType(DType::kF32, {3, 1}), {2, 3, 5}},
      {TensorType(DType::kF32, {1, 1}), {1, 1, 1}},
      {TensorType(DType::kF32, {3}), {3}},
      {TensorType(DType::kF32, {1, 3}), {2, 3}},
  };
  for (const auto& c : cases) {
    CheckAdjoint(1, {c.type}, [&](RankBuilder& b, const Values& x) {
      return Values{b.Op("expand", x, {{"dims", c.dims}})};
    });
  }
}

TEST(SumTest, GradientsEqualDifferences) {
  CheckGradients(1, {TensorType(DType::kF64, {2, 3}), TensorType(DType::kF64, {3})},
                 [](RankBuilder& b, const Values& x) {
                   const ValueIndex wide = b.Op("expand", {x[1]}, {{"dims", Ints{2, 3}}});
                   const ValueIndex y = b.Op("sin", {b.Op("mul", {x[0], wide})});
                   const ValueIndex s = b.Op("sum", {y}, {{"axes", Ints{1}}});
                   return Values{b.Op("mul", {s, s})};
                 });
}

TEST(MeanTest, EqualsItsAdjoint) {
  // Powers of two, so that the quotients are exact.
  const TensorType x(DType::kF64, {2, 4, 8});
  for (const Ints& axes : {Ints{}, Ints{0}, Ints{1}, Ints{2}, Ints{0, 2}, Ints{1, 2}}) {
    for (const int64_t keep_dims : {0, 1}) {
      CheckAdjoint(1, {x}, [&](RankBuilder& b, const Values& v) {
        return Values{b.Op("mean", v, {{"axes", axes}, {"keep_dims", keep_dims}})};
      });
    }
  }
  CheckAdjoint(1, {TensorType(DType::kF64, {2, 1})}, [](RankBuilder& b, const Values& v) {
    return Values{b.Op("spread", v, {{"dims", Ints{4, 2, 8}}})};
  });
}

// What is repeated no times has no part in anything.
TEST(RepetitionTest, OfNoRepetitionsTheGradientIsZero) {
  for (const char* op : {"expand", "spread"}) {
    SCOPED_TRACE(op);
    CheckGradients(1, {TensorType(DType::kF64, {1})}, [&](RankBuilder& b, const Values& v) {
      return Values{b.Op("mul", {v[0], v[0]}), b.Op(op, v, {{"dims", Ints{0}}})};
    });
    CheckGradients(1, {TensorType(DType::kF64, {3})}, [&](RankBuilder& b, const Values& v) {
      return Values{b.Op("mul", {v[0], v[0]}), b.Op(op, v, {{"dims", Ints{0, 3}}})};
    });
  }
}

ValueIndex Number(RankBuilder& b, double value) {
  Attributes attributes = TypeAttributes(TensorType(DType::kF64, {}));
  attributes.push_back({"value", value});
  return b.Op("fill", {}, attributes);
}

TEST(ReductionsTest, GradientsEqualDifferences) {
  const TensorType x(DType::kF64, {2, 3, 5});
  for (const char* op : {"max", "mean", "min", "prod", "sum"}) {
    for (const Ints& axes : {Ints{}, Ints{0}, Ints{1}, Ints{2}, Ints{0, 2}}) {
      for (const int64_t keep_dims : {0, 1}) {
        SCOPED_TRACE(op);
        CheckGradients(1, {x}, [&](RankBuilder& b, const Values& v) {
          // Near 1, so that a product of many does not vanish.
          const ValueIndex small = b.Op("mul", {v[0], Number(b, 0.25)});
          const ValueIndex z = b.Op("add", {small, Number(b, 1)});
          const ValueIndex y = b.Op(op, {z}, {{"axes", axes}, {"keep_dims", keep_dims}});
          return Values{b.Op("mul", {y, y})};
        });
      }
    }
  }
  // One and two elements.
  for (const int64_t size : {1, 2}) {
    CheckGradients(1, {TensorType(DType::kF64, {size})}, [](RankBuilder& b, const Values& v) {
      return Values{b.Op("mul", {b.Op("prod", v), b.Op("sum", v)})};
    });
  }
}

// The gradients of sum(g * op(x)), rows of x reduced.
std::vector<double> GradientAt(const std::string& op, const std::vector<double>& x,
                               const std::vector<double>& g, DType dtype = DType::kF64) {
  const int64_t rows = static_cast<int64_t>(g.size());
  const int64_t columns = static_cast<int64_t>(x.size()) / rows;
  testing::RankCase c;
  c.inputs = {testing::FromDoubles(TensorType(dtype, {rows, columns}), x)};
  c.grads = {testing::FromDoubles(TensorType(dtype, {rows}), g)};
  const auto results = testing::RunBackward({c}, [&](RankBuilder& b, const Values& v) {
    return Values{b.Op(op, v, {{"axes", Ints{1}}})};
  });
  return results.empty() ? std::vector<double>() : testing::ToDoubles(results[0].gradients[0]);
}

TEST(ReductionsTest, TheGradientOfMaxGoesToItsHoldersEvenly) {
  const double nan = std::nan("");
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(GradientAt("max", {1, 3, 3, 2, nan, 5, 1, 2, 2}, {12, 12, inf}),
            (std::vector<double>{0, 6, 6, 0, 12, 0, 0, inf, inf}));
  EXPECT_EQ(GradientAt("min", {1, 3, 1, nan, nan, 5, -inf, 2, 2}, {12, 12, 12}),
            (std::vector<double>{6, 0, 6, 6, 6, 0, 12, 0, 0}));
}

TEST(ReductionsTest, TheGradientOfAProductDoesNotMindZeros) {
  EXPECT_EQ(GradientAt("prod", {2, 3, 0, 5, 7, 2, 0, 0, 3, 1}, {1, 1}),
            (std::vector<double>{0, 0, 210, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(GradientAt("prod", {2, 3, 4}, {10}), (std::vector<double>{120, 80, 60}));
}

// Some of the factors alone are more than a half type has numbers for, or less.
TEST(ReductionsTest, TheGradientOfAProductOfHalfTypesIsRoundedOnce) {
  EXPECT_EQ(GradientAt("prod", {0x1p9, 0x1p-10, 0x1p9, 0x1p-10}, {1}, DType::kF16),
            (std::vector<double>{0x1p-11, 0x1p8, 0x1p-11, 0x1p8}));
  EXPECT_EQ(GradientAt("prod", {0x1p-13, 0x1p9, 0x1p-13, 0x1p9}, {1}, DType::kF16),
            (std::vector<double>{0x1p5, 0x1p-17, 0x1p5, 0x1p-17}));
  EXPECT_EQ(GradientAt("prod", {1, 0, 0x1p9, 1, 1, 1, 0x1p9, 0x1p-4}, {1}, DType::kF16),
            (std::vector<double>{0, 0x1p14, 0, 0, 0, 0, 0, 0}));
}

}  // namespace
}  // namespace chorus
