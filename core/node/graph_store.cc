#include "core/node/graph_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/ops/specialize.h"

namespace chorus::node {
namespace {

// With what executors make of its parts, each on one device.
int64_t MemoryOfLoaded(const Plan& plan) {
  int64_t bytes = MemoryOf(plan);
  for (const std::string& part : plan.device_plans) bytes += MemoryOfLoadedPart(part);
  return bytes;
}

// To take a graph or a plan apart, beside its bytes, which are small pieces.
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
int64_t BytesOf(const LoadedPlan& plan) { return MemoryOfLoaded(plan.plan); }

}  // namespace

// A step of some tens of bytes becomes a kernel with its types and texts, or a call, and lists of
// operands: 8 times as much for a transpose, 19 times for a product.
int64_t MemoryOfLoadedPart(const std::string& device_plan) {
  constexpr int64_t kTimes = 20;
  return kTimes * static_cast<int64_t>(device_plan.size());
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
                                                                 const PlanLimits& limits) const {
  PlanOptions options = options_.plan;
  options.limits = limits;
  options.order = variant.order;
  options.instances = variant.instances;
  options.one_domain = variant.one_domain;
  auto loaded = std::make_unique<LoadedPlan>();
  CHORUS_ASSIGN_OR_RETURN(loaded->plan, CompilePlan(graph, options));
  loaded->peer_buffers.resize(loaded->plan.votes->participations.size());
  for (size_t i = 0; i < loaded->plan.buffers.size(); ++i) {
    const BufferSpec& spec = loaded->plan.buffers[i];
    if (spec.kind == BufferSpec::Kind::kPeer) {
      loaded->peer_buffers[static_cast<size_t>(spec.index)].push_back(static_cast<int32_t>(i));
    }
  }
  loaded->locations.resize(static_cast<size_t>(graph.num_device_slots));
  return loaded;
}

absl::StatusOr<std::unique_ptr<GraphRecord>> GraphStore::MakeRecord(
    Graph graph, const PlanLimits& limits) const {
  CHORUS_RETURN_IF_ERROR(ValidateGraph(graph, options_.limits));
  auto record = std::make_unique<GraphRecord>();
  CHORUS_ASSIGN_OR_RETURN(record->maxima, CheckSymbols(graph));
  if (record->maxima.empty()) {
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<LoadedPlan> plan, MakePlan(graph, {}, limits));
    record->main = std::move(*plan);
    const ValueTable values(graph);
    for (const GraphOutput& output : graph.outputs) {
      record->output_types.push_back(std::make_shared<TensorType>(values.type(output.value)));
    }
  }
  record->largest_node = LargestNode(graph);
  record->bytes = MemoryOf(graph) + MemoryOfLoaded(record->main.plan);
  record->graph = std::move(graph);
  return record;
}

absl::StatusOr<std::unique_ptr<GraphRecord>> GraphStore::MakeAt(const Graph& graph,
                                                                const std::vector<int64_t>& sizes,
                                                                const PlanLimits& limits) const {
  CHORUS_ASSIGN_OR_RETURN(Graph at_sizes, Specialize(graph, sizes));
  return MakeRecord(std::move(at_sizes), limits);
}

absl::StatusOr<std::shared_ptr<GraphRecord>> GraphStore::FindOrMake(std::string encoded, bool large,
                                                                    GraphsByBytes* records) {
  if (std::shared_ptr<GraphRecord> record = records->Find(encoded)) return record;
  DecodeLimits limits;
  limits.max_nodes = options_.limits.max_nodes;
  limits.max_bytes = options_.max_graph_bytes;
  CHORUS_ASSIGN_OR_RETURN(Graph graph, DecodeGraph(encoded, limits));
  CountWork(static_cast<int64_t>(graph.nodes.size()));
  PlanLimits plan = options_.plan.limits;
  if (!large && background_ != nullptr) {
    plan.max_bytes = std::min(plan.max_bytes, options_.max_inline_plan_bytes);
  }
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<GraphRecord> new_record,
                          MakeRecord(std::move(graph), plan));
  // A graph that cannot be planned at its largest is refused now.
  std::unique_ptr<GraphRecord> at_maxima;
  if (!new_record->maxima.empty()) {
    CHORUS_ASSIGN_OR_RETURN(at_maxima, MakeAt(new_record->graph, new_record->maxima, plan));
  }
  new_record->bytes += static_cast<int64_t>(encoded.size());
  new_record->encoded = std::make_shared<const std::string>(std::move(encoded));
  if (at_maxima != nullptr) {
    new_record->at_sizes.Add(new_record->maxima, Share(std::move(at_maxima), large));
  }
  const auto forget = [records, bytes = new_record->encoded] { records->Forget(*bytes); };
  std::shared_ptr<GraphRecord> record = Share(std::move(new_record), large, forget);
  records->Add(record);
  return record;
}

absl::StatusOr<std::shared_ptr<GraphRecord>> GraphStore::Register(absl::string_view encoded,
                                                                  const Client& client,
                                                                  OnRecord later) {
  using Record = absl::StatusOr<std::shared_ptr<GraphRecord>>;
  if (static_cast<int64_t>(encoded.size()) > options_.max_graph_bytes) {
    return MakeError(Reason::kQuota, absl::StrCat("a graph may have ", options_.max_graph_bytes,
                                                  " bytes, got ", encoded.size()));
  }
  const auto charge = [this, budget = client.budget](Record record) -> Record {
    CHORUS_RETURN_IF_ERROR(record.status());
    CHORUS_RETURN_IF_ERROR(ChargeMaxima(record->get(), budget));
    return record;
  };
  const bool large =
      background_ != nullptr && static_cast<int64_t>(encoded.size()) > options_.max_inline_bytes;
  // The copy comes first: nothing is decoded while the client can still write it.
  if (!large) {
    Record record = FindOrMake(std::string(encoded), large, &small_);
    const bool may_be_large = !record.ok() && ErrorOf(record.status()).reason == Reason::kQuota;
    if (!may_be_large || background_ == nullptr) return charge(std::move(record));
  }
  auto result = std::make_shared<Record>(nullptr);
  background_->Do(
      client.tenant,
      [this, result, encoded] { *result = FindOrMake(std::string(encoded), true, &large_); },
      [result, charge, later = std::move(later)] { later(charge(std::move(*result))); });
  return nullptr;
}

// Charges for the record at its maxima, which comes with one that was made just now.
absl::Status GraphStore::ChargeMaxima(GraphRecord* record, const BudgetRef& budget) const {
  const std::shared_ptr<GraphRecord> at_maxima = record->at_sizes.Find(record->maxima);
  if (at_maxima == nullptr || at_maxima->charge.amount() > 0) return absl::OkStatus();
  CHORUS_ASSIGN_OR_RETURN(at_maxima->charge,
                          budget->Charge(Domain::kHost, Resource::kGraphBytes, at_maxima->bytes));
  return absl::OkStatus();
}

template <typename Key, typename T, size_t kMost, typename Make>
absl::StatusOr<std::shared_ptr<T>> GraphStore::FindVariant(
    const std::shared_ptr<GraphRecord>& record, Variants<Key, T, kMost> GraphRecord::*variants,
    const Key& key, const Client& client, const Waiting& waiting, Make make) {
  using Result = absl::StatusOr<std::unique_ptr<T>>;
  if (std::shared_ptr<T> variant = ((*record).*variants).Find(key)) return variant;
  CHORUS_RETURN_IF_ERROR(waiting.failed);
  const auto keep = [this, variants, key, budget = client.budget](
                        GraphRecord* of, Result result) -> absl::StatusOr<std::shared_ptr<T>> {
    CHORUS_RETURN_IF_ERROR(result.status());
    CHORUS_ASSIGN_OR_RETURN(
        (*result)->charge, budget->Charge(Domain::kHost, Resource::kGraphBytes, BytesOf(**result)));
    std::shared_ptr<T> shared = Share(*std::move(result), of->large);
    (of->*variants).Add(key, shared);
    return shared;
  };
  if (!record->large) return keep(record.get(), make(*record));
  CHORUS_ASSIGN_OR_RETURN(OnMade later, waiting.wait());
  if (!((*record).*variants).waits().Wait(key, std::move(later))) return nullptr;
  auto result = std::make_shared<Result>(nullptr);
  background_->Do(
      client.tenant, [make, result, of = record.get()] { *result = make(*of); },
      [keep, result, record, variants, key] {
        const absl::Status made = result->status();
        const absl::Status kept = keep(record.get(), std::move(*result)).status();
        // That the first who asked cannot pay for it is nothing to the others: they ask again.
        ((*record).*variants).waits().Tell(key, kept, made);
      });
  return nullptr;
}

absl::StatusOr<std::shared_ptr<GraphRecord>> GraphStore::AtSizes(
    const std::shared_ptr<GraphRecord>& record, const std::vector<int64_t>& sizes,
    const Client& client, const Waiting& waiting) {
  return FindVariant(record, &GraphRecord::at_sizes, sizes, client, waiting,
                     [this, sizes](const GraphRecord& of) {
                       return MakeAt(of.graph, sizes, options_.plan.limits);
                     });
}

absl::StatusOr<std::shared_ptr<LoadedPlan>> GraphStore::PlanOf(
    const std::shared_ptr<GraphRecord>& record, const PlanVariant& variant, const Client& client,
    const Waiting& waiting) {
  return FindVariant(record, &GraphRecord::plans, variant, client, waiting,
                     [this, variant](const GraphRecord& of) {
                       return MakePlan(of.graph, variant, options_.plan.limits);
                     });
}

// --- Going --------------------------------------------------------------------------------------

void GraphStore::UnloadAll(const LoadedPlan& plan) const {
  for (const auto& slot : plan.locations) {
    CountWork(kWorkPerUnload * static_cast<int64_t>(slot.size()));
    for (const auto& location : slot) unload_(location.first, location.second);
  }
}

std::shared_ptr<GraphRecord> GraphStore::Share(std::unique_ptr<GraphRecord> record, bool large,
                                               std::function<void()> forget) {
  record->large = large;
  return {record.release(), [this, large, forget = std::move(forget)](GraphRecord* unused) {
            Go([this, unused, large, forget] {
              UnloadAll(unused->main);
              // Each on its own way.
              unused->plans = {};
              unused->at_sizes = {};
              TakeApart(std::unique_ptr<GraphRecord>(unused), unused->bytes, large, forget);
            });
          }};
}

std::shared_ptr<LoadedPlan> GraphStore::Share(std::unique_ptr<LoadedPlan> plan, bool large) {
  return {plan.release(), [this, large](LoadedPlan* unused) {
            Go([this, unused, large] {
              UnloadAll(*unused);
              TakeApart(std::unique_ptr<LoadedPlan>(unused), unused->charge.amount(), large,
                        nullptr);
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
void GraphStore::TakeApart(std::unique_ptr<T> unused, int64_t bytes, bool large,
                           const std::function<void()>& forget) {
  const int64_t work = kWorkPerEnd + bytes / kBytesOfWork;
  auto charge = std::make_shared<Charge>(std::move(unused->charge));
  const auto end = [forget] {
    if (forget != nullptr) forget();
  };
  if (background_ == nullptr || (!large && work <= kTurnWork)) {
    CountWork(work);
    unused.reset();
    return end();
  }
  auto take_apart = [doomed = std::shared_ptr<T>(std::move(unused))]() mutable { doomed.reset(); };
  if (!large) return background_->Do("", std::move(take_apart), [charge, end] { end(); });
  background_->Do(
      "",
      [take_apart, end]() mutable {
        take_apart();
        end();
      },
      [charge] {});
}

}  // namespace chorus::node
