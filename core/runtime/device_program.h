// A device's part of a plan as it is launched: kernels made, calls filled in but for addresses.
//
// Threads: plain data; whoever launches it fills its calls in, one launch at a time. Ownership: of
// its kernels, which must not outlive their device's backend. Errors: said at LoadProgram.
#ifndef CHORUS_CORE_RUNTIME_DEVICE_PROGRAM_H_
#define CHORUS_CORE_RUNTIME_DEVICE_PROGRAM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/backend/backend.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/messages.h"

namespace chorus {

struct DeviceProgram {
  // A call is large beside a kernel's step, and most steps are kernels.
  struct LoadedCall {
    CollectiveCall call;
    // Which of its operands there are, where call.runtime is.
    bool sends = false;
    bool receives = false;
    bool received = false;
    size_t binding = 0;
  };
  struct LoadedStep {
    DevicePlan::StreamId stream = DevicePlan::StreamId::kCompute;
    const Kernel* kernel = nullptr;  // null: a collective
    std::unique_ptr<LoadedCall> collective;
    int32_t wait = -1;
    int32_t record = -1;
    bool held_back = false;
    int32_t equal_group = -1;
    absl::InlinedVector<DevicePlan::Location, 2> inputs;
    absl::InlinedVector<DevicePlan::Location, 1> outputs;
    DevicePlan::Location workspace;
  };
  // Where that is in a launch with these buffers; 0: it is nothing.
  static DeviceAddress AddressOf(const DevicePlan::Location& location,
                                 absl::Span<const DeviceAddress> buffers);
  // The call of a step that is one, its operands at these buffers. Valid until it is filled again.
  static const CollectiveCall& FillCall(LoadedStep* step, absl::Span<const DeviceAddress> buffers,
                                        const LaunchMessage::CollectiveBinding& binding);

  size_t num_buffers = 0;
  size_t num_bindings = 0;
  size_t num_equal_groups = 0;
  bool uses[DevicePlan::kStreams] = {false, false};  // by stream
  bool kernels_may_fail = false;
  std::vector<LoadedStep> steps;
  std::vector<std::unique_ptr<Kernel>> kernels;
};

// `bytes` are EncodeDevicePlan's. On any thread, beside whatever else the device does. Failure: as
// Executor::LoadPlan.
absl::StatusOr<std::unique_ptr<DeviceProgram>> LoadProgram(absl::string_view bytes, Device* device);

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_DEVICE_PROGRAM_H_
