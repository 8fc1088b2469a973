#include "core/worker/own_stderr.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "core/base/clock.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"

namespace chorus::worker {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(1);
constexpr char kAgain[] = "/proc/self/fd/2";

UniqueFd OpenAgain() {
  return UniqueFd(open(kAgain, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

}  // namespace

struct OwnStderr::Carrier {
  // Until all writers of the pipe are gone.
  void Run() {
    std::array<char, 4096> bytes;
    ssize_t got = 0;
    while ((got = read(from.get(), bytes.data(), bytes.size())) != 0) {
      if (got < 0 && errno != EINTR) break;
      for (ssize_t done = 0; done < got;) {
        const ssize_t written =
            write(to.get(), bytes.data() + done, static_cast<size_t>(got - done));
        if (written < 0 && errno != EINTR) break;  // nobody will read it
        done += written > 0 ? written : 0;
      }
    }
    MutexLock lock(&mutex);
    is_over = true;
    over.SignalAll();
  }

  UniqueFd from;
  UniqueFd to;
  Mutex mutex;
  CondVar over;
  bool is_over ABSL_GUARDED_BY(mutex) = false;
};

OwnStderr::OwnStderr() {
  struct stat what = {};
  if (fstat(STDERR_FILENO, &what) != 0 || S_ISREG(what.st_mode)) return;
  if (const UniqueFd again = OpenAgain(); again.valid()) {
    dup2(again.get(), STDERR_FILENO);
    return;
  }
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return;
  auto carrier = std::make_shared<Carrier>();
  carrier->from.Reset(ends[0]);
  const UniqueFd writer(ends[1]);
  carrier->to.Reset(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0));
  if (!carrier->to.valid() || fcntl(writer.get(), F_SETFL, O_NONBLOCK) != 0) return;
  dup2(writer.get(), STDERR_FILENO);
  std::thread([carrier] { carrier->Run(); }).detach();
  carrier_ = std::move(carrier);
}

OwnStderr::~OwnStderr() {
  if (carrier_ == nullptr) return;
  // The last writer of the pipe, but for children that have it.
  const UniqueFd nowhere(open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (nowhere.valid()) {
    dup2(nowhere.get(), STDERR_FILENO);
  } else {
    close(STDERR_FILENO);
  }
  const absl::Time due = SteadyNow() + kPatience;
  MutexLock lock(&carrier_->mutex);
  while (!carrier_->is_over && SteadyNow() < due) {
    carrier_->over.WaitFor(&carrier_->mutex, due - SteadyNow());
  }
}

}  // namespace chorus::worker
