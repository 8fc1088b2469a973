// A chorusd of one's own: what a benchmark measures, what golden vectors run on.
#ifndef CHORUS_BENCHMARKS_DAEMON_H_
#define CHORUS_BENCHMARKS_DAEMON_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/process.h"

namespace chorus {
namespace bench {

class Daemon {
 public:
  // Starts `program` with `flags` on a socket in `scratch`; returns when it listens.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const std::string& program,
                                                       const ScratchDirectory& scratch,
                                                       const std::vector<std::string>& flags);
  // SIGTERM; killed if that takes longer than ten seconds.
  ~Daemon();

  const std::string& address() const { return address_; }
  pid_t pid() const { return process_.pid(); }
  // Stops it, as SIGSTOP does; returns when every thread of it stands still, or it has ended.
  void Stop() const { process_.Stop(); }
  // Whether it has not ended, nor ends before `patience_ns` are over.
  bool Lives(int64_t patience_ns = 0);
  // What it has logged so far.
  std::string Log() const { return FileText(log_); }

 private:
  std::string address_;
  std::string log_;
  Process process_;
};

}  // namespace bench
}  // namespace chorus

#endif  // CHORUS_BENCHMARKS_DAEMON_H_
