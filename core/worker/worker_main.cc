#include "core/worker/worker_main.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "core/worker/channel.h"
#include "core/worker/own_stderr.h"
#include "core/worker/protocol.h"
#include "core/worker/window.h"
#include "core/worker/worker.h"
#include "core/worker/worker_process.h"

namespace chorus::worker {

int WorkerMain(const std::function<absl::StatusOr<std::unique_ptr<Backend>>()>& open) {
  // Dies with the daemon's thread that keeps it, whatever state it is in.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGPIPE, SIG_IGN);
  Channel::Descriptors descriptors;
  const int first = WorkerProcess::kFirstDescriptor;
  const int last = first + Channel::kDescriptors;
  for (int fd = first; fd <= last; ++fd) {
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) == 0) continue;
    std::cerr << "this program is started by chorusd, with descriptors that it is to use\n";
    return 2;
  }
  absl::optional<OwnStderr> own_stderr(absl::in_place);
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
  own_stderr.reset();
  _exit(1);
}

}  // namespace chorus::worker
