// A job that goes on and on holds no more and more of the daemon's memory.
//
// chorusd runs as it does everywhere; two ranks train over rings, each on a thread here. What the
// daemon counts as held after 2,000 steps is what it must hold after 4,000: exactly, at a moment
// when nothing is under way. Beside that its heap may not grow, which has a bound (kGrowth).
#include <sys/types.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <iostream>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/process.h"
#include "chorus/chorus.h"
#include "chorus/data/sampler.h"
#include "chorus/nn/nn.h"
#include "core/base/error.h"
#include "examples/05_trainer/dataset.h"
#include "examples/05_trainer/model.h"
#include "gtest/gtest.h"
#include "tests/fault/processes.h"

namespace chorus {
namespace {

constexpr int kRanks = 2;
// After 500 steps the heap still grows by some 500 KB, whether 1,500 follow or 7,500.
constexpr int kWarmUp = 2000;
constexpr int kSteps = 4000;  // with those of the warm-up
// Behind 1,048 uploads the first block of staging is full, and there may be a second one, or not.
constexpr int kEagerWarmUp = 100;
constexpr int kEagerSteps = 900;
constexpr int kModelWarmUp = 200;
constexpr int kModelSteps = 2000;
constexpr int64_t kGlobalBatch = 16;
constexpr size_t kUnderWay = 4;
constexpr int64_t kMemoryLimit = int64_t{256} << 20;
// Of the daemon's heap and stacks from the warm-up on. Tables that double, and what the allocator
// keeps for each of gRPC's threads, are worth some 100 KiB; 200 bytes that a step leaves behind for
// each rank would be 800.
constexpr int64_t kGrowth = 512 << 10;
// There are fewer eager steps, in which the heap grows by 10 to 50 KiB; 400 bytes for each tape
// that is dropped would be 310.
constexpr int64_t kEagerGrowth = 192 << 10;

// Of a session's memory: its tables of names double, and what it is charged for runs, which stays
// until it is much too much, is in steps of as much; by how far ranks happened to be apart.
constexpr int64_t kTables = kRanks * (int64_t{64} << 10);

trainer::ModelShape SmallShape() {
  trainer::ModelShape shape;
  shape.pixels = 96;
  shape.hidden = 128;
  shape.classes = 5;
  return shape;
}

// What the daemon holds, but for arenas: how many of them are kept for reuse depends on how far the
// ranks happened to be apart.
struct Held {
  int64_t runs = 0;
  int64_t buffers = 0;
  int64_t plans = 0;
  int64_t agreement_rows = 0;
  int64_t pending = 0;
  // Of each session: tensors, graphs, bytes of staging.
  std::vector<std::tuple<int64_t, int64_t, int64_t>> sessions;

  friend bool operator==(const Held& a, const Held& b) {
    return a.runs == b.runs && a.buffers == b.buffers && a.plans == b.plans &&
           a.agreement_rows == b.agreement_rows && a.pending == b.pending &&
           a.sessions == b.sessions;
  }
  friend std::ostream& operator<<(std::ostream& os, const Held& held) {
    os << held.runs << " runs, " << held.buffers << " buffers, " << held.plans << " plans, "
       << held.agreement_rows << " rows of agreement, " << held.pending << " pending";
    for (const auto& session : held.sessions) {
      os << "; " << std::get<0>(session) << " tensors, " << std::get<1>(session) << " graphs, "
         << std::get<2>(session) << " bytes of staging";
    }
    return os;
  }
};

struct Mode {
  const char* name;
  std::vector<std::string> flags;
  bool
      heap;  // its heap tells something: sim has its devices' memory there, and keeps what is freed
};
std::ostream& operator<<(std::ostream& os, const Mode& mode) { return os << mode.name; }

class MemoryTest : public ::testing::TestWithParam<Mode> {
 protected:
  void Start() {
    fault::Daemon::Options options;
    options.socket = scratch_.path() + "/chorusd";
    options.log = scratch_.path() + "/chorusd.log";
    options.clock = scratch_.path() + "/clock";
    options.flags = {absl::StrCat("--host_devices=", kRanks),
                     absl::StrCat("--memory_limit_bytes=", kMemoryLimit)};
    options.flags.insert(options.flags.end(), GetParam().flags.begin(), GetParam().flags.end());
    absl::StatusOr<std::unique_ptr<fault::Daemon>> daemon = fault::Daemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status() << bench::FileText(options.log);
    daemon_ = *std::move(daemon);
    worlds_.resize(kRanks);
    ForEachRank([this](int rank, World*) {
      SessionOptions open;
      open.address = daemon_->address();
      open.transport = Transport::kRing;
      const absl::StatusOr<Session> session = Session::Open(open);
      ASSERT_TRUE(session.ok()) << session.status();
      WorldOptions join;
      join.name = "job";
      join.rank = rank;
      join.size = kRanks;
      const absl::StatusOr<World> world = session->Join(join);
      ASSERT_TRUE(world.ok()) << world.status();
      worlds_[static_cast<size_t>(rank)] = *world;
      // Its staging memory stays.
      const absl::Status status = FromHost<float>(*world, std::vector<float>(1000), {1000}).Wait();
      ASSERT_TRUE(status.ok()) << status;
    });
    if (HasFailure()) return;
    MemoryWithoutTensors();  // has graphs of its own
  }

  void ForEachRank(const std::function<void(int rank, World* world)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] { body(rank, &worlds_[static_cast<size_t>(rank)]); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // Afterwards nothing of a rank's is under way, and what its dropped handles stood for is gone.
  static void Settle(const World& world) {
    const NoGrad no_grad;
    // The SDK collects what dropped handles leave, until it is worth a message.
    absl::Status status = Zeros(world, DType::kU8, {int64_t{1} << 20}).Wait();
    EXPECT_TRUE(status.ok()) << status;
    status = Barrier(world).Wait();  // has no bytes
    EXPECT_TRUE(status.ok()) << status;
  }

  // What the daemon uses when no rank has a tensor: its arenas go back when one is asked for that
  // is as large as all that it may use.
  int64_t MemoryWithoutTensors() {
    ForEachRank([](int rank, World* world) {
      Settle(*world);
      if (rank != 0) return;
      const absl::Status status = Zeros(*world, DType::kU8, {kMemoryLimit}).Wait();
      EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfMemory) << status;
    });
    const absl::StatusOr<v1::GetStatsResponse> stats = daemon_->Stats();
    EXPECT_TRUE(stats.ok()) << stats.status();
    EXPECT_EQ(stats->live_buffer_count(), 0);
    // What the ranks have mapped of these arenas is theirs until their next read.
    return stats->memory_used_bytes() - stats->client_held_bytes();
  }

  Held HeldNow() {
    Held held;
    // A launch is over a moment after its results are there.
    const absl::Status idle = fault::AskUntil([&]() -> absl::StatusOr<bool> {
      CHORUS_ASSIGN_OR_RETURN(const v1::GetStatsResponse stats, daemon_->Stats());
      CHORUS_ASSIGN_OR_RETURN(const v1::ListPendingResponse pending, daemon_->Pending());
      CHORUS_ASSIGN_OR_RETURN(const v1::ListSessionsResponse sessions, daemon_->Sessions());
      held.runs = stats.live_run_count();
      held.buffers = stats.live_buffer_count();
      held.plans = stats.loaded_plan_count();
      held.agreement_rows = stats.agreement_row_count();
      held.pending = pending.pending_size();
      held.sessions.clear();
      for (const auto& session : sessions.sessions()) {
        held.sessions.emplace_back(session.tensor_count(), session.graph_count(),
                                   session.staging_bytes());
      }
      return held.runs == 0;
    });
    EXPECT_TRUE(idle.ok()) << idle << ": " << held;
    return held;
  }
  int64_t Heap() {
    const absl::StatusOr<int64_t> bytes = bench::AnonymousBytesOf(daemon_->pid());
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    return bytes.ok() ? *bytes : 0;
  }

  // At the end of a phase of steps.
  struct Seen {
    Held held;
    int64_t heap = 0;
    int64_t memory = 0;  // when what they worked on is gone
  };
  void ExpectFlat(const Seen& before, const Seen& after, int64_t most_growth = kGrowth) {
    const int64_t growth = after.heap - before.heap;
    // Graphs that nobody names any more are taken apart beside everything else, and count as long.
    int64_t memory = after.memory;
    const absl::Status flat = fault::AskUntil([&]() -> absl::StatusOr<bool> {
      if (memory - before.memory > kTables) memory = MemoryWithoutTensors();
      return memory - before.memory <= kTables;
    });
    EXPECT_TRUE(flat.ok()) << memory << " bytes for " << before.memory << " before";
    std::cout << after.held << "; " << memory << " bytes without tensors; the heap has "
              << before.heap << ", and grew by " << growth << std::endl;
    EXPECT_EQ(before.held, after.held);
    if (GetParam().heap && !bench::kSanitized) {
      EXPECT_LT(growth, most_growth);
    }
  }

  const bench::ScratchDirectory scratch_;
  std::unique_ptr<fault::Daemon> daemon_;
  std::vector<World> worlds_;
};

// One rank of lesson 5, on random images: an epoch's last batch is short, so that graphs of two
// sizes take turns, and some losses are read while others are dropped unread.
class Lesson {
 public:
  explicit Lesson(const World& world)
      : world_(world), trainer_(world, SmallShape(), 0.9f, kGlobalBatch / kRanks) {
    std::mt19937_64 random(1);
    data_.pixels = SmallShape().pixels;
    data_.count = 7 * kGlobalBatch - 5;
    for (int64_t i = 0; i < data_.count * data_.pixels; ++i) {
      data_.images.push_back(static_cast<uint8_t>(random() % 256));
    }
    for (int64_t i = 0; i < data_.count; ++i) {
      data_.labels.push_back(
          static_cast<uint8_t>(random() % static_cast<uint64_t>(SmallShape().classes)));
    }
    order_ = data::EpochOrder(data_.count, 1, 0);
  }

  void Begin() {
    absl::StatusOr<trainer::State> state = trainer::InitialState(world_, SmallShape(), 1);
    ASSERT_TRUE(state.ok()) << state.status();
    state_ = *std::move(state);
  }
  void Step(int count) {
    std::deque<Tensor> losses;
    for (int step = 0; step < count; ++step) {
      const int64_t begin = step * kGlobalBatch % (7 * kGlobalBatch);
      const int64_t size = std::min(kGlobalBatch, data_.count - begin);
      const int64_t from = begin + size * world_.rank() / kRanks;
      const int64_t to = begin + size * (world_.rank() + 1) / kRanks;
      const float rate = 0.1f / static_cast<float>(1 + step % 10);
      absl::StatusOr<Tensor> loss =
          trainer_.Step(trainer::TakeBatch(data_, order_, from, to - from), size, rate, &state_);
      ASSERT_TRUE(loss.ok()) << loss.status();
      losses.push_back(*std::move(loss));
      if (losses.size() <= kUnderWay) continue;
      if (step % 3 == 0) {
        const absl::StatusOr<float> value = losses.front().Item<float>();
        ASSERT_TRUE(value.ok()) << value.status();
      } else {
        const absl::Status status = losses.front().Wait();
        ASSERT_TRUE(status.ok()) << status;
      }
      losses.pop_front();
    }
    // The last ones are dropped while they are under way.
    losses.clear();
    for (const Tensor& tensor : state_) {
      const absl::Status status = tensor.Wait();
      ASSERT_TRUE(status.ok()) << status;
    }
    EXPECT_EQ(trainer_.traces(), 1);
  }
  void End() { state_.clear(); }

 private:
  const World world_;
  trainer::Dataset data_;
  std::vector<int64_t> order_;
  trainer::Trainer trainer_;
  trainer::State state_;
};

TEST_P(MemoryTest, CompiledStepsLeaveNothingBehind) {
  Start();
  ASSERT_FALSE(HasFailure());
  std::vector<std::unique_ptr<Lesson>> lessons;
  for (const World& world : worlds_) lessons.push_back(std::make_unique<Lesson>(world));
  const auto for_each = [&](const std::function<void(Lesson*)>& body) {
    ForEachRank([&](int rank, World* world) {
      body(lessons[static_cast<size_t>(rank)].get());
      Settle(*world);
    });
  };
  const auto train = [&](int steps) {
    Seen seen;
    for_each([](Lesson* lesson) { lesson->Begin(); });
    for_each([steps](Lesson* lesson) { lesson->Step(steps); });
    seen.held = HeldNow();
    seen.heap = Heap();
    for_each([](Lesson* lesson) { lesson->End(); });
    seen.memory = MemoryWithoutTensors();
    return seen;
  };
  const Seen before = train(kWarmUp);
  ASSERT_FALSE(HasFailure());
  // Each rank's names, if not memory, for its state.
  EXPECT_GE(std::get<0>(before.held.sessions[0]), 2 * static_cast<int>(trainer::kParameters));
  ExpectFlat(before, train(kSteps - kWarmUp));
}

// One op at a time, with tapes: of some steps the gradient is asked for, of others it is not, and
// what was recorded for it is dropped.
TEST_P(MemoryTest, EagerStepsLeaveNothingBehind) {
  Start();
  ASSERT_FALSE(HasFailure());
  constexpr int64_t kSize = 1000;
  const auto train = [&](int steps) {
    Seen seen;
    std::vector<Tensor> weights(kRanks);
    ForEachRank([&](int rank, World* world) {
      Tensor& w = weights[static_cast<size_t>(rank)];
      w = Full(*world, DType::kF32, {kSize}, 1);
      for (int step = 0; step < steps; ++step) {
        w = w.Detach().RequireGrad();
        const std::vector<float> data(kSize, 0.001f * static_cast<float>(1 + step % 7 + rank));
        const Tensor x = FromHost<float>(*world, data, {kSize});
        const Tensor y = AllReduce(w * x, *world);
        const Tensor loss = Sum(y * y) * (1.0 / kSize);
        if (step % 2 == 1) continue;  // its tape is dropped
        const absl::Status backward = Backward(loss);
        ASSERT_TRUE(backward.ok()) << backward;
        const NoGrad no_grad;
        w = w - AllReduce(w.grad(), *world) * 0.01;
        if (step % 3 != 0) continue;
        const absl::StatusOr<float> value = loss.Item<float>();
        ASSERT_TRUE(value.ok()) << value.status();
      }
      const absl::Status status = w.Wait();
      ASSERT_TRUE(status.ok()) << status;
      w = w.Detach();
      Settle(*world);
    });
    seen.held = HeldNow();
    seen.heap = Heap();
    weights.clear();
    seen.memory = MemoryWithoutTensors();
    return seen;
  };
  const Seen before = train(kEagerWarmUp);
  ASSERT_FALSE(HasFailure());
  ExpectFlat(before, train(kEagerSteps - kEagerWarmUp), kEagerGrowth);
}

// One rank of a small module that has everything: buffers, what drops, an optimizer's state.
class ModelRank {
 public:
  explicit ModelRank(const World& world)
      : world_(world),
        model_({nn::Make<nn::Linear>(6, 5), nn::Make<nn::BatchNorm>(5), nn::ReluLayer(),
                nn::Make<nn::Dropout>(0.5), nn::Make<nn::Linear>(5, 3)}),
        adam_(model_.parameters(), nn::AdamW::Options()),
        step_(
            &model_, &adam_, [this](const std::vector<Tensor>& in) { return LossOf(in[0], in[1]); },
            world.group()) {
    const absl::Status status = model_.Init(world, 1);
    EXPECT_TRUE(status.ok()) << status;
  }

  absl::StatusOr<Tensor> CompiledStep() { return step_({X(), Y()}); }
  absl::StatusOr<Tensor> EagerStep() {
    const Tensor loss = LossOf(X(), Y());
    CHORUS_RETURN_IF_ERROR(Backward(loss));
    const NoGrad no_grad;
    std::vector<Tensor> gradients = adam_.gradients();
    for (Tensor& gradient : gradients) gradient = AllReduce(gradient, world_, Reduction::kAvg);
    CHORUS_RETURN_IF_ERROR(adam_.Step(gradients));
    return loss.Detach();
  }
  void Wait() {
    for (const nn::Variable& variable : model_.variables()) {
      const absl::Status status = variable().Wait();
      ASSERT_TRUE(status.ok()) << status;
    }
  }

 private:
  Tensor X() {
    std::vector<float> values;
    for (int i = 0; i < 24; ++i) values.push_back(0.1f * static_cast<float>((count_ + i * i) % 7));
    ++count_;
    return FromHost(world_, values, {4, 6});
  }
  Tensor Y() { return FromHost<int32_t>(world_, {0, 1, 2, world_.rank()}, {4}); }
  Tensor LossOf(const Tensor& x, const Tensor& y) { return nn::CrossEntropyLoss(model_(x), y); }

  const World world_;
  nn::Sequential model_;
  nn::AdamW adam_;
  nn::TrainStep step_;
  int count_ = 0;
};

// What is held after 200 steps is what is held after 2,000 and after 2,000 more, compiled or call
// by call.
class ModelMemoryTest : public MemoryTest {
 protected:
  using Step = absl::StatusOr<Tensor> (ModelRank::*)();
  void ExpectFlatSteps(Step step) {
    Start();
    ASSERT_FALSE(HasFailure());
    const auto train = [&](int steps) {
      Seen seen;
      std::vector<std::unique_ptr<ModelRank>> ranks(kRanks);
      ForEachRank([&](int index, World* world) {
        ranks[static_cast<size_t>(index)] = std::make_unique<ModelRank>(*world);
        ModelRank* const rank = ranks[static_cast<size_t>(index)].get();
        std::deque<Tensor> losses;
        for (int i = 0; i < steps; ++i) {
          const absl::StatusOr<Tensor> loss = (rank->*step)();
          ASSERT_TRUE(loss.ok()) << loss.status();
          losses.push_back(*loss);
          if (losses.size() <= kUnderWay) continue;
          const absl::Status status = losses.front().Wait();
          ASSERT_TRUE(status.ok()) << status;
          losses.pop_front();
        }
        losses.clear();
        rank->Wait();
        Settle(*world);
      });
      seen.held = HeldNow();
      seen.heap = Heap();
      ranks.clear();
      seen.memory = MemoryWithoutTensors();
      return seen;
    };
    const Seen before = train(kModelWarmUp);
    ASSERT_FALSE(HasFailure());
    // Parameters, buffers and the optimizer's state.
    EXPECT_GE(std::get<0>(before.held.sessions[0]), 6 + 3 + 2 * 6);
    const Seen after = train(kModelSteps);
    if (!GetParam().heap) {
      ExpectFlat(before, after);
      return;
    }
    EXPECT_EQ(before.held, after.held);
    // What gRPC's threads keep takes longer to be there, and on a busy machine a thread that has
    // found the others' heaps in use has begun one of its own, of which there are a few. What steps
    // leave behind comes with each phase.
    Seen last = after;
    Seen next = train(kModelSteps);
    for (int more = 0; more < 3 && next.heap - last.heap >= kGrowth; ++more) {
      last = std::exchange(next, train(kModelSteps));
    }
    ExpectFlat(last, next);
  }
};

TEST_P(ModelMemoryTest, CompiledStepsLeaveNothingBehind) {
  ExpectFlatSteps(&ModelRank::CompiledStep);
}

TEST_P(ModelMemoryTest, EagerStepsLeaveNothingBehind) { ExpectFlatSteps(&ModelRank::EagerStep); }

const Mode kHost = {"Host", {}, true};
const Mode kSim = {"Sim", {"--backend=sim", "--sim_seed=1"}, false};
std::string NameOf(const ::testing::TestParamInfo<Mode>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(
    Modes, MemoryTest,
    ::testing::Values(kHost, Mode{"EveryRankForItself", {"--noshare_equal_work"}, true}, kSim),
    NameOf);
INSTANTIATE_TEST_SUITE_P(Modes, ModelMemoryTest, ::testing::Values(kHost, kSim), NameOf);

}  // namespace
}  // namespace chorus
