#include "absl/strings/str_cat.h"
#include "benchmarks/suites.h"
#include "benchmarks/trainer.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

constexpr int64_t kMostNodes = 10000;
constexpr int64_t kFewNodes = 100;
constexpr int64_t kMany = 1000;
constexpr int64_t kManyBytes = 4 << 10;
constexpr int64_t kOneBytes = 4 << 20;

std::string RanksText(int ranks) { return absl::StrCat(ranks, ranks == 1 ? " rank" : " ranks"); }

Task TaskOf(const std::string& op, int64_t number, const std::string& text) {
  Task task;
  task.op = op;
  task.number = number;
  task.text = text;
  return task;
}

// A new graph in each iteration; what the slowest rank took.
Setting Registering(Job* job, int64_t nodes, const std::string& sample) {
  return {"", [=](int64_t iterations) -> absl::StatusOr<std::vector<double>> {
            Task task = TaskOf("register", nodes, sample);
            task.iterations = iterations;
            task.warm_up = 1;
            CHORUS_ASSIGN_OR_RETURN(const std::vector<Outcome> outcomes, job->Run(task));
            return SlowestSamples(outcomes);
          }};
}

Setting Running(Job* job, const Task& task) {
  return {"", [=](int64_t iterations) { return RunJob(job, task, iterations); }};
}

absl::Status MeasureNodes(const Context& context, Job* job) {
  double few_ns = 0;
  for (const int64_t nodes : {kFewNodes, int64_t{1000}, kMostNodes}) {
    std::vector<Contender> contenders;
    contenders.push_back(
        {"register, first run", Role::kOurs, {Registering(job, nodes, "register")}});
    contenders.push_back({"trace", Role::kPart, {Registering(job, nodes, "trace")}});
    contenders.push_back({"run", Role::kPart, {Running(job, TaskOf("nodes", nodes, ""))}});
    CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured,
                            MeasureInterleaved(contenders, context.Interleave()));
    const double run_ns = measured.back().summary.p50;
    if (nodes == kFewNodes) few_ns = run_ns;
    if (nodes == kMostNodes) {
      Goal goal;
      goal.what = absl::StrCat("graph: register and first run of ", nodes, " nodes, ",
                               RanksText(job->ranks()));
      goal.limit = 40;
      goal.value = measured.front().summary.p50 / 1e6;
      goal.unit = " ms";
      context.report->AddGoal(goal);
      goal.what = absl::StrCat("graph: a no-op node of a run, ", RanksText(job->ranks()));
      goal.limit = 150;
      goal.value = (run_ns - few_ns) / static_cast<double>(kMostNodes - kFewNodes);
      goal.unit = " ns";
      // More ranks at once have to share the processors.
      if (job->ranks() == 1) context.report->AddGoal(goal);
    }
    context.plots->Add({"graph", absl::StrCat("a chain of nodes, ", RanksText(job->ranks())),
                        Plots::Along::kNodes, Plots::Value::kTime},
                       static_cast<double>(nodes), measured);
    Case c;
    c.benchmark = "graph";
    c.what = absl::StrCat("graph of ", nodes, " nodes");
    c.ranks = job->ranks();
    context.report->Add(c, std::move(measured));
  }
  context.Show();
  return absl::OkStatus();
}

absl::Status MeasureManyAllReduces(const Context& context, Job* job) {
  const auto many = [](const std::string& how) {
    Task task = TaskOf("all_reduces", kMany, how);
    task.bytes = kManyBytes;
    return task;
  };
  Task one = TaskOf("all_reduce", 0, "");
  one.bytes = kOneBytes;
  std::vector<Contender> contenders;
  contenders.push_back({"in one graph", Role::kOurs, {Running(job, many("graph"))}});
  contenders.push_back(
      {absl::StrCat("one of ", BytesText(kOneBytes)), Role::kFloor, {Running(job, one)}});
  contenders.push_back({"coalesced", Role::kPart, {Running(job, many("coalesced"))}});
  contenders.push_back({"single calls", Role::kPart, {Running(job, many("single"))}});
  CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured,
                          MeasureInterleaved(contenders, context.Interleave()));
  Goal goal;
  goal.what = absl::StrCat("graph: ", kMany, " all_reduces of ", BytesText(kManyBytes), ", ",
                           job->ranks(), " ranks, over ", measured[1].name);
  goal.limit = 5;
  goal.value = RatioTo(measured, measured[0].name, Role::kFloor);
  goal.unit = "x";
  context.report->AddGoal(goal);
  Case c;
  c.benchmark = "graph";
  c.what = absl::StrCat(kMany, " all_reduces");
  c.ranks = job->ranks();
  c.bytes = kManyBytes;
  context.report->Add(c, std::move(measured));
  context.Show();
  return absl::OkStatus();
}

}  // namespace

absl::Status RunGraph(const Context& context) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Daemon> daemon, context.StartDaemon());
  {
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Job> alone, Job::Start(*context.scratch, *daemon, 1));
    CHORUS_RETURN_IF_ERROR(MeasureNodes(context, alone.get()));
  }
  for (const int ranks : context.ranks) {
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Job> job, Job::Start(*context.scratch, *daemon, ranks));
    CHORUS_RETURN_IF_ERROR(MeasureNodes(context, job.get()));
    CHORUS_RETURN_IF_ERROR(MeasureManyAllReduces(context, job.get()));
  }
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
