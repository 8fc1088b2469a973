#include "core/ops/validate.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"
#include "core/base/utf8.h"
#include "core/ops/op.h"
#include "core/ops/registry.h"
#include "core/ops/specialize.h"

namespace chorus {
namespace {

absl::Status Bad(absl::string_view what, absl::string_view expected, absl::string_view got) {
  Error error(Reason::kMalformed);
  error.expected.assign(expected.data(), expected.size());
  error.got.assign(got.data(), got.size());
  error.message = absl::StrCat(what, ": expected ", expected, ", got ", got);
  return ToStatus(error);
}

absl::Status CheckIndex(absl::string_view what, int64_t index, int64_t count) {
  if (index >= 0 && index < count) return absl::OkStatus();
  return Bad(what, absl::StrCat("a number from 0 to ", count - 1), absl::StrCat(index));
}

absl::Status CheckCount(absl::string_view what, int64_t count, int64_t least, int64_t most) {
  if (count >= least && count <= most) return absl::OkStatus();
  return Bad(what, absl::StrCat("from ", least, " to ", most), absl::StrCat(count));
}

// Puts the node's index before the text and its op and source beside it.
absl::Status AtNode(const Graph& graph, int32_t n, const absl::Status& status) {
  if (status.ok()) return status;
  const Node& node = graph.nodes[n];
  Error error = ErrorOf(status);
  error.op = Printable(node.op);
  error.source = OneLine(node.source);
  error.message = absl::StrCat("node ", n, " (", error.op, error.source.empty() ? "" : " at ",
                               error.source, "): ", error.message);
  return ToStatus(error);
}

absl::Status CheckGroupSlots(const Graph& graph, const GraphLimits& limits) {
  CHORUS_RETURN_IF_ERROR(CheckCount("number of group slots",
                                    static_cast<int64_t>(graph.group_slots.size()), 0,
                                    limits.max_group_slots));
  for (size_t i = 0; i < graph.group_slots.size(); ++i) {
    const GroupSlot& slot = graph.group_slots[i];
    const std::string what = absl::StrCat("group slot ", i);
    CHORUS_RETURN_IF_ERROR(
        CheckCount(absl::StrCat(what, ": size"), slot.size, 1, limits.max_group_size));
    CHORUS_RETURN_IF_ERROR(CheckCount(absl::StrCat(what, ": number of members held"),
                                      static_cast<int64_t>(slot.held.size()), 1, slot.size));
    if (slot.device_slots.size() != slot.held.size()) {
      return Bad(what, absl::StrCat("a device slot for each of ", slot.held.size(), " members"),
                 absl::StrCat(slot.device_slots.size()));
    }
    for (size_t m = 0; m < slot.held.size(); ++m) {
      CHORUS_RETURN_IF_ERROR(
          CheckIndex(absl::StrCat(what, ": rank held"), slot.held[m].value(), slot.size));
      CHORUS_RETURN_IF_ERROR(CheckIndex(absl::StrCat(what, ": device slot"), slot.device_slots[m],
                                        graph.num_device_slots));
      if (m > 0 && slot.held[m] <= slot.held[m - 1]) {
        return Bad(what, "ranks held in ascending order",
                   absl::StrCat(slot.held[m].value(), " after ", slot.held[m - 1].value()));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckInputs(const Graph& graph, const GraphLimits& limits) {
  for (size_t i = 0; i < graph.inputs.size(); ++i) {
    const GraphInput& input = graph.inputs[i];
    const std::string what = absl::StrCat("input ", i);
    const absl::Status type = input.type.Validate(limits.max_value_bytes);
    if (!type.ok()) {
      Error error = ErrorOf(type);
      error.message = absl::StrCat(what, ": ", error.message);
      return ToStatus(error);
    }
    if (!IsSupported(input.type.dtype)) {
      return Unsupported(absl::StrCat(what, ": ", input.type.ToString(),
                                      "; this build computes with ", DTypeNames(kSupportedDTypes)));
    }
    CHORUS_RETURN_IF_ERROR(
        CheckIndex(absl::StrCat(what, ": device slot"), input.device_slot, graph.num_device_slots));
  }
  return absl::OkStatus();
}

// What a gradient of one forward instance shares with it.
absl::Status CheckGradientOf(const Graph& graph, int32_t n) {
  const Collective& c = *graph.nodes[n].collective;
  CHORUS_RETURN_IF_ERROR(CheckIndex("node of which it is the gradient", c.instance.node, n));
  const Node& forward_node = graph.nodes[c.instance.node];
  if (!forward_node.collective.has_value()) {
    return Bad("node of which it is the gradient", "a collective",
               absl::StrCat("node ", c.instance.node, ", ", Printable(forward_node.op)));
  }
  const Collective& forward = *forward_node.collective;
  if (!MayBeGradientOf(forward.kind, forward.reduction, c.kind)) {
    return Bad("gradient",
               absl::StrCat("the kind that belongs to ", CollectiveKindName(forward.kind),
                            " of node ", c.instance.node),
               CollectiveKindName(c.kind));
  }
  if (forward.group_slot != c.group_slot || forward.rank != c.rank || forward.root != c.root ||
      forward.peer != c.peer || forward.tag != c.tag) {
    return Bad("gradient",
               absl::StrCat("group slot, rank, root, peer and tag of node ", c.instance.node),
               "others");
  }
  return CheckCount("gradient request", c.instance.request, 0, graph.nodes.size());
}

// Instances that one member has joined already: a second vote for one can only be a mistake.
struct Joined {
  absl::flat_hash_set<std::tuple<int32_t, int32_t>> gradients;       // node, request
  absl::flat_hash_set<std::tuple<int32_t, int32_t, int32_t>> bound;  // slot, group slot, rank
  // Part of the last collective that takes the next position, by group slot and rank.
  absl::flat_hash_map<std::tuple<int32_t, int32_t>, int32_t> parts;
};

// Parts of a coalesced call stand one after another in their member's order.
absl::Status CheckPart(const Collective& c, Joined* joined) {
  const bool takes_next = c.instance.kind == InstanceRef::Kind::kNext && !HasPeer(c.kind);
  if (!takes_next) {
    if (c.part == 0) return absl::OkStatus();
    return Bad("part", "0: no gradient, send or recv is part of a coalesced call",
               absl::StrCat(c.part));
  }
  const auto last =
      joined->parts.try_emplace(std::make_tuple(c.group_slot, c.rank.value()), -1).first;
  const int32_t follows = last->second + 1;
  last->second = c.part;
  if (c.part == 0 || c.part == follows) return absl::OkStatus();
  return Bad("part",
             follows == 0 ? "0, for the first collective of its group slot and rank"
                          : absl::StrCat("0 or ", follows, ", which follows the part before it"),
             absl::StrCat(c.part));
}

absl::Status CheckCollectiveRefs(const Graph& graph, int32_t n, Joined* joined) {
  const Node& node = graph.nodes[n];
  const Collective& c = *node.collective;
  const GroupSlot& slot = graph.group_slots[c.group_slot];
  // CheckGroupSlots has seen that they ascend.
  const auto held = std::lower_bound(slot.held.begin(), slot.held.end(), c.rank);
  if (held == slot.held.end() || *held != c.rank) {
    return Bad("rank",
               absl::StrCat("one of those held in group slot ", c.group_slot, ": ",
                            absl::StrJoin(slot.held, ",",
                                          [](std::string* out, GroupRank rank) {
                                            absl::StrAppend(out, rank.value());
                                          })),
               absl::StrCat(c.rank.value()));
  }
  const int32_t device = slot.device_slots[held - slot.held.begin()];
  if (node.device_slot != device) {
    return Bad("device slot", absl::StrCat("that of rank ", c.rank.value(), ", ", device),
               absl::StrCat(node.device_slot));
  }
  CHORUS_RETURN_IF_ERROR(CheckPart(c, joined));
  switch (c.instance.kind) {
    case InstanceRef::Kind::kNext:
      return absl::OkStatus();
    case InstanceRef::Kind::kGradient:
      CHORUS_RETURN_IF_ERROR(CheckGradientOf(graph, n));
      if (!joined->gradients.emplace(c.instance.node, c.instance.request).second) {
        return Bad(
            "gradient", "each request of a node once",
            absl::StrCat("request ", c.instance.request, " of node ", c.instance.node, " again"));
      }
      return absl::OkStatus();
    case InstanceRef::Kind::kBound:
      CHORUS_RETURN_IF_ERROR(
          CheckIndex("instance slot", c.instance.slot, graph.num_instance_slots));
      if (!joined->bound.emplace(c.instance.slot, c.group_slot, c.rank.value()).second) {
        return Bad("instance slot", "each slot once for each rank",
                   absl::StrCat("slot ", c.instance.slot, " again"));
      }
      return absl::OkStatus();
  }
  return Bad("instance", "next, gradient or bound",
             absl::StrCat(static_cast<int>(c.instance.kind)));
}

absl::Status CheckNode(const Graph& graph, const ValueTable& values, int32_t n,
                       const GraphLimits& limits, Joined* joined) {
  const Node& node = graph.nodes[n];
  const OpDef* def = FindOp(node.op);
  CHORUS_RETURN_IF_ERROR(CheckIndex("device slot", node.device_slot, graph.num_device_slots));
  std::vector<const TensorType*> inputs;
  inputs.reserve(node.inputs.size());
  for (const ValueIndex value : node.inputs) {
    if (value < 0 || value >= values.first_output(n)) {
      return Bad("input",
                 absl::StrCat("one of the ", values.first_output(n).value(), " values before it"),
                 absl::StrCat("value ", value.value()));
    }
    if (values.device_slot(value) != node.device_slot && def != nullptr && !def->crosses_devices) {
      return Bad("input",
                 absl::StrCat("a value on its own device slot, ", node.device_slot,
                              " (copy moves values)"),
                 absl::StrCat("value ", value.value(), " on slot ", values.device_slot(value)));
    }
    inputs.push_back(&values.type(value));
  }
  NodeView view = ViewOf(node, inputs);
  if (node.collective.has_value()) {
    CHORUS_RETURN_IF_ERROR(CheckIndex("group slot", node.collective->group_slot,
                                      static_cast<int64_t>(graph.group_slots.size())));
    view.group_size = graph.group_slots[node.collective->group_slot].size;
  }
  CHORUS_ASSIGN_OR_RETURN(const std::vector<TensorType> types, InferTypes(view));
  if (types.size() != node.outputs.size()) {
    return Bad("outputs", absl::StrCat(types.size()), absl::StrCat(node.outputs.size()));
  }
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] != node.outputs[i]) {
      return Bad(absl::StrCat("output ", i), types[i].ToString(), node.outputs[i].ToString());
    }
    CHORUS_RETURN_IF_ERROR(types[i].Validate(limits.max_value_bytes));
  }
  if (node.effect != def->effect) {
    return Bad("effect", absl::StrCat(static_cast<int>(def->effect)),
               absl::StrCat(static_cast<int>(node.effect)));
  }
  return node.collective.has_value() ? CheckCollectiveRefs(graph, n, joined) : absl::OkStatus();
}

absl::Status CheckOutputs(const Graph& graph, const ValueTable& values) {
  absl::flat_hash_set<int32_t> taken;
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    const GraphOutput& output = graph.outputs[i];
    const std::string what = absl::StrCat("output ", i);
    CHORUS_RETURN_IF_ERROR(CheckIndex(absl::StrCat(what, ": value"), output.value, values.size()));
    if (output.may_alias == -1) continue;
    CHORUS_RETURN_IF_ERROR(CheckIndex(absl::StrCat(what, ": input it may alias"), output.may_alias,
                                      static_cast<int64_t>(graph.inputs.size())));
    const GraphInput& input = graph.inputs[output.may_alias];
    if (!input.donatable || input.type != values.type(output.value) ||
        input.device_slot != values.device_slot(output.value) ||
        !taken.insert(output.may_alias).second) {
      return Bad(absl::StrCat(what, ": input it may alias"),
                 absl::StrCat("a donatable input of type ", values.type(output.value).ToString(),
                              " on device slot ", values.device_slot(output.value),
                              ", for one output only"),
                 absl::StrCat("input ", output.may_alias, ", ", input.type.ToString(),
                              input.donatable ? "" : ", not donatable"));
    }
  }
  return absl::OkStatus();
}

// Of a graph without symbols.
absl::Status ValidateNodes(const Graph& graph, const GraphLimits& limits) {
  const ValueTable values(graph);
  Joined joined;
  for (int32_t n = 0; n < static_cast<int32_t>(graph.nodes.size()); ++n) {
    CHORUS_RETURN_IF_ERROR(AtNode(graph, n, CheckNode(graph, values, n, limits, &joined)));
  }
  return CheckOutputs(graph, values);
}

}  // namespace

absl::Status ValidateGraph(const Graph& graph, const GraphLimits& limits) {
  if (graph.ir_version != Graph::kIrVersion) {
    return MakeError(Reason::kVersion, absl::StrCat("graph: IR version ", graph.ir_version,
                                                    ", this build reads ", Graph::kIrVersion));
  }
  const int64_t num_nodes = static_cast<int64_t>(graph.nodes.size());
  CHORUS_RETURN_IF_ERROR(CheckCount("number of nodes", num_nodes, 0, limits.max_nodes));
  int64_t num_values = static_cast<int64_t>(graph.inputs.size());
  int64_t num_collectives = 0;
  for (const Node& node : graph.nodes) {
    num_values += static_cast<int64_t>(node.outputs.size());
    num_collectives += node.collective.has_value() ? 1 : 0;
  }
  CHORUS_RETURN_IF_ERROR(
      CheckCount("number of collectives", num_collectives, 0, limits.max_collectives));
  CHORUS_RETURN_IF_ERROR(CheckCount("number of values", num_values, 0, limits.max_values));
  CHORUS_RETURN_IF_ERROR(CheckCount("number of inputs", static_cast<int64_t>(graph.inputs.size()),
                                    0, limits.max_inputs));
  CHORUS_RETURN_IF_ERROR(CheckCount("number of outputs", static_cast<int64_t>(graph.outputs.size()),
                                    0, limits.max_outputs));
  CHORUS_RETURN_IF_ERROR(
      CheckCount("number of device slots", graph.num_device_slots, 1, limits.max_device_slots));
  // A slot that no node uses would be bound for nothing.
  CHORUS_RETURN_IF_ERROR(
      CheckCount("number of instance slots", graph.num_instance_slots, 0, num_nodes));
  CHORUS_RETURN_IF_ERROR(CheckGroupSlots(graph, limits));
  CHORUS_RETURN_IF_ERROR(CheckInputs(graph, limits));
  CHORUS_ASSIGN_OR_RETURN(const std::vector<int64_t> maxima, CheckSymbols(graph));
  if (maxima.empty()) return ValidateNodes(graph, limits);
  // It stands in the graph as it is at the maxima.
  Graph largest = graph;
  largest.sizes.clear();
  for (GraphInput& input : largest.inputs) {
    for (Dim& dim : input.type.dims) dim = Dim(dim.size);
  }
  return ValidateNodes(largest, limits);
}

}  // namespace chorus
