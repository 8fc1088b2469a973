// The stand-in driver as a libcuda.so.1, so that gpu_probe runs from end to end where there is no
// GPU: with the probe's own kernels, in the order in which a GPU would run them that has nothing
// else to do, and with memory that processes share.
//
// Only where the build has no other: tests put its folder on LD_LIBRARY_PATH. With
// CHORUS_FAKE_GPU_FAULT=cuName that function fails with CUDA_ERROR_UNKNOWN, =crash:cuName it
// aborts, =hang:cuName it never returns. With CHORUS_FAKE_GPU_NONE there is no GPU.
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "core/cuda/testing/fake_driver.h"
#include "tools/gpu_probe/kernels.h"

namespace chorus {
namespace probe {
namespace {

cuda::Result FaultOfEnvironment(const char* call) {
  static const char* const wanted = std::getenv("CHORUS_FAKE_GPU_FAULT");
  if (wanted == nullptr) return cuda::Result::kSuccess;
  const std::string text = wanted;
  if (text == call) return cuda::Result::kUnknown;
  if (text == std::string("crash:") + call) std::abort();
  if (text == std::string("hang:") + call) {
    while (true) pause();
  }
  return cuda::Result::kSuccess;
}

cuda::FakeDriverOptions OptionsOfEnvironment() {
  cuda::FakeDriverOptions options;
  options.order = cuda::FakeOrder::kEager;
  options.gpus = std::getenv("CHORUS_FAKE_GPU_NONE") != nullptr ? 0 : 1;
  options.kernels = {CHORUS_PROBE_KERNELS(CHORUS_FAKE_KERNEL)};
  for (cuda::FakeKernel& kernel : options.kernels) kernel.most_block_threads = kBlockThreads;
  for (const char* name : {"spin", "ping_pong"}) {
    cuda::FindFakeKernel(&options.kernels, name)->one_thread = true;
  }
  const char* const folder = std::getenv("CHORUS_FAKE_GPU_DIR");
  options.shared_folder = folder == nullptr ? "/tmp" : folder;
  options.fault = &FaultOfEnvironment;
  return options;
}

// From when the library is loaded; the process ends with it.
const cuda::FakeDriver& driver = *new cuda::FakeDriver(OptionsOfEnvironment());

}  // namespace
}  // namespace probe
}  // namespace chorus

// For the other stand-ins: work of a library on a stream.
extern "C" void chorusFakeEnqueue(chorus::cuda::Stream stream, void (*function)(void*),
                                  void* data) {
  chorus::cuda::FakeDriver::Enqueue(stream, "a library's work",
                                    [function, data] { function(data); });
}
