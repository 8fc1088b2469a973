#include "core/base/counting_malloc.h"

#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>

#include "gtest/gtest.h"

namespace chorus {
namespace {

// More than it was asked for a block may be by its alignment, or by a page.
constexpr int64_t kBytes = 100000;
constexpr int64_t kMore = 8192;

// What nothing may know it to be: a compiler leaves blocks out that nobody uses.
template <typename T>
T* Used(T* block) {
  asm volatile("" : "+r"(block) : : "memory");
  return block;
}

TEST(CountingMallocTest, EachWayToAllocateIsCounted) {
  void* (*const ways[])() = {
      [] { return malloc(kBytes); },
      [] { return calloc(10, kBytes / 10); },
      [] { return realloc(Used(malloc(3 * kBytes)), kBytes); },
      [] { return aligned_alloc(64, kBytes / 64 * 64 + 64); },
      [] {
        void* block = nullptr;
        return posix_memalign(&block, 4096, kBytes) == 0 ? block : nullptr;
      },
  };
  for (const auto& way : ways) {
    const MallocUse use;
    void* const block = Used(way());
    ASSERT_NE(block, nullptr) << &way - ways;
    EXPECT_GE(use.bytes(), kBytes) << &way - ways;
    EXPECT_LE(use.bytes(), kBytes + kMore) << &way - ways;
    free(block);
    EXPECT_EQ(use.bytes(), 0) << &way - ways;
    EXPECT_GE(use.most_bytes(), kBytes) << &way - ways;
  }
}

TEST(CountingMallocTest, NewIsCountedToo) {
  struct alignas(256) Wide {
    char bytes[kBytes];
  };
  const MallocUse use;
  auto* const wide = Used(new Wide);
  auto* const plain = Used(new char[kBytes]);
  EXPECT_GE(use.bytes(), 2 * kBytes);
  delete wide;
  EXPECT_GE(use.bytes(), kBytes);
  delete[] plain;
  EXPECT_EQ(use.bytes(), 0);
  EXPECT_GE(use.most_bytes(), 2 * kBytes);
  // Of the last that was made.
  const MallocUse later;
  EXPECT_EQ(later.most_bytes(), 0);
}

TEST(CountingMallocTest, AThreadCountsItsOwn) {
  std::thread([] {
    const MallocUse use;
    int64_t others = -1;
    std::thread([&others] {
      const MallocUse mine;
      free(Used(malloc(kBytes)));
      others = mine.most_bytes();
    }).join();
    EXPECT_GE(others, kBytes);
    EXPECT_LT(use.most_bytes(), kBytes);
  }).join();
}

}  // namespace
}  // namespace chorus
