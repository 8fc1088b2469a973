// The memory that one attached session and the daemon share: commands one way, outcomes the other.
//
// One memfd, mapped writable by both, trusted by neither. The daemon creates it, seals its size and
// hands the descriptor out; each word below has one side that writes it. The daemon keeps private
// copies of what it writes and never reads it back, and it checks whatever it reads, after copying
// it. The client needs the daemon's words to be right for its own work only: it must not crash when
// they are not.
//
//   offset 0       header, written once by the daemon
//   page 0         three lines: the client's, the daemon's head, the daemon's `completed`
//   page 1         run records: the last kRunSlots outcomes; a run's record is sequence % kRunSlots
//   then           the submission ring: ring_bytes
//   then           the tensor table: tensor_slots records, a tensor's record is its slot
//
// Pages that are not touched cost nothing: a table of 65,536 tensors is 2 MiB of address space.
// After fork the mapping is absent in the child (MADV_DONTFORK), so that a forked child cannot
// disturb its parent's session; the client library makes its own objects inert there.
// Threads: the mapping itself is constant; ring.h and completion.h say which side may use which
// words.
// Ownership: each side has its own mapping, and the daemon the memfd. Errors: CreateSessionMemory
//   and MapSessionMemory say them.
#ifndef CHORUS_CORE_TRANSPORT_SESSION_MEMORY_H_
#define CHORUS_CORE_TRANSPORT_SESSION_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "core/base/unique_fd.h"

namespace chorus {

inline constexpr uint64_t kSessionMemoryMagic = 0x314d454d'53524843;  // "CHRSMEM1"
// Grows with every change of the layout, of the frames in the ring or of the meaning of a word.
inline constexpr uint32_t kSessionMemoryVersion = 3;
// Outcomes that are kept.
inline constexpr uint32_t kRunSlots = 1024;

struct SessionMemoryOptions {
  // A power of two, at least kMinRingBytes. No frame takes more than half of it.
  static constexpr uint32_t kMinRingBytes = 4096;
  static constexpr uint32_t kMaxRingBytes = 64u << 20;
  static constexpr uint32_t kMaxTensorSlots = 1u << 24;
  uint32_t ring_bytes = 256 * 1024;
  uint32_t tensor_slots = 65536;
};

// Words that different sides write lie two cache lines apart: processors fetch lines in pairs.
inline constexpr size_t kSharedLine = 128;

struct SessionHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t ring_bytes;
  uint32_t tensor_slots;
  uint32_t run_slots;
  uint64_t total_bytes;
};

// Written by the client.
struct alignas(kSharedLine) SessionClientLine {
  std::atomic<uint64_t> tail;                // bytes ever put into the ring
  std::atomic<uint32_t> completion_waiters;  // threads that sleep on `completed`
  std::atomic<uint32_t> space_waiter;        // 1: the writer sleeps on `head`
};

// Written by the daemon, except for the top bit of `completed`.
struct alignas(kSharedLine) SessionDaemonHead {
  std::atomic<uint64_t> head;  // bytes ever taken out of the ring
};
struct alignas(kSharedLine) SessionDaemonCompleted {
  // Changes with every batch of published records. The client flips kCompletedWakeBit to wake its
  // own waiters; the daemon's next store clears it, which is a change all the same.
  std::atomic<uint32_t> completed;
  // The first command that is not over though a later one may have its run record; 0: there is
  // none. Written before a later one gets the record.
  std::atomic<int64_t> unfinished;
};
inline constexpr uint32_t kCompletedWakeBit = 1u << 31;
// Changes seldom, so that the client has it in its cache.
struct alignas(kSharedLine) SessionDaemonBell {
  std::atomic<uint32_t> must_ring;  // 1: the daemon looks at the ring when the client rings
};

struct SessionControl {
  alignas(kSharedLine) SessionHeader header;
  SessionClientLine client;
  SessionDaemonHead daemon;
  SessionDaemonCompleted completion;
  SessionDaemonBell bell;
};

enum class TensorState : uint8_t {
  kEmpty = 0,     // never used, or released
  kPending = 1,   // named by a run that is not done
  kReady = 2,     // its bytes are at (arena, offset)
  kOnDevice = 3,  // computed, but where the host cannot read it
  kFailed = 4,    // will never have a value: see `code` and `error`
};

// `word` is written last and read first: the rest belongs to it.
struct TensorSlot {
  std::atomic<uint64_t> word;  // generation << 8 | TensorState
  std::atomic<int32_t> arena;
  std::atomic<int32_t> code;    // absl::StatusCode of kFailed
  std::atomic<int64_t> offset;  // bytes, into the arena
  std::atomic<int64_t> value;   // bytes of the tensor; for kFailed, the error's id
};
static_assert(sizeof(TensorSlot) == 32, "part of the layout");

// `sequence` is 0 while the record changes, and written last. Only done runs have a record.
struct RunSlot {
  std::atomic<int64_t> sequence;
  std::atomic<int32_t> code;  // absl::StatusCode; 0: it went well
  std::atomic<int32_t> unused;
  std::atomic<int64_t> error;  // ErrorId; 0: none
  std::atomic<int64_t> unused2;
};
static_assert(sizeof(RunSlot) == 32, "part of the layout");

// A mapping of it. Sizes are private copies, checked when it was made: what the other side writes
// later changes no address.
class SessionMemory {
 public:
  ~SessionMemory();
  SessionMemory(const SessionMemory&) = delete;
  SessionMemory& operator=(const SessionMemory&) = delete;

  // What one takes, when all of it is touched.
  static size_t TotalBytes(const SessionMemoryOptions& options);

  // The mapping is what may be written, not this object: const says nothing about the memory.
  SessionControl& control() const { return *reinterpret_cast<SessionControl*>(base_); }
  RunSlot* runs() const { return reinterpret_cast<RunSlot*>(base_ + kRunsOffset); }
  char* ring() const { return base_ + kRingOffset; }
  TensorSlot* tensors() const {
    return reinterpret_cast<TensorSlot*>(base_ + kRingOffset + options_.ring_bytes);
  }
  uint32_t ring_bytes() const { return options_.ring_bytes; }
  uint32_t tensor_slots() const { return options_.tensor_slots; }
  size_t total_bytes() const { return total_bytes_; }

  // The daemon's descriptor of the file, of OpenAgain (core/base/shared_file.h), by which it has
  // mapped the memory. -1 behind TakeFd(), and of a client, which has none: its mapping keeps the
  // memory.
  int fd() const { return fd_.get(); }
  UniqueFd TakeFd() { return std::move(fd_); }

 private:
  friend absl::StatusOr<std::unique_ptr<SessionMemory>> CreateSessionMemory(
      const SessionMemoryOptions& options);
  friend absl::StatusOr<std::unique_ptr<SessionMemory>> MapSessionMemory(int fd);

  static constexpr size_t kRunsOffset = 4096;
  static constexpr size_t kRingOffset = kRunsOffset + kRunSlots * sizeof(RunSlot);
  static_assert(sizeof(SessionControl) <= kRunsOffset && kRingOffset % 4096 == 0, "the layout");

  SessionMemory(char* base, size_t total_bytes, const SessionMemoryOptions& options, UniqueFd fd);

  char* const base_;
  const size_t total_bytes_;
  const SessionMemoryOptions options_;
  UniqueFd fd_;
};

// Daemon: makes, seals (shrink, grow, seal) and maps a session's memory.
// INVALID_ARGUMENT: sizes out of the bounds above. RESOURCE_EXHAUSTED (OUT_OF_MEMORY): the system
// refuses the file or the mapping.
absl::StatusOr<std::unique_ptr<SessionMemory>> CreateSessionMemory(
    const SessionMemoryOptions& options);

// Client: maps what the daemon sent. `fd` stays the caller's and may be closed afterwards.
// UNIMPLEMENTED (VERSION): another layout than this build's; the text has both versions.
// INVALID_ARGUMENT (MALFORMED): not a session's memory, not sealed, or sizes that do not fit.
absl::StatusOr<std::unique_ptr<SessionMemory>> MapSessionMemory(int fd);

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_SESSION_MEMORY_H_
