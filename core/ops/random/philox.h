// Philox 4x32-10, a counter-based random number generator: a bijection of 128-bit counters under a
// 64-bit key, whose outputs pass the known tests of randomness.
//
// J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: Parallel random numbers: as easy as 1, 2, 3.
// Proceedings of SC11, 2011.
//
// A constant expression, so that kernels of a GPU are made of it as well.
//
// Threads: pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_RANDOM_PHILOX_H_
#define CHORUS_CORE_OPS_RANDOM_PHILOX_H_

#include <array>
#include <cstdint>

namespace chorus {

using PhiloxBlock = std::array<uint32_t, 4>;

constexpr PhiloxBlock Philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(a)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_RANDOM_PHILOX_H_
