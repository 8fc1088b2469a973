// A node in this process, reached without a transport.
#ifndef CHORUS_TESTS_CONFORMANCE_DIRECT_CLUSTER_H_
#define CHORUS_TESTS_CONFORMANCE_DIRECT_CLUSTER_H_

#include "tests/conformance/backends.h"
#include "tests/conformance/cluster.h"

namespace chorus {
namespace conformance {

OpenCluster DirectCluster(BackendKind backend);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_DIRECT_CLUSTER_H_
