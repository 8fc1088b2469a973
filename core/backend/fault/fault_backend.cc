#include "core/backend/fault/fault_backend.h"

#include <algorithm>
#include <deque>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/backend/collective_work.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/mutex.h"

namespace chorus {
namespace {

using Site = FaultRule::Site;
using FaultEffect = FaultRule::Effect;

const char* SiteName(Site site) {
  switch (site) {
    case Site::kAllocate:
      return "allocate";
    case Site::kOpen:
      return "open";
    case Site::kLaunch:
      return "launch";
    case Site::kCopy:
      return "copy";
    case Site::kCollective:
      return "collective";
  }
  return "";
}

absl::Status InjectedError(Site site, int device) {
  return MakeError(Reason::kExecFailed,
                   absl::StrCat("injected fault: ", SiteName(site), " failed on device ", device));
}

// One record of an event. An event recorded again gets a new one, so that a wait that is held back
// still means the record of its own time.
struct Mark {
  std::unique_ptr<Event> inner;
  bool forwarded = false;
};

// A communicator's member: shared by its owner and by calls that are held.
struct Member {
  std::shared_ptr<Communicator> inner;  // null once closed
  absl::Status end_status;              // why lost calls end: aborted or closed
};

// What is enqueued on a stream.
struct Item {
  absl::optional<FaultRule> fault;
  Site site = Site::kCopy;
  std::shared_ptr<Mark> wait;                      // to be forwarded first
  std::shared_ptr<Member> member;                  // of a collective
  std::function<absl::Status(Communicator*)> run;  // forwards it; the argument is a collective's
  std::function<void(absl::Status)> callback;      // or it is a callback
  std::shared_ptr<Mark> record;                    // or a record
  std::shared_ptr<absl::optional<absl::Status>> result;  // of `run`, for a caller that looks at it
  absl::Time not_before = absl::InfinitePast();
  bool delayed = false;
};

struct StreamState {
  int device = 0;
  std::unique_ptr<Stream> inner;
  std::deque<Item> items;  // not forwarded yet
  absl::Status failure;    // injected since the last callback was forwarded
};

// All held work. One thread at a time forwards; others that come meanwhile leave it to that one, so
// callbacks may enqueue and nothing is called with the mutex held.
class Core {
 public:
  Core(FaultScript script, std::function<void(const std::string&)> on_fault)
      : script_(std::move(script)),
        on_fault_(std::move(on_fault)),
        random_(script_.seed),
        seen_(script_.rules.size(), 0),
        hit_(script_.rules.size(), 0) {
    for (const FaultRule& rule : script_.rules) {
      if (rule.effect == FaultEffect::kDelay && !timer_.joinable())
        timer_ = std::thread([this] { Time(); });
    }
  }

  ~Core() {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
    }
    changed_.SignalAll();
    if (timer_.joinable()) timer_.join();
  }

  absl::optional<FaultRule> Draw(Site site, int device) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::optional<FaultRule> drawn_rule;
    {
      MutexLock lock(&mutex_);
      for (size_t i = 0; i < script_.rules.size() && !drawn_rule.has_value(); ++i) {
        const FaultRule& rule = script_.rules[i];
        if (rule.site != site || (rule.device >= 0 && rule.device != device)) continue;
        if (seen_[i]++ < rule.skip) continue;
        if (rule.times >= 0 && hit_[i] >= rule.times) continue;
        if (std::uniform_real_distribution<double>(0, 1)(random_) >= rule.probability) continue;
        ++hit_[i];
        drawn_rule = rule;
      }
    }
    if (drawn_rule.has_value() && on_fault_ != nullptr) {
      const char* const effects[] = {"delayed", "failing", "out of memory", "lost"};
      on_fault_(absl::StrCat(SiteName(site), " ", effects[static_cast<int>(drawn_rule->effect)],
                             " on device ", device));
    }
    return drawn_rule;
  }

  void Push(const std::shared_ptr<StreamState>& stream, Item item) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    if (stopping_) return;
    if (stream->items.empty()) active_.push_back(stream);
    stream->items.push_back(std::move(item));
    Forward();
  }

  // What forwarding gave, if it has been forwarded. If not, the stream gets to hear of it.
  absl::Status ResultOf(std::shared_ptr<absl::optional<absl::Status>> result)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    absl::Status status;
    if (result->has_value()) status = *std::move(*result);
    result.reset();
    return status;
  }

  // Ends the lost calls of a member, and those that it makes from now on when it is closed.
  void End(Member* member, const absl::Status& why, bool close) ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<Communicator> inner;
    {
      MutexLock lock(&mutex_);
      if (member->end_status.ok()) member->end_status = Detached(why);
      inner = member->inner;
      if (close) member->inner = nullptr;
    }
    if (!close && inner != nullptr) inner->Abort(why);
    inner = nullptr;
    MutexLock lock(&mutex_);
    Forward();
  }

  // Drops everything that is held. Nothing is enqueued any more.
  void Clear() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::vector<std::shared_ptr<StreamState>> streams;
    MutexLock lock(&mutex_);
    stopping_ = true;
    while (forwarding_) changed_.WaitFor(&mutex_, absl::Milliseconds(1));
    streams.swap(active_);
  }

 private:
  // Whether the first item of a stream may be forwarded now; gives a delay its end.
  bool MayPass(Item* item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (item->wait != nullptr && !item->wait->forwarded) return false;
    if (!item->fault.has_value()) return true;
    if (item->fault->effect == FaultEffect::kLost) {
      return item->member != nullptr && !item->member->end_status.ok();
    }
    if (item->fault->effect == FaultEffect::kDelay) {
      if (!item->delayed) {
        item->delayed = true;
        item->not_before = SteadyNow() + item->fault->delay;
        changed_.SignalAll();
      }
      return SteadyNow() >= item->not_before;
    }
    return true;
  }

  void Forward() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (forwarding_) {
      again_ = true;
      return;
    }
    forwarding_ = true;
    do {
      again_ = false;
      for (size_t i = 0; i < active_.size();) {
        const std::shared_ptr<StreamState> stream = active_[i];
        while (!stopping_ && !stream->items.empty() && MayPass(&stream->items.front())) {
          ForwardOne(stream.get());
        }
        if (stream->items.empty()) {
          active_.erase(active_.begin() + i);
        } else {
          ++i;
        }
      }
    } while (again_ && !stopping_);
    forwarding_ = false;
  }

  void ForwardOne(StreamState* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    // The emptied item keeps later ones behind this one until it has been forwarded.
    Item item = std::move(stream->items.front());
    const bool fails = item.fault.has_value() && item.fault->effect == FaultEffect::kError;
    const bool lost = item.fault.has_value() && item.fault->effect == FaultEffect::kLost;
    // The caller is still in its call and will look at the result.
    const bool awaited = item.result != nullptr && item.result.use_count() > 1;
    absl::Status failure;
    std::shared_ptr<Communicator> communicator;
    if (item.member != nullptr) {
      communicator = item.member->inner;
      if ((lost && !awaited) || communicator == nullptr) {
        failure = Detached(item.member->end_status);
      }
    }
    if (fails) failure = InjectedError(item.site, stream->device);
    absl::Status earlier;
    if (item.callback != nullptr) {
      earlier = std::move(stream->failure);
      stream->failure = absl::OkStatus();
    }
    mutex_.Unlock();
    if (item.callback != nullptr) {
      stream->inner->Callback([earlier = std::move(earlier),
                               done = std::move(item.callback)](absl::Status status) mutable {
        done(status.ok() ? std::move(earlier) : std::move(status));
      });
    } else if (item.record != nullptr) {
      stream->inner->Record(item.record->inner.get());
    } else if (item.wait != nullptr) {
      stream->inner->Wait(item.wait->inner.get());
    } else if (!failure.ok()) {
      // The device that failed takes no part, and its peers must not wait for it.
      if (fails && communicator != nullptr) communicator->Abort(failure);
    } else {
      failure = item.run(communicator.get());
    }
    communicator = nullptr;
    mutex_.Lock();
    stream->items.pop_front();
    if (item.record != nullptr) {
      item.record->forwarded = true;
      again_ = true;  // streams that were passed over may wait for it
    }
    if (item.result != nullptr && item.result.use_count() > 1 && !fails) {
      *item.result = std::move(failure);
    } else if (!failure.ok() && stream->failure.ok()) {
      stream->failure = std::move(failure);
    }
  }

  void Time() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    while (!stopping_) {
      absl::Time next = absl::InfiniteFuture();
      for (const auto& stream : active_) {
        const Item& item = stream->items.front();
        if (item.delayed) next = std::min(next, item.not_before);
      }
      if (SteadyNow() >= next) {
        if (!forwarding_) {
          Forward();
          continue;
        }
        next = SteadyNow() + absl::Milliseconds(1);  // a forwarding thread may have passed it over
        again_ = true;
      }
      changed_.WaitFor(&mutex_, next - SteadyNow());
    }
  }

  const FaultScript script_;
  const std::function<void(const std::string&)> on_fault_;
  Mutex mutex_;
  CondVar changed_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  std::vector<int64_t> seen_ ABSL_GUARDED_BY(mutex_);  // by rule: calls that matched
  std::vector<int64_t> hit_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<StreamState>> active_ ABSL_GUARDED_BY(mutex_);  // with held items
  bool forwarding_ ABSL_GUARDED_BY(mutex_) = false;
  bool again_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread timer_;
};

class FaultEvent : public Event {
 public:
  explicit FaultEvent(Device* inner) : inner_(inner) {}
  std::shared_ptr<Mark> Record() {
    latest_ = std::make_shared<Mark>();
    latest_->inner = inner_->CreateEvent();
    return latest_;
  }
  const std::shared_ptr<Mark>& latest() const { return latest_; }

 private:
  Device* const inner_;
  std::shared_ptr<Mark> latest_;  // null: never recorded
};

class FaultStream : public Stream {
 public:
  FaultStream(Core* core, int device, std::unique_ptr<Stream> inner)
      : core_(core), state_(std::make_shared<StreamState>()) {
    state_->device = device;
    state_->inner = std::move(inner);
  }

  void Record(Event* event) override {
    Item item;
    item.record = static_cast<FaultEvent*>(event)->Record();
    core_->Push(state_, std::move(item));
  }
  void Wait(const Event* event) override {
    Item item;
    item.wait = static_cast<const FaultEvent*>(event)->latest();
    if (item.wait == nullptr) return;
    core_->Push(state_, std::move(item));
  }
  void Launch(KernelCall call) override {
    Enqueue(Site::kLaunch, [inner = inner(), call = std::move(call)] { inner->Launch(call); });
  }
  void Copy(DeviceAddress to, DeviceAddress from, int64_t bytes) override {
    Enqueue(Site::kCopy, [=, inner = inner()] { inner->Copy(to, from, bytes); });
  }
  void CopyFromHost(DeviceAddress to, const void* from, int64_t bytes) override {
    Enqueue(Site::kCopy, [=, inner = inner()] { inner->CopyFromHost(to, from, bytes); });
  }
  void CopyToHost(void* to, DeviceAddress from, int64_t bytes) override {
    Enqueue(Site::kCopy, [=, inner = inner()] { inner->CopyToHost(to, from, bytes); });
  }
  void Callback(std::function<void(absl::Status)> done) override {
    Item item;
    item.callback = std::move(done);
    core_->Push(state_, std::move(item));
  }

  const std::shared_ptr<StreamState>& state() const { return state_; }

 private:
  Stream* inner() const { return state_->inner.get(); }
  template <typename Work>
  void Enqueue(Site site, Work work) {
    Item item;
    item.site = site;
    item.fault = core_->Draw(site, state_->device);
    item.run = [work = std::move(work)](Communicator*) {
      work();
      return absl::OkStatus();
    };
    core_->Push(state_, std::move(item));
  }

  Core* const core_;
  const std::shared_ptr<StreamState> state_;
};

class FaultCommunicator : public Communicator {
 public:
  FaultCommunicator(Core* core, int size, int index, std::unique_ptr<Communicator> inner)
      : core_(core), size_(size), index_(index), member_(std::make_shared<Member>()) {
    member_->inner = std::move(inner);
  }
  ~FaultCommunicator() override {
    core_->End(member_.get(), MakeError(Reason::kAborted, "the communicator was closed"),
               /*close=*/true);
  }

  absl::Status Enqueue(const CollectiveCall& call, Stream* stream) override {
    CHORUS_RETURN_IF_ERROR(CheckCall(call, size_, index_));
    const auto& state = static_cast<FaultStream*>(stream)->state();
    Item item;
    item.site = Site::kCollective;
    item.fault = core_->Draw(Site::kCollective, state->device);
    item.member = member_;
    item.run = [call, inner = state->inner.get()](Communicator* communicator) {
      return communicator->Enqueue(call, inner);
    };
    auto result = std::make_shared<absl::optional<absl::Status>>();
    item.result = result;
    core_->Push(state, std::move(item));
    return core_->ResultOf(std::move(result));
  }
  void Abort(absl::Status why) override { core_->End(member_.get(), why, /*close=*/false); }

 private:
  Core* const core_;
  const int size_;
  const int index_;
  const std::shared_ptr<Member> member_;
};

class FaultDevice : public Device {
 public:
  FaultDevice(Core* core, int index, Device* inner) : core_(core), index_(index), inner_(inner) {}

  absl::StatusOr<DeviceAddress> Allocate(int64_t bytes) override {
    const absl::optional<FaultRule> fault = core_->Draw(Site::kAllocate, index_);
    if (!fault.has_value()) return inner_->Allocate(bytes);
    if (fault->effect == FaultEffect::kError) return InjectedError(Site::kAllocate, index_);
    return MakeError(Reason::kOutOfMemory, absl::StrCat("injected fault: device ", index_,
                                                        ": need ", bytes, " bytes, 0 are free"));
  }
  void Free(DeviceAddress address) override { inner_->Free(address); }
  std::unique_ptr<Stream> CreateStream() override {
    return std::make_unique<FaultStream>(core_, index_, inner_->CreateStream());
  }
  std::unique_ptr<Event> CreateEvent() override { return std::make_unique<FaultEvent>(inner_); }
  absl::StatusOr<std::unique_ptr<Kernel>> MakeKernel(
      const NodeView& node, absl::Span<const TensorType> outputs) override {
    return inner_->MakeKernel(node, outputs);
  }

 private:
  Core* const core_;
  const int index_;
  Device* const inner_;
};

class FaultBackend : public Backend {
 public:
  FaultBackend(std::unique_ptr<Backend> inner, FaultScript script,
               std::function<void(const std::string&)> on_fault)
      : inner_(std::move(inner)), core_(std::move(script), std::move(on_fault)) {
    for (int i = 0; i < inner_->device_count(); ++i) {
      devices_.push_back(std::make_unique<FaultDevice>(&core_, i, inner_->device(i)));
    }
  }
  // Held work refers to the inner backend, whose running work may call back into the core.
  ~FaultBackend() override {
    core_.Clear();
    inner_ = nullptr;
  }

  absl::string_view name() const override { return inner_->name(); }
  int device_count() const override { return inner_->device_count(); }
  int cores_per_device() const override { return inner_->cores_per_device(); }
  Device* device(int index) override { return devices_[index].get(); }
  bool host_addressable() const override { return inner_->host_addressable(); }
  int domain(int device) const override { return inner_->domain(device); }
  absl::Status lost() const override { return inner_->lost(); }
  absl::StatusOr<int64_t> WorkspaceBytes(const NodeView& node,
                                         absl::Span<const TensorType> outputs) const override {
    return inner_->WorkspaceBytes(node, outputs);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> OpenCommunicator(uint64_t id,
                                                                 absl::Span<const int> devices,
                                                                 int member) override {
    // Before the inner backend, which says what is wrong with the call: the others wait for a
    // member that has never been there.
    const bool is_member = member >= 0 && member < static_cast<int>(devices.size());
    if (is_member && core_.Draw(Site::kOpen, devices[member]).has_value()) {
      return InjectedError(Site::kOpen, devices[member]);
    }
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> opened,
                            inner_->OpenCommunicator(id, devices, member));
    return std::unique_ptr<Communicator>(std::make_unique<FaultCommunicator>(
        &core_, static_cast<int>(devices.size()), member, std::move(opened)));
  }

 private:
  std::unique_ptr<Backend> inner_;
  Core core_;
  std::vector<std::unique_ptr<FaultDevice>> devices_;
};

}  // namespace

std::unique_ptr<Backend> CreateFaultBackend(std::unique_ptr<Backend> inner, FaultScript script,
                                            std::function<void(const std::string&)> on_fault) {
  return std::make_unique<FaultBackend>(std::move(inner), std::move(script), std::move(on_fault));
}

absl::StatusOr<std::unique_ptr<Backend>> WithFaults(
    std::unique_ptr<Backend> inner, absl::string_view script,
    std::function<void(const std::string&)> on_fault) {
  if (script.empty()) return inner;
  CHORUS_ASSIGN_OR_RETURN(FaultScript parsed, ParseFaultScript(script));
  return CreateFaultBackend(std::move(inner), std::move(parsed), std::move(on_fault));
}

}  // namespace chorus
