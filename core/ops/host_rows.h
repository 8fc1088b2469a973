// A tensor as rows along one axis, for kernels.
//
// Threads: plain values. Ownership: none. Errors: none: the axis was checked by the op's rule.
#ifndef CHORUS_CORE_OPS_HOST_ROWS_H_
#define CHORUS_CORE_OPS_HOST_ROWS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/ops/host_arithmetic.h"
#include "core/tensor/type.h"

namespace chorus {

// A row is what one index of all other dimensions selects: `size` elements, `stride` apart. Rows
// are numbered in the order of those other dimensions; as many as `stride` stand side by side.
struct HostRows {
  // `axis` is one of `type`'s dimensions.
  HostRows(const TensorType& type, int64_t axis) : size(type.dims[axis].size) {
    for (int64_t d = 0; d < axis; ++d) outer *= type.dims[d].size;
    for (size_t d = static_cast<size_t>(axis) + 1; d < type.dims.size(); ++d) {
      stride *= type.dims[d].size;
    }
  }

  int64_t count() const { return outer * stride; }
  // Where a row's first element stands.
  int64_t FirstOf(int64_t row) const { return row / stride * stride * size + row % stride; }
  // How many of the rows [row, end) stand side by side from `row` on.
  int64_t LanesAt(int64_t row, int64_t end) const {
    return std::min(stride - row % stride, end - row);
  }

  int64_t outer = 1;
  int64_t size = 0;
  int64_t stride = 1;
};

// The largest of `size` elements that stand side by side, but for NaN; -infinity where there is
// none.
template <typename T>
Arithmetic<T> MostOf(const T* x, int64_t size) {
  using A = Arithmetic<T>;
  // As many as vector registers hold.
  constexpr int kLanes = 16;
  A most[kLanes];
  std::fill_n(most, kLanes, -std::numeric_limits<A>::infinity());
  const auto take = [&](int lane, T element) {
    const A a = static_cast<A>(element);
    most[lane] = a > most[lane] ? a : most[lane];
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) take(lane, x[i + lane]);
  }
  for (int lane = 0; i < size; ++i, ++lane) take(lane, x[i]);
  return *std::max_element(most, most + kLanes);
}

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_HOST_ROWS_H_
