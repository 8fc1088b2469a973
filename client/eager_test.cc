#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iostream>
#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "chorus/functional/op.h"
#include "chorus/functional/shape.h"
#include "client/internal/access.h"
#include "client/internal/living_sessions.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/ranks.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using internal::ImplOf;
using internal::LivingSessions;
using internal::SessionOf;

using ::testing::ElementsAre;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::JoinAll;
using testing::Ranks;
using ::testing::StartsWith;
using testing::Values;

using Floats = std::vector<float>;

std::vector<Tensor> Inputs(const Ranks& ranks, const Shape& shape) {
  std::vector<Tensor> inputs;
  for (int r = 0; r < ranks.size(); ++r) {
    Floats values;
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(10 * r + i));
    inputs.push_back(FromHost<float>(ranks.worlds[r], values, shape));
  }
  return inputs;
}

TEST(EagerTest, AllReduceGivesEveryRankTheSum) {
  FakeDaemon daemon;
  Ranks ranks(3, &daemon);
  const std::vector<Tensor> x = Inputs(ranks, {3});
  std::vector<Tensor> y;
  for (int r = 0; r < 3; ++r) y.push_back(AllReduce(x[r], ranks.worlds[r]));
  for (const Tensor& t : y) {
    EXPECT_EQ(t.dtype(), DType::kF32);
    EXPECT_EQ(t.shape(), Shape({3}));
    EXPECT_THAT(Values<float>(t), ElementsAre(30, 33, 36));
  }
}

TEST(EagerTest, MovesTensorsBetweenRanks) {
  FakeDaemon daemon;
  Ranks ranks(3, &daemon);
  const std::vector<Tensor> x = Inputs(ranks, {2});
  std::vector<Tensor> b, re, rs;
  std::vector<std::vector<Tensor>> g;
  for (int r = 0; r < 3; ++r) {
    b.push_back(Broadcast(x[r], 1, ranks.worlds[r]));
    re.push_back(Reduce(x[r], 2, ranks.worlds[r]));
    g.push_back(AllGather(x[r], ranks.worlds[r]));
    rs.push_back(ReduceScatter({x[r], x[r] * 2, x[r] * 3}, ranks.worlds[r]));
  }
  const Tensor sent = Send(x[0], 2, ranks.worlds[0], 7);
  const Tensor received = Recv(DType::kF32, {2}, 0, ranks.worlds[2], 7);
  for (int r = 0; r < 3; ++r) {
    EXPECT_THAT(Values<float>(b[r]), ElementsAre(10, 11));
    EXPECT_EQ(re[r].absent(), r != 2);
    EXPECT_TRUE(re[r].Wait().ok());
    ASSERT_EQ(g[r].size(), 3u);
    for (int s = 0; s < 3; ++s) {
      EXPECT_THAT(Values<float>(g[r][s]), ElementsAre(10 * s, 10 * s + 1));
    }
    EXPECT_THAT(Values<float>(rs[r]), ElementsAre(30 * (r + 1), 33 * (r + 1)));
  }
  EXPECT_THAT(Values<float>(re[2]), ElementsAre(30, 33));
  EXPECT_TRUE(sent.absent());
  EXPECT_TRUE(sent.Wait().ok());
  EXPECT_THAT(Values<float>(received), ElementsAre(0, 1));
}

TEST(EagerTest, BarrierWaitsForAll) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const Tensor first = Barrier(ranks.worlds[0]);
  const absl::Status early = first.Wait(std::chrono::milliseconds(5));
  EXPECT_EQ(early.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ErrorOf(early).reason, Reason::kTransportTimeout);
  const Tensor second = Barrier(ranks.worlds[1]);
  EXPECT_TRUE(first.Wait().ok());
  EXPECT_TRUE(second.Wait().ok());
}

TEST(EagerTest, GroupsHaveTheirOwnOrder) {
  FakeDaemon daemon;
  Ranks ranks(3, &daemon);
  const absl::StatusOr<Group> g1 = ranks.worlds[1].NewGroup({2, 1});
  const absl::StatusOr<Group> g2 = ranks.worlds[2].NewGroup({2, 1});
  ASSERT_TRUE(g1.ok() && g2.ok());
  EXPECT_EQ(g1->rank(), 1);
  EXPECT_EQ(g2->rank(), 0);
  EXPECT_EQ(g1->size(), 2);
  EXPECT_EQ(g1->GroupRankOf(2), 0);
  EXPECT_EQ(g1->GroupRankOf(0), -1);
  const std::vector<Tensor> x = Inputs(ranks, {1});
  const Tensor y1 = Broadcast(x[1], 0, *g1);
  const Tensor y2 = Broadcast(x[2], 0, *g2);
  EXPECT_THAT(Values<float>(y1), ElementsAre(20));
  EXPECT_THAT(Values<float>(y2), ElementsAre(20));
}

TEST(EagerTest, LocalOpsAreSentTogetherAndOnlyWhenNeeded) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = FromHost<float>(session, {1, 2, 3, 4}, {2, 2});
  const Tensor y = 2 * x + Transpose(x) - 1;
  const Tensor z = Sum(Relu(MatMul(y, x)), {1});
  EXPECT_EQ(daemon.counts().runs, 0);
  // y = [[2, 6], [7, 11]]; yx = [[20, 28], [40, 58]]
  EXPECT_THAT(Values<float>(z), ElementsAre(48, 98));
  EXPECT_EQ(daemon.counts().runs, 1);
  EXPECT_THAT(Values<float>(y), ElementsAre(2, 6, 7, 11));
  EXPECT_EQ(daemon.counts().runs, 1);
}

TEST(EagerTest, RepeatedFragmentsAreRegisteredOnce) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = FromHost<float>(session, {1, 2}, {2});
  for (int i = 0; i < 5; ++i) {
    const Tensor y = (i * 1.5) * x;
    EXPECT_THAT(Values<float>(y), ElementsAre(i * 1.5, i * 3.0));
  }
  EXPECT_EQ(daemon.counts().registered, 1);
  EXPECT_EQ(daemon.counts().runs, 5);
}

TEST(EagerTest, RepeatedCollectivesAreRegisteredOnce) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const std::vector<Tensor> x = Inputs(ranks, {2});
  for (int i = 0; i < 4; ++i) {
    std::vector<Tensor> y;
    for (int r = 0; r < 2; ++r) y.push_back(AllReduce(x[r], ranks.worlds[r]));
    for (const Tensor& t : y) EXPECT_THAT(Values<float>(t), ElementsAre(10, 12));
  }
  EXPECT_EQ(daemon.counts().registered, 2);
}

TEST(EagerTest, BroadcastsShapesAndRefusesThoseThatDoNotMeet) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = FromHost<double>(session, {1, 2, 3, 4, 5, 6}, {2, 3});
  const Tensor row = FromHost<double>(session, {10, 20, 30}, {3});
  const Tensor column = FromHost<double>(session, {1, 2}, {2, 1});
  EXPECT_THAT(Values<double>(x + row), ElementsAre(11, 22, 33, 14, 25, 36));
  EXPECT_THAT(Values<double>(column * row), ElementsAre(10, 20, 30, 20, 40, 60));
  const Tensor bad = x + FromHost<double>(session, {1, 2}, {2});
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(bad.status().message()), HasSubstr("f64[2,3] and f64[2]"));
}

TEST(EagerTest, AZeroDimTensorStandsForAllElements) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = FromHost<double>(session, {1, 2, 3, 4, 5, 6}, {2, 3}).RequireGrad();
  const Tensor rate = FromHost<double>(session, {0.5}, {}).RequireGrad();
  const Tensor y = x - rate * x;
  EXPECT_THAT(Values<double>(y), ElementsAre(0.5, 1, 1.5, 2, 2.5, 3));
  EXPECT_THAT(Values<double>(rate - x), ElementsAre(-0.5, -1.5, -2.5, -3.5, -4.5, -5.5));
  EXPECT_EQ((rate + rate).shape(), Shape{});
  ASSERT_TRUE(Backward(Sum(y)).ok());
  EXPECT_THAT(Values<double>(rate.grad()), ElementsAre(-21));
  EXPECT_EQ(rate.grad().shape(), Shape{});
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(0.5, 0.5, 0.5, 0.5, 0.5, 0.5));
}

TEST(EagerTest, ShapeOps) {
  FakeDaemon daemon;
  const Session session = daemon.Open(2);
  const Tensor x = FromHost<int64_t>(session, {1, 2, 3, 4, 5, 6}, {2, 3});
  EXPECT_THAT(Values<int64_t>(Slice(x, -1, 1, 3)), ElementsAre(2, 3, 5, 6));
  EXPECT_THAT(Values<int64_t>(Concat({x, x}, 1)), ElementsAre(1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6));
  EXPECT_THAT(Values<int64_t>(Reshape(x, {3, 2})), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(Values<int64_t>(Sum(x, {0}, true)), ElementsAre(5, 7, 9));
  EXPECT_EQ(Sum(x, {0}, true).shape(), Shape({1, 3}));
  EXPECT_THAT(Values<int64_t>(-x * 3 + 1), ElementsAre(-2, -5, -8, -11, -14, -17));
  EXPECT_THAT(Values<float>(Full(session, DType::kF32, {2}, 1.5)), ElementsAre(1.5, 1.5));
  const Tensor moved = CopyTo(x, session.device(1));
  EXPECT_EQ(moved.device().slot(), 1);
  EXPECT_THAT(Values<int64_t>(moved + moved), ElementsAre(2, 4, 6, 8, 10, 12));
  const Tensor mixed = x + moved;
  EXPECT_THAT(std::string(mixed.status().message()), HasSubstr("CopyTo"));
}

TEST(EagerTest, OneSizeOfAReshapeIsWhatTheOthersLeave) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = FromHost<float>(session, {1, 2, 3, 4, 5, 6}, {2, 3});
  EXPECT_EQ(Reshape(x, {-1}).shape(), Shape({6}));
  EXPECT_EQ(Reshape(x, {3, -1}).shape(), Shape({3, 2}));
  EXPECT_EQ(Reshape(x, {-1, 6, 1}).shape(), Shape({1, 6, 1}));
  EXPECT_EQ(Reshape(Scalar<float>(session, 1), {-1, 1}).shape(), Shape({1, 1}));
  EXPECT_EQ(Reshape(Zeros(session, DType::kF32, {2, 0}), {-1, 3}).shape(), Shape({0, 3}));
  const auto refused = [](const Tensor& y, const char* dims) {
    EXPECT_EQ(ErrorOf(y.status()).reason, Reason::kBadType);
    EXPECT_THAT(std::string(y.status().message()),
                HasSubstr(std::string("one of which may be -1, got ") + dims));
  };
  refused(Reshape(x, {4, -1}), "[4,-1]");
  refused(Reshape(x, {-1, -1}), "[-1,-1]");
  refused(Reshape(x, {-1, -2}), "[-1,-2]");
  refused(Reshape(x, {-1, int64_t{1} << 62, 4}), "[-1,4611686018427387904,4]");
  // Of no elements any size is right.
  refused(Reshape(Zeros(session, DType::kF32, {2, 0}), {-1, 0}), "[-1,0]");
}

TEST(EagerTest, AxesCountFromTheEndToo) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = FromHost<int64_t>(session, {1, 2, 3, 4, 5, 6}, {1, 2, 3});
  EXPECT_EQ(Transpose(x, {-1, 0, -2}).shape(), Shape({3, 1, 2}));
  EXPECT_THAT(Values<int64_t>(Transpose(x, {-1, 0, -2})), ElementsAre(1, 4, 2, 5, 3, 6));
  EXPECT_EQ(SwapAxes(x, 0, -1).shape(), Shape({3, 2, 1}));
  EXPECT_THAT(Values<int64_t>(SwapAxes(x, -1, 1)), ElementsAre(1, 4, 2, 5, 3, 6));
  EXPECT_EQ(SwapAxes(x, 1, 1).shape(), x.shape());
  EXPECT_EQ(Sum(x, -1).shape(), Shape({1, 2}));
  EXPECT_EQ(Concat({x, x}, -2).shape(), Shape({1, 4, 3}));
  for (const Tensor& wrong : {Transpose(x, {-4, 0, 1}), Transpose(x, {-1, 2, 0}), SwapAxes(x, 0, 3),
                              SwapAxes(x, -4, 0), Sum(x, 3), Sum(x, -4)}) {
    EXPECT_EQ(ErrorOf(wrong.status()).reason, Reason::kBadType) << wrong.status();
  }
}

// What could mean more than one thing means what is said here.
TEST(EagerTest, OneAxisAndListsOfAxesAreTaken) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = FromHost<int64_t>(session, {1, 2, 3, 4, 5, 6}, {2, 3});
  EXPECT_THAT(Values<int64_t>(Sum(x, 0)), ElementsAre(5, 7, 9));
  EXPECT_THAT(Values<int64_t>(Sum(x, 1)), ElementsAre(6, 15));
  EXPECT_THAT(Values<int64_t>(Sum(x, size_t{1})), ElementsAre(6, 15));
  EXPECT_EQ(Sum(x, 0, true).shape(), Shape({1, 3}));
  EXPECT_THAT(Values<int64_t>(Sum(x, {0})), ElementsAre(5, 7, 9));
  EXPECT_THAT(Values<int64_t>(Sum(x, {0, 1})), ElementsAre(21));
  EXPECT_THAT(Values<int64_t>(Sum(x, {})), ElementsAre(21));
  EXPECT_EQ(Sum(x, std::vector<int64_t>()).shape(), x.shape());
  static_assert(!std::is_convertible_v<bool, Axes>, "keep_dims is no axis");
  // No list of these is a line of the trainer's.
  EXPECT_THAT(Values<int64_t>(Transpose(x, {0, 1})), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(Values<int64_t>(Transpose(x, {1, 0})), ElementsAre(1, 4, 2, 5, 3, 6));
  EXPECT_THAT(Values<int64_t>(Transpose(Sum(x), {})), ElementsAre(21));
  EXPECT_THAT(Values<int64_t>(Transpose(x)), ElementsAre(1, 4, 2, 5, 3, 6));
}

TEST(EagerTest, AssigningOperatorsTurnTheHandleToTheResult) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor leaf = FromHost<float>(session, {2, 4}, {2}).RequireGrad();
  Tensor x = leaf;
  x += 1;
  const Tensor before = x;
  x *= x;
  x -= Scalar<float>(session, 1);
  x /= 2;
  EXPECT_THAT(Values<float>(x), ElementsAre(4, 12));
  EXPECT_THAT(Values<float>(before), ElementsAre(3, 5));
  EXPECT_THAT(Values<float>(leaf), ElementsAre(2, 4));
  ASSERT_TRUE(Backward(Sum(x)).ok());
  EXPECT_THAT(Values<float>(leaf.grad()), ElementsAre(3, 5));
  {
    const NoGrad no_grad;
    x -= 0.5;
  }
  EXPECT_TRUE(x.RequireGrad().status().ok()) << "after an update a leaf again";
  EXPECT_THAT(Values<bool>(x < 4), ElementsAre(true, false));
  const Compiled f = Compile([](const std::vector<Tensor>& in) {
    Tensor y = in[0];
    y += in[0];
    y /= 4;
    return std::vector<Tensor>{y};
  });
  EXPECT_THAT(Values<float>((*f.Run({leaf}))[0]), ElementsAre(1, 2));
  const Tensor other = FromHost<float>(session, {1, 2, 3}, {3});
  Tensor bad = leaf;
  const int line = __LINE__ + 1;
  bad += other;
  EXPECT_EQ(ErrorOf(bad.status()).source, std::string(__FILE__) + ":" + std::to_string(line));
}

TEST(EagerTest, ErrorsNameTheLineAndAreCarriedOn) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = FromHost<float>(session, {1, 2}, {2});
  const Tensor y = FromHost<float>(session, {1, 2, 3}, {3});
  const int line = __LINE__ + 1;
  const Tensor bad = MatMul(x, y);
  const Tensor later = Relu(bad) * 2;
  EXPECT_EQ(ErrorOf(later.status()).source, std::string(__FILE__) + ":" + std::to_string(line));
  EXPECT_EQ(later.Wait(), bad.status());
  EXPECT_EQ(later.Read<float>().status(), bad.status());
  EXPECT_EQ(later.dtype(), DType::kUnspecified);
  // Operators know their line too.
  const int sum_line = __LINE__ + 1;
  const Tensor sum = x + y;
  EXPECT_EQ(ErrorOf(sum.status()).source, std::string(__FILE__) + ":" + std::to_string(sum_line));
}

std::string LineOf(const Tensor& x) { return ErrorOf(x.status()).source; }
std::string ThisFile(int line) { return std::string(__FILE__) + ":" + std::to_string(line); }

// Helpers as a trainer writes them. Each goes wrong where `x` has no axis 5.
Tensor HandsOn(const Tensor& x, CallSite site = CallSite::Here()) {
  return Div(Sum(x, {5}, false, site), 2, site);
}
Tensor WithOperators(const Tensor& x, const Tensor& y, CallSite site = CallSite::Here()) {
  const CallSiteScope lines(site);
  return -(2 * x) + (y - 1);
}
Tensor OfHelpers(const Tensor& x, const Tensor& y, CallSite site = CallSite::Here()) {
  const CallSiteScope lines(site);
  return WithOperators(x, y);
}

TEST(EagerTest, AHelpersErrorsNameItsCallersLine) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = FromHost<float>(session, {1, 2}, {2});
  const Tensor y = FromHost<float>(session, {1, 2, 3}, {3});
  const int line = __LINE__;
  EXPECT_EQ(LineOf(HandsOn(x)), ThisFile(line + 1));
  EXPECT_EQ(LineOf(WithOperators(x, y)), ThisFile(line + 2));
  EXPECT_EQ(LineOf(OfHelpers(x, y)), ThisFile(line + 3));
  EXPECT_EQ(LineOf(x + y), ThisFile(line + 4));  // the scopes are over
  // A compiled function has its own lines, also where a helper runs it.
  const int inside = __LINE__ + 2;
  const Compiled step = Compile(
      [](const std::vector<Tensor>& in) { return std::vector<Tensor>{MatMul(in[0], in[1])}; });
  const CallSiteScope lines(CallSite{"caller.cc", 1});
  const auto out = step.Run({x, y});
  const absl::Status status = out.ok() ? out->front().status() : out.status();
  EXPECT_EQ(ErrorOf(status).source, ThisFile(inside)) << status;
}

// A daemon takes lines of a bounded length: of a longer path it gets the end.
TEST(EagerTest, CallsInFilesWithLongPathsWork) {
  FakeDaemon daemon;
  const Ranks ranks(1, &daemon);
  const World& world = ranks.worlds[0];
  std::string path = "/";
  while (path.size() < 3000) path += "a_directory_of_a_build/";
  path += "train.cc";
  const CallSite site{path.c_str(), 42};
  const Tensor x = FromHost<float>(world, {1, 2}, {2}, site);
  const Tensor y = AllReduce(Add(x, x, site), world, Reduction::kSum, site);
  const auto read = y.Read<float>();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, (std::vector<float>{2, 4}));
  const std::string source = LineOf(Add(x, FromHost<float>(world, {1, 2, 3}, {3}), site));
  EXPECT_EQ(source, (path + ":42").substr(path.size() + 3 - 512));
}

// What takes a line uses it, and no line of the library's.
TEST(EagerTest, EveryCallTakesALine) {
  FakeDaemon daemon;
  const Ranks ranks(1, &daemon);
  const World& world = ranks.worlds[0];
  const Tensor x = FromHost<float>(world, {1, 2}, {2});
  const Tensor y = FromHost<float>(world, {1, 2, 3}, {3});
  const Tensor i = FromHost<int64_t>(world, {0, 1}, {2});
  const CallSite s{"given.cc", 7};
  const std::map<std::string, Tensor> calls = {
      {"FromHost", FromHost<float>(world, {1}, {2}, s)},
      {"Full", Full(world, DType::kF32, {-1}, 1, s)},
      {"Zeros", Zeros(world, DType::kF32, {-1}, s)},
      {"Add", Add(x, y, s)},
      {"Sub", Sub(x, y, s)},
      {"Mul", Mul(x, y, s)},
      {"Div", Div(x, y, s)},
      {"Pow", Pow(x, y, s)},
      {"Maximum", Maximum(x, y, s)},
      {"Minimum", Minimum(x, y, s)},
      {"Equal", Equal(x, y, s)},
      {"NotEqual", NotEqual(x, y, s)},
      {"Less", Less(x, y, s)},
      {"LessEqual", LessEqual(x, y, s)},
      {"Greater", Greater(x, y, s)},
      {"GreaterEqual", GreaterEqual(x, y, s)},
      {"Where", Where(x > 0, x, y, s)},
      {"Clamp", Clamp(x, y, 1, s)},
      {"ClampMin", ClampMin(x, y, s)},
      {"ClampMax", ClampMax(x, y, s)},
      {"LogicalNot", LogicalNot(x, s)},
      {"Exp", Exp(i, s)},
      {"MatMul", MatMul(x, y, s)},
      {"Sum", Sum(x, {5}, false, s)},
      {"Mean", Mean(x, {5}, false, s)},
      {"Max", Max(x, {5}, false, s)},
      {"Norm", Norm(x, 2, 5, false, s)},
      {"Norm, p", Norm(x, 3, {}, false, s)},
      {"LogSumExp", LogSumExp(x, 5, false, s)},
      {"Var", Var(x, 5, false, true, s)},
      {"Std", Std(x, 5, false, true, s)},
      {"Expand", Expand(x, {3}, s)},
      {"Reshape", Reshape(x, {3}, s)},
      {"Reshape, open", Reshape(x, {-1, 3}, s)},
      {"Transpose", Transpose(x, s)},
      {"Transpose, list", Transpose(x, {0, 1}, s)},
      {"SwapAxes", SwapAxes(x, 0, 1, s)},
      {"Slice", Slice(x, 0, 1, 9, s)},
      {"Concat", Concat({x, i}, 0, s)},
      {"Split", Split(x, 0, 0, s)[0]},
      {"Split, sizes", Split(x, {1}, 0, s)[0]},
      {"Chunk", Chunk(x, 0, 0, s)[0]},
      {"Stack", Stack({x, y}, 0, s)},
      {"Squeeze", Squeeze(x, 0, s)},
      {"Unsqueeze", Unsqueeze(x, 5, s)},
      {"Flatten", Flatten(x, 5, -1, s)},
      {"Pad", Pad(x, {}, 0, s)},
      {"Arange", Arange(world, DType::kF32, 0, 1, 0, s)},
      {"Einsum", Einsum("i,i", {x, y}, s)},
      {"Einsum, matmul", Einsum("i,i", {Cast(x, DType::kI8), Cast(x, DType::kI8)}, s)},
      {"CopyTo", CopyTo(x, DeviceRef(), s)},
      {"Softmax", Softmax(x, 5, s)},
      {"CrossEntropy", CrossEntropy(x, y, s)},
      {"Take", Take(x, y, 0, s)},
      {"ArgMax", ArgMax(x, 5, false, s)},
      {"AllReduce", AllReduce(i, world, Reduction::kAvg, s)},
      {"Broadcast", Broadcast(x, 3, world, s)},
      {"Reduce", Reduce(x, 3, world, {}, s)},
      {"Gather", GatherIntoTensor(x, 3, world, {}, 0, s)},
      {"AllGather", AllGatherIntoTensor(x, world, {}, 7, s)},
      {"Send", Send(x, 9, world, 0, s)},
      {"Recv", Recv(DType::kF32, {2}, 9, world, 0, s)},
      {"AllReduceCoalesced", AllReduceCoalesced({i}, world, Reduction::kAvg, s)[0]},
  };
  for (const auto& [name, result] : calls) {
    EXPECT_EQ(LineOf(result), "given.cc:7") << name << ": " << result.status();
  }
  EXPECT_EQ(ErrorOf(Backward(x, {}, s)).source, "given.cc:7");
  EXPECT_EQ(ErrorOf(Grad({x}, {y}, {}, s).status()).source, "given.cc:7");
}

TEST(EagerTest, WrongUseIsAnErrorNotACrash) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Session other = daemon.Open();
  const Tensor x = FromHost<float>(session, {1, 2}, {2});
  EXPECT_FALSE((x + Tensor()).status().ok());
  EXPECT_FALSE((Tensor() + Tensor()).status().ok());
  EXPECT_FALSE((x + FromHost<float>(other, {1, 2}, {2})).status().ok());
  EXPECT_FALSE(FromHost<float>(session, {1, 2}, {3}).status().ok());
  EXPECT_FALSE(FromHost<float>(session, {}, {-1}).status().ok());
  EXPECT_FALSE(FromHost<float>(DeviceRef(), {}, {0}).status().ok());
  EXPECT_FALSE(AllReduce(x, Group()).status().ok());
  EXPECT_FALSE(x.Read<double>().ok());
  EXPECT_FALSE(x.Item<float>().ok());
  EXPECT_FALSE(Tensor().Wait().ok());
  EXPECT_FALSE(Tensor().Read<float>().ok());
  EXPECT_FALSE(Transpose(FromHost<float>(session, {1}, {1})).status().ok());
  EXPECT_FALSE(Sum(x, {3}).status().ok());
  EXPECT_FALSE(Slice(x, 0, 1, 5).status().ok());
  EXPECT_FALSE(Concat({}, 0).status().ok());
  EXPECT_FALSE(Session().Join().ok());
  EXPECT_FALSE(World().NewGroup({0}).ok());
  EXPECT_FALSE(Compiled().Run({x}).ok());
}

// A call that has no session carries its own error on, like any.
TEST(EagerTest, AnErrorWithoutASessionIsCarriedOn) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = FromHost<float>(session, {1, 2}, {2});
  const Tensor bad = AllReduce(x, Group());
  ASSERT_THAT(std::string(bad.status().message()), HasSubstr("expected a group"));
  for (const Tensor& later : {Relu(bad), bad * 2, Sum(bad), bad + bad, x + bad, bad + x,
                              Concat({bad, bad}, 0), Op("neg", {bad}), Relu(Relu(bad))}) {
    EXPECT_EQ(later.status(), bad.status());
    EXPECT_EQ(later.Wait(), bad.status());
  }
}

TEST(EagerTest, AnUnknownDeviceIsThatCallsErrorAlone) {
  FakeDaemon daemon;
  const Session session = daemon.Open(2);
  const Tensor x = FromHost<float>(session, {1, 2}, {2});
  const Tensor y = x * 3;  // is sent with what is called next
  for (const int slot : {2, 7, -1}) {
    const DeviceRef device = session.device(slot);
    const auto mapped = Map<float>(device, {2});
    const struct {
      const char* op;
      absl::Status status;
    } refused[] = {
        {"fill", Full(device, DType::kF32, {2}, 1).status()},
        {"fill", Zeros(device, DType::kI64, {2}).status()},
        {"random_uniform", RandomUniform(device, DType::kF32, {2}, 1).status()},
        {"random_bits", RandomBits(device, DType::kI64, {2}, 1).status()},
        {"fill", OpOn(device, "fill", {},
                      {{"dims", std::vector<int64_t>{2}}, {"dtype", "f32"}, {"value", 1.5}})
                     .status()},
        {"FromHost", FromHost<float>(device, {1, 2}, {2}).status()},
        {"Map", mapped.status()},
    };
    for (const auto& each : refused) {
      EXPECT_EQ(ErrorOf(each.status).reason, Reason::kBadType) << each.status;
      EXPECT_THAT(std::string(each.status.message()),
                  HasSubstr(std::string(each.op) + ": device " + std::to_string(slot) +
                            " is none of the session's 2"));
      EXPECT_EQ(ErrorOf(each.status).source.rfind(__FILE__, 0), 0u) << each.status;
    }
  }
  EXPECT_THAT(Values<float>(y), ElementsAre(3, 6));
  EXPECT_THAT(Values<float>(Full(session.device(1), DType::kF32, {1}, 2)), ElementsAre(2));
}

TEST(EagerTest, FullTakesTheNumbersThatTheDtypeHas) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const struct {
    DType dtype;
    double value;
  } bad[] = {{DType::kI32, 1.5},    {DType::kI64, 1e300},     {DType::kI64, nan},
             {DType::kI64, 0x1p63}, {DType::kI32, 0x1p31},    {DType::kU8, -1},
             {DType::kU8, 256},     {DType::kI8, -129},       {DType::kBool, 2},
             {DType::kI16, 0x1p15}, {DType::kI32, -infinity}, {DType::kBool, 0.5}};
  for (const auto& each : bad) {
    const absl::Status status = Full(session, each.dtype, {2}, each.value).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kBadType) << DTypeName(each.dtype) << each.value;
    EXPECT_THAT(std::string(status.message()), HasSubstr("eager_test.cc"));
  }
  EXPECT_THAT(Values<int64_t>(Full(session, DType::kI64, {1}, -0x1p63)),
              ElementsAre(std::numeric_limits<int64_t>::min()));
  EXPECT_THAT(Values<uint8_t>(Full(session, DType::kU8, {1}, 255)), ElementsAre(255));
  EXPECT_THAT(Values<bool>(Full(session, DType::kBool, {1}, 1)), ElementsAre(true));
  EXPECT_THAT(Values<float>(Full(session, DType::kF32, {1}, infinity)), ElementsAre(infinity));
}

// By way of f32 it would be 1.
TEST(EagerTest, NumbersBecomeHalvesRoundedOnce) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const double above = 1 + 0x1p-11 + 0x1p-30;
  for (const Tensor& half :
       {Full(session, DType::kF16, {1}, above), Zeros(session, DType::kF16, {1}) + above}) {
    EXPECT_EQ(static_cast<float>(Values<F16>(half)[0]), 1 + 0x1p-10f);
  }
}

TEST(EagerTest, UploadsOfAllSizes) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  for (const size_t count : {0u, 1u, 16u, 17u, 1000u, 3000000u}) {
    Floats values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 1000);
    const Tensor x = FromHost<float>(session, values, {static_cast<int64_t>(count)});
    EXPECT_EQ(Values<float>(x), values);
  }
  EXPECT_EQ(*Scalar<double>(session, 2.5).Item<double>(), 2.5);
}

TEST(EagerTest, StagingIsUsedAgain) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  std::vector<Tensor> kept;
  for (int i = 0; i < 100; ++i) {
    kept.push_back(FromHost<float>(session, Floats(100000, static_cast<float>(i)), {100000}));
  }
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Values<float>(kept[i])[99999], i);
}

TEST(EagerTest, MappedMemoryIsReadInPlace) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  std::vector<MappedTensor<float>> x;
  for (int r = 0; r < 2; ++r) {
    absl::StatusOr<MappedTensor<float>> mapped = Map<float>(ranks.worlds[r], {2});
    ASSERT_TRUE(mapped.ok());
    x.push_back(*std::move(mapped));
  }
  for (int step = 0; step < 3; ++step) {
    std::vector<Tensor> y;
    for (int r = 0; r < 2; ++r) {
      x[r][0] = static_cast<float>(step);
      x[r][1] = static_cast<float>(r);
      y.push_back(AllReduce(x[r], ranks.worlds[r]));
    }
    for (const Tensor& t : y) EXPECT_THAT(Values<float>(t), ElementsAre(2 * step, 1));
    EXPECT_THAT(Values<float>(x[1] * 2), ElementsAre(2 * step, 2));
  }
}

TEST(EagerTest, MappedMemoryGoesInTheLogBehindWhatUsesIt) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  for (int step = 0; step < 3; ++step) {
    std::vector<Tensor> y;
    std::vector<Tensor> z;
    for (int r = 0; r < 2; ++r) {
      const absl::StatusOr<MappedTensor<float>> x = Map<float>(ranks.worlds[r], {2});
      ASSERT_TRUE(x.ok()) << x.status();
      x->data()[0] = static_cast<float>(step);
      x->data()[1] = static_cast<float>(r);
      z.push_back(*x + 1);  // pending when the memory is dropped
      y.push_back(AllReduce(*x, ranks.worlds[r]));
    }
    EXPECT_EQ(daemon.live_arenas(), 0);
    for (int r = 0; r < 2; ++r) {
      EXPECT_THAT(Values<float>(y[r]), ElementsAre(2 * step, 1));
      EXPECT_THAT(Values<float>(z[r]), ElementsAre(step + 1, r + 1));
    }
  }
}

TEST(EagerTest, ViewsReadInPlace) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  Tensor x = FromHost<float>(session, {1, 2, 3}, {3});
  const absl::StatusOr<TensorView<float>> view = x.View<float>();
  ASSERT_TRUE(view.ok());
  x = Tensor();
  EXPECT_THAT(std::vector<float>(view->begin(), view->end()), ElementsAre(1, 2, 3));
}

TEST(EagerTest, ATensorPrintsItself) {
  FakeDaemon daemon;
  const Session session = daemon.Open(2);
  const Tensor x = FromHost<float>(session.device(1), {1, 2.5, 3, 4}, {2, 2});
  EXPECT_EQ((x * 2).ToString(), "f32[2,2] on device 1:\n[[2, 5],\n [6, 8]]");
  EXPECT_EQ(Sum(x).ToString(), "f32[] on device 1: 10.5");
  EXPECT_EQ((Sum(x, 0) > 5).ToString(), "bool[2] on device 1: [false, true]");
  EXPECT_EQ(Zeros(session, DType::kI8, {3, 0}).ToString(), "i8[3,0] on device 0:\n[]");
  EXPECT_EQ(FromHost<int64_t>(session, {7}, {1}).ToString(), "i64[1] on device 0: [7]");
  EXPECT_EQ(Zeros(session, DType::kBF16, {5000}).ToString(),
            "bf16[5000] on device 0: [0, 0, 0, ..., 0, 0, 0]");
  const absl::StatusOr<MappedTensor<int32_t>> mapped = Map<int32_t>(session, {2});
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  (*mapped)[0] = 4;
  (*mapped)[1] = 5;
  std::ostringstream out;
  out << *mapped;
  EXPECT_EQ(out.str(), "i32[2] on device 0: [4, 5]");
  // gtest, of what holds tensors too.
  EXPECT_EQ(::testing::PrintToString(std::vector<Tensor>{Sum(x)}), "{ f32[] on device 1: 10.5 }");
}

TEST(EagerTest, ATensorWithoutValuesPrintsWhy) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  EXPECT_EQ(Tensor().ToString(), "undefined tensor");
  const Tensor x = FromHost<int32_t>(ranks.worlds[0], {1, 2}, {2});
  const Tensor bad = Reshape(x, {3});
  EXPECT_EQ(bad.ToString(), "failed tensor: " + std::string(bad.status().message()));
  EXPECT_THAT(bad.ToString(), HasSubstr("eager_test.cc:"));
  // Pending, and found out by the wait.
  const Tensor sum = AllReduce(x, ranks.worlds[0]);
  AllReduce(FromHost<int32_t>(ranks.worlds[1], {1}, {1}), ranks.worlds[1]);
  EXPECT_THAT(sum.ToString(), StartsWith("i32[2] on device 0: "));
  EXPECT_THAT(sum.ToString(), HasSubstr("MISMATCH"));
  EXPECT_EQ(Send(x, 1, ranks.worlds[0]).ToString(), "absent result on device 0");
  std::string inside;
  const Compiled f = Compile([&inside, &x](const std::vector<Tensor>& in) {
    const Tensor y = in[0] + in[0];
    inside = y.ToString() + "; " + x.ToString();
    return std::vector<Tensor>{y};
  });
  const auto y = f.Run({x});
  ASSERT_TRUE(y.ok()) << y.status();
  EXPECT_EQ(inside, "i32[2] on device 0, of a compiled function; i32[2] on device 0: [1, 2]");
  EXPECT_EQ((*y)[0].ToString(), "i32[2] on device 0: [2, 4]");
}

TEST(EagerTest, AnAbsentResultHasNoElementsToRead) {
  FakeDaemon daemon;
  const Ranks ranks(2, &daemon);
  const Tensor none = Reduce(FromHost<float>(ranks.worlds[0], {1}, {1}), 1, ranks.worlds[0]);
  const Tensor sum = Reduce(FromHost<float>(ranks.worlds[1], {2}, {1}), 1, ranks.worlds[1]);
  EXPECT_THAT(Values<float>(sum), ElementsAre(3));
  EXPECT_TRUE(none.Wait().ok());
  for (const absl::Status& status :
       {none.Read<float>().status(), none.Item<float>().status(), none.View<float>().status()}) {
    EXPECT_EQ(ErrorOf(status).reason, Reason::kWrongState) << status;
  }
}

TEST(EagerTest, AnOpWaitsForNothingButItsOperands) {
  FakeDaemon daemon;
  const Session session = daemon.Open(2);
  const Session peer = daemon.Open();
  const auto join = [](const Session& s, const std::string& name, int rank, int device) {
    WorldOptions options;
    options.name = name;
    options.rank = rank;
    options.size = 2;
    options.device = device;
    return *s.Join(options);
  };
  const World a = join(session, "a", 0, 0);
  const World b = join(session, "b", 0, 1);
  const World peer_a = join(peer, "a", 1, 0);
  const World peer_b = join(peer, "b", 1, 0);
  const Tensor in_a = AllReduce(Scalar<float>(a, 1), a);
  const Tensor in_b = AllReduce(Scalar<float>(b, 2), b);
  const Tensor u = in_a * 10;
  const Tensor v = in_b * 10;
  const Tensor w = CopyTo(u, session.device(1)) + v;
  const Tensor from_peer = AllReduce(Scalar<float>(peer_a, 1), peer_a);
  // World b's other rank has not come yet.
  EXPECT_TRUE(u.Wait(std::chrono::seconds(2)).ok());
  EXPECT_FALSE(v.Wait(std::chrono::milliseconds(5)).ok());
  EXPECT_THAT(Values<float>(u), ElementsAre(20));
  const Tensor late = AllReduce(Scalar<float>(peer_b, 2), peer_b);
  EXPECT_THAT(Values<float>(w), ElementsAre(60));
}

// Calls are told apart, which costs no run where one waits for the other.
TEST(EagerTest, OpsThatWaitForTheSameCallsAreOneRun) {
  FakeDaemon daemon;
  Ranks ranks(1, &daemon);
  const World& world = ranks.worlds[0];
  const NoGrad no_grad;
  const auto runs = [&daemon](const std::vector<Tensor>& values) {
    const int before = daemon.counts().runs;
    for (const Tensor& value : values) EXPECT_TRUE(value.Wait().ok()) << value.Wait();
    return daemon.counts().runs - before;
  };
  const Tensor x = FromHost<float>(world, Floats(17, 2), {17});
  const Tensor first = AllReduce(x, world);
  const Tensor second = AllReduce(first * x, world);
  const Tensor beside = AllReduce(x, world);
  const std::vector<Tensor> both = AllReduceCoalesced({x, first}, world);
  EXPECT_EQ(runs({second + first, 3 * second, first * second}), 1);
  EXPECT_EQ(runs({both[0] + 1, both[1] + first}), 1);
  EXPECT_EQ(runs({second + 1, beside + 1}), 2);
  EXPECT_EQ(runs({second + beside, first - beside}), 2);
}

// A batch that was sent and had kept its origins took what belonged to the next one.
TEST(EagerTest, AValueIsReadFromTheBatchThatMakesIt) {
  FakeDaemon daemon;
  Ranks ranks(1, &daemon);
  const World& world = ranks.worlds[0];
  const absl::StatusOr<Group> other = world.NewGroup({0});
  ASSERT_TRUE(other.ok()) << other.status();
  const Tensor x = FromHost<float>(world, {1, 2}, {2});
  const Tensor w = FromHost<float>(world, {10, 100}, {2});
  const Tensor y1 = AllReduce(x, world);
  const Tensor y2 = AllReduce(x, *other);
  const Tensor a = x * w;
  const Tensor b = y1 * w;
  const Tensor c = y2 * w;
  const Tensor d = b + c;
  const Tensor e = x - w;
  const Tensor f = a + a;
  EXPECT_THAT(Values<float>(f), ElementsAre(20, 400));
  EXPECT_THAT(Values<float>(e), ElementsAre(-9, -98));
  EXPECT_THAT(Values<float>(d), ElementsAre(20, 400));
}

// Programs of local ops and collectives of one rank, where every value is known beforehand: whole
// numbers, small enough to be exact.
TEST(EagerTest, LocalOpsBetweenGroupsHaveTheirValues) {
  constexpr uint32_t kSeed = 20240613;
  constexpr int kPrograms = 2000;
  std::cerr << "seed " << kSeed << ", " << kPrograms << " programs\n";
  std::mt19937 random(kSeed);
  const auto below = [&random](size_t n) { return static_cast<size_t>(random() % n); };
  FakeDaemon daemon;
  Ranks ranks(1, &daemon);
  const World& world = ranks.worlds[0];
  std::vector<Group> groups = {world.group()};
  for (int g = 0; g < 2; ++g) {
    absl::StatusOr<Group> group = world.NewGroup({0});
    ASSERT_TRUE(group.ok()) << group.status();
    groups.push_back(*std::move(group));
  }
  for (int program = 0; program < kPrograms; ++program) {
    std::vector<std::pair<Tensor, double>> values;
    for (const double leaf : {1.0, 2.0, 3.0})
      values.emplace_back(Scalar<double>(world, leaf), leaf);
    for (const Group& group : groups) {
      const size_t leaf = below(3);
      values.emplace_back(AllReduce(values[leaf].first, group), values[leaf].second);
    }
    const size_t ops = 4 + below(16);
    for (size_t i = 0; i < ops; ++i) {
      const std::pair<Tensor, double> a = values[below(values.size())];
      const std::pair<Tensor, double> b = values[below(values.size())];
      switch (below(12)) {
        case 0:
          values.emplace_back(AllReduce(a.first, groups[below(groups.size())]), a.second);
          break;
        case 1:
          EXPECT_THAT(Values<double>(a.first), ElementsAre(a.second)) << "program " << program;
          break;
        case 2:
          // What nobody holds is not computed.
          values.erase(values.begin() + static_cast<std::ptrdiff_t>(below(values.size())));
          break;
        case 3:
        case 4:
        case 5:
        case 6:
          values.emplace_back(a.first - b.first, a.second - b.second);
          break;
        default:
          values.emplace_back(a.first + b.first, a.second + b.second);
      }
    }
    for (size_t v = 0; v < values.size(); ++v) {
      ASSERT_THAT(Values<double>(values[v].first), ElementsAre(values[v].second))
          << "program " << program << ", value " << v << " of " << values.size();
    }
  }
}

TEST(EagerTest, TensorsAreReleased) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    for (int i = 0; i < 500; ++i) {
      std::vector<Tensor> y;
      for (int r = 0; r < 2; ++r) {
        y.push_back(AllReduce(FromHost<float>(ranks.worlds[r], {1}, {1}), ranks.worlds[r]) * 2);
      }
      for (const Tensor& t : y) EXPECT_THAT(Values<float>(t), ElementsAre(4));
    }
    EXPECT_LT(daemon.live_tensors(), 2 * 2 * 64 + 16);
    EXPECT_EQ(daemon.live_tapes(), 0);
  }
}

// Types, and sets of what a tensor waits for, are kept as long as somebody has them.
TEST(EagerTest, WhatIsInternedGoesWithItsTensors) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  std::vector<Tensor> held;
  for (int64_t n = 1; n <= 3000; ++n) {
    const Tensor x = FromHost<float>(session, Floats(static_cast<size_t>(n), 1), {n});
    const Tensor y = x + x;
    if (n % 100 == 0) {
      ASSERT_TRUE(y.Wait().ok()) << y.Wait();
      held.push_back(y);
    }
  }
  // Those of the last 256 or so, of the ones that are held, and of an open batch.
  EXPECT_LE(SessionOf(session)->CountTables().types, 1024u);
  for (size_t i = 0; i < held.size(); ++i) {
    EXPECT_EQ(Values<float>(held[i]), Floats(100 * (i + 1), 2));
  }
}

TEST(EagerTest, ASumOverEverNewTagsWaitsForFew) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const NoGrad no_grad;
  Tensor sum = Scalar<double>(ranks.worlds[1], 0);
  size_t most = 0;
  for (int tag = 0; tag < 1000; ++tag) {
    const Tensor sent = Send(Scalar<double>(ranks.worlds[0], tag), 1, ranks.worlds[0], tag);
    sum = sum + Recv(DType::kF64, {}, 0, ranks.worlds[1], tag);
    most = std::max(most, ImplOf(sum)->data->after.size());
  }
  EXPECT_LE(most, 16u);
  EXPECT_THAT(Values<double>(sum), ElementsAre(499500));
}

// To get a name for what a batch makes, others are released: not those that the batch uses.
TEST(EagerTest, TheLastNamesAreFound) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const auto make = [&session](float value) {
    return FromHost<float>(session, Floats(17, value), {17});
  };
  std::vector<Tensor> held;
  for (int i = 0; i < FakeDaemon::kMaxTensors - 3; ++i) held.push_back(make(0));
  const auto sum = [&make](float a, float b) {
    const Tensor x = make(a);
    const Tensor y = make(b);
    return x + y;
  };
  make(0);  // dropped, and not released yet
  for (const float value : {1, 2, 3}) {
    EXPECT_EQ(Values<float>(sum(value, 10)), Floats(17, value + 10)) << value;
  }
  {
    const Tensor x = make(1);
    const Tensor y = make(2);
    const Tensor a = x + y;
    const Tensor b = x - y;
    EXPECT_EQ(ErrorOf(a.Wait()).reason, Reason::kQuota) << a.Wait();
    EXPECT_EQ(ErrorOf(b.Wait()).reason, Reason::kQuota) << b.Wait();
  }
  EXPECT_EQ(Values<float>(sum(4, 10)), Floats(17, 14));
}

// What is pending needs names itself: those that it does not use go before it is sent.
TEST(EagerTest, WhatIsPendingGetsNamesThatWereDropped) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const auto make = [&session](float value) {
    return FromHost<float>(session, Floats(17, value), {17});
  };
  // A few that are dropped wait for company, many are released at once.
  for (const int dropped : {4, 64, 200}) {
    SCOPED_TRACE(dropped);
    std::vector<Tensor> held;
    for (int i = 0; i < FakeDaemon::kMaxTensors; ++i) held.push_back(make(static_cast<float>(i)));
    const Tensor sum = held[0] + held[1];
    const Tensor next = sum + sum;
    for (int i = 0; i < dropped; ++i) held[i] = Tensor();
    EXPECT_EQ(Values<float>(make(5)), Floats(17, 5));
    EXPECT_EQ(Values<float>(sum), Floats(17, 1));
    EXPECT_EQ(Values<float>(next), Floats(17, 2));
  }
}

// As when there was no memory for it, and is now.
TEST(EagerTest, AGraphWhoseRegistrationFailedIsRegisteredAgain) {
  FakeDaemon daemon;
  Ranks ranks(1, &daemon);
  const Tensor x = FromHost<float>(ranks.worlds[0], Floats(17, 2), {17});
  ASSERT_TRUE(x.Wait().ok());
  daemon.FailRegistrations(1);
  const int before = daemon.counts().registered;
  for (int i = 0; i < 4; ++i) {
    const Tensor sum = x + x;
    EXPECT_EQ(sum.Wait().ok(), i > 0) << i << ": " << sum.Wait();
  }
  EXPECT_EQ(daemon.counts().registered, before + 2);
  daemon.FailRegistrations(1);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(ranks.worlds[0].Step(i + 1).ok());
    const Tensor y = AllReduce(x, ranks.worlds[0]);
    EXPECT_EQ(y.Wait().ok(), i > 0) << i << ": " << y.Wait();
  }
  EXPECT_EQ(daemon.counts().registered, before + 4);
  daemon.FailRegistrations(1);
  const Compiled twice =
      Compile([](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] * 2}; });
  for (int i = 0; i < 4; ++i) {
    const auto out = twice.Run({x});
    ASSERT_TRUE(out.ok()) << out.status();
    EXPECT_EQ((*out)[0].Wait().ok(), i > 0) << i << ": " << (*out)[0].Wait();
  }
  EXPECT_EQ(daemon.counts().registered, before + 6);
  EXPECT_EQ(daemon.live_graphs(), 3);
}

TEST(EagerTest, AReadWaitsOnce) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  const Tensor x = FromHost<float>(session, Floats(17, 2), {17});
  EXPECT_EQ(Values<float>(x + x), Floats(17, 4));
  EXPECT_EQ(daemon.counts().tensor_waits, 1);
  const auto view = x.View<float>();
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(Floats(view->begin(), view->end()), Floats(17, 2));
  EXPECT_EQ(daemon.counts().tensor_waits, 2);
}

TEST(EagerTest, LargeTensorsAreReleasedAtOnce) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  Tensor x = Zeros(session, DType::kF32, {1 << 20});
  ASSERT_TRUE(x.Wait().ok());
  EXPECT_EQ(daemon.live_tensors(), 1);
  x = Tensor();
  EXPECT_EQ(daemon.live_tensors(), 0);
}

// --- Epochs -------------------------------------------------------------------------------------

TEST(EpochTest, AMismatchIsHandedToEveryRankAndTheNextEpochWorks) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const Tensor good0 = AllReduce(FromHost<float>(ranks.worlds[0], {1}, {1}), ranks.worlds[0]);
  const Tensor good1 = AllReduce(FromHost<float>(ranks.worlds[1], {2}, {1}), ranks.worlds[1]);
  const Tensor a = AllReduce(FromHost<float>(ranks.worlds[0], {1, 2}, {2}), ranks.worlds[0]);
  const Tensor b = AllReduce(FromHost<float>(ranks.worlds[1], {1}, {1}), ranks.worlds[1]);
  // Rank 0 goes on before it looks.
  const Tensor a2 = AllReduce(FromHost<float>(ranks.worlds[0], {5}, {1}), ranks.worlds[0]) * 2;
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.worlds[r].epoch(), 1);
  EXPECT_EQ(ErrorOf(a.Wait()).reason, Reason::kMismatch);
  EXPECT_EQ(ErrorOf(b.Wait()).reason, Reason::kMismatch);
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.worlds[r].epoch(), 2);
  // Handed out again by what depends on it, without another epoch.
  EXPECT_EQ(ErrorOf(a2.Wait()).reason, Reason::kMismatch);
  EXPECT_EQ(ErrorOf(a.Read<float>().status()).reason, Reason::kMismatch);
  EXPECT_EQ(ranks.worlds[0].epoch(), 2);
  EXPECT_EQ(daemon.counts().entered_epochs, 2);
  // Rank 1 has called less: a step sets them in line.
  for (int r = 0; r < 2; ++r) ASSERT_TRUE(ranks.worlds[r].Step(1).ok());
  for (int i = 0; i < 3; ++i) {
    const Tensor c = AllReduce(good0, ranks.worlds[0]);
    const Tensor d = AllReduce(good1, ranks.worlds[1]);
    EXPECT_THAT(Values<float>(c), ElementsAre(6));
    EXPECT_THAT(Values<float>(d), ElementsAre(6));
  }
}

TEST(EpochTest, ADerivedTensorIsEnoughToEnterTheNextEpoch) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const Tensor a =
      Sum(AllReduce(FromHost<float>(ranks.worlds[0], {1, 2}, {2}), ranks.worlds[0]) * 3);
  const Tensor b = Sum(AllReduce(FromHost<float>(ranks.worlds[1], {1}, {1}), ranks.worlds[1]));
  EXPECT_EQ(ErrorOf(a.Item<float>().status()).reason, Reason::kMismatch);
  EXPECT_EQ(ErrorOf(b.Item<float>().status()).reason, Reason::kMismatch);
  const Tensor c = AllReduce(FromHost<float>(ranks.worlds[0], {1}, {1}), ranks.worlds[0]);
  const Tensor d = AllReduce(FromHost<float>(ranks.worlds[1], {2}, {1}), ranks.worlds[1]);
  EXPECT_THAT(Values<float>(c), ElementsAre(3));
  EXPECT_THAT(Values<float>(d), ElementsAre(3));
}

TEST(EpochTest, SendAndRecvCountOnInTheNextEpoch) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const Tensor x = FromHost<float>(ranks.worlds[0], {1}, {1});
  for (int i = 0; i < 2; ++i) {
    const Tensor sent = Send(x, 1, ranks.worlds[0]);
    EXPECT_THAT(Values<float>(Recv(DType::kF32, {1}, 0, ranks.worlds[1])), ElementsAre(1));
    ASSERT_TRUE(sent.Wait().ok());
  }
  const Tensor sent = Send(x, 1, ranks.worlds[0]);
  const Tensor received = Recv(DType::kF32, {2}, 0, ranks.worlds[1]);
  EXPECT_EQ(ErrorOf(sent.Wait()).reason, Reason::kMismatch);
  EXPECT_EQ(ErrorOf(received.Wait()).reason, Reason::kMismatch);
  const Tensor again = Send(x, 1, ranks.worlds[0]);
  EXPECT_THAT(Values<float>(Recv(DType::kF32, {1}, 0, ranks.worlds[1])), ElementsAre(1));
}

TEST(EpochTest, ACallThatIsRefusedHereEndsTheEpochForTheOthers) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const Tensor x = FromHost<float>(ranks.worlds[0], {1, 2}, {2});
  const Tensor waiting = AllReduce(FromHost<float>(ranks.worlds[1], {1}, {1}), ranks.worlds[1]);
  const Tensor bad = AllReduce(MatMul(x, x), ranks.worlds[0]);
  EXPECT_EQ(ErrorOf(waiting.Wait()).reason, Reason::kPeerRefused);
  EXPECT_THAT(std::string(waiting.Wait().message()), HasSubstr("matmul"));
  EXPECT_EQ(ErrorOf(bad.Wait()).reason, Reason::kBadType);
  const Tensor a = AllReduce(Sum(x), ranks.worlds[0]);
  const Tensor b = AllReduce(Scalar<float>(ranks.worlds[1], 1), ranks.worlds[1]);
  EXPECT_THAT(Values<float>(a), ElementsAre(4));
  EXPECT_THAT(Values<float>(b), ElementsAre(4));
}

TEST(EpochTest, MembersOfOneSessionEnterTogether) {
  FakeDaemon daemon;
  const Session session = daemon.Open(2);
  const std::vector<World> worlds = JoinAll(session, "one", 2);
  const Tensor a = AllReduce(FromHost<float>(worlds[0], {1, 2}, {2}), worlds[0]);
  const Tensor b = AllReduce(FromHost<float>(worlds[1], {1}, {1}), worlds[1]);
  EXPECT_FALSE(a.Wait().ok());
  for (const World& world : worlds) EXPECT_EQ(world.epoch(), 2);
  EXPECT_FALSE(b.Wait().ok());
  for (const World& world : worlds) EXPECT_EQ(world.epoch(), 2);
  const Tensor c = AllReduce(FromHost<float>(worlds[0], {1}, {1}), worlds[0]);
  const Tensor d = AllReduce(FromHost<float>(worlds[1], {2}, {1}), worlds[1]);
  EXPECT_THAT(Values<float>(c), ElementsAre(3));
  EXPECT_THAT(Values<float>(d), ElementsAre(3));
}

// What a member that is ahead has under way needs the calls of the others, also of the same
// session.
TEST(SessionTest, AMemberIsNotKeptFromCallsThatAnotherOnesRunsWaitFor) {
  FakeDaemon daemon;
  const Session session = daemon.Open(2, std::chrono::seconds(1));
  const std::vector<World> worlds = JoinAll(session, "one", 2);
  std::vector<Tensor> x;
  for (size_t r = 0; r < worlds.size(); ++r) {
    x.push_back(FromHost<float>(worlds[r], Floats(17, static_cast<float>(r + 1)), {17}));
  }
  const NoGrad no_grad;
  constexpr int kAhead = 512;  // as many runs as may be under way
  std::vector<Tensor> ahead;
  while (static_cast<int>(ahead.size()) < kAhead) {
    ahead.push_back(AllReduce(x[0], worlds[0]));
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Values<float>(AllReduce(x[1], worlds[1]) + 1), Floats(17, 4));
    EXPECT_EQ(daemon.counts().command_waits, 0) << i;
    EXPECT_EQ(Values<float>(ahead[i]), Floats(17, 3));
  }
}

// --- Processes and threads ----------------------------------------------------------------------

TEST(SessionTest, TakesRankAndNameFromTheEnvironment) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  for (const char* name : {"CHORUS_WORLD", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RANK",
                           "SLURM_PROCID", "WORLD_SIZE", "SLURM_NTASKS"}) {
    ::unsetenv(name);
  }
  const absl::StatusOr<World> none = session.Join();
  EXPECT_EQ(none.status().code(), absl::StatusCode::kInvalidArgument);
  ::setenv("SLURM_JOB_ID", "77", 1);
  ::setenv("RANK", "2", 1);
  ::setenv("WORLD_SIZE", "4", 1);
  const absl::StatusOr<World> world = session.Join();
  ASSERT_TRUE(world.ok()) << world.status();
  EXPECT_EQ(world->rank(), 2);
  EXPECT_EQ(world->size(), 4);
  EXPECT_EQ(world->name(), "77");
  ::setenv("RANK", "two", 1);
  EXPECT_THAT(std::string(session.Join().status().message()), HasSubstr("\"two\""));
  ::unsetenv("RANK");
}

TEST(SessionTest, AClosedSessionRefusesEverything) {
  FakeDaemon daemon;
  Ranks ranks(1, &daemon);
  const Tensor x = FromHost<float>(ranks.sessions[0], {1}, {1});
  EXPECT_TRUE(ranks.sessions[0].is_open());
  EXPECT_TRUE(ranks.sessions[0].Close().ok());
  EXPECT_TRUE(ranks.sessions[0].Close().ok());
  EXPECT_FALSE(ranks.sessions[0].is_open());
  EXPECT_EQ(ErrorOf((x + x).status()).reason, Reason::kSessionLost);
  EXPECT_EQ(ErrorOf(AllReduce(x, ranks.worlds[0]).Wait()).reason, Reason::kSessionLost);
}

TEST(SessionTest, AForkedChildCannotTouchItsParentsSession) {
  FakeDaemon daemon;
  auto ranks = std::make_unique<Ranks>(1, &daemon);
  auto x = std::make_unique<Tensor>(FromHost<float>(ranks->sessions[0], {1}, {1}));
  auto y = std::make_unique<Tensor>(*x + *x);
  const int runs = daemon.counts().runs;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int wrong = 0;
    wrong += ErrorOf(y->Wait()).reason == Reason::kForked ? 0 : 1;
    wrong += ErrorOf(x->Read<float>().status()).reason == Reason::kForked ? 0 : 2;
    wrong += ErrorOf((*x * *x).status()).reason == Reason::kForked ? 0 : 4;
    wrong += ErrorOf(AllReduce(*x, ranks->worlds[0]).Wait()).reason == Reason::kForked ? 0 : 8;
    wrong += ErrorOf(ranks->sessions[0].Join().status()).reason == Reason::kForked ? 0 : 16;
    wrong +=
        ErrorOf(FromHost<float>(ranks->sessions[0], {1}, {1}).status()).reason == Reason::kForked
            ? 0
            : 32;
    wrong += ranks->sessions[0].Close().ok() ? 64 : 0;
    x.reset();
    y.reset();
    ranks.reset();
    ::_exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(daemon.counts().runs, runs);
  EXPECT_THAT(Values<float>(*y), ElementsAre(2));
}

// Forks a child, which has none of its parent's sessions, and its own.
void ExpectAChildHasItsOwnSessions() {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(60);  // it may hang
    int wrong = LivingSessions().empty() ? 0 : 1;
    FakeDaemon daemon_of_child;
    {
      const Session own = daemon_of_child.Open();
      const auto living = LivingSessions();
      wrong += living.size() == 1 && living[0] == SessionOf(own) ? 0 : 2;
    }
    wrong += LivingSessions().empty() ? 0 : 4;
    ::_exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "it has hung: signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(SessionTest, AForkedChildHasNoneOfItsParentsSessions) {
  FakeDaemon daemon;
  const Session session = daemon.Open();
  EXPECT_THAT(LivingSessions(), ElementsAre(SessionOf(session)));
  ExpectAChildHasItsOwnSessions();
  EXPECT_THAT(LivingSessions(), ElementsAre(SessionOf(session)));
}

// Forks while other threads are in the list of them: nobody is there to unlock its parent's.
TEST(SessionTest, AForkedChildListsItsSessionsWhateverItsParentsThreadsDo) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP()
      << "the sanitizer's allocator does not see to it that none of its locks is held in a "
         "forked child, as malloc does";
#endif
  FakeDaemon daemon;
  const std::vector<Session> sessions = {daemon.Open(), daemon.Open(), daemon.Open()};
  constexpr int kThreads = 3;
  std::atomic<bool> stop{false};
  std::atomic<int> calls[kThreads] = {};
  std::vector<std::thread> threads;
  for (std::atomic<int>& of_thread : calls) {
    threads.emplace_back([&] {
      while (!stop) {
        EXPECT_EQ(LivingSessions().size(), 3u);
        ++of_thread;
      }
    });
  }
  for (int fork = 0; fork < 10 && !HasFailure(); ++fork) {
    for (const std::atomic<int>& of_thread : calls) {
      const int before = of_thread;
      while (of_thread == before) std::this_thread::yield();
    }
    SCOPED_TRACE(fork);
    ExpectAChildHasItsOwnSessions();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

TEST(SessionTest, ThreadsOfOneSessionMayHoldARankEach) {
  FakeDaemon daemon;
  const Session session = daemon.Open(4);
  std::vector<std::thread> threads;
  std::vector<float> results(4);
  for (int r = 0; r < 4; ++r) {
    threads.emplace_back([&, r] {
      WorldOptions options;
      options.name = "threads";
      options.rank = r;
      options.size = 4;
      options.device = r;
      const World world = *session.Join(options);
      Tensor x = Scalar<float>(world, static_cast<float>(r));
      for (int i = 0; i < 50; ++i) {
        const NoGrad no_grad;
        x = AllReduce(x, world) * 0.25;
      }
      results[r] = Values<float>(x)[0];
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(results, ElementsAre(1.5, 1.5, 1.5, 1.5));
}

}  // namespace
}  // namespace chorus
