#include "core/worker/worker_main.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "core/worker/channel.h"
#include "core/worker/protocol.h"
#include "core/worker/window.h"
#include "core/worker/worker.h"
#include "core/worker/worker_process.h"

namespace chorus::worker {
namespace {

// Standard error is the daemon's: where it is a full pipe, or a terminal that was stopped, whoever
// writes waits. O_NONBLOCK would be for all who share it, so this process opens it once more, for
// itself alone, and leaves out what there is no room for. A file makes nobody wait, and would be
// written from its beginning. What the system does not open again (a socket, a pipe of another
// user's) stays as it is.
void WaitForNoReaderOfLines() {
  struct stat what = {};
  if (fstat(STDERR_FILENO, &what) != 0 || S_ISREG(what.st_mode)) return;
  const UniqueFd own_stderr(open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (own_stderr.valid()) dup2(own_stderr.get(), STDERR_FILENO);
}

}  // namespace

int WorkerMain(const std::function<absl::StatusOr<std::unique_ptr<Backend>>()>& open) {
  // Dies with the daemon's thread that keeps it, whatever state it is in.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGPIPE, SIG_IGN);
  WaitForNoReaderOfLines();
  Channel::Descriptors descriptors;
  const int first = WorkerProcess::kFirstDescriptor;
  const int last = first + Channel::kDescriptors;
  for (int fd = first; fd <= last; ++fd) {
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) == 0) continue;
    std::cerr << "this program is started by chorusd, with descriptors that it is to use\n";
    return 2;
  }
  for (int fd = first; fd < last; ++fd) descriptors[static_cast<size_t>(fd - first)].Reset(fd);
  const auto channel = Channel::Open(std::move(descriptors), kLongestToWorker);
  const auto window = Window::Map(UniqueFd(last));
  for (const absl::Status& status : {channel.status(), window.status()}) {
    if (status.ok()) continue;
    std::cerr << "worker: " << status.message() << "\n";
    return 2;
  }
  absl::StatusOr<std::unique_ptr<Backend>> backend = open();
  if (backend.ok() && (*backend)->host_addressable()) {
    backend = MakeError(Reason::kWrongState,
                        absl::StrCat("the memory of ", (*backend)->name(),
                                     " devices is the daemon's own, which no other process has"));
  }
  if (!backend.ok()) {
    Refuse(channel->get(), backend.status());
    return 1;
  }
  const absl::Status served = Serve(channel->get(), window->get(), backend->get());
  if (served.ok()) return 0;
  // The daemon is gone, or the devices are. What these still do is of no use to anybody, and might
  // never end.
  std::cerr << "worker: it ends: " << ErrorOf(served).message << std::endl;
  _exit(1);
}

}  // namespace chorus::worker
