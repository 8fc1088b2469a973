#include "core/ops/index/index.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/checked_attributes.h"
#include "core/ops/indices.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;

absl::Status CheckIndices(const NodeView& node, int input) {
  if (Contains(kIndexDTypes, node.input(input).dtype)) return absl::OkStatus();
  return ShapeError(node, absl::StrCat("integers as input ", input), node.input(input).ToString());
}

// Attribute `axis`, from 0 on, with `dims` dimensions of input 0 from it on.
absl::StatusOr<size_t> CheckedAxis(const NodeView& node, size_t dims) {
  const int64_t axis = IntAttribute(node.attributes, "axis");
  const size_t rank = node.input(0).dims.size();
  if (axis < 0 || rank < dims || axis > static_cast<int64_t>(rank - dims)) {
    return ShapeError(node,
                      absl::StrCat("an axis with ", dims, " of the ", rank, " dimensions of ",
                                   node.input(0).ToString(), " from it on"),
                      absl::StrCat(axis));
  }
  return static_cast<size_t>(axis);
}

absl::StatusOr<int64_t> CheckedSize(const NodeView& node, absl::string_view name) {
  const int64_t size = IntAttribute(node.attributes, name);
  if (size >= 0 && size <= kMaxValueBytes) return size;
  return ShapeError(node, absl::StrCat("'", name, "' from 0 to ", kMaxValueBytes),
                    absl::StrCat(size));
}

Types InferOneHot(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckIndices(node, 0));
  CHORUS_ASSIGN_OR_RETURN(const int64_t depth, CheckedSize(node, "depth"));
  TensorType type = node.input(0);
  type.dtype = DTypeFromName(absl::get<std::string>(*FindAttribute(node.attributes, "dtype")));
  if (type.dtype == DType::kUnspecified) {
    return ShapeError(node, "the name of a dtype as 'dtype'", "another text");
  }
  type.dims.emplace_back(depth);
  return std::vector<TensorType>{type};
}

Types InferTake(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const size_t axis, CheckedAxis(node, 1));
  CHORUS_RETURN_IF_ERROR(CheckIndices(node, 1));
  TensorType type = node.input(0);
  const std::vector<Dim>& indices = node.input(1).dims;
  type.dims.erase(type.dims.begin() + axis);
  type.dims.insert(type.dims.begin() + axis, indices.begin(), indices.end());
  return std::vector<TensorType>{type};
}

Types InferScatterAdd(const NodeView& node) {
  const std::vector<Dim>& indices = node.input(1).dims;
  CHORUS_ASSIGN_OR_RETURN(const size_t axis, CheckedAxis(node, indices.size()));
  CHORUS_RETURN_IF_ERROR(CheckIndices(node, 1));
  CHORUS_ASSIGN_OR_RETURN(const int64_t size, CheckedSize(node, "size"));
  TensorType type = node.input(0);
  const auto begin = type.dims.begin() + axis;
  if (!std::equal(indices.begin(), indices.end(), begin)) {
    return ShapeError(node,
                      absl::StrCat("the dimensions of input 1, ", node.input(1).ToString(),
                                   ", from axis ", axis, " on"),
                      type.ToString());
  }
  type.dims.insert(type.dims.erase(begin, begin + indices.size()), Dim(size));
  return std::vector<TensorType>{type};
}

Types InferTakeAlong(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const size_t axis, CheckedAxis(node, 1));
  CHORUS_RETURN_IF_ERROR(CheckIndices(node, 1));
  TensorType type(node.input(0).dtype, node.input(1).dims);
  TensorType expected = node.input(0);
  if (type.dims.size() == expected.dims.size()) expected.dims[axis] = type.dims[axis];
  if (type != expected) {
    return ShapeError(node,
                      absl::StrCat("indices with the dimensions of ", node.input(0).ToString(),
                                   " but for axis ", axis),
                      node.input(1).ToString());
  }
  return std::vector<TensorType>{type};
}

Types InferScatterAddAlong(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const size_t axis, CheckedAxis(node, 1));
  CHORUS_RETURN_IF_ERROR(CheckIndices(node, 1));
  CHORUS_ASSIGN_OR_RETURN(const int64_t size, CheckedSize(node, "size"));
  TensorType type = node.input(0);
  if (node.input(1).dims != type.dims) {
    return ShapeError(node, absl::StrCat("an index for each element of ", type.ToString()),
                      node.input(1).ToString());
  }
  type.dims[axis] = Dim(size);
  return std::vector<TensorType>{type};
}

Types InferArg(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const size_t axis, CheckedAxis(node, 1));
  TensorType type = node.input(0);
  if (type.dims[axis].size == 0) {
    return ShapeError(node, absl::StrCat("at least one element along axis ", axis),
                      type.ToString());
  }
  CHORUS_ASSIGN_OR_RETURN(const bool keep_dims, CheckedFlag(node, "keep_dims"));
  type.dtype = DType::kI64;
  if (keep_dims) {
    type.dims[axis] = Dim(1);
  } else {
    type.dims.erase(type.dims.begin() + axis);
  }
  return std::vector<TensorType>{type};
}

// Of input 0; `op` is linear in it.
Gradients Linear(GradientContext* c, absl::string_view op, Attributes attributes) {
  InputGradients result(2);
  if (c->needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(result[0],
                            c->Emit(op, {*c->grad(0), c->input(1)}, std::move(attributes)));
  }
  return result;
}

int64_t AxisOf(const GradientContext& c) { return IntAttribute(c.node().attributes, "axis"); }

Attributes ScatterAttributes(const GradientContext& c) {
  return {{"axis", AxisOf(c)}, {"size", c.input_type(0).dims[AxisOf(c)].size}};
}

Gradients TakeGradient(GradientContext& c) {
  return Linear(&c, "scatter_add", ScatterAttributes(c));
}
Gradients TakeAlongGradient(GradientContext& c) {
  return Linear(&c, "scatter_add_along", ScatterAttributes(c));
}
Gradients ScatterAddGradient(GradientContext& c) {
  return Linear(&c, "take", {{"axis", AxisOf(c)}});
}
Gradients ScatterAddAlongGradient(GradientContext& c) {
  return Linear(&c, "take_along", {{"axis", AxisOf(c)}});
}

Saved SaveIndices(const NodeSpec&, int, int num_outputs) { return {1, num_outputs}; }

constexpr AttributeSpec kAxis = {"axis", AttributeSpec::Kind::kInt, true, "a dimension's number"};
constexpr AttributeSpec kSize = {"size", AttributeSpec::Kind::kInt, true,
                                 "the result's size along the axis"};

OpDef* Make(absl::string_view name, int inputs, absl::string_view doc,
            std::vector<AttributeSpec> attributes, decltype(OpDef::infer_types) infer) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->attributes = std::move(attributes);
  def->min_inputs = def->max_inputs = inputs;
  def->infer_types = infer;
  return def;
}

const OpDef* MakeLinear(absl::string_view name, absl::string_view doc,
                        std::vector<AttributeSpec> attributes, DTypes dtypes,
                        decltype(OpDef::infer_types) infer, decltype(OpDef::gradient) gradient) {
  OpDef* const def = Make(name, 2, doc, std::move(attributes), infer);
  def->dtypes = dtypes;
  def->fallible = kIndexDTypes;
  def->gradient = gradient;
  def->gradient_saves = SaveIndices;
  return def;
}

const OpDef* MakeOneHot() {
  OpDef* const def =
      Make("one_hot", 1, "1 at each index, else 0.",
           {{"depth", AttributeSpec::Kind::kInt, true, "the result's last dimension"},
            {"dtype", AttributeSpec::Kind::kString, true, "the result's dtype"},
            {"ignore_index", AttributeSpec::Kind::kInt, false, "an index that gives zeros"}},
           InferOneHot);
  def->fallible = kIndexDTypes;
  return def;
}

const OpDef* MakeArg(absl::string_view name, absl::string_view doc) {
  return Make(name, 1, doc,
              {kAxis, {"keep_dims", AttributeSpec::Kind::kInt, false, "1: the axis stays, as 1"}},
              InferArg);
}

}  // namespace

absl::Span<const OpDef* const> IndexOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      MakeArg("arg_max", "The first index of the largest element along an axis."),
      MakeArg("arg_min", "The first index of the smallest element along an axis."),
      MakeOneHot(),
      MakeLinear("scatter_add", "Slices added up where indices say.", {kAxis, kSize}, kNumberDTypes,
                 InferScatterAdd, ScatterAddGradient),
      MakeLinear("scatter_add_along", "Elements added up where indices along an axis say.",
                 {kAxis, kSize}, kNumberDTypes, InferScatterAddAlong, ScatterAddAlongGradient),
      MakeLinear("take", "Slices by index.", {kAxis}, kSupportedDTypes, InferTake, TakeGradient),
      MakeLinear("take_along", "Elements by index along an axis.", {kAxis}, kSupportedDTypes,
                 InferTakeAlong, TakeAlongGradient),
  };
  return *ops;
}

}  // namespace chorus
