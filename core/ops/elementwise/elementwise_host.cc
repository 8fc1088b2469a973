#include "core/ops/elementwise/elementwise_host.h"

#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/base/error.h"
#include "core/ops/elementwise/elementwise.h"
#include "core/ops/elementwise/elementwise_functions.h"
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
      if (divisor == 0) return DividedByZero(type_, i);
      out[i] = elementwise::Quotient::Of(dividend, divisor);
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
  if (IsFloating(outputs[0].dtype)) return MakeFloating<Binary, elementwise::Div>(node, outputs);
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
    {"abs", Make<Unary, elementwise::Abs>},
    {"add", Make<Binary, elementwise::Add>},
    {"ceil", MakeFloating<Unary, elementwise::Ceil>},
    {"cos", MakeFloating<Unary, elementwise::Cos>},
    {"div", MakeDiv},
    {"erf", MakeFloating<Unary, elementwise::Erf>},
    {"exp", MakeFloating<Unary, elementwise::Exp>},
    {"expm1", MakeFloating<Unary, elementwise::Expm1>},
    {"floor", MakeFloating<Unary, elementwise::Floor>},
    {"log", MakeFloating<Unary, elementwise::Log>},
    {"log1p", MakeFloating<Unary, elementwise::Log1p>},
    {"maximum", Make<Binary, elementwise::Maximum>},
    {"minimum", Make<Binary, elementwise::Minimum>},
    {"mul", Make<Binary, elementwise::Mul>},
    {"neg", Make<Unary, elementwise::Neg>},
    {"pow", MakeFloating<Binary, elementwise::Pow>},
    {"relu", Make<Unary, elementwise::Relu>},
    {"relu_grad", MakeFloating<Binary, elementwise::ReluGrad>},
    {"rsqrt", MakeFloating<Unary, elementwise::Rsqrt>},
    {"sigmoid", MakeFloating<Unary, elementwise::Sigmoid>},
    {"sigmoid_grad", MakeFloating<Binary, elementwise::SigmoidGrad>},
    {"sign", Make<Unary, elementwise::Sign>},
    {"sin", MakeFloating<Unary, elementwise::Sin>},
    {"sqrt", MakeFloating<Unary, elementwise::Sqrt>},
    {"sub", Make<Binary, elementwise::Sub>},
    {"tanh", MakeFloating<Unary, elementwise::Tanh>},
    {"tanh_grad", MakeFloating<Binary, elementwise::TanhGrad>},
};

}  // namespace

absl::Span<const HostKernelEntry> ElementwiseHostKernels() { return kEntries; }

}  // namespace chorus
