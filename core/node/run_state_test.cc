#include "core/node/run_state.h"

#include <vector>

#include "gtest/gtest.h"

namespace chorus::node {
namespace {

TEST(RunTableTest, FewRowsOutliveTheirRuns) {
  RunTable table;
  for (int round = 0; round < 2; ++round) {
    std::vector<RunHandle> handles;
    for (int i = 0; i < 5000; ++i) {
      RunState* const run = table.Add();
      run->bytes = 4096;
      run->addresses.assign(100, 1);
      handles.push_back(run->handle);
    }
    EXPECT_EQ(table.rows(), 5000);
    EXPECT_EQ(table.live(), 5000);
    for (const RunHandle handle : handles) {
      ASSERT_NE(table.Find(handle), nullptr);
      EXPECT_EQ(table.Find(handle)->addresses.size(), 100u);
    }
    for (const RunHandle handle : handles) {
      table.Remove(handle);
      EXPECT_EQ(table.Find(handle), nullptr);
    }
    EXPECT_EQ(table.live(), 0);
    EXPECT_EQ(table.rows(), 256);
    table.ForEach([](RunState*) { FAIL() << "no run is left"; });
  }
  EXPECT_TRUE(table.Add()->addresses.empty());
}

// Of a run that took much, or was not charged yet, nothing is kept.
TEST(RunTableTest, LittleOutlivesARun) {
  RunTable table;
  for (const int64_t bytes : {0, 1 << 20}) {
    RunState* const run = table.Add();
    run->bytes = bytes;
    run->vote.bound.resize(1000);
    table.Remove(run->handle);
    RunState* const next = table.Add();
    EXPECT_EQ(next, run);
    EXPECT_EQ(next->vote.bound.capacity(), 0u) << bytes;
    table.Remove(next->handle);
  }
}

}  // namespace
}  // namespace chorus::node
