#include "core/ops/norm/norm.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"
#include "core/ops/checked_attributes.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Value = absl::StatusOr<ValueIndex>;
using Gradients = absl::StatusOr<InputGradients>;
using Ints = std::vector<int64_t>;

// Dimensions [begin, end) of x.
struct AxisRange {
  size_t begin = 0;
  size_t end = 0;
  bool Has(size_t axis) const { return axis >= begin && axis < end; }
};

absl::StatusOr<AxisRange> RangeAttribute(const NodeView& node, absl::string_view name) {
  const Ints range = IntsAttribute(node.attributes, name);
  const auto rank = static_cast<int64_t>(node.input(0).dims.size());
  if (range.size() == 2 && range[0] >= 0 && range[0] <= range[1] && range[1] <= rank) {
    return AxisRange{static_cast<size_t>(range[0]), static_cast<size_t>(range[1])};
  }
  return ShapeError(node,
                    absl::StrCat("the first axis and the end of a range within the ", rank,
                                 " dimensions of ", node.input(0).ToString(), " as '", name, "'"),
                    absl::StrCat("[", absl::StrJoin(range, ","), "]"));
}

// Of attributes that passed the checks.
AxisRange RangeOf(const GradientContext& c, absl::string_view name) {
  const Ints range = IntsAttribute(c.node().attributes, name);
  return {static_cast<size_t>(range[0]), static_cast<size_t>(range[1])};
}

int64_t Product(const TensorType& x, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t d = begin; d < end; ++d) product *= x.dims[d].size;
  return product;
}

// What x has in these dimensions alone.
TensorType TypeOfRange(const TensorType& x, const AxisRange& range) {
  TensorType type(x.dtype, {});
  for (size_t d = range.begin; d < range.end; ++d) type.dims.push_back(x.dims[d]);
  return type;
}

TensorType TypeOfMoments(const TensorType& x, const AxisRange& rows) {
  TensorType type = TypeOfRange(x, rows);
  type.dims.insert(type.dims.begin(), Dim(2));
  return type;
}

absl::Status CheckInput(const NodeView& node, int i, const TensorType& expected) {
  if (node.input(i) == expected) return absl::OkStatus();
  return ShapeError(node, absl::StrCat(expected.ToString(), " as input ", i),
                    node.input(i).ToString());
}

Types InferMoments(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(SizesOfNorm(node).status());
  CHORUS_ASSIGN_OR_RETURN(const AxisRange rows, RangeAttribute(node, "rows"));
  return std::vector<TensorType>{TypeOfMoments(node.input(0), rows)};
}

// The inputs after x and moments: of weights, or of x, by the letters.
Types InferNormalized(const NodeView& node, absl::string_view others, bool gives_weights) {
  CHORUS_RETURN_IF_ERROR(SizesOfNorm(node).status());
  const TensorType& x = node.input(0);
  CHORUS_ASSIGN_OR_RETURN(const AxisRange rows, RangeAttribute(node, "rows"));
  CHORUS_ASSIGN_OR_RETURN(const AxisRange range, RangeAttribute(node, "weights"));
  const TensorType weights = TypeOfRange(x, range);
  CHORUS_RETURN_IF_ERROR(CheckInput(node, 1, TypeOfMoments(x, rows)));
  for (size_t i = 0; i < others.size(); ++i) {
    CHORUS_RETURN_IF_ERROR(
        CheckInput(node, static_cast<int>(2 + i), others[i] == 'w' ? weights : x));
  }
  return std::vector<TensorType>{gives_weights ? weights : x};
}

Types InferNormalize(const NodeView& node) { return InferNormalized(node, "ww", false); }
Types InferNormalizeGrad(const NodeView& node) { return InferNormalized(node, "wx", false); }
Types InferNormalizeWeightGrad(const NodeView& node) { return InferNormalized(node, "x", true); }

// What the rules are made of; inputs 0 and 1 are x and moments.
class Terms {
 public:
  explicit Terms(GradientContext* c) : c_(*c), x_(c->input_type(0)), rows_(RangeOf(*c, "rows")) {}

  Value Normalize(ValueIndex weight, ValueIndex bias) {
    return c_.Emit("normalize", {c_.input(0), c_.input(1), weight, bias}, c_.node().attributes);
  }
  Value NormalizeGrad(ValueIndex weight, ValueIndex g) {
    return c_.Emit("normalize_grad", {c_.input(0), c_.input(1), weight, g}, c_.node().attributes);
  }
  Value NormalizeWeightGrad(ValueIndex g) {
    return c_.Emit("normalize_weight_grad", {c_.input(0), c_.input(1), g}, c_.node().attributes);
  }

  Value Weights(double value) {
    return c_.EmitFill(TypeOfRange(x_, RangeOf(c_, "weights")), value);
  }
  // A number for each index of these dimensions, for every element of x; `op` is expand or spread.
  Value Widen(ValueIndex numbers, const AxisRange& range, absl::string_view op = "expand") {
    TensorType kept = x_;
    for (size_t d = 0; d < kept.dims.size(); ++d) {
      if (!range.Has(d)) kept.dims[d] = Dim(1);
    }
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex reshaped,
                            c_.Emit("reshape", {numbers}, {{"dims", kept.sizes()}}));
    return c_.Emit(op, {reshaped}, {{"dims", x_.sizes()}});
  }
  Value WidenRows(ValueIndex numbers) { return Widen(numbers, rows_); }
  Value WidenWeights(ValueIndex weights) { return Widen(weights, RangeOf(c_, "weights")); }
  // Over the dimensions that are not in `range`; `op` is sum or mean.
  Value Reduce(ValueIndex a, const AxisRange& range, absl::string_view op) {
    Ints axes;
    for (size_t d = 0; d < x_.dims.size(); ++d) {
      if (!range.Has(d)) axes.push_back(static_cast<int64_t>(d));
    }
    if (axes.empty()) return a;
    return c_.Emit(op, {a}, {{"axes", std::move(axes)}});
  }
  Value SumToWeights(ValueIndex a) { return Reduce(a, RangeOf(c_, "weights"), "sum"); }
  // The mean of a b within each row, for every element of x.
  Value MeanOfProduct(ValueIndex a, ValueIndex b) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex product, Mul(a, b));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex mean, Reduce(product, rows_, "mean"));
    return WidenRows(mean);
  }
  // The means (0) or the variances (1), shaped as x's rows.
  Value Moment(ValueIndex moments, int64_t which) {
    CHORUS_ASSIGN_OR_RETURN(
        const ValueIndex slice,
        c_.Emit("slice", {moments}, {{"axis", int64_t{0}}, {"begin", which}, {"end", which + 1}}));
    return c_.Emit("reshape", {slice}, {{"dims", TypeOfRange(x_, rows_).sizes()}});
  }
  // r, for every element of x.
  Value Scale() {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex variance, Moment(c_.input(1), 1));
    CHORUS_ASSIGN_OR_RETURN(
        const ValueIndex epsilon,
        c_.EmitFill(TensorType(x_.dtype, {}),
                    absl::get<double>(*FindAttribute(c_.node().attributes, "epsilon"))));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, c_.Emit("add", {variance, epsilon}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex r, c_.Emit("rsqrt", {sum}));
    return WidenRows(r);
  }
  Value Mul(ValueIndex a, ValueIndex b) { return c_.Emit("mul", {a, b}); }
  Value Add(ValueIndex a, ValueIndex b) { return c_.Emit("add", {a, b}); }

  const AxisRange& rows() const { return rows_; }

 private:
  GradientContext& c_;
  const TensorType x_;
  const AxisRange rows_;
};

Gradients MomentsGradient(GradientContext& c) {
  Terms t(&c);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_variance, t.Moment(*c.grad(0), 1));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex spread, t.Widen(of_variance, t.rows(), "spread"));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex twice, t.Add(spread, spread));
  if (IntAttribute(c.node().attributes, "center", 1) == 0) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, t.Mul(c.input(0), twice));
    return InputGradients{g};
  }
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex means, t.Moment(c.output(0), 0));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex mean, t.WidenRows(means));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex centered, c.Emit("sub", {c.input(0), mean}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex by_variance, t.Mul(centered, twice));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_mean, t.Moment(*c.grad(0), 0));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex by_mean, t.Widen(of_mean, t.rows(), "spread"));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, t.Add(by_variance, by_mean));
  return InputGradients{g};
}

Gradients NormalizeGradient(GradientContext& c) {
  Terms t(&c);
  const ValueIndex g = *c.grad(0);
  InputGradients result(4);
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(result[0], t.NormalizeGrad(c.input(2), g));
  }
  if (c.needs(2)) {
    CHORUS_ASSIGN_OR_RETURN(result[2], t.NormalizeWeightGrad(g));
  }
  if (c.needs(3)) {
    CHORUS_ASSIGN_OR_RETURN(result[3], t.SumToWeights(g));
  }
  return result;
}

Gradients NormalizeWeightGradGradient(GradientContext& c) {
  Terms t(&c);
  const ValueIndex h = *c.grad(0);
  InputGradients result(3);
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(result[0], t.NormalizeGrad(h, c.input(2)));
  }
  if (c.needs(2)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex zeros, t.Weights(0));
    CHORUS_ASSIGN_OR_RETURN(result[2], t.Normalize(h, zeros));
  }
  return result;
}

Gradients NormalizeGradGradient(GradientContext& c) {
  Terms t(&c);
  const ValueIndex h = *c.grad(0);
  const ValueIndex g = c.input(3);
  InputGradients result(4);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex ones, t.Weights(1));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex p, t.NormalizeGrad(ones, h));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex weight, t.WidenWeights(c.input(2)));
  if (c.needs(2)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex product, t.Mul(p, g));
    CHORUS_ASSIGN_OR_RETURN(result[2], t.SumToWeights(product));
  }
  if (c.needs(3)) {
    CHORUS_ASSIGN_OR_RETURN(result[3], t.Mul(p, weight));
  }
  if (!c.needs(0)) return result;
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex u, t.Mul(g, weight));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex zeros, t.Weights(0));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex z, t.Normalize(ones, zeros));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex r, t.Scale());
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex mean_uz, t.MeanOfProduct(u, z));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex mean_hz, t.MeanOfProduct(h, z));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex by_h, t.Mul(mean_uz, h));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex by_u, t.Mul(mean_hz, u));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex both, t.Add(by_h, by_u));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex scaled, t.Mul(r, both));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex from_z, t.NormalizeGrad(ones, scaled));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex mean_pu, t.MeanOfProduct(p, u));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex rz, t.Mul(r, z));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex from_r, t.Mul(rz, mean_pu));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, t.Add(from_z, from_r));
  CHORUS_ASSIGN_OR_RETURN(result[0], c.Emit("neg", {sum}));
  return result;
}

const OpDef* Make(absl::string_view name, int inputs, absl::string_view doc,
                  decltype(OpDef::infer_types) infer, decltype(OpDef::gradient) gradient,
                  decltype(OpDef::gradient_saves) gradient_saves) {
  constexpr auto kInts = AttributeSpec::Kind::kInts;
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->attributes = {{"center", AttributeSpec::Kind::kInt, false, "0: the mean is taken as 0"}};
  if (inputs > 1) {
    def->attributes.push_back(
        {"epsilon", AttributeSpec::Kind::kNumber, true, "added to the variance"});
  }
  def->attributes.push_back({"rows", kInts, true, "the dimensions with moments: first and end"});
  if (inputs > 1) {
    def->attributes.push_back(
        {"weights", kInts, true, "the dimensions with weights: first and end"});
  }
  def->min_inputs = def->max_inputs = inputs;
  def->dtypes = OneDType(DType::kF32) | OneDType(DType::kF64);
  def->infer_types = infer;
  def->gradient = gradient;
  def->gradient_saves = gradient_saves;
  return def;
}

Saved SaveAll(const NodeSpec&, int, int) { return {0, 0}; }

}  // namespace

absl::StatusOr<NormSizes> SizesOfNorm(const NodeView& node) {
  const TensorType& x = node.input(0);
  CHORUS_ASSIGN_OR_RETURN(const AxisRange rows, RangeAttribute(node, "rows"));
  if (rows.end - rows.begin == x.dims.size()) {
    return ShapeError(node, absl::StrCat("a dimension of ", x.ToString(), " that is not in 'rows'"),
                      "all");
  }
  NormSizes s;
  s.before = Product(x, 0, rows.begin);
  s.rows = Product(x, rows.begin, rows.end);
  s.run = Product(x, rows.end, x.dims.size());
  s.size = x.num_elements();
  CHORUS_ASSIGN_OR_RETURN(s.center, CheckedFlag(node, "center", /*otherwise=*/true));
  const AttributeValue* const epsilon = FindAttribute(node.attributes, "epsilon");
  if (epsilon == nullptr) return s;
  if (!absl::holds_alternative<double>(*epsilon) || !(absl::get<double>(*epsilon) >= 0)) {
    return ShapeError(node, "a double of at least 0 as 'epsilon'",
                      absl::holds_alternative<double>(*epsilon)
                          ? absl::StrCat(absl::get<double>(*epsilon))
                          : "an integer");
  }
  s.epsilon = absl::get<double>(*epsilon);
  CHORUS_ASSIGN_OR_RETURN(const AxisRange weights, RangeAttribute(node, "weights"));
  s.weights = Product(x, weights.begin, weights.end);
  s.stretch = Product(x, weights.end, x.dims.size());
  return s;
}

absl::Span<const OpDef* const> NormOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      Make("moments", 1, "The mean and the variance of each row.", InferMoments, MomentsGradient,
           SaveAll),
      Make("normalize", 4, "x of mean 0 and variance 1 in each row, times weight, plus bias.",
           InferNormalize, NormalizeGradient, SaveInputs),
      Make("normalize_grad", 4, "g times the derivative of normalize by x.", InferNormalizeGrad,
           NormalizeGradGradient, SaveInputs),
      Make("normalize_weight_grad", 3, "g times the derivative of normalize by the weight.",
           InferNormalizeWeightGrad, NormalizeWeightGradGradient, SaveInputs),
  };
  return *ops;
}

}  // namespace chorus
