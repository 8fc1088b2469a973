#include "core/ops/gather/gather.h"

#include <cstdint>
#include <string>
#include <vector>

#include "core/autograd/testing/gradient_check.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckAbandoned;
using testing::CheckAdjoint;
using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;
using Ints = std::vector<int64_t>;

const int32_t kRanks[] = {1, 2, 3, 5, 8};
const TensorType kX(DType::kF64, {2, 3});
const TensorType kScalar(DType::kF64, {});

TensorType Rows(int64_t n) { return TensorType(DType::kF64, {n, 3}); }

Collective Make(CollectiveKind kind, int32_t rank, int32_t root, Ints counts = {}) {
  Collective c;
  c.kind = kind;
  c.rank = GroupRank(rank);
  c.root = GroupRank(root);
  c.counts = std::move(counts);
  return c;
}

TEST(GatherTest, ShapeTable) {
  for (const bool list : {true, false}) {
    const std::string op = list ? "gather" : "gather_into_tensor";
    const auto infer = [&](const TensorType& x, int32_t rank, Ints counts = {}) {
      const Collective c = Make(CollectiveKind::kGather, rank, 1, std::move(counts));
      return InferText(op, {x}, {}, &c, 3);
    };
    EXPECT_EQ(infer(kX, 1), list ? "f64[2,3] f64[2,3] f64[2,3]" : "f64[6,3]");
    EXPECT_EQ(infer(kX, 0), "");
    EXPECT_EQ(infer(kX, 1, {4, 2, 0}), list ? "f64[4,3] f64[2,3] f64[0,3]" : "f64[6,3]");
    EXPECT_EQ(infer(kX, 0, {2, 5, 0}), "");
    EXPECT_EQ(infer(kX, 0, {3, 2, 0}),
              op + ": expected 3 rows as input 0, by the counts, got f64[2,3]");
    EXPECT_EQ(infer(kX, 1, {2, 3, 2}),
              op + ": expected 3 rows as input 0, by the counts, got f64[2,3]");
    EXPECT_EQ(infer(kX, 1, {2, 2}),
              op + ": expected 1 counts for each of 3 members, or none, got 2");
    EXPECT_EQ(infer(kX, 1, {-1, 2, 2}),
              op + ": expected counts of 0 or more, 1099511627776 in all, got -1 as count 0");
    EXPECT_EQ(infer(kX, 1, {int64_t{1} << 40, 2, int64_t{1} << 62}),
              op + ": expected counts of 0 or more, 1099511627776 in all, got 2 as count 1");
    EXPECT_EQ(infer(kScalar, 1), list ? "f64[] f64[] f64[]"
                                      : op + ": expected a tensor with rows, which has at least "
                                             "one dimension, got f64[]");
    EXPECT_EQ(infer(kScalar, 0), list ? ""
                                      : op + ": expected a tensor with rows, which has at least "
                                             "one dimension, got f64[]");
    if (list) {
      EXPECT_EQ(infer(kScalar, 1, {1, 1, 1}),
                "gather: expected 1 rows as input 0, by the counts, got f64[]");
    }
    Collective c = Make(CollectiveKind::kGather, 0, 3);
    EXPECT_EQ(InferText(op, {kX}, {}, &c, 3),
              op + ": expected a root within the group of 3, got 3");
    c = Make(CollectiveKind::kGather, 0, -1);
    EXPECT_EQ(InferText(op, {kX}, {}, &c, 3),
              op + ": expected a root within the group of 3, got -1");
    c = Make(CollectiveKind::kGather, 0, 0);
    EXPECT_EQ(InferText(op, {}, {}, &c, 3), op + ": expected 1 input, got 0");
    EXPECT_EQ(InferText(op, {kX, kX}, {}, &c, 3), op + ": expected 1 input, got 2");
  }
}

TEST(ScatterTest, ShapeTable) {
  const auto infer = [&](const std::vector<TensorType>& xs, int32_t rank,
                         Attributes attributes = {}, Ints counts = {}) {
    const Collective c = Make(CollectiveKind::kScatter, rank, 1, std::move(counts));
    return InferText("scatter", xs, attributes, &c, 3);
  };
  EXPECT_EQ(infer({kX, kX, kX}, 1), "f64[2,3]");
  EXPECT_EQ(infer({Rows(4), Rows(0), kX}, 1), "f64[0,3]");
  EXPECT_EQ(infer({kScalar, kScalar, kScalar}, 1), "f64[]");
  EXPECT_EQ(infer({}, 0, TypeAttributes(Rows(4))), "f64[4,3]");
  // Too few, too many, none.
  EXPECT_EQ(infer({kX, kX}, 1),
            "scatter: expected one input for each of 3 members on the root, got 2");
  EXPECT_EQ(infer({kX, kX, kX, kX}, 1),
            "scatter: expected one input for each of 3 members on the root, got 4");
  EXPECT_EQ(infer({}, 1),
            "scatter: expected one input for each of 3 members on the root, got none");
  EXPECT_EQ(infer({kX, kX, TensorType(DType::kF64, {2, 4})}, 1),
            "scatter: expected inputs like f64[2,3] but for dimension 0, got f64[2,4] as input 2");
  EXPECT_EQ(infer({kX, TensorType(DType::kF32, {2, 3}), kX}, 1),
            "scatter: expected inputs like f64[2,3] but for dimension 0, got f32[2,3] as input 1");
  EXPECT_EQ(infer({kX, kScalar, kX}, 1),
            "scatter: expected inputs like f64[2,3] but for dimension 0, got f64[] as input 1");
  EXPECT_EQ(infer({kScalar, kX, kScalar}, 1),
            "scatter: expected inputs like f64[], got f64[2,3] as input 1");
  EXPECT_EQ(infer({kX}, 0), "scatter: expected no input on rank 0, as the root is 1, got one");
  EXPECT_EQ(infer({kX, kX, kX}, 0),
            "scatter: expected no input on rank 0, as the root is 1, got 3");
  EXPECT_EQ(infer({}, 0),
            "scatter: expected attributes 'dims' and 'dtype', for want of an input, got no 'dims'");
  EXPECT_EQ(infer({kX, kX, kX}, 1, TypeAttributes(kX)),
            "scatter: expected no attributes on the root, got 'dims' or 'dtype'");
  EXPECT_EQ(infer({kX, kX, kX}, 1, {}, {2, 2, 2}), "scatter: expected no counts, got 3");
}

TEST(ScatterTensorTest, ShapeTable) {
  const auto infer = [&](const std::vector<TensorType>& xs, int32_t rank, Ints counts = {},
                         Attributes attributes = {}) {
    const Collective c = Make(CollectiveKind::kScatter, rank, 1, std::move(counts));
    return InferText("scatter_tensor", xs, attributes, &c, 3);
  };
  EXPECT_EQ(infer({Rows(6)}, 1), "f64[2,3]");
  EXPECT_EQ(infer({Rows(6)}, 1, {1, 5, 0}), "f64[5,3]");
  EXPECT_EQ(infer({Rows(0)}, 1), "f64[0,3]");
  EXPECT_EQ(infer({}, 0, {}, TypeAttributes(kX)), "f64[2,3]");
  EXPECT_EQ(infer({Rows(7)}, 1),
            "scatter_tensor: expected counts, or rows that divide by 3 members, got f64[7,3]");
  EXPECT_EQ(infer({Rows(6)}, 1, {1, 5, 1}),
            "scatter_tensor: expected 7 rows as input 0, by the counts, got f64[6,3]");
  EXPECT_EQ(infer({Rows(6)}, 1, {1, 5}),
            "scatter_tensor: expected 1 counts for each of 3 members, or none, got 2");
  EXPECT_EQ(
      infer({Rows(6)}, 1, {7, -1, 0}),
      "scatter_tensor: expected counts of 0 or more, 1099511627776 in all, got -1 as count 1");
  EXPECT_EQ(infer({kScalar}, 1),
            "scatter_tensor: expected a tensor with rows, which has at least one dimension, got "
            "f64[]");
  EXPECT_EQ(infer({}, 1), "scatter_tensor: expected one input on the root, got none");
  EXPECT_EQ(infer({}, 0, {1, 5, 0}, TypeAttributes(kX)),
            "scatter_tensor: expected no counts off the root, where the attributes tell, got 3");
  EXPECT_EQ(infer({kX}, 0),
            "scatter_tensor: expected no input on rank 0, as the root is 1, got one");
}

// Rows of member r's piece: uneven, and none for member 1.
int64_t UnevenRows(int32_t r) { return r == 1 ? 0 : 1 + r % 3; }
Ints UnevenCounts(int32_t ranks) {
  Ints counts;
  for (int32_t r = 0; r < ranks; ++r) counts.push_back(UnevenRows(r));
  return counts;
}

// A piece of this rank's size made of x, which has rows for all.
ValueIndex Piece(RankBuilder& b, ValueIndex x, int32_t rank) {
  return b.Op("slice", {x},
              {{"axis", int64_t{0}}, {"begin", int64_t{0}}, {"end", UnevenRows(rank)}});
}

Values UnevenGather(RankBuilder& b, const std::string& op, ValueIndex x, int32_t root) {
  RankBuilder::How how;
  how.root = root;
  if (b.rank() == root || b.rank() % 2 == 0) how.counts = UnevenCounts(b.size());
  return b.ApplyCollective(op, {Piece(b, x, b.rank())}, how);
}

Values UnevenScatter(RankBuilder& b, const std::string& op, ValueIndex x, int32_t root) {
  RankBuilder::How how;
  how.root = root;
  if (b.rank() != root) {
    TensorType type = b.graph().TypeOf(x);
    type.dims[0] = Dim(UnevenRows(b.rank()));
    return b.ApplyCollective(op, {}, how, TypeAttributes(type));
  }
  Values pieces;
  for (int32_t r = 0; r < b.size(); ++r) pieces.push_back(Piece(b, x, r));
  if (op == "scatter") return b.ApplyCollective(op, pieces, how);
  how.counts = UnevenCounts(b.size());
  return b.ApplyCollective(op, {b.Op("concat", pieces, {{"axis", int64_t{0}}})}, how);
}

TEST(GatherTest, EqualsItsAdjoint) {
  for (const int32_t ranks : kRanks) {
    const int32_t root = ranks / 2;
    RankBuilder::How how;
    how.root = root;
    for (const TensorType& type : {kX, kScalar, TensorType(DType::kF32, {0})}) {
      CheckAdjoint(ranks, {type}, [&](RankBuilder& b, const Values& x) {
        return b.ApplyCollective("gather", {x[0]}, how);
      });
    }
    CheckAdjoint(ranks, {kX}, [&](RankBuilder& b, const Values& x) {
      return b.ApplyCollective("gather_into_tensor", {x[0]}, how);
    });
    for (const char* op : {"gather", "gather_into_tensor"}) {
      CheckAdjoint(ranks, {Rows(3)}, [&](RankBuilder& b, const Values& x) {
        return UnevenGather(b, op, x[0], root);
      });
    }
  }
}

TEST(ScatterTest, EqualsItsAdjoint) {
  for (const int32_t ranks : kRanks) {
    const int32_t root = ranks / 2;
    RankBuilder::How how;
    how.root = root;
    for (const TensorType& type : {kX, kScalar}) {
      CheckAdjoint(ranks, std::vector<TensorType>(ranks, type),
                   [&](RankBuilder& b, const Values& x) {
                     if (b.rank() != root) {
                       return b.ApplyCollective("scatter", {}, how, TypeAttributes(type));
                     }
                     return b.ApplyCollective("scatter", x, how);
                   });
    }
    CheckAdjoint(ranks, {Rows(2 * ranks)}, [&](RankBuilder& b, const Values& x) {
      if (b.rank() != root) return b.ApplyCollective("scatter_tensor", {}, how, TypeAttributes(kX));
      return b.ApplyCollective("scatter_tensor", x, how);
    });
    for (const char* op : {"scatter", "scatter_tensor"}) {
      CheckAdjoint(ranks, {Rows(3)}, [&](RankBuilder& b, const Values& x) {
        return UnevenScatter(b, op, x[0], root);
      });
    }
  }
}

TEST(GatherTest, GradientsEqualDifferencesBetweenLocalOps) {
  for (const int32_t ranks : kRanks) {
    const int32_t root = ranks - 1;
    for (const bool list : {true, false}) {
      CheckGradients(ranks, {Rows(3)}, [&](RankBuilder& b, const Values& x) {
        const std::string gather = list ? "gather" : "gather_into_tensor";
        const std::string scatter = list ? "scatter" : "scatter_tensor";
        Values parts = UnevenGather(b, gather, b.Op("sin", {x[0]}), root);
        for (ValueIndex& part : parts) part = b.Op("mul", {part, part});
        const ValueIndex piece =
            UnevenScatter(b, scatter, b.Op("mul", {x[0], b.Op("cos", {x[0]})}), root)[0];
        parts.push_back(b.Op("mul", {piece, piece}));
        return parts;
      });
    }
  }
}

TEST(GatherTest, AbandonedRanksCountAsZeros) {
  for (const int32_t ranks : {1, 3}) {
    for (const std::string tensor : {"", "_tensor"}) {
      const std::string gather = tensor.empty() ? "gather" : "gather_into_tensor";
      for (const int32_t root : {0, ranks - 1}) {
        CheckAbandoned(ranks, {Rows(3)}, [&](RankBuilder& b, const Values& x) {
          return UnevenGather(b, gather, x[0], root);
        });
        CheckAbandoned(ranks, {Rows(3)}, [&](RankBuilder& b, const Values& x) {
          return UnevenScatter(b, "scatter" + tensor, x[0], root);
        });
      }
    }
  }
}

}  // namespace
}  // namespace chorus
