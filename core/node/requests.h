// What is asked of a node outside the sessions' logs, and what it answers with.
//
// Plain data. Callbacks run on the node thread, exactly once each, perhaps inside the call that
// takes them.
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
#include "core/collective/instance.h"
#include "core/collective/sequencer.h"
#include "core/node/info.h"
#include "core/runtime/budget.h"
#include "core/runtime/buffer.h"
#include "core/tensor/type.h"

namespace chorus {

struct OpenSessionRequest {
  std::string tenant;                // "uid:1000"
  std::string label;                 // for diagnostics
  int32_t pid = -1;                  // of an attached client
  bool attached = false;             // lives by its pidfd; else by its lease
  absl::Duration lease;              // 0: the node's
  std::vector<DeviceIndex> devices;  // empty: `device_count` free-est ones
  int32_t device_count = 1;
};

// The shared memory of an attached session. The descriptors stay the node's.
struct SessionDescriptors {
  int memory_fd = -1;
  int wake_fd = -1;  // the client writes it when the doorbell says asleep
};

// A staging arena: a memfd that the client maps writable (attached) or fills by writes. The
// descriptor stays the node's.
struct StagingArena {
  ArenaId arena;
  int fd = -1;
  int64_t bytes = 0;
};

struct JoinRequest {
  std::string name;
  int32_t size = 0;
  Rank rank;
  DeviceIndex device{-1};        // one of the session's; -1: its first
  absl::Duration join_timeout;   // 0: the node's
  absl::Duration agree_timeout;  // 0: the node's; the first member's counts
  absl::Duration exec_timeout;
  CheckCallSites check_call_sites = CheckCallSites::kOff;  // the same on every rank
};

using OnJoined = std::function<void(absl::StatusOr<WorldInfo>)>;

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

// Bytes of one part of an upload or download. A reader who stops has two such: as a message, and as
// what of it waits to be sent.
inline constexpr int64_t kMaxChunkBytes = int64_t{1} << 20;

// A tensor that the host can read.
struct ReadableTensor {
  TensorType type;
  DeviceIndex device;
  BufferRef buffer;  // keeps the bytes while held (node thread!)
  const char* data = nullptr;
  int64_t bytes = 0;
  Charge download;  // that it is being read; given back with it (node thread!)
};
using OnTensor = std::function<void(absl::StatusOr<ReadableTensor>)>;

}  // namespace chorus

#endif  // CHORUS_CORE_NODE_REQUESTS_H_
