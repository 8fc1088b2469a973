#include "server/heap.h"

#include <malloc.h>
#include <stdio.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <iostream>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace chorus::server {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kSlack = 2 * kMiB;  // of the test itself

using Block = std::unique_ptr<char[]>;

Block Touched(size_t bytes) {
  Block block(new char[bytes]);
  memset(block.get(), 1, bytes);
  return block;
}
// All used at the same time.
std::vector<Block> Small(int64_t bytes) {
  std::vector<Block> blocks(static_cast<size_t>(bytes >> 12));
  for (Block& block : blocks) block = Touched(4000);
  return blocks;
}

// Another one than the main thread's.
void InAHeapOfItsOwn(const std::function<void()>& work) { std::thread(work).join(); }

class HeapTest : public testing::Test {
 protected:
  void SetUp() override {
    if (mallinfo2().uordblks == 0) {
      std::cout << "skipped: this malloc is not glibc's" << std::endl;
      GTEST_SKIP() << "this malloc is not glibc's";
    }
    BoundHeaps();
    InAHeapOfItsOwn([] { Small(kMiB); });
  }
};

TEST_F(HeapTest, ThereAreAFewHeapsHoweverManyThreads) {
  constexpr int kThreads = 8 * kMaxHeaps;
  std::promise<void> go;
  const std::shared_future<void> gone = go.get_future().share();
  std::atomic<int> ready{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&ready, gone] {
      const Block block = Touched(100);
      ++ready;
      gone.wait();
    });
  }
  while (ready < kThreads) std::this_thread::yield();
  char* text = nullptr;
  size_t size = 0;
  FILE* const file = open_memstream(&text, &size);
  ASSERT_NE(file, nullptr);
  EXPECT_EQ(malloc_info(0, file), 0);
  fclose(file);
  int heaps = 0;
  for (const char* at = text; (at = strstr(at, "<heap nr=")) != nullptr; ++at) ++heaps;
  free(text);
  go.set_value();
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(heaps, 1);
  EXPECT_LE(heaps, kMaxHeaps);
}

TEST_F(HeapTest, KeepsLittleHoweverLargeABlockWas) {
  const int64_t before = AnonymousBytes();
  InAHeapOfItsOwn([] {
    Touched(30 * kMiB);
    Small(30 * kMiB);
  });
  EXPECT_LE(AnonymousBytes(), before + kMaxHeapEndBytes + kSlack);
}

TEST_F(HeapTest, WhatIsFreeBelowAUsedBlockIsGivenBack) {
  HeapTrimmer heaps;
  const int64_t before = AnonymousBytes();
  Block last;
  InAHeapOfItsOwn([&last] {
    std::vector<Block> blocks = Small(30 * kMiB);
    last = std::move(blocks.back());
  });
  EXPECT_GE(AnonymousBytes(), before + 25 * kMiB);
  heaps.Turn();
  EXPECT_LE(AnonymousBytes(), before + kSlack);
}

TEST_F(HeapTest, LooksOftenOnlyWhileMemoryComesAndGoes) {
  HeapTrimmer heaps;
  const absl::Duration idle = heaps.Turn();
  std::vector<Block> used = Small(4 * kMiB);
  EXPECT_LT(heaps.Turn(), idle);
  EXPECT_EQ(heaps.Turn(), idle);
}

// Less than would be trimmed, but more than may lie at a heap's end since before.
void ExpectALittleIsLeftAlone(HeapTrimmer* heaps) {
  const int64_t before = AnonymousBytes();
  Block last;
  InAHeapOfItsOwn([&last] {
    std::vector<Block> blocks = Small(HeapTrimmer::kGrowthBytes / 4 * 3);
    last = std::move(blocks.back());
  });
  heaps->Turn();
  EXPECT_GE(AnonymousBytes(), before + HeapTrimmer::kGrowthBytes / 8);
}

TEST_F(HeapTest, ALittleIsLeftAlone) {
  HeapTrimmer heaps;
  ExpectALittleIsLeftAlone(&heaps);
}

// Memory that is used for long is not looked through again and again.
TEST_F(HeapTest, GrowthCountsFromTheLastTrim) {
  HeapTrimmer heaps;
  const std::vector<Block> used = Small(2 * HeapTrimmer::kGrowthBytes);
  heaps.Turn();
  ExpectALittleIsLeftAlone(&heaps);
}

}  // namespace
}  // namespace chorus::server
