// Whose GPU tests run on: a stand-in's, or this machine's.
//
// Threads: any. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_CUDA_TESTING_TEST_DRIVER_H_
#define CHORUS_CORE_CUDA_TESTING_TEST_DRIVER_H_

namespace chorus {

// Whether tests run on this machine's GPU: where the environment has CHORUS_TEST_GPU=driver. Else
// the stand-in orders badly what nothing orders (fake_driver.h).
bool TestsRunOnADriver();

}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_TESTING_TEST_DRIVER_H_
