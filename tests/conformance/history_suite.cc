// Gradients beside ranks that are absent from some of them: who takes part with zeros, what is used
// up, and who is told that a number cannot be had.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "chorus/parallel.h"
#include "client/internal/record.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

using internal::ApplyLocal;

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Doubles = std::vector<double>;
using Tensors = std::vector<Tensor>;

// A rank's call, as if it stood in line 10 x (rank + 1) of train.cc.
CallSite Site(int rank) { return CallSite{"train.cc", 10 * (rank + 1)}; }

BackwardOptions Create() {
  BackwardOptions options;
  options.create_graph = true;
  return options;
}

Tensor Number(const World& world, double value) { return Upload<double>(world, {value}); }
Tensor LeafOf(const World& world, double value) { return Number(world, value).RequireGrad(); }

absl::StatusOr<Tensor> One(absl::StatusOr<Tensors> gradients) {
  CHORUS_RETURN_IF_ERROR(gradients.status());
  return (*gradients)[0];
}

// What a rank computes from its inputs: as it is, and as one compiled function.
using Program =
    std::function<absl::StatusOr<Tensors>(int rank, const World& world, const Tensors& inputs)>;
using Inputs = std::function<Tensors(int rank, const World& world)>;

void Check(const ConformanceParam& param, int ranks, const Inputs& inputs, const Program& program,
           const std::function<std::vector<Doubles>(int rank)>& expected) {
  for (const bool compiled : {false, true}) {
    SCOPED_TRACE(compiled ? "compiled" : "eager");
    JobOptions options;
    options.ranks = ranks;
    options.agree_timeout = std::chrono::seconds(20);
    Job job(param, options);
    job.Run([&](int rank, World& world) {
      const Tensors in = inputs(rank, world);
      absl::StatusOr<Tensors> got;
      if (compiled) {
        absl::Status traced;
        const Compiled function = Compile([&](const Tensors& placeholders) {
          absl::StatusOr<Tensors> results = program(rank, world, placeholders);
          traced = results.status();
          return results.ok() ? *results : Tensors{Tensor()};
        });
        got = function.Run(in);
        ASSERT_TRUE(traced.ok()) << "rank " << rank << ": " << traced;
      } else {
        got = program(rank, world, in);
      }
      ASSERT_TRUE(got.ok()) << "rank " << rank << ": " << got.status();
      const std::vector<Doubles> right = expected(rank);
      ASSERT_EQ(got->size(), right.size());
      for (size_t i = 0; i < right.size(); ++i) {
        EXPECT_EQ(Values<double>((*got)[i]), right[i]) << "rank " << rank << ", result " << i;
      }
    });
    if (::testing::Test::HasFailure()) return;
  }
}

// --- What was given to lower orders is not lost -------------------------------------------------

// The product of nothing: ones, whose gradient is none.
Tensor OnesOfNothing(const Tensor& nothing) {
  NodeSpec spec;
  spec.op = "prod";
  spec.attributes = {{"axes", std::vector<int64_t>{0}}};
  return ApplyLocal(std::move(spec), {nothing});
}

TEST_P(Conformance, ARankWhoseGradientIsEmptyTakesPartInTheNextOrder) {
  Check(
      GetParam(), 3,
      [](int rank, const World& world) {
        if (rank == 0) {
          return Tensors{FromHost<double>(world, Doubles(), {0, 3}).RequireGrad()};
        }
        const Doubles x = rank == 1 ? Doubles{2, 3, 5} : Doubles{7, 11, 13};
        return Tensors{Upload(world, x).RequireGrad()};
      },
      [](int rank, const World& world, const Tensors& in) -> absl::StatusOr<Tensors> {
        const Tensor x = rank == 0 ? OnesOfNothing(in[0]) : in[0];
        const Tensor y = ReduceScatterTensor(x, world, Reduction::kProduct);
        CHORUS_ASSIGN_OR_RETURN(const Tensor g,
                                One(Grad({Sum(y * (rank + 1.0))}, {in[0]}, Create())));
        return Grad({Sum(g)}, {in[0]});
      },
      [](int rank) {
        return std::vector<Doubles>{rank == 0 ? Doubles() : Doubles{1, 2, 3}};
      });
}

TEST_P(Conformance, AConstantGradientTakesPartInTheNextOrders) {
  Check(
      GetParam(), 2, [](int rank, const World& world) { return Tensors{LeafOf(world, rank + 1)}; },
      [](int rank, const World& world, const Tensors& in) -> absl::StatusOr<Tensors> {
        const Tensor& x = in[0];
        const Tensor y = AllReduce(x, world);
        CHORUS_ASSIGN_OR_RETURN(const Tensor g,
                                One(Grad({Sum(rank == 0 ? y * y * y : y * 2)}, {x}, Create())));
        CHORUS_ASSIGN_OR_RETURN(const Tensor h, One(Grad({Sum(g * g)}, {x}, Create())));
        CHORUS_ASSIGN_OR_RETURN(const Tensor t, One(Grad({Sum(h)}, {x})));
        return Tensors{g, h, t};
      },
      [](int) {
        return std::vector<Doubles>{{29}, {2088}, {3984}};
      });
}

TEST_P(Conformance, ARankWhoseOperandIsFrozenTakesPartForItsWeights) {
  Check(
      GetParam(), 2,
      [](int rank, const World& world) {
        const Tensor x = Number(world, rank + 1);
        return Tensors{rank == 0 ? Tensor(x).RequireGrad() : x, LeafOf(world, rank == 0 ? 3 : 5)};
      },
      [](int rank, const World& world, const Tensors& in) -> absl::StatusOr<Tensors> {
        const Tensor y = AllReduce(in[0], world);
        const Tensors wanted = rank == 0 ? in : Tensors{in[1]};
        CHORUS_ASSIGN_OR_RETURN(const Tensors g, Grad({Sum(in[1] * y)}, wanted, Create()));
        const Tensor s = rank == 0 ? g[0] * g[0] : y * y;
        // Rank 1 differentiates what it has of the first order as well.
        return Grad({Sum(s) + Sum(g.back() * 0)}, {in[1]});
      },
      [](int) { return std::vector<Doubles>{{16}}; });
}

// A handle of the first order is enough to be in line.
TEST_P(Conformance, AConstantIsARoot) {
  Check(
      GetParam(), 2, [](int rank, const World& world) { return Tensors{LeafOf(world, rank + 1)}; },
      [](int rank, const World& world, const Tensors& in) -> absl::StatusOr<Tensors> {
        const Tensor y = AllReduce(in[0], world);
        CHORUS_ASSIGN_OR_RETURN(const Tensor g,
                                One(Grad({Sum(rank == 0 ? y * y : y * 0)}, {in[0]}, Create())));
        // On rank 1 a number of the trainer's, but for its history.
        return Grad({rank == 0 ? Sum(g * g) : Sum(g) * 0}, {in[0]});
      },
      [](int) {
        // G = 2 y = 6; dG^2/dx = 2 G 2.
        return std::vector<Doubles>{{24}};
      });
}

// --- Behind a broadcast -------------------------------------------------------------------------

void CheckBehind(const ConformanceParam& param,
                 const std::function<Tensor(const World& world, const Tensor& y)>& spread,
                 double expected) {
  Check(
      param, 2, [](int rank, const World& world) { return Tensors{LeafOf(world, rank + 1)}; },
      [&](int, const World& world, const Tensors& in) -> absl::StatusOr<Tensors> {
        const Tensor y = spread(world, AllReduce(in[0] * 1, world));
        return Grad({Sum(y)}, {in[0]});
      },
      [&](int) { return std::vector<Doubles>{{expected}}; });
}

TEST_P(Conformance, WhatIsBehindABroadcastIsDifferentiatedOffItsRootToo) {
  CheckBehind(
      GetParam(), [](const World& world, const Tensor& y) { return Broadcast(y, 0, world); }, 2);
  CheckBehind(
      GetParam(), [](const World& world, const Tensor& y) { return Broadcast(y * y, 1, world); },
      12);
}

TEST_P(Conformance, WhatIsBehindACoalescedBroadcastIsDifferentiatedOffItsRootToo) {
  CheckBehind(
      GetParam(),
      [](const World& world, const Tensor& y) {
        const Tensors both = BroadcastCoalesced({y, y * y}, 0, world);
        return both[0] + both[1];
      },
      14);
}

TEST_P(Conformance, WhatIsBehindAScatterIsDifferentiatedOffItsRootToo) {
  CheckBehind(
      GetParam(),
      [](const World& world, const Tensor& y) {
        return Scatter({y, y * 3}, DType::kF64, {1}, 0, world);
      },
      4);
  CheckBehind(
      GetParam(),
      [](const World& world, const Tensor& y) {
        return ScatterTensor(Concat({y, y * 3}, 0), DType::kF64, {1}, 0, world);
      },
      4);
}

// Second order of the same.
TEST_P(Conformance, BroadcastsHaveHistoryInEveryOrder) {
  Check(
      GetParam(), 2, [](int rank, const World& world) { return Tensors{LeafOf(world, rank + 1)}; },
      [](int rank, const World& world, const Tensors& in) -> absl::StatusOr<Tensors> {
        const Tensor y = AllReduce(in[0], world);
        const Tensor z = Broadcast(y * y * y, 0, world);
        CHORUS_ASSIGN_OR_RETURN(const Tensor g, One(Grad({Sum(z)}, {in[0]}, Create())));
        // G = 2 * 3 y^2 = 54 on both; S = G on rank 0, 2 G on rank 1.
        return Grad({Sum(g * (rank + 1.0))}, {in[0]});
      },
      [](int) {
        // 3 * 12 y
        return std::vector<Doubles>{{108}};
      });
}

// Between the devices of one session, of what came from other ranks.
TEST_P(Conformance, WhatIsBehindABroadcastBetweenDevicesIsDifferentiatedOnEveryRank) {
  JobOptions options;
  options.ranks = 4;
  options.sessions = 2;
  options.agree_timeout = std::chrono::seconds(20);
  Job job(GetParam(), options);
  // Session s holds ranks s and s + 2. Ranks 0 and 1 speak for their sessions.
  job.Run([&](int rank, World& world) {
    const absl::StatusOr<Group> pair = rank < 2 ? world.NewGroup({0, 1}) : absl::StatusOr<Group>();
    if (rank >= 2) return;
    ASSERT_TRUE(pair.ok()) << pair.status();
    const absl::StatusOr<parallel::DeviceGroup> devices =
        parallel::DeviceGroup::Create(job.session(rank));
    ASSERT_TRUE(devices.ok()) << devices.status();
    const Tensor x = LeafOf(world, rank + 1);
    const Tensor y = AllReduce(x, *pair);
    const std::vector<Tensors> spread = parallel::BroadcastCoalesced({y, y * y}, *devices);
    // Rank 1's loss lies on its second device alone.
    Tensor loss = Sum(spread[1][0] + spread[1][1]);
    if (rank == 0) loss = loss + CopyTo(Sum(spread[0][0]), loss.device());
    ASSERT_TRUE(Backward(loss).ok());
    // 1 + 2 y from each, and 1 more from rank 0.
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(15));
  });
}

// --- A gradient that is its seed ----------------------------------------------------------------

// The root is what the gradient is asked for, or differs from it by what passes gradients on as
// they are: the gradient is the seed.
TEST_P(Conformance, AGradientThatIsItsSeedIsDifferentiatedAsTheSeed) {
  for (const bool computed : {false, true}) {
    SCOPED_TRACE(computed ? "a result" : "a leaf");
    Check(
        GetParam(), 1,
        [](int, const World& world) {
          return Tensors{LeafOf(world, 2), LeafOf(world, 3)};
        },
        [&](int, const World&, const Tensors& in) -> absl::StatusOr<Tensors> {
          const Tensor& x = in[0];
          const Tensor& v = in[1];
          BackwardOptions create = Create();
          create.seeds = {computed ? v * 5 : v};
          Tensors results;
          for (const Tensor& root : {x, x + 1.0}) {
            CHORUS_ASSIGN_OR_RETURN(const Tensor g, One(Grad({root}, {x}, create)));
            CHORUS_ASSIGN_OR_RETURN(const Tensor h, One(Grad({g * g}, {v}, Create())));
            results.push_back(h);
          }
          // As that of a leaf, too; and as a root itself it is the seed.
          CHORUS_RETURN_IF_ERROR(Backward(x, create));
          CHORUS_RETURN_IF_ERROR(Backward(x.grad(), Create()));
          results.push_back(v.grad());
          return results;
        },
        [&](int) {
          return computed ? std::vector<Doubles>{{2 * 25 * 3}, {2 * 25 * 3}, {5}}
                          : std::vector<Doubles>{{2 * 3}, {2 * 3}, {1}};
        });
    if (HasFailure()) return;
  }
}

TEST_P(Conformance, AGradientThatIsItsSeedHasNoHistoryWithoutCreateGraph) {
  Check(
      GetParam(), 1,
      [](int, const World& world) {
        return Tensors{LeafOf(world, 2), LeafOf(world, 3)};
      },
      [](int, const World&, const Tensors& in) -> absl::StatusOr<Tensors> {
        const Tensor& v = in[1];
        Tensors results;
        for (const Tensor& seed : {v, v * 5}) {
          BackwardOptions options;
          options.seeds = {seed};
          CHORUS_ASSIGN_OR_RETURN(const Tensor g, One(Grad({in[0]}, {in[0]}, options)));
          EXPECT_FALSE(g.requires_grad());
          CHORUS_ASSIGN_OR_RETURN(const Tensor h, One(Grad({g * v}, {v})));
          results.push_back(h);
        }
        return results;
      },
      [](int) {
        return std::vector<Doubles>{{3}, {15}};
      });
}

// --- What takes part with zeros is not used up --------------------------------------------------

TEST_P(Conformance, TheGradientsOfLinearLossesAreDifferentiatedOneByOne) {
  JobOptions options;
  options.ranks = 2;
  options.agree_timeout = std::chrono::seconds(20);
  Job job(GetParam(), options);
  job.Run([](int rank, World& world) {
    const Tensor w = LeafOf(world, rank + 2);
    const Tensor y = AllReduce(w * w, world);
    const auto first = Grad({Sum(y * 2)}, {w}, Create());
    const auto second = Grad({Sum(y * 3)}, {w}, Create());
    ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
    // G = 2 w (2 + 2), 2 w (3 + 3).
    for (const Tensors& g : {*first, *second}) {
      const absl::Status done = Backward(Sum(g[0]));
      ASSERT_TRUE(done.ok()) << done;
    }
    EXPECT_THAT(Values<double>(w.grad()), ElementsAre(2 * 4 + 2 * 6));
  });
}

// --- No search from the inputs ------------------------------------------------------------------

TEST_P(Conformance, ALossOfOneRankAloneDoesNotWaitForMetricsThatAreKept) {
  JobOptions options;
  options.ranks = 2;
  options.agree_timeout = std::chrono::seconds(20);
  Job job(GetParam(), options);
  std::vector<Tensor> metrics(2);
  job.Run([&](int rank, World& world) {
    const Tensor w = LeafOf(world, 3);
    const Tensor y = w * 2;
    metrics[static_cast<size_t>(rank)] = AllReduce(y, world);
    if (rank == 1) return;
    ASSERT_TRUE(Backward(Sum(y * y)).ok());
    EXPECT_THAT(Values<double>(w.grad()), ElementsAre(24));
  });
}

TEST_P(Conformance, SeparateLossesOfSharedLeavesDoNotMeet) {
  JobOptions options;
  options.ranks = 2;
  options.agree_timeout = std::chrono::seconds(20);
  Job job(GetParam(), options);
  job.Run([](int rank, World& world) {
    const Tensor x = LeafOf(world, rank + 1);
    const Tensor a = AllReduce(x, world);
    const Tensor b = AllReduce(x * 2, world);
    BackwardOptions retain;
    retain.retain_graph = true;
    // Twice, and each time in other orders.
    for (int round = 0; round < 2; ++round) {
      for (int turn = 0; turn < 2; ++turn) {
        const Tensor loss = (rank + round + turn) % 2 == 0 ? Sum(a * a) : Sum(b * b);
        ASSERT_TRUE(Backward(loss, retain).ok());
      }
    }
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(120));
  });
}

// --- What a rank gave up cannot be had again ----------------------------------------------------

enum class Part { kDropped, kDroppedLate, kNoGrad, kDetached, kZeroSeed, kUsedUp };
// Which ranks compile what they call.
enum class Compiles { kNobody, kRank1, kAll };

struct GivenUp {
  const char* name;
  Part part;
  bool lost;  // rank 0 is told
  double right;
};

// x = 1, 2; y = AllReduce(x); z = AllReduce(y^2); rank 0's loss is z, and rank 1's none.
void RunChain(const ConformanceParam& param, const GivenUp& what, Compiles compiles) {
  constexpr const char* kText[] = {"", ", compiled on rank 1", ", compiled"};
  SCOPED_TRACE(absl::StrCat(what.name, kText[static_cast<int>(compiles)]));
  JobOptions options;
  options.ranks = 2;
  options.agree_timeout = std::chrono::seconds(20);
  Job job(param, options);
  absl::Notification asked;
  absl::Notification given_up;
  const auto await = [](const absl::Notification& what) {
    EXPECT_TRUE(what.WaitForNotificationWithTimeout(absl::Seconds(60)));
  };
  job.Run([&](int rank, World& world) {
    const bool compiled = compiles == Compiles::kAll || (compiles == Compiles::kRank1 && rank == 1);
    const Tensor x = LeafOf(world, rank + 1);
    const auto chain = [&](const Tensor& leaf) {
      const Tensor y = AllReduce(leaf, world, Reduction::kSum, Site(rank));
      Tensor square = y * y;
      if (rank == 1 && what.part == Part::kDetached) square = square.Detach();
      std::unique_ptr<NoGrad> off;
      if (rank == 1 && what.part == Part::kNoGrad) off = std::make_unique<NoGrad>();
      return AllReduce(square, world, Reduction::kSum, Site(rank + 2));
    };
    BackwardOptions retain;
    retain.retain_graph = true;
    BackwardOptions zero;
    zero.seeds = {Number(world, 0)};
    Tensor z;
    Tensor gradient;
    if (compiled) {
      const Compiled function = Compile([&](const Tensors& in) {
        const Tensor inside = chain(in[0]);
        if (rank == 1 && what.part != Part::kZeroSeed) return Tensors{inside};
        const absl::StatusOr<Tensors> g =
            Grad({inside}, {in[0]}, rank == 1 ? zero : BackwardOptions());
        return g.ok() ? *g : Tensors{Tensor()};
      });
      const absl::StatusOr<Tensors> ran = function.Run({x});
      ASSERT_TRUE(ran.ok()) << ran.status();
      gradient = (*ran)[0];
    } else {
      z = chain(x);
    }
    if (rank == 1) {
      if (what.part == Part::kDroppedLate) await(asked);
      if (!compiled && (what.part == Part::kZeroSeed || what.part == Part::kUsedUp)) {
        ASSERT_TRUE(Backward(z, zero).ok());
      }
      z = Tensor();
      // Its log has arrived.
      EXPECT_EQ(Values<double>(Number(world, 1) * 2), Doubles{2});
      given_up.Notify();
      return;
    }
    if (what.part != Part::kDroppedLate) await(given_up);
    for (int times = what.part == Part::kUsedUp ? 2 : 1; !compiled && times > 0; --times) {
      const absl::StatusOr<Tensors> g = Grad({Sum(z)}, {x}, retain);
      ASSERT_TRUE(g.ok()) << g.status();
      if (times > 1) {
        EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(12));
      }
      gradient = (*g)[0];
    }
    asked.Notify();
    const absl::StatusOr<Doubles> got = gradient.Read<double>();
    if (!what.lost) {
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_THAT(*got, ElementsAre(what.right));
      return;
    }
    ASSERT_FALSE(got.ok()) << (*got)[0];
    const Error error = ErrorOf(got.status());
    EXPECT_EQ(error.code, absl::StatusCode::kFailedPrecondition) << got.status();
    EXPECT_EQ(error.reason, Reason::kGradientLost) << got.status();
    EXPECT_EQ(error.culprit.rank, 1);
    EXPECT_THAT(error.message, HasSubstr("rank 1"));
    EXPECT_THAT(error.message, HasSubstr("train.cc:40"));
    EXPECT_THAT(error.message, HasSubstr("zero seed"));
    EXPECT_THAT(error.message, HasSubstr("NoGrad"));
  });
}

TEST_P(Conformance, AGradientThroughWhatARankGaveUpIsRefusedOrRight) {
  const GivenUp cases[] = {
      {"dropped", Part::kDropped, true, 12},
      {"dropped when it was asked for", Part::kDroppedLate, true, 12},
      {"used up", Part::kUsedUp, true, 12},
      {"a constant by NoGrad", Part::kNoGrad, false, 6},
      {"a constant by Detach", Part::kDetached, false, 6},
      {"a zero seed", Part::kZeroSeed, false, 12},
  };
  for (const GivenUp& what : cases) {
    RunChain(GetParam(), what, Compiles::kNobody);
    if (HasFailure()) return;
    if (what.part == Part::kDroppedLate || what.part == Part::kUsedUp) continue;
    for (const Compiles compiles : {Compiles::kRank1, Compiles::kAll}) {
      RunChain(GetParam(), what, compiles);
      if (HasFailure()) return;
    }
  }
}

// The same, where rank 1 makes y itself and gives it to a compiled function that has z alone.
TEST_P(Conformance, WhatAFunctionHasFromACollectiveIsNoLeaf) {
  for (int i = 0; i < 4; ++i) {
    const bool captured = i % 2 == 1;
    const bool no_grad = i >= 2;
    SCOPED_TRACE(captured ? "captured" : "an input");
    SCOPED_TRACE(no_grad ? "under NoGrad" : "");
    Job job(GetParam(), 2);
    absl::Notification given_up;
    job.Run([&](int rank, World& world) {
      const Tensor x = LeafOf(world, rank + 1);
      const Tensor y = AllReduce(x, world, Reduction::kSum, Site(rank));
      const auto square = [&](const Tensor& of) {
        return AllReduce(of * of, world, Reduction::kSum, Site(rank + 2));
      };
      if (rank == 1) {
        std::unique_ptr<NoGrad> off;
        if (no_grad) off = std::make_unique<NoGrad>();
        const absl::StatusOr<Tensors> z = Compile([&](const Tensors& in) {
                                            return Tensors{square(captured ? y : in[0])};
                                          }).Run({captured ? x : y});
        ASSERT_TRUE(z.ok()) << z.status();
        EXPECT_EQ(Values<double>((*z)[0]), Doubles{18});
        given_up.Notify();
        return;
      }
      const Tensor z = square(y);
      EXPECT_EQ(Values<double>(z), Doubles{18});
      EXPECT_TRUE(given_up.WaitForNotificationWithTimeout(absl::Seconds(60)));
      const absl::StatusOr<Tensors> g = Grad({Sum(z)}, {x});
      ASSERT_TRUE(g.ok()) << g.status();
      const absl::StatusOr<Doubles> got = (*g)[0].Read<double>();
      if (no_grad) {
        ASSERT_TRUE(got.ok()) << got.status();
        EXPECT_EQ(*got, Doubles{6});
        return;
      }
      ASSERT_FALSE(got.ok()) << (*got)[0];
      EXPECT_EQ(ErrorOf(got.status()).reason, Reason::kGradientLost) << got.status();
      EXPECT_EQ(ErrorOf(got.status()).culprit.rank, 1) << got.status();
    });
  }
}

// By Grad, or in the leaves' grad().
absl::StatusOr<Tensors> GradientsOf(const Tensor& loss, const Tensors& wanted, bool by_backward) {
  if (!by_backward) return Grad({loss}, wanted);
  CHORUS_RETURN_IF_ERROR(Backward(loss));
  Tensors gradients;
  for (const Tensor& leaf : wanted) gradients.push_back(leaf.grad());
  return gradients;
}

// Losses z = AllReduce(w y^2) of y = AllReduce(x) on both ranks. One differentiates its own in a
// function, where y is from outside: 12 for the other's x, where 24 is right, unless it goes on
// from y's gradient, which Backward does not ask for, or says that y is a constant.
TEST_P(Conformance, AFunctionsGradientGoesOnOutsideOrIsRefused) {
  enum class Case { kCut, kCutCaptured, kBackward, kGoesOn, kDetached, kBackwardDetached };
  for (const Case what : {Case::kCut, Case::kCutCaptured, Case::kBackward, Case::kGoesOn,
                          Case::kDetached, Case::kBackwardDetached}) {
    SCOPED_TRACE(static_cast<int>(what));
    const bool detached = what == Case::kDetached || what == Case::kBackwardDetached;
    const bool by_backward = what == Case::kBackward || what == Case::kBackwardDetached;
    const bool cut = !detached && what != Case::kGoesOn;
    Job job(GetParam(), 2);
    job.Run([&](int rank, World& world) {
      const Tensor x = LeafOf(world, rank + 1);
      const Tensor w = LeafOf(world, 1);
      Tensor y = AllReduce(x, world, Reduction::kSum, Site(rank));
      const auto loss = [&](const Tensor& of, const Tensor& weight) {
        return AllReduce(of * of * weight, world, Reduction::kSum, Site(rank + 2));
      };
      if (rank == 0) {
        const absl::StatusOr<Tensors> g = Grad({Sum(loss(y, w))}, {x});
        const absl::StatusOr<Doubles> got =
            g.ok() ? (*g)[0].Read<double>() : absl::StatusOr<Doubles>(g.status());
        if (cut) {
          ASSERT_FALSE(got.ok()) << (*got)[0];
          EXPECT_EQ(ErrorOf(got.status()).reason, Reason::kPeerRefused) << got.status();
          EXPECT_EQ(ErrorOf(got.status()).culprit.rank, 1) << got.status();
        } else {
          ASSERT_TRUE(got.ok()) << got.status();
          EXPECT_EQ(*got, Doubles{detached ? 12.0 : 24.0});
        }
        return;
      }
      if (detached) y = y.Detach();
      absl::Status refused;
      const Compiled compiled = Compile([&](const Tensors& in) {
        const Tensor& of = what == Case::kCutCaptured ? y : in[0];
        Tensors wanted = {in[1]};
        if (what == Case::kGoesOn) wanted.push_back(of);
        const absl::StatusOr<Tensors> g = GradientsOf(Sum(loss(of, in[1])), wanted, by_backward);
        refused = g.status();
        return g.ok() ? *g : Tensors();
      });
      const absl::StatusOr<Tensors> g = compiled.Run({y, w});
      if (cut) {
        EXPECT_EQ(ErrorOf(refused).reason, Reason::kWrongState) << refused;
        EXPECT_THAT(std::string(refused.message()), HasSubstr("mul at "));
        EXPECT_THAT(std::string(refused.message()), HasSubstr("or Detach it"));
        EXPECT_FALSE(g.ok());
        return;
      }
      ASSERT_TRUE(g.ok()) << g.status();
      EXPECT_EQ(Values<double>((*g)[0]), Doubles{18});
      if (detached) return;
      BackwardOptions seeded;
      seeded.seeds = {(*g)[1]};
      const absl::StatusOr<Tensors> on = Grad({y}, {x}, seeded);
      ASSERT_TRUE(on.ok()) << on.status();
      EXPECT_EQ(Values<double>((*on)[0]), Doubles{24});
    });
  }
}

// G = dL/dy of the losses y^3 and 2 y of y = AllReduce(x): on rank 1 a constant, with a history of
// y's gradient. Two losses of each rank follow, which share it: G^2 and 10 G on rank 0, w G^2 for w
// alone, in a function, and G + 5 y on rank 1. If rank 1 asks nothing of y's gradient in the first,
// its second meets rank 0's first there: 977 for both, where 972 and 185 are right.
TEST_P(Conformance, AFunctionsGradientIsRefusedWhereItWouldCutOffAConstantOne) {
  enum class Case {
    kInput,
    kBackward,
    kCaptured,
    kComputed,
    kSeed,
    kInside,
    kItsSeed,
    kSeedItsSeed,
    kSecondOrder,
    kSecondOrderOfItAlone,
    kGoesOn,
    kDetached
  };
  for (const Case what :
       {Case::kInput, Case::kBackward, Case::kCaptured, Case::kComputed, Case::kSeed, Case::kInside,
        Case::kItsSeed, Case::kSeedItsSeed, Case::kSecondOrder, Case::kSecondOrderOfItAlone,
        Case::kGoesOn, Case::kDetached}) {
    SCOPED_TRACE(static_cast<int>(what));
    const bool refused = what != Case::kGoesOn && what != Case::kDetached;
    JobOptions options;
    options.ranks = 2;
    options.agree_timeout = std::chrono::seconds(20);
    Job job(GetParam(), options);
    absl::Notification seen;  // what would fail with the refusal
    job.Run([&](int rank, World& world) {
      const Tensor x = LeafOf(world, rank + 1);
      const Tensor w = LeafOf(world, 1);
      const Tensor y = AllReduce(x, world, Reduction::kSum, Site(rank));
      BackwardOptions create = Create();
      const bool is_seed = what == Case::kSeed || what == Case::kSeedItsSeed;
      if (rank == 1 && is_seed) create.seeds = {LeafOf(world, 2)};
      const Tensor of_y = rank == 0 ? Sum(y * y * y) : is_seed ? y : Sum(y * 2);
      const absl::StatusOr<Tensor> g = One(Grad({of_y}, {y}, create));
      ASSERT_TRUE(g.ok()) << g.status();
      EXPECT_EQ(Values<double>(*g), Doubles{rank == 0 ? 27.0 : 2.0});
      BackwardOptions retain;
      retain.retain_graph = true;
      const auto check = [](const absl::StatusOr<Tensors>& gradients, double right) {
        ASSERT_TRUE(gradients.ok()) << gradients.status();
        EXPECT_EQ(Values<double>((*gradients)[0]), Doubles{right});
      };
      if (rank == 0) {
        seen.Notify();
        const absl::StatusOr<Tensors> first = Grad({Sum(*g * *g)}, {x}, retain);
        if (!refused) {
          check(first, 972);
          check(Grad({Sum(*g * 10)}, {x}, retain), 185);
          return;
        }
        const absl::StatusOr<Doubles> got =
            first.ok() ? (*first)[0].Read<double>() : absl::StatusOr<Doubles>(first.status());
        ASSERT_FALSE(got.ok()) << (*got)[0];
        EXPECT_EQ(ErrorOf(got.status()).reason, Reason::kPeerRefused) << got.status();
        EXPECT_EQ(ErrorOf(got.status()).culprit.rank, 1) << got.status();
        return;
      }
      EXPECT_TRUE(seen.WaitForNotificationWithTimeout(absl::Seconds(60)));
      const absl::StatusOr<Group> alone = world.NewGroup({1});
      ASSERT_TRUE(alone.ok()) << alone.status();
      absl::Status inside;
      const Compiled compiled = Compile([&](const Tensors& in) {
        const bool its_seed = what == Case::kItsSeed || what == Case::kSeedItsSeed;
        const bool second = what == Case::kSecondOrder || what == Case::kSecondOrderOfItAlone;
        const bool captured = what == Case::kCaptured || what == Case::kSeed || its_seed || second;
        Tensor of = captured ? *g : what == Case::kDetached ? in[0].Detach() : in[0];
        if (what == Case::kInside) {
          // What the gradient's own call took part in.
          const Tensor all = AllReduce(of, *alone);
          of = *One(Grad({Sum(all * 2)}, {all, of}, Create()));
        }
        for (int i = 0; its_seed && i < 2; ++i) {
          // The gradient of in[1], in a call that takes part in another collective.
          BackwardOptions seeded = Create();
          seeded.seeds = {of, Tensor()};
          of = *One(Grad({in[1], AllReduce(in[2], *alone)}, {in[1]}, seeded));
        }
        if (second) {
          // 2 w G, or G: both gradients are asked for, so that this much is not refused.
          const Tensor product = what == Case::kSecondOrder ? in[1] * in[1] * of : in[1] * of;
          const absl::StatusOr<Tensors> both = Grad({Sum(product)}, {in[1], of}, Create());
          EXPECT_TRUE(both.ok()) << both.status();
          of = both.ok() ? (*both)[0] : of;
        }
        const Tensor loss = Sum(in[1] * of * of);
        Tensors wanted = {in[1]};
        if (what == Case::kGoesOn) wanted.push_back(of);
        const absl::StatusOr<Tensors> gradients =
            GradientsOf(loss, wanted, what == Case::kBackward);
        inside = gradients.status();
        return gradients.ok() ? *gradients : Tensors{Tensor()};
      });
      const absl::StatusOr<Tensors> first =
          compiled.Run({what == Case::kComputed ? *g * 1 : *g, w, LeafOf(world, 3)});
      if (refused) {
        EXPECT_EQ(ErrorOf(inside).reason, Reason::kWrongState) << inside;
        EXPECT_THAT(std::string(inside.message()), HasSubstr("or Detach it"));
        EXPECT_FALSE(first.ok());
        return;
      }
      check(first, 4);
      BackwardOptions seeded = retain;
      seeded.seeds = {what == Case::kGoesOn ? (*first)[1] : Number(world, 0)};
      check(Grad({*g}, {x}, seeded), 972);
      check(Grad({Sum(*g) + Sum(y * 5)}, {x}, retain), 185);
    });
    if (HasFailure()) return;
  }
}

// NoGrad around a function's call says of all in it what it says inside: this rank's part of the
// second collective is a constant, although the first one led to a leaf.
TEST_P(Conformance, NoGradAroundAFunctionIsNoGradInIt) {
  Job job(GetParam(), 2);
  job.Run([&](int rank, World& world) {
    const Tensor x = LeafOf(world, rank + 1);
    const auto squares = [&](const Tensor& of) {
      const Tensor y = AllReduce(of, world, Reduction::kSum, Site(rank));
      return AllReduce(y * y, world, Reduction::kSum, Site(rank + 2));
    };
    if (rank == 1) {
      const Compiled compiled = Compile([&](const Tensors& in) { return Tensors{squares(in[0])}; });
      const NoGrad no_grad;
      const absl::StatusOr<Tensors> z = compiled.Run({x});
      ASSERT_TRUE(z.ok()) << z.status();
      EXPECT_EQ(Values<double>((*z)[0]), Doubles{18});
      return;
    }
    const Tensor z = squares(x);
    EXPECT_EQ(Values<double>(z), Doubles{18});
    const absl::StatusOr<Tensors> g = Grad({Sum(z)}, {x});
    ASSERT_TRUE(g.ok()) << g.status();
    EXPECT_EQ(Values<double>((*g)[0]), Doubles{6});
  });
}

// Losses -2y^2 and -y of y = AllReduce(x), the gradients of which are G. Rank 0 drops its G, so the
// gradient of rank 1's leads through what is gone: 0 where -4 is right. Rank 1 makes nothing of the
// gradient that is lost, but the number that it reads comes through rank 0's part of that all the
// same. So a rank that asks behind it must hear of it, whatever became of its own request.
TEST_P(Conformance, ANumberBehindALostGradientIsNotHandedOut) {
  Job job(GetParam(), 2);
  absl::Notification dropped;
  job.Run([&dropped](int rank, World& world) {
    const Tensor x = LeafOf(world, rank + 1);
    const Tensor y = AllReduce(x, world, Reduction::kSum, Site(rank));
    absl::StatusOr<Tensors> g = Grad({Sum(rank == 0 ? y * y * -2 : y * -1)}, {x}, Create());
    ASSERT_TRUE(g.ok()) << g.status();
    EXPECT_EQ(Values<double>((*g)[0]), Doubles{-13});
    if (rank == 0) {
      g = Tensors();
      // Its log has arrived.
      EXPECT_EQ(Values<double>(Number(world, 1) * 2), Doubles{2});
      dropped.Notify();
      return;
    }
    ASSERT_TRUE(dropped.WaitForNotificationWithTimeout(absl::Seconds(60)));
    const absl::StatusOr<Tensors> h = Grad({Sum((*g)[0])}, {x});
    ASSERT_TRUE(h.ok()) << h.status();
    const absl::StatusOr<Doubles> got = (*h)[0].Read<double>();
    ASSERT_FALSE(got.ok()) << (*got)[0];
    EXPECT_EQ(ErrorOf(got.status()).reason, Reason::kGradientLost) << got.status();
    EXPECT_EQ(ErrorOf(got.status()).culprit.rank, 0) << got.status();
  });
}

// Where only a leaf lay behind, the others' numbers are right and the rank is named.
TEST_P(ConformanceInside, WhatARankGaveUpInFrontOfALeafIsCountedAndNamed) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    for (int step = 0; step < 3; ++step) {
      const Tensor x = LeafOf(world, rank + 1);
      Tensor y = AllReduce(x, world, Reduction::kSum, Site(rank));
      Tensor constant;
      {
        const NoGrad no_grad;
        constant = AllReduce(x, world, Reduction::kSum, Site(rank + 2));
      }
      if (rank == 1) continue;
      ASSERT_TRUE(Backward(Sum(y * y)).ok());
      EXPECT_THAT(Values<double>(x.grad()), ElementsAre(6));
    }
  });
  const ClusterCounts counts = job.cluster().Counts();
  EXPECT_EQ(counts.gradients_given_up, 3);
  ASSERT_EQ(counts.given_up.size(), 3u);
  for (const std::string& text : counts.given_up) {
    EXPECT_THAT(text, HasSubstr("rank 1"));
    EXPECT_THAT(text, HasSubstr("train.cc:20"));
    EXPECT_THAT(text, HasSubstr("all_reduce"));
  }
}

// A rank that takes its gradient without create_graph gives up its part of the next order.
TEST_P(Conformance, AGradientThatARankDidNotRecordIsRefused) {
  for (const bool record : {true, false}) {
    JobOptions options;
    options.ranks = 2;
    options.agree_timeout = std::chrono::seconds(20);
    Job job(GetParam(), options);
    job.Run([&](int rank, World& world) {
      const Tensor x = LeafOf(world, rank + 1);
      const Tensor y = AllReduce(x, world, Reduction::kSum, Site(rank));
      BackwardOptions how;
      how.create_graph = rank == 0 || record;
      const absl::StatusOr<Tensors> g = Grad({Sum(y * y)}, {x}, how, Site(rank + 2));
      ASSERT_TRUE(g.ok()) << g.status();
      if (rank == 1) {
        ASSERT_TRUE((*g)[0].Wait().ok());
        if (record) {
          ASSERT_TRUE(Grad({Sum((*g)[0]) * 0}, {x}).ok());
        }
        return;
      }
      // Until then nothing of the first order is pending, which would end with the epoch.
      ASSERT_TRUE((*g)[0].Wait().ok());
      const absl::StatusOr<Tensors> h = Grad({Sum((*g)[0])}, {x});
      ASSERT_TRUE(h.ok()) << h.status();
      const absl::StatusOr<Doubles> got = (*h)[0].Read<double>();
      if (record) {
        ASSERT_TRUE(got.ok()) << got.status();
        // G = 4 y.
        EXPECT_THAT(*got, ElementsAre(4));
        return;
      }
      ASSERT_FALSE(got.ok()) << (*got)[0];
      const Error error = ErrorOf(got.status());
      EXPECT_EQ(error.reason, Reason::kGradientLost) << got.status();
      EXPECT_EQ(error.culprit.rank, 1);
      EXPECT_THAT(error.message, HasSubstr("train.cc:20"));
      EXPECT_THAT(error.message, HasSubstr("create_graph"));
    });
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
