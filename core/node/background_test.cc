#include "core/node/background.h"

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

using ::testing::ElementsAre;

class BackgroundTest : public ::testing::Test {
 protected:
  BackgroundTest()
      : background_([this](std::function<void()> closure) { Post(std::move(closure)); }) {}

  void Post(std::function<void()> closure) {
    MutexLock lock(&mutex_);
    posted_.push_back(std::move(closure));
    changed_.Signal();
  }
  // What the node thread does: runs the next closure when it has come.
  void RunNext() {
    std::function<void()> next;
    {
      MutexLock lock(&mutex_);
      while (posted_.empty()) changed_.Wait(&mutex_);
      next = std::move(posted_.front());
      posted_.pop_front();
    }
    next();
  }
  // The thread waits in its first job until Open(), so that what else is asked for lines up.
  void Block() {
    background_.Do(
        "blocker",
        [this] {
          MutexLock lock(&mutex_);
          blocked_ = true;
          changed_.SignalAll();
          while (!open_) changed_.Wait(&mutex_);
        },
        [] {});
    MutexLock lock(&mutex_);
    while (!blocked_) changed_.Wait(&mutex_);
  }
  void Open() {
    MutexLock lock(&mutex_);
    open_ = true;
    changed_.SignalAll();
  }

  Mutex mutex_;
  CondVar changed_;
  bool blocked_ = false;
  bool open_ = false;
  std::deque<std::function<void()>> posted_;
  std::vector<std::string> done_;  // the background's until what follows is run
  Background background_;
};

TEST_F(BackgroundTest, WorkIsDoneElsewhereAndWhatFollowsHere) {
  std::thread::id worked;
  std::thread::id followed;
  background_.Do(
      "a", [&] { worked = std::this_thread::get_id(); },
      [&] { followed = std::this_thread::get_id(); });
  RunNext();
  EXPECT_NE(worked, std::thread::id());
  EXPECT_NE(worked, std::this_thread::get_id());
  EXPECT_EQ(followed, std::this_thread::get_id());
}

TEST_F(BackgroundTest, TenantsTakeTurns) {
  Block();
  const auto add = [this](const std::string& tenant, const std::string& name) {
    background_.Do(
        tenant, [this, name] { done_.push_back(name); }, [] {});
  };
  for (const char* name : {"a1", "a2", "a3", "a4"}) add("a", name);
  for (const char* name : {"b1", "b2"}) add("b", name);
  add("c", "c1");
  Open();
  for (int i = 0; i < 8; ++i) RunNext();
  EXPECT_THAT(done_, ElementsAre("a1", "b1", "c1", "a2", "b2", "a3", "a4"));
}

TEST_F(BackgroundTest, WhatTheWorkHoldsIsGoneBeforeWhatFollows) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> weak = held;
  bool was_expired = false;
  background_.Do(
      "a", [held = std::move(held)] {}, [&] { was_expired = weak.expired(); });
  RunNext();
  EXPECT_TRUE(was_expired);
}

TEST_F(BackgroundTest, WorkAsksTheNodeThreadAndWaits) {
  std::thread::id answered;
  std::thread::id known;
  bool was_answered = false;
  background_.Do(
      "a",
      [&] {
        was_answered = background_.Ask([&] { answered = std::this_thread::get_id(); });
        known = answered;
      },
      [] {});
  RunNext();
  RunNext();
  EXPECT_TRUE(was_answered);
  EXPECT_EQ(answered, std::this_thread::get_id());
  EXPECT_EQ(known, answered);
}

TEST_F(BackgroundTest, WorkHasTheNodesOwnDoneFirst) {
  Block();
  background_.Do(
      "a",
      [&] {
        EXPECT_TRUE(background_.DoOwn());
        EXPECT_FALSE(background_.DoOwn()) << "there is no more";
        EXPECT_TRUE(background_.Ask([&] { done_.push_back("answer"); }));
      },
      [&] { done_.push_back("after a"); });
  background_.Do(
      "b", [] {}, [&] { done_.push_back("after b"); });
  for (const char* name : {"1", "2"}) {
    background_.Do(
        "", [] {}, [this, name] { done_.push_back(name); });
  }
  Open();
  for (int i = 0; i < 6; ++i) RunNext();
  EXPECT_THAT(done_, ElementsAre("1", "2", "answer", "after a", "after b"));
}

TEST_F(BackgroundTest, StoppedItDoesNotAnswer) {
  bool was_asked = false;
  bool was_answered = true;
  background_.Do(
      "a", [&] { was_answered = background_.Ask([&] { was_asked = true; }); }, [] {});
  std::function<void()> question;
  {
    MutexLock lock(&mutex_);
    while (posted_.empty()) changed_.Wait(&mutex_);
    question = std::move(posted_.front());
  }
  background_.Stop();
  EXPECT_FALSE(was_answered);
  question();  // late
  EXPECT_FALSE(was_asked);
}

TEST_F(BackgroundTest, StoppedItDropsWhatHasNotBegunAndWhatComes) {
  Block();
  int begun = 0;
  auto value = std::make_shared<int>(1);
  const std::weak_ptr<int> weak = value;
  background_.Do(
      "a", [&begun] { ++begun; }, [value = std::move(value), &begun] { ++begun; });
  std::thread opener([this] { Open(); });
  background_.Stop();
  opener.join();
  // The first had begun, and may have been the only one; what follows is dropped with its hold.
  background_.Do(
      "a", [&begun] { begun += 100; }, [] {});
  EXPECT_TRUE(weak.expired());
  EXPECT_LE(begun, 1);
  EXPECT_LE(posted_.size(), 2u);
}

}  // namespace
}  // namespace chorus::node
