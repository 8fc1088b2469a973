#include "core/base/split_hash_map.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/counting_heap.h"
#include "core/base/work.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

int64_t hashed = 0;
int64_t copied = 0;
constexpr int64_t kCopiesOfNew = 2;  // an entry that is moved is copied once

struct Key {
  Key(int64_t n) : number(n) {}
  Key(const Key& other) : number(other.number) { ++copied; }
  Key& operator=(const Key&) = delete;
  int64_t number;
  friend bool operator==(const Key& a, const Key& b) { return a.number == b.number; }
  template <typename H>
  friend H AbslHashValue(H h, const Key& key) {
    ++hashed;
    return H::combine(std::move(h), key.number);
  }
};

constexpr int64_t kEntries = 100000;
constexpr int64_t kMostOfPart = 895;

TEST(SplitHashMapTest, OneMoreEntryMovesNoMoreThanAPart) {
  SplitHashMap<Key, int64_t> map;
  int64_t most = 0;
  for (int64_t i = 0; i < kEntries; ++i) {
    copied = 0;
    ASSERT_TRUE(map.Emplace({i}, 2 * i).second);
    most = std::max(most, copied);
  }
  EXPECT_LE(most, kMostOfPart + kCopiesOfNew);
  EXPECT_EQ(map.size(), static_cast<size_t>(kEntries));
}

// Parts are full at about the same time, whatever their number.
TEST(SplitHashMapTest, ManyMoreEntriesMoveAboutAsMany) {
  constexpr int64_t kMany = 1000;
  SplitHashMap<Key, int64_t> map;
  for (int64_t i = 0; i < kEntries; i += kMany) {
    copied = 0;
    hashed = 0;
    for (int64_t more = i; more < i + kMany; ++more) map.Emplace({more}, more);
    EXPECT_LE(copied, (kCopiesOfNew + 1) * kMany + 2 * kMostOfPart) << i;
    EXPECT_EQ(hashed, kMany) << i;  // an entry keeps its hash
  }
}

TEST(SplitHashMapTest, WhatIsMovedIsCountedAsWork) {
  SplitHashMap<Key, int64_t> map;
  const WorkSlice slice;
  copied = 0;
  for (int64_t i = 0; i < kEntries; ++i) map.Emplace({i}, i);
  const int64_t moved = copied - kCopiesOfNew * kEntries;
  EXPECT_GT(moved, kEntries / 2);
  // Half of them, rounded down for each part. The parts themselves have grown before they were
  // whole.
  EXPECT_LE(SliceWork(), moved / 2);
  EXPECT_GE(SliceWork(), moved / 2 - kMostOfPart);
}

// What tables are charged for goes by that (sequencer.cc).
TEST(SplitHashMapTest, ATableThatHasGrownIsAtLeastAThirdFull) {
  using Map = SplitHashMap<int64_t, int64_t>;
  const HeapUse heap;
  Map map;
  for (int64_t i = 0; i < kEntries; ++i) {
    map.Emplace(i, i);
    if (i < kMostOfPart) continue;
    const auto size = static_cast<int64_t>(map.size());
    ASSERT_LE(heap.bytes(), 3 * size * static_cast<int64_t>(sizeof(Map::value_type) + 1)) << size;
  }
}

TEST(SplitHashMapTest, AnEmptyOneKeepsTheRoomOfFewParts) {
  using Map = SplitHashMap<int64_t, int64_t>;
  for (const int64_t entries : {int64_t{2000}, kEntries}) {
    const HeapUse heap;
    Map map;
    for (int64_t i = 0; i < entries; ++i) map.Emplace(i, i);
    const int64_t full = heap.bytes();
    for (int64_t i = 1; i < entries; ++i) map.Erase(i);
    EXPECT_EQ(heap.bytes(), full);
    map.Erase(0);
    const auto part = 1024 * static_cast<int64_t>(sizeof(Map::value_type) + 1) + 64;
    if (entries < kEntries) {
      EXPECT_EQ(heap.bytes(), full);
    }
    EXPECT_LE(heap.bytes(), 8 * part);
    EXPECT_TRUE(map.Emplace(1, 2).second);
    EXPECT_EQ(*map.Find(1), 2);
  }
}

TEST(SplitHashMapTest, FindsWhatIsThereAndNothingElse) {
  SplitHashMap<Key, int64_t> map;
  EXPECT_EQ(map.size(), 0u);
  EXPECT_EQ(map.Find({0}), nullptr);
  for (int64_t i = 0; i < kEntries; ++i) map.Emplace({i}, 2 * i);
  for (int64_t i = 0; i < kEntries; i += 2) map.Erase({i});
  map.Erase({kEntries});
  EXPECT_EQ(map.size(), static_cast<size_t>(kEntries / 2));
  for (int64_t i = 0; i < kEntries; ++i) {
    const int64_t* value = map.Find({i});
    ASSERT_EQ(value != nullptr, i % 2 == 1) << i;
    ASSERT_EQ(map.Contains({i}), i % 2 == 1) << i;
    if (value != nullptr) {
      ASSERT_EQ(*value, 2 * i);
    }
  }
  const auto there = map.Emplace({1}, 7);
  EXPECT_FALSE(there.second);
  EXPECT_EQ(*there.first, 2);
  int64_t entries = 0;
  int64_t sum = 0;
  map.ForEach([&](const Key& key, int64_t value) {
    EXPECT_EQ(value, 2 * key.number);
    ++entries;
    sum += key.number;
  });
  EXPECT_EQ(entries, kEntries / 2);
  EXPECT_EQ(sum, kEntries * kEntries / 4);
}

TEST(SplitHashMapTest, IsForgottenAPartAtATime) {
  SplitHashMap<Key, int64_t> map;
  for (int64_t i = 0; i < kEntries; ++i) map.Emplace({i}, i);
  const size_t parts = map.parts();
  EXPECT_GT(parts, static_cast<size_t>(kEntries / kMostOfPart));
  for (size_t part = 0; part < parts; ++part) {
    const auto before = static_cast<int64_t>(map.size());
    EXPECT_GT(before, 0);
    map.ForgetPart();
    EXPECT_LE(before - static_cast<int64_t>(map.size()), kMostOfPart);
  }
  EXPECT_EQ(map.size(), 0u);
  EXPECT_EQ(map.parts(), 1u);
}

TEST(SplitHashMapTest, ACopyIsItsOwn) {
  SplitHashMap<Key, int64_t> map;
  for (int64_t i = 0; i < kEntries; ++i) map.Emplace({i}, i);
  SplitHashMap<Key, int64_t> copy = map;
  copy.Erase({5});
  EXPECT_TRUE(map.Contains({5}));
  EXPECT_FALSE(copy.Contains({5}));
  map.Clear();
  EXPECT_EQ(map.size(), 0u);
  EXPECT_FALSE(map.Contains({6}));
  EXPECT_EQ(copy.size(), static_cast<size_t>(kEntries - 1));
}

struct Row {
  int64_t key;
};

TEST(SplitHashIndexTest, FindsRowsByTheKeysThatTheyHave) {
  using Index = SplitHashIndex<int64_t>;
  std::vector<Row> rows;
  Index index;
  EXPECT_EQ(index.Find(0, rows), nullptr);
  for (int32_t row = 0; row < kEntries; ++row) {
    rows.push_back({3 * int64_t{row}});
    index.Add(Index::HashOf(rows.back().key), row);
  }
  const Index copy = index;
  for (int32_t row = 0; row < kEntries; row += 2) index.Erase(row, rows);
  EXPECT_EQ(index.size(), static_cast<size_t>(kEntries / 2));
  EXPECT_EQ(copy.size(), static_cast<size_t>(kEntries));
  for (int32_t row = 0; row < kEntries; ++row) {
    const int64_t key = rows[static_cast<size_t>(row)].key;
    const int32_t* const found = index.Find(key, rows);
    ASSERT_EQ(found != nullptr, row % 2 == 1) << row;
    if (found != nullptr) {
      ASSERT_EQ(*found, row);
    }
    ASSERT_EQ(*copy.Find(key, rows), row);
    ASSERT_EQ(index.Find(key + 1, rows), nullptr);
  }
  int64_t sum = 0;
  index.ForEach([&](int32_t row) { sum += row; });
  EXPECT_EQ(sum, kEntries * kEntries / 4);
}

// Entries whose hashes are one.
struct Same {
  int64_t number = 0;
  friend bool operator==(const Same& a, const Same& b) { return a.number == b.number; }
  template <typename H>
  friend H AbslHashValue(H h, const Same&) {
    return H::combine(std::move(h), 1);
  }
};

TEST(SplitHashMapTest, NoHashesAreTooMuchAlike) {
  SplitHashMap<Same, int64_t> map;
  constexpr int64_t kSame = 1000;
  for (int64_t i = 0; i < kSame; ++i) map.Emplace({i}, i);
  EXPECT_EQ(map.size(), static_cast<size_t>(kSame));
  for (int64_t i = 0; i < kSame; ++i) ASSERT_EQ(*map.Find({i}), i);
}

}  // namespace
}  // namespace chorus
