// What a sequencer is told, decides and shows, as plain data: for what carries its decisions out
// and asks it nothing. What each means is core/collective/sequencer.h's.
//
// Threads: plain data. Ownership: copies; errors and the words of a part (PartLabel) are shared.
// Errors: none; an action may bring one for others.
#ifndef CHORUS_CORE_COLLECTIVE_DECISIONS_H_
#define CHORUS_CORE_COLLECTIVE_DECISIONS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/collective/call_sites.h"
#include "core/collective/instance.h"
#include "core/collective/vote.h"

namespace chorus {

struct SequencerOptions {
  absl::Duration agree_timeout = absl::Seconds(60);
  absl::Duration exec_timeout = absl::Seconds(300);
  // How long the error of a mismatch waits for members that have not voted, so that it says what
  // all of them ask for. Never longer than agree_timeout.
  absl::Duration mismatch_grace = absl::Milliseconds(100);
  CheckCallSites check_call_sites = CheckCallSites::kOff;
  int kept_causes = 64;   // of ended epochs; older ones are answered with kEpochEnded
  int max_groups = 4096;  // ever, with the world's own: their numbers are not given again
  // Instances that are not launched, which bounds what one event has to look at; and those that may
  // still be differentiated, with what members that are gone, or were refused a gradient, had and
  // that has not been let go of yet.
  size_t max_pending = 65536;
  size_t max_tapes = 262144;
  // Collectives and results, of all ranks, of the runs of one gang, which is launched in one piece.
  int64_t max_gang_size = kDefaultMaxGangSize;
  // What may have been passed by a member that goes on is found by where it stands in the members'
  // programs, but for so many of what is pending that came last.
  size_t newest_pending = 4096;
  // Of tables of what is over that one event lets go of.
  size_t rows_per_event = 256;
};

// One instance of a launched gang.
struct LaunchedInstance {
  InstanceKey key;
  // So many calls in a row, or parts of a call, of which this is the first: the others follow it,
  // as each member's participations follow the one that is named here, and are launched behind it.
  int32_t count = 1;
  bool by_parts = false;
  InstanceKey KeyAt(int32_t call) const {
    InstanceKey result = key;
    if (call > 0) result.at = key.at.Behind(call, by_parts);
    return result;
  }
  struct Part {
    RunHandle run;
    int32_t participation;  // index into its VoteTemplate
    GroupRank member;
  };
  // Ascending by member (a rank that sends to itself: the sender first). A member that abandoned
  // this gradient has no part.
  std::vector<Part> parts;
  std::vector<GroupRank> absent;  // members that abandoned this gradient: they have no part in it
  // Of these, the members with a leaf behind their part, which now gets less than its gradient.
  struct GivenUp {
    Rank rank;
    std::shared_ptr<const PartLabel> what;  // its part of the forward collective
  };
  std::vector<GivenUp> given_up;
};

// What the caller of a Sequencer must do, in this order.
struct SequencerAction {
  enum class Kind {
    kLaunch,   // start `runs` as the gang with `ticket`
    kReserve,  // `run` must follow `order` in its gang: reserve what that takes, then Reserved(),
               // or Refuse() its rank; the gang is not launched before
    kFail,  // tell `run`'s owner `error`; it never launches (or, after kLaunch, it did not finish)
    kWarn,  // write `error` down: the ranks call an instance in different lines
    kEpochEnded,  // `epoch` has ended with `error`, and with it all `runs` that were pending, as if
                  // there was a kFail for each; votes now belong to `epoch` + 1
  };
  Kind kind = Kind::kLaunch;
  Ticket ticket;
  // kLaunch: in the order of their first instances. A rank's runs in one gang never interleave: all
  // instances of one come before all of the next, so that a device may enqueue whole runs in this
  // order. kEpochEnded: in the order of their votes.
  std::vector<RunHandle> runs;
  std::vector<RunHandle> donating;          // of `runs`: those whose donations are granted by this
  std::vector<LaunchedInstance> instances;  // in the one order that all ranks use
  RunHandle run;
  std::vector<int32_t> order;  // kReserve: its participations, as the gang orders them
  Epoch epoch;
  std::shared_ptr<const Error> error;  // not null but for kLaunch and kReserve; one for each cause
  // kFail, kEpochEnded: the epoch that is open now, where the run's own has ended; 0 where it
  // failed alone.
  Epoch open_epoch;
  std::vector<InstanceKey> dropped;  // kFail of a run alone: what it had voted for, pending no more
  // kEpochEnded: tables that nobody needs, and how many rows they have. To let go of many takes
  // long (some 50 ns each), and may be done later, on any thread.
  std::shared_ptr<void> remains;
  int64_t remaining_rows = 0;
};

// A call of one collective that needs no vote, and what all of its members' come to
// (Sequencer::Meet).
struct MetCall {
  const CallPosition* at = nullptr;  // null: as the sequencer has counted
  const std::string* source = nullptr;
};
struct MetGang {
  InstanceKey key;
  Ticket ticket;
};

struct PendingInstance {
  InstanceKey key;
  std::string what;  // descriptor of the first vote
  std::vector<Rank> voted;
  std::vector<Rank> missing;
  absl::Duration waiting;  // since the first vote
  std::string source;      // of the first vote
};

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_DECISIONS_H_
