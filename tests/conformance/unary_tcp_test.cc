// The suite over one gRPC call a command, by TCP: trainers that share no memory with the
// daemon.
#include <string>

#include "tests/conformance/conformance.h"
#include "tests/conformance/daemon_cluster.h"
#include "tests/conformance/every_backend.h"

namespace chorus {
namespace conformance {
namespace {

OpenCluster Open(const std::string& backend) {
  return DaemonCluster(backend, Transport::kUnary, Wire::kTcp);
}

INSTANTIATE_TEST_SUITE_P(UnaryOverTcp, Conformance, ::testing::ValuesIn(OnBackendsInTurn(1, Open)),
                         ConformanceName);

}  // namespace
}  // namespace conformance
}  // namespace chorus
