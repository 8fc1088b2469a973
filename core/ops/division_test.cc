#include "core/ops/division.h"

#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace chorus {
namespace cuda {
namespace {

// Quotients change at multiples of the divisor.
TEST(DivisionTest, IsExactAroundEveryMultiple) {
  constexpr uint64_t kSeed = 7;
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  const int64_t small = (int64_t{1} << 31) - 1;
  std::vector<int64_t> divisors = {1, 2, 3, 5, 7, 641, 65535, 65536, 65537, small / 2, small - 1};
  for (int bits = 2; bits < 31; ++bits) {
    divisors.push_back((int64_t{1} << bits) - 1);
    divisors.push_back((int64_t{1} << bits) + 1);
    divisors.push_back(int64_t{1} << bits);
    divisors.push_back(static_cast<int64_t>(random() % (uint64_t{1} << bits)) + 1);
  }
  divisors.push_back(small);
  for (const int64_t most : {small, small + 1, int64_t{1} << 40}) {
    for (const int64_t divisor : divisors) {
      const Division division(divisor, most);
      EXPECT_EQ(division.factor != 0, most == small);
      std::vector<int64_t> dividends = {0, 1, most - 1, most};
      for (int i = 0; i < 1000; ++i) {
        const auto n = static_cast<int64_t>(random() % static_cast<uint64_t>(most));
        const int64_t multiple = n / divisor * divisor;
        for (const int64_t near : {n, multiple - 1, multiple, multiple + 1}) {
          if (near >= 0) dividends.push_back(near);
        }
      }
      const int64_t last = most / divisor * divisor;
      dividends.push_back(last);
      dividends.push_back(last - 1);
      for (const int64_t n : dividends) {
        const DividedIndex divided(n, division);
        ASSERT_EQ(divided.outer, n / divisor) << n << " by " << divisor;
        ASSERT_EQ(divided.inner, n % divisor) << n << " by " << divisor;
      }
    }
  }
}

TEST(DivisionTest, WorksWithMoreThanHalfAWord) {
  const int64_t large = int64_t{1} << 40;
  EXPECT_EQ(Division(large - 1, int64_t{1} << 50).Of(int64_t{1} << 50), 1024);
  EXPECT_EQ(Division(large, 5).Of(5), 0);
  EXPECT_EQ(Division(0, 0).Of(0), 0);
}

}  // namespace
}  // namespace cuda
}  // namespace chorus
