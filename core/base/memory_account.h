// What things take in memory, as far as it is counted: the account by which clients are charged.
//
// A structure counts with its size, and each block that it has on the heap with the bytes in use
// and kBlockOverheadBytes for the allocator. A text stands in its structure up to kInlineTextBytes.
// Room that is kept for more (a list's capacity) does not count: decoders and planners leave none,
// or little.
//
// Threads: pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_BASE_MEMORY_ACCOUNT_H_
#define CHORUS_CORE_BASE_MEMORY_ACCOUNT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace chorus {

inline constexpr int64_t kBlockOverheadBytes = 16;
inline constexpr size_t kInlineTextBytes = 15;

// Of a block on the heap; of none, where it is empty.
constexpr int64_t BlockBytes(int64_t bytes) { return bytes == 0 ? 0 : bytes + kBlockOverheadBytes; }

// Behind a std::string of `size` bytes; it ends with one more.
constexpr int64_t TextBytes(size_t size) {
  return size <= kInlineTextBytes ? 0 : BlockBytes(static_cast<int64_t>(size) + 1);
}

// Behind a list of `size` elements, without what these have themselves.
template <typename T>
constexpr int64_t ListBytes(size_t size) {
  return BlockBytes(static_cast<int64_t>(size) * static_cast<int64_t>(sizeof(T)));
}
template <typename T>
int64_t ListBytes(const std::vector<T>& list) {
  return ListBytes<T>(list.size());
}

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_MEMORY_ACCOUNT_H_
