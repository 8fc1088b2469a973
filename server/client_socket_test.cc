#include "server/client_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <thread>
#include <vector>

#include "absl/types/span.h"
#include "core/base/unique_fd.h"
#include "core/transport/attach/lingering_socket.h"
#include "core/transport/attach/packet.h"
#include "gtest/gtest.h"

namespace chorus::server {
namespace {

// A connection whose client may send descriptors, as all may before Linux 6.16.
struct Pair {
  explicit Pair(int type) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends), 0);
    client.Reset(ends[0]);
    server = ClientSocket(UniqueFd(ends[1]));
  }
  UniqueFd client;
  ClientSocket server;
};

TEST(ClientSocketTest, ItsEndWaitsForNoDescriptorThatItsClientHasSent) {
  for (const int type : {SOCK_STREAM, SOCK_SEQPACKET}) {
    Pair pair(type);
    LingeringSocket lingering;
    EXPECT_TRUE(MayBringDescriptors(pair.server.get()));
    ASSERT_EQ(lingering.SendOver(pair.client.get()), 0);
    EXPECT_TRUE(IsDoneThough(absl::MakeSpan(&lingering, 1), [&] {
      pair.server = ClientSocket();
      pollfd entry = {pair.client.get(), POLLRDHUP, 0};
      EXPECT_EQ(poll(&entry, 1, -1), 1);
    }));
  }
}

TEST(ClientSocketTest, SoManyWaitToBeClosedAndBeyondThatNoneIsWaitedFor) {
  std::vector<LingeringSocket> lingering(kMaxUnclosed + 10);
  std::vector<std::unique_ptr<Pair>> pairs;
  for (LingeringSocket& one : lingering) {
    pairs.push_back(std::make_unique<Pair>(SOCK_STREAM));
    ASSERT_EQ(one.SendOver(pairs.back()->client.get()), 0);
  }
  EXPECT_TRUE(IsDoneThough(absl::MakeSpan(lingering), [&pairs] {
    EXPECT_FALSE(TooManyUnclosed());
    pairs.clear();
    EXPECT_TRUE(TooManyUnclosed());
    while (TooManyUnclosed()) std::this_thread::yield();
  }));
}

// gRPC has a descriptor of the same socket, and closes it when it likes.
TEST(ClientSocketTest, WhoeverClosesItLastFindsNothingThere) {
  Pair pair(SOCK_STREAM);
  const UniqueFd grpcs(dup(pair.server.get()));
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reads(ends[0]);
  {
    const UniqueFd writes(ends[1]);
    // More than are dropped at a time.
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(SendPacket(pair.client.get(), "x", {writes.get()}).ok());
    }
  }
  pair.server = ClientSocket();
  pollfd entry = {reads.get(), POLLIN, 0};
  EXPECT_EQ(poll(&entry, 1, 20000), 1) << "somebody has its other end";
}

}  // namespace
}  // namespace chorus::server
