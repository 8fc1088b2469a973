#include "core/base/index.h"

#include <cstdint>
#include <type_traits>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "core/base/indexed_vector.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using Chair = Index<struct ChairTag>;
using Table = Index<struct TableTag>;

TEST(IndexTest, CountsAndComparesAsANumber) {
  EXPECT_EQ(Chair(), -1);
  Chair chair = 3;
  EXPECT_EQ(chair++, 3);
  EXPECT_EQ(++chair, 5);
  EXPECT_EQ(chair--, 5);
  EXPECT_EQ(chair.value(), 4);
  EXPECT_TRUE(chair >= 0);
  EXPECT_LT(chair, Chair(5));
  EXPECT_EQ(chair + 2, 6);
  int32_t sum = 0;
  for (Chair i = 0; i < 4; ++i) sum += i;
  EXPECT_EQ(sum, 6);
}

TEST(IndexTest, FindsWhatWasKeptByIt) {
  IndexedVector<Chair, int> legs;
  const Chair stool = legs.push_back(3);
  const Chair bench = legs.push_back(6);
  EXPECT_EQ(legs[stool], 3);
  EXPECT_EQ(legs[bench], 6);
  absl::flat_hash_map<Chair, int> known = {{stool, 3}};
  EXPECT_EQ(known.at(stool), 3);
  EXPECT_FALSE(known.contains(bench));
}

template <typename List, typename I, typename = void>
struct MayBeSubscript : std::false_type {};
template <typename List, typename I>
struct MayBeSubscript<List, I, std::void_t<decltype(std::declval<List>()[std::declval<I>()])>>
    : std::true_type {};

// What the class is for: none of these compiles.
TEST(IndexTest, KindsAreKeptApart) {
  EXPECT_TRUE((std::is_convertible_v<int32_t, Chair>));
  EXPECT_TRUE((std::is_convertible_v<Chair, int32_t>));
  EXPECT_FALSE((std::is_convertible_v<Table, Chair>));
  EXPECT_FALSE((std::is_assignable_v<Chair&, Table>));
  EXPECT_TRUE((MayBeSubscript<IndexedVector<Chair, int>, Chair>::value));
  EXPECT_FALSE((MayBeSubscript<IndexedVector<Chair, int>, Table>::value));
}

}  // namespace
}  // namespace chorus
