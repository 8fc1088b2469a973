#include "client/internal/calls.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "client/internal/errors.h"
#include "client/internal/group_counters.h"
#include "client/internal/member.h"
#include "core/base/error.h"
#include "core/ops/graph_builder.h"

namespace chorus {
namespace internal {

NodeSpec NodeSpecOf(const CollectiveSpec& call, const GroupCore& group, int32_t part) {
  NodeSpec spec;
  spec.op.assign(call.op->name.data(), call.op->name.size());
  spec.version = call.op->version;
  spec.device_slot = group.member->device_slot;
  spec.source = call.source != nullptr ? *call.source : SourceOf(call.site);
  if (call.type != nullptr) spec.attributes = TypeAttributes(*call.type);
  spec.collective = call.collective;
  spec.collective->group_slot = 0;
  spec.collective->rank = GroupRank(group.rank);
  spec.collective->part = part;
  return spec;
}

const CallPart* PartBefore(absl::Span<const CallPart> parts, size_t p) {
  if (HasPeer(parts[p].key.spec.op->kind)) return nullptr;
  for (size_t other = p; other-- > 0;) {
    if (parts[other].group == parts[p].group && !HasPeer(parts[other].key.spec.op->kind)) {
      return &parts[other];
    }
  }
  return nullptr;
}

void CountCall(absl::Span<CallPart> parts, CallInRuns* runs) {
  for (size_t p = 0; p < parts.size(); ++p) {
    CallPart& part = parts[p];
    GroupCore* const group = part.group;
    InstanceKey& key = part.instance;
    key.group = group->id;
    key.since = group->member->since;
    key.at.step = group->member->step.load(std::memory_order_relaxed);
    const Collective& collective = part.key.spec.collective;
    if (HasPeer(collective.kind)) {
      const PairEnd end = EndOf(collective);
      std::tie(key.source, key.destination) = Between(*group, end);
      key.tag = end.tag;
      key.at.call = group->counters.Count(end, 1);
      continue;
    }
    if (const CallPart* const before = PartBefore(parts, p)) {
      key.at.call = before->instance.at.call;
      key.at.part = before->instance.at.part + 1;
    } else if (runs != nullptr && runs->begun) {
      key.at = runs->next;
    } else {
      key.at.call = group->counters.Count(1);
    }
    if (runs == nullptr) continue;
    runs->begun = true;
    runs->next = key.at;
    ++runs->next.part;
  }
}

void InternKey(Interner* interner, CallPart* part) {
  CallKey& key = part->key;
  if (key.spec.type != nullptr) {
    part->declared = interner->Type(*key.spec.type);
    key.spec.type = &part->declared->type;
  }
  if (key.spec.source != nullptr) key.spec.source = interner->Source(*key.spec.source);
  key.num_inputs = static_cast<int32_t>(part->inputs.size());
  if (part->inputs.empty()) return;
  const TensorInfo* const first = part->inputs[0]->info.get();
  key.types.push_back(first);
  if (std::all_of(part->inputs.begin() + 1, part->inputs.end(),
                  [first](const TensorData* input) { return input->info.get() == first; })) {
    return;
  }
  for (auto input = part->inputs.begin() + 1; input != part->inputs.end(); ++input) {
    key.types.push_back((*input)->info.get());
  }
}

absl::StatusOr<std::unique_ptr<CallEntry>> MakeEntry(absl::Span<const CallPart> parts,
                                                     int device_count, Interner* interner,
                                                     Graph* graph) {
  // The members that the run holds, by rank.
  std::vector<GroupCore*> held;
  for (const CallPart& part : parts) {
    if (std::find(held.begin(), held.end(), part.group) == held.end()) held.push_back(part.group);
  }
  std::sort(held.begin(), held.end(),
            [](const GroupCore* a, const GroupCore* b) { return a->rank < b->rank; });
  GroupSlot slot;
  slot.size = static_cast<int32_t>(held[0]->ranks.size());
  for (const GroupCore* group : held) {
    slot.held.push_back(GroupRank(group->rank));
    slot.device_slots.push_back(group->member->device_slot);
  }
  auto entry = std::make_unique<CallEntry>();
  GraphBuilder builder(device_count, {std::move(slot)});
  absl::flat_hash_map<const GroupCore*, int32_t> next_part;
  for (size_t p = 0; p < parts.size(); ++p) {
    const CallPart& part = parts[p];
    const CollectiveSpec& call = part.key.spec;
    CallEntry::Part entry_part;
    if (part.declared != nullptr) entry_part.types.push_back(part.declared);
    NodeSpec spec =
        NodeSpecOf(call, *part.group, HasPeer(call.op->kind) ? 0 : next_part[part.group]++);
    entry_part.spec = std::make_shared<const NodeSpec>(spec);
    for (const TensorData* input : part.inputs) {
      entry_part.types.push_back(input->info);
      GraphInput added;
      added.type = input->info->type;
      // A number of the run, like a factor.
      if (input->state.load(std::memory_order_relaxed) == TensorData::State::kInline) {
        added.role = InputRole::kScalar;
      }
      added.device_slot = spec.device_slot;
      spec.inputs.push_back(builder.AddInput(std::move(added)));
    }
    const absl::StatusOr<std::vector<ValueIndex>> values = builder.Emit(std::move(spec));
    if (!values.ok()) return AtIndex(values.status(), part.index);
    for (const ValueIndex value : *values) {
      GraphOutput output;
      output.value = value;
      builder.AddOutput(output);
      entry->draft.results.push_back(
          {interner->Type(builder.TypeOf(value)), entry_part.spec->device_slot, nullptr});
    }
    const int num_outputs = static_cast<int>(values->size());
    entry_part.outputs = values->size();
    entry_part.visible = NumVisibleOutputs(*entry_part.spec->collective, num_outputs);
    entry_part.saved =
        SavedBy(*call.op, *entry_part.spec, static_cast<int>(part.inputs.size()), num_outputs);
    entry_part.rank =
        static_cast<int32_t>(std::find(held.begin(), held.end(), part.group) - held.begin());
    entry->parts.push_back(std::move(entry_part));
  }
  *graph = builder.Build();
  const InstanceRef& instance = parts[0].key.spec.collective.instance;
  if (instance.kind == InstanceRef::Kind::kBound) graph->num_instance_slots = 1;
  Run& run = entry->draft.run();
  run.groups.resize(1);
  run.groups[0].group = held[0]->id;
  run.groups[0].base.resize(held.size());
  run.instances.resize(static_cast<size_t>(graph->num_instance_slots));
  return entry;
}

void Bind(absl::Span<const CallPart> parts, bool bound, const CallInRuns* runs, CallEntry* entry) {
  RunDraft& draft = entry->draft;
  Run& run = draft.run();
  RunGroup& bound_group = run.groups[0];
  MemberCore* const member = parts[0].group->member;
  bound_group.world = member->world;
  bound_group.epoch = member->epoch.load(std::memory_order_relaxed);
  run.pair_calls.clear();
  run.call_goes_on = runs != nullptr && !runs->last;
  draft.member = member;
  draft.operands.clear();
  // (Each look into an InlinedVector asks where it is.)
  const CallEntry::Part* const entry_parts = entry->parts.data();
  CallPosition* const bases = bound_group.base.data();
  for (size_t p = 0; p < parts.size(); ++p) {
    const CallPart& part = parts[p];
    GroupCore* const group = part.group;
    for (TensorData* const input : part.inputs) draft.operands.push_back(input);
    if (bound || part.instance.is_pair()) {
      bases[entry_parts[p].rank] = {group->member->step.load(std::memory_order_relaxed),
                                    group->counters.next(), 0};
    }
    if (!bound && part.instance.is_pair()) run.pair_calls.push_back(part.instance.at.call);
  }
  if (bound) run.instances[0] = parts[0].instance;
  for (size_t p = 0; p < parts.size() && !bound; ++p) {
    // Where the call of the group stands, not what was counted since.
    if (parts[p].instance.is_pair() || PartBefore(parts, p) != nullptr) continue;
    bases[entry_parts[p].rank] = parts[p].instance.at;
  }
}

}  // namespace internal
}  // namespace chorus
