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

// Few combinations in which each two levels of different factors meet; all levels of a factor come
// about as often.
std::vector<Combination> EveryPair(const std::vector<int>& levels);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_COVER_H_
