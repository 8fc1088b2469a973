// Of each thing that clients make the node hold one tenant may have seven eighths, by itself: so
// another always gets in.
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/backend/host/host_backend.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/graph/encoding.h"
#include "core/node/node.h"
#include "core/node/node_rig.h"
#include "core/node/options.h"
#include "core/ops/host_kernels.h"
#include "core/runtime/budget.h"
#include "core/runtime/devices.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

constexpr int64_t kLimit = 16;
constexpr int64_t kMiB = int64_t{1} << 20;

// Sessions of a tenant, each of which asks for one thing after the other.
class Tenant {
 public:
  Tenant(LocalNode* node, std::string name) : node_(node), name_(std::move(name)) {}

  absl::Status OpenSession() {
    OpenSessionRequest open;
    open.tenant = name_;
    open.devices = {DeviceIndex(0), DeviceIndex(1)};
    const absl::StatusOr<SessionInfo> opened = node_->OpenSession(open, now_);
    if (opened.ok()) session_ = opened->id;
    return opened.status();
  }
  // Its first rank waits for another.
  absl::Status JoinWorld() { return Join(absl::StrCat(name_, "-", ++count_), /*rank=*/0); }
  absl::Status WaitForACommand() {
    return Told([&](auto told) {
      node_->WaitOutcome(session_, Sequence(100 + ++count_), absl::InfiniteFuture(),
                         [told](const Outcome& outcome) { told(outcome.status); });
    });
  }
  // Which another rank would have to compute.
  absl::Status ReadATensor() {
    if (!voted_) Vote();
    return Told([&](auto told) {
      node_->ReadTensor(
          session_, {0, 1}, absl::InfiniteFuture(),
          [told](const absl::StatusOr<ReadableTensor>& tensor) { told(tensor.status()); });
    });
  }
  absl::Status RegisterAGraph() {
    RegisterGraph command;
    command.graph = {++count_, 1};
    command.encoded = EncodeGraph(NegateGraph(count_));
    return Submit(std::move(command));
  }
  absl::Status CreateStaging(int64_t bytes) {
    return Told([&](auto told) {
      node_->CreateStaging(session_, bytes, [told](const absl::StatusOr<StagingArena>& arena) {
        told(arena.status());
      });
    });
  }

 private:
  using Tell = std::function<void(const absl::Status&)>;
  // What is said at once: OK, if nothing is.
  absl::Status Told(const std::function<void(Tell)>& ask) {
    const auto said = std::make_shared<absl::Status>();
    ask([said](const absl::Status& status) { *said = status; });
    while (node_->Poll(now_)) {
    }
    return *said;
  }
  absl::Status Join(const std::string& world, int rank) {
    JoinRequest join;
    join.name = world;
    join.size = 2;
    join.rank = Rank(rank);
    join.device = DeviceIndex(rank);
    return Told([&](auto told) {
      node_->JoinWorld(session_, join, now_,
                       [world = world_, told](const absl::StatusOr<WorldInfo>& info) {
                         if (info.ok()) *world = info->id;
                         told(info.status());
                       });
    });
  }
  absl::Status Submit(CommandBody body) {
    const Command command{Sequence(++sequence_), std::move(body)};
    ByteWriter frame;
    EncodeFrame(command, &frame);
    return Told([&](auto told) {
      node_->Submit(session_, std::string(frame.bytes()), now_,
                    [told](const Outcome& outcome) { told(outcome.status); });
    });
  }
  void Vote() {
    voted_ = true;
    for (const int rank : {0, 1}) EXPECT_TRUE(Join(name_, rank).ok());
    RegisterGraph command;
    command.graph = {0, 1};
    command.encoded =
        EncodeGraph(AllReduceGraph(/*rank=*/0, /*size=*/2, TensorType(DType::kF32, {1}), "a.cc:1"));
    EXPECT_TRUE(Submit(std::move(command)).ok());
    Run run = DirectRank::LocalRun(0, {DirectRank::Inline({1})}, {{0, 1}});
    RunGroup group;
    group.world = *world_;
    group.epoch = Epoch(1);
    group.base.push_back({0, 0, 0});
    run.groups.push_back(group);
    EXPECT_TRUE(Submit(std::move(run)).ok());
  }

  LocalNode* const node_;
  const std::string name_;
  const absl::Time now_ = absl::Now();
  SessionId session_;
  const std::shared_ptr<WorldId> world_ =
      std::make_shared<WorldId>();  // of the last that it joined
  int64_t sequence_ = 0;
  int32_t count_ = 0;
  bool voted_ = false;
};

struct Case {
  const char* what;
  std::function<void(NodeOptions*)> limit;
  std::function<absl::Status(Tenant*)> take;
  int64_t share;
  Reason refused = Reason::kQuota;
};

TEST(SharesTest, OneTenantHasSevenEighthsOfEachAndAnotherGetsIn) {
  const std::vector<Case> cases = {
      {"sessions", [](NodeOptions* o) { o->max_sessions = kLimit; },
       [](Tenant* t) { return t->OpenSession(); }, ShareOf(kLimit) - 1},
      {"worlds", [](NodeOptions* o) { o->max_worlds = kLimit; },
       [](Tenant* t) { return t->JoinWorld(); }, ShareOf(kLimit)},
      {"waits", [](NodeOptions* o) { o->max_waits = kLimit; },
       [](Tenant* t) { return t->WaitForACommand(); }, ShareOf(kLimit)},
      {"downloads", [](NodeOptions* o) { o->max_downloads = kLimit; },
       [](Tenant* t) { return t->ReadATensor(); }, ShareOf(kLimit)},
      {"graphs", [](NodeOptions* o) { o->max_node_graphs = kLimit; },
       [](Tenant* t) { return t->RegisterAGraph(); }, ShareOf(kLimit)},
      {"descriptors", [](NodeOptions* o) { o->max_descriptors = 2 * kLimit; },
       [](Tenant* t) { return t->CreateStaging(4096); }, ShareOf(2 * kLimit) / 2},
      {"bytes", [](NodeOptions* o) { o->memory_limit_bytes = kLimit * kMiB; },
       [](Tenant* t) { return t->CreateStaging(kMiB); }, ShareOf(kLimit), Reason::kOutOfMemory},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    ThreadPool pool(1);
    HostBackendOptions host;
    host.devices = 2;
    host.pool = &pool;
    host.make_kernel = MakeHostKernel;
    const std::unique_ptr<Backend> backend = CreateHostBackend(host);
    NodeOptions options;
    c.limit(&options);
    LocalNode node(options, DevicesOf(backend.get()), [] {});
    Tenant one(&node, "uid:1");
    Tenant other(&node, "uid:2");
    ASSERT_TRUE(one.OpenSession().ok());
    int64_t taken = 0;
    absl::Status status;
    while (taken <= kLimit && (status = c.take(&one)).ok()) ++taken;
    EXPECT_EQ(taken, c.share);
    EXPECT_EQ(ErrorOf(status).reason, c.refused) << status;
    EXPECT_TRUE(other.OpenSession().ok());
    status = c.take(&other);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_FALSE(c.take(&one).ok()) << "that is not its to have";
    node.AbortAll(absl::Now());
    while (node.Poll(absl::Now())) {
    }
  }
}

}  // namespace
}  // namespace chorus::node
