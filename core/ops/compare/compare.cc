#include "core/ops/compare/compare.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;

Types InferCompare(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(TensorType type, StretchedType(node));
  type.dtype = DType::kBool;
  return std::vector<TensorType>{std::move(type)};
}

Types InferWhere(const NodeView& node) {
  const TensorType& condition = node.input(0);
  CHORUS_ASSIGN_OR_RETURN(TensorType type, StretchedType(node, 1));
  if (type.dims.empty()) type.dims = condition.dims;
  if (condition.dtype != DType::kBool || (!condition.dims.empty() && condition.dims != type.dims)) {
    const TensorType expected(DType::kBool, type.dims);
    return ShapeError(
        node,
        absl::StrCat(expected.ToString(), type.dims.empty() ? "" : " or bool[]", " as input 0"),
        condition.ToString());
  }
  return std::vector<TensorType>{std::move(type)};
}

Types InferCast(const NodeView& node) {
  TensorType type = node.input(0);
  type.dtype = DTypeFromName(absl::get<std::string>(*FindAttribute(node.attributes, "dtype")));
  if (type.dtype == DType::kUnspecified) {
    return ShapeError(node, "the name of a dtype as 'dtype'", "another text");
  }
  return std::vector<TensorType>{std::move(type)};
}

Gradients NoGradient(GradientContext& c) { return InputGradients(c.num_inputs()); }

Gradients WhereGradient(GradientContext& c) {
  InputGradients result(3);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex zero,
                          c.EmitFill(TensorType(c.output_type(0).dtype, {}), 0));
  const ValueIndex g = *c.grad(0);
  for (int i = 1; i < 3; ++i) {
    if (!c.needs(i)) continue;
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex gradient,
                            c.Emit("where", {c.input(0), i == 1 ? g : zero, i == 1 ? zero : g}));
    CHORUS_ASSIGN_OR_RETURN(result[i], c.SumToInput(gradient, i));
  }
  return result;
}

Gradients CastGradient(GradientContext& c) {
  const DType from = c.input_type(0).dtype;
  if (!IsFloating(from) || !IsFloating(c.output_type(0).dtype)) return NoGradient(c);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.EmitCast(*c.grad(0), from));
  return InputGradients{g};
}

OpDef* Make(absl::string_view name, int inputs, absl::string_view doc,
            decltype(OpDef::infer_types) infer, decltype(OpDef::gradient) gradient) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->min_inputs = def->max_inputs = inputs;
  def->infer_types = infer;
  def->gradient = gradient;
  def->elementwise = true;
  return def;
}

const OpDef* MakeLogical(absl::string_view name, int inputs, absl::string_view doc) {
  OpDef* const def = Make(name, inputs, doc, InferCompare, NoGradient);
  def->dtypes = OneDType(DType::kBool);
  return def;
}

const OpDef* MakeWhere() {
  OpDef* const def = Make("where", 3, "c ? a : b", InferWhere, WhereGradient);
  def->gradient_saves = SaveInputs;
  return def;
}

const OpDef* MakeCast() {
  OpDef* const def = Make("cast", 1, "The same numbers in another dtype.", InferCast, CastGradient);
  def->attributes = {{"dtype", AttributeSpec::Kind::kString, true, "the dtype's name"}};
  return def;
}

}  // namespace

absl::Span<const OpDef* const> CompareOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      MakeCast(),
      Make("eq", 2, "a == b", InferCompare, NoGradient),
      Make("ge", 2, "a >= b", InferCompare, NoGradient),
      Make("gt", 2, "a > b", InferCompare, NoGradient),
      Make("le", 2, "a <= b", InferCompare, NoGradient),
      MakeLogical("logical_and", 2, "a and b"),
      MakeLogical("logical_not", 1, "not a"),
      MakeLogical("logical_or", 2, "a or b"),
      MakeLogical("logical_xor", 2, "a or b, not both"),
      Make("lt", 2, "a < b", InferCompare, NoGradient),
      Make("ne", 2, "a != b", InferCompare, NoGradient),
      MakeWhere(),
  };
  return *ops;
}

}  // namespace chorus
