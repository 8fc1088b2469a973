// What each thread of the kernels of convolution and its gradients does.
//
// A convolution and its adjoint in x are one kernel: each gathers, for an element of its result,
// from a source (x, or y) what the taps of the weights are over. Along a dimension the adjoint's
// elements fall into as many classes as a place strides, each of which has taps of its own; within
// a class it is a convolution without a stride.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_KERNELS_H_
#define CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"
#include "core/ops/cuda_tiles.h"
#include "core/ops/device_loops.h"
#include "core/ops/division.h"

namespace chorus {
namespace cuda {

// --- A convolution, and its adjoint in x --------------------------------------------------------

// Along height or width: element c + stride p of the result is at place p of class c. It is made of
// the taps first, first + tap_step, ... as far as there are taps, which are over the elements lead
// + source_stride p, that + source_step, ... of the source, or over padding.
struct ConvolutionAxis {
  int64_t results = 0;
  int64_t sources = 0;
  int64_t taps = 1;
  int64_t classes = 1;  // with elements
  int64_t stride = 1;   // from place to place of a class
  int64_t places = 0;   // of a class at most
  int64_t source_stride = 1;
  int64_t source_step = 1;
  int64_t tap_step = 1;
  // Tap t of class c is over what is (c + padding - dilation t) / stride elements from a place, if
  // that is a whole number. It is one for some t where common, the greatest common divisor of
  // stride and dilation, divides c + padding. Inverse times dilation / common is 1, modulo
  // tap_step.
  int64_t padding = 0;
  int64_t dilation = 0;
  int64_t common = 1;
  int64_t inverse = 0;
};

struct ClassTaps {
  int64_t first = 0;
  int64_t count = 0;
  int64_t lead = 0;  // where the first one is at the class's first place
};
CHORUS_DEVICE ClassTaps TapsOfClass(const ConvolutionAxis& axis, int64_t number) {
  const int64_t away = number + axis.padding;
  ClassTaps taps;
  if (away % axis.common != 0) return taps;
  taps.first = away / axis.common % axis.tap_step * axis.inverse % axis.tap_step;
  if (taps.first < axis.taps) taps.count = Quotient(axis.taps - taps.first, axis.tap_step);
  taps.lead = (away - axis.dilation * taps.first) / axis.stride;
  return taps;
}

inline constexpr int kConvolutionPlaces = 4;  // of a thread

// By kRows channels of the result a thread.
template <typename T, int kRows>
struct ConvolutionArgs {
  static constexpr int kScratchPacks = 0;
  const T* source = nullptr;
  const T* weights = nullptr;
  T* result = nullptr;
  int64_t groups = 1;
  int64_t depth = 0;        // channels of the source that a group has
  int64_t weight_row = 0;   // from a channel of the result to the next one
  int64_t weight_deep = 0;  // of the source
  ConvolutionAxis height;
  ConvolutionAxis width;
  // Of a group's channels and a class's places, sample by sample.
  Tiling<kRows, kConvolutionPlaces> tiling;

  CHORUS_DEVICE int64_t threads() const {
    return groups * height.classes * width.classes * tiling.tiles();
  }
};

// Each tap's products are added up over the channels, and these sums over the taps.
template <typename T, int kRows>
CHORUS_DEVICE void Convolution(const ConvolutionArgs<T, kRows>& args, const Lane& lane) {
  constexpr int kPlaces = kConvolutionPlaces;
  const ConvolutionAxis& height = args.height;
  const ConvolutionAxis& width = args.width;
  const int64_t channels = args.tiling.rows;
  const int64_t source_plane = height.sources * width.sources;
  const int64_t result_plane = height.results * width.results;
  const int64_t group_weights = channels * args.depth * height.taps * width.taps;
  const int64_t threads = args.threads();
  for (int64_t index = lane.index; index < threads; index += lane.count) {
    const int64_t tiles = args.tiling.tiles();
    const Tile tile = args.tiling.At(index % tiles);
    int64_t rest = index / tiles;
    const int64_t column_class = rest % width.classes;
    rest /= width.classes;
    const int64_t row_class = rest % height.classes;
    const int64_t group = rest / height.classes;
    const ClassTaps down = TapsOfClass(height, row_class);
    const ClassTaps across = TapsOfClass(width, column_class);

    // The places: where their first taps are, in planes of which sample, and where their results
    // are; -1: there is no such place.
    int64_t row[kPlaces];
    int64_t column[kPlaces];
    int64_t from[kPlaces];
    int64_t to[kPlaces];
    CHORUS_UNROLL
    for (int j = 0; j < kPlaces; ++j) {
      int64_t place = tile.column + j * tile.column_step;
      to[j] = -1;
      row[j] = column[j] = from[j] = 0;
      if (place >= args.tiling.columns) continue;
      const int64_t place_column = place % width.places;
      place /= width.places;
      const int64_t place_row = place % height.places;
      const int64_t matrices = place / height.places * args.groups + group;
      const int64_t result_row = row_class + place_row * height.stride;
      const int64_t result_column = column_class + place_column * width.stride;
      if (result_row >= height.results || result_column >= width.results) continue;
      row[j] = down.lead + place_row * height.source_stride;
      column[j] = across.lead + place_column * width.source_stride;
      from[j] = matrices * args.depth * source_plane;
      to[j] = matrices * channels * result_plane + result_row * width.results + result_column;
    }
    int64_t weight_rows[kRows];
    CHORUS_UNROLL
    for (int i = 0; i < kRows; ++i) {
      // Beyond the last channel that one again, which is not kept.
      weight_rows[i] = group * group_weights +
                       Least(tile.row + i * tile.row_step, channels - 1) * args.weight_row;
    }

    T sums[kRows][kPlaces] = {};
    const int64_t taps = args.depth == 0 ? 0 : down.count * across.count;
    int64_t tap_row = 0;
    int64_t tap_column = 0;
    for (int64_t tap = 0; tap < taps; ++tap) {
      // Padding is no factor: what a tap has there is not added. Places over it read elsewhere.
      bool inside[kPlaces];
      int64_t at[kPlaces];
      int64_t somewhere = -1;
      CHORUS_UNROLL
      for (int j = 0; j < kPlaces; ++j) {
        const int64_t source_row = row[j] + tap_row * height.source_step;
        const int64_t source_column = column[j] + tap_column * width.source_step;
        inside[j] = to[j] >= 0 && source_row >= 0 && source_row < height.sources &&
                    source_column >= 0 && source_column < width.sources;
        at[j] = 0;
        if (inside[j]) at[j] = somewhere = from[j] + source_row * width.sources + source_column;
      }
      const int64_t weight = (down.first + tap_row * height.tap_step) * width.taps + across.first +
                             tap_column * width.tap_step;
      if (++tap_column == across.count) {
        tap_column = 0;
        ++tap_row;
      }
      if (somewhere < 0) continue;
      CHORUS_UNROLL
      for (int j = 0; j < kPlaces; ++j) {
        if (!inside[j]) at[j] = somewhere;
      }
      T parts[kRows][kPlaces] = {};
      // Unrolled it would need so many registers that few threads fit on a multiprocessor.
      CHORUS_KEEP_LOOP
      for (int64_t k = 0; k < args.depth; ++k) {
        T left[kRows];
        T right[kPlaces];
        CHORUS_UNROLL
        for (int i = 0; i < kRows; ++i) {
          left[i] = args.weights[weight_rows[i] + weight + k * args.weight_deep];
        }
        CHORUS_UNROLL
        for (int j = 0; j < kPlaces; ++j) right[j] = args.source[at[j] + k * source_plane];
        CHORUS_UNROLL
        for (int i = 0; i < kRows; ++i) {
          CHORUS_UNROLL
          for (int j = 0; j < kPlaces; ++j) parts[i][j] += left[i] * right[j];
        }
      }
      CHORUS_UNROLL
      for (int j = 0; j < kPlaces; ++j) {
        CHORUS_UNROLL
        for (int i = 0; i < kRows; ++i) {
          if (inside[j]) sums[i][j] += parts[i][j];
        }
      }
    }

    CHORUS_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int64_t channel = tile.row + i * tile.row_step;
      CHORUS_UNROLL
      for (int j = 0; j < kPlaces; ++j) {
        if (channel < channels && to[j] >= 0) {
          args.result[to[j] + channel * result_plane] = sums[i][j];
        }
      }
    }
  }
}

// --- Its adjoint in the weights -----------------------------------------------------------------

// Places of y along the dimensions that sums go over.
struct ConvolutionPlace {
  int64_t sample = 0;
  int64_t row = 0;
  int64_t column = 0;
};

// Along height or width, as core/ops/window.h says.
struct ConvolutionWindow {
  int64_t sources = 0;  // of x
  int64_t places = 0;   // of y
  int64_t taps = 1;
  int64_t stride = 1;
  int64_t padding = 0;
  int64_t dilation = 1;
};

// A thread has one tap of kTile channels of y and of x each, and every parts-th place: neighbours
// have neighbouring places of the same channels.
template <typename T, int kTile>
struct WeightGradArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  const T* y = nullptr;
  // Of each part the weights' sums over its places, behind those of the one before.
  T* sums = nullptr;
  int64_t batch = 0;
  int64_t groups = 1;
  int64_t parts = 1;
  ConvolutionPlace step;  // how far parts places are
  ConvolutionWindow height;
  ConvolutionWindow width;
  Tiling<kTile, kTile> tiling;  // of a group's channels: of y by those of x

  CHORUS_DEVICE int64_t threads() const {
    return groups * tiling.tiles() * height.taps * width.taps * parts;
  }
};

template <typename T, int kTile>
CHORUS_DEVICE void WeightGrad(const WeightGradArgs<T, kTile>& args, const Lane& lane) {
  const ConvolutionWindow& height = args.height;
  const ConvolutionWindow& width = args.width;
  const int64_t y_channels = args.tiling.rows;
  const int64_t x_channels = args.tiling.columns;
  const int64_t x_plane = height.sources * width.sources;
  const int64_t y_plane = height.places * width.places;
  const int64_t taps = height.taps * width.taps;
  const int64_t threads = args.threads();
  for (int64_t index = lane.index; index < threads; index += lane.count) {
    const int64_t part = index % args.parts;
    int64_t rest = index / args.parts;
    const int64_t tap = rest % taps;
    rest /= taps;
    const int64_t tiles = args.tiling.tiles();
    const Tile tile = args.tiling.At(rest % tiles);
    const int64_t group = rest / tiles;
    const int64_t lead_row = tap / width.taps * height.dilation - height.padding;
    const int64_t lead_column = tap % width.taps * width.dilation - width.padding;
    int64_t y_at[kTile];
    int64_t x_at[kTile];
    CHORUS_UNROLL
    for (int i = 0; i < kTile; ++i) {
      // Beyond the last channel that one again, which is not kept.
      y_at[i] =
          (group * y_channels + Least(tile.row + i * tile.row_step, y_channels - 1)) * y_plane;
      x_at[i] = (group * x_channels + Least(tile.column + i * tile.column_step, x_channels - 1)) *
                x_plane;
    }
    T sums[kTile][kTile] = {};
    ConvolutionPlace place;
    place.column = part % width.places;
    place.row = part / width.places % height.places;
    place.sample = part / y_plane;
    while (place.sample < args.batch) {
      const int64_t row = lead_row + place.row * height.stride;
      const int64_t column = lead_column + place.column * width.stride;
      if (row >= 0 && row < height.sources && column >= 0 && column < width.sources) {
        const int64_t in_y = place.sample * args.groups * y_channels * y_plane +
                             place.row * width.places + place.column;
        const int64_t in_x =
            place.sample * args.groups * x_channels * x_plane + row * width.sources + column;
        T left[kTile];
        T right[kTile];
        CHORUS_UNROLL
        for (int i = 0; i < kTile; ++i) {
          left[i] = args.y[y_at[i] + in_y];
          right[i] = args.x[x_at[i] + in_x];
        }
        CHORUS_UNROLL
        for (int i = 0; i < kTile; ++i) {
          CHORUS_UNROLL
          for (int j = 0; j < kTile; ++j) sums[i][j] += left[i] * right[j];
        }
      }
      place.column += args.step.column;
      place.row += args.step.row;
      place.sample += args.step.sample;
      if (place.column >= width.places) {
        place.column -= width.places;
        ++place.row;
      }
      if (place.row >= height.places) {
        place.row -= height.places;
        ++place.sample;
      }
    }
    CHORUS_UNROLL
    for (int i = 0; i < kTile; ++i) {
      const int64_t y_channel = tile.row + i * tile.row_step;
      CHORUS_UNROLL
      for (int j = 0; j < kTile; ++j) {
        const int64_t x_channel = tile.column + j * tile.column_step;
        if (y_channel < y_channels && x_channel < x_channels) {
          const int64_t rows = part * args.groups + group;
          args.sums[((rows * y_channels + y_channel) * x_channels + x_channel) * taps + tap] =
              sums[i][j];
        }
      }
    }
  }
}

// The sums of the parts, in their order.
template <typename T>
struct WeightGradSumArgs {
  static constexpr int kScratchPacks = 0;
  const T* sums = nullptr;
  T* out = nullptr;
  int64_t parts = 0;
  int64_t count = 0;  // of each
};
template <typename T>
CHORUS_DEVICE void WeightGradSum(const WeightGradSumArgs<T>& args, const Lane& lane) {
  for (int64_t i = lane.index; i < args.count; i += lane.count) {
    T sum = args.sums[i];
    for (int64_t part = 1; part < args.parts; ++part) sum += args.sums[part * args.count + i];
    args.out[i] = sum;
  }
}

// --- By matrix products -------------------------------------------------------------------------

// Along height or width, as core/ops/window.h says.
struct UnfoldedAxis {
  Division sources;  // of x
  Division places;   // of y
  Division taps;
  Division stride;
  int64_t padding = 0;
  int64_t dilation = 1;
};

// A row for each tap of each channel of each sample, which has what the tap is over at each place:
// rows [samples, channels, taps down, taps across, places down, places across]. Padding is zeros.
// Of one group.
template <typename T>
struct UnfoldArgs {
  static constexpr int kScratchPacks = 0;
  const T* x = nullptr;
  T* rows = nullptr;
  int64_t count = 0;  // elements of the rows
  UnfoldedAxis height;
  UnfoldedAxis width;
};
template <typename T>
CHORUS_DEVICE void Unfold(const UnfoldArgs<T>& args, const Lane& lane) {
  const UnfoldedAxis& height = args.height;
  const UnfoldedAxis& width = args.width;
  SetElements(lane, args.count, args.rows, [&](int64_t i) {
    const DividedIndex place_column(i, width.places);
    const DividedIndex place_row(place_column.outer, height.places);
    const DividedIndex tap_column(place_row.outer, width.taps);
    const DividedIndex tap_row(tap_column.outer, height.taps);
    const int64_t row =
        place_row.inner * height.stride.by + tap_row.inner * height.dilation - height.padding;
    const int64_t column =
        place_column.inner * width.stride.by + tap_column.inner * width.dilation - width.padding;
    const bool inside =
        row >= 0 && row < height.sources.by && column >= 0 && column < width.sources.by;
    if (!inside) return T(0);
    return args.x[(tap_row.outer * height.sources.by + row) * width.sources.by + column];
  });
}

// The adjoint: an element of x is the sum of what rows have for it, tap by tap.
template <typename T>
struct FoldArgs {
  static constexpr int kScratchPacks = 0;
  const T* rows = nullptr;
  T* x = nullptr;
  int64_t count = 0;  // elements of x
  UnfoldedAxis height;
  UnfoldedAxis width;
};
template <typename T>
CHORUS_DEVICE void Fold(const FoldArgs<T>& args, const Lane& lane) {
  const UnfoldedAxis& height = args.height;
  const UnfoldedAxis& width = args.width;
  // The place of which such a tap is over such an element, or -1.
  const auto place_of = [](const UnfoldedAxis& axis, int64_t element, int64_t tap) {
    const int64_t away = element + axis.padding - tap * axis.dilation;
    if (away < 0) return int64_t{-1};
    const DividedIndex place(away, axis.stride);
    return place.inner == 0 && place.outer < axis.places.by ? place.outer : int64_t{-1};
  };
  SetElements(lane, args.count, args.x, [&](int64_t i) {
    const DividedIndex column(i, width.sources);
    const DividedIndex row(column.outer, height.sources);
    T sum = 0;
    CHORUS_KEEP_LOOP
    for (int64_t a = 0; a < height.taps.by; ++a) {
      const int64_t place_row = place_of(height, row.inner, a);
      if (place_row < 0) continue;
      CHORUS_KEEP_LOOP
      for (int64_t b = 0; b < width.taps.by; ++b) {
        const int64_t place_column = place_of(width, column.inner, b);
        if (place_column < 0) continue;
        const int64_t taps = (row.outer * height.taps.by + a) * width.taps.by + b;
        sum += args.rows[(taps * height.places.by + place_row) * width.places.by + place_column];
      }
    }
    return sum;
  });
}

// Narrow ones are for groups of one channel, where more of them a thread would be of no use.
template <typename T>
using WideConvolutionArgs = ConvolutionArgs<T, 4>;
template <typename T>
using NarrowConvolutionArgs = ConvolutionArgs<T, 1>;
template <typename T>
using WideWeightGradArgs = WeightGradArgs<T, 4>;
template <typename T>
using NarrowWeightGradArgs = WeightGradArgs<T, 1>;

#define CHORUS_KERNELS_OF_Convolution(X)                                                       \
  X(convolution_f32, WideConvolutionArgs<float>, (Convolution<float, 4>))                      \
  X(convolution_f64, WideConvolutionArgs<double>, (Convolution<double, 4>))                    \
  X(convolution_narrow_f32, NarrowConvolutionArgs<float>, (Convolution<float, 1>))             \
  X(convolution_narrow_f64, NarrowConvolutionArgs<double>, (Convolution<double, 1>))           \
  X(convolution_weight_grad_f32, WideWeightGradArgs<float>, (WeightGrad<float, 4>))            \
  X(convolution_weight_grad_f64, WideWeightGradArgs<double>, (WeightGrad<double, 4>))          \
  X(convolution_weight_grad_narrow_f32, NarrowWeightGradArgs<float>, (WeightGrad<float, 1>))   \
  X(convolution_weight_grad_narrow_f64, NarrowWeightGradArgs<double>, (WeightGrad<double, 1>)) \
  X(convolution_weight_grad_sum_f32, WeightGradSumArgs<float>, WeightGradSum<float>)           \
  X(convolution_unfold_f32, UnfoldArgs<float>, Unfold<float>)                                  \
  X(convolution_unfold_f64, UnfoldArgs<double>, Unfold<double>)                                \
  X(convolution_fold_f32, FoldArgs<float>, Fold<float>)                                        \
  X(convolution_fold_f64, FoldArgs<double>, Fold<double>)                                      \
  X(convolution_weight_grad_sum_f64, WeightGradSumArgs<double>, WeightGradSum<double>)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CONVOLUTION_CONVOLUTION_KERNELS_H_
