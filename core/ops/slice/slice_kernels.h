// What each thread of the kernels of slice, pad, concat, pack_rows and unpack_rows does. Elements
// only move: T has their width.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors: a
// count of rows that is out of range is told as element 0.
#ifndef CHORUS_CORE_OPS_SLICE_SLICE_KERNELS_H_
#define CHORUS_CORE_OPS_SLICE_SLICE_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"
#include "core/ops/device_loops.h"

namespace chorus {
namespace cuda {

// Rows, of which each is a row of the input further on or back: zeros where that has nothing.
template <typename T>
struct ShiftedRowsArgs {
  static constexpr int kScratchPacks = 0;
  const T* in = nullptr;
  T* out = nullptr;
  int64_t count = 0;   // elements of the result
  int64_t row = 1;     // elements of each of its rows
  int64_t in_row = 0;  // of each of the input's
  int64_t offset = 0;  // of a row's first element in the input's row; may be negative
};
template <typename T>
CHORUS_DEVICE void ShiftedRows(const ShiftedRowsArgs<T>& args, const Lane& lane) {
  SetElements(lane, args.count, args.out, [&](int64_t i) {
    const int64_t row = UnsignedQuotient(i, args.row);
    const int64_t from = i - row * args.row + args.offset;
    return from >= 0 && from < args.in_row ? args.in[row * args.in_row + from] : T();
  });
}

// So many of the inputs of a concat.
template <typename T>
struct ConcatArgs {
  static constexpr int kScratchPacks = 0;
  static constexpr int kMost = 128;
  const T* in[kMost] = {};
  int64_t end[kMost] = {};     // of these inputs' rows, one behind the other
  int32_t number[kMost] = {};  // of the inputs among all
  int32_t inputs = 0;
  int64_t count = 0;  // elements of all of them
  int64_t row = 1;    // elements of each of the result's rows
  int64_t begin = 0;  // where the first input's elements stand in it
  T* out = nullptr;
};
template <typename T>
CHORUS_DEVICE void Concat(const ConcatArgs<T>& args, const Lane& lane) {
  const int64_t width = args.end[args.inputs - 1];
  for (int64_t i = lane.index; i < args.count; i += lane.count) {
    const int64_t row = UnsignedQuotient(i, width);
    const int64_t column = i - row * width;
    int low = 0;  // the first input that ends behind the column
    for (int high = args.inputs - 1; low < high;) {
      const int middle = (low + high) / 2;
      if (args.end[middle] > column) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int64_t before = low == 0 ? 0 : args.end[low - 1];
    args.out[row * args.row + args.begin + column] =
        args.in[low][row * (args.end[low] - before) + column - before];
  }
}

template <typename T>
struct PackedRowsArgs {
  static constexpr int kScratchPacks = 0;
  const T* in = nullptr;
  const int64_t* rows_that_count = nullptr;
  T* out = nullptr;
  uint64_t* fault_word = nullptr;
  uint64_t fault_first = 0;
  int64_t count = 0;  // elements
  int64_t row = 1;    // elements of each row
  int64_t part = 1;   // rows of each part
  int64_t parts = 1;
};

template <typename T>
CHORUS_DEVICE int64_t RowsThatCount(const PackedRowsArgs<T>& args, const Lane& lane) {
  const int64_t count = *args.rows_that_count;
  if (count >= 0 && count <= args.part) return count;
  if (lane.index == 0) StoreLeast(args.fault_word, args.fault_first);
  return 0;
}

template <typename T>
CHORUS_DEVICE void PackRows(const PackedRowsArgs<T>& args, const Lane& lane) {
  const int64_t count = RowsThatCount(args, lane);
  SetElements(lane, args.count, args.out, [&](int64_t i) {
    const int64_t row = UnsignedQuotient(i, args.row);
    if (row >= args.parts * count) return T();
    const int64_t part = UnsignedQuotient(row, count);
    return args.in[(part * args.part + (row - part * count)) * args.row + (i - row * args.row)];
  });
}

template <typename T>
CHORUS_DEVICE void UnpackRows(const PackedRowsArgs<T>& args, const Lane& lane) {
  const int64_t count = RowsThatCount(args, lane);
  SetElements(lane, args.count, args.out, [&](int64_t i) {
    const int64_t row = UnsignedQuotient(i, args.row);
    const int64_t part = UnsignedQuotient(row, args.part);
    const int64_t within = row - part * args.part;
    if (within >= count) return T();
    return args.in[(part * count + within) * args.row + (i - row * args.row)];
  });
}

#define CHORUS_SLICE_KERNELS(X, width, T)              \
  X(slice_##width, ShiftedRowsArgs<T>, ShiftedRows<T>) \
  X(concat_##width, ConcatArgs<T>, Concat<T>)          \
  X(pack_rows_##width, PackedRowsArgs<T>, PackRows<T>) \
  X(unpack_rows_##width, PackedRowsArgs<T>, UnpackRows<T>)
#define CHORUS_KERNELS_OF_Slice(X)     \
  CHORUS_SLICE_KERNELS(X, 1, uint8_t)  \
  CHORUS_SLICE_KERNELS(X, 2, uint16_t) \
  CHORUS_SLICE_KERNELS(X, 4, uint32_t) \
  CHORUS_SLICE_KERNELS(X, 8, uint64_t)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SLICE_SLICE_KERNELS_H_
