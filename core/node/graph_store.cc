#include "core/node/graph_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/ops/registry.h"
#include "core/ops/specialize.h"

namespace chorus::node {
namespace {

// With what executors make of its parts, each on one device.
int64_t MemoryOfLoaded(const LoadedPlan& plan) {
  int64_t bytes = MemoryOf(plan.plan);
  for (size_t slot = 0; slot < plan.plan.device_plans.size(); ++slot) {
    bytes += MemoryOfLoadedPart(plan, slot);
  }
  return bytes;
}

std::vector<int64_t> KernelBytesOf(const Graph& graph) {
  std::vector<int64_t> bytes(static_cast<size_t>(graph.num_device_slots));
  const OpDef* def = nullptr;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (n == 0 || graph.nodes[n - 1].op != node.op) def = FindOp(node.op);
    if (def != nullptr) bytes[static_cast<size_t>(node.device_slot)] += def->kernel_bytes;
  }
  return bytes;
}
bool HasSlowKernels(const Graph& graph) {
  const std::vector<int64_t> bytes = KernelBytesOf(graph);
  return std::any_of(bytes.begin(), bytes.end(), [](int64_t of_slot) { return of_slot > 0; });
}

// A graph and what checking it takes: tables of its values, which are less than the graph; the
// types of one node, the text of an error.
constexpr int64_t kTimesToCheck = 2;
constexpr int64_t kBytesToCheck = 16 << 10;

absl::StatusOr<Charge> NothingOf(const GraphStore::Client& client) {
  return client.budget->Charge(Domain::kHost, Resource::kGraphBytes, 0);
}

// To take a graph or a plan apart, beside its bytes, which are small pieces.
// Of a node: what a microsecond or two have, each for its making at a time (runtime_bench has
// them).
constexpr int64_t kWorkPerCheckedNode = 6;
constexpr int64_t kWorkPerPlannedNode = 20;
constexpr int64_t kWorkPerEnd = 16;
constexpr int64_t kWorkPerUnload = 16;

int32_t LargestNode(const Graph& graph) {
  int32_t largest = -1;
  int64_t largest_bytes = -1;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    int64_t bytes = 0;
    for (const TensorType& type : graph.nodes[i].outputs) bytes += type.num_bytes();
    if (bytes <= largest_bytes) continue;
    largest_bytes = bytes;
    largest = static_cast<int32_t>(i);
  }
  return largest;
}

int64_t BytesOf(const GraphRecord& record) { return record.bytes; }
int64_t BytesOf(const LoadedPlan& plan) { return MemoryOfLoaded(plan); }

}  // namespace

// A step of some tens of bytes becomes a kernel with its types and texts, or a call, and lists of
// operands: 8 times as much for a transpose, 19 times for a product.
int64_t MemoryOfLoadedPart(const LoadedPlan& plan, size_t slot) {
  constexpr int64_t kTimes = 20;
  return kTimes * static_cast<int64_t>(plan.plan.device_plans[slot].size()) +
         plan.kernel_bytes[slot];
}

// --- Records by their bytes ---------------------------------------------------------------------

std::shared_ptr<GraphRecord> GraphsByBytes::Find(absl::string_view encoded) const {
  const auto row = rows_.find(encoded);
  return row == rows_.end() ? nullptr : row->second.record.lock();
}

void GraphsByBytes::Add(const std::shared_ptr<GraphRecord>& record) {
  // The key lies in the row: one of the same bytes that has gone takes its own along.
  rows_.erase(*record->encoded);
  rows_.emplace(*record->encoded, Row{record->encoded, record});
}

void GraphsByBytes::Forget(const std::string& encoded) {
  const auto row = rows_.find(encoded);
  if (row != rows_.end() && row->second.record.expired()) rows_.erase(row);
}

// --- Making -------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<LoadedPlan>> GraphStore::MakePlan(const Graph& graph,
                                                                 const PlanVariant& variant,
                                                                 int64_t bytes_to_plan) const {
  CountWork(kWorkPerPlannedNode * static_cast<int64_t>(graph.nodes.size()));
  PlanOptions options = options_.plan;
  options.limits.max_bytes = bytes_to_plan;
  options.order = variant.order;
  options.instances = variant.instances;
  options.one_domain = variant.one_domain;
  auto loaded = std::make_unique<LoadedPlan>();
  CHORUS_ASSIGN_OR_RETURN(loaded->plan, CompilePlan(graph, options));
  constexpr int64_t kPeersOfResult = 4;  // that are found in the time of a result
  int64_t peers = 0;
  loaded->peer_buffers.resize(loaded->plan.votes->participations.size());
  for (size_t i = 0; i < loaded->plan.buffers.size(); ++i) {
    const BufferSpec& spec = loaded->plan.buffers[i];
    if (spec.kind == BufferSpec::Kind::kPeer) {
      loaded->peer_buffers[static_cast<size_t>(spec.index)].push_back(static_cast<int32_t>(i));
      ++peers;
    }
  }
  loaded->looked_at = peers / kPeersOfResult;
  for (const auto& meetings : loaded->plan.meetings) {
    loaded->looked_at += static_cast<int64_t>(meetings.size());
  }
  loaded->kernel_bytes = KernelBytesOf(graph);
  loaded->locations.resize(static_cast<size_t>(graph.num_device_slots));
  loaded->num_loading.resize(loaded->locations.size());
  return loaded;
}

absl::StatusOr<std::unique_ptr<GraphRecord>> GraphStore::MakeRecord(Graph graph,
                                                                    std::vector<int64_t> maxima,
                                                                    int64_t bytes_to_plan) const {
  auto record = std::make_unique<GraphRecord>();
  if (maxima.empty()) {
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<LoadedPlan> plan, MakePlan(graph, {}, bytes_to_plan));
    record->main = std::move(*plan);
    const ValueTable values(graph);
    for (const GraphOutput& output : graph.outputs) {
      record->output_types.push_back(std::make_shared<TensorType>(values.type(output.value)));
    }
  }
  record->maxima = std::move(maxima);
  record->largest_node = LargestNode(graph);
  record->bytes = MemoryOf(graph) + MemoryOfLoaded(record->main);
  record->bytes_to_plan = bytes_to_plan;
  record->graph = std::move(graph);
  return record;
}

absl::StatusOr<std::unique_ptr<GraphRecord>> GraphStore::MakeAt(
    const GraphRecord& record, const std::vector<int64_t>& sizes) const {
  CountWork(kWorkPerCheckedNode * static_cast<int64_t>(record.graph.nodes.size()));
  CHORUS_ASSIGN_OR_RETURN(Graph at_sizes, Specialize(record.graph, sizes));
  CHORUS_RETURN_IF_ERROR(ValidateGraph(at_sizes, options_.limits));
  return MakeRecord(std::move(at_sizes), /*maxima=*/{}, record.bytes_to_plan);
}

absl::StatusOr<std::shared_ptr<GraphRecord>> GraphStore::FindOrMake(absl::string_view bytes,
                                                                    bool large,
                                                                    GraphsByBytes* records,
                                                                    Cover cover) {
  if (std::shared_ptr<GraphRecord> record = records->Find(bytes)) return record;
  const auto size = static_cast<int64_t>(bytes.size());
  const auto cover_with_copy = [&](int64_t bytes_made) {
    const absl::Status status = cover(size + bytes_made);
    if (status.ok()) return status;
    Error error = ErrorOf(status);
    error.message = absl::StrCat("to make a graph of ", size, " bytes: ", error.message);
    return ToStatus(error);
  };
  DecodeLimits limits;
  limits.max_nodes = options_.limits.max_nodes;
  limits.max_bytes = std::min(MaxMemoryOf(bytes), options_.max_graph_bytes);
  CHORUS_RETURN_IF_ERROR(cover_with_copy(kTimesToCheck * limits.max_bytes + kBytesToCheck));
  // The copy comes first: nothing is decoded while the client can still write it.
  std::string encoded(bytes);
  CHORUS_ASSIGN_OR_RETURN(Graph graph, DecodeGraph(encoded, limits));
  CountWork(kWorkPerCheckedNode * static_cast<int64_t>(graph.nodes.size()));
  CHORUS_RETURN_IF_ERROR(ValidateGraph(graph, options_.limits));
  CHORUS_ASSIGN_OR_RETURN(std::vector<int64_t> maxima, CheckSymbols(graph));
  CHORUS_ASSIGN_OR_RETURN(const int64_t bytes_to_plan, MemoryToPlan(graph, options_.plan.limits));
  if (!large && background_ != nullptr &&
      (bytes_to_plan > options_.max_inline_plan_bytes || HasSlowKernels(graph))) {
    return nullptr;
  }
  // A graph that cannot be planned at its largest is refused now.
  const bool has_sizes = !maxima.empty();
  CHORUS_RETURN_IF_ERROR(cover_with_copy((has_sizes ? 2 : 1) * MemoryOf(graph) + bytes_to_plan));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<GraphRecord> new_record,
                          MakeRecord(std::move(graph), std::move(maxima), bytes_to_plan));
  if (has_sizes) {
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<GraphRecord> at_maxima,
                            MakeAt(*new_record, new_record->maxima));
    new_record->at_sizes.Add(new_record->maxima, Share(std::move(at_maxima), large));
  }
  new_record->bytes += size;
  new_record->encoded = std::make_shared<const std::string>(std::move(encoded));
  const auto forget = [records, encoded = new_record->encoded] { records->Forget(*encoded); };
  std::shared_ptr<GraphRecord> record = Share(std::move(new_record), large, forget);
  records->Add(record);
  return record;
}

absl::Status GraphStore::ResizeThere(Charge* charge, int64_t bytes) {
  absl::Status status;
  const auto ask = [&] {
    return background_->Ask([&] {
      status = charge->Resize(bytes);
      if (!status.ok()) Continue();
    });
  };
  if (ask() && (status.ok() || !background_->DoOwn() || ask())) return status;
  return DrainingError();
}

absl::StatusOr<std::shared_ptr<GraphRecord>> GraphStore::Register(absl::string_view encoded,
                                                                  const Client& client,
                                                                  OnRecord later) {
  using Record = absl::StatusOr<std::shared_ptr<GraphRecord>>;
  if (static_cast<int64_t>(encoded.size()) > options_.max_graph_bytes) {
    return MakeError(Reason::kQuota, absl::StrCat("a graph may have ", options_.max_graph_bytes,
                                                  " bytes, got ", encoded.size()));
  }
  CHORUS_ASSIGN_OR_RETURN(Charge charge, NothingOf(client));
  if (background_ == nullptr || static_cast<int64_t>(encoded.size()) <= options_.max_inline_bytes) {
    Record record = FindOrMake(encoded, /*large=*/false, &small_,
                               [&](int64_t bytes) { return charge.Resize(bytes); });
    const bool is_large = record.ok() && *record == nullptr;
    if (!is_large) return Charged(std::move(record), std::move(charge));
  }
  charge.Resize(0).IgnoreError();
  struct Making {
    Charge charge;  // the node thread's
    Record record;
  };
  auto making = std::make_shared<Making>(Making{std::move(charge), nullptr});
  background_->Do(
      client.tenant,
      [this, making, encoded] {
        making->record = FindOrMake(encoded, /*large=*/true, &large_, [&](int64_t bytes) {
          return ResizeThere(&making->charge, bytes);
        });
      },
      [making, later = std::move(later)] {
        later(Charged(std::move(making->record), std::move(making->charge)));
      });
  return nullptr;
}

absl::StatusOr<std::shared_ptr<GraphRecord>> GraphStore::Charged(
    absl::StatusOr<std::shared_ptr<GraphRecord>> record, Charge charge) {
  const bool was_there = charge.amount() == 0;
  if (!record.ok() || was_there) return record;
  const std::shared_ptr<GraphRecord> at_maxima = (*record)->at_sizes.Find((*record)->maxima);
  const int64_t maxima_bytes = at_maxima == nullptr ? 0 : at_maxima->bytes;
  const absl::Status status = charge.Resize((*record)->bytes + maxima_bytes);
  // What there is stays charged until it is gone, also where that is no success.
  if (at_maxima != nullptr) {
    at_maxima->charge = charge.Split(std::min(maxima_bytes, charge.amount()));
  }
  (*record)->charge = std::move(charge);
  CHORUS_RETURN_IF_ERROR(status);
  return record;
}

template <typename Key, typename T, size_t kMost, typename Make>
absl::StatusOr<std::shared_ptr<T>> GraphStore::FindVariant(
    const std::shared_ptr<GraphRecord>& record, Variants<Key, T, kMost> GraphRecord::*variants,
    const Key& key, const Client& client, const Waiting& waiting, int64_t bytes_to_make,
    Make make) {
  using Result = absl::StatusOr<std::unique_ptr<T>>;
  if (std::shared_ptr<T> variant = ((*record).*variants).Find(key)) return variant;
  CHORUS_RETURN_IF_ERROR(waiting.failed);
  const auto keep = [this, variants, key](GraphRecord* of, Result result,
                                          Charge charge) -> absl::StatusOr<std::shared_ptr<T>> {
    CHORUS_RETURN_IF_ERROR(result.status());
    const absl::Status status = charge.Resize(BytesOf(**result));
    (*result)->charge = std::move(charge);
    std::shared_ptr<T> shared = Share(*std::move(result), of->large);
    CHORUS_RETURN_IF_ERROR(status);
    (of->*variants).Add(key, shared);
    return shared;
  };
  CHORUS_ASSIGN_OR_RETURN(Charge charge, NothingOf(client));
  if (!record->large) {
    CHORUS_RETURN_IF_ERROR(charge.Resize(bytes_to_make));
    return keep(record.get(), make(*record), std::move(charge));
  }
  CHORUS_ASSIGN_OR_RETURN(OnMade later, waiting.wait());
  if (!((*record).*variants).waits().Wait(key, std::move(later))) return nullptr;
  struct Making {
    Charge charge;  // the node thread's
    absl::Status charged;
    Result result;
  };
  auto making = std::make_shared<Making>(Making{std::move(charge), {}, nullptr});
  background_->Do(
      client.tenant,
      [this, make, making, bytes_to_make, of = record.get()] {
        making->charged = ResizeThere(&making->charge, bytes_to_make);
        if (making->charged.ok()) making->result = make(*of);
      },
      [keep, making, record, variants, key] {
        const absl::Status result = making->result.status();
        absl::Status charged = making->charged;
        if (charged.ok()) {
          charged =
              keep(record.get(), std::move(making->result), std::move(making->charge)).status();
        }
        // That the first session that asked cannot pay for it is nothing to the others: they ask
        // again.
        ((*record).*variants).waits().Tell(key, charged, result);
      });
  return nullptr;
}

absl::StatusOr<std::shared_ptr<GraphRecord>> GraphStore::AtSizes(
    const std::shared_ptr<GraphRecord>& record, const std::vector<int64_t>& sizes,
    const Client& client, const Waiting& waiting) {
  return FindVariant(record, &GraphRecord::at_sizes, sizes, client, waiting,
                     record->bytes + record->bytes_to_plan,
                     [this, sizes](const GraphRecord& of) { return MakeAt(of, sizes); });
}

absl::StatusOr<std::shared_ptr<LoadedPlan>> GraphStore::PlanOf(
    const std::shared_ptr<GraphRecord>& record, const PlanVariant& variant, const Client& client,
    const Waiting& waiting) {
  return FindVariant(record, &GraphRecord::plans, variant, client, waiting, record->bytes_to_plan,
                     [this, variant](const GraphRecord& of) {
                       return MakePlan(of.graph, variant, of.bytes_to_plan);
                     });
}

// --- Going --------------------------------------------------------------------------------------

// What was loaded goes with the plan, and what it was charged for with that.
std::vector<Charge> GraphStore::UnloadAll(LoadedPlan* plan) const {
  std::vector<Charge> charges;
  for (const auto& slot : plan->locations) {
    CountWork(kWorkPerUnload * static_cast<int64_t>(slot.size()));
    for (const auto& location : slot) {
      UnloadedPart part = unload_(location.first, location.second);
      plan->unloaded.push_back(std::move(part.program));
      charges.push_back(std::move(part.charge));
    }
  }
  return charges;
}

std::shared_ptr<GraphRecord> GraphStore::Share(std::unique_ptr<GraphRecord> record, bool large,
                                               std::function<void()> forget) {
  record->large = large;
  return {record.release(), [this, large, forget = std::move(forget)](GraphRecord* unused) {
            Go([this, unused, large, forget] {
              std::vector<Charge> charges = UnloadAll(&unused->main);
              // Each on its own way.
              unused->plans = {};
              unused->at_sizes = {};
              TakeApart(std::unique_ptr<GraphRecord>(unused), std::move(charges), unused->bytes,
                        large, forget);
            });
          }};
}

std::shared_ptr<LoadedPlan> GraphStore::Share(std::unique_ptr<LoadedPlan> plan, bool large) {
  return {plan.release(), [this, large](LoadedPlan* unused) {
            Go([this, unused, large] {
              std::vector<Charge> charges = UnloadAll(unused);
              TakeApart(std::unique_ptr<LoadedPlan>(unused), std::move(charges),
                        unused->charge.amount(), large, nullptr);
            });
          }};
}

void GraphStore::Go(std::function<void()> end) {
  going_.push_back(std::move(end));
  if (!is_going_) Continue();  // what ends takes others along
}

bool GraphStore::Continue() {
  if (going_.empty()) return false;
  is_going_ = true;
  while (!going_.empty() && SliceHasTime()) {
    const std::function<void()> end = std::move(going_.front());
    going_.pop_front();
    end();
  }
  is_going_ = false;
  return true;
}

// Millions of small pieces take their time. Until they are gone they stay charged.
template <typename T>
void GraphStore::TakeApart(std::unique_ptr<T> unused, std::vector<Charge> charges, int64_t bytes,
                           bool large, const std::function<void()>& forget) {
  const int64_t work = kWorkPerEnd + bytes / kBytesOfWork;
  charges.push_back(std::move(unused->charge));
  auto charged = std::make_shared<std::vector<Charge>>(std::move(charges));
  const auto end = [forget] {
    if (forget != nullptr) forget();
  };
  if (background_ == nullptr || (!large && work <= kTurnWork)) {
    CountWork(work);
    unused.reset();
    return end();
  }
  auto take_apart = [doomed = std::shared_ptr<T>(std::move(unused))]() mutable { doomed.reset(); };
  if (!large) return background_->Do("", std::move(take_apart), [charged, end] { end(); });
  background_->Do(
      "",
      [take_apart, end]() mutable {
        take_apart();
        end();
      },
      [charged] {});
}

}  // namespace chorus::node
