#include "core/node/launcher.h"

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/types/variant.h"
#include "core/base/error.h"
#include "core/base/work.h"

namespace chorus::node {
namespace {

// A kernel is made of some forty of them, which takes a microsecond or two.
constexpr int64_t kPlanBytesOfWork = 3;

}  // namespace

Launcher::Launcher(Devices* devices, Background* background, std::function<void()> wake)
    : background_(background),
      wake_(std::move(wake)),
      at_once_bytes_(devices->info().at_once_bytes),
      launch_counts_(static_cast<size_t>(devices->info().count())),
      lost_plans_(launch_counts_.size()),
      communicators_(std::make_shared<CommunicatorPool>(&executors_)) {
  for (int i = 0; i < devices->info().count(); ++i) {
    executors_.push_back(devices->OpenExecutor(
        i, [this, i](absl::string_view bytes) { OnEvent(DeviceIndex(i), bytes); }, {}));
  }
}

Launcher::~Launcher() {
  // Whole gangs, or their devices would wait for each other.
  while (Continue()) {
  }
  // The last user of a plan unloads it.
  const auto loading = std::move(loading_);
  loading_.clear();
}

// Where the part for `slot` is on `device`. Invalid: nowhere.
PlanId Launcher::FindOn(const LoadedPlan& plan, size_t slot, DeviceIndex device) const {
  for (const auto& [where, id] : plan.locations[slot]) {
    if (where == device && !IsLost(where, id)) return id;
  }
  return PlanId();
}

// For the part for `slot` on one device more. Those that were lost with their devices cost nothing
// from now on.
absl::StatusOr<Charge> Launcher::ChargePart(const LoadedPlan& plan, size_t slot,
                                            const BudgetRef& budget) {
  bool is_first = plan.num_loading[slot] == 0;
  for (const auto& location : plan.locations[slot]) {
    if (IsLost(location.first, location.second)) {
      loaded_.erase(location.second);
    } else {
      is_first = false;
    }
  }
  if (is_first) return Charge();  // it is in what the graph costs
  return budget->Charge(Domain::kHost, Resource::kGraphBytes, MemoryOfLoadedPart(plan, slot));
}

// The row of a part that was lost stays until the part is there again: PlanOn() tells by it what
// has happened to a run that was prepared before.
void Launcher::SetLocation(LoadedPlan* plan, size_t slot, DeviceIndex device, PlanId id) {
  for (auto& location : plan->locations[slot]) {
    if (location.first != device) continue;
    location.second = id;
    return;
  }
  plan->locations[slot].emplace_back(device, id);
}

absl::StatusOr<PlanId> Launcher::PlanOn(const LoadedPlan& plan, int slot,
                                        DeviceIndex device) const {
  const PlanId id = FindOn(plan, static_cast<size_t>(slot), device);
  if (id != PlanId()) return id;
  const auto& locations = plan.locations[static_cast<size_t>(slot)];
  const bool was_there = std::any_of(locations.begin(), locations.end(),
                                     [device](const auto& at) { return at.first == device; });
  if (was_there) {
    return MakeError(Reason::kDeviceLost,
                     absl::StrCat("device ", device.value(), ": what was loaded there was lost"));
  }
  return MakeError(Reason::kInternal,
                   absl::StrCat("a plan's part for device slot ", slot,
                                " has not been loaded on device ", device.value()));
}

absl::StatusOr<bool> Launcher::LoadPlan(const std::shared_ptr<GraphRecord>& record,
                                        const std::shared_ptr<LoadedPlan>& variant,
                                        absl::Span<const DeviceIndex> devices,
                                        const GraphStore::Client& client,
                                        const GraphStore::Waiting& waiting) {
  LoadedPlan* const plan = variant != nullptr ? variant.get() : &record->main;
  absl::InlinedVector<size_t, 8> missing;
  for (size_t slot = 0; slot < devices.size(); ++slot) {
    if (FindOn(*plan, slot, devices[slot]) == PlanId()) missing.push_back(slot);
  }
  if (missing.empty()) return true;
  CHORUS_RETURN_IF_ERROR(waiting.failed);
  auto loading = std::make_shared<Loading>();
  loading->key.assign(devices.begin(), devices.end());
  if (!plan->loading.Has(loading->key)) {
    loading->plan = variant != nullptr ? variant : std::shared_ptr<LoadedPlan>(record, plan);
    loading->left = missing.size();
    std::vector<std::pair<PlanId, LoadingPart>> parts;
    for (const size_t slot : missing) {
      CHORUS_ASSIGN_OR_RETURN(Charge charge, ChargePart(*plan, slot, client.budget));
      parts.emplace_back(++last_plan_,
                         LoadingPart{loading, slot, devices[slot], std::move(charge)});
    }
    for (const size_t slot : missing) ++plan->num_loading[slot];
    // What is being loaded keeps the plan, on this thread alone.
    auto load = [this, bytes = &plan->plan.device_plans, missing, key = loading->key,
                 id = parts.front().first]() mutable {
      for (const size_t slot : missing) {
        CountWork(static_cast<int64_t>((*bytes)[slot].size()) / kPlanBytesOfWork);
        executor(key[slot])->LoadPlan(id, (*bytes)[slot]);
        ++id;
      }
    };
    for (auto& part : parts) loading_.insert(std::move(part));
    if (record->large && background_ != nullptr) {
      background_->Do(client.tenant, std::move(load), [] {});
    } else {
      load();
      TakeLoadedAtOnce(*loading);
      CHORUS_RETURN_IF_ERROR(loading->status);
      if (loading->left == 0) return true;
    }
  }
  CHORUS_ASSIGN_OR_RETURN(GraphStore::OnMade later, waiting.wait());
  loading->is_waited_for = true;
  plan->loading.Wait(loading->key, std::move(later));
  return false;
}

// What waits for other plans is told in its own time: this is in the middle of a command.
void Launcher::TakeLoadedAtOnce(const Loading& loading) {
  std::vector<LoadedMessage> messages;
  {
    MutexLock lock(&mutex_);
    std::vector<LoadedMessage> other_messages;
    for (LoadedMessage& message : events_.loaded.all) {
      const auto part = loading_.find(message.plan);
      const bool is_own = part != loading_.end() && part->second.loading.get() == &loading;
      (is_own ? messages : other_messages).push_back(std::move(message));
    }
    events_.loaded.all.swap(other_messages);
  }
  for (const LoadedMessage& message : messages) Take(message);
}

void Launcher::Take(const LoadedMessage& loaded) {
  auto node = loading_.extract(loaded.plan);
  if (node.empty()) return;
  LoadingPart& part = node.mapped();
  Loading& loading = *part.loading;
  loading.status.Update(loaded.status);
  --loading.plan->num_loading[part.slot];
  if (loaded.status.ok()) {
    loaded_.emplace(loaded.plan, std::move(part.charge));
    // Others may have asked for it, together with other devices. Or it was for devices that were
    // lost before it was sent, and their worker's successor has it under a number that means
    // nothing now.
    if (IsLost(part.device, loaded.plan) ||
        FindOn(*loading.plan, part.slot, part.device) != PlanId()) {
      LetGo(UnloadPlan(part.device, loaded.plan));
    } else {
      SetLocation(loading.plan.get(), part.slot, part.device, loaded.plan);
    }
  }
  if (--loading.left > 0) return;
  // Not before the callbacks have ended: they may be the last to use it.
  const std::shared_ptr<LoadedPlan> plan = std::move(loading.plan);
  if (loading.is_waited_for) plan->loading.Tell(loading.key, loading.status);
}

UnloadedPart Launcher::UnloadPlan(DeviceIndex device, PlanId plan) {
  UnloadedPart part;
  part.program = executor(device)->UnloadPlan(plan);
  const auto loaded = loaded_.find(plan);
  if (loaded != loaded_.end()) {
    part.charge = std::move(loaded->second);
    loaded_.erase(loaded);
  }
  return part;
}

void Launcher::LetGo(UnloadedPart part) {
  if (background_ == nullptr) return;
  auto charge = std::make_shared<Charge>(std::move(part.charge));
  background_->Do(
      "", [program = std::move(part.program)]() mutable { program.reset(); }, [charge] {});
}

void Launcher::Launch(DeviceIndex device, const LaunchMessage& message) {
  CountLaunch(device);
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

TransferId Launcher::Upload(DeviceIndex device, int32_t lane, DeviceAddress to, const void* from,
                            int64_t bytes, OnTransferred done) {
  const TransferId id = BeginTransfer(device, std::move(done));
  executor(device)->Upload(id, lane, to, from, bytes);
  return id;
}

void Launcher::Download(DeviceIndex device, int32_t lane, void* to, DeviceAddress from,
                        int64_t bytes, OnTransferred done) {
  executor(device)->Download(BeginTransfer(device, std::move(done)), lane, to, from, bytes,
                             LaunchId());
}

// What a transfer keeps alive counts its references on this thread alone: the executor gets no more
// than a number.
TransferId Launcher::BeginTransfer(DeviceIndex device, OnTransferred done) {
  transfers_.emplace(++last_transfer_, Transfer{device, std::move(done)});
  return last_transfer_;
}

void Launcher::Take(const TransferredMessage& transferred) {
  auto node = transfers_.extract(transferred.transfer);
  if (!node) return;
  const Transfer& transfer = node.mapped();
  transfer.done(transferred.status);
  // What waited for it has failed as well.
  if (!transferred.status.ok()) executor(transfer.device)->Settled(transferred.transfer);
}

// What was loaded there and opened is not there any more; what had been asked for has ended.
void Launcher::TakeLoss(DeviceIndex device) {
  lost_plans_[static_cast<size_t>(device.value())] = last_plan_;
  communicators_->Lost(device.value());
  executor(device)->Recover();
}

void Launcher::OnEvent(DeviceIndex device, absl::string_view bytes) {
  absl::StatusOr<EventMessage> event = DecodeEvent(bytes);
  if (!event.ok()) return;  // an executor of this build does not send such bytes
  {
    MutexLock lock(&mutex_);
    struct Add {
      void operator()(CompletionMessage& of) { events->completed.all.push_back(std::move(of)); }
      void operator()(LoadedMessage& of) { events->loaded.all.push_back(std::move(of)); }
      void operator()(OpenedMessage& of) { events->opened.all.push_back(std::move(of)); }
      void operator()(TransferredMessage& of) { events->transferred.all.push_back(std::move(of)); }
      void operator()(LostMessage&) { events->lost.all.push_back(device); }
      AllEvents* events;
      DeviceIndex device;
    };
    absl::visit(Add{&events_, device}, *event);
  }
  SetReady();
}

void Launcher::Post(std::function<void()> closure) {
  {
    MutexLock lock(&mutex_);
    events_.posted.all.push_back(std::move(closure));
  }
  SetReady();
}

void Launcher::SetReady() {
  // Sequentially consistent: a later look at whether the loop sleeps must not come before it.
  ready_.store(true, std::memory_order_seq_cst);
  wake_();
}

bool Launcher::Drain(absl::FunctionRef<void(const CompletionMessage&)> complete) {
  if (!some_are_left_) {
    if (!ready_.exchange(false, std::memory_order_acquire)) return false;
    MutexLock lock(&mutex_);
    taken_.completed.all.swap(events_.completed.all);
    taken_.loaded.all.swap(events_.loaded.all);
    taken_.opened.all.swap(events_.opened.all);
    taken_.transferred.all.swap(events_.transferred.all);
    taken_.lost.all.swap(events_.lost.all);
    taken_.posted.all.swap(events_.posted.all);
  }
  int64_t work = 0;
  // Whether these were all of a kind.
  const auto each = [&work](auto& events, auto take) {
    if (events.all.empty()) return true;
    for (; events.next < events.all.size() && work <= kTurnWork; ++events.next) {
      const WorkSlice slice;
      take(events.all[events.next]);
      work += SliceWork();
    }
    if (events.next < events.all.size()) return false;
    events.all.clear();
    events.next = 0;
    return true;
  };
  const bool all =
      each(taken_.posted,
           [](std::function<void()>& closure) {
             std::exchange(closure, nullptr)();  // with all that it holds
           }) &&
      each(taken_.opened,
           [this](const OpenedMessage& opened) {
             communicators_->OnOpened(opened.communicator, opened.status);
           }) &&
      each(taken_.loaded, [this](const LoadedMessage& loaded) { Take(loaded); }) &&
      each(taken_.transferred, [this](const TransferredMessage& done) { Take(done); }) &&
      each(taken_.lost, [this](DeviceIndex device) { TakeLoss(device); }) &&
      each(taken_.completed, complete);
  some_are_left_ = !all;
  // There is something for the next call, whichever thread asks.
  if (some_are_left_) ready_.store(true, std::memory_order_seq_cst);
  return true;
}

}  // namespace chorus::node
