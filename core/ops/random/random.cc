#include "core/ops/random/random.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;

Types Infer(const NodeView& node, bool floating) {
  const TensorType number(DType::kI64, {});
  for (int i = 0; i < 2; ++i) {
    if (node.input(i) == number) continue;
    return ShapeError(
        node,
        absl::StrCat(number.ToString(), " as ", i == 0 ? "the seed" : "the offset", ", input ", i),
        node.input(i).ToString());
  }
  CHORUS_ASSIGN_OR_RETURN(TensorType type, TypeOfAttributes(node));
  if (IsFloating(type.dtype) != floating || type.dtype == DType::kBool) {
    return ShapeError(node, floating ? "a floating-point 'dtype'" : "an integer 'dtype'",
                      DTypeName(type.dtype));
  }
  return std::vector<TensorType>{std::move(type)};
}

Types InferBits(const NodeView& node) { return Infer(node, /*floating=*/false); }
Types InferReal(const NodeView& node) { return Infer(node, /*floating=*/true); }

absl::StatusOr<InputGradients> NoGradient(GradientContext& c) {
  return InputGradients(c.num_inputs());
}

const OpDef* Make(absl::string_view name, absl::string_view doc,
                  decltype(OpDef::infer_types) infer) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->effect = Effect::kRandom;
  def->attributes = {{"dims", AttributeSpec::Kind::kInts, true, "the shape"},
                     {"dtype", AttributeSpec::Kind::kString, true, "the dtype's name"}};
  def->min_inputs = def->max_inputs = 2;
  def->infer_types = infer;
  def->gradient = NoGradient;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> RandomOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      Make("random_bits", "Integers of which every bit is random.", InferBits),
      Make("random_normal", "Normally distributed, mean 0 and variance 1.", InferReal),
      Make("random_uniform", "Evenly distributed from 0 to, not including, 1.", InferReal),
  };
  return *ops;
}

}  // namespace chorus
