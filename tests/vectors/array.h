// A tensor of a golden vector: its bytes as they lie in memory, row-major.
//
// Plain data, any thread.
#ifndef CHORUS_TESTS_VECTORS_ARRAY_H_
#define CHORUS_TESTS_VECTORS_ARRAY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/tensor/type.h"

namespace chorus {
namespace vectors {

struct Array {
  DType dtype = DType::kUnspecified;
  std::vector<int64_t> shape;
  std::string bytes;  // as many as dtype and shape say

  int64_t size() const;  // elements
  bool floating() const { return IsFloating(dtype); }
  absl::string_view element(int64_t i) const;  // its bytes
  std::string TypeText() const;                // "f32[2,3]"
};

// Appends one element. INVALID_ARGUMENT: the dtype has no such value.
absl::Status AppendFloat(double value, Array* array);     // of a floating type
absl::Status AppendInteger(int64_t value, Array* array);  // of an integer type, or bool: 0 or 1

// An element of a floating array; exact.
double FloatAt(const Array& array, int64_t i);
// Any element for people: enough digits to tell it from its neighbours.
std::string TextAt(const Array& array, int64_t i);

// Equal as `exact` means it: -0 = +0, one NaN = another.
bool SameValue(const Array& a, const Array& b, int64_t i);

// With the dimensions in reverse order.
Array Transposed(const Array& array);
// With size 1 wherever elements do not differ along a dimension: what it can be expanded from.
Array Unexpanded(const Array& array);
Array ZerosLike(const Array& array);

}  // namespace vectors
}  // namespace chorus

#endif  // CHORUS_TESTS_VECTORS_ARRAY_H_
