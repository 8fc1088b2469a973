// Registered graphs with their plans, shared by every session that registers the same bytes.
//
// Threads: the node thread.
#ifndef CHORUS_CORE_NODE_GRAPH_STORE_H_
#define CHORUS_CORE_NODE_GRAPH_STORE_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/graph/encoding.h"
#include "core/graph/graph.h"
#include "core/ops/validate.h"
#include "core/runtime/budget.h"
#include "core/runtime/executor.h"
#include "core/runtime/plan.h"

namespace chorus::node {

// A plan and where it has been loaded.
struct LoadedPlan {
  Plan plan;
  Charge charge;  // of one that is not its record's main plan
  // Of the kPeer entries of `plan.buffers`, by participation: their indices.
  std::vector<std::vector<int32_t>> peer_buffers;
  std::vector<std::vector<std::pair<DeviceIndex, PlanId>>> places;  // by device slot
};

struct GraphRecord {
  Graph graph;
  // Of a graph whose runs fix sizes (core/ops/specialize.h): the maximum of each. Then it is not
  // run itself, but what it is at each run's sizes, and has no plan.
  std::vector<int64_t> maxima;
  Hash128 hash;
  // What it takes, with its main plan and what executors make of that: each session that names it
  // is charged for it.
  int64_t bytes = 0;
  Charge charge;  // of what another record is at some sizes
  std::vector<std::shared_ptr<const TensorType>> output_types;
  LoadedPlan main;  // collectives in program order, all members having called equally often
  // With others of PlanOptions' order and instances: the last that were asked for, the latest last.
  // Gangs ask for few of them, ever.
  struct Reordered {
    std::vector<int32_t> order;
    std::vector<int32_t> instances;
    std::shared_ptr<LoadedPlan> plan;
  };
  static constexpr size_t kMaxOrders = 64;
  std::vector<Reordered> reordered;
  // What it is at the sizes of the last runs, the latest last.
  static constexpr size_t kMaxSizes = 16;
  std::vector<std::pair<std::vector<int64_t>, std::shared_ptr<GraphRecord>>> at_sizes;
};

class GraphStore {
 public:
  // `unload` is told of every loaded plan whose last session has gone.
  using Unload = std::function<void(DeviceIndex device, PlanId plan)>;
  GraphStore(GraphLimits limits, PlanOptions options, Unload unload,
             int64_t max_graph_bytes = kMaxClientGraphBytes)
      : limits_(limits),
        options_(options),
        unload_(std::move(unload)),
        max_graph_bytes_(max_graph_bytes) {}

  // Decodes, checks and plans; the record of equal bytes is shared. A graph of more nodes than the
  // limits have, or of more than `max_graph_bytes` in memory, is refused before it is made.
  // The caller charges for the record; `budget` is for what comes with it (AtSizes).
  absl::StatusOr<std::shared_ptr<GraphRecord>> Register(absl::string_view encoded,
                                                        const BudgetRef& budget);
  // `record` at these sizes, one for each of its maxima; made, checked and planned at the first
  // request, charged to `budget`, and kept with those of a few other sizes.
  absl::StatusOr<std::shared_ptr<GraphRecord>> AtSizes(GraphRecord* record,
                                                       const std::vector<int64_t>& sizes,
                                                       const BudgetRef& budget);
  // The plan of `record` for PlanOptions with this order and these instances; made at the first
  // request, charged to `budget`, and kept with a few others. It must not outlive the record.
  absl::StatusOr<std::shared_ptr<LoadedPlan>> InOrder(GraphRecord* record,
                                                      absl::Span<const int32_t> order,
                                                      absl::Span<const int32_t> instances,
                                                      const BudgetRef& budget);

 private:
  absl::StatusOr<LoadedPlan> MakePlan(const Graph& graph, absl::Span<const int32_t> order,
                                      absl::Span<const int32_t> instances) const;
  absl::StatusOr<std::unique_ptr<GraphRecord>> MakeRecord(Graph graph) const;
  // With it go the loaded plans.
  void Delete(GraphRecord* record) const;
  void UnloadAll(const LoadedPlan& plan) const;

  const GraphLimits limits_;
  const PlanOptions options_;
  const Unload unload_;
  const int64_t max_graph_bytes_;
  // Of records that live: a row goes with its record.
  absl::flat_hash_map<std::string, std::weak_ptr<GraphRecord>> by_bytes_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_GRAPH_STORE_H_
