#include "benchmarks/training.h"

#include <unistd.h>

#include <cmath>
#include <deque>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/timed_loop.h"
#include "chorus/chorus.h"
#include "core/base/error.h"
#include "examples/05_trainer/dataset.h"
#include "examples/05_trainer/model.h"

namespace chorus {
namespace bench {
namespace {

// Of a rank.
constexpr int64_t kBatch = 64;
constexpr size_t kUnderWay = 4;
constexpr uint64_t kSeed = 1;

// A job of ranks, or a rank by itself.
class Trainee {
 public:
  static absl::StatusOr<std::unique_ptr<Trainee>> Start(const World& world) {
    const trainer::ModelShape shape;
    CHORUS_ASSIGN_OR_RETURN(trainer::State state, trainer::InitialState(world, shape, kSeed));
    auto trainee = std::make_unique<Trainee>(world, shape);
    trainee->state_ = std::move(state);
    return trainee;
  }

  Trainee(const World& world, const trainer::ModelShape& shape)
      : global_(kBatch * world.size()), trainer_(world, shape, 0.9f, kBatch) {
    std::mt19937_64 random(kSeed + static_cast<uint64_t>(world.rank()));
    batch_.size = kBatch;
    for (int64_t i = 0; i < kBatch * shape.pixels; ++i) {
      batch_.images.push_back(static_cast<uint8_t>(random() % 256));
    }
    for (int64_t i = 0; i < kBatch; ++i) {
      batch_.labels.push_back(
          static_cast<uint8_t>(random() % static_cast<uint64_t>(shape.classes)));
    }
  }

  absl::Status Step() {
    CHORUS_ASSIGN_OR_RETURN(Tensor loss, trainer_.Step(batch_, global_, 1e-4f, &state_));
    losses_.push_back(std::move(loss));
    return Drain(kUnderWay);
  }

  // Waits until at most so many steps are under way.
  absl::Status Drain(size_t under_way) {
    while (losses_.size() > under_way) {
      CHORUS_ASSIGN_OR_RETURN(const float loss, losses_.front().Item<float>());
      if (!std::isfinite(loss)) return absl::DataLossError("a loss that is no number");
      losses_.pop_front();
    }
    return absl::OkStatus();
  }

  // Of all bits of the parameters.
  absl::StatusOr<std::string> Fingerprint() const {
    std::string bits;
    for (const Tensor& tensor : state_) {
      CHORUS_ASSIGN_OR_RETURN(const std::vector<float> values, tensor.Read<float>());
      bits.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    }
    return absl::StrCat(std::hash<std::string>()(bits));
  }

 private:
  const int64_t global_;
  trainer::Trainer trainer_;
  trainer::Batch batch_;
  trainer::State state_;
  std::deque<Tensor> losses_;
};

class TrainingRank {
 public:
  TrainingRank(int index, std::string address) : rank_(index), address_(std::move(address)) {}

  Outcome Handle(const Task& task) {
    Outcome outcome;
    if (task.op == "join") {
      outcome.status = Join(task.text, static_cast<int>(task.number));
      return outcome;
    }
    Trainee* const trainee = task.number == 1 ? alone_.get() : together_.get();
    outcome = TimedLoop(task, [&] { return trainee->Step(); });
    // The steps that are still under way belong to the time.
    if (outcome.status.ok()) outcome.status = trainee->Drain(0);
    outcome.end_ns = NowNanos();
    if (!outcome.status.ok()) return outcome;
    absl::StatusOr<std::string> fingerprint = trainee->Fingerprint();
    outcome.status = fingerprint.status();
    if (fingerprint.ok()) outcome.text = *std::move(fingerprint);
    return outcome;
  }

 private:
  absl::Status Join(const std::string& name, int size) {
    SessionOptions open;
    open.address = address_;
    CHORUS_ASSIGN_OR_RETURN(session_, Session::Open(open));
    WorldOptions options;
    options.name = name;
    options.rank = rank_;
    options.size = size;
    CHORUS_ASSIGN_OR_RETURN(const World world, session_.Join(options));
    CHORUS_ASSIGN_OR_RETURN(together_, Trainee::Start(world));
    options.name = absl::StrCat(name, "-", rank_);
    options.rank = 0;
    options.size = 1;
    CHORUS_ASSIGN_OR_RETURN(const World own_world, session_.Join(options));
    CHORUS_ASSIGN_OR_RETURN(alone_, Trainee::Start(own_world));
    return absl::OkStatus();
  }

  const int rank_;
  const std::string address_;
  Session session_;
  std::unique_ptr<Trainee> together_;
  std::unique_ptr<Trainee> alone_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Training>> Training::Start(const ScratchDirectory& scratch,
                                                          const Daemon& daemon,
                                                          const std::string& name, int ranks) {
  auto training = std::make_unique<Training>();
  CHORUS_ASSIGN_OR_RETURN(training->ranks_, HelperGroup::Create(scratch, name, ranks));
  for (int i = 0; i < ranks; ++i) {
    CHORUS_ASSIGN_OR_RETURN(
        Process process,
        Process::Start({"/proc/self/exe", "--helper=training",
                        absl::StrCat("--control=", training->ranks_->path()),
                        absl::StrCat("--index=", i), absl::StrCat("--address=", daemon.address())},
                       {}));
    training->ranks_->Own(std::move(process));
  }
  CHORUS_RETURN_IF_ERROR(training->ranks_->AwaitHellos());
  Task task;
  task.op = "join";
  task.number = ranks;
  task.text = absl::StrCat("train-", getpid(), "-", name);
  CHORUS_RETURN_IF_ERROR(training->ranks_->Run(task).status());
  return training;
}

Contender Training::AsContender(const std::string& name, Role role, bool together) {
  HelperGroup* const ranks = ranks_.get();
  const auto run = [ranks, together](int64_t iterations) -> absl::StatusOr<std::vector<double>> {
    Task task;
    task.op = "train";
    task.number = together ? 0 : 1;
    task.iterations = iterations;
    task.warm_up = WarmUpFor(iterations);
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Outcome> outcomes, ranks->Run(task));
    for (const Outcome& outcome : outcomes) {
      if (together && outcome.text != outcomes.front().text) {
        return absl::DataLossError("parameters differ between ranks");
      }
    }
    return std::vector<double>{static_cast<double>(WallNanos(outcomes)) /
                               static_cast<double>(iterations)};
  };
  return {name, role, {{"", run}}};
}

int RunTrainingHelper(const std::string& control_path, int index, const std::string& address) {
  TrainingRank rank(index, address);
  return RunHelper(control_path, index, [&rank](const Task& task) { return rank.Handle(task); });
}

}  // namespace bench
}  // namespace chorus
