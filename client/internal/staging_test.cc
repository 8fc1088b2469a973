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

#include "absl/strings/string_view.h"
#include "client/internal/log.h"
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
using ::testing::UnorderedElementsAre;

// Whose commands are over when the test says so.
class TestLink : public testing::NullLink {
 public:
  absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence sequence) override {
    if (over.count(sequence.value()) > 0) return absl::optional<RunOutcome>(RunOutcome());
    return absl::optional<RunOutcome>();
  }
  absl::Status WaitCommand(Sequence sequence, absl::Duration) override {
    const auto release = untaken.find(sequence.value());
    if (release != untaken.end()) {
      for (const ArenaId arena : release->second) {
        staged_bytes -= static_cast<int64_t>(memory[arena.value()]->size());
      }
      untaken.erase(release);
      return absl::OkStatus();
    }
    waits.push_back(sequence.value());
    if (over.count(sequence.value()) > 0) return absl::OkStatus();
    if (has_no_room) return MakeError(Reason::kQuota, "too many wait");
    if (!ends_when_waited_for) return MakeError(Reason::kTransportTimeout, "not over");
    over.insert(sequence.value());
    return absl::OkStatus();
  }
  absl::Status Submit(const Command& command) override {
    if (const auto* const release = absl::get_if<Release>(&command.body)) {
      released.insert(released.end(), release->arenas.begin(), release->arenas.end());
      untaken[command.sequence.value()] = release->arenas;
    }
    return absl::OkStatus();
  }
  absl::StatusOr<Staging> CreateStaging(int64_t bytes) override {
    if (bytes > most_bytes - staged_bytes) return MakeError(Reason::kQuota, "no more of it");
    staged_bytes += bytes;
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
  int64_t most_bytes = int64_t{1} << 40;
  int64_t staged_bytes = 0;  // that the daemon has not taken back
  std::vector<ArenaId> released;
  std::map<int64_t, std::vector<ArenaId>> untaken;  // releases that nobody has waited for
  std::vector<std::unique_ptr<std::vector<char>>> memory;
  bool by_calls = false;  // staging is filled by WriteStaging
  bool is_late = false;   // such a call is given up before it is carried out
  std::vector<std::function<void()>> late;
};

class StagingTest : public ::testing::Test {
 protected:
  // Adds a command to the log.
  absl::StatusOr<Sequence> AddToLog() {
    const absl::StatusOr<Sequence> command = log_.Submit(MakeReadable());
    if (command.ok()) sent_ = command->value();
    return command;
  }
  // Sends the next command, which reads so many bytes of `what`.
  absl::Status Send(size_t bytes, char what) {
    return pool_
        .Send(std::string(bytes, what),
              [&](const ExternalRange& range) -> absl::StatusOr<Sequence> {
                const absl::StatusOr<Sequence> command = AddToLog();
                ranges_[sent_] = {range, std::string(bytes, what)};
                return command;
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
  Log log_{&link_};
  StagingPool pool_{&link_, absl::Seconds(1), &log_};
  int64_t sent_ = 0;  // the last command's sequence
  std::map<int64_t, std::pair<ExternalRange, std::string>> ranges_;
};

constexpr size_t kBlockBytes = 4 << 20;
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
                          return AddToLog();
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
  EXPECT_THAT(link_.released, ElementsAre(ArenaId(0)));
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
                          EXPECT_TRUE(link_.released.empty());
                          return AddToLog();
                        })
                  .ok());
  EXPECT_THAT(link_.released, ElementsAre(ArenaId(0)));
  EXPECT_EQ(link_.memory.size(), 2u);
}

TEST_F(StagingTest, WhatIsIdleDoesNotStandInTheWayOfMore) {
  link_.most_bytes = 230 << 20;
  ASSERT_TRUE(Send(70 << 20, 'a').ok());
  link_.over = {1};
  const absl::Status more = Send(140 << 20, 'b');
  ASSERT_TRUE(more.ok()) << more;
  ExpectBytes();
  EXPECT_THAT(link_.released, ElementsAre(ArenaId(0)));
}

TEST_F(StagingTest, ABlockIsNoLargerThanItsBytes) {
  for (const size_t over : {0u, 1u, 4095u, 4096u, 4097u}) {
    ASSERT_TRUE(Send(kBlockBytes + over, 'a').ok());
    EXPECT_EQ(link_.memory.back()->size(), kBlockBytes + (over + 4095) / 4096 * 4096);
  }
}

TEST_F(StagingTest, WhereNoMoreIsToBeHadItWaitsForItsOwn) {
  link_.most_bytes = kBlockBytes;
  link_.ends_when_waited_for = true;
  ASSERT_TRUE(Send(3 << 20, 'a').ok());
  const absl::Status second = Send(3 << 20, 'b');
  ASSERT_TRUE(second.ok()) << second;
  ExpectBytes();
  EXPECT_EQ(link_.memory.size(), 1u);
}

// Where none of what it has is large enough.
TEST_F(StagingTest, WhereNoMoreIsToBeHadItGivesBackItsOwn) {
  link_.most_bytes = 3 * kBlockBytes;
  link_.ends_when_waited_for = true;
  for (const char what : {'a', 'b', 'c'}) ASSERT_TRUE(Send(3 << 20, what).ok());
  link_.over = {2};
  const absl::Status large = Send(3 * kBlockBytes, 'd');
  ASSERT_TRUE(large.ok()) << large;
  ExpectBytes();
  EXPECT_THAT(link_.released, UnorderedElementsAre(ArenaId(0), ArenaId(1), ArenaId(2)));
  const absl::Status larger = Send(3 * kBlockBytes + 1, 'e');
  EXPECT_EQ(ErrorOf(larger).reason, Reason::kQuota) << larger;
}

// What is being sent cannot be given back.
TEST_F(StagingTest, WhereNoMoreIsToBeHadWhatIsBeingSentStays) {
  link_.most_bytes = 2 * kBlockBytes;
  ASSERT_TRUE(pool_
                  .Send(std::string(kImages, 'a'),
                        [&](const ExternalRange& range) -> absl::StatusOr<Sequence> {
                          EXPECT_EQ(ErrorOf(Send(2 * kBlockBytes, 'b')).reason, Reason::kQuota);
                          EXPECT_TRUE(Send(kImages, 'c').ok());
                          const char* const there = link_.memory[0]->data() + range.offset;
                          EXPECT_EQ(std::string(there, 4), "aaaa");
                          return AddToLog();
                        })
                  .ok());
  EXPECT_TRUE(link_.released.empty());
}

TEST_F(StagingTest, ALargeBlockIsKeptAsLongAsItIsUsed) {
  const std::string images(70 << 20, 'a');
  for (int step = 0; step < 100; ++step) {
    for (const size_t bytes : {size_t{70} << 20, kLabels}) {
      ASSERT_TRUE(pool_
                      .Send(absl::string_view(images).substr(0, bytes),
                            [&](const ExternalRange&) { return AddToLog(); })
                      .ok());
    }
    link_.over.insert(sent_ - 1);
    link_.over.insert(sent_);
  }
  EXPECT_EQ(link_.memory.size(), 2u);
  EXPECT_TRUE(link_.released.empty());
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(Send(kLabels, 'b').ok());
    link_.over.insert(sent_);
  }
  EXPECT_EQ(link_.memory.size(), 2u) << "there is a small one";
  EXPECT_THAT(link_.released, ElementsAre(ArenaId(0)));
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
