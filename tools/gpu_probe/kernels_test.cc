// The kernels' own bodies on the CPU: against core/backend/reduction.h, against naive loops, and
// cut into any number of threads.
#include "tools/gpu_probe/kernels.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/types/span.h"
#include "core/backend/reduction.h"
#include "gtest/gtest.h"
#include "tools/gpu_probe/chains.h"
#include "tools/gpu_probe/host_reference.h"

namespace chorus {
namespace probe {
namespace {

using Words = std::vector<uint32_t>;

const int64_t kPacks[] = {0, 1, 2, 7, 31, 32, 33, 1021};
const int64_t kThreads[] = {1, 2, 3, 64, 2048};

// All threads of a launch, one after the other, each with scratch memory of its own.
template <typename Args>
void RunThreads(const Args& args, int64_t threads,
                const std::function<void(const Args&, const Lane&)>& body) {
  for (int64_t index = 0; index < threads; ++index) {
    std::vector<Pack> scratch(Args::kScratchPacks + 1);
    Lane lane;
    lane.index = index;
    lane.count = threads;
    lane.scratch = scratch.data();
    body(args, lane);
  }
}

// Packs with a sentinel behind them.
struct Buffer {
  explicit Buffer(int64_t packs) : data(packs + 1) {
    std::memset(data.data(), 0xee, data.size() * sizeof(Pack));
  }
  static Buffer Pattern(int64_t packs, uint64_t seed) {
    Buffer buffer(packs);
    for (int64_t i = 0; i < 4 * packs; ++i) {
      buffer.data[i / 4].f[i % 4] = cuda::FloatOf(PatternFloatBits(seed, i));
    }
    return buffer;
  }
  bool sentinel_intact() const {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(&data.back());
    for (size_t i = 0; i < sizeof(Pack); ++i) {
      if (bytes[i] != 0xee) return false;
    }
    return true;
  }
  std::vector<Pack> data;
};

template <int kRanks>
void ExpectReductionsBits() {
  const ReduceFunction reduce = FindReduction(Reduction::kSum, DType::kF32);
  ASSERT_NE(reduce, nullptr);
  const ReductionTree tree = ReductionTree::Whole(kRanks);
  for (const int64_t packs : {int64_t{33}, int64_t{1021}, int64_t{20000}}) {
    std::vector<Buffer> inputs;
    for (int r = 0; r < kRanks; ++r) inputs.push_back(Buffer::Pattern(packs, 100 + r));
    ReducePass pass;
    std::vector<const void*> pointers;
    for (const Buffer& input : inputs) pointers.push_back(input.data.data());
    std::vector<float> expected(4 * packs);
    pass.inputs = pointers.data();
    pass.num_inputs = kRanks;
    pass.steps = tree.steps();
    pass.output = expected.data();
    reduce(pass, 0, 4 * packs, false);
    for (const int64_t threads : kThreads) {
      Buffer output(packs);
      OrderedSumArgs<kRanks> args;
      for (int r = 0; r < kRanks; ++r) args.in[r] = inputs[r].data.data();
      args.out = output.data.data();
      args.packs = packs;
      RunThreads<OrderedSumArgs<kRanks>>(
          args, threads, [](const auto& a, const Lane& lane) { OrderedSum(a, lane); });
      EXPECT_EQ(std::memcmp(output.data.data(), expected.data(), 16 * packs), 0)
          << kRanks << " ranks, " << packs << " packs, " << threads << " threads";
      EXPECT_TRUE(output.sentinel_intact());
    }
    if (kRanks != 2 && kRanks != 4 && kRanks != 8) continue;  // that have kernels
    Buffer on_host(packs);
    std::vector<const Pack*> packs_of;
    for (const Buffer& input : inputs) packs_of.push_back(input.data.data());
    OrderedSumOnHost(kRanks, packs_of.data(), on_host.data.data(), packs);
    EXPECT_EQ(std::memcmp(on_host.data.data(), expected.data(), 16 * packs), 0);
  }
}

TEST(OrderedSumTest, HasTheBitsOfTheHostsReduction) {
  ExpectReductionsBits<2>();
  ExpectReductionsBits<4>();
  ExpectReductionsBits<8>();
  // Trees that are not whole have no kernel of their own yet, but are the same template.
  ExpectReductionsBits<3>();
  ExpectReductionsBits<5>();
  ExpectReductionsBits<7>();
}

TEST(OrderedSumTest, ThePatternsHaveWhatIsHard) {
  int nan = 0, infinite = 0, zero = 0, subnormal = 0, order_matters = 0;
  for (int64_t i = 0; i < 20000; ++i) {
    const float v = cuda::FloatOf(PatternFloatBits(100, i));
    nan += std::isnan(v);
    infinite += std::isinf(v);
    zero += v == 0 && std::signbit(v);
    subnormal += std::fpclassify(v) == FP_SUBNORMAL;
    float a[4];
    for (int r = 0; r < 4; ++r) a[r] = cuda::FloatOf(PatternFloatBits(100 + r, i));
    order_matters += ((a[0] + a[1]) + a[2]) + a[3] != (a[0] + a[1]) + (a[2] + a[3]);
  }
  EXPECT_GT(nan, 10);
  EXPECT_GT(infinite, 10);
  EXPECT_GT(zero, 10);
  EXPECT_GT(subnormal, 10);
  EXPECT_GT(order_matters, 1000);
}

TEST(CopyTest, CopiesAllAndNoMore) {
  for (const int64_t packs : kPacks) {
    const Buffer from = Buffer::Pattern(packs, 3);
    for (const int64_t threads : kThreads) {
      Buffer to(packs);
      CopyArgs args;
      args.from = from.data.data();
      args.to = to.data.data();
      args.packs = packs;
      RunThreads<CopyArgs>(args, threads, &Copy);
      EXPECT_EQ(std::memcmp(to.data.data(), from.data.data(), 16 * packs), 0);
      EXPECT_TRUE(to.sentinel_intact());
    }
  }
}

// --- Chains ---

// What a chain's outputs are, element by element.
std::vector<std::vector<float>> Naive(const ChainArgs& args) {
  std::vector<std::vector<float>> outputs(args.outputs);
  for (int64_t i = 0; i < 4 * args.packs; ++i) {
    float slot[ChainArgs::kSlots] = {};
    for (int k = 0; k < args.inputs; ++k) slot[k] = args.in[k][i / 4].f[i % 4];
    float v = 0;
    for (int n = 0; n < args.ops; ++n) {
      const ChainOp& op = args.op[n];
      volatile float rounded = v;
      if (op.code == ChainCode::kLoad) rounded = slot[op.slot];
      if (op.code == ChainCode::kStore) slot[op.slot] = v;
      if (op.code == ChainCode::kAdd) rounded = v + slot[op.slot];
      if (op.code == ChainCode::kMul) rounded = v * slot[op.slot];
      if (op.code == ChainCode::kAddNumber) rounded = v + op.number;
      if (op.code == ChainCode::kMulNumber) rounded = v * op.number;
      if (op.code == ChainCode::kRelu) rounded = v > 0 ? v : 0;
      v = rounded;
    }
    for (int k = 0; k < args.outputs; ++k) outputs[k].push_back(slot[args.output_slot[k]]);
  }
  return outputs;
}

bool Same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || cuda::BitsOf(a) == cuda::BitsOf(b);
}

void ExpectNaive(ChainArgs args) {
  for (const int64_t packs : kPacks) {
    std::vector<Buffer> inputs;
    for (int k = 0; k < args.inputs; ++k) inputs.push_back(Buffer::Pattern(packs, 50 + k));
    for (int k = 0; k < args.inputs; ++k) args.in[k] = inputs[k].data.data();
    args.packs = packs;
    const auto expected = Naive(args);
    for (const int64_t threads : kThreads) {
      std::vector<Buffer> outputs(args.outputs, Buffer(packs));
      for (int k = 0; k < args.outputs; ++k) args.out[k] = outputs[k].data.data();
      RunThreads<ChainArgs>(args, threads, &Chain);
      for (int k = 0; k < args.outputs; ++k) {
        EXPECT_TRUE(outputs[k].sentinel_intact());
        for (int64_t i = 0; i < 4 * packs; ++i) {
          ASSERT_TRUE(Same(outputs[k].data[i / 4].f[i % 4], expected[k][i]))
              << args.ops << " ops, output " << k << ", element " << i << " of " << packs
              << " packs, " << threads << " threads";
        }
      }
    }
  }
}

TEST(ChainTest, ComputesWhatANaiveLoopDoes) {
  for (const int ops : {0, 1, 2, 4, 8, 16}) ExpectNaive(ArithmeticChain(ops));
  ExpectNaive(SgdChain(kSgdDecay, kSgdMinusRate));
}

TEST(ChainTest, AnArithmeticChainHasItsOpsAndALoadAndAStore) {
  for (const int ops : {2, 4, 8, 16}) {
    EXPECT_EQ(ArithmeticChain(ops).ops, ops + 2);
    EXPECT_LE(ArithmeticChain(ops).ops, ChainArgs::kMaxOps);
  }
}

TEST(SgdTest, ByHandHasTheInterpretersBits) {
  for (const int64_t packs : kPacks) {
    std::vector<Buffer> inputs;
    for (int k = 0; k < 3; ++k) inputs.push_back(Buffer::Pattern(packs, 70 + k));
    std::vector<Buffer> interpreted(2, Buffer(packs));
    std::vector<Buffer> by_hand(2, Buffer(packs));
    ChainArgs chain = SgdChain(kSgdDecay, kSgdMinusRate);
    for (int k = 0; k < 3; ++k) chain.in[k] = inputs[k].data.data();
    for (int k = 0; k < 2; ++k) chain.out[k] = interpreted[k].data.data();
    chain.packs = packs;
    RunChainOnHost(chain);
    SgdArgs args;
    args.parameter = chain.in[0];
    args.gradient = chain.in[1];
    args.momentum = chain.in[2];
    args.new_parameter = by_hand[0].data.data();
    args.new_momentum = by_hand[1].data.data();
    args.packs = packs;
    args.decay = kSgdDecay;
    args.minus_rate = kSgdMinusRate;
    RunThreads<SgdArgs>(args, 3, &Sgd);
    for (int k = 0; k < 2; ++k) {
      EXPECT_TRUE(by_hand[k].sentinel_intact());
      for (int64_t i = 0; i < 4 * packs; ++i) {
        ASSERT_TRUE(Same(by_hand[k].data[i / 4].f[i % 4], interpreted[k].data[i / 4].f[i % 4]));
      }
    }
  }
}

// --- The others ---

TEST(PatternTest, CheckCountsWhatFillDidNotWrite) {
  Words words(1000, 0);
  FillArgs fill;
  fill.to = words.data();
  fill.words = 999;
  fill.seed = 5;
  RunThreads<FillArgs>(fill, 7, &Fill);
  EXPECT_EQ(words[999], 0u);
  uint64_t wrong = 0;
  CheckArgs check;
  check.from = words.data();
  check.words = 999;
  check.seed = 5;
  check.wrong = &wrong;
  RunThreads<CheckArgs>(check, 13, &Check);
  EXPECT_EQ(wrong, 0u);
  words[0] ^= 1;
  words[998] ^= 0x80000000u;
  RunThreads<CheckArgs>(check, 13, &Check);
  EXPECT_EQ(wrong, 2u);
  wrong = 0;
  check.seed = 6;
  RunThreads<CheckArgs>(check, 1, &Check);
  EXPECT_GT(wrong, 990u);
}

TEST(CountUpTest, StandsStillOutOfOrder) {
  uint32_t word = 0;
  const auto count = [&](uint32_t expected) {
    CountUpArgs args;
    args.word = &word;
    args.expected = expected;
    RunThreads<CountUpArgs>(args, 32, &CountUp);
  };
  count(0);
  count(2);
  EXPECT_EQ(word, 1u);
  count(1);
  count(2);
  EXPECT_EQ(word, 3u);
}

TEST(SpinTest, EndsByItsFlagAndByItsTime) {
  uint32_t stop = 1;
  uint32_t started = 0;
  SpinArgs args;
  args.stop = &stop;
  args.started = &started;
  args.nanos = std::numeric_limits<int64_t>::max();
  Spin(args, Lane());
  EXPECT_EQ(started, 1u);
  stop = 0;
  args.nanos = 1000;
  Spin(args, Lane());  // returns
}

TEST(PingPongTest, TwoSidesCountAllRounds) {
  uint32_t flags[2] = {0, 0};
  uint32_t reached[2] = {0, 0};
  uint64_t took[2] = {0, 0};
  const auto side = [&](int mine) {
    PingPongArgs args;
    args.mine = &flags[mine];
    args.theirs = &flags[1 - mine];
    args.rounds = 50;
    args.first = mine == 0 ? 1 : 0;
    args.limit_nanos = int64_t{300} * 1000000000;
    args.reached = &reached[mine];
    args.took_nanos = &took[mine];
    PingPong(args, Lane());
  };
  std::thread other(side, 1);
  side(0);
  other.join();
  for (const int n : {0, 1}) {
    EXPECT_EQ(reached[n], 50u);
    EXPECT_EQ(flags[n], 50u);
  }
}

TEST(PingPongTest, GivesUpWhenNobodyAnswers) {
  uint32_t flags[2] = {0, 0};
  uint32_t reached = 7;
  uint64_t took = 0;
  PingPongArgs args;
  args.mine = &flags[0];
  args.theirs = &flags[1];
  args.rounds = 50;
  args.first = 1;
  args.limit_nanos = 1000;
  args.reached = &reached;
  args.took_nanos = &took;
  PingPong(args, Lane());
  EXPECT_EQ(reached, 0u);
}

}  // namespace
}  // namespace probe
}  // namespace chorus
