// What each thread of the normalisation kernels does.
//
// What is added up in a row of x, or for a weight, is cut into parts of a thread each. Parts take a
// row's elements in turn, so that neighbouring threads read neighbouring elements. The parts'
// results are taken together kCombined at a time, in one order, launch after launch.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_NORM_NORM_KERNELS_H_
#define CHORUS_CORE_OPS_NORM_NORM_KERNELS_H_

#include <cmath>
#include <cstdint>

#include "core/base/device.h"
#include "core/ops/division.h"
#include "core/ops/long_sums.h"

namespace chorus {
namespace cuda {

// How many elements a thread looks at together.
inline constexpr int kNormChunk = 16;
// How many parts' results a thread takes together.
inline constexpr int64_t kCombined = 32;

// A tensor [before, rows, run], whose rows are cut into `parts`: part p has elements p, p + parts,
// and so on of a row's [before, run].
struct NormParts {
  int64_t rows = 0;
  int64_t run = 1;
  int64_t parts = 1;
  // Neighbouring threads have the same part of neighbouring rows, not parts of one.
  bool rows_first = false;
  Division by_neighbours;  // rows or parts
  // How many elements a part has, and how many of the first have one more.
  int64_t part_size = 0;
  int64_t longer_parts = 0;
  // From an element of a part to the next one: so far, and so much further if that would leave the
  // run.
  int64_t step = 0;
  int64_t step_within = 0;
  int64_t over_run = 0;

  CHORUS_DEVICE int64_t items() const { return rows * parts; }
  // How many elements parts [begin, end) have.
  CHORUS_DEVICE int64_t SizeOf(int64_t begin, int64_t end) const {
    const int64_t longer_before = begin < longer_parts ? begin : longer_parts;
    const int64_t longer = end < longer_parts ? end : longer_parts;
    return part_size * (end - begin) + longer - longer_before;
  }
};

// Goes through the elements of a part.
struct NormCursor {
  CHORUS_DEVICE NormCursor(const NormParts& of, int64_t item) {
    const DividedIndex index(item, of.by_neighbours);
    part = of.rows_first ? index.outer : index.inner;
    row = of.rows_first ? index.inner : index.outer;
    left = of.SizeOf(part, part + 1);
    int64_t before = 0;
    within = part;
    if (left > 0 && part >= of.run) {
      before = part / of.run;
      within = part % of.run;
    }
    at = (before * of.rows + row) * of.run + within;
  }
  CHORUS_DEVICE void Advance(const NormParts& of) {
    at += of.step;
    within += of.step_within;
    if (within >= of.run) {
      within -= of.run;
      at += of.over_run;
    }
    --left;
  }

  int64_t row = 0;
  int64_t part = 0;
  int64_t left = 0;
  int64_t at = 0;
  int64_t within = 0;
};

// Of so few, half and half.
template <typename T, int kCount>
CHORUS_DEVICE T SumOf(const T* terms) {
  if constexpr (kCount == 1) {
    return terms[0];
  } else {
    return SumOf<T, kCount / 2>(terms) + SumOf<T, kCount / 2>(terms + kCount / 2);
  }
}

// Of which row and weight an element is (norm.h, NormSizes).
struct NormIndices {
  Division by_run, by_rows, by_stretch, by_weights;

  CHORUS_DEVICE int64_t RowOf(int64_t i) const { return DividedIndex(by_run.Of(i), by_rows).inner; }
  CHORUS_DEVICE int64_t WeightOf(int64_t i) const {
    return DividedIndex(by_stretch.Of(i), by_weights).inner;
  }
};

template <typename T>
CHORUS_DEVICE T ScaleOf(T variance, T epsilon) {
  return 1 / std::sqrt(variance + epsilon);
}

// A group of up to kCombined results, of those that a row has: [begin, end).
struct NormGroup {
  CHORUS_DEVICE NormGroup(int64_t item, int64_t groups, int64_t results)
      : row(item / groups), group(item % groups), begin(group * kCombined), end(begin + kCombined) {
    if (end > results) end = results;
  }
  int64_t row, group, begin, end;
};

template <typename T>
struct MomentsArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  // Of each part the sum, and behind all of them of each the sum of (x - its mean)^2.
  T* to = nullptr;
  NormParts parts;
  bool center = true;
};
template <typename T>
CHORUS_DEVICE void MomentsOfParts(const MomentsArgs<T>& args, const Lane& lane) {
  const NormParts& parts = args.parts;
  for (int64_t t = lane.index; t < parts.items(); t += lane.count) {
    NormCursor cursor(parts, t);
    const int64_t result = cursor.row * parts.parts + cursor.part;
    T sum = 0;
    // Chan, Golub and LeVeque 1979: of some elements and of a chunk, from the means of each.
    T mean = 0;
    T squares = 0;
    T count = 0;
    while (cursor.left > 0) {
      const int64_t elements = cursor.left < kNormChunk ? cursor.left : kNormChunk;
      T x[kNormChunk];
      CHORUS_UNROLL
      for (int i = 0; i < kNormChunk; ++i) {
        x[i] = i < elements ? args.x[cursor.at] : T{0};
        cursor.Advance(parts);
      }
      const T chunk_sum = SumOf<T, kNormChunk>(x);
      const T chunk_count = static_cast<T>(elements);
      const T chunk_mean = args.center ? chunk_sum / chunk_count : T{0};
      CHORUS_UNROLL
      for (int i = 0; i < kNormChunk; ++i) {
        const T apart = i < elements ? x[i] - chunk_mean : T{0};
        x[i] = apart * apart;
      }
      const T apart = chunk_mean - mean;
      const T weight = chunk_count / (count + chunk_count);
      squares += SumOf<T, kNormChunk>(x) + apart * apart * count * weight;
      mean += apart * weight;
      count += chunk_count;
      sum += chunk_sum;
    }
    args.to[result] = sum;
    args.to[parts.items() + result] = squares;
  }
}

template <typename T>
struct MomentsCombineArgs {
  static constexpr int kScratchPacks = 0;
  const T* from = nullptr;
  T* to = nullptr;
  int64_t from_first = 0;
  int64_t to_first = 0;
  NormParts parts;
  int64_t results = 0;          // of a row: what there is
  int64_t parts_of_result = 0;  // of each but the last
  int64_t groups = 0;           // of a row: what there will be
  bool center = true;
};
// Gives what MomentsOfParts does, of larger parts; the last time, when one is left of each row, the
// moments.
template <typename T>
CHORUS_DEVICE void MomentsCombine(const MomentsCombineArgs<T>& args, const Lane& lane) {
  const NormParts& parts = args.parts;
  const int64_t items = parts.rows * args.groups;
  for (int64_t t = lane.index; t < items; t += lane.count) {
    const NormGroup group(t, args.groups, args.results);
    const T* const sums = args.from + args.from_first + group.row * args.results;
    const T* const squares = sums + parts.rows * args.results;
    const auto size_of = [&](int64_t begin, int64_t end) {
      const int64_t last = end * args.parts_of_result;
      return static_cast<double>(
          parts.SizeOf(begin * args.parts_of_result, last < parts.parts ? last : parts.parts));
    };
    const double size = size_of(group.begin, group.end);
    double sum = 0;
    double square = 0;
    for (int64_t i = group.begin; i < group.end; ++i) {
      sum += static_cast<double>(sums[i]);
      square += static_cast<double>(squares[i]);
    }
    // Of an empty row: NaN.
    const double mean = sum / size;
    for (int64_t i = group.begin; i < group.end && args.center; ++i) {
      const double part = size_of(i, i + 1);
      if (part == 0) continue;
      const double apart = static_cast<double>(sums[i]) / part - mean;
      square += apart * apart * part;
    }
    T* const to = args.to + args.to_first;
    if (args.groups > 1) {
      to[t] = static_cast<T>(sum);
      to[items + t] = static_cast<T>(square);
    } else {
      to[t] = args.center ? static_cast<T>(mean) : T{0};
      to[items + t] = static_cast<T>(square / size);
    }
  }
}

template <typename T>
struct NormalizeArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  const T* moments = nullptr;
  const T* weights = nullptr;
  const T* biases = nullptr;
  T* y = nullptr;
  NormIndices indices;
  int64_t size = 0;
  int64_t rows = 0;
  T epsilon = 0;
};
template <typename T>
CHORUS_DEVICE void Normalize(const NormalizeArgs<T>& args, const Lane& lane) {
  for (int64_t i = lane.index; i < args.size; i += lane.count) {
    const int64_t row = args.indices.RowOf(i);
    const int64_t weight = args.indices.WeightOf(i);
    const T scale = ScaleOf(args.moments[args.rows + row], args.epsilon);
    args.y[i] =
        (args.x[i] - args.moments[row]) * scale * args.weights[weight] + args.biases[weight];
  }
}

template <typename T>
struct NormSumsArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  const T* moments = nullptr;
  const T* weights = nullptr;  // unless the sums are those of the weights
  const T* g = nullptr;
  T* to = nullptr;
  int64_t to_first = 0;
  NormParts parts;
  NormIndices indices;
  int64_t rows = 0;  // of x
  T epsilon = 0;
};
// Of each part the sum of u, which is weight g, and behind all of them of each that of u (x -
// mean).
template <typename T>
CHORUS_DEVICE void NormalizeGradParts(const NormSumsArgs<T>& args, const Lane& lane) {
  const NormParts& parts = args.parts;
  for (int64_t t = lane.index; t < parts.items(); t += lane.count) {
    NormCursor cursor(parts, t);
    const int64_t result = cursor.row * parts.parts + cursor.part;
    const T mean = args.moments[cursor.row];
    T sum = 0;
    T product = 0;
    while (cursor.left > 0) {
      T u[kNormChunk];
      T products[kNormChunk];
      CHORUS_UNROLL
      for (int i = 0; i < kNormChunk; ++i) {
        u[i] = products[i] = 0;
        if (cursor.left > 0) {
          u[i] = args.weights[args.indices.WeightOf(cursor.at)] * args.g[cursor.at];
          products[i] = u[i] * (args.x[cursor.at] - mean);
        }
        cursor.Advance(parts);
      }
      sum += SumOf<T, kNormChunk>(u);
      product += SumOf<T, kNormChunk>(products);
    }
    args.to[args.to_first + result] = sum;
    args.to[args.to_first + parts.items() + result] = product;
  }
}
// Of each part the sum of g z; its rows are the weights.
template <typename T>
CHORUS_DEVICE void NormalizeWeightGradParts(const NormSumsArgs<T>& args, const Lane& lane) {
  const NormParts& parts = args.parts;
  for (int64_t t = lane.index; t < parts.items(); t += lane.count) {
    NormCursor cursor(parts, t);
    const int64_t result = cursor.row * parts.parts + cursor.part;
    T sum = 0;
    while (cursor.left > 0) {
      T terms[kNormChunk];
      CHORUS_UNROLL
      for (int i = 0; i < kNormChunk; ++i) {
        terms[i] = 0;
        if (cursor.left > 0) {
          const int64_t row = args.indices.RowOf(cursor.at);
          const T scale = ScaleOf(args.moments[args.rows + row], args.epsilon);
          terms[i] = (args.x[cursor.at] - args.moments[row]) * scale * args.g[cursor.at];
        }
        cursor.Advance(parts);
      }
      sum += SumOf<T, kNormChunk>(terms);
    }
    args.to[args.to_first + result] = sum;
  }
}

// Adds up results, kCombined of a row at a time.
template <typename T>
struct NormCombineArgs {
  static constexpr int kScratchPacks = 0;
  const T* from = nullptr;
  T* to = nullptr;
  int64_t from_first = 0;
  int64_t to_first = 0;
  int64_t rows = 0;
  int64_t results = 0;  // of a row: what there is
  int64_t groups = 0;   // of a row: what there will be
};
template <typename T>
CHORUS_DEVICE void NormCombine(const NormCombineArgs<T>& args, const Lane& lane) {
  for (int64_t t = lane.index; t < args.rows * args.groups; t += lane.count) {
    const NormGroup group(t, args.groups, args.results);
    const T* const from = args.from + args.from_first + group.row * args.results;
    args.to[args.to_first + t] = SumOfResults(from, group.begin, group.end);
  }
}

// What normalize_grad takes off each element of a row, beside r.
template <typename T>
struct NormRow {
  T scale;
  T mean_u;
  T slope;  // the mean of u z, times r
};
template <typename T>
struct NormRowsArgs {
  static constexpr int kScratchPacks = 0;
  const T* from = nullptr;  // as NormalizeGradParts leaves it, of `results` for each row
  int64_t from_first = 0;
  const T* moments = nullptr;
  NormRow<T>* to = nullptr;
  int64_t rows = 0;
  int64_t results = 0;
  int64_t row_size = 0;
  T epsilon = 0;
  bool center = true;
};
template <typename T>
CHORUS_DEVICE void NormalizeGradRows(const NormRowsArgs<T>& args, const Lane& lane) {
  for (int64_t row = lane.index; row < args.rows; row += lane.count) {
    const T* const sums = args.from + args.from_first + row * args.results;
    const auto size = static_cast<T>(args.row_size);
    NormRow<T> to;
    to.scale = ScaleOf(args.moments[args.rows + row], args.epsilon);
    to.mean_u = args.center ? SumOfResults(sums, 0, args.results) / size : T{0};
    to.slope =
        SumOfResults(sums + args.rows * args.results, 0, args.results) / size * to.scale * to.scale;
    args.to[row] = to;
  }
}

template <typename T>
struct NormalizeGradArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  const T* moments = nullptr;
  const T* weights = nullptr;
  const T* g = nullptr;
  const NormRow<T>* of_rows = nullptr;
  T* dx = nullptr;
  NormIndices indices;
  int64_t size = 0;
};
template <typename T>
CHORUS_DEVICE void NormalizeGrad(const NormalizeGradArgs<T>& args, const Lane& lane) {
  for (int64_t i = lane.index; i < args.size; i += lane.count) {
    const int64_t row = args.indices.RowOf(i);
    const NormRow<T> of_row = args.of_rows[row];
    const T u = args.g[i] * args.weights[args.indices.WeightOf(i)];
    args.dx[i] =
        of_row.scale * (u - of_row.mean_u - (args.x[i] - args.moments[row]) * of_row.slope);
  }
}

#define CHORUS_KERNELS_OF_Norm(X)                                                          \
  X(moments_parts_f32, MomentsArgs<float>, MomentsOfParts<float>)                          \
  X(moments_parts_f64, MomentsArgs<double>, MomentsOfParts<double>)                        \
  X(moments_combine_f32, MomentsCombineArgs<float>, MomentsCombine<float>)                 \
  X(moments_combine_f64, MomentsCombineArgs<double>, MomentsCombine<double>)               \
  X(normalize_f32, NormalizeArgs<float>, Normalize<float>)                                 \
  X(normalize_f64, NormalizeArgs<double>, Normalize<double>)                               \
  X(normalize_combine_f32, NormCombineArgs<float>, NormCombine<float>)                     \
  X(normalize_combine_f64, NormCombineArgs<double>, NormCombine<double>)                   \
  X(normalize_grad_parts_f32, NormSumsArgs<float>, NormalizeGradParts<float>)              \
  X(normalize_grad_parts_f64, NormSumsArgs<double>, NormalizeGradParts<double>)            \
  X(normalize_grad_rows_f32, NormRowsArgs<float>, NormalizeGradRows<float>)                \
  X(normalize_grad_rows_f64, NormRowsArgs<double>, NormalizeGradRows<double>)              \
  X(normalize_grad_f32, NormalizeGradArgs<float>, NormalizeGrad<float>)                    \
  X(normalize_grad_f64, NormalizeGradArgs<double>, NormalizeGrad<double>)                  \
  X(normalize_weight_grad_parts_f32, NormSumsArgs<float>, NormalizeWeightGradParts<float>) \
  X(normalize_weight_grad_parts_f64, NormSumsArgs<double>, NormalizeWeightGradParts<double>)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_NORM_NORM_KERNELS_H_
