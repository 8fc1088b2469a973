#include "benchmarks/idle_sessions.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/process.h"
#include "benchmarks/timed_loop.h"
#include "chorus/chorus.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {

absl::StatusOr<std::unique_ptr<IdleSessions>> IdleSessions::Start(const ScratchDirectory& scratch,
                                                                  const Daemon& daemon) {
  auto sessions = std::make_unique<IdleSessions>();
  CHORUS_ASSIGN_OR_RETURN(sessions->helper_, HelperGroup::Create(scratch, "idle_sessions", 1));
  CHORUS_ASSIGN_OR_RETURN(Process process,
                          Process::Start({"/proc/self/exe", "--helper=idle_sessions",
                                          absl::StrCat("--control=", sessions->helper_->path()),
                                          absl::StrCat("--address=", daemon.address())},
                                         {}));
  sessions->helper_->Own(std::move(process));
  CHORUS_RETURN_IF_ERROR(sessions->helper_->AwaitHellos());
  return sessions;
}

absl::StatusOr<std::vector<double>> IdleSessions::Open(int sessions) {
  Task task;
  task.op = "open";
  return helper_->Sample(task, sessions);
}

int RunIdleSessionsHelper(const std::string& control_path, const std::string& address) {
  std::vector<Session> sessions;
  return RunHelper(control_path, 0, [&](const Task& task) {
    return TimedLoop(task, [&]() -> absl::Status {
      SessionOptions options;
      options.address = address;
      options.transport = Transport::kRing;
      CHORUS_ASSIGN_OR_RETURN(Session session, Session::Open(options));
      sessions.push_back(std::move(session));
      return absl::OkStatus();
    });
  });
}

}  // namespace bench
}  // namespace chorus
