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

  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   int64_t begin, int64_t end) const override {
    const T* const in = static_cast<const T*>(inputs[0]);
    T* const out = static_cast<T*>(outputs[0]);
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
      A sum[kLanes] = {};
      std::fill_n(most, lanes, -std::numeric_limits<A>::infinity());
      ForEach(first, lanes, [&](int64_t i, int64_t lane) {
        const A x = static_cast<A>(in[i]);
        most[lane] = x > most[lane] ? x : most[lane];
      });
      ForEach(first, lanes, [&](int64_t i, int64_t lane) {
        sum[lane] += std::exp(static_cast<A>(in[i]) - most[lane]);
      });
      if (log_) {
        for (int64_t lane = 0; lane < lanes; ++lane) sum[lane] = std::log(sum[lane]);
        ForEach(first, lanes, [&](int64_t i, int64_t lane) {
          out[i] = static_cast<T>(static_cast<A>(in[i]) - most[lane] - sum[lane]);
        });
      } else {
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

  // Elements that stand side by side.
  void RunRow(const T* x, T* y) const {
    const A most = MostOf(x, rows_.size);
    A sum{};
    if (log_) {
      for (int64_t i = 0; i < rows_.size; ++i) sum += std::exp(static_cast<A>(x[i]) - most);
      sum = std::log(sum);
      for (int64_t i = 0; i < rows_.size; ++i) {
        y[i] = static_cast<T>(static_cast<A>(x[i]) - most - sum);
      }
    } else if constexpr (std::is_same<A, T>::value) {
      for (int64_t i = 0; i < rows_.size; ++i) sum += y[i] = std::exp(x[i] - most);
      for (int64_t i = 0; i < rows_.size; ++i) y[i] /= sum;
    } else {
      for (int64_t i = 0; i < rows_.size; ++i) sum += std::exp(static_cast<A>(x[i]) - most);
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

  const HostRows rows_;
  const bool log_;
};

template <bool log>
absl::StatusOr<std::unique_ptr<HostKernel>> Make(const NodeView& node,
                                                 absl::Span<const TensorType> outputs) {
  using Made = absl::StatusOr<std::unique_ptr<HostKernel>>;
  const HostRows rows(outputs[0], IntAttribute(node.attributes, "axis"));
  return VisitFloating(
      outputs[0].dtype,
      [&](auto t) -> Made { return std::make_unique<Softmax<decltype(t)>>(rows, log); },
      [&] { return Made(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {{"log_softmax", Make<true>}, {"softmax", Make<false>}};

}  // namespace

absl::Span<const HostKernelEntry> SoftmaxHostKernels() { return kEntries; }

}  // namespace chorus
