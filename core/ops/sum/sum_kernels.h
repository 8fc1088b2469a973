// What each thread of the kernels of reductions, expand and spread does.
//
// Threads: each call is one thread of a launch. Ownership: all memory is the caller's. Errors:
// none.
#ifndef CHORUS_CORE_OPS_SUM_SUM_KERNELS_H_
#define CHORUS_CORE_OPS_SUM_SUM_KERNELS_H_

#include <cstdint>

#include "core/base/device.h"
#include "core/ops/device_elements.h"
#include "core/ops/device_loops.h"
#include "core/ops/sum/reductions.h"
#include "core/tensor/half.h"

namespace chorus {
namespace cuda {

// Rows of `columns` results, of each of which every part is a result of its own: part p of `parts`
// takes each term whose number is p modulo that. Results stand in the order of rows, parts and
// columns, which is an input for what reduces the parts. Of packed ones, whose columns are one and
// whose terms are neighbours, a term is as many elements as a thread loads at a time: these are
// taken to one at the end.
template <typename In, typename Out>
struct ReduceArgs {
  static constexpr int kScratchPacks = 0;
  const In* in = nullptr;
  Out* out = nullptr;
  // Where these begin, if in the workspace, in bytes; -1: they are the operand.
  int64_t in_at = -1;
  int64_t out_at = -1;
  int64_t count = 0;  // of results
  int64_t columns = 1;
  int64_t parts = 1;
  int64_t terms = 0;  // of all parts
  int64_t size = 0;   // elements that came into a result's terms, for the mean
  bool packed = false;
  Loops rows;     // where a row's first term stands
  Loops reduced;  // where its terms stand from there
};
// Half and half, until it is one.
template <typename F, int kCount, typename A>
CHORUS_DEVICE A Together(A* results) {
  CHORUS_UNROLL
  for (int width = kCount / 2; width > 0; width /= 2) {
    CHORUS_UNROLL
    for (int k = 0; k < width; ++k) results[k] = F::Of(results[k], results[k + width]);
  }
  return results[0];
}
// Of terms from `term` on. They are counted modulo eight, too: as many loads are under way at a
// time. The last few join the first.
template <typename F, typename In, typename Out>
CHORUS_DEVICE typename F::A OfTerms(const ReduceArgs<In, Out>& args, const In* in, int64_t term) {
  using A = typename F::A;
  constexpr int kTogether = 8;
  A results[kTogether];
  CHORUS_UNROLL
  for (int k = 0; k < kTogether; ++k) results[k] = F::Nothing();
  CHORUS_KEEP_LOOP
  for (; term + (kTogether - 1) * args.parts < args.terms; term += kTogether * args.parts) {
    In terms[kTogether];
    CHORUS_UNROLL
    for (int k = 0; k < kTogether; ++k) terms[k] = in[args.reduced.At(term + k * args.parts)];
    CHORUS_UNROLL
    for (int k = 0; k < kTogether; ++k) results[k] = F::Of(results[k], static_cast<A>(terms[k]));
  }
  CHORUS_KEEP_LOOP
  for (; term < args.terms; term += args.parts) {
    results[0] = F::Of(results[0], static_cast<A>(in[args.reduced.At(term)]));
  }
  return Together<F, kTogether>(results);
}
// Of a packed term.
template <typename In>
inline constexpr int kPacked = static_cast<int>(sizeof(Pack) / sizeof(In));
// The same of packed ones. Wherever they lie, they are taken in the same order.
template <typename F, typename In, typename Out>
CHORUS_DEVICE typename F::A OfPacks(const ReduceArgs<In, Out>& args, const In* in, int64_t term) {
  using A = typename F::A;
  using Elements = Neighbours<In, kPacked<In>>;
  constexpr int kTogether = 4;
  const bool aligned = reinterpret_cast<uintptr_t>(in) % sizeof(Elements) == 0;
  const auto load = [&](int64_t of) {
    const In* const from = in + args.reduced.At(of);
    if (aligned) return *reinterpret_cast<const Elements*>(from);
    Elements elements;
    CHORUS_UNROLL
    for (int j = 0; j < kPacked<In>; ++j) elements.at[j] = from[j];
    return elements;
  };
  A results[kPacked<In>];
  CHORUS_UNROLL
  for (int j = 0; j < kPacked<In>; ++j) results[j] = F::Nothing();
  const auto take = [&](const Elements& elements) {
    CHORUS_UNROLL
    for (int j = 0; j < kPacked<In>; ++j) {
      results[j] = F::Of(results[j], static_cast<A>(elements.at[j]));
    }
  };
  CHORUS_KEEP_LOOP
  for (; term + (kTogether - 1) * args.parts < args.terms; term += kTogether * args.parts) {
    Elements terms[kTogether];
    CHORUS_UNROLL
    for (int k = 0; k < kTogether; ++k) terms[k] = load(term + k * args.parts);
    CHORUS_UNROLL
    for (int k = 0; k < kTogether; ++k) take(terms[k]);
  }
  CHORUS_KEEP_LOOP
  for (; term < args.terms; term += args.parts) take(load(term));
  return Together<F, kPacked<In>>(results);
}
// A body as F says.
template <typename F, typename In, typename Out>
CHORUS_DEVICE void Reduce(const ReduceArgs<In, Out>& args, const Lane& lane) {
  for (int64_t i = lane.index; i < args.count; i += lane.count) {
    const int64_t line = UnsignedQuotient(i, args.columns);
    const int64_t row = UnsignedQuotient(line, args.parts);
    const In* const in = args.in + args.rows.At(row) + (i - line * args.columns);
    const int64_t term = line - row * args.parts;
    const auto result = args.packed ? OfPacks<F>(args, in, term) : OfTerms<F>(args, in, term);
    args.out[i] = static_cast<Out>(F::Finish(result, args.size));
  }
}

// Of elements, in one launch or the last of several: T is what they are and stay.
template <typename T>
using WholeArgs = ReduceArgs<T, T>;
// Of half types, parts are not rounded.
template <typename T>
using PartsArgs = ReduceArgs<T, float>;
template <typename T>
using FinishArgs = ReduceArgs<float, T>;

template <typename T>
struct SpreadArgs {
  static constexpr int kScratchPacks = 0;
  const T* in = nullptr;
  T* out = nullptr;
  int64_t count = 0;
  int64_t times = 1;
  Loops from;
};
template <typename T>
CHORUS_DEVICE void Spread(const SpreadArgs<T>& args, const Lane& lane) {
  SetElements(lane, args.count, args.out,
              [&](int64_t i) { return Divided<T>::Of(args.in[args.from.At(i)], args.times); });
}

// Integers wrap, whatever is lost of their parts.
#define CHORUS_SUM_KERNELS(X, op, F)                                        \
  X(op##_f16, WholeArgs<F16>, (Reduce<F<F16>, F16, F16>))                   \
  X(op##_parts_f16, PartsArgs<F16>, (Reduce<F<F16>, F16, float>))           \
  X(op##_finish_f16, FinishArgs<F16>, (Reduce<F<float>, float, F16>))       \
  X(op##_bf16, WholeArgs<BF16>, (Reduce<F<BF16>, BF16, BF16>))              \
  X(op##_parts_bf16, PartsArgs<BF16>, (Reduce<F<BF16>, BF16, float>))       \
  X(op##_finish_bf16, FinishArgs<BF16>, (Reduce<F<float>, float, BF16>))    \
  X(op##_f32, WholeArgs<float>, (Reduce<F<float>, float, float>))           \
  X(op##_f64, WholeArgs<double>, (Reduce<F<double>, double, double>))       \
  X(op##_1, WholeArgs<uint8_t>, (Reduce<F<uint8_t>, uint8_t, uint8_t>))     \
  X(op##_2, WholeArgs<uint16_t>, (Reduce<F<uint16_t>, uint16_t, uint16_t>)) \
  X(op##_4, WholeArgs<uint32_t>, (Reduce<F<uint32_t>, uint32_t, uint32_t>)) \
  X(op##_8, WholeArgs<uint64_t>, (Reduce<F<uint64_t>, uint64_t, uint64_t>))
// Its parts are sums.
#define CHORUS_MEAN_KERNELS(X)                                                       \
  X(mean_f16, WholeArgs<F16>, (Reduce<MeanReduction<F16>, F16, F16>))                \
  X(mean_finish_f16, FinishArgs<F16>, (Reduce<MeanReduction<float>, float, F16>))    \
  X(mean_bf16, WholeArgs<BF16>, (Reduce<MeanReduction<BF16>, BF16, BF16>))           \
  X(mean_finish_bf16, FinishArgs<BF16>, (Reduce<MeanReduction<float>, float, BF16>)) \
  X(mean_f32, WholeArgs<float>, (Reduce<MeanReduction<float>, float, float>))        \
  X(mean_f64, WholeArgs<double>, (Reduce<MeanReduction<double>, double, double>))
// What they select is one of the elements.
#define CHORUS_EXTREME_KERNELS(X, op, F)                                  \
  X(op##_f16, WholeArgs<F16>, (Reduce<F<F16>, F16, F16>))                 \
  X(op##_bf16, WholeArgs<BF16>, (Reduce<F<BF16>, BF16, BF16>))            \
  X(op##_f32, WholeArgs<float>, (Reduce<F<float>, float, float>))         \
  X(op##_f64, WholeArgs<double>, (Reduce<F<double>, double, double>))     \
  X(op##_i8, WholeArgs<int8_t>, (Reduce<F<int8_t>, int8_t, int8_t>))      \
  X(op##_u8, WholeArgs<uint8_t>, (Reduce<F<uint8_t>, uint8_t, uint8_t>))  \
  X(op##_i16, WholeArgs<int16_t>, (Reduce<F<int16_t>, int16_t, int16_t>)) \
  X(op##_i32, WholeArgs<int32_t>, (Reduce<F<int32_t>, int32_t, int32_t>)) \
  X(op##_i64, WholeArgs<int64_t>, (Reduce<F<int64_t>, int64_t, int64_t>))

#define CHORUS_KERNELS_OF_Sum(X)                              \
  CHORUS_SUM_KERNELS(X, sum, SumReduction)                    \
  CHORUS_SUM_KERNELS(X, prod, ProdReduction)                  \
  CHORUS_MEAN_KERNELS(X)                                      \
  CHORUS_EXTREME_KERNELS(X, max, MaxReduction)                \
  CHORUS_EXTREME_KERNELS(X, min, MinReduction)                \
  X(expand_1, LoopedMoveArgs<uint8_t>, LoopedMove<uint8_t>)   \
  X(expand_2, LoopedMoveArgs<uint16_t>, LoopedMove<uint16_t>) \
  X(expand_4, LoopedMoveArgs<uint32_t>, LoopedMove<uint32_t>) \
  X(expand_8, LoopedMoveArgs<uint64_t>, LoopedMove<uint64_t>) \
  X(spread_f16, SpreadArgs<F16>, Spread<F16>)                 \
  X(spread_bf16, SpreadArgs<BF16>, Spread<BF16>)              \
  X(spread_f32, SpreadArgs<float>, Spread<float>)             \
  X(spread_f64, SpreadArgs<double>, Spread<double>)

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SUM_SUM_KERNELS_H_
