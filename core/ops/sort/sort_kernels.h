// What each thread of arg_sort's kernels does: a merge sort of runs. First each thread sorts a run
// of a few elements in registers; then threads merge runs of twice as many out of two, each thread
// a piece of a merged one. Of a run no more than the k first are kept.
//
// An entry is 8 bytes, and says which element it is. It holds the element's key as well where both
// find room ("packed"), else the element is looked at again ("wide"). Keys and indices have one
// order, so that a run may be any elements.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_SORT_SORT_KERNELS_H_
#define CHORUS_CORE_OPS_SORT_SORT_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"
#include "core/ops/sort/sort_keys.h"
#include "core/tensor/half.h"

namespace chorus {
namespace cuda {

// What a thread sorts in registers, and what it merges.
inline constexpr int kSortedEntries = 16;
inline constexpr int kMergedEntries = 8;
// So many runs that follow each other take elements in turn.
inline constexpr int kInterleavedRuns = 32;

// Where the entries of runs stand, in entries. Row `outer` times the axis' stride plus `inner`.
struct SortLayout {
  int64_t first = 0;
  int64_t outer = 0;
  int64_t inner = 0;
  int64_t run = 0;
  int64_t entry = 0;

  CHORUS_DEVICE int64_t At(int64_t of_outer, int64_t of_inner, int64_t of_run) const {
    return first + of_outer * outer + of_inner * inner + of_run * run;
  }
};

// Rows of `size` elements, `stride` apart, as core/ops/host_rows.h says, and their runs: each of
// `length` elements but the last, of which the first `kept` are there.
struct SortRuns {
  int64_t size = 0;
  int64_t stride = 1;
  int64_t length = 1;
  int64_t kept = 0;
  int64_t count = 0;  // in a row

  CHORUS_DEVICE int64_t Kept(int64_t run) const {
    const int64_t left = size - run * length;
    const int64_t there = left < length ? left : length;
    return there < 0 ? 0 : there < kept ? there : kept;
  }
};

template <typename T>
struct PackedItems {
  using Entry = PackedEntry<KeyType<T>>;
  using Item = uint64_t;
  // Behind every other: indices are less than they might be.
  CHORUS_DEVICE static Item Last() { return ~uint64_t{0}; }
  CHORUS_DEVICE static Item Make(T x, int64_t index, KeyType<T> flip) {
    return Entry::Make(static_cast<KeyType<T>>(KeyOf(x) ^ flip), index);
  }
  CHORUS_DEVICE static Item Read(uint64_t entry, const T*, int64_t, int64_t, KeyType<T>) {
    return entry;
  }
  CHORUS_DEVICE static bool IsLess(Item a, Item b) { return a < b; }
  CHORUS_DEVICE static uint64_t EntryOf(Item item) { return item; }
};

template <typename T>
struct WideItems {
  struct Item {
    KeyType<T> key;
    uint64_t index;
  };
  CHORUS_DEVICE static Item Last() {
    return {static_cast<KeyType<T>>(~KeyType<T>{0}), ~uint64_t{0}};
  }
  CHORUS_DEVICE static Item Make(T x, int64_t index, KeyType<T> flip) {
    return {static_cast<KeyType<T>>(KeyOf(x) ^ flip), static_cast<uint64_t>(index)};
  }
  // Of the row that begins at x[first].
  CHORUS_DEVICE static Item Read(uint64_t entry, const T* x, int64_t first, int64_t stride,
                                 KeyType<T> flip) {
    const auto index = static_cast<int64_t>(entry);
    return Make(x[first + index * stride], index, flip);
  }
  CHORUS_DEVICE static bool IsLess(const Item& a, const Item& b) {
    return a.key < b.key || (a.key == b.key && a.index < b.index);
  }
  CHORUS_DEVICE static uint64_t EntryOf(const Item& item) { return item.index; }
};

// Batcher's network: which items are compared does not depend on them, so that they are in
// registers. Sorts kCount items `kApart` apart, of which each half is sorted.
template <typename Items, int kCount, int kApart>
CHORUS_DEVICE void MergeHalves(typename Items::Item* items) {
  const auto order = [items](int a, int b) {
    const typename Items::Item x = items[a];
    const typename Items::Item y = items[b];
    const bool swap = Items::IsLess(y, x);
    items[a] = swap ? y : x;
    items[b] = swap ? x : y;
  };
  if constexpr (2 * kApart < kCount) {
    MergeHalves<Items, kCount, 2 * kApart>(items);
    MergeHalves<Items, kCount, 2 * kApart>(items + kApart);
    CHORUS_UNROLL
    for (int i = kApart; i + kApart < kCount; i += 2 * kApart) order(i, i + kApart);
  } else {
    order(0, kApart);
  }
}
template <typename Items, int kCount>
CHORUS_DEVICE void SortItems(typename Items::Item* items) {
  if constexpr (kCount > 1) {
    SortItems<Items, kCount / 2>(items);
    SortItems<Items, kCount / 2>(items + kCount / 2);
    MergeHalves<Items, kCount, 1>(items);
  }
}

template <typename T>
struct SortRunsArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  uint64_t* to = nullptr;
  SortLayout layout;
  uint64_t mask = 0;    // what is written of an entry
  SortRuns runs;        // of kSortedEntries
  int64_t items = 0;    // runs of all rows
  KeyType<T> flip = 0;  // all bits where the largest comes first
};
template <typename T, typename Items>
CHORUS_DEVICE void ArgSortRuns(const SortRunsArgs<T>& args, const Lane& lane) {
  const SortRuns& runs = args.runs;
  for (int64_t t = lane.index; t < args.items; t += lane.count) {
    // Neighbours have rows that stand side by side, or runs of one row.
    const int64_t inner = t % runs.stride;
    const int64_t run = t / runs.stride % runs.count;
    const int64_t outer = t / runs.stride / runs.count;
    const T* const x = args.x + outer * runs.size * runs.stride + inner;
    // Elements in turn, so that neighbours read neighbours; at the end of a row side by side.
    constexpr int64_t kElements = int64_t{kInterleavedRuns} * kSortedEntries;
    const int64_t group = run / kInterleavedRuns;
    const bool interleaved = (group + 1) * kElements <= runs.size;
    const int64_t first =
        interleaved ? group * kElements + run % kInterleavedRuns : run * kSortedEntries;
    const int64_t step = interleaved ? kInterleavedRuns : 1;
    typename Items::Item items[kSortedEntries];
    CHORUS_UNROLL
    for (int i = 0; i < kSortedEntries; ++i) {
      const int64_t index = first + i * step;
      items[i] =
          index < runs.size ? Items::Make(x[index * runs.stride], index, args.flip) : Items::Last();
    }
    SortItems<Items, kSortedEntries>(items);
    uint64_t* const to = args.to + args.layout.At(outer, inner, run);
    const int64_t kept = runs.Kept(run);
    CHORUS_UNROLL
    for (int i = 0; i < kSortedEntries; ++i) {
      if (i < kept) to[i * args.layout.entry] = Items::EntryOf(items[i]) & args.mask;
    }
  }
}

template <typename T>
struct SortMergeArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;  // if entries are wide
  const uint64_t* from = nullptr;
  uint64_t* to = nullptr;
  SortLayout from_layout;  // side by side
  SortLayout to_layout;
  uint64_t mask = 0;  // what is written of an entry
  SortRuns from_runs;
  int64_t to_kept = 0;   // of a merged run, at most
  int64_t to_count = 0;  // merged runs of a row
  int64_t pieces = 0;    // of a merged run
  int64_t items = 0;     // pieces of all rows
  KeyType<T> flip = 0;
};
template <typename T, typename Items>
CHORUS_DEVICE void ArgSortMerge(const SortMergeArgs<T>& args, const Lane& lane) {
  const SortRuns& runs = args.from_runs;
  for (int64_t t = lane.index; t < args.items; t += lane.count) {
    const int64_t inner = t % runs.stride;
    const int64_t piece = t / runs.stride % args.pieces;
    const int64_t pair = t / runs.stride / args.pieces % args.to_count;
    const int64_t outer = t / runs.stride / args.pieces / args.to_count;
    const int64_t row_first = outer * runs.size * runs.stride + inner;
    const auto read = [&](uint64_t entry) {
      return Items::Read(entry, args.x, row_first, runs.stride, args.flip);
    };
    const uint64_t* const a = args.from + args.from_layout.At(outer, inner, 2 * pair);
    const uint64_t* const b = a + args.from_layout.run;
    const int64_t a_size = runs.Kept(2 * pair);
    const int64_t b_size = runs.Kept(2 * pair + 1);
    const int64_t both = a_size + b_size;
    const int64_t kept = both < args.to_kept ? both : args.to_kept;
    const int64_t begin = piece * kMergedEntries;
    const int64_t end = begin + kMergedEntries < kept ? begin + kMergedEntries : kept;
    if (begin >= end) continue;
    // How many of the first `begin` entries are a's: between these.
    int64_t least = begin > b_size ? begin - b_size : 0;
    int64_t most = begin < a_size ? begin : a_size;
    while (least < most) {
      const int64_t middle = (least + most) / 2;
      if (Items::IsLess(read(a[middle]), read(b[begin - 1 - middle]))) {
        least = middle + 1;
      } else {
        most = middle;
      }
    }
    int64_t a_next = least;
    int64_t b_next = begin - least;
    const auto read_a = [&] { return a_next < a_size ? read(a[a_next]) : Items::Last(); };
    const auto read_b = [&] { return b_next < b_size ? read(b[b_next]) : Items::Last(); };
    typename Items::Item of_a = read_a();
    typename Items::Item of_b = read_b();
    uint64_t* const to = args.to + args.to_layout.At(outer, inner, pair);
    for (int64_t i = begin; i < end; ++i) {
      const bool is_a = Items::IsLess(of_a, of_b);
      to[i * args.to_layout.entry] = Items::EntryOf(is_a ? of_a : of_b) & args.mask;
      if (is_a) {
        ++a_next;
        of_a = read_a();
      } else {
        ++b_next;
        of_b = read_b();
      }
    }
  }
}

// Packed entries are merged without a look at the elements, whatever these are.
#define CHORUS_KERNELS_OF_Sort(X)                                                                 \
  X(arg_sort_runs_f16, SortRunsArgs<F16>, (ArgSortRuns<F16, PackedItems<F16>>))                   \
  X(arg_sort_runs_bf16, SortRunsArgs<BF16>, (ArgSortRuns<BF16, PackedItems<BF16>>))               \
  X(arg_sort_runs_f32, SortRunsArgs<float>, (ArgSortRuns<float, PackedItems<float>>))             \
  X(arg_sort_runs_i8, SortRunsArgs<int8_t>, (ArgSortRuns<int8_t, PackedItems<int8_t>>))           \
  X(arg_sort_runs_u8, SortRunsArgs<uint8_t>, (ArgSortRuns<uint8_t, PackedItems<uint8_t>>))        \
  X(arg_sort_runs_i16, SortRunsArgs<int16_t>, (ArgSortRuns<int16_t, PackedItems<int16_t>>))       \
  X(arg_sort_runs_i32, SortRunsArgs<int32_t>, (ArgSortRuns<int32_t, PackedItems<int32_t>>))       \
  X(arg_sort_runs_bool, SortRunsArgs<Bool>, (ArgSortRuns<Bool, PackedItems<Bool>>))               \
  X(arg_sort_merge_8, SortMergeArgs<Bool>, (ArgSortMerge<Bool, PackedItems<Bool>>))               \
  X(arg_sort_wide_runs_f32, SortRunsArgs<float>, (ArgSortRuns<float, WideItems<float>>))          \
  X(arg_sort_wide_runs_f64, SortRunsArgs<double>, (ArgSortRuns<double, WideItems<double>>))       \
  X(arg_sort_wide_runs_i32, SortRunsArgs<int32_t>, (ArgSortRuns<int32_t, WideItems<int32_t>>))    \
  X(arg_sort_wide_runs_i64, SortRunsArgs<int64_t>, (ArgSortRuns<int64_t, WideItems<int64_t>>))    \
  X(arg_sort_wide_merge_f32, SortMergeArgs<float>, (ArgSortMerge<float, WideItems<float>>))       \
  X(arg_sort_wide_merge_f64, SortMergeArgs<double>, (ArgSortMerge<double, WideItems<double>>))    \
  X(arg_sort_wide_merge_i32, SortMergeArgs<int32_t>, (ArgSortMerge<int32_t, WideItems<int32_t>>)) \
  X(arg_sort_wide_merge_i64, SortMergeArgs<int64_t>, (ArgSortMerge<int64_t, WideItems<int64_t>>))

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SORT_SORT_KERNELS_H_
