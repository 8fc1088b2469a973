#include "server/log_writer.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/runtime/budget.h"
#include "google/protobuf/stubs/logging.h"
#include "grpc/support/log.h"

namespace chorus {
namespace {

constexpr absl::Duration kLastWords = absl::Seconds(1);

// The one that gRPC's lines go to; its log function has no argument for it.
std::atomic<LogWriter*> grpc_writer{nullptr};

void LogOfGrpc(gpr_log_func_args* args) {
  const google::LogSeverity severity = args->severity == GPR_LOG_SEVERITY_ERROR ? google::GLOG_ERROR
                                       : args->severity == GPR_LOG_SEVERITY_INFO
                                           ? google::GLOG_WARNING
                                           : google::GLOG_INFO;
  google::LogMessage(args->file, args->line, severity).stream() << args->message;
  // gRPC ends the process next.
  LogWriter* const writer = grpc_writer.load();
  if (writer != nullptr && absl::StrContains(args->message, "assertion failed")) {
    writer->Flush(kLastWords);
  }
}

// Protobuf has a line for each message of a client's that is wrong (a string that is no UTF-8): the
// client is told itself, as often as it likes.
void LogOfProtobuf(google::protobuf::LogLevel level, const char* file, int line,
                   const std::string& message) {
  if (level != google::protobuf::LOGLEVEL_FATAL) return;
  google::LogMessage(file, line, google::GLOG_ERROR).stream() << message;
}

std::string Formatted(google::LogSeverity severity, const char* file, int line,
                      const google::LogMessageTime& time, absl::string_view message) {
  const std::string text = OneLine(message);
  return google::LogSink::ToString(severity, file, line, time, text.data(), text.size()) + "\n";
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

// The number of bytes of what a terminal or a reader of lines takes for a command or the end of a
// line, at the beginning of `text`: C0, DEL, C1 (U+0080 to U+009F), U+2028 and U+2029.
size_t ControlBytes(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x20 || byte(0) == 0x7f) return 1;
  if (byte(0) == 0xc2 && text.size() > 1 && byte(1) >= 0x80 && byte(1) < 0xa0) return 2;
  if (absl::StartsWith(text, "\u2028") || absl::StartsWith(text, "\u2029")) return 3;
  return 0;
}

}  // namespace

struct LogWriter::State {
  explicit State(int fd) : fd(fd) {}
  // `tenant`: empty: the daemon's own.
  void Say(absl::string_view tenant, std::string line);
  void Loop();

  const int fd;
  Mutex mutex;
  CondVar changed;
  std::string lines ABSL_GUARDED_BY(mutex);
  absl::flat_hash_map<std::string, int64_t> bytes_of ABSL_GUARDED_BY(mutex);  // tenants in `lines`
  int64_t left_out ABSL_GUARDED_BY(mutex) = 0;
  bool writing ABSL_GUARDED_BY(mutex) = false;
  bool stop ABSL_GUARDED_BY(mutex) = false;
};

void LogWriter::State::Say(absl::string_view tenant, std::string line) {
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
  grpc_writer = this;
  gpr_set_log_function(&LogOfGrpc);
  google::protobuf::SetLogHandler(&LogOfProtobuf);
}

LogWriter::~LogWriter() {
  google::protobuf::SetLogHandler(nullptr);
  gpr_set_log_function(nullptr);
  grpc_writer = nullptr;
  google::RemoveLogSink(this);
  Flush(kLastWords);
  MutexLock lock(&state_->mutex);
  state_->stop = true;
  state_->changed.SignalAll();
}

void LogWriter::Flush(absl::Duration patience) {
  const absl::Time deadline = SteadyNow() + patience;
  MutexLock lock(&state_->mutex);
  while (!state_->lines.empty() || state_->left_out > 0 || state_->writing) {
    const absl::Duration left = deadline - SteadyNow();
    if (left <= absl::ZeroDuration()) return;
    state_->changed.WaitFor(&state_->mutex, left);
  }
}

void LogWriter::Say(google::LogSeverity severity, absl::string_view tenant,
                    absl::string_view line) {
  // glog puts time and thread before it, and hands it to this sink alone.
  struct Sink : google::LogSink {
    Sink(State* to, absl::string_view whose) : state(to), tenant(whose) {}
    void send(google::LogSeverity how, const char*, const char* file, int number,
              const google::LogMessageTime& time, const char* message, size_t size) override {
      state->Say(tenant, Formatted(how, file, number, time, absl::string_view(message, size)));
    }
    State* const state;
    const absl::string_view tenant;
  };
  Sink sink(state_.get(), tenant);
  google::LogMessage(__FILE__, __LINE__, severity, &sink, /*also_send_to_log=*/false).stream()
      << line;
}

void LogWriter::send(google::LogSeverity severity, const char*, const char* base_filename, int line,
                     const google::LogMessageTime& time, const char* message, size_t size) {
  state_->Say(/*tenant=*/"",
              Formatted(severity, base_filename, line, time, absl::string_view(message, size)));
  if (severity != google::GLOG_FATAL) return;
  // glog ends the process next; a full standard error must not keep it from that.
  alarm(5);
  Flush(kLastWords);
}

std::string OneLine(absl::string_view text) {
  std::string line;
  line.reserve(text.size());
  while (!text.empty()) {
    const size_t control = ControlBytes(text);
    for (size_t i = 0; i < control; ++i) {
      absl::StrAppendFormat(&line, "\\x%02x", static_cast<unsigned char>(text[i]));
    }
    if (control == 0) line.push_back(text[0]);
    text.remove_prefix(std::max<size_t>(control, 1));
  }
  return line;
}

}  // namespace chorus
