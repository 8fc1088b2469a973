#include "core/ops/softmax/softmax_host.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_rows.h"
#include "core/ops/long_sums.h"

namespace chorus {
namespace {

template <typename T>
class Softmax : public HostKernel {
 public:
  Softmax(const HostRows& rows, bool log)
      : HostKernel(rows.size == 0 ? 0 : rows.count(),
                   // exp takes as long as several bytes.
                   rows.size * static_cast<int64_t>(4 * sizeof(T) + 32)),
        rows_(rows),
        log_(log) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const in = static_cast<const T*>(buffers.inputs[0]);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    if (rows_.stride == 1) {
      for (int64_t row = begin; row < end; ++row) {
        RunRow(in + row * rows_.size, out + row * rows_.size);
      }
      return absl::OkStatus();
    }
    for (int64_t lanes = 0; begin < end; begin += lanes) {
      lanes = std::min(rows_.LanesAt(begin, end), kLanes);
      const int64_t first = rows_.FirstOf(begin);
      A most[kLanes];
      A sum[kLanes];
      std::fill_n(most, lanes, -std::numeric_limits<A>::infinity());
      ForEach(first, lanes, [&](int64_t i, int64_t lane) {
        const A x = static_cast<A>(in[i]);
        most[lane] = x > most[lane] ? x : most[lane];
      });
      if (log_) {
        bool seen[kLanes] = {};
        AddUp(first, lanes, sum, [&](int64_t i, int64_t lane, A* to) {
          AddBesideMost(static_cast<A>(in[i]) - most[lane], to, &seen[lane]);
        });
        for (int64_t lane = 0; lane < lanes; ++lane) sum[lane] = std::log1p(sum[lane]);
        ForEach(first, lanes, [&](int64_t i, int64_t lane) {
          out[i] = static_cast<T>(static_cast<A>(in[i]) - most[lane] - sum[lane]);
        });
      } else {
        AddUp(first, lanes, sum, [&](int64_t i, int64_t lane, A* to) {
          *to += std::exp(static_cast<A>(in[i]) - most[lane]);
        });
        ForEach(first, lanes, [&](int64_t i, int64_t lane) {
          out[i] = static_cast<T>(std::exp(static_cast<A>(in[i]) - most[lane]) / sum[lane]);
        });
      }
    }
    return absl::OkStatus();
  }

 private:
  using A = Arithmetic<T>;
  // Rows that stand side by side.
  static constexpr int64_t kLanes = 64;

  // Adds exp(x - most), but for the first that is 1 because x is the most: 1 added to small ones
  // would swallow them, and with them log_softmax of a class that is all but certain.
  static void AddBesideMost(A difference, A* sum, bool* seen) {
    if (difference == 0 && !*seen) {
      *seen = true;
    } else {
      *sum += std::exp(difference);
    }
  }

  // Elements that stand side by side.
  void RunRow(const T* x, T* y) const {
    const A most = MostOf(x, rows_.size);
    LongSums<A> sums;
    if (log_) {
      bool seen = false;
      for (int64_t i = 0; i < rows_.size; ++i) {
        AddBesideMost(static_cast<A>(x[i]) - most, sums.Next(), &seen);
      }
      const A log = std::log1p(sums.At(0));
      for (int64_t i = 0; i < rows_.size; ++i) {
        y[i] = static_cast<T>(static_cast<A>(x[i]) - most - log);
      }
    } else if constexpr (std::is_same<A, T>::value) {
      for (int64_t i = 0; i < rows_.size; ++i) *sums.Next() += y[i] = std::exp(x[i] - most);
      const A sum = sums.At(0);
      for (int64_t i = 0; i < rows_.size; ++i) y[i] /= sum;
    } else {
      for (int64_t i = 0; i < rows_.size; ++i) {
        *sums.Next() += std::exp(static_cast<A>(x[i]) - most);
      }
      const A sum = sums.At(0);
      for (int64_t i = 0; i < rows_.size; ++i) {
        y[i] = static_cast<T>(std::exp(static_cast<A>(x[i]) - most) / sum);
      }
    }
  }

  template <typename F>
  void ForEach(int64_t first, int64_t lanes, const F& f) const {
    for (int64_t i = 0; i < rows_.size; ++i) {
      for (int64_t lane = 0; lane < lanes; ++lane) f(first + i * rows_.stride + lane, lane);
    }
  }

  // What add(i, lane, to) adds for each element, by lane.
  template <typename F>
  void AddUp(int64_t first, int64_t lanes, A* sum, const F& add) const {
    LongSums<A, kLanes> sums;
    for (int64_t i = 0; i < rows_.size; ++i) {
      A* const to = sums.Next();
      for (int64_t lane = 0; lane < lanes; ++lane) {
        add(first + i * rows_.stride + lane, lane, to + lane);
      }
    }
    for (int64_t lane = 0; lane < lanes; ++lane) sum[lane] = sums.At(lane);
  }

  const HostRows rows_;
  const bool log_;
};

enum class Centering { kCenter, kCenterGrad, kSoftmaxGrad };

template <typename T, Centering kOp>
class Center : public HostKernel {
 public:
  explicit Center(const HostRows& rows)
      : HostKernel(rows.size == 0 ? 0 : rows.count(),
                   rows.size * static_cast<int64_t>(3 * sizeof(T))),
        rows_(rows) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const w = static_cast<const T*>(buffers.inputs[0]);
    const T* const x = static_cast<const T*>(buffers.inputs[1]);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    for (int64_t lanes = 0; begin < end; begin += lanes) {
      lanes = std::min(rows_.LanesAt(begin, end), kLanes);
      const int64_t first = rows_.FirstOf(begin);
      // One row has no other beside it where rows stand one after the other.
      if (lanes == 1) {
        RunLanes<1>(w + first, x + first, out + first, 1);
      } else {
        RunLanes<kLanes>(w + first, x + first, out + first, lanes);
      }
    }
    return absl::OkStatus();
  }

 private:
  using A = Arithmetic<T>;
  // Rows that stand side by side.
  static constexpr int64_t kLanes = 64;

  template <int64_t kMost>
  void RunLanes(const T* w, const T* x, T* out, int64_t num_lanes) const {
    const int64_t lanes = kMost == 1 ? 1 : num_lanes;
    const auto for_each = [&](const auto& f) {
      for (int64_t k = 0; k < rows_.size; ++k) {
        for (int64_t lane = 0; lane < lanes; ++lane) f(k, k * rows_.stride + lane, lane);
      }
    };
    // Where the largest weight is.
    A most[kMost];
    int64_t at[kMost] = {};
    std::fill_n(most, lanes, A{-1});
    for_each([&](int64_t k, int64_t i, int64_t lane) {
      const A size = std::abs(static_cast<A>(w[i]));
      if (size > most[lane]) {
        most[lane] = size;
        at[lane] = k;
      }
    });
    A of_most[kMost];  // x
    A weight[kMost];
    for (int64_t lane = 0; lane < lanes; ++lane) {
      of_most[lane] = static_cast<A>(x[at[lane] * rows_.stride + lane]);
      weight[lane] = static_cast<A>(w[at[lane] * rows_.stride + lane]);
    }
    LongSums<A, kMost> long_weights;
    LongSums<A, kMost> long_sum;
    for (int64_t k = 0; k < rows_.size; ++k) {
      A* const to_weights = long_weights.Next();
      A* const to_sum = long_sum.Next();
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t i = k * rows_.stride + lane;
        const A a = static_cast<A>(w[i]);
        const A b = static_cast<A>(x[i]);
        if constexpr (kOp == Centering::kCenterGrad) {
          to_weights[lane] += k == at[lane] ? A{} : a;
          to_sum[lane] += k == at[lane] ? A{} : b;
        } else {
          to_weights[lane] += a;
          to_sum[lane] += a * (b - of_most[lane]);
        }
      }
    }
    A weights[kMost];
    A sum[kMost];
    for (int64_t lane = 0; lane < lanes; ++lane) {
      weights[lane] = long_weights.At(lane);
      sum[lane] = long_sum.At(lane);
    }
    if constexpr (kOp == Centering::kCenterGrad) {
      for_each([&](int64_t k, int64_t i, int64_t lane) {
        const A a = static_cast<A>(w[i]);
        const A b = static_cast<A>(x[i]);
        const A with_most = k == at[lane] ? A{} : b * weight[lane] - a * of_most[lane];
        out[i] = static_cast<T>(with_most + (b * weights[lane] - a * sum[lane]));
      });
    } else {
      for_each([&](int64_t, int64_t i, int64_t lane) {
        const A difference = static_cast<A>(x[i]) - of_most[lane];
        const A centered = difference * weights[lane] - sum[lane];
        const bool weighted = kOp == Centering::kSoftmaxGrad;
        out[i] = static_cast<T>(weighted ? static_cast<A>(w[i]) * centered : centered);
      });
    }
  }

  const HostRows rows_;
};

template <bool log>
HostKernelOrError Make(const NodeView& node, absl::Span<const TensorType> outputs) {
  const HostRows rows(outputs[0], IntAttribute(node.attributes, "axis"));
  return VisitFloating(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        return std::make_unique<Softmax<decltype(t)>>(rows, log);
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

template <Centering kOp>
HostKernelOrError MakeCenter(const NodeView& node, absl::Span<const TensorType> outputs) {
  const HostRows rows(outputs[0], IntAttribute(node.attributes, "axis"));
  return VisitFloating(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError { return std::make_unique<Center<decltype(t), kOp>>(rows); },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {
    {"center", MakeCenter<Centering::kCenter>},
    {"center_grad", MakeCenter<Centering::kCenterGrad>},
    {"log_softmax", Make<true>},
    {"softmax", Make<false>},
    {"softmax_grad", MakeCenter<Centering::kSoftmaxGrad>},
};

}  // namespace

absl::Span<const HostKernelEntry> SoftmaxHostKernels() { return kEntries; }

}  // namespace chorus
