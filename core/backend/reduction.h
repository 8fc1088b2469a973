// Element-wise reduction between ranks, of any number of inputs in one pass: one read of each input
// and one write, whatever their number.
//
// There is one order. Operand r is what the member of rank r in the group has, and of n ranks from
// lo on
//   T(lo, n) = operand lo where n = 1, else T(lo, p) op T(lo + p, n - p),
// p the largest power of two below n. out = T(0, size), over all ranks of the group, the same for
// every form, piece, destination, chunk and coalescing, so that bits do not depend on where the
// members are: a device that has some of the operands can send on what they come to. A subtree in
// which no member is present is nothing, and a node with one such side is its other side: absent is
// not zero, which may differ from it in the sign of a zero.
//
// An element's bits depend on its operands alone: not on vector width, instruction set or position.
// To that end
// * PREMUL_SUM's factors are applied to the operands, and AVG divides T by the number of all
//   members of the group, also where some are absent;
// * half types are floats up to T, which is rounded once, to nearest even;
// * where T is NaN it becomes the one NaN (positive, quiet, no payload): which operand's payload
//   survives an addition is the compiler's choice;
// * MIN and MAX give NaN where any operand is NaN, and of +0 and -0 the left one;
// * integers wrap; bool operands are true where any bit is set, bool results are 0 or 1, SUM and
//   MAX are or, PRODUCT and MIN are and.
//
// Threads: pure functions. Ownership: operands and results are the caller's. Errors: none; where
// there is no such reduction there is no function.
#ifndef CHORUS_CORE_BACKEND_REDUCTION_H_
#define CHORUS_CORE_BACKEND_REDUCTION_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "core/graph/graph.h"
#include "core/tensor/type.h"

namespace chorus {

// The tree over the ranks of those operands that there are, as steps that take them one after the
// other and need no recursion. Threads: thread-compatible.
class ReductionTree {
 public:
  // Heights of a tree of as many ranks as int32_t numbers: no more partial results ever wait.
  static constexpr int kMaxHeight = 31;
  static constexpr int kMostOperands = 4;

  // The next `operands` operands (1, 2 or kMostOperands, of which the tree is whole) are reduced.
  // What comes of it is combined, from the left, with `joins` of the results that wait, the latest
  // first, and then waits itself. After the last step one result is left.
  struct Step {
    uint8_t operands = 1;
    uint8_t joins = 0;
  };

  // `ranks` ascend from 0 on. Allocates nothing that a tree of as many has had before, and does
  // nothing for the same ones again.
  void Set(absl::Span<const int32_t> ranks);
  // With the ranks 0 to size - 1.
  static ReductionTree Whole(int size);

  const Step* steps() const { return steps_.data(); }
  size_t num_steps() const { return steps_.size(); }

 private:
  std::vector<int32_t> ranks_;
  std::vector<Step> steps_;
};

// What is reduced, to where. `output` may be one of the inputs; other overlaps are not allowed.
struct ReducePass {
  static constexpr ReductionTree::Step kOneInput = {1, 0};

  const void* const* inputs = nullptr;            // by rank, without those that are absent
  int num_inputs = 0;                             // at least 1
  const ReductionTree::Step* steps = &kOneInput;  // of the tree of the inputs' ranks
  void* output = nullptr;
  // AVG and PREMUL_SUM: the terms factors[k] in[k] are reduced, and T is divided by divisor.
  // Factors are numbers of the accumulator (f64 for f64, else f32).
  const double* factors = nullptr;
  double divisor = 1;
};

// Reduces elements [begin, end). `streaming` writes past the caches: for results larger than these.
// The result is then visible to other threads as soon as a later release of this one is (the
// function fences itself).
using ReduceFunction = void (*)(const ReducePass& pass, int64_t begin, int64_t end, bool streaming);

// Null where there is no such reduction: AVG and PREMUL_SUM are for floating dtypes, BAND, BOR and
// BXOR for the others; complex dtypes have none.
ReduceFunction FindReduction(Reduction reduction, DType dtype);

// Whether the reduction of a single input may differ from it. If not, it is that input, bit for
// bit: a copy (which keeps the payload of a NaN).
bool ChangesSingleInput(Reduction reduction, DType dtype);

// For MIN and MAX of a floating dtype: holders[k][i] = the number of inputs whose element i holds
// result[i], that is equals it or is NaN like it, where inputs[k][i] is one of them, else 0. Null
// in `holders`: not wanted. Elements [begin, end); writes nothing but holders.
using HoldersFunction = void (*)(const void* const* inputs, int num_inputs, const void* result,
                                 float* const* holders, int64_t begin, int64_t end);
// Null for other dtypes.
HoldersFunction FindHolders(DType dtype);

// Plain copy with the same choice of stores.
void CopyBytes(void* to, const void* from, int64_t bytes, bool streaming);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_REDUCTION_H_
