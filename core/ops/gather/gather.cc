#include "core/ops/gather/gather.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/pieces.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;

Types InferGather(const NodeView& node) {
  const Collective& c = *node.collective;
  if (!c.counts.empty()) CHORUS_RETURN_IF_ERROR(CheckRows(node, 0, c.counts[c.rank.value()]));
  if (!IsRoot(node)) return std::vector<TensorType>();
  if (c.counts.empty()) return std::vector<TensorType>(node.group_size, node.input(0));
  return PiecesOf(node.input(0), c.counts);
}

Types InferGatherIntoTensor(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(TensorType type, PiecesInOneTensor(node));
  if (!IsRoot(node)) return std::vector<TensorType>();
  return std::vector<TensorType>{std::move(type)};
}

Types InferScatter(const NodeView& node) {
  if (!IsRoot(node)) {
    CHORUS_ASSIGN_OR_RETURN(TensorType type, TypeOffRoot(node));
    return std::vector<TensorType>{std::move(type)};
  }
  CHORUS_RETURN_IF_ERROR(CheckOnRoot(node, node.group_size));
  CHORUS_RETURN_IF_ERROR(CheckInputPieces(node));
  return std::vector<TensorType>{node.input(node.collective->rank.value())};
}

Types InferScatterTensor(const NodeView& node) {
  const Collective& c = *node.collective;
  if (!IsRoot(node)) {
    if (!c.counts.empty()) {
      return ShapeError(node, "no counts off the root, where the attributes tell",
                        absl::StrCat(c.counts.size()));
    }
    CHORUS_ASSIGN_OR_RETURN(TensorType type, TypeOffRoot(node));
    return std::vector<TensorType>{std::move(type)};
  }
  CHORUS_RETURN_IF_ERROR(CheckOnRoot(node, 1));
  CHORUS_ASSIGN_OR_RETURN(const int64_t rows, RowsOfPiece(node, c.counts, c.rank.value()));
  return std::vector<TensorType>{WithRows(node.input(0), rows)};
}

// Both forms: what the root has of gradients, to everybody.
Gradients ScatterBack(GradientContext& c, absl::string_view op, std::vector<int64_t> counts) {
  std::vector<ValueIndex> grads;
  Attributes attributes;
  if (c.is_root()) {
    CHORUS_ASSIGN_OR_RETURN(grads, VisibleGradients(&c));
  } else {
    attributes = TypeAttributes(c.input_type(0));
    counts.clear();
  }
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result,
                          c.EmitGradientCollective(op, grads, attributes, std::move(counts)));
  return InputGradients{result[0]};
}

Gradients GatherGradient(GradientContext& c) { return ScatterBack(c, "scatter", {}); }

// Both ways, with counts at run time.
Gradients RuntimeBack(GradientContext& c, absl::string_view op) {
  InputGradients gradients(c.num_inputs());
  CHORUS_ASSIGN_OR_RETURN(const auto g, c.EmitRuntimeGradient(op));
  if (g.has_value()) gradients[0] = g;
  return gradients;
}

Gradients GatherIntoTensorGradient(GradientContext& c) {
  if (HasRuntimeCounts(c.collective())) return RuntimeBack(c, "scatter_tensor");
  return ScatterBack(c, "scatter_tensor", c.collective().counts);
}

Gradients GatherBack(GradientContext& c, absl::string_view op, std::vector<int64_t> counts) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result,
                          c.EmitGradientCollective(op, {g}, {}, std::move(counts)));
  return InputGradients(result.begin(), result.end());
}

Gradients ScatterGradient(GradientContext& c) { return GatherBack(c, "gather", CountsOfInputs(c)); }

Gradients ScatterTensorGradient(GradientContext& c) {
  if (HasRuntimeCounts(c.collective())) return RuntimeBack(c, "gather_into_tensor");
  return GatherBack(c, "gather_into_tensor", c.collective().counts);
}

OpDef* Make(absl::string_view name, CollectiveKind kind, absl::string_view doc) {
  auto* def = new OpDef;
  def->name = name;
  def->effect = Effect::kCollective;
  def->kind = kind;
  def->doc = doc;
  def->max_inputs = 1;
  def->input_use = InputUse::kCopySource;
  return def;
}

OpDef* MakeGather(absl::string_view name, absl::string_view doc) {
  OpDef* def = Make(name, CollectiveKind::kGather, doc);
  def->min_inputs = 1;
  def->counts_per_member = 1;
  return def;
}

const OpDef* MakeGatherList() {
  OpDef* def = MakeGather("gather", "Every member's input, as a list, on the root alone.");
  def->infer_types = InferGather;
  def->gradient = GatherGradient;
  def->alias = OutputAlias::kMember;
  return def;
}

const OpDef* MakeGatherIntoTensor() {
  OpDef* def = MakeGather("gather_into_tensor",
                          "Every member's input, one after the other, on the root alone.");
  def->infer_types = InferGatherIntoTensor;
  def->gradient = GatherIntoTensorGradient;
  def->gradient_saves = SaveForCollective;
  def->one_output = true;
  return def;
}

OpDef* MakeScatter(absl::string_view name, absl::string_view doc) {
  OpDef* def = Make(name, CollectiveKind::kScatter, doc);
  def->attributes = {
      {"dims", AttributeSpec::Kind::kInts, false, "off the root: the shape of what comes"},
      {"dtype", AttributeSpec::Kind::kString, false, "off the root: the dtype of what comes"}};
  return def;
}

const OpDef* MakeScatterList() {
  OpDef* def = MakeScatter("scatter", "Member r gets the root's input r.");
  def->max_inputs = -1;
  def->infer_types = InferScatter;
  def->gradient = ScatterGradient;
  def->alias = OutputAlias::kMember;
  return def;
}

const OpDef* MakeScatterTensor() {
  OpDef* def = MakeScatter("scatter_tensor", "Member r gets part r of the root's input.");
  def->infer_types = InferScatterTensor;
  def->gradient = ScatterTensorGradient;
  def->gradient_saves = SaveForCollective;
  def->one_input = true;
  def->alias = OutputAlias::kMember;
  def->counts_per_member = 1;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> GatherOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      MakeGatherList(), MakeGatherIntoTensor(), MakeScatterList(), MakeScatterTensor()};
  return *ops;
}

}  // namespace chorus
