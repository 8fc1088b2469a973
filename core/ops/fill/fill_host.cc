#include "core/ops/fill/fill_host.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/tensor/rounding.h"

namespace chorus {
namespace {

template <typename T>
class Fill : public HostKernel {
 public:
  Fill(int64_t size, T value) : HostKernel(size, sizeof(T)), value_(value) {}
  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    T* const out = static_cast<T*>(buffers.outputs[0]);
    std::fill(out + begin, out + end, value_);
    return absl::OkStatus();
  }

 private:
  const T value_;
};

HostKernelOrError Make(const NodeView& node, absl::Span<const TensorType> outputs) {
  const AttributeValue& value = *FindAttribute(node.attributes, "value");
  const int64_t size = outputs[0].num_elements();
  if (outputs[0].dtype == DType::kBool) {
    return std::make_unique<Fill<uint8_t>>(size, static_cast<uint8_t>(absl::get<int64_t>(value)));
  }
  return VisitNumbers(
      outputs[0].dtype,
      [&](auto t) -> HostKernelOrError {
        using T = decltype(t);
        if constexpr (std::is_integral<T>::value) {
          return std::make_unique<Fill<T>>(size, static_cast<T>(absl::get<int64_t>(value)));
        } else {
          return std::make_unique<Fill<T>>(size, RoundTo<T>(absl::get<double>(value)));
        }
      },
      [&] { return HostKernelOrError(NoHostKernel(node, outputs)); });
}

constexpr HostKernelEntry kEntries[] = {{"fill", Make}};

}  // namespace

absl::Span<const HostKernelEntry> FillHostKernels() { return kEntries; }

}  // namespace chorus
