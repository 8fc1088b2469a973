// What a session asks of its daemon, whatever carries it.
//
// The log (Submit and the outcomes of what was submitted) goes over the ring, the gRPC stream or
// unary calls; requests outside the log go over gRPC and the attach socket. All implementations
// show the same order, the same outcomes and the same errors.
//
// Threads: Submit is called by one thread at a time, in the order of sequences (the session's lock
//   sees to it). Everything else: any thread.
// Ownership: the session owns its link. What a call gives is the caller's, but for Staging::data,
//   which is the link's until UnmapStaging.
// Errors: once the daemon is gone every call returns UNAVAILABLE kDaemonLost, or kDraining where it
//   has said that it was stopped; also calls that wait at that moment. Else what the daemon
//   answers, and as said at each call.
#ifndef CHORUS_CLIENT_INTERNAL_LINK_H_
#define CHORUS_CLIENT_INTERNAL_LINK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "chorus/session.h"
#include "core/base/ids.h"
#include "core/transport/command.h"
#include "core/transport/completion.h"

namespace chorus {
namespace internal {

struct JoinedWorld {
  WorldId world;
  Epoch epoch;
};

struct ReformedWorld {
  int rank = -1;
  int size = 0;
  Epoch epoch;  // with which the new membership begins
  std::vector<World::Survivor> survivors;
};

class Link {
 public:
  virtual ~Link() = default;

  virtual Transport transport() const = 0;
  // The daemon's indices of the session's devices, in the session's order.
  virtual std::vector<DeviceIndex> devices() const = 0;
  // What the daemon says of them, in the same order; none where it says nothing.
  virtual std::vector<DeviceInfo> device_infos() const { return {}; }
  // Names that the session may have at a time.
  virtual int32_t max_tensors() const = 0;
  virtual int32_t max_graphs() const = 0;

  // --- The log ---
  // Appends a command. Waits while there is no room for it; what it does is not waited for. Not OK:
  // the link has not taken it, and its sequence is the next command's. INVALID_ARGUMENT kMalformed:
  // as it is it cannot be sent (no form of it, or larger than a frame may be); the next one may.
  // Once it is taken its sequence has an outcome: the link sees to it that the log has no gap where
  // the daemon did not read it.
  virtual absl::Status Submit(const Command& command) = 0;
  // The outcome if it is known here and now; NOT_FOUND kOutcomeForgotten: the command is over, and
  // WaitCommand may still know how.
  virtual absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence sequence) = 0;
  // The outcome, with all that the daemon knows of an error. DEADLINE_EXCEEDED kTransportTimeout:
  // not within `timeout`; ask again.
  virtual absl::Status WaitCommand(Sequence sequence, absl::Duration timeout) = 0;
  // Waits until `tensor` is computed or failed. `producer` is the command that makes it. True: it
  // is where only its device can read it.
  virtual absl::StatusOr<bool> WaitTensor(TensorId tensor, Sequence producer,
                                          absl::Duration timeout) = 0;

  // --- Bytes ---
  // Copies out a tensor that WaitTensor has seen. Where MakeReadable was asked for it waits for
  // that, and for nothing else.
  virtual absl::Status Read(TensorId tensor, Sequence producer, char* out, int64_t bytes,
                            absl::Duration timeout) = 0;
  // The same in place, read-only. What it gives keeps the mapping; the bytes stay as long as the
  // tensor's name does. UNIMPLEMENTED where there is no shared memory.
  virtual absl::StatusOr<std::shared_ptr<const char>> MapTensor(TensorId tensor, Sequence producer,
                                                                int64_t bytes,
                                                                absl::Duration timeout) = 0;
  struct Staging {
    ArenaId arena;
    char* data = nullptr;  // null: filled by WriteStaging
  };
  virtual absl::StatusOr<Staging> CreateStaging(int64_t bytes) = 0;
  virtual absl::Status WriteStaging(ArenaId arena, int64_t offset, absl::string_view bytes) = 0;
  // The session uses this memory no more, and has said so to the daemon (Release).
  virtual void UnmapStaging(ArenaId arena) = 0;

  // --- Worlds ---
  virtual absl::StatusOr<JoinedWorld> Join(const WorldOptions& options, DeviceIndex device) = 0;
  // `request`: of the rank for this list: its step, and how many it has made before in it.
  virtual absl::StatusOr<GroupId> CreateGroup(WorldId world, Rank rank,
                                              absl::Span<const int> members,
                                              InstanceKey::Request request) = 0;
  virtual absl::Status Leave(WorldId world, Rank rank) = 0;
  virtual absl::StatusOr<ReformedWorld> Reform(WorldId world, Rank rank, Timeout timeout) = 0;

  // What this session's ranks wait for others in, a line each: what, whose, which ranks are
  // missing.
  virtual absl::StatusOr<std::vector<std::string>> Waits() = 0;

  // Ends the session, which a daemon that lives may have though the link is lost. Later calls
  // return NOT_FOUND kSessionLost, or why it was lost. OK once it has been called, or the daemon is
  // gone.
  virtual absl::Status Close() = 0;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_LINK_H_
