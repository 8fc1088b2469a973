#include "chorus/functional/conv.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
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

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using testing::ExpectGradients;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using ::testing::Pointwise;
using testing::Values;

using Doubles = std::vector<double>;

auto Near(const Doubles& values) { return Pointwise(DoubleNear(1e-12), values); }

class ConvTest : public ::testing::Test {
 protected:
  Tensor Numbers(const Shape& shape, int seed = 0) {
    return chorus::testing::Numbers(session_, shape, seed);
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
};

// By its definition; of a transposed one, each x adds to what a convolution would make it of.
Doubles Convolved(const Doubles& x, const Shape& xs, const Doubles& w, const Shape& ws,
                  const Conv2dOptions& o, const Shape& ys, bool transposed) {
  Doubles y(static_cast<size_t>(ys[0] * ys[1] * ys[2] * ys[3]), 0);
  // The larger image, and the smaller one, whose places the taps are at.
  const Shape& large = transposed ? ys : xs;
  const Shape& small = transposed ? xs : ys;
  const int64_t out = ws[0] / o.groups;
  for (int64_t n = 0; n < small[0]; ++n) {
    for (int64_t c = 0; c < ws[0]; ++c) {
      for (int64_t i = 0; i < small[2] * small[3]; ++i) {
        for (int64_t tap = 0; tap < ws[1] * ws[2] * ws[3]; ++tap) {
          const int64_t b = tap % ws[3], a = tap / ws[3] % ws[2];
          const int64_t in = tap / ws[3] / ws[2] + c / out * ws[1];
          const int64_t row = i / small[3] * o.stride.h - o.padding.h + a * o.dilation.h;
          const int64_t column = i % small[3] * o.stride.w - o.padding.w + b * o.dilation.w;
          if (row < 0 || row >= large[2] || column < 0 || column >= large[3]) continue;
          const auto at_large =
              static_cast<size_t>(((n * large[1] + in) * large[2] + row) * large[3] + column);
          const auto at_small = static_cast<size_t>((n * small[1] + c) * small[2] * small[3] + i);
          const double weight = w[static_cast<size_t>(c * ws[1] * ws[2] * ws[3] + tap)];
          if (transposed) {
            y[at_large] += weight * x[at_small];
          } else {
            y[at_small] += weight * x[at_large];
          }
        }
      }
    }
  }
  return y;
}

Conv2dOptions Uneven() {
  Conv2dOptions options;
  options.stride = {2, 1};
  options.padding = {1, 0};
  options.dilation = {1, 2};
  options.groups = 2;
  return options;
}

TEST_F(ConvTest, Conv2dIsItsDefinition) {
  const Tensor x = Numbers({2, 4, 5, 6}, 1);
  const Tensor w = Numbers({6, 2, 3, 2}, 2);
  const Tensor y = Conv2d(x, w, Uneven());
  ASSERT_TRUE(y.status().ok()) << y.status();
  EXPECT_EQ(y.shape(), Shape({2, 6, 3, 4}));
  EXPECT_THAT(Values<double>(y),
              Near(Convolved(Values<double>(x), x.shape(), Values<double>(w), w.shape(), Uneven(),
                             y.shape(), /*transposed=*/false)));
  EXPECT_EQ(Conv2d(Numbers({2, 2, 4, 4}), Numbers({3, 2, 4, 4})).shape(), Shape({2, 3, 1, 1}));
}

TEST_F(ConvTest, ConvTranspose2dIsItsDefinition) {
  ConvTranspose2dOptions options;
  options.stride = {2, 3};
  options.padding = {1, 0};
  options.dilation = {1, 2};
  options.groups = 2;
  Conv2dOptions same;
  same.stride = options.stride;
  same.padding = options.padding;
  same.dilation = options.dilation;
  same.groups = options.groups;
  for (const int64_t extra : {0, 1}) {
    options.output_padding = {extra, 2 * extra};
    const Tensor x = Numbers({2, 6, 3, 2}, 1);
    const Tensor w = Numbers({6, 2, 3, 2}, 2);
    const Tensor y = ConvTranspose2d(x, w, options);
    ASSERT_TRUE(y.status().ok()) << y.status();
    EXPECT_EQ(y.shape(), Shape({2, 4, 5 + extra, 6 + 2 * extra}));
    EXPECT_THAT(Values<double>(y),
                Near(Convolved(Values<double>(x), x.shape(), Values<double>(w), w.shape(), same,
                               y.shape(), /*transposed=*/true)));
  }
}

TEST_F(ConvTest, Conv1dIsARowOfConv2d) {
  const Tensor x = FromHost<double>(session_, {1, 2, 3, 4, 5}, {1, 1, 5});
  const Tensor w = FromHost<double>(session_, {1, 10}, {1, 1, 2});
  EXPECT_THAT(Values<double>(Conv1d(x, w)), ElementsAre(21, 32, 43, 54));
  Conv1dOptions options;
  options.stride = 2;
  options.padding = 1;
  options.dilation = 3;
  EXPECT_EQ(Conv1d(x, w, options).shape(), Shape({1, 1, 2}));
  EXPECT_THAT(Values<double>(Conv1d(x, w, options)), ElementsAre(30, 52));
  options.groups = 2;
  const Tensor two = FromHost<double>(session_, {1, 2, 3, 4}, {1, 2, 2});
  const Tensor taps = FromHost<double>(session_, {2, 3}, {2, 1, 1});
  options = Conv1dOptions();
  options.groups = 2;
  EXPECT_THAT(Values<double>(Conv1d(two, taps, options)), ElementsAre(2, 4, 9, 12));
}

TEST_F(ConvTest, HaveGradients) {
  ExpectGradients([](const std::vector<Tensor>& in) { return Conv2d(in[0], in[1], Uneven()); },
                  {Numbers({1, 2, 3, 4}, 1), Numbers({2, 1, 2, 2}, 2)});
  ExpectGradients(
      [](const std::vector<Tensor>& in) {
        ConvTranspose2dOptions options;
        options.stride = 2;
        options.output_padding = {0, 1};
        return ConvTranspose2d(in[0], in[1], options);
      },
      {Numbers({1, 2, 2, 2}, 1), Numbers({2, 2, 2, 1}, 2)});
  ExpectGradients([](const std::vector<Tensor>& in) { return Conv1d(in[0], in[1]); },
                  {Numbers({2, 2, 4}, 1), Numbers({3, 2, 2}, 2)});
}

// What stands under a window at (row, column) of a plane.
Doubles Under(const Doubles& plane, int64_t h, int64_t w, int64_t row, int64_t column,
              HeightWidth kernel, HeightWidth dilation = 1) {
  Doubles under;
  for (int64_t a = 0; a < kernel.h; ++a) {
    for (int64_t b = 0; b < kernel.w; ++b) {
      const int64_t i = row + a * dilation.h, j = column + b * dilation.w;
      if (i >= 0 && i < h && j >= 0 && j < w)
        under.push_back(plane[static_cast<size_t>(i * w + j)]);
    }
  }
  return under;
}

TEST_F(ConvTest, MaxPoolIsTheLargest) {
  MaxPool2dOptions options;
  options.stride = {2, 1};
  options.padding = {1, 0};
  options.dilation = {1, 2};
  // All below 0, which padding is not.
  const Tensor x = Numbers({2, 3, 5, 6}) - 2;
  const Tensor y = MaxPool2d(x, {3, 2}, options);
  ASSERT_TRUE(y.status().ok()) << y.status();
  ASSERT_EQ(y.shape(), Shape({2, 3, 3, 4}));
  const Doubles in = Values<double>(x);
  Doubles expected;
  for (int64_t plane = 0; plane < 6; ++plane) {
    const Doubles elements(in.begin() + plane * 30, in.begin() + (plane + 1) * 30);
    for (int64_t i = 0; i < 12; ++i) {
      const Doubles under = Under(elements, 5, 6, i / 4 * 2 - 1, i % 4, {3, 2}, {1, 2});
      expected.push_back(*std::max_element(under.begin(), under.end()));
    }
  }
  EXPECT_EQ(Values<double>(y), expected);
  // Side by side unless a stride is given.
  EXPECT_EQ(MaxPool2d(x, 2).shape(), Shape({2, 3, 2, 3}));
  const Tensor bytes = FromHost<int8_t>(session_, {-3, -128, 4, 5}, {1, 1, 2, 2});
  EXPECT_THAT(Values<int8_t>(MaxPool2d(bytes, {2, 1})), ElementsAre(4, 5));
}

TEST_F(ConvTest, MaxPoolsGradientGoesToTheFirstLargest) {
  const Tensor x = FromHost<double>(session_, {1, 7, 7, 0, NAN, 2}, {1, 1, 1, 6}).RequireGrad();
  const Tensor y = MaxPool2d(x, {1, 3});
  EXPECT_EQ(Values<double>(y)[0], 7);
  EXPECT_TRUE(std::isnan(Values<double>(y)[1]));
  ASSERT_TRUE(Backward(Sum(y)).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(0, 1, 0, 0, 1, 0));
}

TEST_F(ConvTest, AvgPoolIsTheMean) {
  const Tensor x = Numbers({2, 1, 4, 5});
  const Doubles in = Values<double>(x);
  for (const bool count_padding : {false, true}) {
    AvgPool2dOptions options;
    options.stride = {1, 2};
    options.padding = {1, 1};
    options.count_padding = count_padding;
    const Tensor y = AvgPool2d(x, {2, 3}, options);
    ASSERT_TRUE(y.status().ok()) << y.status();
    ASSERT_EQ(y.shape(), Shape({2, 1, 5, 3}));
    Doubles expected;
    for (int64_t i = 0; i < 30; ++i) {
      const Doubles elements(in.begin() + i / 15 * 20, in.begin() + (i / 15 + 1) * 20);
      const Doubles under = Under(elements, 4, 5, i % 15 / 3 - 1, i % 3 * 2 - 1, {2, 3});
      double sum = 0;
      for (const double element : under) sum += element;
      expected.push_back(sum / (count_padding ? 6 : static_cast<double>(under.size())));
    }
    EXPECT_THAT(Values<double>(y), Near(expected));
  }
  // Padding counts unless it is said.
  AvgPool2dOptions padded;
  padded.padding = 1;
  const Tensor one = FromHost<double>(session_, {8}, {1, 1, 1, 1});
  EXPECT_THAT(Values<double>(AvgPool2d(one, 2, padded)), ElementsAre(2));
}

// Of more than a window may have.
TEST_F(ConvTest, AdaptiveAvgPoolTakesPartsOfAnyLength) {
  const Tensor x = Full(session_, DType::kF32, {1, 1, 1, int64_t{1} << 22}, 1);
  EXPECT_THAT(Values<float>(AdaptiveAvgPool2d(x, {1, 2})), ElementsAre(1, 1));
}

TEST_F(ConvTest, AdaptiveAvgPoolCoversAllWithParts) {
  const Tensor x = Numbers({1, 2, 5, 6});
  const Doubles in = Values<double>(x);
  for (const HeightWidth size : {HeightWidth(1), HeightWidth(5, 3), HeightWidth(5, 6),
                                 HeightWidth(3, 4), HeightWidth(2, 6), HeightWidth(7, 1)}) {
    const Tensor y = AdaptiveAvgPool2d(x, size);
    ASSERT_TRUE(y.status().ok()) << y.status();
    ASSERT_EQ(y.shape(), Shape({1, 2, size.h, size.w}));
    Doubles expected;
    for (int64_t c = 0; c < 2; ++c) {
      const Doubles plane(in.begin() + c * 30, in.begin() + (c + 1) * 30);
      for (int64_t i = 0; i < size.h; ++i) {
        for (int64_t j = 0; j < size.w; ++j) {
          const int64_t top = i * 5 / size.h, bottom = ((i + 1) * 5 + size.h - 1) / size.h;
          const int64_t left = j * 6 / size.w, right = ((j + 1) * 6 + size.w - 1) / size.w;
          const Doubles under = Under(plane, 5, 6, top, left, {bottom - top, right - left});
          double sum = 0;
          for (const double element : under) sum += element;
          expected.push_back(sum / static_cast<double>(under.size()));
        }
      }
    }
    EXPECT_THAT(Values<double>(y), Near(expected)) << size.h << " " << size.w;
  }
}

// Means of the first part's columns are 2049 and 2050; f16 has no 2049, and takes 2048.
TEST_F(ConvTest, AdaptiveAvgPoolOfHalvesIsRoundedOnce) {
  const Tensor x =
      Cast(FromHost<float>(session_, {2048, 2050, 0, 2050, 2050, 0, 0, 0, 0}, {1, 1, 3, 3}),
           DType::kF16);
  const Tensor y = AdaptiveAvgPool2d(x, 2);
  EXPECT_EQ(y.dtype(), DType::kF16);
  EXPECT_THAT(Values<float>(Cast(Reshape(Slice(Slice(y, 2, 0, 1), 3, 0, 1), {1}), DType::kF32)),
              ElementsAre(2050));
}

TEST_F(ConvTest, PoolingHasGradients) {
  ExpectGradients(
      [](const std::vector<Tensor>& in) {
        const Tensor y = MaxPool2d(in[0], 2);
        return y * y;
      },
      {Numbers({1, 2, 4, 5})});
  ExpectGradients(
      [](const std::vector<Tensor>& in) {
        AvgPool2dOptions options;
        options.padding = {1, 0};
        options.stride = 1;
        options.count_padding = false;
        const Tensor y = AvgPool2d(in[0], 2, options);
        return y * y;
      },
      {Numbers({1, 2, 3, 3})});
  ExpectGradients(
      [](const std::vector<Tensor>& in) {
        const Tensor y = AdaptiveAvgPool2d(in[0], {2, 1});
        return y * y;
      },
      {Numbers({1, 2, 3, 2})});
}

TEST_F(ConvTest, PoolingRefusesWhatDoesNotFit) {
  const auto text = [](const Tensor& x) {
    EXPECT_EQ(ErrorOf(x.status()).reason, Reason::kBadType);
    return std::string(x.status().message());
  };
  const Tensor x = Numbers({1, 2, 3, 4});
  EXPECT_THAT(text(MaxPool2d(x, 4)), HasSubstr("max_pool_index: expected an x of at least 4 along "
                                               "dimension 2, got f64[1,2,3,4]"));
  EXPECT_THAT(text(AvgPool2d(Numbers({2, 3}), 1)),
              HasSubstr("avg_pool: expected x [n, channels, h, w], got f64[2,3]"));
  EXPECT_THAT(text(AdaptiveAvgPool2d(x, {1, 0})), HasSubstr("got f64[1,2,3,4] to 1 and 0"));
  EXPECT_THAT(text(AdaptiveAvgPool2d(Numbers({2, 3}), 1)), HasSubstr("got f64[2,3] to 1 and 1"));
  EXPECT_THAT(text(AdaptiveAvgPool2d(x, {int64_t{1} << 40, 1})),
              HasSubstr("expected sizes of at most 65536"));
  const Tensor failed = FromError(session_, absl::InternalError("before"));
  for (const Tensor& y :
       {MaxPool2d(failed, 2), AvgPool2d(failed, 2), AdaptiveAvgPool2d(failed, 2)}) {
    EXPECT_THAT(std::string(y.status().message()), HasSubstr("before"));
  }
}

TEST_F(ConvTest, AdaptiveAvgPoolOfWholeNumbersIsRefused) {
  for (const DType dtype : {DType::kU8, DType::kI64}) {
    const Tensor x = Zeros(session_, dtype, {1, 1, 5, 6});
    for (const HeightWidth size : {HeightWidth(3, 4), {1, 1}, {5, 3}, {3, 6}}) {
      const absl::Status status = AdaptiveAvgPool2d(x, size).status();
      EXPECT_EQ(ErrorOf(status).reason, Reason::kUnsupported) << status;
    }
  }
}

TEST_F(ConvTest, OfALostSessionPoolingGivesTheSessionsError) {
  Session session = daemon_.Open();
  const Tensor x = chorus::testing::Numbers(session, {1, 1, 5, 6}, 0);
  ASSERT_TRUE(session.Close().ok());
  for (const Tensor& y : {MaxPool2d(x, 2), AvgPool2d(x, 2), AdaptiveAvgPool2d(x, {3, 4})}) {
    EXPECT_EQ(ErrorOf(y.status()).reason, Reason::kSessionLost);
  }
}

// In f16 a quarter more than 512 is 512.
TEST_F(ConvTest, HalfTypesAreAddedUpInF32AndRoundedOnce) {
  const Tensor x = Cast(FromHost<float>(session_, {0.25f, 512, 0.25f}, {1, 1, 3}), DType::kF16);
  const Tensor ones = Cast(FromHost<float>(session_, {1, 1, 1}, {1, 1, 3}), DType::kF16);
  const Tensor leaf = x.Detach().RequireGrad();
  const Tensor y = Conv1d(leaf, ones);
  EXPECT_EQ(y.dtype(), DType::kF16);
  EXPECT_THAT(Values<float>(Cast(y, DType::kF32)), ElementsAre(512.5));
  ASSERT_TRUE(Backward(Sum(y)).ok());
  EXPECT_EQ(leaf.grad().dtype(), DType::kF16);
}

TEST_F(ConvTest, ErrorsSayWhatWasExpected) {
  const auto text = [](const Tensor& x) {
    EXPECT_EQ(ErrorOf(x.status()).reason, Reason::kBadType);
    return std::string(x.status().message());
  };
  const Tensor image = Numbers({1, 2, 3, 4});
  EXPECT_THAT(
      text(Conv2d(image, Numbers({3, 1, 2, 2}))),
      HasSubstr("convolution: expected x [n, groups in, h, w] and weights [out, in, kh, kw] "
                "with out a multiple of groups=1, got f64[1,2,3,4] and f64[3,1,2,2]"));
  EXPECT_THAT(text(Conv1d(image, Numbers({3, 1, 2}))),
              HasSubstr("Conv1d: expected x [n, in, l] and a weight [out, in, k], got f64[1,2,3,4] "
                        "and f64[3,1,2]"));
  EXPECT_THAT(text(ConvTranspose2d(image, Numbers({2, 2, 2}))),
              HasSubstr("ConvTranspose2d: expected x [n, in, h, w] and a weight [in, out, kh, kw], "
                        "got f64[1,2,3,4] and f64[2,2,2]"));
  ConvTranspose2dOptions options;
  options.output_padding = 1;
  EXPECT_THAT(text(ConvTranspose2d(image, Numbers({2, 2, 2, 2}), options)),
              HasSubstr("as input 0, which a convolution"));
  // The usual slip of mixed precision.
  const Tensor weight = Numbers({3, 2, 2, 2});
  EXPECT_THAT(text(Conv2d(Cast(image, DType::kBF16), Cast(weight, DType::kF32))),
              HasSubstr("convolution: expected operands of one dtype, got bf16[1,2,3,4] and "
                        "f32[3,2,2,2]"));
  text(Conv2d(Cast(image, DType::kF32), Cast(weight, DType::kF16)));
  text(Conv2d(image, Cast(weight, DType::kF32)));
  const Tensor failed = FromError(session_, absl::InternalError("before"));
  EXPECT_THAT(std::string(Conv1d(failed, Numbers({3, 1, 2})).status().message()),
              HasSubstr("before"));
  EXPECT_THAT(std::string(ConvTranspose2d(failed, image).status().message()), HasSubstr("before"));
}

}  // namespace
}  // namespace chorus
