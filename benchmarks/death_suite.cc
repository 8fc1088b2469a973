#include <algorithm>

#include "absl/strings/str_cat.h"
#include "benchmarks/suites.h"
#include "benchmarks/trainer.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

struct Death {
  double known_to_kernel = 0;  // from the signal to the end of the process, as a pidfd tells
  std::vector<double> known_to_ranks;  // from the signal to each survivor's error
};

// The last rank is late, the one before it is killed while it waits with the others.
absl::StatusOr<Death> KillOne(Job* job) {
  HelperGroup& ranks = job->helpers();
  const int victim = job->ranks() - 2;
  const int late = job->ranks() - 1;
  Task task;
  task.op = "await_failure";
  for (int i = 0; i < late; ++i) CHORUS_RETURN_IF_ERROR(ranks.Send(i, task));
  // Long enough for all of them to be asleep.
  Pause(3000000);
  const std::string expected = FailureText("PEER_DIED", victim, ranks.pid(victim));
  const int64_t killed = NowNanos();
  ranks.Kill(victim);
  Death death;
  death.known_to_kernel = static_cast<double>(NowNanos() - killed);
  for (int i = 0; i <= late; ++i) {
    if (i == victim) continue;
    // A rank that asks afterwards is told the same.
    if (i == late) CHORUS_RETURN_IF_ERROR(ranks.Send(i, task));
    CHORUS_ASSIGN_OR_RETURN(Outcome outcome, ranks.Receive(i));
    CHORUS_RETURN_IF_ERROR(outcome.status);
    if (outcome.text != expected) {
      return absl::DataLossError(
          absl::StrCat("rank ", i, " was told ", outcome.text, ", expected ", expected));
    }
    if (i != late) death.known_to_ranks.push_back(static_cast<double>(outcome.end_ns - killed));
  }
  CHORUS_RETURN_IF_ERROR(job->JoinAnew());
  return death;
}

absl::Status MeasureDeaths(const Context& context, Job* job) {
  const int rounds = context.effort == Effort::kSmoke ? 1 : 5;
  const int deaths = context.effort == Effort::kSmoke   ? 1
                     : context.effort == Effort::kQuick ? 5
                                                        : 40;
  Measured ours;
  ours.name = "chorus";
  ours.role = Role::kOurs;
  ours.iterations = deaths;
  Measured kernel;
  kernel.name = "the process's end";
  kernel.role = Role::kFloor;
  kernel.setting = "pidfd";
  kernel.iterations = deaths;
  std::vector<RoundStats> our_rounds;
  std::vector<RoundStats> kernel_rounds;
  for (int round = 0; round < rounds; ++round) {
    std::vector<double> our_samples;
    std::vector<double> kernel_samples;
    for (int i = 0; i < deaths; ++i) {
      CHORUS_ASSIGN_OR_RETURN(const Death death, KillOne(job));
      our_samples.insert(our_samples.end(), death.known_to_ranks.begin(),
                         death.known_to_ranks.end());
      kernel_samples.push_back(death.known_to_kernel);
    }
    our_rounds.push_back(StatsOf(std::move(our_samples)));
    kernel_rounds.push_back(StatsOf(std::move(kernel_samples)));
  }
  ours.summary = Summarize(std::move(our_rounds));
  kernel.summary = Summarize(std::move(kernel_rounds));
  Goal goal;
  goal.what = absl::StrCat("death: ", job->ranks(), " ranks, kill -9 to the others' error, p99");
  goal.limit = 10;
  goal.value = ours.summary.p99 / 1e6;
  goal.unit = " ms";
  context.report->AddGoal(goal);
  Case c;
  c.benchmark = "death";
  c.what = "kill -9 to the others' error";
  c.ranks = job->ranks();
  context.report->Add(c, {std::move(ours), std::move(kernel)});
  context.Show();
  return absl::OkStatus();
}

// Processor time that a daemon and its clients take while nobody asks for anything.
absl::Status MeasureIdle(const Context& context, const Daemon& daemon, Job* job) {
  const int64_t span = context.effort == Effort::kSmoke ? 20000000 : 2000000000;
  // What they still have to do is done by then.
  Pause(span / 10);
  const auto sessions_cpu = [job]() -> absl::StatusOr<int64_t> {
    int64_t sum = 0;
    for (int i = 0; i < job->ranks(); ++i) {
      CHORUS_ASSIGN_OR_RETURN(const int64_t cpu, CpuNanosOf(job->helpers().pid(i)));
      sum += cpu;
    }
    return sum;
  };
  CHORUS_ASSIGN_OR_RETURN(const int64_t daemon_before, CpuNanosOf(daemon.pid()));
  CHORUS_ASSIGN_OR_RETURN(const int64_t sessions_before, sessions_cpu());
  Pause(span);
  CHORUS_ASSIGN_OR_RETURN(const int64_t daemon_after, CpuNanosOf(daemon.pid()));
  CHORUS_ASSIGN_OR_RETURN(const int64_t sessions_after, sessions_cpu());
  Goal goal;
  goal.limit = 0.1;
  goal.unit = " %";
  goal.what = absl::StrCat("idle: processor time of a daemon with ", job->ranks(), " sessions");
  goal.value = 100 * static_cast<double>(daemon_after - daemon_before) / span;
  context.report->AddGoal(goal);
  goal.what = absl::StrCat("idle: processor time of ", job->ranks(), " sessions together");
  goal.value = 100 * static_cast<double>(sessions_after - sessions_before) / span;
  context.report->AddGoal(goal);
  return absl::OkStatus();
}

}  // namespace

absl::Status RunDeath(const Context& context) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Daemon> daemon, context.StartDaemon());
  for (const int ranks : context.ranks) {
    // A survivor that waits, a victim, a late one.
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Job> job,
                            Job::Start(*context.scratch, *daemon, std::max(3, ranks)));
    CHORUS_RETURN_IF_ERROR(MeasureDeaths(context, job.get()));
    CHORUS_RETURN_IF_ERROR(MeasureIdle(context, *daemon, job.get()));
  }
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
