// Kernels of the bodies in kernels.h, under their C names, with blocks of kBlockThreads threads.
#include "tools/gpu_probe/kernels.h"

namespace chorus {
namespace probe {

template <typename Args>
__device__ __forceinline__ Lane ThisLane() {
  Lane lane;
  lane.index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  lane.count = static_cast<int64_t>(gridDim.x) * blockDim.x;
  if constexpr (Args::kScratchPacks > 0) {
    __shared__ Pack scratch[Args::kScratchPacks * kBlockThreads];
    lane.scratch = scratch + threadIdx.x;
    lane.stride = kBlockThreads;
  }
  return lane;
}

#define CHORUS_PROBE_KERNEL(name, Args, Body)                 \
  extern "C" __global__ void __launch_bounds__(kBlockThreads) \
      name(const __grid_constant__ Args arguments) {          \
    Body(arguments, ThisLane<Args>());                        \
  }
CHORUS_PROBE_KERNELS(CHORUS_PROBE_KERNEL)
#undef CHORUS_PROBE_KERNEL

}  // namespace probe
}  // namespace chorus
