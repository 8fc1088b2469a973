// The graph: an immutable DAG of ops as one session sees it, every node on a device slot.
//
// These types say more than this build runs: what cannot run yet is still decoded and checked, and
// then refused as UNIMPLEMENTED (core/ops/validate.h). Values are numbered: the graph's inputs
// first, then each node's outputs in program order. Ops are pure and outputs fresh; a value crosses
// devices only by a `copy` node or a collective.
//
// Threads: plain data. Ownership: values; a ValueTable refers to its graph. Errors: none;
// ValidateGraph (core/ops/validate.h) says what is wrong with a graph.
#ifndef CHORUS_CORE_GRAPH_GRAPH_H_
#define CHORUS_CORE_GRAPH_GRAPH_H_

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "absl/types/variant.h"
#include "core/base/ids.h"
#include "core/base/index.h"
#include "core/base/indexed_vector.h"
#include "core/graph/collective_kind.h"
#include "core/tensor/type.h"

namespace chorus {

// A node in its graph, in program order; a value. Negative: none.
using NodeIndex = Index<struct NodeIndexTag>;
using ValueIndex = Index<struct ValueIndexTag>;

// A small named constant of a node: an axis list, a scale, a permutation.
using AttributeValue = absl::variant<int64_t, double, std::vector<int64_t>, std::string>;
struct Attribute {
  std::string name;
  AttributeValue value;
  friend bool operator==(const Attribute& a, const Attribute& b) {
    return a.name == b.name && a.value == b.value;
  }
};

enum class Effect : uint8_t { kPure = 0, kCollective = 1, kRandom = 2 };

// Which instance of its group a collective node takes part in.
struct InstanceRef {
  enum class Kind : uint8_t {
    kNext = 0,      // the next index of its group (or of its pair and tag), in program order
    kGradient = 1,  // the gradient of the instance of node `node` of this graph, request `request`
    kBound = 2,     // what the run binds to instance slot `slot`
  };
  Kind kind = Kind::kNext;
  int32_t node = -1;
  int32_t request = 0;
  int32_t slot = -1;
  friend bool operator==(const InstanceRef& a, const InstanceRef& b) {
    return a.kind == b.kind && a.node == b.node && a.request == b.request && a.slot == b.slot;
  }
};

struct Collective {
  CollectiveKind kind = CollectiveKind::kUnspecified;
  int32_t group_slot = 0;
  GroupRank rank;      // which of the members held here this node speaks for
  GroupRank root{-1};  // broadcast, reduce, gather, scatter
  Reduction reduction = Reduction::kNone;
  bool wants_grad = false;  // this rank holds a tape entry for it
  // Where the operand on this rank comes from, as far as gradients are concerned: what others lose
  // when they ask for one and this rank has given its part up.
  bool leads_to_collective = false;
  bool leads_to_leaf = false;  // without a collective in between
  GroupRank peer{-1};          // send, recv
  int64_t tag = 0;             // send, recv
  InstanceRef instance;
  // Of a coalesced call: 0 for its first collective, then 1, 2 ... in the nodes that follow for the
  // same group and rank. One call has one position, whatever is in its list.
  int32_t part = 0;
  // Uneven sizes: all ranks' counts in rows, or the index of the input that holds them at run time
  // with the most that each may be.
  std::vector<int64_t> counts;
  int32_t runtime_counts_input = -1;
  int64_t runtime_count_maximum = 0;

  friend bool operator==(const Collective& a, const Collective& b);
};

struct Node {
  std::string op;  // "add"; see core/ops/registry.h
  int32_t version = 1;
  std::vector<Attribute> attributes;  // sorted by name, no name twice
  std::vector<ValueIndex> inputs;
  std::vector<TensorType> outputs;  // what the shape rule gives; checked against it
  int32_t device_slot = 0;
  Effect effect = Effect::kPure;
  absl::optional<Collective> collective;  // present exactly for Effect::kCollective
  std::string source;                     // trainer's file:line; not part of the hash

  friend bool operator==(const Node& a, const Node& b);
};

enum class InputRole : uint8_t { kData = 0, kState = 1, kScalar = 2, kSeed = 3 };

struct GraphInput {
  TensorType type;
  InputRole role = InputRole::kData;
  bool donatable = false;
  int32_t device_slot = 0;
  friend bool operator==(const GraphInput& a, const GraphInput& b) {
    return a.type == b.type && a.role == b.role && a.donatable == b.donatable &&
           a.device_slot == b.device_slot;
  }
};

struct GraphOutput {
  ValueIndex value = 0;
  InputRole role = InputRole::kData;
  int32_t may_alias = -1;  // a donatable input whose memory this output may take over
  friend bool operator==(const GraphOutput& a, const GraphOutput& b) {
    return a.value == b.value && a.role == b.role && a.may_alias == b.may_alias;
  }
};

struct GroupSlot {
  int32_t size = 0;                   // members of any group bound here
  std::vector<GroupRank> held;        // which of them this session holds, ascending
  std::vector<int32_t> device_slots;  // the device slot of each of `held`
  friend bool operator==(const GroupSlot& a, const GroupSlot& b) {
    return a.size == b.size && a.held == b.held && a.device_slots == b.device_slots;
  }
};

// A number in a node that depends on a size that a run fixes: scale * size + offset. See
// core/ops/specialize.h.
struct SizeRule {
  enum class Field : uint8_t {
    kAttribute = 0,            // attribute number `attribute`, or element `element` of it
    kCount = 1,                // Collective::counts[element]
    kRuntimeCountMaximum = 2,  // Collective::runtime_count_maximum
  };
  NodeIndex node = 0;
  Field field = Field::kAttribute;
  int32_t attribute = 0;
  int32_t element = 0;
  int32_t symbol = 0;  // of a dimension of an input
  int64_t scale = 0;
  int64_t offset = 0;
  friend bool operator==(const SizeRule& a, const SizeRule& b) {
    return a.node == b.node && a.field == b.field && a.attribute == b.attribute &&
           a.element == b.element && a.symbol == b.symbol && a.scale == b.scale &&
           a.offset == b.offset;
  }
};

struct Graph {
  static constexpr int32_t kIrVersion = 1;

  int32_t ir_version = kIrVersion;
  std::vector<GraphInput> inputs;
  std::vector<Node> nodes;  // program order: a node uses only earlier values
  std::vector<GraphOutput> outputs;
  int32_t num_device_slots = 1;
  std::vector<GroupSlot> group_slots;
  int32_t num_instance_slots = 0;
  std::vector<SizeRule> sizes;  // by node, field, attribute and element; each of these once

  int32_t num_values() const;
  // The value that is output `output` of node `node`. Linear in nodes; ValueTable is for loops.
  ValueIndex ValueOf(NodeIndex node, int32_t output) const;

  // Field by field, sources included.
  friend bool operator==(const Graph& a, const Graph& b);
};

// Where each value comes from, for passes over a graph, which it refers to and must not outlive.
class ValueTable {
 public:
  explicit ValueTable(const Graph& graph);
  const TensorType& type(ValueIndex v) const { return *types_[v]; }
  NodeIndex producer(ValueIndex v) const { return producer_[v]; }  // none: an input
  int32_t device_slot(ValueIndex v) const { return device_slot_[v]; }
  ValueIndex first_output(NodeIndex node) const { return first_output_[node]; }
  int32_t size() const { return static_cast<int32_t>(types_.size()); }

 private:
  IndexedVector<ValueIndex, const TensorType*> types_;
  IndexedVector<ValueIndex, NodeIndex> producer_;
  IndexedVector<ValueIndex, int32_t> device_slot_;
  IndexedVector<NodeIndex, ValueIndex> first_output_;
};

struct Hash128 {
  uint64_t hi = 0;
  uint64_t lo = 0;
  friend bool operator==(Hash128 a, Hash128 b) { return a.hi == b.hi && a.lo == b.lo; }
  friend bool operator!=(Hash128 a, Hash128 b) { return !(a == b); }
  template <typename H>
  friend H AbslHashValue(H h, Hash128 x) {
    return H::combine(std::move(h), x.hi, x.lo);
  }
  std::string ToString() const;  // 32 hex digits
};

// One line a node, for diagnostics and tests.
std::string DebugString(const Graph& graph);

}  // namespace chorus

#endif  // CHORUS_CORE_GRAPH_GRAPH_H_
