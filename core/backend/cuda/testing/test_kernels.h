// The kernels of the conformance suite (core/backend/testing/backend_conformance.h), as a GPU runs
// them.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_BACKEND_CUDA_TESTING_TEST_KERNELS_H_
#define CHORUS_CORE_BACKEND_CUDA_TESTING_TEST_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"

namespace chorus {
namespace cuda {

// out = 2 a + b.
struct AffineArgs {
  static constexpr int kScratchPacks = 0;
  const float* a = nullptr;
  const float* b = nullptr;
  float* out = nullptr;
  int64_t count = 0;
};
CHORUS_DEVICE void Affine(const AffineArgs& args, const Lane& lane) {
  for (int64_t i = lane.index; i < args.count; i += lane.count) {
    args.out[i] = 2 * args.a[i] + args.b[i];
  }
}

// out = a, by way of scratch.
struct ScratchArgs {
  static constexpr int kScratchPacks = 0;
  const float* a = nullptr;
  float* scratch = nullptr;
  float* out = nullptr;
  int64_t count = 0;
};
CHORUS_DEVICE void Scratch(const ScratchArgs& args, const Lane& lane) {
  for (int64_t i = lane.index; i < args.count; i += lane.count) {
    args.scratch[i] = args.a[i];
    args.out[i] = args.scratch[i];
  }
}

// Tells of a failure.
struct FailArgs {
  static constexpr int kScratchPacks = 0;
  uint64_t* fault = nullptr;
  uint64_t value = 0;
};
CHORUS_DEVICE void Fail(const FailArgs& args, const Lane& lane) {
  if (lane.index == 0) StoreLeast(args.fault, args.value);
}

// X(kernel's name, its arguments, what each thread does).
#define CHORUS_TEST_KERNELS(X)          \
  X(test_affine, AffineArgs, Affine)    \
  X(test_scratch, ScratchArgs, Scratch) \
  X(test_fail, FailArgs, Fail)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_TESTING_TEST_KERNELS_H_
