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
#include "core/tensor/half.h"

// Of the OpenMP library that oneDNN is built with; clang has a header of another one.
extern "C" void omp_set_num_threads(int);

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
  // The setting is the thread's own.
  thread_local const bool one_thread = [] {
    omp_set_num_threads(1);
    return true;
  }();
  static_cast<void>(one_thread);
  const dnnl::status status =
      dnnl::sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', p.m, p.n, p.k, 1, p.a,
                  p.a_stride, p.b, p.b_stride, add ? 1.0f : 0.0f, p.c, p.c_stride);
  if (status == dnnl::status::success) return absl::OkStatus();
  const bool memory = status == dnnl::status::out_of_memory;
  return MakeError(memory ? Reason::kOutOfMemory : Reason::kInternal,
                   absl::StrCat("matmul: oneDNN's sgemm of ", p.m, "x", p.n, "x", p.k,
                                " answers with status ", static_cast<int>(status)));
}

// oneDNN writes its code in the first call, which takes 30 ms: better here than in a run.
void PrepareSgemm() {
  static const bool prepared = [] {
    const float zeros[16 * 16] = {};
    float c[16 * 16];
    Product<float> p;
    p.m = p.n = p.k = p.a_stride = p.b_stride = p.c_stride = 16;
    p.a = p.b = zeros;
    p.c = c;
    return Sgemm(p, false).ok();
  }();
  static_cast<void>(prepared);
}

absl::Status Multiply(const Product<float>& p) { return Sgemm(p, false); }

// f64, and integers as unsigned, so that they wrap.
template <typename T>
absl::Status Multiply(const Product<T>& p) {
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

// Sums stay in floats until they are whole.
template <typename T>
absl::Status MultiplyWide(const Product<T>& p) {
  const int64_t columns = std::min(p.n, kTile);
  const int64_t depth = std::min(p.k, kTile);
  const std::unique_ptr<float[]> memory(
      new float[static_cast<size_t>(p.m * depth + depth * columns + p.m * columns)]);
  float* const a = memory.get();
  float* const b = a + p.m * depth;
  float* const c = b + depth * columns;
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
absl::Status Multiply(const Product<F16>& p) { return MultiplyWide(p); }
absl::Status Multiply(const Product<BF16>& p) { return MultiplyWide(p); }

// The shape of each product and where its parts begin.
struct Shape {
  int64_t batch = 1;
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false;

  int64_t blocks() const { return (m + kRowBlock - 1) / kRowBlock; }
};

template <typename T>
class Matmul : public HostKernel {
 public:
  explicit Matmul(const Shape& shape)
      : HostKernel(shape.n == 0 ? 0 : shape.batch * shape.blocks(), CostOf(shape)), shape_(shape) {
    if (!std::is_integral<T>::value && !std::is_same<T, double>::value) PrepareSgemm();
  }

  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t begin, int64_t end) const override {
    const Shape& s = shape_;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t index = unit / s.blocks();
      const int64_t row = unit % s.blocks() * kRowBlock;
      Product<T> product;
      product.m = std::min(kRowBlock, s.m - row);
      product.n = s.n;
      product.k = s.k;
      product.c = static_cast<T*>(outputs[0]) + (index * s.m + row) * s.n;
      product.c_stride = s.n;
      if (s.k == 0) {
        std::fill_n(product.c, product.m * s.n, T{});
        continue;
      }
      product.transpose_a = s.transpose_a;
      product.a_stride = s.transpose_a ? s.m : s.k;
      product.a =
          static_cast<const T*>(inputs[0]) + index * s.m * s.k + (s.transpose_a ? row : row * s.k);
      product.transpose_b = s.transpose_b;
      product.b_stride = s.transpose_b ? s.k : s.n;
      product.b = static_cast<const T*>(inputs[1]) + index * s.k * s.n;
      CHORUS_RETURN_IF_ERROR(Multiply(product));
    }
    return absl::OkStatus();
  }

 private:
  // sgemm does four multiply-adds and more in the time that others take for one.
  static int64_t CostOf(const Shape& shape) {
    const int64_t products = std::min(shape.m, kRowBlock) * shape.n * shape.k;
    return std::is_same<T, float>::value ? products / 4 + 1 : products;
  }

  const Shape shape_;
};

absl::StatusOr<std::unique_ptr<HostKernel>> Make(const NodeView& node,
                                                 absl::Span<const TensorType> outputs) {
  const TensorType& c = outputs[0];
  const size_t batch = c.dims.size() - 2;
  Shape shape;
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
