#include "chorus/functional/conv.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "chorus/math.h"
#include "client/internal/local.h"
#include "client/internal/record.h"
#include "core/base/error.h"
#include "core/ops/window.h"

namespace chorus {
namespace {

using internal::ApplyLocal;
using internal::Fail;
using internal::IsUsable;
using internal::Spec;
using internal::TypeText;

std::vector<int64_t> Pair(HeightWidth sizes) { return {sizes.h, sizes.w}; }

bool IsHalf(const Tensor& x) {
  return IsUsable(x) && (x.dtype() == DType::kF16 || x.dtype() == DType::kBF16);
}

// The op on operands of one dtype; half types in f32.
Tensor Convolve(const char* op, const Tensor& a, const Tensor& b, Attributes attributes,
                CallSite site) {
  NodeSpec spec = Spec(op, site, std::move(attributes));
  if (!IsHalf(a) && !IsHalf(b)) return ApplyLocal(std::move(spec), {a, b});
  // The op would say that it takes no half types.
  if (IsUsable(a) && IsUsable(b) && a.dtype() != b.dtype()) {
    return Fail(a,
                BadType(absl::StrCat(op, ": expected operands of one dtype, got ", TypeText(a),
                                     " and ", TypeText(b))),
                site);
  }
  const Tensor wide =
      ApplyLocal(std::move(spec), {Cast(a, DType::kF32, site), Cast(b, DType::kF32, site)});
  return Cast(wide, a.dtype(), site);
}

bool HasRank(const Tensor& x, size_t rank) { return !IsUsable(x) || x.shape().size() == rank; }

// With a dimension of 1 before the last; what has no shape as it is.
Tensor Flat(const Tensor& x, CallSite site) {
  if (!IsUsable(x)) return x;
  Shape shape = x.shape();
  shape.insert(shape.end() - 1, 1);
  return Reshape(x, shape, site);
}
// And without it.
Tensor Unflat(const Tensor& x, CallSite site) {
  if (!IsUsable(x)) return x;
  Shape shape = x.shape();
  shape.erase(shape.end() - 2);
  return Reshape(x, shape, site);
}

std::vector<int64_t> StrideOf(HeightWidth stride, HeightWidth kernel) {
  return {stride.h == 0 ? kernel.h : stride.h, stride.w == 0 ? kernel.w : stride.w};
}

Tensor Average(const Tensor& x, HeightWidth kernel, const AvgPool2dOptions& options,
               CallSite site) {
  return ApplyLocal(Spec("avg_pool", site,
                         {{"count_padding", int64_t{options.count_padding ? 1 : 0}},
                          {"kernel", Pair(kernel)},
                          {"padding", Pair(options.padding)},
                          {"stride", StrideOf(options.stride, kernel)}}),
                    {x});
}

// Each is two ops.
constexpr int64_t kMostParts = 65536;

// Along one axis: the means of `size` parts that cover it; what has no shape as it is.
Tensor MeansOfParts(const Tensor& x, int64_t axis, int64_t size, CallSite site) {
  if (!IsUsable(x)) return x;
  const int64_t all = x.shape()[static_cast<size_t>(axis)];
  if (size == all) return x;
  std::vector<Tensor> means;
  for (int64_t i = 0; i < size; ++i) {
    const Tensor part = Slice(x, axis, i * all / size, ((i + 1) * all + size - 1) / size, site);
    means.push_back(Mean(part, {axis}, /*keep_dims=*/true, site));
  }
  return Concat(means, axis, site);
}

}  // namespace

Tensor Conv1d(const Tensor& x, const Tensor& weight, const Conv1dOptions& options, CallSite site) {
  if (!HasRank(x, 3) || !HasRank(weight, 3)) {
    return Fail(
        x,
        BadType(absl::StrCat("Conv1d: expected x [n, in, l] and a weight [out, in, k], got ",
                             IsUsable(x) ? TypeText(x) : "none", " and ",
                             IsUsable(weight) ? TypeText(weight) : "none")),
        site);
  }
  Conv2dOptions flat;
  flat.stride = {1, options.stride};
  flat.padding = {0, options.padding};
  flat.dilation = {1, options.dilation};
  flat.groups = options.groups;
  return Unflat(Conv2d(Flat(x, site), Flat(weight, site), flat, site), site);
}

Tensor Conv2d(const Tensor& x, const Tensor& weight, const Conv2dOptions& options, CallSite site) {
  return Convolve("convolution", x, weight,
                  {{"dilation", Pair(options.dilation)},
                   {"groups", options.groups},
                   {"padding", Pair(options.padding)},
                   {"stride", Pair(options.stride)}},
                  site);
}

Tensor ConvTranspose2d(const Tensor& x, const Tensor& weight, const ConvTranspose2dOptions& options,
                       CallSite site) {
  std::vector<int64_t> size = {0, 0};
  if (IsUsable(x) && IsUsable(weight)) {
    if (x.shape().size() != 4 || weight.shape().size() != 4) {
      return Fail(
          x,
          BadType(absl::StrCat("ConvTranspose2d: expected x [n, in, h, w] and a weight [in, "
                               "out, kh, kw], got ",
                               TypeText(x), " and ", TypeText(weight))),
          site);
    }
    const auto result_size = [&](size_t d, int64_t stride, int64_t padding, int64_t output_padding,
                                 int64_t dilation) {
      return (x.shape()[2 + d] - 1) * stride - 2 * padding +
             dilation * (weight.shape()[2 + d] - 1) + 1 + output_padding;
    };
    size = {result_size(0, options.stride.h, options.padding.h, options.output_padding.h,
                        options.dilation.h),
            result_size(1, options.stride.w, options.padding.w, options.output_padding.w,
                        options.dilation.w)};
  }
  return Convolve("convolution_data_grad", x, weight,
                  {{"dilation", Pair(options.dilation)},
                   {"groups", options.groups},
                   {"padding", Pair(options.padding)},
                   {"size", std::move(size)},
                   {"stride", Pair(options.stride)}},
                  site);
}

Tensor MaxPool2d(const Tensor& x, HeightWidth kernel, const MaxPool2dOptions& options,
                 CallSite site) {
  const Attributes window = {{"dilation", Pair(options.dilation)},
                             {"kernel", Pair(kernel)},
                             {"padding", Pair(options.padding)},
                             {"stride", StrideOf(options.stride, kernel)}};
  const Tensor index = ApplyLocal(Spec("max_pool_index", site, window), {x});
  if (!IsUsable(index)) return index;
  return ApplyLocal(Spec("max_pool_take", site, window), {x, index});
}

Tensor AvgPool2d(const Tensor& x, HeightWidth kernel, const AvgPool2dOptions& options,
                 CallSite site) {
  return Average(x, kernel, options, site);
}

Tensor AdaptiveAvgPool2d(const Tensor& x, HeightWidth size, CallSite site) {
  // The op says what it is not for; a mean of whole numbers has another reason.
  if (!IsUsable(x) || !IsFloating(x.dtype())) return Average(x, size, AvgPool2dOptions(), site);
  const bool fits = x.shape().size() == 4 && x.shape()[2] > 0 && x.shape()[3] > 0;
  if (!fits || size.h < 1 || size.w < 1) {
    return Fail(x,
                BadType(absl::StrCat("AdaptiveAvgPool2d: expected x [n, channels, h, w] with an "
                                     "element, to sizes from 1, got ",
                                     TypeText(x), " to ", size.h, " and ", size.w)),
                site);
  }
  const HeightWidth from(x.shape()[2], x.shape()[3]);
  if (size.h == 1 && size.w == 1) return Mean(x, {2, 3}, /*keep_dims=*/true, site);
  const HeightWidth part(from.h / size.h, from.w / size.w);
  // A window has a bound, a part none.
  if (from.h % size.h == 0 && from.w % size.w == 0 && std::max(part.h, part.w) <= kMostOfWindow) {
    return Average(x, part, AvgPool2dOptions(), site);
  }
  if (std::max(size.h, size.w) > kMostParts) {
    return Fail(x,
                BadType(absl::StrCat("AdaptiveAvgPool2d: expected sizes of at most ", kMostParts,
                                     ", but where they divide those of x, got ", TypeText(x),
                                     " to ", size.h, " and ", size.w)),
                site);
  }
  if (!IsHalf(x)) return MeansOfParts(MeansOfParts(x, 2, size.h, site), 3, size.w, site);
  // Rounded once, like any mean, and not between the axes.
  const Tensor wide = Cast(x, DType::kF32, site);
  return Cast(MeansOfParts(MeansOfParts(wide, 2, size.h, site), 3, size.w, site), x.dtype(), site);
}

}  // namespace chorus
