#include "core/base/block_vector.h"

#include <algorithm>
#include <cstdint>

#include "gtest/gtest.h"

namespace chorus {
namespace {

int64_t moves = 0;

struct Counted {
  Counted() = default;
  Counted(const Counted& other) : value(other.value) { ++moves; }
  Counted(Counted&& other) noexcept : value(other.value) { ++moves; }
  Counted& operator=(const Counted&) = default;

  int64_t value = 0;
};

TEST(BlockVectorTest, OneMoreElementMovesNoMoreThanABlock) {
  constexpr size_t kElements = 10000;
  BlockVector<Counted> list;
  int64_t most = 0;
  for (size_t i = 0; i < kElements; ++i) {
    moves = 0;
    list.emplace_back();
    most = std::max(most, moves);
    list[i].value = static_cast<int64_t>(i);
  }
  EXPECT_LE(most, static_cast<int64_t>(BlockVector<Counted>::kBlock));
  ASSERT_EQ(list.size(), kElements);
  for (size_t i = 0; i < kElements; ++i) ASSERT_EQ(list[i].value, static_cast<int64_t>(i));
}

TEST(BlockVectorTest, ACopyIsItsOwn) {
  BlockVector<int> list;
  for (int i = 0; i < 1000; ++i) {
    list.emplace_back();
    list[static_cast<size_t>(i)] = i;
  }
  BlockVector<int> copy = list;
  copy[700] = 0;
  copy.emplace_back();
  EXPECT_EQ(list[700], 700);
  EXPECT_EQ(copy[999], 999);
  EXPECT_EQ(list.size(), 1000u);
  EXPECT_EQ(copy.size(), 1001u);
}

}  // namespace
}  // namespace chorus
