// The lines of the daemon's log that clients cause: sessions that come and go, failures, breaches
// of the attach protocol.
//
// Each tenant may cause so many a second, and what is more is counted in a line of its own: a
// client that fails in a loop fills no disk.
//
// Threads: thread-safe. Nothing is written under its lock. Ownership: it keeps a count for each
// tenant, and no line. Errors: none.
#ifndef CHORUS_SERVER_TENANT_LOG_H_
#define CHORUS_SERVER_TENANT_LOG_H_

#include <sys/types.h>

#include <functional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
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
  // `write` null: as any other line of the daemon's.
  explicit TenantLog(Write write);

  // `tenant` empty: nobody who is known.
  void Say(google::LogSeverity severity, absl::string_view tenant, absl::string_view line);

 private:
  const Write write_;
  Mutex mutex_;
  absl::flat_hash_map<std::string, LineBudget> budgets_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_TENANT_LOG_H_
