#include "core/ops/elementwise/elementwise_host.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>

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

struct Add {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(static_cast<Arithmetic<T>>(a) + static_cast<Arithmetic<T>>(b));
  }
};
struct Sub {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(static_cast<Arithmetic<T>>(a) - static_cast<Arithmetic<T>>(b));
  }
};
struct Mul {
  template <typename T>
  static T Of(T a, T b) {
    return static_cast<T>(static_cast<Arithmetic<T>>(a) * static_cast<Arithmetic<T>>(b));
  }
};
struct ReluGrad {
  template <typename T>
  static T Of(T x, T g) {
    return x > 0 ? g : T{};
  }
};
struct Neg {
  template <typename T>
  static T Of(T a) {
    return static_cast<T>(-static_cast<Arithmetic<T>>(a));
  }
};
struct Relu {
  template <typename T>
  static T Of(T a) {
    return a > 0 ? a : T{};
  }
};
struct Sin {
  template <typename T>
  static T Of(T a) {
    return static_cast<T>(std::sin(static_cast<Arithmetic<T>>(a)));
  }
};
struct Cos {
  template <typename T>
  static T Of(T a) {
    return static_cast<T>(std::cos(static_cast<Arithmetic<T>>(a)));
  }
};

template <typename F, typename T>
class Unary : public HostKernel {
 public:
  Unary(const NodeView&, int64_t size) : HostKernel(size, 2 * sizeof(T)) {}
  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t begin, int64_t end) const override {
    const T* const a = static_cast<const T*>(inputs[0]);
    T* const out = static_cast<T*>(outputs[0]);
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
  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t begin, int64_t end) const override {
    const HostOperand<T> a(inputs[0], stretched_[0], end - begin);
    const HostOperand<T> b(inputs[1], stretched_[1], end - begin);
    T* const out = static_cast<T*>(outputs[0]);
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

using Made = absl::StatusOr<std::unique_ptr<HostKernel>>;

template <template <typename, typename> class Kernel, typename F>
Made Make(const NodeView& node, absl::Span<const TensorType> outputs) {
  const auto make = [&](auto t) -> Made {
    return std::make_unique<Kernel<F, decltype(t)>>(node, outputs[0].num_elements());
  };
  const auto none = [&] { return Made(NoHostKernel(node, outputs)); };
  // sin and cos of integers do not pass the shape rule.
  if constexpr (std::is_same<F, Sin>::value || std::is_same<F, Cos>::value) {
    return VisitFloating(outputs[0].dtype, make, none);
  } else {
    return VisitNumbers(outputs[0].dtype, make, none);
  }
}

constexpr HostKernelEntry kEntries[] = {
    {"add", Make<Binary, Add>}, {"cos", Make<Unary, Cos>},   {"mul", Make<Binary, Mul>},
    {"neg", Make<Unary, Neg>},  {"relu", Make<Unary, Relu>}, {"relu_grad", Make<Binary, ReluGrad>},
    {"sin", Make<Unary, Sin>},  {"sub", Make<Binary, Sub>},
};

}  // namespace

absl::Span<const HostKernelEntry> ElementwiseHostKernels() { return kEntries; }

}  // namespace chorus
