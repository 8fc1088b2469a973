#include "core/node/graph_store.h"

#include "core/base/error.h"

namespace chorus {

absl::StatusOr<LoadedPlan> GraphStore::MakePlan(const Graph& graph,
                                                std::vector<int32_t> order) const {
  PlanOptions options = options_;
  options.order = std::move(order);
  LoadedPlan made;
  CHORUS_ASSIGN_OR_RETURN(made.plan, CompilePlan(graph, options));
  made.peer_buffers.resize(made.plan.votes->participations.size());
  for (size_t i = 0; i < made.plan.buffers.size(); ++i) {
    const BufferSpec& spec = made.plan.buffers[i];
    if (spec.kind == BufferSpec::Kind::kPeer) {
      made.peer_buffers[static_cast<size_t>(spec.index)].push_back(static_cast<int32_t>(i));
    }
  }
  made.places.resize(static_cast<size_t>(graph.num_device_slots));
  return made;
}

void GraphStore::UnloadAll(const LoadedPlan& plan) const {
  for (const auto& slot : plan.places) {
    for (const auto& place : slot) unload_(place.first, place.second);
  }
}

absl::StatusOr<std::shared_ptr<GraphRecord>> GraphStore::Register(absl::string_view encoded) {
  const std::string key(encoded);
  const auto known = by_bytes_.find(key);
  if (known != by_bytes_.end()) {
    if (std::shared_ptr<GraphRecord> record = known->second.lock()) return record;
  }
  auto made = std::make_unique<GraphRecord>();
  CHORUS_ASSIGN_OR_RETURN(made->graph, DecodeGraph(encoded));
  CHORUS_RETURN_IF_ERROR(ValidateGraph(made->graph, limits_));
  CHORUS_ASSIGN_OR_RETURN(made->main, MakePlan(made->graph, {}));
  made->hash = HashGraph(made->graph);
  const ValueTable values(made->graph);
  for (const GraphOutput& output : made->graph.outputs) {
    made->output_types.push_back(std::make_shared<TensorType>(values.type(output.value)));
  }

  // The last session to let go takes the loaded plans down with it.
  std::shared_ptr<GraphRecord> record(made.release(), [this, key](GraphRecord* gone) {
    UnloadAll(gone->main);
    for (const auto& entry : gone->reordered) UnloadAll(*entry.second);
    const auto it = by_bytes_.find(key);
    if (it != by_bytes_.end() && it->second.expired()) by_bytes_.erase(it);
    delete gone;
  });
  by_bytes_[key] = record;
  return record;
}

absl::StatusOr<LoadedPlan*> GraphStore::InOrder(GraphRecord* record,
                                                const std::vector<int32_t>& order) {
  std::unique_ptr<LoadedPlan>& known = record->reordered[order];
  if (known == nullptr) {
    absl::StatusOr<LoadedPlan> made = MakePlan(record->graph, order);
    if (!made.ok()) {
      record->reordered.erase(order);
      return made.status();
    }
    known = std::make_unique<LoadedPlan>(*std::move(made));
  }
  return known.get();
}

}  // namespace chorus
