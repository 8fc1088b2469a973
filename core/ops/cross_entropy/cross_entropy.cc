#include "core/ops/cross_entropy/cross_entropy.h"

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/indices.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;

// The type of the losses.
absl::StatusOr<TensorType> LossType(const NodeView& node) {
  const TensorType& logits = node.input(0);
  const TensorType& labels = node.input(1);
  if (!IsFloating(logits.dtype) || logits.dims.empty()) {
    return ShapeError(node, "scores in floating point, of at least one dimension, as input 0",
                      logits.ToString());
  }
  TensorType losses = logits;
  losses.dims.pop_back();
  if (!Contains(kIndexDTypes, labels.dtype) || labels.dims != losses.dims) {
    return ShapeError(
        node, absl::StrCat("an integer label for each row of ", logits.ToString(), " as input 1"),
        labels.ToString());
  }
  return losses;
}

Types InferCrossEntropy(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(TensorType losses, LossType(node));
  return std::vector<TensorType>{std::move(losses)};
}

Types InferCrossEntropyGrad(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const TensorType losses, LossType(node));
  if (node.input(2) != losses) {
    return ShapeError(node, absl::StrCat(losses.ToString(), " as input 2"),
                      node.input(2).ToString());
  }
  return std::vector<TensorType>{node.input(0)};
}

Gradients CrossEntropyGradient(GradientContext& c) {
  InputGradients result(2);
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(
        result[0],
        c.Emit("cross_entropy_grad", {c.input(0), c.input(1), *c.grad(0)}, c.node().attributes));
  }
  return result;
}

// A number for each row as often as there are classes.
absl::StatusOr<ValueIndex> ForEachClass(GradientContext* c, ValueIndex rows) {
  std::vector<int64_t> column = c->TypeOf(rows).sizes();
  column.push_back(1);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex reshaped,
                          c->Emit("reshape", {rows}, {{"dims", std::move(column)}}));
  return c->Emit("expand", {reshaped}, {{"dims", c->input_type(0).sizes()}});
}

absl::StatusOr<ValueIndex> SumOverClasses(GradientContext* c, ValueIndex x) {
  const auto classes = static_cast<int64_t>(c->input_type(1).dims.size());
  return c->Emit("sum", {x}, {{"axes", std::vector<int64_t>{classes}}});
}

// Zeros in place of what stands in ignored rows. They are the rows of zeros of one_hot, which knows
// which labels are ignored whatever dtype they are of.
absl::Status ClearIgnored(GradientContext* c, std::initializer_list<ValueIndex*> values) {
  if (FindAttribute(c->node().attributes, "ignore_index") == nullptr) return absl::OkStatus();
  const TensorType& logits = c->TypeOf(**values.begin());
  const absl::string_view dtype = DTypeName(logits.dtype);
  Attributes attributes = {{"depth", logits.dims.back().size},
                           {"dtype", std::string(dtype.data(), dtype.size())}};
  attributes.insert(attributes.end(), c->node().attributes.begin(), c->node().attributes.end());
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex one_hot,
                          c->Emit("one_hot", {c->input(1)}, std::move(attributes)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex count, SumOverClasses(c, one_hot));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex zero, c->EmitFill(TensorType(logits.dtype, {}), 0));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex rows, c->Emit("eq", {count, zero}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex ignored, ForEachClass(c, rows));
  for (ValueIndex* value : values) {
    CHORUS_ASSIGN_OR_RETURN(*value, c->Emit("where", {ignored, zero, *value}));
  }
  return absl::OkStatus();
}

Gradients CrossEntropyGradGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex h, c.EmitWide(*c.grad(0)));
  CHORUS_ASSIGN_OR_RETURN(ValueIndex logits, c.EmitWide(c.input(0)));
  const DType dtype = c.input_type(0).dtype;
  InputGradients result(3);
  if (c.needs(2)) {
    CHORUS_ASSIGN_OR_RETURN(
        const ValueIndex ones,
        c.EmitFill(TensorType(c.TypeOf(logits).dtype, c.input_type(2).dims), 1));
    CHORUS_ASSIGN_OR_RETURN(
        const ValueIndex q,
        c.Emit("cross_entropy_grad", {logits, c.input(1), ones}, c.node().attributes));
    ValueIndex counted = h;
    CHORUS_RETURN_IF_ERROR(ClearIgnored(&c, {&counted}));  // q has zeros there
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex product, c.Emit("mul", {counted, q}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, SumOverClasses(&c, product));
    CHORUS_ASSIGN_OR_RETURN(result[2], c.EmitCast(sum, dtype));
  }
  if (!c.needs(0)) return result;
  const Attributes classes = {{"axis", static_cast<int64_t>(c.input_type(1).dims.size())}};
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_rows, c.EmitWide(c.input(2)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, ForEachClass(&c, of_rows));
  CHORUS_ASSIGN_OR_RETURN(ValueIndex u, c.Emit("mul", {g, h}));
  CHORUS_RETURN_IF_ERROR(ClearIgnored(&c, {&logits, &u}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex p, c.Emit("softmax", {logits}, classes));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_logits, c.Emit("softmax_grad", {p, u}, classes));
  CHORUS_ASSIGN_OR_RETURN(result[0], c.EmitCast(of_logits, dtype));
  return result;
}

const OpDef* Make(absl::string_view name, int inputs, absl::string_view doc,
                  decltype(OpDef::infer_types) infer, decltype(OpDef::gradient) gradient) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->attributes = {
      {"ignore_index", AttributeSpec::Kind::kInt, false, "a label of rows that do not count"}};
  def->min_inputs = def->max_inputs = inputs;
  def->dtypes = kNumberDTypes;
  def->fallible = kIndexDTypes;
  def->infer_types = infer;
  def->gradient = gradient;
  def->gradient_saves = SaveInputs;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> CrossEntropyOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      Make("cross_entropy", 2, "-log_softmax(logits)[label] of each row.", InferCrossEntropy,
           CrossEntropyGradient),
      Make("cross_entropy_grad", 3, "g (softmax(logits) - one_hot(labels)) of each row.",
           InferCrossEntropyGrad, CrossEntropyGradGradient),
  };
  return *ops;
}

}  // namespace chorus
