// The suite over one gRPC stream a session, on a Unix socket.
#include <string>

#include "tests/conformance/conformance.h"
#include "tests/conformance/daemon_cluster.h"
#include "tests/conformance/every_backend.h"

namespace chorus {
namespace conformance {
namespace {

OpenCluster Open(const std::string& backend) {
  return DaemonCluster(backend, Transport::kStream, Wire::kUnix);
}

INSTANTIATE_TEST_SUITE_P(Stream, Conformance, ::testing::ValuesIn(OnBackendsInTurn(0, Open)),
                         ConformanceName);

}  // namespace
}  // namespace conformance
}  // namespace chorus
