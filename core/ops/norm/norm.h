// Normalisation: what batch, layer, group and RMS norms, and their gradients, are made of.
//
// Attributes: rows, [begin, end): the dimensions of x whose every index has a mean and a variance
// of its own; there is another one. weights, [begin, end): those whose every index has a weight and
// a bias of its own. center: 0 where the mean is taken as 0 (1 if absent). epsilon, at least 0.
// Floating point of 32 bits or more: a caller that has half types casts them.
//
//   op                                     forward
//   moments(x)                             [2, x's rows]: the mean, and that of (x - mean)^2
//   normalize(x, moments, weight, bias)    weight z + bias, where z = (x - mean) r,
//                                          r = 1 / sqrt(variance + epsilon)
//   normalize_grad(x, moments, weight, g)  r P(weight g), where P(u) = u - mean(u) - z mean(u z),
//                                          means within a row; without mean(u) if center is 0
//   normalize_weight_grad(x, moments, g)   the sum of g z over the dimensions that weights lack
//
// moments stands for moments(x): the ops are functions of x, to which `moments` gives what was
// computed already. So **the gradient of x is the whole one, and moments has none.** That is why
// x's gradient is one op, and reads x and g twice.
//
// VJPs for g, of moments: spread(g mean) + 2 (x - mean) spread(g variance), without the first if
//   center is 0. Of normalize: normalize_grad; normalize_weight_grad; the sum of g.
// Of normalize_weight_grad for h: x: normalize_grad(x, moments, h, g); g: h z.
// Of normalize_grad for h, where p = r P(h) and u = weight g; P is its own adjoint:
//   x: -r P(r (mean(u z) h + mean(h z) u)) - r z mean(p u), the first from z, the second from r
//   weight: the sum of p g; g: p weight.
// All are made of each other, sum, mean, expand and arithmetic: any order.
// Sources: Ioffe and Szegedy 2015; Ba, Kiros and Hinton 2016; Wu and He 2018; Zhang and Sennrich
// 2019; the second order by hand, against differences in norm_test.cc.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_NORM_NORM_H_
#define CHORUS_CORE_OPS_NORM_NORM_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> NormOps();

// A node's sizes, for kernels.
struct NormSizes {
  // x is [before, rows, run], and [.., weights, stretch]: its element i belongs to row
  // i / run % rows and to weight i / stretch % weights.
  int64_t before = 1;
  int64_t rows = 1;
  int64_t run = 1;
  int64_t weights = 1;  // 1 for moments
  int64_t stretch = 1;
  int64_t size = 0;  // elements of x
  bool center = true;
  double epsilon = 0;  // 0 for moments

  int64_t row_size() const { return before * run; }
};
// INVALID_ARGUMENT kBadType where attributes do not fit x, input 0.
absl::StatusOr<NormSizes> SizesOfNorm(const NodeView& node);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_NORM_NORM_H_
