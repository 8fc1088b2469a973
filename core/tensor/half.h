// The half types f16 (IEEE 754 binary16) and bf16 (the upper half of an f32) as they lie in memory.
//
// They are for storing and converting; arithmetic is done in float and rounded once, to the nearest
// value, ties to the even one.
//
// Constant expressions, so that kernels of a GPU are made of them as well.
//
// Threads: plain data. Ownership: none. Errors: none; what is too large becomes infinite.
#ifndef CHORUS_CORE_TENSOR_HALF_H_
#define CHORUS_CORE_TENSOR_HALF_H_

#include <cstdint>

namespace chorus {

constexpr uint32_t FloatBits(float value) { return __builtin_bit_cast(uint32_t, value); }
constexpr float FloatOfBits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

struct BF16 {
  uint16_t bits = 0;

  BF16() = default;
  constexpr explicit BF16(float value) {
    const uint32_t f = FloatBits(value);
    if (value != value) {
      bits = static_cast<uint16_t>((f >> 16) | 0x40);  // quiet: rounding could make it infinite
    } else {
      bits = static_cast<uint16_t>((f + 0x7fff + ((f >> 16) & 1)) >> 16);
    }
  }
  constexpr operator float() const { return FloatOfBits(uint32_t{bits} << 16); }
};

struct F16 {
  uint16_t bits = 0;

  F16() = default;
  constexpr explicit F16(float value) {
    const uint32_t f = FloatBits(value);
    const uint32_t sign = (f >> 16) & 0x8000;
    const uint32_t magnitude = f & 0x7fffffff;
    uint32_t result = 0;
    if (magnitude > 0x7f800000) {
      result = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    } else if (magnitude >= 0x47800000) {  // 65536 and more; 65520 rounds up to it below
      result = 0x7c00;
    } else if (magnitude >= 0x38800000) {  // normal: from 2^-14
      result = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
    } else {
      // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the sum's last bits.
      result = FloatBits(FloatOfBits(magnitude) + 0.5f) - FloatBits(0.5f);
    }
    bits = static_cast<uint16_t>(sign | result);
  }
  constexpr operator float() const {
    const uint32_t sign = uint32_t{bits} >> 15 << 31;
    const uint32_t exponent = (bits >> 10) & 0x1f;
    const uint32_t fraction = bits & 0x3ff;
    if (exponent == 0) {
      const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
      return FloatOfBits(sign | FloatBits(magnitude));
    }
    if (exponent == 0x1f) return FloatOfBits(sign | 0x7f800000 | fraction << 13);
    return FloatOfBits(sign | (exponent + 112) << 23 | fraction << 13);
  }
};

static_assert(sizeof(F16) == 2 && sizeof(BF16) == 2, "they lie in arrays of tensors");

}  // namespace chorus

#endif  // CHORUS_CORE_TENSOR_HALF_H_
