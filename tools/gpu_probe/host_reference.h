// What kernels of kernels.h compute, on the CPU: the same bodies, as one thread over memory of the
// host. tests hold the sums against core/backend/reduction.h.
//
// Threads: pure functions. Ownership: all memory is the caller's. Errors: none.
#ifndef CHORUS_TOOLS_GPU_PROBE_HOST_REFERENCE_H_
#define CHORUS_TOOLS_GPU_PROBE_HOST_REFERENCE_H_

#include <cstdint>

#include "tools/gpu_probe/kernels.h"

namespace chorus {
namespace probe {

// `ranks` is 2, 4 or 8.
void OrderedSumOnHost(int ranks, const Pack* const* in, Pack* out, int64_t packs);
void RunChainOnHost(const ChainArgs& args);

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_HOST_REFERENCE_H_
