#include "core/tensor/half.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/tensor/rounding.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

// The value of 16 bits as the standard defines it.
double ValueOf(uint32_t bits, int exponent_bits, int fraction_bits) {
  const double sign = bits >> 15 ? -1 : 1;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const double fraction = bits & ((1u << fraction_bits) - 1);
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(1 + std::ldexp(fraction, -fraction_bits), exponent - bias);
}

template <typename Half>
class HalfTest : public ::testing::Test {
 public:
  static double Value(uint32_t bits) {
    return std::is_same<Half, F16>::value ? ValueOf(bits, 5, 10) : ValueOf(bits, 8, 7);
  }
  static Half OfBits(uint32_t bits) {
    Half half;
    half.bits = static_cast<uint16_t>(bits);
    return half;
  }
};
using Halves = ::testing::Types<F16, BF16>;
TYPED_TEST_SUITE(HalfTest, Halves);

TYPED_TEST(HalfTest, EveryValueIsWhatTheStandardSaysAndComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const TypeParam half = this->OfBits(bits);
    const double want = this->Value(bits);
    const float got = half;
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
      EXPECT_TRUE(std::isnan(static_cast<float>(TypeParam(got)))) << bits;
      continue;
    }
    ASSERT_EQ(got, want) << bits;
    ASSERT_EQ(std::signbit(got), (bits >> 15) != 0) << bits;
    ASSERT_EQ(TypeParam(got).bits, bits);
  }
}

// Between each two neighbours: below, at and above the middle.
TYPED_TEST(HalfTest, RoundsToTheNearestAndTiesToEven) {
  for (uint32_t sign = 0; sign < 0x10000; sign += 0x8000) {
    for (uint32_t low = 0; std::isfinite(this->Value(low + 1)); ++low) {
      const uint32_t high = low + 1;
      const double middle = (this->Value(low) + this->Value(high)) / 2;
      const float at = static_cast<float>(sign ? -middle : middle);
      const float towards_low = std::nextafter(at, 0.0f);
      const float towards_high = std::nextafter(at, sign ? -HUGE_VALF : HUGE_VALF);
      ASSERT_EQ(TypeParam(at).bits, sign | (low % 2 == 0 ? low : high)) << low;
      // The smallest bf16 values lie closer to each other than floats can tell apart.
      if (static_cast<double>(std::fabs(at)) != middle) continue;
      ASSERT_EQ(TypeParam(towards_low).bits, sign | low) << low;
      ASSERT_EQ(TypeParam(towards_high).bits, sign | high) << low;
    }
  }
}

// Also where a float cannot tell the number from the middle of two halves.
TYPED_TEST(HalfTest, DoublesAndIntegersAreRoundedOnce) {
  for (const double sign : {1.0, -1.0}) {
    for (uint32_t low = 0; std::isfinite(this->Value(low + 1)); ++low) {
      const uint32_t high = low + 1;
      const uint32_t sign_bit = sign < 0 ? 0x8000 : 0;
      const double middle = (this->Value(low) + this->Value(high)) / 2;
      ASSERT_EQ(RoundTo<TypeParam>(sign * middle).bits, sign_bit | (low % 2 == 0 ? low : high));
      ASSERT_EQ(RoundTo<TypeParam>(sign * std::nextafter(middle, 0)).bits, sign_bit | low);
      ASSERT_EQ(RoundTo<TypeParam>(sign * std::nextafter(middle, HUGE_VAL)).bits, sign_bit | high);
      if (middle >= 0x1p62 || std::floor(middle) != middle) continue;
      const int64_t whole = static_cast<int64_t>(middle);
      for (const int64_t beside : {-1, 0, 1}) {
        const uint32_t nearest = beside < 0 || (beside == 0 && low % 2 == 0) ? low : high;
        const int64_t number = static_cast<int64_t>(sign) * (whole + beside);
        ASSERT_EQ(TypeParam(ToOdd(number)).bits, sign_bit | nearest) << number;
      }
    }
  }
  EXPECT_EQ(static_cast<float>(RoundTo<TypeParam>(1e300)), HUGE_VALF);
  EXPECT_EQ(static_cast<float>(RoundTo<TypeParam>(-HUGE_VAL)), -HUGE_VALF);
  EXPECT_TRUE(std::isnan(static_cast<float>(RoundTo<TypeParam>(std::nan("")))));
  EXPECT_EQ(RoundTo<float>(1 + 0x1p-11 + 0x1p-30), 1 + 0x1p-11f);
}

TYPED_TEST(HalfTest, WhatIsTooLargeBecomesInfinite) {
  const float largest =
      static_cast<float>(this->Value(this->Value(0x7bff) < 1e5 ? 0x7bff : 0x7f7f));
  EXPECT_EQ(static_cast<float>(TypeParam(largest)), largest);
  EXPECT_EQ(static_cast<float>(TypeParam(std::numeric_limits<float>::max())), HUGE_VALF);
  EXPECT_EQ(static_cast<float>(TypeParam(-HUGE_VALF)), -HUGE_VALF);
  EXPECT_TRUE(std::isnan(static_cast<float>(TypeParam(std::nanf("")))));
}

TEST(F16Test, RoundsToInfinityFromHalfAStepAboveTheLargest) {
  EXPECT_EQ(static_cast<float>(F16(65519.99f)), 65504.0f);
  EXPECT_EQ(static_cast<float>(F16(65520.0f)), HUGE_VALF);
}

}  // namespace
}  // namespace chorus
