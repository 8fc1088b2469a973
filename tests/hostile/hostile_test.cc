// One client that asks for too much, beside two honest ranks: it is refused, they go on with right
// results, the daemon holds no more than it may, and gets back what it gave.
//
// No times are checked, but for the patience with which everything is waited for.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "benchmarks/process.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/own_memory.h"
#include "tests/fault/processes.h"
#include "tests/hostile/own_cgroup.h"

namespace chorus {
namespace hostile {
namespace {

// The honest ones have less than an eighth of it: another tenant cannot take what they need.
constexpr int64_t kMemoryLimit = int64_t{160} << 20;
constexpr int64_t kShare = kMemoryLimit / 8 * 7;  // of one tenant
constexpr int64_t kSessions = 40;
// What an attack may bring into memory beside what somebody is charged for, in the end: what malloc
// keeps of what was freed (server/heap.h), and by far less than an attack comes to. (What is
// charged and not touched hides as much that is not.)
constexpr int64_t kMaxBesideBytes = int64_t{56} << 20;
// What simulated devices keep of freed memory (core/backend/sim/sim_memory.cc), with what malloc
// has of it.
constexpr int64_t kSimKeptBytes = int64_t{48} << 20;

struct Case {
  const char* attack;
  const char* code;   // with which it is refused at last
  int64_t done_from;  // how often it is not refused
  int64_t done_to;
  bool by_another_uid = false;      // which has a tenant's share for itself
  bool of_a_worker = false;         // a daemon whose devices another process has
  int64_t amount_from = 0;          // what it has brought (report.h)
  bool is_small_all_along = false;  // what the daemon has for it; else it is at the end

  constexpr Case Brings(int64_t bytes) const {
    Case c = *this;
    c.amount_from = bytes;
    return c;
  }
  constexpr Case IsSmallAllAlong() const {
    Case c = *this;
    c.is_small_all_along = true;
    return c;
  }
  // Of requests that never come whole.
  int64_t unread_bytes() const {
    return absl::StartsWith(attack, "halves") ? done_to * server::kUnreadBytes : 0;
  }
};
std::string NameOf(const Case& c) {
  return absl::StrCat(c.attack, c.by_another_uid ? "_by_another_uid" : "",
                      c.of_a_worker ? "_of_a_worker" : "");
}
std::ostream& operator<<(std::ostream& os, const Case& c) { return os << NameOf(c); }

constexpr Case kCases[] = {
    {"zeros", "RESOURCE_EXHAUSTED", 0, 0},
    {"quadratic", "RESOURCE_EXHAUSTED", 2, 2},
    {"graphs", "RESOURCE_EXHAUSTED", 1, 999},
    {"pages", "RESOURCE_EXHAUSTED", 10, kShare >> 22},
    {"gaps", "INVALID_ARGUMENT", 1998, 1998},
    {"names", "INVALID_ARGUMENT", 60000, 60000},
    {"sources", "INVALID_ARGUMENT", 3000, 3000},
    {"epochs", "OK", 10, 10},
    {"tapes", "RESOURCE_EXHAUSTED", 80, 999},
    {"results", "RESOURCE_EXHAUSTED", 10, kShare >> 22},
    {"sessions", "RESOURCE_EXHAUSTED", 10, 35},
    {"worlds", "RESOURCE_EXHAUSTED", 40, 56},
    {"planning", "OK", 4, 4},
    {"sizes", "OK", 40, 40},
    {"steps", "OK", 20, 20},
    // Hours of it, if nothing ended them with the session.
    {"compute", "OK", 4, 4},
    {"queues", "RESOURCE_EXHAUSTED", 2, 400},
    {"unloads", "OK", 6, 6},
    {"strides", "OK", 8, 8},
    {"copies", "OK", 24, 24},
    {"flood", "OK", 20000, 20000},
    {"listing", "OK", 30, 30},
    // Some of these calls, which are read a few at a time, may have had their --read_timeout.
    Case{"halves", "OK", 480, 600}.Brings(480 * server::kUnreadBytes),
    Case{"halves_in_pieces", "OK", 480, 600}.Brings(480 * server::kUnreadBytes),
    Case{"few_empties", "OK", 480, 600}.Brings(480 * 250),
    // Whose connections are ended when so much has come of them.
    Case{"halves_in_bytes", "OK", 0, 0}.Brings(server::kMessagePieces),
    Case{"empties", "OK", 0, 0}.Brings(server::kMaxLaterMessages / 8 * 7 * 5),
    Case{"empties_of_a_frame", "OK", 0, 0}.Brings(server::kMaxLaterMessages / 8 * 7 * 5),
    Case{"empties_in_bytes", "OK", 0, 0}.Brings(2 * server::kMessagePieces),
    Case{"declared", "OK", 0, 0}.Brings(5),
    {"answers", "RESOURCE_EXHAUSTED", 200, 200},
    // By gRPC alone.
    {"messages", "INVALID_ARGUMENT", 600, 600},
    {"large", "INVALID_ARGUMENT", 0, 0},
    {"streams", "RESOURCE_EXHAUSTED", 40, 56},
    // Several times what comes before the daemon reads some.
    {"unread", "INVALID_ARGUMENT", 15000, 52800},
    Case{"compressed", "UNIMPLEMENTED", 0, 0}.IsSmallAllAlong(),
    {"downloads", "RESOURCE_EXHAUSTED", 16, 64},
    {"lists", "INVALID_ARGUMENT", 0, 0},
    // By another tenant.
    {"graphs", "RESOURCE_EXHAUSTED", 1, 999, true},
    {"pages", "RESOURCE_EXHAUSTED", 10, kShare >> 22, true},
    {"sessions", "RESOURCE_EXHAUSTED", 10, 35, true},
    {"worlds", "RESOURCE_EXHAUSTED", 40, 56, true},
    // Which leaves it no calls of its own.
    {"unread_halves", "OK", 32, 32, true},
    {"half_headers", "OK", 224, 500, true},
    // Whose connections are ended.
    {"calls", "OK", 20, 20, true},
    {"unknown_calls", "OK", 20, 20, true},
    {"closed_calls", "OK", 20, 20, true},
    {"pings", "OK", 20, 20, true},
    {"settings", "OK", 20, 20, true},
    {"headers", "OK", 20, 20, true},
    // What goes on to the worker: plans, launches, bytes of tensors.
    {"quadratic", "RESOURCE_EXHAUSTED", 2, 2, false, true},
    {"graphs", "RESOURCE_EXHAUSTED", 1, 999, false, true},
    {"pages", "RESOURCE_EXHAUSTED", 10, kShare >> 22, false, true},
    {"epochs", "OK", 10, 10, false, true},
    {"planning", "OK", 4, 4, false, true},
    {"sizes", "OK", 40, 40, false, true},
    {"steps", "OK", 20, 20, false, true},
    {"compute", "OK", 4, 4, false, true},
    {"queues", "RESOURCE_EXHAUSTED", 2, 400, false, true},
    {"strides", "OK", 8, 8, false, true},
    {"copies", "OK", 24, 24, false, true},
    {"flood", "OK", 20000, 20000, false, true},
    {"downloads", "RESOURCE_EXHAUSTED", 16, 64, false, true},
    {"results", "RESOURCE_EXHAUSTED", 10, kShare >> 22, false, true},
    {"computes", "OK", 4, 4, true, true},
};

// Nobody's; none where this process may not act as another user.
absl::optional<uid_t> AnotherUid() {
  if (geteuid() != 0) return absl::nullopt;
  return 1'000'000'000 + static_cast<uid_t>(getpid());
}

std::vector<std::string> Command(const std::string& address, const Case& c) {
  std::vector<std::string> command = {"tests/hostile/attack", address, c.attack};
  if (c.by_another_uid) command.push_back(absl::StrCat("uid=", *AnotherUid()));
  return command;
}

// Of a line of an attacker's; empty: it has none of this name.
std::string WordOf(const std::string& line, absl::string_view name) {
  const std::string::size_type at = line.find(absl::StrCat(name, "="));
  if (at == std::string::npos) return std::string();
  return std::string(*absl::StrSplit(line.substr(at + name.size() + 1), ' ').begin());
}

// In what such a line is not as the case says; empty: it is.
std::string WhyNot(const Case& c, const std::string& line) {
  const std::string code = WordOf(line, "code");
  if (code != c.code) return absl::StrCat("code: expected ", c.code, ", got ", code);
  const int64_t done = std::atoll(WordOf(line, "done").c_str());
  if (done < c.done_from || done > c.done_to) {
    return absl::StrCat("done: expected ", c.done_from, " to ", c.done_to, ", got ", done);
  }
  const int64_t amount = std::atoll(WordOf(line, "amount").c_str());
  if (amount >= c.amount_from) return "";
  return absl::StrCat("amount: expected at least ", c.amount_from, ", got ", amount);
}

// Of a daemon.
struct Kind {
  const char* name;
  bool with_a_worker = false;
  // Its quotas are those that it has unless told otherwise: what one client may have then is much.
  bool roomy = false;

  int64_t memory_limit() const { return roomy ? int64_t{2} << 30 : kMemoryLimit; }
  int64_t sessions() const { return roomy ? 256 : kSessions; }
};
std::ostream& operator<<(std::ostream& os, const Kind& kind) { return os << kind.name; }

class Beside : public ::testing::Test {
 protected:
  // `cgroup`: the folder of the one that the daemon is alone in; empty: it is among others.
  // `computes`: the honest ones' devices do, too.
  void Start(const Kind& kind, const std::string& cgroup = "", bool computes = false) {
    ASSERT_EQ(chmod(scratch_.path().c_str(), 0711), 0);
    fault::Daemon::Options options;
    options.socket = scratch_.path() + "/chorusd";
    options.log = scratch_.path() + "/chorusd.log";
    options.clock = scratch_.path() + "/clock";
    options.cgroup = cgroup;
    options.flags = {"--host_devices=4", "--socket_mode=0666",
                     absl::StrCat("--memory_limit_bytes=", kind.memory_limit()),
                     // Of sessions without a process, whose things go with it.
                     "--lease=2s",
                     // Of requests that never come, which are waited for.
                     "--read_timeout=2s"};
    if (!kind.roomy) {
      options.flags.insert(options.flags.end(),
                           {absl::StrCat("--max_sessions=", kSessions), "--max_worlds=64"});
    }
    if (kind.with_a_worker) {
      options.flags.insert(options.flags.end(), {"--backend=sim", "--worker_processes"});
    }
    absl::StatusOr<std::unique_ptr<fault::Daemon>> daemon = fault::Daemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status() << "\n" << bench::FileText(options.log);
    daemon_ = *std::move(daemon);
    absl::StatusOr<std::unique_ptr<fault::Trainer>> honest =
        fault::Trainer::Start(scratch_.path() + "/honest.log");
    ASSERT_TRUE(honest.ok()) << honest.status();
    honest_ = *std::move(honest);
    const char* const how = computes ? " honest computes" : " honest";
    ASSERT_TRUE(honest_->Ask(absl::StrCat("pair ", daemon_->address(), how)).ok);
    ExpectHonestOnesGoOn();
  }

  void ExpectHonestOnesGoOn() {
    const fault::Reply reply = honest_->Ask("pair-steps 3");
    EXPECT_TRUE(reply.ok) << reply;
  }
  // Asks until they are as `done` wants them. An attacker of the same user may have all calls and
  // connections that this user may have.
  absl::Status AwaitStats(const std::function<bool(const v1::GetStatsResponse&)>& done) {
    return fault::AskUntil([&]() -> absl::StatusOr<bool> {
      const absl::StatusOr<v1::GetStatsResponse> stats = daemon_->Stats();
      if (stats.ok()) return done(*stats);
      if (absl::IsResourceExhausted(stats.status()) || absl::IsUnavailable(stats.status()) ||
          absl::IsDeadlineExceeded(stats.status())) {
        return false;
      }
      return stats.status();
    });
  }
  // Of all that the node thread has done so far.
  void ExpectSmallSlices() {
    int64_t largest = 0;
    const absl::Status told = AwaitStats([&](const v1::GetStatsResponse& stats) {
      largest = stats.largest_slice_work();
      return true;
    });
    ASSERT_TRUE(told.ok()) << told;
    std::cout << "largest_slice_work=" << largest << std::endl;
    EXPECT_GT(largest, 0);
    EXPECT_LE(largest, kMaxSliceWork);
  }
  struct Resident {
    int64_t daemon = 0;
    int64_t worker = 0;
  };
  absl::StatusOr<Resident> ResidentBytes() {
    Resident bytes;
    CHORUS_ASSIGN_OR_RETURN(bytes.daemon, bench::ResidentBytesOf(daemon_->pid()));
    for (const pid_t pid : bench::ChildrenOf(daemon_->pid())) {
      CHORUS_ASSIGN_OR_RETURN(const int64_t of_child, bench::ResidentBytesOf(pid));
      bytes.worker += of_child;
    }
    return bytes;
  }
  static int64_t InUse(const v1::GetStatsResponse& stats) {
    return stats.memory_used_bytes() - stats.idle_bytes();
  }
  // More than a little: the honest ones' own goes up and down.
  void ExpectNothingLeft(const v1::GetStatsResponse& before) {
    v1::GetStatsResponse left;
    const absl::Status back = AwaitStats([&](const v1::GetStatsResponse& stats) {
      left = stats;
      return InUse(left) <= InUse(before) + (1 << 20);
    });
    EXPECT_TRUE(back.ok()) << back << ", " << InUse(before) << " in use before, now "
                           << left.DebugString();
  }

  bench::ScratchDirectory scratch_;
  std::unique_ptr<fault::Daemon> daemon_;
  std::unique_ptr<fault::Trainer> honest_;
};
class HostileTest : public Beside, public ::testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    const absl::string_view attack = GetParam().attack;
    Start({"", GetParam().of_a_worker}, /*cgroup=*/"", /*computes=*/attack == "computes");
  }
};
class MixedTest : public Beside, public ::testing::WithParamInterface<Kind> {
 protected:
  struct InMixture {
    bench::Process process;
    Case what{};
    std::string log;
  };

  void SetUp() override { Start(GetParam()); }

  std::string LogOf(uint64_t slot) const {
    return absl::StrCat(scratch_.path(), "/attack", slot, ".log");
  }
  static std::string NamesOf(const std::vector<InMixture>& attackers) {
    return absl::StrJoin(attackers, ", ", [](std::string* out, const InMixture& attacker) {
      absl::StrAppend(out, attacker.process.running() ? NameOf(attacker.what) : "nobody");
    });
  }
  // That one that was begun goes on, and was let in, as far as it has come. A round beside others
  // may end with whatever they leave to it.
  void ExpectAttacks(InMixture* attacker) {
    if (!attacker->process.running()) return;
    const absl::StatusOr<int> end = attacker->process.Wait(0);
    const std::string log = bench::FileText(attacker->log);
    EXPECT_TRUE(absl::IsDeadlineExceeded(end.status()))
        << NameOf(attacker->what) << " ended with " << end.value_or(-1) << ": " << log;
    for (const char* code : {"PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED"}) {
      EXPECT_FALSE(absl::StrContains(log, absl::StrCat("failed=", code)))
          << NameOf(attacker->what) << ": " << log;
    }
    if (absl::StrContains(log, "code=")) ++rounds_[NameOf(attacker->what)];
  }
  // Begins `what` in this slot, whose log is its own. Returns when it has been let in and attacks,
  // or has been refused that, as beside others it may be. The honest ones go on, and do so from
  // then on.
  void Begin(uint64_t slot, const Case& what, InMixture* attacker) {
    attacker->process = bench::Process();  // before the next one begins to write
    std::remove(LogOf(slot).c_str());
    std::vector<std::string> command = Command(daemon_->address(), what);
    command.push_back("rounds");
    bench::Process::Options options;
    options.log = LogOf(slot);
    absl::StatusOr<bench::Process> started = bench::Process::Start(command, options);
    ASSERT_TRUE(started.ok()) << started.status();
    *attacker = {*std::move(started), what, options.log};
    const absl::Status told = fault::AskUntil([&]() -> absl::StatusOr<bool> {
      ExpectHonestOnesGoOn();
      return absl::StrContains(bench::FileText(options.log), "\n");
    });
    ASSERT_TRUE(told.ok()) << NameOf(what) << " has not begun: " << told;
  }
  // That a round which begins with nobody but the honest ones beside it ends as the case says.
  void ExpectRoundAlone(uint64_t slot, InMixture* attacker) {
    ASSERT_NO_FATAL_FAILURE(Begin(slot, attacker->what, attacker));
    std::string log;
    const absl::Status told = fault::AskUntil([&]() -> absl::StatusOr<bool> {
      ExpectHonestOnesGoOn();
      log = bench::FileText(attacker->log);
      for (const absl::string_view line : absl::StrSplit(log, '\n')) {
        if (WhyNot(attacker->what, std::string(line)).empty()) return true;
      }
      return false;
    });
    EXPECT_TRUE(told.ok()) << NameOf(attacker->what) << ": " << told << ", " << log;
  }
  // With usual quotas it takes long to have all that one may have.
  static bool TakesLong(const Case& c) {
    return GetParam().roomy && absl::string_view(c.code) == "RESOURCE_EXHAUSTED";
  }

  std::map<std::string, int> begun_;   // by attack
  std::map<std::string, int> rounds_;  // of these, those that had time for a round
};

TEST_P(HostileTest, AsksForTooMuch) {
  if (GetParam().by_another_uid && !AnotherUid().has_value()) {
    GTEST_SKIP() << "uid " << geteuid() << " cannot act as another user";
  }
  const auto before = daemon_->Stats();
  ASSERT_TRUE(before.ok()) << before.status();
  const absl::StatusOr<Resident> resident_before = ResidentBytes();
  ASSERT_TRUE(resident_before.ok()) << resident_before.status();
  EXPECT_GT(resident_before->daemon, 0);
  const absl::StatusOr<int64_t> peak_before = bench::PeakResidentBytesOf(daemon_->pid());
  ASSERT_TRUE(peak_before.ok()) << peak_before.status();
  EXPECT_EQ(resident_before->worker > 0, GetParam().of_a_worker);
  const std::string log = scratch_.path() + "/attack.log";
  bench::Process::Options options;
  options.log = log;
  absl::StatusOr<bench::Process> attacker =
      bench::Process::Start(Command(daemon_->address(), GetParam()), options);
  ASSERT_TRUE(attacker.ok()) << attacker.status();
  const absl::Status told = fault::AskUntil([&]() -> absl::StatusOr<bool> {
    ExpectHonestOnesGoOn();
    return absl::EndsWith(bench::FileText(log), "\n");
  });
  const std::string report = bench::FileText(log);
  std::cout << GetParam().attack << ": " << report;
  ASSERT_TRUE(told.ok()) << told << "\n";

  // It still has what it got.
  ExpectHonestOnesGoOn();
  // What was freed is given back a while later.
  std::string memory;
  const absl::Status is_small = AwaitStats([&](const v1::GetStatsResponse& stats) {
    EXPECT_LE(stats.memory_used_bytes(), GetParam().by_another_uid ? kMemoryLimit : kShare);
    const absl::StatusOr<Resident> resident = ResidentBytes();
    if (!resident.ok()) {
      ADD_FAILURE() << resident.status();
      return true;
    }
    const int64_t of_daemon = resident->daemon - resident_before->daemon;
    const int64_t of_worker = resident->worker - resident_before->worker;
    const int64_t charged = stats.memory_used_bytes() - before->memory_used_bytes();
    memory = absl::StrCat(charged, " bytes charged, ", of_daemon, " in memory, that is ",
                          of_daemon - charged, " beside; ", of_worker, " of the worker's");
    const int64_t most = charged + kMaxBesideBytes + GetParam().unread_bytes();
    return bench::kSanitized ||
           (of_daemon <= most && of_daemon + of_worker <= most + kSimKeptBytes);
  });
  std::cout << GetParam().attack << ": " << memory << std::endl;
  EXPECT_TRUE(is_small.ok()) << is_small << ", " << memory;
  EXPECT_EQ(WhyNot(GetParam(), report), "") << report;
  if (GetParam().is_small_all_along) {
    const absl::StatusOr<int64_t> peak = bench::PeakResidentBytesOf(daemon_->pid());
    ASSERT_TRUE(peak.ok()) << peak.status();
    EXPECT_LE(*peak - *peak_before, kMaxBesideBytes);
  }

  attacker->Signal(SIGKILL);
  ExpectNothingLeft(*before);
  ExpectSmallSlices();
  const fault::Reply stopped = honest_->Ask("pair-stop");
  EXPECT_TRUE(stopped.ok) << stopped;
  EXPECT_GT(stopped.number("done"), 0);
  EXPECT_TRUE(daemon_->Lives());
}

INSTANTIATE_TEST_SUITE_P(Attacks, HostileTest, ::testing::ValuesIn(kCases),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return NameOf(info.param);
                         });

// CHORUS_HOSTILE_SECONDS: for how long; an hour before an issue is resolved that is about them.
TEST_P(MixedTest, AttacksOfAllKindsAtATime) {
  const char* const given = std::getenv("CHORUS_HOSTILE_SECONDS");
  int64_t seconds = std::getenv("CHORUS_LONG") != nullptr ? 300 : 2;
  if (given != nullptr) seconds = std::atoll(given);
  const char* const seed_given = std::getenv("CHORUS_TEST_SEED");
  const uint64_t seed =
      seed_given != nullptr ? std::strtoull(seed_given, nullptr, 10) : std::random_device()();
  std::cout << "CHORUS_TEST_SEED=" << seed << ", " << seconds << " s" << std::endl;
  std::mt19937_64 random(seed);
  const auto before = daemon_->Stats();
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_EQ(bench::ChildrenOf(daemon_->pid()).size(), GetParam().with_a_worker ? 1u : 0u);
  const auto cgroup = OwnCgroup::Of(daemon_->pid());
  // Several of the honest ones' own user may leave them nothing of its share, not even for a name.
  const size_t at_a_time = AnotherUid().has_value() ? 3 : 1;
  std::vector<InMixture> attackers(at_a_time);
  const absl::Time end = absl::Now() + absl::Seconds(seconds);
  while (absl::Now() < end) {
    Case next = kCases[random() % std::size(kCases)];
    if (next.by_another_uid && !AnotherUid().has_value()) continue;
    if (next.of_a_worker != GetParam().with_a_worker) continue;
    next.by_another_uid = AnotherUid().has_value();
    ++begun_[NameOf(next)];
    const uint64_t slot = random() % at_a_time;
    InMixture& attacker = attackers[slot];
    ExpectAttacks(&attacker);
    ASSERT_NO_FATAL_FAILURE(Begin(slot, next, &attacker));
    // Three rounds at a time, of which the first alone may have begun before.
    for (uint64_t steps = 1 + random() % 8; steps > 0; --steps) ExpectHonestOnesGoOn();
    if (HasFailure()) break;
    v1::GetStatsResponse during;
    const absl::Status told = AwaitStats([&](const v1::GetStatsResponse& stats) {
      during = stats;
      return true;
    });
    ASSERT_TRUE(told.ok()) << told;
    ASSERT_LE(during.memory_used_bytes(), GetParam().memory_limit());
    if (!cgroup.ok() || bench::kSanitized) continue;
    const absl::StatusOr<int64_t> peak = (*cgroup)->PeakBytes();
    ASSERT_TRUE(peak.ok()) << peak.status();
    ASSERT_LE(*peak, GetParam().memory_limit() + server::kOwnBytes +
                         GetParam().sessions() * server::kSessionOwnBytes)
        << "beside " << NamesOf(attackers);
  }
  absl::optional<uint64_t> last;
  for (uint64_t slot = 0; slot < at_a_time; ++slot) {
    ExpectAttacks(&attackers[slot]);
    if (attackers[slot].process.running() && !TakesLong(attackers[slot].what)) last = slot;
  }
  for (InMixture& attacker : attackers) attacker.process = bench::Process();
  if (last.has_value() && !HasFailure()) ExpectRoundAlone(*last, &attackers[*last]);
  attackers.clear();
  for (const auto& [attack, times] : begun_) {
    std::cout << attack << " " << times << " (" << rounds_[attack] << ")  ";
  }
  std::cout << std::endl;
  ExpectNothingLeft(*before);
  ExpectSmallSlices();
  if (cgroup.ok()) {
    std::cout << "peak of the daemon's cgroup: " << (*cgroup)->PeakBytes().value_or(-1) << " bytes"
              << std::endl;
  }
  const fault::Reply stopped = honest_->Ask("pair-stop");
  EXPECT_TRUE(stopped.ok) << stopped;
  EXPECT_TRUE(daemon_->Lives());
  // What has failed above stays a failure.
  if (bench::kSanitized) {
    GTEST_SKIP() << "all but the daemon's memory is checked: a sanitizer keeps what is freed";
  }
  if (!cgroup.ok()) {
    GTEST_SKIP() << "all but the daemon's memory is checked: " << cgroup.status().message();
  }
}

// What no account has is looked at where the daemon has a cgroup for itself.
class AloneTest : public Beside, public ::testing::WithParamInterface<Kind> {
 protected:
  void SetUp() override {
    if (!AnotherUid().has_value()) {
      GTEST_SKIP() << "uid " << geteuid() << " cannot act as another user";
    }
    if (bench::kSanitized) GTEST_SKIP() << "a sanitizer keeps what is freed";
    absl::StatusOr<std::unique_ptr<OwnCgroup>> cgroup = OwnCgroup::Make();
    if (!cgroup.ok()) GTEST_SKIP() << cgroup.status().message();
    cgroup_ = *std::move(cgroup);
    Start(GetParam(), cgroup_->folder());
  }
  void TearDown() override { daemon_.reset(); }  // before its cgroup

  std::unique_ptr<OwnCgroup> cgroup_;
};

TEST_P(AloneTest, PagesThatNobodySeesAreRefusedBeforeTheDaemonHasMoreThanItMay) {
  const auto before = daemon_->Stats();
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_THAT(bench::FileText(scratch_.path() + "/chorusd.log"),
              ::testing::HasSubstr("memory guard: on"));
  const Case splices{"splices", "RESOURCE_EXHAUSTED", 10, 999, /*by_another_uid=*/true};
  // When the first is gone, so are its pages.
  for (const char* which : {"first", "second"}) {
    SCOPED_TRACE(which);
    const std::string log = absl::StrCat(scratch_.path(), "/", which, ".log");
    bench::Process::Options options;
    options.log = log;
    absl::StatusOr<bench::Process> attacker =
        bench::Process::Start(Command(daemon_->address(), splices), options);
    ASSERT_TRUE(attacker.ok()) << attacker.status();
    const absl::Status told = fault::AskUntil([&]() -> absl::StatusOr<bool> {
      ExpectHonestOnesGoOn();
      return absl::EndsWith(bench::FileText(log), "\n");
    });
    const std::string report = bench::FileText(log);
    std::cout << "splices: " << report;
    ASSERT_TRUE(told.ok()) << told;
    const absl::StatusOr<int64_t> peak = cgroup_->PeakBytes();
    ASSERT_TRUE(peak.ok()) << peak.status();
    std::cout << "peak of the daemon's cgroup: " << *peak << " bytes" << std::endl;
    EXPECT_LE(*peak, GetParam().memory_limit() + server::kOwnBytes +
                         GetParam().sessions() * server::kSessionOwnBytes);
    EXPECT_EQ(WhyNot(splices.Brings(kMemoryLimit / 2), report), "") << report;
    EXPECT_THAT(report, ::testing::HasSubstr("in no account"));
    // It still has what it got.
    ExpectHonestOnesGoOn();
    attacker->Signal(SIGKILL);
    ASSERT_TRUE(attacker->Wait(absl::ToInt64Nanoseconds(fault::kPatience)).ok());
    ExpectNothingLeft(*before);
  }
  ExpectSmallSlices();
  const fault::Reply stopped = honest_->Ask("pair-stop");
  EXPECT_TRUE(stopped.ok) << stopped;
  EXPECT_TRUE(daemon_->Lives());
}

INSTANTIATE_TEST_SUITE_P(Daemons, AloneTest,
                         ::testing::Values(Kind{"OfItsOwnDevices"}, Kind{"OfAWorker", true}),
                         [](const ::testing::TestParamInfo<Kind>& info) {
                           return info.param.name;
                         });

// With the usual quotas it takes long to have all that one may have: that one is for hours, and
// for --long.
std::vector<Kind> Kinds() {
  std::vector<Kind> kinds = {{"OfItsOwnDevices"}, {"OfAWorker", true}};
  if (std::getenv("CHORUS_LONG") != nullptr || std::getenv("CHORUS_HOSTILE_SECONDS") != nullptr) {
    kinds.push_back({"WithTheUsualQuotas", false, true});
  }
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(Daemons, MixedTest, ::testing::ValuesIn(Kinds()),
                         [](const ::testing::TestParamInfo<Kind>& info) {
                           return info.param.name;
                         });

}  // namespace
}  // namespace hostile
}  // namespace chorus
