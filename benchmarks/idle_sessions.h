// A process with sessions that ask for nothing. To the daemon they are what as many trainers are:
// the sessions of a process share neither a connection nor memory.
#ifndef CHORUS_BENCHMARKS_IDLE_SESSIONS_H_
#define CHORUS_BENCHMARKS_IDLE_SESSIONS_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/daemon.h"
#include "benchmarks/helper.h"

namespace chorus {
namespace bench {

class IdleSessions {
 public:
  // None so far.
  static absl::StatusOr<std::unique_ptr<IdleSessions>> Start(const ScratchDirectory& scratch,
                                                             const Daemon& daemon);
  // Opens as many more; what each took, in nanoseconds.
  absl::StatusOr<std::vector<double>> Open(int sessions);
  pid_t pid() const { return helper_->pid(0); }

 private:
  std::unique_ptr<HelperGroup> helper_;
};

int RunIdleSessionsHelper(const std::string& control_path, const std::string& address);

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_IDLE_SESSIONS_H_
