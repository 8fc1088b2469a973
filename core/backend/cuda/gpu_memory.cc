#include "core/backend/cuda/gpu_memory.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

int64_t RoundUp(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

cuda::AllocationProperties PropertiesFor(const CudaGpu& gpu) {
  cuda::AllocationProperties properties;
  properties.requested_handles = cuda::HandleType::kFileDescriptor;
  properties.location.id = gpu.device();
  return properties;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuMemory>> GpuMemory::Create(const CudaGpu* gpu,
                                                             int64_t limit_bytes,
                                                             int64_t chunk_bytes) {
  gpu->Enter();
  const cuda::AllocationProperties properties = PropertiesFor(*gpu);
  size_t granularity = 0;
  CHORUS_CUDA(gpu->api(), MemGetAllocationGranularity, &granularity, &properties,
              cuda::Granularity::kRecommended);
  std::unique_ptr<GpuMemory> memory(new GpuMemory(gpu, limit_bytes));
  const auto unit = static_cast<int64_t>(granularity);
  memory->chunk_bytes_ = RoundUp(std::max<int64_t>(chunk_bytes, 1), unit);
  // Pieces are rounded up, and holes may be too small for the last of them.
  memory->reserved_bytes_ = RoundUp(2 * limit_bytes, memory->chunk_bytes_);
  CHORUS_CUDA(gpu->api(), MemAddressReserve, &memory->begin_,
              static_cast<size_t>(memory->reserved_bytes_), 0, 0, 0);
  return memory;
}

GpuMemory::~GpuMemory() {
  gpu_->Enter();
  for (const Chunk& chunk : chunks_) {
    gpu_->api().MemUnmap(chunk.address, static_cast<size_t>(chunk.bytes));
    gpu_->api().MemRelease(chunk.handle);
  }
  if (begin_ != 0) gpu_->api().MemAddressFree(begin_, static_cast<size_t>(reserved_bytes_));
}

void GpuMemory::AddHole(DeviceAddress address, int64_t bytes) {
  if (bytes == 0) return;
  auto next = holes_.lower_bound(address);
  if (next != holes_.end() && address + static_cast<DeviceAddress>(bytes) == next->first) {
    bytes += next->second;
    RemoveHole(next++);
  }
  if (next != holes_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + static_cast<DeviceAddress>(previous->second) == address) {
      address = previous->first;
      bytes += previous->second;
      RemoveHole(previous);
    }
  }
  holes_[address] = bytes;
  holes_by_size_.emplace(bytes, address);
}

void GpuMemory::RemoveHole(std::map<DeviceAddress, int64_t>::iterator hole) {
  holes_by_size_.erase({hole->second, hole->first});
  holes_.erase(hole);
}

absl::Status GpuMemory::Grow(int64_t bytes) {
  const int64_t chunk_bytes = RoundUp(bytes, chunk_bytes_);
  if (mapped_bytes_ + chunk_bytes > reserved_bytes_) {
    return MakeError(Reason::kOutOfMemory, "all addresses are taken");
  }
  const cuda::Api& api = gpu_->api();
  const cuda::AllocationProperties properties = PropertiesFor(*gpu_);
  Chunk chunk;
  chunk.bytes = chunk_bytes;
  chunk.address = begin_ + static_cast<DeviceAddress>(mapped_bytes_);
  const auto size = static_cast<size_t>(chunk_bytes);
  gpu_->Enter();
  CHORUS_CUDA(api, MemCreate, &chunk.handle, size, &properties, 0);
  absl::Status status =
      gpu_->Check(api.MemMap(chunk.address, size, 0, chunk.handle, 0), "cuMemMap");
  if (status.ok()) {
    cuda::AccessDescription access;
    access.location.id = gpu_->device();
    status = gpu_->Check(api.MemSetAccess(chunk.address, size, &access, 1), "cuMemSetAccess");
    if (!status.ok()) api.MemUnmap(chunk.address, size);
  }
  if (!status.ok()) {
    api.MemRelease(chunk.handle);
    return status;
  }
  chunks_.push_back(chunk);
  mapped_bytes_ += chunk_bytes;
  AddHole(chunk.address, chunk_bytes);
  return absl::OkStatus();
}

absl::StatusOr<DeviceAddress> GpuMemory::Allocate(int64_t bytes) {
  if (bytes < 0) return BadType(absl::StrCat("an allocation of ", bytes, " bytes"));
  if (bytes == 0) return DeviceAddress{0};
  MutexLock lock(&mutex_);
  const auto refuse = [&](absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return MakeError(Reason::kOutOfMemory,
                     absl::StrCat("GPU ", gpu_->pci_id(), ": need ", bytes, " bytes, ",
                                  limit_ - used_bytes_, " of ", limit_, " are free", why));
  };
  if (bytes > limit_ - used_bytes_) return refuse("");
  const int64_t taken = RoundUp(bytes, kAlignment);
  auto best = holes_by_size_.lower_bound({taken, 0});
  if (best == holes_by_size_.end()) {
    // A hole at the end becomes part of the new chunk.
    int64_t last = 0;
    if (!holes_.empty()) {
      const auto& hole = *holes_.rbegin();
      const DeviceAddress end = begin_ + static_cast<DeviceAddress>(mapped_bytes_);
      if (hole.first + static_cast<DeviceAddress>(hole.second) == end) last = hole.second;
    }
    if (const absl::Status grown = Grow(taken - last); !grown.ok()) {
      return refuse(absl::StrCat("; ", grown.message()));
    }
    best = holes_by_size_.lower_bound({taken, 0});
  }
  const DeviceAddress address = best->second;
  const int64_t hole_bytes = best->first;
  RemoveHole(holes_.find(address));
  AddHole(address + static_cast<DeviceAddress>(taken), hole_bytes - taken);
  live_[address] = bytes;
  used_bytes_ += bytes;
  return address;
}

void GpuMemory::Free(DeviceAddress address) {
  if (address == 0) return;
  MutexLock lock(&mutex_);
  const auto it = live_.find(address);
  if (it == live_.end()) return;
  used_bytes_ -= it->second;
  AddHole(address, RoundUp(it->second, kAlignment));
  live_.erase(it);
}

absl::Status GpuMemory::Check(DeviceAddress address, int64_t bytes) const {
  MutexLock lock(&mutex_);
  auto it = live_.upper_bound(address);
  if (it != live_.begin()) {
    --it;
    const auto offset = static_cast<int64_t>(address - it->first);
    if (offset <= it->second && bytes <= it->second - offset) return absl::OkStatus();
  }
  return MakeError(Reason::kInternal,
                   absl::StrCat("GPU ", gpu_->pci_id(), ": ", bytes, " bytes at ",
                                absl::Hex(address), " are not memory that was allocated"));
}

}  // namespace chorus
