#include "chorus/functional/nn.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using testing::FakeDaemon;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;
using testing::Values;

using Floats = std::vector<float>;

auto Near(const Floats& values) { return Pointwise(FloatNear(1e-6f), values); }

class NnTest : public ::testing::Test {
 protected:
  Tensor F32(const Floats& values, const Shape& shape) {
    return FromHost<float>(session_, values, shape);
  }
  Tensor I32(const std::vector<int32_t>& values, const Shape& shape) {
    return FromHost<int32_t>(session_, values, shape);
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
};

TEST_F(NnTest, SoftmaxAlongAnAxis) {
  const Tensor x = F32({0, std::log(3.0f), 0, 0}, {2, 2});
  EXPECT_THAT(Values<float>(Softmax(x)), Near({0.25, 0.75, 0.5, 0.5}));
  EXPECT_THAT(Values<float>(Softmax(x, 0)), Near({0.5, 0.75, 0.5, 0.25}));
  EXPECT_THAT(Values<float>(LogSoftmax(x, 1)),
              Near({std::log(0.25f), std::log(0.75f), std::log(0.5f), std::log(0.5f)}));
  EXPECT_THAT(std::string(Softmax(x, 2).status().message()),
              HasSubstr("softmax: expected an axis from -2 to 1 of f32[2,2], got 2"));
}

TEST_F(NnTest, CrossEntropyHasGradientsToSecondOrder) {
  const Tensor x = F32({0, std::log(3.0f), 5, 5}, {2, 2}).RequireGrad();
  const Tensor labels = I32({1, -1}, {2});
  const Tensor losses = CrossEntropy(x, labels, /*ignored=*/-1);
  EXPECT_THAT(Values<float>(losses), Near({-std::log(0.75f), 0.0f}));
  BackwardOptions create;
  create.create_graph = true;
  const absl::StatusOr<std::vector<Tensor>> g = Grad({Sum(losses)}, {x}, create);
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_THAT(Values<float>((*g)[0]), Near({0.25, -0.25, 0, 0}));
  // d/dx_j of p_0 is p_0 ([j = 0] - p_j).
  const absl::StatusOr<std::vector<Tensor>> h = Grad({Sum(Slice((*g)[0], 1, 0, 1))}, {x});
  ASSERT_TRUE(h.ok()) << h.status();
  EXPECT_THAT(Values<float>((*h)[0]), Near({0.1875, -0.1875, 0, 0}));
  EXPECT_THAT(std::string(CrossEntropy(x, F32({1, 0}, {2})).status().message()),
              HasSubstr("an integer label for each row"));
}

TEST_F(NnTest, ArgMaxOneHotAndTheWayBack) {
  const Tensor x = F32({1, 5, 2, 7, 0, 3}, {2, 3});
  const Tensor best = ArgMax(x);
  EXPECT_EQ(best.dtype(), DType::kI64);
  EXPECT_THAT(Values<int64_t>(best), ElementsAre(1, 0));
  EXPECT_THAT(Values<int64_t>(ArgMin(x, 0)), ElementsAre(0, 1, 0));
  EXPECT_EQ(ArgMin(x, 1, /*keep_dims=*/true).shape(), Shape({2, 1}));
  EXPECT_THAT(Values<float>(OneHot(best, 3)), ElementsAre(0, 1, 0, 1, 0, 0));
  EXPECT_EQ(OneHot(best, 3, DType::kBool).dtype(), DType::kBool);
  const Tensor most = TakeAlong(x, ArgMax(x, 1, /*keep_dims=*/true), -1);
  EXPECT_THAT(Values<float>(most), ElementsAre(5, 7));
}

TEST_F(NnTest, TakeAddsItsGradientsUp) {
  const Tensor table = F32({1, 2, 3, 4, 5, 6}, {3, 2}).RequireGrad();
  const Tensor words = I32({2, 0, 2, 2}, {2, 2});
  const Tensor rows = Take(table, words);
  EXPECT_EQ(rows.shape(), Shape({2, 2, 2}));
  EXPECT_THAT(Values<float>(rows), ElementsAre(5, 6, 1, 2, 5, 6, 5, 6));
  ASSERT_TRUE(Backward(Sum(rows * rows)).ok());
  EXPECT_THAT(Values<float>(table.grad()), ElementsAre(2, 4, 0, 0, 30, 36));
  EXPECT_THAT(Values<float>(Take(table, I32({1}, {}), -1)), ElementsAre(2, 4, 6));
}

TEST_F(NnTest, ScatterAddCountsItsAxisInTheResult) {
  const Tensor updates = F32({1, 2, 3, 4, 5, 6}, {2, 3});
  const Tensor indices = I32({1, 1, 0}, {3});
  EXPECT_THAT(Values<float>(ScatterAdd(updates, indices, 2, -1)), ElementsAre(3, 3, 6, 9));
  EXPECT_THAT(Values<float>(ScatterAdd(updates, I32({1, 1}, {2}), 2)),
              ElementsAre(0, 0, 0, 5, 7, 9));
  const Tensor scalar = ScatterAdd(updates, I32({2}, {}), 3, -1);
  EXPECT_EQ(scalar.shape(), Shape({2, 3, 3}));
  EXPECT_THAT(Values<float>(ScatterAddAlong(updates, I32({0, 0, 1, 1, 0, 1}, {2, 3}), 2, -1)),
              ElementsAre(3, 3, 5, 10));
  EXPECT_FALSE(ScatterAdd(updates, indices, 2, -3).status().ok());
}

TEST_F(NnTest, MatMulBroadcastsWhatStandsInFront) {
  Floats numbers;
  for (int i = 0; i < 24; ++i) numbers.push_back(static_cast<float>(i));
  const Tensor a = F32(numbers, {2, 2, 3, 2}).RequireGrad();
  const Tensor b = F32({1, 2, 3, 4}, {2, 2}).RequireGrad();
  // One right factor for all: what comes is the same as one by one.
  const Tensor y = MatMul(a, b);
  EXPECT_EQ(y.shape(), Shape({2, 2, 3, 2}));
  Floats expected;
  for (int i = 0; i < 24; i += 2) {
    expected.push_back(numbers[i] + 3 * numbers[i + 1]);
    expected.push_back(2 * numbers[i] + 4 * numbers[i + 1]);
  }
  EXPECT_THAT(Values<float>(y), ElementsAreArray(expected));
  ASSERT_TRUE(Backward(Sum(y)).ok());
  EXPECT_THAT(Values<float>(b.grad()), ElementsAre(132, 132, 144, 144));
  EXPECT_EQ(MatMul(a, F32({1, 2, 3, 4, 5, 6}, {2, 3})).shape(), Shape({2, 2, 3, 3}));
  // Sizes 1 and missing dimensions on either side.
  const Tensor c = F32({1, 0, 0, 1, 0, 1, 1, 0}, {2, 1, 2, 2}).RequireGrad();
  const Tensor z = MatMul(b, MatMul(c, F32({1, 2, 3, 4, 5, 6}, {3, 2, 1})));
  EXPECT_EQ(z.shape(), Shape({2, 3, 2, 1}));
  EXPECT_THAT(Values<float>(z), ElementsAre(5, 11, 11, 25, 17, 39, 4, 10, 10, 24, 16, 38));
  ASSERT_TRUE(Backward(Sum(z)).ok());
  EXPECT_EQ(c.grad().shape(), Shape({2, 1, 2, 2}));
  EXPECT_THAT(Values<float>(c.grad()), ElementsAre(36, 48, 54, 72, 36, 48, 54, 72));

  EXPECT_THAT(std::string(MatMul(a, F32({1, 2, 3}, {3, 1, 1})).status().message()),
              HasSubstr("matmul: expected leading dimensions that broadcast, got f32[2,2,3,2] and "
                        "f32[3,1,1]"));
  EXPECT_THAT(std::string(MatMul(a, F32({1, 2, 3}, {3})).status().message()),
              HasSubstr("matmul: expected two matrices"));
}

}  // namespace
}  // namespace chorus
