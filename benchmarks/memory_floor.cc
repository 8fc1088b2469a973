#include "benchmarks/memory_floor.h"

#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "benchmarks/memory_traffic.h"
#include "benchmarks/timed_loop.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

Outcome Handle(const Task& task, TrafficMemory* memory) {
  Outcome outcome;
  if (task.op == "forget") {
    memory->Release();
    return outcome;
  }
  // number: inputs; text: outputs and the variant
  const std::vector<std::string> words = absl::StrSplit(task.text, absl::MaxSplits(' ', 1));
  int outputs = 0;
  if (task.op != "move" || words.size() != 2 || !absl::SimpleAtoi(words[0], &outputs) ||
      task.number > Traffic::kMostInputs) {
    outcome.status = absl::InvalidArgumentError(absl::StrCat("no memory floor of ", task.op));
    return outcome;
  }
  outcome.status = memory->Reserve(static_cast<int>(task.number), outputs, task.bytes);
  if (!outcome.status.ok()) return outcome;
  TrafficTeam team(memory->AsTraffic(), TrafficVariant::Decode(words[1]));
  outcome = TimedLoop(task, [&team] {
    team.Move();
    return absl::OkStatus();
  });
  if (outcome.status.ok()) outcome.status = memory->CheckOutputs();
  return outcome;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryFloor>> MemoryFloor::Start(const ScratchDirectory& scratch) {
  auto floor = std::make_unique<MemoryFloor>();
  CHORUS_ASSIGN_OR_RETURN(floor->helper_, HelperGroup::Create(scratch, "memory", 1));
  CHORUS_ASSIGN_OR_RETURN(Process process,
                          Process::Start({"/proc/self/exe", "--helper=memory",
                                          absl::StrCat("--control=", floor->helper_->path())},
                                         {}));
  floor->helper_->Own(std::move(process));
  CHORUS_RETURN_IF_ERROR(floor->helper_->AwaitHellos());
  return floor;
}

Contender MemoryFloor::AsContender(int inputs, int outputs, int64_t bytes) const {
  Contender contender;
  contender.name = outputs == 1 ? "N reads + 1 write" : "N reads + N writes";
  contender.role = Role::kFloor;
  for (const TrafficVariant& variant : AllTrafficVariants()) {
    Task task;
    task.op = "move";
    task.bytes = bytes;
    task.warm_up = 2;
    task.number = inputs;
    task.text = absl::StrCat(outputs, " ", variant.Encode());
    HelperGroup* const helper = helper_.get();
    contender.settings.push_back(
        {variant.Name(), [helper, task](int64_t n) { return helper->Sample(task, n); }});
  }
  return contender;
}

absl::Status MemoryFloor::Forget() {
  Task task;
  task.op = "forget";
  return helper_->Run(task).status();
}

int RunMemoryFloorHelper(const std::string& control_path) {
  TrafficMemory memory;
  return RunHelper(control_path, 0, [&memory](const Task& task) { return Handle(task, &memory); });
}

}  // namespace bench
}  // namespace chorus
