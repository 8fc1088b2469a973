#include "core/backend/cuda/gpu_pool.h"

#include "core/backend/cuda/testing/fake_gpu.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using cuda::Result;

TEST(GpuPoolTest, WhatIsGivenBackIsTakenAgainWhereItIsLargeEnough) {
  testing::FakeGpu gpu;
  GpuPool pool(gpu.get());
  GpuPool::Slab* const small = *pool.TakeSlab(10);
  GpuPool::Slab* const large = *pool.TakeSlab(1 << 20);
  EXPECT_NE(small->host.host, large->host.host);
  EXPECT_GE(large->bytes, 1 << 20);
  pool.GiveBack(small);
  EXPECT_NE(*pool.TakeSlab(small->bytes + 1), small);
  EXPECT_EQ(*pool.TakeSlab(small->bytes), small);
  pool.GiveBack(large);
  EXPECT_EQ(*pool.TakeSlab(5), large);

  const cuda::Event event = *pool.TakeEvent();
  EXPECT_NE(*pool.TakeEvent(), event);
  pool.GiveBack(event);
  EXPECT_EQ(*pool.TakeEvent(), event);
}

TEST(GpuPoolTest, WhatTheDriverRefusesLeavesNothing) {
  testing::FakeGpu gpu;
  GpuPool pool(gpu.get());
  for (const char* const call : {"cuMemHostAlloc", "cuMemAlloc"}) {
    gpu.driver().FailNext(call, Result::kOutOfMemory);
    EXPECT_FALSE(pool.TakeSlab(10).ok()) << call;
  }
  gpu.driver().FailNext("cuEventCreate", Result::kOutOfMemory);
  EXPECT_FALSE(pool.TakeEvent().ok());
  EXPECT_EQ(gpu.driver().faults_left(), 0);
  EXPECT_TRUE(pool.TakeSlab(10).ok());
  EXPECT_TRUE(pool.TakeEvent().ok());
}

}  // namespace
}  // namespace chorus
