#include "chorus/functional/op.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/math.h"
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

class OpTest : public ::testing::Test {
 protected:
  Tensor F32(const std::vector<float>& values, const Shape& shape) {
    return FromHost<float>(session_, values, shape);
  }

  FakeDaemon daemon_;
  const Session session_ = daemon_.Open();
};

TEST_F(OpTest, IsWhatItsFunctionIsWithItsGradient) {
  const Tensor x = F32({-1, 2}, {2}).RequireGrad();
  const Tensor y = F32({-1, 2}, {2}).RequireGrad();
  const Tensor by_name = Op("tanh", {x});
  EXPECT_EQ(Values<float>(by_name), Values<float>(Tanh(y)));
  ASSERT_TRUE(Backward(Sum(by_name)).ok());
  ASSERT_TRUE(Backward(Sum(Tanh(y))).ok());
  EXPECT_EQ(Values<float>(x.grad()), Values<float>(y.grad()));
}

TEST_F(OpTest, TakesAttributesOfEachKindInAnyOrder) {
  const Tensor x = F32({1, 2, 3, 4, 5, 6}, {2, 3});
  const Tensor turned = Op("transpose", {x}, {{"perm", std::vector<int64_t>{1, 0}}});
  EXPECT_EQ(turned.shape(), (Shape{3, 2}));
  EXPECT_THAT(Values<float>(turned), ElementsAre(1, 4, 2, 5, 3, 6));
  const Tensor cut =
      Op("slice", {x}, {{"end", int64_t{2}}, {"axis", int64_t{1}}, {"begin", int64_t{1}}});
  EXPECT_THAT(Values<float>(cut), ElementsAre(2, 5));
  const Tensor whole = Op("cast", {x}, {{"dtype", std::string("i32")}});
  EXPECT_THAT(Values<int32_t>(whole), ElementsAre(1, 2, 3, 4, 5, 6));
}

TEST_F(OpTest, StandsOnADeviceWithoutInputs) {
  const Tensor x =
      OpOn(session_, "fill", {},
           {{"value", 2.5}, {"dims", std::vector<int64_t>{2}}, {"dtype", std::string("f32")}});
  EXPECT_THAT(Values<float>(x), ElementsAre(2.5, 2.5));
  EXPECT_EQ(Op("neg", {}).status().code(), absl::StatusCode::kInvalidArgument);
}

// Also where its operands may be of several devices.
TEST_F(OpTest, StandsWhereItsFirstOperandDoes) {
  const Session session = daemon_.Open(2);
  const Tensor x = FromHost<float>(session.device(1), {1, 2}, {2});
  const Tensor y = Op("copy", {x}) + x;
  EXPECT_EQ(y.device().slot(), 1);
  EXPECT_EQ(Values<float>(y), (std::vector<float>{2, 4}));
}

TEST_F(OpTest, IsCompiledLikeAnyOther) {
  const Compiled twice = Compile([](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{Op("add", {in[0], in[0]})};
  });
  const auto out = twice.Run({F32({1, 2}, {2})});
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_THAT(Values<float>((*out)[0]), ElementsAre(2, 4));
}

TEST_F(OpTest, SaysWhatItDoesNotTake) {
  const Tensor x = F32({1, 2}, {2});
  const auto refused = [&](const Tensor& tensor, absl::StatusCode code, const char* text) {
    const absl::Status status = tensor.status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_THAT(ErrorOf(status).source, HasSubstr("op_test.cc:"));
  };
  refused(Op("no_such_op", {x}), absl::StatusCode::kUnimplemented, "no_such_op");
  refused(Op("all_reduce", {x}), absl::StatusCode::kInvalidArgument, "collective all_reduce");
  refused(Op("add", {x}), absl::StatusCode::kInvalidArgument, "add: expected");
  refused(Op("neg", {x}, {{"axis", int64_t{0}}}), absl::StatusCode::kInvalidArgument, "'axis'");
  refused(Op("transpose", {x}, {{"perm", int64_t{0}}}), absl::StatusCode::kInvalidArgument,
          "a list of integers as 'perm'");
}

}  // namespace
}  // namespace chorus
