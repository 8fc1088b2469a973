// A stand-in for cuDNN over the stand-in driver (fake_driver.h): convolutions added up naively,
// when their turn comes on the stream.
//
// Strict where a program may be wrong: an attribute of another type or number than the real one's,
// one that is missing, set again or set after the descriptor was finalized, tensors that do not fit
// the convolution, ids that the graph does not have, a stream that another thread set, workspace
// that is missing or lies badly are errors. Its heuristic names one engine for each thing that an
// engine must not be, and then those that may be used; one that must not be used gives zeros. What
// it cannot show is which problems the real one takes, and with which engines.
//
// Threads: any; a handle used by two at a time is an error. Ownership: what the functions make is
// the caller's, which destroys it; it is counted. Errors: as said, CUDNN_STATUS_BAD_PARAM or
// CUDNN_STATUS_NOT_SUPPORTED.
#ifndef CHORUS_CORE_CUDA_TESTING_FAKE_DNN_H_
#define CHORUS_CORE_CUDA_TESTING_FAKE_DNN_H_

#include <cstdint>

#include "core/cuda/cudnn_api.h"

namespace chorus {
namespace cuda {

DnnApi FakeDnnApi();

// Since the process began.
struct FakeDnnCounts {
  int64_t handles_made = 0;
  int64_t convolutions = 0;  // handed over
  int64_t alive = 0;         // handles and descriptors that were not destroyed
};
FakeDnnCounts CountsOfFakeDnn();

// What each of the heuristic's engines is, in its order.
enum class FakeDnnEngine : int {
  kRounded,       // TF32
  kOtherOrder,    // nondeterministic
  kWinograd,      //
  kFourier,       //
  kCompiled,      // when it is wanted
  kNotSupported,  // when it is planned
  kWantsMuch,     // 1 GiB of workspace
  kSound,         // wants 4 bytes for each of the result's elements
  kSoundToo,
};

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_TESTING_FAKE_DNN_H_
