#include "core/base/counting_heap.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace chorus {
namespace {

constexpr size_t kSizeBytes = 16;  // before each block; keeps the alignment

int64_t g_bytes = 0;
int64_t g_blocks = 0;
int64_t g_most_bytes = 0;

}  // namespace

HeapUse::HeapUse() : bytes_before_(g_bytes), blocks_before_(g_blocks) { g_most_bytes = g_bytes; }
int64_t HeapUse::bytes() const { return g_bytes - bytes_before_; }
int64_t HeapUse::blocks() const { return g_blocks - blocks_before_; }
int64_t HeapUse::most_bytes() const { return g_most_bytes - bytes_before_; }

}  // namespace chorus

void* operator new(size_t size) {
  void* const block = std::malloc(size + chorus::kSizeBytes);
  if (block == nullptr) throw std::bad_alloc();
  *static_cast<size_t*>(block) = size;
  chorus::g_bytes += static_cast<int64_t>(size);
  ++chorus::g_blocks;
  chorus::g_most_bytes = std::max(chorus::g_most_bytes, chorus::g_bytes);
  return static_cast<char*>(block) + chorus::kSizeBytes;
}

void operator delete(void* allocation) noexcept {
  if (allocation == nullptr) return;
  void* const block = static_cast<char*>(allocation) - chorus::kSizeBytes;
  chorus::g_bytes -= static_cast<int64_t>(*static_cast<size_t*>(block));
  --chorus::g_blocks;
  std::free(block);
}

void operator delete(void* allocation, size_t) noexcept { operator delete(allocation); }
