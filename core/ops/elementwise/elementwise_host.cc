#include "core/ops/elementwise/elementwise_host.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_operand.h"

// The output may be an input's own memory, which hides from compilers that elements do not depend
// on their neighbours. clang's way of saying it is an error where a loop cannot be vectorised (sin,
// cos); it is left to its checks at run time.
#if defined(__clang__)
#define CHORUS_INDEPENDENT
#else
#define CHORUS_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace chorus {
namespace {

// What elements are compared in: half types in float, integers as they are.
template <typename T>
using Ordered = typename std::conditional<std::is_integral<T>::value, T, Arithmetic<T>>::type;

#define CHORUS_UNARY(Name, expression)     \
  struct Name {                            \
    template <typename T>                  \
    static T Of(T element) {               \
      using A = Arithmetic<T>;             \
      const A x = static_cast<A>(element); \
      return static_cast<T>(expression);   \
    }                                      \
  };
#define CHORUS_BINARY(Name, expression)   \
  struct Name {                           \
    template <typename T>                 \
    static T Of(T first, T second) {      \
      using A = Arithmetic<T>;            \
      const A a = static_cast<A>(first);  \
      const A b = static_cast<A>(second); \
      return static_cast<T>(expression);  \
    }                                     \
  };

CHORUS_BINARY(Add, a + b)
CHORUS_BINARY(Sub, a - b)
CHORUS_BINARY(Mul, a* b)
CHORUS_BINARY(Div, a / b)
CHORUS_BINARY(Pow, std::pow(a, b))
CHORUS_UNARY(Neg, -x)
CHORUS_UNARY(Sin, std::sin(x))
CHORUS_UNARY(Cos, std::cos(x))
CHORUS_UNARY(Exp, std::exp(x))
CHORUS_UNARY(Expm1, std::expm1(x))
CHORUS_UNARY(Log, std::log(x))
CHORUS_UNARY(Log1p, std::log1p(x))
CHORUS_UNARY(Sqrt, std::sqrt(x))
CHORUS_UNARY(Rsqrt, 1 / std::sqrt(x))
CHORUS_UNARY(Tanh, std::tanh(x))
CHORUS_UNARY(Erf, std::erf(x))
CHORUS_UNARY(Floor, std::floor(x))
CHORUS_UNARY(Ceil, std::ceil(x))
#undef CHORUS_UNARY
#undef CHORUS_BINARY

struct Sigmoid {
  template <typename T>
  static T Of(T element) {
    using A = Arithmetic<T>;
    const A x = static_cast<A>(element);
    const A small = std::exp(-std::abs(x));  // never overflows
    return static_cast<T>((x < 0 ? small : 1) / (1 + small));
  }
};

// The derivative of sigmoid is even, and has its digits where sigmoid is nearly 1.
template <typename A>
A SigmoidSlope(A x) {
  const A small = std::exp(-std::abs(x));
  return small / ((1 + small) * (1 + small));
}
struct SigmoidGrad {
  template <typename T>
  static T Of(T x, T g) {
    using A = Arithmetic<T>;
    return static_cast<T>(static_cast<A>(g) * SigmoidSlope(static_cast<A>(x)));
  }
};
// tanh(x) is 2 sigmoid(2 x) - 1.
struct TanhGrad {
  template <typename T>
  static T Of(T x, T g) {
    using A = Arithmetic<T>;
    return static_cast<T>(static_cast<A>(g) * (4 * SigmoidSlope(2 * static_cast<A>(x))));
  }
};

// Selections: what comes out is an operand, bit by bit. NaN is larger than nothing and not itself.
struct Maximum {
  template <typename T>
  static T Of(T first, T second) {
    const auto a = static_cast<Ordered<T>>(first);
    const auto b = static_cast<Ordered<T>>(second);
    return a >= b || a != a ? first : second;
  }
};
struct Minimum {
  template <typename T>
  static T Of(T first, T second) {
    const auto a = static_cast<Ordered<T>>(first);
    const auto b = static_cast<Ordered<T>>(second);
    return a <= b || a != a ? first : second;
  }
};
struct ReluGrad {
  template <typename T>
  static T Of(T x, T g) {
    return x > 0 ? g : T{};
  }
};
struct Relu {
  template <typename T>
  static T Of(T x) {
    return x > 0 ? x : T{};
  }
};
struct Abs {
  template <typename T>
  static T Of(T x) {
    if constexpr (std::is_integral<T>::value) {
      return x < 0 ? Neg::Of(x) : x;
    } else {
      return static_cast<T>(std::abs(static_cast<Arithmetic<T>>(x)));
    }
  }
};
struct Sign {
  template <typename T>
  static T Of(T x) {
    using O = Ordered<T>;
    return x > 0 ? static_cast<T>(O{1}) : x < 0 ? static_cast<T>(static_cast<O>(-1)) : x;
  }
};

template <typename F, typename T>
class Unary : public HostKernel {
 public:
  Unary(const NodeView&, int64_t size) : HostKernel(size, 2 * sizeof(T)) {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const a = static_cast<const T*>(buffers.inputs[0]);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    CHORUS_INDEPENDENT
    for (int64_t i = begin; i < end; ++i) out[i] = F::Of(a[i]);
    return absl::OkStatus();
  }
};

template <typename F, typename T>
class Binary : public HostKernel {
 public:
  Binary(const NodeView& node, int64_t size)
      : HostKernel(size, 3 * sizeof(T)),
        stretched_{IsStretched(node.input(0)), IsStretched(node.input(1))} {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const HostOperand<T> a(buffers.inputs[0], stretched_[0], end - begin);
    const HostOperand<T> b(buffers.inputs[1], stretched_[1], end - begin);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    ForEachPiece(begin, end, [&](int64_t first, int64_t size) {
      Piece(a.At(first), b.At(first), out + first, size);
    });
    return absl::OkStatus();
  }

 private:
  static void Piece(const T* a, const T* b, T* out, int64_t size) {
    CHORUS_INDEPENDENT
    for (int64_t i = 0; i < size; ++i) out[i] = F::Of(a[i], b[i]);
  }

  const bool stretched_[2];
};

// Division of integers, which may fail.
template <typename T>
class IntegerDiv : public HostKernel {
 public:
  IntegerDiv(const NodeView& node, const TensorType& type)
      : HostKernel(type.num_elements(), 8 * sizeof(T)),
        type_(type),
        stretched_{IsStretched(node.input(0)), IsStretched(node.input(1))} {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const a = static_cast<const T*>(buffers.inputs[0]);
    const T* const b = static_cast<const T*>(buffers.inputs[1]);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    for (int64_t i = begin; i < end; ++i) {
      const T dividend = a[stretched_[0] ? 0 : i];
      const T divisor = b[stretched_[1] ? 0 : i];
      if (divisor == 0) {
        Error error(Reason::kBadType);
        error.op = "div";
        error.expected = "divisors other than 0";
        error.got = absl::StrCat("0 as element ", i);
        error.message = absl::StrCat("div: element ", i, " of ", type_.ToString(),
                                     " is an integer divided by 0, expected ", error.expected);
        return ToStatus(error);
      }
      // The least one by -1 is no value of its type.
      if constexpr (std::is_signed<T>::value) {
        out[i] = divisor == -1 ? Neg::Of(dividend) : static_cast<T>(dividend / divisor);
      } else {
        out[i] = static_cast<T>(dividend / divisor);
      }
    }
    return absl::OkStatus();
  }

 private:
  const TensorType type_;
  const bool stretched_[2];
};

template <template <typename, typename> class Kernel, typename F>
HostKernelOrError Make(const NodeView& node, absl::Span<const TensorType> outputs) {
  return VisitNumbers(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Kernel<F, decltype(t)>>(node, outputs[0].num_elements());
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

// The same of ops whose shape rules admit floating point only.
template <template <typename, typename> class Kernel, typename F>
HostKernelOrError MakeFloating(const NodeView& node, absl::Span<const TensorType> outputs) {
  return VisitFloating(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Kernel<F, decltype(t)>>(node, outputs[0].num_elements());
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

HostKernelOrError MakeDiv(const NodeView& node, absl::Span<const TensorType> outputs) {
  if (IsFloating(outputs[0].dtype)) return MakeFloating<Binary, Div>(node, outputs);
  return VisitNumbers(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        using T = decltype(t);
        if constexpr (std::is_integral<T>::value) {
          return std::make_unique<IntegerDiv<T>>(node, outputs[0]);
        }
        return NoHostKernel(node, outputs);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {
    {"abs", Make<Unary, Abs>},
    {"add", Make<Binary, Add>},
    {"ceil", MakeFloating<Unary, Ceil>},
    {"cos", MakeFloating<Unary, Cos>},
    {"div", MakeDiv},
    {"erf", MakeFloating<Unary, Erf>},
    {"exp", MakeFloating<Unary, Exp>},
    {"expm1", MakeFloating<Unary, Expm1>},
    {"floor", MakeFloating<Unary, Floor>},
    {"log", MakeFloating<Unary, Log>},
    {"log1p", MakeFloating<Unary, Log1p>},
    {"maximum", Make<Binary, Maximum>},
    {"minimum", Make<Binary, Minimum>},
    {"mul", Make<Binary, Mul>},
    {"neg", Make<Unary, Neg>},
    {"pow", MakeFloating<Binary, Pow>},
    {"relu", Make<Unary, Relu>},
    {"relu_grad", MakeFloating<Binary, ReluGrad>},
    {"rsqrt", MakeFloating<Unary, Rsqrt>},
    {"sigmoid", MakeFloating<Unary, Sigmoid>},
    {"sigmoid_grad", MakeFloating<Binary, SigmoidGrad>},
    {"sign", Make<Unary, Sign>},
    {"sin", MakeFloating<Unary, Sin>},
    {"sqrt", MakeFloating<Unary, Sqrt>},
    {"sub", Make<Binary, Sub>},
    {"tanh", MakeFloating<Unary, Tanh>},
    {"tanh_grad", MakeFloating<Binary, TanhGrad>},
};

}  // namespace

absl::Span<const HostKernelEntry> ElementwiseHostKernels() { return kEntries; }

}  // namespace chorus
