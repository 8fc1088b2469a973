// What a daemon asks of a worker, and what a worker tells, as bytes.
//
// A worker has devices of one backend and an executor for each. Addresses are the daemon's: each
// domain (Backend::domain) has its own (DomainOf), and the worker is told of each piece of memory
// (MapMemory) before a message names a part of it, and when none does any more (UnmapMemory). Not
// before has its address another meaning: one that a worker does not know is of an earlier worker's
// memory, which is lost.
//
// Bytes of tensors go through the window, memory that both map, in slots: the first half goes to
// the worker, whose the slot of an Upload is until Uploaded; the second half comes from there, a
// slot of it is the daemon's from Downloaded until FreeSlot.
//
// Threads: plain data and pure functions. Ownership: copies, but for what refers to the bytes that
// were decoded, which is said. Errors: INVALID_ARGUMENT kMalformed for bytes that are no message.
#ifndef CHORUS_CORE_WORKER_PROTOCOL_H_
#define CHORUS_CORE_WORKER_PROTOCOL_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/variant.h"
#include "core/base/bytes.h"
#include "core/runtime/devices.h"
#include "core/runtime/messages.h"

namespace chorus::worker {

// Every domain's addresses begin at FirstAddressOf and end before the next one's.
inline constexpr int kDomainShift = 44;
constexpr DeviceAddress FirstAddressOf(int domain) {
  return static_cast<DeviceAddress>(domain + 1) << kDomainShift;
}
inline constexpr int64_t kDomainBytes = int64_t{1} << kDomainShift;
constexpr int DomainOf(DeviceAddress address) {
  return static_cast<int>(address >> kDomainShift) - 1;
}

inline constexpr int64_t kSlotBytes = int64_t{1} << 20;
inline constexpr int kSlots = 8;  // of each half of the window
inline constexpr int64_t kWindowBytes = 2 * kSlots * kSlotBytes;
// Plans are the longest messages to a worker; from there come events and errors.
inline constexpr size_t kLongestToWorker = size_t{1} << 30;
inline constexpr size_t kLongestToDaemon = size_t{64} << 10;

// What is sent of a message, in this order: bytes that it refers to come last.
#define CHORUS_FIELDS(...)                  \
  template <typename Self, typename Code>   \
  static void Fields(Self& m, Code& code) { \
    static_cast<void>(m);                   \
    code(__VA_ARGS__);                      \
  }

// --- To the worker ---

// The addresses from `begin` on are now a piece of `bytes` of that domain's memory. Whether there
// was so much is told to those that use it.
struct MapMemory {
  int32_t domain = 0;
  DeviceAddress begin = 0;
  int64_t bytes = 0;
  CHORUS_FIELDS(m.domain, m.begin, m.bytes)
};
// The piece that begins there is free. One that the worker does not know is ignored.
struct UnmapMemory {
  int32_t domain = 0;
  DeviceAddress begin = 0;
  CHORUS_FIELDS(m.domain, m.begin)
};
struct LoadPlan {
  int32_t device = 0;
  PlanId plan;
  absl::string_view bytes;  // refers
  CHORUS_FIELDS(m.device, m.plan, m.bytes)
};
struct UnloadPlan {
  int32_t device = 0;
  PlanId plan;
  CHORUS_FIELDS(m.device, m.plan)
};
struct OpenCommunicator {
  int32_t device = 0;
  CommunicatorId communicator;
  int32_t member = 0;
  std::vector<int32_t> devices;
  CHORUS_FIELDS(m.device, m.communicator, m.member, m.devices)
};
struct AbortCommunicator {
  int32_t device = 0;
  CommunicatorId communicator;
  absl::Status why;
  CHORUS_FIELDS(m.device, m.communicator, m.why)
};
struct CloseCommunicator {
  int32_t device = 0;
  CommunicatorId communicator;
  CHORUS_FIELDS(m.device, m.communicator)
};
struct Launch {
  int32_t device = 0;
  absl::string_view bytes;  // EncodeLaunch; refers
  CHORUS_FIELDS(m.device, m.bytes)
};
struct Abandon {
  int32_t device = 0;
  LaunchId launch;
  CHORUS_FIELDS(m.device, m.launch)
};
struct Settled {  // a launch, or an upload
  int32_t device = 0;
  LaunchId launch;
  TransferId upload;
  CHORUS_FIELDS(m.device, m.launch, m.upload)
};
// One piece of an upload: they come in order, the last is said to be.
struct Upload {
  int32_t device = 0;
  TransferId transfer;
  int32_t lane = 0;
  DeviceAddress to = 0;
  int32_t slot = 0;
  int64_t bytes = 0;
  bool is_last = false;
  CHORUS_FIELDS(m.device, m.transfer, m.lane, m.to, m.slot, m.bytes, m.is_last)
};
struct Download {
  int32_t device = 0;
  TransferId transfer;
  int32_t lane = 0;
  DeviceAddress from = 0;
  int64_t bytes = 0;
  LaunchId after;
  CHORUS_FIELDS(m.device, m.transfer, m.lane, m.from, m.bytes, m.after)
};
struct FreeSlot {
  int32_t slot = 0;
  CHORUS_FIELDS(m.slot)
};
// How much scratch a kernel of this node wants.
struct AskWorkspace {
  uint64_t question = 0;
  absl::string_view node;  // EncodeDevicePlan of a plan of this node and nothing else; refers
  CHORUS_FIELDS(m.question, m.node)
};
struct Ping {
  CHORUS_FIELDS()
};
struct Stop {  // after what has been launched
  CHORUS_FIELDS()
};

using ToWorker = absl::variant<MapMemory, UnmapMemory, LoadPlan, UnloadPlan, OpenCommunicator,
                               AbortCommunicator, CloseCommunicator, Launch, Settled, Upload,
                               Download, FreeSlot, AskWorkspace, Ping, Stop, Abandon>;
void Encode(const ToWorker& message, ByteWriter* out);
absl::StatusOr<ToWorker> DecodeToWorker(absl::string_view bytes);

// --- To the daemon ---

// Said first, once.
struct Ready {
  DevicesInfo info;
  CHORUS_FIELDS(m.info.backend, m.info.domains, m.info.cores_per_device)
};
// It could not open its devices, or has lost them, and ends.
struct NotReady {
  absl::Status why;
  CHORUS_FIELDS(m.why)
};
struct Event {
  int32_t device = 0;
  absl::string_view bytes;  // EncodeEvent; refers
  CHORUS_FIELDS(m.device, m.bytes)
};
struct Uploaded {
  int32_t slot = 0;
  CHORUS_FIELDS(m.slot)
};
struct Downloaded {
  int32_t device = 0;
  TransferId transfer;
  int32_t slot = 0;
  int64_t offset = 0;
  int64_t bytes = 0;
  CHORUS_FIELDS(m.device, m.transfer, m.slot, m.offset, m.bytes)
};
struct Workspace {
  uint64_t question = 0;
  absl::Status status;
  int64_t bytes = 0;
  CHORUS_FIELDS(m.question, m.status, m.bytes)
};
struct Pong {
  CHORUS_FIELDS()
};

using ToDaemon = absl::variant<Ready, NotReady, Event, Uploaded, Downloaded, Workspace, Pong>;
void Encode(const ToDaemon& message, ByteWriter* out);
absl::StatusOr<ToDaemon> DecodeToDaemon(absl::string_view bytes);

#undef CHORUS_FIELDS

}  // namespace chorus::worker

#endif  // CHORUS_CORE_WORKER_PROTOCOL_H_
