// The commands of a session's log, and their frames.
//
// A session's effects on ids happen in the order of its log. Every transport carries the same
// frames: the ring as they are, gRPC as messages that proto/convert turns into these structs. A
// frame comes from a process that may be hostile and may still be writing: it is copied out first,
// then decoded (every count and index checked against the bytes at hand), then used.
//
// Threads: plain data. Ownership: a decoded command has copies of all that it names.
//
// Errors: DecodeFrame says them: INVALID_ARGUMENT (MALFORMED).
#ifndef CHORUS_CORE_TRANSPORT_COMMAND_H_
#define CHORUS_CORE_TRANSPORT_COMMAND_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/variant.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/collective/instance.h"
#include "core/transport/frame_format.h"

namespace chorus {

// A range of one of the session's staging arenas.
struct ExternalRange {
  ArenaId arena;
  int64_t offset = 0;            // bytes
  std::vector<int64_t> strides;  // elements; empty: row-major
};

struct InlineData {
  static constexpr size_t kMaxBytes = 64;
  absl::InlinedVector<char, kMaxBytes> bytes;
};

using Binding = absl::variant<TensorId, InlineData, ExternalRange>;

struct OutBinding {
  enum class Kind : uint8_t { kFresh = 0, kInto = 1, kDiscard = 2 };
  Kind kind = Kind::kDiscard;
  TensorId id;         // kFresh
  ExternalRange into;  // kInto: a copy of its own, when the run's other results are there
};

// A group that a run uses, for one group slot of its graph.
struct RunGroup {
  WorldId world;
  GroupId group;
  Epoch epoch;
  // The position of each held member's next call of the group, in slot order. Empty: what the
  // daemon has counted.
  absl::InlinedVector<CallPosition, 1> base;
};

struct RegisterGraph {
  GraphId graph;
  std::string encoded;   // EncodeGraph(); empty when it is in `staged`
  ExternalRange staged;  // for graphs that are too large for a frame
  int64_t staged_bytes = 0;
};

struct Run {
  GraphId graph;
  absl::InlinedVector<Binding, 2> inputs;
  absl::InlinedVector<OutBinding, 2> outputs;
  absl::InlinedVector<RunGroup, 1> groups;  // one for each group slot
  // The number of the next call at each end of a pair that the graph's collectives use, in the
  // order of their first nodes. Empty: what the daemon has counted.
  absl::InlinedVector<int64_t, 1> pair_calls;
  bool call_goes_on = false;           // the last call of each member has more parts, in later runs
  std::vector<InstanceKey> instances;  // one for each instance slot
  absl::InlinedVector<bool, 2> donate;  // by input; empty: none
  std::vector<DeviceIndex> devices;     // one for each device slot; empty: the session's, in order
  uint64_t gang = 0;                    // reserved: id of a gang that is known already
};

// Drops names; memory goes when its last reference does.
struct Release {
  std::vector<TensorId> tensors;
  std::vector<GraphId> graphs;
  std::vector<ArenaId> arenas;  // of staging; commands before this one may still read it
};

// Makes a tensor from bytes: they are copied into daemon memory before the outcome is published.
struct CreateTensor {
  TensorId tensor;
  TensorType type;
  DeviceIndex device;
  // Inline, or a range of one of the session's staging arenas (an unattached session fills those by
  // Tensors.Write). Never a TensorId.
  Binding source;
  // The trainer's file:line, for an error's text; at most kMaxSourceLineBytes, or empty.
  std::string call_site;
};

// Asks that these tensors be readable by the host (in a result arena). Nothing to do where the
// backend's memory is the host's.
struct MakeReadable {
  static constexpr size_t kMaxTensors = 1024;
  std::vector<TensorId> tensors;
};

// The client's tape entries for these instances are gone.
struct DropTape {
  static constexpr size_t kMaxEntries = 512;
  struct Entry {
    WorldId world;
    GroupRank member;  // of the key's group: the tape's owner
    InstanceKey key;
    bool consumed = false;
  };
  std::vector<Entry> entries;
};

// Withdraws a run of this session. Commit wins: a launched run completes.
struct Cancel {
  Sequence run;
};

// The session enters the epoch after the one whose cause it has received.
struct EnterEpoch {
  WorldId world;
  Epoch epoch;
};

// Calls that members held here have made and could not take part in: they count, and `epoch` ends
// for all members with `why`, unless others have passed these positions already. The command fails
// with that error, which says which epoch is open.
struct Refuse {
  static constexpr size_t kMaxMembers = 1024;
  static constexpr size_t kMaxCalls = 1024;  // RefusedCalls and gradients, of all members together

  WorldId world;
  Epoch epoch;
  bool by_hand = false;                // the epoch is ended on purpose: ABORTED, not PEER_REFUSED
  std::vector<RefusedMember> members;  // the first is named; 1 to kMaxMembers
  // Used: code (not kOk), reason, message and source, each of at most Error::kMaxBytes; alone: what
  // the calls were to use has failed without ending an epoch, and neither do they.
  Error why;
};

using CommandBody = absl::variant<RegisterGraph, Run, CreateTensor, MakeReadable, Release, DropTape,
                                  Cancel, EnterEpoch, Refuse>;

struct Command {
  Sequence sequence;
  CommandBody body;
};

// A command's frame (frame_format.h); numbers of the body are varints. Appends to `out`. Every
// Command has an encoding; one that breaks the limits (of size, of inline bytes, of strides, a
// negative name) is refused when it is decoded, with the same text on every transport. Canonical:
// equal commands give equal bytes.
void EncodeFrame(const Command& command, ByteWriter* out);

// INVALID_ARGUMENT (MALFORMED): the bytes are not one whole frame; the text says which field.
// UNIMPLEMENTED (VERSION): another frame version. What decodes encodes to the same bytes again.
// Checks form only: names may not exist, and a graph's bytes are DecodeGraph's.
absl::StatusOr<Command> DecodeFrame(absl::string_view frame);

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_COMMAND_H_
