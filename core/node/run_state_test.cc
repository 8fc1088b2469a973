#include "core/node/run_state.h"

#include <set>
#include <vector>

#include "core/base/ids.h"
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

TEST(RunTableTest, AHandleNamesOneRun) {
  RunTable table;
  const RunHandle first = table.Add()->handle;
  const RunHandle other = table.Add()->handle;
  table.Remove(first);
  const RunHandle second = table.Add()->handle;
  EXPECT_NE(first, second);
  EXPECT_EQ(table.Find(first), nullptr);
  EXPECT_EQ(table.Find(second)->handle, second);
  EXPECT_EQ(table.Find(other)->handle, other);
  table.Remove(first);
  EXPECT_EQ(table.live(), 2) << "it is its successor's slot now";
}

TEST(RunTableTest, ASlotIsNotUsedAgainAfterItsLastHandle) {
  constexpr int64_t kLastSerial = (int64_t{1} << 41) - 1;
  RunTable table(kLastSerial - 1);
  std::set<RunHandle> handles;
  for (int i = 0; i < 7; ++i) {
    const RunHandle handle = table.Add()->handle;
    EXPECT_GT(handle.value(), 0);
    EXPECT_TRUE(handles.insert(handle).second) << handle.value();
    ASSERT_NE(table.Find(handle), nullptr);
    EXPECT_EQ(table.live(), 1);
    table.Remove(handle);
    for (const RunHandle ended : handles) EXPECT_EQ(table.Find(ended), nullptr);
  }
  EXPECT_EQ(table.live(), 0);
  EXPECT_EQ(table.rows(), 1) << "the last run's";
  table.ForEach([](RunState*) { FAIL() << "no run is left"; });
}

}  // namespace
}  // namespace chorus::node
