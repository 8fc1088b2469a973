#include "tools/gpu_probe/child.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace chorus {
namespace probe {

double NowSeconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void SleepSeconds(double seconds) {
  const auto nanos = static_cast<int64_t>(seconds * 1e9);
  timespec time{nanos / 1000000000, nanos % 1000000000};
  nanosleep(&time, nullptr);
}

absl::StatusOr<Child> Child::Start(const std::vector<std::string>& argv, const Options& options) {
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  std::vector<std::string> environment = options.environment;  // of one name the first counts
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  std::vector<char*> variables;
  for (std::string& entry : environment) variables.push_back(&entry[0]);
  variables.push_back(nullptr);
  // Closed by a successful exec; otherwise it brings the reason.
  int failure[2];
  if (pipe2(failure, O_CLOEXEC) != 0) return absl::InternalError("pipe2 failed");
  UniqueFd read_end(failure[0]);
  UniqueFd write_end(failure[1]);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return absl::ResourceExhaustedError("fork failed");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    if (options.group) setpgid(0, 0);
    if (options.output >= 0) {
      dup2(options.output, STDOUT_FILENO);
      dup2(options.output, STDERR_FILENO);
    }
    // First out of the way of the numbers that they get.
    std::vector<std::pair<int, int>> moved = options.descriptors;
    int report = fcntl(write_end.get(), F_DUPFD_CLOEXEC, 100);
    for (auto& [from, to] : moved) from = fcntl(from, F_DUPFD_CLOEXEC, 100);
    for (const auto& [from, to] : moved) dup2(from, to);
    execvpe(arguments[0], arguments.data(), variables.data());
    const int error = errno;
    (void)!write(report, &error, sizeof(error));
    _exit(127);
  }
  write_end.Reset();
  Child child;
  child.pid_ = pid;
  child.group_ = options.group;
  if (options.group) setpgid(pid, pid);  // whoever of the two comes first
  int error = 0;
  if (read(read_end.get(), &error, sizeof(error)) == sizeof(error)) {
    return absl::NotFoundError(absl::StrCat(argv[0], ": ", strerror(error)));
  }
  return child;
}

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), group_(std::exchange(other.group_, false)) {}

Child& Child::operator=(Child&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(group_, other.group_);
  return *this;
}

Child::~Child() { Kill(); }

absl::StatusOr<int> Child::Wait(double seconds) {
  if (pid_ <= 0) return absl::FailedPreconditionError("no process");
  const double deadline = NowSeconds() + seconds;
  while (true) {
    int status = 0;
    const pid_t ended = waitpid(pid_, &status, WNOHANG);
    if (ended == pid_) {
      pid_ = -1;
      return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }
    if (ended < 0 && errno != EINTR) {
      pid_ = -1;
      return absl::InternalError("waitpid failed");
    }
    if (NowSeconds() >= deadline) return absl::DeadlineExceededError("the process still runs");
    // Descriptors of processes, which would say when, are not on every kernel.
    SleepSeconds(0.0005);
  }
}

void Child::Signal(int signal) const {
  if (pid_ > 0) kill(group_ ? -pid_ : pid_, signal);
}

bool Child::Kill(double seconds) {
  if (pid_ <= 0) return true;
  Signal(SIGKILL);
  const bool ended = Wait(seconds).ok();
  pid_ = -1;
  return ended;
}

absl::StatusOr<std::pair<Channel, Channel>> Channel::Pair() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return absl::InternalError(absl::StrCat("socketpair: ", strerror(errno)));
  }
  return std::make_pair(Channel(UniqueFd(ends[0])), Channel(UniqueFd(ends[1])));
}

absl::Status Channel::Send(const std::string& text, int descriptor) const {
  iovec part{const_cast<char*>(text.data()), text.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  if (sendmsg(fd_.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(text.size())) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(absl::StrCat("sendmsg: ", strerror(errno)));
}

absl::StatusOr<std::string> Channel::Receive(double seconds, UniqueFd* descriptor) const {
  const double deadline = NowSeconds() + seconds;
  pollfd readable{fd_.get(), POLLIN, 0};
  while (true) {
    const double left = deadline - NowSeconds();
    if (left <= 0) return absl::DeadlineExceededError("no message in time");
    const int ready = poll(&readable, 1, static_cast<int>(std::min(left * 1000 + 1, 1e6)));
    if (ready > 0) break;
    if (ready < 0 && errno != EINTR) return absl::InternalError("poll failed");
  }
  char bytes[8192];
  iovec part{bytes, sizeof(bytes)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t size = recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
  // Nobody sends an empty message.
  if (size <= 0) return absl::UnavailableError("the other process has gone");
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    memcpy(&received, CMSG_DATA(header), sizeof(int));
    UniqueFd owned(received);
    if (descriptor != nullptr) *descriptor = std::move(owned);
  }
  return std::string(bytes, static_cast<size_t>(size));
}

absl::StatusOr<Helper> StartHelper(const std::string& role,
                                   const std::vector<std::string>& arguments,
                                   const std::vector<std::string>& environment) {
  auto ends = Channel::Pair();
  if (!ends.ok()) return ends.status();
  std::vector<std::string> argv = {SelfPath(), "--child=" + role};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  Child::Options options;
  options.environment = environment;
  options.descriptors = {{ends->second.fd(), Channel::kNumber}};
  auto child = Child::Start(argv, options);
  if (!child.ok()) return child.status();
  return Helper{*std::move(child), std::move(ends->first)};
}

std::string SelfPath() {
  char path[PATH_MAX];
  const ssize_t bytes = readlink("/proc/self/exe", path, sizeof(path));
  return bytes > 0 ? std::string(path, static_cast<size_t>(bytes)) : "/proc/self/exe";
}

UniqueFd TemporaryFile() {
  // Appended to, so that the two ends share no position.
  UniqueFd fd(memfd_create("gpu_probe", MFD_CLOEXEC));
  if (fd.valid()) fcntl(fd.get(), F_SETFL, O_APPEND);
  return fd;
}

std::string ContentOf(int fd) {
  std::string content;
  char bytes[65536];
  while (true) {
    const ssize_t got = pread(fd, bytes, sizeof(bytes), static_cast<off_t>(content.size()));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return content;
    content.append(bytes, static_cast<size_t>(got));
  }
}

}  // namespace probe
}  // namespace chorus
