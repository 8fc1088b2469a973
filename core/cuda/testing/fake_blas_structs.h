// What cuBLASLt's handles point to in its stand-ins: this repository has two, one beneath the ops
// (fake_blas.h) and one beneath tools/gpu_probe, which never meet in one program.
//
// Threads: plain data. Ownership: the caller's, which destroys it. Errors: none.
#ifndef CHORUS_CORE_CUDA_TESTING_FAKE_BLAS_STRUCTS_H_
#define CHORUS_CORE_CUDA_TESTING_FAKE_BLAS_STRUCTS_H_

#include <cstdint>

#include "core/cuda/cublaslt_api.h"

namespace chorus {
namespace cuda {

struct BlasHandleStruct {};
struct BlasMatmulStruct {
  BlasCompute compute = BlasCompute::kF32;
  BlasType scale = BlasType::kF32;
  BlasOperation a = BlasOperation::kAsIs;
  BlasOperation b = BlasOperation::kAsIs;
};
// Column by column.
struct BlasLayoutStruct {
  BlasType type = BlasType::kF32;
  uint64_t rows = 0;
  uint64_t columns = 0;
  int64_t leading = 0;  // from column to column
  int32_t batch = 1;
  int64_t stride = 0;  // from matrix to matrix
};
struct BlasChoiceStruct {
  uint64_t workspace_bytes = 0;
  uint32_t reduction_schemes = 7;
  uint32_t alignments[4] = {256, 256, 256, 256};  // of A, B, C, D
};

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_TESTING_FAKE_BLAS_STRUCTS_H_
