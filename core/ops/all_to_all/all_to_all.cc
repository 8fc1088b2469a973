#include "core/ops/all_to_all/all_to_all.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/pieces.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;

Types InferAllToAll(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckInputPieces(node));
  const Collective& c = *node.collective;
  if (!c.counts.empty()) {
    CHORUS_RETURN_IF_ERROR(CheckRows(node, c.rank.value(), c.counts[c.rank.value()]));
    return PiecesOf(node.input(0), c.counts);
  }
  for (int i = 1; i < node.num_inputs(); ++i) {
    if (node.input(i) != node.input(0)) {
      return ShapeError(node,
                        absl::StrCat("counts, or inputs of one type, ", node.input(0).ToString()),
                        absl::StrCat(node.input(i).ToString(), " as input ", i));
    }
  }
  return std::vector<TensorType>(node.group_size, node.input(0));
}

Types InferAllToAllSingle(const NodeView& node) {
  const Collective& c = *node.collective;
  const auto size = static_cast<size_t>(node.group_size);
  const auto counts = absl::MakeConstSpan(c.counts);
  const auto sent = counts.subspan(0, c.counts.empty() ? 0 : size);
  const auto received = counts.subspan(sent.size());
  CHORUS_ASSIGN_OR_RETURN(const int64_t own_rows, RowsOfPiece(node, sent, c.rank.value()));
  if (counts.empty()) return std::vector<TensorType>{node.input(0)};
  if (received[c.rank.value()] != own_rows) {
    return ShapeError(
        node,
        absl::StrCat(own_rows, " rows from rank ", c.rank.value(), ", which it sends to itself"),
        absl::StrCat(received[c.rank.value()]));
  }
  int64_t rows = 0;
  for (const int64_t n : received) rows += n;
  return std::vector<TensorType>{WithRows(node.input(0), rows)};
}

Gradients AllToAllGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> grads, VisibleGradients(&c));
  // By the forward counts, not by those of this rank alone: equal inputs may have uneven outputs.
  std::vector<int64_t> counts;
  if (!c.collective().counts.empty()) counts = RowsOfInputs(c);
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result,
                          c.EmitGradientCollective("all_to_all", grads, {}, std::move(counts)));
  return InputGradients(result.begin(), result.end());
}

Gradients AllToAllSingleGradient(GradientContext& c) {
  if (HasRuntimeCounts(c.collective())) {
    InputGradients gradients(c.num_inputs());
    CHORUS_ASSIGN_OR_RETURN(gradients[0], c.EmitRuntimeGradient("all_to_all_single"));
    return gradients;
  }
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
  const std::vector<int64_t>& forward = c.collective().counts;
  const auto half = forward.begin() + static_cast<std::ptrdiff_t>(forward.size() / 2);
  std::vector<int64_t> counts(half, forward.end());
  counts.insert(counts.end(), forward.begin(), half);
  CHORUS_ASSIGN_OR_RETURN(
      const std::vector<ValueIndex> result,
      c.EmitGradientCollective("all_to_all_single", {g}, {}, std::move(counts)));
  return InputGradients{result[0]};
}

OpDef* Make(absl::string_view name, absl::string_view doc) {
  auto* def = new OpDef;
  def->name = name;
  def->effect = Effect::kCollective;
  def->kind = CollectiveKind::kAllToAll;
  def->doc = doc;
  def->min_inputs = def->max_inputs = 1;
  def->input_use = InputUse::kCopySource;
  return def;
}

const OpDef* MakeAllToAll() {
  OpDef* def = Make("all_to_all", "Input k goes to member k; output k comes from member k.");
  def->max_inputs = -1;
  def->infer_types = InferAllToAll;
  def->gradient = AllToAllGradient;
  def->alias = OutputAlias::kMember;
  def->counts_per_member = 1;
  return def;
}

const OpDef* MakeAllToAllSingle() {
  OpDef* def = Make("all_to_all_single",
                    "Part k of the input goes to member k, part k of the output comes "
                    "from member k.");
  def->infer_types = InferAllToAllSingle;
  def->gradient = AllToAllSingleGradient;
  def->gradient_saves = SaveForCollective;
  def->one_input = true;
  def->one_output = true;
  def->counts_per_member = 2;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> AllToAllOps() {
  static const auto* const ops =
      new std::vector<const OpDef*>{MakeAllToAll(), MakeAllToAllSingle()};
  return *ops;
}

}  // namespace chorus
