// The suite over one gRPC stream a session, on a Unix socket.
#include "tests/conformance/conformance.h"
#include "tests/conformance/daemon_cluster.h"

namespace chorus {
namespace conformance {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Stream, Conformance,
    ::testing::Values(ConformanceParam{"Host", DaemonCluster(BackendKind::kHost, Transport::kStream,
                                                             Wire::kUnix)},
                      ConformanceParam{"Sim", DaemonCluster(BackendKind::kSim, Transport::kStream,
                                                            Wire::kUnix)}),
    ConformanceName);

}  // namespace
}  // namespace conformance
}  // namespace chorus
