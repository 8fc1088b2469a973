// The hardware seam: devices, streams, events, memory, communicators.
//
// Shaped for asynchronous devices: everything that takes time is enqueued on a stream and returns
// at once; work on one stream runs in order, work on different streams in any order unless an event
// orders it. `host` runs streams as strands on a thread pool; `sim` runs them in an adversarial,
// seeded order in an address space of its own; `cuda` hands them to a GPU that its devices
// share; `fault` wraps another backend and makes things go wrong, by a script.
//
// Threads: a Device and what it makes are thread-compatible: one executor makes every call.
//   Communicator::Abort may come from any thread. Callbacks run on threads of the backend, or
//   inside a call that enqueues work on any of its streams; they must not block, and may enqueue.
// Ownership: streams, events and communicators must not outlive their device, nor it its backend.
//   Destroying a stream does not stop the work on it. Destroying a communicator ends the calls of
//   other members that wait for this one with ABORTED. Destroying the backend waits for work that
//   is running and drops work that waits: its callbacks never run.
// Errors: what can be refused is refused where it is asked for, by a status. What fails later is
//   the status of the stream's next Callback, and breaks a communicator (see there).
#ifndef CHORUS_CORE_BACKEND_BACKEND_H_
#define CHORUS_CORE_BACKEND_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/graph/graph.h"
#include "core/ops/kernel.h"  // IWYU pragma: export
#include "core/tensor/type.h"

namespace chorus {

struct NodeView;  // core/ops/node_spec.h

// Asked by a collective when its turn comes on a member's stream: what it says, if it is not OK,
// ends the call on all members, as if it had failed. Asked on any thread; it must not block or call
// the backend.
class Veto {
 public:
  virtual ~Veto() = default;
  virtual absl::Status status() = 0;
};

// One member's part in a collective. Members of one communicator enqueue the same calls in the same
// order; the i-th call of each member meets the i-th of the others.
//
// A piece is what goes from one member to another: its count is stated by the sender (of its input)
// and by the receiver (of its output), and the two must agree. How many inputs and outputs a kind
// has on a member is its row's `in` and `out` (core/graph/collective_kind.h, PiecesOn), in the
// order of the members; where a row gives them to the root alone, the others' may be any, and
// nobody reads or writes them. A caller that fills a call again with operands of the same number
// allocates nothing.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::kUnspecified;
  Reduction reduction = Reduction::kNone;
  DType dtype = DType::kUnspecified;
  int32_t root = -1;  // broadcast, reduce, gather, scatter: member; send, recv: the peer
  int64_t count = 0;  // elements of every piece; of every input, or output, whose list is empty
  std::vector<int64_t> input_counts;   // elements of each of `inputs`, or empty
  std::vector<int64_t> output_counts;  // elements of each of `outputs`, or empty
  // Which members take part, ascending; empty: all. Members that are missing do not enqueue. They
  // give zeros (a missing root as well), and to a reduction nothing: it leaves them out. So none
  // may be missing from PRODUCT, MIN, MAX and BAND, which zeros would change. Calls meet among
  // equal sets of members: the i-th call of each member with this set. A send or recv meets in the
  // pair of its two members.
  std::vector<int32_t> present;
  std::vector<DeviceAddress> inputs;
  // Members of one domain may pass equal addresses (one copy of an equal result): such a result is
  // written once. 0 for an output with elements: the caller, whose domain is the producer's, reads
  // the producer's memory itself (no move), the call only orders. An output may be the very input
  // that goes into it (reduce_scatter: the one for this member); other overlaps are not allowed.
  std::vector<DeviceAddress> outputs;

  // --- Kinds that reduce. core/backend/reduction.h has the rules of their bits; AVG divides by the
  // number of all members, also where some are missing. ---

  // PREMUL_SUM: this member's factor, f64 for f64 and else f32; read when the call runs.
  DeviceAddress factor = 0;
  // MIN, MAX: one f32 for each element of each of `inputs`, or empty (0 for some: not wanted). The
  // number of members whose element holds the result (equals it, +0 and -0 too; is NaN where the
  // result is) where this member's element does, else 0. Each member asks for itself.
  std::vector<DeviceAddress> holders;
  // PRODUCT: copies of what is reduced for this member: one from each, with the rules of
  // `outputs`; or empty. On every member (reduce: on the root); each member asks for itself.
  std::vector<DeviceAddress> factors;

  // --- Kinds with a piece for each member, or from each ---

  // The rows of the pieces are only known when the call runs. Where there is a list of operands
  // otherwise there is one tensor of all of them: each a run of whole rows, in member order, from
  // the first row on. Rows of an output, of holders and of factors behind the last piece become
  // zeros. Nothing may overlap. The counts above say nothing.
  //
  // Counts are copied when the call runs, then checked: one that is negative or beyond its tensor,
  // a piece of which its members state different rows, and members of a reduce_scatter that state
  // different rows end the call with INVALID_ARGUMENT on all members, before anything is written.
  struct RuntimeCounts {
    // i64, of each member that has an input: the rows for each member (all_gather, gather: one
    // number, the rows of its input that count).
    DeviceAddress sends = 0;
    // i64, or 0 (whatever comes): the rows expected from each member (reduce_scatter, scatter: one
    // number, its own rows). A member that is missing gives as many rows of zeros, else none; what
    // all_gather's members expect of it must be equal.
    DeviceAddress receives = 0;
    // i64, or 0 (not wanted): written as `receives` would be, for what came.
    DeviceAddress received = 0;
    int64_t row_elements = 0;  // equal on all members
    int64_t input_rows = 0;    // of the whole input; 0 where there is none
    int64_t output_rows = 0;
    // Whose call it is, for texts: the world rank, or -1, and the trainer's line.
    int32_t rank = -1;
    std::string source;
  };
  absl::optional<RuntimeCounts> runtime;
  // This member's; null: nobody is asked. Must stand until a Callback behind the call.
  Veto* veto = nullptr;
};

// A point in a stream's work. Recorded again, it means the latest record.
class Event {
 public:
  virtual ~Event() = default;
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual void Record(Event* event) = 0;
  // What follows on this stream starts after the event's record (as of this call) has passed.
  virtual void Wait(const Event* event) = 0;
  virtual void Launch(KernelCall call) = 0;
  // Within the memory of the stream's domain; between domains bytes move in communicators.
  virtual void Copy(DeviceAddress to, DeviceAddress from, int64_t bytes) = 0;
  virtual void CopyFromHost(DeviceAddress to, const void* from, int64_t bytes) = 0;
  virtual void CopyToHost(void* to, DeviceAddress from, int64_t bytes) = 0;
  // Runs `done` when everything before it has passed. `status` is the first failure on this stream
  // since the last Callback on it, or OK; a failed item does not stop those behind it.
  virtual void Callback(std::function<void(absl::Status status)> done) = 0;
};

// Failure: after Abort, or after a call failed, the communicator is broken: calls that wait for a
//   peer end with the abort's or the failed call's status, and later ones are refused with it:
//   which of the two it is for a call is a race. Only destruction is useful. The streams stay
//   usable.
class Communicator {
 public:
  virtual ~Communicator() = default;
  // INVALID_ARGUMENT (counts, root, members, operands) and UNIMPLEMENTED (kind, dtype, reduction):
  // checked before anything is enqueued; still usable. A call that disagrees with the call of
  // another member that it meets is enqueued, and ends with INTERNAL on all of them: at once,
  // before anything waits for the rest of them. So do calls that members make in different orders,
  // in one communicator or in several, as soon as they wait for each other for that reason.
  virtual absl::Status Enqueue(const CollectiveCall& call, Stream* stream) = 0;
  virtual void Abort(absl::Status why) = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  // RESOURCE_EXHAUSTED with need and free. Aligned to 64 bytes at least.
  virtual absl::StatusOr<DeviceAddress> Allocate(int64_t bytes) = 0;
  virtual void Free(DeviceAddress address) = 0;
  virtual std::unique_ptr<Stream> CreateStream() = 0;
  // These two on any thread, beside all other calls.
  virtual std::unique_ptr<Event> CreateEvent() = 0;
  // The kernel of a local node that passed InferTypes (core/ops/registry.h), with the output types
  // that it gave; both are only read during the call. INTERNAL: the op has no kernel here.
  virtual absl::StatusOr<std::unique_ptr<Kernel>> MakeKernel(
      const NodeView& node, absl::Span<const TensorType> outputs) = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual absl::string_view name() const = 0;  // "host"
  virtual int device_count() const = 0;
  // Processors (of a GPU, multiprocessors) that compute for each device; devices may share them.
  virtual int cores_per_device() const = 0;
  virtual Device* device(int index) = 0;
  // True: device addresses are pointers of this process, so that arenas are device memory. All
  // devices are of one domain then.
  virtual bool host_addressable() const = 0;
  // Collectives that read and write no more than so many bytes may also be run by whoever would
  // call them, without communicators and streams, once their operands are there (CollectiveWork):
  // for small ones that takes less. 0: none may.
  virtual int64_t at_once_bytes() const { return 0; }
  // Devices of one domain share an address space: work on each of them may read and write what was
  // allocated on any, and results that are equal may be one. An address of one domain means nothing
  // in another, where it may stand for something else. Domains are numbered from 0.
  virtual int domain(int device) const = 0;
  // Scratch for MakeKernel's kernel of such a node, by its attributes and types alone. From any
  // thread. Failure: as MakeKernel.
  virtual absl::StatusOr<int64_t> WorkspaceBytes(const NodeView& node,
                                                 absl::Span<const TensorType> outputs) const = 0;
  // Member `member` of the communicator of `devices` (indices; members on one device must enqueue
  // on different streams). Members of the same `id` meet; an id is free again when all its members
  // are gone. The call does not wait for the others. INVALID_ARGUMENT: devices that differ from
  // those of the id's other members, or a member that is open already.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> OpenCommunicator(
      uint64_t id, absl::Span<const int> devices, int member) = 0;
  // Why the devices are of no use any more: whatever is asked of them from then on fails. OK: they
  // are of use, as those of a backend without hardware always are. From any thread, in callbacks
  // too.
  virtual absl::Status lost() const { return absl::OkStatus(); }
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_BACKEND_H_
