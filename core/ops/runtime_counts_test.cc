// Counts that are known only when a collective runs, in every op that takes them.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/autograd/testing/gradient_check.h"
#include "core/ops/op.h"
#include "core/ops/registry.h"
#include "core/ops/testing/rank_builder.h"
#include "core/ops/testing/value.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckAbandoned;
using testing::CheckAdjoint;
using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using testing::RankCase;
using testing::RankResult;
using testing::RunBackward;
using testing::Value;
using Values = std::vector<ValueIndex>;
using Ints = std::vector<int64_t>;

const int32_t kRanks[] = {1, 2, 3, 5, 8};
const char* const kOps[] = {"all_gather_into_tensor", "gather_into_tensor", "scatter_tensor",
                            "reduce_scatter_tensor", "all_to_all_single"};

TensorType Rows(int64_t n) { return TensorType(DType::kF64, {n, 3}); }
TensorType Counts(int64_t n) { return TensorType(DType::kI64, {n}); }

// --- Types ---

struct Node {
  std::string op;
  int32_t rank = 1;
  std::vector<TensorType> inputs;
  int32_t counts_input = 1;
  int64_t maximum = 10;
  Attributes attributes = {};
  Reduction reduction = Reduction::kSum;
  bool wants_grad = false;
  Ints counts = {};
};

// Of a group of three, with rank 1 as the root where there is one.
std::string Infer(const Node& node) {
  Collective c;
  c.kind = FindOp(node.op)->kind;
  c.rank = GroupRank(node.rank);
  if (HasRoot(c.kind)) c.root = GroupRank(1);
  if (IsReducing(c.kind)) c.reduction = node.reduction;
  c.wants_grad = node.wants_grad;
  c.counts = node.counts;
  c.runtime_counts_input = node.counts_input;
  c.runtime_count_maximum = node.maximum;
  return InferText(node.op, node.inputs, node.attributes, &c, 3);
}

TEST(RuntimeCountsTest, Types) {
  EXPECT_EQ(Infer({"all_gather_into_tensor", 0, {Rows(4), Counts(1)}}), "f64[10,3] i64[3]");
  EXPECT_EQ(Infer({"all_gather_into_tensor", 0, {Rows(4), Counts(1), Counts(3)}}),
            "f64[10,3] i64[3]");
  EXPECT_EQ(Infer({"gather_into_tensor", 1, {Rows(4), Counts(1), Counts(3)}}), "f64[10,3] i64[3]");
  EXPECT_EQ(Infer({"gather_into_tensor", 0, {Rows(4), Counts(1)}}), "");
  EXPECT_EQ(Infer({"scatter_tensor", 1, {Rows(4), Counts(3), Counts(1)}}), "f64[10,3] i64[1]");
  EXPECT_EQ(Infer({"scatter_tensor", 0, {Counts(1)}, 0, 10, TypeAttributes(Rows(10))}),
            "f64[10,3] i64[1]");
  EXPECT_EQ(Infer({"scatter_tensor", 0, {}, 0, 10, TypeAttributes(Rows(10))}), "f64[10,3] i64[1]");
  EXPECT_EQ(Infer({"reduce_scatter_tensor", 0, {Rows(4), Counts(3)}}), "f64[10,3] i64[1]");
  EXPECT_EQ(Infer({"all_to_all_single", 0, {Rows(4), Counts(3), Counts(3)}}), "f64[10,3] i64[3]");
  EXPECT_EQ(Infer({"all_to_all_single", 0, {Rows(4), Counts(3)}, 1, 0}), "f64[0,3] i64[3]");
  // The factor is last, extras are.
  const TensorType factor(DType::kF64, {});
  EXPECT_EQ(Infer({"reduce_scatter_tensor",
                   0,
                   {Rows(4), Counts(3), Counts(1), factor},
                   1,
                   10,
                   {},
                   Reduction::kPremulSum}),
            "f64[10,3] i64[1]");
  EXPECT_EQ(
      Infer({"reduce_scatter_tensor", 0, {Rows(4), Counts(3)}, 1, 10, {}, Reduction::kMax, true}),
      "f64[10,3] i64[1] f32[4,3]");
  EXPECT_EQ(
      Infer({"reduce_scatter_tensor", 0, {Rows(4), Counts(3)}, 1, 10, {}, Reduction::kProduct}),
      "f64[10,3] i64[1]");
  EXPECT_EQ(
      Infer(
          {"reduce_scatter_tensor", 0, {Rows(4), Counts(3)}, 1, 10, {}, Reduction::kProduct, true}),
      "f64[10,3] i64[1] f64[10,3] f64[10,3] f64[10,3]");
}

TEST(RuntimeCountsTest, WhatIsRefused) {
  const auto refused = [](const Node& node, const std::string& text) {
    EXPECT_EQ(Infer(node), absl::StrCat(node.op, ": ", text));
  };
  const std::string op = "all_to_all_single";
  refused({op, 0, {Rows(4)}}, "expected 2 to 3 inputs with counts at run time, got 1");
  refused({op, 0, {Rows(4), Counts(3), Counts(3), Counts(3)}},
          "expected 2 to 3 inputs with counts at run time, got 4");
  refused({op, 0, {Rows(4), Counts(2)}},
          "expected i64[3] as input 1, the rows that are sent, got i64[2]");
  refused({op, 0, {Rows(4), Counts(3), Counts(1)}},
          "expected i64[3] as input 2, the rows that are received, got i64[1]");
  refused({op, 0, {Rows(4), TensorType(DType::kI32, {3})}},
          "expected i64[3] as input 1, the rows that are sent, got i32[3]");
  refused({op, 0, {TensorType(DType::kF64, {}), Counts(3)}},
          "expected a tensor with rows, which has at least one dimension, got f64[]");
  refused({op, 0, {Rows(4), Counts(3)}, 0},
          "expected counts at run time from input 1 on, got from "
          "input 0");
  refused({op, 0, {Rows(4), Counts(3)}, 7},
          "expected counts at run time from input 1 on, got from "
          "input 7");
  refused({op, 0, {Rows(4), Counts(3)}, -2},
          "expected counts at run time from input 1 on, got from input -2");
  refused({op, 0, {Rows(4), Counts(3)}, 1, -1},
          "expected from 0 to 1099511627776 rows as the output's, got -1");
  refused({op, 0, {Rows(4), Counts(3)}, 1, int64_t{1} << 41},
          "expected from 0 to 1099511627776 rows as the output's, got 2199023255552");
  refused({op, 0, {Rows(4), Counts(3)}, 1, int64_t{1} << 40},
          "expected a valid type as output 0, got f64[1099511627776,3] is larger than the limit of "
          "1099511627776 bytes");
  refused({op, 0, {Rows(4)}, -1},
          "expected no maximum of counts without counts at run time, got "
          "10");
  refused({op, 0, {Rows(4), Counts(3)}, 1, 10, {}, Reduction::kSum, false, {1, 1, 2, 1, 1, 2}},
          "expected counts either in the collective or at run time, got both");
  refused({"all_gather_into_tensor", 0, {Rows(4), Counts(3)}},
          "expected i64[1] as input 1, the rows that are sent, got i64[3]");
  refused({"gather_into_tensor", 0, {Rows(4), Counts(1), Counts(3)}},
          "expected 2 inputs with counts at run time, got 3");
  refused({"scatter_tensor", 0, {Rows(4), Counts(3)}},
          "expected counts at run time from input 0 on, got from input 1");
  refused({"scatter_tensor", 0, {Counts(3)}, 0, 10, TypeAttributes(Rows(10))},
          "expected i64[1] as input 0, the rows that are received, got i64[3]");
  refused({"scatter_tensor", 0, {}, 0, 10, TypeAttributes(Rows(9))},
          "expected dims with the maximum of 10 rows, got f64[9,3]");
  refused({"scatter_tensor", 0, {}, 0},
          "expected attributes 'dims' and 'dtype', for want of an input, got no 'dims'");
  refused({"scatter_tensor", 1, {Rows(4), Counts(3)}, 1, 10, TypeAttributes(Rows(10))},
          "expected no attributes on the root, got 'dims' or 'dtype'");
  refused({"reduce_scatter_tensor", 0, {Rows(4), Counts(3)}, 1, 10, {}, Reduction::kPremulSum},
          "expected 3 to 4 inputs with counts at run time, got 2");
  refused({"all_to_all", 0, {Rows(4), Counts(3)}},
          "expected no counts at run time, which are for pieces in one tensor, got input 1");
  refused({"all_reduce", 0, {Rows(4), Counts(3)}},
          "expected no counts at run time, which are for pieces in one tensor, got input 1");
}

// --- Values ---

// Rows that `from` has for `to`. What goes to one member of a reduce_scatter is the same from all.
int64_t Sent(const std::string& op, int32_t from, int32_t to) {
  if (op == "all_to_all_single") return (2 * from + to) % 4;
  if (op == "all_gather_into_tensor" || op == "gather_into_tensor") return (from + 1) % 3;
  return (to + 1) % 3;
}

struct Exchange {
  std::string op;
  Reduction reduction = Reduction::kSum;
  bool receives = true;
  bool fixed = false;  // the same with counts in the collective

  // More than the pieces take.
  int64_t InputRows(int32_t ranks) const { return 3 * ranks + 2; }
  static int64_t OutputRows(int32_t ranks) { return 3 * ranks + 1; }
  static int32_t Root(int32_t ranks) { return ranks / 2; }

  Ints Sends(int32_t rank, int32_t ranks) const {
    if (op == "all_gather_into_tensor" || op == "gather_into_tensor") return {Sent(op, rank, 0)};
    if (op == "scatter_tensor" && rank != Root(ranks)) return {};
    Ints rows;
    for (int32_t to = 0; to < ranks; ++to) rows.push_back(Sent(op, rank, to));
    return rows;
  }
  Ints Receives(int32_t rank, int32_t ranks) const {
    if (op == "reduce_scatter_tensor" || op == "scatter_tensor") {
      return {Sent(op, Root(ranks), rank)};
    }
    if (op == "gather_into_tensor" && rank != Root(ranks)) return {};
    Ints rows;
    for (int32_t from = 0; from < ranks; ++from) rows.push_back(Sent(op, from, rank));
    return rows;
  }

  static ValueIndex CountsValue(RankBuilder& b, const Ints& rows) {
    Values parts;
    for (const int64_t n : rows) {
      Attributes attributes = TypeAttributes(Counts(1));
      attributes.push_back({"value", n});
      parts.push_back(b.Op("fill", {}, attributes));
    }
    return b.Op("concat", parts, {{"axis", int64_t{0}}});
  }

  // All outputs that this member has.
  Values ApplyExchange(RankBuilder& b, ValueIndex x) const {
    RankBuilder::How how;
    const CollectiveKind kind = FindOp(op)->kind;
    if (HasRoot(kind)) how.root = Root(b.size());
    if (IsReducing(kind)) how.reduction = reduction;
    const Ints sends = Sends(b.rank(), b.size());
    const Ints receives_rows = Receives(b.rank(), b.size());
    Values inputs;
    Attributes attributes;
    int64_t sum = 0;
    for (const int64_t n : sends) sum += n;
    if (fixed && !sends.empty()) {
      x = b.Op("slice", {x}, {{"axis", int64_t{0}}, {"begin", int64_t{0}}, {"end", sum}});
    }
    if (!sends.empty()) {
      inputs = {x};
    } else {
      attributes = TypeAttributes(Rows(fixed ? receives_rows[0] : OutputRows(b.size())));
    }
    if (fixed) {
      if (op != "scatter_tensor" && sends.size() == 1 && b.size() > 1) {
        for (int32_t from = 0; from < b.size(); ++from) how.counts.push_back(Sent(op, from, 0));
      } else {
        how.counts = sends;
      }
      if (op == "all_to_all_single") {
        how.counts.insert(how.counts.end(), receives_rows.begin(), receives_rows.end());
      }
    } else {
      how.runtime_counts_input = static_cast<int32_t>(inputs.size());
      how.runtime_count_maximum = receives_rows.empty() ? 0 : OutputRows(b.size());
      if (!sends.empty()) inputs.push_back(CountsValue(b, sends));
      if (receives && !receives_rows.empty()) inputs.push_back(CountsValue(b, receives_rows));
    }
    if (reduction == Reduction::kPremulSum) {
      Attributes factor = TypeAttributes(TensorType(DType::kF64, {}));
      factor.push_back({"value", 1.5 + b.rank()});
      inputs.push_back(b.Op("fill", {}, factor));
    }
    return b.ApplyCollective(op, inputs, how, attributes);
  }
  // y alone.
  Values Y(RankBuilder& b, ValueIndex x) const {
    Values outputs = ApplyExchange(b, x);
    if (outputs.size() > 1) outputs.resize(1);
    return outputs;
  }
};

TEST(RuntimeCountsTest, ValuesAreThoseOfTheSameCountsInTheCollective) {
  std::mt19937_64 random(11);
  for (const int32_t ranks : kRanks) {
    for (const char* op : kOps) {
      for (const bool receives : {true, false}) {
        SCOPED_TRACE(absl::StrCat(op, " of ", ranks));
        Exchange exchange{op, Reduction::kSum, receives};
        std::vector<RankCase> cases(static_cast<size_t>(ranks));
        for (RankCase& rank : cases) {
          rank.inputs = {testing::RandomNormal(Rows(exchange.InputRows(ranks)), &random)};
          rank.takes_part = false;
        }
        const std::vector<RankResult> got = RunBackward(
            cases,
            [&](RankBuilder& b, const Values& x) { return exchange.ApplyExchange(b, x[0]); });
        exchange.fixed = true;
        const std::vector<RankResult> fixed = RunBackward(
            cases,
            [&](RankBuilder& b, const Values& x) { return exchange.ApplyExchange(b, x[0]); });
        ASSERT_TRUE(!got.empty() && !fixed.empty());
        for (int32_t r = 0; r < ranks; ++r) {
          ASSERT_EQ(got[r].outputs.size(), fixed[r].outputs.size() * 2);
          if (got[r].outputs.empty()) continue;
          Value expected = fixed[r].outputs[0];
          expected.type = got[r].outputs[0].type;
          expected.bytes.resize(static_cast<size_t>(expected.type.num_bytes()), '\0');
          EXPECT_EQ(got[r].outputs[0], expected);
          EXPECT_EQ(testing::Elements<int64_t>(got[r].outputs[1]), exchange.Receives(r, ranks));
        }
      }
    }
  }
}

TEST(RuntimeCountsTest, EqualTheirAdjoints) {
  for (const int32_t ranks : kRanks) {
    for (const char* op : kOps) {
      // A member would send itself nothing.
      if (ranks == 1 && std::string(op) == "all_to_all_single") continue;
      for (const bool receives : {true, false}) {
        SCOPED_TRACE(op);
        const Exchange exchange{op, Reduction::kSum, receives};
        CheckAdjoint(ranks, {Rows(exchange.InputRows(ranks))},
                     [&](RankBuilder& b, const Values& x) { return exchange.Y(b, x[0]); });
      }
    }
  }
}

TEST(RuntimeCountsTest, GradientsOfReductionsEqualDifferences) {
  for (const int32_t ranks : kRanks) {
    for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg, Reduction::kProduct,
                                      Reduction::kMin, Reduction::kMax, Reduction::kPremulSum}) {
      SCOPED_TRACE(ReductionName(reduction));
      const Exchange exchange{"reduce_scatter_tensor", reduction};
      CheckGradients(ranks, {Rows(exchange.InputRows(ranks))},
                     [&](RankBuilder& b, const Values& x) {
                       const ValueIndex y = exchange.Y(b, b.Op("sin", {x[0]}))[0];
                       return Values{b.Op("mul", {y, y}), b.Op("mul", {x[0], x[0]})};
                     });
    }
  }
}

TEST(RuntimeCountsTest, AbandonedRanksCountAsZeros) {
  for (const char* op : kOps) {
    for (const Reduction reduction :
         {Reduction::kSum, Reduction::kAvg, Reduction::kProduct, Reduction::kMax}) {
      const bool reduces = std::string(op) == "reduce_scatter_tensor";
      if (!reduces && reduction != Reduction::kSum) continue;
      SCOPED_TRACE(absl::StrCat(op, " ", ReductionName(reduction)));
      const Exchange exchange{op, reduction};
      CheckAbandoned(5, {Rows(exchange.InputRows(5))},
                     [&](RankBuilder& b, const Values& x) { return exchange.Y(b, x[0]); });
    }
  }
}

}  // namespace
}  // namespace chorus
