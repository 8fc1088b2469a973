#include "client/internal/fragments.h"

#include <algorithm>
#include <string>

#include "core/graph/encoding.h"
#include "core/ops/graph_builder.h"

namespace chorus {
namespace internal {

int32_t Fragment::InputOf(const TensorDataPtr& data) {
  const TensorData::State state = data->state.load(std::memory_order_relaxed);
  // Its own and no other's. (Others have been sent: what is not, has no name either, and the daemon
  // refuses it.)
  if (state == TensorData::State::kLazy && data->fragment == id_) return data->value;
  // Names are compared, not handles: a handle may die before the fragment is sent, its name may
  // not.
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Binding& binding = inputs_[i];
    if (state == TensorData::State::kSent && absl::holds_alternative<TensorId>(binding) &&
        absl::get<TensorId>(binding) == data->id) {
      return ~static_cast<int32_t>(i);
    }
    if (state == TensorData::State::kExternal && absl::holds_alternative<ExternalRange>(binding) &&
        absl::get<ExternalRange>(binding).arena == data->external.arena) {
      return ~static_cast<int32_t>(i);
    }
  }
  GraphInput input;
  input.type = data->info->type;
  input.role = state == TensorData::State::kInline ? InputRole::kScalar : InputRole::kData;
  input.device_slot = data->device_slot;
  input_types_.push_back(std::move(input));
  inputs_.push_back(data->binding());
  return ~static_cast<int32_t>(inputs_.size() - 1);
}

void Fragment::Append(NodeSpec spec, absl::Span<const TensorDataPtr> inputs,
                      const TensorDatas& results) {
  Op node;
  spec.inputs.clear();
  for (const TensorDataPtr& input : inputs) spec.inputs.push_back(InputOf(input));
  node.first_value = num_values_;
  for (const TensorDataPtr& result : results) {
    result->fragment = id_;
    result->value = num_values_++;
    node.types.push_back(result->info->type);
    node.outputs.push_back(result);
  }
  node.spec = std::move(spec);
  nodes_.push_back(std::move(node));
}

bool Fragment::Uses(TensorId tensor) const {
  return std::any_of(inputs_.begin(), inputs_.end(), [tensor](const Binding& input) {
    const auto* const id = absl::get_if<TensorId>(&input);
    return id != nullptr && *id == tensor;
  });
}

bool Fragment::Uses(ArenaId arena) const {
  return std::any_of(inputs_.begin(), inputs_.end(), [arena](const Binding& input) {
    const auto* const range = absl::get_if<ExternalRange>(&input);
    return range != nullptr && range->arena == arena;
  });
}

RunDraft Fragment::TakeDraft(int device_count) {
  std::vector<Op> nodes = std::move(nodes_);
  // What nobody holds any more and nothing needs is not computed.
  std::vector<TensorDataPtr> held(num_values_);
  std::vector<bool> needed(num_values_, false);
  std::vector<bool> kept(nodes.size(), false);
  for (size_t n = nodes.size(); n-- > 0;) {
    for (size_t o = 0; o < nodes[n].outputs.size(); ++o) {
      const int32_t value = nodes[n].first_value + static_cast<int32_t>(o);
      held[value] = nodes[n].outputs[o].lock();
      kept[n] = kept[n] || held[value] != nullptr || needed[value];
    }
    if (!kept[n]) continue;
    for (const ValueIndex input : nodes[n].spec.inputs) {
      if (input >= 0) needed[input] = true;
    }
  }
  RunDraft draft;
  Graph graph;
  graph.num_device_slots = device_count;
  std::vector<ValueIndex> new_input_index(inputs_.size(), -1);
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (!kept[n]) continue;
    for (const ValueIndex input : nodes[n].spec.inputs) {
      if (input >= 0 || new_input_index[~input] >= 0) continue;
      new_input_index[~input] = static_cast<int32_t>(graph.inputs.size());
      graph.inputs.push_back(input_types_[~input]);
      draft.run().inputs.push_back(inputs_[~input]);
    }
  }
  std::vector<ValueIndex> new_index(num_values_, -1);
  ValueIndex next = static_cast<ValueIndex>(graph.inputs.size());
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (!kept[n]) continue;
    for (ValueIndex& input : nodes[n].spec.inputs) {
      input = input >= 0 ? new_index[input] : new_input_index[~input];
    }
    for (size_t o = 0; o < nodes[n].outputs.size(); ++o) {
      const int32_t value = nodes[n].first_value + static_cast<int32_t>(o);
      new_index[value] = next;
      if (held[value] != nullptr) {
        GraphOutput output;
        output.value = next;
        graph.outputs.push_back(output);
        const TensorDataPtr& data = held[value];
        draft.results.push_back({data->info, data->device_slot, data});
      }
      ++next;
    }
    graph.nodes.push_back(NodeOf(std::move(nodes[n].spec), std::move(nodes[n].types)));
  }
  if (!draft.results.empty()) draft.encoded = EncodeGraph(graph);
  return draft;
}

Fragment* Fragments::Find(int32_t device_slot, const Origins& after) const {
  for (const auto& open : open_) {
    if (open->device_slot() == device_slot && open->after() == after) return open.get();
  }
  return nullptr;
}

Fragment* Fragments::Open(int32_t device_slot, const Origins& after) {
  open_.push_back(std::make_unique<Fragment>(next_++, device_slot, after));
  return open_.back().get();
}

bool Fragments::Use(TensorId tensor) const {
  return std::any_of(open_.begin(), open_.end(),
                     [tensor](const auto& open) { return open->Uses(tensor); });
}

std::unique_ptr<Fragment> Fragments::Take(int64_t id) {
  const auto position =
      std::find_if(open_.begin(), open_.end(), [id](const auto& open) { return open->id() == id; });
  if (position == open_.end()) return nullptr;
  std::unique_ptr<Fragment> fragment = std::move(*position);
  open_.erase(position);
  return fragment;
}

}  // namespace internal
}  // namespace chorus
