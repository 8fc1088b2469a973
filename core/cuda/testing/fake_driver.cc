#include "core/cuda/testing/fake_driver.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "core/base/mutex.h"
#include "core/cuda/testing/fake_memory.h"
#include "core/cuda/testing/report_misuse.h"

namespace chorus {
namespace cuda {
namespace {

// Results that cuda_api.h does not name.
constexpr auto kNotInitialized = static_cast<Result>(3);
constexpr auto kInvalidDevice = static_cast<Result>(101);
constexpr auto kInvalidContext = static_cast<Result>(201);
constexpr auto kInvalidHandle = static_cast<Result>(400);
constexpr auto kNotFound = static_cast<Result>(500);
constexpr auto kNotPermitted = static_cast<Result>(800);
constexpr auto kCaptureUnsupported = static_cast<Result>(900);

// Threads of a launch that run: one that fills a GPU would take a CPU seconds.
constexpr int64_t kMostThreads = 32;

// Of what a program's memory may be at: most words that are no addresses are beyond.
constexpr uint64_t kLowestAddress = 1 << 16;
constexpr uint64_t kHighestAddress = (uint64_t{1} << 47) - 1;

// What the handles of one kind stand for. A handle is a number that is not used twice, and no
// address.
template <typename Handle, typename Object>
class Handles {
 public:
  Handle Add(std::shared_ptr<Object> object) {
    static std::atomic<uint64_t> last{0};
    const auto handle = reinterpret_cast<Handle>((uint64_t{0x5e00} << 48) + ++last);
    MutexLock lock(&mutex_);
    objects_[handle] = std::move(object);
    return handle;
  }
  // Null: there is none, or no more.
  std::shared_ptr<Object> Find(Handle handle) {
    MutexLock lock(&mutex_);
    const auto entry = objects_.find(handle);
    return entry == objects_.end() ? nullptr : entry->second;
  }
  Result Remove(Handle handle) {
    MutexLock lock(&mutex_);
    return objects_.erase(handle) > 0 ? Result::kSuccess : kInvalidHandle;
  }

 private:
  Mutex mutex_;
  std::map<Handle, std::shared_ptr<Object>> objects_ ABSL_GUARDED_BY(mutex_);
};

struct FakeContext {
  int gpu = 0;
};
struct FakeModule {
  int gpu = 0;
};
struct FakeFunction {
  const FakeKernel* kernel = nullptr;
  Module module = nullptr;
  int gpu = 0;
};

struct FakeNode {
  FakeWork work;
  std::vector<GraphNode> after;
};
struct FakeGraph {
  std::vector<GraphNode> nodes;
};
struct FakeGraphExec {
  std::vector<FakeWork> work;
  std::vector<std::vector<size_t>> after;
  std::map<GraphNode, size_t> index;  // of the graph it was made of
};

struct FakeStream {
  int gpu = 0;
  FakeStreams::StreamRef queue;
  // Where the stream's work goes while it is captured, and what the next node comes after.
  Graph capture = nullptr;
  std::vector<GraphNode> capture_after;
};
struct FakeEvent {
  int gpu = 0;
  bool timed = false;
  FakeStreams::RecordRef latest;  // null: never recorded
};

struct Fault {
  Result result = Result::kSuccess;
  int skip = 0;
};

}  // namespace

struct FakeDriver::State {
  State(FakeDriverOptions wanted, uint64_t seed)
      : options(std::move(wanted)),
        memory(options.gpus, static_cast<size_t>(options.memory_bytes), options.shared_folder,
               [this](uint64_t block) { return streams.UserOf(block); }),
        streams(options.order, seed, options.patience),
        primary(static_cast<size_t>(options.gpus)),
        random(seed + 1) {}

  const FakeDriverOptions options;
  FakeMemory memory;
  FakeStreams streams;  // ends first: its work uses the memory
  std::atomic<bool> initialized{false};
  Handles<Context, FakeContext> contexts;
  Handles<Module, FakeModule> modules;
  Handles<Function, FakeFunction> functions;
  Handles<Stream, FakeStream> all_streams;
  Handles<Event, FakeEvent> events;
  Handles<Graph, FakeGraph> graphs;
  Handles<GraphNode, FakeNode> nodes;
  Handles<GraphExec, FakeGraphExec> execs;

  // A GPU's primary context, while anyone retains it.
  struct Primary {
    Context context = nullptr;
    int retained = 0;
  };
  // Of all that follows, and of what handles stand for, where that changes.
  Mutex mutex;
  std::vector<Primary> primary ABSL_GUARDED_BY(mutex);
  std::map<std::string, std::deque<Fault>> faults ABSL_GUARDED_BY(mutex);
  std::mt19937_64 random ABSL_GUARDED_BY(mutex);
};

namespace {

FakeDriver::State* state = nullptr;
thread_local Context current = nullptr;
thread_local bool in_host_function = false;

// What every function begins with.
Result Begin(const char* call) {
  if (state == nullptr) return Result::kDeinitialized;
  if (state->options.fault != nullptr) {
    if (const Result result = state->options.fault(call); result != Result::kSuccess) {
      return result;
    }
  }
  MutexLock lock(&state->mutex);
  const auto entry = state->faults.find(call);
  if (entry == state->faults.end()) return Result::kSuccess;
  Fault& next = entry->second.front();
  if (next.skip-- > 0) return Result::kSuccess;
  const Result result = next.result;
  entry->second.pop_front();
  if (entry->second.empty()) state->faults.erase(entry);
  return result;
}

// And what most go on with: the GPU whose context is current.
Result BeginOnGpu(const char* call, int* gpu) {
  if (const Result begun = Begin(call); begun != Result::kSuccess) return begun;
  if (!state->initialized) return kNotInitialized;
  if (in_host_function) return kNotPermitted;
  const auto context = state->contexts.Find(current);
  if (context == nullptr) return kInvalidContext;
  *gpu = context->gpu;
  return Result::kSuccess;
}

bool IsGpu(Device device) { return device >= 0 && device < state->options.gpus; }

uint64_t BlockOf(uint64_t address, int gpu) { return state->memory.Find(address, gpu).block; }

Result EnqueueWork(Stream stream, FakeWork work) {
  const auto entry = state->all_streams.Find(stream);
  if (entry == nullptr) return kInvalidHandle;
  MutexLock lock(&state->mutex);
  if (entry->capture == nullptr) {
    state->streams.Add(entry->queue, std::move(work));
    return Result::kSuccess;
  }
  const auto graph = state->graphs.Find(entry->capture);
  if (graph == nullptr) return kInvalidHandle;
  auto node = std::make_shared<FakeNode>();
  node->work = std::move(work);
  node->after = entry->capture_after;
  graph->nodes.push_back(state->nodes.Add(std::move(node)));
  entry->capture_after = {graph->nodes.back()};
  return Result::kSuccess;
}

// The GPU of a stream; -1: there is no such stream.
int GpuOf(Stream stream) {
  const auto entry = state->all_streams.Find(stream);
  return entry == nullptr ? -1 : entry->gpu;
}

// The work of a launch on `gpu`. Each word of the argument that is an address of memory is taken to
// be used.
Result MakeLaunch(Function function, unsigned int blocks, unsigned int block_threads, void** params,
                  int gpu, FakeWork* work) {
  const auto entry = state->functions.Find(function);
  if (entry == nullptr || entry->gpu != gpu || state->modules.Find(entry->module) == nullptr) {
    return kInvalidHandle;
  }
  const FakeKernel& kernel = *entry->kernel;
  if (blocks == 0 || block_threads == 0 || block_threads > kernel.most_block_threads ||
      params == nullptr || params[0] == nullptr) {
    return Result::kInvalidValue;
  }
  work->name = "kernel " + kernel.name;
  work->uses = {reinterpret_cast<uint64_t>(entry->module)};
  for (size_t at = 0; at + sizeof(uint64_t) <= kernel.argument_bytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const char*>(params[0]) + at, sizeof(word));
    if (word < kLowestAddress || word > kHighestAddress) continue;
    const FakeMemory::Location location = state->memory.Find(word, gpu);
    if (location.block == 0) continue;
    if (!location.usable) {
      ReportMisuse(work->name + " on GPU " + std::to_string(gpu) +
                   " is given memory to which that GPU has no access");
    }
    work->uses.push_back(location.block);
  }
  FakeLaunch launch;
  launch.argument = params[0];
  launch.threads = kernel.one_thread ? 1 : std::min(int64_t{blocks} * block_threads, kMostThreads);
  {
    // Of threads no order is promised, however the streams go.
    MutexLock lock(&state->mutex);
    launch.order = state->random();
  }
  work->run = kernel.make(launch);
  return Result::kSuccess;
}

Result MakeNodeLaunch(const KernelNodeParams* params, int gpu, FakeWork* work) {
  if (params == nullptr) return Result::kInvalidValue;
  return MakeLaunch(params->function, params->grid_x, params->block_x, params->kernel_params, gpu,
                    work);
}

// Nodes in an order that their dependencies allow.
std::vector<size_t> DrawOrder(const FakeGraphExec& exec)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state->mutex) {
  const bool any = state->options.order == FakeOrder::kAdversarial;
  std::vector<std::vector<size_t>> before(exec.after.size());
  std::vector<size_t> missing(exec.after.size());
  std::vector<size_t> ready;
  std::vector<size_t> order;
  for (size_t n = 0; n < exec.after.size(); ++n) {
    missing[n] = exec.after[n].size();
    for (const size_t earlier : exec.after[n]) before[earlier].push_back(n);
    if (missing[n] == 0) ready.push_back(n);
  }
  while (!ready.empty()) {
    std::swap(ready[any ? state->random() % ready.size() : 0], ready.back());
    order.push_back(ready.back());
    ready.pop_back();
    for (const size_t later : before[order.back()]) {
      if (--missing[later] == 0) ready.push_back(later);
    }
  }
  return order;
}

void CopyBytes(uint64_t to, uint64_t from, size_t bytes) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}

// A copy whose host side is pinned (then its block is used, too), or any memory of the host's.
Result CopyWithHost(const char* name, uint64_t device, uint64_t host, size_t bytes, bool up,
                    Stream stream) {
  const int gpu = GpuOf(stream);
  if (gpu < 0) return kInvalidHandle;
  if (bytes == 0) return Result::kSuccess;
  const FakeMemory::Location location = state->memory.Find(host, gpu);
  if (!state->memory.Usable(device, bytes, gpu, /*pinned=*/false) ||
      (location.block != 0 && (!location.pinned || location.bytes_left < bytes))) {
    return Result::kInvalidValue;
  }
  FakeWork work{name, nullptr, {BlockOf(device, gpu)}};
  if (location.block != 0) work.uses.push_back(location.block);
  if (!up) {
    work.run = [=] { CopyBytes(host, device, bytes); };
  } else if (location.block != 0) {
    work.run = [=] { CopyBytes(device, host, bytes); };
  } else {
    // Memory that is not pinned is read before the call returns.
    const auto* const from = reinterpret_cast<const char*>(host);
    work.run = [device, copy = std::vector<char>(from, from + bytes)] {
      CopyBytes(device, reinterpret_cast<uint64_t>(copy.data()), copy.size());
    };
  }
  return EnqueueWork(stream, std::move(work));
}

}  // namespace

FakeKernel* FindFakeKernel(std::vector<FakeKernel>* kernels, const std::string& name) {
  for (FakeKernel& kernel : *kernels) {
    if (kernel.name == name) return &kernel;
  }
  ReportMisuse("no kernel " + name);
}

FakeDriver::FakeDriver(FakeDriverOptions options) {
  if (state != nullptr) ReportMisuse("there is one already");
  std::set<std::string> names;
  for (const FakeKernel& kernel : options.kernels) {
    if (!names.insert(kernel.name).second) ReportMisuse("two kernels are called " + kernel.name);
  }
  const uint64_t seed = options.seed != 0 ? options.seed : std::random_device()() | 1u;
  std::fprintf(stderr, "fake driver: seed=%llu\n", static_cast<unsigned long long>(seed));
  state_ = std::make_unique<State>(std::move(options), seed);
  state = state_.get();
}

FakeDriver::~FakeDriver() {
  state = nullptr;
  state_ = nullptr;
}

void FakeDriver::FailNext(const std::string& call, Result result, int skip) {
  static constexpr const char* kCalls[] = {
#define CHORUS_FAKE_CALL(name, symbol, parameters) "cu" #name,
      CHORUS_CUDA_FUNCTIONS(CHORUS_FAKE_CALL)
#undef CHORUS_FAKE_CALL
  };
  if (std::find(std::begin(kCalls), std::end(kCalls), call) == std::end(kCalls)) {
    ReportMisuse("no function " + call);
  }
  MutexLock lock(&state_->mutex);
  state_->faults[call].push_back({result, skip});
}

int FakeDriver::faults_left() {
  MutexLock lock(&state_->mutex);
  size_t left = 0;
  for (const auto& [call, faults] : state_->faults) left += faults.size();
  return static_cast<int>(left);
}

bool FakeDriver::HasContext() {
  size_t free = 0;
  size_t total = 0;
  return api().MemGetInfo(&free, &total) == Result::kSuccess;
}

Result FakeDriver::Enqueue(Stream stream, const char* name, std::function<void()> work,
                           const std::vector<DevicePtr>& uses) {
  FakeWork enqueued{name, std::move(work), {}};
  for (const DevicePtr address : uses) enqueued.uses.push_back(BlockOf(address, GpuOf(stream)));
  return EnqueueWork(stream, std::move(enqueued));
}

}  // namespace cuda
}  // namespace chorus

using namespace chorus;        // the driver's functions are in no namespace
using namespace chorus::cuda;  // nor these

#define FAKE(name) \
  if (const Result begun = Begin("cu" #name); begun != Result::kSuccess) return begun
#define FAKE_READY(name)        \
  [[maybe_unused]] int gpu = 0; \
  if (const Result begun = BeginOnGpu("cu" #name, &gpu); begun != Result::kSuccess) return begun

extern "C" {

Result cuInit(unsigned int flags) {
  FAKE(Init);
  if (flags != 0) return Result::kInvalidValue;
  state->initialized = true;
  return Result::kSuccess;
}
Result cuDriverGetVersion(int* version) {
  FAKE(DriverGetVersion);
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

// --- GPUs ---

Result cuDeviceGetCount(int* count) {
  FAKE(DeviceGetCount);
  if (!state->initialized) return kNotInitialized;
  *count = state->options.gpus;
  return Result::kSuccess;
}
Result cuDeviceGet(Device* device, int ordinal) {
  FAKE(DeviceGet);
  if (!state->initialized) return kNotInitialized;
  if (!IsGpu(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return Result::kSuccess;
}
Result cuDeviceGetName(char* name, int bytes, Device device) {
  FAKE(DeviceGetName);
  if (!IsGpu(device)) return kInvalidDevice;
  std::snprintf(name, static_cast<size_t>(bytes), "Fake GPU");
  return Result::kSuccess;
}
Result cuDeviceTotalMem_v2(size_t* bytes, Device device) {
  FAKE(DeviceTotalMem);
  if (!IsGpu(device)) return kInvalidDevice;
  *bytes = state->memory.total_bytes();
  return Result::kSuccess;
}
Result cuDeviceGetAttribute(int* value, DeviceAttribute attribute, Device device) {
  FAKE(DeviceGetAttribute);
  if (!IsGpu(device)) return kInvalidDevice;
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
Result cuDeviceGetPCIBusId(char* id, int bytes, Device device) {
  FAKE(DeviceGetPCIBusId);
  if (!IsGpu(device)) return kInvalidDevice;
  std::snprintf(id, static_cast<size_t>(bytes), "0000:%02x:00.0", device);
  return Result::kSuccess;
}
Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  FAKE(DevicePrimaryCtxRetain);
  if (!state->initialized) return kNotInitialized;
  if (!IsGpu(device)) return kInvalidDevice;
  MutexLock lock(&state->mutex);
  auto& primary = state->primary[static_cast<size_t>(device)];
  if (primary.retained++ == 0) {
    primary.context = state->contexts.Add(std::make_shared<FakeContext>(FakeContext{device}));
  }
  *context = primary.context;
  return Result::kSuccess;
}
Result cuDevicePrimaryCtxRelease_v2(Device device) {
  FAKE(DevicePrimaryCtxRelease);
  if (!IsGpu(device)) return kInvalidDevice;
  MutexLock lock(&state->mutex);
  auto& primary = state->primary[static_cast<size_t>(device)];
  if (primary.retained == 0) return kInvalidContext;
  return --primary.retained == 0 ? state->contexts.Remove(primary.context) : Result::kSuccess;
}
Result cuCtxSetCurrent(Context context) {
  FAKE(CtxSetCurrent);
  if (context != nullptr && state->contexts.Find(context) == nullptr) return kInvalidContext;
  current = context;
  return Result::kSuccess;
}
Result cuCtxSynchronize() {
  FAKE_READY(CtxSynchronize);
  state->streams.AwaitIdleGpu(gpu);
  return Result::kSuccess;
}
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  FAKE_READY(CtxGetStreamPriorityRange);
  *least = 0;
  *greatest = -5;
  return Result::kSuccess;
}

// --- Memory ---

Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  FAKE_READY(MemGetInfo);
  *total = state->memory.total_bytes();
  *free = state->memory.FreeBytes(gpu);
  return Result::kSuccess;
}
Result cuMemAlloc_v2(DevicePtr* pointer, size_t bytes) {
  FAKE_READY(MemAlloc);
  return state->memory.Allocate(gpu, bytes, pointer);
}
Result cuMemFree_v2(DevicePtr pointer) {
  FAKE_READY(MemFree);
  return state->memory.Free(pointer);
}
Result cuMemHostAlloc(void** pointer, size_t bytes, unsigned int /*flags*/) {
  FAKE_READY(MemHostAlloc);
  return state->memory.AllocateHost(bytes, pointer);
}
Result cuMemFreeHost(void* pointer) {
  FAKE_READY(MemFreeHost);
  return state->memory.FreeHost(pointer);
}
Result cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int /*flags*/) {
  FAKE_READY(MemHostRegister);
  return state->memory.Register(pointer, bytes);
}
Result cuMemHostUnregister(void* pointer) {
  FAKE_READY(MemHostUnregister);
  return state->memory.Unregister(pointer);
}
Result cuMemHostGetDevicePointer_v2(DevicePtr* device, void* host, unsigned int flags) {
  FAKE_READY(MemHostGetDevicePointer);
  *device = reinterpret_cast<uint64_t>(host);
  return flags == 0 && state->memory.Usable(*device, 1, gpu, /*pinned=*/true)
             ? Result::kSuccess
             : Result::kInvalidValue;
}
Result cuMemcpyHtoDAsync_v2(DevicePtr to, const void* from, size_t bytes, Stream stream) {
  FAKE_READY(MemcpyHtoDAsync);
  return CopyWithHost("a copy to the device", to, reinterpret_cast<uint64_t>(from), bytes,
                      /*up=*/true, stream);
}
Result cuMemcpyDtoHAsync_v2(void* to, DevicePtr from, size_t bytes, Stream stream) {
  FAKE_READY(MemcpyDtoHAsync);
  return CopyWithHost("a copy to the host", from, reinterpret_cast<uint64_t>(to), bytes,
                      /*up=*/false, stream);
}
Result cuMemcpyDtoDAsync_v2(DevicePtr to, DevicePtr from, size_t bytes, Stream stream) {
  FAKE_READY(MemcpyDtoDAsync);
  const int user = GpuOf(stream);
  if (user < 0) return kInvalidHandle;
  if (bytes == 0) return Result::kSuccess;
  if (!state->memory.Usable(from, bytes, user, /*pinned=*/false) ||
      !state->memory.Usable(to, bytes, user, /*pinned=*/false)) {
    return Result::kInvalidValue;
  }
  return EnqueueWork(stream, {"a copy on the device",
                              [=] { CopyBytes(to, from, bytes); },
                              {BlockOf(from, user), BlockOf(to, user)}});
}
Result cuMemsetD8Async(DevicePtr to, unsigned char value, size_t count, Stream stream) {
  FAKE_READY(MemsetD8Async);
  const int user = GpuOf(stream);
  if (user < 0) return kInvalidHandle;
  if (count == 0) return Result::kSuccess;
  if (!state->memory.Usable(to, count, user, /*pinned=*/false)) return Result::kInvalidValue;
  return EnqueueWork(stream, {"a memset",
                              [=] { std::memset(reinterpret_cast<void*>(to), value, count); },
                              {BlockOf(to, user)}});
}

// --- Chunks ---

Result cuMemCreate(AllocationHandle* handle, size_t bytes, const AllocationProperties* properties,
                   unsigned long long flags) {
  FAKE_READY(MemCreate);
  if (flags != 0 || properties->type != AllocationType::kPinned ||
      properties->location.type != LocationType::kDevice) {
    return Result::kInvalidValue;
  }
  return state->memory.CreateChunk(properties->location.id, bytes, handle);
}
Result cuMemRelease(AllocationHandle handle) {
  FAKE_READY(MemRelease);
  return state->memory.ReleaseChunk(handle);
}
Result cuMemAddressReserve(DevicePtr* pointer, size_t bytes, size_t alignment, DevicePtr wish,
                           unsigned long long flags) {
  FAKE_READY(MemAddressReserve);
  if (alignment != 0 || wish != 0 || flags != 0) return Result::kInvalidValue;
  return state->memory.Reserve(bytes, pointer);
}
Result cuMemAddressFree(DevicePtr pointer, size_t bytes) {
  FAKE_READY(MemAddressFree);
  return state->memory.Unreserve(pointer, bytes);
}
Result cuMemMap(DevicePtr pointer, size_t bytes, size_t offset, AllocationHandle handle,
                unsigned long long flags) {
  FAKE_READY(MemMap);
  if (offset != 0 || flags != 0) return Result::kInvalidValue;
  return state->memory.Map(pointer, bytes, handle);
}
Result cuMemUnmap(DevicePtr pointer, size_t bytes) {
  FAKE_READY(MemUnmap);
  return state->memory.Unmap(pointer, bytes);
}
Result cuMemSetAccess(DevicePtr pointer, size_t bytes, const AccessDescription* descriptions,
                      size_t count) {
  FAKE_READY(MemSetAccess);
  return state->memory.SetAccess(pointer, bytes, descriptions, count);
}
Result cuMemExportToShareableHandle(void* shareable, AllocationHandle handle, HandleType type,
                                    unsigned long long flags) {
  FAKE_READY(MemExportToShareableHandle);
  if (type != HandleType::kFileDescriptor || flags != 0) return Result::kInvalidValue;
  return state->memory.ExportChunk(handle, static_cast<int*>(shareable));
}
Result cuMemImportFromShareableHandle(AllocationHandle* handle, void* shareable, HandleType type) {
  FAKE_READY(MemImportFromShareableHandle);
  if (type != HandleType::kFileDescriptor) return Result::kInvalidValue;
  // The descriptor itself stands where a pointer would.
  return state->memory.ImportChunk(static_cast<int>(reinterpret_cast<intptr_t>(shareable)), handle);
}
Result cuMemGetAllocationGranularity(size_t* granularity, const AllocationProperties* properties,
                                     Granularity /*option*/) {
  FAKE_READY(MemGetAllocationGranularity);
  *granularity = FakeMemory::kGranularity;
  return properties->type == AllocationType::kPinned ? Result::kSuccess : Result::kInvalidValue;
}

// --- Kernels ---

Result cuModuleLoadData(Module* module, const void* image) {
  FAKE_READY(ModuleLoadData);
  if (image == nullptr) return Result::kInvalidValue;
  *module = state->modules.Add(std::make_shared<FakeModule>(FakeModule{gpu}));
  return Result::kSuccess;
}
// Its functions stay, and fail when they are launched.
Result cuModuleUnload(Module module) {
  FAKE_READY(ModuleUnload);
  const std::string user = state->streams.UserOf(reinterpret_cast<uint64_t>(module));
  if (!user.empty()) ReportMisuse("cuModuleUnload: " + user + " has not finished");
  return state->modules.Remove(module);
}
Result cuModuleGetFunction(Function* function, Module module, const char* name) {
  FAKE_READY(ModuleGetFunction);
  const auto entry = state->modules.Find(module);
  if (entry == nullptr) return kInvalidHandle;
  for (const FakeKernel& kernel : state->options.kernels) {
    if (kernel.name != name) continue;
    *function = state->functions.Add(
        std::make_shared<FakeFunction>(FakeFunction{&kernel, module, entry->gpu}));
    return Result::kSuccess;
  }
  return kNotFound;
}
Result cuFuncGetAttribute(int* value, FunctionAttribute attribute, Function function) {
  FAKE_READY(FuncGetAttribute);
  *value = attribute == FunctionAttribute::kBinaryVersion ? 90 : 0;
  return state->functions.Find(function) != nullptr ? Result::kSuccess : kInvalidHandle;
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function function,
                                                   int block_threads, size_t dynamic_shared_bytes) {
  FAKE_READY(OccupancyMaxActiveBlocksPerMultiprocessor);
  *blocks = 2;
  if (state->functions.Find(function) == nullptr) return kInvalidHandle;
  return block_threads > 0 && dynamic_shared_bytes == 0 ? Result::kSuccess : Result::kInvalidValue;
}
Result cuLaunchKernel(Function function, unsigned int grid_x, unsigned int grid_y,
                      unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                      unsigned int block_z, unsigned int shared_bytes, Stream stream, void** params,
                      void** extra) {
  FAKE_READY(LaunchKernel);
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_bytes != 0 ||
      extra != nullptr) {
    return Result::kInvalidValue;
  }
  FakeWork work;
  const Result result = MakeLaunch(function, grid_x, block_x, params, GpuOf(stream), &work);
  return result != Result::kSuccess ? result : EnqueueWork(stream, std::move(work));
}
Result cuLaunchHostFunc(Stream stream, HostFunction function, void* data) {
  FAKE_READY(LaunchHostFunc);
  return FakeDriver::Enqueue(stream, "a host function", [function, data] {
    in_host_function = true;
    function(data);
    in_host_function = false;
  });
}

// --- Streams and events ---

Result cuStreamCreateWithPriority(Stream* stream, unsigned int flags, int priority) {
  FAKE_READY(StreamCreateWithPriority);
  if (flags != kStreamNonBlocking || priority > 0 || priority < -5) return Result::kInvalidValue;
  auto row = std::make_shared<FakeStream>();
  row->gpu = gpu;
  row->queue = state->streams.Create(gpu);
  *stream = state->all_streams.Add(std::move(row));
  return Result::kSuccess;
}
// What it was given runs all the same.
Result cuStreamDestroy_v2(Stream stream) {
  FAKE_READY(StreamDestroy);
  return state->all_streams.Remove(stream);
}
Result cuStreamSynchronize(Stream stream) {
  FAKE_READY(StreamSynchronize);
  const auto entry = state->all_streams.Find(stream);
  if (entry == nullptr) return kInvalidHandle;
  {
    MutexLock lock(&state->mutex);
    if (entry->capture != nullptr) return kCaptureUnsupported;
  }
  state->streams.AwaitIdle(*entry->queue);
  return Result::kSuccess;
}
Result cuStreamQuery(Stream stream) {
  FAKE_READY(StreamQuery);
  const auto entry = state->all_streams.Find(stream);
  if (entry == nullptr) return kInvalidHandle;
  return state->streams.Idle(*entry->queue) ? Result::kSuccess : Result::kNotReady;
}
Result cuStreamWaitEvent(Stream stream, Event event, unsigned int flags) {
  FAKE_READY(StreamWaitEvent);
  if (flags != 0) return Result::kInvalidValue;
  const auto waiter = state->all_streams.Find(stream);
  const auto awaited = state->events.Find(event);
  if (waiter == nullptr || awaited == nullptr) return kInvalidHandle;
  MutexLock lock(&state->mutex);
  if (waiter->capture != nullptr) return kCaptureUnsupported;
  if (awaited->latest != nullptr) state->streams.AddWait(waiter->queue, awaited->latest);
  return Result::kSuccess;
}
Result cuStreamWriteValue32_v2(Stream stream, DevicePtr address, uint32_t value,
                               unsigned int flags) {
  FAKE_READY(StreamWriteValue32);
  const int user = GpuOf(stream);
  if (user < 0) return kInvalidHandle;
  const FakeMemory::Location location = state->memory.Find(address, user);
  if (flags != 0 || address % 4 != 0 || !location.usable || location.bytes_left < 4) {
    return Result::kInvalidValue;
  }
  return EnqueueWork(stream, {"a write of a value",
                              [=] { StoreShared(reinterpret_cast<uint32_t*>(address), value); },
                              {location.block}});
}
Result cuStreamWaitValue32_v2(Stream /*stream*/, DevicePtr /*address*/, uint32_t /*value*/,
                              unsigned int /*flags*/) {
  FAKE_READY(StreamWaitValue32);
  return Result::kNotSupported;
}
Result cuEventCreate(Event* event, unsigned int flags) {
  FAKE_READY(EventCreate);
  if ((flags & ~(kEventBlockingSync | kEventDisableTiming)) != 0) return Result::kInvalidValue;
  auto row = std::make_shared<FakeEvent>();
  row->gpu = gpu;
  row->timed = (flags & kEventDisableTiming) == 0;
  *event = state->events.Add(std::move(row));
  return Result::kSuccess;
}
// Records and waits that streams have been given stay.
Result cuEventDestroy_v2(Event event) {
  FAKE_READY(EventDestroy);
  return state->events.Remove(event);
}
Result cuEventRecord(Event event, Stream stream) {
  FAKE_READY(EventRecord);
  const auto recorder = state->all_streams.Find(stream);
  const auto recorded = state->events.Find(event);
  if (recorder == nullptr || recorded == nullptr || recorder->gpu != recorded->gpu) {
    return kInvalidHandle;
  }
  MutexLock lock(&state->mutex);
  if (recorder->capture != nullptr) return kCaptureUnsupported;
  recorded->latest = state->streams.AddRecord(recorder->queue);
  return Result::kSuccess;
}
Result cuEventQuery(Event event) {
  FAKE_READY(EventQuery);
  const auto entry = state->events.Find(event);
  if (entry == nullptr) return kInvalidHandle;
  MutexLock lock(&state->mutex);
  return entry->latest == nullptr || state->streams.Reached(*entry->latest) ? Result::kSuccess
                                                                            : Result::kNotReady;
}
Result cuEventSynchronize(Event event) {
  FAKE_READY(EventSynchronize);
  const auto entry = state->events.Find(event);
  if (entry == nullptr) return kInvalidHandle;
  FakeStreams::RecordRef latest;
  {
    MutexLock lock(&state->mutex);
    latest = entry->latest;
  }
  if (latest != nullptr) state->streams.AwaitReached(*latest);
  return Result::kSuccess;
}
Result cuEventElapsedTime(float* milliseconds, Event start, Event end) {
  FAKE_READY(EventElapsedTime);
  const auto first = state->events.Find(start);
  const auto last = state->events.Find(end);
  if (first == nullptr || last == nullptr || !first->timed || !last->timed) return kInvalidHandle;
  MutexLock lock(&state->mutex);
  if (first->latest == nullptr || last->latest == nullptr) return kInvalidHandle;
  if (!state->streams.Reached(*first->latest) || !state->streams.Reached(*last->latest)) {
    return Result::kNotReady;
  }
  *milliseconds = static_cast<float>(absl::ToDoubleMilliseconds(
      state->streams.WhenReached(*last->latest) - state->streams.WhenReached(*first->latest)));
  return Result::kSuccess;
}

// --- Graphs: a launch is one piece of work ---

Result cuGraphCreate(Graph* graph, unsigned int flags) {
  FAKE_READY(GraphCreate);
  if (flags != 0) return Result::kInvalidValue;
  *graph = state->graphs.Add(std::make_shared<FakeGraph>());
  return Result::kSuccess;
}
Result cuGraphDestroy(Graph graph) {
  FAKE_READY(GraphDestroy);
  const auto entry = state->graphs.Find(graph);
  if (entry == nullptr) return kInvalidHandle;
  MutexLock lock(&state->mutex);
  for (const GraphNode node : entry->nodes) state->nodes.Remove(node);
  return state->graphs.Remove(graph);
}
Result cuGraphAddKernelNode_v2(GraphNode* node, Graph graph, const GraphNode* dependencies,
                               size_t count, const KernelNodeParams* params) {
  FAKE_READY(GraphAddKernelNode);
  const auto entry = state->graphs.Find(graph);
  if (entry == nullptr) return kInvalidHandle;
  auto row = std::make_shared<FakeNode>();
  if (const Result result = MakeNodeLaunch(params, gpu, &row->work); result != Result::kSuccess) {
    return result;
  }
  row->after.assign(dependencies, dependencies + count);
  *node = state->nodes.Add(std::move(row));
  MutexLock lock(&state->mutex);
  entry->nodes.push_back(*node);
  return Result::kSuccess;
}
Result cuGraphGetNodes(Graph graph, GraphNode* nodes, size_t* count) {
  FAKE_READY(GraphGetNodes);
  const auto entry = state->graphs.Find(graph);
  if (entry == nullptr) return kInvalidHandle;
  MutexLock lock(&state->mutex);
  if (nodes != nullptr) {
    if (*count < entry->nodes.size()) return Result::kInvalidValue;
    std::copy(entry->nodes.begin(), entry->nodes.end(), nodes);
  }
  *count = entry->nodes.size();
  return Result::kSuccess;
}
Result cuGraphInstantiateWithFlags(GraphExec* exec, Graph graph, unsigned long long flags) {
  FAKE_READY(GraphInstantiate);
  const auto entry = state->graphs.Find(graph);
  if (entry == nullptr) return kInvalidHandle;
  if (flags != 0) return Result::kInvalidValue;
  auto row = std::make_shared<FakeGraphExec>();
  MutexLock lock(&state->mutex);
  for (const GraphNode handle : entry->nodes) {
    const auto node = state->nodes.Find(handle);
    std::vector<size_t> after;
    for (const GraphNode earlier : node->after) {
      const auto index = row->index.find(earlier);
      if (index == row->index.end()) return Result::kInvalidValue;
      after.push_back(index->second);
    }
    row->index[handle] = row->work.size();
    row->work.push_back(node->work);
    row->after.push_back(std::move(after));
  }
  *exec = state->execs.Add(std::move(row));
  return Result::kSuccess;
}
// What was launched of it runs all the same.
Result cuGraphExecDestroy(GraphExec exec) {
  FAKE_READY(GraphExecDestroy);
  return state->execs.Remove(exec);
}
Result cuGraphExecUpdate_v2(GraphExec exec, Graph graph, ExecUpdateResultInfo* info) {
  FAKE_READY(GraphExecUpdate);
  const auto updated = state->execs.Find(exec);
  const auto from = state->graphs.Find(graph);
  if (updated == nullptr || from == nullptr) return kInvalidHandle;
  MutexLock lock(&state->mutex);
  if (from->nodes.size() != updated->work.size() || info == nullptr) return Result::kInvalidValue;
  for (size_t n = 0; n < from->nodes.size(); ++n) {
    updated->work[n] = state->nodes.Find(from->nodes[n])->work;
  }
  return Result::kSuccess;
}
Result cuGraphExecKernelNodeSetParams_v2(GraphExec exec, GraphNode node,
                                         const KernelNodeParams* params) {
  FAKE_READY(GraphExecKernelNodeSetParams);
  const auto entry = state->execs.Find(exec);
  if (entry == nullptr) return kInvalidHandle;
  FakeWork work;
  if (const Result result = MakeNodeLaunch(params, gpu, &work); result != Result::kSuccess) {
    return result;
  }
  MutexLock lock(&state->mutex);
  const auto index = entry->index.find(node);
  if (index == entry->index.end()) return Result::kInvalidValue;
  entry->work[index->second] = std::move(work);
  return Result::kSuccess;
}
Result cuGraphUpload(GraphExec exec, Stream stream) {
  FAKE_READY(GraphUpload);
  if (state->execs.Find(exec) == nullptr) return kInvalidHandle;
  return FakeDriver::Enqueue(stream, "an upload of a graph", [] {});
}
Result cuGraphLaunch(GraphExec exec, Stream stream) {
  FAKE_READY(GraphLaunch);
  const auto entry = state->execs.Find(exec);
  if (entry == nullptr) return kInvalidHandle;
  FakeWork launch;
  launch.name = "a graph";
  std::vector<std::function<void()>> nodes;
  {
    MutexLock lock(&state->mutex);
    for (const size_t n : DrawOrder(*entry)) {
      const FakeWork& node = entry->work[n];
      nodes.push_back(node.run);
      launch.uses.insert(launch.uses.end(), node.uses.begin(), node.uses.end());
    }
  }
  launch.run = [nodes = std::move(nodes)] {
    for (const auto& node : nodes) node();
  };
  return EnqueueWork(stream, std::move(launch));
}
Result cuStreamBeginCaptureToGraph(Stream stream, Graph graph, const GraphNode* dependencies,
                                   const EdgeData* /*edges*/, size_t count, CaptureMode /*mode*/) {
  FAKE_READY(StreamBeginCaptureToGraph);
  const auto captured = state->all_streams.Find(stream);
  if (captured == nullptr || state->graphs.Find(graph) == nullptr) return kInvalidHandle;
  MutexLock lock(&state->mutex);
  if (captured->capture != nullptr) return Result::kInvalidValue;
  captured->capture = graph;
  captured->capture_after.assign(dependencies, dependencies + count);
  return Result::kSuccess;
}
Result cuStreamEndCapture(Stream stream, Graph* graph) {
  FAKE_READY(StreamEndCapture);
  const auto captured = state->all_streams.Find(stream);
  if (captured == nullptr) return kInvalidHandle;
  MutexLock lock(&state->mutex);
  *graph = std::exchange(captured->capture, nullptr);
  return *graph != nullptr ? Result::kSuccess : Result::kInvalidValue;
}

}  // extern "C"

namespace chorus {
namespace cuda {

Api FakeDriver::api() {
  Api api;
#define CHORUS_FAKE_FIELD(name, symbol, parameters) api.name = &::symbol;
  CHORUS_CUDA_FUNCTIONS(CHORUS_FAKE_FIELD)
#undef CHORUS_FAKE_FIELD
  return api;
}

}  // namespace cuda
}  // namespace chorus
