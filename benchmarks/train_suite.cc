#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/suites.h"
#include "benchmarks/training.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

constexpr const char* kOurs = "chorus";
constexpr const char* kUnshared = "chorus, each rank its own update";
constexpr const char* kAlone = "the same trainers, nothing exchanged";

struct Model {
  const char* name;  // training.h
  const char* what;
  bool unshared;  // also with each rank its own update
  // Of a round, in a full run: many, so that its beginning and its end, where no other step is
  // under way, weigh little; a third of them in a quick one.
  int64_t steps;
  double over_ddp;  // the goal with 4 ranks
};
constexpr Model kModels[] = {
    {"perceptron", "a step of 784-256-10, batch 64 a rank", true, 300, 5},
    {"transformer", "a step of lesson 6's transformer, batch 8 a rank", false, 60, 1},
    {"resnet", "a step of lesson 7's ResNet, batch 32 a rank", false, 15, 1}};

// The jobs of so many ranks, whose models take turns.
struct Jobs {
  int ranks = 0;
  std::unique_ptr<Daemon> daemon;
  std::unique_ptr<Daemon> unsharing;
  std::unique_ptr<Training> shared;
  std::unique_ptr<Training> unshared;
  std::unique_ptr<TorchPeer> torch;  // null: missing
};

absl::Status MeasureModel(const Context& context, const Model& model, Jobs* jobs) {
  std::vector<Contender> contenders;
  const auto add = [&](Training* training, const char* name, Role role,
                       bool together) -> absl::Status {
    CHORUS_ASSIGN_OR_RETURN(Contender contender,
                            training->AsContender(name, role, model.name, together));
    contenders.push_back(std::move(contender));
    return absl::OkStatus();
  };
  CHORUS_RETURN_IF_ERROR(add(jobs->shared.get(), kOurs, Role::kOurs, /*together=*/true));
  CHORUS_RETURN_IF_ERROR(add(jobs->shared.get(), kAlone, Role::kFloor, /*together=*/false));
  if (jobs->torch != nullptr) {
    Task task;
    task.op = "train";
    task.text = model.name;
    CHORUS_ASSIGN_OR_RETURN(Contender peer, jobs->torch->AsContender(task));
    peer.name = absl::StrCat("DDP, ", peer.name);
    contenders.push_back(std::move(peer));
  }
  if (model.unshared) {
    CHORUS_RETURN_IF_ERROR(add(jobs->unshared.get(), kUnshared, Role::kPart, /*together=*/true));
  }
  InterleaveOptions options = context.Interleave();
  // As many steps a round for everybody.
  if (context.effort != Effort::kSmoke) {
    options.least_iterations = options.most_iterations =
        context.effort == Effort::kQuick ? model.steps / 3 : model.steps;
  }
  CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured, MeasureInterleaved(contenders, options));
  const double ours = measured[0].summary.p50;
  const std::string at =
      absl::StrCat("train ", model.name, ": ", jobs->ranks, jobs->ranks == 1 ? " rank" : " ranks");
  Goal goal;
  goal.what = at + ", speed of the same trainers that exchange nothing";
  goal.at_least = true;
  goal.limit = 90;
  goal.unit = " %";
  goal.value = 100 * measured[1].summary.p50 / ours;
  context.report->AddGoal(goal);
  goal.unit = "x";
  if (model.unshared) {
    goal.what = at + ", speed with common updates done once over each rank its own";
    goal.limit = 1;
    goal.value = measured.back().summary.p50 / ours;
    context.report->AddGoal(goal);
  }
  if (jobs->torch != nullptr) {
    goal.what = at + ", speed over DDP's";
    goal.limit = jobs->ranks == 4 ? model.over_ddp : 1;
    goal.value = measured[2].summary.p50 / ours;
    context.report->AddGoal(goal);
  }
  Case c;
  c.benchmark = "train";
  c.what = model.what;
  c.ranks = jobs->ranks;
  context.plots->Add({"train", c.what, Plots::Along::kRanks, Plots::Value::kRate}, jobs->ranks,
                     measured);
  context.report->Add(c, std::move(measured));
  context.Show();
  return absl::OkStatus();
}

absl::Status MeasureRanks(const Context& context, int ranks) {
  Jobs jobs;
  jobs.ranks = ranks;
  CHORUS_ASSIGN_OR_RETURN(jobs.daemon, context.StartDaemon());
  CHORUS_ASSIGN_OR_RETURN(jobs.unsharing, context.StartDaemon({"--noshare_equal_work"}));
  CHORUS_ASSIGN_OR_RETURN(jobs.shared,
                          Training::Start(*context.scratch, *jobs.daemon, "shared", ranks));
  CHORUS_ASSIGN_OR_RETURN(jobs.unshared,
                          Training::Start(*context.scratch, *jobs.unsharing, "unshared", ranks));
  CHORUS_ASSIGN_OR_RETURN(jobs.torch, context.StartTorch(ranks));
  for (const Model& model : kModels) {
    CHORUS_RETURN_IF_ERROR(MeasureModel(context, model, &jobs));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunTrain(const Context& context) {
  for (const int ranks : {1, 2, 4}) {
    if (context.effort == Effort::kSmoke && ranks != 2) continue;
    CHORUS_RETURN_IF_ERROR(MeasureRanks(context, ranks));
  }
  return absl::OkStatus();
}

}  // namespace bench
}  // namespace chorus
