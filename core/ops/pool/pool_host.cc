#include "core/ops/pool/pool_host.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/long_sums.h"
#include "core/ops/pool/pool.h"

namespace chorus {
namespace {

// Columns that are computed side by side.
constexpr int64_t kColumns = 128;

// Calls f(tap, x, columns, count) for taps over a row of y, from column `first` on: x is where the
// first of `count` columns finds its element in the plane of x; the next is a stride further.
template <typename F>
void ForEachTap(const PoolSizes& s, int64_t row, int64_t first, int64_t columns, const F& f) {
  const Window& over_h = s.windows[0];
  const Window& over_w = s.windows[1];
  for (int64_t i = 0; i < over_h.kernel; ++i) {
    const int64_t x_row = over_h.ElementAt(row, i);
    if (x_row < 0 || x_row >= s.x[0]) continue;
    for (int64_t j = 0; j < over_w.kernel; ++j) {
      const Window::Range range = over_w.PlacesOfTap(j, s.x[1]);
      const int64_t begin = std::max(range.begin, first);
      const int64_t end = std::min(range.end, first + columns);
      if (begin >= end) continue;
      f(x_row * s.x[1] + over_w.ElementAt(begin, j), begin - first, end - begin);
    }
  }
}

int64_t Taps(const PoolSizes& s) { return s.windows[0].kernel * s.windows[1].kernel; }

// Of a row of `columns` elements that have `bytes` each, and look at so many others each.
int64_t CostOfRow(int64_t columns, int64_t looks, int64_t bytes) {
  // No number holds what the largest windows could cost.
  constexpr double kMost = 1e15;
  const double all = static_cast<double>(columns) * (static_cast<double>(looks) + bytes);
  return static_cast<int64_t>(std::min(all, kMost));
}

// How many elements are under a window at a place.
int64_t ElementsUnder(const Window& window, int64_t place, int64_t size) {
  const int64_t begin = window.ElementAt(place, 0);
  return std::min(begin + window.kernel, size) - std::max<int64_t>(begin, 0);
}

// What a sum is divided by.
class Divisor {
 public:
  Divisor(const PoolSizes& s, bool count_padding) : s_(s), count_padding_(count_padding) {}
  int64_t At(int64_t row, int64_t column) const {
    if (count_padding_) return Taps(s_);
    return ElementsUnder(s_.windows[0], row, s_.x[0]) *
           ElementsUnder(s_.windows[1], column, s_.x[1]);
  }

 private:
  const PoolSizes s_;
  const bool count_padding_;
};

template <typename T>
class AvgPool : public HostKernel {
 public:
  AvgPool(const PoolSizes& s, bool count_padding)
      : HostKernel(s.planes * s.y[0], CostOfRow(s.y[1], Taps(s), 2 * sizeof(T))),
        s_(s),
        divisor_(s, count_padding) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    for (int64_t unit = begin; unit < end; ++unit) {
      const T* const x =
          static_cast<const T*>(buffers.inputs[0]) + unit / s_.y[0] * s_.x[0] * s_.x[1];
      T* const y = static_cast<T*>(buffers.outputs[0]) + unit * s_.y[1];
      const int64_t row = unit % s_.y[0];
      const int64_t step = s_.windows[1].stride;
      for (int64_t first = 0; first < s_.y[1]; first += kColumns) {
        const int64_t columns = std::min(kColumns, s_.y[1] - first);
        LongSums<A, kColumns> sums;
        ForEachTap(s_, row, first, columns, [&](int64_t from, int64_t to, int64_t count) {
          A* const sum = sums.Next() + to;
          for (int64_t k = 0; k < count; ++k) sum[k] += static_cast<A>(x[from + k * step]);
        });
        for (int64_t k = 0; k < columns; ++k) {
          y[first + k] = static_cast<T>(sums.At(k) / static_cast<A>(divisor_.At(row, first + k)));
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  using A = Arithmetic<T>;
  const PoolSizes s_;
  const Divisor divisor_;
};

template <typename T>
class AvgPoolGrad : public HostKernel {
 public:
  AvgPoolGrad(const PoolSizes& s, bool count_padding)
      : HostKernel(s.planes * s.x[0], CostOfRow(s.x[1], Taps(s), 2 * sizeof(T))),
        s_(s),
        divisor_(s, count_padding) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    for (int64_t unit = begin; unit < end; ++unit) {
      const T* const y =
          static_cast<const T*>(buffers.inputs[0]) + unit / s_.x[0] * s_.y[0] * s_.y[1];
      T* const x = static_cast<T*>(buffers.outputs[0]) + unit * s_.x[1];
      const Window::Range rows = s_.windows[0].PlacesReaching(unit % s_.x[0], s_.x[0]);
      for (int64_t k = 0; k < s_.x[1]; ++k) {
        const Window::Range columns = s_.windows[1].PlacesReaching(k, s_.x[1]);
        LongSums<A> sum;
        for (int64_t i = rows.begin; i < rows.end; ++i) {
          for (int64_t j = columns.begin; j < columns.end; ++j) {
            *sum.Next() += static_cast<A>(y[i * s_.y[1] + j]) / static_cast<A>(divisor_.At(i, j));
          }
        }
        x[k] = static_cast<T>(sum.At(0));
      }
    }
    return absl::OkStatus();
  }

 private:
  using A = Arithmetic<T>;
  const PoolSizes s_;
  const Divisor divisor_;
};

template <typename T>
class MaxPoolIndex : public HostKernel {
 public:
  explicit MaxPoolIndex(const PoolSizes& s)
      : HostKernel(s.planes * s.y[0], CostOfRow(s.y[1], Taps(s), sizeof(T) + sizeof(int32_t))),
        s_(s) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    for (int64_t unit = begin; unit < end; ++unit) {
      const T* const x =
          static_cast<const T*>(buffers.inputs[0]) + unit / s_.y[0] * s_.x[0] * s_.x[1];
      int32_t* const y = static_cast<int32_t*>(buffers.outputs[0]) + unit * s_.y[1];
      const int64_t step = s_.windows[1].stride;
      for (int64_t first = 0; first < s_.y[1]; first += kColumns) {
        const int64_t columns = std::min(kColumns, s_.y[1] - first);
        W most[kColumns] = {};
        int32_t at[kColumns];
        std::fill_n(at, columns, -1);
        ForEachTap(
            s_, unit % s_.y[0], first, columns, [&](int64_t from, int64_t to, int64_t count) {
              for (int64_t k = 0; k < count; ++k) {
                const auto position = static_cast<int32_t>(from + k * step);
                const W element = static_cast<W>(x[position]);
                const W other = most[to + k];
                // A NaN is neither, and what stands there stays if it is one.
                const bool wins = (at[to + k] < 0) | (!(element <= other) & (other == other));
                most[to + k] = wins ? element : other;
                at[to + k] = wins ? position : at[to + k];
              }
            });
        std::copy_n(at, columns, y + first);
      }
    }
    return absl::OkStatus();
  }

 private:
  // Integers as they are: they are only compared.
  using W = typename std::conditional<std::is_integral<T>::value, T, Arithmetic<T>>::type;
  const PoolSizes s_;
};

// Whether a place's window reaches from its first tap to beyond an element.
bool Reaches(const Window& window, int64_t place, int64_t element) {
  const int64_t first = window.ElementAt(place, 0);
  return element >= first && element < first + window.extent();
}

// T has the elements' width.
template <typename T>
class MaxPoolTake : public HostKernel {
 public:
  explicit MaxPoolTake(const PoolSizes& s)
      : HostKernel(s.planes * s.y[0], s.y[1] * (kCost + int64_t{2 * sizeof(T) + sizeof(int32_t)})),
        s_(s) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const int64_t plane = s_.x[0] * s_.x[1];
    for (int64_t unit = begin; unit < end; ++unit) {
      const T* const x = static_cast<const T*>(buffers.inputs[0]) + unit / s_.y[0] * plane;
      const int32_t* const index = static_cast<const int32_t*>(buffers.inputs[1]) + unit * s_.y[1];
      T* const y = static_cast<T*>(buffers.outputs[0]) + unit * s_.y[1];
      for (int64_t k = 0; k < s_.y[1]; ++k) {
        const int64_t at = index[k];
        const bool is_there = at >= 0 && at < plane &&
                              Reaches(s_.windows[0], unit % s_.y[0], at / s_.x[1]) &&
                              Reaches(s_.windows[1], k, at % s_.x[1]);
        y[k] = is_there ? x[at] : T{};
      }
    }
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kCost = 8;
  const PoolSizes s_;
};

template <typename T>
class MaxPoolGrad : public HostKernel {
 public:
  explicit MaxPoolGrad(const PoolSizes& s) : HostKernel(s.planes * s.x[0], CostOf(s)), s_(s) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    for (int64_t unit = begin; unit < end;) {
      const int64_t places = unit / s_.x[0] * s_.y[0] * s_.y[1];
      const T* const g = static_cast<const T*>(buffers.inputs[0]) + places;
      const int32_t* const index = static_cast<const int32_t*>(buffers.inputs[1]) + places;
      T* const x = static_cast<T*>(buffers.outputs[0]) + unit * s_.x[1];
      const int64_t row = unit % s_.x[0];
      Window::Range rows = {row, row + 1};
      if constexpr (std::is_same<A, T>::value) {
        rows.end = std::min(s_.x[0], row + end - unit);
        std::fill_n(x, (rows.end - row) * s_.x[1], T{});
        Add(g, index, rows, {0, s_.x[1]}, x);
      } else {
        for (int64_t first = 0; first < s_.x[1]; first += kColumns) {
          const int64_t columns = std::min(kColumns, s_.x[1] - first);
          A sums[kColumns] = {};
          Add(g, index, rows, {first, first + columns}, sums);
          for (int64_t k = 0; k < columns; ++k) x[first + k] = static_cast<T>(sums[k]);
        }
      }
      unit += rows.end - row;
    }
    return absl::OkStatus();
  }

 private:
  using A = Arithmetic<T>;
  static int64_t CostOf(const PoolSizes& s) {
    constexpr int64_t kCost = 8;  // of a place that is looked at
    const int64_t bytes = s.x[1] * int64_t{2 * sizeof(T)};
    if constexpr (std::is_same<A, T>::value) {
      const int64_t share = (s.y[0] + s.x[0] - 1) / s.x[0];  // of the rows of places
      return bytes + CostOfRow(s.y[1], share * kCost, 0);
    } else {
      // A row is added up by itself, some columns at a time, from all places that reach these.
      const auto reach = [&s](size_t d, int64_t elements) {
        const Window& window = s.windows[d];
        return std::min(s.y[d], (window.extent() + elements) / window.stride + 1);
      };
      const int64_t blocks = (s.x[1] + kColumns - 1) / kColumns;
      return bytes + CostOfRow(reach(0, 1) * blocks, reach(1, kColumns) * kCost, 0);
    }
  }

  // To these rows and columns of x, in their order, what the places have for them, in theirs.
  void Add(const T* g, const int32_t* index, Window::Range rows, Window::Range columns,
           A* sums) const {
    const auto places = [&](size_t d, Window::Range elements) {
      const Window& window = s_.windows[d];
      return Window::Range{window.PlacesReaching(elements.begin, s_.x[d]).begin,
                           window.PlacesReaching(elements.end - 1, s_.x[d]).end};
    };
    const Window::Range down = places(0, rows);
    const Window::Range across = places(1, columns);
    for (int64_t i = down.begin; i < down.end; ++i) {
      for (int64_t j = across.begin; j < across.end; ++j) {
        const int64_t at = index[i * s_.y[1] + j];
        if (at < rows.begin * s_.x[1] || at >= rows.end * s_.x[1]) continue;
        const int64_t row = at / s_.x[1];
        const int64_t column = at - row * s_.x[1];
        if (column < columns.begin || column >= columns.end || !Reaches(s_.windows[0], i, row) ||
            !Reaches(s_.windows[1], j, column)) {
          continue;
        }
        sums[(row - rows.begin) * (columns.end - columns.begin) + column - columns.begin] +=
            static_cast<A>(g[i * s_.y[1] + j]);
      }
    }
  }

  const PoolSizes s_;
};

template <template <typename> class Kernel>
HostKernelOrError MakeAvg(const NodeView& node, absl::Span<const TensorType> outputs,
                          const TensorType& x) {
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, x));
  const bool count_padding = IntAttribute(node.attributes, "count_padding") != 0;
  return VisitFloating(
      x.dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Kernel<decltype(t)>>(sizes, count_padding);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

HostKernelOrError MakeAvgPool(const NodeView& node, absl::Span<const TensorType> outputs) {
  return MakeAvg<AvgPool>(node, outputs, node.input(0));
}
HostKernelOrError MakeAvgPoolGrad(const NodeView& node, absl::Span<const TensorType> outputs) {
  return MakeAvg<AvgPoolGrad>(node, outputs, outputs[0]);
}
HostKernelOrError MakeMaxPoolIndex(const NodeView& node, absl::Span<const TensorType> outputs) {
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, node.input(0)));
  return VisitNumbers(
      node.input(0).dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<MaxPoolIndex<decltype(t)>>(sizes);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

HostKernelOrError MakeMaxPoolTake(const NodeView& node, absl::Span<const TensorType> outputs) {
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, node.input(0)));
  return VisitWidth(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<MaxPoolTake<decltype(t)>>(sizes);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}
HostKernelOrError MakeMaxPoolGrad(const NodeView& node, absl::Span<const TensorType> outputs) {
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, outputs[0]));
  return VisitNumbers(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<MaxPoolGrad<decltype(t)>>(sizes);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {{"avg_pool", MakeAvgPool},
                                        {"avg_pool_grad", MakeAvgPoolGrad},
                                        {"max_pool_grad", MakeMaxPoolGrad},
                                        {"max_pool_index", MakeMaxPoolIndex},
                                        {"max_pool_take", MakeMaxPoolTake}};

}  // namespace

absl::Span<const HostKernelEntry> PoolHostKernels() { return kEntries; }

}  // namespace chorus
