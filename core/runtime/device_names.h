// What the launches of a device name, whatever their lane: plans that are loaded, communicators
// that are open, and launches and uploads that have failed.
//
// Threads: one thread makes all calls, but LoadPlan and those of the failure logs, which any thread
// may make, beside them. Ownership: of plans and communicators; the backend outlives it. Errors:
// said at each function.
#ifndef CHORUS_CORE_RUNTIME_DEVICE_NAMES_H_
#define CHORUS_CORE_RUNTIME_DEVICE_NAMES_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/node_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/backend/backend.h"
#include "core/base/mutex.h"
#include "core/runtime/device_program.h"
#include "core/runtime/failure_log.h"
#include "core/runtime/messages.h"

namespace chorus {

class DeviceNames {
 public:
  DeviceNames(Backend* backend, int index) : backend_(backend), device_(backend->device(index)) {}

  // As Executor::LoadPlan.
  absl::Status LoadPlan(PlanId id, absl::string_view bytes) ABSL_LOCKS_EXCLUDED(loading_mutex_);
  // Null: there is none.
  DeviceProgram* FindPlan(PlanId id) ABSL_LOCKS_EXCLUDED(loading_mutex_);
  // It has no name from now on. Null: there is none.
  std::shared_ptr<DeviceProgram> TakePlan(PlanId id) ABSL_LOCKS_EXCLUDED(loading_mutex_);

  // Or why it could not be opened: its name stands for that then.
  using OpenedCommunicator = absl::StatusOr<std::unique_ptr<Communicator>>;
  // As Executor::OpenCommunicator.
  absl::Status OpenCommunicator(CommunicatorId id, absl::Span<const int> devices, int member);
  // INVALID_ARGUMENT kUnknownName. Valid until it is closed.
  absl::StatusOr<const OpenedCommunicator*> FindCommunicator(CommunicatorId id) const;
  // Of one that is not open nothing happens, here and below.
  void AbortCommunicator(CommunicatorId id, absl::Status why);
  void CloseCommunicator(CommunicatorId id) { communicators_.erase(id); }

  FailureLog<LaunchId>* launch_failures() { return &launch_failures_; }
  FailureLog<TransferId>* upload_failures() { return &upload_failures_; }

 private:
  Backend* const backend_;
  Device* const device_;

  Mutex loading_mutex_;
  absl::flat_hash_set<PlanId> ids_ ABSL_GUARDED_BY(loading_mutex_);  // of all that are loaded
  // Plans that no call has asked for yet.
  std::vector<std::pair<PlanId, std::unique_ptr<DeviceProgram>>> arrived_
      ABSL_GUARDED_BY(loading_mutex_);
  absl::flat_hash_map<PlanId, std::unique_ptr<DeviceProgram>> plans_;
  absl::node_hash_map<CommunicatorId, OpenedCommunicator> communicators_;
  FailureLog<LaunchId> launch_failures_;
  FailureLog<TransferId> upload_failures_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_DEVICE_NAMES_H_
