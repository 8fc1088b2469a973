// Packets with descriptors over a SOCK_SEQPACKET Unix socket.
//
// Threads: plain functions; one sender and one receiver at a time a socket.
// Ownership: descriptors are sent as they are and received as the caller's. Errors: each function
//   says them.
#ifndef CHORUS_CORE_TRANSPORT_ATTACH_PACKET_H_
#define CHORUS_CORE_TRANSPORT_ATTACH_PACKET_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/base/unique_fd.h"

namespace chorus {

struct Packet {
  std::string bytes;
  std::vector<UniqueFd> fds;
  // The process that sent it, by the kernel's word; only where the receiver has set SO_PASSCRED.
  absl::optional<pid_t> sender;
};

// Never waits. UNAVAILABLE: the peer is gone, or does not read. RESOURCE_EXHAUSTED (QUOTA): too
// many descriptors that this user has sent, to whomever, have not been read. The descriptors stay
// the caller's.
absl::Status SendPacket(int socket, absl::string_view bytes, absl::Span<const int> fds);

// Never waits: absent when there is nothing. UNAVAILABLE: the peer has closed.
// INVALID_ARGUMENT (MALFORMED): longer than `max_bytes`; or `max_fds` is 0 and it has descriptors:
// then it stays there, and is what comes next. Descriptors beyond `max_fds` never come in.
absl::StatusOr<absl::optional<Packet>> ReceivePacket(int socket, size_t max_bytes, int max_fds);

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_ATTACH_PACKET_H_
