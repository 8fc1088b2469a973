#include "core/ops/reduction/reduction_cuda.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_operand.h"
#include "core/ops/reduction/reduction_kernels.h"

namespace chorus {
namespace {

// Calls add(kernel, its name, T()) for the first input's dtype.
template <typename F>
CudaKernelOrError Make(const NodeView& node, absl::Span<const TensorType> outputs,
                       CudaKernel::Facts facts, const F& add) {
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  const DType dtype = node.input(0).dtype;
  const std::string name = absl::StrCat(node.op, "_", DTypeName(dtype));
  CHORUS_RETURN_IF_ERROR(VisitFloating(
      dtype, [&](auto t) { return add(kernel.get(), name, t); },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

CudaKernelOrError MakeHolds(const CudaGpu& gpu, const NodeView& node,
                            absl::Span<const TensorType> outputs) {
  const auto add = [&](LaunchedKernel* kernel, const std::string& name, auto t) {
    using T = decltype(t);
    cuda::HoldsArgs<T> args;
    args.count = outputs[0].num_elements();
    args.x_step = IsStretched(node.input(0)) ? 0 : 1;
    args.y_step = IsStretched(node.input(1)) ? 0 : 1;
    return kernel->Add(
        gpu, name, cuda::ThreadsFor(args.count), args,
        +[](const KernelCall& call, const KernelFault&, cuda::HoldsArgs<T>* to) {
          to->x = InputAs<T>(call, 0);
          to->y = InputAs<T>(call, 1);
          to->out = OutputAs<float>(call, 0);
        });
  };
  return Make(node, outputs, CudaKernel::FactsOf(node, outputs), add);
}

CudaKernelOrError MakeShare(const CudaGpu& gpu, const NodeView& node,
                            absl::Span<const TensorType> outputs) {
  const auto add = [&](LaunchedKernel* kernel, const std::string& name, auto t) {
    using T = decltype(t);
    cuda::ShareArgs<T> args;
    args.count = outputs[0].num_elements();
    return kernel->Add(
        gpu, name, cuda::ThreadsFor(args.count), args,
        +[](const KernelCall& call, const KernelFault&, cuda::ShareArgs<T>* to) {
          to->x = InputAs<T>(call, 0);
          to->holders = InputAs<float>(call, 1);
          to->out = OutputAs<T>(call, 0);
        });
  };
  return Make(node, outputs, CudaKernel::FactsOf(node, outputs), add);
}

CudaKernelOrError MakeScale(const CudaGpu& gpu, const NodeView& node,
                            absl::Span<const TensorType> outputs) {
  const auto add = [&](LaunchedKernel* kernel, const std::string& name, auto t) {
    using T = decltype(t);
    cuda::ScaleArgs<T> args;
    args.count = outputs[0].num_elements();
    return kernel->Add(
        gpu, name, cuda::ThreadsFor(args.count), args,
        +[](const KernelCall& call, const KernelFault&, cuda::ScaleArgs<T>* to) {
          to->x = InputAs<T>(call, 0);
          to->factor = InputAs<Arithmetic<T>>(call, 1);
          to->out = OutputAs<T>(call, 0);
        });
  };
  return Make(node, outputs, CudaKernel::FactsOf(node, outputs), add);
}

// In the workspace, if there are more inputs than a launch takes, are the products of those of the
// launches before, for the output may be in the place of any input.
CudaKernelOrError MakeProduct(const CudaGpu& gpu, const NodeView& node,
                              absl::Span<const TensorType> outputs) {
  constexpr int64_t kMost = cuda::ProductArgs<float>::kMost;
  const int64_t inputs = node.num_inputs();
  const int64_t count = outputs[0].num_elements();
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  if (inputs > kMost) {
    facts.workspace_bytes = count * std::max<int64_t>(DTypeBytes(outputs[0].dtype), sizeof(float));
  }
  const auto add = [&](LaunchedKernel* kernel, const std::string& name, auto t) {
    using T = decltype(t);
    for (int64_t first = 0; first < inputs; first += kMost) {
      cuda::ProductArgs<T> args;
      args.count = count;
      args.first = first;
      args.inputs = std::min(kMost, inputs - first);
      args.last = first + args.inputs == inputs;
      CHORUS_RETURN_IF_ERROR(kernel->Add(
          gpu, name, count, args,
          +[](const KernelCall& call, const KernelFault&, cuda::ProductArgs<T>* to) {
            for (int64_t n = 0; n < to->inputs; ++n) {
              to->in[n] = InputAs<T>(call, static_cast<size_t>(to->first + n));
            }
            to->products = reinterpret_cast<Arithmetic<T>*>(call.workspace);
            to->out = OutputAs<T>(call, 0);
          }));
    }
    return absl::OkStatus();
  };
  return Make(node, outputs, std::move(facts), add);
}

constexpr CudaKernelEntry kEntries[] = {
    {"holds", MakeHolds}, {"product", MakeProduct}, {"scale", MakeScale}, {"share", MakeShare}};

}  // namespace

absl::Span<const CudaKernelEntry> ReductionCudaKernels() { return kEntries; }

}  // namespace chorus
