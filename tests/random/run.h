// Runs one trainer's part of a program through the public client.
#ifndef CHORUS_TESTS_RANDOM_RUN_H_
#define CHORUS_TESTS_RANDOM_RUN_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "chorus/chorus.h"
#include "tests/random/program.h"

namespace chorus {
namespace random_programs {

// How a trainer makes the calls of its part.
struct Mode {
  bool compiled = false;  // in one compiled function, which is run more than once
  bool donate = false;    // its inputs that the program names
  bool coalesce = false;  // statements that were joined, by one call
  bool shuffled = false;  // in the trainer's own order
  bool waits = false;     // for each statement's results before the next one
  // Of the trainers every other one compiles, and the rest run as often.
  bool by_trainer = false;
};

// What was read of a value: its bytes, or why not.
struct Outcome {
  absl::Status status;
  std::string bytes;
};
using Outcomes = std::map<int, Outcome>;  // by value

struct Part {
  Session session;    // that holds the devices of the trainer's ranks, in their order
  std::string world;  // its name, new for each run of a program
  Mode mode;
  Timeout patience = std::chrono::seconds(20);  // how late a rank may be
};

// Of every observed value of the trainer's ranks. What all of it lacks (no world) is every value's
// error; of a trainer of none it is that of one whose number is negative. `joined` gets the worlds
// that are to be left when all trainers have ended: until then they may need this one.
Outcomes RunPart(const Program& program, int trainer, const Part& part, std::vector<World>* joined);

}  // namespace random_programs
}  // namespace chorus

#endif  // CHORUS_TESTS_RANDOM_RUN_H_
