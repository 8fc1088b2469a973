// What each thread of the kernels of holds, share, scale and product does.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_REDUCTION_REDUCTION_KERNELS_H_
#define CHORUS_CORE_OPS_REDUCTION_REDUCTION_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"
#include "core/ops/device_loops.h"
#include "core/tensor/half.h"

namespace chorus {
namespace cuda {

// Steps from one element to the next are 0 for an operand that stands for all.
template <typename T>
struct HoldsArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  const T* y = nullptr;
  float* out = nullptr;
  int64_t count = 0;
  int64_t x_step = 1;
  int64_t y_step = 1;
};
template <typename T>
CHORUS_DEVICE void Holds(const HoldsArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  SetElements(lane, args.count, args.out, [&](int64_t i) {
    const A a = static_cast<A>(args.x[i * args.x_step]);
    const A b = static_cast<A>(args.y[i * args.y_step]);
    return a == b || (a != a && b != b) ? 1.0f : 0.0f;
  });
}

template <typename T>
struct ShareArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  const float* holders = nullptr;
  T* out = nullptr;
  int64_t count = 0;
};
template <typename T>
CHORUS_DEVICE void Share(const ShareArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  SetElements(lane, args.count, args.out, [&](int64_t i) {
    const float holders = args.holders[i];
    return holders == 0 ? T() : static_cast<T>(static_cast<A>(args.x[i]) / static_cast<A>(holders));
  });
}

template <typename T>
struct ScaleArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  const Arithmetic<T>* factor = nullptr;
  T* out = nullptr;
  int64_t count = 0;
};
template <typename T>
CHORUS_DEVICE void Scale(const ScaleArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  if (lane.index >= args.count) return;  // the factor may be overwritten by the one element
  const A factor = *args.factor;
  SetElements(lane, args.count, args.out,
              [&](int64_t i) { return static_cast<T>(static_cast<A>(args.x[i]) * factor); });
}

// So many of the inputs, in order: the first ones, or those that follow where products are what
// they were.
template <typename T>
struct ProductArgs {
  static constexpr int kScratchPacks = 0;
  static constexpr int kMost = 256;
  const T* in[kMost] = {};
  int64_t first = 0;  // the number of the input that in[0] is
  int64_t inputs = 0;
  int64_t count = 0;  // of elements
  // Not rounded; null if there is one launch.
  Arithmetic<T>* products = nullptr;
  T* out = nullptr;  // null if inputs follow
  bool last = true;
};
template <typename T>
CHORUS_DEVICE void Product(const ProductArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  for (int64_t i = lane.index; i < args.count; i += lane.count) {
    A product = static_cast<A>(args.in[0][i]);
    if (args.first > 0) product = args.products[i] * product;
    for (int64_t n = 1; n < args.inputs; ++n) product *= static_cast<A>(args.in[n][i]);
    if (args.last) {
      args.out[i] = static_cast<T>(product);
    } else {
      args.products[i] = product;
    }
  }
}

#define CHORUS_KERNELS_OF_Reduction(X)               \
  X(holds_f16, HoldsArgs<F16>, Holds<F16>)           \
  X(holds_bf16, HoldsArgs<BF16>, Holds<BF16>)        \
  X(holds_f32, HoldsArgs<float>, Holds<float>)       \
  X(holds_f64, HoldsArgs<double>, Holds<double>)     \
  X(share_f16, ShareArgs<F16>, Share<F16>)           \
  X(share_bf16, ShareArgs<BF16>, Share<BF16>)        \
  X(share_f32, ShareArgs<float>, Share<float>)       \
  X(share_f64, ShareArgs<double>, Share<double>)     \
  X(scale_f16, ScaleArgs<F16>, Scale<F16>)           \
  X(scale_bf16, ScaleArgs<BF16>, Scale<BF16>)        \
  X(scale_f32, ScaleArgs<float>, Scale<float>)       \
  X(scale_f64, ScaleArgs<double>, Scale<double>)     \
  X(product_f16, ProductArgs<F16>, Product<F16>)     \
  X(product_bf16, ProductArgs<BF16>, Product<BF16>)  \
  X(product_f32, ProductArgs<float>, Product<float>) \
  X(product_f64, ProductArgs<double>, Product<double>)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_REDUCTION_REDUCTION_KERNELS_H_
