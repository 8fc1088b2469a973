// matmul(a, b): the product of two matrices, op(a) op(b), or of as many pairs as there are.
//
// Attributes transpose_a, transpose_b (0 or 1, 0 if absent): op(x) is x or its transpose.
// Shapes: op(a) [...,m,k], op(b) [...,k,n] -> [...,m,n], one dtype, the same leading dimensions; k
// = 0 gives zeros. Half types add up in f32 and are rounded once; integers wrap. Leading dimensions
// do not broadcast here: the SDK's MatMul folds those of a into m where b has none, which costs
// nothing, and expands otherwise. VJP for output gradient g [...,m,n], with the transposes folded
// into flags, so that nothing is copied:
//   a: g op(b)^T, transposed when transpose_a;   b: op(a)^T g, transposed when transpose_b.
// Second order: the VJP is made of matmul, so it goes through matmul.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_MATMUL_MATMUL_H_
#define CHORUS_CORE_OPS_MATMUL_MATMUL_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> MatmulOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_MATMUL_MATMUL_H_
