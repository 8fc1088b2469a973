#include "absl/strings/str_cat.h"
#include "benchmarks/memory_floor.h"
#include "benchmarks/suites.h"
#include "benchmarks/trainer.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

constexpr int64_t kKiB = 1 << 10;
constexpr int64_t kMiB = 1 << 20;

void AddGoals(const Context& context, int ranks, int64_t bytes,
              const std::vector<Measured>& measured, const OpenMpi* mpi, const TorchPeer* torch) {
  const std::string at = absl::StrCat("user: ", BytesText(bytes), ", ", ranks, " ranks");
  Goal goal;
  goal.unit = "x";
  if (bytes == 64 * kMiB) {
    goal.what = at + ", time over N reads + N writes";
    goal.limit = 1.3;
    goal.value = RatioTo(measured, measured[0].name, Role::kFloor);
    context.report->AddGoal(goal);
  }
  goal.at_least = true;
  if (mpi != nullptr && bytes >= 64 * kKiB) {
    goal.what = at + ", speed over Open MPI's";
    goal.limit = 1;
    goal.value = 1 / RatioToNamed(measured, mpi->version());
    context.report->AddGoal(goal);
  }
  if (torch != nullptr) {
    goal.what = at + ", speed over c10d/Gloo's";
    goal.limit = bytes == 64 * kMiB ? 2.5 : 1;
    goal.value = 1 / RatioToNamed(measured, torch->version());
    context.report->AddGoal(goal);
  }
}

absl::Status MeasureRanks(const Context& context, const Daemon& daemon, int ranks) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Job> job, Job::Start(*context.scratch, daemon, ranks));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<MemoryFloor> memory,
                          MemoryFloor::Start(*context.scratch));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<OpenMpi> mpi, context.StartOpenMpi(ranks));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<TorchPeer> torch, context.StartTorch(ranks));
  // Ours, the floor's, and those of two jobs of Open MPI: operands and results; Gloo's in place.
  for (const int64_t bytes :
       context.Sizes({4, 4 * kKiB, 64 * kKiB, kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB}, 9 * ranks)) {
    Task task;
    task.op = "all_reduce_user";
    task.bytes = bytes;
    std::vector<Contender> contenders;
    Job* const ours = job.get();
    contenders.push_back({"chorus, own memory", Role::kOurs, {{"ring", [ours, task](int64_t n) {
                                                                 return RunJob(ours, task, n);
                                                               }}}});
    if (bytes >= 64 * kKiB) contenders.push_back(memory->AsContender(ranks, ranks, bytes));
    task.op = "all_reduce";
    if (mpi != nullptr) contenders.push_back(OpenMpiContender(mpi.get(), task));
    if (torch != nullptr) {
      CHORUS_ASSIGN_OR_RETURN(Contender gloo, torch->AsContender(task));
      contenders.push_back(std::move(gloo));
    }
    CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured,
                            MeasureInterleaved(contenders, context.Interleave()));
    DropHopeless(measured, mpi.get());
    AddGoals(context, ranks, bytes, measured, mpi.get(), torch.get());
    Case c;
    c.benchmark = "user";
    c.what = "all_reduce";
    c.ranks = ranks;
    c.bytes = bytes;
    c.moved_bytes = 2.0 * static_cast<double>(bytes) * ranks;
    context.plots->Add({"user", absl::StrCat("all_reduce, ", ranks, " ranks"), Plots::Along::kBytes,
                        Plots::Value::kBandwidth},
                       static_cast<double>(bytes), measured, c.moved_bytes);
    context.report->Add(c, std::move(measured));
    context.Show();
    CHORUS_RETURN_IF_ERROR(memory->Forget());
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunUser(const Context& context) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Daemon> daemon, context.StartDaemon());
  for (const int ranks : context.ranks) {
    CHORUS_RETURN_IF_ERROR(MeasureRanks(context, *daemon, ranks));
  }
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
