#include "core/backend/cuda/cuda_backend.h"

#include <algorithm>
#include <utility>

#include "core/backend/backend_options.h"
#include "core/backend/cuda/cuda_engine.h"
#include "core/backend/cuda/gpu_memory.h"
#include "core/base/error.h"

namespace chorus {
namespace {

class CudaDevice : public Device {
 public:
  CudaDevice(int index, const CudaGpu* gpu, GpuMemory* memory, CudaEngine* engine,
             CudaKernelFactory make_kernel)
      : index_(index), gpu_(gpu), memory_(memory), engine_(engine), make_kernel_(make_kernel) {}

  absl::StatusOr<DeviceAddress> Allocate(int64_t bytes) override {
    return memory_->Allocate(bytes);
  }
  void Free(DeviceAddress address) override { memory_->Free(address); }
  std::unique_ptr<Stream> CreateStream() override { return engine_->CreateStream(index_); }
  std::unique_ptr<Event> CreateEvent() override { return engine_->CreateEvent(); }
  absl::StatusOr<std::unique_ptr<Kernel>> MakeKernel(
      const NodeView& node, absl::Span<const TensorType> outputs) override {
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Kernel> kernel, make_kernel_(*gpu_, node, outputs));
    return kernel;
  }

 private:
  const int index_;
  const CudaGpu* const gpu_;
  GpuMemory* const memory_;
  CudaEngine* const engine_;
  const CudaKernelFactory make_kernel_;
};

class CudaBackend : public Backend {
 public:
  static absl::StatusOr<std::unique_ptr<Backend>> Create(const CudaBackendOptions& options) {
    CHORUS_RETURN_IF_ERROR(CheckDeviceCount(options.devices));
    auto backend = std::unique_ptr<CudaBackend>(new CudaBackend(options.make_kernel));
    CHORUS_ASSIGN_OR_RETURN(
        backend->gpu_, CudaGpu::Open(options.api, options.gpu, options.images, options.libraries));
    int64_t memory_bytes = options.memory_bytes;
    if (memory_bytes == 0) {
      backend->gpu_->Enter();
      size_t free = 0;
      size_t total = 0;
      CHORUS_CUDA(*options.api, MemGetInfo, &free, &total);
      memory_bytes = static_cast<int64_t>(free / 10 * 9);
    }
    CHORUS_ASSIGN_OR_RETURN(backend->memory_, GpuMemory::Create(backend->gpu_.get(), memory_bytes,
                                                                options.chunk_bytes));
    CHORUS_ASSIGN_OR_RETURN(
        backend->engine_,
        CudaEngine::Create(backend->gpu_.get(), backend->memory_.get(), options.devices));
    for (int i = 0; i < options.devices; ++i) {
      backend->devices_.push_back(
          std::make_unique<CudaDevice>(i, backend->gpu_.get(), backend->memory_.get(),
                                       backend->engine_.get(), options.make_kernel));
    }
    return std::unique_ptr<Backend>(std::move(backend));
  }

  absl::string_view name() const override { return "cuda"; }
  int device_count() const override { return static_cast<int>(devices_.size()); }
  int cores_per_device() const override { return gpu_->multiprocessors(); }
  Device* device(int index) override { return devices_[static_cast<size_t>(index)].get(); }
  bool host_addressable() const override { return false; }
  int domain(int /*device*/) const override { return 0; }
  absl::Status lost() const override { return engine_->lost(); }
  absl::StatusOr<int64_t> WorkspaceBytes(const NodeView& node,
                                         absl::Span<const TensorType> outputs) const override {
    CHORUS_ASSIGN_OR_RETURN(const std::unique_ptr<CudaKernel> kernel,
                            make_kernel_(*gpu_, node, outputs));
    return kernel->workspace_bytes();
  }
  absl::StatusOr<std::unique_ptr<Communicator>> OpenCommunicator(uint64_t id,
                                                                 absl::Span<const int> devices,
                                                                 int member) override {
    CHORUS_RETURN_IF_ERROR(CheckDevices(*this, id, devices));
    return engine_->OpenCommunicator(id, devices, member);
  }

 private:
  explicit CudaBackend(CudaKernelFactory make_kernel) : make_kernel_(make_kernel) {}

  const CudaKernelFactory make_kernel_;
  // Each uses those before it.
  std::unique_ptr<CudaGpu> gpu_;
  std::unique_ptr<GpuMemory> memory_;
  std::unique_ptr<CudaEngine> engine_;
  std::vector<std::unique_ptr<CudaDevice>> devices_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaBackendOptions& options) {
  return CudaBackend::Create(options);
}

}  // namespace chorus
