#include "server/log_writer.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/utf8.h"
#include "core/runtime/budget.h"
#include "google/protobuf/stubs/logging.h"
#include "grpc/support/log.h"
#include "server/line_budget.h"

namespace chorus::server {
namespace {

constexpr absl::Duration kLastWords = absl::Seconds(1);

// Whose lines gRPC's are: no tenant has such a name.
constexpr absl::string_view kGrpc = "gRPC";

// Protobuf has a line for each message of a client's that is wrong (a string that is no UTF-8): the
// client is told itself, as often as it likes.
void LogOfProtobuf(google::protobuf::LogLevel level, const char* file, int line,
                   const std::string& message) {
  if (level != google::protobuf::LOGLEVEL_FATAL) return;
  google::LogMessage(file, line, google::GLOG_ERROR).stream() << message;
}

// False: nobody will ever read it.
bool WriteAll(int fd, absl::string_view text) {
  while (!text.empty()) {
    const ssize_t size = write(fd, text.data(), text.size());
    if (size >= 0) {
      text.remove_prefix(static_cast<size_t>(size));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      pollfd entry = {fd, POLLOUT, 0};
      poll(&entry, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace

struct LogWriter::State {
  explicit State(int fd) : fd(fd) {}
  // As glog formats it. `tenant`: empty: the daemon's own.
  void Take(absl::string_view tenant, google::LogSeverity severity, const char* file, int number,
            const google::LogMessageTime& time, absl::string_view message);
  // The same of a line that glog has not seen yet: it puts time and thread before it.
  void Say(absl::string_view tenant, google::LogSeverity severity, const char* file, int number,
           absl::string_view line);
  void Flush(absl::Duration patience);
  void Loop();

  // gRPC's log function has no argument for where its lines go.
  struct Grpc {
    Mutex mutex;
    std::shared_ptr<State> state ABSL_GUARDED_BY(mutex);
  };
  static Grpc& grpc() {
    static auto* const grpc = new Grpc;
    return *grpc;
  }
  static void SetGrpc(std::shared_ptr<State> state);
  static void LogOfGrpc(gpr_log_func_args* args);

  const int fd;
  Mutex mutex;
  CondVar changed;
  std::string lines ABSL_GUARDED_BY(mutex);
  absl::flat_hash_map<std::string, int64_t> bytes_of ABSL_GUARDED_BY(mutex);  // tenants in `lines`
  int64_t left_out ABSL_GUARDED_BY(mutex) = 0;
  LineBudget grpc_lines ABSL_GUARDED_BY(mutex);
  bool writing ABSL_GUARDED_BY(mutex) = false;
  bool stop ABSL_GUARDED_BY(mutex) = false;
};

void LogWriter::State::Take(absl::string_view tenant, google::LogSeverity severity,
                            const char* file, int number, const google::LogMessageTime& time,
                            absl::string_view message) {
  const std::string text = OneLine(message, tenant.empty() ? message.npos : kMaxClientLineBytes);
  const std::string line =
      google::LogSink::ToString(severity, file, number, time, text.data(), text.size()) + "\n";
  const int64_t size = static_cast<int64_t>(line.size());
  MutexLock lock(&mutex);
  const auto bytes = bytes_of.find(tenant);
  const int64_t of_tenant = (bytes == bytes_of.end() ? 0 : bytes->second) + size;
  if (static_cast<int64_t>(lines.size()) + size > kMaxBytes ||
      (!tenant.empty() && of_tenant > ShareOf(kMaxBytes))) {
    ++left_out;
    return;
  }
  if (!tenant.empty()) bytes_of[tenant] = of_tenant;
  lines += line;
  changed.SignalAll();
}

void LogWriter::State::Say(absl::string_view tenant, google::LogSeverity severity, const char* file,
                           int number, absl::string_view line) {
  struct Sink : google::LogSink {
    Sink(State* to, absl::string_view tenant_name) : state(to), tenant(tenant_name) {}
    void send(google::LogSeverity how, const char*, const char* base_filename, int at,
              const google::LogMessageTime& time, const char* message, size_t size) override {
      state->Take(tenant, how, base_filename, at, time, absl::string_view(message, size));
    }
    State* const state;
    const absl::string_view tenant;
  };
  Sink sink(this, tenant);
  google::LogMessage(file, number, severity, &sink, /*also_send_to_log=*/false).stream() << line;
}

void LogWriter::State::LogOfGrpc(gpr_log_func_args* args) {
  std::shared_ptr<State> state;
  {
    MutexLock lock(&grpc().mutex);
    state = grpc().state;
  }
  if (state == nullptr) return;
  const google::LogSeverity severity = args->severity == GPR_LOG_SEVERITY_ERROR ? google::GLOG_ERROR
                                       : args->severity == GPR_LOG_SEVERITY_INFO
                                           ? google::GLOG_WARNING
                                           : google::GLOG_INFO;
  // gRPC ends the process next. (What clients have sent stands at no line's beginning.)
  if (absl::StartsWith(args->message, "assertion failed")) {
    state->Say(/*tenant=*/"", severity, args->file, args->line, args->message);
    return state->Flush(kLastWords);
  }
  int64_t left_out = 0;
  {
    MutexLock lock(&state->mutex);
    if (!state->grpc_lines.Take(SteadyNow(), &left_out)) return;
  }
  if (left_out > 0) {
    state->Say(kGrpc, google::GLOG_WARNING, __FILE__, __LINE__,
               absl::StrCat(left_out, " more lines of gRPC were too many for the log"));
  }
  state->Say(kGrpc, severity, args->file, args->line, args->message);
}

void LogWriter::State::SetGrpc(std::shared_ptr<State> state) {
  gpr_set_log_function(state == nullptr ? nullptr : &LogOfGrpc);
  MutexLock lock(&grpc().mutex);
  grpc().state = std::move(state);
}

void LogWriter::State::Flush(absl::Duration patience) {
  const absl::Time deadline = SteadyNow() + patience;
  MutexLock lock(&mutex);
  while (!lines.empty() || left_out > 0 || writing) {
    const absl::Duration left = deadline - SteadyNow();
    if (left <= absl::ZeroDuration()) return;
    changed.WaitFor(&mutex, left);
  }
}

void LogWriter::State::Loop() {
  std::string text;
  mutex.Lock();
  for (;;) {
    writing = false;
    changed.SignalAll();
    while (lines.empty() && left_out == 0 && !stop) changed.Wait(&mutex);
    if (lines.empty() && left_out == 0) break;
    text.clear();
    text.swap(lines);
    bytes_of.clear();
    if (left_out > 0) {
      absl::StrAppend(&text, "chorusd: ", left_out,
                      " lines of the log were left out here: standard error was full\n");
      left_out = 0;
    }
    writing = true;
    mutex.Unlock();
    WriteAll(fd, text);
    mutex.Lock();
  }
  mutex.Unlock();
}

LogWriter::LogWriter(int fd) : state_(std::make_shared<State>(fd)) {
  std::thread([state = state_] { state->Loop(); }).detach();
  // All else that glog does with a line: files, and standard error.
  for (int severity = 0; severity < google::NUM_SEVERITIES; ++severity) {
    google::SetLogDestination(severity, "");
  }
  FLAGS_logtostderr = false;
  FLAGS_stderrthreshold = google::NUM_SEVERITIES;
  google::AddLogSink(this);
  State::SetGrpc(state_);
  google::protobuf::SetLogHandler(&LogOfProtobuf);
}

LogWriter::~LogWriter() {
  google::protobuf::SetLogHandler(nullptr);
  State::SetGrpc(nullptr);
  google::RemoveLogSink(this);
  Flush(kLastWords);
  MutexLock lock(&state_->mutex);
  state_->stop = true;
  state_->changed.SignalAll();
}

void LogWriter::Flush(absl::Duration patience) { state_->Flush(patience); }

void LogWriter::Say(google::LogSeverity severity, absl::string_view tenant,
                    absl::string_view line) {
  state_->Say(tenant, severity, __FILE__, __LINE__, line);
}

void LogWriter::send(google::LogSeverity severity, const char*, const char* base_filename, int line,
                     const google::LogMessageTime& time, const char* message, size_t size) {
  state_->Take(/*tenant=*/"", severity, base_filename, line, time,
               absl::string_view(message, size));
  if (severity != google::GLOG_FATAL) return;
  // glog ends the process next; a full standard error must not keep it from that.
  alarm(5);
  Flush(kLastWords);
}

}  // namespace chorus::server
