// A stand-in for cuBLASLt over the stand-in driver (fake_driver.h): products added up naively, when
// their turn comes on the stream, also to what their result holds.
//
// Strict where a program may be wrong. The heuristic knows matrices that do not overlap, of one
// type and as many of each operand, and answers with an algorithm that wants the alignment it was
// promised, and workspace: its sums are cut along k into two parts, which lie there between, if
// this is allowed and there is room. To run it with less than it wants, with other matrices than it
// was made for, or without a context is an error, as with the real one. What it cannot show is
// which problems and alignments the real one takes.
//
// Threads: any. Ownership: what the functions make is the caller's, which destroys it; it is
// counted. Errors: as said, CUBLAS_STATUS_INVALID_VALUE or CUBLAS_STATUS_NOT_SUPPORTED.
#ifndef CHORUS_CORE_CUDA_TESTING_FAKE_BLAS_H_
#define CHORUS_CORE_CUDA_TESTING_FAKE_BLAS_H_

#include <cstdint>

#include "core/cuda/cublaslt_api.h"

namespace chorus {
namespace cuda {

BlasApi FakeBlasApi();

// Since the process began.
struct FakeBlasCounts {
  int64_t handles_made = 0;
  int64_t products = 0;  // handed over
  int64_t alive = 0;     // handles, descriptors, layouts and preferences that were not destroyed
};
FakeBlasCounts CountsOfFakeBlas();

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_TESTING_FAKE_BLAS_H_
