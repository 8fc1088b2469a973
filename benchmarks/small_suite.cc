#include "absl/strings/str_cat.h"
#include "benchmarks/handoff.h"
#include "benchmarks/suites.h"
#include "benchmarks/trainer.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

void AddGoals(const Context& context, int ranks, const std::vector<Measured>& measured) {
  Goal goal;
  goal.what = absl::StrCat("small: 4 B, ", ranks, " ranks, time over transport alone");
  goal.limit = 1.3;
  goal.value = RatioTo(measured, measured[0].name, Role::kPart);
  goal.unit = "x";
  context.report->AddGoal(goal);
  goal.what = absl::StrCat("small: 4 B, ", ranks, " ranks, p99 over transport alone's p99");
  goal.limit = 2;
  goal.value = measured[0].summary.p99 / measured[2].summary.p99;
  goal.unit = "x";
  context.report->AddGoal(goal);
}

}  // namespace

absl::Status RunSmall(const Context& context) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Daemon> daemon, context.StartDaemon());
  for (const int ranks : context.ranks) {
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Job> job, Job::Start(*context.scratch, *daemon, ranks));
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<HandoffGroup> handoff,
                            HandoffGroup::Start(*context.scratch, ranks));
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<OpenMpi> mpi, context.StartOpenMpi(ranks));
    for (const int64_t bytes :
         context.Sizes({4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10}, 2 * ranks)) {
      Task task;
      task.op = "all_reduce";
      task.bytes = bytes;
      Task mapped = task;
      mapped.op = "all_reduce_mapped";
      const auto ours = [&](int64_t iterations) { return RunJob(job.get(), mapped, iterations); };
      const auto by_yield = [&](int64_t iterations) { return handoff->Run("yield", iterations); };
      const auto by_ring = [&](int64_t iterations) { return handoff->Run("ring", iterations); };
      std::vector<Contender> contenders;
      contenders.push_back({"chorus", Role::kOurs, {{"ring", ours}}});
      contenders.push_back({"hand-off", Role::kFloor, {{"yield", by_yield}}});
      contenders.push_back({"transport alone", Role::kPart, {{"ring", by_ring}}});
      if (mpi != nullptr) contenders.push_back(OpenMpiContender(mpi.get(), task));
      CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured,
                              MeasureInterleaved(contenders, context.Interleave()));
      DropHopeless(measured, mpi.get());
      context.plots->Add({"small", absl::StrCat("all_reduce, ", ranks, " ranks"),
                          Plots::Along::kBytes, Plots::Value::kTime},
                         static_cast<double>(bytes), measured);
      if (bytes == 4) AddGoals(context, ranks, measured);
      Case c;
      c.benchmark = "small";
      c.what = "all_reduce";
      c.ranks = ranks;
      c.bytes = bytes;
      context.report->Add(c, std::move(measured));
    }
    context.Show();
  }
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
