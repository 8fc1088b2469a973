// What a run asks of the others: the collectives that it takes part in.
//
// Threads: plain data and pure functions; a template is never changed. Ownership: runs share a
// template and its labels; a vote refers to its graph's slots. Errors: none; Sequencer::Submit says
// what is wrong with a vote.
#ifndef CHORUS_CORE_COLLECTIVE_VOTE_H_
#define CHORUS_CORE_COLLECTIVE_VOTE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "core/base/ids.h"
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
  GroupRank member;      // that this node speaks for
  InstanceRef instance;  // kGradient's `node` is an index into VoteTemplate::participations
  GroupRank peer{-1};    // send/recv: the other end
  int64_t tag = 0;
  bool is_recv = false;
  int32_t part = 0;  // as in Collective
  // The rank holds a tape entry after the run, until DropTape, unless the run takes a gradient of
  // it itself (a participation of kind kGradient): that uses the entry up. A rank without one
  // counts as abandoned for every gradient of this instance that this same run does not ask for.
  bool wants_grad = false;
  // Where its operand comes from (Collective): what a rank that gives up its part of a gradient
  // takes with it. A rank that asks for one that would have led to another collective is told so;
  // one that would have led to a leaf goes on with zeros, which are right for everybody else.
  bool leads_to_collective = false;
  bool leads_to_leaf = false;
  std::vector<int32_t> after;  // earlier participations of this run whose result this one needs
  NodeIndex node = 0;          // for the plan
  std::string source;          // trainer's file:line
  // LabelOf, made once for all runs, where the operand leads anywhere.
  std::shared_ptr<const PartLabel> label;
};
std::shared_ptr<const PartLabel> LabelOf(const Participation& part);
// In memory, from above; of LabelOf's never more than kMostLabelBytes.
inline constexpr int64_t kMostLabelBytes = 768;
int64_t BytesOf(const PartLabel& label);
// What one rank asks for, with its end of a pair, in words.
std::string PartText(const Participation& part);

// An instance's *seats*: the members of its group, or source and destination of its pair. A
// gradient has the seats of its forward instance: the k-th order gradient of a pair flows against
// the one before it.
inline int32_t SeatOf(const InstanceKey& key, const Participation& part) {
  if (!key.is_pair()) return part.member.value();
  const bool reversed = key.path.size() % 2 == 1;
  return part.is_recv != reversed ? 1 : 0;
}
inline GroupRank MemberAt(const InstanceKey& key, int32_t seat) {
  if (!key.is_pair()) return GroupRank(seat);
  return seat == 0 ? key.source : key.destination;
}

// Participations that follow each other and are calls, or parts of one call, in a row of one
// member: the ranks agree on all of them at once where they ask for them alike.
struct CallList {
  int32_t first = 0;
  int32_t count = 1;
  bool by_parts = false;
};

// What a registered graph votes for, made once at registration and shared by its runs.
struct VoteTemplate {
  std::vector<Participation> participations;  // program order
  // All of these, in their order (FindLists). Empty: each by itself.
  std::vector<CallList> lists;
  Hash128 fingerprint;  // of the participations but their sources
};
// The longest lists that there are. In one are collectives of a group whose rows are alike on all
// ranks and of which the run keeps nothing, nor asks anything more: what others may ask of each by
// itself (a gradient, the other end of a pair, rows that are compared) is by itself.
std::vector<CallList> FindLists(const std::vector<Participation>& participations);

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
  int64_t results = 0;      // and what else its launch looks at, as so many of these
  int64_t launch_work = 1;  // what its launch takes its caller, in pieces (core/base/work.h)
};

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_VOTE_H_
