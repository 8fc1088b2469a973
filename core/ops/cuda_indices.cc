#include "core/ops/cuda_indices.h"

#include "core/ops/host_indices.h"

namespace chorus {
namespace {

cuda::IndexKind KindOf(DType dtype) {
  switch (dtype) {
    case DType::kI8:
      return cuda::IndexKind::kI8;
    case DType::kU8:
      return cuda::IndexKind::kU8;
    case DType::kI16:
      return cuda::IndexKind::kI16;
    case DType::kI32:
      return cuda::IndexKind::kI32;
    default:
      return cuda::IndexKind::kI64;
  }
}

}  // namespace

cuda::DeviceIndices IndicesOf(const NodeView& node, int input, int64_t limit) {
  cuda::DeviceIndices indices;
  indices.limit = limit;
  indices.kind = KindOf(node.input(input).dtype);
  const AttributeValue* const ignored = FindAttribute(node.attributes, "ignore_index");
  if (ignored != nullptr) {
    indices.ignores = true;
    indices.ignored = absl::get<int64_t>(*ignored);
  }
  return indices;
}

LaunchedKernel::Failing OutOfRangeOf(const NodeView& node, int input, int64_t limit) {
  const int64_t width = DTypeBytes(node.input(input).dtype);
  return [indices = HostIndices(node, input, limit), input, width](uint64_t element,
                                                                   const ReadInput& read) {
    const auto i = static_cast<int64_t>(element);
    int64_t memory = 0;
    const bool is_readable = read(static_cast<size_t>(input), i * width, width, &memory).ok();
    const int64_t index = indices.At(&memory, 0);
    // If it is none that is refused, something else stands there by now.
    if (!is_readable || indices.IsWithin(index) || indices.IsIgnored(index))
      return indices.OutOfRange(i);
    return indices.OutOfRange(i, index);
  };
}

}  // namespace chorus
