// Moves bytes between the GPU and memory of the host that is not pinned: by way of two buffers that
// are, on a thread of its own, so that a caller that enqueues a copy does not wait for its bytes.
//
// Threads: any; a thread of its own, on which it calls what it was given, with no lock held.
// Ownership: streams and both ends of a copy are the caller's, and stay until `done`; buffers are
//   read until the streams have ended: Stop() first, then these, then the destructor. The GPU must
//   outlive it.
// Errors: said at each function.
#ifndef CHORUS_CORE_BACKEND_CUDA_BOUNCE_COPIER_H_
#define CHORUS_CORE_BACKEND_CUDA_BOUNCE_COPIER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "core/base/mutex.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/gpu.h"

namespace chorus {

class BounceCopier {
 public:
  // What became of a copy.
  struct Answer {
    cuda::Result result = cuda::Result::kSuccess;  // the driver's first refusal, if any
    const char* call = nullptr;                    // that was refused
    // Nobody knows when a stream will have left a buffer, so that another copy's bytes could come
    // into it. Every later copy is refused alike: the caller has to give up what it has.
    bool loses_order = false;
  };
  struct Copy {
    cuda::Stream stream = nullptr;
    bool from_host = false;
    void* host = nullptr;  // only read where the bytes come from there
    cuda::DevicePtr device = 0;
    int64_t bytes = 0;
    // To the host: the bytes are there. From it: they have been taken, and the stream brings them.
    std::function<void(const Answer& answer)> done;
  };
  // The driver's error: there is no pinned memory, or no event.
  static absl::StatusOr<std::unique_ptr<BounceCopier>> Create(const CudaGpu* gpu);
  ~BounceCopier();
  BounceCopier(const BounceCopier&) = delete;
  BounceCopier& operator=(const BounceCopier&) = delete;

  // Copies come in the order in which they are added.
  void Add(Copy copy) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the thread behind the copy that it is at. The others are dropped.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Buffer {
    PinnedMemory memory;
    cuda::Event last_use = nullptr;  // whatever the GPU last did with it
  };

  explicit BounceCopier(const CudaGpu* gpu) : gpu_(gpu) {}
  void Work() ABSL_LOCKS_EXCLUDED(mutex_);
  Answer Bring(const Copy& copy);

  static constexpr int64_t kBufferBytes = int64_t{1} << 20;

  const CudaGpu* const gpu_;
  Buffer buffers_[2];

  Mutex mutex_;
  CondVar changed_;
  std::deque<Copy> copies_ ABSL_GUARDED_BY(mutex_);
  bool ends_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_BOUNCE_COPIER_H_
