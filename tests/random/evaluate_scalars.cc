#include "tests/random/evaluate_scalars.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace chorus {
namespace random_programs {
namespace {

// What rounding to a dtype does.
struct Precision {
  int bits;     // of the mantissa
  double eps;   // one unit in the last place of 1
  double max;   // the largest number
  double tiny;  // below it, numbers may be anything that small
  int accumulator_bits;
};

Precision PrecisionOf(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return {53, std::ldexp(1, -52), 1.7e308, 1e-300, 53};
    case DType::kF32:
      return {24, std::ldexp(1, -23), 3.4e38, 1.2e-38, 24};
    case DType::kF16:
      return {11, std::ldexp(1, -10), 65504, 6e-8, 24};
    case DType::kBF16:
      return {8, std::ldexp(1, -7), 3.38e38, 1.2e-38, 24};
    default:
      return {53, 0, 9e15, 0, 53};
  }
}

bool Representable(const Precision& p, double x) {
  if (x == 0) return true;
  if (!(std::fabs(x) <= p.max) || std::fabs(x) < 1e-4) return false;
  int exponent = 0;
  const double scaled = std::ldexp(std::frexp(x, &exponent), p.bits);
  return scaled == std::floor(scaled);
}

// A multiple of 2^-8: sums of these are exact while they are small.
bool Coarse(double x) { return x * 256 == std::floor(x * 256); }

// The largest power of two that x, which is not 0, is a multiple of.
double LowestBit(double x) {
  int exponent = 0;
  auto mantissa = static_cast<int64_t>(std::ldexp(std::frexp(std::fabs(x), &exponent), 53));
  for (exponent -= 53; mantissa != 0 && mantissa % 2 == 0; ++exponent) mantissa /= 2;
  return std::ldexp(1, exponent);
}

int64_t Wrapped(DType dtype, uint64_t bits) {
  switch (dtype) {
    case DType::kI8:
      return static_cast<int8_t>(bits);
    case DType::kU8:
      return static_cast<uint8_t>(bits);
    case DType::kI16:
      return static_cast<int16_t>(bits);
    case DType::kI32:
      return static_cast<int32_t>(bits);
    case DType::kBool:
      return bits != 0;
    default:
      return static_cast<int64_t>(bits);
  }
}

double ApplyFunction(Function f, double x) {
  switch (f) {
    case Function::kSin:
      return std::sin(x);
    case Function::kCos:
      return std::cos(x);
    case Function::kExp:
      return std::exp(x);
    case Function::kLog:
      return std::log(x);
    case Function::kLog1p:
      return std::log1p(x);
    case Function::kExpm1:
      return std::expm1(x);
    case Function::kSqrt:
      return std::sqrt(x);
    case Function::kRsqrt:
      return 1 / std::sqrt(x);
    case Function::kSigmoid:
      return 1 / (1 + std::exp(-x));
    case Function::kTanh:
      return std::tanh(x);
    case Function::kErf:
      return std::erf(x);
  }
  return 0;
}

// What `dtype` rounds off of a sum of `count` exact terms, of that size all together, that are
// whole multiples of `granule` (0: not exact). Roundings are as often up as down: with as many of
// one direction a term that is left out would not be seen.
double Rounding(DType dtype, double value, double granule, size_t count, double terms, bool fused) {
  const Precision p = PrecisionOf(dtype);
  const int bits = fused ? p.accumulator_bits : p.bits;
  // No partial sum needs more bits than there are.
  if (terms == 0 ||
      (granule > 0 && terms <= std::ldexp(granule, bits) && Representable(p, value))) {
    return 0;
  }
  const double accumulating = fused ? std::ldexp(1, 1 - p.accumulator_bits) : p.eps;
  return p.eps * std::fabs(value) + accumulating * std::sqrt(static_cast<double>(count)) * terms +
         p.tiny;
}

double Worst(const Node& a, const Node& b) { return std::max(a.error, b.error); }

double SignShare(const Node& x) {
  if (x.error > 0 && std::fabs(x.value) <= x.error) return kNoShare;
  return x.value > 0 ? 1 : x.value < 0 ? -1 : 0;
}

}  // namespace

absl::Status No(const std::string& why) { return absl::InvalidArgumentError(why); }

uint64_t Bits(const Node& n) { return static_cast<uint64_t>(static_cast<int64_t>(n.value)); }

void ScalarGraph::Truncate(size_t nodes, size_t edges) {
  nodes_.resize(nodes);
  edges_.resize(edges);
}

int ScalarGraph::Push(Node node, const Edges& edges) {
  node.first = static_cast<uint32_t>(edges_.size());
  node.count = static_cast<uint32_t>(edges.size());
  for (const Edge& edge : edges) {
    edges_.push_back(edge);
  }
  if (IsFloating(node.dtype) && std::fabs(node.value) + node.error > PrecisionOf(node.dtype).max) {
    node.error = kUnknown;
  }
  if (std::isnan(node.error)) node.error = kUnknown;
  nodes_.push_back(node);
  return static_cast<int>(nodes_.size()) - 1;
}

int ScalarGraph::Constant(DType dtype, double value, double error) {
  Node node;
  node.value = value;
  node.error = error;
  node.dtype = dtype;
  return Push(node, {});
}

int ScalarGraph::Detached(int n) { return Constant(at(n).dtype, at(n).value, at(n).error); }

int ScalarGraph::Linear(DType dtype, const Edges& edges, bool fused) {
  Node node;
  node.kind = Kind::kLinear;
  node.dtype = dtype;
  double granule = kUnknown;
  double terms = 0;
  double error = 0;
  for (const Edge& edge : edges) {
    const Node& in = at(edge.node);
    const double term = edge.factor * in.value;
    node.value += term;
    terms += std::fabs(term);
    if (edge.factor != 0) error += std::fabs(edge.factor) * in.error;
    if (in.error != 0 || !Coarse(term)) {
      granule = 0;
    } else if (term != 0) {
      granule = std::min(granule, LowestBit(term));
    }
  }
  node.error = error + Rounding(dtype, node.value, granule, edges.size(), terms, fused);
  return Push(node, edges);
}

int ScalarGraph::Copy(int n) {
  Node node = at(n);
  node.kind = Kind::kLinear;
  return Push(node, {{n, 1}});
}

int ScalarGraph::Chosen(DType dtype, double value, double error, const Edges& shares) {
  Node node;
  node.kind = Kind::kLinear;
  node.dtype = dtype;
  node.value = value;
  node.error = error;
  return Push(node, shares);
}

int ScalarGraph::Mul(DType dtype, int a, int b) {
  Node node;
  node.kind = Kind::kMul;
  node.dtype = dtype;
  const Node& x = at(a);
  const Node& y = at(b);
  node.value = x.value * y.value;
  const bool exact = x.error == 0 && y.error == 0 && Coarse(x.value) && Coarse(y.value);
  // Nothing comes of a zero, whatever the other is.
  if ((x.value == 0 && x.error == 0) || (y.value == 0 && y.error == 0)) {
    node.value = 0;
  } else {
    node.error = std::fabs(x.value) * y.error + std::fabs(y.value) * x.error + x.error * y.error +
                 Rounding(dtype, node.value, exact ? LowestBit(node.value) : 0, 1,
                          std::fabs(node.value), false);
  }
  return Push(node, {{a, 1}, {b, 1}});
}

int ScalarGraph::Div(DType dtype, int a, int b) {
  Node node;
  node.kind = Kind::kDiv;
  node.dtype = dtype;
  const Node& x = at(a);
  const Node& y = at(b);
  node.value = x.value / y.value;
  const double least = std::fabs(y.value) - y.error;
  node.error =
      least > 0 ? x.error / least + std::fabs(x.value) * y.error / (std::fabs(y.value) * least) +
                      2 * PrecisionOf(dtype).eps * std::fabs(node.value) + PrecisionOf(dtype).tiny
                : kUnknown;
  if (x.value == 0 && x.error == 0 && least > 0) node.error = 0;
  return Push(node, {{a, 1}, {b, 1}});
}

int ScalarGraph::Apply1(Function f, DType dtype, int a) {
  Node node;
  node.kind = Kind::kFunction;
  node.function = f;
  node.dtype = dtype;
  const Node& x = at(a);
  node.value = ApplyFunction(f, x.value);
  double spread = 0;
  if (x.error > 0) {
    spread = std::max(std::fabs(ApplyFunction(f, x.value + x.error) - node.value),
                      std::fabs(ApplyFunction(f, x.value - x.error) - node.value));
    // Not all are monotone.
    if (f == Function::kSin || f == Function::kCos) spread = x.error;
  }
  node.error =
      1.1 * spread + 4 * PrecisionOf(dtype).eps * std::fabs(node.value) + PrecisionOf(dtype).tiny;
  if (x.error == 0 && x.value == 0 && Coarse(node.value)) node.error = 0;
  return Push(node, {{a, 1}});
}

int ScalarGraph::Power(DType dtype, int a, int b) {
  Node node;
  node.kind = Kind::kPow;
  node.dtype = dtype;
  const Node& x = at(a);
  const Node& y = at(b);
  node.value = std::pow(x.value, y.value);
  double spread = 0;
  for (const double i : {-1.0, 1.0}) {
    for (const double j : {-1.0, 1.0}) {
      spread = std::max(
          spread, std::fabs(std::pow(x.value + i * x.error, y.value + j * y.error) - node.value));
    }
  }
  if (x.value - x.error <= 0) spread = kUnknown;
  node.error =
      1.1 * spread + 4 * PrecisionOf(dtype).eps * std::fabs(node.value) + PrecisionOf(dtype).tiny;
  return Push(node, {{a, 1}, {b, 1}});
}

// --- Gradients -----------------------------------------------------------------------------------

std::vector<int> ScalarGraph::Reverse(const std::vector<std::pair<int, int>>& roots,
                                      const std::vector<int>& wanted) {
  const size_t size = nodes_.size();
  std::vector<bool> needed(size, false);
  for (const int n : wanted) needed[static_cast<size_t>(n)] = true;
  for (size_t n = 0; n < size; ++n) {
    for (uint32_t e = 0; e < nodes_[n].count && !needed[n]; ++e) {
      needed[n] = needed[static_cast<size_t>(edges_[nodes_[n].first + e].node)];
    }
  }
  std::vector<Edges> parts(size);
  std::vector<int> gradients(size, -1);
  for (const auto& [root, seed] : roots) parts[static_cast<size_t>(root)].push_back({seed, 1});
  const auto give = [&](int to, int node, double factor = 1) {
    if (needed[static_cast<size_t>(to)]) {
      parts[static_cast<size_t>(to)].push_back({node, factor});
    }
  };
  for (size_t n = size; n-- > 0;) {
    if (!needed[n] || parts[n].empty()) continue;
    const Node node = nodes_[n];
    const DType dtype = node.dtype;
    const bool alone =
        parts[n].size() == 1 && parts[n][0].factor == 1 && at(parts[n][0].node).dtype == dtype;
    const int g = alone ? parts[n][0].node : Linear(dtype, parts[n], false);
    gradients[n] = g;
    Edges().swap(parts[n]);
    const Edges edges(edges_.begin() + node.first, edges_.begin() + node.first + node.count);
    const int self = static_cast<int>(n);
    switch (node.kind) {
      case Kind::kConstant:
        break;
      case Kind::kLinear:
        for (const Edge& edge : edges) {
          if (std::isnan(edge.factor)) {
            // Nobody knows its share.
            give(edge.node, Mul(dtype, g, Constant(dtype, 0, kUnknown)));
          } else if (edge.factor != 0) {
            give(edge.node, g, edge.factor);
          }
        }
        break;
      case Kind::kMul:
        if (needed[static_cast<size_t>(edges[0].node)]) {
          give(edges[0].node, Mul(dtype, g, edges[1].node));
        }
        if (needed[static_cast<size_t>(edges[1].node)]) {
          give(edges[1].node, Mul(dtype, g, edges[0].node));
        }
        break;
      case Kind::kDiv: {
        const int b = edges[1].node;
        if (needed[static_cast<size_t>(edges[0].node)]) give(edges[0].node, Div(dtype, g, b));
        if (needed[static_cast<size_t>(b)]) give(b, Div(dtype, Mul(dtype, g, self), b), -1);
        break;
      }
      case Kind::kPow: {
        const int a = edges[0].node;
        const int b = edges[1].node;
        if (needed[static_cast<size_t>(a)]) {
          const int less = Linear(dtype, {{b, 1}, {Constant(dtype, 1), -1}});
          give(a, Mul(dtype, g, Mul(dtype, b, Power(dtype, a, less))));
        }
        if (needed[static_cast<size_t>(b)]) {
          give(b, Mul(dtype, g, Mul(dtype, self, Apply1(Function::kLog, dtype, a))));
        }
        break;
      }
      case Kind::kFunction:
        give(edges[0].node, Mul(dtype, g, Derivative(node.function, dtype, edges[0].node, self)));
        break;
    }
  }
  std::vector<int> result;
  for (const int n : wanted) {
    const int g = gradients[static_cast<size_t>(n)];
    result.push_back(g >= 0 ? Copy(g) : Constant(at(n).dtype, 0));
  }
  return result;
}

int ScalarGraph::Derivative(Function f, DType dtype, int x, int y) {
  const auto one_minus = [&](int a) { return Linear(dtype, {{Constant(dtype, 1), 1}, {a, -1}}); };
  switch (f) {
    case Function::kSin:
      return Apply1(Function::kCos, dtype, x);
    case Function::kCos:
      return Linear(dtype, {{Apply1(Function::kSin, dtype, x), -1}});
    case Function::kExp:
      return y;
    case Function::kExpm1:
      return Apply1(Function::kExp, dtype, x);
    case Function::kLog:
      return Div(dtype, Constant(dtype, 1), x);
    case Function::kLog1p:
      return Div(dtype, Constant(dtype, 1), Linear(dtype, {{Constant(dtype, 1), 1}, {x, 1}}));
    case Function::kSqrt:
      return Div(dtype, Constant(dtype, 0.5), y);
    case Function::kRsqrt:
      return Linear(dtype, {{Mul(dtype, y, Mul(dtype, y, y)), -0.5}});
    case Function::kSigmoid:
      return Mul(dtype, y, one_minus(y));
    case Function::kTanh:
      return one_minus(Mul(dtype, y, y));
    case Function::kErf:
      return Linear(dtype, {{Apply1(Function::kExp, dtype, Linear(dtype, {{Mul(dtype, x, x), -1}})),
                             2 / std::sqrt(std::acos(-1.0))}});
  }
  return x;
}

// --- Elements ------------------------------------------------------------------------------------

int ScalarGraph::Extreme(DType dtype, const std::vector<int>& of, double sign) {
  double best = -kUnknown;
  double error = 0;
  for (const int n : of) best = std::max(best, sign * at(n).value);
  for (const int n : of) error = std::max(error, at(n).error);
  if (!IsFloating(dtype)) return Constant(dtype, sign * best, error);
  bool known = true;
  std::vector<int> holders;
  for (const int n : of) {
    const double gap = best - sign * at(n).value;
    if (gap == 0) {
      holders.push_back(n);
    } else if (gap <= 2 * (error + at(n).error)) {
      known = false;
    }
  }
  // Equal, but rounded on different ways perhaps.
  if (holders.size() > 1) {
    for (const int n : holders) known = known && at(n).error == 0;
  }
  if (of.size() == 1) known = true;
  Edges shares;
  for (const int n : of) {
    const bool holds = std::find(holders.begin(), holders.end(), n) != holders.end();
    shares.push_back({n, !known  ? kNoShare
                         : holds ? 1.0 / static_cast<double>(holders.size())
                                 : 0});
  }
  return Chosen(dtype, sign * best, error, shares);
}

int ScalarGraph::Bool(double value, bool known) {
  return Constant(DType::kBool, value, known ? 0 : kUnknown);
}

int ScalarGraph::Compared(int a, int b, bool equal) {
  const double gap = at(b).value - at(a).value;
  const double error = at(a).error + at(b).error;
  const bool known = error == 0 || std::fabs(gap) > error;
  return Bool(equal ? gap == 0 : gap > 0, known);
}

int ScalarGraph::Integer(DType dtype, double error, uint64_t bits) {
  return Constant(dtype, static_cast<double>(Wrapped(dtype, bits)), error);
}

absl::StatusOr<int> ScalarGraph::Binary(Op op, DType dtype, int a, int b) {
  const Node x = at(a);
  const Node y = at(b);
  if (op == Op::kLess || op == Op::kEqual) return Compared(a, b, op == Op::kEqual);
  if (op == Op::kLogicalAnd) {
    return Constant(DType::kBool, x.value * y.value, Worst(x, y));
  }
  if (op == Op::kMaximum || op == Op::kMinimum) {
    return Extreme(dtype, {a, b}, op == Op::kMaximum ? 1 : -1);
  }
  if (!IsFloating(dtype)) {
    switch (op) {
      case Op::kAdd:
        return Integer(dtype, Worst(x, y), Bits(x) + Bits(y));
      case Op::kSub:
        return Integer(dtype, Worst(x, y), Bits(x) - Bits(y));
      case Op::kMul:
        return Integer(dtype, Worst(x, y), Bits(x) * Bits(y));
      case Op::kDiv:
        if (y.value == 0 || y.error > 0) return No("an integer divided by 0");
        return Integer(
            dtype, Worst(x, y),
            static_cast<uint64_t>(static_cast<int64_t>(x.value) / static_cast<int64_t>(y.value)));
      default:
        return No("not of integers");
    }
  }
  switch (op) {
    case Op::kAdd:
      return Linear(dtype, {{a, 1}, {b, 1}});
    case Op::kSub:
      return Linear(dtype, {{a, 1}, {b, -1}});
    case Op::kMul:
      return Mul(dtype, a, b);
    case Op::kDiv:
      if (std::fabs(y.value) < 1e-3) return No("divided by nearly nothing");
      return Div(dtype, a, b);
    case Op::kPow:
      if (x.value < 1e-2) return No("a power of what is not positive");
      return Power(dtype, a, b);
    default:
      return No("not of two");
  }
}

absl::StatusOr<int> ScalarGraph::Unary(const Statement& s, DType dtype, int a) {
  const Node x = at(a);
  const bool floating = IsFloating(dtype);
  switch (s.op) {
    case Op::kNeg:
      return floating ? Linear(dtype, {{a, -1}}) : Integer(dtype, x.error, 0 - Bits(x));
    case Op::kAbs:
      if (!floating) return Integer(dtype, x.error, x.value < 0 ? 0 - Bits(x) : Bits(x));
      return Chosen(dtype, std::fabs(x.value), x.error, {{a, SignShare(x)}});
    case Op::kRelu:
      if (!floating) return Integer(dtype, x.error, x.value < 0 ? 0 : Bits(x));
      return Chosen(dtype, std::max(x.value, 0.0), x.error,
                    {{a, std::fabs(x.value) <= x.error && x.error > 0 ? kNoShare
                         : x.value > 0                                ? 1
                                                                      : 0}});
    case Op::kSign: {
      const double sign = x.value > 0 ? 1 : x.value < 0 ? -1 : 0;
      return Constant(dtype, sign, std::fabs(x.value) > x.error || x.error == 0 ? 0 : kUnknown);
    }
    case Op::kFloor:
    case Op::kCeil: {
      const auto round = [&](double v) {
        return s.op == Op::kFloor ? std::floor(v) : std::ceil(v);
      };
      const bool known = round(x.value - x.error) == round(x.value + x.error);
      return Constant(dtype, round(x.value), known ? 0 : kUnknown);
    }
    case Op::kAddNumber:
      return floating ? Linear(dtype, {{a, 1}, {Constant(dtype, s.number), 1}})
                      : Integer(dtype, x.error,
                                Bits(x) + static_cast<uint64_t>(static_cast<int64_t>(s.number)));
    case Op::kMulNumber:
      return floating ? Linear(dtype, {{a, s.number}})
                      : Integer(dtype, x.error,
                                Bits(x) * static_cast<uint64_t>(static_cast<int64_t>(s.number)));
    case Op::kLogicalNot:
      return Constant(dtype, 1 - x.value, x.error);
    case Op::kDetach:
      return Detached(a);
    case Op::kCopyTo:
      return Copy(a);
    case Op::kSqrt:
    case Op::kRsqrt:
    case Op::kLog:
      if (x.value < 1e-2) return No("not of what is not positive");
      break;
    case Op::kLog1p:
      if (x.value < -0.9) return No("log1p of that");
      break;
    default:
      break;
  }
  static const std::map<Op, Function> functions = {
      {Op::kSin, Function::kSin},         {Op::kCos, Function::kCos},
      {Op::kExp, Function::kExp},         {Op::kLog, Function::kLog},
      {Op::kLog1p, Function::kLog1p},     {Op::kExpm1, Function::kExpm1},
      {Op::kSqrt, Function::kSqrt},       {Op::kRsqrt, Function::kRsqrt},
      {Op::kSigmoid, Function::kSigmoid}, {Op::kTanh, Function::kTanh},
      {Op::kErf, Function::kErf}};
  const auto found = functions.find(s.op);
  if (found == functions.end() || !floating) return No("no function of one");
  return Apply1(found->second, dtype, a);
}

int ScalarGraph::Converted(int a, DType to) {
  const Node x = at(a);
  if (IsFloating(to)) {
    if (IsFloating(x.dtype)) return Linear(to, {{a, 1}});
    return Constant(
        to, x.value,
        x.error + Rounding(to, x.value, LowestBit(x.value), 1, std::fabs(x.value), true));
  }
  const auto convert = [&](double v) -> double {
    if (to == DType::kBool) return v != 0;
    if (!IsFloating(x.dtype)) {
      return static_cast<double>(Wrapped(to, static_cast<uint64_t>(static_cast<int64_t>(v))));
    }
    const double lo =
        to == DType::kU8 ? 0 : -std::ldexp(1, static_cast<int>(DTypeBytes(to)) * 8 - 1);
    const double hi =
        to == DType::kU8 ? 255 : std::ldexp(1, static_cast<int>(DTypeBytes(to)) * 8 - 1) - 1;
    return std::min(std::max(std::trunc(v), lo), hi);
  };
  bool known = x.error == 0 || convert(x.value - x.error) == convert(x.value + x.error);
  if (to == DType::kBool && x.error > 0) known = std::fabs(x.value) > x.error;
  return Constant(to, convert(x.value), known ? 0 : kUnknown);
}

absl::StatusOr<int> ScalarGraph::Reduced(Reduction reduction, DType dtype,
                                         const std::vector<int>& of,
                                         const std::vector<double>& factors) {
  if (of.empty()) return No("a reduction of nothing");
  double error = 0;
  for (const int n : of) error = std::max(error, at(n).error);
  const bool floating = IsFloating(dtype);
  Edges edges;
  for (size_t i = 0; i < of.size(); ++i) edges.push_back({of[i], 1});
  switch (reduction) {
    case Reduction::kMin:
    case Reduction::kMax:
      return Extreme(dtype, of, reduction == Reduction::kMax ? 1 : -1);
    case Reduction::kAvg:
      if (!floating) break;
      for (Edge& edge : edges) edge.factor = 1.0 / static_cast<double>(of.size());
      return Linear(dtype, edges);
    case Reduction::kPremulSum:
      if (!floating) break;
      for (size_t i = 0; i < of.size(); ++i) edges[i].factor = factors[i];
      return Linear(dtype, edges);
    case Reduction::kSum:
      if (floating) return Linear(dtype, edges);
      break;
    case Reduction::kProduct:
      if (floating) {
        int product = of[0];
        for (size_t i = 1; i < of.size(); ++i) product = Mul(dtype, product, of[i]);
        return Copy(product);
      }
      break;
    default:
      if (floating) return No("bits of a floating number");
      break;
  }
  if (floating || reduction == Reduction::kAvg || reduction == Reduction::kPremulSum) {
    return No("that reduction of that dtype");
  }
  uint64_t bits = Bits(at(of[0]));
  for (size_t i = 1; i < of.size(); ++i) {
    const uint64_t b = Bits(at(of[i]));
    if (reduction == Reduction::kSum) bits = dtype == DType::kBool ? bits | b : bits + b;
    if (reduction == Reduction::kProduct) bits = dtype == DType::kBool ? bits & b : bits * b;
    if (reduction == Reduction::kBand) bits &= b;
    if (reduction == Reduction::kBor) bits |= b;
    if (reduction == Reduction::kBxor) bits ^= b;
  }
  return Integer(dtype, error, bits);
}

std::vector<int> ScalarGraph::Softmax(DType dtype, const std::vector<int>& x, bool logarithm) {
  double shift = -kUnknown;
  for (const int n : x) shift = std::max(shift, at(n).value);
  const int minus = Constant(dtype, shift);
  std::vector<int> shifted;
  Edges exps;
  for (const int n : x) {
    shifted.push_back(Linear(dtype, {{n, 1}, {minus, -1}}));
    exps.push_back({Apply1(Function::kExp, dtype, shifted.back()), 1});
  }
  if (x.empty()) return {};
  const int sum = Linear(dtype, exps);
  std::vector<int> result;
  if (!logarithm) {
    for (size_t i = 0; i < x.size(); ++i) result.push_back(Div(dtype, exps[i].node, sum));
    return result;
  }
  // Its gradient may have a factor that is 1 but for rounding: the sum of the softmax.
  const int log = Apply1(Function::kLog, dtype, sum);
  const int one = Constant(dtype, 1, PrecisionOf(dtype).eps * static_cast<double>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const int y = Linear(dtype, {{shifted[i], 1}, {log, -1}});
    result.push_back(Mul(dtype, y, one));
    nodes_.back().error = at(y).error;
  }
  return result;
}

}  // namespace random_programs
}  // namespace chorus
