#include "core/ops/cross_entropy/cross_entropy_cuda.h"

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/cross_entropy/cross_entropy_kernels.h"
#include "core/ops/cuda_indices.h"
#include "core/ops/cuda_rows.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/softmax/exp_sums_cuda.h"

namespace chorus {
namespace {

// In the workspace: the ExpSum of each row, and of each part.
template <typename T, bool gradient>
CudaKernelOrError MakeOf(const CudaGpu& gpu, const NodeView& node,
                         absl::Span<const TensorType> outputs) {
  using State = cuda::ExpSum<Arithmetic<T>>;
  const DType dtype = outputs[0].dtype;
  const int64_t classes = node.input(0).dims.back().size;
  const cuda::RowParts rows = CutRows(node.input(1).num_elements(), classes, kLeastOfRow);
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  const bool empty = outputs[0].num_elements() == 0;
  PartStates states;
  if (!empty) states = PlaceStates(rows, sizeof(State), &facts.workspace_bytes);
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts), OutOfRangeOf(node, 1, classes));
  if (empty) return std::unique_ptr<CudaKernel>(std::move(kernel));
  CHORUS_RETURN_IF_ERROR(AddExpSums<T>(gpu, dtype, rows, states, kernel.get()));
  cuda::CrossEntropyArgs<T> args;
  args.states = Offset<const State>(states.result);
  args.labels = IndicesOf(node, 1, classes);
  args.rows = rows;
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat(node.op, "_", DTypeName(dtype)), gradient ? rows.count() : rows.outer, args,
      +[](const KernelCall& call, const KernelFault& fault, cuda::CrossEntropyArgs<T>* to) {
        to->x = InputAs<T>(call, 0);
        to->labels.memory = InputAs<void>(call, 1);
        if (gradient) to->g = InputAs<T>(call, 2);
        Place(call, &to->states);
        to->out = OutputAs<T>(call, 0);
        to->fault_word = reinterpret_cast<uint64_t*>(fault.word);
        to->fault_first = fault.first;
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

template <bool gradient>
CudaKernelOrError Make(const CudaGpu& gpu, const NodeView& node,
                       absl::Span<const TensorType> outputs) {
  return VisitFloating(
      outputs[0].dtype, [&](auto t) { return MakeOf<decltype(t), gradient>(gpu, node, outputs); },
      [&] { return CudaKernelOrError(NoCudaKernel(node, outputs)); });
}

constexpr CudaKernelEntry kEntries[] = {{"cross_entropy", Make<false>},
                                        {"cross_entropy_grad", Make<true>}};

}  // namespace

absl::Span<const CudaKernelEntry> CrossEntropyCudaKernels() { return kEntries; }

}  // namespace chorus
