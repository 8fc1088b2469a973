#include "core/backend/cuda/gpu_pool.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace chorus {

GpuPool::~GpuPool() {
  gpu_->Enter();
  const cuda::Api& api = gpu_->api();
  for (const cuda::Event event : events_) api.EventDestroy(event);
  for (const auto& slab : slabs_) {
    gpu_->FreePinned(slab->host);
    api.MemFree(slab->device);
  }
}

absl::StatusOr<GpuPool::Slab*> GpuPool::TakeSlab(int64_t bytes) {
  const auto fits = std::find_if(free_slabs_.begin(), free_slabs_.end(),
                                 [bytes](const Slab* slab) { return slab->bytes >= bytes; });
  if (fits != free_slabs_.end()) {
    Slab* const slab = *fits;
    *fits = free_slabs_.back();
    free_slabs_.pop_back();
    return slab;
  }
  auto slab = std::make_unique<Slab>();
  slab->bytes = std::max(bytes, kSlabBytes);
  CHORUS_ASSIGN_OR_RETURN(slab->host, gpu_->AllocatePinned(slab->bytes));
  const absl::Status status = gpu_->Check(
      gpu_->api().MemAlloc(&slab->device, static_cast<size_t>(slab->bytes)), "cuMemAlloc");
  if (!status.ok()) {
    gpu_->FreePinned(slab->host);
    return status;
  }
  slabs_.push_back(std::move(slab));
  return slabs_.back().get();
}

absl::StatusOr<cuda::Event> GpuPool::TakeEvent() {
  if (free_events_.empty()) {
    cuda::Event event = nullptr;
    CHORUS_CUDA(gpu_->api(), EventCreate, &event, cuda::kEventDisableTiming);
    events_.push_back(event);
    return event;
  }
  const cuda::Event event = free_events_.back();
  free_events_.pop_back();
  return event;
}

}  // namespace chorus
