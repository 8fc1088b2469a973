// What the conformance suite (cuda_backend_test) does not see: errors of the driver, pinned memory,
// long queues.
#include "core/backend/cuda/cuda_engine.h"

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "core/backend/cuda/cuda_backend.h"
#include "core/backend/cuda/kernels/moves.h"
#include "core/backend/cuda/testing/test_kernel_factory.h"
#include "core/backend/cuda/testing/test_kernels.h"
#include "core/backend/testing/device_rig.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/cuda/testing/fake_driver.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using cuda::Result;
using ::testing::HasSubstr;

constexpr char kImage[] = "of a stand-in";
constexpr auto kCannotRun = static_cast<Result>(700);  // CUDA_ERROR_ILLEGAL_ADDRESS

cuda::FakeDriverOptions FakeOptions(std::function<Result(const char* call)> fault) {
  using namespace cuda;  // the lists name their types without it
  FakeDriverOptions options;
  options.seed = 3;
  options.patience = absl::Milliseconds(5);  // longer than the host takes for a piece of a copy
  options.kernels = {CHORUS_MOVE_KERNELS(CHORUS_FAKE_KERNEL)
                         CHORUS_TEST_KERNELS(CHORUS_FAKE_KERNEL)};
  options.fault = std::move(fault);
  return options;
}

class CudaEngineTest : public ::testing::Test {
 protected:
  CudaEngineTest()
      : driver_(FakeOptions([this](const char* call) {
          MutexLock lock(&mutex_);
          ++calls_[call];
          return Result::kSuccess;
        })),
        api_(cuda::FakeDriver::api()) {}

  absl::StatusOr<std::unique_ptr<Backend>> Open(int devices) {
    CudaBackendOptions options;
    options.api = &api_;
    options.devices = devices;
    options.images = {{kImage, sizeof(kImage)}};
    options.make_kernel = &MakeCudaTestKernel;
    options.memory_bytes = int64_t{64} << 20;
    options.chunk_bytes = int64_t{4} << 20;
    return CreateCudaBackend(options);
  }
  // How often the driver has been asked for it.
  int64_t CallsOf(const std::string& call) {
    MutexLock lock(&mutex_);
    return calls_[call];
  }

  Mutex mutex_;
  std::map<std::string, int64_t> calls_ ABSL_GUARDED_BY(mutex_);
  cuda::FakeDriver driver_;
  const cuda::Api api_;
};

// An affine kernel of `count` numbers and its operands: out = 2 a + b.
struct Affine {
  Affine(DeviceRig* rig, int device, int64_t count) {
    const TensorType type(DType::kF32, {count});
    const TensorType* inputs[] = {&type, &type};
    NodeView node;
    node.op = "test_affine";
    node.inputs = inputs;
    kernel = *rig->backend()->device(device)->MakeKernel(node, {type});
    const auto n = static_cast<size_t>(count);
    call.kernel = kernel.get();
    call.inputs = {rig->Upload(device, std::vector<float>(n, 1)),
                   rig->Upload(device, std::vector<float>(n, 3))};
    call.outputs = {rig->Upload(device, std::vector<float>(n, 0))};
  }
  std::unique_ptr<Kernel> kernel;
  KernelCall call;
};

TEST_F(CudaEngineTest, WhateverTheDriverRefusesAtTheStartIsSaidAndLeavesNothing) {
  for (const char* call : {"cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDevicePrimaryCtxRetain",
                           "cuModuleLoadData", "cuMemAddressReserve", "cuStreamCreateWithPriority",
                           "cuEventCreate", "cuMemHostAlloc", "cuMemHostGetDevicePointer"}) {
    SCOPED_TRACE(call);
    driver_.FailNext(call, Result::kUnknown);
    const absl::Status status = Open(2).status();
    EXPECT_EQ(driver_.faults_left(), 0);
    EXPECT_THAT(std::string(status.message()), HasSubstr(call));
  }
  EXPECT_TRUE(Open(2).ok());
}

TEST_F(CudaEngineTest, AGpuThatIsNotThereAndKernelsThatAreNotAreNamed) {
  CudaBackendOptions options;
  options.api = &api_;
  options.gpu = 5;
  options.images = {{kImage, sizeof(kImage)}};
  options.make_kernel = &MakeCudaTestKernel;
  EXPECT_THAT(std::string(CreateCudaBackend(options).status().message()),
              HasSubstr("there is no GPU 5: this machine has 1"));
  options.gpu = 0;
  options.images = {{kImage, 0}};
  EXPECT_THAT(std::string(CreateCudaBackend(options).status().message()),
              HasSubstr("without a CUDA toolkit"));
}

TEST_F(CudaEngineTest, WhatTheDriverRefusesFailsAndTheNextGoesOn) {
  DeviceRig rig(*Open(1));
  const Affine affine(&rig, 0, 10);
  driver_.FailNext("cuLaunchKernel", Result::kInvalidValue);
  rig.stream(0)->Launch(affine.call);
  const absl::Status status = rig.Synchronize(0);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cuLaunchKernel"));
  EXPECT_EQ(rig.Download<float>(0, affine.call.outputs[0], 10), std::vector<float>(10, 0));
  rig.stream(0)->Launch(affine.call);
  EXPECT_TRUE(rig.Synchronize(0).ok());
  EXPECT_EQ(rig.Download<float>(0, affine.call.outputs[0], 10), std::vector<float>(10, 5));
}

// A context that is lost, as after a kernel's bad access: nothing that anybody waits for hangs.
TEST_F(CudaEngineTest, ALostContextEndsEverythingAndLosesNoCallback) {
  for (const char* call : {"cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent",
                           "cuMemcpyDtoDAsync", "cuStreamWriteValue32"}) {
    SCOPED_TRACE(call);
    DeviceRig rig(*Open(3));
    auto members = rig.OpenAll(1);
    const Affine affine(&rig, 0, 10);
    CollectiveCall barrier;
    barrier.kind = CollectiveKind::kBarrier;
    const auto event = rig.backend()->device(0)->CreateEvent();
    driver_.FailNext(call, kCannotRun);
    // Where a launch fails the stream is asked whether the context is alive.
    if (call == std::string("cuLaunchKernel")) driver_.FailNext("cuStreamQuery", kCannotRun);
    std::atomic<int> told{0};
    std::vector<absl::Status> statuses(3);
    for (int round = 0; round < 3; ++round) {
      rig.stream(0)->Launch(affine.call);
      rig.stream(0)->Copy(affine.call.outputs[0], affine.call.inputs[0], 8);
      rig.stream(0)->Record(event.get());
      rig.stream(1)->Wait(event.get());
      for (int m = 0; m < 3; ++m) {
        const absl::Status enqueued =
            members[static_cast<size_t>(m)]->Enqueue(barrier, rig.stream(m));
        if (!enqueued.ok()) {
          EXPECT_THAT(std::string(enqueued.message()), HasSubstr("lost")) << m;
        }
      }
      for (int m = 0; m < 3; ++m) rig.stream(m)->Callback([&](const absl::Status&) { ++told; });
    }
    // One that comes when all is known gets it, too.
    for (int m = 0; m < 3; ++m) {
      absl::Status status;
      for (int tries = 0; tries < 2 && status.ok(); ++tries) {
        rig.stream(m)->Copy(affine.call.outputs[0], affine.call.inputs[0], 8);
        status = rig.Synchronize(m);
      }
      EXPECT_THAT(std::string(status.message()), HasSubstr("is lost: ")) << m;
    }
    EXPECT_EQ(told, 9);
    EXPECT_EQ(driver_.faults_left(), 0);
  }
}

// Also what a context survives, where streams would be left without their order: nothing is handed
// over any more, so that nothing runs too early.
TEST_F(CudaEngineTest, AnOrderThatTheDriverRefusesLosesTheContext) {
  enum Order {
    kEvent,      // one stream waits for an event of the other
    kMeeting,    // they meet in a collective
    kDownloads,  // both bring bytes to the host, by one buffer
  };
  struct Refused {
    const char* call;
    int skip;
    Order order;
  };
  for (const Refused& refused :
       {Refused{"cuEventCreate", 0, kEvent}, Refused{"cuEventRecord", 0, kEvent},
        Refused{"cuStreamWaitEvent", 0, kEvent}, Refused{"cuStreamWriteValue32", 0, kEvent},
        // The first ones are of what comes before the collective.
        Refused{"cuEventRecord", 1, kMeeting}, Refused{"cuStreamWaitEvent", 1, kMeeting},
        Refused{"cuEventRecord", 0, kDownloads}}) {
    SCOPED_TRACE(::testing::Message()
                 << refused.call << " after " << refused.skip << ", " << refused.order);
    DeviceRig rig(*Open(2));
    auto members = rig.OpenAll(1);
    const Affine affine(&rig, 0, 10);
    const DeviceAddress sum = rig.Upload(1, std::vector<float>{0});
    const DeviceAddress copy = rig.Upload(1, std::vector<float>{-1});
    const auto event = rig.backend()->device(0)->CreateEvent();
    driver_.FailNext(refused.call, Result::kOutOfMemory, refused.skip);
    rig.stream(0)->Launch(affine.call);
    DeviceAddress from = affine.call.outputs[0];
    float downloads[2] = {};
    if (refused.order == kDownloads) {
      for (int m = 0; m < 2; ++m) rig.stream(m)->CopyToHost(&downloads[m], m == 0 ? from : sum, 4);
    } else if (refused.order == kMeeting) {
      from = sum;
      for (int m = 0; m < 2; ++m) {
        const DeviceAddress to = m == 0 ? affine.call.outputs[0] : sum;
        members[static_cast<size_t>(m)]
            ->Enqueue(DeviceRig::AllReduceCall(DType::kF32, 1, to, to), rig.stream(m))
            .IgnoreError();
      }
    } else {
      rig.stream(0)->Record(event.get());
      rig.stream(1)->Wait(event.get());
    }
    std::atomic<int> told{0};
    const bool has_callback = refused.order != kMeeting;
    if (has_callback) rig.stream(0)->Callback([&](const absl::Status&) { ++told; });
    rig.stream(1)->Copy(copy, from, 4);
    for (int m = 0; m < 2; ++m) {
      EXPECT_THAT(std::string(rig.Synchronize(m).message()), HasSubstr(refused.call));
    }
    EXPECT_EQ(driver_.faults_left(), 0);
    rig.stream(1)->Copy(copy, from, 4);
    const std::string later(rig.Synchronize(1).message());
    EXPECT_THAT(later, HasSubstr(" is lost: "));
    EXPECT_THAT(later, HasSubstr(refused.call));
    EXPECT_EQ(told, has_callback ? 1 : 0);
  }
}

// However often it is refused: pinned memory is short, and so many calls cost no more of it.
TEST_F(CudaEngineTest, ACollectiveThatTheDriverRefusesGivesItsMemoryBack) {
  enum Needs {
    kProgram,  // a program that is too large for a launch's argument
    kNumbers,  // rows that stand on the GPU
  };
  struct Refused {
    const char* call;
    Needs needs;
  };
  for (const Refused& refused :
       {Refused{"cuMemcpyHtoDAsync", kProgram}, Refused{"cuLaunchKernel", kProgram},
        Refused{"cuEventRecord", kNumbers}, Refused{"cuMemcpyDtoHAsync", kNumbers}}) {
    SCOPED_TRACE(::testing::Message() << refused.call << " of " << refused.needs);
    constexpr int kSize = 5;
    DeviceRig rig(*Open(kSize));
    std::vector<CollectiveCall> calls;
    for (int m = 0; m < kSize; ++m) {
      const DeviceAddress from = rig.Upload(m, std::vector<float>(kSize, 1));
      const DeviceAddress to = rig.Upload(m, std::vector<float>(kSize, 0));
      CollectiveCall call;
      call.dtype = DType::kF32;
      call.count = 1;
      if (refused.needs == kProgram) {
        call.kind = CollectiveKind::kAllToAll;
        for (DeviceAddress i = 0; i < kSize; ++i) {
          call.inputs.push_back(from + i * sizeof(float));
          call.outputs.push_back(to + i * sizeof(float));
        }
      } else {
        call.kind = CollectiveKind::kAllGather;
        call.inputs = {from};
        call.outputs = {to};
        CollectiveCall::RuntimeCounts runtime;
        runtime.sends = rig.Upload(m, std::vector<int64_t>{1});
        runtime.row_elements = 1;
        runtime.input_rows = 1;
        runtime.output_rows = kSize;
        call.runtime = runtime;
      }
      calls.push_back(std::move(call));
    }
    // A call that fails breaks its communicator. The first goes well.
    constexpr int kRounds = 25;
    int64_t before = 0;
    for (int round = 0; round <= kRounds; ++round) {
      auto members = rig.OpenAll(static_cast<uint64_t>(round));
      if (round > 0) driver_.FailNext(refused.call, Result::kOutOfMemory);
      for (int m = 0; m < kSize; ++m) {
        const auto at = static_cast<size_t>(m);
        ASSERT_TRUE(members[at]->Enqueue(calls[at], rig.stream(m)).ok());
      }
      for (int m = 0; m < kSize; ++m) {
        const absl::Status status = rig.Synchronize(m);
        ASSERT_EQ(status.ok(), round == 0) << status;
        EXPECT_THAT(std::string(status.message()), HasSubstr(round == 0 ? "" : refused.call));
      }
      if (round == 0) before = CallsOf("cuMemHostAlloc");
    }
    EXPECT_EQ(driver_.faults_left(), 0);
    // One may not have been given back when the next is taken.
    EXPECT_LE(CallsOf("cuMemHostAlloc") - before, 2);
  }
}

TEST_F(CudaEngineTest, MemoryThatTheGpuHasNotIsToldWithWhatTheDriverSays) {
  DeviceRig rig(*Open(1));
  driver_.FailNext("cuMemCreate", Result::kOutOfMemory);
  const absl::Status status = rig.backend()->device(0)->Allocate(1 << 20).status();
  EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfMemory);
  EXPECT_THAT(std::string(status.message()), HasSubstr("need 1048576 bytes"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("cuMemCreate"));
  const auto again = rig.backend()->device(0)->Allocate(1 << 20);
  ASSERT_TRUE(again.ok()) << again.status();
  rig.backend()->device(0)->Free(*again);
}

// What lies side by side is one piece again when it is freed, in whatever order.
TEST_F(CudaEngineTest, FreedMemoryComesTogetherAgain) {
  DeviceRig rig(*Open(1));
  Device* const device = rig.backend()->device(0);
  for (const std::vector<size_t>& order :
       {std::vector<size_t>{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}, {0, 2, 3, 1}}) {
    std::vector<DeviceAddress> pieces;
    for (int i = 0; i < 4; ++i) pieces.push_back(*device->Allocate(int64_t{16} << 20));
    EXPECT_FALSE(device->Allocate(1).ok());
    for (const size_t i : order) device->Free(pieces[i]);
    const auto all = device->Allocate(int64_t{64} << 20);
    ASSERT_TRUE(all.ok()) << all.status();
    device->Free(*all);
  }
}

TEST_F(CudaEngineTest, QueuesMayBeLongerThanTheDriversAndEventsOld) {
  DeviceRig rig(*Open(2));
  Affine count(&rig, 0, 1);  // its second input and output are one: + 1
  const float half = 0.5f;
  rig.stream(0)->CopyFromHost(count.call.inputs[0], &half, 4);
  ASSERT_TRUE(rig.Synchronize(0).ok());
  count.call.inputs[1] = count.call.outputs[0];
  constexpr int kCounts = 3000;
  constexpr int kEach = 5;
  std::vector<std::unique_ptr<Event>> events;
  for (int i = 1; i <= kCounts; ++i) {
    rig.stream(0)->Launch(count.call);
    if (i % kEach != 0) continue;
    events.push_back(rig.backend()->device(0)->CreateEvent());
    rig.stream(0)->Record(events.back().get());
  }
  // Whether they have passed long ago, or not.
  std::vector<DeviceAddress> seen;
  for (const auto& event : events) {
    seen.push_back(rig.Upload(1, std::vector<float>{-1}));
    rig.stream(1)->Wait(event.get());
    rig.stream(1)->Copy(seen.back(), count.call.outputs[0], 4);
  }
  ASSERT_TRUE(rig.Synchronize(1).ok());
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_GE(rig.Download<float>(1, seen[i], 1)[0], static_cast<float>((i + 1) * kEach)) << i;
  }
  ASSERT_TRUE(rig.Synchronize(0).ok());
  EXPECT_EQ(rig.Download<float>(0, count.call.outputs[0], 1)[0], kCounts);
  for (const auto& event : events) rig.stream(1)->Wait(event.get());
  EXPECT_TRUE(rig.Synchronize(1).ok());
}

// Of which each part is so many calls of the driver, behind one that the test lets go on.
class ManyCalls final : public CudaKernel {
 public:
  static constexpr int64_t kCalls = 4;
  // Of which one fails; -1: none does.
  explicit ManyCalls(int64_t parts = 1, int64_t failing_part = -1)
      : CudaKernel(Facts()), parts_(parts), failing_part_(failing_part) {}
  int64_t parts() const override { return parts_; }
  int64_t calls() const override { return kCalls; }
  absl::Status Enqueue(int64_t part, const KernelCall&, const KernelFault&, const CudaGpu&,
                       cuda::Stream stream) const override {
    if (part == failing_part_) return absl::AbortedError("a part fails");
    for (int64_t i = 0; i < kCalls; ++i) {
      cuda::FakeDriver::Enqueue(stream, "a call", [this] { ++ran; });
      ++made;
    }
    return absl::OkStatus();
  }
  mutable std::atomic<int64_t> made{0};
  mutable std::atomic<int64_t> ran{0};

 private:
  const int64_t parts_;
  const int64_t failing_part_;
};
class Gate final : public CudaKernel {
 public:
  Gate() : CudaKernel(Facts()) {}
  absl::Status Enqueue(int64_t /*part*/, const KernelCall&, const KernelFault&, const CudaGpu&,
                       cuda::Stream stream) const override {
    cuda::FakeDriver::Enqueue(stream, "a gate", [this] { opens.get_future().wait(); });
    return absl::OkStatus();
  }
  mutable std::promise<void> opens;
};

// What the driver is given of a stream are calls: a kernel may be many of them.
TEST_F(CudaEngineTest, TheDriverHasSoManyCallsOfAStreamAtATime) {
  const Gate gate;
  const ManyCalls many;
  constexpr int64_t kKernels = 600;
  DeviceRig rig(*Open(1));
  KernelCall call;
  call.kernel = &gate;
  rig.stream(0)->Launch(call);
  call.kernel = &many;
  std::atomic<int64_t> called{0};
  for (int64_t i = 0; i < kKernels; ++i) {
    rig.stream(0)->Launch(call);
    rig.stream(0)->Callback([&called](const absl::Status&) { ++called; });
  }
  // Callbacks are calls, too.
  EXPECT_LE(many.made * 5 / 4, 512 + 5);
  EXPECT_GE(many.made, 256);
  gate.opens.set_value();
  ASSERT_TRUE(rig.Synchronize(0).ok());
  EXPECT_EQ(many.ran, kKernels * ManyCalls::kCalls);
  EXPECT_EQ(called, kKernels);
}

// A kernel of more of them than the driver takes comes to it in parts. What is behind it finds all
// of it done; work of other streams goes on meanwhile.
TEST_F(CudaEngineTest, AKernelOfThousandsOfCallsComesToTheDriverInParts) {
  constexpr int64_t kParts = 1000;
  for (const int64_t failing_part : {int64_t{-1}, kParts / 2}) {
    const Gate gate;
    const ManyCalls many(kParts, failing_part);
    DeviceRig rig(*Open(2));
    const Affine affine(&rig, 1, 10);
    const auto event = rig.backend()->device(0)->CreateEvent();
    KernelCall call;
    call.kernel = &gate;
    rig.stream(0)->Launch(call);
    call.kernel = &many;
    rig.stream(0)->Launch(call);
    rig.stream(0)->Record(event.get());
    int64_t found = 0;
    rig.stream(0)->Callback([&](const absl::Status&) { found = many.ran; });
    EXPECT_LE(many.made, 512 + ManyCalls::kCalls);
    EXPECT_GE(many.made, 256);
    rig.stream(1)->Launch(affine.call);
    EXPECT_TRUE(rig.Synchronize(1).ok());
    rig.stream(1)->Wait(event.get());
    gate.opens.set_value();
    EXPECT_TRUE(rig.Synchronize(1).ok());
    const int64_t parts = failing_part < 0 ? kParts : failing_part;
    EXPECT_EQ(many.ran, parts * ManyCalls::kCalls);
    const absl::Status status = rig.Synchronize(0);
    EXPECT_TRUE(status.ok()) << "a callback had the failure before: " << status;
    EXPECT_EQ(found, parts * ManyCalls::kCalls);
  }
}

// Whatever the driver had of it.
TEST_F(CudaEngineTest, ALossEndsAKernelThatIsOnItsWay) {
  const Gate gate;
  const ManyCalls many(/*parts=*/1000);
  DeviceRig rig(*Open(2));
  const Affine affine(&rig, 1, 10);
  KernelCall call;
  call.kernel = &gate;
  rig.stream(0)->Launch(call);
  call.kernel = &many;
  rig.stream(0)->Launch(call);
  const auto event = rig.backend()->device(1)->CreateEvent();
  driver_.FailNext("cuEventRecord", kCannotRun);
  rig.stream(1)->Record(event.get());
  for (const int m : {1, 0}) {
    EXPECT_THAT(std::string(rig.Synchronize(m).message()), HasSubstr("is lost: ")) << m;
  }
  EXPECT_LE(many.made, 512 + ManyCalls::kCalls);
  gate.opens.set_value();
}

// Of collectives, too, each of which has a part on the streams of its members.
TEST_F(CudaEngineTest, RecordsOfCollectivesAreCalls) {
  const Gate gate;
  constexpr int kRounds = 1000;
  DeviceRig rig(*Open(3));
  auto members = rig.OpenAll(1);
  KernelCall call;
  call.kernel = &gate;
  rig.stream(0)->Launch(call);
  const int64_t before = CallsOf("cuEventRecord");
  // Of the middle one's stream something of its own is waited for each time.
  for (int i = 0; i < kRounds; ++i) {
    for (const int first : {0, 1}) {
      CollectiveCall barrier;
      barrier.kind = CollectiveKind::kBarrier;
      barrier.present = {first, first + 1};
      for (const int m : barrier.present) {
        ASSERT_TRUE(members[static_cast<size_t>(m)]->Enqueue(barrier, rig.stream(m)).ok());
      }
    }
  }
  // Two of three are on the middle one's stream, each third call there is a wait.
  EXPECT_LE(CallsOf("cuEventRecord") - before, 512 + 5);
  EXPECT_GE(CallsOf("cuEventRecord") - before, 256);
  gate.opens.set_value();
  for (int m = 0; m < 3; ++m) EXPECT_TRUE(rig.Synchronize(m).ok());
}

// What brings the word of what has failed is one more.
TEST_F(CudaEngineTest, BringingAFaultIsACall) {
  const Gate gate;
  constexpr int64_t kKernels = 400;
  DeviceRig rig(*Open(1));
  const TensorType type(DType::kF32, {1});
  const TensorType* inputs[] = {&type};
  NodeView node;
  node.op = "test_fail";
  node.inputs = inputs;
  const auto kernel = *rig.backend()->device(0)->MakeKernel(node, {type});
  KernelCall call;
  call.kernel = &gate;
  rig.stream(0)->Launch(call);
  call.kernel = kernel.get();
  call.inputs = {rig.Upload(0, std::vector<float>{1})};
  call.outputs = {call.inputs[0]};
  std::atomic<int64_t> failed{0};
  const int64_t before = CallsOf("cuMemcpyDtoHAsync");
  for (int64_t i = 0; i < kKernels; ++i) {
    rig.stream(0)->Launch(call);
    rig.stream(0)->Callback([&](const absl::Status& status) { failed += status.ok() ? 0 : 1; });
  }
  // Beside it are the word's first value, the kernel and the callback.
  EXPECT_LE((CallsOf("cuMemcpyDtoHAsync") - before) * 4, 512 + 5);
  EXPECT_GE((CallsOf("cuMemcpyDtoHAsync") - before) * 4, 256);
  gate.opens.set_value();
  ASSERT_TRUE(rig.Synchronize(0).ok());
  EXPECT_EQ(failed, kKernels);
}

// A stream that the driver takes no more of has not come to what stands in front of it: a wait
// there for what has passed long ago is none.
TEST_F(CudaEngineTest, AFullStreamDoesNotWaitForWhatHasPassed) {
  int64_t most = 0;  // kernels that the driver takes
  for (const bool is_known : {false, true}) {
    const Gate gate;
    const ManyCalls many;
    DeviceRig rig(*Open(2));
    auto members = rig.OpenAll(1);
    const auto event = rig.backend()->device(0)->CreateEvent();
    rig.stream(0)->Record(event.get());
    ASSERT_TRUE(rig.Synchronize(0).ok());
    KernelCall call;
    call.kernel = &gate;
    rig.stream(1)->Launch(call);
    call.kernel = &many;
    for (int64_t i = 0; is_known ? i < most : many.made == i * ManyCalls::kCalls; ++i) {
      rig.stream(1)->Launch(call);
      if (!is_known) most = many.made / ManyCalls::kCalls;
    }
    if (is_known) rig.stream(1)->Wait(event.get());
    CollectiveCall barrier;
    barrier.kind = CollectiveKind::kBarrier;
    for (const int m : {1, 0}) {
      ASSERT_TRUE(members[static_cast<size_t>(m)]->Enqueue(barrier, rig.stream(m)).ok());
    }
    gate.opens.set_value();
    for (const int m : {0, 1}) {
      const absl::Status passed = rig.Synchronize(m);
      EXPECT_TRUE(passed.ok()) << m << ": " << passed;
    }
  }
}

// Collectives in a row leave the other members' streams alone; whatever comes to these next finds
// the last result.
TEST_F(CudaEngineTest, WorkBehindCollectivesInARowFindsTheLast) {
  constexpr int kSize = 4;
  for (int rounds = 1; rounds <= 5; ++rounds) {
    DeviceRig rig(*Open(kSize));
    auto members = rig.OpenAll(1);
    std::vector<DeviceAddress> values;
    std::vector<DeviceAddress> copies;
    for (int m = 0; m < kSize; ++m) {
      values.push_back(rig.Upload(m, std::vector<float>{1}));
      copies.push_back(rig.Upload(m, std::vector<float>{0}));
    }
    float expected = 1;
    for (int i = 0; i < rounds; ++i) {
      expected *= kSize;
      for (int m = 0; m < kSize; ++m) {
        const auto at = static_cast<size_t>(m);
        ASSERT_TRUE(members[at]
                        ->Enqueue(DeviceRig::AllReduceCall(DType::kF32, 1, values[at], values[at]),
                                  rig.stream(m))
                        .ok());
      }
    }
    // Of members 1 and 2 alone, which wait for another stream's collective each.
    for (const int m : {1, 2}) {
      const auto at = static_cast<size_t>(m);
      CollectiveCall pair = DeviceRig::AllReduceCall(DType::kF32, 1, values[at], values[at]);
      pair.present = {1, 2};
      ASSERT_TRUE(members[at]->Enqueue(pair, rig.stream(m)).ok());
    }
    for (int m = 0; m < kSize; ++m) {
      const auto at = static_cast<size_t>(m);
      rig.stream(m)->Copy(copies[at], values[at], 4);
    }
    for (int m = 0; m < kSize; ++m) {
      ASSERT_TRUE(rig.Synchronize(m).ok());
      const auto at = static_cast<size_t>(m);
      EXPECT_EQ(rig.Download<float>(m, copies[at], 1)[0],
                m == 1 || m == 2 ? 2 * expected : expected)
          << m << " of " << rounds;
    }
  }
}

// The engine alone, for what a backend does not offer.
TEST_F(CudaEngineTest, PinnedMemoryIsCopiedWhereItIs) {
  auto gpu = *CudaGpu::Open(&api_, 0, {{kImage, sizeof(kImage)}}, {});
  auto memory = *GpuMemory::Create(gpu.get(), int64_t{16} << 20, 1 << 20);
  auto engine = *CudaEngine::Create(gpu.get(), memory.get(), 1);
  constexpr int64_t kBytes = (12 << 20) + 5;
  std::vector<char> from(kBytes);
  for (int64_t i = 0; i < kBytes; ++i) from[static_cast<size_t>(i)] = static_cast<char>(i * 7);
  std::vector<char> to(kBytes);
  const DeviceAddress address = *memory->Allocate(kBytes);
  const auto stream = engine->CreateStream(0);
  for (const bool pinned : {true, false}) {
    if (pinned) {
      ASSERT_TRUE(gpu->Pin(from.data(), kBytes).ok());
      ASSERT_TRUE(gpu->Pin(to.data(), kBytes).ok());
    }
    std::fill(to.begin(), to.end(), 0);
    stream->CopyFromHost(address, from.data(), kBytes);
    stream->CopyToHost(to.data(), address, kBytes);
    EXPECT_TRUE(DeviceRig::SynchronizeStream(stream.get()).ok());
    EXPECT_EQ(to, from) << pinned;
    if (pinned) {
      gpu->Unpin(from.data());
      gpu->Unpin(to.data());
    }
  }
  memory->Free(address);
}

}  // namespace
}  // namespace chorus
