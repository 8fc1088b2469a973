#include "core/backend/reduction.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/backend/testing/naive_reduction.h"
#include "core/tensor/half.h"
#include "gtest/gtest.h"
#include "hwy/targets.h"

namespace chorus {
namespace {

// Bytes that start at a chosen byte of a cache line, with others behind them.
class Shifted {
 public:
  Shifted(const std::vector<uint8_t>& bytes, int64_t shift)
      : storage_(bytes.size() + 192, 0xee), bytes_(static_cast<int64_t>(bytes.size())) {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    begin_ = storage_.data() + (64 - address % 64) + shift;
    if (!bytes.empty()) std::memcpy(begin_, bytes.data(), bytes.size());
  }
  uint8_t* data() { return begin_; }
  std::vector<uint8_t> bytes() const { return std::vector<uint8_t>(begin_, begin_ + bytes_); }
  bool surroundings_intact() const {
    const auto untouched = [](uint8_t b) { return b == 0xee; };
    const uint8_t* const first = storage_.data();
    return std::all_of(first, static_cast<const uint8_t*>(begin_), untouched) &&
           std::all_of(static_cast<const uint8_t*>(begin_) + bytes_, first + storage_.size(),
                       untouched);
  }

 private:
  std::vector<uint8_t> storage_;
  uint8_t* begin_ = nullptr;
  int64_t bytes_ = 0;
};

std::vector<double> Factors(size_t n) {
  // Numbers of f32; products with them round.
  std::vector<double> factors(n);
  for (size_t k = 0; k < n; ++k) factors[k] = k == 2 ? -0.0 : static_cast<float>(0.3 * (k + 1));
  return factors;
}

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t shift = 0;
  bool streaming = false;
  bool in_place = false;
};

// Every element of a range, bit for bit, and nothing outside.
void CheckRange(Reduction reduction, DType dtype, int n, const Range& r, std::mt19937_64* random) {
  SCOPED_TRACE(absl::StrCat(ReductionName(reduction), " ", DTypeName(dtype), ", ", n, " inputs, [",
                            r.begin, ", ", r.end, "), shift ", r.shift, ", streaming ", r.streaming,
                            ", in place ", r.in_place));
  const int64_t element = DTypeBytes(dtype);
  const int64_t count = r.end + 5;
  std::vector<Shifted> memory;
  memory.reserve(n + 1);
  std::vector<const void*> inputs;
  for (int k = 0; k < n; ++k) {
    // Inputs stand at addresses of their own, even odd ones.
    memory.emplace_back(RandomElements(dtype, count, /*with_nan=*/true, random),
                        (k * 4 + r.shift) % 64);
    inputs.push_back(memory.back().data());
  }
  if (!r.in_place) memory.emplace_back(std::vector<uint8_t>(count * element, 0xdd), r.shift);
  Shifted* const output = &memory[r.in_place ? n - 1 : n];
  std::vector<uint8_t> expected = output->bytes();
  const std::vector<double> factors = Factors(n);
  for (int64_t i = r.begin; i < r.end; ++i) {
    std::vector<const uint8_t*> operands;
    for (int k = 0; k < n; ++k) operands.push_back(memory[k].data() + i * element);
    NaiveReduce(reduction, dtype, operands, factors, n + 1, expected.data() + i * element);
  }
  ReducePass pass;
  pass.inputs = inputs.data();
  pass.num_inputs = n;
  const ReductionTree tree = ReductionTree::Whole(n);
  pass.steps = tree.steps();
  pass.output = output->data();
  const std::vector<double> ones(n, 1);
  pass.factors = reduction == Reduction::kAvg ? ones.data() : factors.data();
  pass.divisor = reduction == Reduction::kAvg ? n + 1 : 1;
  FindReduction(reduction, dtype)(pass, r.begin, r.end, r.streaming);
  const std::vector<uint8_t> got = output->bytes();
  const auto differ = std::mismatch(got.begin(), got.end(), expected.begin());
  ASSERT_EQ(got, expected) << "first at element " << (differ.first - got.begin()) / element;
  for (const Shifted& m : memory) ASSERT_TRUE(m.surroundings_intact());
}

// All lengths modulo a block of any width of vector, and some more.
std::vector<int64_t> Counts() {
  std::vector<int64_t> counts;
  for (int64_t count = 0; count < 68; ++count) counts.push_back(count);
  for (const int64_t count : {127, 128, 129, 191, 193, 255, 256, 257, 320, 321, 511, 513, 1021}) {
    counts.push_back(count);
  }
  return counts;
}

class ReductionTest : public testing::TestWithParam<int64_t> {
 protected:
  // One of the instruction sets that this machine and this build have.
  void SetUp() override { hwy::SetSupportedTargetsForTest(GetParam()); }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(ReductionTest, EveryReductionOfEveryDTypeEqualsTheDefinitionBitForBit) {
  std::mt19937_64 random(20);
  for (const DType dtype : ReducedDTypes()) {
    for (const Reduction reduction : ReductionsOf(dtype)) {
      ASSERT_NE(FindReduction(reduction, dtype), nullptr);
      for (const int n : {1, 2, 3, 4, 7, 9}) {
        for (const int64_t count : Counts()) {
          for (int round = 0; round < 2; ++round) {
            static constexpr int64_t kShifts[] = {0, 4, 8, 60, 1};
            Range r;
            r.begin = static_cast<int64_t>(random() % 14);
            r.end = r.begin + count;
            r.shift = kShifts[random() % 5];
            r.streaming = random() % 2 == 0;
            r.in_place = random() % 2 == 0;
            CheckRange(reduction, dtype, n, r, &random);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_P(ReductionTest, HoldersAreCountedWhereTheyHold) {
  std::mt19937_64 random(21);
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    const int64_t element = DTypeBytes(dtype);
    for (const Reduction reduction : {Reduction::kMin, Reduction::kMax}) {
      for (const int n : {1, 2, 3, 8}) {
        for (const int64_t count : {1, 2, 7, 15, 16, 17, 33, 257}) {
          const int64_t begin = count % 3;
          const int64_t end = begin + count;
          std::vector<Shifted> memory;
          memory.reserve(n + 1);
          std::vector<const void*> inputs;
          std::vector<std::vector<float>> got(n, std::vector<float>(end + 1, -7));
          std::vector<float*> holders;
          for (int k = 0; k < n; ++k) {
            memory.emplace_back(RandomElements(dtype, end, true, &random), k * 4 + 1);
            inputs.push_back(memory.back().data());
            holders.push_back(k == 1 ? nullptr : got[k].data());
          }
          // Ties are rare among so many numbers.
          for (int64_t i = 0; i < end; i += 2) {
            for (int k = 1; k < n; ++k) {
              if (random() % 2 == 0) continue;
              std::memcpy(memory[k].data() + i * element, memory[0].data() + i * element, element);
            }
          }
          std::vector<uint8_t> result(end * element);
          std::vector<std::vector<float>> expected = got;
          for (int64_t i = begin; i < end; ++i) {
            std::vector<const uint8_t*> operands;
            for (int k = 0; k < n; ++k) operands.push_back(memory[k].data() + i * element);
            NaiveReduce(reduction, dtype, operands, {}, 1, result.data() + i * element);
            for (int k = 0; k < n; ++k) {
              if (k == 1) continue;
              expected[k][i] = NaiveHolders(dtype, operands, result.data() + i * element, k);
            }
          }
          FindHolders(dtype)(inputs.data(), n, result.data(), holders.data(), begin, end);
          for (int k = 0; k < n; ++k) {
            ASSERT_EQ(got[k], expected[k]) << DTypeName(dtype) << " " << ReductionName(reduction)
                                           << " input " << k << " of " << n << ", count " << count;
          }
        }
      }
    }
  }
}

// As many copies as fill vectors and leave a rest, all with the same result.
template <typename T>
T Reduced(Reduction reduction, DType dtype, const std::vector<T>& operands, double divisor = 1) {
  constexpr int64_t kCount = 1027;
  std::vector<std::vector<T>> data;
  std::vector<const void*> inputs;
  for (const T& operand : operands) data.emplace_back(kCount, operand);
  for (const auto& input : data) inputs.push_back(input.data());
  std::vector<T> output(kCount);
  const std::vector<double> ones(operands.size(), 1);
  ReducePass pass;
  pass.inputs = inputs.data();
  pass.num_inputs = static_cast<int>(inputs.size());
  const ReductionTree tree = ReductionTree::Whole(pass.num_inputs);
  pass.steps = tree.steps();
  pass.output = output.data();
  pass.factors = ones.data();
  pass.divisor = divisor;
  FindReduction(reduction, dtype)(pass, 0, kCount, false);
  for (const T& element : output) {
    EXPECT_EQ(std::memcmp(&element, &output[0], sizeof(T)), 0) << "not equal everywhere";
  }
  return output[0];
}

template <typename T>
std::vector<T> Numbers(const std::vector<double>& numbers) {
  std::vector<T> result;
  for (const double number : numbers) result.push_back(T(static_cast<float>(number)));
  return result;
}

TEST_P(ReductionTest, HalfTypesAccumulateInFloatAndRoundOnceToNearestEven) {
  const auto f16 = [](Reduction r, const std::vector<double>& x, double divisor = 1) {
    return static_cast<double>(float{Reduced(r, DType::kF16, Numbers<F16>(x), divisor)});
  };
  const auto bf16 = [](Reduction r, const std::vector<double>& x) {
    return static_cast<double>(float{Reduced(r, DType::kBF16, Numbers<BF16>(x))});
  };
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(f16(Reduction::kSum, {2048, 1}), 2048);
  EXPECT_EQ(f16(Reduction::kSum, {2050, 1}), 2052);
  EXPECT_EQ(f16(Reduction::kSum, {2048, 1, 1}), 2050);
  EXPECT_EQ(f16(Reduction::kSum, {0.25, 512, 0.25}), 512.5);
  EXPECT_EQ(f16(Reduction::kSum, {65504, 15}), 65504);
  EXPECT_EQ(f16(Reduction::kSum, {65504, 16}), inf);
  EXPECT_EQ(f16(Reduction::kSum, {-65504, -65504, 65504}), -65504);
  EXPECT_EQ(f16(Reduction::kAvg, {60000, 60000}, 2), 60000);
  EXPECT_EQ(f16(Reduction::kAvg, {2048, 2, 1}, 3), 683.5);  // 683.67
  const double tiny = std::ldexp(1, -24);
  EXPECT_EQ(f16(Reduction::kProduct, {tiny, 0.5}), 0);
  EXPECT_EQ(f16(Reduction::kProduct, {3 * tiny, 0.5}), 2 * tiny);
  EXPECT_EQ(f16(Reduction::kProduct, {tiny, 0.75}), tiny);
  EXPECT_EQ(f16(Reduction::kProduct, {1024, 1024, tiny}), 1.0 / 16);
  EXPECT_EQ(bf16(Reduction::kSum, {256, 1}), 256);
  EXPECT_EQ(bf16(Reduction::kSum, {258, 1}), 260);
  EXPECT_EQ(bf16(Reduction::kSum, {256, 1, 1}), 258);
  EXPECT_EQ(bf16(Reduction::kSum, {3.3895e38, 3.3895e38}), inf);
}

TEST_P(ReductionTest, EveryHalfNumberComesThrough) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    std::vector<uint16_t> bits(1 << 16);
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
    std::vector<uint16_t> output(bits.size());
    const void* inputs[] = {bits.data(), bits.data()};
    ReducePass pass;
    pass.inputs = inputs;
    pass.num_inputs = 2;
    const ReductionTree tree = ReductionTree::Whole(2);
    pass.steps = tree.steps();
    pass.output = output.data();
    FindReduction(Reduction::kMax, dtype)(pass, 0, static_cast<int64_t>(bits.size()), false);
    for (size_t i = 0; i < bits.size(); ++i) {
      const bool nan = (bits[i] & 0x7fff) > (dtype == DType::kF16 ? 0x7c00 : 0x7f80);
      const uint16_t expected = !nan ? bits[i] : dtype == DType::kF16 ? 0x7e00 : 0x7fc0;
      ASSERT_EQ(output[i], expected) << DTypeName(dtype) << " bits " << i;
    }
  }
}

TEST_P(ReductionTest, NaNIsOneNaNWhoeverHoldsItAndTheFirstZeroStays) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const auto bits = [](Reduction r, const std::vector<float>& x) {
    return FloatBits(Reduced(r, DType::kF32, x));
  };
  const float other = FloatOfBits(0xffc12345);
  const float signalling = FloatOfBits(0x7f800001);
  for (const Reduction r :
       {Reduction::kMin, Reduction::kMax, Reduction::kSum, Reduction::kProduct, Reduction::kAvg}) {
    for (const float x : {nan, other, signalling}) {
      EXPECT_EQ(bits(r, {x, 1, 2}), 0x7fc00000u) << ReductionName(r);
      EXPECT_EQ(bits(r, {1, x, 2}), 0x7fc00000u) << ReductionName(r);
      EXPECT_EQ(bits(r, {1, -inf, inf, x}), 0x7fc00000u) << ReductionName(r);
      EXPECT_EQ(bits(r, {other, x}), 0x7fc00000u) << ReductionName(r);
    }
  }
  EXPECT_EQ(bits(Reduction::kSum, {inf, -inf}), 0x7fc00000u);
  for (const Reduction r : {Reduction::kMin, Reduction::kMax}) {
    EXPECT_EQ(bits(r, {0.0f, -0.0f}), FloatBits(0.0f)) << ReductionName(r);
    EXPECT_EQ(bits(r, {-0.0f, 0.0f}), FloatBits(-0.0f)) << ReductionName(r);
    EXPECT_EQ(bits(r, {-0.0f, -0.0f, 0.0f, 0.0f}), FloatBits(-0.0f)) << ReductionName(r);
    EXPECT_EQ(bits(r, {0.0f, -0.0f, -0.0f, -0.0f, -0.0f}), FloatBits(0.0f)) << ReductionName(r);
  }
}

// What partial results do where left to right would do something else.
TEST_P(ReductionTest, PartialResultsMayRoundAndOverflowElsewhere) {
  const auto f32 = [](Reduction r, const std::vector<float>& x) {
    return Reduced(r, DType::kF32, x);
  };
  EXPECT_EQ(f32(Reduction::kSum, {1e8f, 1, -1e8f, 1}), 0);
  EXPECT_TRUE(std::isnan(f32(Reduction::kSum, {3e38f, 3e38f, -3e38f, -3e38f})));
  EXPECT_TRUE(std::isnan(f32(Reduction::kProduct, {1e30f, 1e30f, 1e-30f, 1e-30f})));
  EXPECT_EQ(f32(Reduction::kProduct, {1e30f, 1e-30f, 1e30f, 1e-30f}), 1);
}

// The tree as it is said, of the ranks that are there, and as its steps make it.
TEST(ReductionTreeTest, StepsMakeTheTreeOverAllRanksWhoeverIsThere) {
  const auto join = [](const std::string& a, const std::string& b) {
    return absl::StrCat("(", a, " ", b, ")");
  };
  const auto check = [&](int size, const std::vector<int>& ranks, ReductionTree* tree) {
    tree->Set(ranks);
    std::vector<std::string> stack;
    size_t k = 0;
    for (const ReductionTree::Step* step = tree->steps(); k < ranks.size(); ++step) {
      ASSERT_LE(k + step->operands, ranks.size());
      std::string partial = *NaiveTree<std::string>(
          0, step->operands,
          [&](int i) { return absl::optional<std::string>(absl::StrCat(ranks[k + i])); }, join);
      for (int joins = step->joins; joins > 0; --joins) {
        ASSERT_FALSE(stack.empty());
        partial = join(stack.back(), partial);
        stack.pop_back();
      }
      stack.push_back(partial);
      ASSERT_LE(stack.size(), ReductionTree::kMaxHeight);
      k += step->operands;
    }
    ASSERT_EQ(stack.size(), 1);
    const auto operand = [&](int rank) -> absl::optional<std::string> {
      if (!std::binary_search(ranks.begin(), ranks.end(), rank)) return absl::nullopt;
      return absl::StrCat(rank);
    };
    ASSERT_EQ(stack[0], *NaiveTree<std::string>(0, size, operand, join));
  };
  ReductionTree tree;
  for (int size = 1; size <= 11; ++size) {
    for (int present = 1; present < 1 << size; ++present) {
      std::vector<int> ranks;
      for (int rank = 0; rank < size; ++rank) {
        if ((present >> rank & 1) != 0) ranks.push_back(rank);
      }
      check(size, ranks, &tree);
      if (HasFatalFailure()) return;
    }
  }
  std::mt19937_64 random(22);
  for (int round = 0; round < 300; ++round) {
    const int size = static_cast<int>(random() % 1024) + 1;
    const uint64_t one_of = random() % 20 + 1;
    std::vector<int> ranks;
    for (int rank = 0; rank < size; ++rank) {
      if (random() % one_of == 0) ranks.push_back(rank);
    }
    if (ranks.empty()) continue;
    check(size, ranks, &tree);
    if (HasFatalFailure()) return;
  }
}

TEST_P(ReductionTest, IntegersWrap) {
  EXPECT_EQ(Reduced<uint8_t>(Reduction::kSum, DType::kU8, {200, 200}), 144);
  EXPECT_EQ(Reduced<int8_t>(Reduction::kProduct, DType::kI8, {-100, 3, 7}),
            static_cast<int8_t>(-2100 & 0xff));
  EXPECT_EQ(
      Reduced<int64_t>(Reduction::kSum, DType::kI64, {std::numeric_limits<int64_t>::max(), 2}),
      std::numeric_limits<int64_t>::min() + 1);
  EXPECT_EQ(Reduced<int64_t>(Reduction::kProduct, DType::kI64, {int64_t{3} << 61, 3}),
            static_cast<int64_t>(uint64_t{9} << 61));
}

TEST_P(ReductionTest, CopiesBytes) {
  for (const int64_t bytes : {0, 1, 63, 64, 65, 300, 1021}) {
    for (const int64_t shift : {0, 1, 63}) {
      for (const bool streaming : {false, true}) {
        std::vector<uint8_t> data(bytes);
        for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i * 7);
        Shifted from(data, 7);
        Shifted to(std::vector<uint8_t>(bytes), shift);
        CopyBytes(to.data(), from.data(), bytes, streaming);
        ASSERT_EQ(to.bytes(), data) << bytes << " bytes, shift " << shift;
        ASSERT_TRUE(to.surroundings_intact());
      }
    }
  }
}

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  for (int64_t left = hwy::SupportedTargets(); left != 0; left &= left - 1) {
    targets.push_back(left & (~left + 1));
  }
  return targets;
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, ReductionTest, testing::ValuesIn(Targets()),
                         [](const testing::TestParamInfo<int64_t>& info) {
                           return std::string(hwy::TargetName(info.param));
                         });

TEST(FindReductionTest, HasNothingForPairsThatMakeNoSense) {
  for (const DType dtype : ReducedDTypes()) {
    const std::vector<Reduction> has = ReductionsOf(dtype);
    for (int r = 0; r <= static_cast<int>(Reduction::kBxor) + 1; ++r) {
      const auto reduction = static_cast<Reduction>(r);
      const bool expected = std::find(has.begin(), has.end(), reduction) != has.end();
      EXPECT_EQ(FindReduction(reduction, dtype) != nullptr, expected)
          << ReductionName(reduction) << " " << DTypeName(dtype);
    }
    EXPECT_EQ(FindHolders(dtype) != nullptr, IsFloating(dtype));
  }
  for (const DType dtype : {DType::kUnspecified, DType::kComplex64, DType::kComplex128}) {
    EXPECT_EQ(FindReduction(Reduction::kSum, dtype), nullptr);
    EXPECT_EQ(FindHolders(dtype), nullptr);
  }
}

TEST(ChangesSingleInputTest, TellsWhatACopyWouldMiss) {
  EXPECT_TRUE(ChangesSingleInput(Reduction::kAvg, DType::kF32));
  EXPECT_TRUE(ChangesSingleInput(Reduction::kPremulSum, DType::kF16));
  EXPECT_TRUE(ChangesSingleInput(Reduction::kMax, DType::kBool));
  EXPECT_FALSE(ChangesSingleInput(Reduction::kMax, DType::kF32));
  EXPECT_FALSE(ChangesSingleInput(Reduction::kSum, DType::kI64));
}

}  // namespace
}  // namespace chorus
