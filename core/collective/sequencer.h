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
// epoch: every pending run of it fails with one recorded cause, votes that come late get the same,
// and the next epoch is open at once.
//
// An instance's name is the position of the call in its rank's program, so calls of different
// positions never meet, whatever has failed before. Each member's position in each group is kept,
// over epochs, from all that it votes for or refuses. A member *has passed* a position when its own
// is behind it, or it has begun a later step, and it has no vote pending there. A vote that needs
// a member that has passed fails at once, and so does a vote whose needed member passes it, both
// alone: with the runs that share instances with them or wait for their results, and no epoch
// ends for that.
//
// Calls in a row that a run makes of one group, and of which it keeps nothing, are agreed on as one
// list (vote.h): one instance, as long as all members ask for them alike. Where one asks for some
// of them otherwise, in other runs or with a gradient, the list is cut there. What is decided is
// the same as for calls by themselves.
//
// What it is told and decides is plain data: decisions.h.
//
// Threads: thread-compatible. Ownership: a copy has a state of its own; templates of votes, labels
// and errors are shared, and never change. Errors: said at each function; what ranks are told of is
// an action.
#ifndef CHORUS_CORE_COLLECTIVE_SEQUENCER_H_
#define CHORUS_CORE_COLLECTIVE_SEQUENCER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/base/bytes.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/base/split_hash_map.h"
#include "core/collective/decisions.h"
#include "core/collective/gang_order.h"
#include "core/collective/instance.h"
#include "core/collective/known_orders.h"
#include "core/collective/sequencer_tables.h"
#include "core/collective/vote.h"
#include "core/graph/graph.h"

namespace chorus {

class Sequencer {
 public:
  using Actions = std::vector<SequencerAction>;

  // Of the causes of epochs that have ended, which it keeps: a world is charged for so much from
  // the start. The oldest go where there is no room for the newest.
  static constexpr int64_t kMostCauseBytes = int64_t{128} << 10;

  Sequencer(int world_size, SequencerOptions options);

  // --- Membership -----------------------------------------------------------------------------
  void SetMember(Rank rank, MemberInfo info);
  // Defines a group of this world's present membership; ranks in group order, none twice. Requests
  // for the same ordered list with the same step and number (which of the rank's requests for it in
  // that step) give the same group, so nobody waits for it. `request` absent: the rank's next one,
  // as counted here. `reserve` is asked before one is made that was not there. INVALID_ARGUMENT:
  // empty list, unknown rank, duplicate, or `rank` not in it. RESOURCE_EXHAUSTED kQuota: the world
  // has had as many as it may. Else what `reserve` says.
  using ReserveGroup = absl::FunctionRef<absl::Status()>;
  absl::StatusOr<GroupId> AddGroup(
      Rank rank, absl::Span<const Rank> members,
      absl::optional<InstanceKey::Request> request = absl::nullopt,
      ReserveGroup reserve = [] { return absl::OkStatus(); });
  absl::StatusOr<absl::Span<const Rank>> GroupMembers(GroupId group) const;

  // --- Events. Each appends to `actions`. -----------------------------------------------------
  // INVALID_ARGUMENT (nothing recorded, nothing appended): the vote contradicts its own rank's
  //   past: a position or a gradient's request that it has used before, a gradient of what it holds
  //   no tape entry for, unknown group; FAILED_PRECONDITION kTapeConsumed: it has consumed its own
  //   entry; RESOURCE_EXHAUSTED kQuota: it brings more instances than may be pending or may still
  //   be differentiated (one for what others have brought is never refused so), or a gang would
  //   become larger than it may be. Others may wait for that part: Refuse() tells them. Where
  //   nobody can, for what it is to be a gradient of has failed, the error is `alone`, and Refuse()
  //   ends no epoch.
  // Otherwise OK, and the run's fate follows by actions, perhaps at once: a vote for an ended epoch
  // gets kFail with that epoch's cause (its calls count), one for a position that somebody has
  // passed kFail with MISMATCH; for an epoch that is not open yet, INVALID_ARGUMENT.
  absl::Status Submit(const Vote& vote, absl::Time now, Actions* actions);
  // The instances that Submit(vote) would vote for, by participation, or the error with which it
  // would refuse. Requires vote.epoch == epoch(). Valid until the next event. A Submit of the same
  // run that is that event does not look again: its template must be that very one, which is held,
  // and its groups and bound instances the same.
  absl::StatusOr<absl::Span<const InstanceKey>> Resolve(const Vote& vote);
  // What Submit() of each member of a group comes to where they all are at one position and call
  // the same there, and nothing else is pending: the gang is launched. And Finished() without
  // error. Callers that have such calls whole need no votes, runs and actions. Each call is one
  // collective of its whole run, of no pair, that nobody wants a gradient of; `results`:
  // Vote::results of all of them together. Absent: not all members are at one position, or it is
  // not IsQuiet(), or they would be too large a gang; nothing has happened, and votes are needed to
  // say more.
  absl::optional<MetGang> Meet(GroupId group, absl::Span<const MetCall> calls, int64_t results,
                               absl::Time now);
  // All results from outside are there.
  void Unblock(RunHandle run, absl::Time now, Actions* actions);
  // The run can follow the order that kReserve asked for.
  void Reserved(RunHandle run, absl::Time now, Actions* actions);
  // The caller withdraws a run. If it is pending the epoch ends with CANCELLED naming `rank`; after
  // its launch nothing happens: commit wins.
  void Cancel(RunHandle run, Rank rank, absl::Time now, Actions* actions);
  // Calls of these members (one session's; the first is named) cannot be taken: `why`. They count.
  // Ends `epoch` if that is the open one, with ABORTED kPeerRefused, unless a member that is
  // needed has passed them already: then nobody can wait for them but alone.
  void Refuse(absl::Span<const RefusedMember> members, Epoch epoch, const Error& why,
              absl::Time now, Actions* actions);
  // A pending run cannot take part, for a reason that ends no epoch: it fails alone.
  void Withdraw(RunHandle run, const Error& why, absl::Time now, Actions* actions);
  // How many seats Refuse() of these looks at: the members of each call's group, or a pair's ends.
  int64_t SeatsOf(absl::Span<const RefusedMember> members) const;
  // As many as the runs of one gang may have.
  int64_t max_seats() const { return options_.max_gang_size; }
  // How many counters of pairs Refuse() of these would add, at most.
  size_t NewPairs(absl::Span<const RefusedMember> members) const;
  // What a vote's calls are to Refuse(). A vote that says nothing sensible gives none.
  std::vector<RefusedMember> CallsOf(const Vote& vote);
  // Ends the open epoch with `cause` as it is: a world aborted by hand, a daemon that drains.
  void Abort(const Error& cause, absl::Time now, Actions* actions);
  // A member is dead: `how`, in words for the others. The epoch ends (if other ranks wait or not),
  // and until Reform every vote for a group with that member ends the epoch with kNeedsReform
  // naming it.
  void Dead(Rank rank, absl::string_view how, absl::Time now, Actions* actions);
  // A member left in an orderly way: its tape entries are abandoned. Only instances that need it
  // fail: those pending end their epoch with kPeerLeft, those voted for later with kNeedsReform.
  void Left(Rank rank, absl::Time now, Actions* actions);
  // Its tape entry for `key` is gone, where it held one after the run (Participation::wants_grad):
  // abandoned (it gives zeros to every gradient of `key` it has not voted for) or consumed in
  // `epoch`, the one that its session is in. Consumed counts as zeros for further requests in that
  // epoch; a request in a later epoch ends that with FAILED_PRECONDITION kTapeConsumed naming the
  // rank. Where the rank's operand led to another collective nobody's zeros would be right: a
  // request that it does not take part in ends the epoch with FAILED_PRECONDITION kGradientLost.
  // Unknown and repeated drops do nothing.
  void DropTape(Rank rank, const InstanceKey& key, bool consumed, Epoch epoch, absl::Time now,
                Actions* actions);
  // A launched gang has finished on all devices, or failed (which ends the epoch for pending runs
  // and fails the gang's runs).
  void Finished(Ticket ticket, const absl::Status& status, absl::Time now, Actions* actions);
  // Fires what is due: an instance that is not launched agree_timeout after its first vote, naming
  // the ranks that it, or what it has to wait for, lacks; a run that waits for another world for
  // agree_timeout + exec_timeout; one that is not ready for its gang's order agree_timeout after
  // kReserve; a gang that is not finished exec_timeout after its launch (its runs fail, and a later
  // Finished is ignored). And goes on with what the slices of other events
  // (core/base/work.h) had no time for: launches, searches, rows to compare, what members have
  // passed, what is late, pairs of steps that are over. Then it is due at once.
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
  // The same of a member of a group that is there.
  CallPosition NextCall(GroupId group, GroupRank member) const {
    const Group& row = groups_[static_cast<size_t>(group.value())];
    const auto at = static_cast<size_t>(member.value());
    return NextOf(row.members[at], row.counters[at]);
  }
  // With which the present membership began.
  Epoch since() const { return since_; }
  // GroupIds ever given are below; GroupMembers tells which are still there.
  int num_groups() const;
  // Of all groups that are there, together.
  int64_t num_group_members() const { return group_members_; }
  // Nothing is pending, under way or to be gone on with, and all members are here.
  bool IsQuiet() const;
  // By run, in order of submission, until there is no more `room`: 8 are taken for each that is
  // looked at, and one for each rank of it.
  std::vector<PendingInstance> Pending(absl::Time now, int64_t* room) const;
  bool IsPending(RunHandle run) const;
  // That a pending run speaks for, the first of its participations' first. None: it has no
  // participations, or is not pending. Until the next event.
  absl::Span<const Rank> RanksOf(RunHandle run) const;
  // The last collective of the world group (gradients apart) that was published, that is finished
  // without error, with `rank`.
  absl::optional<InstanceKey> LastPublished(Rank rank) const;
  absl::optional<Error> Cause(Epoch epoch) const;
  // OK where ranks and groups are those of `epoch` still. Else why that has ended: what was meant
  // for it comes behind a Shrink().
  absl::Status CheckMembership(Epoch epoch) const;
  // Bytes that are equal for states which behave alike from now on, but for absolute times,
  // tickets, epochs and texts: what a checker compares. Linear in the state.
  std::string CanonicalState() const;
  // Rows of all tables, for tests that memory does not grow.
  size_t StateSize() const { return LiveRows() + known_orders_.size() + causes_.size(); }
  // Of these the rows of what is pending, under way or may still be asked for, and of groups: what
  // is kept without need is left out.
  size_t LiveRows() const;
  // What stays when no run is pending or under way: entries of tapes, and counters of pairs, with
  // those of steps that are over until they have gone.
  size_t HeldRows() const;
  // Of what is pending, of tapes, their labels and pairs, and of what stays for the next ones, from
  // above. Not of members and groups, of runs that are pending or under way, and of causes.
  int64_t HeldBytes() const;
  // How much more that may be for each call of a vote, or for each pair of a refusal.
  int64_t BytesPerCall() const;
  // And what comes to that for the names of the gradients that this vote asks for, which are as
  // long as their order is high. Errors and validity as of Resolve(), which it calls unless that
  // has just been done.
  absl::StatusOr<int64_t> PathBytes(const Vote& vote);

 private:
  static constexpr int32_t kNone = sequencer_tables::kNone;
  template <typename T>
  using Pool = sequencer_tables::Pool<T>;
  using Component = sequencer_tables::Component;
  using Counter = sequencer_tables::Counter;
  using Differing = sequencer_tables::Differing;
  using EntryRef = sequencer_tables::EntryRef;
  using OpenGang = sequencer_tables::OpenGang;
  using Group = sequencer_tables::Group;
  using Instance = sequencer_tables::Instance;
  using ListKey = sequencer_tables::ListKey;
  using Member = sequencer_tables::Member;
  using PairEnd = sequencer_tables::PairEnd;
  using PendingRun = sequencer_tables::PendingRun;
  using SearchNumber = sequencer_tables::SearchNumber;
  using Seat = sequencer_tables::Seat;
  using SortKey = sequencer_tables::SortKey;
  using Tape = sequencer_tables::Tape;
  using TapeEntry = sequencer_tables::TapeEntry;
  using Way = sequencer_tables::Way;

  // What a vote's calls, or refused ones, do to one counter.
  struct Move {
    Rank rank;
    GroupId group;
    GroupRank member;
    bool is_pair = false;
    PairEnd end;
    CallPosition from;                    // where the member stands in its step before them
    CallPosition first;                   // of the first of these calls
    CallPosition next;                    // behind them
    const std::string* source = nullptr;  // line of the last of them
    int32_t part = 0;                     // Participation::part of the last call seen
  };

  // Of the membership that there is.
  Group GroupOfAll() const;
  absl::optional<Rank> FirstDead(Group* group);

  // Submit.
  absl::Status Take(const Vote& vote, absl::Time now, Actions* actions);
  absl::Status CheckGroups(const Vote& vote) const;
  // Fills keys_, seats_, steps_, moves_ and requests_, and changes nothing else. `late`: only the
  // counts matter, so a gradient may be of what is gone.
  absl::Status ResolveKeys(const Vote& vote, bool late);
  absl::Status ResolveAll(const Vote& vote, bool late);
  // Returns the move that it belongs to; null: it is a gradient.
  absl::StatusOr<Move*> ResolveOne(const Vote& vote, size_t i, bool late);
  void ResolveRest(const Vote& vote, const CallList& list, Move* move);
  void ForgetKeys();
  // Whether the world may have what the vote of keys_ makes.
  absl::Status CheckRoom(const Vote& vote) const;
  absl::Status CheckGang(const Vote& vote) const;
  Error GangTooLarge(int64_t size, int32_t instance) const;
  absl::Status MoveFor(const Vote& vote, const Participation& part, size_t held, Move** result);
  absl::optional<Error> FindRefusal(const Vote& vote);
  int32_t AddRun(const Vote& vote);
  void HoldUp(int32_t run, absl::Time due);
  void EndHoldUp(PendingRun* run);
  void ForgetRun(int32_t run);
  void RecordVote(int32_t run, const Vote& vote, absl::optional<Error>* fault,
                  absl::optional<Error>* passed, Actions* actions);
  void EnterCalls(int32_t run, const Vote& vote, CallList calls, int32_t* component,
                  absl::optional<Error>* fault, absl::optional<Error>* passed, Actions* actions);
  int32_t NewInstance(const InstanceKey& key, int32_t seats, const CallList& calls, int32_t run,
                      absl::optional<Error>* fault);
  void ForgetInstance(int32_t instance);
  void Merge(int32_t* into, int32_t other);
  void ForgetComponent(int32_t component);
  void CountVote(int32_t instance, int32_t seat);
  // One pending instance more, or less, needs that seat's vote.
  void CountLacking(const InstanceKey& key, int32_t seat, int change);
  void CountAbsent(int32_t instance, int32_t seat);
  int32_t EnsureTape(int32_t instance);
  void SetEntry(int32_t tape, int32_t seat, const Participation& part);
  // Null: it has none any more.
  void SetLabel(TapeEntry* entry, std::shared_ptr<const PartLabel> label);
  void MarkAbandoned(int32_t tape, int32_t seat);
  struct Leaving;
  void AbandonSome(Leaving* leaving);
  absl::optional<Error> MarkSome();
  bool marking() const { return !abandoned_.empty() || !leaving_.empty(); }
  Error InVainError(const InstanceKey& gradient, const Tape& tape, int32_t position) const;
  absl::optional<Error> FindInVain(absl::Span<const int32_t> instances) const;
  absl::optional<Error> LostGradientError(const InstanceKey& gradient, const Tape& tape,
                                          int32_t seat) const;
  // Every entry begins and ends to be live by these.
  void Hold(EntryRef at);
  void LetGo(EntryRef at, TapeEntry::State to);
  void LetGoOfAll(int32_t tape);
  TapeEntry& EntryAt(EntryRef at) { return tapes_[at.tape].entries[at.seat]; }
  const TapeEntry& EntryAt(EntryRef at) const { return tapes_[at.tape].entries[at.seat]; }
  void LeaveParent(int32_t instance);
  void ForgetTapeIfUnused(int32_t tape);
  // kNone: none is pending.
  int32_t FindInstance(const InstanceKey& key) const;
  // kNone: nobody can ask for a gradient of it, or it is not recorded.
  int32_t FindTape(const InstanceKey& forward) const;
  // As it is for everybody, where the row does not say so yet.
  TapeEntry::State StateOf(EntryRef at) const;
  bool IsRefused(EntryRef at) const;
  // Its instance was never launched, and its epoch has ended.
  bool IsGone(const Tape& tape) const {
    return tape.instance != kNone && tape.pending_in != epoch_;
  }
  absl::Span<const int32_t> ChildrenOf(const Tape& tape) const;
  void BeginPending(int32_t tape);
  void ForgetGone(int32_t tape);
  void ForgetSome();
  // As the one seat says it and as the other does.
  absl::optional<Difference> DifferenceOf(const Instance& instance, int32_t a, int32_t b,
                                          int32_t call = 0) const;
  bool Contradicts(const Instance& instance, int32_t seat) const;
  bool CompareVote(int32_t instance, int32_t seat);
  absl::optional<Error> CompareSome();
  bool comparing() const { return uncompared_ > 0; }
  void DelayMismatch(int32_t instance, int32_t seat);
  int32_t OutOfGrace() const;
  std::string VersionsText(const Instance& instance) const;
  std::vector<int32_t> ComparedSeats(const Instance& instance,
                                     const std::vector<int32_t>& voted) const;
  Error MismatchError(int32_t instance) const;
  void WarnOfCallSites(const Instance& instance, int32_t call, int32_t seat, Actions* actions);

  // Lists: pending instances of several calls. A list is cut where a rank asks for its calls
  // otherwise: then each part is what all of its members ask for in a row.
  int32_t FindCall(const InstanceKey& key, int32_t* call = nullptr) const;
  int32_t FindCalls(CallList* calls);
  int32_t CountFree(const CallList& calls) const;
  struct Cut {
    int32_t first;
    int32_t second;
  };
  Cut CutList(int32_t instance, int32_t count);
  bool CutAllLists(int32_t component);
  void CompareList(int32_t instance, int32_t seat, absl::optional<Error>* fault);
  static ListKey ListKeyOf(const Instance& instance);

  // Positions.
  Counter* CounterOf(const Move& move);
  // The position of a member's next call, given its counter.
  CallPosition NextOf(Rank rank, const Counter& counter) const;
  // Begins the steps of steps_, and counts the calls that were left out before moves_. True: a
  // vote that waits for a call, or for a gradient, may have been passed.
  bool BeginMoves();
  void LetGoOfPairs(Member* member);
  size_t HeldPairs() const;
  // Counts the calls of moves_, and requests for gradients, of epoch `asked_in` (TapeEntry).
  void EndMoves(Epoch asked_in);
  // Whether the member of that seat has passed `key`, given that it has no vote pending for it.
  // `parent`: FindTape() of what it is a gradient of.
  bool HasPassed(const InstanceKey& key, int32_t seat) const;
  bool HasPassed(const InstanceKey& key, int32_t seat, int32_t parent) const;
  bool AnotherHasPassed(const InstanceKey& key, int32_t seat) const;
  // Fails what is pending and has been passed by a member that it needs. Looked at is only what
  // lies between where members stood before this event, by steps_, moves_ and requests_, and where
  // they stand now: where somebody waits nobody had passed. What the slice has no time for is done
  // by Advance(), which is due at once.
  void FailPassed(Actions* actions);
  void FailSomePassed(Actions* actions);
  void FindPassed();
  // Where a rank sits in a group, or did in the last one.
  struct Chair {
    Rank rank;
    GroupId group{-1};
    int32_t seat = kNone;  // kNone: nowhere
  };
  void LookAt(int32_t instance, Chair* chair);
  // At some of what is in stretches_, until some of it is in passed_.
  void LookForPassed();
  bool IsPassed(const Instance& instance, int32_t seat) const;
  // Or has given it up.
  static bool HasVoted(const Instance& instance, int32_t seat) {
    return instance.seats[seat].run != kNone || instance.seats[seat].absent;
  }
  bool passing() const { return !stretches_.empty() || !passed_.empty(); }
  static SortKey SortKeyOf(const Instance& instance);
  // What is pending is in timed_ until it lacks nothing.
  void Enlist(int32_t instance);
  void Unlist(int32_t instance);
  // Indexes all that is pending but the newest `most`.
  void IndexSome(size_t most);
  Error PassedError(const InstanceKey& key, const Participation& part, int32_t seat,
                    int32_t passed_by) const;
  // Where the member of that seat stands, and its last line there, in words; the position alone.
  std::string PositionText(const InstanceKey& key, int32_t seat, std::string* position,
                           std::string* source) const;

  // Launching.
  void LaunchReady(Actions* actions);
  struct Awaiting {
    int32_t component;
    Way way;
  };
  bool NextAwaited(int32_t component, Way* way, int32_t* awaited) const;
  bool CountInner(int32_t component);
  void LetGoOn(int32_t component);
  void LetGoOfWaiting(int32_t component);
  bool MergeCircle();
  bool searching() const { return !path_.empty() || !unsearched_.empty(); }
  absl::optional<Error> OrderComponent(int32_t component, std::vector<int32_t>* runs,
                                       std::vector<int32_t>* instances);
  void Sign(const std::vector<int32_t>& runs, std::vector<int32_t>* instances);
  absl::optional<Error> FindOrder(const std::vector<int32_t>& runs,
                                  const std::vector<int32_t>& instances, GangOrder* order) const;
  bool HasManyNeeds(const std::vector<int32_t>& runs) const;
  std::vector<int32_t> FirstsOf(const PendingRun& run) const;
  std::vector<Participation> PartsAsLists(const PendingRun& run,
                                          const std::vector<int32_t>& firsts) const;
  Error ConflictError(const std::vector<int32_t>& runs, const std::vector<int32_t>& instances,
                      const GangConflict& conflict) const;
  bool AwaitReserves(int32_t component, Actions* actions);
  void Launch(const std::vector<int32_t>& runs, const std::vector<int32_t>& instances,
              Actions* actions);

  // Ending.
  bool IsLate() const;
  void FailLate(Actions* actions);
  void ComeTo(int32_t component);
  bool SearchLate(int32_t* lacking);
  void EndLateSearch();
  int32_t FindLacking(int32_t component) const;
  bool IsOlder(int32_t instance, int32_t other) const;
  Error HeldUpError(int32_t run) const;
  Error AgreeTimeout(int32_t late, int32_t lacking) const;
  int32_t SeatOfRefused(Rank rank, const InstanceKey& key, bool is_recv) const;
  bool RefuseTapes(Rank rank);
  // Returns its last action, which has the remains.
  SequencerAction* EndEpoch(const Error& why, Actions* actions);
  // Fails a component and what waits for it; no epoch ends.
  void FailAlone(int32_t component, const Error& error, Actions* actions);
  // Runs that have failed: those whose results they consume go on without them.
  void LeaveProducers(absl::Span<const int32_t> runs);
  // `open_epoch`: 0 unless the run's own has ended.
  SequencerAction& FailRun(RunHandle run, Epoch epoch, Epoch open_epoch,
                           std::shared_ptr<const Error> error, Actions* actions);
  void FailGang(int32_t gang, const Error& error, Actions* actions);
  void KeepCause(std::shared_ptr<const Error> cause);
  void NotePublished(const InstanceKey& key);
  void ForgetGang(int32_t gang);
  std::shared_ptr<const Error> CauseOrForgotten(Epoch epoch) const;

  // What a tape takes, or an instance, with its entries in tables; and what its seats do.
  int64_t TapeBytes() const;
  int64_t InstanceBytes() const;
  int64_t SeatBytes(size_t bytes_per_seat) const;

  // Texts and lookups.
  void BeginEvent(absl::Time now);
  bool IsRank(Rank rank) const;
  Rank RankAt(const InstanceKey& key, int32_t seat) const;
  int32_t SeatCount(const InstanceKey& key) const;
  const Participation& PartAt(const Instance& instance, int32_t seat, int32_t call = 0) const;
  InstanceKey KeyOf(const PendingRun& run, size_t participation) const;
  std::string RankText(Rank rank) const;
  Culprit CulpritOf(Rank rank) const;
  Error MakeInstanceError(Reason reason, int32_t instance) const;
  // Fills what `error` does not say of op and source.
  static void NameGang(const OpenGang& gang, Error* error);
  void AddVersions(const Instance& instance, Error* error) const;
  std::string RunText(int32_t run) const;

  SequencerOptions options_;
  Epoch epoch_{1};
  Epoch since_{1};  // with which the present membership began
  absl::Time clock_ = absl::InfinitePast();
  Ticket next_ticket_{1};
  int64_t next_order_ = 0;
  std::vector<Member> members_;
  size_t member_pairs_ = 0;     // of all members' pairs
  bool somebody_gone_ = false;  // a member has left or is dead
  std::vector<Rank> dead_;      // in the order in which they died
  absl::optional<InstanceKey> last_published_;
  std::vector<Group> groups_;
  int64_t group_members_ = 0;
  struct GroupRequests {
    std::map<InstanceKey::Request, GroupId> groups;
    std::map<int32_t, InstanceKey::Request> next;  // by rank
  };
  std::map<std::vector<int32_t>, GroupRequests> group_requests_;  // each of at least one of groups_
  size_t requested_groups_ = 0;                                   // of all these lists

  Pool<PendingRun> runs_;
  Pool<PendingRun>::Chain pending_;
  int64_t pending_size_ = 0;  // of all of them
  // Of pending_, what no slice has had the time to compare: how many runs, and none stands before
  // the first.
  int32_t first_uncompared_ = kNone;
  size_t uncompared_ = 0;
  SplitHashMap<RunHandle, int32_t> run_by_handle_;
  Pool<Instance> instances_;
  Pool<Instance>::Chain timed_;
  // Of timed_, but for the newest: most are launched before an entry is worth its while, and few
  // can be looked at one by one.
  absl::btree_map<SortKey, int32_t> instance_by_sort_key_;
  int32_t first_unindexed_ = kNone;
  size_t unindexed_ = 0;
  Pool<Differing> differing_;
  Pool<Differing>::Chain in_grace_;
  absl::flat_hash_set<uint64_t> warned_sites_;   // hashes of pairs of lines
  int64_t further_parts_ = 0;                    // pending instances with a part that is not 0
  SplitHashIndex<InstanceKey> instance_by_key_;  // by the first call of a list
  absl::btree_map<ListKey, int32_t> lists_;      // instances of several calls
  size_t pending_calls_ = 0;                     // of all instances
  int64_t instance_path_bytes_ = 0;              // HeapBytesOf the keys of instances_
  Pool<Component> components_;
  // Tapes that nobody can ask anything of any more go a few an event (ForgetSome): those of an
  // ended epoch, and those whose holders have left, are dead or were refused a gradient. Until then
  // FindTape and StateOf hide them.
  Pool<Tape> tapes_;
  Pool<Tape>::Chain pending_tapes_;  // whose instance is pending, or a gradient of it
  Pool<Tape>::Chain ended_tapes_;    // those that were there when their epoch ended
  size_t waiting_tapes_ = 0;         // of pending_tapes_: those whose own instance is pending
  size_t gone_tapes_ = 0;            // IsGone()
  size_t children_ = 0;              // pending gradients, of all tapes
  size_t ended_children_ = 0;        // that ended_tapes_ still have room for, at most
  int32_t refused_members_ = 0;      // that have a newest_refused
  SplitHashIndex<InstanceKey> tape_by_key_;
  int64_t tape_path_bytes_ = 0;  // HeapBytesOf the keys of tapes_
  Pool<OpenGang> gangs_;
  Pool<OpenGang>::Chain launched_;  // by ticket
  SplitHashMap<Ticket, int32_t> gang_by_ticket_;
  // Runs that wait for more than votes, by when they are due, and then by submission.
  std::map<std::pair<absl::Time, int64_t>, int32_t> held_up_;
  KnownOrders known_orders_;  // of instances by first use in the gang's runs, and of runs
  // Of steps that are over, and of former members.
  std::vector<SplitHashMap<PairEnd, Counter>> gone_pairs_;
  // All together they take kMostCauseBytes at most; of longer ones the texts are cut.
  std::deque<std::pair<Epoch, std::shared_ptr<const Error>>> causes_;
  int64_t cause_bytes_ = 0;
  // What tapes say of their entries' parts: their graphs may be gone. How many entries have each.
  SplitHashMap<const PartLabel*, int64_t> label_uses_;
  int64_t label_bytes_ = 0;

  // What members have passed, and what waits there, as far as no slice has had the time for it.
  // From `first` up to `end`, which is left out: what `rank` has passed if it has not voted for it.
  struct Stretch {
    Rank rank;
    SortKey first;
    SortKey end;
    bool is_begun = false;  // `first` has been looked at
  };
  std::vector<Stretch> stretches_;
  std::vector<std::pair<InstanceKey, int32_t>> passed_;  // with the seat that has passed it
  int64_t passed_path_bytes_ = 0;                        // HeapBytesOf these keys

  // Seats that have given a tape's entry up, as far as no slice has had the time to give zeros to
  // the tape's pending gradients.
  struct Abandoned {
    int32_t tape;
    int32_t seat;
    uint32_t incarnation;  // of the tape: the row may be of another one by now
    size_t left;           // of its children: the first so many
  };
  std::vector<Abandoned> abandoned_;
  // Members that have left, and of which tape on that has not been done for what they held.
  struct Leaving {
    Rank rank;
    int32_t next_tape = 0;
  };
  std::vector<Leaving> leaving_;

  // Circles, as far as no slice has had the time to look for them: a run of each component to look
  // from; and the way of the search at hand.
  std::vector<RunHandle> unsearched_;
  std::vector<Awaiting> path_;
  SearchNumber circle_ = 0;  // of that search

  // The search for what the oldest instance that is late waits for, as far as no slice has had the
  // time for it: a run of each component that it has come to, the first for the instance's own.
  std::vector<RunHandle> awaited_;
  size_t searched_ = 0;           // of these it is through with so many
  SearchNumber late_search_ = 0;  // its number; 0: nothing is late

  // Scratch of one event.
  std::vector<InstanceKey> keys_;  // by participation of the vote at hand
  int64_t vote_path_bytes_ = 0;    // HeapBytesOf these
  RunHandle resolved_;             // whose keys_ ... requests_ hold until the next event; 0: none
  std::vector<int32_t> seats_;
  std::vector<Move> moves_;
  struct Stepped {
    Rank rank;
    int64_t step = 0;
    int64_t over = 0;  // steps below were, for this member, before the event
    bool drops_tapes = false;
  };
  absl::InlinedVector<Stepped, 2> steps_;  // of the ranks that make calls
  std::vector<int32_t> moves_of_;          // by held member of the vote's slots; -1: none yet
  absl::flat_hash_map<PairEnd, int32_t> pair_moves_;
  std::vector<int32_t> asked_;
  struct Asked {
    int32_t tape;
    int32_t seat;
    InstanceKey::Request next;
    int64_t from = 0;  // the member's next request in that step, before the event
  };
  std::vector<Asked> requests_;                           // of gradients, by the vote at hand
  absl::flat_hash_map<EntryRef, size_t> newest_request_;  // in requests_, by what it is asked of
  std::vector<int32_t> ready_;                            // components to try
  std::vector<int32_t> gang_runs_;                        // of the gang whose order was found last
  std::vector<int32_t> gang_instances_;                   // the same
  ByteWriter signature_;                                  // the same
  // The same: runs that must follow another order than their own.
  std::vector<std::pair<int32_t, const std::vector<int32_t>*>> reordered_;
  SearchNumber search_ = 0;  // of the last search for what fails alone, or for what is late
};

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_SEQUENCER_H_
