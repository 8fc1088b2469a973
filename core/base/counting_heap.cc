#include "core/base/counting_heap.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace chorus {
namespace {

constexpr size_t kSizeBytes = 16;  // before each block; keeps the alignment

thread_local int64_t t_bytes = 0;
thread_local int64_t t_blocks = 0;
thread_local int64_t t_most_bytes = 0;

}  // namespace

HeapUse::HeapUse() : bytes_before_(t_bytes), blocks_before_(t_blocks) { t_most_bytes = t_bytes; }
int64_t HeapUse::bytes() const { return t_bytes - bytes_before_; }
int64_t HeapUse::blocks() const { return t_blocks - blocks_before_; }
int64_t HeapUse::most_bytes() const { return t_most_bytes - bytes_before_; }

}  // namespace chorus

void* operator new(size_t size) {
  void* const block = std::malloc(size + chorus::kSizeBytes);
  if (block == nullptr) throw std::bad_alloc();
  *static_cast<size_t*>(block) = size;
  chorus::t_bytes += static_cast<int64_t>(size);
  ++chorus::t_blocks;
  chorus::t_most_bytes = std::max(chorus::t_most_bytes, chorus::t_bytes);
  return static_cast<char*>(block) + chorus::kSizeBytes;
}

// Sorts ask by this one, which a sanitizer has of its own.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void operator delete(void* allocation) noexcept {
  if (allocation == nullptr) return;
  void* const block = static_cast<char*>(allocation) - chorus::kSizeBytes;
  chorus::t_bytes -= static_cast<int64_t>(*static_cast<size_t*>(block));
  --chorus::t_blocks;
  std::free(block);
}

void operator delete(void* allocation, size_t) noexcept { operator delete(allocation); }
void operator delete(void* allocation, const std::nothrow_t&) noexcept {
  operator delete(allocation);
}
