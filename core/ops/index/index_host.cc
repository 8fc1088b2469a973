#include "core/ops/index/index_host.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_indices.h"
#include "core/ops/host_rows.h"

namespace chorus {
namespace {

// bool is a byte here.
template <typename T>
class OneHot : public HostKernel {
 public:
  OneHot(const NodeView& node, int64_t depth)
      : HostKernel(depth == 0 ? 0 : node.input(0).num_elements(), depth * int64_t{sizeof(T)} + 8),
        indices_(node, 0, depth) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    for (int64_t i = begin; i < end; ++i) {
      T* const out = static_cast<T*>(buffers.outputs[0]) + i * indices_.limit();
      std::fill_n(out, indices_.limit(), T{});
      const int64_t index = indices_.At(buffers.inputs[0], i);
      if (indices_.IsIgnored(index)) continue;
      if (!indices_.IsWithin(index)) return indices_.OutOfRange(i, index);
      out[index] = static_cast<T>(1.0f);
    }
    return absl::OkStatus();
  }

 private:
  const HostIndices indices_;
};

// take and take_along, of elements of one width. `x` are x's rows along the axis; the result has
// `count` elements in each.
template <typename T>
class Take : public HostKernel {
 public:
  Take(const NodeView& node, const HostRows& x, int64_t count, bool along)
      : HostKernel(x.stride == 0 ? 0 : x.outer * count, x.stride * int64_t{2 * sizeof(T)} + 8),
        x_(x),
        count_(count),
        along_(along),
        indices_(node, 1, x.size) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    for (int64_t unit = begin; unit < end; ++unit) {
      const T* const x =
          static_cast<const T*>(buffers.inputs[0]) + unit / count_ * x_.size * x_.stride;
      T* const out = static_cast<T*>(buffers.outputs[0]) + unit * x_.stride;
      if (!along_) {
        const int64_t position = unit % count_;
        const int64_t index = indices_.At(buffers.inputs[1], position);
        if (!indices_.IsWithin(index)) return indices_.OutOfRange(position, index);
        std::copy_n(x + index * x_.stride, x_.stride, out);
        continue;
      }
      for (int64_t column = 0; column < x_.stride; ++column) {
        const int64_t position = unit * x_.stride + column;
        const int64_t index = indices_.At(buffers.inputs[1], position);
        if (!indices_.IsWithin(index)) return indices_.OutOfRange(position, index);
        out[column] = x[index * x_.stride + column];
      }
    }
    return absl::OkStatus();
  }

 private:
  const HostRows x_;
  const int64_t count_;
  const bool along_;
  const HostIndices indices_;
};

// How a scatter_add is cut: units of some columns of the result's rows. Where sums are wider than
// the result a unit adds up as many rows at a time as there is room for, and looks at all updates
// each time: kSums of them on the stack; where that would be often, an eighth of the rows in
// memory.
struct ScatterCut {
  static constexpr int64_t kColumns = 64;
  static constexpr int64_t kSums = 1 << 14;
  static constexpr int64_t kMostPasses = 8;

  ScatterCut(const HostRows& out, bool wide)
      : blocks((out.stride + kColumns - 1) / kColumns),
        units(out.outer * blocks),
        columns(std::min(out.stride, kColumns)) {
    if (!wide || columns == 0 || out.size == 0) return;
    rows_at_once = kSums / columns;
    if (rows_at_once * kMostPasses < out.size) {
      rows_at_once = (out.size + kMostPasses - 1) / kMostPasses;
      sums_in_memory = rows_at_once * columns;
    }
    passes = (out.size + rows_at_once - 1) / rows_at_once;
  }

  int64_t blocks;  // of columns
  int64_t units;
  int64_t columns;           // of the widest block
  int64_t rows_at_once = 1;  // these three: of wide sums
  int64_t sums_in_memory = 0;
  int64_t passes = 1;
};

// scatter_add and scatter_add_along. `out` are the result's rows along the axis; `count` updates go
// to each. Integers are unsigned here.
template <typename T>
class ScatterAdd : public HostKernel {
 public:
  ScatterAdd(const NodeView& node, const HostRows& out, int64_t count, bool along)
      : ScatterAdd(node, out, count, along, ScatterCut(out, !std::is_same<A, T>::value)) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    constexpr int64_t kColumns = ScatterCut::kColumns;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t outer = unit / cut_.blocks;
      const int64_t column = unit % cut_.blocks * kColumns;
      const int64_t columns = std::min(kColumns, out_.stride - column);
      T* const out = static_cast<T*>(buffers.outputs[0]) + outer * out_.size * out_.stride + column;
      if constexpr (std::is_same<A, T>::value) {
        for (int64_t row = 0; row < out_.size; ++row) {
          std::fill_n(out + row * out_.stride, columns, T{});
        }
        CHORUS_RETURN_IF_ERROR(
            Add(buffers.inputs, outer, column, columns, 0, out_.size, out_.stride, out));
      } else {
        A on_stack[ScatterCut::kSums];
        A* const sums = cut_.sums_in_memory == 0 ? on_stack
                                                 : reinterpret_cast<A*>(buffers.workspace.data()) +
                                                       unit * cut_.sums_in_memory;
        int64_t row = 0;
        do {
          const int64_t rows = std::min(cut_.rows_at_once, out_.size - row);
          std::fill_n(sums, rows * columns, A{});
          CHORUS_RETURN_IF_ERROR(
              Add(buffers.inputs, outer, column, columns, row, rows, columns, sums));
          for (int64_t i = 0; i < rows; ++i) {
            for (int64_t j = 0; j < columns; ++j) {
              out[(row + i) * out_.stride + j] = static_cast<T>(sums[i * columns + j]);
            }
          }
          row += rows;
        } while (row < out_.size);
      }
    }
    return absl::OkStatus();
  }

 private:
  // What integers are computed in may be wider, but wraps to the same.
  using A = typename std::conditional<std::is_integral<T>::value, T, Arithmetic<T>>::type;

  ScatterAdd(const NodeView& node, const HostRows& out, int64_t count, bool along,
             const ScatterCut& cut)
      : HostKernel(cut.units,
                   (out.size + (1 + cut.passes) * count) * cut.columns * int64_t{sizeof(T)},
                   cut.units * cut.sums_in_memory * int64_t{sizeof(A)}),
        out_(out),
        count_(count),
        along_(along),
        indices_(node, 1, out.size),
        cut_(cut) {}

  // To rows [row, row + rows) of the result, those of the updates that go there, in their order.
  // `sums`: those rows, `stride` apart.
  absl::Status Add(absl::Span<const void* const> inputs, int64_t outer, int64_t column,
                   int64_t columns, int64_t row, int64_t rows, int64_t stride, A* sums) const {
    const T* const updates = static_cast<const T*>(inputs[0]);
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t from = (outer * count_ + i) * out_.stride + column;
      if (!along_) {
        const int64_t index = indices_.At(inputs[1], i);
        if (!indices_.IsWithin(index)) return indices_.OutOfRange(i, index);
        if (index < row || index >= row + rows) continue;
        A* const sum = sums + (index - row) * stride;
        for (int64_t j = 0; j < columns; ++j) sum[j] += static_cast<A>(updates[from + j]);
        continue;
      }
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t index = indices_.At(inputs[1], from + j);
        if (!indices_.IsWithin(index)) return indices_.OutOfRange(from + j, index);
        if (index < row || index >= row + rows) continue;
        sums[(index - row) * stride + j] += static_cast<A>(updates[from + j]);
      }
    }
    return absl::OkStatus();
  }

  const HostRows out_;
  const int64_t count_;
  const bool along_;
  const HostIndices indices_;
  const ScatterCut cut_;
};

template <typename T>
class Arg : public HostKernel {
 public:
  Arg(const HostRows& rows, bool largest)
      : HostKernel(rows.count(), rows.size * int64_t{sizeof(T)} + int64_t{sizeof(int64_t)}),
        rows_(rows),
        largest_(largest) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const in = static_cast<const T*>(buffers.inputs[0]);
    int64_t* const out = static_cast<int64_t*>(buffers.outputs[0]);
    for (int64_t lanes = 0; begin < end; begin += lanes) {
      lanes = std::min(rows_.LanesAt(begin, end), kLanes);
      const T* const first = in + rows_.FirstOf(begin);
      A best[kLanes];
      for (int64_t lane = 0; lane < lanes; ++lane) {
        best[lane] = static_cast<A>(first[lane]);
        out[begin + lane] = 0;
      }
      for (int64_t i = 1; i < rows_.size; ++i) {
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const A x = static_cast<A>(first[i * rows_.stride + lane]);
          if (!IsBetter(x, best[lane])) continue;
          best[lane] = x;
          out[begin + lane] = i;
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  using A = typename ComparedAs<T>::type;
  static constexpr int64_t kLanes = 64;

  bool IsBetter(A x, A best) const {
    if (best != best) return false;
    return x != x || (largest_ ? x > best : x < best);
  }

  const HostRows rows_;
  const bool largest_;
};

int64_t AxisOf(const NodeView& node) { return IntAttribute(node.attributes, "axis"); }

HostKernelOrError MakeOneHot(const NodeView& node, absl::Span<const TensorType> outputs) {
  const int64_t depth = outputs[0].dims.back().size;
  if (outputs[0].dtype == DType::kBool) return std::make_unique<OneHot<uint8_t>>(node, depth);
  return VisitNumbers(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<OneHot<decltype(t)>>(node, depth);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

template <bool along>
HostKernelOrError MakeTake(const NodeView& node, absl::Span<const TensorType> outputs) {
  const HostRows x(node.input(0), AxisOf(node));
  const int64_t count = along ? outputs[0].dims[AxisOf(node)].size : node.input(1).num_elements();
  return VisitWidth(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Take<decltype(t)>>(node, x, count, along);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

template <bool along>
HostKernelOrError MakeScatterAdd(const NodeView& node, absl::Span<const TensorType> outputs) {
  const HostRows out(outputs[0], AxisOf(node));
  const int64_t count =
      along ? node.input(0).dims[AxisOf(node)].size : node.input(1).num_elements();
  return VisitNumbers(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        using T = decltype(t);
        if constexpr (std::is_integral<T>::value) {
          return std::make_unique<ScatterAdd<std::make_unsigned_t<T>>>(node, out, count, along);
        } else {
          return std::make_unique<ScatterAdd<T>>(node, out, count, along);
        }
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

template <bool largest>
HostKernelOrError MakeArg(const NodeView& node, absl::Span<const TensorType> outputs) {
  const HostRows rows(node.input(0), AxisOf(node));
  if (node.input(0).dtype == DType::kBool) return std::make_unique<Arg<Bool>>(rows, largest);
  return VisitNumbers(
      node.input(0).dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Arg<decltype(t)>>(rows, largest);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {
    {"arg_max", MakeArg<true>},
    {"arg_min", MakeArg<false>},
    {"one_hot", MakeOneHot},
    {"scatter_add", MakeScatterAdd<false>},
    {"scatter_add_along", MakeScatterAdd<true>},
    {"take", MakeTake<false>},
    {"take_along", MakeTake<true>},
};

}  // namespace

absl::Span<const HostKernelEntry> IndexHostKernels() { return kEntries; }

}  // namespace chorus
