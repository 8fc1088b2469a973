// Faults, injected into a real daemon and real trainer processes.
//
// Each test starts chorusd on a socket of its own, a world of three trainers that it leads by the
// hand (trainer.cc), and one bystander: two more ranks that all_reduce all the time in another
// world of the same daemon, and must notice nothing. It injects a fault, reads what each survivor
// is told, and lets the world go on. At the end of every test the daemon lives, nothing is left of
// its sessions, and its memory is back.
//
// No deadline of the daemon is waited for, nor missed by chance: its clock is the test's
// (clock.cc).
//
// Seeds choose victims, moments and sizes. --seeds=N (or CHORUS_FAULT_SEEDS) runs so many of them
// per fault, from --first_seed=S (1) on; each is printed.
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
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
// A moment more than the daemon's --agree_timeout, --exec_timeout and --lease are.
constexpr absl::Duration kAgreeTimeout = absl::Seconds(61);
constexpr absl::Duration kExecTimeout = absl::Seconds(301);
constexpr absl::Duration kLease = absl::Seconds(61);
// More steps than any test lets happen.
constexpr int kForever = 100000000;

// What the ranks of a test run on, how their commands travel, and what these are: one op at a time,
// or whole graphs with their Backward.
struct Mode {
  const char* name;
  const char* backend;
  const char* transport;
  bool compiled;
};
std::ostream& operator<<(std::ostream& os, const Mode& mode) { return os << mode.name; }
// Any two of the three together.
constexpr Mode kModes[] = {
    {"HostRingEager", "host", "ring", false},   {"HostStreamCompiled", "host", "stream", true},
    {"HostUnaryEager", "host", "unary", false}, {"SimRingCompiled", "sim", "ring", true},
    {"SimStreamEager", "sim", "stream", false}, {"SimUnaryCompiled", "sim", "unary", true},
};

class FaultTest : public ::testing::Test {
 protected:
  explicit FaultTest(const Mode& mode = kModes[0]) : mode_(mode) {}

  void TearDown() override {
    if (HasFatalFailure() || IsSkipped()) return;
    if (daemon_ == nullptr) return;
    for (const auto& trainer : ranks_) {
      if (trainer == nullptr) continue;
      const Reply reply = trainer->Ask("close");
      EXPECT_TRUE(reply.ok) << reply;
    }
    EndBystander();
    EXPECT_TRUE(daemon_->Lives());
    ExpectNothingLeft();
  }

  // --- Who takes part ---

  void StartDaemon(const std::vector<std::string>& flags = {}, const std::string& failpoint = "") {
    Daemon::Options options;
    options.socket = scratch_.path() + "/chorusd";
    options.log = scratch_.path() + "/chorusd.log";
    options.clock = scratch_.path() + "/clock";
    options.flags = {"--host_devices=8", absl::StrCat("--backend=", mode_.backend),
                     absl::StrCat("--sim_seed=", seed_)};
    options.flags.insert(options.flags.end(), flags.begin(), flags.end());
    options.failpoint = failpoint;
    daemon_.reset();
    std::error_code ignored;
    std::filesystem::remove(options.log, ignored);
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

  void EndBystander() {
    if (bystander_ == nullptr) return;
    const Reply reply = bystander_->Ask("pair-stop");
    EXPECT_TRUE(reply.ok) << reply;
    EXPECT_GT(reply.number("done"), 0);
    bystander_.reset();
  }

  void StartTrainer(std::unique_ptr<Trainer>* trainer) {
    absl::StatusOr<std::unique_ptr<Trainer>> started =
        Trainer::Start(scratch_.path() + "/trainers.log", wall_step_);
    ASSERT_TRUE(started.ok()) << started.status();
    *trainer = *std::move(started);
  }

  // A new world of `size` ranks, each a trainer of `ranks_`; those that were killed are replaced.
  // Rank `odd`, if any, opens and joins by commands of its own, followed by the same words.
  void StartWorld(int size = kRanks, int odd = -1, const std::string& odd_open = "",
                  const std::string& odd_join = "join", int64_t agree_seconds = 0) {
    ranks_.resize(static_cast<size_t>(size));
    for (auto& trainer : ranks_) {
      if (trainer == nullptr) StartTrainer(&trainer);
      ASSERT_NE(trainer, nullptr);
    }
    const std::string open = absl::StrCat("open ", daemon_->address(), " ", mode_.transport);
    for (int r = 0; r < size; ++r) rank(r).Send(r == odd ? odd_open : open);
    for (const Reply& reply : Receive()) ASSERT_TRUE(reply.ok) << reply;
    const std::string name = absl::StrCat("world", ++worlds_);
    for (int r = 0; r < size; ++r) {
      rank(r).Send(absl::StrCat(r == odd ? odd_join : "join", " ", name, " ", r, " ", size, " ",
                                agree_seconds));
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
    return absl::StrCat(mode_.compiled ? "compiled-steps " : "steps ", count, " ", elements, " ",
                        first_step_, " ", say);
  }
  // Collectives work, on all ranks, in one epoch. What some of them have called alone is over with
  // its step.
  void ExpectWorldGoesOn() {
    ExpectAllOk(absl::StrCat("step ", ++last_step_));
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
  // Of a call that others have made, and failed in, before.
  static void ExpectPassed(const Reply& reply) {
    ExpectError(reply, absl::StatusCode::kInvalidArgument, Reason::kMismatch);
  }
  static void ExpectDaemonLost(const Reply& reply) {
    ExpectError(reply, absl::StatusCode::kUnavailable, Reason::kDaemonLost);
  }

  // A rank's process has ended: the survivors are told, shrink, and go on.
  void ExpectDeathIsTold(int victim, pid_t pid, const std::vector<Reply>& replies) {
    for (const Reply& reply : replies) {
      ExpectError(reply, absl::StatusCode::kAborted, Reason::kPeerDied, victim, pid);
    }
    Reform();
  }
  void Reform() {
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

  void LetTimePass(absl::Duration time) {
    const absl::Status status = daemon_->LetTimePass(time);
    EXPECT_TRUE(status.ok()) << status;
  }
  size_t TimesInLog(const std::string& text) const {
    const std::string log = bench::FileText(scratch_.path() + "/chorusd.log");
    size_t times = 0;
    for (size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) ++times;
    return times;
  }
  void WaitForLog(const std::string& text) {
    const absl::Status status =
        AskUntil([&]() -> absl::StatusOr<bool> { return TimesInLog(text) > 0; });
    EXPECT_TRUE(status.ok()) << status << ": " << text;
  }

  // Waits until the daemon lists an instance of the world of now that waits for exactly `missing`.
  void WaitUntilPendingFor(const std::vector<int>& missing) {
    const absl::Status status = AskUntil([&] { return IsPendingFor(missing); });
    EXPECT_TRUE(status.ok()) << status;
  }
  // Whether a call of the world waits for these ranks alone, or, where none are given, for any.
  absl::StatusOr<bool> IsPendingFor(const std::vector<int>& missing) {
    CHORUS_ASSIGN_OR_RETURN(const v1::ListPendingResponse pending, daemon_->Pending());
    for (const auto& entry : pending.pending()) {
      if (entry.world_name() != absl::StrCat("world", worlds_)) continue;
      std::vector<int> ranks(entry.missing_ranks().begin(), entry.missing_ranks().end());
      std::sort(ranks.begin(), ranks.end());
      if (missing.empty() || ranks == missing) return true;
    }
    return false;
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
      seed_ = seed;
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
  // After so many steps. Those that are not one op over the ring take longer.
  int Moment() {
    return Below(mode_.compiled || absl::string_view(mode_.transport) != "ring" ? 20 : 200);
  }

  Mode mode_;
  const bench::ScratchDirectory scratch_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<Trainer> bystander_;
  std::vector<std::unique_ptr<Trainer>> ranks_;  // null: was killed
  absl::Duration wall_step_;                     // of the trainers that are started from now on
  int64_t memory_before_ = 0;
  int worlds_ = 0;
  int64_t first_step_ = 0;
  int64_t last_step_ = 0;
  uint64_t seed_ = first_seed;
  std::mt19937_64 random_;
};

class FaultModesTest : public FaultTest, public ::testing::WithParamInterface<Mode> {
 protected:
  FaultModesTest() : FaultTest(GetParam()) {}
};
INSTANTIATE_TEST_SUITE_P(Modes, FaultModesTest, ::testing::ValuesIn(kModes),
                         [](const auto& info) { return info.param.name; });

// --- Ranks that disagree, are late, or give up ---------------------------------------------------

TEST_P(FaultModesTest, AMismatchOfEachKindIsToldToEveryRank) {
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
  const std::string call = mode_.compiled ? "compiled-call " : "call ";
  StartDaemon();
  StartBystander();
  StartWorld();
  ForEachSeed([&] {
    for (const Kind& kind : kKinds) {
      SCOPED_TRACE(kind.odd);
      const int odd = Below(kRanks);
      for (int r = 0; r < kRanks; ++r) {
        rank(r).Send(absl::StrCat(call, r == odd ? kind.odd : kind.call));
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
    // Of a pair; the third rank hears of it at its next call. (Before it in a compiled graph there
    // would be a collective of all three.)
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

TEST_P(FaultModesTest, ALateRankIsNamed) {
  StartDaemon();
  StartBystander();
  StartWorld();
  ForEachSeed([&] {
    const int late = Below(kRanks);
    const std::string steps = StepsCommand(1, Elements());
    for (int r = 0; r < kRanks; ++r) {
      if (r != late) rank(r).Send(steps);
    }
    WaitUntilPendingFor({late});
    LetTimePass(kAgreeTimeout);
    const pid_t pid = rank(late).pid();
    for (int r = 0; r < kRanks; ++r) {
      if (r == late) continue;
      ExpectError(rank(r).Receive(), absl::StatusCode::kDeadlineExceeded, Reason::kAgreeTimeout,
                  late, pid);
    }
    // It is told the same when it comes.
    ExpectError(rank(late).Ask(steps), absl::StatusCode::kDeadlineExceeded, Reason::kAgreeTimeout,
                late, pid);
    ExpectWorldGoesOn();
  });
  ExpectBystanderGoesOn();
}

// It is behind the real one or equal to it, never ahead: the kernel does not know of it, and a wait
// of gRPC's own until a time on it would not end.
TEST_P(FaultModesTest, AWallClockThatIsSetEndsNothing) {
  constexpr absl::Duration kYear = absl::Hours(365 * 24);
  StartDaemon();
  ASSERT_TRUE(daemon_->SetWallClock(-kYear).ok());
  StartBystander();
  StartWorld(kRanks, 0, absl::StrCat("leased ", daemon_->address()), "hostile-join",
             absl::ToInt64Seconds(1000 * kLease));
  // Rank 0 has a lease alone; the others wait for it.
  const std::string steps = StepsCommand(1, Elements());
  for (int r = 1; r < kRanks; ++r) rank(r).Send(steps);
  WaitUntilPendingFor({0});
  for (const absl::Duration ahead : {absl::ZeroDuration(), -kYear, absl::ZeroDuration()}) {
    const absl::Status set = daemon_->SetWallClock(ahead);
    ASSERT_TRUE(set.ok()) << set;
    ExpectBystanderGoesOn();
    const auto sessions = daemon_->Sessions();
    ASSERT_TRUE(sessions.ok()) << sessions.status();
    EXPECT_EQ(sessions->sessions_size(), 2 + kRanks);
    WaitUntilPendingFor({0});
  }
  // On the steady clock the lease ends.
  const int victim = 0;
  Kill(victim);
  const absl::Status gone = AskUntil([&]() -> absl::StatusOr<bool> {
    CHORUS_RETURN_IF_ERROR(daemon_->LetTimePass(kLease));
    CHORUS_ASSIGN_OR_RETURN(const v1::ListSessionsResponse list, daemon_->Sessions());
    return list.sessions_size() == 2 + kRanks - 1;
  });
  EXPECT_TRUE(gone.ok()) << gone;
  ExpectDeathIsTold(victim, /*pid=*/-1, Receive());
  EndWorld();
  ExpectBystanderGoesOn();
}

// Whenever a trainer looks at its wall clock, that has been set. Forwards: a deadline on it has
// passed at the next look. Backwards: it never comes.
TEST_P(FaultModesTest, AWallClockThatIsSetUnderATrainerEndsNothing) {
  StartDaemon();
  for (const absl::Duration wall_step : {absl::Hours(1), -absl::Hours(1)}) {
    SCOPED_TRACE(absl::FormatDuration(wall_step));
    ranks_.clear();
    wall_step_ = wall_step;
    ASSERT_NO_FATAL_FAILURE(StartWorld());
    ExpectWorldGoesOn();
    // They wait for rank 0, each with a deadline far away.
    const std::string steps = StepsCommand(5, 1000);
    for (int r = 1; r < kRanks; ++r) rank(r).Send(steps);
    WaitUntilPendingFor({0});
    rank(0).Send(steps);
    for (const Reply& reply : Receive()) EXPECT_TRUE(reply.ok) << reply;
    // A deadline that is near comes.
    ASSERT_TRUE(rank(1).Ask("vote").ok);
    const Reply waited = rank(1).Ask("outcome 20");
    EXPECT_EQ(waited.word("reason"), std::string(ReasonName(Reason::kTransportTimeout))) << waited;
    ExpectWorldGoesOn();
    EndWorld();
  }
  ranks_.clear();
}

TEST_P(FaultModesTest, AStoppedRankIsLateThenNamedAndGoesOnInTheNextEpoch) {
  StartDaemon();
  StartBystander();
  StartWorld();
  ForEachSeed([&] {
    const int victim = Below(kRanks);
    const int moment = Moment();
    const std::string steps = StepsCommand(kForever, Elements(), moment);
    // What it had sent before it was stopped may come while the time passes: the others go on then,
    // and one of them may be late beside it. It is stopped again until it alone is.
    int named = -1;
    for (int stops = 0; stops < 10 && named != victim && !HasFailure(); ++stops) {
      Send(steps);
      const absl::Status status = rank(victim).WaitFor(absl::StrCat(moment));
      ASSERT_TRUE(status.ok()) << status;
      rank(victim).Stop();
      WaitUntilPendingFor({victim});
      const std::string told = absl::StrCat("reason=", ReasonName(Reason::kAgreeTimeout));
      const size_t before = TimesInLog(told);
      const absl::Status late = AskUntil([&]() -> absl::StatusOr<bool> {
        // What is launched has a time of its own, and is over when a call waits behind it.
        CHORUS_ASSIGN_OR_RETURN(const bool waits, IsPendingFor({}));
        if (waits) CHORUS_RETURN_IF_ERROR(daemon_->LetTimePass(kAgreeTimeout));
        return TimesInLog(told) > before;
      });
      EXPECT_TRUE(late.ok()) << late;
      std::vector<Reply> replies;
      for (int r = 0; r < kRanks; ++r) {
        if (r != victim) replies.push_back(rank(r).Receive());
      }
      rank(victim).Signal(SIGCONT);
      replies.push_back(rank(victim).Receive());
      named = static_cast<int>(replies.front().number("rank"));
      ASSERT_TRUE(named >= 0 && named < kRanks) << replies.front();
      for (const Reply& reply : replies) {
        ExpectError(reply, absl::StatusCode::kDeadlineExceeded, Reason::kAgreeTimeout, named,
                    rank(named).pid());
        EXPECT_TRUE(absl::StrContains(reply.word("message"),
                                      absl::StrCat("(pid ", rank(victim).pid(), ")")))
            << reply;
      }
      ExpectWorldGoesOn();
    }
    EXPECT_EQ(named, victim);
  });
  ExpectBystanderGoesOn();
}

TEST_P(FaultModesTest, ACancelEndsTheEpochForAllRanks) {
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
      if (r == victim) continue;
      const Reply reply = rank(r).Receive();
      ExpectError(reply, absl::StatusCode::kAborted, Reason::kAborted, victim, pid);
      EXPECT_TRUE(absl::StrContains(reply.line, "enough")) << reply;
    }
    // A rank that has cancelled is in the next epoch; the others have made that call in the one
    // before.
    ExpectPassed(rank(victim).Ask(steps));
    ExpectWorldGoesOn();
  });
  ExpectBystanderGoesOn();
}

TEST_P(FaultModesTest, ARankThatLeavesWhileItIsNeededIsNamed) {
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

// Two ranks' groups wait for each other; the third rank hears of it at its next call.
TEST_P(FaultModesTest, ACircleBetweenGroupsIsToldToTheRanksInItAndTheEpoch) {
  StartDaemon();
  StartBystander();
  StartWorld();
  ForEachSeed([&] {
    const int third = Below(kRanks);
    const int pair[] = {(third + 1) % kRanks, (third + 2) % kRanks};
    rank(pair[0]).Send(absl::StrCat("circle ", pair[1]));
    rank(pair[1]).Send(absl::StrCat("circle ", pair[0]));
    for (const Reply& reply : {rank(pair[0]).Receive(), rank(pair[1]).Receive(),
                               rank(third).Ask("call barrier f32 0")}) {
      EXPECT_EQ(reply.word("code"), "INVALID_ARGUMENT") << reply;
      EXPECT_EQ(reply.word("reason"), "ORDER_CYCLE") << reply;
      EXPECT_TRUE(absl::StrContains(reply.word("message"), "group")) << reply;
    }
    ExpectWorldGoesOn();
  });
  ExpectBystanderGoesOn();
}

// --- Devices -------------------------------------------------------------------------------------

TEST_P(FaultModesTest, ADeviceThatFailsOrNeverEndsACollectiveFailsItForAllRanks) {
  const auto run = [this](bool lost) {
    // The bystander opens its two sessions first and gets the first two devices.
    const int device = 2 + Below(kRanks);
    StartDaemon({absl::StrCat("--fault_script=collective ", lost ? "lost" : "error",
                              " device=", device, " skip=", Below(30))});
    ASSERT_FALSE(HasFatalFailure());
    StartBystander();
    StartWorld();
    Send(StepsCommand(kForever, Elements()));
    if (lost) {
      WaitForLog("collective lost");
      LetTimePass(kExecTimeout);
    }
    for (const Reply& reply : Receive()) {
      if (lost) {
        ExpectError(reply, absl::StatusCode::kDeadlineExceeded, Reason::kExecTimeout);
      } else {
        ExpectError(reply, absl::StatusCode::kInternal, Reason::kExecFailed);
      }
    }
    ExpectWorldGoesOn();
    EndWorld();
    ExpectBystanderGoesOn();
    EndBystander();
    ExpectNothingLeft();
  };
  ForEachSeed([&] {
    for (const bool lost : {true, false}) {
      run(lost);
      if (HasFailure()) return;
    }
  });
}

// --- Trainers that are killed --------------------------------------------------------------------

// The client's failpoints, and the daemon's.
bool IsOfClient(absl::string_view failpoint) {
  return absl::StartsWith(failpoint, "ring.") || absl::StartsWith(failpoint, "ring_link.") ||
         absl::StartsWith(failpoint, "completion.");
}
bool IsOfDaemon(absl::string_view failpoint) {
  return absl::StartsWith(failpoint, "node.") || absl::StartsWith(failpoint, "ring_reader.") ||
         absl::StartsWith(failpoint, "completion_writer.");
}

TEST(FailpointsTest, SomeProcessIsKilledAtEachOfThem) {
  for (const absl::string_view failpoint : AllFailpoints()) {
    EXPECT_NE(IsOfClient(failpoint), IsOfDaemon(failpoint))
        << failpoint << ": say whose it is, so that it is among those below";
  }
}

TEST_F(FaultTest, ATrainerKilledAtEveryFailpointOfTheClient) {
  StartDaemon();
  StartBystander();
  for (const absl::string_view failpoint : AllFailpoints()) {
    if (!IsOfClient(failpoint) || HasFailure()) continue;
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

TEST_P(FaultModesTest, ATrainerKilledAtAnyMoment) {
  StartDaemon();
  StartBystander();
  ForEachSeed([&] {
    StartWorld();
    const int victim = Below(kRanks);
    const int moment = Moment();
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

// Whatever the step in which it dies: the others have the parameters and the momentum of one step,
// whole, the same ones, and with the bits of a training in which nobody dies.
TEST_P(FaultModesTest, ATrainerKilledInAStepLeavesTheOthersAWholeState) {
  StartDaemon();
  StartBystander();
  ForEachSeed([&] {
    StartWorld();
    const int victim = Below(kRanks);
    const int moment = Below(20);
    const pid_t pid = rank(victim).pid();
    const std::string shape = absl::StrCat(" ", Elements(), " ", Below(2), " ");
    Send(absl::StrCat("train ", kForever, shape, moment));
    const absl::Status status = rank(victim).WaitFor(absl::StrCat(moment));
    ASSERT_TRUE(status.ok()) << status;
    Kill(victim);
    const std::vector<Reply> replies = Receive();
    const int64_t trained = replies[0].number("trained");
    const std::string hash = replies[0].word("hash");
    EXPECT_GE(trained, moment - 4);
    for (const Reply& reply : replies) {
      EXPECT_EQ(reply.number("trained"), trained) << reply;
      EXPECT_EQ(reply.word("hash"), hash) << reply;
    }
    ExpectDeathIsTold(victim, pid, replies);
    // They go on from there.
    Send(absl::StrCat("train 3", shape));
    std::string next;
    for (const Reply& reply : Receive()) {
      EXPECT_TRUE(reply.ok) << reply;
      EXPECT_EQ(reply.number("trained"), trained + 3) << reply;
      if (next.empty()) next = reply.word("hash");
      EXPECT_EQ(reply.word("hash"), next) << reply;
    }
    EndWorld();
    StartWorld();
    Send(absl::StrCat("train ", trained, shape));
    for (const Reply& reply : Receive()) {
      EXPECT_TRUE(reply.ok) << reply;
      EXPECT_EQ(reply.word("hash"), hash) << reply;
    }
    EndWorld();
  });
  ExpectBystanderGoesOn();
}

// The child holds the dead trainer's sockets and memory open; only the process itself tells.
TEST_P(FaultModesTest, ATrainerWithAForkedChildIsKilled) {
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

// A rank that did not come through the attach socket: nobody sees its process.
TEST_P(FaultModesTest, ALeaseThatRunsOutNamesItsRank) {
  StartDaemon();
  StartBystander();
  ForEachSeed([&] {
    const int victim = Below(kRanks);
    // The others wait for longer than a lease.
    StartWorld(kRanks, victim, absl::StrCat("leased ", daemon_->address()), "hostile-join",
               absl::ToInt64Seconds(1000 * kLease));
    ASSERT_FALSE(HasFailure());
    const std::string steps = StepsCommand(1, Elements());
    for (int r = 0; r < kRanks; ++r) {
      if (r != victim) rank(r).Send(steps);
    }
    WaitUntilPendingFor({victim});
    Kill(victim);
    // Its last call, which holds the lease, may end only now.
    const absl::Status gone = AskUntil([&]() -> absl::StatusOr<bool> {
      CHORUS_RETURN_IF_ERROR(daemon_->LetTimePass(kLease));
      CHORUS_ASSIGN_OR_RETURN(const v1::ListSessionsResponse list, daemon_->Sessions());
      return list.sessions_size() == 2 + kRanks - 1;  // the bystander's too
    });
    EXPECT_TRUE(gone.ok()) << gone;
    const std::vector<Reply> replies = Receive();
    for (const Reply& reply : replies) {
      EXPECT_TRUE(absl::StrContains(reply.word("message"), "its lease of 1m ran out")) << reply;
    }
    ExpectDeathIsTold(victim, /*pid=*/-1, replies);
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
    if (HasFailure()) return;
    SCOPED_TRACE(kind);
    std::cout << kind << ": ";
    ForEachSeed([&] {
      // Two honest ranks and the hostile one in one world.
      const int victim = Below(kRanks);
      StartWorld(kRanks, victim, absl::StrCat("hostile ", daemon_->address()), "hostile-join");
      ASSERT_FALSE(HasFailure());
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
      std::vector<Reply> replies = Receive();
      ExpectDeathIsTold(victim, pid, replies);
      replies.push_back(attack);
      for (const Reply& reply : replies) {
        for (const char* text : {"its session was ended for malformed bytes", "expected", "got"}) {
          EXPECT_TRUE(absl::StrContains(reply.word("message"), text)) << reply;
        }
      }
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
    for (const char* kind : {"run", "create_inline", "create_external", "make_readable",
                             "enter_epoch", "register_graph"}) {
      EXPECT_GT(attack.number(kind), 0) << kind << ": " << attack;
    }
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
    if (!IsOfDaemon(failpoint) || HasFailure()) continue;
    SCOPED_TRACE(std::string(failpoint));
    std::cout << failpoint << ": ";
    ForEachSeed([&] {
      // The other transports have no ring.
      if (absl::StartsWith(failpoint, "node.")) mode_ = kModes[Below(std::size(kModes))];
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
    mode_ = kModes[Below(std::size(kModes))];
    StartDaemon({"--drain_timeout=50ms"});
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
      EXPECT_EQ(reply.word("reason"), "DRAINING") << reply;
    }
    Send("close");
    Receive();  // the daemon is gone: whatever it says
    daemon_.reset();
  });
}

// --- Every place ---------------------------------------------------------------------------------

// Where a rank can stand in a run and what can happen to it there, as the state enumeration has
// found (//tests/model:enumeration_test): by place.
std::vector<std::pair<std::string, std::string>> FaultsByPlace() {
  // No faults: the run goes on, and every other test goes through them.
  const std::set<std::string> good = {"vote", "unblock", "finish", "enter", "drop_tape"};
  std::vector<std::pair<std::string, std::string>> faults;
  std::ifstream file("tests/model/failpoints.txt");
  std::string line;
  while (std::getline(file, line)) {
    const std::pair<std::string, std::string> words = absl::StrSplit(line, absl::MaxSplits(' ', 1));
    if (words.first != "#" && good.count(words.second) == 0) faults.push_back(words);
  }
  return faults;
}

class PlacesTest : public FaultTest {
 protected:
  // Leads the ranks to where `victim_` stands at `place`. A rank that has voted waits for
  // `outcome`.
  void Lead(const std::string& place) {
    std::vector<int> voters;
    if (place == "before_vote") {
      voters = {other_, third_};
    } else if (place == "voted_waiting") {
      voters = {victim_, other_};
    } else if (place == "launched") {
      voters = {victim_, other_, third_};
    } else if (place == "gang_blocked") {
      Vote(victim_, absl::StrCat("vote-blocked ", other_, " ", third_));
      Vote(other_, absl::StrCat("vote-blocked ", victim_, " -1"));
      WaitUntilPendingFor({third_});
    } else if (place == "published") {
      ExpectWorldGoesOn();
    } else if (place == "epoch_ended_unseen" || place == "cause_received" ||
               place == "entered_next_epoch") {
      // The SDK enters the next epoch when it hands out the cause: these two are one place.
      const Reply reply = rank(third_).Ask("cancel before");
      EXPECT_TRUE(reply.ok) << reply;
      for (const int r : {victim_, other_}) {
        if (r == victim_ && place == "epoch_ended_unseen") continue;
        ExpectError(rank(r).Ask(StepsCommand(1, 1)), absl::StatusCode::kAborted, Reason::kAborted,
                    third_, rank(third_).pid());
      }
      // A rank that has cancelled is in the next epoch; the others have made that call in the one
      // before.
      ExpectPassed(rank(third_).Ask(StepsCommand(1, 1)));
    } else {
      FAIL() << "no test leads a rank there";
    }
    for (const int r : voters) Vote(r, "vote");
    if (place == "launched") WaitForLog("collective lost");
    if (place == "before_vote") WaitUntilPendingFor({victim_});
    if (place == "voted_waiting") WaitUntilPendingFor({third_});
  }
  void Vote(int r, const std::string& command) {
    const Reply reply = rank(r).Ask(command);
    EXPECT_TRUE(reply.ok) << reply;
    voted_.insert(r);
  }
  // What `r` is told: of what it has asked for, or asks for now.
  Reply Told(int r) { return rank(r).Ask(voted_.erase(r) > 0 ? "outcome" : StepsCommand(1, 1)); }

  int victim_ = 0;
  int other_ = 0;
  int third_ = 0;
  std::set<int> voted_;
};

TEST_F(PlacesTest, WhatMayHappenToARankIsToldToAllWhereverItStands) {
  const auto faults = FaultsByPlace();
  EXPECT_GE(faults.size(), 30u);
  StartDaemon();
  for (const auto& fault : faults) {
    const std::string& place = fault.first;
    const std::string& event = fault.second;
    SCOPED_TRACE(absl::StrCat(place, " ", event));
    std::cout << place << " " << event << ": ";
    const bool launched = place == "launched";
    ForEachSeed([&] {
      victim_ = Below(kRanks);
      other_ = (victim_ + 1 + Below(kRanks - 1)) % kRanks;
      third_ = kRanks - victim_ - other_;
      voted_.clear();
      if (launched) StartDaemon({"--fault_script=collective lost"});
      StartWorld();
      ASSERT_FALSE(HasFailure());
      Lead(place);
      ASSERT_FALSE(HasFailure());

      absl::StatusCode code = absl::StatusCode::kAborted;
      Reason reason = Reason::kUnspecified;
      int culprit = victim_;
      const bool gone = event == "die" || event == "leave";
      const pid_t pids[] = {rank(0).pid(), rank(1).pid(), rank(2).pid()};
      if (event == "die") {
        reason = Reason::kPeerDied;
        Kill(victim_);
      } else if (event == "cancel" || event == "leave") {
        reason = event == "cancel" ? Reason::kAborted : Reason::kPeerLeft;
        // A rank that leaves takes its votes back; one that needs it later finds that it is gone.
        if (event == "leave" && place != "before_vote") {
          code = absl::StatusCode::kFailedPrecondition;
          reason = Reason::kNeedsReform;
        }
        if (event == "leave" && voted_.count(victim_) != 0 && !launched) {
          code = absl::StatusCode::kCancelled;
          reason = Reason::kCancelled;
        }
        const Reply reply = rank(victim_).Ask(absl::StrCat(event, " after"));
        EXPECT_TRUE(reply.ok) << reply;
      } else if (event == "expire") {
        code = absl::StatusCode::kDeadlineExceeded;
        reason = Reason::kAgreeTimeout;
        if (place == "voted_waiting" || place == "gang_blocked") culprit = third_;
        // Else the victim itself is late: the others ask for what it does not.
        if (voted_.empty()) {
          Vote(other_, "vote");
          Vote(third_, "vote");
          WaitUntilPendingFor({victim_});
        }
        LetTimePass(kAgreeTimeout);
      } else {
        ASSERT_EQ(event, "exec_fail") << "no test makes this happen";
      }
      if (event == "cancel" && place == "epoch_ended_unseen") {
        // It means the epoch that has ended, and ends nothing.
        ExpectWorldGoesOn();
        EndWorld();
        return;
      }
      if (launched) {
        // Committed: the devices alone decide. A rank that hears of it enters the next epoch, in
        // which a rank that is gone is missed.
        LetTimePass(kExecTimeout);
        for (const int r : {victim_, other_, third_}) {
          if (r == victim_ && gone) continue;
          ExpectError(Told(r), absl::StatusCode::kDeadlineExceeded, Reason::kExecTimeout);
        }
        code = absl::StatusCode::kFailedPrecondition;
        if (gone) reason = Reason::kNeedsReform;
      }
      for (const int r : {other_, third_, victim_}) {
        if (gone ? r == victim_ : launched) continue;  // cannot be told; has been
        if (event == "cancel" && r == victim_ && voted_.count(r) == 0) {
          // It is in the next epoch, the others have failed in the one before.
          ExpectPassed(Told(r));
          continue;
        }
        const Reply reply = Told(r);
        if (r == victim_ && place == "epoch_ended_unseen") {
          ExpectError(reply, absl::StatusCode::kAborted, Reason::kAborted, third_, pids[third_]);
          // That has told it which epoch is open now; the others have failed in the one between.
          ExpectPassed(Told(r));
          continue;
        }
        ExpectError(reply, code, reason, culprit, pids[culprit]);
      }
      if (event == "die") {
        Reform();
      } else if (event != "leave") {
        ExpectWorldGoesOn();
      }
      EndWorld();
      if (launched) ExpectNothingLeft();
    });
    if (launched) StartDaemon();
    if (HasFailure()) return;
  }
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
