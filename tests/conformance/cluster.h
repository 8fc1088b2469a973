// What the conformance suite runs against: a daemon, however it is reached.
#ifndef CHORUS_TESTS_CONFORMANCE_CLUSTER_H_
#define CHORUS_TESTS_CONFORMANCE_CLUSTER_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "chorus/chorus.h"

namespace chorus {
namespace conformance {

// No wait of a session lasts longer.
constexpr std::chrono::seconds kWaitTimeout(60);

struct ClusterOptions {
  int devices = 1;
  uint64_t seed = 1;  // of sim
  bool share_equal_work = true;
  int64_t memory_limit_bytes = 0;  // 0: as much as the machine has for it
  // On clusters whose devices a worker has: core/backend/fault/fault_script.h.
  std::string fault_script;
  absl::Duration exec_timeout = absl::Seconds(300);  // NodeOptions
  absl::Duration kill_timeout = absl::Seconds(10);
};

// What a daemon has counted since its start, for anybody.
struct ClusterCounts {
  int64_t memory_in_use = -1;  // bytes, now
  int64_t shared_kernels = -1;
  int64_t shared_bytes = -1;
  int64_t donated_bytes = -1;
  int64_t gradients_given_up = -1;
  std::vector<std::string> given_up;  // what the flight record says of them
};

// Threads: Open, from any; the rest from the thread that made it.
class Cluster {
 public:
  virtual ~Cluster() = default;

  // A session that holds these of the cluster's devices, with kWaitTimeout.
  virtual absl::StatusOr<Session> Open(const std::vector<int>& devices) = 0;

  // Only on clusters without a transport:
  // Does what the daemon does when the session's process has died.
  virtual void Kill(const Session& session);
  virtual ClusterCounts Counts();
  // The process that has the devices, on clusters where one has; -1: it is being started again.
  virtual pid_t worker_pid();
};

using OpenCluster = std::function<absl::StatusOr<std::unique_ptr<Cluster>>(const ClusterOptions&)>;

// The same, where each rank does all of its work for itself.
OpenCluster WithoutSharing(OpenCluster open);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_CLUSTER_H_
