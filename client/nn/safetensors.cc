#include "chorus/nn/safetensors.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/internal/access.h"
#include "client/nn/json_object.h"
#include "core/base/error.h"
#include "core/base/file.h"
#include "nlohmann/json.hpp"

namespace chorus {
namespace nn {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // of the format's reference reader
constexpr char kMetadata[] = "__metadata__";

struct TypeName {
  DType dtype;
  const char* name;
};
constexpr TypeName kTypes[] = {{DType::kF64, "F64"},   {DType::kF32, "F32"}, {DType::kF16, "F16"},
                               {DType::kBF16, "BF16"}, {DType::kI64, "I64"}, {DType::kI32, "I32"},
                               {DType::kI16, "I16"},   {DType::kI8, "I8"},   {DType::kU8, "U8"},
                               {DType::kBool, "BOOL"}};

const char* NameOf(DType dtype) {
  for (const TypeName& type : kTypes) {
    if (type.dtype == dtype) return type.name;
  }
  return nullptr;
}

absl::Status Malformed(const std::string& path, const std::string& what) {
  return MakeError(Reason::kMalformed, absl::StrCat(path, ": ", what));
}

absl::StatusOr<std::string> ReadBytes(const Tensor& tensor) {
  std::string bytes;
  CHORUS_RETURN_IF_ERROR(internal::Access::ReadInto(tensor, tensor.dtype(), [&](int64_t elements) {
    bytes.resize(static_cast<size_t>(elements * DTypeBytes(tensor.dtype())));
    return &bytes[0];
  }));
  return bytes;
}

std::string LengthBytes(uint64_t length) {
  std::string bytes;
  for (int i = 0; i < kLengthBytes; ++i) bytes.push_back(static_cast<char>(length >> (8 * i)));
  return bytes;
}

}  // namespace

absl::Status SaveTensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  std::vector<std::string> parts(1);  // the header's, which is known last
  int64_t at = 0;
  for (const NamedTensor& named : tensors) {
    if (named.name == kMetadata || header.contains(named.name)) {
      return BadType(absl::StrCat(path, ": \"", named.name, "\" cannot be a tensor's name here"));
    }
    CHORUS_ASSIGN_OR_RETURN(std::string bytes, ReadBytes(named.tensor));
    const auto size = static_cast<int64_t>(bytes.size());
    header[named.name] = {{"dtype", NameOf(named.tensor.dtype())},
                          {"shape", named.tensor.shape()},
                          {"data_offsets", {at, at + size}}};
    at += size;
    parts.push_back(std::move(bytes));
  }
  CHORUS_ASSIGN_OR_RETURN(std::string text, JsonText(path, header));
  // Elements are aligned in a mapped file.
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (static_cast<int64_t>(text.size()) > kMaxHeaderBytes) {
    return BadType(absl::StrCat(path, ": expected names, shapes and metadata of ", kMaxHeaderBytes,
                                " bytes at most, got ", text.size()));
  }
  parts[0] = LengthBytes(text.size()) + text;
  return ReplaceFile(path, {parts.begin(), parts.end()});
}

// --- Reading ------------------------------------------------------------------------------------

struct TensorFile::Content {
  static absl::StatusOr<TensorFile> Read(const std::string& path, HeldBytes held);
  absl::Status Parse();
  absl::Status ParseEntry(const std::string& name, const Json& value);
  absl::Status CheckOffsets() const;

  std::string path;
  HeldBytes held;
  const char* bytes = nullptr;  // held's
  int64_t size = 0;
  int64_t data = 0;  // where the elements begin
  std::vector<Entry> entries;
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };
  std::vector<Range> ranges;  // by entry, behind `data`
  std::map<std::string, std::string> metadata;
};

absl::Status TensorFile::Content::ParseEntry(const std::string& name, const Json& value) {
  const auto refuse = [&](const std::string& what) {
    return Malformed(path, absl::StrCat("tensor \"", name, "\": ", what));
  };
  if (!value.is_object() || !value.contains("dtype") || !value["dtype"].is_string() ||
      !value.contains("shape") || !value["shape"].is_array() || !value.contains("data_offsets") ||
      !value["data_offsets"].is_array() || value["data_offsets"].size() != 2 || value.size() != 3) {
    return refuse("expected dtype, shape and two data_offsets");
  }
  Entry entry;
  entry.name = name;
  const std::string type = value["dtype"].get<std::string>();
  for (const TypeName& row : kTypes) {
    if (type == row.name) entry.dtype = row.dtype;
  }
  if (entry.dtype == DType::kUnspecified) {
    return refuse(absl::StrCat("dtype \"", type, "\" is none that is known here"));
  }
  const auto get_integer = [](const Json& json, int64_t* out) {
    if (!json.is_number_unsigned() || json.get<uint64_t>() > uint64_t{1} << 62) return false;
    *out = json.get<int64_t>();
    return true;
  };
  int64_t expected = DTypeBytes(entry.dtype);
  for (const Json& dim : value["shape"]) {
    int64_t dims = 0;
    if (!get_integer(dim, &dims)) return refuse("expected sizes from 0 in its shape");
    entry.shape.push_back(dims);
  }
  const bool empty = std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end();
  // A caller that multiplies its sizes may not look for a zero first.
  const int64_t most = empty ? std::numeric_limits<int64_t>::max() : size - data;
  for (const int64_t dims : entry.shape) {
    if (dims == 0) continue;
    if (expected > most / dims) {
      return refuse(absl::StrCat("its shape [", absl::StrJoin(entry.shape, ","),
                                 "] has more bytes than ", empty ? "there can be" : "the file"));
    }
    expected *= dims;
  }
  if (empty) expected = 0;
  Range range;
  if (!get_integer(value["data_offsets"][0], &range.begin) ||
      !get_integer(value["data_offsets"][1], &range.end) || range.begin > range.end ||
      range.end > size - data) {
    return refuse(absl::StrCat("its data_offsets are not within the ", size - data,
                               " bytes behind the header"));
  }
  if (range.end - range.begin != expected) {
    return refuse(absl::StrCat(range.end - range.begin, " bytes, expected ", expected, " for ",
                               type, "[", absl::StrJoin(entry.shape, ","), "]"));
  }
  entries.push_back(std::move(entry));
  ranges.push_back(range);
  return absl::OkStatus();
}

// Each byte is one tensor's.
absl::Status TensorFile::Content::CheckOffsets() const {
  std::vector<Range> sorted = ranges;
  std::sort(sorted.begin(), sorted.end(), [](const Range& a, const Range& b) {
    return std::make_pair(a.begin, a.end) < std::make_pair(b.begin, b.end);
  });
  int64_t at = 0;
  for (const Range& range : sorted) {
    if (range.begin != at) {
      return Malformed(
          path, absl::StrCat(range.begin < at ? "tensors overlap" : "there is a hole", " at byte ",
                             std::min(range.begin, at), " behind the header"));
    }
    at = range.end;
  }
  if (at != size - data) {
    return Malformed(path, absl::StrCat(size - data - at, " bytes at the end are no tensor's"));
  }
  return absl::OkStatus();
}

absl::Status TensorFile::Content::Parse() {
  if (size < kLengthBytes) return Malformed(path, "shorter than a header's length");
  uint64_t length = 0;
  for (int i = 0; i < kLengthBytes; ++i) {
    length |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  const int64_t most = std::min(size - kLengthBytes, kMaxHeaderBytes);
  if (length > static_cast<uint64_t>(most)) {
    return Malformed(
        path, absl::StrCat("a header of ", length, " bytes, at most ", most, " were expected"));
  }
  data = kLengthBytes + static_cast<int64_t>(length);
  std::string problem;
  const Json header =
      ParseJsonObject({bytes + kLengthBytes, static_cast<size_t>(length)}, /*depth=*/3, &problem);
  if (!problem.empty()) return Malformed(path, problem);
  for (const auto& item : header.items()) {
    if (item.key() != kMetadata) {
      CHORUS_RETURN_IF_ERROR(ParseEntry(item.key(), item.value()));
      continue;
    }
    if (!item.value().is_object()) return Malformed(path, "its metadata are no strings");
    for (const auto& word : item.value().items()) {
      if (!word.value().is_string()) return Malformed(path, "its metadata are no strings");
      metadata[word.key()] = word.value().get<std::string>();
    }
  }
  return CheckOffsets();
}

absl::StatusOr<TensorFile> TensorFile::Open(const std::string& path) {
  CHORUS_ASSIGN_OR_RETURN(HeldBytes held, MapFile(path));
  return Content::Read(path, std::move(held));
}

absl::StatusOr<TensorFile> TensorFile::Of(const std::string& path, std::string bytes) {
  return Content::Read(path, Hold(std::move(bytes)));
}

absl::StatusOr<TensorFile> TensorFile::Content::Read(const std::string& path, HeldBytes held) {
  auto content = std::make_shared<Content>();
  content->path = path;
  content->bytes = held.bytes.data();
  content->size = static_cast<int64_t>(held.bytes.size());
  content->held = std::move(held);
  CHORUS_RETURN_IF_ERROR(content->Parse());
  return TensorFile(std::move(content));
}

const std::vector<TensorFile::Entry>& TensorFile::entries() const { return content_->entries; }
const std::map<std::string, std::string>& TensorFile::metadata() const {
  return content_->metadata;
}

const TensorFile::Entry* TensorFile::Find(const std::string& name) const {
  return FindIn(content_->entries, name);
}

const TensorFile::Entry* TensorFile::FindIn(const std::vector<Entry>& entries,
                                            const std::string& name) {
  const auto it = std::lower_bound(
      entries.begin(), entries.end(), name,
      [](const Entry& entry, const std::string& wanted) { return entry.name < wanted; });
  return it != entries.end() && it->name == name ? &*it : nullptr;
}

absl::StatusOr<absl::string_view> TensorFile::Bytes(const std::string& name) const {
  const Entry* const entry = Find(name);
  if (entry == nullptr) {
    return MakeError(Reason::kUnknownName,
                     absl::StrCat(content_->path, ": no tensor \"", name, "\""));
  }
  const Content::Range& range =
      content_->ranges[static_cast<size_t>(entry - content_->entries.data())];
  return content_->held.bytes.substr(static_cast<size_t>(content_->data + range.begin),
                                     static_cast<size_t>(range.end - range.begin));
}

absl::StatusOr<Tensor> TensorFile::Read(const std::string& name, const DeviceRef& device,
                                        CallSite site) const {
  CHORUS_ASSIGN_OR_RETURN(const absl::string_view bytes, Bytes(name));
  const Entry& entry = *Find(name);
  Tensor tensor = FromBytes(device, entry.dtype, entry.shape, bytes.data(),
                            static_cast<int64_t>(bytes.size()) / DTypeBytes(entry.dtype), site);
  CHORUS_RETURN_IF_ERROR(tensor.status());
  return tensor;
}

}  // namespace nn
}  // namespace chorus
