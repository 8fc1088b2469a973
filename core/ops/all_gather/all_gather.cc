#include "core/ops/all_gather/all_gather.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/pieces.h"
#include "core/ops/reduction/reduction.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;
using Emitted = absl::StatusOr<std::vector<ValueIndex>>;

Types InferAllGather(const NodeView& node) {
  const Collective& c = *node.collective;
  if (c.counts.empty()) return std::vector<TensorType>(node.group_size, node.input(0));
  CHORUS_RETURN_IF_ERROR(CheckRows(node, 0, c.counts[c.rank.value()]));
  return PiecesOf(node.input(0), c.counts);
}

Types InferAllGatherIntoTensor(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(TensorType type, PiecesInOneTensor(node));
  return std::vector<TensorType>{std::move(type)};
}

Gradients AllGatherGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> grads, VisibleGradients(&c));
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> result,
                          c.EmitGradientCollective("reduce_scatter", grads));
  return InputGradients{result[0]};
}

Gradients AllGatherIntoTensorGradient(GradientContext& c) {
  if (HasRuntimeCounts(c.collective())) {
    InputGradients gradients(c.num_inputs());
    CHORUS_ASSIGN_OR_RETURN(gradients[0], c.EmitRuntimeGradient("reduce_scatter_tensor"));
    return gradients;
  }
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
  CHORUS_ASSIGN_OR_RETURN(
      const std::vector<ValueIndex> result,
      c.EmitGradientCollective("reduce_scatter_tensor", {g}, {}, c.collective().counts));
  return InputGradients{result[0]};
}

Types InferReduceScatter(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckInputPieces(node));
  return std::vector<TensorType>{node.input(node.collective->rank.value())};
}

Types InferReduceScatterTensor(const NodeView& node) {
  const Collective& c = *node.collective;
  CHORUS_ASSIGN_OR_RETURN(const int64_t rows, RowsOfPiece(node, c.counts, c.rank.value()));
  return std::vector<TensorType>{WithRows(node.input(0), rows)};
}

// Each member's gradient of what it put into this rank's result goes back to it.
Emitted ProductGradients(GradientContext& c, std::vector<int64_t> counts) {
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> factors, FactorGradients(&c));
  return c.EmitGradientCollective("all_to_all", factors, {}, std::move(counts));
}

// The same where the rows of the pieces have come at run time: as many from each member.
Emitted RuntimeProductGradients(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> factors, FactorGradients(&c));
  const int64_t members = c.group_size();
  const ValueIndex rows = c.output(1);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex all, c.Emit("concat", factors, {{"axis", int64_t{0}}}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex pieces,
                          c.Emit("pack_rows", {all, rows}, {{"parts", members}}));
  CHORUS_ASSIGN_OR_RETURN(
      const ValueIndex sends,
      c.Emit("concat", std::vector<ValueIndex>(c.group_size(), rows), {{"axis", int64_t{0}}}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex whole,
                          c.EmitRuntimeGradient("all_to_all_single", pieces, sends));
  return std::vector<ValueIndex>{whole};
}

Gradients ReduceScatterGradient(GradientContext& c) {
  std::vector<ValueIndex> grads;
  if (c.collective().reduction == Reduction::kProduct) {
    CHORUS_ASSIGN_OR_RETURN(grads, ProductGradients(c, CountsOfInputs(c)));
  } else {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
    CHORUS_ASSIGN_OR_RETURN(grads,
                            c.EmitGradientCollective("all_gather", {g}, {}, CountsOfInputs(c)));
  }
  return GradientsFromSum(&c, grads);
}

Gradients ReduceScatterTensorGradient(GradientContext& c) {
  const std::vector<int64_t>& counts = c.collective().counts;
  const bool product = c.collective().reduction == Reduction::kProduct;
  std::vector<ValueIndex> grads;
  if (HasRuntimeCounts(c.collective()) && product) {
    CHORUS_ASSIGN_OR_RETURN(grads, RuntimeProductGradients(c));
  } else if (HasRuntimeCounts(c.collective())) {
    CHORUS_ASSIGN_OR_RETURN(const auto whole, c.EmitRuntimeGradient("all_gather_into_tensor"));
    grads = {*whole};
  } else if (product) {
    CHORUS_ASSIGN_OR_RETURN(grads, ProductGradients(c, counts));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex whole,
                            c.Emit("concat", grads, {{"axis", int64_t{0}}}));
    grads = {whole};
  } else {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.GradOrZeros(0));
    CHORUS_ASSIGN_OR_RETURN(grads,
                            c.EmitGradientCollective("all_gather_into_tensor", {g}, {}, counts));
  }
  return GradientsFromSum(&c, grads);
}

OpDef* MakeGather(absl::string_view name, absl::string_view doc) {
  auto* def = new OpDef;
  def->name = name;
  def->effect = Effect::kCollective;
  def->kind = CollectiveKind::kAllGather;
  def->doc = doc;
  def->min_inputs = def->max_inputs = 1;
  def->input_use = InputUse::kCopySource;
  def->counts_per_member = 1;
  return def;
}

const OpDef* MakeAllGather() {
  OpDef* def = MakeGather("all_gather", "Every member's input, as a list, on every member.");
  def->infer_types = InferAllGather;
  def->gradient = AllGatherGradient;
  def->alias = OutputAlias::kMember;
  return def;
}

const OpDef* MakeAllGatherIntoTensor() {
  OpDef* def = MakeGather("all_gather_into_tensor",
                          "Every member's input, one after the other, on every member.");
  def->infer_types = InferAllGatherIntoTensor;
  def->gradient = AllGatherIntoTensorGradient;
  def->gradient_saves = SaveForCollective;
  def->one_output = true;
  return def;
}

OpDef* MakeScatter(absl::string_view name, absl::string_view doc) {
  auto* def = new OpDef;
  def->name = name;
  def->effect = Effect::kCollective;
  def->kind = CollectiveKind::kReduceScatter;
  def->doc = doc;
  def->min_inputs = def->max_inputs = 1;
  def->gradient_saves = SaveForCollective;
  def->input_use = InputUse::kReductionOperand;
  return def;
}

const OpDef* MakeReduceScatter() {
  OpDef* def =
      MakeScatter("reduce_scatter", "Member r gets the reduction of all members' input r.");
  def->max_inputs = -1;
  def->infer_types = InferReduceScatter;
  def->gradient = ReduceScatterGradient;
  return def;
}

const OpDef* MakeReduceScatterTensor() {
  OpDef* def = MakeScatter("reduce_scatter_tensor",
                           "Member r gets the reduction of part r of all members' inputs.");
  def->infer_types = InferReduceScatterTensor;
  def->gradient = ReduceScatterTensorGradient;
  def->one_input = true;
  def->counts_per_member = 1;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> AllGatherOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      MakeAllGather(), MakeAllGatherIntoTensor(), MakeReduceScatter(), MakeReduceScatterTensor()};
  return *ops;
}

}  // namespace chorus
