#include "tests/conformance/cases.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "gtest/gtest.h"
#include "tests/conformance/cover.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

// By number of ranks.
std::map<int, std::vector<Case>> CasesOf(const Matrix& matrix, Kind kind, bool everything) {
  std::vector<int> ranks = matrix.ranks;
  if (NeedsTwo(kind)) ranks.erase(std::remove(ranks.begin(), ranks.end(), 1), ranks.end());
  const std::vector<int> levels = {static_cast<int>(ranks.size()),
                                   static_cast<int>(matrix.sizes.size()), matrix.dtypes, 2};
  std::map<int, std::vector<Case>> cases;
  // Between ranks, and with elements.
  std::set<std::pair<int, int64_t>> places;
  std::set<std::pair<int, bool>> forms;
  for (const Combination& c : everything ? EveryCombination(levels) : EveryPair(levels)) {
    const Case one = {matrix.sizes[static_cast<size_t>(c[1])], c[2], c[3] == 1};
    const int of = ranks[static_cast<size_t>(c[0])];
    cases[of].push_back(one);
    if (of < 2 || one.size == 0) continue;
    places.insert({of, one.size});
    forms.insert({one.dtype, one.compiled});
  }
  const auto at_least_two = std::count_if(ranks.begin(), ranks.end(), [](int n) { return n > 1; });
  const auto no_elements = std::count(matrix.sizes.begin(), matrix.sizes.end(), 0);
  EXPECT_EQ(places.size(), static_cast<size_t>(at_least_two) *
                               (matrix.sizes.size() - static_cast<size_t>(no_elements)));
  EXPECT_EQ(forms.size(), static_cast<size_t>(matrix.dtypes * 2));
  return cases;
}

}  // namespace

void CheckCases(const ConformanceParam& param, Kind kind, const Matrix& matrix,
                const CheckCase& check) {
  const bool everything = param.cover == ConformanceParam::kEverything;
  for (const auto& [ranks, cases] : CasesOf(matrix, kind, everything)) {
    Job job(param, ranks);
    job.Run([&, &cases = cases](int rank, World& world) {
      for (const Case& one : cases) {
        check(Place{kind, rank, world.size(), one.size}, world, one);
        if (::testing::Test::HasFailure()) return;
      }
    });
  }
}

}  // namespace conformance
}  // namespace chorus
