// A node in this process, reached without a transport.
#ifndef CHORUS_TESTS_CONFORMANCE_DIRECT_CLUSTER_H_
#define CHORUS_TESTS_CONFORMANCE_DIRECT_CLUSTER_H_

#include <string>

#include "tests/conformance/cluster.h"

namespace chorus {
namespace conformance {

OpenCluster DirectCluster(const std::string& backend);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_DIRECT_CLUSTER_H_
