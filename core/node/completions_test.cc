#include "core/node/completions.h"

#include <memory>

#include "gtest/gtest.h"

namespace chorus::node {
namespace {

TEST(CompletionsTest, OneTurnWakesOnce) {
  const auto memory = CreateSessionMemory({4096, 16});
  ASSERT_TRUE(memory.ok()) << memory.status();
  News news;
  Completions completions(&news);
  completions.PublishRun(Sequence(1), {});  // it has no memory: nothing is published
  completions.Attach(memory->get());
  const auto& completed = (*memory)->control().completion.completed;
  news.Signal();
  const uint32_t before = completed.load();
  completions.PublishRun(Sequence(2), {});
  completions.PublishRun(Sequence(3), {});
  EXPECT_EQ(completed.load(), before) << "told at the end of the turn";
  news.Signal();
  const uint32_t after = completed.load();
  EXPECT_NE(after, before);
  news.Signal();
  EXPECT_EQ(completed.load(), after) << "nothing new";
}

TEST(CompletionsTest, WhoeverHasGoneIsNotTold) {
  const auto memory = CreateSessionMemory({4096, 16});
  ASSERT_TRUE(memory.ok()) << memory.status();
  News news;
  {
    Completions gone(&news);
    gone.Attach(memory->get());
    gone.PublishRun(Sequence(1), {});
  }
  Completions detached(&news);
  detached.Attach(memory->get());
  detached.PublishRun(Sequence(2), {});
  detached.Detach();
  const uint32_t before = (*memory)->control().completion.completed.load();
  news.Signal();
  EXPECT_EQ((*memory)->control().completion.completed.load(), before);
}

}  // namespace
}  // namespace chorus::node
