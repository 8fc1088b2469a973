// The executor boundary: bytes in, bytes out.
//
// One executor owns one device, its streams and its ends of communicators. Its plans, launches and
// completions are plain bytes, so that an executor can live in another process (one worker a GPU)
// without any change above it.
#ifndef CHORUS_CORE_RUNTIME_EXECUTOR_H_
#define CHORUS_CORE_RUNTIME_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/backend/backend.h"
#include "core/base/bytes.h"

namespace chorus {

// Ids of the node's choosing, unique per executor.
using PlanId = uint64_t;
using LaunchId = uint64_t;  // ascending; the order of launches
using CommunicatorId = uint64_t;

// Launches of one executor are enqueued in the order of the calls, on two streams: local ops on
// one, collectives on the other. Within a launch the plan orders them. Between launches there is
// order where `after` says so (and, for collectives, the order of the calls): list the launches
// whose results are read, or whose workspace is used again.
struct LaunchMessage {
  struct CollectiveBinding {
    CommunicatorId communicator = 0;  // 0: none; only the barrier behind equal work may go without
    absl::InlinedVector<int32_t, 8> present;  // members that take part; empty: all
    int32_t rank = -1;                        // whose call it is, for texts: of the world
  };
  LaunchId launch = 0;
  PlanId plan = 0;
  absl::InlinedVector<DeviceAddress, 8> buffers;          // the plan's buffer table
  absl::InlinedVector<CollectiveBinding, 1> collectives;  // in the plan's order
  absl::InlinedVector<LaunchId, 4> after;    // earlier launches on this device to wait for
  absl::InlinedVector<int32_t, 4> left_out;  // groups of equal work that another device does
  // Outputs stand where donated inputs do: nothing is written there before everything else is
  // complete, nor when anything has failed, here or in one of `after`.
  bool hold_back = false;
  // The communicator of all devices that launch together with this one, of which some hold back: if
  // anything has failed on one of them, nothing is written on any. 0: there are no others.
  CommunicatorId commit = 0;
};
void EncodeLaunch(const LaunchMessage& message, ByteWriter* out);
absl::StatusOr<LaunchMessage> DecodeLaunch(absl::string_view bytes);

struct CompletionMessage {
  LaunchId launch = 0;
  absl::Status status;
  bool held_back = false;  // of a failed launch that was to hold back: the inputs are intact
  // A kernel of this launch has failed: `status` is its own, not what came from a peer.
  bool is_origin = false;
};
void EncodeCompletion(const CompletionMessage& message, ByteWriter* out);
absl::StatusOr<CompletionMessage> DecodeCompletion(absl::string_view bytes);

// Threads: one thread makes all calls. Completions come on any thread, perhaps inside Launch, each
// launch exactly once; they must not call the executor.
// Failure: a kernel or a communicator that fails in the middle does not stop the launch: everything
//   is enqueued (so that peers do not wait for this device) and the completion has the first error.
class Executor {
 public:
  using OnCompletion = std::function<void(absl::string_view completion)>;
  virtual ~Executor() = default;

  // INVALID_ARGUMENT: bytes that are no plan, or an op without a kernel here.
  virtual absl::Status LoadPlan(PlanId id, absl::string_view plan) = 0;
  virtual void UnloadPlan(PlanId id) = 0;  // launches under way keep it
  virtual absl::Status OpenCommunicator(CommunicatorId id, absl::Span<const int> devices,
                                        int member) = 0;
  // Ends the calls that wait in it, with `why`; for what later calls do see Communicator. Unknown
  // ids are ignored, here and below.
  virtual void AbortCommunicator(CommunicatorId id, absl::Status why) = 0;
  // Launches under way keep it until they are complete.
  virtual void CloseCommunicator(CommunicatorId id) = 0;
  // Enqueues one launch; never waits. A failure comes as its completion.
  virtual void Launch(absl::string_view launch) = 0;
  // Copies between host memory and the device, on a stream of their own beside the launches' work.
  // Launches that follow an Upload see it; a Download sees what launch `after` wrote (0: nothing to
  // wait for). The host memory must stand until `done`, which is called as completions are.
  virtual void Upload(DeviceAddress to, const void* from, int64_t bytes,
                      std::function<void(absl::Status)> done) = 0;
  virtual void Download(void* to, DeviceAddress from, int64_t bytes, LaunchId after,
                        std::function<void(absl::Status)> done) = 0;
};

// An executor in this process over device `index` of `backend`, which must outlive it. Its
// destructor waits for the launches under way: abort communicators whose peers will not come.
std::unique_ptr<Executor> CreateDeviceExecutor(Backend* backend, int index,
                                               Executor::OnCompletion on_completion);

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_EXECUTOR_H_
