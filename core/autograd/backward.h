// Reverse-mode differentiation of a recorded sequence of nodes, graph to graph.
//
// Walks the record from its end to its start and calls each op's gradient rule (core/ops/op.h), so
// the backward pass is made of the same ops and can be differentiated again: append what was
// emitted to the record and call again.
//
// The loss is the sum over ranks of each rank's loss. Backward collectives are emitted in the
// reverse order of their forward collectives, on every rank, whatever local ops lie between: ranks
// with different local graphs agree. Every collective that the roots' history leads to takes part,
// with zeros for outputs whose gradient is not asked for here: other ranks wait for it, and what
// they give may have its way through this rank's local ops. So does every node with a rule of its
// recorder's own. Where several gradients meet they are
// added in the order in which the walk finds them: bits do not depend on anything but the record.
//
// Method: accumulation of vector-Jacobian products in reverse program order (reverse-mode automatic
// differentiation, Linnainmaa 1970).
//
// Threads: pure functions, without clock or I/O; the emitter belongs to one thread. Ownership: the
// record and the emitter are the caller's. Errors: said at BuildBackward(), and the emitter's; what
// was emitted before one stays emitted.
#ifndef CHORUS_CORE_AUTOGRAD_BACKWARD_H_
#define CHORUS_CORE_AUTOGRAD_BACKWARD_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/graph/graph.h"
#include "core/ops/graph_builder.h"
#include "core/ops/op.h"

namespace chorus {

// Where a backward pass starts: at a value with the gradient of the loss with respect to it, or at
// a collective node with nothing: this rank's loss does not use its result (reduce off its root and
// send have none), but other ranks' losses may, and this rank's input has a gradient from them.
struct BackwardRoot {
  ValueIndex value = -1;
  ValueIndex seed = -1;  // same type as `value`
  int32_t node = -1;     // an index into the record; used when `value` is -1

  static BackwardRoot Value(ValueIndex value, ValueIndex seed) { return {value, seed, -1}; }
  static BackwardRoot AbsentResult(int32_t node) { return {-1, -1, node}; }
};

struct BackwardResult {
  // For each wanted value; absent: the roots do not depend on it (its gradient is zero).
  std::vector<absl::optional<ValueIndex>> gradients;
  // The nodes whose rules were called, as indices into the record, last first.
  struct Visited {
    int32_t node = -1;
    // The gradient of a root came here, by local ops and collectives: the tape's entry is used up.
    // Else a collective took part with zeros, or a local op had what others gave to such a one.
    bool reached = false;
  };
  std::vector<Visited> visited;
};

// `record`: the history of the roots, nodes in program order; `wanted`: values, inputs of the
// record or results within it. Local nodes are visited only where they lie between a root and a
// wanted value or a collective with wants_grad; of those collectives each is. Integer values carry
// no gradient and end the walk. INVALID_ARGUMENT: a seed of another type, a root or wanted value
// that is not floating point, a root node out of range.
// FAILED_PRECONDITION: a wanted value is reached through a collective that was recorded with
// wants_grad off. UNIMPLEMENTED: through an op without a gradient.
absl::StatusOr<BackwardResult> BuildBackward(absl::Span<const RecordedNode* const> record,
                                             absl::Span<const BackwardRoot> roots,
                                             absl::Span<const ValueIndex> wanted, Emitter* emitter);

// The same over what the roots were computed from of what `builder` holds so far (root nodes, and
// those visited, are indices of its nodes).
absl::StatusOr<BackwardResult> AppendBackward(absl::Span<const BackwardRoot> roots,
                                              absl::Span<const ValueIndex> wanted,
                                              GraphBuilder* builder);

}  // namespace chorus

#endif  // CHORUS_CORE_AUTOGRAD_BACKWARD_H_
