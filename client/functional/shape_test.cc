#include "chorus/functional/shape.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/gradients.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::ElementsAre;
using testing::ExpectGradients;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::Point;
using testing::Values;

using Tensors = std::vector<Tensor>;

class ShapeTest : public ::testing::Test {
 protected:
  // 0, 1, 2, ...
  Tensor Counted(const Shape& shape) {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    std::vector<double> values(static_cast<size_t>(elements));
    std::iota(values.begin(), values.end(), 0);
    return FromHost<double>(session_, values, shape);
  }
  // Not alike, and not in order.
  static Point Mixed(const Shape& shape, int salt = 0) {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    Point point{std::vector<double>(static_cast<size_t>(elements)), shape};
    for (int64_t i = 0; i < elements; ++i) {
      point.values[static_cast<size_t>(i)] = 0.3 * static_cast<double>((5 * i + salt) % 11) - 1.4;
    }
    return point;
  }
  Tensor At(const Point& point) { return FromHost<double>(session_, point.values, point.shape); }
  // INVALID_ARGUMENT, in these words, with a line of this file.
  static void Refused(const Tensor& x, const char* text) {
    const absl::Status status = x.status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType);
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_THAT(ErrorOf(status).source, HasSubstr("shape_test.cc:"));
  }
  // The results of a function that is compiled.
  Tensors Run(const Function& function, const Tensors& in = {}) {
    Tensors inputs = in;
    if (inputs.empty()) inputs.push_back(Counted({1}));
    absl::StatusOr<Tensors> out = Compile(function).Run(inputs);
    EXPECT_TRUE(out.ok()) << out.status();
    return out.ok() ? *std::move(out) : Tensors(16);
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
};

// --- Apart and together -------------------------------------------------------------------------

TEST_F(ShapeTest, SplitCutsBySizeOrSizes) {
  const Tensor x = Counted({2, 5});
  const Tensors by_size = Split(x, 2, -1);
  ASSERT_EQ(by_size.size(), 3u);
  EXPECT_THAT(Values<double>(by_size[0]), ElementsAre(0, 1, 5, 6));
  EXPECT_THAT(Values<double>(by_size[1]), ElementsAre(2, 3, 7, 8));
  EXPECT_THAT(Values<double>(by_size[2]), ElementsAre(4, 9));
  EXPECT_EQ(Split(x, 5, 1).size(), 1u);
  EXPECT_EQ(Split(x, 9)[0].shape(), Shape({2, 5}));
  const Tensors by_sizes = Split(x, {0, 4, 1}, 1);
  ASSERT_EQ(by_sizes.size(), 3u);
  EXPECT_EQ(by_sizes[0].shape(), Shape({2, 0}));
  EXPECT_THAT(Values<double>(by_sizes[1]), ElementsAre(0, 1, 2, 3, 5, 6, 7, 8));
  EXPECT_THAT(Values<double>(by_sizes[2]), ElementsAre(4, 9));
  EXPECT_EQ(Split(x, {2}).size(), 1u);
  const Tensors of_nothing = Split(Counted({0, 3}), 2);
  ASSERT_EQ(of_nothing.size(), 1u);
  EXPECT_EQ(of_nothing[0].shape(), Shape({0, 3}));
  EXPECT_EQ(Split(Counted({0, 3}), {0, 0}).size(), 2u);
}

// Of more than four the pieces are cut out of larger ones.
TEST_F(ShapeTest, SplitCutsManyPieces) {
  for (const int64_t count : {4, 5, 16, 37}) {
    std::vector<int64_t> sizes;
    int64_t whole = 0;
    for (int64_t i = 0; i < count; ++i) {
      sizes.push_back(i % 3);
      whole += i % 3;
    }
    const Tensors pieces = Split(Counted({whole, 2}), sizes);
    ASSERT_EQ(pieces.size(), sizes.size());
    double next = 0;
    for (size_t i = 0; i < pieces.size(); ++i) {
      EXPECT_EQ(pieces[i].shape(), Shape({sizes[i], 2})) << i << " of " << count;
      for (const double value : Values<double>(pieces[i])) EXPECT_EQ(value, next++);
    }
    EXPECT_EQ(next, static_cast<double>(2 * whole));
  }
  ExpectGradients(session_, {Mixed({2, 11})}, [](const Tensors& in) {
    const Tensors pieces = Split(in[0], 1, 1);
    Tensor y = pieces[0];
    for (size_t i = 1; i < pieces.size(); ++i) y = y * 0.5 + pieces[i] * pieces[i - 1];
    return y;
  });
}

TEST_F(ShapeTest, ChunkGivesPiecesOfOneSize) {
  const Tensor x = Counted({7});
  const Tensors three = Chunk(x, 3);
  ASSERT_EQ(three.size(), 3u);
  EXPECT_THAT(Values<double>(three[1]), ElementsAre(3, 4, 5));
  EXPECT_THAT(Values<double>(three[2]), ElementsAre(6));
  EXPECT_EQ(Chunk(x, 5).size(), 4u) << "of two each";
  EXPECT_EQ(Chunk(x, 100).size(), 7u);
  const Tensors of_nothing = Chunk(Counted({2, 0}), 3, -1);
  ASSERT_EQ(of_nothing.size(), 3u);
  EXPECT_EQ(of_nothing[2].shape(), Shape({2, 0}));
}

TEST_F(ShapeTest, WhatCannotBeCutSaysSoInAsManyTensors) {
  const Tensor x = Counted({2, 5});
  Refused(Split(x, 0, 1)[0], "Split: expected pieces of 1 or more of f64[2,5], got 0");
  Refused(Split(x, 2, 2)[0], "Split: expected an axis from -2 to 1 of f64[2,5], got 2");
  for (const Tensors& wrong : {Split(x, {3, 3}, 1), Split(x, {2, 2}, 1), Split(x, {6, -1}, 1),
                               Split(x, {std::numeric_limits<int64_t>::max(), 6}, 1)}) {
    ASSERT_EQ(wrong.size(), 2u);
    Refused(wrong[1], "Split: expected sizes that add up to the 5 of axis 1 of f64[2,5], got [");
  }
  Refused(Split(x, {})[0], "got []");
  Refused(Chunk(x, 0)[0], "Chunk: expected a count from 1 to 65536 for f64[2,5], got 0");
  EXPECT_EQ(Chunk(x, int64_t{1} << 40).size(), 1u);
  ASSERT_EQ(Chunk(x, 4, 2).size(), 4u);
  Refused(Chunk(x, 4, 2)[3], "Chunk: expected an axis");
  Refused(Split(Sum(x), 1)[0], "of f64[]");
  const Tensor bad = Reshape(x, {3});
  EXPECT_EQ(Split(bad, {1, 2, 3})[2].status(), bad.status());
  EXPECT_EQ(Chunk(bad, 2)[1].status(), bad.status());
  Refused(Chunk(Tensor(), 2)[1], "Chunk: expected a tensor, got an undefined one");
}

TEST_F(ShapeTest, StackAddsAnAxis) {
  const Tensor x = Counted({2, 3});
  const Tensor y = x + 10;
  EXPECT_EQ(Stack({x, y}).shape(), Shape({2, 2, 3}));
  EXPECT_EQ(Values<double>(Stack({x, y})), Values<double>(Concat({x, y}, 0)));
  EXPECT_EQ(Stack({x, y}, -1).shape(), Shape({2, 3, 2}));
  EXPECT_THAT(Values<double>(Stack({x, y}, -1)),
              ElementsAre(0, 10, 1, 11, 2, 12, 3, 13, 4, 14, 5, 15));
  EXPECT_THAT(Values<double>(Stack({Sum(x), Sum(y)})), ElementsAre(15, 75));
  EXPECT_EQ(Stack({Counted({0}), Counted({0})}, 1).shape(), Shape({0, 2}));
  Refused(Stack({x, Sum(x, 0)}),
          "Stack: expected tensors of one type, got f64[2,3] and f64[3] as input 1");
  Refused(Stack({x, Cast(x, DType::kF32)}), "got f64[2,3] and f32[2,3] as input 1");
  Refused(Stack({x, y}, 3),
          "Stack: expected an axis from -3 to 2 of f64[2,3] and one dimension more, got 3");
  Refused(Stack({}), "Stack: expected a tensor");
  Refused(Stack({x, Tensor()}), "Stack: expected a tensor");
}

TEST_F(ShapeTest, CutsAndStacksHaveGradients) {
  ExpectGradients(session_, {Mixed({2, 5}), Mixed({2, 2}, 3)}, [](const Tensors& in) {
    const Tensors pieces = Split(in[0], 2, 1);
    return Stack({pieces[0] * pieces[1], in[1] * in[1] * pieces[1]}, 1);
  });
  ExpectGradients(session_, {Mixed({5})}, [](const Tensors& in) {
    const Tensors pieces = Chunk(in[0], 2);
    return Sum(pieces[0]) * pieces[1] * pieces[1];
  });
}

// --- Shapes -------------------------------------------------------------------------------------

TEST_F(ShapeTest, AxesOfSizeOneComeAndGo) {
  const Tensor x = Counted({1, 3, 1, 2});
  EXPECT_EQ(Squeeze(x).shape(), Shape({3, 2}));
  EXPECT_EQ(Squeeze(x, 0).shape(), Shape({3, 1, 2}));
  EXPECT_EQ(Squeeze(x, {-2, 0}).shape(), Shape({3, 2}));
  EXPECT_EQ(Squeeze(x, {-2, 2}).shape(), Shape({1, 3, 2}));
  EXPECT_EQ(Squeeze(x, std::vector<int64_t>()).shape(), x.shape());
  EXPECT_EQ(Squeeze(Counted({1, 1})).shape(), Shape({}));
  EXPECT_EQ(Squeeze(Counted({1, 0})).shape(), Shape({0}));
  EXPECT_EQ(Squeeze(Sum(x)).shape(), Shape({}));
  EXPECT_EQ(Values<double>(Squeeze(x)), Values<double>(x));
  EXPECT_EQ(Unsqueeze(x, 0).shape(), Shape({1, 1, 3, 1, 2}));
  EXPECT_EQ(Unsqueeze(x, -1).shape(), Shape({1, 3, 1, 2, 1}));
  EXPECT_EQ(Unsqueeze(Sum(x), 0).shape(), Shape({1}));
  Refused(Squeeze(x, 1), "Squeeze: expected axes of size 1, got axis 1 of f64[1,3,1,2]");
  Refused(Squeeze(x, 4), "Squeeze: expected an axis from -4 to 3 of f64[1,3,1,2], got 4");
  Refused(Unsqueeze(x, -6), "Unsqueeze: expected an axis from -5 to 4 of f64[1,3,1,2] and one");
  Refused(Squeeze(Tensor()), "Squeeze: expected a tensor");
  Refused(Unsqueeze(Tensor(), 0), "Unsqueeze: expected a tensor");
}

TEST_F(ShapeTest, FlattenMakesAxesOne) {
  const Tensor x = Counted({2, 3, 4, 5});
  EXPECT_EQ(Flatten(x).shape(), Shape({120}));
  EXPECT_EQ(Flatten(x, 1).shape(), Shape({2, 60}));
  EXPECT_EQ(Flatten(x, 0, -2).shape(), Shape({24, 5}));
  EXPECT_EQ(Flatten(x, 1, 2).shape(), Shape({2, 12, 5}));
  EXPECT_EQ(Flatten(x, 2, 2).shape(), x.shape());
  EXPECT_EQ(Flatten(Sum(x)).shape(), Shape({1}));
  EXPECT_EQ(Flatten(Counted({3, 0, 2}), 1).shape(), Shape({3, 0}));
  EXPECT_EQ(Values<double>(Flatten(x, 1, 2)), Values<double>(x));
  Refused(Flatten(x, 2, 1), "Flatten: expected axes in order of f64[2,3,4,5], got 2 and 1");
  Refused(Flatten(x, 0, 4), "Flatten: expected an axis from -4 to 3 of f64[2,3,4,5], got 4");
  Refused(Flatten(Sum(x), 1), "Flatten: expected an axis");
  Refused(Flatten(Tensor()), "Flatten: expected a tensor");
}

TEST_F(ShapeTest, PadSurroundsWithAValue) {
  const Tensor x = Counted({2, 2}) + 1;
  EXPECT_EQ(Pad(x, {{1, 0}, {0, 2}}).shape(), Shape({3, 4}));
  EXPECT_THAT(Values<double>(Pad(x, {{1, 0}, {0, 2}})),
              ElementsAre(0, 0, 0, 0, 1, 2, 0, 0, 3, 4, 0, 0));
  EXPECT_THAT(Values<double>(Pad(x, {{0, 1}, {1, 0}}, 7.5)),
              ElementsAre(7.5, 1, 2, 7.5, 3, 4, 7.5, 7.5, 7.5));
  EXPECT_TRUE(std::signbit(Values<double>(Pad(Sum(x, 0), {{1, 0}}, -0.0))[0]));
  EXPECT_TRUE(std::isnan(Values<double>(Pad(Sum(x, 0), {{0, 1}}, std::nan("")))[2]));
  EXPECT_THAT(Values<bool>(Pad(Sum(x, 0) > 5, {{1, 1}}, 1)), ElementsAre(true, false, true, true));
  EXPECT_EQ(Values<double>(Pad(x, {{0, 0}, {0, 0}}, 3)), Values<double>(x));
  EXPECT_THAT(Values<double>(Pad(Sum(x), {}, 3)), ElementsAre(10));
  EXPECT_THAT(Values<double>(Pad(Counted({0}), {{1, 1}}, 4)), ElementsAre(4, 4));
  EXPECT_EQ(Pad(Counted({2, 0}), {{0, 1}, {0, 0}}, 4).shape(), Shape({3, 0}));
  Refused(Pad(x, {{1, 1}}), "Pad: expected 2 pairs of widths for f64[2,2], got 1");
  Refused(Pad(x, {{0, 0}, {-1, 2}}), "for f64[2,2], got -1 and 2 for axis 1");
  Refused(Pad(x, {{0, std::numeric_limits<int64_t>::max()}, {0, 0}}, 1), "Pad: expected widths");
  Refused(Pad(Cast(x, DType::kI32), {{0, 1}, {0, 0}}, 0.5),
          "Pad: expected a value of its dtype for i32[2,2], got 0.5");
  Refused(Pad(Tensor(), {}), "Pad: expected a tensor");
}

TEST_F(ShapeTest, PadHasAGradientOfWhatItSurrounds) {
  for (const double value : {0.0, 1.5}) {
    ExpectGradients(session_, {Mixed({2, 3})}, [value](const Tensors& in) {
      const Tensor y = Pad(in[0] * in[0], {{1, 2}, {0, 1}}, value);
      return y * y;
    });
  }
}

// --- Counted out --------------------------------------------------------------------------------

TEST_F(ShapeTest, ArangeCounts) {
  for (const int64_t n : {0, 1, 2, 3, 4, 5, 8, 13, 64, 1000}) {
    const std::vector<int64_t> x =
        Values<int64_t>(Arange(session_, DType::kI64, 0, static_cast<double>(n)));
    std::vector<int64_t> expected(static_cast<size_t>(n));
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(x, expected) << n;
  }
  EXPECT_THAT(Values<int32_t>(Arange(session_, DType::kI32, 5, -4, -3)), ElementsAre(5, 2, -1));
  EXPECT_THAT(Values<uint8_t>(Arange(session_, DType::kU8, 255, 252, -1)),
              ElementsAre(255, 254, 253));
  EXPECT_THAT(Values<int64_t>(Arange(session_, DType::kI64, 1, 2.5)), ElementsAre(1, 2));
  EXPECT_THAT(Values<float>(Arange(session_, DType::kF32, 1, 2.1, 0.5)), ElementsAre(1, 1.5, 2));
  const std::vector<double> tenths = Values<double>(Arange(session_, DType::kF64, 0, 1, 0.1));
  ASSERT_EQ(tenths.size(), 10u);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(tenths[static_cast<size_t>(i)], i * 0.1);
  EXPECT_EQ(Arange(session_, DType::kBF16, 0, 3).dtype(), DType::kBF16);
  EXPECT_EQ(Arange(session_, DType::kF32, 3, 0).shape(), Shape({0}));
  EXPECT_EQ(Arange(session_, DType::kF32, 0, 3, -1).shape(), Shape({0}));
}

TEST_F(ShapeTest, ArangeIsOnItsDeviceAndSendsNothingWhenItIsTraced) {
  const Session two = daemon_.Open(2);
  EXPECT_EQ(Arange(two.device(1), DType::kI64, 0, 9).device().slot(), 1);
  EXPECT_THAT(Values<int64_t>(Arange(two.device(1), DType::kI64, 7, 9)), ElementsAre(7, 8));
  const int created = daemon_.counts().created_tensors;
  const Tensor row = Counted({50});
  const Tensors out = Run(
      [](const Tensors& in) {
        return Tensors{in[0] + Arange(in[0].device(), DType::kF64, 0, 100, 2)};
      },
      {row});
  EXPECT_EQ(Values<double>(out[0]), Values<double>(row * 3));
  EXPECT_EQ(daemon_.counts().created_tensors, created + 1) << "the input";
  // One function for batches of all sizes.
  CompileOptions options;
  options.varying = {0};
  options.max_size = 9;
  const Compiled f = Compile(
      [](const Tensors& in) {
        const Tensor all = Arange(in[0].device(), DType::kF64, 0, 9);
        return Tensors{in[0] + Slice(all, 0, 0, in[0].shape()[0]), Sum(all)};
      },
      options);
  for (const int64_t n : {9, 1, 4}) {
    const auto y = f.Run({Counted({n})});
    ASSERT_TRUE(y.ok()) << y.status();
    EXPECT_EQ(Values<double>((*y)[0]), Values<double>(Counted({n}) * 2));
    EXPECT_THAT(Values<double>((*y)[1]), ElementsAre(36));
  }
  EXPECT_EQ(f.traces(), 1);
}

TEST_F(ShapeTest, ArangeSaysWhatItCannotCount) {
  const double inf = std::numeric_limits<double>::infinity();
  Refused(Arange(session_, DType::kBool, 0, 1), "Arange: expected a dtype of numbers, got bool");
  Refused(Arange(session_, DType::kF32, 0, 1, 0), "a step other than 0, got 0, 1 and step 0");
  Refused(Arange(session_, DType::kF32, 0, inf), "Arange: expected finite numbers");
  Refused(Arange(session_, DType::kF32, 0, 1, std::nan("")), "Arange: expected finite numbers");
  Refused(Arange(session_, DType::kF32, 0, 1e300), "Arange: expected at most");
  Refused(Arange(session_, DType::kF64, -1e308, 1e308), "Arange: expected at most");
  Refused(Arange(session_, DType::kU8, 0, 257), "whole numbers that u8 has, got 256");
  Refused(Arange(session_, DType::kU8, -1, 3), "whole numbers that u8 has, got -1");
  Refused(Arange(session_, DType::kI32, 0.5, 3), "whole numbers that i32 has, got 0.5");
  Refused(Arange(session_, DType::kI32, 0, 3, 1.5), "Arange: expected a whole step, got 1.5");
  Refused(Arange(DeviceRef(), DType::kI32, 0, 3), "Arange: expected a device of a session");
  Refused(Arange(session_.device(5), DType::kI32, 0, 3), "Arange: device 5");
}

// --- By name ------------------------------------------------------------------------------------

// What an equation with an explicit result means, by its definition.
std::vector<double> Naive(const std::string& equation, const std::vector<Point>& points) {
  const size_t arrow = equation.find("->");
  std::vector<std::string> terms = {""};
  for (const char c : equation.substr(0, arrow)) {
    if (c == ',') {
      terms.emplace_back();
    } else {
      terms.back() += c;
    }
  }
  std::string labels = equation.substr(arrow + 2);
  const size_t named = labels.size();
  std::vector<int64_t> sizes(128, 0);
  for (size_t t = 0; t < terms.size(); ++t) {
    for (size_t k = 0; k < terms[t].size(); ++k) {
      if (labels.find(terms[t][k]) == std::string::npos) labels += terms[t][k];
      sizes[static_cast<size_t>(terms[t][k])] = points[t].shape[k];
    }
  }
  int64_t results = 1;
  int64_t all = 1;
  for (size_t k = 0; k < labels.size(); ++k) {
    all *= sizes[static_cast<size_t>(labels[k])];
    if (k + 1 == named) results = all;
  }
  std::vector<double> y(static_cast<size_t>(results));
  for (int64_t i = 0; i < all; ++i) {
    std::vector<int64_t> at(128, 0);
    int64_t rest = i;
    for (size_t k = labels.size(); k-- > 0;) {
      const size_t label = static_cast<size_t>(labels[k]);
      at[label] = rest % sizes[label];
      rest /= sizes[label];
    }
    double product = 1;
    for (size_t t = 0; t < terms.size(); ++t) {
      int64_t offset = 0;
      for (size_t k = 0; k < terms[t].size(); ++k) {
        offset = offset * points[t].shape[k] + at[static_cast<size_t>(terms[t][k])];
      }
      product *= points[t].values[static_cast<size_t>(offset)];
    }
    y[static_cast<size_t>(i / (all / results))] += product;
  }
  return y;
}

struct Equations {
  const char* equation;
  std::vector<Shape> shapes;
  Shape result;
};

TEST_F(ShapeTest, EinsumIsWhatItsEquationSays) {
  const Equations cases[] = {
      {"ij,jk->ik", {{2, 3}, {3, 4}}, {2, 4}},
      {"ij,kj->ki", {{2, 3}, {4, 3}}, {4, 2}},
      {"bij,bjk->bik", {{2, 3, 4}, {2, 4, 5}}, {2, 3, 5}},
      {"bhqd,bhkd->bhqk", {{2, 3, 2, 5}, {2, 3, 4, 5}}, {2, 3, 2, 4}},
      {"qbhd,kbhd->bhqk", {{2, 2, 3, 5}, {4, 2, 3, 5}}, {2, 3, 2, 4}},
      {"abcd,cbe->aed", {{2, 3, 4, 2}, {4, 3, 5}}, {2, 5, 2}},  // two that are summed over
      {"i,i->", {{5}, {5}}, {}},
      {"bi,bi->b", {{2, 5}, {2, 5}}, {2}},
      {"i,j->ji", {{2}, {3}}, {3, 2}},
      {"ij,ij->ij", {{2, 3}, {2, 3}}, {2, 3}},
      {"ij,j->ij", {{2, 3}, {3}}, {2, 3}},
      {",ij->ji", {{}, {2, 3}}, {3, 2}},
      {"ij,jk->", {{2, 3}, {3, 4}}, {}},  // labels of one operand alone are summed first
      {"ij,kl->il", {{2, 3}, {4, 5}}, {2, 5}},
      {"iij,jk->ik", {{3, 3, 2}, {2, 4}}, {3, 4}},
      {"ii,ii->i", {{3, 3}, {3, 3}}, {3}},
      {"aB,Bc->ac", {{2, 3}, {3, 2}}, {2, 2}},
      {"ij,jk->ik", {{2, 0}, {0, 3}}, {2, 3}},
      {"ij,jk->ik", {{0, 2}, {2, 3}}, {0, 3}},
      {"ij->ji", {{2, 3}}, {3, 2}},
      {"ij->", {{2, 3}}, {}},
      {"ijk->kj", {{2, 3, 4}}, {4, 3}},
      {"ii->i", {{3, 3}}, {3}},
      {"ii->", {{3, 3}}, {}},
      {"ii->i", {{0, 0}}, {0}},
      {"iji->ji", {{3, 2, 3}}, {2, 3}},
      {"iijj->ij", {{2, 2, 3, 3}}, {2, 3}},
      {"iii->i", {{3, 3, 3}}, {3}},
      {"->", {{}}, {}},
  };
  for (const Equations& c : cases) {
    SCOPED_TRACE(c.equation);
    std::vector<Point> points;
    Tensors operands;
    for (size_t i = 0; i < c.shapes.size(); ++i) {
      points.push_back(Mixed(c.shapes[i], static_cast<int>(3 * i)));
      operands.push_back(At(points.back()));
    }
    const std::vector<double> expected = Naive(c.equation, points);
    const std::string equation = c.equation;
    const auto check = [&](const Tensor& y) {
      ASSERT_TRUE(y.status().ok()) << y;
      EXPECT_EQ(y.shape(), c.result);
      const std::vector<double> values = Values<double>(y);
      ASSERT_EQ(values.size(), expected.size());
      for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], expected[i], 1e-12) << i;
    };
    check(Einsum(equation, operands));
    check(Run([&](const Tensors& in) { return Tensors{Einsum(equation, in)}; }, operands)[0]);
  }
}

TEST_F(ShapeTest, EinsumWithoutAnArrowNamesWhatStandsOnceByTheAlphabet) {
  const Tensor x = Counted({2, 3});
  const Tensor y = Counted({3, 4});
  EXPECT_EQ(Values<double>(Einsum("ij, jk", {x, y})), Values<double>(MatMul(x, y)));
  EXPECT_EQ(Values<double>(Einsum("ba", {x})), Values<double>(Transpose(x)));
  EXPECT_EQ(Values<double>(Einsum(" k j , i k -> i j ", {y, x})), Values<double>(MatMul(x, y)));
  EXPECT_THAT(Values<double>(Einsum("ii", {Counted({3, 3})})), ElementsAre(12));
  EXPECT_EQ(Einsum("aB", {x}).shape(), Shape({3, 2})) << "capital letters come first";
  const Tensor whole = Cast(x, DType::kI64);
  EXPECT_EQ(Einsum("ij,kj", {whole, whole}).dtype(), DType::kI64);
  EXPECT_THAT(Values<bool>(Einsum("ii->i", {Counted({2, 2}) > 2})), ElementsAre(false, true));
}

TEST_F(ShapeTest, EinsumHasGradients) {
  const Equations cases[] = {
      {"bij,bjk->kbi", {{2, 2, 3}, {2, 3, 2}}, {}},
      {"ij,j->ij", {{2, 3}, {3}}, {}},
      {"iij,jk->ik", {{2, 2, 3}, {3, 2}}, {}},
      {"ij,kl->l", {{2, 2}, {2, 3}}, {}},
      {"iji->j", {{3, 2, 3}}, {}},
  };
  for (const Equations& c : cases) {
    SCOPED_TRACE(c.equation);
    std::vector<Point> points;
    for (size_t i = 0; i < c.shapes.size(); ++i) {
      points.push_back(Mixed(c.shapes[i], static_cast<int>(3 * i)));
    }
    ExpectGradients(session_, points, [&](const Tensors& in) {
      Tensors operands;
      for (const Tensor& x : in) operands.push_back(x * x);
      return Einsum(c.equation, operands);
    });
  }
}

TEST_F(ShapeTest, EinsumNamesTheEquationThatDoesNotFit) {
  const Tensor x = Counted({2, 3});
  Refused(Einsum("ij,jk->ik", {x, x}),
          "Einsum \"ij,jk->ik\": expected size 3 along 'j', got 2 in operand 1, f64[2,3]");
  Refused(Einsum("ii->i", {x}), "expected size 2 along 'i', got 3 in operand 0, f64[2,3]");
  Refused(Einsum("ijk->i", {x}), "expected 3 dimensions of operand 0, got f64[2,3]");
  Refused(Einsum("ij->iz", {x}), "expected a result of labels of the operands, got 'z'");
  Refused(Einsum("ij->ii", {x}), "expected each label once in the result, got 'i' twice");
  Refused(Einsum("ij,ij->ij", {x}), "expected 2 operands, got 1");
  Refused(Einsum("ij->ij", {}), "expected one operand or two, got 0");
  Refused(Einsum("ij,ij,ij->ij", {x, x, x}), "expected one operand or two, got 3");
  Refused(Einsum("ij->i->j", {x}), "expected letters, commas and one \"->\", got '-'");
  Refused(Einsum("...i->i", {x}), "got '.'");
  Refused(Einsum("i\xc3->i", {x}), "Einsum \"i\\xc3->i\": expected letters");
  Refused(Einsum("ij,jk", {x, Cast(Transpose(x), DType::kF32)}),
          "expected operands of one dtype, got f64[2,3] and f32[3,2]");
  Refused(Einsum("i->i", {Tensor()}), "Einsum: expected a tensor");
  const Tensor whole = Cast(x, DType::kI8);
  const absl::Status status = Einsum("ij,kj", {whole, whole}).status();
  EXPECT_EQ(ErrorOf(status).reason, Reason::kUnsupported) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("Einsum \"ij,kj\": matmul: "));
  const Tensor bad = Reshape(x, {5});
  EXPECT_EQ(Einsum("ij,jk", {x, bad}).status(), bad.status());
}

TEST_F(ShapeTest, OfALostSessionTheyGiveTheSessionsError) {
  Session session = daemon_.Open();
  const Tensor number = Scalar<double>(session, 1);
  const Tensor row = FromHost<double>(session, {1, 2}, {2});
  ASSERT_TRUE(session.Close().ok());
  for (const Tensor& x :
       {Flatten(number), Flatten(row), Pad(row, {{1, 0}}), Pad(row, {{1, 1}}, 2), Squeeze(row),
        Unsqueeze(row, 0), Stack({row, row}), Einsum("i,i->", {row, row})}) {
    EXPECT_EQ(ErrorOf(x.status()).reason, Reason::kSessionLost);
  }
}

TEST_F(ShapeTest, WhatIsCompiledGivesTheSame) {
  const Tensor x = Counted({2, 1, 5});
  const Function all = [](const Tensors& in) {
    Tensors out = {Squeeze(in[0]), Unsqueeze(in[0], 1), Flatten(in[0], 0, 1),
                   Stack({in[0], -in[0]}, -1), Pad(in[0], {{0, 1}, {1, 0}, {0, 2}}, 4)};
    for (const Tensor& piece : Split(in[0], {1, 4}, 2)) out.push_back(piece);
    for (const Tensor& piece : Chunk(in[0], 3, 2)) out.push_back(piece);
    return out;
  };
  const Tensors eager = all({x});
  const Tensors compiled = Run(all, {x});
  ASSERT_EQ(eager.size(), compiled.size());
  for (size_t i = 0; i < eager.size(); ++i) {
    EXPECT_EQ(compiled[i].shape(), eager[i].shape()) << i;
    EXPECT_EQ(Values<double>(compiled[i]), Values<double>(eager[i])) << i;
  }
}

}  // namespace
}  // namespace chorus
