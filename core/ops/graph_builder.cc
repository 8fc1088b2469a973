#include "core/ops/graph_builder.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/registry.h"

namespace chorus {

Node NodeOf(NodeSpec spec, std::vector<TensorType> outputs) {
  Node node;
  node.effect = FindOp(spec.op)->effect;
  node.op = std::move(spec.op);
  node.version = spec.version;
  node.attributes = std::move(spec.attributes);
  node.inputs = std::move(spec.inputs);
  node.outputs = std::move(outputs);
  node.device_slot = spec.device_slot;
  node.collective = std::move(spec.collective);
  node.source = std::move(spec.source);
  return node;
}

GraphBuilder::GraphBuilder(int32_t num_device_slots, std::vector<GroupSlot> group_slots)
    : num_device_slots_(num_device_slots), group_slots_(std::move(group_slots)) {}

ValueIndex GraphBuilder::AddInput(GraphInput input) {
  types_.push_back(input.type);
  devices_.push_back(input.device_slot);
  input_index_.push_back(static_cast<int32_t>(inputs_.size()));
  node_output_index_.push_back(-1);
  inputs_.push_back(std::move(input));
  return static_cast<ValueIndex>(types_.size()) - 1;
}

void GraphBuilder::AddOutput(GraphOutput output) { outputs_.push_back(output); }

int32_t GraphBuilder::AddGroupSlot(GroupSlot slot) {
  group_slots_.push_back(std::move(slot));
  return static_cast<int32_t>(group_slots_.size()) - 1;
}

absl::StatusOr<std::vector<ValueIndex>> GraphBuilder::Emit(NodeSpec spec) {
  std::vector<const TensorType*> inputs;
  inputs.reserve(spec.inputs.size());
  for (const ValueIndex value : spec.inputs) {
    if (value < 0 || value >= static_cast<ValueIndex>(types_.size())) {
      return Malformed(absl::StrCat(spec.op, ": value ", value.value(), " is none of the ",
                                    types_.size(), " so far"));
    }
    inputs.push_back(&types_[value]);
  }
  NodeView view;
  view.op = spec.op;
  view.version = spec.version;
  view.attributes = spec.attributes;
  view.inputs = inputs;
  if (spec.collective.has_value()) {
    const int32_t slot = spec.collective->group_slot;
    if (slot < 0 || slot >= static_cast<int32_t>(group_slots_.size())) {
      return Malformed(absl::StrCat(spec.op, ": group slot ", slot, " is none of the ",
                                    group_slots_.size(), " there are"));
    }
    view.collective = &*spec.collective;
    view.group_size = group_slots_[slot].size;
  }
  CHORUS_ASSIGN_OR_RETURN(std::vector<TensorType> types, InferTypes(view));

  RecordedNode node;
  node.id = static_cast<int32_t>(nodes_.size());
  for (TensorType& type : types) {
    node.outputs.push_back(static_cast<ValueIndex>(types_.size()));
    types_.push_back(std::move(type));
    devices_.push_back(spec.device_slot);
    input_index_.push_back(-1);
    node_output_index_.push_back(num_node_outputs_++);
  }
  node.spec = std::move(spec);
  nodes_.push_back(std::move(node));
  gradient_requests_.push_back(0);
  return nodes_.back().outputs;
}

void GraphBuilder::BindGradient(const RecordedNode& forward, Collective* gradient) {
  gradient->instance.kind = InstanceRef::Kind::kGradient;
  gradient->instance.node = forward.id;
  gradient->instance.request = gradient_requests_[forward.id]++;
  gradient->wants_grad = record_gradients_;
}

ValueIndex GraphBuilder::FinalIndex(ValueIndex value) const {
  if (input_index_[value] >= 0) return input_index_[value];
  return static_cast<ValueIndex>(inputs_.size()) + node_output_index_[value];
}

Graph GraphBuilder::Build() const {
  Graph graph;
  graph.num_device_slots = num_device_slots_;
  graph.group_slots = group_slots_;
  graph.inputs = inputs_;
  graph.nodes.reserve(nodes_.size());
  for (const RecordedNode& recorded : nodes_) {
    std::vector<TensorType> outputs;
    for (const ValueIndex value : recorded.outputs) outputs.push_back(types_[value]);
    graph.nodes.push_back(NodeOf(recorded.spec, std::move(outputs)));
    for (ValueIndex& input : graph.nodes.back().inputs) input = FinalIndex(input);
  }
  graph.outputs = outputs_;
  for (GraphOutput& output : graph.outputs) output.value = FinalIndex(output.value);
  return graph;
}

}  // namespace chorus
