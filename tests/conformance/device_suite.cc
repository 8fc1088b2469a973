// Several devices in one session: what a function gives compiled has the bits that it gives when
// its ops run one after the other, whatever crosses between the devices.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "chorus/functional/math.h"
#include "chorus/parallel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/conformance.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

using parallel::DeviceGroup;
using Tensors = std::vector<Tensor>;

std::vector<uint32_t> Bits(const Tensor& x) {
  std::vector<uint32_t> bits;
  for (const float value : Values<float>(x)) {
    bits.emplace_back();
    std::memcpy(&bits.back(), &value, sizeof(value));
  }
  return bits;
}

// A program of random ops on the devices of one session, the same at every call: it is drawn again
// from its seed.
class DeviceProgram {
 public:
  DeviceProgram(uint64_t seed, const DeviceGroup& devices, const Group* pair)
      : seed_(seed), devices_(devices), pair_(pair) {}

  // `in`: one vector on each device. Eager calls wait for each op.
  Tensors Call(const Tensors& in, bool eager) {
    random_.seed(seed_);
    eager_ = eager;
    all_ = in;
    const int ops = 3 + Draw(12);
    for (int i = 0; i < ops; ++i) AddOp();
    Tensors results;
    Tensor loss = Scalar<float>(devices_.device(0), 0);
    for (size_t i = in.size(); i < all_.size(); ++i) {
      const Tensor& x = all_[i];
      if (Draw(3) == 0) results.push_back(x);
      if (Draw(2) == 0 || !x.requires_grad()) continue;
      loss = loss + ToFirst(Sum(Sin(x) * (1.0 + Draw(3))));
    }
    if (Draw(4) == 0) return results;
    BackwardOptions options;
    options.create_graph = Draw(3) == 0;
    if (!loss.requires_grad()) return results;
    Tensors wanted;
    for (const Tensor& x : in) {
      if (x.requires_grad()) wanted.push_back(x);
    }
    auto gradients = Grad({loss}, wanted, options);
    EXPECT_TRUE(gradients.ok()) << gradients.status();
    if (!gradients.ok()) return results;
    Tensor second = Scalar<float>(devices_.device(0), 0);
    for (const Tensor& g : *gradients) {
      if (!g.defined()) continue;
      results.push_back(Ready(g));
      if (options.create_graph && g.requires_grad()) second = second + ToFirst(Sum(g * g));
    }
    if (!second.requires_grad()) return results;
    gradients = Grad({second}, wanted);
    EXPECT_TRUE(gradients.ok()) << gradients.status();
    if (!gradients.ok()) return results;
    for (const Tensor& g : *gradients) {
      if (g.defined()) results.push_back(Ready(g));
    }
    return results;
  }

 private:
  int Draw(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
  const Tensor& Any() { return all_[static_cast<size_t>(Draw(static_cast<int>(all_.size())))]; }
  DeviceRef AnyDevice() { return devices_.device(Draw(devices_.size())); }
  Tensor ToFirst(const Tensor& x) { return Ready(CopyTo(x, devices_.device(0))); }
  Tensor Ready(const Tensor& x) {
    const absl::Status status = eager_ ? x.Wait() : x.status();
    EXPECT_TRUE(status.ok()) << status;
    return x;
  }
  void Add(const Tensor& x) { all_.push_back(Ready(x)); }
  void AddAll(const Tensors& xs) {
    for (const Tensor& x : xs) Add(x);
  }

  // One tensor of `x`'s shape on each device, by device index.
  Tensors OnEach(const Tensor& x) {
    Tensors each;
    for (int d = 0; d < devices_.size(); ++d) {
      Tensors fitting;
      for (const Tensor& y : all_) {
        if (y.shape() == x.shape() && y.device().slot() == devices_.device(d).slot()) {
          fitting.push_back(y);
        }
      }
      if (fitting.empty() || Draw(4) == 0) {
        fitting = {Ready(CopyTo(x, devices_.device(d)))};
      }
      each.push_back(fitting[static_cast<size_t>(Draw(static_cast<int>(fitting.size())))]);
    }
    return each;
  }

  void AddOp() {
    switch (Draw(9)) {
      case 0:
        return Add(Sin(Any()) * (0.5 + Draw(4)));
      case 1: {
        const Tensor x = Any();
        for (const Tensor& y : all_) {
          if (y.shape() == x.shape() && y.device().slot() == x.device().slot() && Draw(2) == 0) {
            return Add(Draw(2) == 0 ? x + y : x * y);
          }
        }
        return Add(-x);
      }
      case 2:
      case 3:
        return Add(CopyTo(Any(), AnyDevice()));
      case 4:
        return AddAll(parallel::Broadcast(Any(), devices_));
      case 5: {
        const Tensor x = Any();
        std::vector<int64_t> sizes;
        if (Draw(2) == 0) {
          int64_t left = x.shape()[0];
          for (int d = 0; d + 1 < devices_.size(); ++d) {
            sizes.push_back(Draw(static_cast<int>(left) + 1));
            left -= sizes.back();
          }
          sizes.push_back(left);
        }
        return AddAll(parallel::Scatter(x, devices_, sizes));
      }
      case 6: {
        Tensors pieces;
        for (const Tensor& x : OnEach(Any())) {
          if (pieces.empty() || Draw(3) > 0) pieces.push_back(x);
        }
        std::shuffle(pieces.begin(), pieces.end(), random_);
        return Add(parallel::Gather(pieces, devices_, Draw(devices_.size())));
      }
      case 7:
        return Add(parallel::ReduceAdd(OnEach(Any()), devices_, Draw(devices_.size())));
      default:
        return AddMembersCalls();
    }
  }

  // Members call for themselves, in any order and with other ops between. All of them have to
  // differentiate what they do: nobody does.
  void AddMembersCalls() {
    const NoGrad no_grad;
    const Tensors each = OnEach(Any());
    std::vector<int> order(each.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    const bool scatter = Draw(2) == 0;
    const bool in_pair = pair_ != nullptr && Draw(2) == 0;
    Tensors results;
    for (const int d : order) {
      const Tensor& x = each[static_cast<size_t>(d)];
      if (in_pair) {
        if (d < 2) results.push_back(AllReduce(x, pair_[d]));
      } else if (scatter) {
        results.push_back(Broadcast(x, 0, devices_.world(d)));
      } else {
        results.push_back(AllReduce(x, devices_.world(d)));
      }
      if (Draw(2) == 0) Add(CopyTo(Any(), AnyDevice()));
    }
    AddAll(results);
  }

  const uint64_t seed_;
  const DeviceGroup devices_;
  const Group* const pair_;
  std::mt19937_64 random_;
  bool eager_ = false;
  Tensors all_;
};

// Devices of one session in the world "conformance", as its ranks.
JobOptions OneSession(int devices) {
  JobOptions options;
  options.ranks = devices;
  options.sessions = 1;
  return options;
}

TEST_P(ConformanceInside, CompiledFunctionsOfSeveralDevicesEqualEagerOnes) {
  constexpr int kPrograms = 40;
  for (int devices = 2; devices <= 4; ++devices) {
    Job job(GetParam(), OneSession(devices));
    const Session& session = job.session(0);
    const absl::StatusOr<DeviceGroup> group = DeviceGroup::Create(session);
    ASSERT_TRUE(group.ok()) << group.status();
    const Group pair[] = {*group->world(0).NewGroup({1, 0}), *group->world(1).NewGroup({1, 0})};
    for (int p = 0; p < kPrograms; ++p) {
      const uint64_t seed = TestSeed() + static_cast<uint64_t>(1000 * devices + p);
      SCOPED_TRACE(testing::Message() << devices << " devices, program " << seed);
      std::mt19937_64 random(seed);
      Tensors in;
      for (int d = 0; d < devices; ++d) {
        std::vector<float> values(5);
        for (float& v : values) v = static_cast<float>(random() % 1000) / 500 - 1;
        in.push_back(FromHost<float>(session.device(d), values, {5}));
        if (d == 0 || random() % 2 == 0) in.back().RequireGrad();
      }
      DeviceProgram program(seed, *group, pair);
      const Tensors expected = program.Call(in, /*eager=*/true);
      const Compiled compiled =
          Compile([&](const Tensors& inputs) { return program.Call(inputs, /*eager=*/false); });
      // Two calls under way.
      absl::StatusOr<Tensors> got[] = {compiled.Run(in), compiled.Run(in)};
      for (const absl::StatusOr<Tensors>& results : got) {
        ASSERT_TRUE(results.ok()) << results.status();
        ASSERT_EQ(results->size(), expected.size());
        for (size_t i = 0; i < expected.size(); ++i) {
          ASSERT_TRUE((*results)[i].Wait().ok()) << i << ": " << (*results)[i].Wait();
          EXPECT_EQ(Bits((*results)[i]), Bits(expected[i])) << i;
        }
      }
      if (HasFailure()) return;
    }
  }
}

// Where a member has called before the others have, other calls of a compiled function meet than
// the program pairs: here the second one of device 0 needs the first one of device 1.
TEST_P(ConformanceInside, ACompiledFunctionMeetsCallsFromBeforeAndBehindIt) {
  Job job(GetParam(), OneSession(2));
  const Session& session = job.session(0);
  const Tensor x = FromHost<float>(session.device(0), {1, 2}, {2});
  const Tensor y = FromHost<float>(session.device(1), {10, 20}, {2});
  const Compiled both = Compile([&](const Tensors& in) {
    const Tensor first = AllReduce(in[1], job.world(1));
    const Tensor second = AllReduce(CopyTo(first, session.device(0)), job.world(0));
    return Tensors{first, second * 2};
  });
  const Tensor before = AllReduce(x, job.world(0));
  const absl::StatusOr<Tensors> results = both.Run({x, y});
  ASSERT_TRUE(results.ok()) << results.status();
  const Tensor behind = AllReduce(y * 10, job.world(1));
  EXPECT_EQ(Values<float>(before), (std::vector<float>{11, 22}));
  EXPECT_EQ(Values<float>((*results)[0]), (std::vector<float>{11, 22}));
  EXPECT_EQ(Values<float>((*results)[1]), (std::vector<float>{222, 444}));
  EXPECT_EQ(Values<float>(behind), (std::vector<float>{111, 222}));
}

// Device 0 would have to copy, in its second run, what device 1 needs to meet its first.
TEST_P(ConformanceInside, RunsOfADeviceThatWouldHaveToBeInterleavedAreRefused) {
  Job job(GetParam(), OneSession(2));
  const Session& session = job.session(0);
  const Tensor x = FromHost<float>(session.device(0), {1, 2}, {2});
  const Tensor y = FromHost<float>(session.device(1), {10, 20}, {2});
  const Compiled both = Compile([&](const Tensors& in) {
    const Tensor first = AllReduce(CopyTo(in[0] * 3, session.device(1)), job.world(1));
    return Tensors{first, AllReduce(in[0], job.world(0))};
  });
  const Tensor before = AllReduce(x, job.world(0));
  const absl::StatusOr<Tensors> results = both.Run({x});
  ASSERT_TRUE(results.ok()) << results.status();
  const Tensor behind = AllReduce(y, job.world(1));
  for (const Tensor& result : {before, (*results)[0], (*results)[1], behind}) {
    const absl::Status status = result.Wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr("Compile the same collectives"));
  }
  // The next epoch is open.
  const Tensor again[] = {AllReduce(x, job.world(0)), AllReduce(y, job.world(1))};
  EXPECT_EQ(Values<float>(again[0]), (std::vector<float>{11, 22}));
  EXPECT_EQ(Values<float>(again[1]), (std::vector<float>{11, 22}));
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
