// The executor boundary: messages in, events out.
//
// One executor owns one device, its streams and its ends of communicators. Its plans, launches and
// events are plain bytes, so that an executor can live in another process (one worker a GPU)
// without any change above it. So nothing that is asked for is answered by the call.
//
// Threads: said at Executor. Ownership: it shares nothing with its caller; the backend outlives it.
// Errors: said at each function; of launches, at Executor.
#ifndef CHORUS_CORE_RUNTIME_EXECUTOR_H_
#define CHORUS_CORE_RUNTIME_EXECUTOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/backend/backend.h"
#include "core/runtime/messages.h"

namespace chorus {

// Threads: one thread makes all calls, but LoadPlan, which any thread may make, beside them.
// Events come on any thread, perhaps inside the call that asks, each once; they must not call the
// executor.
// Failure: a kernel or a communicator that fails in the middle does not stop the launch: everything
//   is enqueued (so that peers do not wait for this device) and the completion has the first error.
class Executor {
 public:
  using OnEvent = std::function<void(absl::string_view event)>;  // DecodeEvent
  virtual ~Executor() = default;

  // Ends with a LoadedMessage, until which the bytes must stand. Takes time for each step of the
  // plan. INVALID_ARGUMENT: bytes that are no plan, or an id that is taken. UNIMPLEMENTED: an op or
  // dtype that this build does not run. INTERNAL: an op without a kernel here.
  virtual void LoadPlan(PlanId id, absl::string_view plan) = 0;
  // No launch of it is under way, nor will be. Returns what is left of it, if that is here: to let
  // go of it, on any thread, takes time for each step, and its memory is there until then.
  virtual std::shared_ptr<void> UnloadPlan(PlanId id) = 0;
  // Ends with an OpenedMessage. Launches that follow may use it: where it could not be opened their
  // calls in it fail for the same reason, and those of its other members wait until it is aborted.
  // INVALID_ARGUMENT: an id that is taken; else as Backend::OpenCommunicator.
  virtual void OpenCommunicator(CommunicatorId id, absl::Span<const int> devices, int member) = 0;
  // Ends the calls that wait in it, with `why`; for what later calls do see Communicator. Unknown
  // ids are ignored, here and below.
  virtual void AbortCommunicator(CommunicatorId id, absl::Status why) = 0;
  // No call of this device is under way in it, or it has been aborted.
  virtual void CloseCommunicator(CommunicatorId id) = 0;
  // Enqueues one launch; never waits. A failure comes as its completion. Where nothing of it can be
  // enqueued, the communicators that it names are aborted, and with them the calls there of all
  // launches; of one whose bytes cannot be read none is known. Of a large one a slice is enqueued,
  // so that the caller has time for others, and true is returned: then Continue(), the next slice,
  // must be called until it returns false. What must come behind waits inside, in the order of the
  // calls. Lanes (messages.h) take turns.
  static constexpr int64_t kSliceSteps = 64;
  virtual bool Launch(absl::string_view launch) = 0;
  virtual bool Continue() = 0;
  // Of a plan of collectives alone, the call that has binding `binding`, with its operands at these
  // buffers and all members taking part: for who runs it in place of a launch, as
  // Backend::at_once_bytes says. Null: there is no such plan or call here. Valid until it is filled
  // again.
  virtual const CollectiveCall* FillCall(PlanId /*plan*/, size_t /*binding*/,
                                         absl::Span<const DeviceAddress> /*buffers*/) {
    return nullptr;
  }
  // Nobody wants what this launch makes, nor what is made of that: kernels that have not begun are
  // left out. One of which something may have been left out completes with kCancelled, if with no
  // other failure.
  virtual void Abandon(LaunchId launch) = 0;
  // No launch that follows reads what this one, which has ended, wrote: nobody more will ask
  // whether it has failed. That is kept of each that has until then.
  virtual void Settled(LaunchId launch) = 0;
  virtual void Settled(TransferId upload) = 0;
  // Copies between host memory and the device, on a stream of their lane's own beside the launches'
  // work; each ends with a TransferredMessage, until which the host memory must stand. Ids ascend.
  // Launches of the lane that follow an Upload see it; a Download sees what launch `after` wrote
  // (none: nothing to wait for).
  virtual void Upload(TransferId id, int32_t lane, DeviceAddress to, const void* from,
                      int64_t bytes) = 0;
  virtual void Download(TransferId id, int32_t lane, void* to, DeviceAddress from, int64_t bytes,
                        LaunchId after) = 0;
  // After a LostMessage, of devices that can be lost: a caller that uses this one knows that
  // nothing that was loaded or opened is there any more, and goes on with the device as it is
  // started again. Until then everything ends with kDeviceLost.
  virtual void Recover() {}
  // What it does, does not end: it is ended by force where that can be done, and the device lost.
  virtual void Kill(absl::string_view /*why*/) {}
};

// An executor in this process over device `index` of `backend`, which must outlive it. Its
// destructor waits for the launches under way: abort communicators whose peers will not come, and
// let the executors that launch together Continue() to the end.
struct DeviceExecutorOptions {
  int64_t slice_steps = Executor::kSliceSteps;
  // Sees each launch before it is bound, and may change its addresses. What it refuses is the
  // launch's completion. Null: nobody does.
  std::function<absl::Status(LaunchMessage* launch)> prepare;
};
std::unique_ptr<Executor> CreateDeviceExecutor(Backend* backend, int index,
                                               Executor::OnEvent on_event,
                                               DeviceExecutorOptions options = {});

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_EXECUTOR_H_
