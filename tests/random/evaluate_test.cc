// What the reference itself is worth: its gradients against differences of its values.
#include "tests/random/evaluate.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/random/generate.h"

namespace chorus {
namespace random_programs {
namespace {

TEST(ProgramTest, IsTheSameFromItsSeedAndFromItsText) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    const Program program = Generate(seed);
    EXPECT_EQ(ToText(program), ToText(Generate(seed)));
    const absl::StatusOr<Program> again = FromText(ToText(program));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(ToText(program), ToText(*again));
    EXPECT_TRUE(Check(program).ok()) << Check(program);
  }
  EXPECT_FALSE(FromText("program-1 1 2 3").ok());
}

TEST(ProgramTest, EveryOrderKeepsTheOrderOfItsGroups) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    const Program program = Generate(seed);
    for (int t = 0; t < program.trainers(); ++t) {
      std::vector<int> order = OrderOf(program, t, true);
      std::vector<int> last(program.groups.size(), -1);
      for (const int s : order) {
        const Statement& statement = program.statements[static_cast<size_t>(s)];
        if (statement.group < 0) continue;
        EXPECT_GT(s, last[static_cast<size_t>(statement.group)]) << "seed " << seed;
        last[static_cast<size_t>(statement.group)] = s;
      }
      std::sort(order.begin(), order.end());
      EXPECT_EQ(order, OrderOf(program, t, false)) << "seed " << seed;
    }
  }
}

bool Reduces(Op op) {
  return op == Op::kAllReduce || op == Op::kReduce || op == Op::kReduceScatter ||
         op == Op::kReduceScatterTensor || op == Op::kReduceScatterRagged;
}

// Those that its numbers can have.
std::vector<Reduction> ReductionsOf(bool floating) {
  if (floating) {
    return {Reduction::kSum, Reduction::kAvg, Reduction::kProduct,
            Reduction::kMin, Reduction::kMax, Reduction::kPremulSum};
  }
  return {Reduction::kSum,  Reduction::kProduct, Reduction::kMin, Reduction::kMax,
          Reduction::kBand, Reduction::kBor,     Reduction::kBxor};
}

std::string KindOf(Op op, Reduction reduction, bool floating) {
  return absl::StrCat(OpName(op), " ", ReductionName(reduction),
                      floating ? " of floating numbers" : " of whole numbers");
}

// What a program has of what programs are made of, by name: its ops, those collectives that reduce
// by reduction and kind of number, and what its values and its gradients are.
std::set<std::string> KindsIn(const Program& program) {
  std::set<std::string> kinds;
  int order = 0;
  for (const Statement& s : program.statements) {
    kinds.insert(OpName(s.op));
    if (Reduces(s.op)) {
      const bool floating = IsFloating(program.value(s.calls[0].in[0]).dtype);
      kinds.insert(KindOf(s.op, s.reduction, floating));
    }
    if (s.joined) kinds.insert("joined");
    if (s.captured) kinds.insert("captured");
    for (const Call& call : s.calls) {
      if (call.no_grad) kinds.insert("no_grad");
    }
    if (s.op == Op::kGradient) {
      order += !s.retain;
      kinds.insert(absl::StrCat("gradient of order ", order));
    }
  }
  if (!program.donated.empty()) kinds.insert("donated");
  return kinds;
}

// Of what `random_test` runs: what no program of it has, nothing has been seen of.
TEST(ProgramTest, AllThatProgramsAreMadeOfIsInTheFirst300) {
  std::map<std::string, int> programs;  // by kind
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    for (const std::string& kind : KindsIn(Generate(seed))) ++programs[kind];
  }
  std::vector<std::string> kinds = {"joined",
                                    "donated",
                                    "captured",
                                    "no_grad",
                                    "gradient of order 1",
                                    "gradient of order 2",
                                    "gradient of order 3"};
  for (int op = 0; op < static_cast<int>(Op::kCount); ++op) {
    kinds.push_back(OpName(static_cast<Op>(op)));
    if (!Reduces(static_cast<Op>(op))) continue;
    for (const bool floating : {false, true}) {
      for (const Reduction reduction : ReductionsOf(floating)) {
        kinds.push_back(KindOf(static_cast<Op>(op), reduction, floating));
      }
    }
  }
  for (const std::string& kind : kinds) {
    EXPECT_GT(programs[kind], 0) << "no program has " << kind;
  }
}

// The sum over ranks of what the roots of the first gradient come to, with `seeds` for seeds.
double Loss(const std::vector<Numbers>& numbers, const std::vector<Numbers>& seeds,
            const Program& program, const Statement& gradient) {
  double loss = 0;
  for (const Call& call : gradient.calls) {
    const size_t n = (call.in.size() - static_cast<size_t>(call.wanted)) / 2;
    for (size_t i = 0; i < n; ++i) {
      if (program.value(call.in[i]).absent) continue;
      const auto& values = numbers[static_cast<size_t>(call.in[i])].values;
      for (size_t e = 0; e < values.size(); ++e) {
        const int seed = call.in[n + i];
        loss += values[e] * (seed < 0 ? 1 : seeds[static_cast<size_t>(seed)].values[e]);
      }
    }
  }
  return loss;
}

bool IsSmooth(const Program& program) {
  for (const Statement& s : program.statements) {
    for (const Call& call : s.calls) {
      if (call.no_grad) return false;
    }
    // What is chosen, and what is a constant for the gradient alone.
    switch (s.op) {
      case Op::kDetach:
      case Op::kAbs:
      case Op::kRelu:
      case Op::kSign:
      case Op::kFloor:
      case Op::kCeil:
      case Op::kMaximum:
      case Op::kMinimum:
      case Op::kMax:
      case Op::kMin:
      case Op::kWhere:
      case Op::kLess:
      case Op::kEqual:
      case Op::kArgMax:
      case Op::kSort:
      case Op::kArgSort:
      case Op::kMaxPool2d:
        return false;
      default:
        break;
    }
    if (Reduces(s.op) && IsFloating(program.value(s.calls[0].in[0]).dtype) &&
        (s.reduction == Reduction::kMin || s.reduction == Reduction::kMax)) {
      return false;
    }
  }
  return true;
}

TEST(EvaluateTest, GradientsAreDifferencesOfValues) {
  constexpr double kStep = 1e-5;
  int compared = 0;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    GeneratorOptions options;
    options.orders = 1;
    const Program program = Generate(seed, options);
    const Statement* gradient = nullptr;
    for (const Statement& s : program.statements) {
      if (s.op == Op::kGradient && gradient == nullptr) gradient = &s;
    }
    if (gradient == nullptr || !IsSmooth(program)) continue;
    const auto numbers = Evaluate(program);
    ASSERT_TRUE(numbers.ok()) << numbers.status();
    for (const Call& call : gradient->calls) {
      for (int w = 0; w < call.wanted; ++w) {
        const int x = call.in[call.in.size() - static_cast<size_t>(call.wanted - w)];
        const auto& got = (*numbers)[static_cast<size_t>(call.out[static_cast<size_t>(w)])].values;
        for (size_t s = 0; s < program.statements.size(); ++s) {
          const Statement& leaf = program.statements[s];
          if (leaf.op != Op::kLeaf || leaf.calls[0].out[0] != x) continue;
          for (size_t e = 0; e < leaf.data.size() && e < 4; ++e) {
            double losses[2];
            for (const int side : {0, 1}) {
              Program moved = program;
              moved.statements[s].data[e] += (side == 0 ? -1 : 1) * kStep;
              const auto there = Evaluate(moved);
              ASSERT_TRUE(there.ok()) << there.status();
              losses[side] = Loss(*there, *numbers, program, *gradient);
            }
            const double difference = (losses[1] - losses[0]) / (2 * kStep);
            EXPECT_NEAR(got[e], difference, 1e-4 * std::max(1.0, std::fabs(difference)))
                << "seed " << seed << ", v" << x << " element " << e;
            ++compared;
          }
        }
      }
    }
  }
  std::cout << compared << " derivatives compared" << std::endl;
  EXPECT_GT(compared, 500);
}

// The numbers of a chunk and a half, none of which a mean may leave out.
TEST(EvaluateTest, AMeanWithoutOneOfItsTermsIsWrong) {
  constexpr int kTerms = 2000;
  Program p;
  p.trainer_of = {0};
  p.shuffles = {0};
  p.groups = {GroupOf{{0}, false}};
  const int x = p.AddValue(0, DType::kF32, {kTerms});
  const int y = p.AddValue(0, DType::kF32, {});
  p.statements.resize(2);
  Statement& leaf = p.statements[0];
  for (int i = 0; i < kTerms; ++i) leaf.data.push_back(static_cast<float>(1 + i % 7 * 0.1));
  leaf.calls.resize(1);
  leaf.calls[0].rank = 0;
  leaf.calls[0].out = {x};
  Statement& mean = p.statements[1];
  mean.op = Op::kMean;
  mean.ints = {0};
  mean.calls.resize(1);
  mean.calls[0].rank = 0;
  mean.calls[0].in = {x};
  mean.calls[0].out = {y};
  const auto numbers = Evaluate(p);
  ASSERT_TRUE(numbers.ok()) << numbers.status();
  EXPECT_LT(kSlack * (*numbers)[static_cast<size_t>(y)].errors[0], 1.0 / kTerms);
}

// A worked example: two ranks, y = AllReduce(x), x = 1 and 2, losses y^3 and 2y.
TEST(EvaluateTest, ThirdOrderAcrossRanksIsRight) {
  Program p;
  p.trainer_of = {0, 1};
  p.shuffles = {0, 0};
  p.groups = {GroupOf{{0, 1}, false}};
  const auto add = [&p](Op op, std::vector<Call> calls) -> Statement& {
    Statement s;
    s.op = op;
    s.calls = std::move(calls);
    p.statements.push_back(std::move(s));
    return p.statements.back();
  };
  const auto call = [](int rank, std::vector<int> in, std::vector<int> out, int wanted = 0) {
    Call c;
    c.rank = rank;
    c.in = std::move(in);
    c.out = std::move(out);
    c.wanted = wanted;
    return c;
  };
  const auto value = [&p](int rank) { return p.AddValue(rank, DType::kF64, {}); };
  int x[2];
  int y[2];
  for (int r : {0, 1}) {
    x[r] = value(r);
    Statement& leaf = add(Op::kLeaf, {call(r, {}, {x[r]})});
    leaf.data = {r + 1.0};
    leaf.requires_grad = true;
  }
  y[0] = value(0);
  y[1] = value(1);
  add(Op::kAllReduce, {call(0, {x[0]}, {y[0]}), call(1, {x[1]}, {y[1]})}).group = 0;
  const int square = value(0);
  add(Op::kMul, {call(0, {y[0], y[0]}, {square})});
  const int cube = value(0);
  add(Op::kMul, {call(0, {square, y[0]}, {cube})});
  const int twice = value(1);
  add(Op::kMulNumber, {call(1, {y[1]}, {twice})}).number = 2;
  int roots[2] = {cube, twice};
  const double expected[] = {29, 2088, 3984};
  for (int order = 0; order < 3; ++order) {
    int g[2] = {value(0), value(1)};
    Statement& s = add(Op::kGradient, {call(0, {roots[0], -1, x[0]}, {g[0]}, 1),
                                       call(1, {roots[1], -1, x[1]}, {g[1]}, 1)});
    s.create = true;
    const auto numbers = Evaluate(p);
    ASSERT_TRUE(numbers.ok()) << numbers.status();
    for (int r : {0, 1}) {
      EXPECT_EQ((*numbers)[static_cast<size_t>(g[r])].values, std::vector<double>{expected[order]});
      if (order == 0) {
        roots[r] = value(r);
        add(Op::kMul, {call(r, {g[r], g[r]}, {roots[r]})});
      } else {
        roots[r] = g[r];
      }
    }
  }
  EXPECT_TRUE(Check(p).ok()) << Check(p);
}

}  // namespace
}  // namespace random_programs
}  // namespace chorus
