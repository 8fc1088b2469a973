// A socket that whoever closes it last waits for, for tests of a process that gets it from a client
// and must not be made to wait.
//
// Threads: one at a time, but for LetGo. Ownership: it has the peer; the socket itself goes with
// the packet. Errors: fail the test.
#ifndef CHORUS_CORE_TRANSPORT_ATTACH_LINGERING_SOCKET_H_
#define CHORUS_CORE_TRANSPORT_ATTACH_LINGERING_SOCKET_H_

#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <string>
#include <utility>

#include "absl/types/span.h"
#include "core/base/unique_fd.h"
#include "gtest/gtest.h"

namespace chorus {

// A TCP socket that lingers for an hour over what its peer does not read.
class LingeringSocket {
 public:
  LingeringSocket() {
    const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    // There may be many of them.
    const int few = 4096;
    EXPECT_EQ(setsockopt(listener.get(), SOL_SOCKET, SO_RCVBUF, &few, sizeof(few)), 0);
    EXPECT_EQ(bind(listener.get(), any, size), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), any, &size), 0);
    socket_.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(setsockopt(socket_.get(), SOL_SOCKET, SO_SNDBUF, &few, sizeof(few)), 0);
    EXPECT_EQ(connect(socket_.get(), any, size), 0);
    peer_.Reset(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const std::string bytes(64 << 10, 'x');
    while (send(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
    }
    const linger hour = {1, 3600};
    EXPECT_EQ(setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &hour, sizeof(hour)), 0);
  }

  // Sends it over the Unix socket `way`, with `bytes`, and closes its own descriptor. Nobody reads
  // there meanwhile: the packet has the last one, and whoever drops the packet waits. Returns 0, or
  // the error of sendmsg.
  int SendOver(int way, const std::string& bytes = "x", int flags = 0) {
    const int error = Send(way, bytes, flags);
    socket_.Reset();
    return error;
  }
  // The same where somebody reads there meanwhile, and may close what has come before this has
  // closed its own. Then it is here that one waits, on a thread of its own.
  int SendToReader(int way) {
    const int error = Send(way, "x", 0);
    closing_ =
        std::async(std::launch::async, [last = std::move(socket_)]() mutable { last.Reset(); });
    return error;
  }

  // Nobody has to wait for it any more.
  void LetGo() { peer_.Reset(); }

 private:
  int Send(int way, const std::string& bytes, int flags) {
    iovec part = {const_cast<char*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = socket_.get();
    memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    const int error = sendmsg(way, &message, flags | MSG_NOSIGNAL) < 0 ? errno : 0;
    // Nobody has got it.
    if (error != 0) LetGo();
    return error;
  }

  std::future<void> closing_;  // ends when the peer has
  UniqueFd socket_;
  UniqueFd peer_;
};

// Whether `what` is done though `sockets` linger. They are let go then, done or not.
inline bool IsDoneThough(absl::Span<LingeringSocket> sockets, const std::function<void()>& what) {
  const std::future<void> done = std::async(std::launch::async, what);
  const bool in_time = done.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  for (LingeringSocket& socket : sockets) socket.LetGo();
  done.wait();
  return in_time;
}

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_ATTACH_LINGERING_SOCKET_H_
