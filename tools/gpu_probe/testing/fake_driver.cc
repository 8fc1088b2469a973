// A stand-in for libcuda.so.1, so that gpu_probe runs from end to end where there is no GPU: memory
// of the GPU is the host's, each stream is a thread, and kernels are the probe's own bodies. What
// it cannot show is speed, and that the real driver takes the calls that it takes.
//
// Strict where the probe may be wrong: an address that was not allocated, an unknown kernel, a call
// on a context that is not current is an error, as with the real one.
//
// Only where the build has no other: tests put its folder on LD_LIBRARY_PATH. With
// CHORUS_FAKE_GPU_FAULT=cuName that function fails with CUDA_ERROR_UNKNOWN, =crash:cuName it
// aborts, =hang:cuName it never returns.
#include <fcntl.h>
#include <glob.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/backend/cuda/cuda_api.h"
#include "tools/gpu_probe/kernels.h"

namespace chorus {
namespace cuda {

// What the driver's handles point to.
struct ContextStruct {};
struct ModuleStruct {};
struct KernelStruct {};

struct EventStruct {
  std::mutex mutex;
  std::condition_variable changed;
  // A wait is for the record that was the latest when it was asked for.
  uint64_t recorded = 0;
  uint64_t reached = 0;
  std::chrono::steady_clock::time_point when;
};

// Runs what it is given, in order, on a thread of its own.
struct StreamStruct {
  StreamStruct() : thread([this] { Run(); }) {}
  void Add(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(std::move(work));
    changed.notify_all();
  }
  bool Idle() {
    const std::lock_guard<std::mutex> lock(mutex);
    return queue.empty();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return queue.empty(); });
  }
  void Run() {
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return !queue.empty(); });
        work = queue.front();
      }
      work();
      const std::lock_guard<std::mutex> lock(mutex);
      queue.pop_front();
      changed.notify_all();
    }
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  GraphStruct* capture = nullptr;
  std::thread thread;
};

struct FunctionStruct {
  std::string name;
  // Of a launch with this parameter, `threads` threads in all: its work, with a copy of it.
  std::function<std::function<void()>(const void* argument, int64_t threads)> work;
};

struct GraphNodeStruct {
  std::function<void()> work;
  std::vector<GraphNode> after;
};
struct GraphStruct {
  std::vector<std::unique_ptr<GraphNodeStruct>> nodes;
};
struct GraphExecStruct {
  std::vector<std::function<void()>> work;
  std::map<GraphNode, size_t> index;  // of the graph it was made of
};

namespace {

constexpr size_t kTotalBytes = size_t{512} << 20;
constexpr size_t kGranularity = 2 << 20;

std::mutex mutex;
std::map<uint64_t, size_t> allocations;  // on the "GPU"
std::map<uint64_t, int> locks;           // of those that are not chunks
std::map<uint64_t, size_t> host_memory;  // pinned or registered
bool initialized = false;
thread_local Context current = nullptr;

// What all processes have taken, as files in CHORUS_FAKE_GPU_DIR: each as long as an allocation,
// and locked by a descriptor that its owners have open. Whoever finds one without a lock knows that
// none of them lives any more.
std::string Folder() {
  const char* const folder = std::getenv("CHORUS_FAKE_GPU_DIR");
  return folder == nullptr ? "/tmp" : folder;
}
int TakeBytes(size_t bytes) {
  std::string path = Folder() + "/fake-gpu-XXXXXX";
  const int fd = mkostemp(&path[0], O_CLOEXEC);
  if (fd < 0 || flock(fd, LOCK_SH) != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return -1;
  return fd;
}
size_t TakenBytes() {
  size_t taken = 0;
  glob_t found{};
  if (glob((Folder() + "/fake-gpu-*").c_str(), 0, nullptr, &found) == 0) {
    for (size_t n = 0; n < found.gl_pathc; ++n) {
      const int fd = open(found.gl_pathv[n], O_RDWR | O_CLOEXEC);
      if (fd < 0) continue;
      if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
        // A new one is without a lock and a length for a moment.
        if (lseek(fd, 0, SEEK_END) > 0) unlink(found.gl_pathv[n]);
      } else {
        taken += static_cast<size_t>(lseek(fd, 0, SEEK_END));
      }
      close(fd);
    }
  }
  globfree(&found);
  return taken;
}

// A fault that was asked for.
Result Fault(const char* function) {
  static const char* const wanted = std::getenv("CHORUS_FAKE_GPU_FAULT");
  if (wanted == nullptr) return Result::kSuccess;
  const std::string text = wanted;
  if (text == function) return Result::kUnknown;
  if (text == std::string("crash:") + function) std::abort();
  if (text == std::string("hang:") + function) {
    while (true) pause();
  }
  return Result::kSuccess;
}

bool Inside(const std::map<uint64_t, size_t>& known, uint64_t address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto next = known.upper_bound(address);
  if (next == known.begin()) return false;
  --next;
  return address + bytes <= next->first + next->second;
}

template <typename Args>
void RunThreads(const Args& args, int64_t threads, void (*body)(const Args&, const probe::Lane&)) {
  std::vector<Pack> scratch(Args::kScratchPacks + 1);
  for (int64_t index = 0; index < threads; ++index) {
    probe::Lane lane;
    lane.index = index;
    lane.count = threads;
    lane.scratch = scratch.data();
    body(args, lane);
  }
}

// So that a launch that fills a GPU does not take a CPU seconds.
int64_t FewThreads(const std::string& name, int64_t threads) {
  const bool one = name == "spin" || name == "ping_pong";
  return one ? 1 : std::min<int64_t>(threads, 32);
}

FunctionStruct* FindFunction(const std::string& name) {
  static auto& functions = *new std::map<std::string, FunctionStruct>;
  const std::lock_guard<std::mutex> lock(mutex);
  if (functions.empty()) {
    using namespace probe;  // NOLINT: the list names its types without it
#define CHORUS_FAKE_KERNEL(kernel, Args, Body)                                                  \
  functions[#kernel] = {#kernel, [](const void* argument, int64_t threads) {                    \
                          const Args args = *static_cast<const Args*>(argument);                \
                          const int64_t few = FewThreads(#kernel, threads);                     \
                          return std::function<void()>([args, few] {                            \
                            RunThreads<Args>(args, few,                                         \
                                             [](const Args& a, const Lane& l) { Body(a, l); }); \
                          });                                                                   \
                        }};
    CHORUS_PROBE_KERNELS(CHORUS_FAKE_KERNEL)
#undef CHORUS_FAKE_KERNEL
  }
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : &found->second;
}

Result Ready() {
  if (!initialized) return static_cast<Result>(3);          // CUDA_ERROR_NOT_INITIALIZED
  if (current == nullptr) return static_cast<Result>(201);  // CUDA_ERROR_INVALID_CONTEXT
  return Result::kSuccess;
}

Result Enqueue(Stream stream, std::function<void()> work) {
  if (stream == nullptr) return Result::kInvalidValue;
  if (stream->capture != nullptr) {
    auto node = std::make_unique<GraphNodeStruct>();
    node->work = std::move(work);
    stream->capture->nodes.push_back(std::move(node));
    return Result::kSuccess;
  }
  stream->Add(std::move(work));
  return Result::kSuccess;
}

Result NodeWork(const KernelNodeParams* params, std::function<void()>* work) {
  if (params == nullptr || params->function == nullptr || params->kernel_params == nullptr) {
    return Result::kInvalidValue;
  }
  *work =
      params->function->work(params->kernel_params[0], int64_t{params->grid_x} * params->block_x);
  return Result::kSuccess;
}

// A chunk is one of those files, mapped.
struct FakeChunk {
  int fd = -1;
  size_t bytes = 0;
};

}  // namespace
}  // namespace cuda
}  // namespace chorus

using namespace chorus::cuda;  // NOLINT: the driver's functions are in no namespace

#define FAKE(name, ...) \
  if (const Result fault = Fault(#name); fault != Result::kSuccess) return fault
#define FAKE_READY(name) \
  FAKE(name);            \
  if (const Result ready = Ready(); ready != Result::kSuccess) return ready

extern "C" {

Result cuInit(unsigned int flags) {
  FAKE(cuInit);
  initialized = flags == 0;
  return flags == 0 ? Result::kSuccess : Result::kInvalidValue;
}
Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return Result::kSuccess;
}
Result cuGetErrorName(Result error, const char** text) {
  *text = error == Result::kSuccess ? "CUDA_SUCCESS" : "CUDA_ERROR_FAKE";
  return Result::kSuccess;
}
Result cuGetErrorString(Result /*error*/, const char** text) {
  *text = "as the fake driver says";
  return Result::kSuccess;
}
Result cuDeviceGetCount(int* count) {
  if (!initialized) return static_cast<Result>(3);
  FAKE(cuDeviceGetCount);
  *count = std::getenv("CHORUS_FAKE_GPU_NONE") != nullptr ? 0 : 1;
  return Result::kSuccess;
}
Result cuDeviceGet(Device* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? Result::kSuccess : Result::kInvalidValue;
}
Result cuDeviceGetName(char* name, int bytes, Device /*device*/) {
  strncpy(name, "Fake GPU", static_cast<size_t>(bytes));
  return Result::kSuccess;
}
Result cuDeviceTotalMem_v2(size_t* bytes, Device /*device*/) {
  *bytes = kTotalBytes;
  return Result::kSuccess;
}
Result cuDeviceGetAttribute(int* value, DeviceAttribute attribute, Device /*device*/) {
  FAKE(cuDeviceGetAttribute);
  switch (attribute) {
    case DeviceAttribute::kMultiprocessorCount:
      *value = 2;
      return Result::kSuccess;
    case DeviceAttribute::kL2CacheBytes:
      *value = 1 << 20;
      return Result::kSuccess;
    case DeviceAttribute::kCapabilityMajor:
      *value = 9;
      return Result::kSuccess;
    case DeviceAttribute::kCapabilityMinor:
      *value = 0;
      return Result::kSuccess;
    default:
      *value = 1;
      return Result::kSuccess;
  }
}
Result cuDeviceGetPCIBusId(char* id, int bytes, Device /*device*/) {
  strncpy(id, "0000:00:00.0", static_cast<size_t>(bytes));
  return Result::kSuccess;
}
Result cuDevicePrimaryCtxRetain(Context* context, Device /*device*/) {
  FAKE(cuDevicePrimaryCtxRetain);
  if (!initialized) return static_cast<Result>(3);
  static ContextStruct primary;
  *context = &primary;
  return Result::kSuccess;
}
Result cuDevicePrimaryCtxRelease_v2(Device /*device*/) { return Result::kSuccess; }
Result cuCtxSetCurrent(Context context) {
  current = context;
  return Result::kSuccess;
}
Result cuCtxSynchronize() { return Result::kNotSupported; }
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return Result::kSuccess;
}
Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  FAKE_READY(cuMemGetInfo);
  *total = kTotalBytes;
  *free = kTotalBytes - std::min(kTotalBytes, TakenBytes());
  return Result::kSuccess;
}

Result cuMemAlloc_v2(DevicePtr* pointer, size_t bytes) {
  FAKE_READY(cuMemAlloc);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || TakenBytes() + bytes > kTotalBytes) return Result::kOutOfMemory;
  *pointer = reinterpret_cast<uint64_t>(memory);
  const std::lock_guard<std::mutex> lock(mutex);
  allocations[*pointer] = bytes;
  locks[*pointer] = TakeBytes(bytes);
  return Result::kSuccess;
}
Result cuMemFree_v2(DevicePtr pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(pointer);
  if (found == allocations.end()) return Result::kInvalidValue;
  munmap(reinterpret_cast<void*>(pointer), found->second);
  allocations.erase(found);
  close(locks[pointer]);
  locks.erase(pointer);
  return Result::kSuccess;
}
Result cuMemHostAlloc(void** pointer, size_t bytes, unsigned int /*flags*/) {
  FAKE_READY(cuMemHostAlloc);
  *pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const std::lock_guard<std::mutex> lock(mutex);
  host_memory[reinterpret_cast<uint64_t>(*pointer)] = bytes;
  return Result::kSuccess;
}
Result cuMemFreeHost(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = host_memory.find(reinterpret_cast<uint64_t>(pointer));
  if (found == host_memory.end()) return Result::kInvalidValue;
  munmap(pointer, found->second);
  host_memory.erase(found);
  return Result::kSuccess;
}
Result cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int /*flags*/) {
  FAKE_READY(cuMemHostRegister);
  const std::lock_guard<std::mutex> lock(mutex);
  const bool fresh = host_memory.emplace(reinterpret_cast<uint64_t>(pointer), bytes).second;
  return fresh ? Result::kSuccess : static_cast<Result>(712);
}
Result cuMemHostUnregister(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  return host_memory.erase(reinterpret_cast<uint64_t>(pointer)) > 0 ? Result::kSuccess
                                                                    : Result::kInvalidValue;
}
Result cuMemHostGetDevicePointer_v2(DevicePtr* device, void* host, unsigned int flags) {
  *device = reinterpret_cast<uint64_t>(host);
  return flags == 0 && Inside(host_memory, *device, 1) ? Result::kSuccess : Result::kInvalidValue;
}
Result cuMemcpyHtoDAsync_v2(DevicePtr to, const void* from, size_t bytes, Stream stream) {
  FAKE_READY(cuMemcpyHtoDAsync);
  if (!Inside(allocations, to, bytes)) return Result::kInvalidValue;
  // Memory that is not pinned is read before the call returns.
  if (!Inside(host_memory, reinterpret_cast<uint64_t>(from), bytes)) {
    auto copy = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                    static_cast<const char*>(from) + bytes);
    return Enqueue(stream,
                   [to, copy] { memcpy(reinterpret_cast<void*>(to), copy->data(), copy->size()); });
  }
  return Enqueue(stream, [to, from, bytes] { memcpy(reinterpret_cast<void*>(to), from, bytes); });
}
Result cuMemcpyDtoHAsync_v2(void* to, DevicePtr from, size_t bytes, Stream stream) {
  FAKE_READY(cuMemcpyDtoHAsync);
  if (!Inside(allocations, from, bytes)) return Result::kInvalidValue;
  return Enqueue(stream,
                 [to, from, bytes] { memcpy(to, reinterpret_cast<const void*>(from), bytes); });
}
Result cuMemcpyDtoDAsync_v2(DevicePtr to, DevicePtr from, size_t bytes, Stream stream) {
  FAKE_READY(cuMemcpyDtoDAsync);
  if (!Inside(allocations, from, bytes) || !Inside(allocations, to, bytes)) {
    return Result::kInvalidValue;
  }
  return Enqueue(stream, [to, from, bytes] {
    memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  });
}
Result cuMemsetD8Async(DevicePtr to, unsigned char value, size_t count, Stream stream) {
  FAKE_READY(cuMemsetD8Async);
  if (!Inside(allocations, to, count)) return Result::kInvalidValue;
  return Enqueue(stream, [to, value, count] { memset(reinterpret_cast<void*>(to), value, count); });
}

// --- Chunks ---

Result cuMemCreate(AllocationHandle* handle, size_t bytes, const AllocationProperties* properties,
                   unsigned long long flags) {
  FAKE_READY(cuMemCreate);
  if (bytes % kGranularity != 0 || flags != 0 ||
      properties->requested_handles != HandleType::kFileDescriptor) {
    return Result::kInvalidValue;
  }
  if (TakenBytes() + bytes > kTotalBytes) return Result::kOutOfMemory;
  auto* const chunk = new FakeChunk;
  chunk->bytes = bytes;
  chunk->fd = TakeBytes(bytes);
  *handle = reinterpret_cast<uint64_t>(chunk);
  return Result::kSuccess;
}
Result cuMemRelease(AllocationHandle handle) {
  auto* const chunk = reinterpret_cast<FakeChunk*>(handle);
  close(chunk->fd);
  delete chunk;
  return Result::kSuccess;
}
Result cuMemAddressReserve(DevicePtr* pointer, size_t bytes, size_t alignment, DevicePtr wish,
                           unsigned long long flags) {
  FAKE_READY(cuMemAddressReserve);
  if (bytes % kGranularity != 0 || alignment != 0 || wish != 0 || flags != 0) {
    return Result::kInvalidValue;
  }
  void* const memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *pointer = reinterpret_cast<uint64_t>(memory);
  return memory == MAP_FAILED ? Result::kOutOfMemory : Result::kSuccess;
}
Result cuMemAddressFree(DevicePtr pointer, size_t bytes) {
  munmap(reinterpret_cast<void*>(pointer), bytes);
  return Result::kSuccess;
}
Result cuMemMap(DevicePtr pointer, size_t bytes, size_t offset, AllocationHandle handle,
                unsigned long long flags) {
  FAKE_READY(cuMemMap);
  const auto* const chunk = reinterpret_cast<FakeChunk*>(handle);
  if (offset != 0 || flags != 0 || bytes != chunk->bytes) return Result::kInvalidValue;
  void* const at = reinterpret_cast<void*>(pointer);
  return mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk->fd, 0) == at
             ? Result::kSuccess
             : Result::kOutOfMemory;
}
Result cuMemUnmap(DevicePtr pointer, size_t /*bytes*/) {
  const std::lock_guard<std::mutex> lock(mutex);
  return allocations.erase(pointer) > 0 ? Result::kSuccess : Result::kInvalidValue;
}
Result cuMemSetAccess(DevicePtr pointer, size_t bytes, const AccessDescription* descriptions,
                      size_t count) {
  FAKE_READY(cuMemSetAccess);
  if (count != 1 || descriptions->access != Access::kReadWrite) return Result::kInvalidValue;
  if (mprotect(reinterpret_cast<void*>(pointer), bytes, PROT_READ | PROT_WRITE) != 0) {
    return Result::kInvalidValue;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  allocations[pointer] = bytes;
  return Result::kSuccess;
}
Result cuMemExportToShareableHandle(void* shareable, AllocationHandle handle, HandleType type,
                                    unsigned long long flags) {
  FAKE_READY(cuMemExportToShareableHandle);
  if (type != HandleType::kFileDescriptor || flags != 0) return Result::kInvalidValue;
  *static_cast<int*>(shareable) =
      fcntl(reinterpret_cast<FakeChunk*>(handle)->fd, F_DUPFD_CLOEXEC, 0);
  return Result::kSuccess;
}
Result cuMemImportFromShareableHandle(AllocationHandle* handle, void* shareable, HandleType type) {
  FAKE_READY(cuMemImportFromShareableHandle);
  if (type != HandleType::kFileDescriptor) return Result::kInvalidValue;
  auto* const chunk = new FakeChunk;
  chunk->fd = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(shareable)), F_DUPFD_CLOEXEC, 0);
  chunk->bytes = static_cast<size_t>(lseek(chunk->fd, 0, SEEK_END));
  *handle = reinterpret_cast<uint64_t>(chunk);
  return chunk->fd >= 0 ? Result::kSuccess : Result::kInvalidValue;
}
Result cuMemGetAllocationGranularity(size_t* granularity, const AllocationProperties* properties,
                                     Granularity /*option*/) {
  *granularity = kGranularity;
  return properties->type == AllocationType::kPinned ? Result::kSuccess : Result::kInvalidValue;
}

// --- Kernels ---

Result cuModuleLoadData(Module* module, const void* image) {
  FAKE_READY(cuModuleLoadData);
  static ModuleStruct loaded;
  *module = &loaded;
  return image != nullptr ? Result::kSuccess : Result::kInvalidValue;
}
Result cuModuleUnload(Module /*module*/) { return Result::kSuccess; }
Result cuModuleGetFunction(Function* function, Module /*module*/, const char* name) {
  *function = FindFunction(name);
  return *function != nullptr ? Result::kSuccess : static_cast<Result>(500);
}
Result cuFuncGetAttribute(int* value, FunctionAttribute attribute, Function /*function*/) {
  *value = attribute == FunctionAttribute::kBinaryVersion ? 90 : 0;
  return Result::kSuccess;
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function function,
                                                   int block_threads, size_t dynamic_shared_bytes) {
  *blocks = 2;
  return function != nullptr && block_threads > 0 && dynamic_shared_bytes == 0
             ? Result::kSuccess
             : Result::kInvalidValue;
}
Result cuLaunchKernel(Function function, unsigned int grid_x, unsigned int grid_y,
                      unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                      unsigned int block_z, unsigned int shared_bytes, Stream stream, void** params,
                      void** extra) {
  FAKE_READY(cuLaunchKernel);
  if (function == nullptr || grid_x == 0 || grid_y != 1 || grid_z != 1 || block_y != 1 ||
      block_z != 1 || shared_bytes != 0 || extra != nullptr || params == nullptr ||
      block_x > static_cast<unsigned int>(chorus::probe::kBlockThreads)) {
    return Result::kInvalidValue;
  }
  return Enqueue(stream, function->work(params[0], int64_t{grid_x} * block_x));
}
Result cuLaunchHostFunc(Stream stream, HostFunction function, void* data) {
  FAKE_READY(cuLaunchHostFunc);
  return Enqueue(stream, [function, data] { function(data); });
}

// --- Streams and events ---

Result cuStreamCreateWithPriority(Stream* stream, unsigned int flags, int priority) {
  FAKE_READY(cuStreamCreateWithPriority);
  if (flags != kStreamNonBlocking || priority > 0 || priority < -5) return Result::kInvalidValue;
  *stream = new StreamStruct;
  return Result::kSuccess;
}
Result cuStreamDestroy_v2(Stream stream) {
  stream->Wait();  // its thread lives on: this process ends soon
  return Result::kSuccess;
}
Result cuStreamSynchronize(Stream stream) {
  FAKE_READY(cuStreamSynchronize);
  if (stream->capture != nullptr) return static_cast<Result>(900);
  stream->Wait();
  return Result::kSuccess;
}
Result cuStreamQuery(Stream stream) {
  return stream->Idle() ? Result::kSuccess : Result::kNotReady;
}
Result cuStreamWaitEvent(Stream stream, Event event, unsigned int flags) {
  FAKE_READY(cuStreamWaitEvent);
  if (flags != 0) return Result::kInvalidValue;
  const std::lock_guard<std::mutex> asked(event->mutex);
  return Enqueue(stream, [event, wanted = event->recorded] {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return event->reached >= wanted; });
  });
}
Result cuStreamWriteValue32_v2(Stream stream, DevicePtr address, uint32_t value,
                               unsigned int flags) {
  FAKE_READY(cuStreamWriteValue32);
  if (flags != 0 || !Inside(host_memory, address, 4)) return Result::kInvalidValue;
  return Enqueue(stream,
                 [address, value] { StoreShared(reinterpret_cast<uint32_t*>(address), value); });
}
Result cuStreamWaitValue32_v2(Stream /*stream*/, DevicePtr /*address*/, uint32_t /*value*/,
                              unsigned int /*flags*/) {
  return Result::kNotSupported;
}
Result cuEventCreate(Event* event, unsigned int /*flags*/) {
  *event = new EventStruct;
  return Result::kSuccess;
}
Result cuEventDestroy_v2(Event /*event*/) { return Result::kSuccess; }
Result cuEventRecord(Event event, Stream stream) {
  FAKE_READY(cuEventRecord);
  const std::lock_guard<std::mutex> asked(event->mutex);
  return Enqueue(stream, [event, record = ++event->recorded] {
    const std::lock_guard<std::mutex> lock(event->mutex);
    event->reached = record;
    event->when = std::chrono::steady_clock::now();
    event->changed.notify_all();
  });
}
Result cuEventQuery(Event event) {
  const std::lock_guard<std::mutex> lock(event->mutex);
  return event->reached == event->recorded ? Result::kSuccess : Result::kNotReady;
}
Result cuEventSynchronize(Event event) {
  std::unique_lock<std::mutex> lock(event->mutex);
  event->changed.wait(lock, [event] { return event->reached == event->recorded; });
  return Result::kSuccess;
}
Result cuEventElapsedTime(float* milliseconds, Event start, Event end) {
  FAKE_READY(cuEventElapsedTime);
  if (start->reached < start->recorded || end->reached < end->recorded) return Result::kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(end->when - start->when).count();
  return Result::kSuccess;
}

// --- Graphs: run in the order in which their nodes were added ---

Result cuGraphCreate(Graph* graph, unsigned int flags) {
  FAKE_READY(cuGraphCreate);
  *graph = new GraphStruct;
  return flags == 0 ? Result::kSuccess : Result::kInvalidValue;
}
Result cuGraphDestroy(Graph graph) {
  delete graph;
  return Result::kSuccess;
}
Result cuGraphAddKernelNode_v2(GraphNode* node, Graph graph, const GraphNode* dependencies,
                               size_t count, const KernelNodeParams* params) {
  FAKE_READY(cuGraphAddKernelNode);
  auto made = std::make_unique<GraphNodeStruct>();
  if (const Result result = NodeWork(params, &made->work); result != Result::kSuccess) {
    return result;
  }
  made->after.assign(dependencies, dependencies + count);
  *node = made.get();
  graph->nodes.push_back(std::move(made));
  return Result::kSuccess;
}
Result cuGraphGetNodes(Graph graph, GraphNode* nodes, size_t* count) {
  if (nodes != nullptr) {
    if (*count < graph->nodes.size()) return Result::kInvalidValue;
    for (size_t n = 0; n < graph->nodes.size(); ++n) nodes[n] = graph->nodes[n].get();
  }
  *count = graph->nodes.size();
  return Result::kSuccess;
}
Result cuGraphInstantiateWithFlags(GraphExec* exec, Graph graph, unsigned long long flags) {
  FAKE_READY(cuGraphInstantiateWithFlags);
  if (flags != 0) return Result::kInvalidValue;
  auto* const made = new GraphExecStruct;
  for (const auto& node : graph->nodes) {
    made->index[node.get()] = made->work.size();
    made->work.push_back(node->work);
  }
  *exec = made;
  return Result::kSuccess;
}
Result cuGraphExecDestroy(GraphExec exec) {
  delete exec;
  return Result::kSuccess;
}
Result cuGraphExecUpdate_v2(GraphExec exec, Graph graph, ExecUpdateResultInfo* info) {
  FAKE_READY(cuGraphExecUpdate);
  if (graph->nodes.size() != exec->work.size() || info == nullptr) return Result::kInvalidValue;
  for (size_t n = 0; n < graph->nodes.size(); ++n) exec->work[n] = graph->nodes[n]->work;
  return Result::kSuccess;
}
Result cuGraphExecKernelNodeSetParams_v2(GraphExec exec, GraphNode node,
                                         const KernelNodeParams* params) {
  FAKE_READY(cuGraphExecKernelNodeSetParams);
  const auto found = exec->index.find(node);
  if (found == exec->index.end()) return Result::kInvalidValue;
  return NodeWork(params, &exec->work[found->second]);
}
Result cuGraphUpload(GraphExec /*exec*/, Stream stream) {
  return Enqueue(stream, [] {});
}
Result cuGraphLaunch(GraphExec exec, Stream stream) {
  FAKE_READY(cuGraphLaunch);
  return Enqueue(stream, [work = exec->work] {
    for (const auto& node : work) node();
  });
}
Result cuStreamBeginCaptureToGraph(Stream stream, Graph graph, const GraphNode* /*dependencies*/,
                                   const EdgeData* /*edges*/, size_t /*count*/,
                                   CaptureMode /*mode*/) {
  FAKE_READY(cuStreamBeginCaptureToGraph);
  if (stream->capture != nullptr) return Result::kInvalidValue;
  stream->capture = graph;
  return Result::kSuccess;
}
Result cuStreamEndCapture(Stream stream, Graph* graph) {
  FAKE_READY(cuStreamEndCapture);
  *graph = stream->capture;
  stream->capture = nullptr;
  return *graph != nullptr ? Result::kSuccess : Result::kInvalidValue;
}

// For the other stand-ins: work of a library on a stream.
void chorusFakeEnqueue(Stream stream, void (*function)(void*), void* data) {
  Enqueue(stream, [function, data] { function(data); });
}

}  // extern "C"
