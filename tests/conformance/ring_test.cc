// The suite over the submission ring: attached trainers of this machine.
#include "tests/conformance/conformance.h"
#include "tests/conformance/daemon_cluster.h"

namespace chorus {
namespace conformance {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Ring, Conformance,
    ::testing::Values(
        ConformanceParam{"Host", DaemonCluster(BackendKind::kHost, Transport::kRing, Wire::kUnix)},
        ConformanceParam{"Sim", DaemonCluster(BackendKind::kSim, Transport::kRing, Wire::kUnix)}),
    ConformanceName);

}  // namespace
}  // namespace conformance
}  // namespace chorus
