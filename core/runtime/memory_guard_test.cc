#include "core/runtime/memory_guard.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/runtime/arena.h"
#include "core/runtime/budget.h"
#include "core/runtime/memory.h"
#include "core/runtime/memory_thread.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kMost = 300 * kMiB;
constexpr int64_t kStep = MemoryGuard::kBytesALook;

class MemoryGuardTest : public ::testing::Test {
 protected:
  // The cgroup has what was admitted.
  absl::Status Admit(int64_t bytes, int64_t untouched = 0) {
    absl::Status admitted = guard_.Admit(bytes, untouched, charged_);
    if (admitted.ok() && usage_.has_value()) *usage_ += bytes;
    if (admitted.ok() && fixed_.has_value()) *fixed_ += bytes;
    return admitted;
  }

  absl::optional<int64_t> usage_ = 0;
  absl::optional<int64_t> fixed_ = 0;
  int usage_looks_ = 0;
  int fixed_looks_ = 0;
  int64_t charged_ = 0;
  absl::Time now_ = absl::UnixEpoch();
  MemoryGuard guard_{kMost,
                     {[this] {
                        ++usage_looks_;
                        return usage_;
                      },
                      [this] {
                        ++fixed_looks_;
                        return fixed_;
                      }},
                     [this] { return now_; }};
};

TEST_F(MemoryGuardTest, AdmitsUpToWhatTheCgroupMayHave) {
  for (const int64_t bytes : {int64_t{1}, kStep - 1, kStep, kStep + 1, kMost / 2}) {
    SCOPED_TRACE(bytes);
    usage_ = fixed_ = kMost;
    EXPECT_FALSE(Admit(kStep + 1).ok()) << "what it had room for is forgotten";
    now_ += absl::Seconds(1);
    usage_ = fixed_ = kMost - bytes;
    EXPECT_TRUE(Admit(bytes).ok());
    EXPECT_EQ(ErrorOf(Admit(1)).reason, Reason::kOutOfMemory) << "there is no room for more";
    now_ += absl::Seconds(1);
    usage_ = fixed_ = kMost - bytes + 1;
    EXPECT_EQ(ErrorOf(Admit(bytes)).reason, Reason::kOutOfMemory);
  }
}

TEST_F(MemoryGuardTest, ARefusalSaysWhatTheCgroupHasAndWhatIsInNoAccount) {
  usage_ = 290 * kMiB;
  fixed_ = 280 * kMiB;
  charged_ = 70 * kMiB;
  const absl::Status refused = Admit(30 * kMiB);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(IsForNow(refused));
  const std::string text = ErrorOf(refused).message;
  EXPECT_THAT(text, HasSubstr(absl::StrCat(30 * kMiB, " bytes are needed")));
  EXPECT_THAT(text, HasSubstr(absl::StrCat("has ", 280 * kMiB, " of the ", kMost)));
  EXPECT_THAT(text, HasSubstr(absl::StrCat(210 * kMiB, " of them are in no account")));
}

TEST_F(MemoryGuardTest, WhatTheKernelTakesBackByItselfRefusesNothing) {
  usage_ = 10 * kMost;
  fixed_ = kMost - kStep;
  EXPECT_TRUE(Admit(kStep).ok());
  EXPECT_FALSE(Admit(1).ok());
}

TEST_F(MemoryGuardTest, ACgroupThatCannotTellRefusesNothing) {
  usage_ = absl::nullopt;
  EXPECT_TRUE(Admit(2 * kMost).ok());
  EXPECT_EQ(fixed_looks_, 0);
  usage_ = 2 * kMost;
  fixed_ = absl::nullopt;  // others have come into it
  EXPECT_TRUE(Admit(2 * kMost).ok());
  EXPECT_EQ(fixed_looks_, 1);
}

TEST_F(MemoryGuardTest, LooksOnceForSoManyBytes) {
  constexpr int64_t kArena = kStep / 8;
  for (int i = 0; i < 90; ++i) ASSERT_TRUE(Admit(kArena).ok());
  EXPECT_EQ(usage_looks_, 10) << "one arena, and eight after it";
  EXPECT_EQ(fixed_looks_, 0);
  // Near the bound no further than there is room.
  usage_ = fixed_ = kMost - 3 * kArena;
  int admitted = 0;
  while (Admit(kArena).ok()) ASSERT_LE(++admitted, 3);
  EXPECT_EQ(admitted, 3);
}

// Whoever is refused asks for less, and others ask as well.
TEST_F(MemoryGuardTest, ALookByWhichOneWasRefusedCountsForAWhile) {
  usage_ = fixed_ = kMost - kStep;
  EXPECT_FALSE(Admit(2 * kStep).ok());
  EXPECT_EQ(fixed_looks_, 1);
  {
    const WorkSlice slice;
    for (int i = 0; i < 1000; ++i) EXPECT_FALSE(Admit(kStep + 1).ok());
    EXPECT_EQ(SliceWork(), 0);
  }
  EXPECT_EQ(fixed_looks_, 1);
  EXPECT_TRUE(Admit(kStep).ok()) << "that fits";
  usage_ = fixed_ = 0;
  now_ += MemoryGuard::kRefusal - absl::Nanoseconds(1);
  EXPECT_FALSE(Admit(2 * kStep).ok());
  now_ += absl::Nanoseconds(1);
  EXPECT_TRUE(Admit(2 * kStep).ok());
}

TEST_F(MemoryGuardTest, WhatIsStillToBeTouchedCountsAndIsRefusedForNow) {
  usage_ = fixed_ = kMost - 3 * kStep;
  EXPECT_TRUE(guard_.Admit(kStep, 2 * kStep, charged_).ok());
  const absl::Status refused = Admit(kStep, 3 * kStep);
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kOutOfMemory);
  EXPECT_TRUE(IsForNow(refused)) << "it may be touched and counted";
  EXPECT_TRUE(IsForNow(Admit(kStep, 3 * kStep))) << "by the same look";
  EXPECT_TRUE(Admit(kStep, 2 * kStep).ok());
}

// --- With arenas ---------------------------------------------------------------------------------

class GuardedArenasTest : public MemoryGuardTest {
 protected:
  GuardedArenasTest() {
    node_->Reclaim(&thread_, [this](const Budget&) { return thread_.Settle(); });
    ArenaSetOptions options;
    options.helpers = helpers_;
    for (int i = 0; i < 2; ++i) sets_.push_back(ArenaSet::Create(tenants_[i], options));
  }
  ~GuardedArenasTest() override {
    sets_.clear();
    node_->Forget(&thread_);
  }

  const BudgetRef node_ = Budget::OfNode(kMost);
  const BudgetRef tenants_[2] = {Budget::Within(node_, "tenant a", node_->limits()),
                                 Budget::Within(node_, "tenant b", node_->limits())};
  MemoryThread thread_;
  const ArenaHelpers helpers_ = {&thread_, nullptr, &guard_};
  std::vector<ArenaSet::Ptr> sets_;
};

TEST_F(GuardedArenasTest, AnArenaIsRefusedAndThoseThatAreThereServe) {
  for (const auto& set : sets_) ASSERT_TRUE(set->Allocate(kMiB).ok());  // and given back
  thread_.Drain();
  const int64_t charged = node_->used();
  // Somebody has put as much where no account has it.
  usage_ = fixed_ = kMost;
  for (const int i : {0, 1}) {
    const absl::Status refused = sets_[i]->Allocate(20 * kMiB).status();
    EXPECT_EQ(ErrorOf(refused).reason, Reason::kOutOfMemory);
    EXPECT_FALSE(IsForNow(refused));
    EXPECT_EQ(ErrorOf(Arena::CreateStaging(tenants_[i], kStep + 1, helpers_).status()).reason,
              Reason::kOutOfMemory);
  }
  EXPECT_EQ(node_->used(), charged) << "what is refused is charged to nobody";
  const int looks = usage_looks_;
  for (const auto& set : sets_) {
    const auto again = set->Allocate(kMiB);
    ASSERT_TRUE(again.ok()) << again.status();
    (*again)->host()[kMiB - 1] = 7;
  }
  EXPECT_EQ(usage_looks_, looks) << "memory that is there is not looked at";
}

TEST_F(GuardedArenasTest, OneWhoseMemoryIsOnItsWayBackIsRefusedForNow) {
  ASSERT_TRUE(sets_[0]->Allocate(4 * kMiB).ok());
  ASSERT_EQ(sets_[0]->Trim(), 4 * kMiB);
  ASSERT_EQ(tenants_[0]->leaving(), 4 * kMiB) << "nobody has settled that";
  usage_ = fixed_ = kMost;
  thread_.Drain();
  EXPECT_TRUE(IsForNow(sets_[0]->Allocate(20 * kMiB).status()));
  EXPECT_FALSE(IsForNow(sets_[1]->Allocate(20 * kMiB).status())) << "it is another's";
  ASSERT_TRUE(thread_.Settle());
  const absl::Status refused = sets_[0]->Allocate(20 * kMiB).status();
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kOutOfMemory);
  EXPECT_FALSE(IsForNow(refused));
}

}  // namespace
}  // namespace chorus
