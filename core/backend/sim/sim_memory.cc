#include "core/backend/sim/sim_memory.h"

#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

// Bits 48 to 63 are not all equal, so no processor takes such an address.
constexpr DeviceAddress kFirst = DeviceAddress{0x5100} << 48;
constexpr int64_t kAlignment = 64;
// Between allocations, so that running over the end of one never lands in the next.
constexpr int64_t kGap = 4096;
constexpr size_t kMostFreedBlocks = 4096;
// Nobody is charged for either of these.
constexpr int64_t kMostFreedBytes = int64_t{32} << 20;
// After so many that were forgotten malloc gives back what it keeps of them: it would keep as much
// as there has ever been.
constexpr int64_t kTrimBytes = int64_t{16} << 20;

absl::Status Wrong(absl::string_view what) { return MakeError(Reason::kInternal, what); }

}  // namespace

absl::StatusOr<DeviceAddress> SimMemory::Allocate(int device, int64_t bytes) {
  if (bytes < 0) return BadType(absl::StrCat("an allocation of ", bytes, " bytes"));
  if (bytes == 0) return DeviceAddress{0};
  MutexLock lock(&mutex_);
  char* memory = nullptr;
  const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (bytes <= limit_ - used_) {
    memory = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
  }
  if (memory == nullptr) {
    return MakeError(Reason::kOutOfMemory,
                     absl::StrCat("sim:", device, ": need ", bytes, " bytes, ", limit_ - used_,
                                  " of ", limit_, " are free"));
  }
  for (int64_t i = 0; i < rounded; i += sizeof(kFresh)) {
    std::memcpy(memory + i, &kFresh, sizeof(kFresh));
  }
  DeviceAddress& next = next_[SpaceOf(device)];
  const DeviceAddress address = kFirst + next;
  next += rounded + kGap;
  Block& block = blocks_[{SpaceOf(device), address}];
  block.device = device;
  block.bytes = bytes;
  block.memory.reset(memory);
  used_ += bytes;
  return address;
}

void SimMemory::Free(int device, DeviceAddress address) {
  if (Forget(AddressInSpace(SpaceOf(device), address))) malloc_trim(0);
}

bool SimMemory::Forget(const AddressInSpace& first) {
  MutexLock lock(&mutex_);
  const auto it = blocks_.find(first);
  if (it == blocks_.end() || it->second.freed) return false;
  Block& block = it->second;
  std::memset(block.memory.get(), kFreed, block.bytes);
  block.freed = true;
  used_ -= block.bytes;
  freed_.push_back(first);
  freed_bytes_ += block.bytes;
  while (freed_.size() > kMostFreedBlocks || freed_bytes_ > kMostFreedBytes) {
    const auto oldest = blocks_.find(freed_.front());
    freed_bytes_ -= oldest->second.bytes;
    untrimmed_bytes_ += oldest->second.bytes;
    blocks_.erase(oldest);
    freed_.pop_front();
  }
  if (untrimmed_bytes_ < kTrimBytes) return false;
  untrimmed_bytes_ = 0;
  return true;
}

absl::Status SimMemory::Resolve(int device, DeviceAddress address, int64_t bytes,
                                void** pointer) const {
  MutexLock lock(&mutex_);
  const auto name = [address, bytes] {
    return absl::StrCat(bytes, " bytes at 0x", absl::Hex(address));
  };
  auto it = blocks_.upper_bound({SpaceOf(device), address});
  if (it == blocks_.begin() || (--it)->first.first != SpaceOf(device)) {
    return Wrong(absl::StrCat(name(), " are no device memory"));
  }
  const Block& block = it->second;
  const auto offset = static_cast<int64_t>(address - it->first.second);
  if (offset >= block.bytes || bytes > block.bytes - offset) {
    return Wrong(absl::StrCat(name(), " lie outside all allocations; the nearest before has ",
                              block.bytes, " bytes at 0x", absl::Hex(it->first.second)));
  }
  if (block.freed) return Wrong(absl::StrCat(name(), " were freed before they were used"));
  if (domain(block.device) != domain(device)) {
    return Wrong(absl::StrCat(name(), " belong to sim:", block.device,
                              ", but are used by work on sim:", device));
  }
  *pointer = block.memory.get() + offset;
  return absl::OkStatus();
}

}  // namespace chorus
