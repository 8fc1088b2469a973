#include "tests/conformance/cluster.h"

#include <utility>

#include "gtest/gtest.h"

namespace chorus {
namespace conformance {

void Cluster::Kill(const Session&) { ADD_FAILURE() << "no session dies alone here"; }

ClusterCounts Cluster::Counts() {
  ADD_FAILURE() << "it cannot be asked what it has counted";
  return ClusterCounts();
}

pid_t Cluster::worker_pid() {
  ADD_FAILURE() << "no worker has the devices here";
  return -1;
}

OpenCluster WithoutSharing(OpenCluster open) {
  return [open = std::move(open)](ClusterOptions options) {
    options.share_equal_work = false;
    return open(options);
  };
}

}  // namespace conformance
}  // namespace chorus
