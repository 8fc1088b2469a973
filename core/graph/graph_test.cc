#include "core/graph/graph.h"

#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include "core/base/bytes.h"
#include "core/base/error.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

// One of everything, every field away from its default.
Graph Everything() {
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

TEST(GraphTest, NamesKindsAndReductions) {
  EXPECT_EQ(CollectiveKindName(CollectiveKind::kAllReduce), "all_reduce");
  EXPECT_EQ(CollectiveKindName(CollectiveKind::kBarrier), "barrier");
  EXPECT_EQ(CollectiveKindName(static_cast<CollectiveKind>(99)), "unknown");
  EXPECT_EQ(ReductionName(Reduction::kSum), "SUM");
  EXPECT_EQ(ReductionName(Reduction::kBxor), "BXOR");
}

TEST(GraphTest, NumbersValuesInputsFirst) {
  const Graph graph = Everything();
  EXPECT_EQ(graph.num_values(), 5);
  EXPECT_EQ(graph.ValueOf(0, 1), 3);
  EXPECT_EQ(graph.ValueOf(1, 0), 4);
  const ValueTable table(graph);
  ASSERT_EQ(table.size(), 5);
  EXPECT_EQ(table.producer(1), -1);
  EXPECT_EQ(table.producer(3), 0);
  EXPECT_EQ(table.producer(4), 1);
  EXPECT_EQ(table.device_slot(1), 1);
  EXPECT_EQ(table.device_slot(2), 1);
  EXPECT_EQ(table.device_slot(4), 0);
  EXPECT_EQ(table.first_output(1), 4);
  EXPECT_EQ(table.type(4), TensorType(DType::kF64, {3}));
}

TEST(GraphTest, DecodesWhatItEncodes) {
  for (const Graph& graph : {Everything(), Graph()}) {
    const std::string bytes = EncodeGraph(graph);
    EXPECT_EQ(EncodeGraph(graph), bytes);
    const absl::StatusOr<Graph> decoded = DecodeGraph(bytes);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_TRUE(*decoded == graph) << DebugString(*decoded);
    EXPECT_EQ(EncodeGraph(*decoded), bytes);
  }
}

TEST(GraphTest, EveryFieldButTheSourceChangesTheHash) {
  const Graph base = Everything();
  const Hash128 hash = HashGraph(base);
  Graph sourced = base;
  sourced.nodes[0].source = "elsewhere.cc:1";
  EXPECT_EQ(HashGraph(sourced), hash);
  EXPECT_FALSE(sourced == base);

  const auto changed = [&](void (*change)(Graph*)) {
    Graph graph = base;
    change(&graph);
    EXPECT_FALSE(graph == base) << "operator== does not see the change";
    return HashGraph(graph) != hash;
  };
  EXPECT_TRUE(changed([](Graph* g) { g->num_device_slots = 9; }));
  EXPECT_TRUE(changed([](Graph* g) { g->num_instance_slots = 9; }));
  EXPECT_TRUE(changed([](Graph* g) { g->group_slots[0].size = 9; }));
  EXPECT_TRUE(changed([](Graph* g) { g->group_slots[0].held[1] = GroupRank(2); }));
  EXPECT_TRUE(changed([](Graph* g) { g->group_slots[0].device_slots[0] = 1; }));
  EXPECT_TRUE(changed([](Graph* g) { g->inputs[0].type.dims[0] = 9; }));
  EXPECT_TRUE(changed([](Graph* g) { g->inputs[0].type.dims[1].symbol = 9; }));
  EXPECT_TRUE(changed([](Graph* g) { g->inputs[1].type.dtype = DType::kI8; }));
  EXPECT_TRUE(changed([](Graph* g) { g->inputs[1].role = InputRole::kSeed; }));
  EXPECT_TRUE(changed([](Graph* g) { g->inputs[1].donatable = false; }));
  EXPECT_TRUE(changed([](Graph* g) { g->inputs[1].device_slot = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[0].op = "mul"; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[0].version = 4; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[0].attributes[0].name = "aa"; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[0].attributes[0].value = -5.0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[0].attributes[1].value = 0.5; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[0].inputs[1] = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[0].outputs.pop_back(); }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[0].device_slot = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[0].effect = Effect::kPure; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective.reset(); }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->kind = CollectiveKind::kSend; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->group_slot = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->rank = GroupRank(0); }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->root = GroupRank(0); }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->reduction = Reduction::kSum; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->wants_grad = false; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->leads_to_collective = false; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->leads_to_leaf = true; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->peer = GroupRank(0); }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->tag = 0; }));
  EXPECT_TRUE(
      changed([](Graph* g) { g->nodes[1].collective->instance.kind = InstanceRef::Kind::kNext; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->instance.node = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->instance.request = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->instance.slot = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->part = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->part = -6; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->counts[2] = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->runtime_counts_input = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->nodes[1].collective->runtime_count_maximum = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->outputs[0].value = 0; }));
  EXPECT_TRUE(changed([](Graph* g) { g->outputs[0].role = InputRole::kData; }));
  EXPECT_TRUE(changed([](Graph* g) { g->outputs[0].may_alias = 0; }));
}

// The hash is a name that caches and peers of other builds may hold: a change of the encoding needs
// a new IR version.
TEST(GraphTest, HashIsStable) {
  Graph graph = Everything();
  graph.nodes[1].collective->part = 0;  // what has no part is encoded as before there were any
  EXPECT_EQ(HashGraph(graph).ToString(), "ec5c558cec1ad131c83cf6e619dd168c");
}

// A part of 0 has one encoding, and a flag that nobody knows is none.
TEST(GraphTest, ACollectivesFlagsAreCanonical) {
  const auto decodes = [](char flags, int64_t part) {
    Graph graph = Everything();
    graph.nodes[1].collective->part = 6;
    ByteWriter six;
    six.PutSigned(6);
    ByteWriter other;
    other.PutSigned(part);
    std::string bytes = EncodeGraph(graph);
    const std::string marks = "\x9\xb" + six.bytes();  // BXOR; gradient, collective, part; the part
    const size_t at = bytes.find(marks);
    EXPECT_NE(at, std::string::npos);
    bytes.replace(at + 1, marks.size() - 1, flags + other.bytes());
    return DecodeGraph(bytes).ok();
  };
  EXPECT_TRUE(decodes('\xa', 1));
  EXPECT_TRUE(decodes('\xf', -1));
  EXPECT_FALSE(decodes('\xf', 0));
  EXPECT_FALSE(decodes('\x1f', 1));
  EXPECT_FALSE(decodes('\xb', int64_t{1} << 32));
}

TEST(GraphTest, CutBytesNeverDecodeAndSayWhere) {
  const std::string bytes = EncodeGraph(Everything());
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    const absl::StatusOr<Graph> decoded = DecodeGraph(absl::string_view(bytes).substr(0, cut));
    ASSERT_FALSE(decoded.ok()) << "cut at " << cut;
    EXPECT_EQ(ErrorOf(decoded.status()).reason, Reason::kMalformed) << decoded.status();
  }
  const absl::Status status =
      DecodeGraph(absl::string_view(bytes).substr(0, bytes.size() - 20)).status();
  EXPECT_NE(status.message().find("node 1 of 2, which starts at byte"), absl::string_view::npos)
      << status;
  const absl::Status longer = DecodeGraph(bytes + "x").status();
  EXPECT_NE(longer.message().find("size rules"), absl::string_view::npos) << longer;
}

TEST(GraphTest, OtherVersionsAreNamed) {
  Graph graph;
  graph.ir_version = 2;
  const absl::Status status = DecodeGraph(EncodeGraph(graph)).status();
  EXPECT_EQ(ErrorOf(status).reason, Reason::kVersion);
  EXPECT_EQ(ErrorOf(status).message, "graph: IR version 2, this build reads 1");
}

TEST(GraphTest, CountsThatCannotBeTrueAllocateNothing) {
  // After the head: 2^60 group slots.
  ByteWriter out;
  out.Put(uint32_t{0x47524843});
  out.PutSigned(1);
  out.PutSigned(1);
  out.PutSigned(0);
  out.PutVarint(uint64_t{1} << 60);
  const absl::Status status = DecodeGraph(out.bytes()).status();
  EXPECT_NE(status.message().find("number of group slots"), absl::string_view::npos) << status;
}

TEST(GraphTest, NumbersOutOfRangeDoNotDecode) {
  // One input f32[] with these numbers; all as they are here decode.
  const auto decodes = [](int64_t device_slots, uint8_t role, uint8_t donatable, int64_t slot) {
    ByteWriter out;
    out.Put(uint32_t{0x47524843});
    out.PutSigned(1);  // IR version
    out.PutSigned(device_slots);
    out.PutSigned(0);  // instance slots
    out.PutVarint(0);  // group slots
    out.PutVarint(1);  // inputs
    EncodeType(TensorType(DType::kF32, {}), &out);
    out.Put(role);
    out.Put(donatable);
    out.PutSigned(slot);
    out.PutVarint(0);  // nodes
    out.PutVarint(0);  // outputs
    return DecodeGraph(out.bytes()).ok();
  };
  EXPECT_TRUE(decodes(1, 3, 1, 0));
  // Cut to 32 bits these would be valid again.
  EXPECT_FALSE(decodes((int64_t{1} << 32) + 1, 3, 1, 0));
  EXPECT_FALSE(decodes(1, 3, 1, int64_t{1} << 32));
  EXPECT_FALSE(decodes(1, 4, 1, 0));
  EXPECT_FALSE(decodes(1, 3, 2, 0));
}

TEST(GraphTest, ChangedBytesNeverCrash) {
  const uint32_t seed = std::random_device()();
  RecordProperty("seed", static_cast<int>(seed));
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::string bytes = EncodeGraph(Everything());
  for (int round = 0; round < 20000; ++round) {
    std::string changed = bytes;
    for (int i = 0; i < 1 + round % 3; ++i) changed[random() % changed.size()] = random();
    const absl::StatusOr<Graph> decoded = DecodeGraph(changed);
    if (!decoded.ok()) continue;
    // What decodes has one canonical form.
    const std::string canonical = EncodeGraph(*decoded);
    const absl::StatusOr<Graph> again = DecodeGraph(canonical);
    ASSERT_TRUE(again.ok()) << again.status();
    ASSERT_EQ(EncodeGraph(*again), canonical);
    DebugString(*decoded);
    ValueTable table(*decoded);
  }
}

TEST(GraphTest, DebugStringHasOneLineForEachPart) {
  EXPECT_EQ(
      DebugString(Everything()),
      "graph devices=2 instances=3\n"
      "group 0: size=4 held=[1,3] devices=[0,1]\n"
      "%0: f32[2,s0<=7] = input\n"
      "%1: i64[] = input role=1 donatable device=1\n"
      "#0 %2: f64[3], %3: f32[0] = sum(%0, %1) a=-5 b=0.25 "
      "c=[0,-1,-9223372036854775808] d='" +
          std::string("text\0with zero", 14) +
          "' device=1 @train.cc:42\n"
          "#1 %4: f64[3] = all_reduce(%2) group=5 rank=3 root=2 BXOR peer=1 tag=-77 part=6 grad "
          "from_collective "
          "instance_slot=10\n"
          "output %4 may_alias=1\n");
}

}  // namespace
}  // namespace chorus
