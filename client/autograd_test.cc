#include <string>
#include <thread>
#include <vector>

#include "chorus/chorus.h"
#include "client/internal/access.h"
#include "client/internal/tape.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/ranks.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using internal::ImplOf;

using ::testing::ElementsAre;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::JoinAll;
using testing::Ranks;
using testing::TakeAllNames;
using testing::Values;

using Doubles = std::vector<double>;

Tensor Leaf(const DeviceRef& device, const Doubles& values) {
  return FromHost<double>(device, values, {static_cast<int64_t>(values.size())}).RequireGrad();
}

void ExpectNoLeaks(const FakeDaemon& daemon) { EXPECT_EQ(daemon.live_tapes(), 0); }

TEST(AutogradTest, LocalGradients) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = Leaf(session, {1, 2, 3});
  EXPECT_TRUE(x.requires_grad());
  EXPECT_FALSE(x.grad().defined());
  ASSERT_TRUE(Backward(Sum(x * x * x)).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(3, 12, 27));
  EXPECT_FALSE(x.grad().requires_grad());
  // Adds up.
  ASSERT_TRUE(Backward(Sum(2 * x)).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(5, 14, 29));
  x.ClearGrad();
  EXPECT_FALSE(x.grad().defined());
}

TEST(AutogradTest, ABackwardThatCannotBeSentChangesNoLeafAndCanBeMadeAgain) {
  FakeDaemon daemon;
  {
    const Session session = daemon.Open(2);
    const std::vector<Tensor> leaves = {Leaf(session.device(0), {1}), Leaf(session.device(1), {2}),
                                        Leaf(session.device(1), {3}), Leaf(session.device(1), {4}),
                                        Leaf(session.device(1), {5})};
    const auto losses = [&leaves] {
      std::vector<Tensor> roots;
      for (const Tensor& leaf : leaves) {
        roots.push_back(leaf * leaf * leaf);
        EXPECT_TRUE(roots.back().Wait().ok());
      }
      return roots;
    };
    const auto grads = [&leaves] {
      Doubles values;
      for (const Tensor& leaf : leaves) {
        for (const double value : Values<double>(leaf.grad())) values.push_back(value);
      }
      return values;
    };
    ASSERT_TRUE(Backward(losses()).ok());
    EXPECT_THAT(grads(), ElementsAre(3, 12, 27, 48, 75));
    const std::vector<Tensor> roots = losses();
    // Of names there are enough for the first device's gradients, and not for all.
    std::vector<Tensor> held = TakeAllNames(session);
    held.resize(held.size() - 12);
    const int runs = daemon.counts().runs;
    const absl::Status full = Backward(roots);
    EXPECT_EQ(ErrorOf(full).reason, Reason::kQuota) << full;
    EXPECT_THAT(std::string(full.message()), HasSubstr("autograd_test.cc"));
    EXPECT_EQ(daemon.counts().runs, runs + 1);
    held.clear();
    EXPECT_THAT(grads(), ElementsAre(3, 12, 27, 48, 75));
    const absl::Status again = Backward(roots);
    ASSERT_TRUE(again.ok()) << again;
    EXPECT_THAT(grads(), ElementsAre(6, 24, 54, 96, 150));
  }
  ExpectNoLeaks(daemon);
}

TEST(AutogradTest, AnInputUsedTwiceGetsBothGradientsOnce) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = Leaf(session, {2});
  const Tensor y = x * 3;
  ASSERT_TRUE(Backward(Sum(y + y * y)).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(3 + 2 * 9 * 2));
}

TEST(AutogradTest, SeedsWeighTheRoots) {
  FakeDaemon daemon;
  const Session session = daemon.Open(2);
  const Tensor x = Leaf(session, {1, 2});
  const Tensor y = x * x;
  BackwardOptions options;
  options.seeds = {FromHost<double>(session, {10, 100}, {2})};
  ASSERT_TRUE(Backward(y, options).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(20, 400));
  const Tensor z = x * x;
  const absl::Status no_seed = Backward(z);
  EXPECT_THAT(std::string(no_seed.message()), HasSubstr("a root of one element"));
  options.seeds = {FromHost<double>(session.device(1), {10, 100}, {2})};
  EXPECT_THAT(std::string(Backward(x + x, options).message()),
              HasSubstr("expected a seed on the root's device, 0 of the session's, got one on 1"));
}

// A gradient call asks for what its roots' history leads to, and for nothing that the leaves lead
// to besides: kept metrics cost nothing and nobody waits for them.
TEST(AutogradTest, ABackwardSendsNothingForMetricsThatAreKept) {
  int without = 0;
  for (const int metrics : {0, 5}) {
    FakeDaemon daemon;
    const Ranks ranks(1, &daemon);
    const Tensor x = Leaf(ranks.worlds[0], {2});
    const Tensor y = AllReduce(x, ranks.worlds[0]);
    const Tensor loss = Sum(y * y);
    std::vector<Tensor> kept;
    for (int i = 0; i < metrics; ++i) kept.push_back(AllReduce(loss, ranks.worlds[0]));
    ASSERT_TRUE(loss.Wait().ok());
    const int before = daemon.counts().runs;
    ASSERT_TRUE(Backward(loss).ok());
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(4));
    const int sent = daemon.counts().runs - before;
    if (metrics == 0) without = sent;
    EXPECT_EQ(sent, without);
  }
}

TEST(AutogradTest, DetachAndNoGradCutTheHistory) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = Leaf(session, {3});
  const Tensor y = x * x;
  const Tensor cut = y.Detach();
  EXPECT_FALSE(cut.requires_grad());
  // d/dx (cut * x + y) = cut + 2x
  ASSERT_TRUE(Backward(Sum(cut * x + y)).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(9 + 6));
  const NoGrad no_grad;
  EXPECT_FALSE((x * x).requires_grad());
}

// An op that was recorded before takes it for a constant, whether its rule keeps it or not.
TEST(AutogradTest, ALeafHasTheGradientOfItsUsesSinceItRequiresOne) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor w = Leaf(session, {2});
  Tensor a = FromHost<double>(session, {3}, {1});
  const Tensor y = w * a + (w + a);
  a.RequireGrad();
  BackwardOptions retain;
  retain.retain_graph = true;
  ASSERT_TRUE(Backward(Sum(y), retain).ok());
  EXPECT_THAT(Values<double>(w.grad()), ElementsAre(3 + 1));
  EXPECT_FALSE(a.grad().defined());
  const auto g = Grad({Sum(y)}, {a, w}, retain);
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(0));
  EXPECT_THAT(Values<double>((*g)[1]), ElementsAre(3 + 1));
  // Beside later uses too, of which one is a root.
  ASSERT_TRUE(Backward({Sum(y), Sum(w * a * a), a}).ok());
  EXPECT_THAT(Values<double>(a.grad()), ElementsAre(2 * 2 * 3 + 1));
  EXPECT_THAT(Values<double>(w.grad()), ElementsAre(2 * (3 + 1) + 9));
}

// The same of memory that is copied at each use.
TEST(AutogradTest, MappedMemoryHasTheGradientOfItsUsesSinceItRequiresOne) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  absl::StatusOr<MappedTensor<double>> mapped = Map<double>(session, {1});
  ASSERT_TRUE(mapped.ok());
  mapped->data()[0] = 3;
  const Tensor w = Leaf(session, {2});
  Tensor m = mapped->tensor();
  const Tensor before = Sum(w * m);
  m.RequireGrad();
  const Tensor after = Sum(w * m * m);
  ASSERT_TRUE(Backward(before + after).ok());
  EXPECT_THAT(Values<double>(m.grad()), ElementsAre(2 * 2 * 3));
  EXPECT_THAT(Values<double>(w.grad()), ElementsAre(3 + 9));
}

TEST(AutogradTest, TheTapeIsUsedUpUnlessRetained) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = Leaf(session, {3});
  const Tensor y = Sum(x * x);
  BackwardOptions retain;
  retain.retain_graph = true;
  ASSERT_TRUE(Backward(y, retain).ok());
  ASSERT_TRUE(Backward(y).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(12));
  const absl::Status again = Backward(y);
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(again.message()), HasSubstr("retain_graph"));
}

TEST(AutogradTest, WrongUseIsAnError) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Session other = daemon.Open();
  const Tensor x = Leaf(session, {3});
  EXPECT_EQ(Backward(FromHost<double>(session, {1}, {1})).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(Backward(Tensor()).ok());
  EXPECT_FALSE(Backward(std::vector<Tensor>()).ok());
  EXPECT_FALSE(Grad({Sum(x * x)}, {Tensor()}).ok());
  EXPECT_FALSE(Grad({Sum(x * x)}, {x.Detach()}).ok());
  EXPECT_FALSE(Grad({Sum(x * x)}, {Leaf(other, {1})}).ok());
  EXPECT_FALSE(Backward({Sum(x), Sum(Leaf(other, {1}))}).ok());
  BackwardOptions options;
  options.seeds = {FromHost<double>(session, {1, 2}, {2})};
  EXPECT_FALSE(Backward(Sum(x), options).ok());
  EXPECT_FALSE(FromHost<int64_t>(session, {1}, {1}).RequireGrad().status().ok());
  Tensor result = x * x;
  EXPECT_FALSE(result.RequireGrad().status().ok());
}

TEST(AutogradTest, GradLeavesLeavesAlone) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = Leaf(session, {3});
  const Tensor w = Leaf(session, {5});
  const Tensor unused = Leaf(session, {5, 6});
  const Tensor h = x * w;
  const absl::StatusOr<std::vector<Tensor>> g = Grad({Sum(h * h)}, {x, h, unused});
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(2 * 15 * 5));
  EXPECT_THAT(Values<double>((*g)[1]), ElementsAre(30));
  EXPECT_THAT(Values<double>((*g)[2]), ElementsAre(0, 0));
  EXPECT_FALSE(x.grad().defined());
}

TEST(AutogradTest, GradientsOfGradients) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = Leaf(session, {2});
  BackwardOptions create;
  create.create_graph = true;
  Tensor y = Sum(x * x * x * x);
  const double expected[] = {32, 48, 48, 24};  // 4x^3, 12x^2, 24x, 24
  for (const double e : expected) {
    const absl::StatusOr<std::vector<Tensor>> g = Grad({y}, {x}, create);
    ASSERT_TRUE(g.ok()) << g.status();
    EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(e));
    y = Sum((*g)[0]);
  }
}

TEST(AutogradTest, MappedMemoryIsFrozenWhenItIsSaved) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  absl::StatusOr<MappedTensor<double>> mapped = Map<double>(session, {1});
  ASSERT_TRUE(mapped.ok());
  mapped->data()[0] = 3;
  const Tensor w = Leaf(session, {1});
  const Tensor y = Sum(w * *mapped);
  EXPECT_THAT(Values<double>(y), ElementsAre(3));
  mapped->data()[0] = 1000;
  ASSERT_TRUE(Backward(y).ok());
  EXPECT_THAT(Values<double>(w.grad()), ElementsAre(3));
}

// Each use has the bytes of its time, also where one gradient is taken of several.
TEST(AutogradTest, MappedMemoryThatIsUsedAgainIsAnotherValue) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  absl::StatusOr<MappedTensor<double>> mapped = Map<double>(session, {2});
  ASSERT_TRUE(mapped.ok());
  const Tensor w = Leaf(session, {1, 10});
  Tensor sum = w;
  for (const double first : {2, 5, 11}) {
    mapped->data()[0] = first;
    mapped->data()[1] = -first;
    sum = sum + w * *mapped;
    ASSERT_TRUE(sum.Wait().ok());
  }
  ASSERT_TRUE(Backward(Sum(sum)).ok());
  EXPECT_THAT(Values<double>(w.grad()), ElementsAre(1 + 2 + 5 + 11, 1 - 2 - 5 - 11));
}

// The memory itself is one leaf: what flows to any of its uses adds up, to any order.
TEST(AutogradTest, AllUsesOfMappedMemoryAddUpInItsGradient) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  absl::StatusOr<MappedTensor<double>> mapped = Map<double>(session, {1});
  ASSERT_TRUE(mapped.ok());
  Tensor m = mapped->tensor();
  m.RequireGrad();
  const auto use = [&](double value) {
    mapped->data()[0] = value;
    const Tensor y = Sum(m * m * m + 7 * m);
    EXPECT_THAT(Values<double>(y), ElementsAre(value * value * value + 7 * value));
    return y;
  };
  const Tensor loss = use(2) + use(5);
  mapped->data()[0] = 1000;
  BackwardOptions create;
  create.create_graph = true;
  const auto g = Grad({loss}, {m}, create);
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(3 * 4 + 7 + 3 * 25 + 7));
  const auto h = Grad({Sum((*g)[0])}, {m}, create);
  ASSERT_TRUE(h.ok()) << h.status();
  EXPECT_THAT(Values<double>((*h)[0]), ElementsAre(6 * 2 + 6 * 5));
  ASSERT_TRUE(Backward(loss).ok());
  EXPECT_THAT(Values<double>(m.grad()), ElementsAre(3 * 4 + 7 + 3 * 25 + 7));
}

// A gradient may be the seed itself, and is not to change with the memory that the seed stood in.
TEST(AutogradTest, AGradientDoesNotChangeWithTheMemoryOfItsSeed) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  absl::StatusOr<MappedTensor<double>> mapped = Map<double>(session, {2});
  ASSERT_TRUE(mapped.ok());
  const Tensor x = Leaf(session, {1, 2});
  const Tensor b = FromHost<double>(session, {3, 4}, {2});
  const auto take = [&](double seed) {
    mapped->data()[0] = seed;
    mapped->data()[1] = 10 * seed;
    BackwardOptions options;
    options.seeds = {*mapped};
    EXPECT_TRUE(Backward(x + b, options).ok());
    const Tensor grad = x.grad();
    EXPECT_TRUE(grad.Wait().ok());
    x.ClearGrad();
    return grad;
  };
  const Tensor first = take(5);
  const Tensor second = take(6);
  EXPECT_THAT(Values<double>(first), ElementsAre(5, 50));
  EXPECT_THAT(Values<double>(second), ElementsAre(6, 60));
  // Inside a compiled function it is a result of the function, not the memory.
  const Compiled f = Compile([&](const std::vector<Tensor>& in) {
    BackwardOptions options;
    options.seeds = {*mapped};
    const auto g = Grad({in[0] + in[1]}, {in[0]}, options);
    return g.ok() ? *g : std::vector<Tensor>{FromError(session, g.status())};
  });
  const auto third = f.Run({x, b});
  ASSERT_TRUE(third.ok()) << third.status();
  ASSERT_TRUE((*third)[0].Wait().ok());
  mapped->data()[0] = 7;
  EXPECT_THAT(Values<double>((*third)[0]), ElementsAre(6, 60));
}

// A seed of which a gradient is wanted has its history, though its memory may be refilled.
TEST(AutogradTest, ASeedInMappedMemoryHasAGradient) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  absl::StatusOr<MappedTensor<double>> mapped = Map<double>(session, {1});
  ASSERT_TRUE(mapped.ok());
  mapped->data()[0] = 3;
  Tensor seed = mapped->tensor();
  seed.RequireGrad();
  const Tensor x = Leaf(session, {5});
  BackwardOptions create;
  create.create_graph = true;
  create.seeds = {seed};
  const auto g = Grad({x * x + x}, {x}, create);  // seed * (2x + 1)
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(33));
  mapped->data()[0] = 1000;
  const auto h = Grad({Sum((*g)[0] * (*g)[0])}, {seed, x});
  ASSERT_TRUE(h.ok()) << h.status();
  EXPECT_THAT(Values<double>((*h)[0]), ElementsAre(2 * 33 * 11));
  EXPECT_THAT(Values<double>((*h)[1]), ElementsAre(2 * 33 * 3 * 2));
}

// A program may keep tensors to its very end, when what its threads have is gone.
TEST(AutogradTest, AThreadsLastTensorsMayDieAfterItsOwnObjects) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const auto tree = [&session](int depth) {
    Tensor y = Leaf(session, {1});
    for (int i = 0; i < depth; ++i) y = Concat({y, y * 2, y * 3}, 0);
    return Sum(y);
  };
  struct Kept {
    std::vector<Tensor> tensors;
    const Session* session = nullptr;
    ~Kept() {
      // One after another: what the first leaves behind, the others must not find.
      for (Tensor& tensor : tensors) tensor = Tensor();
    }
  };
  std::thread thread([&] {
    thread_local Kept kept;  // before any that a first destructor makes: so it goes after them
    for (int i = 0; i < 4; ++i) kept.tensors.push_back(tree(6));
    EXPECT_THAT(Values<double>(tree(2)), ElementsAre(36));
  });
  thread.join();
  // All of their values were released with them.
  EXPECT_THAT(Values<double>(tree(1)), ElementsAre(6));
}

// --- Across ranks -------------------------------------------------------------------------------

// L = sum_r sum(w_r * y_r^2) with y = all_reduce(x): dL/dx = 2 y sum(w).
TEST(CollectiveGradientTest, AllReduce) {
  FakeDaemon daemon;
  {
    Ranks ranks(3, &daemon);
    std::vector<Tensor> x, loss;
    for (int r = 0; r < 3; ++r) {
      x.push_back(Leaf(ranks.worlds[r], {1.0 + r, 2.0}));
      const Tensor y = AllReduce(x[r], ranks.worlds[r]);
      loss.push_back(Sum(y * y) * (r + 1));
    }
    for (int r = 0; r < 3; ++r) ASSERT_TRUE(Backward(loss[r]).ok());
    for (int r = 0; r < 3; ++r) {
      EXPECT_THAT(Values<double>(x[r].grad()), ElementsAre(2 * 6 * 6, 2 * 6 * 6));
    }
    EXPECT_EQ(daemon.counts().drops_consumed, 3);
  }
  ExpectNoLeaks(daemon);
}

TEST(CollectiveGradientTest, EveryCollective) {
  FakeDaemon daemon;
  {
    Ranks ranks(3, &daemon);
    std::vector<Tensor> a, b, c, d;
    for (int r = 0; r < 3; ++r) {
      const World& world = ranks.worlds[r];
      a.push_back(Leaf(world, {1.0 + r}));
      b.push_back(Leaf(world, {1.0 + r}));
      c.push_back(Leaf(world, {1.0 + r}));
      d.push_back(Leaf(world, {1.0 + r}));
    }
    std::vector<std::vector<Tensor>> roots(3);
    for (int r = 0; r < 3; ++r) {
      const World& world = ranks.worlds[r];
      const Tensor ya = Broadcast(a[r], 1, world);
      const Tensor yb = Reduce(b[r], 2, world);
      const std::vector<Tensor> yc = AllGather(c[r], world);
      const Tensor yd = ReduceScatter({d[r], d[r] * 10, d[r] * 100}, world);
      roots[r].push_back(Sum(ya * (r + 1)));
      roots[r].push_back(yb.absent() ? yb : Sum(yb * 7));
      roots[r].push_back(Sum(yc[0] * 1 + yc[2] * 3) * (r + 1));
      roots[r].push_back(Sum(yd * (r + 1)));
    }
    for (int r = 0; r < 3; ++r) ASSERT_TRUE(Backward(roots[r]).ok());
    EXPECT_FALSE(a[0].grad().defined());
    EXPECT_THAT(Values<double>(a[1].grad()), ElementsAre(6));
    for (int r = 0; r < 3; ++r) {
      EXPECT_THAT(Values<double>(b[r].grad()), ElementsAre(7));
      EXPECT_THAT(Values<double>(c[r].grad()), ElementsAre(r == 0 ? 6 : r == 1 ? 0 : 18));
      EXPECT_THAT(Values<double>(d[r].grad()), ElementsAre(1 + 20 + 300));
    }
  }
  ExpectNoLeaks(daemon);
}

TEST(CollectiveGradientTest, SendAndRecv) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    const Tensor x = Leaf(ranks.worlds[0], {3});
    const Tensor sent = Send(x * x, 1, ranks.worlds[0]);
    const Tensor y = Recv(DType::kF64, {1}, 0, ranks.worlds[1]);
    EXPECT_TRUE(sent.requires_grad());
    EXPECT_TRUE(y.requires_grad());
    ASSERT_TRUE(Backward(Sum(y * 5)).ok());
    ASSERT_TRUE(Backward(sent).ok());
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(30));
  }
  ExpectNoLeaks(daemon);
}

TEST(CollectiveGradientTest, SendAndRecvInTheNextEpoch) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    const Tensor x = Leaf(ranks.worlds[0], {3});
    const auto pass = [&] {
      const Tensor sent = Send(x * x, 1, ranks.worlds[0]);
      const Tensor y = Recv(DType::kF64, {1}, 0, ranks.worlds[1]);
      EXPECT_TRUE(Backward(Sum(y * 5)).ok());
      EXPECT_TRUE(Backward(sent).ok());
      EXPECT_THAT(Values<double>(x.grad()), ElementsAre(30));
      x.ClearGrad();
    };
    pass();
    pass();
    const Tensor a = AllReduce(FromHost<float>(ranks.worlds[0], {1, 2}, {2}), ranks.worlds[0]);
    const Tensor b = AllReduce(FromHost<float>(ranks.worlds[1], {1}, {1}), ranks.worlds[1]);
    EXPECT_FALSE(a.Wait().ok());
    EXPECT_FALSE(b.Wait().ok());
    pass();
  }
  ExpectNoLeaks(daemon);
}

TEST(CollectiveGradientTest, ARankWhoseInputIsFrozenStillCounts) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    const Tensor x0 = FromHost<double>(ranks.worlds[0], {1}, {1});
    const Tensor x1 = Leaf(ranks.worlds[1], {2});
    const Tensor y0 = AllReduce(x0, ranks.worlds[0]);
    const Tensor y1 = AllReduce(x1, ranks.worlds[1]);
    ASSERT_TRUE(Backward(Sum(y0 * 10)).ok());
    ASSERT_TRUE(Backward(Sum(y1 * 3)).ok());
    EXPECT_THAT(Values<double>(x1.grad()), ElementsAre(13));
  }
  ExpectNoLeaks(daemon);
}

TEST(CollectiveGradientTest, ARankThatAbandonsItsTapeCountsAsZeros) {
  FakeDaemon daemon;
  {
    Ranks ranks(3, &daemon);
    const Tensor x = Leaf(ranks.worlds[0], {2});
    const Tensor y0 = AllReduce(x, ranks.worlds[0]);
    Tensor y1 = AllReduce(Leaf(ranks.worlds[1], {1}), ranks.worlds[1]);
    {
      const NoGrad no_grad;
      const Tensor y2 = AllReduce(Leaf(ranks.worlds[2], {1}), ranks.worlds[2]);
      EXPECT_FALSE(y2.requires_grad());
    }
    ASSERT_TRUE(Backward(Sum(y0 * 5)).ok());
    // Rank 1 may still ask: the gradient is late, not wrong.
    EXPECT_EQ(x.grad().Wait(std::chrono::milliseconds(5)).code(),
              absl::StatusCode::kDeadlineExceeded);
    y1 = Tensor();
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(5));
    EXPECT_EQ(daemon.counts().drops_abandoned, 1);
  }
  ExpectNoLeaks(daemon);
}

TEST(CollectiveGradientTest, RanksWithDifferentLocalGraphsAgree) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    const Tensor x0 = Leaf(ranks.worlds[0], {1});
    const Tensor x1 = Leaf(ranks.worlds[1], {2});
    const Tensor a0 = AllReduce(x0, ranks.worlds[0]);
    const Tensor a1 = AllReduce(x1, ranks.worlds[1]);
    const Tensor b0 = AllReduce(Sin(a0) * 0 + x0, ranks.worlds[0]);
    const Tensor b1 = AllReduce(x1 * a1, ranks.worlds[1]);
    // Rank 0 does not use a0 beyond that, rank 1 uses both in another order.
    ASSERT_TRUE(Backward(Sum(b0)).ok());
    ASSERT_TRUE(Backward(Sum(b1 * 2 + a1)).ok());
    // L = b + 2b + a, b = x0 + 0*sin(a) + x1*a, a = x0 + x1.
    EXPECT_THAT(Values<double>(x0.grad()), ElementsAre(3 * (1 + 2) + 1));
    EXPECT_THAT(Values<double>(x1.grad()), ElementsAre(3 * (3 + 2) + 1));
  }
  ExpectNoLeaks(daemon);
}

// y = all_reduce(x); G = d/dx sum_r w_r y^3; S = sum_r v_r G; dS/dx = sum v * 6 y sum w, on all.
TEST(CollectiveGradientTest, DoubleBackwardOfAllReduce) {
  FakeDaemon daemon;
  {
    Ranks ranks(3, &daemon);
    std::vector<Tensor> x, g;
    BackwardOptions create;
    create.create_graph = true;
    for (int r = 0; r < 3; ++r) {
      x.push_back(Leaf(ranks.worlds[r], {1.0 + r}));
      const Tensor y = AllReduce(x[r], ranks.worlds[r]);
      const absl::StatusOr<std::vector<Tensor>> grads =
          Grad({Sum(y * y * y) * (r + 1)}, {x[r]}, create);
      ASSERT_TRUE(grads.ok()) << grads.status();
      g.push_back((*grads)[0]);
    }
    for (int r = 0; r < 3; ++r) {
      EXPECT_THAT(Values<double>(g[r]), ElementsAre(3 * 36 * 6));
    }
    for (int r = 0; r < 3; ++r) ASSERT_TRUE(Backward(Sum(g[r] * (10 * r + 1))).ok());
    for (int r = 0; r < 3; ++r) {
      EXPECT_THAT(Values<double>(x[r].grad()), ElementsAre(33 * 6 * 6 * 6));
    }
  }
  ExpectNoLeaks(daemon);
}

// Only the root has a gradient of x, but all ranks' losses count in its second derivative.
TEST(CollectiveGradientTest, DoubleBackwardOfBroadcast) {
  FakeDaemon daemon;
  {
    Ranks ranks(3, &daemon);
    std::vector<Tensor> x, g;
    BackwardOptions create;
    create.create_graph = true;
    for (int r = 0; r < 3; ++r) {
      x.push_back(Leaf(ranks.worlds[r], {2.0 + r}));
      const Tensor y = Broadcast(x[r], 0, ranks.worlds[r]);
      const absl::StatusOr<std::vector<Tensor>> grads =
          Grad({Sum(y * y * y) * (r + 1)}, {x[r]}, create);
      ASSERT_TRUE(grads.ok()) << grads.status();
      g.push_back((*grads)[0]);
    }
    EXPECT_THAT(Values<double>(g[0]), ElementsAre(3 * 4 * 6));
    EXPECT_THAT(Values<double>(g[1]), ElementsAre(0));
    for (int r = 0; r < 3; ++r) ASSERT_TRUE(Backward(Sum(g[r] * 5)).ok());
    EXPECT_THAT(Values<double>(x[0].grad()), ElementsAre(5 * 6 * 2 * 6));
  }
  ExpectNoLeaks(daemon);
}

TEST(CollectiveGradientTest, DoubleBackwardOfSendAndRecv) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    BackwardOptions create;
    create.create_graph = true;
    const Tensor x = Leaf(ranks.worlds[0], {3});
    const Tensor w = Leaf(ranks.worlds[1], {2});
    const Tensor sent = Send(x, 1, ranks.worlds[0]);
    const Tensor y = Recv(DType::kF64, {1}, 0, ranks.worlds[1]);
    // L = w y^3: dL/dx = 3 w x^2, dL/dw = x^3.
    const absl::StatusOr<std::vector<Tensor>> gw = Grad({Sum(w * y * y * y)}, {w}, create);
    const absl::StatusOr<std::vector<Tensor>> gx = Grad({sent}, {x}, create);
    ASSERT_TRUE(gw.ok() && gx.ok());
    EXPECT_THAT(Values<double>((*gw)[0]), ElementsAre(27));
    EXPECT_THAT(Values<double>((*gx)[0]), ElementsAre(54));
    // S = dL/dx + 10 dL/dw: dS/dx = 6 w x + 30 x^2, dS/dw = 3 x^2.
    // Rank 0 takes part in the gradient of what it sent, and of its gradient.
    ASSERT_TRUE(Backward({Sum((*gw)[0] * 10)}).ok());
    ASSERT_TRUE(Backward({Sum((*gx)[0]), sent}).ok());
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(36 + 270));
    EXPECT_THAT(Values<double>(w.grad()), ElementsAre(27));
  }
  ExpectNoLeaks(daemon);
}

TEST(CollectiveGradientTest, TwoGroupsInOneLoss) {
  FakeDaemon daemon;
  {
    Ranks ranks(4, &daemon);
    std::vector<Tensor> x, loss;
    for (int r = 0; r < 4; ++r) {
      const absl::StatusOr<Group> row =
          ranks.worlds[r].NewGroup(r < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3});
      const absl::StatusOr<Group> column =
          ranks.worlds[r].NewGroup(r % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3});
      ASSERT_TRUE(row.ok() && column.ok());
      x.push_back(Leaf(ranks.worlds[r], {1.0 + r}));
      const Tensor a = AllReduce(x[r], *row);
      const Tensor b = AllReduce(a * a, *column);
      loss.push_back(Sum(b) * (r + 1));
    }
    for (int r = 0; r < 4; ++r) ASSERT_TRUE(Backward(loss[r]).ok());
    // a: 3, 3, 7, 7. The weights of a column's losses: 4 and 6; of both members of a row: 10.
    for (int r = 0; r < 4; ++r) {
      EXPECT_THAT(Values<double>(x[r].grad()), ElementsAre(2 * (r < 2 ? 3 : 7) * 10));
    }
  }
  ExpectNoLeaks(daemon);
}

TEST(CollectiveGradientTest, TwoRanksInOneSession) {
  FakeDaemon daemon;
  {
    const Session session = daemon.Open(2);
    std::vector<Tensor> x, loss;
    const std::vector<World> worlds = JoinAll(session, "both", 2);
    for (int r = 0; r < 2; ++r) {
      const World& world = worlds[static_cast<size_t>(r)];
      x.push_back(Leaf(world, {1.0 + r}));
      const Tensor y = AllReduce(x[r], world);
      loss.push_back(Sum(y * y) * (r + 1));
    }
    ASSERT_TRUE(Backward(loss).ok());
    for (int r = 0; r < 2; ++r) {
      EXPECT_THAT(Values<double>(x[r].grad()), ElementsAre(2 * 3 * 3));
    }
  }
  ExpectNoLeaks(daemon);
}

TEST(CollectiveGradientTest, AskedForAgainInTheNextStep) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    std::vector<Tensor> x, y;
    BackwardOptions retain;
    retain.retain_graph = true;
    for (int r = 0; r < 2; ++r) {
      x.push_back(Leaf(ranks.worlds[r], {1.0 + r}));
      y.push_back(AllReduce(x[r], ranks.worlds[r]));
    }
    // Rank 0 asks, then a mismatch ends the epoch before rank 1 does.
    ASSERT_TRUE(Backward(Sum(y[0] * 3), retain).ok());
    const Tensor a = AllReduce(FromHost<float>(ranks.worlds[0], {1, 2}, {2}), ranks.worlds[0]);
    const Tensor b = AllReduce(FromHost<float>(ranks.worlds[1], {1}, {1}), ranks.worlds[1]);
    EXPECT_FALSE(a.Wait().ok());
    EXPECT_FALSE(b.Wait().ok());
    EXPECT_FALSE(x[0].grad().Wait().ok());
    x[0].ClearGrad();
    // Rank 0 has asked once more: requests count anew in the next step.
    for (int r = 0; r < 2; ++r) ASSERT_TRUE(ranks.worlds[r].Step(1).ok());
    for (int r = 0; r < 2; ++r) ASSERT_TRUE(Backward(Sum(y[r] * 3)).ok());
    for (int r = 0; r < 2; ++r) {
      EXPECT_THAT(Values<double>(x[r].grad()), ElementsAre(6));
    }
  }
  ExpectNoLeaks(daemon);
}

// s is a number that came of a call for gradients, a constant with a history of collectives: passed
// on as it is, it is still the one that was given.
TEST(CollectiveGradientTest, AConstantGradientThatIsASeedIsItself) {
  FakeDaemon daemon;
  const Ranks ranks(1, &daemon);
  const World& world = ranks.worlds[0];
  const auto leaf = [&world](double value) { return Scalar<double>(world, value).RequireGrad(); };
  const Tensor b = leaf(2);
  const Tensor loss = b * Scalar<double>(world, 5) + AllReduce(leaf(3), world);
  BackwardOptions create;
  create.create_graph = true;
  const auto of_b = Grad({loss}, {b}, create);
  ASSERT_TRUE(of_b.ok()) << of_b.status();
  const Tensor s = (*of_b)[0];
  EXPECT_THAT(Values<double>(s), ElementsAre(5));
  for (const double factor : {1, 3}) {
    const Tensor w = leaf(1);
    const Tensor r = factor == 1 ? w + leaf(4) : w * factor;
    BackwardOptions seeded = create;
    seeded.seeds = {s};
    const auto of_w = Grad({r}, {w}, seeded);
    ASSERT_TRUE(of_w.ok()) << of_w.status();
    const auto of_s = Grad({Sum((*of_w)[0])}, {s}, create);
    ASSERT_TRUE(of_s.ok()) << of_s.status();
    EXPECT_THAT(Values<double>((*of_s)[0]), ElementsAre(factor));
    if (factor != 1) continue;
    // Marked, it is a leaf like any other.
    Tensor marked = (*of_w)[0];
    marked.RequireGrad();
    ASSERT_TRUE(Backward(marked * marked).ok());
    EXPECT_THAT(Values<double>(marked.grad()), ElementsAre(10));
    EXPECT_FALSE(s.grad().defined());
  }
}

TEST(CollectiveGradientTest, EqualCallsOnTwoLinesAreToldApart) {
  FakeDaemon daemon;
  const Ranks ranks(1, &daemon);
  const World& world = ranks.worlds[0];
  const Tensor x = Scalar<double>(world, 1);
  for (int round = 0; round < 2; ++round) {
    const int line = __LINE__ + 1;
    const Tensor y = AllReduce(x, world);
    const Tensor z = AllReduce(x, world);
    for (const Tensor& root : {y, z}) {
      ASSERT_TRUE(Backward(root).ok());
      const std::string taken(Backward(root).message());
      EXPECT_THAT(taken, HasSubstr(std::string(__FILE__) + ":" +
                                   std::to_string(line + (ImplOf(root) == ImplOf(z) ? 1 : 0))));
    }
  }
}

TEST(CollectiveGradientTest, ALongTapeIsTakenDownWithoutRecursion) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  Tensor x = Leaf(session, {1});
  Tensor y = x;
  for (int i = 0; i < 200000; ++i) y = -y;
  EXPECT_THAT(Values<double>(y), ElementsAre(1));
  y = Tensor();
}

}  // namespace
}  // namespace chorus
