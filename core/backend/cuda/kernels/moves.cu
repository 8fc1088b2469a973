// Kernels of the bodies in moves.h, under their C names, with blocks of at most kMoveThreads
// threads.
#include "core/backend/cuda/kernels/moves.h"
#include "core/backend/cuda/this_lane.h"

namespace chorus {
namespace cuda {

#define CHORUS_MOVE_KERNEL(name, Args, Body)                 \
  extern "C" __global__ void __launch_bounds__(kMoveThreads) \
      name(const __grid_constant__ Args arguments) {         \
    Body(arguments, ThisLane<Args, kMoveThreads>());         \
  }
CHORUS_MOVE_KERNELS(CHORUS_MOVE_KERNEL)
#undef CHORUS_MOVE_KERNEL

}  // namespace cuda
}  // namespace chorus
