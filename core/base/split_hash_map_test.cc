#include "core/base/split_hash_map.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "gtest/gtest.h"

namespace chorus {
namespace {

int64_t hashed = 0;  // each entry that is moved is hashed

struct Key {
  int64_t number = 0;
  friend bool operator==(const Key& a, const Key& b) { return a.number == b.number; }
  template <typename H>
  friend H AbslHashValue(H h, const Key& key) {
    ++hashed;
    return H::combine(std::move(h), key.number);
  }
};

constexpr int64_t kEntries = 100000;

TEST(SplitHashMapTest, OneMoreEntryMovesNoMoreThanAPart) {
  constexpr auto kMostOfPart = static_cast<int64_t>(SplitHashMap<Key, int64_t>::kMostOfPart);
  SplitHashMap<Key, int64_t> map;
  int64_t most = 0;
  for (int64_t i = 0; i < kEntries; ++i) {
    hashed = 0;
    ASSERT_TRUE(map.Emplace({i}, 2 * i).second);
    most = std::max(most, hashed);
  }
  // Which part an entry goes to, its place there, and that asserted.
  EXPECT_LE(most, 3 * kMostOfPart + 16);
  EXPECT_EQ(map.size(), static_cast<size_t>(kEntries));
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
