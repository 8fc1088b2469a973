// The training step against a plain implementation of it, and its bits across everything that must
// not change them.
#include "examples/05_trainer/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "chorus/data/sampler.h"
#include "core/base/error.h"
#include "gtest/gtest.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/job.h"

namespace trainer {
namespace {

using chorus::World;
using chorus::conformance::ConformanceParam;
using chorus::conformance::DirectCluster;
using chorus::conformance::Job;
using chorus::conformance::JobOptions;
using chorus::conformance::TestSeed;

constexpr int64_t kGlobalBatch = 16;
constexpr int kSteps = 20;
constexpr float kMomentum = 0.9f;

// So small that the plain implementation is quick, and large enough for common work.
ModelShape Shape() {
  ModelShape shape;
  shape.pixels = 96;
  shape.hidden = 128;
  shape.classes = 5;
  return shape;
}

float RateOf(int step) { return 0.05f / static_cast<float>(1 + step / 4); }

Dataset RandomData() {
  std::mt19937_64 random(TestSeed());
  Dataset data;
  data.pixels = Shape().pixels;
  // The last step has a short batch.
  data.count = kSteps * kGlobalBatch - 5;
  for (int64_t i = 0; i < data.count * data.pixels; ++i) {
    data.images.push_back(static_cast<uint8_t>(random() % 256));
  }
  for (int64_t i = 0; i < data.count; ++i) {
    data.labels.push_back(static_cast<uint8_t>(random() % static_cast<uint64_t>(Shape().classes)));
  }
  return data;
}

using Parameters = std::vector<std::vector<float>>;  // kParameters of them

struct Training {
  Parameters initial;
  Parameters final;
  std::vector<float> losses;
};

// What every rank ends with.
std::vector<Training> Train(const ConformanceParam& param, int ranks, bool share, int under_way) {
  const Dataset data = RandomData();
  const std::vector<int64_t> order = chorus::data::EpochOrder(data.count, TestSeed(), 0);
  std::vector<Training> runs(static_cast<size_t>(ranks));
  JobOptions options;
  options.ranks = ranks;
  options.share_equal_work = share;
  Job job(param, options);
  job.Run([&](int rank, World& world) {
    Training& run = runs[static_cast<size_t>(rank)];
    absl::StatusOr<State> state = InitialState(world, Shape(), TestSeed());
    ASSERT_TRUE(state.ok()) << state.status();
    for (size_t i = 0; i < kParameters; ++i) {
      run.initial.push_back(chorus::conformance::Values<float>((*state)[i]));
    }
    Trainer trainer(world, Shape(), kMomentum, kGlobalBatch / ranks);
    std::vector<chorus::Tensor> losses;
    for (int step = 0; step < kSteps; ++step) {
      const int64_t begin = step * kGlobalBatch;
      const int64_t size = std::min(kGlobalBatch, data.count - begin);
      const int64_t from = begin + size * rank / ranks;
      const int64_t to = begin + size * (rank + 1) / ranks;
      absl::StatusOr<chorus::Tensor> loss =
          trainer.Step(TakeBatch(data, order, from, to - from), size, RateOf(step), &*state);
      ASSERT_TRUE(loss.ok()) << loss.status();
      losses.push_back(*loss);
      if (step < under_way) continue;
      ASSERT_TRUE(losses[static_cast<size_t>(step - under_way)].Wait().ok());
    }
    EXPECT_EQ(trainer.traces(), 1);
    for (const chorus::Tensor& loss : losses) {
      run.losses.push_back(chorus::conformance::Values<float>(loss).at(0));
    }
    for (size_t i = 0; i < kParameters; ++i) {
      run.final.push_back(chorus::conformance::Values<float>((*state)[i]));
    }
  });
  return runs;
}

// The same by loops, in double.
struct Plain {
  std::vector<std::vector<double>> final;
  std::vector<double> losses;
};
Plain Reference(const Parameters& initial) {
  const ModelShape shape = Shape();
  const auto pixels = static_cast<size_t>(shape.pixels);
  const auto hidden = static_cast<size_t>(shape.hidden);
  const auto classes = static_cast<size_t>(shape.classes);
  const Dataset data = RandomData();
  const std::vector<int64_t> order = chorus::data::EpochOrder(data.count, TestSeed(), 0);
  std::vector<std::vector<double>> p;
  for (const auto& values : initial) p.emplace_back(values.begin(), values.end());
  std::vector<std::vector<double>> m;
  for (const auto& values : p) m.emplace_back(values.size(), 0.0);
  Plain plain;
  for (int step = 0; step < kSteps; ++step) {
    const int64_t begin = step * kGlobalBatch;
    const int64_t size = std::min(kGlobalBatch, data.count - begin);
    std::vector<std::vector<double>> g;
    for (const auto& values : p) g.emplace_back(values.size(), 0.0);
    plain.losses.push_back(0);
    for (int64_t i = begin; i < begin + size; ++i) {
      const auto image = static_cast<size_t>(order[static_cast<size_t>(i)]);
      std::vector<double> x(pixels), h(hidden), y(classes);
      for (size_t k = 0; k < pixels; ++k) x[k] = data.images[image * pixels + k] / 255.0;
      for (size_t j = 0; j < hidden; ++j) {
        h[j] = p[1][j];
        for (size_t k = 0; k < pixels; ++k) h[j] += x[k] * p[0][k * hidden + j];
      }
      double total = 0;
      for (size_t c = 0; c < classes; ++c) {
        y[c] = p[3][c];
        for (size_t j = 0; j < hidden; ++j) y[c] += std::max(h[j], 0.0) * p[2][j * classes + c];
        total += std::exp(y[c]);
      }
      plain.losses.back() += (std::log(total) - y[data.labels[image]]) / static_cast<double>(size);
      for (size_t c = 0; c < classes; ++c) {
        const double d = (std::exp(y[c]) / total - (data.labels[image] == c ? 1 : 0)) /
                         static_cast<double>(size);
        g[3][c] += d;
        for (size_t j = 0; j < hidden; ++j) {
          g[2][j * classes + c] += std::max(h[j], 0.0) * d;
          if (h[j] <= 0) continue;
          const double dh = p[2][j * classes + c] * d;
          g[1][j] += dh;
          for (size_t k = 0; k < pixels; ++k) g[0][k * hidden + j] += x[k] * dh;
        }
      }
    }
    for (size_t i = 0; i < kParameters; ++i) {
      for (size_t k = 0; k < p[i].size(); ++k) {
        m[i][k] = m[i][k] * kMomentum + g[i][k];
        p[i][k] -= m[i][k] * RateOf(step);
      }
    }
  }
  plain.final = std::move(p);
  return plain;
}

ConformanceParam Host() { return {"Host", DirectCluster("host")}; }

bool SameBits(const Parameters& a, const Parameters& b) {
  for (size_t i = 0; i < kParameters; ++i) {
    if (a[i].size() != b[i].size() ||
        std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)) != 0) {
      return false;
    }
  }
  return true;
}

TEST(ModelTest, AnyNumberOfRanksTrainsAsOneProcessDoes) {
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    const std::vector<Training> runs = Train(Host(), ranks, /*share=*/true, /*under_way=*/4);
    ASSERT_EQ(runs[0].final.size(), kParameters);
    const Plain plain = Reference(runs[0].initial);
    for (size_t i = 0; i < kParameters; ++i) {
      double difference = 0;
      double norm = 0;
      for (size_t k = 0; k < plain.final[i].size(); ++k) {
        difference += std::pow(runs[0].final[i][k] - plain.final[i][k], 2);
        norm += std::pow(plain.final[i][k], 2);
      }
      EXPECT_LE(std::sqrt(difference / norm), 1e-5) << "parameter " << i;
    }
    for (size_t step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(runs[0].losses[step], plain.losses[step], 1e-5 * plain.losses[step]) << step;
    }
    for (const Training& run : runs) {
      EXPECT_TRUE(SameBits(run.final, runs[0].final));
      EXPECT_EQ(run.losses, runs[0].losses);
    }
  }
}

TEST(ModelTest, BitsDependOnNothingButTheNumberOfRanks) {
  constexpr int kRanks = 4;
  const std::vector<Training> first = Train(Host(), kRanks, true, 4);
  ASSERT_EQ(first[0].final.size(), kParameters);
  EXPECT_FALSE(SameBits(first[0].initial, first[0].final));
  const auto expect_same = [&](const char* what, const std::vector<Training>& other) {
    for (const Training& run : other) {
      EXPECT_TRUE(SameBits(run.final, first[0].final)) << what;
      EXPECT_EQ(run.losses, first[0].losses) << what;
    }
  };
  expect_same("again", Train(Host(), kRanks, true, 4));
  expect_same("every rank for itself", Train(Host(), kRanks, false, 4));
  expect_same("one step at a time", Train(Host(), kRanks, true, 0));
  expect_same("devices of their own", Train({"Sim", DirectCluster("sim")}, kRanks, true, 4));
}

TEST(ModelTest, TheRightOnesAreCountedOnAllRanks) {
  const Dataset data = RandomData();
  const std::vector<int64_t> order = chorus::data::EpochOrder(data.count, 1, 0);
  Job job(Host(), 2);
  job.Run([&](int rank, World& world) {
    absl::StatusOr<State> state = InitialState(world, Shape(), TestSeed());
    ASSERT_TRUE(state.ok()) << state.status();
    // A bias that only lets class 3 win.
    (*state)[3] = chorus::FromHost<float>(world, {0, 0, 0, 1e6f, 0}, {5});
    Trainer trainer(world, Shape(), kMomentum, 60);
    const Batch batch = TakeBatch(data, order, rank == 0 ? 0 : 60, rank == 0 ? 60 : 40);
    const auto count = trainer.CountRight(batch, *state);
    ASSERT_TRUE(count.ok()) << count.status();
    int64_t expected = 0;
    for (int i = 0; i < 100; ++i) {
      expected += data.labels[static_cast<size_t>(order[static_cast<size_t>(i)])] == 3;
    }
    EXPECT_EQ(chorus::conformance::Values<int64_t>(*count).at(0), expected);
  });
}

}  // namespace
}  // namespace trainer
