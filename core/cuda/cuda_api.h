// The CUDA driver as a table of functions, with declarations of our own: no header and no library
// of NVIDIA's is needed to build, and a machine without a driver is an error, not a failed start. A
// table is filled from the driver's library, or by anything else that has functions of these types.
//
// Names are the driver's without their "cu" and version: the version that a symbol ends in fixes
// its signature for good. cuda_declarations_test holds all of this against the toolkit's header,
// where there is one: types of functions, values of enums, layouts of structures.
//
// Threads: a table does not change once it is filled; the functions are as safe as the driver's.
//   Most of them act on the context that is current on the calling thread.
// Ownership: handles are the driver's. Errors: said at each function of our own.
#ifndef CHORUS_CORE_CUDA_CUDA_API_H_
#define CHORUS_CORE_CUDA_CUDA_API_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace chorus {
namespace cuda {

// CUresult. Numbers that have no name here are results, too.
enum class Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kDeinitialized = 4,
  kNoDevice = 100,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchFailed = 719,
  kNotSupported = 801,
  kUnknown = 999,
};

// CUdevice_attribute.
enum class DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kL2CacheBytes = 38,
  kAsyncEngineCount = 40,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kHostRegisterSupported = 99,
  kVirtualMemorySupported = 102,
  kFileDescriptorHandlesSupported = 103,
  kReadOnlyHostRegisterSupported = 113,
};

// CUfunction_attribute.
enum class FunctionAttribute : int {
  kSharedBytes = 1,
  kLocalBytes = 3,
  kRegisters = 4,
  kBinaryVersion = 6,
};

// CUmemAllocationType, CUmemAllocationHandleType, CUmemLocationType, CUmemAccess_flags,
// CUmemAllocationGranularity_flags, CUstreamCaptureMode, CUgraphExecUpdateResult.
enum class AllocationType : int { kPinned = 1 };
enum class HandleType : int { kNone = 0, kFileDescriptor = 1 };
enum class LocationType : int { kDevice = 1 };
enum class Access : int { kNone = 0, kRead = 1, kReadWrite = 3 };
enum class Granularity : int { kMinimum = 0, kRecommended = 1 };
enum class CaptureMode : int { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum class UpdateResult : int { kSuccess = 0 };

// Flags, as the functions take them.
inline constexpr unsigned int kStreamNonBlocking = 1;
inline constexpr unsigned int kEventDefault = 0;
inline constexpr unsigned int kEventBlockingSync = 1;
inline constexpr unsigned int kEventDisableTiming = 2;
inline constexpr unsigned int kHostAllocPortable = 1;
inline constexpr unsigned int kHostAllocDeviceMap = 2;
inline constexpr unsigned int kHostRegisterPortable = 1;
inline constexpr unsigned int kHostRegisterDeviceMap = 2;
inline constexpr unsigned int kHostRegisterReadOnly = 8;
inline constexpr unsigned int kWriteValueDefault = 0;
inline constexpr unsigned int kWaitValueGreaterOrEqual = 0;

using Device = int;
using DevicePtr = uint64_t;
using AllocationHandle = uint64_t;
using Context = struct ContextStruct*;
using Module = struct ModuleStruct*;
using Function = struct FunctionStruct*;
using Kernel = struct KernelStruct*;
using Stream = struct StreamStruct*;
using Event = struct EventStruct*;
using Graph = struct GraphStruct*;
using GraphNode = struct GraphNodeStruct*;
using GraphExec = struct GraphExecStruct*;
using HostFunction = void (*)(void* data);

// CUmemLocation.
struct Location {
  LocationType type = LocationType::kDevice;
  int id = 0;
};

// CUmemAllocationProp.
struct AllocationProperties {
  AllocationType type = AllocationType::kPinned;
  HandleType requested_handles = HandleType::kNone;
  Location location;
  void* windows_only = nullptr;
  struct Flags {
    unsigned char compression_type = 0;
    unsigned char gpu_direct_rdma_capable = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  };
  Flags flags;
};

// CUmemAccessDesc.
struct AccessDescription {
  Location location;
  Access access = Access::kReadWrite;
};

// CUDA_KERNEL_NODE_PARAMS_v2.
struct KernelNodeParams {
  Function function = nullptr;
  unsigned int grid_x = 1;
  unsigned int grid_y = 1;
  unsigned int grid_z = 1;
  unsigned int block_x = 1;
  unsigned int block_y = 1;
  unsigned int block_z = 1;
  unsigned int shared_bytes = 0;
  void** kernel_params = nullptr;
  void** extra = nullptr;
  Kernel kernel = nullptr;
  Context context = nullptr;
};

// CUgraphExecUpdateResultInfo.
struct ExecUpdateResultInfo {
  UpdateResult result = UpdateResult::kSuccess;
  GraphNode error_node = nullptr;
  GraphNode error_from_node = nullptr;
};

// CUgraphEdgeData. Zeros: the usual edge.
struct EdgeData {
  unsigned char from_port = 0;
  unsigned char to_port = 0;
  unsigned char type = 0;
  unsigned char reserved[5] = {};
};

// X(name in the table, symbol of the driver, parameters); all of them return a Result.
// clang-format off
#define CHORUS_CUDA_FUNCTIONS(X)                                                                   \
  X(Init, cuInit, (unsigned int flags))                                                            \
  X(DriverGetVersion, cuDriverGetVersion, (int* version))                                          \
  X(GetErrorName, cuGetErrorName, (Result error, const char** text))                               \
  X(GetErrorString, cuGetErrorString, (Result error, const char** text))                           \
  X(DeviceGetCount, cuDeviceGetCount, (int* count))                                                \
  X(DeviceGet, cuDeviceGet, (Device* device, int ordinal))                                         \
  X(DeviceGetName, cuDeviceGetName, (char* name, int bytes, Device device))                        \
  X(DeviceTotalMem, cuDeviceTotalMem_v2, (size_t* bytes, Device device))                           \
  X(DeviceGetAttribute, cuDeviceGetAttribute,                                                      \
    (int* value, DeviceAttribute attribute, Device device))                                        \
  X(DeviceGetPCIBusId, cuDeviceGetPCIBusId, (char* id, int bytes, Device device))                  \
  X(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (Context* context, Device device))           \
  X(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (Device device))                        \
  X(CtxSetCurrent, cuCtxSetCurrent, (Context context))                                             \
  X(CtxSynchronize, cuCtxSynchronize, ())                                                          \
  X(CtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int* least, int* greatest))           \
  X(MemGetInfo, cuMemGetInfo_v2, (size_t* free, size_t* total))                                    \
  X(MemAlloc, cuMemAlloc_v2, (DevicePtr* pointer, size_t bytes))                                   \
  X(MemFree, cuMemFree_v2, (DevicePtr pointer))                                                    \
  X(MemHostAlloc, cuMemHostAlloc, (void** pointer, size_t bytes, unsigned int flags))              \
  X(MemFreeHost, cuMemFreeHost, (void* pointer))                                                   \
  X(MemHostRegister, cuMemHostRegister_v2, (void* pointer, size_t bytes, unsigned int flags))      \
  X(MemHostUnregister, cuMemHostUnregister, (void* pointer))                                       \
  X(MemHostGetDevicePointer, cuMemHostGetDevicePointer_v2,                                         \
    (DevicePtr* device, void* host, unsigned int flags))                                           \
  X(MemcpyHtoDAsync, cuMemcpyHtoDAsync_v2,                                                         \
    (DevicePtr to, const void* from, size_t bytes, Stream stream))                                 \
  X(MemcpyDtoHAsync, cuMemcpyDtoHAsync_v2,                                                         \
    (void* to, DevicePtr from, size_t bytes, Stream stream))                                       \
  X(MemcpyDtoDAsync, cuMemcpyDtoDAsync_v2,                                                         \
    (DevicePtr to, DevicePtr from, size_t bytes, Stream stream))                                   \
  X(MemsetD8Async, cuMemsetD8Async,                                                                \
    (DevicePtr to, unsigned char value, size_t count, Stream stream))                              \
  X(MemCreate, cuMemCreate,                                                                        \
    (AllocationHandle* handle, size_t bytes, const AllocationProperties* properties,               \
     unsigned long long flags))                                                                    \
  X(MemRelease, cuMemRelease, (AllocationHandle handle))                                           \
  X(MemAddressReserve, cuMemAddressReserve,                                                        \
    (DevicePtr* pointer, size_t bytes, size_t alignment, DevicePtr wish,                           \
     unsigned long long flags))                                                                    \
  X(MemAddressFree, cuMemAddressFree, (DevicePtr pointer, size_t bytes))                           \
  X(MemMap, cuMemMap,                                                                              \
    (DevicePtr pointer, size_t bytes, size_t offset, AllocationHandle handle,                      \
     unsigned long long flags))                                                                    \
  X(MemUnmap, cuMemUnmap, (DevicePtr pointer, size_t bytes))                                       \
  X(MemSetAccess, cuMemSetAccess,                                                                  \
    (DevicePtr pointer, size_t bytes, const AccessDescription* descriptions, size_t count))        \
  X(MemExportToShareableHandle, cuMemExportToShareableHandle,                                      \
    (void* shareable, AllocationHandle handle, HandleType type, unsigned long long flags))         \
  X(MemImportFromShareableHandle, cuMemImportFromShareableHandle,                                  \
    (AllocationHandle* handle, void* shareable, HandleType type))                                  \
  X(MemGetAllocationGranularity, cuMemGetAllocationGranularity,                                    \
    (size_t* granularity, const AllocationProperties* properties, Granularity option))             \
  X(ModuleLoadData, cuModuleLoadData, (Module* module, const void* image))                         \
  X(ModuleUnload, cuModuleUnload, (Module module))                                                 \
  X(ModuleGetFunction, cuModuleGetFunction,                                                        \
    (Function* function, Module module, const char* name))                                         \
  X(FuncGetAttribute, cuFuncGetAttribute,                                                          \
    (int* value, FunctionAttribute attribute, Function function))                                  \
  X(OccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveBlocksPerMultiprocessor,        \
    (int* blocks, Function function, int block_threads, size_t dynamic_shared_bytes))              \
  X(LaunchKernel, cuLaunchKernel,                                                                  \
    (Function function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,             \
     unsigned int block_x, unsigned int block_y, unsigned int block_z,                             \
     unsigned int shared_bytes, Stream stream, void** params, void** extra))                       \
  X(LaunchHostFunc, cuLaunchHostFunc, (Stream stream, HostFunction function, void* data))          \
  X(StreamCreateWithPriority, cuStreamCreateWithPriority,                                          \
    (Stream* stream, unsigned int flags, int priority))                                            \
  X(StreamDestroy, cuStreamDestroy_v2, (Stream stream))                                            \
  X(StreamSynchronize, cuStreamSynchronize, (Stream stream))                                       \
  X(StreamQuery, cuStreamQuery, (Stream stream))                                                   \
  X(StreamWaitEvent, cuStreamWaitEvent, (Stream stream, Event event, unsigned int flags))          \
  X(StreamWriteValue32, cuStreamWriteValue32_v2,                                                   \
    (Stream stream, DevicePtr address, uint32_t value, unsigned int flags))                        \
  X(StreamWaitValue32, cuStreamWaitValue32_v2,                                                     \
    (Stream stream, DevicePtr address, uint32_t value, unsigned int flags))                        \
  X(StreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph,                                        \
    (Stream stream, Graph graph, const GraphNode* dependencies, const EdgeData* edges,             \
     size_t count, CaptureMode mode))                                                              \
  X(StreamEndCapture, cuStreamEndCapture, (Stream stream, Graph* graph))                           \
  X(EventCreate, cuEventCreate, (Event* event, unsigned int flags))                                \
  X(EventDestroy, cuEventDestroy_v2, (Event event))                                                \
  X(EventRecord, cuEventRecord, (Event event, Stream stream))                                      \
  X(EventQuery, cuEventQuery, (Event event))                                                       \
  X(EventSynchronize, cuEventSynchronize, (Event event))                                           \
  X(EventElapsedTime, cuEventElapsedTime, (float* milliseconds, Event start, Event end))           \
  X(GraphCreate, cuGraphCreate, (Graph* graph, unsigned int flags))                                \
  X(GraphDestroy, cuGraphDestroy, (Graph graph))                                                   \
  X(GraphAddKernelNode, cuGraphAddKernelNode_v2,                                                   \
    (GraphNode* node, Graph graph, const GraphNode* dependencies, size_t count,                    \
     const KernelNodeParams* params))                                                              \
  X(GraphGetNodes, cuGraphGetNodes, (Graph graph, GraphNode* nodes, size_t* count))                \
  X(GraphInstantiate, cuGraphInstantiateWithFlags,                                                 \
    (GraphExec* exec, Graph graph, unsigned long long flags))                                      \
  X(GraphExecDestroy, cuGraphExecDestroy, (GraphExec exec))                                        \
  X(GraphExecUpdate, cuGraphExecUpdate_v2,                                                         \
    (GraphExec exec, Graph graph, ExecUpdateResultInfo* info))                                     \
  X(GraphExecKernelNodeSetParams, cuGraphExecKernelNodeSetParams_v2,                               \
    (GraphExec exec, GraphNode node, const KernelNodeParams* params))                              \
  X(GraphUpload, cuGraphUpload, (GraphExec exec, Stream stream))                                   \
  X(GraphLaunch, cuGraphLaunch, (GraphExec exec, Stream stream))
// clang-format on

struct Api {
#define CHORUS_CUDA_FIELD(name, symbol, parameters) Result(*name) parameters = nullptr;
  CHORUS_CUDA_FUNCTIONS(CHORUS_CUDA_FIELD)
#undef CHORUS_CUDA_FIELD
};

// The table of the machine's driver, libcuda.so.1, from `folders` or where the system keeps it.
// Nothing of the driver has run yet: call Init first. FAILED_PRECONDITION kWrongState, in one line:
// there is no driver, or it is too old and lacks a function, which is named.
absl::StatusOr<Api> LoadApi(const std::vector<std::string>& folders);

// The symbols of the table, in its order.
const std::vector<const char*>& ApiSymbols();

// "CUDA_ERROR_OUT_OF_MEMORY (2), out of memory".
std::string ResultText(const Api& api, Result result);

// OK for kSuccess. RESOURCE_EXHAUSTED kOutOfMemory: the device's memory is full; INTERNAL
// kExecFailed: everything else. The text is "`call`: ResultText".
absl::Status ToStatus(const Api& api, Result result, const char* call);

}  // namespace cuda
}  // namespace chorus

// Calls a function of a table, and returns its error from the function around.
#define CHORUS_CUDA(api, function, ...) \
  CHORUS_RETURN_IF_ERROR(               \
      ::chorus::cuda::ToStatus((api), (api).function(__VA_ARGS__), "cu" #function))

#endif  // CHORUS_CORE_CUDA_CUDA_API_H_
