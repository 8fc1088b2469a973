#include "core/worker/own_stderr.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <iostream>
#include <string>

#include "core/base/unique_fd.h"
#include "gtest/gtest.h"

namespace chorus::worker {
namespace {

// A process whose standard error is a socket, of which this one has the other end.
class Speaker {
 public:
  explicit Speaker(const std::function<void()>& say) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    reader_.Reset(ends[0]);
    const UniqueFd writer(ends[1]);
    pid_ = fork();
    if (pid_ != 0) return;
    reader_.Reset();
    dup2(writer.get(), STDERR_FILENO);
    {
      OwnStderr own;
      say();
    }
    _exit(7);
  }

  // Until it has ended.
  int Wait() const {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    return status;
  }
  std::string ReadAll() const {
    std::string all;
    std::array<char, 4096> bytes;
    for (ssize_t got = 0; (got = read(reader_.get(), bytes.data(), bytes.size())) > 0;) {
      all.append(bytes.data(), static_cast<size_t>(got));
    }
    return all;
  }

 private:
  UniqueFd reader_;
  pid_t pid_ = -1;
};

TEST(OwnStderrTest, WhatIsSaidComesToTheSocket) {
  const Speaker speaker([] {
    std::cerr << "one\n";
    std::cerr << "two" << 3 << "\n" << std::flush;
  });
  EXPECT_EQ(speaker.ReadAll(), "one\ntwo3\n");
  EXPECT_EQ(WEXITSTATUS(speaker.Wait()), 7);
}

TEST(OwnStderrTest, WhoWritesDoesNotWaitForTheReader) {
  // More than socket and pipe take together.
  const Speaker speaker([] {
    const std::string line(1 << 20, '.');
    for (int i = 0; i < 8; ++i) {
      [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
    }
  });
  EXPECT_EQ(WEXITSTATUS(speaker.Wait()), 7);
  EXPECT_GT(speaker.ReadAll().size(), 4096u);
}

}  // namespace
}  // namespace chorus::worker
