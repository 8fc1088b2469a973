// What the SDK itself costs a call: everything but the daemon, the ring and the wait.
#include <memory>

#include "benchmark/benchmark.h"
#include "chorus/chorus.h"
#include "client/internal/access.h"
#include "client/internal/session_core.h"
#include "client/testing/null_link.h"

namespace chorus {
namespace {

using internal::SessionCore;

struct Rig {
  Rig() {
    auto null_link = std::make_unique<testing::NullLink>();
    link = null_link.get();
    session = internal::SessionFrom(SessionCore::Make(std::move(null_link), absl::Seconds(10)));
    WorldOptions options;
    options.name = "bench";
    options.rank = 0;
    options.size = 4;
    world = *session.Join(options);
  }
  // Fails the benchmark when other frames were sent than those that it is about.
  void Check(benchmark::State& state, double frames_each) const {
    const double frames = static_cast<double>(link->frames());
    const double expected = frames_each * static_cast<double>(state.iterations());
    if (frames < expected || frames > expected * 1.1 + 10) {
      state.SkipWithError("another number of frames than expected");
    }
    state.counters["frame_bytes"] = static_cast<double>(link->bytes()) / frames;
  }

  testing::NullLink* link = nullptr;
  Session session;
  World world;
};

void AllReduceAndWait(benchmark::State& state) {
  Rig rig;
  const Tensor x = Scalar<float>(rig.world, 1);
  const Group group = rig.world;
  const NoGrad no_grad;
  for (auto _ : state) {
    const Tensor y = AllReduce(x, group);
    if (!y.Wait().ok()) state.SkipWithError("wait");
  }
  rig.Check(state, 1);
}
BENCHMARK(AllReduceAndWait);

void AllReduceAndWaitRecorded(benchmark::State& state) {
  Rig rig;
  const Tensor x = Scalar<float>(rig.world, 1).RequireGrad();
  const Group group = rig.world;
  for (auto _ : state) {
    const Tensor y = AllReduce(x, group);
    if (!y.Wait().ok()) state.SkipWithError("wait");
  }
  // Each tape entry is abandoned, and the daemon told.
  rig.Check(state, 2);
}
BENCHMARK(AllReduceAndWaitRecorded);

// An elementwise op with a number, sent alone.
void MultiplyAndWait(benchmark::State& state) {
  Rig rig;
  const Tensor x = Scalar<float>(rig.world, 1);
  for (auto _ : state) {
    const Tensor y = 2 * x;
    if (!y.Wait().ok()) state.SkipWithError("wait");
  }
  rig.Check(state, 1);
}
BENCHMARK(MultiplyAndWait);

void CompiledCall(benchmark::State& state) {
  Rig rig;
  const World world = rig.world;
  const Compiled f = Compile([world](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{AllReduce(in[0], world) + in[1]};
  });
  const std::vector<Tensor> inputs = {Scalar<float>(world, 1), Scalar<float>(world, 2)};
  for (auto _ : state) {
    const auto out = f.Run(inputs);
    if (!out.ok()) state.SkipWithError("run");
  }
  rig.Check(state, 1);
}
BENCHMARK(CompiledCall);

}  // namespace
}  // namespace chorus
