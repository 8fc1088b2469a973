// All ops of this build, and the check that every node passes before its own shape rule.
//
// Threads: any; the tables are immutable. Ownership: definitions are static. Errors: said at
// InferTypes().
#ifndef CHORUS_CORE_OPS_REGISTRY_H_
#define CHORUS_CORE_OPS_REGISTRY_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/ops/op.h"

namespace chorus {

// Null for a name that this build does not have.
const OpDef* FindOp(absl::string_view name);
// Sorted by name.
absl::Span<const OpDef* const> AllOps();

// The types of a node's outputs. INVALID_ARGUMENT (kBadType): arity, attributes, collective fields
// or shapes that the op does not take, with op, expected and got in the Error. UNIMPLEMENTED
// (kUnsupported): an op, version or dtype that this build does not run. RESOURCE_EXHAUSTED
// (kOutOfMemory): an input or output of more than kMaxValueBytes.
// Where the node stands in a graph is not its business: ValidateGraph checks device and group
// slots.
absl::StatusOr<std::vector<TensorType>> InferTypes(const NodeView& node);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_REGISTRY_H_
