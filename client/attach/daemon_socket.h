// A daemon's Unix sockets as a client sees them: connecting, and whose daemon it is that answers.
//
// Any user may listen on a path that it may write to, also in the place of a daemon that is gone
// for a moment. So the client asks the kernel for the uid of the process that listens at the other
// end of each connection that it makes (SO_PEERCRED), before it sends a byte, and talks to
//   * a daemon of its own uid, wherever the socket lies;
//   * a daemon of root;
//   * another user's daemon if root has given it that place: the socket's directory belongs to the
//     daemon's uid or to root, nobody else may write to it, and on the whole way there, links
//     included, root alone may write (so in /run/chorus, and nowhere in /tmp, sticky or not).
// A connection that was let through stays with the process that it was made to, or ends: gRPC gets
// the connected descriptor and never connects by itself.
//
// Threads: any; plain functions. Deadlines: by SteadyNow (core/base/clock.h).
// Ownership: a connection is the caller's. Errors: said at each function.
#ifndef CHORUS_CLIENT_ATTACH_DAEMON_SOCKET_H_
#define CHORUS_CLIENT_ATTACH_DAEMON_SOCKET_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/base/unique_fd.h"

namespace chorus {

// Connects to the socket `path` (`type`: SOCK_STREAM or SOCK_SEQPACKET) of a daemon that may be
// talked to: by the rule above, or where `daemon_uids` is not empty one of these users', wherever
// it lies.
// UNAVAILABLE (DAEMON_LOST): nobody listens there. PERMISSION_DENIED (NOT_ATTACHED): this user may
// not connect, or the daemon is another user's; the text has both uids. DEADLINE_EXCEEDED
// (TRANSPORT_TIMEOUT): its queue is full. INVALID_ARGUMENT (MALFORMED): no socket can have this
// path. RESOURCE_EXHAUSTED (QUOTA): this process has no descriptor for it.
absl::StatusOr<UniqueFd> ConnectToDaemon(const std::string& path, int type,
                                         absl::Span<const uint32_t> daemon_uids,
                                         absl::Time deadline);

// Whether root has given the socket `path` to the user `uid`, as above. PERMISSION_DENIED
// (NOT_ATTACHED): it has not; the text is a clause that says what is otherwise.
absl::Status PlacedByRoot(const std::string& path, uid_t uid);

}  // namespace chorus

#endif  // CHORUS_CLIENT_ATTACH_DAEMON_SOCKET_H_
