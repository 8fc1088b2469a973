// Kernels of the bodies in test_kernels.h, under their C names.
#include "core/backend/cuda/testing/test_kernels.h"
#include "core/cuda/this_lane.h"

namespace chorus {
namespace cuda {

CHORUS_TEST_KERNELS(CHORUS_GLOBAL_KERNEL)

}  // namespace cuda
}  // namespace chorus
