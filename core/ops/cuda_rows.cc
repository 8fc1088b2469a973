#include "core/ops/cuda_rows.h"

#include <algorithm>

#include "core/ops/long_sums.h"

namespace chorus {
namespace {

// Threads that read memory side by side.
constexpr int64_t kNeighbours = 32;
// Threads at which a large GPU has enough loads under way.
constexpr int64_t kBusy = int64_t{1} << 17;

int64_t Quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

cuda::RowParts Cut(int64_t outer, int64_t size, int64_t stride, int64_t least) {
  cuda::RowParts rows = {outer, size, stride, 1};
  const int64_t count = outer * stride;
  if (count == 0 || size == 0) return rows;
  const int64_t wanted =
      std::max({Quotient(kNeighbours, stride), Quotient(kBusy, count), Quotient(size, kMostTerms)});
  rows.parts = std::min(wanted, Quotient(size, least));
  return rows;
}

}  // namespace

cuda::RowParts CutRows(const HostRows& rows, int64_t least) {
  return Cut(rows.outer, rows.size, rows.stride, least);
}

cuda::RowParts CutRows(int64_t count, int64_t size, int64_t least) {
  return Cut(count, size, 1, least);
}

int64_t PlaceResult(const cuda::RowParts& rows, int64_t state_bytes, int64_t* end) {
  const int64_t result = *end;
  *end += rows.outer * rows.stride * state_bytes;
  return result;
}

PartStates PlaceStates(const cuda::RowParts& rows, int64_t state_bytes, int64_t* end) {
  PartStates states;
  states.result = PlaceResult(rows, state_bytes, end);
  states.first = *end;
  if (rows.parts > 1) *end += rows.count() * state_bytes;
  states.second = *end;
  const int64_t merged = Quotient(rows.parts, kMergedParts);
  if (merged > 1) *end += rows.outer * merged * rows.stride * state_bytes;
  return states;
}

}  // namespace chorus
