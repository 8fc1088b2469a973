#include "core/ops/elementwise/elementwise_cuda.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/cuda_elements.h"
#include "core/ops/elementwise/elementwise.h"
#include "core/ops/elementwise/elementwise_kernels.h"

namespace chorus {
namespace {

std::string KernelName(const NodeView& node, const TensorType& output) {
  return absl::StrCat(node.op, "_", DTypeName(output.dtype));
}

CudaKernelOrError Make(const CudaGpu& gpu, const NodeView& node,
                       absl::Span<const TensorType> outputs) {
  return MakeElements(gpu, node, outputs, KernelName(node, outputs[0]));
}

CudaKernelOrError MakeDiv(const CudaGpu& gpu, const NodeView& node,
                          absl::Span<const TensorType> outputs) {
  const TensorType& out = outputs[0];
  if (IsFloating(out.dtype)) return Make(gpu, node, outputs);
  auto kernel = std::make_unique<LaunchedKernel>(
      CudaKernel::FactsOf(node, outputs), [out](uint64_t element, const ReadInput& /*read*/) {
        return DividedByZero(out, static_cast<int64_t>(element));
      });
  cuda::IntegerDivArgs args;
  args.elements = ElementsOf(node, out);
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, KernelName(node, out), args.elements.count, args,
      +[](const KernelCall& call, const KernelFault& fault, cuda::IntegerDivArgs* to) {
        SetAddresses(call, &to->elements);
        to->fault_word = reinterpret_cast<uint64_t*>(fault.word);
        to->fault_first = fault.first;
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

constexpr CudaKernelEntry kEntries[] = {
    {"abs", Make},          {"add", Make},       {"ceil", Make},      {"cos", Make},
    {"div", MakeDiv},       {"erf", Make},       {"exp", Make},       {"expm1", Make},
    {"floor", Make},        {"log", Make},       {"log1p", Make},     {"maximum", Make},
    {"minimum", Make},      {"mul", Make},       {"neg", Make},       {"pow", Make},
    {"relu", Make},         {"relu_grad", Make}, {"rsqrt", Make},     {"sigmoid", Make},
    {"sigmoid_grad", Make}, {"sign", Make},      {"sin", Make},       {"sqrt", Make},
    {"sub", Make},          {"tanh", Make},      {"tanh_grad", Make},
};

}  // namespace

absl::Span<const CudaKernelEntry> ElementwiseCudaKernels() { return kEntries; }

}  // namespace chorus
