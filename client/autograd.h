// Gradients: of the sum over ranks of each rank's loss (chorus.h).
//
// Threads: any; one tensor's gradients are accumulated by one thread at a time. NoGrad counts for
//   its thread.
// Ownership: a recorded result keeps what its gradient needs, until that is used up or the last
//   handle of all that depends on it goes. A leaf keeps its grad().
// Errors: returned, with the line of the call. FAILED_PRECONDITION as each call says;
//   INVALID_ARGUMENT kBadType for roots, seeds or inputs that do not fit, such as a root of several
//   elements without a seed. One that has failed gives its own error.
#ifndef CHORUS_CLIENT_AUTOGRAD_H_
#define CHORUS_CLIENT_AUTOGRAD_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/call_site.h"
#include "chorus/tensor.h"

namespace chorus {

namespace internal {
class GradMode;
}  // namespace internal

// Adds the gradients of the sum of `roots` (weighted by `seeds`, of the roots' shapes) to grad() of
// every leaf that they depend on. Without seeds a root has one element, or is absent. Returns when
// everything is recorded and sent, not computed. Afterwards the tape is used up, unless
// `retain_graph`. FAILED_PRECONDITION: a root has no history, or it is used up. After an error no
// grad() has changed, and the tape is not used up, but as said below.
//
// Each rank asks for the gradients of one collective in one order; those of different ones in any.
// A call that is refused, and whose roots have failed or lead to collectives, ends the epoch for
// everybody: which gradients it would have asked for is not known. So what this rank has recorded
// up to then has no gradient any more: kTapeConsumed for a caller that asks here; another rank that
// needs this one for such a gradient gets kMismatch, alone. Where it leads to a module that takes
// means by calls of its own (nn::DistributedDataParallel), or its roots have failed and this rank
// has such a module, the rank is out of line, too (chorus.h). Roots that are undefined, or none,
// have failed; they are of the session of the inputs or seeds or, where these say nothing, of every
// one of the process. An exception of a hook is a refusal, and goes on to the caller.
struct BackwardOptions {
  std::vector<Tensor> seeds;  // empty: ones
  bool retain_graph = false;
  // Record the gradients, so that they can be differentiated. All of them, constants too, have for
  // history the collectives in which the call took part: a caller that differentiates one takes
  // part in these, with zeros where nothing comes in. What Backward leaves in a leaf's grad() then
  // keeps the leaf, and the leaf it: nothing of it goes before ClearGrad(). Grad leaves nothing.
  bool create_graph = false;
};
absl::Status Backward(const Tensor& root, const BackwardOptions& options = {},
                      CallSite site = CallSite::Here());
absl::Status Backward(const std::vector<Tensor>& roots, const BackwardOptions& options = {},
                      CallSite site = CallSite::Here());

// The gradients with respect to `inputs`, one for each; leaves' grad() stays as it is. An input
// that the outputs do not depend on gets zeros. `create_graph` implies `retain_graph`.
// FAILED_PRECONDITION: as Backward; or an input that requires no gradient.
absl::StatusOr<std::vector<Tensor>> Grad(const std::vector<Tensor>& outputs,
                                         const std::vector<Tensor>& inputs,
                                         const BackwardOptions& options = {},
                                         CallSite site = CallSite::Here());

// While one lives, the calls of this thread are not recorded, and this rank counts as zeros in the
// gradients of its collectives.
class NoGrad {
 public:
  NoGrad();
  ~NoGrad();
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;

 private:
  std::unique_ptr<internal::GradMode> mode_;
};

}  // namespace chorus

#endif  // CHORUS_CLIENT_AUTOGRAD_H_
