// Refuses memory for clients to map where the daemon's cgroup has more than all accounts may: a net
// under the budget (budget.h), which cannot know of every page.
//
// A client can keep pages of a file that it was given where nobody sees them, in pipes and in the
// queues of sockets (core/base/shared_file.h): the file goes, its charge is given back, and the
// pages stay, charged to the cgroup of the daemon where that was the first to touch them. So before
// memory for an arena, or of a session, is taken from the kernel the cgroup is asked what it has.
// With it this may be `most_bytes`: what accounts may have and a part of what the daemon may take
// beside them (server/own_memory.h, GuardedBytes); the rest of that part is for what comes
// meanwhile without being asked about.
//
// Arenas that are there go on to be used, and what is kept for reuse stays. Who is refused is
// whoever asks next, for nobody can tell whose the pages are.
//
// Threads: the node thread. Ownership: owns the functions that read the cgroup. Errors: said at
// Admit(); a cgroup that cannot be read refuses nothing.
#ifndef CHORUS_CORE_RUNTIME_MEMORY_GUARD_H_
#define CHORUS_CORE_RUNTIME_MEMORY_GUARD_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/clock.h"

namespace chorus {

class MemoryGuard {
 public:
  // What the daemon's cgroup says. None: it cannot be told.
  using Read = std::function<absl::optional<int64_t>()>;
  struct Cgroup {
    Read usage;  // all bytes, soon told
    // Those of them that the kernel does not take back by itself when it needs them, as it does the
    // cache of files. None also where processes are there whose memory is not the daemon's. Takes
    // longer; asked where `usage` is too much.
    Read fixed;
  };

  // So much new memory there may be between two looks: 8 MiB take the kernel milliseconds, a look
  // some microseconds.
  static constexpr int64_t kBytesALook = int64_t{8} << 20;
  // How long a look counts by which one was refused. Less than a caller waits that was refused for
  // now (core/node/patience.h), which is to see what there is then.
  static constexpr absl::Duration kRefusal = absl::Microseconds(900);
  // What a look takes (core/base/work.h): a small file that is read, or several.
  static constexpr int64_t kWorkToLook = 250;
  static constexpr int64_t kWorkToLookCloser = 2000;

  MemoryGuard(
      int64_t most_bytes, Cgroup cgroup,
      std::function<absl::Time()> now = [] { return SteadyNow(); });
  MemoryGuard(const MemoryGuard&) = delete;
  MemoryGuard& operator=(const MemoryGuard&) = delete;

  // `bytes` are about to be taken from the kernel. `untouched`: what was before, and the cgroup
  // does not have yet. `charged`: what all accounts have, for the text. RESOURCE_EXHAUSTED
  // kOutOfMemory: the cgroup would have too much; for now (budget.h), if only by what is untouched,
  // which may be counted twice while it is being touched.
  absl::Status Admit(int64_t bytes, int64_t untouched, int64_t charged);

 private:
  absl::Status Refuse(int64_t bytes, int64_t charged) const;

  const int64_t most_bytes_;
  const Cgroup cgroup_;
  const std::function<absl::Time()> now_;
  int64_t room_ = 0;       // until the next look
  int64_t had_bytes_ = 0;  // at the look by which one was refused
  absl::Time refused_at_ = absl::InfinitePast();
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_MEMORY_GUARD_H_
