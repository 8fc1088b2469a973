#include "core/ops/reduction/reduction_host.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_operand.h"

namespace chorus {
namespace {

template <typename T>
class Holds : public HostKernel {
 public:
  Holds(int64_t size, const NodeView& node)
      : HostKernel(size, 2 * sizeof(T) + sizeof(float)),
        stretched_{IsStretched(node.input(0)), IsStretched(node.input(1))} {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const HostOperand<T> x(buffers.inputs[0], stretched_[0], end - begin);
    const HostOperand<T> y(buffers.inputs[1], stretched_[1], end - begin);
    float* const out = static_cast<float*>(buffers.outputs[0]);
    ForEachPiece(begin, end, [&](int64_t first, int64_t size) {
      Piece(x.At(first), y.At(first), out + first, size);
    });
    return absl::OkStatus();
  }

 private:
  static void Piece(const T* x, const T* y, float* out, int64_t size) {
    using A = Arithmetic<T>;
    for (int64_t i = 0; i < size; ++i) {
      const A a = static_cast<A>(x[i]);
      const A b = static_cast<A>(y[i]);
      out[i] = a == b || (a != a && b != b) ? 1 : 0;
    }
  }

  const bool stretched_[2];
};

template <typename T>
class Share : public HostKernel {
 public:
  explicit Share(int64_t size) : HostKernel(size, 2 * sizeof(T) + sizeof(float)) {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const x = static_cast<const T*>(buffers.inputs[0]);
    const float* const holders = static_cast<const float*>(buffers.inputs[1]);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    for (int64_t i = begin; i < end; ++i) {
      using A = Arithmetic<T>;
      const float h = holders[i];
      out[i] = h == 0 ? T() : static_cast<T>(static_cast<A>(x[i]) / static_cast<A>(h));
    }
    return absl::OkStatus();
  }
};

template <typename T>
class Scale : public HostKernel {
 public:
  explicit Scale(int64_t size) : HostKernel(size, 2 * sizeof(T)) {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const x = static_cast<const T*>(buffers.inputs[0]);
    const Arithmetic<T> factor = *static_cast<const Arithmetic<T>*>(buffers.inputs[1]);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    for (int64_t i = begin; i < end; ++i) {
      out[i] = static_cast<T>(static_cast<Arithmetic<T>>(x[i]) * factor);
    }
    return absl::OkStatus();
  }
};

template <typename T>
class Product : public HostKernel {
 public:
  Product(int64_t size, int num_inputs) : HostKernel(size, (num_inputs + 1) * sizeof(T)) {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    // In pieces that stay in the cache, and apart from the output, which may be one of the inputs.
    constexpr int64_t kPiece = 512;
    Arithmetic<T> product[kPiece];
    T* const out = static_cast<T*>(buffers.outputs[0]);
    while (begin < end) {
      const int64_t size = std::min(kPiece, end - begin);
      for (size_t n = 0; n < buffers.inputs.size(); ++n) {
        const T* const x = static_cast<const T*>(buffers.inputs[n]) + begin;
        if (n == 0) {
          for (int64_t i = 0; i < size; ++i) product[i] = static_cast<Arithmetic<T>>(x[i]);
        } else {
          for (int64_t i = 0; i < size; ++i) product[i] *= static_cast<Arithmetic<T>>(x[i]);
        }
      }
      for (int64_t i = 0; i < size; ++i) out[begin + i] = static_cast<T>(product[i]);
      begin += size;
    }
    return absl::OkStatus();
  }
};

template <template <typename> class Kernel, typename... Args>
HostKernelOrError Make(const NodeView& node, absl::Span<const TensorType> outputs, Args... args) {
  return VisitFloating(
      node.input(0).dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Kernel<decltype(t)>>(outputs[0].num_elements(), args...);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

HostKernelOrError MakeProduct(const NodeView& node, absl::Span<const TensorType> outputs) {
  return Make<Product>(node, outputs, node.num_inputs());
}

HostKernelOrError MakeHolds(const NodeView& node, absl::Span<const TensorType> outputs) {
  return Make<Holds, const NodeView&>(node, outputs, node);
}

constexpr HostKernelEntry kEntries[] = {
    {"holds", MakeHolds}, {"product", MakeProduct}, {"scale", Make<Scale>}, {"share", Make<Share>}};

}  // namespace

absl::Span<const HostKernelEntry> ReductionHostKernels() { return kEntries; }

}  // namespace chorus
