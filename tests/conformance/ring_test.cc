// The suite over the submission ring: attached trainers of this machine.
#include <string>

#include "tests/conformance/conformance.h"
#include "tests/conformance/daemon_cluster.h"
#include "tests/conformance/every_backend.h"

namespace chorus {
namespace conformance {
namespace {

INSTANTIATE_TEST_SUITE_P(Ring, Conformance,
                         ::testing::ValuesIn(OnEveryBackend([](const std::string& backend) {
                           return DaemonCluster(backend, Transport::kRing, Wire::kUnix);
                         })),
                         ConformanceName);

}  // namespace
}  // namespace conformance
}  // namespace chorus
