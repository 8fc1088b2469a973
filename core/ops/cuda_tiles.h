// Which results of a matrix each thread of a GPU computes: a tile of them, whose sums are in its
// registers, so that what it reads is used several times.
//
// Threads: pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_CUDA_TILES_H_
#define CHORUS_CORE_OPS_CUDA_TILES_H_

#include <cstdint>

#include "core/base/device.h"

namespace chorus {
namespace cuda {

CHORUS_DEVICE constexpr int64_t Quotient(int64_t x, int64_t y) { return (x + y - 1) / y; }
CHORUS_DEVICE constexpr int64_t Least(int64_t x, int64_t y) { return x < y ? x : y; }

// Rows row + i row_step and columns column + j column_step, as far as the matrix has them.
struct Tile {
  int64_t row = 0;
  int64_t row_step = 1;
  int64_t column = 0;
  int64_t column_step = 1;
};

// Tiles of kRows x kColumns. Those of one panel of columns are counted row by row: neighbouring
// threads have neighbouring columns, and the threads of a block rows of the same columns.
template <int kRows, int kColumns>
struct Tiling {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t width = 32;  // tiles beside each other in a panel; fewer in the last

  CHORUS_DEVICE int64_t row_tiles() const { return Quotient(rows, kRows); }
  CHORUS_DEVICE int64_t column_tiles() const { return Quotient(columns, kColumns); }
  CHORUS_DEVICE int64_t tiles() const { return row_tiles() * column_tiles(); }

  CHORUS_DEVICE Tile At(int64_t index) const {
    const int64_t panel = index / (width * row_tiles());
    const int64_t before = panel * width;
    const int64_t here = Least(width, column_tiles() - before);
    index -= before * row_tiles();
    Tile tile;
    tile.row = index / here;
    tile.row_step = row_tiles();
    tile.column = before * kColumns + index % here;
    tile.column_step = here;
    return tile;
  }
};

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CUDA_TILES_H_
