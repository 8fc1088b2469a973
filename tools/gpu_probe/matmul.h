// One matrix product of cuBLASLt at a time, with the algorithm said.
//
// Threads: one. Ownership: handles and descriptors are its own; memory is the caller's. Errors:
//   UNAVAILABLE: there is no cuBLASLt here; INTERNAL: it refuses, with its own status.
#ifndef CHORUS_TOOLS_GPU_PROBE_MATMUL_H_
#define CHORUS_TOOLS_GPU_PROBE_MATMUL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/cuda/cublaslt_api.h"
#include "tools/gpu_probe/algorithm.h"
#include "tools/gpu_probe/gpu.h"

namespace chorus {
namespace probe {

struct MatmulShape {
  cuda::BlasType type = cuda::BlasType::kF32;
  int64_t m = 1;
  int64_t n = 1;
  int64_t k = 1;
  // Whether the operand lies in memory transposed: as k x m, or n x k.
  bool transpose_a = false;
  bool transpose_b = false;

  int64_t element_bytes() const;
  std::string Text() const;  // "bf16 64 x 256 x 784", "bf16 64 x 256 x 784, A^T"
};

class Matmul {
 public:
  static constexpr int64_t kWorkspaceBytes = 32 << 20;

  // Loads and opens cuBLASLt: the context of `gpu` is current.
  static absl::StatusOr<std::unique_ptr<Matmul>> Open(Gpu* gpu,
                                                      const std::vector<std::string>& libraries);
  // d = a b, all column by column; f32 without TF32, halves summed in f32. What follows is about
  // this shape.
  absl::Status Set(const MatmulShape& shape);
  // The first that the heuristic offers for operands of this alignment.
  absl::StatusOr<cuda::BlasAlgorithm> Choose(uint32_t alignment_bytes) const;
  absl::Status Run(const cuda::BlasAlgorithm& algorithm, cuda::DevicePtr a, cuda::DevicePtr b,
                   cuda::DevicePtr d, cuda::Stream stream) const;
  // With what the library shows of it.
  Algorithm Describe(const cuda::BlasAlgorithm& algorithm) const;
  // One with the attributes of `like`, whose structure is not looked at.
  absl::StatusOr<cuda::BlasAlgorithm> Rebuild(const Algorithm& like) const;
  std::string VersionText() const;

 private:
  Matmul() = default;
  absl::Status Check(cuda::BlasStatus status, const char* call) const;
  cuda::BlasCompute compute() const;
  cuda::BlasType scale() const;

  cuda::BlasApi api_;
  Memory workspace_;
  Owned<cuda::BlasHandle> handle_;
  MatmulShape shape_;
  Owned<cuda::BlasMatmul> matmul_;
  Owned<cuda::BlasLayout> a_;
  Owned<cuda::BlasLayout> b_;
  Owned<cuda::BlasLayout> d_;
};

// Numbers between 1/2 and 2 of either sign, in the type.
std::vector<unsigned char> PatternMatrix(cuda::BlasType type, int64_t count, uint64_t seed);

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_MATMUL_H_
