#include "core/ops/pieces.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

bool AlikeButForRows(const TensorType& a, const TensorType& b) {
  if (a.dims.empty() || a.dims.size() != b.dims.size()) return a == b;
  return WithRows(a, b.dims[0].size) == b;
}

}  // namespace

TensorType WithRows(TensorType piece, int64_t rows) {
  piece.dims[0] = Dim(rows);
  return piece;
}

std::vector<TensorType> PiecesOf(const TensorType& piece, absl::Span<const int64_t> rows) {
  std::vector<TensorType> pieces;
  pieces.reserve(rows.size());
  for (const int64_t n : rows) pieces.push_back(WithRows(piece, n));
  return pieces;
}

absl::Status CheckInputPieces(const NodeView& node) {
  if (node.num_inputs() != node.group_size) {
    return ShapeError(node, absl::StrCat("one input for each of ", node.group_size, " members"),
                      absl::StrCat(node.num_inputs()));
  }
  for (int i = 1; i < node.num_inputs(); ++i) {
    if (AlikeButForRows(node.input(0), node.input(i))) continue;
    return ShapeError(node,
                      absl::StrCat("inputs like ", node.input(0).ToString(),
                                   node.input(0).dims.empty() ? "" : " but for dimension 0"),
                      absl::StrCat(node.input(i).ToString(), " as input ", i));
  }
  return absl::OkStatus();
}

absl::Status CheckRows(const NodeView& node, int i, int64_t rows) {
  const TensorType& type = node.input(i);
  if (!type.dims.empty() && type.dims[0].size == rows) return absl::OkStatus();
  return ShapeError(node, absl::StrCat(rows, " rows as input ", i, ", by the counts"),
                    type.ToString());
}

absl::Status CheckHasRows(const NodeView& node) {
  if (!node.input(0).dims.empty()) return absl::OkStatus();
  return ShapeError(node, "a tensor with rows, which has at least one dimension",
                    node.input(0).ToString());
}

absl::StatusOr<int64_t> RowsOfPiece(const NodeView& node, absl::Span<const int64_t> counts,
                                    int32_t rank) {
  CHORUS_RETURN_IF_ERROR(CheckHasRows(node));
  const int64_t rows = node.input(0).dims[0].size;
  if (!counts.empty()) {
    int64_t sum = 0;
    for (const int64_t n : counts) sum += n;
    CHORUS_RETURN_IF_ERROR(CheckRows(node, 0, sum));
    return counts[static_cast<size_t>(rank)];
  }
  if (rows % node.group_size != 0) {
    return ShapeError(node,
                      absl::StrCat("counts, or rows that divide by ", node.group_size, " members"),
                      node.input(0).ToString());
  }
  return rows / node.group_size;
}

absl::StatusOr<TensorType> PiecesInOneTensor(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckHasRows(node));
  const Collective& c = *node.collective;
  if (c.counts.empty()) {
    return WithRows(node.input(0), node.input(0).dims[0].size * node.group_size);
  }
  CHORUS_RETURN_IF_ERROR(CheckRows(node, 0, c.counts[c.rank.value()]));
  int64_t rows = 0;
  for (const int64_t n : c.counts) rows += n;
  return WithRows(node.input(0), rows);
}

std::vector<int64_t> RowsOfInputs(const GradientContext& context) {
  std::vector<int64_t> rows;
  for (int i = 0; i < context.num_pieces(); ++i) {
    rows.push_back(context.input_type(i).dims[0].size);
  }
  return rows;
}

std::vector<int64_t> CountsOfInputs(const GradientContext& context) {
  for (int i = 1; i < context.num_pieces(); ++i) {
    if (context.input_type(i) != context.input_type(0)) return RowsOfInputs(context);
  }
  return {};
}

absl::StatusOr<std::vector<ValueIndex>> VisibleGradients(GradientContext* context) {
  std::vector<ValueIndex> grads;
  for (int i = 0; i < context->num_visible(); ++i) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, context->GradOrZeros(i));
    grads.push_back(g);
  }
  return grads;
}

absl::StatusOr<TensorType> TypeOffRoot(const NodeView& node) {
  if (node.num_inputs() != 0) {
    return ShapeError(node,
                      absl::StrCat("no input on rank ", node.collective->rank.value(),
                                   ", as the root is ", node.collective->root.value()),
                      node.num_inputs() == 1 ? "one" : absl::StrCat(node.num_inputs()));
  }
  return TypeOfAttributes(node);
}

absl::Status CheckOnRoot(const NodeView& node, int num_inputs) {
  if (node.num_inputs() != num_inputs) {
    return ShapeError(node,
                      num_inputs == 1 ? "one input on the root"
                                      : absl::StrCat("one input for each of ", num_inputs,
                                                     " members on the root"),
                      node.num_inputs() == 0 ? "none" : absl::StrCat(node.num_inputs()));
  }
  if (node.attributes.empty()) return absl::OkStatus();
  return ShapeError(node, "no attributes on the root", "'dims' or 'dtype'");
}

}  // namespace chorus
