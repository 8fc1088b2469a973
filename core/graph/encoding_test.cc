#include "core/graph/encoding.h"

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/base/memory_account.h"
#include "core/base/source_line.h"
#include "core/graph/sample_graph.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(EncodingTest, DecodesWhatItEncodes) {
  for (const Graph& graph : {SampleGraph(), Graph()}) {
    const std::string bytes = EncodeGraph(graph);
    EXPECT_EQ(EncodeGraph(graph), bytes);
    const absl::StatusOr<Graph> decoded = DecodeGraph(bytes);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_TRUE(*decoded == graph) << DebugString(*decoded);
    EXPECT_EQ(EncodeGraph(*decoded), bytes);
  }
}

TEST(EncodingTest, EveryFieldButTheSourceChangesTheHash) {
  const Graph base = SampleGraph();
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
TEST(EncodingTest, HashIsStable) {
  Graph graph = SampleGraph();
  graph.nodes[1].collective->part = 0;  // what has no part is encoded as before there were any
  EXPECT_EQ(HashGraph(graph).ToString(), "ec5c558cec1ad131c83cf6e619dd168c");
}

// A part of 0 has one encoding, and a flag that nobody knows is none.
TEST(EncodingTest, ACollectivesFlagsAreCanonical) {
  const auto decodes = [](char flags, int64_t part) {
    Graph graph = SampleGraph();
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

TEST(EncodingTest, CutBytesNeverDecodeAndSayWhere) {
  const std::string bytes = EncodeGraph(SampleGraph());
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

TEST(EncodingTest, OtherVersionsAreNamed) {
  Graph graph;
  graph.ir_version = 2;
  const absl::Status status = DecodeGraph(EncodeGraph(graph)).status();
  EXPECT_EQ(ErrorOf(status).reason, Reason::kVersion);
  EXPECT_EQ(ErrorOf(status).message, "graph: IR version 2, this build reads 1");
}

TEST(EncodingTest, CountsThatCannotBeTrueAllocateNothing) {
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

TEST(EncodingTest, NumbersOutOfRangeDoNotDecode) {
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

TEST(EncodingTest, ChangedBytesNeverCrash) {
  const uint32_t seed = std::random_device()();
  RecordProperty("seed", static_cast<int>(seed));
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::string bytes = EncodeGraph(SampleGraph());
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

// --- Limits ---

// The most that decoding takes beside the graph: errors, and the dims of one type.
constexpr int64_t kBesideBytes = 4096;

DecodeLimits Memory(int64_t max_bytes) {
  DecodeLimits limits;
  limits.max_bytes = max_bytes;
  return limits;
}

TEST(EncodingTest, AGraphTakesWhatItsAccountSays) {
  Graph graph = SampleGraph();
  graph.nodes[0].op = std::string(kInlineTextBytes, 'o');
  graph.nodes[1].op = std::string(kInlineTextBytes + 1, 'o');
  graph.nodes[0].attributes[0].name = std::string(100, 'n');
  graph.nodes[0].attributes[3].value = std::string(1000, 't');
  graph.nodes[0].source = std::string(kMaxSourceLineBytes, 's');
  graph.sizes = {SizeRule(), SizeRule(), SizeRule()};
  for (const Graph& each : {SampleGraph(), Graph(), graph}) {
    const std::string bytes = EncodeGraph(each);
    const HeapUse heap;
    const absl::StatusOr<Graph> decoded = DecodeGraph(bytes);
    const int64_t on_heap = heap.bytes();
    const int64_t blocks = heap.blocks();
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(MemoryOf(*decoded),
              static_cast<int64_t>(sizeof(Graph)) + on_heap + blocks * kBlockOverheadBytes);
    EXPECT_EQ(MemoryOf(each), MemoryOf(*decoded));
  }
}

TEST(EncodingTest, DecodesWithinItsMemoryAndNotBelow) {
  const std::string bytes = EncodeGraph(SampleGraph());
  const int64_t memory = MemoryOf(SampleGraph());
  EXPECT_TRUE(DecodeGraph(bytes, Memory(memory)).ok());
  for (int64_t less = 0; less < memory; ++less) {
    const absl::Status status = DecodeGraph(bytes, Memory(less)).status();
    ASSERT_EQ(ErrorOf(status).reason, Reason::kQuota) << less << ": " << status;
  }
  const Error error = ErrorOf(DecodeGraph(bytes, Memory(memory - 1)).status());
  EXPECT_EQ(error.message, "graph: expected one that takes at most " + std::to_string(memory - 1) +
                               " bytes of memory, got one that takes " + std::to_string(memory) +
                               " or more");
}

TEST(EncodingTest, CountsNodesBeforeTheyAreMade) {
  DecodeLimits limits;
  limits.max_nodes = 2;
  const std::string two = EncodeGraph(SampleGraph());
  EXPECT_TRUE(DecodeGraph(two, limits).ok());
  limits.max_nodes = 1;
  EXPECT_EQ(ErrorOf(DecodeGraph(two, limits).status()).message,
            "graph: number of nodes: expected from 0 to 1, got 2");

  // Nine zero bytes are a node.
  Graph many;
  many.nodes.resize(100000);
  const std::string bytes = EncodeGraph(many);
  limits.max_nodes = 99999;
  const HeapUse heap;
  EXPECT_EQ(ErrorOf(DecodeGraph(bytes, limits).status()).message,
            "graph: number of nodes: expected from 0 to 99999, got 100000");
  EXPECT_LT(heap.most_bytes(), kBesideBytes);
}

// Bytes of which few make much, one list after the other: nowhere is more made than is allowed.
TEST(EncodingTest, NeverTakesMoreThanItMay) {
  constexpr size_t kMany = 20000;
  std::vector<std::pair<const char*, Graph>> graphs;
  const auto add = [&graphs](const char* what) -> Graph& {
    graphs.emplace_back(what, Graph());
    return graphs.back().second;
  };
  const auto add_node = [&add](const char* what) -> Node& {
    Graph& graph = add(what);
    graph.nodes.resize(1);
    return graph.nodes[0];
  };
  add("nodes").nodes.resize(kMany);
  add("inputs").inputs.resize(kMany);
  add("outputs").outputs.resize(kMany);
  add("size rules").sizes.resize(kMany);
  add("group slots").group_slots.resize(kMany);
  GroupSlot slot;
  slot.held.resize(kMany);
  slot.device_slots.resize(kMany);
  add("members").group_slots = {slot};
  add_node("op").op.resize(kMany);
  add_node("attributes").attributes.resize(kMany);
  add_node("an attribute's name").attributes = {{std::string(kMany, 'n'), int64_t{0}}};
  add_node("an attribute's text").attributes = {{"t", std::string(kMany, 't')}};
  add_node("an attribute's numbers").attributes = {{"n", std::vector<int64_t>(kMany)}};
  add_node("a node's inputs").inputs.resize(kMany);
  add_node("a node's outputs").outputs.resize(kMany);
  add_node("dims").outputs.assign(
      kMany / TensorType::kMaxRank,
      TensorType(DType::kF32, std::vector<Dim>(TensorType::kMaxRank, Dim(0))));
  Collective counted;
  counted.counts.resize(kMany);
  add_node("counts").collective = counted;
  Graph& sources = add("sources");
  sources.nodes.resize(kMany / kMaxSourceLineBytes);
  for (Node& node : sources.nodes) node.source.resize(kMaxSourceLineBytes);

  for (const auto& [what, graph] : graphs) {
    const std::string bytes = EncodeGraph(graph);
    const int64_t memory = MemoryOf(graph);
    ASSERT_GT(memory, static_cast<int64_t>(kMany)) << what;
    EXPECT_TRUE(DecodeGraph(bytes, Memory(memory)).ok()) << what;
    EXPECT_LE(memory, MaxMemoryOf(bytes)) << what;
    for (const int64_t part : {2, 10, 100}) {
      const int64_t limit = memory / part;
      const HeapUse heap;
      EXPECT_EQ(ErrorOf(DecodeGraph(bytes, Memory(limit)).status()).reason, Reason::kQuota) << what;
      EXPECT_LE(heap.most_bytes(), limit + kBesideBytes) << what << ", limit " << limit;
    }
  }
}

TEST(EncodingTest, BoundsSources) {
  Graph graph = SampleGraph();
  graph.nodes[1].source = std::string(kMaxSourceLineBytes, 's');
  EXPECT_TRUE(DecodeGraph(EncodeGraph(graph)).ok());
  graph.nodes[1].source += 's';
  const Error error = ErrorOf(DecodeGraph(EncodeGraph(graph)).status());
  EXPECT_EQ(error.reason, Reason::kMalformed);
  EXPECT_NE(error.message.find("graph: node 1 of 2, which starts at byte "), std::string::npos)
      << error.message;
  EXPECT_NE(error.message.find(": expected a source of at most 512 bytes, got 513"),
            std::string::npos)
      << error.message;
}

}  // namespace
}  // namespace chorus
