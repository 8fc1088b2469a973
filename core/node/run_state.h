// One run between its frame and its outcome.
//
// Threads: the node thread. Ownership: RunTable owns the runs; a run shares its session, its world,
// its graph and its cells, and keeps its buffers until it ends. Errors: none; what a run has failed
// with is told, not kept.
#ifndef CHORUS_CORE_NODE_RUN_STATE_H_
#define CHORUS_CORE_NODE_RUN_STATE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/collective/decisions.h"
#include "core/collective/vote.h"
#include "core/node/cell.h"
#include "core/node/client_target.h"
#include "core/node/graph_store.h"
#include "core/node/patience.h"
#include "core/runtime/budget.h"
#include "core/runtime/buffer.h"
#include "core/runtime/messages.h"

namespace chorus::node {

struct Session;
struct World;

struct RunState {
  enum class Phase : uint8_t {
    kWaiting,  // for producers outside its world's agreement, or for uploads
    kVoted,    // in its world's sequencer
    kFailing,  // it will not be launched; its session is told when others have had their turn
    kLaunched,
    kWriting,  // its results are there, and go into client memory
  };

  RunHandle handle;
  int64_t bytes = 0;  // of this row, as large as its graph makes it: its session is charged for it
  Sequence sequence;
  std::shared_ptr<Session> session;
  size_t index = 0;  // in the session's runs
  // Null: a local run; one that has been adopted by the world of its producers has theirs.
  std::shared_ptr<World> world;
  std::shared_ptr<GraphRecord> graph;
  LoadedPlan* plan = nullptr;            // of `graph`; in its gang's order once that is known
  std::shared_ptr<LoadedPlan> own_plan;  // where that is not the graph's main one
  Phase phase = Phase::kWaiting;
  Ticket ticket;

  absl::InlinedVector<DeviceIndex, 1> devices;  // by device slot
  absl::InlinedVector<CellRef, 2> inputs;       // by graph input; null: bound bytes
  absl::InlinedVector<CellRef, 2> outputs;      // by graph output; null: discarded
  absl::InlinedVector<TensorId, 2> output_ids;  // of `outputs`
  // Outputs that are copied into client memory when everything else is done.
  struct Into {
    int32_t output = 0;
    ClientTarget target;
  };
  std::vector<Into> intos;
  int32_t writes_left = 0;                          // of these, while kWriting
  absl::InlinedVector<BufferRef, 4> refs;           // by plan buffer: what keeps the bytes
  absl::InlinedVector<DeviceAddress, 4> addresses;  // by plan buffer
  // Bytes that its launches bring along, by graph input.
  absl::InlinedVector<LaunchMessage::Inline, 1> inlines;
  // Of bytes that come to its devices in the order of launches: by graph input.
  absl::InlinedVector<std::pair<int32_t, TransferId>, 1> uploads;
  Vote vote;                // of a run with groups
  bool vote_taken = false;  // its calls have been counted
  // By participation: the first that is of its instance, where the plan depends on it.
  absl::InlinedVector<int32_t, 1> instance_of;
  absl::optional<OneDomain> one_domain;  // where the graph's main plan is for another
  // By Plan::equal_groups: the id of the values that the group computes, under which other runs may
  // have it too (0: none can), and the buffers that they share (World::equal_work).
  struct EqualShare {
    Hash128 value_id;
    std::shared_ptr<const std::vector<BufferRef>> results;
  };
  absl::InlinedVector<EqualShare, 1> equal_work;
  // Inputs whose memory outputs take over: promised at submit, taken at launch.
  struct Donation {
    int32_t input = -1;
    TensorId id;  // its name
  };
  absl::InlinedVector<Donation, 1> donations;
  bool donated = false;  // launched with them

  // How much it waits for: runs that are not launched, whose results it needs, uploads, and tensors
  // that are being made. And the runs that need its own results, each once; so many of them not
  // any more: their entries have no handle.
  int32_t blockers = 0;
  std::vector<std::pair<CellRef, Waiters<CellRef>::Id>> awaited;  // these tensors
  absl::InlinedVector<RunHandle, 2> consumers;
  int32_t consumers_gone = 0;
  // The runs that were to compute its inputs when it came, each once (producers.h), and its index
  // among the consumers of each; -1: it is not among them.
  absl::InlinedVector<RunHandle, 2> producers;
  absl::InlinedVector<int32_t, 2> consumer_indices;
  // Those of its producers that have voted, also through local runs, each once.
  absl::InlinedVector<RunHandle, 2> voted_producers;
  int64_t looked_at = 0;  // by which look of RunTable's it was seen last

  // At launch: whether it knows its inputs' bytes, and its outputs have theirs; the instance of
  // each participation, and what each device is told.
  bool inputs_bound = false;
  bool outputs_bound = false;
  absl::InlinedVector<const LaunchedInstance*, 1> instances;
  absl::InlinedVector<LaunchMessage, 1> launches;
  absl::InlinedVector<int32_t, 1> left_out;  // groups of equal work that another run does
  CommunicatorId equal_communicator;         // of the runs that share such groups; 0: none
  int32_t launches_left = 0;
  int32_t gang = -1;  // since its launch: index in Gangs
  // Launched with donations and failed, but nothing was written over them.
  bool held_back = true;
  bool abandoned = false;  // Gangs::Abandon
  // Launched, and its failure is to be told when others have had their turn.
  bool failing = false;
  Patience patience;  // with memory that it is refused for now
  // Its failure has been told already; what is still under way only gives its memory back.
  bool failed = false;

  // It takes part in no collective.
  bool local() const { return plan->plan.votes->participations.empty(); }

  // Plan buffer `index` stands in `buffer`; null: it has no bytes.
  void SetBuffer(size_t index, const BufferRef& buffer) {
    if (!buffer) return;
    addresses[index] = buffer->address();
    refs[index] = buffer;
  }

  // For the next run: drops what refers to others and keeps what only has capacity, where that is
  // not much, for no session is charged for it.
  void Recycle() {
    handle = RunHandle();
    bytes = 0;
    session.reset();
    world.reset();
    plan = nullptr;
    own_plan.reset();
    graph.reset();
    phase = Phase::kWaiting;
    ticket = Ticket();
    devices.clear();
    inputs.clear();
    outputs.clear();
    output_ids.clear();
    intos = {};
    writes_left = 0;
    refs.clear();
    addresses.clear();
    inlines.clear();
    uploads.clear();
    vote.what.reset();
    vote.groups.clear();
    vote.bound.clear();
    vote.pair_calls.clear();
    vote.call_goes_on = false;
    vote.producers.clear();
    vote.donates = false;
    vote.results = 0;
    vote.launch_work = 1;
    vote_taken = false;
    instance_of.clear();
    one_domain.reset();
    donations.clear();
    donated = false;
    held_back = true;
    blockers = 0;
    awaited.clear();
    consumers.clear();
    consumers_gone = 0;
    producers.clear();
    consumer_indices.clear();
    voted_producers.clear();
    inputs_bound = false;
    outputs_bound = false;
    instances.clear();
    equal_work.clear();
    launches.clear();
    left_out.clear();
    equal_communicator = CommunicatorId();
    launches_left = 0;
    gang = -1;
    abandoned = false;
    patience = Patience();
    failing = false;
    failed = false;
  }
};

// Of the node thread, in pieces (core/base/work.h): of a run that is launched or fails, beside its
// steps, of each of its results, and of so many of its inputs.
inline constexpr int64_t kWorkPerRun = 8;
inline constexpr int64_t kWorkPerResult = 3;
inline constexpr int64_t kInputsOfWork = 3;
inline int64_t WorkOf(const RunState& run) {
  return kWorkPerRun + kWorkPerResult * static_cast<int64_t>(run.outputs.size()) +
         static_cast<int64_t>(run.inputs.size()) / kInputsOfWork;
}

// The devices of these runs, ascending; none where one of them has two of the runs: what the runs
// ask of their devices together would not pair up there.
inline absl::InlinedVector<DeviceIndex, 8> DevicesOf(absl::Span<RunState* const> runs) {
  absl::InlinedVector<DeviceIndex, 8> devices;
  for (const RunState* run : runs) {
    devices.insert(devices.end(), run->devices.begin(), run->devices.end());
  }
  std::sort(devices.begin(), devices.end());
  if (std::adjacent_find(devices.begin(), devices.end()) != devices.end()) devices.clear();
  return devices;
}

// Runs by handle: a slot, and which of its runs it is. A handle is never reused; its slot is, until
// its last handle. (At a million runs a second one slot after the other is used up in 25 days;
// there are four million.)
class RunTable {
 public:
  // Which run of a slot comes first is said by tests alone.
  explicit RunTable(int64_t first_serial = 1) : first_serial_(first_serial) {}

  RunState* Add() {
    RunHandle handle;
    if (free_.empty()) {
      handle = RunHandle(first_serial_ << kSlotBits | static_cast<int64_t>(runs_.size()));
      runs_.emplace_back();
    } else {
      handle = free_.back();
      free_.pop_back();
    }
    std::unique_ptr<RunState>& run = runs_[SlotOf(handle)];
    if (run == nullptr) run = std::make_unique<RunState>();
    run->handle = handle;
    ++live_;
    return run.get();
  }
  // Null when it has ended.
  RunState* Find(RunHandle handle) {
    // The handle of no run is what a free slot has: it must not be found there.
    if (handle == RunHandle()) return nullptr;
    const size_t slot = SlotOf(handle);
    if (slot >= runs_.size() || runs_[slot] == nullptr) return nullptr;
    return runs_[slot]->handle == handle ? runs_[slot].get() : nullptr;
  }
  void Remove(RunHandle handle) {
    if (Find(handle) == nullptr) return;
    const size_t slot = SlotOf(handle);
    const bool is_last = handle.value() >> kSlotBits == kLastSerial;
    if (is_last || free_.size() >= kKeptRows) {
      runs_[slot].reset();
    } else {
      // One that ended before it was charged may have anything.
      const int64_t bytes = runs_[slot]->bytes;
      if (bytes == 0 || bytes > kKeptBytes) *runs_[slot] = RunState();
      runs_[slot]->Recycle();
    }
    if (is_last) {
      ++used_up_;
    } else {
      free_.push_back(RunHandle(handle.value() + (1 << kSlotBits)));
    }
    --live_;
  }
  // Begins to look at runs, and whether this one is seen in it for the first time: what lists runs
  // in several ways goes by each once.
  int64_t BeginLook() { return ++looks_; }
  static bool FirstSeen(RunState* run, int64_t look) {
    return std::exchange(run->looked_at, look) != look;
  }
  int64_t live() const { return live_; }
  // Rows that there are, also those kept for the next runs.
  int64_t rows() const {
    return std::count_if(runs_.begin(), runs_.end(),
                         [](const auto& run) { return run != nullptr; });
  }
  // True below the number of runs that a handle can name.
  bool HasRoom() const { return live_ + used_up_ < (1 << kSlotBits) - 1; }
  template <typename Fn>
  void ForEach(Fn fn) {
    for (size_t i = 0; i < runs_.size(); ++i) {
      if (runs_[i] != nullptr && runs_[i]->handle != RunHandle()) fn(runs_[i].get());
    }
  }

 private:
  static constexpr int kSlotBits = 22;
  static constexpr int64_t kLastSerial = std::numeric_limits<int64_t>::max() >> kSlotBits;
  static size_t SlotOf(RunHandle handle) {
    return static_cast<size_t>(handle.value() & ((1 << kSlotBits) - 1));
  }

  // Of runs that have ended: nobody is charged for these rows and the capacity of their lists.
  static constexpr size_t kKeptRows = 256;
  static constexpr int64_t kKeptBytes = 16 << 10;

  const int64_t first_serial_;
  std::vector<std::unique_ptr<RunState>> runs_;  // null: a free slot
  std::vector<RunHandle> free_;                  // what the next runs in free slots get
  int64_t used_up_ = 0;                          // slots
  int64_t live_ = 0;
  int64_t looks_ = 0;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_RUN_STATE_H_
