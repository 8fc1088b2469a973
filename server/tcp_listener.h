// TCP sockets that the daemon listens on.
//
// Threads: any. Ownership: the sockets are the caller's. Errors: said at ListenTcp().
#ifndef CHORUS_SERVER_TCP_LISTENER_H_
#define CHORUS_SERVER_TCP_LISTENER_H_

#include <vector>

#include "absl/status/statusor.h"
#include "core/base/unique_fd.h"
#include "server/listen_address.h"

namespace chorus::server {

// Listens on `address` (not a Unix one), at each of the addresses that its host stands for; sets
// its port where the system chooses one. What is accepted has no delay for small writes, and ends
// when its other end has been gone without a word for about a minute (keepalive). CANNOT_SERVE: the
// text has the address and why.
absl::StatusOr<std::vector<UniqueFd>> ListenTcp(ListenAddress* address);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_TCP_LISTENER_H_
