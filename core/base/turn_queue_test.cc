#include "core/base/turn_queue.h"

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::ElementsAre;

TEST(TurnQueueTest, OwnersTakeTurnsAndKeepTheirOrder) {
  TurnQueue<std::string> turns;
  for (const char* item : {"a1", "a2", "a3", "a4"}) turns.Push("a", item);
  for (const char* item : {"b1", "b2"}) turns.Push("b", item);
  EXPECT_THAT(turns.Owners(), ElementsAre("a", "b"));
  EXPECT_EQ(turns.size(), 6u);
  std::vector<std::string> order;
  for (int i = 0; i < 3; ++i) order.push_back(turns.Pop());
  // One that comes later is behind each of the others once.
  turns.Push("c", "c1");
  while (!turns.empty()) order.push_back(turns.Pop());
  EXPECT_THAT(order, ElementsAre("a1", "b1", "a2", "b2", "a3", "c1", "a4"));
  EXPECT_THAT(turns.Owners(), ElementsAre());
  EXPECT_EQ(turns.size(), 0u);
}

TEST(TurnQueueTest, WhatIsTakenOutOfTurnIsItsOwnersFirstAndCostsNoTurn) {
  TurnQueue<std::string> turns;
  for (const char* item : {"a1", "a2"}) turns.Push("a", item);
  for (const char* item : {"b1", "b2", "b3"}) turns.Push("b", item);
  std::string item;
  EXPECT_TRUE(turns.PopOf("b", &item));
  EXPECT_EQ(item, "b1");
  EXPECT_FALSE(turns.PopOf("c", &item));
  EXPECT_EQ(turns.size(), 4u);
  std::vector<std::string> order;
  while (!turns.empty()) order.push_back(turns.Pop());
  EXPECT_THAT(order, ElementsAre("a1", "b2", "a2", "b3"));
  turns.Push("a", "a3");
  EXPECT_TRUE(turns.PopOf("a", &item));
  EXPECT_THAT(turns.Owners(), ElementsAre()) << "it has nothing left";
}

TEST(TurnQueueTest, TheRestOfWhatWasFirstIsFirstAndWaitsForTheOthersTurn) {
  TurnQueue<std::string> turns;
  for (const char* item : {"a1", "a2"}) turns.Push("a", item);
  turns.Push("b", "b1");
  EXPECT_EQ(turns.Pop(), "a1");
  turns.PushFirst("a", "a1'");
  EXPECT_EQ(turns.Pop(), "b1");
  EXPECT_TRUE(turns.Has("a"));
  EXPECT_FALSE(turns.Has("b"));
  turns.PushFirst("b", "b1'");
  EXPECT_EQ(turns.size(), 3u);
  std::vector<std::string> order;
  while (!turns.empty()) order.push_back(turns.Pop());
  EXPECT_THAT(order, ElementsAre("a1'", "b1'", "a2"));
}

TEST(TurnQueueTest, WhatIsTakenIsKeptNoLonger) {
  TurnQueue<std::shared_ptr<int>> turns;
  turns.Push("a", std::make_shared<int>(1));
  turns.Push("a", nullptr);
  const std::weak_ptr<int> seen = turns.Pop();
  EXPECT_TRUE(seen.expired());
}

}  // namespace
}  // namespace chorus
