#include "client/internal/refusals.h"

#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/transport/command.h"
#include "gtest/gtest.h"

namespace chorus {
namespace internal {
namespace {

// With calls of as many pairs.
RefusedMember Member(int rank, int calls_of_pairs, int gradients) {
  RefusedMember member;
  member.rank = Rank(rank);
  member.step = 7;
  for (int i = 0; i < calls_of_pairs; ++i) {
    RefusedCalls calls;
    calls.source = GroupRank(0);
    calls.destination = GroupRank(1);
    calls.tag = i;
    calls.next = 1;
    member.calls.push_back(calls);
  }
  for (int i = 0; i < gradients; ++i) {
    InstanceKey key;
    key.at.call = i;
    member.gradients.push_back(key.Gradient({7, 0}));
  }
  return member;
}

TEST(RefusalsTest, AreCutIntoWhatAFrameMayHave) {
  constexpr int kMost = static_cast<int>(Refuse::kMaxCalls);
  Refuse refuse;
  refuse.world = WorldId(3);
  refuse.epoch = Epoch(5);
  refuse.why = Error(Reason::kMismatch, "it does not fit");
  refuse.members.push_back(Member(2, kMost - 1, /*gradients=*/kMost + 1));
  refuse.members.back().drops_tapes = true;
  refuse.members.push_back(Member(4, 3, /*gradients=*/0));
  refuse.members.back().rest_of_step = true;
  const Refuse whole = refuse;

  Refuse together = whole;
  for (RefusedMember& member : together.members) {
    member.calls.clear();
    member.gradients.clear();
  }
  const std::vector<Refuse> frames = InFrames(std::move(refuse));
  EXPECT_EQ(frames.size(), 3u);
  for (const Refuse& frame : frames) {
    ByteWriter bytes;
    EncodeFrame({Sequence(1), frame}, &bytes);
    const absl::StatusOr<Command> decoded = DecodeFrame(bytes.bytes());
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(frame.world, whole.world);
    EXPECT_EQ(frame.epoch, whole.epoch);
    EXPECT_EQ(frame.why.message, whole.why.message);
    for (const RefusedMember& part : frame.members) {
      RefusedMember& member = together.members[part.rank == whole.members[0].rank ? 0 : 1];
      EXPECT_EQ(part.rank, member.rank);
      EXPECT_EQ(part.step, member.step);
      member.calls.insert(member.calls.end(), part.calls.begin(), part.calls.end());
      member.gradients.insert(member.gradients.end(), part.gradients.begin(), part.gradients.end());
      // Said with the last of its calls.
      const RefusedMember& of = whole.members[part.rank == whole.members[0].rank ? 0 : 1];
      const bool is_last =
          member.calls.size() == of.calls.size() && member.gradients.size() == of.gradients.size();
      EXPECT_EQ(part.drops_tapes, is_last && of.drops_tapes);
      EXPECT_EQ(part.rest_of_step, is_last && of.rest_of_step);
    }
  }
  ByteWriter expected;
  EncodeFrame({Sequence(1), whole}, &expected);
  ByteWriter actual;
  EncodeFrame({Sequence(1), together}, &actual);
  EXPECT_EQ(actual.bytes(), expected.bytes()) << "all of it, in its order";
}

TEST(RefusalsTest, MembersAreSoMany) {
  Refuse refuse;
  refuse.members.resize(Refuse::kMaxMembers + 1);
  const std::vector<Refuse> frames = InFrames(std::move(refuse));
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_EQ(frames[0].members.size(), Refuse::kMaxMembers);
  EXPECT_EQ(frames[1].members.size(), 1u);
}

}  // namespace
}  // namespace internal
}  // namespace chorus
