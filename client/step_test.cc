// A trainer's compiled step against a whole daemon in which something goes wrong: whatever it is,
// and whenever, the parameters are those before or after a step, on every rank the same ones.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/chorus.h"
#include "core/backend/fault/fault_backend.h"
#include "core/backend/fault/fault_script.h"
#include "core/backend/host/host_backend.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernels.h"
#include "gtest/gtest.h"
#include "server/daemon.h"

namespace chorus {
namespace {

constexpr int kRanks = 2;
constexpr int kSteps = 12;
constexpr int64_t kSize = 40;  // more than travels with a call

using Floats = std::vector<float>;

struct Outcome {
  Floats parameters;  // after the last step
  int failures = 0;
  bool lost = false;  // a device failed while it wrote them
};

class StepTest : public ::testing::Test {
 protected:
  // Ends with the test.
  struct Stage {
    explicit Stage(const std::string& faults) {
      char name[] = "/tmp/chorus_XXXXXX";
      EXPECT_NE(::mkdtemp(name), nullptr);
      directory = name;
      HostBackendOptions host;
      host.devices = kRanks;
      host.pool = &pool;
      host.make_kernel = MakeHostKernel;
      backend = CreateHostBackend(host);
      if (!faults.empty()) {
        backend = CreateFaultBackend(std::move(backend), *ParseFaultScript(faults),
                                     [this](const std::string&) { hit = true; });
      }
      DaemonOptions options;
      options.listen = {*ParseListenAddress("unix:" + directory + "/d.sock")};
      options.node.sequencer.agree_timeout = absl::Seconds(20);
      options.node.sequencer.exec_timeout = absl::Seconds(1);
      absl::StatusOr<std::unique_ptr<Daemon>> started = Daemon::Start(options, backend.get());
      EXPECT_TRUE(started.ok()) << started.status();
      daemon = *std::move(started);
    }
    ~Stage() {
      daemon.reset();
      backend.reset();
      std::system(("rm -rf " + directory).c_str());
    }

    std::string directory;
    ThreadPool pool{2};
    std::atomic<bool> hit{false};
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Daemon> daemon;
  };

  // In the way of a step, once.
  using Trouble = std::function<void(int step, const World& world)>;

  // One rank trains: momentum and parameters go from step to step, several steps under way. After a
  // failure it goes on from the last state that is there.
  static void Train(const Stage& stage, int rank, bool donate, const Trouble& trouble,
                    Outcome* outcome) {
    SessionOptions open;
    open.address = stage.daemon->addresses()[0].ToString();
    open.devices = {rank};
    open.wait_timeout = std::chrono::seconds(30);
    const absl::StatusOr<sdk::Session> session = sdk::Session::Open(open);
    ASSERT_TRUE(session.ok()) << session.status();
    WorldOptions join;
    join.name = "job";
    join.rank = rank;
    join.size = kRanks;
    const absl::StatusOr<World> joined = session->Join(join);
    ASSERT_TRUE(joined.ok()) << joined.status();
    const World world = *joined;
    CompileOptions options;
    if (donate) options.donate = {0, 1};
    options.max_under_way = 4;
    const Compiled step = Compile(
        [world](const std::vector<Tensor>& in) {
          const Tensor gradient = AllReduce(Sin(in[0] * in[2]), world);
          const Tensor momentum = in[1] * 0.5 + gradient;
          return std::vector<Tensor>{in[0] - momentum * in[3], momentum};
        },
        options);
    const NoGrad no_grad;
    // After so many steps.
    std::vector<std::vector<Tensor>> states = {{FromHost<float>(world, Floats(kSize, 1), {kSize}),
                                                FromHost<float>(world, Floats(kSize, 0), {kSize})}};
    while (true) {
      while (static_cast<int>(states.size()) <= kSteps) {
        const int number = static_cast<int>(states.size());
        if (trouble) trouble(number, world);
        const Floats data(kSize, 0.1f * static_cast<float>(number + rank));
        absl::StatusOr<std::vector<Tensor>> out =
            step.Run({states.back()[0], states.back()[1], FromHost<float>(world, data, {kSize}),
                      Scalar<float>(world, 0.01f * static_cast<float>(number))});
        ASSERT_TRUE(out.ok()) << out.status();
        states.push_back(*std::move(out));
      }
      const absl::Status failure = states.back()[0].Wait();
      if (failure.ok()) break;
      ASSERT_LT(++outcome->failures, 10) << failure;
      // A device that is late may still have them.
      const absl::Time deadline = absl::Now() + absl::Seconds(20);
      absl::Status there;
      do {
        for (size_t after = states.size(); after-- > 0;) {
          there = states[after][0].Wait();
          if (there.ok()) there = states[after][1].Wait();
          if (absl::StrContains(there.message(), "failed after it had written there")) {
            outcome->lost = true;
            return;
          }
          if (!there.ok()) continue;
          states.resize(after + 1);
          break;
        }
      } while (!there.ok() && absl::Now() < deadline);
      ASSERT_TRUE(there.ok()) << there << "; " << failure;
    }
    const absl::StatusOr<Floats> last = states.back()[0].Read<float>();
    ASSERT_TRUE(last.ok()) << last.status();
    outcome->parameters = *last;
  }

  static std::vector<Outcome> TrainAll(const Stage& stage, bool donate,
                                       const Trouble& trouble = nullptr) {
    std::vector<Outcome> outcomes(kRanks);
    std::vector<std::thread> ranks;
    for (int r = 0; r < kRanks; ++r) {
      ranks.emplace_back([&, r] { Train(stage, r, donate, trouble, &outcomes[r]); });
    }
    for (std::thread& rank : ranks) rank.join();
    return outcomes;
  }

  // Of steps in which nothing goes wrong, without donation.
  static const Floats& Expected() {
    static const auto* const expected = [] {
      const Stage stage("");
      return new Floats(TrainAll(stage, false)[0].parameters);
    }();
    return *expected;
  }
};

TEST_F(StepTest, WithoutTroubleMemoryIsHandedOn) {
  const Stage stage("");
  for (const Outcome& outcome : TrainAll(stage, true)) {
    EXPECT_EQ(outcome.parameters, Expected());
    EXPECT_EQ(outcome.failures, 0);
  }
}

// Every collective, the ones of steps and the meetings before they write, on either device.
TEST_F(StepTest, ACollectiveThatFailsLeavesAWholeState) {
  for (int skip = 0; skip < 2 * kSteps; ++skip) {
    const std::string fault = absl::StrCat("collective error device=", skip % 2, " skip=", skip);
    SCOPED_TRACE(fault);
    const Stage stage(fault);
    const std::vector<Outcome> outcomes = TrainAll(stage, true);
    EXPECT_TRUE(stage.hit);
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.parameters, Expected());
      EXPECT_GE(outcome.failures, 1);
    }
  }
}

TEST_F(StepTest, ACollectiveThatNeverEndsLeavesAWholeState) {
  for (const int skip : {0, 1, 7, 10}) {
    const std::string fault = absl::StrCat("collective lost device=", skip % 2, " skip=", skip);
    SCOPED_TRACE(fault);
    const Stage stage(fault);
    for (const Outcome& outcome : TrainAll(stage, true)) {
      EXPECT_EQ(outcome.parameters, Expected());
      EXPECT_GE(outcome.failures, 1);
    }
  }
}

// Kernels before the meeting fail whole; those that write parameters lose them, and say so. Without
// donation nothing is lost either way.
TEST_F(StepTest, AKernelThatFailsLeavesAWholeStateOrSaysThatItIsLost) {
  int whole = 0;
  int lost = 0;
  for (int skip = 0; skip < 14; ++skip) {
    const std::string fault = absl::StrCat("launch error device=", skip % 2, " skip=", skip);
    for (const bool donate : {true, false}) {
      SCOPED_TRACE(absl::StrCat(fault, " donate=", donate));
      const Stage stage(fault);
      const std::vector<Outcome> outcomes = TrainAll(stage, donate);
      EXPECT_TRUE(stage.hit);
      EXPECT_EQ(outcomes[0].lost, outcomes[1].lost);
      for (const Outcome& outcome : outcomes) {
        EXPECT_GE(outcome.failures, 1);
        if (outcome.lost) {
          EXPECT_TRUE(donate);
          ++lost;
        } else {
          EXPECT_EQ(outcome.parameters, Expected());
          ++whole;
        }
      }
    }
  }
  EXPECT_GT(lost, 0);
  EXPECT_GT(whole, lost);
}

TEST_F(StepTest, ARankThatDisagreesOrGivesUpLeavesAWholeState) {
  for (const bool mismatch : {true, false}) {
    for (const int at : {1, 2, 6, kSteps}) {
      SCOPED_TRACE(absl::StrCat(mismatch ? "mismatch" : "abort", " at ", at));
      const Stage stage("");
      std::atomic<bool> done{false};
      const auto trouble = [&](int step, const World& world) {
        if (step != at || world.rank() != 1 || done.exchange(true)) return;
        if (mismatch) {
          AllReduce(Scalar<double>(world, 1), world);
        } else {
          EXPECT_TRUE(world.Abort("a test").ok());
        }
      };
      for (const Outcome& outcome : TrainAll(stage, true, trouble)) {
        EXPECT_EQ(outcome.parameters, Expected());
        EXPECT_GE(outcome.failures, 1);
      }
    }
  }
}

}  // namespace
}  // namespace chorus
