// A world of many ranks on a network that delays and loses messages, under a simulated clock.
#ifndef CHORUS_TESTS_MODEL_SIMULATION_H_
#define CHORUS_TESTS_MODEL_SIMULATION_H_

#include <cstdint>
#include <map>
#include <string>

namespace chorus {

struct SimulationResult {
  std::string fault;  // empty, or the promise broken
  int64_t runs = 0;
  int64_t published = 0;
  int64_t gangs = 0;
  int64_t epochs = 0;
  int64_t absences = 0;                   // members that gave zeros to a gradient
  int64_t failed_alone = 0;               // runs that failed without ending an epoch
  int64_t calm_steps = 0;                 // behind the last fault: all of it was published
  std::map<std::string, int64_t> causes;  // of ended epochs
};

// Equal seeds give equal histories.
SimulationResult Simulate(uint64_t seed, int ranks);

}  // namespace chorus

#endif  // CHORUS_TESTS_MODEL_SIMULATION_H_
