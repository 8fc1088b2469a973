// A thread's position in its launch, as the kernels of a .cu file hand it to their bodies. Only
// nvcc can read this.
//
// Threads: each call is of the one thread that makes it. Ownership: the scratch memory is the
//   block's. Errors: none.
#ifndef CHORUS_CORE_CUDA_THIS_LANE_H_
#define CHORUS_CORE_CUDA_THIS_LANE_H_

#include "core/base/device.h"

namespace chorus {
namespace cuda {

// With Args::kScratchPacks packs of scratch memory, in blocks of at most kBlockThreads threads.
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

}  // namespace cuda
}  // namespace chorus

// For a list X(name, Args, Body) of kernels: of each, under its C name, what its threads do.
#define CHORUS_GLOBAL_KERNEL(name, Args, Body)                                \
  extern "C" __global__ void __launch_bounds__(::chorus::cuda::kBlockThreads) \
      name(const __grid_constant__ Args arguments) {                          \
    Body(arguments, ::chorus::cuda::ThisLane<Args>());                        \
  }

#endif  // CHORUS_CORE_CUDA_THIS_LANE_H_
