// Any local op of this build, by its name (docs/ops.md, core/ops): also one that has no function
// here yet. Eager, compiled and differentiated like the functions.
//
// Threads: any, as chorus/chorus.h says.
// Ownership: results are handles. An input's handle may go as soon as the call has returned.
// Errors: the tensor carries them: INVALID_ARGUMENT kBadType for a collective, and for inputs or
//   attributes that the op does not take; UNIMPLEMENTED kUnsupported for a name that is no op of
//   this build, and for a dtype that the op has no kernels for.
#ifndef CHORUS_CLIENT_FUNCTIONAL_OP_H_
#define CHORUS_CLIENT_FUNCTIONAL_OP_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "chorus/call_site.h"
#include "chorus/session.h"
#include "chorus/tensor.h"

namespace chorus {

// A named constant of an op, part of the graph: another value is another graph. In any order.
struct OpAttribute {
  std::string name;  // "axis"
  std::variant<int64_t, double, std::vector<int64_t>, std::string> value;
};

// Operands are taken as they are: of one device, and nothing is broadcast but what the op itself
// stretches. At least one input; on its device.
Tensor Op(const std::string& name, const std::vector<Tensor>& inputs,
          const std::vector<OpAttribute>& attributes = {}, CallSite site = CallSite::Here());
// On a device, for ops that may have no input ("fill").
Tensor OpOn(const DeviceRef& device, const std::string& name, const std::vector<Tensor>& inputs,
            const std::vector<OpAttribute>& attributes = {}, CallSite site = CallSite::Here());

}  // namespace chorus

#endif  // CHORUS_CLIENT_FUNCTIONAL_OP_H_
