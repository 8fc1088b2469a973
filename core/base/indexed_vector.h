// A vector whose elements are found by an index of one kind.
//
// What stands by node is never looked up by value, nor the other way round, where `Index` is a type
// of its own (index.h); and no cast is needed where it is signed. Only what users need: for the
// rest there is std::vector.
//
// Threads: as std::vector. Ownership: it has its elements. Errors: an index out of bounds is a bug,
// and asserted.
#ifndef CHORUS_CORE_BASE_INDEXED_VECTOR_H_
#define CHORUS_CORE_BASE_INDEXED_VECTOR_H_

#include <cassert>
#include <cstddef>
#include <utility>
#include <vector>

namespace chorus {

template <typename Index, typename T>
class IndexedVector {
 public:
  using value_type = T;

  IndexedVector() = default;
  explicit IndexedVector(size_t size, const T& value = T()) : items_(size, value) {}

  typename std::vector<T>::reference operator[](Index i) {
    assert(Holds(i));
    return items_[static_cast<size_t>(i)];
  }
  typename std::vector<T>::const_reference operator[](Index i) const {
    assert(Holds(i));
    return items_[static_cast<size_t>(i)];
  }

  size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  size_t capacity() const { return items_.capacity(); }
  void reserve(size_t size) { items_.reserve(size); }
  void resize(size_t size) { items_.resize(size); }
  // The new element's index.
  Index push_back(T item) {
    items_.push_back(std::move(item));
    return static_cast<Index>(items_.size() - 1);
  }

  auto begin() { return items_.begin(); }
  auto end() { return items_.end(); }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

 private:
  bool Holds(Index i) const { return static_cast<size_t>(i) < items_.size(); }

  std::vector<T> items_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_INDEXED_VECTOR_H_
