// Sockets that listen where a daemon would and never answer.
//
// Threads: any. Ownership: the caller's; a path stays behind. Errors: fail the test.
#ifndef CHORUS_CLIENT_TESTING_SILENT_SOCKET_H_
#define CHORUS_CLIENT_TESTING_SILENT_SOCKET_H_

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/base/unique_fd.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {

template <typename Address>
UniqueFd ListenAt(const Address& address, int family, int type) {
  UniqueFd listener(::socket(family, type | SOCK_CLOEXEC, 0));
  const int on = 1;
  EXPECT_EQ(::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)), 0);
  EXPECT_EQ(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
            0);
  EXPECT_EQ(::listen(listener.get(), 5), 0);
  return listener;
}

// At `path` (`type`: SOCK_STREAM or SOCK_SEQPACKET).
inline UniqueFd SilentSocket(const std::string& path, int type) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  EXPECT_LT(path.size(), sizeof(address.sun_path));
  std::copy_n(path.begin(), std::min(path.size(), sizeof(address.sun_path) - 1), address.sun_path);
  return ListenAt(address, AF_UNIX, type);
}
// At a port of this machine.
inline UniqueFd SilentPort(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return ListenAt(address, AF_INET, SOCK_STREAM);
}

// The next one who connects to it, when it has.
inline UniqueFd AwaitClient(const UniqueFd& listener) {
  pollfd came = {listener.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&came, 1, 60000), 1);
  return UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
}

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CLIENT_TESTING_SILENT_SOCKET_H_
