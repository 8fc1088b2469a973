#include "core/runtime/lane.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/work.h"

namespace chorus {
namespace {

absl::Status EnqueueIn(const DeviceNames::OpenedCommunicator& communicator,
                       const CollectiveCall& call, Stream* stream) {
  CHORUS_RETURN_IF_ERROR(communicator.status());
  return (*communicator)->Enqueue(call, stream);
}

}  // namespace

Lane::Lane(Device* device, DeviceNames* names, const DeviceExecutorOptions* options, const Say* say)
    : device_(device), names_(names), options_(options), say_(say) {
  for (int s = 0; s < kStreams; ++s) {
    streams_[s] = device_->CreateStream();
    crossing_[s] = device_->CreateEvent();
  }
}

Lane::~Lane() {
  while (HasMore()) Continue();
  // A stream's callbacks run in order: behind these nothing of ours is left.
  Mutex mutex;
  CondVar changed;
  int left = kStreams;
  for (auto& stream : streams_) {
    stream->Callback([&](const absl::Status&) {
      MutexLock lock(&mutex);
      --left;
      changed.Signal();
    });
  }
  {
    MutexLock lock(&mutex);
    while (left > 0) changed.Wait(&mutex);
  }
  for (auto& stream : streams_) stream.reset();
}

void Lane::Launch(absl::string_view bytes) {
  slice_ = options_->slice_steps;
  // One of many collectives takes long to decode, and a gang's are launched all at once.
  constexpr size_t kBytesAtOnce = 8192;
  if (HasMore() || bytes.size() > kBytesAtOnce) {
    behind_.push_back([this, copy = std::string(bytes)] { BeginLaunch(copy); });
  } else {
    BeginLaunch(bytes);
  }
}

void Lane::Continue() {
  slice_ = options_->slice_steps;
  if (launching_) EnqueueSlice();
  while (!launching_ && !behind_.empty() && slice_ > 0) {
    const std::function<void()> next = std::move(behind_.front());
    behind_.pop_front();
    next();
    --slice_;
  }
  if (!HasMore()) unwanted_.clear();
}

void Lane::Behind(std::function<void()> call) {
  if (!HasMore()) return call();
  behind_.push_back(std::move(call));
}

bool Lane::Abandon(LaunchId launch) {
  const auto row =
      std::lower_bound(endings_.begin(), endings_.end(), launch,
                       [](const auto& ending, LaunchId other) { return ending.first < other; });
  if (row == endings_.end() || row->first != launch) {
    if (HasMore()) unwanted_.insert(launch);
    return false;
  }
  if (const std::shared_ptr<Ending> ending = row->second.lock()) ending->unwanted = true;
  return true;
}

void Lane::Upload(TransferId id, DeviceAddress to, const void* from, int64_t bytes) {
  Begin();
  uploaded_ = ++enqueued_.end[kCopy];
  streams_[kCopy]->CopyFromHost(to, from, bytes);
  EndTransfer(id, /*is_upload=*/true);
}

void Lane::Download(TransferId id, void* to, DeviceAddress from, int64_t bytes, LaunchId after) {
  Behind([=] {
    if (after != LaunchId()) Order(kCopy, NeededBy({after}));
    Begin();
    ++enqueued_.end[kCopy];
    streams_[kCopy]->CopyToHost(to, from, bytes);
    EndTransfer(id, /*is_upload=*/false);
  });
}

// --- Launching ---

void Lane::BeginLaunch(absl::string_view bytes) {
  if (!DecodeLaunchInto(bytes, &message_)) {
    names_->launch_failures()->Note(message_.launch);
    Complete(message_.launch,
             Malformed(absl::StrCat("a launch of ", bytes.size(), " bytes does not decode")),
             /*held_back=*/true);
    return;
  }
  DeviceProgram* plan = nullptr;
  if (absl::Status status = Bind(&plan); !status.ok()) {
    names_->launch_failures()->Note(message_.launch);
    // Nothing of it is enqueued: others would wait for its calls.
    for (const LaunchMessage::CollectiveBinding& binding : message_.collectives) {
      names_->AbortCommunicator(binding.communicator, Detached(status));
    }
    names_->AbortCommunicator(message_.commit, Detached(status));
    Complete(message_.launch, status, /*held_back=*/true);
    return;
  }
  UnderWay& launch = launch_;
  launch.plan = plan;
  launch.next = 0;
  launch.commits = message_.commit != CommunicatorId();
  launch.failure = Failure();
  launch.ending = nullptr;
  // What is one kernel ends with it, once it has begun.
  const bool is_unwanted = unwanted_.erase(message_.launch) > 0;
  if (plan->kernels.size() > 1 || is_unwanted) {
    launch.ending = std::make_shared<Ending>();
    launch.ending->unwanted = is_unwanted;
    while (!endings_.empty() && endings_.front().second.expired()) endings_.pop_front();
    endings_.emplace_back(message_.launch, launch.ending);
  }
  for (int s = 0; s < kPlanStreams; ++s) launch.uses[s] = plan->uses[s] || launch.commits;
  launch.uses[kCompute] |= !message_.inlines.empty();
  const Position needed = NeededBy(message_.after);
  // Collectives fail where peers do.
  launch.reads_what_may_fail = needed.may_fail || !message_.uploads.empty();
  launch.may_fail = plan->kernels_may_fail || plan->uses[kCommunication] || launch.commits ||
                    launch.reads_what_may_fail;
  if (plan->steps.empty() && !launch.commits && message_.inlines.empty()) {
    // Its results are its inputs: complete when they are.
    if (AllDone()) {
      const absl::Status result = FailureOf(names_->launch_failures()->Await(message_.after),
                                            names_->upload_failures()->Await(message_.uploads));
      if (!result.ok()) names_->launch_failures()->Note(message_.launch);
      Note(launch.may_fail);
      Complete(message_.launch, result);
      return;
    }
    launch.uses[kCompute] = true;
  }
  for (int s = 0; s < kPlanStreams; ++s) {
    if (launch.uses[s]) Order(s, needed);
  }
  Begin();
  launching_ = true;
  BringInlines();
  EnqueueSlice();
}

// Finds what the message names, before anything is enqueued.
absl::Status Lane::Bind(DeviceProgram** plan) {
  if (options_->prepare != nullptr) CHORUS_RETURN_IF_ERROR(options_->prepare(&message_));
  *plan = names_->FindPlan(message_.plan);
  if (*plan == nullptr) return UnknownName(absl::StrCat("plan ", message_.plan.value()));
  if (message_.buffers.size() != (*plan)->num_buffers ||
      message_.collectives.size() != (*plan)->num_bindings) {
    return Malformed(absl::StrCat("a launch of plan ", message_.plan.value(), " brings ",
                                  message_.buffers.size(), " buffers and ",
                                  message_.collectives.size(), " communicators, expected ",
                                  (*plan)->num_buffers, " and ", (*plan)->num_bindings));
  }
  for (const LaunchMessage::Inline& in_line : message_.inlines) {
    if (in_line.buffer >= 0 && static_cast<size_t>(in_line.buffer) < (*plan)->num_buffers) {
      continue;
    }
    return Malformed(absl::StrCat("a launch of plan ", message_.plan.value(),
                                  " brings bytes for buffer ", in_line.buffer, " of ",
                                  (*plan)->num_buffers));
  }
  bound_.clear();
  left_out_.assign((*plan)->num_equal_groups, false);
  for (const int32_t group : message_.left_out) {
    if (group < 0 || static_cast<size_t>(group) >= left_out_.size()) {
      return Malformed(absl::StrCat("a launch of plan ", message_.plan.value(),
                                    " leaves out group ", group, " of ", left_out_.size()));
    }
    left_out_[static_cast<size_t>(group)] = true;
  }
  for (const LaunchMessage::CollectiveBinding& binding : message_.collectives) {
    if (binding.communicator == CommunicatorId()) {
      bound_.push_back(nullptr);
      continue;
    }
    CHORUS_ASSIGN_OR_RETURN(const DeviceNames::OpenedCommunicator* const bound,
                            names_->FindCommunicator(binding.communicator));
    bound_.push_back(bound);
  }
  commit_ = nullptr;
  if (message_.commit != CommunicatorId()) {
    CHORUS_ASSIGN_OR_RETURN(commit_, names_->FindCommunicator(message_.commit));
  }
  return absl::OkStatus();
}

void Lane::EnqueueSlice() {
  UnderWay& launch = launch_;
  DeviceProgram* const plan = launch.plan;
  constexpr size_t kOperandsOfStep = 8;  // so many more take as long as a step more
  for (; launch.next < plan->steps.size() && slice_ > 0; ++launch.next) {
    DeviceProgram::LoadedStep& step = plan->steps[launch.next];
    const auto pieces =
        static_cast<int64_t>(1 + (step.inputs.size() + step.outputs.size()) / kOperandsOfStep);
    CountWork(pieces);
    slice_ -= pieces;
    // Devices that commit together do so at one point among their collectives: where the first of
    // them may have to hold back, and before the barrier behind equal work, which is the last
    // step.
    const bool commits_here =
        step.held_back || (plan->num_equal_groups > 0 && &step == &plan->steps.back());
    if (launch.guard == nullptr && ((message_.hold_back && step.held_back && launch.may_fail) ||
                                    (launch.commits && commits_here))) {
      launch.guard = MakeGuard(launch.uses, launch.failure);
    }
    Enqueue(&step, launch.guard.get(), &launch.failure);
  }
  if (launch.next < plan->steps.size()) return;
  if (launch.commits && launch.guard == nullptr) {
    launch.guard = MakeGuard(launch.uses, launch.failure);
  }
  for (int s = 0; s < kPlanStreams; ++s) enqueued_.end[s] += launch.uses[s];
  Note(launch.may_fail);
  launching_ = false;
  Finish(&launch);
}

// Both streams find the bytes in their place.
void Lane::BringInlines() {
  if (message_.inlines.empty()) return;
  launch_.inlines = std::make_shared<Inlines>(message_.inlines);
  for (const LaunchMessage::Inline& in_line : *launch_.inlines) {
    streams_[kCompute]->CopyFromHost(message_.buffers[static_cast<size_t>(in_line.buffer)],
                                     in_line.bytes.data(),
                                     static_cast<int64_t>(in_line.bytes.size()));
  }
  if (!launch_.uses[kCommunication]) return;
  streams_[kCompute]->Record(crossing_[kCompute].get());
  streams_[kCommunication]->Wait(crossing_[kCompute].get());
}

// What follows on the compute stream waits for all of the launch so far, collectives too, and
// learns whether any of it has failed, here, in a launch whose results it reads or on a device
// that launches together with this one.
std::shared_ptr<Lane::Guard> Lane::MakeGuard(const bool (&uses)[kPlanStreams],
                                             const Failure& enqueued) {
  auto guard = std::make_shared<Guard>();
  guard->Add(enqueued.status, enqueued.is_origin);
  const auto add = [guard](const absl::Status& result) { guard->Add(result); };
  if (uses[kCommunication]) {
    streams_[kCommunication]->Callback(add);
    streams_[kCommunication]->Record(crossing_[kCommunication].get());
    streams_[kCompute]->Wait(crossing_[kCommunication].get());
  }
  streams_[kCompute]->Callback(
      [this, guard, after = names_->launch_failures()->Await(message_.after),
       uploads = names_->upload_failures()->Await(message_.uploads)](const absl::Status& result) {
        guard->Add(result, /*is_own=*/true);
        guard->Add(FailureOf(after, uploads));
      });
  if (commit_ == nullptr) return guard;
  streams_[kCompute]->Record(crossing_[kCompute].get());
  streams_[kCommunication]->Wait(crossing_[kCompute].get());
  CollectiveCall all;
  all.kind = CollectiveKind::kBarrier;
  all.veto = guard.get();
  guard->Add(EnqueueIn(*commit_, all, streams_[kCommunication].get()), /*is_own=*/!commit_->ok());
  streams_[kCommunication]->Callback(add);
  streams_[kCommunication]->Record(crossing_[kCommunication].get());
  streams_[kCompute]->Wait(crossing_[kCommunication].get());
  return guard;
}

void Lane::Enqueue(DeviceProgram::LoadedStep* step, const Guard* guard, Failure* failure) {
  Stream* const stream = streams_[static_cast<size_t>(step->stream)].get();
  if (step->wait >= 0) stream->Wait(EventAt(step->wait));
  if (step->equal_group >= 0 && left_out_[static_cast<size_t>(step->equal_group)]) {
    // Another device does it.
  } else if (step->kernel != nullptr) {
    KernelCall call;
    call.kernel = step->kernel;
    if (guard != nullptr && step->held_back) call.unless = &guard->failed;
    if (launch_.ending != nullptr) call.unwanted = &launch_.ending->unwanted;
    for (const DevicePlan::Location& location : step->inputs)
      call.inputs.push_back(AddressOf(location));
    for (const DevicePlan::Location& location : step->outputs)
      call.outputs.push_back(AddressOf(location));
    call.workspace = AddressOf(step->workspace);
    stream->Launch(std::move(call));
  } else {
    EnqueueCollective(step, stream, failure);
  }
  if (step->record >= 0) stream->Record(EventAt(step->record));
}

void Lane::EnqueueCollective(DeviceProgram::LoadedStep* step, Stream* stream, Failure* failure) {
  const size_t binding = step->collective->binding;
  const CollectiveCall& call =
      DeviceProgram::FillCall(step, message_.buffers, message_.collectives[binding]);
  const DeviceNames::OpenedCommunicator* const bound = bound_[binding];
  if (bound != nullptr) {
    const absl::Status enqueued = EnqueueIn(*bound, call, stream);
    // Others have made theirs, or will, and would wait for this one.
    if (!enqueued.ok() && bound->ok()) (**bound)->Abort(Detached(enqueued));
    failure->Add(enqueued, /*is_own=*/!bound->ok());
  } else if (!OnlyOrders(call.kind)) {
    failure->Add(Malformed("a launch binds no communicator to a collective"), /*is_own=*/false);
  }
}

// Made when a plan uses so many for the first time.
Event* Lane::EventAt(int32_t index) {
  while (events_.size() <= static_cast<size_t>(index)) events_.push_back(device_->CreateEvent());
  return events_[static_cast<size_t>(index)].get();
}

// --- Order between launches ---

// How far each stream must have come before a launch after `launches` may begin.
Lane::Position Lane::NeededBy(absl::Span<const LaunchId> launches) const {
  Position needed;
  needed.end[kCopy] = uploaded_;
  for (const LaunchId id : launches) {
    Position at = enqueued_;  // of a launch that is not in the list: all that there is
    const size_t count = std::min<size_t>(positions_count_, kPositions);
    if (count > 0) {
      // Ascending, newest last; most often it is the newest.
      const auto position = [&](size_t i) -> const Position& {
        return positions_[(positions_count_ - count + i) % kPositions];
      };
      size_t low = 0;
      size_t high = count;
      if (position(count - 1).launch == id) low = high = count - 1;
      while (low < high) {
        const size_t middle = (low + high) / 2;
        if (position(middle).launch < id) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      // A launch that has been forgotten ended before the oldest that is kept.
      if (low < count && (position(low).launch == id || low == 0)) at = position(low);
    }
    for (int s = 0; s < kStreams; ++s) needed.end[s] = std::max(needed.end[s], at.end[s]);
    needed.may_fail |= at.may_fail || at.launch != id;
  }
  return needed;
}

// Makes what follows on `stream` wait for what `needed` says of the others.
void Lane::Order(int stream, const Position& needed) {
  for (int other = 0; other < kStreams; ++other) {
    if (other == stream) continue;
    int64_t& end = waited_end_[stream][other];
    if (needed.end[other] <= end) continue;
    end = enqueued_.end[other];
    if (AllDone()) continue;
    streams_[other]->Record(crossing_[other].get());
    streams_[stream]->Wait(crossing_[other].get());
  }
}

void Lane::Note(bool may_fail) {
  Position& position = positions_[positions_count_++ % kPositions];
  position = enqueued_;
  position.launch = message_.launch;
  position.may_fail = may_fail;
}

// --- The end of launches ---

// Asked once for each launch that reads these, behind them: by its guard, or else by its end.
absl::Status Lane::FailureOf(absl::Span<const LaunchId> launches,
                             absl::Span<const TransferId> uploads) {
  absl::Status status;
  for (const LaunchId launch : launches) {
    if (!names_->launch_failures()->Ask(launch)) continue;
    status.Update(
        MakeError(Reason::kExecFailed,
                  absl::StrCat("launch ", launch.value(), ", whose results it reads, has failed")));
  }
  for (const TransferId upload : uploads) {
    if (!names_->upload_failures()->Ask(upload)) continue;
    status.Update(
        MakeError(Reason::kExecFailed,
                  absl::StrCat("upload ", upload.value(), ", whose bytes it reads, has failed")));
  }
  return status;
}

void Lane::EndTransfer(TransferId id, bool is_upload) {
  streams_[kCopy]->Callback([this, id, is_upload](absl::Status status) {
    if (is_upload && !status.ok()) names_->upload_failures()->Note(id);
    End();
    (*say_)(TransferredMessage{id, std::move(status)});
  });
}

// Takes from `done` what its ends keep.
void Lane::Finish(UnderWay* done) {
  const LaunchId launch = message_.launch;
  const bool(&uses)[kPlanStreams] = done->uses;
  if (uses[kCompute] != uses[kCommunication] && done->failure.status.ok() &&
      done->guard == nullptr && done->ending == nullptr && done->inlines == nullptr &&
      !done->reads_what_may_fail) {
    // Two words, so that std::function needs no memory for them.
    const uint64_t tagged = launch.value() << 1 | static_cast<uint64_t>(uses[kCompute]);
    streams_[uses[kCompute] ? kCompute : kCommunication]->Callback(
        [this, tagged](const absl::Status& result) {
          const LaunchId ended(tagged >> 1);
          if (!result.ok()) names_->launch_failures()->Note(ended);
          End();
          Complete(ended, result, /*held_back=*/false, /*is_origin=*/(tagged & 1) != 0);
        });
    return;
  }
  const std::shared_ptr<Guard> guard = std::move(done->guard);
  std::shared_ptr<Ending> ending = std::move(done->ending);
  if (ending == nullptr) ending = std::make_shared<Ending>();
  ending->left = uses[kCompute] + uses[kCommunication];
  ending->inlines = std::move(done->inlines);
  if (guard == nullptr && done->reads_what_may_fail) {
    ending->after = names_->launch_failures()->Await(message_.after);
    ending->uploads = names_->upload_failures()->Await(message_.uploads);
  }
  {
    MutexLock lock(&ending->mutex);
    ending->failure.Add(done->failure.status, done->failure.is_origin);
  }
  for (int s = 0; s < kPlanStreams; ++s) {
    if (!uses[s]) continue;
    const bool is_own = s == kCompute;
    streams_[s]->Callback([this, ending, guard, launch, is_own](const absl::Status& result) {
      Failure all;
      {
        MutexLock lock(&ending->mutex);
        ending->failure.Add(result, is_own);
        if (ending->left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        if (ending->unwanted) {
          ending->failure.Add(MakeError(Reason::kCancelled,
                                        absl::StrCat("launch ", launch.value(), " was abandoned")),
                              /*is_own=*/false);
        }
        all = ending->failure;
      }
      all.Add(FailureOf(ending->after, ending->uploads), /*is_own=*/false);
      const Failure before = guard == nullptr ? Failure() : guard->Result();
      const bool held_back = !before.status.ok();
      const Failure& failure = held_back ? before : all;
      // Launches that read results of this one may ask before its completion has been sent.
      if (!failure.status.ok()) names_->launch_failures()->Note(launch);
      End();
      Complete(launch, failure.status, held_back, failure.is_origin);
    });
  }
}

}  // namespace chorus
