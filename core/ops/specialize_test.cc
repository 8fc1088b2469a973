#include "core/ops/specialize.h"

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/graph/encoding.h"
#include "core/ops/graph_builder.h"
#include "core/ops/validate.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

constexpr int64_t kMaximum = 8;

ValueIndex Add(GraphBuilder* builder, const std::string& op, std::vector<ValueIndex> inputs,
               Attributes attributes = {}) {
  NodeSpec spec;
  spec.op = op;
  spec.inputs = std::move(inputs);
  spec.attributes = std::move(attributes);
  spec.source = "step.cc:" + std::to_string(builder->nodes().size());
  const auto values = builder->Emit(std::move(spec));
  EXPECT_TRUE(values.ok()) << values.status();
  return (*values)[0];
}

// x[n,3] and y[n], where n is a number.
Graph At(int64_t n) {
  GroupSlot slot;
  slot.size = 2;
  slot.held = {GroupRank(0)};
  slot.device_slots = {0};
  GraphBuilder builder(1, {slot});
  GraphInput input;
  input.type = TensorType(DType::kF32, {n, 3});
  const ValueIndex x = builder.AddInput(input);
  input.type = TensorType(DType::kF32, {n});
  const ValueIndex y = builder.AddInput(input);
  const ValueIndex flat = Add(&builder, "reshape", {x}, {{"dims", std::vector<int64_t>{3 * n}}});
  const ValueIndex more =
      Add(&builder, "pad", {flat}, {{"after", n}, {"axis", int64_t{0}}, {"before", int64_t{2}}});
  const ValueIndex less = Add(&builder, "slice", {more},
                              {{"axis", int64_t{0}}, {"begin", int64_t{2}}, {"end", 3 * n + 2}});
  GraphOutput output;
  output.value = Add(&builder, "sum", {less});
  builder.AddOutput(output);
  output.value = Add(&builder, "neg", {y});
  builder.AddOutput(output);
  NodeSpec gather;
  gather.op = "all_gather";
  gather.inputs = {y};
  gather.source = "step.cc:9";
  gather.collective = Collective();
  gather.collective->kind = CollectiveKind::kAllGather;
  gather.collective->rank = GroupRank(0);
  gather.collective->counts = {n, 2 * n};
  output.value = (*builder.Emit(gather))[1];
  builder.AddOutput(output);
  return builder.Build();
}

SizeRule Rule(int32_t node, int32_t attribute, int64_t scale, int64_t offset) {
  SizeRule rule;
  rule.node = node;
  rule.attribute = attribute;
  rule.scale = scale;
  rule.offset = offset;
  return rule;
}

Graph Symbolic() {
  Graph graph = At(kMaximum);
  for (GraphInput& input : graph.inputs) input.type.dims[0] = Dim::Symbol(0, kMaximum);
  graph.sizes = {Rule(0, 0, 3, 0), Rule(1, 0, 1, 0), Rule(2, 2, 3, 2)};
  for (const int32_t element : {0, 1}) {
    SizeRule count = Rule(5, 0, element + 1, 0);
    count.field = SizeRule::Field::kCount;
    count.element = element;
    graph.sizes.push_back(count);
  }
  return graph;
}

TEST(SpecializeTest, ItIsTheGraphOfThatSize) {
  const Graph graph = Symbolic();
  const absl::Status valid = ValidateGraph(graph, GraphLimits());
  ASSERT_TRUE(valid.ok()) << valid;
  EXPECT_THAT(*CheckSymbols(graph), testing::ElementsAre(kMaximum));
  for (int64_t n = 1; n <= kMaximum; ++n) {
    const absl::StatusOr<Graph> at = Specialize(graph, {n});
    ASSERT_TRUE(at.ok()) << at.status();
    EXPECT_TRUE(*at == At(n)) << DebugString(*at) << "\n" << DebugString(At(n));
    EXPECT_TRUE(ValidateGraph(*at, GraphLimits()).ok());
  }
  for (const int64_t n :
       {int64_t{0}, int64_t{-1}, kMaximum + 1, std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(Specialize(graph, {n}).status().code(), absl::StatusCode::kInvalidArgument) << n;
  }
  EXPECT_TRUE(CheckSymbols(At(3))->empty());
  EXPECT_TRUE(*Specialize(At(3), {}) == At(3));
}

TEST(SpecializeTest, ItsEncodingComesBack) {
  const Graph graph = Symbolic();
  const std::string bytes = EncodeGraph(graph);
  const absl::StatusOr<Graph> back = DecodeGraph(bytes);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(*back == graph);
  EXPECT_EQ(EncodeGraph(*back), bytes);
  EXPECT_NE(HashGraph(graph), HashGraph(At(kMaximum)));
  Graph without_rules = graph;
  without_rules.sizes.clear();
  const size_t end = EncodeGraph(without_rules).size();
  EXPECT_LT(end, bytes.size());
  for (size_t size = 0; size < bytes.size(); ++size) {
    const absl::StatusOr<Graph> cut = DecodeGraph(absl::string_view(bytes).substr(0, size));
    EXPECT_EQ(cut.ok(), size == end) << size;
    if (cut.ok()) {
      EXPECT_TRUE(*cut == without_rules);
    }
  }
  EXPECT_FALSE(DecodeGraph(EncodeGraph(At(3)) + std::string(1, 0)).ok()) << "a list of no rules";
}

// A rule may be right at the maximum and impossible below.
TEST(SpecializeTest, ASizeAtWhichANodeCannotBe) {
  Graph graph = Symbolic();
  graph.sizes[2] = Rule(2, 2, 6, 3 * kMaximum + 2 - 6 * kMaximum);  // the slice's end
  ASSERT_TRUE(ValidateGraph(graph, GraphLimits()).ok());
  const absl::Status status = Specialize(graph, {1}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("node 2 (slice at step.cc:2)"));
}

TEST(SpecializeTest, WhatIsWrongIsRefused) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const struct {
    const char* what;
    std::function<void(Graph*)> change;
  } cases[] = {
      {"node", [](Graph* g) { g->sizes[4].node = 6; }},
      {"negative node", [](Graph* g) { g->sizes[0].node = -1; }},
      {"attribute", [](Graph* g) { g->sizes[0].attribute = 1; }},
      {"negative attribute", [](Graph* g) { g->sizes[0].attribute = -1; }},
      {"element", [](Graph* g) { g->sizes[0].element = 1; }},
      {"element of a number", [](Graph* g) { g->sizes[1].element = 1; }},
      {"count", [](Graph* g) { g->sizes[4].element = 2; }},
      {"count of a local op", [](Graph* g) { g->sizes[0].field = SizeRule::Field::kCount; }},
      {"runtime counts of a local op",
       [](Graph* g) { g->sizes[0].field = SizeRule::Field::kRuntimeCountMaximum; }},
      {"symbol", [](Graph* g) { g->sizes[0].symbol = 1; }},
      {"negative symbol", [](Graph* g) { g->sizes[0].symbol = -1; }},
      {"scale", [](Graph* g) { g->sizes[0].scale = 4; }},
      {"no scale",
       [](Graph* g) {
         g->sizes[0].scale = 0;
         g->sizes[0].offset = 3 * kMaximum;
       }},
      {"overflow", [](Graph* g) { g->sizes[0].scale = kMost; }},
      {"overflow back",
       [](Graph* g) {
         g->sizes[0].scale = kLeast;
         g->sizes[0].offset = kLeast;
       }},
      {"offset", [](Graph* g) { g->sizes[0].offset = 1; }},
      {"twice", [](Graph* g) { g->sizes[1] = g->sizes[0]; }},
      {"order", [](Graph* g) { std::swap(g->sizes[0], g->sizes[1]); }},
      {"two maxima", [](Graph* g) { g->inputs[1].type.dims[0] = Dim::Symbol(0, 7); }},
      {"a gap", [](Graph* g) { g->inputs[1].type.dims[0] = Dim::Symbol(2, kMaximum); }},
      {"a large symbol",
       [](Graph* g) {
         g->inputs[1].type.dims[0] = Dim::Symbol(std::numeric_limits<int32_t>::max(), kMaximum);
       }},
      {"no size",
       [](Graph* g) {
         for (auto& i : g->inputs) i.type.dims[0] = Dim::Symbol(0, 0);
       }},
      {"a negative size",
       [](Graph* g) {
         for (auto& i : g->inputs) i.type.dims[0] = Dim::Symbol(0, -kMaximum);
       }},
      {"rules without symbols",
       [](Graph* g) {
         for (auto& i : g->inputs) i.type.dims[0] = Dim(8);
       }},
      {"a symbol in a node",
       [](Graph* g) { g->nodes[4].outputs[0].dims[0] = Dim::Symbol(0, kMaximum); }},
      {"not what it is at the maximum",
       [](Graph* g) {
         *g = [] {
           Graph s = Symbolic();
           s.nodes[0].outputs[0] = TensorType(DType::kF32, {23});
           return s;
         }();
       }},
  };
  for (const auto& c : cases) {
    Graph graph = Symbolic();
    c.change(&graph);
    const absl::Status status = ValidateGraph(graph, GraphLimits());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.what << ": " << status;
  }
}

}  // namespace
}  // namespace chorus
