#include "core/node/strided.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/runtime/arena_memory.h"

namespace chorus::node {
namespace {

// Sizes and strides without what makes no difference: dimensions of size 1, and those that go on
// where the next one ends.
void Merge(std::vector<int64_t>* sizes, std::vector<int64_t>* strides) {
  size_t count = 0;
  for (size_t i = 0; i < sizes->size(); ++i) {
    const int64_t size = (*sizes)[i];
    const int64_t stride = (*strides)[i];
    if (size == 1) continue;
    if (count > 0 && (*strides)[count - 1] == size * stride) {
      (*sizes)[count - 1] *= size;
      (*strides)[count - 1] = stride;
      continue;
    }
    (*sizes)[count] = size;
    (*strides)[count] = stride;
    ++count;
  }
  if (count == 0) {  // one element
    (*sizes)[count] = 1;
    (*strides)[count] = 1;
    ++count;
  }
  sizes->resize(count);
  strides->resize(count);
}

// `count` elements of so many bytes each; on one side they are `from_stride` elements apart, on the
// other `to_stride`.
template <size_t kBytes>
void CopyRow(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t count) {
  constexpr auto kSize = static_cast<int64_t>(kBytes);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride * kSize, from + i * from_stride * kSize, kBytes);
  }
}

void CopyRow(int64_t bytes, const char* from, int64_t from_stride, char* to, int64_t to_stride,
             int64_t count) {
  if (from_stride == 1 && to_stride == 1) {
    std::memmove(to, from, static_cast<size_t>(count * bytes));
    return;
  }
  switch (bytes) {
    case 1:
      return CopyRow<1>(from, from_stride, to, to_stride, count);
    case 2:
      return CopyRow<2>(from, from_stride, to, to_stride, count);
    case 4:
      return CopyRow<4>(from, from_stride, to, to_stride, count);
    case 8:
      return CopyRow<8>(from, from_stride, to, to_stride, count);
    default:  // c128
      return CopyRow<16>(from, from_stride, to, to_stride, count);
  }
}

// Calls `row(at, stride, count)` for the elements `begin` to `end` in row-major order: `count` of
// them stand `stride` elements apart from element `at` on.
template <typename Row>
void ForEachRow(const TensorType& type, const std::vector<int64_t>& client_strides, int64_t begin,
                int64_t end, Row row) {
  if (begin == end) return;
  std::vector<int64_t> sizes = type.sizes();
  std::vector<int64_t> strides = client_strides.empty() ? RowMajorStrides(sizes) : client_strides;
  if (sizes.empty()) {
    sizes = {1};
    strides = {1};
  }
  Merge(&sizes, &strides);
  const size_t last = sizes.size() - 1;
  // Where `begin` lies, by dimension and in the strided memory.
  std::vector<int64_t> index(sizes.size());
  int64_t rest = begin;
  int64_t at = 0;
  for (size_t i = sizes.size(); i-- > 0;) {
    index[i] = rest % sizes[i];
    rest /= sizes[i];
    at += index[i] * strides[i];
  }
  for (int64_t left = end - begin; left > 0;) {
    const int64_t count = std::min(left, sizes[last] - index[last]);
    row(at, strides[last], count);
    left -= count;
    // The row's end, then the first of the next one.
    index[last] += count;
    at += count * strides[last];
    for (size_t i = last; i > 0 && index[i] == sizes[i]; --i) {
      at += strides[i - 1] - sizes[i] * strides[i];
      index[i] = 0;
      ++index[i - 1];
    }
  }
}

// What a copy takes of so many bytes, which stand in pages that may have to be made: the system
// takes 0.7 to 6 us for each (measured).
int64_t WorkOf(int64_t bytes, int64_t pages) {
  constexpr int64_t kWorkOfPage = 32;
  return 2 * bytes / kBytesOfWork + kWorkOfPage * pages;
}
// Of memory that is strided, from its first byte to its last so many.
int64_t WorkOfStrided(const TensorType& type, std::vector<int64_t> strides, int64_t spanned) {
  // Measured: 30 ns an element that stands alone, 60 a row.
  constexpr int64_t kElementsOfWork = 2;
  std::vector<int64_t> sizes = type.sizes();
  Merge(&sizes, &strides);
  const int64_t elements = type.num_elements();
  const bool apart = strides.back() != 1;
  return WorkOf(type.num_bytes(), std::min(elements, 1 + spanned / PageBytes())) +
         (apart ? elements / kElementsOfWork : 0) + elements / sizes.back();
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
  extent.work =
      extent.contiguous ? WorkOf(end, 1 + end / PageBytes()) : WorkOfStrided(type, strides, end);
  return extent;
}

absl::Status CheckNoOverlap(const TensorType& type, const std::vector<int64_t>& strides) {
  if (strides.empty() || type.num_elements() == 0) return absl::OkStatus();
  const std::vector<int64_t> sizes = type.sizes();
  std::vector<size_t> by_stride;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1) by_stride.push_back(i);
  }
  std::sort(by_stride.begin(), by_stride.end(),
            [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t last = 0;  // of the dimensions so far, as an element index
  for (const size_t i : by_stride) {
    if (strides[i] <= last) {
      return Malformed(absl::StrCat(type.ToString(), " with strides [", absl::StrJoin(strides, ","),
                                    "]: to be written, each element needs a place of its own; "
                                    "dimension ",
                                    i, " goes on in steps of ", strides[i], ", expected at least ",
                                    last + 1));
    }
    last += (sizes[i] - 1) * strides[i];
  }
  return absl::OkStatus();
}

void CopyStrided(const TensorType& type, const std::vector<int64_t>& strides, int64_t begin,
                 int64_t end, const char* from, char* to) {
  const int64_t element = DTypeBytes(type.dtype);
  to += begin * element;
  ForEachRow(type, strides, begin, end, [&](int64_t at, int64_t stride, int64_t count) {
    CopyRow(element, from + at * element, stride, to, 1, count);
    to += count * element;
  });
}

void SpreadStrided(const TensorType& type, const std::vector<int64_t>& strides, int64_t begin,
                   int64_t end, const char* from, char* to) {
  const int64_t element = DTypeBytes(type.dtype);
  from += begin * element;
  ForEachRow(type, strides, begin, end, [&](int64_t at, int64_t stride, int64_t count) {
    CopyRow(element, from, 1, to + at * element, stride, count);
    from += count * element;
  });
}

}  // namespace chorus::node
