// A call for gradients that was refused: the other ranks may wait for this one's part of them.
//
// Threads: any. Ownership: none. Errors: the refusal's, as the daemon has recorded it.
#ifndef CHORUS_CLIENT_INTERNAL_GRADIENTS_REFUSED_H_
#define CHORUS_CLIENT_INTERNAL_GRADIENTS_REFUSED_H_

#include "absl/status/status.h"
#include "client/internal/gradients.h"

namespace chorus {
namespace internal {

// Tells the other ranks, as TakeGradients says.
absl::Status RefusedGradients(const GradientRequest& request, const absl::Status& why);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_GRADIENTS_REFUSED_H_
