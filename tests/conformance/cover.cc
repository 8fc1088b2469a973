#include "tests/conformance/cover.h"

#include <cstddef>
#include <set>
#include <tuple>

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
  // The combination with the most pairs that are still missing, again and again. Repeated from a
  // place that moves on, so that levels take turns.
  std::vector<Combination> cover;
  size_t begin = 0;
  while (!left.empty()) {
    size_t best = 0;
    size_t best_count = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      const size_t at = (begin + i) % all.size();
      size_t count = 0;
      for (const Pair& pair : PairsOf(all[at])) count += left.count(pair);
      if (count <= best_count) continue;
      best = at;
      best_count = count;
    }
    for (const Pair& pair : PairsOf(all[best])) left.erase(pair);
    cover.push_back(all[best]);
    begin = best + 1;
  }
  return cover;
}

std::vector<Combination> Matrix::Of(int level, bool everything) const {
  std::vector<Combination> of;
  for (const Combination& combination : everything ? every_ : pairs_) {
    if (combination[0] == level) of.push_back(combination);
  }
  return of;
}

}  // namespace conformance
}  // namespace chorus
