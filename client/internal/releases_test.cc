#include "client/internal/releases.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/variant.h"
#include "client/internal/log.h"
#include "client/internal/member.h"
#include "client/internal/refusals.h"
#include "client/internal/session_core.h"
#include "client/testing/null_link.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/transport/command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace internal {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAreArray;

constexpr int kMany = 64;  // names that are sent without waiting for company

// Has room for so many commands.
class SmallLink : public testing::NullLink {
 public:
  absl::Status Submit(const Command& command) override {
    if (room == 0) {
      ++refused;
      return MakeError(Reason::kTransportTimeout, "");
    }
    --room;
    commands.push_back(command.body);
    EXPECT_EQ(command.sequence.value(), ++last);
    return absl::OkStatus();
  }
  void UnmapStaging(ArenaId arena) override { unmapped.push_back(arena.value()); }

  template <typename Body>
  std::vector<Body> CommandsOf() const {
    std::vector<Body> bodies;
    for (const CommandBody& body : commands) {
      if (const Body* const one = absl::get_if<Body>(&body)) bodies.push_back(*one);
    }
    return bodies;
  }

  int room = 1 << 20;
  int refused = 0;
  int64_t last = 0;
  std::vector<CommandBody> commands;
  std::vector<int32_t> unmapped;
};

class ReleasesTest : public ::testing::Test {
 protected:
  ReleasesTest() {
    auto link = std::make_unique<SmallLink>();
    link_ = link.get();
    session_ = SessionCore::Make(std::move(link), absl::Seconds(10));
  }

  TensorDatas MakeTensors(int count) {
    TensorDatas tensors;
    SessionLock lock(session_.get());
    auto info = session_->interner().Type(TensorType(DType::kF32, {}));
    for (int i = 0; i < count; ++i) {
      const auto value = static_cast<float>(i);
      char bytes[sizeof(value)];
      std::memcpy(bytes, &value, sizeof(value));
      tensors.push_back(*session_->FromHost(info, 0, bytes, CallSite::Here()));
      EXPECT_TRUE(session_->Name(tensors.back().get()).ok());
    }
    return tensors;
  }
  void OpenAndCloseASection() { SessionLock lock(session_.get()); }
  size_t CountTensors() {
    SessionLock lock(session_.get());
    return session_->log().tensors().used();
  }
  std::vector<TensorId> Released() const {
    std::vector<TensorId> names;
    for (const Release& release : link_->CommandsOf<Release>()) {
      names.insert(names.end(), release.tensors.begin(), release.tensors.end());
    }
    return names;
  }
  std::shared_ptr<MemberCore> Join() {
    auto member = std::make_shared<MemberCore>(session_, "world");
    member->world = WorldId(3);
    member->rank = 0;
    member->size = 1;
    member->epoch = Epoch(1);
    SessionLock lock(session_.get());
    session_->members().Add(member);
    return member;
  }

  SmallLink* link_;  // the session's
  std::shared_ptr<SessionCore> session_;
};

TEST_F(ReleasesTest, NamesThatFindNoRoomAreReleasedLater) {
  TensorDatas tensors = MakeTensors(kMany);
  std::vector<TensorId> names;
  for (const TensorDataPtr& tensor : tensors) names.push_back(tensor->id);
  link_->room = 0;
  tensors.clear();
  EXPECT_THAT(Released(), IsEmpty());
  link_->room = 100;
  OpenAndCloseASection();
  EXPECT_THAT(Released(), UnorderedElementsAreArray(names));
  EXPECT_EQ(CountTensors(), 0u);
}

// A destructor that has waited for room in vain is enough.
TEST_F(ReleasesTest, NoDestructorWaitsWhereAnotherHas) {
  TensorDatas tensors = MakeTensors(2 * kMany);
  link_->room = 0;
  tensors.clear();
  EXPECT_EQ(link_->refused, 1);
  link_->room = 100;
  OpenAndCloseASection();
  EXPECT_EQ(CountTensors(), 0u);
}

TEST_F(ReleasesTest, WhatFindsNoRoomHalfWayIsSentOnce) {
  constexpr int kEntries = static_cast<int>(DropTape::kMaxEntries) + 1;
  for (const int room : {0, 1, 2, 3, 4, 5}) {
    TensorDatas tensors = MakeTensors(kMany);
    std::vector<TensorId> names;
    for (const TensorDataPtr& tensor : tensors) names.push_back(tensor->id);
    link_->commands.clear();
    link_->unmapped.clear();
    {
      SessionLock lock(session_.get());
      tensors.clear();
      for (int i = 0; i < kEntries; ++i) {
        DropTape::Entry entry;
        entry.key.at.call = i;
        session_->releases().Add(entry);
      }
      GraphId graph{7, 1};
      session_->releases().Add({graph}, /*of_calls=*/false);
      session_->releases().Add(ArenaId(5));
      link_->room = room;  // for two commands of entries, one of graphs, of names, and of arenas
    }
    // From 4 on its turn has come: without room for it the release is kept.
    EXPECT_THAT(link_->unmapped.size(), room >= 4 ? 1 : 0) << room;
    link_->room = 100;
    OpenAndCloseASection();
    EXPECT_THAT(Released(), UnorderedElementsAreArray(names)) << room;
    std::vector<int64_t> calls;
    for (const DropTape& drop : link_->CommandsOf<DropTape>()) {
      for (const DropTape::Entry& entry : drop.entries) calls.push_back(entry.key.at.call);
    }
    ASSERT_EQ(calls.size(), static_cast<size_t>(kEntries)) << room;
    for (int i = 0; i < kEntries; ++i) EXPECT_EQ(calls[static_cast<size_t>(i)], i) << room;
    std::vector<ArenaId> arenas;
    std::vector<GraphId> graphs;
    for (const Release& release : link_->CommandsOf<Release>()) {
      arenas.insert(arenas.end(), release.arenas.begin(), release.arenas.end());
      graphs.insert(graphs.end(), release.graphs.begin(), release.graphs.end());
    }
    EXPECT_THAT(arenas, ElementsAre(ArenaId(5))) << room;
    EXPECT_THAT(graphs, ElementsAre(GraphId{7, 1})) << room;
    EXPECT_THAT(link_->unmapped, ElementsAre(5)) << room;
    EXPECT_EQ(CountTensors(), 0u) << room;
    link_->room = 1 << 20;
  }
}

TEST_F(ReleasesTest, AnEpochIsEnteredWhenThereIsRoom) {
  const std::shared_ptr<MemberCore> member = Join();
  Error error(Reason::kPeerRefused, "");
  error.ended.push_back({WorldId(3), Epoch(2)});
  link_->room = 0;
  session_->OnError(ToStatus(error));
  EXPECT_EQ(member->epoch.load(), Epoch(2));
  link_->room = 100;
  MakeTensors(1);
  ASSERT_FALSE(link_->commands.empty());
  const EnterEpoch* const entered = absl::get_if<EnterEpoch>(&link_->commands.front());
  ASSERT_NE(entered, nullptr) << "ahead of what the rank sends then";
  EXPECT_EQ(entered->epoch, Epoch(2));
}

TEST_F(ReleasesTest, ARefusalIsSentWhenThereIsRoom) {
  const std::shared_ptr<MemberCore> member = Join();
  const absl::Status why = MakeError(Reason::kBadType, "it does not fit");
  link_->room = 0;
  const auto put_out_of_line = [&](Refusals* refusals) {
    session_->AssertLocked();
    PutOutOfLine(member.get(), why, refusals);
    return absl::OkStatus();
  };
  EXPECT_EQ(RefuseOn(session_.get(), why, put_out_of_line), why);
  link_->room = 100;
  OpenAndCloseASection();
  const std::vector<Refuse> sent = link_->CommandsOf<Refuse>();
  ASSERT_EQ(sent.size(), 1u);
  ASSERT_EQ(sent[0].members.size(), 1u);
  EXPECT_TRUE(sent[0].members[0].rest_of_step);
  EXPECT_EQ(sent[0].why.message, "it does not fit");
  MakeTensors(1);
  EXPECT_EQ(link_->CommandsOf<Refuse>().size(), 1u);
}

}  // namespace
}  // namespace internal
}  // namespace chorus
