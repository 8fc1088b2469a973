#include "core/ops/compare/compare_host.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_operand.h"

namespace chorus {
namespace {

// An element of bool, which may hold any byte.
struct Bool {
  uint8_t byte = 0;
  Bool() = default;
  explicit Bool(bool value) : byte(value ? 1 : 0) {}
  operator bool() const { return byte != 0; }
};

template <typename F, typename Otherwise>
auto VisitAll(DType dtype, const F& f, const Otherwise& otherwise) {
  return dtype == DType::kBool ? f(Bool()) : VisitNumbers(dtype, f, otherwise);
}

// What elements are compared in.
template <typename T>
struct ComparedAs {
  using type = typename std::conditional<std::is_integral<T>::value, T, Arithmetic<T>>::type;
};
template <>
struct ComparedAs<Bool> {
  using type = bool;
};

struct Eq {
  template <typename T>
  static bool Of(T a, T b) {
    return a == b;
  }
};
struct Ne {
  template <typename T>
  static bool Of(T a, T b) {
    return a != b;
  }
};
struct Lt {
  template <typename T>
  static bool Of(T a, T b) {
    return a < b;
  }
};
struct Le {
  template <typename T>
  static bool Of(T a, T b) {
    return a <= b;
  }
};
struct And {
  static bool Of(bool a, bool b) { return a && b; }
};
struct Or {
  static bool Of(bool a, bool b) { return a || b; }
};
struct Not {
  static bool Of(bool a, bool) { return !a; }
};

// Of inputs `first` and `second` of the node.
template <typename F, typename T>
class Compare : public HostKernel {
 public:
  Compare(const NodeView& node, int64_t size, int first, int second)
      : HostKernel(size, 2 * sizeof(T) + 1),
        first_{first, IsStretched(node.input(first))},
        second_{second, IsStretched(node.input(second))} {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const HostOperand<T> a(buffers.inputs[first_.input], first_.stretched, end - begin);
    const HostOperand<T> b(buffers.inputs[second_.input], second_.stretched, end - begin);
    Bool* const out = static_cast<Bool*>(buffers.outputs[0]);
    ForEachPiece(begin, end, [&](int64_t from, int64_t size) {
      Piece(a.At(from), b.At(from), out + from, size);
    });
    return absl::OkStatus();
  }

 private:
  struct Operand {
    int input;
    bool stretched;
  };

  static void Piece(const T* a, const T* b, Bool* out, int64_t size) {
    using C = typename ComparedAs<T>::type;
    for (int64_t i = 0; i < size; ++i) {
      out[i] = Bool(F::Of(static_cast<C>(a[i]), static_cast<C>(b[i])));
    }
  }

  const Operand first_;
  const Operand second_;
};

// T has the width of an element; what it holds does not matter.
template <typename T>
class Where : public HostKernel {
 public:
  Where(const NodeView& node, int64_t size)
      : HostKernel(size, 3 * sizeof(T) + 1),
        stretched_{IsStretched(node.input(0)), IsStretched(node.input(1)),
                   IsStretched(node.input(2))} {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const HostOperand<Bool> c(buffers.inputs[0], stretched_[0], end - begin);
    const HostOperand<T> a(buffers.inputs[1], stretched_[1], end - begin);
    const HostOperand<T> b(buffers.inputs[2], stretched_[2], end - begin);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    ForEachPiece(begin, end, [&](int64_t from, int64_t size) {
      Piece(c.At(from), a.At(from), b.At(from), out + from, size);
    });
    return absl::OkStatus();
  }

 private:
  static void Piece(const Bool* c, const T* a, const T* b, T* out, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = c[i] ? a[i] : b[i];
  }

  const bool stretched_[3];
};

// To float such that rounding that once more, to a half type, gives what rounding the number itself
// gives: where it is not exact, to the neighbour whose last bit is 1.
float ToOdd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = static_cast<double>(nearest);
  if (back == x || x != x) return nearest;
  const uint32_t bits = FloatBits(nearest);
  if ((bits & 1) != 0) return nearest;
  const bool too_large = (back < 0 ? -back : back) > (x < 0 ? -x : x);
  return FloatOfBits(too_large ? bits - 1 : bits + 1);
}
float ToOdd(int64_t x) {
  const bool negative = x < 0;
  uint64_t magnitude = negative ? 0 - static_cast<uint64_t>(x) : static_cast<uint64_t>(x);
  // What a double cannot hold is put into the last bit that it can.
  if (magnitude >> 53 != 0) {
    magnitude = (magnitude & ~uint64_t{0x7ff}) | ((magnitude & 0x7ff) != 0 ? 0x800 : 0);
  }
  const double exact = static_cast<double>(magnitude);
  return ToOdd(negative ? -exact : exact);
}

template <typename To, typename From>
To ToInteger(From x) {
  using Limits = std::numeric_limits<To>;
  if (x != x) return 0;
  // One beyond the largest is a power of two, which every dtype that gets here holds.
  const From beyond = static_cast<From>(Limits::max() / 2 + 1) * 2;
  if (x >= beyond) return Limits::max();
  if (x <= static_cast<From>(Limits::min())) return Limits::min();
  return static_cast<To>(x);
}

template <typename To, typename From>
To Convert(From element) {
  const auto x = static_cast<typename ComparedAs<From>::type>(element);
  using X = std::remove_const_t<decltype(x)>;
  if constexpr (std::is_same<To, Bool>::value) {
    return Bool(x != 0);
  } else if constexpr (std::is_integral<To>::value && std::is_floating_point<X>::value) {
    return ToInteger<To>(x);
  } else if constexpr (std::is_integral<X>::value && !std::is_arithmetic<To>::value) {
    return To(ToOdd(static_cast<int64_t>(x)));
  } else if constexpr (std::is_same<X, double>::value && !std::is_arithmetic<To>::value) {
    return To(ToOdd(x));
  } else if constexpr (std::is_arithmetic<To>::value) {
    return static_cast<To>(x);
  } else {
    return To(static_cast<float>(x));
  }
}

template <typename To, typename From>
class Cast : public HostKernel {
 public:
  explicit Cast(int64_t size) : HostKernel(size, sizeof(To) + sizeof(From)) {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const From* const x = static_cast<const From*>(buffers.inputs[0]);
    To* const out = static_cast<To*>(buffers.outputs[0]);
    for (int64_t i = begin; i < end; ++i) out[i] = Convert<To>(x[i]);
    return absl::OkStatus();
  }
};

// a > b is b < a.
template <typename F, bool swapped = false>
HostKernelOrError MakeCompare(const NodeView& node, absl::Span<const TensorType> outputs) {
  return VisitAll(
      node.input(0).dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Compare<F, decltype(t)>>(node, outputs[0].num_elements(),
                                                         swapped ? 1 : 0, swapped ? 0 : 1);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

template <typename F>
HostKernelOrError MakeLogical(const NodeView& node, absl::Span<const TensorType> outputs) {
  return std::make_unique<Compare<F, Bool>>(node, outputs[0].num_elements(), 0,
                                            node.num_inputs() - 1);
}

HostKernelOrError MakeWhere(const NodeView& node, absl::Span<const TensorType> outputs) {
  return VisitWidth(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Where<decltype(t)>>(node, outputs[0].num_elements());
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

HostKernelOrError MakeCast(const NodeView& node, absl::Span<const TensorType> outputs) {
  const auto none = [&] { return HostKernelOrError(NoHostKernel(node, outputs)); };
  return VisitAll(
      node.input(0).dtype,
      [&](auto from) -> HostKernelOrError {
        return VisitAll(
            outputs[0].dtype,
            [&](auto to) -> HostKernelOrError {
              return std::make_unique<Cast<decltype(to), decltype(from)>>(
                  outputs[0].num_elements());
            },
            none);
      },
      none);
}

constexpr HostKernelEntry kEntries[] = {
    {"cast", MakeCast},
    {"eq", MakeCompare<Eq>},
    {"ge", MakeCompare<Le, true>},
    {"gt", MakeCompare<Lt, true>},
    {"le", MakeCompare<Le>},
    {"logical_and", MakeLogical<And>},
    {"logical_not", MakeLogical<Not>},
    {"logical_or", MakeLogical<Or>},
    {"logical_xor", MakeLogical<Ne>},
    {"lt", MakeCompare<Lt>},
    {"ne", MakeCompare<Ne>},
    {"where", MakeWhere},
};

}  // namespace

absl::Span<const HostKernelEntry> CompareHostKernels() { return kEntries; }

}  // namespace chorus
