#include "core/cuda/testing/fake_memory.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "core/cuda/testing/report_misuse.h"

namespace chorus {
namespace cuda {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 256;  // of an allocation, as the driver promises
constexpr size_t kGuard = 16 * kPage;

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

std::string Hex(uint64_t address) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

void FillFresh(uint64_t begin, size_t bytes) {
  std::fill_n(reinterpret_cast<uint32_t*>(begin), bytes / 4, FakeMemory::kFresh);
}

// Addresses that trap.
uint64_t ReserveAddresses(size_t bytes) {
  void* const memory =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? 0 : reinterpret_cast<uint64_t>(memory);
}

// Locks it for as long as anyone has the descriptor open, or one that was made of it.
UniqueFd Locked(int fd, size_t bytes) {
  UniqueFd file(fd);
  if (!file.valid() || flock(fd, LOCK_SH) != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    file.Reset();
  }
  return file;
}
bool IsLocked(int fd) {
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) return true;
  flock(fd, LOCK_UN);
  return false;
}

// The entry that has the address, or the end.
template <typename Map>
auto Holder(const Map& blocks, uint64_t address) {
  auto next = blocks.upper_bound(address);
  if (next == blocks.begin()) return blocks.end();
  --next;
  return address < next->first + next->second.bytes ? next : blocks.end();
}

}  // namespace

FakeMemory::FakeMemory(int gpus, size_t bytes, std::string shared_folder,
                       std::function<std::string(uint64_t)> user_of)
    : gpus_(gpus),
      total_bytes_(bytes),
      shared_folder_(std::move(shared_folder)),
      user_of_(std::move(user_of)),
      chunk_files_(static_cast<size_t>(gpus)) {}

FakeMemory::~FakeMemory() {
  MutexLock lock(&mutex_);
  for (const Pages& pages : all_pages_) munmap(reinterpret_cast<void*>(pages.begin), pages.bytes);
}

// --- What is taken ---

// What all processes have taken of a GPU, as files in the folder that they share: each as long as
// an allocation, and locked by a descriptor that its owners have open. A process that finds one
// without a lock knows that none of them lives any more.
UniqueFd FakeMemory::TakeShared(int gpu, size_t bytes) const {
  std::string path = shared_folder_ + "/fake-gpu-" + std::to_string(gpu) + "-XXXXXX";
  return Locked(mkostemp(&path[0], O_CLOEXEC), bytes);
}

// Without such a folder the same is done with a file that has no name.
UniqueFd FakeMemory::MakeChunkFile(int gpu, size_t bytes) {
  if (!shared_folder_.empty()) return TakeShared(gpu, bytes);
  UniqueFd file = Locked(memfd_create("fake-gpu", MFD_CLOEXEC), bytes);
  const std::string again = "/proc/self/fd/" + std::to_string(file.get());
  chunk_files_[static_cast<size_t>(gpu)].emplace_back(open(again.c_str(), O_RDWR | O_CLOEXEC));
  return file;
}

size_t FakeMemory::TakenBytes(int gpu) {
  size_t taken = 0;
  if (shared_folder_.empty()) {
    for (const auto& [begin, allocation] : allocations_) {
      if (allocation.gpu == gpu) taken += allocation.bytes;
    }
    auto& files = chunk_files_[static_cast<size_t>(gpu)];
    files.erase(std::remove_if(files.begin(), files.end(),
                               [](const UniqueFd& fd) { return !IsLocked(fd.get()); }),
                files.end());
    for (const UniqueFd& fd : files) taken += static_cast<size_t>(lseek(fd.get(), 0, SEEK_END));
    return taken;
  }
  glob_t matches{};
  const std::string pattern = shared_folder_ + "/fake-gpu-" + std::to_string(gpu) + "-*";
  if (glob(pattern.c_str(), 0, nullptr, &matches) == 0) {
    for (size_t n = 0; n < matches.gl_pathc; ++n) {
      const UniqueFd fd(open(matches.gl_pathv[n], O_RDWR | O_CLOEXEC));
      if (!fd.valid()) continue;
      const off_t bytes = lseek(fd.get(), 0, SEEK_END);
      if (IsLocked(fd.get())) {
        taken += static_cast<size_t>(bytes);
      } else if (bytes > 0) {  // a new one is without a lock and a length for a moment
        unlink(matches.gl_pathv[n]);
      }
    }
  }
  globfree(&matches);
  return taken;
}

size_t FakeMemory::FreeBytes(int gpu) {
  MutexLock lock(&mutex_);
  return total_bytes_ - std::min(total_bytes_, TakenBytes(gpu));
}

// --- Where an address is ---

FakeMemory::Location FakeMemory::Find(uint64_t address, int gpu) {
  MutexLock lock(&mutex_);
  if (const auto it = Holder(allocations_, address); it != allocations_.end()) {
    return {it->first, it->first + it->second.bytes - address, false, it->second.gpu == gpu};
  }
  if (const auto it = Holder(mappings_, address); it != mappings_.end()) {
    const bool usable = (it->second.gpus >> gpu & 1) != 0;
    // Mappings that lie side by side are one piece of memory.
    uint64_t end = it->first;
    for (auto next = it; next != mappings_.end() && next->first == end &&
                         ((next->second.gpus >> gpu & 1) != 0) == usable;
         ++next) {
      end += next->second.bytes;
    }
    return {it->first, end - address, false, usable};
  }
  if (const auto it = Holder(pinned_, address); it != pinned_.end()) {
    return {it->first, it->first + it->second.bytes - address, true, true};
  }
  return {};
}

bool FakeMemory::Usable(uint64_t address, size_t bytes, int gpu, bool pinned) {
  const Location location = Find(address, gpu);
  return location.block != 0 && location.usable && location.pinned == pinned &&
         bytes <= location.bytes_left;
}

void FakeMemory::CheckUnused(uint64_t block, const char* call) const {
  const std::string user = user_of_(block);
  if (!user.empty()) {
    ReportMisuse(std::string(call) + ": " + Hex(block) + " is still used by " + user +
                 ", which has not finished");
  }
}

// --- Allocations ---

// Fresh pages between ones that trap; returns where the bytes begin, or 0.
uint64_t FakeMemory::MakePages(size_t bytes, Pages* pages) {
  const size_t usable = RoundUp(bytes, kPage);
  const Pages all = {ReserveAddresses(usable + 2 * kGuard), usable + 2 * kGuard};
  if (all.begin == 0) return 0;
  all_pages_.push_back(all);
  *pages = {all.begin + kGuard, usable};
  if (mprotect(reinterpret_cast<void*>(pages->begin), usable, PROT_READ | PROT_WRITE) != 0) {
    return 0;
  }
  FillFresh(pages->begin, usable);
  return pages->begin + usable - RoundUp(bytes, kAlignment);
}

// What the pages have beside the bytes must still be fresh.
void FakeMemory::CheckRest(uint64_t begin, size_t bytes, const Pages& pages) {
  const auto* const fresh = reinterpret_cast<const unsigned char*>(&kFresh);
  const auto check = [&](uint64_t from, uint64_t to) {
    for (uint64_t at = from; at < to; ++at) {
      if (*reinterpret_cast<const unsigned char*>(at) != fresh[at % 4]) {
        ReportMisuse(Hex(at) + " was written, outside of the " + std::to_string(bytes) +
                     " bytes at " + Hex(begin));
      }
    }
  };
  check(pages.begin, begin);
  check(begin + bytes, pages.begin + pages.bytes);
}

// Gives the memory back, not the addresses.
void FakeMemory::MakeTrap(uint64_t begin, size_t bytes) {
  void* const at = reinterpret_cast<void*>(begin);
  if (mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) !=
      at) {
    ReportMisuse("mmap cannot take memory back");
  }
}

Result FakeMemory::Allocate(int gpu, size_t bytes, DevicePtr* pointer) {
  if (bytes == 0) return Result::kInvalidValue;
  MutexLock lock(&mutex_);
  if (TakenBytes(gpu) + bytes > total_bytes_) return Result::kOutOfMemory;
  Allocation allocation;
  allocation.bytes = bytes;
  allocation.gpu = gpu;
  *pointer = MakePages(bytes, &allocation.pages);
  if (*pointer == 0) return Result::kOutOfMemory;
  if (!shared_folder_.empty()) allocation.in_shared = TakeShared(gpu, bytes);
  allocations_[*pointer] = std::move(allocation);
  return Result::kSuccess;
}

Result FakeMemory::Free(DevicePtr pointer) {
  MutexLock lock(&mutex_);
  const auto entry = allocations_.find(pointer);
  if (entry == allocations_.end()) return Result::kInvalidValue;
  CheckUnused(pointer, "cuMemFree");
  CheckRest(pointer, entry->second.bytes, entry->second.pages);
  MakeTrap(entry->second.pages.begin, entry->second.pages.bytes);
  allocations_.erase(entry);
  return Result::kSuccess;
}

Result FakeMemory::AllocateHost(size_t bytes, void** pointer) {
  if (bytes == 0) return Result::kInvalidValue;
  MutexLock lock(&mutex_);
  Pinned pinned;
  pinned.bytes = bytes;
  const uint64_t begin = MakePages(bytes, &pinned.pages);
  if (begin == 0) return Result::kOutOfMemory;
  pinned_[begin] = pinned;
  *pointer = reinterpret_cast<void*>(begin);
  return Result::kSuccess;
}

Result FakeMemory::FreeHost(void* pointer) {
  MutexLock lock(&mutex_);
  const auto entry = pinned_.find(reinterpret_cast<uint64_t>(pointer));
  if (entry == pinned_.end() || entry->second.pages.bytes == 0) return Result::kInvalidValue;
  CheckUnused(entry->first, "cuMemFreeHost");
  CheckRest(entry->first, entry->second.bytes, entry->second.pages);
  MakeTrap(entry->second.pages.begin, entry->second.pages.bytes);
  pinned_.erase(entry);
  return Result::kSuccess;
}

Result FakeMemory::Register(void* pointer, size_t bytes) {
  MutexLock lock(&mutex_);
  const auto begin = reinterpret_cast<uint64_t>(pointer);
  if (bytes == 0) return Result::kInvalidValue;
  const auto next = pinned_.lower_bound(begin);
  if (Holder(pinned_, begin) != pinned_.end() ||
      (next != pinned_.end() && next->first < begin + bytes)) {
    return static_cast<Result>(712);  // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
  }
  pinned_[begin].bytes = bytes;
  return Result::kSuccess;
}

Result FakeMemory::Unregister(void* pointer) {
  MutexLock lock(&mutex_);
  const auto entry = pinned_.find(reinterpret_cast<uint64_t>(pointer));
  if (entry == pinned_.end() || entry->second.pages.bytes != 0) return Result::kInvalidValue;
  CheckUnused(entry->first, "cuMemHostUnregister");
  pinned_.erase(entry);
  return Result::kSuccess;
}

// --- Chunks: files, mapped ---

Result FakeMemory::CreateChunk(int gpu, size_t bytes, AllocationHandle* handle) {
  MutexLock lock(&mutex_);
  if (gpu < 0 || gpu >= gpus_ || bytes == 0 || bytes % kGranularity != 0) {
    return Result::kInvalidValue;
  }
  if (TakenBytes(gpu) + bytes > total_bytes_) return Result::kOutOfMemory;
  auto chunk = std::make_shared<Chunk>();
  chunk->bytes = bytes;
  chunk->fd = MakeChunkFile(gpu, bytes);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, chunk->fd.get(), 0);
  if (memory == MAP_FAILED) return Result::kOutOfMemory;
  FillFresh(reinterpret_cast<uint64_t>(memory), bytes);
  munmap(memory, bytes);
  *handle = ++last_chunk_;
  chunks_[*handle] = std::move(chunk);
  return Result::kSuccess;
}

// Mappings keep the chunk.
Result FakeMemory::ReleaseChunk(AllocationHandle handle) {
  MutexLock lock(&mutex_);
  return chunks_.erase(handle) > 0 ? Result::kSuccess : Result::kInvalidValue;
}

Result FakeMemory::ExportChunk(AllocationHandle handle, int* fd) {
  MutexLock lock(&mutex_);
  const auto entry = chunks_.find(handle);
  if (entry == chunks_.end()) return Result::kInvalidValue;
  *fd = fcntl(entry->second->fd.get(), F_DUPFD_CLOEXEC, 0);
  return *fd >= 0 ? Result::kSuccess : Result::kOutOfMemory;
}

Result FakeMemory::ImportChunk(int fd, AllocationHandle* handle) {
  MutexLock lock(&mutex_);
  auto chunk = std::make_shared<Chunk>();
  chunk->fd = UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!chunk->fd.valid()) return Result::kInvalidValue;
  chunk->bytes = static_cast<size_t>(lseek(chunk->fd.get(), 0, SEEK_END));
  *handle = ++last_chunk_;
  chunks_[*handle] = std::move(chunk);
  return Result::kSuccess;
}

Result FakeMemory::Reserve(size_t bytes, DevicePtr* pointer) {
  MutexLock lock(&mutex_);
  if (bytes == 0 || bytes % kGranularity != 0) return Result::kInvalidValue;
  const Pages all = {ReserveAddresses(bytes + 2 * kGranularity), bytes + 2 * kGranularity};
  if (all.begin == 0) return Result::kOutOfMemory;
  all_pages_.push_back(all);
  // There is a page at least on either side.
  *pointer = RoundUp(all.begin + kPage, kGranularity);
  reserved_[*pointer] = bytes;
  return Result::kSuccess;
}

Result FakeMemory::Unreserve(DevicePtr pointer, size_t bytes) {
  MutexLock lock(&mutex_);
  const auto entry = reserved_.find(pointer);
  if (entry == reserved_.end() || entry->second != bytes) return Result::kInvalidValue;
  const auto mapping = mappings_.lower_bound(pointer);
  if (mapping != mappings_.end() && mapping->first < pointer + bytes) return Result::kInvalidValue;
  reserved_.erase(entry);
  return Result::kSuccess;
}

Result FakeMemory::Map(DevicePtr pointer, size_t bytes, AllocationHandle handle) {
  MutexLock lock(&mutex_);
  const auto chunk = chunks_.find(handle);
  if (chunk == chunks_.end() || bytes != chunk->second->bytes || pointer % kGranularity != 0) {
    return Result::kInvalidValue;
  }
  auto range = reserved_.upper_bound(pointer);
  if (range == reserved_.begin()) return Result::kInvalidValue;
  --range;
  const auto next = mappings_.lower_bound(pointer);
  if (pointer + bytes > range->first + range->second ||
      Holder(mappings_, pointer) != mappings_.end() ||
      (next != mappings_.end() && next->first < pointer + bytes)) {
    return Result::kInvalidValue;
  }
  void* const at = reinterpret_cast<void*>(pointer);
  if (mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, chunk->second->fd.get(), 0) != at) {
    return Result::kOutOfMemory;
  }
  mappings_[pointer] = {bytes, chunk->second, 0};
  return Result::kSuccess;
}

// Whether the range is some whole mappings, one after another.
bool FakeMemory::AllMappings(uint64_t begin, size_t bytes) const {
  const uint64_t end = begin + bytes;
  uint64_t at = begin;
  while (at < end) {
    const auto mapping = mappings_.find(at);
    if (mapping == mappings_.end()) return false;
    at += mapping->second.bytes;
  }
  return at == end && bytes > 0;
}

Result FakeMemory::Unmap(DevicePtr pointer, size_t bytes) {
  MutexLock lock(&mutex_);
  if (!AllMappings(pointer, bytes)) return Result::kInvalidValue;
  const auto end = mappings_.lower_bound(pointer + bytes);
  for (auto it = mappings_.find(pointer); it != end; it = mappings_.erase(it)) {
    CheckUnused(it->first, "cuMemUnmap");
    MakeTrap(it->first, it->second.bytes);
  }
  return Result::kSuccess;
}

Result FakeMemory::SetAccess(DevicePtr pointer, size_t bytes, const AccessDescription* descriptions,
                             size_t count) {
  MutexLock lock(&mutex_);
  if (!AllMappings(pointer, bytes) || count == 0) return Result::kInvalidValue;
  for (size_t n = 0; n < count; ++n) {
    const AccessDescription& description = descriptions[n];
    if (description.location.type != LocationType::kDevice || description.location.id < 0 ||
        description.location.id >= gpus_ || description.access == Access::kRead) {
      return Result::kInvalidValue;
    }
  }
  const auto end = mappings_.lower_bound(pointer + bytes);
  for (auto it = mappings_.find(pointer); it != end; ++it) {
    Mapping& mapping = it->second;
    for (size_t n = 0; n < count; ++n) {
      const uint64_t bit = uint64_t{1} << descriptions[n].location.id;
      const bool gives = descriptions[n].access == Access::kReadWrite;
      if (!gives) CheckUnused(it->first, "cuMemSetAccess");
      mapping.gpus = gives ? mapping.gpus | bit : mapping.gpus & ~bit;
    }
    const int protection = mapping.gpus != 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
    if (mprotect(reinterpret_cast<void*>(it->first), mapping.bytes, protection) != 0) {
      return Result::kInvalidValue;
    }
  }
  return Result::kSuccess;
}

}  // namespace cuda
}  // namespace chorus
