#include "core/worker/worker_devices.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "core/ops/host_kernels.h"
#include "core/ops/node_spec.h"
#include "core/runtime/device_plan.h"
#include "core/worker/protocol.h"
#include "gtest/gtest.h"

namespace chorus::worker {
namespace {

constexpr char kWorker[] = "core/worker/testing/sim_worker";
constexpr int kDevices = 2;
constexpr int32_t kLane = 3;  // of all that is launched and copied
constexpr absl::Duration kPatience = absl::Seconds(60);

WorkerOptions OptionsOf(const std::vector<std::string>& more = {}) {
  WorkerOptions options;
  options.command = {kWorker, absl::StrCat("--devices=", kDevices)};
  options.command.insert(options.command.end(), more.begin(), more.end());
  options.log = [](const std::string& line) { std::cout << line << std::endl; };
  return options;
}

// Each kind of event of one device, in its order.
class Events {
 public:
  void Add(absl::string_view bytes) {
    absl::StatusOr<EventMessage> event = DecodeEvent(bytes);
    ASSERT_TRUE(event.ok()) << event.status();
    MutexLock lock(&mutex_);
    events_.push_back(*std::move(event));
    changed_.SignalAll();
  }
  // The next of that kind; others stay.
  template <typename Message>
  Message Next() {
    MutexLock lock(&mutex_);
    for (;;) {
      for (auto it = events_.begin(); it != events_.end(); ++it) {
        if (!absl::holds_alternative<Message>(*it)) continue;
        Message message = absl::get<Message>(*it);
        events_.erase(it);
        return message;
      }
      if (!changed_.WaitFor(&mutex_, kPatience)) {
        ADD_FAILURE() << "no event";
        return Message();
      }
    }
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<EventMessage> events_ ABSL_GUARDED_BY(mutex_);
};

TensorType F32(int64_t count) { return TensorType(DType::kF32, {count}); }

// y = -x.
std::string NegPlan(int64_t count) {
  DevicePlan::Kernel kernel;
  kernel.node.op = "neg";
  kernel.node.outputs = {F32(count)};
  kernel.input_types = {F32(count)};
  DevicePlan plan;
  plan.num_buffers = 2;
  plan.nodes.push_back(kernel);
  DevicePlan::Step step;
  step.node = 0;
  step.inputs.push_back({BufferIndex(0), 0, -1});
  step.outputs.push_back({BufferIndex(1), 0, -1});
  plan.steps.push_back(step);
  return EncodeDevicePlan(plan);
}

class WorkerDevicesTest : public ::testing::Test {
 protected:
  void Start(const WorkerOptions& options) {
    auto devices = WorkerDevices::Start(options);
    ASSERT_TRUE(devices.ok()) << devices.status();
    devices_ = *std::move(devices);
    for (int i = 0; i < kDevices; ++i) {
      executors_.push_back(devices_->OpenExecutor(
          i, [this, i](absl::string_view event) { events_[i].Add(event); }, {}));
    }
  }
  // Executors end before their devices.
  ~WorkerDevicesTest() override { executors_.clear(); }

  DeviceAddress Put(int device, const std::vector<float>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
    const DeviceAddress address = *devices_->Allocate(device, bytes);
    executor(device)->Upload(++last_transfer_, kLane, address, values.data(), bytes);
    const auto ended = events_[device].Next<TransferredMessage>();
    EXPECT_TRUE(ended.status.ok()) << ended.status;
    return address;
  }
  absl::StatusOr<std::vector<float>> Get(int device, DeviceAddress address, size_t count,
                                         LaunchId after = LaunchId()) {
    std::vector<float> values(count, 77);
    executor(device)->Download(++last_transfer_, kLane, values.data(), address,
                               static_cast<int64_t>(count * sizeof(float)), after);
    CHORUS_RETURN_IF_ERROR(events_[device].Next<TransferredMessage>().status);
    return values;
  }
  // Of y = -x.
  absl::StatusOr<int64_t> AskForScratch() {
    const TensorType type = F32(3);
    const TensorType* inputs[] = {&type};
    NodeView node;
    node.op = "neg";
    node.inputs = inputs;
    return devices_->WorkspaceBytes(node, {type});
  }
  absl::Status Load(int device, PlanId id, int64_t count) {
    executor(device)->LoadPlan(id, NegPlan(count));
    return events_[device].Next<LoadedMessage>().status;
  }
  void Launch(int device, PlanId plan, DeviceAddress from, DeviceAddress to) {
    LaunchMessage message;
    message.launch = ++last_launch_;
    message.lane = kLane;
    message.plan = plan;
    message.buffers = {from, to};
    ByteWriter bytes;
    EncodeLaunch(message, &bytes);
    executor(device)->Launch(bytes.bytes());
  }
  absl::Status Completed(int device) { return events_[device].Next<CompletionMessage>().status; }
  // Through all the way: what is computed there is right.
  void CheckThatItComputes(int device, size_t count) {
    std::vector<float> values(count);
    std::iota(values.begin(), values.end(), 1.0f);
    const auto bytes = static_cast<int64_t>(count * sizeof(float));
    const DeviceAddress from = Put(device, values);
    const DeviceAddress to = *devices_->Allocate(device, bytes);
    const PlanId plan = ++last_plan_;
    ASSERT_TRUE(Load(device, plan, static_cast<int64_t>(count)).ok());
    Launch(device, plan, from, to);
    const auto result = Get(device, to, count, last_launch_);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(Completed(device).ok());
    for (float& value : values) value = -value;
    EXPECT_EQ(*result, values);
    executor(device)->UnloadPlan(plan);
    devices_->Free(device, from);
    devices_->Free(device, to);
  }
  // Both devices are lost; returns what is said of the first.
  Error AwaitLoss() {
    absl::Status first;
    for (int i = 0; i < kDevices; ++i) {
      const absl::Status why = events_[i].Next<LostMessage>().status;
      EXPECT_EQ(ErrorOf(why).reason, Reason::kDeviceLost) << why;
      if (i == 0) first = why;
    }
    return ErrorOf(first);
  }
  void Recover() {
    for (auto& executor : executors_) executor->Recover();
  }
  // The worker takes nothing more, and what is sent to it waits behind an upload that needs more
  // slots than there are. Of one with a long `kill_timeout`.
  void Stall() {
    const auto bytes = static_cast<int64_t>(stalled_.size());
    stalled_to_ = *devices_->Allocate(0, bytes);
    const pid_t pid = devices_->pid();
    ASSERT_EQ(kill(pid, SIGSTOP), 0);
    siginfo_t stopped = {};
    ASSERT_EQ(waitid(P_PID, static_cast<id_t>(pid), &stopped, WSTOPPED | WNOWAIT), 0);
    executor(0)->Upload(++last_transfer_, kLane, stalled_to_, stalled_.data(), bytes);
  }
  void GoOn() {
    ASSERT_EQ(kill(devices_->pid(), SIGCONT), 0);
    EXPECT_TRUE(events_[0].Next<TransferredMessage>().status.ok());
  }
  // When nothing else is on its way. That the copy has ended the worker's thread that frees the
  // memory knows by this process alone, which ThreadSanitizer does not see; by a read it knows it
  // by itself.
  void FreeStalled() {
    EXPECT_TRUE(Get(0, stalled_to_, 1).ok());
    devices_->Free(0, stalled_to_);
  }
  Executor* executor(int device) { return executors_[static_cast<size_t>(device)].get(); }

  Events events_[kDevices];
  std::unique_ptr<WorkerDevices> devices_;
  std::vector<std::unique_ptr<Executor>> executors_;
  PlanId last_plan_;
  LaunchId last_launch_;
  TransferId last_transfer_;
  const std::string stalled_ = std::string((kSlots + 1) * kSlotBytes, 's');
  DeviceAddress stalled_to_ = 0;
};

TEST_F(WorkerDevicesTest, TellsWhatTheDevicesAre) {
  Start(OptionsOf());
  EXPECT_EQ(devices_->info().backend, "sim");
  EXPECT_EQ(devices_->info().domains, (std::vector<int>{0, 1}));
  EXPECT_TRUE(devices_->info().is_far);
  EXPECT_FALSE(devices_->info().host_addressable);
  EXPECT_GT(devices_->pid(), 0);
}

TEST_F(WorkerDevicesTest, ComputesWhatItWasGiven) {
  Start(OptionsOf());
  // Around a slot, the window and the first ranges of addresses.
  for (const size_t count : {1, 1000, 1 << 18, (1 << 18) + 1, 3 << 20}) {
    for (int device = 0; device < kDevices; ++device) CheckThatItComputes(device, count);
  }
}

TEST_F(WorkerDevicesTest, LaunchesThatFollowAnUploadSeeIt) {
  Start(OptionsOf());
  constexpr int64_t kCount = 2 << 20;
  constexpr int64_t kBytes = kCount * 4;
  ASSERT_TRUE(Load(0, PlanId(1), kCount).ok());
  const std::vector<float> ones(kCount, 1);
  const std::vector<float> twos(kCount, 2);
  const DeviceAddress from = *devices_->Allocate(0, kBytes);
  const DeviceAddress to = *devices_->Allocate(0, kBytes);
  for (const std::vector<float>* values : {&ones, &twos}) {
    executor(0)->Upload(++last_transfer_, kLane, from, values->data(), kBytes);
    Launch(0, PlanId(1), from, to);
    std::vector<float> result(kCount);
    executor(0)->Download(++last_transfer_, kLane, result.data(), to, kBytes, last_launch_);
    EXPECT_TRUE(events_[0].Next<TransferredMessage>().status.ok());
    EXPECT_TRUE(events_[0].Next<TransferredMessage>().status.ok());
    EXPECT_TRUE(Completed(0).ok());
    EXPECT_EQ(result, std::vector<float>(kCount, -(*values)[0]));
  }
}

TEST_F(WorkerDevicesTest, APieceOfADownloadThatFailsIsThatDownloadsErrorAlone) {
  constexpr size_t kCount = 3 << 18;  // three pieces there, and three back
  for (const int failing : {0, 1, 2}) {
    SCOPED_TRACE(failing);
    WorkerOptions options = OptionsOf();
    options.command.push_back(
        absl::StrCat("--fault_script=copy error skip=", 3 + failing, " times=1"));
    Start(options);
    std::vector<float> values(kCount);
    std::iota(values.begin(), values.end(), 1.0f);
    const DeviceAddress from = Put(0, values);
    const absl::Status failed = Get(0, from, kCount).status();
    EXPECT_FALSE(failed.ok());
    EXPECT_NE(ErrorOf(failed).reason, Reason::kDeviceLost) << failed;
    const auto again = Get(0, from, kCount);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*again, values);
    executors_.clear();
    devices_.reset();
  }
}

TEST_F(WorkerDevicesTest, SaysWhatScratchAKernelWants) {
  Start(OptionsOf());
  const TensorType input(DType::kF64, {1 << 20});
  const TensorType* inputs[] = {&input};
  NodeView node;
  node.op = "arg_sort";
  const Attribute attributes[] = {{"axis", int64_t{0}}};
  node.attributes = attributes;
  node.inputs = inputs;
  const TensorType outputs[] = {TensorType(DType::kI64, {1 << 20})};
  const auto bytes = devices_->WorkspaceBytes(node, outputs);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  // What it says where the kernel is made in this process.
  const auto kernel = MakeHostKernel(node, outputs);
  ASSERT_TRUE(kernel.ok()) << kernel.status();
  EXPECT_GT(*bytes, 0);
  EXPECT_EQ(*bytes, (*kernel)->workspace_bytes());
  EXPECT_EQ(devices_->WorkspaceBytes(node, outputs), bytes);
  node.op = "no_such_op";
  EXPECT_FALSE(devices_->WorkspaceBytes(node, outputs).ok());
}

// Making a kernel may mean to load a library.
TEST_F(WorkerDevicesTest, TheRestGoesOnWhileKernelsAreMade) {
  const std::string fifo = ::testing::TempDir() + "/kernels";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  Start(OptionsOf({absl::StrCat("--kernels_wait_for=", fifo)}));
  std::thread asks([this] { EXPECT_EQ(AskForScratch().value_or(-1), 0); });
  executor(0)->LoadPlan(PlanId(1), NegPlan(3));
  const std::vector<float> values = {1, 2, 3};
  const DeviceAddress from = Put(0, values);
  const DeviceAddress to = *devices_->Allocate(0, 12);
  EXPECT_EQ(*Get(0, from, 3), values);
  const UniqueFd opened(open(fifo.c_str(), O_RDWR | O_CLOEXEC));
  EXPECT_TRUE(events_[0].Next<LoadedMessage>().status.ok());
  asks.join();
  Launch(0, PlanId(1), from, to);
  EXPECT_EQ(*Get(0, to, 3, last_launch_), (std::vector<float>{-1, -2, -3}));
  EXPECT_TRUE(Completed(0).ok());
}

TEST_F(WorkerDevicesTest, OneThatDoesNotGetFurtherWithWhatItLoadsIsKilled) {
  const std::string fifo = ::testing::TempDir() + "/never";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  WorkerOptions options = OptionsOf({absl::StrCat("--kernels_wait_for=", fifo)});
  options.load_timeout = absl::Milliseconds(300);
  Start(options);
  executor(0)->LoadPlan(PlanId(1), NegPlan(3));
  EXPECT_TRUE(
      absl::StrContains(AwaitLoss().message, "it has got no further with what it loads for 300ms"));
  EXPECT_EQ(ErrorOf(events_[0].Next<LoadedMessage>().status).reason, Reason::kDeviceLost);
  Recover();
}

// Planning comes before loading: so a kernel that is never made is met there.
TEST_F(WorkerDevicesTest, OneThatDoesNotSayWhatScratchAKernelWantsIsKilledAndTheNextAsked) {
  const std::string fifo = ::testing::TempDir() + "/never_said";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  WorkerOptions options = OptionsOf({absl::StrCat("--kernels_wait_for=", fifo)});
  options.load_timeout = absl::Milliseconds(300);
  Start(options);
  std::thread asks([this] { EXPECT_EQ(AskForScratch().value_or(-1), 0); });
  EXPECT_TRUE(
      absl::StrContains(AwaitLoss().message, "it has got no further with what it loads for 300ms"));
  const UniqueFd opened(open(fifo.c_str(), O_RDWR | O_CLOEXEC));
  asks.join();
  Recover();
}

TEST_F(WorkerDevicesTest, AQuestionThatIsNotAnsweredInTimeDoesNotSayThatTheDevicesAreLost) {
  const std::string fifo = ::testing::TempDir() + "/said_late";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  WorkerOptions options = OptionsOf({absl::StrCat("--kernels_wait_for=", fifo)});
  options.start_timeout = absl::Seconds(3);
  options.kill_timeout = absl::Milliseconds(300);
  Start(options);
  const pid_t pid = devices_->pid();
  const Error late = ErrorOf(AskForScratch().status());
  EXPECT_EQ(late.reason, Reason::kExecTimeout);
  EXPECT_TRUE(absl::StrContains(late.message, "has not said within 3.3s")) << late.message;
  const UniqueFd opened(open(fifo.c_str(), O_RDWR | O_CLOEXEC));
  CheckThatItComputes(0, 1000);
  EXPECT_EQ(devices_->pid(), pid);
}

// The time counts from when it is sent.
TEST_F(WorkerDevicesTest, APlanThatWaitsBehindUploadsIsNotLate) {
  WorkerOptions options = OptionsOf({"--fault_script=copy delay for=100ms times=all"});
  options.load_timeout = absl::Seconds(1);
  Start(options);
  // 24 pieces, of which 8 have a slot: the plan is sent when 16 of them are through.
  const std::vector<float> values(size_t{6} << 20, 5);
  const DeviceAddress to = *devices_->Allocate(0, 24 << 20);
  executor(0)->Upload(++last_transfer_, kLane, to, values.data(), 24 << 20);
  const absl::Status loaded = Load(0, PlanId(1), 3);
  EXPECT_TRUE(loaded.ok()) << loaded;
  EXPECT_TRUE(events_[0].Next<TransferredMessage>().status.ok());
}

TEST_F(WorkerDevicesTest, WhatIsRefusedThereIsSaid) {
  Start(OptionsOf());
  executor(0)->LoadPlan(PlanId(1), "no plan");
  EXPECT_EQ(ErrorOf(events_[0].Next<LoadedMessage>().status).reason, Reason::kMalformed);
  Launch(0, PlanId(1), 0, 0);
  EXPECT_EQ(ErrorOf(Completed(0)).reason, Reason::kUnknownName);
  executor(0)->OpenCommunicator(CommunicatorId(1), {0, 7}, 0);
  EXPECT_FALSE(events_[0].Next<OpenedMessage>().status.ok());
}

TEST_F(WorkerDevicesTest, MemoryThatIsNotThereIsToldToWhoeverUsesIt) {
  Start(OptionsOf());
  constexpr int64_t kTooMuch = int64_t{1} << 40;
  const DeviceAddress none = *devices_->Allocate(0, kTooMuch);
  CheckThatItComputes(0, 1000);
  const auto read = Get(0, none, 1);
  EXPECT_EQ(ErrorOf(read.status()).reason, Reason::kOutOfMemory) << read.status();
  devices_->Free(0, none);
  CheckThatItComputes(0, 1000);
}

// What one device has had and given back, nobody is charged for: then the others have it.
TEST_F(WorkerDevicesTest, TheWorkerKeepsNoMemoryThatWasFreed) {
  constexpr int64_t kMemory = int64_t{64} << 20;
  Start(OptionsOf({absl::StrCat("--memory_bytes=", kMemory)}));
  const std::vector<float> values = {1, 2, 3};
  for (int64_t round = 0; round < 8; ++round) {
    const int device = static_cast<int>(round % kDevices);
    // Small and large pieces, each time others, of more than half of it together.
    std::vector<DeviceAddress> pieces;
    for (int64_t i = 0; i < 9; ++i) {
      pieces.push_back(*devices_->Allocate(device, (kMemory >> 4) - 4096 * (round + i)));
      executor(device)->Upload(++last_transfer_, kLane, pieces.back(), values.data(), 12);
      const absl::Status put = events_[device].Next<TransferredMessage>().status;
      ASSERT_TRUE(put.ok()) << "round " << round << ", piece " << i << ": " << put;
      EXPECT_EQ(*Get(device, pieces.back(), 3), values);
    }
    for (const DeviceAddress piece : pieces) devices_->Free(device, piece);
  }
}

// So many that their addresses are several times those of the domain; no other domain's are among
// them, and no two that are held are one.
TEST_F(WorkerDevicesTest, AddressesAreGivenOutAgainWhenNobodyHoldsThem) {
  Start(OptionsOf());
  constexpr int64_t kLarge =
      (int64_t{1} << kDomainShift) / 3;  // refused by the worker, which costs no address
  for (int round = 0; round < 7; ++round) {
    const DeviceAddress first = *devices_->Allocate(0, kLarge);
    const DeviceAddress second = *devices_->Allocate(0, kLarge);
    EXPECT_NE(first, second);
    for (const DeviceAddress address : {first, second}) {
      EXPECT_EQ(DomainOf(address), 0);
      EXPECT_EQ(DomainOf(address + kLarge), 0);
    }
    const auto third = devices_->Allocate(0, kLarge);
    EXPECT_EQ(ErrorOf(third.status()).reason, Reason::kOutOfMemory) << "the rest is too small";
    const auto read = Get(0, second, 1);
    EXPECT_EQ(ErrorOf(read.status()).reason, Reason::kOutOfMemory) << read.status();
    devices_->Free(0, first);
    devices_->Free(0, second);
    CheckThatItComputes(1, 1000);
  }
  CheckThatItComputes(0, 1000);
}

// Runs that are refused, one after the other, have their memory for a moment.
TEST_F(WorkerDevicesTest, OfMemoryThatComesAndGoesWhileTheWorkerTakesNothingNothingWaits) {
  WorkerOptions options = OptionsOf();
  options.kill_timeout = kPatience;
  Start(options);
  const DeviceAddress told = Put(0, {1, 2, 3});
  Stall();
  const HeapUse heap;
  int told_later = 0;
  for (int64_t i = 0; i < 10000; ++i) {
    const int device = static_cast<int>(i % kDevices);
    const DeviceAddress first = *devices_->Allocate(device, 1 + i % 997);
    const DeviceAddress second = *devices_->Allocate(device, 1 + i % 7);
    told_later += devices_->Free(device, first) != 0;
    told_later += devices_->Free(device, second) != 0;
  }
  EXPECT_EQ(told_later, 0);
  EXPECT_EQ(heap.blocks(), 0);
  EXPECT_EQ(heap.bytes(), 0);
  // What the worker knows it is to be told of: what waits is said to, until it has been sent.
  const int64_t number = devices_->Free(0, told);
  EXPECT_GT(number, devices_->freed());
  GoOn();
  FreeStalled();
  CheckThatItComputes(0, 1000);
  EXPECT_GE(devices_->freed(), number);
}

// Whatever is taken out of what waits, each piece that is held is there with what was put there,
// and each that is not is everybody's: the worker has far less memory than all of them together.
TEST_F(WorkerDevicesTest, MemoryIsWhatItIsHowEverItCameAndWentBefore) {
  constexpr int64_t kMemory = int64_t{32} << 20;
  constexpr size_t kMostHeld = 64;
  constexpr size_t kLargest = 32 << 10;  // in floats: all that is held is a quarter of the memory
  const char* const given = std::getenv("CHORUS_TEST_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10)
                                         : static_cast<uint64_t>(absl::GetCurrentTimeNanos());
  std::cout << "CHORUS_TEST_SEED=" << seed << std::endl;
  std::mt19937_64 random(seed);
  const auto below = [&random](size_t bound) { return static_cast<size_t>(random() % bound); };
  WorkerOptions options = OptionsOf({absl::StrCat("--memory_bytes=", kMemory)});
  options.kill_timeout = kPatience;
  Start(options);
  struct Piece {
    int device = 0;
    DeviceAddress address = 0;
    std::vector<float> values;  // empty: nothing was put there
    bool is_on_its_way = false;
  };
  std::deque<Piece> held;  // its values stay where they are
  const auto await = [&] {
    for (Piece& piece : held) {
      if (!std::exchange(piece.is_on_its_way, false)) continue;
      const absl::Status put = events_[piece.device].Next<TransferredMessage>().status;
      EXPECT_TRUE(put.ok()) << put;
    }
  };
  for (int round = 0; round < 20; ++round) {
    const bool stalls = round % 2 == 0;
    if (stalls) Stall();
    for (int step = 0; step < 200; ++step) {
      const size_t at = held.empty() ? 0 : below(held.size());
      if (held.size() < kMostHeld && below(2) == 0) {
        Piece& piece = held.emplace_back();
        piece.device = static_cast<int>(below(kDevices));
        const size_t count = 1 + below(kLargest);
        piece.address = *devices_->Allocate(piece.device, static_cast<int64_t>(count * 4));
        if (below(4) != 0) continue;
        piece.values.resize(count);
        std::iota(piece.values.begin(), piece.values.end(), static_cast<float>(step));
        piece.is_on_its_way = true;
        executor(piece.device)
            ->Upload(++last_transfer_, kLane, piece.address, piece.values.data(),
                     static_cast<int64_t>(count * 4));
      } else if (!held.empty() && !held[at].is_on_its_way) {
        devices_->Free(held[at].device, held[at].address);
        std::swap(held[at], held.back());
        held.pop_back();
      }
    }
    if (stalls) GoOn();
    await();
    if (stalls) FreeStalled();
    for (const Piece& piece : held) {
      if (piece.values.empty()) continue;
      const auto read = Get(piece.device, piece.address, piece.values.size());
      ASSERT_TRUE(read.ok()) << "round " << round << ": " << read.status();
      EXPECT_TRUE(*read == piece.values) << "round " << round;
    }
  }
}

TEST_F(WorkerDevicesTest, OfMemoryThatAnEarlierWorkerHadNobodyIsTold) {
  constexpr int kPieces = 1000;
  WorkerOptions options = OptionsOf();
  options.kill_timeout = kPatience;
  Start(options);
  std::vector<DeviceAddress> pieces;
  for (int i = 0; i < kPieces; ++i) pieces.push_back(*devices_->Allocate(0, 100 + i));
  Stall();
  // It knows these, and dies before it is told that they have gone.
  int64_t number = 0;
  for (int i = 0; i < kPieces / 2; ++i) {
    number = devices_->Free(0, pieces.back());
    pieces.pop_back();
  }
  EXPECT_GT(number, devices_->freed());
  ASSERT_EQ(kill(devices_->pid(), SIGKILL), 0);
  AwaitLoss();
  EXPECT_EQ(devices_->freed(), number);
  EXPECT_FALSE(events_[0].Next<TransferredMessage>().status.ok());
  devices_->Free(0, stalled_to_);
  Recover();
  CheckThatItComputes(0, 1000);
  Stall();
  const HeapUse heap;
  for (const DeviceAddress piece : pieces) EXPECT_EQ(devices_->Free(0, piece), 0);
  EXPECT_LT(heap.blocks(), 0) << "their rows have gone, and none have come";
  GoOn();
  FreeStalled();
  // The addresses are others' now.
  for (int i = 0; i < kPieces; i += 100) {
    EXPECT_EQ(*Get(0, Put(0, std::vector<float>(30, 1 + i)), 30), std::vector<float>(30, 1 + i));
  }
}

TEST_F(WorkerDevicesTest, AKilledWorkerIsStartedAgain) {
  Start(OptionsOf());
  const std::vector<float> values(1000, 3);
  const DeviceAddress before = Put(0, values);
  ASSERT_TRUE(Load(0, PlanId(1000), 1000).ok());
  const pid_t pid = devices_->pid();
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  const Error lost = AwaitLoss();
  EXPECT_TRUE(absl::StrContains(lost.message, "device sim:0"));
  EXPECT_TRUE(absl::StrContains(lost.message, absl::StrCat("(pid ", pid, ")")));
  EXPECT_TRUE(absl::StrContains(lost.message, "was killed by signal 9"));
  // A caller that does not know yet is refused, whatever is asked for.
  Launch(0, PlanId(1000), before, before);
  EXPECT_EQ(ErrorOf(Completed(0)).reason, Reason::kDeviceLost);
  EXPECT_EQ(ErrorOf(Load(0, PlanId(1001), 1000)).reason, Reason::kDeviceLost);
  EXPECT_EQ(ErrorOf(Get(0, before, 1).status()).reason, Reason::kDeviceLost);
  EXPECT_EQ(ErrorOf(devices_->Allocate(0, 1).status()).reason, Reason::kDeviceLost);
  executor(0)->OpenCommunicator(CommunicatorId(1), {0, 1}, 0);
  EXPECT_EQ(ErrorOf(events_[0].Next<OpenedMessage>().status).reason, Reason::kDeviceLost);
  Recover();
  CheckThatItComputes(0, 1000);
  CheckThatItComputes(1, 3 << 18);
  // What stood there is lost, and said to be, however much has been allocated since.
  const auto read = Get(0, before, 1);
  EXPECT_EQ(ErrorOf(read.status()).reason, Reason::kDeviceLost) << read.status();
  devices_->Free(0, before);
  // Now its address may be another's.
  CheckThatItComputes(0, 1000);
  Launch(0, PlanId(1000), *devices_->Allocate(0, 4000), *devices_->Allocate(0, 4000));
  EXPECT_EQ(ErrorOf(Completed(0)).reason, Reason::kUnknownName) << "plans are lost";
  EXPECT_NE(devices_->pid(), pid);
}

// The first that is started in its place may not start: a GPU that has failed needs a while.
TEST_F(WorkerDevicesTest, MemoryIsThatOfTheWorkerThatStartsInTheEnd) {
  const std::string starts = ::testing::TempDir() + "starts";
  const std::string fifo = ::testing::TempDir() + "fails_now";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  WorkerOptions options = OptionsOf();
  options.command = {
      "/bin/sh", "-c",
      absl::StrCat("echo >> ", starts, "; if [ $(wc -l < ", starts, ") = 2 ]; then cat ", fifo,
                   "; exit 1; fi; exec ", kWorker, " --devices=", kDevices)};
  Start(options);
  ASSERT_EQ(kill(devices_->pid(), SIGKILL), 0);
  AwaitLoss();
  Recover();
  const std::vector<float> values(1000, 3);
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
  const DeviceAddress address = *devices_->Allocate(0, bytes);
  const auto upload = [&] {
    executor(0)->Upload(++last_transfer_, kLane, address, values.data(), bytes);
  };
  upload();
  { const UniqueFd now(open(fifo.c_str(), O_WRONLY | O_CLOEXEC)); }  // waits for who reads it
  EXPECT_EQ(ErrorOf(events_[0].Next<TransferredMessage>().status).reason, Reason::kDeviceLost);
  upload();
  const absl::Status uploaded = events_[0].Next<TransferredMessage>().status;
  EXPECT_TRUE(uploaded.ok()) << uploaded;
  EXPECT_EQ(*Get(0, address, values.size()), values);
  devices_->Free(0, address);
  CheckThatItComputes(0, 1000);
}

// Each kind of call ends, with work of every kind under way, wherever the worker stands.
TEST_F(WorkerDevicesTest, WhatIsUnderWayEndsWithTheWorker) {
  Start(OptionsOf());
  constexpr int64_t kCount = 4 << 20;
  for (int round = 0; round < 8; ++round) {
    const PlanId plan = ++last_plan_;
    ASSERT_TRUE(Load(0, plan, kCount).ok());
    const DeviceAddress from = *devices_->Allocate(0, kCount * 4);
    const DeviceAddress to = *devices_->Allocate(0, kCount * 4);
    const std::vector<float> values(kCount, 1);
    std::vector<float> result(kCount);
    const pid_t pid = devices_->pid();
    executor(0)->Upload(++last_transfer_, kLane, from, values.data(), kCount * 4);
    if (round % 2 == 1) kill(pid, SIGKILL);
    for (int i = 0; i < 4; ++i) Launch(0, plan, from, to);
    executor(0)->Download(++last_transfer_, kLane, result.data(), to, kCount * 4, last_launch_);
    executor(0)->LoadPlan(++last_plan_, NegPlan(kCount));
    if (round % 2 == 0) kill(pid, SIGKILL);
    for (int i = 0; i < 2; ++i) events_[0].Next<TransferredMessage>();
    for (int i = 0; i < 4; ++i) events_[0].Next<CompletionMessage>();
    events_[0].Next<LoadedMessage>();
    AwaitLoss();
    Recover();
    devices_->Free(0, from);
    devices_->Free(0, to);
  }
  CheckThatItComputes(0, 1000);
}

TEST_F(WorkerDevicesTest, AWorkerThatDoesNotAnswerIsKilled) {
  WorkerOptions options = OptionsOf();
  options.kill_timeout = absl::Milliseconds(300);
  Start(options);
  ASSERT_EQ(kill(devices_->pid(), SIGSTOP), 0);
  executor(1)->LoadPlan(PlanId(1), NegPlan(1));
  EXPECT_EQ(ErrorOf(events_[1].Next<LoadedMessage>().status).reason, Reason::kDeviceLost);
  EXPECT_TRUE(absl::StrContains(AwaitLoss().message, "it has not answered for 300ms"));
  Recover();
  CheckThatItComputes(0, 1000);
}

// What it is asked whether it lives passes the pieces of an upload that wait for slots.
TEST_F(WorkerDevicesTest, OneThatIsBusyWithUploadsIsAskedAllTheSame) {
  WorkerOptions options = OptionsOf({"--fault_script=copy delay for=700ms times=1"});
  options.kill_timeout = absl::Milliseconds(300);
  Start(options);
  const std::vector<float> values(size_t{3} << 20, 5);  // 12 pieces, of which 8 have a slot
  const DeviceAddress address = Put(0, values);
  const auto result = Get(0, address, values.size());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(*result == values);
}

// A process that a kill does not end, as one whose driver does not let go: it is traced, and stops
// at its end until it is released.
class HeldProcess {
 public:
  explicit HeldProcess(pid_t pid) : pid_(pid) {
    held_ = ptrace(PTRACE_SEIZE, pid, nullptr, PTRACE_O_TRACEEXIT) == 0;
  }
  ~HeldProcess() { Release(); }

  bool held() const { return held_; }  // false: the system does not let it be traced
  // It was killed, and ends now.
  void Release() {
    if (!std::exchange(held_, false)) return;
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, __WALL), pid_);
    EXPECT_EQ(ptrace(PTRACE_DETACH, pid_, nullptr, nullptr), 0) << strerror(errno);
  }

 private:
  const pid_t pid_;
  bool held_ = false;
};

TEST_F(WorkerDevicesTest, NobodyWaitsForTheEndOfOneThatWasKilled) {
  WorkerOptions options = OptionsOf();
  options.kill_timeout = absl::Milliseconds(300);
  Start(options);
  const pid_t pid = devices_->pid();
  HeldProcess process(pid);
  if (!process.held()) GTEST_SKIP() << "nothing may be traced here: " << strerror(errno);
  executor(0)->LoadPlan(PlanId(1), NegPlan(1));
  executor(0)->Kill("it is of no use");
  events_[0].Next<LoadedMessage>();
  EXPECT_TRUE(absl::StrContains(AwaitLoss().message, "was ended: it is of no use"));
  Recover();
  // None is started beside it: it has the devices.
  const Error held = ErrorOf(Load(0, PlanId(2), 1));
  EXPECT_EQ(held.reason, Reason::kDeviceLost);
  EXPECT_TRUE(
      absl::StrContains(held.message, absl::StrCat("(pid ", pid, ") was killed and does not end")))
      << held.message;
  EXPECT_EQ(devices_->pid(), -1);
  process.Release();
  // The first may be asked for before its end is seen.
  PlanId plan(3);
  for (int i = 0; i < 1000 && !Load(0, plan, 1).ok(); ++i) ++plan;
  CheckThatItComputes(0, 1000);
  EXPECT_NE(devices_->pid(), pid);
}

TEST_F(WorkerDevicesTest, DevicesEndWhereTheirWorkerDoesNot) {
  WorkerOptions options = OptionsOf();
  options.kill_timeout = absl::Milliseconds(300);
  Start(options);
  HeldProcess process(devices_->pid());
  if (!process.held()) GTEST_SKIP() << "nothing may be traced here: " << strerror(errno);
  executor(0)->Kill("it is of no use");
  AwaitLoss();
  executors_.clear();
  devices_ = nullptr;
}

TEST_F(WorkerDevicesTest, ItIsKilledWhereItsWorkDoesNotEnd) {
  Start(OptionsOf());
  // A call in a communicator whose other member never comes.
  DevicePlan plan;
  plan.num_bindings = 1;
  DevicePlan::CollectiveStep barrier;
  barrier.kind = CollectiveKind::kBarrier;
  barrier.binding = 0;
  plan.collectives.push_back(barrier);
  DevicePlan::Step step;
  step.stream = DevicePlan::StreamId::kCommunication;
  step.collective = 0;
  plan.steps.push_back(step);
  executor(0)->LoadPlan(PlanId(1), EncodeDevicePlan(plan));
  ASSERT_TRUE(events_[0].Next<LoadedMessage>().status.ok());
  executor(0)->OpenCommunicator(CommunicatorId(1), {0, 1}, 0);
  ASSERT_TRUE(events_[0].Next<OpenedMessage>().status.ok());
  LaunchMessage message;
  message.launch = ++last_launch_;
  message.lane = kLane;
  message.plan = PlanId(1);
  message.collectives.emplace_back();
  message.collectives[0].communicator = CommunicatorId(1);
  ByteWriter bytes;
  EncodeLaunch(message, &bytes);
  executor(0)->Launch(bytes.bytes());
  executor(0)->Kill("launch 1 does not end");
  EXPECT_EQ(ErrorOf(Completed(0)).reason, Reason::kDeviceLost);
  EXPECT_TRUE(absl::StrContains(AwaitLoss().message, "launch 1 does not end"));
}

// What a worker says is not believed: one that lies is lost, and ended, whatever it goes on saying.
class LyingWorkerTest : public WorkerDevicesTest {
 protected:
  static WorkerOptions OptionsOf(const std::string& lie) {
    WorkerOptions options = worker::OptionsOf();
    options.command = {"core/worker/testing/lying_worker", lie, absl::StrCat(kDevices)};
    options.kill_timeout = absl::Milliseconds(300);
    return options;
  }
  void Start(const std::string& lie) { WorkerDevicesTest::Start(OptionsOf(lie)); }
  absl::Status Download(int64_t bytes) {
    return Get(0, *devices_->Allocate(0, 8), static_cast<size_t>(bytes) / sizeof(float)).status();
  }
};

TEST_F(LyingWorkerTest, OneThatIsNotReadyAndDoesNotSayWhyIsNoWorker) {
  const Error refused = ErrorOf(WorkerDevices::Start(OptionsOf("not_ready")).status());
  EXPECT_EQ(refused.reason, Reason::kWrongState);
  EXPECT_TRUE(absl::StrContains(refused.message, "is no worker of this version"));
}

TEST_F(LyingWorkerTest, OneThatWasReadyAndIsNotSaysWhyOrIsEnded) {
  for (const auto& [lie, why] : {std::pair<const char*, const char*>(
                                     "not_ready_later", "it is not ready, and does not say why"),
                                 {"gives_up", "its GPU is on fire"}}) {
    SCOPED_TRACE(lie);
    Start(lie);
    executor(0)->LoadPlan(PlanId(1), NegPlan(1));
    const Error lost = AwaitLoss();
    EXPECT_TRUE(absl::StrContains(lost.message, why)) << lost.message;
    EXPECT_EQ(ErrorOf(events_[0].Next<LoadedMessage>().status).reason, Reason::kDeviceLost);
    executors_.clear();
    devices_ = nullptr;
  }
}

// More than there are sizes for. Workers of other builds may want other workspaces: what one said
// goes with it.
TEST_F(LyingWorkerTest, WorkspacesAreBoundedAndAskedForAgain) {
  Start("much_workspace");
  const Error refused = ErrorOf(AskForScratch().status());
  EXPECT_EQ(refused.reason, Reason::kOutOfMemory);
  EXPECT_TRUE(absl::StrContains(refused.message, "bytes of workspace, at most")) << refused.message;
  executors_.clear();
  devices_ = nullptr;

  Start("workspace_of_its_own");
  const absl::StatusOr<int64_t> first = AskForScratch();
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(*AskForScratch(), *first);
  executor(0)->Kill("another is wanted");
  AwaitLoss();
  const absl::StatusOr<int64_t> second = AskForScratch();
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_NE(*second, *first);
}

// Of a download of bytes, and of one of none, whose only piece is empty.
TEST_F(LyingWorkerTest, PiecesWithoutEndAreNotTaken) {
  for (const int64_t bytes : {8, 0}) {
    SCOPED_TRACE(bytes);
    Start("empty_pieces");
    EXPECT_EQ(ErrorOf(Download(bytes)).reason, Reason::kDeviceLost);
    const Error lost = AwaitLoss();
    EXPECT_TRUE(absl::StrContains(lost.message, "it sends bytes that were not asked for"))
        << lost.message;
    executors_.clear();
    devices_ = nullptr;
  }
}

TEST_F(LyingWorkerTest, ADownloadOfWhichNothingCameHasNotGoneWell) {
  Start("nothing_came");
  EXPECT_EQ(ErrorOf(Download(8)).reason, Reason::kDeviceLost);
  EXPECT_TRUE(absl::StrContains(AwaitLoss().message, "it answers what it was not asked"));
}

TEST_F(LyingWorkerTest, OneThatTalksWithoutEndIsEndedAllTheSame) {
  Start("talk");
  executor(0)->LoadPlan(PlanId(1), NegPlan(1));
  executor(0)->Kill("it is of no use");
  EXPECT_TRUE(absl::StrContains(AwaitLoss().message, "it is of no use"));
  EXPECT_EQ(ErrorOf(events_[0].Next<LoadedMessage>().status).reason, Reason::kDeviceLost);
}

TEST_F(LyingWorkerTest, OneThatTalksWithoutEndLoadsInTimeOrIsEnded) {
  WorkerOptions options = OptionsOf("talk");
  options.load_timeout = absl::Milliseconds(300);
  WorkerDevicesTest::Start(options);
  executor(0)->LoadPlan(PlanId(1), NegPlan(1));
  EXPECT_TRUE(
      absl::StrContains(AwaitLoss().message, "it has got no further with what it loads for 300ms"));
}

TEST_F(LyingWorkerTest, ExecutorsAndDevicesEndWhileItTalks) {
  Start("talk");
  executor(0)->LoadPlan(PlanId(1), NegPlan(1));
  executors_.clear();
  devices_ = nullptr;
}

TEST(WorkerStartTest, SaysWhyThereAreNoDevices) {
  const auto start = [](std::vector<std::string> command) {
    WorkerOptions options;
    options.command = std::move(command);
    return ErrorOf(WorkerDevices::Start(options).status());
  };
  const Error none = start({"/no/such/worker"});
  EXPECT_EQ(none.reason, Reason::kWrongState);
  EXPECT_EQ(none.message, "/no/such/worker: No such file or directory");
  EXPECT_TRUE(absl::StrContains(start({"/bin/false"}).message, "/bin/false ended with status 1"));
  const Error host = start({kWorker, "--backend=host"});
  EXPECT_TRUE(absl::StrContains(host.message, "host devices is the daemon's own")) << host.message;
  const Error unknown = start({kWorker, "--backend=abacus"});
  EXPECT_TRUE(absl::StrContains(unknown.message, "abacus")) << unknown.message;
}

}  // namespace
}  // namespace chorus::worker
