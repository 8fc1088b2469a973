#include <signal.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "benchmarks/burner.h"
#include "benchmarks/suites.h"
#include "benchmarks/trainer.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

// A pair, and somebody beside them who stands still between the rounds.
struct Beside {
  WorkingPair pair;
  Process other;
};

// Starts the attack, and says for what part of the time it keeps processors busy: its own process
// one, the daemon's node thread and what works for it others.
absl::StatusOr<std::vector<double>> StartAttack(const Context& context, const std::string& attack,
                                                Beside* beside) {
  const int64_t span = context.effort == Effort::kSmoke ? 50000000 : 1000000000;
  CHORUS_ASSIGN_OR_RETURN(
      beside->other,
      Process::Start({context.attack_program, beside->pair.daemon->address(), attack, "again"},
                     {}));
  Pause(span / 2);  // it has begun
  const pid_t pids[] = {beside->other.pid(), beside->pair.daemon->pid()};
  int64_t used[2];
  for (int i = 0; i < 2; ++i) {
    CHORUS_ASSIGN_OR_RETURN(used[i], CpuNanosOf(pids[i]));
  }
  const int64_t begun = NowNanos();
  Pause(span);
  const double took = static_cast<double>(NowNanos() - begun);
  double busy[2];
  for (int i = 0; i < 2; ++i) {
    CHORUS_ASSIGN_OR_RETURN(const int64_t now, CpuNanosOf(pids[i]));
    busy[i] = static_cast<double>(now - used[i]) / took;
  }
  beside->other.Stop();
  return std::vector<double>{std::min(1.0, busy[0]), std::min(1.0, busy[1]),
                             std::min(1.0, std::max(0.0, busy[1] - 1))};
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
  CHORUS_ASSIGN_OR_RETURN(const std::vector<double> busy, StartAttack(context, attack, &attacked));
  CHORUS_ASSIGN_OR_RETURN(left_alone.other, StartBurner(busy));
  left_alone.other.Stop();
  const std::vector<Contender> contenders = {
      WithOther("beside " + attack, Role::kOurs, attacked),
      WithOther(absl::StrCat("beside who burns ",
                             absl::StrJoin(busy, "+",
                                           [](std::string* out, double part) {
                                             absl::StrAppend(out,
                                                             static_cast<int>(100 * part + 0.5));
                                           }),
                             " %"),
                Role::kFloor, left_alone)};
  CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured,
                          MeasureInterleaved(contenders, context.Interleave()));
  for (const bool worst : {false, true}) {
    Goal goal;
    goal.what = absl::StrCat("hostile, ", attack, ": ", worst ? "longest of a round" : "p99",
                             " over that beside who burns as much");
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
  std::vector<std::string> attacks = {"planning", "sizes", "steps",  "strides", "flood",
                                      "listing",  "names", "graphs", "sessions"};
  if (context.effort == Effort::kSmoke) attacks = {"flood", "planning"};
  if (!context.ops.empty()) attacks = context.ops;
  for (const std::string& attack : attacks) {
    CHORUS_RETURN_IF_ERROR(MeasureBeside(context, attack));
  }
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
