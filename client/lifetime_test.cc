// Sessions that live long: what they make and drop leaves nothing behind, here and in the daemon.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "chorus/chorus.h"
#include "chorus/parallel.h"
#include "client/internal/access.h"
#include "client/internal/session_core.h"
#include "client/testing/values.h"
#include "core/backend/host/host_backend.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernels.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/daemon.h"

namespace chorus {
namespace {

using internal::SessionCore;
using internal::SessionOf;

using parallel::DeviceGroup;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Values;

using Floats = std::vector<float>;

constexpr int kMaxGraphs = 96;
constexpr int kMaxWorlds = 8;
constexpr int kMaxGroups = 6;

struct Way {
  Transport transport;
  const char* name;
};

class LifetimeTest : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    char directory[] = "/tmp/chorus_XXXXXX";
    ASSERT_NE(::mkdtemp(directory), nullptr);
    directory_ = directory;
    pool_ = std::make_unique<ThreadPool>(2);
    HostBackendOptions backend;
    backend.devices = 2;
    backend.pool = pool_.get();
    backend.make_kernel = MakeHostKernel;
    backend_ = CreateHostBackend(backend);
    server::DaemonOptions options;
    options.listen = {*server::ParseListenAddress("unix:" + directory_ + "/d.sock")};
    options.node.max_graphs = kMaxGraphs;
    options.node.max_worlds = kMaxWorlds;
    options.node.sequencer.max_groups = kMaxGroups;
    options.node.log_failure = [this](absl::string_view, absl::string_view) { ++failures_; };
    absl::StatusOr<std::unique_ptr<server::Daemon>> daemon =
        server::Daemon::Start(options, DevicesOf(backend_.get()));
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    SessionOptions session;
    session.address = daemon_->addresses()[0].ToString();
    session.transport = GetParam().transport;
    session.device_count = 2;
    session.wait_timeout = std::chrono::seconds(30);
    absl::StatusOr<Session> opened = Session::Open(session);
    ASSERT_TRUE(opened.ok()) << opened.status();
    session_ = *opened;
  }
  void TearDown() override {
    session_ = Session();
    daemon_.reset();
    backend_.reset();
    std::system(("rm -rf " + directory_).c_str());
  }

  absl::StatusOr<World> Join(int number) {
    WorldOptions options;
    options.name = absl::StrCat("world-", number);
    options.rank = 0;
    options.size = 1;
    return session_.Join(options);
  }
  // A run's end is known soon after that of its results.
  void ExpectThatWorldsAreLeft() {
    while (Tables().worlds > 0) Values<float>(Scalar<float>(session_, 1) + 1);
    for (int i = 0; i < kMaxWorlds; ++i) {
      const absl::StatusOr<World> world = Join(-1 - i);
      ASSERT_TRUE(world.ok()) << world.status();
      ASSERT_TRUE(world->Leave().ok());
    }
  }
  SessionCore::Tables Tables() { return SessionOf(session_)->CountTables(); }

  std::atomic<int> failures_{0};  // lines in the daemon's log
  std::string directory_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<server::Daemon> daemon_;
  Session session_;
};

// Several graphs each: the daemon has room for a few worlds of these.
void Use(const World& world, float value) {
  const Tensor x = FromHost<float>(world, {value, 1}, {2}).RequireGrad();
  EXPECT_THAT(Values<float>(AllReduce(x * 2, world)), ElementsAre(2 * value, 2));
  const std::vector<Tensor> both = AllReduceCoalesced({x, x + 1}, world);
  EXPECT_THAT(Values<float>(both[1]), ElementsAre(value + 1, 2));
  EXPECT_THAT(Values<float>(AllGatherIntoTensor(x, world)), ElementsAre(value, 1));
  const absl::StatusOr<Group> group = world.NewGroup({0});
  ASSERT_TRUE(group.ok()) << group.status();
  const Tensor loss = Sum(Broadcast(x, 0, *group));
  ASSERT_TRUE(Backward(loss).ok());
  EXPECT_THAT(Values<float>(x.grad()), ElementsAre(1, 1));
}

void ExpectFlat(const SessionCore::Tables& before, const SessionCore::Tables& after) {
  EXPECT_LE(after.graphs, before.graphs);
  EXPECT_EQ(after.worlds, 0u);
  // Rows that nobody has go when there are as many again.
  EXPECT_LE(after.types, 2 * before.types + 256);
  EXPECT_LE(after.sources, before.sources + 8);
  EXPECT_LE(after.members, 128u);
}

TEST_P(LifetimeTest, WorldsThatWereLeftAreGone) {
  SessionCore::Tables before;
  for (int i = 0; i < 200; ++i) {
    const absl::StatusOr<World> world = Join(i);
    ASSERT_TRUE(world.ok()) << "world " << i << ": " << world.status();
    Use(*world, static_cast<float>(i));
    const absl::Status left = world->Leave();
    ASSERT_TRUE(left.ok()) << left;
    if (HasFailure()) FAIL() << "at world " << i;
    if (i == 20) before = Tables();
  }
  ExpectFlat(before, Tables());
}

// Left by one handle while another stays: the graphs go with the world, not with the handle.
TEST_P(LifetimeTest, AHandleOfAWorldThatWasLeftHoldsNoGraphs) {
  std::vector<World> kept;
  for (int i = 0; i < 60; ++i) {
    const absl::StatusOr<World> world = Join(i);
    ASSERT_TRUE(world.ok()) << "world " << i << ": " << world.status();
    Use(*world, static_cast<float>(i));
    ASSERT_TRUE(world->Leave().ok());
    if (HasFailure()) FAIL() << "at world " << i;
    kept.push_back(*world);
  }
}

TEST_P(LifetimeTest, AWorldsGraphsGoWithItsLastHandle) {
  const SessionCore::Tables before = Tables();
  {
    const absl::StatusOr<World> world = Join(0);
    ASSERT_TRUE(world.ok()) << world.status();
    Use(*world, 3);
    EXPECT_GT(Tables().graphs, before.graphs + 3);
  }
  // What is left are local ops.
  EXPECT_LE(Tables().graphs, before.graphs + 6);
}

TEST_P(LifetimeTest, ADeviceGroupsWorldGoesWithIt) {
  SessionCore::Tables before;
  for (int i = 0; i < 60; ++i) {
    const float value = static_cast<float>(i);
    std::vector<Tensor> copies;
    const Tensor x = FromHost<float>(session_, {value, 2}, {2}).RequireGrad();
    {
      const absl::StatusOr<DeviceGroup> group = DeviceGroup::Create(session_);
      ASSERT_TRUE(group.ok()) << "group " << i << ": " << group.status();
      copies = parallel::Broadcast(x, *group);
    }
    // Its results outlive it, with their history.
    EXPECT_THAT(Values<float>(copies[0]), ElementsAre(value, 2));
    EXPECT_THAT(Values<float>(copies[1]), ElementsAre(value, 2));
    const absl::Status backward = Backward(Sum(copies[0] * 3) + CopyTo(Sum(copies[1]), session_));
    ASSERT_TRUE(backward.ok()) << backward;
    EXPECT_THAT(Values<float>(x.grad()), ElementsAre(4, 4));
    if (HasFailure()) FAIL() << "at group " << i;
    if (i == 20) before = Tables();
  }
  ExpectThatWorldsAreLeft();
  ExpectFlat(before, Tables());
}

TEST_P(LifetimeTest, ADeviceGroupsWorldThatWasLeftIsNotLeftAgain) {
  {
    const absl::StatusOr<DeviceGroup> group = DeviceGroup::Create(session_);
    ASSERT_TRUE(group.ok()) << group.status();
    for (int index = 0; index < 2; ++index) {
      const absl::Status left = group->world(index).Leave();
      ASSERT_TRUE(left.ok()) << left;
    }
  }
  ExpectThatWorldsAreLeft();
  EXPECT_EQ(failures_, 0);
}

// Nobody has seen the results when the group goes.
TEST_P(LifetimeTest, ADeviceGroupIsNotLeftBeforeItsRunsAreOver) {
  std::vector<Tensor> results;
  for (int i = 0; i < kMaxWorlds; ++i) {
    const NoGrad no_grad;
    const absl::StatusOr<DeviceGroup> group = DeviceGroup::Create(session_);
    ASSERT_TRUE(group.ok()) << "group " << i << ": " << group.status();
    const Tensor x = FromHost<float>(session_, Floats(1000, static_cast<float>(i)), {1000});
    results.push_back(Sum(parallel::Broadcast(x, *group)[1]));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_THAT(Values<float>(results[i]), ElementsAre(1000 * static_cast<float>(i)));
  }
  ExpectThatWorldsAreLeft();
}

TEST_P(LifetimeTest, CallsOfManyTypesFitInOneSession) {
  const absl::StatusOr<World> world = Join(0);
  ASSERT_TRUE(world.ok()) << world.status();
  const auto everybody = world->NewGroup({0});
  ASSERT_TRUE(everybody.ok()) << everybody.status();
  const Compiled twice =
      Compile([](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] + in[0]}; });
  for (int64_t n = 1; n <= 150; ++n) {
    const Floats values(static_cast<size_t>(n), 2);
    const Tensor x = FromHost<float>(*world, values, {n});
    EXPECT_EQ(Values<float>(AllReduce(x, *world)), values);
    EXPECT_EQ(Values<float>(AllReduce(x, *everybody)), values);
    EXPECT_EQ(Values<float>(x * x), Floats(static_cast<size_t>(n), 4));
    if (HasFailure()) FAIL() << "at " << n;
  }
  // Compiled functions hold theirs as long as they live, and say so when there are too many.
  absl::Status full;
  for (int64_t n = 1; n <= 150 && full.ok(); ++n) {
    full = twice.Run({FromHost<float>(*world, Floats(static_cast<size_t>(n), 2), {n})}).status();
  }
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_EQ(ErrorOf(full).reason, Reason::kQuota) << full;
}

TEST_P(LifetimeTest, AWorldHasSoManyGroups) {
  const absl::StatusOr<World> world = Join(0);
  ASSERT_TRUE(world.ok()) << world.status();
  for (int g = 1; g < kMaxGroups; ++g) ASSERT_TRUE(world->NewGroup({0}).ok()) << g;
  const absl::Status full = world->NewGroup({0}).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_EQ(ErrorOf(full).reason, Reason::kQuota) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr("keep it"));
  EXPECT_THAT(Values<float>(AllReduce(Scalar<float>(*world, 3), *world)), ElementsAre(3));
}

INSTANTIATE_TEST_SUITE_P(Transports, LifetimeTest,
                         ::testing::Values(Way{Transport::kRing, "Ring"},
                                           Way{Transport::kStream, "Stream"}),
                         [](const auto& way) { return way.param.name; });

}  // namespace
}  // namespace chorus
