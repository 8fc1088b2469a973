#include "absl/strings/str_cat.h"
#include "benchmarks/handoff.h"
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
              const std::vector<Measured>& measured) {
  const std::string at = absl::StrCat("owned: ", BytesText(bytes), ", ", ranks, " ranks");
  Goal goal;
  goal.unit = "x";
  if (bytes >= 4 * kMiB) {
    goal.what = at + ", time over the memory floor's";
    goal.limit = 1.10;
    goal.value = RatioTo(measured, measured[0].name, Role::kFloor);
    context.report->AddGoal(goal);
  }
  const double to_part = RatioTo(measured, measured[0].name, Role::kPart);
  if (to_part > 0) {
    goal.what = at + ", time over transport and memory alone";
    goal.limit = 1.3;
    goal.value = to_part;
    context.report->AddGoal(goal);
  }
  const double to_peer = RatioTo(measured, measured[0].name, Role::kPeer);
  if (to_peer > 0) {
    goal.what = at + ", speed over Open MPI's";
    goal.at_least = true;
    goal.limit = bytes >= 4 * kMiB ? 3 : 1;
    goal.value = 1 / to_peer;
    context.report->AddGoal(goal);
  }
}

struct Contestants {
  Job* job;
  OpenMpi* mpi;               // null: missing
  const MemoryFloor* memory;  // null: no floor for this
  const HandoffGroup* alone;  // the same
};

absl::StatusOr<std::vector<Measured>> MeasureCase(const Context& context, const Contestants& who,
                                                  const std::string& what,
                                                  const std::vector<std::string>& ours,
                                                  const Task& peer, int64_t moved) {
  const int ranks = who.job->ranks();
  std::vector<Contender> contenders;
  for (const std::string& op : ours) {
    Task task = peer;
    task.op = op;
    Job* const job = who.job;
    contenders.push_back(
        {op == "all_reduce_mapped" ? "chorus, mapped memory" : "chorus, owned tensor",
         Role::kOurs,
         {{"ring", [job, task](int64_t n) { return RunJob(job, task, n); }}}});
  }
  if (who.memory != nullptr) {
    contenders.push_back(who.memory->AsContender(ranks, 1, peer.bytes));
  }
  if (who.alone != nullptr) contenders.push_back(who.alone->WithTraffic(peer.bytes));
  if (who.mpi != nullptr) contenders.push_back(OpenMpiContender(who.mpi, peer));
  CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured,
                          MeasureInterleaved(contenders, context.Interleave()));
  DropHopeless(measured, who.mpi);
  Case c;
  c.benchmark = "owned";
  c.what = what;
  c.ranks = ranks;
  c.bytes = peer.bytes;
  c.moved_bytes = static_cast<double>(moved);
  context.plots->Add({"owned", absl::StrCat(what, ", ", ranks, " ranks"), Plots::Along::kBytes,
                      Plots::Value::kBandwidth},
                     static_cast<double>(c.bytes), measured, c.moved_bytes);
  context.report->Add(c, measured);
  return measured;
}

absl::Status MeasureRanks(const Context& context, const Daemon& daemon, int ranks) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Job> job, Job::Start(*context.scratch, daemon, ranks));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<MemoryFloor> memory,
                          MemoryFloor::Start(*context.scratch));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<HandoffGroup> alone,
                          HandoffGroup::Start(*context.scratch, ranks));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<OpenMpi> mpi, context.StartOpenMpi(ranks));
  // Ours: operands mapped and owned, three results; the floor's operands and result, those
  // of the transport alone with two results; two jobs of Open MPI with operand and result each.
  const int copies = 2 * ranks + 3 + ranks + 1 + ranks + 2 + 4 * ranks;
  for (const int64_t bytes : context.Sizes(
           {64 * kKiB, 256 * kKiB, kMiB, 4 * kMiB, 16 * kMiB, 64 * kMiB, 256 * kMiB}, copies)) {
    Task task;
    task.op = "all_reduce";
    task.bytes = bytes;
    const Contestants all{job.get(), mpi.get(), memory.get(), alone.get()};
    CHORUS_ASSIGN_OR_RETURN(
        std::vector<Measured> measured,
        MeasureCase(context, all, "all_reduce", {"all_reduce_mapped", "all_reduce"}, task,
                    bytes * (ranks + 1)));
    AddGoals(context, ranks, bytes, measured);
    CHORUS_RETURN_IF_ERROR(memory->Forget());
    task.number = 1;
    const Contestants no_floor{job.get(), mpi.get(), nullptr, nullptr};
    CHORUS_RETURN_IF_ERROR(MeasureCase(context, no_floor, "all_reduce, all then read it",
                                       {"all_reduce_mapped"}, task, bytes * (2 * ranks + 1))
                               .status());
    context.Show();
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunOwned(const Context& context) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Daemon> daemon, context.StartDaemon());
  if (context.ops.empty()) {
    for (const int ranks : context.ranks) {
      CHORUS_RETURN_IF_ERROR(MeasureRanks(context, *daemon, ranks));
    }
  }
  return RunCollectives(context, *daemon);
}

}  // namespace bench
}  // namespace chorus
