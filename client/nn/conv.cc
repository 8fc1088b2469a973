#include "chorus/nn/conv.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "chorus/math.h"
#include "chorus/nn/init.h"
#include "client/internal/local.h"

namespace chorus {
namespace nn {
namespace {

using internal::IsUsable;
using internal::TypeText;

std::string TextOf(HeightWidth sizes) { return absl::StrCat(sizes.h, "x", sizes.w); }
bool AtLeast(HeightWidth sizes, int64_t least) { return sizes.h >= least && sizes.w >= least; }

// What a weight is made for, so that one of a constructor that is refused has a shape too.
int64_t PerGroup(int64_t channels, int64_t groups) { return groups < 1 ? 0 : channels / groups; }

bool GroupsFit(int64_t in, int64_t out, int64_t groups) {
  return in >= 0 && out >= 0 && groups >= 1 && in % groups == 0 && out % groups == 0;
}

constexpr char kExpected[] =
    "expected groups that divide in and out, kernel, stride and dilation from 1, and padding from "
    "0, got ";

// How large x must be along one dimension, for the kernel to fit once.
int64_t LeastSize(int64_t kernel, int64_t padding, int64_t dilation) {
  return std::max<int64_t>(dilation * (kernel - 1) + 1 - 2 * padding, 0);
}
// How large, for one element of a transposed convolution's result.
int64_t LeastTransposed(int64_t kernel, int64_t stride, int64_t padding, int64_t output_padding,
                        int64_t dilation) {
  const int64_t lacks = 2 * padding - dilation * (kernel - 1) - output_padding;
  return 1 + (lacks > 0 ? (lacks + stride - 1) / stride : 0);
}

constexpr char kExpectedWindow[] =
    "expected kernel and dilation from 1, stride from 1, or 0 for the kernel's, and padding from 0 "
    "to half a window, got ";
// `extent`: from the window's first tap to its last.
bool WindowFits(HeightWidth kernel, HeightWidth stride, HeightWidth padding, HeightWidth extent) {
  return AtLeast(kernel, 1) && AtLeast(stride, 0) && AtLeast(padding, 0) &&
         2 * padding.h <= extent.h && 2 * padding.w <= extent.w;
}

// What is wrong with x where [n, channels, h, w] is expected; empty if nothing is, or x has no
// shape.
std::string ImageError(const Tensor& x, HeightWidth least,
                       std::optional<int64_t> channels = std::nullopt) {
  if (!IsUsable(x)) return "";
  const bool fits = x.shape().size() == 4 && (!channels.has_value() || x.shape()[1] == *channels) &&
                    x.shape()[2] >= least.h && x.shape()[3] >= least.w;
  if (fits) return "";
  return absl::StrCat("expected [n, ", channels.has_value() ? absl::StrCat(*channels) : "channels",
                      ", h, w] with h from ", least.h, " and w from ", least.w, ", got ",
                      TypeText(x));
}

}  // namespace

// --- Convolutions -------------------------------------------------------------------------------

Convolution::Convolution(std::string kind, const Shape& weight, int64_t out, bool bias)
    : Module(std::move(kind)) {
  int64_t fan_in = 1;
  for (size_t d = 1; d < weight.size(); ++d) fan_in *= weight[d];
  weight_ = AddParameter("weight", weight, init::FanInUniform(fan_in));
  if (bias) bias_ = AddParameter("bias", {out}, init::FanInUniform(fan_in));
}

Tensor Convolution::Biased(const Tensor& y) const {
  if (!bias_.defined() || !IsUsable(y)) return y;
  Shape per_channel(y.shape().size() - 1, 1);
  per_channel[0] = bias_.shape()[0];
  return y + Reshape(bias_(), per_channel);
}

Conv1d::Conv1d(int64_t in, int64_t out, int64_t kernel, const Conv1dOptions& options, bool bias)
    : Convolution("Conv1d", {out, PerGroup(in, options.groups), kernel}, out, bias),
      in_(in),
      out_(out),
      kernel_(kernel),
      options_(options) {
  if (!GroupsFit(in, out, options.groups) || kernel < 1 || options.stride < 1 ||
      options.dilation < 1 || options.padding < 0) {
    RefuseAll(absl::StrCat(kExpected, description()));
  }
}

Tensor Conv1d::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  const int64_t least = LeastSize(kernel_, options_.padding, options_.dilation);
  if (IsUsable(x) && (x.shape().size() != 3 || x.shape()[1] != in_ || x.shape()[2] < least)) {
    return Refuse(
        x, absl::StrCat("expected [n, ", in_, ", l] with l from ", least, ", got ", TypeText(x)));
  }
  return Biased(chorus::Conv1d(x, weight()(), options_));
}

std::string Conv1d::description() const {
  return absl::StrCat("in=", in_, ", out=", out_, ", kernel=", kernel_,
                      ", stride=", options_.stride, ", padding=", options_.padding,
                      ", dilation=", options_.dilation, ", groups=", options_.groups);
}

Conv2d::Conv2d(int64_t in, int64_t out, HeightWidth kernel, const Conv2dOptions& options, bool bias)
    : Convolution("Conv2d", {out, PerGroup(in, options.groups), kernel.h, kernel.w}, out, bias),
      in_(in),
      out_(out),
      kernel_(kernel),
      options_(options) {
  if (!GroupsFit(in, out, options.groups) || !AtLeast(kernel, 1) || !AtLeast(options.stride, 1) ||
      !AtLeast(options.dilation, 1) || !AtLeast(options.padding, 0)) {
    RefuseAll(absl::StrCat(kExpected, description()));
  }
}

Tensor Conv2d::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  const HeightWidth least(LeastSize(kernel_.h, options_.padding.h, options_.dilation.h),
                          LeastSize(kernel_.w, options_.padding.w, options_.dilation.w));
  const std::string error = ImageError(x, least, in_);
  if (!error.empty()) return Refuse(x, error);
  return Biased(chorus::Conv2d(x, weight()(), options_));
}

std::string Conv2d::description() const {
  return absl::StrCat("in=", in_, ", out=", out_, ", kernel=", TextOf(kernel_),
                      ", stride=", TextOf(options_.stride), ", padding=", TextOf(options_.padding),
                      ", dilation=", TextOf(options_.dilation), ", groups=", options_.groups);
}

ConvTranspose2d::ConvTranspose2d(int64_t in, int64_t out, HeightWidth kernel,
                                 const ConvTranspose2dOptions& options, bool bias)
    : Convolution("ConvTranspose2d", {in, PerGroup(out, options.groups), kernel.h, kernel.w}, out,
                  bias),
      in_(in),
      out_(out),
      kernel_(kernel),
      options_(options) {
  if (!GroupsFit(in, out, options.groups) || !AtLeast(kernel, 1) || !AtLeast(options.stride, 1) ||
      !AtLeast(options.dilation, 1) || !AtLeast(options.padding, 0)) {
    RefuseAll(absl::StrCat(kExpected, description()));
  } else if (!AtLeast(options.output_padding, 0) || options.output_padding.h >= options.stride.h ||
             options.output_padding.w >= options.stride.w) {
    RefuseAll(absl::StrCat("expected an output padding from 0 and below the stride, ",
                           TextOf(options.stride), ", got ", TextOf(options.output_padding)));
  }
}

Tensor ConvTranspose2d::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  const ConvTranspose2dOptions& o = options_;
  const HeightWidth least(
      LeastTransposed(kernel_.h, o.stride.h, o.padding.h, o.output_padding.h, o.dilation.h),
      LeastTransposed(kernel_.w, o.stride.w, o.padding.w, o.output_padding.w, o.dilation.w));
  const std::string error = ImageError(x, least, in_);
  if (!error.empty()) return Refuse(x, error);
  return Biased(chorus::ConvTranspose2d(x, weight()(), options_));
}

std::string ConvTranspose2d::description() const {
  return absl::StrCat("in=", in_, ", out=", out_, ", kernel=", TextOf(kernel_),
                      ", stride=", TextOf(options_.stride), ", padding=", TextOf(options_.padding),
                      ", output_padding=", TextOf(options_.output_padding),
                      ", dilation=", TextOf(options_.dilation), ", groups=", options_.groups);
}

// --- Pooling ------------------------------------------------------------------------------------

MaxPool2d::MaxPool2d(HeightWidth kernel, const MaxPool2dOptions& options)
    : Module("MaxPool2d"), kernel_(kernel), options_(options) {
  const HeightWidth extent(options.dilation.h * (kernel.h - 1) + 1,
                           options.dilation.w * (kernel.w - 1) + 1);
  if (!AtLeast(options.dilation, 1) ||
      !WindowFits(kernel, options.stride, options.padding, extent)) {
    RefuseAll(absl::StrCat(kExpectedWindow, description()));
  }
}

Tensor MaxPool2d::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  // Taps that are further apart may all be over padding.
  const auto least_of = [](int64_t kernel, int64_t padding, int64_t dilation) {
    return std::max(LeastSize(kernel, padding, dilation), padding > 0 ? dilation : 1);
  };
  const HeightWidth least(least_of(kernel_.h, options_.padding.h, options_.dilation.h),
                          least_of(kernel_.w, options_.padding.w, options_.dilation.w));
  const std::string error = ImageError(x, least);
  if (!error.empty()) return Refuse(x, error);
  return chorus::MaxPool2d(x, kernel_, options_);
}

std::string MaxPool2d::description() const {
  return absl::StrCat("kernel=", TextOf(kernel_), ", stride=", TextOf(options_.stride),
                      ", padding=", TextOf(options_.padding),
                      ", dilation=", TextOf(options_.dilation));
}

AvgPool2d::AvgPool2d(HeightWidth kernel, const AvgPool2dOptions& options)
    : Module("AvgPool2d"), kernel_(kernel), options_(options) {
  if (!WindowFits(kernel, options.stride, options.padding, kernel)) {
    RefuseAll(absl::StrCat(kExpectedWindow, description()));
  }
}

Tensor AvgPool2d::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  const HeightWidth least(std::max<int64_t>(LeastSize(kernel_.h, options_.padding.h, 1), 1),
                          std::max<int64_t>(LeastSize(kernel_.w, options_.padding.w, 1), 1));
  const std::string error = ImageError(x, least);
  if (!error.empty()) return Refuse(x, error);
  return chorus::AvgPool2d(x, kernel_, options_);
}

std::string AvgPool2d::description() const {
  return absl::StrCat("kernel=", TextOf(kernel_), ", stride=", TextOf(options_.stride),
                      ", padding=", TextOf(options_.padding),
                      options_.count_padding ? "" : ", without padding in the mean");
}

AdaptiveAvgPool2d::AdaptiveAvgPool2d(HeightWidth size) : Module("AdaptiveAvgPool2d"), size_(size) {
  if (!AtLeast(size, 1)) RefuseAll(absl::StrCat("expected sizes from 1, got ", TextOf(size)));
}

Tensor AdaptiveAvgPool2d::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  const std::string error = ImageError(x, 1);
  if (!error.empty()) return Refuse(x, error);
  return chorus::AdaptiveAvgPool2d(x, size_);
}

std::string AdaptiveAvgPool2d::description() const { return TextOf(size_); }

}  // namespace nn
}  // namespace chorus
