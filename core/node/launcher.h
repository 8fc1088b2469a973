// The device side of the node: executors, loaded plans, the pool of communicators, transfers, and
// what becomes of all that.
//
// Threads: the node thread; executors' events come from any thread and wait for Drain(). Ownership:
// owns the executors, and through them loaded plans and communicators. Errors: as Executor's.
#ifndef CHORUS_CORE_NODE_LAUNCHER_H_
#define CHORUS_CORE_NODE_LAUNCHER_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/backend/backend.h"
#include "core/base/mutex.h"
#include "core/node/background.h"
#include "core/node/communicators.h"
#include "core/node/graph_store.h"
#include "core/runtime/budget.h"
#include "core/runtime/devices.h"
#include "core/runtime/executor.h"
#include "core/runtime/messages.h"

namespace chorus::node {

class Launcher {
 public:
  // `wake` is called, from any thread, when an event has come. The background outlives this and
  // is stopped before this ends.
  Launcher(Devices* devices, Background* background, std::function<void()> wake);
  ~Launcher();

  int device_count() const { return static_cast<int>(executors_.size()); }
  Executor* executor(DeviceIndex device) { return executors_[device.value()].get(); }
  // Backend::at_once_bytes.
  int64_t at_once_bytes() const { return at_once_bytes_; }
  int64_t launches(DeviceIndex device) const { return launch_counts_[device.value()]; }

  // Loads the parts of a plan of the record (null: its main one) on `devices`, by slot, where they
  // are not yet. For one device of a part each session that names the graph is charged; for each
  // other one the client is, until it is unloaded. Of a large record, which takes the node thread
  // too long, in the background. False: it is not there yet, and waiting.wait() was called.
  // RESOURCE_EXHAUSTED kOutOfMemory: it cannot be charged; else as Executor::LoadPlan.
  absl::StatusOr<bool> LoadPlan(const std::shared_ptr<GraphRecord>& record,
                                const std::shared_ptr<LoadedPlan>& variant,
                                absl::Span<const DeviceIndex> devices,
                                const GraphStore::Client& client,
                                const GraphStore::Waiting& waiting);
  // The part for device slot `slot` on `device`. UNAVAILABLE kDeviceLost: it was there when the run
  // was prepared, and has been lost with the device; INTERNAL: it has not been loaded there.
  absl::StatusOr<PlanId> PlanOn(const LoadedPlan& plan, int slot, DeviceIndex device) const;
  // No run of it is under way.
  UnloadedPart UnloadPlan(DeviceIndex device, PlanId plan);
  int64_t loaded_plans() const { return static_cast<int64_t>(loaded_.size()); }

  // Communicators of its own for whoever asks, which nobody else uses; charged to `budget`.
  std::shared_ptr<CommunicatorLease> LeaseCommunicators(BudgetRef budget) {
    return std::make_shared<CommunicatorLease>(communicators_, std::move(budget));
  }

  // Ids ascend in the order of launches.
  LaunchId NextLaunchId() { return ++last_launch_; }
  void Launch(DeviceIndex device, const LaunchMessage& message);
  // Counts one that the node has run itself (AtOnce).
  void CountLaunch(DeviceIndex device) { ++launch_counts_[device.value()]; }
  // Goes on with launches that were too large to be enqueued at once. Whether there were any.
  bool Continue();
  bool HasMore() const { return !unfinished_.empty(); }

  // Executor::Upload and Download; the host memory must stand until `done`, which Drain() calls.
  using OnTransferred = std::function<void(const absl::Status&)>;
  TransferId Upload(DeviceIndex device, int32_t lane, DeviceAddress to, const void* from,
                    int64_t bytes, OnTransferred done);
  void Download(DeviceIndex device, int32_t lane, void* to, DeviceAddress from, int64_t bytes,
                OnTransferred done);

  // Posts a closure to be run by Drain(), from any thread.
  void Post(std::function<void()> closure);
  // Takes what has come, a turn's work of it, and calls `complete` for each completion; what else
  // came until then is seen to first: transfers have ended before the launches that read what they
  // brought. Returns true when there was something.
  bool Drain(absl::FunctionRef<void(const CompletionMessage&)> complete);
  bool HasCompletions() const { return ready_.load(std::memory_order_seq_cst); }

 private:
  // Parts of a plan that are loaded for one caller, which waits for all of them.
  struct Loading {
    std::shared_ptr<LoadedPlan> plan;
    std::vector<DeviceIndex> key;  // by slot
    size_t left = 0;
    absl::Status status;
    bool is_waited_for = false;
  };
  struct LoadingPart {
    std::shared_ptr<Loading> loading;
    size_t slot = 0;
    DeviceIndex device;
    Charge charge;
  };
  // In order of their coming; those before `next` are done with.
  template <typename T>
  struct Events {
    std::vector<T> all;
    size_t next = 0;
  };
  struct AllEvents {
    Events<CompletionMessage> completed;
    Events<LoadedMessage> loaded;
    Events<OpenedMessage> opened;
    Events<TransferredMessage> transferred;
    Events<DeviceIndex> lost;
    Events<std::function<void()>> posted;
  };

  void OnEvent(DeviceIndex device, absl::string_view bytes);
  void SetReady();
  void TakeLoadedAtOnce(const Loading& loading);
  void Take(const LoadedMessage& loaded);
  void Take(const TransferredMessage& transferred);
  void TakeLoss(DeviceIndex device);
  bool IsLost(DeviceIndex device, PlanId plan) const {
    return plan <= lost_plans_[static_cast<size_t>(device.value())];
  }
  PlanId FindOn(const LoadedPlan& plan, size_t slot, DeviceIndex device) const;
  absl::StatusOr<Charge> ChargePart(const LoadedPlan& plan, size_t slot, const BudgetRef& budget);
  void SetLocation(LoadedPlan* plan, size_t slot, DeviceIndex device, PlanId id);
  void LetGo(UnloadedPart part);
  TransferId BeginTransfer(DeviceIndex device, OnTransferred done);

  Background* const background_;
  const std::function<void()> wake_;
  Mutex mutex_;
  AllEvents events_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> ready_{false};
  AllEvents taken_;  // from events_, all before others are
  bool some_are_left_ = false;

  const int64_t at_once_bytes_;
  std::vector<int64_t> launch_counts_;
  PlanId last_plan_;
  std::vector<PlanId> lost_plans_;  // by device: these, and those before them
  std::map<PlanId, LoadingPart> loading_;
  std::map<PlanId, Charge> loaded_;
  TransferId last_transfer_;
  struct Transfer {
    DeviceIndex device;
    OnTransferred done;
  };
  std::map<TransferId, Transfer> transfers_;  // under way; of others nothing stays
  LaunchId last_launch_;
  ByteWriter scratch_;
  std::vector<DeviceIndex> unfinished_;  // executors that have not enqueued all they were given
  // Its end waits for work that may still complete into the members above.
  std::vector<std::unique_ptr<Executor>> executors_;
  const std::shared_ptr<CommunicatorPool> communicators_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_LAUNCHER_H_
