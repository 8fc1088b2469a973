#include "core/runtime/buffer.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace chorus {
namespace {

TEST(BufferTest, StagingRangesAreCheckedAndKeepTheirArena) {
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 20);
  auto created = Arena::CreateStaging(budget, 4096);
  ASSERT_TRUE(created.ok());
  std::shared_ptr<Arena> arena = *std::move(created);
  for (const auto& [offset, bytes] : std::vector<std::pair<int64_t, int64_t>>{
           {-1, 1}, {0, -1}, {0, 4097}, {4096, 1}, {INT64_MAX, 1}, {1, INT64_MAX}, {4097, 0}}) {
    const auto buffer = Buffer::OfStaging(arena, offset, bytes);
    EXPECT_EQ(buffer.status().code(), absl::StatusCode::kInvalidArgument) << offset << " " << bytes;
  }
  EXPECT_TRUE(Buffer::OfStaging(arena, 4096, 0).ok());
  auto buffer = Buffer::OfStaging(arena, 64, 128);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ((*buffer)->host(), arena->data() + 64);
  EXPECT_EQ((*buffer)->arena(), arena->id());
  EXPECT_EQ((*buffer)->offset(), 64);
  EXPECT_EQ((*buffer)->state(), Buffer::State::kStaging);
  arena.reset();
  EXPECT_EQ(budget->used(), 4096) << "the buffer keeps it";
  buffer->reset();
  EXPECT_EQ(budget->used(), 0);
  auto result = Arena::CreateResult(budget, 4096);
  ASSERT_TRUE(result.ok());
  EXPECT_FALSE(Buffer::OfStaging(*result, 0, 1).ok());
}

}  // namespace
}  // namespace chorus
