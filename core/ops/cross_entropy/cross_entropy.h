// cross_entropy(logits, labels): what a classifier loses, of each row of scores.
//
// Shapes: logits [...,classes], floating point; labels [...], of any integer dtype -> [...] in the
// dtype of logits. loss = -log_softmax(logits)[label]; nothing is summed.
// Attribute ignore_index (absent: none): rows with that label have loss 0 and take no part. Another
// label below 0 or beyond the last class is INVALID_ARGUMENT from the run.
// Rows with NaN or +inf, or nothing but -inf, lose NaN. They are added up as those of softmax.
// VJP: cross_entropy_grad(logits, labels, g) = g (softmax(logits) - one_hot(labels)), or 0 in
// ignored rows whatever stands there; labels have none.
// VJP of cross_entropy_grad for h, where p = softmax(logits) and u = g h:
//   logits: softmax_grad(p, u) along the classes (core/ops/softmax/softmax.h), 0 in ignored rows;
//   g: sum h (p - one_hot(labels)) along the classes.
// p is not taken from p - one_hot(labels), which is -1 where p is small, nor 1 - p from p: where a
// class is all but certain each has its digits. Made of cross_entropy_grad, softmax, its gradient,
// mul, sum, reshape and expand, and with ignore_index of one_hot, eq and where: any order.
//
// Threads: any; definitions are never changed. Ownership: they are static. Errors: INVALID_ARGUMENT
// kBadType for a node that does not fit (ShapeError), and from the run for a label as said above.
#ifndef CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_H_
#define CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_H_

#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

absl::Span<const OpDef* const> CrossEntropyOps();

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CROSS_ENTROPY_CROSS_ENTROPY_H_
