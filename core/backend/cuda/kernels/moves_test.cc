// The kernels' own bodies on the CPU, cut into any number of threads: random programs must leave
// every byte of memory as the host's functions do, run as CollectiveWork runs them.
#include "core/backend/cuda/kernels/moves.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/backend/cuda/kernels/kernel_image.h"
#include "core/backend/cuda/kernels/move_program.h"
#include "core/backend/reduction.h"
#include "core/backend/testing/naive_reduction.h"
#include "core/tensor/half.h"
#include "gtest/gtest.h"

namespace chorus {
namespace cuda {
namespace {

// All threads of a launch, one after the other. Their scratch memory is laid out as on a GPU, with
// a sentinel behind it.
template <typename Args>
void RunThreads(const MoveArgs& given, int threads, void (*body)(const Args&, const Lane&)) {
  Args args;
  static_cast<MoveArgs&>(args) = given;
  constexpr int kPacks = Args::kScratchPacks;
  std::vector<Pack> scratch((kPacks + 1) * threads);
  std::memset(scratch.data(), 0xee, scratch.size() * sizeof(Pack));
  for (int index = 0; index < threads; ++index) {
    Lane lane;
    lane.index = index;
    lane.count = threads;
    lane.scratch = scratch.data() + index;
    lane.stride = threads;
    body(args, lane);
  }
  const auto* const behind = reinterpret_cast<const uint8_t*>(scratch.data() + kPacks * threads);
  ASSERT_TRUE(std::all_of(behind, behind + threads * sizeof(Pack),
                          [](uint8_t byte) { return byte == 0xee; }));
}

// Of CHORUS_MOVE_KERNELS, by name.
using Kernel = std::function<void(const MoveArgs& args, int threads)>;

const std::map<std::string, Kernel>& Kernels() {
  static const auto* const kernels = new std::map<std::string, Kernel>{
#define CHORUS_TEST_KERNEL(name, Args, Body) \
  {#name, [](const MoveArgs& args, int threads) { RunThreads<Args>(args, threads, &Body); }},
      CHORUS_MOVE_KERNELS(CHORUS_TEST_KERNEL)
#undef CHORUS_TEST_KERNEL
  };
  return *kernels;
}

// A move, with addresses of this process.
struct TestMove {
  struct Factor {
    int input = 0;
    void* to = nullptr;
  };
  int64_t count = 0;
  int64_t element_bytes = 0;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::vector<float*> holders;  // empty, or one for each input
  std::vector<Factor> factors;
};

struct TestProgram {
  Reduction reduction = Reduction::kNone;
  DType dtype = DType::kF32;
  ReductionTree tree;
  int num_inputs = 1;               // of the tree
  std::vector<const void*> scales;  // numbers of the accumulator; null: 1
  double divisor = 1;
  std::vector<TestMove> moves;
};

// As CollectiveWork::RunChunk.
void RunOnHost(const TestProgram& program) {
  const ReduceFunction reduce = FindReduction(program.reduction, program.dtype);
  std::vector<double> factors(program.num_inputs, 1);
  for (size_t k = 0; k < program.scales.size(); ++k) {
    if (program.scales[k] == nullptr) continue;
    if (program.dtype == DType::kF64) {
      std::memcpy(&factors[k], program.scales[k], sizeof(double));
    } else {
      float narrow = 0;
      std::memcpy(&narrow, program.scales[k], sizeof(narrow));
      factors[k] = narrow;
    }
  }
  for (const TestMove& move : program.moves) {
    const int64_t bytes = move.count * move.element_bytes;
    for (const TestMove::Factor& factor : move.factors) {
      std::memcpy(factor.to, move.inputs[factor.input], bytes);
    }
    std::vector<uint8_t> result(bytes + 1);
    const int inputs = static_cast<int>(move.inputs.size());
    const bool reduces = reduce != nullptr &&
                         inputs > (ChangesSingleInput(program.reduction, program.dtype) ? 0 : 1);
    if (reduces) {
      ReducePass pass;
      pass.inputs = move.inputs.data();
      pass.num_inputs = inputs;
      pass.steps = program.tree.steps();
      pass.output = result.data();
      pass.factors = factors.data();
      pass.divisor = program.divisor;
      reduce(pass, 0, move.count, /*streaming=*/false);
    } else if (inputs > 0) {
      std::memcpy(result.data(), move.inputs[0], bytes);
    }
    if (!move.holders.empty()) {
      FindHolders(program.dtype)(move.inputs.data(), inputs, result.data(), move.holders.data(), 0,
                                 move.count);
    }
    for (void* const output : move.outputs) std::memcpy(output, result.data(), bytes);
  }
}

uint64_t Address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

void Write(const TestProgram& from, MoveProgram* to) {
  to->Clear();
  for (const TestMove& move : from.moves) {
    to->AddMove(move.count, move.element_bytes);
    for (const void* const input : move.inputs) to->AddInput(Address(input));
    for (const void* const output : move.outputs) to->AddOutput(Address(output));
    for (const float* const holders : move.holders) to->AddHolders(Address(holders));
    for (const auto& factor : move.factors) to->AddFactor(factor.input, Address(factor.to));
  }
  if (from.reduction != Reduction::kNone) {
    ASSERT_TRUE(to->SetSteps(from.tree.steps(), from.num_inputs).ok());
  }
  for (const void* const scale : from.scales) to->AddScale(Address(scale));
  to->set_divisor(from.divisor);
}

// A GPU refuses what a CPU does: an address that the width of an access does not divide.
void ExpectWidestThatAligns(const TestProgram& test, absl::Span<const char> program) {
  for (size_t m = 0; m < test.moves.size(); ++m) {
    const TestMove& move = test.moves[m];
    uint64_t all = kUnitBytes;
    for (const void* const input : move.inputs) all |= Address(input);
    for (const void* const output : move.outputs) all |= Address(output);
    for (const auto& factor : move.factors) all |= Address(factor.to);
    for (const float* const holders : move.holders) {
      if (test.dtype != DType::kF64) all |= Address(holders);
    }
    MoveEntry entry;
    std::memcpy(&entry, program.data() + sizeof(ProgramHeader) + m * sizeof(entry), sizeof(entry));
    int32_t widest = 1;
    while (all % (2 * widest) == 0) widest *= 2;
    ASSERT_EQ(entry.width, widest) << "move " << m;
  }
}

// Memory of a test, all of one size, from which operands are cut.
class Arena {
 public:
  explicit Arena(std::mt19937_64* random) : random_(random), memory_((kBytes + 64) / 64) {}

  void Reset() { used_ = 0; }
  uint8_t* data() { return memory_.front().bytes; }
  size_t used() const { return used_; }
  // Aligned to 16 bytes, or in half of all cases if `any` only to `element_bytes`.
  uint8_t* Take(int64_t bytes, int64_t element_bytes, bool any) {
    used_ = (used_ + 15) / 16 * 16 + 16;
    if (any && (*random_)() % 2 == 0) used_ += (*random_)() % 16 / element_bytes * element_bytes;
    uint8_t* const taken = data() + used_;
    used_ += bytes;
    EXPECT_LE(used_ + 16, kBytes);
    return taken;
  }

 private:
  static constexpr size_t kBytes = size_t{4} << 20;
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::mt19937_64* random_;
  std::vector<Line> memory_;
  size_t used_ = 0;
};

class MovesTest : public testing::Test {
 protected:
  static constexpr uint64_t kSeed = 30;

  uint64_t Below(uint64_t end) { return random_() % end; }
  bool Chance(uint64_t one_of) { return Below(one_of) == 0; }

  int64_t RandomCount(bool large) {
    switch (Below(4)) {
      case 0:
        return static_cast<int64_t>(Below(4));
      case 1:
        return static_cast<int64_t>(Below(4)) * 16;
      case 2:
        return static_cast<int64_t>(Below(70));
      default:
        return static_cast<int64_t>(Below(large ? 1001 : 100));
    }
  }

  // Some members of a group of 1 to 9, of which some may be absent, or of 64.
  void RandomTree(TestProgram* program) {
    const int size = Chance(12) ? 64 : static_cast<int>(Below(9)) + 1;
    const uint64_t absent_one_of = Chance(2) ? 1000 : Below(4) + 2;
    std::vector<int32_t> ranks;
    for (int rank = 0; rank < size; ++rank) {
      if (!Chance(absent_one_of)) ranks.push_back(rank);
    }
    if (ranks.empty()) ranks.push_back(size - 1);
    program->tree.Set(ranks);
    program->num_inputs = static_cast<int>(ranks.size());
    if (program->reduction == Reduction::kAvg) {
      program->divisor = size;
      if (Chance(2)) program->scales.resize(ranks.size());
    }
    if (program->reduction != Reduction::kPremulSum) return;
    const bool wide = program->dtype == DType::kF64;
    for (size_t k = 0; k < ranks.size(); ++k) {
      const double number = Chance(8) ? -0.0 : static_cast<double>(Below(100003)) / 7919 - 6;
      const auto narrow = static_cast<float>(number);
      uint8_t* const scale = arena_.Take(wide ? 8 : 4, wide ? 8 : 4, true);
      std::memcpy(scale, wide ? static_cast<const void*>(&number) : &narrow, wide ? 8 : 4);
      program->scales.push_back(Chance(5) ? nullptr : scale);
    }
  }

  uint8_t* RandomOperand(DType dtype, int64_t count, bool any) {
    const std::vector<uint8_t> elements = RandomElements(dtype, count, /*with_nan=*/true, &random_);
    uint8_t* const to = arena_.Take(static_cast<int64_t>(elements.size()), DTypeBytes(dtype), any);
    if (!elements.empty()) std::memcpy(to, elements.data(), elements.size());
    return to;
  }

  TestMove RandomMove(const TestProgram& program) {
    const DType dtype = program.dtype;
    TestMove move;
    move.element_bytes = DTypeBytes(dtype);
    move.count = RandomCount(program.num_inputs < 10);
    const bool any = Chance(2);  // else all operands are aligned
    const auto take = [&] {
      return arena_.Take(move.count * move.element_bytes, move.element_bytes, any);
    };
    const bool zeros = Chance(6);
    if (zeros && Chance(2)) move.element_bytes = sizeof(float);
    std::vector<uint8_t*> inputs;
    for (int k = 0; k < (zeros ? 0 : program.num_inputs); ++k) {
      inputs.push_back(RandomOperand(dtype, move.count, any));
    }
    // Ties are rare among so many numbers.
    for (int64_t i = 0; i < move.count; ++i) {
      for (size_t k = 1; k < inputs.size(); ++k) {
        if (!Chance(4)) continue;
        std::memcpy(inputs[k] + i * move.element_bytes, inputs[0] + i * move.element_bytes,
                    move.element_bytes);
      }
    }
    move.inputs.assign(inputs.begin(), inputs.end());
    const uint64_t outputs = Chance(10) ? 0 : Below(3) + 1;
    for (uint64_t k = 0; k < outputs; ++k) move.outputs.push_back(take());
    if (outputs > 0 && !inputs.empty() && Chance(2)) {
      move.outputs[Below(outputs)] = inputs[Below(inputs.size())];
    }
    const bool ordered =
        program.reduction == Reduction::kMin || program.reduction == Reduction::kMax;
    if (ordered && IsFloating(dtype) && !inputs.empty() && Chance(2)) {
      for (size_t k = 0; k < inputs.size(); ++k) {
        uint8_t* const to = arena_.Take(move.count * 4, 4, any);
        move.holders.push_back(Chance(4) ? nullptr : reinterpret_cast<float*>(to));
      }
    }
    if (program.reduction == Reduction::kProduct && !inputs.empty() && Chance(2)) {
      for (uint64_t k = Below(4); k > 0; --k) {
        move.factors.push_back({static_cast<int>(Below(inputs.size())), take()});
      }
    }
    return move;
  }

  TestProgram RandomProgram(Reduction reduction, DType dtype) {
    arena_.Reset();
    TestProgram program;
    program.reduction = reduction;
    program.dtype = dtype;
    if (reduction != Reduction::kNone) RandomTree(&program);
    const uint64_t most = program.num_inputs < 10 ? 5 : 2;
    for (uint64_t k = Below(most + 1); k > 0; --k) program.moves.push_back(RandomMove(program));
    arena_.Take(0, 1, false);  // a gap, as between the others
    return program;
  }

  // Whatever the number of threads, and wherever the program stands.
  void ExpectHostsBytes(const TestProgram& test) {
    uint8_t* const memory = arena_.data();
    const std::vector<uint8_t> before(memory, memory + arena_.used());
    RunOnHost(test);
    const std::vector<uint8_t> expected(memory, memory + arena_.used());
    Write(test, &program_);
    const absl::Span<const char> bytes = program_.Bytes();
    ExpectWidestThatAligns(test, bytes);
    const char* const name = MoveKernelName(test.reduction, test.dtype);
    ASSERT_NE(name, nullptr);
    for (const int threads : {1, 7, 256}) {
      const bool fits = bytes.size() <= MoveArgs::kInlineBytes;
      inline_programs_ += fits ? 1 : 0;
      const MoveArgs args = program_.Arguments(fits && Chance(2) ? 0 : Address(bytes.data()));
      std::copy(before.begin(), before.end(), memory);
      Kernels().at(name)(args, threads);
      const auto differ = std::mismatch(expected.begin(), expected.end(), memory);
      ASSERT_EQ(differ.first, expected.end())
          << name << ", " << test.num_inputs << " inputs, " << test.moves.size() << " moves, "
          << threads << " threads: byte " << differ.first - expected.begin() << " of "
          << expected.size() << Where(test, differ.second);
    }
  }

  static std::string Where(const TestProgram& test, const uint8_t* byte) {
    for (size_t m = 0; m < test.moves.size(); ++m) {
      const TestMove& move = test.moves[m];
      const auto in = [&](const void* operand, int64_t element) {
        const int64_t at = byte - static_cast<const uint8_t*>(operand);
        return at >= 0 && at < move.count * element ? at / element : -1;
      };
      const auto text = [&](const char* what, int64_t element) {
        return absl::StrCat(", in ", what, " of move ", m, " of ", move.count,
                            " elements: element ", element);
      };
      for (const void* const output : move.outputs) {
        const int64_t element = in(output, move.element_bytes);
        if (element >= 0) return text("an output", element);
      }
      for (const float* const holders : move.holders) {
        const int64_t element = holders == nullptr ? -1 : in(holders, sizeof(float));
        if (element >= 0) return text("holders", element);
      }
      for (const auto& factor : move.factors) {
        const int64_t element = in(factor.to, move.element_bytes);
        if (element >= 0) return text("a factor", element);
      }
    }
    return ", where nobody writes";
  }

  std::mt19937_64 random_{kSeed};
  Arena arena_{&random_};
  MoveProgram program_;
  int64_t inline_programs_ = 0;
};

TEST_F(MovesTest, EveryReductionOfEveryDTypeHasTheHostsBits) {
  for (const DType dtype : ReducedDTypes()) {
    for (const Reduction reduction : ReductionsOf(dtype)) {
      for (int round = 0; round < 60; ++round) {
        SCOPED_TRACE(absl::StrCat("seed ", kSeed, ", ", ReductionName(reduction), " ",
                                  DTypeName(dtype), ", round ", round));
        ExpectHostsBytes(RandomProgram(reduction, dtype));
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GT(inline_programs_, 1000);
}

TEST_F(MovesTest, MovementCopiesBytesOfEveryDType) {
  for (int dtype = static_cast<int>(DType::kF16); dtype <= static_cast<int>(DType::kBool);
       ++dtype) {
    for (int round = 0; round < 60; ++round) {
      SCOPED_TRACE(absl::StrCat("seed ", kSeed, ", ", DTypeName(static_cast<DType>(dtype)),
                                ", round ", round));
      ExpectHostsBytes(RandomProgram(Reduction::kNone, static_cast<DType>(dtype)));
      if (HasFatalFailure()) return;
    }
  }
}

// So many that they must be looked for, some of them empty.
TEST_F(MovesTest, ManyMovesAreFound) {
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE(absl::StrCat("seed ", kSeed, ", round ", round));
    arena_.Reset();
    TestProgram test;
    test.dtype = DType::kI16;
    for (uint64_t k = Below(400); k > 0; --k) {
      TestMove move = RandomMove(test);
      if (Chance(3)) move.count = 0;
      test.moves.push_back(move);
    }
    arena_.Take(0, 1, false);
    ExpectHostsBytes(test);
    if (HasFatalFailure()) return;
  }
}

TEST(MoveProgramTest, APayloadIsKeptWhereNothingIsReduced) {
  const uint32_t nan = 0xffa12345u;
  uint32_t to = 0;
  MoveProgram program;
  program.AddMove(1, 4);
  program.AddInput(Address(&nan));
  program.AddOutput(Address(&to));
  ASSERT_TRUE(program.SetSteps(ReductionTree::Whole(1).steps(), 1).ok());
  for (const Reduction reduction : {Reduction::kSum, Reduction::kMax, Reduction::kProduct}) {
    to = 0;
    Kernels().at(MoveKernelName(reduction, DType::kF32))(program.Arguments(0), 1);
    EXPECT_EQ(to, nan);
  }
  Kernels().at(MoveKernelName(Reduction::kAvg, DType::kF32))(program.Arguments(0), 1);
  EXPECT_EQ(to, 0x7fc00000u);
}

TEST(MoveProgramTest, TreesOf64MembersFitWhoeverIsThere) {
  constexpr uint64_t kSeed = 31;
  std::mt19937_64 random(kSeed);
  MoveProgram program;
  ReductionTree tree;
  for (int round = 0; round < 3000; ++round) {
    const uint64_t absent_one_of = random() % 8 + 2;
    std::vector<int32_t> ranks;
    for (int32_t rank = 0; rank < 64; ++rank) {
      if (random() % absent_one_of != 0) ranks.push_back(rank);
    }
    tree.Set(ranks);
    ASSERT_TRUE(program.SetSteps(tree.steps(), static_cast<int>(ranks.size())).ok())
        << "seed " << kSeed << ", round " << round;
  }
  for (int size = 1; size <= 64; ++size) {
    EXPECT_TRUE(program.SetSteps(ReductionTree::Whole(size).steps(), size).ok()) << size;
  }
  const absl::Status status = program.SetSteps(ReductionTree::Whole(128).steps(), 128);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
}

TEST(MoveKernelNameTest, NamesAKernelWhereverTheHostHasAReduction) {
  std::set<std::string> named = {"move_bytes"};
  for (int d = 0; d <= static_cast<int>(DType::kComplex128) + 1; ++d) {
    const auto dtype = static_cast<DType>(d);
    EXPECT_STREQ(MoveKernelName(Reduction::kNone, dtype), "move_bytes");
    for (int r = 1; r <= static_cast<int>(kLastReduction) + 1; ++r) {
      const auto reduction = static_cast<Reduction>(r);
      const char* const name = MoveKernelName(reduction, dtype);
      ASSERT_EQ(name != nullptr, FindReduction(reduction, dtype) != nullptr) << d << " " << r;
      if (name == nullptr) continue;
      EXPECT_EQ(Kernels().count(name), 1) << name;
      named.insert(name);
    }
  }
  EXPECT_EQ(named.size(), Kernels().size());
}

TEST(KernelImageTest, IsWhatTheDriverLoadsOrEmpty) {
  if (kernel_image_bytes() == 0) GTEST_SKIP() << "built without a CUDA toolkit";
  const uint32_t fat_binary = 0xba55ed50u;
  ASSERT_GT(kernel_image_bytes(), sizeof(fat_binary));
  EXPECT_EQ(std::memcmp(kernel_image(), &fat_binary, sizeof(fat_binary)), 0);
}

TEST(HalfTest, EveryNumberIsDecodedAndRoundedAsOnTheHost) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto stored = static_cast<uint16_t>(bits);
    F16 f16;
    f16.bits = stored;
    const float as_f16 = f16;
    if (as_f16 != as_f16) {
      ASSERT_NE(moves::Float16::Decode(stored), moves::Float16::Decode(stored)) << bits;
      continue;
    }
    ASSERT_EQ(BitsOf(moves::Float16::Decode(stored)), BitsOf(as_f16)) << bits;
    // And what is around it, also halfway to the next.
    const uint32_t step = (bits & 0x7fff) < 0x400 ? 0x800000 : 0x1000;
    for (const uint32_t from : {BitsOf(as_f16), BitsOf(as_f16) + step}) {
      for (const uint32_t around : {from - 1, from, from + 1}) {
        const float number = FloatOf(around);
        const bool nan = number != number;
        ASSERT_EQ(moves::Float16::Encode(number), nan ? 0x7e00 : F16(number).bits) << around;
      }
    }
  }
}

TEST(BFloat16Test, EveryNumberIsDecodedAndRoundedAsOnTheHost) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto stored = static_cast<uint16_t>(bits);
    BF16 bf16;
    bf16.bits = stored;
    const float as_bf16 = bf16;
    ASSERT_EQ(BitsOf(moves::BFloat16::Decode(stored)), BitsOf(as_bf16)) << bits;
    // And what is around it, also halfway to the next.
    for (const uint32_t from : {BitsOf(as_bf16), BitsOf(as_bf16) + 0x8000}) {
      for (const uint32_t around : {from - 1, from, from + 1}) {
        const float number = FloatOf(around);
        const bool nan = number != number;
        ASSERT_EQ(moves::BFloat16::Encode(number), nan ? 0x7fc0 : BF16(number).bits) << around;
      }
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace chorus
