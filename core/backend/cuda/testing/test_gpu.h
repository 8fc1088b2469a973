// A backend on the GPU of tests: a stand-in's, or this machine's (core/cuda/testing/test_driver.h).
//
// Threads: any. Ownership: the driver, or what stands in for it, is the process's. Errors: end the
// process, in one line.
#ifndef CHORUS_CORE_BACKEND_CUDA_TESTING_TEST_GPU_H_
#define CHORUS_CORE_BACKEND_CUDA_TESTING_TEST_GPU_H_

#include <cstdint>
#include <memory>

#include "core/backend/backend.h"
#include "core/backend/cuda/cuda_backend.h"

namespace chorus {

// A backend of that GPU with so many logical devices, and `options` beside: with the kernels of the
// build and of the conformance suite. The stand-in's seed is that of the first call.
std::unique_ptr<Backend> OpenTestGpu(CudaBackendOptions options, uint64_t seed);
// Waits until that GPU has done all that it was given; on a thread that has given it some of that.
void AwaitTestGpu();
// From here on every call of the driver's stand-in fails, as after a kernel's bad access; the
// machine's GPU goes on. Also in a signal's handler.
void LoseTestGpu();

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_TESTING_TEST_GPU_H_
