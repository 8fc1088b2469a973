#include "absl/strings/str_cat.h"
#include "benchmarks/idle_sessions.h"
#include "benchmarks/suites.h"
#include "benchmarks/trainer.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

// A pair beside so many sessions that do nothing.
struct Neighbours {
  int sessions = 0;
  WorkingPair pair;
  std::unique_ptr<IdleSessions> idle;
};

std::string Beside(int sessions) { return absl::StrCat("sessions: ", sessions, " idle, "); }

// Also counts the memory that they take.
absl::StatusOr<Neighbours> StartBeside(const Context& context, int sessions) {
  Neighbours n;
  n.sessions = sessions;
  CHORUS_ASSIGN_OR_RETURN(
      n.pair, WorkingPair::Start(context, {"--max_sessions=2048", "--max_connections=4096"}));
  CHORUS_ASSIGN_OR_RETURN(n.idle, IdleSessions::Start(*n.pair.scratch, *n.pair.daemon));
  if (sessions == 0) return n;
  CHORUS_ASSIGN_OR_RETURN(const int64_t before, ResidentBytesOf(n.pair.daemon->pid()));
  CHORUS_ASSIGN_OR_RETURN(std::vector<double> opening, n.idle->Open(sessions));
  CHORUS_ASSIGN_OR_RETURN(const int64_t after, ResidentBytesOf(n.pair.daemon->pid()));
  Goal goal;
  goal.what = Beside(sessions) + "memory of the daemon for each";
  goal.limit = 64;
  goal.value = static_cast<double>(after - before) / 1024 / sessions;
  goal.unit = " KiB";
  context.report->AddGoal(goal);
  Measured open;
  open.name = "chorus";
  open.role = Role::kOurs;
  open.iterations = sessions;
  open.summary = Summarize({StatsOf(std::move(opening))});
  Case c;
  c.benchmark = "sessions";
  c.what = absl::StrCat("open a session, ", sessions, " of them");
  context.report->Add(c, {std::move(open)});
  return n;
}

absl::Status MeasureIdle(const Context& context, const std::vector<Neighbours>& all) {
  const int64_t span = context.effort == Effort::kSmoke ? 20000000 : 2000000000;
  // What they still have to do is done by then.
  Pause(span / 10);
  std::vector<int64_t> before;
  for (const Neighbours& n : all) {
    for (const pid_t pid : {n.pair.daemon->pid(), n.idle->pid()}) {
      CHORUS_ASSIGN_OR_RETURN(const int64_t cpu, CpuNanosOf(pid));
      before.push_back(cpu);
    }
  }
  Pause(span);
  auto then = before.begin();
  for (const Neighbours& n : all) {
    Goal goal;
    goal.limit = 0.1;
    goal.unit = " %";
    CHORUS_ASSIGN_OR_RETURN(const int64_t daemon, CpuNanosOf(n.pair.daemon->pid()));
    goal.what = Beside(n.sessions) + "processor time of the daemon";
    goal.value = 100 * static_cast<double>(daemon - *then++) / span;
    context.report->AddGoal(goal);
    CHORUS_ASSIGN_OR_RETURN(const int64_t sessions, CpuNanosOf(n.idle->pid()));
    goal.what = Beside(n.sessions) + "processor time of all of them together";
    goal.value = 100 * static_cast<double>(sessions - *then++) / span;
    context.report->AddGoal(goal);
  }
  return absl::OkStatus();
}

absl::Status MeasureSmall(const Context& context, const std::vector<Neighbours>& all) {
  std::vector<Contender> contenders;
  for (const Neighbours& n : all) {
    Job* const job = n.pair.job.get();
    const auto run = [job](int64_t iterations) {
      return RunJob(job, WorkingPair::SmallAllReduce(), iterations);
    };
    contenders.push_back({absl::StrCat("beside ", n.sessions, " idle sessions"),
                          n.sessions == 0 ? Role::kFloor : Role::kOurs,
                          {{"ring", run}}});
  }
  CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured,
                          MeasureInterleaved(contenders, context.Interleave()));
  const Plots::Which plot = {"sessions", "all_reduce of 4 B beside idle sessions, 2 ranks",
                             Plots::Along::kSessions, Plots::Value::kTime};
  for (size_t i = 1; i < all.size(); ++i) {
    // A log axis has no 0: beside none is a line of its own.
    for (const size_t one : {i, size_t{0}}) {
      const std::string beside = one == 0 ? ", beside none" : "";
      context.plots->AddPoint(plot, "p50" + beside, all[i].sessions, measured[one].summary.p50);
      context.plots->AddPoint(plot, "p99" + beside, all[i].sessions, measured[one].summary.p99);
    }
    Goal goal;
    goal.what = Beside(all[i].sessions) + "p99 of a small all_reduce over that beside none";
    goal.limit = 1.3;
    goal.value = measured[i].summary.p99 / measured[0].summary.p99;
    goal.unit = "x";
    context.report->AddGoal(goal);
  }
  Case c;
  c.benchmark = "sessions";
  c.what = "all_reduce";
  c.ranks = WorkingPair::kRanks;
  c.bytes = WorkingPair::SmallAllReduce().bytes;
  context.report->Add(c, std::move(measured));
  context.Show();
  return absl::OkStatus();
}

}  // namespace

absl::Status RunSessions(const Context& context) {
  std::vector<Neighbours> all;
  std::vector<int> counts = {0, 1, 100, 1000};
  if (context.effort == Effort::kSmoke) counts = {0, 1, 10};
  for (const int sessions : counts) {
    CHORUS_ASSIGN_OR_RETURN(Neighbours n, StartBeside(context, sessions));
    all.push_back(std::move(n));
  }
  CHORUS_RETURN_IF_ERROR(MeasureIdle(context, all));
  return MeasureSmall(context, all);
}

}  // namespace bench
}  // namespace chorus
