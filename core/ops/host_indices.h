// Indices and labels, tensors of any integer dtype, for kernels. They came from a client: each is
// checked where it is used.
//
// Threads: immutable; any. Ownership: it keeps copies of what it was made of. Errors: said at
// OutOfRange().
#ifndef CHORUS_CORE_OPS_HOST_INDICES_H_
#define CHORUS_CORE_OPS_HOST_INDICES_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/ops/op.h"
#include "core/tensor/type.h"

namespace chorus {

class HostIndices {
 public:
  // Input `input` of the node; values from 0 to limit - 1 count.
  HostIndices(const NodeView& node, int input, int64_t limit);

  // Element i of the input's memory.
  int64_t At(const void* memory, int64_t i) const {
    switch (type_.dtype) {
      case DType::kI8:
        return static_cast<const int8_t*>(memory)[i];
      case DType::kU8:
        return static_cast<const uint8_t*>(memory)[i];
      case DType::kI16:
        return static_cast<const int16_t*>(memory)[i];
      case DType::kI32:
        return static_cast<const int32_t*>(memory)[i];
      default:
        return static_cast<const int64_t*>(memory)[i];
    }
  }
  bool IsWithin(int64_t index) const { return index >= 0 && index < limit_; }
  // Whether it stands for nothing; the op's attribute `ignore_index`.
  bool IsIgnored(int64_t index) const { return ignored_.has_value() && index == *ignored_; }

  // INVALID_ARGUMENT: element i is `index`, which is neither within nor ignored.
  absl::Status OutOfRange(int64_t i, int64_t index) const;
  // The same where the index is not known, for it is in the memory of a GPU.
  absl::Status OutOfRange(int64_t i) const;

  int64_t limit() const { return limit_; }
  int64_t count() const { return type_.num_elements(); }

 private:
  // Of element i, which holds what the text says.
  absl::Status Refusal(int64_t i, absl::string_view text) const;

  const std::string op_;
  const int input_;
  const TensorType type_;
  const int64_t limit_;
  absl::optional<int64_t> ignored_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_HOST_INDICES_H_
