// What elements are sorted by, for kernels of the host and of GPUs: unsigned numbers that compare
// as sort.h says that elements do, -0 as +0 and NaN above all.
//
// Threads: pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_SORT_SORT_KEYS_H_
#define CHORUS_CORE_OPS_SORT_SORT_KEYS_H_

#include <cstdint>
#include <type_traits>

#include "core/base/device.h"
#include "core/ops/arithmetic.h"
#include "core/tensor/half.h"

namespace chorus {

CHORUS_DEVICE uint8_t KeyOf(Bool x) { return x ? 1 : 0; }

// An integer counts from the least of its type on.
template <typename T, std::enable_if_t<std::is_integral<T>::value, int> = 0>
CHORUS_DEVICE std::make_unsigned_t<T> KeyOf(T x) {
  using Key = std::make_unsigned_t<T>;
  constexpr Key kSign = std::is_signed<T>::value ? Key{1} << (8 * sizeof(T) - 1) : 0;
  return static_cast<Key>(static_cast<Key>(x) ^ kSign);
}

// Of a sign bit and a magnitude; `infinity` is the largest that is a number.
template <typename Key>
CHORUS_DEVICE Key KeyOfBits(Key bits, Key infinity) {
  constexpr Key kSign = Key{1} << (8 * sizeof(Key) - 1);
  const Key magnitude = static_cast<Key>(bits & (kSign - 1));
  if (magnitude > infinity) return static_cast<Key>(~Key{0});
  return static_cast<Key>((bits & kSign) != 0 ? kSign - magnitude : kSign + magnitude);
}
CHORUS_DEVICE uint16_t KeyOf(F16 x) { return KeyOfBits<uint16_t>(x.bits, 0x7c00); }
CHORUS_DEVICE uint16_t KeyOf(BF16 x) { return KeyOfBits<uint16_t>(x.bits, 0x7f80); }
CHORUS_DEVICE uint32_t KeyOf(float x) { return KeyOfBits<uint32_t>(cuda::BitsOf(x), 0x7f800000); }
CHORUS_DEVICE uint64_t KeyOf(double x) {
  return KeyOfBits<uint64_t>(cuda::BitsOf(x), uint64_t{0x7ff} << 52);
}
template <typename T>
using KeyType = decltype(KeyOf(T()));

// A key with its index below it, by which equal ones differ: there is one order, however it is
// found.
template <typename Key>
struct PackedEntry {
  static constexpr int kIndexBits = 64 - 8 * static_cast<int>(sizeof(Key));
  static constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;
  CHORUS_DEVICE static uint64_t Make(Key key, int64_t index) {
    return uint64_t{key} << kIndexBits | static_cast<uint64_t>(index);
  }
};

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SORT_SORT_KEYS_H_
