#include "tests/conformance/cover.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace conformance {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::Ge;
using testing::Le;

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

// What is left to cover when all but two factors are has no levels of the others that it must have.
TEST(CoverTest, LevelsComeAboutAsOften) {
  const std::vector<int> levels = {5, 10, 4, 2};
  const std::vector<Combination> cover = EveryPair(levels);
  EXPECT_LE(cover.size(), 52u);
  for (size_t a = 0; a < levels.size(); ++a) {
    std::vector<size_t> times(static_cast<size_t>(levels[a]));
    for (const Combination& combination : cover) ++times[static_cast<size_t>(combination[a])];
    const size_t even = cover.size() / times.size();
    EXPECT_THAT(times, Each(AllOf(Ge(even - 2), Le(even + 2)))) << a;
  }
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
