#include "core/node/worlds.h"

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/backend/backend_options.h"
#include "core/backend/host/host_backend.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/base/thread_pool.h"
#include "core/base/work.h"
#include "core/node/info.h"
#include "core/node/node.h"
#include "core/node/requests.h"
#include "core/ops/host_kernels.h"
#include "core/runtime/devices.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

class WorldsTest : public ::testing::Test {
 protected:
  // A session for each of so many devices.
  void Start(int devices) {
    HostBackendOptions host;
    host.devices = devices;
    host.pool = &pool_;
    host.make_kernel = MakeHostKernel;
    backend_ = CreateHostBackend(host);
    node_ = std::make_unique<LocalNode>(NodeOptions(), DevicesOf(backend_.get()), [] {});
    for (int device = 0; device < devices; ++device) {
      OpenSessionRequest open;
      open.tenant = "uid:0";
      open.devices = {DeviceIndex(device)};
      sessions_.push_back(node_->OpenSession(open, now_)->id);
    }
  }
  static JoinRequest RequestOf(int rank, int size) {
    JoinRequest request;
    request.name = "job";
    request.size = size;
    request.rank = Rank(rank);
    return request;
  }
  // One world, whose ranks are the first so many sessions.
  WorldId JoinAll(int size) {
    WorldId world;
    for (int rank = 0; rank < size; ++rank) {
      node_->JoinWorld(session(rank), RequestOf(rank, size), now_,
                       [&](const absl::StatusOr<WorldInfo>& info) {
                         ASSERT_TRUE(info.ok()) << info.status();
                         world = info->id;
                       });
    }
    return world;
  }
  void Poll(absl::Time now) {
    while (node_->Poll(now)) {
    }
  }
  SessionId session(int rank) const { return sessions_[static_cast<size_t>(rank)]; }

  const absl::Time now_ = absl::Now();
  ThreadPool pool_{1};
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<LocalNode> node_;
  std::vector<SessionId> sessions_;
};

// Each member is told of all, in the slice of the last that comes: what the largest world there can
// be has of that is counted, and no more than a slice.
TEST_F(WorldsTest, ALargeWorldIsFormedAndReformedInASlice) {
  Start(kMaxDevices);
  int told = 0;
  WorldId world;
  const auto expect_all_are_told = [&](const std::function<void(int rank)>& ask) {
    told = 0;
    for (int rank = 0; rank < kMaxDevices; ++rank) {
      EXPECT_EQ(told, 0);
      const WorkSlice slice;
      ask(rank);
      if (rank + 1 < kMaxDevices) continue;
      EXPECT_GE(SliceWork(), kMaxDevices * kMaxDevices);
      EXPECT_LE(SliceWork(), kMaxSliceWork);
    }
    EXPECT_EQ(told, kMaxDevices);
  };
  expect_all_are_told([&](int rank) {
    const JoinRequest join = RequestOf(rank, kMaxDevices);
    node_->JoinWorld(session(rank), join, now_, [&](const absl::StatusOr<WorldInfo>& info) {
      ASSERT_TRUE(info.ok()) << info.status();
      world = info->id;
      told += info->members.size() == kMaxDevices ? 1 : 0;
    });
  });
  expect_all_are_told([&](int rank) {
    ReformWorldRequest reform;
    reform.world = world;
    reform.rank = Rank(rank);
    node_->ReformWorld(session(rank), reform, now_,
                       [&](const absl::StatusOr<ReformResult>& result) {
                         ASSERT_TRUE(result.ok()) << result.status();
                         told += result->survivors.size() == kMaxDevices ? 1 : 0;
                       });
  });
}

// A call that is cancelled leaves nothing: it can be made again, and the others wait for it.
TEST_F(WorldsTest, WhoDoesNotWaitForAWorldAnyMoreHasNotAsked) {
  Start(2);
  WorldId world;
  int told = 0;
  const auto join = [&](int rank, const std::shared_ptr<int>& call, const WaitRef& wait) {
    const JoinRequest request = RequestOf(rank, 2);
    const auto joined = [&world, &told, call](const absl::StatusOr<WorldInfo>& info) {
      ASSERT_TRUE(info.ok()) << info.status();
      world = info->id;
      told += *call;
    };
    node_->JoinWorld(session(rank), request, now_, joined, wait);
  };
  const auto reform = [&](int rank, const std::shared_ptr<int>& call, const WaitRef& wait) {
    ReformWorldRequest request;
    request.world = world;
    request.rank = Rank(rank);
    const auto reformed = [&told, call](const absl::StatusOr<ReformResult>& result) {
      ASSERT_TRUE(result.ok()) << result.status();
      told += *call;
    };
    node_->ReformWorld(session(rank), request, now_, reformed, wait);
  };
  const auto ask_for_both = [&](const auto& ask) {
    told = 0;
    auto call = std::make_shared<int>(1);
    const std::weak_ptr<int> left = call;
    auto wait = std::make_shared<Wait>();
    ask(0, std::exchange(call, nullptr), wait);
    EXPECT_FALSE(left.expired());
    node_->Withdraw(wait, now_);
    EXPECT_TRUE(left.expired());
    node_->Withdraw(wait, now_);
    const auto other_wait = std::make_shared<Wait>();
    ask(1, std::make_shared<int>(10), other_wait);
    EXPECT_EQ(told, 0);
    const auto third_wait = std::make_shared<Wait>();
    ask(0, std::make_shared<int>(100), third_wait);
    EXPECT_EQ(told, 110);
    for (const WaitRef& over : {wait, other_wait, third_wait}) node_->Withdraw(over, now_);
  };
  ask_for_both(join);
  ask_for_both(reform);
}

// How calls of ranks that wait for each other end, with the time that each is given.
class WaitingTest : public WorldsTest {
 protected:
  using Ask = std::function<void(int rank, absl::Duration timeout, const WaitRef& wait)>;
  // A world of four that has not been joined.
  Ask Join() {
    Start(4);
    return [this](int rank, absl::Duration timeout, const WaitRef& wait) {
      JoinRequest request = RequestOf(rank, 4);
      request.join_timeout = timeout;
      node_->JoinWorld(session(rank), request, now_, Note<WorldInfo>(rank), wait);
    };
  }
  // One that is complete.
  Ask Reform() {
    Start(4);
    const WorldId world = JoinAll(4);
    return [this, world](int rank, absl::Duration timeout, const WaitRef& wait) {
      ReformWorldRequest request;
      request.world = world;
      request.rank = Rank(rank);
      request.timeout = timeout;
      node_->ReformWorld(session(rank), request, now_, Note<ReformResult>(rank), wait);
    };
  }
  template <typename Result>
  std::function<void(absl::StatusOr<Result>)> Note(int rank) {
    return [this, rank](const absl::StatusOr<Result>& result) {
      told_.emplace_back(rank, ErrorOf(result.status()));
    };
  }
  // Where it is over for one it is for all, so that none that gives up is missing for the others.
  void TheFirstWhoseTimeIsOverEndsIt(const Ask& ask, Reason reason) {
    ask(0, absl::Seconds(9), nullptr);
    ask(1, absl::Seconds(4), nullptr);
    const auto withdrawn = std::make_shared<Wait>();
    ask(2, absl::Seconds(1), withdrawn);
    node_->Withdraw(withdrawn, now_);
    Poll(now_ + absl::Seconds(4) - absl::Milliseconds(1));
    EXPECT_TRUE(told_.empty()) << "of who has given up the deadline counts no more";
    Poll(now_ + absl::Seconds(4));
    ASSERT_EQ(told_.size(), 2u);
    for (const int rank : {0, 1}) {
      EXPECT_EQ(told_[static_cast<size_t>(rank)].first, rank);
      const Error& error = told_[static_cast<size_t>(rank)].second;
      EXPECT_EQ(error.reason, reason);
      EXPECT_EQ(error.culprit.rank, 2) << error.message;
    }
    Poll(now_ + absl::Seconds(9));
    EXPECT_EQ(told_.size(), 2u) << "once each";
  }
  // A client sees the end of its call before the daemon does, and asks again.
  void AskingAgainEndsTheCallBefore(const Ask& ask) {
    const auto before = std::make_shared<Wait>();
    ask(0, absl::Seconds(1), before);
    ask(0, absl::Seconds(9), nullptr);
    ASSERT_EQ(told_.size(), 1u);
    EXPECT_EQ(told_[0].second.reason, Reason::kCancelled);
    node_->Withdraw(before, now_);
    Poll(now_ + absl::Seconds(1));
    for (const int rank : {1, 2, 3}) ask(rank, absl::Seconds(9), nullptr);
    ASSERT_EQ(told_.size(), 5u);
    for (size_t i = 1; i < told_.size(); ++i) {
      EXPECT_EQ(told_[i].second.code, absl::StatusCode::kOk) << told_[i].second.message;
    }
  }

  std::vector<std::pair<int, Error>> told_;  // each with its rank
};

TEST_F(WaitingTest, TheFirstWhoseTimeIsOverEndsAJoin) {
  TheFirstWhoseTimeIsOverEndsIt(Join(), Reason::kJoinTimeout);
}
TEST_F(WaitingTest, TheFirstWhoseTimeIsOverEndsAReform) {
  TheFirstWhoseTimeIsOverEndsIt(Reform(), Reason::kAgreeTimeout);
}
TEST_F(WaitingTest, JoiningAgainEndsTheCallBefore) { AskingAgainEndsTheCallBefore(Join()); }
TEST_F(WaitingTest, ReformingAgainEndsTheCallBefore) { AskingAgainEndsTheCallBefore(Reform()); }

// Of an earlier one, whose ranks are gone, nothing is left that would end it.
TEST_F(WorldsTest, AReformHasItsWholeTime) {
  Start(3);
  const WorldId world = JoinAll(3);
  absl::Status told[3];
  const auto reform = [&](int rank, absl::Time now) {
    ReformWorldRequest request;
    request.world = world;
    request.rank = Rank(rank);
    request.timeout = absl::Seconds(4);
    node_->ReformWorld(session(rank), request, now,
                       [&told, rank](const absl::StatusOr<ReformResult>& result) {
                         told[rank] = result.status();
                       });
  };
  reform(0, now_);
  const absl::Time later = now_ + absl::Seconds(3);
  ASSERT_TRUE(node_->CloseSession(session(0), later).ok());
  EXPECT_FALSE(told[0].ok());
  reform(1, later);
  Poll(now_ + absl::Seconds(4));
  Poll(later + absl::Seconds(4) - absl::Milliseconds(1));
  EXPECT_TRUE(told[1].ok()) << told[1];
  Poll(later + absl::Seconds(4));
  EXPECT_EQ(ErrorOf(told[1]).reason, Reason::kAgreeTimeout) << told[1];
}

}  // namespace
}  // namespace chorus::node
