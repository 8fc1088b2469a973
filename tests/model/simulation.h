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
  int64_t postponed = 0;                  // events that left something for another slice
  std::map<std::string, int64_t> causes;  // of ended epochs
};

// Random programs: each rank cuts the steps' scripts into runs in its own way, runs ahead, and
// takes gradients; in the first steps ranks fail in all ways, and leave steps early. Behind the
// last step that any of them had begun before it heard of the last fault every run must be
// published. Without `steps` they count on all the time, and say which calls they cannot make.
// In every other history slices often have no time left when they begin. Equal seeds give equal
// histories.
SimulationResult Simulate(uint64_t seed, int ranks, bool steps = true);

}  // namespace chorus

#endif  // CHORUS_TESTS_MODEL_SIMULATION_H_
