// What the node keeps of one session: its log, its names, its shared memory, its memberships.
//
// Threads: the node thread.
#ifndef CHORUS_CORE_NODE_SESSION_H_
#define CHORUS_CORE_NODE_SESSION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/unique_fd.h"
#include "core/node/cell.h"
#include "core/node/graph_store.h"
#include "core/node/node.h"
#include "core/node/timers.h"
#include "core/node/waiters.h"
#include "core/transport/command.h"
#include "core/transport/completion.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"

namespace chorus {

struct World;

// What belongs to who a session acts for. One set of result arenas for each: a descriptor exposes
// its whole file, so arenas are never shared across tenants; within a tenant they are, which keeps
// touched memory for its next world.
struct Tenant {
  std::string name;
  ArenaSet::Ptr arenas;
  // The largest holders of its memory, in words, and when they were looked for.
  std::string holders;
  absl::Time holders_at = absl::InfinitePast();
};

// The last outcomes of a log, by sequence.
class OutcomeLog {
 public:
  static constexpr int64_t kKept = 1024;
  struct Record {
    int64_t sequence = 0;
    bool done = false;
    absl::StatusCode code = absl::StatusCode::kOk;
    ErrorId error;
  };

  // `sequence` has been taken from the log.
  void Begin(Sequence sequence) {
    if (records_.empty()) records_.resize(kKept);  // an idle session keeps none
    records_[Slot(sequence)] = {sequence.value(), false, absl::StatusCode::kOk, ErrorId()};
  }
  void Finish(Sequence sequence, absl::StatusCode code, ErrorId error) {
    Record& record = records_[Slot(sequence)];
    if (record.sequence == sequence.value()) record = {sequence.value(), true, code, error};
  }
  // Null when it is not among the last kKept.
  const Record* Find(Sequence sequence) const {
    if (records_.empty() || sequence.value() <= 0) return nullptr;
    const Record& record = records_[Slot(sequence)];
    return record.sequence == sequence.value() ? &record : nullptr;
  }

 private:
  static size_t Slot(Sequence sequence) { return static_cast<size_t>(sequence.value() % kKept); }
  std::vector<Record> records_;
};

struct Session : std::enable_shared_from_this<Session> {
  struct TensorSlot {
    uint32_t generation = 0;
    CellRef cell;
  };
  struct GraphSlot {
    uint32_t generation = 0;
    std::shared_ptr<GraphRecord> record;
    absl::Status refused;  // why there is no record of this generation: runs of it are told
  };
  // A frame that came before its predecessor.
  struct HeldFrame {
    std::string frame;
    std::vector<LocalNode::OnOutcome> done;
  };
  struct Membership {
    std::shared_ptr<World> world;
    Rank rank;
    Epoch epoch{1};  // that the session has entered
  };

  SessionId id;
  OpenSessionRequest request;
  SessionState state = SessionState::kActive;
  std::shared_ptr<Tenant> tenant;
  std::vector<DeviceIndex> devices;
  absl::Duration lease;
  absl::Time lease_until = absl::InfiniteFuture();
  TimerQueue::Id lease_timer;
  TimerQueue::Id detach_timer;

  // The log.
  int64_t next_sequence = 1;
  std::map<int64_t, HeldFrame> held;
  TimerQueue::Id gap_timer;
  OutcomeLog outcomes;
  absl::flat_hash_map<int64_t, Waiters<Outcome>> outcome_waiters;  // none is empty

  // Its names.
  std::vector<TensorSlot> tensors;
  std::vector<GraphSlot> graphs;
  int64_t live_tensors = 0;
  int64_t live_graphs = 0;
  absl::flat_hash_map<ArenaId, std::shared_ptr<Arena>> staging;
  int64_t staging_bytes = 0;
  int64_t pending_runs = 0;

  // Shared memory of an attached session.
  std::unique_ptr<SessionMemory> memory;
  std::unique_ptr<SubmissionRingReader> ring;
  absl::Time last_frame = absl::InfinitePast();  // that came through it
  std::unique_ptr<CompletionWriter> completions;
  UniqueFd wake_fd;
  bool has_news = false;  // published, but nobody has been woken for it yet

  std::vector<Membership> memberships;

  bool dead() const { return state == SessionState::kDead; }
};

}  // namespace chorus

#endif  // CHORUS_CORE_NODE_SESSION_H_
