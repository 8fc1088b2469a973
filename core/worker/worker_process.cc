#include "core/worker/worker_process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus::worker {
namespace {

// With all that posix_spawn is told, which has to be taken apart again.
struct SpawnSettings {
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  SpawnSettings() {
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attributes);
  }
  ~SpawnSettings() {
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
  }
};

std::string Ending(int status) {
  if (WIFSIGNALED(status)) {
    return absl::StrCat("was killed by signal ", WTERMSIG(status), " (",
                        strsignal(WTERMSIG(status)), ")");
  }
  return absl::StrCat("ended with status ", WEXITSTATUS(status));
}

}  // namespace

absl::StatusOr<WorkerProcess> WorkerProcess::Start(const std::vector<std::string>& command,
                                                   absl::Span<const int> inherited_fds) {
  SpawnSettings settings;
  // First out of the way of where they go.
  std::vector<UniqueFd> copies;
  const int first_free = kFirstDescriptor + static_cast<int>(inherited_fds.size());
  for (const int fd : inherited_fds) copies.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, first_free));
  for (size_t i = 0; i < copies.size(); ++i) {
    posix_spawn_file_actions_adddup2(&settings.files, copies[i].get(),
                                     kFirstDescriptor + static_cast<int>(i));
  }
  // A group of its own: Ctrl-C is for the daemon, which has its devices until it has drained.
  posix_spawnattr_setpgroup(&settings.attributes, 0);
  sigset_t signals;
  sigemptyset(&signals);
  posix_spawnattr_setsigmask(&settings.attributes, &signals);
  sigfillset(&signals);
  posix_spawnattr_setsigdefault(&settings.attributes, &signals);
  posix_spawnattr_setflags(&settings.attributes,
                           POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::vector<char*> argv;
  for (const std::string& argument : command) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_t pid = -1;
  const int error =
      posix_spawn(&pid, argv[0], &settings.files, &settings.attributes, argv.data(), environ);
  if (error != 0) {
    return MakeError(Reason::kWrongState, absl::StrCat(command[0], ": ", strerror(error)));
  }
  return WorkerProcess(pid);
}

WorkerProcess& WorkerProcess::operator=(WorkerProcess&& other) noexcept {
  if (this != &other) {
    WorkerProcess old_process(std::move(*this));
    pid_ = std::exchange(other.pid_, -1);
  }
  return *this;
}

WorkerProcess::~WorkerProcess() {
  // Most often it takes a tenth of that (docs/gpu.md, P8).
  constexpr absl::Duration kLetGo = absl::Seconds(1);
  Kill();
  Wait(kLetGo);
}

void WorkerProcess::Kill() const {
  if (pid_ > 0) kill(pid_, SIGKILL);
}

absl::optional<std::string> WorkerProcess::Wait(absl::Duration at_most) {
  if (pid_ <= 0) return "has ended";
  const UniqueFd watch(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  pollfd poll_entry = {watch.get(), POLLIN, 0};
  const int64_t millis = std::min<int64_t>(absl::ToInt64Milliseconds(at_most), 1 << 30);
  // Without a descriptor that is a sleep, and never a wait without end.
  const int ready = poll(&poll_entry, watch.valid() ? 1 : 0, static_cast<int>(millis));
  if (ready == 0 && watch.valid()) return absl::nullopt;
  int status = 0;
  const pid_t ended_pid = waitpid(pid_, &status, WNOHANG);
  if (ended_pid == 0 || (ended_pid < 0 && errno == EINTR)) return absl::nullopt;
  pid_ = -1;
  return ended_pid < 0 ? "has ended" : Ending(status);
}

}  // namespace chorus::worker
