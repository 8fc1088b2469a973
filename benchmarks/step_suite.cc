#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/gradients.h"
#include "benchmarks/memory_floor.h"
#include "benchmarks/suites.h"
#include "benchmarks/trainer.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

constexpr const char* kOwned = "chorus, owned, coalesced";
constexpr const char* kGraph = "chorus, owned, one graph";
constexpr const char* kUser = "chorus, own memory, a call each";
constexpr const char* kParts = "chorus, own memory, coalesced";
constexpr const char* kTrivial = "DDP, nothing exchanged";

Task GradientTask(const std::string& op, const Gradients& gradients, int64_t number) {
  Task task;
  task.op = op;
  task.number = number;
  task.text = gradients.Encode();
  return task;
}

// DDP's two contenders: the whole step with the better of its settings, and what of it is the
// trivial backward pass.
absl::StatusOr<std::vector<Contender>> DdpContenders(TorchPeer* torch, const Gradients& gradients) {
  CHORUS_ASSIGN_OR_RETURN(Contender ddp,
                          torch->AsContender(GradientTask("gradients", gradients, 0)));
  CHORUS_ASSIGN_OR_RETURN(const Contender views,
                          torch->AsContender(GradientTask("gradients_views", gradients, 0)));
  CHORUS_ASSIGN_OR_RETURN(Contender trivial,
                          torch->AsContender(GradientTask("gradients", gradients, 1)));
  ddp.name = absl::StrCat("DDP, ", ddp.name);
  ddp.settings.push_back(views.settings.front());
  ddp.settings.back().name = "one thread, gradient_as_bucket_view";
  trivial.name = kTrivial;
  trivial.role = Role::kPart;
  return std::vector<Contender>{std::move(ddp), std::move(trivial)};
}

double MedianOf(const std::vector<Measured>& measured, const std::string& name) {
  for (const Measured& one : measured) {
    if (one.name == name) return one.summary.p50;
  }
  return 0;
}

struct Rivals {
  std::string mpi;  // names; empty: missing
  std::string ddp;
};

void AddGoals(const Context& context, int ranks, const Rivals& rivals,
              const std::vector<Measured>& measured, const std::vector<Measured>& readings) {
  Goal goal;
  goal.at_least = true;
  goal.unit = "x";
  const auto add = [&](const std::string& what, double limit, double theirs, double ours) {
    goal.what = absl::StrCat("step: ", ranks, " ranks, ", what);
    goal.limit = limit;
    goal.value = theirs / ours;
    context.report->AddGoal(goal);
  };
  const double owned = MedianOf(measured, kOwned);
  if (!rivals.mpi.empty()) {
    add("owned, speed over Open MPI's", 1, MedianOf(measured, rivals.mpi), owned);
    add("owned, all then read it, speed over Open MPI's", 1, MedianOf(readings, rivals.mpi),
        MedianOf(readings, kOwned));
  }
  if (!rivals.ddp.empty()) {
    // What is left when the backward pass by itself is taken away.
    const double exchange = MedianOf(measured, rivals.ddp) - MedianOf(measured, kTrivial);
    add("own memory, a call each, speed over DDP's exchange", 2.5, exchange,
        MedianOf(measured, kUser));
    add("own memory, coalesced, speed over DDP's exchange", 2.5, exchange,
        MedianOf(measured, kParts));
    add("owned, speed over DDP's exchange", 1, exchange, owned);
  }
}

absl::Status MeasureRanks(const Context& context, const Daemon& daemon, const Gradients& gradients,
                          int ranks) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Job> job, Job::Start(*context.scratch, daemon, ranks));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<MemoryFloor> memory,
                          MemoryFloor::Start(*context.scratch));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<OpenMpi> mpi, context.StartOpenMpi(ranks));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<TorchPeer> torch, context.StartTorch(ranks));
  Rivals rivals;
  std::vector<Contender> contenders;
  const auto add_ours = [&](const std::string& name, const std::string& how, bool reads) {
    const Task task = GradientTask("gradients_" + how, gradients, reads ? 1 : 0);
    Job* const ours = job.get();
    contenders.push_back(
        {name, Role::kOurs, {{"ring", [ours, task](int64_t n) { return RunJob(ours, task, n); }}}});
  };
  add_ours(kOwned, "coalesced", false);
  add_ours(kGraph, "graph", false);
  add_ours(kUser, "user", false);
  add_ours(kParts, "parts", false);
  contenders.push_back(memory->AsContender(ranks, 1, gradients.bytes()));
  if (mpi != nullptr) {
    contenders.push_back(OpenMpiContender(mpi.get(), GradientTask("gradients", gradients, 0)));
    rivals.mpi = contenders.back().name;
  }
  if (torch != nullptr) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Contender> ddp,
                            DdpContenders(torch.get(), gradients));
    contenders.insert(contenders.end(), ddp.begin(), ddp.end());
    rivals.ddp = ddp.front().name;
  }
  const size_t plain = contenders.size();
  add_ours(kOwned, "coalesced", true);
  add_ours(kUser, "user", true);
  if (mpi != nullptr) {
    contenders.push_back(OpenMpiContender(mpi.get(), GradientTask("gradients", gradients, 1)));
  }

  InterleaveOptions options = context.Interleave();
  // As many steps a round for everybody.
  if (context.effort != Effort::kSmoke) {
    options.least_iterations = options.most_iterations = context.effort == Effort::kQuick ? 4 : 10;
  }
  CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured, MeasureInterleaved(contenders, options));
  std::vector<Measured> readings(measured.begin() + plain, measured.end());
  measured.resize(plain);
  // Where there is one rank nothing has to be exchanged.
  if (ranks > 1) AddGoals(context, ranks, rivals, measured, readings);
  Case c;
  c.benchmark = "step";
  c.what = absl::StrCat(gradients.shapes.size(), " gradients");
  c.ranks = ranks;
  c.bytes = gradients.bytes();
  const auto add = [&](std::vector<Measured> rows) {
    context.plots->Add({"step", c.what, Plots::Along::kRanks, Plots::Value::kTime}, ranks, rows);
    context.report->Add(c, std::move(rows));
  };
  add(std::move(measured));
  c.what += ", all then read them";
  add(std::move(readings));
  context.Show();
  return absl::OkStatus();
}

}  // namespace

absl::Status RunStep(const Context& context) {
  const Gradients gradients = Gradients::OfResNet50(context.effort == Effort::kSmoke ? 8 : 64);
  if (gradients.bytes() > context.most_bytes) {
    context.report->AddNote(
        absl::StrCat("step left out: ", BytesText(gradients.bytes()), " are more than --most_mib"));
    return absl::OkStatus();
  }
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Daemon> daemon, context.StartDaemon());
  std::vector<int> ranks = {1};
  ranks.insert(ranks.end(), context.ranks.begin(), context.ranks.end());
  // With more ranks than processors Open MPI takes seconds for so many calls.
  if (context.effort == Effort::kSmoke) ranks.resize(2);
  for (const int count : ranks) {
    // Of a rank: ours owned, beside the staging memory that they come from, and its own memory; two
    // jobs of Open MPI; two models of DDP with parameters, gradients and buckets; the floor's.
    // Results that the ranks share and the floor's.
    const int copies = count * (2 + 2 + 4 + (context.torch_python.empty() ? 0 : 6) + 1) + 4;
    if (context.Sizes({gradients.bytes()}, copies).empty()) continue;
    CHORUS_RETURN_IF_ERROR(MeasureRanks(context, *daemon, gradients, count));
  }
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
