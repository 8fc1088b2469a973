#include "tests/conformance/cover.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace conformance {
namespace {

using testing::ElementsAre;

TEST(CoverTest, EveryCombinationOfTwoFactors) {
  EXPECT_THAT(EveryCombination({2, 3}),
              ElementsAre(ElementsAre(0, 0), ElementsAre(0, 1), ElementsAre(0, 2),
                          ElementsAre(1, 0), ElementsAre(1, 1), ElementsAre(1, 2)));
}

TEST(CoverTest, EveryPairMeetsInFewCombinations) {
  const std::vector<int> levels = {8, 5, 7, 3, 2};
  const std::vector<Combination> cover = EveryPair(levels);
  EXPECT_GE(cover.size(), 56u);
  EXPECT_LE(cover.size(), 80u);
  for (size_t a = 0; a < levels.size(); ++a) {
    for (size_t b = a + 1; b < levels.size(); ++b) {
      std::set<std::pair<int, int>> met;
      for (const Combination& combination : cover) met.insert({combination[a], combination[b]});
      EXPECT_EQ(met.size(), static_cast<size_t>(levels[a] * levels[b])) << a << " and " << b;
    }
  }
}

TEST(CoverTest, AMatrixHasSomeOfEachLevel) {
  const std::vector<int> levels = {16, 5, 4, 2};
  const Matrix matrix(levels);
  size_t of_pairs = 0;
  for (int level = 0; level < 16; ++level) {
    const std::vector<Combination> some = matrix.Of(level, /*everything=*/false);
    EXPECT_GE(some.size(), 5u);
    for (const Combination& combination : some) EXPECT_EQ(combination[0], level);
    of_pairs += some.size();
    EXPECT_EQ(matrix.Of(level, /*everything=*/true).size(), 40u);
  }
  EXPECT_EQ(of_pairs, EveryPair(levels).size());
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
