#include "core/ops/sum/sum.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"

namespace chorus {
namespace {

std::vector<bool> SummedAxes(absl::Span<const Attribute> attributes, size_t rank) {
  const std::vector<int64_t> axes = IntsAttribute(attributes, "axes");
  std::vector<bool> summed(rank, axes.empty());
  for (const int64_t axis : axes) summed[axis] = true;
  return summed;
}

TensorType SumType(const TensorType& input, const std::vector<bool>& summed, bool keep_dims) {
  TensorType type(input.dtype, {});
  for (size_t i = 0; i < summed.size(); ++i) {
    if (!summed[i]) {
      type.dims.push_back(input.dims[i]);
    } else if (keep_dims) {
      type.dims.emplace_back(1);
    }
  }
  return type;
}

absl::StatusOr<std::vector<TensorType>> InferSum(const NodeView& node) {
  const TensorType& input = node.input(0);
  const int64_t rank = static_cast<int64_t>(input.dims.size());
  const std::vector<int64_t> axes = IntsAttribute(node.attributes, "axes");
  for (size_t i = 0; i < axes.size(); ++i) {
    if (axes[i] < 0 || axes[i] >= rank || (i > 0 && axes[i] <= axes[i - 1])) {
      return ShapeError(
          node,
          absl::StrCat("ascending axes within the ", rank, " dimensions of ", input.ToString()),
          absl::StrCat("[", absl::StrJoin(axes, ","), "]"));
    }
  }
  const int64_t keep_dims = IntAttribute(node.attributes, "keep_dims");
  if (keep_dims != 0 && keep_dims != 1) {
    return ShapeError(node, "0 or 1 as 'keep_dims'", absl::StrCat(keep_dims));
  }
  return std::vector<TensorType>{
      SumType(input, SummedAxes(node.attributes, input.dims.size()), keep_dims == 1)};
}

absl::StatusOr<InputGradients> SumGradient(GradientContext& c) {
  const TensorType& input = c.input_type(0);
  const TensorType kept =
      SumType(input, SummedAxes(c.node().attributes, input.dims.size()), /*keep_dims=*/true);
  ValueIndex g = *c.grad(0);
  if (c.TypeOf(g) != kept) {
    CHORUS_ASSIGN_OR_RETURN(g, c.Emit("reshape", {g}, {{"dims", kept.sizes()}}));
  }
  if (kept != input) {
    CHORUS_ASSIGN_OR_RETURN(g, c.Emit("expand", {g}, {{"dims", input.sizes()}}));
  }
  return InputGradients{g};
}

absl::StatusOr<std::vector<TensorType>> InferExpand(const NodeView& node) {
  const TensorType& input = node.input(0);
  const std::vector<int64_t> dims = IntsAttribute(node.attributes, "dims");
  bool fits = dims.size() >= input.dims.size();
  for (size_t i = 0; fits && i < input.dims.size(); ++i) {
    const int64_t target = dims[dims.size() - input.dims.size() + i];
    fits = input.dims[i].size == target || input.dims[i].size == 1;
  }
  if (!fits) {
    return ShapeError(node,
                      absl::StrCat("dims that end with those of ", input.ToString(),
                                   ", where a 1 may become any number"),
                      absl::StrCat("[", absl::StrJoin(dims, ","), "]"));
  }
  TensorType type(input.dtype, {});
  for (const int64_t size : dims) type.dims.emplace_back(size);
  return std::vector<TensorType>{type};
}

absl::StatusOr<InputGradients> ExpandGradient(GradientContext& c) {
  const TensorType& input = c.input_type(0);
  const TensorType& output = c.output_type(0);
  const size_t added = output.dims.size() - input.dims.size();
  std::vector<int64_t> axes;
  for (size_t i = 0; i < output.dims.size(); ++i) {
    if (i < added || input.dims[i - added] != output.dims[i]) {
      axes.push_back(static_cast<int64_t>(i));
    }
  }
  ValueIndex g = *c.grad(0);
  // No axes would mean all of them.
  if (!axes.empty()) {
    CHORUS_ASSIGN_OR_RETURN(g, c.Emit("sum", {g}, {{"axes", axes}}));
  }
  if (c.TypeOf(g) != input) {
    CHORUS_ASSIGN_OR_RETURN(g, c.Emit("reshape", {g}, {{"dims", input.sizes()}}));
  }
  return InputGradients{g};
}

const OpDef* MakeSum() {
  auto* def = new OpDef;
  def->name = "sum";
  def->doc = "Sum over axes.";
  def->attributes = {
      {"axes", AttributeSpec::Kind::kInts, false, "ascending; absent or empty: all"},
      {"keep_dims", AttributeSpec::Kind::kInt, false, "1: summed dimensions stay, as 1"},
  };
  def->min_inputs = def->max_inputs = 1;
  def->dtypes = kNumberDTypes;
  def->infer_types = InferSum;
  def->gradient = SumGradient;
  return def;
}

const OpDef* MakeExpand() {
  auto* def = new OpDef;
  def->name = "expand";
  def->doc = "Repeats along dimensions of size 1 and new leading ones.";
  def->attributes = {{"dims", AttributeSpec::Kind::kInts, true, "the result's shape"}};
  def->min_inputs = def->max_inputs = 1;
  def->infer_types = InferExpand;
  def->gradient = ExpandGradient;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> SumOps() {
  static const auto* const ops = new std::vector<const OpDef*>{MakeExpand(), MakeSum()};
  return *ops;
}

}  // namespace chorus
