// Faults, injected into a real daemon and real trainer processes.
//
// Each test starts chorusd on a socket of its own, a world of three trainers that it leads by the
// hand (trainer.cc), and one bystander: two more ranks that all_reduce all the time in another
// world of the same daemon, and must notice nothing. It injects a fault, reads what each survivor
// is told, and lets the world go on. At the end of every test the daemon lives, nothing is left of
// its sessions, and its memory is back.
//
// Seeds choose victims, moments and sizes. --seeds=N (or CHORUS_FAULT_SEEDS) runs so many of them
// per fault, from --first_seed=S (1) on; each is printed.
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "core/base/error.h"
#include "core/base/failpoint.h"
#include "gtest/gtest.h"
#include "tests/fault/processes.h"

namespace chorus {
namespace fault {
namespace {

uint64_t seed_count = 2;
uint64_t first_seed = 1;

constexpr int kRanks = 3;
// How late a rank may be in the worlds of those tests that are about late ranks. Long enough for a
// loaded machine not to make another one late.
constexpr int kAgreeMilliseconds = 3000;
// More steps than any test lets happen.
constexpr int kForever = 100000000;

class FaultTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (HasFatalFailure() || IsSkipped()) return;
    if (daemon_ == nullptr) return;
    for (const auto& trainer : ranks_) {
      if (trainer == nullptr) continue;
      const Reply reply = trainer->Ask("close");
      EXPECT_TRUE(reply.ok) << reply;
    }
    if (bystander_ != nullptr) {
      const Reply reply = bystander_->Ask("pair-stop");
      EXPECT_TRUE(reply.ok) << reply;
      EXPECT_GT(reply.number("done"), 0);
    }
    EXPECT_TRUE(daemon_->Lives());
    ExpectNothingLeft();
  }

  // --- Who takes part ---

  void StartDaemon(const std::vector<std::string>& flags = {}, const std::string& failpoint = "") {
    Daemon::Options options;
    options.socket = scratch_.path() + "/chorusd";
    options.log = scratch_.path() + "/chorusd.log";
    options.flags = {"--host_devices=8"};
    options.flags.insert(options.flags.end(), flags.begin(), flags.end());
    options.failpoint = failpoint;
    daemon_.reset();
    absl::StatusOr<std::unique_ptr<Daemon>> daemon = Daemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status() << "\n" << bench::FileText(options.log);
    daemon_ = *std::move(daemon);
    const auto stats = daemon_->Stats();
    ASSERT_TRUE(stats.ok()) << stats.status();
    memory_before_ = stats->memory_used_bytes();
  }

  void StartBystander() {
    StartTrainer(&bystander_);
    ASSERT_TRUE(bystander_->Ask(absl::StrCat("pair ", daemon_->address(), " bystander")).ok);
    ExpectBystanderGoesOn();
  }
  void ExpectBystanderGoesOn() {
    const Reply reply = bystander_->Ask("pair-steps 3");
    EXPECT_TRUE(reply.ok) << reply;
  }

  void StartTrainer(std::unique_ptr<Trainer>* trainer) {
    absl::StatusOr<std::unique_ptr<Trainer>> started =
        Trainer::Start(scratch_.path() + "/trainers.log");
    ASSERT_TRUE(started.ok()) << started.status();
    *trainer = *std::move(started);
  }

  // A new world of `size` ranks, each a trainer of `ranks_`; those that were killed are replaced.
  void StartWorld(int size = kRanks, int agree_milliseconds = 0) {
    ranks_.resize(static_cast<size_t>(size));
    for (auto& trainer : ranks_) {
      if (trainer == nullptr) StartTrainer(&trainer);
      ASSERT_NE(trainer, nullptr);
    }
    ExpectAllOk(absl::StrCat("open ", daemon_->address()));
    const std::string name = absl::StrCat("world", ++worlds_);
    for (int r = 0; r < size; ++r) {
      rank(r).Send(absl::StrCat("join ", name, " ", r, " ", size, " ", agree_milliseconds));
    }
    for (const Reply& reply : Receive()) ASSERT_TRUE(reply.ok) << reply;
    first_step_ = 0;
  }
  void EndWorld() { ExpectAllOk("close"); }

  Trainer& rank(int r) { return *ranks_[static_cast<size_t>(r)]; }

  // --- What they do ---

  // To every rank that lives.
  void Send(const std::string& command) {
    for (const auto& trainer : ranks_) {
      if (trainer != nullptr) trainer->Send(command);
    }
  }
  // From every rank that lives, by rank.
  std::vector<Reply> Receive() {
    std::vector<Reply> replies;
    for (const auto& trainer : ranks_) {
      if (trainer != nullptr) replies.push_back(trainer->Receive());
    }
    return replies;
  }
  void ExpectAllOk(const std::string& command) {
    Send(command);
    for (const Reply& reply : Receive()) EXPECT_TRUE(reply.ok) << command << ": " << reply;
  }
  std::string StepsCommand(int64_t count, int64_t elements, int64_t say = -1) {
    first_step_ += 1000;  // never numbers that were used before
    return absl::StrCat("steps ", count, " ", elements, " ", first_step_, " ", say);
  }
  // Collectives work, on all ranks, in one epoch.
  void ExpectWorldGoesOn() {
    const std::string command = StepsCommand(5, 33);
    Send(command);
    int64_t epoch = -1;
    for (const Reply& reply : Receive()) {
      EXPECT_TRUE(reply.ok) << reply;
      if (epoch < 0) epoch = reply.number("epoch");
      EXPECT_EQ(reply.number("epoch"), epoch) << reply;
    }
  }

  // --- What they are told ---

  static void ExpectError(const Reply& reply, absl::StatusCode code, Reason reason,
                          int culprit = -1, pid_t pid = -1) {
    EXPECT_FALSE(reply.ok) << reply;
    EXPECT_EQ(reply.word("code"), absl::StatusCodeToString(code)) << reply;
    EXPECT_EQ(reply.word("reason"), std::string(ReasonName(reason))) << reply;
    EXPECT_EQ(reply.number("rank"), culprit) << reply;
    EXPECT_EQ(reply.number("pid"), pid) << reply;
  }
  static void ExpectDaemonLost(const Reply& reply) {
    ExpectError(reply, absl::StatusCode::kUnavailable, Reason::kDaemonLost);
  }

  // A rank's process has ended: the survivors are told, shrink, and go on.
  void ExpectDeathIsTold(int victim, pid_t pid, const std::vector<Reply>& replies) {
    for (const Reply& reply : replies) {
      ExpectError(reply, absl::StatusCode::kAborted, Reason::kPeerDied, victim, pid);
    }
    Send("reform");
    int64_t next = 0;
    for (const Reply& reply : Receive()) {
      EXPECT_TRUE(reply.ok) << reply;
      EXPECT_EQ(reply.number("size"), kRanks - 1) << reply;
      EXPECT_EQ(reply.number("rank"), next++) << reply;
      EXPECT_EQ(reply.number("survivors"), kRanks - 1) << reply;
    }
    ExpectWorldGoesOn();
  }

  void Kill(int victim) {
    rank(victim).Signal(SIGKILL);
    ExpectKilled(victim);
  }
  void ExpectKilled(int victim) {
    const absl::StatusOr<int> end = rank(victim).WaitForEnd();
    ASSERT_TRUE(end.ok()) << end.status();
    EXPECT_EQ(*end, 128 + SIGKILL);
    ranks_[static_cast<size_t>(victim)].reset();
  }

  // Nobody empties rank `r`'s ring, which takes 256 KiB: fewer than 10,000 commands.
  void StopDaemonAndFlood(int r, int count) {
    // Of one tensor first: the memory that they go through is there then.
    const Reply first = rank(r).Ask("flood 1");
    ASSERT_TRUE(first.ok) << first;
    daemon_->Stop();
    rank(r).Send(absl::StrCat("flood ", count));
  }

  // Waits until the daemon lists an instance of the world of now that waits for exactly `missing`.
  void WaitUntilPendingFor(std::vector<int> missing) {
    const std::string world = absl::StrCat("world", worlds_);
    const absl::Status status = AskUntil([&]() -> absl::StatusOr<bool> {
      CHORUS_ASSIGN_OR_RETURN(const v1::ListPendingResponse pending, daemon_->Pending());
      for (const auto& entry : pending.pending()) {
        std::vector<int> ranks(entry.missing_ranks().begin(), entry.missing_ranks().end());
        std::sort(ranks.begin(), ranks.end());
        if (entry.world_name() == world && ranks == missing) return true;
      }
      return false;
    });
    EXPECT_TRUE(status.ok()) << status;
  }

  // All that sessions had is released: known to the daemon a moment after they have ended.
  void ExpectNothingLeft() {
    int sessions = -1;
    int64_t memory = -1;
    const absl::Status status = AskUntil([&]() -> absl::StatusOr<bool> {
      CHORUS_ASSIGN_OR_RETURN(const v1::ListSessionsResponse list, daemon_->Sessions());
      CHORUS_ASSIGN_OR_RETURN(const v1::GetStatsResponse stats, daemon_->Stats());
      sessions = list.sessions_size();
      memory = stats.memory_used_bytes();
      return sessions == 0 && memory == memory_before_;
    });
    EXPECT_TRUE(status.ok()) << status << ": " << sessions << " sessions are left, " << memory
                             << " bytes are used, " << memory_before_ << " were at the start";
  }

  // --- Seeds ---

  // Runs `body` for each seed.
  template <typename Body>
  void ForEachSeed(const Body& body) {
    for (uint64_t seed = first_seed; seed < first_seed + seed_count; ++seed) {
      std::cout << "seed " << seed << std::endl;
      SCOPED_TRACE(absl::StrCat("--first_seed=", seed));
      random_.seed(seed);
      body();
      if (HasFailure()) return;  // what follows would only fail after it
    }
  }
  int Below(int bound) { return static_cast<int>(random_() % static_cast<uint64_t>(bound)); }
  // Inline in a command; in staging; as one chunk and as several.
  int64_t Elements() {
    static constexpr int64_t kElements[] = {1, 16, 17, 1000, 100003};
    return kElements[Below(5)];
  }

  const bench::ScratchDirectory scratch_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<Trainer> bystander_;
  std::vector<std::unique_ptr<Trainer>> ranks_;  // null: was killed
  int64_t memory_before_ = 0;
  int worlds_ = 0;
  int64_t first_step_ = 0;
  std::mt19937_64 random_;
};

// --- Ranks that disagree, are late, or give up ---------------------------------------------------

TEST_F(FaultTest, AMismatchOfEachKindIsToldToEveryRank) {
  struct Kind {
    const char* call;  // of all ranks
    const char* odd;   // but one
  };
  static constexpr Kind kKinds[] = {
      {"all_reduce f32 4", "all_reduce f64 4"},  {"all_reduce f32 4", "all_reduce f32 5"},
      {"all_reduce f32 4", "broadcast f32 4 0"}, {"broadcast f32 4 0", "broadcast f32 4 1"},
      {"reduce f32 4 1", "reduce f32 4 2"},      {"all_gather f32 4", "all_gather f32 0"},
      {"all_reduce f32 4", "barrier f32 0"},     {"reduce_scatter f32 4", "reduce_scatter f64 4"},
      {"reduce f32 16 0", "all_gather f32 16"},
  };
  StartDaemon();
  StartBystander();
  StartWorld();
  ForEachSeed([&] {
    for (const Kind& kind : kKinds) {
      SCOPED_TRACE(kind.odd);
      const int odd = Below(kRanks);
      for (int r = 0; r < kRanks; ++r) {
        rank(r).Send(absl::StrCat("call ", r == odd ? kind.odd : kind.call));
      }
      for (const Reply& reply : Receive()) {
        EXPECT_EQ(reply.word("code"), "INVALID_ARGUMENT") << reply;
        EXPECT_EQ(reply.word("reason"), "MISMATCH") << reply;
        EXPECT_GE(reply.number("versions"), 2) << reply;
        EXPECT_TRUE(absl::StrContains(reply.word("source"), "trainer.cc:")) << reply;
      }
      ExpectWorldGoesOn();
      if (HasFailure()) return;
    }
    // Of a pair; the third rank hears of it at its next call.
    for (const char* recv : {"recv f64 4", "recv f32 5"}) {
      SCOPED_TRACE(recv);
      const int to = Below(kRanks);
      const int from = (to + 1) % kRanks;
      const int third = (to + 2) % kRanks;
      rank(from).Send(absl::StrCat("call send f32 4 ", to));
      rank(to).Send(absl::StrCat(std::string("call "), recv, " ", from));
      const Reply replies[] = {rank(from).Receive(), rank(to).Receive(),
                               rank(third).Ask("call barrier f32 0")};
      for (const Reply& reply : replies) {
        EXPECT_EQ(reply.word("code"), "INVALID_ARGUMENT") << reply;
        EXPECT_EQ(reply.word("reason"), "MISMATCH") << reply;
      }
      ExpectWorldGoesOn();
    }
  });
  ExpectBystanderGoesOn();
}

TEST_F(FaultTest, ALateRankIsNamed) {
  StartDaemon();
  StartBystander();
  StartWorld(kRanks, kAgreeMilliseconds);
  ForEachSeed([&] {
    const int late = Below(kRanks);
    const std::string steps = StepsCommand(1, Elements());
    for (int r = 0; r < kRanks; ++r) {
      if (r != late) rank(r).Send(steps);
    }
    WaitUntilPendingFor({late});
    const pid_t pid = rank(late).pid();
    for (int r = 0; r < kRanks; ++r) {
      const Reply reply = r == late ? Reply() : rank(r).Receive();
      if (r == late) continue;
      ExpectError(reply, absl::StatusCode::kDeadlineExceeded, Reason::kAgreeTimeout, late, pid);
    }
    // It is told the same when it comes.
    ExpectError(rank(late).Ask(steps), absl::StatusCode::kDeadlineExceeded, Reason::kAgreeTimeout,
                late, pid);
    ExpectWorldGoesOn();
  });
  ExpectBystanderGoesOn();
}

TEST_F(FaultTest, AStoppedRankIsLateThenNamedAndGoesOnInTheNextEpoch) {
  StartDaemon();
  StartBystander();
  StartWorld(kRanks, kAgreeMilliseconds);
  ForEachSeed([&] {
    const int victim = Below(kRanks);
    const int moment = Below(200);
    const pid_t pid = rank(victim).pid();
    Send(StepsCommand(kForever, Elements(), moment));
    const absl::Status status = rank(victim).WaitFor(absl::StrCat(moment));
    ASSERT_TRUE(status.ok()) << status;
    rank(victim).Stop();
    WaitUntilPendingFor({victim});
    for (int r = 0; r < kRanks; ++r) {
      if (r == victim) continue;
      ExpectError(rank(r).Receive(), absl::StatusCode::kDeadlineExceeded, Reason::kAgreeTimeout,
                  victim, pid);
    }
    rank(victim).Signal(SIGCONT);
    ExpectError(rank(victim).Receive(), absl::StatusCode::kDeadlineExceeded, Reason::kAgreeTimeout,
                victim, pid);
    ExpectWorldGoesOn();
  });
  ExpectBystanderGoesOn();
}

TEST_F(FaultTest, ACancelEndsTheEpochForAllRanks) {
  StartDaemon();
  StartBystander();
  StartWorld();
  ForEachSeed([&] {
    const int victim = Below(kRanks);
    const pid_t pid = rank(victim).pid();
    const std::string steps = StepsCommand(1, Elements());
    for (int r = 0; r < kRanks; ++r) {
      if (r != victim) rank(r).Send(steps);
    }
    WaitUntilPendingFor({victim});
    const Reply cancelled = rank(victim).Ask("cancel enough");
    EXPECT_TRUE(cancelled.ok) << cancelled;
    for (int r = 0; r < kRanks; ++r) {
      if (r == victim) rank(r).Send(steps);
      const Reply reply = rank(r).Receive();
      ExpectError(reply, absl::StatusCode::kAborted, Reason::kCancelled, victim, pid);
      EXPECT_TRUE(absl::StrContains(reply.line, "enough")) << reply;
    }
    ExpectWorldGoesOn();
  });
  ExpectBystanderGoesOn();
}

TEST_F(FaultTest, ARankThatLeavesWhileItIsNeededIsNamed) {
  StartDaemon();
  StartBystander();
  ForEachSeed([&] {
    StartWorld();
    const int victim = Below(kRanks);
    const pid_t pid = rank(victim).pid();
    const std::string steps = StepsCommand(1, Elements());
    for (int r = 0; r < kRanks; ++r) {
      if (r != victim) rank(r).Send(steps);
    }
    WaitUntilPendingFor({victim});
    const Reply left = rank(victim).Ask("leave");
    EXPECT_TRUE(left.ok) << left;
    for (int r = 0; r < kRanks; ++r) {
      if (r == victim) continue;
      ExpectError(rank(r).Receive(), absl::StatusCode::kAborted, Reason::kPeerLeft, victim, pid);
    }
    EndWorld();
  });
  ExpectBystanderGoesOn();
}

// --- Trainers that are killed --------------------------------------------------------------------

TEST_F(FaultTest, ATrainerKilledAtEveryFailpointOfTheClient) {
  StartDaemon();
  StartBystander();
  for (const absl::string_view failpoint : AllFailpoints()) {
    if (!absl::StartsWith(failpoint, "ring.") && !absl::StartsWith(failpoint, "completion.")) {
      continue;
    }
    SCOPED_TRACE(std::string(failpoint));
    std::cout << failpoint << ": ";
    ForEachSeed([&] {
      StartWorld();
      ASSERT_FALSE(HasFailure());
      const int victim = Below(kRanks);
      const pid_t pid = rank(victim).pid();
      const bool waits = absl::StartsWith(failpoint, "completion.");
      const bool fills = failpoint == "ring.waiting_for_space";
      const int count = 1 + (waits || fills ? Below(3) : Below(100));
      const Reply trapped = rank(victim).Ask(absl::StrCat("trap ", failpoint, " kill ", count));
      ASSERT_TRUE(trapped.ok) << trapped;
      const std::string steps = StepsCommand(kForever, Elements());
      if (fills) {
        StopDaemonAndFlood(victim, 50000);
        ExpectKilled(victim);
        daemon_->Signal(SIGCONT);
        Send(steps);
      } else if (waits) {
        // It sleeps when the others do not come.
        rank(victim).Send(steps);
        ExpectKilled(victim);
        Send(steps);
      } else {
        Send(steps);
        ExpectKilled(victim);
      }
      ASSERT_FALSE(HasFatalFailure());
      ExpectDeathIsTold(victim, pid, Receive());
      EndWorld();
      ExpectBystanderGoesOn();
    });
  }
}

TEST_F(FaultTest, ATrainerKilledAtAnyMoment) {
  StartDaemon();
  StartBystander();
  ForEachSeed([&] {
    StartWorld();
    const int victim = Below(kRanks);
    const int moment = Below(200);
    const pid_t pid = rank(victim).pid();
    Send(StepsCommand(kForever, Elements(), moment));
    const absl::Status status = rank(victim).WaitFor(absl::StrCat(moment));
    ASSERT_TRUE(status.ok()) << status;
    Kill(victim);
    ExpectDeathIsTold(victim, pid, Receive());
    EndWorld();
  });
  ExpectBystanderGoesOn();
}

// The child holds the dead trainer's sockets and memory open; only the process itself tells.
TEST_F(FaultTest, ATrainerWithAForkedChildIsKilled) {
  StartDaemon();
  StartBystander();
  ForEachSeed([&] {
    StartWorld();
    const int victim = Below(kRanks);
    const pid_t pid = rank(victim).pid();
    ExpectWorldGoesOn();
    const Reply forked = rank(victim).Ask("fork");
    EXPECT_TRUE(forked.ok) << forked;
    EXPECT_EQ(forked.word("child_reason"), "FORKED") << forked;
    const std::string steps = StepsCommand(kForever, Elements());
    for (int r = 0; r < kRanks; ++r) {
      if (r != victim) rank(r).Send(steps);
    }
    WaitUntilPendingFor({victim});
    rank(victim).Signal(SIGKILL);
    // Kept until the survivors have heard: its end of the child's input is what keeps the child.
    std::unique_ptr<Trainer> killed = std::move(ranks_[static_cast<size_t>(victim)]);
    ExpectDeathIsTold(victim, pid, Receive());
    EndWorld();
  });
  ExpectBystanderGoesOn();
}

// --- Hostile ones --------------------------------------------------------------------------------

TEST_F(FaultTest, ARankThatWritesToItsStagingDuringRunsHurtsNobodysAgreement) {
  StartDaemon();
  StartBystander();
  StartWorld();
  ForEachSeed([&] {
    const int victim = Below(kRanks);
    const int64_t elements = 1000 + Below(200000);
    for (int r = 0; r < kRanks; ++r) {
      rank(r).Send(
          absl::StrCat("mapped 50 ", elements, " ", r == victim ? 1 : 0, " ", Below(1 << 30)));
    }
    const std::vector<Reply> replies = Receive();
    for (const Reply& reply : replies) {
      EXPECT_TRUE(reply.ok) << reply;
      EXPECT_EQ(reply.word("hash"), replies[0].word("hash")) << "ranks have different bits";
    }
    ExpectWorldGoesOn();
  });
  ExpectBystanderGoesOn();
}

TEST_F(FaultTest, HostileBytesInARingEndThatSessionOnly) {
  StartDaemon();
  StartBystander();
  for (const char* kind : {"tail", "bytes", "skip", "size", "body"}) {
    SCOPED_TRACE(kind);
    std::cout << kind << ": ";
    ForEachSeed([&] {
      // Two honest ranks and the hostile one in one world.
      const int victim = Below(kRanks);
      const std::string name = absl::StrCat("world", ++worlds_);
      ranks_.resize(kRanks);
      for (int r = 0; r < kRanks; ++r) {
        auto& trainer = ranks_[static_cast<size_t>(r)];
        if (trainer == nullptr) StartTrainer(&trainer);
        ASSERT_NE(trainer, nullptr);
        trainer->Send(absl::StrCat(r == victim ? "hostile " : "open ", daemon_->address()));
      }
      for (const Reply& reply : Receive()) ASSERT_TRUE(reply.ok) << reply;
      for (int r = 0; r < kRanks; ++r) {
        rank(r).Send(
            absl::StrCat(r == victim ? "hostile-join " : "join ", name, " ", r, " ", kRanks));
      }
      for (const Reply& reply : Receive()) ASSERT_TRUE(reply.ok) << reply;
      const std::string steps = StepsCommand(kForever, Elements());
      for (int r = 0; r < kRanks; ++r) {
        if (r != victim) rank(r).Send(steps);
      }
      WaitUntilPendingFor({victim});
      const pid_t pid = rank(victim).pid();
      const Reply attack = rank(victim).Ask(absl::StrCat("attack ", kind, " ", Below(1 << 30)));
      EXPECT_TRUE(attack.ok) << attack;
      // Its process lives on; nobody waits for it any more.
      const std::unique_ptr<Trainer> hostile = std::move(ranks_[static_cast<size_t>(victim)]);
      ExpectDeathIsTold(victim, pid, Receive());
      EndWorld();
      ExpectBystanderGoesOn();
    });
  }
}

TEST_F(FaultTest, WildNumbersInCommandsAreRefusedOneByOne) {
  StartDaemon();
  StartBystander();
  ForEachSeed([&] {
    std::unique_ptr<Trainer> hostile;
    StartTrainer(&hostile);
    ASSERT_NE(hostile, nullptr);
    const Reply opened = hostile->Ask(absl::StrCat("hostile ", daemon_->address()));
    ASSERT_TRUE(opened.ok) << opened;
    const Reply attack = hostile->Ask(absl::StrCat("attack numbers ", Below(1 << 30)));
    EXPECT_TRUE(attack.ok) << attack;
    EXPECT_GT(attack.number("refused"), 0);
  });
  ExpectBystanderGoesOn();
}

// --- Too much ------------------------------------------------------------------------------------

TEST_F(FaultTest, AFullRingMakesItsWriterWaitAndLosesNothing) {
  StartDaemon();
  StartBystander();
  ForEachSeed([&] {
    StartWorld(1);
    const Reply trapped = rank(0).Ask("trap ring.waiting_for_space say 1");
    ASSERT_TRUE(trapped.ok) << trapped;
    const int count = 10000 + Below(10000);
    StopDaemonAndFlood(0, count);
    const absl::Status full = rank(0).WaitFor("ring.waiting_for_space");
    daemon_->Signal(SIGCONT);
    ASSERT_TRUE(full.ok()) << full;
    const Reply flooded = rank(0).Receive();
    EXPECT_TRUE(flooded.ok) << flooded;
    const Reply read = rank(0).Ask("flooded");
    EXPECT_TRUE(read.ok) << read;
    EXPECT_EQ(read.number("done"), count + 1);
    ExpectWorldGoesOn();
    EndWorld();
  });
  ExpectBystanderGoesOn();
}

TEST_F(FaultTest, FullMemoryIsToldWithNeedAndFreeAndTheNextEpochWorks) {
  StartDaemon({"--memory_limit_bytes=100000000"});
  StartBystander();
  StartWorld();
  ForEachSeed([&] {
    const int victim = Below(kRanks);
    const pid_t pid = rank(victim).pid();
    const int64_t bytes = int64_t{4} << 20;
    ExpectAllOk(absl::StrCat("prepare ", bytes / 4));
    int hogs = 0;
    Reply reply;
    do {
      reply = rank(victim).Ask(absl::StrCat("hog ", bytes));
    } while (reply.ok && ++hogs < 100);
    EXPECT_GT(hogs, 0);
    ExpectError(reply, absl::StatusCode::kResourceExhausted, Reason::kOutOfMemory);

    // Its part of the next collective is refused; the others are told why theirs is not done.
    reply = rank(victim).Ask("reduce");
    EXPECT_EQ(reply.word("code"), "RESOURCE_EXHAUSTED") << reply;
    EXPECT_EQ(reply.word("reason"), "OUT_OF_MEMORY") << reply;
    EXPECT_TRUE(absl::StrContains(reply.line, "are needed")) << reply;
    EXPECT_TRUE(absl::StrContains(reply.line, "are free")) << reply;
    for (int r = 0; r < kRanks; ++r) {
      if (r == victim) continue;
      ExpectError(rank(r).Ask("reduce"), absl::StatusCode::kAborted, Reason::kPeerRefused, victim,
                  pid);
    }
    reply = rank(victim).Ask("drop");
    EXPECT_TRUE(reply.ok) << reply;
    ExpectAllOk("reduce");
    ExpectWorldGoesOn();
  });
  ExpectBystanderGoesOn();
}

// --- The daemon ----------------------------------------------------------------------------------

// Whatever a trainer read before was checked by it: nothing half reduced was ever published.
TEST_F(FaultTest, ADaemonKilledAtEachOfItsFailpointsIsToldToAllAndReplaced) {
  for (const absl::string_view failpoint : AllFailpoints()) {
    if (!absl::StartsWith(failpoint, "node.") && !absl::StartsWith(failpoint, "ring_reader.")) {
      continue;
    }
    SCOPED_TRACE(std::string(failpoint));
    std::cout << failpoint << ": ";
    ForEachSeed([&] {
      StartDaemon({}, absl::StrCat(failpoint, ":", 20 + Below(200), "=kill"));
      ASSERT_FALSE(HasFatalFailure());
      StartWorld();
      const auto sessions = daemon_->Sessions();
      ASSERT_TRUE(sessions.ok()) << sessions.status();
      ASSERT_EQ(sessions->sessions_size(), kRanks);
      Send(StepsCommand(kForever, Elements()));
      for (const Reply& reply : Receive()) ExpectDaemonLost(reply);
      const absl::StatusOr<int> end = daemon_->WaitForEnd();
      ASSERT_TRUE(end.ok()) << end.status();
      EXPECT_EQ(*end, 128 + SIGKILL);
      // And so it stays for what was made with it.
      Send(StepsCommand(1, 1));
      for (const Reply& reply : Receive()) ExpectDaemonLost(reply);

      StartDaemon();
      ASSERT_FALSE(HasFatalFailure());
      const absl::Status lost = daemon_->Renew(sessions->sessions(0).session());
      EXPECT_EQ(lost.code(), absl::StatusCode::kNotFound) << lost;
      EXPECT_EQ(ErrorOf(lost).reason, Reason::kSessionLost) << lost;
      StartWorld();
      ExpectWorldGoesOn();
      EndWorld();
      ExpectNothingLeft();
    });
  }
}

TEST_F(FaultTest, SigtermEndsWhatIsUnderWayAndExitsWithZero) {
  ForEachSeed([&] {
    StartDaemon({"--drain_timeout=1s"});
    ASSERT_FALSE(HasFatalFailure());
    StartWorld();
    const bool one_is_missing = Below(2) == 0;
    const std::string steps = StepsCommand(kForever, Elements(), 0);
    const int missing = one_is_missing ? Below(kRanks) : -1;
    for (int r = 0; r < kRanks; ++r) {
      if (r != missing) rank(r).Send(steps);
    }
    if (one_is_missing) {
      WaitUntilPendingFor({missing});
    } else {
      const absl::Status status = rank(0).WaitFor("0");
      ASSERT_TRUE(status.ok()) << status;
    }
    daemon_->Signal(SIGTERM);
    const absl::StatusOr<int> end = daemon_->WaitForEnd();
    ASSERT_TRUE(end.ok()) << end.status();
    EXPECT_EQ(*end, 0) << bench::FileText(scratch_.path() + "/chorusd.log");
    for (int r = 0; r < kRanks; ++r) {
      if (r == missing) continue;
      const Reply reply = rank(r).Receive();
      EXPECT_EQ(reply.word("code"), "UNAVAILABLE") << reply;
      EXPECT_TRUE(reply.word("reason") == "DRAINING" || reply.word("reason") == "DAEMON_LOST")
          << reply;
    }
    Send("close");
    Receive();  // the daemon is gone: whatever it says
    daemon_.reset();
  });
}

// Takes NAME from "--NAME=N".
bool TakeFlag(absl::string_view argument, absl::string_view name, uint64_t* value) {
  if (!absl::ConsumePrefix(&argument, "--") || !absl::ConsumePrefix(&argument, name) ||
      !absl::ConsumePrefix(&argument, "=")) {
    return false;
  }
  return absl::SimpleAtoi(argument, value);
}

int Main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  signal(SIGPIPE, SIG_IGN);
  const char* const seeds = std::getenv("CHORUS_FAULT_SEEDS");
  bool good = seeds == nullptr || absl::SimpleAtoi(seeds, &seed_count);
  for (int i = 1; i < argc; ++i) {
    good = good && (TakeFlag(argv[i], "seeds", &seed_count) ||
                    TakeFlag(argv[i], "first_seed", &first_seed));
  }
  if (!good || seed_count == 0) {
    std::cerr << "expected --seeds=N with N > 0 (or CHORUS_FAULT_SEEDS=N), --first_seed=S\n";
    return 2;
  }
  return RUN_ALL_TESTS();
}

}  // namespace
}  // namespace fault
}  // namespace chorus

int main(int argc, char** argv) { return chorus::fault::Main(argc, argv); }
