// Ranks stay in line, whatever fails on one of them: the SDK's side of it, with a daemon in memory.
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/user_memory.h"
#include "client/internal/access.h"
#include "client/internal/member.h"
#include "client/internal/record.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/ranks.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using internal::AllReduceIn;
using internal::CallInRuns;
using internal::CoreOf;

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::Ranks;
using testing::Values;

Tensor Vector(const DeviceRef& device, std::vector<double> values) {
  const int64_t size = static_cast<int64_t>(values.size());
  return FromHost<double>(device, values, {size});
}

std::string Text(const absl::Status& status) { return std::string(status.message()); }

// All ranks call a good all_reduce, and get 1 + 2 + ...
void ExpectInLine(const Ranks& ranks, const char* where) {
  SCOPED_TRACE(where);
  std::vector<Tensor> y;
  double sum = 0;
  for (int r = 0; r < ranks.size(); ++r) {
    sum += r + 1;
    y.push_back(AllReduce(Vector(ranks.worlds[r], {1.0 + r}), ranks.worlds[r]));
  }
  for (const Tensor& each : y) EXPECT_THAT(Values<double>(each), ElementsAre(sum));
}

// A function with two all_reduces.
Compiled TwoCalls(const World& world) {
  return Compile([world](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{AllReduce(AllReduce(in[0], world) * 0.5, world)};
  });
}

// --- Compiled functions -------------------------------------------------------------------------

TEST(PositionsTest, ARunWithAFailedInputCountsWhatItsTracesCount) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  std::vector<Compiled> step;
  for (const World& world : ranks.worlds) step.push_back(TwoCalls(world));
  const auto batch = [&](int r, double value) { return Vector(ranks.worlds[r], {value}); };
  std::vector<absl::StatusOr<std::vector<Tensor>>> y;
  for (int r = 0; r < 2; ++r) y.push_back(step[r].Run({batch(r, 1.0 + r)}));
  for (int r = 0; r < 2; ++r) EXPECT_THAT(Values<double>((**&y[r])[0]), ElementsAre(3));
  // Rank 1's batch is one value short.
  const auto good = step[0].Run({batch(0, 5)});
  const auto bad = step[1].Run({FromHost<double>(ranks.worlds[1], {1.0}, {2})});
  ASSERT_TRUE(good.ok());
  EXPECT_THAT(Text(bad.status()), HasSubstr("expected 2 values"));
  EXPECT_EQ(ranks.worlds[1].epoch(), 2);
  const absl::Status told = (*good)[0].Wait();
  EXPECT_EQ(ErrorOf(told).reason, Reason::kPeerRefused);
  EXPECT_EQ(ErrorOf(told).culprit.rank, 1);
  EXPECT_THAT(Text(told), AllOf(HasSubstr("rank 1"), HasSubstr("expected 2 values"),
                                HasSubstr("positions_test.cc")));
  EXPECT_EQ(ranks.worlds[0].epoch(), 2);
  for (int i = 0; i < 3; ++i) {
    const auto a = step[0].Run({batch(0, 6.0 + i)});
    const auto b = step[1].Run({batch(1, 7)});
    ASSERT_TRUE(a.ok() && b.ok());
    EXPECT_THAT(Values<double>((*a)[0]), ElementsAre(13 + i));
    EXPECT_THAT(Values<double>((*b)[0]), ElementsAre(13 + i));
  }
  EXPECT_EQ(daemon.counts().ended_epochs, 1);
}

TEST(PositionsTest, AnAbsentAndAFailedInputAreRefusedAlike) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  std::vector<Compiled> step;
  for (const World& world : ranks.worlds) step.push_back(TwoCalls(world));
  const auto both = [&] {
    std::vector<std::vector<Tensor>> y;
    for (int r = 0; r < 2; ++r) y.push_back(*step[r].Run({Vector(ranks.worlds[r], {1})}));
    for (int r = 0; r < 2; ++r) EXPECT_THAT(Values<double>(y[r][0]), ElementsAre(2));
  };
  both();
  const Tensor barriers[] = {Barrier(ranks.worlds[0]), Barrier(ranks.worlds[1])};
  ASSERT_TRUE(barriers[1].Wait().ok());
  // One that is of no session may be meant for any: below.
  for (const Tensor& bad : {barriers[1], MatMul(barriers[1], barriers[1])}) {
    const auto good = step[0].Run({Vector(ranks.worlds[0], {1})});
    EXPECT_FALSE(step[1].Run({bad}).ok());
    EXPECT_EQ(ErrorOf((*good)[0].Wait()).reason, Reason::kPeerRefused);
    both();
  }
  EXPECT_EQ(daemon.counts().ended_epochs, 2);
}

// Nor is it known on which session the first call would have been: the rank's next call is not
// taken for it.
TEST(PositionsTest, AFirstRunOnNothingPutsTheRankOutOfLine) {
  const std::vector<std::vector<Tensor>> nothing = {{Tensor()}, {Sum(Tensor())}, {}};
  for (const std::vector<Tensor>& inputs : nothing) {
    FakeDaemon daemon;
    const Ranks ranks(2, &daemon);
    for (const World& world : ranks.worlds) ASSERT_TRUE(world.Step(1).ok());
    const auto first = TwoCalls(ranks.worlds[0]).Run({Vector(ranks.worlds[0], {5})});
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_FALSE(TwoCalls(ranks.worlds[1]).Run(inputs).ok());
    const Tensor next = AllReduce(Vector(ranks.worlds[1], {7}), ranks.worlds[1]);
    EXPECT_EQ(ErrorOf(next.Wait()).reason, Reason::kOutOfLine) << next.Wait();
    EXPECT_EQ(ErrorOf((*first)[0].Wait()).reason, Reason::kPeerRefused) << (*first)[0].Wait();
    for (const World& world : ranks.worlds) ASSERT_TRUE(world.Step(2).ok());
    ExpectInLine(ranks, "after nothing");
  }
}

// Nothing is sent while a function is traced; its run is refused once. The first trace that fails
// leaves the rank out of line, where its result is used and where it is not.
TEST(PositionsTest, ARefusalInATracePutsTheRankOutOfLineUntilItsNextStep) {
  for (const bool used : {true, false}) {
    FakeDaemon daemon;
    const Ranks ranks(2, &daemon);
    for (const World& world : ranks.worlds) ASSERT_TRUE(world.Step(1).ok());
    const auto function = [used](const World& world, bool fails) {
      return Compile([world, used, fails](const std::vector<Tensor>& in) {
        const Tensor first = AllReduce(fails ? MatMul(in[0], in[0]) : in[0] * in[0], world);
        return std::vector<Tensor>{used ? first : AllReduce(in[0], world)};
      });
    };
    const auto good = function(ranks.worlds[0], false).Run({Vector(ranks.worlds[0], {1, 2})});
    ASSERT_TRUE(good.ok());
    const auto bad = function(ranks.worlds[1], true).Run({Vector(ranks.worlds[1], {1, 2})});
    EXPECT_THAT(Text(bad.status()), HasSubstr("matmul"));
    EXPECT_EQ(daemon.counts().refusals, 1);
    EXPECT_EQ(daemon.counts().ended_epochs, 1);
    EXPECT_EQ(ranks.worlds[1].epoch(), 2);
    EXPECT_EQ(ErrorOf((*good)[0].Wait()).reason, Reason::kPeerRefused);
    // Its calls fail at once, here and for the ranks that need them.
    const int runs = daemon.counts().runs;
    const Tensor mine = AllReduce(Vector(ranks.worlds[1], {1}), ranks.worlds[1]);
    EXPECT_THAT(Text(mine.status()), AllOf(HasSubstr("out of line"), HasSubstr("matmul"),
                                           HasSubstr("positions_test.cc"), HasSubstr("Step")));
    EXPECT_EQ(daemon.counts().runs, runs);
    EXPECT_FALSE(TwoCalls(ranks.worlds[1]).Run({Vector(ranks.worlds[1], {1})}).ok());
    EXPECT_FALSE(ranks.worlds[1].NewGroup({0, 1}).ok());
    const Tensor other = AllReduce(Vector(ranks.worlds[0], {1}), ranks.worlds[0]);
    EXPECT_EQ(ErrorOf(other.Wait()).reason, Reason::kMismatch);
    EXPECT_EQ(daemon.counts().ended_epochs, 1);
    for (const World& world : ranks.worlds) ASSERT_TRUE(world.Step(2).ok());
    ExpectInLine(ranks, "after the step");
  }
}

// With traces that have counted alike a failed one is known to have counted as much; where they
// have not, nobody knows.
TEST(PositionsTest, WhatATraceThatFailedWouldHaveCountedIsKnownFromTheOthers) {
  for (const bool alike : {true, false}) {
    FakeDaemon daemon;
    const Ranks ranks(2, &daemon);
    std::vector<Compiled> step;
    for (const World& world : ranks.worlds) {
      ASSERT_TRUE(world.Step(1).ok());
      step.push_back(Compile([world, alike](const std::vector<Tensor>& in) {
        Tensor y = AllReduce(in[0], world);
        if (in[0].num_elements() == 2 && !alike) y = AllReduce(y, world);
        if (in[0].num_elements() == 3) return std::vector<Tensor>{AllReduce(Tensor(), world)};
        return std::vector<Tensor>{y};
      }));
    }
    const auto run = [&](std::vector<double> values) {
      std::vector<absl::StatusOr<std::vector<Tensor>>> y;
      for (int r = 0; r < 2; ++r) y.push_back(step[r].Run({Vector(ranks.worlds[r], values)}));
      return y;
    };
    for (const auto& y : run({1})) EXPECT_THAT(Values<double>((*y)[0]), ElementsAre(2));
    for (const auto& y : run({1, 1})) EXPECT_TRUE((*y)[0].Wait().ok());
    for (const auto& y : run({1, 1, 1})) EXPECT_FALSE(y.ok());
    EXPECT_EQ(daemon.counts().ended_epochs, 1);
    for (const World& world : ranks.worlds) EXPECT_EQ(world.epoch(), 2);
    if (!alike) {
      for (int r = 0; r < 2; ++r) {
        EXPECT_THAT(Text(AllReduce(Vector(ranks.worlds[r], {1}), ranks.worlds[r]).status()),
                    HasSubstr("out of line"));
        ASSERT_TRUE(ranks.worlds[r].Step(2).ok());
      }
    }
    ExpectInLine(ranks, "after it");
  }
}

// A function keeps 256 programs.
TEST(PositionsTest, WhatATraceThatIsGoneHasCountedIsKnown) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  std::vector<Compiled> step;
  for (const World& world : ranks.worlds) {
    ASSERT_TRUE(world.Step(1).ok());
    step.push_back(Compile([world](const std::vector<Tensor>& in) {
      const Tensor y = AllReduce(in[0], world);
      return std::vector<Tensor>{in[0].num_elements() == 1 ? AllReduce(y, world) : y};
    }));
  }
  for (size_t size = 1; size <= 260; ++size) {
    std::vector<std::vector<Tensor>> y;
    for (int r = 0; r < 2; ++r) {
      auto run = step[r].Run({Vector(ranks.worlds[r], std::vector<double>(size, 1))});
      ASSERT_TRUE(run.ok()) << run.status();
      y.push_back(*std::move(run));
    }
    for (const auto& results : y) ASSERT_TRUE(results[0].Wait().ok());
  }
  // Of one element, which would call two: all that is kept calls one.
  const Tensor failed = MatMul(Vector(ranks.worlds[0], {1}), Vector(ranks.worlds[0], {1, 2}));
  EXPECT_FALSE(step[0].Run({failed}).ok());
  EXPECT_THAT(Text(AllReduce(Vector(ranks.worlds[0], {1}), ranks.worlds[0]).status()),
              HasSubstr("out of line"));
}

TEST(PositionsTest, AnExceptionInACompiledFunctionIsARefusalAndGoesOn) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  bool throws = false;
  const auto function = [&](int r) {
    return Compile([&, r](const std::vector<Tensor>& in) {
      const Tensor y = AllReduce(in[0], ranks.worlds[r]);
      if (throws && r == 1) throw std::runtime_error("the tokenizer gave up");
      return std::vector<Tensor>{AllReduce(y, ranks.worlds[r])};
    });
  };
  const Compiled step[] = {function(0), function(1)};
  for (const int size : {1, 2}) {
    throws = size == 2;
    const std::vector<double> values(static_cast<size_t>(size), 1);
    const auto a = step[0].Run({Vector(ranks.worlds[0], values)});
    ASSERT_TRUE(a.ok());
    if (!throws) {
      ASSERT_TRUE(step[1].Run({Vector(ranks.worlds[1], values)}).ok());
      EXPECT_THAT(Values<double>((*a)[0]), ElementsAre(4));
      continue;
    }
    EXPECT_THROW(step[1].Run({Vector(ranks.worlds[1], values)}).IgnoreError(), std::runtime_error);
    EXPECT_THAT(Text((*a)[0].Wait()), AllOf(HasSubstr("rank 1"), HasSubstr("gave up")));
  }
  // No trace is left open, and the two calls have counted.
  EXPECT_THAT(Values<double>(Vector(ranks.worlds[1], {1}) + Vector(ranks.worlds[1], {2})),
              ElementsAre(3));
  ExpectInLine(ranks, "after the exception");
  EXPECT_EQ(daemon.counts().ended_epochs, 1);
}

TEST(PositionsTest, ALocalFunctionThatIsRefusedEndsNothing) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  const Compiled twice =
      Compile([](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] + in[0]}; });
  ASSERT_TRUE(twice.Run({Vector(ranks.worlds[0], {1})}).ok());
  EXPECT_FALSE(twice.Run({Tensor()}).ok());
  EXPECT_EQ(daemon.counts().refusals, 0);
  ExpectInLine(ranks, "after it");
}

// --- Eager calls --------------------------------------------------------------------------------

TEST(PositionsTest, AFailedTensorThatIsLookedAtByStatusOnlyKeepsTheRankInLine) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  const Tensor x = Vector(ranks.worlds[1], {1, 2});
  const Tensor bad = AllReduce(MatMul(x, x), ranks.worlds[1]);
  EXPECT_FALSE(bad.status().ok());
  EXPECT_GT(ErrorOf(bad.status()).id.value(), 0);
  EXPECT_EQ(ranks.worlds[1].epoch(), 2);
  const Tensor lost = AllReduce(Vector(ranks.worlds[0], {7}), ranks.worlds[0]);
  EXPECT_EQ(ErrorOf(lost.Wait()).reason, Reason::kPeerRefused);
  ExpectInLine(ranks, "after it");
  EXPECT_EQ(daemon.counts().ended_epochs, 1);
}

TEST(PositionsTest, AMistakeOfAllRanksAtOneCallCostsOneEpoch) {
  FakeDaemon daemon;
  const Ranks ranks(3, &daemon);
  for (int i = 1; i <= 2; ++i) {
    for (const World& world : ranks.worlds) {
      EXPECT_FALSE(AllReduce(Tensor(), world).status().ok());
      // The gradient of it has been told with it.
      EXPECT_FALSE(Backward(AllReduce(Tensor(), world)).ok());
    }
    EXPECT_EQ(daemon.counts().ended_epochs, 2 * i);
    ExpectInLine(ranks, "after it");
  }
}

// Rank 2 has seen the first refusal's end before it makes the mistake itself.
TEST(PositionsTest, ARefusalOfAPositionThatOthersHavePassedEndsNothing) {
  FakeDaemon daemon;
  const Ranks ranks(3, &daemon);
  std::vector<Tensor> good;
  for (int r = 0; r < 3; ++r) {
    if (r == 2) continue;
    EXPECT_FALSE(AllReduce(Tensor(), ranks.worlds[r]).status().ok());
    good.push_back(AllReduce(Vector(ranks.worlds[r], {1}), ranks.worlds[r]));
  }
  EXPECT_EQ(daemon.counts().ended_epochs, 1);
  EXPECT_FALSE(AllReduce(Tensor(), ranks.worlds[2]).status().ok());
  good.push_back(AllReduce(Vector(ranks.worlds[2], {1}), ranks.worlds[2]));
  for (const Tensor& y : good) EXPECT_THAT(Values<double>(y), ElementsAre(3));
  EXPECT_EQ(daemon.counts().ended_epochs, 1);
}

TEST(PositionsTest, ACoalescedCallCountsOneWhateverIsInItsList) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  const auto list = [&](int r, int count) {
    return std::vector<Tensor>(static_cast<size_t>(count), Vector(ranks.worlds[r], {1}));
  };
  // The ranks differ.
  const auto three = AllReduceCoalesced(list(0, 3), ranks.worlds[0]);
  const auto four = AllReduceCoalesced(list(1, 4), ranks.worlds[1]);
  ExpectInLine(ranks, "after three and four");
  EXPECT_FALSE(three[0].Wait().ok());
  EXPECT_FALSE(four[0].Wait().ok());
  // One of them is refused.
  std::vector<Tensor> with_bad = list(1, 4);
  with_bad[2] = Tensor();
  const auto refused = AllReduceCoalesced(with_bad, ranks.worlds[1]);
  const auto other = AllReduceCoalesced(list(0, 4), ranks.worlds[0]);
  EXPECT_FALSE(refused[0].status().ok());
  EXPECT_EQ(ErrorOf(other[3].Wait()).reason, Reason::kPeerRefused);
  ExpectInLine(ranks, "after the refused one");
  // In a compiled function too.
  std::vector<Compiled> step;
  for (int r = 0; r < 2; ++r) {
    step.push_back(Compile([&, r](const std::vector<Tensor>& in) {
      std::vector<Tensor> y = AllReduceCoalesced({in[0], in[0], in[0]}, ranks.worlds[r]);
      y.push_back(AllReduce(in[0], ranks.worlds[r]));
      return y;
    }));
  }
  for (int i = 0; i < 2; ++i) {
    std::vector<std::vector<Tensor>> y;
    for (int r = 0; r < 2; ++r) y.push_back(*step[r].Run({Vector(ranks.worlds[r], {1.0 + r})}));
    for (int r = 0; r < 2; ++r) {
      for (const Tensor& each : y[r]) EXPECT_THAT(Values<double>(each), ElementsAre(3));
    }
    ExpectInLine(ranks, "after the compiled one");
  }
}

// A rank that coalesces and one that does not are at one position each.
TEST(PositionsTest, EagerAndCompiledCoalescedCallsAreOnePosition) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  const Compiled step = Compile([&](const std::vector<Tensor>& in) {
    return AllReduceCoalesced({in[0], in[0] * 2, in[0] * 3}, ranks.worlds[0]);
  });
  const Tensor x = Vector(ranks.worlds[1], {10});
  for (int i = 0; i < 2; ++i) {
    const auto a = step.Run({Vector(ranks.worlds[0], {1})});
    const std::vector<Tensor> b = AllReduceCoalesced({x, x * 2, x * 3}, ranks.worlds[1]);
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_THAT(Values<double>((*a)[k]), ElementsAre(11.0 * (k + 1)));
      EXPECT_THAT(Values<double>(b[k]), ElementsAre(11.0 * (k + 1)));
    }
    ExpectInLine(ranks, "after it");
  }
}

TEST(PositionsTest, SendsAndReceivesCountByThemselves) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  const auto send = [&](double value, int64_t tag) {
    return Send(Vector(ranks.worlds[0], {value}), 1, ranks.worlds[0], tag);
  };
  const auto receive = [&](int64_t tag) { return Recv(DType::kF64, {1}, 0, ranks.worlds[1], tag); };
  // A refused send: its receive fails, and the next ones meet.
  const Tensor waiting = receive(5);
  EXPECT_FALSE(Send(Tensor(), 1, ranks.worlds[0], 5).status().ok());
  EXPECT_EQ(ErrorOf(waiting.Wait()).reason, Reason::kPeerRefused);
  send(3, 5);
  EXPECT_THAT(Values<double>(receive(5)), ElementsAre(3));
  ExpectInLine(ranks, "after the pair");
  // What is sent in a step is received in it: else it is passed, alone.
  for (const World& world : ranks.worlds) ASSERT_TRUE(world.Step(1).ok());
  const Tensor unreceived = send(4, 5);
  ASSERT_TRUE(ranks.worlds[1].Step(2).ok());
  const Tensor next = receive(5);
  EXPECT_EQ(ErrorOf(unreceived.Wait()).reason, Reason::kMismatch);
  ASSERT_TRUE(ranks.worlds[0].Step(2).ok());
  send(6, 5);
  EXPECT_THAT(Values<double>(next), ElementsAre(6));
  // Compiled too, with other tags beside it.
  const Compiled sends = Compile([&](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{Send(in[0], 1, ranks.worlds[0], 5),
                               Send(in[0] * 2, 1, ranks.worlds[0], 7),
                               Send(in[0] * 3, 1, ranks.worlds[0], 5)};
  });
  for (double x : {1.0, 2.0}) {
    ASSERT_TRUE(sends.Run({Vector(ranks.worlds[0], {x})}).ok());
    EXPECT_THAT(Values<double>(receive(5)), ElementsAre(x));
    EXPECT_THAT(Values<double>(receive(5)), ElementsAre(3 * x));
    EXPECT_THAT(Values<double>(receive(7)), ElementsAre(2 * x));
  }
  EXPECT_EQ(daemon.counts().ended_epochs, 1);
}

// --- Steps --------------------------------------------------------------------------------------

TEST(PositionsTest, StepsRise) {
  FakeDaemon daemon;
  const Ranks ranks(1, &daemon);
  const World& world = ranks.worlds[0];
  EXPECT_EQ(world.step(), 0);
  EXPECT_EQ(world.Step(0).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(world.Step(4).ok());
  EXPECT_EQ(world.step(), 4);
  for (const int64_t bad : {int64_t{4}, int64_t{3}, int64_t{-1}, int64_t{1} << 48}) {
    const absl::Status refused = world.Step(bad);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Text(refused),
                AllOf(HasSubstr("above that of the last step, 4"), HasSubstr("positions_test.cc")));
  }
  EXPECT_FALSE(World().Step(1).ok());
  absl::Status inside;
  const Compiled function = Compile([&](const std::vector<Tensor>& in) {
    inside = world.Step(5);
    return in;
  });
  ASSERT_TRUE(function.Run({Vector(world, {1})}).ok());
  EXPECT_EQ(inside.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(world.step(), 4);
  ASSERT_TRUE(world.Step((int64_t{1} << 48) - 1).ok());
}

// Three calls a step, each waited for; rank 1 leaves step 1 after its first.
// What concerns a whole world is no part of a function that is being compiled: nothing is sent, and
// nothing counts.
TEST(PositionsTest, WorldsAreNotChangedWhileAFunctionIsTraced) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  World& world = ranks.worlds[0];
  std::vector<absl::Status> inside;
  const Compiled function = Compile([&](const std::vector<Tensor>& in) {
    inside = {world.NewGroup({1, 0}).status(), world.Leave(), world.Abort("no"),
              world.Reform().status()};
    return in;
  });
  ASSERT_TRUE(function.Run({Vector(world, {1})}).ok());
  ASSERT_EQ(inside.size(), 4u);
  for (const absl::Status& status : inside) {
    EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState) << status;
    EXPECT_THAT(Text(status), HasSubstr("inside a compiled function"));
  }
  EXPECT_EQ(daemon.counts().ended_epochs, 0);
  // Both ranks' first request is for one group.
  std::vector<Tensor> y;
  for (int r = 0; r < 2; ++r) {
    const auto group = ranks.worlds[r].NewGroup({1, 0});
    ASSERT_TRUE(group.ok()) << group.status();
    y.push_back(AllReduce(Vector(ranks.worlds[r], {1.0 + r}), *group));
  }
  for (const Tensor& sum : y) EXPECT_THAT(Values<double>(sum), ElementsAre(3));
  ExpectInLine(ranks, "after it");
}

TEST(PositionsTest, ARankThatLeavesAStepIsInLineInTheNext) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  const auto call = [&](int r, double value) {
    return AllReduce(Vector(ranks.worlds[r], {value}), ranks.worlds[r]);
  };
  for (const World& world : ranks.worlds) ASSERT_TRUE(world.Step(1).ok());
  const Tensor first[] = {call(0, 1), call(1, 2)};
  EXPECT_THAT(Values<double>(first[0]), ElementsAre(3));
  const Tensor second = call(0, 3);
  ASSERT_TRUE(ranks.worlds[1].Step(2).ok());
  std::vector<Tensor> ahead;
  for (int i = 0; i < 3; ++i) ahead.push_back(call(1, 10.0 + i));
  EXPECT_EQ(ErrorOf(second.Wait()).reason, Reason::kMismatch);
  EXPECT_EQ(ErrorOf(call(0, 4).Wait()).reason, Reason::kMismatch);
  ASSERT_TRUE(ranks.worlds[0].Step(2).ok());
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(Values<double>(call(0, 20.0 + i)), ElementsAre(30 + 2 * i));
    EXPECT_THAT(Values<double>(ahead[i]), ElementsAre(30 + 2 * i));
  }
  // No epoch has ended, so nobody has entered one.
  EXPECT_EQ(daemon.counts().ended_epochs, 0);
  EXPECT_EQ(daemon.counts().entered_epochs, 0);
  for (const World& world : ranks.worlds) EXPECT_EQ(world.epoch(), 1);
}

// a in A = {0, 1}, then b in B = {1, 2}; rank 1's a of step 1 is refused while rank 2 waits in b.
TEST(PositionsTest, SeveralGroupsAreInLineAgain) {
  FakeDaemon daemon;
  const Ranks ranks(3, &daemon);
  const Group a[] = {*ranks.worlds[0].NewGroup({0, 1}), *ranks.worlds[1].NewGroup({0, 1})};
  const Group b[] = {*ranks.worlds[1].NewGroup({1, 2}), *ranks.worlds[2].NewGroup({1, 2})};
  for (int step = 1; step <= 3; ++step) {
    for (const World& world : ranks.worlds) ASSERT_TRUE(world.Step(step).ok());
    const double s = step;
    const Tensor b2 = AllReduce(Vector(ranks.worlds[2], {s}), b[1]);
    const Tensor a0 = AllReduce(Vector(ranks.worlds[0], {s}), a[0]);
    const Tensor a1 = AllReduce(step == 1 ? Tensor() : Vector(ranks.worlds[1], {s * 10}), a[1]);
    // Rank 1 goes on with its step: b is at its first position on both.
    const Tensor b1 = AllReduce(Vector(ranks.worlds[1], {s * 100}), b[0]);
    if (step == 1) {
      EXPECT_EQ(ErrorOf(a0.Wait()).reason, Reason::kPeerRefused);
      EXPECT_EQ(ErrorOf(b2.Wait()).reason, Reason::kPeerRefused);
      EXPECT_EQ(ErrorOf(b1.Wait()).reason, Reason::kMismatch);
      continue;
    }
    EXPECT_THAT(Values<double>(a0), ElementsAre(11 * s));
    EXPECT_THAT(Values<double>(a1), ElementsAre(11 * s));
    EXPECT_THAT(Values<double>(b1), ElementsAre(101 * s));
    EXPECT_THAT(Values<double>(b2), ElementsAre(101 * s));
  }
  EXPECT_EQ(daemon.counts().ended_epochs, 1);
}

// Rank 0 has five calls under way when rank 1's first is refused.
TEST(PositionsTest, RunningAheadDoesNotLast) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  std::vector<Tensor> ahead;
  for (int i = 0; i < 5; ++i) {
    ahead.push_back(AllReduce(Vector(ranks.worlds[0], {1.0 * i}), ranks.worlds[0]));
  }
  EXPECT_FALSE(AllReduce(Tensor(), ranks.worlds[1]).status().ok());
  for (const Tensor& y : ahead) EXPECT_FALSE(y.Wait().ok());
  // Without steps rank 1 has to count as far as rank 0 has: these are passed.
  for (int i = 1; i < 5; ++i) {
    const Tensor late = AllReduce(Vector(ranks.worlds[1], {1}), ranks.worlds[1]);
    EXPECT_EQ(ErrorOf(late.Wait()).reason, Reason::kMismatch);
  }
  ExpectInLine(ranks, "after as many calls");
  EXPECT_EQ(daemon.counts().ended_epochs, 1);
}

TEST(PositionsTest, AGroupIsThatOfItsStep) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  std::vector<Group> made[2];
  for (int step = 1; step <= 2; ++step) {
    for (int r = 0; r < 2; ++r) {
      ASSERT_TRUE(ranks.worlds[r].Step(step).ok());
      // Rank 1 leaves step 1 before it makes its groups.
      if (step == 1 && r == 1) continue;
      for (int k = 0; k < 2; ++k) made[r].push_back(*ranks.worlds[r].NewGroup({0, 1}));
    }
  }
  // The two of step 2.
  std::vector<Tensor> y;
  for (int k = 0; k < 2; ++k) {
    y.push_back(AllReduce(Vector(ranks.worlds[0], {1.0 + k}), made[0][2 + k]));
    y.push_back(AllReduce(Vector(ranks.worlds[1], {10.0 + k}), made[1][k]));
  }
  for (int i = 0; i < 4; ++i) EXPECT_THAT(Values<double>(y[i]), ElementsAre(i < 2 ? 11 : 13));
}

// A trainer's text, or that of an exception of its own, is told in short.
TEST(PositionsTest, AReasonMayBeOfAnyLength) {
  const std::string text(5000, 'x');
  for (const bool by_hand : {true, false}) {
    SCOPED_TRACE(by_hand);
    FakeDaemon daemon;
    const Ranks ranks(2, &daemon);
    const Tensor waiting = AllReduce(Vector(ranks.worlds[1], {2}), ranks.worlds[1]);
    if (by_hand) {
      EXPECT_TRUE(ranks.worlds[0].Abort(text).ok());
    } else {
      const Tensor failed =
          FromError(ranks.sessions[0].device(0), absl::InvalidArgumentError(text));
      EXPECT_FALSE(AllReduce(failed, ranks.worlds[0]).Wait().ok());
    }
    const absl::Status told = waiting.Wait();
    EXPECT_EQ(ErrorOf(told).reason, by_hand ? Reason::kAborted : Reason::kPeerRefused);
    EXPECT_THAT(Text(told), AllOf(HasSubstr("rank 0"), HasSubstr("xxxx")));
    for (const World& world : ranks.worlds) ASSERT_TRUE(world.Step(1).ok());
    ExpectInLine(ranks, "after a long text");
  }
}

TEST(PositionsTest, AnAbortStandsBehindTheCallsBeforeIt) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  const Tensor before = AllReduce(Vector(ranks.worlds[1], {2}), ranks.worlds[1]);
  const Tensor met = AllReduce(Vector(ranks.worlds[0], {1}), ranks.worlds[0]);
  const Tensor waiting = AllReduce(Vector(ranks.worlds[1], {2}), ranks.worlds[1]);
  ASSERT_TRUE(ranks.worlds[0].Abort("the loss is not a number").ok());
  EXPECT_EQ(ranks.worlds[0].epoch(), 2);
  EXPECT_THAT(Values<double>(met), ElementsAre(3));
  EXPECT_THAT(Values<double>(before), ElementsAre(3));
  const absl::Status aborted = waiting.Wait();
  EXPECT_EQ(ErrorOf(aborted).reason, Reason::kAborted);
  EXPECT_THAT(Text(aborted), AllOf(HasSubstr("rank 0"), HasSubstr("not a number")));
  for (const World& world : ranks.worlds) ASSERT_TRUE(world.Step(1).ok());
  ExpectInLine(ranks, "after the abort");
}

// --- Gradients ----------------------------------------------------------------------------------

// Of two ranks whose x is 1.
void ExpectGradientsOfWhatIsRecordedAnew(const Ranks& ranks, const std::vector<Tensor>& x) {
  std::vector<absl::StatusOr<std::vector<Tensor>>> again;
  for (int r = 0; r < 2; ++r) {
    const Tensor anew = AllReduce(x[r] * x[r], ranks.worlds[r]);
    again.push_back(Grad({anew}, {x[r]}));
  }
  for (int r = 0; r < 2; ++r) EXPECT_THAT(Values<double>((**&again[r])[0]), ElementsAre(4));
}

// x = 1, y = AllReduce(x) kept; y, z, B1 = Grad(10 y), B2 = Grad(y). Rank 1's z or its B1 is
// refused when rank 0 has asked for B1: its B2 must never meet that.
TEST(PositionsTest, ARefusedGradientIsNotTakenForAnother) {
  for (const bool steps : {false, true}) {
    for (const bool refused_gradient : {false, true}) {
      FakeDaemon daemon;
      const Ranks ranks(2, &daemon);
      BackwardOptions retain;
      retain.retain_graph = true;
      std::vector<Tensor> x, y;
      for (int r = 0; r < 2; ++r) {
        if (steps) {
          ASSERT_TRUE(ranks.worlds[r].Step(1).ok());
        }
        x.push_back(Scalar<double>(ranks.worlds[r], 1).RequireGrad());
        y.push_back(AllReduce(x[r], ranks.worlds[r]));
      }
      Tensor z = AllReduce(Scalar<double>(ranks.worlds[0], 1), ranks.worlds[0]);
      const auto b1 = Grad({y[0] * 10}, {x[0]}, retain);
      ASSERT_TRUE(b1.ok());
      const Tensor two = Vector(ranks.worlds[1], {1, 2});
      if (refused_gradient) {
        z = AllReduce(Scalar<double>(ranks.worlds[1], 1), ranks.worlds[1]);
        const auto refused = Grad({y[1] * two}, {x[1]}, retain);
        EXPECT_THAT(Text(refused.status()), HasSubstr("a root of one element"));
      } else {
        z = AllReduce(MatMul(two, two), ranks.worlds[1]);
        EXPECT_FALSE(z.status().ok());
        // The program goes on with B1.
        const auto late = Grad({y[1] * 10}, {x[1]}, retain);
        ASSERT_TRUE(late.ok());
        EXPECT_EQ(ErrorOf((*late)[0].Wait()).reason, Reason::kMismatch);
      }
      EXPECT_EQ(ErrorOf((*b1)[0].Wait()).reason, Reason::kPeerRefused);
      EXPECT_EQ(ranks.worlds[1].epoch(), 2);
      if (steps) {
        for (const World& world : ranks.worlds) ASSERT_TRUE(world.Step(2).ok());
      }
      std::vector<absl::StatusOr<std::vector<Tensor>>> b2;
      for (int r = 0; r < 2; ++r) b2.push_back(Grad({y[r]}, {x[r]}, retain));
      if (refused_gradient) {
        EXPECT_EQ(ErrorOf(b2[1].status()).reason, Reason::kTapeConsumed);
        EXPECT_THAT(Text(b2[1].status()),
                    AllOf(HasSubstr("refused"), HasSubstr("positions_test.cc")));
        ASSERT_TRUE(b2[0].ok());
        EXPECT_EQ(ErrorOf((**&b2[0])[0].Wait()).reason, Reason::kMismatch);
      } else {
        for (int r = 0; r < 2; ++r) {
          ASSERT_TRUE(b2[r].ok());
          EXPECT_THAT(Values<double>((**&b2[r])[0]), ElementsAre(2));
        }
      }
      EXPECT_EQ(daemon.counts().ended_epochs, 1);
      ExpectGradientsOfWhatIsRecordedAnew(ranks, x);
    }
  }
}

// x, h = AllReduce(x), y = Broadcast(h). Rank 1 uses y's entry up and takes part in h's with zeros
// alone, which leaves that: its next Grad of y is refused, and rank 0's must not meet the one of h
// behind it. So with an op behind which no gradient goes.
TEST(PositionsTest, ARefusedGradientOfWhatIsUsedUpIsNotTakenForAnother) {
  for (const bool broadcasts : {true, false}) {
    FakeDaemon daemon;
    const Ranks ranks(2, &daemon);
    BackwardOptions retain;
    retain.retain_graph = true;
    std::vector<Tensor> x, h, y;
    for (int r = 0; r < 2; ++r) {
      x.push_back(Scalar<double>(ranks.worlds[r], 1).RequireGrad());
      h.push_back(AllReduce(x[r], ranks.worlds[r]));
      if (broadcasts) {
        y.push_back(Broadcast(h[r], 0, ranks.worlds[r]));
      } else {
        y.push_back(r == 0 ? h[0] : Sign(h[1]));
      }
    }
    const auto first = Grad({y[0]}, {x[0]}, retain);
    ASSERT_TRUE(Grad({y[1]}, {x[1]}).ok());
    ASSERT_TRUE(first.ok());
    EXPECT_THAT(Values<double>((*first)[0]), ElementsAre(broadcasts ? 2 : 1));
    const auto second = Grad({y[0] * 10}, {x[0]}, retain);
    ASSERT_TRUE(second.ok());
    const auto refused = Grad({y[1] * 10}, {x[1]});
    EXPECT_EQ(ErrorOf(refused.status()).reason, Reason::kWrongState) << refused.status();
    EXPECT_THAT(Text(refused.status()), HasSubstr("was taken before"));
    EXPECT_EQ(ErrorOf((*second)[0].Wait()).reason, Reason::kPeerRefused);
    const auto third = Grad({h[1] * 1000}, {x[1]});
    EXPECT_EQ(ErrorOf(third.status()).reason, Reason::kTapeConsumed) << third.status();
    EXPECT_EQ(daemon.counts().ended_epochs, 1);
    ExpectGradientsOfWhatIsRecordedAnew(ranks, x);
  }
}

// Roots that are of no session, because they are of nothing: then that of what is wanted is meant,
// or any one of the process.
TEST(PositionsTest, ARefusedGradientOfNothingIsNotTakenForAnother) {
  for (const bool wanted : {true, false}) {
    for (const std::vector<Tensor>& nothing :
         {std::vector<Tensor>{Tensor()}, std::vector<Tensor>{Sum(Tensor())},
          std::vector<Tensor>{}}) {
      FakeDaemon daemon;
      const Ranks ranks(2, &daemon);
      BackwardOptions retain;
      retain.retain_graph = true;
      std::vector<Tensor> x, y;
      for (int r = 0; r < 2; ++r) {
        x.push_back(Scalar<double>(ranks.worlds[r], 1).RequireGrad());
        y.push_back(AllReduce(x[r], ranks.worlds[r]));
      }
      const auto b1 = Grad({y[0] * 10}, {x[0]}, retain);
      ASSERT_TRUE(b1.ok()) << b1.status();
      EXPECT_FALSE(wanted ? Grad(nothing, {x[1]}, retain).ok() : Backward(nothing).ok());
      EXPECT_EQ(ErrorOf((*b1)[0].Wait()).reason, Reason::kPeerRefused);
      const auto b2 = Grad({y[1]}, {x[1]}, retain);
      EXPECT_EQ(ErrorOf(b2.status()).reason, Reason::kTapeConsumed) << b2.status();
      EXPECT_EQ(daemon.counts().ended_epochs, 1);
      ExpectGradientsOfWhatIsRecordedAnew(ranks, x);
    }
  }
}

// Roots of nothing may have been meant for any session, roots of several for each: the ranks of all
// are told, but of one that is closed, wherever it stands among them.
TEST(PositionsTest, AClosedSessionKeepsNoOtherFromHearingOfARefusedBackward) {
  for (const bool of_nothing : {true, false}) {
    for (const int closed : {0, 1, 2}) {
      SCOPED_TRACE(of_nothing ? "of nothing" : "of all");
      SCOPED_TRACE(closed);
      FakeDaemon daemon;
      const Ranks ranks(3, &daemon);
      std::vector<Tensor> y;
      for (const World& world : ranks.worlds) {
        y.push_back(AllReduce(Scalar<double>(world, 1).RequireGrad(), world));
      }
      ASSERT_TRUE(ranks.sessions[closed].Close().ok());
      const absl::Status refused = of_nothing ? Backward(Tensor()) : Backward(y);
      EXPECT_EQ(ErrorOf(refused).reason, Reason::kBadType) << refused;
      // As the daemon has recorded it.
      EXPECT_NE(ErrorOf(refused).id.value(), 0) << refused;
      EXPECT_EQ(daemon.counts().refusals, 2);
      for (int r = 0; r < 3; ++r) {
        const absl::Status status = Backward(y[r]);
        EXPECT_EQ(ErrorOf(status).reason,
                  r == closed ? Reason::kSessionLost : Reason::kTapeConsumed)
            << status;
      }
    }
  }
}

// Roots that have failed by what others have not heard of.
TEST(PositionsTest, ABackwardOfAFailedRootEndsTheEpoch) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  std::vector<Tensor> x, y;
  for (int r = 0; r < 2; ++r) {
    x.push_back(Vector(ranks.worlds[r], {1.0 + r}).RequireGrad());
    y.push_back(AllReduce(x[r], ranks.worlds[r]));
  }
  ASSERT_TRUE(Backward(Sum(y[0])).ok());
  const absl::Status refused = Backward(Sum(MatMul(y[1], y[1])));
  EXPECT_THAT(Text(refused), HasSubstr("matmul"));
  EXPECT_EQ(ErrorOf(x[0].grad().Wait()).reason, Reason::kPeerRefused);
  EXPECT_EQ(ErrorOf(Backward(Sum(y[1]))).reason, Reason::kTapeConsumed);
  EXPECT_EQ(daemon.counts().ended_epochs, 1);
  ExpectInLine(ranks, "after it");
}

// No history, used up, local: an error here, and nobody else's business.
TEST(PositionsTest, ALocalErrorOfBackwardEndsNothing) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  std::vector<Tensor> x, y;
  for (int r = 0; r < 2; ++r) {
    x.push_back(Vector(ranks.worlds[r], {1.0 + r}).RequireGrad());
    y.push_back(AllReduce(x[r], ranks.worlds[r]));
  }
  for (int r = 0; r < 2; ++r) ASSERT_TRUE(Backward(Sum(y[r])).ok());
  EXPECT_FALSE(Backward(Sum(y[0])).ok());
  EXPECT_FALSE(Backward(x[0].Detach()).ok());
  EXPECT_FALSE(Backward(x[0] * Vector(ranks.worlds[0], {1, 2})).ok());
  EXPECT_EQ(daemon.counts().refusals, 0);
  ExpectInLine(ranks, "after it");
}

// --- The trainer's own memory -------------------------------------------------------------------

// Rank 0's patience ends when it has sent three of four chunks.
TEST(PositionsTest, MemoryThatStopsAtAnErrorCountsOneCall) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon, std::chrono::milliseconds(50));
  const size_t count = (3 << 18) + 1;
  ASSERT_EQ(UserMemory::ChunksOf(count, sizeof(float)).size(), 4u);
  std::vector<float> values[] = {std::vector<float>(count, 1), std::vector<float>(count, 2)};
  UserMemory memory[] = {UserMemory(ranks.worlds[0]), UserMemory(ranks.worlds[1])};
  const auto run = [&](int r) {
    return memory[r].AllReduce(values[r].data(), values[r].data(), count);
  };
  const absl::Status late = run(0);
  EXPECT_EQ(ErrorOf(late).reason, Reason::kTransportTimeout);
  EXPECT_EQ(ranks.worlds[0].epoch(), 2);
  EXPECT_EQ(ErrorOf(run(1)).reason, Reason::kPeerRefused);
  EXPECT_EQ(ranks.worlds[1].epoch(), 2);
  ExpectInLine(ranks, "after it");
  EXPECT_EQ(daemon.counts().ended_epochs, 1);
}

// A rank that is in the new epoch already, in the middle of the same call, waits for no further
// piece.
TEST(PositionsTest, MemoryThatStopsBecauseItsEpochHasEndedTellsWhoGoesOn) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon, std::chrono::seconds(10));
  const size_t count = (3 << 18) + 1;
  const auto pieces = static_cast<int32_t>(UserMemory::ChunksOf(count, sizeof(float)).size());
  ASSERT_EQ(pieces, 4);  // one more than are under way at a time
  ASSERT_TRUE(ranks.worlds[1].Abort("for the test").ok());
  std::vector<float> values(count, 1);
  UserMemory memory(ranks.worlds[0]);
  const absl::Status stopped = memory.AllReduce(values.data(), values.data(), count);
  EXPECT_EQ(ErrorOf(stopped).reason, Reason::kAborted) << stopped;
  CallInRuns call;
  for (int piece = 0; piece < pieces; ++piece) {
    call.last = piece + 1 == pieces;
    const absl::Status passed = AllReduceIn(&call, Vector(ranks.worlds[1], {1}),
                                            ranks.worlds[1].group(), Reduction::kSum, {})
                                    .Wait();
    EXPECT_EQ(ErrorOf(passed).reason, Reason::kMismatch) << "piece " << piece << ": " << passed;
    EXPECT_THAT(Text(passed), HasSubstr("rank 0"));
  }
  EXPECT_EQ(ranks.worlds[1].epoch(), 2);
  ExpectInLine(ranks, "after it");
  EXPECT_EQ(daemon.counts().ended_epochs, 1);
}

// As with AllReduce, a group that a Reform has ended is this rank's mistake alone: nobody waits in
// it.
TEST(PositionsTest, MemoryOfAGroupThatHasEndedEndsNoEpoch) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  const auto group = ranks.worlds[0].NewGroup({0, 1});
  ASSERT_TRUE(group.ok()) << group.status();
  CoreOf(*group)->alive = false;  // as Reform does, which this daemon has not
  UserMemory memory(*group);
  std::vector<float> values(5, 1);
  const absl::Status status = memory.AllReduce(values.data(), values.data(), values.size());
  EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState) << status;
  EXPECT_THAT(Text(status), AllOf(HasSubstr("reformed"), HasSubstr("positions_test.cc")));
  EXPECT_EQ(memory
                .AllReduceCoalesced<float>(
                    {{values.data(), values.data(), 2}, {values.data(), values.data(), 3}})
                .code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(daemon.counts().refusals, 0);
  ExpectInLine(ranks, "after it");
}

TEST(PositionsTest, MemoryAndOtherCallsCountTogether) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  const size_t count = (3 << 18) + 1;
  const auto rank = [&](int r) {
    UserMemory memory(ranks.worlds[r]);
    std::vector<float> all(count, r + 1.0f);
    std::vector<float> values(5, r + 1.0f);
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(memory.AllReduce(values.data(), values.data(), values.size()).ok());
      EXPECT_THAT(Values<double>(AllReduce(Vector(ranks.worlds[r], {1.0 + r}), ranks.worlds[r])),
                  ElementsAre(3));
      EXPECT_TRUE(memory
                      .AllReduceCoalesced<float>({{all.data(), all.data(), count},
                                                  {values.data(), values.data(), values.size()}})
                      .ok());
    }
    EXPECT_EQ(all.front(), 6);
    EXPECT_EQ(all.back(), 6);
    EXPECT_EQ(values.back(), 24);
    // Counts that differ are everybody's error.
    EXPECT_EQ(ErrorOf(memory.AllReduceCoalesced<float>(
                          {{all.data(), all.data(), 7},
                           {values.data(), values.data(), r == 0 ? size_t{1} : size_t{2}}}))
                  .reason,
              Reason::kMismatch);
  };
  std::thread other([&] { rank(1); });
  rank(0);
  other.join();
  ExpectInLine(ranks, "after it");
  EXPECT_EQ(daemon.counts().ended_epochs, 0);
}

}  // namespace
}  // namespace chorus
