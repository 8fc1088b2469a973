#include "core/ops/cuda_elements.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/base/error.h"

namespace chorus {
namespace {

// As many as have a group of elements each.
int64_t ThreadsFor(const NodeView& node, const TensorType& output) {
  int64_t widest = DTypeBytes(output.dtype);
  for (const TensorType* input : node.inputs) widest = std::max(widest, DTypeBytes(input->dtype));
  const int64_t at_once = cuda::ElementsAtOnce(static_cast<size_t>(widest));
  return output.num_elements() / at_once + (output.num_elements() % at_once != 0 ? 1 : 0);
}

void Bind(const KernelCall& call, const KernelFault&, cuda::ElementsArgs* to) {
  SetAddresses(call, to);
}

void BindSwapped(const KernelCall& call, const KernelFault&, cuda::ElementsArgs* to) {
  SetAddresses(call, to);
  std::swap(to->inputs[0], to->inputs[1]);
}

CudaKernelOrError MakeOne(const CudaGpu& gpu, const NodeView& node,
                          absl::Span<const TensorType> outputs, const std::string& name,
                          const cuda::ElementsArgs& args, decltype(Bind)* bind) {
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  CHORUS_RETURN_IF_ERROR(kernel->Add(gpu, name, ThreadsFor(node, outputs[0]), args, bind));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

}  // namespace

cuda::ElementsArgs ElementsOf(const NodeView& node, const TensorType& output) {
  cuda::ElementsArgs args;
  args.count = output.num_elements();
  for (int i = 0; i < node.num_inputs(); ++i) {
    // As IsStretched of host_operand.h.
    if (node.input(i).dims.empty()) args.stretched |= uint64_t{1} << i;
  }
  return args;
}

void SetAddresses(const KernelCall& call, cuda::ElementsArgs* args) {
  args->out = OutputAs<void>(call, 0);
  for (size_t i = 0; i < call.inputs.size(); ++i) args->inputs[i] = InputAs<void>(call, i);
}

CudaKernelOrError MakeElements(const CudaGpu& gpu, const NodeView& node,
                               absl::Span<const TensorType> outputs, const std::string& name) {
  return MakeOne(gpu, node, outputs, name, ElementsOf(node, outputs[0]), Bind);
}

CudaKernelOrError MakeSwappedElements(const CudaGpu& gpu, const NodeView& node,
                                      absl::Span<const TensorType> outputs,
                                      const std::string& name) {
  cuda::ElementsArgs args = ElementsOf(node, outputs[0]);
  args.stretched = (args.stretched & 1) << 1 | args.stretched >> 1;
  return MakeOne(gpu, node, outputs, name, args, BindSwapped);
}

}  // namespace chorus
