// Watches a sequencer from outside and says when it breaks a promise.
//
// It keeps its own record of every run, tape entry and position and judges each batch of actions by
// definition, the slow way: what a gang is, when it is closed, what may stand below what, which
// ranks have passed a call, what fails with it, when an epoch ends. It shares no code with the
// sequencer but the types.
#ifndef CHORUS_TESTS_MODEL_ORACLE_H_
#define CHORUS_TESTS_MODEL_ORACLE_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/collective/sequencer.h"

namespace chorus {

class Oracle {
 public:
  enum class Status : uint8_t { kPending, kLaunched, kPublished, kFailed };

  // One vote of a run.
  struct Part {
    InstanceKey key;
    int32_t rank = -1;  // world rank of the voter
    std::vector<int32_t>
        all;               // world ranks of all that must vote for the instance, in member order
    bool is_recv = false;  // of a pair: which end the voter is at
    // Which call of the programs this is, whatever it is called: only equal ones may ever meet. -1:
    // not known.
    int64_t point = -1;
    int32_t shape = 0;  // only equal ones can be launched
    bool wants_grad = false;
    bool leads_to_collective = false;  // what the operand was computed from
    bool leads_to_leaf = false;
    std::vector<int32_t> after;
  };
  struct Run {
    Status status = Status::kPending;
    Epoch epoch;
    bool externally_blocked = false;
    std::vector<Part> parts;
    std::vector<int64_t> producers;
    int64_t ticket = 0;
    bool donates = false;
    bool granted = false;  // its donation, by its launch
    bool failed_alone = false;
    bool goes_on = false;  // the last call of each rank in a group has more parts, in later runs
    std::vector<int32_t> order;  // asked for by kReserve; empty: its program's
    bool reserving = false;      // asked for and not answered
  };

  // Events, told before the sequencer's actions on them are applied.
  void Submitted(int64_t run, Run what);
  void Unblocked(int64_t run) { runs_[run].externally_blocked = false; }
  void Reserved(int64_t run) { runs_[run].reserving = false; }
  void Dropped(int32_t rank, const InstanceKey& key, bool consumed, Epoch epoch);
  void Left(int32_t rank);
  void Finished(int64_t ticket, bool ok);  // failed: kFail must follow for its runs
  // `alone`: what it was to use has failed without ending an epoch.
  // `gradients`: requests of the first member that count as well.
  void Refused(const std::vector<RefusedMember>& members, Epoch epoch, bool alone,
               const std::vector<InstanceKey>& gradients = {});
  // The daemon gives up a pending run, alone.
  void Withdrawn(int64_t run) { withdrawn_.insert(run); }

  // Judges what the sequencer did. `open` is its epoch now; `goes_on`: what must fail alone, or
  // could be launched, may be so in an event to come. Empty, or the first promise broken.
  std::string ApplyActions(const Sequencer::Actions& decided, Epoch open, bool goes_on = false);
  // The part of ApplyActions that looks at every pending run: nothing that could be launched is
  // waiting (unless it `goes_on`), and no ended epoch has left a run behind. ApplyActions does it
  // too unless told otherwise.
  std::string CheckPending(bool goes_on) const;
  void set_check_pending(bool always) { check_pending_ = always; }

  Status status(int64_t run) const { return runs_.at(run).status; }
  bool Has(int64_t run) const { return runs_.count(run) > 0; }
  const Run& run(int64_t run) const { return runs_.at(run); }
  bool AnyPending() const;
  std::vector<int64_t> Pending() const;
  // Groups by id: world ranks in group order. Refusals name ranks in them.
  void SetGroup(GroupId group, std::vector<int32_t> members) {
    groups_[group] = std::move(members);
  }
  // Runs that have failed without ending an epoch.
  int64_t failed_alone() const { return failed_alone_; }
  // Tickets that are launched and have not finished, ascending.
  std::vector<int64_t> Unfinished() const;
  // True while some instance of the run's gang lacks a vote.
  bool LacksVotes(int64_t run) const;
  // The cause that an epoch ended with; null while it is open.
  const Error* Cause(Epoch epoch) const;
  // What future judgements depend on.
  std::string Canonical() const;
  // Forgets runs that have ended, for long simulations.
  void Forget();

 private:
  struct Tape {
    bool live = false;
    bool consumed = false;
    bool refused = false;  // the rank could not take a gradient since
    Epoch consumed_in;
    // Of the newest request that the rank has made; 0: it has failed alone, or was refused.
    Epoch asked_in{std::numeric_limits<int64_t>::max()};
    bool used_in_vain(Epoch open) const {
      return consumed && std::min(consumed_in, asked_in) < open;
    }
    bool leads_to_collective = false;
    bool leads_to_leaf = false;
  };
  // An end of a pair, or (with source -1) a group.
  struct Line {
    GroupId group;
    GroupRank source{-1};
    GroupRank destination{-1};
    int64_t tag = 0;
    bool is_recv = false;
    friend bool operator<(const Line& a, const Line& b) {
      return std::tie(a.group, a.source, a.destination, a.tag, a.is_recv) <
             std::tie(b.group, b.source, b.destination, b.tag, b.is_recv);
    }
  };
  // What has been heard of where a rank is in its program.
  struct Position {
    int64_t step = 0;
    bool left_rest = false;
    std::map<Line, CallPosition> next;
    std::map<InstanceKey, InstanceKey::Request> requests;  // by what they are gradients of
  };

  std::string Reserve(const SequencerAction& action);
  std::string Launch(const SequencerAction& action);
  std::string NothingLaunchable() const;
  std::string FailOf(const SequencerAction& action, std::set<int64_t>* may_fail,
                     std::set<int64_t>* passed);
  void Count(const Part& part, bool goes_on, Epoch epoch);
  static Line LineOf(const InstanceKey& key, bool is_recv);
  void BeginStep(int32_t rank, int64_t step);
  // Whether `rank` is past the call, whatever it may have pending.
  bool IsBehind(const InstanceKey& key, int32_t rank, bool is_recv) const;
  // Pending runs that need a rank that has passed them, and all that falls with them. Looks at
  // what this event has changed alone, unless all is looked at anyway.
  std::set<int64_t> MustFailAlone() const;
  void AddPassed(const InstanceKey& key, int32_t rank, std::set<int64_t>* runs) const;
  // Pending runs that vote for an instance of `run`.
  std::vector<int64_t> Sharers(int64_t run) const;
  // Pending runs without which `run` cannot be launched: its sharers, its producers, and those of
  // the forward instances of its gradients.
  std::vector<int64_t> Needs(int64_t run) const;
  // Every member of every instance of `run` has voted or is absent.
  bool Closed(int64_t run) const;
  bool IsAbsent(const InstanceKey& key, int32_t rank) const;
  // What the rank's operand of the instance that `key` is a gradient of was computed from; nothing
  // where it had none.
  Tape PartBehind(const InstanceKey& key, int32_t rank) const;
  // Whether a vote is pending for a gradient that lacks what this rank (-1: any) has given up.
  bool AnyLost(int32_t rank) const;

  std::map<int64_t, Run> runs_;
  std::map<InstanceKey, std::map<int32_t, int64_t>> votes_;  // pending: by rank, with which run
  std::map<InstanceKey, std::map<int32_t, Tape>> tapes_;     // by rank that voted for it
  std::map<int32_t, Position> positions_;                    // by rank
  std::map<GroupId, std::vector<int32_t>> groups_;
  // Of the event at hand.
  std::set<int64_t> withdrawn_;
  std::set<int32_t> moved_;      // ranks whose position has changed
  std::set<int64_t> submitted_;  // in the open epoch
  std::set<int64_t> late_;       // must fail alone, and have not yet
  // What a refusal must do to the open epoch.
  enum class Ends : uint8_t { kAnything, kMust, kMustNot };
  Ends ends_ = Ends::kAnything;
  int64_t failed_alone_ = 0;
  std::map<int64_t, std::vector<int64_t>> unfinished_;    // by ticket
  std::map<int64_t, std::vector<int64_t>> failed_gangs_;  // finished badly, kFail to come
  std::map<int64_t, Error> causes_;
  std::set<int32_t> left_;
  int64_t last_ticket_ = 0;
  Epoch open_{1};
  bool check_pending_ = true;
};

}  // namespace chorus

#endif  // CHORUS_TESTS_MODEL_ORACLE_H_
