// Element-wise reduction of any number of inputs in one pass, in the order in which they are given.
//
// out[i] = ((in[0][i] op in[1][i]) op in[2][i]) ...: one read of each input and one write, whatever
// their number. An element's bits depend on its operands alone: not on vector width, instruction
// set, chunk or position. To that end
// * half types are computed in float and rounded once, to nearest even;
// * a NaN result is always the same one (positive, quiet, no payload): which operand's payload
//   survives an addition is the compiler's choice;
// * MIN and MAX give NaN where any operand is NaN, and of +0 and -0 the one that comes first;
// * integers wrap; bool operands are true where any bit is set, bool results are 0 or 1, SUM and
//   MAX are or, PRODUCT and MIN are and.
// Threads: pure functions.
#ifndef CHORUS_CORE_BACKEND_REDUCTION_H_
#define CHORUS_CORE_BACKEND_REDUCTION_H_

#include <cstdint>

#include "core/graph/graph.h"
#include "core/tensor/type.h"

namespace chorus {

// What is reduced, to where. `output` may be one of the inputs; other overlaps are not allowed.
struct ReducePass {
  const void* const* inputs = nullptr;
  int num_inputs = 0;  // at least 1
  void* output = nullptr;
  // AVG and PREMUL_SUM: (factors[0] in[0] + factors[1] in[1] ...) / divisor, with factors that are
  // numbers of the accumulator (f64 for f64, else f32).
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

// Whether the reduction of a single input may differ from it. If not, a copy is enough (and keeps
// the payload of a NaN).
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
