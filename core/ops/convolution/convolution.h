// convolution(x, w) over two dimensions, and its two gradients: three maps that are linear in both
// of their operands, of which each one's gradients are the other two.
//
// x [n, groups in, h, w], w [out, in, kh, kw] -> y [n, out, places over h, places over w], where
// `out` is a multiple of `groups`: its channels of group g see the x of group g alone.
//   convolution(x, w): y[n,o,i,j] = sum over c, a, b of
//     x[n, in g + c, stride i - padding + dilation a, ...] w[o,c,a,b], with zeros around x.
//   convolution_data_grad(y, w), attribute size: h and w: the adjoint in x, a transposed
//     convolution.
//   convolution_weight_grad(x, y), attribute size: kh and kw: the adjoint in w.
// Attributes: stride, padding (on both sides), dilation: two numbers each, as in
// core/ops/window.h; groups (absent: 1). f32 and f64; the SDK computes half types in f32.
// VJPs, for output gradient g:
//   convolution:             x: data_grad(g, w);        w: weight_grad(x, g).
//   convolution_data_grad:   y: convolution(g, w);      w: weight_grad(g, y).
//   convolution_weight_grad: x: data_grad(y, g);        y: convolution(x, g).
// Second order: VJPs are made of these, so it goes through them: any order.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_H_
#define CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_H_

#include <array>
#include <cstdint>

#include "absl/types/span.h"
#include "core/ops/op.h"
#include "core/ops/window.h"

namespace chorus {

absl::Span<const OpDef* const> ConvolutionOps();

// The sizes that the three ops have in common.
struct ConvolutionSizes {
  int64_t batch = 0;
  int64_t groups = 1;
  int64_t in = 0;              // channels of a group
  int64_t out = 0;             // of a group
  std::array<int64_t, 2> x{};  // height and width
  std::array<int64_t, 2> y{};
  Windows windows;
};

// Of x's and w's type, with the attributes of `node`, of which those that fit no convolution are
// refused.
absl::StatusOr<ConvolutionSizes> SizesOfConvolution(const NodeView& node, const TensorType& x,
                                                    const TensorType& w);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_H_
