#include "core/node/launcher.h"

#include <future>
#include <memory>
#include <string>
#include <vector>

#include "core/backend/host/host_backend.h"
#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/base/thread_pool.h"
#include "core/base/work.h"
#include "core/graph/encoding.h"
#include "core/node/prepare.h"
#include "core/ops/host_kernels.h"
#include "core/ops/testing/rank_builder.h"
#include "core/runtime/devices.h"
#include "core/runtime/executor.h"
#include "core/runtime/messages.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

using testing::RankBuilder;

// Of a backend in this process. The test says when they are lost, and when what they say is heard.
class ScriptedDevices : public Devices {
 public:
  explicit ScriptedDevices(Backend* backend)
      : devices_(DevicesOf(backend)), on_event_(static_cast<size_t>(info().count())) {}
  const DevicesInfo& info() const override { return devices_->info(); }
  absl::StatusOr<int64_t> WorkspaceBytes(const NodeView& node,
                                         absl::Span<const TensorType> outputs) const override {
    return devices_->WorkspaceBytes(node, outputs);
  }
  absl::StatusOr<DeviceAddress> Allocate(int device, int64_t bytes) override {
    return devices_->Allocate(device, bytes);
  }
  int64_t Free(int device, DeviceAddress address) override {
    return devices_->Free(device, address);
  }
  int64_t freed() const override { return devices_->freed(); }
  std::unique_ptr<Executor> OpenExecutor(int device, Executor::OnEvent on_event,
                                         DeviceExecutorOptions options) override {
    on_event_[static_cast<size_t>(device)] = on_event;
    return devices_->OpenExecutor(
        device, [this, device](absl::string_view event) { Hear(device, event); },
        std::move(options));
  }
  void Lose(int device) {
    ByteWriter bytes;
    EncodeEvent(LostMessage{MakeError(Reason::kDeviceLost, "it is gone")}, &bytes);
    Hear(device, bytes.bytes());
  }
  // Nothing is heard until Release().
  void Hold() {
    MutexLock lock(&mutex_);
    holds_ = true;
  }
  void Release() {
    MutexLock lock(&mutex_);
    holds_ = false;
    for (const auto& [device, event] : held_) on_event_[static_cast<size_t>(device)](event);
    held_.clear();
  }

 private:
  void Hear(int device, absl::string_view event) {
    MutexLock lock(&mutex_);
    if (holds_) {
      held_.emplace_back(device, event);
    } else {
      on_event_[static_cast<size_t>(device)](event);
    }
  }

  const std::unique_ptr<Devices> devices_;
  std::vector<Executor::OnEvent> on_event_;
  Mutex mutex_;
  bool holds_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::pair<int, std::string>> held_ ABSL_GUARDED_BY(mutex_);
};

class LauncherTest : public ::testing::Test {
 protected:
  LauncherTest() {
    HostBackendOptions host;
    host.devices = 4;
    host.pool = &pool_;
    host.inline_bytes = 0;
    host.make_kernel = MakeHostKernel;
    backend_ = CreateHostBackend(host);
    devices_ = std::make_unique<ScriptedDevices>(backend_.get());
    launcher_ = std::make_unique<Launcher>(devices_.get(), nullptr, [] {});
  }

  template <typename Build>
  std::shared_ptr<GraphRecord> Register(Build build) {
    RankBuilder builder(0, 4);
    builder.set_wants_grad(false);
    GraphOutput output;
    output.value = build(&builder);
    builder.graph().AddOutput(output);
    auto record =
        graphs_.Register(EncodeGraph(builder.graph().Build()), {"uid:1", budget_}, nullptr);
    EXPECT_TRUE(record.ok()) << record.status();
    return *record;
  }

  absl::Status Load(const std::shared_ptr<GraphRecord>& record, int device,
                    const BudgetRef& budget) {
    return Load(record, device, budget, []() -> absl::StatusOr<GraphStore::OnMade> {
      return absl::InternalError("a small plan is there at once");
    });
  }
  absl::Status Load(const std::shared_ptr<GraphRecord>& record, int device, const BudgetRef& budget,
                    absl::FunctionRef<absl::StatusOr<GraphStore::OnMade>()> wait) {
    const DeviceIndex devices[] = {DeviceIndex(device)};
    const std::string tenant = "uid:1";
    const absl::Status ok;
    return launcher_->LoadPlan(record, /*variant=*/nullptr, devices, {tenant, budget}, {ok, wait})
        .status();
  }
  PlanId PlanOn(const GraphRecord& record, int device) const {
    return launcher_->PlanOn(record.main, 0, DeviceIndex(device)).value_or(PlanId());
  }
  Reason WhyNotOn(const GraphRecord& record, int device) const {
    return ErrorOf(launcher_->PlanOn(record.main, 0, DeviceIndex(device)).status()).reason;
  }

  // Of many nodes each, of some kinds.
  static constexpr int kNodes = 500;
  std::vector<std::shared_ptr<GraphRecord>> Chains() {
    const auto chain = [&](const TensorType& type, auto next) {
      return Register([&](RankBuilder* b) {
        ValueIndex x = b->Input(type);
        for (int i = 0; i < kNodes; ++i) x = next(b, x);
        return x;
      });
    };
    const TensorType vector(DType::kF32, {5});
    const TensorType square(DType::kF32, {5, 5});
    return {
        chain(vector, [](RankBuilder* b, ValueIndex x) { return b->Op("neg", {x}); }),
        chain(vector,
              [](RankBuilder* b, ValueIndex x) {
                return b->Op("add", {x, x});
              }),
        chain(square,
              [](RankBuilder* b, ValueIndex x) {
                return b->Op("matmul", {x, x});
              }),
        chain(square,
              [](RankBuilder* b, ValueIndex x) {
                const std::vector<int64_t> perm = {1, 0};
                return b->Op("transpose", {x}, {{"perm", perm}});
              }),
        chain(vector,
              [](RankBuilder* b, ValueIndex x) {
                return b->Op(
                    "concat",
                    std::vector<ValueIndex>(
                        20,
                        b->Op("slice", {x},
                              {{"axis", int64_t{0}}, {"begin", int64_t{0}}, {"end", int64_t{1}}})),
                    {{"axis", int64_t{0}}});
              }),
        chain(vector, [](RankBuilder* b, ValueIndex x) { return b->AllReduce(x); }),
        chain(vector,
              [](RankBuilder* b, ValueIndex x) {
                return b->Op("slice", {b->ApplyCollective("all_gather_into_tensor", {x})[0]},
                             {{"axis", int64_t{0}}, {"begin", int64_t{0}}, {"end", int64_t{5}}});
              }),
    };
  }

  const BudgetRef budget_ = Budget::OfNode(int64_t{1} << 30);
  ThreadPool pool_{1};
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<ScriptedDevices> devices_;
  std::unique_ptr<Launcher> launcher_;
  GraphStore graphs_{{}, nullptr, [](DeviceIndex, PlanId) { return UnloadedPart(); }};
};

// Others have their turns in between, and what comes meanwhile comes behind.
TEST_F(LauncherTest, OfWhatHasComeATurnsWorkIsTakenAtATimeInOrder) {
  constexpr int kPosted = 100;
  constexpr int64_t kWork = kTurnWork / 10;
  std::vector<int> done;
  const auto post = [&](int number) {
    launcher_->Post([&done, number] {
      done.push_back(number);
      CountWork(kWork);
    });
  };
  for (int i = 0; i < kPosted; ++i) post(i);
  int turns = 0;
  while (launcher_->HasCompletions()) {
    const size_t before = done.size();
    EXPECT_TRUE(launcher_->Drain([](const CompletionMessage&) {}));
    EXPECT_LE(done.size() - before, 11u);
    if (++turns == 3) post(kPosted);
  }
  EXPECT_GE(turns, kPosted / 11);
  ASSERT_EQ(done.size(), static_cast<size_t>(kPosted) + 1);
  for (int i = 0; i <= kPosted; ++i) EXPECT_EQ(done[static_cast<size_t>(i)], i);
  EXPECT_FALSE(launcher_->Drain([](const CompletionMessage&) {}));
}

TEST_F(LauncherTest, ToLoadAPlanCountsItsKernels) {
  for (const auto& record : Chains()) {
    const WorkSlice slice;
    ASSERT_TRUE(Load(record, 0, budget_).ok());
    EXPECT_GE(SliceWork(), 5 * kNodes);
    const int64_t loaded = SliceWork();
    ASSERT_TRUE(Load(record, 0, budget_).ok());
    EXPECT_EQ(SliceWork(), loaded) << "it is there";
  }
}

TEST_F(LauncherTest, EachDeviceMoreThatHasAPlanIsCharged) {
  const auto record = Register(
      [](RankBuilder* b) { return b->Op("neg", {b->Input(TensorType(DType::kF32, {3}))}); });
  const int64_t used = budget_->used();
  const int64_t part = MemoryOfLoadedPart(record->main, 0);
  EXPECT_GT(record->bytes, part);
  EXPECT_EQ(PlanOn(*record, 0), PlanId());
  ASSERT_TRUE(Load(record, 0, budget_).ok());
  EXPECT_NE(PlanOn(*record, 0), PlanId());
  EXPECT_EQ(budget_->used(), used) << "whoever names the graph is";
  ASSERT_TRUE(Load(record, 1, budget_).ok());
  const PlanId second = PlanOn(*record, 1);
  EXPECT_EQ(budget_->used(), used + part);
  ASSERT_TRUE(Load(record, 1, budget_).ok());
  EXPECT_EQ(PlanOn(*record, 1), second);
  EXPECT_EQ(budget_->used(), used + part);
  const BudgetRef poor = Budget::OfNode(part - 1);
  EXPECT_EQ(ErrorOf(Load(record, 2, poor)).reason, Reason::kOutOfMemory);
  EXPECT_EQ(PlanOn(*record, 2), PlanId());
  EXPECT_EQ(launcher_->loaded_plans(), 2);
  launcher_->UnloadPlan(DeviceIndex(1), second);
  EXPECT_EQ(launcher_->loaded_plans(), 1);
  EXPECT_EQ(budget_->used(), used);
}

// A run that was prepared before the loss is launched after it; what was never loaded is a defect,
// on a device that was lost once too.
TEST_F(LauncherTest, APartThatWasLostIsToldFromOneThatWasNeverLoaded) {
  const auto record = Register(
      [](RankBuilder* b) { return b->Op("neg", {b->Input(TensorType(DType::kF32, {3}))}); });
  const int64_t used = budget_->used();
  const int64_t part = MemoryOfLoadedPart(record->main, 0);
  for (const int device : {0, 1}) ASSERT_TRUE(Load(record, device, budget_).ok());
  const PlanId first = PlanOn(*record, 1);
  for (const int device : {1, 2}) devices_->Lose(device);
  EXPECT_TRUE(launcher_->Drain([](const CompletionMessage&) {}));
  EXPECT_NE(PlanOn(*record, 0), PlanId());
  EXPECT_EQ(WhyNotOn(*record, 1), Reason::kDeviceLost);
  EXPECT_EQ(WhyNotOn(*record, 2), Reason::kInternal);
  EXPECT_EQ(WhyNotOn(*record, 3), Reason::kInternal);
  ASSERT_TRUE(Load(record, 2, budget_).ok());
  EXPECT_EQ(budget_->used(), used + part) << "what was lost costs nothing any more";
  EXPECT_EQ(WhyNotOn(*record, 1), Reason::kDeviceLost) << "and is told from it all the same";
  ASSERT_TRUE(Load(record, 1, budget_).ok());
  EXPECT_GT(PlanOn(*record, 1), first);
  EXPECT_EQ(budget_->used(), used + 2 * part);
}

TEST_F(LauncherTest, OfPartsThatAreLoadedAtTheSameTimeOneIsNotCharged) {
  devices_->Hold();
  const auto record = Register(
      [](RankBuilder* b) { return b->Op("neg", {b->Input(TensorType(DType::kF32, {3}))}); });
  const int64_t used = budget_->used();
  const int64_t part = MemoryOfLoadedPart(record->main, 0);
  int loaded = 0;
  for (const int device : {0, 1, 2}) {
    const absl::Status begun = Load(record, device, budget_, [&loaded] {
      return GraphStore::OnMade([&loaded](const absl::Status& status) { loaded += status.ok(); });
    });
    EXPECT_TRUE(begun.ok()) << begun;
  }
  EXPECT_EQ(budget_->used(), used + 2 * part);
  devices_->Release();
  EXPECT_TRUE(launcher_->Drain([](const CompletionMessage&) {}));
  EXPECT_EQ(loaded, 3);
  EXPECT_EQ(launcher_->loaded_plans(), 3);
  EXPECT_EQ(budget_->used(), used + 2 * part);
}

TEST_F(LauncherTest, ALoadedPartTakesNoMoreThanItIsChargedFor) {
  const std::vector<std::shared_ptr<GraphRecord>> records = Chains();
  for (size_t i = 0; i < records.size(); ++i) {
    const std::string& encoded = records[i]->main.plan.device_plans[0];
    const HeapUse heap;
    ASSERT_TRUE(Load(records[i], 0, budget_).ok());
    EXPECT_LE(heap.bytes(), MemoryOfLoadedPart(records[i]->main, 0))
        << "graph " << i << ": " << encoded.size() << " bytes";
    RecordProperty(
        "times_" + std::to_string(i),
        std::to_string(static_cast<double>(heap.bytes()) / static_cast<double>(encoded.size())));
  }
}

// Behind what takes long, in the device's queues: a thousand runs of a session may.
TEST_F(LauncherTest, ALaunchThatWaitsTakesNoMoreThanItIsChargedFor) {
  constexpr int kLaunches = 10;
  std::promise<void> begun;
  std::promise<void> goes_on;
  pool_.Post([&] {
    begun.set_value();
    goes_on.get_future().wait();
  });
  begun.get_future().wait();
  const auto lease = launcher_->LeaseCommunicators(budget_);
  const absl::StatusOr<CommunicatorId> communicator = lease->Of(
      std::vector<DeviceIndex>{DeviceIndex(0), DeviceIndex(1), DeviceIndex(2), DeviceIndex(3)});
  ASSERT_TRUE(communicator.ok()) << communicator.status();
  std::vector<std::vector<double>> memory;
  const std::vector<std::shared_ptr<GraphRecord>> records = Chains();
  for (size_t i = 0; i < records.size(); ++i) {
    ASSERT_TRUE(Load(records[i], 0, budget_).ok());
    const Plan& plan = records[i]->main.plan;
    LaunchMessage message;
    message.plan = PlanOn(*records[i], 0);
    for (const BufferSpec& spec : plan.buffers) {
      memory.emplace_back(static_cast<size_t>(spec.bytes) / sizeof(double) + 1);
      message.buffers.push_back(reinterpret_cast<DeviceAddress>(memory.back().data()));
    }
    for (size_t c = 0; c < plan.collectives[0].size(); ++c) {
      message.collectives.emplace_back();
      message.collectives.back().communicator = *communicator;
      message.collectives.back().present = {0};  // nobody shares what the call takes
    }
    const HeapUse heap;
    for (int l = 0; l < kLaunches; ++l) {
      message.launch = launcher_->NextLaunchId();
      launcher_->Launch(DeviceIndex(0), message);
      while (launcher_->Continue()) {
      }
    }
    const int64_t bytes = heap.bytes() / kLaunches;
    const int64_t charged = MemoryOfRun(records[i]->graph, plan);
    EXPECT_LE(bytes, charged) << "graph " << i;
    RecordProperty("charged_times_" + std::to_string(i),
                   std::to_string(static_cast<double>(charged) / static_cast<double>(bytes)));
    RecordProperty("bytes_of_step_" + std::to_string(i), std::to_string(bytes / kNodes));
    RecordProperty("encoded_step_" + std::to_string(i),
                   std::to_string(static_cast<int>(plan.device_plans[0].size()) / kNodes));
  }
  goes_on.set_value();
  for (size_t left = records.size() * kLaunches; left > 0;) {
    launcher_->Drain([&left](const CompletionMessage& completed) {
      EXPECT_TRUE(completed.status.ok()) << completed.status;
      --left;
    });
  }
}

}  // namespace
}  // namespace chorus::node
