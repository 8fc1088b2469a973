// Builds votes for tests: one run, its group slots and its participations.
//
// Threads: thread-compatible. Ownership: the vote that Build() returns refers to the TestRun.
// Errors: none; Sequencer::Submit says what is wrong with a vote.
#ifndef CHORUS_CORE_COLLECTIVE_TEST_RUN_H_
#define CHORUS_CORE_COLLECTIVE_TEST_RUN_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/bytes.h"
#include "core/collective/sequencer.h"

namespace chorus {

// As if each run that fails with its epoch had an action of its own, before the epoch's, and each
// call of a list that is launched an instance.
inline std::vector<SequencerAction> OneByOne(const std::vector<SequencerAction>& actions) {
  std::vector<SequencerAction> all;
  for (const SequencerAction& action : actions) {
    if (action.kind == SequencerAction::Kind::kEpochEnded) {
      for (const RunHandle run : action.runs) {
        SequencerAction& failed = all.emplace_back();
        failed.kind = SequencerAction::Kind::kFail;
        failed.run = run;
        failed.epoch = action.epoch;
        failed.open_epoch = action.open_epoch;
        failed.error = action.error;
      }
    }
    all.push_back(action);
    all.back().instances.clear();
    for (const LaunchedInstance& instance : action.instances) {
      for (int32_t call = 0; call < instance.count; ++call) {
        LaunchedInstance& one = all.back().instances.emplace_back(instance);
        one.key = instance.KeyAt(call);
        one.count = 1;
        for (LaunchedInstance::Part& part : one.parts) part.participation += call;
      }
    }
  }
  return all;
}

class TestRun {
 public:
  TestRun(int64_t run, Epoch epoch, int64_t step = 0) : step_(step) {
    vote_.run = RunHandle(run);
    vote_.epoch = epoch;
  }

  // Adds a group slot. `base` counts the calls that each held member has made of the group before
  // in the step.
  int32_t Slot(GroupId group, int32_t size, const std::vector<int32_t>& held,
               const std::vector<int64_t>& base) {
    GroupSlot slot;
    slot.size = size;
    for (const int32_t member : held) slot.held.push_back(GroupRank(member));
    slots_.push_back(slot);
    vote_.groups.emplace_back();
    vote_.groups.back().group = group;
    for (const int64_t call : base) vote_.groups.back().base.push_back({step_, call, 0});
    return static_cast<int32_t>(slots_.size()) - 1;
  }

  // Adds an all_reduce SUM f32[4]; the caller changes what it likes.
  Participation& AllReduce(int32_t slot, int32_t member, const std::vector<int32_t>& after = {}) {
    what_.participations.emplace_back();
    Participation& part = what_.participations.back();
    part.descriptor.kind = CollectiveKind::kAllReduce;
    part.descriptor.reduction = Reduction::kSum;
    part.descriptor.dtype = DType::kF32;
    part.descriptor.dims = {4};
    part.group_slot = slot;
    part.member = GroupRank(member);
    part.after = after;
    part.node = static_cast<int32_t>(what_.participations.size()) - 1;
    part.source = absl::StrCat("rank", member, ".cc:", 10 + part.node);
    return part;
  }
  Participation& SendTo(int32_t slot, int32_t member, int32_t peer, int64_t tag = 0) {
    Participation& part = AllReduce(slot, member);
    part.descriptor.kind = CollectiveKind::kSend;
    part.descriptor.reduction = Reduction::kNone;
    part.peer = GroupRank(peer);
    part.tag = tag;
    return part;
  }
  Participation& RecvFrom(int32_t slot, int32_t member, int32_t peer, int64_t tag = 0) {
    Participation& part = SendTo(slot, member, peer, tag);
    part.is_recv = true;
    return part;
  }
  // Adds a gradient of `forward`, an instance of an earlier run.
  Participation& GradientOf(const InstanceKey& forward, int32_t request, int32_t slot,
                            int32_t member) {
    Participation& part = AllReduce(slot, member);
    part.instance.kind = InstanceRef::Kind::kBound;
    part.instance.slot = static_cast<int32_t>(vote_.bound.size());
    vote_.bound.push_back(forward.Gradient({step_, request}));
    return part;
  }
  // Adds a gradient of participation `forward` of this run.
  Participation& GradientHere(int32_t forward, int32_t request, int32_t slot, int32_t member) {
    Participation& part = AllReduce(slot, member);
    part.instance.kind = InstanceRef::Kind::kGradient;
    part.instance.node = forward;
    part.instance.request = request;
    return part;
  }

  std::vector<RunHandle>& producers() { return vote_.producers; }
  Vote& vote() { return vote_; }
  void Donate() { vote_.donates = true; }
  void BlockExternally() { vote_.externally_blocked = true; }

  // Valid while this object is, and unchanged.
  const Vote& Build() {
    ByteWriter bytes;
    for (const Participation& part : what_.participations) {
      bytes.PutString(part.descriptor.ToString());
      bytes.PutSigned(part.group_slot);
      bytes.PutSigned(part.member.value());
      bytes.Put(part.instance.kind);
      bytes.PutSigned(part.instance.node);
      bytes.PutSigned(part.instance.request);
      bytes.PutSigned(part.instance.slot);
      bytes.PutSigned(part.peer.value());
      bytes.PutSigned(part.tag);
      bytes.PutSigned(part.part);
      bytes.Put<uint8_t>(part.is_recv);
      bytes.Put<uint8_t>(part.wants_grad + 2 * part.leads_to_collective + 4 * part.leads_to_leaf);
      bytes.PutVarint(part.after.size());
      for (const int32_t before : part.after) bytes.PutSigned(before);
    }
    what_.fingerprint.lo = std::hash<std::string>()(bytes.bytes());
    what_.fingerprint.hi = bytes.size();
    what_.lists = FindLists(what_.participations);
    vote_.what = std::make_shared<VoteTemplate>(what_);
    vote_.slots = &slots_;
    return vote_;
  }

 private:
  const int64_t step_;
  Vote vote_;
  VoteTemplate what_;
  std::vector<GroupSlot> slots_;
};

// A run of `member` with one all_reduce as its `base`-th collective of the group.
inline TestRun OneAllReduce(int64_t run, Epoch epoch, GroupId group, int32_t size, int32_t member,
                            int64_t base, int64_t step = 0) {
  TestRun result(run, epoch, step);
  result.AllReduce(result.Slot(group, size, {member}, {base}), member);
  return result;
}

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_TEST_RUN_H_
