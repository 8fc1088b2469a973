// The suite without a transport, on every backend; on the host's every combination of its matrix.
#include <vector>

#include "tests/conformance/conformance.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/every_backend.h"

namespace chorus {
namespace conformance {
namespace {

std::vector<ConformanceParam> Clusters() {
  std::vector<ConformanceParam> clusters = OnEveryBackend(DirectCluster);
  for (ConformanceParam& cluster : clusters) {
    if (cluster.name == "Host") cluster.cover = ConformanceParam::kEverything;
  }
  clusters.push_back({"HostUnshared", WithoutSharing(DirectCluster("host"))});
  return clusters;
}

INSTANTIATE_TEST_SUITE_P(Direct, Conformance, ::testing::ValuesIn(Clusters()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Direct, ConformanceInside, ::testing::ValuesIn(Clusters()),
                         ConformanceName);

}  // namespace
}  // namespace conformance
}  // namespace chorus
