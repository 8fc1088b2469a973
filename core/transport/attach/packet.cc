#include "core/transport/attach/packet.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

absl::Status Gone(absl::string_view what, int error) {
  return MakeError(Reason::kDaemonLost,
                   absl::StrCat("attach socket: ", what, ": ", strerror(error)));
}

constexpr int kMaxFds = 8;

}  // namespace

absl::Status SendPacket(int socket, absl::string_view bytes, absl::Span<const int> fds) {
  if (fds.size() > kMaxFds) return Malformed("attach socket: too many descriptors for a packet");
  iovec part;
  part.iov_base = const_cast<char*>(bytes.data());
  part.iov_len = bytes.size();
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
  }
  ssize_t size;
  do {
    size = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (size < 0 && errno == EINTR);
  if (size < 0 && errno == ETOOMANYREFS) {
    return MakeError(Reason::kQuota,
                     "attach socket: descriptors that were sent before have not been read by those "
                     "whom they were sent to");
  }
  if (size < 0) return Gone("send", errno);
  return absl::OkStatus();
}

absl::StatusOr<absl::optional<Packet>> ReceivePacket(int socket, size_t max_bytes, int max_fds) {
  Packet packet;
  packet.bytes.resize(max_bytes);
  iovec part;
  part.iov_base = &packet.bytes[0];
  part.iov_len = max_bytes;
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  // What does not fit here the kernel closes: a sender cannot fill our descriptor table. Closing
  // may take as long as the sender likes, though: a caller that wants none at all looks first.
  const int look = max_fds == 0 ? MSG_PEEK : 0;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(sizeof(int) * kMaxFds)];
  message.msg_control = control;
  message.msg_controllen =
      CMSG_SPACE(sizeof(ucred)) + (max_fds > 0 ? CMSG_SPACE(sizeof(int) * max_fds) : 0);
  ssize_t size;
  // A peer that has closed without reading everything is told first, once, then what it had sent.
  bool reset = false;
  do {
    size = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC | look);
  } while (size < 0 && (errno == EINTR || (errno == ECONNRESET && !std::exchange(reset, true))));
  if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return absl::optional<Packet>();
  if (size < 0) return Gone("receive", errno);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET) continue;
    if (header->cmsg_type == SCM_RIGHTS) {
      const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
        packet.fds.emplace_back(fd);
      }
    } else if (header->cmsg_type == SCM_CREDENTIALS) {
      ucred credentials;
      memcpy(&credentials, CMSG_DATA(header), sizeof(credentials));
      packet.sender = credentials.pid;
    }
  }
  if (max_fds == 0) {
    if (!packet.fds.empty() || (message.msg_flags & MSG_CTRUNC) != 0) {
      return Malformed("attach socket: expected a packet without descriptors");
    }
    // As above: the packet is there.
    while (recv(socket, nullptr, 0, MSG_DONTWAIT) < 0 && (errno == EINTR || errno == ECONNRESET)) {
    }
  }
  // Without SO_PASSCRED the room for credentials holds descriptors as well: drop those.
  if (packet.fds.size() > static_cast<size_t>(max_fds)) packet.fds.resize(max_fds);
  if (size == 0) return Gone("receive", ECONNRESET);
  if ((message.msg_flags & MSG_TRUNC) != 0) {
    return Malformed(
        absl::StrCat("attach socket: expected a packet of at most ", max_bytes, " bytes"));
  }
  packet.bytes.resize(static_cast<size_t>(size));
  return absl::optional<Packet>(std::move(packet));
}

}  // namespace chorus
