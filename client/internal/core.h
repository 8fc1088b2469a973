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

#include <algorithm>
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

// Stands for the lock of a session in clang's thread-safety analysis. Sessions share the name: the
// analysis cannot see that a group or a tensor belongs to the session that is locked, and no thread
// holds two of them.
class ABSL_LOCKABLE SessionLockName {};
inline SessionLockName session_lock;

// What collectives of a group (of one member), or at one end of a pair, have given.
struct Origin {
  explicit Origin(int64_t n) : number(n) {}
  const int64_t number;                         // in the session
  Sequence last ABSL_GUARDED_BY(session_lock);  // run of theirs
};
using OriginPtr = std::shared_ptr<Origin>;

// What a tensor may have to wait for, by number. Local ops are sent together only where these are
// equal: an op never waits for a collective that it does not depend on, which could be waiting for
// what comes after the op on another rank. Interned by the session: equal sets are equal pointers.
// Null: nothing.
using Dependences = std::vector<OriginPtr>;
using DependencesPtr = std::shared_ptr<const Dependences>;

// A type that tensors share; interned by the session, so equal types are equal pointers.
struct TensorInfo;
using TensorInfoPtr = std::shared_ptr<const TensorInfo>;
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

// One object for all keys that are equal, as long as anybody has it: rows that nobody has any more
// go once they may be as many as the others.
template <typename Key, typename T, typename Hash = absl::Hash<Key>>
class InternTable {
 public:
  // `make` gives the T of a key that has none.
  template <typename Make>
  std::shared_ptr<const T> Get(const Key& key, const Make& make) {
    const auto found = rows_.find(key);
    if (found != rows_.end()) return found->second;
    if (rows_.size() >= trim_at_) {
      absl::erase_if(rows_, [](const auto& row) { return row.second.use_count() == 1; });
      trim_at_ = std::max(kLeast, 2 * rows_.size());
    }
    return rows_.emplace(key, make()).first->second;
  }
  size_t size() const { return rows_.size(); }

 private:
  static constexpr size_t kLeast = 256;
  absl::flat_hash_map<Key, std::shared_ptr<const T>, Hash> rows_;
  size_t trim_at_ = kLeast;
};

// Why a tensor has no value, known without the daemon.
struct Failure {
  absl::Status status;
  bool told = false;  // it is a call that was refused here, and the other ranks know
};

// A tensor of the session, without its history. Immutable but for its way from recorded to sent.
struct TensorData {
  enum class State : uint8_t {
    kLazy,      // a value of one of the session's pending fragments
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
  TensorInfoPtr info;  // null: absent or failed
  int32_t device_slot = 0;
  // kLazy -> kSent or kFailed, kHost -> kSent: under the lock, last.
  std::atomic<State> state{State::kLazy};
  TensorId id;        // kSent
  Sequence producer;  // kSent, kAbsent (0: nothing to wait for)
  // kSent: the last run that it was given to, which may stand there now; 0: none.
  std::atomic<int64_t> given_to{0};
  int32_t value = -1;  // kLazy, kTraced: its number there
  // kLazy: the number of the fragment that makes it.
  int64_t fragment ABSL_GUARDED_BY(session_lock) = 0;
  DependencesPtr after;                    // collectives it may have to wait for
  Trace* trace = nullptr;                  // kTraced
  InlineData inline_data;                  // kInline, kHost
  ExternalRange external;                  // kExternal
  char* staging = nullptr;                 // kExternal: where it is here
  std::shared_ptr<const Failure> failure;  // kFailed
};

using TensorDataPtr = std::shared_ptr<TensorData>;
using TensorDatas = absl::InlinedVector<TensorDataPtr, 1>;

// A collective as a member calls it: a NodeSpec whose texts have not been made. To make and hash
// them would cost a call two thirds more (docs/performance.md): NodeSpecOf makes them of calls that
// have not been seen before.
struct CollectiveSpec {
  CollectiveSpec() = default;
  CollectiveSpec(const OpDef* o, CallSite where) : op(o), site(where) { collective.kind = o->kind; }

  const OpDef* op = nullptr;         // NodeSpec's op and version
  Collective collective;             // but for group slot, rank and part, which the call gives
  const TensorType* type = nullptr;  // the result's, where no input has it: NodeSpec's attributes
  // The line of the call: NodeSpec's source. Files are compared by address: another one is only
  // another entry.
  CallSite site;
  const std::string* source = nullptr;  // instead of `site`
};

// What decides which graph an eager collective is: `type` and `source` are interned, so they are
// compared by address, like the types of inputs. Its entry keeps these.
struct CallKey {
  CollectiveSpec spec;
  absl::InlinedVector<const TensorInfo*, 2> types;  // of inputs; one, where all are of one
  int32_t num_inputs = 0;

  friend bool operator==(const CallKey& a, const CallKey& b) {
    return a.types == b.types && a.spec.site.line == b.spec.site.line &&
           a.spec.site.file == b.spec.site.file && a.spec.source == b.spec.source &&
           a.spec.op == b.spec.op && a.spec.type == b.spec.type && a.num_inputs == b.num_inputs &&
           a.spec.collective == b.spec.collective;
  }
  template <typename H>
  friend H AbslHashValue(H h, const CallKey& k) {
    const Collective& c = k.spec.collective;
    return H::combine(std::move(h), k.types, k.num_inputs, k.spec.op, k.spec.type,
                      static_cast<const void*>(k.spec.site.file), k.spec.site.line, k.spec.source,
                      c.root.value(), c.reduction, c.wants_grad, c.leads_to_collective,
                      c.leads_to_leaf, c.peer.value(), c.tag, c.instance.kind, c.counts,
                      c.runtime_counts_input, c.runtime_count_maximum);
  }
};

struct GroupCore;

// A run as whoever wants one describes it; SessionCore::SubmitRun decides the rest, which is its
// sequence and the names of its results. May be kept and submitted again.
struct RunDraft {
  struct Result {
    TensorInfoPtr info;
    int32_t device_slot = 0;
    TensorDataPtr lazy;  // the tensor whose value it is; null: a new one
  };

  RunDraft() : command{Sequence(), Run()} {}
  Run& run() { return absl::get<Run>(command.body); }
  const Run& run() const { return absl::get<Run>(command.body); }

  Command command;      // a Run with the bindings of its groups; of its inputs, where no operands
  std::string encoded;  // the graph of a fragment; empty: the run names one
  // What is bound to the inputs: this session's.
  absl::InlinedVector<const TensorData*, 2> operands;
  std::vector<Result> results;
  // New results depend on these, each of one origin, and on what the operands depend on.
  absl::InlinedVector<DependencesPtr, 1> origins;
};

// One of the collectives of an eager run, as a member calls it.
struct CallPart {
  GroupCore* group = nullptr;
  CallKey key;
  TensorInfoPtr declared;                      // keeps the key's type
  absl::InlinedVector<TensorData*, 2> inputs;  // this session's and not failed
  InstanceKey instance;                        // as counted
};

// A call that takes several runs, which share its position: coalesced, of very many tensors, or a
// trainer's own memory in pieces.
struct CallInRuns {
  bool begun = false;
  bool last = false;  // set before the last run
  CallPosition next;  // of the first collective of its next run
};

// Of the parts before `p`, the last that is of the same call: of the same member, and of no pair.
// Null: `p` is the first.
const CallPart* PartBefore(absl::Span<const CallPart> parts, size_t p);

struct CallEntry {
  struct Part {
    std::shared_ptr<const NodeSpec> spec;         // without inputs
    absl::InlinedVector<TensorInfoPtr, 2> types;  // of its key
    size_t outputs = 0;                           // extras last
    int32_t rank = 0;     // place of its member among those that the run holds
    int32_t visible = 0;  // outputs that are no extras
    Saved saved;          // what the gradient rule uses
  };
  RunDraft draft;  // with the bindings of the last call
  absl::InlinedVector<Part, 1> parts;
};

// One end of a pair of members as the member at that end sees it: what it sends to a peer with a
// tag, or receives from it.
struct PairEnd {
  int32_t peer = -1;  // by place in the group
  bool send = false;
  int64_t tag = 0;

  friend bool operator==(const PairEnd& a, const PairEnd& b) {
    return a.peer == b.peer && a.send == b.send && a.tag == b.tag;
  }
  friend bool operator<(const PairEnd& a, const PairEnd& b) {
    return std::tie(a.peer, a.send, a.tag) < std::tie(b.peer, b.send, b.tag);
  }
  template <typename H>
  friend H AbslHashValue(H h, const PairEnd& e) {
    return H::combine(std::move(h), e.peer, e.send, e.tag);
  }
};

// What a member has called of a group in its step. Positions are names: every call counts once,
// whatever becomes of it. The group's own calls have one count, each end of a pair has one.
class GroupCounters {
 public:
  int64_t next() const { return next_; }
  // Counts so many calls; where they begin.
  int64_t Count(int64_t calls) { return std::exchange(next_, next_ + calls); }
  int64_t Count(const PairEnd& end, int64_t calls) {
    int64_t& next = ends_[end].next;
    return std::exchange(next, next + calls);
  }
  // Where results at an end come from; null at first.
  OriginPtr& OriginAt(const PairEnd& end) { return ends_[end].origin; }
  // A new step. Ends that had no call in the last one are forgotten: tags that come and go must not
  // fill the table.
  void Reset();

 private:
  struct End {
    int64_t next = 0;
    OriginPtr origin;
  };
  int64_t next_ = 0;
  absl::flat_hash_map<PairEnd, End> ends_;
};

// A group as one member sees it. Owned by its member as long as that lives: the counters are the
// names of its instances, and only World::Step and Reform set them back. A daemon lets a world have
// so many groups and no more.
struct GroupCore {
  MemberCore* member = nullptr;
  GroupId id;
  // Not guarded: only a Reform changes them, and no other thread may use the group meanwhile.
  std::vector<int> ranks;              // world ranks, by place
  int rank = -1;                       // this member's place
  std::atomic<bool> alive{true};       // false: gone with a Reform
  std::atomic<int64_t> generation{0};  // counts Reforms
  GroupCounters counters ABSL_GUARDED_BY(session_lock);
  // What its results depend on; null: none so far.
  DependencesPtr after ABSL_GUARDED_BY(session_lock);
  // Calls seen, and the last one: a loop asks for the same again.
  absl::flat_hash_map<CallKey, std::unique_ptr<CallEntry>> calls ABSL_GUARDED_BY(session_lock);
  // Runs of several collectives, of this group's members in this session; this one's is the first.
  using BatchKey = std::vector<std::pair<GroupCore*, CallKey>>;
  absl::flat_hash_map<BatchKey, std::unique_ptr<CallEntry>> batches ABSL_GUARDED_BY(session_lock);
  CallKey last_key ABSL_GUARDED_BY(session_lock);
  CallEntry* last_entry ABSL_GUARDED_BY(session_lock) = nullptr;
};

// What a call is as a node of one of the group's graphs, `part` of its call.
NodeSpec NodeSpecOf(const CollectiveSpec& call, const GroupCore& group, int32_t part);

// The end of a pair whose calls these are, of a kind that has a peer.
inline PairEnd EndOf(const Collective& collective) {
  return {collective.peer.value(), collective.kind == CollectiveKind::kSend, collective.tag};
}
// Source and destination of what goes through an end.
std::pair<GroupRank, GroupRank> Between(const GroupCore& group, const PairEnd& end);

// A world all of whose members are one session's and go together: with the last of them (of the
// handles, and of what was recorded with them) the session leaves it, once its runs there are over.
class OwnWorld {
 public:
  explicit OwnWorld(std::shared_ptr<SessionCore> s) : session_(std::move(s)) {}
  ~OwnWorld();
  OwnWorld(const OwnWorld&) = delete;
  OwnWorld& operator=(const OwnWorld&) = delete;

  struct Gone {
    WorldId world;
    std::vector<Rank> ranks;
    Sequence runs_before;  // its runs have lower ones; 0: not known yet
  };
  void Add(const MemberCore& gone);

 private:
  const std::shared_ptr<SessionCore> session_;
  Mutex mutex_;
  Gone gone_ ABSL_GUARDED_BY(mutex_);
};

// A member of a world, as long as a handle of it, or a tape entry or compiled function that was
// recorded with it, lives. The graphs of its calls go with it, or when it leaves.
class MemberCore : public std::enable_shared_from_this<MemberCore> {
 public:
  MemberCore(std::shared_ptr<SessionCore> s, std::string n)
      : session(std::move(s)), name(std::move(n)) {}
  ~MemberCore();

  const std::shared_ptr<SessionCore> session;
  const std::string name;
  WorldId world;
  int device_slot = 0;
  bool compares_lines = false;     // WorldOptions::check_call_sites
  GroupCore* everybody = nullptr;  // the first of the groups
  std::atomic<int> rank{-1};
  std::atomic<int> size{0};
  std::atomic<int64_t> epoch{0};
  std::atomic<int64_t> step{0};
  // All members of its world are this session's, and call together: whoever differentiates takes
  // part for all, and nobody else waits for them. Set before the member is used.
  std::atomic<bool> in_device_group{false};
  std::shared_ptr<OwnWorld> own_world;  // null: it leaves when it is told to. Set before, too.
  std::atomic<bool> left{false};        // it was told to
  Epoch since ABSL_GUARDED_BY(session_lock);  // with which its membership began
  std::deque<std::unique_ptr<GroupCore>> groups ABSL_GUARDED_BY(session_lock);
  // Requests of NewGroup in the step, by list.
  absl::flat_hash_map<std::vector<int>, int64_t> group_requests ABSL_GUARDED_BY(session_lock);
  // Why it takes part in nothing more in this step: it is not known what it would have called.
  absl::Status out_of_line ABSL_GUARDED_BY(session_lock);
  // Tape entries with collectives of it from before this order have no gradient any more: a call
  // for gradients was refused, and what it would have asked for is not known.
  std::atomic<uint64_t> tapes_lost_before{0};
  absl::Status why_tapes_lost ABSL_GUARDED_BY(session_lock);
};

// Local ops that have been recorded and not sent yet. It is open from its first op until it is
// sent, and gone then; its number is never another's, so a value of it cannot be taken for one of
// those that come after it.
struct Fragment {
  Fragment(int64_t n, DependencesPtr a) : number(n), after(std::move(a)) {}

  struct Op {
    NodeSpec spec;  // inputs: >= 0 a value of the fragment, < 0: ~ place among its inputs
    std::vector<TensorType> types;
    int32_t first_value = 0;
    absl::InlinedVector<std::weak_ptr<TensorData>, 1> outputs;
  };
  const int64_t number;
  const DependencesPtr after;
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
  TensorInfoPtr Intern(const TensorType& type) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  const std::string* InternSource(const std::string& source)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // Makes *both the dependences of what needs *both and `other`. Few origins are kept, and those
  // beyond only as long as a run of theirs may be under way.
  void Join(DependencesPtr* both, const DependencesPtr& other)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock) {
    if (other == nullptr || *both == other) return;
    if (*both == nullptr) {
      *both = other;
    } else {
      JoinSets(both, *other);
    }
  }
  // What the results of a group's calls depend on, beside its inputs.
  const DependencesPtr& OriginOf(GroupCore* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // The next command of the log: gives it its sequence. INVALID_ARGUMENT kMalformed: it cannot be
  // sent, and the sequence is the next one's.
  absl::StatusOr<Sequence> SubmitLocked(Command* command)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  absl::StatusOr<Sequence> SubmitLocked(CommandBody body)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // Adds a local op to the open fragment of its dependences. `inputs` are this session's and not
  // failed. What other fragments make is sent first.
  TensorDatas AppendLocked(NodeSpec spec, absl::Span<const TensorDataPtr> inputs,
                           absl::Span<const TensorType> outputs)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // The one way to send a run: sends what is pending, unless that is what the draft is made of,
  // binds the operands, names all results or none, counts the run for Throttle, and adds the
  // results to *results. Not OK: the run was not sent and has taken no name; the error is an
  // operand's own, or says why.
  absl::StatusOr<Sequence> SubmitRun(RunDraft* draft, TensorDatas* results)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Sends all pending fragments. What fails to be sent marks its tensors.
  void FlushLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // Counts a call of each member that takes part, and names its collectives: done once for every
  // call, whatever becomes of it. Where `runs` is given and has begun, it goes on with that call.
  // Uses of a part: group, and op, peer and tag of its key's spec.
  static void CountCallLocked(absl::Span<CallPart> parts, CallInRuns* runs)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Sends collectives that are counted as one run: of one group, or of its members in this session.
  // `bound`: it is one alone, and a gradient. Results are those of the entry's parts, in order.
  absl::StatusOr<Sequence> CollectivesLocked(absl::Span<CallPart> parts, bool bound,
                                             const CallInRuns* runs, const CallEntry** entry,
                                             TensorDatas* results)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Drops the graphs of all calls of a group.
  void ForgetCallsLocked(GroupCore* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Forgets calls of the past with what they had that was interned, once it is much. No key of a
  // call may be in use.
  void TrimCallsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // --- What cannot be called --------------------------------------------------------------------
  // Others must not wait for it: the daemon is told, which ends the epoch for everybody unless they
  // have passed these calls. A command for each world; `why` is filled in when they are sent.
  using Refusals = absl::InlinedVector<Refuse, 1>;
  // What is refused of a member: of its step, and from its epoch.
  static RefusedMember* RefusedOf(MemberCore* member, Refusals* refusals)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  static void AddRefused(absl::Span<const CallPart> parts, Refusals* refusals)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // It is not known what this session's members would have called: they are out of line until their
  // next steps. Those of device groups call together, and are not meant.
  void PutOutOfLineLocked(const absl::Status& why, Refusals* refusals)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Of entries from before `order`, as MemberCore says. `members` empty: of all of this session's
  // but those of device groups. `ends_epoch` false: others have been told of the cause already.
  void LoseTapesLocked(absl::Span<MemberCore* const> members, uint64_t order,
                       const absl::Status& why, bool ends_epoch, Refusals* refusals)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Sends them. What comes back is for AwaitRefused, without the lock.
  std::vector<Sequence> RefuseLocked(Refusals refusals, const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Waits until the daemon has told the others, and enters the epochs that are open now. `why` as
  // the daemon has recorded it.
  absl::Status AwaitRefused(const std::vector<Sequence>& sent, const absl::Status& why)
      ABSL_LOCKS_EXCLUDED(session_lock);
  // The same of the rest of a call in runs, which counts if it has not begun.
  absl::Status RefuseRest(GroupCore* group, CallInRuns* call, const absl::Status& why)
      ABSL_LOCKS_EXCLUDED(session_lock);
  // A member begins a step. INVALID_ARGUMENT: not above its last one.
  absl::Status BeginStep(MemberCore* member, int64_t step) ABSL_LOCKS_EXCLUDED(session_lock);
  // Sets the counts of all that a member calls to nothing.
  static void ResetCountsLocked(MemberCore* member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // Registers a graph under a new name.
  absl::StatusOr<GraphId> RegisterLocked(const std::string& encoded)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  void ReleaseGraphLocked(GraphId graph) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Leaves own worlds that are gone, if their runs are over by now.
  void LeaveWhatIsOver() ABSL_LOCKS_EXCLUDED(session_lock);

  // A tensor with a copy of `bytes`: the daemon's, or, where they are few, kHost.
  absl::StatusOr<TensorDataPtr> FromHostLocked(const TensorInfoPtr& info, int32_t device_slot,
                                               const char* bytes, CallSite site)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Makes a kHost tensor one of the daemon's; nothing to do for others.
  absl::Status NameLocked(TensorData* data) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // A tensor that `data`'s staging memory holds now: the trainer may write there afterwards.
  absl::StatusOr<TensorDataPtr> FreezeLocked(const TensorData& data)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  void AddMemberLocked(const std::shared_ptr<MemberCore>& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  // --- Waiting --------------------------------------------------------------------------------
  // Waits while as many runs are under way as a daemon lets a session have: called before one more
  // is recorded. Errors of runs are not its business.
  void Throttle() ABSL_LOCKS_EXCLUDED(session_lock);
  // Waits until `data` is computed; if it has failed, enters the epochs that are open since.
  absl::Status Wait(const TensorDataPtr& data, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(session_lock);
  // Waits for a run's end, at most the session's wait_timeout.
  absl::Status WaitForRun(Sequence run) ABSL_LOCKS_EXCLUDED(session_lock);
  // Copies out what Wait has seen.
  absl::Status ReadTensor(const TensorDataPtr& data, char* out) ABSL_LOCKS_EXCLUDED(session_lock);
  absl::StatusOr<const char*> MapTensor(const TensorDataPtr& data)
      ABSL_LOCKS_EXCLUDED(session_lock);
  // An error of the daemon has come here: members whose world's epoch ended by it enter the one
  // that was opened. By this alone do they.
  void OnError(const absl::Status& status) ABSL_LOCKS_EXCLUDED(session_lock);
  absl::Status Close() ABSL_LOCKS_EXCLUDED(session_lock);

  // --- Queues, also under the lock ------------------------------------------------------------
  void Retire(const TensorData& data);
  void RetireTape(DropTape::Entry entry);
  // `of_calls`: the members' own, which are counted.
  void RetireGraphs(absl::Span<const GraphId> graphs, bool of_calls);
  void RetireWorld(OwnWorld::Gone world);
  // Sends what is queued if anybody may be waiting for it. Under the lock, its end does that.
  void DrainIfUrgent();

  // Rows of the tables that live as long as the session, for tests that they do not grow.
  struct Tables {
    size_t types = 0;
    size_t dependences = 0;
    size_t sources = 0;
    size_t members = 0;
    size_t worlds = 0;  // to be left
    size_t graphs = 0;
  };
  Tables CountTables() ABSL_LOCKS_EXCLUDED(session_lock);

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
  absl::StatusOr<Created> CreateLocked(const TensorInfoPtr& info, int32_t device_slot,
                                       Binding source, const std::string& call_site = "")
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  absl::StatusOr<TensorId> NewTensorIdLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // New names for all of a run's outputs, or for none.
  absl::Status NameOutputsLocked(absl::Span<OutBinding> outputs)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // These were not used: the run was not sent.
  void GiveBackLocked(absl::Span<const OutBinding> outputs)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  TensorDataPtr NewSentLocked(const TensorInfoPtr& info, int32_t device_slot, TensorId id,
                              Sequence producer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  Binding BindingOf(const TensorData& data) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // `all`: also the few tensors that could wait for company.
  void DrainLocked(bool all) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // The open one of these dependences; null: none is.
  Fragment* FindFragment(const DependencesPtr& after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // The same, with room for one more op.
  Fragment* OpenFragmentLocked(const DependencesPtr& after)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Sends the one of this number, if it is open.
  void FlushLocked(int64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  absl::Status SendLocked(Fragment* fragment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // The graph of a fragment, registered if it is a new one.
  absl::StatusOr<GraphId> FragmentGraphLocked(std::string encoded)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  int32_t FragmentInput(Fragment* fragment, const TensorDataPtr& data)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  void JoinSets(DependencesPtr* both, const Dependences& other)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  DependencesPtr InternDependences(const Dependences& set)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Every run before it is over.
  Sequence OldestUnderWayLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  bool IsOver(Sequence run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  void ReleaseRetiredGraphsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Of so many as a frame takes.
  void ReleaseGraphsLocked(absl::Span<const GraphId> graphs)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  size_t MaxGraphs() const { return static_cast<size_t>(link_->max_graphs()); }
  // Leaves the worlds that are gone and whose runs are over.
  void LeaveLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
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
  int32_t call_graphs_ ABSL_GUARDED_BY(session_lock) = 0;  // of the calls of all members
  std::vector<GraphId> free_graphs_ ABSL_GUARDED_BY(session_lock);
  // In the order of their first ops, one for each set of dependences.
  std::vector<std::unique_ptr<Fragment>> open_ ABSL_GUARDED_BY(session_lock);
  int64_t next_fragment_ ABSL_GUARDED_BY(session_lock) = 1;
  // Those that are no longer open and not in the log yet: the names that they use are kept.
  std::vector<const Fragment*> sending_ ABSL_GUARDED_BY(session_lock);
  // Tables of the log. What bounds them:
  //   types_, dependences_  what tensors, tape entries, calls and programs have that live, twice
  //   fragments_            kMaxFragments, and a quarter of the graphs that a session may have
  //   sources_              kMaxSources
  //   calls and batches of groups   kMaxCalls a group, and half of the graphs of a session
  //   members_              members that live, twice
  //   leaving_              worlds with runs under way
  InternTable<TensorType, TensorInfo, TensorTypeHash> types_ ABSL_GUARDED_BY(session_lock);
  InternTable<Dependences, Dependences> dependences_ ABSL_GUARDED_BY(session_lock);
  int64_t next_origin_ ABSL_GUARDED_BY(session_lock) = 1;
  // By encoded graph.
  absl::flat_hash_map<std::string, GraphId> fragments_ ABSL_GUARDED_BY(session_lock);
  absl::flat_hash_map<std::string, std::unique_ptr<std::string>> sources_
      ABSL_GUARDED_BY(session_lock);
  std::vector<std::unique_ptr<StagingBlock>> staging_ ABSL_GUARDED_BY(session_lock);
  std::vector<std::weak_ptr<MemberCore>> members_ ABSL_GUARDED_BY(session_lock);
  size_t trim_members_at_ ABSL_GUARDED_BY(session_lock) = 64;
  std::vector<OwnWorld::Gone> leaving_ ABSL_GUARDED_BY(session_lock);
  std::atomic<size_t> leaving_count_{0};

  // What destructors leave. Its own lock, held for a few instructions.
  struct Retired {
    std::vector<TensorId> tensors;
    std::vector<ArenaId> arenas;
    std::vector<DropTape::Entry> tapes;
    std::vector<GraphId> graphs;
    int32_t call_graphs = 0;  // of these
    std::vector<OwnWorld::Gone> worlds;
    int64_t bytes = 0;
  };
  Mutex retired_mutex_;
  Retired retired_ ABSL_GUARDED_BY(retired_mutex_);
  std::atomic<bool> urgent_{false};

  // Puts back what a fragment uses that is being sent.
  void KeepWhatIsBeingSent(Retired* retired) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
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
// True for errors after which there is no daemon to tell anything.
bool IsLost(const absl::Status& status);
// At most kMaxSourceLineBytes: the end of it, where the path is longer.
std::string SourceOf(CallSite site);
// `status` with the call site, where it has none.
absl::Status WithSource(const absl::Status& status, const std::string& source);
// `status` of one of the calls of a coalesced one.
absl::Status AtPlace(const absl::Status& status, size_t place);

}  // namespace sdk
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_CORE_H_
