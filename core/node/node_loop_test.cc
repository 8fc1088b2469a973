// The node thread between what is posted to it and the sessions' rings.
#include "core/node/node_loop.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>

#include "core/backend/host/host_backend.h"
#include "core/base/bytes.h"
#include "core/base/clock.h"
#include "core/base/thread_pool.h"
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
    loop_->Post([&](LocalNode& node, absl::Time now) {
      task(node, now);
      done.set_value();
    });
    done.get_future().wait();
  }
  // Posts a task that lasts until the promise is kept, and waits until it has begun.
  std::promise<void> Occupy() {
    std::promise<void> go;
    auto begun = std::make_shared<std::promise<void>>();
    loop_->Post([begun, gone = std::make_shared<std::future<void>>(go.get_future())](LocalNode&,
                                                                                     absl::Time) {
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
  loop_->Post([&](LocalNode&, absl::Time) {
    EXPECT_TRUE(*writer.TryWrite(frame.bytes()));
    RingWakeEvent(wake);
  });
  for (int i = 0; i < tasks; ++i) {
    loop_->Post([&, i](LocalNode&, absl::Time now) {
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

TEST_F(NodeLoopTest, AllThatIsPostedIsRunInItsOrder) {
  int ran = 0;
  bool in_order = true;
  std::promise<void> go = Occupy();
  for (int i = 0; i < kTasks; ++i) {
    loop_->Post([&, i](LocalNode&, absl::Time) { in_order &= ran++ == i; });
  }
  go.set_value();
  // Those that are left run before it has ended.
  loop_.reset();
  EXPECT_EQ(ran, kTasks);
  EXPECT_TRUE(in_order);
}

}  // namespace
}  // namespace chorus::node
