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

absl::Status MeasureRanks(const Context& context, int ranks) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Daemon> daemon, context.StartDaemon());
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Daemon> unsharing,
                          context.StartDaemon({"--noshare_equal_work"}));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Training> shared,
                          Training::Start(*context.scratch, *daemon, "shared", ranks));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Training> unshared,
                          Training::Start(*context.scratch, *unsharing, "unshared", ranks));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<TorchPeer> torch, context.StartTorch(ranks));
  std::vector<Contender> contenders = {
      shared->AsContender(kOurs, Role::kOurs, /*together=*/true),
      unshared->AsContender(kUnshared, Role::kPart, /*together=*/true),
      shared->AsContender(kAlone, Role::kFloor, /*together=*/false)};
  if (torch != nullptr) {
    Task task;
    task.op = "train";
    CHORUS_ASSIGN_OR_RETURN(Contender peer, torch->AsContender(task));
    peer.name = absl::StrCat("DDP, ", peer.name);
    contenders.push_back(std::move(peer));
  }
  InterleaveOptions options = context.Interleave();
  // As many steps a round for everybody, and many: its beginning and its end, where no other step
  // is under way, weigh little.
  if (context.effort != Effort::kSmoke) {
    options.least_iterations = options.most_iterations =
        context.effort == Effort::kQuick ? 100 : 300;
  }
  CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured, MeasureInterleaved(contenders, options));
  const double ours = measured[0].summary.p50;
  const std::string at = absl::StrCat("train: ", ranks, ranks == 1 ? " rank" : " ranks");
  Goal goal;
  goal.what = at + ", speed of the same trainers that exchange nothing";
  goal.at_least = true;
  goal.limit = 90;
  goal.unit = " %";
  goal.value = 100 * measured[2].summary.p50 / ours;
  context.report->AddGoal(goal);
  goal.what = at + ", speed with common updates done once over each rank its own";
  goal.limit = 1;
  goal.unit = "x";
  goal.value = measured[1].summary.p50 / ours;
  context.report->AddGoal(goal);
  if (torch != nullptr) {
    goal.what = at + ", speed over DDP's";
    goal.limit = ranks == 4 ? 8 : 1;
    goal.value = measured[3].summary.p50 / ours;
    context.report->AddGoal(goal);
  }
  Case c;
  c.benchmark = "train";
  c.what = "a step of 784-256-10, batch 64 a rank";
  c.ranks = ranks;
  context.plots->Add({"train", c.what, Plots::Along::kRanks, Plots::Value::kRate}, ranks, measured);
  context.report->Add(c, std::move(measured));
  context.Show();
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
