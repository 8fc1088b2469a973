#include "core/runtime/executor.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/runtime/device_names.h"
#include "core/runtime/lane.h"

namespace chorus {
namespace {

class DeviceExecutor final : public Executor {
 public:
  DeviceExecutor(Backend* backend, int index, OnEvent on_event, DeviceExecutorOptions options)
      : device_(backend->device(index)),
        on_event_(std::move(on_event)),
        options_(std::move(options)),
        say_([this](const EventMessage& event) { Say(event); }),
        names_(backend, index) {}

  ~DeviceExecutor() override {
    while (Continue()) {
    }
  }

  void LoadPlan(PlanId id, absl::string_view bytes) override {
    absl::Status loaded = names_.LoadPlan(id, bytes);
    Say(LoadedMessage{id, std::move(loaded)});
  }
  std::shared_ptr<void> UnloadPlan(PlanId id) override { return names_.TakePlan(id); }

  void OpenCommunicator(CommunicatorId id, absl::Span<const int> devices, int member) override {
    Say(OpenedMessage{id, names_.OpenCommunicator(id, devices, member)});
  }
  void AbortCommunicator(CommunicatorId id, absl::Status why) override {
    names_.AbortCommunicator(id, std::move(why));
  }
  void CloseCommunicator(CommunicatorId id) override {
    BehindAll([this, id] { names_.CloseCommunicator(id); });
  }

  bool Launch(absl::string_view bytes) override {
    LaneAt(LaneOf(bytes))->Launch(bytes);
    return HasMore();
  }

  const CollectiveCall* FillCall(PlanId id, size_t binding,
                                 absl::Span<const DeviceAddress> buffers) override {
    DeviceProgram* const plan = names_.FindPlan(id);
    if (plan == nullptr || plan->num_buffers != buffers.size()) return nullptr;
    // Bindings are numbered as collectives come.
    if (binding >= plan->steps.size()) return nullptr;
    DeviceProgram::LoadedStep* const step = &plan->steps[binding];
    if (step->collective == nullptr || step->collective->binding != binding) return nullptr;
    return &DeviceProgram::FillCall(step, buffers, {});
  }

  // Of one lane, each in its turn.
  bool Continue() override {
    for (size_t i = 0; i < lanes_.size(); ++i) {
      next_ = (next_ + 1) % lanes_.size();
      if (lanes_[next_] == nullptr || !lanes_[next_]->HasMore()) continue;
      lanes_[next_]->Continue();
      break;
    }
    return HasMore();
  }

  void Abandon(LaunchId launch) override {
    for (const auto& lane : lanes_) {
      if (lane != nullptr && lane->Abandon(launch)) return;
    }
  }

  void Settled(LaunchId launch) override {
    BehindAll([this, launch] { names_.launch_failures()->Settle(launch); });
  }
  void Settled(TransferId upload) override {
    BehindAll([this, upload] { names_.upload_failures()->Settle(upload); });
  }

  void Upload(TransferId id, int32_t lane, DeviceAddress to, const void* from,
              int64_t bytes) override {
    LaneAt(lane)->Upload(id, to, from, bytes);
  }
  void Download(TransferId id, int32_t lane, void* to, DeviceAddress from, int64_t bytes,
                LaunchId after) override {
    LaneAt(lane)->Download(id, to, from, bytes, after);
  }

 private:
  Lane* LaneAt(int32_t index) {
    if (lanes_.size() <= static_cast<size_t>(index)) lanes_.resize(static_cast<size_t>(index) + 1);
    std::unique_ptr<Lane>& lane = lanes_[static_cast<size_t>(index)];
    if (lane == nullptr) lane = std::make_unique<Lane>(device_, &names_, &options_, &say_);
    return lane.get();
  }

  bool HasMore() const {
    return std::any_of(lanes_.begin(), lanes_.end(), [](const std::unique_ptr<Lane>& lane) {
      return lane != nullptr && lane->HasMore();
    });
  }

  // Once all that was launched before is enqueued, on whichever lane.
  template <typename Call>
  void BehindAll(Call call) {
    if (!HasMore()) return call();
    auto left = std::make_shared<int>(0);
    for (const auto& lane : lanes_) {
      if (lane == nullptr || !lane->HasMore()) continue;
      ++*left;
      lane->Behind([left, call] {
        if (--*left == 0) call();
      });
    }
  }

  void Say(const EventMessage& event) {
    ByteWriter out;
    EncodeEvent(event, &out);
    on_event_(out.bytes());
  }

  Device* const device_;
  const OnEvent on_event_;
  const DeviceExecutorOptions options_;
  const Lane::Say say_;
  DeviceNames names_;
  size_t next_ = 0;  // the lane that has had its turn last
  // Last: the work on them uses the rest. Null: it has had no work yet.
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace

std::unique_ptr<Executor> CreateDeviceExecutor(Backend* backend, int index,
                                               Executor::OnEvent on_event,
                                               DeviceExecutorOptions options) {
  return std::make_unique<DeviceExecutor>(backend, index, std::move(on_event), std::move(options));
}

}  // namespace chorus
