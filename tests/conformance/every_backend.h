// The suite's parameters: each backend of the suite, reached in one way.
#ifndef CHORUS_TESTS_CONFORMANCE_EVERY_BACKEND_H_
#define CHORUS_TESTS_CONFORMANCE_EVERY_BACKEND_H_

#include <cctype>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "tests/conformance/backends.h"
#include "tests/conformance/cluster.h"
#include "tests/conformance/conformance.h"

namespace chorus {
namespace conformance {

using OpenBackendsCluster = std::function<OpenCluster(const std::string& backend)>;

// "SimPairs" of "sim_pairs": what `open` makes of the name.
inline ConformanceParam OnBackend(const TestBackend& test, const OpenBackendsCluster& open) {
  ConformanceParam param;
  bool capital = true;
  for (const char c : test.name) {
    if (c != '_') param.name += static_cast<char>(capital ? std::toupper(c) : c);
    capital = c == '_';
  }
  param.open = open(test.name);
  param.sharing = test.devices_per_domain;
  return param;
}

inline std::vector<ConformanceParam> OnEveryBackend(const OpenBackendsCluster& open) {
  std::vector<ConformanceParam> params;
  for (const TestBackend& test : TestBackends()) params.push_back(OnBackend(test, open));
  return params;
}

// With --long the same; else each test on one of them, in turn, the first on that with number
// `first`. So this transport meets every test and every backend, but not all of them together.
inline std::vector<ConformanceParam> OnBackendsInTurn(size_t first,
                                                      const OpenBackendsCluster& open) {
  if (std::getenv("CHORUS_LONG") != nullptr) return OnEveryBackend(open);
  ConformanceParam param;
  param.name = "InTurn";
  param.in_turn = OnEveryBackend(open);
  param.first = first;
  return {param};
}

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_EVERY_BACKEND_H_
