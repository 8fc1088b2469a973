// Kernels of the bodies in test_kernels.h, under their C names.
#include "core/backend/cuda/testing/test_kernels.h"
#include "core/backend/cuda/this_lane.h"

namespace chorus {
namespace cuda {

#define CHORUS_TEST_KERNEL(name, Args, Body)                 \
  extern "C" __global__ void __launch_bounds__(kTestThreads) \
      name(const __grid_constant__ Args arguments) {         \
    Body(arguments, ThisLane<Args, kTestThreads>());         \
  }
CHORUS_TEST_KERNELS(CHORUS_TEST_KERNEL)
#undef CHORUS_TEST_KERNEL

}  // namespace cuda
}  // namespace chorus
