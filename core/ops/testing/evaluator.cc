#include "core/ops/testing/evaluator.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <tuple>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace testing {
namespace {

// What elements are computed in: half types in float, integers in 64 bits, so that they wrap when
// they are written back. bool is a byte here.
template <typename F>
auto DispatchWide(DType dtype, const F& f) {
  if (dtype == DType::kF64) return f(double());
  if (IsFloating(dtype)) return f(float());
  return f(int64_t());
}

template <typename W>
std::vector<W> Read(const Value& value) {
  return Dispatch(value.type.dtype, [&](auto t) {
    std::vector<W> wide;
    for (const auto element : Elements<decltype(t)>(value)) wide.push_back(static_cast<W>(element));
    return wide;
  });
}

// What rounding `x` to T gives, as something that T holds. Half types: by looking at the neighbours
// of one that is near.
template <typename T>
T Nearest(long double x) {
  if constexpr (std::is_arithmetic<T>::value) {
    return static_cast<T>(x);
  } else {
    // What comes after the largest stands for infinity.
    const auto distance = [x](T half) {
      const float value = static_cast<float>(half);
      const float beyond = std::is_same<T, F16>::value ? 0x1p16f : 0x1p127f;
      const long double scale = std::is_same<T, F16>::value ? 1 : 2;
      const long double at = std::isinf(value) ? scale * std::copysign(beyond, value)
                                               : static_cast<long double>(value);
      return std::abs(at - x);
    };
    T best(static_cast<float>(x));
    const T near = best;
    for (const int step : {-1, 1}) {
      T other = near;
      other.bits = static_cast<uint16_t>(other.bits + step);
      const bool tie = distance(other) == distance(best) && (best.bits & 1) != 0;
      if (distance(other) < distance(best) || tie) best = other;
    }
    return best;
  }
}

template <typename W>
Value Write(const TensorType& type, const std::vector<W>& wide) {
  return Dispatch(type.dtype, [&](auto t) {
    std::vector<decltype(t)> elements;
    for (const W element : wide) elements.push_back(static_cast<decltype(t)>(element));
    return MakeValue(type, elements);
  });
}

double Add(double a, double b) { return a + b; }
float Add(float a, float b) { return a + b; }
int64_t Add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
double Mul(double a, double b) { return a * b; }
float Mul(float a, float b) { return a * b; }
int64_t Mul(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
template <typename T>
T Neg(T a) {
  return Mul(a, static_cast<T>(-1));
}

using Index = std::vector<int64_t>;

// Calls `f` with each index of a tensor of that type, the last dimension fastest.
void ForEach(const TensorType& type, const std::function<void(const Index&)>& f) {
  if (type.num_elements() == 0) return;
  Index index(type.dims.size(), 0);
  while (true) {
    f(index);
    size_t d = index.size();
    while (d > 0 && ++index[d - 1] == type.dims[d - 1].size) index[--d] = 0;
    if (d == 0) return;
  }
}

int64_t Position(const TensorType& type, const Index& index) {
  int64_t position = 0;
  for (size_t d = 0; d < index.size(); ++d) position = position * type.dims[d].size + index[d];
  return position;
}

using Wide = long double;

// One node with its operands, and what becomes of it: by an op, functions of this below.
template <typename T>
struct Local {
  using Binary = T (*)(T, T);
  using IsBetter = bool (*)(T, T);

  Local(const NodeView& of, absl::Span<const Value* const> inputs, const TensorType& output)
      : node(of), type(output), out(output.num_elements(), T{}) {
    for (const Value* input : inputs) in.push_back(Read<T>(*input));
  }

  int64_t Int(absl::string_view name) const { return IntAttribute(node.attributes, name); }
  // Numbers of an attribute for height and width.
  Index Pair(absl::string_view name, int64_t otherwise) const {
    const Index pair = IntsAttribute(node.attributes, name);
    return pair.empty() ? Index{otherwise, otherwise} : pair;
  }
  // Element `i` of input `n`, which may be 0-dim and stand for all.
  T At(int n, size_t i) const { return in[n][node.input(n).dims.empty() ? 0 : i]; }

  const NodeView& node;
  const TensorType& type;
  std::vector<T> out;
  std::vector<std::vector<T>> in;
};

template <typename T>
bool Elementwise(Local<T>& l, typename Local<T>::Binary f) {
  const int second = l.node.num_inputs() - 1;
  for (size_t i = 0; i < l.out.size(); ++i) l.out[i] = f(l.At(0, i), l.At(second, i));
  return true;
}

template <typename T>
T Div(T a, T b) {
  if constexpr (std::is_floating_point<T>::value) return a / b;
  return b == -1 ? Neg(a) : a / b;
}

// g / cosh(x)^2; or a quarter of g / cosh(x / 2)^2, the derivative of sigmoid.
template <typename T, int kDivisor>
T Slope(T x, T g) {
  const Wide cosh = std::cosh(static_cast<Wide>(x) / kDivisor);
  return static_cast<T>(static_cast<Wide>(g) / (cosh * cosh * kDivisor * kDivisor));
}

Wide (*FunctionOf(absl::string_view op))(Wide) {
  if (op == "ceil") return [](Wide x) { return std::ceil(x); };
  if (op == "cos") return [](Wide x) { return std::cos(x); };
  if (op == "erf") return [](Wide x) { return std::erf(x); };
  if (op == "exp") return [](Wide x) { return std::exp(x); };
  if (op == "expm1") return [](Wide x) { return std::expm1(x); };
  if (op == "floor") return [](Wide x) { return std::floor(x); };
  if (op == "log") return [](Wide x) { return std::log(x); };
  if (op == "log1p") return [](Wide x) { return std::log1p(x); };
  if (op == "rsqrt") return [](Wide x) { return 1 / std::sqrt(x); };
  if (op == "sigmoid") return [](Wide x) { return 1 / (1 + std::exp(-x)); };
  if (op == "sin") return [](Wide x) { return std::sin(x); };
  if (op == "sqrt") return [](Wide x) { return std::sqrt(x); };
  if (op == "tanh") return [](Wide x) { return std::tanh(x); };
  return nullptr;
}

template <typename T>
bool Where(Local<T>& l) {
  for (size_t i = 0; i < l.out.size(); ++i) l.out[i] = l.At(0, i) != 0 ? l.At(1, i) : l.At(2, i);
  return true;
}

template <typename T>
bool Same(Local<T>& l) {
  l.out = l.in[0];
  return true;
}

template <typename T>
bool Matmul(Local<T>& l) {
  const bool ta = l.Int("transpose_a") != 0;
  const bool tb = l.Int("transpose_b") != 0;
  const size_t row = l.type.dims.size() - 2;
  const int64_t depth = l.node.input(0).dims[ta ? row : row + 1].size;
  ForEach(l.type, [&](const Index& i) {
    T sum{};
    Index a = i, b = i;
    for (int64_t k = 0; k < depth; ++k) {
      a[row] = ta ? k : i[row];
      a[row + 1] = ta ? i[row] : k;
      b[row] = tb ? i[row + 1] : k;
      b[row + 1] = tb ? k : i[row + 1];
      sum = Add(sum,
                Mul(l.in[0][Position(l.node.input(0), a)], l.in[1][Position(l.node.input(1), b)]));
    }
    l.out[Position(l.type, i)] = sum;
  });
  return true;
}

// Each product of an x, a weight and a y adds to the one of them that is the result.
template <typename T>
bool Convolution(Local<T>& l) {
  const bool gives_x = l.node.op == "convolution_data_grad";
  const bool gives_w = l.node.op == "convolution_weight_grad";
  const TensorType& x_type = gives_x ? l.type : l.node.input(0);
  const TensorType& w_type = gives_w ? l.type : l.node.input(1);
  const TensorType& y_type = gives_x ? l.node.input(0) : gives_w ? l.node.input(1) : l.type;
  const Index stride = l.Pair("stride", 1), padding = l.Pair("padding", 0);
  const Index dilation = l.Pair("dilation", 1);
  const int64_t out = w_type.dims[0].size / IntAttribute(l.node.attributes, "groups", 1);
  std::vector<Wide> sums(l.out.size(), 0);
  ForEach(y_type, [&](const Index& y) {
    const TensorType taps(w_type.dtype, {w_type.dims.begin() + 1, w_type.dims.end()});
    ForEach(taps, [&](const Index& tap) {
      const Index x = {y[0], y[1] / out * w_type.dims[1].size + tap[0],
                       y[2] * stride[0] - padding[0] + tap[1] * dilation[0],
                       y[3] * stride[1] - padding[1] + tap[2] * dilation[1]};
      for (size_t d = 2; d < 4; ++d) {
        if (x[d] < 0 || x[d] >= x_type.dims[d].size) return;
      }
      const auto x_at = static_cast<size_t>(Position(x_type, x));
      const auto w_at = static_cast<size_t>(Position(w_type, {y[1], tap[0], tap[1], tap[2]}));
      const auto y_at = static_cast<size_t>(Position(y_type, y));
      if (gives_x) {
        sums[x_at] += static_cast<Wide>(l.in[0][y_at]) * static_cast<Wide>(l.in[1][w_at]);
      } else if (gives_w) {
        sums[w_at] += static_cast<Wide>(l.in[0][x_at]) * static_cast<Wide>(l.in[1][y_at]);
      } else {
        sums[y_at] += static_cast<Wide>(l.in[0][x_at]) * static_cast<Wide>(l.in[1][w_at]);
      }
    });
  });
  for (size_t i = 0; i < sums.size(); ++i) l.out[i] = static_cast<T>(sums[i]);
  return true;
}

// The elements of x that are under a window at a place of y.
template <typename T>
std::vector<Index> Under(const Local<T>& l, const TensorType& x_type, const Index& y) {
  const Index kernel = l.Pair("kernel", 0), stride = l.Pair("stride", 1);
  const Index padding = l.Pair("padding", 0), dilation = l.Pair("dilation", 1);
  std::vector<Index> under;
  for (int64_t i = 0; i < kernel[0]; ++i) {
    for (int64_t j = 0; j < kernel[1]; ++j) {
      const Index x = {y[0], y[1], y[2] * stride[0] - padding[0] + i * dilation[0],
                       y[3] * stride[1] - padding[1] + j * dilation[1]};
      if (x[2] < 0 || x[2] >= x_type.dims[2].size) continue;
      if (x[3] < 0 || x[3] >= x_type.dims[3].size) continue;
      under.push_back(x);
    }
  }
  return under;
}

template <typename T>
bool AvgPool(Local<T>& l) {
  const bool gradient = l.node.op == "avg_pool_grad";
  const TensorType& x_type = gradient ? l.type : l.node.input(0);
  const TensorType& y_type = gradient ? l.node.input(0) : l.type;
  std::vector<Wide> sums(l.out.size(), 0);
  ForEach(y_type, [&](const Index& y) {
    const std::vector<Index> under = Under(l, x_type, y);
    const Index kernel = l.Pair("kernel", 0);
    const Wide divisor = l.Int("count_padding") != 0 ? static_cast<Wide>(kernel[0] * kernel[1])
                                                     : static_cast<Wide>(under.size());
    const auto y_at = static_cast<size_t>(Position(y_type, y));
    for (const Index& x : under) {
      const auto x_at = static_cast<size_t>(Position(x_type, x));
      const Wide addend = static_cast<Wide>(l.in[0][gradient ? y_at : x_at]) / divisor;
      sums[gradient ? x_at : y_at] += addend;
    }
  });
  for (size_t i = 0; i < sums.size(); ++i) l.out[i] = static_cast<T>(sums[i]);
  return true;
}

template <typename T>
bool MaxPoolIndex(Local<T>& l) {
  const TensorType& x_type = l.node.input(0);
  ForEach(l.type, [&](const Index& y) {
    Index best;
    for (const Index& x : Under(l, x_type, y)) {
      if (best.empty()) best = x;
      const T most = l.in[0][Position(x_type, best)];
      const T element = l.in[0][Position(x_type, x)];
      if (most == most && (element != element || element > most)) best = x;
    }
    l.out[Position(l.type, y)] = static_cast<T>(best[2] * x_type.dims[3].size + best[3]);
  });
  return true;
}

// Between a window's first and last tap an index counts, on a tap or not.
template <typename T>
bool MaxPoolByIndex(Local<T>& l) {
  const bool gradient = l.node.op == "max_pool_grad";
  const TensorType& x_type = gradient ? l.type : l.node.input(0);
  const TensorType& y_type = l.node.input(1);
  const Index kernel = l.Pair("kernel", 0), stride = l.Pair("stride", 1);
  const Index padding = l.Pair("padding", 0), dilation = l.Pair("dilation", 1);
  ForEach(y_type, [&](const Index& y) {
    const auto y_at = Position(y_type, y);
    const auto at = static_cast<int64_t>(l.in[1][y_at]);
    const int64_t width = x_type.dims[3].size;
    if (at < 0 || at >= x_type.dims[2].size * width) return;
    const Index x = {y[0], y[1], at / width, at % width};
    for (size_t d = 0; d < 2; ++d) {
      const int64_t away = x[2 + d] - (y[2 + d] * stride[d] - padding[d]);
      if (away < 0 || away > (kernel[d] - 1) * dilation[d]) return;
    }
    const auto x_at = Position(x_type, x);
    if (gradient) {
      l.out[x_at] = Add(l.out[x_at], l.in[0][y_at]);
    } else {
      l.out[y_at] = l.in[0][x_at];
    }
  });
  return true;
}

// The elements of input 0 that share all other indices, in wide numbers.
template <typename T>
std::vector<long double> Row(const Local<T>& l, Index i, size_t axis) {
  std::vector<long double> row;
  for (i[axis] = 0; i[axis] < l.node.input(0).dims[axis].size; ++i[axis]) {
    row.push_back(static_cast<long double>(l.in[0][Position(l.node.input(0), i)]));
  }
  return row;
}
// -log softmax of element i of a row: of the largest one log(1 + what the others add).
Wide LogLoss(const std::vector<Wide>& row, size_t i) {
  Wide others = 0;
  for (size_t j = 0; j < row.size(); ++j) others += j == i ? 0 : std::exp(row[j] - row[i]);
  if (others <= 1) return row[i] - row[i] + std::log1p(others);
  Wide most = -std::numeric_limits<Wide>::infinity(), sum = 0;
  for (const Wide x : row) most = x > most ? x : most;
  for (const Wide x : row) sum += std::exp(x - most);
  return most - row[i] + std::log(sum);
}

template <typename T>
bool Softmax(Local<T>& l, bool log) {
  const auto axis = static_cast<size_t>(l.Int("axis"));
  ForEach(l.type, [&](const Index& i) {
    const Wide loss = LogLoss(Row(l, i, axis), static_cast<size_t>(i[axis]));
    l.out[Position(l.type, i)] = static_cast<T>(log ? -loss : std::exp(-loss));
  });
  return true;
}

// The sum over j of w_j (x_i - x_j), that times w_i, or the sum of x_i w_j - w_i x_j.
template <typename T>
bool Center(Local<T>& l) {
  const bool adjoint = l.node.op == "center_grad";
  const auto axis = static_cast<size_t>(l.Int("axis"));
  ForEach(l.type, [&](const Index& i) {
    Wide sum = 0;
    const Wide w = l.in[0][Position(l.type, i)];
    const Wide x = l.in[1][Position(l.type, i)];
    Index j = i;
    for (j[axis] = 0; j[axis] < l.type.dims[axis].size; ++j[axis]) {
      const Wide other_w = l.in[0][Position(l.type, j)];
      const Wide other_x = l.in[1][Position(l.type, j)];
      sum += adjoint ? x * other_w - w * other_x : other_w * (x - other_x);
    }
    l.out[Position(l.type, i)] = static_cast<T>(l.node.op == "softmax_grad" ? w * sum : sum);
  });
  return true;
}

// The indices that an element of x has in the dimensions of that attribute.
template <typename T>
Index Within(const Local<T>& l, const Index& i, absl::string_view name) {
  const Index range = IntsAttribute(l.node.attributes, name);
  return Index(i.begin() + range[0], i.begin() + range[1]);
}
template <typename T>
Wide X(const Local<T>& l, const Index& i) {
  return l.in[0][Position(l.node.input(0), i)];
}
// From each row to what the elements' f give, and how many there are.
template <typename T, typename F>
std::map<Index, std::pair<Wide, Wide>> SumRows(const Local<T>& l, const F& f) {
  std::map<Index, std::pair<Wide, Wide>> rows;
  ForEach(l.node.input(0), [&](const Index& i) {
    auto& row = rows[Within(l, i, "rows")];
    row.first += f(i);
    row.second += 1;
  });
  return rows;
}
template <typename T>
bool Moments(Local<T>& l) {
  const bool center = IntAttribute(l.node.attributes, "center", 1) != 0;
  const auto means = SumRows(l, [&](const Index& i) { return center ? X(l, i) : Wide{0}; });
  const auto mean_of = [&](const Index& row) { return means.at(row).first / means.at(row).second; };
  const auto squares = SumRows(l, [&](const Index& i) {
    const Wide apart = X(l, i) - mean_of(Within(l, i, "rows"));
    return apart * apart;
  });
  ForEach(l.type, [&](const Index& o) {
    const Index row(o.begin() + 1, o.end());
    const auto at = squares.find(row);
    const Wide variance = at == squares.end() ? std::numeric_limits<Wide>::quiet_NaN()
                                              : at->second.first / at->second.second;
    const Wide mean = at == squares.end() && center ? variance
                      : at == squares.end()         ? Wide{0}
                                                    : mean_of(row);
    l.out[Position(l.type, o)] = static_cast<T>(o[0] == 0 ? mean : variance);
  });
  return true;
}

template <typename T>
Wide Moment(const Local<T>& l, const Index& i, int64_t which) {
  Index at = Within(l, i, "rows");
  at.insert(at.begin(), which);
  return l.in[1][Position(l.node.input(1), at)];
}
template <typename T>
Wide Scale(const Local<T>& l, const Index& i) {
  const Wide epsilon = absl::get<double>(*FindAttribute(l.node.attributes, "epsilon"));
  return 1 / std::sqrt(Moment(l, i, 1) + epsilon);
}
template <typename T>
Wide Z(const Local<T>& l, const Index& i) {
  return (X(l, i) - Moment(l, i, 0)) * Scale(l, i);
}
template <typename T>
Wide OfWeight(const Local<T>& l, int n, const Index& i) {
  return l.in[n][Position(l.node.input(n), Within(l, i, "weights"))];
}
template <typename T>
bool Normalize(Local<T>& l) {
  ForEach(l.type, [&](const Index& i) {
    l.out[Position(l.type, i)] = static_cast<T>(OfWeight(l, 2, i) * Z(l, i) + OfWeight(l, 3, i));
  });
  return true;
}
template <typename T>
bool NormalizeGrad(Local<T>& l) {
  const auto u = [&](const Index& i) {
    return OfWeight(l, 2, i) * static_cast<Wide>(l.in[3][Position(l.type, i)]);
  };
  const bool center = IntAttribute(l.node.attributes, "center", 1) != 0;
  const auto sums = SumRows(l, [&](const Index& i) { return center ? u(i) : Wide{0}; });
  const auto products = SumRows(l, [&](const Index& i) { return u(i) * Z(l, i); });
  ForEach(l.type, [&](const Index& i) {
    const auto& [sum, size] = sums.at(Within(l, i, "rows"));
    const Wide product = products.at(Within(l, i, "rows")).first;
    l.out[Position(l.type, i)] =
        static_cast<T>(Scale(l, i) * (u(i) - sum / size - Z(l, i) * product / size));
  });
  return true;
}
template <typename T>
bool NormalizeWeightGrad(Local<T>& l) {
  std::vector<Wide> sums(l.out.size(), 0);
  ForEach(l.node.input(0), [&](const Index& i) {
    sums[static_cast<size_t>(Position(l.type, Within(l, i, "weights")))] +=
        Z(l, i) * static_cast<Wide>(l.in[2][Position(l.node.input(2), i)]);
  });
  for (size_t i = 0; i < sums.size(); ++i) l.out[i] = static_cast<T>(sums[i]);
  return true;
}

template <typename T>
bool IsIgnored(const Local<T>& l, T index) {
  return FindAttribute(l.node.attributes, "ignore_index") != nullptr &&
         index == static_cast<T>(l.Int("ignore_index"));
}

template <typename T>
bool CrossEntropy(Local<T>& l, bool gradient) {
  ForEach(l.type, [&](const Index& i) {
    Index label = i, first = i;
    if (gradient) label.pop_back();
    if (!gradient) first.push_back(0);
    const int64_t position = Position(l.node.input(1), label);
    const T wanted = l.in[1][position];
    if (IsIgnored(l, wanted)) return;
    const std::vector<Wide> row = Row(l, first, first.size() - 1);
    const auto at = static_cast<size_t>(gradient ? i.back() : wanted);
    Wide y = LogLoss(row, at);
    if (gradient) {
      y = static_cast<T>(i.back()) == wanted ? std::expm1(-y) : std::exp(-y);
      y *= l.in[2][position];
    }
    l.out[Position(l.type, i)] = static_cast<T>(y);
  });
  return true;
}

template <typename T>
bool OneHot(Local<T>& l) {
  bool fits = true;
  ForEach(l.type, [&](const Index& i) {
    const T index = l.in[0][Position(l.node.input(0), Index(i.begin(), i.end() - 1))];
    if (IsIgnored(l, index)) return;
    fits = fits && index >= 0 && index < static_cast<T>(l.Int("depth"));
    l.out[Position(l.type, i)] = static_cast<T>(index == static_cast<T>(i.back()) ? 1 : 0);
  });
  return fits;
}

// Where `i` leads: the indices stand in the place of one axis.
template <typename T>
Index Indexed(const Local<T>& l, const Index& i) {
  const auto begin = i.begin() + l.Int("axis");
  const auto end = begin + static_cast<std::ptrdiff_t>(l.node.input(1).dims.size());
  Index result(i.begin(), begin);
  result.push_back(static_cast<int64_t>(l.in[1][Position(l.node.input(1), Index(begin, end))]));
  result.insert(result.end(), end, i.end());
  return result;
}
template <typename T>
Index IndexedAlong(const Local<T>& l, Index i) {
  i[l.Int("axis")] = static_cast<int64_t>(l.in[1][Position(l.node.input(1), i)]);
  return i;
}
template <typename T>
bool TakeSlices(Local<T>& l) {
  ForEach(l.type, [&](const Index& i) {
    l.out[Position(l.type, i)] = l.in[0][Position(l.node.input(0), Indexed(l, i))];
  });
  return true;
}
template <typename T>
bool TakeAlong(Local<T>& l) {
  ForEach(l.type, [&](const Index& i) {
    l.out[Position(l.type, i)] = l.in[0][Position(l.node.input(0), IndexedAlong(l, i))];
  });
  return true;
}
template <typename T>
bool ScatterAdd(Local<T>& l) {
  ForEach(l.node.input(0), [&](const Index& i) {
    T& sum = l.out[Position(l.type, Indexed(l, i))];
    sum = Add(sum, l.in[0][Position(l.node.input(0), i)]);
  });
  return true;
}
template <typename T>
bool ScatterAddAlong(Local<T>& l) {
  ForEach(l.node.input(0), [&](const Index& i) {
    T& sum = l.out[Position(l.type, IndexedAlong(l, i))];
    sum = Add(sum, l.in[0][Position(l.node.input(0), i)]);
  });
  return true;
}

template <typename T>
bool Arg(Local<T>& l, typename Local<T>::IsBetter is_better) {
  const auto axis = static_cast<size_t>(l.Int("axis"));
  const bool is_bool = l.node.input(0).dtype == DType::kBool;
  const auto at = [&](const Index& i) {
    const T x = l.in[0][Position(l.node.input(0), i)];
    return is_bool ? T(x != 0) : x;
  };
  ForEach(l.type, [&](const Index& o) {
    Index i = o;
    if (l.Int("keep_dims") == 0) i.insert(i.begin() + static_cast<std::ptrdiff_t>(axis), 0);
    Index best = i;
    for (; i[axis] < l.node.input(0).dims[axis].size; ++i[axis]) {
      const T x = at(i);
      const T least = at(best);
      if (least == least && (x != x || is_better(x, least))) best = i;
    }
    l.out[Position(l.type, o)] = static_cast<T>(best[axis]);
  });
  return true;
}

// Each element's position is how many stand before it.
template <typename T>
bool ArgSort(Local<T>& l) {
  const TensorType& input = l.node.input(0);
  const auto axis = static_cast<size_t>(l.Int("axis"));
  const bool is_bool = input.dtype == DType::kBool;
  const auto is_less = [](T a, T b) { return a < b || (a == a && b != b); };
  ForEach(input, [&](const Index& i) {
    const auto at = [&](int64_t k) {
      Index j = i;
      j[axis] = k;
      const T x = l.in[0][Position(input, j)];
      return is_bool ? T(x != 0) : x;
    };
    const T x = at(i[axis]);
    Index target = i;
    target[axis] = 0;
    for (int64_t k = 0; k < input.dims[axis].size; ++k) {
      const T y = at(k);
      const bool before = l.Int("descending") != 0 ? is_less(x, y) : is_less(y, x);
      const bool equal = !is_less(x, y) && !is_less(y, x);
      target[axis] += before || (equal && k < i[axis]) ? 1 : 0;
    }
    if (target[axis] >= l.type.dims[axis].size) return;
    l.out[Position(l.type, target)] = static_cast<T>(i[axis]);
  });
  return true;
}

template <typename T>
bool CumSum(Local<T>& l) {
  const auto axis = static_cast<size_t>(l.Int("axis"));
  const bool reverse = l.Int("reverse") != 0;
  const int64_t first = reverse ? l.type.dims[axis].size - 1 : 0;
  ForEach(l.type, [&](const Index& i) {
    Index j = i;
    j[axis] = first;
    T sum = l.in[0][Position(l.type, j)];
    while (j[axis] != i[axis]) {
      j[axis] += reverse ? -1 : 1;
      sum = Add(sum, l.in[0][Position(l.type, j)]);
    }
    l.out[Position(l.type, i)] = sum;
  });
  return true;
}

template <typename T>
T Lowest() {
  if (std::numeric_limits<T>::has_infinity) return -std::numeric_limits<T>::infinity();
  return std::numeric_limits<T>::lowest() + 1;  // the evaluator's integers are wider
}

template <typename T>
bool Reduce(Local<T>& l, T nothing, typename Local<T>::Binary f) {
  const TensorType& input = l.node.input(0);
  const Index axes = IntsAttribute(l.node.attributes, "axes");
  std::vector<bool> reduced(input.dims.size(), axes.empty());
  for (const int64_t axis : axes) reduced[axis] = true;
  std::fill(l.out.begin(), l.out.end(), nothing);
  ForEach(input, [&](const Index& i) {
    Index o;
    for (size_t d = 0; d < i.size(); ++d) {
      if (!reduced[d]) {
        o.push_back(i[d]);
      } else if (l.Int("keep_dims") != 0) {
        o.push_back(0);
      }
    }
    T& result = l.out[Position(l.type, o)];
    result = f(result, l.in[0][Position(input, i)]);
  });
  return true;
}

template <typename T>
bool Mean(Local<T>& l) {
  Reduce(l, T{}, [](T a, T b) { return Add(a, b); });
  const auto each = static_cast<T>(l.out.empty() ? 1 : l.in[0].size() / l.out.size());
  for (T& out : l.out) out = out / each;
  return true;
}

template <typename T>
bool Spread(Local<T>& l) {
  Expand(l);
  const auto times = static_cast<T>(l.in[0].empty() ? 1 : l.out.size() / l.in[0].size());
  for (T& out : l.out) out = out / times;
  return true;
}

template <typename T>
bool Expand(Local<T>& l) {
  const TensorType& input = l.node.input(0);
  ForEach(l.type, [&](const Index& o) {
    Index i(o.end() - input.dims.size(), o.end());
    for (size_t d = 0; d < i.size(); ++d) {
      if (input.dims[d].size == 1) i[d] = 0;
    }
    l.out[Position(l.type, o)] = l.in[0][Position(input, i)];
  });
  return true;
}

template <typename T>
bool Transpose(Local<T>& l) {
  const Index perm = IntsAttribute(l.node.attributes, "perm");
  ForEach(l.type, [&](const Index& o) {
    Index i(o.size());
    for (size_t d = 0; d < o.size(); ++d) i[perm[d]] = o[d];
    l.out[Position(l.type, o)] = l.in[0][Position(l.node.input(0), i)];
  });
  return true;
}

// Input `n`, moved by `offset` along the axis; what falls outside is dropped.
template <typename T>
bool Shift(Local<T>& l, int n, int64_t offset) {
  const int64_t axis = l.Int("axis");
  ForEach(l.node.input(n), [&](const Index& i) {
    Index o = i;
    o[axis] += offset;
    if (o[axis] < 0 || o[axis] >= l.type.dims[axis].size) return;
    l.out[Position(l.type, o)] = l.in[n][Position(l.node.input(n), i)];
  });
  return true;
}

template <typename T>
bool Concat(Local<T>& l) {
  int64_t offset = 0;
  for (int n = 0; n < l.node.num_inputs(); ++n) {
    Shift(l, n, offset);
    offset += l.node.input(n).dims[l.Int("axis")].size;
  }
  return true;
}

// The elements of each part that count, and where its `i`th part begins when they are packed.
template <typename T, typename Fn>
void ForEachCounted(const Local<T>& l, Fn fn) {
  const auto parts = static_cast<size_t>(l.Int("parts"));
  const auto rows = static_cast<size_t>(l.type.dims[0].size);
  const size_t row = rows == 0 ? 0 : l.out.size() / rows;
  const size_t counted = static_cast<size_t>(l.in[1][0]) * row;
  for (size_t part = 0; part < parts; ++part) {
    for (size_t i = 0; i < counted; ++i) fn(part * (rows / parts) * row + i, part * counted + i);
  }
}
template <typename T>
bool PackRows(Local<T>& l) {
  ForEachCounted(l, [&](size_t unpacked, size_t packed) { l.out[packed] = l.in[0][unpacked]; });
  return true;
}
template <typename T>
bool UnpackRows(Local<T>& l) {
  ForEachCounted(l, [&](size_t unpacked, size_t packed) { l.out[unpacked] = l.in[0][packed]; });
  return true;
}

template <typename T>
bool Scale(Local<T>& l) {
  for (size_t i = 0; i < l.out.size(); ++i) l.out[i] = Mul(l.in[0][i], l.in[1][0]);
  return true;
}

template <typename T>
bool Product(Local<T>& l) {
  l.out = l.in[0];
  for (size_t n = 1; n < l.in.size(); ++n) {
    for (size_t i = 0; i < l.out.size(); ++i) l.out[i] = Mul(l.out[i], l.in[n][i]);
  }
  return true;
}

template <typename T>
bool Fill(Local<T>& l) {
  const AttributeValue& value = *FindAttribute(l.node.attributes, "value");
  const auto* integer = absl::get_if<int64_t>(&value);
  const T element =
      integer != nullptr ? static_cast<T>(*integer) : Dispatch(l.type.dtype, [&](auto t) {
        return static_cast<T>(Nearest<decltype(t)>(absl::get<double>(value)));
      });
  for (T& out : l.out) out = element;
  return true;
}

// False: no such op.
template <typename T>
bool Run(Local<T>& l) {
  const absl::string_view op = l.node.op;
  if (op == "add") return Elementwise(l, [](T a, T b) { return Add(a, b); });
  if (op == "sub") return Elementwise(l, [](T a, T b) { return Add(a, Neg(b)); });
  if (op == "mul") return Elementwise(l, [](T a, T b) { return Mul(a, b); });
  if (op == "neg") return Elementwise(l, [](T a, T) { return Neg(a); });
  if (op == "relu") return Elementwise(l, [](T a, T) { return a > 0 ? a : T{}; });
  if (op == "relu_grad") return Elementwise(l, [](T a, T b) { return a > 0 ? b : T{}; });
  if (op == "div") return Elementwise(l, Div<T>);
  if (op == "abs") return Elementwise(l, [](T a, T) { return a < 0 ? Neg(a) : a; });
  if (op == "sign") {
    return Elementwise(l, [](T a, T) { return a > 0 ? T{1} : a < 0 ? static_cast<T>(-1) : a; });
  }
  if (op == "maximum") return Elementwise(l, [](T a, T b) { return a >= b || a != a ? a : b; });
  if (op == "minimum") return Elementwise(l, [](T a, T b) { return a <= b || a != a ? a : b; });
  if (op == "where") return Where(l);
  if (op == "logical_and") return Elementwise(l, [](T a, T b) { return T(a != 0 && b != 0); });
  if (op == "logical_or") return Elementwise(l, [](T a, T b) { return T(a != 0 || b != 0); });
  if (op == "logical_xor") return Elementwise(l, [](T a, T b) { return T((a != 0) != (b != 0)); });
  if (op == "logical_not") return Elementwise(l, [](T a, T) { return T(a == 0); });
  if (const auto f = FunctionOf(op); f != nullptr) {
    for (size_t i = 0; i < l.out.size(); ++i) l.out[i] = static_cast<T>(f(l.At(0, i)));
    return true;
  }
  if (op == "pow") {
    return Elementwise(l, [](T a, T b) {
      // Of an infinity double has it exactly, and glibc 2.36's powl(-inf, -2^63) is infinite.
      if (std::isinf(static_cast<double>(a))) return static_cast<T>(std::pow<double, double>(a, b));
      return static_cast<T>(std::pow<Wide, Wide>(a, b));
    });
  }
  if (op == "sigmoid_grad" || op == "tanh_grad") {
    return Elementwise(l, op == "tanh_grad" ? Slope<T, 1> : Slope<T, 2>);
  }
  if (op == "matmul") return Matmul(l);
  if (op.substr(0, 11) == "convolution") return Convolution(l);
  if (op == "avg_pool" || op == "avg_pool_grad") return AvgPool(l);
  if (op == "max_pool_index") return MaxPoolIndex(l);
  if (op == "max_pool_take" || op == "max_pool_grad") return MaxPoolByIndex(l);
  if (op == "softmax") return Softmax(l, /*log=*/false);
  if (op == "log_softmax") return Softmax(l, /*log=*/true);
  if (op == "center" || op == "center_grad" || op == "softmax_grad") return Center(l);
  if (op == "moments") return Moments(l);
  if (op == "normalize") return Normalize(l);
  if (op == "normalize_grad") return NormalizeGrad(l);
  if (op == "normalize_weight_grad") return NormalizeWeightGrad(l);
  if (op == "cross_entropy") return CrossEntropy(l, /*gradient=*/false);
  if (op == "cross_entropy_grad") return CrossEntropy(l, /*gradient=*/true);
  if (op == "one_hot") return OneHot(l);
  if (op == "take") return TakeSlices(l);
  if (op == "take_along") return TakeAlong(l);
  if (op == "scatter_add") return ScatterAdd(l);
  if (op == "scatter_add_along") return ScatterAddAlong(l);
  if (op == "arg_max") return Arg(l, [](T a, T b) { return a > b; });
  if (op == "arg_min") return Arg(l, [](T a, T b) { return a < b; });
  if (op == "arg_sort") return ArgSort(l);
  if (op == "cum_sum") return CumSum(l);
  if (op == "sum") return Reduce(l, T{}, [](T a, T b) { return Add(a, b); });
  if (op == "mean") return Mean(l);
  if (op == "prod") return Reduce(l, T{1}, [](T a, T b) { return Mul(a, b); });
  if (op == "max") {
    return Reduce(l, Lowest<T>(), [](T a, T b) { return a >= b || a != a ? a : b; });
  }
  if (op == "min") {
    return Reduce(l, Neg(Lowest<T>()), [](T a, T b) { return a <= b || a != a ? a : b; });
  }
  if (op == "spread") return Spread(l);
  if (op == "expand") return Expand(l);
  if (op == "copy" || op == "reshape") return Same(l);
  if (op == "transpose") return Transpose(l);
  if (op == "slice") return Shift(l, 0, -l.Int("begin"));
  if (op == "pad") return Shift(l, 0, l.Int("before"));
  if (op == "concat") return Concat(l);
  if (op == "pack_rows") return PackRows(l);
  if (op == "unpack_rows") return UnpackRows(l);
  if (op == "fill") return Fill(l);
  if (op == "share") return Elementwise(l, [](T x, T h) { return h == 0 ? T{} : x / h; });
  if (op == "scale") return Scale(l);
  if (op == "product") return Product(l);
  return false;
}

// --- Local ops whose output has another dtype than what they look at ---

bool IsComparison(absl::string_view op) {
  return op == "eq" || op == "ne" || op == "lt" || op == "le" || op == "gt" || op == "ge" ||
         op == "holds";
}

template <typename W>
Value Compare(const NodeView& node, absl::Span<const Value* const> inputs, const TensorType& type) {
  const absl::string_view op = node.op;
  const std::vector<W> a = Read<W>(*inputs[0]);
  const std::vector<W> b = Read<W>(*inputs[1]);
  const bool is_bool = inputs[0]->type.dtype == DType::kBool;
  std::vector<int64_t> out(static_cast<size_t>(type.num_elements()));
  for (size_t i = 0; i < out.size(); ++i) {
    W x = a[inputs[0]->type.dims.empty() ? 0 : i];
    W y = b[inputs[1]->type.dims.empty() ? 0 : i];
    if (is_bool) {
      x = x != 0;
      y = y != 0;
    }
    if (op == "eq") {
      out[i] = x == y;
    } else if (op == "ne") {
      out[i] = !(x == y);
    } else if (op == "lt") {
      out[i] = x < y;
    } else if (op == "le") {
      out[i] = x < y || x == y;
    } else if (op == "gt") {
      out[i] = x > y;
    } else if (op == "ge") {
      out[i] = x > y || x == y;
    } else {
      out[i] = x == y || (x != x && y != y);  // holds
    }
  }
  return Write(type, out);
}

// By way of long double, which holds every element exactly.
Value Cast(const Value& from, const TensorType& type) {
  return Dispatch(type.dtype, [&](auto t) {
    using T = decltype(t);
    std::vector<T> out;
    Dispatch(from.type.dtype, [&](auto s) {
      for (const auto element : Elements<decltype(s)>(from)) {
        long double x = static_cast<long double>(element);
        if (from.type.dtype == DType::kBool) x = x != 0;
        if (type.dtype == DType::kBool) {
          out.push_back(T(x != 0));
        } else if constexpr (!std::is_integral<T>::value) {
          out.push_back(T(Nearest<T>(x)));
        } else if (!IsFloating(from.type.dtype)) {
          out.push_back(static_cast<T>(static_cast<int64_t>(x)));
        } else if (x != x) {
          out.push_back(0);
        } else {
          using Limits = std::numeric_limits<T>;
          const long double least = Limits::min();
          const long double most = Limits::max();
          out.push_back(x < least ? Limits::min() : x > most ? Limits::max() : static_cast<T>(x));
        }
      }
    });
    return MakeValue<T>(type, out);
  });
}

// --- Random numbers ---

// Words of Philox 4x32-10, as its authors write it: a round is a substitution of both halves and a
// permutation.
std::vector<uint32_t> PhiloxWords(uint64_t seed, uint64_t offset, uint64_t block) {
  uint32_t r0 = static_cast<uint32_t>(block);
  uint32_t l0 = static_cast<uint32_t>(block >> 32);
  uint32_t r1 = static_cast<uint32_t>(offset);
  uint32_t l1 = static_cast<uint32_t>(offset >> 32);
  for (uint32_t round = 0; round < 10; ++round) {
    const uint32_t k0 = static_cast<uint32_t>(seed) + round * 0x9E3779B9u;
    const uint32_t k1 = static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u;
    const uint64_t p0 = static_cast<uint64_t>(r0) * 0xD2511F53u;
    const uint64_t p1 = static_cast<uint64_t>(r1) * 0xCD9E8D57u;
    r0 = static_cast<uint32_t>(p1 >> 32) ^ l0 ^ k0;
    l0 = static_cast<uint32_t>(p1);
    r1 = static_cast<uint32_t>(p0 >> 32) ^ l1 ^ k1;
    l1 = static_cast<uint32_t>(p0);
  }
  return {r0, l0, r1, l1};
}

Value Random(absl::string_view op, uint64_t seed, uint64_t offset, const TensorType& type) {
  const int64_t width = DTypeBytes(type.dtype);
  const uint64_t per_block = width == 8 ? 2 : 4;
  // An element's number, from 0 to below 2^bits.
  const auto word = [&](uint64_t i, int bits) -> uint64_t {
    const std::vector<uint32_t> words = PhiloxWords(seed, offset, i / per_block);
    if (width < 8) return words[i % 4] >> (32 - bits);
    return (uint64_t{words[i % 2 * 2 + 1]} << 32 | words[i % 2 * 2]) >> (64 - bits);
  };
  const int most = width == 8 ? 64 : 32;
  const int uniform = type.dtype == DType::kF64   ? 53
                      : type.dtype == DType::kF32 ? 24
                      : type.dtype == DType::kF16 ? 11
                                                  : 8;
  return Dispatch(type.dtype, [&](auto t) {
    using T = decltype(t);
    std::vector<T> out;
    for (uint64_t i = 0; i < static_cast<uint64_t>(type.num_elements()); ++i) {
      if constexpr (std::is_integral<T>::value) {
        out.push_back(static_cast<T>(word(i, most)));
      } else if (op == "random_uniform") {
        out.push_back(Nearest<T>(std::ldexp(static_cast<long double>(word(i, uniform)), -uniform)));
      } else {
        const int fine = width == 8 ? 53 : 32;
        const int angle = width == 8 ? 53 : 24;
        const uint64_t first = i - i % 2;
        const long double u = std::ldexp(word(first, fine) + 0.5L, -fine);
        const long double v =
            std::ldexp(static_cast<long double>(word(first + 1, angle)), 1 - angle) *
            std::acos(-1.0L);
        const long double radius = std::sqrt(-2 * std::log(u));
        out.push_back(Nearest<T>(radius * (i % 2 == 0 ? std::cos(v) : std::sin(v))));
      }
    }
    return MakeValue<T>(type, out);
  });
}

// --- Collectives ---

// The pieces of one tensor, one after the other along dimension 0, and back.
std::vector<Value> Split(const Value& whole, const std::vector<int64_t>& rows) {
  TensorType type = whole.type;
  std::vector<Value> pieces;
  size_t offset = 0;
  for (const int64_t n : rows) {
    type.dims[0] = Dim(n);
    const auto bytes = static_cast<size_t>(type.num_bytes());
    pieces.push_back(Value{type, whole.bytes.substr(offset, bytes)});
    offset += bytes;
  }
  return pieces;
}
Value Join(const TensorType& type, const std::vector<Value>& pieces) {
  Value whole{type, ""};
  for (const Value& piece : pieces) whole.bytes += piece.bytes;
  return whole;
}

template <typename W>
bool IsNan(W x) {
  return x != x;
}

// Of two elements, `a` from the left, both already times their factors.
template <typename W>
W Reduce(Reduction reduction, W a, W b) {
  switch (reduction) {
    case Reduction::kProduct:
      return Mul(a, b);
    case Reduction::kMin:
      return IsNan(a) || (!IsNan(b) && a <= b) ? a : b;
    case Reduction::kMax:
      return IsNan(a) || (!IsNan(b) && a >= b) ? a : b;
    case Reduction::kBand:
      return static_cast<W>(static_cast<int64_t>(a) & static_cast<int64_t>(b));
    case Reduction::kBor:
      return static_cast<W>(static_cast<int64_t>(a) | static_cast<int64_t>(b));
    case Reduction::kBxor:
      return static_cast<W>(static_cast<int64_t>(a) ^ static_cast<int64_t>(b));
    default:
      return Add(a, b);
  }
}

// The reduction of the elements that members lo to lo + n - 1 have, in the one order that there is:
// T(lo, n) is operand lo where n is 1, else T(lo, p) op T(lo + p, n - p), p the largest power of
// two below n. Where nobody is there is nothing: no elements.
template <typename W>
std::vector<W> Tree(Reduction reduction, const std::vector<std::vector<W>>& operands, size_t lo,
                    size_t n) {
  if (n == 1) return operands[lo];
  size_t p = 1;
  while (p + p < n) p += p;
  std::vector<W> left = Tree(reduction, operands, lo, p);
  const std::vector<W> right = Tree(reduction, operands, lo + p, n - p);
  if (left.empty()) return right;
  for (size_t i = 0; i < right.size(); ++i) left[i] = Reduce(reduction, left[i], right[i]);
  return left;
}

// `pieces` and `factors` by rank: null where the member is absent. Factors are there for PREMUL_SUM
// alone. A member that is absent is left out, also of what a single operand would be reduced to:
// itself.
Value ReduceAll(Reduction reduction, const std::vector<const Value*>& pieces,
                const std::vector<const Value*>& factors) {
  const Value* some = nullptr;
  int present = 0;
  for (const Value* piece : pieces) {
    if (piece == nullptr) continue;
    some = piece;
    ++present;
  }
  const TensorType& type = some->type;
  const bool is_bool = type.dtype == DType::kBool;
  if (present == 1 && !is_bool && reduction != Reduction::kAvg && factors.empty()) return *some;
  return DispatchWide(type.dtype, [&](auto t) {
    using W = decltype(t);
    std::vector<std::vector<W>> operands(pieces.size());
    for (size_t rank = 0; rank < pieces.size(); ++rank) {
      if (pieces[rank] == nullptr) continue;
      operands[rank] = Read<W>(*pieces[rank]);
      for (W& element : operands[rank]) {
        if (is_bool) element = element != 0 ? 1 : 0;
        if (!factors.empty()) element = Mul(element, Read<W>(*factors[rank])[0]);
      }
    }
    std::vector<W> result = Tree(reduction, operands, 0, operands.size());
    for (W& element : result) {
      if (reduction == Reduction::kAvg) element = element / static_cast<W>(pieces.size());
      if (is_bool) element = element != 0 ? 1 : 0;
      if (IsNan(element)) element = std::numeric_limits<W>::quiet_NaN();
    }
    return Write(type, result);
  });
}

// For member `rank`: how many members hold the result, where it does.
Value Holders(const std::vector<Value>& pieces, size_t rank, const Value& result) {
  const TensorType type(DType::kF32, result.type.dims);
  return DispatchWide(result.type.dtype, [&](auto t) {
    using W = decltype(t);
    const std::vector<W> y = Read<W>(result);
    std::vector<std::vector<W>> x;
    for (const Value& piece : pieces) x.push_back(Read<W>(piece));
    const auto holds = [&](size_t r, size_t i) {
      return x[r][i] == y[i] || (IsNan(y[i]) && IsNan(x[r][i]));
    };
    std::vector<float> holders;
    for (size_t i = 0; i < y.size(); ++i) {
      float count = 0;
      for (size_t r = 0; r < x.size(); ++r) count += holds(r, i) ? 1 : 0;
      holders.push_back(holds(rank, i) ? count : 0);
    }
    return MakeValue<float>(type, holders);
  });
}

// One member's part in an instance.
struct Part {
  size_t session = 0;
  int32_t node = -1;
};

struct Instance {
  bool is_gradient = false;
  bool is_pair = false;
  int32_t group_size = 0;
  std::map<int32_t, Part> parts;  // by rank, ascending

  size_t expected() const { return is_pair ? 2 : static_cast<size_t>(group_size); }
};

class Evaluation {
 public:
  explicit Evaluation(absl::Span<const Session> sessions) : sessions_(sessions) {
    for (const Session& session : sessions) {
      values_.emplace_back(session.graph->num_values());
      ready_.emplace_back(session.graph->num_values(), false);
      done_.emplace_back(session.graph->nodes.size(), false);
      names_.push_back(Names(session));
      for (size_t i = 0; i < session.inputs.size(); ++i) {
        values_.back()[i] = session.inputs[i];
        ready_.back()[i] = true;
      }
    }
  }

  absl::Status Run() {
    while (true) {
      bool progress = false;
      for (size_t s = 0; s < sessions_.size(); ++s) {
        for (int32_t n = 0; n < static_cast<int32_t>(done_[s].size()); ++n) {
          if (done_[s][n] || !InputsReady(s, n)) continue;
          done_[s][n] = true;
          progress = true;
          if (node(s, n).collective.has_value()) {
            CHORUS_RETURN_IF_ERROR(Vote(s, n));
          } else {
            CHORUS_RETURN_IF_ERROR(RunLocal(s, n));
          }
        }
      }
      if (progress) continue;
      if (waiting_.empty()) break;
      // Nothing else can move: members that are missing from a gradient have abandoned it.
      auto it = waiting_.begin();
      while (it != waiting_.end() && !it->second.is_gradient) ++it;
      if (it == waiting_.end()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "instance ", waiting_.begin()->first, " has ", waiting_.begin()->second.parts.size(),
            " of ", waiting_.begin()->second.expected(), " members"));
      }
      CHORUS_RETURN_IF_ERROR(Complete(it->second));
      waiting_.erase(it);
    }
    for (size_t s = 0; s < sessions_.size(); ++s) {
      for (size_t n = 0; n < done_[s].size(); ++n) {
        if (!done_[s][n]) {
          return absl::FailedPreconditionError(
              absl::StrCat("session ", s, " node ", n, " never became ready"));
        }
      }
    }
    return absl::OkStatus();
  }

  std::vector<std::vector<Value>> Take() { return std::move(values_); }

 private:
  const Node& node(size_t session, int32_t n) const { return sessions_[session].graph->nodes[n]; }

  // The name of each collective node's instance: next indices are counted in program order.
  static std::vector<std::string> Names(const Session& session) {
    std::map<std::string, int> next;
    std::vector<std::string> names;
    for (const Node& node : session.graph->nodes) {
      names.emplace_back();
      if (!node.collective.has_value()) continue;
      const Collective& c = *node.collective;
      std::string base = absl::StrCat("group ", session.groups[c.group_slot]);
      if (HasPeer(c.kind)) {
        const bool sends = c.kind == CollectiveKind::kSend;
        absl::StrAppend(&base, " ", sends ? c.rank.value() : c.peer.value(), "->",
                        sends ? c.peer.value() : c.rank.value(), " tag ", c.tag);
      }
      switch (c.instance.kind) {
        case InstanceRef::Kind::kNext:
          names.back() =
              absl::StrCat(base, " index ", next[absl::StrCat(base, " as ", c.rank.value())]++);
          break;
        case InstanceRef::Kind::kGradient:
          names.back() = absl::StrCat(names[c.instance.node], ", gradient ", c.instance.request);
          break;
        case InstanceRef::Kind::kBound:
          names.back() = session.instances[c.instance.slot];
          break;
      }
    }
    return names;
  }

  bool InputsReady(size_t s, int32_t n) const {
    for (const ValueIndex input : node(s, n).inputs) {
      if (!ready_[s][input]) return false;
    }
    return true;
  }

  void Publish(size_t s, int32_t n, int32_t i, Value value) {
    const ValueIndex index = sessions_[s].graph->ValueOf(n, i);
    values_[s][index] = std::move(value);
    ready_[s][index] = true;
  }

  absl::Status RunLocal(size_t s, int32_t n) {
    const Node& local = node(s, n);
    std::vector<const Value*> inputs;
    std::vector<const TensorType*> types;
    for (const ValueIndex input : local.inputs) {
      inputs.push_back(&values_[s][input]);
      types.push_back(&values_[s][input].type);
    }
    CHORUS_ASSIGN_OR_RETURN(std::vector<Value> outputs,
                            EvaluateLocal(ViewOf(local, types), inputs, local.outputs));
    for (size_t i = 0; i < outputs.size(); ++i) {
      Publish(s, n, static_cast<int32_t>(i), std::move(outputs[i]));
    }
    return absl::OkStatus();
  }

  absl::Status Vote(size_t s, int32_t n) {
    const Collective& c = *node(s, n).collective;
    Instance& instance = waiting_[names_[s][n]];
    instance.is_gradient = c.instance.kind != InstanceRef::Kind::kNext;
    instance.is_pair = HasPeer(c.kind);
    instance.group_size = sessions_[s].graph->group_slots[c.group_slot].size;
    if (!instance.parts.emplace(c.rank.value(), Part{s, n}).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(names_[s][n], ": rank ", c.rank.value(), " joins twice"));
    }
    if (instance.parts.size() < instance.expected()) return absl::OkStatus();
    const Instance complete = instance;
    waiting_.erase(names_[s][n]);
    return Complete(complete);
  }

  // --- An instance that is complete ---

  using Pieces = std::vector<Value>;

  static bool OneInput(const Node& node) {
    return node.op == "reduce_scatter_tensor" || node.op == "scatter_tensor" ||
           node.op == "all_to_all_single";
  }
  static bool OneOutput(const Node& node) {
    return node.op == "all_gather_into_tensor" || node.op == "gather_into_tensor" ||
           node.op == "all_to_all_single";
  }
  // Rows of each of `size` pieces of one tensor: `counts` from `first` on, or equal parts.
  static std::vector<int64_t> Rows(const Collective& c, size_t first, size_t size, int64_t rows) {
    if (c.counts.empty()) return std::vector<int64_t>(size, rows / static_cast<int64_t>(size));
    const auto begin = c.counts.begin() + static_cast<std::ptrdiff_t>(first);
    return std::vector<int64_t>(begin, begin + static_cast<std::ptrdiff_t>(size));
  }

  // --- Counts at run time ---

  static bool AtRunTime(const Collective& c) { return c.runtime_counts_input >= 0; }
  static bool HasX(const Collective& c) {
    return c.kind != CollectiveKind::kScatter || c.rank == c.root;
  }
  // The operand with the rows to send, or to receive; null: there is none.
  const Value* Counts(const Part& part, bool sends) const {
    const Node& n = node(part.session, part.node);
    const Collective& c = *n.collective;
    size_t i = static_cast<size_t>(c.runtime_counts_input);
    if (sends && !HasX(c)) return nullptr;
    if (!sends && HasX(c)) ++i;
    const size_t factor = c.reduction == Reduction::kPremulSum ? 1 : 0;
    if (i + factor >= n.inputs.size()) return nullptr;
    return &values_[part.session][n.inputs[i]];
  }
  absl::StatusOr<Pieces> RuntimePiecesIn(const Part& part) const {
    const Value* const sends = Counts(part, true);
    if (sends == nullptr) return Pieces();
    const Value& x = values_[part.session][node(part.session, part.node).inputs[0]];
    const auto rows = Elements<int64_t>(*sends);
    int64_t sum = 0;
    for (const int64_t n : rows) {
      if (n < 0 || n > x.type.dims[0].size - sum) {
        return absl::InvalidArgumentError(
            absl::StrCat("counts at run time: ", n, " rows of ", x.type.ToString()));
      }
      sum += n;
    }
    return Split(x, rows);
  }
  // With zeros behind its rows.
  static Value Padded(Value value, const TensorType& type) {
    value.type = type;
    value.bytes.resize(static_cast<size_t>(type.num_bytes()), '\0');
    return value;
  }
  // What comes out for one member: y, and the rows of each piece.
  absl::Status RuntimeOutputs(const Part& part, const Pieces& pieces, Pieces* out) const {
    const Node& n = node(part.session, part.node);
    Value y = Join(n.outputs[0], pieces);
    std::vector<int64_t> received;
    for (const Value& piece : pieces) received.push_back(piece.type.dims[0].size);
    const auto capacity = static_cast<size_t>(y.type.num_bytes());
    if (y.bytes.size() > capacity) {
      return absl::InvalidArgumentError(
          absl::StrCat("counts at run time: more than ", y.type.ToString(), " holds"));
    }
    out->push_back(Padded(std::move(y), n.outputs[0]));
    out->push_back(MakeValue<int64_t>(n.outputs[1], received));
    return absl::OkStatus();
  }
  // The types of the pieces that come to one member.
  absl::StatusOr<std::vector<TensorType>> RuntimeTypesOut(
      int32_t rank, const Part& part, const std::map<int32_t, Pieces>& pieces) const {
    const Node& n = node(part.session, part.node);
    std::vector<TensorType> types;
    if (n.outputs.empty()) return types;
    const Value* const receives = Counts(part, false);
    for (int64_t i = 0; i < n.outputs[1].num_elements(); ++i) {
      const auto [source, piece] = SourceOf(*n.collective, rank, static_cast<size_t>(i));
      const auto it = pieces.find(source);
      int64_t rows = receives != nullptr ? Elements<int64_t>(*receives)[i] : 0;
      if (it != pieces.end()) {
        const int64_t comes = it->second[piece].type.dims[0].size;
        if (receives != nullptr && comes != rows) {
          return absl::InvalidArgumentError(
              absl::StrCat("counts at run time: ", rows, " rows expected, ", comes, " come"));
        }
        rows = comes;
      }
      types.push_back(n.outputs[0]);
      types.back().dims[0] = Dim(rows);
    }
    return types;
  }

  // What one member puts in, piece by piece.
  absl::StatusOr<Pieces> PiecesIn(const Instance& instance, const Part& part) const {
    const Node& n = node(part.session, part.node);
    if (AtRunTime(*n.collective)) return RuntimePiecesIn(part);
    Pieces pieces;
    for (const ValueIndex input : n.inputs) pieces.push_back(values_[part.session][input]);
    if (n.collective->reduction == Reduction::kPremulSum) pieces.pop_back();
    if (!OneInput(n) || pieces.empty()) return pieces;
    const auto size = static_cast<size_t>(instance.group_size);
    return Split(pieces[0], Rows(*n.collective, 0, size, pieces[0].type.dims[0].size));
  }

  // The types of what comes out for one member of a collective that only moves.
  static std::vector<TensorType> TypesOut(const Instance& instance, const Node& n) {
    if (!OneOutput(n) || n.outputs.empty()) return n.outputs;
    const auto size = static_cast<size_t>(instance.group_size);
    const size_t first = n.op == "all_to_all_single" ? size : 0;
    std::vector<TensorType> types;
    for (const int64_t rows : Rows(*n.collective, first, size, n.outputs[0].dims[0].size)) {
      types.push_back(n.outputs[0]);
      types.back().dims[0] = Dim(rows);
    }
    return types;
  }

  // Whether pieces of these types meet: those of no dimensions are one row where pieces have rows.
  static bool Meet(CollectiveKind kind, const TensorType& a, const TensorType& b) {
    const auto as_row = [kind](TensorType type) {
      if (MayBeUneven(kind) && type.dims.empty()) type.dims = {Dim(1)};
      return type;
    };
    return as_row(a) == as_row(b);
  }

  // Piece `i` of member `rank`, which has to meet that type; zeros for a member that is missing.
  absl::StatusOr<Value> PieceOf(CollectiveKind kind, const std::map<int32_t, Pieces>& pieces,
                                int32_t rank, size_t i, const TensorType& type,
                                const std::string& name) const {
    const auto it = pieces.find(rank);
    if (it == pieces.end()) return Zeros(type);
    if (i >= it->second.size() || !Meet(kind, it->second[i].type, type)) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": rank ", rank, " has ",
                       i < it->second.size() ? it->second[i].type.ToString() : "nothing",
                       " as piece ", i, " where another has ", type.ToString()));
    }
    return Value{type, it->second[i].bytes};
  }

  // From which member, and which of its pieces, piece `i` of what comes out for `rank` is.
  static std::pair<int32_t, size_t> SourceOf(const Collective& c, int32_t rank, size_t i) {
    switch (c.kind) {
      case CollectiveKind::kBroadcast:
        return {c.root.value(), 0};
      case CollectiveKind::kScatter:
        return {c.root.value(), static_cast<size_t>(rank)};
      case CollectiveKind::kAllToAll:
        return {static_cast<int32_t>(i), static_cast<size_t>(rank)};
      case CollectiveKind::kRecv:
        return {c.peer.value(), 0};
      default:  // all_gather, gather
        return {static_cast<int32_t>(i), 0};
    }
  }

  absl::Status Complete(const Instance& instance) {
    const Part& first = instance.parts.begin()->second;
    const Collective& c = *node(first.session, first.node).collective;
    const std::string& name = names_[first.session][first.node];
    std::map<int32_t, Pieces> pieces;
    for (const auto& [rank, part] : instance.parts) {
      const Collective& other = *node(part.session, part.node).collective;
      const bool same_kind = instance.is_pair ? HasPeer(other.kind) : other.kind == c.kind;
      if (!same_kind || other.root != c.root || other.reduction != c.reduction) {
        return absl::InvalidArgumentError(
            absl::StrCat(name, ": rank ", c.rank.value(), " asks for ", CollectiveKindName(c.kind),
                         ", rank ", rank, " for ", CollectiveKindName(other.kind)));
      }
      CHORUS_ASSIGN_OR_RETURN(pieces[rank], PiecesIn(instance, part));
    }
    for (const auto& [rank, part] : instance.parts) {
      if (c.reduction != Reduction::kNone) {
        CHORUS_RETURN_IF_ERROR(CompleteReduction(instance, rank, part, pieces, name));
        continue;
      }
      const Node& n = node(part.session, part.node);
      const bool at_run_time = AtRunTime(*n.collective);
      std::vector<TensorType> types;
      if (at_run_time) {
        CHORUS_ASSIGN_OR_RETURN(types, RuntimeTypesOut(rank, part, pieces));
      } else {
        types = TypesOut(instance, n);
      }
      Pieces out;
      for (size_t i = 0; i < types.size(); ++i) {
        const auto [source, piece] = SourceOf(*n.collective, rank, i);
        CHORUS_ASSIGN_OR_RETURN(Value value,
                                PieceOf(c.kind, pieces, source, piece, types[i], name));
        out.push_back(std::move(value));
      }
      if (at_run_time && !n.outputs.empty()) {
        const Pieces parts = std::move(out);
        out.clear();
        CHORUS_RETURN_IF_ERROR(RuntimeOutputs(part, parts, &out));
      } else if (OneOutput(n) && !out.empty()) {
        out = {Join(n.outputs[0], out)};
      }
      for (size_t i = 0; i < out.size(); ++i) {
        Publish(part.session, part.node, static_cast<int32_t>(i), std::move(out[i]));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CompleteReduction(const Instance& instance, int32_t rank, const Part& part,
                                 const std::map<int32_t, Pieces>& pieces, const std::string& name) {
    const Node& n = node(part.session, part.node);
    const Collective& c = *n.collective;
    const Pieces& own = pieces.at(rank);
    const bool scatters = c.kind == CollectiveKind::kReduceScatter;
    const bool has_result = c.kind != CollectiveKind::kReduce || c.rank == c.root;
    const auto size = static_cast<size_t>(instance.group_size);
    std::vector<const Value*> factors;
    if (c.reduction == Reduction::kPremulSum) {
      factors.resize(size);
      for (const auto& [r, other] : instance.parts) {
        const ValueIndex factor = node(other.session, other.node).inputs.back();
        factors[static_cast<size_t>(r)] = &values_[other.session][factor];
      }
    }
    // Every member's piece i and their reduction.
    std::vector<Pieces> operands(own.size());
    std::vector<Value> results;
    for (size_t i = 0; i < own.size(); ++i) {
      std::vector<const Value*> present(size);
      operands[i].resize(size);
      for (int32_t r = 0; r < instance.group_size; ++r) {
        Value& operand = operands[i][static_cast<size_t>(r)];
        CHORUS_ASSIGN_OR_RETURN(operand, PieceOf(c.kind, pieces, r, i, own[i].type, name));
        if (pieces.count(r) > 0) present[static_cast<size_t>(r)] = &operand;
      }
      results.push_back(ReduceAll(c.reduction, present, factors));
    }
    const size_t mine = scatters ? static_cast<size_t>(rank) : 0;
    std::vector<Value> out;
    if (AtRunTime(c)) {
      const Value* const receives = Counts(part, false);
      if (receives != nullptr &&
          Elements<int64_t>(*receives)[0] != results[mine].type.dims[0].size) {
        return absl::InvalidArgumentError("counts at run time: other rows than expected");
      }
      CHORUS_RETURN_IF_ERROR(RuntimeOutputs(part, {results[mine]}, &out));
    } else if (has_result) {
      out.push_back(results[mine]);
    }
    if (out.size() < n.outputs.size() && c.reduction == Reduction::kProduct) {
      for (const Value& factor : operands[mine]) {
        out.push_back(Padded(factor, n.outputs[out.size()]));
      }
    } else if (out.size() < n.outputs.size()) {
      const bool whole = OneInput(n);
      Pieces holders;
      for (size_t i = 0; i < own.size(); ++i) {
        holders.push_back(Holders(operands[i], static_cast<size_t>(rank), results[i]));
      }
      if (whole) {
        holders = {Padded(Join(n.outputs.back(), holders), n.outputs.back())};
      }
      out.insert(out.end(), holders.begin(), holders.end());
    }
    for (size_t i = 0; i < n.outputs.size(); ++i) {
      Publish(part.session, part.node, static_cast<int32_t>(i), std::move(out[i]));
    }
    return absl::OkStatus();
  }

  const absl::Span<const Session> sessions_;
  std::vector<std::vector<Value>> values_;
  std::vector<std::vector<bool>> ready_;
  std::vector<std::vector<bool>> done_;  // by node: run, or joined its instance
  std::vector<std::vector<std::string>> names_;
  std::map<std::string, Instance> waiting_;
};

}  // namespace

absl::StatusOr<std::vector<Value>> EvaluateLocal(const NodeView& node,
                                                 absl::Span<const Value* const> inputs,
                                                 absl::Span<const TensorType> outputs) {
  if (node.op == "cast") return std::vector<Value>{Cast(*inputs[0], outputs[0])};
  if (node.op == "random_bits" || node.op == "random_normal" || node.op == "random_uniform") {
    const auto number = [&](int i) {
      return static_cast<uint64_t>(Elements<int64_t>(*inputs[i])[0]);
    };
    return std::vector<Value>{Random(node.op, number(0), number(1), outputs[0])};
  }
  if (IsComparison(node.op)) {
    return DispatchWide(inputs[0]->type.dtype, [&](auto t) {
      return std::vector<Value>{Compare<decltype(t)>(node, inputs, outputs[0])};
    });
  }
  // Indices come of comparing what the inputs are.
  const bool arg = node.op == "arg_max" || node.op == "arg_min" || node.op == "arg_sort" ||
                   node.op == "max_pool_index";
  const DType computed = arg ? inputs[0]->type.dtype : outputs[0].dtype;
  return DispatchWide(computed, [&](auto t) -> absl::StatusOr<std::vector<Value>> {
    Local<decltype(t)> local(node, inputs, outputs[0]);
    if (!Run(local)) return absl::UnimplementedError(absl::StrCat("evaluator: ", node.op));
    return std::vector<Value>{Write(local.type, local.out)};
  });
}

absl::StatusOr<std::vector<std::vector<Value>>> Evaluate(absl::Span<const Session> sessions) {
  for (const Session& session : sessions) {
    if (session.inputs.size() != session.graph->inputs.size()) {
      return absl::InvalidArgumentError("evaluator: as many inputs as the graph has");
    }
    for (size_t i = 0; i < session.inputs.size(); ++i) {
      if (session.inputs[i].type != session.graph->inputs[i].type) {
        return absl::InvalidArgumentError(absl::StrCat("evaluator: type of input ", i));
      }
    }
  }
  Evaluation evaluation(sessions);
  CHORUS_RETURN_IF_ERROR(evaluation.Run());
  return evaluation.Take();
}

}  // namespace testing
}  // namespace chorus
