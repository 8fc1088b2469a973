#include "core/ops/matmul/matmul_host.h"

// Shapes were checked by the op's rule; Eigen's own checks cost much in small products.
#define EIGEN_NO_DEBUG
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <eigen3/Eigen/Core>
#include <memory>

#include "core/base/error.h"

namespace chorus {
namespace {

// Each block of rows is one product whatever the partition, since the order in which Eigen adds
// depends on a product's shape. Larger blocks pack the right factor less often.
constexpr int64_t kRowBlock = 128;

// Computes in T: integers in unsigned, so that they wrap.
template <typename T>
class Matmul : public HostKernel {
 public:
  Matmul(int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b)
      : HostKernel(n == 0 ? 0 : (m + kRowBlock - 1) / kRowBlock, std::min(m, kRowBlock) * n * k),
        m_(m),
        n_(n),
        k_(k),
        transpose_a_(transpose_a),
        transpose_b_(transpose_b) {}

  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t begin, int64_t end) const override {
    T* const out = static_cast<T*>(outputs[0]);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block * kRowBlock;
      const int64_t rows = std::min(kRowBlock, m_ - row);
      if (k_ == 0) {
        std::memset(out + row * n_, 0, static_cast<size_t>(rows * n_) * sizeof(T));
        continue;
      }
      const T* const a = static_cast<const T*>(inputs[0]);
      Map result(out + row * n_, rows, n_);
      if (transpose_a_) {
        Multiply(ConstMap(a, k_, m_).middleCols(row, rows).transpose(), inputs[1], &result);
      } else {
        Multiply(ConstMap(a + row * k_, rows, k_), inputs[1], &result);
      }
    }
    return absl::OkStatus();
  }

 private:
  using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Map = Eigen::Map<Matrix>;
  using ConstMap = Eigen::Map<const Matrix>;

  template <typename Left>
  void Multiply(const Left& left, const void* input, Map* result) const {
    const T* const b = static_cast<const T*>(input);
    if (transpose_b_) {
      result->noalias() = left * ConstMap(b, n_, k_).transpose();
    } else {
      result->noalias() = left * ConstMap(b, k_, n_);
    }
  }

  const int64_t m_, n_, k_;
  const bool transpose_a_, transpose_b_;
};

absl::StatusOr<std::unique_ptr<HostKernel>> Make(const NodeView& node,
                                                 absl::Span<const TensorType> outputs) {
  const bool ta = IntAttribute(node.attributes, "transpose_a") != 0;
  const bool tb = IntAttribute(node.attributes, "transpose_b") != 0;
  const int64_t m = outputs[0].dims[0].size;
  const int64_t n = outputs[0].dims[1].size;
  const int64_t k = node.input(0).dims[ta ? 0 : 1].size;
  switch (outputs[0].dtype) {
    case DType::kF32:
      return std::make_unique<Matmul<float>>(m, n, k, ta, tb);
    case DType::kF64:
      return std::make_unique<Matmul<double>>(m, n, k, ta, tb);
    case DType::kI64:
      return std::make_unique<Matmul<uint64_t>>(m, n, k, ta, tb);
    default:
      return NoHostKernel(node, outputs);
  }
}

constexpr HostKernelEntry kEntries[] = {{"matmul", Make}};

}  // namespace

absl::Span<const HostKernelEntry> MatmulHostKernels() { return kEntries; }

}  // namespace chorus
