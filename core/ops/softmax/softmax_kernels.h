// What each thread of softmax's kernels does. softmax and log_softmax: parts of rows, what they
// gave taken together, then the elements. center, center_grad and softmax_grad: the same twice, for
// where the largest weight is and for sums relative to it.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_KERNELS_H_
#define CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_KERNELS_H_

#include <cmath>
#include <cstdint>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"
#include "core/ops/device_rows.h"
#include "core/ops/softmax/exp_sum.h"

namespace chorus {
namespace cuda {

template <typename T>
struct ExpSumArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  ExpSum<Arithmetic<T>>* states = nullptr;  // of parts
  RowParts rows;
};
template <typename T>
CHORUS_DEVICE void SumExps(const ExpSumArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    ExpSum<A> state;
    ForElementsOf(
        rows, part, [&](int64_t at) { return args.x[at]; },
        [&](int64_t, int64_t, T x) { state.Take(static_cast<A>(x)); });
    args.states[t] = state;
  }
}

template <typename T>
struct SoftmaxArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  const ExpSum<Arithmetic<T>>* states = nullptr;  // of rows
  T* out = nullptr;
  RowParts rows;
};
template <typename T>
CHORUS_DEVICE void Softmax(const SoftmaxArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    const ExpSum<A> state = args.states[part.row];
    const A sum = 1 + state.beside;
    ForElementsOf(
        rows, part, [&](int64_t at) { return args.x[at]; },
        [&](int64_t, int64_t at, T x) {
          args.out[at] = static_cast<T>(std::exp(static_cast<A>(x) - state.most) / sum);
        });
  }
}
template <typename T>
CHORUS_DEVICE void LogSoftmax(const SoftmaxArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    const ExpSum<A> state = args.states[part.row];
    const A log = std::log1p(state.beside);
    ForElementsOf(
        rows, part, [&](int64_t at) { return args.x[at]; },
        [&](int64_t, int64_t at, T x) {
          args.out[at] = static_cast<T>(static_cast<A>(x) - state.most - log);
        });
  }
}

// Where the weight is that is the largest, of equal ones the first. NaN is none.
template <typename A>
struct MostWeight {
  A size = -1;
  int64_t at = 0;  // in its row

  CHORUS_DEVICE void Merge(const MostWeight& other) {
    if (other.size > size || (other.size == size && other.at < at)) *this = other;
  }
};
template <typename T>
struct MostWeightArgs {
  static constexpr int kScratchPacks = 0;
  const T* w = nullptr;
  MostWeight<Arithmetic<T>>* states = nullptr;  // of parts
  RowParts rows;
};
template <typename T>
CHORUS_DEVICE void FindMostWeight(const MostWeightArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    MostWeight<A> state;
    ForElementsOf(
        rows, part, [&](int64_t at) { return args.w[at]; },
        [&](int64_t i, int64_t, T w) {
          const A size = std::abs(static_cast<A>(w));
          if (size > state.size) state = {size, i};
        });
    args.states[t] = state;
  }
}

enum class Centering : int32_t { kCenter, kCenterGrad, kSoftmaxGrad };

// Of center_grad the sums of w and x without the largest weight's, of the others those of w and of
// w (x - the largest weight's x).
template <typename A>
struct CenterSums {
  A weights = 0;
  A sum = 0;

  CHORUS_DEVICE void Merge(const CenterSums& other) {
    weights += other.weights;
    sum += other.sum;
  }
};
template <typename T>
struct CenterArgs {
  static constexpr int kScratchPacks = 0;
  const T* w = nullptr;
  const T* x = nullptr;
  const MostWeight<Arithmetic<T>>* most = nullptr;  // of rows
  CenterSums<Arithmetic<T>>* sums = nullptr;  // of parts, when they are added up, then of rows
  T* out = nullptr;
  RowParts rows;
  Centering centering = Centering::kCenter;

  struct Pair {
    T w, x;
  };
  CHORUS_DEVICE Pair At(int64_t at) const { return {w[at], x[at]}; }
  // Where the largest weight of a part's row stands.
  CHORUS_DEVICE int64_t MostOf(const RowPart& part) const {
    return (part.outer * rows.size + most[part.row].at) * rows.stride + part.inner;
  }
};
template <typename T>
CHORUS_DEVICE void SumCenter(const CenterArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    const int64_t most = args.MostOf(part);
    const A of_most = static_cast<A>(args.x[most]);
    CenterSums<A> sums;
    ForElementsOf(
        rows, part, [&](int64_t at) { return args.At(at); },
        [&](int64_t, int64_t at, const typename CenterArgs<T>::Pair& pair) {
          const A w = static_cast<A>(pair.w);
          const A x = static_cast<A>(pair.x);
          if (args.centering != Centering::kCenterGrad) {
            sums.weights += w;
            sums.sum += w * (x - of_most);
          } else if (at != most) {
            sums.weights += w;
            sums.sum += x;
          }
        });
    args.sums[t] = sums;
  }
}
template <typename T>
CHORUS_DEVICE void Center(const CenterArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    const int64_t most = args.MostOf(part);
    const CenterSums<A> sums = args.sums[part.row];
    const A of_most = static_cast<A>(args.x[most]);
    const A weight = static_cast<A>(args.w[most]);
    ForElementsOf(
        rows, part, [&](int64_t at) { return args.At(at); },
        [&](int64_t, int64_t at, const typename CenterArgs<T>::Pair& pair) {
          const A w = static_cast<A>(pair.w);
          const A x = static_cast<A>(pair.x);
          A y;
          if (args.centering == Centering::kCenterGrad) {
            const A with_most = at == most ? A{} : x * weight - w * of_most;
            y = with_most + (x * sums.weights - w * sums.sum);
          } else {
            y = (x - of_most) * sums.weights - sums.sum;
            if (args.centering == Centering::kSoftmaxGrad) y *= w;
          }
          args.out[at] = static_cast<T>(y);
        });
  }
}

#define CHORUS_SOFTMAX_KERNELS(X, dtype, T)                    \
  X(softmax_exps_##dtype, ExpSumArgs<T>, SumExps<T>)           \
  X(softmax_##dtype, SoftmaxArgs<T>, Softmax<T>)               \
  X(log_softmax_##dtype, SoftmaxArgs<T>, LogSoftmax<T>)        \
  X(center_most_##dtype, MostWeightArgs<T>, FindMostWeight<T>) \
  X(center_sums_##dtype, CenterArgs<T>, SumCenter<T>)          \
  X(center_##dtype, CenterArgs<T>, Center<T>)
// Half types have the states of f32.
#define CHORUS_SOFTMAX_MERGES(X, dtype, A)                                          \
  X(softmax_merge_##dtype, MergeArgs<ExpSum<A>>, MergeParts<ExpSum<A>>)             \
  X(center_most_merge_##dtype, MergeArgs<MostWeight<A>>, MergeParts<MostWeight<A>>) \
  X(center_sums_merge_##dtype, MergeArgs<CenterSums<A>>, MergeParts<CenterSums<A>>)
#define CHORUS_KERNELS_OF_Softmax(X)     \
  CHORUS_SOFTMAX_KERNELS(X, f16, F16)    \
  CHORUS_SOFTMAX_KERNELS(X, bf16, BF16)  \
  CHORUS_SOFTMAX_KERNELS(X, f32, float)  \
  CHORUS_SOFTMAX_KERNELS(X, f64, double) \
  CHORUS_SOFTMAX_MERGES(X, f32, float)   \
  CHORUS_SOFTMAX_MERGES(X, f64, double)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SOFTMAX_SOFTMAX_KERNELS_H_
