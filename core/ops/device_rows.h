// Rows of a tensor along an axis, for kernels of GPUs: each is cut into parts, so that a few long
// rows are work for many threads, and neighbouring threads read neighbouring elements.
//
// Part p of `parts` has elements p, p + parts, p + 2 parts and so on of its row. Parts are counted
// as a tensor [outer,parts,stride] is, so that parts of neighbouring numbers have neighbouring
// elements, whatever the axis. How many there are depends on sizes alone (core/ops/cuda_rows.h).
//
// Threads: pure functions. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_OPS_DEVICE_ROWS_H_
#define CHORUS_CORE_OPS_DEVICE_ROWS_H_

#include <cstdint>

#include "core/base/device.h"

namespace chorus {
namespace cuda {

// A tensor [outer,size,stride]; a row is what one outer and one inner index select.
struct RowParts {
  int64_t outer = 0;
  int64_t size = 0;
  int64_t stride = 1;
  int64_t parts = 1;  // of each row

  CHORUS_DEVICE int64_t count() const { return outer * parts * stride; }
  // From an element of a part to the next.
  CHORUS_DEVICE int64_t step() const { return parts * stride; }
};

struct RowPart {
  int64_t outer = 0;
  int64_t inner = 0;
  int64_t row = 0;
  int64_t index = 0;  // of its first element, in the row
  int64_t at = 0;     // where that stands
};

CHORUS_DEVICE RowPart PartOf(const RowParts& rows, int64_t number) {
  RowPart part;
  const int64_t rest = number / rows.stride;
  part.inner = number - rest * rows.stride;
  part.outer = rest / rows.parts;
  part.index = rest - part.outer * rows.parts;
  part.row = part.outer * rows.stride + part.inner;
  part.at = (part.outer * rows.size + part.index) * rows.stride + part.inner;
  return part;
}

// Calls take(i, at, load(at)) for each element of a part, in its order: the i-th of its row, which
// stands `at`. Several are loaded before the first of them is taken, so that their loads are under
// way together.
template <typename Load, typename Take>
CHORUS_DEVICE void ForElementsOf(const RowParts& rows, const RowPart& part, const Load& load,
                                 const Take& take) {
  constexpr int kTogether = 4;
  const int64_t step = rows.step();
  int64_t i = part.index;
  int64_t at = part.at;
  CHORUS_KEEP_LOOP
  for (; i + (kTogether - 1) * rows.parts < rows.size; i += kTogether * rows.parts) {
    decltype(load(at)) elements[kTogether];
    CHORUS_UNROLL
    for (int k = 0; k < kTogether; ++k) elements[k] = load(at + k * step);
    CHORUS_UNROLL
    for (int k = 0; k < kTogether; ++k) take(i + k * rows.parts, at + k * step, elements[k]);
    at += kTogether * step;
  }
  CHORUS_KEEP_LOOP
  for (; i < rows.size; i += rows.parts) {
    take(i, at, load(at));
    at += step;
  }
}

// Takes what `count` parts of each row gave together, to what `parts` of them would have given. A
// State has Merge(other), which does not ask for an order.
template <typename State>
struct MergeArgs {
  static constexpr int kScratchPacks = 0;
  const State* from = nullptr;
  State* to = nullptr;
  RowParts rows;  // of states: as many as there are in each row
};
template <typename State>
CHORUS_DEVICE void MergeParts(const MergeArgs<State>& args, const Lane& lane) {
  const RowParts& rows = args.rows;
  for (int64_t t = lane.index; t < rows.count(); t += lane.count) {
    RowPart part = PartOf(rows, t);
    State state = args.from[part.at];
    part.index += rows.parts;
    part.at += rows.step();
    ForElementsOf(
        rows, part, [&](int64_t at) { return args.from[at]; },
        [&](int64_t, int64_t, const State& other) { state.Merge(other); });
    args.to[t] = state;
  }
}

}  // namespace cuda
}  // namespace chorus

#endif  // CHORUS_CORE_OPS_DEVICE_ROWS_H_
