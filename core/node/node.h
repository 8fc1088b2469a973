// The daemon without its front ends: sessions, worlds, graphs, tensors and their runs.
//
// A LocalNode turns the frames of its sessions' logs into votes, gangs into launches and
// completions into published tensors. It is embeddable: tests drive it without gRPC, and chorusd
// wraps it.
//
// Threads: one thread, the node thread, makes every call (NodeLoop runs it and lets others post).
//   Callbacks run on the node thread, exactly once each, perhaps inside the call that takes them.
//   Nothing here blocks. Executors' completions arrive through the `wake` function.
#ifndef CHORUS_CORE_NODE_NODE_H_
#define CHORUS_CORE_NODE_NODE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/backend/backend.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/collective/sequencer.h"
#include "core/node/records.h"
#include "core/runtime/memory.h"

namespace chorus {

struct NodeOptions {
  int64_t memory_limit_bytes = int64_t{8} << 30;
  int32_t max_sessions = 4096;
  // For each session:
  int32_t max_tensors = 65536;
  int32_t max_graphs = 16384;
  int32_t max_staging_arenas = 256;
  int64_t max_staging_bytes = int64_t{8} << 30;
  int32_t max_pending_runs = 1024;
  int32_t max_graph_nodes = 1 << 20;
  int32_t max_worlds = 1024;
  int32_t max_groups_per_world = 4096;              // in its life
  absl::Duration lease = absl::Seconds(60);         // of unattached sessions
  absl::Duration detach_grace = absl::Seconds(30);  // votes of a session without channel stand
  absl::Duration join_timeout = absl::Seconds(300);
  absl::Duration gap_timeout = absl::Seconds(10);  // for a missing predecessor in a log
  SequencerOptions sequencer;                      // a world's own options override it
  // Work that is the same on several ranks (a data-parallel optimiser's update) is done once and
  // kept once. Results are the same bits either way.
  bool share_equal_work = true;
  // Takes one line for each failure (records.h, FailureLine), on the node thread; empty: nobody.
  std::function<void(absl::string_view line)> log_failure;
};

enum class SessionState { kActive, kDetached, kDead };

struct OpenSessionRequest {
  std::string tenant;                // "uid:1000"
  std::string label;                 // for diagnostics
  int32_t pid = -1;                  // of an attached client
  bool attached = false;             // lives by its pidfd; else by its lease
  absl::Duration lease;              // 0: the node's
  std::vector<DeviceIndex> devices;  // empty: `device_count` free-est ones
  int32_t device_count = 1;
};

struct SessionInfo {
  SessionId id;
  std::string tenant;
  std::string label;
  int32_t pid = -1;
  bool attached = false;
  SessionState state = SessionState::kActive;
  std::vector<DeviceIndex> devices;
  int64_t live_tensors = 0;
  int64_t live_graphs = 0;
  int64_t staging_bytes = 0;
  int64_t commands = 0;       // taken from the log so far
  absl::Duration lease_left;  // infinite when attached
};

struct JoinRequest {
  std::string name;
  int32_t size = 0;
  Rank rank;
  DeviceIndex device;            // one of the session's
  absl::Duration join_timeout;   // 0: the node's
  absl::Duration agree_timeout;  // 0: the node's; the first member's counts
  absl::Duration exec_timeout;
  CheckCallSites check_call_sites = CheckCallSites::kOff;  // the same on every rank
};

struct WorldInfo {
  struct Member {
    Rank rank;
    SessionId session;
    DeviceIndex device;
    int32_t pid = -1;
    bool alive = true;  // false: dead or left
    bool joined = false;
    CallPosition next;  // its next call of the world's group, as counted here
  };
  WorldId id;
  std::string tenant;
  std::string name;
  int32_t size = 0;
  Epoch epoch;
  std::vector<Member> members;
  std::vector<std::vector<Rank>> groups;  // by GroupId
  absl::Duration waiting;                 // while members are missing: since the first joined
  absl::Duration agree_timeout;
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

struct DeviceInfo {
  DeviceIndex index;
  std::string name;  // "host:0"
  int64_t launches = 0;
  int32_t sessions = 0;
};

// How bytes took their way, summed since the start: shows that nothing fell back silently.
struct PathCounters {
  int64_t aliased_bytes = 0;   // results that moved nothing
  int64_t reduced_bytes = 0;   // results written by reductions
  int64_t copied_bytes = 0;    // uploads, frozen inputs, pieces moved by collectives
  int64_t streamed_bytes = 0;  // over gRPC
  int64_t donated_bytes = 0;   // results that took over donated inputs
  int64_t shared_bytes = 0;    // results of work that another rank did for this one as well
};

struct NodeStats {
  int64_t memory_limit_bytes = 0;
  int64_t memory_used_bytes = 0;
  int64_t runs_published = 0;
  int64_t runs_failed = 0;
  int64_t shared_kernels = 0;  // that were not run, because another rank ran an equal one
  // Parts of gradients that ranks gave up though a leaf of theirs lay behind, and others asked for.
  int64_t gradients_given_up = 0;
  PathCounters paths;
  // Held at this moment: none of it may grow while a job goes on.
  int64_t live_runs = 0;
  int64_t live_buffers = 0;
  int64_t loaded_plans = 0;
  int64_t agreement_rows = 0;  // of all worlds' sequencers
};

// The end of one command of a session's log.
struct Outcome {
  Sequence sequence;
  absl::Status status;  // carries the recorded Error
};

class LocalNode {
 public:
  // `wake` must be safe from any thread; it makes the node thread call Poll() soon. `backend`
  // outlives the node.
  LocalNode(NodeOptions options, Backend* backend, std::function<void()> wake);
  ~LocalNode();
  LocalNode(const LocalNode&) = delete;
  LocalNode& operator=(const LocalNode&) = delete;

  // Does what is there to do: frames in the rings, completions, timers due at `now`. Returns true
  // when it did something.
  bool Poll(absl::Time now);
  // The next timer; InfiniteFuture when there is none.
  absl::Time NextDeadline() const;
  // True when a run is in the executors' hands: the loop then keeps polling a little longer.
  bool Busy() const;

  // --- Sessions -------------------------------------------------------------------------------
  absl::StatusOr<SessionInfo> OpenSession(const OpenSessionRequest& request, absl::Time now);
  // Releases all that the session owns. Members leave their worlds in an orderly way.
  absl::Status CloseSession(SessionId session, absl::Time now);
  // The client's process has ended: waiting ranks get ABORTED naming it; committed work completes.
  void SessionDied(SessionId session, absl::Time now);
  // Its channel was lost though the process lives, or is back.
  void SetDetached(SessionId session, bool detached, absl::Time now);
  // `ended` is told of every session that ends, whatever ends it, on the node thread.
  void OnSessionEnded(std::function<void(SessionId)> ended);
  absl::Status RenewLease(SessionId session, absl::Time now);

  // Shared memory of an attached session; made at the first call. The descriptors stay the node's.
  struct SessionDescriptors {
    int memory_fd = -1;
    int wake_fd = -1;  // the client writes it when the doorbell says asleep
  };
  absl::StatusOr<SessionDescriptors> AttachMemory(SessionId session);
  // A staging arena: memfd that the client maps writable (attached) or fills with WriteStaging.
  struct StagingArena {
    ArenaId arena;
    int fd = -1;
    int64_t bytes = 0;
  };
  absl::StatusOr<StagingArena> CreateStaging(SessionId session, int64_t bytes);
  absl::Status ConfirmStaging(SessionId session, ArenaId arena);  // the client has mapped it
  absl::Status ReleaseStaging(SessionId session, ArenaId arena);
  absl::Status WriteStaging(SessionId session, ArenaId arena, int64_t offset,
                            absl::string_view bytes);
  // A result arena that holds a tensor which the session may read. The descriptor stays the node's.
  absl::StatusOr<int> ResultArenaFd(SessionId session, ArenaId arena);

  // --- Worlds ---------------------------------------------------------------------------------
  using OnJoined = std::function<void(absl::StatusOr<WorldInfo>)>;
  // Ends when every rank has joined, or at join_timeout naming the missing ranks. A duplicate rank,
  // another size or a device that another rank of that world uses is refused at once.
  void JoinWorld(SessionId session, const JoinRequest& request, absl::Time now, OnJoined done);
  // `request`: which of the rank's requests for this list; absent: its next one.
  absl::StatusOr<GroupId> CreateGroup(SessionId session, WorldId world, Rank rank,
                                      absl::Span<const Rank> members,
                                      absl::optional<InstanceKey::Request> request);
  absl::Status LeaveWorld(SessionId session, WorldId world, Rank rank, absl::Time now);
  // Ends `epoch`, if it is the open one, with ABORTED kAborted naming `rank` and `message`. 0: the
  // open one, whichever it is.
  absl::Status AbortWorld(SessionId session, WorldId world, Rank rank, Epoch epoch,
                          absl::string_view message, absl::Time now);
  // Ends when every survivor has asked, or at `timeout` naming who has not.
  using OnReformed = std::function<void(absl::StatusOr<ReformResult>)>;
  void ReformWorld(SessionId session, WorldId world, Rank rank, absl::Duration timeout,
                   absl::Time now, OnReformed done);

  // --- The log by gRPC ------------------------------------------------------------------------
  using OnOutcome = std::function<void(Outcome)>;
  // Takes one frame. Out-of-order sequences wait for their predecessors up to gap_timeout; a repeat
  // is answered from the record. `done` gets the outcome.
  void Submit(SessionId session, std::string frame, absl::Time now, OnOutcome done);
  // The outcome of a command submitted earlier, by any transport; waits for it until `deadline`.
  void WaitOutcome(SessionId session, Sequence sequence, absl::Time deadline, OnOutcome done);

  // --- Tensors --------------------------------------------------------------------------------
  struct TensorView {
    TensorType type;
    DeviceIndex device;
    BufferRef buffer;  // host-readable; keeps the bytes while held (node thread!)
    const char* data = nullptr;
    int64_t bytes = 0;
  };
  using OnTensor = std::function<void(absl::StatusOr<TensorView>)>;
  // Waits until the tensor is readable, or failed, or `deadline`.
  void ReadTensor(SessionId session, TensorId tensor, absl::Time deadline, OnTensor done);
  void CountStreamed(int64_t bytes);

  // --- Diagnostics (read only; `tenant` empty: all) -------------------------------------------
  std::vector<DeviceInfo> Devices() const;
  std::vector<SessionInfo> Sessions(absl::string_view tenant, absl::Time now) const;
  std::vector<WorldInfo> Worlds(absl::string_view tenant, absl::Time now) const;
  struct PendingView {
    WorldId world;
    std::string world_name;
    PendingInstance instance;
  };
  std::vector<PendingView> Pending(absl::string_view tenant, absl::Time now) const;
  // Records the refusal of a request that never became a session's, and returns it with its id.
  absl::Status Refused(absl::string_view tenant, int32_t pid, const absl::Status& status);
  absl::optional<Error> FindError(ErrorId id, absl::string_view tenant) const;
  std::vector<FlightEvent> Flight(absl::string_view tenant, int64_t limit) const;
  NodeStats Stats() const;
  // The tenant of a session, for authorisation; also of one that has died lately, so that its owner
  // may be told how. NOT_FOUND kSessionLost when it is gone.
  absl::StatusOr<std::string> TenantOf(SessionId session) const;

  // Refuses new sessions and worlds with UNAVAILABLE kDraining.
  void StartDraining();
  // True when no run is pending or under way.
  bool Idle() const;
  // Ends every world, every run and every wait with UNAVAILABLE kDraining, and refuses later runs.
  void AbortAll(absl::Time now);

  // The read-only page that tells clients whether the node thread sleeps.
  int doorbell_fd() const;
  // Calls `sleep` unless there is work; while it runs, clients ring their wake descriptors. Returns
  // whether it was called.
  bool SleepUnlessBusy(const std::function<void()>& sleep);
  // Descriptor of an epoll set of all sessions' wake descriptors, for the loop.
  int wake_epoll_fd() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_NODE_NODE_H_
