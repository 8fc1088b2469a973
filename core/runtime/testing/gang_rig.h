// Runs the graphs of several sessions as one gang on the devices of a backend, as a node would:
// plans, buffers, communicators and launches, but no agreement. For tests.
//
// Threads: the one that made it. Ownership: owns all of these, and the backend. Errors: returned as
// said at each function; what the rig itself cannot do ends the process.
#ifndef CHORUS_CORE_RUNTIME_TESTING_GANG_RIG_H_
#define CHORUS_CORE_RUNTIME_TESTING_GANG_RIG_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/backend/backend.h"
#include "core/base/mutex.h"
#include "core/graph/graph.h"
#include "core/ops/host_kernel.h"
#include "core/ops/testing/evaluator.h"
#include "core/ops/testing/value.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/executor.h"
#include "core/runtime/plan/plan.h"

namespace chorus {
namespace testing {

// Kernels by the reference evaluator, so that these tests are about plans and executors alone. Each
// wants a workspace, and fails where anybody else writes there.
HostKernelOrError MakeReferenceKernel(const NodeView& node, absl::Span<const TensorType> outputs);

// Threads: thread-compatible. Waits end after a minute with DEADLINE_EXCEEDED.
class GangRig {
 public:
  // What a gang leaves behind: its buffers, which the next gang may read before they are written.
  struct Result {
    struct OnSession {
      Plan plan;
      std::vector<int> devices;
      std::vector<DeviceAddress> addresses;  // by plan buffer
      std::vector<LaunchId> launches;        // by device slot
      std::vector<TensorType> output_types;
    };
    std::vector<OnSession> sessions;
    absl::Status status;  // of the preparation: plans, memory
    // What Start() launches, in this order: device, message.
    std::vector<std::pair<int, LaunchMessage>> messages;
  };

  // Where an input comes from: a value, or an output of an earlier gang's session.
  struct Source {
    Source(Value v) : value(std::move(v)) {}  // a value is a source
    Source(const Result* r, int s, int o) : result(r), session(s), output(o) {}
    absl::optional<Value> value;
    const Result* result = nullptr;
    int session = 0;
    int output = 0;
  };

  struct Session {
    Graph graph;
    std::vector<Source> inputs;
    std::vector<int> devices;            // by device slot
    std::vector<int> groups;             // a name for the group bound to each group slot
    std::vector<std::string> instances;  // a name for the instance bound to each instance slot
    std::vector<int32_t> order;          // PlanOptions::order
  };

  explicit GangRig(std::unique_ptr<Backend> backend);
  ~GangRig();

  Backend* backend() { return backend_.get(); }
  Executor* executor(int device) { return executors_[static_cast<size_t>(device)].get(); }

  // For plans of its backend.
  PlanOptions Options() const;

  // Called for each device plan before it is loaded: to break it on purpose.
  void set_mutate(std::function<void(DevicePlan*)> mutate) { mutate_ = std::move(mutate); }
  // Sessions are launched in this order; empty: as given.
  void set_launch_order(std::vector<int> order) { launch_order_ = std::move(order); }

  // Outputs take over the inputs that plans let them.
  void set_donate(bool donate) { donate_ = donate; }
  // Of what is prepared and copied from now on. Its sources must be of this lane, or have ended.
  void set_lane(int32_t lane) { lane_ = lane; }

  // Plans a gang and gives it memory, which waits for the device; Start() enqueues it and returns
  // at once. Gangs are started in the order in which they were prepared.
  std::unique_ptr<Result> Prepare(const std::vector<Session>& sessions);
  void Start(const Result& result);
  std::unique_ptr<Result> Launch(const std::vector<Session>& sessions) {
    std::unique_ptr<Result> result = Prepare(sessions);
    Start(*result);
    return result;
  }
  // The first failure of its launches.
  absl::Status Wait(const Result& result);
  Value Output(const Result& result, int session, int output);

  // Launches, waits, and compares every output with the reference. "" or what differs.
  std::string Check(const std::vector<Session>& sessions);
  // What the outputs of `result` should be and are not.
  std::string Differences(const std::vector<Session>& sessions, const Result& result);

  absl::Status WaitFor(LaunchId launch) { return CompletionOf(launch).status; }
  // Waits for it. `enqueue`: has the executors enqueue all that they were given.
  CompletionMessage CompletionOf(LaunchId launch, bool enqueue = true);
  // Whether the executor has more to enqueue.
  bool Send(int device, const LaunchMessage& message);
  bool HasCompleted(LaunchId launch) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    return completions_.count(launch) > 0;
  }
  LaunchId NextLaunch() { return ++last_launch_; }
  CommunicatorId CommunicatorOf(const std::vector<int>& devices);
  // On any thread.
  absl::Status LoadPlan(int device, PlanId id, const std::string& plan);
  DeviceAddress Allocate(int device, int64_t bytes);  // filled with garbage
  absl::Status Upload(int device, DeviceAddress to, const std::string& bytes);
  std::string Download(int device, DeviceAddress from, int64_t bytes, LaunchId after = LaunchId());

 private:
  // Has the executors enqueue all that they were given.
  void Pump();
  // What an executor says of anything but launches: its device, which kind of thing, and its id.
  using EventKey = std::tuple<int, char, uint64_t>;
  static EventKey KeyOf(int device, const LoadedMessage& of) {
    return {device, 'l', of.plan.value()};
  }
  static EventKey KeyOf(int device, const OpenedMessage& of) {
    return {device, 'o', of.communicator.value()};
  }
  static EventKey KeyOf(int device, const TransferredMessage& of) {
    return {device, 't', of.transfer.value()};
  }
  static EventKey KeyOf(int device, const LostMessage&) { return {device, 'x', 0}; }
  absl::Status WaitFor(const EventKey& key);
  // For those that wait. False: it has come before.
  bool Keep(int, const CompletionMessage& of) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    changed_.SignalAll();
    return completions_.emplace(of.launch, of).second;
  }
  template <typename Message>
  bool Keep(int device, const Message& of) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    changed_.SignalAll();
    return told_.emplace(KeyOf(device, of), of.status).second;
  }
  struct Part {
    int session;
    int32_t participation;
    int32_t member;
  };
  struct Instance {
    std::vector<Part> parts;
    int size = 0;
    int group = 0;
    int32_t source = -1;  // pairs: the lower member
    int32_t destination = -1;
  };

  absl::Status PrepareInto(const std::vector<Session>& sessions, Result* result,
                           std::vector<LaunchMessage>* messages);
  DeviceAddress Resolve(const std::vector<Session>& sessions, Result* result, int session,
                        int32_t buffer);
  std::string KeyOf(const Session& session, const VoteTemplate& votes, int32_t p,
                    std::map<std::string, int>* counts) const;

  std::unique_ptr<Backend> backend_;
  std::function<void(DevicePlan*)> mutate_;
  std::vector<int> launch_order_;
  bool donate_ = false;
  int32_t lane_ = 0;
  LaunchId last_launch_;
  PlanId last_plan_;
  TransferId last_transfer_;
  std::map<std::pair<int32_t, std::vector<int>>, CommunicatorId> communicators_;  // by lane
  std::vector<std::pair<int, DeviceAddress>> allocated_;

  // Of the gang being prepared.
  std::map<std::string, Instance> instances_;
  std::vector<std::vector<std::string>> keys_;  // by session, participation
  std::map<std::string, DeviceAddress> shared_;

  Mutex mutex_;
  CondVar changed_;
  std::map<LaunchId, CompletionMessage> completions_ ABSL_GUARDED_BY(mutex_);
  std::map<EventKey, absl::Status> told_ ABSL_GUARDED_BY(mutex_);  // of all else

  std::vector<std::unique_ptr<Executor>> executors_;
};

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_TESTING_GANG_RIG_H_
