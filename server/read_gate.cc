#include "server/read_gate.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>

#include "absl/strings/string_view.h"
#include "server/client_socket.h"

namespace chorus::server {
namespace {

constexpr int kLaterAtATime = 64;

}  // namespace

// By descriptor: reading must not take a lock that all connections share.
struct ReadGates {
  static std::atomic<ReadGate*>& Of(int fd) {
    static std::atomic<ReadGate*> gates[ReadGate::kMaxDescriptor + 1];
    return gates[fd];
  }

  // Whether the connection may ask for what is in the first `size` bytes of `message`.
  static bool MayTake(ReadGate* gate, const msghdr& message, size_t size) {
    Http2Frames::Counts sum;
    for (size_t i = 0; size > 0 && i < message.msg_iovlen; ++i) {
      const iovec& part = message.msg_iov[i];
      const size_t bytes = std::min(size, part.iov_len);
      sum += gate->frames_.Take(absl::string_view(static_cast<const char*>(part.iov_base), bytes));
      size -= bytes;
    }
    gate->open_.store(static_cast<int>(gate->frames_.open()), std::memory_order_relaxed);
    gate->later_ += sum.later_messages;
    if (sum.requests == 0 && sum.broken.empty() && gate->later_ < kLaterAtATime) return true;
    sum.later_messages = std::exchange(gate->later_, 0);
    return gate->may_ask_(sum);
  }

  // What recvmsg gives. False: there are descriptors, which stay there.
  static bool Receive(ReadGate* gate, int fd, msghdr* message, int flags, ssize_t* received) {
    if (!gate->may_bring_descriptors_) {
      *received = syscall(SYS_recvmsg, fd, message, flags);
      return true;
    }
    msghdr peeked = *message;
    peeked.msg_control = nullptr;
    peeked.msg_controllen = 0;
    *received = syscall(SYS_recvmsg, fd, &peeked, flags | MSG_PEEK);
    if (*received <= 0) return true;
    if ((peeked.msg_flags & MSG_CTRUNC) != 0) {
      Http2Frames::Counts sum;
      sum.broken = "it sends descriptors";
      gate->may_ask_(sum);
      return false;
    }
    // No more than was seen: others may have come behind it.
    auto left = static_cast<size_t>(*received);
    size_t parts = 0;
    while (left > message->msg_iov[parts].iov_len) left -= message->msg_iov[parts++].iov_len;
    const size_t part_bytes = std::exchange(message->msg_iov[parts].iov_len, left);
    const size_t num_parts = std::exchange(message->msg_iovlen, parts + 1);
    *received = syscall(SYS_recvmsg, fd, message, flags);
    message->msg_iovlen = num_parts;
    message->msg_iov[parts].iov_len = part_bytes;
    return true;
  }
};

ReadGate::ReadGate(int fd, const Http2Frames::Limits& limits, MayAsk may_ask)
    : fd_(fd),
      may_bring_descriptors_(MayBringDescriptors(fd)),
      may_ask_(std::move(may_ask)),
      frames_(limits) {
  // A byte out of band would be dropped as others are read, with its descriptors: so it is not.
  const int on = 1;
  if (may_bring_descriptors_) setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &on, sizeof(on));
  ReadGates::Of(fd_).store(this, std::memory_order_release);
}

ReadGate::~ReadGate() {
  // There may be another one on this descriptor's number by now.
  ReadGate* self = this;
  ReadGates::Of(fd_).compare_exchange_strong(self, nullptr);
}

}  // namespace chorus::server

// The C library's, for the whole process.
extern "C" ssize_t recvmsg(int fd, msghdr* message, int flags) {
  using chorus::server::ReadGate;
  using chorus::server::ReadGates;
  ReadGate* const gate = fd < 0 || fd > ReadGate::kMaxDescriptor
                             ? nullptr
                             : ReadGates::Of(fd).load(std::memory_order_acquire);
  if (gate == nullptr) return syscall(SYS_recvmsg, fd, message, flags);
  ssize_t received = 0;
  if (ReadGates::Receive(gate, fd, message, flags, &received) &&
      (received <= 0 || ReadGates::MayTake(gate, *message, static_cast<size_t>(received)))) {
    return received;
  }
  shutdown(fd, SHUT_RDWR);
  errno = ECONNRESET;
  return -1;
}
