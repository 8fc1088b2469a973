#include "tools/gpu_probe/gpu.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tools/gpu_probe/child.h"
#include "tools/gpu_probe/kernel_image.h"

namespace chorus {
namespace probe {
namespace {

cuda::AllocationProperties ChunkProperties(cuda::Device device) {
  cuda::AllocationProperties properties;
  properties.requested_handles = cuda::HandleType::kFileDescriptor;
  properties.location.id = device;
  return properties;
}

}  // namespace

bool HasKernels() { return kernel_image_bytes() > 0; }

absl::StatusOr<std::unique_ptr<Gpu>> Gpu::Open(const std::vector<std::string>& libraries) {
  std::unique_ptr<Gpu> gpu(new Gpu);
  CHORUS_ASSIGN_OR_RETURN(gpu->api_, cuda::LoadApi(libraries));
  const cuda::Api& api = gpu->api_;
  CHORUS_CUDA(api, Init, 0);
  int count = 0;
  CHORUS_CUDA(api, DeviceGetCount, &count);
  if (count == 0) return MakeError(Reason::kWrongState, "the driver has no GPU");
  CHORUS_CUDA(api, DeviceGet, &gpu->device_, 0);
  // The primary one: cuBLASLt and NCCL use it, too.
  cuda::Context context = nullptr;
  CHORUS_CUDA(api, DevicePrimaryCtxRetain, &context, gpu->device_);
  CHORUS_CUDA(api, CtxSetCurrent, context);
  CHORUS_ASSIGN_OR_RETURN(gpu->multiprocessors_,
                          gpu->Attribute(cuda::DeviceAttribute::kMultiprocessorCount));
  CHORUS_ASSIGN_OR_RETURN(gpu->l2_bytes_, gpu->Attribute(cuda::DeviceAttribute::kL2CacheBytes));
  cuda::Module module = nullptr;
  const cuda::Result loaded = api.ModuleLoadData(&module, kernel_image());
  if (loaded != cuda::Result::kSuccess && !HasKernels()) {
    return MakeError(Reason::kWrongState, "gpu_probe was built without a CUDA toolkit: no kernels");
  }
  CHORUS_RETURN_IF_ERROR(cuda::ToStatus(api, loaded, "cuModuleLoadData"));
#define CHORUS_PROBE_FIND(name, args, body) \
  CHORUS_CUDA(api, ModuleGetFunction, &gpu->kernels_[#name], module, #name);
  CHORUS_PROBE_KERNELS(CHORUS_PROBE_FIND)
#undef CHORUS_PROBE_FIND
  for (const auto& [name, function] : gpu->kernels_) {
    int blocks = 0;
    CHORUS_CUDA(api, OccupancyMaxActiveBlocksPerMultiprocessor, &blocks, function, kBlockThreads,
                0);
    gpu->waves_[name] = std::max(1, blocks) * int64_t{gpu->multiprocessors_};
  }
  CHORUS_ASSIGN_OR_RETURN(const int64_t free, gpu->FreeBytes());
  gpu->most_bytes_ = free / 2;
  return gpu;
}

absl::StatusOr<int> Gpu::Attribute(cuda::DeviceAttribute attribute) const {
  int value = 0;
  CHORUS_CUDA(api_, DeviceGetAttribute, &value, attribute, device_);
  return value;
}

absl::Status Gpu::Charge(int64_t bytes) {
  if (taken_bytes_ + bytes > most_bytes_) {
    return MakeError(Reason::kOutOfMemory,
                     absl::StrCat(bytes, " bytes beside ", taken_bytes_,
                                  " are more than half of the GPU's free memory"));
  }
  taken_bytes_ += bytes;
  return absl::OkStatus();
}

absl::StatusOr<Memory> Gpu::Allocate(int64_t bytes) {
  CHORUS_RETURN_IF_ERROR(Charge(bytes));
  cuda::DevicePtr pointer = 0;
  CHORUS_CUDA(api_, MemAlloc, &pointer, static_cast<size_t>(bytes));
  return Memory{Owned<cuda::DevicePtr>(pointer,
                                       [this, bytes](cuda::DevicePtr p) {
                                         api_.MemFree(p);
                                         taken_bytes_ -= bytes;
                                       }),
                bytes};
}

absl::StatusOr<Chunk> Gpu::CreateChunk(int64_t bytes) {
  const cuda::AllocationProperties properties = ChunkProperties(device_);
  size_t granularity = 0;
  CHORUS_CUDA(api_, MemGetAllocationGranularity, &granularity, &properties,
              cuda::Granularity::kRecommended);
  const auto unit = static_cast<int64_t>(granularity);
  bytes = (bytes + unit - 1) / unit * unit;
  CHORUS_RETURN_IF_ERROR(Charge(bytes));
  cuda::AllocationHandle handle = 0;
  CHORUS_CUDA(api_, MemCreate, &handle, static_cast<size_t>(bytes), &properties, 0);
  return MapChunk(handle, bytes);
}

absl::StatusOr<Chunk> Gpu::MapChunk(cuda::AllocationHandle handle, int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  cuda::DevicePtr pointer = 0;
  CHORUS_CUDA(api_, MemAddressReserve, &pointer, size, 0, 0, 0);
  CHORUS_CUDA(api_, MemMap, pointer, size, 0, handle, 0);
  cuda::AccessDescription access;
  access.location.id = device_;
  CHORUS_CUDA(api_, MemSetAccess, pointer, size, &access, 1);
  Chunk chunk;
  chunk.handle = handle;
  chunk.bytes = bytes;
  chunk.pointer = Owned<cuda::DevicePtr>(pointer, [this, handle, size](cuda::DevicePtr p) {
    api_.MemUnmap(p, size);
    api_.MemAddressFree(p, size);
    api_.MemRelease(handle);
  });
  return chunk;
}

absl::StatusOr<UniqueFd> Gpu::ExportChunk(const Chunk& chunk) {
  int fd = -1;
  CHORUS_CUDA(api_, MemExportToShareableHandle, &fd, chunk.handle,
              cuda::HandleType::kFileDescriptor, 0);
  return UniqueFd(fd);
}

absl::StatusOr<Chunk> Gpu::ImportChunk(int fd, int64_t bytes) {
  cuda::AllocationHandle handle = 0;
  // The descriptor itself stands where a pointer would.
  CHORUS_CUDA(api_, MemImportFromShareableHandle, &handle,
              reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
              cuda::HandleType::kFileDescriptor);
  return MapChunk(handle, bytes);
}

absl::StatusOr<int64_t> Gpu::FreeBytes() const {
  size_t free = 0;
  size_t total = 0;
  CHORUS_CUDA(api_, MemGetInfo, &free, &total);
  return static_cast<int64_t>(free);
}

absl::StatusOr<Pinned> Gpu::AllocatePinned(int64_t bytes) const {
  void* host = nullptr;
  CHORUS_CUDA(api_, MemHostAlloc, &host, static_cast<size_t>(bytes),
              cuda::kHostAllocPortable | cuda::kHostAllocDeviceMap);
  Pinned pinned;
  pinned.host = Owned<void*>(host, [this](void* p) { api_.MemFreeHost(p); });
  CHORUS_CUDA(api_, MemHostGetDevicePointer, &pinned.device, host, 0);
  std::fill_n(static_cast<char*>(host), bytes, 0);
  return pinned;
}

absl::StatusOr<OwnedStream> Gpu::CreateStream(int priority) const {
  cuda::Stream stream = nullptr;
  CHORUS_CUDA(api_, StreamCreateWithPriority, &stream, cuda::kStreamNonBlocking, priority);
  return OwnedStream(stream, [this](cuda::Stream s) { api_.StreamDestroy(s); });
}

absl::StatusOr<OwnedEvent> Gpu::CreateEvent(bool timed) const {
  cuda::Event event = nullptr;
  CHORUS_CUDA(api_, EventCreate, &event, timed ? cuda::kEventDefault : cuda::kEventDisableTiming);
  return OwnedEvent(event, [this](cuda::Event e) { api_.EventDestroy(e); });
}

absl::Status Gpu::FillPattern(cuda::DevicePtr to, int64_t bytes, uint64_t seed, bool floats,
                              cuda::Stream stream) const {
  FillArgs args;
  args.to = reinterpret_cast<uint32_t*>(to);
  args.words = bytes / 4;
  args.seed = seed;
  args.floats = floats ? 1 : 0;
  return Launch(kernel("fill"), args, Wave("fill"), stream);
}

absl::StatusOr<Pinned> Gpu::Spin(int64_t blocks, cuda::Stream stream) const {
  CHORUS_ASSIGN_OR_RETURN(Pinned started, AllocatePinned(64));
  SpinArgs args;
  args.started = reinterpret_cast<uint32_t*>(started.device);
  args.nanos = 20'000'000'000;
  CHORUS_RETURN_IF_ERROR(Launch(kernel("spin"), args, blocks, stream));
  const double deadline = NowSeconds() + 5;
  while (cuda::LoadShared(started.as<uint32_t>()) == 0) {
    if (NowSeconds() > deadline) return absl::DeadlineExceededError("the kernel does not start");
  }
  return started;
}

absl::StatusOr<uint64_t> Gpu::CountWrong(cuda::DevicePtr from, int64_t bytes, uint64_t seed,
                                         cuda::Stream stream) {
  CHORUS_ASSIGN_OR_RETURN(const Memory wrong, Allocate(8));
  CHORUS_CUDA(api_, MemsetD8Async, wrong.get(), 0, 8, stream);
  CheckArgs args;
  args.from = reinterpret_cast<const uint32_t*>(from);
  args.words = bytes / 4;
  args.seed = seed;
  args.wrong = wrong.as<uint64_t>();
  CHORUS_RETURN_IF_ERROR(Launch(kernel("check"), args, Wave("check"), stream));
  uint64_t count = ~uint64_t{0};
  CHORUS_CUDA(api_, MemcpyDtoHAsync, &count, wrong.get(), sizeof(count), stream);
  CHORUS_RETURN_IF_ERROR(Synchronize(stream));
  return count;
}

absl::Status Gpu::Synchronize(cuda::Stream stream) const {
  CHORUS_CUDA(api_, StreamSynchronize, stream);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> Gpu::TimeMicros(
    cuda::Stream stream, int rounds, int repeats,
    const std::function<absl::Status()>& enqueue) const {
  CHORUS_ASSIGN_OR_RETURN(const OwnedEvent begin, CreateEvent());
  CHORUS_ASSIGN_OR_RETURN(const OwnedEvent end, CreateEvent());
  std::vector<double> micros;
  for (int round = -1; round < rounds; ++round) {
    CHORUS_CUDA(api_, EventRecord, begin.get(), stream);
    for (int n = 0; n < repeats; ++n) CHORUS_RETURN_IF_ERROR(enqueue());
    CHORUS_CUDA(api_, EventRecord, end.get(), stream);
    CHORUS_RETURN_IF_ERROR(Synchronize(stream));
    float milliseconds = 0;
    CHORUS_CUDA(api_, EventElapsedTime, &milliseconds, begin.get(), end.get());
    if (round >= 0) micros.push_back(1e3 * milliseconds / repeats);
  }
  return micros;
}

}  // namespace probe
}  // namespace chorus
