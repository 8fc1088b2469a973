#include "client/internal/staging.h"

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/internal/releases.h"
#include "client/testing/null_link.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "gtest/gtest.h"

namespace chorus {
namespace internal {
namespace {

// Whose commands are over when the test says so.
class TestLink : public testing::NullLink {
 public:
  absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence sequence) override {
    if (over.count(sequence.value()) > 0) return absl::optional<RunOutcome>(RunOutcome());
    return absl::optional<RunOutcome>();
  }
  absl::Status WaitCommand(Sequence sequence, absl::Duration) override {
    waits.push_back(sequence.value());
    if (over.count(sequence.value()) > 0) return absl::OkStatus();
    if (has_no_room) return MakeError(Reason::kQuota, "too many wait");
    if (!ends_when_waited_for) return MakeError(Reason::kTransportTimeout, "not over");
    over.insert(sequence.value());
    return absl::OkStatus();
  }
  absl::StatusOr<Staging> CreateStaging(int64_t bytes) override {
    memory.push_back(std::make_unique<std::vector<char>>(static_cast<size_t>(bytes)));
    Staging staging;
    staging.arena = ArenaId(static_cast<int32_t>(memory.size()) - 1);
    if (!by_calls) staging.data = memory.back()->data();
    return staging;
  }
  absl::Status WriteStaging(ArenaId arena, int64_t offset, absl::string_view bytes) override {
    const auto write = [this, arena, offset, text = std::string(bytes)] {
      std::memcpy(memory[arena.value()]->data() + offset, text.data(), text.size());
    };
    if (is_late) {
      late.push_back(write);
      return MakeError(Reason::kTransportTimeout, "not written in time");
    }
    write();
    return absl::OkStatus();
  }

  std::set<int64_t> over;
  bool ends_when_waited_for = false;
  bool has_no_room = false;  // for whoever waits
  std::vector<int64_t> waits;
  std::vector<std::unique_ptr<std::vector<char>>> memory;
  bool by_calls = false;  // staging is filled by WriteStaging
  bool is_late = false;   // such a call is given up before it is carried out
  std::vector<std::function<void()>> late;
};

class StagingTest : public ::testing::Test {
 protected:
  // Sends the next command, which reads so many bytes of `what`.
  absl::Status Send(size_t bytes, char what) {
    return pool_
        .Send(std::string(bytes, what),
              [&](const ExternalRange& range) -> absl::StatusOr<Sequence> {
                ranges_[++sent_] = {range, std::string(bytes, what)};
                return Sequence(sent_);
              })
        .status();
  }
  // What the commands that are not over would read is what was sent.
  void ExpectBytes() {
    for (const auto& entry : ranges_) {
      if (link_.over.count(entry.first) > 0) continue;
      const ExternalRange& range = entry.second.first;
      const std::string& bytes = entry.second.second;
      const char* const there = link_.memory[range.arena.value()]->data() + range.offset;
      EXPECT_TRUE(std::string(there, bytes.size()) == bytes) << "of command " << entry.first;
    }
  }

  TestLink link_;
  Releases releases_{[] {}};
  StagingPool pool_{&link_, absl::Seconds(1), &releases_};
  int64_t sent_ = 0;
  std::map<int64_t, std::pair<ExternalRange, std::string>> ranges_;
};

constexpr size_t kImages = 4000000;
constexpr size_t kLabels = 100000;

TEST_F(StagingTest, ABlockIsUsedAgainWhenAllItsReadersAreOver) {
  ASSERT_TRUE(Send(kImages, 'a').ok());
  ASSERT_TRUE(Send(kLabels, 'b').ok());
  ASSERT_EQ(link_.memory.size(), 1u) << "one block has both";
  link_.over = {2};  // the small one is copied at once, the large one later
  ASSERT_TRUE(Send(kImages, 'c').ok());
  ExpectBytes();
  EXPECT_EQ(link_.memory.size(), 2u);
  link_.over = {1, 2};
  ASSERT_TRUE(Send(kImages, 'd').ok());
  ExpectBytes();
  EXPECT_EQ(link_.memory.size(), 2u) << "the first block is free";
}

TEST_F(StagingTest, WhereAllIsFullItWaitsForAllReadersOfOneBlock) {
  while (link_.memory.size() < 16) {
    ASSERT_TRUE(Send(kImages / 2, 'a').ok());
    ASSERT_TRUE(Send(kImages / 2, 'b').ok());
  }
  ExpectBytes();
  const absl::Status full = Send(kImages, 'c');
  EXPECT_EQ(ErrorOf(full).reason, Reason::kTransportTimeout) << full;
  // That nobody may wait says nothing of the command.
  link_.has_no_room = true;
  EXPECT_EQ(ErrorOf(Send(kImages, 'c')).reason, Reason::kQuota);
  ExpectBytes();
  link_.has_no_room = false;
  link_.ends_when_waited_for = true;
  link_.waits.clear();
  ASSERT_TRUE(Send(kImages, 'd').ok());
  ExpectBytes();
  EXPECT_EQ(link_.waits, (std::vector<int64_t>{2, 1})) << "those of the oldest";
  EXPECT_EQ(link_.memory.size(), 16u);
}

// To find a name for one may send others.
TEST_F(StagingTest, WhatIsBeingSentStays) {
  ASSERT_TRUE(pool_
                  .Send(std::string(kImages, 'a'),
                        [&](const ExternalRange& range) -> absl::StatusOr<Sequence> {
                          EXPECT_TRUE(Send(kImages, 'b').ok());
                          const char* const there = link_.memory[0]->data() + range.offset;
                          EXPECT_EQ(std::string(there, 4), "aaaa");
                          return Sequence(++sent_);
                        })
                  .ok());
  ExpectBytes();
}

TEST_F(StagingTest, WhereAWriteHasFailedNothingIsPutThatItCouldSpoil) {
  link_.by_calls = true;
  ASSERT_TRUE(Send(kLabels, 'a').ok());
  link_.is_late = true;
  EXPECT_EQ(ErrorOf(Send(kLabels, 'b')).reason, Reason::kTransportTimeout);
  link_.is_late = false;
  ASSERT_TRUE(Send(kLabels, 'c').ok());
  ASSERT_EQ(link_.late.size(), 1u);
  link_.late.front()();
  ExpectBytes();
  EXPECT_EQ(releases_.Take(/*all=*/true).arenas, (std::vector<ArenaId>{ArenaId(0)}));
}

// Behind all commands that read there.
TEST_F(StagingTest, WhatIsBeingSentStaysWhereAWriteHasFailed) {
  link_.by_calls = true;
  ASSERT_TRUE(pool_
                  .Send(std::string(kLabels, 'a'),
                        [&](const ExternalRange&) -> absl::StatusOr<Sequence> {
                          link_.is_late = true;
                          EXPECT_FALSE(Send(kLabels, 'b').ok());
                          link_.is_late = false;
                          EXPECT_TRUE(Send(kLabels, 'c').ok());
                          EXPECT_TRUE(releases_.Take(/*all=*/true).arenas.empty());
                          return Sequence(++sent_);
                        })
                  .ok());
  EXPECT_EQ(releases_.Take(/*all=*/true).arenas, (std::vector<ArenaId>{ArenaId(0)}));
  EXPECT_EQ(link_.memory.size(), 2u);
}

// Its bytes are nobody's.
TEST_F(StagingTest, ACommandThatIsNotSentReadsNothing) {
  for (int i = 0; i < 3; ++i) {
    const absl::Status failed =
        pool_
            .Send(std::string(kImages, 'a'),
                  [](const ExternalRange&) -> absl::StatusOr<Sequence> { return BadType("no"); })
            .status();
    EXPECT_EQ(ErrorOf(failed).reason, Reason::kBadType);
  }
  EXPECT_EQ(link_.memory.size(), 1u);
}

}  // namespace
}  // namespace internal
}  // namespace chorus
