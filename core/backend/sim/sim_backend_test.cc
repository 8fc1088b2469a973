#include "core/backend/sim/sim_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/backend/sim/sim_memory.h"
#include "core/backend/testing/backend_conformance.h"
#include "core/backend/testing/device_rig.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

std::unique_ptr<Backend> OpenSeeded(int devices, HostKernelFactory make_kernel, uint64_t seed,
                                    int devices_per_domain = 1) {
  SimBackendOptions options;
  options.devices_per_domain = devices_per_domain;
  options.devices = devices;
  options.seed = seed;
  options.make_kernel = make_kernel;
  options.memory_bytes = kConformanceMemoryBytes;
  return CreateSimBackend(options);
}

BackendConformanceParam WithDomains(const char* name, int devices_per_domain) {
  return {name, [devices_per_domain](int devices, HostKernelFactory make_kernel) {
            static uint64_t opened = 0;
            return OpenSeeded(devices, make_kernel, TestSeed() + ++opened, devices_per_domain);
          }};
}

INSTANTIATE_TEST_SUITE_P(Sim, BackendConformance,
                         testing::Values(WithDomains("default", 1), WithDomains("one_domain", 64),
                                         WithDomains("pairs", 2)),
                         BackendConformanceName);

// A producer and a consumer on two streams of a device. With the wait between them the consumer
// always sees what was produced.
template <typename Wait>
int WrongResults(int seeds, Wait wait) {
  int wrong = 0;
  for (int i = 0; i < seeds; ++i) {
    DeviceRig rig(OpenSeeded(1, &MakeTestKernel, TestSeed() + i));
    Device* device = rig.backend()->device(0);
    auto consumer = device->CreateStream();
    auto event = device->CreateEvent();
    const std::vector<float> data(16, 3.0f);
    const DeviceAddress produced = rig.Allocate(0, 64);
    const DeviceAddress consumed = rig.Allocate(0, 64);
    rig.stream(0)->CopyFromHost(produced, data.data(), 64);
    rig.stream(0)->Record(event.get());
    wait(consumer.get(), event.get());
    consumer->Copy(consumed, produced, 64);
    EXPECT_TRUE(rig.SynchronizeStream(consumer.get()).ok());
    EXPECT_TRUE(rig.Synchronize(0).ok());
    const std::vector<float> got = rig.Download<float>(0, consumed, 16);
    if (got != data) {
      ++wrong;
      EXPECT_TRUE(std::isnan(got[0])) << "memory that was never written shows";
    }
  }
  return wrong;
}

TEST(SimBackendTest, AMissingWaitShows) {
  EXPECT_EQ(WrongResults(100, [](Stream* stream, Event* event) { stream->Wait(event); }), 0);
  // About half of the orders are wrong; a handful would do.
  EXPECT_GE(WrongResults(100, [](Stream*, Event*) {}), 10);
}

TEST(SimBackendTest, ACollectiveDoesNotWaitForOtherStreamsOfItsDevice) {
  int wrong = 0;
  for (int i = 0; i < 100; ++i) {
    DeviceRig rig(OpenSeeded(2, &MakeTestKernel, TestSeed() + i));
    auto members = rig.OpenAll(1);
    auto compute = rig.backend()->device(0)->CreateStream();
    const float one = 1;
    const DeviceAddress in = rig.Allocate(0, 4);
    const DeviceAddress out = rig.Allocate(0, 4);
    const DeviceAddress peer = rig.Upload(1, std::vector<float>{2});
    compute->CopyFromHost(in, &one, 4);
    // Here a wait of the communication stream for the compute stream is missing.
    ASSERT_TRUE(
        members[0]->Enqueue(rig.AllReduceCall(DType::kF32, 1, in, out), rig.stream(0)).ok());
    ASSERT_TRUE(
        members[1]->Enqueue(rig.AllReduceCall(DType::kF32, 1, peer, peer), rig.stream(1)).ok());
    ASSERT_TRUE(rig.Synchronize(0).ok());
    ASSERT_TRUE(rig.Synchronize(1).ok());
    ASSERT_TRUE(rig.SynchronizeStream(compute.get()).ok());
    if (rig.Download<float>(0, out, 1)[0] != 3) ++wrong;
  }
  EXPECT_GE(wrong, 10);
}

TEST(SimBackendTest, EveryOrderOfIndependentStreamsHappens) {
  std::vector<std::vector<int>> seen;
  for (int i = 0; i < 300 && seen.size() < 6; ++i) {
    DeviceRig rig(OpenSeeded(3, &MakeTestKernel, TestSeed() + i));
    std::vector<int> order;  // written by the backend's one thread
    for (int d = 0; d < 3; ++d) {
      rig.stream(d)->Callback([&order, d](absl::Status) { order.push_back(d); });
    }
    for (int d = 0; d < 3; ++d) ASSERT_TRUE(rig.Synchronize(d).ok());
    if (std::find(seen.begin(), seen.end(), order) == seen.end()) seen.push_back(order);
  }
  EXPECT_EQ(seen.size(), 6u);
}

TEST(SimBackendTest, WorkWithMemoryThatIsFreedForeignOrTooSmallFails) {
  DeviceRig rig(OpenSeeded(2, &MakeTestKernel, TestSeed()));
  const DeviceAddress mine = rig.Upload(0, std::vector<float>{1, 2});
  const DeviceAddress foreign = rig.Upload(1, std::vector<float>{1, 2});
  const auto copy = [&](DeviceAddress to, DeviceAddress from, int64_t bytes) {
    rig.stream(0)->Copy(to, from, bytes);
    return rig.Synchronize(0);
  };
  EXPECT_TRUE(copy(mine, mine + 4, 4).ok());
  EXPECT_EQ(copy(mine, foreign, 4).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(copy(mine, mine, 12).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(copy(mine, 64, 4).code(), absl::StatusCode::kInternal);
  rig.backend()->device(0)->Free(mine);
  EXPECT_EQ(copy(mine, mine, 4).code(), absl::StatusCode::kInternal);
  EXPECT_NE(*rig.backend()->device(0)->Allocate(8), mine) << "addresses are not used twice";
}

TEST(SimBackendTest, ACollectiveOnFreedMemoryFailsOnAllMembersAndBreaksTheCommunicator) {
  DeviceRig rig(OpenSeeded(2, &MakeTestKernel, TestSeed()));
  auto members = rig.OpenAll(1);
  const DeviceAddress freed = rig.Upload(0, std::vector<float>{1});
  rig.backend()->device(0)->Free(freed);
  const DeviceAddress good = rig.Upload(1, std::vector<float>{1});
  const CollectiveCall call = rig.AllReduceCall(DType::kF32, 1, good, good);
  ASSERT_TRUE(
      members[0]->Enqueue(rig.AllReduceCall(DType::kF32, 1, freed, freed), rig.stream(0)).ok());
  ASSERT_TRUE(members[1]->Enqueue(call, rig.stream(1)).ok());
  EXPECT_EQ(rig.Synchronize(0).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(rig.Synchronize(1).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(members[1]->Enqueue(call, rig.stream(1)).code(), absl::StatusCode::kInternal);
}

TEST(SimMemoryTest, FreshMemoryIsNaNAndFreedMemoryIsOverwritten) {
  SimMemory memory(1 << 20, 1);
  const DeviceAddress address = *memory.Allocate(0, 24);
  void* pointer = nullptr;
  ASSERT_TRUE(memory.Resolve(0, address, 24, &pointer).ok());
  float f = 0;
  double d = 0;
  std::memcpy(&f, pointer, sizeof(f));
  std::memcpy(&d, static_cast<char*>(pointer) + 16, sizeof(d));
  EXPECT_TRUE(std::isnan(f));
  EXPECT_TRUE(std::isnan(d));
  memory.Free(0, address);
  EXPECT_EQ(*static_cast<uint8_t*>(pointer), SimMemory::kFreed);
}

TEST(SimMemoryDeathTest, TouchingADeviceAddressFaults) {
  SimMemory memory(1 << 20, 1);
  const DeviceAddress address = *memory.Allocate(0, 4);
  EXPECT_DEATH(*reinterpret_cast<volatile int*>(address) = 1, "");
}

}  // namespace
}  // namespace chorus
