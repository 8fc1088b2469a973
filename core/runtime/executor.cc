#include "core/runtime/executor.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/node_hash_map.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/base/work.h"
#include "core/ops/op.h"
#include "core/ops/registry.h"
#include "core/runtime/device_plan.h"

namespace chorus {
namespace {

constexpr int kCompute = static_cast<int>(DevicePlan::StreamId::kCompute);
constexpr int kCommunication = static_cast<int>(DevicePlan::StreamId::kCommunication);
constexpr int kPlanStreams = DevicePlan::kStreams;
// Uploads and downloads go on beside the plans' work.
constexpr int kCopy = kPlanStreams;
constexpr int kStreams = kPlanStreams + 1;

// A plan as it is launched: kernels made, calls filled in but for addresses.
struct DeviceProgram {
  // A call is large beside a kernel's step, and most steps are kernels.
  struct LoadedCall {
    CollectiveCall call;
    // Which of its operands there are, where call.runtime is.
    bool sends = false;
    bool receives = false;
    bool received = false;
    size_t binding = 0;
  };
  struct LoadedStep {
    int stream = kCompute;
    const Kernel* kernel = nullptr;  // null: a collective
    std::unique_ptr<LoadedCall> collective;
    int32_t wait = -1;
    int32_t record = -1;
    bool held_back = false;
    int32_t equal_group = -1;
    absl::InlinedVector<DevicePlan::Location, 2> inputs;
    absl::InlinedVector<DevicePlan::Location, 1> outputs;
    DevicePlan::Location workspace;
  };
  size_t num_buffers = 0;
  size_t num_bindings = 0;
  size_t num_events = 0;
  size_t num_equal_groups = 0;
  bool uses[kPlanStreams] = {false, false};
  bool kernels_may_fail = false;
  std::vector<LoadedStep> steps;
  std::vector<std::unique_ptr<Kernel>> kernels;
  // The events that it needs and the device did not have yet when it was loaded.
  std::vector<std::unique_ptr<Event>> new_events;
};

std::unique_ptr<DeviceProgram::LoadedCall> LoadCall(const DevicePlan::CollectiveStep& c,
                                                    size_t num_outputs) {
  auto loaded = std::make_unique<DeviceProgram::LoadedCall>();
  CollectiveCall& call = loaded->call;
  call.kind = c.kind;
  call.reduction = c.reduction;
  call.dtype = c.dtype;
  call.count = c.count;
  call.input_counts = c.input_counts;
  call.output_counts = c.output_counts;
  call.root = c.root;
  call.inputs.resize(static_cast<size_t>(c.num_inputs));
  call.outputs.resize(static_cast<size_t>(c.num_outputs));
  if (c.runtime.has_value()) {
    CollectiveCall::RuntimeCounts& runtime = call.runtime.emplace();
    runtime.row_elements = c.runtime->row_elements;
    runtime.input_rows = c.runtime->input_rows;
    runtime.output_rows = c.runtime->output_rows;
    runtime.source = c.runtime->source;
    loaded->sends = c.runtime->sends;
    loaded->receives = c.runtime->receives;
    loaded->received = c.runtime->received;
  }
  const size_t extras = num_outputs - call.outputs.size() - static_cast<size_t>(loaded->received);
  (c.reduction == Reduction::kProduct ? call.factors : call.holders).resize(extras);
  loaded->binding = static_cast<size_t>(c.binding);
  return loaded;
}

// Which of its launches, or uploads, have failed: as long as somebody may ask, and no longer.
// Threads: any.
template <typename Id>
class FailureLog {
 public:
  using Ids = absl::InlinedVector<Id, 4>;
  void Note(Id failed) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    rows_[failed].failed = true;
  }
  // A question about each of these is to come. Returns them, each once.
  template <typename List>
  Ids Await(const List& list) ABSL_LOCKS_EXCLUDED(mutex_) {
    Ids ids(list.begin(), list.end());
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    if (ids.empty()) return ids;
    MutexLock lock(&mutex_);
    for (const Id id : ids) ++rows_[id].questions;
    return ids;
  }
  bool Ask(Id id) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    const auto row = rows_.find(id);
    const bool failed = row->second.failed;
    --row->second.questions;
    DropIfUnwanted(row);
    return failed;
  }
  // Of one that has ended: nobody will await it any more.
  void Settle(Id id) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    const auto row = rows_.find(id);
    if (row == rows_.end()) return;
    row->second.settled = true;
    DropIfUnwanted(row);
  }

 private:
  struct Row {
    int32_t questions = 0;
    bool failed = false;
    bool settled = false;
  };
  using Rows = absl::flat_hash_map<Id, Row>;
  void DropIfUnwanted(typename Rows::iterator row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Row& of = row->second;
    if (of.questions == 0 && (of.settled || !of.failed)) rows_.erase(row);
  }

  Mutex mutex_;
  Rows rows_ ABSL_GUARDED_BY(mutex_);
};

class DeviceExecutor final : public Executor {
 public:
  DeviceExecutor(Backend* backend, int index, OnEvent on_event, DeviceExecutorOptions options)
      : backend_(backend),
        device_(backend->device(index)),
        on_event_(std::move(on_event)),
        options_(std::move(options)) {
    for (int s = 0; s < kStreams; ++s) {
      streams_[s] = device_->CreateStream();
      crossing_[s] = device_->CreateEvent();
    }
  }

  ~DeviceExecutor() override {
    while (Continue()) {
    }
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

  void LoadPlan(PlanId id, absl::string_view bytes) override {
    absl::Status loaded = Load(id, bytes);
    Say(LoadedMessage{id, std::move(loaded)});
  }

  std::shared_ptr<void> UnloadPlan(PlanId id) override {
    if (FindPlan(id) == nullptr) return nullptr;
    const auto it = plans_.find(id);
    std::shared_ptr<DeviceProgram> plan = std::move(it->second);
    plans_.erase(it);
    MutexLock lock(&loading_mutex_);
    ids_.erase(id);
    return plan;
  }

  void OpenCommunicator(CommunicatorId id, absl::Span<const int> devices, int member) override {
    absl::Status status;
    if (communicators_.contains(id)) {
      status = Malformed(absl::StrCat("communicator ", id.value(), " is open already"));
    } else {
      auto opened = backend_->OpenCommunicator(id.value(), devices, member);
      status = opened.status();
      communicators_.emplace(id, std::move(opened));
    }
    Say(OpenedMessage{id, std::move(status)});
  }

  void AbortCommunicator(CommunicatorId id, absl::Status why) override {
    const auto it = communicators_.find(id);
    if (it != communicators_.end() && it->second.ok()) (*it->second)->Abort(std::move(why));
  }

  void CloseCommunicator(CommunicatorId id) override {
    if (MustWait([this, id] { CloseCommunicator(id); })) return;
    communicators_.erase(id);
  }

  bool Launch(absl::string_view bytes) override {
    slice_ = options_.slice_steps;
    // One of many collectives takes long to decode, and a gang's are launched all at once.
    constexpr size_t kBytesAtOnce = 8192;
    if (HasMore() || bytes.size() > kBytesAtOnce) {
      behind_.push_back([this, copy = std::string(bytes)] { BeginLaunch(copy); });
    } else {
      BeginLaunch(bytes);
    }
    return HasMore();
  }

  bool Continue() override {
    slice_ = options_.slice_steps;
    if (launching_) EnqueueSlice();
    while (!launching_ && !behind_.empty() && slice_ > 0) {
      const std::function<void()> next = std::move(behind_.front());
      behind_.pop_front();
      unwinding_ = true;
      next();
      unwinding_ = false;
      --slice_;
    }
    return HasMore();
  }

  void Abandon(LaunchId launch) override {
    const auto row =
        std::lower_bound(endings_.begin(), endings_.end(), launch,
                         [](const auto& ending, LaunchId other) { return ending.first < other; });
    if (row != endings_.end() && row->first == launch) {
      if (const std::shared_ptr<Ending> ending = row->second.lock()) ending->unwanted = true;
      return;
    }
    // It may be among those whose turn has not come.
    MustWait([this, launch] { Abandon(launch); });
  }

  void Settled(LaunchId launch) override {
    if (MustWait([this, launch] { Settled(launch); })) return;
    launch_failures_.Settle(launch);
  }
  void Settled(TransferId upload) override {
    if (MustWait([this, upload] { Settled(upload); })) return;
    upload_failures_.Settle(upload);
  }

  void Upload(TransferId id, DeviceAddress to, const void* from, int64_t bytes) override {
    Begin();
    uploaded_ = ++enqueued_.end[kCopy];
    streams_[kCopy]->CopyFromHost(to, from, bytes);
    EndTransfer(id, /*is_upload=*/true);
  }

  void Download(TransferId id, void* to, DeviceAddress from, int64_t bytes,
                LaunchId after) override {
    if (MustWait([=] { Download(id, to, from, bytes, after); })) return;
    if (after != LaunchId()) Order(kCopy, NeededBy({after}));
    Begin();
    ++enqueued_.end[kCopy];
    streams_[kCopy]->CopyToHost(to, from, bytes);
    EndTransfer(id, /*is_upload=*/false);
  }

 private:
  // --- Slices ---

  bool HasMore() const { return launching_ || !behind_.empty(); }
  // What must come behind a launch that has been enqueued in part waits until all of it is.
  template <typename Call>
  bool MustWait(Call call) {
    if (unwinding_ || !HasMore()) return false;
    behind_.push_back(std::move(call));
    return true;
  }

  void BeginLaunch(absl::string_view bytes) {
    if (!DecodeLaunchInto(bytes, &message_)) {
      launch_failures_.Note(message_.launch);
      Complete(message_.launch,
               Malformed(absl::StrCat("a launch of ", bytes.size(), " bytes does not decode")),
               /*held_back=*/true);
      return;
    }
    DeviceProgram* plan = nullptr;
    if (absl::Status status = Bind(&plan); !status.ok()) {
      launch_failures_.Note(message_.launch);
      // Nothing of it is enqueued: others would wait for its calls.
      for (const LaunchMessage::CollectiveBinding& binding : message_.collectives) {
        AbortCommunicator(binding.communicator, Detached(status));
      }
      AbortCommunicator(message_.commit, Detached(status));
      Complete(message_.launch, status, /*held_back=*/true);
      return;
    }
    UnderWay& launch = launch_;
    launch.plan = plan;
    launch.next = 0;
    launch.commits = message_.commit != CommunicatorId();
    launch.failure = Failure();
    launch.ending = nullptr;
    // What is one kernel ends with it.
    if (plan->kernels.size() > 1) {
      launch.ending = std::make_shared<Ending>();
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
        const absl::Status result = FailureOf(launch_failures_.Await(message_.after),
                                              upload_failures_.Await(message_.uploads));
        if (!result.ok()) launch_failures_.Note(message_.launch);
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

  void EnqueueSlice() {
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
  void BringInlines() {
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

  // How much work each stream had been given.
  struct Position {
    LaunchId launch;
    int64_t end[kStreams] = {};
    bool may_fail = false;  // the launch, or one whose results it reads
  };
  // What a launch has come to: the first failure, or the first of its own.
  struct Failure {
    absl::Status status;
    bool is_origin = false;

    void Add(const absl::Status& result, bool is_own) {
      if (result.ok() || (!status.ok() && (is_origin || !is_own))) return;
      status = Detached(result);
      is_origin = is_own;
    }
  };
  // What decides whether a launch may write over what was given to it.
  struct Guard : Veto {
    std::atomic<bool> failed{false};
    Mutex mutex;
    Failure failure ABSL_GUARDED_BY(mutex);

    void Add(const absl::Status& result, bool is_own = false) {
      if (result.ok()) return;
      MutexLock lock(&mutex);
      failure.Add(result, is_own);
      failed.store(true, std::memory_order_release);
    }
    Failure Result() {
      MutexLock lock(&mutex);
      return {Detached(failure.status), failure.is_origin};
    }
    absl::Status status() override { return Result().status; }
  };
  struct Ending;
  // The launch that is being enqueued; `message_`, `bound_`, `left_out_` and `commit_` are its own.
  using Inlines = absl::InlinedVector<LaunchMessage::Inline, 1>;
  struct UnderWay {
    DeviceProgram* plan = nullptr;
    size_t next = 0;  // step
    bool commits = false;
    bool may_fail = false;  // else it has nothing to hold back for
    bool reads_what_may_fail = false;
    bool uses[kPlanStreams] = {};
    Failure failure;  // of what could not be enqueued
    std::shared_ptr<Guard> guard;
    std::shared_ptr<Ending> ending;          // null: of its kernels none can be left out
    std::shared_ptr<const Inlines> inlines;  // read until it has ended
  };
  // What the ends of one launch on its streams have in common.
  struct Ending {
    std::atomic<bool> unwanted{false};
    std::atomic<int> left{0};
    std::shared_ptr<const Inlines> inlines;
    // What it reads and may have failed: then so has it, for those that read its results. Nothing
    // where its guard asks for that.
    FailureLog<LaunchId>::Ids after;
    FailureLog<TransferId>::Ids uploads;
    Mutex mutex;
    Failure failure ABSL_GUARDED_BY(mutex);
  };
  static constexpr size_t kPositions = 1024;

  // On any thread: touches nothing that other calls use, but what is guarded.
  absl::Status Load(PlanId id, absl::string_view bytes) {
    CHORUS_ASSIGN_OR_RETURN(DevicePlan decoded, DecodeDevicePlan(bytes));
    auto plan = std::make_unique<DeviceProgram>();
    plan->num_buffers = static_cast<size_t>(decoded.num_buffers);
    plan->num_bindings = static_cast<size_t>(decoded.num_bindings);
    plan->num_events = static_cast<size_t>(decoded.num_events);
    plan->num_equal_groups = static_cast<size_t>(decoded.num_equal_groups);
    plan->kernels.reserve(decoded.nodes.size());
    for (const DevicePlan::Kernel& kernel : decoded.nodes) {
      plan->kernels.emplace_back();
      CHORUS_ASSIGN_OR_RETURN(plan->kernels.back(), MakeKernel(kernel, &plan->kernels_may_fail));
    }
    plan->steps.reserve(decoded.steps.size());
    for (DevicePlan::Step& step : decoded.steps) {
      DeviceProgram::LoadedStep loaded;
      loaded.stream = static_cast<int>(step.stream);
      plan->uses[loaded.stream] = true;
      loaded.wait = step.wait;
      loaded.record = step.record;
      loaded.held_back = step.held_back;
      loaded.equal_group = step.equal_group;
      if (step.node >= 0) {
        const auto node = static_cast<size_t>(step.node);
        loaded.kernel = plan->kernels[node].get();
        if (step.workspace_bytes < loaded.kernel->workspace_bytes()) {
          return Malformed(absl::StrCat("a device plan has ", step.workspace_bytes,
                                        " bytes of workspace for ", decoded.nodes[node].node.op,
                                        ", expected ", loaded.kernel->workspace_bytes()));
        }
        loaded.workspace = step.workspace;
      } else {
        const DevicePlan::CollectiveStep& c =
            decoded.collectives[static_cast<size_t>(step.collective)];
        loaded.collective = LoadCall(c, step.outputs.size());
      }
      loaded.inputs = std::move(step.inputs);
      loaded.outputs = std::move(step.outputs);
      plan->steps.push_back(std::move(loaded));
    }
    for (size_t i = num_events_.load(std::memory_order_acquire); i < plan->num_events; ++i) {
      plan->new_events.push_back(device_->CreateEvent());
    }
    MutexLock lock(&loading_mutex_);
    if (!ids_.insert(id).second) {
      return Malformed(absl::StrCat("plan ", id.value(), " is loaded already"));
    }
    arrived_.emplace_back(id, std::move(plan));
    return absl::OkStatus();
  }

  // Sets `may_fail` where this one may, and else leaves it.
  absl::StatusOr<std::unique_ptr<Kernel>> MakeKernel(const DevicePlan::Kernel& kernel,
                                                     bool* may_fail) {
    const Node& node = kernel.node;
    if (node.collective.has_value() || node.effect == Effect::kCollective) {
      return Malformed(absl::StrCat("a device plan has the collective ", node.op, " as a kernel"));
    }
    absl::InlinedVector<const TensorType*, 4> types;
    for (const TensorType& type : kernel.input_types) types.push_back(&type);
    const NodeView view = ViewOf(node, types);
    CHORUS_ASSIGN_OR_RETURN(const std::vector<TensorType> inferred, InferTypes(view));
    if (inferred != node.outputs) {
      return Malformed(absl::StrCat("a device plan has outputs for ", node.op,
                                    " that are not what its inputs give"));
    }
    *may_fail |= MayFail(*FindOp(node.op), view);
    return device_->MakeKernel(view, node.outputs);
  }

  // Null: there is none. Takes in the plans loaded since the last one that was not among `plans_`.
  DeviceProgram* FindPlan(PlanId id) {
    auto it = plans_.find(id);
    if (it != plans_.end()) return it->second.get();
    std::vector<std::pair<PlanId, std::unique_ptr<DeviceProgram>>> arrived;
    {
      MutexLock lock(&loading_mutex_);
      arrived.swap(arrived_);
    }
    for (auto& loaded : arrived) {
      for (std::unique_ptr<Event>& event : loaded.second->new_events) {
        if (events_.size() < loaded.second->num_events) events_.push_back(std::move(event));
      }
      loaded.second->new_events.clear();
      plans_.insert(std::move(loaded));
    }
    num_events_.store(events_.size(), std::memory_order_release);
    it = plans_.find(id);
    return it == plans_.end() ? nullptr : it->second.get();
  }

  // Or why it could not be opened.
  using OpenedCommunicator = absl::StatusOr<std::unique_ptr<Communicator>>;
  absl::StatusOr<const OpenedCommunicator*> FindCommunicator(CommunicatorId id) const {
    const auto communicator = communicators_.find(id);
    if (communicator != communicators_.end()) return &communicator->second;
    return UnknownName(absl::StrCat("communicator ", id.value()));
  }

  // Finds what the message names, before anything is enqueued.
  absl::Status Bind(DeviceProgram** plan) {
    if (options_.prepare != nullptr) CHORUS_RETURN_IF_ERROR(options_.prepare(&message_));
    *plan = FindPlan(message_.plan);
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
      CHORUS_ASSIGN_OR_RETURN(const OpenedCommunicator* const bound,
                              FindCommunicator(binding.communicator));
      bound_.push_back(bound);
    }
    commit_ = nullptr;
    if (message_.commit != CommunicatorId()) {
      CHORUS_ASSIGN_OR_RETURN(commit_, FindCommunicator(message_.commit));
    }
    return absl::OkStatus();
  }

  // --- Order between launches ---

  // How far each stream must have come before a launch after `launches` may begin.
  Position NeededBy(absl::Span<const LaunchId> launches) const {
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
  void Order(int stream, const Position& needed) {
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

  void Note(bool may_fail) {
    Position& position = positions_[positions_count_++ % kPositions];
    position = enqueued_;
    position.launch = message_.launch;
    position.may_fail = may_fail;
  }

  // --- Steps ---

  DeviceAddress AddressOf(const DevicePlan::Location& location) const {
    if (location.buffer < 0) return 0;
    const DeviceAddress base = message_.buffers[static_cast<size_t>(location.buffer)];
    return base == 0 ? 0 : base + static_cast<DeviceAddress>(location.offset);
  }

  // What follows on the compute stream waits for all of the launch so far, collectives too, and
  // learns whether any of it has failed, here, in a launch whose results it reads or on a device
  // that launches together with this one.
  std::shared_ptr<Guard> MakeGuard(const bool (&uses)[kPlanStreams], const Failure& enqueued) {
    auto guard = std::make_shared<Guard>();
    guard->Add(enqueued.status, enqueued.is_origin);
    const auto add = [guard](const absl::Status& result) { guard->Add(result); };
    if (uses[kCommunication]) {
      streams_[kCommunication]->Callback(add);
      streams_[kCommunication]->Record(crossing_[kCommunication].get());
      streams_[kCompute]->Wait(crossing_[kCommunication].get());
    }
    streams_[kCompute]->Callback(
        [this, guard, after = launch_failures_.Await(message_.after),
         uploads = upload_failures_.Await(message_.uploads)](const absl::Status& result) {
          guard->Add(result, /*is_own=*/true);
          guard->Add(FailureOf(after, uploads));
        });
    if (commit_ == nullptr) return guard;
    streams_[kCompute]->Record(crossing_[kCompute].get());
    streams_[kCommunication]->Wait(crossing_[kCompute].get());
    CollectiveCall all;
    all.kind = CollectiveKind::kBarrier;
    all.veto = guard.get();
    guard->Add(Enqueue(*commit_, all, streams_[kCommunication].get()), /*is_own=*/!commit_->ok());
    streams_[kCommunication]->Callback(add);
    streams_[kCommunication]->Record(crossing_[kCommunication].get());
    streams_[kCompute]->Wait(crossing_[kCommunication].get());
    return guard;
  }

  static absl::Status Enqueue(const OpenedCommunicator& communicator, const CollectiveCall& call,
                              Stream* stream) {
    CHORUS_RETURN_IF_ERROR(communicator.status());
    return (*communicator)->Enqueue(call, stream);
  }

  void Enqueue(DeviceProgram::LoadedStep* step, const Guard* guard, Failure* failure) {
    Stream* const stream = streams_[step->stream].get();
    if (step->wait >= 0) stream->Wait(events_[static_cast<size_t>(step->wait)].get());
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
      DeviceProgram::LoadedCall& collective = *step->collective;
      CollectiveCall& call = collective.call;
      const auto& present = message_.collectives[collective.binding].present;
      call.present.assign(present.begin(), present.end());
      const auto result = [&](const DevicePlan::Location& location) {
        const bool stands_there =
            location.producer >= 0 &&
            (present.empty() ||
             std::find(present.begin(), present.end(), location.producer) != present.end());
        return stands_there ? 0 : AddressOf(location);
      };
      const DevicePlan::Location* from = step->inputs.data();
      for (DeviceAddress& address : call.inputs) address = AddressOf(*from++);
      const DevicePlan::Location* to = step->outputs.data();
      for (DeviceAddress& address : call.outputs) address = result(*to++);
      if (call.runtime.has_value()) {
        call.runtime->rank = message_.collectives[collective.binding].rank;
        if (collective.sends) call.runtime->sends = AddressOf(*from++);
        if (collective.receives) call.runtime->receives = AddressOf(*from++);
        if (collective.received) call.runtime->received = result(*to++);
      }
      if (call.reduction == Reduction::kPremulSum) call.factor = AddressOf(*from++);
      for (std::vector<DeviceAddress>* extras : {&call.factors, &call.holders}) {
        for (DeviceAddress& address : *extras) address = result(*to++);
      }
      if (const OpenedCommunicator* const bound = bound_[collective.binding]; bound != nullptr) {
        const absl::Status enqueued = Enqueue(*bound, call, stream);
        // Others have made theirs, or will, and would wait for this one.
        if (!enqueued.ok() && bound->ok()) (**bound)->Abort(Detached(enqueued));
        failure->Add(enqueued, /*is_own=*/!bound->ok());
      } else if (!OnlyOrders(call.kind)) {
        failure->Add(Malformed("a launch binds no communicator to a collective"),
                     /*is_own=*/false);
      }
    }
    if (step->record >= 0) stream->Record(events_[static_cast<size_t>(step->record)].get());
  }

  // --- The end of launches ---

  bool AllDone() const { return in_flight_.load(std::memory_order_acquire) == 0; }
  void Begin() { in_flight_.fetch_add(1, std::memory_order_relaxed); }
  void End() { in_flight_.fetch_sub(1, std::memory_order_release); }

  // Asked once for each launch that reads these, behind them: by its guard, or else by its end.
  absl::Status FailureOf(absl::Span<const LaunchId> launches,
                         absl::Span<const TransferId> uploads) {
    absl::Status status;
    for (const LaunchId launch : launches) {
      if (!launch_failures_.Ask(launch)) continue;
      status.Update(MakeError(
          Reason::kExecFailed,
          absl::StrCat("launch ", launch.value(), ", whose results it reads, has failed")));
    }
    for (const TransferId upload : uploads) {
      if (!upload_failures_.Ask(upload)) continue;
      status.Update(
          MakeError(Reason::kExecFailed,
                    absl::StrCat("upload ", upload.value(), ", whose bytes it reads, has failed")));
    }
    return status;
  }

  void Say(const EventMessage& event) {
    ByteWriter out;
    EncodeEvent(event, &out);
    on_event_(out.bytes());
  }

  void Complete(LaunchId launch, const absl::Status& status, bool held_back = false,
                bool is_origin = false) {
    Say(CompletionMessage{launch, status, held_back, is_origin});
  }

  void EndTransfer(TransferId id, bool is_upload) {
    streams_[kCopy]->Callback([this, id, is_upload](absl::Status status) {
      if (is_upload && !status.ok()) upload_failures_.Note(id);
      End();
      Say(TransferredMessage{id, std::move(status)});
    });
  }

  // Takes from `done` what its ends keep.
  void Finish(UnderWay* done) {
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
            if (!result.ok()) launch_failures_.Note(ended);
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
      ending->after = launch_failures_.Await(message_.after);
      ending->uploads = upload_failures_.Await(message_.uploads);
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
            ending->failure.Add(
                MakeError(Reason::kCancelled,
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
        if (!failure.status.ok()) launch_failures_.Note(launch);
        End();
        Complete(launch, failure.status, held_back, failure.is_origin);
      });
    }
  }

  Backend* const backend_;
  Device* const device_;
  const OnEvent on_event_;
  const DeviceExecutorOptions options_;

  Mutex loading_mutex_;
  absl::flat_hash_set<PlanId> ids_ ABSL_GUARDED_BY(loading_mutex_);  // of all that are loaded
  // Plans that no call has asked for yet.
  std::vector<std::pair<PlanId, std::unique_ptr<DeviceProgram>>> arrived_
      ABSL_GUARDED_BY(loading_mutex_);
  std::atomic<size_t> num_events_{0};  // of `events_`
  absl::flat_hash_map<PlanId, std::unique_ptr<DeviceProgram>> plans_;
  absl::node_hash_map<CommunicatorId, OpenedCommunicator> communicators_;
  std::vector<std::unique_ptr<Event>> events_;             // of plans; each launch uses them afresh
  std::array<std::unique_ptr<Event>, kStreams> crossing_;  // between launches; [s]: recorded on s

  Position enqueued_;
  int64_t waited_end_[kStreams][kStreams] = {};  // how far of each other stream each has waited for
  int64_t uploaded_ = 0;                         // where on the copy stream the last upload ended
  std::array<Position, kPositions> positions_;   // of the last launches
  size_t positions_count_ = 0;

  // Of launches of several kernels that have not ended, and of others.
  std::deque<std::pair<LaunchId, std::weak_ptr<Ending>>> endings_;
  UnderWay launch_;
  bool launching_ = false;                    // it is not enqueued whole
  int64_t slice_ = 0;                         // pieces that may still be done in this call
  std::deque<std::function<void()>> behind_;  // calls that wait for that
  bool unwinding_ = false;                    // their turn has come
  LaunchMessage message_;                     // the one being launched
  absl::InlinedVector<const OpenedCommunicator*, 4> bound_;
  std::vector<bool> left_out_;  // by group of equal work
  const OpenedCommunicator* commit_ = nullptr;

  FailureLog<LaunchId> launch_failures_;
  FailureLog<TransferId> upload_failures_;
  std::atomic<int64_t> in_flight_{0};  // ended by completions

  // Last: the work on them uses the rest.
  std::array<std::unique_ptr<Stream>, kStreams> streams_;
};

}  // namespace

std::unique_ptr<Executor> CreateDeviceExecutor(Backend* backend, int index,
                                               Executor::OnEvent on_event,
                                               DeviceExecutorOptions options) {
  return std::make_unique<DeviceExecutor>(backend, index, std::move(on_event), std::move(options));
}

}  // namespace chorus
