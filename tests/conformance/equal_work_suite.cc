// Work that ranks have in common: done once where that can be seen, and the same bits either way.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "gtest/gtest.h"
#include "tests/conformance/conformance.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

// More than what is left to each rank because it is small.
constexpr int64_t kSize = 20000;
constexpr int64_t kBytes = kSize * static_cast<int64_t>(sizeof(float));

// A step of momentum: inputs are parameters, momentum and this rank's data.
Compiled MomentumStep(const World& world, CompileOptions options = {}) {
  return Compile(
      [world](const std::vector<Tensor>& in) {
        const Tensor gradient = AllReduce(in[0] * in[2], world);
        const Tensor momentum = in[1] + gradient;
        const Tensor parameters = in[0] - momentum;
        return std::vector<Tensor>{parameters, momentum};
      },
      options);
}

struct State {
  Tensor parameters;
  Tensor momentum;
};

// The same on all ranks, one copy of it.
State CommonState(const World& world, const std::vector<float>& parameters) {
  const NoGrad no_grad;
  return {Broadcast(Upload(world, parameters), 0, world),
          Broadcast(Zeros(world, DType::kF32, {kSize}), 0, world)};
}

absl::Status Step(const Compiled& step, const Tensor& data, State* state) {
  CHORUS_ASSIGN_OR_RETURN(std::vector<Tensor> next,
                          step.Run({state->parameters, state->momentum, data}));
  *state = {next[0], next[1]};
  return absl::OkStatus();
}

std::vector<float> RandomFloats(uint64_t seed, float scale) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> uniform(-scale, scale);
  std::vector<float> values(kSize);
  for (float& value : values) value = uniform(random);
  return values;
}

JobOptions Ranks(int ranks, bool share) {
  JobOptions options;
  options.ranks = ranks;
  options.share_equal_work = share;
  return options;
}

// Parameters and momentum of every rank after some steps, all of them asked for at once.
std::vector<std::vector<float>> Train(const ConformanceParam& param, int ranks, bool share,
                                      bool donate) {
  std::vector<std::vector<float>> results(2 * static_cast<size_t>(ranks));
  Job job(param, Ranks(ranks, share));
  job.Run([&](int rank, World& world) {
    State state = CommonState(world, RandomFloats(TestSeed(), 1));
    const Tensor data =
        Upload(world, RandomFloats(TestSeed() + 1 + static_cast<uint64_t>(rank), 0.1f));
    CompileOptions options;
    if (donate) options.donate = {0, 1};
    const Compiled step = MomentumStep(world, options);
    for (int i = 0; i < 6; ++i) ASSERT_TRUE(Step(step, data, &state).ok());
    results[2 * static_cast<size_t>(rank)] = Values<float>(state.parameters);
    results[2 * static_cast<size_t>(rank) + 1] = Values<float>(state.momentum);
  });
  return results;
}

TEST_P(Conformance, AnUpdateHasTheSameBitsSharedDonatedOrNot) {
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    const auto first = Train(GetParam(), ranks, /*share=*/true, /*donate=*/false);
    const std::vector<std::vector<float>> others[] = {Train(GetParam(), ranks, false, false),
                                                      Train(GetParam(), ranks, true, true),
                                                      Train(GetParam(), ranks, false, true)};
    for (size_t i = 0; i < first.size(); ++i) {
      SCOPED_TRACE(i);
      ASSERT_EQ(first[i].size(), static_cast<size_t>(kSize));
      const auto equal = [&](const std::vector<float>& other) {
        return std::memcmp(first[i].data(), other.data(), kBytes) == 0;
      };
      EXPECT_TRUE(equal(first[i % 2]));
      for (const auto& other : others) EXPECT_TRUE(equal(other[i]));
    }
  }
}

// Whole numbers: every bit is right, whoever has computed it.
TEST_P(Conformance, RanksWithStateOfTheirOwnKeepTheirOwn) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    // Rank 2 has other parameters; the momentum is everybody's.
    State state = CommonState(world, Elements<float>(0, kSize));
    if (rank == 2) state.parameters = Upload(world, Elements<float>(rank, kSize));
    const Tensor data = Upload(world, std::vector<float>(kSize, 1.0f + static_cast<float>(rank)));
    const Compiled step = MomentumStep(world);
    ASSERT_TRUE(Step(step, data, &state).ok());
    ASSERT_TRUE(Step(step, data, &state).ok());
    std::vector<std::vector<float>> parameters = {
        Elements<float>(0, kSize), Elements<float>(0, kSize), Elements<float>(2, kSize)};
    std::vector<float> momentum(kSize, 0);
    for (int s = 0; s < 2; ++s) {
      for (size_t i = 0; i < kSize; ++i) {
        for (size_t r = 0; r < 3; ++r) momentum[i] += parameters[r][i] * static_cast<float>(r + 1);
        for (size_t r = 0; r < 3; ++r) parameters[r][i] -= momentum[i];
      }
    }
    EXPECT_EQ(Values<float>(state.parameters), parameters[static_cast<size_t>(rank)]);
    EXPECT_EQ(Values<float>(state.momentum), momentum);
  });
}

// What two collectives of equal operands give is not the same thing.
TEST_P(Conformance, TwoStepsFromOneStateAreTwo) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const State start = CommonState(world, Elements<float>(0, kSize));
    const Compiled step = MomentumStep(world);
    State states[] = {start, start};
    for (int s = 0; s < 2; ++s) {
      const Tensor data = Upload(world, std::vector<float>(kSize, 1.0f + static_cast<float>(s)));
      ASSERT_TRUE(Step(step, data, &states[s]).ok());
    }
    for (int s = 0; s < 2; ++s) {
      std::vector<float> expected = Elements<float>(0, kSize);
      for (float& p : expected) p *= static_cast<float>(s + 1) * 2;
      EXPECT_EQ(Values<float>(states[s].momentum), expected) << rank << " " << s;
    }
  });
}

// A rank that takes two steps as two runs meets one that takes them as one.
TEST_P(Conformance, StepsMayBeOneRunHereAndTwoThere) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    State state = CommonState(world, Elements<float>(0, kSize));
    const Tensor data = Upload(world, std::vector<float>(kSize, 1));
    const Compiled one = MomentumStep(world);
    if (rank == 0) {
      ASSERT_TRUE(Step(one, data, &state).ok());
      ASSERT_TRUE(Step(one, data, &state).ok());
    } else {
      const Compiled both = Compile([&](const std::vector<Tensor>& in) {
        State traced = {in[0], in[1]};
        for (int s = 0; s < 2; ++s) EXPECT_TRUE(Step(one, in[2], &traced).ok());
        return std::vector<Tensor>{traced.parameters, traced.momentum};
      });
      ASSERT_TRUE(Step(both, data, &state).ok());
    }
    std::vector<float> expected = Elements<float>(0, kSize);
    for (float& p : expected) {
      float momentum = 0;
      for (int s = 0; s < 2; ++s) {
        momentum += 2 * p;
        p -= momentum;
      }
    }
    EXPECT_EQ(Values<float>(state.parameters), expected);
  });
}

// The same where the two have nothing to do with each other, so that all of it is common work.
TEST_P(Conformance, UpdatesMayBeOneRunHereAndTwoThere) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    State states[] = {CommonState(world, Elements<float>(0, kSize)),
                      CommonState(world, Elements<float>(1, kSize))};
    const Tensor data = Upload(world, std::vector<float>(kSize, 1));
    const Compiled one = MomentumStep(world);
    if (rank == 0) {
      for (State& state : states) ASSERT_TRUE(Step(one, data, &state).ok());
    } else {
      const Compiled both = Compile([&](const std::vector<Tensor>& in) {
        State traced[] = {{in[0], in[1]}, {in[2], in[3]}};
        for (State& state : traced) EXPECT_TRUE(Step(one, in[4], &state).ok());
        return std::vector<Tensor>{traced[0].parameters, traced[0].momentum, traced[1].parameters,
                                   traced[1].momentum};
      });
      const auto next = both.Run({states[0].parameters, states[0].momentum, states[1].parameters,
                                  states[1].momentum, data});
      ASSERT_TRUE(next.ok()) << next.status();
      for (size_t s = 0; s < 2; ++s) states[s] = {(*next)[2 * s], (*next)[2 * s + 1]};
    }
    for (int s = 0; s < 2; ++s) {
      std::vector<float> expected = Elements<float>(s, kSize);
      for (float& p : expected) p -= 2 * p;
      EXPECT_EQ(Values<float>(states[s].parameters), expected) << s;
    }
  });
}

TEST_P(ConformanceInside, AnUpdateIsDoneOnceAndKeptOnce) {
  constexpr int kRanks = 4;
  constexpr int kSteps = 5;
  Job job(GetParam(), kRanks);
  const int sharing = std::min(GetParam().sharing, kRanks);
  const int spared = kRanks - kRanks / sharing;  // ranks in a step
  std::vector<State> states(kRanks);
  job.Run([&](int rank, World& world) {
    State& state = states[static_cast<size_t>(rank)];
    state = CommonState(world, Elements<float>(0, kSize));
    const Tensor data = Upload(world, std::vector<float>(kSize, 1.0f / kRanks));
    const Compiled step = MomentumStep(world);
    for (int i = 0; i < kSteps; ++i) ASSERT_TRUE(Step(step, data, &state).ok());
    ASSERT_TRUE(state.parameters.Wait().ok());
  });
  const ClusterCounts counts = job.cluster().Counts();
  // Two ops and two results of each step, for the ranks that did not run them.
  EXPECT_EQ(counts.shared_kernels, kSteps * spared * 2);
  EXPECT_EQ(counts.shared_bytes, kSteps * spared * 2 * kBytes);
}

// What the others hold of the common state does not depend on who computed it.
TEST_P(ConformanceInside, CommonStateOutlivesARankAndGoesOnBeingShared) {
  constexpr int kRanks = 3;
  Job job(GetParam(), kRanks);
  std::vector<State> states(kRanks);
  job.Run([&](int rank, World& world) {
    State& state = states[static_cast<size_t>(rank)];
    state = CommonState(world, Elements<float>(0, kSize));
    const Tensor data = Upload(world, std::vector<float>(kSize, 1));
    ASSERT_TRUE(Step(MomentumStep(world), data, &state).ok());
    ASSERT_TRUE(state.parameters.Wait().ok());
  });
  job.cluster().Kill(job.session(0));
  std::vector<float> expected = Elements<float>(0, kSize);
  std::vector<float> momentum(kSize);
  for (size_t i = 0; i < kSize; ++i) {
    momentum[i] = 3 * expected[i];
    expected[i] -= momentum[i];
  }
  std::vector<float> next = expected;
  for (size_t i = 0; i < kSize; ++i) next[i] -= momentum[i] + 2 * next[i];
  job.Run([&](int rank, World& world) {
    if (rank == 0) return;
    State& state = states[static_cast<size_t>(rank)];
    EXPECT_EQ(Values<float>(state.parameters), expected);
    const auto reformed = world.Reform();
    ASSERT_TRUE(reformed.ok()) << reformed.status();
    const Tensor data = Upload(world, std::vector<float>(kSize, 1));
    ASSERT_TRUE(Step(MomentumStep(world), data, &state).ok());
    EXPECT_EQ(Values<float>(state.parameters), next);
  });
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
