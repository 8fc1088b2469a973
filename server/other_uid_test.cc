// Where a daemon puts its sockets, with other users about, and one that may make no threads. Needs
// root, to be them.

#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "gtest/gtest.h"
#include "server/testing/chorusd_process.h"
#include "server/testing/rpc.h"
#include "server/unix_listener.h"

namespace chorus::server {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class OtherUidTest : public testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) {
      std::cout << "skipped: uid " << geteuid() << " cannot act as another user" << std::endl;
      GTEST_SKIP() << "this user cannot act as another one";
    }
    ASSERT_NE(mkdtemp(&folder_[0]), nullptr);
    // No user's, and another one in each run of this test.
    user_ = 1'000'000'000 + static_cast<uid_t>(getpid());
    std::cout << "uid " << user_ << std::endl;
    default_folder_ = absl::StrCat("/tmp/chorus-", user_);
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
    if (!default_folder_.empty()) std::filesystem::remove_all(default_folder_, ignored);
  }

  static void Own(const std::string& path, uid_t uid, mode_t mode) {
    ASSERT_EQ(lchown(path.c_str(), uid, uid), 0) << path;
    if (mode != 0) {
      ASSERT_EQ(chmod(path.c_str(), mode), 0) << path;
    }
  }

  std::string folder_ = "/tmp/chorus-uid-XXXXXX";
  uid_t user_ = 0;
  std::string default_folder_;
};

TEST_F(OtherUidTest, ADirectoryIsItsOwnersAndNobodyElses) {
  const auto check = [&](uid_t owner, mode_t mode) {
    Own(folder_, owner, mode);
    return CheckSocketDirectory(folder_, user_);
  };
  EXPECT_TRUE(check(user_, 0755).ok());
  EXPECT_TRUE(check(user_, 0700).ok());
  EXPECT_TRUE(check(0, 0755).ok());
  EXPECT_TRUE(check(0, 01777).ok());
  EXPECT_TRUE(check(user_, 01775).ok());
  for (const mode_t mode : {0775, 0757, 0777, 0720}) EXPECT_FALSE(check(user_, mode).ok()) << mode;
  EXPECT_FALSE(check(0, 0777).ok());
  // Its owner does with it what he likes, whatever the mode.
  EXPECT_FALSE(check(user_ + 1, 0700).ok());
  EXPECT_FALSE(check(user_ + 1, 01755).ok());
  const absl::Status status = check(user_ + 1, 0770);
  EXPECT_EQ(ErrorOf(status).reason, Reason::kCannotServe);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr(folder_), HasSubstr(absl::StrCat("expected a directory of uid ", user_)),
            HasSubstr("mode 0755"),
            HasSubstr(absl::StrCat("found one of uid ", user_ + 1, ", mode 0770"))));
}

TEST_F(OtherUidTest, ALinkToADirectoryIsLookedAtTwice) {
  const std::string target = folder_ + "/target";
  const std::string link = folder_ + "/link";
  std::filesystem::create_directory(target);
  std::filesystem::create_symlink(target, link);
  Own(target, user_, 0755);
  Own(link, user_, 0);
  EXPECT_TRUE(CheckSocketDirectory(link, user_).ok());
  Own(link, user_ + 1, 0);
  EXPECT_THAT(std::string(CheckSocketDirectory(link, user_).message()),
              HasSubstr(absl::StrCat("expected a link of uid ", user_)));
  Own(link, user_, 0);
  Own(target, user_ + 1, 0755);
  EXPECT_FALSE(CheckSocketDirectory(link, user_).ok());
}

TEST_F(OtherUidTest, ADaemonDoesNotServeInADefaultDirectoryThatIsAnothers) {
  const auto refusal = [&] {
    ChorusdProcess chorusd(folder_, {}, user_);
    EXPECT_EQ(chorusd.Wait(), 1) << chorusd.output();
    return chorusd.output();
  };
  std::filesystem::create_directory(default_folder_);
  Own(default_folder_, user_ + 1, 0777);
  EXPECT_THAT(
      refusal(),
      AllOf(HasSubstr(default_folder_), HasSubstr(absl::StrCat("of uid ", user_, " or root")),
            HasSubstr(absl::StrCat("found one of uid ", user_ + 1, ", mode 0777"))));
  Own(default_folder_, user_, 0777);
  EXPECT_THAT(refusal(), HasSubstr("mode 0777"));
  EXPECT_TRUE(std::filesystem::is_empty(default_folder_));
  // Said by the operator, it is served and told.
  {
    ChorusdProcess chorusd(folder_,
                           {absl::StrCat("--listen=unix:", default_folder_, "/other.sock")}, user_);
    ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
    // The log has a thread of its own: all of it is written when the daemon has ended.
    chorusd.Signal(SIGTERM);
    EXPECT_EQ(chorusd.Wait(), 0);
    EXPECT_THAT(chorusd.output(), AllOf(HasSubstr("mode 0777"), HasSubstr("another user")));
  }
  std::filesystem::remove_all(default_folder_);
  ChorusdProcess chorusd(folder_, {}, user_);
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  EXPECT_THAT(chorusd.output(), HasSubstr(absl::StrCat(default_folder_, "/chorusd.sock")));
  EXPECT_TRUE(CheckSocketDirectory(default_folder_, user_).ok());
}

// Not its own, which it would have anyway.
TEST_F(OtherUidTest, SocketsHaveTheGroupThatWasAsked) {
  const std::string path = folder_ + "/chorusd.sock";
  ChorusdProcess chorusd(folder_, {"--listen=unix:" + path, "--socket_mode=0660",
                                   absl::StrCat("--socket_group=", user_)});
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  for (const std::string& socket : {path, path + ".attach"}) {
    struct stat info = {};
    ASSERT_EQ(lstat(socket.c_str(), &info), 0) << socket;
    EXPECT_EQ(info.st_mode & 07777, mode_t{0660}) << socket;
    EXPECT_EQ(info.st_gid, user_) << socket;
    EXPECT_EQ(info.st_uid, geteuid()) << socket;
  }
}

// From now on user `uid`, who is not root, can make no more threads in process `pid`, which is his.
bool ForbidThreads(pid_t pid, uid_t uid) {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit none = {0, 0};
    const bool done =
        setgid(uid) == 0 && setuid(uid) == 0 && prlimit(pid, RLIMIT_NPROC, &none, nullptr) == 0;
    _exit(done ? 0 : 1);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

TEST_F(OtherUidTest, ADrainEndsWhereNoThreadCanBeMade) {
  Own(folder_, user_, 0);
  // The sanitizer looks for leaks in a thread of its own, which cannot be made either.
  const char* const given = getenv("ASAN_OPTIONS");
  const std::string asan = given == nullptr ? "" : given;
  setenv("ASAN_OPTIONS", absl::StrCat(asan, ":detect_leaks=0").c_str(), 1);
  const std::string address = absl::StrCat("unix:", folder_, "/chorusd.sock");
  ChorusdProcess chorusd(folder_, {absl::StrCat("--listen=", address), "--drain_timeout=100ms"},
                         user_);
  setenv("ASAN_OPTIONS", asan.c_str(), 1);
  ASSERT_TRUE(chorusd.WaitForStart()) << chorusd.output();
  // A client that stays.
  RpcRank client(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  v1::GetStatsResponse stats;
  const absl::Status answered =
      Ask(*client.diagnostics, &v1::Diagnostics::Stub::GetStats, v1::GetStatsRequest(), &stats);
  ASSERT_TRUE(answered.ok()) << answered;
  ASSERT_TRUE(ForbidThreads(chorusd.pid(), user_));
  chorusd.Signal(SIGTERM);
  EXPECT_EQ(chorusd.Wait(), 0) << chorusd.output();
}

}  // namespace
}  // namespace chorus::server
