// The memory of the stand-in driver's GPUs, and the host's memory that it has pinned.
//
// An address of a GPU is one of this process's. Around each allocation there are pages that trap,
// its last byte (rounded up as the driver aligns) stands before one of them, and what an allocation
// has beyond its bytes must be unchanged when it is freed. Fresh memory is kFresh; memory that was
// freed or unmapped traps, for its addresses are not used again. To free, unmap or unpin what work
// in a stream still uses is a misuse that is reported (report_misuse.h).
//
// Memory of a GPU may be used by that GPU alone; a mapping of a chunk by those that got access.
//
// Threads: all of it is thread-safe. Ownership: all memory, until the end of this object; chunks
//   live on in processes that have a descriptor of theirs. Errors: as the driver's functions say.
#ifndef CHORUS_CORE_CUDA_TESTING_FAKE_MEMORY_H_
#define CHORUS_CORE_CUDA_TESTING_FAKE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "core/cuda/cuda_api.h"

namespace chorus {
namespace cuda {

class FakeMemory {
 public:
  static constexpr uint32_t kFresh = 0x7ffcbcbc;  // a NaN, as a float and, twice, as a double
  static constexpr size_t kGranularity = size_t{2} << 20;

  // What of the memory an address is in.
  struct Location {
    uint64_t block = 0;       // where the allocation, mapping or pinned memory begins; 0: in none
    uint64_t bytes_left = 0;  // from the address to its end
    bool pinned = false;
    bool usable = false;  // by the GPU that asked
  };

  // `user_of`: the name of unfinished work that uses a block, or "". `shared_folder`: see
  // FakeDriverOptions.
  FakeMemory(int gpus, size_t bytes, std::string shared_folder,
             std::function<std::string(uint64_t block)> user_of);
  ~FakeMemory();

  size_t total_bytes() const { return total_bytes_; }
  size_t FreeBytes(int gpu);
  Location Find(uint64_t address, int gpu);
  // Whether all these bytes are in one block of a GPU (or: pinned) that `gpu` may use.
  bool Usable(uint64_t address, size_t bytes, int gpu, bool pinned);

  Result Allocate(int gpu, size_t bytes, DevicePtr* pointer);
  Result Free(DevicePtr pointer);
  Result AllocateHost(size_t bytes, void** pointer);
  Result FreeHost(void* pointer);
  Result Register(void* pointer, size_t bytes);
  Result Unregister(void* pointer);

  Result CreateChunk(int gpu, size_t bytes, AllocationHandle* handle);
  Result ReleaseChunk(AllocationHandle handle);
  Result ExportChunk(AllocationHandle handle, int* fd);
  Result ImportChunk(int fd, AllocationHandle* handle);
  Result Reserve(size_t bytes, DevicePtr* pointer);
  Result Unreserve(DevicePtr pointer, size_t bytes);
  Result Map(DevicePtr pointer, size_t bytes, AllocationHandle handle);
  Result Unmap(DevicePtr pointer, size_t bytes);
  Result SetAccess(DevicePtr pointer, size_t bytes, const AccessDescription* descriptions,
                   size_t count);

 private:
  // Pages that this object has: never given back before its end.
  struct Pages {
    uint64_t begin = 0;
    size_t bytes = 0;
  };
  struct Allocation {
    size_t bytes = 0;
    int gpu = 0;
    Pages pages;         // that do not trap
    UniqueFd in_shared;  // in the shared folder
  };
  struct Chunk {
    UniqueFd fd;
    size_t bytes = 0;
  };
  struct Mapping {
    size_t bytes = 0;
    std::shared_ptr<Chunk> chunk;
    uint64_t gpus = 0;  // that have access, a bit each
  };
  struct Pinned {
    size_t bytes = 0;
    Pages pages;  // empty: the caller's own
  };

  uint64_t MakePages(size_t bytes, Pages* pages) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void CheckRest(uint64_t begin, size_t bytes, const Pages& pages);
  static void MakeTrap(uint64_t begin, size_t bytes);
  UniqueFd TakeShared(int gpu, size_t bytes) const;
  UniqueFd MakeChunkFile(int gpu, size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  size_t TakenBytes(int gpu) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckUnused(uint64_t block, const char* call) const;
  bool AllMappings(uint64_t begin, size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int gpus_;
  const size_t total_bytes_;
  const std::string shared_folder_;
  const std::function<std::string(uint64_t block)> user_of_;

  Mutex mutex_;
  std::map<uint64_t, Allocation> allocations_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Mapping> mappings_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Pinned> pinned_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, size_t> reserved_ ABSL_GUARDED_BY(mutex_);
  std::map<AllocationHandle, std::shared_ptr<Chunk>> chunks_ ABSL_GUARDED_BY(mutex_);
  AllocationHandle last_chunk_ ABSL_GUARDED_BY(mutex_) = 0;
  // Where there is no shared folder: each GPU's chunks, by a descriptor of their files that takes
  // no part in their locks.
  std::vector<std::vector<UniqueFd>> chunk_files_ ABSL_GUARDED_BY(mutex_);
  std::vector<Pages> all_pages_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_CUDA_TESTING_FAKE_MEMORY_H_
