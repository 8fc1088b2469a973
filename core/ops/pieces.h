// What the shape rules of moving collectives share: pieces that are alike but for their rows.
//
// A piece is what goes from one member to another; its rows are its dimension 0. Pieces of one
// collective have the same dtype and the same other dimensions.
//
// Threads: pure functions. Ownership: copies. Errors: what does not fit is INVALID_ARGUMENT
// kBadType, see ShapeError; those on gradients are the emitter's.
#ifndef CHORUS_CORE_OPS_PIECES_H_
#define CHORUS_CORE_OPS_PIECES_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

// `piece` with another number of rows; it has at least one dimension.
TensorType WithRows(TensorType piece, int64_t rows);
// Pieces like `piece` with that many rows.
std::vector<TensorType> PiecesOf(const TensorType& piece, absl::Span<const int64_t> rows);

// One input for each member, alike but for their rows; 0-dim ones are of one type.
absl::Status CheckInputPieces(const NodeView& node);
// Input `i` has `rows` rows: what the counts say of it.
absl::Status CheckRows(const NodeView& node, int i, int64_t rows);
// Input 0 has rows, that is a dimension.
absl::Status CheckHasRows(const NodeView& node);

// The rows of member `rank`'s piece, of those that one tensor holds: by `counts`, one for each
// member, or an equal part of its rows.
absl::StatusOr<int64_t> RowsOfPiece(const NodeView& node, absl::Span<const int64_t> counts,
                                    int32_t rank);

// What members' pieces like input 0 make one after the other: by the counts, else all equal.
absl::StatusOr<TensorType> PiecesInOneTensor(const NodeView& node);

// The rows of a node's input pieces, which have a dimension.
std::vector<int64_t> RowsOfInputs(const GradientContext& context);
// The same as counts: empty where all pieces are equal.
std::vector<int64_t> CountsOfInputs(const GradientContext& context);

// The output gradients of a gradient rule, zeros where there is none.
absl::StatusOr<std::vector<ValueIndex>> VisibleGradients(GradientContext* context);

// Whether the member that a node speaks for is the root.
inline bool IsRoot(const NodeView& node) { return node.collective->rank == node.collective->root; }
// The type that comes to a member off the root, from its attributes.
absl::StatusOr<TensorType> TypeOffRoot(const NodeView& node);
// On the root: that many inputs, and no attributes, which are for the others.
absl::Status CheckOnRoot(const NodeView& node, int num_inputs);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_PIECES_H_
