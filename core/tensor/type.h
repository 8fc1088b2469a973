// What a tensor is, without its bytes: dtype, dimensions, layout.
//
// Threads: plain data and pure functions. Ownership: values; nothing refers to anything else.
// Errors: what decodes need not be sound, so Validate() comes before sizes are asked for.
#ifndef CHORUS_CORE_TENSOR_TYPE_H_
#define CHORUS_CORE_TENSOR_TYPE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/base/bytes.h"

namespace chorus {

// Numbers are part of the wire formats: append only.
enum class DType : uint8_t {
  kUnspecified = 0,
  kF16 = 1,
  kBF16 = 2,
  kF32 = 3,
  kF64 = 4,
  kI8 = 5,
  kU8 = 6,
  kI16 = 7,
  kI32 = 8,
  kI64 = 9,
  kBool = 10,
  kComplex64 = 11,
  kComplex128 = 12,
};

absl::string_view DTypeName(DType dtype);     // "f32"
DType DTypeFromName(absl::string_view name);  // kUnspecified when unknown
int64_t DTypeBytes(DType dtype);              // of one element; 0 for kUnspecified
bool IsFloating(DType dtype);                 // f16, bf16, f32, f64: may carry a gradient

// A set of dtypes: a bit for each number.
using DTypes = uint32_t;
constexpr DTypes OneDType(DType dtype) { return DTypes{1} << static_cast<int>(dtype); }
inline constexpr DTypes kFloatingDTypes =
    OneDType(DType::kF16) | OneDType(DType::kBF16) | OneDType(DType::kF32) | OneDType(DType::kF64);
inline constexpr DTypes kIntegerDTypes = OneDType(DType::kI8) | OneDType(DType::kU8) |
                                         OneDType(DType::kI16) | OneDType(DType::kI32) |
                                         OneDType(DType::kI64);
inline constexpr DTypes kNumberDTypes = kFloatingDTypes | kIntegerDTypes;
// What this build computes with: all but complex, which decode and are refused.
inline constexpr DTypes kSupportedDTypes = kNumberDTypes | OneDType(DType::kBool);
constexpr bool Contains(DTypes set, DType dtype) {
  return static_cast<int>(dtype) < 32 && (set & OneDType(dtype)) != 0;
}
constexpr bool IsSupported(DType dtype) { return Contains(kSupportedDTypes, dtype); }
std::string DTypeNames(DTypes set);  // "f16, f32 and i64"

// One dimension: a number, or a symbol that a run fixes, with the most that it may be.
struct Dim {
  int64_t size = 0;     // the number, or the symbol's maximum
  int32_t symbol = -1;  // >= 0: the symbol's index in the graph

  Dim() = default;
  Dim(int64_t n) : size(n) {}  // a number is a dimension
  static Dim Symbol(int32_t symbol, int64_t maximum) {
    Dim dim(maximum);
    dim.symbol = symbol;
    return dim;
  }
  bool is_symbolic() const { return symbol >= 0; }
  friend bool operator==(const Dim& a, const Dim& b) {
    return a.size == b.size && a.symbol == b.symbol;
  }
  friend bool operator!=(const Dim& a, const Dim& b) { return !(a == b); }
};

// Row-major is the only layout now; strided data becomes row-major on its way in (External bindings
// carry strides).
enum class Layout : uint8_t { kRowMajor = 0 };

struct TensorType {
  static constexpr int kMaxRank = 16;

  DType dtype = DType::kUnspecified;
  std::vector<Dim> dims;
  Layout layout = Layout::kRowMajor;

  TensorType() = default;
  TensorType(DType t, std::vector<Dim> d) : dtype(t), dims(std::move(d)) {}

  bool is_static() const;
  // Of the dims' sizes (symbols count with their maximum). Validate() has shown it not to overflow.
  int64_t num_elements() const;
  int64_t num_bytes() const;
  std::vector<int64_t> sizes() const;
  std::string ToString() const;  // "f32[4,3]", "f64[]"

  // INVALID_ARGUMENT: unknown dtype, negative size, or more than kMaxRank dims. RESOURCE_EXHAUSTED
  // (kOutOfMemory): more than `max_bytes` bytes in all; if not, no product overflows.
  absl::Status Validate(int64_t max_bytes) const;

  friend bool operator==(const TensorType& a, const TensorType& b) {
    return a.dtype == b.dtype && a.layout == b.layout && a.dims == b.dims;
  }
  friend bool operator!=(const TensorType& a, const TensorType& b) { return !(a == b); }
};

void EncodeType(const TensorType& type, ByteWriter* out);
TensorType DecodeType(ByteReader* in);  // in->ok() tells

// Row-major strides in elements.
std::vector<int64_t> RowMajorStrides(absl::Span<const int64_t> sizes);

}  // namespace chorus

#endif  // CHORUS_CORE_TENSOR_TYPE_H_
