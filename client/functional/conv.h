// Convolutions and pooling. Recorded, compiled and differentiated, to any order, like the local ops
// of chorus/math.h; docs/ops.md has a table of all.
//
// Images are [n, channels, height, width], sequences [n, channels, length]. f16 and bf16 are
// computed in f32 and rounded once.
//
// Threads: any, as chorus/chorus.h says.
// Ownership: results are handles. An operand's handle may go as soon as the call has returned.
// Errors: in the results, with the line of the call: INVALID_ARGUMENT kBadType where shapes, dtypes
//   or options do not fit; UNIMPLEMENTED kUnsupported for a dtype that is not floating.
#ifndef CHORUS_CLIENT_FUNCTIONAL_CONV_H_
#define CHORUS_CLIENT_FUNCTIONAL_CONV_H_

#include <cstdint>

#include "chorus/call_site.h"
#include "chorus/tensor.h"

namespace chorus {

// Two numbers, or one for both: {3, 5}, 3.
struct HeightWidth {
  HeightWidth(int64_t both) : h(both), w(both) {}  // implicit
  HeightWidth(int64_t height, int64_t width) : h(height), w(width) {}
  int64_t h;
  int64_t w;
};

// `padding`: so many zeros on either side. `dilation`: how far a weight's taps are apart. `groups`:
// parts of the channels that do not see each other.
struct Conv1dOptions {
  int64_t stride = 1;
  int64_t padding = 0;
  int64_t dilation = 1;
  int64_t groups = 1;
};
struct Conv2dOptions {
  HeightWidth stride = 1;
  HeightWidth padding = 0;
  HeightWidth dilation = 1;
  int64_t groups = 1;
};
// `output_padding`: how much larger the result is, for several sizes shrink to one where the stride
// is not 1; less than the stride.
struct ConvTranspose2dOptions {
  HeightWidth stride = 1;
  HeightWidth padding = 0;
  HeightWidth output_padding = 0;
  HeightWidth dilation = 1;
  int64_t groups = 1;
};

// [n, in, l] by [out, in / groups, k] to [n, out, (l + 2 padding - dilation (k - 1) - 1) / stride
// + 1]. Nothing is flipped, and there is no bias: add one.
Tensor Conv1d(const Tensor& x, const Tensor& weight, const Conv1dOptions& options = Conv1dOptions(),
              CallSite site = CallSite::Here());
// [n, in, h, w] by [out, in / groups, kh, kw]; height and width as above.
Tensor Conv2d(const Tensor& x, const Tensor& weight, const Conv2dOptions& options = Conv2dOptions(),
              CallSite site = CallSite::Here());
// The adjoint of Conv2d in its x: [n, in, h, w] by [in, out / groups, kh, kw] to a height of
// (h - 1) stride - 2 padding + dilation (kh - 1) + 1 + output_padding, and a width likewise.
Tensor ConvTranspose2d(const Tensor& x, const Tensor& weight,
                       const ConvTranspose2dOptions& options = ConvTranspose2dOptions(),
                       CallSite site = CallSite::Here());

// `stride` 0: the kernel's, so that windows lie side by side. There is at most half a window of
// padding on a side. Windows that do not fit whole, with their padding, are left out.
struct MaxPool2dOptions {
  HeightWidth stride = 0;
  HeightWidth padding = 0;
  HeightWidth dilation = 1;
};
// `count_padding`: divides by all taps of a window, else by those that are over an element.
struct AvgPool2dOptions {
  HeightWidth stride = 0;
  HeightWidth padding = 0;
  bool count_padding = true;
};

// The largest element under each window, which has the gradient: the first of equals. NaN wins,
// padding never does. Of numbers.
Tensor MaxPool2d(const Tensor& x, HeightWidth kernel,
                 const MaxPool2dOptions& options = MaxPool2dOptions(),
                 CallSite site = CallSite::Here());
Tensor AvgPool2d(const Tensor& x, HeightWidth kernel,
                 const AvgPool2dOptions& options = AvgPool2dOptions(),
                 CallSite site = CallSite::Here());
// To `size`, by the means over rows floor(i h / size) to ceil((i + 1) h / size) and columns
// likewise; 1 is the mean over all. Sizes that do not divide those of x take some ops for each row
// and column of the result, and are at most 65,536.
Tensor AdaptiveAvgPool2d(const Tensor& x, HeightWidth size, CallSite site = CallSite::Here());

}  // namespace chorus

#endif  // CHORUS_CLIENT_FUNCTIONAL_CONV_H_
