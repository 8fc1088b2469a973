#include "core/node/communicators.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus::node {
namespace {

// With its ends at the executors and one call under way.
int64_t MemoryOf(const std::vector<int>& devices) {
  return 1024 * (1 + static_cast<int64_t>(devices.size()));
}

}  // namespace

CommunicatorId CommunicatorPool::Take(const std::vector<int>& devices, CommunicatorLease* lease) {
  const auto idle = std::find_if(idle_.begin(), idle_.end(),
                                 [&devices](const auto& entry) { return entry.first == devices; });
  CommunicatorId id;
  if (idle != idle_.end()) {
    id = idle->second;
    idle_.erase(idle);
  } else {
    id = ++last_;
    for (size_t member = 0; member < devices.size(); ++member) {
      executor(devices[member]).OpenCommunicator(id, devices, static_cast<int>(member));
    }
  }
  leased_.emplace(id, lease);
  return id;
}

void CommunicatorPool::GiveBack(std::vector<int> devices, CommunicatorId id) {
  leased_.erase(id);
  idle_.emplace_back(std::move(devices), id);
  if (idle_.size() <= kMaxIdle) return;
  Close(idle_.front().first, idle_.front().second);
  idle_.pop_front();
}

void CommunicatorPool::OnOpened(CommunicatorId id, const absl::Status& status) {
  if (status.ok()) return;
  if (const auto leased = leased_.find(id); leased != leased_.end()) {
    return leased->second->Drop(id, status);
  }
  const auto idle = std::find_if(idle_.begin(), idle_.end(),
                                 [id](const auto& entry) { return entry.second == id; });
  if (idle == idle_.end()) return;
  Close(idle->first, id);
  idle_.erase(idle);
}

void CommunicatorPool::Drop(const std::vector<int>& devices, CommunicatorId id,
                            const absl::Status& why) {
  leased_.erase(id);
  for (const int device : devices) executor(device).AbortCommunicator(id, why);
  Close(devices, id);
}

void CommunicatorPool::Lost(int device) {
  const absl::Status why =
      MakeError(Reason::kDeviceLost, absl::StrCat("device ", device, " is lost"));
  // A lease that drops one changes the list.
  std::vector<std::pair<CommunicatorLease*, CommunicatorId>> leased;
  for (const auto& [id, lease] : leased_) {
    if (lease->IsOn(device, id)) leased.emplace_back(lease, id);
  }
  for (const auto& [lease, id] : leased) lease->Drop(id, why);
  const auto is_on = [&](const auto& entry) {
    return std::find(entry.first.begin(), entry.first.end(), device) != entry.first.end();
  };
  for (const auto& entry : idle_) {
    if (is_on(entry)) Close(entry.first, entry.second);
  }
  idle_.erase(std::remove_if(idle_.begin(), idle_.end(), is_on), idle_.end());
}

void CommunicatorPool::Close(const std::vector<int>& devices, CommunicatorId id) {
  for (const int device : devices) executor(device).CloseCommunicator(id);
}

CommunicatorLease::~CommunicatorLease() {
  const std::shared_ptr<CommunicatorPool> pool = pool_.lock();
  if (pool == nullptr) return;
  for (auto& entry : devices_of_) pool->GiveBack(std::move(entry.second), entry.first);
}

absl::Status CommunicatorLease::Cover(int64_t bytes) {
  return charge_.Cover(std::max<int64_t>(0, bytes - kNotCharged));
}

absl::StatusOr<CommunicatorId> CommunicatorLease::Of(absl::Span<const DeviceIndex> devices) {
  std::vector<int> key;
  key.reserve(devices.size());
  for (const DeviceIndex device : devices) key.push_back(device.value());
  const auto it = by_devices_.find(key);
  if (it != by_devices_.end()) return it->second;
  const std::shared_ptr<CommunicatorPool> pool = pool_.lock();
  if (pool == nullptr) return MakeError(Reason::kInternal, "the node has ended");
  const int64_t bytes = bytes_ + MemoryOf(key);
  CHORUS_RETURN_IF_ERROR(Cover(bytes));
  const CommunicatorId id = pool->Take(key, this);
  bytes_ = bytes;
  devices_of_.emplace(id, key);
  by_devices_.emplace(std::move(key), id);
  return id;
}

CommunicatorId& CommunicatorLease::OfGroup(GroupId group) {
  const auto index = static_cast<size_t>(group.value());
  if (by_group_.size() <= index) by_group_.resize(index + 1);
  return by_group_[index];
}

bool CommunicatorLease::IsOn(int device, CommunicatorId id) const {
  const auto it = devices_of_.find(id);
  return it != devices_of_.end() &&
         std::find(it->second.begin(), it->second.end(), device) != it->second.end();
}

void CommunicatorLease::Drop(CommunicatorId id, const absl::Status& why) {
  const auto it = devices_of_.find(id);
  if (it == devices_of_.end()) return;
  if (const std::shared_ptr<CommunicatorPool> pool = pool_.lock()) pool->Drop(it->second, id, why);
  bytes_ -= MemoryOf(it->second);
  (void)Cover(bytes_);  // less never fails
  by_devices_.erase(it->second);
  devices_of_.erase(it);
  by_group_.clear();
}

}  // namespace chorus::node
