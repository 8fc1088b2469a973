#include "core/ops/matmul/matmul_cuda.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/cuda/blas.h"
#include "core/ops/matmul/matmul_kernels.h"

namespace chorus {
namespace {

class BlasKernel final : public CudaKernel {
 public:
  BlasKernel(Facts facts, std::unique_ptr<BlasProduct> product)
      : CudaKernel(std::move(facts)), product_(std::move(product)) {}

  int64_t calls() const override { return BlasProduct::kCalls; }
  absl::Status Enqueue(int64_t /*part*/, const KernelCall& call, const KernelFault& /*fault*/,
                       const CudaGpu& gpu, cuda::Stream stream) const override {
    return product_->Enqueue(gpu.api(), call.inputs[0], call.inputs[1], call.outputs[0],
                             call.workspace, stream);
  }

 private:
  const std::unique_ptr<BlasProduct> product_;
};

// But for the type.
BlasProblem ProblemOf(const NodeView& node, const TensorType& c) {
  const size_t row = c.dims.size() - 2;
  BlasProblem problem;
  problem.transpose_a = IntAttribute(node.attributes, "transpose_a") != 0;
  problem.transpose_b = IntAttribute(node.attributes, "transpose_b") != 0;
  for (size_t d = 0; d < row; ++d) problem.batch *= c.dims[d].size;
  problem.rows = c.dims[row].size;
  problem.columns = c.dims[row + 1].size;
  problem.depth = node.input(0).dims[problem.transpose_a ? row : row + 1].size;
  return problem;
}

// Where there is no cuBLASLt, or not for the product.
template <typename T>
CudaKernelOrError MakeOwn(const CudaGpu& gpu, const NodeView& node,
                          absl::Span<const TensorType> outputs) {
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  const TensorType& c = outputs[0];
  if (c.num_elements() == 0) return std::unique_ptr<CudaKernel>(std::move(kernel));
  const BlasProblem problem = ProblemOf(node, c);
  cuda::MatmulArgs<T> args;
  args.batch = problem.batch;
  args.tiling.rows = problem.rows;
  args.tiling.columns = problem.columns;
  args.depth = problem.depth;
  args.a_row = problem.transpose_a ? 1 : args.depth;
  args.a_deep = problem.transpose_a ? args.tiling.rows : 1;
  args.b_deep = problem.transpose_b ? 1 : args.tiling.columns;
  args.b_column = problem.transpose_b ? args.depth : 1;
  // Neighbouring threads have neighbouring elements of one of the factors where these are in a row
  // of it; else few rows of either.
  if (problem.transpose_b) args.tiling.width = problem.transpose_a ? 1 : 8;
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat("matmul_", DTypeName(c.dtype)), args.batch * args.tiling.tiles(), args,
      +[](const KernelCall& call, const KernelFault&, cuda::MatmulArgs<T>* to) {
        to->a = InputAs<T>(call, 0);
        to->b = InputAs<T>(call, 1);
        to->c = OutputAs<T>(call, 0);
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

template <typename T>
CudaKernelOrError MakeOf(cuda::BlasType type, const CudaGpu& gpu, const NodeView& node,
                         absl::Span<const TensorType> outputs) {
  BlasProblem problem = ProblemOf(node, outputs[0]);
  problem.type = type;
  std::unique_ptr<BlasProduct> product = gpu.MakeProduct(problem);
  if (product == nullptr) return MakeOwn<T>(gpu, node, outputs);
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  facts.workspace_bytes = product->workspace_bytes();
  return std::unique_ptr<CudaKernel>(
      std::make_unique<BlasKernel>(std::move(facts), std::move(product)));
}

CudaKernelOrError Make(const CudaGpu& gpu, const NodeView& node,
                       absl::Span<const TensorType> outputs) {
  switch (outputs[0].dtype) {
    case DType::kF16:
      return MakeOf<F16>(cuda::BlasType::kF16, gpu, node, outputs);
    case DType::kBF16:
      return MakeOf<BF16>(cuda::BlasType::kBF16, gpu, node, outputs);
    case DType::kF32:
      return MakeOf<float>(cuda::BlasType::kF32, gpu, node, outputs);
    case DType::kF64:
      return MakeOf<double>(cuda::BlasType::kF64, gpu, node, outputs);
    case DType::kI64:
      return MakeOwn<int64_t>(gpu, node, outputs);
    default:
      return NoCudaKernel(node, outputs);
  }
}

constexpr CudaKernelEntry kEntries[] = {{"matmul", Make}};

}  // namespace

absl::Span<const CudaKernelEntry> MatmulCudaKernels() { return kEntries; }

}  // namespace chorus
