// How a client wakes a daemon that sleeps, and how it knows that there is no need to.
//
// The doorbell page belongs to the whole daemon: clients can only read it. It says whether the node
// thread sleeps (or is about to). A word of the session's own memory says whether the daemon looks
// at its ring at all: of a session that has been silent it does not. A client that has published a
// frame looks at both and, if either says so, writes to its session's eventfd, which the daemon's
// epoll set holds. An eventfd is sticky: a wake that comes before the sleep is not lost. A futex
// word would have to be one that the client cannot write, so that it could not be changed before
// the wake, and would lose wakes.
//
// Why no wake is lost. These accesses are sequentially consistent, so they have one order:
//     client                              daemon
//   C1 tail = new  (ring.h)             D1 asleep = 1, or must_ring = 1
//   C2 read asleep and must_ring        D2 read every tail that it looks at, or this session's
// If C2 comes before D1 the client sees "awake" and does not ring; but then C1 comes before D2 and
// the daemon finds the frame. Otherwise C2 sees 1 and the eventfd is written. Release and acquire
// alone would not do: a processor may let C2 overtake C1.
//
// Threads: DoorbellView: any. Doorbell: the node thread.
// Ownership: each has its own mapping; the memfd is the Doorbell's, which gives clients descriptors
//   of it.
// Errors: OUT_OF_MEMORY what the system refuses; INVALID_ARGUMENT (MALFORMED) and UNIMPLEMENTED
//   (VERSION) a page that is none of this layout.
#ifndef CHORUS_CORE_TRANSPORT_DOORBELL_H_
#define CHORUS_CORE_TRANSPORT_DOORBELL_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/unique_fd.h"

namespace chorus {

inline constexpr uint64_t kDoorbellMagic = 0x314c4c45'42524843;  // "CHRBELL1"

struct DoorbellPage {
  static constexpr size_t kBytes = 4096;
  uint64_t magic;
  uint32_t version;  // kSessionMemoryVersion: one number for all that is shared
  alignas(128) std::atomic<uint32_t> asleep;
  // Changes when result arenas are gone that clients still map: a client that sees it unmaps what
  // it does not need, and maps again what it does. Until then the pages are charged to its tenant.
  alignas(128) std::atomic<uint32_t> let_go;
};

// Daemon side: made once, its descriptor goes to every client that attaches.
class Doorbell {
 public:
  // Makes the page, maps it writable and then seals it: no other writable mapping can be made.
  // RESOURCE_EXHAUSTED: the system refuses.
  static absl::StatusOr<std::unique_ptr<Doorbell>> Create();
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  int fd() const { return fd_.get(); }

  void AskToLetGo() { page_->let_go.fetch_add(1, std::memory_order_relaxed); }

  // Sleeps unless there is work. `any_work()` looks at everything that clients ring for (each
  // ring's HasFrame()) once; `sleep()` waits until an eventfd is readable, or whatever else it
  // watches. Returns whether it slept. While `any_work` and `sleep` run, clients ring.
  template <typename AnyWork, typename Sleep>
  bool SleepUnless(const AnyWork& any_work, const Sleep& sleep) {
    page_->asleep.store(1, std::memory_order_seq_cst);  // D1
    const bool sleeps = !any_work();                    // D2
    if (sleeps) sleep();
    // Late is harmless: a client that still sees 1 writes to its eventfd for nothing.
    page_->asleep.store(0, std::memory_order_relaxed);
    return sleeps;
  }

 private:
  Doorbell(DoorbellPage* page, UniqueFd fd) : page_(page), fd_(std::move(fd)) {}

  DoorbellPage* const page_;
  UniqueFd fd_;
};

// Client side: a read-only mapping. Absent in a forked child.
class DoorbellView {
 public:
  // `fd` stays the caller's. UNIMPLEMENTED (VERSION), INVALID_ARGUMENT (MALFORMED) as for
  // MapSessionMemory.
  static absl::StatusOr<std::unique_ptr<DoorbellView>> Map(int fd);
  ~DoorbellView();
  DoorbellView(const DoorbellView&) = delete;
  DoorbellView& operator=(const DoorbellView&) = delete;

  bool daemon_asleep() const {
    return page_->asleep.load(std::memory_order_seq_cst) != 0;  // C2
  }
  // Other than before: let go of what is not needed.
  uint32_t let_go() const { return page_->let_go.load(std::memory_order_relaxed); }

 private:
  explicit DoorbellView(const DoorbellPage* page) : page_(page) {}
  const DoorbellPage* const page_;
};

// A session's eventfd: made by the daemon, given to the client with the session's memory.
//
// The daemon watches it edge-triggered (EPOLLIN | EPOLLET) and never reads it: every write is an
// edge, and a read could be made to block, because O_NONBLOCK belongs to the open file that the
// client shares and may change. The client may write to it at any time; that costs the daemon one
// look at the rings.
absl::StatusOr<UniqueFd> CreateWakeEvent();
// Client: wakes the thread that watches it.
void RingWakeEvent(int event_fd);

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_DOORBELL_H_
