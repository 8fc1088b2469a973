#include "core/ops/cum_sum/cum_sum_host.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_rows.h"

namespace chorus {
namespace {

// Integers wrap: T is unsigned.
template <typename T>
class CumSum : public HostKernel {
 public:
  CumSum(const HostRows& rows, bool reverse)
      : HostKernel(rows.size == 0 ? 0 : rows.count(),
                   // An addition waits for the one before.
                   rows.size * static_cast<int64_t>(2 * sizeof(T) + 4)),
        rows_(rows),
        reverse_(reverse) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    const T* const in = static_cast<const T*>(buffers.inputs[0]);
    T* const out = static_cast<T*>(buffers.outputs[0]);
    const int64_t step = reverse_ ? -rows_.stride : rows_.stride;
    for (int64_t lanes = 0; begin < end; begin += lanes) {
      lanes = std::min(rows_.LanesAt(begin, end), kLanes);
      int64_t i = rows_.FirstOf(begin) + (reverse_ ? (rows_.size - 1) * rows_.stride : 0);
      A sums[kLanes];
      for (int64_t lane = 0; lane < lanes; ++lane) {
        sums[lane] = static_cast<A>(in[i + lane]);
        out[i + lane] = in[i + lane];
      }
      for (int64_t left = rows_.size - 1; left > 0; --left) {
        i += step;
        for (int64_t lane = 0; lane < lanes; ++lane) {
          sums[lane] += static_cast<A>(in[i + lane]);
          out[i + lane] = static_cast<T>(sums[lane]);
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  using A = Arithmetic<T>;
  // Rows that stand side by side.
  static constexpr int64_t kLanes = 64;

  const HostRows rows_;
  const bool reverse_;
};

HostKernelOrError MakeCumSum(const NodeView& node, absl::Span<const TensorType> outputs) {
  const HostRows rows(outputs[0], IntAttribute(node.attributes, "axis"));
  const bool reverse = IntAttribute(node.attributes, "reverse") == 1;
  return VisitNumbers(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        using T = decltype(t);
        if constexpr (std::is_integral<T>::value) {
          return std::make_unique<CumSum<std::make_unsigned_t<T>>>(rows, reverse);
        } else {
          return std::make_unique<CumSum<T>>(rows, reverse);
        }
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {{"cum_sum", MakeCumSum}};

}  // namespace

absl::Span<const HostKernelEntry> CumSumHostKernels() { return kEntries; }

}  // namespace chorus
