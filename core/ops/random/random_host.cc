#include "core/ops/random/random_host.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/random/philox.h"

namespace chorus {
namespace {

// Elements of a block.
template <typename T>
constexpr int64_t kPerBlock = sizeof(T) == 8 ? 2 : 4;

uint64_t TwoWords(const PhiloxBlock& words, int i) {
  return uint64_t{words[2 * i + 1]} << 32 | words[2 * i];
}

// How many random bits a number in [0, 1) takes: as many as are exact right below 1.
template <typename T>
constexpr int kBits = 24;
template <>
constexpr int kBits<double> = 53;
template <>
constexpr int kBits<F16> = 11;
template <>
constexpr int kBits<BF16> = 8;

struct Bits {
  template <typename T>
  static void Of(const PhiloxBlock& words, T* out) {
    for (int i = 0; i < kPerBlock<T>; ++i) {
      if constexpr (sizeof(T) == 8) {
        out[i] = static_cast<T>(TwoWords(words, i));
      } else {
        out[i] = static_cast<T>(words[i]);
      }
    }
  }
};

struct Uniform {
  template <typename T>
  static void Of(const PhiloxBlock& words, T* out) {
    using A = Arithmetic<T>;
    const A step = static_cast<A>(1) / static_cast<A>(uint64_t{1} << kBits<T>);
    for (int i = 0; i < kPerBlock<T>; ++i) {
      if constexpr (sizeof(T) == 8) {
        out[i] = static_cast<A>(TwoWords(words, i) >> (64 - kBits<T>)) * step;
      } else {
        out[i] = static_cast<T>(static_cast<A>(words[i] >> (32 - kBits<T>)) * step);
      }
    }
  }
};

struct Normal {
  template <typename T>
  static void Of(const PhiloxBlock& words, T* out) {
    if constexpr (sizeof(T) == 8) {
      constexpr double kTwoPi = 6.283185307179586477;
      // From half a step to 1, never 0; the angle is a multiple of 2^-53 turns.
      const double u = (static_cast<double>(TwoWords(words, 0) >> 11) + 0.5) * 0x1p-53;
      const double v = static_cast<double>(TwoWords(words, 1) >> 11) * 0x1p-53;
      const double radius = std::sqrt(-2 * std::log(u));
      out[0] = radius * std::cos(kTwoPi * v);
      out[1] = radius * std::sin(kTwoPi * v);
    } else {
      constexpr float kTwoPi = 6.2831853f;
      for (int i = 0; i < 4; i += 2) {
        const float u = (static_cast<float>(words[i]) + 0.5f) * 0x1p-32f;
        const float v = static_cast<float>(words[i + 1] >> 8) * 0x1p-24f;
        const float radius = std::sqrt(-2 * std::log(u));
        out[i] = static_cast<T>(radius * std::cos(kTwoPi * v));
        out[i + 1] = static_cast<T>(radius * std::sin(kTwoPi * v));
      }
    }
  }
};

template <typename F, typename T>
class Random : public HostKernel {
 public:
  explicit Random(int64_t size)
      : HostKernel((size + kPerBlock<T> - 1) / kPerBlock<T>,
                   std::is_same<F, Normal>::value ? 256 : 64),
        size_(size) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const auto seed = static_cast<uint64_t>(*static_cast<const int64_t*>(buffers.inputs[0]));
    const auto offset = static_cast<uint64_t>(*static_cast<const int64_t*>(buffers.inputs[1]));
    T* const out = static_cast<T*>(buffers.outputs[0]);
    for (int64_t n = begin; n < end; ++n) {
      const PhiloxBlock counter = {
          static_cast<uint32_t>(n), static_cast<uint32_t>(static_cast<uint64_t>(n) >> 32),
          static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)};
      const PhiloxBlock words =
          Philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
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
        return std::make_unique<Random<Bits, decltype(t)>>(outputs[0].num_elements());
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {
    {"random_bits", MakeBits},
    {"random_normal", MakeReal<Normal>},
    {"random_uniform", MakeReal<Uniform>},
};

}  // namespace

absl::Span<const HostKernelEntry> RandomHostKernels() { return kEntries; }

}  // namespace chorus
