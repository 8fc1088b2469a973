#include "core/ops/elementwise/elementwise.h"

#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;

Types SameTypes(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(TensorType type, StretchedType(node));
  return std::vector<TensorType>{std::move(type)};
}

Types SameFloatingTypes(const NodeView& node) {
  if (!IsFloating(node.input(0).dtype)) {
    return ShapeError(node, "floating point", node.input(0).ToString());
  }
  return SameTypes(node);
}

Gradients AddGradient(GradientContext& c) {
  InputGradients result(2);
  for (int i = 0; i < 2; ++i) {
    if (!c.needs(i)) continue;
    CHORUS_ASSIGN_OR_RETURN(result[i], c.SumToInput(*c.grad(0), i));
  }
  return result;
}

Gradients SubGradient(GradientContext& c) {
  InputGradients result(2);
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(result[0], c.SumToInput(*c.grad(0), 0));
  }
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.SumToInput(*c.grad(0), 1));
    CHORUS_ASSIGN_OR_RETURN(result[1], c.Emit("neg", {g}));
  }
  return result;
}

Gradients MulGradient(GradientContext& c) {
  InputGradients result(2);
  for (int i = 0; i < 2; ++i) {
    if (!c.needs(i)) continue;
    ValueIndex of_y = *c.grad(0);
    ValueIndex other = c.input(1 - i);
    // What is added up is not rounded before.
    if (c.TypeOf(of_y).dims != c.input_type(i).dims) {
      CHORUS_ASSIGN_OR_RETURN(of_y, c.EmitWide(of_y));
      CHORUS_ASSIGN_OR_RETURN(other, c.EmitWide(other));
    }
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("mul", {of_y, other}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, c.SumToInput(g, i));
    CHORUS_ASSIGN_OR_RETURN(result[i], c.EmitCast(sum, c.input_type(i).dtype));
  }
  return result;
}

Gradients NegGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("neg", {*c.grad(0)}));
  return InputGradients{g};
}

Gradients ReluGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("relu_grad", {c.input(0), *c.grad(0)}));
  return InputGradients{g};
}

Gradients ReluGradGradient(GradientContext& c) {
  InputGradients result(2);
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("relu_grad", {c.input(0), *c.grad(0)}));
    CHORUS_ASSIGN_OR_RETURN(result[1], c.SumToInput(g, 1));
  }
  return result;
}

Gradients SinGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex cos, c.Emit("cos", {c.input(0)}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("mul", {*c.grad(0), cos}));
  return InputGradients{g};
}

Gradients CosGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex sin, c.Emit("sin", {c.input(0)}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex product, c.Emit("mul", {*c.grad(0), sin}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("neg", {product}));
  return InputGradients{g};
}

absl::StatusOr<ValueIndex> Number(GradientContext& c, double value) {
  return c.EmitFill(TensorType(c.output_type(0).dtype, {}), value);
}

// g times the derivative.
Gradients Times(GradientContext& c, ValueIndex derivative) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("mul", {*c.grad(0), derivative}));
  return InputGradients{g};
}

Gradients Over(GradientContext& c, ValueIndex divisor) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("div", {*c.grad(0), divisor}));
  return InputGradients{g};
}

Gradients NoGradient(GradientContext& c) { return InputGradients(c.num_inputs()); }

Gradients DivGradient(GradientContext& c) {
  InputGradients result(2);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_y, c.EmitWide(*c.grad(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex b, c.EmitWide(c.input(1)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("div", {of_y, b}));
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, c.SumToInput(g, 0));
    CHORUS_ASSIGN_OR_RETURN(result[0], c.EmitCast(sum, c.input_type(0).dtype));
  }
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex y, c.EmitWide(c.output(0)));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex gy, c.Emit("mul", {g, y}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, c.SumToInput(gy, 1));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex negative, c.Emit("neg", {sum}));
    CHORUS_ASSIGN_OR_RETURN(result[1], c.EmitCast(negative, c.input_type(1).dtype));
  }
  return result;
}

// The numbers 0 and 1 where a formula would make NaN of them are put in place of its operands, not
// of its result: so the gradient of the gradient does not meet the NaN either.
Gradients PowGradient(GradientContext& c) {
  InputGradients result(2);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex a, c.EmitWide(c.input(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex b, c.EmitWide(c.input(1)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex wide_g, c.EmitWide(*c.grad(0)));
  const TensorType number(c.TypeOf(a).dtype, {});
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex zero, c.EmitFill(number, 0));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex one, c.EmitFill(number, 1));
  if (c.needs(0)) {
    // At b = 0 only where 1 / a is no number: elsewhere it is the derivative by b.
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex infinity,
                            c.EmitFill(number, std::numeric_limits<double>::infinity()));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex inverse, c.Emit("div", {one, a}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex size, c.Emit("abs", {inverse}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex is_number, c.Emit("lt", {size, infinity}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex differs, c.Emit("ne", {b, zero}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex fits, c.Emit("logical_or", {is_number, differs}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex less, c.Emit("sub", {b, one}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex exponent, c.Emit("where", {fits, less, zero}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex power, c.Emit("pow", {a, exponent}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex slope, c.Emit("mul", {b, power}));
    // Of an infinite one, 0 times it. Others stay at b = 0, for the derivative by b.
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g_size, c.Emit("abs", {wide_g}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g_is_number, c.Emit("lt", {g_size, infinity}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex counts, c.Emit("logical_or", {g_is_number, differs}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_y, c.Emit("where", {counts, wide_g, zero}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("mul", {of_y, slope}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, c.SumToInput(g, 0));
    CHORUS_ASSIGN_OR_RETURN(result[0], c.EmitCast(sum, c.input_type(0).dtype));
  }
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex a_is_zero, c.Emit("eq", {a, zero}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex is_limit, c.Emit("ge", {b, zero}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex both, c.Emit("logical_and", {a_is_zero, is_limit}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex base, c.Emit("where", {both, one, a}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex log, c.Emit("log", {base}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex y, c.EmitWide(c.output(0)));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex slope, c.Emit("mul", {y, log}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_y, c.Emit("where", {both, zero, wide_g}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("mul", {of_y, slope}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, c.SumToInput(g, 1));
    CHORUS_ASSIGN_OR_RETURN(result[1], c.EmitCast(sum, c.input_type(1).dtype));
  }
  return result;
}

Gradients ExtremeGradient(GradientContext& c) {
  InputGradients result(2);
  ValueIndex holds[2];
  for (int i = 0; i < 2; ++i) {
    CHORUS_ASSIGN_OR_RETURN(holds[i], c.Emit("holds", {c.input(i), c.output(0)}));
  }
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex count, c.Emit("add", {holds[0], holds[1]}));
  for (int i = 0; i < 2; ++i) {
    if (!c.needs(i)) continue;
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex holders, c.Emit("mul", {holds[i], count}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("share", {*c.grad(0), holders}));
    CHORUS_ASSIGN_OR_RETURN(result[i], c.SumToInput(g, i));
  }
  return result;
}

Gradients AbsGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex sign, c.Emit("sign", {c.input(0)}));
  return Times(c, sign);
}

Gradients ExpGradient(GradientContext& c) { return Times(c, c.output(0)); }

Gradients Expm1Gradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex exp, c.Emit("exp", {c.input(0)}));
  return Times(c, exp);
}

Gradients LogGradient(GradientContext& c) { return Over(c, c.input(0)); }

Gradients Log1pGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex one, Number(c, 1));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, c.Emit("add", {c.input(0), one}));
  return Over(c, sum);
}

Gradients SqrtGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex twice, c.Emit("add", {c.output(0), c.output(0)}));
  return Over(c, twice);
}

Gradients RsqrtGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex y, c.EmitWide(c.output(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_y, c.EmitWide(*c.grad(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex half,
                          c.EmitFill(TensorType(c.TypeOf(y).dtype, {}), -0.5));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex square, c.Emit("mul", {y, y}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex cube, c.Emit("mul", {square, y}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex slope, c.Emit("mul", {cube, half}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex product, c.Emit("mul", {of_y, slope}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.EmitCast(product, c.input_type(0).dtype));
  return InputGradients{g};
}

Gradients TanhGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("tanh_grad", {c.input(0), *c.grad(0)}));
  return InputGradients{g};
}

Gradients SigmoidGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("sigmoid_grad", {c.input(0), *c.grad(0)}));
  return InputGradients{g};
}

// Of tanh_grad and sigmoid_grad, whose slope s(x) has the derivative scale s(x) tanh(x / divisor).
Gradients SlopeGradient(GradientContext& c, double divisor, double scale) {
  InputGradients result(2);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex x, c.EmitWide(c.input(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex h, c.EmitWide(*c.grad(0)));
  if (c.needs(0)) {
    const TensorType number(c.TypeOf(x).dtype, {});
    ValueIndex part = x;
    if (divisor != 1) {
      CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_x, c.EmitFill(number, divisor));
      CHORUS_ASSIGN_OR_RETURN(part, c.Emit("div", {x, of_x}));
    }
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex tanh, c.Emit("tanh", {part}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex factor, c.EmitFill(number, scale));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex curve, c.Emit("mul", {tanh, factor}));
    // The output, before it was rounded.
    ValueIndex y = c.output(0);
    if (x != c.input(0)) {
      CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_y, c.EmitWide(c.input(1)));
      CHORUS_ASSIGN_OR_RETURN(y, c.Emit(c.node().op, {x, of_y}));
    }
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex slope, c.Emit("mul", {y, curve}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("mul", {h, slope}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, c.SumToInput(g, 0));
    CHORUS_ASSIGN_OR_RETURN(result[0], c.EmitCast(sum, c.input_type(0).dtype));
  }
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit(c.node().op, {x, h}));
    CHORUS_ASSIGN_OR_RETURN(const ValueIndex sum, c.SumToInput(g, 1));
    CHORUS_ASSIGN_OR_RETURN(result[1], c.EmitCast(sum, c.input_type(1).dtype));
  }
  return result;
}
Gradients TanhGradGradient(GradientContext& c) { return SlopeGradient(c, 1, -2); }
Gradients SigmoidGradGradient(GradientContext& c) { return SlopeGradient(c, 2, -1); }

Gradients ErfGradient(GradientContext& c) {
  constexpr double kTwoOverRootPi = 1.1283791670955125739;
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex x, c.EmitWide(c.input(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex of_y, c.EmitWide(*c.grad(0)));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex factor,
                          c.EmitFill(TensorType(c.TypeOf(x).dtype, {}), kTwoOverRootPi));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex square, c.Emit("mul", {x, x}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex minus, c.Emit("neg", {square}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex exp, c.Emit("exp", {minus}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex slope, c.Emit("mul", {exp, factor}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex product, c.Emit("mul", {of_y, slope}));
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.EmitCast(product, c.input_type(0).dtype));
  return InputGradients{g};
}

Saved SaveAll(const NodeSpec&, int, int) { return {0, 0}; }
Saved SaveOutput(const NodeSpec&, int num_inputs, int) { return {num_inputs, 0}; }
Saved SaveDivisorAndOutput(const NodeSpec&, int, int) { return {1, 0}; }

OpDef* Make(absl::string_view name, int inputs, absl::string_view doc,
            decltype(OpDef::infer_types) infer, decltype(OpDef::gradient) gradient,
            decltype(OpDef::gradient_saves) gradient_saves = nullptr) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->min_inputs = def->max_inputs = inputs;
  def->dtypes = kNumberDTypes;
  def->infer_types = infer;
  def->gradient = gradient;
  def->gradient_saves = gradient_saves;
  def->elementwise = true;
  return def;
}

const OpDef* MakeDiv() {
  OpDef* const def =
      Make("div", 2, "a / b; of integers truncated.", SameTypes, DivGradient, SaveDivisorAndOutput);
  def->fallible = kIntegerDTypes;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> ElementwiseOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      Make("abs", 1, "|x|", SameTypes, AbsGradient, SaveInputs),
      Make("add", 2, "a + b", SameTypes, AddGradient),
      Make("ceil", 1, "The next whole number, upwards.", SameFloatingTypes, NoGradient),
      Make("cos", 1, "Cosine of radians.", SameFloatingTypes, CosGradient, SaveInputs),
      MakeDiv(),
      Make("erf", 1, "The error function.", SameFloatingTypes, ErfGradient, SaveInputs),
      Make("exp", 1, "e to the power of x.", SameFloatingTypes, ExpGradient, SaveOutput),
      Make("expm1", 1, "exp(x) - 1, exact near 0.", SameFloatingTypes, Expm1Gradient, SaveInputs),
      Make("floor", 1, "The next whole number, downwards.", SameFloatingTypes, NoGradient),
      Make("log", 1, "Natural logarithm.", SameFloatingTypes, LogGradient, SaveInputs),
      Make("log1p", 1, "log(1 + x), exact near 0.", SameFloatingTypes, Log1pGradient, SaveInputs),
      Make("maximum", 2, "The larger one of a and b.", SameTypes, ExtremeGradient, SaveAll),
      Make("minimum", 2, "The smaller one of a and b.", SameTypes, ExtremeGradient, SaveAll),
      Make("mul", 2, "a * b", SameTypes, MulGradient, SaveInputs),
      Make("neg", 1, "-a", SameTypes, NegGradient),
      Make("pow", 2, "a to the power of b.", SameFloatingTypes, PowGradient, SaveAll),
      Make("relu", 1, "x > 0 ? x : 0", SameTypes, ReluGradient, SaveInputs),
      Make("relu_grad", 2, "x > 0 ? g : 0", SameFloatingTypes, ReluGradGradient, SaveInputs),
      Make("rsqrt", 1, "1 / sqrt(x)", SameFloatingTypes, RsqrtGradient, SaveOutput),
      Make("sigmoid", 1, "1 / (1 + exp(-x))", SameFloatingTypes, SigmoidGradient, SaveInputs),
      Make("sigmoid_grad", 2, "g times the derivative of sigmoid at x.", SameFloatingTypes,
           SigmoidGradGradient, SaveAll),
      Make("sign", 1, "-1, 0 or 1.", SameTypes, NoGradient),
      Make("sin", 1, "Sine of radians.", SameFloatingTypes, SinGradient, SaveInputs),
      Make("sqrt", 1, "Square root.", SameFloatingTypes, SqrtGradient, SaveOutput),
      Make("sub", 2, "a - b", SameTypes, SubGradient),
      Make("tanh", 1, "Hyperbolic tangent.", SameFloatingTypes, TanhGradient, SaveInputs),
      Make("tanh_grad", 2, "g times the derivative of tanh at x.", SameFloatingTypes,
           TanhGradGradient, SaveAll),
  };
  return *ops;
}

absl::Status DividedByZero(const TensorType& output, int64_t element) {
  Error error(Reason::kBadType);
  error.op = "div";
  error.expected = "divisors other than 0";
  error.got = absl::StrCat("0 as element ", element);
  error.message = absl::StrCat("div: element ", element, " of ", output.ToString(),
                               " is an integer divided by 0, expected ", error.expected);
  return ToStatus(error);
}

}  // namespace chorus
