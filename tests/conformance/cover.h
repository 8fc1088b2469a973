// Which combinations of a matrix are tried.
#ifndef CHORUS_TESTS_CONFORMANCE_COVER_H_
#define CHORUS_TESTS_CONFORMANCE_COVER_H_

#include <vector>

namespace chorus {
namespace conformance {

// Factor k has levels 0 to levels[k]-1; a combination names one level of each.
using Combination = std::vector<int>;

// Every combination, the last factor fastest.
std::vector<Combination> EveryCombination(const std::vector<int>& levels);

// Few combinations in which each two levels of different factors meet.
std::vector<Combination> EveryPair(const std::vector<int>& levels);

// A matrix of which each test tries one level of factor 0.
class Matrix {
 public:
  explicit Matrix(const std::vector<int>& levels)
      : every_(EveryCombination(levels)), pairs_(EveryPair(levels)) {}

  // Its combinations: every one, or those of EveryPair.
  std::vector<Combination> Of(int level, bool everything) const;

 private:
  const std::vector<Combination> every_;
  const std::vector<Combination> pairs_;
};

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_COVER_H_
