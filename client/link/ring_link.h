// The log through shared memory, and bytes in place: for attached sessions.
//
// Threads: as Link (client/internal/link.h). Ownership: the link owns the session, its memory and
//   its mappings; what MapTensor gives may outlive it. Errors: Link's; MakeRingLink says its own.
#ifndef CHORUS_CLIENT_LINK_RING_LINK_H_
#define CHORUS_CLIENT_LINK_RING_LINK_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/internal/link.h"
#include "client/link/rpc_link.h"

namespace chorus {
namespace internal {

// `deadline`: by SteadyNow (core/base/clock.h). UNIMPLEMENTED kVersion: the daemon's shared memory
// is of another layout.
absl::StatusOr<std::unique_ptr<Link>> MakeRingLink(OpenedSession opened, absl::Time deadline);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_LINK_RING_LINK_H_
