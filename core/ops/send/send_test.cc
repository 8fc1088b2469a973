#include <cstdint>
#include <string>
#include <vector>

#include "core/autograd/testing/gradient_check.h"
#include "core/ops/op.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::CheckAdjoint;
using testing::CheckGradients;
using testing::InferText;
using testing::RankBuilder;
using Values = std::vector<ValueIndex>;

const int32_t kRanks[] = {1, 2, 3, 5};
const TensorType kX(DType::kF64, {2, 3});

TEST(SendTest, ShapeTable) {
  Collective send;
  send.kind = CollectiveKind::kSend;
  send.rank = GroupRank(0);
  send.peer = GroupRank(2);
  EXPECT_EQ(InferText("send", {kX}, {}, &send, 3), "");
  EXPECT_EQ(InferText("send", {kX}, {}, &send, 2),
            "send: expected a peer within the group of 2, got 2");
  Collective recv = send;
  recv.kind = CollectiveKind::kRecv;
  EXPECT_EQ(InferText("recv", {}, TypeAttributes(kX), &recv, 3), "f64[2,3]");
  EXPECT_EQ(InferText("recv", {}, {}, &recv, 3),
            "recv: expected a list of integers as 'dims', got none");
  recv.tag = -1;
  EXPECT_EQ(InferText("recv", {}, TypeAttributes(kX), &recv, 3),
            "recv: expected a tag of 0 or more, got -1");
  send.peer = GroupRank(0);
  EXPECT_EQ(InferText("send", {kX}, {}, &send, 3),
            "send: expected a peer other than the rank itself, got 0");
}

// To the next rank, from the one before.
ValueIndex Rotate(RankBuilder& b, ValueIndex x, int64_t tag) {
  if (b.size() == 1) return x;
  b.Send(x, (b.rank() + 1) % b.size(), tag);
  return b.Recv(kX, (b.rank() + b.size() - 1) % b.size(), tag);
}

TEST(SendTest, EqualsItsAdjoint) {
  for (const int32_t ranks : kRanks) {
    CheckAdjoint(ranks, {kX},
                 [](RankBuilder& b, const Values& x) { return Values{Rotate(b, x[0], 3)}; });
  }
}

TEST(SendTest, GradientsEqualDifferencesBetweenLocalOps) {
  for (const int32_t ranks : kRanks) {
    CheckGradients(ranks, {kX}, [](RankBuilder& b, const Values& x) {
      const ValueIndex once = Rotate(b, b.Op("sin", x), 0);
      const ValueIndex twice = Rotate(b, b.Op("mul", {once, x[0]}), 0);
      return Values{b.Op("mul", {twice, once})};
    });
  }
}

// A chain that ends on the last rank: the others have no loss of their own but their part in it.
TEST(SendTest, GradientsFlowBackThroughAPipeline) {
  for (const int32_t ranks : kRanks) {
    CheckGradients(ranks, {kX}, [](RankBuilder& b, const Values& x) {
      ValueIndex y = x[0];
      if (b.rank() > 0) y = b.Op("mul", {b.Recv(kX, b.rank() - 1), b.Op("sin", {y})});
      if (b.rank() + 1 == b.size()) return Values{b.Op("mul", {y, y})};
      b.Send(y, b.rank() + 1);
      return Values{};
    });
  }
}

}  // namespace
}  // namespace chorus
