// Gates: tensors that pass as they are, and whose gradients pass through a rule on their way back.
// DistributedDataParallel is made of them: its rules take the mean over ranks.
//
// A rule may call collectives. So all gates of a call stand or fall together: a call for the
// gradients of anything that any of their tensors has come to calls the rule of each of them,
// whatever there is for its own tensors. The first gate's comes first, each as soon as all that has
// used its tensors and those of the gates before it has been differentiated; so ranks call the
// rules in one order, whatever lies between, and none waits for the end. What reads a gate's tensor
// past the gate, in such a call, has its gradient go through the rule with the others'.
//
// Threads: any; a rule is called on the thread that asks for the gradients.
// Ownership: the tape has the rules while a result of their tensors has its history: what they
//   capture must not have such a result.
// Errors: a rule's is that of the whole request for gradients, which is told to the other ranks.
#ifndef CHORUS_CLIENT_INTERNAL_GATE_H_
#define CHORUS_CLIENT_INTERNAL_GATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/tensor.h"
#include "client/internal/member.h"

namespace chorus {
namespace internal {

// By gate and tensor: the order of the first op that uses it on the way to what is differentiated;
// kUnused where there is none.
using GateUses = std::vector<std::vector<uint64_t>>;
inline constexpr uint64_t kUnused = ~uint64_t{0};

// What Backward does with leaves once all their gradients have been sent, and else not at all.
struct LeafChanges {
  // Those whose gradient has what their grad() has in it, and takes its place.
  absl::flat_hash_set<const TensorImpl*> replaced;
  std::vector<std::function<void()>> on_success;
};

// What a rule is given.
struct GateRequest {
  std::vector<Tensor> gradients;  // of the gate's tensors; undefined: nothing has come
  const GateUses* uses = nullptr;
  // Backward's: results are added to grad() of leaves. Null: Grad.
  LeafChanges* leaves = nullptr;
};
// Gives as many tensors of the same types: what goes on to what the gate's tensors were.
// Undefined: nothing. Recorded like any calls, where the request is.
using GateRule = std::function<absl::StatusOr<std::vector<Tensor>>(const GateRequest& request)>;

struct Gate {
  std::vector<Tensor> tensors;
  GateRule rule;
};

// What stands on the tape for a call.
struct GateSet {
  std::vector<GateRule> rules;
  std::vector<int> sizes;  // tensors of each
  std::shared_ptr<MemberCore> member;
};

// This thread makes a trace, in which nothing can be waited for.
bool Tracing();

// The tensors behind the gates: [gate][tensor]. Where gradients are off, and of tensors that
// require none, as they are. `name` and `site` say in texts what it is; `member` is told of with
// the gradients' refusal.
std::vector<std::vector<Tensor>> PassGates(const std::vector<Gate>& gates,
                                           const std::shared_ptr<MemberCore>& member,
                                           const std::string& name, CallSite site);

// The leaf that `tensor` is a cast of, in this trace or outside of any; undefined: it is none.
Tensor LeafOfCast(const Tensor& tensor);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_GATE_H_
