#include "benchmarks/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/base/unique_fd.h"

namespace chorus {
namespace bench {
namespace {

// The number behind `name` in a `status` file of /proc.
absl::optional<int64_t> StatusNumber(const std::string& path, absl::string_view name) {
  std::istringstream status(FileText(path));
  for (std::string line; std::getline(status, line);) {
    std::istringstream words(line);
    std::string first;
    int64_t number = 0;
    if (words >> first >> number && first == name) return number;
  }
  return absl::nullopt;
}

// A row of kilobytes in what the system says of a process.
absl::StatusOr<int64_t> MemoryOf(pid_t pid, absl::string_view name) {
  const auto kilobytes = StatusNumber(absl::StrCat("/proc/", pid, "/status"), name);
  if (kilobytes.has_value()) return *kilobytes * 1024;
  return absl::NotFoundError(absl::StrCat("no memory of process ", pid));
}

int64_t ClockNanos(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

// For a child: `parent` has started it.
void DieWith(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
}

void CloseAllBut(std::vector<int> keep_fds) {
  std::sort(keep_fds.begin(), keep_fds.end());
  unsigned first = 3;
  for (const int fd : keep_fds) {
    if (static_cast<unsigned>(fd) > first) close_range(first, fd - 1, 0);
    first = std::max(first, static_cast<unsigned>(fd) + 1);
  }
  close_range(first, ~0u, 0);
}

}  // namespace

absl::StatusOr<Process> Process::Fork(const std::function<int()>& main,
                                      const std::vector<int>& keep_fds) {
  std::cout.flush();
  std::fflush(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return absl::ResourceExhaustedError("fork failed");
  if (pid == 0) {
    DieWith(parent);
    CloseAllBut(keep_fds);
    _exit(main());
  }
  return Process(pid);
}

absl::StatusOr<Process> Process::Start(const std::vector<std::string>& argv,
                                       const Options& options) {
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  std::vector<std::string> environment = options.env;  // of two with one name the first counts
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  std::vector<char*> variables;
  for (std::string& entry : environment) variables.push_back(&entry[0]);
  variables.push_back(nullptr);
  UniqueFd log;
  if (!options.log.empty()) {
    log.Reset(open(options.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    if (!log.valid()) return absl::InternalError(absl::StrCat("cannot write ", options.log));
  }
  // Closed by a successful exec; otherwise it brings the reason.
  int failure[2];
  if (pipe2(failure, O_CLOEXEC) != 0) return absl::InternalError("pipe2 failed");
  UniqueFd read_end(failure[0]);
  UniqueFd write_end(failure[1]);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return absl::ResourceExhaustedError("fork failed");
  if (pid == 0) {
    DieWith(parent);
    if (log.valid()) {
      dup2(log.get(), STDOUT_FILENO);
      dup2(log.get(), STDERR_FILENO);
    }
    for (const int fd : options.keep_fds) fcntl(fd, F_SETFD, 0);
    execvpe(arguments[0], arguments.data(), variables.data());
    const int error = errno;
    (void)!write(write_end.get(), &error, sizeof(error));
    _exit(127);
  }
  write_end.Reset();
  int error = 0;
  if (read(read_end.get(), &error, sizeof(error)) == sizeof(error)) {
    waitpid(pid, nullptr, 0);
    return absl::NotFoundError(absl::StrCat(argv[0], ": ", strerror(error)));
  }
  return Process(pid);
}

Process& Process::operator=(Process&& other) noexcept {
  std::swap(pid_, other.pid_);
  return *this;
}

Process::~Process() {
  if (!running()) return;
  Signal(SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void Process::Signal(int signal) const {
  if (running()) kill(pid_, signal);
}

void Process::Stop() const {
  if (!running()) return;
  Signal(SIGSTOP);
  // The signal alone only asks: until one of its threads is scheduled and takes it, all run on.
  // Not consumed: an end is for Wait().
  siginfo_t info;
  while (waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WEXITED | WNOWAIT) != 0 &&
         errno == EINTR) {
  }
}

absl::StatusOr<int> Process::Wait(int64_t timeout_ns) {
  if (!running()) return absl::FailedPreconditionError("no process");
  // A descriptor of a process becomes readable when it ends.
  const UniqueFd fd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  if (!fd.valid()) return absl::InternalError("pidfd_open failed");
  const int64_t deadline = NowNanos() + timeout_ns;
  while (true) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }
    const int64_t left = deadline - NowNanos();
    if (left <= 0)
      return absl::DeadlineExceededError(absl::StrCat("process ", pid_, " still runs"));
    const timespec limit{left / 1000000000, left % 1000000000};
    fd_set readable;
    FD_ZERO(&readable);
    FD_SET(fd.get(), &readable);
    pselect(fd.get() + 1, &readable, nullptr, nullptr, &limit, nullptr);
  }
}

int64_t NowNanos() { return ClockNanos(CLOCK_MONOTONIC); }

int64_t CpuNanos() { return ClockNanos(CLOCK_PROCESS_CPUTIME_ID); }

absl::StatusOr<int64_t> CpuNanosOf(pid_t pid) {
  clockid_t clock;
  if (clock_getcpuclockid(pid, &clock) != 0) {
    return absl::NotFoundError(absl::StrCat("no processor clock of process ", pid));
  }
  return ClockNanos(clock);
}

absl::StatusOr<int64_t> SleepsOf(pid_t pid) {
  int64_t sleeps = 0;
  std::error_code error;
  for (const auto& thread :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/task"), error)) {
    const auto of_thread =
        StatusNumber(thread.path().string() + "/status", "voluntary_ctxt_switches:");
    sleeps += of_thread.value_or(0);  // it may have ended since
  }
  if (error) return absl::NotFoundError(absl::StrCat("no threads of process ", pid));
  return sleeps;
}

absl::StatusOr<int64_t> ResidentBytesOf(pid_t pid) {
  std::istringstream pages(FileText(absl::StrCat("/proc/", pid, "/statm")));
  int64_t total = 0;
  int64_t resident = 0;
  if (!(pages >> total >> resident)) {
    return absl::NotFoundError(absl::StrCat("no memory of process ", pid));
  }
  return resident * sysconf(_SC_PAGESIZE);
}

absl::StatusOr<int64_t> PeakResidentBytesOf(pid_t pid) { return MemoryOf(pid, "VmHWM:"); }

absl::StatusOr<int64_t> AnonymousBytesOf(pid_t pid) { return MemoryOf(pid, "RssAnon:"); }

std::vector<pid_t> ChildrenOf(pid_t pid) {
  std::vector<pid_t> children;
  std::error_code error;
  for (const auto& process : std::filesystem::directory_iterator("/proc", error)) {
    pid_t child = 0;  // other files there have no number
    if (!absl::SimpleAtoi(process.path().filename().string(), &child)) continue;
    if (StatusNumber(process.path().string() + "/status", "PPid:") == pid) {
      children.push_back(child);
    }
  }
  return children;
}

void Pause(int64_t nanos) {
  timespec time{nanos / 1000000000, nanos % 1000000000};
  nanosleep(&time, nullptr);
}

ScratchDirectory::ScratchDirectory() {
  char path[] = "/tmp/chorus-bench-XXXXXX";
  path_ = mkdtemp(path) != nullptr ? path : ".";
}

ScratchDirectory::~ScratchDirectory() {
  std::error_code ignored;
  if (path_ != ".") std::filesystem::remove_all(path_, ignored);
}

std::string FileText(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace bench
}  // namespace chorus
