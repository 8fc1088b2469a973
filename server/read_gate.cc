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
    gate->later_ += sum.later;
    if (sum.asked == 0 && sum.broken.empty() && gate->later_ < kLaterAtATime) return true;
    sum.later = std::exchange(gate->later_, 0);
    return gate->may_ask_(sum);
  }
};

ReadGate::ReadGate(int fd, const Http2Frames::Limits& limits, MayAsk may_ask)
    : fd_(fd), may_ask_(std::move(may_ask)), frames_(limits) {
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
  const ssize_t got = syscall(SYS_recvmsg, fd, message, flags);
  if (got <= 0 || fd < 0 || fd > chorus::server::ReadGate::kMaxDescriptor) return got;
  chorus::server::ReadGate* const gate =
      chorus::server::ReadGates::Of(fd).load(std::memory_order_acquire);
  if (gate == nullptr ||
      chorus::server::ReadGates::MayTake(gate, *message, static_cast<size_t>(got))) {
    return got;
  }
  shutdown(fd, SHUT_RDWR);
  errno = ECONNRESET;
  return -1;
}
