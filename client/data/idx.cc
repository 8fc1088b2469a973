#include "chorus/data/idx.h"

#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/data/host_elements.h"
#include "core/base/error.h"
#include "core/base/file.h"

namespace chorus {
namespace data {
namespace {

using parallel::HostTensor;

constexpr int64_t kHeadBytes = 4;
constexpr int64_t kDimBytes = 4;

class Inflater {
 public:
  explicit Inflater(absl::string_view bytes) {
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
    rest_ = bytes.size();
    ok_ = inflateInit2(&stream_, 16 + MAX_WBITS) == Z_OK;  // gzip's frame
  }
  ~Inflater() { inflateEnd(&stream_); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;

  // The next `size` bytes; false where there are not as many.
  bool Read(char* to, size_t size) {
    while (ok_ && size > 0 && !ended_) {
      // zlib counts in 32 bits.
      const auto chunk = static_cast<uInt>(std::min<size_t>(size, 1u << 30));
      stream_.next_out = reinterpret_cast<Bytef*>(to);
      stream_.avail_out = chunk;
      Step();
      to += chunk - stream_.avail_out;
      size -= chunk - stream_.avail_out;
    }
    return ok_ && size == 0;
  }
  // Whether that was all, and it was sound: each member of a gzip has a checksum at its end.
  bool AtEnd() {
    char byte = 0;
    while (ok_ && !ended_) {
      if (Read(&byte, 1)) return false;
    }
    return ok_;
  }

 private:
  void Step() {
    if (stream_.avail_in == 0) {
      stream_.avail_in = static_cast<uInt>(std::min<size_t>(rest_, 1u << 30));
      rest_ -= stream_.avail_in;
    }
    const int result = inflate(&stream_, Z_NO_FLUSH);
    ok_ = result == Z_STREAM_END || result == Z_OK;  // Z_BUF_ERROR: it is cut
    if (result != Z_STREAM_END) return;
    ended_ = rest_ == 0 && stream_.avail_in == 0;
    // What is behind a member is the next one.
    if (!ended_) ok_ = inflateReset(&stream_) == Z_OK;
  }

  z_stream stream_ = {};
  size_t rest_ = 0;  // behind stream_'s input
  bool ok_ = false;
  bool ended_ = false;
};

// The file's bytes one behind the other, whichever way it has them.
class Source {
 public:
  explicit Source(const HeldBytes& file) : file_(file), rest_(file.bytes) {
    const absl::string_view bytes = file.bytes;
    if (bytes.size() >= 2 && bytes[0] == '\x1f' && bytes[1] == '\x8b') {
      inflater_ = std::make_unique<Inflater>(bytes);
    }
  }

  bool Read(char* to, size_t size) {
    if (inflater_ != nullptr) return inflater_->Read(to, size);
    if (size > rest_.size()) return false;
    std::copy(rest_.begin(), rest_.begin() + static_cast<std::ptrdiff_t>(size), to);
    rest_.remove_prefix(size);
    return true;
  }
  // `size` bytes, where they are or elsewhere; nullptr where there are not as many.
  HeldBytes Take(size_t size) {
    if (inflater_ == nullptr) {
      if (size > rest_.size()) return {};
      const HeldBytes piece{file_.keep, rest_.substr(0, size)};
      rest_.remove_prefix(size);
      return piece;
    }
    std::string bytes(size, '\0');
    return inflater_->Read(&bytes[0], size) ? Hold(std::move(bytes)) : HeldBytes();
  }
  bool AtEnd() { return inflater_ != nullptr ? inflater_->AtEnd() : rest_.empty(); }
  // How many there can be in all.
  int64_t most() const {
    return static_cast<int64_t>(file_.bytes.size()) * (inflater_ != nullptr ? kMostInflated : 1);
  }

 private:
  const HeldBytes& file_;
  absl::string_view rest_;
  std::unique_ptr<Inflater> inflater_;
};

DType TypeOf(uint8_t type) {
  switch (type) {
    case 8:
      return DType::kU8;
    case 9:
      return DType::kI8;
    case 11:
      return DType::kI16;
    case 12:
      return DType::kI32;
    case 13:
      return DType::kF32;
    case 14:
      return DType::kF64;
    default:
      return DType::kUnspecified;
  }
}

absl::StatusOr<HostTensor> Parse(const std::string& path, const HeldBytes& file) {
  const auto refuse = [&path](const std::string& what) {
    return Malformed(absl::StrCat(path, ": ", what));
  };
  Source source(file);
  char head[kHeadBytes];
  if (!source.Read(head, sizeof(head)) || head[0] != 0 || head[1] != 0) {
    return refuse("expected an IDX file: 0, 0, a type and a number of dimensions");
  }
  const auto type = static_cast<uint8_t>(head[2]);
  const DType dtype = TypeOf(type);
  if (dtype == DType::kUnspecified) {
    return Unsupported(
        absl::StrCat(path, ": an IDX file of type ", type, ", expected 8, 9, 11, 12, 13 or 14"));
  }
  const int rank = static_cast<uint8_t>(head[3]);
  if (rank > TensorType::kMaxRank) {
    return refuse(absl::StrCat(rank, " dimensions, at most ", TensorType::kMaxRank, " fit"));
  }
  TensorType tensor(dtype, {});
  Shape shape;
  for (int i = 0; i < rank; ++i) {
    char dim[kDimBytes];
    if (!source.Read(dim, sizeof(dim))) return refuse("cut off in its head");
    int64_t size = 0;
    for (const char byte : dim) size = size << 8 | static_cast<uint8_t>(byte);
    shape.push_back(size);
    tensor.dims.emplace_back(size);
  }
  if (!tensor.Validate(kNoOverflow).ok() || tensor.num_bytes() > source.most()) {
    return refuse(absl::StrCat("it says ", tensor.ToString(), ", which is more than a file of ",
                               file.bytes.size(), " bytes can have"));
  }
  const auto bytes = static_cast<size_t>(tensor.num_bytes());
  HeldBytes elements = source.Take(bytes);
  if (elements.bytes.size() != bytes) {
    return refuse(absl::StrCat("expected ", bytes, " bytes for ", tensor.ToString(),
                               " behind its head, it has fewer or they are damaged"));
  }
  if (!source.AtEnd()) {
    return refuse(absl::StrCat("expected ", bytes, " bytes for ", tensor.ToString(),
                               " behind its head, it has more or they are damaged"));
  }
  const auto width = static_cast<size_t>(DTypeBytes(dtype));
  if (width > 1) {
    std::string swapped(elements.bytes);
    for (size_t i = 0; i < bytes; i += width) {
      std::reverse(swapped.begin() + static_cast<std::ptrdiff_t>(i),
                   swapped.begin() + static_cast<std::ptrdiff_t>(i + width));
    }
    elements = Hold(std::move(swapped));
  }
  HostTensor array =
      HostTensor::OfBytes(elements.keep, dtype, elements.bytes.data(), bytes / width, shape);
  // Of nothing, but in sizes that no tensor has.
  if (!array.status().ok()) return refuse(ErrorOf(array.status()).message);
  return array;
}

}  // namespace

absl::StatusOr<HostTensor> ReadIdx(const std::string& path) {
  CHORUS_ASSIGN_OR_RETURN(const HeldBytes file, MapFile(path));
  return Parse(path, file);
}

absl::StatusOr<HostTensor> ParseIdx(const std::string& path, std::string bytes) {
  return Parse(path, Hold(std::move(bytes)));
}

}  // namespace data
}  // namespace chorus
