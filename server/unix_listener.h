// Unix sockets that the daemon listens on.
//
// Threads: any. Ownership: sockets are the caller's; a listener leaves its path behind when it is
// closed. Errors: said at each function.
#ifndef CHORUS_SERVER_UNIX_LISTENER_H_
#define CHORUS_SERVER_UNIX_LISTENER_H_

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/unique_fd.h"

namespace chorus::server {

// Which users may connect: the mode and group of both sockets of a path.
struct SocketAccess {
  mode_t mode = 0600;
  std::string group;  // name or number; empty: the daemon's
};

// Listens on `path` (`type`: SOCK_STREAM or SOCK_SEQPACKET), in place of a socket that a dead
// daemon left there; call it with the path's lock held. The socket never is more open than `access`
// says, not even while it is made; and it takes no descriptors (client_socket.h).
// FAILED_PRECONDITION (CANNOT_SERVE): the text has the path and why. INVALID_ARGUMENT: there is no
// such group.
absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, int type, const SocketAccess& access);

// Whether a daemon of `uid` can have its sockets in `directory` without another user's taking their
// place: it belongs to `uid` or to root, and nobody else may write there, or only such that each
// user's files stay (sticky). A link is good where it and what it leads to are.
// FAILED_PRECONDITION (CANNOT_SERVE): the text has what was expected and what is there.
absl::Status CheckSocketDirectory(const std::string& directory, uid_t uid);

// The process at the other end, as it was when it connected. pid 0: not visible from here (another
// PID namespace). INTERNAL: `socket` is none that has one.
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
};
absl::StatusOr<PeerCredentials> GetPeerCredentials(int socket);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_UNIX_LISTENER_H_
