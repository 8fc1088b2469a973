// What each thread of transpose's kernels does.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_SHAPE_SHAPE_KERNELS_H_
#define CHORUS_CORE_OPS_SHAPE_SHAPE_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"
#include "core/ops/device_loops.h"

namespace chorus {
namespace cuda {

// A transposition after which other elements are neighbours. Reading along the input's last
// dimension goes across the result and the other way round: patches of both let few threads share
// what the memory reads or writes at a time. T has the elements' width.
template <typename T>
struct TransposePatchesArgs {
  static constexpr int kScratchPacks = 0;
  static constexpr int kAlong = 8;    // neighbours in the input
  static constexpr int kAcross = 16;  // neighbours in the result
  static constexpr int kThreads = 32;
  const T* in = nullptr;
  T* out = nullptr;
  int64_t threads = 0;
  // The dimension that is the input's last one, and how far its elements are apart in the result.
  int64_t along = 0;
  int64_t along_stride = 0;
  // The dimension that is the result's last one, and how far they are apart in the input.
  int64_t across = 0;
  int64_t across_stride = 0;
  // The others, in either.
  Loops from;
  Loops to;
};
template <typename T>
CHORUS_DEVICE void TransposePatches(const TransposePatchesArgs<T>& args, const Lane& lane) {
  using Args = TransposePatchesArgs<T>;
  constexpr int kStep = Args::kThreads / Args::kAlong;
  constexpr int kSteps = Args::kAcross / kStep;
  const int64_t patches_along = UnsignedQuotient(args.along + Args::kAlong - 1, Args::kAlong);
  const int64_t patches_across = UnsignedQuotient(args.across + Args::kAcross - 1, Args::kAcross);
  for (int64_t i = lane.index; i < args.threads; i += lane.count) {
    const int64_t patch = UnsignedQuotient(i, Args::kThreads);
    const int within = static_cast<int>(i - patch * Args::kThreads);
    const int64_t row = UnsignedQuotient(patch, patches_across);
    const int64_t plane = UnsignedQuotient(row, patches_along);
    const int64_t x = (patch - row * patches_across) * Args::kAcross +
                      static_cast<int64_t>(within / Args::kAlong);
    const int64_t y =
        (row - plane * patches_along) * Args::kAlong + static_cast<int64_t>(within % Args::kAlong);
    if (y >= args.along) continue;
    const T* const in = args.in + args.from.At(plane) + y;
    T* const out = args.out + args.to.At(plane) + y * args.along_stride;
    T elements[kSteps] = {};
    CHORUS_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      if (x + k * kStep < args.across) elements[k] = in[(x + k * kStep) * args.across_stride];
    }
    CHORUS_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      if (x + k * kStep < args.across) out[x + k * kStep] = elements[k];
    }
  }
}

#define CHORUS_KERNELS_OF_Shape(X)                                                   \
  X(transpose_1, LoopedMoveArgs<uint8_t>, LoopedMove<uint8_t>)                       \
  X(transpose_2, LoopedMoveArgs<uint16_t>, LoopedMove<uint16_t>)                     \
  X(transpose_4, LoopedMoveArgs<uint32_t>, LoopedMove<uint32_t>)                     \
  X(transpose_8, LoopedMoveArgs<uint64_t>, LoopedMove<uint64_t>)                     \
  X(transpose_patches_1, TransposePatchesArgs<uint8_t>, TransposePatches<uint8_t>)   \
  X(transpose_patches_2, TransposePatchesArgs<uint16_t>, TransposePatches<uint16_t>) \
  X(transpose_patches_4, TransposePatchesArgs<uint32_t>, TransposePatches<uint32_t>) \
  X(transpose_patches_8, TransposePatchesArgs<uint64_t>, TransposePatches<uint64_t>)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SHAPE_SHAPE_KERNELS_H_
