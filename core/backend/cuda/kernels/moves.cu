// Kernels of the bodies in moves.h, under their C names, with blocks of at most kBlockThreads
// threads.
#include "core/backend/cuda/kernels/moves.h"
#include "core/cuda/this_lane.h"

namespace chorus {
namespace cuda {

// Of a kernel's blocks on a multiprocessor at least so many: a thread then has the registers that
// let four operands be on their way.
constexpr int kBlocks = 6;

#define CHORUS_MOVE_KERNEL(name, Args, Body)                           \
  extern "C" __global__ void __launch_bounds__(kBlockThreads, kBlocks) \
      name(const __grid_constant__ Args arguments) {                   \
    Body(arguments, ThisLane<Args>());                                 \
  }
CHORUS_MOVE_KERNELS(CHORUS_MOVE_KERNEL)
#undef CHORUS_MOVE_KERNEL

}  // namespace cuda
}  // namespace chorus
