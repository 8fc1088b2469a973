#include "core/base/indexed_vector.h"

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(IndexedVectorTest, ElementsAreFoundByTheIndexThatTheyGotWhenTheyCame) {
  IndexedVector<int32_t, std::string> names;
  EXPECT_TRUE(names.empty());
  const int32_t first = names.push_back("first");
  const int32_t second = names.push_back("second");
  EXPECT_EQ(first, 0);
  EXPECT_EQ(names[first], "first");
  EXPECT_EQ(names[second], "second");
  names[first] = "other";
  const IndexedVector<int32_t, std::string>& same = names;
  EXPECT_EQ(same[first], "other");
  EXPECT_EQ(same.size(), 2u);
}

TEST(IndexedVectorTest, IsMadeOfOneValueAndGrows) {
  IndexedVector<int32_t, bool> flags(3, true);
  flags[1] = false;
  flags.resize(4);
  EXPECT_EQ(std::vector<bool>(flags.begin(), flags.end()),
            (std::vector<bool>{true, false, true, false}));
}

TEST(IndexedVectorTest, GoesThroughItsElementsInTheirOrder) {
  IndexedVector<int32_t, int> numbers(4);
  std::iota(numbers.begin(), numbers.end(), 7);
  int expected = 7;
  for (const int number : numbers) EXPECT_EQ(number, expected++);
  EXPECT_EQ(expected, 11);
}

TEST(IndexedVectorDeathTest, NoIndexReachesBeyondIt) {
  IndexedVector<int32_t, int> numbers(2);
  EXPECT_DEATH(numbers[2] = 1, "Holds");
  EXPECT_DEATH(numbers[-1] = 1, "Holds");
}

}  // namespace
}  // namespace chorus
