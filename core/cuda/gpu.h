// One GPU as the backend uses it: its context, its kernels, what NVIDIA's libraries compute on it,
// pinned memory, and what it is.
//
// Threads: any; each calls Enter() before it calls the driver, for the context is a thread's.
// Ownership: the table must outlive the GPU, and the GPU what it made. Errors: as cuda_api.h says.
#ifndef CHORUS_CORE_CUDA_GPU_H_
#define CHORUS_CORE_CUDA_GPU_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/mutex.h"
#include "core/cuda/blas.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/dnn.h"

namespace chorus {

// Memory of the host that the GPU reads and writes as fast as it can, and where it finds it.
struct PinnedMemory {
  void* host = nullptr;
  cuda::DevicePtr device = 0;
};

// Kernels, compiled, as the driver loads them.
struct KernelImage {
  const void* begin = nullptr;
  size_t bytes = 0;
};

// NVIDIA's libraries that it does without where there are none: how each is found (null: it is
// not).
struct CudaLibraries {
  CudaBlas::Load blas;
  CudaDnn::Load dnn;
};

class CudaGpu {
 public:
  // FAILED_PRECONDITION kWrongState: there is no such GPU, or an image is empty, which is so where
  // the build had no CUDA toolkit.
  static absl::StatusOr<std::unique_ptr<CudaGpu>> Open(const cuda::Api* api, int ordinal,
                                                       absl::Span<const KernelImage> images,
                                                       CudaLibraries libraries);
  ~CudaGpu();
  CudaGpu(const CudaGpu&) = delete;
  CudaGpu& operator=(const CudaGpu&) = delete;

  const cuda::Api& api() const { return *api_; }
  cuda::Device device() const { return device_; }
  const std::string& name() const { return name_; }      // "NVIDIA H100 80GB HBM3"
  const std::string& pci_id() const { return pci_id_; }  // "0000:00:06.0"
  int multiprocessors() const { return multiprocessors_; }
  int64_t memory_bytes() const { return memory_bytes_; }

  // Makes the context this thread's.
  void Enter() const { api_->CtxSetCurrent(context_); }
  absl::Status Check(cuda::Result result, const char* call) const {
    return cuda::ToStatus(*api_, result, call);
  }

  // INTERNAL kInternal: none of the images has such a kernel. The first time it may take as long as
  // what the GPU has to do, for the driver may have to load the kernel.
  absl::StatusOr<cuda::Function> Find(const std::string& kernel) const ABSL_LOCKS_EXCLUDED(mutex_);
  // The kernel with its one parameter, by at least one thread and no more than are of use: kernels
  // go on from where their grid ends.
  template <typename Args>
  absl::Status Launch(cuda::Function function, const Args& args, int64_t threads,
                      cuda::Stream stream) const {
    void* params[] = {const_cast<Args*>(&args)};
    return LaunchWith(function, params, threads, stream);
  }

  // Null: not by cuBLASLt (blas.h).
  std::unique_ptr<BlasProduct> MakeProduct(const BlasProblem& problem) const;
  // Null: not by cuDNN; else as dnn.h says.
  absl::StatusOr<std::unique_ptr<DnnConvolution>> MakeConvolution(const DnnProblem& problem) const;

  absl::StatusOr<PinnedMemory> AllocatePinned(int64_t bytes) const;
  void FreePinned(const PinnedMemory& memory) const;
  // Pins memory of the host that is there, so that its bytes are moved without a copy in between,
  // until it is unpinned; nothing may be on its way then. The driver's error.
  absl::Status Pin(const void* memory, int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void Unpin(const void* memory) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for nothing that the driver does.
  bool IsPinned(const void* memory, int64_t bytes) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  CudaGpu(const cuda::Api* api, CudaLibraries libraries)
      : api_(api),
        blas_(std::make_unique<CudaBlas>(std::move(libraries.blas))),
        dnn_(std::make_unique<CudaDnn>(std::move(libraries.dnn))) {}
  absl::Status Fill(int ordinal, absl::Span<const KernelImage> images);
  absl::Status LaunchWith(cuda::Function function, void** params, int64_t threads,
                          cuda::Stream stream) const;

  const cuda::Api* const api_;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  std::vector<cuda::Module> modules_;
  std::unique_ptr<CudaBlas> blas_;
  std::unique_ptr<CudaDnn> dnn_;
  // Not held where the driver is called.
  mutable Mutex mutex_;
  // Those that were asked for.
  mutable absl::flat_hash_map<std::string, cuda::Function> functions_ ABSL_GUARDED_BY(mutex_);
  std::map<const char*, int64_t> pinned_ ABSL_GUARDED_BY(mutex_);  // bytes, by where they begin
  std::string name_;
  std::string pci_id_;
  int multiprocessors_ = 1;
  int64_t memory_bytes_ = 0;
};

}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_GPU_H_
