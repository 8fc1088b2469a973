// Ranges of addresses of which pieces are given out, best fit: what a memory that is not touched is
// managed by.
//
// Threads: thread-compatible. Ownership: numbers only; the memory behind them is the caller's.
// Errors: said at each function.
#ifndef CHORUS_CORE_BASE_ADDRESS_RANGES_H_
#define CHORUS_CORE_BASE_ADDRESS_RANGES_H_

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "absl/types/optional.h"

namespace chorus {

class AddressRanges {
 public:
  // Pieces are rounded up to multiples of `alignment`, of which all ranges are.
  explicit AddressRanges(int64_t alignment) : alignment_(alignment) {}

  // [begin, begin + bytes) may be given out too. Beside another range they are one.
  void Add(uint64_t begin, int64_t bytes);
  // A piece of the smallest hole that has room. None: there is no such hole.
  absl::optional<uint64_t> Take(int64_t bytes);
  // The bytes that were asked for as it was taken; 0: no piece begins there, and nothing has
  // changed.
  int64_t GiveBack(uint64_t address);
  // Whether [address, address + bytes) lies inside one piece, or is its end and empty.
  bool InOnePiece(uint64_t address, int64_t bytes) const;
  // Of the hole that ends there: what a range that is added behind it becomes one with. 0: none.
  int64_t HoleBefore(uint64_t end) const;

  int64_t taken_bytes() const { return taken_bytes_; }  // as asked for
  int64_t Rounded(int64_t bytes) const;                 // what a piece of so many takes

 private:
  void RemoveHole(std::map<uint64_t, int64_t>::iterator hole);

  int64_t alignment_;
  int64_t taken_bytes_ = 0;
  std::map<uint64_t, int64_t> pieces_;
  std::map<uint64_t, int64_t> holes_;
  std::set<std::pair<int64_t, uint64_t>> holes_by_size_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BASE_ADDRESS_RANGES_H_
