// A node on its way into a graph: as a caller writes it, and as a shape rule sees it.
//
// Threads: plain data. Ownership: a NodeSpec has copies, a NodeView refers to memory of the caller.
// Errors: what does not fit is INVALID_ARGUMENT kBadType, see ShapeError.
#ifndef CHORUS_CORE_OPS_NODE_SPEC_H_
#define CHORUS_CORE_OPS_NODE_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/graph/graph.h"
#include "core/tensor/type.h"

namespace chorus {

using Attributes = std::vector<Attribute>;  // sorted by name, no name twice

// A node whose outputs are still to be inferred.
struct NodeSpec {
  std::string op;
  int32_t version = 1;
  Attributes attributes;
  std::vector<ValueIndex> inputs;
  int32_t device_slot = 0;
  absl::optional<Collective> collective;  // present exactly for collective ops
  std::string source;
};

// What a shape rule sees of a node. Refers to memory of the caller.
struct NodeView {
  absl::string_view op;
  int32_t version = 1;
  absl::Span<const Attribute> attributes;
  absl::Span<const TensorType* const> inputs;
  const Collective* collective = nullptr;
  int32_t group_size = 0;    // of the collective's group
  absl::string_view source;  // the trainer's file:line, for what fails as the node runs

  int num_inputs() const { return static_cast<int>(inputs.size()); }
  const TensorType& input(int i) const { return *inputs[i]; }
};

// A node of a graph whose inputs have these types; group_size is the caller's to say. Refers to
// both.
NodeView ViewOf(const Node& node, absl::Span<const TensorType* const> inputs);

// No value of any graph is larger than this: the daemon's own limits are below it, and it keeps
// every product of sizes within 64 bits.
inline constexpr int64_t kMaxValueBytes = int64_t{1} << 40;

// --- Attributes ---

const AttributeValue* FindAttribute(absl::Span<const Attribute> attributes, absl::string_view name);
// The value, or `otherwise` when it is absent. Kinds were checked by InferTypes (registry.h).
int64_t IntAttribute(absl::Span<const Attribute> attributes, absl::string_view name,
                     int64_t otherwise = 0);
std::vector<int64_t> IntsAttribute(absl::Span<const Attribute> attributes, absl::string_view name);

// A type written as attributes `dims` and `dtype`, for ops that have no input to take it from.
Attributes TypeAttributes(const TensorType& type);
// INVALID_ARGUMENT when they are missing or are no type.
absl::StatusOr<TensorType> TypeOfAttributes(const NodeView& node);

// INVALID_ARGUMENT, kBadType: "add: expected ..., got ...", with op, expected and got apart.
absl::Status ShapeError(const NodeView& node, absl::string_view expected, absl::string_view got);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_NODE_SPEC_H_
