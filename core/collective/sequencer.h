// Decides what may be launched, and in which order: one world's agreement.
//
// A pure library: events in, actions out. No threads, no clock, no I/O; time is an argument. It is
// a value, so a checker can copy a state and try every event on it (tests/model).
//
// A *run* votes for the instances that it takes part in. A *gang* is the smallest set of pending
// runs that is closed: every member of every instance that it touches has voted (members that
// abandoned a gradient excepted), and sets that wait for each other's results are one. When a gang
// is closed, its votes match, its producers have tickets and its order has no circle, it gets the
// world's next ticket: Launch, the one point of no return. Anything that goes wrong before ends the
// epoch: every pending run of it fails with one recorded cause, who comes late gets the same, and
// the next epoch is open at once.
//
// Threads: thread-compatible.
#ifndef CHORUS_CORE_COLLECTIVE_SEQUENCER_H_
#define CHORUS_CORE_COLLECTIVE_SEQUENCER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/collective/instance.h"
#include "core/graph/graph.h"

namespace chorus {

// One collective node of a registered graph, as far as agreement is concerned.
struct Participation {
  Descriptor descriptor;
  int32_t group_slot = 0;
  GroupRank member;      // whom this node speaks for
  InstanceRef instance;  // kGradient's `node` is an index into VoteTemplate::participations
  GroupRank peer{-1};    // send/recv: the other end
  int64_t tag = 0;
  bool is_recv = false;
  // The rank holds a tape entry after the run, until DropTape. A rank without one counts as
  // abandoned for every gradient of this instance that this same run does not ask for.
  bool wants_grad = false;
  // Where its operand comes from (Collective): what a rank that gives up its part of a gradient
  // takes with it. Whoever asks for one that would have led to another collective is told so; one
  // that would have led to a leaf goes on with zeros, which are right for everybody else.
  bool leads_to_collective = false;
  bool leads_to_leaf = false;
  std::vector<int32_t> after;  // earlier participations of this run whose result this one needs
  int32_t node = 0;            // in the graph, for the plan
  std::string source;          // trainer's file:line
};

// What a registered graph votes for, made once at registration and shared by its runs.
struct VoteTemplate {
  std::vector<Participation> participations;  // program order
  Hash128 fingerprint;                        // of all of the above but sources
};

// What a run binds to a group slot: the group, and for each member held here how many collectives
// of that group (gradients and pairs apart) the member has asked for before in this epoch: the
// index of its next one. Slots that are bound to one group give the same number and share the
// count.
struct GroupBinding {
  GroupId group;
  absl::InlinedVector<int64_t, 1> base;  // one for each member held, in the slot's order
};

struct Vote {
  RunHandle run;
  Epoch epoch;                                    // the epoch that the session is in
  std::shared_ptr<const VoteTemplate> what;       // never null; no participations: a local run
  std::vector<GroupBinding> groups;               // one for each group slot
  const std::vector<GroupSlot>* slots = nullptr;  // the graph's, same length; read in Submit only
  std::vector<InstanceKey> bound;                 // one for each instance slot
  // Runs of this sequencer whose results it consumes. One that is not pending counts as launched: a
  // run that consumes a failed result is never submitted.
  std::vector<RunHandle> producers;
  // True: it also consumes results of runs outside this sequencer; Unblock() or Cancel() follows.
  bool externally_blocked = false;
  // It may take over the memory of inputs that were given to it. Granted with its launch only.
  bool donates = false;
};

struct SequencerOptions {
  absl::Duration agree_timeout = absl::Seconds(60);
  absl::Duration exec_timeout = absl::Seconds(300);
  int kept_causes = 64;   // of ended epochs; older ones are answered with kEpochEnded
  int max_groups = 4096;  // ever, with the world's own: their numbers are not given again
};

struct MemberInfo {
  int32_t pid = -1;  // for culprits; of the trainer
  std::string node;
};

// One instance of a launched gang.
struct LaunchedInstance {
  InstanceKey key;
  struct Part {
    RunHandle run;
    int32_t participation;  // index into its VoteTemplate
    GroupRank member;
  };
  // Ascending by member (a rank that sends to itself: the sender first). A member that abandoned
  // this gradient has no part.
  std::vector<Part> parts;
  std::vector<GroupRank> absent;  // members that abandoned this gradient: they give zeros
  // Of these, who had a leaf behind its part, which now gets less than its gradient.
  struct GivenUp {
    Rank rank;
    std::string op;      // of the forward collective, as it called it
    std::string source;  // the line
  };
  std::vector<GivenUp> given_up;
};

// What the caller must do, in this order.
struct SequencerAction {
  enum class Kind {
    kLaunch,   // start `runs` as the gang with `ticket`
    kReserve,  // `run` must follow `order` in its gang: reserve what that takes, then Reserved(),
               // or Refuse() its rank; the gang is not launched before
    kFail,  // tell `run`'s owner `error`; it never launches (or, after kLaunch, it did not finish)
    kEpochEnded,  // `epoch` has ended with `error`; votes now belong to `epoch` + 1
  };
  Kind kind = Kind::kLaunch;
  Ticket ticket;
  // In the order of their first instances. A rank's runs in one gang never interleave: all
  // instances of one come before all of the next, so that a device may enqueue whole runs in this
  // order.
  std::vector<RunHandle> runs;
  std::vector<RunHandle> donating;          // of `runs`: those whose donations are granted by this
  std::vector<LaunchedInstance> instances;  // in the one order that all ranks use
  RunHandle run;
  std::vector<int32_t> order;  // kReserve: its participations, as the gang orders them
  Epoch epoch;
  Error error;
};

struct PendingInstance {
  InstanceKey key;
  std::string what;  // descriptor of the first vote
  std::vector<Rank> voted;
  std::vector<Rank> missing;
  absl::Duration waiting;  // since the first vote
  std::string source;      // of the first vote
};

class Sequencer {
 public:
  using Actions = std::vector<SequencerAction>;

  Sequencer(int world_size, SequencerOptions options);

  // --- Membership -----------------------------------------------------------------------------
  void SetMember(Rank rank, MemberInfo info);
  // Defines a group of this world's present membership; ranks in group order, none twice. The k-th
  // request of each rank for the same ordered list gives the same group, so nobody waits for it.
  // INVALID_ARGUMENT: empty list, unknown rank, duplicate, or `rank` not in it. RESOURCE_EXHAUSTED
  // kQuota: the world has had as many as it may.
  absl::StatusOr<GroupId> AddGroup(Rank rank, absl::Span<const Rank> members);
  absl::StatusOr<absl::Span<const Rank>> GroupMembers(GroupId group) const;

  // --- Events. Each appends to `actions`. -----------------------------------------------------
  // INVALID_ARGUMENT (nothing recorded, nothing appended): the vote contradicts its own rank's
  //   past: wrong base index, wrong gradient request number, a gradient of what it holds no tape
  //   entry for, unknown group; FAILED_PRECONDITION kTapeConsumed: it has consumed its own entry.
  //   Others may wait for that part: Refuse() tells them.
  // Otherwise OK, and the run's fate follows by actions, perhaps at once: a vote for an ended epoch
  // gets kFail with that epoch's cause; for an epoch that is not open yet, INVALID_ARGUMENT.
  absl::Status Submit(const Vote& vote, absl::Time now, Actions* actions);
  // The instances that Submit(vote) would vote for, by participation, or the error with which it
  // would refuse. Requires vote.epoch == epoch(). Valid until the next event. A Submit of the same
  // run that is that event does not look again: its groups and bound instances must be the same.
  absl::StatusOr<absl::Span<const InstanceKey>> Resolve(const Vote& vote);
  // All results from outside are there.
  void Unblock(RunHandle run, absl::Time now, Actions* actions);
  // The run can follow the order that kReserve asked for.
  void Reserved(RunHandle run, absl::Time now, Actions* actions);
  // The caller withdraws a run. If it is pending the epoch ends with CANCELLED naming `rank`; after
  // its launch nothing happens: commit wins.
  void Cancel(RunHandle run, Rank rank, absl::Time now, Actions* actions);
  // A rank's part cannot be taken (`why`: its refusal). Ends `epoch` if that is the open one, with
  // ABORTED kPeerRefused.
  void Refuse(Rank rank, Epoch epoch, const Error& why, absl::Time now, Actions* actions);
  // Ends the open epoch with `cause` as it is: a world aborted by hand, a daemon that drains.
  void Abort(const Error& cause, absl::Time now, Actions* actions);
  // A member is dead: `how`, in words for the others. The epoch ends (if other ranks wait or not),
  // and until Reform every vote for a group with that member ends the epoch with kNeedsReform
  // naming it.
  void Dead(Rank rank, absl::string_view how, absl::Time now, Actions* actions);
  // A member left in an orderly way: its tape entries are abandoned. Only instances that need it
  // fail: those pending, and those voted for later, end their epoch with kPeerLeft.
  void Left(Rank rank, absl::Time now, Actions* actions);
  // Its tape entry for `key` is gone: abandoned (it gives zeros to every gradient of `key` it has
  // not voted for) or consumed in `epoch`, the one that its session is in. Consumed counts as zeros
  // for further requests in that epoch; a request in a later epoch ends that with
  // FAILED_PRECONDITION kTapeConsumed naming the rank. Where the rank's operand led to another
  // collective nobody's zeros would be right: a request that it does not take part in ends the
  // epoch with FAILED_PRECONDITION kGradientLost. Unknown and repeated drops do nothing.
  void DropTape(Rank rank, const InstanceKey& key, bool consumed, Epoch epoch, absl::Time now,
                Actions* actions);
  // A launched gang has finished on all devices, or failed (which ends the epoch for pending runs
  // and fails the gang's runs).
  void Finished(Ticket ticket, const absl::Status& status, absl::Time now, Actions* actions);
  // Fires what is due: an instance that is not launched agree_timeout after its first vote, naming
  // the ranks that it, or what it has to wait for, lacks; a run that waits for another world for
  // agree_timeout + exec_timeout; a gang that is not finished exec_timeout after its launch (its
  // runs fail, and a later Finished is ignored).
  void Advance(absl::Time now, Actions* actions);
  // InfiniteFuture when nothing is due.
  absl::Time NextDeadline() const;

  // A new membership after deaths: survivors keep their order and get ranks 0..n-1; groups but the
  // world's are gone, and so are all tape entries; the epoch moves on. Returns old rank -> new rank
  // (-1: gone).
  std::vector<int32_t> Shrink(absl::Time now, Actions* actions);

  // --- Views ----------------------------------------------------------------------------------
  Epoch epoch() const;
  int size() const;
  // GroupIds ever given are below; GroupMembers tells which are still there.
  int num_groups() const;
  // By run, in order of submission.
  std::vector<PendingInstance> Pending(absl::Time now) const;
  bool IsPending(RunHandle run) const;
  // The last collective of the world group (gradients apart) that was published, that is finished
  // without error, with `rank`.
  absl::optional<InstanceKey> LastPublished(Rank rank) const;
  absl::optional<Error> Cause(Epoch epoch) const;
  // Bytes that are equal for states which behave alike from now on, but for absolute times,
  // tickets, epochs and texts: what a checker compares. Linear in the state.
  std::string CanonicalState() const;
  // Rows of all tables, for tests that memory does not grow.
  size_t StateSize() const { return LiveRows() + known_orders_.size() + causes_.size(); }
  // Of these the rows of what is pending, under way or may still be asked for, and of groups: what
  // is kept without need is left out.
  size_t LiveRows() const;

 private:
  static constexpr int32_t kNone = -1;

  // A table whose rows are named by number and used again: a copy of it is a copy of the state, and
  // nothing is allocated once it has been as large as it gets. Row references end at New().
  template <typename T>
  class Pool {
   public:
    int32_t New() {
      if (free_.empty()) {
        rows_.emplace_back();
        return static_cast<int32_t>(rows_.size()) - 1;
      }
      const int32_t row = free_.back();
      free_.pop_back();
      return row;
    }
    void Free(int32_t row) { free_.push_back(row); }
    void Clear() {
      rows_.clear();
      free_.clear();
    }
    T& operator[](int32_t row) { return rows_[row]; }
    const T& operator[](int32_t row) const { return rows_[row]; }
    size_t size() const { return rows_.size() - free_.size(); }

    // Rows in a list by their own links.
    struct Chain {
      int32_t head = kNone;
      int32_t tail = kNone;
    };
    void Append(Chain* chain, int32_t row) {
      rows_[row].previous = chain->tail;
      rows_[row].next = kNone;
      (chain->tail == kNone ? chain->head : rows_[chain->tail].next) = row;
      chain->tail = row;
    }
    void Remove(Chain* chain, int32_t row) {
      const int32_t previous = rows_[row].previous;
      const int32_t next = rows_[row].next;
      (previous == kNone ? chain->head : rows_[previous].next) = next;
      (next == kNone ? chain->tail : rows_[next].previous) = previous;
    }

   private:
    std::vector<T> rows_;
    std::vector<int32_t> free_;
  };

  struct Member {
    enum class State : uint8_t { kHere, kLeft, kDead };
    State state = State::kHere;
    std::string how_dead;
    MemberInfo info;
  };

  struct Group {
    std::vector<Rank> members;  // empty: gone with a former membership
    std::vector<int64_t> next;  // by member: index of its next collective in the open epoch
    Rank dead{-1};              // the first member that died
  };

  // How far one end of a pair has counted in the open epoch.
  struct PairEnd {
    GroupId group;
    GroupRank source;
    GroupRank destination;
    int64_t tag = 0;
    bool is_recv = false;
    friend bool operator==(const PairEnd& a, const PairEnd& b) {
      return a.group == b.group && a.source == b.source && a.destination == b.destination &&
             a.tag == b.tag && a.is_recv == b.is_recv;
    }
    template <typename H>
    friend H AbslHashValue(H h, const PairEnd& e) {
      return H::combine(std::move(h), e.group, e.source, e.destination, e.tag, e.is_recv);
    }
  };

  // An instance's *positions*: the members of its group, or source and destination of its pair. A
  // gradient has the positions of its forward instance.
  struct Position {
    int32_t run = kNone;
    int32_t participation = kNone;
    bool absent = false;  // it abandoned this gradient
  };
  struct Instance {  // pending
    InstanceKey key;
    int32_t component = kNone;
    int32_t missing = 0;
    int32_t tape = kNone;      // its own
    int32_t parent = kNone;    // a gradient's: tape of the instance that it is asked of
    int32_t first = kNone;     // position of the first vote
    int32_t mark = kNone;      // scratch of the gang's order
    bool rows_differ = false;  // somebody has voted with pieces of different rows
    absl::Time first_vote;
    bool timed = false;        // in timed_
    int32_t previous = kNone;  // in timed_, by first vote
    int32_t next = kNone;
    absl::InlinedVector<Position, 4> positions;
  };

  struct PendingRun {
    RunHandle handle;
    std::shared_ptr<const VoteTemplate> what;
    int64_t order = 0;  // of submission
    absl::Time submitted;
    bool externally_blocked = false;
    bool donates = false;
    bool has_dependents = false;  // a pending run, or a gradient, waits for its launch
    // Whether it can follow its gang's order where that is not its program's.
    enum class Reserve : uint8_t { kNotAsked, kAsked, kDone };
    Reserve reserve = Reserve::kNotAsked;
    int32_t component = kNone;
    absl::InlinedVector<int32_t, 2> instances;  // by participation
    absl::InlinedVector<RunHandle, 2> producers;
    absl::InlinedVector<Rank, 2> ranks;  // whom it speaks for
    // Closed components that are tried when it launches. One that was merged into another since is
    // a free row, or somebody else's, who is then tried for nothing.
    absl::InlinedVector<int32_t, 2> waiters;
    int32_t previous = kNone;  // pending runs, by submission
    int32_t next = kNone;
  };

  // A gang in the making: runs that share instances, directly or through others.
  struct Component {
    absl::InlinedVector<int32_t, 4> runs;  // empty: the row is free
    absl::InlinedVector<int32_t, 4> instances;
    int64_t missing = 0;  // votes, over all instances
    int32_t mark = 0;     // scratch of the search for circles
  };

  struct TapeEntry {
    enum class State : uint8_t { kNotVoted, kLive, kAbandoned, kConsumed };
    State state = State::kNotVoted;
    // Of its vote: whether its part leads further. Where it does, the vote itself, for texts.
    bool leads_to_collective = false;
    bool leads_to_leaf = false;
    int32_t next_request = 0;  // in the open epoch
    Epoch consumed_in;
    std::shared_ptr<const VoteTemplate> what;
    int32_t participation = kNone;

    bool given_up() const { return state == State::kAbandoned || state == State::kConsumed; }
    const Participation& part() const { return what->participations[participation]; }
  };
  // What the ranks may still ask of an instance. It exists while a rank holds an entry or a
  // gradient is pending.
  struct Tape {
    InstanceKey key;
    int32_t instance = kNone;  // while pending
    int32_t live = 0;
    absl::InlinedVector<TapeEntry, 4> entries;  // by position
    absl::InlinedVector<int32_t, 2> children;   // pending gradients
  };

  struct Gang {  // launched, not finished
    Ticket ticket;
    Epoch epoch;
    absl::Time launched;
    std::vector<RunHandle> runs;
    absl::optional<InstanceKey> last_of_world;
    // Its first instance as the first voter asks for it, for texts. Null: it has no instance.
    std::shared_ptr<const VoteTemplate> what;
    int32_t participation = kNone;
    int32_t previous = kNone;
    int32_t next = kNone;
  };

  // An order found before, in places: of instances by first use in the gang's runs, and of runs.
  struct GangOrder {
    std::vector<int32_t> instances;
    std::vector<int32_t> runs;
    // By run, in order of submission: its participations, where they do not stand in the order of
    // its program. Else empty.
    std::vector<std::vector<int32_t>> reordered;
  };

  // Submit.
  absl::Status CheckGroups(const Vote& vote) const;
  absl::Status ResolveKeys(const Vote& vote);
  absl::Status ResolveOne(const Vote& vote, size_t i);
  absl::optional<Error> FindRefusal(const Vote& vote) const;
  int32_t AddRun(const Vote& vote);
  void Record(int32_t run, const Vote& vote, absl::optional<Error>* fault);
  int32_t NewInstance(const InstanceKey& key, int32_t positions, int32_t run,
                      absl::optional<Error>* fault);
  void Merge(int32_t* into, int32_t other);
  void CountVote(int32_t instance);
  void CountAbsent(int32_t instance, int32_t position);
  int32_t EnsureTape(int32_t instance);
  void SetEntry(int32_t tape, int32_t position, TapeEntry::State state, const PendingRun& run,
                int32_t participation);
  absl::optional<Error> MarkAbandoned(int32_t tape, int32_t position);
  absl::optional<Error> Absent(const InstanceKey& gradient, const Tape& tape,
                               int32_t position) const;
  void ForgetTapeIfUnused(int32_t tape);
  // Whether the vote at `position` contradicts another of the instance.
  absl::optional<Error> Mismatch(int32_t instance, int32_t position) const;
  Error MismatchError(int32_t instance, int32_t with, int32_t position,
                      const Difference& difference) const;

  // Launching.
  void LaunchReady(Actions* actions);
  bool IsBlocked(int32_t component);
  void MergeCircleThrough(int32_t component);
  absl::optional<Error> Order(int32_t component, std::vector<int32_t>* runs,
                              std::vector<int32_t>* instances);
  absl::optional<Error> Sort(const std::vector<int32_t>& runs,
                             const std::vector<int32_t>& instances, GangOrder* order) const;
  bool AwaitReserves(Actions* actions);
  void Launch(const std::vector<int32_t>& runs, const std::vector<int32_t>& instances,
              Actions* actions);
  void DependencesOf(int32_t component, std::vector<std::pair<int32_t, int32_t>>* out) const;

  // Ending.
  std::vector<int32_t> AwaitedBy(int32_t component);
  int32_t FindLacking(const std::vector<int32_t>& components) const;
  int32_t FindUnready(const std::vector<int32_t>& components) const;
  Error AgreeTimeout(int32_t late, int32_t lacking) const;
  void EndEpoch(const Error& cause, Actions* actions);
  void FailRun(RunHandle run, Epoch epoch, const Error& error, Actions* actions);
  void FailGang(int32_t gang, const Error& error, Actions* actions);
  void ForgetGang(int32_t gang);
  Error CauseOrForgotten(Epoch epoch) const;

  // Texts and lookups.
  void Tick(absl::Time now);
  bool IsRank(Rank rank) const;
  static int32_t PositionOf(const InstanceKey& key, const Participation& part);
  static GroupRank MemberAt(const InstanceKey& key, int32_t position);
  Rank RankAt(const InstanceKey& key, int32_t position) const;
  int32_t PositionCount(const InstanceKey& key) const;
  const Participation& PartAt(const Instance& instance, int32_t position) const;
  std::string RankText(Rank rank) const;
  Culprit CulpritOf(Rank rank) const;
  Error MakeInstanceError(absl::StatusCode code, Reason reason, int32_t instance) const;
  // Fills what `error` does not say of op and source.
  static void NameGang(const Gang& gang, Error* error);
  void AddVersions(const Instance& instance, Error* error) const;
  std::string RunText(int32_t run) const;

  SequencerOptions options_;
  Epoch epoch_{1};
  absl::Time clock_ = absl::InfinitePast();
  Ticket next_ticket_{1};
  int64_t next_order_ = 0;
  std::vector<Member> members_;
  bool somebody_left_ = false;  // a member's state is kLeft
  absl::optional<InstanceKey> last_published_;
  std::vector<Group> groups_;
  struct GroupRequests {
    std::vector<GroupId> groups;          // of the k-th request
    std::map<int32_t, size_t> requested;  // by rank: how many
  };
  std::map<std::vector<int32_t>, GroupRequests> group_requests_;  // each of at least one of groups_
  absl::flat_hash_map<PairEnd, int64_t> pair_next_;

  Pool<PendingRun> runs_;
  Pool<PendingRun>::Chain pending_;
  absl::flat_hash_map<RunHandle, int32_t> run_by_handle_;
  Pool<Instance> instances_;
  Pool<Instance>::Chain timed_;
  absl::flat_hash_map<InstanceKey, int32_t> instance_by_key_;
  Pool<Component> components_;
  Pool<Tape> tapes_;
  absl::flat_hash_map<InstanceKey, int32_t> tape_by_key_;
  Pool<Gang> gangs_;
  Pool<Gang>::Chain launched_;  // by ticket
  absl::flat_hash_map<Ticket, int32_t> gang_by_ticket_;
  std::map<int64_t, int32_t> externally_blocked_;  // runs, by submission
  absl::flat_hash_map<std::vector<int64_t>, GangOrder> known_orders_;
  std::deque<std::pair<Epoch, Error>> causes_;

  // Scratch of one event.
  std::vector<InstanceKey> keys_;  // by participation of the vote at hand
  RunHandle resolved_;             // whose keys_ and positions_ hold until the next event; 0: none
  std::vector<int32_t> positions_;
  std::vector<int64_t> taken_;
  std::vector<int32_t> asked_;
  std::vector<std::pair<int32_t, int32_t>> tape_undo_;  // tape, position
  std::vector<PairEnd> pair_undo_;
  std::vector<int32_t> ready_;           // components to try
  std::vector<int32_t> gang_runs_;       // of the gang whose order was found last
  std::vector<int32_t> gang_instances_;  // the same
  // The same: runs that must follow another order than their own.
  std::vector<std::pair<int32_t, const std::vector<int32_t>*>> reordered_;
  int32_t search_ = 0;  // number of the last search for circles
};

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_SEQUENCER_H_
