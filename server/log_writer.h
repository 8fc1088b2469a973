// The daemon's log: a thread that says something never waits for the reader.
//
// glog writes to standard error under a lock. Where that is a pipe and its reader stops, the first
// line that does not fit any more would stop its thread, and then every other that says something.
// So lines go into a queue of bounded size, and a thread that does nothing else writes them. What
// does not fit is left out, and counted in a line of its own. (O_NONBLOCK instead would be for
// every process that shares the pipe, and cut lines.) Where nobody reads, one tenant's lines leave
// room for others'. A line is one line (OneLine): what cannot be printed is escaped, so that no
// text of a client's (a label, a job's name) can look like a line of the daemon's, or tell a
// terminal anything; and what a client may have chosen is cut where it is long.
//
// gRPC has a line for what it cannot parse, before anybody knows whose it is. What it says is held
// to a tenant's bounds (line_budget.h, kMaxClientLineBytes, a share of what waits), but for why it
// ends the process.
//
// Threads: one of its own writes. The rest is thread-safe. Ownership: the descriptor is the
// caller's; lines are copied. Errors: none; what cannot be written is left out.
#ifndef CHORUS_SERVER_LOG_WRITER_H_
#define CHORUS_SERVER_LOG_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "glog/logging.h"

namespace chorus::server {

class LogWriter : public google::LogSink {
 public:
  // Lines go to `fd` (standard error), which stays open; as long as this lives, all of glog's and
  // gRPC's do, and of protobuf's those that end the process: the others tell of clients' messages.
  // glog is initialised, and nobody uses protobuf yet.
  explicit LogWriter(int fd);
  // Waits until what was said is written, a second at most.
  ~LogWriter() override;

  // Of lines that wait to be written; those of one tenant may have ShareOf of them.
  static constexpr int64_t kMaxBytes = 1 << 20;
  // Of one that a client may have caused, escaped; longer ones end in "...".
  static constexpr size_t kMaxClientLineBytes = 2 << 10;

  // A line that `tenant` has caused.
  void Say(google::LogSeverity severity, absl::string_view tenant, absl::string_view line);

  // Waits until what was said before is written, or `patience` is over.
  void Flush(absl::Duration patience);

  void send(google::LogSeverity severity, const char* full_filename, const char* base_filename,
            int line, const google::LogMessageTime& time, const char* message,
            size_t size) override;

 private:
  struct State;
  // Shared with the thread: one that hangs in a write is left behind.
  const std::shared_ptr<State> state_;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_LOG_WRITER_H_
