// Little-endian encoding of numbers and byte strings: frames, graphs, plans and errors use it.
//
// A ByteReader never reads past its input, whatever the input says: after the first fault every
// read gives zero and ok() is false, so a decoder checks once at the end (and before it trusts a
// count). Input that another process can still change must be copied before it is read.
//
// Threads: thread-compatible. Ownership: a reader refers to its input. Errors: ok(), as said.
#ifndef CHORUS_CORE_BASE_BYTES_H_
#define CHORUS_CORE_BASE_BYTES_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "absl/strings/string_view.h"

namespace chorus {

class ByteWriter {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_arithmetic<T>::value || std::is_enum<T>::value, "numbers only");
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  // Unsigned LEB128: small numbers take one byte.
  void PutVarint(uint64_t value) {
    while (value >= 0x80) {
      bytes_.push_back(static_cast<char>(value | 0x80));
      value >>= 7;
    }
    bytes_.push_back(static_cast<char>(value));
  }
  // Zigzag, so that small negative numbers are short as well.
  void PutSigned(int64_t value) {
    PutVarint((static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63));
  }
  // Length, then the bytes.
  void PutString(absl::string_view value) {
    PutVarint(value.size());
    bytes_.append(value.data(), value.size());
  }
  void PutRaw(const void* data, size_t size) {
    bytes_.append(static_cast<const char*>(data), size);
  }

  // Replaces what was put at `offset`, for a size that is known only at the end.
  template <typename T>
  void Overwrite(size_t offset, T value) {
    static_assert(std::is_arithmetic<T>::value || std::is_enum<T>::value, "numbers only");
    std::memcpy(&bytes_[offset], &value, sizeof(value));
  }

  size_t size() const { return bytes_.size(); }
  // Keeps the capacity, so that a writer used again does not allocate.
  void Clear() { bytes_.clear(); }
  const std::string& bytes() const { return bytes_; }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(absl::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T Get() {
    static_assert(std::is_arithmetic<T>::value, "numbers only; check an enum's range, then cast");
    T value{};
    if (rest_.size() < sizeof(value)) {
      Fail();
      return value;
    }
    std::memcpy(&value, rest_.data(), sizeof(value));
    rest_.remove_prefix(sizeof(value));
    return value;
  }
  uint64_t GetVarint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (rest_.empty()) break;
      const uint8_t byte = static_cast<uint8_t>(rest_[0]);
      rest_.remove_prefix(1);
      if (shift == 63 && byte > 1) break;  // more than 64 bits
      if (shift > 0 && byte == 0) break;   // not the shortest form: each number has one encoding
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    Fail();
    return 0;
  }
  int64_t GetSigned() {
    const uint64_t value = GetVarint();
    return static_cast<int64_t>((value >> 1) ^ (~(value & 1) + 1));
  }
  // A count of things that take at least `min_bytes_each` of what is left: a count that cannot be
  // true fails here, before anything is allocated for it.
  size_t GetCount(size_t min_bytes_each = 1) {
    const uint64_t count = GetVarint();
    if (count > rest_.size() / (min_bytes_each == 0 ? 1 : min_bytes_each)) {
      Fail();
      return 0;
    }
    return static_cast<size_t>(count);
  }
  // Points into the input.
  absl::string_view GetString() {
    const size_t size = GetCount();
    return GetRaw(size);
  }
  absl::string_view GetRaw(size_t size) {
    if (size > rest_.size()) {
      Fail();
      return {};
    }
    const absl::string_view result = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return result;
  }

  void Fail() {
    ok_ = false;
    rest_ = {};
  }
  bool ok() const { return ok_; }
  // True when everything was read and nothing was missing.
  bool Done() const { return ok_ && rest_.empty(); }
  size_t remaining() const { return rest_.size(); }

 private:
  absl::string_view rest_;
  bool ok_ = true;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_BYTES_H_
