// A graph for tests of whatever walks graphs.
//
// Threads: pure functions. Ownership: plain values. Errors: none.
#ifndef CHORUS_CORE_GRAPH_SAMPLE_GRAPH_H_
#define CHORUS_CORE_GRAPH_SAMPLE_GRAPH_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/graph/graph.h"

namespace chorus {

// One of everything, every field away from its default. It would not pass ValidateGraph.
inline Graph SampleGraph() {
  Graph graph;
  graph.num_device_slots = 2;
  graph.num_instance_slots = 3;
  GroupSlot slot;
  slot.size = 4;
  slot.held = {GroupRank(1), GroupRank(3)};
  slot.device_slots = {0, 1};
  graph.group_slots = {slot};

  GraphInput data;
  data.type = TensorType(DType::kF32, {2, Dim::Symbol(0, 7)});
  GraphInput state;
  state.type = TensorType(DType::kI64, {});
  state.role = InputRole::kState;
  state.donatable = true;
  state.device_slot = 1;
  graph.inputs = {data, state};

  Node local;
  local.op = "sum";
  local.version = 3;
  local.attributes = {{"a", int64_t{-5}},
                      {"b", 0.25},
                      {"c", std::vector<int64_t>{0, -1, std::numeric_limits<int64_t>::min()}},
                      {"d", std::string("text\0with zero", 14)}};
  local.inputs = {0, 1};
  local.outputs = {TensorType(DType::kF64, {3}), TensorType(DType::kF32, {0})};
  local.device_slot = 1;
  local.effect = Effect::kRandom;
  local.source = "train.cc:42";

  Node collective;
  collective.op = "all_reduce";
  collective.inputs = {2};
  collective.outputs = {TensorType(DType::kF64, {3})};
  collective.effect = Effect::kCollective;
  Collective c;
  c.kind = CollectiveKind::kReduceScatter;
  c.group_slot = 5;
  c.rank = GroupRank(3);
  c.root = GroupRank(2);
  c.reduction = Reduction::kBxor;
  c.wants_grad = true;
  c.leads_to_collective = true;
  c.peer = GroupRank(1);
  c.tag = -77;
  c.instance.kind = InstanceRef::Kind::kBound;
  c.instance.node = 8;
  c.instance.request = 9;
  c.instance.slot = 10;
  c.part = 6;
  c.counts = {1, 2, 3};
  c.runtime_counts_input = 4;
  c.runtime_count_maximum = int64_t{1} << 50;
  collective.collective = c;
  graph.nodes = {local, collective};

  GraphOutput output;
  output.value = 4;
  output.role = InputRole::kState;
  output.may_alias = 1;
  graph.outputs = {output};
  return graph;
}

}  // namespace chorus

#endif  // CHORUS_CORE_GRAPH_SAMPLE_GRAPH_H_
