// The first GPU, as a stage uses it: the driver, a context, the probe's kernels, memory and time.
//
// Threads: one, on which the context is current. Ownership: memory, streams and events are freed by
//   what holds them, and all of it when the process ends. Errors: as core/cuda/cuda_api.h
//   says; after kExecFailed of a kernel the context is of no use.
#ifndef CHORUS_TOOLS_GPU_PROBE_GPU_H_
#define CHORUS_TOOLS_GPU_PROBE_GPU_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "core/cuda/cuda_api.h"
#include "tools/gpu_probe/kernels.h"

namespace chorus {
namespace probe {

class Gpu;

// Frees by a function; movable.
template <typename Handle>
class Owned {
 public:
  Owned() = default;
  Owned(Handle handle, std::function<void(Handle)> free)
      : handle_(handle), free_(std::move(free)) {}
  Owned(Owned&& other) noexcept { *this = std::move(other); }
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(free_, other.free_);
    return *this;
  }
  ~Owned() {
    if (free_ != nullptr) free_(handle_);
  }
  Handle get() const { return handle_; }

 private:
  Handle handle_{};
  std::function<void(Handle)> free_;
};

using OwnedStream = Owned<cuda::Stream>;
using OwnedEvent = Owned<cuda::Event>;

// On the GPU.
struct Memory {
  Owned<cuda::DevicePtr> pointer;
  int64_t bytes = 0;
  cuda::DevicePtr get() const { return pointer.get(); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(pointer.get());
  }
};

// On the host, pinned, and where a kernel finds it.
struct Pinned {
  Owned<void*> host;
  cuda::DevicePtr device = 0;
  template <typename T>
  T* as() const {
    return static_cast<T*>(host.get());
  }
};

// A chunk of memory that a descriptor shares, mapped. Chunks are as cuMemCreate makes them.
struct Chunk {
  cuda::AllocationHandle handle = 0;
  Owned<cuda::DevicePtr> pointer;
  int64_t bytes = 0;
  cuda::DevicePtr get() const { return pointer.get(); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(pointer.get());
  }
};

class Gpu {
 public:
  // `libraries`: folders where the driver is looked for first. FAILED_PRECONDITION kWrongState: no
  // driver, no GPU, or no kernels in this program, in one line.
  static absl::StatusOr<std::unique_ptr<Gpu>> Open(const std::vector<std::string>& libraries);

  const cuda::Api& api() const { return api_; }
  int multiprocessors() const { return multiprocessors_; }
  int64_t l2_bytes() const { return l2_bytes_; }
  cuda::Device device() const { return device_; }
  // As many blocks of a kernel as the GPU has at a time: a whole wave.
  int64_t Wave(const std::string& name) const { return waves_.at(name); }
  absl::StatusOr<int> Attribute(cuda::DeviceAttribute attribute) const;

  // Memory. RESOURCE_EXHAUSTED kOutOfMemory also where this process would have more than half of
  // what was free when it opened the GPU.
  absl::StatusOr<Memory> Allocate(int64_t bytes);
  absl::StatusOr<Chunk> CreateChunk(int64_t bytes);  // rounded up to what the driver wants
  absl::StatusOr<UniqueFd> ExportChunk(const Chunk& chunk);
  absl::StatusOr<Chunk> ImportChunk(int fd, int64_t bytes);
  absl::StatusOr<int64_t> FreeBytes() const;
  int64_t most_bytes() const { return most_bytes_; }
  absl::StatusOr<Pinned> AllocatePinned(int64_t bytes) const;

  absl::StatusOr<OwnedStream> CreateStream(int priority = 0) const;
  absl::StatusOr<OwnedEvent> CreateEvent(bool timed = true) const;

  // A kernel of kernels.h by its name.
  cuda::Function kernel(const std::string& name) const { return kernels_.at(name); }
  const std::map<std::string, cuda::Function>& kernels() const { return kernels_; }
  template <typename Args>
  absl::Status Launch(cuda::Function function, const Args& args, int64_t blocks,
                      cuda::Stream stream, int threads = kBlockThreads) const {
    void* params[] = {const_cast<Args*>(&args)};
    CHORUS_CUDA(api_, LaunchKernel, function, static_cast<unsigned int>(blocks), 1, 1,
                static_cast<unsigned int>(threads), 1, 1, 0, stream, params, nullptr);
    return absl::OkStatus();
  }
  absl::Status FillPattern(cuda::DevicePtr to, int64_t bytes, uint64_t seed, bool floats,
                           cuda::Stream stream) const;
  // Keeps `blocks` blocks busy for 20 seconds, and returns once they are, or DEADLINE_EXCEEDED.
  // What it gives must stay as long.
  absl::StatusOr<Pinned> Spin(int64_t blocks, cuda::Stream stream) const;
  // Words that are not FillPattern's (without floats).
  absl::StatusOr<uint64_t> CountWrong(cuda::DevicePtr from, int64_t bytes, uint64_t seed,
                                      cuda::Stream stream);
  absl::Status Synchronize(cuda::Stream stream) const;

  // How long what `enqueue` puts on the stream takes there, in microseconds, `rounds` times, each
  // the mean of `repeats` in a row. The first round, not counted, warms up.
  absl::StatusOr<std::vector<double>> TimeMicros(
      cuda::Stream stream, int rounds, int repeats,
      const std::function<absl::Status()>& enqueue) const;

 private:
  Gpu() = default;
  absl::Status Charge(int64_t bytes);
  absl::StatusOr<Chunk> MapChunk(cuda::AllocationHandle handle, int64_t bytes);

  cuda::Api api_;
  cuda::Device device_ = 0;
  int multiprocessors_ = 1;
  int64_t l2_bytes_ = 0;
  int64_t most_bytes_ = 0;
  int64_t taken_bytes_ = 0;
  std::map<std::string, cuda::Function> kernels_;
  std::map<std::string, int64_t> waves_;
};

// Whether this program was built with kernels, that is where there was a CUDA toolkit. Without them
// no driver opens it, but for a stand-in.
bool HasKernels();

}  // namespace probe
}  // namespace chorus

#endif  // CHORUS_TOOLS_GPU_PROBE_GPU_H_
