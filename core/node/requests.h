// What is asked of a node outside the sessions' logs, and what it answers with: the whole of it,
// with defaults, rights and checks, so that a transport only decodes and encodes. The room that
// carries a request out checks it; a transport may do so before, where a refusal is to cost
// nothing.
//
// Threads: plain data; callbacks run on the node thread, exactly once each, perhaps inside the call
// that takes them. Ownership: descriptors stay the node's; the rest are copies.
// Errors: those of Check() are MALFORMED, with what was expected and what came, where nothing else
// is said.
#ifndef CHORUS_CORE_NODE_REQUESTS_H_
#define CHORUS_CORE_NODE_REQUESTS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/ids.h"
#include "core/collective/call_sites.h"
#include "core/collective/instance.h"
#include "core/node/info.h"
#include "core/runtime/budget.h"
#include "core/runtime/buffer.h"
#include "core/tensor/type.h"

namespace chorus::node {

struct OpenSessionRequest {
  std::string tenant;                // "uid:1000"
  std::string label;                 // for diagnostics; at most 256 bytes
  int32_t pid = -1;                  // of an attached client
  bool attached = false;             // lives by its pidfd; else by its lease
  bool may_open = true;              // without having attached; NOT_ATTACHED where it may not
  absl::Duration lease;              // 0: the node's
  std::vector<DeviceIndex> devices;  // empty: `device_count` free-est ones
  int32_t device_count = 0;          // 0 counts as 1

  absl::Status Check() const;
};

// The shared memory of an attached session. The descriptors stay the node's.
struct SessionDescriptors {
  int memory_fd = -1;
  int wake_fd = -1;  // the client writes it when the doorbell says asleep
};

// A staging arena: a memfd that the client maps writable (attached) or fills by writes.
struct StagingArena {
  ArenaId arena;
  int64_t bytes = 0;
};

using OnStaging = std::function<void(absl::StatusOr<StagingArena>)>;

struct JoinRequest {
  std::string name;  // 1 to 256 bytes
  int32_t size = 0;
  Rank rank;
  absl::optional<DeviceIndex> device;  // one of the session's; absent: its first
  absl::Duration join_timeout;         // 0: the node's
  absl::Duration agree_timeout;        // 0: the node's; the first member's counts
  absl::Duration exec_timeout;
  CheckCallSites check_call_sites = CheckCallSites::kOff;  // the same on every rank
  // Not empty: what a transport could not understand. The request comes here all the same, because
  // other ranks may wait for this one.
  std::string not_understood;

  absl::Status Check() const;
};

using OnJoined = std::function<void(absl::StatusOr<WorldInfo>)>;

struct CreateGroupRequest {
  WorldId world;
  Rank rank;                  // the caller's
  std::vector<Rank> members;  // in group order
  // The caller's step, and how many requests for this list it has made in it before. Both or none;
  // none: as the node has counted.
  absl::optional<int64_t> step;
  absl::optional<int64_t> number;

  absl::Status Check() const;
};

struct AbortWorldRequest {
  WorldId world;
  Rank rank;            // the caller's
  Epoch epoch;          // the one to end; 0: the open one
  std::string message;  // told to every rank; at most 1,024 bytes

  absl::Status Check() const;
};

struct ReformWorldRequest {
  static constexpr absl::Duration kDefaultTimeout = absl::Seconds(60);

  WorldId world;
  Rank rank;                        // the caller's old one
  absl::Duration timeout;           // for the other survivors; 0: kDefaultTimeout
  absl::optional<int32_t> grow_to;  // UNSUPPORTED where it is there

  absl::Status Check() const;
};

struct ReformResult {
  Rank rank;  // the caller's new one
  int32_t size = 0;
  Epoch epoch;
  // Old rank and last published instance of every survivor, by new rank: where to resume.
  struct Survivor {
    Rank old_rank;
    absl::optional<InstanceKey> last_published;
  };
  std::vector<Survivor> survivors;
};

using OnReformed = std::function<void(absl::StatusOr<ReformResult>)>;

// The end of one command of a session's log.
struct Outcome {
  Sequence sequence;
  absl::Status status;  // carries the recorded Error
};

using OnOutcome = std::function<void(Outcome)>;

// A command of a log counts from 1.
absl::Status CheckSequence(Sequence sequence);

// Bytes of one part of an upload or download. For a reader that stops the daemon holds two such: as
// a message, and as the rest of it that waits to be sent.
inline constexpr int64_t kMaxChunkBytes = int64_t{256} << 10;

// A part of a staging arena.
struct WriteStagingRequest {
  ArenaId arena;
  int64_t offset = 0;
  std::string bytes;  // at most kMaxChunkBytes

  absl::Status Check() const;
};

// A range of a tensor's bytes.
struct DownloadRequest {
  TensorId tensor;
  int64_t offset = 0;
  int64_t size = 0;  // 0: to the end

  absl::Status Check() const;
  // Where it ends in a tensor of so many bytes. MALFORMED: it begins behind them.
  absl::StatusOr<int64_t> EndIn(int64_t tensor_bytes) const;
};

// How many events of the flight record to show: 100 where 0 are asked for. MALFORMED: more than
// 10,000, or less than none.
absl::StatusOr<int64_t> FlightEventLimit(int64_t limit);

// A tensor that the host can read.
struct ReadableTensor {
  TensorType type;
  DeviceIndex device;
  BufferRef buffer;  // keeps the bytes while held (node thread!)
  const char* data = nullptr;
  int64_t bytes = 0;
  // That it is being read, and of two parts on their way; given back with it (node thread!).
  Charge download;
  Charge parts;
};
using OnTensor = std::function<void(absl::StatusOr<ReadableTensor>)>;

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_REQUESTS_H_
