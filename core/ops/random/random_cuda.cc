#include "core/ops/random/random_cuda.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/random/random_kernels.h"

namespace chorus {
namespace {

template <typename T>
CudaKernelOrError MakeOf(const CudaGpu& gpu, const NodeView& node,
                         absl::Span<const TensorType> outputs, const std::string& name) {
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  cuda::RandomArgs<T> args;
  args.count = outputs[0].num_elements();
  const int64_t blocks = (args.count + kPerBlock<T> - 1) / kPerBlock<T>;
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, name, blocks, args,
      +[](const KernelCall& call, const KernelFault&, cuda::RandomArgs<T>* to) {
        to->seed = InputAs<int64_t>(call, 0);
        to->offset = InputAs<int64_t>(call, 1);
        to->out = OutputAs<T>(call, 0);
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

CudaKernelOrError MakeBits(const CudaGpu& gpu, const NodeView& node,
                           absl::Span<const TensorType> outputs) {
  return VisitWidth(
      outputs[0].dtype,
      [&](auto t) {
        return MakeOf<decltype(t)>(gpu, node, outputs, absl::StrCat("random_bits_", sizeof(t)));
      },
      [&] { return CudaKernelOrError(NoCudaKernel(node, outputs)); });
}

CudaKernelOrError MakeReal(const CudaGpu& gpu, const NodeView& node,
                           absl::Span<const TensorType> outputs) {
  const DType dtype = outputs[0].dtype;
  return VisitFloating(
      dtype,
      [&](auto t) {
        return MakeOf<decltype(t)>(gpu, node, outputs,
                                   absl::StrCat(node.op, "_", DTypeName(dtype)));
      },
      [&] { return CudaKernelOrError(NoCudaKernel(node, outputs)); });
}

constexpr CudaKernelEntry kEntries[] = {
    {"random_bits", MakeBits},
    {"random_normal", MakeReal},
    {"random_uniform", MakeReal},
};

}  // namespace

absl::Span<const CudaKernelEntry> RandomCudaKernels() { return kEntries; }

}  // namespace chorus
