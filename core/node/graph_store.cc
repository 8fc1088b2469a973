#include "core/node/graph_store.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/ops/specialize.h"

namespace chorus::node {
namespace {

// What is at place `i`, which is the last one then.
template <typename Known>
auto Latest(Known* known, size_t i) {
  const auto at = known->begin() + static_cast<ptrdiff_t>(i);
  std::rotate(at, at + 1, known->end());
  return known->back().second;
}

// With what an executor makes of its parts, about as much again.
int64_t MemoryOfLoaded(const Plan& plan) { return 2 * MemoryOf(plan); }

}  // namespace

absl::StatusOr<LoadedPlan> GraphStore::MakePlan(const Graph& graph, absl::Span<const int32_t> order,
                                                absl::Span<const int32_t> instances) const {
  PlanOptions options = options_;
  options.order.assign(order.begin(), order.end());
  options.instances.assign(instances.begin(), instances.end());
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

absl::StatusOr<std::unique_ptr<GraphRecord>> GraphStore::MakeRecord(Graph graph) const {
  CHORUS_RETURN_IF_ERROR(ValidateGraph(graph, limits_));
  auto made = std::make_unique<GraphRecord>();
  CHORUS_ASSIGN_OR_RETURN(made->maxima, CheckSymbols(graph));
  if (made->maxima.empty()) {
    CHORUS_ASSIGN_OR_RETURN(made->main, MakePlan(graph, {}, {}));
    const ValueTable values(graph);
    for (const GraphOutput& output : graph.outputs) {
      made->output_types.push_back(std::make_shared<TensorType>(values.type(output.value)));
    }
  }
  made->bytes = MemoryOf(graph) + MemoryOfLoaded(made->main.plan);
  made->hash = HashGraph(graph);
  made->graph = std::move(graph);
  return made;
}

void GraphStore::Delete(GraphRecord* record) const {
  UnloadAll(record->main);
  record->reordered.clear();
  delete record;
}

absl::StatusOr<std::shared_ptr<GraphRecord>> GraphStore::AtSizes(GraphRecord* record,
                                                                 const std::vector<int64_t>& sizes,
                                                                 const BudgetRef& budget) {
  auto& known = record->at_sizes;
  for (size_t i = known.size(); i-- > 0;) {
    if (known[i].first == sizes) return Latest(&known, i);
  }
  CHORUS_ASSIGN_OR_RETURN(Graph graph, Specialize(record->graph, sizes));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<GraphRecord> made, MakeRecord(std::move(graph)));
  CHORUS_ASSIGN_OR_RETURN(made->charge,
                          budget->Charge(Domain::kHost, Resource::kGraphBytes, made->bytes));
  std::shared_ptr<GraphRecord> kept(made.release(), [this](GraphRecord* gone) { Delete(gone); });
  // Runs under way keep theirs.
  if (known.size() >= GraphRecord::kMaxSizes) known.erase(known.begin());
  known.emplace_back(sizes, kept);
  return kept;
}

absl::StatusOr<std::shared_ptr<GraphRecord>> GraphStore::Register(absl::string_view encoded,
                                                                  const BudgetRef& budget) {
  const auto known = by_bytes_.find(encoded);
  if (known != by_bytes_.end()) {
    if (std::shared_ptr<GraphRecord> record = known->second.lock()) return record;
  }
  DecodeLimits limits;
  limits.max_nodes = limits_.max_nodes;
  limits.max_bytes = max_graph_bytes_;
  CHORUS_ASSIGN_OR_RETURN(Graph graph, DecodeGraph(encoded, limits));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<GraphRecord> made, MakeRecord(std::move(graph)));
  // What cannot be planned at its largest is refused now.
  if (!made->maxima.empty()) {
    CHORUS_RETURN_IF_ERROR(AtSizes(made.get(), made->maxima, budget).status());
  }

  const std::string key(encoded);
  made->bytes += 2 * static_cast<int64_t>(key.size());  // of the row, and of what removes it
  // The last session to let go takes the loaded plans down with it.
  std::shared_ptr<GraphRecord> record(made.release(), [this, key](GraphRecord* gone) {
    const auto it = by_bytes_.find(key);
    if (it != by_bytes_.end() && it->second.expired()) by_bytes_.erase(it);
    Delete(gone);
  });
  by_bytes_[key] = record;
  return record;
}

absl::StatusOr<std::shared_ptr<LoadedPlan>> GraphStore::InOrder(GraphRecord* record,
                                                                absl::Span<const int32_t> order,
                                                                absl::Span<const int32_t> instances,
                                                                const BudgetRef& budget) {
  auto& known = record->reordered;
  for (size_t i = known.size(); i-- > 0;) {
    if (order != known[i].order || instances != known[i].instances) continue;
    std::rotate(known.begin() + static_cast<ptrdiff_t>(i),
                known.begin() + static_cast<ptrdiff_t>(i) + 1, known.end());
    return known.back().plan;
  }
  CHORUS_ASSIGN_OR_RETURN(LoadedPlan made, MakePlan(record->graph, order, instances));
  CHORUS_ASSIGN_OR_RETURN(
      made.charge, budget->Charge(Domain::kHost, Resource::kGraphBytes, MemoryOfLoaded(made.plan)));
  std::shared_ptr<LoadedPlan> kept(new LoadedPlan(std::move(made)), [this](LoadedPlan* gone) {
    UnloadAll(*gone);
    delete gone;
  });
  // Runs under way keep theirs.
  if (known.size() >= GraphRecord::kMaxOrders) known.erase(known.begin());
  known.push_back({{order.begin(), order.end()}, {instances.begin(), instances.end()}, kept});
  return kept;
}

}  // namespace chorus::node
