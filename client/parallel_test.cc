#include "chorus/parallel.h"

#include <any>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/testing/fake_daemon.h"
#include "client/testing/values.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using parallel::DeviceGroup;
using parallel::HostTensor;
using parallel::Nest;
using ::testing::ElementsAre;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::TakeAllNames;
using testing::Values;

using Doubles = std::vector<double>;

Tensor Row(const DeviceRef& device, const Doubles& values) {
  return FromHost<double>(device, values, {static_cast<int64_t>(values.size())});
}

// [n, 3] from 0 on.
Tensor Rows(const DeviceRef& device, int64_t n) {
  Doubles values;
  for (int64_t i = 0; i < 3 * n; ++i) values.push_back(static_cast<double>(i));
  return FromHost<double>(device, values, {n, 3});
}

class ParallelTest : public ::testing::Test {
 protected:
  explicit ParallelTest(int devices = 3)
      : session_(daemon_.Open(devices)), devices_(*DeviceGroup::Create(session_)) {}
  ~ParallelTest() override { EXPECT_EQ(daemon_.live_tapes(), 0); }

  FakeDaemon daemon_;
  Session session_;
  DeviceGroup devices_;
};

TEST_F(ParallelTest, HostTensorsOfAnyTypeAreTheirBytes) {
  auto values = std::make_shared<const std::vector<int16_t>>(std::vector<int16_t>{1, -2, 3});
  const char* const data = reinterpret_cast<const char*>(values->data());
  const HostTensor three = HostTensor::OfBytes(std::move(values), DType::kI16, data, 3, {3, 1});
  EXPECT_EQ(three.bytes(), data);
  EXPECT_THAT(*three.Read<int16_t>(), ElementsAre(1, -2, 3));
  EXPECT_EQ(three.shape(), Shape({3, 1}));
  EXPECT_EQ(HostTensor::OfBytes(nullptr, DType::kI16, data, 2, {3}).bytes(), nullptr);
  EXPECT_EQ(HostTensor().bytes(), nullptr);
  EXPECT_EQ(GatherToHost({Row(session_, {1})}, devices_).bytes(), nullptr);
}

TEST_F(ParallelTest, GroupsAreDevicesInAnOrder) {
  EXPECT_EQ(devices_.size(), 3);
  const absl::StatusOr<DeviceGroup> two = DeviceGroup::Create(session_, {2, 0});
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_EQ(two->device(0).slot(), 2);
  EXPECT_EQ(two->IndexOf(session_.device(0)), 1);
  EXPECT_EQ(two->IndexOf(session_.device(1)), -1);
  EXPECT_THAT(std::string(DeviceGroup::Create(session_, {0, 3}).status().message()),
              HasSubstr("device 3 is none of the session's 3"));
  EXPECT_THAT(std::string(DeviceGroup::Create(session_, {1, 1}).status().message()),
              HasSubstr("device 1 is named twice"));
  EXPECT_FALSE(DeviceGroup::Create(Session()).ok());
}

TEST_F(ParallelTest, BroadcastPutsACopyOnEveryDeviceInOneRun) {
  const Tensor x = Row(session_.device(1), {1, 2});
  const std::vector<Tensor> y = Broadcast(x, devices_);
  ASSERT_EQ(y.size(), 3u);
  for (int d = 0; d < 3; ++d) {
    EXPECT_EQ(y[d].device().slot(), d);
    EXPECT_THAT(Values<double>(y[d]), ElementsAre(1, 2));
    EXPECT_FALSE(y[d].requires_grad());
  }
  EXPECT_EQ(daemon_.counts().runs, 1);
}

TEST_F(ParallelTest, BuffersHaveNoInfluence) {
  const std::vector<Tensor> xs = {Row(session_, {1}).RequireGrad(),
                                  FromHost<int64_t>(session_, {7, 8}, {1, 2}),
                                  FromHost<float>(session_, {}, {0}), Scalar<double>(session_, 4)};
  for (const int64_t buffer : {int64_t{1}, int64_t{24}, parallel::kBufferSize}) {
    const std::vector<std::vector<Tensor>> y = BroadcastCoalesced(xs, devices_, buffer);
    ASSERT_EQ(y.size(), 3u);
    for (int d = 0; d < 3; ++d) {
      EXPECT_THAT(Values<double>(y[d][0]), ElementsAre(1));
      EXPECT_THAT(Values<int64_t>(y[d][1]), ElementsAre(7, 8));
      EXPECT_EQ(y[d][2].shape(), Shape({0}));
      EXPECT_THAT(Values<double>(y[d][3]), ElementsAre(4));
      // What needs no gradient gives what has none, on every device.
      EXPECT_TRUE(y[d][0].requires_grad());
      for (const int i : {1, 2, 3}) EXPECT_FALSE(y[d][i].requires_grad());
    }
    const std::vector<Tensor> sums = ReduceAddCoalesced(y, devices_, 2, buffer);
    ASSERT_EQ(sums.size(), 4u);
    EXPECT_EQ(sums[0].device().slot(), 2);
    EXPECT_THAT(Values<double>(sums[0]), ElementsAre(3));
    EXPECT_THAT(Values<int64_t>(sums[1]), ElementsAre(21, 24));
  }
}

TEST_F(ParallelTest, AResultThatNoLossUsesHoldsNobodyUp) {
  const Tensor x = Row(session_, {1, 2}).RequireGrad();
  const std::vector<Tensor> y = Broadcast(x, devices_);
  // Devices 0 and 2 alone; the tensor on device 1 lives on.
  ASSERT_TRUE(Backward(Sum(y[0] * 3) + CopyTo(Sum(y[2] * 5), session_.device(0))).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(8, 8));
}

TEST_F(ParallelTest, DoubleBackwardOfBroadcastAndReduceAdd) {
  const Tensor x = Row(session_, {2}).RequireGrad();
  const std::vector<Tensor> y = Broadcast(x, devices_);
  std::vector<Tensor> cubes;
  for (int d = 0; d < 3; ++d) cubes.push_back(y[d] * y[d] * y[d] * (d + 1));
  const Tensor sum = ReduceAdd(cubes, devices_, 1);
  EXPECT_EQ(sum.device().slot(), 1);
  EXPECT_THAT(Values<double>(sum), ElementsAre(48));
  BackwardOptions create;
  create.create_graph = true;
  const auto g = Grad({Sum(sum)}, {x}, create);
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(6 * 3 * 4));
  ASSERT_TRUE(Backward(Sum((*g)[0])).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(6 * 6 * 2));
}

TEST_F(ParallelTest, ScatterChunksByTheRuleOrBySizes) {
  const struct {
    int64_t size;
    std::vector<int64_t> sizes, expected;
  } cases[] = {
      {9, {}, {3, 3, 3}}, {5, {}, {2, 2, 1}}, {4, {}, {2, 2}},           {2, {}, {1, 1}},
      {0, {}, {0, 0, 0}}, {1, {}, {1}},       {5, {0, 4, 1}, {0, 4, 1}},
  };
  for (const auto& c : cases) {
    const Tensor x = Rows(session_.device(2), c.size);
    Doubles values = Values<double>(x);
    for (const bool host : {false, true}) {
      const std::vector<Tensor> y =
          host ? Scatter(HostTensor::Of(values, {c.size, 3}), devices_, c.sizes)
               : Scatter(x, devices_, c.sizes);
      ASSERT_EQ(y.size(), c.expected.size()) << c.size;
      double next = 0;
      for (size_t d = 0; d < y.size(); ++d) {
        EXPECT_EQ(y[d].device().slot(), static_cast<int>(d));
        EXPECT_EQ(y[d].shape(), Shape({c.expected[d], 3}));
        for (const double value : Values<double>(y[d])) EXPECT_EQ(value, next++);
      }
      EXPECT_EQ(next, 3 * c.size);
    }
  }
}

TEST_F(ParallelTest, ScatterAndGatherAlongAnyDimension) {
  const Tensor x = Rows(session_, 2);
  for (const int64_t dim : {1, -1}) {
    for (const bool host : {false, true}) {
      const std::vector<Tensor> y =
          host ? Scatter(HostTensor::Of(Values<double>(x), {2, 3}), devices_, {0, 2, 1}, dim)
               : Scatter(x, devices_, {0, 2, 1}, dim);
      ASSERT_EQ(y.size(), 3u);
      EXPECT_EQ(y[0].shape(), Shape({2, 0}));
      EXPECT_THAT(Values<double>(y[1]), ElementsAre(0, 1, 3, 4));
      EXPECT_THAT(Values<double>(y[2]), ElementsAre(2, 5));
      const Tensor back = Gather(y, devices_, 2, dim);
      EXPECT_EQ(back.device().slot(), 2);
      EXPECT_EQ(back.shape(), Shape({2, 3}));
      EXPECT_EQ(Values<double>(back), Values<double>(x));
      const HostTensor home = GatherToHost(y, devices_, dim);
      EXPECT_EQ(home.shape(), Shape({2, 3}));
      EXPECT_EQ(*home.Read<double>(), Values<double>(x));
    }
  }
}

TEST_F(ParallelTest, GatherTakesTensorsOfSomeDevicesInAnyOrder) {
  const Tensor a = Row(session_.device(2), {1, 2});
  const Tensor b = Row(session_.device(0), {3}).RequireGrad();
  const Tensor y = Gather({a, b}, devices_, 1);
  EXPECT_THAT(Values<double>(y), ElementsAre(1, 2, 3));
  ASSERT_TRUE(Backward(Sum(y * Row(session_.device(1), {5, 6, 7}))).ok());
  EXPECT_THAT(Values<double>(b.grad()), ElementsAre(7));
}

TEST_F(ParallelTest, ScalarsBecomeAVectorWithAWarning) {
  std::vector<Tensor> xs;
  for (int d = 0; d < 3; ++d) {
    xs.push_back(Scalar<double>(session_.device(d), d + 1).RequireGrad());
  }
  std::vector<std::string> warnings;
  const Tensor y = Gather(xs, devices_, 0, 0, &warnings);
  EXPECT_THAT(Values<double>(y), ElementsAre(1, 2, 3));
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("a vector of 3")));
  EXPECT_THAT(warnings[0], HasSubstr("parallel_test.cc"));
  ASSERT_TRUE(Backward(Sum(y * Row(session_, {4, 5, 6}))).ok());
  EXPECT_THAT(Values<double>(xs[1].grad()), ElementsAre(5));
  EXPECT_EQ(xs[1].grad().shape(), Shape());
}

TEST_F(ParallelTest, DoubleBackwardOfScatterAndGather) {
  const Tensor x = Row(session_.device(1), {1, 2, 3, 4}).RequireGrad();
  const std::vector<Tensor> y = Scatter(x, devices_, {1, 0, 3});
  const Tensor z = Gather({y[0] * y[0] * y[0], y[2] * y[2] * y[2]}, devices_, 0);
  BackwardOptions create;
  create.create_graph = true;
  const auto g = Grad({Sum(z)}, {x}, create);
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(3, 12, 27, 48));
  ASSERT_TRUE(Backward(Sum((*g)[0])).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(6, 12, 18, 24));
}

// One chunk's gradient alone is asked for again: the others' entries live, and hold nobody up.
TEST_F(ParallelTest, GradientsOfGradientsHoldNobodyUp) {
  std::vector<Tensor> xs;
  for (int d = 0; d < 3; ++d) xs.push_back(Row(session_.device(d), {1.0 + d}).RequireGrad());
  const Tensor y = Gather(xs, devices_);
  BackwardOptions create;
  create.create_graph = true;
  const auto g = Grad({Sum(y * y * y)}, xs, create);
  ASSERT_TRUE(g.ok()) << g.status();
  ASSERT_TRUE(Backward(Sum((*g)[1])).ok());
  EXPECT_THAT(Values<double>(xs[1].grad()), ElementsAre(12));
}

TEST_F(ParallelTest, MemoryOfTheTrainersHasAGradient) {
  HostTensor x = HostTensor::Of(Doubles{1, 2, 3, 4, 5, 6}, {2, 3});
  EXPECT_FALSE(x.tensor().defined());
  x.RequireGrad(devices_);
  EXPECT_TRUE(x.requires_grad());
  const std::vector<Tensor> y = Scatter(x, devices_, {}, 1);
  std::vector<Tensor> squares;
  for (const Tensor& chunk : y) squares.push_back(chunk * chunk);
  const HostTensor z = GatherToHost(squares, devices_, 1);
  EXPECT_TRUE(z.requires_grad());
  EXPECT_EQ(*z.Read<double>(), (Doubles{1, 4, 9, 16, 25, 36}));
  ASSERT_TRUE(
      Backward(Sum(z.tensor() * FromHost<double>(session_, {1, 1, 1, 2, 2, 2}, {2, 3}))).ok());
  EXPECT_EQ(Values<double>(x.tensor().grad()), (Doubles{2, 4, 6, 16, 20, 24}));
}

// Who asks first does not decide what others get.
TEST_F(ParallelTest, WhatWasGatheredUnderNoGradHasAHistoryElsewhere) {
  const Tensor x = Row(session_, {1}).RequireGrad();
  const HostTensor z = GatherToHost({x * 2}, devices_);
  {
    const NoGrad no_grad;
    EXPECT_THAT(Values<double>(z.tensor()), ElementsAre(2));
    EXPECT_FALSE(z.tensor().requires_grad());
  }
  ASSERT_TRUE(Backward(Sum(z.tensor()) + Sum(x)).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(3));
}

TEST_F(ParallelTest, WhatWasGatheredInACompiledFunctionStaysInIt) {
  const Tensor x = Row(session_, {1}).RequireGrad();
  const HostTensor z = GatherToHost({x * 2}, devices_);
  const Compiled step = Compile([&z](const std::vector<Tensor>& in) {
    // Each time the same one, so that its gradient can be asked for.
    const auto g = Grad({Sum(z.tensor() * in[0])}, {z.tensor()});
    return std::vector<Tensor>{z.tensor() * in[0], g.ok() ? (*g)[0] : Tensor()};
  });
  const auto y = step.Run({Row(session_, {5})});
  ASSERT_TRUE(y.ok()) << y.status();
  EXPECT_THAT(Values<double>((*y)[0]), ElementsAre(10));
  EXPECT_THAT(Values<double>((*y)[1]), ElementsAre(5));
  EXPECT_THAT(Values<double>(z.tensor()), ElementsAre(2));
  ASSERT_TRUE(Backward(Sum(z.tensor())).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(2));
}

TEST_F(ParallelTest, AGatherThatFailedIsMadeAgain) {
  const std::vector<Tensor> pieces = {Row(session_.device(0), {1}), Row(session_.device(1), {2})};
  const HostTensor z = GatherToHost(pieces, devices_);
  // In the daemon, and here.
  daemon_.FailRegistrations(1);
  EXPECT_FALSE(z.tensor().Wait().ok());
  // The calls of a graph that it does not have are not counted there.
  for (int d = 0; d < 3; ++d) ASSERT_TRUE(devices_.world(d).Step(1).ok());
  EXPECT_THAT(Values<double>(z.tensor()), ElementsAre(1, 2));
  const int runs = daemon_.counts().runs;
  EXPECT_THAT(Values<double>(z.tensor()), ElementsAre(1, 2));
  EXPECT_EQ(daemon_.counts().runs, runs);
  const HostTensor late = GatherToHost(pieces, devices_);
  {
    const std::vector<Tensor> held = TakeAllNames(session_);
    const Error error = ErrorOf(late.tensor().Wait());
    EXPECT_EQ(error.reason, Reason::kQuota);
    EXPECT_THAT(error.source, HasSubstr("parallel_test.cc:"));
  }
  EXPECT_THAT(Values<double>(late.tensor()), ElementsAre(1, 2));
}

TEST_F(ParallelTest, MappedMemoryIsScattered) {
  absl::StatusOr<MappedTensor<float>> mapped = Map<float>(session_, {4});
  ASSERT_TRUE(mapped.ok());
  for (int i = 0; i < 4; ++i) (*mapped)[i] = static_cast<float>(i);
  const std::vector<Tensor> y = Scatter(*mapped, devices_);
  ASSERT_EQ(y.size(), 2u);
  (*mapped)[3] = 100;
  EXPECT_THAT(Values<float>(y[0]), ElementsAre(0, 1));
  EXPECT_THAT(Values<float>(y[1]), ElementsAre(2, 3));
  const std::vector<bool> bits = {true, false, true};
  const std::vector<Tensor> z = Scatter(HostTensor::Of(bits, {3}), devices_);
  EXPECT_THAT(Values<bool>(z[2]), ElementsAre(true));
  EXPECT_EQ(*GatherToHost(z, devices_).Read<bool>(), bits);
}

TEST_F(ParallelTest, NestsAreScatteredAndGathered) {
  const Nest nest =
      Nest::Tuple({Rows(session_, 3), Nest::List({Row(session_, {1, 2, 3}), Nest::Opaque(7)}),
                   Nest::Map({{"mask", Row(session_, {4, 5, 6})}, {"none", Nest()}})});
  const absl::StatusOr<std::vector<Nest>> each = ScatterNest(nest, devices_);
  ASSERT_TRUE(each.ok()) << each.status();
  ASSERT_EQ(each->size(), 3u);
  const Nest& second = (*each)[1];
  ASSERT_EQ(second.kind(), Nest::Kind::kTuple);
  EXPECT_THAT(Values<double>(second.items()[0].tensor()), ElementsAre(3, 4, 5));
  EXPECT_THAT(Values<double>(second.items()[1].items()[0].tensor()), ElementsAre(2));
  EXPECT_EQ(std::any_cast<int>(second.items()[1].items()[1].opaque()), 7);
  EXPECT_THAT(Values<double>(second.items()[2].fields().at("mask").tensor()), ElementsAre(5));
  EXPECT_EQ(second.items()[2].fields().at("none").kind(), Nest::Kind::kNothing);

  std::vector<Nest> results;
  for (const Nest& n : *each) results.push_back(Nest::Tuple({n.items()[0], n.items()[2]}));
  const absl::StatusOr<Nest> whole = GatherNest(results, devices_);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(Values<double>(whole->items()[0].tensor()), Values<double>(nest.items()[0].tensor()));
  EXPECT_THAT(Values<double>(whole->items()[1].fields().at("mask").tensor()), ElementsAre(4, 5, 6));

  EXPECT_THAT(std::string(GatherNest(*each, devices_).status().message()),
              HasSubstr("an opaque value"));
  EXPECT_THAT(
      std::string(GatherNest({Nest::List({}), Nest::Tuple({})}, devices_).status().message()),
      HasSubstr("expected a list from every device, got a tuple from device 1"));
  EXPECT_THAT(std::string(GatherNest({Nest::Map({{"a", Nest()}}),
                                      Nest::Map({{"a", Nest()}, {"b", Nest()}})},
                                     devices_)
                              .status()
                              .message()),
              HasSubstr("maps of the same 1 keys"));
  EXPECT_THAT(
      std::string(
          GatherNest({Nest::Map({}), Nest::Map({{"a", Row(session_.device(1), {1})}})}, devices_)
              .status()
              .message()),
      HasSubstr("maps of the same 0 keys from every device, got another one from device 1"));
  EXPECT_FALSE(GatherNest({Nest::Map({{"a", Nest()}}), Nest::Map({{"b", Nest()}})}, devices_).ok());
  EXPECT_TRUE(GatherNest({Nest::Map({}), Nest::Map({})}, devices_).ok());
  EXPECT_THAT(
      std::string(GatherNest({Nest::List({}), Nest::List({Nest()})}, devices_).status().message()),
      HasSubstr("expected 0 items"));
  EXPECT_FALSE(GatherNest({}, devices_).ok());
}

TEST_F(ParallelTest, ArgumentsComeInSetsOfOneNumber) {
  // Two chunks of inputs, three of keywords.
  const auto scattered = ScatterInputs({Row(session_, {1, 2}), Nest::Opaque(1)},
                                       {{"w", Row(session_, {1, 2, 3})}}, devices_);
  ASSERT_TRUE(scattered.ok()) << scattered.status();
  ASSERT_EQ(scattered->inputs.size(), 3u);
  ASSERT_EQ(scattered->keywords.size(), 3u);
  EXPECT_EQ(scattered->inputs[1].size(), 2u);
  EXPECT_TRUE(scattered->inputs[2].empty());
  EXPECT_THAT(Values<double>(scattered->keywords[2].at("w").tensor()), ElementsAre(3));
  EXPECT_EQ(ScatterInputs({}, {}, devices_)->inputs.size(), 0u);
  EXPECT_EQ(ScatterInputs({Nest::Opaque(1)}, {}, devices_)->keywords.size(), 3u);
}

TEST_F(ParallelTest, BadInputIsRefusedAndTheGroupStaysUsable) {
  const Session other = daemon_.Open();
  const DeviceGroup two = *DeviceGroup::Create(session_, {0, 1});
  const auto at = [&](int d) { return Row(session_.device(d), {1, 2}); };
  const Tensor stranger = Row(other, {1});
  const Tensor scalar = Scalar<double>(session_, 1);
  const struct {
    const char* text;
    std::function<absl::Status()> call;
  } cases[] = {
      {"a group of devices, got an empty one",
       [&] { return Broadcast(at(0), DeviceGroup())[0].status(); }},
      {"a group of devices", [&] { return ReduceAdd({at(0)}, DeviceGroup()).status(); }},
      {"a group of devices", [&] { return Scatter(at(0), DeviceGroup())[0].status(); }},
      {"a group of devices", [&] { return Gather({at(0)}, DeviceGroup()).status(); }},
      {"tensor 0 is an undefined tensor",
       [&] { return Broadcast(Tensor(), devices_)[2].status(); }},
      {"tensor 0 is of another session", [&] { return Broadcast(stranger, two)[1].status(); }},
      {"tensor 0 is on device 2 of the session, which is not in the group",
       [&] { return Broadcast(at(2), two)[0].status(); }},
      {"device index 0, got tensor 1 at device index 1",
       [&] {
         return BroadcastCoalesced({at(0), at(1)}, two)[1][1].status();
       }},
      {"at least 1 byte, got 0",
       [&] { return BroadcastCoalesced({at(0)}, two, 0)[0][0].status(); }},
      {"tensors on each of 2 devices, got those of 1",
       [&] { return ReduceAdd({at(0)}, two).status(); }},
      {"on each of 2 devices, got those of 0", [&] { return ReduceAdd({}, two).status(); }},
      {"tensor 0 of list 1 on the device of another",
       [&] {
         return ReduceAdd({at(0), at(0)}, two).status();
       }},
      {"tensors like f64[2], got f64[]",
       [&] {
         return ReduceAdd({at(1), scalar}, two).status();
       }},
      {"a destination among 2 devices, got 2",
       [&] {
         return ReduceAdd({at(0), at(1)}, two, 2).status();
       }},
      {"1 tensors on every device, got 0 in list 1",
       [&] {
         return ReduceAddCoalesced({{at(0)}, {}}, two)[0].status();
       }},
      {"0 tensors on every device, got 1 in list 1",
       [&] {
         const std::vector<Tensor> sums = ReduceAddCoalesced({{}, {at(0)}}, two);
         return sums.empty() ? absl::OkStatus() : sums[0].status();
       }},
      {"at least one dimension, got f64[]", [&] { return Scatter(scalar, two)[0].status(); }},
      {"a dimension from -1 to 0 of f64[2], got 1",
       [&] { return Scatter(at(0), two, {}, 1)[0].status(); }},
      {"one size for each of 2 devices, got 1",
       [&] { return Scatter(at(0), two, {2})[0].status(); }},
      {"sizes of 0 or more, got -1",
       [&] {
         return Scatter(at(0), two, {-1, 3})[0].status();
       }},
      {"sizes that make 2, got 1 + 2",
       [&] {
         return Scatter(at(0), two, {1, 2})[0].status();
       }},
      {"sizes that make 2, got 1 + 0",
       [&] {
         return Scatter(at(0), two, {1, 0})[0].status();
       }},
      {"at least one tensor, got none", [&] { return Gather({}, two).status(); }},
      {"tensor 1 on the device of another",
       [&] {
         return Gather({at(0), at(0)}, two).status();
       }},
      {"tensors like f64[2] but for dimension 0, got f64[] as tensor 1",
       [&] {
         return Gather({at(1), scalar}, two).status();
       }},
      {"a destination among 2 devices, got -1", [&] { return Gather({at(0)}, two, -1).status(); }},
      {"expected 3 values for f64[3], got 2",
       [&] {
         return Scatter(HostTensor::Of(Doubles{1, 2}, {3}), two)[0].status();
       }},
      {"an undefined tensor of the host", [&] { return Scatter(HostTensor(), two)[0].status(); }},
      {"at least one dimension",
       [&] { return Scatter(HostTensor::Of(Doubles{1}, {}), two)[0].status(); }},
      {"expected a tensor of f32, got f64[2]",
       [&] {
         return HostTensor::Of(Doubles{1, 2}, {2}).Read<float>().status();
       }},
      {"has its gradient from there",
       [&] { return GatherToHost({at(0)}, two).RequireGrad(two).status(); }},
      {"RequireGrad: expected a floating-point tensor",
       [&] {
         HostTensor whole = HostTensor::Of(std::vector<int64_t>{1}, {1});
         return whole.RequireGrad(two).status();
       }},
  };
  const int runs = daemon_.counts().runs;
  for (const auto& c : cases) {
    const absl::Status status = c.call();
    EXPECT_FALSE(status.ok()) << c.text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text));
  }
  EXPECT_EQ(daemon_.counts().runs, runs);
  EXPECT_THAT(Values<double>(ReduceAdd({at(0), at(1)}, two)), ElementsAre(2, 4));
}

// A member's own collective is refused: all members of the session enter the next epoch.
TEST_F(ParallelTest, MembersEnterAnEpochTogether) {
  std::vector<Tensor> y;
  for (int d = 0; d < 3; ++d) {
    y.push_back(AllReduce(d == 1 ? Tensor() : Row(session_, {4}), devices_.world(d)));
  }
  EXPECT_FALSE(y[1].status().ok());
  for (int d = 0; d < 3; ++d) EXPECT_EQ(devices_.world(d).epoch(), 2);
  EXPECT_THAT(Values<double>(Broadcast(Row(session_, {4}), devices_)[2]), ElementsAre(4));
}

TEST_F(ParallelTest, ACompiledFunctionTakesThemIn) {
  const Compiled step = Compile([this](const std::vector<Tensor>& in) {
    const std::vector<Tensor> y = Scatter(in[0], devices_);
    std::vector<Tensor> squares;
    for (const Tensor& chunk : y) squares.push_back(chunk * chunk);
    const absl::StatusOr<std::vector<Tensor>> g =
        Grad({Sum(Gather(squares, devices_, 1))}, {in[0]});
    return g.ok() ? *g : std::vector<Tensor>{Tensor()};
  });
  for (int i = 0; i < 2; ++i) {
    const auto g = step.Run({Row(session_, {1, 2, 3, 4}).RequireGrad()});
    ASSERT_TRUE(g.ok()) << g.status();
    EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(2, 4, 6, 8));
  }
}

// A member's call waits for the next one's, which is made behind ops on the result of the first: on
// another device they are not what it needs.
TEST_F(ParallelTest, MembersMayCallOneBehindTheOther) {
  const Tensor x = Row(session_, {1, 2, 4}).RequireGrad();
  const std::vector<Tensor> pieces = Scatter(x, devices_);
  std::vector<Tensor> squares;
  for (int d = 0; d < 3; ++d) {
    const Tensor sum = AllReduce(pieces[static_cast<size_t>(d)] * 2, devices_.world(d));
    squares.push_back(sum * sum);
  }
  const Tensor y = Gather(squares, devices_);
  EXPECT_THAT(Values<double>(y), ElementsAre(196, 196, 196));
  ASSERT_TRUE(Backward(Sum(y)).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(168, 168, 168));
}

// All members of a group ask for what all of them have called: that too is a call of them all.
TEST_F(ParallelTest, GradientsOfCallsOfAllMembersBringThemInLine) {
  const Tensor x = Row(session_.device(0), {2}).RequireGrad();
  const std::vector<Tensor> y = Broadcast(x, devices_);
  std::vector<Tensor> squares;
  for (const Tensor& each : y) squares.push_back(each * each);
  const Tensor loss = ReduceAdd(squares, devices_, 0);
  const Compiled metric = Compile(
      [](const std::vector<Tensor>& in) { return std::vector<Tensor>{MatMul(in[0], in[0])}; });
  EXPECT_FALSE(metric.Run({Row(session_, {1, 2})}).ok());
  const absl::Status status = Backward(Sum(loss));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(12));
}

// Members that had asked for a group in the step before, and one that had not, meet in the next.
TEST_F(ParallelTest, AGroupIsThatOfTheStepThatMembersHaveBegunByThemselves) {
  for (const int d : {0, 1}) ASSERT_TRUE(devices_.world(d).NewGroup({0, 1, 2}).ok());
  const Compiled metric = Compile(
      [](const std::vector<Tensor>& in) { return std::vector<Tensor>{MatMul(in[0], in[0])}; });
  EXPECT_FALSE(metric.Run({Row(session_, {1, 2})}).ok());
  const absl::Status out_of_line = devices_.world(2).NewGroup({0, 1, 2}).status();
  EXPECT_EQ(ErrorOf(out_of_line).reason, Reason::kOutOfLine) << out_of_line;
  // A call of all members.
  for (const Tensor& y : Broadcast(Row(session_, {4}), devices_)) {
    EXPECT_THAT(Values<double>(y), ElementsAre(4));
  }
  std::vector<Tensor> sums;
  for (int d = 0; d < 3; ++d) {
    const absl::StatusOr<Group> group = devices_.world(d).NewGroup({0, 1, 2});
    ASSERT_TRUE(group.ok()) << group.status();
    sums.push_back(AllReduce(Row(session_.device(d), {1.0 + d}), *group));
  }
  for (const Tensor& sum : sums) {
    const absl::Status status = sum.Wait();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_THAT(Values<double>(sum), ElementsAre(6));
  }
}

struct Asked {
  std::vector<Tensor> leaves;
  std::vector<Tensor> losses;
};

// A call for gradients that fails, at whichever of its ops, is not made again: it would lack what
// the first one has asked for.
TEST_F(ParallelTest, ABackwardThatFailedHalfWayIsNotMadeAgain) {
  const auto together = [&] {
    Asked asked;
    asked.leaves = {Row(session_.device(0), {2}).RequireGrad()};
    const std::vector<Tensor> y = Broadcast(asked.leaves[0], devices_);
    std::vector<Tensor> cubes;
    for (int d = 0; d < 3; ++d) cubes.push_back(y[d] * y[d] * y[d] * (d + 1));
    asked.losses = {Sum(ReduceAdd(cubes, devices_, 1))};
    return asked;
  };
  const auto one_by_one = [&] {
    Asked asked;
    for (int d = 0; d < 3; ++d) {
      asked.leaves.push_back(Row(session_.device(d), {2}).RequireGrad());
      const Tensor y = AllReduce(asked.leaves[d] * asked.leaves[d], devices_.world(d));
      asked.losses.push_back(Sum(y * y * (d + 1)));
    }
    return asked;
  };
  const struct {
    std::function<Asked()> record;
    double gradient;
  } programs[] = {{together, 6 * 3 * 4}, {one_by_one, 6 * 2 * 12 * 4}};
  for (const auto& program : programs) {
    bool whole = false;
    size_t names = 0;
    for (; !whole; ++names) {
      SCOPED_TRACE(names);
      ASSERT_LT(names, 100u);
      const Asked asked = program.record();
      for (const Tensor& loss : asked.losses) ASSERT_TRUE(loss.Wait().ok());
      std::vector<Tensor> held = TakeAllNames(session_);
      held.resize(held.size() - names);
      absl::Status status;
      size_t next = 0;
      while (status.ok() && next < asked.losses.size()) status = Backward(asked.losses[next++]);
      held.clear();
      whole = status.ok();
      if (!whole) {
        EXPECT_EQ(ErrorOf(status).reason, Reason::kQuota) << status;
        const absl::Status again = Backward(asked.losses[next - 1]);
        EXPECT_EQ(ErrorOf(again).reason, Reason::kTapeConsumed) << again;
        // Who asks here for the rest is told by its results.
        while (next < asked.losses.size()) ASSERT_TRUE(Backward(asked.losses[next++]).ok());
      }
      for (const Tensor& leaf : asked.leaves) {
        if (!whole && (!leaf.grad().defined() || !leaf.grad().Wait().ok())) continue;
        EXPECT_THAT(Values<double>(leaf.grad()), ElementsAre(program.gradient));
      }
    }
    EXPECT_GT(names, 5u);
  }
}

// x = 1, y = AllReduce(x) kept; B1 = Grad(10 y), B2 = Grad(y). The B1 of one member is refused: its
// B2 never meets the B1 of the others.
TEST_F(ParallelTest, AMembersRefusedGradientIsNotTakenForAnother) {
  BackwardOptions retain;
  retain.retain_graph = true;
  for (const bool failed_root : {false, true}) {
    std::vector<Tensor> x, y;
    for (int d = 0; d < 3; ++d) {
      x.push_back(Row(session_.device(d), {1}).RequireGrad());
      y.push_back(AllReduce(x.back(), devices_.world(d)));
    }
    std::vector<absl::StatusOr<std::vector<Tensor>>> gradients;
    const auto ask = [&](size_t d, const Tensor& root) {
      gradients.push_back(Grad({root}, {x[d]}, retain));
    };
    ask(0, failed_root ? MatMul(y[0], y[0]) : y[0] * Row(session_, {1, 2}));
    EXPECT_EQ(ErrorOf(gradients[0].status()).reason, Reason::kBadType);
    for (const size_t d : {1, 2}) ask(d, y[d] * 10);
    for (const size_t d : {0, 1, 2}) ask(d, y[d]);
    EXPECT_EQ(ErrorOf(gradients[3].status()).reason, Reason::kTapeConsumed);
    for (const auto& gradient : gradients) {
      EXPECT_FALSE((gradient.ok() ? (*gradient)[0].Wait() : gradient.status()).ok());
    }
    // What is recorded from now on has its gradient.
    gradients.clear();
    for (size_t d = 0; d < 3; ++d) {
      ask(d, AllReduce(x[d] * x[d], devices_.world(static_cast<int>(d))));
    }
    for (const auto& gradient : gradients) {
      ASSERT_TRUE(gradient.ok()) << gradient.status();
      EXPECT_THAT(Values<double>((*gradient)[0]), ElementsAre(6));
    }
  }
}

// f[d] is AllReduce(in[0] in[1]) for one member. In the first turn the first one's inputs do not
// fit, so that it is not known what it would have called: what the others call in that turn never
// meets what it calls in the next one.
TEST_F(ParallelTest, AMemberThatCouldNotBeTracedIsOutOfLineUntilAllCallTogether) {
  std::vector<Compiled> f;
  const auto compile = [&] {
    f.clear();
    for (int d = 0; d < 3; ++d) {
      f.push_back(Compile([world = devices_.world(d)](const std::vector<Tensor>& in) {
        return std::vector<Tensor>{AllReduce(MatMul(in[0], in[1]), world)};
      }));
    }
  };
  const auto call = [&](size_t d, double value, const Shape& shape) -> absl::StatusOr<double> {
    const DeviceRef device = session_.device(static_cast<int>(d));
    const Tensor one = Full(device, DType::kF64, shape, 1);
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> out,
                            f[d].Run({Full(device, DType::kF64, {1, 1}, value), one}));
    return Sum(out[0]).Item<double>();
  };
  const auto expect_out_of_line = [&](size_t d) {
    const absl::Status status = call(d, 1, {1, 1}).status();
    EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfLine) << status;
  };
  const auto expect_in_line = [&] {
    std::vector<std::vector<Tensor>> results;
    for (size_t d = 0; d < 3; ++d) {
      const Tensor one = Full(session_.device(static_cast<int>(d)), DType::kF64, {1, 1}, 1);
      const absl::StatusOr<std::vector<Tensor>> out = f[d].Run({one, one});
      ASSERT_TRUE(out.ok()) << out.status();
      results.push_back(*out);
    }
    for (const std::vector<Tensor>& result : results) {
      EXPECT_THAT(Values<double>(result[0]), ElementsAre(3));
    }
  };
  // Whether others have called before it, or do so afterwards.
  for (const bool before : {false, true}) {
    compile();
    std::vector<Tensor> called;
    for (int d = 1; before && d < 3; ++d) {
      const Tensor x = Full(session_.device(d), DType::kF64, {1, 1}, 10);
      called.push_back(AllReduce(x, devices_.world(d)));
    }
    EXPECT_EQ(ErrorOf(call(0, 10, {2, 1}).status()).reason, Reason::kBadType);
    for (const Tensor& result : called) {
      EXPECT_EQ(ErrorOf(result.Wait()).reason, Reason::kPeerRefused) << result.Wait();
    }
    for (const size_t d : {1, 2, 0, 1, 2}) expect_out_of_line(d);
    const std::vector<Tensor> rows = Broadcast(Row(session_, {4, 5}), devices_);
    for (const Tensor& row : rows) EXPECT_THAT(Values<double>(row), ElementsAre(4, 5));
    expect_in_line();
  }
  // Steps that nobody has asked for have no numbers.
  for (int d = 0; d < 3; ++d) {
    EXPECT_EQ(devices_.world(d).step(), 0);
    ASSERT_TRUE(devices_.world(d).Step(1).ok());
    EXPECT_EQ(devices_.world(d).step(), 1);
  }
  expect_in_line();
  // A function that calls for all of them is such a call, too.
  compile();
  EXPECT_FALSE(call(0, 10, {2, 1}).ok());
  const Compiled together = Compile([this](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{ReduceAdd(Broadcast(in[0], devices_), devices_, 0)};
  });
  const absl::StatusOr<std::vector<Tensor>> sum = together.Run({Row(session_, {2})});
  ASSERT_TRUE(sum.ok()) << sum.status();
  EXPECT_THAT(Values<double>((*sum)[0]), ElementsAre(6));
  expect_in_line();
  // Where some are in a later step than others each has to begin its own.
  ASSERT_TRUE(devices_.world(0).Step(2).ok());
  compile();
  EXPECT_FALSE(call(1, 10, {2, 1}).ok());
  EXPECT_EQ(ErrorOf(Broadcast(Row(session_, {1}), devices_)[0].Wait()).reason, Reason::kOutOfLine);
  for (int d = 0; d < 3; ++d) ASSERT_TRUE(devices_.world(d).Step(3).ok());
  expect_in_line();
}

// More requests for gradients than there is room for runs, and each is over only when all devices
// have asked.
TEST_F(ParallelTest, GradientsOfManyTensorsDoNotWaitForThemselves) {
  const Session session = daemon_.Open(3, std::chrono::seconds(1));
  const auto devices = DeviceGroup::Create(session);
  ASSERT_TRUE(devices.ok()) << devices.status();
  std::vector<Tensor> xs;
  for (int i = 0; i < 300; ++i) xs.push_back(Row(session, {1.0 * i}).RequireGrad());
  const std::vector<std::vector<Tensor>> y = BroadcastCoalesced(xs, *devices);
  ASSERT_TRUE(Backward(y[1]).ok());
  EXPECT_EQ(daemon_.counts().command_waits, 0);
  for (const Tensor& x : xs) EXPECT_THAT(Values<double>(x.grad()), ElementsAre(1));
}

}  // namespace
}  // namespace chorus
