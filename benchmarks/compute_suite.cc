#include "absl/strings/str_cat.h"
#include "benchmarks/handoff.h"
#include "benchmarks/memory_floor.h"
#include "benchmarks/pattern.h"
#include "benchmarks/suites.h"
#include "benchmarks/trainer.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"

namespace chorus {
namespace bench {
namespace {

constexpr int kRanks = 4;
constexpr int64_t kComputeNanos = 1000000;
// From here on the floor of a reduction is its memory traffic, below it is the hand-off.
constexpr int64_t kMemoryMatters = 64 << 10;

double MedianOf(std::vector<double> values) { return Percentile(&values, 0.5); }

// One sample: with several ranks on a core an iteration means little by itself.
std::vector<double> WallSample(const std::vector<Outcome>& outcomes) {
  const auto iterations = static_cast<double>(outcomes.front().samples.size());
  return {static_cast<double>(WallNanos(outcomes)) / iterations};
}

// Processor time of an iteration, a value for each round.
struct CpuTime {
  std::vector<double> ranks;
  std::vector<double> daemon;
};

absl::StatusOr<std::vector<double>> RunCounted(Job* job, const Daemon& daemon, Task task,
                                               int64_t iterations, CpuTime* cpu) {
  task.iterations = iterations;
  task.warm_up = WarmUpFor(iterations);
  CHORUS_ASSIGN_OR_RETURN(int64_t before, CpuNanosOf(daemon.pid()));
  CHORUS_ASSIGN_OR_RETURN(std::vector<Outcome> outcomes, job->Run(task));
  CHORUS_ASSIGN_OR_RETURN(int64_t after, CpuNanosOf(daemon.pid()));
  // The daemon works in the warm-up too.
  const double all_iterations = static_cast<double>(iterations + task.warm_up);
  cpu->daemon.push_back(static_cast<double>(after - before) / all_iterations);
  double ranks = 0;
  for (const Outcome& outcome : outcomes) {
    ranks += static_cast<double>(outcome.cpu_ns) / static_cast<double>(iterations);
  }
  cpu->ranks.push_back(ranks);
  return WallSample(outcomes);
}

Contender ReductionFloor(HandoffGroup* handoff, const MemoryFloor* memory, int64_t bytes) {
  if (bytes >= kMemoryMatters) {
    Contender floor = memory->AsContender(kRanks, 1, bytes);
    floor.name = absl::StrCat("the reduction alone: ", floor.name);
    return floor;
  }
  return {"the reduction alone: hand-off",
          Role::kFloor,
          {{"yield", [handoff](int64_t iterations) { return handoff->Run("yield", iterations); }}}};
}

absl::Status MeasureBytes(const Context& context, const Daemon& daemon, Job* job, OpenMpi* mpi,
                          HandoffGroup* handoff, const MemoryFloor& memory, int64_t rounds,
                          int64_t bytes) {
  Task alone;
  alone.op = "compute";
  alone.number = rounds;
  Task with = alone;
  with.bytes = bytes;
  CpuTime cpu_with;
  CpuTime cpu_alone;
  const auto run_with = [&](int64_t iterations) {
    return RunCounted(job, daemon, with, iterations, &cpu_with);
  };
  const auto run_alone = [&](int64_t iterations) {
    return RunCounted(job, daemon, alone, iterations, &cpu_alone);
  };
  std::vector<Contender> contenders;
  contenders.push_back({"compute + all_reduce", Role::kOurs, {{"ring", run_with}}});
  contenders.push_back({"compute alone", Role::kFloor, {{"", run_alone}}});
  if (bytes < kMemoryMatters) {
    const auto run_transport = [&](int64_t iterations) -> absl::StatusOr<std::vector<double>> {
      Task task = with;
      task.op = "ring";
      task.iterations = iterations;
      task.warm_up = WarmUpFor(iterations);
      CHORUS_ASSIGN_OR_RETURN(std::vector<Outcome> outcomes, handoff->Run(task));
      return WallSample(outcomes);
    };
    contenders.push_back({"compute + transport alone", Role::kPart, {{"ring", run_transport}}});
  }
  if (mpi != nullptr) {
    contenders.push_back(OpenMpiContender(mpi, with, "compute + ", &WallSample));
  }
  InterleaveOptions options = context.Interleave();
  // Long rounds: the ranks share the cores in slices of milliseconds.
  options.round_ns *= 5;
  CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured, MeasureInterleaved(contenders, options));
  CHORUS_ASSIGN_OR_RETURN(
      std::vector<Measured> reduction,
      MeasureInterleaved({ReductionFloor(handoff, &memory, bytes)}, context.Interleave()));
  const double floor = measured[1].summary.p50 + reduction[0].summary.p50;
  Goal goal;
  const std::string at =
      absl::StrCat("compute: ", BytesText(bytes), " each ms, ", kRanks, " ranks");
  goal.what = at + ", speed of (compute alone + the reduction's floor)";
  goal.at_least = true;
  goal.limit = 95;
  goal.value = 100 * floor / measured[0].summary.p50;
  goal.unit = " %";
  context.report->AddGoal(goal);
  if (mpi != nullptr) {
    goal.what = at + ", the same of Open MPI";
    goal.limit = 0;
    goal.value = 100 * floor / measured.back().summary.p50;
    context.report->AddGoal(goal);
  }
  // The bytes have to be moved; that is no spinning.
  const double moving =
      bytes >= kMemoryMatters ? reduction[0].summary.p50 * static_cast<double>(UsableCpus()) : 0;
  const double computing = MedianOf(cpu_alone.ranks);
  goal.what = at + ", processor time of the ranks beyond computing";
  goal.at_least = false;
  goal.limit = 2;
  goal.value = 100 * (MedianOf(cpu_with.ranks) / computing - 1);
  context.report->AddGoal(goal);
  goal.what = at + ", processor time of the daemon beyond moving, of the ranks' computing";
  goal.value = 100 * (MedianOf(cpu_with.daemon) - moving) / computing;
  context.report->AddGoal(goal);
  DropHopeless(measured, mpi);
  Case c;
  c.benchmark = "compute";
  c.what = "1 ms of work, then all_reduce";
  c.ranks = kRanks;
  c.bytes = bytes;
  reduction[0].role = Role::kPart;
  measured.push_back(reduction[0]);
  context.report->Add(c, std::move(measured));
  context.Show();
  return absl::OkStatus();
}

}  // namespace

absl::Status RunCompute(const Context& context) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Daemon> daemon, context.StartDaemon());
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Job> job, Job::Start(*context.scratch, *daemon, kRanks));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<HandoffGroup> handoff,
                          HandoffGroup::Start(*context.scratch, kRanks));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<MemoryFloor> memory,
                          MemoryFloor::Start(*context.scratch));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<OpenMpi> mpi, context.StartOpenMpi(kRanks));
  const int64_t rounds = ComputeRoundsFor(kComputeNanos);
  for (const int64_t bytes : {int64_t{4}, int64_t{1} << 20}) {
    CHORUS_RETURN_IF_ERROR(MeasureBytes(context, *daemon, job.get(), mpi.get(), handoff.get(),
                                        *memory, rounds, bytes));
  }
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
