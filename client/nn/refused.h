// Calls that cannot be made, of which others wait for a part: the collectives in them are called
// all the same, with tensors that have failed. So they count, and the other ranks are told.
//
// Threads: any. Ownership: results are handles. Errors: none.
#ifndef CHORUS_CLIENT_NN_REFUSED_H_
#define CHORUS_CLIENT_NN_REFUSED_H_

#include <vector>

#include "absl/status/status.h"
#include "chorus/nn/module.h"
#include "chorus/session.h"
#include "chorus/tensor.h"
#include "client/internal/access.h"

namespace chorus {
namespace nn {

// Where the group's member has its tensors.
inline DeviceRef DeviceOf(const Group& group) {
  return internal::WorldFrom(internal::MemberOf(group)).device();
}

// An operand of the group's calls that carries `why`.
inline Tensor FailedIn(const Group& group, const absl::Status& why) {
  return FromError(DeviceOf(group), why);
}

// For the StateScope of a call of the module that is refused, of which `failed` has the error: what
// the variables stand for, or that where there is nothing yet. What the call Sets is lost with it.
inline std::vector<Tensor> StateOfRefused(const Module& module, const Tensor& failed) {
  std::vector<Tensor> state;
  for (const Variable& variable : module.variables()) {
    const Tensor tensor = variable();
    state.push_back(tensor.defined() ? tensor : failed);
  }
  return state;
}

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_REFUSED_H_
