#include "core/backend/fault/fault_backend.h"

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/backend/fault/fault_script.h"
#include "core/backend/host/host_backend.h"
#include "core/backend/sim/sim_backend.h"
#include "core/backend/testing/backend_conformance.h"
#include "core/backend/testing/device_rig.h"
#include "core/base/error.h"
#include "core/ops/op.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

std::unique_ptr<Backend> OpenHost(int devices, HostKernelFactory make_kernel) {
  static ThreadPool pool(2);
  HostBackendOptions options;
  options.devices = devices;
  options.pool = &pool;
  options.make_kernel = make_kernel;
  options.memory_bytes = kConformanceMemoryBytes;
  return CreateHostBackend(options);
}

std::unique_ptr<Backend> OpenSim(int devices, HostKernelFactory make_kernel) {
  static uint64_t opened = 0;
  SimBackendOptions options;
  options.devices = devices;
  options.seed = TestSeed() + ++opened;
  options.make_kernel = make_kernel;
  options.memory_bytes = kConformanceMemoryBytes;
  return CreateSimBackend(options);
}

std::unique_ptr<Backend> Wrap(std::unique_ptr<Backend> inner, const std::string& script,
                              std::vector<std::string>* faults = nullptr) {
  auto parsed = ParseFaultScript(script);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  std::function<void(const std::string&)> on_fault;
  if (faults != nullptr) on_fault = [faults](const std::string& f) { faults->push_back(f); };
  return CreateFaultBackend(std::move(inner), *std::move(parsed), on_fault);
}

// Without rules, and with delays, nothing but time changes. Around sim, whose own suite takes its
// time, with CHORUS_LONG=1 in the environment; faults of sim's devices are tests/fault's every
// time.
std::vector<BackendConformanceParam> Wrapped() {
  std::vector<BackendConformanceParam> wrapped = {
      {"around_host",
       [](int devices, HostKernelFactory kernels) { return Wrap(OpenHost(devices, kernels), ""); }},
      {"delays", [](int devices, HostKernelFactory kernels) {
         return Wrap(OpenHost(devices, kernels),
                     "seed=3; launch delay for=50us times=20; "
                     "copy delay for=50us times=50 probability=0.1");
       }}};
  if (std::getenv("CHORUS_LONG") != nullptr) {
    wrapped.push_back({"around_sim", [](int devices, HostKernelFactory kernels) {
                         return Wrap(OpenSim(devices, kernels), "");
                       }});
  }
  return wrapped;
}

INSTANTIATE_TEST_SUITE_P(Fault, BackendConformance, testing::ValuesIn(Wrapped()),
                         BackendConformanceName);

CollectiveCall Barrier() {
  CollectiveCall barrier;
  barrier.kind = CollectiveKind::kBarrier;
  return barrier;
}

TEST(FaultBackendTest, AFailingCollectiveFailsOnAllMembers) {
  std::vector<std::string> faults;
  DeviceRig rig(
      Wrap(OpenHost(3, &MakeTestKernel), "collective error device=1 skip=2 times=1", &faults));
  auto members = rig.OpenAll(1);
  for (int round = 0; round < 2; ++round) {
    for (int m = 0; m < 3; ++m) {
      ASSERT_TRUE(members[m]->Enqueue(Barrier(), rig.stream(m)).ok());
    }
    for (int m = 0; m < 3; ++m) ASSERT_TRUE(rig.Synchronize(m).ok());
  }
  EXPECT_TRUE(faults.empty());
  ASSERT_TRUE(members[0]->Enqueue(Barrier(), rig.stream(0)).ok());
  ASSERT_TRUE(members[1]->Enqueue(Barrier(), rig.stream(1)).ok());
  for (const int m : {0, 1}) {
    const absl::Status status = rig.Synchronize(m);
    EXPECT_EQ(ErrorOf(status).reason, Reason::kExecFailed) << m << ": " << status;
  }
  EXPECT_EQ(members[2]->Enqueue(Barrier(), rig.stream(2)).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(faults, std::vector<std::string>{"collective failing on device 1"});
}

TEST(FaultBackendTest, ALostCollectiveEndsOnlyWithItsCommunicator) {
  DeviceRig rig(Wrap(OpenHost(2, &MakeTestKernel), "collective lost device=0"));
  auto members = rig.OpenAll(1);
  ASSERT_TRUE(members[0]->Enqueue(Barrier(), rig.stream(0)).ok());
  ASSERT_TRUE(members[1]->Enqueue(Barrier(), rig.stream(1)).ok());
  // What is behind it on its stream, and behind that elsewhere, waits.
  std::atomic<int> passed{0};
  auto event = rig.backend()->device(0)->CreateEvent();
  rig.stream(0)->Record(event.get());
  auto other = rig.backend()->device(0)->CreateStream();
  other->Wait(event.get());
  for (Stream* stream : {rig.stream(0), rig.stream(1), other.get()}) {
    stream->Callback([&](absl::Status) { ++passed; });
  }
  auto idle = rig.backend()->device(0)->CreateStream();
  ASSERT_TRUE(rig.SynchronizeStream(idle.get()).ok());
  EXPECT_EQ(passed, 0);
  for (auto& member : members) member->Abort(absl::AbortedError("exec timeout"));
  EXPECT_TRUE(rig.SynchronizeStream(other.get()).ok());
  EXPECT_TRUE(rig.Synchronize(0).ok()) << "the status went to the callback before";
  EXPECT_TRUE(rig.Synchronize(1).ok());
  EXPECT_EQ(passed, 3);
}

TEST(FaultBackendTest, TheStatusOfALostCollectiveIsTheAborts) {
  DeviceRig rig(Wrap(OpenSim(2, &MakeTestKernel), "collective lost device=0"));
  auto members = rig.OpenAll(1);
  ASSERT_TRUE(members[0]->Enqueue(Barrier(), rig.stream(0)).ok());
  ASSERT_TRUE(members[1]->Enqueue(Barrier(), rig.stream(1)).ok());
  for (auto& member : members) member->Abort(absl::AbortedError("exec timeout"));
  for (const int m : {0, 1}) {
    EXPECT_EQ(rig.Synchronize(m), absl::AbortedError("exec timeout")) << m;
  }
  EXPECT_EQ(members[0]->Enqueue(Barrier(), rig.stream(0)).code(), absl::StatusCode::kAborted);
}

TEST(FaultBackendTest, ClosingACommunicatorEndsItsLostCalls) {
  DeviceRig rig(Wrap(OpenHost(2, &MakeTestKernel), "collective lost device=0"));
  auto members = rig.OpenAll(1);
  ASSERT_TRUE(members[0]->Enqueue(Barrier(), rig.stream(0)).ok());
  ASSERT_TRUE(members[1]->Enqueue(Barrier(), rig.stream(1)).ok());
  members[0].reset();
  EXPECT_EQ(rig.Synchronize(0).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(rig.Synchronize(1).code(), absl::StatusCode::kAborted);
}

TEST(FaultBackendTest, DelayedWorkHoldsBackWhatIsBehindIt) {
  DeviceRig rig(Wrap(OpenHost(1, &MakeTestKernel), "launch delay for=30ms"));
  const TensorType type(DType::kF32, {1});
  const TensorType* inputs[] = {&type, &type};
  NodeView node;
  node.op = "test_affine";
  node.inputs = inputs;
  auto kernel = rig.backend()->device(0)->MakeKernel(node, {type});
  ASSERT_TRUE(kernel.ok());
  KernelCall call;
  call.kernel = kernel->get();
  call.inputs = {rig.Upload(0, std::vector<float>{1}), rig.Upload(0, std::vector<float>{2})};
  call.outputs = {rig.Allocate(0, 4)};
  const DeviceAddress copy = rig.Allocate(0, 4);
  auto event = rig.backend()->device(0)->CreateEvent();
  auto other = rig.backend()->device(0)->CreateStream();
  const absl::Time start = absl::Now();
  rig.stream(0)->Launch(call);
  rig.stream(0)->Record(event.get());
  other->Wait(event.get());
  other->Copy(copy, call.outputs[0], 4);
  ASSERT_TRUE(rig.SynchronizeStream(other.get()).ok());
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(30));
  EXPECT_EQ(rig.Download<float>(0, copy, 1)[0], 4);
}

TEST(FaultBackendTest, AFailingCopyIsNotDoneAndTellsTheNextCallback) {
  DeviceRig rig(Wrap(OpenHost(1, &MakeTestKernel), "copy error skip=2"));
  const DeviceAddress a = rig.Upload(0, std::vector<float>{1});
  const DeviceAddress b = rig.Upload(0, std::vector<float>{2});
  rig.stream(0)->Copy(b, a, 4);
  EXPECT_EQ(ErrorOf(rig.Synchronize(0)).reason, Reason::kExecFailed);
  EXPECT_TRUE(rig.Synchronize(0).ok());
  EXPECT_EQ(rig.Download<float>(0, b, 1)[0], 2);
}

TEST(FaultBackendTest, AllocationsAndCommunicatorsFailAsTold) {
  DeviceRig rig(Wrap(OpenHost(2, &MakeTestKernel),
                     "allocate oom device=1 skip=1 times=2; open error skip=1"));
  Device* device = rig.backend()->device(1);
  EXPECT_TRUE(rig.backend()->device(0)->Allocate(8).ok());
  EXPECT_TRUE(device->Allocate(8).ok());
  for (int i = 0; i < 2; ++i) {
    const auto refused = device->Allocate(8);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(ErrorOf(refused.status()).reason, Reason::kOutOfMemory);
  }
  EXPECT_TRUE(device->Allocate(8).ok());
  auto first = rig.backend()->OpenCommunicator(1, {0, 1}, 0);
  EXPECT_TRUE(first.ok());
  EXPECT_EQ(rig.backend()->OpenCommunicator(1, {0, 1}, 1).status().code(),
            absl::StatusCode::kInternal);
  auto again = rig.backend()->OpenCommunicator(2, {0, 1}, 1);
  EXPECT_TRUE(again.ok()) << again.status();
}

TEST(FaultBackendTest, ASeedGivesTheSameFaults) {
  const auto run = [](const std::string& seed) {
    std::vector<std::string> faults;
    DeviceRig rig(Wrap(OpenHost(2, &MakeTestKernel),
                       seed + "; allocate oom times=all probability=0.5", &faults));
    std::string pattern;
    for (int i = 0; i < 64; ++i) {
      pattern += rig.backend()->device(i % 2)->Allocate(8).ok() ? '.' : 'x';
    }
    return pattern;
  };
  EXPECT_EQ(run("seed=5"), run("seed=5"));
  EXPECT_NE(run("seed=5"), run("seed=6"));
}

TEST(FaultBackendTest, LostWorkIsDroppedWithTheBackend) {
  auto held = std::make_shared<int>(1);
  {
    DeviceRig rig(Wrap(OpenHost(1, &MakeTestKernel), "copy lost skip=1"));
    const DeviceAddress a = rig.Upload(0, std::vector<float>{1});
    rig.stream(0)->Copy(a, a, 4);
    rig.stream(0)->Callback([held](absl::Status) { ++*held; });
  }
  EXPECT_EQ(*held, 1);
  EXPECT_EQ(held.use_count(), 1);
}

TEST(FaultScriptTest, ParsesWhatItDocuments) {
  const auto script = ParseFaultScript(
      "seed=7; collective error device=1 skip=3; copy delay for=2ms times=all probability=0.1;");
  ASSERT_TRUE(script.ok()) << script.status();
  EXPECT_EQ(script->seed, 7u);
  ASSERT_EQ(script->rules.size(), 2u);
  EXPECT_EQ(script->rules[0].site, FaultRule::Site::kCollective);
  EXPECT_EQ(script->rules[0].effect, FaultRule::Effect::kError);
  EXPECT_EQ(script->rules[0].device, 1);
  EXPECT_EQ(script->rules[0].skip, 3);
  EXPECT_EQ(script->rules[0].times, 1);
  EXPECT_EQ(script->rules[1].delay, absl::Milliseconds(2));
  EXPECT_EQ(script->rules[1].times, -1);
  EXPECT_EQ(script->rules[1].probability, 0.1);
}

TEST(FaultScriptTest, RefusesWhatItDoesNotKnow) {
  for (const char* text :
       {"collective", "nothing error", "copy explode", "seed=x", "copy error device=-1",
        "copy error skip=many", "copy error times=-2", "copy error probability=2",
        "copy delay for=long", "copy error color=red", "copy oom", "allocate lost", "open delay"}) {
    EXPECT_EQ(ParseFaultScript(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace chorus
