// Steps that give their state away have the bits of steps that do not, whatever they return.
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "chorus/functional/math.h"
#include "gtest/gtest.h"
#include "tests/conformance/conformance.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

using Tensors = std::vector<Tensor>;

// A random step: as many tensors of state come back as go in, in any shape of returning them: as
// they are, twice, by way of ops that are nothing (reshape, detach), beside others that could take
// their memory. The same on every rank, and at every call: it is drawn again from its seed.
class RandomStep {
 public:
  explicit RandomStep(uint64_t seed) : seed_(seed) {
    std::mt19937_64 random(seed);
    num_states_ = 1 + static_cast<int>(random() % 4);
    // Ranks share the work of large ones.
    size_ = random() % 2 == 0 ? 6 : 20000;
    for (int i = 0; i < num_states_; ++i) {
      if (random() % 4 > 0) donate_.push_back(i);
    }
  }

  int num_states() const { return num_states_; }
  int64_t size() const { return size_; }
  const std::vector<int>& donate() const { return donate_; }

  // `in`: the state, then data that is not given away.
  Tensors Call(const Tensors& in, const Tensor& captured, const World& world) const {
    std::mt19937_64 random(seed_ + 1);
    const auto draw = [&random](size_t n) { return static_cast<size_t>(random() % n); };
    Tensors all = in;
    all.push_back(captured);
    const auto any = [&]() -> const Tensor& { return all[draw(all.size())]; };
    const Shape flat = {size_};
    const size_t ops = draw(9);
    for (size_t i = 0; i < ops; ++i) {
      switch (draw(8)) {
        case 0:
          all.push_back(Reshape(Reshape(any(), {2, size_ / 2}), flat));
          break;
        case 1:
          all.push_back(any().Detach());
          break;
        case 2:
          all.push_back(AllReduce(any() * 0.25, world));
          break;
        case 3:
          all.push_back(Broadcast(any(), 0, world));
          break;
        case 4:
          all.push_back(Sin(any()));
          break;
        case 5:
          all.push_back(Reshape(Sum(Reshape(any(), {1, size_}), Axes{0}), flat));
          break;
        default:
          all.push_back((any() + any()) * 0.5);
          break;
      }
    }
    Tensors results;
    for (int i = 0; i < num_states_; ++i) {
      // What stood there, or there beside it, more often than chance would have it.
      const size_t kind = draw(4);
      const auto index = static_cast<size_t>(i);
      if (kind == 0) results.push_back(in[index]);
      if (kind == 1) results.push_back((in[index] + any()) * 0.5);
      if (kind >= 2) results.push_back(any());
    }
    for (size_t extra = draw(3); extra > 0; --extra) {
      const Tensor& x = any();
      results.push_back(draw(2) == 0 ? x : Reshape(x, {size_ / 2, 2}));
    }
    return results;
  }

 private:
  const uint64_t seed_;
  int num_states_;
  int64_t size_;
  std::vector<int> donate_;
};

void ExpectSameBits(const Tensor& a, const Tensor& b) {
  const std::vector<float> x = Values<float>(a);
  const std::vector<float> y = Values<float>(b);
  ASSERT_EQ(x.size(), y.size());
  EXPECT_TRUE(x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
}

void RunDonating(const RandomStep& step, uint64_t seed, int rank, World& world) {
  // The same on all ranks but for the data.
  std::mt19937_64 random(seed + 2);
  const auto tensor = [&](uint64_t salt) {
    std::mt19937_64 values(seed + salt);
    std::vector<float> elements(static_cast<size_t>(step.size()));
    for (float& v : elements) v = static_cast<float>(values() % 2000) / 1000 - 1;
    return Upload(world, elements);
  };
  const auto rank_salt = static_cast<uint64_t>(rank);
  const Tensor captured = tensor(100 + (random() % 2 == 0 ? rank_salt : 0));
  const Tensor data = tensor(200 + rank_salt);
  const bool common = random() % 2 == 0;
  Tensors plain;
  Tensors given;
  for (int i = 0; i < step.num_states(); ++i) {
    const uint64_t salt = 300 + static_cast<uint64_t>(i) + (common ? 0 : 10 * rank_salt);
    for (Tensors* state : {&plain, &given}) {
      const NoGrad no_grad;
      const Tensor x = tensor(salt);
      state->push_back(common ? Broadcast(x, 0, world) : x);
    }
  }
  const auto function = [&](const Tensors& in) { return step.Call(in, captured, world); };
  const Compiled compiled = Compile(function);
  CompileOptions options;
  options.donate = step.donate();
  const Compiled donating = Compile(function, options);
  // Handles of the past, by their own names.
  std::vector<std::pair<Tensor, Tensor>> kept;
  for (int i = 0; i < 8; ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i);
    if (random() % 4 == 0) {
      const size_t index = random() % given.size();
      kept.emplace_back(plain[index], given[index].Detach());
    }
    plain.push_back(data);
    given.push_back(data);
    absl::StatusOr<Tensors> expected = compiled.Run(plain);
    absl::StatusOr<Tensors> got = donating.Run(given);
    ASSERT_TRUE(expected.ok()) << expected.status();
    ASSERT_TRUE(got.ok()) << got.status();
    plain = *std::move(expected);
    given = *std::move(got);
    if (random() % 3 == 0 || i == 7) {
      for (size_t r = 0; r < plain.size(); ++r) {
        SCOPED_TRACE(testing::Message() << "result " << r);
        ExpectSameBits(plain[r], given[r]);
      }
    }
    plain.resize(static_cast<size_t>(step.num_states()));
    given.resize(static_cast<size_t>(step.num_states()));
  }
  for (const auto& pair : kept) ExpectSameBits(pair.first, pair.second);
}

TEST_P(ConformanceInside, DonatingStepsHaveTheBitsOfOthers) {
  constexpr int kPrograms = 30;
  for (int ranks = 1; ranks <= 3; ++ranks) {
    Job job(GetParam(), ranks);
    for (int p = 0; p < kPrograms && !HasFailure(); ++p) {
      const uint64_t seed = TestSeed() + static_cast<uint64_t>(1000 * ranks + p);
      const RandomStep step(seed);
      job.Run([&](int rank, World& world) {
        SCOPED_TRACE(testing::Message()
                     << "rank " << rank << " of " << ranks << ", program " << seed);
        RunDonating(step, seed, rank, world);
      });
    }
    // Of these steps some do give something away.
    EXPECT_GT(job.cluster().Counts().donated_bytes, 0);
  }
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
