// The lines of the daemon's log that clients cause: sessions that come and go, failures, breaches
// of the attach protocol.
//
// Each tenant may cause so many a second, and what is more is counted in a line of its own: a
// client that fails in a loop fills no disk.
//
// Threads: thread-safe. Nothing is written under its lock. Ownership: it keeps a count for each
// tenant that has said something lately, and no line. Errors: none.
#ifndef CHORUS_SERVER_TENANT_LOG_H_
#define CHORUS_SERVER_TENANT_LOG_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "glog/logging.h"
#include "server/line_budget.h"

namespace chorus::server {

// The tenant that processes of a user act for: "uid:1000".
std::string TenantOf(uid_t uid);

class TenantLog {
 public:
  // Writes a line; from any thread.
  using Write = std::function<void(google::LogSeverity severity, absl::string_view tenant,
                                   absl::string_view line)>;
  // `write` null: as any other line of the daemon's. `clock` goes on evenly.
  explicit TenantLog(Write write, std::function<absl::Time()> clock = &SteadyNow);

  // `tenant` empty: nobody that is known.
  void Say(google::LogSeverity severity, absl::string_view tenant, absl::string_view line);

 private:
  static constexpr size_t kForgetAt = 64;

  // Of one tenant that were too many.
  struct LeftOut {
    std::string tenant;
    int64_t lines;
  };
  std::vector<LeftOut> ForgetIdle(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SayLeftOut(absl::string_view tenant, int64_t lines) const;

  const Write write_;
  const std::function<absl::Time()> clock_;
  Mutex mutex_;
  absl::flat_hash_map<std::string, LineBudget> budgets_ ABSL_GUARDED_BY(mutex_);
  size_t forget_at_ ABSL_GUARDED_BY(mutex_) = kForgetAt;  // so many of them: those that are idle go
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_TENANT_LOG_H_
