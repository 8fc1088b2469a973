// Pooling over the last two dimensions of x [n, channels, h, w], to [n, channels, places over h,
// places over w]. Attributes kernel, stride, padding: two numbers each, as in core/ops/window.h;
// there is at most half a window of padding on a side.
//
// avg_pool(x): the sum of what is under a window, over the number of elements there; with
//   count_padding (0 or 1, absent: 0) over the number of taps. Floating; f32 and half types add up
//   as core/ops/long_sums.h says, and half types are rounded once. VJP: avg_pool_grad(g).
// avg_pool_grad(g), attribute size: h and w: its adjoint, which adds up in the same way. VJP:
//   avg_pool(h).
// max_pool_index(x), with attribute dilation too: an i32, row times w plus column of the largest
//   element under a window: the first of equals; the first NaN, where there is one. Padding never
//   wins. Numbers. No gradient.
// max_pool_take(x, index), with the same attributes: what stands in x at each place's index; 0
// where
//   that is none between the window's first and last tap. Numbers. VJP of x: max_pool_grad(g,
//   index).
// max_pool_grad(g, index), attribute size too: its adjoint, each element's the sum of what the
// places
//   have that name it. Half types add up in f32 and are rounded once; integers wrap. VJP of g:
//   max_pool_take(h, index).
//   Second order: the linear ones are in pairs, each one's VJP is the other.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_POOL_POOL_H_
#define CHORUS_CORE_OPS_POOL_POOL_H_

#include <array>
#include <cstdint>

#include "absl/types/span.h"
#include "core/ops/op.h"
#include "core/ops/window.h"

namespace chorus {

absl::Span<const OpDef* const> PoolOps();

struct PoolSizes {
  int64_t planes = 0;  // batch times channels
  std::array<int64_t, 2> x{};
  std::array<int64_t, 2> y{};
  Windows windows;
};

// Of x's type, with the attributes of `node`, of which those that fit no pooling are refused.
absl::StatusOr<PoolSizes> SizesOfPool(const NodeView& node, const TensorType& x);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_POOL_POOL_H_
