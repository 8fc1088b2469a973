#include "chorus/nn/conv.h"

#include <cmath>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "client/nn/testing/layer_gradients.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace nn {
namespace {

using chorus::testing::FakeDaemon;
using chorus::testing::Values;
using nn::testing::ExpectLayerGradients;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pointwise;

using Doubles = std::vector<double>;

auto Near(const Doubles& values) { return Pointwise(DoubleNear(1e-12), values); }

class ConvLayersTest : public ::testing::Test {
 protected:
  Tensor Numbers(const Shape& shape, int seed = 0) {
    return chorus::testing::Numbers(session_, shape, seed);
  }
  std::string Refusal(Module* layer, const Tensor& x) {
    EXPECT_TRUE(layer->Init(session_, 1, DType::kF64).ok());
    const Tensor y = (*layer)(x);
    EXPECT_EQ(ErrorOf(y.status()).reason, Reason::kBadType);
    return std::string(y.status().message());
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
};

TEST_F(ConvLayersTest, ConvolutionsAreTheFunctionsPlusBias) {
  const Tensor x = Numbers({2, 2, 5, 4});
  Conv2dOptions options;
  options.stride = {2, 1};
  options.groups = 2;
  Conv2d conv(2, 4, {3, 2}, options);
  ASSERT_TRUE(conv.Init(session_, 1, DType::kF64).ok());
  EXPECT_EQ(conv.weight().shape(), Shape({4, 1, 3, 2}));
  for (const Variable& parameter : conv.parameters()) {
    double most = 0;
    for (const double value : Values<double>(parameter())) most = std::max(most, std::abs(value));
    EXPECT_LE(most, 1 / std::sqrt(6.0));
    EXPECT_GT(most, 0.5 / std::sqrt(6.0));
  }
  const Tensor plain = chorus::Conv2d(x, conv.weight()(), options);
  const Tensor y = conv(x);
  EXPECT_EQ(y.shape(), Shape({2, 4, 2, 3}));
  Doubles expected = Values<double>(plain);
  const Doubles bias = Values<double>(conv.bias()());
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += bias[i / 6 % 4];
  EXPECT_THAT(Values<double>(y), Near(expected));
  ASSERT_TRUE(Backward(Sum(y)).ok());
  EXPECT_THAT(Values<double>(conv.bias().grad()), ElementsAre(12, 12, 12, 12));

  Conv2d unbiased(2, 3, 2, Conv2dOptions(), /*bias=*/false);
  ASSERT_TRUE(unbiased.Init(session_, 1, DType::kF64).ok());
  EXPECT_EQ(unbiased.parameters().size(), 1u);
  EXPECT_THAT(Values<double>(unbiased(x)),
              Near(Values<double>(chorus::Conv2d(x, unbiased.weight()()))));

  ConvTranspose2dOptions grown;
  grown.stride = 2;
  grown.output_padding = 1;
  ConvTranspose2d transposed(2, 3, 2, grown);
  ASSERT_TRUE(transposed.Init(session_, 1, DType::kF64).ok());
  EXPECT_EQ(transposed.weight().shape(), Shape({2, 3, 2, 2}));
  EXPECT_EQ(transposed.bias().shape(), Shape({3}));
  EXPECT_EQ(transposed(x).shape(), Shape({2, 3, 11, 9}));

  Conv1d row(2, 3, 2);
  ASSERT_TRUE(row.Init(session_, 1, DType::kF64).ok());
  const Tensor sequence = Numbers({1, 2, 3});
  Doubles row_expected = Values<double>(chorus::Conv1d(sequence, row.weight()()));
  for (size_t i = 0; i < row_expected.size(); ++i) {
    row_expected[i] += Values<double>(row.bias()())[i / 2];
  }
  EXPECT_THAT(Values<double>(row(sequence)), Near(row_expected));
}

TEST_F(ConvLayersTest, ConvolutionsHaveGradients) {
  Conv1d row(2, 1, 2);
  ExpectLayerGradients(&row, Numbers({1, 2, 3}));
  Conv2d conv(1, 2, 2);
  ExpectLayerGradients(&conv, Numbers({1, 1, 3, 3}));
  ConvTranspose2d transposed(1, 2, 2);
  ExpectLayerGradients(&transposed, Numbers({1, 1, 2, 2}));
}

TEST_F(ConvLayersTest, ConvolutionsRefuseWhatDoesNotFit) {
  Conv1d row(3, 4, 5);
  EXPECT_THAT(Refusal(&row, Numbers({2, 3, 4})),
              HasSubstr("Conv1d: expected [n, 3, l] with l from 5, got f64[2,3,4]"));
  EXPECT_THAT(Refusal(&row, Numbers({2, 4, 9})), HasSubstr("Conv1d: expected [n, 3, l]"));
  Sequential model;
  Conv2d& conv = model.Append<Conv2d>(3, 4, HeightWidth(5, 2));
  EXPECT_THAT(Refusal(&model, Numbers({2, 4, 9, 9})),
              HasSubstr("0 (Conv2d): expected [n, 3, h, w] with h from 5 and w from 2, got "
                        "f64[2,4,9,9]"));
  EXPECT_THAT(Refusal(&model, Numbers({2, 3, 4, 9})), HasSubstr("got f64[2,3,4,9]"));
  EXPECT_THAT(Refusal(&model, Numbers({2, 3, 9, 1})), HasSubstr("got f64[2,3,9,1]"));
  EXPECT_THAT(Refusal(&model, Numbers({3, 9, 9})), HasSubstr("got f64[3,9,9]"));
  EXPECT_EQ(conv(Numbers({2, 3, 5, 2})).shape(), Shape({2, 4, 1, 1}));
  ConvTranspose2dOptions padded;
  padded.padding = {2, 0};
  ConvTranspose2d transposed(3, 4, 1, padded);
  EXPECT_THAT(Refusal(&transposed, Numbers({2, 3, 4, 1})),
              HasSubstr("ConvTranspose2d: expected [n, 3, h, w] with h from 5 and w from 1, got "
                        "f64[2,3,4,1]"));
  EXPECT_EQ(transposed(Numbers({2, 3, 5, 1})).shape(), Shape({2, 4, 1, 1}));
}

TEST_F(ConvLayersTest, ConvolutionsThatMakeNoSenseAreRefused) {
  const auto text = [this](Module&& layer) {
    return std::string(layer.Init(session_, 1).message());
  };
  Conv2dOptions options;
  options.groups = 2;
  EXPECT_THAT(text(Conv2d(3, 4, 1, options)),
              HasSubstr("Conv2d: expected groups that divide in and out, kernel, stride and "
                        "dilation from 1, and padding from 0, got in=3, out=4, kernel=1x1, "
                        "stride=1x1, padding=0x0, dilation=1x1, groups=2"));
  options.groups = 0;
  EXPECT_THAT(text(Conv2d(3, 4, 1, options)), HasSubstr("groups=0"));
  EXPECT_THAT(text(Conv2d(3, 4, {1, 0})), HasSubstr("kernel=1x0"));
  Conv1dOptions row;
  row.padding = -1;
  EXPECT_THAT(text(Conv1d(3, 4, 1, row)), HasSubstr("padding=-1"));
  ConvTranspose2dOptions grown;
  grown.output_padding = 1;
  EXPECT_THAT(text(ConvTranspose2d(3, 4, 1, grown)),
              HasSubstr("ConvTranspose2d: expected an output padding from 0 and below the stride, "
                        "1x1, got 1x1"));
}

TEST_F(ConvLayersTest, PoolsAreTheFunctions) {
  MaxPool2dOptions most;
  most.stride = 1;
  most.padding = {1, 0};
  AvgPool2dOptions mean;
  mean.padding = {1, 1};
  mean.count_padding = false;
  Sequential model;
  model.Append<MaxPool2d>(2, most);
  model.Append<AvgPool2d>(HeightWidth(3, 2), mean);
  model.Append<AdaptiveAvgPool2d>(HeightWidth(2, 1));
  ASSERT_TRUE(model.Init(session_, 1).ok());
  const Tensor x = Numbers({2, 3, 6, 7});
  const Tensor y = chorus::AdaptiveAvgPool2d(
      chorus::AvgPool2d(chorus::MaxPool2d(x, 2, most), {3, 2}, mean), {2, 1});
  ASSERT_TRUE(y.status().ok()) << y.status();
  EXPECT_EQ(Values<double>(model(x)), Values<double>(y));
  EXPECT_THAT(model.ToString(),
              HasSubstr("AvgPool2d(kernel=3x2, stride=0x0, padding=1x1, without padding"));

  EXPECT_THAT(Refusal(&model, Numbers({2, 3, 6})),
              HasSubstr("0 (MaxPool2d): expected [n, channels, h, w] with h from 1 and w from 2, "
                        "got f64[2,3,6]"));
  EXPECT_THAT(Refusal(&model, Numbers({2, 3, 1, 1})), HasSubstr("(MaxPool2d)"));
  AvgPool2d plain({4, 1});
  EXPECT_THAT(Refusal(&plain, Numbers({2, 3, 3, 3})),
              HasSubstr("AvgPool2d: expected [n, channels, h, w] with h from 4 and w from 1, got "
                        "f64[2,3,3,3]"));
  AdaptiveAvgPool2d all(1);
  EXPECT_THAT(Refusal(&all, Numbers({2, 3, 0, 3})),
              HasSubstr("AdaptiveAvgPool2d: expected [n, channels, h, w] with h from 1 and w from "
                        "1, got f64[2,3,0,3]"));
  most.padding = 2;
  EXPECT_THAT(
      std::string(MaxPool2d(2, most).Init(session_, 1).message()),
      HasSubstr("padding from 0 to half a window, got kernel=2x2, stride=1x1, padding=2x2"));
  EXPECT_FALSE(AvgPool2d(0).Init(session_, 1).ok());
  EXPECT_FALSE(AdaptiveAvgPool2d({1, 0}).Init(session_, 1).ok());
}

}  // namespace
}  // namespace nn
}  // namespace chorus
