#include "core/node/launcher.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace chorus::node {

Launcher::Launcher(Backend* backend, std::function<void()> wake)
    : wake_(std::move(wake)), launch_counts_(static_cast<size_t>(backend->device_count())) {
  for (int i = 0; i < backend->device_count(); ++i) {
    executors_.push_back(
        CreateDeviceExecutor(backend, i, [this](absl::string_view bytes) { OnCompletion(bytes); }));
  }
}

// Whole gangs, or their devices would wait for each other.
Launcher::~Launcher() {
  while (Continue()) {
  }
}

absl::StatusOr<PlanId> Launcher::PlanOn(LoadedPlan* plan, int slot, DeviceIndex device) {
  auto& places = plan->places[static_cast<size_t>(slot)];
  for (const auto& place : places) {
    if (place.first == device) return place.second;
  }
  const PlanId id = ++last_plan_;
  CHORUS_RETURN_IF_ERROR(
      executor(device)->LoadPlan(id, plan->plan.device_plans[static_cast<size_t>(slot)]));
  places.emplace_back(device, id);
  ++loaded_plans_;
  return id;
}

void Launcher::UnloadPlan(DeviceIndex device, PlanId plan) {
  executor(device)->UnloadPlan(plan);
  --loaded_plans_;
}

absl::StatusOr<CommunicatorId> Launcher::CommunicatorOf(absl::Span<const DeviceIndex> devices) {
  std::vector<int> key;
  key.reserve(devices.size());
  for (DeviceIndex device : devices) key.push_back(device.value());
  const auto known = pool_.find(key);
  if (known != pool_.end()) return known->second;
  const CommunicatorId id = ++last_communicator_;
  for (size_t member = 0; member < key.size(); ++member) {
    absl::Status opened = executors_[static_cast<size_t>(key[member])]->OpenCommunicator(
        id, key, static_cast<int>(member));
    if (!opened.ok()) {
      for (size_t i = 0; i < member; ++i) {
        executors_[static_cast<size_t>(key[i])]->CloseCommunicator(id);
      }
      return opened;
    }
  }
  devices_of_[id] = key;
  pool_.emplace(std::move(key), id);
  return id;
}

void Launcher::DropCommunicator(CommunicatorId id, const absl::Status& why) {
  const auto it = devices_of_.find(id);
  if (it == devices_of_.end()) return;
  ++drops_;
  for (int device : it->second) {
    executors_[static_cast<size_t>(device)]->AbortCommunicator(id, why);
  }
  for (int device : it->second) executors_[static_cast<size_t>(device)]->CloseCommunicator(id);
  pool_.erase(it->second);
  devices_of_.erase(it);
}

void Launcher::Launch(DeviceIndex device, const LaunchMessage& message) {
  ++launch_counts_[static_cast<size_t>(device.value())];
  scratch_.Clear();
  EncodeLaunch(message, &scratch_);
  const bool more = executor(device)->Launch(scratch_.bytes());
  if (!more) return;
  if (std::find(unfinished_.begin(), unfinished_.end(), device) == unfinished_.end()) {
    unfinished_.push_back(device);
  }
}

bool Launcher::Continue() {
  if (unfinished_.empty()) return false;
  unfinished_.erase(
      std::remove_if(unfinished_.begin(), unfinished_.end(),
                     [this](DeviceIndex device) { return !executor(device)->Continue(); }),
      unfinished_.end());
  return true;
}

void Launcher::OnCompletion(absl::string_view bytes) {
  absl::StatusOr<CompletionMessage> message = DecodeCompletion(bytes);
  if (!message.ok()) return;  // an executor of this build does not send such bytes
  {
    MutexLock lock(&mutex_);
    completed_.push_back(*std::move(message));
  }
  // Sequentially consistent: a later look at whether the loop sleeps must not come before it.
  ready_.store(true, std::memory_order_seq_cst);
  wake_();
}

void Launcher::Post(std::function<void()> closure) {
  {
    MutexLock lock(&mutex_);
    posted_.push_back(std::move(closure));
  }
  // Sequentially consistent: a later look at whether the loop sleeps must not come before it.
  ready_.store(true, std::memory_order_seq_cst);
  wake_();
}

bool Launcher::Drain(std::vector<CompletionMessage>* completions) {
  if (!ready_.exchange(false, std::memory_order_acquire)) return false;
  std::vector<std::function<void()>> posted;
  {
    MutexLock lock(&mutex_);
    completions->swap(completed_);
    completed_.clear();
    posted.swap(posted_);
  }
  for (std::function<void()>& closure : posted) closure();
  return true;
}

}  // namespace chorus::node
