// What the inputs and outputs of a collective's node are: its pieces, counts, factor and extras.
//
// Threads: any; plain functions. Ownership: none. Errors: none; InferTypes (registry.h) checks what
// a node has.
#ifndef CHORUS_CORE_OPS_COLLECTIVE_OPERANDS_H_
#define CHORUS_CORE_OPS_COLLECTIVE_OPERANDS_H_

#include <cstdint>

#include "core/graph/collective_kind.h"
#include "core/graph/graph.h"
#include "core/tensor/type.h"

namespace chorus {

// Counts that are known only when a collective runs, of the forms with one tensor: Collective says
// which input is the first that holds them (runtime_counts_input) and how many rows the output has
// room for (runtime_count_maximum). All are i64 of one dimension.
//   inputs   x, the pieces one after the other from its first row on; then `sends`, the rows for
//            each member (all_gather, gather: how many of x count), where there is an x; then, if
//            there, `receives`, what is expected from each member (reduce_scatter, scatter: of
//            one's own piece): a member that is absent from a gradient gives as many zeros
//   outputs  y, with zeros behind the last piece; then `received`, like `receives`: what came
// Wrong counts end the run; the shape rules see none of them. They have no gradient.
constexpr bool HasRuntimeCounts(const Collective& c) { return c.runtime_counts_input >= 0; }
// How many numbers `sends`, and `receives` and `received`, are on this member; 0: it has none.
constexpr int32_t NumRuntimeSends(const Collective& c, int32_t group_size) {
  return PiecesOn(FactsOf(c.kind).in, group_size, c.rank == c.root);
}
constexpr int32_t NumRuntimeReceives(const Collective& c, int32_t group_size) {
  return PiecesOn(FactsOf(c.kind).out, group_size, c.rank == c.root);
}

// How many of a collective node's inputs are its pieces. Counts come after them, and last of all
// the factor of PREMUL_SUM.
constexpr int NumPieces(const Collective& c, int num_inputs) {
  if (HasRuntimeCounts(c)) return c.runtime_counts_input;
  return c.reduction == Reduction::kPremulSum ? num_inputs - 1 : num_inputs;
}
// The dtype of the factor of PREMUL_SUM, a 0-dim tensor.
constexpr DType FactorType(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// Outputs that a reducing collective has after its visible ones, for its gradient rule: what
// backward needs from other members is computed in forward, so that every backward collective is
// linear in the gradients that come in. Each rank has them or not, as it wants a gradient.
enum class Extras : uint8_t {
  kNone = 0,
  // MIN, MAX: for each piece that goes in, f32 of its dims: how many members hold the result
  // (their element equals it, +0 = -0, or is NaN where the result is), where this member does;
  // else 0. Every member has them, where the result is absent as well.
  kHolders = 1,
  // PRODUCT, where the result is: each member's factors of it, in rank order. They only move, like
  // what OutputAlias::kMember names. The inputs are then saved for backward by everybody.
  kFactors = 2,
};
inline Extras ExtrasOf(const Collective& c, DType dtype) {
  if (!c.wants_grad || !IsReducing(c.kind) || !IsFloating(dtype)) return Extras::kNone;
  if (c.reduction == Reduction::kProduct) return Extras::kFactors;
  const bool selects = c.reduction == Reduction::kMin || c.reduction == Reduction::kMax;
  return selects ? Extras::kHolders : Extras::kNone;
}
// How many of a collective node's outputs are not extras.
constexpr int NumVisibleOutputs(const Collective& c, int num_outputs) {
  if (!IsReducing(c.kind)) return num_outputs;
  if (HasRuntimeCounts(c)) return 2;
  return AnyOn(FactsOf(c.kind).out, c.rank == c.root) ? 1 : 0;
}

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_COLLECTIVE_OPERANDS_H_
