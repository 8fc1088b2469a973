// cuDNN's graphs of operations as a table of functions, with declarations of our own
// (core/cuda/cuda_api.h says why).
//
// Everything is a descriptor: attributes are set, it is finalized, and does not change any more.
//
// Threads: a table does not change once it is filled; a handle and a descriptor are used by one
// thread at a time. Ownership: handles and descriptors are cuDNN's. Errors: said at each function
// of our own.
#ifndef CHORUS_CORE_CUDA_CUDNN_API_H_
#define CHORUS_CORE_CUDA_CUDNN_API_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/cuda/cuda_api.h"

namespace chorus {
namespace cuda {

// cudnnStatus_t.
enum class DnnStatus : int {
  kSuccess = 0,
  kBadParameter = 2000,
  kNotSupported = 3000,
  kNoHostMemory = 4003,
  kNoDeviceMemory = 4004,
  kExecutionFailed = 5000,  // as those beyond: of the driver, or of another library
};
// cudnnDataType_t.
enum class DnnType : int { kF32 = 0, kF64 = 1 };
// cudnnConvolutionMode_t.
enum class DnnConvolutionMode : int { kCrossCorrelation = 1 };
// cudnnBackendHeurMode_t.
enum class DnnHeuristic : int { kB = 1, kFallback = 2 };
// cudnnBackendNumericalNote_t: what an engine computes otherwise than as it stands.
enum class DnnNumericalNote : int {
  kTensorCore = 0,
  kDownConvertInputs = 1,
  kReducedPrecisionReduction = 2,
  kFft = 3,
  kNondeterministic = 4,
  kWinograd = 5,
  kWinograd4x4 = 6,
  kWinograd6x6 = 7,
  kWinograd13x13 = 8,
  kStrictNanPropagation = 9,
};
// cudnnBackendBehaviorNote_t.
enum class DnnBehaviorNote : int { kRuntimeCompilation = 0, kCublasLt = 4 };
// cudnnBackendDescriptorType_t.
enum class DnnDescriptorType : int {
  kConvolution = 1,
  kEngine = 2,
  kEngineConfig = 3,
  kEngineHeuristic = 4,
  kExecutionPlan = 5,
  kConvolutionForward = 10,
  kConvolutionBackwardFilter = 11,
  kConvolutionBackwardData = 12,
  kOperationGraph = 15,
  kVariantPack = 16,
  kTensor = 17,
};
// cudnnBackendAttributeType_t: of an attribute's elements.
enum class DnnAttributeType : int {
  kHandle = 0,
  kDataType = 1,
  kInt64 = 3,
  kFloat = 4,
  kDouble = 5,
  kPointer = 6,
  kConvolutionMode = 7,
  kHeuristic = 8,
  kNumericalNote = 11,
  kDescriptor = 15,
  kBehaviorNote = 19,
};
// cudnnBackendAttributeName_t.
enum class DnnAttribute : int {
  kConvolutionComputeType = 100,
  kConvolutionMode = 101,
  kConvolutionDilations = 102,
  kConvolutionStrides = 103,
  kConvolutionPostPaddings = 104,
  kConvolutionPrePaddings = 105,
  kConvolutionSpatialDims = 106,
  kHeuristicMode = 200,
  kHeuristicGraph = 201,
  kHeuristicResults = 202,
  kConfigEngine = 300,
  kPlanHandle = 400,
  kPlanConfig = 401,
  kPlanWorkspaceBytes = 402,
  kForwardAlpha = 700,
  kForwardBeta = 701,
  kForwardConvolution = 702,
  kForwardW = 703,
  kForwardX = 704,
  kForwardY = 705,
  kDataAlpha = 706,
  kDataBeta = 707,
  kDataConvolution = 708,
  kDataW = 709,
  kDataX = 710,
  kDataY = 711,
  kFilterAlpha = 712,
  kFilterBeta = 713,
  kFilterConvolution = 714,
  kFilterW = 715,
  kFilterX = 716,
  kFilterY = 717,
  kGraphHandle = 800,
  kGraphOperations = 801,
  kTensorAlignment = 900,
  kTensorType = 901,
  kTensorDimensions = 902,
  kTensorStrides = 903,
  kTensorId = 906,
  kPackIds = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kEngineNumericalNotes = 1303,
  kEngineBehaviorNotes = 1305,
};

using DnnHandle = struct DnnHandleStruct*;
using DnnDescriptor = void*;

// X(name in the table, symbol, what it returns, parameters).
// clang-format off
#define CHORUS_CUDNN_FUNCTIONS(X)                                                                  \
  X(GetVersion, cudnnGetVersion, size_t, ())                                                       \
  X(GetErrorString, cudnnGetErrorString, const char*, (DnnStatus status))                          \
  X(Create, cudnnCreate, DnnStatus, (DnnHandle* handle))                                           \
  X(Destroy, cudnnDestroy, DnnStatus, (DnnHandle handle))                                          \
  X(SetStream, cudnnSetStream, DnnStatus, (DnnHandle handle, Stream stream))                       \
  X(CreateDescriptor, cudnnBackendCreateDescriptor, DnnStatus,                                     \
    (DnnDescriptorType type, DnnDescriptor* descriptor))                                           \
  X(DestroyDescriptor, cudnnBackendDestroyDescriptor, DnnStatus, (DnnDescriptor descriptor))       \
  X(SetAttribute, cudnnBackendSetAttribute, DnnStatus,                                             \
    (DnnDescriptor descriptor, DnnAttribute attribute, DnnAttributeType type, int64_t count,       \
     const void* elements))                                                                        \
  X(GetAttribute, cudnnBackendGetAttribute, DnnStatus,                                             \
    (DnnDescriptor descriptor, DnnAttribute attribute, DnnAttributeType type, int64_t wanted,      \
     int64_t* count, void* elements))                                                              \
  X(Finalize, cudnnBackendFinalize, DnnStatus, (DnnDescriptor descriptor))                         \
  X(Execute, cudnnBackendExecute, DnnStatus,                                                       \
    (DnnHandle handle, DnnDescriptor plan, DnnDescriptor pack))
// clang-format on

struct DnnApi {
#define CHORUS_CUDNN_FIELD(name, symbol, result, parameters) result(*name) parameters = nullptr;
  CHORUS_CUDNN_FUNCTIONS(CHORUS_CUDNN_FIELD)
#undef CHORUS_CUDNN_FIELD
  std::string path;  // of the library
};

// From `folders`, those of CHORUS_CUDA_LIBRARIES, where the system's loader looks, Python's
// packages and the toolkit's usual place: libcudnn.so.9.
// FAILED_PRECONDITION kWrongState: there is none, or it lacks a function.
absl::StatusOr<DnnApi> LoadDnnApi(const std::vector<std::string>& folders);

std::string StatusText(const DnnApi& api, DnnStatus status);  // its name and number

// The symbols of the table, in its order.
const std::vector<const char*>& DnnSymbols();

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_CUDNN_API_H_
