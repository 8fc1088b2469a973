// Seeds made of seeds and names.
//
// Threads: any; a pure function. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_BASE_MIX_BITS_H_
#define CHORUS_CORE_BASE_MIX_BITS_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace chorus {

// splitmix64's finaliser (Steele et al. 2014): any bit of x changes all of the result.
inline uint64_t MixBits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
// What it is stepped by: 2^64 over the golden ratio.
inline constexpr uint64_t kMixStep = 0x9e3779b97f4a7c15u;
// FNV-1a: the same on every rank.
inline uint64_t HashOf(absl::string_view bytes) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_MIX_BITS_H_
