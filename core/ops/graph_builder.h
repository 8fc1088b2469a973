// Builds a Graph node by node, inferring types as it goes.
//
// For tracers and tests, and the Emitter of graph-to-graph differentiation: AppendBackward
// (core/autograd/backward.h) extends what has been built by its own gradient.
//
// Threads: thread-compatible. Ownership: it has what it builds; Build() gives a copy.
// Errors: Emit()'s: those of InferTypes (registry.h), and INVALID_ARGUMENT kMalformed for a value
// or a group slot that there is not.
#ifndef CHORUS_CORE_OPS_GRAPH_BUILDER_H_
#define CHORUS_CORE_OPS_GRAPH_BUILDER_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/graph/graph.h"
#include "core/ops/op.h"

namespace chorus {

// The node that `spec` describes, where its outputs have been inferred. Its op is one of this
// build.
Node NodeOf(NodeSpec spec, std::vector<TensorType> outputs);

class GraphBuilder : public Emitter {
 public:
  explicit GraphBuilder(int32_t num_device_slots = 1, std::vector<GroupSlot> group_slots = {});

  // Inputs may be added at any time: Build() puts them first. The values returned here and by Emit
  // are the builder's own indices, in order of creation; FinalIndex translates.
  ValueIndex AddInput(GraphInput input);
  void AddOutput(GraphOutput output);  // `value` is the builder's own index
  int32_t AddGroupSlot(GroupSlot slot);

  absl::StatusOr<std::vector<ValueIndex>> Emit(NodeSpec spec) override;
  const TensorType& TypeOf(ValueIndex value) const override { return types_[value]; }
  int32_t DeviceOf(ValueIndex value) const override { return devices_[value]; }
  int32_t GroupSizeOf(int32_t group_slot) const override { return group_slots_[group_slot].size; }
  // InstanceRef::kGradient of the forward node, requests counted from 0.
  void BindGradient(const RecordedNode& forward, Collective* gradient) override;

  // Whether collectives that are gradients are marked as wanting a gradient themselves: needed when
  // they will be differentiated again. Off at first.
  void set_record_gradients(bool record) { record_gradients_ = record; }

  // What was emitted so far; a RecordedNode's id is its index among the graph's nodes.
  const std::deque<RecordedNode>& nodes() const { return nodes_; }
  ValueIndex FinalIndex(ValueIndex value) const;  // as of the inputs added so far
  Graph Build() const;

 private:
  int32_t num_device_slots_;
  std::vector<GroupSlot> group_slots_;
  std::vector<GraphInput> inputs_;
  std::vector<GraphOutput> outputs_;
  std::deque<RecordedNode> nodes_;
  std::vector<int32_t> gradient_requests_;  // by node
  bool record_gradients_ = false;
  // By value. A deque keeps references valid.
  std::deque<TensorType> types_;
  std::vector<int32_t> devices_;
  std::vector<int32_t> input_index_;        // -1: a node's output
  std::vector<int32_t> node_output_index_;  // among all outputs of nodes; -1: an input
  int32_t num_node_outputs_ = 0;
};

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_GRAPH_BUILDER_H_
