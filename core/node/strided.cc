#include "core/node/strided.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"

namespace chorus::node {
namespace {

void CopyFrom(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, size_t dim,
              size_t element, const char* from, char** to) {
  if (dim == sizes.size()) {
    std::memcpy(*to, from, element);
    *to += element;
    return;
  }
  if (dim + 1 == sizes.size() && strides[dim] == 1) {
    const size_t row = static_cast<size_t>(sizes[dim]) * element;
    std::memcpy(*to, from, row);
    *to += row;
    return;
  }
  for (int64_t i = 0; i < sizes[dim]; ++i) {
    CopyFrom(sizes, strides, dim + 1, element,
             from + i * strides[dim] * static_cast<int64_t>(element), to);
  }
}

}  // namespace

absl::StatusOr<StridedExtent> CheckStrided(const TensorType& type,
                                           const std::vector<int64_t>& strides, int64_t offset,
                                           int64_t arena_bytes) {
  const std::vector<int64_t> sizes = type.sizes();
  const auto outside = [&] {
    return Malformed(absl::StrCat(type.ToString(), " with strides [", absl::StrJoin(strides, ","),
                                  "] from byte ", offset, " does not lie inside an arena of ",
                                  arena_bytes, " bytes"));
  };
  if (offset < 0 || offset > arena_bytes) return outside();
  if (!strides.empty() && strides.size() != sizes.size()) {
    return Malformed(absl::StrCat(strides.size(), " strides for ", type.ToString(), ", which has ",
                                  sizes.size(), " dimensions"));
  }
  const std::vector<int64_t> row_major = RowMajorStrides(sizes);
  StridedExtent extent;
  extent.contiguous = true;
  int64_t last = 0;  // element index of the last element
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t stride = strides.empty() ? row_major[i] : strides[i];
    if (stride < 0) {
      return Malformed(absl::StrCat("stride ", stride, " of dimension ", i, " is negative"));
    }
    if (sizes[i] != 1 && stride != row_major[i]) extent.contiguous = false;
    int64_t reach = 0;
    if (sizes[i] > 0 && (__builtin_mul_overflow(sizes[i] - 1, stride, &reach) ||
                         __builtin_add_overflow(last, reach, &last))) {
      return outside();
    }
  }
  if (type.num_elements() == 0) return extent;
  int64_t end = 0;
  if (__builtin_add_overflow(last, 1, &end) ||
      __builtin_mul_overflow(end, DTypeBytes(type.dtype), &end) || end > arena_bytes - offset) {
    return outside();
  }
  return extent;
}

void CopyStrided(const TensorType& type, const std::vector<int64_t>& strides, const char* from,
                 char* to) {
  const std::vector<int64_t> sizes = type.sizes();
  const std::vector<int64_t> row_major = RowMajorStrides(sizes);
  if (strides.empty() || strides == row_major) {
    std::memcpy(to, from, static_cast<size_t>(type.num_bytes()));
    return;
  }
  if (type.num_elements() == 0) return;
  CopyFrom(sizes, strides, 0, static_cast<size_t>(DTypeBytes(type.dtype)), from, &to);
}

}  // namespace chorus::node
