#include "tests/random/evaluate.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/tensor/half.h"

namespace chorus {
namespace random_programs {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::infinity();
constexpr size_t kMostNodes = 3000000;

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

enum class Kind : uint8_t { kConstant, kLinear, kMul, kDiv, kPow, kFunction };
enum class Function : uint8_t {
  kSin,
  kCos,
  kExp,
  kLog,
  kLog1p,
  kExpm1,
  kSqrt,
  kRsqrt,
  kSigmoid,
  kTanh,
  kErf
};

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

struct Node {
  double value = 0;
  double error = 0;
  uint32_t first = 0;  // of its edges
  uint32_t count = 0;
  Kind kind = Kind::kConstant;
  Function function = Function::kSin;
  DType dtype = DType::kF32;
};

struct Edge {
  int node = -1;
  double factor = 1;
};
using Edges = std::vector<Edge>;

struct Array {
  DType dtype = DType::kF32;
  Dims shape;
  std::vector<int> nodes;
};

absl::Status No(const std::string& why) { return absl::InvalidArgumentError(why); }

// The indices of `shape`, row-major.
std::vector<Dims> IndicesOf(const Dims& shape) {
  std::vector<Dims> all;
  const int64_t n = Elements(shape);
  for (int64_t i = 0; i < n; ++i) {
    Dims index(shape.size());
    int64_t rest = i;
    for (size_t d = shape.size(); d-- > 0;) {
      index[d] = rest % shape[d];
      rest /= shape[d];
    }
    all.push_back(std::move(index));
  }
  return all;
}

size_t Offset(const Dims& shape, const Dims& index) {
  int64_t offset = 0;
  for (size_t d = 0; d < shape.size(); ++d) offset = offset * shape[d] + index[d];
  return static_cast<size_t>(offset);
}

// The index in an operand of shape `from` that stands at `index` where shapes are broadcast.
Dims Stretched(const Dims& from, const Dims& index) {
  Dims result(from.size());
  for (size_t d = 0; d < from.size(); ++d) {
    result[d] = from[d] == 1 ? 0 : index[index.size() - from.size() + d];
  }
  return result;
}

bool BroadcastShapes(const Dims& a, const Dims& b, Dims* out) {
  const size_t rank = std::max(a.size(), b.size());
  out->assign(rank, 1);
  for (size_t d = 0; d < rank; ++d) {
    const int64_t x = d < rank - a.size() ? 1 : a[d - (rank - a.size())];
    const int64_t y = d < rank - b.size() ? 1 : b[d - (rank - b.size())];
    if (x != y && x != 1 && y != 1) return false;
    (*out)[d] = x == 1 ? y : x;
  }
  return true;
}

}  // namespace

class Evaluator::Graph {
 public:
  absl::Status Add(const Program& program, int statement) {
    const Statement& s = program.statements[static_cast<size_t>(statement)];
    arrays_.resize(std::max(arrays_.size(), program.values.size()));
    const auto result = Results(program, s);
    if (!result.ok()) return result.status();
    size_t i = 0;
    for (const Call& call : s.calls) {
      for (const int out : call.out) {
        const Value& value = program.value(out);
        const Array& array = (*result)[i++];
        if (!value.absent && (array.shape != value.shape || array.dtype != value.dtype)) {
          return No(absl::StrCat("v", out, " is another type"));
        }
        for (const int node : array.nodes) {
          if (std::isnan(nodes_[static_cast<size_t>(node)].value)) return No("not a number");
        }
      }
    }
    i = 0;
    for (const Call& call : s.calls) {
      for (const int out : call.out) arrays_[static_cast<size_t>(out)] = (*result)[i++];
    }
    return absl::OkStatus();
  }

  Numbers Of(int value) const {
    Numbers numbers;
    for (const int node : arrays_[static_cast<size_t>(value)].nodes) {
      numbers.values.push_back(nodes_[static_cast<size_t>(node)].value);
      numbers.errors.push_back(nodes_[static_cast<size_t>(node)].error);
    }
    return numbers;
  }

  Mark Now() const { return {nodes_.size(), edges_.size()}; }
  void Undo(const Mark& mark) {
    nodes_.resize(mark.nodes);
    edges_.resize(mark.edges);
  }
  size_t size() const { return nodes_.size(); }

 private:
  // --- Scalars ----------------------------------------------------------------------------------

  const Node& at(int n) const { return nodes_[static_cast<size_t>(n)]; }

  int Push(Node node, const Edges& edges) {
    node.first = static_cast<uint32_t>(edges_.size());
    node.count = static_cast<uint32_t>(edges.size());
    for (const Edge& edge : edges) {
      edges_.push_back(edge);
    }
    if (IsFloating(node.dtype) &&
        std::fabs(node.value) + node.error > PrecisionOf(node.dtype).max) {
      node.error = kUnknown;
    }
    if (std::isnan(node.error)) node.error = kUnknown;
    nodes_.push_back(node);
    return static_cast<int>(nodes_.size()) - 1;
  }

  int Constant(DType dtype, double value, double error = 0) {
    Node node;
    node.value = value;
    node.error = error;
    node.dtype = dtype;
    return Push(node, {});
  }
  int Detached(int n) { return Constant(at(n).dtype, at(n).value, at(n).error); }

  // What `dtype` rounds off of a sum of `count` exact terms, of that size all together, that are
  // whole multiples of `granule` (0: not exact).
  static double Rounding(DType dtype, double value, double granule, size_t count, double terms,
                         bool fused) {
    const Precision p = PrecisionOf(dtype);
    const int bits = fused ? p.accumulator_bits : p.bits;
    // No partial sum needs more bits than there are.
    if (terms == 0 ||
        (granule > 0 && terms <= std::ldexp(granule, bits) && Representable(p, value))) {
      return 0;
    }
    const double accumulating = fused ? std::ldexp(1, 1 - p.accumulator_bits) : p.eps;
    return p.eps * std::fabs(value) + accumulating * static_cast<double>(count) * terms + p.tiny;
  }

  // The sum of factor times node. `fused`: added up in the accumulator's precision.
  int Linear(DType dtype, const Edges& edges, bool fused = true) {
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
  // The same number, another node.
  int Copy(int n) {
    Node node = at(n);
    node.kind = Kind::kLinear;
    return Push(node, {{n, 1}});
  }
  // One of the inputs, or of what is not looked at, that passes its gradient on in shares.
  int Chosen(DType dtype, double value, double error, const Edges& shares) {
    Node node;
    node.kind = Kind::kLinear;
    node.dtype = dtype;
    node.value = value;
    node.error = error;
    return Push(node, shares);
  }

  int Mul(DType dtype, int a, int b) {
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
  int Div(DType dtype, int a, int b) {
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
  int Apply1(Function f, DType dtype, int a) {
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
  int Power(DType dtype, int a, int b) {
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

  // --- Gradients --------------------------------------------------------------------------------

  // Of the sum of root times seed, for each of `wanted`.
  std::vector<int> Reverse(const std::vector<std::pair<int, int>>& roots,
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

  int Derivative(Function f, DType dtype, int x, int y) {
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
        return Linear(dtype,
                      {{Apply1(Function::kExp, dtype, Linear(dtype, {{Mul(dtype, x, x), -1}})),
                        2 / std::sqrt(std::acos(-1.0))}});
    }
    return x;
  }

  // --- Elements ---------------------------------------------------------------------------------

  static constexpr double kNoShare = std::numeric_limits<double>::quiet_NaN();

  // The greatest (sign 1) or least (-1) of some, whose holders share the gradient evenly.
  int Extreme(DType dtype, const std::vector<int>& of, double sign) {
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

  // 1 yes, 0 no, unknown where it cannot be told.
  int Bool(double value, bool known) { return Constant(DType::kBool, value, known ? 0 : kUnknown); }
  int Compared(int a, int b, bool equal) {
    const double gap = at(b).value - at(a).value;
    const double error = at(a).error + at(b).error;
    const bool known = error == 0 || std::fabs(gap) > error;
    return Bool(equal ? gap == 0 : gap > 0, known);
  }

  int Integer(DType dtype, double error, uint64_t bits) {
    return Constant(dtype, static_cast<double>(Wrapped(dtype, bits)), error);
  }
  static uint64_t Bits(const Node& n) {
    return static_cast<uint64_t>(static_cast<int64_t>(n.value));
  }
  static double Worst(const Node& a, const Node& b) { return std::max(a.error, b.error); }

  absl::StatusOr<int> Binary(Op op, DType dtype, int a, int b) {
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

  absl::StatusOr<int> Unary(const Statement& s, DType dtype, int a) {
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

  static double SignShare(const Node& x) {
    if (x.error > 0 && std::fabs(x.value) <= x.error) return kNoShare;
    return x.value > 0 ? 1 : x.value < 0 ? -1 : 0;
  }

  int Converted(int a, DType to) {
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

  // A reduction of elements of several ranks or indices.
  absl::StatusOr<int> Reduced(Reduction reduction, DType dtype, const std::vector<int>& of,
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

  // --- Tensors ----------------------------------------------------------------------------------

  using Arrays = std::vector<Array>;

  static absl::Status Append(const absl::StatusOr<int>& node, std::vector<int>* nodes) {
    if (node.ok()) nodes->push_back(*node);
    return node.status();
  }

  Array Mapped(const Array& x, const Dims& shape, const std::function<Dims(const Dims&)>& from) {
    Array result{x.dtype, shape, {}};
    for (const Dims& index : IndicesOf(shape)) {
      result.nodes.push_back(Copy(x.nodes[Offset(x.shape, from(index))]));
    }
    return result;
  }
  Array Copied(const Array& x) {
    Array result{x.dtype, x.shape, {}};
    for (const int n : x.nodes) result.nodes.push_back(Copy(n));
    return result;
  }
  Array DetachedArray(const Array& x) {
    Array result{x.dtype, x.shape, {}};
    for (const int n : x.nodes) result.nodes.push_back(Detached(n));
    return result;
  }
  Array ZerosOf(DType dtype, const Dims& shape) {
    Array result{dtype, shape, {}};
    for (int64_t i = 0; i < Elements(shape); ++i) result.nodes.push_back(Constant(dtype, 0));
    return result;
  }
  Array Counts(const std::vector<int64_t>& counts) {
    Array result{DType::kI64, {static_cast<int64_t>(counts.size())}, {}};
    for (const int64_t n : counts) {
      result.nodes.push_back(Constant(DType::kI64, static_cast<double>(n)));
    }
    return result;
  }

  static int64_t Axis(int64_t axis, const Dims& shape) {
    return axis < 0 ? axis + static_cast<int64_t>(shape.size()) : axis;
  }
  Array Sliced(const Array& x, int64_t axis, int64_t begin, int64_t end) {
    Dims shape = x.shape;
    shape[static_cast<size_t>(axis)] = end - begin;
    return Mapped(x, shape, [&](Dims index) {
      index[static_cast<size_t>(axis)] += begin;
      return index;
    });
  }
  // Pieces of these rows along an axis.
  absl::StatusOr<Arrays> Split(const Array& x, int64_t axis, std::vector<int64_t> rows,
                               size_t pieces) {
    axis = Axis(axis, x.shape);
    if (axis < 0 || axis >= static_cast<int64_t>(x.shape.size())) return No("split: that axis");
    const int64_t size = x.shape[static_cast<size_t>(axis)];
    if (rows.empty()) {
      if (size % static_cast<int64_t>(pieces) != 0) return No("split: not evenly");
      rows.assign(pieces, size / static_cast<int64_t>(pieces));
    }
    int64_t at = 0;
    Arrays result;
    for (const int64_t n : rows) {
      if (n < 0 || at + n > size) return No("split: rows");
      result.push_back(Sliced(x, axis, at, at + n));
      at += n;
    }
    if (at != size || rows.size() != pieces) return No("split: rows");
    return result;
  }
  absl::StatusOr<Array> Joined(const Arrays& pieces, int64_t axis) {
    if (pieces.empty()) return No("join: nothing");
    Dims shape = pieces[0].shape;
    if (shape.empty()) shape = {1};
    axis = Axis(axis, shape);
    if (axis < 0 || axis >= static_cast<int64_t>(shape.size())) return No("join: that axis");
    const auto a = static_cast<size_t>(axis);
    shape[a] = 0;
    std::vector<std::pair<const Array*, int64_t>> owner;  // by row
    for (const Array& piece : pieces) {
      Dims mine = piece.shape.empty() ? Dims{1} : piece.shape;
      if (mine.size() != shape.size() || piece.dtype != pieces[0].dtype) return No("join: types");
      const int64_t rows = mine[a];
      for (int64_t r = 0; r < rows; ++r) owner.emplace_back(&piece, r);
      mine[a] = shape[a];
      if (mine != shape) return No("join: shapes");
      shape[a] += rows;
    }
    Array result{pieces[0].dtype, shape, {}};
    for (Dims index : IndicesOf(shape)) {
      const auto& [piece, row] = owner[static_cast<size_t>(index[a])];
      index[a] = row;
      result.nodes.push_back(
          Copy(piece->nodes[piece->shape.empty() ? 0 : Offset(piece->shape, index)]));
    }
    return result;
  }

  absl::StatusOr<std::vector<int64_t>> Whole(const Array& x) const {
    std::vector<int64_t> result;
    for (const int n : x.nodes) {
      if (at(n).error != 0) return No("indices that are not known");
      result.push_back(static_cast<int64_t>(at(n).value));
    }
    return result;
  }

  absl::StatusOr<Array> Local(const Statement& s, const Arrays& in, const Value& out) {
    const DType dtype = in[0].dtype;
    const auto axis_of = [&](size_t i) { return Axis(s.ints[i], in[0].shape); };
    const auto has_axis = [&](int64_t axis, const Dims& shape) {
      return axis >= 0 && axis < static_cast<int64_t>(shape.size());
    };
    Array result{out.dtype, {}, {}};
    switch (s.op) {
      case Op::kAdd:
      case Op::kSub:
      case Op::kMul:
      case Op::kDiv:
      case Op::kMaximum:
      case Op::kMinimum:
      case Op::kPow:
      case Op::kLess:
      case Op::kEqual:
      case Op::kLogicalAnd:
        if (in[1].dtype != dtype || !BroadcastShapes(in[0].shape, in[1].shape, &result.shape)) {
          return No("two of different types");
        }
        for (const Dims& index : IndicesOf(result.shape)) {
          const int a = in[0].nodes[Offset(in[0].shape, Stretched(in[0].shape, index))];
          const int b = in[1].nodes[Offset(in[1].shape, Stretched(in[1].shape, index))];
          CHORUS_RETURN_IF_ERROR(Append(Binary(s.op, dtype, a, b), &result.nodes));
        }
        return result;
      case Op::kWhere: {
        Dims shape;
        if (in[0].dtype != DType::kBool || in[1].dtype != in[2].dtype ||
            !BroadcastShapes(in[1].shape, in[2].shape, &shape) ||
            !BroadcastShapes(in[0].shape, shape, &result.shape)) {
          return No("where: types");
        }
        for (const Dims& index : IndicesOf(result.shape)) {
          const auto pick = [&](size_t i) {
            return in[i].nodes[Offset(in[i].shape, Stretched(in[i].shape, index))];
          };
          const Node condition = at(pick(0));
          const int a = pick(1);
          const int b = pick(2);
          const int taken = condition.value != 0 ? a : b;
          if (condition.error == 0) {
            result.nodes.push_back(
                Chosen(in[1].dtype, at(taken).value, at(taken).error, {{taken, 1}}));
          } else {
            result.nodes.push_back(
                Chosen(in[1].dtype, at(taken).value, kUnknown, {{a, kNoShare}, {b, kNoShare}}));
          }
        }
        return result;
      }
      case Op::kCast:
        result.shape = in[0].shape;
        for (const int n : in[0].nodes) result.nodes.push_back(Converted(n, out.dtype));
        return result;
      case Op::kSum:
      case Op::kMean:
      case Op::kMax:
      case Op::kMin:
      case Op::kProduct:
      case Op::kArgMax:
        return Reduction1(s, in[0], out);
      case Op::kExpand: {
        const Dims& shape = s.ints;
        Dims check;
        if (!BroadcastShapes(in[0].shape, shape, &check) || check != shape) return No("expand");
        return Mapped(in[0], shape, [&](const Dims& p) { return Stretched(in[0].shape, p); });
      }
      case Op::kReshape:
        if (Elements(s.ints) != Elements(in[0].shape)) return No("reshape");
        result = Copied(in[0]);
        result.shape = s.ints;
        return result;
      case Op::kTranspose: {
        if (s.ints.size() != in[0].shape.size()) return No("transpose");
        Dims shape;
        for (const int64_t p : s.ints) {
          if (!has_axis(p, in[0].shape)) return No("transpose");
          shape.push_back(in[0].shape[static_cast<size_t>(p)]);
        }
        return Mapped(in[0], shape, [&](const Dims& index) {
          Dims from(index.size());
          for (size_t d = 0; d < index.size(); ++d) from[static_cast<size_t>(s.ints[d])] = index[d];
          return from;
        });
      }
      case Op::kSlice: {
        const int64_t axis = axis_of(0);
        if (!has_axis(axis, in[0].shape) || s.ints[1] < 0 || s.ints[2] < s.ints[1] ||
            s.ints[2] > in[0].shape[static_cast<size_t>(axis)]) {
          return No("slice");
        }
        return Sliced(in[0], axis, s.ints[1], s.ints[2]);
      }
      case Op::kConcat:
        if (in[0].shape.empty()) return No("concat");
        return Joined(in, s.ints[0]);
      case Op::kMatMul:
        return MatMul(in[0], in[1]);
      case Op::kSoftmax:
      case Op::kLogSoftmax: {
        const int64_t axis = axis_of(0);
        if (!has_axis(axis, in[0].shape) || !IsFloating(dtype)) return No("softmax");
        result = in[0];
        ForEachLine(in[0].shape, axis, [&](const std::vector<size_t>& line) {
          std::vector<int> x;
          for (const size_t i : line) x.push_back(in[0].nodes[i]);
          const std::vector<int> y = Softmax(dtype, x, s.op == Op::kLogSoftmax);
          for (size_t i = 0; i < line.size(); ++i) result.nodes[line[i]] = y[i];
        });
        return result;
      }
      case Op::kCrossEntropy: {
        if (in[0].shape.empty() || !IsFloating(dtype)) return No("cross_entropy");
        Dims rows = in[0].shape;
        rows.pop_back();
        if (rows != in[1].shape || in[0].shape.back() == 0) return No("cross_entropy: labels");
        CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> labels, Whole(in[1]));
        result.shape = rows;
        size_t row = 0;
        bool wrong = false;
        ForEachLine(in[0].shape, static_cast<int64_t>(in[0].shape.size()) - 1,
                    [&](const std::vector<size_t>& line) {
                      std::vector<int> x;
                      for (const size_t i : line) x.push_back(in[0].nodes[i]);
                      const int64_t label = labels[row++];
                      wrong = wrong || label < 0 || label >= static_cast<int64_t>(x.size());
                      if (wrong) return;
                      const std::vector<int> y = Softmax(dtype, x, true);
                      result.nodes.push_back(Linear(dtype, {{y[static_cast<size_t>(label)], -1}}));
                    });
        if (wrong) return No("cross_entropy: a label out of range");
        return result;
      }
      case Op::kOneHot: {
        CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> indices, Whole(in[0]));
        result.shape = in[0].shape;
        result.shape.push_back(s.ints[0]);
        for (const int64_t i : indices) {
          if (i < 0 || i >= s.ints[0]) return No("one_hot: an index out of range");
          for (int64_t k = 0; k < s.ints[0]; ++k) {
            result.nodes.push_back(Constant(out.dtype, k == i ? 1 : 0));
          }
        }
        return result;
      }
      case Op::kTake: {
        const int64_t axis = axis_of(0);
        if (!has_axis(axis, in[0].shape)) return No("take");
        CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> indices, Whole(in[1]));
        const auto a = static_cast<size_t>(axis);
        for (const int64_t i : indices) {
          if (i < 0 || i >= in[0].shape[a]) return No("take: an index out of range");
        }
        Dims shape(in[0].shape.begin(), in[0].shape.begin() + axis);
        shape.insert(shape.end(), in[1].shape.begin(), in[1].shape.end());
        shape.insert(shape.end(), in[0].shape.begin() + axis + 1, in[0].shape.end());
        const size_t n = in[1].shape.size();
        return Mapped(in[0], shape, [&](const Dims& index) {
          const Dims at(index.begin() + axis, index.begin() + axis + static_cast<int64_t>(n));
          Dims from(index.begin(), index.begin() + axis);
          from.push_back(indices[Offset(in[1].shape, at)]);
          from.insert(from.end(), index.begin() + axis + static_cast<int64_t>(n), index.end());
          return from;
        });
      }
      case Op::kScatterAdd: {
        const int64_t size = s.ints[0];
        const int64_t axis = s.ints[1];
        CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> indices, Whole(in[1]));
        for (const int64_t i : indices) {
          if (i < 0 || i >= size) return No("scatter_add: an index out of range");
        }
        const auto n = static_cast<int64_t>(in[1].shape.size());
        if (axis < 0 || axis + n > static_cast<int64_t>(in[0].shape.size()))
          return No("scatter_add");
        if (Dims(in[0].shape.begin() + axis, in[0].shape.begin() + axis + n) != in[1].shape) {
          return No("scatter_add");
        }
        result.shape.assign(in[0].shape.begin(), in[0].shape.begin() + axis);
        result.shape.push_back(size);
        result.shape.insert(result.shape.end(), in[0].shape.begin() + axis + n, in[0].shape.end());
        std::vector<Edges> sums(static_cast<size_t>(Elements(result.shape)));
        size_t i = 0;
        for (const Dims& index : IndicesOf(in[0].shape)) {
          const Dims at(index.begin() + axis, index.begin() + axis + n);
          Dims to(index.begin(), index.begin() + axis);
          to.push_back(indices[Offset(in[1].shape, at)]);
          to.insert(to.end(), index.begin() + axis + n, index.end());
          sums[Offset(result.shape, to)].push_back({in[0].nodes[i++], 1});
        }
        return Summed(result, sums);
      }
      case Op::kTakeAlong: {
        const int64_t axis = axis_of(0);
        Dims check = in[1].shape;
        if (!has_axis(axis, in[0].shape) || check.size() != in[0].shape.size()) {
          return No("take_along");
        }
        const auto a = static_cast<size_t>(axis);
        check[a] = in[0].shape[a];
        if (check != in[0].shape) return No("take_along");
        CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> indices, Whole(in[1]));
        for (const int64_t i : indices) {
          if (i < 0 || i >= in[0].shape[a]) return No("take_along: an index out of range");
        }
        return Mapped(in[0], in[1].shape, [&](Dims index) {
          index[a] = indices[Offset(in[1].shape, index)];
          return index;
        });
      }
      case Op::kScatterAddAlong: {
        const int64_t size = s.ints[0];
        const int64_t axis = s.ints[1];
        if (!has_axis(axis, in[0].shape) || in[1].shape != in[0].shape)
          return No("scatter_add_along");
        CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> indices, Whole(in[1]));
        for (const int64_t i : indices) {
          if (i < 0 || i >= size) return No("scatter_add_along: an index out of range");
        }
        result.shape = in[0].shape;
        result.shape[static_cast<size_t>(axis)] = size;
        std::vector<Edges> sums(static_cast<size_t>(Elements(result.shape)));
        size_t i = 0;
        for (Dims index : IndicesOf(in[0].shape)) {
          index[static_cast<size_t>(axis)] = indices[i];
          sums[Offset(result.shape, index)].push_back({in[0].nodes[i++], 1});
        }
        return Summed(result, sums);
      }
      default:
        result.shape = in[0].shape;
        for (const int n : in[0].nodes)
          CHORUS_RETURN_IF_ERROR(Append(Unary(s, dtype, n), &result.nodes));
        return result;
    }
  }

  absl::StatusOr<Array> Summed(Array result, const std::vector<Edges>& sums) {
    for (const Edges& sum : sums) {
      if (IsFloating(result.dtype)) {
        result.nodes.push_back(Linear(result.dtype, sum));
        continue;
      }
      uint64_t bits = 0;
      double error = 0;
      for (const Edge& edge : sum) {
        bits += Bits(at(edge.node));
        error = std::max(error, at(edge.node).error);
      }
      result.nodes.push_back(Integer(result.dtype, error, bits));
    }
    return result;
  }

  static void ForEachLine(const Dims& shape, int64_t axis,
                          const std::function<void(const std::vector<size_t>&)>& body) {
    Dims rest = shape;
    rest[static_cast<size_t>(axis)] = 1;
    for (Dims index : IndicesOf(rest)) {
      std::vector<size_t> line;
      for (int64_t i = 0; i < shape[static_cast<size_t>(axis)]; ++i) {
        index[static_cast<size_t>(axis)] = i;
        line.push_back(Offset(shape, index));
      }
      body(line);
    }
  }

  std::vector<int> Softmax(DType dtype, const std::vector<int>& x, bool logarithm) {
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

  absl::StatusOr<Array> Reduction1(const Statement& s, const Array& x, const Value& out) {
    const DType dtype = x.dtype;
    std::vector<bool> reduced(x.shape.size(), s.number == 1);
    if (s.number != 1) {
      for (const int64_t axis : s.ints) {
        const int64_t a = Axis(axis, x.shape);
        if (a < 0 || a >= static_cast<int64_t>(x.shape.size())) return No("reduce: axis");
        if (reduced[static_cast<size_t>(a)]) return No("reduce: axis twice");
        reduced[static_cast<size_t>(a)] = true;
      }
    }
    Dims kept;
    Array result{out.dtype, {}, {}};
    for (size_t d = 0; d < x.shape.size(); ++d) {
      kept.push_back(reduced[d] ? 1 : x.shape[d]);
      if (!reduced[d] || s.flag) result.shape.push_back(kept.back());
    }
    std::vector<std::vector<int>> sets(static_cast<size_t>(Elements(kept)));
    size_t i = 0;
    for (Dims index : IndicesOf(x.shape)) {
      for (size_t d = 0; d < index.size(); ++d) {
        if (reduced[d]) index[d] = 0;
      }
      sets[Offset(kept, index)].push_back(x.nodes[i++]);
    }
    if (dtype == DType::kBool && s.op != Op::kArgMax) return No("reduce: bool");
    for (const std::vector<int>& set : sets) {
      if (s.op == Op::kArgMax) {
        if (set.empty()) return No("arg_max of nothing");
        size_t best = 0;
        for (size_t k = 1; k < set.size(); ++k) {
          if (at(set[k]).value > at(set[best]).value) best = k;
        }
        bool known = true;
        for (size_t k = 0; k < set.size(); ++k) {
          const double error = at(set[k]).error + at(set[best]).error;
          if (k != best && error > 0 && at(set[best]).value - at(set[k]).value <= error)
            known = false;
        }
        result.nodes.push_back(
            Constant(DType::kI64, static_cast<double>(best), known ? 0 : kUnknown));
        continue;
      }
      if (s.op == Op::kMean && (set.empty() || !IsFloating(dtype))) return No("mean of nothing");
      if (set.empty()) {
        if (s.op == Op::kMax || s.op == Op::kMin) return No("max of nothing");
        result.nodes.push_back(Constant(dtype, s.op == Op::kProduct ? 1 : 0));
        continue;
      }
      const Reduction reduction = s.op == Op::kSum    ? Reduction::kSum
                                  : s.op == Op::kMean ? Reduction::kAvg
                                  : s.op == Op::kMax  ? Reduction::kMax
                                  : s.op == Op::kMin  ? Reduction::kMin
                                                      : Reduction::kProduct;
      CHORUS_RETURN_IF_ERROR(Append(Reduced(reduction, dtype, set, {}), &result.nodes));
    }
    return result;
  }

  absl::StatusOr<Array> MatMul(const Array& a, const Array& b) {
    if (a.shape.size() < 2 || b.shape.size() < 2 || a.dtype != b.dtype) return No("matmul");
    const int64_t m = a.shape[a.shape.size() - 2];
    const int64_t k = a.shape.back();
    const int64_t n = b.shape.back();
    if (b.shape[b.shape.size() - 2] != k) return No("matmul");
    const Dims left(a.shape.begin(), a.shape.end() - 2);
    const Dims right(b.shape.begin(), b.shape.end() - 2);
    Array result{a.dtype, {}, {}};
    if (!BroadcastShapes(left, right, &result.shape)) return No("matmul");
    const Dims leading = result.shape;
    result.shape.push_back(m);
    result.shape.push_back(n);
    for (const Dims& index : IndicesOf(leading)) {
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          Edges sum;
          uint64_t bits = 0;
          for (int64_t l = 0; l < k; ++l) {
            Dims x = Stretched(left, index);
            Dims y = Stretched(right, index);
            x.insert(x.end(), {i, l});
            y.insert(y.end(), {l, j});
            const int p = a.nodes[Offset(a.shape, x)];
            const int q = b.nodes[Offset(b.shape, y)];
            if (IsFloating(a.dtype)) {
              sum.push_back({Mul(a.dtype, p, q), 1});
            } else {
              bits += Bits(at(p)) * Bits(at(q));
            }
          }
          result.nodes.push_back(IsFloating(a.dtype) ? Linear(a.dtype, sum)
                                                     : Integer(a.dtype, 0, bits));
        }
      }
    }
    return result;
  }

  // --- Statements -------------------------------------------------------------------------------

  // Of all calls, in their order.
  absl::StatusOr<Arrays> Results(const Program& program, const Statement& s) {
    if (s.op == Op::kGradient) return Gradients(program, s);
    std::vector<Arrays> in;
    for (const Call& call : s.calls) {
      in.emplace_back();
      for (const int v : call.in) {
        const Array& x = arrays_[static_cast<size_t>(v)];
        if (program.value(v).absent) return No("an absent operand");
        if (static_cast<int64_t>(x.nodes.size()) != Elements(program.value(v).shape)) {
          return No("an operand that nothing gives");
        }
        in.back().push_back(call.no_grad ? DetachedArray(x) : x);
      }
    }
    Arrays result;
    if (s.op == Op::kLeaf) {
      const Value& value = program.value(s.calls[0].out[0]);
      Array leaf{value.dtype, value.shape, {}};
      if (static_cast<int64_t>(s.data.size()) != Elements(value.shape)) return No("leaf");
      for (const double x : s.data) {
        leaf.nodes.push_back(Constant(value.dtype, x));
      }
      return Arrays{leaf};
    }
    if (IsLocal(s.op)) {
      CHORUS_ASSIGN_OR_RETURN(const Array y, Local(s, in[0], program.value(s.calls[0].out[0])));
      result = {y};
    } else {
      absl::StatusOr<Arrays> y =
          IsOfDevices(s.op) ? OfDevices(program, s, in[0]) : Collective(program, s, in);
      if (!y.ok()) return y.status();
      result = *std::move(y);
    }
    size_t i = 0;
    for (const Call& call : s.calls) {
      for (size_t k = 0; k < call.out.size(); ++k, ++i) {
        if (i >= result.size()) return No("fewer results");
        if (call.no_grad) result[i] = DetachedArray(result[i]);
      }
    }
    if (i != result.size()) return No("more results");
    return result;
  }

  absl::StatusOr<Arrays> Gradients(const Program& program, const Statement& s) {
    std::vector<std::pair<int, int>> roots;
    std::vector<int> wanted;
    for (const Call& call : s.calls) {
      const size_t n = (call.in.size() - static_cast<size_t>(call.wanted)) / 2;
      for (size_t i = 0; i < n; ++i) {
        const Array& root = arrays_[static_cast<size_t>(call.in[i])];
        if (program.value(call.in[i]).absent) continue;
        const int seed = call.in[n + i];
        if (seed >= 0 && arrays_[static_cast<size_t>(seed)].shape != root.shape) return No("seed");
        for (size_t e = 0; e < root.nodes.size(); ++e) {
          const int with =
              seed < 0 ? Constant(root.dtype, 1) : arrays_[static_cast<size_t>(seed)].nodes[e];
          roots.emplace_back(root.nodes[e], with);
        }
      }
      for (size_t i = 2 * n; i < call.in.size(); ++i) {
        const Array& x = arrays_[static_cast<size_t>(call.in[i])];
        wanted.insert(wanted.end(), x.nodes.begin(), x.nodes.end());
      }
    }
    const std::vector<int> gradients = Reverse(roots, wanted);
    if (nodes_.size() > kMostNodes) return No("too large");
    Arrays result;
    size_t next = 0;
    for (const Call& call : s.calls) {
      for (size_t i = call.in.size() - static_cast<size_t>(call.wanted); i < call.in.size(); ++i) {
        Array g = arrays_[static_cast<size_t>(call.in[i])];
        for (int& node : g.nodes) {
          node = s.create ? gradients[next] : Detached(gradients[next]);
          ++next;
        }
        result.push_back(std::move(g));
      }
    }
    return result;
  }

  absl::StatusOr<Arrays> OfDevices(const Program& program, const Statement& s, const Arrays& in) {
    const GroupOf& group = program.groups[static_cast<size_t>(s.group)];
    Arrays result;
    switch (s.op) {
      case Op::kDevicesBroadcast:
        for (size_t p = 0; p < group.ranks.size(); ++p) result.push_back(Copied(in[0]));
        return result;
      case Op::kDevicesReduceAdd: {
        CHORUS_ASSIGN_OR_RETURN(const Array sum, Reduce1(Reduction::kSum, in, {}));
        return Arrays{sum};
      }
      case Op::kDevicesScatter: {
        std::vector<int64_t> sizes = s.ints;
        if (sizes.empty()) {
          if (in[0].shape.empty()) return No("scatter");
          const auto members = static_cast<int64_t>(group.ranks.size());
          const int64_t rows = in[0].shape[static_cast<size_t>(Axis(s.dim, in[0].shape))];
          if (rows == 0) {
            sizes.assign(group.ranks.size(), 0);
          } else {
            const int64_t chunk = (rows + members - 1) / members;
            for (int64_t at = 0; at < rows; at += chunk)
              sizes.push_back(std::min(chunk, rows - at));
          }
        }
        return Split(in[0], s.dim, sizes, sizes.size());
      }
      default: {
        CHORUS_ASSIGN_OR_RETURN(const Array all, Joined(in, s.dim));
        return Arrays{all};
      }
    }
  }

  absl::StatusOr<Array> Reduce1(Reduction reduction, const Arrays& of,
                                const std::vector<double>& factors) {
    Array result{of[0].dtype, of[0].shape, {}};
    for (const Array& x : of) {
      if (x.shape != of[0].shape || x.dtype != of[0].dtype) return No("reduce: types");
    }
    for (size_t e = 0; e < of[0].nodes.size(); ++e) {
      std::vector<int> elements;
      for (const Array& x : of) elements.push_back(x.nodes[e]);
      CHORUS_RETURN_IF_ERROR(
          Append(Reduced(reduction, of[0].dtype, elements, factors), &result.nodes));
    }
    return result;
  }

  // With the rows of a tensor of counts: the pieces that lie one after the other from row 0 on.
  absl::StatusOr<Arrays> RaggedPieces(const Array& x, const Array& counts) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, Whole(counts));
    if (x.shape.empty()) return No("ragged");
    int64_t at = 0;
    Arrays pieces;
    for (const int64_t n : rows) {
      if (n < 0 || at + n > x.shape[0]) return No("ragged: rows");
      pieces.push_back(Sliced(x, 0, at, at + n));
      at += n;
    }
    return pieces;
  }
  absl::StatusOr<Arrays> RaggedResult(const Arrays& pieces, int64_t max_rows) {
    std::vector<int64_t> counts;
    int64_t rows = 0;
    for (const Array& piece : pieces) {
      counts.push_back(piece.shape[0]);
      rows += piece.shape[0];
    }
    if (rows > max_rows) return No("ragged: too many rows");
    Arrays padded = pieces;
    Dims rest = pieces[0].shape;
    rest[0] = max_rows - rows;
    padded.push_back(ZerosOf(pieces[0].dtype, rest));
    CHORUS_ASSIGN_OR_RETURN(const Array values, Joined(padded, 0));
    return Arrays{values, Counts(counts)};
  }

  absl::StatusOr<Arrays> Collective(const Program& program, const Statement& s,
                                    const std::vector<Arrays>& in) {
    const GroupOf& group = program.groups[static_cast<size_t>(s.group)];
    const size_t size = group.ranks.size();
    const auto root = static_cast<size_t>(s.root);
    const Array absent;
    Arrays result;
    std::vector<double> factors;
    for (const Call& call : s.calls) factors.push_back(call.factor);
    const auto column = [&](size_t i) {
      Arrays of;
      for (const Arrays& x : in) of.push_back(x[i]);
      return of;
    };
    const auto rows = [&](size_t from, size_t to) { return s.rows[from * size + to]; };
    // Of ragged forms each result has room of its own.
    const auto max_rows = [&](size_t p) {
      return program.value(s.calls[p].out[0]).shape.empty()
                 ? 0
                 : program.value(s.calls[p].out[0]).shape[0];
    };
    if (s.op == Op::kTransfer) return Arrays{absent, Copied(in[0][0])};
    if (s.op == Op::kBarrier) return Arrays(size, absent);
    if (s.calls.size() != size) return No("calls");
    // Pieces from each member for each, by [from][to], where it is that kind.
    std::vector<Arrays> pieces(size);
    switch (s.op) {
      case Op::kAllReduce:
      case Op::kReduce: {
        CHORUS_ASSIGN_OR_RETURN(const Array y, Reduce1(s.reduction, column(0), factors));
        for (size_t p = 0; p < size; ++p) {
          result.push_back(s.op == Op::kReduce && p != root ? absent : Copied(y));
        }
        return result;
      }
      case Op::kBroadcast:
        for (size_t p = 0; p < size; ++p) {
          if (in[p][0].shape != in[root][0].shape) return No("broadcast");
          result.push_back(Copied(in[root][0]));
        }
        return result;
      case Op::kAllGather:
      case Op::kGather:
      case Op::kAllGatherIntoTensor:
      case Op::kGatherIntoTensor:
        for (size_t p = 0; p < size; ++p) {
          if ((s.op == Op::kGather || s.op == Op::kGatherIntoTensor) && p != root) {
            result.push_back(absent);
          } else if (s.op == Op::kAllGather || s.op == Op::kGather) {
            for (const Array& x : column(0)) result.push_back(Copied(x));
          } else {
            CHORUS_ASSIGN_OR_RETURN(const Array all, Joined(column(0), s.dim));
            result.push_back(all);
          }
        }
        return result;
      case Op::kScatter:
        for (size_t p = 0; p < size; ++p) result.push_back(Copied(in[root][p]));
        return result;
      case Op::kScatterTensor:
        return Split(in[root][0], s.dim, s.rows, size);
      case Op::kReduceScatter:
      case Op::kReduceScatterTensor:
        for (size_t p = 0; p < size; ++p) {
          if (s.op == Op::kReduceScatter) {
            pieces[p] = in[p];
          } else {
            CHORUS_ASSIGN_OR_RETURN(const Arrays split, Split(in[p][0], s.dim, s.rows, size));
            pieces[p] = split;
          }
        }
        for (size_t p = 0; p < size; ++p) {
          Arrays of;
          for (size_t from = 0; from < size; ++from) of.push_back(pieces[from][p]);
          CHORUS_ASSIGN_OR_RETURN(const Array y, Reduce1(s.reduction, of, factors));
          result.push_back(y);
        }
        return result;
      case Op::kAllToAll:
        for (size_t p = 0; p < size; ++p) {
          for (size_t from = 0; from < size; ++from) result.push_back(Copied(in[from][p]));
        }
        return result;
      case Op::kAllToAllSingle:
        for (size_t p = 0; p < size; ++p) {
          std::vector<int64_t> send;
          for (size_t to = 0; to < size && !s.rows.empty(); ++to) send.push_back(rows(p, to));
          CHORUS_ASSIGN_OR_RETURN(const Arrays split, Split(in[p][0], 0, send, size));
          pieces[p] = split;
        }
        for (size_t p = 0; p < size; ++p) {
          Arrays mine;
          for (size_t from = 0; from < size; ++from) mine.push_back(pieces[from][p]);
          CHORUS_ASSIGN_OR_RETURN(const Array y, Joined(mine, 0));
          result.push_back(y);
        }
        return result;
      case Op::kAllToAllRagged:
      case Op::kReduceScatterRagged:
        for (size_t p = 0; p < size; ++p) {
          CHORUS_ASSIGN_OR_RETURN(const Arrays split, RaggedPieces(in[p][0], in[p][1]));
          if (split.size() != size) return No("ragged: counts");
          pieces[p] = split;
        }
        for (size_t p = 0; p < size; ++p) {
          Arrays mine;
          for (size_t from = 0; from < size; ++from) mine.push_back(pieces[from][p]);
          if (s.op == Op::kReduceScatterRagged) {
            CHORUS_ASSIGN_OR_RETURN(const Array y, Reduce1(s.reduction, mine, factors));
            mine = {y};
          }
          CHORUS_ASSIGN_OR_RETURN(const Arrays y, RaggedResult(mine, max_rows(p)));
          result.insert(result.end(), y.begin(), y.end());
        }
        return result;
      case Op::kAllGatherRagged:
      case Op::kGatherRagged: {
        Arrays all;
        for (size_t p = 0; p < size; ++p) {
          CHORUS_ASSIGN_OR_RETURN(const Arrays split, RaggedPieces(in[p][0], in[p][1]));
          if (split.size() != 1) return No("ragged: count");
          all.push_back(split[0]);
        }
        for (size_t p = 0; p < size; ++p) {
          Arrays y = {absent, absent};
          if (s.op == Op::kAllGatherRagged || p == root) {
            CHORUS_ASSIGN_OR_RETURN(const Arrays got, RaggedResult(all, max_rows(p)));
            y = got;
          }
          result.insert(result.end(), y.begin(), y.end());
        }
        return result;
      }
      case Op::kScatterRagged: {
        CHORUS_ASSIGN_OR_RETURN(const Arrays split, RaggedPieces(in[root][0], in[root][1]));
        if (split.size() != size) return No("ragged: counts");
        for (size_t p = 0; p < size; ++p) {
          CHORUS_ASSIGN_OR_RETURN(const Arrays y, RaggedResult({split[p]}, max_rows(p)));
          result.insert(result.end(), y.begin(), y.end());
        }
        return result;
      }
      default:
        return No("no collective");
    }
  }

  std::vector<Node> nodes_;
  Edges edges_;
  std::vector<Array> arrays_;  // by value
};

Evaluator::Evaluator() : graph_(std::make_unique<Graph>()) {}
Evaluator::~Evaluator() = default;
absl::Status Evaluator::Add(const Program& program, int statement) {
  const Mark before = Now();
  const absl::Status status = graph_->Add(program, statement);
  if (!status.ok()) Undo(before);
  return status;
}
Numbers Evaluator::Of(int value) const { return graph_->Of(value); }
Evaluator::Mark Evaluator::Now() const { return graph_->Now(); }
void Evaluator::Undo(const Mark& mark) { graph_->Undo(mark); }
size_t Evaluator::size() const { return graph_->size(); }

absl::StatusOr<std::vector<Numbers>> Evaluate(const Program& program) {
  Evaluator evaluator;
  for (int s = 0; s < static_cast<int>(program.statements.size()); ++s) {
    const absl::Status status = evaluator.Add(program, s);
    if (!status.ok())
      return absl::InvalidArgumentError(absl::StrCat("statement ", s, ": ", status.message()));
  }
  std::vector<Numbers> result;
  for (int v = 0; v < static_cast<int>(program.values.size()); ++v) {
    result.push_back(evaluator.Of(v));
  }
  return result;
}

double RoundTo(DType dtype, double x) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<float>(x);
    case DType::kF16:
      return static_cast<float>(F16(static_cast<float>(x)));
    case DType::kBF16:
      return static_cast<float>(BF16(static_cast<float>(x)));
    default:
      return x;
  }
}

}  // namespace random_programs
}  // namespace chorus
