#include "client/internal/trace.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace internal {
namespace {

thread_local Trace* current_trace = nullptr;
std::atomic<int64_t> last_id{0};

// Takes the extra outputs of collectives that no gradient is taken of: nobody uses them, and a call
// that wants no gradient has none. `recorded`: which nodes had them when they were added.
void DropExtras(Graph* graph, const std::vector<bool>& recorded) {
  std::vector<ValueIndex> new_index(graph->num_values(), -1);
  ValueIndex before = 0;
  ValueIndex after = 0;
  for (size_t i = 0; i < graph->inputs.size(); ++i) new_index[before++] = after++;
  for (size_t n = 0; n < graph->nodes.size(); ++n) {
    Node& node = graph->nodes[n];
    for (ValueIndex& input : node.inputs) input = new_index[input];
    const int outputs = static_cast<int>(node.outputs.size());
    int count = outputs;
    if (recorded[n] && !node.collective->wants_grad) {
      count = NumVisibleOutputs(*node.collective, outputs);
    }
    for (int o = 0; o < outputs; ++o) new_index[before++] = o < count ? after++ : ValueIndex();
    node.outputs.resize(static_cast<size_t>(count));
  }
  for (GraphOutput& output : graph->outputs) output.value = new_index[output.value];
}

}  // namespace

InputRole RoleOf(const TensorData& data) {
  const TensorData::State state = data.state.load(std::memory_order_acquire);
  const bool travels = state == TensorData::State::kInline || state == TensorData::State::kHost;
  return travels && data.info->type.dims.empty() ? InputRole::kScalar : InputRole::kData;
}

Trace::Trace(std::shared_ptr<SessionCore> session, bool varies)
    : id_(last_id.fetch_add(1, std::memory_order_relaxed) + 1),
      session_(std::move(session)),
      varies_(varies),
      builder_(session_->device_count()) {}

Trace* Trace::Current() { return current_trace; }

absl::Status CheckNotInTrace(absl::string_view call, absl::string_view instead) {
  if (current_trace == nullptr) return absl::OkStatus();
  return MakeError(Reason::kWrongState,
                   absl::StrCat(call, ": not inside a compiled function; ", instead));
}

absl::Status FailInTrace(absl::string_view call, absl::string_view instead) {
  const absl::Status refused = CheckNotInTrace(call, instead);
  if (!refused.ok()) current_trace->Fail(refused);
  return refused;
}

absl::Status CheckTrace(absl::string_view op, const TensorData& data, TraceId trace) {
  if (data.state.load(std::memory_order_acquire) != TensorData::State::kTraced ||
      data.trace == trace) {
    return absl::OkStatus();
  }
  return MakeError(
      Reason::kWrongState,
      absl::StrCat(op, ": a tensor of a compiled function was used outside; return it instead"));
}

TraceScope::TraceScope(Trace* trace) : outer_(current_trace) { current_trace = trace; }
TraceScope::~TraceScope() { current_trace = outer_; }

TensorDataPtr Trace::AddInput(const TensorInfoPtr& info, int32_t device_slot, InputRole role,
                              bool donatable) {
  GraphInput input;
  input.type = info->type;
  input.role = role;
  input.donatable = donatable;
  input.device_slot = device_slot;
  auto data = std::make_shared<TensorData>(session_);
  data->info = info;
  data->device_slot = device_slot;
  data->trace = id_;
  data->value = builder_.AddInput(std::move(input));
  data->state.store(TensorData::State::kTraced, std::memory_order_release);
  return data;
}

int32_t Trace::SlotOf(GroupCore* group) {
  for (size_t s = 0; s < slots_.size(); ++s) {
    std::vector<GroupCore*>& groups = slots_[s].groups;
    if (groups[0]->member->world != group->member->world || groups[0]->id != group->id) continue;
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) {
      groups.insert(std::upper_bound(
                        groups.begin(), groups.end(), group,
                        [](const GroupCore* a, const GroupCore* b) { return a->rank < b->rank; }),
                    group);
    }
    return static_cast<int32_t>(s);
  }
  GroupSlot slot;
  slot.size = static_cast<int32_t>(group->ranks.size());
  slots_.push_back({{group}});
  return builder_.AddGroupSlot(std::move(slot));
}

absl::StatusOr<TensorDatas> Trace::Add(NodeSpec spec, absl::Span<const TensorDataPtr> inputs,
                                       GroupCore* group, int32_t* node) {
  if (group != nullptr && group->member->session != session_) {
    return BadType(absl::StrCat(spec.op,
                                ": expected a group of the session on which the compiled function "
                                "runs, that of its inputs, got one of another"));
  }
  spec.inputs.clear();
  for (const TensorDataPtr& input : inputs) {
    if (input->state.load(std::memory_order_acquire) == TensorData::State::kTraced) {
      spec.inputs.push_back(input->value);
      continue;
    }
    TensorDataPtr& placeholder = captured_[input.get()];
    if (placeholder == nullptr) {
      placeholder = AddInput(input->info, input->device_slot, RoleOf(*input), /*donatable=*/false);
      captures_.push_back({input});
    }
    spec.inputs.push_back(placeholder->value);
  }
  if (group != nullptr) {
    spec.collective->group_slot = SlotOf(group);
    const auto& member = group->member;
    const bool listed = std::any_of(members_.begin(), members_.end(),
                                    [member](const auto& m) { return m.get() == member; });
    if (!listed) members_.push_back(member->shared_from_this());
  }
  const int32_t device_slot = spec.device_slot;
  *node = static_cast<int32_t>(builder_.nodes().size());
  CHORUS_ASSIGN_OR_RETURN(const std::vector<ValueIndex> values, builder_.Emit(std::move(spec)));
  TensorDatas results;
  for (const ValueIndex value : values) {
    auto data = std::make_shared<TensorData>(session_);
    {
      SessionLock lock(session_.get());
      CHORUS_RETURN_IF_ERROR(lock.status());
      data->info = session_->interner().Type(builder_.TypeOf(value));
    }
    data->device_slot = device_slot;
    data->trace = id_;
    data->value = value;
    data->state.store(TensorData::State::kTraced, std::memory_order_release);
    results.push_back(std::move(data));
  }
  return results;
}

absl::StatusOr<Trace::Finished> Trace::Finish(absl::Span<const TensorDataPtr> outputs) {
  CHORUS_RETURN_IF_ERROR(failed_);
  for (const TensorDataPtr& output : outputs) {
    GraphOutput added;
    added.value = output->value;
    builder_.AddOutput(added);
  }
  Finished finished;
  finished.graph = builder_.Build();
  finished.captures = std::move(captures_);
  finished.uploads = std::move(uploads_);
  finished.members = std::move(members_);
  Graph& graph = finished.graph;
  for (size_t s = 0; s < slots_.size(); ++s) {
    Slot slot;
    slot.groups = slots_[s].groups;
    for (GroupCore* group : slot.groups) {
      graph.group_slots[s].held.push_back(GroupRank(group->rank));
      graph.group_slots[s].device_slots.push_back(group->member->device_slot);
      slot.generations.push_back(group->generation.load(std::memory_order_relaxed));
    }
    slot.used.assign(slot.groups.size(), 0);
    finished.slots.push_back(std::move(slot));
  }

  // A node holds a tape entry exactly where the graph takes its gradient, which uses the entry up:
  // nothing is left of the tape when the run is over.
  std::vector<bool> differentiated(graph.nodes.size(), false);
  for (const Node& node : graph.nodes) {
    if (node.collective.has_value() &&
        node.collective->instance.kind == InstanceRef::Kind::kGradient) {
      differentiated[node.collective->instance.node] = true;
    }
  }
  std::vector<bool> recorded(graph.nodes.size(), false);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (!graph.nodes[n].collective.has_value()) continue;
    Collective& collective = *graph.nodes[n].collective;
    recorded[n] = collective.wants_grad;
    collective.wants_grad = differentiated[n];
    if (collective.instance.kind == InstanceRef::Kind::kGradient) continue;
    Slot& slot = finished.slots[collective.group_slot];
    const auto held = static_cast<size_t>(
        std::find_if(slot.groups.begin(), slot.groups.end(),
                     [&](const GroupCore* g) { return g->rank == collective.rank.value(); }) -
        slot.groups.begin());
    if (!HasPeer(collective.kind)) {
      if (collective.part == 0) ++slot.used[held];
      continue;
    }
    GroupCore* const group = slot.groups[held];
    const PairEnd end = EndOf(collective);
    auto pair = std::find_if(finished.pairs.begin(), finished.pairs.end(),
                             [&](const PairUse& p) { return p.group == group && p.end == end; });
    if (pair == finished.pairs.end()) {
      pair = finished.pairs.insert(pair, PairUse{group, end, 0});
    }
    ++pair->used;
  }
  DropExtras(&graph, recorded);
  return finished;
}

}  // namespace internal
}  // namespace chorus
