#include "benchmarks/training.h"

#include <unistd.h>

#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/timed_loop.h"
#include "benchmarks/transformer.h"
#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/nn/nn.h"
#include "core/base/error.h"
#include "examples/05_trainer/dataset.h"
#include "examples/05_trainer/model.h"
#include "examples/07_resnet/model.h"

namespace chorus {
namespace bench {
namespace {

constexpr size_t kUnderWay = 4;
constexpr uint64_t kSeed = 1;

// A model of one rank in a world, and steps of it.
class Trainee {
 public:
  virtual ~Trainee() = default;

  absl::Status Step() {
    CHORUS_ASSIGN_OR_RETURN(Tensor loss, Begin());
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
  // Of all bits of what ranks that train together have in common.
  absl::StatusOr<std::string> Fingerprint() const {
    std::string bits;
    for (const Tensor& tensor : Common()) {
      CHORUS_ASSIGN_OR_RETURN(const std::vector<float> values, tensor.Read<float>());
      bits.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    }
    return absl::StrCat(std::hash<std::string>()(bits));
  }

 private:
  // A step's loss, at once.
  virtual absl::StatusOr<Tensor> Begin() = 0;
  virtual std::vector<Tensor> Common() const = 0;

  std::deque<Tensor> losses_;
};

// `count` integers below `limit`; others on each rank.
template <typename T>
std::vector<T> RandomIntegers(int rank, int64_t count, int limit) {
  std::mt19937_64 random(kSeed + static_cast<uint64_t>(rank));
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<T>(random() % static_cast<uint64_t>(limit)));
  }
  return values;
}

// Lesson 5's, whose step is written out by hand.
class Perceptron : public Trainee {
 public:
  static absl::StatusOr<std::unique_ptr<Trainee>> Start(const World& world) {
    const trainer::ModelShape shape;
    CHORUS_ASSIGN_OR_RETURN(trainer::State state, trainer::InitialState(world, shape, kSeed));
    return std::unique_ptr<Trainee>(std::make_unique<Perceptron>(world, shape, std::move(state)));
  }

  Perceptron(const World& world, const trainer::ModelShape& shape, trainer::State state)
      : global_(kBatch * world.size()),
        trainer_(world, shape, 0.9f, kBatch),
        state_(std::move(state)) {
    batch_.size = kBatch;
    batch_.images = RandomIntegers<uint8_t>(world.rank(), kBatch * shape.pixels, 256);
    batch_.labels = RandomIntegers<uint8_t>(world.rank(), kBatch, static_cast<int>(shape.classes));
  }

 private:
  static constexpr int64_t kBatch = 64;  // of a rank

  absl::StatusOr<Tensor> Begin() override { return trainer_.Step(batch_, global_, 1e-4f, &state_); }
  std::vector<Tensor> Common() const override { return state_; }

  const int64_t global_;
  trainer::Trainer trainer_;
  trainer::Batch batch_;
  trainer::State state_;
};

// A module by TrainStep; its batch comes from the host in each step.
class ModuleTrainee : public Trainee {
 public:
  // What the model takes and labels, of one step.
  using Batch = std::function<std::vector<Tensor>()>;
  static absl::StatusOr<std::unique_ptr<Trainee>> Start(const World& world,
                                                        std::shared_ptr<nn::Module> model,
                                                        std::unique_ptr<nn::Optimizer> optimizer,
                                                        Batch batch) {
    CHORUS_RETURN_IF_ERROR(model->Init(world, kSeed));
    return std::unique_ptr<Trainee>(std::make_unique<ModuleTrainee>(
        world, std::move(model), std::move(optimizer), std::move(batch)));
  }
  ModuleTrainee(const World& world, std::shared_ptr<nn::Module> model,
                std::unique_ptr<nn::Optimizer> optimizer, Batch batch)
      : model_(std::move(model)),
        optimizer_(std::move(optimizer)),
        batch_(std::move(batch)),
        step_(
            model_.get(), optimizer_.get(),
            [this](const std::vector<Tensor>& in) {
              return nn::CrossEntropyLoss((*model_)(in[0]), in[1]);
            },
            world.group()) {}

 private:
  absl::StatusOr<Tensor> Begin() override { return step_(batch_()); }
  std::vector<Tensor> Common() const override {
    std::vector<Tensor> parameters;
    for (const nn::Variable& parameter : model_->parameters()) parameters.push_back(parameter());
    return parameters;
  }

  const std::shared_ptr<nn::Module> model_;
  const std::unique_ptr<nn::Optimizer> optimizer_;
  const Batch batch_;
  nn::TrainStep step_;
};

absl::StatusOr<std::unique_ptr<Trainee>> StartTransformer(const World& world) {
  constexpr int64_t kBatch = 8;
  const TransformerSizes sizes;
  auto model = Transformer(sizes);
  auto optimizer = std::make_unique<nn::AdamW>(model->parameters(), nn::AdamW::Options());
  const auto text = RandomIntegers<uint8_t>(world.rank(), 2 * kBatch * sizes.context,
                                            static_cast<int>(sizes.symbols));
  const std::vector<uint8_t> now(text.begin(), text.begin() + kBatch * sizes.context);
  const std::vector<uint8_t> next(text.begin() + kBatch * sizes.context, text.end());
  const Shape shape = {kBatch, sizes.context};
  return ModuleTrainee::Start(world, std::move(model), std::move(optimizer), [=] {
    return std::vector<Tensor>{FromHost(world, now, shape), FromHost(world, next, shape)};
  });
}

absl::StatusOr<std::unique_ptr<Trainee>> StartResnet(const World& world) {
  constexpr int64_t kBatch = 32, kSide = 28;
  auto model = resnet::Resnet();
  nn::Sgd::Options options;
  options.learning_rate = 1e-4;
  options.momentum = 0.9;
  options.nesterov = true;
  auto optimizer = std::make_unique<nn::Sgd>(model->parameters(), options);
  const auto pixels = RandomIntegers<uint8_t>(world.rank(), kBatch * kSide * kSide, 256);
  const auto labels = RandomIntegers<uint8_t>(world.rank(), kBatch, 10);
  return ModuleTrainee::Start(world, std::move(model), std::move(optimizer), [=] {
    const Tensor images = FromHost(world, pixels, {kBatch, 1, kSide, kSide});
    return std::vector<Tensor>{Cast(images, DType::kF32) * (1.0 / 255),
                               FromHost(world, labels, {kBatch})};
  });
}

absl::StatusOr<std::unique_ptr<Trainee>> StartTrainee(const std::string& model,
                                                      const World& world) {
  if (model == "perceptron") return Perceptron::Start(world);
  if (model == "transformer") return StartTransformer(world);
  if (model == "resnet") return StartResnet(world);
  return absl::InvalidArgumentError(absl::StrCat("no model ", model));
}

class TrainingRank {
 public:
  TrainingRank(int index, std::string address) : rank_(index), address_(std::move(address)) {}

  Outcome Handle(const Task& task) {
    Outcome outcome;
    if (task.op == "join") {
      outcome.status = Join(task.text, static_cast<int>(task.number));
      return outcome;
    }
    const bool alone = task.number == 1;
    std::unique_ptr<Trainee>& trainee = (alone ? alone_ : together_)[task.text];
    if (trainee == nullptr) {
      absl::StatusOr<std::unique_ptr<Trainee>> started =
          StartTrainee(task.text, alone ? own_world_ : world_);
      outcome.status = started.status();
      if (!started.ok()) return outcome;
      trainee = *std::move(started);
    }
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
    CHORUS_ASSIGN_OR_RETURN(world_, session_.Join(options));
    options.name = absl::StrCat(name, "-", rank_);
    options.rank = 0;
    options.size = 1;
    CHORUS_ASSIGN_OR_RETURN(own_world_, session_.Join(options));
    return absl::OkStatus();
  }

  const int rank_;
  const std::string address_;
  Session session_;
  World world_;
  World own_world_;
  // By model.
  std::map<std::string, std::unique_ptr<Trainee>> together_;
  std::map<std::string, std::unique_ptr<Trainee>> alone_;
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

absl::StatusOr<Contender> Training::AsContender(const std::string& name, Role role,
                                                const std::string& model, bool together) {
  HelperGroup* const ranks = ranks_.get();
  Task task;
  task.op = "train";
  task.number = together ? 0 : 1;
  task.text = model;
  // The first step, which makes a graph.
  task.iterations = 1;
  CHORUS_RETURN_IF_ERROR(ranks->Run(task).status());
  const auto run = [ranks, together,
                    task](int64_t iterations) mutable -> absl::StatusOr<std::vector<double>> {
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
  return Contender{name, role, {{"", run}}};
}

int RunTrainingHelper(const std::string& control_path, int index, const std::string& address) {
  TrainingRank rank(index, address);
  return RunHelper(control_path, index, [&rank](const Task& task) { return rank.Handle(task); });
}

}  // namespace bench
}  // namespace chorus
