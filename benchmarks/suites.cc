#include "benchmarks/suites.h"

#include <algorithm>
#include <iostream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "benchmarks/machine.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {

InterleaveOptions Context::Interleave() const {
  InterleaveOptions options;
  switch (effort) {
    case Effort::kSmoke:
      options.rounds = 1;
      options.round_ns = 0;
      options.least_iterations = 2;
      break;
    case Effort::kQuick:
      options.rounds = 5;
      options.round_ns = 40e6;
      options.least_iterations = 2;
      break;
    case Effort::kFull:
      options.rounds = 9;
      options.round_ns = 150e6;
      break;
  }
  return options;
}

void Context::Show() const { std::cout << report->TakeTable() << std::flush; }

std::vector<int64_t> Context::Sizes(const std::vector<int64_t>& sizes, int copies) const {
  const int64_t room = AvailableMemoryBytes() / 2;
  std::vector<int64_t> fitting;
  for (const int64_t bytes : sizes) {
    if (bytes > most_bytes) continue;
    if (bytes * copies > room) {
      report->AddNote(absl::StrCat(BytesText(bytes), " left out: ", copies,
                                   " of them would take more than half of the free memory"));
      continue;
    }
    fitting.push_back(bytes);
  }
  // The ends show everything that can go wrong.
  if (effort == Effort::kSmoke && fitting.size() > 2) fitting = {fitting.front(), fitting.back()};
  return fitting;
}

absl::StatusOr<std::unique_ptr<Daemon>> Context::StartDaemon(std::vector<std::string> flags) const {
  if (daemon_program.empty()) {
    return absl::InvalidArgumentError("--daemon=PATH of chorusd is needed");
  }
  const int devices = *std::max_element(ranks.begin(), ranks.end());
  flags.push_back(absl::StrCat("--host_devices=", devices));
  return Daemon::Start(daemon_program, *scratch, flags);
}

absl::StatusOr<std::unique_ptr<OpenMpi>> Context::StartOpenMpi(int ranks_of_job) const {
  absl::StatusOr<std::unique_ptr<OpenMpi>> mpi = OpenMpi::Start(*scratch, ranks_of_job);
  if (mpi.status().code() == absl::StatusCode::kNotFound) {
    report->AddNote("Open MPI is not installed, so that column is missing: tools/setup bench");
    return std::unique_ptr<OpenMpi>();
  }
  return mpi;
}

absl::StatusOr<std::unique_ptr<TorchPeer>> Context::StartTorch(int ranks_of_job) const {
  if (torch_python.empty()) return std::unique_ptr<TorchPeer>();
  absl::StatusOr<std::unique_ptr<TorchPeer>> torch =
      TorchPeer::Start(*scratch, torch_python, torch_rank, ranks_of_job);
  if (torch.status().code() == absl::StatusCode::kNotFound) {
    report->AddNote(absl::StrCat("no c10d/Gloo, so that column is missing: ", torch_python, ": ",
                                 torch.status().message()));
    return std::unique_ptr<TorchPeer>();
  }
  return torch;
}

Contender OpenMpiContender(OpenMpi* mpi, const Task& task, const std::string& prefix,
                           const Samples& samples) {
  Contender contender;
  contender.name = prefix + mpi->version();
  contender.role = Role::kPeer;
  for (const OpenMpi::Setting& setting : mpi->settings()) {
    if (setting.hopeless) continue;
    HelperGroup* const job = setting.job.get();
    contender.settings.push_back(
        {setting.name,
         [job, task, samples](int64_t iterations) -> absl::StatusOr<std::vector<double>> {
           Task counted = task;
           counted.iterations = iterations;
           counted.warm_up = WarmUpFor(iterations);
           CHORUS_ASSIGN_OR_RETURN(std::vector<Outcome> outcomes, job->Run(counted));
           return samples(outcomes);
         }});
  }
  return contender;
}

void DropHopeless(const std::vector<Measured>& measured, OpenMpi* mpi) {
  if (mpi == nullptr) return;
  for (const Measured& one : measured) {
    if (one.role != Role::kPeer || one.tried.empty()) continue;
    // Beside the best of the trial, which so always stays.
    double best = one.tried.front().second;
    for (const auto& tried : one.tried) best = std::min(best, tried.second);
    for (const auto& tried : one.tried) {
      for (OpenMpi::Setting& setting : mpi->settings()) {
        if (setting.name == tried.first && tried.second > 20 * best) setting.hopeless = true;
      }
    }
  }
}

absl::StatusOr<std::vector<double>> RunJob(Job* job, Task task, int64_t iterations) {
  task.iterations = iterations;
  task.warm_up = WarmUpFor(iterations);
  CHORUS_ASSIGN_OR_RETURN(std::vector<Outcome> outcomes, job->Run(task));
  return GroupSamples(outcomes);
}

Task WorkingPair::SmallAllReduce() {
  Task task;
  task.op = "all_reduce_mapped";
  task.bytes = 4;
  return task;
}

absl::StatusOr<WorkingPair> WorkingPair::Start(const Context& context,
                                               std::vector<std::string> flags) {
  WorkingPair pair;
  pair.scratch = std::make_unique<ScratchDirectory>();
  // More than there are ranks: a device is a queue, and what is beside them has another one.
  flags.push_back("--host_devices=8");
  CHORUS_ASSIGN_OR_RETURN(pair.daemon, Daemon::Start(context.daemon_program, *pair.scratch, flags));
  CHORUS_ASSIGN_OR_RETURN(pair.job, Job::Start(*pair.scratch, *pair.daemon, kRanks));
  CHORUS_RETURN_IF_ERROR(RunJob(pair.job.get(), SmallAllReduce(), 100).status());
  return pair;
}

}  // namespace bench
}  // namespace chorus
