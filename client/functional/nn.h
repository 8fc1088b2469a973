// What classifiers and look-ups are made of: softmax, cross-entropy, one-hot, elements by index.
// All are recorded and differentiated like the local ops of chorus/math.h; docs/ops.md has a
// table of all.
//
// Axes count from the end where they are negative. Indices and labels are tensors of any integer
// dtype; one outside its range ends the run that uses it with INVALID_ARGUMENT, which names the
// position, the value and the range. They have no gradient.
//
// Threads: any, as chorus/chorus.h says.
// Ownership: results are handles. An operand's handle may go as soon as the call has returned.
// Errors: in the results, with the line of the call: INVALID_ARGUMENT kBadType where shapes or
//   dtypes do not fit, and as said above; UNIMPLEMENTED kUnsupported for a dtype that the op has no
//   kernels for.
#ifndef CHORUS_CLIENT_FUNCTIONAL_NN_H_
#define CHORUS_CLIENT_FUNCTIONAL_NN_H_

#include <cstdint>

#include "chorus/call_site.h"
#include "chorus/tensor.h"

namespace chorus {

// exp(x) over its sum along an axis, and the logarithm of that.
Tensor Softmax(const Tensor& x, int64_t axis = -1, CallSite site = CallSite::Here());
Tensor LogSoftmax(const Tensor& x, int64_t axis = -1, CallSite site = CallSite::Here());

// -log softmax(logits)[label] of each row: logits [..., classes], labels [...] -> [...]. Nothing is
// summed or divided. Rows whose label is `ignored` lose 0 and have no gradient.
Tensor CrossEntropy(const Tensor& logits, const Tensor& labels, CallSite site = CallSite::Here());
Tensor CrossEntropy(const Tensor& logits, const Tensor& labels, int64_t ignored,
                    CallSite site = CallSite::Here());

// [...] -> [..., depth]: 1 at the index, else 0. No gradient.
Tensor OneHot(const Tensor& indices, int64_t depth, DType dtype = DType::kF32,
              CallSite site = CallSite::Here());

// Slices of x: the dims of `indices` stand in the place of the axis. Take(table, words) looks up
// rows.
Tensor Take(const Tensor& x, const Tensor& indices, int64_t axis = 0,
            CallSite site = CallSite::Here());
// Its adjoint: the slices of `updates` added up in `size` slices along `axis`, which counts in the
// result. Always in the order of the indices.
Tensor ScatterAdd(const Tensor& updates, const Tensor& indices, int64_t size, int64_t axis = 0,
                  CallSite site = CallSite::Here());
// Element by element: `indices` have the dimensions of x but for the axis, or all of updates'.
Tensor TakeAlong(const Tensor& x, const Tensor& indices, int64_t axis,
                 CallSite site = CallSite::Here());
Tensor ScatterAddAlong(const Tensor& updates, const Tensor& indices, int64_t size, int64_t axis,
                       CallSite site = CallSite::Here());

// The first index, an i64, of the largest or smallest element along an axis; of the first NaN,
// where there is one. No gradient.
Tensor ArgMax(const Tensor& x, int64_t axis = -1, bool keep_dims = false,
              CallSite site = CallSite::Here());
Tensor ArgMin(const Tensor& x, int64_t axis = -1, bool keep_dims = false,
              CallSite site = CallSite::Here());

}  // namespace chorus

#endif  // CHORUS_CLIENT_FUNCTIONAL_NN_H_
