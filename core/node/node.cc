#include "core/node/node.h"

#include <algorithm>
#include <utility>

#include "absl/functional/function_ref.h"
#include "core/base/release_queue.h"
#include "core/base/work.h"
#include "core/node/agreement.h"
#include "core/node/background.h"
#include "core/node/commands.h"
#include "core/node/completions.h"
#include "core/node/describe.h"
#include "core/node/domains.h"
#include "core/node/donation.h"
#include "core/node/equal_work.h"
#include "core/node/failures.h"
#include "core/node/gangs.h"
#include "core/node/graph_store.h"
#include "core/node/holders.h"
#include "core/node/launcher.h"
#include "core/node/prepare.h"
#include "core/node/rings.h"
#include "core/node/run_state.h"
#include "core/node/runs.h"
#include "core/node/session.h"
#include "core/node/short_way.h"
#include "core/node/storage.h"
#include "core/node/timers.h"
#include "core/node/views.h"
#include "core/node/waiters.h"
#include "core/node/worlds.h"

namespace chorus::node {

// The rooms, those that others stand on first. Above each is what must outlive it; the launcher is
// the last, so that it ends first, and with it all work on the devices.
struct LocalNode::Parts {
  Parts(NodeOptions node_options, std::unique_ptr<chorus::Devices> node_devices,
        std::function<void()> wake, LocalNode* node);
  ~Parts() {
    short_way.MakeWay();
    // What waits for runs that fail is told.
    while (worlds.Continue(clock.now) || runs.Continue(clock.now)) {
    }
    ending = true;
    background.Stop();
    // Some hold sessions, or tensors, whose end needs the other parts.
    timers.Clear();
  }

  Viewed viewed() const {
    return {&devices->info(), &sessions,       &worlds,           &launcher,
            &storage,         &runs_under_way, &failures.flight()};
  }

  const NodeOptions options;
  const std::unique_ptr<chorus::Devices> devices;
  const Domains domains;
  Clock clock;
  TimerQueue timers;
  ErrorStore errors{kMaxErrors};
  NodeStats stats;
  bool draining = false;
  bool ending = false;
  std::function<void(SessionId)> on_session_ended;
  const BudgetRef budget;
  News news;
  Failures failures;
  Background background;
  Storage storage;
  GraphStore graphs;
  SessionTable sessions;
  ReleaseQueue<Names::Remains> releases;
  Rings rings;
  ActionQueue actions;
  node::Worlds worlds;  // LocalNode::Worlds is another
  // Behind all that their memory, graphs and sessions belong to: some may be waiting to the end.
  RunTable runs_under_way;
  Holders holders;
  Donations donations;
  EqualWork equal_work;
  Preparer preparer;
  Gangs gangs;
  Runs runs;
  ShortWay short_way;
  Commands commands;
  Launcher launcher;
};

namespace {

Budget::Limits BudgetOf(const NodeOptions& options) {
  Budget::Limits limits;
  limits.bytes[static_cast<size_t>(Domain::kHost)] = options.memory_limit_bytes;
  limits.sessions = options.max_sessions;
  limits.worlds = options.max_worlds;
  limits.descriptors = options.max_descriptors;
  limits.waits = options.max_waits;
  limits.downloads = options.max_downloads;
  limits.graphs = options.max_node_graphs;
  return limits;
}

GraphStore::Options GraphsOf(const NodeOptions& options, const Domains& domains,
                             const Devices& devices) {
  GraphStore::Options graphs;
  graphs.limits.max_nodes = options.max_graph_nodes;
  graphs.limits.max_collectives = options.max_graph_collectives;
  graphs.limits.max_inputs = options.max_graph_inputs;
  graphs.limits.max_outputs = options.max_graph_outputs;
  graphs.limits.max_value_bytes = options.memory_limit_bytes;
  graphs.max_graph_bytes = options.max_graph_bytes;
  graphs.plan.limits = options.plan;
  graphs.plan.share_results = domains.any_shared();
  graphs.plan.share_equal_work = options.share_equal_work;
  graphs.plan.workspace_bytes = [&devices](const NodeView& node,
                                           absl::Span<const TensorType> outputs) {
    return devices.WorkspaceBytes(node, outputs);
  };
  // What has to ask somebody far away is never done by the node thread.
  graphs.max_inline_bytes = devices.info().is_far ? 0 : options.max_inline_graph_bytes;
  return graphs;
}

InNextTurn GoOnLaterOf(Rings* rings) {
  return [rings](const std::shared_ptr<Session>& session,
                 std::function<void(const std::shared_ptr<Session>&)> then) {
    rings->GoOnLater(session, std::move(then));
  };
}

}  // namespace

LocalNode::Parts::Parts(NodeOptions node_options, std::unique_ptr<chorus::Devices> node_devices,
                        std::function<void()> wake, LocalNode* node)
    : options(std::move(node_options)),
      devices(std::move(node_devices)),
      domains(devices->info()),
      budget(Budget::OfNode(BudgetOf(options))),
      failures(&errors, options.log_failure),
      background([this](std::function<void()> closure) { launcher.Post(std::move(closure)); }),
      storage(&options, budget, devices.get(), &launcher, &background, &clock, &timers,
              &stats.paths,
              [this] {
                if (!ending) rings.AskToLetGo();
              }),
      graphs(GraphsOf(options, domains, *devices), &background,
             [this](DeviceIndex device, PlanId plan) {
               return ending ? UnloadedPart() : launcher.UnloadPlan(device, plan);
             }),
      sessions(&options, devices->info().count(), &timers,
               [node](const std::shared_ptr<Session>& session, const std::string& how,
                      absl::Time now) { node->EndSession(session, how, now); }),
      rings(
          &options, storage.held(),
          [this](const std::shared_ptr<Session>& session, absl::string_view frame, absl::Time now) {
            return commands.Take(session, frame, now, nullptr).status();
          },
          [node](const std::shared_ptr<Session>& session, const std::string& how, absl::Time now) {
            node->EndSession(session, how, now);
          }),
      actions(&runs),
      worlds(&options, &timers, &actions, &background, &failures,
             [this](const World& world, const Session& session, Rank rank) {
               return runs.VotedFor(world, session, rank);
             }),
      holders(&clock, &sessions, &runs_under_way),
      donations(&runs_under_way, &errors),
      equal_work(&domains, &storage, &stats),
      preparer(&domains, &graphs, &launcher, &storage, &donations, &equal_work,
               [this](RunHandle run, Storage::Arrival arrival, const absl::Status& status) {
                 runs.Arrived(run, arrival, status);
               }),
      gangs(&options, &domains, &runs_under_way, &storage, &launcher, &donations, &equal_work,
            &timers, &stats),
      runs({&options, &clock, &runs_under_way, &storage, &preparer, &donations, &equal_work, &gangs,
            &background, &failures, &holders, &stats,
            [this](const std::shared_ptr<Session>& session) { commands.GoOn(session, clock.now); },
            GoOnLaterOf(&rings)}),
      short_way({&options, &sessions, &domains, &storage, &launcher, &failures, &timers, &stats,
                 [this](const std::shared_ptr<Session>& session, Sequence sequence,
                        absl::string_view frame,
                        absl::Time now) { commands.SubmitBegun(session, sequence, frame, now); }}),
      commands({&options, &sessions, &graphs, &launcher, &storage, &runs, &worlds, &short_way,
                &failures, &holders, &clock, GoOnLaterOf(&rings)}),
      launcher(devices.get(), &background, std::move(wake)) {}

LocalNode::LocalNode(NodeOptions options, std::unique_ptr<chorus::Devices> devices,
                     std::function<void()> wake)
    : parts_(
          std::make_unique<Parts>(std::move(options), std::move(devices), std::move(wake), this)) {}
LocalNode::~LocalNode() = default;

// --- The node's turn ----------------------------------------------------------------------------

namespace {

bool InSlice(absl::FunctionRef<bool()> work) {
  const WorkSlice slice;
  return work();
}

}  // namespace

void LocalNode::SetTime(absl::Time now) { parts_->clock.now = now; }

bool LocalNode::Poll(absl::Time now) {
  Parts& parts = *parts_;
  SetTime(now);
  bool worked = parts.timers.Next() <= now && InSlice([&] { return parts.timers.Fire(now); });
  worked |= parts.rings.Poll(now);
  worked |= parts.launcher.HasMore() && InSlice([&] { return parts.launcher.Continue(); });
  worked |= InSlice([&] { return parts.worlds.Continue(now); });
  worked |= InSlice([&] { return parts.runs.Continue(now); });
  worked |= InSlice([&] {
    const bool has_released = parts.releases.Continue();
    return parts.graphs.Continue() || has_released;
  });
  worked |= InSlice([&] { return parts.storage.left()->Continue(); });
  // After the rings: small work has been done inside its launch.
  if (parts.launcher.HasCompletions()) {
    worked |= parts.launcher.Drain(
        [&](const CompletionMessage& completion) { parts.runs.Complete(completion, now); });
  }
  parts.news.Signal();
  return worked;
}

absl::Time LocalNode::NextDeadline() const { return parts_->timers.Next(); }
bool LocalNode::Busy() const {
  return parts_->runs_under_way.live() > 0 || parts_->short_way.stands();
}
int LocalNode::doorbell_fd() const { return parts_->rings.doorbell_fd(); }
int LocalNode::wake_epoll_fd() const { return parts_->rings.wake_epoll_fd(); }
bool LocalNode::SleepUnlessBusy(const std::function<void()>& sleep) {
  const Launcher& launcher = parts_->launcher;
  return parts_->rings.SleepUnless(
      [&launcher] { return launcher.HasCompletions() || launcher.HasMore(); }, sleep);
}

// --- Sessions -----------------------------------------------------------------------------------

namespace {

absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

}  // namespace

// Runs `fn` with the session, or gives the reason why there is none. What `fn` refuses is recorded.
template <typename Fn>
auto LocalNode::WithSession(SessionId id, Fn fn) -> decltype(fn(std::shared_ptr<Session>())) {
  const auto session = parts_->sessions.Find(id);
  if (!session.ok()) return session.status();
  auto result = fn(*session);
  if (!result.ok()) return parts_->failures.RecordStatus(session->get(), StatusOf(result));
  return result;
}

absl::StatusOr<SessionInfo> LocalNode::OpenSession(const OpenSessionRequest& request,
                                                   absl::Time now) {
  Parts& parts = *parts_;
  if (parts.draining) {
    return Refused(
        request.tenant, request.pid,
        MakeError(Reason::kDraining, "the daemon is shutting down and takes no new sessions"));
  }
  const absl::Status checked = request.Check();
  if (!checked.ok()) return Refused(request.tenant, request.pid, checked);
  const absl::StatusOr<std::shared_ptr<Session>> opened = parts.sessions.Open(
      request, [&](const std::string& tenant) { return parts.storage.TenantNamed(tenant); },
      {&parts.timers, &parts.errors, parts.options.gap_timeout}, &parts.news, now);
  if (!opened.ok()) return Refused(request.tenant, request.pid, opened.status());
  parts.failures.Note(FlightKind::kSessionOpened, now, opened->get(), nullptr);
  return node::Describe(**opened, now);
}

// The one path by which everything that a session made is released.
void LocalNode::EndSession(const std::shared_ptr<Session>& session, const std::string& died,
                           absl::Time now) {
  Parts& parts = *parts_;
  if (session->dead()) return;
  parts.short_way.MakeWayInWorldsOf(*session);
  session->state = SessionState::kDead;
  Error error = ErrorOf(SessionLost(died));
  if (!died.empty()) {
    // Of a member of a complete world the others are told, and the log with them.
    const bool peers_hear =
        std::any_of(session->memberships.begin(), session->memberships.end(),
                    [](const Session::Membership& m) { return m.world->formed(); });
    if (peers_hear) parts.errors.Record(session->tenant->name, &error);
    parts.failures.Record(session.get(), nullptr, &error);
  }
  parts.failures.Note(FlightKind::kSessionEnded, now, session.get(), nullptr, Sequence(), Ticket(),
                      error.id);
  parts.worlds.RemoveSession(session, died, now);
  parts.runs.EndAllOf(*session, error, now);
  session->log.Abandon(ToStatus(error));
  parts.releases.Add(session->names.TakeAll());
  session->staging.clear();
  session->staging_bytes = 0;
  session->reservation = Session::Reservation();
  parts.rings.Detach(session.get());
  parts.sessions.Remove(session.get(), died);
  constexpr int64_t kWork = 1000;  // its memory is unmapped, its peers are told
  CountWork(kWork);
  if (parts.on_session_ended != nullptr) parts.on_session_ended(session->id);
}

absl::Status LocalNode::CloseSession(SessionId id, absl::Time now) {
  return WithSession(id, [&](const std::shared_ptr<Session>& session) {
    EndSession(session, /*died=*/"", now);
    return absl::OkStatus();
  });
}
void LocalNode::SessionDied(SessionId id, absl::Time now) {
  const auto session = parts_->sessions.Find(id);
  if (session.ok()) EndSession(*session, "its process ended", now);
}
void LocalNode::SetDetached(SessionId id, bool detached, absl::Time now) {
  const auto session = parts_->sessions.Find(id);
  if (session.ok()) parts_->sessions.SetDetached(*session, detached, now);
}
void LocalNode::OnSessionEnded(std::function<void(SessionId)> on_ended) {
  parts_->on_session_ended = std::move(on_ended);
}
void LocalNode::AfterReleases(const std::string& tenant, std::function<void()> done) {
  parts_->worlds.AfterLeaving([this, tenant, done = std::move(done)] {
    parts_->runs.AfterFailing(tenant, [this, done] {
      parts_->releases.After([left = parts_->storage.left(), done] { left->After(done); });
    });
  });
}
absl::StatusOr<absl::Duration> LocalNode::RenewLease(SessionId id, absl::Time now) {
  return WithSession(
      id, [&](const std::shared_ptr<Session>& session) -> absl::StatusOr<absl::Duration> {
        parts_->sessions.RenewLease(session.get(), now);
        return session->request.attached ? absl::InfiniteDuration() : session->lease;
      });
}
bool LocalNode::Lives(SessionId id) const { return parts_->sessions.Find(id).ok(); }
absl::StatusOr<std::string> LocalNode::TenantOf(SessionId id) const {
  return parts_->sessions.TenantOf(id);
}

absl::StatusOr<SessionDescriptors> LocalNode::AttachMemory(SessionId id) {
  return WithSession(
      id, [&](const std::shared_ptr<Session>& session) { return parts_->rings.Attach(session); });
}
absl::Status LocalNode::ConfirmMemory(SessionId id) {
  return WithSession(
      id, [&](const std::shared_ptr<Session>& session) { return parts_->rings.Confirm(session); });
}
void LocalNode::CreateStaging(SessionId id, int64_t bytes, OnStaging done) {
  const auto session = parts_->sessions.Find(id);
  if (!session.ok()) return done(session.status());
  parts_->storage.CreateStaging(
      *session, bytes,
      [this, session = *session, done = std::move(done)](absl::StatusOr<StagingArena> staging) {
        if (staging.ok()) return done(std::move(staging));
        Error error = ErrorOf(staging.status());
        parts_->holders.Explain(*session, nullptr, &error);
        done(parts_->failures.RecordStatus(session.get(), ToStatus(error)));
      });
}
absl::StatusOr<int> LocalNode::StagingFd(SessionId id, ArenaId arena) {
  return WithSession(id, [&](const std::shared_ptr<Session>& session) -> absl::StatusOr<int> {
    CHORUS_ASSIGN_OR_RETURN(const std::shared_ptr<Arena> staging,
                            parts_->storage.FindStaging(*session, arena));
    return staging->ClientFd();
  });
}
absl::Status LocalNode::ConfirmStaging(SessionId id, ArenaId arena) {
  return WithSession(id, [&](const std::shared_ptr<Session>& session) -> absl::Status {
    CHORUS_ASSIGN_OR_RETURN(const std::shared_ptr<Arena> staging,
                            parts_->storage.FindStaging(*session, arena));
    return staging->ConfirmMapped();
  });
}
absl::Status LocalNode::ReleaseStaging(SessionId id, ArenaId arena) {
  return WithSession(id, [&](const std::shared_ptr<Session>& session) {
    // A run that stands names what it reads there once more when it makes way.
    parts_->short_way.MakeWay(*session);
    return parts_->storage.ReleaseStaging(session.get(), arena);
  });
}
absl::Status LocalNode::WriteStaging(SessionId id, ArenaId arena, int64_t offset,
                                     absl::string_view bytes) {
  return WithSession(id, [&](const std::shared_ptr<Session>& session) {
    return parts_->storage.WriteStaging(*session, arena, offset, bytes);
  });
}
absl::StatusOr<int> LocalNode::ResultArenaFd(SessionId id, ArenaId arena) {
  return WithSession(id, [&](const std::shared_ptr<Session>& session) {
    return parts_->storage.ResultArenaFd(*session, arena);
  });
}

// --- Worlds -------------------------------------------------------------------------------------

namespace {

// `done`, which is let go of when `wait` is withdrawn, before `withdraw` is called; null: never.
template <typename Result>
std::function<void(Result)> UntilWithdrawn(std::function<void(Result)> done, const WaitRef& wait,
                                           std::function<void(absl::Time now)> withdraw) {
  if (wait == nullptr) return done;
  const auto shared_done = std::make_shared<std::function<void(Result)>>(std::move(done));
  // The call that waits has `wait`, and what waits for it the call.
  wait->forget = [weak = std::weak_ptr<std::function<void(Result)>>(shared_done),
                  withdraw = std::move(withdraw)](absl::Time now) {
    const auto target = weak.lock();
    if (target == nullptr || std::exchange(*target, nullptr) == nullptr) return;
    withdraw(now);
  };
  return [shared_done](Result result) {
    if (const auto call = std::exchange(*shared_done, nullptr)) call(std::move(result));
  };
}

}  // namespace

void LocalNode::JoinWorld(SessionId id, const JoinRequest& request, absl::Time now, OnJoined done,
                          const WaitRef& wait) {
  const auto session = parts_->sessions.Find(id);
  if (!session.ok()) return done(session.status());
  const int32_t rank = static_cast<int32_t>(request.rank.value());
  auto withdraw = [this, weak = std::weak_ptr<Session>(*session), name = request.name,
                   rank = request.rank](absl::Time when) {
    const std::shared_ptr<Session> session = weak.lock();
    if (session != nullptr) parts_->worlds.WithdrawJoin(*session, name, rank, when);
  };
  const auto tell = [this, session = *session, job = request.name, rank,
                     done = UntilWithdrawn(std::move(done), wait, std::move(withdraw))](
                        absl::StatusOr<WorldInfo> info) {
    if (info.ok()) return done(std::move(info));
    const Culprit culprit = ErrorOf(info.status()).culprit;
    FailureOrigin failure{job, rank, session->request.pid};
    if (culprit.rank >= 0) failure = {job, culprit.rank, culprit.pid};
    done(parts_->failures.RecordStatus(session->tenant->name, failure, info.status()));
  };
  if (parts_->draining) {
    return tell(
        MakeError(Reason::kDraining, "the daemon is shutting down and takes no new worlds"));
  }
  parts_->worlds.Join(*session, request, now, tell);
}
absl::StatusOr<GroupId> LocalNode::CreateGroup(SessionId id, const CreateGroupRequest& request) {
  return WithSession(id, [&](const std::shared_ptr<Session>& session) {
    return parts_->worlds.CreateGroup(*session, request);
  });
}
absl::Status LocalNode::LeaveWorld(SessionId id, WorldId world, Rank rank, absl::Time now) {
  return WithSession(id, [&](const std::shared_ptr<Session>& session) {
    parts_->short_way.MakeWayInWorldsOf(*session);
    return parts_->worlds.Leave(*session, world, rank, now);
  });
}
absl::Status LocalNode::AbortWorld(SessionId id, const AbortWorldRequest& request, absl::Time now) {
  return WithSession(id, [&](const std::shared_ptr<Session>& session) {
    CHORUS_RETURN_IF_ERROR(request.Check());
    return parts_->worlds.Abort(*session, request, now);
  });
}
void LocalNode::ReformWorld(SessionId id, const ReformWorldRequest& request, absl::Time now,
                            OnReformed done, const WaitRef& wait) {
  const auto session = parts_->sessions.Find(id);
  if (!session.ok()) return done(session.status());
  auto withdraw = [this, weak = std::weak_ptr<Session>(*session), world = request.world,
                   rank = request.rank](absl::Time) {
    const std::shared_ptr<Session> session = weak.lock();
    if (session != nullptr) parts_->worlds.WithdrawReform(*session, world, rank);
  };
  parts_->worlds.Reform(
      **session, request, now,
      [this, session = *session, done = UntilWithdrawn(std::move(done), wait, std::move(withdraw))](
          absl::StatusOr<ReformResult> result) {
        if (result.ok()) return done(std::move(result));
        done(parts_->failures.RecordStatus(session.get(), result.status()));
      });
}

// --- Logs and tensors ---------------------------------------------------------------------------

namespace {

// `done`, which counts as one of the session's waits until it is gone. Errors: ChargeWait's.
template <typename Done>
absl::StatusOr<Done> Counted(const Session& session, Done done) {
  CHORUS_ASSIGN_OR_RETURN(auto wait, ChargeWait(session.budget));
  return Done(
      [wait = std::move(wait), done = std::move(done)](auto result) { done(std::move(result)); });
}

}  // namespace

void LocalNode::Submit(SessionId id, std::string frame, absl::Time now, OnOutcome done,
                       const WaitRef& wait) {
  const auto session = parts_->sessions.Find(id);
  if (!session.ok()) return done({Sequence(), session.status()});
  absl::StatusOr<OnOutcome> counted_done = Counted(**session, done);
  // Not recorded, as what commands come to is: the log has not seen this one.
  if (!counted_done.ok()) return done({Sequence(), counted_done.status()});
  const std::weak_ptr<Session> weak = *session;
  const auto is_told = std::make_shared<bool>(false);
  const OnOutcome tell = [this, weak, is_told, done = *std::move(counted_done)](Outcome out) {
    *is_told = true;
    // The session holds what waits for its outcomes.
    const std::shared_ptr<Session> session = weak.lock();
    if (session != nullptr) out.status = parts_->failures.RecordStatus(session.get(), out.status);
    done(std::move(out));
  };
  const auto sender = parts_->commands.Take(*session, frame, now, tell);
  if (!sender.ok()) return tell({Sequence(), sender.status()});
  if (wait == nullptr || sender->id == 0) return;
  wait->forget = [weak, is_told, sender = *sender](absl::Time) {
    const std::shared_ptr<Session> session = weak.lock();
    if (!*is_told && session != nullptr) session->log.Forget(sender);
  };
}
void LocalNode::WaitOutcome(SessionId id, Sequence sequence, absl::Time deadline, OnOutcome done,
                            const WaitRef& wait) {
  const auto session = parts_->sessions.Find(id);
  if (!session.ok()) return done({sequence, session.status()});
  const absl::Status checked = CheckSequence(sequence);
  if (!checked.ok()) return done({sequence, checked});
  absl::StatusOr<OnOutcome> counted_done = Counted(**session, done);
  // Not recorded, as outcomes are: it says nothing of the command.
  if (!counted_done.ok()) return done({sequence, counted_done.status()});
  const TimerQueue::Id timer = (*session)->log.Wait(sequence, deadline, *std::move(counted_done));
  if (wait != nullptr) wait->deadline = timer;
}
void LocalNode::Withdraw(const WaitRef& wait, absl::Time now) {
  CountWork(kWorkPerWaiter);
  parts_->timers.Expire(wait->deadline, now);
  if (wait->forget != nullptr) wait->forget(now);
}
void LocalNode::ReadTensor(SessionId id, TensorId tensor, absl::Time deadline, OnTensor done,
                           const WaitRef& wait) {
  const auto session = parts_->sessions.Find(id);
  if (!session.ok()) return done(session.status());
  absl::StatusOr<OnTensor> counted_done = Counted(**session, done);
  if (!counted_done.ok()) {
    return done(parts_->failures.RecordStatus(session->get(), counted_done.status()));
  }
  // What came before it may give the name.
  const auto read = [this, reader = session->get(), tensor, deadline, wait,
                     done = *std::move(counted_done)](const absl::Status& status) {
    if (!status.ok()) return done(status);
    const TimerQueue::Id timer = parts_->storage.ReadTensor(*reader, tensor, deadline, done);
    if (wait != nullptr) wait->deadline = timer;
  };
  parts_->short_way.MakeWay(**session);
  const bool waits = (*session)->log.parked();
  const TimerQueue::Id timer = (*session)->log.WhenTaken(deadline, read);
  if (waits && wait != nullptr) wait->deadline = timer;
}
void LocalNode::CountStreamed(int64_t bytes) { parts_->stats.paths.streamed_bytes += bytes; }

// --- Diagnostics --------------------------------------------------------------------------------

std::vector<DeviceInfo> LocalNode::Devices(absl::string_view tenant) const {
  return ViewDevices(parts_->viewed(), tenant);
}
absl::StatusOr<SessionInfo> LocalNode::Describe(SessionId id, absl::Time now) const {
  CHORUS_ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, parts_->sessions.Find(id));
  parts_->short_way.MakeWay(*session);
  return node::Describe(*session, now);
}
std::vector<SessionInfo> LocalNode::Sessions(absl::string_view tenant, absl::Time now) const {
  parts_->short_way.MakeWayInWorldsOf(tenant);
  return ViewSessions(parts_->viewed(), tenant, now);
}
absl::StatusOr<Listing<WorldInfo>> LocalNode::Worlds(absl::string_view tenant,
                                                     absl::optional<WorldId> one,
                                                     absl::Time now) const {
  parts_->short_way.MakeWayInWorldsOf(tenant);
  Listing<WorldInfo> worlds = ViewWorlds(parts_->viewed(), tenant, one, now);
  if (!one.has_value() || !worlds.rows.empty()) return worlds;
  return UnknownName(absl::StrCat("there is no world ", one->value()));
}
Listing<PendingView> LocalNode::Pending(absl::string_view tenant, absl::Time now) const {
  parts_->short_way.MakeWayInWorldsOf(tenant);
  return ViewPending(parts_->viewed(), tenant, now);
}
absl::StatusOr<std::vector<FlightEvent>> LocalNode::Flight(absl::string_view tenant,
                                                           int64_t limit) const {
  CHORUS_ASSIGN_OR_RETURN(const int64_t most, FlightEventLimit(limit));
  parts_->short_way.MakeWayInWorldsOf(tenant);
  return ViewFlight(parts_->viewed(), tenant, most);
}
NodeStats LocalNode::Stats(absl::string_view tenant) const {
  parts_->short_way.MakeWayInWorldsOf(tenant);
  parts_->storage.held()->Look();
  return ViewStats(parts_->viewed(), tenant, parts_->stats);
}
absl::Status LocalNode::Refused(absl::string_view tenant, int32_t pid, const absl::Status& status) {
  FailureOrigin failure;
  failure.pid = pid;
  return parts_->failures.RecordStatus(std::string(tenant), failure, status);
}
absl::StatusOr<Error> LocalNode::FindError(ErrorId id, absl::string_view tenant) const {
  absl::optional<Error> error = parts_->errors.Find(id, tenant);
  if (error.has_value()) return *std::move(error);
  return UnknownName(absl::StrCat("error ", id.value(), " is not recorded, or no longer kept"));
}

// --- The end ------------------------------------------------------------------------------------

void LocalNode::StartDraining() { parts_->draining = true; }
bool LocalNode::Idle() const { return !Busy(); }
void LocalNode::AbortAll(absl::Time now) {
  Parts& parts = *parts_;
  parts.short_way.MakeWay();
  parts.short_way.Stop();
  parts.runs.StopTaking();
  parts.storage.StopWaiting();
  const Error error = ErrorOf(DrainingError());
  parts.worlds.Stop(error, now);
  // Runs that are left are of one session, or launched.
  parts.runs.FailAll(error, now);
  // And calls that wait for commands that have not come.
  parts.sessions.ForEach(
      [&](const std::shared_ptr<Session>& session) { session->log.Abandon(ToStatus(error)); });
}

}  // namespace chorus::node
