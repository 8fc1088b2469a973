#include "chorus/functional/sort.h"

#include <cmath>
#include <cstdint>
#include <limits>
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
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::Values;

class SortTest : public ::testing::Test {
 protected:
  Tensor F32(const std::vector<float>& values, const Shape& shape) {
    return FromHost<float>(session_, values, shape);
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
};

TEST_F(SortTest, GivesValuesAndWhereTheyStood) {
  const Tensor x = F32({3, 1, 2, 1, 5, 1}, {2, 3});
  const Sorted rows = Sort(x);
  EXPECT_THAT(Values<float>(rows.values), ElementsAre(1, 2, 3, 1, 1, 5));
  EXPECT_THAT(Values<int64_t>(rows.indices), ElementsAre(1, 2, 0, 0, 2, 1));
  EXPECT_EQ(rows.indices.dtype(), DType::kI64);
  const Sorted columns = Sort(x, 0, /*descending=*/true);
  EXPECT_THAT(Values<float>(columns.values), ElementsAre(3, 5, 2, 1, 1, 1));
  EXPECT_THAT(Values<int64_t>(columns.indices), ElementsAre(0, 1, 0, 1, 0, 1));
  EXPECT_THAT(Values<int64_t>(ArgSort(x, -1, /*descending=*/true)), ElementsAre(0, 2, 1, 1, 0, 2));
  EXPECT_THAT(Values<int64_t>(ArgSort(x, -2)), ElementsAre(1, 0, 1, 0, 1, 0));
}

TEST_F(SortTest, NanIsAboveAllElse) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const Tensor x = F32({nan, inf, -inf, nan}, {4});
  EXPECT_THAT(Values<int64_t>(ArgSort(x)), ElementsAre(2, 1, 0, 3));
  EXPECT_THAT(Values<int64_t>(ArgSort(x, 0, /*descending=*/true)), ElementsAre(0, 3, 1, 2));
  EXPECT_TRUE(std::isnan(Values<float>(TopK(x, 1).values)[0]));
}

TEST_F(SortTest, TopKIsWhatASortBeginsWith) {
  const Tensor x = F32({3, 1, 2, 7, 5, 7}, {2, 3});
  const Sorted most = TopK(x, 2);
  EXPECT_EQ(most.values.shape(), Shape({2, 2}));
  EXPECT_THAT(Values<float>(most.values), ElementsAre(3, 2, 7, 7));
  EXPECT_THAT(Values<int64_t>(most.indices), ElementsAre(0, 2, 0, 2));
  const Sorted least = TopK(x, 1, 0, /*largest=*/false);
  EXPECT_THAT(Values<float>(least.values), ElementsAre(3, 1, 2));
  EXPECT_EQ(least.indices.shape(), Shape({1, 3}));
  EXPECT_EQ(TopK(x, 0).values.shape(), Shape({2, 0}));
  EXPECT_THAT(Values<float>(TopK(x, 3, -1, /*largest=*/false).values),
              ElementsAre(1, 2, 3, 5, 7, 7));
}

TEST_F(SortTest, GradientsGoToTheElementsThatTheValuesAre) {
  const Tensor x = F32({3, 1, 2, 1, 5, 1}, {2, 3}).RequireGrad();
  const Tensor weights = F32({10, 20, 30}, {3});
  const Sorted sorted = Sort(x);
  BackwardOptions create;
  create.create_graph = true;
  const auto g = Grad({Sum(sorted.values * sorted.values * weights)}, {x}, create);
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_THAT(Values<float>((*g)[0]), ElementsAre(180, 20, 80, 20, 300, 40));
  const auto h = Grad({Sum((*g)[0])}, {x});
  ASSERT_TRUE(h.ok()) << h.status();
  EXPECT_THAT(Values<float>((*h)[0]), ElementsAre(60, 20, 40, 20, 60, 40));
  // Of what is not taken 0; the indices have none.
  const Tensor y = F32({3, 1, 2}, {3}).RequireGrad();
  ASSERT_TRUE(Backward(Sum(TopK(y, 2).values)).ok());
  EXPECT_THAT(Values<float>(y.grad()), ElementsAre(1, 0, 1));
  EXPECT_FALSE(sorted.indices.requires_grad());
}

TEST_F(SortTest, IsCompiled) {
  const Compiled both = Compile([](const std::vector<Tensor>& in) {
    const Sorted sorted = TopK(in[0], 2);
    return std::vector<Tensor>{sorted.values, sorted.indices};
  });
  const auto out = both.Run({F32({1, 2, 3}, {3})});
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_THAT(Values<float>((*out)[0]), ElementsAre(3, 2));
  EXPECT_THAT(Values<int64_t>((*out)[1]), ElementsAre(2, 1));
}

TEST_F(SortTest, SaysWhatItDoesNotTake) {
  const Tensor x = F32({3, 1, 2, 7, 5, 7}, {2, 3});
  const auto refused = [](const Sorted& sorted, const char* text) {
    for (const Tensor& tensor : {sorted.values, sorted.indices}) {
      const absl::Status status = tensor.status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(text));
      EXPECT_THAT(ErrorOf(status).source, HasSubstr("sort_test.cc:"));
    }
  };
  refused(Sort(x, 2), "arg_sort: expected an axis from -2 to 1 of f32[2,3], got 2");
  refused(TopK(x, 4), "arg_sort: expected 'k' from 0 to 3, the elements along axis 1 of f32[2,3]");
  refused(TopK(x, -1, 0), "'k' from 0 to 2, the elements along axis 0 of f32[2,3], got -1");
  refused(Sort(TopK(x, 4).values), "'k' from 0 to 3");
}

}  // namespace
}  // namespace chorus
