#include "benchmarks/daemon.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"

namespace chorus {
namespace bench {
namespace {

bool Listens(const std::string& path) {
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  return connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(const std::string& program,
                                                      const ScratchDirectory& scratch,
                                                      const std::vector<std::string>& flags) {
  auto daemon = std::make_unique<Daemon>();
  const std::string socket = absl::StrCat(scratch.path(), "/chorusd");
  daemon->address_ = absl::StrCat("unix:", socket);
  daemon->log_ = absl::StrCat(scratch.path(), "/chorusd.log");
  Process::Options options;
  options.log = daemon->log_;
  std::vector<std::string> argv = {program, absl::StrCat("--listen=", daemon->address_)};
  argv.insert(argv.end(), flags.begin(), flags.end());
  CHORUS_ASSIGN_OR_RETURN(daemon->process_, Process::Start(argv, options));
  const int64_t deadline = NowNanos() + int64_t{30} * 1000000000;
  while (!Listens(socket)) {
    const absl::StatusOr<int> ended = daemon->process_.Wait(10000000);
    if (ended.ok()) {
      return absl::UnavailableError(
          absl::StrCat(program, " ended with ", *ended, ":\n", daemon->Log()));
    }
    if (NowNanos() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(program, " does not listen on ", socket, ":\n", daemon->Log()));
    }
  }
  return daemon;
}

bool Daemon::Lives(int64_t patience_ns) {
  return process_.running() && !process_.Wait(patience_ns).ok();
}

Daemon::~Daemon() {
  process_.Signal(SIGTERM);
  if (process_.running()) (void)process_.Wait(int64_t{10} * 1000000000);
}

}  // namespace bench
}  // namespace chorus
