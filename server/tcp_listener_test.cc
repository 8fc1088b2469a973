#include "server/tcp_listener.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::server {
namespace {

using testing::HasSubstr;

ListenAddress Loopback(int port = 0) {
  ListenAddress address;
  address.host = "127.0.0.1";
  address.port = port;
  return address;
}

int Option(int socket, int level, int option) {
  int value = -1;
  socklen_t size = sizeof(value);
  EXPECT_EQ(getsockopt(socket, level, option, &value, &size), 0);
  return value;
}

// An end that vanishes says nothing: the system asks for it.
TEST(TcpListenerTest, WhatIsAcceptedIsLookedAfter) {
  ListenAddress address = Loopback();
  const auto listeners = ListenTcp(&address);
  ASSERT_TRUE(listeners.ok()) << listeners.status();
  ASSERT_EQ(listeners->size(), 1u);
  ASSERT_GT(address.port, 0);
  const UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(static_cast<uint16_t>(address.port));
  ASSERT_EQ(connect(client.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  pollfd ready = {(*listeners)[0].get(), POLLIN, 0};
  ASSERT_EQ(poll(&ready, 1, 20000), 1);
  const UniqueFd accepted(accept4((*listeners)[0].get(), nullptr, nullptr, SOCK_CLOEXEC));
  ASSERT_TRUE(accepted.valid());
  EXPECT_EQ(Option(accepted.get(), SOL_SOCKET, SO_KEEPALIVE), 1);
  const int idle = Option(accepted.get(), IPPROTO_TCP, TCP_KEEPIDLE);
  const int every = Option(accepted.get(), IPPROTO_TCP, TCP_KEEPINTVL);
  const int count = Option(accepted.get(), IPPROTO_TCP, TCP_KEEPCNT);
  EXPECT_LE(idle + every * count, 60) << idle << " + " << every << " * " << count;
  EXPECT_EQ(Option(accepted.get(), IPPROTO_TCP, TCP_USER_TIMEOUT), 1000 * (idle + every * count));
  EXPECT_EQ(Option(accepted.get(), IPPROTO_TCP, TCP_NODELAY), 1);
}

TEST(TcpListenerTest, AnAddressThatIsTakenOrNotThisMachinesIsRefusedByName) {
  ListenAddress first = Loopback();
  const auto listeners = ListenTcp(&first);
  ASSERT_TRUE(listeners.ok()) << listeners.status();
  ListenAddress second = Loopback(first.port);
  const absl::Status taken = ListenTcp(&second).status();
  EXPECT_EQ(ErrorOf(taken).reason, Reason::kCannotServe) << taken;
  EXPECT_THAT(std::string(taken.message()), HasSubstr(absl::StrCat("127.0.0.1:", first.port)));
  EXPECT_THAT(std::string(taken.message()), HasSubstr("in use"));
  ListenAddress elsewhere;
  elsewhere.host = "192.0.2.1";  // of no machine
  EXPECT_EQ(ErrorOf(ListenTcp(&elsewhere).status()).reason, Reason::kCannotServe);
}

TEST(TcpListenerTest, LocalhostHasOnePortAtEachOfItsAddresses) {
  ListenAddress address;
  address.host = "localhost";
  const auto listeners = ListenTcp(&address);
  ASSERT_TRUE(listeners.ok()) << listeners.status();
  ASSERT_GE(listeners->size(), 1u);
  for (const UniqueFd& listener : *listeners) {
    sockaddr_storage bound = {};
    socklen_t size = sizeof(bound);
    ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &size), 0);
    EXPECT_EQ(ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                                : reinterpret_cast<sockaddr_in*>(&bound)->sin_port),
              address.port);
  }
}

}  // namespace
}  // namespace chorus::server
