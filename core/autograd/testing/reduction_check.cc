#include "core/autograd/testing/reduction_check.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/autograd/testing/gradient_check.h"
#include "core/ops/registry.h"
#include "core/ops/testing/near.h"
#include "core/ops/testing/value.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

using Values = std::vector<ValueIndex>;
using Ints = std::vector<int64_t>;
using Doubles = std::vector<double>;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kColumns = 3;

const Reduction kFloatingReductions[] = {Reduction::kSum, Reduction::kAvg, Reduction::kProduct,
                                         Reduction::kMin, Reduction::kMax, Reduction::kPremulSum};

double FactorOf(int32_t rank) { return 1.5 + rank; }

// Rows of each member's piece.
Ints RowsOfPieces(const ReducingOp& op, int32_t ranks) {
  Ints rows;
  for (int32_t r = 0; r < ranks; ++r) rows.push_back(!op.uneven ? 2 : r == 1 ? 0 : 1 + r % 3);
  return rows;
}

bool Scatters(const ReducingOp& op) {
  return op.op == "reduce_scatter" || op.op == "reduce_scatter_tensor";
}

// Which elements of the whole come out on a member, as [begin, end).
std::pair<int64_t, int64_t> Visible(const ReducingOp& op, int32_t rank, int32_t ranks) {
  if (op.op == "reduce" && rank != ranks - 1) return {0, 0};
  if (!Scatters(op)) return {0, op.Rows(ranks) * kColumns};
  const Ints rows = RowsOfPieces(op, ranks);
  int64_t begin = 0;
  for (int32_t r = 0; r < rank; ++r) begin += rows[r] * kColumns;
  return {begin, begin + rows[rank] * kColumns};
}

TensorType WholeType(const ReducingOp& op, int32_t ranks, DType dtype) {
  return TensorType(dtype, {op.Rows(ranks), kColumns});
}

// One element by the formulas: `x` by rank.
double Result(Reduction reduction, const Doubles& x) {
  double y = reduction == Reduction::kProduct ? 1 : 0;
  for (size_t r = 0; r < x.size(); ++r) {
    if (reduction == Reduction::kProduct) y *= x[r];
    if (reduction == Reduction::kSum || reduction == Reduction::kAvg) y += x[r];
    if (reduction == Reduction::kPremulSum) y += FactorOf(static_cast<int32_t>(r)) * x[r];
    if (reduction == Reduction::kMin) y = r == 0 || !(y <= x[r]) ? x[r] : y;
    if (reduction == Reduction::kMax) y = r == 0 || !(y >= x[r]) ? x[r] : y;
  }
  const bool selects = reduction == Reduction::kMin || reduction == Reduction::kMax;
  for (const double element : x) {
    if (selects && std::isnan(element)) y = kNan;
  }
  return reduction == Reduction::kAvg ? y / static_cast<double>(x.size()) : y;
}

double Gradient(Reduction reduction, const Doubles& x, size_t r, double g) {
  const double y = Result(reduction, x);
  const auto holds = [y](double element) {
    return element == y || (std::isnan(element) && std::isnan(y));
  };
  switch (reduction) {
    case Reduction::kAvg:
      return g / static_cast<double>(x.size());
    case Reduction::kPremulSum:
      return FactorOf(static_cast<int32_t>(r)) * g;
    case Reduction::kProduct: {
      double others = 1;
      for (size_t k = 0; k < x.size(); ++k) {
        if (k != r) others *= x[k];
      }
      return others * g;
    }
    case Reduction::kMin:
    case Reduction::kMax:
      return holds(x[r]) ? g / static_cast<double>(std::count_if(x.begin(), x.end(), holds)) : 0;
    default:
      return g;
  }
}

void ExpectNear(const Doubles& got, const Doubles& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(IsNear(got[i], expected[i], 1e-12 * std::abs(expected[i]))) << "at " << i;
  }
}

// Results and gradients of all ranks against the formulas. `x` and `g` by rank; `g` is of the
// whole, of which each member has its part.
void CheckValues(const ReducingOp& op, Reduction reduction, const std::vector<Doubles>& x,
                 const std::vector<Doubles>& g) {
  SCOPED_TRACE(absl::StrCat(op.op, op.uneven ? " uneven " : " ", ReductionName(reduction)));
  const auto ranks = static_cast<int32_t>(x.size());
  const TensorType type = WholeType(op, ranks, DType::kF64);
  std::vector<RankCase> cases(x.size());
  const size_t size = x[0].size();
  Doubles whole_g(size, 0);
  for (size_t r = 0; r < x.size(); ++r) {
    cases[r].inputs = {FromDoubles(type, x[r])};
    const auto [begin, end] = Visible(op, static_cast<int32_t>(r), ranks);
    for (int64_t i = begin; i < end; ++i) whole_g[i] += g[r][i];
    if (op.op == "reduce" && begin == end) continue;
    TensorType part = type;
    part.dims[0] = Dim((end - begin) / kColumns);
    cases[r].grads = {FromDoubles(part, Doubles(g[r].begin() + begin, g[r].begin() + end))};
  }
  const std::vector<RankResult> results =
      RunBackward(cases, [&](RankBuilder& b, const Values& inputs) {
        return op.ApplyReduction(b, reduction, inputs[0]);
      });
  ASSERT_EQ(results.size(), x.size());
  for (size_t r = 0; r < x.size(); ++r) {
    SCOPED_TRACE(absl::StrCat("rank ", r));
    Doubles expected_y, expected_dx;
    for (size_t i = 0; i < size; ++i) {
      Doubles column;
      for (const Doubles& row : x) column.push_back(row[i]);
      expected_y.push_back(Result(reduction, column));
      expected_dx.push_back(Gradient(reduction, column, r, whole_g[i]));
    }
    const auto [begin, end] = Visible(op, static_cast<int32_t>(r), ranks);
    if (!results[r].outputs.empty()) {
      ExpectNear(ToDoubles(results[r].outputs[0]),
                 Doubles(expected_y.begin() + begin, expected_y.begin() + end));
    }
    ExpectNear(ToDoubles(results[r].gradients[0]), expected_dx);
  }
}

}  // namespace

int64_t ReducingOp::Rows(int32_t ranks) const {
  int64_t sum = 0;
  for (const int64_t n : RowsOfPieces(*this, ranks)) sum += n;
  return Scatters(*this) ? sum : 2;
}

std::vector<ValueIndex> ReducingOp::ApplyReduction(RankBuilder& b, Reduction reduction,
                                                   ValueIndex x) const {
  RankBuilder::How how;
  how.reduction = reduction;
  if (op == "reduce") how.root = b.size() - 1;
  const Ints rows = RowsOfPieces(*this, b.size());
  Values inputs = {x};
  if (op == "reduce_scatter") {
    inputs.clear();
    int64_t begin = 0;
    for (const int64_t n : rows) {
      inputs.push_back(
          b.Op("slice", {x}, {{"axis", int64_t{0}}, {"begin", begin}, {"end", begin + n}}));
      begin += n;
    }
  } else if (Scatters(*this) && uneven) {
    how.counts = rows;
  }
  if (reduction == Reduction::kPremulSum) {
    Attributes factor = TypeAttributes(TensorType(FactorType(b.graph().TypeOf(x).dtype), {}));
    factor.push_back({"value", FactorOf(b.rank())});
    inputs.push_back(b.Op("fill", {}, factor));
  }
  Values outputs = b.ApplyCollective(op, inputs, how);
  outputs.resize(NumVisibleOutputs(*b.graph().nodes().back().spec.collective,
                                   static_cast<int>(outputs.size())));
  return outputs;
}

void CheckReductionGradients(int32_t ranks, const ReducingOp& op) {
  for (const Reduction reduction : kFloatingReductions) {
    SCOPED_TRACE(absl::StrCat(op.op, op.uneven ? " uneven " : " ", ReductionName(reduction)));
    CheckGradients(ranks, {WholeType(op, ranks, DType::kF64)},
                   [&](RankBuilder& b, const Values& x) {
                     Values y = op.ApplyReduction(b, reduction, b.Op("sin", {x[0]}));
                     for (ValueIndex& part : y) part = b.Op("mul", {part, part});
                     y.push_back(b.Op("mul", {x[0], x[0]}));
                     return y;
                   });
  }
}

void CheckProductOfZeros(const ReducingOp& op) {
  for (const int32_t ranks : {3, 5}) {
    for (int32_t zeros = 1; zeros <= 3; ++zeros) {
      SCOPED_TRACE(absl::StrCat(op.op, " with ", zeros, " zeros"));
      CheckGradients(
          ranks, {WholeType(op, ranks, DType::kF64)},
          [&](RankBuilder& b, const Values& x) {
            // With a first and a second derivative where the product is 0.
            Values y = op.ApplyReduction(b, Reduction::kProduct, x[0]);
            for (ValueIndex& part : y) part = b.Op("add", {part, b.Op("mul", {part, part})});
            // Of its own, so that there is something to compare where all products vanish.
            y.push_back(b.Op("add", {x[0], b.Op("mul", {x[0], x[0]})}));
            return y;
          },
          [&](int32_t rank, std::vector<Value>* inputs) {
            Doubles x = ToDoubles((*inputs)[0]);
            // A different one is left alone in each column.
            for (size_t i = 0; i < x.size(); ++i) {
              if ((rank + static_cast<int32_t>(i)) % ranks < zeros) x[i] = 0;
            }
            (*inputs)[0] = FromDoubles((*inputs)[0].type, x);
          });
    }
  }
}

void CheckReductionValues(const ReducingOp& op) {
  // By element: what members 0, 1 and 2 have.
  const std::vector<Doubles> columns = {
      {1, 2, 3},    {2, 2, 1},       {5, 5, 5},          {0.0, -0.0, 1},    {-0.0, 0.0, -1},
      {kNan, 1, 2}, {1, kNan, kNan}, {kNan, kNan, kNan}, {kInf, 1, kInf},   {-kInf, 2, 3},
      {0, 2, 3},    {0, 0, 3},       {0, 0, 0},          {1e200, 1e200, 3}, {1e-200, 1e-200, 3},
      {0, kNan, 3}, {0.1, 0.2, 0.3}, {-1, -2, -3},
  };
  const auto ranks = static_cast<int32_t>(columns[0].size());
  const auto size = static_cast<size_t>(op.Rows(ranks) * kColumns);
  std::vector<bool> seen(columns.size(), false);
  for (const Reduction reduction : kFloatingReductions) {
    // As many shifts as bring every column to every position that there is.
    for (size_t shift = 0; shift < columns.size(); shift += 3) {
      std::vector<Doubles> x(columns[0].size(), Doubles(size));
      std::vector<Doubles> g = x;
      for (size_t i = 0; i < size; ++i) {
        for (size_t r = 0; r < x.size(); ++r) {
          x[r][i] = columns[(i + shift) % columns.size()][r];
          seen[(i + shift) % columns.size()] = true;
          // Of both signs: where a factor is infinite, products must not be summed.
          g[r][i] = (r == 1 ? -1 : 1 + static_cast<double>(r)) + 0.25 * static_cast<double>(i);
        }
      }
      CheckValues(op, reduction, x, g);
    }
    if (reduction == Reduction::kProduct) continue;  // 0 times an infinite gradient is NaN there
    for (const double bad : {kNan, kInf}) {
      std::vector<Doubles> x(columns[0].size(), Doubles(size));
      std::vector<Doubles> g(x.size(), Doubles(size, bad));
      for (size_t r = 0; r < x.size(); ++r) {
        for (size_t i = 0; i < size; ++i) x[r][i] = static_cast<double>((r + i) % x.size());
      }
      CheckValues(op, reduction, x, g);
    }
  }
  for (size_t c = 0; c < columns.size(); ++c) EXPECT_TRUE(seen[c]) << "column " << c;
}

void CheckReductionDTypes(const ReducingOp& op) {
  struct Case {
    DType dtype;
    Reduction reduction;
    Doubles x;  // by rank
    double expected;
  };
  const std::vector<Case> cases = {
      {DType::kU8, Reduction::kSum, {200, 100, 1}, 45},
      {DType::kI8, Reduction::kSum, {100, 100, 1}, -55},
      {DType::kI16, Reduction::kProduct, {32767, 32767, 3}, 3},
      {DType::kI32, Reduction::kSum, {2147483647, 1, 0}, -2147483648.0},
      {DType::kU8, Reduction::kMin, {200, 100, 255}, 100},
      {DType::kI8, Reduction::kMax, {-100, -3, -128}, -3},
      {DType::kI64, Reduction::kBand, {6, 7, 12}, 4},
      {DType::kI32, Reduction::kBor, {6, 1, 8}, 15},
      {DType::kU8, Reduction::kBxor, {6, 3, 255}, 250},
      // Any byte but 0 is true.
      {DType::kBool, Reduction::kSum, {0, 2, 255}, 1},
      {DType::kBool, Reduction::kSum, {0, 0, 0}, 0},
      {DType::kBool, Reduction::kMax, {0, 3, 0}, 1},
      {DType::kBool, Reduction::kProduct, {1, 2, 4}, 1},
      {DType::kBool, Reduction::kProduct, {1, 0, 4}, 0},
      {DType::kBool, Reduction::kMin, {1, 2, 0}, 0},
      {DType::kBool, Reduction::kBand, {1, 2, 4}, 1},
      {DType::kBool, Reduction::kBor, {0, 0, 4}, 1},
      {DType::kBool, Reduction::kBxor, {1, 2, 4}, 1},
      {DType::kBool, Reduction::kBxor, {0, 2, 4}, 0},
      {DType::kF16, Reduction::kSum, {0.25, 512, 0.25}, 512.5},
      {DType::kF16, Reduction::kAvg, {60000, 60000, 60000}, 60000},
      {DType::kBF16, Reduction::kSum, {0.5, 256, 1.5}, 258},
      {DType::kF16, Reduction::kProduct, {256, 256, 0.5}, 32768},
      {DType::kF16, Reduction::kPremulSum, {1, 2, 4}, 1.5 + 5 + 14},
      {DType::kF32, Reduction::kAvg, {1, 2, 6}, 3},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(absl::StrCat(op.op, " ", DTypeName(c.dtype), " ", ReductionName(c.reduction)));
    std::vector<RankCase> ranks(c.x.size());
    const TensorType type = WholeType(op, static_cast<int32_t>(c.x.size()), c.dtype);
    for (size_t r = 0; r < ranks.size(); ++r) {
      ranks[r].inputs = {FromDoubles(type, Doubles(type.num_elements(), c.x[r]))};
      ranks[r].takes_part = false;
    }
    const std::vector<RankResult> results =
        RunBackward(ranks, [&](RankBuilder& b, const Values& inputs) {
          return op.ApplyReduction(b, c.reduction, inputs[0]);
        });
    ASSERT_EQ(results.size(), ranks.size());
    for (const RankResult& result : results) {
      for (const Value& y : result.outputs) {
        EXPECT_EQ(ToDoubles(y), Doubles(y.type.num_elements(), c.expected));
      }
    }
    ASSERT_FALSE(results.back().outputs.empty());
  }
}

void CheckAbandonedReductions(const ReducingOp& op) {
  for (const Reduction reduction : kFloatingReductions) {
    for (const int32_t ranks : {1, 2, 3}) {
      SCOPED_TRACE(absl::StrCat(op.op, op.uneven ? " uneven " : " ", ReductionName(reduction)));
      CheckAbandoned(
          ranks, {WholeType(op, ranks, DType::kF64)},
          [&](RankBuilder& b, const Values& x) { return op.ApplyReduction(b, reduction, x[0]); });
    }
  }
}

void CheckReductionTexts(const std::string& op) {
  const auto infer = [&](Reduction reduction, DType dtype, const std::vector<TensorType>& more = {},
                         bool wants_grad = false) {
    Collective c;
    c.kind = FindOp(op)->kind;
    c.rank = GroupRank(0);
    if (HasRoot(c.kind)) c.root = GroupRank(0);
    c.reduction = reduction;
    c.wants_grad = wants_grad;
    const int pieces = op == "reduce_scatter" ? 2 : 1;
    std::vector<TensorType> inputs(pieces, TensorType(dtype, {4}));
    inputs.insert(inputs.end(), more.begin(), more.end());
    return InferText(op, inputs, {}, &c, 2);
  };
  const std::string in = "[4]";
  const std::string out = op == "reduce_scatter_tensor" ? "[2]" : "[4]";
  const TensorType f32(DType::kF32, {});
  const TensorType f64(DType::kF64, {});
  for (int i = 0; i < 32; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (!IsSupported(dtype)) continue;
    const std::string name(DTypeName(dtype));
    const std::string ok = name + out;
    for (const Reduction reduction :
         {Reduction::kSum, Reduction::kProduct, Reduction::kMin, Reduction::kMax}) {
      EXPECT_EQ(infer(reduction, dtype), ok);
    }
    const TensorType factor = dtype == DType::kF64 ? f64 : f32;
    const bool floating = IsFloating(dtype);
    EXPECT_EQ(infer(Reduction::kAvg, dtype),
              floating ? ok : op + ": expected floating point for AVG, got " + name + in);
    EXPECT_EQ(infer(Reduction::kPremulSum, dtype, {factor}),
              floating ? ok : op + ": expected floating point for PREMUL_SUM, got " + name + in);
    for (const Reduction reduction : {Reduction::kBand, Reduction::kBor, Reduction::kBxor}) {
      const std::string what(ReductionName(reduction));
      EXPECT_EQ(
          infer(reduction, dtype),
          floating ? op + ": expected integers or bool for " + what + ", got " + name + in : ok);
    }
    // Only floating point has a gradient.
    const std::string holders = op == "reduce_scatter" ? " f32[4] f32[4]" : " f32[4]";
    EXPECT_EQ(infer(Reduction::kMax, dtype, {}, true), floating ? ok + holders : ok);
    EXPECT_EQ(infer(Reduction::kProduct, dtype, {}, true),
              floating ? ok + " " + ok + " " + ok : ok);
    EXPECT_EQ(infer(Reduction::kSum, dtype, {}, true), ok);
  }
  const std::string factor = op + ": expected the factor of PREMUL_SUM as the last input, ";
  EXPECT_EQ(infer(Reduction::kPremulSum, DType::kF64, {f32}), factor + "f64[], got f32[]");
  EXPECT_EQ(infer(Reduction::kPremulSum, DType::kBF16, {TensorType(DType::kBF16, {})}),
            factor + "f32[], got bf16[]");
  EXPECT_EQ(infer(Reduction::kPremulSum, DType::kF32, {TensorType(DType::kF32, {1})}),
            factor + "f32[], got f32[1]");
  EXPECT_EQ(infer(Reduction::kPremulSum, DType::kF32),
            op == "reduce_scatter" ? factor + "f32[], got f32[4]"
                                   : op + ": expected 1 input and a factor, got 1");
  EXPECT_EQ(infer(Reduction::kNone, DType::kF32), op + ": expected a reduction, got none");
}

}  // namespace testing
}  // namespace chorus
