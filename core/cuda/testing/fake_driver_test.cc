// What the stand-in driver promises to tests: that it finds what is wrong, and only that.
#include "core/cuda/testing/fake_driver.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda/testing/fake_memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace cuda {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr auto kOk = Result::kSuccess;
constexpr auto kInvalidContext = static_cast<Result>(201);
constexpr auto kInvalidHandle = static_cast<Result>(400);
constexpr auto kNotFound = static_cast<Result>(500);
constexpr auto kNotPermitted = static_cast<Result>(800);
constexpr auto kCaptureUnsupported = static_cast<Result>(900);

constexpr int kSeeds = 40;  // how many of them show it depends on what else the machine does
constexpr size_t kChunk = FakeMemory::kGranularity;

// --- Kernels ---

struct CopyArgs {
  static constexpr int kScratchPacks = 0;
  const uint32_t* from = nullptr;
  uint32_t* to = nullptr;
  int64_t words = 0;
};
void Copy(const CopyArgs& args, const Lane& lane) {
  for (int64_t i = lane.index; i < args.words; i += lane.count)
    args.to[i] = LoadShared(args.from + i);
}

// Ends when the word is `until`.
struct AwaitArgs {
  static constexpr int kScratchPacks = 0;
  const uint32_t* word = nullptr;
  uint32_t until = 0;
  uint32_t* started = nullptr;  // if given, becomes 1
};
void Await(const AwaitArgs& args, const Lane& /*lane*/) {
  if (args.started != nullptr) StoreShared(args.started, 1);
  while (LoadShared(args.word) != args.until) Relax();
}

struct WriteArgs {
  static constexpr int kScratchPacks = 0;
  uint32_t* word = nullptr;
  uint32_t value = 0;
};
void Write(const WriteArgs& args, const Lane& lane) {
  if (lane.index == 0) StoreShared(args.word, args.value);
}

// Which thread came as which, and what it found in its scratch.
struct RollCallArgs {
  static constexpr int kScratchPacks = 1;
  uint32_t* came = nullptr;  // [0]: how many have come, then which
  uint32_t* scratch = nullptr;
};
void RollCall(const RollCallArgs& args, const Lane& lane) {
  args.came[++args.came[0]] = static_cast<uint32_t>(lane.index);
  args.scratch[lane.index] = BitsOf(lane.scratch[0].f[0]);
  lane.scratch[0].f[0] = 1;
}

#define CHORUS_TEST_KERNELS(X)         \
  X(copy, CopyArgs, Copy)              \
  X(await, AwaitArgs, Await)           \
  X(write, WriteArgs, Write)           \
  X(roll_call, RollCallArgs, RollCall) \
  X(roll_call_of_one, RollCallArgs, RollCall)

// The seed of this run, printed once.
uint64_t TestSeed() {
  static const uint64_t seed = [] {
    const char* const wanted = std::getenv("CHORUS_TEST_SEED");
    const uint64_t value =
        wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : std::random_device()() | 1u;
    std::fprintf(stderr, "CHORUS_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

// A driver, and calls of it that must go well.
class Rig {
 public:
  explicit Rig(uint64_t seed = TestSeed(), int gpus = 1, FakeOrder order = FakeOrder::kAdversarial,
               absl::Duration patience = FakeDriverOptions().patience)
      : driver_(Options(seed, gpus, order, patience)) {
    Expect(api.Init(0));
    for (int gpu = 0; gpu < gpus; ++gpu) {
      contexts_.emplace_back();
      Expect(api.DevicePrimaryCtxRetain(&contexts_.back(), gpu));
      Use(gpu);
      modules_.emplace_back();
      Expect(api.ModuleLoadData(&modules_.back(), "an image"));
    }
    Use(0);
  }

  static void Expect(Result result) { ASSERT_EQ(result, kOk); }
  FakeDriver& driver() { return driver_; }
  void Use(int gpu) { Expect(api.CtxSetCurrent(contexts_[static_cast<size_t>(gpu)])); }
  Module module(int gpu = 0) { return modules_[static_cast<size_t>(gpu)]; }

  Stream NewStream() {
    Stream stream = nullptr;
    Expect(api.StreamCreateWithPriority(&stream, kStreamNonBlocking, 0));
    return stream;
  }
  Event NewEvent(unsigned int flags = kEventDisableTiming) {
    Event event = nullptr;
    Expect(api.EventCreate(&event, flags));
    return event;
  }
  DevicePtr Allocate(size_t bytes) {
    DevicePtr pointer = 0;
    Expect(api.MemAlloc(&pointer, bytes));
    return pointer;
  }
  // With zeros in it.
  uint32_t* AllocatePinned(size_t words) {
    void* pointer = nullptr;
    Expect(api.MemHostAlloc(&pointer, 4 * words, kHostAllocPortable | kHostAllocDeviceMap));
    std::fill_n(static_cast<uint32_t*>(pointer), words, 0);
    return static_cast<uint32_t*>(pointer);
  }
  Function Find(const char* name, int gpu = 0) {
    Function function = nullptr;
    Expect(api.ModuleGetFunction(&function, module(gpu), name));
    return function;
  }
  template <typename Args>
  Result Launch(const char* name, const Args& args, Stream stream, unsigned int threads = 1,
                int gpu = 0) {
    void* params[] = {const_cast<Args*>(&args)};
    return api.LaunchKernel(Find(name, gpu), 1, 1, 1, threads, 1, 1, 0, stream, params, nullptr);
  }
  void LaunchCopy(DevicePtr to, DevicePtr from, int64_t words, Stream stream) {
    CopyArgs args;
    args.from = reinterpret_cast<const uint32_t*>(from);
    args.to = reinterpret_cast<uint32_t*>(to);
    args.words = words;
    Expect(Launch("copy", args, stream, 32));
  }
  // Work that does not end before Open.
  void Close(uint32_t* gate, Stream stream) {
    AwaitArgs args;
    args.word = gate;
    args.until = 1;
    Expect(Launch("await", args, stream));
  }
  static void Open(uint32_t* gate) { StoreShared(gate, 1); }
  void Wait(Stream stream) { Expect(api.StreamSynchronize(stream)); }
  std::vector<uint32_t> Download(DevicePtr from, size_t words, Stream stream) {
    std::vector<uint32_t> to(words);
    Expect(api.MemcpyDtoHAsync(to.data(), from, 4 * words, stream));
    Wait(stream);
    return to;
  }
  // A mapped chunk that `gpus` have access to.
  DevicePtr MapChunk(AllocationHandle* handle, int owner, const std::vector<int>& gpus) {
    AllocationProperties properties;
    properties.requested_handles = HandleType::kFileDescriptor;
    properties.location.id = owner;
    Expect(api.MemCreate(handle, kChunk, &properties, 0));
    DevicePtr pointer = 0;
    Expect(api.MemAddressReserve(&pointer, kChunk, 0, 0, 0));
    Expect(api.MemMap(pointer, kChunk, 0, *handle, 0));
    std::vector<AccessDescription> access(gpus.size());
    for (size_t n = 0; n < gpus.size(); ++n) access[n].location.id = gpus[n];
    Expect(api.MemSetAccess(pointer, kChunk, access.data(), access.size()));
    return pointer;
  }

  const Api api = FakeDriver::api();

 private:
  static FakeDriverOptions Options(uint64_t seed, int gpus, FakeOrder order,
                                   absl::Duration patience) {
    FakeDriverOptions options;
    options.seed = seed;
    options.gpus = gpus;
    options.patience = patience;
    options.order = order;
    options.memory_bytes = int64_t{64} << 20;
    options.kernels = {CHORUS_TEST_KERNELS(CHORUS_FAKE_KERNEL)};
    FindFakeKernel(&options.kernels, "await")->one_thread = true;
    FindFakeKernel(&options.kernels, "roll_call_of_one")->one_thread = true;
    FindFakeKernel(&options.kernels, "write")->most_block_threads = 128;
    return options;
  }

  FakeDriver driver_;
  std::vector<Context> contexts_;
  std::vector<Module> modules_;
};

class FakeDriverDeathTest : public ::testing::Test {
 protected:
  void SetUp() override { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

// --- Order ---

// A producer on one stream, a consumer on another, and `between` calls in between.
int WrongCopies(bool wait, int between) {
  int wrong = 0;
  for (int i = 0; i < kSeeds; ++i) {
    Rig rig(TestSeed() + static_cast<uint64_t>(i));
    const Stream producer = rig.NewStream();
    const Stream consumer = rig.NewStream();
    const Stream other = rig.NewStream();
    const Event event = rig.NewEvent();
    const std::vector<uint32_t> data(16, 3);
    const DevicePtr produced = rig.Allocate(64);
    const DevicePtr consumed = rig.Allocate(64);
    const DevicePtr elsewhere = rig.Allocate(64);
    Rig::Expect(rig.api.MemcpyHtoDAsync(produced, data.data(), 64, producer));
    Rig::Expect(rig.api.EventRecord(event, producer));
    for (int n = 0; n < between; ++n) rig.LaunchCopy(elsewhere, elsewhere, 16, other);
    if (wait) Rig::Expect(rig.api.StreamWaitEvent(consumer, event, 0));
    rig.LaunchCopy(consumed, produced, 16, consumer);
    Rig::Expect(rig.api.CtxSynchronize());
    const std::vector<uint32_t> got = rig.Download(consumed, 16, consumer);
    if (got == data) continue;
    ++wrong;
    EXPECT_THAT(got, Each(FakeMemory::kFresh));
  }
  return wrong;
}

TEST(FakeDriverOrderTest, AMissingWaitShowsWithMostSeeds) {
  EXPECT_EQ(WrongCopies(/*wait=*/true, 0), 0);
  EXPECT_EQ(WrongCopies(/*wait=*/true, 20), 0);
  EXPECT_GT(WrongCopies(/*wait=*/false, 0), kSeeds / 8);
  EXPECT_GT(WrongCopies(/*wait=*/false, 20), kSeeds / 8);
}

TEST(FakeDriverOrderTest, MemoryThatIsWrittenAgainTooEarlyShowsWithMostSeeds) {
  int wrong = 0;
  for (int i = 0; i < kSeeds; ++i) {
    Rig rig(TestSeed() + static_cast<uint64_t>(i));
    const Stream reader = rig.NewStream();
    const Stream writer = rig.NewStream();
    const DevicePtr memory = rig.Allocate(4);
    Rig::Expect(rig.api.MemsetD8Async(memory, 1, 4, reader));
    rig.Wait(reader);
    uint32_t* const got = rig.AllocatePinned(1);
    Rig::Expect(rig.api.MemcpyDtoHAsync(got, memory, 4, reader));
    Rig::Expect(rig.api.MemsetD8Async(memory, 2, 4, writer));
    Rig::Expect(rig.api.CtxSynchronize());
    wrong += *got != 0x01010101;
  }
  EXPECT_GT(wrong, kSeeds / 8);
}

TEST(FakeDriverOrderTest, EveryOrderOfIndependentStreamsHappens) {
  std::set<std::vector<int>> seen;
  struct Caller {
    std::vector<int>* order;
    int index;
  };
  for (int i = 0; i < 300 && seen.size() < 6; ++i) {
    Rig rig(TestSeed() + static_cast<uint64_t>(i));
    std::vector<int> order;
    std::vector<Caller> callers;
    for (int n = 0; n < 3; ++n) callers.push_back({&order, n});
    for (Caller& caller : callers) {
      const auto call = [](void* data) {
        const auto* const called = static_cast<Caller*>(data);
        called->order->push_back(called->index);
      };
      Rig::Expect(rig.api.LaunchHostFunc(rig.NewStream(), call, &caller));
    }
    Rig::Expect(rig.api.CtxSynchronize());
    seen.insert(order);
  }
  EXPECT_EQ(seen.size(), 6u);
}

TEST(FakeDriverOrderTest, AStreamKeepsItsOrder) {
  Rig rig;
  std::vector<Stream> streams;
  std::vector<DevicePtr> words;
  for (int n = 0; n < 8; ++n) {
    streams.push_back(rig.NewStream());
    words.push_back(rig.Allocate(4));
  }
  std::vector<std::vector<uint32_t>> got(8, std::vector<uint32_t>(50));
  for (size_t round = 0; round < 50; ++round) {
    for (size_t n = 0; n < 8; ++n) {
      Rig::Expect(
          rig.api.MemsetD8Async(words[n], static_cast<unsigned char>(round), 4, streams[n]));
      Rig::Expect(rig.api.MemcpyDtoHAsync(&got[n][round], words[n], 4, streams[n]));
    }
  }
  Rig::Expect(rig.api.CtxSynchronize());
  for (size_t n = 0; n < 8; ++n) {
    for (size_t round = 0; round < 50; ++round) {
      ASSERT_EQ(got[n][round], round * 0x01010101u) << n;
    }
  }
}

TEST(FakeDriverOrderTest, NoWorkIsRunWhileTheProgramGoesOn) {
  int late = 0;
  // So patient that it does not matter what else the machine does; not every seed holds back.
  for (uint64_t i = 0; i < 8; ++i) {
    Rig rig(TestSeed() + i, 1, FakeOrder::kAdversarial, absl::Milliseconds(400));
    const Stream stream = rig.NewStream();
    const DevicePtr memory = rig.Allocate(4);
    uint32_t* const word = rig.AllocatePinned(1);
    const DevicePtr elsewhere = rig.Allocate(4);
    Rig::Expect(rig.api.MemsetD8Async(elsewhere, 0, 4, stream));
    rig.Wait(stream);
    rig.LaunchCopy(memory, reinterpret_cast<uint64_t>(word), 1, stream);
    for (int n = 0; n < 100; ++n) Rig::Expect(rig.api.MemsetD8Async(elsewhere, 0, 4, stream));
    StoreShared(word, 1);  // too early
    rig.Wait(stream);
    late += rig.Download(memory, 1, stream)[0] == 1;
  }
  EXPECT_GT(late, 0);
}

TEST(FakeDriverOrderTest, WorkThatWaitsForOtherWorkGetsCompany) {
  for (const FakeOrder order : {FakeOrder::kAdversarial, FakeOrder::kEager}) {
    Rig rig(TestSeed(), 1, order);
    std::vector<uint32_t*> gates;
    for (int n = 0; n < 4; ++n) gates.push_back(rig.AllocatePinned(1));
    for (int n = 0; n < 4; ++n) rig.Close(gates[static_cast<size_t>(n)], rig.NewStream());
    WriteArgs args;
    args.value = 1;
    for (uint32_t* const gate : gates) {
      args.word = gate;
      Rig::Expect(rig.Launch("write", args, rig.NewStream()));
    }
    Rig::Expect(rig.api.CtxSynchronize());
  }
}

TEST(FakeDriverOrderTest, ThreadsOfALaunchComeInAnyOrderAndFindJunkInTheirScratch) {
  for (const FakeOrder order : {FakeOrder::kAdversarial, FakeOrder::kEager}) {
    std::set<std::vector<uint32_t>> seen;
    for (int i = 0; i < kSeeds; ++i) {
      Rig rig(TestSeed() + static_cast<uint64_t>(i), 1, order);
      const Stream stream = rig.NewStream();
      RollCallArgs args;
      args.came = rig.AllocatePinned(9);
      args.scratch = rig.AllocatePinned(8);
      Rig::Expect(rig.Launch("roll_call", args, stream, 8));
      rig.Wait(stream);
      std::vector<uint32_t> came(args.came + 1, args.came + 9);
      seen.insert(came);
      std::sort(came.begin(), came.end());
      EXPECT_THAT(came, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
      EXPECT_THAT(std::vector<uint32_t>(args.scratch, args.scratch + 8), Each(FakeMemory::kFresh));
    }
    EXPECT_GT(seen.size(), 4u);
  }
}

TEST(FakeDriverOrderTest, ManyStreamsTakeNoThreadsEach) {
  Rig rig;
  const DevicePtr memory = rig.Allocate(4);
  for (int n = 0; n < 20'000; ++n) {
    const Stream stream = rig.NewStream();
    Rig::Expect(rig.api.MemsetD8Async(memory, 1, 4, stream));
    Rig::Expect(rig.api.StreamDestroy(stream));
  }
  Rig::Expect(rig.api.CtxSynchronize());
}

// --- Events ---

TEST(FakeDriverEventTest, IsReadyWhenItsLatestRecordIsReached) {
  Rig rig;
  const Stream stream = rig.NewStream();
  const Event event = rig.NewEvent();
  EXPECT_EQ(rig.api.EventQuery(event), kOk) << "never recorded";
  EXPECT_EQ(rig.api.EventSynchronize(event), kOk);
  uint32_t* const gate = rig.AllocatePinned(1);
  rig.Close(gate, stream);
  Rig::Expect(rig.api.EventRecord(event, stream));
  EXPECT_EQ(rig.api.EventQuery(event), Result::kNotReady);
  EXPECT_EQ(rig.api.StreamQuery(stream), Result::kNotReady);
  // On another stream, which is free to go.
  const Stream other = rig.NewStream();
  Rig::Expect(rig.api.EventRecord(event, other));
  EXPECT_EQ(rig.api.EventSynchronize(event), kOk);
  EXPECT_EQ(rig.api.EventQuery(event), kOk);
  Rig::Open(gate);
  rig.Wait(stream);
  EXPECT_EQ(rig.api.EventQuery(event), kOk);
  EXPECT_EQ(rig.api.StreamQuery(stream), kOk);
}

TEST(FakeDriverEventTest, AWaitIsForTheRecordOfItsTime) {
  Rig rig;
  const Stream stream = rig.NewStream();
  const Stream blocked = rig.NewStream();
  const Stream waiter = rig.NewStream();
  const Event event = rig.NewEvent();
  uint32_t* const gate = rig.AllocatePinned(1);
  // One that was never recorded is passed at once, though it is recorded then.
  Rig::Expect(rig.api.StreamWaitEvent(waiter, event, 0));
  rig.Close(gate, blocked);
  Rig::Expect(rig.api.EventRecord(event, blocked));
  rig.Wait(waiter);
  // A wait for a record does not become one for a later record.
  Rig::Expect(rig.api.EventRecord(event, stream));
  Rig::Expect(rig.api.StreamWaitEvent(waiter, event, 0));
  Rig::Expect(rig.api.EventRecord(event, blocked));
  rig.Wait(waiter);
  // Nor is it passed when the event has been recorded again, and that was reached.
  Rig::Expect(rig.api.StreamWaitEvent(waiter, event, 0));
  Rig::Expect(rig.api.EventRecord(event, stream));
  rig.Wait(stream);
  EXPECT_EQ(rig.api.EventQuery(event), kOk);
  EXPECT_EQ(rig.api.StreamQuery(waiter), Result::kNotReady);
  Rig::Open(gate);
  rig.Wait(waiter);
}

TEST(FakeDriverEventTest, OfAnEventThatIsDestroyedRecordsAndWaitsStay) {
  int early = 0;
  for (int i = 0; i < kSeeds; ++i) {
    Rig rig(TestSeed() + static_cast<uint64_t>(i));
    const Stream producer = rig.NewStream();
    const Stream consumer = rig.NewStream();
    const Event event = rig.NewEvent();
    uint32_t* const words = rig.AllocatePinned(2);
    const DevicePtr memory = rig.Allocate(4);
    Rig::Expect(rig.api.MemsetD8Async(memory, 1, 4, producer));
    Rig::Expect(rig.api.EventRecord(event, producer));
    Rig::Expect(rig.api.StreamWaitEvent(consumer, event, 0));
    Rig::Expect(rig.api.EventDestroy(event));
    Rig::Expect(rig.api.MemcpyDtoHAsync(words, memory, 4, consumer));
    rig.Wait(consumer);
    early += words[0] != 0x01010101;
    EXPECT_EQ(rig.api.EventQuery(event), kInvalidHandle);
    EXPECT_EQ(rig.api.EventDestroy(event), kInvalidHandle);
    EXPECT_EQ(rig.api.StreamWaitEvent(consumer, event, 0), kInvalidHandle);
  }
  EXPECT_EQ(early, 0);
}

TEST(FakeDriverEventTest, TellsTimeIfItWasMadeForThat) {
  Rig rig;
  const Stream stream = rig.NewStream();
  const Event begin = rig.NewEvent(kEventDefault);
  const Event end = rig.NewEvent(kEventDefault);
  float milliseconds = -1;
  EXPECT_EQ(rig.api.EventElapsedTime(&milliseconds, begin, end), kInvalidHandle);
  uint32_t* const gate = rig.AllocatePinned(1);
  Rig::Expect(rig.api.EventRecord(begin, stream));
  rig.Close(gate, stream);
  Rig::Expect(rig.api.EventRecord(end, stream));
  EXPECT_EQ(rig.api.EventElapsedTime(&milliseconds, begin, end), Result::kNotReady);
  Rig::Open(gate);
  rig.Wait(stream);
  Rig::Expect(rig.api.EventElapsedTime(&milliseconds, begin, end));
  EXPECT_GE(milliseconds, 0);
  EXPECT_EQ(rig.api.EventElapsedTime(&milliseconds, rig.NewEvent(), end), kInvalidHandle);
}

// --- Streams ---

TEST(FakeDriverStreamTest, WritesAValueAfterAllThatCameBefore) {
  for (int i = 0; i < kSeeds; ++i) {
    Rig rig(TestSeed() + static_cast<uint64_t>(i));
    const Stream stream = rig.NewStream();
    uint32_t* const words = rig.AllocatePinned(2);
    DevicePtr flag = 0;
    Rig::Expect(rig.api.MemHostGetDevicePointer(&flag, words + 1, 0));
    const DevicePtr memory = rig.Allocate(4);
    Rig::Expect(rig.api.MemsetD8Async(memory, 1, 4, stream));
    Rig::Expect(rig.api.MemcpyDtoHAsync(words, memory, 4, stream));
    Rig::Expect(rig.api.StreamWriteValue32(stream, flag, 7, kWriteValueDefault));
    while (LoadShared(words + 1) != 7) Relax();
    EXPECT_EQ(words[0], 0x01010101u);
    rig.Wait(stream);
    EXPECT_EQ(rig.api.StreamWriteValue32(stream, flag - 2, 7, 0), Result::kInvalidValue);
    EXPECT_EQ(rig.api.StreamWriteValue32(stream, flag + 4, 7, 0), Result::kInvalidValue);
  }
}

TEST(FakeDriverStreamTest, OfAStreamThatIsDestroyedTheWorkRuns) {
  Rig rig;
  const Stream stream = rig.NewStream();
  uint32_t* const gate = rig.AllocatePinned(1);
  uint32_t* const word = rig.AllocatePinned(1);
  rig.Close(gate, stream);
  Rig::Expect(rig.api.StreamWriteValue32(stream, reinterpret_cast<uint64_t>(word), 1, 0));
  Rig::Expect(rig.api.StreamDestroy(stream));
  EXPECT_EQ(rig.api.StreamQuery(stream), kInvalidHandle);
  EXPECT_EQ(rig.api.StreamSynchronize(stream), kInvalidHandle);
  EXPECT_EQ(rig.api.MemsetD8Async(rig.Allocate(4), 1, 4, stream), kInvalidHandle);
  EXPECT_EQ(LoadShared(word), 0u);
  Rig::Open(gate);
  Rig::Expect(rig.api.CtxSynchronize());
  EXPECT_EQ(*word, 1u);
}

TEST(FakeDriverStreamTest, AHostFunctionMayNotCallTheDriver) {
  Rig rig;
  const Stream stream = rig.NewStream();
  struct Call {
    Rig* rig;
    Result result;
  } call = {&rig, kOk};
  const auto function = [](void* data) {
    auto* const made = static_cast<Call*>(data);
    DevicePtr pointer = 0;
    made->result = made->rig->api.MemAlloc(&pointer, 4);
  };
  Rig::Expect(rig.api.LaunchHostFunc(stream, function, &call));
  rig.Wait(stream);
  EXPECT_EQ(call.result, kNotPermitted);
}

// --- Memory ---

TEST(FakeDriverMemoryTest, IsFreshUntilItIsWritten) {
  Rig rig;
  const Stream stream = rig.NewStream();
  EXPECT_THAT(rig.Download(rig.Allocate(40), 10, stream), Each(FakeMemory::kFresh));
  AllocationHandle handle = 0;
  EXPECT_THAT(rig.Download(rig.MapChunk(&handle, 0, {0}), kChunk / 4, stream),
              Each(FakeMemory::kFresh));
}

TEST(FakeDriverMemoryTest, IsCountedUntilItIsFreed) {
  Rig rig;
  size_t before = 0;
  size_t total = 0;
  Rig::Expect(rig.api.MemGetInfo(&before, &total));
  EXPECT_EQ(before, total);
  const auto taken = [&] {
    size_t free = 0;
    Rig::Expect(rig.api.MemGetInfo(&free, &total));
    return before - free;
  };
  const DevicePtr allocated = rig.Allocate(1000);
  EXPECT_EQ(taken(), 1000u);
  AllocationHandle handle = 0;
  const DevicePtr mapped = rig.MapChunk(&handle, 0, {0});
  int fd = -1;
  Rig::Expect(rig.api.MemExportToShareableHandle(&fd, handle, HandleType::kFileDescriptor, 0));
  EXPECT_EQ(taken(), 1000 + kChunk);
  Rig::Expect(rig.api.MemFree(allocated));
  Rig::Expect(rig.api.MemRelease(handle));
  EXPECT_EQ(taken(), kChunk) << "a mapping keeps it";
  Rig::Expect(rig.api.MemUnmap(mapped, kChunk));
  Rig::Expect(rig.api.MemAddressFree(mapped, kChunk));
  EXPECT_EQ(taken(), kChunk) << "a descriptor keeps it";
  close(fd);
  EXPECT_EQ(taken(), 0u);
  DevicePtr pointer = 0;
  EXPECT_EQ(rig.api.MemAlloc(&pointer, total + 1), Result::kOutOfMemory);
}

TEST(FakeDriverMemoryTest, AChunkIsSharedByItsDescriptor) {
  Rig rig;
  const Stream stream = rig.NewStream();
  AllocationHandle handle = 0;
  const DevicePtr mapped = rig.MapChunk(&handle, 0, {0});
  int fd = -1;
  Rig::Expect(rig.api.MemExportToShareableHandle(&fd, handle, HandleType::kFileDescriptor, 0));
  AllocationHandle imported = 0;
  Rig::Expect(rig.api.MemImportFromShareableHandle(
      &imported, reinterpret_cast<void*>(static_cast<intptr_t>(fd)), HandleType::kFileDescriptor));
  close(fd);
  DevicePtr again = 0;
  Rig::Expect(rig.api.MemAddressReserve(&again, 2 * kChunk, 0, 0, 0));
  Rig::Expect(rig.api.MemMap(again + kChunk, kChunk, 0, imported, 0));
  EXPECT_EQ(rig.api.MemMap(again + kChunk, kChunk, 0, imported, 0), Result::kInvalidValue);
  EXPECT_EQ(rig.api.MemAddressFree(again, 2 * kChunk), Result::kInvalidValue) << "still mapped";
  EXPECT_EQ(rig.api.MemsetD8Async(again + kChunk, 5, 4, stream), Result::kInvalidValue)
      << "without access";
  const AccessDescription access;
  Rig::Expect(rig.api.MemSetAccess(again + kChunk, kChunk, &access, 1));
  Rig::Expect(rig.api.MemsetD8Async(again + kChunk, 5, 4, stream));
  EXPECT_EQ(rig.Download(mapped, 1, stream)[0], 0x05050505u);
}

TEST(FakeDriverMemoryTest, MappingsLieInReservedAddressesAndBesideEachOther) {
  Rig rig;
  const AllocationProperties properties;
  AllocationHandle two = 0;
  AllocationHandle one = 0;
  Rig::Expect(rig.api.MemCreate(&two, 2 * kChunk, &properties, 0));
  Rig::Expect(rig.api.MemCreate(&one, kChunk, &properties, 0));
  DevicePtr at = 0;
  Rig::Expect(rig.api.MemAddressReserve(&at, 3 * kChunk, 0, 0, 0));
  Rig::Expect(rig.api.MemMap(at, 2 * kChunk, 0, two, 0));
  EXPECT_EQ(rig.api.MemMap(at + kChunk, kChunk, 0, one, 0), Result::kInvalidValue);
  EXPECT_EQ(rig.api.MemMap(at + 3 * kChunk, kChunk, 0, one, 0), Result::kInvalidValue);
  Rig::Expect(rig.api.MemMap(at + 2 * kChunk, kChunk, 0, one, 0));
  const AccessDescription access;
  EXPECT_EQ(rig.api.MemSetAccess(at, kChunk, &access, 1), Result::kInvalidValue);
  Rig::Expect(rig.api.MemSetAccess(at, 3 * kChunk, &access, 1));
  EXPECT_EQ(rig.api.MemUnmap(at, kChunk), Result::kInvalidValue) << "half of a mapping";
  Rig::Expect(rig.api.MemUnmap(at, 3 * kChunk));
  Rig::Expect(rig.api.MemAddressFree(at, 3 * kChunk));
  EXPECT_EQ(rig.api.MemMap(at, kChunk, 0, one, 0), Result::kInvalidValue) << "not reserved";
}

TEST(FakeDriverMemoryTest, CopiesOutsideOfItAreErrors) {
  Rig rig;
  const Stream stream = rig.NewStream();
  const DevicePtr memory = rig.Allocate(64);
  const DevicePtr other = rig.Allocate(64);
  uint32_t* const pinned = rig.AllocatePinned(16);
  std::vector<char> host(128);
  const auto up = [&](DevicePtr to, const void* from, size_t bytes) {
    return rig.api.MemcpyHtoDAsync(to, from, bytes, stream);
  };
  EXPECT_EQ(up(memory + 1, host.data(), 63), kOk);
  EXPECT_EQ(up(memory + 1, host.data(), 64), Result::kInvalidValue);
  EXPECT_EQ(up(memory - 1, host.data(), 4), Result::kInvalidValue);
  EXPECT_EQ(up(memory, pinned + 1, 64), Result::kInvalidValue) << "partly pinned";
  EXPECT_EQ(up(memory, reinterpret_cast<void*>(other), 64), Result::kInvalidValue);
  EXPECT_EQ(rig.api.MemcpyDtoHAsync(host.data(), memory, 65, stream), Result::kInvalidValue);
  EXPECT_EQ(rig.api.MemcpyDtoDAsync(memory, other + 4, 64, stream), Result::kInvalidValue);
  EXPECT_EQ(rig.api.MemsetD8Async(memory, 0, 65, stream), Result::kInvalidValue);
  rig.Wait(stream);
  Rig::Expect(rig.api.MemFree(memory));
  EXPECT_EQ(up(memory, host.data(), 4), Result::kInvalidValue) << "freed";
  EXPECT_EQ(rig.api.MemFree(memory), Result::kInvalidValue);
}

TEST(FakeDriverMemoryTest, WhatIsNotPinnedIsReadAtTheCall) {
  Rig rig;
  const Stream stream = rig.NewStream();
  const DevicePtr memory = rig.Allocate(4);
  uint32_t* const gate = rig.AllocatePinned(1);
  uint32_t word = 1;
  rig.Close(gate, stream);
  Rig::Expect(rig.api.MemcpyHtoDAsync(memory, &word, 4, stream));
  word = 2;
  Rig::Open(gate);
  EXPECT_EQ(rig.Download(memory, 1, stream)[0], 1u);
  // Pinned memory is read when the copy runs.
  Rig::Expect(rig.api.MemHostRegister(&word, 4, kHostRegisterPortable));
  EXPECT_NE(rig.api.MemHostRegister(&word, 4, kHostRegisterPortable), kOk);
  *gate = 0;
  rig.Close(gate, stream);
  Rig::Expect(rig.api.MemcpyHtoDAsync(memory, &word, 4, stream));
  word = 3;
  Rig::Open(gate);
  EXPECT_EQ(rig.Download(memory, 1, stream)[0], 3u);
  Rig::Expect(rig.api.MemHostUnregister(&word));
}

// Runs a copying kernel of `words` words and waits for it.
void RunCopy(Rig* rig, DevicePtr to, DevicePtr from, int64_t words) {
  const Stream stream = rig->NewStream();
  rig->LaunchCopy(to, from, words, stream);
  rig->Wait(stream);
}

TEST_F(FakeDriverDeathTest, AKernelThatRunsOverAnEndTraps) {
  const char* const trapped = "fake driver: kernel copy touched 0x.*";
  EXPECT_DEATH(
      {
        Rig rig;
        RunCopy(&rig, rig.Allocate(256), rig.Allocate(1024), 65);
      },
      trapped);
  EXPECT_DEATH(
      {
        Rig rig;
        RunCopy(&rig, rig.Allocate(1024), rig.Allocate(256), 65);
      },
      trapped);
  EXPECT_DEATH(
      {
        Rig rig;
        AllocationHandle handle = 0;
        RunCopy(&rig, rig.MapChunk(&handle, 0, {0}) + kChunk - 8, rig.Allocate(1024), 3);
      },
      trapped);
  EXPECT_DEATH(
      {
        Rig rig;
        AllocationHandle handle = 0;
        const DevicePtr from = rig.Allocate(1024);
        RunCopy(&rig, rig.MapChunk(&handle, 0, {0}) - 4, from, 1);
      },
      trapped);
}

TEST_F(FakeDriverDeathTest, AWriteJustBehindTheEndIsFoundWhenItIsFreed) {
  EXPECT_DEATH(
      {
        Rig rig;
        const DevicePtr to = rig.Allocate(8);
        const DevicePtr from = rig.Allocate(64);
        Rig::Expect(rig.api.MemsetD8Async(from, 1, 64, rig.NewStream()));
        Rig::Expect(rig.api.CtxSynchronize());
        RunCopy(&rig, to, from, 3);
        rig.api.MemFree(to);
      },
      "was written, outside of the 8 bytes");
}

TEST_F(FakeDriverDeathTest, UseAfterFreeOrUnmapTraps) {
  EXPECT_DEATH(
      {
        Rig rig;
        const DevicePtr freed = rig.Allocate(64);
        Rig::Expect(rig.api.MemFree(freed));
        RunCopy(&rig, rig.Allocate(64), freed, 1);
      },
      "kernel copy touched 0x.* \\(freed, ");
  EXPECT_DEATH(
      {
        Rig rig;
        AllocationHandle handle = 0;
        const DevicePtr unmapped = rig.MapChunk(&handle, 0, {0});
        Rig::Expect(rig.api.MemUnmap(unmapped, kChunk));
        RunCopy(&rig, rig.Allocate(64), unmapped, 1);
      },
      "kernel copy touched 0x");
}

TEST(FakeDriverMemoryTest, AddressesAreNotUsedAgain) {
  Rig rig;
  constexpr size_t kFreed = 1 << 20;
  std::vector<DevicePtr> freed;
  for (int n = 0; n < 20; ++n) {
    freed.push_back(rig.Allocate(kFreed));
    Rig::Expect(rig.api.MemFree(freed.back()));
    const DevicePtr fresh = rig.Allocate(64);
    for (const DevicePtr begin : freed) EXPECT_FALSE(fresh >= begin && fresh < begin + kFreed);
  }
}

// --- What queued work uses ---

// With a stream that has `use(rig, stream)` queued behind a gate, `end` must not be called.
template <typename Use, typename End>
void EndWhileUsed(Use use, End end) {
  Rig rig;
  const Stream stream = rig.NewStream();
  uint32_t* const gate = rig.AllocatePinned(1);
  rig.Close(gate, stream);
  use(&rig, stream);
  end(&rig);
  Rig::Open(gate);
  rig.Wait(stream);
}

TEST_F(FakeDriverDeathTest, WhatQueuedWorkUsesMustStay) {
  DevicePtr memory = 0;
  const auto use_memory = [&](Rig* rig, Stream stream) {
    memory = rig->Allocate(64);
    rig->LaunchCopy(rig->Allocate(64), memory, 16, stream);
  };
  const auto free_memory = [&](Rig* rig) { rig->api.MemFree(memory); };
  EXPECT_DEATH(EndWhileUsed(use_memory, free_memory),
               "cuMemFree: 0x.* is still used by kernel copy, which has not finished");
  const auto copy_memory = [&](Rig* rig, Stream stream) {
    memory = rig->Allocate(64);
    Rig::Expect(rig->api.MemcpyDtoDAsync(rig->Allocate(64), memory, 64, stream));
  };
  EXPECT_DEATH(EndWhileUsed(copy_memory, free_memory), "still used by a copy on the device");
  const auto use_chunk = [&](Rig* rig, Stream stream) {
    AllocationHandle handle = 0;
    memory = rig->MapChunk(&handle, 0, {0});
    Rig::Expect(rig->api.MemsetD8Async(memory + 4096, 0, 64, stream));
  };
  EXPECT_DEATH(EndWhileUsed(use_chunk, [&](Rig* rig) { rig->api.MemUnmap(memory, kChunk); }),
               "cuMemUnmap: 0x.* is still used by a memset");
  EXPECT_DEATH(EndWhileUsed(use_chunk,
                            [&](Rig* rig) {
                              AccessDescription access;
                              access.access = Access::kNone;
                              rig->api.MemSetAccess(memory, kChunk, &access, 1);
                            }),
               "cuMemSetAccess: 0x.* is still used by a memset");
  uint32_t* pinned = nullptr;
  const auto use_pinned = [&](Rig* rig, Stream stream) {
    pinned = rig->AllocatePinned(16);
    Rig::Expect(rig->api.MemcpyHtoDAsync(rig->Allocate(64), pinned, 64, stream));
  };
  EXPECT_DEATH(EndWhileUsed(use_pinned, [&](Rig* rig) { rig->api.MemFreeHost(pinned); }),
               "cuMemFreeHost: 0x.* is still used by a copy to the device");
  uint32_t word = 0;
  const auto use_registered = [&](Rig* rig, Stream stream) {
    Rig::Expect(rig->api.MemHostRegister(&word, 4, kHostRegisterPortable));
    Rig::Expect(rig->api.MemcpyDtoHAsync(&word, rig->Allocate(64), 4, stream));
  };
  EXPECT_DEATH(EndWhileUsed(use_registered, [&](Rig* rig) { rig->api.MemHostUnregister(&word); }),
               "cuMemHostUnregister: 0x.* is still used by a copy to the host");
  EXPECT_DEATH(
      EndWhileUsed([](Rig*, Stream) {}, [](Rig* rig) { rig->api.ModuleUnload(rig->module()); }),
      "cuModuleUnload: kernel await has not finished");
  EXPECT_DEATH(
      {
        Rig rig;
        AwaitArgs args;
        args.word = rig.AllocatePinned(1);
        args.until = 1;
        args.started = rig.AllocatePinned(1);
        Rig::Expect(rig.Launch("await", args, rig.NewStream()));
        while (LoadShared(args.started) == 0) Relax();
        rig.api.MemFreeHost(const_cast<uint32_t*>(args.word));
      },
      "cuMemFreeHost: 0x.* is still used by kernel await");
  EXPECT_DEATH(
      {
        Rig rig;
        rig.Close(rig.AllocatePinned(1), rig.NewStream());
      },
      "it ends while a stream has not finished kernel await");
}

TEST(FakeDriverMemoryTest, WhatFinishedWorkUsedMayGo) {
  Rig rig;
  const Stream stream = rig.NewStream();
  for (int n = 0; n < 100; ++n) {
    const DevicePtr from = rig.Allocate(64);
    const DevicePtr to = rig.Allocate(64);
    rig.LaunchCopy(to, from, 16, stream);
    rig.Wait(stream);
    Rig::Expect(rig.api.MemFree(from));
    Rig::Expect(rig.api.MemFree(to));
  }
  Rig::Expect(rig.api.ModuleUnload(rig.module()));
}

// --- Several GPUs ---

TEST(FakeDriverGpusTest, AreApart) {
  Rig rig(TestSeed(), 2);
  int count = 0;
  Rig::Expect(rig.api.DeviceGetCount(&count));
  EXPECT_EQ(count, 2);
  Device device = -1;
  EXPECT_NE(rig.api.DeviceGet(&device, 2), kOk);
  const Stream first = rig.NewStream();
  const DevicePtr of_first = rig.Allocate(64);
  rig.Use(1);
  const Stream second = rig.NewStream();
  const DevicePtr of_second = rig.Allocate(64);
  EXPECT_EQ(rig.api.MemsetD8Async(of_second, 0, 4, second), kOk);
  EXPECT_EQ(rig.api.MemsetD8Async(of_first, 0, 4, second), Result::kInvalidValue);
  EXPECT_EQ(rig.api.MemcpyDtoDAsync(of_second, of_first, 4, second), Result::kInvalidValue);
  EXPECT_EQ(rig.Launch("write", WriteArgs{}, second, 1, /*gpu=*/0), kInvalidHandle)
      << "a function of the other GPU";
  EXPECT_EQ(rig.api.EventRecord(rig.NewEvent(), first), kInvalidHandle) << "an event of the other";
  size_t free = 0;
  size_t total = 0;
  Rig::Expect(rig.api.MemGetInfo(&free, &total));
  EXPECT_EQ(free, total - 64);
  Rig::Expect(rig.api.CtxSynchronize());
}

TEST(FakeDriverGpusTest, ShareAChunkToWhichBothHaveAccess) {
  Rig rig(TestSeed(), 2);
  AllocationHandle handle = 0;
  const DevicePtr shared = rig.MapChunk(&handle, 0, {0, 1});
  const Stream first = rig.NewStream();
  Rig::Expect(rig.api.MemsetD8Async(shared, 1, 4, first));
  const Event event = rig.NewEvent();
  Rig::Expect(rig.api.EventRecord(event, first));
  rig.Use(1);
  const Stream second = rig.NewStream();
  Rig::Expect(rig.api.StreamWaitEvent(second, event, 0));
  const DevicePtr own = rig.Allocate(4);
  Rig::Expect(rig.api.MemcpyDtoDAsync(own, shared, 4, second));
  EXPECT_EQ(rig.Download(own, 1, second)[0], 0x01010101u);
  // Access can be taken back.
  AccessDescription access;
  access.location.id = 1;
  access.access = Access::kNone;
  Rig::Expect(rig.api.MemSetAccess(shared, kChunk, &access, 1));
  EXPECT_EQ(rig.api.MemcpyDtoDAsync(own, shared, 4, second), Result::kInvalidValue);
  EXPECT_EQ(rig.api.MemsetD8Async(shared, 1, 4, first), kOk);
  rig.Wait(first);
}

TEST_F(FakeDriverDeathTest, AKernelThatIsGivenMemoryOfAnotherGpuIsReported) {
  EXPECT_DEATH(
      {
        Rig rig(TestSeed(), 2);
        WriteArgs args;
        args.word = reinterpret_cast<uint32_t*>(rig.Allocate(4));
        rig.Use(1);
        rig.Launch("write", args, rig.NewStream(), 1, /*gpu=*/1);
      },
      "kernel write on GPU 1 is given memory to which that GPU has no access");
}

// --- Contexts, modules, graphs ---

TEST(FakeDriverContextTest, IsNeededAndEndsWithItsLastOwner) {
  Rig rig;
  Context context = nullptr;
  Rig::Expect(rig.api.DevicePrimaryCtxRetain(&context, 0));
  Rig::Expect(rig.api.DevicePrimaryCtxRelease(0));
  DevicePtr pointer = 0;
  EXPECT_EQ(rig.api.MemAlloc(&pointer, 4), kOk);
  Result elsewhere = kOk;
  std::thread([&] { elsewhere = rig.api.MemAlloc(&pointer, 4); }).join();
  EXPECT_EQ(elsewhere, kInvalidContext) << "a context is current on one thread";
  Rig::Expect(rig.api.DevicePrimaryCtxRelease(0));
  EXPECT_EQ(rig.api.MemAlloc(&pointer, 4), kInvalidContext);
  EXPECT_EQ(rig.api.CtxSetCurrent(context), kInvalidContext);
  EXPECT_EQ(rig.api.DevicePrimaryCtxRelease(0), kInvalidContext);
}

TEST(FakeDriverContextTest, HandlesOfAnEarlierDriverAreNoneOfALaterOnes) {
  const Api api = FakeDriver::api();
  Stream stream = nullptr;
  {
    Rig rig;
    stream = rig.NewStream();
  }
  int count = 0;
  EXPECT_EQ(api.DeviceGetCount(&count), Result::kDeinitialized);
  Rig rig;
  EXPECT_EQ(rig.api.StreamQuery(stream), kInvalidHandle);
}

TEST(FakeDriverModuleTest, HasTheKernelsOfTheList) {
  Rig rig;
  Function function = nullptr;
  EXPECT_EQ(rig.api.ModuleGetFunction(&function, rig.module(), "kopy"), kNotFound);
  function = rig.Find("copy");
  Rig::Expect(rig.api.ModuleUnload(rig.module()));
  CopyArgs args;
  void* params[] = {&args};
  EXPECT_EQ(rig.api.LaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, rig.NewStream(), params, nullptr),
            kInvalidHandle);
}

TEST(FakeDriverModuleTest, AKernelTakesTheThreadsThatItIsMadeFor) {
  Rig rig;
  const Stream stream = rig.NewStream();
  WriteArgs write;
  write.word = rig.AllocatePinned(1);
  EXPECT_EQ(rig.Launch("write", write, stream, 129), Result::kInvalidValue);
  EXPECT_EQ(rig.Launch("write", write, stream, 0), Result::kInvalidValue);
  EXPECT_EQ(rig.Launch("write", write, stream, 128), kOk);
  RollCallArgs call;
  call.came = rig.AllocatePinned(9);
  call.scratch = rig.AllocatePinned(8);
  EXPECT_EQ(rig.Launch("roll_call_of_one", call, stream, 8), kOk);
  rig.Wait(stream);
  EXPECT_EQ(call.came[0], 1u);
}

TEST(FakeDriverGraphTest, NodesRunInAnyOrderThatTheirDependenciesAllow) {
  // b = a copied, beside it c = a copied; then d = c copied. Without the last edge d is often
  // wrong.
  int wrong = 0;
  for (int i = 0; i < kSeeds; ++i) {
    for (const bool edge : {true, false}) {
      Rig rig(TestSeed() + static_cast<uint64_t>(i));
      const Stream stream = rig.NewStream();
      const DevicePtr a = rig.Allocate(4);
      const DevicePtr c = rig.Allocate(4);
      const DevicePtr d = rig.Allocate(4);
      Rig::Expect(rig.api.MemsetD8Async(a, 1, 4, stream));
      Graph graph = nullptr;
      Rig::Expect(rig.api.GraphCreate(&graph, 0));
      const auto add = [&](DevicePtr to, DevicePtr from, std::vector<GraphNode> after) {
        CopyArgs args;
        args.from = reinterpret_cast<const uint32_t*>(from);
        args.to = reinterpret_cast<uint32_t*>(to);
        args.words = 1;
        void* params[] = {&args};
        KernelNodeParams node;
        node.function = rig.Find("copy");
        node.kernel_params = params;
        GraphNode made = nullptr;
        Rig::Expect(rig.api.GraphAddKernelNode(&made, graph, after.data(), after.size(), &node));
        return made;
      };
      const GraphNode to_c = add(c, a, {});
      const GraphNode to_d =
          add(d, c, edge ? std::vector<GraphNode>{to_c} : std::vector<GraphNode>{});
      GraphExec exec = nullptr;
      Rig::Expect(rig.api.GraphInstantiate(&exec, graph, 0));
      Rig::Expect(rig.api.GraphLaunch(exec, stream));
      Rig::Expect(rig.api.GraphExecDestroy(exec));
      Rig::Expect(rig.api.GraphDestroy(graph));
      EXPECT_EQ(rig.api.GraphLaunch(exec, stream), kInvalidHandle);
      EXPECT_NE(to_c, to_d);
      const bool right = rig.Download(d, 1, stream)[0] == 0x01010101;
      EXPECT_TRUE(right || !edge);
      wrong += !right;
    }
  }
  EXPECT_GT(wrong, kSeeds / 8);
}

TEST(FakeDriverGraphTest, ACaptureAddsNodesInTheStreamsOrder) {
  for (int i = 0; i < kSeeds; ++i) {
    Rig rig(TestSeed() + static_cast<uint64_t>(i));
    const Stream stream = rig.NewStream();
    const DevicePtr memory = rig.Allocate(4);
    Graph graph = nullptr;
    Rig::Expect(rig.api.GraphCreate(&graph, 0));
    Rig::Expect(rig.api.StreamBeginCaptureToGraph(stream, graph, nullptr, nullptr, 0,
                                                  CaptureMode::kThreadLocal));
    for (unsigned char n = 1; n <= 4; ++n) {
      Rig::Expect(rig.api.MemsetD8Async(memory, n, 4, stream));
    }
    EXPECT_EQ(rig.api.StreamSynchronize(stream), kCaptureUnsupported);
    EXPECT_EQ(rig.api.EventRecord(rig.NewEvent(), stream), kCaptureUnsupported);
    Graph captured = nullptr;
    Rig::Expect(rig.api.StreamEndCapture(stream, &captured));
    EXPECT_EQ(captured, graph);
    EXPECT_EQ(rig.Download(memory, 1, stream)[0], FakeMemory::kFresh);
    GraphExec exec = nullptr;
    Rig::Expect(rig.api.GraphInstantiate(&exec, graph, 0));
    Rig::Expect(rig.api.GraphLaunch(exec, stream));
    EXPECT_EQ(rig.Download(memory, 1, stream)[0], 0x04040404u);
  }
}

// --- Faults ---

TEST(FakeDriverFaultTest, TheCallThatIsToFailDoes) {
  Rig rig;
  rig.driver().FailNext("cuMemAlloc", Result::kOutOfMemory, 2);
  rig.driver().FailNext("cuMemAlloc", Result::kUnknown);
  EXPECT_EQ(rig.driver().faults_left(), 2);
  DevicePtr pointer = 0;
  std::vector<Result> results;
  for (int n = 0; n < 5; ++n) results.push_back(rig.api.MemAlloc(&pointer, 4));
  EXPECT_THAT(results, ElementsAre(kOk, kOk, Result::kOutOfMemory, Result::kUnknown, kOk));
  EXPECT_EQ(rig.driver().faults_left(), 0);
  // A call that fails does nothing.
  const Stream stream = rig.NewStream();
  rig.driver().FailNext("cuStreamWriteValue32", Result::kIllegalAddress);
  uint32_t* const word = rig.AllocatePinned(1);
  const auto flag = reinterpret_cast<uint64_t>(word);
  EXPECT_EQ(rig.api.StreamWriteValue32(stream, flag, 1, 0), Result::kIllegalAddress);
  rig.Wait(stream);
  EXPECT_EQ(*word, 0u);
}

TEST_F(FakeDriverDeathTest, AFaultOfAnUnknownFunctionAndASecondDriverAreReported) {
  EXPECT_DEATH(
      {
        Rig rig;
        rig.driver().FailNext("cuMemAlloc_v2", Result::kUnknown);
      },
      "no function cuMemAlloc_v2");
  EXPECT_DEATH(
      {
        Rig rig;
        Rig another;
      },
      "there is one already");
}

}  // namespace
}  // namespace cuda
}  // namespace chorus
