// A node that tests drive directly, without a transport: frames in, outcomes and tensors out.
//
// Threads: one thread makes all calls; the node has its own, for which each waits up to kPatience.
// Ownership: NodeTest has the backend, the node's loop and its ranks. Errors: what goes wrong on
// the way is a failure of the test.
#ifndef CHORUS_CORE_NODE_NODE_RIG_H_
#define CHORUS_CORE_NODE_NODE_RIG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/backend/backend.h"
#include "core/base/mutex.h"
#include "core/base/thread_pool.h"
#include "core/graph/graph.h"
#include "core/node/node.h"
#include "core/node/node_loop.h"
#include "core/node/options.h"
#include "core/ops/graph_builder.h"
#include "core/ops/host_kernels.h"
#include "core/transport/command.h"
#include "gtest/gtest.h"

namespace chorus::node {

inline constexpr absl::Duration kPatience = absl::Seconds(30);
inline constexpr int64_t kLarge = int64_t{1} << 20;  // elements of f32: 4 MiB

// Waits for something that happens on the node thread.
template <typename T>
class Promise {
 public:
  void Set(T value) {
    MutexLock lock(&mutex_);
    value_ = std::move(value);
    done_ = true;
    set_.SignalAll();
  }
  T Get() {
    MutexLock lock(&mutex_);
    const absl::Time deadline = absl::Now() + kPatience;
    while (!done_ && absl::Now() < deadline) set_.WaitFor(&mutex_, deadline - absl::Now());
    EXPECT_TRUE(done_) << "nothing came in time";
    return value_;
  }

 private:
  Mutex mutex_;
  CondVar set_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  T value_ ABSL_GUARDED_BY(mutex_);
};

// --- Graphs --------------------------------------------------------------------------------------

// The slot of a group of `size` of which the session holds group rank `rank`, with its first
// device.
GroupSlot SlotOf(int rank, int size);
ValueIndex AddAllReduce(GraphBuilder* builder, ValueIndex x, int rank, const std::string& source,
                        int group_slot = 0);
// An op without attributes.
ValueIndex AddOp(GraphBuilder* builder, const std::string& op, std::vector<ValueIndex> inputs);
ValueIndex AddInput(GraphBuilder* builder, TensorType type, bool donatable = false);
// `may_alias`: the input that it may take the memory of; -1: none.
void AddOutput(GraphBuilder* builder, ValueIndex value, int32_t may_alias = -1);
Graph AllReduceGraph(int rank, int size, TensorType type, const std::string& source);
ValueIndex AddFill(GraphBuilder* builder, int64_t elements, double value);
// Makes a tensor of `kLarge` ones.
Graph OnesGraph();
// A tensor under a second name.
Graph SameGraph(int64_t elements);
// Its input negated, in its memory where that is given away.
Graph NegateGraph(int64_t elements);

// --- Ranks ---------------------------------------------------------------------------------------

// One rank, as a client that submits frames by calls. It joins with the first of its devices.
class DirectRank {
 public:
  DirectRank(NodeLoop* loop, int rank, int size, const std::string& world,
             std::vector<DeviceIndex> devices, absl::Duration exec_timeout = {},
             CheckCallSites check_call_sites = CheckCallSites::kOff,
             const std::string& tenant = "uid:0");

  void AwaitWorld();

  void Submit(CommandBody body) { SubmitTogether({std::move(body)}); }
  // Nothing else happens on the node thread between them: what the first of them launches is not
  // seen to be complete when the last is submitted.
  void SubmitTogether(std::vector<CommandBody> bodies);
  absl::Status LastOutcome() { return outcomes_.back()->Get().status; }

  void Register(int32_t slot, const Graph& graph);

  static InlineData Inline(const std::vector<float>& x);
  void RunInline(int32_t graph, const std::vector<float>& x, TensorId out) {
    RunOn(graph, Inline(x), out);
  }
  void RunOn(int32_t graph, const Binding& input, TensorId out) {
    Submit(WorldRun(graph, {input}, {out}));
  }

  // A run of a graph without groups.
  static Run LocalRun(int32_t graph, const std::vector<Binding>& inputs,
                      const std::vector<TensorId>& outs);
  // A run of a graph with one group, the world, and one collective in it.
  Run WorldRun(int32_t graph, const std::vector<Binding>& inputs,
               const std::vector<TensorId>& outs);

  GroupId CreateGroup(const std::vector<Rank>& members);
  absl::StatusOr<StagingArena> CreateStaging(int64_t bytes);
  // Sends to itself, of tags from `first` on, that this rank could not make.
  void RefuseSends(int64_t first, int64_t count);
  void AbortWorld(const std::string& why);
  void RunTwoGroups(int32_t graph, GroupId first, TensorId out);
  void RunLocal(int32_t graph, const std::vector<Binding>& inputs, TensorId out) {
    Submit(LocalRun(graph, inputs, {out}));
  }
  // A step: `donated` is given away, zeros are all_reduced.
  Run StepRun(int32_t graph, TensorId donated, int64_t reduced, TensorId out, TensorId sum);
  void RunStep(int32_t graph, TensorId donated, int64_t reduced, TensorId out, TensorId sum) {
    Submit(StepRun(graph, donated, reduced, out, sum));
  }
  Sequence last_sequence() const { return Sequence(next_ - 1); }
  NodeStats Stats();

  absl::StatusOr<std::vector<float>> Read(TensorId id);

  // Until all commands have been taken: reads come behind them, of what does not exist as well.
  void WaitUntilTaken() { EXPECT_FALSE(Read({-1, 1}).ok()); }

  // Holds `reader` until something has come of it.
  void StartReading(TensorId id, std::shared_ptr<int> reader);

  void NextEpoch() { epoch_ = Epoch(epoch_.value() + 1); }
  // A call that this rank could not make counts all the same.
  void LeaveOut() { ++index_; }
  SessionId session() const { return session_; }
  WorldId world() const { return world_; }

  template <typename T, typename Fn>
  T Call(Fn fn) {
    Promise<T> done;
    loop_->PostOwn([&](LocalNode& node, absl::Time now) { fn(node, now, &done); });
    return done.Get();
  }

 private:
  RunGroup BindGroup(GroupId group, int64_t base) const;

  NodeLoop* loop_;
  int rank_;
  SessionId session_;
  WorldId world_;
  Epoch epoch_;
  int64_t index_ = 0;
  int64_t next_ = 1;
  Promise<absl::StatusOr<WorldInfo>> joined_;
  std::vector<std::unique_ptr<Promise<Outcome>>> outcomes_;
};

// A staging arena as its client has it.
class ClientMemory {
 public:
  ClientMemory(DirectRank* rank, int64_t elements);
  ~ClientMemory();
  ClientMemory(const ClientMemory&) = delete;
  ClientMemory& operator=(const ClientMemory&) = delete;

  OutBinding From(int64_t element, std::vector<int64_t> strides = {}) const;
  std::vector<float> Read(int64_t begin, int64_t end) const {
    return std::vector<float>(floats_ + begin, floats_ + end);
  }
  float* data() { return floats_; }

 private:
  const int64_t bytes_;
  ArenaId arena_;
  float* floats_ = nullptr;
};

class NodeTest : public testing::Test {
 protected:
  void Start(int ranks, NodeOptions options = {}, absl::string_view faults = "");
  void StartOnSim(int ranks, int devices_per_domain = 1, NodeOptions options = {});
  // `devices`: of each rank's session.
  void StartOn(std::unique_ptr<Backend> backend,
               const std::vector<std::vector<DeviceIndex>>& devices, NodeOptions options);
  std::unique_ptr<Backend> HostDevices(int count, HostKernelFactory make_kernel = MakeHostKernel);
  static std::vector<std::vector<DeviceIndex>> OneEach(int ranks);
  void TearDown() override { loop_.reset(); }

  // Ends the node while rank 0's run, with all its memory, waits for rank 1, and a reader of its
  // result, by a call and by a command, for it.
  void EndWhileARunWaits();

  ThreadPool pool_{2};
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<NodeLoop> loop_;
  std::vector<std::unique_ptr<DirectRank>> ranks_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_NODE_RIG_H_
