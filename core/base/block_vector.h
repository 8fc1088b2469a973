// A list that grows at its end without moving what it has, but for little: elements stand in blocks
// of a fixed number. So however long it is, one more element takes no longer than a block.
//
// As long as one block has room for all it is as small and as fast as a std::vector. Only what
// users need: for the rest there are std::vector and std::deque.
//
// Threads: as std::vector. Ownership: it has its elements; a copy has its own. References to
// elements end at the next emplace_back(). Errors: an index out of bounds is a bug.
#ifndef CHORUS_CORE_BASE_BLOCK_VECTOR_H_
#define CHORUS_CORE_BASE_BLOCK_VECTOR_H_

#include <cstddef>
#include <vector>

namespace chorus {

template <typename T>
class BlockVector {
 public:
  static constexpr size_t kBlock = 256;

  void emplace_back() {
    if (size_ < kBlock) {
      first_.emplace_back();
    } else {
      if (size_ % kBlock == 0) {
        blocks_.emplace_back();
        blocks_.back().reserve(kBlock);
      }
      blocks_.back().emplace_back();
    }
    ++size_;
  }
  T& operator[](size_t i) { return i < kBlock ? first_[i] : blocks_[i / kBlock - 1][i % kBlock]; }
  const T& operator[](size_t i) const { return const_cast<BlockVector&>(*this)[i]; }
  size_t size() const { return size_; }

 private:
  std::vector<T> first_;
  std::vector<std::vector<T>> blocks_;  // none is empty; all but the last are full
  size_t size_ = 0;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_BLOCK_VECTOR_H_
