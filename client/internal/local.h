// What the SDK's functions on local ops have in common: client/math.cc and
// client/functional/*.cc.
//
// Threads: any.
// Ownership: results are handles. Errors: in the tensors, with the line of the call.
#ifndef CHORUS_CLIENT_INTERNAL_LOCAL_H_
#define CHORUS_CLIENT_INTERNAL_LOCAL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "chorus/call_site.h"
#include "chorus/math.h"
#include "chorus/tensor.h"
#include "client/internal/errors.h"
#include "client/internal/record.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "core/ops/op.h"

namespace chorus {
namespace internal {

NodeSpec Spec(const char* op, CallSite site, Attributes attributes = {});

// A tensor that carries the error and the line of the call.
Tensor Fail(const Tensor& like, const absl::Status& status, CallSite site);

// Has a type to look at. What has none is refused by ApplyLocal, in its words.
bool IsUsable(const Tensor& x);

// "f32[2,3]", of a usable one.
std::string TypeText(const Tensor& x);

// Widens `shape` to what both stretch to; false where they do not meet.
bool BroadcastShapes(const Shape& other, Shape* shape);

// An op on tensors whose shapes are broadcast: sizes 1 and missing leading dimensions stretch. A
// 0-dim operand goes to the op as it is.
Tensor Elementwise(const char* op, absl::Span<const Tensor> inputs, CallSite site);

std::string TextOf(const Number& value);
// INVALID_ARGUMENT: `value` is none of the dtype's values. UNIMPLEMENTED: no number is.
absl::Status CheckNumber(DType dtype, const Number& value);
// The same of an integer dtype or bool.
absl::StatusOr<int64_t> WholeOf(DType dtype, const Number& value);
// A 0-dim tensor that travels with the run, so that another number is no other graph. The first
// gives an error where the number is none of the dtype's values.
Tensor NumberOf(DType dtype, const Number& value, const std::shared_ptr<SessionCore>& session,
                int32_t device_slot, CallSite site);
Tensor IntegerOf(int64_t value, const std::shared_ptr<SessionCore>& session, int32_t device_slot);
// A number beside a tensor.
Tensor NumberLike(const Number& value, const Tensor& like, CallSite site);

// The line of an operator, which takes no other argument.
inline CallSite SiteOf(const Operand& a, const Operand& b) {
  return a.is_number() ? b.site() : a.site();
}

// `op` of two tensors, with a number as one that is like the other.
template <typename Op>
Tensor Operate(const Operand& a, const Operand& b, CallSite site, const Op& op) {
  if (a.is_number()) return op(NumberLike(a.number(), b.tensor(), site), b.tensor());
  if (b.is_number()) return op(a.tensor(), NumberLike(b.number(), a.tensor(), site));
  return op(a.tensor(), b.tensor());
}

// An axis of a usable tensor, counted from the front; negative ones come from the end.
absl::StatusOr<int64_t> Axis(const char* op, const Tensor& x, int64_t axis);

// An op with attribute `axis` of its first input, and others, which come after it.
Tensor Along(const char* op, absl::Span<const Tensor> inputs, int64_t axis, Attributes others,
             CallSite site);

// A reduction.
Tensor ReduceAxes(const char* op, const Tensor& x, const Axes& axes, bool keep_dims, CallSite site);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_LOCAL_H_
