// Makes programs: the same one from the same seed.
#ifndef CHORUS_TESTS_RANDOM_GENERATE_H_
#define CHORUS_TESTS_RANDOM_GENERATE_H_

#include <cstdint>
#include <string>

#include "tests/random/program.h"

namespace chorus {
namespace random_programs {

// The most ranks that a program has.
constexpr int kMostRanks = 6;

struct GeneratorOptions {
  int orders = 3;         // of gradients, at most
  bool directly = false;  // Complete's
  std::string without;    // no ops whose names contain it; empty: all
};

// A right program (Check and Evaluate agree), whose numbers are of moderate size.
Program Generate(uint64_t seed, const GeneratorOptions& options = {});

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_GENERATE_H_
