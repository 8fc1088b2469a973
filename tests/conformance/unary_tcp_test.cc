// The suite over one gRPC call a command, by TCP: trainers that share no memory with the
// daemon.
#include "tests/conformance/conformance.h"
#include "tests/conformance/daemon_cluster.h"

namespace chorus {
namespace conformance {
namespace {

INSTANTIATE_TEST_SUITE_P(
    UnaryOverTcp, Conformance,
    ::testing::Values(
        ConformanceParam{"Host", DaemonCluster(BackendKind::kHost, Transport::kUnary, Wire::kTcp)},
        ConformanceParam{"Sim", DaemonCluster(BackendKind::kSim, Transport::kUnary, Wire::kTcp)}),
    ConformanceName);

}  // namespace
}  // namespace conformance
}  // namespace chorus
