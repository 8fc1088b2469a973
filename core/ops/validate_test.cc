#include "core/ops/validate.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/graph/graph.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::RankBuilder;

// Valid: two device slots, a group of three of which ranks 0 and 2 are held here, a donatable state
// that an output may take over, and a gradient.
//   %0 f32[4] data, %1 f32[4] state, %2 f32[4] on device 1
//   #0 %3 = add(%0, %1)            #1 %4 = all_reduce(%3), rank 0      #2 %5 = copy(%4) on device 1
//   #3 %6 = all_reduce(%2), rank 2 #4 %7 = all_reduce(%4), rank 0, gradient of #1
//   #5 %8 = reduce(%0), rank 0, root 0, bound to slot 0
Graph Valid() {
  const TensorType type(DType::kF32, {4});
  Graph graph;
  graph.num_device_slots = 2;
  graph.num_instance_slots = 1;
  GroupSlot slot;
  slot.size = 3;
  slot.held = {GroupRank(0), GroupRank(2)};
  slot.device_slots = {0, 1};
  graph.group_slots = {slot};
  graph.inputs.resize(3);
  for (GraphInput& input : graph.inputs) input.type = type;
  graph.inputs[1].role = InputRole::kState;
  graph.inputs[1].donatable = true;
  graph.inputs[2].device_slot = 1;
  graph.nodes.resize(6);
  for (Node& node : graph.nodes) node.outputs = {type};
  const auto collective = [&](int32_t n, CollectiveKind kind, int32_t rank, int32_t device) {
    graph.nodes[n].effect = Effect::kCollective;
    graph.nodes[n].device_slot = device;
    Collective c;
    c.kind = kind;
    c.rank = GroupRank(rank);
    c.reduction = Reduction::kSum;
    c.wants_grad = true;
    graph.nodes[n].op = std::string(CollectiveKindName(kind));
    graph.nodes[n].collective = c;
  };
  graph.nodes[0].op = "add";
  graph.nodes[0].inputs = {0, 1};
  graph.nodes[0].source = "train.cc:42";
  collective(1, CollectiveKind::kAllReduce, 0, 0);
  graph.nodes[1].inputs = {3};
  graph.nodes[2].op = "copy";
  graph.nodes[2].inputs = {4};
  graph.nodes[2].device_slot = 1;
  collective(3, CollectiveKind::kAllReduce, 2, 1);
  graph.nodes[3].inputs = {2};
  collective(4, CollectiveKind::kAllReduce, 0, 0);
  graph.nodes[4].inputs = {4};
  graph.nodes[4].collective->instance = {InstanceRef::Kind::kGradient, 1, 0, -1};
  collective(5, CollectiveKind::kReduce, 0, 0);
  graph.nodes[5].inputs = {0};
  graph.nodes[5].collective->root = GroupRank(0);
  graph.nodes[5].collective->instance = {InstanceRef::Kind::kBound, -1, 0, 0};
  graph.outputs.resize(2);
  graph.outputs[0].value = 4;
  graph.outputs[0].may_alias = 1;
  graph.outputs[1].value = 5;
  return graph;
}

TEST(ValidateTest, AcceptsAValidGraph) {
  const absl::Status status = ValidateGraph(Valid(), GraphLimits());
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(ValidateGraph(Graph(), GraphLimits()).ok());
}

TEST(ValidateTest, AnErrorNamesNodeOpSourceExpectedAndGot) {
  Graph graph = Valid();
  graph.inputs[1].type = TensorType(DType::kF32, {5});
  const absl::Status status = ValidateGraph(graph, GraphLimits());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorOf(status).message,
            "node 0 (add at train.cc:42): add: expected inputs of one type, f32[4] or f32[], got "
            "f32[5] as "
            "input 1");
  const Error error = ErrorOf(status);
  EXPECT_EQ(error.reason, Reason::kBadType);
  EXPECT_EQ(error.op, "add");
  EXPECT_EQ(error.source, "train.cc:42");
  EXPECT_EQ(error.expected, "inputs of one type, f32[4] or f32[]");
  EXPECT_EQ(error.got, "f32[5] as input 1");
  // All of a long one: the line stands at its end.
  graph.nodes[0].source = std::string(300, 'd') + "/tr\xc3\xa4in.cc:42";
  EXPECT_EQ(ErrorOf(ValidateGraph(graph, GraphLimits())).source, graph.nodes[0].source);
}

struct Change {
  std::function<void(Graph*)> change;
  std::string message;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

TEST(ValidateTest, RefusesEachFault) {
  constexpr absl::StatusCode kUnimplemented = absl::StatusCode::kUnimplemented;
  const Change changes[] = {
      {[](Graph* g) { g->ir_version = 2; }, "graph: IR version 2, this build reads 1",
       kUnimplemented},
      {[](Graph* g) { g->num_device_slots = 0; },
       "number of device slots: expected from 1 to 64, got 0"},
      {[](Graph* g) { g->num_device_slots = 65; },
       "number of device slots: expected from 1 to 64, got 65"},
      {[](Graph* g) { g->num_instance_slots = -1; },
       "number of instance slots: expected from 0 to 6, got -1"},
      {[](Graph* g) { g->num_instance_slots = 7; },
       "number of instance slots: expected from 0 to 6, got 7"},
      {[](Graph* g) { g->group_slots.resize(65, g->group_slots[0]); },
       "number of group slots: expected from 0 to 64, got 65"},
      {[](Graph* g) { g->group_slots[0].size = 0; },
       "group slot 0: size: expected from 1 to 1024, got 0"},
      {[](Graph* g) { g->group_slots[0].size = 1025; },
       "group slot 0: size: expected from 1 to 1024, got 1025"},
      {[](Graph* g) {
         g->group_slots[0].held.clear();
         g->group_slots[0].device_slots.clear();
       },
       "group slot 0: number of members held: expected from 1 to 3, got 0"},
      {[](Graph* g) { g->group_slots[0].device_slots.pop_back(); },
       "group slot 0: expected a device slot for each of 2 members, got 1"},
      {[](Graph* g) { g->group_slots[0].held[1] = GroupRank(3); },
       "group slot 0: rank held: expected a number from 0 to 2, got 3"},
      {[](Graph* g) { g->group_slots[0].held[1] = GroupRank(0); },
       "group slot 0: expected ranks held in ascending order, got 0 after 0"},
      {[](Graph* g) { g->group_slots[0].device_slots[1] = 2; },
       "group slot 0: device slot: expected a number from 0 to 1, got 2"},
      {[](Graph* g) { g->inputs[0].type.dims[0] = Dim(-4); },
       "input 0: f32[-4] has a negative dimension, -4"},
      {[](Graph* g) { g->inputs[0].type.dims[0] = Dim(int64_t{1} << 40); },
       "input 0: f32[1099511627776] is larger than the limit of 8589934592 bytes",
       absl::StatusCode::kResourceExhausted},
      {[](Graph* g) { g->inputs[0].type.dtype = DType::kUnspecified; },
       "input 0: unknown dtype number 0"},
      {[](Graph* g) { g->inputs[0].type.dtype = DType::kComplex64; },
       "input 0: c64[4]; this build computes with f16, bf16, f32, f64, i8, u8, i16, i32, i64 and "
       "bool",
       kUnimplemented},
      {[](Graph* g) { g->inputs[0].type.dims[0].symbol = 1; },
       "input 0: symbol 1: expected symbols numbered as they come, 16 at most, got 1 after 0"},
      {[](Graph* g) { g->inputs[0].device_slot = 2; },
       "input 0: device slot: expected a number from 0 to 1, got 2"},
      {[](Graph* g) { g->nodes[0].device_slot = -1; },
       "node 0 (add at train.cc:42): device slot: expected a number from 0 to 1, got -1"},
      {[](Graph* g) { g->nodes[0].inputs[1] = 3; },
       "node 0 (add at train.cc:42): input: expected one of the 3 values before it, got value 3"},
      {[](Graph* g) { g->nodes[0].inputs[1] = -1; },
       "node 0 (add at train.cc:42): input: expected one of the 3 values before it, got value -1"},
      {[](Graph* g) { g->nodes[0].inputs[1] = 2; },
       "node 0 (add at train.cc:42): input: expected a value on its own device slot, 0 (copy moves "
       "values), got value 2 on slot 1"},
      {[](Graph* g) { g->nodes[0].op = "ad\x01z"; },
       "node 0 (ad\\x01z at train.cc:42): this build has no op 'ad\\x01z'", kUnimplemented},
      {[](Graph* g) { g->nodes[0].version = 2; },
       "node 0 (add at train.cc:42): add: this build has version 1 of the op, not 2",
       kUnimplemented},
      {[](Graph* g) {
         g->nodes[0].attributes = {{"axis", int64_t{0}}};
       },
       "node 0 (add at train.cc:42): add: expected no attributes, got 'axis'"},
      {[](Graph* g) { g->nodes[0].outputs.clear(); },
       "node 0 (add at train.cc:42): outputs: expected 1, got 0"},
      {[](Graph* g) { g->nodes[0].outputs[0].dtype = DType::kF64; },
       "node 0 (add at train.cc:42): output 0: expected f32[4], got f64[4]"},
      {[](Graph* g) { g->nodes[0].effect = Effect::kRandom; },
       "node 0 (add at train.cc:42): effect: expected 0, got 2"},
      {[](Graph* g) { g->nodes[1].collective.reset(); },
       "node 1 (all_reduce): all_reduce: expected a collective, got none"},
      {[](Graph* g) { g->nodes[1].collective->group_slot = 1; },
       "node 1 (all_reduce): group slot: expected a number from 0 to 0, got 1"},
      {[](Graph* g) { g->nodes[1].collective->group_slot = -1; },
       "node 1 (all_reduce): group slot: expected a number from 0 to 0, got -1"},
      {[](Graph* g) { g->nodes[1].collective->rank = GroupRank(1); },
       "node 1 (all_reduce): rank: expected one of those held in group slot 0: 0,2, got 1"},
      {[](Graph* g) { g->nodes[1].collective->rank = GroupRank(2); },
       "node 1 (all_reduce): device slot: expected that of rank 2, 1, got 0"},
      {[](Graph* g) { g->nodes[1].collective->reduction = Reduction::kMax; },
       "node 1 (all_reduce): outputs: expected 2, got 1"},
      {[](Graph* g) { g->nodes[1].collective->runtime_counts_input = 0; },
       "node 1 (all_reduce): all_reduce: expected no counts at run time, which are for pieces in "
       "one "
       "tensor, got input 0"},
      {[](Graph* g) { g->nodes[4].collective->instance.node = 4; },
       "node 4 (all_reduce): node of which it is the gradient: expected a number from 0 to 3, got "
       "4"},
      {[](Graph* g) { g->nodes[4].collective->instance.node = -1; },
       "node 4 (all_reduce): node of which it is the gradient: expected a number from 0 to 3, got "
       "-1"},
      {[](Graph* g) { g->nodes[4].collective->instance.node = 0; },
       "node 4 (all_reduce): node of which it is the gradient: expected a collective, got node 0, "
       "add"},
      {[](Graph* g) { g->nodes[4].collective->instance.node = 3; },
       "node 4 (all_reduce): gradient: expected group slot, rank, root, peer and tag of node 3, "
       "got "
       "others"},
      {[](Graph* g) { g->nodes[4].collective->instance.request = -1; },
       "node 4 (all_reduce): gradient request: expected from 0 to 6, got -1"},
      {[](Graph* g) {
         g->nodes[5].collective->instance = {InstanceRef::Kind::kGradient, 1, 1, -1};
       },
       "node 5 (reduce): gradient: expected the kind that belongs to all_reduce of node 1, got "
       "reduce"},
      {[](Graph* g) { g->nodes[5] = g->nodes[4]; },
       "node 5 (all_reduce): gradient: expected each request of a node once, got request 0 of node "
       "1 again"},
      {[](Graph* g) { g->nodes[5].collective->instance.slot = 1; },
       "node 5 (reduce): instance slot: expected a number from 0 to 0, got 1"},
      {[](Graph* g) { g->nodes[1].collective->instance = g->nodes[5].collective->instance; },
       "node 5 (reduce): instance slot: expected each slot once for each rank, got slot 0 again"},
      {[](Graph* g) { g->nodes[1].collective->part = 1; },
       "node 1 (all_reduce): part: expected 0, for the first collective of its group slot and "
       "rank, "
       "got 1"},
      {[](Graph* g) { g->nodes[1].collective->part = -1; },
       "node 1 (all_reduce): part: expected 0, for the first collective of its group slot and "
       "rank, "
       "got -1"},
      {[](Graph* g) { g->nodes[3].collective->part = 1; },
       "node 3 (all_reduce): part: expected 0, for the first collective of its group slot and "
       "rank, "
       "got 1"},
      {[](Graph* g) { g->nodes[4].collective->part = 1; },
       "node 4 (all_reduce): part: expected 0: no gradient, send or recv is part of a coalesced "
       "call, got 1"},
      {[](Graph* g) { g->outputs[0].value = 9; },
       "output 0: value: expected a number from 0 to 8, got 9"},
      {[](Graph* g) { g->outputs[0].value = -1; },
       "output 0: value: expected a number from 0 to 8, got -1"},
      {[](Graph* g) { g->outputs[0].may_alias = 3; },
       "output 0: input it may alias: expected a number from 0 to 2, got 3"},
      {[](Graph* g) { g->outputs[0].may_alias = 0; },
       "output 0: input it may alias: expected a donatable input of type f32[4] on device slot 0, "
       "for one output only, got input 0, f32[4], not donatable"},
      {[](Graph* g) { g->outputs[1].may_alias = 1; },
       "output 1: input it may alias: expected a donatable input of type f32[4] on device slot 1, "
       "for one output only, got input 1, f32[4]"},
      {[](Graph* g) { g->outputs[1] = g->outputs[0]; },
       "output 1: input it may alias: expected a donatable input of type f32[4] on device slot 0, "
       "for one output only, got input 1, f32[4]"},
  };
  for (const Change& change : changes) {
    Graph graph = Valid();
    change.change(&graph);
    const absl::Status status = ValidateGraph(graph, GraphLimits());
    EXPECT_EQ(ErrorOf(status).message, change.message);
    EXPECT_EQ(status.code(), change.code) << status;
    EXPECT_NE(ErrorOf(status).reason, Reason::kUnspecified) << status;
  }
}

// Collectives of rank 1 with these parts; those of rank 0, and sends, stand between them.
TEST(ValidateTest, PartsOfACallFollowOneAnother) {
  const auto text = [](const std::vector<int32_t>& parts) {
    const TensorType type(DType::kF32, {4});
    Graph graph;
    GroupSlot slot;
    slot.size = 2;
    slot.held = {GroupRank(0), GroupRank(1)};
    slot.device_slots = {0, 0};
    graph.group_slots = {slot, slot};
    graph.inputs.resize(1);
    graph.inputs[0].type = type;
    const auto add = [&](CollectiveKind kind, int32_t group_slot, int32_t rank, int32_t part) {
      Node node;
      node.op = std::string(CollectiveKindName(kind));
      node.inputs = {0};
      node.effect = Effect::kCollective;
      Collective c;
      c.kind = kind;
      c.group_slot = group_slot;
      c.rank = GroupRank(rank);
      c.part = part;
      if (kind == CollectiveKind::kAllReduce) {
        node.outputs = {type};
        c.reduction = Reduction::kSum;
      } else {
        c.peer = GroupRank(0);
      }
      node.collective = c;
      graph.nodes.push_back(std::move(node));
    };
    for (const int32_t part : parts) {
      add(CollectiveKind::kAllReduce, 0, 1, part);
      add(CollectiveKind::kAllReduce, 0, 0, 0);
      add(CollectiveKind::kAllReduce, 1, 1, 0);
      add(CollectiveKind::kSend, 0, 1, 0);
    }
    return ErrorOf(ValidateGraph(graph, GraphLimits())).message;
  };
  EXPECT_EQ(text({0, 1, 2, 0, 0, 1, 0}), "");
  EXPECT_EQ(text({0, 2}),
            "node 4 (all_reduce): part: expected 0 or 1, which follows the part before it, got 2");
  EXPECT_EQ(text({0, 1, 1}),
            "node 8 (all_reduce): part: expected 0 or 2, which follows the part before it, got 1");
  EXPECT_EQ(text({0, 1, 0, 2}),
            "node 12 (all_reduce): part: expected 0 or 1, which follows the part before it, got 2");
  EXPECT_EQ(text({0, -1}),
            "node 4 (all_reduce): part: expected 0 or 1, which follows the part before it, got -1");
}

// Errors are kept and sent on: none is as long as a list that a client made up.
TEST(ValidateTest, LongListsMakeNoLongErrors) {
  const TensorType type(DType::kF32, {Dim(2)});
  for (const char* op : {"reshape", "transpose", "expand", "sum"}) {
    const std::string name = op;
    const char* const list = name == "transpose" ? "perm" : name == "sum" ? "axes" : "dims";
    Graph graph;
    graph.inputs.resize(1);
    graph.inputs[0].type = type;
    Node node;
    node.op = op;
    node.attributes = {{list, std::vector<int64_t>(1000000, 7)}};
    node.inputs = {0};
    node.outputs = {type};
    graph.nodes = {node};
    const Error error = ErrorOf(ValidateGraph(graph, GraphLimits()));
    EXPECT_EQ(error.reason, Reason::kBadType) << op;
    EXPECT_EQ(error.got.substr(0, 5), "[7,7,") << op;
    EXPECT_LT(error.message.size(), 1024u) << op;
  }
}

TEST(ValidateTest, LimitsAreTheCallers) {
  GraphLimits limits;
  limits.max_nodes = 5;
  EXPECT_EQ(ErrorOf(ValidateGraph(Valid(), limits)).message,
            "number of nodes: expected from 0 to 5, got 6");
  limits = GraphLimits();
  limits.max_collectives = 3;
  EXPECT_EQ(ErrorOf(ValidateGraph(Valid(), limits)).message,
            "number of collectives: expected from 0 to 3, got 4");
  limits = GraphLimits();
  limits.max_inputs = 1;
  EXPECT_EQ(ErrorOf(ValidateGraph(Valid(), limits)).message,
            "number of inputs: expected from 0 to 1, got 3");
  limits = GraphLimits();
  limits.max_outputs = 1;
  EXPECT_EQ(ErrorOf(ValidateGraph(Valid(), limits)).message,
            "number of outputs: expected from 0 to 1, got 2");
  limits.max_outputs = 2;
  EXPECT_TRUE(ValidateGraph(Valid(), limits).ok());
  limits = GraphLimits();
  limits.max_values = 8;
  EXPECT_EQ(ErrorOf(ValidateGraph(Valid(), limits)).message,
            "number of values: expected from 0 to 8, got 9");
  limits = GraphLimits();
  limits.max_value_bytes = 15;
  EXPECT_EQ(ErrorOf(ValidateGraph(Valid(), limits)).message,
            "input 0: f32[4] is larger than the limit of 15 bytes");
  // Also where only a node's output is too large.
  RankBuilder b;
  b.Op("expand", {b.Input(TensorType(DType::kF32, {1}))}, {{"dims", std::vector<int64_t>{4}}});
  EXPECT_EQ(ErrorOf(ValidateGraph(b.graph().Build(), limits)).message,
            "node 0 (expand): f32[4] is larger than the limit of 15 bytes");
}

}  // namespace
}  // namespace chorus
