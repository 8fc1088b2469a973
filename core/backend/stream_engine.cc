#include "core/backend/stream_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"
#include "core/base/utf8.h"

namespace chorus {

// One collective as its members' calls meet.
struct StreamEngine::Meeting {
  struct Part {
    StreamState* stream = nullptr;  // null: this member has not called
    bool reached = false;           // its stream stands at the call
    // Null: in no call so far that this was used for. Few of many members may take part.
    std::unique_ptr<CollectiveCall> call;
  };

  Group* group = nullptr;
  size_t index = 0;               // in its live ones
  CollectiveWork::Common common;  // of the first caller
  int32_t expected = 0;
  int32_t arrived = 0;
  int32_t reached = 0;
  int32_t passed = 0;
  bool started = false;
  absl::Status failure;
  std::vector<Part> parts;  // by member
  std::vector<CollectiveWork::Member> members;
  CollectiveWork work;
};

// The calls of one set of members: each member's i-th call meets the others' i-th.
struct StreamEngine::Channel {
  std::vector<int32_t> present;     // empty: all
  std::deque<Meeting*> incomplete;  // in order; somebody has still to call
  uint64_t first = 0;               // number of the first of them
  std::vector<uint64_t> next;       // by member: the number of its next call
};

struct StreamEngine::Group {
  uint64_t id = 0;
  std::vector<int> devices;
  std::vector<bool> open;
  int32_t num_open = 0;
  absl::Status broken;
  Channel all;
  std::vector<std::unique_ptr<Channel>> subsets;
  std::vector<std::unique_ptr<Meeting>> live;  // in any order

  int size() const { return static_cast<int>(devices.size()); }
};

// --- Items ---

StreamEngine::Item& StreamEngine::ItemQueue::Push() {
  if (blocks_.empty() || end_ == kBlock) {
    blocks_.push_back(spare_ != nullptr ? std::move(spare_) : std::make_unique<Block>());
    end_ = 0;
  }
  return (*blocks_.back())[end_++];
}

void StreamEngine::ItemQueue::Pop() {
  ++first_;
  if (blocks_.size() == 1 && first_ == end_) {
    first_ = end_ = 0;
  } else if (first_ == kBlock) {
    spare_ = std::move(blocks_.front());
    blocks_.pop_front();
    first_ = 0;
  }
}

// --- Streams and events ---

template <typename T>
void StreamEngine::Push(StreamState* stream, T item) {
  MutexLock lock(&mutex_);
  PushLocked(stream, std::move(item));
  Schedule();
}

template <typename T>
void StreamEngine::PushLocked(StreamState* stream, T item) {
  stream->items.Push() = std::move(item);
  ++stream->enqueued;
  if (stream->state == StreamState::State::kIdle) MakeReady(stream);
}

class StreamEngine::EngineEvent : public Event {
 public:
  // Guarded by the engine's mutex. Never recorded: passes at once.
  StreamState* stream = nullptr;
  uint64_t position = 0;
};

class StreamEngine::EngineStream : public Stream {
 public:
  EngineStream(StreamEngine* engine, StreamState* state) : engine_(engine), state_(state) {}
  ~EngineStream() override {
    MutexLock lock(&engine_->mutex_);
    state_->released = true;
    if (state_->state == StreamState::State::kIdle) engine_->Recycle(state_);
  }

  void Record(Event* event) override {
    MutexLock lock(&engine_->mutex_);
    auto* e = static_cast<EngineEvent*>(event);
    if (engine_->HandsOver()) {
      engine_->PushLocked(state_, RecordItem());
      engine_->Schedule();
    }
    e->stream = state_;
    e->position = state_->enqueued;
  }

  void Wait(const Event* event) override {
    MutexLock lock(&engine_->mutex_);
    const auto* e = static_cast<const EngineEvent*>(event);
    // Ordered by the stream itself, or ended.
    if (e->stream == nullptr || e->stream == state_) return;
    if (e->stream->completed >= e->position && !engine_->HandsOver()) return;
    engine_->PushLocked(state_, WaitItem{e->stream, e->position});
    engine_->Schedule();
  }

  void Launch(KernelCall call) override { engine_->Push(state_, std::move(call)); }

  void Copy(DeviceAddress to, DeviceAddress from, int64_t bytes) override {
    engine_->Push(state_, CopyItem{CopyItem::Direction::kOnDevice, to, from, bytes});
  }
  void CopyFromHost(DeviceAddress to, const void* from, int64_t bytes) override {
    engine_->Push(state_, CopyItem{CopyItem::Direction::kFromHost, to,
                                   reinterpret_cast<DeviceAddress>(from), bytes});
  }
  void CopyToHost(void* to, DeviceAddress from, int64_t bytes) override {
    engine_->Push(state_, CopyItem{CopyItem::Direction::kToHost,
                                   reinterpret_cast<DeviceAddress>(to), from, bytes});
  }
  void Callback(std::function<void(absl::Status)> done) override {
    engine_->Push(state_, CallbackItem{std::move(done), absl::OkStatus()});
  }

  StreamState* state() const { return state_; }

 private:
  StreamEngine* const engine_;
  StreamState* const state_ ABSL_PT_GUARDED_BY(engine_->mutex_);
};

StreamEngine::StreamEngine(const AddressSpace* space) : space_(space) {}

StreamEngine::~StreamEngine() = default;

std::unique_ptr<Stream> StreamEngine::CreateStream(int device) {
  MutexLock lock(&mutex_);
  if (free_streams_.empty()) {
    streams_.push_back(MakeState());
    streams_.back()->engine = this;
    free_streams_.push_back(streams_.back().get());
  }
  StreamState* state = free_streams_.back();
  free_streams_.pop_back();
  state->released = false;
  state->device = device;
  return std::make_unique<EngineStream>(this, state);
}

std::unique_ptr<Event> StreamEngine::CreateEvent() { return std::make_unique<EngineEvent>(); }

void StreamEngine::MakeReady(StreamState* stream) {
  stream->state = StreamState::State::kReady;
  ready_.push_back(stream);
}

void StreamEngine::Recycle(StreamState* stream) {
  stream->failure = absl::OkStatus();
  free_streams_.push_back(stream);
}

void StreamEngine::Requeue(StreamState* stream) {
  if (!stream->items.empty()) {
    MakeReady(stream);
    return;
  }
  stream->state = StreamState::State::kIdle;
  if (stream->released) Recycle(stream);
}

bool StreamEngine::AsksTheHost(const Item& item) {
  if (const auto* kernel = absl::get_if<KernelCall>(&item)) return kernel->unless != nullptr;
  const auto* collective = absl::get_if<CollectiveItem>(&item);
  return collective != nullptr &&
         collective->meeting->parts[collective->member].call->veto != nullptr;
}

bool StreamEngine::Begin(StreamState* stream, Item* work) {
  while (!stream->items.empty()) {
    Item& head = stream->items.front();
    if (const auto* wait = absl::get_if<WaitItem>(&head)) {
      if (wait->on->completed < wait->position) {
        // The item stays: it is looked at once more when the stream is made ready again.
        stream->state = StreamState::State::kBlocked;
        wait->on->waiters.push_back({stream, wait->position});
        BreakCircleThrough(stream);
        return false;
      }
      PassWait(stream, *wait);
      stream->items.Pop();
      Advance(stream, absl::OkStatus());
      continue;
    }
    if (AsksTheHost(head) && !HostHasPassed(stream)) {
      stream->state = StreamState::State::kBlocked;
      return false;
    }
    if (const auto* kernel = absl::get_if<KernelCall>(&head)) {
      const auto is_set = [](const std::atomic<bool>* flag) {
        return flag != nullptr && flag->load(std::memory_order_acquire);
      };
      if (is_set(kernel->unless) || is_set(kernel->unwanted)) {
        stream->items.Pop();
        Advance(stream, absl::OkStatus());
        continue;
      }
    }
    if (const auto* collective = absl::get_if<CollectiveItem>(&head)) {
      Meeting* meeting = collective->meeting;
      Meeting::Part& part = meeting->parts[collective->member];
      if (part.call->veto != nullptr && meeting->failure.ok()) {
        const absl::Status veto = part.call->veto->status();
        if (!veto.ok()) Break(meeting->group, veto);  // this meeting with the others
      }
      if (!meeting->failure.ok()) {
        stream->items.Pop();
        Advance(stream, meeting->failure);
        Pass(meeting);
        continue;
      }
      part.reached = true;
      if (++meeting->reached < meeting->expected) {
        stream->items.Pop();
        stream->state = StreamState::State::kBlocked;
        stream->at = meeting;
        BreakCircleThrough(stream);
        return false;
      }
      meeting->started = true;
    } else if (auto* callback = absl::get_if<CallbackItem>(&head)) {
      callback->status = std::move(stream->failure);
      stream->failure = absl::OkStatus();
    }
    *work = std::move(head);
    stream->items.Pop();
    return true;
  }
  Requeue(stream);
  return false;
}

void StreamEngine::Advance(StreamState* stream, const absl::Status& status) {
  ++stream->completed;
  if (!status.ok() && stream->failure.ok()) stream->failure = Detached(status);
  if (stream->waiters.empty()) return;
  auto& waiters = stream->waiters;
  size_t kept = 0;
  for (const StreamState::Waiter& waiter : waiters) {
    if (stream->completed >= waiter.position) {
      MakeReady(waiter.stream);
    } else {
      waiters[kept++] = waiter;
    }
  }
  waiters.resize(kept);
}

// --- Kernels ---

absl::Status StreamEngine::KernelFailure(const absl::Status& status, absl::string_view op,
                                         absl::string_view source, bool may_fail) {
  Error error = ErrorOf(status);
  if (!may_fail) {
    error = ErrorOf(MakeError(
        Reason::kInternal,
        absl::StrCat(op, ": no kernel of this op may fail, this one did: ", error.message)));
    error.op = std::string(op);
  } else if (source.empty()) {
    return status;
  }
  if (!source.empty()) {
    error.source = OneLine(source);
    absl::StrAppend(&error.message, " (", error.source, ")");
  }
  return ToStatus(error);
}

// --- Communicators ---

absl::Status CheckDevices(const Backend& backend, uint64_t id, absl::Span<const int> devices) {
  for (const int device : devices) {
    if (device >= 0 && device < backend.device_count()) continue;
    return BadType(absl::StrCat("communicator ", id, ": no device ", backend.name(), ":", device,
                                " among ", backend.device_count()));
  }
  return absl::OkStatus();
}

class StreamEngine::EngineCommunicator : public Communicator {
 public:
  EngineCommunicator(StreamEngine* engine, Group* group, int member)
      : engine_(engine), group_(group), member_(member) {}
  ~EngineCommunicator() override { engine_->CloseMember(group_, member_); }

  absl::Status Enqueue(const CollectiveCall& call, Stream* stream) override {
    CHORUS_RETURN_IF_ERROR(CheckCall(call, group_->size(), member_));
    return engine_->EnqueueCall(group_, member_, call, static_cast<EngineStream*>(stream)->state());
  }

  void Abort(absl::Status why) override {
    MutexLock lock(&engine_->mutex_);
    engine_->Break(group_, why);
    engine_->ScheduleElsewhere();
  }

 private:
  StreamEngine* const engine_;
  Group* const group_;  // its devices never change
  const int member_;
};

absl::StatusOr<std::unique_ptr<Communicator>> StreamEngine::OpenCommunicator(
    uint64_t id, absl::Span<const int> devices, int member) {
  const int size = static_cast<int>(devices.size());
  if (member < 0 || member >= size) {
    return BadType(absl::StrCat("communicator ", id, ": member ", member, " of ", size));
  }
  MutexLock lock(&mutex_);
  std::unique_ptr<Group>& slot = groups_[id];
  if (slot == nullptr) {
    slot = std::make_unique<Group>();
    slot->id = id;
    slot->devices.assign(devices.begin(), devices.end());
    slot->open.assign(size, false);
    slot->all.next.assign(size, 0);
  } else if (slot->devices != std::vector<int>(devices.begin(), devices.end())) {
    return BadType(absl::StrCat("communicator ", id, " is of devices [",
                                absl::StrJoin(slot->devices, ","), "], member ", member,
                                " opens it for [", absl::StrJoin(devices, ","), "]"));
  } else if (slot->open[member]) {
    return BadType(absl::StrCat("communicator ", id, ": member ", member, " is open already"));
  }
  slot->open[member] = true;
  ++slot->num_open;
  return std::unique_ptr<Communicator>(
      std::make_unique<EngineCommunicator>(this, slot.get(), member));
}

namespace {

// The members that take part, when they are not all.
std::vector<int32_t> Participants(const CollectiveCall& call, int size, int member) {
  std::vector<int32_t> present = call.present;
  if (HasPeer(call.kind)) {
    const bool peer =
        present.empty() || std::find(present.begin(), present.end(), call.root) != present.end();
    present = {member};
    if (peer) present.push_back(call.root);
    std::sort(present.begin(), present.end());
  }
  if (static_cast<int>(present.size()) == size) present.clear();
  return present;
}

// Into the memory of the call before it. Most lists are empty, and stay so.
template <typename T>
void CopyList(const std::vector<T>& from, std::vector<T>* to) {
  if (!from.empty() || !to->empty()) to->assign(from.begin(), from.end());
}
// All but which members are present: the meeting is theirs.
void CopyCall(const CollectiveCall& from, CollectiveCall* to) {
  to->kind = from.kind;
  to->reduction = from.reduction;
  to->dtype = from.dtype;
  to->root = from.root;
  to->count = from.count;
  to->factor = from.factor;
  to->runtime = from.runtime;
  to->veto = from.veto;
  CopyList(from.input_counts, &to->input_counts);
  CopyList(from.output_counts, &to->output_counts);
  CopyList(from.inputs, &to->inputs);
  CopyList(from.outputs, &to->outputs);
  CopyList(from.holders, &to->holders);
  CopyList(from.factors, &to->factors);
}

std::string Describe(const CollectiveWork::Common& call) {
  return absl::StrCat("{", CollectiveKindName(call.kind), " ", ReductionName(call.reduction), " ",
                      DTypeName(call.dtype), ", root ", call.root,
                      call.runtime ? ", runtime counts}" : "}");
}

}  // namespace

StreamEngine::Meeting* StreamEngine::Join(Group* group, int member, const CollectiveCall& call) {
  Channel* channel = &group->all;
  std::vector<int32_t> present;
  if (!call.present.empty() || HasPeer(call.kind)) {
    present = Participants(call, group->size(), member);
    if (!present.empty()) {
      const auto subset = std::find_if(group->subsets.begin(), group->subsets.end(),
                                       [&](const auto& c) { return c->present == present; });
      if (subset != group->subsets.end()) {
        channel = subset->get();
      } else {
        group->subsets.push_back(std::make_unique<Channel>());
        channel = group->subsets.back().get();
        channel->present = present;
        channel->next.assign(group->size(), 0);
      }
    }
  }

  const uint64_t index = channel->next[member]++ - channel->first;
  if (index == channel->incomplete.size()) {
    if (free_meetings_.empty()) free_meetings_.push_back(std::make_unique<Meeting>());
    Meeting* const fresh = free_meetings_.back().get();
    fresh->group = group;
    fresh->index = group->live.size();
    group->live.push_back(std::move(free_meetings_.back()));
    free_meetings_.pop_back();
    fresh->parts.resize(group->size());
    fresh->common = CollectiveWork::Common::Of(call, member);
    fresh->expected = present.empty() ? group->size() : static_cast<int32_t>(present.size());
    fresh->arrived = fresh->reached = fresh->passed = 0;
    fresh->started = false;
    fresh->failure = absl::OkStatus();
    for (Meeting::Part& part : fresh->parts) {
      part.stream = nullptr;
      part.reached = false;
    }
    channel->incomplete.push_back(fresh);
  }
  Meeting* meeting = channel->incomplete[index];
  Meeting::Part& part = meeting->parts[member];
  if (part.call == nullptr) part.call = std::make_unique<CollectiveCall>();
  CopyCall(call, part.call.get());
  // Members call in the same order, so the first meeting is complete first.
  if (++meeting->arrived == meeting->expected) {
    channel->incomplete.pop_front();
    ++channel->first;
    if (channel != &group->all && channel->incomplete.empty()) {
      group->subsets.erase(std::find_if(group->subsets.begin(), group->subsets.end(),
                                        [channel](const auto& c) { return c.get() == channel; }));
    }
  }
  return meeting;
}

absl::Status StreamEngine::EnqueueCall(Group* group, int member, const CollectiveCall& call,
                                       StreamState* stream) {
  MutexLock lock(&mutex_);
  if (!group->broken.ok()) return Detached(group->broken);
  Meeting* meeting = Join(group, member, call);
  meeting->parts[member].stream = stream;
  const CollectiveWork::Common common = CollectiveWork::Common::Of(call, member);
  PushLocked(stream, CollectiveItem{meeting, member});
  if (common != meeting->common) {
    Break(group, MakeError(Reason::kInternal,
                           absl::StrCat("communicator ", group->id, ": member ", member, " calls ",
                                        Describe(common), " where others call ",
                                        Describe(meeting->common))));
  } else if (meeting->reached > 0 && stream->state == StreamState::State::kBlocked) {
    BreakCircleThrough(stream);
  }
  Schedule();
  return absl::OkStatus();
}

void StreamEngine::ListMembers(Meeting* meeting) {
  const size_t size = meeting->parts.size();
  meeting->members.resize(size);
  for (size_t m = 0; m < size; ++m) {
    const Meeting::Part& part = meeting->parts[m];
    meeting->members[m] = {meeting->group->devices[m],
                           part.stream != nullptr ? part.call.get() : nullptr};
  }
}

absl::Status StreamEngine::PrepareMeeting(Meeting* meeting) {
  ListMembers(meeting);
  return meeting->work.Prepare(meeting->common, meeting->members, space_);
}

CollectiveWork& StreamEngine::WorkOf(Meeting* meeting) { return meeting->work; }

std::vector<std::pair<DeviceAddress, int64_t>> StreamEngine::NumbersOf(Meeting* meeting) {
  ListMembers(meeting);
  return CollectiveWork::NumbersOf(meeting->common, meeting->members);
}

void StreamEngine::StreamsOf(const Meeting& meeting, std::vector<StreamState*>* streams) {
  streams->clear();
  for (const Meeting::Part& part : meeting.parts) {
    if (part.stream != nullptr) streams->push_back(part.stream);
  }
}

void StreamEngine::FinishMeeting(Meeting* meeting, const absl::Status& status) {
  // A failed call breaks the communicator, for the members' data no longer agree.
  if (!status.ok()) Break(meeting->group, status);
  // The last Pass may free the meeting.
  int32_t left = meeting->expected;
  for (size_t m = 0; left > 0; ++m) {
    StreamState* stream = meeting->parts[m].stream;
    if (stream == nullptr) continue;
    --left;
    stream->at = nullptr;
    Advance(stream, status);
    Requeue(stream);
    Pass(meeting);
  }
}

void StreamEngine::Pass(Meeting* meeting) {
  // A failed meeting ends with the members that had called: nobody else can any more.
  if (++meeting->passed < meeting->arrived) return;
  Group* group = meeting->group;
  std::unique_ptr<Meeting>& slot = group->live[meeting->index];
  if (free_meetings_.size() < kKeptMeetings) free_meetings_.push_back(std::move(slot));
  if (&slot != &group->live.back()) {
    group->live.back()->index = meeting->index;
    slot = std::move(group->live.back());
  }
  group->live.pop_back();
  RetireIfUnused(group);
}

void StreamEngine::FailMeeting(Meeting* meeting, const absl::Status& why) {
  meeting->failure = why;
  // Streams that stand at the call go on, the others find the failure when they come to it. The
  // last Pass frees the meeting.
  int32_t left = meeting->reached;
  for (size_t m = 0; left > 0 && m < meeting->parts.size(); ++m) {
    Meeting::Part& part = meeting->parts[m];
    if (!part.reached) continue;
    part.reached = false;
    --left;
    part.stream->at = nullptr;
    Advance(part.stream, why);
    Requeue(part.stream);
    Pass(meeting);
  }
}

void StreamEngine::Break(Group* group, const absl::Status& why) {
  if (!group->broken.ok()) return;
  group->broken =
      why.ok() ? MakeError(Reason::kAborted, "the communicator was aborted") : Detached(why);
  group->all.incomplete.clear();
  group->subsets.clear();
  std::vector<Meeting*> waiting;  // failing them changes the list
  for (const auto& meeting : group->live) {
    if (!meeting->started) waiting.push_back(meeting.get());
  }
  const absl::Status cause = group->broken;  // and may free the group
  for (Meeting* meeting : waiting) FailMeeting(meeting, cause);
}

StreamEngine::StreamState* StreamEngine::NextAwaited(StreamState* blocked, size_t* next) {
  if (blocked->at == nullptr) {
    // One that the host or a device keeps may have a wait in front that is over, or nothing.
    if (blocked->items.empty()) return nullptr;
    const auto* const wait = absl::get_if<WaitItem>(&blocked->items.front());
    const bool waits = wait != nullptr && wait->on->completed < wait->position;
    return waits && (*next)++ == 0 ? wait->on : nullptr;
  }
  const std::vector<Meeting::Part>& parts = blocked->at->parts;
  while (*next < parts.size()) {
    const Meeting::Part& part = parts[(*next)++];
    if (part.stream != nullptr && !part.reached) return part.stream;
  }
  return nullptr;
}

void StreamEngine::BreakCircleThrough(StreamState* blocked) {
  ++last_search_;
  path_.assign(1, {blocked, 0});
  while (!path_.empty()) {
    StreamState* const next = NextAwaited(path_.back().stream, &path_.back().next);
    if (next == nullptr) {
      path_.pop_back();
    } else if (next == blocked) {
      break;
    } else if (next->state == StreamState::State::kBlocked && next->search != last_search_) {
      next->search = last_search_;
      path_.push_back({next, 0});
    }
  }
  if (path_.empty()) return;
  std::vector<std::string> waits;
  std::vector<Group*> groups;
  for (const SearchStep& step : path_) {
    const Meeting* const meeting = step.stream->at;
    if (meeting == nullptr) continue;
    waits.push_back(absl::StrCat("device ", step.stream->device, " in ", Describe(meeting->common),
                                 " of communicator ", meeting->group->id));
    if (std::find(groups.begin(), groups.end(), meeting->group) == groups.end()) {
      groups.push_back(meeting->group);
    }
  }
  const absl::Status why =
      MakeError(Reason::kInternal,
                absl::StrCat("members call in different orders and would wait for each other for "
                             "ever: ",
                             absl::StrJoin(waits, ", ")));
  for (Group* group : groups) Break(group, why);
}

void StreamEngine::CloseMember(Group* group, int member) {
  MutexLock lock(&mutex_);
  group->open[member] = false;
  const bool last = --group->num_open == 0;
  if (group->broken.ok()) {
    group->broken = MakeError(Reason::kAborted, absl::StrCat("communicator ", group->id,
                                                             ": member ", member, " was closed"));
    // Calls that all members have made still run. The others can never be complete.
    std::vector<Meeting*> incomplete(group->all.incomplete.begin(), group->all.incomplete.end());
    for (const auto& channel : group->subsets) {
      incomplete.insert(incomplete.end(), channel->incomplete.begin(), channel->incomplete.end());
    }
    group->all.incomplete.clear();
    group->subsets.clear();
    const absl::Status why = group->broken;
    ++group->num_open;  // keeps the group while its meetings end
    for (Meeting* meeting : incomplete) FailMeeting(meeting, why);
    --group->num_open;
  }
  if (last) {
    const auto it = groups_.find(group->id);
    retired_.push_back(std::move(it->second));
    groups_.erase(it);
    RetireIfUnused(group);
  }
  ScheduleElsewhere();
}

void StreamEngine::RetireIfUnused(Group* group) {
  if (group->num_open > 0 || !group->live.empty()) return;
  const auto it = std::find_if(retired_.begin(), retired_.end(),
                               [group](const auto& g) { return g.get() == group; });
  if (it != retired_.end()) retired_.erase(it);
}

}  // namespace chorus
