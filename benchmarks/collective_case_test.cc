#include "benchmarks/collective_case.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace bench {
namespace {

using ::testing::HasSubstr;
using Values = std::vector<float>;

CollectiveCase Case(const std::string& op, int ranks, int64_t bytes) {
  return *CollectiveCase::WithResult(op, ranks, bytes);
}

// What a collective gives, written from its definition and not from CheckPiece: the pieces of all
// ranks by rank, and the sender and place of each result.
Values ResultOf(const CollectiveCase& c, int rank) {
  std::vector<std::vector<Values>> sent(c.ranks);
  for (int r = 0; r < c.ranks; ++r) {
    for (int k = 0; k < c.InputPieces(r); ++k) {
      sent[r].emplace_back(c.count);
      c.FillPiece(r, k, sent[r].back().data());
    }
  }
  Values result;
  const auto add = [&result](const Values& piece) {
    result.insert(result.end(), piece.begin(), piece.end());
  };
  const auto add_sum = [&](int piece) {
    Values sum(c.count, 0);
    for (int r = 0; r < c.ranks; ++r) {
      for (int64_t i = 0; i < c.count; ++i) sum[i] += sent[r][piece][i];
    }
    add(sum);
  };
  if (c.op == "broadcast") add(sent[0][0]);
  if (c.op == "scatter") add(sent[0][rank]);
  if (c.op == "all_reduce" || (c.op == "reduce" && rank == 0)) add_sum(0);
  if (c.op == "reduce_scatter" || c.op == "reduce_scatter_tensor") add_sum(rank);
  if (c.op == "send_recv" && (rank ^ 1) < c.ranks) add(sent[rank ^ 1][0]);
  for (int r = 0; r < c.ranks; ++r) {
    if (c.op.find("all_gather") == 0 || (c.op == "gather" && rank == 0)) add(sent[r][0]);
    if (c.op.find("all_to_all") == 0) add(sent[r][rank]);
  }
  return result;
}

TEST(CollectiveCaseTest, TheRightResultPassesAndAnyOtherFails) {
  for (const std::string& op : CollectiveOps()) {
    for (const int ranks : {2, 3, 4}) {
      const CollectiveCase c = Case(op, ranks, 4800);
      for (int rank = 0; rank < ranks; ++rank) {
        SCOPED_TRACE(op + ", rank " + std::to_string(rank) + " of " + std::to_string(ranks));
        Values result = ResultOf(c, rank);
        ASSERT_EQ(static_cast<int64_t>(result.size()), c.OutputPieces(rank) * c.count);
        EXPECT_TRUE(c.Check(rank, result.data()).ok()) << c.Check(rank, result.data());
        for (float& value : result) {
          value += 1;
          EXPECT_EQ(c.Check(rank, result.data()).code(), absl::StatusCode::kDataLoss);
          value -= 1;
        }
        // Another rank's result is wrong as well, unless all get the same.
        const int other = (rank + 1) % ranks;
        const Values theirs = ResultOf(c, other);
        if (theirs.size() == result.size() && theirs != result) {
          EXPECT_FALSE(c.Check(rank, theirs.data()).ok());
        }
      }
    }
  }
}

TEST(CollectiveCaseTest, SizesAreThoseOfTheResult) {
  EXPECT_EQ(Case("all_reduce", 4, 1 << 20).result_bytes(), 1 << 20);
  EXPECT_EQ(Case("all_reduce", 4, 1 << 20).input_bytes(), 4 << 20);
  EXPECT_EQ(Case("reduce", 4, 1 << 20).output_bytes(), 1 << 20);
  EXPECT_EQ(Case("all_gather", 4, 1 << 20).piece_bytes(), 1 << 18);
  EXPECT_EQ(Case("all_gather", 4, 1 << 20).output_bytes(), 4 << 20);
  EXPECT_EQ(Case("reduce_scatter", 4, 1 << 20).input_bytes(), 16 << 20);
  EXPECT_EQ(Case("scatter", 4, 1 << 20).input_bytes(), 4 << 20);
  EXPECT_EQ(Case("send_recv", 3, 1 << 20).input_bytes(), 2 << 20);
  // A piece has an element at least.
  EXPECT_EQ(Case("gather", 8, 4).result_bytes(), 32);
}

TEST(CollectiveCaseTest, AnUnknownOpIsRefusedByName) {
  const absl::Status status = CollectiveCase::Of("all_reduced", 2, 4).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("all_reduced"));
}

}  // namespace
}  // namespace bench
}  // namespace chorus
