// The suite without a transport: every combination of its matrix, on every backend.
#include "tests/conformance/conformance.h"
#include "tests/conformance/direct_cluster.h"

namespace chorus {
namespace conformance {
namespace {

const auto kClusters = ::testing::Values(
    ConformanceParam{"Host", DirectCluster(BackendKind::kHost), ConformanceParam::kEverything},
    ConformanceParam{"HostUnshared", WithoutSharing(DirectCluster(BackendKind::kHost))},
    ConformanceParam{"Sim", DirectCluster(BackendKind::kSim), ConformanceParam::kEverything});

INSTANTIATE_TEST_SUITE_P(Direct, Conformance, kClusters, ConformanceName);
INSTANTIATE_TEST_SUITE_P(Direct, ConformanceInside, kClusters, ConformanceName);

}  // namespace
}  // namespace conformance
}  // namespace chorus
