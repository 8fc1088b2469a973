// The pieces that a collective moves between the members of its group, as one member sees them.
//
// A list form has one tensor for each piece; in a single-tensor form all pieces stand in one, one
// after the other along dimension 0. To a plan, and to what ranks agree on, both are lists.
// Where rows are only known at run time, a tensor counts as one piece.
//
// Threads: pure functions. Ownership: plain values. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_PLAN_COLLECTIVE_PIECES_H_
#define CHORUS_CORE_RUNTIME_PLAN_COLLECTIVE_PIECES_H_

#include <cstdint>
#include <vector>

#include "core/collective/instance.h"
#include "core/graph/graph.h"
#include "core/ops/op.h"
#include "core/tensor/type.h"

namespace chorus::planning {

struct CollectivePieces {
  DType dtype = DType::kUnspecified;
  std::vector<int64_t> dims;     // of a piece; dims[0] is that of the first
  int64_t row_elements = 1;      // of one row; a piece of no dimensions is one row
  std::vector<int64_t> inputs;   // rows of each piece that goes in
  std::vector<int64_t> outputs;  // rows of each that comes out (of the op's result, no extras)

  // Where piece `i` begins in a single tensor, in bytes. Linear in `i`.
  int64_t InputOffset(size_t i) const { return Before(inputs, i) * DTypeBytes(dtype); }
  int64_t OutputOffset(size_t i) const { return Before(outputs, i) * DTypeBytes(dtype); }

 private:
  int64_t Before(const std::vector<int64_t>& rows, size_t i) const;
};

// `node` is a collective that passed InferTypes; `def` is its op, `group_size` its group's.
CollectivePieces FindPieces(const Node& node, const OpDef& def, const ValueTable& values,
                            int32_t group_size);

// What the node's rank asks the others for.
Descriptor DescriptorOf(const Node& node, const CollectivePieces& pieces);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_COLLECTIVE_PIECES_H_
