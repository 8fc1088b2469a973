#include "core/ops/fill/fill_host.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/base/error.h"

namespace chorus {
namespace {

template <typename T>
class Fill : public HostKernel {
 public:
  Fill(int64_t size, T value) : HostKernel(size, sizeof(T)), value_(value) {}
  absl::Status Run(absl::Span<const void* const>, absl::Span<void* const> outputs, int64_t begin,
                   int64_t end) const override {
    T* const out = static_cast<T*>(outputs[0]);
    std::fill(out + begin, out + end, value_);
    return absl::OkStatus();
  }

 private:
  const T value_;
};

absl::StatusOr<std::unique_ptr<HostKernel>> Make(const NodeView& node,
                                                 absl::Span<const TensorType> outputs) {
  const AttributeValue& value = *FindAttribute(node.attributes, "value");
  const int64_t size = outputs[0].num_elements();
  switch (outputs[0].dtype) {
    case DType::kF32:
      return std::make_unique<Fill<float>>(size, static_cast<float>(absl::get<double>(value)));
    case DType::kF64:
      return std::make_unique<Fill<double>>(size, absl::get<double>(value));
    case DType::kI64:
      return std::make_unique<Fill<int64_t>>(size, absl::get<int64_t>(value));
    default:
      return NoHostKernel(node, outputs);
  }
}

constexpr HostKernelEntry kEntries[] = {{"fill", Make}};

}  // namespace

absl::Span<const HostKernelEntry> FillHostKernels() { return kEntries; }

}  // namespace chorus
