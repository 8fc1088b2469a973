#include "core/autograd/testing/gradient_check.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/autograd/backward.h"
#include "core/base/error.h"
#include "core/ops/registry.h"
#include "core/ops/testing/evaluator.h"
#include "core/ops/testing/near.h"
#include "core/ops/testing/value.h"
#include "core/ops/validate.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

constexpr uint64_t kSeed = 20240607;

using MaybeValues = std::vector<absl::optional<ValueIndex>>;

// One rank's graph: forward, gradient and gradient of the gradient, with all that goes in.
struct RankGraph {
  std::unique_ptr<RankBuilder> builder;
  std::vector<ValueIndex> x, u, v;  // inputs
  std::vector<ValueIndex> y;
  MaybeValues dx;        // dL/dx
  MaybeValues ddx, ddu;  // dS/dx, dS/du
  Graph graph;
};

// Every rank takes part in the gradient of every collective, also where its own loss does not use
// the result.
std::vector<BackwardRoot> Collectives(const GraphBuilder& builder) {
  std::vector<BackwardRoot> roots;
  for (const RecordedNode& node : builder.nodes()) {
    if (node.spec.collective.has_value() && node.spec.collective->wants_grad &&
        node.spec.op != "barrier") {
      roots.push_back(BackwardRoot::AbsentResult(node.id));
    }
  }
  return roots;
}

class Check {
 public:
  Check(int32_t ranks, const std::vector<TensorType>& inputs, const RankBody& body)
      : random_(kSeed) {
    for (int32_t rank = 0; rank < ranks; ++rank) {
      RankGraph r;
      r.builder = std::make_unique<RankBuilder>(rank, ranks, 2);
      for (const TensorType& type : inputs) r.x.push_back(r.builder->Input(type));
      r.y = body(*r.builder, r.x);
      Differentiate(&r);
      ranks_.push_back(std::move(r));
    }
  }

  // Random values for every input: normally distributed, or positive whole numbers, whose sums are
  // exact and do not vanish by chance.
  void Draw(bool whole, const Adjust& adjust = nullptr) {
    values_.clear();
    for (const RankGraph& r : ranks_) {
      values_.emplace_back();
      for (const GraphInput& input : r.graph.inputs) {
        values_.back().push_back(whole ? RandomWhole(input.type, 1, 9, &random_)
                                       : RandomNormal(input.type, &random_));
      }
      // The body's inputs are the graph's first.
      if (adjust != nullptr) adjust(r.builder->rank(), &values_.back());
    }
  }
  const std::vector<std::vector<Value>>& values() const { return values_; }
  const std::vector<RankGraph>& ranks() const { return ranks_; }

  using Results = std::vector<std::vector<Value>>;
  Results Run(const std::vector<std::vector<Value>>& inputs) const {
    std::vector<Session> sessions;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      sessions.push_back(Session{&ranks_[r].graph, inputs[r], {0}, {}});
    }
    auto results = Evaluate(sessions);
    EXPECT_TRUE(results.ok()) << results.status();
    return results.ok() ? *std::move(results) : Results();
  }

  // Sum over ranks of <a, b>, where absent values are zeros.
  double Sum(const Results& results, MaybeValues (*a)(const RankGraph&),
             MaybeValues (*b)(const RankGraph&), const Results* other = nullptr) const {
    double sum = 0;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const MaybeValues left = a(ranks_[r]);
      const MaybeValues right = b(ranks_[r]);
      for (size_t i = 0; i < left.size(); ++i) {
        if (!left[i].has_value() || !right[i].has_value()) continue;
        sum += Dot(At(results, r, *left[i]), At(other != nullptr ? *other : results, r, *right[i]));
      }
    }
    return sum;
  }
  double Loss(const Results& results) const {
    return Sum(
        results, [](const RankGraph& r) { return Some(r.y); },
        [](const RankGraph& r) { return Some(r.u); });
  }
  double SecondLoss(const Results& results) const {
    return Sum(
        results, [](const RankGraph& r) { return r.dx; },
        [](const RankGraph& r) { return Some(r.v); });
  }
  static MaybeValues Some(const std::vector<ValueIndex>& values) {
    return MaybeValues(values.begin(), values.end());
  }

  // Random directions for the given inputs, zeros for the others.
  std::vector<std::vector<Value>> Direction(bool x, bool u) {
    std::vector<std::vector<Value>> directions;
    for (const RankGraph& r : ranks_) {
      directions.emplace_back();
      for (const GraphInput& input : r.graph.inputs) {
        directions.back().push_back(Zeros(input.type));
      }
      const auto fill = [&](const std::vector<ValueIndex>& which) {
        for (const ValueIndex value : which) {
          Value& direction = directions.back()[r.builder->graph().FinalIndex(value)];
          direction = RandomNormal(direction.type, &random_);
        }
      };
      if (x) fill(r.x);
      if (u) fill(r.u);
    }
    return directions;
  }
  std::vector<std::vector<Value>> Moved(double scale,
                                        const std::vector<std::vector<Value>>& direction) const {
    std::vector<std::vector<Value>> moved = values_;
    for (size_t r = 0; r < moved.size(); ++r) {
      for (size_t i = 0; i < moved[r].size(); ++i) {
        moved[r][i] = AddScaled(moved[r][i], scale, direction[r][i]);
      }
    }
    return moved;
  }

 private:
  const Value& At(const Results& results, size_t rank, ValueIndex value) const {
    return results[rank][ranks_[rank].builder->graph().FinalIndex(value)];
  }

  static void Differentiate(RankGraph* r) {
    GraphBuilder& graph = r->builder->graph();
    std::vector<BackwardRoot> roots = Collectives(graph);
    for (const ValueIndex y : r->y) {
      r->u.push_back(r->builder->Input(graph.TypeOf(y)));
      roots.push_back(BackwardRoot::Value(y, r->u.back()));
    }
    const auto first = AppendBackward(roots, r->x, &graph);
    ASSERT_TRUE(first.ok()) << first.status();
    r->dx = first->gradients;

    roots = Collectives(graph);
    for (size_t i = 0; i < r->x.size(); ++i) {
      r->v.push_back(r->builder->Input(graph.TypeOf(r->x[i])));
      if (r->dx[i].has_value()) roots.push_back(BackwardRoot::Value(*r->dx[i], r->v[i]));
    }
    std::vector<ValueIndex> wanted = r->x;
    wanted.insert(wanted.end(), r->u.begin(), r->u.end());
    const auto second = AppendBackward(roots, wanted, &graph);
    ASSERT_TRUE(second.ok()) << second.status();
    r->ddx.assign(second->gradients.begin(), second->gradients.begin() + r->x.size());
    r->ddu.assign(second->gradients.begin() + r->x.size(), second->gradients.end());
    r->graph = graph.Build();
    const absl::Status valid = ValidateGraph(r->graph, GraphLimits());
    EXPECT_TRUE(valid.ok()) << valid << "\n" << DebugString(r->graph);
  }

  std::mt19937_64 random_;
  std::vector<RankGraph> ranks_;
  std::vector<std::vector<Value>> values_;
};

bool AllEmpty(const Check& check) {
  for (const RankGraph& r : check.ranks()) {
    for (const GraphInput& input : r.graph.inputs) {
      if (input.type.num_elements() > 0) return false;
    }
  }
  return true;
}

void ExpectClose(absl::string_view what, double analytic, double numeric) {
  // Two infinities are near each other, and show nothing.
  ASSERT_TRUE(std::isfinite(analytic) && std::isfinite(numeric))
      << what << ": rule gives " << analytic << ", differences give " << numeric;
  const double scale = std::max({1.0, std::abs(analytic), std::abs(numeric)});
  EXPECT_TRUE(IsNear(analytic, numeric, 2e-7 * scale))
      << what << ": rule gives " << analytic << ", differences give " << numeric;
}

MaybeValues X(const RankGraph& r) { return Check::Some(r.x); }
MaybeValues U(const RankGraph& r) { return Check::Some(r.u); }
MaybeValues V(const RankGraph& r) { return Check::Some(r.v); }
MaybeValues Dx(const RankGraph& r) { return r.dx; }
MaybeValues Ddx(const RankGraph& r) { return r.ddx; }
MaybeValues Ddu(const RankGraph& r) { return r.ddu; }

}  // namespace

void CheckGradients(int32_t ranks, const std::vector<TensorType>& inputs, const RankBody& body) {
  CheckGradients(ranks, inputs, body, nullptr);
}

void CheckGradients(int32_t ranks, const std::vector<TensorType>& inputs, const RankBody& body,
                    const Adjust& adjust) {
  SCOPED_TRACE(absl::StrCat("ranks ", ranks, ", seed ", kSeed));
  Check check(ranks, inputs, body);
  if (::testing::Test::HasFatalFailure()) return;
  check.Draw(/*whole=*/false, adjust);
  const Check::Results results = check.Run(check.values());
  if (results.empty()) return;
  constexpr double kStep = 1e-5;
  for (const bool with_u : {false, true}) {
    const auto direction = check.Direction(true, with_u);
    const Check::Results plus = check.Run(check.Moved(kStep, direction));
    const Check::Results minus = check.Run(check.Moved(-kStep, direction));
    if (plus.empty() || minus.empty()) return;
    // The direction stands where the inputs stand among the values.
    if (!with_u) {
      const double first = check.Sum(results, Dx, X, &direction);
      ExpectClose("first order", first, (check.Loss(plus) - check.Loss(minus)) / (2 * kStep));
      EXPECT_TRUE(AllEmpty(check) || std::abs(first) > 1e-6) << "a check of zeros shows nothing";
    } else {
      const double second =
          check.Sum(results, Ddx, X, &direction) + check.Sum(results, Ddu, U, &direction);
      ExpectClose("second order", second,
                  (check.SecondLoss(plus) - check.SecondLoss(minus)) / (2 * kStep));
      EXPECT_TRUE(AllEmpty(check) || std::abs(second) > 1e-6) << "a check of zeros shows nothing";
    }
  }
}

void CheckAdjoint(int32_t ranks, const std::vector<TensorType>& inputs, const RankBody& body) {
  SCOPED_TRACE(absl::StrCat("ranks ", ranks, ", seed ", kSeed));
  Check check(ranks, inputs, body);
  if (::testing::Test::HasFatalFailure()) return;
  check.Draw(/*whole=*/true);
  const Check::Results results = check.Run(check.values());
  if (results.empty()) return;
  const double forward = check.Loss(results);
  EXPECT_EQ(check.Sum(results, Dx, X), forward);
  // S is linear in u and v and does not depend on x.
  const double second = check.SecondLoss(results);
  EXPECT_EQ(check.Sum(results, Ddu, U), second);
  EXPECT_EQ(check.Sum(results, Ddx, X), 0);
  EXPECT_EQ(check.Sum(results, Dx, V), second);
  EXPECT_TRUE(AllEmpty(check) || (forward != 0 && second != 0)) << "a check of zeros shows nothing";
}

std::vector<RankResult> RunBackward(const std::vector<RankCase>& ranks, const RankBody& body) {
  struct Built {
    std::unique_ptr<RankBuilder> builder;
    std::vector<ValueIndex> x, y, dx;
    Graph graph;
    std::vector<Value> inputs;
  };
  std::vector<Built> built(ranks.size());
  std::vector<Session> sessions;
  for (size_t r = 0; r < ranks.size(); ++r) {
    Built& b = built[r];
    b.builder = std::make_unique<RankBuilder>(static_cast<int32_t>(r),
                                              static_cast<int32_t>(ranks.size()), 2);
    b.builder->set_wants_grad(ranks[r].wants_grad);
    GraphBuilder& graph = b.builder->graph();
    b.inputs = ranks[r].inputs;
    for (const Value& input : b.inputs) b.x.push_back(b.builder->Input(input.type));
    b.y = body(*b.builder, b.x);
    if (ranks[r].wants_grad && ranks[r].takes_part) {
      std::vector<BackwardRoot> roots = Collectives(graph);
      for (size_t i = 0; i < b.y.size(); ++i) {
        const TensorType& type = graph.TypeOf(b.y[i]);
        roots.push_back(BackwardRoot::Value(b.y[i], b.builder->Input(type)));
        b.inputs.push_back(ranks[r].grads.empty() ? Zeros(type) : ranks[r].grads[i]);
      }
      const auto backward = AppendBackward(roots, b.x, &graph);
      EXPECT_TRUE(backward.ok()) << backward.status();
      if (!backward.ok()) return {};
      for (const auto& gradient : backward->gradients) b.dx.push_back(gradient.value_or(-1));
    }
    b.graph = graph.Build();
    const absl::Status valid = ValidateGraph(b.graph, GraphLimits());
    EXPECT_TRUE(valid.ok()) << valid << "\n" << DebugString(b.graph);
    sessions.push_back(Session{&b.graph, b.inputs, {0}, {}});
  }
  const auto values = Evaluate(sessions);
  EXPECT_TRUE(values.ok()) << values.status();
  std::vector<RankResult> results;
  for (size_t r = 0; values.ok() && r < built.size(); ++r) {
    const Built& b = built[r];
    const auto at = [&](ValueIndex v) { return (*values)[r][b.builder->graph().FinalIndex(v)]; };
    results.emplace_back();
    for (const ValueIndex y : b.y) results.back().outputs.push_back(at(y));
    for (size_t i = 0; i < b.dx.size(); ++i) {
      results.back().gradients.push_back(b.dx[i] < 0 ? Zeros(ranks[r].inputs[i].type)
                                                     : at(b.dx[i]));
    }
  }
  return results;
}

void CheckAbandoned(int32_t ranks, const std::vector<TensorType>& inputs, const RankBody& body) {
  SCOPED_TRACE(absl::StrCat("ranks ", ranks, ", seed ", kSeed));
  std::mt19937_64 random(kSeed);
  std::vector<RankCase> cases(static_cast<size_t>(ranks));
  for (RankCase& rank : cases) {
    for (const TensorType& type : inputs) rank.inputs.push_back(RandomNormal(type, &random));
    rank.takes_part = false;
  }
  // Once, to know the types of the outputs.
  std::vector<RankResult> forward = RunBackward(cases, body);
  if (forward.empty()) return;
  bool any = false;
  for (size_t r = 0; r < cases.size(); ++r) {
    cases[r].takes_part = true;
    for (const Value& y : forward[r].outputs) {
      cases[r].grads.push_back(RandomNormal(y.type, &random));
    }
  }
  for (size_t absent = 0; absent < cases.size(); ++absent) {
    std::vector<RankCase> changed = cases;
    for (Value& g : changed[absent].grads) g = Zeros(g.type);
    const std::vector<RankResult> zeros = RunBackward(changed, body);
    changed[absent].takes_part = false;
    const std::vector<RankResult> abandoned = RunBackward(changed, body);
    changed[absent].wants_grad = false;
    const std::vector<RankResult> never = RunBackward(changed, body);
    ASSERT_TRUE(!zeros.empty() && !abandoned.empty() && !never.empty());
    for (size_t r = 0; r < cases.size(); ++r) {
      EXPECT_EQ(abandoned[r].outputs, zeros[r].outputs);
      EXPECT_EQ(never[r].outputs, zeros[r].outputs);
      if (r == absent) continue;
      // -0 and +0 are the same number.
      for (size_t i = 0; i < zeros[r].gradients.size(); ++i) {
        const std::vector<double> expected = ToDoubles(zeros[r].gradients[i]);
        EXPECT_EQ(ToDoubles(abandoned[r].gradients[i]), expected);
        EXPECT_EQ(ToDoubles(never[r].gradients[i]), expected);
        for (const double element : expected) any = any || element != 0;
      }
    }
  }
  EXPECT_TRUE(any || ranks == 1) << "a check of zeros shows nothing";
}

std::string InferText(absl::string_view op, const std::vector<TensorType>& inputs,
                      const Attributes& attributes, const Collective* collective,
                      int32_t group_size) {
  std::vector<const TensorType*> pointers;
  for (const TensorType& type : inputs) pointers.push_back(&type);
  NodeView node;
  node.op = op;
  node.attributes = attributes;
  node.inputs = pointers;
  node.collective = collective;
  node.group_size = group_size;
  const auto types = InferTypes(node);
  if (!types.ok()) {
    return ErrorOf(types.status()).message;
  }
  std::string text;
  for (const TensorType& type : *types) {
    absl::StrAppend(&text, text.empty() ? "" : " ", type.ToString());
  }
  return text;
}

}  // namespace testing
}  // namespace chorus
