// Registered graphs with their plans, shared by every session that registers the same bytes.
//
// Before anything is made the session that asks for it is charged for all that making it may take
// at that time, and once it is there for what it takes: for as much as its bytes can say while it
// is decoded and checked, then for the graph as it is and for all that planning it takes at most.
//
// Threads: the node thread. What takes it long is done in the background, where nothing is touched
// but what is being made. Ownership: sessions share the records, and each record its variants; the
// store only finds them. Errors: said at each function.
#ifndef CHORUS_CORE_NODE_GRAPH_STORE_H_
#define CHORUS_CORE_NODE_GRAPH_STORE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/graph/encoding.h"
#include "core/graph/graph.h"
#include "core/node/background.h"
#include "core/node/options.h"
#include "core/node/variants.h"
#include "core/ops/validate.h"
#include "core/runtime/budget.h"
#include "core/runtime/messages.h"
#include "core/runtime/plan/plan.h"

namespace chorus::node {

// A plan and where it has been loaded.
struct LoadedPlan {
  Plan plan;
  Charge charge;  // of one that is not its record's main plan
  // By device slot: OpDef::kernel_bytes of the nodes there.
  std::vector<int64_t> kernel_bytes;
  // Of the kPeer entries of `plan.buffers`, by participation: their indices.
  std::vector<std::vector<int32_t>> peer_buffers;
  // What a gang's launch looks at of it beside its collectives and results, as so many of these:
  // where values are copied between its devices their meetings, and operands that are read where
  // they stand with others.
  int64_t looked_at = 0;
  std::vector<std::vector<std::pair<DeviceIndex, PlanId>>> locations;  // by device slot
  std::vector<int32_t> num_loading;             // by device slot: parts that are on their way there
  Waits<std::vector<DeviceIndex>> loading;      // by device slot
  std::vector<std::shared_ptr<void>> unloaded;  // what is left of those, once nobody uses them
};

// What Executor::UnloadPlan returned, and what it is charged for: that of one device is in what the
// graph costs.
struct UnloadedPart {
  std::shared_ptr<void> program;
  Charge charge;
};

// What an executor makes of the part of a plan for a device slot, from above.
int64_t MemoryOfLoadedPart(const LoadedPlan& plan, size_t slot);

// What of PlanOptions a run decides.
struct PlanVariant {
  std::vector<int32_t> order;
  std::vector<int32_t> instances;
  absl::optional<OneDomain> one_domain;
  friend bool operator==(const PlanVariant& a, const PlanVariant& b) {
    return a.order == b.order && a.instances == b.instances && a.one_domain == b.one_domain;
  }
};

struct GraphRecord {
  Graph graph;
  // Of a graph whose runs fix sizes (core/ops/specialize.h): the maximum of each. Then it is not
  // run itself, but what it is at each run's sizes, and has no plan.
  std::vector<int64_t> maxima;
  // As it was registered; null: it is another record at some sizes.
  std::shared_ptr<const std::string> encoded;
  // The node with the largest result, which is what most of a run's memory is for. -1: it has none.
  int32_t largest_node = -1;
  bool large = false;  // it takes the node thread too long: work on it is the background's
  // What it takes, with its main plan and what executors make of that: each session that names it
  // is charged for it.
  int64_t bytes = 0;
  // What a plan of it takes to make (MemoryToPlan), also at any sizes.
  int64_t bytes_to_plan = 0;
  // For a record that another one is at some sizes; for one without a name, until the session that
  // had it made names it; for one without a name left, until it is gone.
  Charge charge;
  int names = 0;  // of sessions, each of which has a charge for it
  std::vector<std::shared_ptr<const TensorType>> output_types;
  // Collectives in program order, all members having called equally often, and all devices of one
  // domain, where any are.
  LoadedPlan main;
  // Others. Runs ask for few of them, ever.
  static constexpr size_t kMaxPlans = 64;
  Variants<PlanVariant, LoadedPlan, kMaxPlans> plans;
  // What it is at the sizes of runs.
  static constexpr size_t kMaxSizes = 16;
  Variants<std::vector<int64_t>, GraphRecord, kMaxSizes> at_sizes;
};

// The records that live, by their bytes. Threads: one, whichever.
class GraphsByBytes {
 public:
  // Null: there is none.
  std::shared_ptr<GraphRecord> Find(absl::string_view encoded) const;
  void Add(const std::shared_ptr<GraphRecord>& record);
  // Drops the row of a record that has gone, unless another one of these bytes has come.
  void Forget(const std::string& encoded);

 private:
  // The bytes beside the record: a record that is no match must not be held here, not even for a
  // moment: its last user would be on the wrong thread.
  struct Row {
    std::shared_ptr<const std::string> encoded;
    std::weak_ptr<GraphRecord> record;
  };
  absl::flat_hash_map<absl::string_view, Row> rows_;
};

class GraphStore {
 public:
  struct Options {
    GraphLimits limits;
    PlanOptions plan;
    // A graph of more bytes in memory, or on its way, is refused before it is made.
    int64_t max_graph_bytes = kMaxClientGraphBytes;
    // A graph that comes in more bytes is large. So is one whose plan takes more, as PlanLimits
    // counts: few bytes may say much.
    int64_t max_inline_bytes = kMaxInlineGraphBytes;
    int64_t max_inline_plan_bytes = 1 << 20;
  };
  // The session that asks. What is made for it, beside what it names, is charged to its budget.
  struct Client {
    const std::string& tenant;
    const BudgetRef& budget;
  };
  // `unload` is told of every loaded plan whose last session has gone. `background` outlives this;
  // null: all is done at once.
  using Unload = std::function<UnloadedPart(DeviceIndex device, PlanId plan)>;
  GraphStore(const Options& options, Background* background, Unload unload)
      : options_(options), background_(background), unload_(std::move(unload)) {}
  ~GraphStore() { Continue(); }
  GraphStore(const GraphStore&) = delete;
  GraphStore& operator=(const GraphStore&) = delete;

  // --- What a large graph is asked for comes later: then these return null, and the callback is
  // called once, unless the node ends before ---

  // Decodes, checks and plans; the record of equal bytes is shared. A graph of more nodes than the
  // limits have, or of more bytes, is refused before it is made. The client is charged for what is
  // made: the record has that charge. RESOURCE_EXHAUSTED kOutOfMemory: it cannot be. What `encoded`
  // points to must stand until this has ended; it may change.
  using OnRecord = std::function<void(absl::StatusOr<std::shared_ptr<GraphRecord>>)>;
  absl::StatusOr<std::shared_ptr<GraphRecord>> Register(absl::string_view encoded,
                                                        const Client& client, OnRecord later);
  // How a variant of a record is waited for.
  using OnMade = std::function<void(const absl::Status&)>;
  struct Waiting {
    const absl::Status& failed;  // OK, or why it could not be made after a wait
    // Gives the callback that is told when it is there, and asks again; called where it must be
    // waited for. An error: it cannot be.
    absl::FunctionRef<absl::StatusOr<OnMade>()> wait;
  };
  // `record` at these sizes, one for each of its maxima: made, checked and planned at the first
  // request, for which the client is charged, and kept with those of a few other sizes.
  absl::StatusOr<std::shared_ptr<GraphRecord>> AtSizes(const std::shared_ptr<GraphRecord>& record,
                                                       const std::vector<int64_t>& sizes,
                                                       const Client& client,
                                                       const Waiting& waiting);
  // A plan of `record` that is not its main one, in the same way. It must not outlive the record.
  absl::StatusOr<std::shared_ptr<LoadedPlan>> PlanOf(const std::shared_ptr<GraphRecord>& record,
                                                     const PlanVariant& variant,
                                                     const Client& client, const Waiting& waiting);

  // Goes on with what nobody uses any more, as long as the slice has time. False: there is nothing.
  bool Continue();

 private:
  // Charges for so many bytes, all that is held of what is being made, from now on.
  using Cover = absl::FunctionRef<absl::Status(int64_t bytes)>;

  // What may run in the background.
  absl::StatusOr<std::unique_ptr<LoadedPlan>> MakePlan(const Graph& graph,
                                                       const PlanVariant& variant,
                                                       int64_t bytes_to_plan) const;
  absl::StatusOr<std::unique_ptr<GraphRecord>> MakeRecord(Graph graph, std::vector<int64_t> maxima,
                                                          int64_t bytes_to_plan) const;
  absl::StatusOr<std::unique_ptr<GraphRecord>> MakeAt(const GraphRecord& record,
                                                      const std::vector<int64_t>& sizes) const;
  // Null: it is not `large`, and takes what makes it so.
  absl::StatusOr<std::shared_ptr<GraphRecord>> FindOrMake(absl::string_view bytes, bool large,
                                                          GraphsByBytes* records, Cover cover);
  // Within work of the background: as `charge->Resize`, on the node thread. What has gone before is
  // taken apart first where that is what there is too little memory for.
  absl::Status ResizeThere(Charge* charge, int64_t bytes);

  // On the node thread. What is shared goes, with its loaded plans, when its last user does.
  std::shared_ptr<GraphRecord> Share(std::unique_ptr<GraphRecord> record, bool large,
                                     std::function<void()> forget = nullptr);
  std::shared_ptr<LoadedPlan> Share(std::unique_ptr<LoadedPlan> plan, bool large);
  // What is charged for making it is for the record, if it was made, and its `maxima`.
  static absl::StatusOr<std::shared_ptr<GraphRecord>> Charged(
      absl::StatusOr<std::shared_ptr<GraphRecord>> record, Charge charge);
  template <typename Key, typename T, size_t kMost, typename Make>
  absl::StatusOr<std::shared_ptr<T>> FindVariant(const std::shared_ptr<GraphRecord>& record,
                                                 Variants<Key, T, kMost> GraphRecord::*variants,
                                                 const Key& key, const Client& client,
                                                 const Waiting& waiting, int64_t bytes_to_make,
                                                 Make make);
  void Go(std::function<void()> end);
  template <typename T>
  void TakeApart(std::unique_ptr<T> unused, std::vector<Charge> charges, int64_t bytes, bool large,
                 const std::function<void()>& forget);
  std::vector<Charge> UnloadAll(LoadedPlan* plan) const;

  const Options options_;
  Background* const background_;
  const Unload unload_;
  GraphsByBytes small_;
  GraphsByBytes large_;  // the background's, where there is one
  // How what has gone is taken apart that no slice has had the time for. Charged with that.
  std::deque<std::function<void()>> going_;
  bool is_going_ = false;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_GRAPH_STORE_H_
