// The suite without a transport, on devices that a worker process has.
#include <cstdlib>
#include <vector>

#include "tests/conformance/conformance.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/every_backend.h"

namespace chorus {
namespace conformance {
namespace {

// The host's memory is the daemon's own: no worker has it. Of sim all with --long; else the one
// that has devices of one domain and of several.
std::vector<ConformanceParam> Params() {
  std::vector<ConformanceParam> params;
  for (const TestBackend& test : TestBackends()) {
    const bool is_asked_for =
        std::getenv("CHORUS_LONG") != nullptr ? test.backend == "sim" : test.name == "sim_pairs";
    if (is_asked_for) params.push_back(OnBackend(test, WorkerCluster));
  }
  return params;
}

INSTANTIATE_TEST_SUITE_P(Worker, Conformance, ::testing::ValuesIn(Params()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Worker, ConformanceInside, ::testing::ValuesIn(Params()), ConformanceName);

}  // namespace
}  // namespace conformance
}  // namespace chorus
