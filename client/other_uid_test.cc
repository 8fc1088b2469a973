// Whose daemon a client talks to, with daemons of other users about. Needs root, to be them.

#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "chorus/chorus.h"
#include "client/attach/daemon_socket.h"
#include "client/testing/values.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/testing/chorusd_process.h"

namespace chorus {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::Time Soon() { return SteadyNow() + absl::Seconds(20); }

UniqueFd Listen(const std::string& path, int type) {
  UniqueFd listener(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), address.sun_path);
  if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::chmod(path.c_str(), 0666) != 0 || ::listen(listener.get(), 100) != 0) {
    return UniqueFd();
  }
  return listener;
}

// Runs `body` in a child as user `uid` and gives what it returns. The child makes no gRPC calls.
std::string As(uid_t uid, const std::function<std::string()>& body) {
  int ends[2];
  if (::pipe(ends) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string said = ::setgid(uid) == 0 && ::setuid(uid) == 0 ? body() : "no such user";
    ::_exit(::write(ends[1], said.data(), said.size()) < 0 ? 1 : 0);
  }
  ::close(ends[1]);
  std::string said(8192, '\0');
  said.resize(static_cast<size_t>(std::max<ssize_t>(::read(ends[0], &said[0], said.size()), 0)));
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  return said;
}

// A process of another user that listens at a path, and says nothing to what connects.
class Listener {
 public:
  Listener(const std::string& path, int type, uid_t uid) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      if (::setgid(uid) != 0 || ::setuid(uid) != 0) ::_exit(1);
      const UniqueFd listener = Listen(path, type);
      if (!listener.valid() || ::write(ends[1], "x", 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    ::close(ends[1]);
    char ready;
    EXPECT_EQ(::read(ends[0], &ready, 1), 1) << path;
    ::close(ends[0]);
  }
  ~Listener() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_;
};

class OtherUidTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) {
      GTEST_SKIP() << "uid " << ::geteuid() << " cannot act as another user";
    }
    // No user's, and another one in each run of this test.
    user_ = 1'000'000'000 + static_cast<uid_t>(::getpid());
    std::cout << "uid " << user_ << std::endl;
    ASSERT_NE(::mkdtemp(&shared_[0]), nullptr);
    ASSERT_NE(::mkdtemp(&placed_[0]), nullptr);
    for (const std::string& folder : {shared_, placed_}) Own(folder, user_, 0755);
  }
  void TearDown() override {
    std::error_code ignored;
    for (const std::string& folder : {shared_, placed_}) {
      std::filesystem::remove_all(folder, ignored);
    }
  }

  static void Own(const std::string& path, uid_t uid, mode_t mode) {
    ASSERT_EQ(::chown(path.c_str(), uid, uid), 0) << path;
    ASSERT_EQ(::chmod(path.c_str(), mode), 0) << path;
  }
  static std::string Refusal(const std::string& path, std::vector<uint32_t> uids = {}) {
    const auto connected = ConnectToDaemon(path, SOCK_STREAM, uids, Soon());
    if (connected.ok()) return "let in";
    EXPECT_EQ(ErrorOf(connected.status()).reason, Reason::kNotAttached) << connected.status();
    return std::string(connected.status().message());
  }
  std::string BothUids() const {
    return absl::StrCat("is uid ", user_, "'s, this process is uid 0's");
  }

  std::string shared_ = "/tmp/chorus-uid-XXXXXX";
  std::string placed_ = "/run/chorus-uid-XXXXXX";
  uid_t user_ = 0;
};

TEST_F(OtherUidTest, AnotherUsersDaemonIsGoodWhereRootHasPutItAlone) {
  const Listener in_tmp(shared_ + "/d.sock", SOCK_STREAM, user_);
  EXPECT_THAT(Refusal(shared_ + "/d.sock"),
              AllOf(HasSubstr(BothUids()), HasSubstr("others than root may write to /tmp"),
                    HasSubstr("daemon_uids")));
  const std::string path = placed_ + "/d.sock";
  const Listener placed(path, SOCK_STREAM, user_);
  EXPECT_EQ(Refusal(path), "let in");
  Own(placed_, 0, 0755);
  EXPECT_EQ(Refusal(path), "let in");
  // Another user that may write there could be the one that listens, sticky or not.
  for (const mode_t mode : {0775, 0757, 01777, 01757}) {
    Own(placed_, user_, mode);
    EXPECT_THAT(Refusal(path), HasSubstr(placed_)) << mode;
    Own(placed_, 0, mode);
    EXPECT_THAT(Refusal(path), HasSubstr(placed_)) << mode;
  }
  Own(placed_, user_ + 1, 0755);
  EXPECT_THAT(Refusal(path), AllOf(HasSubstr(BothUids()), HasSubstr(absl::StrCat(user_ + 1))));
}

TEST_F(OtherUidTest, EachDirectoryAndLinkOnTheWayIsRoots) {
  const auto placed = [&](const std::string& path) {
    return std::string(PlacedByRoot(path, user_).message());
  };
  const std::string deep = placed_ + "/a/b";
  std::filesystem::create_directories(deep);
  Own(deep, user_, 0755);
  EXPECT_THAT(placed(deep + "/d.sock"), HasSubstr(absl::StrCat("write to ", placed_, " (uid ")));
  Own(placed_, 0, 0755);
  EXPECT_EQ(placed(deep + "/d.sock"), "");
  EXPECT_EQ(placed(placed_ + "//a/./b/../b/d.sock"), "");
  // A link in root's place, to root's place, through another's place, and in another's place.
  std::filesystem::create_symlink("a/b", placed_ + "/relative");
  EXPECT_EQ(placed(placed_ + "/relative/d.sock"), "");
  std::filesystem::create_symlink(deep, shared_ + "/detour");
  std::filesystem::create_symlink(shared_ + "/detour", placed_ + "/far");
  EXPECT_THAT(placed(placed_ + "/far/d.sock"), HasSubstr("write to /tmp"));
  EXPECT_THAT(placed(shared_ + "/detour/d.sock"), HasSubstr("write to /tmp"));
  std::filesystem::create_symlink("loop", placed_ + "/loop");
  EXPECT_THAT(placed(placed_ + "/loop/d.sock"), HasSubstr("leads nowhere"));
  EXPECT_THAT(placed(placed_ + "/missing/d.sock"), HasSubstr("No such file"));
  Own(placed_ + "/a", 0, 01777);
  EXPECT_THAT(placed(deep + "/d.sock"), HasSubstr(absl::StrCat("write to ", placed_, "/a")));
}

TEST_F(OtherUidTest, OnesOwnDaemonAndRootsAreGoodAnywhere) {
  const std::string path = shared_ + "/d.sock";
  const Listener theirs(path, SOCK_STREAM, user_);
  EXPECT_EQ(As(user_, [&] { return Refusal(path); }), "let in");
  EXPECT_THAT(As(user_ + 1, [&] { return Refusal(path); }),
              HasSubstr(absl::StrCat("is uid ", user_, "'s, this process is uid ", user_ + 1)));
  const UniqueFd roots = Listen(shared_ + "/root.sock", SOCK_STREAM);
  EXPECT_EQ(As(user_, [&] { return Refusal(shared_ + "/root.sock"); }), "let in");
}

TEST_F(OtherUidTest, WhoIsNamedIsLetInAndNobodyElse) {
  const Listener theirs(shared_ + "/d.sock", SOCK_STREAM, user_);
  EXPECT_EQ(Refusal(shared_ + "/d.sock", {17, user_}), "let in");
  EXPECT_THAT(Refusal(shared_ + "/d.sock", {17, 18}),
              AllOf(HasSubstr(BothUids()), HasSubstr("has only 17, 18")));
  const UniqueFd roots = Listen(shared_ + "/root.sock", SOCK_STREAM);
  EXPECT_THAT(Refusal(shared_ + "/root.sock", {user_}), HasSubstr("is uid 0's"));
}

TEST_F(OtherUidTest, ASessionIsOpenedWithWhomTheOptionsName) {
  const std::string path = shared_ + "/d.sock";
  server::ChorusdProcess chorusd(shared_,
                                 {absl::StrCat("--listen=unix:", path), "--host_devices=1"}, user_);
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  SessionOptions options;
  options.address = "unix:" + path;
  const absl::Status refused = Session::Open(options).status();
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kNotAttached) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(BothUids()));
  options.daemon_uids = {user_};
  const auto session = Session::Open(options);
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_THAT(testing::Values<float>(Scalar<float>(*session, 3) * 2), ElementsAre(6));
}

// The attach socket is root's, the gRPC socket beside it somebody else's.
TEST_F(OtherUidTest, EachConnectionIsLookedAt) {
  const std::string path = shared_ + "/d.sock";
  server::ChorusdProcess chorusd(shared_,
                                 {absl::StrCat("--listen=unix:", path), "--host_devices=1"});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  SessionOptions options;
  options.address = "unix:" + path;
  EXPECT_TRUE(Session::Open(options).ok());
  ASSERT_EQ(::unlink(path.c_str()), 0);
  const Listener impostor(path, SOCK_STREAM, user_);
  const absl::Status refused = Session::Open(options).status();
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kNotAttached) << refused;
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr(BothUids()), HasSubstr(path)));
}

}  // namespace
}  // namespace chorus
