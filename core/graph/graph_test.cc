#include "core/graph/graph.h"

#include <string>

#include "core/graph/sample_graph.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(GraphTest, NamesKindsAndReductions) {
  EXPECT_EQ(CollectiveKindName(CollectiveKind::kAllReduce), "all_reduce");
  EXPECT_EQ(CollectiveKindName(CollectiveKind::kBarrier), "barrier");
  EXPECT_EQ(CollectiveKindName(static_cast<CollectiveKind>(99)), "unknown");
  EXPECT_EQ(ReductionName(Reduction::kSum), "SUM");
  EXPECT_EQ(ReductionName(Reduction::kBxor), "BXOR");
}

TEST(GraphTest, NumbersValuesInputsFirst) {
  const Graph graph = SampleGraph();
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

TEST(GraphTest, DebugStringHasOneLineForEachPart) {
  EXPECT_EQ(
      DebugString(SampleGraph()),
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
