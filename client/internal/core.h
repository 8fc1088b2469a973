// A session's log as the SDK writes it: names of tensors and graphs, lazy local ops, instances.
//
// Threads: any. The session's lock (SessionLock) guards what is annotated with session_lock; the
//   rest is atomic, or does not change once other threads can see it.
//   Destructors of tensors and tape entries may run anywhere, under the lock too: they only queue
//   what is to be released, and the queue is sent at the end of the next locked section, or at once
//   when that matters to others (tape entries, many bytes).
// Fork: the child's objects do nothing; see SessionCore::Forked.
#ifndef CHORUS_CLIENT_INTERNAL_CORE_H_
#define CHORUS_CLIENT_INTERNAL_CORE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/hash/hash.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/chorus.h"
#include "client/internal/link.h"
#include "client/internal/wait_reports.h"
#include "core/base/mutex.h"
#include "core/collective/instance.h"
#include "core/ops/op.h"
#include "core/transport/command.h"

namespace chorus {
inline namespace sdk {

class Trace;
struct Fragment;

// Stands for the lock of a session in clang's thread-safety analysis. Sessions share the name: the
// analysis cannot see that a group or a tensor belongs to the session that is locked, and no thread
// holds two of them.
class ABSL_LOCKABLE SessionLockName {};
inline SessionLockName session_lock;

// What a tensor may have to wait for: groups (of one member each) and pairs, by token, ascending.
// Local ops are sent together only where these are equal: an op never waits for a collective that
// it does not depend on, which could be waiting for what comes after the op on another rank.
using Dependences = std::vector<int64_t>;  // interned by the session

// A type that tensors share; interned by the session, so equal types are equal pointers.
struct TensorInfo {
  TensorType type;
  Shape shape;
  int64_t elements = 0;
  int64_t bytes = 0;
};

struct TensorTypeHash {
  size_t operator()(const TensorType& type) const {
    using Part = std::tuple<size_t, int64_t, int32_t>;
    size_t hash = static_cast<size_t>(type.dtype);
    for (const Dim& dim : type.dims) hash = absl::Hash<Part>()(Part(hash, dim.size, dim.symbol));
    return hash;
  }
};

// Why a tensor has no value, known without the daemon. Where this rank's part of a collective was
// refused here, its member and the epoch that ended by it.
struct Failure {
  absl::Status status;
  std::shared_ptr<MemberCore> member;
  int64_t epoch = 0;
};

// A tensor of the session, without its history. Immutable but for its way from recorded to sent.
struct TensorData {
  enum class State : uint8_t {
    kLazy,      // a value of the session's pending fragment
    kSent,      // named to the daemon
    kInline,    // a number that travels with the runs that use it
    kHost,      // a few bytes of the trainer's that the daemon has not got yet: they travel with
                // the compiled runs that use them, and get a name at their first other use
    kExternal,  // a staging arena of the trainer's
    kTraced,    // a value of a function that is being compiled
    kAbsent,    // this rank gets no result
    kFailed,
  };

  explicit TensorData(std::shared_ptr<SessionCore> s) : session(std::move(s)) {}
  ~TensorData();
  TensorData(const TensorData&) = delete;
  TensorData& operator=(const TensorData&) = delete;

  const std::shared_ptr<SessionCore> session;
  const TensorInfo* info = nullptr;  // null: absent or failed
  int32_t device_slot = 0;
  // kLazy -> kSent or kFailed, kHost -> kSent: under the lock, last.
  std::atomic<State> state{State::kLazy};
  TensorId id;         // kSent
  Sequence producer;   // kSent, kAbsent (0: nothing to wait for)
  int32_t value = -1;  // kLazy, kTraced: its number there
  Fragment* fragment ABSL_GUARDED_BY(session_lock) = nullptr;  // kLazy
  const Dependences* after = nullptr;      // collectives it may have to wait for; null: none
  Trace* trace = nullptr;                  // kTraced
  InlineData inline_data;                  // kInline, kHost
  ExternalRange external;                  // kExternal
  char* staging = nullptr;                 // kExternal: where it is here
  std::shared_ptr<const Failure> failure;  // kFailed
};

using TensorDataPtr = std::shared_ptr<TensorData>;
using TensorDatas = absl::InlinedVector<TensorDataPtr, 1>;

// What a collective's signature has beside one type: the types of inputs that differ, and counts.
// Interned by the session.
struct CallShape {
  std::vector<const TensorInfo*> inputs;  // empty: all of one type
  std::vector<int64_t> counts;
  // Counts at run time, as in Collective.
  int32_t runtime_counts_input = -1;
  int64_t runtime_count_maximum = 0;

  friend bool operator==(const CallShape& a, const CallShape& b) {
    return a.inputs == b.inputs && a.counts == b.counts &&
           a.runtime_counts_input == b.runtime_counts_input &&
           a.runtime_count_maximum == b.runtime_count_maximum;
  }
  template <typename H>
  friend H AbslHashValue(H h, const CallShape& s) {
    return H::combine(std::move(h), s.inputs, s.counts, s.runtime_counts_input,
                      s.runtime_count_maximum);
  }
};

// What decides which graph an eager collective is.
struct CallKey {
  const OpDef* op = nullptr;
  Reduction reduction = Reduction::kNone;
  bool wants_grad = false;
  bool bound = false;     // its instance is bound, not the next one
  bool declared = false;  // `info` is the type that the call names for its result
  int32_t root = -1;
  int32_t peer = -1;
  int32_t num_inputs = 0;
  int64_t tag = 0;
  const TensorInfo* info = nullptr;  // else of the first input
  const CallShape* shape = nullptr;  // null: that is all
  // Where the call was made. Files are compared by address: another one is only another entry.
  CallSite site;
  const std::string* source = nullptr;  // interned; instead of `site`

  friend bool operator==(const CallKey& a, const CallKey& b) {
    return a.info == b.info && a.site.line == b.site.line && a.site.file == b.site.file &&
           a.source == b.source && a.op == b.op && a.shape == b.shape &&
           a.reduction == b.reduction && a.wants_grad == b.wants_grad && a.bound == b.bound &&
           a.declared == b.declared && a.root == b.root && a.peer == b.peer &&
           a.num_inputs == b.num_inputs && a.tag == b.tag;
  }
  template <typename H>
  friend H AbslHashValue(H h, const CallKey& k) {
    return H::combine(std::move(h), k.op, k.shape, k.reduction, k.wants_grad, k.bound, k.declared,
                      k.root, k.peer, k.num_inputs, k.tag, k.info,
                      static_cast<const void*>(k.site.file), k.site.line, k.source);
  }
};

struct GroupCore;

// One of the collectives of an eager run, as a member calls it.
struct CallPart {
  GroupCore* group = nullptr;
  CallKey key;
  absl::InlinedVector<TensorData*, 2> inputs;  // this session's and not failed
  InstanceKey instance;                        // out
};

struct CallEntry {
  Run& run() { return absl::get<Run>(command.body); }

  struct Part {
    std::shared_ptr<const NodeSpec> spec;               // without inputs
    absl::InlinedVector<const TensorInfo*, 1> outputs;  // extras last
    int32_t rank = 0;     // place of its member among those that the run holds
    int32_t visible = 0;  // outputs that are no extras
    Saved saved;          // what the gradient rule uses
  };
  Command command;  // a run, with the names of the last call
  absl::InlinedVector<Part, 1> parts;
};

// A group as one member sees it. Owned by its member for the session's life: the counters are the
// names of its instances.
struct GroupCore {
  MemberCore* member = nullptr;
  GroupId id;
  // Not guarded: only a Reform changes them, and no other thread may use the group meanwhile.
  std::vector<int> ranks;                                // world ranks, by place
  int rank = -1;                                         // this member's place
  std::atomic<bool> alive{true};                         // false: gone with a Reform
  std::atomic<int64_t> generation{0};                    // counts Reforms
  int64_t next_index ABSL_GUARDED_BY(session_lock) = 0;  // in the member's epoch
  struct Pair {
    int64_t next = 0;   // index in the member's epoch
    int64_t token = 0;  // 0: none yet
  };
  // By peer, direction (1: send) and tag.
  absl::flat_hash_map<std::pair<std::pair<int32_t, int32_t>, int64_t>, Pair> pairs
      ABSL_GUARDED_BY(session_lock);
  // What its results depend on; null: none so far.
  const Dependences* after ABSL_GUARDED_BY(session_lock) = nullptr;
  // Calls seen, and the last one: a loop asks for the same again.
  absl::flat_hash_map<CallKey, std::unique_ptr<CallEntry>> calls ABSL_GUARDED_BY(session_lock);
  // Runs of several collectives, of this group's members in this session; this one's is the first.
  using BatchKey = std::vector<std::pair<GroupCore*, CallKey>>;
  absl::flat_hash_map<BatchKey, std::unique_ptr<CallEntry>> batches ABSL_GUARDED_BY(session_lock);
  CallKey last_key ABSL_GUARDED_BY(session_lock);
  CallEntry* last_entry ABSL_GUARDED_BY(session_lock) = nullptr;
};

class MemberCore : public std::enable_shared_from_this<MemberCore> {
 public:
  MemberCore(std::shared_ptr<SessionCore> s, std::string n)
      : session(std::move(s)), name(std::move(n)) {}

  const std::shared_ptr<SessionCore> session;
  const std::string name;
  WorldId world;
  int device_slot = 0;
  GroupCore* everybody = nullptr;  // the first of the groups
  std::atomic<int> rank{-1};
  std::atomic<int> size{0};
  std::atomic<int64_t> epoch{0};
  // All members of its world are this session's, and call together: they enter epochs together, and
  // whoever differentiates takes part for all. Set before the member is used.
  std::atomic<bool> in_device_group{false};
  std::deque<std::unique_ptr<GroupCore>> groups ABSL_GUARDED_BY(session_lock);
  // Runs with collectives of this epoch whose good end has not been seen.
  std::deque<Sequence> runs ABSL_GUARDED_BY(session_lock);
};

// Local ops that have been recorded and not sent yet.
struct Fragment {
  struct Op {
    NodeSpec spec;  // inputs: >= 0 a value of the fragment, < 0: ~ place among its inputs
    std::vector<TensorType> types;
    int32_t first_value = 0;
    absl::InlinedVector<std::weak_ptr<TensorData>, 1> outputs;
  };
  const Dependences* after = nullptr;
  std::vector<GraphInput> input_types;
  std::vector<Binding> inputs;
  std::vector<Op> nodes;
  int32_t num_values = 0;
};

class SessionCore : public std::enable_shared_from_this<SessionCore> {
 public:
  SessionCore(std::unique_ptr<Link> link, absl::Duration wait_timeout,
              WaitReportOptions reports = {});
  ~SessionCore();

  Link& link() { return *link_; }
  absl::Duration wait_timeout() const { return wait_timeout_; }
  const WaitReports& reports() const { return reports_; }
  int device_count() const { return static_cast<int>(devices_.size()); }
  DeviceIndex device(int slot) const { return devices_[slot]; }

  // True in a child of the process that opened the session. Any thread, no lock.
  bool Forked() const;

  // --- The log --------------------------------------------------------------------------------
  const TensorInfo* Intern(const TensorType& type) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  const std::string* InternSource(const std::string& source)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // Dependences of what needs both.
  const Dependences* Union(const Dependences* a, const Dependences* b)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // What a group's results depend on.
  const Dependences* AfterGroup(GroupCore* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // The next command of the log: gives it its sequence.
  absl::StatusOr<Sequence> SubmitLocked(Command* command)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  absl::StatusOr<Sequence> SubmitLocked(CommandBody body)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // Adds a local op to a pending fragment. `inputs` are this session's and not failed.
  TensorDatas AppendLocked(NodeSpec spec, absl::Span<const TensorDataPtr> inputs,
                           absl::Span<const TensorType> outputs)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Sends all pending fragments. What fails to be sent marks its tensors.
  void FlushLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  const CallShape* InternShape(CallShape shape) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Sends collectives as one run: of one group, or of its members in this session. Each takes its
  // member's next instance, or (one alone) the one that is `bound`. Gives the run's sequence; hands
  // each result to `add`, with the place of its part and its number among that part's outputs.
  absl::StatusOr<Sequence> CollectivesLocked(
      absl::Span<CallPart> parts, const InstanceKey* bound, const CallEntry** entry,
      absl::FunctionRef<void(size_t part, size_t output, TensorDataPtr)> add)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Drops the graphs of all calls of a group.
  void ForgetCallsLocked(GroupCore* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Forgets what calls of the past had that was interned, once it is much. No key of a call may be
  // in use.
  void TrimShapesLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // The name of the next instance of `group` that `call` takes, and counts it.
  static InstanceKey NextInstance(GroupCore* group, CollectiveKind kind, int32_t peer, int64_t tag)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // Registers a graph under a new name.
  absl::StatusOr<GraphId> RegisterLocked(const std::string& encoded)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  void ReleaseGraphLocked(GraphId graph) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  absl::StatusOr<TensorId> NewTensorIdLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  TensorDataPtr NewSentLocked(const TensorInfo* info, int32_t device_slot, TensorId id,
                              Sequence producer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  Binding BindingOf(const TensorData& data) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // A tensor with a copy of `bytes`: the daemon's, or, where they are few, kHost.
  absl::StatusOr<TensorDataPtr> FromHostLocked(const TensorInfo* info, int32_t device_slot,
                                               const char* bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Makes a kHost tensor one of the daemon's; nothing to do for others.
  absl::Status NameLocked(TensorData* data) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // A tensor that `data`'s staging memory holds now: the trainer may write there afterwards.
  absl::StatusOr<TensorDataPtr> FreezeLocked(const TensorData& data)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // Notes that `run` takes part in `member`'s world.
  void CountRunLocked(MemberCore* member, Sequence run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Notes a run of this session, for Throttle.
  void CountUnderWayLocked(Sequence run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Moves a member, and those of its device group, out of an epoch that has ended, if it is still
  // in it.
  void EnterEpochLocked(MemberCore* member, int64_t ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  void AddMemberLocked(const std::shared_ptr<MemberCore>& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
    members_.push_back(member);
  }

  // --- Waiting --------------------------------------------------------------------------------
  // Waits while as many runs are under way as a daemon lets a session have: called before one more
  // is recorded. Errors of runs are not its business.
  void Throttle() ABSL_LOCKS_EXCLUDED(session_lock);
  // Waits until `data` is computed; enters the epochs that its failure ended.
  absl::Status Wait(const TensorDataPtr& data, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(session_lock);
  // Waits for a run's end, at most the session's wait_timeout.
  absl::Status WaitForRun(Sequence run) ABSL_LOCKS_EXCLUDED(session_lock);
  // Copies out what Wait has seen.
  absl::Status ReadTensor(const TensorDataPtr& data, char* out) ABSL_LOCKS_EXCLUDED(session_lock);
  absl::StatusOr<const char*> MapTensor(const TensorDataPtr& data)
      ABSL_LOCKS_EXCLUDED(session_lock);
  // What handing out `status` to the caller means for the members' epochs.
  void OnError(const absl::Status& status) ABSL_LOCKS_EXCLUDED(session_lock);
  absl::Status Close() ABSL_LOCKS_EXCLUDED(session_lock);

  // --- Queues, also under the lock ------------------------------------------------------------
  void Retire(const TensorData& data);
  void RetireTape(DropTape::Entry entry);
  // Sends what is queued if anybody may be waiting for it. Under the lock, its end does that.
  void DrainIfUrgent();

 private:
  friend class SessionLock;

  struct StagingBlock {
    Link::Staging staging;
    int64_t bytes = 0;
    int64_t used = 0;
    Sequence last;  // the last command that reads from it
  };

  struct Created {
    TensorId id;
    Sequence sequence;
  };
  absl::StatusOr<Created> CreateLocked(const TensorInfo* info, int32_t device_slot, Binding source)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // `all`: also the few tensors that could wait for company.
  void DrainLocked(bool all) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  void FlushLocked(Fragment* fragment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  absl::Status SendLocked(Fragment* fragment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  int32_t FragmentInput(Fragment* fragment, const TensorDataPtr& data)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  const Dependences* InternDependences(Dependences set) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  const Dependences* After(const CallPart& part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  void EnterAloneLocked(MemberCore* member, int64_t ended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  absl::StatusOr<StagingBlock*> StagingLocked(int64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  absl::StatusOr<CallEntry*> EntryLocked(absl::Span<const CallPart> parts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  absl::StatusOr<std::unique_ptr<CallEntry>> MakeEntryLocked(absl::Span<const CallPart> parts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  Link* const link_;  // owned, but for a forked child
  const absl::Duration wait_timeout_;
  const WaitReports reports_;
  const std::vector<DeviceIndex> devices_;
  const uint64_t fork_count_;

  Mutex mutex_;  // what session_lock stands for
  bool closed_ ABSL_GUARDED_BY(session_lock) = false;
  absl::Status broken_ ABSL_GUARDED_BY(session_lock);  // the log takes nothing any more
  int64_t next_sequence_ ABSL_GUARDED_BY(session_lock) = 1;
  // Runs whose end has not been seen.
  std::deque<Sequence> under_way_ ABSL_GUARDED_BY(session_lock);
  std::atomic<size_t> under_way_count_{0};
  int32_t next_tensor_ ABSL_GUARDED_BY(session_lock) = 0;
  // With the generation to use next.
  std::vector<TensorId> free_tensors_ ABSL_GUARDED_BY(session_lock);
  int32_t next_graph_ ABSL_GUARDED_BY(session_lock) = 0;
  std::vector<GraphId> free_graphs_ ABSL_GUARDED_BY(session_lock);
  // One for each set of dependences; reused.
  std::vector<std::unique_ptr<Fragment>> open_ ABSL_GUARDED_BY(session_lock);
  absl::flat_hash_map<Dependences, std::unique_ptr<const Dependences>> dependences_
      ABSL_GUARDED_BY(session_lock);
  int64_t next_token_ ABSL_GUARDED_BY(session_lock) = 1;
  // By encoded graph.
  absl::flat_hash_map<std::string, GraphId> fragments_ ABSL_GUARDED_BY(session_lock);
  absl::flat_hash_map<TensorType, std::unique_ptr<TensorInfo>, TensorTypeHash> infos_
      ABSL_GUARDED_BY(session_lock);
  absl::flat_hash_map<CallShape, std::unique_ptr<const CallShape>> shapes_
      ABSL_GUARDED_BY(session_lock);
  absl::flat_hash_map<std::string, std::unique_ptr<std::string>> sources_
      ABSL_GUARDED_BY(session_lock);
  std::vector<std::unique_ptr<StagingBlock>> staging_ ABSL_GUARDED_BY(session_lock);
  std::vector<std::weak_ptr<MemberCore>> members_ ABSL_GUARDED_BY(session_lock);

  // What destructors leave. Its own lock, held for a few instructions.
  struct Retired {
    std::vector<TensorId> tensors;
    std::vector<ArenaId> arenas;
    std::vector<DropTape::Entry> tapes;
    int64_t bytes = 0;
  };
  Mutex retired_mutex_;
  Retired retired_ ABSL_GUARDED_BY(retired_mutex_);
  std::atomic<bool> urgent_{false};
};

// Holds a session's lock. In a forked child, or when the session is closed or lost, status() says
// so. In the child nothing is locked: whoever goes on there without an OK status holds no lock,
// which the analysis cannot see, as it looks into no constructor or destructor.
class ABSL_SCOPED_LOCKABLE SessionLock {
 public:
  explicit SessionLock(SessionCore* core) ABSL_EXCLUSIVE_LOCK_FUNCTION(session_lock);
  ~SessionLock() ABSL_UNLOCK_FUNCTION();
  SessionLock(const SessionLock&) = delete;
  SessionLock& operator=(const SessionLock&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  SessionCore* const core_;
  bool held_ = false;
  absl::Status status_;
};

absl::Status ForkedError();
std::string SourceOf(CallSite site);
// `status` with the call site, where it has none.
absl::Status WithSource(const absl::Status& status, const std::string& source);
// `status` of one of the calls of a coalesced one.
absl::Status AtPlace(const absl::Status& status, size_t place);

}  // namespace sdk
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_CORE_H_
