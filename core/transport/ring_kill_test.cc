// Kills a client process (SIGKILL) at each failpoint of its side of the shared memory, and shows
// that what it leaves behind is sound: whole frames only, and a session that the daemon can clear
// away.

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/failpoint.h"
#include "core/transport/completion.h"
#include "core/transport/doorbell.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"
#include "core/transport/test_frame.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

constexpr int kDeadlineMillis = 60000;
// Frames of 1,000 bytes that the smallest ring holds.
constexpr int64_t kRoom = 4;

struct Case {
  const char* mode;
  // Whole frames left in the ring by a client that is killed when it gets there for the n-th time.
  int64_t (*frames)(int64_t n);
  std::vector<int64_t> counts;
};

const std::map<std::string, Case>& Cases() {
  static const auto* const cases = new std::map<std::string, Case>{
      {"ring.before_copy", {"fill", [](int64_t n) { return n - 1; }, {1, 2, 4}}},
      {"ring.mid_copy", {"fill", [](int64_t n) { return n - 1; }, {1, 2, 4}}},
      {"ring.before_tail", {"fill", [](int64_t n) { return n - 1; }, {1, 2, 4}}},
      {"ring.before_doorbell", {"fill", [](int64_t n) { return n; }, {1, 2, 4}}},
      {"ring.waiting_for_space", {"fill", [](int64_t) { return kRoom; }, {1, 3}}},
      {"completion.waiting", {"wait", [](int64_t) { return int64_t{1}; }, {1, 3}}},
  };
  return *cases;
}

// Runs the victim; returns its wait status, or -1 when it did not end in time.
int RunVictim(const std::string& failpoint, int memory_fd, int doorbell_fd, int event_fd,
              const char* mode) {
  // Above what the program itself opens, and without close-on-exec.
  std::vector<UniqueFd> fds;
  for (int fd : {memory_fd, doorbell_fd, event_fd}) fds.emplace_back(fcntl(fd, F_DUPFD, 100));
  std::vector<std::string> args = {"ring_victim", absl::StrCat(fds[0].get()),
                                   absl::StrCat(fds[1].get()), absl::StrCat(fds[2].get()), mode};
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(&arg[0]);
  argv.push_back(nullptr);
  std::string variable = absl::StrCat("CHORUS_FAILPOINT=", failpoint, "=kill");
  std::vector<char*> environment = {&variable[0], nullptr};
  pid_t child = 0;
  if (posix_spawn(&child, "core/transport/ring_victim", nullptr, nullptr, argv.data(),
                  environment.data()) != 0) {
    ADD_FAILURE() << "cannot start the victim";
    return -1;
  }
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, child, 0)));
  pollfd ended{pidfd.get(), POLLIN, 0};
  if (poll(&ended, 1, kDeadlineMillis) != 1) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    return -1;
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST(RingKillTest, EveryFailpointOfTheClientHasACase) {
  for (const char* name : AllFailpoints()) {
    if (absl::StartsWith(name, "ring.") || absl::StartsWith(name, "completion.")) {
      EXPECT_EQ(Cases().count(name), 1u) << name;
    }
  }
}

TEST(RingKillTest, AKilledClientLeavesWholeFramesOnly) {
  for (const auto& entry : Cases()) {
    for (const int64_t count : entry.second.counts) {
      const std::string failpoint = absl::StrCat(entry.first, ":", count);
      SCOPED_TRACE(failpoint);
      SessionMemoryOptions options;
      options.ring_bytes = SessionMemoryOptions::kMinRingBytes;
      auto memory = CreateSessionMemory(options);
      ASSERT_TRUE(memory.ok()) << memory.status();
      auto doorbell = Doorbell::Create();
      ASSERT_TRUE(doorbell.ok()) << doorbell.status();
      auto event = CreateWakeEvent();
      ASSERT_TRUE(event.ok()) << event.status();

      const int status =
          RunVictim(failpoint, (*memory)->fd(), (*doorbell)->fd(), event->get(), entry.second.mode);
      ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;

      SubmissionRingReader reader(memory->get());
      FrameBuffer buffer;
      int64_t frames = 0;
      absl::string_view frame;
      SubmissionRingReader::Result result;
      while ((result = reader.Poll(&buffer, &frame)) == SubmissionRingReader::Result::kFrame) {
        EXPECT_EQ(frame, MakeTestFrame(++frames, 1000));
      }
      EXPECT_EQ(result, SubmissionRingReader::Result::kEmpty) << reader.status();
      EXPECT_EQ(frames, entry.second.frames(count));
      // Outcomes for the dead client are published as for any other.
      CompletionWriter writer(memory->get());
      for (int64_t i = 1; i <= frames; ++i) writer.PublishRun(Sequence(i), {});
      writer.Signal();
      EXPECT_EQ((*memory)->control().client.completion_waiters.load(),
                entry.first == "completion.waiting" ? 1u : 0u);
    }
  }
}

}  // namespace
}  // namespace chorus
