// What threads of a GPU have in common that set elements: how they share them, and where the
// elements of tensors stand whose dimensions are in another order, repeated or left out.
//
// Threads: Loops are plain values; SetElements is a part of one thread of a launch. Ownership: all
// memory is the caller's. Errors: none.
#ifndef CHORUS_CORE_OPS_DEVICE_LOOPS_H_
#define CHORUS_CORE_OPS_DEVICE_LOOPS_H_

#include <cstdint>

#include "core/base/device.h"

namespace chorus {
namespace cuda {

// a / b of numbers that are not negative, which takes a GPU less time than with signs.
CHORUS_DEVICE int64_t UnsignedQuotient(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) / static_cast<uint64_t>(b));
}

// Nested loops, of which each turn goes so many elements further.
struct Loops {
  static constexpr int kMost = 16;  // dimensions of a tensor
  int count = 0;
  int64_t size[kMost] = {};  // innermost first
  int64_t stride[kMost] = {};

  // Adds the next outer loop. Of one turn it is none, and with those within it it may be one.
  void Append(int64_t turns, int64_t elements) {
    if (turns == 1) return;
    if (count > 0 && elements == stride[count - 1] * size[count - 1]) {
      size[count - 1] *= turns;
    } else {
      size[count] = turns;
      stride[count++] = elements;
    }
  }

  // Where the turn of that number stands.
  CHORUS_DEVICE int64_t At(int64_t turn) const {
    int64_t at = 0;
    CHORUS_KEEP_LOOP
    for (int d = 0; d + 1 < count; ++d) {
      const int64_t next = UnsignedQuotient(turn, size[d]);
      at += (turn - next * size[d]) * stride[d];
      turn = next;
    }
    return count == 0 ? 0 : at + turn * stride[count - 1];
  }
};

// How many elements a thread sets at a time, for their loads to be under way together.
constexpr int kElementsAtOnce = 4;
// As many threads as are of use for so many elements.
constexpr int64_t ThreadsFor(int64_t elements) {
  return (elements + kElementsAtOnce - 1) / kElementsAtOnce;
}

// Sets out[i] = of(i), of `count` elements, those that are the thread's: neighbours are of
// neighbouring threads. What `of` reads may be out[i], and no other element of `out`.
template <typename T, typename Of>
CHORUS_DEVICE void SetElements(const Lane& lane, int64_t count, T* out, const Of& of) {
  CHORUS_KEEP_LOOP
  for (int64_t i = lane.index; i < count; i += kElementsAtOnce * lane.count) {
    T elements[kElementsAtOnce] = {};
    CHORUS_UNROLL
    for (int k = 0; k < kElementsAtOnce; ++k) {
      if (i + k * lane.count < count) elements[k] = of(i + k * lane.count);
    }
    CHORUS_UNROLL
    for (int k = 0; k < kElementsAtOnce; ++k) {
      if (i + k * lane.count < count) out[i + k * lane.count] = elements[k];
    }
  }
}

// Elements from where loops stand. T has their width; what it holds does not matter.
template <typename T>
struct LoopedMoveArgs {
  static constexpr int kScratchPacks = 0;
  const T* in = nullptr;
  T* out = nullptr;
  int64_t count = 0;
  Loops from;
};
template <typename T>
CHORUS_DEVICE void LoopedMove(const LoopedMoveArgs<T>& args, const Lane& lane) {
  SetElements(lane, args.count, args.out, [&](int64_t i) { return args.in[args.from.At(i)]; });
}

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_DEVICE_LOOPS_H_
