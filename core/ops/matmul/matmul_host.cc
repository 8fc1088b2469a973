#include "core/ops/matmul/matmul_host.h"

// Shapes were checked by the op's rule; Eigen's own checks cost much in small products.
#define EIGEN_NO_DEBUG
#include <algorithm>
#include <cstdint>
#include <dnnl.hpp>
#include <eigen3/Eigen/Core>
#include <memory>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/host_onednn.h"
#include "core/tensor/half.h"

namespace chorus {
namespace {

// Each block of rows is one product whatever the partition, since the order in which libraries add
// depends on a product's shape. Larger blocks pack the right factor less often.
constexpr int64_t kRowBlock = 256;

// Half types are widened in tiles of that many rows and columns of the right factor.
constexpr int64_t kTile = 256;

// Matrices of elements T in memory: C = op(A) op(B), of m x n with k products each.
template <typename T>
struct Product {
  int64_t m = 0, n = 0, k = 0;
  const T* a = nullptr;
  int64_t a_stride = 0;  // from row to row as they lie
  bool transpose_a = false;
  const T* b = nullptr;
  int64_t b_stride = 0;
  bool transpose_b = false;
  T* c = nullptr;
  int64_t c_stride = 0;
};

// `add`: to what stands in C.
absl::Status Sgemm(const Product<float>& p, bool add) {
  UseOneThread();
  const dnnl::status status =
      dnnl::sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', p.m, p.n, p.k, 1, p.a,
                  p.a_stride, p.b, p.b_stride, add ? 1.0f : 0.0f, p.c, p.c_stride);
  if (status == dnnl::status::success) return absl::OkStatus();
  const bool memory = status == dnnl::status::out_of_memory;
  return MakeError(memory ? Reason::kOutOfMemory : Reason::kInternal,
                   absl::StrCat("matmul: oneDNN's sgemm of ", p.m, "x", p.n, "x", p.k,
                                " answers with status ", static_cast<int>(status)));
}

absl::Status Multiply(const Product<float>& p, float*) { return Sgemm(p, false); }

// Eigen copies up to as many rows of the right factor as its L1 cache has room for, of all columns
// that it is given: so many make 4 MiB at most, whatever there are.
constexpr int64_t kColumns = 256;

template <typename T>
void MultiplyByEigen(const Product<T>& p) {
  using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using ConstMap = Eigen::Map<const Matrix, Eigen::Unaligned, Eigen::OuterStride<>>;
  Eigen::Map<Matrix, Eigen::Unaligned, Eigen::OuterStride<>> c(p.c, p.m, p.n,
                                                               Eigen::OuterStride<>(p.c_stride));
  const auto multiply = [&](const auto& a) {
    if (p.transpose_b) {
      c.noalias() = a * ConstMap(p.b, p.n, p.k, Eigen::OuterStride<>(p.b_stride)).transpose();
    } else {
      c.noalias() = a * ConstMap(p.b, p.k, p.n, Eigen::OuterStride<>(p.b_stride));
    }
  };
  if (p.transpose_a) {
    multiply(ConstMap(p.a, p.k, p.m, Eigen::OuterStride<>(p.a_stride)).transpose());
  } else {
    multiply(ConstMap(p.a, p.m, p.k, Eigen::OuterStride<>(p.a_stride)));
  }
}

// f64, and integers as unsigned, so that they wrap.
template <typename T>
absl::Status Multiply(const Product<T>& whole, float*) {
  for (int64_t column = 0; column < whole.n; column += kColumns) {
    Product<T> part = whole;
    part.n = std::min(kColumns, whole.n - column);
    part.b += whole.transpose_b ? column * whole.b_stride : column;
    part.c += column;
    MultiplyByEigen(part);
  }
  return absl::OkStatus();
}

// A part of a matrix of half type, as floats without gaps. `row` and `column` are those of op(x).
template <typename T>
void Widen(const T* x, int64_t stride, bool transposed, int64_t row, int64_t column, int64_t rows,
           int64_t columns, float* tile) {
  if (transposed) {
    std::swap(row, column);
    std::swap(rows, columns);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const T* const from = x + (row + i) * stride + column;
    for (int64_t j = 0; j < columns; ++j) tile[i * columns + j] = from[j];
  }
}

// The tiles of a product of half types: of the left factor, the right one and the sums.
struct Tiles {
  Tiles(int64_t m, int64_t n, int64_t k)
      : columns(std::min(n, kTile)), depth(std::min(k, kTile)), a(m * depth), b(depth * columns) {
    floats = a + b + m * columns;
  }
  int64_t columns;
  int64_t depth;
  int64_t a;  // floats
  int64_t b;
  int64_t floats;  // of all three
};

// Sums stay in floats until they are whole. `tiles` is room for Tiles.
template <typename T>
absl::Status MultiplyWide(const Product<T>& p, float* tiles) {
  const Tiles sizes(p.m, p.n, p.k);
  const int64_t columns = sizes.columns;
  const int64_t depth = sizes.depth;
  float* const a = tiles;
  float* const b = a + sizes.a;
  float* const c = b + sizes.b;
  Product<float> tile;
  tile.m = p.m;
  tile.a = a;
  tile.transpose_a = p.transpose_a;
  tile.b = b;
  tile.transpose_b = p.transpose_b;
  tile.c = c;
  for (int64_t column = 0; column < p.n; column += columns) {
    tile.n = tile.c_stride = std::min(columns, p.n - column);
    for (int64_t deep = 0; deep < p.k; deep += depth) {
      tile.k = std::min(depth, p.k - deep);
      Widen(p.a, p.a_stride, p.transpose_a, 0, deep, p.m, tile.k, a);
      Widen(p.b, p.b_stride, p.transpose_b, deep, column, tile.k, tile.n, b);
      tile.a_stride = p.transpose_a ? p.m : tile.k;
      tile.b_stride = p.transpose_b ? tile.k : tile.n;
      CHORUS_RETURN_IF_ERROR(Sgemm(tile, /*add=*/deep > 0));
    }
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t j = 0; j < tile.n; ++j) {
        p.c[i * p.c_stride + column + j] = static_cast<T>(c[i * tile.n + j]);
      }
    }
  }
  return absl::OkStatus();
}
absl::Status Multiply(const Product<F16>& p, float* tiles) { return MultiplyWide(p, tiles); }
absl::Status Multiply(const Product<BF16>& p, float* tiles) { return MultiplyWide(p, tiles); }

// The shape of each product and where its parts begin.
struct MatmulShape {
  int64_t batch = 1;
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false;

  int64_t blocks() const { return (m + kRowBlock - 1) / kRowBlock; }
  int64_t products() const { return n == 0 ? 0 : batch * blocks(); }
};

// Half types need tiles for each unit: this many give every processor work, and are 48 MiB at most.
constexpr int64_t kMostUnitsWithTiles = 64;

// How a kernel for T is cut: units of some products each, in their order, with tiles of their own.
template <typename T>
struct Cut {
  static constexpr bool kHasTiles = std::is_same<T, F16>::value || std::is_same<T, BF16>::value;

  explicit Cut(const MatmulShape& shape) : units(shape.products()) {
    if (!kHasTiles || units == 0 || shape.k == 0) return;
    products_per_unit = (units + kMostUnitsWithTiles - 1) / kMostUnitsWithTiles;
    units = (units + products_per_unit - 1) / products_per_unit;
    constexpr int64_t kAligned = 64 / sizeof(float);
    const int64_t floats = Tiles(std::min(shape.m, kRowBlock), shape.n, shape.k).floats;
    tile_floats = (floats + kAligned - 1) / kAligned * kAligned;
  }
  int64_t workspace_bytes() const { return units * tile_floats * int64_t{sizeof(float)}; }

  int64_t units;
  int64_t products_per_unit = 1;
  int64_t tile_floats = 0;  // of a unit
};

template <typename T>
class Matmul : public HostKernel {
 public:
  explicit Matmul(const MatmulShape& shape) : Matmul(shape, Cut<T>(shape)) {
    if (!std::is_integral<T>::value && !std::is_same<T, double>::value) PrepareSgemm();
  }

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    for (int64_t unit = begin; unit < end; ++unit) {
      auto* const tiles =
          reinterpret_cast<float*>(buffers.workspace.data()) + unit * cut_.tile_floats;
      const int64_t first = unit * cut_.products_per_unit;
      const int64_t last = std::min(first + cut_.products_per_unit, shape_.products());
      for (int64_t p = first; p < last; ++p) CHORUS_RETURN_IF_ERROR(RunProduct(buffers, p, tiles));
    }
    return absl::OkStatus();
  }

 private:
  Matmul(const MatmulShape& shape, const Cut<T>& cut)
      : HostKernel(cut.units, CostOf(shape) * cut.products_per_unit, cut.workspace_bytes()),
        shape_(shape),
        cut_(cut) {}

  absl::Status RunProduct(const HostBuffers& buffers, int64_t index, float* tiles) const {
    const MatmulShape& s = shape_;
    const int64_t matrix = index / s.blocks();
    const int64_t row = index % s.blocks() * kRowBlock;
    Product<T> product;
    product.m = std::min(kRowBlock, s.m - row);
    product.n = s.n;
    product.k = s.k;
    product.c = static_cast<T*>(buffers.outputs[0]) + (matrix * s.m + row) * s.n;
    product.c_stride = s.n;
    if (s.k == 0) {
      std::fill_n(product.c, product.m * s.n, T{});
      return absl::OkStatus();
    }
    product.transpose_a = s.transpose_a;
    product.a_stride = s.transpose_a ? s.m : s.k;
    product.a = static_cast<const T*>(buffers.inputs[0]) + matrix * s.m * s.k +
                (s.transpose_a ? row : row * s.k);
    product.transpose_b = s.transpose_b;
    product.b_stride = s.transpose_b ? s.k : s.n;
    product.b = static_cast<const T*>(buffers.inputs[1]) + matrix * s.k * s.n;
    return Multiply(product, tiles);
  }

  // Of one product: its call, what it writes, and its sums. sgemm does four multiply-adds and more
  // in the time that others take for one.
  static int64_t CostOf(const MatmulShape& shape) {
    constexpr int64_t kCall = 1024;
    const int64_t elements = std::min(shape.m, kRowBlock) * shape.n;
    const int64_t sums = elements * shape.k / (std::is_same<T, float>::value ? 4 : 1);
    return kCall + elements * int64_t{sizeof(T)} + sums;
  }

  const MatmulShape shape_;
  const Cut<T> cut_;
};

HostKernelOrError Make(const NodeView& node, absl::Span<const TensorType> outputs) {
  const TensorType& c = outputs[0];
  const size_t batch = c.dims.size() - 2;
  MatmulShape shape;
  for (size_t d = 0; d < batch; ++d) shape.batch *= c.dims[d].size;
  shape.transpose_a = IntAttribute(node.attributes, "transpose_a") != 0;
  shape.transpose_b = IntAttribute(node.attributes, "transpose_b") != 0;
  shape.m = c.dims[batch].size;
  shape.n = c.dims[batch + 1].size;
  shape.k = node.input(0).dims[shape.transpose_a ? batch : batch + 1].size;
  switch (c.dtype) {
    case DType::kF16:
      return std::make_unique<Matmul<F16>>(shape);
    case DType::kBF16:
      return std::make_unique<Matmul<BF16>>(shape);
    case DType::kF32:
      return std::make_unique<Matmul<float>>(shape);
    case DType::kF64:
      return std::make_unique<Matmul<double>>(shape);
    case DType::kI64:
      return std::make_unique<Matmul<uint64_t>>(shape);
    default:
      return NoHostKernel(node, outputs);
  }
}

constexpr HostKernelEntry kEntries[] = {{"matmul", Make}};

}  // namespace

absl::Span<const HostKernelEntry> MatmulHostKernels() { return kEntries; }

}  // namespace chorus
