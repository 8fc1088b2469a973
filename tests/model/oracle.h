// Watches a sequencer from outside and says when it breaks a promise.
//
// It keeps its own record of every run and tape entry and judges each batch of actions by
// definition, the slow way: what a gang is, when it is closed, what may stand below what. It shares
// no code with the sequencer but the types.
#ifndef CHORUS_TESTS_MODEL_ORACLE_H_
#define CHORUS_TESTS_MODEL_ORACLE_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/collective/sequencer.h"

namespace chorus {

class Oracle {
 public:
  enum class Status : uint8_t { kPending, kLaunched, kPublished, kFailed };

  // One vote of a run.
  struct Part {
    InstanceKey key;
    int32_t rank = -1;         // world rank of the voter
    std::vector<int32_t> all;  // world ranks of all who must vote for the instance, in member order
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
    bool granted = false;        // its donation, by its launch
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

  // Judges what the sequencer did. `open` is its epoch now. Empty, or the first promise broken.
  std::string Apply(const Sequencer::Actions& actions, Epoch open);
  // The part of Apply that looks at every pending run: nothing that could be launched is waiting,
  // and no ended epoch has left a run behind. Apply does it too unless told otherwise.
  std::string CheckPending() const;
  void set_check_pending(bool always) { check_pending_ = always; }

  Status status(int64_t run) const { return runs_.at(run).status; }
  bool Has(int64_t run) const { return runs_.count(run) > 0; }
  const Run& run(int64_t run) const { return runs_.at(run); }
  bool AnyPending() const;
  std::vector<int64_t> Pending() const;
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
    Epoch consumed_in;
    bool leads_to_collective = false;
    bool leads_to_leaf = false;
  };

  std::string Reserve(const SequencerAction& action);
  std::string Launch(const SequencerAction& action);
  std::string NothingLaunchable() const;
  std::string FailOf(int64_t run, const Error& error, std::set<int64_t>* may_fail);
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
  std::map<InstanceKey, std::map<int32_t, int64_t>> votes_;  // pending: who, with which run
  std::map<InstanceKey, std::map<int32_t, Tape>> tapes_;     // of who voted for it
  std::map<InstanceKey, std::map<int32_t, int32_t>> asked_;  // gradients in the open epoch, by who
  std::map<int64_t, std::vector<int64_t>> unfinished_;       // by ticket
  std::map<int64_t, std::vector<int64_t>> failed_gangs_;     // finished badly, kFail to come
  std::map<int64_t, Error> causes_;
  std::set<int32_t> left_;
  int64_t last_ticket_ = 0;
  Epoch open_{1};
  bool check_pending_ = true;
};

}  // namespace chorus

#endif  // CHORUS_TESTS_MODEL_ORACLE_H_
