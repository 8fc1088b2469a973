#include "core/runtime/plan/plan.h"

#include <time.h>

#include <algorithm>
#include <cstdio>

#include "absl/time/time.h"
#include "core/ops/testing/rank_builder.h"
#include "core/runtime/plan/plan_testing.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

// What this thread has computed: a busy machine does not count.
absl::Duration ThreadTime() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return absl::DurationFromTimespec(now);
}

// A graph of about 2 * `size` nodes.
Graph LargeGraph(int shape, int size) {
  RankBuilder b(0, 2);
  const ValueIndex x = b.Input(F32({16}));
  ValueIndex v = x;
  for (int i = 0; i < size; ++i) {
    switch (shape) {
      case 0:  // a chain of local ops
        v = b.Op("add", {b.Op("neg", {v}), x});
        break;
      case 1:  // collectives that need each other
        v = b.Op("neg", {b.AllReduce(v)});
        break;
      case 2:  // a sum of independent collectives
        v = b.Op("add", {v, b.AllReduce(x)});
        break;
      case 3:  // updates that are equal on all ranks
        AddOutput(&b, b.Op("neg", {b.AllReduce(b.Input(F32({10000})))}));
        break;
      default:  // a collective of each partial sum of collectives
        v = b.Op("add", {v, b.AllReduce(v)});
    }
  }
  AddOutput(&b, v);
  return b.graph().Build();
}

absl::Duration TimeToPlan(const Graph& graph) {
  const absl::Duration start = ThreadTime();
  const absl::StatusOr<Plan> plan = CompilePlan(graph, {});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return ThreadTime() - start;
}

// Ten times the nodes take about ten times as long; anything quadratic takes a hundred times.
TEST(PlanTest, TenThousandNodesArePlannedInLinearTime) {
  for (const int shape : {0, 1, 2, 3, 4}) {
    const Graph small = LargeGraph(shape, 500);
    const Graph large = LargeGraph(shape, 5000);
    absl::Duration least = absl::InfiniteDuration();
    for (int i = 0; i < 5; ++i) least = std::min(least, TimeToPlan(small));
    const absl::Duration took = std::min(TimeToPlan(large), TimeToPlan(large));
    std::printf("shape %d: %s, a tenth of it %s\n", shape, absl::FormatDuration(took).c_str(),
                absl::FormatDuration(least).c_str());
    EXPECT_LT(took, 40 * least) << "shape " << shape;
  }
}

}  // namespace
}  // namespace testing
}  // namespace chorus
