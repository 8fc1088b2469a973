#include "client/internal/program_run.h"

#include <algorithm>
#include <cstddef>
#include <tuple>

#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/origins.h"
#include "client/internal/run_draft.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "core/base/error.h"
#include "core/transport/command.h"

namespace chorus {
namespace internal {

std::map<std::pair<GroupCore*, PairEnd>, int64_t> CallsOf(const Trace::Finished& trace) {
  std::map<std::pair<GroupCore*, PairEnd>, int64_t> calls;
  for (const Trace::Slot& slot : trace.slots) {
    for (size_t i = 0; i < slot.groups.size(); ++i) {
      if (slot.used[i] > 0) calls[{slot.groups[i], PairEnd()}] = slot.used[i];
    }
  }
  for (const Trace::PairUse& pair : trace.pairs) calls[{pair.group, pair.end}] = pair.used;
  return calls;
}

CallPositions CountCalls(const Trace::Finished& trace) {
  CallPositions calls;
  for (const Trace::Slot& slot : trace.slots) {
    calls.bases.emplace_back();
    for (size_t i = 0; i < slot.groups.size(); ++i) {
      GroupCore* const group = slot.groups[i];
      calls.bases.back().push_back({group->member->step.load(std::memory_order_relaxed),
                                    group->counters.Count(slot.used[i]), 0});
    }
  }
  for (const Trace::PairUse& pair : trace.pairs) {
    calls.pairs.push_back(pair.group->counters.Count(pair.end, pair.used));
  }
  return calls;
}

void AddRefused(const Trace::Finished& trace, const CallPositions& calls, Refusals* refusals) {
  for (size_t s = 0; s < trace.slots.size(); ++s) {
    const Trace::Slot& slot = trace.slots[s];
    for (size_t i = 0; i < slot.groups.size(); ++i) {
      if (slot.used[i] == 0) continue;
      RefusedCalls refused;
      refused.group = slot.groups[i]->id;
      refused.first = calls.bases[s][i].call;
      refused.next = refused.first + slot.used[i];
      RefusedOf(slot.groups[i]->member, refusals)->calls.push_back(refused);
    }
  }
  for (size_t p = 0; p < trace.pairs.size(); ++p) {
    const Trace::PairUse& pair = trace.pairs[p];
    RefusedCalls refused;
    refused.group = pair.group->id;
    std::tie(refused.source, refused.destination) = Between(*pair.group, pair.end);
    refused.tag = pair.end.tag;
    refused.is_recv = !pair.end.send;
    refused.first = calls.pairs[p];
    refused.next = refused.first + pair.used;
    RefusedOf(pair.group->member, refusals)->calls.push_back(refused);
  }
}

absl::Status BringInLine(const Trace::Finished& trace) {
  std::vector<MemberCore*> members;
  for (const auto& member : trace.members) members.push_back(member.get());
  return BringInLine(members);
}

const MemberCore* MemberOfRun(const Program& program, const std::vector<Tensor>& inputs) {
  if (!program.trace.members.empty()) return program.trace.members[0].get();
  Origins after;
  const auto join = [&after](const TensorData& operand) {
    OriginTable::Join(&after, operand.after, [] { return Sequence(); });
  };
  for (const Tensor& input : inputs) join(*ImplOf(input)->data);
  for (const Trace::Capture& capture : program.trace.captures) join(*capture.data);
  return after.empty() ? nullptr : after.front()->member;
}

absl::StatusOr<Sequence> SubmitProgram(const Program& program, const CompileOptions& options,
                                       const std::vector<Tensor>& inputs, const Infos& infos,
                                       const CallPositions& calls, TensorDatas* results) {
  SessionCore* const session = program.session.get();
  const Trace::Finished& trace = program.trace;
  RunDraft draft;
  Run& run = draft.run();
  run.graph = program.graph;
  TensorDatas copies;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const TensorDataPtr& data = ImplOf(inputs[i])->data;
    draft.operands.push_back(data.get());
    if (std::none_of(options.varying.begin(), options.varying.end(),
                     [i](const auto& v) { return v.input == static_cast<int>(i); })) {
      continue;
    }
    // The daemon takes the size from it, which bytes alone do not have.
    CHORUS_RETURN_IF_ERROR(session->Name(data.get()));
    if (data->state.load(std::memory_order_relaxed) == TensorData::State::kExternal) {
      CHORUS_ASSIGN_OR_RETURN(TensorDataPtr copy, session->Freeze(*data));
      draft.operands.back() = copy.get();
      copies.push_back(std::move(copy));
    }
  }
  for (const Trace::Capture& capture : trace.captures) {
    draft.operands.push_back(capture.data.get());
  }
  if (!options.donate.empty()) {
    run.donate.assign(draft.operands.size(), false);
    for (const int donated : options.donate) {
      const auto index = static_cast<size_t>(donated);
      if (!trace.graph.inputs[index].donatable) continue;
      // Detached tensors, and what autograd keeps, hold the same name. While one run may take it,
      // no other is given it: who looks at it waits for the last one alone.
      const TensorDataPtr& data = ImplOf(inputs[index])->data;
      run.donate[index] = data.use_count() == 1 &&
                          (data->given_to == Sequence() || session->log().IsOver(data->given_to));
    }
  }
  // One run is of one epoch. Members that are behind bring the run down with the cause that
  // they have not handed out yet.
  Epoch epoch;
  for (const auto& member : trace.members) {
    const Epoch entered = member->epoch.load(std::memory_order_relaxed);
    epoch = epoch == Epoch() ? entered : std::min(epoch, entered);
  }
  for (size_t s = 0; s < trace.slots.size(); ++s) {
    const Trace::Slot& slot = trace.slots[s];
    RunGroup group;
    group.world = slot.groups[0]->member->world;
    group.group = slot.groups[0]->id;
    group.epoch = epoch;
    group.base = calls.bases[s];
    run.groups.push_back(std::move(group));
    draft.member = slot.groups[0]->member;
  }
  run.pair_calls = calls.pairs;
  for (size_t o = 0; o < infos.size(); ++o) {
    draft.results.push_back({infos[o], program.output_devices[o], nullptr});
  }
  CHORUS_ASSIGN_OR_RETURN(const Sequence sequence, session->SubmitRun(&draft, results));
  for (size_t i = 0; i < run.donate.size(); ++i) {
    if (run.donate[i]) ImplOf(inputs[i])->data->given_to = sequence;
  }
  return sequence;
}

}  // namespace internal
}  // namespace chorus
