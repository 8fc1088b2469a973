#include "core/runtime/plan/forms.h"

#include "absl/status/status.h"
#include "core/runtime/plan/plan_testing.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

TEST(FormsTest, TwoMembersOnOneSlotAreRefused) {
  GroupSlot slot;
  slot.size = 2;
  slot.held = {GroupRank(0), GroupRank(1)};
  slot.device_slots = {0, 0};
  Graph graph;
  graph.group_slots = {slot};
  EXPECT_EQ(CompilePlan(graph, {}).status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace testing
}  // namespace chorus
