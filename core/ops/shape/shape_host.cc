#include "core/ops/shape/shape_host.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"

namespace chorus {
namespace {

class Copy : public HostKernel {
 public:
  explicit Copy(const TensorType& type)
      : HostKernel(type.num_elements(), 2 * DTypeBytes(type.dtype)),
        width_(DTypeBytes(type.dtype)) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    if (buffers.inputs[0] == buffers.outputs[0]) return absl::OkStatus();
    std::memcpy(static_cast<char*>(buffers.outputs[0]) + begin * width_,
                static_cast<const char*>(buffers.inputs[0]) + begin * width_,
                static_cast<size_t>((end - begin) * width_));
    return absl::OkStatus();
  }

 private:
  const int64_t width_;
};

// T has the width of an element; what it holds does not matter.
template <typename T>
class Transpose : public HostKernel {
 public:
  Transpose(const TensorType& input, const std::vector<int64_t>& perm)
      : HostKernel(input.num_elements(), CostOf(input, perm)) {
    const std::vector<int64_t> sizes = input.sizes();
    const std::vector<int64_t> strides = RowMajorStrides(sizes);
    for (size_t i = 0; i < perm.size(); ++i) {
      const int64_t size = sizes[perm[i]];
      const int64_t stride = strides[perm[i]];
      if (size == 1) continue;
      // Dimensions that stay neighbours are one.
      if (!loops_.empty() && loops_.back().stride == stride * size) {
        loops_.back() = {loops_.back().size * size, stride};
      } else {
        loops_.push_back({size, stride});
      }
    }
    if (!loops_.empty()) {
      inner_ = loops_.back();
      loops_.pop_back();
    }
    std::reverse(loops_.begin(), loops_.end());
  }

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const in = static_cast<const T*>(buffers.inputs[0]);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    while (begin < end) {
      const int64_t column = begin % inner_.size;
      const int64_t columns = std::min(inner_.size - column, end - begin);
      int64_t offset = column * inner_.stride;
      int64_t row = begin / inner_.size;
      for (const Loop& loop : loops_) {
        offset += row % loop.size * loop.stride;
        row /= loop.size;
      }
      const T* const x = in + offset;
      for (int64_t i = 0; i < columns; ++i) out[begin + i] = x[i * inner_.stride];
      begin += columns;
    }
    return absl::OkStatus();
  }

 private:
  struct Loop {
    int64_t size;
    int64_t stride;  // in the input, in elements
  };
  // Rows are found by loops, which may be fewer.
  static int64_t CostOf(const TensorType& input, const std::vector<int64_t>& perm) {
    size_t loops = 0;
    int64_t row = 1;
    for (const int64_t axis : perm) {
      if (input.dims[axis].size == 1) continue;
      row = input.dims[axis].size;
      ++loops;
    }
    const int64_t of_row = loops < 2 ? 0 : CostOfLoops(loops - 1);
    return int64_t{2 * sizeof(T)} + of_row / std::max<int64_t>(row, 1);
  }

  Loop inner_ = {1, 1};
  std::vector<Loop> loops_;  // of the result's other dimensions, last first
};

HostKernelOrError MakeCopy(const NodeView&, absl::Span<const TensorType> outputs) {
  return std::make_unique<Copy>(outputs[0]);
}

HostKernelOrError MakeTranspose(const NodeView& node, absl::Span<const TensorType> outputs) {
  const std::vector<int64_t> perm = IntsAttribute(node.attributes, "perm");
  return VisitWidth(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Transpose<decltype(t)>>(node.input(0), perm);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {
    {"copy", MakeCopy}, {"reshape", MakeCopy}, {"transpose", MakeTranspose}};

}  // namespace

absl::Span<const HostKernelEntry> ShapeHostKernels() { return kEntries; }

}  // namespace chorus
