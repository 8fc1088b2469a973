// What the design of the `cuda` backend assumes of a GPU and its driver, and from which measured
// numbers on an assumption counts as true. Every threshold of the probe stands here.
//
// Threads: constants. Ownership: none. Errors: none.
#ifndef CHORUS_TOOLS_GPU_PROBE_ASSUMPTIONS_H_
#define CHORUS_TOOLS_GPU_PROBE_ASSUMPTIONS_H_

#include <string>

#include "absl/types/span.h"

namespace chorus {
namespace probe {

// The table of docs/gpu.md, word for word.
struct Assumption {
  const char* id;
  const char* text;
  const char* if_false;
};
absl::Span<const Assumption> Assumptions();
// Null: there is no such id.
const Assumption* FindAssumption(const std::string& id);

// P1 (a goal of the design): the share of the rate of cuMemHostAlloc memory.
inline constexpr double kLeastPinnedShare = 0.95;
// P4 (our choice): how much longer k kernels on k streams may take than one. Pairs one after the
// other would take twice as long.
inline constexpr double kMostConcurrentStretch = 1.25;
// P5 (the assumption itself): at replay.
inline constexpr double kMostGraphNodeMicros = 1.5;
// P6 (a goal of the design): of the copy rate in the same run, counting (N + 1) S.
inline constexpr double kLeastReduceShare = 0.92;
// P7 (the assumption itself): of the copy rate in the same run, up to so many ops.
inline constexpr double kLeastChainShare = 0.80;
inline constexpr int kChainOpsThatCount = 8;
// P8 (the assumption itself): from SIGKILL until another process has the memory and runs a kernel.
inline constexpr double kMostFreeSeconds = 1.0;
// P9 (the assumption itself): results that differ of one product, over all its runs; 1 are all
// alike. And how many algorithms a heuristic may give for it, where nothing is pinned.
inline constexpr double kMostResults = 1;
inline constexpr double kMostAlgorithms = 1;
// P2 (our choice): what cuMemGetInfo may be off by, for the driver's own needs.
inline constexpr double kFreeMemorySlackMiB = 64;
// P10 (our choice): how long either half of it may take.
inline constexpr double kFlagSeconds = 8;
inline constexpr double kNcclSeconds = 20;

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_ASSUMPTIONS_H_
