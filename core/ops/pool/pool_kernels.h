// What each thread of the pooling kernels does.
//
// A thread has one element of the result. Where these are few and windows large, it has a part of
// the elements under a window, what it found goes to the workspace, and a second launch takes the
// parts of each window together. Parts are rows and columns of the window in turn, so that
// neighbouring threads read neighbouring elements.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_POOL_POOL_KERNELS_H_
#define CHORUS_CORE_OPS_POOL_POOL_KERNELS_H_

#include <cstdint>
#include <type_traits>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"
#include "core/ops/division.h"
#include "core/ops/long_sums.h"
#include "core/tensor/half.h"

namespace chorus {
namespace cuda {

// [begin, end)
struct PoolRange {
  int64_t begin;
  int64_t end;
};

// Along one dimension: a window (core/ops/window.h), its places, and the elements.
struct PoolSide {
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t padding = 0;
  int64_t dilation = 1;
  int64_t x = 0;
  int64_t y = 0;
  int64_t parts = 1;
  Division by_x, by_y;
  Division by_stride;  // of elements with padding

  CHORUS_DEVICE int64_t First(int64_t place) const { return place * stride - padding; }
  // The taps that are over elements. Only at a border is there anything to divide.
  CHORUS_DEVICE PoolRange TapsAt(int64_t place) const {
    const int64_t first = First(place);
    PoolRange taps = {0, kernel};
    if (first < 0) taps.begin = (-first + dilation - 1) / dilation;
    if (first + (kernel - 1) * dilation >= x) {
      taps.end = first >= x ? 0 : (x - 1 - first) / dilation + 1;
    }
    return taps;
  }
  // How many elements are under the window, whose taps are not apart.
  CHORUS_DEVICE int64_t ElementsUnder(int64_t place) const {
    const int64_t begin = First(place);
    const int64_t end = begin + kernel < x ? begin + kernel : x;
    return end - (begin > 0 ? begin : 0);
  }
  // Whether the window at a place reaches from its first tap to beyond an element.
  CHORUS_DEVICE bool Reaches(int64_t place, int64_t element) const {
    const int64_t away = element - First(place);
    return away >= 0 && away <= (kernel - 1) * dilation;
  }
  // The places where it does.
  CHORUS_DEVICE PoolRange PlacesOver(int64_t element) const {
    const int64_t last = element + padding;
    // The last place's first tap that is too early.
    const int64_t before = last - (kernel - 1) * dilation - 1;
    const int64_t end = by_stride.Of(last) + 1;
    return {before < 0 ? 0 : by_stride.Of(before) + 1, end < y ? end : y};
  }
};

struct PoolShape {
  PoolSide h, w;
  Division by_parts;
  int64_t x_count = 0;  // elements of x, and of y
  int64_t y_count = 0;

  CHORUS_DEVICE int64_t parts() const { return by_parts.by; }
  CHORUS_DEVICE int64_t plane() const { return h.x * w.x; }
};

// An element of x or y.
struct PoolPlace {
  CHORUS_DEVICE PoolPlace(int64_t i, const Division& by_h, const Division& by_w)
      : over_columns(i, by_w), over_rows(over_columns.outer, by_h) {}
  CHORUS_DEVICE int64_t plane() const { return over_rows.outer; }
  CHORUS_DEVICE int64_t row() const { return over_rows.inner; }
  CHORUS_DEVICE int64_t column() const { return over_columns.inner; }

  DividedIndex over_columns;
  DividedIndex over_rows;
};

// Calls f(position in x's plane) for a part of what is under the window at a place, rows first.
template <typename F>
CHORUS_DEVICE void ForEachUnder(const PoolShape& shape, const PoolPlace& y, int64_t part,
                                const F& f) {
  int64_t row_part = 0;
  int64_t column_part = part;
  if (shape.h.parts > 1) {
    row_part = part / shape.w.parts;
    column_part = part % shape.w.parts;
  }
  const PoolRange rows = shape.h.TapsAt(y.row());
  const PoolRange columns = shape.w.TapsAt(y.column());
  const int64_t first_row = shape.h.First(y.row());
  const int64_t first_column = shape.w.First(y.column());
  for (int64_t i = rows.begin + row_part; i < rows.end; i += shape.h.parts) {
    const int64_t row = (first_row + i * shape.h.dilation) * shape.w.x;
    for (int64_t j = columns.begin + column_part; j < columns.end; j += shape.w.parts) {
      f(row + first_column + j * shape.w.dilation);
    }
  }
}

template <typename T>
struct AvgPoolArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;  // the result of avg_pool_grad
  T* y = nullptr;
  Arithmetic<T>* sums = nullptr;  // [y, parts], if there is more than one
  PoolShape shape;
  bool count_padding = false;
};
template <typename T>
CHORUS_DEVICE Arithmetic<T> PoolDivisor(const AvgPoolArgs<T>& args, int64_t row, int64_t column) {
  const PoolSide& h = args.shape.h;
  const PoolSide& w = args.shape.w;
  return static_cast<Arithmetic<T>>(
      args.count_padding ? h.kernel * w.kernel : h.ElementsUnder(row) * w.ElementsUnder(column));
}
template <typename T>
CHORUS_DEVICE void AvgPool(const AvgPoolArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  const PoolShape& shape = args.shape;
  for (int64_t t = lane.index; t < shape.y_count * shape.parts(); t += lane.count) {
    const DividedIndex of_part(t, shape.by_parts);
    const PoolPlace place(of_part.outer, shape.h.by_y, shape.w.by_y);
    const T* const x = args.x + place.plane() * shape.plane();
    LongSums<A> sum;
    ForEachUnder(shape, place, of_part.inner,
                 [&](int64_t at) { *sum.Next() += static_cast<A>(x[at]); });
    if (shape.parts() > 1) {
      args.sums[t] = sum.At(0);
    } else {
      args.y[t] = static_cast<T>(sum.At(0) / PoolDivisor(args, place.row(), place.column()));
    }
  }
}
template <typename T>
CHORUS_DEVICE void AvgPoolCombine(const AvgPoolArgs<T>& args, const Lane& lane) {
  const PoolShape& shape = args.shape;
  for (int64_t t = lane.index; t < shape.y_count; t += lane.count) {
    const PoolPlace place(t, shape.h.by_y, shape.w.by_y);
    const auto sum = SumOfResults(args.sums, t * shape.parts(), (t + 1) * shape.parts());
    args.y[t] = static_cast<T>(sum / PoolDivisor(args, place.row(), place.column()));
  }
}

template <typename T>
struct AvgPoolGradArgs {
  static constexpr int kScratchPacks = 0;
  const T* g = nullptr;
  T* x = nullptr;
  PoolShape shape;
  bool count_padding = false;
};
template <typename T>
CHORUS_DEVICE void AvgPoolGrad(const AvgPoolGradArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  const PoolSide& h = args.shape.h;
  const PoolSide& w = args.shape.w;
  const auto all = static_cast<A>(h.kernel * w.kernel);
  for (int64_t t = lane.index; t < args.shape.x_count; t += lane.count) {
    const PoolPlace place(t, h.by_x, w.by_x);
    const PoolRange rows = h.PlacesOver(place.row());
    const PoolRange columns = w.PlacesOver(place.column());
    const T* const g = args.g + place.plane() * h.y * w.y;
    LongSums<A> sum;
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      const int64_t rows_under = h.ElementsUnder(i);
      for (int64_t j = columns.begin; j < columns.end; ++j) {
        const A divisor =
            args.count_padding ? all : static_cast<A>(rows_under * w.ElementsUnder(j));
        *sum.Next() += static_cast<A>(g[i * w.y + j]) / divisor;
      }
    }
    args.x[t] = static_cast<T>(sum.At(0));
  }
}

template <typename T>
struct MaxPoolIndexArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  int32_t* y = nullptr;
  int32_t* found = nullptr;  // [y, parts], if there is more than one; -1: there was no element
  PoolShape shape;
};
// Integers as they are: they are only compared.
template <typename T>
using PoolCompared = typename std::conditional<std::is_integral<T>::value, T, Arithmetic<T>>::type;
template <typename T>
CHORUS_DEVICE void MaxPoolIndex(const MaxPoolIndexArgs<T>& args, const Lane& lane) {
  using W = PoolCompared<T>;
  const PoolShape& shape = args.shape;
  int32_t* const to = shape.parts() > 1 ? args.found : args.y;
  for (int64_t t = lane.index; t < shape.y_count * shape.parts(); t += lane.count) {
    const DividedIndex of_part(t, shape.by_parts);
    const PoolPlace place(of_part.outer, shape.h.by_y, shape.w.by_y);
    const T* const x = args.x + place.plane() * shape.plane();
    W most = 0;
    int32_t best = -1;
    ForEachUnder(shape, place, of_part.inner, [&](int64_t at) {
      const W element = static_cast<W>(x[at]);
      // A NaN is neither, and what stands there stays if it is one.
      const bool wins = (best < 0) | (!(element <= most) & (most == most));
      most = wins ? element : most;
      best = wins ? static_cast<int32_t>(at) : best;
    });
    to[t] = best;
  }
}
// Parts are not in the order of their elements: of equals the first is the one that is first in x.
template <typename T>
CHORUS_DEVICE void MaxPoolIndexCombine(const MaxPoolIndexArgs<T>& args, const Lane& lane) {
  using W = PoolCompared<T>;
  const PoolShape& shape = args.shape;
  for (int64_t t = lane.index; t < shape.y_count; t += lane.count) {
    const PoolPlace place(t, shape.h.by_y, shape.w.by_y);
    const T* const x = args.x + place.plane() * shape.plane();
    W most = 0;
    int32_t best = -1;
    for (int64_t part = 0; part < shape.parts(); ++part) {
      const int32_t at = args.found[t * shape.parts() + part];
      if (at < 0) continue;
      const W element = static_cast<W>(x[at]);
      const bool is_number = element == element;
      const bool most_is_number = most == most;
      const bool is_equal = is_number == most_is_number && !(element < most) && !(element > most);
      const bool is_more = is_number != most_is_number ? most_is_number : element > most;
      if (best < 0 || is_more || (is_equal && at < best)) {
        most = element;
        best = at;
      }
    }
    args.y[t] = best;
  }
}

// T has the elements' width.
template <typename T>
struct MaxPoolTakeArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  const int32_t* index = nullptr;
  T* y = nullptr;
  PoolShape shape;
};
template <typename T>
CHORUS_DEVICE void MaxPoolTake(const MaxPoolTakeArgs<T>& args, const Lane& lane) {
  const PoolShape& shape = args.shape;
  for (int64_t t = lane.index; t < shape.y_count; t += lane.count) {
    const PoolPlace place(t, shape.h.by_y, shape.w.by_y);
    const int64_t at = args.index[t];
    T element = 0;
    if (at >= 0 && at < shape.plane()) {
      const DividedIndex x(at, shape.w.by_x);
      if (shape.h.Reaches(place.row(), x.outer) && shape.w.Reaches(place.column(), x.inner)) {
        element = args.x[place.plane() * shape.plane() + at];
      }
    }
    args.y[t] = element;
  }
}

template <typename T>
struct MaxPoolGradArgs {
  static constexpr int kScratchPacks = 0;
  const T* g = nullptr;
  const int32_t* index = nullptr;
  T* x = nullptr;
  PoolShape shape;
};
template <typename T>
CHORUS_DEVICE void MaxPoolGrad(const MaxPoolGradArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  const PoolSide& h = args.shape.h;
  const PoolSide& w = args.shape.w;
  for (int64_t t = lane.index; t < args.shape.x_count; t += lane.count) {
    const PoolPlace place(t, h.by_x, w.by_x);
    const PoolRange rows = h.PlacesOver(place.row());
    const PoolRange columns = w.PlacesOver(place.column());
    const int64_t at = place.row() * w.x + place.column();
    const int64_t plane = place.plane() * h.y * w.y;
    A sum = 0;
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      for (int64_t j = columns.begin; j < columns.end; ++j) {
        const int64_t from = plane + i * w.y + j;
        if (args.index[from] == at) sum += static_cast<A>(args.g[from]);
      }
    }
    args.x[t] = static_cast<T>(sum);
  }
}

#define CHORUS_KERNELS_OF_Pool(X)                                                        \
  X(avg_pool_f16, AvgPoolArgs<F16>, AvgPool<F16>)                                        \
  X(avg_pool_bf16, AvgPoolArgs<BF16>, AvgPool<BF16>)                                     \
  X(avg_pool_f32, AvgPoolArgs<float>, AvgPool<float>)                                    \
  X(avg_pool_f64, AvgPoolArgs<double>, AvgPool<double>)                                  \
  X(avg_pool_combine_f16, AvgPoolArgs<F16>, AvgPoolCombine<F16>)                         \
  X(avg_pool_combine_bf16, AvgPoolArgs<BF16>, AvgPoolCombine<BF16>)                      \
  X(avg_pool_combine_f32, AvgPoolArgs<float>, AvgPoolCombine<float>)                     \
  X(avg_pool_combine_f64, AvgPoolArgs<double>, AvgPoolCombine<double>)                   \
  X(avg_pool_grad_f16, AvgPoolGradArgs<F16>, AvgPoolGrad<F16>)                           \
  X(avg_pool_grad_bf16, AvgPoolGradArgs<BF16>, AvgPoolGrad<BF16>)                        \
  X(avg_pool_grad_f32, AvgPoolGradArgs<float>, AvgPoolGrad<float>)                       \
  X(avg_pool_grad_f64, AvgPoolGradArgs<double>, AvgPoolGrad<double>)                     \
  X(max_pool_index_f16, MaxPoolIndexArgs<F16>, MaxPoolIndex<F16>)                        \
  X(max_pool_index_bf16, MaxPoolIndexArgs<BF16>, MaxPoolIndex<BF16>)                     \
  X(max_pool_index_f32, MaxPoolIndexArgs<float>, MaxPoolIndex<float>)                    \
  X(max_pool_index_f64, MaxPoolIndexArgs<double>, MaxPoolIndex<double>)                  \
  X(max_pool_index_i8, MaxPoolIndexArgs<int8_t>, MaxPoolIndex<int8_t>)                   \
  X(max_pool_index_u8, MaxPoolIndexArgs<uint8_t>, MaxPoolIndex<uint8_t>)                 \
  X(max_pool_index_i16, MaxPoolIndexArgs<int16_t>, MaxPoolIndex<int16_t>)                \
  X(max_pool_index_i32, MaxPoolIndexArgs<int32_t>, MaxPoolIndex<int32_t>)                \
  X(max_pool_index_i64, MaxPoolIndexArgs<int64_t>, MaxPoolIndex<int64_t>)                \
  X(max_pool_index_combine_f16, MaxPoolIndexArgs<F16>, MaxPoolIndexCombine<F16>)         \
  X(max_pool_index_combine_bf16, MaxPoolIndexArgs<BF16>, MaxPoolIndexCombine<BF16>)      \
  X(max_pool_index_combine_f32, MaxPoolIndexArgs<float>, MaxPoolIndexCombine<float>)     \
  X(max_pool_index_combine_f64, MaxPoolIndexArgs<double>, MaxPoolIndexCombine<double>)   \
  X(max_pool_index_combine_i8, MaxPoolIndexArgs<int8_t>, MaxPoolIndexCombine<int8_t>)    \
  X(max_pool_index_combine_u8, MaxPoolIndexArgs<uint8_t>, MaxPoolIndexCombine<uint8_t>)  \
  X(max_pool_index_combine_i16, MaxPoolIndexArgs<int16_t>, MaxPoolIndexCombine<int16_t>) \
  X(max_pool_index_combine_i32, MaxPoolIndexArgs<int32_t>, MaxPoolIndexCombine<int32_t>) \
  X(max_pool_index_combine_i64, MaxPoolIndexArgs<int64_t>, MaxPoolIndexCombine<int64_t>) \
  X(max_pool_grad_f16, MaxPoolGradArgs<F16>, MaxPoolGrad<F16>)                           \
  X(max_pool_grad_bf16, MaxPoolGradArgs<BF16>, MaxPoolGrad<BF16>)                        \
  X(max_pool_grad_f32, MaxPoolGradArgs<float>, MaxPoolGrad<float>)                       \
  X(max_pool_grad_f64, MaxPoolGradArgs<double>, MaxPoolGrad<double>)                     \
  X(max_pool_grad_i8, MaxPoolGradArgs<int8_t>, MaxPoolGrad<int8_t>)                      \
  X(max_pool_grad_u8, MaxPoolGradArgs<uint8_t>, MaxPoolGrad<uint8_t>)                    \
  X(max_pool_grad_i16, MaxPoolGradArgs<int16_t>, MaxPoolGrad<int16_t>)                   \
  X(max_pool_grad_i32, MaxPoolGradArgs<int32_t>, MaxPoolGrad<int32_t>)                   \
  X(max_pool_grad_i64, MaxPoolGradArgs<int64_t>, MaxPoolGrad<int64_t>)                   \
  X(max_pool_take_1, MaxPoolTakeArgs<uint8_t>, MaxPoolTake<uint8_t>)                     \
  X(max_pool_take_2, MaxPoolTakeArgs<uint16_t>, MaxPoolTake<uint16_t>)                   \
  X(max_pool_take_4, MaxPoolTakeArgs<uint32_t>, MaxPoolTake<uint32_t>)                   \
  X(max_pool_take_8, MaxPoolTakeArgs<uint64_t>, MaxPoolTake<uint64_t>)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_POOL_POOL_KERNELS_H_
