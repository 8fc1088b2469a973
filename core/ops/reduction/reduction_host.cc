#include "core/ops/reduction/reduction_host.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"

namespace chorus {
namespace {

template <typename T>
class Share : public HostKernel {
 public:
  explicit Share(int64_t size) : HostKernel(size, 2 * sizeof(T) + sizeof(float)) {}
  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t begin, int64_t end) const override {
    const T* const x = static_cast<const T*>(inputs[0]);
    const float* const holders = static_cast<const float*>(inputs[1]);
    T* const out = static_cast<T*>(outputs[0]);
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
  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t begin, int64_t end) const override {
    const T* const x = static_cast<const T*>(inputs[0]);
    const Arithmetic<T> factor = *static_cast<const Arithmetic<T>*>(inputs[1]);
    T* const out = static_cast<T*>(outputs[0]);
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
  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t begin, int64_t end) const override {
    // In pieces that stay in the cache, and apart from the output, which may be one of the inputs.
    constexpr int64_t kPiece = 512;
    Arithmetic<T> product[kPiece];
    T* const out = static_cast<T*>(outputs[0]);
    while (begin < end) {
      const int64_t size = std::min(kPiece, end - begin);
      for (size_t n = 0; n < inputs.size(); ++n) {
        const T* const x = static_cast<const T*>(inputs[n]) + begin;
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

using Made = absl::StatusOr<std::unique_ptr<HostKernel>>;

template <template <typename> class Kernel, typename... Args>
Made Make(const NodeView& node, absl::Span<const TensorType> outputs, Args... args) {
  return VisitFloating(
      outputs[0].dtype,
      [&](auto t) -> Made {
        return std::make_unique<Kernel<decltype(t)>>(outputs[0].num_elements(), args...);
      },
      [&] { return Made(NoHostKernel(node, outputs)); });
}

Made MakeProduct(const NodeView& node, absl::Span<const TensorType> outputs) {
  return Make<Product>(node, outputs, node.num_inputs());
}

constexpr HostKernelEntry kEntries[] = {
    {"product", MakeProduct}, {"scale", Make<Scale>}, {"share", Make<Share>}};

}  // namespace

absl::Span<const HostKernelEntry> ReductionHostKernels() { return kEntries; }

}  // namespace chorus
