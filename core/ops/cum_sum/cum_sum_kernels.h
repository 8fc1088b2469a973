// What each thread of cum_sum's kernels does.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_KERNELS_H_
#define CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"
#include "core/ops/device_loops.h"
#include "core/tensor/half.h"

namespace chorus {
namespace cuda {

// Parts of rows, of which each is `length` elements, the last one less. Rows are those of HostRows,
// of at least one element; elements are counted in the order in which they are added up.
template <typename T>
struct CumSumArgs {
  static constexpr int kScratchPacks = 0;
  const T* in = nullptr;
  T* out = nullptr;  // may be `in`
  // By part and row, the sum of all elements up to a part's end; null if rows have one part.
  const T* before = nullptr;
  int64_t parts = 0;  // of all rows
  int64_t rows = 0;
  int64_t size = 0;
  int64_t stride = 1;
  int64_t length = 0;
  bool reverse = false;
};

// One of these parts.
struct CumSumPart {
  template <typename T>
  CHORUS_DEVICE CumSumPart(const CumSumArgs<T>& args, int64_t i) {
    number = UnsignedQuotient(i, args.rows);
    const int64_t row = i - number * args.rows;
    const int64_t line = UnsignedQuotient(row, args.stride);
    const int64_t begin = number * args.length;
    size = args.size - begin < args.length ? args.size - begin : args.length;
    step = args.reverse ? -args.stride : args.stride;
    first = line * args.stride * args.size + (row - line * args.stride) +
            (args.reverse ? args.size - 1 - begin : begin) * args.stride;
  }
  int64_t number = 0;
  int64_t first = 0;  // where its first element stands
  int64_t step = 0;   // from one to the next
  int64_t size = 0;
};

// So many loads are under way at a time.
constexpr int kCumSumTogether = 16;

// Integers wrap: T is unsigned.
template <typename T>
CHORUS_DEVICE void CumSum(const CumSumArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  for (int64_t i = lane.index; i < args.parts; i += lane.count) {
    const CumSumPart part(args, i);
    const T* in = args.in + part.first;
    T* out = args.out + part.first;
    // The first of a row is what it was.
    T element = *in;
    A sum = static_cast<A>(element);
    if (part.number > 0) {
      sum += static_cast<A>(args.before[i - args.rows]);
      element = static_cast<T>(sum);
    }
    *out = element;
    int64_t left = part.size - 1;
    CHORUS_KEEP_LOOP
    for (; left >= kCumSumTogether; left -= kCumSumTogether) {
      T elements[kCumSumTogether];
      CHORUS_UNROLL
      for (int k = 0; k < kCumSumTogether; ++k) elements[k] = *(in += part.step);
      CHORUS_UNROLL
      for (int k = 0; k < kCumSumTogether; ++k) {
        sum += static_cast<A>(elements[k]);
        *(out += part.step) = static_cast<T>(sum);
      }
    }
    CHORUS_KEEP_LOOP
    for (; left > 0; --left) {
      sum += static_cast<A>(*(in += part.step));
      *(out += part.step) = static_cast<T>(sum);
    }
  }
}

// Sets out[i] to the sum of part i.
template <typename T>
CHORUS_DEVICE void CumSumTotals(const CumSumArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  for (int64_t i = lane.index; i < args.parts; i += lane.count) {
    const CumSumPart part(args, i);
    const T* in = args.in + part.first;
    A sum = 0;
    int64_t left = part.size;
    CHORUS_KEEP_LOOP
    for (; left >= kCumSumTogether; left -= kCumSumTogether) {
      CHORUS_UNROLL
      for (int k = 0; k < kCumSumTogether; ++k) {
        sum += static_cast<A>(*in);
        in += part.step;
      }
    }
    CHORUS_KEEP_LOOP
    for (; left > 0; --left) {
      sum += static_cast<A>(*in);
      in += part.step;
    }
    args.out[i] = static_cast<T>(sum);
  }
}

#define CHORUS_KERNELS_OF_CumSum(X)                                 \
  X(cum_sum_f16, CumSumArgs<F16>, CumSum<F16>)                      \
  X(cum_sum_bf16, CumSumArgs<BF16>, CumSum<BF16>)                   \
  X(cum_sum_f32, CumSumArgs<float>, CumSum<float>)                  \
  X(cum_sum_f64, CumSumArgs<double>, CumSum<double>)                \
  X(cum_sum_1, CumSumArgs<uint8_t>, CumSum<uint8_t>)                \
  X(cum_sum_2, CumSumArgs<uint16_t>, CumSum<uint16_t>)              \
  X(cum_sum_4, CumSumArgs<uint32_t>, CumSum<uint32_t>)              \
  X(cum_sum_8, CumSumArgs<uint64_t>, CumSum<uint64_t>)              \
  X(cum_sum_totals_1, CumSumArgs<uint8_t>, CumSumTotals<uint8_t>)   \
  X(cum_sum_totals_2, CumSumArgs<uint16_t>, CumSumTotals<uint16_t>) \
  X(cum_sum_totals_4, CumSumArgs<uint32_t>, CumSumTotals<uint32_t>) \
  X(cum_sum_totals_8, CumSumArgs<uint64_t>, CumSumTotals<uint64_t>)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CUM_SUM_CUM_SUM_KERNELS_H_
