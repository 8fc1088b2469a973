#include "core/cuda/gpu.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/device.h"
#include "core/base/error.h"

namespace chorus {
namespace {

// Four waves of them: several were faster than one (docs/gpu.md, P6).
constexpr int64_t kThreadsPerMultiprocessor = 4 * 2048;

}  // namespace

absl::StatusOr<std::unique_ptr<CudaGpu>> CudaGpu::Open(const cuda::Api* api, int ordinal,
                                                       absl::Span<const KernelImage> images,
                                                       CudaLibraries libraries) {
  std::unique_ptr<CudaGpu> gpu(new CudaGpu(api, std::move(libraries)));
  CHORUS_RETURN_IF_ERROR(gpu->Fill(ordinal, images));
  return gpu;
}

absl::Status CudaGpu::Fill(int ordinal, absl::Span<const KernelImage> images) {
  CHORUS_CUDA(*api_, Init, 0);
  int count = 0;
  CHORUS_CUDA(*api_, DeviceGetCount, &count);
  if (ordinal < 0 || ordinal >= count) {
    return MakeError(Reason::kWrongState,
                     absl::StrCat("there is no GPU ", ordinal, ": this machine has ", count));
  }
  for (const KernelImage& image : images) {
    if (image.bytes > 0) continue;
    return MakeError(Reason::kWrongState,
                     "this build has no kernels for GPUs: it was made without a CUDA toolkit");
  }
  CHORUS_CUDA(*api_, DeviceGet, &device_, ordinal);
  char text[256] = {};
  CHORUS_CUDA(*api_, DeviceGetName, text, sizeof(text) - 1, device_);
  name_ = text;
  CHORUS_CUDA(*api_, DeviceGetPCIBusId, text, sizeof(text) - 1, device_);
  pci_id_ = text;
  size_t bytes = 0;
  CHORUS_CUDA(*api_, DeviceTotalMem, &bytes, device_);
  memory_bytes_ = static_cast<int64_t>(bytes);
  CHORUS_CUDA(*api_, DeviceGetAttribute, &multiprocessors_,
              cuda::DeviceAttribute::kMultiprocessorCount, device_);
  CHORUS_CUDA(*api_, DevicePrimaryCtxRetain, &context_, device_);
  Enter();
  for (const KernelImage& image : images) {
    cuda::Module module = nullptr;
    CHORUS_CUDA(*api_, ModuleLoadData, &module, image.begin);
    modules_.push_back(module);
  }
  return absl::OkStatus();
}

CudaGpu::~CudaGpu() {
  if (context_ == nullptr) return;
  Enter();
  blas_ = nullptr;
  dnn_ = nullptr;
  for (const cuda::Module module : modules_) api_->ModuleUnload(module);
  for (const auto& pinned : pinned_) api_->MemHostUnregister(const_cast<char*>(pinned.first));
  api_->DevicePrimaryCtxRelease(device_);
}

absl::StatusOr<cuda::Function> CudaGpu::Find(const std::string& kernel) const {
  {
    MutexLock lock(&mutex_);
    const auto it = functions_.find(kernel);
    if (it != functions_.end()) return it->second;
  }
  Enter();
  for (const cuda::Module module : modules_) {
    cuda::Function function = nullptr;
    const cuda::Result result = api_->ModuleGetFunction(&function, module, kernel.c_str());
    if (result != cuda::Result::kSuccess) continue;
    MutexLock lock(&mutex_);
    functions_[kernel] = function;
    return function;
  }
  return MakeError(Reason::kInternal, absl::StrCat("this build has no kernel ", kernel));
}

absl::Status CudaGpu::LaunchWith(cuda::Function function, void** params, int64_t threads,
                                 cuda::Stream stream) const {
  const int64_t most = kThreadsPerMultiprocessor * int64_t{multiprocessors_};
  const int64_t blocks = (std::min(threads, most) + cuda::kBlockThreads - 1) / cuda::kBlockThreads;
  CHORUS_CUDA(*api_, LaunchKernel, function,
              static_cast<unsigned int>(std::max<int64_t>(1, blocks)), 1, 1, cuda::kBlockThreads, 1,
              1, 0, stream, params, nullptr);
  return absl::OkStatus();
}

std::unique_ptr<BlasProduct> CudaGpu::MakeProduct(const BlasProblem& problem) const {
  Enter();
  return blas_->Make(problem);
}

absl::StatusOr<std::unique_ptr<DnnConvolution>> CudaGpu::MakeConvolution(
    const DnnProblem& problem) const {
  Enter();
  return dnn_->Make(problem);
}

absl::StatusOr<PinnedMemory> CudaGpu::AllocatePinned(int64_t bytes) const {
  Enter();
  PinnedMemory memory;
  CHORUS_CUDA(*api_, MemHostAlloc, &memory.host, static_cast<size_t>(bytes),
              cuda::kHostAllocPortable | cuda::kHostAllocDeviceMap);
  const absl::Status status = Check(api_->MemHostGetDevicePointer(&memory.device, memory.host, 0),
                                    "cuMemHostGetDevicePointer");
  if (status.ok()) return memory;
  api_->MemFreeHost(memory.host);
  return status;
}

void CudaGpu::FreePinned(const PinnedMemory& memory) const {
  if (memory.host == nullptr) return;
  Enter();
  api_->MemFreeHost(memory.host);
}

absl::Status CudaGpu::Pin(const void* memory, int64_t bytes) {
  Enter();
  const auto* const begin = static_cast<const char*>(memory);
  CHORUS_CUDA(*api_, MemHostRegister, const_cast<char*>(begin), static_cast<size_t>(bytes),
              cuda::kHostRegisterPortable);
  MutexLock lock(&mutex_);
  pinned_[begin] = bytes;
  return absl::OkStatus();
}

void CudaGpu::Unpin(const void* memory) {
  const auto* const begin = static_cast<const char*>(memory);
  {
    MutexLock lock(&mutex_);
    if (pinned_.erase(begin) == 0) return;
  }
  Enter();
  api_->MemHostUnregister(const_cast<char*>(begin));
}

bool CudaGpu::IsPinned(const void* memory, int64_t bytes) const {
  MutexLock lock(&mutex_);
  const auto* const begin = static_cast<const char*>(memory);
  auto it = pinned_.upper_bound(begin);
  if (it == pinned_.begin()) return false;
  --it;
  return bytes <= it->second - (begin - it->first);
}

}  // namespace chorus
