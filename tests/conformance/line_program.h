// Random programs with faults: what each rank does, and what came of it.
//
// Each rank runs the same calls, with World::Step or without (all_reduces and gradients, in several
// groups, several of them in one compiled function, cut differently on each rank), runs ahead of
// its own results, and fails at random places in random ways.
#ifndef CHORUS_TESTS_CONFORMANCE_LINE_PROGRAM_H_
#define CHORUS_TESTS_CONFORMANCE_LINE_PROGRAM_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/chorus.h"

namespace chorus {
namespace conformance {

enum class Fault {
  kUndefined,     // an operand that is no tensor; looked at by status() only
  kFailed,        // an operand that has failed here
  kShort,         // a compiled function's input is one value short
  kTrace,         // an op that a compiled function cannot have for inputs of a new type
  kImpatient,     // a wait that is too short for its result; no fault of the program
  kAbort,         // the epoch is ended by hand
  kLostBackward,  // a gradient is asked for wrongly
  // What leaves out calls, so that only a number tells where the rank is: with Step.
  kThrow,  // an exception in a compiled function
  kLeave,  // the rest of the step is left out
  kCount,
};

struct LineProgram {
  int ranks = 2;
  bool sim = false;
  bool numbered = true;  // by World::Step; else by their calls alone
  int steps = 0;
  int last_fault = 0;                    // step
  std::vector<std::vector<int>> groups;  // world ranks; the first is everybody
  struct Call {
    int group = 0;
    bool gradient = false;  // two requests of one all_reduce
  };
  std::vector<Call> calls;             // of each step
  std::vector<std::vector<int>> cuts;  // by rank: how many calls each of its runs takes
  std::vector<int> ahead;              // by rank: steps whose results it has not looked at
  struct Fails {
    int step = 0;
    int call = 0;
    int rank = -1;  // -1: all of them
    Fault fault = Fault::kUndefined;
  };
  std::vector<Fails> faults;
};

// The same one from the same seed.
LineProgram MakeLineProgram(uint64_t seed);

struct LineOutcome {
  std::vector<int> right;                            // steps
  std::vector<std::pair<int, std::string>> refused;  // step and error
  std::string wrong;
  // By epoch: the last step that was begun before the rank was in it.
  std::vector<std::pair<int64_t, int>> entered;
};

// The rank's part of it. What a rank may not be refused is `wrong`, too.
LineOutcome RunRank(const LineProgram& program, World& world);

// For people.
std::string Text(const LineProgram& program);

// How many results the rank looks at in a step in which nothing fails.
int64_t ResultsOfAStep(const LineProgram& program, int rank);

// The last step that any rank had begun before it heard of the last fault.
int LastStepOfTrouble(const LineProgram& program, const std::vector<LineOutcome>& outcomes);

// To be read again. INVALID_ARGUMENT: that is no outcome.
std::string ToText(const LineOutcome& outcome);
absl::StatusOr<LineOutcome> LineOutcomeOf(const std::string& text);

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_LINE_PROGRAM_H_
