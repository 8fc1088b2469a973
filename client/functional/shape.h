// Tensors cut up, put together, reshaped, padded, counted out, and multiplied by their axes' names.
// All are made of the local ops of docs/ops.md, recorded and differentiated like those.
//
// Axes count from the end where they are negative.
//
// Threads: any, as chorus/chorus.h says.
// Ownership: results are handles. An operand's handle may go as soon as the call has returned.
// Errors: in the results, with the line of the call: INVALID_ARGUMENT kBadType where shapes,
// dtypes,
//   axes or numbers do not fit; UNIMPLEMENTED kUnsupported for a dtype that an op has no kernels
//   for. What gives a list says how long it is then.
#ifndef CHORUS_CLIENT_FUNCTIONAL_SHAPE_H_
#define CHORUS_CLIENT_FUNCTIONAL_SHAPE_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "chorus/call_site.h"
#include "chorus/math.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {

// --- Apart and together -------------------------------------------------------------------------

// Pieces of `size` along an axis, the last of what is left; one empty piece of an empty axis. Where
// it fails: one tensor, with the error.
std::vector<Tensor> Split(const Tensor& x, int64_t size, int64_t axis = 0,
                          CallSite site = CallSite::Here());
// Pieces of these sizes, which add up to the axis'. Where it fails: as many tensors, one at least.
std::vector<Tensor> Split(const Tensor& x, const std::vector<int64_t>& sizes, int64_t axis = 0,
                          CallSite site = CallSite::Here());
std::vector<Tensor> Split(const Tensor& x, std::initializer_list<int64_t> sizes, int64_t axis = 0,
                          CallSite site = CallSite::Here());
// `count` pieces (65,536 at most) of one size, rounded up, but for the last: there may be fewer,
// and as many empty ones of an empty axis. Where it fails: `count` tensors, or one if that is
// wrong.
std::vector<Tensor> Chunk(const Tensor& x, int64_t count, int64_t axis = 0,
                          CallSite site = CallSite::Here());
// Tensors of one type, along a new axis of the result.
Tensor Stack(const std::vector<Tensor>& xs, int64_t axis = 0, CallSite site = CallSite::Here());

// --- Shapes -------------------------------------------------------------------------------------

// Without axes of size 1: all that there are, or these.
Tensor Squeeze(const Tensor& x, const Axes& axes = Axes(), CallSite site = CallSite::Here());
// With one of size 1, which is this axis of the result.
Tensor Unsqueeze(const Tensor& x, int64_t axis, CallSite site = CallSite::Here());
// Axes begin to end, both included, as one; no dimensions become one.
Tensor Flatten(const Tensor& x, int64_t begin = 0, int64_t end = -1,
               CallSite site = CallSite::Here());
// So many elements of `value` before and after each axis: a pair for each, 0 or more. (0 is one op
// an axis, other values take two more.)
Tensor Pad(const Tensor& x, const std::vector<std::pair<int64_t, int64_t>>& widths,
           const Number& value = 0, CallSite site = CallSite::Here());

// --- Counted out --------------------------------------------------------------------------------

// begin, begin + step, ... up to `end`, which is not reached (but where it is so by rounding, in
// fractions of f64 as in NumPy's: 1, 1.1, 1.2 and 1.3 up to 1.3); of numbers, computed in i64 or
// f64 and rounded once. Empty where `end` is not on the step's side. Computed on the device, by
// some 2 log2 n ops: so a compiled function sends nothing, and its batch may vary as long as this
// length does not (cut a longer one with Slice). What never changes is cheaper outside, captured.
Tensor Arange(const DeviceRef& device, DType dtype, const Number& begin, const Number& end,
              const Number& step = 1, CallSite site = CallSite::Here());

// --- By name ------------------------------------------------------------------------------------

// Einstein's sum of one operand or two: "bij,bjk->bik" multiplies matrices, "ii" is a trace,
// "ij->ji" transposes. A letter names an axis of each operand that it stands for; twice in one
// operand it is a diagonal. What the result does not name is summed over. Without "->" it names, in
// alphabetical order, what stands once. Two operands with something to sum over both of are a
// MatMul, so they are of its dtypes; others are multiplied element by element. Errors name the
// equation.
Tensor Einsum(const std::string& equation, const std::vector<Tensor>& operands,
              CallSite site = CallSite::Here());

}  // namespace chorus

#endif  // CHORUS_CLIENT_FUNCTIONAL_SHAPE_H_
