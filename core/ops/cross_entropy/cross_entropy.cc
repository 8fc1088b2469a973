#include "core/ops/cross_entropy/cross_entropy.h"

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

// Over the classes.
absl::StatusOr<ValueIndex> SumOfProducts(GradientContext* c, ValueIndex a, ValueIndex b,
                                         bool keep_dims) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex product, c->Emit("mul", {a, b}));
  Attributes attributes = {
      {"axes", std::vector<int64_t>{static_cast<int64_t>(c->input_type(1).dims.size())}}};
  if (keep_dims) attributes.push_back({"keep_dims", int64_t{1}});
  return c->Emit("sum", {product}, std::move(attributes));
}

Gradients CrossEntropyGradGradient(GradientContext& c) {
  const TensorType& logits = c.input_type(0);
  const ValueIndex h = *c.grad(0);
  InputGradients result(3);
  if (!c.needs(0) && !c.needs(2)) return result;
  // p - one_hot, without what ignored rows hold.
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex ones, c.EmitFill(c.input_type(2), 1));
  CHORUS_ASSIGN_OR_RETURN(
      const ValueIndex q,
      c.Emit("cross_entropy_grad", {c.input(0), c.input(1), ones}, c.node().attributes));
  if (c.needs(2)) {
    CHORUS_ASSIGN_OR_RETURN(result[2], SumOfProducts(&c, h, q, /*keep_dims=*/false));
  }
  if (!c.needs(0)) return result;

  const absl::string_view dtype = DTypeName(logits.dtype);
  Attributes attributes = {{"depth", logits.dims.back().size},
                           {"dtype", std::string(dtype.data(), dtype.size())}};
  attributes.insert(attributes.end(), c.node().attributes.begin(), c.node().attributes.end());
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex one_hot,
                          c.Emit("one_hot", {c.input(1)}, std::move(attributes)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex p, c.Emit("add", {q, one_hot}));

  std::vector<int64_t> column = c.input_type(2).sizes();
  column.push_back(1);
  const Attributes dims = {{"dims", logits.sizes()}};
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("reshape", {c.input(2)}, {{"dims", column}}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex wide, c.Emit("expand", {g}, dims));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex u, c.Emit("mul", {wide, h}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, SumOfProducts(&c, u, p, /*keep_dims=*/true));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex mean, c.Emit("expand", {sum}, dims));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex difference, c.Emit("sub", {u, mean}));
  CHORUS_ASSIGN_OR_RETURN(result[0], c.Emit("mul", {p, difference}));
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
