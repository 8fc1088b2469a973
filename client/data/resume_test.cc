// A training that was interrupted in the middle of an epoch, and went on from its checkpoint: bit
// for bit the one that was not.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "chorus/chorus.h"
#include "chorus/data/data.h"
#include "chorus/nn/nn.h"
#include "client/testing/ranks.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace data {
namespace {

using testing::OnRanks;
using testing::Values;

constexpr int64_t kSamples = 21;
constexpr int64_t kBatch = 2;

// Each sample gets noise of its own in each epoch, and the model drops out.
std::shared_ptr<const Dataset> Noisy() {
  std::vector<float> x, y;
  for (int64_t i = 0; i < kSamples; ++i) {
    for (int64_t c = 0; c < 3; ++c) x.push_back(static_cast<float>((7 * i + 3 * c) % 11) / 8);
    y.push_back(static_cast<float>(i % 4));
  }
  const auto plain = *TensorDataset::Create(
      {HostTensor::Of(std::move(x), {kSamples, 3}), HostTensor::Of(std::move(y), {kSamples, 1})});
  return std::make_shared<TransformedDataset>(
      plain, [](HostTensors sample, uint64_t seed) -> absl::StatusOr<HostTensors> {
        std::mt19937_64 random(seed);
        CHORUS_ASSIGN_OR_RETURN(std::vector<float> x, sample[0].Read<float>());
        for (float& value : x) value += static_cast<float>(random() % 256) / 2048;
        sample[0] = HostTensor::Of(std::move(x), {3});
        return sample;
      });
}

std::unique_ptr<DataLoader> LoaderOf(const World& world, uint64_t seed, int threads) {
  DistributedSampler::Options sampling;
  sampling.rank = world.rank();
  sampling.replicas = world.size();
  sampling.seed = seed;
  DataLoader::Options loading;
  loading.batch_size = kBatch;
  loading.threads = threads;
  loading.device = world.device();
  return *DataLoader::Create(Noisy(), *DistributedSampler::Create(kSamples, sampling), loading);
}

// One rank's.
struct Training {
  Training(const World& world, uint64_t seed, int threads)
      : model({nn::Make<nn::Linear>(3, 6), nn::ReluLayer(), nn::Make<nn::Dropout>(0.25),
               nn::Make<nn::Linear>(6, 1)}) {
    EXPECT_TRUE(model.Init(world, seed).ok());
    optimizer = std::make_unique<nn::Adam>(model.parameters(), nn::Adam::Options());
    optimizer->SetSchedule(nn::CosineDecay(40));
    step = std::make_unique<nn::TrainStep>(
        &model, optimizer.get(),
        [this](const std::vector<Tensor>& in) { return nn::MseLoss(model(in[0]), in[1]); },
        nn::TrainStep::Options{world.group()});
    loader = LoaderOf(world, seed, threads);
  }

  // Steps until so many are done.
  absl::Status RunTo(int64_t end) {
    while (done < end) {
      CHORUS_ASSIGN_OR_RETURN(const Batch batch, loader->Next());
      if (batch.empty()) {
        loader->SetEpoch(loader->epoch() + 1);
        continue;
      }
      CHORUS_ASSIGN_OR_RETURN(const Tensor loss, (*step)(batch.tensors));
      CHORUS_ASSIGN_OR_RETURN(const float value, loss.Item<float>());
      losses.push_back(value);
      ++done;
    }
    return absl::OkStatus();
  }
  absl::Status Save(const std::string& name, const Group& ranks) {
    nn::Progress progress = loader->state();
    progress["step"] = absl::StrCat(done);
    return nn::SaveShardedCheckpoint(name, ranks, model, optimizer.get(), progress);
  }
  absl::Status Load(const std::string& name) {
    CHORUS_ASSIGN_OR_RETURN(const nn::Progress progress,
                            nn::LoadCheckpoint(nn::ShardIndexPath(name), &model, optimizer.get()));
    if (!absl::SimpleAtoi(progress.at("step"), &done)) return BadType("no step");
    step->SetSteps(done);
    return loader->Restore(progress);
  }
  std::vector<std::vector<float>> All() {
    std::vector<std::vector<float>> all = {losses};
    for (const nn::Variable& variable : model.variables()) all.push_back(Values<float>(variable()));
    return all;
  }

  nn::Sequential model;
  std::unique_ptr<nn::Adam> optimizer;
  std::unique_ptr<nn::TrainStep> step;
  std::unique_ptr<DataLoader> loader;
  int64_t done = 0;
  std::vector<float> losses;
};

// The same with the optimizer's state in pieces on the ranks, call by call.
struct ShardedTraining {
  ShardedTraining(const World& world, uint64_t seed, int threads)
      : model({nn::Make<nn::Linear>(3, 6), nn::ReluLayer(), nn::Make<nn::Linear>(6, 1)}),
        loader(LoaderOf(world, seed, threads)) {
    EXPECT_TRUE(model.Init(world, seed).ok());
    whole = std::make_unique<nn::Adam>(model.parameters(), nn::Adam::Options());
    optimizer = std::make_unique<nn::ShardedOptimizer>(
        model.parameters(), world.group(), [](const std::vector<nn::ParameterGroup>& pieces) {
          return std::make_unique<nn::Adam>(pieces, nn::Adam::Options());
        });
  }

  absl::Status RunTo(int64_t end) {
    while (done < end) {
      CHORUS_ASSIGN_OR_RETURN(const Batch batch, loader->Next());
      if (batch.empty()) {
        loader->SetEpoch(loader->epoch() + 1);
        continue;
      }
      const Tensor loss = nn::MseLoss(model(batch.tensors[0]), batch.tensors[1]);
      CHORUS_RETURN_IF_ERROR(Backward(loss));
      CHORUS_RETURN_IF_ERROR(optimizer->Step());
      ++done;
    }
    return absl::OkStatus();
  }
  absl::Status Save(const std::string& name, const Group& ranks) {
    CHORUS_RETURN_IF_ERROR(optimizer->Gather(whole.get()));
    nn::Progress progress = loader->state();
    progress["step"] = absl::StrCat(done);
    return nn::SaveShardedCheckpoint(name, ranks, model, whole.get(), progress);
  }
  absl::Status Load(const std::string& name) {
    CHORUS_ASSIGN_OR_RETURN(const nn::Progress progress,
                            nn::LoadCheckpoint(nn::ShardIndexPath(name), &model, whole.get()));
    if (!absl::SimpleAtoi(progress.at("step"), &done)) return BadType("no step");
    CHORUS_RETURN_IF_ERROR(optimizer->Scatter(whole.get()));
    return loader->Restore(progress);
  }
  // Of the model, and of the moments of all.
  std::vector<std::vector<float>> All() {
    std::vector<std::vector<float>> all;
    for (const nn::Variable& variable : model.variables()) all.push_back(Values<float>(variable()));
    EXPECT_TRUE(optimizer->Gather(whole.get()).ok());
    const auto state = whole->State();
    EXPECT_TRUE(state.ok()) << state.status();
    for (const nn::Optimizer::ParameterState& of_parameter : *state) {
      for (const Tensor& slot : of_parameter.slots) all.push_back(Values<float>(slot));
    }
    return all;
  }

  nn::Sequential model;
  std::unique_ptr<nn::Adam> whole;
  std::unique_ptr<nn::ShardedOptimizer> optimizer;
  std::unique_ptr<DataLoader> loader;
  int64_t done = 0;
};

class ResumeTest : public ::testing::Test {
 protected:
  ResumeTest() {
    folder_ = ::testing::TempDir() + "/resume.XXXXXX";
    EXPECT_NE(mkdtemp(&folder_[0]), nullptr);
  }
  ~ResumeTest() override { (void)std::system(("rm -rf " + folder_).c_str()); }

  // What `run` makes of each rank's training, each in a thread of its own.
  template <typename T = Training, typename F>
  std::vector<std::vector<std::vector<float>>> OnEach(int size, uint64_t seed, int threads,
                                                      const F& run) {
    std::vector<std::vector<std::vector<float>>> all(static_cast<size_t>(size));
    OnRanks(size, [&](const World& world, int rank) {
      T training(world, seed, threads);
      const absl::Status status = run(&training, world);
      EXPECT_TRUE(status.ok()) << "rank " << rank << ": " << status;
      all[static_cast<size_t>(rank)] = training.All();
    });
    return all;
  }

  std::string folder_;
};

TEST_F(ResumeTest, AResumedTrainingIsBitForBitTheOneThatWasNotInterrupted) {
  // 21 samples in batches of 2 are 11 steps of one rank, or 6 of two: an epoch is cut in two.
  constexpr int64_t kCut = 9;
  constexpr int64_t kEnd = 20;
  for (const int size : {1, 2}) {
    const std::string name = absl::StrCat(folder_, "/", size);
    const auto whole = OnEach(size, 7, /*threads=*/0, [](Training* training, const World&) {
      return training->RunTo(kEnd);
    });
    OnEach(size, 7, /*threads=*/2, [&](Training* training, const World& world) {
      CHORUS_RETURN_IF_ERROR(training->RunTo(kCut));
      return training->Save(name, world.group());
    });
    // Of another seed: what counts is in the checkpoint.
    auto resumed = OnEach(size, 99, /*threads=*/1, [&](Training* training, const World&) {
      CHORUS_RETURN_IF_ERROR(training->Load(name));
      EXPECT_EQ(training->done, kCut);
      return training->RunTo(kEnd);
    });
    for (size_t r = 0; r < whole.size(); ++r) {
      ASSERT_EQ(whole[r][0].size(), static_cast<size_t>(kEnd));
      EXPECT_EQ(resumed[r][0], std::vector<float>(whole[r][0].begin() + kCut, whole[r][0].end()));
      resumed[r][0] = whole[r][0];
      EXPECT_EQ(resumed[r], whole[r]);
    }
  }
}

TEST_F(ResumeTest, OtherRanksGoOnWithWhatIsLeftOfTheEpoch) {
  const std::string name = folder_ + "/two";
  OnEach(2, 7, /*threads=*/1, [&](Training* training, const World& world) {
    CHORUS_RETURN_IF_ERROR(training->RunTo(3));
    return training->Save(name, world.group());
  });
  const auto three = OnEach(3, 7, /*threads=*/1, [&](Training* training, const World&) {
    CHORUS_RETURN_IF_ERROR(training->Load(name));
    // 12 of 21 have been received; 9 are left, 3 for each, in two batches.
    EXPECT_EQ(training->loader->batches(), 2);
    return training->RunTo(5);
  });
  for (const auto& rank : three) EXPECT_EQ(rank[1], three[0][1]);
}

TEST_F(ResumeTest, AnOptimizersStateInPiecesGoesOnToo) {
  constexpr int64_t kCut = 4;
  constexpr int64_t kEnd = 9;
  const std::string name = folder_ + "/pieces";
  const auto whole = OnEach<ShardedTraining>(
      2, 7, /*threads=*/0,
      [](ShardedTraining* training, const World&) { return training->RunTo(kEnd); });
  const auto cut = OnEach<ShardedTraining>(2, 7, /*threads=*/1,
                                           [&](ShardedTraining* training, const World& world) {
                                             CHORUS_RETURN_IF_ERROR(training->RunTo(kCut));
                                             return training->Save(name, world.group());
                                           });
  const auto resumed =
      OnEach<ShardedTraining>(2, 99, /*threads=*/1, [&](ShardedTraining* training, const World&) {
        CHORUS_RETURN_IF_ERROR(training->Load(name));
        return training->RunTo(kEnd);
      });
  EXPECT_EQ(resumed, whole);
  EXPECT_NE(cut[0], whole[0]);
  // On three ranks the pieces are others, and together the same.
  const auto three = OnEach<ShardedTraining>(
      3, 99, /*threads=*/0,
      [&](ShardedTraining* training, const World&) { return training->Load(name); });
  for (const auto& rank : three) EXPECT_EQ(rank, cut[0]);
}

}  // namespace
}  // namespace data
}  // namespace chorus
