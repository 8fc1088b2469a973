// Programs for the interpreter of kernels.h.
//
// Threads: pure functions. Ownership: plain values. Errors: none.
#ifndef CHORUS_TOOLS_GPU_PROBE_CHAINS_H_
#define CHORUS_TOOLS_GPU_PROBE_CHAINS_H_

#include "tools/gpu_probe/kernels.h"

namespace chorus {
namespace probe {

inline constexpr float kSgdDecay = 0.9f;
inline constexpr float kSgdMinusRate = -0.01f;

// `ops` (at most 16) sums and products of two inputs and numbers, to one output.
ChainArgs ArithmeticChain(int ops);
// Inputs: parameter, gradient, momentum; outputs: parameter, momentum.
ChainArgs SgdChain(float decay, float minus_rate);

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_CHAINS_H_
