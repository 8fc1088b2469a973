#include "core/tensor/type.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

struct DTypeInfo {
  absl::string_view name;
  int64_t bytes;
};

// Indexed by the enum's number.
constexpr DTypeInfo kDTypes[] = {
    {"unspecified", 0}, {"f16", 2}, {"bf16", 2}, {"f32", 4},  {"f64", 8}, {"i8", 1},    {"u8", 1},
    {"i16", 2},         {"i32", 4}, {"i64", 8},  {"bool", 1}, {"c64", 8}, {"c128", 16},
};
constexpr size_t kNumDTypes = sizeof(kDTypes) / sizeof(kDTypes[0]);

const DTypeInfo& Info(DType dtype) {
  const size_t index = static_cast<size_t>(dtype);
  return kDTypes[index < kNumDTypes ? index : 0];
}

}  // namespace

absl::string_view DTypeName(DType dtype) { return Info(dtype).name; }

DType DTypeFromName(absl::string_view name) {
  for (size_t i = 1; i < kNumDTypes; ++i) {
    if (kDTypes[i].name == name) return static_cast<DType>(i);
  }
  return DType::kUnspecified;
}

int64_t DTypeBytes(DType dtype) { return Info(dtype).bytes; }
bool IsFloating(DType dtype) { return Contains(kFloatingDTypes, dtype); }

std::string DTypeNames(DTypes set) {
  std::vector<absl::string_view> names;
  for (size_t i = 1; i < kNumDTypes; ++i) {
    if (Contains(set, static_cast<DType>(i))) names.push_back(kDTypes[i].name);
  }
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : i + 1 == names.size() ? " and " : ", ", names[i]);
  }
  return text;
}

bool TensorType::is_static() const {
  for (const Dim& dim : dims) {
    if (dim.is_symbolic()) return false;
  }
  return true;
}

int64_t TensorType::num_elements() const {
  int64_t n = 1;
  for (const Dim& dim : dims) n *= dim.size;
  return n;
}

int64_t TensorType::num_bytes() const { return num_elements() * DTypeBytes(dtype); }

std::vector<int64_t> TensorType::sizes() const {
  std::vector<int64_t> result;
  result.reserve(dims.size());
  for (const Dim& dim : dims) result.push_back(dim.size);
  return result;
}

std::string TensorType::ToString() const {
  std::string result = absl::StrCat(DTypeName(dtype), "[");
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i > 0) result += ",";
    if (dims[i].is_symbolic()) absl::StrAppend(&result, "s", dims[i].symbol, "<=");
    absl::StrAppend(&result, dims[i].size);
  }
  return result + "]";
}

namespace {

absl::Status TooLarge(const TensorType& type, int64_t max_bytes) {
  return MakeError(
      Reason::kOutOfMemory,
      absl::StrCat(type.ToString(), " is larger than the limit of ", max_bytes, " bytes"));
}

}  // namespace

absl::Status TensorType::Validate(int64_t max_bytes) const {
  if (DTypeBytes(dtype) == 0) {
    return Malformed(absl::StrCat("unknown dtype number ", static_cast<int>(dtype)));
  }
  if (dims.size() > kMaxRank) {
    return BadType(
        absl::StrCat("at most ", kMaxRank, " dimensions are possible, got ", dims.size()));
  }
  // A zero dimension makes the product 0 whatever the others are, so strides computed from the
  // others could still overflow: the product is taken over the non-zero sizes.
  int64_t bytes = DTypeBytes(dtype);
  for (const Dim& dim : dims) {
    if (dim.size < 0) {
      return BadType(absl::StrCat(ToString(), " has a negative dimension, ", dim.size));
    }
    const int64_t size = dim.size > 1 ? dim.size : 1;
    if (bytes > max_bytes / size) {
      return TooLarge(*this, max_bytes);
    }
    bytes *= size;
  }
  if (bytes > max_bytes) {
    return TooLarge(*this, max_bytes);
  }
  return absl::OkStatus();
}

void EncodeType(const TensorType& type, ByteWriter* out) {
  out->Put(static_cast<uint8_t>(type.dtype));
  out->Put(static_cast<uint8_t>(type.layout));
  out->PutVarint(type.dims.size());
  for (const Dim& dim : type.dims) {
    out->PutSigned(dim.size);
    out->PutVarint(static_cast<uint64_t>(int64_t{dim.symbol} + 1));
  }
}

TensorType DecodeType(ByteReader* in) {
  TensorType type;
  const uint8_t dtype = in->Get<uint8_t>();
  const uint8_t layout = in->Get<uint8_t>();
  const size_t rank = in->GetCount(2);
  if (dtype >= kNumDTypes || layout != static_cast<uint8_t>(Layout::kRowMajor) ||
      rank > TensorType::kMaxRank) {
    in->Fail();
    return type;
  }
  type.dtype = static_cast<DType>(dtype);
  type.dims.reserve(rank);
  for (size_t i = 0; i < rank; ++i) {
    Dim dim(in->GetSigned());
    const uint64_t symbol = in->GetVarint();
    if (symbol > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
      in->Fail();
      return TensorType();
    }
    dim.symbol = static_cast<int32_t>(symbol) - 1;
    type.dims.push_back(dim);
  }
  return in->ok() ? type : TensorType();
}

std::vector<int64_t> RowMajorStrides(absl::Span<const int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  return strides;
}

}  // namespace chorus
