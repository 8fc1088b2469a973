#include "core/ops/sum/sum.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"
#include "core/ops/checked_attributes.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;

std::vector<bool> ReducedAxes(absl::Span<const Attribute> attributes, size_t rank) {
  const std::vector<int64_t> axes = IntsAttribute(attributes, "axes");
  std::vector<bool> summed(rank, axes.empty());
  for (const int64_t axis : axes) summed[axis] = true;
  return summed;
}

TensorType ReducedType(const TensorType& input, const std::vector<bool>& summed, bool keep_dims) {
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

Types InferReduction(const NodeView& node) {
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
  CHORUS_ASSIGN_OR_RETURN(const bool keep_dims, CheckedFlag(node, "keep_dims"));
  return std::vector<TensorType>{
      ReducedType(input, ReducedAxes(node.attributes, input.dims.size()), keep_dims)};
}

absl::Status CheckFloating(const NodeView& node) {
  if (IsFloating(node.input(0).dtype)) return absl::OkStatus();
  return ShapeError(node, "floating point", node.input(0).ToString());
}

Types InferMean(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckFloating(node));
  return InferReduction(node);
}

// Nothing has no largest element.
Types InferExtreme(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(std::vector<TensorType> types, InferReduction(node));
  if (types[0].num_elements() > 0 && node.input(0).num_elements() == 0) {
    return ShapeError(node, "at least one element to choose from", node.input(0).ToString());
  }
  return types;
}

// The type of x with the reduced dimensions as 1.
TensorType KeptType(const GradientContext& c) {
  const TensorType& input = c.input_type(0);
  return ReducedType(input, ReducedAxes(c.node().attributes, input.dims.size()),
                     /*keep_dims=*/true);
}

absl::StatusOr<ValueIndex> Reshape(GradientContext& c, ValueIndex x, const TensorType& type) {
  if (c.TypeOf(x) == type) return x;
  return c.Emit("reshape", {x}, {{"dims", type.sizes()}});
}

// A value of the output's type as x's: by expand or spread.
absl::StatusOr<ValueIndex> Widen(GradientContext& c, absl::string_view op, ValueIndex y) {
  const TensorType& input = c.input_type(0);
  TensorType kept_type = KeptType(c);
  kept_type.dtype = c.TypeOf(y).dtype;
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex wide, Reshape(c, y, kept_type));
  if (kept_type.dims == input.dims) return wide;
  return c.Emit(op, {wide}, {{"dims", input.sizes()}});
}

Gradients SumGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, Widen(c, "expand", *c.grad(0)));
  return InputGradients{g};
}

Gradients MeanGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, Widen(c, "spread", *c.grad(0)));
  return InputGradients{g};
}

Gradients ExtremeGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex y, Widen(c, "expand", c.output(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex holds, c.Emit("holds", {c.input(0), y}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex count, c.Emit("sum", {holds}, c.node().attributes));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex wide, Widen(c, "expand", count));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex holders, c.Emit("mul", {holds, wide}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, Widen(c, "expand", *c.grad(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex shared, c.Emit("share", {g, holders}));
  return InputGradients{shared};
}

// --- The gradient of prod ---

absl::StatusOr<ValueIndex> Rows(GradientContext& c, ValueIndex x, int64_t begin, int64_t end) {
  return c.Emit("slice", {x}, {{"axis", int64_t{0}}, {"begin", begin}, {"end", end}});
}

// From rows x[n, m] and g[1, m]: for each element of x, g times the product of the others in its
// column. The rows are multiplied in pairs, one of the first half with one of the second, until one
// is left; on the way back each partner gets the other one times what their product got.
absl::StatusOr<ValueIndex> ProductOfOthers(GradientContext& c, ValueIndex x, ValueIndex g) {
  struct Level {
    ValueIndex low, high;
    int64_t half;
    bool odd;  // a row is left over, which goes on as it is
  };
  std::vector<Level> levels;
  for (int64_t rows = c.TypeOf(x).dims[0].size; rows > 1; rows = (rows + 1) / 2) {
    Level level;
    level.half = rows / 2;
    level.odd = rows % 2 == 1;
    CHORUS_ASSIGN_OR_RETURN(level.low, Rows(c, x, 0, level.half));
    CHORUS_ASSIGN_OR_RETURN(level.high, Rows(c, x, level.half, 2 * level.half));
    levels.push_back(level);
    if (rows <= 2) break;  // nobody needs the product itself
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex product, c.Emit("mul", {level.low, level.high}));
    if (level.odd) {
      CHORUS_ASSIGN_OR_RETURN(const ValueIndex rest, Rows(c, x, rows - 1, rows));
      CHORUS_ASSIGN_OR_RETURN(x, c.Emit("concat", {product, rest}, {{"axis", int64_t{0}}}));
    } else {
      x = product;
    }
  }
  for (size_t i = levels.size(); i-- > 0;) {
    const Level& level = levels[i];
    ValueIndex paired = g;
    if (level.odd) {
      CHORUS_ASSIGN_OR_RETURN(paired, Rows(c, g, 0, level.half));
    }
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex low, c.Emit("mul", {paired, level.high}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex high, c.Emit("mul", {paired, level.low}));
    std::vector<ValueIndex> parts = {low, high};
    if (level.odd) {
      CHORUS_ASSIGN_OR_RETURN(const ValueIndex rest, Rows(c, g, level.half, level.half + 1));
      parts.push_back(rest);
    }
    CHORUS_ASSIGN_OR_RETURN(g, c.Emit("concat", std::move(parts), {{"axis", int64_t{0}}}));
  }
  return g;
}

Gradients ProdGradient(GradientContext& c) {
  const TensorType& input = c.input_type(0);
  if (input.num_elements() == 0) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex nothing, c.EmitFill(input, 0));
    return InputGradients{nothing};
  }
  const std::vector<bool> reduced = ReducedAxes(c.node().attributes, input.dims.size());
  // The reduced axes in front, as rows; and back.
  std::vector<int64_t> perm;
  for (const bool first : {true, false}) {
    for (size_t i = 0; i < reduced.size(); ++i) {
      if (reduced[i] == first) perm.push_back(static_cast<int64_t>(i));
    }
  }
  std::vector<int64_t> inverse(perm.size());
  TensorType turned(input.dtype, {});
  int64_t rows = 1;
  for (size_t i = 0; i < perm.size(); ++i) {
    const Dim& dim = input.dims[static_cast<size_t>(perm[i])];
    inverse[static_cast<size_t>(perm[i])] = static_cast<int64_t>(i);
    turned.dims.push_back(dim);
    if (reduced[static_cast<size_t>(perm[i])]) rows *= dim.size;
  }
  const int64_t columns = input.num_elements() / rows;
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex factors, c.EmitWide(c.input(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_product, c.EmitWide(*c.grad(0)));
  turned.dtype = c.TypeOf(factors).dtype;
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex front, c.Emit("transpose", {factors}, {{"perm", perm}}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex x,
                          Reshape(c, front, TensorType(turned.dtype, {rows, columns})));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g,
                          Reshape(c, of_product, TensorType(turned.dtype, {1, columns})));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex others, ProductOfOthers(c, x, g));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex shaped, Reshape(c, others, turned));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex back,
                          c.Emit("transpose", {shaped}, {{"perm", inverse}}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex result, c.EmitCast(back, input.dtype));
  return InputGradients{result};
}

// --- expand and spread ---

Types InferExpand(const NodeView& node) {
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

Types InferSpread(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckFloating(node));
  return InferExpand(node);
}

// The gradient reduced over what was repeated.
Gradients Narrow(GradientContext& c, absl::string_view op) {
  const TensorType& input = c.input_type(0);
  const TensorType& output = c.output_type(0);
  const size_t added = output.dims.size() - input.dims.size();
  std::vector<int64_t> axes;
  for (size_t i = 0; i < output.dims.size(); ++i) {
    if (i < added || input.dims[i - added] != output.dims[i]) {
      axes.push_back(static_cast<int64_t>(i));
    }
  }
  // Of no repetitions nothing comes, and a mean of nothing would be NaN.
  if (output.num_elements() == 0) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex nothing, c.EmitFill(input, 0));
    return InputGradients{nothing};
  }
  ValueIndex g = *c.grad(0);
  // No axes would mean all of them.
  if (!axes.empty()) {
    CHORUS_ASSIGN_OR_RETURN(g, c.Emit(op, {g}, {{"axes", axes}}));
  }
  CHORUS_ASSIGN_OR_RETURN(g, Reshape(c, g, input));
  return InputGradients{g};
}

Gradients ExpandGradient(GradientContext& c) { return Narrow(c, "sum"); }
Gradients SpreadGradient(GradientContext& c) { return Narrow(c, "mean"); }

Saved SaveAll(const NodeSpec&, int, int) { return {0, 0}; }

const OpDef* MakeReduction(absl::string_view name, absl::string_view doc,
                           decltype(OpDef::infer_types) infer, decltype(OpDef::gradient) gradient,
                           decltype(OpDef::gradient_saves) gradient_saves = nullptr) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->attributes = {
      {"axes", AttributeSpec::Kind::kInts, false, "ascending; absent or empty: all"},
      {"keep_dims", AttributeSpec::Kind::kInt, false, "1: reduced dimensions stay, as 1"},
  };
  def->min_inputs = def->max_inputs = 1;
  def->dtypes = kNumberDTypes;
  def->infer_types = infer;
  def->gradient = gradient;
  def->gradient_saves = gradient_saves;
  return def;
}

const OpDef* MakeRepetition(absl::string_view name, absl::string_view doc,
                            decltype(OpDef::infer_types) infer,
                            decltype(OpDef::gradient) gradient) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->attributes = {{"dims", AttributeSpec::Kind::kInts, true, "the result's shape"}};
  def->min_inputs = def->max_inputs = 1;
  def->infer_types = infer;
  def->gradient = gradient;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> SumOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      MakeRepetition("expand", "Repeats along dimensions of size 1 and new leading ones.",
                     InferExpand, ExpandGradient),
      MakeReduction("max", "The largest over axes.", InferExtreme, ExtremeGradient, SaveAll),
      MakeReduction("mean", "The mean over axes.", InferMean, MeanGradient),
      MakeReduction("min", "The smallest over axes.", InferExtreme, ExtremeGradient, SaveAll),
      MakeReduction("prod", "The product over axes.", InferReduction, ProdGradient, SaveInputs),
      MakeRepetition("spread", "Repeats like expand, and divides by how often.", InferSpread,
                     SpreadGradient),
      MakeReduction("sum", "Sum over axes.", InferReduction, SumGradient),
  };
  return *ops;
}

}  // namespace chorus
