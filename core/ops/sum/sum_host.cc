#include "core/ops/sum/sum_host.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"

namespace chorus {
namespace {

// A run of dimensions that are all kept, or all reduced: summed (sum) or repeated (expand).
struct Extent {
  int64_t size = 1;
  bool reduced = false;
};

// Neighbouring dimensions of one kind behave as one; dimensions of size 1 as none. The last run is
// split off: it is what inner loops go over.
struct Extents {
  explicit Extents(const std::vector<Extent>& dims) {
    for (const Extent& dim : dims) {
      if (dim.size == 1) continue;
      if (!outer.empty() && outer.back().reduced == dim.reduced) {
        outer.back().size *= dim.size;
      } else {
        outer.push_back(dim);
      }
    }
    if (!outer.empty()) {
      inner = outer.back();
      outer.pop_back();
    }
  }
  std::vector<Extent> outer;
  Extent inner;
};

// A loop over one run of rows.
struct Loop {
  int64_t size;
  int64_t stride;  // in rows
};

// Where the `index`-th turn of nested loops, innermost first, stands.
int64_t RowOf(int64_t index, const std::vector<Loop>& loops) {
  int64_t row = 0;
  for (const Loop& loop : loops) {
    row += index % loop.size * loop.stride;
    index /= loop.size;
  }
  return row;
}

// Sixteen partial sums, which vector registers hold, then a tree: the same bits for every caller.
template <typename T>
Arithmetic<T> SumContiguous(const T* x, int64_t size) {
  constexpr int kLanes = 16;
  Arithmetic<T> lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane)
      lanes[lane] += static_cast<Arithmetic<T>>(x[i + lane]);
  }
  for (int lane = 0; i < size; ++i, ++lane) lanes[lane] += static_cast<Arithmetic<T>>(x[i]);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// T is unsigned for integers, which is what they are computed in.
template <typename T>
class Sum : public HostKernel {
 public:
  Sum(int64_t units, int64_t cost_per_unit, const Extents& input)
      : HostKernel(units, cost_per_unit), inner_(input.inner) {
    int64_t stride = 1;
    for (size_t i = input.outer.size(); i-- > 0;) {
      const Extent& extent = input.outer[i];
      (extent.reduced ? reduced_ : kept_).push_back({extent.size, stride});
      stride *= extent.size;
      if (extent.reduced) num_terms_ *= extent.size;
    }
  }

  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t begin, int64_t end) const override {
    const T* const in = static_cast<const T*>(inputs[0]);
    T* const out = static_cast<T*>(outputs[0]);
    if (inner_.reduced) {
      for (int64_t o = begin; o < end; ++o) {
        const T* const first = in + RowOf(o, kept_) * inner_.size;
        A sum{};
        for (int64_t term = 0; term < num_terms_; ++term) {
          sum += SumContiguous(first + RowOf(term, reduced_) * inner_.size, inner_.size);
        }
        out[o] = static_cast<T>(sum);
      }
      return absl::OkStatus();
    }
    while (begin < end) {
      const int64_t column = begin % inner_.size;
      const int64_t columns =
          std::min({inner_.size - column, end - begin, in_place ? end : kPiece});
      const T* const first = in + RowOf(begin / inner_.size, kept_) * inner_.size + column;
      A piece[in_place ? 1 : kPiece];
      A* sums = piece;
      if constexpr (in_place) sums = out + begin;
      std::fill(sums, sums + columns, A{});
      for (int64_t term = 0; term < num_terms_; ++term) {
        const T* const x = first + RowOf(term, reduced_) * inner_.size;
        for (int64_t i = 0; i < columns; ++i) sums[i] += static_cast<A>(x[i]);
      }
      if constexpr (!in_place) {
        for (int64_t i = 0; i < columns; ++i) out[begin + i] = static_cast<T>(sums[i]);
      }
      begin += columns;
    }
    return absl::OkStatus();
  }

 private:
  using A = Arithmetic<T>;
  // Sums grow where the result stands, or, where they are wider than it, in pieces.
  static constexpr bool in_place = std::is_same<A, T>::value;
  static constexpr int64_t kPiece = 512;

  const Extent inner_;
  std::vector<Loop> kept_;  // runs outside the inner one, last first
  std::vector<Loop> reduced_;
  int64_t num_terms_ = 1;  // rows added up in one row of the result
};

template <typename T>
class Expand : public HostKernel {
 public:
  Expand(int64_t units, const Extents& output)
      : HostKernel(units, 2 * sizeof(T)), inner_(output.inner) {
    int64_t stride = 1;
    for (size_t i = output.outer.size(); i-- > 0;) {
      const Extent& extent = output.outer[i];
      outer_.push_back({extent.size, extent.reduced ? 0 : stride});
      if (!extent.reduced) stride *= extent.size;
    }
  }

  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t begin, int64_t end) const override {
    const T* const in = static_cast<const T*>(inputs[0]);
    T* const out = static_cast<T*>(outputs[0]);
    while (begin < end) {
      const int64_t column = begin % inner_.size;
      const int64_t columns = std::min(inner_.size - column, end - begin);
      const int64_t row = RowOf(begin / inner_.size, outer_);
      if (inner_.reduced) {
        std::fill_n(out + begin, columns, in[row]);
      } else {
        std::copy_n(in + row * inner_.size + column, columns, out + begin);
      }
      begin += columns;
    }
    return absl::OkStatus();
  }

 private:
  const Extent inner_;
  std::vector<Loop> outer_;
};

using Made = absl::StatusOr<std::unique_ptr<HostKernel>>;

Made MakeSum(const NodeView& node, absl::Span<const TensorType> outputs) {
  const TensorType& input = node.input(0);
  const std::vector<int64_t> axes = IntsAttribute(node.attributes, "axes");
  std::vector<Extent> dims;
  for (const Dim& dim : input.dims) dims.push_back({dim.size, axes.empty()});
  for (const int64_t axis : axes) dims[axis].reduced = true;
  const int64_t units = outputs[0].num_elements();
  const int64_t cost = input.num_bytes() / std::max<int64_t>(units, 1);
  return VisitNumbers(
      input.dtype,
      [&](auto t) -> Made {
        using T = decltype(t);
        if constexpr (std::is_integral<T>::value) {
          return std::make_unique<Sum<std::make_unsigned_t<T>>>(units, cost, Extents(dims));
        } else {
          return std::make_unique<Sum<T>>(units, cost, Extents(dims));
        }
      },
      [&] { return Made(NoHostKernel(node, outputs)); });
}

Made MakeExpand(const NodeView& node, absl::Span<const TensorType> outputs) {
  const TensorType& input = node.input(0);
  const TensorType& output = outputs[0];
  const size_t added = output.dims.size() - input.dims.size();
  std::vector<Extent> dims;
  for (size_t i = 0; i < output.dims.size(); ++i) {
    dims.push_back({output.dims[i].size, i < added || input.dims[i - added].size == 1});
  }
  return VisitWidth(
      output.dtype,
      [&](auto t) -> Made {
        return std::make_unique<Expand<decltype(t)>>(output.num_elements(), Extents(dims));
      },
      [&] { return Made(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {{"expand", MakeExpand}, {"sum", MakeSum}};

}  // namespace

absl::Span<const HostKernelEntry> SumHostKernels() { return kEntries; }

}  // namespace chorus
