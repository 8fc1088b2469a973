// What a graph becomes at registration.
//
// The plan says for each value where its bytes stand, splits the nodes by device slot into step
// lists on two streams (compute, communication) with the waits between them, and lists what the run
// votes for. CompilePlan makes it (plan.h).
//
// Threads: never changed afterwards, so any number may read it. Ownership: plain values. Errors:
// none.
#ifndef CHORUS_CORE_RUNTIME_PLAN_COMPILED_PLAN_H_
#define CHORUS_CORE_RUNTIME_PLAN_COMPILED_PLAN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/indexed_vector.h"
#include "core/collective/vote.h"
#include "core/graph/graph.h"
#include "core/runtime/device_plan.h"

namespace chorus {

// One entry of a plan's buffer table: what the node must supply as an address at launch. The table
// is one for the whole run; every device slot's launch carries all of it.
struct BufferSpec {
  enum class Kind : uint8_t {
    kInput = 0,   // the run's input `index`
    kOwned = 1,   // a buffer of its own, counted, reserved at submit (outputs, operands of moves)
    kShared = 2,  // result `list_index` of participation `index`, which all members have alike: one
                  // buffer for all ranks of a domain, reserved by the first voter there. -1: all
                  // pieces in one tensor
    kPeer = 3,    // operand `list_index` of member `list_member` of participation `index`: read
                  // where it stands (groups of one domain only). It may itself be a kPeer or
                  // kShared entry of that member's run, of an instance that is earlier in the
                  // gang's order. When that member is absent the node supplies a buffer of
                  // `bytes` instead, which the launch fills with zeros; any number of ranks may
                  // be given the same one.
    kWorkspace = 4,  // scratch of the whole run on this device slot, one entry a slot
  };
  Kind kind = Kind::kOwned;
  int32_t index = -1;
  int32_t list_member = -1;
  int32_t list_index = 0;
  int32_t device_slot = 0;
  int64_t bytes = 0;
};

// Devices of one plan meet in collectives of members that are held here, and where values are
// copied between them. All of them come to these meetings in one order: that of the steps of the
// whole plan, in which the members' calls of one instance, and the two ends of a copy, have nothing
// between them.
struct Plan {
  // A run of the graph needs these addresses; steps name them by index. The graph's inputs come
  // first, in their order.
  IndexedVector<BufferIndex, BufferSpec> buffers;
  // Where each graph output stands. Outputs may share a buffer (the same value twice, reshapes),
  // and the buffer may be of any kind but kWorkspace: an output that is just an input stands in it.
  struct Output {
    BufferIndex buffer;
    int64_t offset = 0;
    int64_t bytes = 0;
    int32_t device_slot = 0;  // on which it is produced, and where launches that read it belong
    // The input whose memory this output may take over: when the run donates it and holds its only
    // reference, the node may put that input's address into this output's kOwned entry as well, and
    // launch with LaunchMessage::hold_back. Then nothing is written there before the run's last
    // collective is complete, or if anything failed before. The same in every order of collectives.
    // -1: never: it is needed longer, or the graph has several device slots. Each input is the
    // donor of one output at most.
    int32_t donor = -1;
    // Nothing but this output stands in its buffer, a kOwned one, and no other rank reads it: a
    // session that has the output alone has the memory alone.
    bool sole = false;
    // Where its value comes from, if other ranks may have the same: output `index` of the
    // collective of participation `participation`, which is equal on all its members, or result
    // `index` of `equal_group`. -1: neither.
    int32_t participation = -1;
    int32_t equal_group = -1;
    int32_t index = 0;
  };
  std::vector<Output> outputs;
  // Work that is the same on every rank that has the same leaves: pure ops that depend on the
  // graph's inputs and on results that all members of a collective get alike, and on which nothing
  // but such ops and the graph's outputs depend (an optimiser's update). Ranks of one gang whose
  // groups have equal hashes and equal leaves may have one of them run it, in buffers that are
  // theirs in common: the others' launches leave it out (LaunchMessage::left_out), and all of them
  // bind the communicator of the devices that take part to the plan's last binding, so that none
  // ends before the work is done. Every group has a participation among its leaves. The same in
  // every order of collectives. Plans with several device slots have none.
  struct EqualGroup {
    Hash128 hash;  // of the ops and of the types of the leaves
    struct Leaf {
      int32_t input = -1;          // a graph input
      int32_t participation = -1;  // else output `index` of that one
      int32_t index = 0;
    };
    std::vector<Leaf> leaves;
    std::vector<BufferIndex> results;  // the kOwned buffers that it writes, by index
    int64_t kernels = 0;
  };
  std::vector<EqualGroup> equal_groups;
  // Per input: true when client-writable memory may be bound to it: the plan reads it only as
  // operand of floating-point SUM, AVG or PREMUL_SUM (or, where devices do not share an address
  // space, once as the source of a copy). Else it is copied to daemon memory first.
  std::vector<bool> input_may_be_staging;
  // What collectives of this run read: for kPeer entries of other ranks' plans. Operands of moves
  // stand in counted buffers (input, owned, shared, peer), never in a workspace.
  struct Operand {
    BufferIndex buffer;
    int64_t offset = 0;
  };
  std::vector<std::vector<Operand>> operands;  // by participation, by list index
  // By participation: the first that is of its instance, as PlanOptions::instances says. A run in
  // which others are of one instance needs a plan made for that: here a copy may stand between
  // them. Empty: it makes no difference (nothing is copied between device slots).
  std::vector<int32_t> instances;
  std::shared_ptr<const VoteTemplate> votes;  // participations in program order
  // Bytes that collectives write for this rank: results of reductions, and copies of pieces; what
  // is an alias, or stands where it belongs already, is not written.
  struct Written {
    struct Bytes {
      int64_t reduced = 0;
      int64_t copied = 0;
    };
    Bytes own;
    Bytes shared;  // once for all ranks of a domain
  };
  std::vector<Written> written;  // by participation
  // The communicators that each slot's launch binds, in the order of LaunchMessage::collectives:
  // one for each participation on that slot, and one for each ordered pair of slots between which
  // values are copied (members: 0 = from_slot's device, 1 = to_slot's); last, where there are
  // equal_groups, that of the ranks that share them, or 0 where this launch shares none. The
  // communicator of a send or recv has its two members in the order of their group ranks, the lower
  // first: which of them sends depends on the order of differentiation, and both directions share
  // one communicator.
  struct CollectiveSlot {
    int32_t participation = -1;  // >= 0: that instance's communicator
    int32_t from_slot = -1;      // else: internal copy
    int32_t to_slot = -1;
    bool equal_work = false;  // else: of those that share equal work
  };
  std::vector<std::vector<CollectiveSlot>> collectives;  // by device slot
  // By device slot: the `collectives` of its steps, in the order of these. Only of plans in which
  // values are copied between device slots.
  std::vector<std::vector<int32_t>> meetings;
  std::vector<std::string> device_plans;  // by device slot: bytes for LoadPlan
  bool only_collectives = false;          // there is one device slot, and it has no kernels
  std::vector<int64_t> workspace_bytes;   // by device slot
};

// What a plan takes in memory (core/base/memory_account.h), its votes included.
int64_t MemoryOf(const Plan& plan);

}  // namespace chorus

#endif  // CHORUS_CORE_RUNTIME_PLAN_COMPILED_PLAN_H_
