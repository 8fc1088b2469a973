// What is wrong with a program's results, and the smallest program that shows it.
#ifndef CHORUS_TESTS_RANDOM_SEARCH_H_
#define CHORUS_TESTS_RANDOM_SEARCH_H_

#include <string>
#include <vector>

#include "tests/random/program.h"
#include "tests/random/ways.h"

namespace chorus {
namespace random_programs {

struct Finding {
  enum Kind { kNothing, kError, kBits, kValue };
  Kind kind = kNothing;
  std::string way;
  std::string text;  // which value, what was got and what is right

  bool found() const { return kind != kNothing; }
};

struct Counts {
  int64_t programs = 0;
  int64_t runs = 0;       // of a program in a way
  int64_t numbers = 0;    // compared with the evaluator
  int64_t unknown = 0;    // that it does not know
  int64_t gradients = 0;  // programs with gradients, by the highest order
  int64_t second = 0;
  int64_t third = 0;
};
std::string CountsText(const Counts& counts);

// Runs it in every way, the first of which has the host's bits: no errors, equal bits, right
// values.
Finding Test(const Program& program, const std::vector<Way>& ways, Runner* runner, Counts* counts);

// The way of that name, behind those that it is compared with.
std::vector<Way> WaysFor(const std::string& name);

// A smaller program in which the same is found: in the same way, of the same kind.
Program Shrink(const Program& program, const Finding& finding, Runner* runner, int most_tries);

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_SEARCH_H_
