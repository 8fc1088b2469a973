// The parts of LocalNode::Impl, split over node_sessions.cc (sessions, log, names), node_worlds.cc
// (membership), node_runs.cc (submit, agree, launch, publish), node_equal.cc (work that ranks have
// in common), node_failures.cc (what is recorded of errors) and node_views.cc (diagnostics).
//
// Threads: the node thread.
#ifndef CHORUS_CORE_NODE_NODE_IMPL_H_
#define CHORUS_CORE_NODE_NODE_IMPL_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "core/node/launcher.h"
#include "core/node/node.h"
#include "core/node/run_state.h"
#include "core/node/session.h"
#include "core/node/timers.h"
#include "core/node/world.h"
#include "core/transport/doorbell.h"

namespace chorus {

// UNAVAILABLE (DRAINING).
absl::Status DrainingError();

class LocalNode::Impl {
 public:
  Impl(NodeOptions options, Backend* backend, std::function<void()> wake);
  ~Impl();

  // --- node_sessions.cc -----------------------------------------------------------------------
  bool Poll(absl::Time now);
  absl::StatusOr<SessionInfo> OpenSession(const OpenSessionRequest& request, absl::Time now);
  // `died`: how, in words for its peers; empty: in an orderly way.
  void EndSession(const std::shared_ptr<Session>& session, const std::string& died, absl::Time now);
  void SetDetached(const std::shared_ptr<Session>& session, bool detached, absl::Time now);
  void RenewLease(Session* session, absl::Time now);
  absl::StatusOr<SessionDescriptors> AttachMemory(Session* session);
  absl::StatusOr<StagingArena> CreateStaging(Session* session, int64_t bytes);
  absl::StatusOr<std::shared_ptr<Arena>> FindStaging(Session* session, ArenaId arena);
  absl::Status ReleaseStaging(Session* session, ArenaId arena);
  absl::Status WriteStaging(Session* session, ArenaId arena, int64_t offset,
                            absl::string_view bytes);
  absl::StatusOr<int> ResultArenaFd(Session* session, ArenaId arena);
  void TakeFrame(const std::shared_ptr<Session>& session, absl::string_view frame, absl::Time now,
                 OnOutcome done);
  void WaitOutcome(const std::shared_ptr<Session>& session, Sequence sequence, absl::Time deadline,
                   OnOutcome done);
  void ReadTensor(const std::shared_ptr<Session>& session, TensorId id, absl::Time deadline,
                  OnTensor done);
  bool SleepUnlessBusy(const std::function<void()>& sleep);

  // --- node_worlds.cc -------------------------------------------------------------------------
  void JoinWorld(const std::shared_ptr<Session>& session, const JoinRequest& request,
                 absl::Time now, OnJoined done);
  absl::StatusOr<GroupId> CreateGroup(Session* session, WorldId world, Rank rank,
                                      absl::Span<const Rank> members,
                                      absl::optional<InstanceKey::Request> request);
  absl::Status LeaveWorld(Session* session, WorldId world, Rank rank, absl::Time now);
  absl::Status AbortWorld(Session* session, WorldId world, Rank rank, Epoch epoch,
                          absl::string_view message, absl::Time now);
  void ReformWorld(Session* session, WorldId world, Rank rank, absl::Duration timeout,
                   absl::Time now, OnReformed done);
  void AbortAll(absl::Time now);

  // --- node_views.cc --------------------------------------------------------------------------
  std::vector<DeviceInfo> Devices() const;
  SessionInfo Describe(const Session& session, absl::Time now) const;
  WorldInfo Describe(const World& world, absl::Time now) const;
  std::vector<SessionInfo> Sessions(absl::string_view tenant, absl::Time now) const;
  std::vector<WorldInfo> Worlds(absl::string_view tenant, absl::Time now) const;
  std::vector<PendingView> Pending(absl::string_view tenant, absl::Time now) const;
  std::vector<FlightEvent> Flight(absl::string_view tenant, int64_t limit) const;
  NodeStats Stats() const;
  bool HasRuns() const { return runs_.live() > 0; }

  // `status` with its error recorded, for who asked. `session` may be null.
  absl::Status Told(Session* session, const absl::Status& status);
  absl::Status Told(const std::string& tenant, const FailureOrigin& failure,
                    const absl::Status& status);

  absl::StatusOr<std::shared_ptr<Session>> FindSession(SessionId id) const;
  absl::StatusOr<std::string> TenantOf(SessionId id) const;

  // Read by the thin wrappers of Node.
  NodeOptions options;
  TimerQueue timers;
  ErrorStore errors{4096};
  NodeStats stats;
  bool draining = false;
  bool stopped = false;  // AbortAll: nothing runs any more
  std::function<void(SessionId)> on_session_ended;
  std::unique_ptr<Doorbell> doorbell;
  UniqueFd wake_epoll;

 private:
  // Runs of one gang, from launch to the last completion.
  struct Gang {
    std::shared_ptr<World> world;
    Ticket ticket;
    std::vector<RunHandle> runs;
    int32_t launches_left = 0;
    absl::Status status;
    bool knows_origin = false;  // of its failure
    std::vector<CommunicatorId> communicators;
    CommunicatorId commit = 0;  // of all its devices, where some of them hold back

    void Recycle() {
      world.reset();
      ticket = Ticket();
      runs.clear();
      launches_left = 0;
      status = absl::OkStatus();
      knows_origin = false;
      communicators.clear();
      commit = 0;
    }
  };

  // --- Sessions and the log -------------------------------------------------------------------
  std::shared_ptr<Tenant> TenantNamed(const std::string& name);
  void ArmLease(const std::shared_ptr<Session>& session);
  bool PollRings(absl::Time now);
  bool PollRing(const std::shared_ptr<Session>& session, absl::Time now);
  void Execute(const std::shared_ptr<Session>& session, const Command& command, absl::Time now);
  void ExecuteHeld(const std::shared_ptr<Session>& session, absl::Time now);
  void HoldFrame(const std::shared_ptr<Session>& session, Sequence sequence,
                 absl::string_view frame, absl::Time now, OnOutcome done);
  // What is held is refused if the next command does not come in time.
  void LimitGap(const std::shared_ptr<Session>& session, absl::Time now);
  // Ends a command well, with an error that has its id, or with what `status` says.
  void FinishCommand(Session* session, Sequence sequence);
  void FinishCommand(Session* session, Sequence sequence, const Error& error);
  void FinishCommand(Session* session, Sequence sequence, const absl::Status& status);
  void RecordOutcome(Session* session, Sequence sequence, const RunOutcome& outcome);
  void TellWaiters(Session* session, Sequence sequence, const absl::Status& status);
  // Who waits in shared memory is woken once for all that one turn has published.
  void MarkNews(Session* session);
  void WakeWaiters();
  absl::Status OutcomeStatus(const Session& session, const OutcomeLog::Record& record) const;
  absl::Status DoRegister(Session* session, const RegisterGraph& command);
  absl::StatusOr<std::shared_ptr<GraphRecord>> MakeGraph(Session* session,
                                                         const RegisterGraph& command);
  absl::Status DoCreateTensor(const std::shared_ptr<Session>& session, Sequence sequence,
                              const CreateTensor& command, absl::Time now);
  void DoMakeReadable(const std::shared_ptr<Session>& session, Sequence sequence,
                      const MakeReadable& command);
  absl::Status DoRelease(Session* session, const Release& command);
  absl::Status DoDropTape(Session* session, const DropTape& command, absl::Time now);
  absl::Status DoEnterEpoch(Session* session, const EnterEpoch& command);
  absl::Status DoRefuse(Session* session, const Refuse& command, absl::Time now);
  absl::Status DoCancel(Session* session, const Cancel& command, absl::Time now);

  // --- Names ----------------------------------------------------------------------------------
  absl::StatusOr<CellRef> FindTensor(const Session& session, TensorId id) const;
  absl::Status CheckFresh(const Session& session, TensorId id) const;
  // Whether the name, unless it was released, still stands for `cell`.
  bool StandsFor(const Session& session, TensorId id, const Cell& cell) const;
  void NameTensor(Session* session, TensorId id, CellRef cell);
  // The name, if it is still free, stands for the error.
  void NameFailed(Session* session, TensorId id, std::shared_ptr<const Error> error);
  // The name, unless it was released, stands for `cell` now.
  void ReplaceTensor(Session* session, TensorId id, CellRef cell);
  void PublishTensor(Session* session, TensorId id, const Cell& cell);
  void Settle(const CellRef& cell);
  // Calls `done` when the host can read the cell, or with the reason why it never can. `done` must
  // not hold the cell.
  using OnReadable = std::function<void(const CellRef& cell, const absl::Status& status)>;
  // What waits in the cell's `on_settled`; 0: nothing.
  Waiters<CellRef>::Id WhenReadable(const CellRef& cell, std::shared_ptr<Tenant> tenant,
                                    OnReadable done);

  // --- Bytes ----------------------------------------------------------------------------------
  absl::StatusOr<BufferRef> Allocate(Tenant* tenant, DeviceIndex device, int64_t bytes);
  // The bytes that `binding` names, as a buffer that the device can read. `stable`: they must not
  // change any more, so client-writable memory is copied. `upload` is set when a transfer to the
  // device is under way; it ends with a call of `uploaded`.
  struct Bound {
    BufferRef buffer;
    DeviceAddress address = 0;
  };
  absl::StatusOr<Bound> BindBytes(Session* session, const Binding& binding, const TensorType& type,
                                  DeviceIndex device, bool stable,
                                  std::function<void(absl::Status)> uploaded, bool* upload);
  // Keeps `keep`, which holds the source, until it is copied.
  template <typename Keep>
  void UploadTo(DeviceIndex device, const BufferRef& target, const char* source, Keep keep,
                std::function<void(absl::Status)> uploaded);

  // `done` will be called on the node thread; what is returned may be called, once, on any.
  std::function<void(absl::Status)> BeginTransfer(std::function<void(absl::Status)> done);

  // --- Runs (node_runs.cc) --------------------------------------------------------------------
  void SubmitRun(const std::shared_ptr<Session>& session, Sequence sequence, const Run& command,
                 absl::Time now);
  absl::Status PrepareRun(const std::shared_ptr<Session>& session, const Run& command,
                          RunState* run);
  absl::StatusOr<std::vector<int64_t>> SizesOf(const Session& session, const Run& command,
                                               const RunState& run) const;
  absl::Status PrepareWorld(Session* session, const Run& command, RunState* run);
  absl::Status PrepareInputs(Session* session, const Run& command, RunState* run);
  absl::Status PrepareOutputs(Session* session, const Run& command, RunState* run);
  BufferRef SoleBufferOf(const CellRef& cell);
  absl::Status PromiseDonations(const Run& command, RunState* run);
  void NameDonated(RunState* run, const RunState::Donation& donation, absl::string_view what);
  void TakeDonations(RunState* run);
  void ReturnDonations(RunState* run);
  absl::StatusOr<absl::Span<const InstanceKey>> FindInstances(const RunState& run);
  absl::Status PrepareBuffers(Session* session, absl::Span<const InstanceKey> instances,
                              RunState* run);
  absl::Status FollowInstances(absl::Span<const InstanceKey> instances, RunState* run);
  void FindProducers(RunState* run, absl::Time now);
  RunState* PendingProducer(const CellRef& cell);
  void AdoptProducers(const RunState& run, absl::Time now);
  void Adopt(const std::shared_ptr<World>& world, RunState* local, absl::Time now);
  void VoteRun(RunState* run, absl::Time now);
  void RefuseRun(const std::shared_ptr<Session>& session, Sequence sequence, const Run& command,
                 RunState* run, const absl::Status& why, absl::Time now);
  void RefuseVote(RunState* run, const absl::Status& why, absl::Time now);
  void ForgetCommon(RunState* run);
  void Unblock(RunHandle handle, absl::Time now);
  void Uploaded(RunHandle handle, const absl::Status& status);

  using Actions = Sequencer::Actions;
  void Apply(const std::shared_ptr<World>& world, Actions* actions, absl::Time now);
  void ApplyOne(const std::shared_ptr<World>& world, SequencerAction* action, absl::Time now);
  void LaunchGang(const std::shared_ptr<World>& world, const SequencerAction& action,
                  absl::Time now);
  void LaunchLocal(RunState* run, absl::Time now);
  absl::Status CheckMeetings(absl::Span<RunState* const> members) const;
  absl::Status JoinCommit(absl::Span<RunState* const> members, Gang* gang);
  absl::Status FollowOrder(RunState* run, const std::vector<int32_t>& order);
  absl::Status FindBytes(const SequencerAction& action, absl::Span<RunState* const> members);
  absl::Status BindInputs(RunState* run);
  absl::Status ResolvePeers(const LaunchedInstance& instance);
  int32_t NewGang();
  void AbortGang(int32_t place, const absl::Status& why);
  void DropCommunicator(CommunicatorId id, const absl::Status& why);
  absl::Status PrepareLaunch(RunState* run, Gang* gang);
  absl::StatusOr<CommunicatorId> GroupCommunicator(World* world, GroupId group);
  absl::Status BindCommunicator(const RunState& run, const Plan::CollectiveSlot& wanted,
                                LaunchMessage::CollectiveBinding* binding);
  void LaunchRun(RunState* run);
  void PlaceOutputs(RunState* run);
  void ReleaseConsumers(RunState* run, absl::Time now);
  void OnCompletion(const CompletionMessage& completion, absl::Time now);
  void FinishGang(int32_t place, absl::Time now);
  void PublishRun(RunState* run, absl::Time now);
  void FailRun(RunState* run, const Error& error, absl::Time now);
  void EndRun(RunState* run);

  // --- Equal work (node_equal.cc) -------------------------------------------------------------
  absl::Status FindEqualWork(const Run& command, absl::Span<const InstanceKey> instances,
                             RunState* run);
  void SetBuffer(size_t index, const BufferRef& buffer, RunState* run);
  absl::Status DealEqualWork(absl::Span<RunState* const> members);

  // --- Worlds ---------------------------------------------------------------------------------
  void RecordFailure(const std::string& tenant, const FailureOrigin& failure, Error* error);
  struct MemberRef {
    std::shared_ptr<World> world;
    World::Member* member;
  };
  absl::StatusOr<MemberRef> FindMember(Session* session, WorldId world, Rank rank);
  void FormWorld(const std::shared_ptr<World>& world, absl::Time now);
  // `died` as for EndSession.
  void RemoveMember(const std::shared_ptr<World>& world, Rank rank, const std::string& died,
                    absl::Time now);
  void DropWorldIfEmpty(const std::shared_ptr<World>& world);
  void ArmWorldTimer(const std::shared_ptr<World>& world);
  void TryReform(const std::shared_ptr<World>& world, absl::Time now);
  // Those who have joined `world` and wait for `rank` are told that it was refused.
  void RefuseJoined(const std::shared_ptr<World>& world, Rank rank, const Session& session,
                    const absl::Status& why, absl::Time now);

  // Gives `error` its id, unless it has one, and the log its line, if nobody has been told the
  // cause. `session`: whose call has failed; null: the world's. `world` may be null.
  void RecordFailure(Session* session, const World* world, Error* error);
  // Of an error of memory that is not recorded yet: which op it is for and, of the caller's tenant,
  // who holds most. Nothing is said of other tenants.
  void ExplainMemory(const Session& caller, const RunState* run, Error* error);
  void ExplainMemory(const Session& caller, const CreateTensor& create, Error* error);
  void NameHolders(const Session& caller, Error* error);
  std::string HoldersText(const Tenant& tenant);
  int64_t BytesOf(const Session& session);

  void NoteGivenUp(World* world, const LaunchedInstance& instance, Ticket ticket, absl::Time now);
  void Note(FlightKind kind, absl::Time now, const Session* session, const World* world,
            Sequence sequence = Sequence(), Ticket ticket = Ticket(), ErrorId error = ErrorId());

  Backend* const backend_;
  const bool host_;  // the backend's memory is the host's
  MemoryBudget budget_;
  MemoryThread memory_thread_;
  std::vector<std::unique_ptr<DeviceSet>> device_sets_;  // by device; empty on the host
  absl::flat_hash_map<std::string, std::weak_ptr<Tenant>> tenants_;
  FlightRecord flight_{65536};
  absl::flat_hash_map<std::string, LineBudget> lines_;  // of the log, by tenant
  bool ending_ = false;

  GraphStore graphs_;
  int64_t last_session_ = 0;
  int64_t last_world_ = 0;
  absl::flat_hash_map<SessionId, std::shared_ptr<Session>> sessions_;
  // The last of those that died, for their owners who ask again.
  struct Death {
    std::string tenant;
    std::string how;
  };
  std::map<SessionId, Death> deaths_;
  // Those with a ring: first the `active_` ones, which have sent something lately and which every
  // Poll looks at, then the quiet ones in turns.
  std::vector<std::shared_ptr<Session>> polled_;
  size_t active_ = 0;
  size_t next_quiet_ = 0;                       // place in `polled_`
  bool look_at_all_ = false;                    // the next time
  std::vector<std::shared_ptr<Session>> news_;  // those with has_news
  absl::flat_hash_map<WorldId, std::shared_ptr<World>> worlds_;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<World>> worlds_by_name_;
  std::vector<int32_t> device_sessions_;

  // The runs of launches under way: launch `first_launch_` + i. Null handles have completed.
  std::deque<RunHandle> launches_;
  LaunchId first_launch_ = 1;
  std::deque<Gang> gangs_;  // a deque: references stay valid
  std::vector<int32_t> free_gangs_;
  std::deque<std::pair<std::shared_ptr<World>, SequencerAction>> actions_;
  bool applying_ = false;
  absl::flat_hash_map<uint64_t, std::function<void(absl::Status)>> transfers_;  // under way
  uint64_t last_transfer_ = 0;
  std::vector<CompletionMessage> completed_;
  FrameBuffer frame_;  // the frame at hand, copied out of its ring
  absl::Time now_;     // of the last Poll, for callbacks
  // Behind all that their memory, graphs and sessions belong to: some may be waiting to the end.
  RunTable runs_;
  // Last: ends first, and with it all work on the devices.
  Launcher launcher_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_NODE_NODE_IMPL_H_
