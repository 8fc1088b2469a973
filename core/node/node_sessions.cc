// Sessions, their logs and their names.
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/node/node_impl.h"
#include "core/node/strided.h"

namespace chorus {
namespace {

// Frames taken from one ring before the next is looked at.
constexpr int kFramesPerTurn = 32;
// A look at a ring is a miss of the caches, so those that have been silent for so long are looked
// at less often: so many of them each time.
constexpr absl::Duration kQuietAfter = absl::Seconds(1);
constexpr size_t kQuietLooks = 16;
// Frames of one session that may wait for a predecessor.
constexpr size_t kMaxHeldFrames = 1024;
// Copies from staging of this size and more are not made by the node's thread.
constexpr int64_t kBackgroundCopyBytes = 256 << 10;

// Sessions that died, of which is known how.
constexpr size_t kKeptDeaths = 1024;

// `how` it died; empty: not known any more, or it was closed.
absl::Status SessionLost(const std::string& how) {
  return MakeError(
      Reason::kSessionLost,
      how.empty()
          ? "the session has ended, or belongs to an earlier life of the daemon; open a new one"
          : absl::StrCat("the session has ended: ", how, "; open a new one"));
}

// For a session whose bytes cannot be believed any more; nobody else is concerned.
std::string EndedFor(const absl::Status& malformed) {
  return absl::StrCat("its session was ended for malformed bytes (", ErrorOf(malformed).message,
                      ")");
}

}  // namespace

LocalNode::Impl::Impl(NodeOptions node_options, Backend* backend, std::function<void()> wake)
    : options(std::move(node_options)),
      wake_epoll(epoll_create1(EPOLL_CLOEXEC)),
      backend_(backend),
      host_(backend->host_addressable()),
      budget_(options.memory_limit_bytes),
      graphs_(
          [this] {
            GraphLimits limits;
            limits.max_nodes = options.max_graph_nodes;
            limits.max_value_bytes = options.memory_limit_bytes;
            return limits;
          }(),
          [this] {
            PlanOptions plan;
            plan.share_results = host_;
            plan.share_equal_work = options.share_equal_work;
            return plan;
          }(),
          [this](DeviceIndex device, PlanId plan) {
            if (!ending_) launcher_.UnloadPlan(device, plan);
          }),
      device_sessions_(static_cast<size_t>(backend->device_count())),
      launcher_(backend, std::move(wake)) {
  stats.memory_limit_bytes = options.memory_limit_bytes;
  doorbell = *Doorbell::Create();  // one page: without it there is no daemon
  if (!host_) {
    for (int i = 0; i < backend->device_count(); ++i) {
      device_sets_.push_back(std::make_unique<DeviceSet>(backend->device(i), &budget_));
    }
  }
}

LocalNode::Impl::~Impl() {
  ending_ = true;
  // Sessions and worlds hold each other; so do sessions and what waits for their tensors.
  for (const auto& session : sessions_) {
    session.second->memberships.clear();
    session.second->tensors.clear();
  }
}

bool LocalNode::Impl::Poll(absl::Time now) {
  now_ = now;
  bool worked = timers.Fire(now);
  worked |= PollRings(now);
  // After the rings: small work has been done inside its launch.
  if (launcher_.HasCompletions()) {
    std::vector<CompletionMessage> completed;
    completed.swap(completed_);
    worked |= launcher_.Drain(&completed);
    for (const CompletionMessage& completion : completed) OnCompletion(completion, now);
    completed.clear();
    completed_.swap(completed);  // keeps its capacity
  }
  WakeWaiters();
  return worked;
}

bool LocalNode::Impl::PollRings(absl::Time now) {
  bool worked = false;
  const auto take_from = [&](size_t place) {
    // A frame may end its session, which shortens the list.
    const std::shared_ptr<Session> session = polled_[place];
    session->last_frame = now;
    worked |= PollRing(session, now);
  };
  for (size_t i = 0; i < active_;) {
    const Session& session = *polled_[i];
    if (session.ring->HasFrame()) {
      take_from(i++);
    } else if (now - session.last_frame > kQuietAfter) {
      std::swap(polled_[i], polled_[--active_]);
    } else {
      ++i;
    }
  }
  size_t looks = look_at_all_ ? polled_.size() : kQuietLooks;
  look_at_all_ = false;
  for (looks = std::min(looks, polled_.size() - active_); looks > 0; --looks) {
    if (active_ == polled_.size()) break;
    if (next_quiet_ < active_ || next_quiet_ >= polled_.size()) next_quiet_ = active_;
    const size_t place = next_quiet_++;
    if (!polled_[place]->ring->HasFrame()) continue;
    std::swap(polled_[place], polled_[active_]);
    take_from(active_++);
  }
  return worked;
}

bool LocalNode::Impl::PollRing(const std::shared_ptr<Session>& session, absl::Time now) {
  bool worked = false;
  for (int i = 0; i < kFramesPerTurn && !session->dead(); ++i) {
    absl::string_view frame;
    const SubmissionRingReader::Result got = session->ring->Poll(&frame_, &frame);
    if (got == SubmissionRingReader::Result::kEmpty) break;
    worked = true;
    if (got == SubmissionRingReader::Result::kMalformed) {
      EndSession(session, EndedFor(session->ring->status()), now);
      break;
    }
    TakeFrame(session, frame, now, nullptr);
  }
  return worked;
}

// --- Sessions -----------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<Session>> LocalNode::Impl::FindSession(SessionId id) const {
  const auto it = sessions_.find(id);
  if (it != sessions_.end()) return it->second;
  const auto death = deaths_.find(id);
  return SessionLost(death == deaths_.end() ? "" : death->second.how);
}

absl::StatusOr<std::string> LocalNode::Impl::TenantOf(SessionId id) const {
  const auto death = deaths_.find(id);
  if (death != deaths_.end()) return death->second.tenant;
  CHORUS_ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, FindSession(id));
  return session->tenant->name;
}

std::shared_ptr<Tenant> LocalNode::Impl::TenantNamed(const std::string& name) {
  std::weak_ptr<Tenant>& known = tenants_[name];
  std::shared_ptr<Tenant> tenant = known.lock();
  if (tenant == nullptr) {
    // Those whose last session has gone, and with it what they had.
    for (auto it = tenants_.begin(); it != tenants_.end();) {
      if (it->second.expired() && it->first != name) {
        tenants_.erase(it++);
      } else {
        ++it;
      }
    }
    tenant = std::make_shared<Tenant>();
    tenant->name = name;
    ArenaSetOptions arenas;
    arenas.thread = &memory_thread_;
    tenant->arenas = ArenaSet::Create(&budget_, arenas);
    known = tenant;
  }
  return tenant;
}

absl::StatusOr<SessionInfo> LocalNode::Impl::OpenSession(const OpenSessionRequest& request,
                                                         absl::Time now) {
  if (draining) {
    return MakeError(Reason::kDraining, "the daemon is shutting down and takes no new sessions");
  }
  if (static_cast<int64_t>(sessions_.size()) >= options.max_sessions) {
    return MakeError(Reason::kQuota,
                     absl::StrCat("all ", options.max_sessions, " sessions are in use"));
  }
  std::vector<DeviceIndex> devices = request.devices;
  const int device_count = launcher_.device_count();
  if (devices.empty()) {
    if (request.device_count < 1 || request.device_count > device_count) {
      return Malformed(absl::StrCat("a session holds 1 to ", device_count, " devices, not ",
                                    request.device_count));
    }
    for (int i = 0; i < device_count; ++i) devices.push_back(DeviceIndex(i));
    // Those with the fewest sessions, in the order of their numbers.
    std::stable_sort(devices.begin(), devices.end(), [this](DeviceIndex a, DeviceIndex b) {
      return device_sessions_[static_cast<size_t>(a.value())] <
             device_sessions_[static_cast<size_t>(b.value())];
    });
    devices.resize(static_cast<size_t>(request.device_count));
    std::sort(devices.begin(), devices.end());
  }
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i].value() < 0 || devices[i].value() >= device_count) {
      return UnknownName(absl::StrCat("device ", devices[i].value(), " does not exist; there are ",
                                      device_count, ", 0 to ", device_count - 1));
    }
    if (std::find(devices.begin(), devices.begin() + static_cast<ptrdiff_t>(i), devices[i]) !=
        devices.begin() + static_cast<ptrdiff_t>(i)) {
      return Malformed(absl::StrCat("device ", devices[i].value(), " is named twice"));
    }
  }

  auto session = std::make_shared<Session>();
  session->id = SessionId(++last_session_);
  session->request = request;
  session->tenant = TenantNamed(request.tenant);
  session->devices = std::move(devices);
  session->lease = request.lease > absl::ZeroDuration() ? request.lease : options.lease;
  for (DeviceIndex device : session->devices) {
    ++device_sessions_[static_cast<size_t>(device.value())];
  }
  sessions_[session->id] = session;
  if (!request.attached) {
    RenewLease(session.get(), now);
    ArmLease(session);
  }
  Note(FlightKind::kSessionOpened, now, session.get(), nullptr);
  return Describe(*session, now);
}

void LocalNode::Impl::RenewLease(Session* session, absl::Time now) {
  if (!session->request.attached) session->lease_until = now + session->lease;
}

// Renewals only move `lease_until`: the timer looks at it when it fires.
void LocalNode::Impl::ArmLease(const std::shared_ptr<Session>& session) {
  const std::weak_ptr<Session> weak = session;
  session->lease_timer = timers.Add(session->lease_until, [this, weak](absl::Time now) {
    const std::shared_ptr<Session> session = weak.lock();
    if (session == nullptr || session->dead()) return;
    if (session->lease_until <= now) {
      EndSession(session,
                 absl::StrCat("its lease of ", absl::FormatDuration(session->lease), " ran out"),
                 now);
    } else {
      ArmLease(session);
    }
  });
}

void LocalNode::Impl::SetDetached(const std::shared_ptr<Session>& session, bool detached,
                                  absl::Time now) {
  if (session->dead() || detached == (session->state == SessionState::kDetached)) return;
  timers.Cancel(session->detach_timer);
  if (!detached) {
    session->state = SessionState::kActive;
    return;
  }
  session->state = SessionState::kDetached;
  const std::weak_ptr<Session> weak = session;
  session->detach_timer = timers.Add(now + options.detach_grace, [this, weak](absl::Time then) {
    const std::shared_ptr<Session> session = weak.lock();
    if (session == nullptr) return;
    EndSession(session,
               absl::StrCat("its connection was lost and did not come back within ",
                            absl::FormatDuration(options.detach_grace)),
               then);
  });
}

// The one path by which everything that a session made is released.
void LocalNode::Impl::EndSession(const std::shared_ptr<Session>& session, const std::string& died,
                                 absl::Time now) {
  if (session->dead()) return;
  session->state = SessionState::kDead;
  Error gone = ErrorOf(SessionLost(died));
  if (!died.empty()) {
    // Of a member of a complete world the others are told, and the log with them.
    const bool told = std::any_of(session->memberships.begin(), session->memberships.end(),
                                  [](const Session::Membership& m) { return m.world->formed; });
    if (told) errors.Record(session->tenant->name, &gone);
    RecordFailure(session.get(), nullptr, &gone);
    deaths_[session->id] = {session->tenant->name, died};
    if (deaths_.size() > kKeptDeaths) deaths_.erase(deaths_.begin());
  }
  Note(FlightKind::kSessionEnded, now, session.get(), nullptr, Sequence(), Ticket(), gone.id);
  timers.Cancel(session->lease_timer);
  timers.Cancel(session->detach_timer);
  timers.Cancel(session->gap_timer);
  while (!session->memberships.empty()) {
    const Session::Membership membership = session->memberships.back();
    RemoveMember(membership.world, membership.rank, died, now);
  }
  // Local runs that wait for something: nobody will read their results.
  std::vector<RunHandle> waiting;
  runs_.ForEach([&](RunState* run) {
    if (run->session == session && run->phase == RunState::Phase::kWaiting) {
      waiting.push_back(run->handle);
    }
  });
  for (RunHandle handle : waiting) {
    if (RunState* run = runs_.Find(handle)) FailRun(run, gone, now);
  }
  for (auto& held : session->held) {
    for (OnOutcome& done : held.second.done) done({Sequence(held.first), ToStatus(gone)});
  }
  session->held.clear();
  auto waiters = std::move(session->outcome_waiters);
  session->outcome_waiters.clear();
  for (auto& entry : waiters) entry.second.Call({Sequence(entry.first), ToStatus(gone)});
  session->tensors.clear();
  session->graphs.clear();
  session->staging.clear();
  session->live_tensors = session->live_graphs = session->staging_bytes = 0;
  const auto polled = std::find(polled_.begin(), polled_.end(), session);
  if (polled != polled_.end()) {
    if (polled - polled_.begin() < static_cast<ptrdiff_t>(active_)) --active_;
    polled_.erase(polled);
  }
  if (session->wake_fd.get() >= 0) {
    epoll_ctl(wake_epoll.get(), EPOLL_CTL_DEL, session->wake_fd.get(), nullptr);
  }
  session->completions.reset();
  session->ring.reset();
  session->memory.reset();
  session->wake_fd = UniqueFd();
  for (DeviceIndex device : session->devices) {
    --device_sessions_[static_cast<size_t>(device.value())];
  }
  sessions_.erase(session->id);
  if (on_session_ended != nullptr) on_session_ended(session->id);
}

absl::StatusOr<LocalNode::SessionDescriptors> LocalNode::Impl::AttachMemory(Session* session) {
  if (session->memory == nullptr) {
    SessionMemoryOptions layout;
    layout.tensor_slots = static_cast<uint32_t>(options.max_tensors);
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<SessionMemory> memory, CreateSessionMemory(layout));
    CHORUS_ASSIGN_OR_RETURN(UniqueFd wake, CreateWakeEvent());
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;  // the ring tells what there is, not the count
    if (epoll_ctl(wake_epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
      return MakeError(Reason::kQuota,
                       absl::StrCat("no descriptor for the session's wake-up: ", strerror(errno)));
    }
    session->memory = std::move(memory);
    session->wake_fd = std::move(wake);
    session->ring = std::make_unique<SubmissionRingReader>(session->memory.get());
    session->completions = std::make_unique<CompletionWriter>(session->memory.get());
    polled_.push_back(sessions_[session->id]);
  }
  SessionDescriptors descriptors;
  descriptors.memory_fd = session->memory->fd();
  descriptors.wake_fd = session->wake_fd.get();
  return descriptors;
}

// --- Staging ------------------------------------------------------------------------------------

absl::StatusOr<LocalNode::StagingArena> LocalNode::Impl::CreateStaging(Session* session,
                                                                       int64_t bytes) {
  if (bytes <= 0) {
    return Malformed(absl::StrCat("a staging arena has at least one byte, not ", bytes));
  }
  if (static_cast<int64_t>(session->staging.size()) >= options.max_staging_arenas ||
      bytes > options.max_staging_bytes - session->staging_bytes) {
    return MakeError(
        Reason::kQuota,
        absl::StrCat("a session may have ", options.max_staging_arenas, " staging arenas of ",
                     options.max_staging_bytes, " bytes together; it has ", session->staging.size(),
                     " of ", session->staging_bytes, " and asks for ", bytes, " more"));
  }
  absl::StatusOr<std::shared_ptr<Arena>> created =
      Arena::CreateStaging(&budget_, bytes, &memory_thread_);
  if (!created.ok()) {
    Error error = ErrorOf(created.status());
    ExplainMemory(*session, nullptr, &error);
    return ToStatus(error);
  }
  std::shared_ptr<Arena> arena = *std::move(created);
  session->staging_bytes += arena->bytes();
  StagingArena made;
  made.arena = arena->id();
  made.fd = arena->fd();
  made.bytes = arena->bytes();
  session->staging[arena->id()] = std::move(arena);
  return made;
}

absl::StatusOr<std::shared_ptr<Arena>> LocalNode::Impl::FindStaging(Session* session,
                                                                    ArenaId arena) {
  const auto it = session->staging.find(arena);
  if (it == session->staging.end()) {
    return UnknownName(
        absl::StrCat("arena ", arena.value(), " is no staging arena of this session"));
  }
  return it->second;
}

absl::Status LocalNode::Impl::ReleaseStaging(Session* session, ArenaId arena) {
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> found, FindStaging(session, arena));
  session->staging_bytes -= found->bytes();
  session->staging.erase(arena);
  return absl::OkStatus();
}

absl::Status LocalNode::Impl::WriteStaging(Session* session, ArenaId arena, int64_t offset,
                                           absl::string_view bytes) {
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> found, FindStaging(session, arena));
  const int64_t size = static_cast<int64_t>(bytes.size());
  if (offset < 0 || offset > found->bytes() || size > found->bytes() - offset) {
    return Malformed(absl::StrCat("bytes ", offset, " to ", offset, "+", size,
                                  " are not inside arena ", arena.value(), " of ", found->bytes(),
                                  " bytes"));
  }
  // The daemon maps staging for reading only: it writes as any holder of the descriptor would.
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t wrote = pwrite(found->fd(), bytes.data() + done, bytes.size() - done,
                                 offset + static_cast<int64_t>(done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) {
      return MakeError(Reason::kWrongState,
                       absl::StrCat("arena ", arena.value(),
                                    " cannot be written by the daemon: ", strerror(errno),
                                    "; an attached client writes its own mapping"));
    }
    done += static_cast<size_t>(wrote);
  }
  stats.paths.streamed_bytes += size;
  return absl::OkStatus();
}

absl::StatusOr<int> LocalNode::Impl::ResultArenaFd(Session* session, ArenaId arena) {
  const Arena* found = session->tenant->arenas->Find(arena);
  if (found == nullptr) {
    return UnknownName(absl::StrCat("arena ", arena.value(), " holds nothing of this tenant"));
  }
  return found->fd();
}

// --- The log ------------------------------------------------------------------------------------

void LocalNode::Impl::TakeFrame(const std::shared_ptr<Session>& session, absl::string_view frame,
                                absl::Time now, OnOutcome done) {
  absl::StatusOr<Command> command = DecodeFrame(frame);
  if (!command.ok()) {
    if (done != nullptr) {
      done({Sequence(), command.status()});
      return;
    }
    // A ring's frames have no other answer than their sequence, which cannot be believed here.
    EndSession(session, EndedFor(command.status()), now);
    return;
  }
  const Sequence sequence = command->sequence;
  if (sequence.value() > session->next_sequence) {
    HoldFrame(session, sequence, frame, now, std::move(done));
    return;
  }
  if (sequence.value() < session->next_sequence) {
    // A repeat: answered from the record, never executed again.
    if (done != nullptr) {
      WaitOutcome(session, sequence, absl::InfiniteFuture(), std::move(done));
    }
    return;
  }
  if (done != nullptr) session->outcome_waiters[sequence.value()].Add(std::move(done));
  Execute(session, *command, now);
  if (!session->held.empty()) ExecuteHeld(session, now);
}

void LocalNode::Impl::HoldFrame(const std::shared_ptr<Session>& session, Sequence sequence,
                                absl::string_view frame, absl::Time now, OnOutcome done) {
  const auto it = session->held.find(sequence.value());
  if (it != session->held.end()) {
    if (done != nullptr) it->second.done.push_back(std::move(done));
    return;
  }
  if (session->held.size() >= kMaxHeldFrames) {
    if (done != nullptr) {
      done({sequence, MakeError(Reason::kQuota,
                                absl::StrCat(kMaxHeldFrames, " commands already wait for command ",
                                             session->next_sequence))});
    }
    return;
  }
  Session::HeldFrame held;
  held.frame = std::string(frame);
  if (done != nullptr) held.done.push_back(std::move(done));
  session->held.emplace(sequence.value(), std::move(held));
  if (session->held.size() == 1) LimitGap(session, now);  // else the timer runs
}

void LocalNode::Impl::LimitGap(const std::shared_ptr<Session>& session, absl::Time now) {
  const std::weak_ptr<Session> weak = session;
  const int64_t missing = session->next_sequence;
  session->gap_timer = timers.Add(now + options.gap_timeout, [this, weak, missing](absl::Time) {
    const std::shared_ptr<Session> session = weak.lock();
    if (session == nullptr || session->dead()) return;
    const absl::Status gap = MakeError(
        Reason::kSequenceGap,
        absl::StrCat("command ", missing, " did not arrive within ",
                     absl::FormatDuration(options.gap_timeout),
                     "; the commands after it were not executed: send it, then them again"));
    auto held = std::move(session->held);
    session->held.clear();
    for (auto& entry : held) {
      for (OnOutcome& done : entry.second.done) done({Sequence(entry.first), gap});
    }
  });
}

void LocalNode::Impl::ExecuteHeld(const std::shared_ptr<Session>& session, absl::Time now) {
  while (!session->dead() && !session->held.empty() &&
         session->held.begin()->first == session->next_sequence) {
    Session::HeldFrame held = std::move(session->held.begin()->second);
    session->held.erase(session->held.begin());
    absl::StatusOr<Command> command = DecodeFrame(held.frame);
    if (!command.ok()) return;  // cannot be: it decoded when it came
    for (OnOutcome& done : held.done) {
      session->outcome_waiters[command->sequence.value()].Add(std::move(done));
    }
    Execute(session, *command, now);
  }
  timers.Cancel(session->gap_timer);
  // What is held behind another gap has a limit of its own.
  if (!session->dead() && !session->held.empty()) LimitGap(session, now);
}

void LocalNode::Impl::Execute(const std::shared_ptr<Session>& session, const Command& command,
                              absl::Time now) {
  ++session->next_sequence;
  session->outcomes.Begin(command.sequence);
  RenewLease(session.get(), now);
  absl::Status status;
  if (const Run* run = absl::get_if<Run>(&command.body)) {
    SubmitRun(session, command.sequence, *run, now);
    return;
  }
  if (const auto* make_readable = absl::get_if<MakeReadable>(&command.body)) {
    DoMakeReadable(session, command.sequence, *make_readable);
    return;
  }
  if (const auto* create = absl::get_if<CreateTensor>(&command.body)) {
    status = DoCreateTensor(session, command.sequence, *create, now);
    if (status.ok()) return;  // its outcome follows when the bytes are there
    Error error = ErrorOf(status);
    ExplainMemory(*session, *create, &error);
    RecordFailure(session.get(), nullptr, &error);
    NameFailed(session.get(), create->tensor, std::make_shared<Error>(error));
    FinishCommand(session.get(), command.sequence, error);
    return;
  }
  if (const auto* graph = absl::get_if<RegisterGraph>(&command.body)) {
    status = DoRegister(session.get(), *graph);
  } else if (const auto* release = absl::get_if<Release>(&command.body)) {
    status = DoRelease(session.get(), *release);
  } else if (const auto* drop = absl::get_if<DropTape>(&command.body)) {
    status = DoDropTape(session.get(), *drop, now);
  } else if (const auto* cancel = absl::get_if<Cancel>(&command.body)) {
    status = DoCancel(session.get(), *cancel, now);
  } else if (const auto* enter = absl::get_if<EnterEpoch>(&command.body)) {
    status = DoEnterEpoch(session.get(), *enter);
  } else if (const auto* refuse = absl::get_if<Refuse>(&command.body)) {
    status = DoRefuse(session.get(), *refuse, now);
  }
  FinishCommand(session.get(), command.sequence, status);
}

void LocalNode::Impl::FinishCommand(Session* session, Sequence sequence,
                                    const absl::Status& status) {
  if (status.ok()) {
    FinishCommand(session, sequence);
    return;
  }
  Error error = ErrorOf(status);
  RecordFailure(session, nullptr, &error);
  FinishCommand(session, sequence, error);
}

void LocalNode::Impl::FinishCommand(Session* session, Sequence sequence, const Error& error) {
  RecordOutcome(session, sequence, {error.code, error.id});
  if (!session->outcome_waiters.empty()) TellWaiters(session, sequence, ToStatus(error));
}

void LocalNode::Impl::FinishCommand(Session* session, Sequence sequence) {
  RecordOutcome(session, sequence, {absl::StatusCode::kOk, ErrorId()});
  if (!session->outcome_waiters.empty()) TellWaiters(session, sequence, absl::OkStatus());
}

void LocalNode::Impl::RecordOutcome(Session* session, Sequence sequence,
                                    const RunOutcome& outcome) {
  session->outcomes.Finish(sequence, outcome.code, outcome.error);
  if (session->completions == nullptr) return;
  session->completions->PublishRun(sequence, outcome);
  MarkNews(session);
}

void LocalNode::Impl::TellWaiters(Session* session, Sequence sequence, const absl::Status& status) {
  const auto it = session->outcome_waiters.find(sequence.value());
  if (it == session->outcome_waiters.end()) return;
  Waiters<Outcome> waiters = std::move(it->second);
  session->outcome_waiters.erase(it);
  waiters.Call({sequence, status});
}

absl::Status LocalNode::Impl::OutcomeStatus(const Session& session,
                                            const OutcomeLog::Record& record) const {
  if (record.code == absl::StatusCode::kOk) return absl::OkStatus();
  if (absl::optional<Error> error = errors.Find(record.error, session.tenant->name)) {
    return ToStatus(*error);
  }
  return MakeError(
      Reason::kOutcomeForgotten,
      absl::StrCat("it failed with ", absl::StatusCodeToString(record.code), ", error ",
                   record.error.value(), ", which is too old: its details are forgotten"));
}

void LocalNode::Impl::WaitOutcome(const std::shared_ptr<Session>& session, Sequence sequence,
                                  absl::Time deadline, OnOutcome done) {
  const OutcomeLog::Record* record = session->outcomes.Find(sequence);
  if (record != nullptr && record->done) {
    done({sequence, OutcomeStatus(*session, *record)});
    return;
  }
  if (record == nullptr && sequence.value() < session->next_sequence) {
    done({sequence, MakeError(Reason::kOutcomeForgotten,
                              absl::StrCat("command ", sequence.value(), " is not among the last ",
                                           OutcomeLog::kKept, " of this session"))});
    return;
  }
  if (deadline == absl::InfiniteFuture()) {
    session->outcome_waiters[sequence.value()].Add(std::move(done));
    return;
  }
  // Whichever comes first ends the other.
  auto waiter = std::make_shared<Waiters<Outcome>::Id>();
  const std::weak_ptr<Session> weak = session;
  const TimerQueue::Id timer = timers.Add(deadline, [weak, waiter, sequence, done](absl::Time) {
    if (const std::shared_ptr<Session> waited = weak.lock()) {
      const auto it = waited->outcome_waiters.find(sequence.value());
      it->second.Remove(*waiter);
      if (it->second.empty()) waited->outcome_waiters.erase(it);
    }
    done({sequence,
          MakeError(Reason::kTransportTimeout,
                    absl::StrCat("command ", sequence.value(), " has no outcome yet; ask again"))});
  });
  *waiter = session->outcome_waiters[sequence.value()].Add([this, timer, done](Outcome outcome) {
    timers.Cancel(timer);
    done(std::move(outcome));
  });
}

// --- Commands that are no runs ------------------------------------------------------------------

absl::Status LocalNode::Impl::DoRegister(Session* session, const RegisterGraph& command) {
  if (command.graph.slot < 0 || command.graph.slot >= options.max_graphs) {
    return Malformed(absl::StrCat("graph slots go from 0 to ", options.max_graphs - 1, ", not ",
                                  command.graph.slot));
  }
  const size_t slot = static_cast<size_t>(command.graph.slot);
  if (session->graphs.size() <= slot) session->graphs.resize(slot + 1);
  Session::GraphSlot& place = session->graphs[slot];
  if (place.record != nullptr || command.graph.generation <= place.generation) {
    return Malformed(absl::StrCat("graph slot ", slot, " is in use, or generation ",
                                  command.graph.generation, " of it is not new"));
  }
  place.generation = command.graph.generation;
  absl::StatusOr<std::shared_ptr<GraphRecord>> record = MakeGraph(session, command);
  place.refused = record.status();
  CHORUS_RETURN_IF_ERROR(place.refused);
  place.record = *std::move(record);
  ++session->live_graphs;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<GraphRecord>> LocalNode::Impl::MakeGraph(
    Session* session, const RegisterGraph& command) {
  // The copy comes first: nothing is decoded while the client can still write it.
  std::string encoded = command.encoded;
  if (command.staged_bytes > 0) {
    CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena,
                            FindStaging(session, command.staged.arena));
    CHORUS_ASSIGN_OR_RETURN(
        BufferRef bytes,
        Buffer::OfStaging(std::move(arena), command.staged.offset, command.staged_bytes));
    encoded.assign(bytes->host(), static_cast<size_t>(command.staged_bytes));
  }
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<GraphRecord> record, graphs_.Register(encoded));
  int64_t workspace = 0;
  for (int64_t bytes : record->main.plan.workspace_bytes) workspace += bytes;
  if (workspace > budget_.limit()) {
    return MakeError(Reason::kOutOfMemory,
                     absl::StrCat("a run of this graph needs ", workspace,
                                  " bytes of workspace; the daemon may use ", budget_.limit()));
  }
  return record;
}

absl::Status LocalNode::Impl::DoCreateTensor(const std::shared_ptr<Session>& session,
                                             Sequence sequence, const CreateTensor& command,
                                             absl::Time now) {
  CHORUS_RETURN_IF_ERROR(CheckFresh(*session, command.tensor));
  CHORUS_RETURN_IF_ERROR(command.type.Validate(options.memory_limit_bytes));
  if (std::find(session->devices.begin(), session->devices.end(), command.device) ==
      session->devices.end()) {
    return Malformed(absl::StrCat("device ", command.device.value(), " is none of the session's"));
  }
  if (absl::holds_alternative<TensorId>(command.source)) {
    return Malformed("a tensor is made from inline bytes or from staging, not from a tensor");
  }
  auto cell = std::make_shared<Cell>();
  cell->type = std::make_shared<TensorType>(command.type);
  cell->device = command.device;
  cell->bytes = command.type.num_bytes();
  const TensorId id = command.tensor;
  const auto settle = [this, session, sequence, id, cell](const absl::Status& status) {
    if (status.ok()) {
      cell->state = Cell::State::kReady;
    } else {
      Error error = ErrorOf(status);
      RecordFailure(session.get(), nullptr, &error);
      cell->state = Cell::State::kFailed;
      cell->error = std::make_shared<Error>(std::move(error));
    }
    if (!session->dead()) {
      PublishTensor(session.get(), id, *cell);
      FinishCommand(session.get(), sequence, status);
    }
    Settle(cell);
  };
  bool upload = false;
  CHORUS_ASSIGN_OR_RETURN(Bound bound, BindBytes(session.get(), command.source, command.type,
                                                 command.device, /*stable=*/true, settle, &upload));
  cell->buffer = std::move(bound.buffer);
  NameTensor(session.get(), id, cell);
  if (!upload) settle(absl::OkStatus());
  (void)now;
  return absl::OkStatus();
}

void LocalNode::Impl::DoMakeReadable(const std::shared_ptr<Session>& session, Sequence sequence,
                                     const MakeReadable& command) {
  // Ends when the last of them is readable, or with the first failure.
  struct Progress {
    size_t left;
    absl::Status status;
  };
  auto progress = std::make_shared<Progress>();
  progress->left = command.tensors.size() + 1;
  const auto step = [this, session, sequence, progress](const absl::Status& status) {
    progress->status.Update(status);
    if (--progress->left == 0 && !session->dead()) {
      FinishCommand(session.get(), sequence, progress->status);
    }
  };
  for (TensorId id : command.tensors) {
    absl::StatusOr<CellRef> cell = FindTensor(*session, id);
    if (!cell.ok()) {
      step(cell.status());
      continue;
    }
    WhenReadable(*cell, session->tenant,
                 [this, session, id, step](const CellRef& readable, const absl::Status& status) {
                   if (status.ok() && !session->dead()) {
                     PublishTensor(session.get(), id, *readable);
                   }
                   step(status);
                 });
  }
  step(absl::OkStatus());
}

absl::Status LocalNode::Impl::DoRelease(Session* session, const Release& command) {
  // Names that are gone already are no fault: releases may cross with the end of what they name.
  for (TensorId id : command.tensors) {
    if (id.slot < 0 || static_cast<size_t>(id.slot) >= session->tensors.size()) continue;
    Session::TensorSlot& place = session->tensors[static_cast<size_t>(id.slot)];
    if (place.cell == nullptr || place.generation != id.generation) continue;
    place.cell.reset();
    --session->live_tensors;
  }
  for (GraphId id : command.graphs) {
    if (id.slot < 0 || static_cast<size_t>(id.slot) >= session->graphs.size()) continue;
    Session::GraphSlot& place = session->graphs[static_cast<size_t>(id.slot)];
    if (place.record == nullptr || place.generation != id.generation) continue;
    place.record.reset();
    --session->live_graphs;
  }
  return absl::OkStatus();
}

absl::Status LocalNode::Impl::DoDropTape(Session* session, const DropTape& command,
                                         absl::Time now) {
  for (const DropTape::Entry& entry : command.entries) {
    for (const Session::Membership& membership : session->memberships) {
      if (membership.world->id != entry.world || !membership.world->formed) continue;
      absl::StatusOr<absl::Span<const Rank>> members =
          membership.world->sequencer->GroupMembers(entry.key.group);
      if (!members.ok() || entry.member.value() < 0 ||
          static_cast<size_t>(entry.member.value()) >= members->size() ||
          (*members)[static_cast<size_t>(entry.member.value())] != membership.rank) {
        continue;
      }
      const std::shared_ptr<World> world = membership.world;
      Actions actions;
      world->sequencer->DropTape(membership.rank, entry.key, entry.consumed, membership.epoch, now,
                                 &actions);
      Apply(world, &actions, now);
      break;
    }
  }
  return absl::OkStatus();
}

absl::Status LocalNode::Impl::DoEnterEpoch(Session* session, const EnterEpoch& command) {
  bool found = false;
  for (Session::Membership& membership : session->memberships) {
    if (membership.world->id != command.world || !membership.world->formed) continue;
    found = true;
    const Epoch open = membership.world->sequencer->epoch();
    if (command.epoch < membership.epoch || command.epoch > open) {
      return Malformed(absl::StrCat("epoch ", command.epoch.value(), " of world ",
                                    command.world.value(), " cannot be entered: the session is in ",
                                    membership.epoch.value(), ", open is ", open.value()));
    }
    membership.epoch = command.epoch;
  }
  if (found) return absl::OkStatus();
  return UnknownName(absl::StrCat("this session is no member of world ", command.world.value()));
}

absl::Status LocalNode::Impl::DoCancel(Session* session, const Cancel& command, absl::Time now) {
  RunState* found = nullptr;
  runs_.ForEach([&](RunState* run) {
    if (run->session.get() == session && run->sequence == command.run) found = run;
  });
  // Ended or launched: commit wins.
  if (found == nullptr || found->phase == RunState::Phase::kLaunched) return absl::OkStatus();
  if (found->phase == RunState::Phase::kWaiting) {
    FailRun(found,
            ErrorOf(MakeError(Reason::kCancelled,
                              absl::StrCat("run ", command.run.value(), " was cancelled"))),
            now);
    return absl::OkStatus();
  }
  const std::shared_ptr<World> world = found->world;
  Rank rank;
  for (const Session::Membership& membership : session->memberships) {
    if (membership.world == world) rank = membership.rank;
  }
  Actions actions;
  world->sequencer->Cancel(found->handle, rank, now, &actions);
  Apply(world, &actions, now);
  return absl::OkStatus();
}

// --- Names --------------------------------------------------------------------------------------

absl::StatusOr<CellRef> LocalNode::Impl::FindTensor(const Session& session, TensorId id) const {
  if (id.slot >= 0 && static_cast<size_t>(id.slot) < session.tensors.size()) {
    const Session::TensorSlot& place = session.tensors[static_cast<size_t>(id.slot)];
    if (place.cell != nullptr && place.generation == id.generation) {
      if (place.cell->donated_to == Sequence()) return place.cell;
      return MakeError(
          Reason::kDonated,
          absl::StrCat("tensor ", id.slot, ".", id.generation, " is donated to run ",
                       place.cell->donated_to.value(),
                       ", which is not launched yet: it can be used again if that run fails"));
    }
  }
  return UnknownName(
      absl::StrCat("tensor ", id.slot, ".", id.generation, " does not exist, or was released"));
}

absl::Status LocalNode::Impl::CheckFresh(const Session& session, TensorId id) const {
  if (id.slot < 0 || id.slot >= options.max_tensors) {
    return Malformed(
        absl::StrCat("tensor slots go from 0 to ", options.max_tensors - 1, ", not ", id.slot));
  }
  if (static_cast<size_t>(id.slot) >= session.tensors.size()) {
    return id.generation > 0 ? absl::OkStatus()
                             : Malformed("a tensor slot's first generation is 1");
  }
  const Session::TensorSlot& place = session.tensors[static_cast<size_t>(id.slot)];
  if (place.cell != nullptr || id.generation <= place.generation) {
    return Malformed(absl::StrCat("tensor slot ", id.slot, " is in use, or generation ",
                                  id.generation, " of it is not new (the last was ",
                                  place.generation, ")"));
  }
  return absl::OkStatus();
}

void LocalNode::Impl::NameTensor(Session* session, TensorId id, CellRef cell) {
  const size_t slot = static_cast<size_t>(id.slot);
  if (session->tensors.size() <= slot) {
    session->tensors.resize(std::max(slot + 1, session->tensors.size() * 2));
  }
  session->tensors[slot].generation = id.generation;
  session->tensors[slot].cell = std::move(cell);
  ++session->live_tensors;
}

void LocalNode::Impl::NameFailed(Session* session, TensorId id,
                                 std::shared_ptr<const Error> error) {
  if (!CheckFresh(*session, id).ok()) return;
  auto cell = std::make_shared<Cell>();
  cell->state = Cell::State::kFailed;
  cell->error = std::move(error);
  cell->type = std::make_shared<TensorType>();
  PublishTensor(session, id, *cell);
  NameTensor(session, id, std::move(cell));
}

bool LocalNode::Impl::StandsFor(const Session& session, TensorId id, const Cell& cell) const {
  if (static_cast<size_t>(id.slot) >= session.tensors.size()) return false;
  return session.tensors[static_cast<size_t>(id.slot)].cell.get() == &cell;
}

void LocalNode::Impl::ReplaceTensor(Session* session, TensorId id, CellRef cell) {
  if (static_cast<size_t>(id.slot) >= session->tensors.size()) return;
  Session::TensorSlot& place = session->tensors[static_cast<size_t>(id.slot)];
  if (place.cell == nullptr || place.generation != id.generation) return;
  if (cell->settled()) PublishTensor(session, id, *cell);  // else its run will
  place.cell = std::move(cell);
}

void LocalNode::Impl::PublishTensor(Session* session, TensorId id, const Cell& cell) {
  if (session->completions == nullptr) return;
  TensorRecord record;
  const Buffer* readable = cell.readable();
  if (cell.state == Cell::State::kFailed) {
    record.state = TensorState::kFailed;
    record.code = cell.error->code;
    record.error = cell.error->id;
  } else if (cell.buffer && readable == nullptr) {
    record.state = TensorState::kOnDevice;
  } else {
    record.state = TensorState::kReady;
    record.bytes = cell.bytes;
    if (readable != nullptr) {
      record.arena = readable->arena();
      record.offset = readable->offset() + cell.offset;
    }
  }
  session->completions->PublishTensor(id, record);
  MarkNews(session);
}

void LocalNode::Impl::MarkNews(Session* session) {
  if (session->has_news) return;
  session->has_news = true;
  news_.push_back(session->shared_from_this());
}

void LocalNode::Impl::WakeWaiters() {
  for (const std::shared_ptr<Session>& session : news_) {
    session->has_news = false;
    if (session->completions != nullptr) session->completions->Signal();
  }
  news_.clear();
}

void LocalNode::Impl::Settle(const CellRef& cell) {
  if (!cell->on_settled.empty()) cell->on_settled.Call(cell);
}

Waiters<CellRef>::Id LocalNode::Impl::WhenReadable(const CellRef& cell,
                                                   std::shared_ptr<Tenant> tenant,
                                                   OnReadable done) {
  if (!cell->settled()) {
    return cell->on_settled.Add(
        [this, tenant, done](const CellRef& settled) { WhenReadable(settled, tenant, done); });
  }
  if (cell->state == Cell::State::kFailed) {
    done(cell, ToStatus(*cell->error));
    return 0;
  }
  if (cell->host() != nullptr) {
    done(cell, absl::OkStatus());
    return 0;
  }
  absl::StatusOr<BufferRef> mirror = tenant->arenas->Allocate(cell->buffer->bytes());
  if (!mirror.ok()) {
    done(cell, mirror.status());
    return 0;
  }
  const BufferRef target = *mirror;
  launcher_.executor(cell->device)
      ->Download(target->host(), cell->buffer->address(), cell->buffer->bytes(), 0,
                 BeginTransfer([cell, target, done](absl::Status status) {
                   if (status.ok()) cell->buffer->set_mirror(target);
                   done(cell, status);
                 }));
  return 0;
}

void LocalNode::Impl::ReadTensor(const std::shared_ptr<Session>& session, TensorId id,
                                 absl::Time deadline, OnTensor done) {
  absl::StatusOr<CellRef> found = FindTensor(*session, id);
  if (!found.ok()) {
    done(found.status());
    return;
  }
  // Whichever comes first takes the callback; bytes that are on their way to the host cannot be
  // stopped.
  auto once = std::make_shared<OnTensor>(std::move(done));
  auto waiter = std::make_shared<Waiters<CellRef>::Id>();
  const std::weak_ptr<Cell> weak = *found;
  const TimerQueue::Id timer = timers.Add(deadline, [once, weak, waiter, id](absl::Time) {
    if (const CellRef cell = weak.lock()) cell->on_settled.Remove(*waiter);
    OnTensor call = std::move(*once);
    *once = nullptr;
    call(MakeError(Reason::kTransportTimeout, absl::StrCat("tensor ", id.slot, ".", id.generation,
                                                           " is not computed yet; ask again")));
  });
  const auto answer = [this, once, timer](const CellRef& cell, const absl::Status& status) {
    if (*once == nullptr) return;
    timers.Cancel(timer);
    OnTensor call = std::move(*once);
    *once = nullptr;
    if (!status.ok()) {
      call(status);
      return;
    }
    TensorView view;
    view.type = *cell->type;
    view.device = cell->device;
    view.buffer = cell->buffer;
    view.data = cell->host();
    view.bytes = cell->bytes;
    call(std::move(view));
  };
  *waiter = WhenReadable(*found, session->tenant, answer);
}

// --- Bytes --------------------------------------------------------------------------------------

absl::StatusOr<BufferRef> LocalNode::Impl::Allocate(Tenant* tenant, DeviceIndex device,
                                                    int64_t bytes) {
  if (host_) return tenant->arenas->Allocate(bytes);
  return device_sets_[static_cast<size_t>(device.value())]->Allocate(bytes);
}

absl::StatusOr<LocalNode::Impl::Bound> LocalNode::Impl::BindBytes(
    Session* session, const Binding& binding, const TensorType& type, DeviceIndex device,
    bool stable, std::function<void(absl::Status)> uploaded, bool* upload) {
  const int64_t bytes = type.num_bytes();
  Bound bound;
  BufferRef copy;  // in host memory
  if (const auto* data = absl::get_if<InlineData>(&binding)) {
    if (static_cast<int64_t>(data->bytes.size()) != bytes) {
      return Malformed(absl::StrCat(data->bytes.size(), " inline bytes for ", type.ToString(),
                                    ", which has ", bytes));
    }
    if (bytes == 0) return bound;
    CHORUS_ASSIGN_OR_RETURN(copy, session->tenant->arenas->Allocate(bytes));
    std::memcpy(copy->host(), data->bytes.data(), data->bytes.size());
  } else {
    const ExternalRange& range = absl::get<ExternalRange>(binding);
    CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena, FindStaging(session, range.arena));
    CHORUS_ASSIGN_OR_RETURN(const StridedExtent extent,
                            CheckStrided(type, range.strides, range.offset, arena->bytes()));
    if (bytes == 0) return bound;
    const char* source = arena->data() + range.offset;
    const bool direct =
        !stable && host_ && extent.contiguous &&
        reinterpret_cast<uintptr_t>(source) % static_cast<uintptr_t>(DTypeBytes(type.dtype)) == 0;
    if (direct) {
      CHORUS_ASSIGN_OR_RETURN(bound.buffer,
                              Buffer::OfStaging(std::move(arena), range.offset, bytes));
      bound.address = bound.buffer->address();
      return bound;
    }
    stats.paths.copied_bytes += bytes;
    if (extent.contiguous && (!host_ || bytes >= kBackgroundCopyBytes)) {
      CHORUS_ASSIGN_OR_RETURN(bound.buffer, Allocate(session->tenant.get(), device, bytes));
      bound.buffer->set_state(Buffer::State::kFrozen);
      bound.address = bound.buffer->address();
      *upload = true;
      UploadTo(device, bound.buffer, source, std::move(arena), std::move(uploaded));
      return bound;
    }
    CHORUS_ASSIGN_OR_RETURN(copy, session->tenant->arenas->Allocate(bytes));
    CopyStrided(type, range.strides, source, copy->host());
  }
  copy->set_state(Buffer::State::kFrozen);
  if (host_) {
    bound.buffer = std::move(copy);
    bound.address = bound.buffer->address();
    return bound;
  }
  CHORUS_ASSIGN_OR_RETURN(bound.buffer, Allocate(session->tenant.get(), device, bytes));
  bound.buffer->set_state(Buffer::State::kFrozen);
  bound.address = bound.buffer->address();
  *upload = true;
  const char* const source = copy->host();
  UploadTo(device, bound.buffer, source, std::move(copy), std::move(uploaded));
  return bound;
}

// On the device's copy stream, beside what the device and the node do meanwhile.
template <typename Keep>
void LocalNode::Impl::UploadTo(DeviceIndex device, const BufferRef& target, const char* source,
                               Keep keep, std::function<void(absl::Status)> uploaded) {
  launcher_.executor(device)->Upload(
      target->address(), source, target->bytes(),
      BeginTransfer([keep = std::move(keep), target,
                     uploaded = std::move(uploaded)](absl::Status status) { uploaded(status); }));
}

// What a transfer keeps alive counts its references on this thread alone: the backend's thread gets
// no more than a number.
std::function<void(absl::Status)> LocalNode::Impl::BeginTransfer(
    std::function<void(absl::Status)> done) {
  const uint64_t id = ++last_transfer_;
  transfers_.emplace(id, std::move(done));
  return [this, id](absl::Status status) {
    launcher_.Post([this, id, status = Detached(status)] {
      const auto it = transfers_.find(id);
      const std::function<void(absl::Status)> done = std::move(it->second);
      transfers_.erase(it);
      done(status);
    });
  };
}

// --- Sleeping -----------------------------------------------------------------------------------

bool LocalNode::Impl::SleepUnlessBusy(const std::function<void()>& sleep) {
  look_at_all_ = true;  // whoever ends the sleep
  return doorbell->SleepUnless(
      [this] {
        if (launcher_.HasCompletions()) return true;
        return std::any_of(polled_.begin(), polled_.end(),
                           [](const std::shared_ptr<Session>& s) { return s->ring->HasFrame(); });
      },
      sleep);
}

}  // namespace chorus
