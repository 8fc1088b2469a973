#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/types/variant.h"
#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "client/internal/access.h"
#include "client/internal/session_core.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/null_link.h"
#include "client/testing/ranks.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::ElementsAre;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::JoinAll;
using testing::Ranks;
using testing::Values;

using Doubles = std::vector<double>;
using Tensors = std::vector<Tensor>;

Tensor Vector(const DeviceRef& device, const Doubles& values) {
  return FromHost<double>(device, values, {static_cast<int64_t>(values.size())});
}

TEST(CompileTest, ALocalFunctionIsOneRun) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor captured = Vector(session, {10, 20});
  const Compiled f = Compile([captured](const std::vector<Tensor>& in) {
    const Tensor y = in[0] * in[0] + captured;
    return std::vector<Tensor>{y, Sum(y), in[0], y, captured};
  });
  for (int i = 1; i < 4; ++i) {
    const absl::StatusOr<std::vector<Tensor>> out = f.Run({Vector(session, {1.0 * i, 2.0 * i})});
    ASSERT_TRUE(out.ok()) << out.status();
    ASSERT_EQ(out->size(), 5u);
    EXPECT_THAT(Values<double>((*out)[0]), ElementsAre(i * i + 10, 4 * i * i + 20));
    EXPECT_THAT(Values<double>((*out)[1]), ElementsAre(5 * i * i + 30));
    EXPECT_THAT(Values<double>((*out)[2]), ElementsAre(i, 2 * i));
    EXPECT_THAT(Values<double>((*out)[3]), ElementsAre(i * i + 10, 4 * i * i + 20));
    EXPECT_THAT(Values<double>((*out)[4]), ElementsAre(10, 20));
    EXPECT_FALSE((*out)[0].requires_grad());
  }
  EXPECT_EQ(f.traces(), 1);
  EXPECT_EQ(daemon.counts().runs, 3);
  EXPECT_EQ(daemon.counts().registered, 1);
  ASSERT_TRUE(f.Run({Vector(session, {1, 2}).RequireGrad()}).ok());
  EXPECT_EQ(f.traces(), 2);
  EXPECT_FALSE(f.Run({Vector(session, {1, 2, 3})}).ok());
}

// Names that a run would have given to its results are there for the next one.
TEST(CompileTest, ARunThatIsTooLargeForAFrameTakesNoNames) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  // Each travels with the run, in 64 bytes.
  const std::vector<Tensor> inputs(1100, Vector(session, Doubles(8, 1)));
  const Compiled large = Compile([](const std::vector<Tensor>& in) {
    std::vector<Tensor> out;
    for (const Tensor& x : in) out.push_back(x + x);
    return out;
  });
  const Compiled small =
      Compile([](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] + in[0]}; });
  for (int i = 0; i * 1100 < 2 * FakeDaemon::kMaxTensors; ++i) {
    EXPECT_EQ(ErrorOf(large.Run(inputs).status()).reason, Reason::kMalformed);
  }
  const auto out = small.Run({inputs[0]});
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_EQ(Values<double>((*out)[0]), Doubles(8, 2));
  // And there are no others: a name that was skipped would still be free.
  EXPECT_EQ(daemon.live_tensors(), 1);
}

template <typename LinkType>
std::pair<LinkType*, Session> SessionOn() {
  auto owned = std::make_unique<LinkType>();
  LinkType* const link = owned.get();
  return {link,
          internal::SessionFrom(internal::SessionCore::Make(std::move(owned), absl::Seconds(20)))};
}

// Which is given its input.
Compiled GivenStep() {
  CompileOptions options;
  options.donate = {0};
  return Compile([](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] + 1}; },
                 options);
}

// While it takes a run that is given a tensor, another thread comes to look at that one.
class LookedAtLink : public testing::NullLink {
 public:
  absl::Status Submit(const Command& command) override {
    const Run* const run = absl::get_if<Run>(&command.body);
    if (run != nullptr && !run->donate.empty() && run->donate[0]) {
      given_to_ = command.sequence;
      given_is_over_ = false;
      has_waited_ = false;
      waits_ = std::promise<void>();
      looks = true;
      viewer = std::thread(look);
      EXPECT_EQ(waits_.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
    }
    return NullLink::Submit(command);
  }
  absl::StatusOr<bool> WaitTensor(TensorId, Sequence, absl::Duration) override {
    if (looks && !std::exchange(has_waited_, true)) waits_.set_value();
    return false;
  }
  absl::Status WaitCommand(Sequence sequence, absl::Duration) override {
    given_is_over_ = given_is_over_ || sequence == given_to_;
    return absl::OkStatus();
  }
  absl::StatusOr<std::shared_ptr<const char>> MapTensor(TensorId, Sequence, int64_t bytes,
                                                        absl::Duration) override {
    EXPECT_TRUE(given_is_over_) << "shows memory that the run may write";
    return std::shared_ptr<const char>(new char[static_cast<size_t>(bytes)],
                                       std::default_delete<const char[]>());
  }

  std::function<void()> look;
  std::thread viewer;
  bool looks = false;

 private:
  Sequence given_to_;
  bool given_is_over_ = false;
  bool has_waited_ = false;
  std::promise<void> waits_;
};

// The view has come too late to be counted among the tensor's handles.
TEST(CompileTest, AViewWaitsForTheRunThatItsTensorIsBeingGivenTo) {
  const auto [link, session] = SessionOn<LookedAtLink>();
  const Compiled step = GivenStep();
  for (int i = 0; i < 100; ++i) {
    const Tensor x = Zeros(session, DType::kF32, {64});
    ASSERT_TRUE(x.Wait().ok());
    link->look = [&x] { EXPECT_TRUE(x.View<float>().ok()); };
    ASSERT_TRUE(step.Run({x}).ok());
    ASSERT_TRUE(link->looks);
    link->viewer.join();
    link->looks = false;
  }
}

// The runs that it is given a tensor in are over when a test says so; each, held back, then gives
// it back, without the copy that the host had.
class GivenBackLink : public testing::NullLink {
 public:
  absl::Status Submit(const Command& command) override {
    const Run* const run = absl::get_if<Run>(&command.body);
    gifts += run != nullptr && !run->donate.empty() && run->donate[0];
    is_readable_ = is_readable_ || absl::holds_alternative<MakeReadable>(command.body);
    return NullLink::Submit(command);
  }
  absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence) override {
    return is_over ? absl::make_optional(RunOutcome()) : absl::nullopt;
  }
  absl::StatusOr<bool> WaitTensor(TensorId, Sequence, absl::Duration) override {
    return is_over && !is_readable_;
  }
  absl::Status WaitCommand(Sequence, absl::Duration) override {
    is_over = true;
    return absl::OkStatus();
  }
  absl::StatusOr<std::shared_ptr<const char>> MapTensor(TensorId, Sequence, int64_t bytes,
                                                        absl::Duration) override {
    EXPECT_TRUE(is_readable_) << "waits for a copy that nobody has asked for";
    return std::shared_ptr<const char>(new char[static_cast<size_t>(bytes)],
                                       std::default_delete<const char[]>());
  }

  bool is_over = false;
  int gifts = 0;

 private:
  bool is_readable_ = false;
};

TEST(CompileTest, ATensorIsGivenToOneRunAtATime) {
  const auto [link, session] = SessionOn<GivenBackLink>();
  const Compiled step = GivenStep();
  const Tensor x = Zeros(session, DType::kF32, {64});
  ASSERT_TRUE(step.Run({x}).ok());
  ASSERT_TRUE(step.Run({x}).ok());
  EXPECT_EQ(link->gifts, 1);
  EXPECT_TRUE(x.View<float>().ok());
  ASSERT_TRUE(link->is_over);
  ASSERT_TRUE(step.Run({x}).ok());
  EXPECT_EQ(link->gifts, 2);
}

// A schedule changes numbers, never the graph; and they need no message of their own.
TEST(CompileTest, NumbersAndSeedsTravelWithTheCall) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor captured = Scalar<double>(session, 100);
  const Compiled f = Compile([captured](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{in[0] * in[1] + captured, in[2] + in[3]};
  });
  const Tensor x = Vector(session, Doubles(16, 2));  // more than travels
  EXPECT_EQ(daemon.counts().created_tensors, 1);
  for (int i = 1; i < 5; ++i) {
    const auto out = f.Run({x, Scalar<double>(session, 0.5 * i), Scalar<int64_t>(session, i),
                            FromHost<int64_t>(session, {10 * i, 0, 0, 0, 0, 0, 0, 1}, {8})});
    ASSERT_TRUE(out.ok()) << out.status();
    EXPECT_EQ(Values<double>((*out)[0]), Doubles(16, 100.0 + i));
    EXPECT_THAT(Values<int64_t>((*out)[1]), ElementsAre(11 * i, i, i, i, i, i, i, i + 1));
  }
  EXPECT_EQ(f.traces(), 1);
  EXPECT_EQ(daemon.counts().registered, 1);
  EXPECT_EQ(daemon.counts().created_tensors, 1);
  EXPECT_EQ(daemon.counts().runs, 4);
  // Elsewhere it is a tensor like any other, from its first use on; in a call it still is.
  const Tensor rate = Scalar<double>(session, 3);
  EXPECT_THAT(Values<double>(rate), ElementsAre(3));
  EXPECT_EQ(daemon.counts().created_tensors, 1);
  EXPECT_THAT(Values<double>(rate + rate), ElementsAre(6));
  EXPECT_EQ(daemon.counts().created_tensors, 2);
  const auto out =
      f.Run({x, rate, Scalar<int64_t>(session, 1), FromHost<int64_t>(session, Shape(8, 1), {8})});
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_EQ(Values<double>((*out)[0]), Doubles(16, 106));
  EXPECT_THAT(Values<double>(rate), ElementsAre(3));
  EXPECT_EQ(f.traces(), 1);
}

// Noise of another seed in each call: no other graph, and the numbers that the seed and the offset
// give everywhere.
TEST(CompileTest, ASeedThatChangesIsNoOtherGraph) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Compiled f = Compile([session](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{
        in[0] + RandomUniform(session, DType::kF64, {3}, in[1], /*offset=*/in[2]),
        RandomBits(session, DType::kI64, {3}, /*seed=*/7, in[2])};
  });
  const Tensor x = Vector(session, {10, 20, 30});
  std::vector<Doubles> seen;
  for (const int64_t seed : {1, 2}) {
    for (const int64_t step : {0, 1}) {
      const auto out = f.Run({x, Scalar<int64_t>(session, seed), Scalar<int64_t>(session, step)});
      ASSERT_TRUE(out.ok()) << out.status();
      const Doubles got = Values<double>((*out)[0]);
      EXPECT_EQ(got, Values<double>(x + RandomUniform(session, DType::kF64, {3}, seed, step)));
      EXPECT_EQ(Values<int64_t>((*out)[1]),
                Values<int64_t>(RandomBits(session, DType::kI64, {3}, 7, step)));
      EXPECT_THAT(seen, ::testing::Not(::testing::Contains(got)));
      seen.push_back(got);
    }
  }
  EXPECT_EQ(f.traces(), 1);
  // f, and one for each of the two ops outside.
  EXPECT_EQ(daemon.counts().registered, 3);
}

// One step of data-parallel descent: forward, backward, all_reduce of the gradient, update.
TEST(CompileTest, AWholeStepIsOneRunARank) {
  FakeDaemon daemon;
  {
    Ranks ranks(3, &daemon);
    std::vector<Tensor> w;
    std::vector<Compiled> step;
    for (int r = 0; r < 3; ++r) {
      const World world = ranks.worlds[r];
      w.push_back(Vector(world, {1, 1}).RequireGrad());
      CompileOptions options;
      options.donate = {0};
      step.push_back(Compile(
          [world](const std::vector<Tensor>& in) {
            const Tensor loss = Sum(in[0] * in[0] * in[1]);
            const absl::Status status = Backward(loss);
            if (!status.ok()) return std::vector<Tensor>{Tensor()};
            const Tensor total = AllReduce(in[0].grad(), world);
            return std::vector<Tensor>{in[0] - in[2] * total, AllReduce(loss, world)};
          },
          options));
    }
    double expected[] = {1, 1};
    for (int i = 0; i < 4; ++i) {
      const double rate = 0.01 * (i + 1);
      std::vector<std::vector<Tensor>> out;
      for (int r = 0; r < 3; ++r) {
        const absl::StatusOr<std::vector<Tensor>> results = step[r].Run(
            {w[r], Vector(ranks.worlds[r], {1.0 * r, 2.0}), Scalar<double>(ranks.worlds[r], rate)});
        ASSERT_TRUE(results.ok()) << results.status();
        out.push_back(*results);
      }
      const double loss = expected[0] * expected[0] * 3 + expected[1] * expected[1] * 6;
      expected[0] -= rate * 2 * expected[0] * 3;
      expected[1] -= rate * 2 * expected[1] * 6;
      for (int r = 0; r < 3; ++r) {
        const Doubles values = Values<double>(out[r][0]);
        ASSERT_EQ(values.size(), 2u);
        EXPECT_NEAR(values[0], expected[0], 1e-12);
        EXPECT_NEAR(values[1], expected[1], 1e-12);
        EXPECT_NEAR(Values<double>(out[r][1])[0], loss, 1e-12);
        w[r] = out[r][0].Detach().RequireGrad();
      }
    }
    for (int r = 0; r < 3; ++r) EXPECT_EQ(step[r].traces(), 1);
    EXPECT_EQ(daemon.counts().runs, 12);
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

TEST(CompileTest, GradientsOfGradientsAcrossRanksInside) {
  FakeDaemon daemon;
  {
    Ranks ranks(3, &daemon);
    std::vector<std::vector<Tensor>> out;
    for (int r = 0; r < 3; ++r) {
      const World world = ranks.worlds[r];
      const Compiled f = Compile([world, r](const std::vector<Tensor>& in) {
        BackwardOptions create;
        create.create_graph = true;
        const Tensor y = AllReduce(in[0], world);
        const auto g = Grad({Sum(y * y * y) * (r + 1)}, {in[0]}, create);
        if (!g.ok()) return std::vector<Tensor>{Tensor()};
        const auto h = Grad({Sum((*g)[0] * (10 * r + 1))}, {in[0]});
        if (!h.ok()) return std::vector<Tensor>{Tensor()};
        return std::vector<Tensor>{(*g)[0], (*h)[0]};
      });
      for (int i = 0; i < 2; ++i) {
        const auto results = f.Run({Vector(world, {1.0 + r}).RequireGrad()});
        ASSERT_TRUE(results.ok()) << results.status();
        out.push_back(*results);
      }
    }
    for (const std::vector<Tensor>& results : out) {
      EXPECT_THAT(Values<double>(results[0]), ElementsAre(3 * 36 * 6));
      EXPECT_THAT(Values<double>(results[1]), ElementsAre(33 * 6 * 6 * 6));
    }
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

TEST(CompileTest, ARankThatDoesNotDifferentiateCountsAsZeros) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    const auto make = [](const World& world, bool differentiate) {
      return Compile([world, differentiate](const std::vector<Tensor>& in) {
        const Tensor y = AllReduce(in[0], world);
        if (!differentiate) return std::vector<Tensor>{y};
        const auto g = Grad({Sum(y * y)}, {in[0]});
        return std::vector<Tensor>{g.ok() ? (*g)[0] : Tensor()};
      });
    };
    const auto a = make(ranks.worlds[0], true).Run({Vector(ranks.worlds[0], {1}).RequireGrad()});
    const auto b = make(ranks.worlds[1], false).Run({Vector(ranks.worlds[1], {2}).RequireGrad()});
    ASSERT_TRUE(a.ok() && b.ok());
    EXPECT_THAT(Values<double>((*a)[0]), ElementsAre(6));
    EXPECT_THAT(Values<double>((*b)[0]), ElementsAre(3));
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

TEST(CompileTest, CompiledAndEagerCollectivesShareOneOrder) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  std::vector<Compiled> f;
  for (int r = 0; r < 2; ++r) {
    const World world = ranks.worlds[r];
    f.push_back(Compile([world, r](const std::vector<Tensor>& in) {
      const Tensor twice = AllReduce(AllReduce(in[0], world), world);
      if (r == 0) return std::vector<Tensor>{twice, Send(twice, 1, world)};
      return std::vector<Tensor>{twice, Recv(DType::kF64, {1}, 0, world)};
    }));
  }
  for (int i = 0; i < 3; ++i) {
    std::vector<Tensor> eager, compiled, passed;
    for (int r = 0; r < 2; ++r) {
      const Tensor x = Vector(ranks.worlds[r], {1.0 + r});
      const NoGrad no_grad;
      eager.push_back(AllReduce(x, ranks.worlds[r]));
      const auto out = f[r].Run({x});
      ASSERT_TRUE(out.ok()) << out.status();
      compiled.push_back((*out)[0]);
      passed.push_back((*out)[1]);
      eager.push_back(r == 0 ? Send(x, 1, ranks.worlds[r])
                             : Recv(DType::kF64, {1}, 0, ranks.worlds[r]));
    }
    EXPECT_THAT(Values<double>(eager[0]), ElementsAre(3));
    EXPECT_THAT(Values<double>(eager[3]), ElementsAre(1));
    for (const Tensor& t : compiled) EXPECT_THAT(Values<double>(t), ElementsAre(6));
    EXPECT_TRUE(passed[0].absent());
    EXPECT_TRUE(passed[0].Wait().ok());
    EXPECT_THAT(Values<double>(passed[1]), ElementsAre(6));
  }
}

TEST(CompileTest, SeveralRanksInOneGraph) {
  FakeDaemon daemon;
  {
    const Session session = daemon.Open(3);
    const std::vector<World> worlds = JoinAll(session, "three", 3);
    const Compiled f = Compile([worlds](const std::vector<Tensor>& in) {
      std::vector<Tensor> losses;
      // Not in the order of ranks.
      for (const int r : {2, 0, 1}) {
        const Tensor y = AllReduce(in[r], worlds[r]);
        losses.push_back(Sum(y * y) * (r + 1));
      }
      const auto g = Grad(losses, in);
      return g.ok() ? *g : std::vector<Tensor>{Tensor()};
    });
    std::vector<Tensor> inputs;
    for (int r = 0; r < 3; ++r) inputs.push_back(Vector(worlds[r], {1.0 + r}).RequireGrad());
    for (int i = 0; i < 2; ++i) {
      const auto out = f.Run(inputs);
      ASSERT_TRUE(out.ok()) << out.status();
      for (const Tensor& t : *out) EXPECT_THAT(Values<double>(t), ElementsAre(2 * 6 * 6));
    }
    EXPECT_EQ(daemon.counts().runs, 2);
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

TEST(CompileTest, AFailedStepLeavesTheFunctionUsable) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  std::vector<Compiled> f;
  for (int r = 0; r < 2; ++r) {
    const World world = ranks.worlds[r];
    f.push_back(Compile([world](const std::vector<Tensor>& in) {
      return std::vector<Tensor>{AllReduce(AllReduce(in[0], world) + in[0], world)};
    }));
  }
  const auto run = [&](int r, const Doubles& values) {
    const auto out = f[r].Run({Vector(ranks.worlds[r], values)});
    return out.ok() ? (*out)[0] : Tensor();
  };
  const Tensor a = run(0, {1, 2});
  const Tensor b = run(1, {1});
  EXPECT_EQ(ErrorOf(a.Wait()).reason, Reason::kMismatch);
  EXPECT_EQ(ErrorOf(b.Wait()).reason, Reason::kMismatch);
  const Tensor c = run(0, {1});
  const Tensor d = run(1, {2});
  EXPECT_THAT(Values<double>(c), ElementsAre(9));
  EXPECT_THAT(Values<double>(d), ElementsAre(9));
}

// A last short batch: one trace, one graph, results and gradients of each size.
TEST(CompileTest, ABatchMayVary) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const auto function = [](const std::vector<Tensor>& in) {
    const Tensor y = MatMul(in[0], in[2]);
    const Tensor per_row = Sum(y * y, {1}) * in[1];
    const auto g = Grad({Sum(per_row)}, {in[2], in[0]});
    if (!g.ok()) return std::vector<Tensor>{Tensor()};
    const int64_t rows = in[0].shape()[0];
    const Tensor flat = Reshape(Concat({y, y + 1}, 0), {rows * 4});
    return std::vector<Tensor>{per_row, (*g)[0], (*g)[1], flat, Slice(flat, 0, 2, rows + 2), in[0]};
  };
  CompileOptions options;
  options.varying = {0, {1, 0}};
  options.max_size = 6;
  options.donate = {2};
  const Compiled f = Compile(function, options);
  for (const int64_t rows : {6, 4, 1, 5, 6, 2}) {
    Doubles x(static_cast<size_t>(3 * rows));
    for (size_t i = 0; i < x.size(); ++i) x[i] = 0.5 * static_cast<double>(i) - 2;
    const std::vector<Tensor> inputs = {
        FromHost<double>(session, x, {rows, 3}).RequireGrad(),
        FromHost<double>(session, Doubles(static_cast<size_t>(rows), 2), {rows}),
        FromHost<double>(session, {1, 2, 3, 4, 5, 6}, {3, 2}).RequireGrad()};
    const auto out = f.Run(inputs);
    ASSERT_TRUE(out.ok()) << out.status();
    const std::vector<Tensor> expected = function(inputs);
    ASSERT_EQ(out->size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ((*out)[i].shape(), expected[i].shape()) << rows << " " << i;
      EXPECT_EQ(Values<double>((*out)[i]), Values<double>(expected[i])) << rows << " " << i;
    }
  }
  EXPECT_EQ(f.traces(), 1);
}

TEST(CompileTest, WhatIsNoFunctionOfABatchThatVariesSaysWhere) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const auto error_of = [&](Function function, int64_t rows = 5) {
    CompileOptions options;
    options.varying = {0};
    options.max_size = 8;
    const auto out =
        Compile(std::move(function), options)
            .Run({FromHost<double>(session, Doubles(static_cast<size_t>(rows)), {rows})});
    EXPECT_EQ(out.status().code(), absl::StatusCode::kInvalidArgument) << out.status();
    return std::string(out.status().message());
  };
  const auto one = [](Tensor t) { return std::vector<Tensor>{std::move(t)}; };
  const std::string mean = error_of([&](const std::vector<Tensor>& in) {
    return one(Sum(in[0]) * (1.0 / static_cast<double>(in[0].shape()[0])));
  });
  EXPECT_THAT(mean, HasSubstr("use Mean"));
  EXPECT_THAT(mean, HasSubstr("compile_test.cc"));
  EXPECT_THAT(error_of([&](const std::vector<Tensor>& in) {
                const int64_t n = in[0].shape()[0];
                return one(Full(in[0].device(), DType::kF64, {n}, 1.0 / static_cast<double>(n)));
              }),
              HasSubstr("'value'"));
  EXPECT_THAT(error_of([&](const std::vector<Tensor>& in) {
                const int64_t n = in[0].shape()[0];
                return one(Full(in[0].device(), DType::kF64, {n * n}, 1));
              }),
              HasSubstr("not linear"));
  EXPECT_THAT(error_of([&](const std::vector<Tensor>& in) {
                return one(in[0].shape()[0] > 7 ? -in[0] : in[0] + in[0]);
              }),
              HasSubstr("one function"));
  EXPECT_THAT(error_of([&](const std::vector<Tensor>& in) {
                return in[0].shape()[0] > 7 ? std::vector<Tensor>{-in[0]}
                                            : std::vector<Tensor>{-in[0], -in[0]};
              }),
              HasSubstr("one function"));
  EXPECT_THAT(error_of([&](const std::vector<Tensor>& in) { return one(-in[0]); }, 9),
              HasSubstr("from 1 to 8"));
  CompileOptions options;
  options.varying = {0, 1};
  options.max_size = 8;
  const Compiled two =
      Compile([&](const std::vector<Tensor>& in) { return one(Sum(in[0]) + Sum(in[1])); }, options);
  EXPECT_FALSE(two.Run({Vector(session, {1, 2}), Vector(session, {1, 2, 3})}).ok());
  EXPECT_FALSE(two.Run({Vector(session, {1, 2})}).ok());
  EXPECT_FALSE(two.Run({Scalar<double>(session, 2), Vector(session, {1})}).ok());
  EXPECT_TRUE(two.Run({Vector(session, {1, 2}), Vector(session, {1, 2})}).ok());
}

// A number that an op has may be a NaN, and is another one if only its sign is.
TEST(CompileTest, AFunctionOfABatchThatVariesHasItsNumbersForAllSizes) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  CompileOptions options;
  options.varying = {0};
  options.max_size = 8;
  const auto run = [&](const std::function<double(int64_t rows)>& value) {
    return Compile(
               [&](const std::vector<Tensor>& in) {
                 const int64_t n = in[0].shape()[0];
                 return std::vector<Tensor>{Full(in[0].device(), DType::kF64, {n}, value(n))};
               },
               options)
        .Run({Vector(session, {1, 2, 3})})
        .status();
  };
  EXPECT_TRUE(run([](int64_t) { return std::nan(""); }).ok());
  EXPECT_EQ(ErrorOf(run([](int64_t n) { return n > 4 ? 0.0 : -0.0; })).reason, Reason::kBadType);
}

// Also where all that the graph has of the two groups is equal.
TEST(CompileTest, AFunctionOfABatchThatVariesHasOneGroupForAllSizes) {
  FakeDaemon daemon;
  Ranks ranks(4, &daemon);
  const auto large = ranks.worlds[0].NewGroup({0, 1});
  const auto small = ranks.worlds[0].NewGroup({0, 3});
  ASSERT_TRUE(large.ok() && small.ok());
  CompileOptions options;
  options.varying = {0};
  options.max_size = 8;
  const auto out = Compile(
                       [&](const std::vector<Tensor>& in) {
                         const bool is_large = in[0].shape()[0] > 4;
                         return std::vector<Tensor>{AllReduce(in[0], is_large ? *large : *small)};
                       },
                       options)
                       .Run({Vector(ranks.worlds[0], {1, 2, 3})});
  EXPECT_EQ(ErrorOf(out.status()).reason, Reason::kBadType) << out.status();
  EXPECT_THAT(std::string(out.status().message()), HasSubstr("the group of all_reduce at "));
  EXPECT_THAT(std::string(out.status().message()), HasSubstr("compile_test.cc"));
}

// What is not linear in the size is an error, however small the largest size is; or right at all
// sizes, where there are no more than the rules are made of.
TEST(CompileTest, ABatchOfFewSizesMayVary) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  Doubles numbers(64);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<double>(i * i + 1);
  const Tensor table = Vector(session, numbers);
  // The sum of the first f(n) numbers.
  const auto first = [&](int64_t (*f)(int64_t)) {
    return [&table, f](const std::vector<Tensor>& in) {
      return std::vector<Tensor>{Sum(Slice(table, 0, 0, f(in[0].shape()[0]))) + Sum(in[0])};
    };
  };
  const Function linear = first([](int64_t n) { return 2 * n + 3; });
  const Function square = first([](int64_t n) { return n * n; });
  for (const int64_t max_size : {1, 2, 3, 4, 5, 8}) {
    SCOPED_TRACE(max_size);
    CompileOptions options;
    options.varying = {0};
    options.max_size = max_size;
    const Compiled squares = Compile(square, options);
    const Compiled sums = Compile(linear, options);
    for (int64_t n = 1; n <= max_size; ++n) {
      const Tensor x = Vector(session, Doubles(static_cast<size_t>(n), 0.5));
      const auto sum = sums.Run({x});
      ASSERT_TRUE(sum.ok()) << sum.status();
      EXPECT_EQ(Values<double>((*sum)[0]), Values<double>(linear({x})[0])) << n;
      const auto out = squares.Run({x});
      EXPECT_EQ(out.ok(), max_size <= 2) << out.status();
      if (!out.ok()) continue;
      EXPECT_EQ(Values<double>((*out)[0]), Values<double>(square({x})[0])) << n;
    }
  }
  // What is linear at large sizes alone.
  for (const auto f : {+[](int64_t n) { return std::min<int64_t>(n, 4); },
                       +[](int64_t n) { return std::max<int64_t>(n, 3); },
                       +[](int64_t n) { return n / 8; }, +[](int64_t n) { return (n + 8) / 9; }}) {
    CompileOptions options;
    options.varying = {0};
    options.max_size = 15;
    const auto out = Compile(first(f), options).Run({Vector(session, Doubles(15))});
    EXPECT_EQ(out.status().code(), absl::StatusCode::kInvalidArgument) << f(15) << f(2);
    EXPECT_THAT(std::string(out.status().message()), HasSubstr("not linear"));
  }
}

// One more call than may be under way waits for the first.
TEST(CompileTest, CallsUnderWayAreBounded) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  std::vector<Compiled> f;
  for (int r = 0; r < 2; ++r) {
    const World world = ranks.worlds[r];
    CompileOptions options;
    options.max_under_way = 3;
    f.push_back(Compile(
        [world](const std::vector<Tensor>& in) {
          return std::vector<Tensor>{AllReduce(in[0], world)};
        },
        options));
  }
  Tensor last;
  std::atomic<int> asked{0};
  std::thread ahead([&] {
    for (int i = 0; i < 8; ++i) {
      const auto out = f[0].Run({Vector(ranks.worlds[0], {1.0 * i})});
      ASSERT_TRUE(out.ok()) << out.status();
      last = (*out)[0];
      ++asked;
    }
  });
  for (int i = 0; i < 8; ++i) {
    EXPECT_LE(asked.load(), i + 3);
    const auto out = f[1].Run({Vector(ranks.worlds[1], {1.0})});
    ASSERT_TRUE(out.ok()) << out.status();
    ASSERT_TRUE((*out)[0].Wait().ok());
  }
  ahead.join();
  EXPECT_THAT(Values<double>(last), ElementsAre(8));
}

// As when there was no memory for it, and is now: nobody outside could put it there.
TEST(CompileTest, WhatAFunctionMakesFromTheHostIsMadeAgain) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Compiled f = Compile([&](const std::vector<Tensor>& in) {
    const Tensor large = Vector(session, Doubles(9, 1));
    return std::vector<Tensor>{in[0] * Sum(large)};
  });
  daemon.FailTensors(1);
  for (int i = 0; i < 4; ++i) {
    const auto out = f.Run({Scalar<double>(session, 2)});
    ASSERT_TRUE(out.ok()) << out.status();
    const auto value = (*out)[0].Item<double>();
    if (i > 0) {
      ASSERT_TRUE(value.ok()) << i << ": " << value.status();
      EXPECT_EQ(*value, 18);
    } else {
      EXPECT_EQ(ErrorOf(value.status()).reason, Reason::kOutOfMemory) << value.status();
    }
  }
  EXPECT_EQ(f.traces(), 2);
  EXPECT_EQ(daemon.counts().created_tensors, 2);
}

// Which may wait for the very call that is made.
TEST(CompileTest, CallsOfAnotherRankAreNotWaitedFor) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon, std::chrono::seconds(60));
  CompileOptions options;
  options.max_under_way = 3;
  int rank = 0;
  const Compiled f = Compile(
      [&](const std::vector<Tensor>& in) {
        return std::vector<Tensor>{AllReduce(in[0], ranks.worlds[rank])};
      },
      options);
  std::vector<Tensor> sums;
  const std::future<void> called = std::async(std::launch::async, [&] {
    for (; rank < 2; ++rank) {
      for (int i = 0; i < options.max_under_way; ++i) {
        const auto out = f.Run({Vector(ranks.worlds[rank], {1.0 * i})});
        ASSERT_TRUE(out.ok()) << out.status();
        sums.push_back((*out)[0]);
      }
    }
  });
  ASSERT_EQ(called.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  ASSERT_EQ(sums.size(), 6u);
  for (size_t i = 0; i < sums.size(); ++i) {
    EXPECT_THAT(Values<double>(sums[i]), ElementsAre(2.0 * (i % 3)));
  }
}

// Nor by a function without collectives, whose calls may wait for those of a rank all the same.
TEST(CompileTest, LocalCallsThatWaitForAnotherRankAreNotWaitedFor) {
  FakeDaemon daemon;
  const Session session = daemon.Open(2, std::chrono::seconds(1));
  const std::vector<World> worlds = JoinAll(session, "job", 2);
  CompileOptions options;
  options.max_under_way = 3;
  const Compiled f = Compile(
      [](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] * 2}; }, options);
  std::vector<Tensor> results;
  const auto run = [&](const Tensor& x) {
    const auto out = f.Run({x});
    ASSERT_TRUE(out.ok()) << out.status();
    results.push_back((*out)[0]);
  };
  for (int i = 0; i < 3; ++i) run(Recv(DType::kF64, {1}, 1, worlds[0]));
  run(Vector(worlds[1], {10}));
  EXPECT_EQ(daemon.counts().command_waits, 0) << "for what is sent behind it";
  for (int i = 0; i < 3; ++i) Send(Vector(worlds[1], {1.0 * i}), 0, worlds[1]);
  ASSERT_EQ(results.size(), 4u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_THAT(Values<double>(results[i]), ElementsAre(2.0 * i));
  }
  EXPECT_THAT(Values<double>(results[3]), ElementsAre(20));
}

// A function of several ranks: a call that is refused on one has not been another's.
TEST(CompileTest, ARefusedRunIsOfTheRankThatMadeIt) {
  for (const bool undefined : {false, true}) {
    FakeDaemon daemon;
    Ranks ranks(2, &daemon);
    int rank = 0;
    const Compiled f = Compile([&](const std::vector<Tensor>& in) {
      return std::vector<Tensor>{AllReduce(MatMul(in[0], in[1]), ranks.worlds[rank])};
    });
    const auto run = [&](double value) {
      const Tensor one = Full(ranks.worlds[rank], DType::kF64, {1, 1}, 1);
      return f.Run({Full(ranks.worlds[rank], DType::kF64, {1, 1}, value), one});
    };
    const auto first = run(5);
    ASSERT_TRUE(first.ok()) << first.status();
    rank = 1;
    const Tensor bad = undefined ? Tensor() : Full(ranks.worlds[1], DType::kF64, {2, 1}, 1);
    EXPECT_FALSE(f.Run({bad, bad}).ok());
    EXPECT_EQ(ErrorOf((*first)[0].Wait()).reason, Reason::kPeerRefused) << (*first)[0].Wait();
    EXPECT_EQ(ErrorOf(run(7).status()).reason, Reason::kOutOfLine);
    for (const World& world : ranks.worlds) ASSERT_TRUE(world.Step(1).ok());
    std::vector<Tensor> sums;
    for (rank = 0; rank < 2; ++rank) {
      const auto out = run(2);
      ASSERT_TRUE(out.ok()) << out.status();
      sums.push_back((*out)[0]);
    }
    for (const Tensor& sum : sums) EXPECT_THAT(Values<double>(sum), ElementsAre(4));
  }
}

// The same of ranks of one session, each with a device.
TEST(CompileTest, ARefusedRunIsOfTheDeviceThatItsInputsAreOn) {
  FakeDaemon daemon;
  const Session session = daemon.Open(2);
  const std::vector<World> worlds = JoinAll(session, "job", 2);
  size_t rank = 0;
  const Compiled f = Compile([&](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{AllReduce(MatMul(in[0], in[1]), worlds[rank])};
  });
  const auto run = [&](double value) {
    const Tensor one = Full(worlds[rank], DType::kF64, {1, 1}, 1);
    return f.Run({Full(worlds[rank], DType::kF64, {1, 1}, value), one});
  };
  ASSERT_TRUE(run(5).ok());
  rank = 1;
  const Tensor bad = Full(worlds[1], DType::kF64, {2, 1}, 1);
  EXPECT_FALSE(f.Run({bad, bad}).ok());
  // What rank 1 would have called is not known, and rank 0's calls are no part of it.
  EXPECT_EQ(ErrorOf(run(7).status()).reason, Reason::kOutOfLine);
}

// Nothing has no device, nor has what failed: then the call may be any of the ranks' that the
// session has, also where what one of them calls is known. Each turn is right, or an error.
TEST(CompileTest, ARefusedRunWithoutADeviceMayBeOfAnyRankOfItsSession) {
  for (const bool failed : {false, true}) {
    for (const size_t known : {1, 2}) {
      SCOPED_TRACE(failed ? "failed" : "undefined");
      SCOPED_TRACE(known);
      FakeDaemon daemon;
      const Session session = daemon.Open(2, std::chrono::seconds(2));
      const std::vector<World> worlds = JoinAll(session, "job", 2);
      size_t rank = 0;
      const Compiled f = Compile([&](const std::vector<Tensor>& in) {
        return std::vector<Tensor>{AllReduce(in[0], worlds[rank])};
      });
      const auto run = [&](int turn) { return f.Run({Vector(worlds[rank], {1.0 * turn})}); };
      for (rank = 0; rank < known; ++rank) ASSERT_TRUE(run(1).ok());
      rank = 1;
      const Tensor x = Vector(worlds[1], {1});
      EXPECT_FALSE(f.Run({failed ? MatMul(x, x) : Tensor()}).ok());
      for (int turn = 2; turn <= 4; ++turn) {
        std::vector<Tensor> sums;
        for (rank = 0; rank < 2; ++rank) {
          const auto out = run(turn);
          if (out.ok()) sums.push_back((*out)[0]);
        }
        for (const Tensor& sum : sums) {
          const auto values = sum.Read<double>();
          if (!values.ok()) continue;
          EXPECT_THAT(*values, ElementsAre(2 * turn)) << "turn " << turn;
        }
      }
      for (const World& world : worlds) ASSERT_TRUE(world.Step(1).ok());
      std::vector<Tensor> sums;
      for (rank = 0; rank < 2; ++rank) sums.push_back((*run(5))[0]);
      for (const Tensor& sum : sums) EXPECT_THAT(Values<double>(sum), ElementsAre(10));
    }
  }
}

// Whose call on nothing was meant to be nobody knows: each session's ranks are told, but of one
// that is closed, wherever it stands among them.
TEST(CompileTest, AClosedSessionKeepsNoOtherFromHearingOfARefusal) {
  for (const size_t closed : {0, 1, 2}) {
    SCOPED_TRACE(closed);
    FakeDaemon daemon;
    const Ranks ranks(3, &daemon);
    const Compiled f = Compile([&](const std::vector<Tensor>& in) {
      return std::vector<Tensor>{AllReduce(in[0], ranks.worlds[0])};
    });
    ASSERT_TRUE(ranks.sessions[closed].Close().ok());
    const absl::Status refused = f.Run({Tensor()}).status();
    EXPECT_EQ(ErrorOf(refused).reason, Reason::kBadType) << refused;
    EXPECT_EQ(daemon.counts().refusals, 2);
    for (size_t r = 0; r < 3; ++r) {
      const absl::Status status = AllReduce(Vector(ranks.worlds[r], {1}), ranks.worlds[r]).status();
      EXPECT_EQ(ErrorOf(status).reason, r == closed ? Reason::kSessionLost : Reason::kOutOfLine)
          << status;
    }
  }
}

// Its numbers would be taken for those of the function's session.
TEST(CompileTest, AGroupOfAnotherSessionIsRefused) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const Compiled f = Compile([&](const std::vector<Tensor>& in) {
    Barrier(ranks.worlds[1]);
    return in;
  });
  const absl::Status refused = f.Run({Vector(ranks.worlds[0], {1})}).status();
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kBadType) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("of the session on which"));
}

// A trace holds no lock: what it waits for may use the same Compiled.
TEST(CompileTest, AFunctionMayWaitForAThreadThatRunsIt) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  std::thread other;
  absl::StatusOr<std::vector<Tensor>> there = std::vector<Tensor>();
  std::promise<void> done;
  std::future_status waited = std::future_status::timeout;
  std::atomic<bool> begun{false};
  Compiled f;
  f = Compile([&](const std::vector<Tensor>& in) {
    if (!begun.exchange(true)) {
      other = std::thread([&] {
        there = f.Run({Vector(session, {1, 2})});
        done.set_value();
      });
      waited = done.get_future().wait_for(std::chrono::seconds(20));
    }
    return std::vector<Tensor>{in[0] + in[0]};
  });
  const auto here = f.Run({Vector(session, {3})});
  other.join();
  EXPECT_EQ(waited, std::future_status::ready);
  ASSERT_TRUE(here.ok()) << here.status();
  EXPECT_THAT(Values<double>((*here)[0]), ElementsAre(6));
  ASSERT_TRUE(there.ok()) << there.status();
  EXPECT_THAT(Values<double>((*there)[0]), ElementsAre(2, 4));
  EXPECT_EQ(f.traces(), 2);
}

// Two threads that trace a function for one list of types use one graph.
TEST(CompileTest, ThreadsThatTraceAtATimeUseOneGraph) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  std::atomic<int> tracing{0};
  std::promise<void> both;
  const std::shared_future<void> both_trace = both.get_future().share();
  const Compiled f = Compile([&](const std::vector<Tensor>& in) {
    if (++tracing == 2) both.set_value();
    EXPECT_EQ(both_trace.wait_for(std::chrono::seconds(20)), std::future_status::ready);
    return std::vector<Tensor>{in[0] + in[0]};
  });
  const auto run = [&] {
    const auto out = f.Run({Vector(session, {3})});
    ASSERT_TRUE(out.ok()) << out.status();
    EXPECT_THAT(Values<double>((*out)[0]), ElementsAre(6));
  };
  std::thread other(run);
  run();
  other.join();
  EXPECT_EQ(f.traces(), 1);
  EXPECT_EQ(daemon.live_graphs(), 1);
}

TEST(CompileTest, ACollectiveWithWrongTypesNamesItsOwnLine) {
  FakeDaemon daemon;
  Ranks ranks(1, &daemon);
  const World& world = ranks.worlds[0];
  const Tensor wrong = FromHost<int64_t>(world, {3}, {1});
  const CallSite line{"function.cc", 7};
  const auto error_of = [&](const Function& function) {
    const auto out = Compile(function).Run({Vector(world, {2})}, CallSite{"run.cc", 9});
    EXPECT_FALSE(out.ok());
    return ErrorOf(out.status());
  };
  const Error single = error_of([&](const std::vector<Tensor>&) {
    return std::vector<Tensor>{AllReduce(wrong, world, Reduction::kAvg, line)};
  });
  EXPECT_EQ(single.source, "function.cc:7") << single.message;
  const Error coalesced = error_of([&](const std::vector<Tensor>& in) {
    return AllReduceCoalesced({in[0], wrong}, world, Reduction::kAvg, line);
  });
  EXPECT_EQ(coalesced.source, "function.cc:7") << coalesced.message;
  EXPECT_THAT(coalesced.message, HasSubstr("at index 1 of the coalesced call"));
}

TEST(CompileTest, WrongUseIsAnError) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = Vector(session, {1});
  const auto run = [&](Function f, CompileOptions options = {}) {
    return Compile(std::move(f), options).Run({x}).status();
  };
  EXPECT_THAT(std::string(run([](const std::vector<Tensor>& in) {
                            return std::vector<Tensor>{MatMul(in[0], in[0])};
                          }).message()),
              HasSubstr("compile_test.cc"));
  EXPECT_FALSE(run([](const std::vector<Tensor>&) { return std::vector<Tensor>{Tensor()}; }).ok());
  EXPECT_FALSE(Compile([](const std::vector<Tensor>& in) { return in; }).Run({}).ok());
  EXPECT_FALSE(Compile([](const std::vector<Tensor>& in) { return in; }).Run({Tensor()}).ok());
  CompileOptions donate;
  donate.donate = {3};
  EXPECT_FALSE(run([](const std::vector<Tensor>& in) { return in; }, donate).ok());
  // Reading inside cannot work, and a tensor that escapes cannot be used.
  Tensor escaped;
  absl::Status read;
  EXPECT_TRUE(run([&](const std::vector<Tensor>& in) {
                escaped = in[0] * 2;
                read = escaped.Wait();
                return std::vector<Tensor>{escaped};
              }).ok());
  EXPECT_EQ(read.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((escaped * 2).status().code(), absl::StatusCode::kFailedPrecondition);
  const Compiled twice =
      Compile([](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] + in[0]}; });
  EXPECT_EQ(ErrorOf(twice.Run({escaped}).status()).reason, Reason::kWrongState);
  // A captured leaf's gradient would have to outlive the trace.
  const Tensor leaf = Vector(session, {2}).RequireGrad();
  absl::Status backward;
  run([&](const std::vector<Tensor>& in) {
    backward = Backward(Sum(in[0] * leaf));
    return in;
  }).IgnoreError();
  EXPECT_EQ(backward.code(), absl::StatusCode::kFailedPrecondition);
  // Results have no history, and say so.
  const auto out = Compile([](const std::vector<Tensor>& in) {
                     return std::vector<Tensor>{Sum(in[0] * in[0])};
                   }).Run({Vector(session, {1}).RequireGrad()});
  ASSERT_TRUE(out.ok());
  EXPECT_THAT(std::string(Backward((*out)[0]).message()), HasSubstr("compiled function"));
}

// As eager calls there: no history, so nothing to differentiate.
TEST(CompileTest, UnderNoGradAFunctionIsAnotherGraph) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = Vector(session, {1, 2}).RequireGrad();
  const Compiled f = Compile([](const std::vector<Tensor>& in) {
    const auto gradients = Grad({Sum(in[0] * in[0])}, in);
    return gradients.ok() ? *gradients : in;
  });
  const auto run = [&f, &x] {
    const absl::StatusOr<std::vector<Tensor>> out = f.Run({x});
    return out.ok() ? Values<double>((*out)[0]) : Doubles();
  };
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(run(), ElementsAre(2, 4));
    const NoGrad no_grad;
    EXPECT_THAT(run(), ElementsAre(1, 2));
  }
  EXPECT_EQ(f.traces(), 2);
}

// What a function keeps of one trace is no value of the next, whose values stand where those stood.
TEST(CompileTest, ATensorOfAnEarlierTraceIsRefused) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = Vector(session, {-1, 2, 3, 4});
  const auto run = [&](const Function& function) {
    const Compiled f = Compile(function);
    const auto first = f.Run({x});
    EXPECT_TRUE(first.ok()) << first.status();
    // The same values, another trace.
    return f.Run({Vector(session, {-1, 2, 3, 4}).RequireGrad()}).status();
  };
  Tensor mask;
  const absl::Status used = run([&](const std::vector<Tensor>& in) {
    if (!mask.defined()) mask = Full(session, DType::kF64, {4}, 0.5);
    return std::vector<Tensor>{Relu(in[0]) * mask};
  });
  EXPECT_EQ(ErrorOf(used).reason, Reason::kWrongState) << used;
  EXPECT_THAT(std::string(used.message()), HasSubstr("compile_test.cc"));
  Tensor kept;
  const absl::Status returned = run([&](const std::vector<Tensor>& in) {
    if (!kept.defined()) kept = Full(session, DType::kF64, {4}, 0.5);
    return std::vector<Tensor>{Relu(in[0]), kept};
  });
  EXPECT_EQ(ErrorOf(returned).reason, Reason::kWrongState) << returned;
  EXPECT_THAT(std::string(returned.message()), HasSubstr("result 1"));
  // A gradient through, with regard to, and of one.
  Tensor leaf;
  std::vector<absl::Status> taken;
  run([&](const std::vector<Tensor>& in) {
    Tensor y = Vector(session, {1, 2, 3, 4}).RequireGrad() * in[0];
    if (!leaf.defined()) leaf = y;
    BackwardOptions seeded;
    seeded.seeds = {leaf.Detach()};
    taken = {Grad({Sum(leaf)}, {y}).status(), Backward(Sum(leaf)), Backward(leaf, seeded),
             Grad({Sum(y)}, {leaf}).status(), Grad({y}, {y}, seeded).status()};
    return std::vector<Tensor>{y};
  }).IgnoreError();
  ASSERT_EQ(taken.size(), 5u);
  for (const absl::Status& status : taken) {
    EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState) << status;
  }
}

// Inside, a captured result is a constant: its gradient is not zero, there is none.
TEST(CompileTest, AGradientOfACapturedResultIsRefused) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    const World& world = ranks.worlds[0];
    const Tensor leaf = Vector(world, {2}).RequireGrad();
    const Tensor loss = Sum(leaf * leaf);
    std::vector<Tensor> sent;
    for (int r = 0; r < 2; ++r) {
      sent.push_back(Reduce(r == 0 ? leaf : Vector(ranks.worlds[1], {3}), 1, ranks.worlds[r]));
    }
    ASSERT_TRUE(sent[0].absent());
    std::vector<absl::Status> taken;
    const auto out = Compile([&](const std::vector<Tensor>& in) {
                       taken = {Backward(loss), Grad({loss}, {leaf}).status(), Backward(sent[0]),
                                Backward({Sum(in[0] * in[0]), loss})};
                       const auto own = Grad({leaf}, {leaf});
                       return own.ok() ? *own : std::vector<Tensor>{Tensor()};
                     }).Run({Vector(world, {5}).RequireGrad()});
    ASSERT_TRUE(out.ok()) << out.status();
    EXPECT_THAT(Values<double>((*out)[0]), ElementsAre(1));
    ASSERT_EQ(taken.size(), 4u);
    for (const absl::Status& status : taken) {
      EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("outside of the compiled function"));
    }
    EXPECT_EQ(daemon.counts().refusals, 0);
    // Outside it is what it was.
    ASSERT_TRUE(Backward(loss).ok());
    EXPECT_THAT(Values<double>(leaf.grad()), ElementsAre(4));
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

// What it is by itself: another function's leaves have none of its gradients, and no history goes
// through it.
TEST(CompileTest, AFunctionInsideAnotherIsTheSameFunction) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const auto check = [&](const Function& outer, const std::vector<Tensor>& in,
                         const Doubles& expected) {
    const std::vector<Tensor> plain = outer(in);
    const auto compiled = Compile(outer).Run(in);
    ASSERT_TRUE(compiled.ok()) << compiled.status();
    for (const std::vector<Tensor>& out : {plain, *compiled}) {
      ASSERT_EQ(out.size(), expected.size());
      for (size_t i = 0; i < out.size(); ++i) {
        EXPECT_THAT(Values<double>(out[i]), ElementsAre(expected[i])) << i;
      }
    }
    for (const Tensor& x : in) EXPECT_FALSE(x.grad().defined());
  };
  const auto or_nothing = [](const absl::StatusOr<std::vector<Tensor>>& out) {
    return out.ok() ? (*out)[0] : FromError(DeviceRef(), out.status());
  };
  const Compiled slope = Compile([](const std::vector<Tensor>& in) {
    const absl::Status status = Backward(Sum(in[0] * in[0] * in[1]));
    return std::vector<Tensor>{status.ok() ? in[0].grad() : FromError(in[0].device(), status)};
  });
  check(
      [&](const std::vector<Tensor>& in) {
        const Tensor first = or_nothing(slope.Run({in[0], in[1]}));
        const Tensor second = or_nothing(slope.Run({in[0], in[2]}));
        EXPECT_FALSE(in[0].grad().defined());
        return std::vector<Tensor>{first, second};
      },
      {Vector(session, {1}).RequireGrad(), Vector(session, {1}), Vector(session, {10})}, {2, 20});
  const Compiled square =
      Compile([](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] * in[0]}; });
  check(
      [&](const std::vector<Tensor>& in) {
        const Tensor constant = or_nothing(square.Run({in[0]}));
        EXPECT_FALSE(constant.requires_grad());
        return std::vector<Tensor>{or_nothing(Grad({Sum(constant * in[0])}, {in[0]}))};
      },
      {Vector(session, {3}).RequireGrad()}, {9});
  EXPECT_EQ(square.traces(), 1);
}

// As call by call: one tensor is one leaf, however often it is given.
TEST(CompileTest, InputsThatAreOneTensorHaveOneGradient) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const auto or_nothing = [](const absl::StatusOr<Tensors>& out) {
    return out.ok() ? (*out)[0] : FromError(DeviceRef(), out.status());
  };
  // So many inputs more that none is the same: a few are compared, more are looked up.
  for (const size_t others : {0, 30}) {
    SCOPED_TRACE(others);
    const Function by_grad = [&](const Tensors& in) {
      return Tensors{or_nothing(Grad({Sum(in[0] * in[others + 1])}, {in[0]}))};
    };
    const Function by_backward = [&](const Tensors& in) {
      const absl::Status status = Backward(Sum(in[0] * in[others + 1]));
      return Tensors{status.ok() ? in[0].grad() : FromError(DeviceRef(), status)};
    };
    // That require none yet.
    const Function required = [&](const Tensors& in) {
      Tensor x = in[0];
      x.RequireGrad();
      return Tensors{or_nothing(Grad({Sum(in[0] * in[others + 1])}, {x}))};
    };
    for (const Function& function : {by_grad, by_backward, required}) {
      const Compiled compiled = Compile(function);
      const Compiled outer =
          Compile([&](const Tensors& in) { return Tensors{or_nothing(compiled.Run(in))}; });
      const auto inputs = [&](const Tensor& first, const Tensor& last) {
        Tensors in = {first};
        for (size_t i = 0; i < others; ++i) in.push_back(Vector(session, {1}));
        in.push_back(last);
        return in;
      };
      const auto leaf = [&](double value) { return Vector(session, {value}).RequireGrad(); };
      const Tensor x = leaf(3);
      for (const Compiled& way : {compiled, outer}) {
        EXPECT_THAT(Values<double>(or_nothing(way.Run(inputs(x, x)))), ElementsAre(6));
        EXPECT_THAT(Values<double>(or_nothing(way.Run(inputs(x, leaf(5))))), ElementsAre(5));
        EXPECT_THAT(Values<double>(or_nothing(way.Run(inputs(leaf(7), x)))), ElementsAre(3));
        EXPECT_EQ(way.traces(), 2);
      }
    }
  }
}

// What is given back is what was given, at the first of its places.
TEST(CompileTest, AnInputThatIsGivenTwiceComesBackAsItIs) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  CompileOptions options;
  options.donate = {0, 1};
  const Compiled twice = Compile(
      [](const Tensors& in) {
        return Tensors{in[1], in[0] + in[1]};
      },
      options);
  const Tensor x = Vector(session, {3});
  const auto out = twice.Run({x, x});
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_THAT(Values<double>((*out)[0]), ElementsAre(3));
  EXPECT_THAT(Values<double>((*out)[1]), ElementsAre(6));
  EXPECT_THAT(Values<double>(x), ElementsAre(3));
}

// Its gradient would lack what was read of the other.
TEST(CompileTest, AnInputThatIsCapturedAsWellHasNoGradientOfHalf) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor w = Vector(session, {3}).RequireGrad();
  const auto slope = [](const Tensor& captured) {
    return Compile([captured](const Tensors& in) {
      const auto gradients = Grad({Sum(in[0] * captured)}, {in[0]});
      return gradients.ok() ? *gradients : Tensors{FromError(DeviceRef(), gradients.status())};
    });
  };
  const absl::Status refused = slope(w).Run({w}).status();
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kWrongState) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("as an input and reads it as one that it"));
  // In another function, which has it from outside, too.
  const Compiled inner = slope(w);
  const Compiled outer = Compile([&](const Tensors& in) {
    const auto out = inner.Run({in[0]});
    return out.ok() ? *out : Tensors{FromError(DeviceRef(), out.status())};
  });
  EXPECT_EQ(ErrorOf(outer.Run({w}).status()).reason, Reason::kWrongState);
  // Or that has made it.
  const Compiled maker = Compile([&](const Tensors& in) {
    const Tensor made = in[0] * 2.0;
    const auto out = slope(made).Run({made});
    return out.ok() ? *out : Tensors{FromError(DeviceRef(), out.status())};
  });
  EXPECT_EQ(ErrorOf(maker.Run({w}).status()).reason, Reason::kWrongState);
  // A constant of its value is another thing, and so is another leaf.
  for (const Tensor& other : {w.Detach(), Vector(session, {3}).RequireGrad()}) {
    const auto out = slope(other).Run({w});
    ASSERT_TRUE(out.ok()) << out.status();
    EXPECT_THAT(Values<double>((*out)[0]), ElementsAre(3));
  }
}

// Others count on this rank's part of a gradient behind a function's inputs, wherever it is called.
TEST(CompileTest, AFunctionInsideAnotherCutsOffNoCollective) {
  FakeDaemon daemon;
  {
    Ranks ranks(1, &daemon);
    const Compiled inner = Compile([](const std::vector<Tensor>& in) {
      const absl::Status status = Backward(Sum(in[0] * in[0]));
      return std::vector<Tensor>{status.ok() ? in[0].grad() : FromError(in[0].device(), status)};
    });
    const auto refused =
        Compile([&](const std::vector<Tensor>& in) {
          const auto out = inner.Run({AllReduce(in[0], ranks.worlds[0])});
          return out.ok() ? *out : std::vector<Tensor>{FromError(in[0].device(), out.status())};
        }).Run({Vector(ranks.worlds[0], {2}).RequireGrad()});
    EXPECT_EQ(ErrorOf(refused.status()).reason, Reason::kWrongState) << refused.status();
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("ask for its gradient too"));
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

// It may have collectives, without which the graph is another one.
TEST(CompileTest, ACallInsideThatIsRefusedIsARefusalOfTheWholeFunction) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Compiled inner =
      Compile([](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] + in[0]}; });
  const Tensor x = Vector(session, {1});
  for (const Tensor& bad : {Tensor(), MatMul(x, x)}) {
    absl::Status inside;
    const auto out = Compile([&](const std::vector<Tensor>& in) {
                       inside = inner.Run({bad}, CallSite{"inside.cc", 5}).status();
                       return in;
                     }).Run({x});
    EXPECT_EQ(ErrorOf(inside).reason, Reason::kBadType) << inside;
    EXPECT_EQ(ErrorOf(out.status()).message, ErrorOf(inside).message);
  }
}

TEST(CompileTest, CapturedLeavesWorkWithGrad) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor leaf = Vector(session, {2}).RequireGrad();
  const Tensor mid = leaf * 3;  // has a history outside
  const auto out = Compile([&](const std::vector<Tensor>& in) {
                     const auto g = Grad({Sum(in[0] * leaf * mid)}, {leaf, mid, in[0]});
                     return g.ok() ? *g : std::vector<Tensor>{Tensor()};
                   }).Run({Vector(session, {5}).RequireGrad()});
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_THAT(Values<double>((*out)[0]), ElementsAre(30));
  EXPECT_THAT(Values<double>((*out)[1]), ElementsAre(10));
  EXPECT_THAT(Values<double>((*out)[2]), ElementsAre(12));
}

}  // namespace
}  // namespace chorus
