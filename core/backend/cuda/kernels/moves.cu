// Kernels of the bodies in moves.h, under their C names, with blocks of at most kBlockThreads
// threads.
#include "core/backend/cuda/kernels/moves.h"
#include "core/backend/cuda/this_lane.h"

namespace chorus {
namespace cuda {

CHORUS_MOVE_KERNELS(CHORUS_GLOBAL_KERNEL)

}  // namespace cuda
}  // namespace chorus
