// Element-wise reduction of any number of inputs in one pass, in the order in which they are given.
//
// out[i] = ((in[0][i] op in[1][i]) op in[2][i]) ...: one read of each input and one write, whatever
// their number. An element's bits depend on its operands alone: not on vector width, chunk or
// position. Integers wrap. Later half types accumulate in float and round once.
// Threads: pure functions.
#ifndef CHORUS_CORE_BACKEND_REDUCTION_H_
#define CHORUS_CORE_BACKEND_REDUCTION_H_

#include <cstdint>

#include "core/graph/graph.h"
#include "core/tensor/type.h"

namespace chorus {

// Reduces elements [begin, end). `output` may be one of the inputs; other overlaps are not allowed.
// `streaming` writes past the caches: for results larger than these. The result is then visible to
// other threads as soon as a later release of this one is (the function fences itself).
using ReduceFunction = void (*)(const void* const* inputs, int num_inputs, void* output,
                                int64_t begin, int64_t end, bool streaming);

// Null where this build cannot reduce `dtype` that way.
ReduceFunction FindReduction(Reduction reduction, DType dtype);

// Plain copy with the same choice of stores.
void CopyBytes(void* to, const void* from, int64_t bytes, bool streaming);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_REDUCTION_H_
