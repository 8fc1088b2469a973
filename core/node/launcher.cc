#include "core/node/launcher.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/base/work.h"

namespace chorus::node {

namespace {

// Where the part for `slot` is on `device`. Invalid: nowhere.
PlanId FindOn(const LoadedPlan& plan, size_t slot, DeviceIndex device) {
  for (const auto& location : plan.locations[slot]) {
    if (location.first == device) return location.second;
  }
  return PlanId();
}

// For the part for `slot` on one device more.
absl::StatusOr<Charge> ChargePart(const LoadedPlan& plan, size_t slot, const BudgetRef& budget) {
  if (plan.locations[slot].empty()) return Charge();  // it is in what the graph costs
  return budget->Charge(Domain::kHost, Resource::kGraphBytes,
                        MemoryOfLoadedPart(plan.plan.device_plans[slot]));
}

}  // namespace

Launcher::Launcher(Backend* backend, Background* background, std::function<void()> wake)
    : background_(background),
      wake_(std::move(wake)),
      launch_counts_(static_cast<size_t>(backend->device_count())),
      communicators_(std::make_shared<CommunicatorPool>(&executors_)) {
  for (int i = 0; i < backend->device_count(); ++i) {
    DeviceExecutorOptions options;
    options.dispose = [this](std::function<void()> take_apart) {
      background_->Do("", std::move(take_apart), [] {});
    };
    executors_.push_back(CreateDeviceExecutor(
        backend, i, [this](absl::string_view bytes) { OnCompletion(bytes); }, std::move(options)));
  }
}

// Whole gangs, or their devices would wait for each other.
Launcher::~Launcher() {
  while (Continue()) {
  }
}

absl::StatusOr<PlanId> Launcher::PlanOn(LoadedPlan* plan, int slot, DeviceIndex device,
                                        const BudgetRef& budget) {
  const size_t s = static_cast<size_t>(slot);
  if (const PlanId id = FindOn(*plan, s, device); id != PlanId()) return id;
  CHORUS_ASSIGN_OR_RETURN(Charge charge, ChargePart(*plan, s, budget));
  const PlanId id = ++last_plan_;
  CHORUS_RETURN_IF_ERROR(executor(device)->LoadPlan(id, plan->plan.device_plans[s]));
  plan->locations[s].emplace_back(device, id);
  loaded_.emplace(id, std::move(charge));
  return id;
}

absl::StatusOr<bool> Launcher::LoadPlan(const std::shared_ptr<LoadedPlan>& plan,
                                        absl::Span<const DeviceIndex> devices,
                                        const GraphStore::Client& client,
                                        const GraphStore::Waiting& waiting) {
  struct Part {
    size_t slot;
    Executor* executor;
    DeviceIndex device;
    PlanId id;
    Charge charge;
    absl::Status loaded;
  };
  std::vector<size_t> missing;
  for (size_t slot = 0; slot < devices.size(); ++slot) {
    if (FindOn(*plan, slot, devices[slot]) == PlanId()) missing.push_back(slot);
  }
  if (missing.empty()) return true;
  CHORUS_RETURN_IF_ERROR(waiting.failed);
  auto parts = std::make_shared<std::vector<Part>>();
  for (const size_t slot : missing) {
    CHORUS_ASSIGN_OR_RETURN(Charge charge, ChargePart(*plan, slot, client.budget));
    parts->push_back(
        {slot, executor(devices[slot]), devices[slot], ++last_plan_, std::move(charge), {}});
  }
  CHORUS_ASSIGN_OR_RETURN(GraphStore::OnMade later, waiting.wait());
  const std::vector<DeviceIndex> key(devices.begin(), devices.end());
  if (!plan->loading.Wait(key, std::move(later))) return false;
  background_->Do(
      client.tenant,
      [parts, bytes = &plan->plan.device_plans] {
        for (Part& part : *parts) {
          part.loaded = part.executor->LoadPlan(part.id, (*bytes)[part.slot]);
        }
      },
      [this, parts, plan, key] {
        absl::Status status;
        for (Part& part : *parts) {
          status.Update(part.loaded);
          if (!part.loaded.ok()) continue;
          loaded_.emplace(part.id, std::move(part.charge));
          // Others may have asked for it, together with other devices.
          if (FindOn(*plan, part.slot, part.device) != PlanId()) {
            UnloadPlan(part.device, part.id);
          } else {
            plan->locations[part.slot].emplace_back(part.device, part.id);
          }
        }
        plan->loading.Tell(key, status);
      });
  return false;
}

void Launcher::UnloadPlan(DeviceIndex device, PlanId plan) {
  executor(device)->UnloadPlan(plan);
  loaded_.erase(plan);
}

void Launcher::Launch(DeviceIndex device, const LaunchMessage& message) {
  ++launch_counts_[static_cast<size_t>(device.value())];
  scratch_.Clear();
  EncodeLaunch(message, &scratch_);
  const bool enqueued_whole = !executor(device)->Launch(scratch_.bytes());
  if (enqueued_whole) return;
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
  for (std::function<void()>& closure : posted) {
    const WorkSlice slice;
    closure();
  }
  return true;
}

}  // namespace chorus::node
