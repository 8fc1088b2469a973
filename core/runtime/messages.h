// What goes to an executor and comes back, as bytes: launches and events.
//
// An executor may be in another process, so both cross as plain bytes, and a decoder trusts
// nothing.
//
// Threads: plain data and pure functions. Ownership: copies. Errors: INVALID_ARGUMENT kMalformed
// for bytes that are no message.
#ifndef CHORUS_CORE_RUNTIME_MESSAGES_H_
#define CHORUS_CORE_RUNTIME_MESSAGES_H_

#include <cstddef>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/variant.h"
#include "core/backend/backend.h"
#include "core/base/bytes.h"
#include "core/base/ids.h"

namespace chorus {

// Ids of the node's choosing, unique per executor; 0: none.
using PlanId = StrongId<struct PlanIdTag, uint64_t>;
using LaunchId = StrongId<struct LaunchIdTag, uint64_t>;  // ascending; the order of launches
using CommunicatorId = StrongId<struct CommunicatorIdTag, uint64_t>;
using TransferId = StrongId<struct TransferIdTag, uint64_t>;

// A device's work is in lanes, numbered from 0: launches and transfers of one wait for each other
// as said below, and never for those of another. So whose work has nothing to do with each other's
// has a lane of its own. What is read must have been written in the same lane, or have ended.
inline constexpr int32_t kMaxLanes = 16;

// Launches of one lane are enqueued in the order of the calls, on two streams: local ops on one,
// collectives on the other. Within a launch the plan orders them. Between launches there is order
// where `after` says so (and, for collectives, the order of the calls): list the launches whose
// results are read, or whose workspace is used again.
struct LaunchMessage {
  struct CollectiveBinding {
    CommunicatorId communicator;  // none: only the barrier behind equal work may go without
    absl::InlinedVector<int32_t, 8> present;  // members that take part; empty: all
    int32_t rank = -1;                        // whose call it is, for texts: of the world
  };
  // A few bytes that come along, such as a learning rate: no transfer, for which the host would
  // have to wait first.
  struct Inline {
    static constexpr size_t kMaxBytes = 64;
    int32_t buffer = 0;  // of the table; they stand there before anything of the launch runs
    absl::InlinedVector<char, kMaxBytes> bytes;
  };
  LaunchId launch;
  int32_t lane = 0;
  PlanId plan;
  absl::InlinedVector<DeviceAddress, 8> buffers;          // the plan's buffer table
  absl::InlinedVector<CollectiveBinding, 1> collectives;  // in the plan's order
  absl::InlinedVector<LaunchId, 4> after;      // earlier launches of this lane to wait for
  absl::InlinedVector<TransferId, 1> uploads;  // earlier ones of this lane whose bytes it reads
  absl::InlinedVector<int32_t, 4> left_out;    // groups of equal work that another device does
  absl::InlinedVector<Inline, 1> inlines;
  // Outputs stand where donated inputs do: nothing is written there before everything else is
  // complete, nor when anything has failed, here, in one of `after` or of `uploads`. Where nothing
  // of that may fail (MayFail of core/ops/op.h), that costs nothing.
  bool hold_back = false;
  // The communicator of all devices that launch together with this one, of which some hold back: if
  // anything has failed on one of them, nothing is written on any. None: there are no others.
  CommunicatorId commit;
};
void EncodeLaunch(const LaunchMessage& message, ByteWriter* out);
absl::StatusOr<LaunchMessage> DecodeLaunch(absl::string_view bytes);
// Of an encoded launch; none, and 0: it is none.
LaunchId LaunchOf(absl::string_view bytes);
int32_t LaneOf(absl::string_view bytes);
// The same into a message whose memory is used again; false: it does not decode, and what the
// message holds is unspecified, but for `launch` where the head came whole.
bool DecodeLaunchInto(absl::string_view bytes, LaunchMessage* message);

// What has become of what an executor was asked for, each once.
struct CompletionMessage {
  LaunchId launch;
  absl::Status status;
  bool held_back = false;  // of a failed launch that was to hold back: the inputs are intact
  // A kernel of this launch has failed, or a communicator could not be opened here: `status` is its
  // own, not what came from a peer.
  bool is_origin = false;
};
struct LoadedMessage {
  PlanId plan;
  absl::Status status;
};
struct OpenedMessage {
  CommunicatorId communicator;
  absl::Status status;
};
struct TransferredMessage {
  TransferId transfer;
  absl::Status status;
};
// The device is lost, with all that was loaded, opened and written there; what it had been asked
// for has ended before. See Executor::Recover.
struct LostMessage {
  absl::Status status;
};
using EventMessage =
    absl::variant<CompletionMessage, LoadedMessage, OpenedMessage, TransferredMessage, LostMessage>;
void EncodeEvent(const EventMessage& message, ByteWriter* out);
absl::StatusOr<EventMessage> DecodeEvent(absl::string_view bytes);

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_MESSAGES_H_
