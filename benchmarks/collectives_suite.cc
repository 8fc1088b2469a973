#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "benchmarks/collective_case.h"
#include "benchmarks/machine.h"
#include "benchmarks/suites.h"
#include "benchmarks/trainer.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

constexpr int64_t kKiB = 1 << 10;
constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kGiB = 1 << 30;

// The worst row of a goal that many rows share.
class Worst {
 public:
  void Add(double value, const CollectiveCase& c) {
    if (value <= 0 || value <= value_) return;
    value_ = value;
    where_ = absl::StrCat(BytesText(c.result_bytes()), ", ", c.ranks, " ranks");
  }
  void Report(const Context& context, const std::string& what, double limit) const {
    if (value_ == 0) return;
    Goal goal;
    goal.what = absl::StrCat("collectives: ", what, " (worst: ", where_, ")");
    goal.limit = limit;
    goal.value = value_;
    goal.unit = "x";
    context.report->AddGoal(goal);
  }

 private:
  double value_ = 0;
  std::string where_;
};

// Of one op, over all sizes and numbers of ranks.
struct Goals {
  Worst to_mpi;       // from 64 KiB
  Worst read_to_mpi;  // the same, when all bytes are read
  Worst to_torch;     // at any size
  Worst growth;       // of movement in list form: the largest size over 64 KiB
};

struct Contestants {
  Job* job;
  OpenMpi* mpi;      // null: missing
  TorchPeer* torch;  // null: missing
};

// What all contenders hold for a case at a time, and ours of it.
struct Held {
  int64_t ours = 0;
  int64_t all = 0;
};

Held BytesHeld(const CollectiveCase& c, const Contestants& who) {
  // Operands, each beside the staging memory that it comes from while it is made; off a broadcast's
  // root one of the type. Two results, where there is anything to write.
  Held held;
  held.ours = std::max(2 * c.input_bytes(), c.ranks * c.piece_bytes()) +
              (c.HandsOver() ? 0 : 2 * c.output_bytes());
  held.all = held.ours;
  const int64_t once = c.input_bytes() + c.output_bytes();
  if (who.mpi != nullptr) {
    for (const OpenMpi::Setting& setting : who.mpi->settings())
      held.all += setting.hopeless ? 0 : once;
  }
  if (who.torch != nullptr) held.all += once;
  return held;
}

// The case with a result of `bytes`, or of half as many and so on where the memory asks for it;
// fewer than `least` bytes: none.
absl::StatusOr<CollectiveCase> Fitting(const std::string& op, const Contestants& who, int64_t bytes,
                                       int64_t least) {
  // The daemon's own limit is three quarters of the machine's memory, of which all have `room`.
  constexpr int64_t kMostOfOurs = 6 * kGiB;
  const int64_t room = AvailableMemoryBytes() / 4 * 3;
  while (true) {
    CHORUS_ASSIGN_OR_RETURN(CollectiveCase c,
                            CollectiveCase::WithResult(op, who.job->ranks(), bytes));
    const Held held = BytesHeld(c, who);
    if (held.ours <= kMostOfOurs && held.all <= room) return c;
    bytes /= 2;
    if (bytes < least) return absl::ResourceExhaustedError("no room");
  }
}

// There are some two hundred rows, and five contenders in each: less of each than elsewhere.
InterleaveOptions OptionsFor(const Context& context, int64_t bytes) {
  InterleaveOptions options = context.Interleave();
  if (context.effort == Effort::kSmoke) return options;
  const bool quick = context.effort == Effort::kQuick;
  const bool large = bytes >= 16 * kMiB;
  options.rounds = (large ? 2 : 3) + (quick ? 0 : large ? 1 : 2);
  options.round_ns = quick ? 15e6 : 60e6;
  // The first ones, that say how many there are to be, find caches that others have filled.
  options.least_iterations = bytes >= 64 * kMiB ? 2 : 3;
  return options;
}

absl::Status Forget(const Contestants& who) {
  Task task;
  task.op = "forget";
  CHORUS_RETURN_IF_ERROR(who.job->Run(task).status());
  if (who.mpi != nullptr) {
    for (OpenMpi::Setting& setting : who.mpi->settings()) {
      CHORUS_RETURN_IF_ERROR(setting.job->Run(task).status());
    }
  }
  return who.torch == nullptr ? absl::OkStatus() : who.torch->Forget();
}

// Ours without reading, in nanoseconds.
absl::StatusOr<double> MeasureCase(const Context& context, const Contestants& who,
                                   const CollectiveCase& c, Goals* goals) {
  Task task;
  task.op = c.op;
  task.bytes = c.piece_bytes();
  Job* const job = who.job;
  std::vector<Contender> contenders;
  std::vector<Contender> reading;
  for (const bool reads : {false, true}) {
    task.number = reads ? 1 : 0;
    std::vector<Contender>& to = reads ? reading : contenders;
    to.push_back({"chorus", Role::kOurs, {{"ring", [job, task](int64_t n) {
                                             return RunJob(job, task, n);
                                           }}}});
    if (who.mpi != nullptr) to.push_back(OpenMpiContender(who.mpi, task));
  }
  if (who.torch != nullptr) {
    task.number = 0;
    absl::StatusOr<Contender> torch = who.torch->AsContender(task);
    if (torch.ok()) {
      contenders.push_back(*std::move(torch));
    } else if (torch.status().code() == absl::StatusCode::kUnimplemented) {
      context.report->AddNote(
          absl::StrCat(c.op, ": not offered by c10d/Gloo: ", torch.status().message()));
    } else {
      return torch.status();
    }
  }
  const size_t plain = contenders.size();
  contenders.insert(contenders.end(), reading.begin(), reading.end());
  CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured,
                          MeasureInterleaved(contenders, OptionsFor(context, c.result_bytes())));
  DropHopeless(measured, who.mpi);
  std::vector<Measured> readings(measured.begin() + plain, measured.end());
  measured.resize(plain);
  if (who.mpi != nullptr && c.result_bytes() >= 64 * kKiB) {
    goals->to_mpi.Add(RatioToNamed(measured, who.mpi->version()), c);
    goals->read_to_mpi.Add(RatioToNamed(readings, who.mpi->version()), c);
  }
  if (who.torch != nullptr) {
    goals->to_torch.Add(RatioToNamed(measured, who.torch->version()), c);
  }
  const Plots::Which plot = {"collectives", absl::StrCat(c.op, ", ", c.ranks, " ranks"),
                             Plots::Along::kBytes, Plots::Value::kTime};
  const auto size = static_cast<double>(c.result_bytes());
  context.plots->Add(plot, size, measured);
  for (const Measured& one : readings) {
    context.plots->AddPoint(plot, one.name + ", all then read it", size, one.summary.p50);
  }
  const double ours = measured.front().summary.p50;
  Case row;
  row.benchmark = "collectives";
  row.what = c.op;
  row.ranks = c.ranks;
  row.bytes = c.result_bytes();
  context.report->AddComparison(row, std::move(measured), std::move(readings));
  return ours;
}

absl::Status MeasureOp(const Context& context, const Contestants& who, const std::string& op,
                       Goals* goals) {
  std::vector<int64_t> sizes = {4, 4 * kKiB, 64 * kKiB, kMiB, 16 * kMiB};
  sizes.push_back((context.effort == Effort::kQuick ? 64 : 256) * kMiB);
  sizes.erase(std::remove_if(sizes.begin(), sizes.end(),
                             [&](int64_t bytes) { return bytes > context.most_bytes; }),
              sizes.end());
  if (context.effort == Effort::kSmoke) sizes = {sizes.front(), sizes.back()};
  double of_64_kib = 0;
  int64_t before = 0;
  for (const int64_t bytes : sizes) {
    const absl::StatusOr<CollectiveCase> c = Fitting(op, who, bytes, 2 * before);
    if (c.status().code() == absl::StatusCode::kResourceExhausted) break;
    CHORUS_RETURN_IF_ERROR(c.status());
    CHORUS_ASSIGN_OR_RETURN(const double took, MeasureCase(context, who, *c, goals));
    // What no later case needs makes room.
    if (c->result_bytes() >= kMiB) CHORUS_RETURN_IF_ERROR(Forget(who));
    if (bytes == 64 * kKiB) of_64_kib = took;
    if (bytes > 64 * kKiB && of_64_kib > 0 && c->HandsOver()) {
      goals->growth.Add(took / of_64_kib, *c);
    }
    before = bytes;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunCollectives(const Context& context, const Daemon& daemon) {
  const std::vector<std::string>& ops = context.ops.empty() ? CollectiveOps() : context.ops;
  std::map<std::string, Goals> goals;
  for (const int ranks : context.ranks) {
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Job> job, Job::Start(*context.scratch, daemon, ranks));
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<OpenMpi> mpi, context.StartOpenMpi(ranks));
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<TorchPeer> torch, context.StartTorch(ranks));
    for (const std::string& op : ops) {
      CHORUS_RETURN_IF_ERROR(
          MeasureOp(context, {job.get(), mpi.get(), torch.get()}, op, &goals[op]));
      context.Show();
    }
  }
  for (const std::string& op : ops) {
    const Goals& of_op = goals[op];
    of_op.to_mpi.Report(context, op + " from 64 KiB, time over Open MPI's", 1);
    of_op.read_to_mpi.Report(context, op + " from 64 KiB, all then read it, time over Open MPI's",
                             1);
    of_op.to_torch.Report(context, op + ", time over c10d/Gloo's", 1);
    of_op.growth.Report(context, op + ", time over that of 64 KiB", 1.3);
  }
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
