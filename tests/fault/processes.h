// The processes of a fault test, as the test sees them: trainers, the daemon, and a look into it.
//
// Threads: the test's own. Every wait has a deadline: kPatience, far beyond anything that is meant
// to happen; what it ends with is an error that says what was waited for.
#ifndef CHORUS_TESTS_FAULT_PROCESSES_H_
#define CHORUS_TESTS_FAULT_PROCESSES_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "benchmarks/process.h"
#include "chorus/v1/diagnostics.pb.h"
#include "core/base/unique_fd.h"
#include "grpcpp/channel.h"

namespace chorus {
namespace fault {

inline constexpr absl::Duration kPatience = absl::Seconds(60);

// What a trainer said to one command (trainer.cc).
struct Reply {
  bool ok = false;
  std::string line;                          // whole, for messages
  std::map<std::string, std::string> words;  // key=value; "message" has the rest of the line

  std::string word(const std::string& key) const;
  int64_t number(const std::string& key) const;  // -1: none
};
std::ostream& operator<<(std::ostream& os, const Reply& reply);

class Trainer {
 public:
  // Its errors go to the file `log`. Its wall clock, a year late at first, is set by `wall_step`
  // whenever it looks.
  static absl::StatusOr<std::unique_ptr<Trainer>> Start(
      const std::string& log, absl::Duration wall_step = absl::ZeroDuration());

  pid_t pid() const { return pid_; }
  void Send(absl::string_view command);
  // The reply to the command sent before; "at" lines on the way are skipped. A trainer that has
  // ended, or says nothing, gives a reply that is not ok and tells so.
  Reply Receive();
  Reply Ask(absl::string_view command);
  // Waits for a line "at WHAT".
  absl::Status WaitFor(absl::string_view what);
  void Signal(int signal) { process_.Signal(signal); }
  // Stops it, until SIGCONT; returns when all its threads stand still.
  void Stop() { process_.Stop(); }
  // Waits until it has ended: its exit status, 128 + the signal that killed it.
  absl::StatusOr<int> WaitForEnd();

 private:
  Trainer(bench::Process process, UniqueFd to, UniqueFd from);
  absl::StatusOr<std::string> ReadLine();

  bench::Process process_;
  const pid_t pid_;
  UniqueFd to_;
  UniqueFd from_;
  std::string pending_;
};

class Daemon {
 public:
  struct Options {
    std::string socket;              // path
    std::string log;                 // file
    std::vector<std::string> flags;  // besides --listen
    std::string failpoint;           // CHORUS_FAILPOINT; empty: none
    std::string clock;               // file; a daemon after another goes on with its time
    std::string cgroup;              // folder of the one that it begins in; empty: this process's
  };
  // Returns when it serves.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const Options& options);

  const std::string& address() const { return address_; }
  pid_t pid() const { return process_.pid(); }
  bool Lives();
  void Signal(int signal) { process_.Signal(signal); }
  // Stops it, until SIGCONT; returns when all its threads stand still.
  void Stop() { process_.Stop(); }
  absl::StatusOr<int> WaitForEnd();
  // On its clock, at once: what was due by then has been done when this returns.
  absl::Status LetTimePass(absl::Duration time);
  // Somebody sets its wall clock; that it has seen it when this returns.
  absl::Status SetWallClock(absl::Duration ahead);

  // Over gRPC.
  absl::StatusOr<v1::GetStatsResponse> Stats();
  absl::StatusOr<v1::ListSessionsResponse> Sessions();
  absl::StatusOr<v1::ListPendingResponse> Pending();
  absl::Status Renew(int64_t session);

 private:
  Daemon(bench::Process process, const Options& options, std::shared_ptr<grpc::Channel> channel);

  bench::Process process_;
  const std::string address_;
  // The one of its clocks that the file (clock.cc) has at `offset`.
  absl::Status SetClock(off_t offset, int64_t ahead_nanos);

  const UniqueFd clock_;
  const std::shared_ptr<grpc::Channel> channel_;
};

// Asks until `done` is true. DEADLINE_EXCEEDED: not within kPatience; an error of `done` itself.
absl::Status AskUntil(const std::function<absl::StatusOr<bool>()>& done);

}  // namespace fault
}  // namespace chorus

#endif  // CHORUS_TESTS_FAULT_PROCESSES_H_
