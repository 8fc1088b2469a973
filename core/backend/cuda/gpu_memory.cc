#include "core/backend/cuda/gpu_memory.h"

#include <algorithm>

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
  ranges_.Add(chunk.address, chunk_bytes);
  return absl::OkStatus();
}

absl::StatusOr<DeviceAddress> GpuMemory::Allocate(int64_t bytes) {
  if (bytes < 0) return BadType(absl::StrCat("an allocation of ", bytes, " bytes"));
  if (bytes == 0) return DeviceAddress{0};
  MutexLock lock(&mutex_);
  const auto refuse = [&](absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return MakeError(Reason::kOutOfMemory, absl::StrCat("GPU ", gpu_->pci_id(), ": need ", bytes,
                                                        " bytes, ", limit_ - ranges_.taken_bytes(),
                                                        " of ", limit_, " are free", why));
  };
  if (bytes > limit_ - ranges_.taken_bytes()) return refuse("");
  if (const absl::optional<uint64_t> address = ranges_.Take(bytes)) return *address;
  // A hole at the end becomes part of the new chunk.
  const int64_t last = ranges_.HoleBefore(begin_ + static_cast<DeviceAddress>(mapped_bytes_));
  if (const absl::Status grown = Grow(ranges_.Rounded(bytes) - last); !grown.ok()) {
    return refuse(absl::StrCat("; ", grown.message()));
  }
  return *ranges_.Take(bytes);
}

void GpuMemory::Free(DeviceAddress address) {
  if (address == 0) return;
  MutexLock lock(&mutex_);
  ranges_.GiveBack(address);
}

absl::Status GpuMemory::Check(DeviceAddress address, int64_t bytes) const {
  MutexLock lock(&mutex_);
  if (ranges_.InOnePiece(address, bytes)) return absl::OkStatus();
  return MakeError(Reason::kInternal,
                   absl::StrCat("GPU ", gpu_->pci_id(), ": ", bytes, " bytes at ",
                                absl::Hex(address), " are not memory that was allocated"));
}

}  // namespace chorus
