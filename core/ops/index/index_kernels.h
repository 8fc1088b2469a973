// What each thread of the kernels of what goes by index does.
//
// scatter_add: each element of the result adds up its own updates, in their order. For that the
// positions of the updates are sorted by index: first in blocks, where each counts those that come
// before it, then blocks are merged two by two, where each searches for its position in the other
// one. Each finds its position alone, and equal indices stay in order. What a result's element adds
// up then lies side by side.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors: an
// index out of range, by its element.
#ifndef CHORUS_CORE_OPS_INDEX_INDEX_KERNELS_H_
#define CHORUS_CORE_OPS_INDEX_INDEX_KERNELS_H_

#include <cstdint>
#include <type_traits>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"
#include "core/ops/device_indices.h"
#include "core/ops/device_rows.h"

namespace chorus {
namespace cuda {

// Indices, and where to tell of one that is out of range.
struct CheckedIndices {
  DeviceIndices indices;
  uint64_t* fault_word = nullptr;
  uint64_t fault_first = 0;

  CHORUS_DEVICE bool Check(int64_t i, int64_t index) const {
    if (indices.IsWithin(index)) return true;
    StoreLeast(fault_word, fault_first + static_cast<uint64_t>(i));
    return false;
  }
};

// Elements of any dtype, as the bits of an unsigned number of their width. A row is an index's.
template <typename T>
struct OneHotArgs {
  static constexpr int kScratchPacks = 0;
  T* out = nullptr;
  CheckedIndices checked;
  RowParts rows;
  T one = 0;
};
template <typename T>
CHORUS_DEVICE void OneHot(const OneHotArgs<T>& args, const Lane& lane) {
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    const int64_t index = args.checked.indices.At(part.row);
    // What is out of range, or ignored and not within, is at no element.
    if (!args.checked.indices.IsIgnored(index)) args.checked.Check(part.row, index);
    const int64_t one_at = args.checked.indices.IsIgnored(index) ? -1 : index;
    int64_t at = part.at;
    for (int64_t i = part.index; i < rows.size; i += rows.parts) {
      args.out[at] = i == one_at ? args.one : T{0};
      at += rows.step();
    }
  }
}

template <typename T>
struct TakeArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  T* out = nullptr;
  CheckedIndices checked;
  RowParts rows;      // of the result
  int64_t count = 0;  // indices, of take
  int64_t size = 0;   // of x along the axis
};
// Rows are slices of the result.
template <typename T>
CHORUS_DEVICE void Take(const TakeArgs<T>& args, const Lane& lane) {
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    const int64_t outer = part.row / args.count;
    const int64_t position = part.row - outer * args.count;
    const int64_t index = args.checked.indices.At(position);
    const bool within = args.checked.Check(position, index);
    const T* const x = args.x + (outer * args.size + (within ? index : 0)) * rows.size;
    T* const out = args.out + part.row * rows.size;
    for (int64_t i = part.index; i < rows.size; i += rows.parts) out[i] = within ? x[i] : T{0};
  }
}
// Rows are along the axis.
template <typename T>
CHORUS_DEVICE void TakeAlong(const TakeArgs<T>& args, const Lane& lane) {
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    const int64_t first = part.outer * args.size * rows.stride + part.inner;
    int64_t at = part.at;
    for (int64_t i = part.index; i < rows.size; i += rows.parts) {
      const int64_t index = args.checked.indices.At(at);
      const bool within = args.checked.Check(at, index);
      args.out[at] = within ? args.x[first + index * rows.stride] : T{0};
      at += rows.step();
    }
  }
}

// Positions along a row of indices, of four bytes where these are enough.
struct Positions {
  void* memory = nullptr;
  bool wide = false;

  CHORUS_DEVICE int64_t At(int64_t i) const {
    return wide ? static_cast<const int64_t*>(memory)[i]
                : static_cast<int64_t>(static_cast<const uint32_t*>(memory)[i]);
  }
  CHORUS_DEVICE void Set(int64_t i, int64_t position) const {
    if (wide) {
      static_cast<int64_t*>(memory)[i] = position;
    } else {
      static_cast<uint32_t*>(memory)[i] = static_cast<uint32_t>(position);
    }
  }
};

// Positions lie as the indices do; each row is sorted for itself. Elements of a block are sorted
// before, blocks when they are merged.
struct SortPositionsArgs {
  static constexpr int kScratchPacks = 0;
  CheckedIndices checked;
  Positions from;  // of a merge
  Positions to;
  RowParts rows;  // each element is a part
  int64_t block = 0;
};
CHORUS_DEVICE void SortPositions(const SortPositionsArgs& args, const Lane& lane) {
  const DeviceIndices& indices = args.checked.indices;
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    const int64_t index = indices.At(part.at);
    args.checked.Check(part.at, index);
    const int64_t begin = part.index - part.index % args.block;
    const int64_t end = begin + args.block < rows.size ? begin + args.block : rows.size;
    int64_t at = part.at - (part.index - begin) * rows.stride;
    int64_t target = at;
    CHORUS_KEEP_LOOP
    for (int64_t i = begin; i < end; ++i) {
      const int64_t other = indices.At(at);
      if (other < index || (other == index && i < part.index)) target += rows.stride;
      at += rows.stride;
    }
    args.to.Set(target, part.index);
  }
}

// Among the sorted positions of a row from `begin` to `end`, the first whose index is not below
// `index`, or with `above`, the first whose index is above it. `first` is where the row's first
// element stands.
CHORUS_DEVICE int64_t FindPosition(const DeviceIndices& indices, const Positions& positions,
                                   int64_t first, int64_t stride, int64_t begin, int64_t end,
                                   int64_t index, bool above) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    const int64_t other = indices.At(first + positions.At(first + middle * stride) * stride);
    if (other < index || (above && other == index)) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

CHORUS_DEVICE void MergePositions(const SortPositionsArgs& args, const Lane& lane) {
  const DeviceIndices& indices = args.checked.indices;
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    const int64_t first = part.at - part.index * rows.stride;
    const int64_t position = args.from.At(part.at);
    const int64_t index = indices.At(first + position * rows.stride);
    const int64_t begin = part.index - part.index % (2 * args.block);
    const int64_t middle = begin + args.block < rows.size ? begin + args.block : rows.size;
    const int64_t end = middle + args.block < rows.size ? middle + args.block : rows.size;
    // Of equal ones those of the first block come before those of the second.
    int64_t target = part.index;
    if (part.index < middle) {
      target += FindPosition(indices, args.from, first, rows.stride, middle, end, index, false);
      target -= middle;
    } else {
      target += FindPosition(indices, args.from, first, rows.stride, begin, middle, index, true);
      target -= middle;
    }
    args.to.Set(first + target * rows.stride, position);
  }
}

// Integers are unsigned, of their width.
template <typename T>
struct ScatterAddArgs {
  static constexpr int kScratchPacks = 0;
  const T* updates = nullptr;
  T* out = nullptr;
  DeviceIndices indices;
  Positions positions;
  RowParts rows;       // of the result, one after the other
  int64_t size = 0;    // of the result along the axis
  int64_t count = 0;   // of the updates
  bool along = false;  // each column has indices of its own
};
// A thread has some columns of a row, and no more than so many at a time.
inline constexpr int kScatterColumns = 4;
template <typename T>
CHORUS_DEVICE void ScatterAdd(const ScatterAddArgs<T>& args, const Lane& lane) {
  using A = Arithmetic<T>;
  const RowParts& rows = args.rows;
  const int64_t columns = rows.size;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    const int64_t outer = part.row / args.size;
    const int64_t index = part.row - outer * args.size;
    const T* const updates = args.updates + outer * args.count * columns;
    T* const out = args.out + part.row * columns;
    // With indices of their own columns are all parts of a row.
    const int64_t stride = args.along ? columns : 1;
    const int64_t first = args.along ? outer * args.count * columns + part.index : 0;
    const int64_t begin =
        FindPosition(args.indices, args.positions, first, stride, 0, args.count, index, false);
    const int64_t end =
        FindPosition(args.indices, args.positions, first, stride, begin, args.count, index, true);
    for (int64_t column = part.index; column < columns; column += kScatterColumns * rows.parts) {
      A sums[kScatterColumns] = {};
      for (int64_t i = begin; i < end; ++i) {
        const T* const from = updates + args.positions.At(first + i * stride) * columns;
        CHORUS_UNROLL
        for (int k = 0; k < kScatterColumns; ++k) {
          const int64_t at = column + k * rows.parts;
          if (at < columns) sums[k] += static_cast<A>(from[at]);
        }
      }
      CHORUS_UNROLL
      for (int k = 0; k < kScatterColumns; ++k) {
        const int64_t at = column + k * rows.parts;
        if (at < columns) out[at] = static_cast<T>(sums[k]);
      }
    }
  }
}

// A number that orders elements as arg_max and arg_min prefer them: NaN before all others, and
// both zeros alike.
CHORUS_DEVICE uint64_t OrderOf(uint64_t ascending, bool largest) {
  return largest ? ascending : ~ascending;
}
template <typename T>
CHORUS_DEVICE uint64_t RankOf(T element, bool largest) {
  using Compared = typename ComparedAs<T>::type;
  if constexpr (std::is_integral<Compared>::value) {
    constexpr uint64_t kSign = uint64_t{1} << 63;
    const auto x = static_cast<int64_t>(static_cast<Compared>(element));
    return OrderOf(static_cast<uint64_t>(x) ^ kSign, largest);
  } else {
    // -0 + 0 is 0.
    const Arithmetic<T> x = static_cast<Arithmetic<T>>(element) + Arithmetic<T>{0};
    if (x != x) return ~uint64_t{0};
    const auto bits = BitsOf(x);
    constexpr auto kSign = decltype(BitsOf(x)){1} << (8 * sizeof(x) - 1);
    return OrderOf((bits & kSign) != 0 ? static_cast<decltype(kSign)>(~bits) : bits | kSign,
                   largest);
  }
}

// The best element of some, of equal ones the first.
struct BestElement {
  uint64_t rank = 0;
  int64_t at = 0;  // in its row

  CHORUS_DEVICE void Merge(const BestElement& other) {
    if (other.rank > rank || (other.rank == rank && other.at < at)) *this = other;
  }
};
// One of the two is written: states where there are more parts than one, else the result.
template <typename T>
struct ArgArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  BestElement* states = nullptr;
  int64_t* out = nullptr;
  RowParts rows;  // none is empty
  bool largest = false;
};
template <typename T>
CHORUS_DEVICE void FindBest(const ArgArgs<T>& args, const Lane& lane) {
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    const RowPart part = PartOf(rows, t);
    BestElement best = {0, part.index};
    ForElementsOf(
        rows, part, [&](int64_t at) { return args.x[at]; },
        [&](int64_t i, int64_t, T x) {
          const uint64_t rank = RankOf(x, args.largest);
          if (rank > best.rank) best = {rank, i};
        });
    if (rows.parts == 1) {
      args.out[t] = best.at;
    } else {
      args.states[t] = best;
    }
  }
}

struct BestArgs {
  static constexpr int kScratchPacks = 0;
  const BestElement* states = nullptr;
  int64_t* out = nullptr;
  int64_t count = 0;
};
CHORUS_DEVICE void WriteBest(const BestArgs& args, const Lane& lane) {
  for (int64_t i = lane.index; i < args.count; i += lane.count) args.out[i] = args.states[i].at;
}

#define CHORUS_MOVES_BY_INDEX(X, width, T)         \
  X(one_hot_##width, OneHotArgs<T>, OneHot<T>)     \
  X(take_##width, TakeArgs<T>, Take<T>)            \
  X(take_along_##width, TakeArgs<T>, TakeAlong<T>) \
  X(scatter_add_##width, ScatterAddArgs<T>, ScatterAdd<T>)
#define CHORUS_KERNELS_OF_Index(X)                                  \
  CHORUS_MOVES_BY_INDEX(X, 1, uint8_t)                              \
  CHORUS_MOVES_BY_INDEX(X, 2, uint16_t)                             \
  CHORUS_MOVES_BY_INDEX(X, 4, uint32_t)                             \
  CHORUS_MOVES_BY_INDEX(X, 8, uint64_t)                             \
  X(scatter_add_f16, ScatterAddArgs<F16>, ScatterAdd<F16>)          \
  X(scatter_add_bf16, ScatterAddArgs<BF16>, ScatterAdd<BF16>)       \
  X(scatter_add_f32, ScatterAddArgs<float>, ScatterAdd<float>)      \
  X(scatter_add_f64, ScatterAddArgs<double>, ScatterAdd<double>)    \
  X(scatter_add_sort, SortPositionsArgs, SortPositions)             \
  X(scatter_add_merge, SortPositionsArgs, MergePositions)           \
  X(arg_max_f16, ArgArgs<F16>, FindBest<F16>)                       \
  X(arg_max_bf16, ArgArgs<BF16>, FindBest<BF16>)                    \
  X(arg_max_f32, ArgArgs<float>, FindBest<float>)                   \
  X(arg_max_f64, ArgArgs<double>, FindBest<double>)                 \
  X(arg_max_i8, ArgArgs<int8_t>, FindBest<int8_t>)                  \
  X(arg_max_u8, ArgArgs<uint8_t>, FindBest<uint8_t>)                \
  X(arg_max_i16, ArgArgs<int16_t>, FindBest<int16_t>)               \
  X(arg_max_i32, ArgArgs<int32_t>, FindBest<int32_t>)               \
  X(arg_max_i64, ArgArgs<int64_t>, FindBest<int64_t>)               \
  X(arg_max_bool, ArgArgs<Bool>, FindBest<Bool>)                    \
  X(arg_max_merge, MergeArgs<BestElement>, MergeParts<BestElement>) \
  X(arg_max_write, BestArgs, WriteBest)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_INDEX_INDEX_KERNELS_H_
