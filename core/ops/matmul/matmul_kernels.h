// What each thread of matmul's kernel does.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_MATMUL_MATMUL_KERNELS_H_
#define CHORUS_CORE_OPS_MATMUL_MATMUL_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"
#include "core/ops/cuda_tiles.h"
#include "core/tensor/half.h"

namespace chorus {
namespace cuda {

inline constexpr int kMatmulTile = 4;  // rows and columns of a thread's

// Products of matrices that lie behind each other. How far it is from one element to the next says
// which of them are transposed.
template <typename T>
struct MatmulArgs {
  static constexpr int kScratchPacks = 0;
  const T* a = nullptr;
  const T* b = nullptr;
  T* c = nullptr;
  int64_t batch = 0;
  int64_t depth = 0;   // products of a sum
  int64_t a_row = 0;   // along the rows of op(a)
  int64_t a_deep = 0;  // along its columns
  int64_t b_deep = 0;  // along the rows of op(b)
  int64_t b_column = 0;
  Tiling<kMatmulTile, kMatmulTile> tiling;  // of c
};

// A sum's products are added in their order, half types as floats.
template <typename T>
CHORUS_DEVICE void Matmul(const MatmulArgs<T>& args, const Lane& lane) {
  using Sum = Arithmetic<T>;
  const int64_t rows = args.tiling.rows;
  const int64_t columns = args.tiling.columns;
  const int64_t tiles = args.tiling.tiles();
  for (int64_t index = lane.index; index < args.batch * tiles; index += lane.count) {
    const int64_t matrix = index / tiles;
    const Tile tile = args.tiling.At(index % tiles);
    // Where the matrix ends its last row or column is computed again, and not kept.
    int64_t a[kMatmulTile];
    int64_t b[kMatmulTile];
    CHORUS_UNROLL
    for (int i = 0; i < kMatmulTile; ++i) {
      a[i] =
          matrix * rows * args.depth + Least(tile.row + i * tile.row_step, rows - 1) * args.a_row;
      b[i] = matrix * columns * args.depth +
             Least(tile.column + i * tile.column_step, columns - 1) * args.b_column;
    }
    Sum sums[kMatmulTile][kMatmulTile] = {};
    for (int64_t k = 0; k < args.depth; ++k) {
      Sum left[kMatmulTile];
      Sum right[kMatmulTile];
      CHORUS_UNROLL
      for (int i = 0; i < kMatmulTile; ++i) {
        left[i] = static_cast<Sum>(args.a[a[i] + k * args.a_deep]);
        right[i] = static_cast<Sum>(args.b[b[i] + k * args.b_deep]);
      }
      CHORUS_UNROLL
      for (int i = 0; i < kMatmulTile; ++i) {
        CHORUS_UNROLL
        for (int j = 0; j < kMatmulTile; ++j) sums[i][j] += left[i] * right[j];
      }
    }
    T* const c = args.c + matrix * rows * columns;
    CHORUS_UNROLL
    for (int i = 0; i < kMatmulTile; ++i) {
      const int64_t row = tile.row + i * tile.row_step;
      CHORUS_UNROLL
      for (int j = 0; j < kMatmulTile; ++j) {
        const int64_t column = tile.column + j * tile.column_step;
        if (row < rows && column < columns) c[row * columns + column] = static_cast<T>(sums[i][j]);
      }
    }
  }
}

#define CHORUS_KERNELS_OF_Matmul(X)                 \
  X(matmul_f16, MatmulArgs<F16>, Matmul<F16>)       \
  X(matmul_bf16, MatmulArgs<BF16>, Matmul<BF16>)    \
  X(matmul_f32, MatmulArgs<float>, Matmul<float>)   \
  X(matmul_f64, MatmulArgs<double>, Matmul<double>) \
  X(matmul_i64, MatmulArgs<int64_t>, Matmul<int64_t>)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_MATMUL_MATMUL_KERNELS_H_
