// A trainer's compiled step against a whole daemon in which something goes wrong: whatever it is,
// and whenever, the parameters are those before or after a step, on every rank the same ones.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "chorus/chorus.h"
#include "chorus/functional/nn.h"
#include "core/backend/fault/fault_backend.h"
#include "core/backend/fault/fault_script.h"
#include "core/backend/host/host_backend.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernels.h"
#include "gtest/gtest.h"
#include "server/daemon.h"

namespace chorus {
namespace {

constexpr int kRanks = 2;
constexpr int kSteps = 12;
constexpr int64_t kSize = 40;         // more than travels with a call
constexpr int64_t kLarge = 64 << 10;  // what is equal on ranks that have it in common is done once
constexpr int64_t kClasses = 4;
constexpr absl::Duration kPatience = absl::Seconds(20);

using Floats = std::vector<float>;
using State = std::vector<Floats>;  // parameters, momentum

struct Outcome {
  std::vector<absl::Status> failures;
  std::map<int, State> whole;  // what ranks went on from, by how many steps were done; and the last
  bool lost = false;           // a device failed while it wrote them
};

class StepTest : public ::testing::Test {
 protected:
  // Ends with the test.
  struct Stage {
    explicit Stage(const std::string& faults, const node::NodeOptions& node = {}) {
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
      server::DaemonOptions options;
      options.listen = {*server::ParseListenAddress("unix:" + directory + "/d.sock")};
      options.node = node;
      options.node.sequencer.agree_timeout = kPatience;
      // What is said to be lost never ends; all else does, however busy the machine is.
      options.node.sequencer.exec_timeout = faults.empty() ? kPatience : absl::Seconds(1);
      absl::StatusOr<std::unique_ptr<server::Daemon>> started =
          server::Daemon::Start(options, DevicesOf(backend.get()));
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
    std::unique_ptr<server::Daemon> daemon;
  };

  struct Training {
    bool donate = true;
    int64_t size = kSize;
    bool common = false;                      // one copy of the state for all ranks
    bool labels = false;                      // the loss is a cross entropy
    Timeout agree_timeout = Timeout::zero();  // 0: the stage's
    // In the way of the step `number`, which begins with `state`.
    std::function<void(int number, const World& world, const std::vector<Tensor>& state)> trouble;
    // Whether one of this rank's labels is beyond the classes.
    std::function<bool(int number, const World& world)> bad_label;
    std::function<void(const World& world)> on_failure;
  };

  static std::vector<Tensor> Step(const World& world, const std::vector<Tensor>& in) {
    Tensor part;
    if (in.size() == 4) {
      part = Sin(in[0] * in[2]);
    } else {
      const Tensor parameters = in[0].Detach().RequireGrad();
      const Tensor logits =
          Reshape(Sin(parameters * in[2]), {parameters.num_elements() / kClasses, kClasses});
      const Tensor loss = Sum(CrossEntropy(logits, in[4]));
      const absl::StatusOr<std::vector<Tensor>> gradients = Grad({loss}, {parameters});
      part = gradients.ok() ? (*gradients)[0] : FromError(world, gradients.status());
    }
    const Tensor momentum = in[1] * 0.5 + AllReduce(part, world);
    return {in[0] - momentum * in[3], momentum};
  }

  static std::vector<Tensor> InitialState(const World& world, const Training& training) {
    const NoGrad no_grad;
    std::vector<Tensor> state;
    for (const float value : {1.0f, 0.0f}) {
      const Floats values(static_cast<size_t>(training.size), value);
      state.push_back(FromHost<float>(world, values, {training.size}));
      if (training.common) state.back() = Broadcast(state.back(), 0, world);
    }
    return state;
  }

  static void ReadWhole(int after, const std::vector<Tensor>& state, Outcome* outcome) {
    State& read = outcome->whole[after];
    read.clear();
    for (const Tensor& tensor : state) {
      const absl::StatusOr<Floats> values = tensor.Read<float>();
      ASSERT_TRUE(values.ok()) << values.status();
      read.push_back(*values);
    }
  }

  // One rank trains: momentum and parameters go from step to step, several steps under way. After a
  // failure it goes on from the last state that is there.
  static void Train(const Stage& stage, int rank, const Training& training, Outcome* outcome) {
    SessionOptions open;
    open.address = stage.daemon->addresses()[0].ToString();
    open.devices = {rank};
    open.wait_timeout = std::chrono::seconds(30);
    const absl::StatusOr<Session> session = Session::Open(open);
    ASSERT_TRUE(session.ok()) << session.status();
    WorldOptions join;
    join.name = "job";
    join.rank = rank;
    join.size = kRanks;
    join.agree_timeout = training.agree_timeout;
    const absl::StatusOr<World> joined = session->Join(join);
    ASSERT_TRUE(joined.ok()) << joined.status();
    const World& world = *joined;
    CompileOptions options;
    if (training.donate) options.donate = {0, 1};
    options.max_under_way = 4;
    const Compiled step =
        Compile([world](const std::vector<Tensor>& in) { return Step(world, in); }, options);
    // After so many steps.
    std::vector<std::vector<Tensor>> states = {InitialState(world, training)};
    while (true) {
      while (static_cast<int>(states.size()) <= kSteps) {
        const int number = static_cast<int>(states.size());
        // A step that is done again has a new number. A rank that has met fewer failures is behind,
        // meets one more, and is there.
        const int64_t again = static_cast<int64_t>(outcome->failures.size());
        ASSERT_TRUE(world.Step(1000 * again + number).ok());
        if (training.trouble) {
          const NoGrad no_grad;
          training.trouble(number, world, states.back());
        }
        const Floats data(static_cast<size_t>(training.size),
                          0.1f * static_cast<float>(number + rank));
        std::vector<Tensor> in = states.back();
        in.push_back(FromHost<float>(world, data, {training.size}));
        in.push_back(Scalar<float>(world, 0.01f * static_cast<float>(number)));
        if (training.labels) {
          std::vector<uint8_t> labels(static_cast<size_t>(training.size / kClasses),
                                      static_cast<uint8_t>((number + rank) % kClasses));
          if (training.bad_label && training.bad_label(number, world)) labels[3] = kClasses;
          in.push_back(FromHost<uint8_t>(world, labels, {training.size / kClasses}));
        }
        absl::StatusOr<std::vector<Tensor>> out = step.Run(in);
        ASSERT_TRUE(out.ok()) << out.status();
        states.push_back(*std::move(out));
      }
      const absl::Status failure = states.back()[0].Wait();
      if (failure.ok()) break;
      outcome->failures.push_back(failure);
      ASSERT_LT(outcome->failures.size(), 10u) << failure;
      if (training.on_failure) training.on_failure(world);
      // A device that is late may still have them.
      const absl::Time deadline = SteadyNow() + kPatience;
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
          // The first that has failed tells why, in this rank's own words.
          outcome->failures.back() = states[after + 1][0].Wait();
          states.resize(after + 1);
          break;
        }
      } while (!there.ok() && SteadyNow() < deadline);
      ASSERT_TRUE(there.ok()) << there << "; " << failure;
      ReadWhole(static_cast<int>(states.size()) - 1, states.back(), outcome);
    }
    const size_t first = training.donate ? kSteps : 0;
    for (size_t after = first; after <= kSteps; ++after) {
      ReadWhole(static_cast<int>(after), states[after], outcome);
    }
  }

  static std::vector<Outcome> TrainAll(const Stage& stage, const Training& training) {
    std::vector<Outcome> outcomes(kRanks);
    std::vector<std::thread> ranks;
    for (int r = 0; r < kRanks; ++r) {
      ranks.emplace_back([&, r] { Train(stage, r, training, &outcomes[static_cast<size_t>(r)]); });
    }
    for (std::thread& rank : ranks) rank.join();
    return outcomes;
  }

  // After each step when nothing goes wrong, without donation.
  static const std::map<int, State>& Expected(const Training& training) {
    static auto* const states_of = new std::map<std::pair<int64_t, bool>, std::map<int, State>>();
    std::map<int, State>& expected = (*states_of)[{training.size, training.labels}];
    if (expected.empty()) {
      Training good;
      good.donate = false;
      good.size = training.size;
      good.labels = training.labels;
      const Stage stage("");
      expected = TrainAll(stage, good)[0].whole;
    }
    return expected;
  }

  // Whatever a rank went on from, and what it has in the end, is what it would have been.
  static void ExpectWhole(const Outcome& outcome, const Training& training) {
    const std::map<int, State>& expected = Expected(training);
    ASSERT_EQ(expected.size(), static_cast<size_t>(kSteps + 1));
    EXPECT_EQ(outcome.whole.count(kSteps), 1u);
    for (const auto& entry : outcome.whole) {
      EXPECT_TRUE(entry.second == expected.at(entry.first)) << "after " << entry.first;
    }
  }
};

TEST_F(StepTest, WithoutTroubleMemoryIsHandedOn) {
  const Stage stage("");
  for (const Outcome& outcome : TrainAll(stage, Training())) {
    ExpectWhole(outcome, Training());
    EXPECT_TRUE(outcome.failures.empty());
  }
}

TEST_F(StepTest, ACollectiveThatFailsLeavesAWholeState) {
  for (int skip = 0; skip < 2 * kSteps; ++skip) {
    const std::string fault = absl::StrCat("collective error device=", skip % 2, " skip=", skip);
    SCOPED_TRACE(fault);
    const Stage stage(fault);
    const std::vector<Outcome> outcomes = TrainAll(stage, Training());
    EXPECT_TRUE(stage.hit);
    for (const Outcome& outcome : outcomes) {
      ExpectWhole(outcome, Training());
      EXPECT_FALSE(outcome.failures.empty());
    }
  }
}

TEST_F(StepTest, ACollectiveThatNeverEndsLeavesAWholeState) {
  for (const int skip : {0, 1, 7, 10}) {
    const std::string fault = absl::StrCat("collective lost device=", skip % 2, " skip=", skip);
    SCOPED_TRACE(fault);
    const Stage stage(fault);
    for (const Outcome& outcome : TrainAll(stage, Training())) {
      ExpectWhole(outcome, Training());
      EXPECT_FALSE(outcome.failures.empty());
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
      Training training;
      training.donate = donate;
      const std::vector<Outcome> outcomes = TrainAll(stage, training);
      EXPECT_TRUE(stage.hit);
      EXPECT_EQ(outcomes[0].lost, outcomes[1].lost);
      for (const Outcome& outcome : outcomes) {
        EXPECT_FALSE(outcome.failures.empty());
        if (outcome.lost) {
          EXPECT_TRUE(donate);
          ++lost;
        } else {
          ExpectWhole(outcome, training);
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
      Training training;
      training.trouble = [&](int number, const World& world, const std::vector<Tensor>&) {
        if (number != at || world.rank() != 1 || done.exchange(true)) return;
        if (mismatch) {
          AllReduce(Scalar<double>(world, 1), world);
        } else {
          EXPECT_TRUE(world.Abort("a test").ok());
        }
      };
      for (const Outcome& outcome : TrainAll(stage, training)) {
        ExpectWhole(outcome, training);
        EXPECT_FALSE(outcome.failures.empty());
      }
    }
  }
}

// Rank 1 is the one in trouble, in step kTroubled, once.
constexpr int kTroubled = 6;

// Both ranks have been told who and what it was, and go on from the step before.
void ExpectToldOnce(const Outcome& outcome, Reason reason, const std::string& text) {
  ASSERT_EQ(outcome.failures.size(), 1u);
  const Error error = ErrorOf(outcome.failures[0]);
  EXPECT_EQ(error.reason, reason) << outcome.failures[0];
  EXPECT_EQ(outcome.whole.count(kTroubled - 1), 1u) << outcome.failures[0];
  EXPECT_TRUE(absl::StrContains(error.message, text)) << error.message;
}

TEST_F(StepTest, ALateRankIsNamedAndAWholeStateIsLeft) {
  for (const bool common : {false, true}) {
    SCOPED_TRACE(common);
    const Stage stage("");
    absl::Notification told;
    Training training;
    training.size = kLarge;
    training.common = common;
    training.agree_timeout = std::chrono::seconds(1);
    training.trouble = [&](int number, const World& world, const std::vector<Tensor>&) {
      if (number != kTroubled || world.rank() != 1) return;
      EXPECT_TRUE(told.WaitForNotificationWithTimeout(kPatience));
    };
    training.on_failure = [&](const World& world) {
      if (world.rank() == 0 && !told.HasBeenNotified()) told.Notify();
    };
    for (const Outcome& outcome : TrainAll(stage, training)) {
      ExpectWhole(outcome, training);
      ExpectToldOnce(outcome, Reason::kAgreeTimeout, "missing after 1");
      EXPECT_EQ(ErrorOf(outcome.failures[0]).culprit.rank, 1);
    }
  }
}

TEST_F(StepTest, ARankWithoutMemoryIsNamedAndAWholeStateIsLeft) {
  node::NodeOptions node;
  node.memory_limit_bytes = 192 << 20;
  for (const bool common : {false, true}) {
    SCOPED_TRACE(common);
    const Stage stage("", node);
    std::vector<Tensor> hog;  // rank 1's
    absl::Notification prepared;
    absl::Notification free;
    Training training;
    training.size = kLarge;
    training.common = common;
    training.trouble = [&](int number, const World& world, const std::vector<Tensor>& state) {
      if (world.rank() == 0 && number == kTroubled + 1 && !prepared.HasBeenNotified()) {
        // Its part of the step has all that it needs, and is the only one under way.
        EXPECT_TRUE(Zeros(world, DType::kU8, {1}).Wait().ok());
        prepared.Notify();
        EXPECT_TRUE(free.WaitForNotificationWithTimeout(kPatience));
      }
      if (world.rank() == 0 || number != kTroubled || !hog.empty() || free.HasBeenNotified()) {
        return;
      }
      for (const Tensor& tensor : state) EXPECT_TRUE(tensor.Wait().ok());
      EXPECT_TRUE(prepared.WaitForNotificationWithTimeout(kPatience));
      // The first are so large that each has an arena of its own, which goes back whole, to whoever
      // needs memory next; what lies between others' does not.
      for (int64_t bytes = 16 << 20; bytes >= 1; bytes /= 2) {
        absl::Status status;
        do {
          hog.push_back(Zeros(world, DType::kU8, {bytes}));
          status = hog.back().Wait();
        } while (status.ok());
        EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfMemory) << status;
      }
    };
    training.on_failure = [&](const World& world) {
      if (world.rank() == 0 || free.HasBeenNotified()) return;
      hog.clear();
      const absl::Status there = Zeros(world, DType::kU8, {1}).Wait();
      EXPECT_TRUE(there.ok()) << there;
      free.Notify();
    };
    const std::vector<Outcome> outcomes = TrainAll(stage, training);
    for (const Outcome& outcome : outcomes) ExpectWhole(outcome, training);
    ExpectToldOnce(outcomes[0], Reason::kPeerRefused, "out of memory");
    EXPECT_EQ(ErrorOf(outcomes[0].failures[0]).culprit.rank, 1);
    ExpectToldOnce(outcomes[1], Reason::kOutOfMemory, "out of memory");
  }
}

TEST_F(StepTest, ABadLabelIsToldToAllAndAWholeStateIsLeft) {
  for (const int64_t size : {kSize, kLarge}) {
    for (const bool common : {false, true}) {
      SCOPED_TRACE(absl::StrCat(size, " ", common));
      const Stage stage("");
      std::atomic<bool> done{false};
      Training training;
      training.size = size;
      training.common = common;
      training.labels = true;
      training.bad_label = [&](int number, const World& world) {
        return number == kTroubled && world.rank() == 1 && !done.exchange(true);
      };
      for (const Outcome& outcome : TrainAll(stage, training)) {
        ExpectWhole(outcome, training);
        ExpectToldOnce(outcome, Reason::kBadType, "holds 4 at [3], expected from 0 to 3");
        const Error error = ErrorOf(outcome.failures[0]);
        EXPECT_EQ(error.code, absl::StatusCode::kInvalidArgument);
        EXPECT_TRUE(absl::StrContains(error.message, "rank 1: cross_entropy")) << error.message;
        EXPECT_EQ(error.culprit.rank, 1);
      }
    }
  }
}

}  // namespace
}  // namespace chorus
