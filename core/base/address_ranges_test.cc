#include "core/base/address_ranges.h"

#include <iostream>
#include <map>
#include <random>

#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(AddressRangesTest, GivesTheSmallestHoleThatHasRoom) {
  AddressRanges ranges(16);
  ranges.Add(0x1000, 256);
  ranges.Add(0x8000, 64);
  EXPECT_EQ(ranges.Take(60), uint64_t{0x8000});
  EXPECT_EQ(ranges.Take(60), uint64_t{0x1000});
  EXPECT_EQ(ranges.taken_bytes(), 120);
  EXPECT_FALSE(ranges.Take(193).has_value());
  EXPECT_EQ(ranges.Take(192), uint64_t{0x1040});
  EXPECT_FALSE(ranges.Take(1).has_value());
}

TEST(AddressRangesTest, HolesThatTouchAreOne) {
  AddressRanges ranges(16);
  ranges.Add(0x1000, 64);
  ranges.Add(0x1040, 64);
  EXPECT_EQ(ranges.HoleBefore(0x1080), 128);
  EXPECT_EQ(ranges.HoleBefore(0x1040), 0);
  const uint64_t first = *ranges.Take(50);
  const uint64_t second = *ranges.Take(50);
  EXPECT_EQ(ranges.GiveBack(first), 50);
  EXPECT_EQ(ranges.GiveBack(first), 0);
  EXPECT_EQ(ranges.GiveBack(second + 1), 0);
  EXPECT_EQ(ranges.GiveBack(second), 50);
  EXPECT_EQ(ranges.Take(128), uint64_t{0x1000});
}

TEST(AddressRangesTest, KnowsWhatLiesInOnePiece) {
  AddressRanges ranges(16);
  ranges.Add(0x1000, 256);
  const uint64_t piece = *ranges.Take(20);
  EXPECT_TRUE(ranges.InOnePiece(piece, 20));
  EXPECT_TRUE(ranges.InOnePiece(piece + 20, 0));
  EXPECT_FALSE(ranges.InOnePiece(piece, 21));
  EXPECT_FALSE(ranges.InOnePiece(piece + (uint64_t{1} << 63) + 4, 4)) << "as far away as can be";
  EXPECT_FALSE(ranges.InOnePiece(piece - 1, 1));
  EXPECT_FALSE(ranges.InOnePiece(piece + 21, 0));
}

// Beside a map of every byte.
TEST(AddressRangesTest, PiecesNeverOverlap) {
  constexpr uint64_t kSeed = 20261126;
  std::cout << "seed " << kSeed << "\n";
  std::mt19937_64 random(kSeed);
  AddressRanges ranges(16);
  std::map<uint64_t, int64_t> live;
  int64_t taken = 0;
  uint64_t end = 0x10000;
  for (int i = 0; i < 20000; ++i) {
    if (live.empty() || random() % 5 < 3) {
      const auto bytes = static_cast<int64_t>(random() % 2000 + 1);
      absl::optional<uint64_t> address = ranges.Take(bytes);
      if (!address.has_value()) {
        ranges.Add(end, 4096);
        end += 4096;
        address = ranges.Take(bytes);
        ASSERT_TRUE(address.has_value());
      }
      ASSERT_EQ(*address % 16, 0u);
      const auto next = live.lower_bound(*address);
      if (next != live.end()) {
        ASSERT_LE(*address + static_cast<uint64_t>(ranges.Rounded(bytes)), next->first);
      }
      if (next != live.begin()) {
        const auto before = std::prev(next);
        ASSERT_LE(before->first + static_cast<uint64_t>(ranges.Rounded(before->second)), *address);
      }
      live[*address] = bytes;
      taken += bytes;
    } else {
      auto it = live.lower_bound(0x10000 + random() % (end - 0x10000 + 1));
      if (it == live.end()) it = live.begin();
      taken -= it->second;
      ASSERT_EQ(ranges.GiveBack(it->first), it->second);
      live.erase(it);
    }
    ASSERT_EQ(ranges.taken_bytes(), taken);
  }
  for (const auto& piece : live) ranges.GiveBack(piece.first);
  EXPECT_EQ(ranges.HoleBefore(end), static_cast<int64_t>(end - 0x10000));
}

}  // namespace
}  // namespace chorus
