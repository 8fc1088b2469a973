#include "core/ops/softmax/softmax_cuda.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/cuda_rows.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/softmax/exp_sums_cuda.h"
#include "core/ops/softmax/softmax_kernels.h"

namespace chorus {
namespace {

cuda::RowParts RowsOf(const NodeView& node, const TensorType& type) {
  return CutRows(HostRows(type, IntAttribute(node.attributes, "axis")), kLeastOfRow);
}

// In the workspace: the ExpSum of each row, and of each part.
template <typename T>
CudaKernelOrError MakeOf(const CudaGpu& gpu, const NodeView& node,
                         absl::Span<const TensorType> outputs) {
  const DType dtype = outputs[0].dtype;
  const cuda::RowParts rows = RowsOf(node, outputs[0]);
  using State = cuda::ExpSum<Arithmetic<T>>;
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  const bool empty = outputs[0].num_elements() == 0;
  PartStates states;
  if (!empty) states = PlaceStates(rows, sizeof(State), &facts.workspace_bytes);
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  if (empty) return std::unique_ptr<CudaKernel>(std::move(kernel));
  CHORUS_RETURN_IF_ERROR(AddExpSums<T>(gpu, dtype, rows, states, kernel.get()));
  cuda::SoftmaxArgs<T> args;
  args.states = Offset<const State>(states.result);
  args.rows = rows;
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat(node.op, "_", DTypeName(dtype)), rows.count(), args,
      +[](const KernelCall& call, const KernelFault&, cuda::SoftmaxArgs<T>* to) {
        to->x = InputAs<T>(call, 0);
        Place(call, &to->states);
        to->out = OutputAs<T>(call, 0);
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

// In the workspace: where the largest weight of each row is; each row's sums; of each part the one,
// and when these have been taken together, the other.
template <typename T>
CudaKernelOrError MakeCenterOf(const CudaGpu& gpu, const NodeView& node,
                               absl::Span<const TensorType> outputs, cuda::Centering centering) {
  using A = Arithmetic<T>;
  using Most = cuda::MostWeight<A>;
  using Sums = cuda::CenterSums<A>;
  static_assert(sizeof(Most) % sizeof(Sums) == 0, "they share their places");
  const auto name = [&](const char* part) {
    return absl::StrCat(part, DTypeName(outputs[0].dtype));
  };
  const std::string of_sums = sizeof(A) == 8 ? "f64" : "f32";
  const cuda::RowParts rows = RowsOf(node, outputs[0]);
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  const bool empty = outputs[0].num_elements() == 0;
  PartStates most;
  PartStates sums;
  if (!empty) {
    most = PlaceStates(rows, sizeof(Most), &facts.workspace_bytes);
    sums = most;
    sums.result = PlaceResult(rows, sizeof(Sums), &facts.workspace_bytes);
  }
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  if (empty) return std::unique_ptr<CudaKernel>(std::move(kernel));

  cuda::MostWeightArgs<T> find;
  find.states = Offset<Most>(most.from_parts(rows));
  find.rows = rows;
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, name("center_most_"), rows.count(), find,
      +[](const KernelCall& call, const KernelFault&, cuda::MostWeightArgs<T>* to) {
        to->w = InputAs<T>(call, 0);
        Place(call, &to->states);
      }));
  CHORUS_RETURN_IF_ERROR(
      AddMerges<Most>(gpu, "center_most_merge_" + of_sums, rows, most, kernel.get()));

  cuda::CenterArgs<T> args;
  args.most = Offset<const Most>(most.result);
  args.rows = rows;
  args.centering = centering;
  const auto bind = +[](const KernelCall& call, const KernelFault&, cuda::CenterArgs<T>* to) {
    to->w = InputAs<T>(call, 0);
    to->x = InputAs<T>(call, 1);
    Place(call, &to->most);
    Place(call, &to->sums);
    to->out = OutputAs<T>(call, 0);
  };
  args.sums = Offset<Sums>(sums.from_parts(rows));
  CHORUS_RETURN_IF_ERROR(kernel->Add(gpu, name("center_sums_"), rows.count(), args, bind));
  CHORUS_RETURN_IF_ERROR(
      AddMerges<Sums>(gpu, "center_sums_merge_" + of_sums, rows, sums, kernel.get()));
  args.sums = Offset<Sums>(sums.result);
  CHORUS_RETURN_IF_ERROR(kernel->Add(gpu, name("center_"), rows.count(), args, bind));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

CudaKernelOrError Make(const CudaGpu& gpu, const NodeView& node,
                       absl::Span<const TensorType> outputs) {
  return VisitFloating(
      outputs[0].dtype, [&](auto t) { return MakeOf<decltype(t)>(gpu, node, outputs); },
      [&] { return CudaKernelOrError(NoCudaKernel(node, outputs)); });
}

template <cuda::Centering kOp>
CudaKernelOrError MakeCenter(const CudaGpu& gpu, const NodeView& node,
                             absl::Span<const TensorType> outputs) {
  return VisitFloating(
      outputs[0].dtype, [&](auto t) { return MakeCenterOf<decltype(t)>(gpu, node, outputs, kOp); },
      [&] { return CudaKernelOrError(NoCudaKernel(node, outputs)); });
}

constexpr CudaKernelEntry kEntries[] = {
    {"center", MakeCenter<cuda::Centering::kCenter>},
    {"center_grad", MakeCenter<cuda::Centering::kCenterGrad>},
    {"log_softmax", Make},
    {"softmax", Make},
    {"softmax_grad", MakeCenter<cuda::Centering::kSoftmaxGrad>},
};

}  // namespace

absl::Span<const CudaKernelEntry> SoftmaxCudaKernels() { return kEntries; }

}  // namespace chorus
