// Indices into lists, of one kind each: a graph's nodes, its values, a plan's buffers.
//
// They are made of numbers and read as numbers without ado, for they are counted, compared and
// sent; but an index of one kind is never taken for one of another kind, as a subscript
// (IndexedVector), an argument or a field. Ids that are only names are stricter: ids.h.
//
// Threads: plain values. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_BASE_INDEX_H_
#define CHORUS_CORE_BASE_INDEX_H_

#include <cstdint>
#include <utility>

namespace chorus {

// `Tag` is never defined; it only keeps the kinds apart. Negative: none.
template <typename Tag>
class Index {
 public:
  constexpr Index() = default;
  constexpr Index(int32_t value) : value_(value) {}
  constexpr operator int32_t() const { return value_; }

  constexpr int32_t value() const { return value_; }  // where texts and templates want a number

  constexpr Index& operator++() {
    ++value_;
    return *this;
  }
  constexpr Index operator++(int) { return value_++; }
  constexpr Index operator--(int) { return value_--; }

  template <typename H>
  friend H AbslHashValue(H h, Index index) {
    return H::combine(std::move(h), index.value_);
  }

 private:
  int32_t value_ = -1;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_INDEX_H_
