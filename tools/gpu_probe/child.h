// Processes that the probe starts, of its own program or others, each with a time limit: none
// outlives the probe, and none that hangs holds it up.
//
// Threads: one, the same for all children: they are killed when it ends. Ownership: a Child owns
// its process, a Channel its socket. Errors: said at each function.
#ifndef CHORUS_TOOLS_GPU_PROBE_CHILD_H_
#define CHORUS_TOOLS_GPU_PROBE_CHILD_H_

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/unique_fd.h"

namespace chorus {
namespace probe {

// Seconds on a clock that all processes of the machine share.
double NowSeconds();
void SleepSeconds(double seconds);

class Child {
 public:
  struct Options {
    std::vector<std::string> environment;          // NAME=VALUE, before what it inherits
    std::vector<std::pair<int, int>> descriptors;  // ours, and its number in the child (from 3 on)
    int output = -1;                               // takes stdout and stderr; -1: ours
    bool group = false;                            // a process group of its own, killed as one
  };
  // argv[0] is a path, or looked up on PATH. NOT_FOUND: it cannot be executed.
  static absl::StatusOr<Child> Start(const std::vector<std::string>& argv, const Options& options);

  Child() = default;
  Child(Child&& other) noexcept;
  Child& operator=(Child&& other) noexcept;
  ~Child();  // Kill()

  pid_t pid() const { return pid_; }
  // Waits at most so long. Its exit status, 128 + the number of the signal that ended it, or
  // DEADLINE_EXCEEDED: it still runs.
  absl::StatusOr<int> Wait(double seconds);
  // SIGKILL, to its group if it has one, without waiting.
  void Signal(int signal) const;
  // SIGKILL, then Wait: false where it has not even ended `seconds` later, as a process whose
  // driver call never returns. It is left alone then.
  bool Kill(double seconds = 5);

 private:
  pid_t pid_ = -1;
  bool group_ = false;
};

// One end of a pair of sockets that keep messages whole, for two processes of the probe.
class Channel {
 public:
  static constexpr int kNumber = 3;  // of a child's end, in the child

  Channel() = default;
  explicit Channel(UniqueFd fd) : fd_(std::move(fd)) {}
  // Both ends, or INTERNAL.
  static absl::StatusOr<std::pair<Channel, Channel>> Pair();

  int fd() const { return fd_.get(); }
  // With at most one descriptor. UNAVAILABLE: the other end is gone.
  absl::Status Send(const std::string& text, int descriptor = -1) const;
  // The next message, at most 8 KiB. DEADLINE_EXCEEDED; UNAVAILABLE: the other end is gone.
  absl::StatusOr<std::string> Receive(double seconds, UniqueFd* descriptor = nullptr) const;

 private:
  UniqueFd fd_;
};

// A child of this program in a role, with a channel.
struct Helper {
  Child process;
  Channel channel;
};
// `arguments` come behind --child=ROLE. The roles are in stages.h.
absl::StatusOr<Helper> StartHelper(const std::string& role,
                                   const std::vector<std::string>& arguments,
                                   const std::vector<std::string>& environment = {});

// The path of this program.
std::string SelfPath();
// A file without a name; all that was written to it.
UniqueFd TemporaryFile();
std::string ContentOf(int fd);

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_CHILD_H_
