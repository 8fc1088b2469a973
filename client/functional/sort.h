// Elements along one axis in the order of their size. Recorded and differentiated like the local
// ops of chorus/math.h; docs/ops.md has a table of all.
//
// Of equals the first comes first, in both directions. NaN is above all else: last, or with
// `descending` or `largest` first. Any dtype; false < true. The gradient of a value goes to the
// element that it is; indices are i64 and have none. Negative axes count from the end.
//
// Threads: any, as chorus/chorus.h says.
// Ownership: results are handles. An operand's handle may go as soon as the call has returned.
// Errors: in the results, with the line of the call: INVALID_ARGUMENT kBadType for an axis or a
//   number of elements that x does not have.
#ifndef CHORUS_CLIENT_FUNCTIONAL_SORT_H_
#define CHORUS_CLIENT_FUNCTIONAL_SORT_H_

#include <cstdint>

#include "chorus/call_site.h"
#include "chorus/tensor.h"

namespace chorus {

struct Sorted {
  Tensor values;
  Tensor indices;  // along the axis, of the values in x: values are TakeAlong(x, indices, axis)
};

Sorted Sort(const Tensor& x, int64_t axis = -1, bool descending = false,
            CallSite site = CallSite::Here());
// Its indices.
Tensor ArgSort(const Tensor& x, int64_t axis = -1, bool descending = false,
               CallSite site = CallSite::Here());
// The k largest, or smallest, sorted from the largest, or smallest, on: the first k of Sort. Where
// k is much smaller than the axis, it looks at each of the others about once.
Sorted TopK(const Tensor& x, int64_t k, int64_t axis = -1, bool largest = true,
            CallSite site = CallSite::Here());

}  // namespace chorus

#endif  // CHORUS_CLIENT_FUNCTIONAL_SORT_H_
