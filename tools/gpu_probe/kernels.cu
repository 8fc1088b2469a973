// Kernels of the bodies in kernels.h, under their C names, with blocks of kBlockThreads threads.
#include "core/backend/cuda/this_lane.h"
#include "tools/gpu_probe/kernels.h"

namespace chorus {
namespace probe {

#define CHORUS_PROBE_KERNEL(name, Args, Body)                 \
  extern "C" __global__ void __launch_bounds__(kBlockThreads) \
      name(const __grid_constant__ Args arguments) {          \
    Body(arguments, cuda::ThisLane<Args, kBlockThreads>());   \
  }
CHORUS_PROBE_KERNELS(CHORUS_PROBE_KERNEL)
#undef CHORUS_PROBE_KERNEL

}  // namespace probe
}  // namespace chorus
