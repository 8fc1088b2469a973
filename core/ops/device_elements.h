// What each thread does of an op that makes each element of its output of that element of its
// inputs, for kernels of GPUs.
//
// A thread takes a few neighbouring elements at a time, in loads and stores of up to 16 bytes,
// where all operands are aligned for it: memory is what such kernels wait for. The last elements,
// or all of them, are taken one by one. The output may be an input's own memory: all that a thread
// reads there it has read when it writes.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_DEVICE_ELEMENTS_H_
#define CHORUS_CORE_OPS_DEVICE_ELEMENTS_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/base/device.h"

namespace chorus {
namespace cuda {

// Of any types, which the kernel knows.
struct ElementsArgs {
  static constexpr int kScratchPacks = 0;
  static constexpr int kMostInputs = 3;
  void* out = nullptr;
  const void* inputs[kMostInputs] = {};
  uint64_t stretched = 0;  // bit i: input i is one element, which stands for all
  int64_t count = 0;       // of the output
};

// How many elements a thread takes at a time, where the widest have so many bytes. Of those of 8
// even one keeps memory busy, and more of what computes with f64 does not fit the registers.
constexpr int ElementsAtOnce(size_t widest) { return widest > 4 ? 1 : 4; }

// Elements that lie side by side, and are loaded and stored as one.
template <typename T, int n>
struct alignas(n * sizeof(T)) Neighbours {
  T at[n];
};

// An input of that dtype.
template <typename T>
class Operand {
 public:
  CHORUS_DEVICE Operand(const ElementsArgs& args, int input)
      : data_(static_cast<const T*>(args.inputs[input])),
        stretched_((args.stretched >> input & 1) != 0) {}

  CHORUS_DEVICE T At(int64_t i) const { return data_[stretched_ ? 0 : i]; }

  // Whether groups of so many may be loaded.
  template <int n>
  CHORUS_DEVICE bool MayGroup() const {
    return stretched_ || reinterpret_cast<uintptr_t>(data_) % sizeof(Neighbours<T, n>) == 0;
  }
  // Elements i n to i n + n - 1.
  template <int n>
  CHORUS_DEVICE Neighbours<T, n> Group(int64_t i) const {
    if (!stretched_) return reinterpret_cast<const Neighbours<T, n>*>(data_)[i];
    Neighbours<T, n> group;
    const T element = data_[0];
    CHORUS_UNROLL
    for (int k = 0; k < n; ++k) group.at[k] = element;
    return group;
  }

 private:
  const T* const data_;
  const bool stretched_;
};

template <typename F, typename Out, int n, typename... In>
CHORUS_DEVICE Neighbours<Out, n> OfEach(const Neighbours<In, n>&... inputs) {
  Neighbours<Out, n> results;
  CHORUS_UNROLL
  for (int k = 0; k < n; ++k) results.at[k] = F::Of(inputs.at[k]...);
  return results;
}

// Of groups `begin` to `end` - 1 of n elements each.
template <typename F, int n, typename Out, typename... In>
CHORUS_DEVICE void EachGroup(Out* out, int64_t begin, int64_t end, const Lane& lane,
                             const Operand<In>&... inputs) {
  CHORUS_KEEP_LOOP
  for (int64_t i = begin + lane.index; i < end; i += lane.count) {
    reinterpret_cast<Neighbours<Out, n>*>(out)[i] =
        OfEach<F, Out, n>(inputs.template Group<n>(i)...);
  }
}

template <typename F, typename Out, typename... In>
CHORUS_DEVICE void EachOf(Out* out, int64_t count, const Lane& lane, const Operand<In>&... inputs) {
  constexpr size_t kWidest = [] {
    size_t widest = sizeof(Out);
    for (const size_t bytes : {sizeof(In)...}) widest = bytes > widest ? bytes : widest;
    return widest;
  }();
  constexpr int n = ElementsAtOnce(kWidest);
  int64_t done = 0;
  if constexpr (n > 1) {
    if (reinterpret_cast<uintptr_t>(out) % sizeof(Neighbours<Out, n>) == 0 &&
        (inputs.template MayGroup<n>() && ...)) {
      EachGroup<F, n>(out, 0, count / n, lane, inputs...);
      done = count / n * n;
    }
  }
  EachGroup<F, 1>(out, done, count, lane, inputs...);
}

template <typename F, typename Out, typename... In, int... i>
CHORUS_DEVICE void EachElementOf(const ElementsArgs& args, const Lane& lane,
                                 std::integer_sequence<int, i...>) {
  EachOf<F>(static_cast<Out*>(args.out), args.count, lane, Operand<In>(args, i)...);
}

// Every element of the output is F::Of() of those of the inputs.
template <typename F, typename Out, typename... In>
CHORUS_DEVICE void EachElement(const ElementsArgs& args, const Lane& lane) {
  EachElementOf<F, Out, In...>(args, lane,
                               std::make_integer_sequence<int, static_cast<int>(sizeof...(In))>());
}

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_DEVICE_ELEMENTS_H_
