#include "tests/vectors/array.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/tensor/half.h"

namespace chorus {
namespace vectors {
namespace {

template <typename T>
void Append(T value, Array* array) {
  array->bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
T At(const Array& array, int64_t i) {
  T value;
  std::memcpy(&value, array.element(i).data(), sizeof(value));
  return value;
}

template <typename T>
absl::Status AppendIfInRange(int64_t value, Array* array) {
  if (value < std::numeric_limits<T>::min() || value > std::numeric_limits<T>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(value, " is no ", DTypeName(array->dtype)));
  }
  Append(static_cast<T>(value), array);
  return absl::OkStatus();
}

// For each index of `to`: the element of `from` at the sum of index times stride over dimensions.
void CopyStrided(const Array& from, const std::vector<int64_t>& strides, Array* to) {
  std::vector<int64_t> index(to->shape.size(), 0);
  const int64_t size = to->size();
  for (int64_t n = 0; n < size; ++n) {
    int64_t offset = 0;
    for (size_t d = 0; d < index.size(); ++d) offset += index[d] * strides[d];
    const absl::string_view element = from.element(offset);
    to->bytes.append(element.data(), element.size());
    for (size_t d = index.size(); d-- > 0;) {
      if (++index[d] < to->shape[d]) break;
      index[d] = 0;
    }
  }
}

}  // namespace

int64_t Array::size() const {
  int64_t elements = 1;
  for (const int64_t dim : shape) elements *= dim;
  return elements;
}

absl::string_view Array::element(int64_t i) const {
  const auto width = static_cast<size_t>(DTypeBytes(dtype));
  return absl::string_view(bytes).substr(static_cast<size_t>(i) * width, width);
}

std::string Array::TypeText() const {
  return TensorType(dtype, {shape.begin(), shape.end()}).ToString();
}

absl::Status AppendFloat(double value, Array* array) {
  const auto narrow = static_cast<float>(value);
  switch (array->dtype) {
    case DType::kF64:
      Append(value, array);
      return absl::OkStatus();
    case DType::kF32:
      // A decimal of a float is not always the float's value, but it is in range.
      if (std::isinf(narrow) && !std::isinf(value)) break;
      Append(narrow, array);
      return absl::OkStatus();
    case DType::kF16: {
      const F16 half(narrow);
      if (!std::isnan(value) && static_cast<double>(static_cast<float>(half)) != value) break;
      Append(half, array);
      return absl::OkStatus();
    }
    case DType::kBF16: {
      const BF16 half(narrow);
      if (!std::isnan(value) && static_cast<double>(static_cast<float>(half)) != value) break;
      Append(half, array);
      return absl::OkStatus();
    }
    default:
      break;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(absl::StrFormat("%.17g", value), " is no ", DTypeName(array->dtype)));
}

absl::Status AppendInteger(int64_t value, Array* array) {
  switch (array->dtype) {
    case DType::kI8:
      return AppendIfInRange<int8_t>(value, array);
    case DType::kU8:
      return AppendIfInRange<uint8_t>(value, array);
    case DType::kI16:
      return AppendIfInRange<int16_t>(value, array);
    case DType::kI32:
      return AppendIfInRange<int32_t>(value, array);
    case DType::kI64:
      return AppendIfInRange<int64_t>(value, array);
    case DType::kBool:
      if (value == 0 || value == 1) {
        Append(static_cast<uint8_t>(value), array);
        return absl::OkStatus();
      }
      break;
    default:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat(value, " is no ", DTypeName(array->dtype)));
}

double FloatAt(const Array& array, int64_t i) {
  switch (array.dtype) {
    case DType::kF32:
      return At<float>(array, i);
    case DType::kF16:
      return static_cast<float>(At<F16>(array, i));
    case DType::kBF16:
      return static_cast<float>(At<BF16>(array, i));
    default:
      return At<double>(array, i);
  }
}

std::string TextAt(const Array& array, int64_t i) {
  switch (array.dtype) {
    case DType::kF64:
      return absl::StrFormat("%.17g", FloatAt(array, i));
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
      return absl::StrFormat("%.9g", FloatAt(array, i));
    case DType::kI8:
      return absl::StrCat(At<int8_t>(array, i));
    case DType::kI16:
      return absl::StrCat(At<int16_t>(array, i));
    case DType::kI32:
      return absl::StrCat(At<int32_t>(array, i));
    case DType::kI64:
      return absl::StrCat(At<int64_t>(array, i));
    default:  // u8, and bool, of which a wrong one may be 2
      return absl::StrCat(At<uint8_t>(array, i));
  }
}

bool SameValue(const Array& a, const Array& b, int64_t i) {
  if (!a.floating()) return a.element(i) == b.element(i);
  const double x = FloatAt(a, i);
  const double y = FloatAt(b, i);
  return x == y || (std::isnan(x) && std::isnan(y));
}

Array Transposed(const Array& array) {
  Array transposed;
  transposed.dtype = array.dtype;
  transposed.shape.assign(array.shape.rbegin(), array.shape.rend());
  std::vector<int64_t> strides = RowMajorStrides(array.shape);
  std::reverse(strides.begin(), strides.end());
  CopyStrided(array, strides, &transposed);
  return transposed;
}

Array Unexpanded(const Array& array) {
  Array smaller;
  smaller.dtype = array.dtype;
  smaller.shape = array.shape;
  const std::vector<int64_t> strides = RowMajorStrides(array.shape);
  const int64_t size = array.size();
  for (size_t d = 0; d < array.shape.size(); ++d) {
    if (array.shape[d] == 0) continue;
    bool varies = false;
    for (int64_t i = 0; i < size && !varies; ++i) {
      const int64_t along = i / strides[d] % array.shape[d];
      varies = array.element(i) != array.element(i - along * strides[d]);
    }
    if (!varies) smaller.shape[d] = 1;
  }
  CopyStrided(array, strides, &smaller);
  return smaller;
}

Array ZerosLike(const Array& array) {
  Array zeros = array;
  zeros.bytes.assign(array.bytes.size(), '\0');
  return zeros;
}

}  // namespace vectors
}  // namespace chorus
