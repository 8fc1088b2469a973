#include "core/ops/cuda_kernel.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/registry.h"

namespace chorus {

CudaKernel::Facts CudaKernel::FactsOf(const NodeView& node, absl::Span<const TensorType> outputs) {
  Facts facts;
  facts.op = std::string(node.op);
  facts.source = std::string(node.source);
  const OpDef* const def = FindOp(node.op);
  facts.op_may_fail = def == nullptr || MayFail(*def, node);  // a test's own op may
  for (const TensorType* input : node.inputs) facts.input_bytes.push_back(input->num_bytes());
  for (const TensorType& output : outputs) facts.output_bytes.push_back(output.num_bytes());
  return facts;
}

absl::Status NoCudaKernel(const NodeView& node, absl::Span<const TensorType> outputs) {
  return MakeError(Reason::kInternal,
                   absl::StrCat(node.op, ": no kernel for GPUs", outputs.empty() ? "" : " for ",
                                outputs.empty() ? "" : outputs[0].ToString()));
}

}  // namespace chorus
