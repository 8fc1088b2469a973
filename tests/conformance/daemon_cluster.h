// A daemon in this process, reached as trainers reach it.
#ifndef CHORUS_TESTS_CONFORMANCE_DAEMON_CLUSTER_H_
#define CHORUS_TESTS_CONFORMANCE_DAEMON_CLUSTER_H_

#include <string>

#include "chorus/chorus.h"
#include "tests/conformance/cluster.h"

namespace chorus {
namespace conformance {

enum class Wire { kUnix, kTcp };

OpenCluster DaemonCluster(const std::string& backend, Transport transport, Wire wire);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_DAEMON_CLUSTER_H_
