#include "benchmarks/trainer.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "benchmarks/pattern.h"
#include "benchmarks/timed_loop.h"
#include "client/chorus.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

class Trainer {
 public:
  Trainer(int index, std::string address) : rank_(index), address_(std::move(address)) {}

  Outcome Handle(const Task& task) {
    Outcome outcome;
    if (task.op == "join") {
      outcome.status = Join(task.text, static_cast<int>(task.number));
      return outcome;
    }
    // Open MPI keeps no tape either.
    const NoGrad no_grad;
    if (task.op == "await_failure") return AwaitFailure();
    const int64_t count = task.bytes / static_cast<int64_t>(sizeof(float));
    outcome.status = Prepare(count, task.op != "all_reduce" && task.op != "compute");
    if (!outcome.status.ok()) return outcome;
    if (task.op == "all_reduce" || task.op == "all_reduce_owned") {
      return AllReduces(task, count, task.op == "all_reduce" ? mapped_.tensor() : owned_);
    }
    if (task.op == "compute") return Computes(task, count);
    if (task.op == "all_gather") return AllGathers(task, count);
    if (task.op == "broadcast") return Broadcasts(task, count);
    outcome.status = absl::InvalidArgumentError(absl::StrCat("no task ", task.op));
    return outcome;
  }

 private:
  absl::Status Join(const std::string& name, int size) {
    if (!session_.is_open()) {
      SessionOptions options;
      options.address = address_;
      options.transport = Transport::kRing;
      CHORUS_ASSIGN_OR_RETURN(session_, Session::Open(options));
    }
    Forget();
    WorldOptions options;
    options.name = name;
    options.rank = rank_;
    options.size = size;
    // A world that has lost a rank cannot be left in order; its handle just goes.
    CHORUS_ASSIGN_OR_RETURN(world_, session_.Join(options));
    return absl::OkStatus();
  }

  void Forget() {
    mapped_ = MappedTensor<float>();
    owned_ = Tensor();
    count_ = -1;
  }

  // The operands, unless they are there from the task before.
  absl::Status Prepare(int64_t count, bool owned) {
    if (count != count_) {
      Forget();
      if (count > 0) {
        CHORUS_ASSIGN_OR_RETURN(mapped_, Map<float>(world_, {count}));
        FillPattern(rank_, mapped_.data(), count);
      }
      count_ = count;
    }
    if (owned && !owned_.defined()) {
      owned_ = mapped_.tensor() + 0.0;
      CHORUS_RETURN_IF_ERROR(owned_.Wait());
    }
    return absl::OkStatus();
  }

  Outcome AllReduces(const Task& task, int64_t count, const Tensor& x) {
    Tensor y;
    Outcome outcome = TimedLoop(task, [&]() -> absl::Status {
      y = AllReduce(x, world_);
      if (task.number != 1) return y.Wait();
      CHORUS_ASSIGN_OR_RETURN(TensorView<float> view, y.View<float>());
      read_ ^= ReadAll(view.data(), count * sizeof(float));
      return absl::OkStatus();
    });
    if (outcome.status.ok()) outcome.status = CheckSum(y, count);
    return outcome;
  }

  Outcome Computes(const Task& task, int64_t count) {
    Tensor y;
    Outcome outcome = TimedLoop(task, [&]() -> absl::Status {
      Compute(task.number);
      if (count == 0) return absl::OkStatus();
      y = AllReduce(mapped_, world_);
      return y.Wait();
    });
    if (outcome.status.ok() && count > 0) outcome.status = CheckSum(y, count);
    return outcome;
  }

  Outcome AllGathers(const Task& task, int64_t count) {
    std::vector<Tensor> ys;
    Outcome outcome = TimedLoop(task, [&]() -> absl::Status {
      ys = AllGather(owned_, world_);
      for (const Tensor& y : ys) CHORUS_RETURN_IF_ERROR(y.Wait());
      return absl::OkStatus();
    });
    for (int k = 0; outcome.status.ok() && k < world_.size(); ++k) {
      outcome.status = CheckOne(k, ys[k], count);
    }
    return outcome;
  }

  Outcome Broadcasts(const Task& task, int64_t count) {
    Tensor y;
    Outcome outcome = TimedLoop(task, [&] {
      y = Broadcast(owned_, 0, world_);
      return y.Wait();
    });
    if (outcome.status.ok()) outcome.status = CheckOne(0, y, count);
    return outcome;
  }

  Outcome AwaitFailure() {
    Outcome outcome;
    const Tensor x = Scalar<float>(world_, 1);
    const absl::Status status = AllReduce(x, world_).Wait();
    outcome.end_ns = NowNanos();
    if (status.ok()) {
      outcome.status = absl::DataLossError("an all_reduce without all its ranks succeeded");
    }
    const Error error = ErrorOf(status);
    outcome.text =
        FailureText(std::string(ReasonName(error.reason)), error.culprit.rank, error.culprit.pid);
    return outcome;
  }

  absl::Status CheckSum(const Tensor& y, int64_t count) const {
    CHORUS_ASSIGN_OR_RETURN(TensorView<float> view, y.View<float>());
    if (static_cast<int64_t>(view.size()) != count) return absl::DataLossError("a wrong size");
    return CheckPatternSum(world_.size(), view.data(), count);
  }
  absl::Status CheckOne(int rank, const Tensor& y, int64_t count) const {
    CHORUS_ASSIGN_OR_RETURN(TensorView<float> view, y.View<float>());
    if (static_cast<int64_t>(view.size()) != count) return absl::DataLossError("a wrong size");
    return CheckPattern(rank, view.data(), count);
  }

  const int rank_;
  const std::string address_;
  Session session_;
  World world_;
  int64_t count_ = -1;
  MappedTensor<float> mapped_;
  Tensor owned_;
  uint64_t read_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Job>> Job::Start(const ScratchDirectory& scratch,
                                                const Daemon& daemon, int ranks) {
  auto job = std::make_unique<Job>();
  job->address_ = daemon.address();
  CHORUS_ASSIGN_OR_RETURN(job->helpers_,
                          HelperGroup::Create(scratch, absl::StrCat("trainers", ranks), ranks));
  CHORUS_RETURN_IF_ERROR(job->JoinAnew());
  return job;
}

absl::Status Job::JoinAnew() {
  for (int i = 0; i < ranks(); ++i) {
    if (helpers_->pid(i) > 0) continue;
    CHORUS_ASSIGN_OR_RETURN(
        Process process,
        Process::Start(
            {"/proc/self/exe", "--helper=trainer", absl::StrCat("--control=", helpers_->path()),
             absl::StrCat("--index=", i), absl::StrCat("--address=", address_)},
            {}));
    helpers_->Own(std::move(process));
  }
  CHORUS_RETURN_IF_ERROR(helpers_->AwaitHellos());
  Task task;
  task.op = "join";
  task.number = ranks();
  task.text = absl::StrCat("bench-", getpid(), "-", ranks(), "-", ++worlds_);
  return Run(task).status();
}

int RunTrainerHelper(const std::string& control_path, int index, const std::string& address) {
  Trainer trainer(index, address);
  return RunHelper(control_path, index,
                   [&trainer](const Task& task) { return trainer.Handle(task); });
}

std::string FailureText(const std::string& reason, int rank, pid_t pid) {
  return absl::StrCat(reason, " rank ", rank, " pid ", pid);
}

}  // namespace bench
}  // namespace chorus
