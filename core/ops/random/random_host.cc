#include "core/ops/random/random_host.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/random/numbers.h"

namespace chorus {
namespace {

template <typename F, typename T>
class Random : public HostKernel {
 public:
  explicit Random(int64_t size)
      : HostKernel((size + kPerBlock<T> - 1) / kPerBlock<T>,
                   std::is_same<F, RandomNormal>::value ? 256 : 64),
        size_(size) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const auto seed = static_cast<uint64_t>(*static_cast<const int64_t*>(buffers.inputs[0]));
    const auto offset = static_cast<uint64_t>(*static_cast<const int64_t*>(buffers.inputs[1]));
    T* const out = static_cast<T*>(buffers.outputs[0]);
    for (int64_t n = begin; n < end; ++n) {
      const PhiloxBlock words = WordsOf(seed, offset, static_cast<uint64_t>(n));
      const int64_t first = n * kPerBlock<T>;
      if (size_ - first >= kPerBlock<T>) {
        F::Of(words, out + first);
      } else {
        T last[kPerBlock<T>];
        F::Of(words, last);
        std::copy_n(last, size_ - first, out + first);
      }
    }
    return absl::OkStatus();
  }

 private:
  const int64_t size_;
};

template <typename F>
HostKernelOrError MakeReal(const NodeView& node, absl::Span<const TensorType> outputs) {
  return VisitFloating(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Random<F, decltype(t)>>(outputs[0].num_elements());
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

HostKernelOrError MakeBits(const NodeView& node, absl::Span<const TensorType> outputs) {
  return VisitWidth(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Random<RandomBits, decltype(t)>>(outputs[0].num_elements());
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {
    {"random_bits", MakeBits},
    {"random_normal", MakeReal<RandomNormal>},
    {"random_uniform", MakeReal<RandomUniform>},
};

}  // namespace

absl::Span<const HostKernelEntry> RandomHostKernels() { return kEntries; }

}  // namespace chorus
