#include "core/runtime/plan/collective_pieces.h"

#include <algorithm>
#include <functional>

#include "absl/types/span.h"

namespace chorus::planning {
namespace {

int64_t RowsOf(const TensorType& type) { return type.dims.empty() ? 1 : type.dims[0].size; }

// One number where all are alike.
std::vector<int64_t> Shortened(std::vector<int64_t> rows) {
  if (std::adjacent_find(rows.begin(), rows.end(), std::not_equal_to<int64_t>()) == rows.end()) {
    rows.resize(std::min<size_t>(rows.size(), 1));
  }
  return rows;
}

}  // namespace

int64_t CollectivePieces::Before(const std::vector<int64_t>& rows, size_t i) const {
  int64_t before = 0;
  for (size_t k = 0; k < i; ++k) before += rows[k];
  return before * row_elements;
}

CollectivePieces FindPieces(const Node& node, const OpDef& def, const ValueTable& values,
                            int32_t group_size) {
  const Collective& c = *node.collective;
  CollectivePieces pieces;
  const bool runtime = HasRuntimeCounts(c);
  const auto size = static_cast<size_t>(group_size);
  // The rows of pieces in one tensor: what `counts` says from `first` on, or equal parts.
  const auto add_single = [&](const TensorType& type, size_t first, std::vector<int64_t>* rows) {
    for (size_t k = 0; k < size; ++k) {
      rows->push_back(c.counts.empty() ? RowsOf(type) / group_size : c.counts[first + k]);
    }
  };
  const int num_inputs = NumPieces(c, static_cast<int>(node.inputs.size()));
  const TensorType* type = nullptr;
  for (int i = 0; i < num_inputs; ++i) {
    type = &values.type(node.inputs[static_cast<size_t>(i)]);
    if (def.one_input && !runtime) {
      add_single(*type, 0, &pieces.inputs);
    } else {
      pieces.inputs.push_back(RowsOf(*type));
    }
  }
  const int num_results = NumVisibleOutputs(c, static_cast<int>(node.outputs.size()));
  const int num_outputs = runtime ? std::min(num_results, 1) : num_results;
  for (int i = 0; i < num_outputs; ++i) {
    const TensorType& output = node.outputs[static_cast<size_t>(i)];
    if (type == nullptr) type = &output;
    if (def.one_output && !runtime) {
      add_single(output, def.one_input ? size : 0, &pieces.outputs);
    } else {
      pieces.outputs.push_back(RowsOf(output));
    }
  }
  if (type == nullptr) return pieces;
  pieces.dtype = type->dtype;
  pieces.dims = type->sizes();
  // One row, as it is where all pieces are in one tensor: both forms meet.
  if (pieces.dims.empty() && MayBeUneven(c.kind)) pieces.dims = {1};
  if (!pieces.dims.empty()) {
    pieces.dims[0] = pieces.inputs.empty() ? pieces.outputs[0] : pieces.inputs[0];
    for (size_t d = 1; d < pieces.dims.size(); ++d) pieces.row_elements *= pieces.dims[d];
  }
  return pieces;
}

Descriptor DescriptorOf(const Node& node, const CollectivePieces& pieces) {
  const Collective& c = *node.collective;
  Descriptor descriptor;
  descriptor.kind = MeetsAs(c.kind);
  descriptor.reduction = c.reduction;
  descriptor.root = c.root;
  descriptor.dtype = pieces.dtype;
  descriptor.dims = pieces.dims;
  if (pieces.dims.empty()) return descriptor;
  if (HasRuntimeCounts(c)) {
    descriptor.dims[0] = Descriptor::kRowsDiffer;
    descriptor.runtime_counts = true;
    return descriptor;
  }
  // Where a root has the list, a rank knows its own piece only, the root all of them; of the others
  // all ranks know that pieces are alike, when they are.
  const bool rooted = MayBeUneven(c.kind) && HasRoot(c.kind);
  std::vector<int64_t> sends = Shortened(pieces.inputs);
  std::vector<int64_t> receives = Shortened(pieces.outputs);
  const auto alike = [&](const std::vector<int64_t>& rows) {
    return rows.empty() || (rows.size() == 1 && rows[0] == pieces.dims[0]);
  };
  if (!rooted && alike(sends) && alike(receives)) return descriptor;
  descriptor.dims[0] = Descriptor::kRowsDiffer;
  descriptor.sends = std::move(sends);
  descriptor.receives = std::move(receives);
  return descriptor;
}

}  // namespace chorus::planning
