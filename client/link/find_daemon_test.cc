// Where a client looks for its daemon. The paths stand for those of this user and of the system.
#include "client/link/find_daemon.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/testing/silent_socket.h"
#include "core/base/clock.h"
#include "core/base/unique_fd.h"
#include "core/transport/attach/protocol.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/testing/test_daemon.h"

namespace chorus {
namespace internal {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kShort = absl::Milliseconds(50);

absl::StatusOr<FoundDaemon> Find(const std::vector<std::string>& paths,
                                 absl::Duration patience = absl::Seconds(20)) {
  return FindDaemon(paths, {}, SteadyNow() + patience, patience);
}

TEST(AddressesTest, WhatIsAskedForGoesBeforeTheEnvironmentAndThatBeforeThePaths) {
  ASSERT_EQ(setenv("CHORUS_ADDRESS", "unix:/environment.sock", 1), 0);
  EXPECT_THAT(*AddressesFor("unix:/asked.sock"), ElementsAre("unix:/asked.sock"));
  EXPECT_THAT(*AddressesFor(""), ElementsAre("unix:/environment.sock"));
  ASSERT_EQ(setenv("CHORUS_ADDRESS", "nonsense", 1), 0);
  EXPECT_EQ(ErrorOf(AddressesFor("").status()).reason, Reason::kMalformed);
  for (const bool empty : {false, true}) {
    ASSERT_EQ(empty ? setenv("CHORUS_ADDRESS", "", 1) : unsetenv("CHORUS_ADDRESS"), 0);
    const std::vector<std::string> addresses = *AddressesFor("");
    EXPECT_EQ(addresses.front(), absl::StrCat("unix:", DefaultSocketPath()));
    EXPECT_EQ(addresses.back(), "unix:/run/chorus/chorusd.sock");
    EXPECT_EQ(addresses.size(), geteuid() == 0 ? 1u : 2u);
  }
}

// gRPC has more kinds of addresses: at one of an abstract Unix socket it would look at nobody's
// uid.
TEST(AddressesTest, AreAPathOrAHostAndAPort) {
  for (const char* const address :
       {"unix:/a.sock", "unix:a.sock", "localhost:7", "127.0.0.1:65535", "[::1]:13", "node-2:http",
        "unix-abstracts:1", "[::ffff:127.0.0.1]:1"}) {
    EXPECT_THAT(*AddressesFor(address), ElementsAre(address));
  }
  for (const char* const address : {"unix-abstract:chorusd",
                                    "unix-abstract:7",
                                    "unix-abstract:[x]:7",
                                    "Unix-Abstract:7",
                                    "UNIX:7",
                                    "dns:localhost",
                                    "dns:7",
                                    "dns:localhost:7",
                                    "ipv4:127.0.0.1",
                                    "ipv4:127.0.0.1:7",
                                    "ipv6:[::1]:7",
                                    "ipv6:7",
                                    "vsock:2:7",
                                    "vsock:7",
                                    "::1:7",
                                    "[::1]",
                                    "[::1:7",
                                    "::1]:7",
                                    "[]:7",
                                    "[::1]x:7",
                                    ":7",
                                    "host:"}) {
    const absl::Status status = AddressesFor(address).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kMalformed) << address;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(absl::StrCat("\"", address, "\"")),
                      HasSubstr("expected unix:/PATH or HOST:PORT")));
  }
}

TEST(FindDaemonTest, TheFirstPathAtWhichADaemonServesIsTaken) {
  server::TestDaemon users;
  server::TestDaemon system;
  EXPECT_EQ(Find({users.path(), system.path()})->path, users.path());
  EXPECT_EQ(Find({"/nowhere/d.sock", system.path()})->path, system.path());
  EXPECT_EQ(Find({users.path(), "/nowhere/d.sock"})->path, users.path());
}

TEST(FindDaemonTest, NobodyAnywhereNamesThemAll) {
  const absl::Status status = Find({"/nowhere/a.sock", "/nowhere/b.sock"}, kShort).status();
  EXPECT_EQ(ErrorOf(status).reason, Reason::kDaemonLost);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("no daemon serves at unix:/nowhere/a.sock or unix:/nowhere/b.sock"));
}

TEST(FindDaemonTest, WhatIsWrongAtTheOwnPathIsToldAtOnceUnlessAnotherServes) {
  server::TestDaemon system;
  const std::string file = system.folder() + "/file";
  std::ofstream(file) << "no socket";
  EXPECT_EQ(ErrorOf(Find({file, "/nowhere/d.sock"}, absl::InfiniteDuration()).status()).reason,
            Reason::kMalformed);
  EXPECT_EQ(Find({file, system.path()})->path, system.path());
}

// A system's daemon that lets nobody in says nothing about this user's own, which may be starting.
TEST(FindDaemonTest, WhatIsWrongAtTheSystemsPathDoesNotEndTheWaitForTheOwn) {
  server::TestDaemon users;
  const std::string file = users.folder() + "/file";
  std::ofstream(file) << "no socket";
  const std::string late = users.folder() + "/late.sock";
  EXPECT_EQ(ErrorOf(Find({late, file}, kShort).status()).reason, Reason::kMalformed);
  // The first look is at one who listens there and says nothing until the daemon has taken its
  // place; then that look is over, in vain, and so the next place is looked at.
  const UniqueFd listener = testing::SilentSocket(AttachPath(late), SOCK_SEQPACKET);
  const std::string ready = users.folder() + "/ready";
  ASSERT_EQ(symlink(users.attach_path().c_str(), ready.c_str()), 0);
  absl::StatusOr<FoundDaemon> daemon;
  std::thread looking([&] { daemon = Find({late, file}); });
  {
    const UniqueFd first = testing::AwaitClient(listener);
    EXPECT_EQ(rename(ready.c_str(), AttachPath(late).c_str()), 0);
  }
  looking.join();
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  EXPECT_EQ(daemon->path, late);
}

}  // namespace
}  // namespace internal
}  // namespace chorus
