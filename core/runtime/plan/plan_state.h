// What the passes of CompilePlan know of a graph: each reads what those before it have written.
//
// Threads: thread-compatible. Ownership: refers to the graph and the options, which must outlive
// it. Errors: none.
#ifndef CHORUS_CORE_RUNTIME_PLAN_PLAN_STATE_H_
#define CHORUS_CORE_RUNTIME_PLAN_PLAN_STATE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/indexed_vector.h"
#include "core/graph/graph.h"
#include "core/ops/op.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/plan/collective_pieces.h"
#include "core/runtime/plan/compiled_plan.h"
#include "core/runtime/plan/plan_options.h"

namespace chorus::planning {

// How a node is executed.
enum class Form : uint8_t {
  kKernel,
  kCollective,
  kAlias,  // its output is its input: nothing to do
  kCopy,   // a value crosses to another device slot
};

struct NodeState {
  const OpDef* def = nullptr;
  Form form = Form::kKernel;
  CollectivePieces pieces;     // of collectives
  int32_t participation = -1;  // of collectives: in Plan::votes
  bool put_off = false;        // comes behind all collectives, for it may write over an input
  bool live = false;
  int64_t workspace_bytes = 0;  // of kernels
  int32_t equal_group = -1;     // of equal work
};

// Values that share memory have one root, which stands for it.
struct ValueState {
  bool used = false;  // by a live node or as an output
  ValueIndex root;
  int64_t offset = 0;  // in its root, bytes; of a root: in its buffer
  // The member whose operand it is, and which of them (OneDomain); then it stands there.
  int32_t list_member = -1;
  int32_t list_index = 0;
  // The result of whose slice it is an operand: it is produced there.
  ValueIndex slice_of;
  // Of roots:
  bool counted = false;  // must not stand in a workspace
  bool is_output = false;
  bool takes_over = false;   // an output that may stand where its donor does
  int32_t equal_group = -1;  // whose result `equal_index` it is
  int32_t equal_index = 0;
  int32_t last_use = -1;  // position in the order of the last node that touches it
  bool in_workspace = false;
  BufferIndex buffer;  // else
};

struct PlanState {
  PlanState(const Graph& graph, const PlanOptions& options);

  NodeIndex num_nodes() const { return static_cast<NodeIndex>(nodes.size()); }
  const Node& node(NodeIndex n) const { return graph.nodes[n]; }
  ValueIndex output(NodeIndex n, size_t i) const {
    return table.first_output(n) + static_cast<ValueIndex>(i);
  }
  // Of the value's memory.
  ValueState& root(ValueIndex v) { return values[values[v].root]; }
  const ValueState& root(ValueIndex v) const { return values[values[v].root]; }
  const std::vector<Participation>& participations() const { return plan.votes->participations; }
  // What `node`, a collective or a copy between device slots, moves can be read where it stands.
  bool InOneDomain(const Node& node) const;

  const Graph& graph;
  const PlanOptions& options;
  const ValueTable table;
  IndexedVector<NodeIndex, NodeState> nodes;
  IndexedVector<ValueIndex, ValueState> values;
  std::vector<NodeIndex> order;  // nodes, as they are enqueued
  Plan plan;                     // what is done of it
};

// --- Of a collective's node ---

// How many of its outputs are results; what follows is kept for backward.
int NumVisible(const Node& node);
// Of a PRODUCT: output `i` is a member's operand, kept for backward.
bool IsFactor(const Node& node, size_t i);
// All members have the same as output `i`.
bool IsEqualResult(const Node& node, size_t i);
// Output `i` is one for all ranks of a domain, where results are shared.
bool IsSharedResult(const Node& node, size_t i);

// Where a value stands that is not in a workspace.
DevicePlan::Location LocationInBuffer(const PlanState& state, ValueIndex v);

}  // namespace chorus::planning

#endif  // CHORUS_CORE_RUNTIME_PLAN_PLAN_STATE_H_
