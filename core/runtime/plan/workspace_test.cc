#include "core/runtime/plan/workspace.h"

#include "gtest/gtest.h"

namespace chorus::planning {
namespace {

using Stream = DevicePlan::StreamId;

TEST(WorkspaceTest, BlocksStandBesideEachOtherAndAreUsedAgain) {
  Workspace workspace;
  const Workspace::Block first = workspace.Allocate(100, Stream::kCompute, -1);
  const Workspace::Block second = workspace.Allocate(100, Stream::kCompute, -1);
  EXPECT_EQ(first.offset, 0);
  EXPECT_EQ(second.offset, 128);
  workspace.Free(first);
  EXPECT_EQ(workspace.Allocate(65, Stream::kCompute, -1).offset, 0);
  EXPECT_EQ(workspace.bytes(), 256);
}

// Up to twice as large: beyond that a small value would keep a large block.
TEST(WorkspaceTest, ALargerBlockServesWhatIsNotMuchSmaller) {
  Workspace workspace;
  workspace.Free(workspace.Allocate(4096, Stream::kCompute, -1));
  EXPECT_EQ(workspace.Allocate(1024, Stream::kCompute, -1).offset, 4096);
  EXPECT_EQ(workspace.Allocate(2048, Stream::kCompute, -1).offset, 0);
}

TEST(WorkspaceTest, ABlockIsGivenToTheOtherStreamOnlyBehindItsLastStep) {
  Workspace workspace;
  Workspace::Block block = workspace.Allocate(64, Stream::kCompute, -1);
  block.touched[static_cast<int>(Stream::kCompute)] = 5;
  workspace.Free(block);
  EXPECT_EQ(workspace.Allocate(64, Stream::kCommunication, 4).offset, 64) << "step 5 may still run";
  EXPECT_EQ(workspace.Allocate(64, Stream::kCommunication, 5).offset, 0);
}

TEST(WorkspaceTest, OneStreamRunsInItsOrder) {
  Workspace workspace;
  Workspace::Block block = workspace.Allocate(64, Stream::kCompute, -1);
  block.touched[static_cast<int>(Stream::kCompute)] = 5;
  workspace.Free(block);
  EXPECT_EQ(workspace.Allocate(64, Stream::kCompute, -1).offset, 0);
}

}  // namespace
}  // namespace chorus::planning
