// Gradients, as a call for them asks: gathers the entries that its roots lead to, in the order of
// recording; core/autograd turns them into more ops, which are recorded like any other.
//
// Threads: any; one tensor's gradients are accumulated by one thread at a time.
// Ownership: what is recorded belongs to the results. Errors: the functions' statuses; a call that
//   is refused is told to the other ranks.
#ifndef CHORUS_CLIENT_INTERNAL_GRADIENTS_H_
#define CHORUS_CLIENT_INTERNAL_GRADIENTS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "chorus/call_site.h"
#include "chorus/tensor.h"

namespace chorus {
namespace internal {

// Roots and wanted tensors for the gradients of their sum. The result is one tensor for each wanted
// one (undefined: the roots do not depend on it).
struct GradientRequest {
  absl::Span<const Tensor> roots;
  absl::Span<const Tensor> seeds;  // empty: ones
  absl::Span<const Tensor> wanted;
  bool leaves = false;  // instead of `wanted`: adds to every leaf's grad
  bool retain = false;
  bool create = false;
};
// Refused where a root has failed or leads to a collective of which others may want this rank's
// gradient, the other ranks are told, and what was recorded before has no gradient any more.
absl::StatusOr<std::vector<Tensor>> TakeGradients(const GradientRequest& request, CallSite site);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_GRADIENTS_H_
