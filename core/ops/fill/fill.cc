#include "core/ops/fill/fill.h"

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

// The integers of an integer dtype.
struct Range {
  int64_t least;
  int64_t most;
};
template <typename T>
constexpr Range RangeOf() {
  return {std::numeric_limits<T>::min(), std::numeric_limits<T>::max()};
}
Range RangeOf(DType dtype) {
  switch (dtype) {
    case DType::kI8:
      return RangeOf<int8_t>();
    case DType::kU8:
      return RangeOf<uint8_t>();
    case DType::kI16:
      return RangeOf<int16_t>();
    case DType::kI32:
      return RangeOf<int32_t>();
    case DType::kBool:
      return {0, 1};
    default:
      return RangeOf<int64_t>();
  }
}

absl::StatusOr<std::vector<TensorType>> InferFill(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(TensorType type, TypeOfAttributes(node));
  const bool is_double = absl::holds_alternative<double>(*FindAttribute(node.attributes, "value"));
  if (is_double != IsFloating(type.dtype)) {
    return ShapeError(node, is_double ? "an integer as 'value'" : "a double as 'value'",
                      is_double ? "a double" : "an integer");
  }
  if (!is_double) {
    const int64_t value = absl::get<int64_t>(*FindAttribute(node.attributes, "value"));
    const Range range = RangeOf(type.dtype);
    if (value < range.least || value > range.most) {
      return ShapeError(node,
                        absl::StrCat("from ", range.least, " to ", range.most, " as 'value' of ",
                                     DTypeName(type.dtype)),
                        absl::StrCat(value));
    }
  }
  return std::vector<TensorType>{type};
}

absl::StatusOr<InputGradients> FillGradient(GradientContext&) { return InputGradients(); }

}  // namespace

absl::Span<const OpDef* const> FillOps() {
  static const auto* const ops = [] {
    auto* def = new OpDef;
    def->name = "fill";
    def->doc = "A tensor of one value.";
    def->attributes = {{"dims", AttributeSpec::Kind::kInts, true, "the shape"},
                       {"dtype", AttributeSpec::Kind::kString, true, "the dtype's name"},
                       {"value", AttributeSpec::Kind::kNumber, true, "every element"}};
    def->infer_types = InferFill;
    def->gradient = FillGradient;
    return new std::vector<const OpDef*>{def};
  }();
  return *ops;
}

}  // namespace chorus
