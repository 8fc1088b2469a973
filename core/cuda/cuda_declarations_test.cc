// Our own declarations against the toolkit's headers, wherever there is a toolkit: each mismatch is
// an error of the compiler. And each symbol against the libraries themselves.
#include <dlfcn.h>

#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

#include "core/cuda/cublaslt_api.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/cudnn_api.h"
#include "core/cuda/nccl_api.h"
#include "gtest/gtest.h"

#if CHORUS_HAVE_CUDA_TOOLKIT
#include <cublasLt.h>
#include <cuda.h>
#include <nccl.h>
#if __has_include(<cudnn.h>)
#define CHORUS_HAVE_CUDNN 1
#include <cudnn.h>
#endif
#endif

namespace chorus {
namespace cuda {
namespace {

#if CHORUS_HAVE_CUDA_TOOLKIT

// --- Which of their types ours stands for ---

template <typename Ours>
struct Theirs {};
#define CHORUS_STANDS_FOR(ours, theirs) \
  template <>                           \
  struct Theirs<ours> {                 \
    using Type = theirs;                \
  }
CHORUS_STANDS_FOR(ContextStruct, CUctx_st);
CHORUS_STANDS_FOR(ModuleStruct, CUmod_st);
CHORUS_STANDS_FOR(FunctionStruct, CUfunc_st);
CHORUS_STANDS_FOR(KernelStruct, CUkern_st);
CHORUS_STANDS_FOR(StreamStruct, CUstream_st);
CHORUS_STANDS_FOR(EventStruct, CUevent_st);
CHORUS_STANDS_FOR(GraphStruct, CUgraph_st);
CHORUS_STANDS_FOR(GraphNodeStruct, CUgraphNode_st);
CHORUS_STANDS_FOR(GraphExecStruct, CUgraphExec_st);
CHORUS_STANDS_FOR(Location, CUmemLocation);
CHORUS_STANDS_FOR(AllocationProperties, CUmemAllocationProp);
CHORUS_STANDS_FOR(AccessDescription, CUmemAccessDesc);
CHORUS_STANDS_FOR(KernelNodeParams, CUDA_KERNEL_NODE_PARAMS);
CHORUS_STANDS_FOR(ExecUpdateResultInfo, CUgraphExecUpdateResultInfo);
CHORUS_STANDS_FOR(EdgeData, CUgraphEdgeData);
CHORUS_STANDS_FOR(Result, CUresult);
CHORUS_STANDS_FOR(DeviceAttribute, CUdevice_attribute);
CHORUS_STANDS_FOR(FunctionAttribute, CUfunction_attribute);
CHORUS_STANDS_FOR(AllocationType, CUmemAllocationType);
CHORUS_STANDS_FOR(HandleType, CUmemAllocationHandleType);
CHORUS_STANDS_FOR(LocationType, CUmemLocationType);
CHORUS_STANDS_FOR(Access, CUmemAccess_flags);
CHORUS_STANDS_FOR(Granularity, CUmemAllocationGranularity_flags);
CHORUS_STANDS_FOR(CaptureMode, CUstreamCaptureMode);
CHORUS_STANDS_FOR(UpdateResult, CUgraphExecUpdateResult);
CHORUS_STANDS_FOR(NcclResult, ncclResult_t);
CHORUS_STANDS_FOR(NcclType, ncclDataType_t);
CHORUS_STANDS_FOR(NcclReduction, ncclRedOp_t);
CHORUS_STANDS_FOR(NcclCommStruct, ncclComm);
CHORUS_STANDS_FOR(NcclId, ncclUniqueId);
CHORUS_STANDS_FOR(NcclConfig, ncclConfig_t);
CHORUS_STANDS_FOR(BlasStatus, cublasStatus_t);
CHORUS_STANDS_FOR(BlasType, cudaDataType);
CHORUS_STANDS_FOR(BlasCompute, cublasComputeType_t);
CHORUS_STANDS_FOR(BlasPreference, cublasLtMatmulPreferenceAttributes_t);
CHORUS_STANDS_FOR(BlasLayoutAttribute, cublasLtMatrixLayoutAttribute_t);
CHORUS_STANDS_FOR(BlasMatmulAttribute, cublasLtMatmulDescAttributes_t);
CHORUS_STANDS_FOR(BlasOperation, cublasOperation_t);
CHORUS_STANDS_FOR(BlasAlgorithmAttribute, cublasLtMatmulAlgoConfigAttributes_t);
CHORUS_STANDS_FOR(BlasHandleStruct, cublasLtContext);
CHORUS_STANDS_FOR(BlasMatmulStruct, cublasLtMatmulDescOpaque_t);
CHORUS_STANDS_FOR(BlasLayoutStruct, cublasLtMatrixLayoutOpaque_t);
CHORUS_STANDS_FOR(BlasChoiceStruct, cublasLtMatmulPreferenceOpaque_t);
CHORUS_STANDS_FOR(BlasAlgorithm, cublasLtMatmulAlgo_t);
CHORUS_STANDS_FOR(BlasHeuristic, cublasLtMatmulHeuristicResult_t);
#if CHORUS_HAVE_CUDNN
CHORUS_STANDS_FOR(DnnStatus, cudnnStatus_t);
CHORUS_STANDS_FOR(DnnDescriptorType, cudnnBackendDescriptorType_t);
CHORUS_STANDS_FOR(DnnAttribute, cudnnBackendAttributeName_t);
CHORUS_STANDS_FOR(DnnAttributeType, cudnnBackendAttributeType_t);
CHORUS_STANDS_FOR(DnnHandleStruct, cudnnContext);
#endif
#undef CHORUS_STANDS_FOR

// --- Whether a type of ours is passed as theirs is ---

template <typename Ours, typename Their, typename = void>
struct Alike : std::is_same<Ours, Their> {};
// Numbers: as wide; of the same sign, where what is called could tell.
template <typename Ours, typename Their>
struct Alike<Ours, Their, std::enable_if_t<std::is_integral_v<Ours>>>
    : std::bool_constant<std::is_integral_v<Their> && sizeof(Ours) == sizeof(Their) &&
                         std::is_signed_v<Ours> == std::is_signed_v<Their>> {};
template <typename Ours, typename Their>
struct Alike<Ours, Their, std::enable_if_t<std::is_enum_v<Ours> || std::is_class_v<Ours>>>
    : std::is_same<typename Theirs<Ours>::Type, Their> {};
template <typename Ours, typename Their>
struct Alike<Ours*, Their*, std::enable_if_t<!std::is_function_v<Ours>>>
    : std::bool_constant<std::is_const_v<Ours> == std::is_const_v<Their> &&
                         Alike<std::remove_const_t<Ours>, std::remove_const_t<Their>>::value> {};
template <typename Ours, typename Their, typename... OurArguments, typename... TheirArguments>
struct Alike<Ours (*)(OurArguments...), Their (*)(TheirArguments...),
             std::enable_if_t<sizeof...(OurArguments) == sizeof...(TheirArguments)>>
    : std::conjunction<Alike<Ours, Their>, Alike<OurArguments, TheirArguments>...> {};

// A pointer to nothing known stands for a pointer to nothing known only.
static_assert(!Alike<void*, int*>::value && !Alike<int*, const int*>::value);
static_assert(!Alike<Stream, CUevent>::value && Alike<Stream, CUstream>::value);
static_assert(!Alike<int, size_t>::value && Alike<uint64_t, unsigned long long>::value);
static_assert(!Alike<void (*)(int), void (*)(int, int)>::value);

#define CHORUS_SAME_SIGNATURE(name, symbol, parameters) \
  static_assert(Alike<decltype(Api::name), decltype(&::symbol)>::value, #symbol);
CHORUS_CUDA_FUNCTIONS(CHORUS_SAME_SIGNATURE)
#undef CHORUS_SAME_SIGNATURE
#define CHORUS_SAME_SIGNATURE(name, symbol, result, parameters) \
  static_assert(Alike<decltype(NcclApi::name), decltype(&::symbol)>::value, #symbol);
CHORUS_NCCL_FUNCTIONS(CHORUS_SAME_SIGNATURE)
#undef CHORUS_SAME_SIGNATURE
#define CHORUS_SAME_SIGNATURE(name, symbol, result, parameters) \
  static_assert(Alike<decltype(BlasApi::name), decltype(&::symbol)>::value, #symbol);
CHORUS_CUBLASLT_FUNCTIONS(CHORUS_SAME_SIGNATURE)
#undef CHORUS_SAME_SIGNATURE
#if CHORUS_HAVE_CUDNN
#define CHORUS_SAME_SIGNATURE(name, symbol, result, parameters) \
  static_assert(Alike<decltype(DnnApi::name), decltype(&::symbol)>::value, #symbol);
CHORUS_CUDNN_FUNCTIONS(CHORUS_SAME_SIGNATURE)
#undef CHORUS_SAME_SIGNATURE
#endif

// --- Numbers ---

#define CHORUS_SAME_NUMBER(ours, theirs) \
  static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs), #theirs)
CHORUS_SAME_NUMBER(Result::kSuccess, CUDA_SUCCESS);
CHORUS_SAME_NUMBER(Result::kInvalidValue, CUDA_ERROR_INVALID_VALUE);
CHORUS_SAME_NUMBER(Result::kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
CHORUS_SAME_NUMBER(Result::kDeinitialized, CUDA_ERROR_DEINITIALIZED);
CHORUS_SAME_NUMBER(Result::kNoDevice, CUDA_ERROR_NO_DEVICE);
CHORUS_SAME_NUMBER(Result::kNotReady, CUDA_ERROR_NOT_READY);
CHORUS_SAME_NUMBER(Result::kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
CHORUS_SAME_NUMBER(Result::kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED);
CHORUS_SAME_NUMBER(Result::kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
CHORUS_SAME_NUMBER(Result::kUnknown, CUDA_ERROR_UNKNOWN);
CHORUS_SAME_NUMBER(DeviceAttribute::kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
CHORUS_SAME_NUMBER(DeviceAttribute::kL2CacheBytes, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
CHORUS_SAME_NUMBER(DeviceAttribute::kAsyncEngineCount, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
CHORUS_SAME_NUMBER(DeviceAttribute::kCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
CHORUS_SAME_NUMBER(DeviceAttribute::kCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
CHORUS_SAME_NUMBER(DeviceAttribute::kHostRegisterSupported,
                   CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
CHORUS_SAME_NUMBER(DeviceAttribute::kVirtualMemorySupported,
                   CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
CHORUS_SAME_NUMBER(DeviceAttribute::kFileDescriptorHandlesSupported,
                   CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
CHORUS_SAME_NUMBER(DeviceAttribute::kReadOnlyHostRegisterSupported,
                   CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
CHORUS_SAME_NUMBER(FunctionAttribute::kSharedBytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
CHORUS_SAME_NUMBER(FunctionAttribute::kLocalBytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
CHORUS_SAME_NUMBER(FunctionAttribute::kRegisters, CU_FUNC_ATTRIBUTE_NUM_REGS);
CHORUS_SAME_NUMBER(FunctionAttribute::kBinaryVersion, CU_FUNC_ATTRIBUTE_BINARY_VERSION);
CHORUS_SAME_NUMBER(AllocationType::kPinned, CU_MEM_ALLOCATION_TYPE_PINNED);
CHORUS_SAME_NUMBER(HandleType::kNone, CU_MEM_HANDLE_TYPE_NONE);
CHORUS_SAME_NUMBER(HandleType::kFileDescriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
CHORUS_SAME_NUMBER(LocationType::kDevice, CU_MEM_LOCATION_TYPE_DEVICE);
CHORUS_SAME_NUMBER(Access::kNone, CU_MEM_ACCESS_FLAGS_PROT_NONE);
CHORUS_SAME_NUMBER(Access::kRead, CU_MEM_ACCESS_FLAGS_PROT_READ);
CHORUS_SAME_NUMBER(Access::kReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
CHORUS_SAME_NUMBER(Granularity::kMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
CHORUS_SAME_NUMBER(Granularity::kRecommended, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
CHORUS_SAME_NUMBER(CaptureMode::kGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
CHORUS_SAME_NUMBER(CaptureMode::kThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
CHORUS_SAME_NUMBER(CaptureMode::kRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
CHORUS_SAME_NUMBER(UpdateResult::kSuccess, CU_GRAPH_EXEC_UPDATE_SUCCESS);
CHORUS_SAME_NUMBER(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
CHORUS_SAME_NUMBER(kEventDefault, CU_EVENT_DEFAULT);
CHORUS_SAME_NUMBER(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
CHORUS_SAME_NUMBER(kHostAllocPortable, CU_MEMHOSTALLOC_PORTABLE);
CHORUS_SAME_NUMBER(kHostAllocDeviceMap, CU_MEMHOSTALLOC_DEVICEMAP);
CHORUS_SAME_NUMBER(kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
CHORUS_SAME_NUMBER(kHostRegisterDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP);
CHORUS_SAME_NUMBER(kHostRegisterReadOnly, CU_MEMHOSTREGISTER_READ_ONLY);
CHORUS_SAME_NUMBER(kWriteValueDefault, CU_STREAM_WRITE_VALUE_DEFAULT);
CHORUS_SAME_NUMBER(kWaitValueGreaterOrEqual, CU_STREAM_WAIT_VALUE_GEQ);
CHORUS_SAME_NUMBER(NcclResult::kSuccess, ncclSuccess);
CHORUS_SAME_NUMBER(NcclResult::kInProgress, ncclInProgress);
CHORUS_SAME_NUMBER(NcclType::kFloat32, ncclFloat32);
CHORUS_SAME_NUMBER(NcclReduction::kSum, ncclSum);
CHORUS_SAME_NUMBER(BlasStatus::kSuccess, CUBLAS_STATUS_SUCCESS);
CHORUS_SAME_NUMBER(BlasStatus::kInvalidValue, CUBLAS_STATUS_INVALID_VALUE);
CHORUS_SAME_NUMBER(BlasStatus::kNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);
CHORUS_SAME_NUMBER(BlasType::kF32, CUDA_R_32F);
CHORUS_SAME_NUMBER(BlasType::kF64, CUDA_R_64F);
CHORUS_SAME_NUMBER(BlasType::kF16, CUDA_R_16F);
CHORUS_SAME_NUMBER(BlasType::kBF16, CUDA_R_16BF);
CHORUS_SAME_NUMBER(BlasCompute::kF32, CUBLAS_COMPUTE_32F);
CHORUS_SAME_NUMBER(BlasCompute::kF64, CUBLAS_COMPUTE_64F);
CHORUS_SAME_NUMBER(BlasPreference::kMaxWorkspaceBytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
CHORUS_SAME_NUMBER(BlasPreference::kReductionSchemes, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
CHORUS_SAME_NUMBER(BlasReduction::kInPlace, CUBLASLT_REDUCTION_SCHEME_INPLACE);
CHORUS_SAME_NUMBER(BlasReduction::kComputeType, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
CHORUS_SAME_NUMBER(BlasReduction::kOutputType, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE);
CHORUS_SAME_NUMBER(BlasLayoutAttribute::kBatchCount, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
CHORUS_SAME_NUMBER(BlasLayoutAttribute::kBatchStride, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
CHORUS_SAME_NUMBER(BlasPreference::kMinAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
CHORUS_SAME_NUMBER(BlasPreference::kMinAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
CHORUS_SAME_NUMBER(BlasPreference::kMinAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
CHORUS_SAME_NUMBER(BlasPreference::kMinAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
CHORUS_SAME_NUMBER(BlasMatmulAttribute::kTransposeA, CUBLASLT_MATMUL_DESC_TRANSA);
CHORUS_SAME_NUMBER(BlasMatmulAttribute::kTransposeB, CUBLASLT_MATMUL_DESC_TRANSB);
CHORUS_SAME_NUMBER(BlasOperation::kAsIs, CUBLAS_OP_N);
CHORUS_SAME_NUMBER(BlasOperation::kTransposed, CUBLAS_OP_T);
CHORUS_SAME_NUMBER(BlasAlgorithmAttribute::kId, CUBLASLT_ALGO_CONFIG_ID);
CHORUS_SAME_NUMBER(BlasAlgorithmAttribute::kTile, CUBLASLT_ALGO_CONFIG_TILE_ID);
CHORUS_SAME_NUMBER(BlasAlgorithmAttribute::kSplitK, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
CHORUS_SAME_NUMBER(BlasAlgorithmAttribute::kReductionScheme, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
CHORUS_SAME_NUMBER(BlasAlgorithmAttribute::kSwizzle, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING);
CHORUS_SAME_NUMBER(BlasAlgorithmAttribute::kCustomOption, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION);
CHORUS_SAME_NUMBER(BlasAlgorithmAttribute::kStages, CUBLASLT_ALGO_CONFIG_STAGES_ID);
CHORUS_SAME_NUMBER(BlasAlgorithmAttribute::kInnerShape, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID);
CHORUS_SAME_NUMBER(BlasAlgorithmAttribute::kClusterShape, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID);
#if CHORUS_HAVE_CUDNN
CHORUS_SAME_NUMBER(DnnStatus::kSuccess, CUDNN_STATUS_SUCCESS);
CHORUS_SAME_NUMBER(DnnStatus::kBadParameter, CUDNN_STATUS_BAD_PARAM);
CHORUS_SAME_NUMBER(DnnStatus::kNotSupported, CUDNN_STATUS_NOT_SUPPORTED);
CHORUS_SAME_NUMBER(DnnStatus::kNoHostMemory, CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED);
CHORUS_SAME_NUMBER(DnnStatus::kNoDeviceMemory,
                   CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED);
CHORUS_SAME_NUMBER(DnnStatus::kExecutionFailed, CUDNN_STATUS_EXECUTION_FAILED);
CHORUS_SAME_NUMBER(DnnType::kF32, CUDNN_DATA_FLOAT);
CHORUS_SAME_NUMBER(DnnType::kF64, CUDNN_DATA_DOUBLE);
CHORUS_SAME_NUMBER(DnnConvolutionMode::kCrossCorrelation, CUDNN_CROSS_CORRELATION);
CHORUS_SAME_NUMBER(DnnHeuristic::kFallback, CUDNN_HEUR_MODE_FALLBACK);
CHORUS_SAME_NUMBER(DnnHeuristic::kB, CUDNN_HEUR_MODE_B);
CHORUS_SAME_NUMBER(DnnNumericalNote::kTensorCore, CUDNN_NUMERICAL_NOTE_TENSOR_CORE);
CHORUS_SAME_NUMBER(DnnNumericalNote::kDownConvertInputs, CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS);
CHORUS_SAME_NUMBER(DnnNumericalNote::kReducedPrecisionReduction,
                   CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION);
CHORUS_SAME_NUMBER(DnnNumericalNote::kFft, CUDNN_NUMERICAL_NOTE_FFT);
CHORUS_SAME_NUMBER(DnnNumericalNote::kNondeterministic, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC);
CHORUS_SAME_NUMBER(DnnNumericalNote::kWinograd, CUDNN_NUMERICAL_NOTE_WINOGRAD);
CHORUS_SAME_NUMBER(DnnNumericalNote::kWinograd4x4, CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4);
CHORUS_SAME_NUMBER(DnnNumericalNote::kWinograd6x6, CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6);
CHORUS_SAME_NUMBER(DnnNumericalNote::kWinograd13x13, CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13);
CHORUS_SAME_NUMBER(DnnNumericalNote::kStrictNanPropagation, CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP);
CHORUS_SAME_NUMBER(DnnBehaviorNote::kRuntimeCompilation, CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION);
CHORUS_SAME_NUMBER(DnnBehaviorNote::kCublasLt, CUDNN_BEHAVIOR_NOTE_CUBLASLT_DEPENDENCY);
CHORUS_SAME_NUMBER(DnnDescriptorType::kConvolution, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnDescriptorType::kEngine, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnDescriptorType::kEngineConfig, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnDescriptorType::kEngineHeuristic, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnDescriptorType::kExecutionPlan, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnDescriptorType::kConvolutionForward,
                   CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnDescriptorType::kConvolutionBackwardFilter,
                   CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnDescriptorType::kConvolutionBackwardData,
                   CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnDescriptorType::kOperationGraph, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnDescriptorType::kVariantPack, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnDescriptorType::kTensor, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnAttributeType::kHandle, CUDNN_TYPE_HANDLE);
CHORUS_SAME_NUMBER(DnnAttributeType::kDataType, CUDNN_TYPE_DATA_TYPE);
CHORUS_SAME_NUMBER(DnnAttributeType::kInt64, CUDNN_TYPE_INT64);
CHORUS_SAME_NUMBER(DnnAttributeType::kFloat, CUDNN_TYPE_FLOAT);
CHORUS_SAME_NUMBER(DnnAttributeType::kDouble, CUDNN_TYPE_DOUBLE);
CHORUS_SAME_NUMBER(DnnAttributeType::kPointer, CUDNN_TYPE_VOID_PTR);
CHORUS_SAME_NUMBER(DnnAttributeType::kConvolutionMode, CUDNN_TYPE_CONVOLUTION_MODE);
CHORUS_SAME_NUMBER(DnnAttributeType::kHeuristic, CUDNN_TYPE_HEUR_MODE);
CHORUS_SAME_NUMBER(DnnAttributeType::kNumericalNote, CUDNN_TYPE_NUMERICAL_NOTE);
CHORUS_SAME_NUMBER(DnnAttributeType::kDescriptor, CUDNN_TYPE_BACKEND_DESCRIPTOR);
CHORUS_SAME_NUMBER(DnnAttributeType::kBehaviorNote, CUDNN_TYPE_BEHAVIOR_NOTE);
CHORUS_SAME_NUMBER(DnnAttribute::kConvolutionComputeType, CUDNN_ATTR_CONVOLUTION_COMP_TYPE);
CHORUS_SAME_NUMBER(DnnAttribute::kConvolutionMode, CUDNN_ATTR_CONVOLUTION_CONV_MODE);
CHORUS_SAME_NUMBER(DnnAttribute::kConvolutionDilations, CUDNN_ATTR_CONVOLUTION_DILATIONS);
CHORUS_SAME_NUMBER(DnnAttribute::kConvolutionStrides, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
CHORUS_SAME_NUMBER(DnnAttribute::kConvolutionPostPaddings, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS);
CHORUS_SAME_NUMBER(DnnAttribute::kConvolutionPrePaddings, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
CHORUS_SAME_NUMBER(DnnAttribute::kConvolutionSpatialDims, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS);
CHORUS_SAME_NUMBER(DnnAttribute::kHeuristicMode, CUDNN_ATTR_ENGINEHEUR_MODE);
CHORUS_SAME_NUMBER(DnnAttribute::kHeuristicGraph, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
CHORUS_SAME_NUMBER(DnnAttribute::kHeuristicResults, CUDNN_ATTR_ENGINEHEUR_RESULTS);
CHORUS_SAME_NUMBER(DnnAttribute::kConfigEngine, CUDNN_ATTR_ENGINECFG_ENGINE);
CHORUS_SAME_NUMBER(DnnAttribute::kPlanHandle, CUDNN_ATTR_EXECUTION_PLAN_HANDLE);
CHORUS_SAME_NUMBER(DnnAttribute::kPlanConfig, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
CHORUS_SAME_NUMBER(DnnAttribute::kPlanWorkspaceBytes, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
CHORUS_SAME_NUMBER(DnnAttribute::kForwardAlpha, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA);
CHORUS_SAME_NUMBER(DnnAttribute::kForwardBeta, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA);
CHORUS_SAME_NUMBER(DnnAttribute::kForwardConvolution,
                   CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC);
CHORUS_SAME_NUMBER(DnnAttribute::kForwardW, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W);
CHORUS_SAME_NUMBER(DnnAttribute::kForwardX, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X);
CHORUS_SAME_NUMBER(DnnAttribute::kForwardY, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y);
CHORUS_SAME_NUMBER(DnnAttribute::kDataAlpha, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA);
CHORUS_SAME_NUMBER(DnnAttribute::kDataBeta, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA);
CHORUS_SAME_NUMBER(DnnAttribute::kDataConvolution,
                   CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC);
CHORUS_SAME_NUMBER(DnnAttribute::kDataW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W);
CHORUS_SAME_NUMBER(DnnAttribute::kDataX, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX);
CHORUS_SAME_NUMBER(DnnAttribute::kDataY, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY);
CHORUS_SAME_NUMBER(DnnAttribute::kFilterAlpha, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA);
CHORUS_SAME_NUMBER(DnnAttribute::kFilterBeta, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA);
CHORUS_SAME_NUMBER(DnnAttribute::kFilterConvolution,
                   CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC);
CHORUS_SAME_NUMBER(DnnAttribute::kFilterW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW);
CHORUS_SAME_NUMBER(DnnAttribute::kFilterX, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X);
CHORUS_SAME_NUMBER(DnnAttribute::kFilterY, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY);
CHORUS_SAME_NUMBER(DnnAttribute::kGraphHandle, CUDNN_ATTR_OPERATIONGRAPH_HANDLE);
CHORUS_SAME_NUMBER(DnnAttribute::kGraphOperations, CUDNN_ATTR_OPERATIONGRAPH_OPS);
CHORUS_SAME_NUMBER(DnnAttribute::kTensorAlignment, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
CHORUS_SAME_NUMBER(DnnAttribute::kTensorType, CUDNN_ATTR_TENSOR_DATA_TYPE);
CHORUS_SAME_NUMBER(DnnAttribute::kTensorDimensions, CUDNN_ATTR_TENSOR_DIMENSIONS);
CHORUS_SAME_NUMBER(DnnAttribute::kTensorStrides, CUDNN_ATTR_TENSOR_STRIDES);
CHORUS_SAME_NUMBER(DnnAttribute::kTensorId, CUDNN_ATTR_TENSOR_UNIQUE_ID);
CHORUS_SAME_NUMBER(DnnAttribute::kPackIds, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
CHORUS_SAME_NUMBER(DnnAttribute::kPackPointers, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
CHORUS_SAME_NUMBER(DnnAttribute::kPackWorkspace, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
CHORUS_SAME_NUMBER(DnnAttribute::kEngineNumericalNotes, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE);
CHORUS_SAME_NUMBER(DnnAttribute::kEngineBehaviorNotes, CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE);
#endif
#undef CHORUS_SAME_NUMBER

// --- Layouts ---

// Of pointers, too.
template <typename T>
constexpr size_t kSize = sizeof(T);

#define CHORUS_SAME_SIZE(ours) static_assert(sizeof(ours) == sizeof(Theirs<ours>::Type), #ours)
#define CHORUS_SAME_FIELD(ours, our_field, their_field)                                         \
  static_assert(                                                                                \
      offsetof(ours, our_field) == offsetof(Theirs<ours>::Type, their_field) &&                 \
          kSize<decltype(ours::our_field)> == kSize<decltype(Theirs<ours>::Type::their_field)>, \
      #ours "::" #our_field)
CHORUS_SAME_SIZE(Location);
CHORUS_SAME_FIELD(Location, type, type);
CHORUS_SAME_FIELD(Location, id, id);
CHORUS_SAME_SIZE(AllocationProperties);
CHORUS_SAME_FIELD(AllocationProperties, type, type);
CHORUS_SAME_FIELD(AllocationProperties, requested_handles, requestedHandleTypes);
CHORUS_SAME_FIELD(AllocationProperties, location, location);
CHORUS_SAME_FIELD(AllocationProperties, windows_only, win32HandleMetaData);
CHORUS_SAME_FIELD(AllocationProperties, flags, allocFlags);
CHORUS_SAME_FIELD(AllocationProperties, flags.compression_type, allocFlags.compressionType);
CHORUS_SAME_FIELD(AllocationProperties, flags.gpu_direct_rdma_capable,
                  allocFlags.gpuDirectRDMACapable);
CHORUS_SAME_FIELD(AllocationProperties, flags.usage, allocFlags.usage);
CHORUS_SAME_SIZE(AccessDescription);
CHORUS_SAME_FIELD(AccessDescription, location, location);
CHORUS_SAME_FIELD(AccessDescription, access, flags);
CHORUS_SAME_SIZE(KernelNodeParams);
CHORUS_SAME_FIELD(KernelNodeParams, function, func);
CHORUS_SAME_FIELD(KernelNodeParams, grid_x, gridDimX);
CHORUS_SAME_FIELD(KernelNodeParams, grid_y, gridDimY);
CHORUS_SAME_FIELD(KernelNodeParams, grid_z, gridDimZ);
CHORUS_SAME_FIELD(KernelNodeParams, block_x, blockDimX);
CHORUS_SAME_FIELD(KernelNodeParams, block_y, blockDimY);
CHORUS_SAME_FIELD(KernelNodeParams, block_z, blockDimZ);
CHORUS_SAME_FIELD(KernelNodeParams, shared_bytes, sharedMemBytes);
CHORUS_SAME_FIELD(KernelNodeParams, kernel_params, kernelParams);
CHORUS_SAME_FIELD(KernelNodeParams, extra, extra);
CHORUS_SAME_FIELD(KernelNodeParams, kernel, kern);
CHORUS_SAME_FIELD(KernelNodeParams, context, ctx);
CHORUS_SAME_SIZE(ExecUpdateResultInfo);
CHORUS_SAME_FIELD(ExecUpdateResultInfo, result, result);
CHORUS_SAME_FIELD(ExecUpdateResultInfo, error_node, errorNode);
CHORUS_SAME_FIELD(ExecUpdateResultInfo, error_from_node, errorFromNode);
CHORUS_SAME_SIZE(EdgeData);
CHORUS_SAME_FIELD(EdgeData, from_port, from_port);
CHORUS_SAME_FIELD(EdgeData, to_port, to_port);
CHORUS_SAME_FIELD(EdgeData, type, type);
CHORUS_SAME_FIELD(EdgeData, reserved, reserved);
CHORUS_SAME_SIZE(NcclId);
CHORUS_SAME_SIZE(NcclConfig);
CHORUS_SAME_FIELD(NcclConfig, size, size);
CHORUS_SAME_FIELD(NcclConfig, magic, magic);
CHORUS_SAME_FIELD(NcclConfig, version, version);
CHORUS_SAME_FIELD(NcclConfig, blocking, blocking);
CHORUS_SAME_FIELD(NcclConfig, cga_cluster_size, cgaClusterSize);
CHORUS_SAME_FIELD(NcclConfig, min_ctas, minCTAs);
CHORUS_SAME_FIELD(NcclConfig, max_ctas, maxCTAs);
CHORUS_SAME_FIELD(NcclConfig, net_name, netName);
CHORUS_SAME_FIELD(NcclConfig, split_share, splitShare);
CHORUS_SAME_FIELD(NcclConfig, traffic_class, trafficClass);
CHORUS_SAME_FIELD(NcclConfig, comm_name, commName);
CHORUS_SAME_FIELD(NcclConfig, collnet_enable, collnetEnable);
CHORUS_SAME_FIELD(NcclConfig, cta_policy, CTAPolicy);
CHORUS_SAME_FIELD(NcclConfig, shrink_share, shrinkShare);
CHORUS_SAME_FIELD(NcclConfig, nvls_ctas, nvlsCTAs);
CHORUS_SAME_FIELD(NcclConfig, channels_per_net_peer, nChannelsPerNetPeer);
CHORUS_SAME_FIELD(NcclConfig, nvlink_centric_sched, nvlinkCentricSched);
CHORUS_SAME_SIZE(BlasAlgorithm);
CHORUS_SAME_FIELD(BlasAlgorithm, data, data);
CHORUS_SAME_SIZE(BlasHeuristic);
CHORUS_SAME_FIELD(BlasHeuristic, algorithm, algo);
CHORUS_SAME_FIELD(BlasHeuristic, workspace_bytes, workspaceSize);
CHORUS_SAME_FIELD(BlasHeuristic, state, state);
CHORUS_SAME_FIELD(BlasHeuristic, waves, wavesCount);
#undef CHORUS_SAME_SIZE
#undef CHORUS_SAME_FIELD

TEST(CudaDeclarationsTest, NcclsInitialConfigurationIsOurs) {
  // Field by field: what is between them has no value.
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const NcclConfig ours;
  EXPECT_EQ(theirs.size, ours.size);
  EXPECT_EQ(theirs.magic, ours.magic);
  EXPECT_EQ(theirs.version, ours.version);
  EXPECT_EQ(theirs.netName, ours.net_name);
  EXPECT_EQ(theirs.commName, ours.comm_name);
  for (const int number :
       {theirs.blocking, theirs.cgaClusterSize, theirs.minCTAs, theirs.maxCTAs, theirs.splitShare,
        theirs.trafficClass, theirs.collnetEnable, theirs.CTAPolicy, theirs.shrinkShare,
        theirs.nvlsCTAs, theirs.nChannelsPerNetPeer, theirs.nvlinkCentricSched}) {
    EXPECT_EQ(number, NcclConfig::kUnset);
  }
}

// The symbols of a table that the library lacks.
std::vector<std::string> MissingIn(const std::string& path,
                                   const std::vector<const char*>& symbols) {
  void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return {dlerror()};
  std::vector<std::string> missing;
  for (const char* symbol : symbols) {
    if (dlsym(library, symbol) == nullptr) missing.push_back(symbol);
  }
  return missing;
}

const std::vector<std::string> kNothing;

TEST(CudaSymbolsTest, TheDriverHasAll) {
  // What programs are linked against where there is no driver: its symbols, without the functions.
  EXPECT_EQ(MissingIn(CHORUS_CUDA_HOME "/lib64/stubs/libcuda.so", ApiSymbols()), kNothing);
}
TEST(CudaSymbolsTest, NcclHasAll) {
  EXPECT_EQ(MissingIn(CHORUS_CUDA_HOME "/lib64/libnccl.so.2", NcclSymbols()), kNothing);
}
TEST(CudaSymbolsTest, CublasLtHasAll) {
  EXPECT_EQ(MissingIn(CHORUS_CUDA_HOME "/lib64/libcublasLt.so.13", BlasSymbols()), kNothing);
}
// Which the library does without a GPU.
TEST(CublasLtTest, AttributesOfAnAlgorithmAreAsWideAsWeSay) {
  const auto api = LoadBlasApi({CHORUS_CUDA_HOME "/lib64"});
  ASSERT_TRUE(api.ok()) << api.status();
  using Attribute = BlasAlgorithmAttribute;
  for (const auto attribute :
       {Attribute::kId, Attribute::kTile, Attribute::kSplitK, Attribute::kReductionScheme,
        Attribute::kSwizzle, Attribute::kCustomOption, Attribute::kStages, Attribute::kInnerShape,
        Attribute::kClusterShape}) {
    const size_t width = attribute < Attribute::kInnerShape ? 4 : 2;
    for (const size_t bytes : {size_t{2}, size_t{4}}) {
      SCOPED_TRACE("attribute " + std::to_string(static_cast<int>(attribute)) + ", " +
                   std::to_string(bytes) + " bytes");
      BlasAlgorithm algorithm;
      uint32_t value = 1;
      const bool may_be_set = bytes == width && attribute != Attribute::kId;
      EXPECT_EQ(api->MatmulAlgoConfigSetAttribute(&algorithm, attribute, &value, bytes) ==
                    BlasStatus::kSuccess,
                may_be_set);
      size_t written = 0;
      value = 0;
      EXPECT_EQ(api->MatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, bytes, &written) ==
                    BlasStatus::kSuccess,
                bytes == width);
      EXPECT_EQ(value, may_be_set ? 1u : 0u);
    }
  }
}
TEST(CublasLtTest, OtherAttributesAreAsWideAsWeSay) {
  const auto api = LoadBlasApi({CHORUS_CUDA_HOME "/lib64"});
  ASSERT_TRUE(api.ok()) << api.status();
  BlasLayout layout = nullptr;
  ASSERT_EQ(api->MatrixLayoutCreate(&layout, BlasType::kF32, 4, 4, 4), BlasStatus::kSuccess);
  BlasChoice choice = nullptr;
  ASSERT_EQ(api->MatmulPreferenceCreate(&choice), BlasStatus::kSuccess);
  const uint64_t value = 2;
  for (const size_t bytes : {size_t{4}, size_t{8}}) {
    SCOPED_TRACE(std::to_string(bytes) + " bytes");
    const auto taken = [&](auto attribute) {
      if constexpr (std::is_same_v<decltype(attribute), BlasLayoutAttribute>) {
        return api->MatrixLayoutSetAttribute(layout, attribute, &value, bytes);
      } else {
        return api->MatmulPreferenceSetAttribute(choice, attribute, &value, bytes);
      }
    };
    const BlasStatus narrow = bytes == 4 ? BlasStatus::kSuccess : BlasStatus::kInvalidValue;
    const BlasStatus wide = bytes == 8 ? BlasStatus::kSuccess : BlasStatus::kInvalidValue;
    EXPECT_EQ(taken(BlasLayoutAttribute::kBatchCount), narrow);
    EXPECT_EQ(taken(BlasLayoutAttribute::kBatchStride), wide);
    EXPECT_EQ(taken(BlasPreference::kMaxWorkspaceBytes), wide);
    EXPECT_EQ(taken(BlasPreference::kReductionSchemes), narrow);
    EXPECT_EQ(taken(BlasPreference::kMinAlignmentA), narrow);
  }
  EXPECT_EQ(api->MatmulPreferenceDestroy(choice), BlasStatus::kSuccess);
  EXPECT_EQ(api->MatrixLayoutDestroy(layout), BlasStatus::kSuccess);
}
#if CHORUS_HAVE_CUDNN
TEST(CudaSymbolsTest, CudnnHasAll) {
  EXPECT_EQ(MissingIn(CHORUS_CUDA_HOME "/lib64/libcudnn.so.9", DnnSymbols()), kNothing);
}
// Which the library does without a GPU: descriptors that need no handle are what it expects.
TEST(CudnnTest, AttributesAreAsWideAsWeSay) {
  const auto api = LoadDnnApi({CHORUS_CUDA_HOME "/lib64"});
  ASSERT_TRUE(api.ok()) << api.status();
  using A = DnnAttribute;
  using T = DnnAttributeType;
  const auto make = [&](DnnDescriptorType type) {
    DnnDescriptor made = nullptr;
    EXPECT_EQ(api->CreateDescriptor(type, &made), DnnStatus::kSuccess);
    return made;
  };
  const auto set = [&](DnnDescriptor descriptor, A attribute, T type, auto values) {
    const auto count = static_cast<int64_t>(values.size());
    EXPECT_EQ(api->SetAttribute(descriptor, attribute, type, count, values.data()),
              DnnStatus::kSuccess)
        << static_cast<int>(attribute);
  };
  using Ints = std::vector<int64_t>;
  DnnDescriptor tensors[3];
  for (int64_t i = 0; i < 3; ++i) {
    tensors[i] = make(DnnDescriptorType::kTensor);
    set(tensors[i], A::kTensorType, T::kDataType, std::vector<DnnType>{DnnType::kF32});
    set(tensors[i], A::kTensorDimensions, T::kInt64, Ints{4, 4, 1, 1});
    set(tensors[i], A::kTensorStrides, T::kInt64, Ints{4, 1, 1, 1});
    set(tensors[i], A::kTensorId, T::kInt64, Ints{i});
    set(tensors[i], A::kTensorAlignment, T::kInt64, Ints{4});
    EXPECT_EQ(api->Finalize(tensors[i]), DnnStatus::kSuccess);
  }
  const DnnDescriptor convolution = make(DnnDescriptorType::kConvolution);
  set(convolution, A::kConvolutionComputeType, T::kDataType, std::vector<DnnType>{DnnType::kF32});
  set(convolution, A::kConvolutionMode, T::kConvolutionMode,
      std::vector<DnnConvolutionMode>{DnnConvolutionMode::kCrossCorrelation});
  set(convolution, A::kConvolutionSpatialDims, T::kInt64, Ints{2});
  for (const A attribute : {A::kConvolutionStrides, A::kConvolutionDilations}) {
    set(convolution, attribute, T::kInt64, Ints{1, 1});
  }
  for (const A attribute : {A::kConvolutionPrePaddings, A::kConvolutionPostPaddings}) {
    set(convolution, attribute, T::kInt64, Ints{0, 0});
  }
  EXPECT_EQ(api->Finalize(convolution), DnnStatus::kSuccess);
  const struct {
    DnnDescriptorType type;
    A alpha, beta, convolution, x, w, y;
  } operations[] = {{DnnDescriptorType::kConvolutionForward, A::kForwardAlpha, A::kForwardBeta,
                     A::kForwardConvolution, A::kForwardX, A::kForwardW, A::kForwardY},
                    {DnnDescriptorType::kConvolutionBackwardData, A::kDataAlpha, A::kDataBeta,
                     A::kDataConvolution, A::kDataX, A::kDataW, A::kDataY},
                    {DnnDescriptorType::kConvolutionBackwardFilter, A::kFilterAlpha, A::kFilterBeta,
                     A::kFilterConvolution, A::kFilterX, A::kFilterW, A::kFilterY}};
  for (const auto& names : operations) {
    const DnnDescriptor operation = make(names.type);
    const auto refer = [&](A attribute, DnnDescriptor to) {
      set(operation, attribute, T::kDescriptor, std::vector<DnnDescriptor>{to});
    };
    refer(names.convolution, convolution);
    refer(names.x, tensors[0]);
    refer(names.w, tensors[1]);
    refer(names.y, tensors[2]);
    set(operation, names.alpha, T::kFloat, std::vector<float>{1});
    set(operation, names.beta, T::kFloat, std::vector<float>{0});
    EXPECT_EQ(api->Finalize(operation), DnnStatus::kSuccess) << static_cast<int>(names.type);
    EXPECT_EQ(api->DestroyDescriptor(operation), DnnStatus::kSuccess);
  }
  // What is finalized does not change, so that the above says something.
  EXPECT_NE(api->SetAttribute(convolution, A::kConvolutionSpatialDims, T::kInt64, 1, tensors),
            DnnStatus::kSuccess);
  EXPECT_EQ(api->DestroyDescriptor(convolution), DnnStatus::kSuccess);
  for (const DnnDescriptor tensor : tensors) {
    EXPECT_EQ(api->DestroyDescriptor(tensor), DnnStatus::kSuccess);
  }
}
#else
TEST(CudnnTest, AgreesWithTheToolkit) {
  GTEST_SKIP() << "no cuDNN in " CHORUS_CUDA_HOME ": nothing to compare the declarations with";
}
#endif
TEST(CudaSymbolsTest, AMissingOneIsFound) {
  EXPECT_EQ(MissingIn(CHORUS_CUDA_HOME "/lib64/libnccl.so.2", {"ncclGetVersion", "ncclNoSuch"}),
            std::vector<std::string>{"ncclNoSuch"});
}

#else

TEST(CudaDeclarationsTest, AgreeWithTheToolkit) {
  GTEST_SKIP() << "no CUDA toolkit with NCCL and cuBLASLt in " CHORUS_CUDA_HOME
                  ": nothing to compare the declarations with";
}

#endif

}  // namespace
}  // namespace cuda
}  // namespace chorus
