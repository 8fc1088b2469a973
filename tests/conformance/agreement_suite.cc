// What happens when the ranks do not ask for the same: who learns what, and that the next epoch is
// open at once.
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "chorus/functional/math.h"
#include "client/internal/access.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

using internal::ImplOf;
using internal::SessionCore;
using internal::SessionLock;
using internal::SessionOf;

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Tensors = std::vector<Tensor>;

constexpr absl::Duration kPatience = absl::Seconds(60);

// A rank's call, as if it stood in line 10 x (rank + 1) of train.cc.
CallSite Site(int rank) { return CallSite{"train.cc", 10 * (rank + 1)}; }
std::string SourceOf(int rank) { return absl::StrCat("train.cc:", 10 * (rank + 1)); }

void ExpectWorldWorks(int rank, const World& world) {
  const NoGrad no_grad;
  const double n = world.size();
  EXPECT_THAT(Values<double>(AllReduce(Scalar<double>(world, rank + 1), world)),
              ElementsAre(n * (n + 1) / 2));
}

// --- Ranks that compile different parts of the same program -------------------------------------

// What a compiled function asks for is launched as a whole, so whatever lies between two of its
// collectives on a rank that calls them one by one must be launched with them.
TEST_P(Conformance, OneRankMayCompileWhatAnotherCallsOneByOne) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const absl::StatusOr<Group> other = world.NewGroup({2, 0, 1});
    ASSERT_TRUE(other.ok()) << other.status();
    const auto chain = [&](const Tensors& in) {
      const Tensor y = AllReduce(in[0], world);
      const Tensor h = Reshape(y * y, {2, 1});
      const Tensor z = AllReduce(h - in[1], *other);
      const Tensor last = AllReduce(Sum(z) * Sum(y), world);
      return Tensors{h, z, last};
    };
    const Compiled function = Compile(chain);
    for (int step = 0; step < 3; ++step) {
      const NoGrad no_grad;
      const Tensors in = {Upload<double>(world, {rank + 1.0, step + 1.0}),
                          Upload<double>(world, {1, 2})};
      const Tensors shaped = {in[0], Reshape(in[1], {2, 1})};
      const absl::StatusOr<Tensors> got = rank == step ? function.Run(shaped) : chain(shaped);
      ASSERT_TRUE(got.ok()) << got.status();
      const double second = 3.0 * (step + 1);
      EXPECT_THAT(Values<double>((*got)[0]), ElementsAre(36, second * second));
      EXPECT_THAT(Values<double>((*got)[1]), ElementsAre(105, 3 * (second * second - 2)));
      EXPECT_THAT(Values<double>((*got)[2]),
                  ElementsAre(3 * (105 + 3 * (second * second - 2)) * (6 + second)));
    }
  });
}

// Also where it waits for something else as well.
TEST_P(Conformance, WhatLiesBetweenCallsMayComeFromTwoWorlds) {
  Job job(GetParam(), 2);
  job.Run([&](int rank, World& world) {
    const NoGrad no_grad;
    WorldOptions join;
    join.rank = rank;
    join.size = 2;
    join.name = "beside";
    absl::StatusOr<World> beside = job.session(rank).Join(join);
    ASSERT_TRUE(beside.ok()) << beside.status();
    const auto chain = [&world](const Tensors& in) {
      const Tensor y = AllReduce(in[0], world);
      return Tensors{AllReduce(y * in[1] + y, world)};
    };
    const Compiled function = Compile(chain);
    for (int step = 0; step < 4; ++step) {
      const Tensor x = Scalar<double>(world, rank + 1 + step);
      const Tensor b = AllReduce(Scalar<double>(*beside, rank + 5), *beside);
      const absl::StatusOr<Tensors> got = rank == step % 2 ? function.Run({x, b}) : chain({x, b});
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_THAT(Values<double>((*got)[0]), ElementsAre(2 * (3 + 2 * step) * 12));
    }
  });
}

// A kernel that fails between two collectives fails both, whoever has them in one run, and the
// ranks hear whose it was.
TEST_P(Conformance, AKernelThatFailsBetweenCallsIsToldToAll) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const NoGrad no_grad;
    const auto chain = [&world](const Tensors& in) {
      const Tensor y = AllReduce(in[0], world);
      return Tensors{AllReduce(in[1] / y, world)};
    };
    const Compiled function = Compile(chain);
    for (int step = 0; step < 4; ++step) {
      ASSERT_TRUE(world.Step(2 * step + 1).ok());
      const auto run = [&](int64_t divisor, int64_t dividend) {
        const Tensors in = {FromHost<int64_t>(world, {divisor}, {1}),
                            FromHost<int64_t>(world, {dividend}, {1})};
        return rank == step % 2 ? function.Run(in) : chain(in);
      };
      // 1 - 1.
      const absl::StatusOr<Tensors> bad = run(rank == 0 ? 1 : -1, 6);
      ASSERT_TRUE(bad.ok()) << bad.status();
      const absl::Status status = (*bad)[0].Wait();
      EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("div: element 0"));
      EXPECT_EQ(world.epoch(), 2 + step);
      ASSERT_TRUE(world.Step(2 * step + 2).ok());
      const absl::StatusOr<Tensors> good = run(rank + 1, 12);
      ASSERT_TRUE(good.ok()) << good.status();
      EXPECT_THAT(Values<int64_t>((*good)[0]), ElementsAre(8));
    }
  });
}

// --- Mismatches ---------------------------------------------------------------------------------

struct Mismatch {
  const char* name;
  // The first is what rank 0 asks for, the second what all others do; both say so in these words.
  std::function<Tensor(const World&, CallSite)> calls[2];
  const char* words[2];
};

std::vector<Mismatch> Mismatches() {
  const auto zeros = [](const World& world, DType dtype, const Shape& shape) {
    return Zeros(world, dtype, shape);
  };
  return {
      {"collective",
       {[=](const World& w, CallSite s) {
          return AllReduce(zeros(w, DType::kF32, {4}), w, Reduction::kSum, s);
        },
        [=](const World& w, CallSite s) { return Broadcast(zeros(w, DType::kF32, {4}), 0, w, s); }},
       {"all_reduce", "broadcast"}},
      {"barrier",
       {[=](const World& w, CallSite s) { return Barrier(w, s); },
        [=](const World& w, CallSite s) {
          return AllReduce(zeros(w, DType::kF32, {4}), w, Reduction::kSum, s);
        }},
       {"barrier", "all_reduce"}},
      {"dtype",
       {[=](const World& w, CallSite s) {
          return AllReduce(zeros(w, DType::kF32, {4}), w, Reduction::kSum, s);
        },
        [=](const World& w, CallSite s) {
          return AllReduce(zeros(w, DType::kF64, {4}), w, Reduction::kSum, s);
        }},
       {"f32[4]", "f64[4]"}},
      {"shape",
       {[=](const World& w, CallSite s) {
          return AllReduce(zeros(w, DType::kF32, {4}), w, Reduction::kSum, s);
        },
        [=](const World& w, CallSite s) {
          return AllReduce(zeros(w, DType::kF32, {2, 2}), w, Reduction::kSum, s);
        }},
       {"f32[4]", "f32[2,2]"}},
      {"shape of a chunk",
       {[=](const World& w, CallSite s) {
          return ReduceScatter(
              std::vector<Tensor>(static_cast<size_t>(w.size()), zeros(w, DType::kF32, {4})), w,
              Reduction::kSum, s);
        },
        [=](const World& w, CallSite s) {
          return ReduceScatter(
              std::vector<Tensor>(static_cast<size_t>(w.size()), zeros(w, DType::kF32, {5})), w,
              Reduction::kSum, s);
        }},
       {"f32[4]", "f32[5]"}},
      {"root of a broadcast",
       {[=](const World& w, CallSite s) { return Broadcast(zeros(w, DType::kF32, {4}), 0, w, s); },
        [=](const World& w, CallSite s) { return Broadcast(zeros(w, DType::kF32, {4}), 1, w, s); }},
       {"root=0", "root=1"}},
      {"root of a reduction",
       {[=](const World& w, CallSite s) {
          return Reduce(zeros(w, DType::kF32, {4}), 1, w, Reduction::kSum, s);
        },
        [=](const World& w, CallSite s) {
          return Reduce(zeros(w, DType::kF32, {4}), 0, w, Reduction::kSum, s);
        }},
       {"root=1", "root=0"}},
      {"order",
       {[=](const World& w, CallSite s) {
          const Tensor first = AllReduce(zeros(w, DType::kF32, {4}), w, Reduction::kSum, s);
          AllGather(zeros(w, DType::kF32, {4}), w, {}, s);
          return first;
        },
        [=](const World& w, CallSite s) {
          const Tensor first = AllGather(zeros(w, DType::kF32, {4}), w, {}, s)[0];
          AllReduce(zeros(w, DType::kF32, {4}), w, Reduction::kSum, s);
          return first;
        }},
       {"all_reduce", "all_gather"}},
  };
}

void CheckMismatches(const ConformanceParam& param, int ranks) {
  Job job(param, ranks);
  for (const Mismatch& mismatch : Mismatches()) {
    std::vector<std::string> messages(static_cast<size_t>(ranks));
    job.Run([&](int rank, World& world) {
      SCOPED_TRACE(absl::StrCat(mismatch.name, ", rank ", rank));
      const int64_t epoch = world.epoch();
      const Tensor result = mismatch.calls[rank == 0 ? 0 : 1](world, Site(rank));
      const absl::Status status = result.Wait();
      const Error error = ErrorOf(status);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_EQ(error.reason, Reason::kMismatch) << status;
      messages[static_cast<size_t>(rank)] = error.message;
      // Two versions suffice; each says whose it is and where it was asked for.
      EXPECT_GE(error.ranks.size(), 2u);
      bool seen[2] = {false, false};
      for (const Error::Version& version : error.ranks) {
        const int side = version.rank == 0 ? 0 : 1;
        seen[side] = true;
        EXPECT_THAT(version.what, HasSubstr(mismatch.words[side]));
        EXPECT_EQ(version.source, SourceOf(version.rank));
      }
      EXPECT_TRUE(seen[0] && seen[1]) << "only one side of it is told";
      EXPECT_EQ(world.epoch(), epoch + 1);
      ExpectWorldWorks(rank, world);
    });
    for (const std::string& message : messages) EXPECT_EQ(message, messages[0]);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_P(Conformance, AMismatchIsToldToBothRanksWithBothVersions) { CheckMismatches(GetParam(), 2); }
TEST_P(Conformance, AMismatchIsToldToAllRanksWithOneMessage) { CheckMismatches(GetParam(), 5); }

TEST_P(Conformance, ASendThatDoesNotFitItsRecvIsToldToBoth) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    if (rank < 2) {
      const Tensor end = rank == 0 ? Send(Zeros(world, DType::kF32, {4}), 1, world, 7, Site(0))
                                   : Recv(DType::kF32, {5}, 0, world, 7, Site(1));
      const Error error = ErrorOf(end.Wait());
      EXPECT_EQ(error.code, absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(error.reason, Reason::kMismatch);
      EXPECT_EQ(error.ranks.size(), 2u);
      for (const Error::Version& version : error.ranks) {
        EXPECT_THAT(version.what, HasSubstr(version.rank == 0 ? "f32[4]" : "f32[5]"));
        EXPECT_EQ(version.source, SourceOf(version.rank));
      }
    } else {
      // Asks for what the others do not: it learns of the epoch's end, or that they have passed it.
      const absl::Status status = AllReduce(Scalar<double>(world, 3), world).Wait();
      EXPECT_EQ(ErrorOf(status).reason, Reason::kMismatch) << status;
    }
    ASSERT_TRUE(world.Step(1).ok());
    ExpectWorldWorks(rank, world);
  });
}

TEST_P(Conformance, AMismatchInsideACompiledStepLeavesItsInputsAndDonationsIntact) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    CompileOptions donate;
    donate.donate = {0};
    const Compiled step = Compile(
        [&world](const std::vector<Tensor>& in) {
          const Tensor mean = AllReduce(in[1], world) * 0.5;
          return std::vector<Tensor>{in[0] - Sum(mean)};
        },
        donate);
    const Tensor w = Upload<double>(world, {10, 20});
    ASSERT_TRUE(w.Wait().ok());
    const auto failed = step.Run({w, Zeros(world, DType::kF64, {3 + rank})});
    ASSERT_TRUE(failed.ok()) << failed.status();
    EXPECT_EQ(ErrorOf((*failed)[0].Wait()).reason, Reason::kMismatch);
    EXPECT_THAT(Values<double>(w), ElementsAre(10, 20));
    const auto done = step.Run({w, Upload<double>(world, {1.0 + rank, 2})});
    ASSERT_TRUE(done.ok()) << done.status();
    EXPECT_THAT(Values<double>((*done)[0]), ElementsAre(10 - 3.5, 20 - 3.5));
  });
}

// A failed epoch fails whatever was on its way in it, and nothing that was published.
// Two equal calls that one rank makes in the other order: nothing but their lines tells.
TEST_P(Conformance, SwappedEqualCallsAreSeenWhereLinesAreCompared) {
  for (const CheckCallSites check : {CheckCallSites::kOff, CheckCallSites::kRefuse}) {
    JobOptions options;
    options.check_call_sites = check;
    Job job(GetParam(), options);
    job.Run([&](int rank, World& world) {
      const NoGrad no_grad;
      const CallSite a{"train.cc", 7};
      const CallSite b{"train.cc", 8};
      const Tensor x = Scalar<double>(world, rank == 0 ? 1 : 20);
      const Tensor y = AllReduce(x, world, Reduction::kSum, rank == 0 ? a : b);
      if (check == CheckCallSites::kOff) {
        EXPECT_THAT(Values<double>(y), ElementsAre(21));
        return;
      }
      const Error error = ErrorOf(y.Wait());
      EXPECT_EQ(error.reason, Reason::kMismatch);
      EXPECT_THAT(error.message, HasSubstr("train.cc:7"));
      EXPECT_THAT(error.message, HasSubstr("train.cc:8"));
      ExpectWorldWorks(rank, world);
    });
  }
}

// Two lines that are as long as one may be, and one more at each order. At order `differs` rank 1's
// is another one, which is seen though neither is kept as a whole.
TEST_P(Conformance, LongLinesOfGradientsAreCompared) {
  const std::string file = std::string(600, 'd') + "/train.cc";
  for (const int differs : {0, 1, 2}) {
    SCOPED_TRACE(differs);
    JobOptions options;
    options.ranks = 2;
    options.check_call_sites = CheckCallSites::kRefuse;
    Job job(GetParam(), options);
    job.Run([&file, differs](int rank, World& world) {
      const Tensor x = Upload<double>(world, {rank + 1.0}).RequireGrad();
      const Tensor y = AllReduce(x, world, Reduction::kSum, CallSite{file.c_str(), 1});
      BackwardOptions create;
      create.create_graph = true;
      Tensor loss = Sum(y * y * y * y * y);
      // Both ranks' losses count: 2 * 5 y^4, and so on.
      const std::vector<double> right = {810, 2160, 4320, 5760};
      for (int order = 1; order <= 4; ++order) {
        const bool is_other = order == differs && rank == 1;
        const CallSite site{file.c_str(), is_other ? 77 : order + 1};
        const auto g = Grad({loss}, {x}, create, site);
        ASSERT_TRUE(g.ok()) << g.status();
        const absl::StatusOr<std::vector<double>> got = (*g)[0].Read<double>();
        if (order == differs) {
          ASSERT_FALSE(got.ok()) << (*got)[0];
          const Error error = ErrorOf(got.status());
          EXPECT_EQ(error.reason, Reason::kMismatch) << error.message;
          EXPECT_THAT(error.message, HasSubstr("train.cc:77"));
          EXPECT_THAT(error.message, HasSubstr(absl::StrCat("train.cc:", order + 1)));
          return;
        }
        ASSERT_TRUE(got.ok()) << got.status();
        EXPECT_THAT(*got, ElementsAre(right[static_cast<size_t>(order - 1)]));
        loss = Sum((*g)[0]);
      }
    });
  }
}

// Rank 1 leaves y out of the first loss, so its second one meets rank 0's first: 14 for 19.
TEST_P(Conformance, LossesThatDoNotMeetAreSeenWhereLinesAreCompared) {
  for (const bool meet : {true, false}) {
    JobOptions options;
    options.ranks = 2;
    options.check_call_sites = CheckCallSites::kRefuse;
    Job job(GetParam(), options);
    job.Run([meet](int rank, World& world) {
      const Tensor x = Upload<double>(world, {rank + 1.0}).RequireGrad();
      const Tensor y = AllReduce(x, world, Reduction::kSum, Site(0));
      BackwardOptions retain;
      retain.retain_graph = true;
      const Tensor first = rank == 0 || meet ? Sum(y * 3) : Sum(x * 3);
      ASSERT_TRUE(Backward(first, retain, Site(1)).ok());
      ASSERT_TRUE(Backward(Sum(y * (rank == 0 ? 5 : 11)), retain, Site(2)).ok());
      const absl::StatusOr<std::vector<double>> gradient = x.grad().Read<double>();
      if (meet) {
        ASSERT_TRUE(gradient.ok()) << gradient.status();
        EXPECT_THAT(*gradient, ElementsAre(22));
        return;
      }
      ASSERT_FALSE(gradient.ok()) << (*gradient)[0];
      const Error error = ErrorOf(gradient.status());
      EXPECT_EQ(error.reason, Reason::kMismatch) << error.message;
      for (const int line : {1, 2}) {
        EXPECT_THAT(error.message,
                    HasSubstr(absl::StrCat(SourceOf(0), ", differentiated at ", SourceOf(line))));
      }
    });
    if (HasFailure()) return;
  }
}

// The rank that comes second is told what the first has asked for, and the first that it has come
// so.
TEST_P(Conformance, RanksThatCompareLinesJoinWithRanksThatDo) {
  Job job(GetParam(), 2);
  job.Run([&](int rank, World&) {
    const CheckCallSites asked[] = {CheckCallSites::kWarn, CheckCallSites::kRefuse};
    WorldOptions options;
    options.name = "lines";
    options.rank = rank;
    options.size = 2;
    options.check_call_sites = asked[rank];
    absl::Status joined = job.session(rank).Join(options).status();
    const Error error = ErrorOf(joined);
    EXPECT_EQ(error.reason, Reason::kMismatch) << joined;
    const int late = error.culprit.rank < 0 ? rank : error.culprit.rank;
    EXPECT_THAT(error.message, HasSubstr(absl::StrCat("rank ", 1 - late, " has joined it with ",
                                                      late == 0 ? "refuse" : "warn")));
    EXPECT_EQ(absl::StrContains(error.message, "was not let in"), late != rank) << error.message;
    options.check_call_sites = CheckCallSites::kRefuse;
    joined = job.session(rank).Join(options).status();
    EXPECT_TRUE(joined.ok()) << joined;
  });
}

TEST_P(Conformance, WhatWasPublishedBeforeAMismatchStaysValid) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const NoGrad no_grad;
    const Tensor before = AllReduce(Upload<double>(world, {1.0 * rank, 1}), world);
    ASSERT_TRUE(before.Wait().ok());
    const Tensor bad = AllReduce(Zeros(world, DType::kF64, {1 + rank / 2}), world);
    const Tensor behind = AllReduce(before, world);
    EXPECT_EQ(ErrorOf(bad.Wait()).reason, Reason::kMismatch);
    EXPECT_EQ(ErrorOf(behind.Wait()).reason, Reason::kMismatch);
    EXPECT_EQ(world.epoch(), 2);
    EXPECT_THAT(Values<double>(before), ElementsAre(3, 3));
    EXPECT_THAT(Values<double>(AllReduce(before, world)), ElementsAre(9, 9));
  });
}

TEST_P(Conformance, ManyEpochsMayEnd) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const NoGrad no_grad;
    for (int i = 0; i < 25; ++i) {
      const Tensor bad = AllReduce(Zeros(world, DType::kF32, {i % 3 == rank ? 2 : 3}), world);
      EXPECT_EQ(ErrorOf(bad.Wait()).reason, Reason::kMismatch);
      ExpectWorldWorks(rank, world);
      EXPECT_EQ(world.epoch(), 2 + i);
    }
  });
}

// --- Refused, late, cancelled -------------------------------------------------------------------

TEST_P(Conformance, ACallThatIsRefusedIsNobodyElsesWaitAndTheOthersAreToldWhose) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const Reduction reduction = rank == 1 ? Reduction::kAvg : Reduction::kSum;
    const Tensor y = AllReduce(Zeros(world, DType::kI64, {4}), world, reduction, Site(rank));
    const Error error = ErrorOf(y.Wait());
    if (rank == 1) {
      EXPECT_EQ(error.code, absl::StatusCode::kInvalidArgument) << error.message;
      EXPECT_EQ(error.source, SourceOf(1));
    } else {
      EXPECT_EQ(error.code, absl::StatusCode::kAborted) << error.message;
      EXPECT_EQ(error.culprit.rank, 1) << error.message;
    }
    ExpectWorldWorks(rank, world);
  });
}

TEST_P(Conformance, ALateRankIsNamedWhenTheAgreementTimesOut) {
  JobOptions options;
  options.ranks = 3;
  options.agree_timeout = std::chrono::milliseconds(150);
  Job job(GetParam(), options);
  absl::Notification told;
  job.Run([&told](int rank, World& world) {
    const NoGrad no_grad;
    // One rank waits for one other: on a busy machine a second one that waits might be late too.
    // The others are late until it has been told; the third hears of it as it asks for anything.
    Group group = world;
    if (rank != 1) {
      const absl::StatusOr<Group> pair = world.NewGroup({0, 2});
      ASSERT_TRUE(pair.ok()) << pair.status();
      group = *pair;
    }
    if (rank != 0) {
      ASSERT_TRUE(told.WaitForNotificationWithTimeout(kPatience));
    }
    const Tensor y = AllReduce(Zeros(world, DType::kF32, {4}), group, Reduction::kSum, Site(rank));
    const Error error = ErrorOf(y.Wait());
    EXPECT_EQ(error.code, absl::StatusCode::kDeadlineExceeded) << error.message;
    EXPECT_EQ(error.reason, Reason::kAgreeTimeout) << error.message;
    EXPECT_EQ(error.culprit.rank, 2) << error.message;
    EXPECT_EQ(world.epoch(), 2);
    if (rank == 0) told.Notify();
    // No deadline can be met on a machine that is busy enough: what they learn then is the same.
    ASSERT_TRUE(world.Step(1).ok());
    const absl::Status next = AllReduce(Scalar<double>(world, 1), world).Wait();
    if (!next.ok()) {
      EXPECT_EQ(ErrorOf(next).reason, Reason::kAgreeTimeout);
    }
  });
}

TEST_P(Conformance, RanksThatAskInDifferentGroupsTimeOutAndAreNamed) {
  JobOptions options;
  options.ranks = 2;
  options.agree_timeout = std::chrono::milliseconds(150);
  Job job(GetParam(), options);
  job.Run([](int rank, World& world) {
    const absl::StatusOr<Group> pair = world.NewGroup({1, 0});
    ASSERT_TRUE(pair.ok()) << pair.status();
    const Tensor y = AllReduce(Zeros(world, DType::kF32, {4}), rank == 0 ? world.group() : *pair);
    const Error error = ErrorOf(y.Wait());
    EXPECT_EQ(error.code, absl::StatusCode::kDeadlineExceeded) << error.message;
    EXPECT_EQ(error.reason, Reason::kAgreeTimeout) << error.message;
    EXPECT_TRUE(error.culprit.rank == 0 || error.culprit.rank == 1) << error.message;
  });
}

TEST_P(Conformance, ARankMayAbortTheEpochForAll) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const NoGrad no_grad;
    const Tensor y = AllReduce(Zeros(world, DType::kF32, {4}), rank == 1 ? Group() : world.group());
    if (rank == 1) {
      EXPECT_TRUE(world.Abort("the loss is not a number").ok());
    } else {
      const Error error = ErrorOf(y.Wait());
      EXPECT_EQ(error.code, absl::StatusCode::kAborted) << error.message;
      EXPECT_EQ(error.reason, Reason::kAborted) << error.message;
      EXPECT_EQ(error.culprit.rank, 1);
      EXPECT_THAT(error.message, HasSubstr("the loss is not a number"));
      ExpectWorldWorks(rank, world);
      return;
    }
    // The one that aborted is in the next epoch, and has a call less than the others.
    EXPECT_EQ(world.epoch(), 2);
    const Error mine = ErrorOf(AllReduce(Scalar<double>(world, 2), world).Wait());
    EXPECT_EQ(mine.reason, Reason::kMismatch) << mine.message;
    EXPECT_EQ(world.epoch(), 2);
    ExpectWorldWorks(rank, world);
  });
}

// A cancel withdraws a vote; where it comes too late, the result is everybody's.
TEST_P(Conformance, ACancelledRunFailsForAllOrForNobody) {
  Job job(GetParam(), 2);
  absl::Notification cancelled;
  job.Run([&cancelled](int rank, World& world) {
    const NoGrad no_grad;
    const auto cancel = [&world](const Tensor& y) {
      SessionCore* const core = SessionOf(world.device()).get();
      SessionLock lock(core);
      return core->log().Submit(Cancel{ImplOf(y)->data->producer}).status();
    };
    if (rank == 0) {
      const Tensor y = AllReduce(Scalar<double>(world, 1), world);
      ASSERT_TRUE(cancel(y).ok());
      const Error error = ErrorOf(y.Wait());
      EXPECT_EQ(error.reason, Reason::kCancelled) << error.message;
      cancelled.Notify();
    } else {
      ASSERT_TRUE(cancelled.WaitForNotificationWithTimeout(kPatience));
      const Error error = ErrorOf(AllReduce(Scalar<double>(world, 1), world).Wait());
      EXPECT_EQ(error.reason, Reason::kCancelled) << error.message;
      EXPECT_EQ(error.culprit.rank, 0) << error.message;
    }
    ExpectWorldWorks(rank, world);
    // Both have asked: it is too late for a cancel.
    const Tensor done = AllReduce(Scalar<double>(world, 1), world);
    ASSERT_TRUE(done.Wait().ok());
    EXPECT_TRUE(cancel(done).ok());
    EXPECT_THAT(Values<double>(done), ElementsAre(2));
    ExpectWorldWorks(rank, world);
  });
}

// --- Losing a rank ------------------------------------------------------------------------------

// Ranks 0, 1 and 3 go on after rank 2's end, of which they learn by `reason`.
void CheckReform(Job* job, Reason reason, const std::function<void()>& end_rank_2) {
  absl::Notification asked;
  job->Run([&](int rank, World& world) {
    const NoGrad no_grad;
    const absl::StatusOr<Group> old = world.NewGroup({0, 1, 2, 3});
    ASSERT_TRUE(old.ok());
    ExpectWorldWorks(rank, world);
    if (rank == 2) {
      ASSERT_TRUE(asked.WaitForNotificationWithTimeout(kPatience));
      end_rank_2();
      return;
    }
    const Tensor y = AllReduce(Scalar<double>(world, 1), world);
    if (rank == 0) asked.Notify();
    const Error error = ErrorOf(y.Wait());
    // After an orderly leave, which only ends what needs that rank, one that asks repairs first.
    EXPECT_TRUE(error.reason == reason ||
                (reason == Reason::kPeerLeft && error.reason == Reason::kNeedsReform))
        << ReasonName(error.reason) << " " << error.message;
    EXPECT_EQ(error.culprit.rank, 2) << error.message;
    // Without it there is no collective of the whole world until the survivors have reformed.
    EXPECT_FALSE(AllReduce(Scalar<double>(world, 1), world).Wait().ok());
    const absl::StatusOr<World::Reformed> reformed = world.Reform(kWaitTimeout);
    ASSERT_TRUE(reformed.ok()) << reformed.status();
    EXPECT_EQ(reformed->size, 3);
    EXPECT_EQ(reformed->rank, rank == 3 ? 2 : rank);
    EXPECT_EQ(world.rank(), reformed->rank);
    EXPECT_EQ(world.size(), 3);
    EXPECT_EQ(world.epoch(), reformed->epoch);
    ASSERT_EQ(reformed->survivors.size(), 3u);
    const int old_ranks[] = {0, 1, 3};
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(reformed->survivors[i].old_rank, old_ranks[i]);
      EXPECT_EQ(reformed->survivors[i].last_published, "group 0 call 0");
    }
    ExpectWorldWorks(world.rank(), world);
    // New groups can be made; the old ones are gone.
    const absl::StatusOr<Group> pair = world.NewGroup({2, 0});
    ASSERT_EQ(pair.ok(), world.rank() != 1) << pair.status();
    if (pair.ok()) {
      EXPECT_THAT(Values<double>(AllReduce(Scalar<double>(world, 1), *pair)), ElementsAre(2));
    }
    ExpectWorldWorks(world.rank(), world);
    EXPECT_FALSE(AllReduce(Scalar<double>(world, 1), *old).Wait().ok());
  });
}

TEST_P(Conformance, SurvivorsReformAfterARankHasLeft) {
  Job job(GetParam(), 4);
  CheckReform(&job, Reason::kPeerLeft, [&job] { EXPECT_TRUE(job.world(2).Leave().ok()); });
}

TEST_P(Conformance, SurvivorsReformAfterASessionWasClosed) {
  Job job(GetParam(), 4);
  CheckReform(&job, Reason::kPeerLeft, [&job] { EXPECT_TRUE(job.session(2).Close().ok()); });
}

TEST_P(ConformanceInside, SurvivorsReformAfterADeath) {
  Job job(GetParam(), 4);
  CheckReform(&job, Reason::kPeerDied, [&job] { job.cluster().Kill(job.session(2)); });
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
