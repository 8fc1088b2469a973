// The node thread between what is posted to it and the sessions' rings.
#include "core/node/node_loop.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/backend/host/host_backend.h"
#include "core/base/bytes.h"
#include "core/base/clock.h"
#include "core/base/thread_pool.h"
#include "core/base/unique_fd.h"
#include "core/ops/host_kernels.h"
#include "core/runtime/devices.h"
#include "core/transport/command.h"
#include "core/transport/doorbell.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"

namespace chorus::node {
namespace {

class NodeLoopTest : public testing::Test {
 protected:
  NodeLoopTest() {
    HostBackendOptions host;
    host.devices = 1;
    host.pool = &pool_;
    host.make_kernel = MakeHostKernel;
    backend_ = CreateHostBackend(host);
    loop_ = std::make_unique<NodeLoop>(NodeOptions(), DevicesOf(backend_.get()));
  }

  // On the node thread, behind what was posted before.
  void Ask(const NodeLoop::Task& task) {
    std::promise<void> done;
    loop_->PostOwn([&](LocalNode& node, absl::Time now) {
      task(node, now);
      done.set_value();
    });
    done.get_future().wait();
  }
  SessionId Open(const std::string& tenant) {
    SessionId session;
    Ask([&](LocalNode& node, absl::Time now) {
      OpenSessionRequest open;
      open.tenant = tenant;
      open.devices = {DeviceIndex(0)};
      session = node.OpenSession(open, now)->id;
    });
    return session;
  }
  // Posts a task that lasts until the promise is kept, and waits until it has begun.
  std::promise<void> Occupy() {
    std::promise<void> go;
    auto begun = std::make_shared<std::promise<void>>();
    loop_->PostOwn([begun, gone = std::make_shared<std::future<void>>(go.get_future())](
                       LocalNode&, absl::Time) {
      begun->set_value();
      gone->wait();
    });
    begun->get_future().wait();
    return go;
  }

  static constexpr int kTasks = 100000;
  ThreadPool pool_{1};
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<NodeLoop> loop_;
};

// Many short tasks, and a few long ones.
class NodeLoopFairnessTest : public NodeLoopTest, public testing::WithParamInterface<bool> {};

TEST_P(NodeLoopFairnessTest, HoweverMuchIsPostedTheRingsAreLookedAtInBetween) {
  const bool is_long = GetParam();
  const int tasks = is_long ? 16 : kTasks;
  std::unique_ptr<SessionMemory> memory;
  int wake = -1;
  Ask([&](LocalNode& node, absl::Time now) {
    OpenSessionRequest open;
    open.tenant = "uid:0";
    open.attached = true;
    open.devices = {DeviceIndex(0)};
    const SessionId session = node.OpenSession(open, now)->id;
    const SessionDescriptors attached = *node.AttachMemory(session);
    memory = *MapSessionMemory(attached.memory_fd);
    EXPECT_TRUE(node.ConfirmMemory(session).ok());
    wake = attached.wake_fd;
  });
  SubmissionRingWriter writer(memory.get());
  Command command;
  command.sequence = Sequence(1);
  command.body = Release();
  ByteWriter frame;
  EncodeFrame(command, &frame);
  int heard_at = tasks;
  std::promise<void> go = Occupy();
  // The first of those that are there at once is the client's submission.
  loop_->PostOwn([&](LocalNode&, absl::Time) {
    EXPECT_TRUE(*writer.TryWrite(frame.bytes()));
    RingWakeEvent(wake);
  });
  for (int i = 0; i < tasks; ++i) {
    loop_->PostOwn([&, i](LocalNode&, absl::Time now) {
      while (is_long && SteadyNow() < now + absl::Milliseconds(1)) {
      }
      const SessionControl& control = memory->control();
      const bool heard = control.daemon.head.load() == control.client.tail.load();
      if (heard && heard_at == tasks) heard_at = i;
    });
  }
  go.set_value();
  Ask([](LocalNode&, absl::Time) {});
  // The first long one is in the submission's turn.
  EXPECT_LT(heard_at, is_long ? 2 : tasks);
}
INSTANTIATE_TEST_SUITE_P(Tasks, NodeLoopFairnessTest, testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "FewLong" : "ManyShort");
});

// However little was posted before it: what the node has to do by itself, such as to tell somebody
// that it is late, is done first.
TEST_F(NodeLoopTest, WhatIsPostedInATurnWaitsForTheNext) {
  const SessionId session = Open("uid:1");
  bool is_told = false;
  bool was_told = false;
  std::promise<void> done;
  const NodeLoop::Task look = [&](LocalNode&, absl::Time) {
    was_told = is_told;
    done.set_value();
  };
  loop_->PostOwn([&](LocalNode& node, absl::Time now) {
    loop_->PostOwn(look);
    node.WaitOutcome(session, Sequence(1), now, [&](const Outcome&) { is_told = true; });
    EXPECT_FALSE(is_told);
  });
  done.get_future().wait();
  EXPECT_TRUE(was_told);
}

TEST_F(NodeLoopTest, AllThatIsPostedIsRunInItsTenantsOrder) {
  const std::string tenants[] = {"", "uid:1", "uid:2"};
  int ran[] = {0, 0, 0};
  bool in_order = true;
  std::promise<void> go = Occupy();
  for (int i = 0; i < kTasks; ++i) {
    for (size_t of = 0; of < 3; ++of) {
      loop_->Post(tenants[of], [&, of, i](LocalNode&, absl::Time) { in_order &= ran[of]++ == i; });
    }
  }
  go.set_value();
  // Those that are left run before it has ended.
  loop_.reset();
  EXPECT_THAT(ran, testing::Each(kTasks));
  EXPECT_TRUE(in_order);
}

// One user's calls, as many as there may be and as long as one may take, stand before nobody else's
// and before nothing of the node's own.
TEST_F(NodeLoopTest, WhatMuchIsPostedForWaitsBehindItsOwn) {
  int before = 0;  // of the one for whom much is posted
  std::vector<int> waited_for;
  const NodeLoop::Task look = [&](LocalNode&, absl::Time) { waited_for.push_back(before); };
  std::promise<void> go = Occupy();
  for (int i = 0; i < 600; ++i) {
    loop_->Post("uid:1", [&](LocalNode&, absl::Time) { ++before; });
  }
  loop_->Post("uid:2", look);
  loop_->Post("uid:2", look);
  loop_->PostOwn(look);
  go.set_value();
  std::promise<void> all;
  loop_->PostBehindAll([&](LocalNode&, absl::Time) { all.set_value(); });
  all.get_future().wait();
  // Of the other's two the second has a turn of its own.
  EXPECT_THAT(waited_for, testing::ElementsAre(1, 1, 2));
}

TEST_F(NodeLoopTest, WhatComesBehindAllWaitsForEveryTenant) {
  int ran = 0;
  int seen = 0;
  const NodeLoop::Task run = [&](LocalNode&, absl::Time) { ++ran; };
  const auto look = [&](int* ran_by_then) {
    loop_->PostBehindAll([&, ran_by_then](LocalNode&, absl::Time) { *ran_by_then = ran; });
  };
  std::promise<void> go = Occupy();
  look(&seen);  // there is nothing
  for (int i = 0; i < 100; ++i) loop_->Post("uid:1", run);
  loop_->Post("uid:2", run);
  loop_->PostOwn(run);
  int seen_of_all = 0;
  look(&seen_of_all);
  go.set_value();
  loop_.reset();
  EXPECT_EQ(seen, 0);
  EXPECT_EQ(seen_of_all, 102);
}

// By the turns of those for whom both are posted.
TEST_F(NodeLoopTest, WhatComesBehindAllIsBeforeWhatIsPostedAfterIt) {
  int ran = 0;
  int seen = 0;
  std::promise<void> go = Occupy();
  for (const bool is_before : {true, false}) {
    for (const char* tenant : {"uid:1", "uid:2"}) {
      for (int i = 0; i < 100; ++i) {
        loop_->Post(tenant, [&](LocalNode&, absl::Time) { ++ran; });
      }
    }
    if (is_before) loop_->PostBehindAll([&](LocalNode&, absl::Time) { seen = ran; });
  }
  go.set_value();
  loop_.reset();
  EXPECT_EQ(seen, 200);
}

// A pipe stands for a pidfd: its other end closes with the process.
TEST_F(NodeLoopTest, ADeathIsSeenHoweverBusyTheNodeIs) {
  const SessionId session = Open("uid:1");
  int ends[2] = {-1, -1};
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  UniqueFd process(ends[1]);
  loop_->WatchProcess("uid:1", session, ends[0]);
  const absl::Time deadline = SteadyNow() + absl::Seconds(30);
  bool lives = true;
  std::promise<void> done;
  // There is always one.
  NodeLoop::Task look;
  look = [&](LocalNode& node, absl::Time now) {
    process = UniqueFd();
    lives = node.Lives(session);
    if (!lives || now > deadline) return done.set_value();
    loop_->Post("uid:1", look);
  };
  loop_->Post("uid:1", look);
  done.get_future().wait();
  EXPECT_FALSE(lives);
}

// How often an epoll of this process watches the file of `fd`, by whichever descriptor.
int Watches(int fd) {
  struct stat file = {};
  EXPECT_EQ(fstat(fd, &file), 0);
  const std::string named = absl::StrCat(" ino:", absl::Hex(file.st_ino), " ");
  int watches = 0;
  for (const auto& info : std::filesystem::directory_iterator("/proc/self/fdinfo")) {
    std::ifstream lines(info.path());
    for (std::string line; std::getline(lines, line);) {
      if (absl::StartsWith(line, "tfd:") && absl::StrContains(line, named)) ++watches;
    }
  }
  return watches;
}

// It is readable from its end on: a watch that stayed would wake the node for as long as anybody
// has its file.
TEST_F(NodeLoopTest, AProcessThatHasEndedIsWatchedNoMoreWhoeverElseHasItsPidfd) {
  const SessionId session = Open("uid:1");
  int ends[2] = {-1, -1};
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd other(ends[0]);
  UniqueFd process(ends[1]);
  loop_->WatchProcess("uid:1", session, fcntl(ends[0], F_DUPFD_CLOEXEC, 0));
  std::promise<void> posted;
  loop_->PostBehindAll([&](LocalNode&, absl::Time) { posted.set_value(); });
  posted.get_future().wait();
  EXPECT_EQ(Watches(other.get()), 1);
  process = UniqueFd();
  const absl::Time deadline = SteadyNow() + absl::Seconds(30);
  bool lives = true;
  while (lives && SteadyNow() < deadline) {
    Ask([&](LocalNode& node, absl::Time) { lives = node.Lives(session); });
  }
  EXPECT_FALSE(lives);
  EXPECT_EQ(Watches(other.get()), 0);
}

}  // namespace
}  // namespace chorus::node
