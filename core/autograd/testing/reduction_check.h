// Checks of the gradients of reducing ops: all_reduce, reduce, reduce_scatter and
// reduce_scatter_tensor, every reduction, by the same naive formulas.
//
// The formulas are those of the whole: with every op, member r puts in x_r, some rows; the
// reduction y of all x_r, element by element, comes out on every member, on the root, or in pieces.
//
// Threads: each check runs in the thread that calls it. Ownership: plain values. Errors: fail the
// test.
#ifndef CHORUS_CORE_AUTOGRAD_TESTING_REDUCTION_CHECK_H_
#define CHORUS_CORE_AUTOGRAD_TESTING_REDUCTION_CHECK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/graph/graph.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"

namespace chorus {
namespace testing {

struct ReducingOp {
  std::string op;
  // Rows of each member's piece, for those that scatter: uneven, one is empty; else all the same.
  bool uneven = false;

  // Rows of x for that many members.
  int64_t Rows(int32_t ranks) const;
  // The op on `x`, its visible outputs. The factor of PREMUL_SUM is 1.5 + rank; the root is the
  // last member.
  std::vector<ValueIndex> ApplyReduction(RankBuilder& b, Reduction reduction, ValueIndex x) const;
};

// First and second order against differences, for each reduction of floating point.
void CheckReductionGradients(int32_t ranks, const ReducingOp& op);

// PRODUCT where up to three members have zeros at the same indices.
void CheckProductOfZeros(const ReducingOp& op);

// Results and first order against the formulas at ties, zeros of both signs, NaN, infinities, and
// where a product overflows that its exclusive products do not; with NaN and infinite gradients.
void CheckReductionValues(const ReducingOp& op);

// What a dtype does: integers wrap, bool is or and and, half types are accumulated in f32.
void CheckReductionDTypes(const ReducingOp& op);

// Ranks that abandon their tape entry or never wanted a gradient.
void CheckAbandonedReductions(const ReducingOp& op);

// Texts for what a reduction does not take, with this op's inputs.
void CheckReductionTexts(const std::string& op);

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_AUTOGRAD_TESTING_REDUCTION_CHECK_H_
