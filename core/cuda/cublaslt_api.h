// cuBLASLt as a table of functions, with declarations of our own (core/cuda/cuda_api.h says
// why).
//
// Threads: a table does not change once it is filled; a handle may be used by any thread.
// Ownership: handles and descriptors are cuBLASLt's. Errors: said at each function of our own.
#ifndef CHORUS_CORE_CUDA_CUBLASLT_API_H_
#define CHORUS_CORE_CUDA_CUBLASLT_API_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "core/cuda/cuda_api.h"

namespace chorus {
namespace cuda {

// cublasStatus_t, cudaDataType, cublasComputeType_t.
enum class BlasStatus : int { kSuccess = 0, kInvalidValue = 7, kNotSupported = 15 };
enum class BlasType : int { kF32 = 0, kF64 = 1, kF16 = 2, kBF16 = 14 };
int64_t ElementBytes(BlasType type);
const char* NameOf(BlasType type);  // "f32"
// kF32 is plain single precision: TF32 is a compute type of its own, which is not used.
enum class BlasCompute : int { kF32 = 68, kF64 = 70 };
// cublasLtMatmulPreferenceAttributes_t.
enum class BlasPreference : int {
  kMaxWorkspaceBytes = 1,  // uint64_t
  kReductionSchemes = 3,   // BlasReduction, beside which sums in one sequence are always allowed
  kMinAlignmentA = 5,      // uint32_t, bytes
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};
// cublasLtReductionScheme_t: where the parts of sums lie that are cut along k. Bits of a mask.
enum class BlasReduction : uint32_t { kInPlace = 1, kComputeType = 2, kOutputType = 4 };
// cublasLtMatrixLayoutAttribute_t.
enum class BlasLayoutAttribute : int {
  kBatchCount = 5,   // int32_t
  kBatchStride = 6,  // int64_t, elements
};
// cublasLtMatmulDescAttributes_t, both BlasOperation.
enum class BlasMatmulAttribute : int { kTransposeA = 3, kTransposeB = 4 };
// cublasOperation_t.
enum class BlasOperation : int { kAsIs = 0, kTransposed = 1 };
// cublasLtMatmulAlgoConfigAttributes_t.
enum class BlasAlgorithmAttribute : int {
  kId = 0,      // int32_t, set by MatmulAlgoInit alone
  kTile = 1,    // uint32_t
  kSplitK = 2,  // int32_t
  kReductionScheme = 3,
  kSwizzle = 4,
  kCustomOption = 5,
  kStages = 6,
  kInnerShape = 7,  // uint16_t
  kClusterShape = 8,
};

using BlasHandle = struct BlasHandleStruct*;
using BlasMatmul = struct BlasMatmulStruct*;
using BlasLayout = struct BlasLayoutStruct*;
using BlasChoice = struct BlasChoiceStruct*;

// cublasLtMatmulAlgo_t: may be stored and used again with the same version of the library.
struct BlasAlgorithm {
  uint64_t data[8] = {};
};

// cublasLtMatmulHeuristicResult_t.
struct BlasHeuristic {
  BlasAlgorithm algorithm;
  size_t workspace_bytes = 0;
  BlasStatus state = BlasStatus::kSuccess;
  float waves = 0;
  int reserved[4] = {};
};

// X(name in the table, symbol, what it returns, parameters).
// clang-format off
#define CHORUS_CUBLASLT_FUNCTIONS(X)                                                               \
  X(GetVersion, cublasLtGetVersion, size_t, ())                                                    \
  X(GetStatusName, cublasLtGetStatusName, const char*, (BlasStatus status))                        \
  X(Create, cublasLtCreate, BlasStatus, (BlasHandle* handle))                                      \
  X(Destroy, cublasLtDestroy, BlasStatus, (BlasHandle handle))                                     \
  X(MatmulDescCreate, cublasLtMatmulDescCreate, BlasStatus,                                        \
    (BlasMatmul* matmul, BlasCompute compute, BlasType scale))                                     \
  X(MatmulDescDestroy, cublasLtMatmulDescDestroy, BlasStatus, (BlasMatmul matmul))                 \
  X(MatmulDescSetAttribute, cublasLtMatmulDescSetAttribute, BlasStatus,                            \
    (BlasMatmul matmul, BlasMatmulAttribute attribute, const void* value, size_t bytes))           \
  X(MatrixLayoutCreate, cublasLtMatrixLayoutCreate, BlasStatus,                                    \
    (BlasLayout* layout, BlasType type, uint64_t rows, uint64_t columns, int64_t stride))          \
  X(MatrixLayoutDestroy, cublasLtMatrixLayoutDestroy, BlasStatus, (BlasLayout layout))             \
  X(MatrixLayoutSetAttribute, cublasLtMatrixLayoutSetAttribute, BlasStatus,                        \
    (BlasLayout layout, BlasLayoutAttribute attribute, const void* value, size_t bytes))           \
  X(MatmulPreferenceCreate, cublasLtMatmulPreferenceCreate, BlasStatus, (BlasChoice* choice))      \
  X(MatmulPreferenceDestroy, cublasLtMatmulPreferenceDestroy, BlasStatus, (BlasChoice choice))     \
  X(MatmulPreferenceSetAttribute, cublasLtMatmulPreferenceSetAttribute, BlasStatus,                \
    (BlasChoice choice, BlasPreference attribute, const void* value, size_t bytes))                \
  X(MatmulAlgoGetHeuristic, cublasLtMatmulAlgoGetHeuristic, BlasStatus,                            \
    (BlasHandle handle, BlasMatmul matmul, BlasLayout a, BlasLayout b, BlasLayout c, BlasLayout d, \
     BlasChoice choice, int wanted, BlasHeuristic* results, int* count))                           \
  X(MatmulAlgoInit, cublasLtMatmulAlgoInit, BlasStatus,                                            \
    (BlasHandle handle, BlasCompute compute, BlasType scale, BlasType a, BlasType b, BlasType c,   \
     BlasType d, int id, BlasAlgorithm* algorithm))                                                \
  X(MatmulAlgoConfigSetAttribute, cublasLtMatmulAlgoConfigSetAttribute, BlasStatus,                \
    (BlasAlgorithm* algorithm, BlasAlgorithmAttribute attribute, const void* value, size_t bytes)) \
  X(MatmulAlgoConfigGetAttribute, cublasLtMatmulAlgoConfigGetAttribute, BlasStatus,                \
    (const BlasAlgorithm* algorithm, BlasAlgorithmAttribute attribute, void* value, size_t bytes,  \
     size_t* written))                                                                             \
  X(Matmul, cublasLtMatmul, BlasStatus,                                                            \
    (BlasHandle handle, BlasMatmul matmul, const void* alpha, const void* a, BlasLayout a_layout,  \
     const void* b, BlasLayout b_layout, const void* beta, const void* c, BlasLayout c_layout,     \
     void* d, BlasLayout d_layout, const BlasAlgorithm* algorithm, void* workspace,                \
     size_t workspace_bytes, Stream stream))
// clang-format on

struct BlasApi {
#define CHORUS_CUBLASLT_FIELD(name, symbol, result, parameters) result(*name) parameters = nullptr;
  CHORUS_CUBLASLT_FUNCTIONS(CHORUS_CUBLASLT_FIELD)
#undef CHORUS_CUBLASLT_FIELD
  std::string path;  // of the library
};

// From `folders`, those of CHORUS_CUDA_LIBRARIES, where the system's loader looks, Python's
// packages and the toolkit's usual place: libcublasLt.so.13, or 12, which has the same functions.
// FAILED_PRECONDITION kWrongState: there is none, or it lacks a function.
absl::StatusOr<BlasApi> LoadBlasApi(const std::vector<std::string>& folders);

std::string StatusText(const BlasApi& api, BlasStatus status);  // its name and number

// The symbols of the table, in its order.
const std::vector<const char*>& BlasSymbols();

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_CUBLASLT_API_H_
