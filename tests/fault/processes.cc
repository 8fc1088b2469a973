#include "tests/fault/processes.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <ostream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "chorus/v1/diagnostics.grpc.pb.h"
#include "chorus/v1/sessions.grpc.pb.h"
#include "core/base/error.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "proto/convert/errors_convert.h"

namespace chorus {
namespace fault {
namespace {

constexpr char kTrainer[] = "tests/fault/trainer";
constexpr char kDaemon[] = "server/chorusd";
constexpr char kClock[] = "tests/fault/libclock.so";
constexpr absl::Duration kYear = absl::Hours(365 * 24);

// What clock.cc reads.
struct ClockFile {
  int64_t steady_nanos;
  int64_t wall_nanos;
  int64_t wall_step_nanos;
};

Reply ReplyOf(absl::string_view line) {
  Reply reply;
  reply.line = std::string(line);
  const size_t message = line.find(" message=");
  if (message != absl::string_view::npos) {
    reply.words["message"] = std::string(line.substr(message + 9));
    line = line.substr(0, message);
  }
  bool first = true;
  for (const absl::string_view word : absl::StrSplit(line, ' ', absl::SkipEmpty())) {
    if (std::exchange(first, false)) reply.ok = word == "ok";
    const std::pair<absl::string_view, absl::string_view> pair =
        absl::StrSplit(word, absl::MaxSplits('=', 1));
    reply.words[std::string(pair.first)] = std::string(pair.second);
  }
  return reply;
}

void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
}

// A clock's file, made where there is none.
absl::StatusOr<UniqueFd> OpenClock(const std::string& path) {
  UniqueFd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (ftruncate(file.get(), sizeof(ClockFile)) != 0) return absl::InternalError(path);
  return file;
}
absl::Status WriteClock(int file, off_t offset, const void* nanos, size_t size) {
  if (pwrite(file, nanos, size, offset) == static_cast<ssize_t>(size)) return absl::OkStatus();
  return absl::InternalError("clock");
}

// Of a process that goes by the clock in the file `path`.
std::vector<std::string> ClockEnvironment(const std::string& path) {
  // The sanitizer, where there is one, would rather be the first library.
  const char* const asan = std::getenv("ASAN_OPTIONS");
  return {absl::StrCat("CHORUS_TEST_CLOCK=", path),
          absl::StrCat("LD_PRELOAD=", std::filesystem::absolute(kClock).string()),
          absl::StrCat("ASAN_OPTIONS=", asan == nullptr ? "" : asan, ":verify_asan_link_order=0")};
}

absl::StatusOr<int> WaitFor(bench::Process* process) {
  return process->Wait(absl::ToInt64Nanoseconds(kPatience));
}

}  // namespace

std::string Reply::word(const std::string& key) const {
  const auto at = words.find(key);
  return at == words.end() ? "" : at->second;
}

int64_t Reply::number(const std::string& key) const {
  int64_t value = -1;
  return absl::SimpleAtoi(word(key), &value) ? value : -1;
}

std::ostream& operator<<(std::ostream& os, const Reply& reply) { return os << reply.line; }

// --- Trainer ------------------------------------------------------------------------------------

Trainer::Trainer(bench::Process process, UniqueFd to, UniqueFd from)
    : process_(std::move(process)),
      pid_(process_.pid()),
      to_(std::move(to)),
      from_(std::move(from)) {}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Start(const std::string& log,
                                                        absl::Duration wall_step) {
  int in[2];
  int out[2];
  if (pipe2(in, O_CLOEXEC) != 0) return absl::InternalError("pipe2");
  UniqueFd its_in(in[0]);
  UniqueFd to(in[1]);
  if (pipe2(out, O_CLOEXEC) != 0) return absl::InternalError("pipe2");
  UniqueFd from(out[0]);
  UniqueFd its_out(out[1]);
  bench::Process::Options options;
  options.log = log;
  options.keep_fds = {its_in.get(), its_out.get()};
  if (wall_step != absl::ZeroDuration()) {
    // In a file of its own, which it maps at its first look.
    const std::string clock = absl::StrCat(log, ".clock", absl::FormatDuration(wall_step));
    CHORUS_ASSIGN_OR_RETURN(const UniqueFd file, OpenClock(clock));
    const ClockFile ahead = {0, absl::ToInt64Nanoseconds(-kYear),
                             absl::ToInt64Nanoseconds(wall_step)};
    CHORUS_RETURN_IF_ERROR(WriteClock(file.get(), 0, &ahead, sizeof(ahead)));
    options.env = ClockEnvironment(clock);
  }
  CHORUS_ASSIGN_OR_RETURN(
      bench::Process process,
      bench::Process::Start({kTrainer, absl::StrCat(its_in.get()), absl::StrCat(its_out.get())},
                            options));
  return std::unique_ptr<Trainer>(new Trainer(std::move(process), std::move(to), std::move(from)));
}

void Trainer::Send(absl::string_view command) {
  const std::string line = absl::StrCat(command, "\n");
  // A trainer that is gone is noticed by what waits for its reply.
  (void)!write(to_.get(), line.data(), line.size());
}

absl::StatusOr<std::string> Trainer::ReadLine() {
  const absl::Time deadline = absl::Now() + kPatience;
  for (;;) {
    const size_t end = pending_.find('\n');
    if (end != std::string::npos) {
      std::string line = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      return line;
    }
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat("trainer ", pid_, " says nothing"));
    }
    pollfd entry{from_.get(), POLLIN, 0};
    if (poll(&entry, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) <= 0) continue;
    char bytes[1024];
    const ssize_t size = read(from_.get(), bytes, sizeof(bytes));
    if (size <= 0) return absl::UnavailableError(absl::StrCat("trainer ", pid_, " has ended"));
    pending_.append(bytes, static_cast<size_t>(size));
  }
}

Reply Trainer::Receive() {
  for (;;) {
    const absl::StatusOr<std::string> line = ReadLine();
    if (!line.ok()) return ReplyOf(absl::StrCat("gone message=", line.status().ToString()));
    if (!absl::StartsWith(*line, "at ")) return ReplyOf(*line);
  }
}

Reply Trainer::Ask(absl::string_view command) {
  Send(command);
  return Receive();
}

absl::Status Trainer::WaitFor(absl::string_view what) {
  const std::string expected = absl::StrCat("at ", what);
  for (;;) {
    CHORUS_ASSIGN_OR_RETURN(const std::string line, ReadLine());
    if (line == expected) return absl::OkStatus();
    if (!absl::StartsWith(line, "at ")) {
      return absl::InternalError(absl::StrCat("expected \"", expected, "\", got: ", line));
    }
  }
}

absl::StatusOr<int> Trainer::WaitForEnd() { return fault::WaitFor(&process_); }

// --- Daemon -------------------------------------------------------------------------------------

Daemon::Daemon(bench::Process process, const Options& options,
               std::shared_ptr<grpc::Channel> channel)
    : process_(std::move(process)),
      address_(absl::StrCat("unix:", options.socket)),
      clock_(open(options.clock.c_str(), O_RDWR | O_CLOEXEC)),
      channel_(std::move(channel)) {}

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const Options& options) {
  const std::string address = absl::StrCat("unix:", options.socket);
  std::vector<std::string> argv = {kDaemon, absl::StrCat("--listen=", address)};
  argv.insert(argv.end(), options.flags.begin(), options.flags.end());
  if (!options.cgroup.empty()) {
    const std::vector<std::string> enter = {"/bin/sh", "-c", "echo $$ > \"$0\" && exec \"$@\"",
                                            options.cgroup + "/cgroup.procs"};
    argv.insert(argv.begin(), enter.begin(), enter.end());
  }
  bench::Process::Options process_options;
  process_options.log = options.log;
  CHORUS_RETURN_IF_ERROR(OpenClock(options.clock).status());
  process_options.env = ClockEnvironment(options.clock);
  if (!options.failpoint.empty()) {
    process_options.env.push_back(absl::StrCat("CHORUS_FAILPOINT=", options.failpoint));
  }
  CHORUS_ASSIGN_OR_RETURN(bench::Process process, bench::Process::Start(argv, process_options));
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
  std::unique_ptr<Daemon> daemon(new Daemon(
      std::move(process), options,
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments)));
  CHORUS_RETURN_IF_ERROR(AskUntil([&daemon]() -> absl::StatusOr<bool> {
    if (daemon->channel_->WaitForConnected(
            absl::ToChronoTime(absl::Now() + absl::Milliseconds(200)))) {
      return true;
    }
    if (daemon->Lives()) return false;
    return absl::UnavailableError("chorusd ends at its start");
  }));
  return daemon;
}

bool Daemon::Lives() { return process_.running() && !process_.Wait(0).ok(); }

absl::StatusOr<int> Daemon::WaitForEnd() { return fault::WaitFor(&process_); }

absl::Status Daemon::LetTimePass(absl::Duration time) {
  int64_t ahead = 0;
  const auto size = static_cast<ssize_t>(sizeof(ahead));
  if (pread(clock_.get(), &ahead, sizeof(ahead), 0) != size) return absl::InternalError("clock");
  return SetClock(offsetof(ClockFile, steady_nanos), ahead + absl::ToInt64Nanoseconds(time));
}

absl::Status Daemon::SetWallClock(absl::Duration ahead) {
  return SetClock(offsetof(ClockFile, wall_nanos), absl::ToInt64Nanoseconds(ahead));
}

absl::Status Daemon::SetClock(off_t offset, int64_t ahead_nanos) {
  CHORUS_RETURN_IF_ERROR(WriteClock(clock_.get(), offset, &ahead_nanos, sizeof(ahead_nanos)));
  // Its thread may sleep: a call wakes it, and the one after that comes behind what was due.
  CHORUS_RETURN_IF_ERROR(Stats().status());
  return Stats().status();
}

absl::StatusOr<v1::GetStatsResponse> Daemon::Stats() {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::GetStatsResponse response;
  CHORUS_RETURN_IF_ERROR(FromGrpc(
      v1::Diagnostics::NewStub(channel_)->GetStats(&context, v1::GetStatsRequest(), &response)));
  return response;
}

absl::StatusOr<v1::ListSessionsResponse> Daemon::Sessions() {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::ListSessionsResponse response;
  CHORUS_RETURN_IF_ERROR(FromGrpc(v1::Diagnostics::NewStub(channel_)->ListSessions(
      &context, v1::ListSessionsRequest(), &response)));
  return response;
}

absl::StatusOr<v1::ListPendingResponse> Daemon::Pending() {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::ListPendingResponse response;
  CHORUS_RETURN_IF_ERROR(FromGrpc(v1::Diagnostics::NewStub(channel_)->ListPending(
      &context, v1::ListPendingRequest(), &response)));
  return response;
}

absl::Status Daemon::Renew(int64_t session) {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::RenewSessionRequest request;
  v1::RenewSessionResponse response;
  request.set_session(session);
  return FromGrpc(v1::Sessions::NewStub(channel_)->Renew(&context, request, &response));
}

absl::Status AskUntil(const std::function<absl::StatusOr<bool>()>& done) {
  const absl::Time deadline = absl::Now() + kPatience;
  for (;;) {
    CHORUS_ASSIGN_OR_RETURN(const bool now, done());
    if (now) return absl::OkStatus();
    if (absl::Now() > deadline) return absl::DeadlineExceededError("asked in vain");
  }
}

}  // namespace fault
}  // namespace chorus
