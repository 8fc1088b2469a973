#include "core/ops/sum/sum_host.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/long_sums.h"
#include "core/ops/sum/reductions.h"

namespace chorus {
namespace {

// A run of dimensions that are all kept, or all reduced: by a reduction, or repeated (expand).
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

// Sixteen partial results, which vector registers hold, then a tree: the same bits for every
// caller.
template <typename F, typename T>
typename F::A ReduceContiguous(const T* x, int64_t size) {
  using A = typename F::A;
  constexpr int kLanes = 16;
  A lanes[kLanes];
  std::fill_n(lanes, kLanes, F::Nothing());
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = F::Of(lanes[lane], static_cast<A>(x[i + lane]));
    }
  }
  for (int lane = 0; i < size; ++i, ++lane) {
    lanes[lane] = F::Of(lanes[lane], static_cast<A>(x[i]));
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] = F::Of(lanes[lane], lanes[lane + width]);
  }
  return lanes[0];
}

// Of what the sums of kMostTerms each are put together.
template <typename F>
using Total = typename std::conditional<F::adds && std::is_same<typename F::A, float>::value,
                                        double, typename F::A>::type;

template <typename F>
void PutTogether(typename F::A part, Total<F>* total) {
  if constexpr (F::adds) {
    *total += part;
  } else {
    *total = F::Of(*total, part);
  }
}

template <typename F, typename T>
class Reduce : public HostKernel {
 public:
  Reduce(int64_t units, int64_t cost_per_unit, const Extents& input)
      : HostKernel(units, cost_per_unit), inner_(input.inner) {
    int64_t stride = 1;
    for (size_t i = input.outer.size(); i-- > 0;) {
      const Extent& extent = input.outer[i];
      (extent.reduced ? reduced_ : kept_).push_back({extent.size, stride});
      stride *= extent.size;
      if (extent.reduced) num_terms_ *= extent.size;
    }
  }

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const in = static_cast<const T*>(buffers.inputs[0]);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    if (inner_.reduced) {
      for (int64_t o = begin; o < end; ++o) {
        const T* const first = in + RowOf(o, kept_) * inner_.size;
        Total<F> total = F::Nothing();
        A part = F::Nothing();
        int64_t terms = 0;  // in `part`
        for (int64_t term = 0; term < num_terms_; ++term) {
          const T* const x = first + RowOf(term, reduced_) * inner_.size;
          for (int64_t at = 0; at < inner_.size; at += kMostTerms) {
            const int64_t size = std::min(inner_.size - at, kMostTerms);
            part = F::Of(part, ReduceContiguous<F>(x + at, size));
            terms += size;
            if (terms < kMostTerms) continue;
            PutTogether<F>(std::exchange(part, F::Nothing()), &total);
            terms = 0;
          }
        }
        PutTogether<F>(part, &total);
        out[o] = static_cast<T>(F::Finish(static_cast<A>(total), num_terms_ * inner_.size));
      }
      return absl::OkStatus();
    }
    const bool in_parts = !std::is_same<A, Total<F>>::value && num_terms_ > kMostTerms;
    while (begin < end) {
      const int64_t column = begin % inner_.size;
      const int64_t columns =
          std::min({inner_.size - column, end - begin, in_place && !in_parts ? end : kPiece});
      const T* const first = in + RowOf(begin / inner_.size, kept_) * inner_.size + column;
      A piece[kPiece];
      A* results = piece;
      if constexpr (in_place) results = out + begin;
      if (in_parts) {
        Total<F> totals[kPiece];
        std::fill(totals, totals + columns, F::Nothing());
        for (int64_t term = 0; term < num_terms_; term += kMostTerms) {
          Add(first, columns, term, std::min(num_terms_, term + kMostTerms), results);
          for (int64_t i = 0; i < columns; ++i) PutTogether<F>(results[i], &totals[i]);
        }
        for (int64_t i = 0; i < columns; ++i) results[i] = static_cast<A>(totals[i]);
      } else {
        Add(first, columns, 0, num_terms_, results);
      }
      if constexpr (!in_place || F::finishes) {
        for (int64_t i = 0; i < columns; ++i) {
          out[begin + i] = static_cast<T>(F::Finish(results[i], num_terms_));
        }
      }
      begin += columns;
    }
    return absl::OkStatus();
  }

 private:
  using A = typename F::A;
  // Of some columns, rows `begin` to `end` of those that come into one of the result.
  void Add(const T* first, int64_t columns, int64_t begin, int64_t end, A* results) const {
    std::fill(results, results + columns, F::Nothing());
    for (int64_t term = begin; term < end; ++term) {
      const T* const x = first + RowOf(term, reduced_) * inner_.size;
      for (int64_t i = 0; i < columns; ++i) results[i] = F::Of(results[i], static_cast<A>(x[i]));
    }
  }

  // Results grow where the result stands, or, where they are wider than it, in pieces.
  static constexpr bool in_place = std::is_same<A, T>::value;
  static constexpr int64_t kPiece = 512;

  const Extent inner_;
  std::vector<Loop> kept_;  // runs outside the inner one, last first
  std::vector<Loop> reduced_;
  int64_t num_terms_ = 1;  // rows that come into one row of the result
};

// Elements as they are: T has their width, what it holds does not matter.
template <typename T>
struct Repeated {
  static T Of(T x, int64_t) { return x; }
};

template <typename F, typename T>
class Repeat : public HostKernel {
 public:
  Repeat(int64_t units, const Extents& output)
      : HostKernel(units, int64_t{2 * sizeof(T)} + CostOfLoops(output.outer.size()) /
                                                       std::max<int64_t>(output.inner.size, 1)),
        inner_(output.inner) {
    if (inner_.reduced) times_ *= inner_.size;
    int64_t stride = 1;
    for (size_t i = output.outer.size(); i-- > 0;) {
      const Extent& extent = output.outer[i];
      outer_.push_back({extent.size, extent.reduced ? 0 : stride});
      (extent.reduced ? times_ : stride) *= extent.size;
    }
  }

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const in = static_cast<const T*>(buffers.inputs[0]);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    while (begin < end) {
      const int64_t column = begin % inner_.size;
      const int64_t columns = std::min(inner_.size - column, end - begin);
      const int64_t row = RowOf(begin / inner_.size, outer_);
      if (inner_.reduced) {
        std::fill_n(out + begin, columns, F::Of(in[row], times_));
      } else {
        const T* const x = in + row * inner_.size + column;
        for (int64_t i = 0; i < columns; ++i) out[begin + i] = F::Of(x[i], times_);
      }
      begin += columns;
    }
    return absl::OkStatus();
  }

 private:
  const Extent inner_;
  std::vector<Loop> outer_;
  int64_t times_ = 1;  // how often each element is repeated
};

template <template <typename> class F>
HostKernelOrError MakeReduction(const NodeView& node, absl::Span<const TensorType> outputs) {
  const TensorType& input = node.input(0);
  const std::vector<int64_t> axes = IntsAttribute(node.attributes, "axes");
  std::vector<Extent> dims;
  for (const Dim& dim : input.dims) dims.push_back({dim.size, axes.empty()});
  for (const int64_t axis : axes) dims[axis].reduced = true;
  const int64_t units = outputs[0].num_elements();
  const Extents extents(dims);
  // To find an element's terms takes as long as some bytes of them, and there may be none. Behind
  // the last dimension that is reduced they are found for rows.
  int64_t terms = 1;
  for (const Extent& extent : extents.outer) terms *= extent.reduced ? extent.size : 1;
  const int64_t rows = extents.inner.reduced ? 1 : std::max<int64_t>(extents.inner.size, 1);
  const int64_t cost = input.num_bytes() / std::max<int64_t>(units, 1) + 16 +
                       terms * CostOfLoops(extents.outer.size()) / rows;
  const auto make = [&](auto t) -> HostKernelOrError {
    using T = decltype(t);
    return std::make_unique<Reduce<F<T>, T>>(units, cost, extents);
  };
  const auto none = [&] { return HostKernelOrError(NoHostKernel(node, outputs)); };
  if constexpr (std::is_same<F<float>, MeanReduction<float>>::value) {
    return VisitFloating(input.dtype, make, none);
  } else if constexpr (std::is_same<F<float>, MaxReduction<float>>::value ||
                       std::is_same<F<float>, MinReduction<float>>::value) {
    return VisitNumbers(input.dtype, make, none);
  } else {
    return VisitNumbers(
        input.dtype,
        [&](auto t) -> HostKernelOrError {
          using T = decltype(t);
          if constexpr (std::is_integral<T>::value) {
            return make(std::make_unsigned_t<T>());
          } else {
            return make(t);
          }
        },
        none);
  }
}

std::vector<Extent> RepeatedExtents(const TensorType& input, const TensorType& output) {
  const size_t added = output.dims.size() - input.dims.size();
  std::vector<Extent> dims;
  for (size_t i = 0; i < output.dims.size(); ++i) {
    dims.push_back({output.dims[i].size, i < added || input.dims[i - added].size == 1});
  }
  return dims;
}

HostKernelOrError MakeExpand(const NodeView& node, absl::Span<const TensorType> outputs) {
  return VisitWidth(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        using T = decltype(t);
        return std::make_unique<Repeat<Repeated<T>, T>>(
            outputs[0].num_elements(), Extents(RepeatedExtents(node.input(0), outputs[0])));
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

HostKernelOrError MakeSpread(const NodeView& node, absl::Span<const TensorType> outputs) {
  return VisitFloating(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        using T = decltype(t);
        return std::make_unique<Repeat<Divided<T>, T>>(
            outputs[0].num_elements(), Extents(RepeatedExtents(node.input(0), outputs[0])));
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {
    {"expand", MakeExpand},
    {"max", MakeReduction<MaxReduction>},
    {"mean", MakeReduction<MeanReduction>},
    {"min", MakeReduction<MinReduction>},
    {"prod", MakeReduction<ProdReduction>},
    {"spread", MakeSpread},
    {"sum", MakeReduction<SumReduction>},
};

}  // namespace

absl::Span<const HostKernelEntry> SumHostKernels() { return kEntries; }

}  // namespace chorus
