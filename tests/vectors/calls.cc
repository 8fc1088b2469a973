#include "tests/vectors/calls.h"

#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace vectors {
namespace {

template <typename T>
Tensor UploadAs(const DeviceRef& device, const Array& array) {
  std::vector<T> values(static_cast<size_t>(array.size()));
  std::memcpy(values.data(), array.bytes.data(), array.bytes.size());
  return FromHost<T>(device, values, array.shape);
}

template <typename T>
absl::StatusOr<Array> DownloadAs(const Tensor& tensor) {
  CHORUS_ASSIGN_OR_RETURN(const std::vector<T> values, tensor.Read<T>());
  Array array;
  array.dtype = tensor.dtype();
  array.shape = tensor.shape();
  array.bytes.assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  return array;
}

Tensor UploadLeaf(const DeviceRef& device, const Array& array, bool requires_grad) {
  Tensor tensor;
  switch (array.dtype) {
    case DType::kF32:
      tensor = UploadAs<float>(device, array);
      break;
    case DType::kF64:
      tensor = UploadAs<double>(device, array);
      break;
    case DType::kI8:
      tensor = UploadAs<int8_t>(device, array);
      break;
    case DType::kU8:
      tensor = UploadAs<uint8_t>(device, array);
      break;
    case DType::kI16:
      tensor = UploadAs<int16_t>(device, array);
      break;
    case DType::kI32:
      tensor = UploadAs<int32_t>(device, array);
      break;
    case DType::kI64:
      tensor = UploadAs<int64_t>(device, array);
      break;
    default:
      break;
  }
  if (requires_grad && array.floating()) tensor.RequireGrad();
  return tensor;
}

}  // namespace

Tensor Upload(const DeviceRef& device, const Array& array, Layout layout, bool requires_grad) {
  switch (layout) {
    case Layout::kTransposed: {
      std::vector<int64_t> reversed(array.shape.size());
      std::iota(reversed.rbegin(), reversed.rend(), 0);
      return Transpose(UploadLeaf(device, Transposed(array), requires_grad), reversed);
    }
    case Layout::kExpanded:
      return Expand(UploadLeaf(device, Unexpanded(array), requires_grad), array.shape);
    case Layout::kContiguous:
      break;
  }
  return UploadLeaf(device, array, requires_grad);
}

absl::StatusOr<Array> Download(const Tensor& tensor) {
  CHORUS_RETURN_IF_ERROR(tensor.Wait());
  switch (tensor.dtype()) {
    case DType::kF32:
      return DownloadAs<float>(tensor);
    case DType::kF64:
      return DownloadAs<double>(tensor);
    case DType::kI8:
      return DownloadAs<int8_t>(tensor);
    case DType::kU8:
      return DownloadAs<uint8_t>(tensor);
    case DType::kI16:
      return DownloadAs<int16_t>(tensor);
    case DType::kI32:
      return DownloadAs<int32_t>(tensor);
    case DType::kI64:
      return DownloadAs<int64_t>(tensor);
    default:
      return BadType(absl::StrCat("got a tensor of ", DTypeName(tensor.dtype())));
  }
}

absl::StatusOr<std::vector<Tensor>> Call(const Vector& v, int rank, const Group& group,
                                         const std::vector<Tensor>& x) {
  const Attributes& a = v.attributes;
  switch (v.op) {
    case Op::kBroadcast:
      return std::vector<Tensor>{Broadcast(x[0], a.root, group)};
    case Op::kReduce:
      return std::vector<Tensor>{Reduce(x[0], a.root, group, a.reduction)};
    case Op::kAllReduce:
      return std::vector<Tensor>{AllReduce(x[0], group, a.reduction)};
    case Op::kReduceScatter:
      return std::vector<Tensor>{ReduceScatter(x, group, a.reduction)};
    case Op::kAllGather:
      return AllGather(x[0], group);
    default:
      break;
  }
  (void)rank;
  return Unsupported(absl::StrCat("this runner cannot call ", OpName(v.op)));
}

}  // namespace vectors
}  // namespace chorus
