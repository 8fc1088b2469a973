// Opens a session with a daemon: the one place where transports are chosen.
//
// Threads: any; it waits, for options.open_timeout at most. Ownership: the link owns the session.
// Errors: OpenLink says them.
#ifndef CHORUS_CLIENT_LINK_OPEN_LINK_H_
#define CHORUS_CLIENT_LINK_OPEN_LINK_H_

#include <memory>

#include "absl/status/statusor.h"
#include "chorus/session.h"
#include "client/internal/link.h"

namespace chorus {
namespace internal {

// A session at options.address, by options.transport, as soon as a daemon serves there. It goes by
// all options but `report_waits`.
// UNAVAILABLE kDaemonLost: no daemon came to serve within open_timeout; kDraining: it is shutting
//   down.
// DEADLINE_EXCEEDED kTransportTimeout: it does not answer.
// INVALID_ARGUMENT kMalformed: no address, a path at which something else stands than a socket, or
//   devices that no session can have. NOT_FOUND kUnknownName: a device that the daemon lacks.
// PERMISSION_DENIED kNotAttached: a socket that does not let this user in, another user's daemon
//   (daemon_uids), one that lets a client that has not attached only look, or the ring where the
//   address is not unix:PATH.
// UNIMPLEMENTED kVersion: the daemon, or its shared memory, is of another version.
// RESOURCE_EXHAUSTED kQuota: as many sessions or descriptors as this user may have there;
//   kOutOfMemory: no memory for another one's.
absl::StatusOr<std::unique_ptr<Link>> OpenLink(const SessionOptions& options);

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_LINK_OPEN_LINK_H_
