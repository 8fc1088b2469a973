// A stand-in for the CUDA driver where there is no GPU: the functions of cuda_api.h over memory of
// this process (fake_memory.h), streams that choose a bad order (fake_streams.h), and kernels that
// are their bodies, called. What it cannot show is speed, and that the real driver takes the calls
// that it takes.
//
// Strict where a program may be wrong. As with the real one, an error: an address that was not
// allocated or is another GPU's, a handle that is no more, an unknown kernel, a call without a
// context or from a host function. What the real one would let corrupt memory is reported, and ends
// the process (report_misuse.h): to free, unmap, unpin or unload what work in a stream still uses,
// a kernel that is given another GPU's memory, one that runs over the end of its memory.
//
// A launch uses the memory whose addresses stand in its argument, in words of eight bytes. Of
// addresses that a kernel finds in the memory of the GPU only its touch is seen.
//
// What a stream and events leave open also goes wrong in graphs, whose nodes run in any order that
// their dependencies allow, and in launches, whose threads run in any order.
//
// Threads: the table's functions are thread-safe, as the driver's are; a FakeDriver is made and
//   destroyed while nobody calls them. Ownership: all that the functions make is the FakeDriver's,
//   of which there is one at a time in a process; handles of an earlier one are none of its.
//   Errors: as said; destroyed while a stream has work left it reports that.
#ifndef CHORUS_CORE_CUDA_TESTING_FAKE_DRIVER_H_
#define CHORUS_CORE_CUDA_TESTING_FAKE_DRIVER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "core/base/device.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/testing/fake_streams.h"

namespace chorus {
namespace cuda {

struct FakeLaunch {
  const void* argument = nullptr;
  int64_t threads = 0;
  uint64_t order = 0;  // of the threads; 0: as they are counted
};

struct FakeKernel {
  std::string name;
  size_t argument_bytes = 0;
  // The work of a launch, with a copy of its argument.
  std::function<std::function<void()>(const FakeLaunch& launch)> make;
  bool one_thread = false;  // however many are launched
  unsigned int most_block_threads = 1024;
};

// A kernel whose threads each do `body(args, lane)`.
template <typename Args>
FakeKernel MakeFakeKernel(const char* name, void (*body)(const Args&, const Lane&)) {
  FakeKernel kernel;
  kernel.name = name;
  kernel.argument_bytes = sizeof(Args);
  kernel.make = [body](const FakeLaunch& launch) {
    const Args args = *static_cast<const Args*>(launch.argument);
    return [body, args, threads = launch.threads, order = launch.order] {
      const float junk = FloatOf(0x7ffcbcbcu);
      std::vector<Pack> scratch(Args::kScratchPacks + 1);
      const bool backwards = (order & 1) != 0;
      for (int64_t n = 0; n < threads; ++n) {
        Lane lane;
        lane.index = (n + static_cast<int64_t>(order >> 1) % threads) % threads;
        if (backwards) lane.index = threads - 1 - lane.index;
        lane.count = threads;
        lane.scratch = scratch.data();
        std::fill(scratch.begin(), scratch.end(), Pack{{junk, junk, junk, junk}});
        body(args, lane);
      }
    };
  };
  return kernel;
}

// For a list X(name, Args, Body) such as CHORUS_PROBE_KERNELS:
//   std::vector<FakeKernel> kernels = {CHORUS_PROBE_KERNELS(CHORUS_FAKE_KERNEL)};
#define CHORUS_FAKE_KERNEL(name, Args, Body) \
  ::chorus::cuda::MakeFakeKernel<Args>(      \
      #name, [](const Args& args, const ::chorus::cuda::Lane& lane) { Body(args, lane); }),

// The kernel of that name, which must be there, for changes.
FakeKernel* FindFakeKernel(std::vector<FakeKernel>* kernels, const std::string& name);

struct FakeDriverOptions {
  FakeOrder order = FakeOrder::kAdversarial;
  uint64_t seed = 0;  // 0: a random one. It is printed.
  // How long at most work is held back in the hope that more is enqueued.
  absl::Duration patience = absl::Microseconds(300);
  int gpus = 1;
  int64_t memory_bytes = int64_t{512} << 20;  // of each GPU
  std::vector<FakeKernel> kernels;            // of every module; two of a name are misuse
  // Where processes that share the GPUs keep what each has taken; "": there are none.
  std::string shared_folder;
  // If given, asked at each call, by its name ("cuMemAlloc"), what it is to fail with.
  std::function<Result(const char* call)> fault;
};

class FakeDriver {
 public:
  explicit FakeDriver(FakeDriverOptions options);
  ~FakeDriver();
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  // For as long as there is a FakeDriver; without one each function fails.
  static Api api();

  // After `skip` calls of a function ("cuMemAlloc": "cu" and its name in the table) one does
  // nothing and returns `result`. Several for one function come one after the other.
  void FailNext(const std::string& call, Result result, int skip = 0);
  // How many of these have not come yet.
  int faults_left();

  // For stand-ins of other libraries: whether this thread has a context.
  static bool HasContext();
  // Work of another library's stand-in, in stream order, which uses the memory at these addresses.
  static Result Enqueue(Stream stream, const char* name, std::function<void()> work,
                        const std::vector<DevicePtr>& uses = {});

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_TESTING_FAKE_DRIVER_H_
