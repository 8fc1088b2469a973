// The daemon without its front ends: sessions, worlds, graphs, tensors and their runs.
//
// A LocalNode turns the frames of its sessions' logs into votes, gangs into launches and
// completions into published tensors. It is embeddable: tests drive it without gRPC, and chorusd
// wraps it.
//
// Threads: one thread, the node thread, makes every call (NodeLoop runs it and lets others post).
//   Callbacks run on the node thread, exactly once each, perhaps inside the call that takes them.
//   Nothing here blocks. Executors' completions arrive through the `wake` function.
// Ownership: a node owns its sessions and worlds and all that they hold, and its devices. Errors:
// each has a reason of core/base/error.h, and is recorded where a session's call has failed.
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
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/collective/instance.h"
#include "core/node/info.h"
#include "core/node/options.h"
#include "core/node/records.h"
#include "core/node/requests.h"
#include "core/node/timers.h"
#include "core/runtime/devices.h"

namespace chorus::node {

struct Session;

// One call that waits. Threads: made on any, what it holds is the node thread's.
struct Wait {
  TimerQueue::Id deadline;
  std::function<void(absl::Time now)> forget;  // of what has no deadline; null: nothing waits
};
using WaitRef = std::shared_ptr<Wait>;

class LocalNode {
 public:
  // `wake` must be safe from any thread; it makes the node thread call Poll() soon. The
  // node has `devices`.
  LocalNode(NodeOptions options, std::unique_ptr<chorus::Devices> devices,
            std::function<void()> wake);
  ~LocalNode();
  LocalNode(const LocalNode&) = delete;
  LocalNode& operator=(const LocalNode&) = delete;

  // Does the work that is there: frames in the rings, completions, timers due at `now`. Returns
  // true when it did something.
  bool Poll(absl::Time now);
  // The time of the calls that follow and name none. Poll() sets it too.
  void SetTime(absl::Time now);
  // The next timer; InfiniteFuture when there is none.
  absl::Time NextDeadline() const;
  // True when a run is in the executors' hands: the loop then keeps polling a little longer.
  bool Busy() const;

  // --- Sessions -------------------------------------------------------------------------------
  absl::StatusOr<SessionInfo> OpenSession(const OpenSessionRequest& request, absl::Time now);
  // Releases all that the session owns. Members leave their worlds in an orderly way. Of many
  // results and graphs the memory is free a few turns later (AfterReleases).
  absl::Status CloseSession(SessionId session, absl::Time now);
  // Runs `done`, in a Poll, when the memory of the tenant's sessions that have ended is free.
  void AfterReleases(const std::string& tenant, std::function<void()> done);
  // The client's process has ended: waiting ranks get ABORTED naming it; committed work completes.
  void SessionDied(SessionId session, absl::Time now);
  // Its channel was lost though the process lives, or is back.
  void SetDetached(SessionId session, bool detached, absl::Time now);
  // `on_ended` is told of every session that ends, whatever ends it, on the node thread.
  void OnSessionEnded(std::function<void(SessionId)> on_ended);
  // Returns how long it lives from now on; InfiniteDuration: by its process.
  absl::StatusOr<absl::Duration> RenewLease(SessionId session, absl::Time now);
  // False of one that has ended, however lately.
  bool Lives(SessionId session) const;

  // Shared memory of an attached session; made at the first call.
  absl::StatusOr<SessionDescriptors> AttachMemory(SessionId session);
  absl::Status ConfirmMemory(SessionId session);  // as Rings::Confirm
  // Where its memory is on its way, `done` is called when that is there.
  void CreateStaging(SessionId session, int64_t bytes, OnStaging done);
  // For a client that maps it; the node's own. Until it has said that it has mapped and sealed it
  // (Arena::ConfirmMapped) no command may use it. Without a descriptor outside WriteStaging fills
  // it.
  absl::StatusOr<int> StagingFd(SessionId session, ArenaId arena);
  absl::Status ConfirmStaging(SessionId session, ArenaId arena);
  absl::Status ReleaseStaging(SessionId session, ArenaId arena);
  absl::Status WriteStaging(SessionId session, ArenaId arena, int64_t offset,
                            absl::string_view bytes);
  // A result arena that holds a tensor which the session may read. The descriptor stays the node's.
  absl::StatusOr<int> ResultArenaFd(SessionId session, ArenaId arena);

  // --- Worlds ---------------------------------------------------------------------------------
  // Ends when every rank has joined, or at the first join_timeout of those that have, naming the
  // missing ranks; or with kCancelled when its session joins as this rank again. A duplicate rank,
  // another size, other check_call_sites or a device that another rank of that world uses is
  // refused at once. Where `wait`, unless null, is withdrawn before, the rank has not joined, and
  // nobody is told.
  void JoinWorld(SessionId session, const JoinRequest& request, absl::Time now, OnJoined done,
                 const WaitRef& wait = nullptr);
  absl::StatusOr<GroupId> CreateGroup(SessionId session, const CreateGroupRequest& request);
  absl::Status LeaveWorld(SessionId session, WorldId world, Rank rank, absl::Time now);
  // Ends the epoch, if it is the open one, with ABORTED kAborted naming rank and message.
  absl::Status AbortWorld(SessionId session, const AbortWorldRequest& request, absl::Time now);
  // Ends when every survivor has asked, or when the first timeout of those that have is over,
  // naming the others. A rank that does not wait any more, for that or because `wait`, unless null,
  // was withdrawn, has not asked. A rank that asks again ends what it has asked with kCancelled.
  void ReformWorld(SessionId session, const ReformWorldRequest& request, absl::Time now,
                   OnReformed done, const WaitRef& wait = nullptr);

  // --- The log by gRPC ------------------------------------------------------------------------
  // Takes one frame. Out-of-order sequences wait for their predecessors up to gap_timeout; a repeat
  // is answered from the record. `done` gets the outcome, unless `wait`, where it is not null, is
  // withdrawn before.
  void Submit(SessionId session, std::string frame, absl::Time now, OnOutcome done,
              const WaitRef& wait = nullptr);
  // The outcome of a command submitted earlier, by any transport; waits for it until `deadline`, or
  // until `wait`, unless null, is withdrawn.
  void WaitOutcome(SessionId session, Sequence sequence, absl::Time deadline, OnOutcome done,
                   const WaitRef& wait = nullptr);
  // Ends a wait that nobody waits for any more, as its deadline would, or without a word where it
  // has none: what it was charged is free.
  void Withdraw(const WaitRef& wait, absl::Time now);

  // --- Tensors --------------------------------------------------------------------------------
  // Waits until the tensor is readable, or failed, or `deadline`, or `wait`, unless null, is
  // withdrawn.
  void ReadTensor(SessionId session, TensorId tensor, absl::Time deadline, OnTensor done,
                  const WaitRef& wait = nullptr);
  void CountStreamed(int64_t bytes);

  // --- Diagnostics (read only; `tenant` empty: all) -------------------------------------------
  // A tenant is shown nothing of the others' use of devices: `launches` is 0 for it, and of the
  // stats it gets its own bytes, buffers and rows.
  std::vector<DeviceInfo> Devices(absl::string_view tenant) const;
  std::vector<SessionInfo> Sessions(absl::string_view tenant, absl::Time now) const;
  // NOT_FOUND kSessionLost.
  absl::StatusOr<SessionInfo> Describe(SessionId session, absl::Time now) const;
  // All, or the one that is named. NOT_FOUND kUnknownName: there is none of that name to be seen.
  absl::StatusOr<Listing<WorldInfo>> Worlds(absl::string_view tenant, absl::optional<WorldId> one,
                                            absl::Time now) const;
  Listing<PendingView> Pending(absl::string_view tenant, absl::Time now) const;
  // Records the refusal of a request that never became a session's, and returns it with its id.
  absl::Status Refused(absl::string_view tenant, int32_t pid, const absl::Status& status);
  // NOT_FOUND kUnknownName: not recorded, no longer kept, or another tenant's.
  absl::StatusOr<Error> FindError(ErrorId id, absl::string_view tenant) const;
  // The newest so many (FlightEventLimit).
  absl::StatusOr<std::vector<FlightEvent>> Flight(absl::string_view tenant, int64_t limit) const;
  NodeStats Stats(absl::string_view tenant) const;
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
  struct Parts;
  void EndSession(const std::shared_ptr<Session>& session, const std::string& died, absl::Time now);
  template <typename Fn>
  auto WithSession(SessionId id, Fn fn) -> decltype(fn(std::shared_ptr<Session>()));

  const std::unique_ptr<Parts> parts_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_NODE_H_
