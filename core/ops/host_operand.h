// Operands of elementwise kernels: tensors, or 0-dim ones that stand for all elements.
//
// Threads: plain values. Ownership: a HostOperand refers to the operand's memory. Errors: none.
#ifndef CHORUS_CORE_OPS_HOST_OPERAND_H_
#define CHORUS_CORE_OPS_HOST_OPERAND_H_

#include <algorithm>
#include <cstdint>

#include "core/tensor/type.h"

namespace chorus {

// Whether an input stands for all elements of the output.
inline bool IsStretched(const TensorType& input) { return input.dims.empty(); }

// Reads pieces of an operand as arrays, so that a kernel has one loop, whatever is stretched: a
// stretched element is repeated in a piece of its own, which stays in the cache.
template <typename T>
class HostOperand {
 public:
  static constexpr int64_t kPiece = 1024;

  // For pieces of at most `size` elements. Reads a stretched element now.
  HostOperand(const void* data, bool stretched, int64_t size)
      : data_(static_cast<const T*>(data)), stretched_(stretched) {
    if (stretched) std::fill_n(repeated_, std::min(size, kPiece), data_[0]);
  }

  // The piece from element `begin` on.
  const T* At(int64_t begin) const { return stretched_ ? repeated_ : data_ + begin; }

 private:
  const T* const data_;
  const bool stretched_;
  T repeated_[kPiece];
};

// Calls f(begin, size) for the pieces of [begin, end).
template <typename F>
void ForEachPiece(int64_t begin, int64_t end, const F& f) {
  constexpr int64_t kPiece = HostOperand<char>::kPiece;
  for (; begin < end; begin += kPiece) f(begin, std::min(kPiece, end - begin));
}

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_HOST_OPERAND_H_
