// Matrix products by cuBLASLt, where the machine has it: an algorithm is chosen when a product is
// made, and runs at every call.
//
// Bits. What is chosen depends on the problem, the library and the GPU's model alone: the
// heuristic's first answer, asked with fixed preferences (docs/gpu.md, P9), and neither on what is
// measured nor on where operands lie. Single precision is not TF32, half types add up in it. Sums
// may be cut along k only where the parts lie in the workspace as they were computed and another
// step takes them together, in their order: to add parts up in the result's memory would round half
// types more than once.
//
// Alignment. Fast algorithms want addresses of 16 bytes, but an operand may lie anywhere that suits
// its element, and other algorithms would give other bits. So algorithms are asked for the
// alignment that an operand's rows have anyway, up to 16 bytes, and an operand of a call that has
// less goes by way of the workspace. What that costs is scratch as large as the operands whose rows
// have more than an element's alignment, since which of them will lie badly is not known when a
// product is made; a run has it once, for whichever of its kernels wants most.
//
// Threads: any. Ownership: the functions of `load` and a product's CudaBlas must outlive it.
// Errors: where cuBLASLt cannot be had, or does not do a product, there is none, and the first time
// of either is told on the standard error; else as cuda_api.h says.
#ifndef CHORUS_CORE_CUDA_BLAS_H_
#define CHORUS_CORE_CUDA_BLAS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "core/cuda/aligned_operand.h"
#include "core/cuda/cublaslt_api.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/lazy_library.h"

namespace chorus {

// As many products c = op(a) op(b) as there are, of matrices that lie row by row and behind each
// other: op(a) is rows x depth, op(b) depth x columns, and op(x) is x or its transpose.
struct BlasProblem {
  cuda::BlasType type = cuda::BlasType::kF32;
  int64_t batch = 1;
  int64_t rows = 1;
  int64_t columns = 1;
  int64_t depth = 1;
  bool transpose_a = false;
  bool transpose_b = false;
  bool one_a = false;  // the same one for all products
  // These lie at multiples of 16 bytes at every call, so no scratch is kept for them.
  bool aligned_b = false;
  bool aligned_c = false;

  std::string Text() const;  // "64 products of bf16 512 x 64 x 512, A^T"
};

// A problem with its algorithm.
class BlasProduct {
 public:
  ~BlasProduct();
  BlasProduct(const BlasProduct&) = delete;
  BlasProduct& operator=(const BlasProduct&) = delete;

  // Of the driver at a call, at most: itself, and copies of what lies badly.
  static constexpr int64_t kCalls = 5;
  int64_t workspace_bytes() const { return workspace_bytes_; }
  // On a stream of `driver`, whose context is the thread's. The workspace is aligned to 64 bytes,
  // operands to their elements. `adds`: to what c holds.
  absl::Status Enqueue(const cuda::Api& driver, cuda::DevicePtr a, cuda::DevicePtr b,
                       cuda::DevicePtr c, cuda::DevicePtr workspace, cuda::Stream stream,
                       bool adds = false) const;

 private:
  friend class CudaBlas;

  struct Operand {
    bool one = false;      // for all products
    bool aligned = false;  // at every call
    cuda::BlasLayout layout = nullptr;
    AlignedOperand memory;
  };

  BlasProduct(const cuda::BlasApi* api, cuda::BlasHandle handle) : api_(api), handle_(handle) {}
  cuda::BlasStatus Describe(const BlasProblem& problem);
  cuda::BlasStatus DescribeOperand(const BlasProblem& problem, int64_t rows, int64_t columns,
                                   Operand* operand);
  cuda::BlasStatus Choose();
  void MakeRoom(int64_t element_bytes);

  const cuda::BlasApi* const api_;
  const cuda::BlasHandle handle_;
  bool wide_ = false;  // f64
  cuda::BlasMatmul matmul_ = nullptr;
  Operand a_;
  Operand b_;
  Operand c_;
  cuda::BlasAlgorithm algorithm_;
  size_t algorithm_bytes_ = 0;  // of workspace, which stand first in ours
  int64_t workspace_bytes_ = 0;
};

// One GPU's cuBLASLt. It is loaded and opened when the first product is made.
class CudaBlas {
 public:
  using Library = LazyLibrary<cuda::BlasApi, cuda::BlasHandle>;
  using Load = Library::Load;

  // Null: there is none, and nothing is told of it.
  explicit CudaBlas(Load load) : library_(std::move(load), "matrix products without cuBLASLt") {}
  // In the GPU's context, as all that follows.
  ~CudaBlas() = default;
  CudaBlas(const CudaBlas&) = delete;
  CudaBlas& operator=(const CudaBlas&) = delete;

  // Null: not by cuBLASLt, which is so for problems without any element or term.
  std::unique_ptr<BlasProduct> Make(const BlasProblem& problem);

 private:
  Library library_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_BLAS_H_
