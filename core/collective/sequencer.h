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
// An instance's name is the position of the call in its rank's program, so calls of different
// positions never meet, whatever has failed before. Each member's position in each group is kept,
// over epochs, from all that it votes for or refuses. A member *has passed* a position when its own
// is behind it, or it has begun a later step, and it has no vote pending there. A vote that needs
// somebody who has passed fails at once, and so does a vote that somebody passes who is needed,
// both alone: with the runs that share instances with them or wait for their results, and no epoch
// ends for that.
//
// Threads: thread-compatible.
#ifndef CHORUS_CORE_COLLECTIVE_SEQUENCER_H_
#define CHORUS_CORE_COLLECTIVE_SEQUENCER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
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
#include "core/collective/call_sites.h"
#include "core/collective/instance.h"
#include "core/graph/graph.h"

namespace chorus {

// A participation in words, for what is said of it when its run is long over.
struct PartLabel {
  std::string op;      // "all_reduce"
  std::string what;    // "all_reduce SUM f32[4]"
  std::string source;  // trainer's file:line; cut where it is long
};

// One collective node of a registered graph, as far as agreement is concerned.
struct Participation {
  Descriptor descriptor;
  int32_t group_slot = 0;
  GroupRank member;      // whom this node speaks for
  InstanceRef instance;  // kGradient's `node` is an index into VoteTemplate::participations
  GroupRank peer{-1};    // send/recv: the other end
  int64_t tag = 0;
  bool is_recv = false;
  int32_t part = 0;  // as in Collective
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
  // LabelOf, made once for all runs, where the operand leads anywhere.
  std::shared_ptr<const PartLabel> label;
};
std::shared_ptr<const PartLabel> LabelOf(const Participation& part);

// What a registered graph votes for, made once at registration and shared by its runs.
struct VoteTemplate {
  std::vector<Participation> participations;  // program order
  Hash128 fingerprint;                        // of all of the above but sources
};

// What a run binds to a group slot: the group, and for each member held here, in the slot's order,
// the position of its next call of that group (gradients and pairs apart). Empty: as counted here.
// Slots that are bound to one group give the same positions and share the count.
struct GroupBinding {
  GroupId group;
  absl::InlinedVector<CallPosition, 1> base;
};

struct Vote {
  RunHandle run;
  Epoch epoch;                                    // the epoch that the session is in
  std::shared_ptr<const VoteTemplate> what;       // never null; no participations: a local run
  std::vector<GroupBinding> groups;               // one for each group slot
  const std::vector<GroupSlot>* slots = nullptr;  // the graph's, same length; read in Submit only
  std::vector<InstanceKey> bound;                 // one for each instance slot
  // The number of the next call at each end of a pair, in the order in which the participations use
  // them first. Empty: as counted here.
  absl::InlinedVector<int64_t, 1> pair_calls;
  bool call_goes_on = false;  // the last call of each member has more parts, in later runs
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
  // How long the error of a mismatch waits for those who have not voted, so that it says what all
  // of them ask for. Never longer than agree_timeout.
  absl::Duration mismatch_grace = absl::Milliseconds(100);
  CheckCallSites check_call_sites = CheckCallSites::kOff;
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
  std::vector<GroupRank> absent;  // members that abandoned this gradient: they have no part in it
  // Of these, who had a leaf behind its part, which now gets less than its gradient.
  struct GivenUp {
    Rank rank;
    std::shared_ptr<const PartLabel> what;  // its part of the forward collective
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
    kWarn,  // write `error` down: the ranks call an instance in different lines
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
  // kFail: the epoch that is open now, where the run's own has ended; 0 where it failed alone.
  Epoch opened;
  std::vector<InstanceKey> dropped;  // kFail of a run alone: what it had voted for, pending no more
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
  // Defines a group of this world's present membership; ranks in group order, none twice. Requests
  // for the same ordered list with the same step and number (which of the rank's requests for it in
  // that step) give the same group, so nobody waits for it. `request` absent: the rank's next one,
  // as counted here. INVALID_ARGUMENT: empty list, unknown rank, duplicate, or `rank` not in it.
  // RESOURCE_EXHAUSTED kQuota: the world has had as many as it may.
  absl::StatusOr<GroupId> AddGroup(Rank rank, absl::Span<const Rank> members,
                                   absl::optional<InstanceKey::Request> request = absl::nullopt);
  absl::StatusOr<absl::Span<const Rank>> GroupMembers(GroupId group) const;

  // --- Events. Each appends to `actions`. -----------------------------------------------------
  // INVALID_ARGUMENT (nothing recorded, nothing appended): the vote contradicts its own rank's
  //   past: a position or a gradient's request that it has used before, a gradient of what it holds
  //   no tape entry for, unknown group; FAILED_PRECONDITION kTapeConsumed: it has consumed its own
  //   entry. Others may wait for that part: Refuse() tells them. Where nobody can, for what it is
  //   to be a gradient of has failed, the error is `alone`, and Refuse() ends no epoch.
  // Otherwise OK, and the run's fate follows by actions, perhaps at once: a vote for an ended epoch
  // gets kFail with that epoch's cause (its calls count), one for a position that somebody has
  // passed kFail with MISMATCH; for an epoch that is not open yet, INVALID_ARGUMENT.
  absl::Status Submit(const Vote& vote, absl::Time now, Actions* actions);
  // The instances that Submit(vote) would vote for, by participation, or the error with which it
  // would refuse. Requires vote.epoch == epoch(). Valid until the next event. A Submit of the same
  // run that is that event does not look again: its template must be that very one, which is held,
  // and its groups and bound instances the same.
  absl::StatusOr<absl::Span<const InstanceKey>> Resolve(const Vote& vote);
  // All results from outside are there.
  void Unblock(RunHandle run, absl::Time now, Actions* actions);
  // The run can follow the order that kReserve asked for.
  void Reserved(RunHandle run, absl::Time now, Actions* actions);
  // The caller withdraws a run. If it is pending the epoch ends with CANCELLED naming `rank`; after
  // its launch nothing happens: commit wins.
  void Cancel(RunHandle run, Rank rank, absl::Time now, Actions* actions);
  // Calls of these members (one session's; the first is named) cannot be taken: `why`. They count.
  // Ends `epoch` if that is the open one, with ABORTED kPeerRefused, unless somebody who is needed
  // has passed them already: then nobody can wait for them but alone.
  void Refuse(absl::Span<const RefusedMember> members, Epoch epoch, const Error& why,
              absl::Time now, Actions* actions);
  // A pending run cannot take part, for a reason that ends no epoch: it fails alone.
  void Withdraw(RunHandle run, const Error& why, absl::Time now, Actions* actions);
  // What a vote's calls are to Refuse(). A vote that says nothing sensible gives none.
  std::vector<RefusedMember> CallsOf(const Vote& vote);
  // Ends the open epoch with `cause` as it is: a world aborted by hand, a daemon that drains.
  void Abort(const Error& cause, absl::Time now, Actions* actions);
  // A member is dead: `how`, in words for the others. The epoch ends (if other ranks wait or not),
  // and until Reform every vote for a group with that member ends the epoch with kNeedsReform
  // naming it.
  void Dead(Rank rank, absl::string_view how, absl::Time now, Actions* actions);
  // A member left in an orderly way: its tape entries are abandoned. Only instances that need it
  // fail: those pending end their epoch with kPeerLeft, those voted for later with
  // kNeedsReform.
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
  // The position of a rank's next call of a group, as counted here.
  CallPosition NextCall(GroupId group, Rank rank) const;
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
  // Of these what stays when no run is pending or under way: entries of tapes, and counters of
  // pairs.
  size_t HeldRows() const;

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

  // One end of a pair.
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

  // How far a member has counted in a group, or at an end of a pair.
  struct Counter {
    CallPosition next;  // of an earlier step than the member's: it has made no call in its step
    std::string last;   // line of the last call, for texts
  };

  struct Member {
    enum class State : uint8_t { kHere, kLeft, kDead };
    State state = State::kHere;
    std::string how_dead;
    MemberInfo info;
    int64_t step = 0;                             // the last that it has been heard of in
    bool left_rest = false;                       // it takes part in nothing more of that step
    std::string left_rest_text;                   // why, for others
    int64_t lacking = 0;                          // pending instances that need its vote
    absl::flat_hash_map<PairEnd, Counter> pairs;  // in `step`
  };

  struct Group {
    std::vector<Rank> members;      // empty: gone with a former membership
    std::vector<Counter> counters;  // by member
    Rank dead{-1};                  // the first member that died
  };

  // An instance's *seats*: the members of its group, or source and destination of its pair. A
  // gradient has the seats of its forward instance.
  struct Seat {
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
    int32_t first = kNone;     // seat of the first vote
    int32_t mark = kNone;      // scratch of the gang's order
    bool rows_differ = false;  // somebody has voted with pieces of different rows
    bool differs = false;      // in differing_: the ranks ask for different things
    absl::Time differs_until;  // then they are told
    absl::Time first_vote;
    bool timed = false;        // in timed_
    int32_t previous = kNone;  // in timed_, by first vote
    int32_t next = kNone;
    absl::InlinedVector<Seat, 4> seats;
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
    // kRefused: a gradient that the rank could not take may have used it: there is none any more.
    enum class State : uint8_t { kNotVoted, kLive, kAbandoned, kConsumed, kRefused };
    State state = State::kNotVoted;
    // Of its vote. Whether its part leads further, and then what it was.
    bool recorded = false;
    bool leads_to_collective = false;
    bool leads_to_leaf = false;
    InstanceKey::Request next;  // that the rank has not made
    Epoch consumed_in;
    std::shared_ptr<const PartLabel> label;

    bool given_up() const { return state == State::kAbandoned || state == State::kConsumed; }
  };
  // What the ranks may still ask of an instance. It exists while a rank holds an entry or a
  // gradient is pending.
  struct Tape {
    InstanceKey key;
    int32_t instance = kNone;  // while pending
    int32_t live = 0;
    absl::InlinedVector<TapeEntry, 4> entries;  // by seat
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

  // What a vote's calls, or refused ones, do to one counter.
  struct Move {
    Rank rank;
    GroupId group;
    GroupRank member;
    bool is_pair = false;
    PairEnd end;
    CallPosition first;                   // of the first of these calls
    CallPosition next;                    // behind them
    const std::string* source = nullptr;  // line of the last of them
    int32_t part = 0;                     // Participation::part of the last call seen
  };

  // Submit.
  absl::Status CheckGroups(const Vote& vote) const;
  // Fills keys_, seats_, steps_, moves_ and requests_, and changes nothing else. `late`: only the
  // counts matter, so a gradient may be of what is gone.
  absl::Status ResolveKeys(const Vote& vote, bool late);
  absl::Status ResolveOne(const Vote& vote, size_t i, bool late);
  absl::Status MoveFor(const Vote& vote, const Participation& part, size_t held, Move** found);
  absl::optional<Error> FindRefusal(const Vote& vote) const;
  int32_t AddRun(const Vote& vote);
  void Record(int32_t run, const Vote& vote, absl::optional<Error>* fault,
              absl::optional<Error>* passed, Actions* actions);
  int32_t NewInstance(const InstanceKey& key, int32_t seats, int32_t run,
                      absl::optional<Error>* fault);
  void Merge(int32_t* into, int32_t other);
  void CountVote(int32_t instance, int32_t seat);
  void CountAbsent(int32_t instance, int32_t seat);
  int32_t EnsureTape(int32_t instance);
  void SetEntry(int32_t tape, int32_t seat, const Participation& part);
  absl::optional<Error> MarkAbandoned(int32_t tape, int32_t seat);
  absl::optional<Error> Absent(const InstanceKey& gradient, const Tape& tape, int32_t seat) const;
  void ForgetTapeIfUnused(int32_t tape);
  // As the one seat says it and as the other does.
  absl::optional<Difference> DifferenceOf(const Instance& instance, int32_t a, int32_t b) const;
  bool Contradicts(const Instance& instance, int32_t seat) const;
  void HoldForOthers(int32_t instance);
  std::string VersionsText(const Instance& instance) const;
  Error MismatchError(int32_t instance) const;
  void WarnOfCallSites(const Instance& instance, const Participation& part, int32_t seat,
                       Actions* actions);

  // Positions.
  Counter* CounterOf(const Move& move);
  // The position of a member's next call, given its counter.
  CallPosition NextOf(Rank rank, const Counter& counter) const;
  // Begins the steps of steps_, and counts the calls that were left out before moves_. True: who
  // waits for a call, or for a gradient, may have been passed.
  bool BeginMoves();
  // Counts the calls of moves_.
  void EndMoves();
  // Whether who sits there has passed `key`, given that it has no vote pending for it.
  bool HasPassed(const InstanceKey& key, int32_t seat) const;
  bool AnotherHasPassed(const InstanceKey& key, int32_t seat) const;
  // Fails what is pending and has been passed by somebody whom it needs.
  void FailPassed(Actions* actions);
  Error PassedError(const InstanceKey& key, const Participation& part, int32_t seat,
                    int32_t passed_by) const;
  // Where who sits there stands, and its last line there, in words; the position alone.
  std::string StandsText(const InstanceKey& key, int32_t seat, std::string* position,
                         std::string* source) const;

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
  int32_t SeatOfRefused(Rank rank, const InstanceKey& key, bool is_recv) const;
  void RefuseTapes(Rank rank);
  void EndEpoch(const Error& why, Actions* actions);
  // Fails a component and what waits for it; no epoch ends.
  void FailAlone(int32_t component, const Error& error, Actions* actions);
  // `opened`: the open epoch where the run's own has ended; else 0.
  SequencerAction& FailRun(RunHandle run, Epoch epoch, Epoch opened, const Error& error,
                           Actions* actions);
  void FailGang(int32_t gang, const Error& error, Actions* actions);
  void ForgetGang(int32_t gang);
  Error CauseOrForgotten(Epoch epoch) const;

  // Texts and lookups.
  void Tick(absl::Time now);
  bool IsRank(Rank rank) const;
  static int32_t SeatOf(const InstanceKey& key, const Participation& part);
  static GroupRank MemberAt(const InstanceKey& key, int32_t seat);
  Rank RankAt(const InstanceKey& key, int32_t seat) const;
  int32_t SeatCount(const InstanceKey& key) const;
  const Participation& PartAt(const Instance& instance, int32_t seat) const;
  std::string RankText(Rank rank) const;
  Culprit CulpritOf(Rank rank) const;
  Error MakeInstanceError(Reason reason, int32_t instance) const;
  // Fills what `error` does not say of op and source.
  static void NameGang(const Gang& gang, Error* error);
  void AddVersions(const Instance& instance, Error* error) const;
  std::string RunText(int32_t run) const;

  SequencerOptions options_;
  Epoch epoch_{1};
  Epoch since_{1};  // with which the present membership began
  absl::Time clock_ = absl::InfinitePast();
  Ticket next_ticket_{1};
  int64_t next_order_ = 0;
  std::vector<Member> members_;
  bool somebody_left_ = false;  // a member's state is kLeft
  absl::optional<InstanceKey> last_published_;
  std::vector<Group> groups_;
  struct GroupRequests {
    std::map<InstanceKey::Request, GroupId> groups;
    std::map<int32_t, InstanceKey::Request> next;  // by rank
  };
  std::map<std::vector<int32_t>, GroupRequests> group_requests_;  // each of at least one of groups_

  Pool<PendingRun> runs_;
  Pool<PendingRun>::Chain pending_;
  absl::flat_hash_map<RunHandle, int32_t> run_by_handle_;
  Pool<Instance> instances_;
  Pool<Instance>::Chain timed_;
  std::vector<int32_t> differing_;                              // instances
  std::set<std::pair<std::string, std::string>> warned_sites_;  // lines
  int64_t further_parts_ = 0;  // pending instances with a part that is not 0
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
  RunHandle resolved_;             // whose keys_ ... requests_ hold until the next event; 0: none
  std::vector<int32_t> seats_;
  std::vector<Move> moves_;
  absl::InlinedVector<std::pair<Rank, int64_t>, 2> steps_;  // of who makes calls
  std::vector<int32_t> moves_of_;  // by held member of the vote's slots; -1: none yet
  absl::flat_hash_map<PairEnd, int32_t> pair_moves_;
  std::vector<int32_t> asked_;
  struct Asked {
    int32_t tape;
    int32_t seat;
    InstanceKey::Request next;
  };
  std::vector<Asked> requests_;          // of gradients, by the vote at hand
  std::vector<int32_t> ready_;           // components to try
  std::vector<int32_t> gang_runs_;       // of the gang whose order was found last
  std::vector<int32_t> gang_instances_;  // the same
  // The same: runs that must follow another order than their own.
  std::vector<std::pair<int32_t, const std::vector<int32_t>*>> reordered_;
  int32_t search_ = 0;  // number of the last search for circles
};

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_SEQUENCER_H_
