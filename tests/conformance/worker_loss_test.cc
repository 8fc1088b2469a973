// Jobs on devices that a worker has, when the worker dies: what stood on the devices is lost, and
// the job goes on in the same sessions.
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <random>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"
#include "core/cuda/testing/test_driver.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/every_backend.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kRanks = 3;

class WorkerLoss : public ::testing::TestWithParam<ConformanceParam> {
 protected:
  WorkerLoss() : job_(GetParam(), kRanks), random_(TestSeed()) {}

  void KillWorker() { ASSERT_EQ(kill(job_.cluster().worker_pid(), SIGKILL), 0); }
  // With nothing more that it may do.
  void KillWorkerAndAwaitItsEnd() {
    const UniqueFd watch(static_cast<int>(syscall(SYS_pidfd_open, job_.cluster().worker_pid(), 0)));
    ASSERT_TRUE(watch.valid());
    KillWorker();
    pollfd ended = {watch.get(), POLLIN, 0};
    ASSERT_EQ(poll(&ended, 1, 60000), 1);
  }

  // What rank `rank` gives to a sum, from the host.
  Tensor Part(int rank) { return Upload<double>(job_.world(rank), {1.0 + rank, 10.0}); }
  std::vector<Tensor> SumOfParts() {
    std::vector<Tensor> sums;
    for (int rank = 0; rank < kRanks; ++rank) {
      sums.push_back(AllReduce(Part(rank), job_.world(rank)));
    }
    return sums;
  }
  // Right, or lost, on each rank. Whether it was right on all.
  static bool CheckSum(const std::vector<Tensor>& sums) {
    bool right = true;
    for (const Tensor& sum : sums) {
      const absl::StatusOr<std::vector<double>> values = sum.Read<double>();
      if (values.ok()) {
        EXPECT_THAT(*values, ElementsAre(6, 30));
      } else {
        EXPECT_EQ(ErrorOf(values.status()).reason, Reason::kDeviceLost) << values.status();
        right = false;
      }
    }
    return right;
  }
  // The devices are there again within a few tries: the first may still meet the loss.
  void ExpectThatItGoesOn() {
    for (int i = 0; i < 1000; ++i) {
      if (CheckSum(SumOfParts())) return;
    }
    ADD_FAILURE() << "the devices do not come back";
  }

  Job job_;
  std::mt19937_64 random_;
};

// Where the worker has a GPU's context.
class CudaWorkerLoss : public WorkerLoss {};

TEST_P(WorkerLoss, WhatStoodThereIsLostAndSaidToBe) {
  const Tensor before = Part(0);
  ASSERT_TRUE(CheckSum(SumOfParts()));
  const Tensor squared = before * before;
  ASSERT_TRUE(squared.Wait().ok());
  KillWorker();
  ExpectThatItGoesOn();
  const absl::Status lost = squared.Read<double>().status();
  EXPECT_EQ(ErrorOf(lost).reason, Reason::kDeviceLost) << lost;
  EXPECT_THAT(std::string(lost.message()),
              AllOf(HasSubstr("device "), HasSubstr(":0: what stood")));
  const absl::Status used = (squared + squared).Read<double>().status();
  EXPECT_EQ(ErrorOf(used).reason, Reason::kDeviceLost) << used;
  ExpectThatItGoesOn();
}

// Killed with work in each state: not sent yet, under way, complete but not read.
TEST_P(WorkerLoss, AJobGoesOnWhereverItIsHit) {
  for (int round = 0; round < 12; ++round) {
    std::vector<std::vector<Tensor>> steps;
    const uint64_t before = random_() % 5;
    for (uint64_t i = 0; i < before; ++i) steps.push_back(SumOfParts());
    if (round % 3 == 0 && !steps.empty()) CheckSum(steps[0]);
    KillWorker();
    for (uint64_t i = random_() % 5; i > 0; --i) steps.push_back(SumOfParts());
    for (const std::vector<Tensor>& step : steps) CheckSum(step);
    ExpectThatItGoesOn();
  }
}

// One rank has voted, the others have not: nothing of theirs was on the devices but its operand.
TEST_P(WorkerLoss, AVoteThatWaitsMeetsTheLossWhenItIsLaunched) {
  const Tensor part = Part(0) * 2;
  ASSERT_TRUE(part.Wait().ok());  // computed: it stands there, and nowhere else
  const Tensor first = AllReduce(part, job_.world(0));
  KillWorkerAndAwaitItsEnd();
  std::vector<Tensor> sums = {first};
  for (int rank = 1; rank < kRanks; ++rank) {
    sums.push_back(AllReduce(Part(rank), job_.world(rank)));
  }
  for (const Tensor& sum : sums) {
    const absl::Status lost = sum.Read<double>().status();
    EXPECT_EQ(ErrorOf(lost).reason, Reason::kDeviceLost) << lost;
  }
  ExpectThatItGoesOn();
}

// A loss has one number for all that stood there. The others are told of each use of another part
// of it, not that they differ.
TEST_P(WorkerLoss, EachTensorThatWasLostIsToldOf) {
  const Tensor lost_part = Part(0) * 2;
  ASSERT_TRUE(lost_part.Wait().ok());
  KillWorkerAndAwaitItsEnd();
  std::vector<Tensor> parts;
  for (int i = 0; i < 3; ++i) parts.push_back(lost_part + lost_part);
  for (const Tensor& part : parts) {
    EXPECT_EQ(ErrorOf(part.Wait()).reason, Reason::kDeviceLost);
  }
  for (const Tensor& part : parts) {
    std::vector<Tensor> sums = {AllReduce(part, job_.world(0))};
    for (int rank = 1; rank < kRanks; ++rank) {
      sums.push_back(AllReduce(Part(rank), job_.world(rank)));
    }
    for (const Tensor& sum : sums) {
      const absl::Status lost = sum.Read<double>().status();
      EXPECT_EQ(ErrorOf(lost).reason, Reason::kDeviceLost) << lost;
    }
  }
  ExpectThatItGoesOn();
}

TEST_P(WorkerLoss, CompiledFunctionsAndGradientsAreLoadedAgain) {
  std::vector<Compiled> steps;
  for (int rank = 0; rank < kRanks; ++rank) {
    steps.push_back(Compile([this, rank](const std::vector<Tensor>& in) {
      // Nobody but the function could put this there again.
      const Tensor parts = Upload<double>(job_.world(rank), {1, 2, 3, 4, -5, -4, -3, -2, 5});
      const Tensor sum = AllReduce(in[0] * in[0] * Sum(parts), job_.world(rank));
      const auto gradient = Grad({Sum(sum * sum)}, {in[0]});
      return gradient.ok() ? *gradient : std::vector<Tensor>{Tensor()};
    }));
  }
  // Right, or lost, on each rank. Whether it was right on all.
  const auto run = [&] {
    std::vector<Tensor> gradients;
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto out = steps[static_cast<size_t>(rank)].Run({Part(rank).RequireGrad()});
      EXPECT_TRUE(out.ok()) << out.status();
      gradients.push_back(out.ok() ? (*out)[0] : Tensor());
    }
    bool right = true;
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto values = gradients[static_cast<size_t>(rank)].Read<double>();
      if (values.ok()) {
        // d/dx of 3 (sum of squares)^2, by the ranks' losses together.
        EXPECT_THAT(*values, ElementsAre(12 * 14 * (1 + rank), 12 * 300 * 10));
      } else {
        EXPECT_EQ(ErrorOf(values.status()).reason, Reason::kDeviceLost) << values.status();
        right = false;
      }
    }
    return right;
  };
  for (int life = 0; life < 3; ++life) {
    // The first call of a later life may be what tells of the loss.
    EXPECT_TRUE(run() || (life > 0 && run())) << "life " << life;
    KillWorker();
    ExpectThatItGoesOn();
  }
}

// Work that is lost in the device never ends, whoever is aborted: its worker is.
TEST_P(WorkerLoss, WorkThatDoesNotEndIsEndedByForce) {
  JobOptions options;
  options.ranks = kRanks;
  options.cluster.fault_script = "launch lost device=1";
  options.cluster.exec_timeout = absl::Milliseconds(200);
  options.cluster.kill_timeout = absl::Milliseconds(200);
  Job job(GetParam(), options);
  const auto sums_of_squares = [&] {
    std::vector<Tensor> sums;
    for (int rank = 0; rank < kRanks; ++rank) {
      const Tensor x = Upload<double>(job.world(rank), {1.0 + rank});
      sums.push_back(AllReduce(x * x, job.world(rank)));
    }
    return sums;
  };
  const auto reasons = [&] {
    std::vector<Reason> found;
    for (const Tensor& sum : sums_of_squares()) {
      found.push_back(ErrorOf(sum.Read<double>().status()).reason);
    }
    return found;
  };
  EXPECT_THAT(reasons(), Each(Reason::kExecTimeout));
  // What follows waits behind it on that device, until the worker is killed.
  std::vector<Reason> next;
  for (int i = 0; i < 100; ++i) {
    next = reasons();
    if (next[0] != Reason::kExecTimeout) break;
  }
  EXPECT_THAT(next, Each(Reason::kDeviceLost));
}

// The GPU's context is lost, and the process that has it is not: no work will ever succeed there.
// The worker says so and ends, and another is started.
TEST_P(CudaWorkerLoss, AWorkerWhoseContextIsLostEnds) {
  if (TestsRunOnADriver()) GTEST_SKIP() << "the machine's GPU is not lost at will";
  const Tensor before = Part(0);
  const Tensor squared = before * before;
  for (int life = 0; life < 3; ++life) {
    ASSERT_TRUE(CheckSum(SumOfParts()));
    const pid_t worker = job_.cluster().worker_pid();
    ASSERT_EQ(kill(worker, SIGUSR1), 0);
    // A signal comes when it comes: the first sums may be right.
    for (int i = 0; i < 1000 && CheckSum(SumOfParts()); ++i) {
    }
    ExpectThatItGoesOn();
    EXPECT_NE(job_.cluster().worker_pid(), worker);
  }
  EXPECT_EQ(ErrorOf(squared.Read<double>().status()).reason, Reason::kDeviceLost);
}

// A client may have a gang of its own time out at once, and its work go on for long: it is told so,
// and the worker stays, with all that others have there.
TEST_P(WorkerLoss, AClientsTimeoutTakesNothingFromOthers) {
  JobOptions options;
  options.ranks = 2;  // of the bystander's world; the other client has rank 1's device, too
  options.cluster.fault_script = "launch delay device=1 skip=1 for=2s";
  options.cluster.kill_timeout = absl::Milliseconds(200);
  Job job(GetParam(), options);
  const pid_t worker = job.cluster().worker_pid();
  const Tensor kept = Upload<double>(job.world(1), {5.0, 7.0});
  const Tensor doubled = kept + kept;
  ASSERT_TRUE(doubled.Wait().ok());
  absl::StatusOr<Session> other = job.cluster().Open({1});
  ASSERT_TRUE(other.ok()) << other.status();
  WorldOptions alone;
  alone.name = "alone";
  alone.rank = 0;
  alone.size = 1;
  alone.exec_timeout = std::chrono::milliseconds(1);
  absl::StatusOr<World> world = other->Join(alone);
  ASSERT_TRUE(world.ok()) << world.status();
  const Tensor x = Upload<double>(*world, {2.0});
  const absl::Status late = AllReduce(x * x, *world).Read<double>().status();
  EXPECT_EQ(ErrorOf(late).reason, Reason::kExecTimeout) << late;
  // It waits behind that work on the device, and meets no loss.
  EXPECT_THAT(Values<double>(doubled * kept), ElementsAre(50, 98));
  EXPECT_EQ(job.cluster().worker_pid(), worker);
}

std::vector<ConformanceParam> Params() {
  std::vector<ConformanceParam> params;
  for (const TestBackend& test : TestBackends()) {
    if (test.backend == "sim") params.push_back(OnBackend(test, WorkerCluster));
  }
  params.push_back(OnBackend(CudaTestBackend(), WorkerCluster));
  return params;
}
INSTANTIATE_TEST_SUITE_P(Worker, WorkerLoss, ::testing::ValuesIn(Params()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Worker, CudaWorkerLoss,
                         ::testing::Values(OnBackend(CudaTestBackend(), WorkerCluster)),
                         ConformanceName);

}  // namespace
}  // namespace conformance
}  // namespace chorus
