#include "core/ops/compare/compare_host.h"

#include <cstdint>
#include <memory>

#include "core/base/error.h"
#include "core/ops/compare/compare_functions.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_operand.h"

namespace chorus {
namespace {

template <typename F, typename Otherwise>
auto VisitAll(DType dtype, const F& f, const Otherwise& otherwise) {
  return dtype == DType::kBool ? f(Bool()) : VisitNumbers(dtype, f, otherwise);
}

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
    for (int64_t i = 0; i < size; ++i) out[i] = compare::OfElements<F>::Of(a[i], b[i]);
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

template <typename To, typename From>
class Cast : public HostKernel {
 public:
  explicit Cast(int64_t size) : HostKernel(size, sizeof(To) + sizeof(From)) {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const From* const x = static_cast<const From*>(buffers.inputs[0]);
    To* const out = static_cast<To*>(buffers.outputs[0]);
    for (int64_t i = begin; i < end; ++i) out[i] = compare::Convert<To>(x[i]);
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
    {"eq", MakeCompare<compare::Eq>},
    {"ge", MakeCompare<compare::Le, true>},
    {"gt", MakeCompare<compare::Lt, true>},
    {"le", MakeCompare<compare::Le>},
    {"logical_and", MakeLogical<compare::And>},
    {"logical_not", MakeLogical<compare::Not>},
    {"logical_or", MakeLogical<compare::Or>},
    {"logical_xor", MakeLogical<compare::Ne>},
    {"lt", MakeCompare<compare::Lt>},
    {"ne", MakeCompare<compare::Ne>},
    {"where", MakeWhere},
};

}  // namespace

absl::Span<const HostKernelEntry> CompareHostKernels() { return kEntries; }

}  // namespace chorus
