// Experts on ranks against the same model on one rank, where every expert sees every row.
#include "examples/09_moe/layer.h"

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "chorus/nn/nn.h"
#include "core/base/error.h"
#include "gtest/gtest.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/job.h"

namespace moe {
namespace {

namespace nn = chorus::nn;
using chorus::DType;
using chorus::FromHost;
using chorus::Tensor;
using chorus::World;
using chorus::conformance::ConformanceParam;
using chorus::conformance::DirectCluster;
using chorus::conformance::Job;
using chorus::conformance::Values;

using Doubles = std::vector<double>;
constexpr int64_t kWidth = 3, kHidden = 5;
constexpr int kSteps = 3;

ConformanceParam Host() { return {"Host", DirectCluster("host")}; }

// The same parameters by the same names, and no row goes anywhere.
class OnOneRank : public nn::Module {
 public:
  explicit OnOneRank(int experts)
      : Module("OnOneRank"),
        gate_(Add<nn::Linear>("gate", kWidth, experts, /*bias=*/false)),
        experts_(Add<nn::ModuleMap>("experts")) {
    for (int e = 0; e < experts; ++e) experts_.Insert<Expert>(std::to_string(e), kWidth, kHidden);
  }
  Tensor Forward(const Tensor& x) override {
    const Tensor shares = Softmax(gate_(x));
    const Tensor chosen = ArgMax(shares, -1, /*keep_dims=*/true);
    Tensor y = x * 0.0;
    for (size_t e = 0; e < experts_.children().size(); ++e) {
      const auto index = static_cast<int64_t>(e);
      const Tensor there = Cast(Equal(chosen, static_cast<double>(index)), DType::kF64);
      y += there * Slice(shares, 1, index, index + 1) * (*experts_.children()[e].module)(x);
    }
    return y;
  }

 private:
  nn::Linear& gate_;
  nn::ModuleMap& experts_;
};

// Rows of all ranks, and what the mean of their squared differences from is the loss.
struct Data {
  Doubles x;
  Doubles y;
};
Data DataOf(int64_t rows) {
  Data data;
  for (int64_t i = 0; i < rows * kWidth; ++i) {
    data.x.push_back(std::sin(12.9898 * static_cast<double>(i + 1)));
    data.y.push_back(std::cos(78.233 * static_cast<double>(i + 1)));
  }
  return data;
}
Tensor Rows(const chorus::DeviceRef& device, const Doubles& all, int64_t begin, int64_t end) {
  return FromHost(device, Doubles(all.begin() + begin * kWidth, all.begin() + end * kWidth),
                  {end - begin, kWidth});
}

// By name: parameters before each step and behind the last one; and the losses.
struct Trained {
  std::map<std::string, std::vector<Doubles>> parameters;
  std::vector<double> losses;
};
// What is done to the gate's weight first.
using Gate = std::function<Tensor(const Tensor& weight)>;

void Train(nn::Module* model, const chorus::DeviceRef& device, const std::vector<Tensor>& batch,
           double share, const nn::TrainStep::Options& options, const Gate& gate,
           const std::function<Tensor(const Tensor&)>& sum, Trained* trained) {
  ASSERT_TRUE(model->Init(device, 1, DType::kF64).ok());
  const nn::Variable weight = model->parameters()[0];
  if (gate != nullptr) weight.Set(gate(weight()));
  nn::Sgd::Options rate;
  rate.momentum = 0.9;
  nn::Sgd sgd(model->parameters(), rate);
  nn::TrainStep step(
      model, &sgd,
      [&](const std::vector<Tensor>& in) { return nn::MseLoss((*model)(in[0]), in[1]) * share; },
      options);
  const auto keep = [&] {
    for (const nn::NamedVariable& named : model->named_variables()) {
      trained->parameters[named.name].push_back(Values<double>(named.variable()));
    }
  };
  keep();
  for (int i = 0; i < kSteps; ++i) {
    const absl::StatusOr<Tensor> loss = step(batch);
    ASSERT_TRUE(loss.ok()) << loss.status();
    trained->losses.push_back(Values<double>(sum(*loss)).at(0));
    keep();
  }
  EXPECT_EQ(step.traces(), 1);
}

void ExpectNear(const Trained& got, const Trained& expected) {
  for (size_t i = 0; i < kSteps; ++i) EXPECT_NEAR(got.losses[i], expected.losses[i], 1e-12) << i;
  for (const auto& parameter : got.parameters) {
    const auto it = expected.parameters.find(parameter.first);
    ASSERT_NE(it, expected.parameters.end()) << parameter.first;
    for (size_t i = 0; i <= kSteps; ++i) {
      ASSERT_EQ(parameter.second[i].size(), it->second[i].size());
      for (size_t k = 0; k < it->second[i].size(); ++k) {
        EXPECT_NEAR(parameter.second[i][k], it->second[i][k], 1e-12)
            << parameter.first << "[" << k << "] after " << i << " steps";
      }
    }
  }
}

Trained TrainOnOneRank(int experts, int64_t rows, const Gate& gate) {
  Trained trained;
  Job job(Host(), 1);
  job.Run([&](int, World& world) {
    const Data data = DataOf(rows);
    OnOneRank model(experts);
    Train(
        &model, world, {Rows(world, data.x, 0, rows), Rows(world, data.y, 0, rows)}, 1, {}, gate,
        [](const Tensor& loss) { return loss; }, &trained);
  });
  return trained;
}

std::vector<Trained> TrainOnRanks(int ranks, int64_t rows, const Gate& gate) {
  std::vector<Trained> trained(static_cast<size_t>(ranks));
  Job job(Host(), ranks);
  job.Run([&](int rank, World& world) {
    const Data data = DataOf(rows);
    const int64_t begin = rows / ranks * rank;
    const int64_t end = begin + rows / ranks;
    Moe model(kWidth, kHidden, world);
    nn::TrainStep::Options options;
    options.on_gradients = AddShared(model.parameters(), model.expert_parameters(), world);
    Train(
        &model, world, {Rows(world, data.x, begin, end), Rows(world, data.y, begin, end)},
        1.0 / ranks, options, gate, [&](const Tensor& loss) { return AllReduce(loss, world); },
        &trained[static_cast<size_t>(rank)]);
  });
  return trained;
}

TEST(MoeTest, ExpertsOnRanksTrainAsTheyDoOnOne) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int64_t each : {1, 5}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, " << each << " rows each");
      const Trained expected = TrainOnOneRank(ranks, ranks * each, nullptr);
      const std::vector<Trained> got = TrainOnRanks(ranks, ranks * each, nullptr);
      for (int rank = 0; rank < ranks; ++rank) {
        const Trained& trained = got[static_cast<size_t>(rank)];
        ExpectNear(trained, expected);
        EXPECT_EQ(trained.parameters.size(), 5u);  // the gate, and one expert's
        EXPECT_EQ(trained.parameters.count("experts." + std::to_string(rank) + ".0.weight"), 1u);
      }
    }
  }
}

// All rows for one expert: its rank gets them all, and the others' experts stay as they are.
TEST(MoeTest, AnExpertMayGetEverythingOrNothing) {
  constexpr int kRanks = 3;
  // Scores of 0 for everybody: of equals the first is taken.
  const Gate favourite = [](const Tensor& weight) { return weight * 0.0; };
  Trained expected = TrainOnOneRank(kRanks, kRanks * 4, favourite);
  const std::vector<Trained> got = TrainOnRanks(kRanks, kRanks * 4, favourite);
  for (const Trained& trained : got) EXPECT_EQ(trained.losses[0], got[0].losses[0]);
  for (const Trained& trained : got) ExpectNear(trained, expected);
  for (const std::string idle : {"experts.1.2.weight", "experts.2.2.bias"}) {
    EXPECT_EQ(expected.parameters[idle][0], expected.parameters[idle][1]);
  }
  EXPECT_NE(expected.parameters["experts.0.2.bias"][0], expected.parameters["experts.0.2.bias"][1]);
}

TEST(MoeTest, BalanceIsOneWhereAllGetAlikeAndMoreElsewhere) {
  Job job(Host(), 2);
  job.Run([&](int, World& world) {
    Moe model(1, 1, world);
    ASSERT_TRUE(model.Init(world, 1, DType::kF64).ok());
    model.parameters()[0].Set(FromHost<double>(world, {1, -1}, {2, 1}));
    const auto balance = [&](const Doubles& x) {
      const Tensor rows = FromHost(world, x, {static_cast<int64_t>(x.size()), 1});
      return Values<double>(model.Balance(rows)).at(0);
    };
    EXPECT_NEAR(balance({2, -2}), 1, 1e-12);
    // All to expert 0, whose share is 1 / (1 + e^-4).
    EXPECT_NEAR(balance({2, 2, 2}), 2 / (1 + std::exp(-4.0)), 1e-12);
    EXPECT_EQ(Values<int64_t>(model.ExpertOf(FromHost<double>(world, {3, -1, 2}, {3, 1}))),
              std::vector<int64_t>({0, 1, 0}));
    // Scores of 0 and 2e-8 are one share in f32, and of equal ones the first expert gets the row.
    ASSERT_TRUE(model.Init(world, 1, DType::kF32).ok());
    model.parameters()[0].Set(FromHost<float>(world, {0, 2e-8F}, {2, 1}));
    EXPECT_EQ(Values<int64_t>(model.ExpertOf(FromHost<float>(world, {1}, {1, 1}))),
              std::vector<int64_t>({0}));
  });
}

// What a rank's layers in front of it refused it calls both exchanges with: the others are told.
TEST(MoeTest, ARankWhoseInputHasFailedIsNamedAndNobodyWaits) {
  Job job(Host(), 2);
  job.Run([&](int rank, World& world) {
    Moe model(kWidth, kHidden, world);
    ASSERT_TRUE(model.Init(world, 1, DType::kF64).ok());
    const Tensor rows = FromHost<double>(world, Doubles(2 * kWidth, 1), {2, kWidth});
    for (int step = 1; step <= 2; ++step) {
      ASSERT_TRUE(world.Step(step).ok());
      const bool fails = step == 1 && rank == 0;
      const Tensor x = fails ? rows + FromHost<double>(world, {1, 2}, {2}) : rows;
      const absl::Status status = model(x).Wait();
      if (step == 2) {
        EXPECT_TRUE(status.ok()) << status;
      } else {
        EXPECT_EQ(chorus::ErrorOf(status).reason,
                  rank == 0 ? chorus::Reason::kBadType : chorus::Reason::kPeerRefused)
            << status;
      }
    }
  });
}

}  // namespace
}  // namespace moe
