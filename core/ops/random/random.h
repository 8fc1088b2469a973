// Random numbers that are a function of a seed, an offset and the element's index alone: the same
// on every rank, device and partition, whatever ran before.
//
// random_bits, random_uniform and random_normal have the attributes dims and dtype, the result's
// type, and two inputs, seed and offset, both 0-dim i64. A step of a trainer takes its number as
// the offset, and a part of the program that wants numbers of its own another seed.
//
//   op                dtypes     element
//   random_bits       integers   its word's lowest bits, for i64 those of two words
//   random_uniform    floating   evenly in [0, 1), multiples of 2^-8 (bf16), 2^-11 (f16), 2^-24
//                                (f32) and 2^-53 (f64)
//   random_normal     floating   normally distributed, mean 0 and variance 1
//
// Block n of Philox 4x32-10 (philox.h) has the seed as its key and (n, offset), 64 bits each, the
// lower half first, as its counter; so numbers repeat for no two pairs of seed and offset, of which
// there are 2^128. An element takes one of the four words of a block, f64 and i64 two. Normal
// numbers come in pairs, from two uniform ones u and v by Box and Muller:
//   sqrt(-2 log u) cos(2 pi v), sqrt(-2 log u) sin(2 pi v)
// computed in f32 (f64 in f64) and rounded once; |z| <= 6.8 (8.7). All of them are the same, to the
// last bit, on every machine and on GPUs: log, sin and cos are the ops' own (numbers.h).
//
// Gradients: none; seed and offset are integers.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError).
#ifndef CHORUS_CORE_OPS_RANDOM_RANDOM_H_
#define CHORUS_CORE_OPS_RANDOM_RANDOM_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> RandomOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_RANDOM_RANDOM_H_
