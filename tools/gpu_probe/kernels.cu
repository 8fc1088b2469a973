// Kernels of the bodies in kernels.h, under their C names, with blocks of kBlockThreads threads.
#include "core/cuda/this_lane.h"
#include "tools/gpu_probe/kernels.h"

namespace chorus {
namespace probe {

CHORUS_PROBE_KERNELS(CHORUS_GLOBAL_KERNEL)

}  // namespace probe
}  // namespace chorus
