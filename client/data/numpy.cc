#include "chorus/data/numpy.h"

#include <zip.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/data/host_elements.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/base/file.h"

namespace chorus {
namespace data {
namespace {

using parallel::HostTensor;

constexpr absl::string_view kMagic("\x93NUMPY", 6);

absl::Status Refuse(const std::string& path, absl::string_view what) {
  return Malformed(absl::StrCat(path, ": ", what));
}

struct TypeName {
  absl::string_view name;
  DType dtype;
};
constexpr TypeName kTypes[] = {{"<f8", DType::kF64}, {"<f4", DType::kF32}, {"<f2", DType::kF16},
                               {"<i8", DType::kI64}, {"<i4", DType::kI32}, {"<i2", DType::kI16},
                               {"|i1", DType::kI8},  {"|u1", DType::kU8},  {"|b1", DType::kBool}};

// What a header says: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
struct Header {
  std::string descr;
  bool fortran = false;
  Shape shape;
};

// Reads the few forms of Python's that NumPy writes there.
class HeaderReader {
 public:
  explicit HeaderReader(absl::string_view text) : rest_(text) {}

  // Empty: it was read; else what is wrong.
  std::string Read(Header* out) {
    if (!Eat('{')) return "its header is no dictionary";
    bool has_descr = false, has_order = false, has_shape = false;
    while (!Eat('}')) {
      std::string key;
      if (!String(&key) || !Eat(':')) return "its header is no dictionary";
      bool* const seen = key == "descr"           ? &has_descr
                         : key == "fortran_order" ? &has_order
                         : key == "shape"         ? &has_shape
                                                  : nullptr;
      if (seen == nullptr) {
        return absl::StrCat("its header has an unknown key \"", Printable(key), "\"");
      }
      if (*seen) return absl::StrCat("its header has ", key, " twice");
      *seen = true;
      if (seen == &has_descr && !String(&out->descr)) {
        structured_ = Peek('[');
        return "its dtype is no plain one";
      }
      if (seen == &has_order && !Bool(&out->fortran)) return "fortran_order is no bool";
      if (seen == &has_shape && !Tuple(&out->shape)) return "its shape is no tuple of sizes";
      if (!Eat(',') && !Peek('}')) return "its header is no dictionary";
    }
    SkipSpace();
    if (!rest_.empty()) return "its header has more than a dictionary";
    if (!has_descr || !has_order || !has_shape) {
      return "its header lacks descr, fortran_order or shape";
    }
    return "";
  }
  // A list of fields, where a dtype should be.
  bool structured() const { return structured_; }

 private:
  void SkipSpace() {
    while (!rest_.empty() && (rest_[0] == ' ' || rest_[0] == '\n')) rest_.remove_prefix(1);
  }
  bool Peek(char c) {
    SkipSpace();
    return !rest_.empty() && rest_[0] == c;
  }
  bool Eat(char c) {
    if (!Peek(c)) return false;
    rest_.remove_prefix(1);
    return true;
  }
  bool String(std::string* out) {
    const char quote = Peek('"') ? '"' : '\'';
    if (!Eat(quote)) return false;
    const size_t end = rest_.find(quote);
    if (end == absl::string_view::npos) return false;
    *out = std::string(rest_.substr(0, end));
    rest_.remove_prefix(end + 1);
    return out->find('\\') == std::string::npos;
  }
  bool Bool(bool* out) {
    SkipSpace();
    *out = absl::ConsumePrefix(&rest_, "True");
    return *out || absl::ConsumePrefix(&rest_, "False");
  }
  bool Tuple(Shape* out) {
    if (!Eat('(')) return false;
    while (!Eat(')')) {
      SkipSpace();
      const size_t end = std::min(rest_.find_first_not_of("0123456789"), rest_.size());
      int64_t size = 0;
      if (!absl::SimpleAtoi(rest_.substr(0, end), &size)) return false;
      rest_.remove_prefix(end);
      absl::ConsumePrefix(&rest_, "L");  // Python 2's, behind a long integer
      // (3) is a number.
      if (!Eat(',') && (!Peek(')') || out->empty())) return false;
      out->push_back(size);
    }
    return true;
  }

  absl::string_view rest_;
  bool structured_ = false;
};

// Elements in Fortran's order, in C's.
std::string RowMajor(absl::string_view from, const Shape& shape, size_t width) {
  std::string to(from.size(), '\0');
  std::vector<size_t> strides;  // of `from`, in bytes
  size_t stride = width;
  for (const int64_t dim : shape) {
    strides.push_back(stride);
    stride *= static_cast<size_t>(dim);
  }
  std::vector<int64_t> index(shape.size());
  size_t source = 0;
  for (size_t at = 0; at < to.size(); at += width) {
    std::memcpy(&to[at], from.data() + source, width);
    for (size_t d = shape.size(); d-- > 0;) {
      source += strides[d];
      if (++index[d] < shape[d]) break;
      source -= strides[d] * static_cast<size_t>(shape[d]);
      index[d] = 0;
    }
  }
  return to;
}

absl::StatusOr<HostTensor> ReadArray(const std::string& path, const HeldBytes& file) {
  ByteReader in(file.bytes);
  if (in.GetRaw(kMagic.size()) != kMagic) {
    return Refuse(path, "expected a .npy file: it begins with other bytes");
  }
  const auto major = in.Get<uint8_t>();
  const auto minor = in.Get<uint8_t>();
  if (in.ok() && (major < 1 || major > 3 || minor != 0)) {
    return Unsupported(absl::StrCat(path, ": version ", major, ".", minor,
                                    " of the .npy format, expected 1.0, 2.0 or 3.0"));
  }
  const size_t length = major == 1 ? in.Get<uint16_t>() : in.Get<uint32_t>();
  const absl::string_view text = in.GetRaw(length);
  if (!in.ok()) return Refuse(path, "cut off in its header");
  Header header;
  HeaderReader reader(text);
  const std::string problem = reader.Read(&header);
  if (reader.structured()) {
    return Unsupported(absl::StrCat(path, ": a structured dtype, expected a plain one"));
  }
  if (!problem.empty()) return Refuse(path, problem);
  DType dtype = DType::kUnspecified;
  for (const TypeName& type : kTypes) {
    if (header.descr == type.name) dtype = type.dtype;
  }
  if (dtype == DType::kUnspecified) {
    return Unsupported(absl::StrCat(path, ": dtype '", Printable(header.descr),
                                    "', expected '<f8', '<f4', '<f2', '<i8', '<i4', '<i2', '|i1', "
                                    "'|u1' or '|b1'"));
  }
  const TensorType type(dtype, {header.shape.begin(), header.shape.end()});
  const absl::string_view elements = in.GetRaw(in.remaining());
  if (!type.Validate(kNoOverflow).ok() ||
      type.num_bytes() != static_cast<int64_t>(elements.size())) {
    return Refuse(path, absl::StrCat("it says ", type.ToString(), ", but has ", elements.size(),
                                     " bytes behind its header"));
  }
  const auto width = static_cast<size_t>(DTypeBytes(dtype));
  HeldBytes held{file.keep, elements};
  if (header.fortran && header.shape.size() > 1) {
    held = Hold(RowMajor(elements, header.shape, width));
  }
  HostTensor array = HostTensor::OfBytes(held.keep, dtype, held.bytes.data(),
                                         held.bytes.size() / width, header.shape);
  // Of nothing, but in sizes that no tensor has.
  if (!array.status().ok()) return Refuse(path, ErrorOf(array.status()).message);
  return array;
}

// --- Archives -----------------------------------------------------------------------------------

struct CloseSource {
  void operator()(zip_source_t* source) const { zip_source_free(source); }
};
struct CloseArchive {
  void operator()(zip_t* archive) const { zip_discard(archive); }
};
struct CloseMember {
  void operator()(zip_file_t* member) const { zip_fclose(member); }
};

std::string TextOf(zip_error_t* error) {
  std::string text = zip_error_strerror(error);
  zip_error_fini(error);
  return text;
}

// A member's bytes, checked against its checksum.
absl::StatusOr<HeldBytes> ReadMember(zip_t* archive, zip_uint64_t index, const std::string& path) {
  zip_stat_t info;
  zip_stat_init(&info);
  constexpr zip_uint64_t kNeeded = ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD;
  if (zip_stat_index(archive, index, 0, &info) != 0 || (info.valid & kNeeded) != kNeeded) {
    return Refuse(path, zip_strerror(archive));
  }
  if (info.comp_method != ZIP_CM_STORE && info.comp_method != ZIP_CM_DEFLATE) {
    return Unsupported(absl::StrCat(path, ": compression ", info.comp_method,
                                    " of zip, expected stored or deflated"));
  }
  if (info.size / kMostInflated > info.comp_size) {
    return Refuse(path, absl::StrCat("it says ", info.size, " bytes, which is more than ",
                                     info.comp_size, " compressed ones can have"));
  }
  const std::unique_ptr<zip_file_t, CloseMember> member(zip_fopen_index(archive, index, 0));
  if (member == nullptr) return Refuse(path, zip_strerror(archive));
  std::string bytes(info.size, '\0');
  zip_uint64_t at = 0;
  while (at < info.size) {
    const zip_int64_t count = zip_fread(member.get(), &bytes[at], info.size - at);
    if (count < 0) return Refuse(path, zip_file_strerror(member.get()));
    if (count == 0) return Refuse(path, "cut off");
    at += static_cast<zip_uint64_t>(count);
  }
  // The checksum is looked at where the end is met.
  char byte = 0;
  const zip_int64_t rest = zip_fread(member.get(), &byte, 1);
  if (rest < 0) return Refuse(path, zip_file_strerror(member.get()));
  if (rest > 0) return Refuse(path, absl::StrCat("more than the ", info.size, " bytes it says"));
  return Hold(std::move(bytes));
}

absl::StatusOr<std::map<std::string, HostTensor>> ReadArchive(const std::string& path,
                                                              const HeldBytes& file) {
  // To libzip that is an archive of nothing.
  if (file.bytes.empty()) return Refuse(path, "expected an .npz file, a zip archive: it is empty");
  zip_error_t error;
  zip_error_init(&error);
  std::unique_ptr<zip_source_t, CloseSource> source(
      zip_source_buffer_create(file.bytes.data(), file.bytes.size(), /*freep=*/0, &error));
  if (source == nullptr) return Refuse(path, TextOf(&error));
  const std::unique_ptr<zip_t, CloseArchive> archive(
      zip_open_from_source(source.get(), ZIP_RDONLY | ZIP_CHECKCONS, &error));
  if (archive == nullptr) {
    return Refuse(path, absl::StrCat("expected an .npz file, a zip archive: ", TextOf(&error)));
  }
  (void)source.release();  // the archive's from now on
  zip_error_fini(&error);
  // Members that share their compressed bytes would be as many copies.
  zip_uint64_t left = static_cast<zip_uint64_t>(file.bytes.size());
  std::map<std::string, HostTensor> arrays;
  const zip_int64_t count = zip_get_num_entries(archive.get(), 0);
  for (zip_int64_t i = 0; i < count; ++i) {
    const auto index = static_cast<zip_uint64_t>(i);
    const char* const named = zip_get_name(archive.get(), index, ZIP_FL_ENC_GUESS);
    if (named == nullptr) return Refuse(path, zip_strerror(archive.get()));
    const absl::string_view name = named;
    const std::string where = absl::StrCat(path, ": ", Printable(name));
    if (!absl::EndsWith(name, ".npy")) return Refuse(where, "expected members NAME.npy");
    zip_stat_t info;
    zip_stat_init(&info);
    if (zip_stat_index(archive.get(), index, 0, &info) != 0 || info.comp_size > left) {
      return Refuse(where, "members have more bytes than the archive");
    }
    left -= info.comp_size;
    CHORUS_ASSIGN_OR_RETURN(const HeldBytes bytes, ReadMember(archive.get(), index, where));
    CHORUS_ASSIGN_OR_RETURN(HostTensor array, ReadArray(where, bytes));
    const std::string key(absl::StripSuffix(name, ".npy"));
    if (!arrays.emplace(key, std::move(array)).second) return Refuse(where, "it is there twice");
  }
  return arrays;
}

}  // namespace

absl::StatusOr<HostTensor> ReadNpy(const std::string& path) {
  CHORUS_ASSIGN_OR_RETURN(const HeldBytes file, MapFile(path));
  return ReadArray(path, file);
}

absl::StatusOr<HostTensor> ParseNpy(const std::string& path, std::string bytes) {
  return ReadArray(path, Hold(std::move(bytes)));
}

absl::StatusOr<std::map<std::string, HostTensor>> ReadNpz(const std::string& path) {
  CHORUS_ASSIGN_OR_RETURN(const HeldBytes file, MapFile(path));
  return ReadArchive(path, file);
}

absl::StatusOr<std::map<std::string, HostTensor>> ParseNpz(const std::string& path,
                                                           std::string bytes) {
  return ReadArchive(path, Hold(std::move(bytes)));
}

}  // namespace data
}  // namespace chorus
