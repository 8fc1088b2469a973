// A node in this process, reached without a transport; its devices are here too, or a worker has
// them.
#ifndef CHORUS_TESTS_CONFORMANCE_DIRECT_CLUSTER_H_
#define CHORUS_TESTS_CONFORMANCE_DIRECT_CLUSTER_H_

#include <string>

#include "tests/conformance/cluster.h"

namespace chorus {
namespace conformance {

OpenCluster DirectCluster(const std::string& backend);
// The worker is worker_program.cc, of which the test has to have the data.
OpenCluster WorkerCluster(const std::string& backend);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_DIRECT_CLUSTER_H_
