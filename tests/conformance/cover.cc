#include "tests/conformance/cover.h"

#include <cstddef>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace chorus {
namespace conformance {
namespace {

using Pair = std::tuple<size_t, int, size_t, int>;

std::vector<Pair> PairsOf(const Combination& combination) {
  std::vector<Pair> pairs;
  for (size_t a = 0; a < combination.size(); ++a) {
    for (size_t b = a + 1; b < combination.size(); ++b) {
      pairs.emplace_back(a, combination[a], b, combination[b]);
    }
  }
  return pairs;
}

}  // namespace

std::vector<Combination> EveryCombination(const std::vector<int>& levels) {
  std::vector<Combination> all = {{}};
  for (const int count : levels) {
    std::vector<Combination> longer;
    for (const Combination& combination : all) {
      for (int level = 0; level < count; ++level) {
        longer.push_back(combination);
        longer.back().push_back(level);
      }
    }
    all = std::move(longer);
  }
  return all;
}

std::vector<Combination> EveryPair(const std::vector<int>& levels) {
  const std::vector<Combination> all = EveryCombination(levels);
  std::set<Pair> left;
  for (const Combination& combination : all) {
    for (const Pair& pair : PairsOf(combination)) left.insert(pair);
  }
  // The combination with the most pairs that are still missing, again and again; of several the one
  // whose pairs have been had least: else the last ones would all have the first levels of factors
  // that are covered.
  std::vector<Combination> cover;
  std::map<Pair, int> had;
  while (!left.empty()) {
    const Combination* best = nullptr;
    std::pair<int, int> best_score;
    for (const Combination& combination : all) {
      std::pair<int, int> score = {0, 0};
      for (const Pair& pair : PairsOf(combination)) {
        score.first += static_cast<int>(left.count(pair));
        score.second -= had[pair];
      }
      if (best != nullptr && score <= best_score) continue;
      best = &combination;
      best_score = score;
    }
    for (const Pair& pair : PairsOf(*best)) {
      left.erase(pair);
      ++had[pair];
    }
    cover.push_back(*best);
  }
  return cover;
}

}  // namespace conformance
}  // namespace chorus
