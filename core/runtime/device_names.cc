#include "core/runtime/device_names.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {

absl::Status DeviceNames::LoadPlan(PlanId id, absl::string_view bytes) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<DeviceProgram> plan, LoadProgram(bytes, device_));
  MutexLock lock(&loading_mutex_);
  if (!ids_.insert(id).second) {
    return Malformed(absl::StrCat("plan ", id.value(), " is loaded already"));
  }
  arrived_.emplace_back(id, std::move(plan));
  return absl::OkStatus();
}

// Takes in the plans loaded since the last one that was not among `plans_`.
DeviceProgram* DeviceNames::FindPlan(PlanId id) {
  auto it = plans_.find(id);
  if (it != plans_.end()) return it->second.get();
  std::vector<std::pair<PlanId, std::unique_ptr<DeviceProgram>>> arrived;
  {
    MutexLock lock(&loading_mutex_);
    arrived.swap(arrived_);
  }
  for (auto& loaded : arrived) plans_.insert(std::move(loaded));
  it = plans_.find(id);
  return it == plans_.end() ? nullptr : it->second.get();
}

std::shared_ptr<DeviceProgram> DeviceNames::TakePlan(PlanId id) {
  if (FindPlan(id) == nullptr) return nullptr;
  const auto it = plans_.find(id);
  std::shared_ptr<DeviceProgram> plan = std::move(it->second);
  plans_.erase(it);
  MutexLock lock(&loading_mutex_);
  ids_.erase(id);
  return plan;
}

absl::Status DeviceNames::OpenCommunicator(CommunicatorId id, absl::Span<const int> devices,
                                           int member) {
  if (communicators_.contains(id)) {
    return Malformed(absl::StrCat("communicator ", id.value(), " is open already"));
  }
  auto opened = backend_->OpenCommunicator(id.value(), devices, member);
  absl::Status status = opened.status();
  communicators_.emplace(id, std::move(opened));
  return status;
}

absl::StatusOr<const DeviceNames::OpenedCommunicator*> DeviceNames::FindCommunicator(
    CommunicatorId id) const {
  const auto communicator = communicators_.find(id);
  if (communicator != communicators_.end()) return &communicator->second;
  return UnknownName(absl::StrCat("communicator ", id.value()));
}

void DeviceNames::AbortCommunicator(CommunicatorId id, absl::Status why) {
  const auto it = communicators_.find(id);
  if (it != communicators_.end() && it->second.ok()) (*it->second)->Abort(std::move(why));
}

}  // namespace chorus
