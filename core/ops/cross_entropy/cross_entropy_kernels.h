// What each thread of cross_entropy's kernels does, once the ExpSum of each row of scores is there.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors: a
// label that is no class and not ignored, by its element.
#ifndef CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_KERNELS_H_
#define CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_KERNELS_H_

#include <cmath>
#include <cstdint>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"
#include "core/ops/device_indices.h"
#include "core/ops/device_rows.h"
#include "core/ops/softmax/exp_sum.h"

namespace chorus {
namespace cuda {

template <typename T>
struct CrossEntropyArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  const T* g = nullptr;                           // of the gradient
  const ExpSum<Arithmetic<T>>* states = nullptr;  // of rows
  T* out = nullptr;
  DeviceIndices labels;
  RowParts rows;  // their stride is 1
  uint64_t* fault_word = nullptr;
  uint64_t fault_first = 0;

  // Whether the row takes part; tells of a label that may not be.
  CHORUS_DEVICE bool Counts(int64_t row, int64_t label) const {
    if (labels.IsIgnored(label)) return false;
    if (labels.IsWithin(label)) return true;
    StoreLeast(fault_word, fault_first + static_cast<uint64_t>(row));
    return false;
  }
};

// A thread has rows.
template <typename T>
CHORUS_DEVICE void CrossEntropy(const CrossEntropyArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  for (int64_t row = lane.index; row < args.rows.outer; row += lane.count) {
    const int64_t label = args.labels.At(row);
    A loss = 0;
    if (args.Counts(row, label)) {
      const ExpSum<A> state = args.states[row];
      const A score = static_cast<A>(args.x[row * args.rows.size + label]);
      loss = std::log1p(state.beside) + (state.most - score);
    }
    args.out[row] = static_cast<T>(loss);
  }
}

// A thread has parts of rows.
template <typename T>
CHORUS_DEVICE void CrossEntropyGrad(const CrossEntropyArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    const int64_t label = args.labels.At(part.row);
    if (!args.Counts(part.row, label)) {
      T* const out = args.out + part.row * rows.size;
      for (int64_t i = part.index; i < rows.size; i += rows.parts) out[i] = static_cast<T>(A{});
      continue;
    }
    const ExpSum<A> state = args.states[part.row];
    const A score = static_cast<A>(args.x[part.row * rows.size + label]);
    // 1 - p of the label, before it is divided: where it is the most nothing is taken from 1, and
    // else the most's 1 stays, so that there is enough of it. -inf is no most: the row is NaN.
    const A below = score - state.most;
    const A others = below == 0 ? state.beside : 1 + (state.beside - std::exp(below));
    const A sum = 1 + state.beside;
    const A g = static_cast<A>(args.g[part.row]);
    ForElementsOf(
        rows, part, [&](int64_t at) { return args.x[at]; },
        [&](int64_t i, int64_t at, T x) {
          const A exp = i == label ? -others : std::exp(static_cast<A>(x) - state.most);
          args.out[at] = static_cast<T>(g * (exp / sum));
        });
  }
}

#define CHORUS_CROSS_ENTROPY_KERNELS(X, dtype, T)                \
  X(cross_entropy_##dtype, CrossEntropyArgs<T>, CrossEntropy<T>) \
  X(cross_entropy_grad_##dtype, CrossEntropyArgs<T>, CrossEntropyGrad<T>)
#define CHORUS_KERNELS_OF_CrossEntropy(X)     \
  CHORUS_CROSS_ENTROPY_KERNELS(X, f16, F16)   \
  CHORUS_CROSS_ENTROPY_KERNELS(X, bf16, BF16) \
  CHORUS_CROSS_ENTROPY_KERNELS(X, f32, float) \
  CHORUS_CROSS_ENTROPY_KERNELS(X, f64, double)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_KERNELS_H_
