#include <signal.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "benchmarks/burner.h"
#include "benchmarks/suites.h"
#include "benchmarks/trainer.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

// A sleep is not shorter than what going to sleep and waking takes.
constexpr int64_t kShortestPeriod = 50000;
constexpr int64_t kLongestPeriod = 20000000;
// How long an attack may take until it is let in.
constexpr int64_t kLetIn = 10000000000;

// A pair, and a process beside them that stands still between the rounds.
struct Beside {
  ScratchDirectory scratch;
  WorkingPair pair;
  Process other;

  std::string log() const { return scratch.path() + "/other.log"; }  // what it says
};

// Of a process, by now.
struct Used {
  int64_t cpu_ns = 0;
  int64_t sleeps = 0;
};

absl::StatusOr<Used> UsedBy(pid_t pid) {
  Used used;
  CHORUS_ASSIGN_OR_RETURN(used.cpu_ns, CpuNanosOf(pid));
  CHORUS_ASSIGN_OR_RETURN(used.sleeps, SleepsOf(pid));
  return used;
}

// That it was let in, goes on, and was refused nothing but what its rounds end with: a pair beside
// a process that does nothing has no trouble.
absl::Status CheckAttacks(const std::string& attack, Beside* beside) {
  const std::string said = FileText(beside->log());
  const bool runs = absl::IsDeadlineExceeded(beside->other.Wait(0).status());
  if (runs && !said.empty() && !absl::StrContains(said, "failed=")) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("the attack ", attack, runs ? " does not attack: " : " has ended: ", said));
}

// Starts the attack, and says what burns as much: its own process one processor, the daemon's node
// thread and what works for it others, each in pieces as short as theirs.
absl::StatusOr<std::vector<Burn>> StartAttack(const Context& context, const std::string& attack,
                                              Beside* beside) {
  const int64_t span = context.effort == Effort::kSmoke ? 50000000 : 1000000000;
  Process::Options options;
  options.log = beside->log();
  CHORUS_ASSIGN_OR_RETURN(
      beside->other,
      Process::Start({context.attack_program, beside->pair.daemon->address(), attack, "rounds"},
                     options));
  const int64_t deadline = NowNanos() + kLetIn;
  while (FileText(beside->log()).empty() && NowNanos() < deadline) Pause(span / 50);
  Pause(span / 2);  // its first round is under way
  CHORUS_RETURN_IF_ERROR(CheckAttacks(attack, beside));
  const pid_t pids[] = {beside->other.pid(), beside->pair.daemon->pid()};
  Used before[2];
  for (int i = 0; i < 2; ++i) {
    CHORUS_ASSIGN_OR_RETURN(before[i], UsedBy(pids[i]));
  }
  const int64_t begun = NowNanos();
  Pause(span);
  const int64_t took = NowNanos() - begun;
  std::vector<Burn> burns;
  for (int i = 0; i < 2; ++i) {
    CHORUS_ASSIGN_OR_RETURN(const Used after, UsedBy(pids[i]));
    double busy = static_cast<double>(after.cpu_ns - before[i].cpu_ns) / static_cast<double>(took);
    Burn burn;
    burn.period_ns = std::min(
        kLongestPeriod,
        std::max(kShortestPeriod, took / std::max<int64_t>(1, after.sleeps - before[i].sleeps)));
    for (; busy > 0; --busy) {
      burn.part = std::min(1.0, busy);
      burns.push_back(burn);
    }
  }
  beside->other.Stop();
  return burns;
}

Contender WithOther(const std::string& name, Role role, const Beside& beside) {
  const auto run = [&beside](int64_t iterations) {
    beside.other.Signal(SIGCONT);
    auto samples = RunJob(beside.pair.job.get(), WorkingPair::SmallAllReduce(), iterations);
    beside.other.Stop();
    return samples;
  };
  return {name, role, {{"ring", run}}};
}

// The longest of each round: of their median.
double WorstOf(const Measured& measured) {
  std::vector<double> longest;
  for (const RoundStats& round : measured.summary.rounds) longest.push_back(round.max);
  return Percentile(&longest, 0.5);
}

absl::Status MeasureBeside(const Context& context, const std::string& attack) {
  Beside attacked;
  Beside left_alone;
  for (Beside* beside : {&attacked, &left_alone}) {
    CHORUS_ASSIGN_OR_RETURN(beside->pair, WorkingPair::Start(context));
  }
  CHORUS_ASSIGN_OR_RETURN(const std::vector<Burn> burns, StartAttack(context, attack, &attacked));
  CHORUS_ASSIGN_OR_RETURN(left_alone.other, StartBurner(burns));
  left_alone.other.Stop();
  const std::vector<Contender> contenders = {
      WithOther("beside " + attack, Role::kOurs, attacked),
      WithOther(absl::StrCat("beside a process that burns ",
                             absl::StrJoin(burns, ", ",
                                           [](std::string* out, const Burn& burn) {
                                             absl::StrAppend(
                                                 out, static_cast<int>(100 * burn.part + 0.5),
                                                 " % of ", burn.period_ns / 1000, " us");
                                           })),
                Role::kFloor, left_alone)};
  CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured,
                          MeasureInterleaved(contenders, context.Interleave()));
  CHORUS_RETURN_IF_ERROR(CheckAttacks(attack, &attacked));
  for (const bool worst : {false, true}) {
    Goal goal;
    goal.what = absl::StrCat("hostile, ", attack, ": ", worst ? "longest of a round" : "p99",
                             " over that beside a process that burns as much");
    goal.limit = 3;
    goal.value = worst ? WorstOf(measured[0]) / WorstOf(measured[1])
                       : measured[0].summary.p99 / measured[1].summary.p99;
    goal.unit = "x";
    context.report->AddGoal(goal);
  }
  Case c;
  c.benchmark = "hostile";
  c.what = "all_reduce beside " + attack;
  c.ranks = WorkingPair::kRanks;
  c.bytes = WorkingPair::SmallAllReduce().bytes;
  context.report->Add(c, std::move(measured));
  context.Show();
  return absl::OkStatus();
}

}  // namespace

absl::Status RunHostile(const Context& context) {
  if (context.attack_program.empty()) {
    return absl::InvalidArgumentError("--attack: expected the program that attacks, got nothing");
  }
  std::vector<std::string> attacks = {"planning", "sizes", "steps", "strides", "copies", "flood",
                                      "listing", "names", "graphs", "sessions", "epochs", "tapes",
                                      "results", "compute",
                                      // By gRPC alone.
                                      "messages", "large", "lists", "downloads"};
  if (context.effort == Effort::kSmoke) attacks = {"flood", "planning"};
  if (!context.ops.empty()) attacks = context.ops;
  for (const std::string& attack : attacks) {
    CHORUS_RETURN_IF_ERROR(MeasureBeside(context, attack));
  }
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
