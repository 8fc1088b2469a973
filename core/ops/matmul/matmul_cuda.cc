#include "core/ops/matmul/matmul_cuda.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/matmul/matmul_kernels.h"

namespace chorus {
namespace {

template <typename T>
CudaKernelOrError MakeOf(const CudaGpu& gpu, const NodeView& node,
                         absl::Span<const TensorType> outputs) {
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  const TensorType& c = outputs[0];
  if (c.num_elements() == 0) return std::unique_ptr<CudaKernel>(std::move(kernel));
  const size_t row = c.dims.size() - 2;
  const bool transpose_a = IntAttribute(node.attributes, "transpose_a") != 0;
  const bool transpose_b = IntAttribute(node.attributes, "transpose_b") != 0;
  cuda::MatmulArgs<T> args;
  args.batch = 1;
  for (size_t d = 0; d < row; ++d) args.batch *= c.dims[d].size;
  args.tiling.rows = c.dims[row].size;
  args.tiling.columns = c.dims[row + 1].size;
  args.depth = node.input(0).dims[transpose_a ? row : row + 1].size;
  args.a_row = transpose_a ? 1 : args.depth;
  args.a_deep = transpose_a ? args.tiling.rows : 1;
  args.b_deep = transpose_b ? 1 : args.tiling.columns;
  args.b_column = transpose_b ? args.depth : 1;
  // Neighbouring threads have neighbouring elements of one of the factors where these are in a row
  // of it; else few rows of either.
  if (transpose_b) args.tiling.width = transpose_a ? 1 : 8;
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat("matmul_", DTypeName(c.dtype)), args.batch * args.tiling.tiles(), args,
      +[](const KernelCall& call, const KernelFault&, cuda::MatmulArgs<T>* to) {
        to->a = InputAs<T>(call, 0);
        to->b = InputAs<T>(call, 1);
        to->c = OutputAs<T>(call, 0);
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

CudaKernelOrError Make(const CudaGpu& gpu, const NodeView& node,
                       absl::Span<const TensorType> outputs) {
  switch (outputs[0].dtype) {
    case DType::kF16:
      return MakeOf<F16>(gpu, node, outputs);
    case DType::kBF16:
      return MakeOf<BF16>(gpu, node, outputs);
    case DType::kF32:
      return MakeOf<float>(gpu, node, outputs);
    case DType::kF64:
      return MakeOf<double>(gpu, node, outputs);
    case DType::kI64:
      return MakeOf<int64_t>(gpu, node, outputs);
    default:
      return NoCudaKernel(node, outputs);
  }
}

constexpr CudaKernelEntry kEntries[] = {{"matmul", Make}};

}  // namespace

absl::Span<const CudaKernelEntry> MatmulCudaKernels() { return kEntries; }

}  // namespace chorus
