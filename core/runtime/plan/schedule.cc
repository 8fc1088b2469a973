#include "core/runtime/plan/schedule.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "core/runtime/plan/collective_step.h"
#include "core/runtime/plan/workspace.h"

namespace chorus::planning {
namespace {

using Location = DevicePlan::Location;
using Step = DevicePlan::Step;
using StreamId = DevicePlan::StreamId;

// What is known of a value as steps are made.
struct Scheduled {
  int32_t ready_step = -1;  // of its slot, by which it is computed; -1: from the start
  StreamId ready_stream = StreamId::kCompute;
  // Of roots in a workspace:
  Workspace::Block block;
  bool freed = false;
};

struct Slot {
  DevicePlan plan;
  Workspace workspace;
  BufferIndex workspace_buffer;
  // The last step of the other stream that each stream has waited for.
  int32_t waited_step[DevicePlan::kStreams] = {-1, -1};
  std::vector<int32_t> waits_for;  // by step: a step of the other stream, or -1
  // Bindings of copies, by the pair of slots; this one is the sender, or the receiver.
  absl::flat_hash_map<std::pair<int32_t, int32_t>, int32_t> pair_bindings;
};

// Numbers the events: one for each step that another stream waits for, free again after that wait.
void NumberEvents(Slot* slot) {
  std::vector<Step>& steps = slot->plan.steps;
  std::vector<int32_t> event_of(steps.size(), -1);
  std::vector<bool> waited_for(steps.size(), false);
  for (const int32_t step : slot->waits_for) {
    if (step >= 0) waited_for[step] = true;
  }
  std::vector<int32_t> free;
  for (size_t s = 0; s < steps.size(); ++s) {
    if (slot->waits_for[s] >= 0) {
      steps[s].wait = event_of[slot->waits_for[s]];
      free.push_back(steps[s].wait);
    }
    if (waited_for[s]) {
      if (free.empty()) free.push_back(slot->plan.num_events++);
      steps[s].record = event_of[s] = free.back();
      free.pop_back();
    }
  }
}

class Scheduler {
 public:
  explicit Scheduler(PlanState* state)
      : state_(*state),
        plan_(state->plan),
        scheduled_(state->values.size()),
        slots_(static_cast<size_t>(state->graph.num_device_slots)) {
    plan_.collectives.resize(slots_.size());
    plan_.operands.resize(state->participations().size());
    plan_.written.resize(state->participations().size());
  }

  void Run() {
    int32_t position = 0;
    for (const NodeIndex n : state_.order) {
      if (state_.nodes[n].live) ScheduleNode(n, position);
      ++position;
    }
    if (!plan_.equal_groups.empty()) ScheduleEqualBarrier();
    for (Slot& slot : slots_) {
      NumberEvents(&slot);
      const int64_t bytes = slot.workspace.bytes();
      if (slot.workspace_buffer >= 0) plan_.buffers[slot.workspace_buffer].bytes = bytes;
      plan_.workspace_bytes.push_back(bytes);
      slot.plan.num_buffers = static_cast<int32_t>(plan_.buffers.size());
      slot.plan.num_bindings =
          static_cast<int32_t>(plan_.collectives[plan_.device_plans.size()].size());
      plan_.device_plans.push_back(EncodeDevicePlan(slot.plan));
    }
    plan_.only_collectives = slots_.size() == 1 && slots_.front().plan.nodes.empty();
  }

 private:
  // --- Where values stand, and when they are there ---

  Location LocationOf(ValueIndex v) const {
    const ValueIndex root = state_.values[v].root;
    Location location = LocationInBuffer(state_, v);
    if (state_.values[root].in_workspace) {
      location.buffer = slots_[state_.table.device_slot(root)].workspace_buffer;
      location.offset += scheduled_[root].block.offset;
    }
    return location;
  }

  // Begins a step: what it reads, and the wait that this takes.
  Step Begin(int32_t slot_index, StreamId stream, absl::Span<const ValueIndex> inputs,
             int32_t also_after = -1) {
    Slot& slot = slots_[slot_index];
    Step step;
    step.stream = stream;
    int32_t needed_step = also_after;
    for (const ValueIndex v : inputs) {
      const Scheduled& value = scheduled_[v];
      if (value.ready_step >= 0 && value.ready_stream != stream) {
        needed_step = std::max(needed_step, value.ready_step);
      }
      step.inputs.push_back(LocationOf(v));
    }
    int32_t& waited_step = slot.waited_step[static_cast<int>(stream)];
    if (needed_step > waited_step) {
      slot.waits_for.push_back(needed_step);
      waited_step = needed_step;
    } else {
      slot.waits_for.push_back(-1);
    }
    for (const ValueIndex v : inputs) TouchBlock(v, slot_index, stream);
    return step;
  }

  int32_t CurrentStep(int32_t slot_index) const {
    return static_cast<int32_t>(slots_[slot_index].plan.steps.size());
  }

  void TouchBlock(ValueIndex v, int32_t slot_index, StreamId stream) {
    const ValueIndex root = state_.values[v].root;
    if (!state_.values[root].in_workspace) return;
    scheduled_[root].block.touched[static_cast<int>(stream)] = CurrentStep(slot_index);
  }

  // Finds room for an output of the step that was begun.
  Location PlaceOutput(ValueIndex v, int32_t slot_index, StreamId stream) {
    const ValueState& value = state_.values[v];
    Location location;
    if (value.root == v) {
      if (value.in_workspace) {
        scheduled_[v].block = AllocateBlock(state_.table.type(v).num_bytes(), slot_index, stream);
      }
      location = LocationOf(v);
      location.producer = value.list_member;
    }
    scheduled_[v].ready_step = CurrentStep(slot_index);
    scheduled_[v].ready_stream = stream;
    return location;
  }

  // Finds room for what the step that was begun needs beside its operands. The block is free again
  // behind it.
  Workspace::Block PlaceScratch(int64_t bytes, int32_t slot_index, Step* step) {
    if (bytes == 0) return {};
    const Workspace::Block block = AllocateBlock(bytes, slot_index, step->stream);
    step->workspace.buffer = slots_[slot_index].workspace_buffer;
    step->workspace.offset = block.offset;
    step->workspace_bytes = bytes;
    return block;
  }

  // A block of the slot's workspace that the step that was begun may write.
  Workspace::Block AllocateBlock(int64_t bytes, int32_t slot_index, StreamId stream) {
    Slot& slot = slots_[slot_index];
    if (slot.workspace_buffer < 0) {
      BufferSpec spec;
      spec.kind = BufferSpec::Kind::kWorkspace;
      spec.device_slot = slot_index;
      slot.workspace_buffer = plan_.buffers.push_back(spec);
    }
    Workspace::Block block =
        slot.workspace.Allocate(bytes, stream, slot.waited_step[static_cast<int>(stream)]);
    block.touched[static_cast<int>(stream)] = CurrentStep(slot_index);
    return block;
  }

  // Gives back what no step touches after the node at `position` of the order.
  void FreeAfter(ValueIndex v, int32_t position) {
    const ValueIndex root = state_.values[v].root;
    const ValueState& value = state_.values[root];
    if (!value.in_workspace || value.last_use != position || scheduled_[root].freed) return;
    scheduled_[root].freed = true;
    slots_[state_.table.device_slot(root)].workspace.Free(scheduled_[root].block);
  }

  void Push(int32_t slot_index, Step step) {
    slots_[slot_index].plan.steps.push_back(std::move(step));
  }

  // --- Nodes ---

  void ScheduleNode(NodeIndex n, int32_t position) {
    const Node& node = state_.node(n);
    switch (state_.nodes[n].form) {
      case Form::kAlias: {
        const Scheduled& from = scheduled_[node.inputs[0]];
        Scheduled& to = scheduled_[state_.output(n, 0)];
        to.ready_step = from.ready_step;
        to.ready_stream = from.ready_stream;
        return;
      }
      case Form::kKernel:
        ScheduleKernel(n, position);
        break;
      case Form::kCollective:
        ScheduleCollective(n);
        break;
      case Form::kCopy:
        ScheduleCopy(n);
        break;
    }
    for (const ValueIndex v : node.inputs) FreeAfter(v, position);
    for (size_t i = 0; i < node.outputs.size(); ++i) FreeAfter(state_.output(n, i), position);
  }

  void ScheduleKernel(NodeIndex n, int32_t position) {
    const Node& node = state_.node(n);
    Step step = Begin(node.device_slot, StreamId::kCompute, node.inputs);
    // Apart from the operands: they stand while the kernel runs.
    const Workspace::Block scratch =
        PlaceScratch(state_.nodes[n].workspace_bytes, node.device_slot, &step);
    // In place, where the op allows it and the input is not needed any more.
    if (state_.nodes[n].def->elementwise && node.outputs.size() == 1) {
      for (const ValueIndex v : node.inputs) {
        if (state_.table.type(v) == node.outputs[0]) FreeAfter(v, position);
      }
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const ValueIndex v = state_.output(n, i);
      step.outputs.push_back(PlaceOutput(v, node.device_slot, StreamId::kCompute));
      step.held_back |= state_.values[v].takes_over;
    }
    if (step.workspace_bytes > 0) slots_[node.device_slot].workspace.Free(scratch);
    DevicePlan& plan = slots_[node.device_slot].plan;
    step.node = static_cast<int32_t>(plan.nodes.size());
    step.equal_group = state_.nodes[n].equal_group;
    if (step.equal_group >= 0) last_equal_step_ = CurrentStep(node.device_slot);
    DevicePlan::Kernel kernel;
    kernel.node = node;
    kernel.node.inputs.clear();
    for (const ValueIndex v : node.inputs) kernel.input_types.push_back(state_.table.type(v));
    plan.nodes.push_back(std::move(kernel));
    Push(node.device_slot, std::move(step));
  }

  void ScheduleCollective(NodeIndex n) {
    const Node& node = state_.node(n);
    const NodeState& node_state = state_.nodes[n];
    Step step = Begin(node.device_slot, StreamId::kCommunication, node.inputs);
    SpreadInputs(n, &step);
    for (size_t i = 0; i < node_state.pieces.inputs.size(); ++i) {
      const Location& location = step.inputs[i];
      plan_.operands[node_state.participation].push_back({location.buffer, location.offset});
    }
    PlaceOutputs(n, &step);
    plan_.written[node_state.participation] = WrittenBy(n);
    Plan::CollectiveSlot binding;
    binding.participation = node_state.participation;
    PushCollective(node.device_slot, AddBinding(node.device_slot, binding),
                   CollectiveStepOf(node, node_state.pieces), std::move(step));
  }

  // A tensor that holds pieces of so many rows, as the locations of all of them.
  template <typename Locations>
  static void PushPieces(const CollectivePieces& pieces, const std::vector<int64_t>& rows,
                         DType dtype, Location location, Locations* to) {
    for (const int64_t n : rows) {
      to->push_back(location);
      location.offset += n * pieces.row_elements * DTypeBytes(dtype);
    }
  }

  void SpreadInputs(NodeIndex n, Step* step) const {
    const Node& node = state_.node(n);
    const NodeState& node_state = state_.nodes[n];
    if (!node_state.def->one_input || HasRuntimeCounts(*node.collective) || node.inputs.empty())
      return;
    const auto operands = step->inputs;
    step->inputs.clear();
    PushPieces(node_state.pieces, node_state.pieces.inputs, node_state.pieces.dtype, operands[0],
               &step->inputs);
    step->inputs.insert(step->inputs.end(), operands.begin() + 1, operands.end());
  }

  void PlaceOutputs(NodeIndex n, Step* step) {
    const Node& node = state_.node(n);
    const NodeState& node_state = state_.nodes[n];
    const CollectivePieces& pieces = node_state.pieces;
    const bool runtime = HasRuntimeCounts(*node.collective);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const Location location =
          PlaceOutput(state_.output(n, i), node.device_slot, StreamId::kCommunication);
      const bool holders = static_cast<int>(i) >= NumVisible(node) && !IsFactor(node, i);
      if (node_state.def->one_output && !runtime && i == 0) {
        PushPieces(pieces, pieces.outputs, pieces.dtype, location, &step->outputs);
        continue;
      }
      if (node_state.def->one_input && !runtime && holders) {
        PushPieces(pieces, pieces.inputs, DType::kF32, location, &step->outputs);
        continue;
      }
      step->outputs.push_back(location);
      if (HasPeer(node.collective->kind) && location.producer >= 0) {
        step->outputs.back().producer = PeerInPair(*node.collective);
      }
    }
  }

  Plan::Written WrittenBy(NodeIndex n) const {
    const Node& node = state_.node(n);
    Plan::Written written;
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const ValueIndex v = state_.output(n, i);
      const ValueState& value = state_.values[v];
      if (value.root != v || value.list_member >= 0) continue;
      if (value.buffer < 0 && !value.in_workspace) continue;
      const bool reduces = IsReducing(node.collective->kind) && !IsFactor(node, i);
      const bool shared = state_.options.share_results && IsSharedResult(node, i);
      Plan::Written::Bytes& bytes = shared ? written.shared : written.own;
      (reduces ? bytes.reduced : bytes.copied) += node.outputs[i].num_bytes();
      if (!node.inputs.empty() && state_.values[node.inputs[0]].slice_of == v) {
        bytes.copied -= state_.table.type(node.inputs[0]).num_bytes();
      }
    }
    return written;
  }

  // A send on the one slot, a recv on the other. With shared memory the value stays where it is and
  // the two only order.
  void ScheduleCopy(NodeIndex n) {
    const Node& node = state_.node(n);
    const ValueIndex input = node.inputs[0];
    const int32_t from = state_.table.device_slot(input);
    const int32_t to = node.device_slot;
    Step send = Begin(from, StreamId::kCommunication, node.inputs);
    Step recv = Begin(to, StreamId::kCommunication, {});
    recv.outputs.push_back(PlaceOutput(state_.output(n, 0), to, StreamId::kCommunication));
    for (const bool sends : {true, false}) {
      const int32_t slot = sends ? from : to;
      DevicePlan::CollectiveStep collective;
      collective.kind = sends ? CollectiveKind::kSend : CollectiveKind::kRecv;
      collective.root = sends ? 1 : 0;
      collective.dtype = state_.table.type(input).dtype;
      collective.count = state_.table.type(input).num_elements();
      (sends ? collective.num_inputs : collective.num_outputs) = 1;
      PushCollective(slot, PairBinding(slot, from, to), std::move(collective),
                     std::move(sends ? send : recv));
    }
  }

  // No rank ends before the others have done what they do for it.
  void ScheduleEqualBarrier() {
    Step step = Begin(0, StreamId::kCommunication, {}, last_equal_step_);
    DevicePlan::CollectiveStep barrier;
    barrier.kind = CollectiveKind::kBarrier;
    Plan::CollectiveSlot binding;
    binding.equal_work = true;
    PushCollective(0, AddBinding(0, binding), std::move(barrier), std::move(step));
    slots_[0].plan.num_equal_groups = static_cast<int32_t>(plan_.equal_groups.size());
  }

  // --- Communicators ---

  int32_t AddBinding(int32_t slot_index, const Plan::CollectiveSlot& binding) {
    plan_.collectives[slot_index].push_back(binding);
    return static_cast<int32_t>(plan_.collectives[slot_index].size()) - 1;
  }

  int32_t PairBinding(int32_t here, int32_t from, int32_t to) {
    const auto added = slots_[here].pair_bindings.try_emplace({from, to}, -1);
    if (added.second) {
      Plan::CollectiveSlot binding;
      binding.from_slot = from;
      binding.to_slot = to;
      added.first->second = AddBinding(here, binding);
    }
    return added.first->second;
  }

  void PushCollective(int32_t slot_index, int32_t binding, DevicePlan::CollectiveStep collective,
                      Step step) {
    DevicePlan& plan = slots_[slot_index].plan;
    collective.binding = binding;
    step.collective = static_cast<int32_t>(plan.collectives.size());
    plan.collectives.push_back(std::move(collective));
    if (!plan_.meetings.empty()) plan_.meetings[slot_index].push_back(binding);
    Push(slot_index, std::move(step));
  }

  const PlanState& state_;
  Plan& plan_;
  IndexedVector<ValueIndex, Scheduled> scheduled_;
  std::vector<Slot> slots_;
  int32_t last_equal_step_ = -1;
};

}  // namespace

void Schedule(PlanState* state) { Scheduler(state).Run(); }

}  // namespace chorus::planning
