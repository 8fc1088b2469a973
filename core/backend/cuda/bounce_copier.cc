#include "core/backend/cuda/bounce_copier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.h"

namespace chorus {

absl::StatusOr<std::unique_ptr<BounceCopier>> BounceCopier::Create(const CudaGpu* gpu) {
  std::unique_ptr<BounceCopier> copier(new BounceCopier(gpu));
  for (Buffer& buffer : copier->buffers_) {
    CHORUS_ASSIGN_OR_RETURN(buffer.memory, gpu->AllocatePinned(kBufferBytes));
    CHORUS_CUDA(gpu->api(), EventCreate, &buffer.last_use,
                cuda::kEventDisableTiming | cuda::kEventBlockingSync);
  }
  copier->thread_ = std::thread([raw = copier.get()] { raw->Work(); });
  return copier;
}

BounceCopier::~BounceCopier() {
  Stop();
  gpu_->Enter();
  for (const Buffer& buffer : buffers_) {
    if (buffer.last_use != nullptr) gpu_->api().EventDestroy(buffer.last_use);
    gpu_->FreePinned(buffer.memory);
  }
}

void BounceCopier::Stop() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(&mutex_);
    ends_ = true;
  }
  changed_.Signal();
  thread_.join();
}

void BounceCopier::Add(Copy copy) {
  MutexLock lock(&mutex_);
  copies_.push_back(std::move(copy));
  changed_.Signal();
}

void BounceCopier::Work() {
  gpu_->Enter();
  Answer answer;
  MutexLock lock(&mutex_);
  while (true) {
    while (copies_.empty() && !ends_) changed_.Wait(&mutex_);
    if (ends_) return;
    const Copy copy = std::move(copies_.front());
    copies_.pop_front();
    mutex_.Unlock();
    if (!answer.loses_order) answer = Bring(copy);
    copy.done(answer);
    mutex_.Lock();
  }
}

BounceCopier::Answer BounceCopier::Bring(const Copy& copy) {
  const cuda::Api& api = gpu_->api();
  const int64_t pieces = (copy.bytes + kBufferBytes - 1) / kBufferBytes;
  const auto buffer_of = [&](int64_t piece) -> const Buffer& { return buffers_[piece % 2]; };
  const auto host_of = [&](int64_t piece) {
    return static_cast<char*>(copy.host) + piece * kBufferBytes;
  };
  const auto bytes_of = [&](int64_t piece) {
    return static_cast<size_t>(std::min(kBufferBytes, copy.bytes - piece * kBufferBytes));
  };
  Answer answer;
  // Whether the driver did what it was asked for.
  const auto is_done = [&](cuda::Result result, const char* call) {
    answer.result = result;
    answer.call = call;
    return result == cuda::Result::kSuccess;
  };
  // To the host a piece is taken out of its buffer when the next is on its way.
  for (int64_t piece = 0; piece <= pieces; ++piece) {
    if (piece < pieces) {
      const Buffer& buffer = buffer_of(piece);
      const cuda::DevicePtr device =
          copy.device + static_cast<cuda::DevicePtr>(piece * kBufferBytes);
      // Of the last copy too, whosever it was.
      if (!is_done(api.EventSynchronize(buffer.last_use), "cuEventSynchronize")) return answer;
      if (copy.from_host) {
        std::memcpy(buffer.memory.host, host_of(piece), bytes_of(piece));
        if (!is_done(api.MemcpyHtoDAsync(device, buffer.memory.host, bytes_of(piece), copy.stream),
                     "cuMemcpyHtoDAsync")) {
          return answer;
        }
      } else if (!is_done(
                     api.MemcpyDtoHAsync(buffer.memory.host, device, bytes_of(piece), copy.stream),
                     "cuMemcpyDtoHAsync")) {
        return answer;
      }
      if (!is_done(api.EventRecord(buffer.last_use, copy.stream), "cuEventRecord")) {
        answer.loses_order = true;
        return answer;
      }
    }
    if (copy.from_host || piece == 0) continue;
    const Buffer& previous = buffer_of(piece - 1);
    if (!is_done(api.EventSynchronize(previous.last_use), "cuEventSynchronize")) return answer;
    std::memcpy(host_of(piece - 1), previous.memory.host, bytes_of(piece - 1));
  }
  return answer;
}

}  // namespace chorus
