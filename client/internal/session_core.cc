#include "client/internal/session_core.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/internal/calls.h"
#include "client/internal/errors.h"
#include "client/internal/living_sessions.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {
namespace {

constexpr size_t kNamesPerFrame = 2048;

// `data` has this name from now on.
void SetSent(TensorId id, Sequence producer, TensorData* data) {
  data->id = id;
  data->producer = producer;
  data->state.store(TensorData::State::kSent, std::memory_order_release);
}

// The session whose lock this thread holds.
thread_local const SessionCore* locked_session = nullptr;

// Tells that these are gone, behind what has been sent; leaves those that have found no room.
void SendRelease(Log* log, std::vector<TensorId>* tensors) {
  while (!tensors->empty()) {
    const auto end =
        tensors->begin() + static_cast<ptrdiff_t>(std::min(kNamesPerFrame, tensors->size()));
    Release release;
    release.tensors.assign(tensors->begin(), end);
    const bool is_taken = log->Submit(std::move(release)).ok();
    if (log->has_no_room()) return;
    if (is_taken) {
      std::for_each(tensors->begin(), end, [log](TensorId id) { log->tensors().Release(id); });
    }
    tensors->erase(tensors->begin(), end);
  }
}

// Waits until that tensor's elements are where they can be read, which they are not if it is
// `on_device`.
absl::Status MakeReadableIf(bool on_device, TensorId id, SessionCore* session) {
  if (!on_device) return absl::OkStatus();
  Sequence command;
  {
    SessionLock lock(session);
    CHORUS_RETURN_IF_ERROR(lock.status());
    CHORUS_ASSIGN_OR_RETURN(command, session->log().Submit(MakeReadable{{id}}));
  }
  // The tensor says that it can be read, and not why it cannot: there is no memory for its copy.
  const absl::Status readable = session->link().WaitCommand(command, session->wait_timeout());
  return ErrorOf(readable).reason == Reason::kOutcomeForgotten ? absl::OkStatus() : readable;
}

absl::Status ClosedError() { return MakeError(Reason::kSessionLost, "the session is closed"); }

}  // namespace

// --- SessionLock --------------------------------------------------------------------------------

SessionLock::SessionLock(SessionCore* core) : core_(core) {
  if (core_->Forked()) {
    status_ = ForkedError();
    return;
  }
  core_->mutex_.Lock();
  held_ = true;
  locked_session = core_;
  core_->log_.BeginSection();
  if (core_->closed_.load(std::memory_order_relaxed)) {
    status_ = ClosedError();
  } else {
    status_ = core_->log_.broken();
  }
}

SessionLock::~SessionLock() {
  if (!held_) return;
  if (core_->releases_.urgent() || core_->log_.keeps()) core_->Drain(/*all=*/false);
  locked_session = nullptr;
  core_->mutex_.Unlock();
}

// --- SessionCore --------------------------------------------------------------------------------

void SessionCore::AssertLocked() const { assert(locked_session == this); }

std::shared_ptr<SessionCore> SessionCore::Make(std::unique_ptr<Link> link,
                                               absl::Duration wait_timeout,
                                               WaitReportOptions reports) {
  std::shared_ptr<SessionCore> session(
      new SessionCore(std::move(link), wait_timeout, std::move(reports)));
  AddLivingSession(session);
  return session;
}

SessionCore::SessionCore(std::unique_ptr<Link> link, absl::Duration wait_timeout,
                         WaitReportOptions reports)
    : link_(link.release()),
      wait_timeout_(wait_timeout),
      reports_(link_, std::move(reports)),
      devices_(link_->devices()),
      log_(link_),
      staging_(link_, wait_timeout, &log_),
      releases_([this] {
        if (locked_session == this || log_.has_no_room()) return;
        SessionLock lock(this);  // drains when it ends
      }),
      graphs_(link_, &log_, &staging_, &releases_) {}

SessionCore::~SessionCore() {
  // In a forked child the link's threads do not exist, and its session is the parent's.
  if (Forked()) return;
  Close().IgnoreError();
  delete link_;
}

// --- Names --------------------------------------------------------------------------------------

absl::StatusOr<TensorId> SessionCore::NewTensorId() {
  if (log_.tensors().empty()) Drain(/*all=*/true);
  if (const absl::optional<TensorId> id = log_.tensors().Take()) return *id;
  return MakeError(Reason::kQuota, absl::StrCat("the session holds ", log_.tensors().most(),
                                                " tensors, as many as it may; drop some"));
}

// --- Local ops ----------------------------------------------------------------------------------

TensorDatas SessionCore::Append(NodeSpec spec, absl::Span<const TensorDataPtr> inputs,
                                absl::Span<const TensorType> outputs) {
  Origins after;
  for (const TensorDataPtr& input : inputs) {
    OriginTable::Join(&after, input->after, [this] { return log_.OldestUnderWay(); });
  }
  // To name a tensor, and to send a fragment, may send all others: the op's own is looked for
  // last, and nothing is sent from there on.
  std::shared_ptr<const Failure> failure;
  for (const TensorDataPtr& input : inputs) {
    const absl::Status named = Name(input.get());
    if (!named.ok()) failure = std::make_shared<Failure>(Failure{named});
  }
  for (const TensorDataPtr& input : inputs) {
    if (input->state.load(std::memory_order_relaxed) != TensorData::State::kLazy) continue;
    const Fragment* const open = fragments_.Find(spec.device_slot, after);
    if (open == nullptr || input->fragment != open->id()) FlushOne(input->fragment);
  }
  Fragment* fragment = fragments_.Find(spec.device_slot, after);
  if (fragment != nullptr && !fragment->HasRoomFor(inputs.size() + outputs.size())) {
    FlushOne(fragment->id());
    fragment = nullptr;
  }
  for (const TensorDataPtr& input : inputs) {
    // Flushing may have failed.
    if (input->failure != nullptr) failure = input->failure;
  }
  TensorDatas results;
  for (const TensorType& type : outputs) {
    auto data = std::make_shared<TensorData>(shared_from_this());
    data->info = interner_.Type(type);
    data->device_slot = spec.device_slot;
    data->after = after;
    if (failure != nullptr) {
      data->failure = failure;
      data->state.store(TensorData::State::kFailed, std::memory_order_release);
    }
    results.push_back(std::move(data));
  }
  if (failure != nullptr) return results;
  if (fragment == nullptr) fragment = fragments_.Open(spec.device_slot, after);
  fragment->Append(std::move(spec), inputs, results);
  return results;
}

void SessionCore::Flush() {
  while (const int64_t oldest = fragments_.oldest()) FlushOne(oldest);
}

void SessionCore::FlushOne(int64_t fragment_id) {
  // Not open any more: what is done to send it may send the others, never it again.
  const std::unique_ptr<Fragment> fragment = fragments_.Take(fragment_id);
  if (fragment == nullptr) return;
  RunDraft draft = fragment->TakeDraft(device_count());
  if (draft.results.empty()) return;
  sending_.push_back(fragment.get());
  TensorDatas sent;
  const absl::Status status = SubmitRun(&draft, &sent).status();
  sending_.pop_back();
  if (status.ok()) return;
  const auto failure = std::make_shared<Failure>(Failure{status});
  for (const RunDraft::Result& result : draft.results) {
    result.lazy->failure = failure;
    result.lazy->state.store(TensorData::State::kFailed, std::memory_order_release);
  }
}

// --- Runs ---------------------------------------------------------------------------------------

absl::StatusOr<Sequence> SessionCore::SubmitRun(RunDraft* draft, TensorDatas* results) {
  Run& run = draft->run();
  if (draft->encoded.empty()) {
    Flush();
    run.inputs.resize(draft->operands.size());
    for (size_t i = 0; i < draft->operands.size(); ++i) {
      const TensorData& operand = *draft->operands[i];
      // Flushing may have failed.
      if (operand.failure != nullptr) return operand.failure->status;
      run.inputs[i] = operand.binding();
    }
  }
  // (They are there in a draft that is sent again, and to resize is not free.)
  if (run.outputs.size() != draft->results.size()) run.outputs.resize(draft->results.size());
  const auto give_back = [&](size_t count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
    for (size_t i = 0; i < count; ++i) log_.tensors().GiveBack(run.outputs[i].id);
  };
  for (size_t i = 0; i < run.outputs.size(); ++i) {
    const absl::StatusOr<TensorId> id = NewTensorId();
    if (!id.ok()) {
      give_back(i);
      return id.status();
    }
    run.outputs[i].kind = OutBinding::Kind::kFresh;
    run.outputs[i].id = *id;
  }
  const auto submit = [&]()
                          ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) -> absl::StatusOr<Sequence> {
    // Behind the names: to find them may send other fragments, whose graphs may push this one out.
    if (!draft->encoded.empty()) {
      CHORUS_ASSIGN_OR_RETURN(run.graph, graphs_.OfFragment(std::move(draft->encoded)));
    }
    return log_.Submit(&draft->command);
  };
  const absl::StatusOr<Sequence> sequence = submit();
  if (!sequence.ok()) {
    give_back(run.outputs.size());
    return sequence;
  }

  const bool fragment = !draft->results.empty() && draft->results[0].lazy != nullptr;
  Origins after;
  if (fragment) after = draft->results[0].lazy->after;
  for (const TensorData* const operand : draft->operands) {
    OriginTable::Join(&after, operand->after, [this] { return log_.OldestUnderWay(); });
  }
  // All results come at once, when the last of the collectives is done.
  if (draft->member != nullptr) after = {origins_.Add(*sequence, draft->member, after)};
  log_.CountRun(*sequence, after.empty() ? nullptr : after.front()->member);
  for (size_t i = 0; i < draft->results.size(); ++i) {
    const RunDraft::Result& result = draft->results[i];
    TensorDataPtr data = result.lazy;
    if (data == nullptr) {
      data = std::make_shared<TensorData>(shared_from_this());
      data->info = result.info;
      data->device_slot = result.device_slot;
      data->after = after;
    }
    SetSent(run.outputs[i].id, *sequence, data.get());
    results->push_back(std::move(data));
  }
  return sequence;
}

absl::StatusOr<Sequence> SessionCore::SubmitCalls(absl::Span<CallPart> parts, bool bound,
                                                  const CallInRuns* runs, const CallEntry** used,
                                                  TensorDatas* results) {
  for (const CallPart& part : parts) {
    for (TensorData* const input : part.inputs) CHORUS_RETURN_IF_ERROR(Name(input));
  }
  CHORUS_ASSIGN_OR_RETURN(CallEntry* const entry,
                          graphs_.OfCalls(parts, device_count(), &interner_));
  *used = entry;
  Bind(parts, bound, runs, entry);
  return SubmitRun(&entry->draft, results);
}

void SessionCore::TrimCalls() {
  if (!interner_.HasManySources() && !graphs_.HasManyOfCalls()) return;
  for (const std::shared_ptr<MemberCore>& member : members_.members()) {
    for (const auto& group : member->groups) graphs_.ForgetCalls(group.get());
  }
  interner_.ForgetSources();
}

void SessionCore::Throttle(const MemberCore* member) {
  if (!log_.IsFull()) return;
  absl::optional<Sequence> oldest;
  {
    SessionLock lock(this);
    if (!lock.status().ok()) return;
    oldest = log_.AwaitsRoom(member);
  }
  if (oldest.has_value()) WaitForRun(*oldest).IgnoreError();
}

absl::Status SessionCore::WaitForRun(Sequence run) {
  return reports_.InParts(wait_timeout_,
                          [&](absl::Duration part) { return link_->WaitCommand(run, part); });
}

// --- Bytes --------------------------------------------------------------------------------------

absl::StatusOr<SessionCore::Created> SessionCore::Create(const TensorInfoPtr& info,
                                                         int32_t device_slot, Binding source,
                                                         const std::string& call_site) {
  CreateTensor create;
  create.type = info->type;
  create.device = devices_[device_slot];
  create.source = std::move(source);
  create.call_site = call_site;
  Created created;
  CHORUS_ASSIGN_OR_RETURN(created.id, NewTensorId());
  create.tensor = created.id;
  const absl::StatusOr<Sequence> sequence = log_.Submit(std::move(create));
  if (!sequence.ok()) {
    log_.tensors().GiveBack(created.id);
    return sequence.status();
  }
  created.sequence = *sequence;
  return created;
}

absl::StatusOr<TensorDataPtr> SessionCore::FromHost(const TensorInfoPtr& info, int32_t device_slot,
                                                    const char* bytes, CallSite site) {
  auto data = std::make_shared<TensorData>(shared_from_this());
  data->info = info;
  data->device_slot = device_slot;
  if (info->bytes <= static_cast<int64_t>(InlineData::kMaxBytes)) {
    data->inline_data.bytes.assign(bytes, bytes + info->bytes);
    data->state.store(TensorData::State::kHost, std::memory_order_release);
    return data;
  }
  Created created;
  const auto create = [&](const ExternalRange& range)
                          ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) -> absl::StatusOr<Sequence> {
    CHORUS_ASSIGN_OR_RETURN(created, Create(info, device_slot, range, SourceOf(site)));
    return created.sequence;
  };
  CHORUS_RETURN_IF_ERROR(
      staging_.Send(absl::string_view(bytes, static_cast<size_t>(info->bytes)), create).status());
  SetSent(created.id, created.sequence, data.get());
  return data;
}

absl::StatusOr<Link::Staging> SessionCore::CreateStaging(int64_t bytes) {
  const absl::StatusOr<Link::Staging> staging = link_->CreateStaging(bytes);
  if (!absl::IsResourceExhausted(staging.status())) return staging;
  SessionLock lock(this);
  CHORUS_RETURN_IF_ERROR(lock.status());
  Drain(/*all=*/true);
  CHORUS_RETURN_IF_ERROR(staging_.GiveBackAll());
  return link_->CreateStaging(bytes);
}

absl::Status SessionCore::NameHost(TensorData* data) {
  CHORUS_ASSIGN_OR_RETURN(const Created created,
                          Create(data->info, data->device_slot, data->inline_data));
  SetSent(created.id, created.sequence, data);
  return absl::OkStatus();
}

absl::StatusOr<TensorDataPtr> SessionCore::Freeze(const TensorData& data) {
  CHORUS_ASSIGN_OR_RETURN(const Created created,
                          Create(data.info, data.device_slot, data.external));
  auto frozen = std::make_shared<TensorData>(shared_from_this());
  frozen->info = data.info;
  frozen->device_slot = data.device_slot;
  SetSent(created.id, created.sequence, frozen.get());
  return frozen;
}

// --- Waiting ------------------------------------------------------------------------------------

void SessionCore::OnError(const absl::Status& status) {
  const Error error = ErrorOf(status);
  if (error.reason == Reason::kDeviceLost) losses_.fetch_add(1, std::memory_order_relaxed);
  if (error.ended.empty()) return;
  SessionLock lock(this);
  if (!lock.status().ok()) return;
  for (const Error::EndedEpoch& ended : error.ended) {
    bool entered = false;
    for (const std::shared_ptr<MemberCore>& member : members_.members()) {
      if (member->world != ended.world ||
          member->epoch.load(std::memory_order_relaxed) >= ended.open) {
        continue;
      }
      member->epoch.store(ended.open, std::memory_order_relaxed);
      entered = true;
    }
    if (entered) log_.SubmitOrKeep(EnterEpoch{ended.world, ended.open});
  }
}

absl::StatusOr<bool> SessionCore::Wait(const TensorDataPtr& data, absl::Duration timeout) {
  if (Forked()) return ForkedError();
  TensorData::State state = data->state.load(std::memory_order_acquire);
  if (state == TensorData::State::kLazy) {
    SessionLock lock(this);
    CHORUS_RETURN_IF_ERROR(lock.status());
    Flush();
    state = data->state.load(std::memory_order_acquire);
  }
  switch (state) {
    case TensorData::State::kSent: {
      absl::StatusOr<bool> on_device = reports_.InParts(timeout, [&](absl::Duration part) {
        return link_->WaitTensor(data->id, data->producer, part);
      });
      LeaveWhatIsOver();
      if (!on_device.ok()) OnError(on_device.status());
      return on_device;
    }
    case TensorData::State::kAbsent: {
      if (data->producer == Sequence()) return false;
      const absl::Status status = reports_.InParts(
          timeout, [&](absl::Duration part) { return link_->WaitCommand(data->producer, part); });
      if (status.ok()) return false;
      OnError(status);
      return status;
    }
    case TensorData::State::kFailed:
      return data->failure->status;
    case TensorData::State::kTraced:
      return MakeError(Reason::kWrongState,
                       "a tensor inside a compiled function has no bytes: return it, and read the "
                       "result of the call");
    case TensorData::State::kInline:
    case TensorData::State::kHost:
    case TensorData::State::kExternal:
    case TensorData::State::kLazy:
      break;
  }
  return false;
}

absl::Status SessionCore::Read(const TensorDataPtr& data, bool on_device, char* out) {
  if (data->info->bytes == 0) return absl::OkStatus();
  // Also of what another thread has named since: that is where `on_device` does not say.
  if (!data->inline_data.bytes.empty()) {
    std::memcpy(out, data->inline_data.bytes.data(), data->inline_data.bytes.size());
    return absl::OkStatus();
  }
  if (data->state.load(std::memory_order_acquire) == TensorData::State::kExternal) {
    std::memcpy(out, data->staging, static_cast<size_t>(data->info->bytes));
    return absl::OkStatus();
  }
  CHORUS_RETURN_IF_ERROR(MakeReadableIf(on_device, data->id, this));
  CHORUS_RETURN_IF_ERROR(
      link_->Read(data->id, data->producer, out, data->info->bytes, wait_timeout_));
  // Closed meanwhile, its memory may have become another's.
  std::atomic_thread_fence(std::memory_order_acquire);
  return closed_.load(std::memory_order_relaxed) ? ClosedError() : absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const char>> SessionCore::Map(const TensorDataPtr& data,
                                                             bool on_device) {
  struct Holder {
    TensorDataPtr tensor;
    std::shared_ptr<const char> bytes;
  };
  auto holder = std::make_shared<Holder>();
  holder->tensor = data;
  Sequence taker;
  {
    // A run counts the handles and says what it was given under one lock: it has counted this one,
    // or is seen here.
    SessionLock lock(this);
    CHORUS_RETURN_IF_ERROR(lock.status());
    // Like any tensor: what works does not depend on how large it is.
    CHORUS_RETURN_IF_ERROR(Name(data.get()));
    taker = data->given_to;
  }
  // A trainer that looks there would see what that run writes: whether the run has the memory must
  // be known.
  if (taker != Sequence()) {
    const absl::Status over = link_->WaitCommand(taker, wait_timeout_);
    if (IsNoOutcome(over)) return over;
  }
  // What has a name only now, of this call or of another thread; what such a run gives back, which
  // has lost its copy on the host.
  if (!data->inline_data.bytes.empty() || taker != Sequence()) {
    CHORUS_ASSIGN_OR_RETURN(on_device, Wait(data, wait_timeout_));
  }
  CHORUS_RETURN_IF_ERROR(MakeReadableIf(on_device, data->id, this));
  CHORUS_ASSIGN_OR_RETURN(
      holder->bytes, link_->MapTensor(data->id, data->producer, data->info->bytes, wait_timeout_));
  const char* const bytes = holder->bytes.get();
  return std::shared_ptr<const char>(holder, bytes);
}

// --- Ends ---------------------------------------------------------------------------------------

absl::Status SessionCore::Close() {
  {
    SessionLock lock(this);
    if (Forked()) return lock.status();
    if (closed_.exchange(true)) return absl::OkStatus();
    fragments_.Clear();
  }
  return link_->Close();
}

void SessionCore::Drain(bool all) {
  if (log_.has_no_room()) return;
  Releases::Batch batch = releases_.Take(all);
  if (closed_.load(std::memory_order_relaxed)) return;
  // What a fragment uses that is being sent goes later.
  for (const Fragment* fragment : sending_) {
    const auto keep = [&](auto* names, const auto& put_back) {
      const auto used = std::partition(names->begin(), names->end(), [fragment](const auto& name) {
        return !fragment->Uses(name);
      });
      std::for_each(used, names->end(), put_back);
      names->erase(used, names->end());
    };
    // How large they are has been forgotten: they go next time.
    keep(&batch.tensors,
         [this](TensorId id) { releases_.Add(id, std::numeric_limits<int32_t>::max()); });
    keep(&batch.arenas, [this](ArenaId arena) { releases_.Add(arena); });
  }
  SendLeft(&batch);
  if (log_.has_no_room()) releases_.PutBack(std::move(batch));
}

void SessionCore::SendLeft(Releases::Batch* left) {
  log_.SendKept().IgnoreError();
  if (log_.has_no_room()) return;
  while (!left->tapes.empty()) {
    const size_t count = std::min(DropTape::kMaxEntries, left->tapes.size());
    const auto end = left->tapes.begin() + static_cast<ptrdiff_t>(count);
    DropTape drop;
    drop.entries.assign(left->tapes.begin(), end);
    log_.Submit(std::move(drop)).status().IgnoreError();
    if (log_.has_no_room()) return;
    left->tapes.erase(left->tapes.begin(), end);
  }
  graphs_.ReleaseLeft();
  if (log_.has_no_room()) return;
  leaving_.insert(leaving_.end(), std::make_move_iterator(left->worlds.begin()),
                  std::make_move_iterator(left->worlds.end()));
  left->worlds.clear();
  if (!leaving_.empty()) Leave();
  // What no pending fragment uses goes first: that these are sent, below, may need its names.
  const auto unused = std::partition(left->tensors.begin(), left->tensors.end(),
                                     [this](TensorId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                                         session_lock) { return fragments_.Use(id); });
  std::vector<TensorId> first(unused, left->tensors.end());
  left->tensors.erase(unused, left->tensors.end());
  SendRelease(&log_, &first);
  left->tensors.insert(left->tensors.end(), first.begin(), first.end());
  if (log_.has_no_room() || (left->tensors.empty() && left->arenas.empty())) return;
  Flush();
  if (log_.has_no_room()) return;
  SendRelease(&log_, &left->tensors);
  if (log_.has_no_room()) return;
  staging_.Release(left->arenas);
  left->arenas.clear();
}

void SessionCore::Leave() {
  // A rank that leaves takes its runs with it that wait for others; in a world of one session's
  // they wait for its own, which have been sent before.
  for (GoneWorld& world : leaving_) {
    if (world.runs_before == Sequence()) world.runs_before = log_.next();
  }
  const Sequence oldest = log_.OldestUnderWay();
  const auto first_over = std::stable_partition(
      leaving_.begin(), leaving_.end(),
      [oldest](const GoneWorld& world) { return oldest < world.runs_before; });
  std::vector<GoneWorld> worlds(std::make_move_iterator(first_over),
                                std::make_move_iterator(leaving_.end()));
  leaving_.erase(first_over, leaving_.end());
  leaving_count_.store(leaving_.size(), std::memory_order_relaxed);
  for (const GoneWorld& world : worlds) {
    for (const Rank rank : world.ranks) link_->Leave(world.world, rank).IgnoreError();
  }
}

void SessionCore::LeaveWhatIsOver() {
  if (leaving_count_.load(std::memory_order_relaxed) == 0 || Forked()) return;
  SessionLock lock(this);
  if (lock.status().ok()) Leave();
}

SessionCore::Tables SessionCore::CountTables() {
  SessionLock lock(this);
  Tables tables;
  tables.types = interner_.types();
  tables.sources = interner_.sources();
  tables.members = members_.size();
  tables.worlds = leaving_.size();
  tables.graphs = log_.graphs().used();
  return tables;
}

}  // namespace internal
}  // namespace chorus
