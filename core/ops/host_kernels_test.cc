// Every kernel against the naive evaluator, whole and in pieces.

#include "core/ops/host_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/ops/registry.h"
#include "core/ops/testing/evaluator.h"
#include "core/ops/testing/kernel_cases.h"
#include "core/ops/testing/near.h"
#include "core/ops/testing/value.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::AllDTypes;
using testing::ExpectNear;
using testing::InputsOf;
using testing::Takes;
using testing::TypeOfInput;
using testing::Value;
using testing::WithDType;
using Case = testing::KernelCase;
using Ints = std::vector<int64_t>;

constexpr uint64_t kSeed = 7;

class Kernel {
 public:
  // Fails the test and leaves `kernel` empty when the node is refused.
  Kernel(const std::string& op, const std::vector<Value>& inputs, const Attributes& attributes)
      : op_(op), attributes_(attributes), inputs_(inputs) {
    for (const Value& input : inputs_) {
      types_.push_back(&input.type);
      values_.push_back(&input);
      // A zero-sized buffer may be null.
      pointers_.push_back(input.bytes.empty() ? nullptr : input.bytes.data());
    }
    node_.op = op_;
    node_.attributes = attributes_;
    node_.inputs = types_;
    const auto types = InferTypes(node_);
    EXPECT_TRUE(types.ok()) << types.status();
    if (!types.ok()) return;
    outputs_ = *types;
    auto made = MakeHostKernel(node_, outputs_);
    EXPECT_TRUE(made.ok()) << made.status();
    if (!made.ok()) return;
    kernel_ = *std::move(made);
    // All NaN, which shows in a result that what stands there comes into.
    const auto lines = static_cast<size_t>((kernel_->workspace_bytes() + 63) / 64);
    workspace_.assign(lines, CacheLine());
    for (CacheLine& line : workspace_) std::memset(line.bytes, 0xff, sizeof(line.bytes));
  }

  const HostKernel& operator*() const { return *kernel_; }
  bool ok() const { return kernel_ != nullptr; }
  int64_t output_bytes() const { return outputs_[0].num_bytes(); }
  bool may_fail() const { return MayFail(*FindOp(op_), node_); }
  Value Expected() const {
    const auto expected = testing::EvaluateLocal(node_, values_, outputs_);
    EXPECT_TRUE(expected.ok()) << expected.status();
    return (*expected)[0];
  }
  // With every tensor one element beside where it would lie.
  Value RunDisplaced() const {
    std::vector<std::string> moved;
    std::vector<const void*> pointers;
    for (const Value& input : inputs_) {
      const auto element = static_cast<size_t>(DTypeBytes(input.type.dtype));
      moved.push_back(std::string(element, '\0') + input.bytes + std::string(64, '\0'));
    }
    for (size_t i = 0; i < moved.size(); ++i) {
      pointers.push_back(&moved[i][static_cast<size_t>(DTypeBytes(inputs_[i].type.dtype))]);
    }
    const auto element = static_cast<size_t>(DTypeBytes(outputs_[0].dtype));
    std::string out(element + static_cast<size_t>(outputs_[0].num_bytes()) + 64, '\xff');
    EXPECT_TRUE(kernel_->RunAll({pointers, {&out[element]}, workspace()}).ok());
    return Value{outputs_[0], out.substr(element, static_cast<size_t>(outputs_[0].num_bytes()))};
  }
  void RunUnit(int64_t unit, Value* out) const {
    EXPECT_TRUE(kernel_->Run({pointers_, {&out->bytes[0]}, workspace()}, unit, unit + 1).ok());
  }
  // By byte of the workspace, whether that unit writes there.
  std::vector<bool> Written(int64_t unit) const {
    std::string out(static_cast<size_t>(outputs_[0].num_bytes()), '\0');
    const absl::Span<char> scratch = workspace();
    std::vector<bool> written(scratch.size(), false);
    // Twice, for what is written may be what stood there.
    for (const char before : {'\0', '\xff'}) {
      std::fill(scratch.begin(), scratch.end(), before);
      EXPECT_TRUE(kernel_->Run({pointers_, {&out[0]}, scratch}, unit, unit + 1).ok());
      for (size_t i = 0; i < scratch.size(); ++i) written[i] = written[i] || scratch[i] != before;
    }
    return written;
  }
  absl::Status TryRun() const {
    std::string out(outputs_[0].num_bytes(), '\0');
    return kernel_->RunAll({pointers_, {out.empty() ? nullptr : &out[0]}, workspace()});
  }
  // Runs the units in pieces that end at `cuts`.
  Value Run(const std::vector<int64_t>& cuts) const {
    Value out{outputs_[0], std::string(outputs_[0].num_bytes(), '\xff')};
    void* const pointer = out.bytes.empty() ? nullptr : &out.bytes[0];
    int64_t begin = 0;
    for (int64_t cut : cuts) {
      cut = std::min(cut, kernel_->units());
      if (cut <= begin) continue;
      EXPECT_TRUE(kernel_->Run({pointers_, {pointer}, workspace()}, begin, cut).ok());
      begin = cut;
    }
    return out;
  }

 private:
  struct alignas(64) CacheLine {
    char bytes[64];
  };

  absl::Span<char> workspace() const {
    return absl::MakeSpan(reinterpret_cast<char*>(workspace_.data()),
                          static_cast<size_t>(kernel_->workspace_bytes()));
  }

  const std::string op_;
  const Attributes attributes_;
  const std::vector<Value> inputs_;
  std::vector<const TensorType*> types_;
  std::vector<const Value*> values_;
  std::vector<const void*> pointers_;
  NodeView node_;
  std::vector<TensorType> outputs_;
  std::unique_ptr<HostKernel> kernel_;
  mutable std::vector<CacheLine> workspace_;
};

TEST(HostKernelsTest, EqualTheNaiveEvaluatorWholeAndInPieces) {
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  std::set<std::string> taken;
  for (const DType dtype : AllDTypes()) {
    for (const Case& c : testing::KernelCases()) {
      if (!Takes(c, dtype)) continue;
      taken.insert(c.op);
      std::string what = c.op + " " + std::string(DTypeName(dtype));
      const std::vector<Value> inputs = InputsOf(c, dtype, &random);
      for (const Value& input : inputs) what += " " + input.type.ToString();
      const Kernel kernel(c.op, inputs, c.attributes);
      ASSERT_TRUE(kernel.ok()) << what;
      const int64_t units = (*kernel).units();
      const Value whole = kernel.Run({units});
      ExpectNear(whole, kernel.Expected(), what);
      EXPECT_EQ(kernel.RunDisplaced(), whole) << what;
      // Any partition gives the same bits.
      EXPECT_EQ(kernel.Run({1, units / 3, units / 2 + 1, units}), whole) << what;
      std::vector<int64_t> ones;
      for (int64_t i = 1; i <= units; ++i) ones.push_back(i);
      EXPECT_EQ(kernel.Run(ones), whole) << what;
    }
  }
  for (const Case& c : testing::KernelCases()) EXPECT_EQ(taken.count(c.op), 1) << c.op;
}

// Units run at a time, on any threads.
TEST(HostKernelsTest, EachUnitHasScratchOfItsOwn) {
  std::mt19937_64 random(kSeed);
  std::vector<Case> cases = testing::KernelCases();
  // More rows than half types add up on the stack.
  cases.push_back({"scatter_add",
                   {{100, 70}, {100}},
                   {{"axis", int64_t{0}}, {"size", int64_t{8 * 256 + 1}}},
                   1,
                   8 * 256 + 1,
                   DType::kI32});
  std::set<std::string> wanting;
  for (const DType dtype : {DType::kF16, DType::kI64}) {
    for (const Case& c : cases) {
      if (!Takes(c, dtype)) continue;
      const Kernel kernel(c.op, InputsOf(c, dtype, &random), c.attributes);
      ASSERT_TRUE(kernel.ok());
      if ((*kernel).workspace_bytes() == 0) continue;
      wanting.insert(c.op);
      std::vector<int64_t> owner(static_cast<size_t>((*kernel).workspace_bytes()), -1);
      for (int64_t unit = 0; unit < (*kernel).units(); ++unit) {
        const std::vector<bool> written = kernel.Written(unit);
        for (size_t i = 0; i < owner.size(); ++i) {
          if (!written[i]) continue;
          ASSERT_EQ(owner[i], -1) << c.op << ": byte " << i << " of unit " << unit;
          owner[i] = unit;
        }
      }
    }
  }
  EXPECT_EQ(wanting, (std::set<std::string>{"arg_sort", "matmul", "scatter_add"}));
}

// A runtime runs what is said to cost little where it stands.
TEST(HostKernelsTest, SayThatTheyCostWhatTheyWriteAtLeast) {
  std::mt19937_64 random(kSeed);
  std::vector<Case> cases = testing::KernelCases();
  cases.push_back({"matmul", {{300, 0}, {0, 70}}, {}});
  for (const char* op : {"prod", "sum"}) cases.push_back({op, {{4096, 0}}, {{"axes", Ints{1}}}});
  for (const DType dtype : AllDTypes()) {
    for (const Case& c : cases) {
      if (!Takes(c, dtype)) continue;
      const Kernel kernel(c.op, InputsOf(c, dtype, &random), c.attributes);
      ASSERT_TRUE(kernel.ok()) << c.op;
      EXPECT_GE((*kernel).units() * (*kernel).cost_per_unit(), kernel.output_bytes())
          << c.op << " " << DTypeName(dtype);
    }
  }
}

// What a piece of work costs beside its bytes counts where there are many.
TEST(HostKernelsTest, SayWhatVerySmallPiecesOfWorkCost) {
  std::mt19937_64 random(kSeed);
  const Case products = {"matmul", {{4096, 1, 1}, {4096, 1, 1}}, {}};
  for (const DType dtype : {DType::kF16, DType::kF32, DType::kF64}) {
    const Kernel kernel(products.op, InputsOf(products, dtype, &random), {});
    EXPECT_GE((*kernel).units() * (*kernel).cost_per_unit(), 4096 * 256);
  }
  // Of a row, its pieces; those without bytes take no time.
  const int64_t rows = 64;
  const Ints one = {rows, 1};
  const Ints none = {rows, 0};
  std::vector<int64_t> costs;
  for (const std::vector<Ints>& inputs :
       {std::vector<Ints>(100, one), std::vector<Ints>(1, {rows, 100}), std::vector<Ints>(1, one),
        [&] {
          std::vector<Ints> most_empty(1000, none);
          most_empty[500] = one;
          return most_empty;
        }()}) {
    const Case concat = {"concat", inputs, {{"axis", int64_t{1}}}};
    const Kernel kernel(concat.op, InputsOf(concat, DType::kU8, &random), concat.attributes);
    costs.push_back((*kernel).units() * (*kernel).cost_per_unit());
    EXPECT_EQ(kernel.Run({rows}), kernel.Expected());
  }
  EXPECT_GE(costs[0], costs[1] + rows * 99 * 16);
  EXPECT_EQ(costs[2], costs[3]);
}

TEST(HostKernelsTest, SayThatEachTapOfAConvolutionCostsItsTime) {
  std::mt19937_64 random(kSeed);
  constexpr int64_t kTaps = 4096;
  const Case one = {"convolution",
                    {{1, 1, 1, kTaps}, {1, 1, 1, kTaps}},
                    {{"dilation", Ints{1, 1}},
                     {"groups", int64_t{1}},
                     {"padding", Ints{0, 0}},
                     {"stride", Ints{1, 1}}}};
  const Kernel kernel(one.op, InputsOf(one, DType::kF64, &random), one.attributes);
  ASSERT_TRUE(kernel.ok());
  EXPECT_GE((*kernel).units() * (*kernel).cost_per_unit(), kTaps * 64);
}

TEST(HostKernelsTest, SayThatASortCostsItsComparisons) {
  std::mt19937_64 random(kSeed);
  const auto cost = [&](int64_t size, int64_t k) {
    const Case sort = {"arg_sort", {{2, size}}, {{"axis", int64_t{1}}, {"k", k}}};
    const Kernel kernel(sort.op, InputsOf(sort, DType::kF32, &random), sort.attributes);
    return (*kernel).units() * (*kernel).cost_per_unit();
  };
  EXPECT_GE(cost(4096, 4096), 2 * 4096 * 12 * 8);
  EXPECT_GT(cost(4096, 4096), 4 * cost(4096, 1));
  EXPECT_GT(cost(1 << 16, 1 << 16), 18 * cost(4096, 4096));
}

// Where a row is added up by itself, each looks at all places that reach it.
TEST(HostKernelsTest, SayThatPlacesThatReachARowCostTheirTime) {
  std::mt19937_64 random(kSeed);
  const Ints places = {1, 1, 65536, 1};
  const Case grad = {"max_pool_grad",
                     {places, places},
                     {{"dilation", Ints{1, 1}},
                      {"kernel", Ints{65537, 1}},
                      {"padding", Ints{0, 0}},
                      {"size", Ints{131072, 1}},
                      {"stride", Ints{1, 1}}},
                     1,
                     131072,
                     DType::kI32};
  for (const DType dtype : {DType::kI8, DType::kF16, DType::kF32}) {
    const Kernel kernel(grad.op, InputsOf(grad, dtype, &random), grad.attributes);
    ASSERT_TRUE(kernel.ok());
    const int64_t looks = dtype == DType::kF32 ? 65536 : int64_t{1} << 31;
    EXPECT_GE((*kernel).units() * (*kernel).cost_per_unit(), looks) << DTypeName(dtype);
  }
}

// Half types are added up in floats: in so much memory that a unit looks at all updates a few times
// at most, however large the result is.
TEST(HostKernelsTest, ScatterAddOfHalfTypesLooksAtItsUpdatesAFewTimes) {
  std::mt19937_64 random(kSeed);
  for (const int64_t stride : {1, 70}) {
    const int64_t most_at_once = stride == 1 ? 16384 : 256;
    for (const int64_t size : {most_at_once, most_at_once + 1, 8 * most_at_once,
                               8 * most_at_once + 1, 3001 * most_at_once / 256}) {
      const Case c = {
          "scatter_add", {{100, stride}, {100}}, {{"axis", int64_t{0}}, {"size", size}}, 1, size,
          DType::kI64};
      const Kernel kernel(c.op, InputsOf(c, DType::kF16, &random), c.attributes);
      ASSERT_TRUE(kernel.ok());
      const int64_t room = (*kernel).workspace_bytes() / (*kernel).units() / int64_t{sizeof(float)};
      const int64_t rows_at_once = std::max(most_at_once, room / std::min<int64_t>(stride, 64));
      EXPECT_LE(size, 8 * rows_at_once) << size;
      EXPECT_LE((*kernel).workspace_bytes(), size * stride) << size;
      const int64_t units = (*kernel).units();
      const Value whole = kernel.Run({units});
      EXPECT_EQ(kernel.Run({1, units}), whole) << size;
      ExpectNear(whole, kernel.Expected(), "scatter_add");
    }
  }
}

TEST(HostKernelsTest, AnOpSaysWhichDTypesItTakes) {
  const auto text = [](const std::string& op, const TensorType& a) {
    const std::vector<const TensorType*> inputs = {&a, &a};
    NodeView node;
    node.op = op;
    node.inputs = inputs;
    const absl::Status status = InferTypes(node).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    return ErrorOf(status).message;
  };
  EXPECT_EQ(text("add", WithDType(DType::kBool, {2})),
            "add: input 0 is bool[2]; the op takes f16, bf16, f32, f64, i8, u8, i16, i32 and i64");
  EXPECT_EQ(text("matmul", WithDType(DType::kI8, {2, 2})),
            "matmul: input 0 is i8[2,2]; the op takes f16, bf16, f32, f64 and i64");
}

TEST(HostKernelsTest, FillWritesItsValue) {
  for (const DType dtype : AllDTypes()) {
    for (const int64_t size : {0, 1, 1031}) {
      Attributes attributes = TypeAttributes(WithDType(dtype, {size}));
      const AttributeValue integer = int64_t{1};
      attributes.push_back({"value", IsFloating(dtype) ? AttributeValue(0.1) : integer});
      const Kernel kernel("fill", {}, attributes);
      ASSERT_TRUE(kernel.ok());
      EXPECT_EQ(kernel.Run({size / 2, size}), kernel.Expected());
    }
  }
  // Beyond what a double holds.
  const int64_t large = (int64_t{1} << 62) + 1;
  const Kernel kernel("fill", {},
                      {{"dims", Ints{2}}, {"dtype", std::string("i64")}, {"value", large}});
  ASSERT_TRUE(kernel.ok());
  EXPECT_EQ(testing::Elements<int64_t>(kernel.Run({2})), (Ints{large, large}));
  // Rounded once: by way of f32 it would be 1.
  const Kernel half(
      "fill", {},
      {{"dims", Ints{1}}, {"dtype", std::string("f16")}, {"value", 1 + 0x1p-11 + 0x1p-30}});
  ASSERT_TRUE(half.ok());
  EXPECT_EQ(half.Run({1}), half.Expected());
  EXPECT_EQ(testing::ToDoubles(half.Run({1})), (std::vector<double>{1 + 0x1p-10}));
}

// In f16 a quarter more than 512 is 512.
TEST(HostKernelsTest, HalfTypesAreRoundedOnce) {
  // Along a row they meet in one of its sixteen partial sums.
  std::vector<double> row(33, 0);
  row[0] = row[32] = 0.25;
  row[16] = 512;
  const Kernel rows("sum", {testing::FromDoubles(WithDType(DType::kF16, {33}), row)}, {});
  ASSERT_TRUE(rows.ok());
  EXPECT_EQ(testing::ToDoubles(rows.Run({1})), (std::vector<double>{512.5}));
  const Value columns =
      testing::FromDoubles(WithDType(DType::kF16, {3, 2}), {0.25, 0.25, 512, 512, 0.25, 0.25});
  const Kernel down("sum", {columns}, {{"axes", Ints{0}}});
  ASSERT_TRUE(down.ok());
  EXPECT_EQ(testing::ToDoubles(down.Run({2})), (std::vector<double>{512.5, 512.5}));
  // 256 * 256 is infinite in f16.
  std::vector<Value> factors;
  for (const double factor : {256.0, 256.0, 0.5}) {
    factors.push_back(testing::FromDoubles(WithDType(DType::kF16, {}), {factor}));
  }
  const Kernel product("product", factors, {});
  ASSERT_TRUE(product.ok());
  EXPECT_EQ(testing::ToDoubles(product.Run({1}))[0], 32768);
  const Kernel pool("avg_pool",
                    {testing::FromDoubles(WithDType(DType::kF16, {1, 1, 1, 4}), {1, 2048, 1, 2})},
                    {{"kernel", Ints{1, 4}}});
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ(testing::ToDoubles(pool.Run({1}))[0], 513);
  // The terms of a matmul are in different tiles.
  std::vector<double> terms(600, 0);
  terms[0] = terms[599] = 0.25;
  terms[300] = 512;
  const Kernel matmul(
      "matmul",
      {testing::FromDoubles(WithDType(DType::kF16, {1, 600}), terms),
       testing::FromDoubles(WithDType(DType::kF16, {600, 1}), std::vector<double>(600, 1))},
      {});
  ASSERT_TRUE(matmul.ok());
  EXPECT_EQ(testing::ToDoubles(matmul.Run({1}))[0], 512.5);
}

TEST(HostKernelsTest, ShareSelectsAndDoesNotMultiply) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Value x = testing::MakeValue<double>(Ints{4}, {nan, inf, 3, inf});
  const Value holders = testing::MakeValue<float>(Ints{4}, {0, 0, 2, 1});
  const Kernel share("share", {x, holders}, {});
  EXPECT_EQ(testing::Elements<double>(share.Run({4})), (std::vector<double>{0, 0, 1.5, inf}));
}

TEST(HostKernelsTest, IntegersWrap) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  const int64_t least = std::numeric_limits<int64_t>::min();
  const Value a = testing::MakeValue<int64_t>(Ints{2}, {most, least});
  const Value b = testing::MakeValue<int64_t>(Ints{2}, {most, most});
  const auto run = [](const std::string& op, const std::vector<Value>& inputs) {
    const Kernel kernel(op, inputs, {});
    return testing::Elements<int64_t>(kernel.Run({(*kernel).units()}));
  };
  EXPECT_EQ(run("add", {a, b}), (Ints{-2, -1}));
  EXPECT_EQ(run("sub", {a, b}), (Ints{0, 1}));
  EXPECT_EQ(run("mul", {a, b}), (Ints{1, least}));
  EXPECT_EQ(run("neg", {a}), (Ints{-most, least}));
  EXPECT_EQ(run("sum", {b}), (Ints{-2}));
  // Smaller ones too, also where their product does not fit an int.
  const TensorType i16 = WithDType(DType::kI16, {2});
  const Value c = testing::FromDoubles(i16, {32767, -32768});
  const Kernel mul("mul", {c, c}, {});
  EXPECT_EQ(testing::ToDoubles(mul.Run({2})), (std::vector<double>{1, 0}));
  const Value d = testing::FromDoubles(WithDType(DType::kU8, {2}), {200, 200});
  const Kernel sum("sum", {d}, {});
  EXPECT_EQ(testing::ToDoubles(sum.Run({1})), (std::vector<double>{144}));
}

// The distance to the next number of the dtype, away from 0.
template <typename T>
double Ulp(double x) {
  const double size = std::abs(x);
  if constexpr (sizeof(T) == 2) {
    T next{static_cast<float>(size)};
    ++next.bits;
    return static_cast<double>(static_cast<float>(next)) - size;
  } else {
    const T value = static_cast<T>(size);
    return static_cast<double>(std::nextafter(value, std::numeric_limits<T>::infinity()) - value);
  }
}

// The evaluator computes them in long double and rounds.
TEST(HostKernelsTest, FunctionsAreWithinThreeUnitsInTheLastPlace) {
  const double inf = std::numeric_limits<double>::infinity();
  std::mt19937_64 random(kSeed);
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    std::vector<double> points = {0,    -0.0,         1,  -1,  0.5, -0.5, inf,
                                  -inf, std::nan(""), 88, -88, 1e-7};
    std::uniform_real_distribution<double> exponent(-20, 6);
    for (int i = 0; i < 4000; ++i) {
      points.push_back((i % 2 == 0 ? 1 : -1) * std::exp2(exponent(random)));
    }
    const Value x =
        testing::FromDoubles(WithDType(dtype, {static_cast<int64_t>(points.size())}), points);
    for (const char* op : {"ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "rsqrt",
                           "sigmoid", "sin", "sqrt", "tanh"}) {
      const Kernel kernel(op, {x}, {});
      ASSERT_TRUE(kernel.ok());
      const std::vector<double> got = testing::ToDoubles(kernel.Run({(*kernel).units()}));
      const std::vector<double> expected = testing::ToDoubles(kernel.Expected());
      const std::vector<double> at = testing::ToDoubles(x);
      testing::Dispatch(dtype, [&](auto t) {
        using T = decltype(t);
        if constexpr (!std::is_integral<T>::value) {
          for (size_t i = 0; i < got.size(); ++i) {
            // Half types are rounded from f32: once.
            const double limit = (sizeof(T) == 2 ? 1 : 3) * Ulp<T>(expected[i]);
            ASSERT_TRUE(testing::IsNear(got[i], expected[i], limit))
                << op << " of " << DTypeName(dtype) << " " << at[i];
          }
        }
      });
    }
  }
}

TEST(HostKernelsTest, MaximumAndMinimumLetNaNWin) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Value a = testing::MakeValue<double>(Ints{5}, {1, nan, 2, nan, 0.0});
  const Value b = testing::MakeValue<double>(Ints{5}, {2, 1, nan, nan, -0.0});
  const auto run = [&](const std::string& op) {
    const Kernel kernel(op, {a, b}, {});
    return testing::Elements<double>(kernel.Run({5}));
  };
  const std::vector<double> most = run("maximum");
  const std::vector<double> least = run("minimum");
  EXPECT_EQ(most[0], 2);
  EXPECT_EQ(least[0], 1);
  for (const int i : {1, 2, 3}) {
    EXPECT_TRUE(std::isnan(most[i])) << i;
    EXPECT_TRUE(std::isnan(least[i])) << i;
  }
  // Of zeros the first.
  EXPECT_FALSE(std::signbit(most[4]));
  EXPECT_FALSE(std::signbit(least[4]));
}

TEST(HostKernelsTest, IntegersAreNotDividedByZero) {
  const int64_t least = std::numeric_limits<int64_t>::min();
  const Value a = testing::MakeValue<int64_t>(Ints{4}, {7, -7, least, 5});
  const Kernel div("div", {a, testing::MakeValue<int64_t>(Ints{4}, {2, 2, -1, -2})}, {});
  EXPECT_EQ(testing::Elements<int64_t>(div.Run({4})), (Ints{3, -3, least, -2}));
  const Value zero = testing::MakeValue<int64_t>(Ints{4}, {1, 1, 0, 0});
  const Kernel bad("div", {a, zero}, {});
  Ints out(4);
  const absl::Status status =
      (*bad).Run({{a.bytes.data(), zero.bytes.data()}, {out.data()}, {}}, 0, 4);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorOf(status).message,
            "div: element 2 of i64[4] is an integer divided by 0, expected divisors other than 0");
  EXPECT_TRUE((*bad).Run({{a.bytes.data(), zero.bytes.data()}, {out.data()}, {}}, 0, 2).ok());
}

// Bit by bit, at the values where conversions go wrong.
TEST(HostKernelsTest, CastRoundsOnceAndSaturates) {
  const double inf = std::numeric_limits<double>::infinity();
  std::vector<double> reals = {0,
                               -0.0,
                               0.5,
                               -0.5,
                               1.5,
                               -1.5,
                               127.5,
                               128,
                               -128,
                               -128.5,
                               -129,
                               255,
                               256,
                               32767.5,
                               32768,
                               -32769,
                               65504,
                               65519,
                               65519.9999999999,
                               65520,
                               65536,
                               1e5,
                               -1e5,
                               0x1p31,
                               -0x1p31,
                               0x1p63,
                               -0x1p63,
                               0x1p64,
                               1e30,
                               -1e30,
                               1e300,
                               -1e300,
                               3.4e38,
                               3.3961e38,
                               inf,
                               -inf,
                               std::nan(""),
                               1e-8,
                               3e-8,
                               0x1p-25,
                               0x1.0000000001p-25,
                               1e-320,
                               1 + 0x1p-11 + 0x1p-40,
                               1 + 0x1p-11,
                               1 + 3 * 0x1p-11,
                               1 + 0x1p-8 + 0x1p-30,
                               1 + 0x1p-8,
                               1 + 0x1p-24};
  const Ints integers = {0,
                         1,
                         -1,
                         2,
                         127,
                         128,
                         255,
                         256,
                         -129,
                         32768,
                         65519,
                         65520,
                         65535,
                         0x1010001,
                         -0x1010001,
                         (int64_t{1} << 24) + 1,
                         (int64_t{1} << 53) + 1,
                         (int64_t{1} << 60) + (int64_t{1} << 52) + 1,
                         std::numeric_limits<int64_t>::max(),
                         std::numeric_limits<int64_t>::min()};
  for (const DType from : AllDTypes()) {
    Value x;
    if (IsFloating(from)) {
      x = testing::FromDoubles(WithDType(from, {static_cast<int64_t>(reals.size())}), reals);
    } else {
      x = testing::MakeValue<int64_t>(Ints{static_cast<int64_t>(integers.size())}, integers);
      if (from != DType::kI64) {
        std::vector<double> all(integers.begin(), integers.end());
        x = testing::FromDoubles(WithDType(from, {static_cast<int64_t>(all.size()) - 4}),
                                 {all.begin(), all.end() - 4});
      }
    }
    for (const DType to : AllDTypes()) {
      const Kernel cast("cast", {x}, {{"dtype", std::string(DTypeName(to))}});
      ASSERT_TRUE(cast.ok());
      const Value got = cast.Run({(*cast).units()});
      const Value expected = cast.Expected();
      const std::vector<double> a = testing::ToDoubles(got);
      const std::vector<double> b = testing::ToDoubles(expected);
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_TRUE(testing::IsNear(a[i], b[i], 0))
            << DTypeName(from) << " " << testing::ToDoubles(x)[i] << " to " << DTypeName(to);
      }
    }
  }
}

TEST(HostKernelsTest, MaxAndMinLetNaNWinWhereverItStands) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Ints& sizes : {Ints{37, 3}, Ints{3, 37}}) {
    for (const Ints& axes : {Ints{0}, Ints{1}, Ints{0, 1}}) {
      for (int64_t at = 0; at < 111; ++at) {
        std::vector<double> elements(111, 5);
        elements[at] = nan;
        const Value x = testing::FromDoubles(WithDType(DType::kF32, sizes), elements);
        for (const char* op : {"max", "min"}) {
          const Kernel kernel(op, {x}, {{"axes", axes}});
          int nans = 0;
          for (const double y : testing::ToDoubles(kernel.Run({(*kernel).units()}))) {
            nans += std::isnan(y) ? 1 : 0;
          }
          ASSERT_EQ(nans, 1) << op << " with NaN at " << at;
        }
      }
    }
  }
}

TEST(HostKernelsTest, AMeanOfHalvesIsOfTheirSumInFloat) {
  // The sum is infinite in f16.
  const Value x = testing::FromDoubles(WithDType(DType::kF16, {4}), {60000, 60000, 60000, 60000});
  const Kernel mean("mean", {x}, {});
  EXPECT_EQ(testing::ToDoubles(mean.Run({1})), (std::vector<double>{60000}));
  const Value nothing = testing::Zeros(WithDType(DType::kF32, {0}));
  const Kernel empty("mean", {nothing}, {});
  EXPECT_TRUE(std::isnan(testing::ToDoubles(empty.Run({1}))[0]));
}

TEST(HostKernelsTest, BoolsAreTrueWhereTheirByteIsNotZero) {
  const TensorType type = WithDType(DType::kBool, {4});
  const Value a = testing::MakeValue<uint8_t>(type, {0, 1, 7, 0});
  const Value b = testing::MakeValue<uint8_t>(type, {0, 2, 1, 3});
  const auto run = [&](const std::string& op) {
    const Kernel kernel(op, {a, b}, {});
    return testing::Elements<uint8_t>(kernel.Run({4}));
  };
  EXPECT_EQ(run("eq"), (std::vector<uint8_t>{1, 1, 1, 0}));
  EXPECT_EQ(run("lt"), (std::vector<uint8_t>{0, 0, 0, 1}));
  EXPECT_EQ(run("logical_and"), (std::vector<uint8_t>{0, 1, 1, 0}));
  EXPECT_EQ(run("logical_xor"), (std::vector<uint8_t>{0, 0, 0, 1}));
}

TEST(HostKernelsTest, ReluSelectsAndDoesNotMultiply) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Value x = testing::MakeValue<double>(Ints{5}, {1, 0, -1, nan, inf});
  const Value g = testing::MakeValue<double>(Ints{5}, {inf, inf, nan, 3, 4});
  const Kernel grad("relu_grad", {x, g}, {});
  EXPECT_EQ(testing::Elements<double>(grad.Run({5})), (std::vector<double>{inf, 0, 0, 0, 4}));
  const Kernel relu("relu", {x}, {});
  EXPECT_EQ(testing::Elements<double>(relu.Run({5})), (std::vector<double>{1, 0, 0, 0, inf}));
}

// Units may run at the same time, each on the thread that calls: a library's own threads would take
// the processors from the pool's.
TEST(HostKernelsTest, LibrariesComputeInTheThreadsThatCallThem) {
  std::mt19937_64 random(kSeed);
  const Ints x = {8, 128, 14, 14}, w = {256, 128, 3, 3}, y = {8, 256, 12, 12};
  for (const Case& c :
       {Case{"matmul", {{1024, 512}, {512, 256}}, {}}, Case{"convolution", {x, w}, {}},
        Case{"convolution_data_grad", {y, w}, {{"size", Ints{14, 14}}}},
        Case{"convolution_weight_grad", {x, y}, {{"size", Ints{3, 3}}}}}) {
    SCOPED_TRACE(c.op);
    const Kernel kernel(c.op, InputsOf(c, DType::kF32, &random), c.attributes);
    ASSERT_TRUE(kernel.ok());
    const int64_t units = (*kernel).units();
    ASSERT_GE(units, 4);
    const Value whole = kernel.Run({units});
    const auto count_threads = [] {
      const std::filesystem::directory_iterator tasks("/proc/self/task");
      return std::distance(begin(tasks), end(tasks));
    };
    std::thread([&] {
      const auto before = count_threads();
      EXPECT_EQ(kernel.Run({units}), whole);
      EXPECT_EQ(count_threads(), before);
    }).join();

    Value together{whole.type, std::string(whole.bytes.size(), '\xff')};
    std::vector<std::thread> threads;
    for (int64_t unit = 0; unit < units; ++unit) {
      threads.emplace_back([&, unit] { kernel.RunUnit(unit, &together); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(together, whole);
  }
}

// Added up in f32 one after the other, so many would be percents off.
TEST(HostKernelsTest, SumsOfManyTermsKeepTheirDigits) {
  constexpr int64_t kTerms = (int64_t{1} << 21) + 77;
  const std::pair<Ints, Ints> cases[] = {{{kTerms, 2}, {0}},
                                         {{2, kTerms}, {1}},
                                         {{kTerms, 2}, {0, 1}},
                                         {{kTerms / 2, 2, 2}, {0, 2}},
                                         {{3, 2, kTerms / 3, 5}, {0, 2}}};
  for (const auto& [dims, axes] : cases) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const TensorType type = WithDType(dtype, dims);
      SCOPED_TRACE(type.ToString());
      const Value x = testing::FromDoubles(
          type, std::vector<double>(static_cast<size_t>(type.num_elements()), 0.6875));
      const Kernel mean("mean", {x}, {{"axes", axes}});
      ASSERT_TRUE(mean.ok());
      for (const double value : testing::ToDoubles(mean.Run({(*mean).units()}))) {
        EXPECT_NEAR(value, 0.6875, 1e-6);
      }
    }
  }
}

// A number of half types, of which 4,096 have an exact sum in f32, and 2^20 one that is percents
// off.
constexpr double kSmallTerm = 179.0 / 256;

TEST(HostKernelsTest, AveragesOfLargeWindowsKeepTheirDigits) {
  constexpr int64_t kSide = 1024;
  constexpr int64_t kTaps = kSide * kSide;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto filled = [&](const Ints& dims) {
      return testing::FromDoubles(WithDType(dtype, dims),
                                  std::vector<double>(static_cast<size_t>(kTaps), kSmallTerm));
    };
    const Kernel pool("avg_pool", {filled({1, 1, kSide, kSide})}, {{"kernel", Ints{kSide, kSide}}});
    EXPECT_NEAR(testing::ToDoubles(pool.Run({1}))[0], kSmallTerm, 1e-6);
    // Of the element that all places reach.
    constexpr int64_t kRows = 2 * kTaps - 1;
    const Ints kernel = {kTaps, 1};
    const Kernel grad("avg_pool_grad", {filled({1, 1, kTaps, 1})},
                      {{"kernel", kernel}, {"size", Ints{kRows, 1}}});
    Value out = testing::Zeros(WithDType(dtype, {1, 1, kRows, 1}));
    grad.RunUnit(kTaps - 1, &out);
    EXPECT_NEAR(testing::ToDoubles(out)[kTaps - 1], kSmallTerm, 1e-6);
  }
}

TEST(HostKernelsTest, SoftmaxOfLongRowsKeepsItsDigits) {
  constexpr int64_t kSize = 1 << 20;
  // Of the rows' w and x the first stands out; of the others' sums none vanishes. The rows are
  // equal.
  const double score = std::log(kSmallTerm);
  const auto rows = [](double first, double even, double odd, const Ints& dims) {
    const TensorType type = WithDType(DType::kF32, dims);
    const int64_t lanes = type.num_elements() / kSize;
    std::vector<double> x;
    for (int64_t i = 0; i < type.num_elements(); ++i) {
      x.push_back(i < lanes ? first : i / lanes % 2 == 0 ? even : odd);
    }
    return testing::FromDoubles(type, x);
  };
  using Expected = std::function<double(double w, double x)>;  // of an element
  const auto expect = [](const std::string& op, const std::vector<Value>& inputs,
                         const Attributes& attributes, const Expected& expected) {
    SCOPED_TRACE(op + " " + inputs[0].type.ToString());
    const Kernel kernel(op, inputs, attributes);
    ASSERT_TRUE(kernel.ok());
    const std::vector<double> got = testing::ToDoubles(kernel.Run({(*kernel).units()}));
    const std::vector<double> w = testing::ToDoubles(inputs[0]);
    const std::vector<double> x = testing::ToDoubles(inputs.back());
    for (size_t i = 0; i < got.size(); ++i) {
      const double value = expected(w[i], x[std::min(i, x.size() - 1)]);
      ASSERT_NEAR(got[i], value, 1e-4 * std::abs(value)) << i;
    }
  };
  const double exps = 1 + (kSize - 1) * kSmallTerm;
  const double weights = exps;
  const double sum = 3.0 * (kSize / 2 - 1) + kSize / 2;
  const double weighted = kSmallTerm * sum;
  for (const Ints& dims : {Ints{kSize}, Ints{kSize, 3}}) {
    const Attributes axis = {{"axis", int64_t{0}}};
    const Value x = rows(0, score, score, dims);
    expect("softmax", {x}, axis, [&](double, double x_i) { return std::exp(x_i) / exps; });
    expect("log_softmax", {x}, axis, [&](double, double x_i) { return x_i - std::log(exps); });
    const std::vector<Value> w_and_x = {rows(1, kSmallTerm, kSmallTerm, dims), rows(0, 3, 1, dims)};
    expect("center", w_and_x, axis, [&](double, double x_i) { return x_i * weights - weighted; });
    expect("center_grad", w_and_x, axis,
           [&](double w_i, double x_i) { return x_i * weights - w_i * sum; });
    expect("softmax_grad", w_and_x, axis,
           [&](double w_i, double x_i) { return w_i * (x_i * weights - weighted); });
  }
  // The first is the label.
  const Value x = rows(0, score, score, {kSize});
  const Value label = testing::MakeValue<int64_t>(Ints{}, {0});
  expect("cross_entropy", {x, label}, {}, [&](double, double) { return std::log(exps); });
  const Value g = testing::MakeValue<float>(Ints{}, {2});
  expect("cross_entropy_grad", {x, label, g}, {},
         [&](double x_i, double) { return 2 * (std::exp(x_i) / exps - (x_i == 0 ? 1 : 0)); });
}

// A sum of many numbers in f32 would lose a digit or two of them.
TEST(HostKernelsTest, MomentsOfLongRowsKeepTheirDigits) {
  const int64_t size = 1 << 20;
  const Value x = testing::FromDoubles(WithDType(DType::kF32, {1, size}),
                                       std::vector<double>(static_cast<size_t>(size), 0.1));
  const Kernel means("moments", {x}, {{"rows", Ints{0, 1}}});
  const std::vector<double> moments = testing::ToDoubles(means.Run({1}));
  EXPECT_NEAR(moments[0], 0.1, 1e-6);
  EXPECT_NEAR(moments[1], 0, 1e-12);
  const Kernel squares("moments", {x}, {{"center", int64_t{0}}, {"rows", Ints{0, 1}}});
  EXPECT_NEAR(testing::ToDoubles(squares.Run({1}))[1], 0.01, 1e-7);
}

TEST(HostKernelsTest, SoftmaxOfInfinitiesAndNan) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  // Large scores do not overflow; what is -inf takes no part; the other rows are NaN throughout.
  const std::vector<double> x = {1000, 1000, -inf, -inf, nan, 1, -inf, -inf, inf, 1, 5, -inf};
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    const Value rows = testing::FromDoubles(WithDType(dtype, {6, 2}), x);
    const Value columns = [&] {
      std::vector<double> transposed;
      for (int j = 0; j < 2; ++j) {
        for (int i = 0; i < 6; ++i) transposed.push_back(x[i * 2 + j]);
      }
      return testing::FromDoubles(WithDType(dtype, {2, 6}), transposed);
    }();
    const Kernel along_rows("softmax", {rows}, {{"axis", int64_t{1}}});
    const Kernel along_columns("softmax", {columns}, {{"axis", int64_t{0}}});
    const Kernel log("log_softmax", {rows}, {{"axis", int64_t{1}}});
    const std::vector<double> y = testing::ToDoubles(along_rows.Run({6}));
    const std::vector<double> z = testing::ToDoubles(along_columns.Run({6}));
    const std::vector<double> l = testing::ToDoubles(log.Run({6}));
    for (int i = 0; i < 6; ++i) {
      for (int j = 0; j < 2; ++j) {
        SCOPED_TRACE(i * 2 + j);
        if (i == 0) {
          EXPECT_EQ(y[i * 2 + j], 0.5);
          EXPECT_NEAR(l[i * 2 + j], -0.6931, 3e-3);
        } else if (i == 5) {
          EXPECT_EQ(y[i * 2 + j], 1 - j);
          EXPECT_EQ(l[i * 2 + j], j == 0 ? 0 : -inf);
        } else {
          EXPECT_TRUE(std::isnan(y[i * 2 + j]) && std::isnan(l[i * 2 + j]));
        }
        EXPECT_TRUE(z[j * 6 + i] == y[i * 2 + j] || std::isnan(y[i * 2 + j]));
        EXPECT_EQ(std::isnan(z[j * 6 + i]), std::isnan(y[i * 2 + j]));
      }
    }
  }
}

TEST(HostKernelsTest, CrossEntropyOfLargeScoresAndOfIgnoredRows) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Value logits =
      testing::MakeValue<double>(Ints{4, 2}, {1000, 0, 0, 1000, nan, inf, -inf, 3});
  const Value labels = testing::MakeValue<int64_t>(Ints{4}, {0, 0, -1, 0});
  const Value g = testing::MakeValue<double>(Ints{4}, {2, 2, nan, 1});
  const Attributes ignoring = {{"ignore_index", int64_t{-1}}};
  const Kernel losses("cross_entropy", {logits, labels}, ignoring);
  EXPECT_EQ(testing::Elements<double>(losses.Run({4})), (std::vector<double>{0, 1000, 0, inf}));
  const Kernel grad("cross_entropy_grad", {logits, labels, g}, ignoring);
  EXPECT_EQ(testing::Elements<double>(grad.Run({4})),
            (std::vector<double>{0, 0, -2, 2, 0, 0, -1, 1}));
}

// A NaN or an infinity reaches what it is a part of and nothing else: padding is nothing that could
// be multiplied by it.
TEST(HostKernelsTest, ConvolutionsKeepNanWhereItBelongs) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Attributes same = {{"padding", Ints{1, 1}}};
  Attributes sized = same;
  sized.push_back({"size", Ints{6, 6}});
  Attributes taps = same;
  taps.push_back({"size", Ints{3, 3}});
  for (const int64_t channels : {1, 3, 32}) {
    const TensorType image = WithDType(DType::kF32, {2, channels, 6, 6});
    const TensorType weight = WithDType(DType::kF32, {channels, channels, 3, 3});
    const auto filled = [](const TensorType& type, int64_t at, float value) {
      std::vector<float> elements(static_cast<size_t>(type.num_elements()), 0.5f);
      if (at >= 0) elements[static_cast<size_t>(at)] = value;
      return testing::MakeValue<float>(type, elements);
    };
    // The first and the last tap of a channel, which are over padding at some places; a corner of
    // an image, and an element within.
    for (const float value : {inf, nan}) {
      for (const int64_t at : {0, 8}) {
        const Value w = filled(weight, at, value);
        const Value x = filled(image, -1, 0);
        for (const char* op : {"convolution", "convolution_data_grad"}) {
          const Kernel kernel(op, {x, w}, op[11] == 0 ? same : sized);
          ExpectNear(kernel.Run({100}), kernel.Expected(), op);
        }
      }
      for (const int64_t at : {0, 14}) {
        const Value x = filled(image, at, value);
        const Value other = filled(image, -1, 0);
        const Value w = filled(weight, -1, 0);
        for (const char* op : {"convolution", "convolution_data_grad"}) {
          const Kernel kernel(op, {x, w}, op[11] == 0 ? same : sized);
          ExpectNear(kernel.Run({100}), kernel.Expected(), op);
        }
        for (const auto& pair : {std::vector<Value>{x, other}, std::vector<Value>{other, x}}) {
          const Kernel kernel("convolution_weight_grad", pair, taps);
          ExpectNear(kernel.Run({100}), kernel.Expected(), "convolution_weight_grad");
        }
      }
    }
  }
}

TEST(HostKernelsTest, MaxPoolIndexPrefersTheFirstAndNanToAllButPadding) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Value x = testing::MakeValue<double>(Ints{1, 1, 4, 4}, {1, 3, 3, 1,            //
                                                                3, 3, nan, inf,        //
                                                                -inf, -inf, nan, nan,  //
                                                                -inf, -inf, -1, nan});
  const Attributes two = {{"kernel", Ints{2, 2}}, {"stride", Ints{2, 2}}};
  EXPECT_EQ(testing::Elements<int32_t>(Kernel("max_pool_index", {x}, two).Run({100})),
            (std::vector<int32_t>{1, 6, 8, 10}));
  // What is less than nothing is more than padding.
  Attributes padded = {{"kernel", Ints{2, 2}}, {"padding", Ints{1, 1}}, {"stride", Ints{4, 4}}};
  EXPECT_EQ(testing::Elements<int32_t>(Kernel("max_pool_index", {x}, padded).Run({100})),
            (std::vector<int32_t>{0, 3, 12, 15}));
  // Beyond what a double tells apart.
  const int64_t large = int64_t{1} << 62;
  const Value integers = testing::MakeValue<int64_t>(Ints{1, 1, 1, 2}, {large, large + 1});
  EXPECT_EQ(testing::Elements<int32_t>(
                Kernel("max_pool_index", {integers}, {{"kernel", Ints{1, 2}}}).Run({1})),
            (std::vector<int32_t>{1}));
}

TEST(HostKernelsTest, ArgMaxPrefersTheFirstAndNan) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Value x = testing::MakeValue<double>(Ints{4, 4}, {1, 3, 3, 1,            //
                                                          1, nan, inf, nan,      //
                                                          -inf, -inf, inf, inf,  //
                                                          0.0, -0.0, 0.0, -0.0});
  const auto run = [&](const char* op) {
    const Kernel kernel(op, {x}, {{"axis", int64_t{1}}});
    return testing::Elements<int64_t>(kernel.Run({4}));
  };
  EXPECT_EQ(run("arg_max"), (Ints{1, 1, 2, 0}));
  EXPECT_EQ(run("arg_min"), (Ints{0, 1, 0, 0}));
  // Beyond what a double tells apart.
  const int64_t large = int64_t{1} << 62;
  const Kernel integers("arg_max",
                        {testing::MakeValue<int64_t>(Ints{3}, {large, large + 1, large})},
                        {{"axis", int64_t{0}}});
  EXPECT_EQ(testing::Elements<int64_t>(integers.Run({1})), Ints{1});
}

// NaN is above all else, of equals the first comes first, in both directions.
TEST(HostKernelsTest, ArgSortOfInfinitiesNanAndEquals) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> x = {0.0, nan, -inf, 2, -nan, -0.0, inf, 2, -2, 0.0, -0.25, 0.25};
  const Ints ascending = {2, 8, 10, 0, 5, 9, 11, 3, 7, 6, 1, 4};
  const Ints descending = {1, 4, 6, 3, 7, 11, 0, 5, 9, 10, 8, 2};
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (const Ints& sizes : {Ints{12, 1}, Ints{12, 2}}) {
      std::vector<double> elements;
      for (const double element : x) elements.insert(elements.end(), sizes[1], element);
      for (const int64_t flag : {0, 1}) {
        for (int64_t k = 0; k <= 12; ++k) {
          const Kernel kernel("arg_sort", {testing::FromDoubles(WithDType(dtype, sizes), elements)},
                              {{"axis", int64_t{0}}, {"descending", flag}, {"k", k}});
          ASSERT_TRUE(kernel.ok());
          const Ints got = testing::Elements<int64_t>(kernel.Run({(*kernel).units()}));
          Ints expected;
          for (int64_t i = 0; i < k * sizes[1]; ++i) {
            expected.push_back((flag == 1 ? descending : ascending)[i / sizes[1]]);
          }
          EXPECT_EQ(got, expected) << DTypeName(dtype) << " " << k;
        }
      }
    }
  }
}

// By all their bits: a NaN's sign and payload, and the least and largest of each dtype.
TEST(HostKernelsTest, ArgSortTellsEveryElementOfADTypeFromTheNext) {
  const auto run = [](const Value& x, int64_t descending) {
    const Kernel kernel("arg_sort", {x}, {{"axis", int64_t{0}}, {"descending", descending}});
    return testing::Elements<int64_t>(kernel.Run({(*kernel).units()}));
  };
  const auto expect = [&](const Value& x, const Ints& ascending) {
    EXPECT_EQ(run(x, 0), ascending) << testing::ToString(x);
    EXPECT_EQ(run(x, 1), Ints(ascending.rbegin(), ascending.rend())) << testing::ToString(x);
  };
  // Beyond what a double tells apart.
  const int64_t least = std::numeric_limits<int64_t>::min();
  const int64_t most = std::numeric_limits<int64_t>::max();
  expect(testing::MakeValue<int64_t>(Ints{6}, {most, 0, most - 1, least + 1, -1, least}),
         {5, 3, 4, 1, 2, 0});
  expect(testing::MakeValue<int32_t>(Ints{4}, {0x7fffffff, -1, 0, -0x7fffffff - 1}), {3, 1, 2, 0});
  expect(testing::MakeValue<int16_t>(Ints{4}, {32767, -1, 0, -32768}), {3, 1, 2, 0});
  expect(testing::MakeValue<int8_t>(Ints{4}, {127, -1, 0, -128}), {3, 1, 2, 0});
  expect(testing::MakeValue<uint8_t>(Ints{4}, {127, 255, 0, 128}), {2, 0, 3, 1});
  const double small = std::numeric_limits<double>::denorm_min();
  expect(testing::MakeValue<double>(Ints{5}, {1, 0, small, -small, 1 + 0x1p-52}), {3, 1, 2, 0, 4});
  // Every half there is.
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    std::string bytes;
    for (int bits = 0; bits < 0x10000; ++bits) {
      bytes.push_back(static_cast<char>(bits & 0xff));
      bytes.push_back(static_cast<char>(bits >> 8));
    }
    const Value halves{WithDType(dtype, {0x10000}), bytes};
    const std::vector<double> x = testing::ToDoubles(halves);
    for (const int64_t descending : {0, 1}) {
      Ints expected(x.size());
      for (size_t i = 0; i < x.size(); ++i) expected[i] = static_cast<int64_t>(i);
      std::stable_sort(expected.begin(), expected.end(), [&](int64_t a, int64_t b) {
        if (descending == 1) std::swap(a, b);
        return x[a] < x[b] || (x[a] == x[a] && x[b] != x[b]);
      });
      EXPECT_EQ(run(halves, descending), expected) << DTypeName(dtype);
    }
  }
  // A byte that is not 0 is true.
  const Value bools = testing::MakeValue<uint8_t>(WithDType(DType::kBool, {5}), {2, 0, 1, 255, 0});
  EXPECT_EQ(run(bools, 0), (Ints{1, 4, 0, 2, 3}));
  EXPECT_EQ(run(bools, 1), (Ints{0, 2, 3, 1, 4}));
}

TEST(HostKernelsTest, CumSumRoundsHalfTypesOnceAndWraps) {
  const auto run = [](const Value& x, int64_t reverse) {
    const Kernel kernel("cum_sum", {x}, {{"axis", int64_t{0}}, {"reverse", reverse}});
    return testing::ToDoubles(kernel.Run({(*kernel).units()}));
  };
  using Doubles = std::vector<double>;
  // In f16 a quarter more than 512 is 512.
  const Value halves = testing::FromDoubles(WithDType(DType::kF16, {3}), {512, 0.25, 0.25});
  EXPECT_EQ(run(halves, 0), (Doubles{512, 512, 512.5}));
  EXPECT_EQ(run(halves, 1), (Doubles{512.5, 0.5, 0.25}));
  // Sums that are infinite in f16 may come back.
  const Value large = testing::FromDoubles(WithDType(DType::kF16, {3}), {60000, 60000, -60000});
  EXPECT_EQ(run(large, 0), (Doubles{60000, std::numeric_limits<double>::infinity(), 60000}));
  const Value bytes = testing::FromDoubles(WithDType(DType::kI8, {3}), {100, 100, 100});
  EXPECT_EQ(run(bytes, 0), (Doubles{100, -56, 44}));
  const int64_t most = std::numeric_limits<int64_t>::max();
  const Kernel longs("cum_sum", {testing::MakeValue<int64_t>(Ints{2}, {most, 1})},
                     {{"axis", int64_t{0}}});
  EXPECT_EQ(testing::Elements<int64_t>(longs.Run({1})),
            (Ints{most, std::numeric_limits<int64_t>::min()}));
  // The first is the element itself: nothing is added to it.
  for (const double sum : run(testing::MakeValue<double>(Ints{2}, {-0.0, -0.0}), 0)) {
    EXPECT_TRUE(std::signbit(sum));
  }
}

TEST(HostKernelsTest, IndicesAreChecked) {
  const auto text = [](const std::string& op, const std::vector<Value>& inputs,
                       const Attributes& attributes) {
    const Kernel kernel(op, inputs, attributes);
    const absl::Status status = kernel.TryRun();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << op;
    return ErrorOf(status).message;
  };
  const auto floats = [](const Ints& sizes) {
    return testing::Zeros(WithDType(DType::kF32, sizes));
  };
  const Value bad = testing::MakeValue<int32_t>(Ints{2, 2}, {0, 2, 3, -1});
  const Attributes axis = {{"axis", int64_t{0}}};
  EXPECT_EQ(text("take", {floats({3, 5}), bad}, axis),
            "take: input 1, i32[2,2], holds 3 at [1,0], expected from 0 to 2");
  EXPECT_EQ(text("take_along", {floats({4, 2}), bad}, axis),
            "take_along: input 1, i32[2,2], holds -1 at [1,1], expected from 0 to 3");
  EXPECT_EQ(text("take", {floats({0, 5}), bad}, axis),
            "take: input 1, i32[2,2], holds 0 at [0,0], expected none, for there is nothing to "
            "choose from");
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI8}) {
    EXPECT_EQ(text("scatter_add", {testing::Zeros(WithDType(dtype, {2, 2, 5})), bad},
                   {{"axis", int64_t{0}}, {"size", int64_t{4}}}),
              "scatter_add: input 1, i32[2,2], holds -1 at [1,1], expected from 0 to 3");
    EXPECT_EQ(text("scatter_add_along", {testing::Zeros(WithDType(dtype, {2, 2})), bad},
                   {{"axis", int64_t{1}}, {"size", int64_t{3}}}),
              "scatter_add_along: input 1, i32[2,2], holds 3 at [1,0], expected from 0 to 2");
    EXPECT_EQ(text("scatter_add", {testing::Zeros(WithDType(dtype, {2, 2, 5})), bad},
                   {{"axis", int64_t{0}}, {"size", int64_t{0}}}),
              "scatter_add: input 1, i32[2,2], holds 0 at [0,0], expected none, for there is "
              "nothing to choose from");
  }
  EXPECT_EQ(text("one_hot", {bad}, {{"depth", int64_t{3}}, {"dtype", std::string("f32")}}),
            "one_hot: input 0, i32[2,2], holds 3 at [1,0], expected from 0 to 2");
  EXPECT_EQ(text("cross_entropy", {floats({2, 2, 3}), bad}, {}),
            "cross_entropy: input 1, i32[2,2], holds 3 at [1,0], expected from 0 to 2");
  EXPECT_EQ(text("cross_entropy", {floats({2, 2, 3}), bad}, {{"ignore_index", int64_t{3}}}),
            "cross_entropy: input 1, i32[2,2], holds -1 at [1,1], expected from 0 to 2, or 3, "
            "which is ignored");
  EXPECT_EQ(text("cross_entropy_grad", {floats({2, 2, 3}), bad, floats({2, 2})}, {}),
            "cross_entropy_grad: input 1, i32[2,2], holds 3 at [1,0], expected from 0 to 2");
  const Value four = testing::MakeValue<int64_t>(Ints{1}, {4});
  const Value less = testing::MakeValue<int64_t>(Ints{1}, {-1});
  const Attributes parts = {{"parts", int64_t{2}}};
  EXPECT_EQ(text("pack_rows", {floats({6, 2}), four}, parts),
            "pack_rows: input 1, i64[1], holds 4 at [0], expected from 0 to 3");
  EXPECT_EQ(text("unpack_rows", {floats({6, 2}), less}, parts),
            "unpack_rows: input 1, i64[1], holds -1 at [0], expected from 0 to 3");
  // Every dtype is read as what it is.
  EXPECT_EQ(text("take", {floats({255}), testing::MakeValue<uint8_t>(Ints{1}, {255})}, axis),
            "take: input 1, u8[1], holds 255 at [0], expected from 0 to 254");
  EXPECT_EQ(text("take", {floats({300}), testing::MakeValue<int8_t>(Ints{1}, {-1})}, axis),
            "take: input 1, i8[1], holds -1 at [0], expected from 0 to 299");
  EXPECT_EQ(text("take", {floats({2}), testing::MakeValue<int16_t>(Ints{}, {-300})}, axis),
            "take: input 1, i16[], holds -300 at [], expected from 0 to 1");
  EXPECT_EQ(
      text("take", {floats({2}), testing::MakeValue<int64_t>(Ints{1}, {int64_t{1} << 32})}, axis),
      "take: input 1, i64[1], holds 4294967296 at [0], expected from 0 to 1");
}

// Bytes that no shape rule sees: of each op that may fail some kernel fails for them, and no other.
TEST(HostKernelsTest, AnOpFailsWhereItSaysThatItMayAndNowhereElse) {
  std::mt19937_64 random(kSeed);
  std::set<std::string> failed;  // with the dtype
  std::set<std::string> may_fail;
  for (const DType dtype : AllDTypes()) {
    for (const Case& c : testing::KernelCases()) {
      if (!Takes(c, dtype)) continue;
      for (const int fill : {0, 0x80, -1}) {
        std::vector<Value> inputs;
        for (size_t i = 0; i < c.inputs.size(); ++i) {
          inputs.push_back(testing::Zeros(TypeOfInput(c, i, dtype)));
          for (char& byte : inputs.back().bytes) {
            byte = static_cast<char>(fill < 0 ? random() : static_cast<uint64_t>(fill));
          }
        }
        const Kernel kernel(c.op, inputs, c.attributes);
        ASSERT_TRUE(kernel.ok());
        const std::string what = c.op + " of " + std::string(DTypeName(dtype));
        if (kernel.may_fail()) may_fail.insert(what);
        const absl::Status status = kernel.TryRun();
        if (status.ok()) continue;
        failed.insert(what);
        EXPECT_TRUE(kernel.may_fail()) << what << ": " << status;
      }
    }
  }
  EXPECT_EQ(failed, may_fail);
  // Nothing that says so stands outside this test.
  for (const OpDef* def : AllOps()) {
    const std::string prefix = std::string(def->name) + " of ";
    const auto found = may_fail.lower_bound(prefix);
    EXPECT_EQ(found != may_fail.end() && found->compare(0, prefix.size(), prefix) == 0,
              def->fallible != 0)
        << def->name;
  }
}

// Whatever types its operands have: a collective of whole numbers is none of those.
TEST(HostKernelsTest, OfCollectivesThoseWithCountsAtRunTimeMayFail) {
  const TensorType type = WithDType(DType::kI64, {2});
  const std::vector<const TensorType*> inputs = {&type, &type};
  Collective collective;
  for (const OpDef* def : AllOps()) {
    if (def->effect != Effect::kCollective) continue;
    NodeView node;
    node.op = def->name;
    node.inputs = inputs;
    node.collective = &collective;
    collective.kind = def->kind;
    collective.runtime_counts_input = -1;
    EXPECT_FALSE(MayFail(*def, node)) << def->name;
    collective.runtime_counts_input = 1;
    EXPECT_TRUE(MayFail(*def, node)) << def->name;
  }
}

TEST(HostKernelsTest, ScatterAddRoundsHalfTypesOnceAndWraps) {
  const Value zeros = testing::MakeValue<int32_t>(Ints{3}, {1, 1, 1});
  const Attributes two = {{"axis", int64_t{0}}, {"size", int64_t{2}}};
  const Kernel halves("scatter_add",
                      {testing::FromDoubles(WithDType(DType::kF16, {3}), {0.25, 512, 0.25}), zeros},
                      two);
  EXPECT_EQ(testing::ToDoubles(halves.Run({1})), (std::vector<double>{0, 512.5}));
  const Kernel bytes("scatter_add_along",
                     {testing::FromDoubles(WithDType(DType::kI8, {3}), {100, 100, 100}), zeros},
                     two);
  EXPECT_EQ(testing::ToDoubles(bytes.Run({1})), (std::vector<double>{0, 44}));
}

TEST(HostKernelsTest, ElementwiseOpsRunInPlace) {
  std::mt19937_64 random(kSeed);
  for (const DType dtype : AllDTypes()) {
    for (const Case& c : testing::KernelCases()) {
      const OpDef* const def = FindOp(c.op);
      if (!def->elementwise || !Takes(c, dtype)) continue;
      const std::vector<Value> inputs = InputsOf(c, dtype, &random);
      const Kernel kernel(c.op, inputs, c.attributes);
      ASSERT_TRUE(kernel.ok());
      const Value expected = kernel.Run({(*kernel).units()});
      for (size_t in_place = 0; in_place < inputs.size(); ++in_place) {
        if (inputs[in_place].type != expected.type || expected.bytes.empty()) continue;
        std::vector<Value> copies = inputs;
        std::vector<const void*> pointers;
        for (Value& copy : copies) pointers.push_back(&copy.bytes[0]);
        ASSERT_TRUE((*kernel).RunAll({pointers, {const_cast<void*>(pointers[in_place])}, {}}).ok());
        EXPECT_EQ(copies[in_place], expected)
            << c.op << " " << expected.type.ToString() << " in place of input " << in_place;
      }
    }
  }
}

TEST(HostKernelsTest, EveryLocalOpHasOneAndNoCollective) {
  std::set<std::string> tested = {"fill"};
  for (const Case& c : testing::KernelCases()) tested.insert(c.op);
  for (const OpDef* def : AllOps()) {
    EXPECT_EQ(tested.count(std::string(def->name)) != 0, def->effect != Effect::kCollective)
        << def->name;
  }
  NodeView node;
  node.op = "all_reduce";
  EXPECT_EQ(MakeHostKernel(node, {}).status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace chorus
