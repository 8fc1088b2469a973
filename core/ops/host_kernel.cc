#include "core/ops/host_kernel.h"

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {

absl::Status NoHostKernel(const NodeView& node, absl::Span<const TensorType> outputs) {
  return MakeError(Reason::kInternal,
                   absl::StrCat(node.op, ": no host kernel", outputs.empty() ? "" : " for ",
                                outputs.empty() ? "" : outputs[0].ToString()));
}

}  // namespace chorus
