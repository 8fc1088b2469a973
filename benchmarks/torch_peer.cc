#include "benchmarks/torch_peer.h"

#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {

absl::StatusOr<std::unique_ptr<TorchPeer>> TorchPeer::Start(const ScratchDirectory& scratch,
                                                            const std::string& python,
                                                            const std::string& script, int ranks) {
  auto peer = std::make_unique<TorchPeer>();
  const std::string name = absl::StrCat("torch", ranks);
  CHORUS_ASSIGN_OR_RETURN(peer->ranks_, HelperGroup::Create(scratch, name, ranks));
  for (int i = 0; i < ranks; ++i) {
    CHORUS_ASSIGN_OR_RETURN(
        Process process,
        Process::Start({python, script, peer->ranks_->path(), absl::StrCat(i)}, {}));
    peer->ranks_->Own(std::move(process));
  }
  CHORUS_RETURN_IF_ERROR(peer->ranks_->AwaitHellos());
  Task task;
  task.op = "init";
  task.number = ranks;
  task.text = absl::StrCat(scratch.path(), "/", name, ".store");
  // Where a job before this one has left its addresses.
  std::filesystem::remove(task.text);
  const absl::StatusOr<std::vector<Outcome>> outcomes = peer->ranks_->Run(task);
  if (outcomes.status().code() == absl::StatusCode::kUnavailable) {
    return absl::NotFoundError(outcomes.status().message());
  }
  CHORUS_RETURN_IF_ERROR(outcomes.status());
  peer->version_ = outcomes->front().text;
  return peer;
}

absl::StatusOr<Contender> TorchPeer::AsContender(const Task& task) {
  Task once = task;
  once.iterations = 1;
  CHORUS_RETURN_IF_ERROR(ranks_->Run(once).status());
  Contender contender;
  contender.name = version_;
  contender.role = Role::kPeer;
  HelperGroup* const ranks = ranks_.get();
  contender.settings = {{"one thread", [ranks, task](int64_t iterations) {
                           Task counted = task;
                           counted.warm_up = WarmUpFor(iterations);
                           return ranks->Sample(counted, iterations);
                         }}};
  return contender;
}

absl::Status TorchPeer::Forget() {
  Task task;
  task.op = "forget";
  return ranks_->Run(task).status();
}

}  // namespace bench
}  // namespace chorus
