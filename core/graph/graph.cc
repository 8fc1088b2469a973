#include "core/graph/graph.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace chorus {
namespace {

std::string AttributeText(const AttributeValue& value) {
  if (const auto* i = absl::get_if<int64_t>(&value)) return absl::StrCat(*i);
  if (const auto* d = absl::get_if<double>(&value)) return absl::StrCat(*d);
  if (const auto* v = absl::get_if<std::vector<int64_t>>(&value)) {
    return absl::StrCat("[", absl::StrJoin(*v, ","), "]");
  }
  return absl::StrCat("'", absl::get<std::string>(value), "'");
}

std::string CollectiveText(const Collective& c) {
  std::string text = absl::StrCat(" group=", c.group_slot, " rank=", c.rank.value());
  if (c.root.value() >= 0) absl::StrAppend(&text, " root=", c.root.value());
  if (c.reduction != Reduction::kNone) absl::StrAppend(&text, " ", ReductionName(c.reduction));
  if (c.peer.value() >= 0) absl::StrAppend(&text, " peer=", c.peer.value(), " tag=", c.tag);
  if (c.part != 0) absl::StrAppend(&text, " part=", c.part);
  if (c.wants_grad) text += " grad";
  if (c.leads_to_collective) text += " from_collective";
  if (c.leads_to_leaf) text += " from_leaf";
  switch (c.instance.kind) {
    case InstanceRef::Kind::kNext:
      break;
    case InstanceRef::Kind::kGradient:
      absl::StrAppend(&text, " gradient_of=", c.instance.node, ".", c.instance.request);
      break;
    case InstanceRef::Kind::kBound:
      absl::StrAppend(&text, " instance_slot=", c.instance.slot);
      break;
  }
  return text;
}

}  // namespace

bool operator==(const Collective& a, const Collective& b) {
  return a.kind == b.kind && a.group_slot == b.group_slot && a.rank == b.rank && a.root == b.root &&
         a.reduction == b.reduction && a.wants_grad == b.wants_grad &&
         a.leads_to_collective == b.leads_to_collective && a.leads_to_leaf == b.leads_to_leaf &&
         a.peer == b.peer && a.tag == b.tag && a.instance == b.instance && a.part == b.part &&
         a.counts == b.counts && a.runtime_counts_input == b.runtime_counts_input &&
         a.runtime_count_maximum == b.runtime_count_maximum;
}

bool operator==(const Node& a, const Node& b) {
  return a.op == b.op && a.version == b.version && a.attributes == b.attributes &&
         a.inputs == b.inputs && a.outputs == b.outputs && a.device_slot == b.device_slot &&
         a.effect == b.effect && a.collective == b.collective && a.source == b.source;
}

bool operator==(const Graph& a, const Graph& b) {
  return a.ir_version == b.ir_version && a.inputs == b.inputs && a.nodes == b.nodes &&
         a.outputs == b.outputs && a.num_device_slots == b.num_device_slots &&
         a.group_slots == b.group_slots && a.num_instance_slots == b.num_instance_slots &&
         a.sizes == b.sizes;
}

int32_t Graph::num_values() const {
  size_t count = inputs.size();
  for (const Node& node : nodes) count += node.outputs.size();
  return static_cast<int32_t>(count);
}

ValueIndex Graph::ValueOf(NodeIndex node, int32_t output) const {
  size_t value = inputs.size();
  for (NodeIndex i = 0; i < node; ++i) value += nodes[i].outputs.size();
  return static_cast<ValueIndex>(value) + output;
}

ValueTable::ValueTable(const Graph& graph) {
  const int32_t count = graph.num_values();
  types_.reserve(count);
  producer_.reserve(count);
  device_slot_.reserve(count);
  first_output_.reserve(graph.nodes.size());
  for (const GraphInput& input : graph.inputs) {
    types_.push_back(&input.type);
    producer_.push_back(NodeIndex());
    device_slot_.push_back(input.device_slot);
  }
  for (const Node& node : graph.nodes) {
    const NodeIndex producer = first_output_.push_back(static_cast<ValueIndex>(types_.size()));
    for (const TensorType& type : node.outputs) {
      types_.push_back(&type);
      producer_.push_back(producer);
      device_slot_.push_back(node.device_slot);
    }
  }
}

std::string Hash128::ToString() const { return absl::StrFormat("%016x%016x", hi, lo); }

std::string DebugString(const Graph& graph) {
  std::string text = absl::StrCat("graph devices=", graph.num_device_slots,
                                  " instances=", graph.num_instance_slots, "\n");
  for (size_t i = 0; i < graph.group_slots.size(); ++i) {
    const GroupSlot& slot = graph.group_slots[i];
    absl::StrAppend(
        &text, "group ", i, ": size=", slot.size, " held=[",
        absl::StrJoin(slot.held, ",",
                      [](std::string* out, GroupRank rank) { absl::StrAppend(out, rank.value()); }),
        "] devices=[", absl::StrJoin(slot.device_slots, ","), "]\n");
  }
  int32_t value = 0;
  for (const GraphInput& input : graph.inputs) {
    absl::StrAppend(&text, "%", value++, ": ", input.type.ToString(), " = input");
    if (input.role != InputRole::kData) {
      absl::StrAppend(&text, " role=", static_cast<int>(input.role));
    }
    if (input.donatable) text += " donatable";
    if (input.device_slot != 0) absl::StrAppend(&text, " device=", input.device_slot);
    text += "\n";
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    absl::StrAppend(&text, "#", n, " ");
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      absl::StrAppend(&text, i == 0 ? "" : ", ", "%", value++, ": ", node.outputs[i].ToString());
    }
    absl::StrAppend(&text, node.outputs.empty() ? "" : " = ", node.op, "(");
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      absl::StrAppend(&text, i == 0 ? "" : ", ", "%", node.inputs[i].value());
    }
    text += ")";
    for (const Attribute& attribute : node.attributes) {
      absl::StrAppend(&text, " ", attribute.name, "=", AttributeText(attribute.value));
    }
    if (node.collective.has_value()) text += CollectiveText(*node.collective);
    if (node.device_slot != 0) absl::StrAppend(&text, " device=", node.device_slot);
    if (!node.source.empty()) absl::StrAppend(&text, " @", node.source);
    text += "\n";
  }
  for (const GraphOutput& output : graph.outputs) {
    absl::StrAppend(&text, "output %", output.value.value());
    if (output.may_alias >= 0) absl::StrAppend(&text, " may_alias=", output.may_alias);
    text += "\n";
  }
  return text;
}

}  // namespace chorus
