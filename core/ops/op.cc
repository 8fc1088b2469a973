#include "core/ops/op.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace chorus {

absl::StatusOr<TensorType> StretchedType(const NodeView& node, int first) {
  const TensorType* type = &node.input(first);
  for (int i = node.num_inputs() - 1; i >= first; --i) {
    if (!node.input(i).dims.empty()) type = &node.input(i);
  }
  for (int i = first; i < node.num_inputs(); ++i) {
    const TensorType& input = node.input(i);
    if (input.dtype == type->dtype && (input.dims.empty() || input.dims == type->dims)) continue;
    const TensorType scalar(type->dtype, {});
    return ShapeError(
        node,
        absl::StrCat("inputs of one type, ", type->ToString(),
                     type->dims.empty() ? "" : absl::StrCat(" or ", scalar.ToString())),
        absl::StrCat(input.ToString(), " as input ", i));
  }
  return *type;
}

bool MayFail(const OpDef& def, const NodeView& node) {
  if (node.collective != nullptr) return HasRuntimeCounts(*node.collective);
  return std::any_of(node.inputs.begin(), node.inputs.end(), [&def](const TensorType* input) {
    return Contains(def.fallible, input->dtype);
  });
}

Saved SaveInputs(const NodeSpec&, int, int num_outputs) { return {0, num_outputs}; }

Saved SaveForCollective(const NodeSpec& spec, int num_inputs, int num_outputs) {
  const Collective& c = *spec.collective;
  const int outputs_from = HasRuntimeCounts(c) ? 1 : NumVisibleOutputs(c, num_outputs);
  return {NumPieces(c, num_inputs), std::min(outputs_from, num_outputs)};
}

}  // namespace chorus
