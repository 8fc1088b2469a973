// What destructors leave: names and worlds that the daemon is to be told are gone.
//
// Destructors of tensors and tape entries may run anywhere, under the session's lock too: they only
// queue what is to be released. The queue is sent at the end of the next locked section, or at once
// where that matters to others (tape entries, many bytes). What finds no room in the link goes
// back, and is sent at the end of a later section; meanwhile no destructor waits for room.
//
// Threads: any. Its own lock is held for a few instructions.
// Ownership: the session's; what is to be released later keeps the session.
// Errors: none. In a forked child nothing is queued or sent: what is released is the parent's.
#ifndef CHORUS_CLIENT_INTERNAL_RELEASES_H_
#define CHORUS_CLIENT_INTERNAL_RELEASES_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "client/internal/fork_mark.h"
#include "core/base/ids.h"
#include "core/base/mutex.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

// Members of a world that are gone, all of one session.
struct GoneWorld {
  WorldId world;
  std::vector<Rank> ranks;
  Sequence runs_before;  // its runs have lower ones; 0: not known yet
};

class Releases {
 public:
  struct Graphs {
    std::vector<GraphId> ids;
    int32_t of_calls = 0;  // so many of these
  };
  struct Batch {
    std::vector<TensorId> tensors;
    std::vector<ArenaId> arenas;
    std::vector<DropTape::Entry> tapes;
    std::vector<GoneWorld> worlds;
  };

  // `drain` sends what is there, unless this thread is about to, or another has found no room.
  explicit Releases(std::function<void()> drain) : drain_(std::move(drain)) {}

  void Add(TensorId tensor, int64_t bytes);
  void Add(ArenaId arena);
  void Add(DropTape::Entry tape);
  void Add(GoneWorld world);
  // `of_calls`: the members' own, which are counted.
  void Add(absl::Span<const GraphId> graphs, bool of_calls);
  // What was taken and has found no room: it goes next time, however few they are.
  void PutBack(Batch batch);
  // Something there should not wait.
  bool urgent() const { return urgent_.load(std::memory_order_relaxed); }
  // Sends what is there if somebody may be waiting for it.
  void DrainIfUrgent() const {
    if (urgent() && !mark_.Forked()) drain_();
  }

  // What is there but for graphs; tensors only where they are many, or `all` are asked for: tape
  // entries are urgent by themselves, tensors need not go with each of them.
  Batch Take(bool all);
  Graphs TakeGraphs();

 private:
  const std::function<void()> drain_;
  const ForkMark mark_;
  Mutex mutex_;
  Batch batch_ ABSL_GUARDED_BY(mutex_);
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of its tensors
  Graphs graphs_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> urgent_{false};
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_RELEASES_H_
