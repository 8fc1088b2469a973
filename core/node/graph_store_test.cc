#include "core/node/graph_store.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/base/work.h"
#include "core/graph/encoding.h"
#include "core/graph/graph.h"
#include "core/node/background.h"
#include "core/ops/testing/rank_builder.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

std::string Independent(int collectives) {
  testing::RankBuilder builder(0, 2);
  builder.set_wants_grad(false);
  for (int i = 0; i < collectives; ++i) {
    GraphOutput output;
    output.value = builder.AllReduce(builder.Input(TensorType(DType::kF32, {3})));
    builder.graph().AddOutput(output);
  }
  return EncodeGraph(builder.graph().Build());
}

GraphStore::Client ClientOf(const BudgetRef& budget) {
  static const std::string* const tenant = new std::string("uid:1");
  return {*tenant, budget};
}

absl::StatusOr<std::shared_ptr<LoadedPlan>> InOrder(GraphStore* store,
                                                    const std::shared_ptr<GraphRecord>& record,
                                                    const std::vector<int32_t>& order,
                                                    const BudgetRef& budget) {
  const auto wait = []() -> absl::StatusOr<GraphStore::OnMade> {
    return absl::InternalError("a small graph is not waited for");
  };
  return store->PlanOf(record, {order, {}, {}}, ClientOf(budget), {absl::OkStatus(), wait});
}

// For the text of an error of memory: nobody looks for it at the time.
TEST(GraphStoreTest, AGraphKnowsItsNodeWithTheLargestResult) {
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  GraphStore store({}, nullptr, [](DeviceIndex, PlanId) {});
  for (const int largest : {0, 1, 6}) {
    testing::RankBuilder builder(0, 2);
    builder.set_wants_grad(false);
    for (int i = 0; i < 7; ++i) {
      GraphOutput output;
      output.value = builder.AllReduce(
          builder.Input(TensorType(DType::kF32, {i == largest ? 100 : 3 + i % 2})));
      builder.graph().AddOutput(output);
    }
    const auto record =
        store.Register(EncodeGraph(builder.graph().Build()), ClientOf(budget), nullptr);
    ASSERT_TRUE(record.ok()) << record.status();
    EXPECT_EQ((*record)->largest_node, largest);
  }
}

// Which groups are of one domain tells plans apart as their order does.
TEST(GraphStoreTest, APlanIsOfItsDomains) {
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  GraphStore store({}, nullptr, [](DeviceIndex, PlanId) {});
  const auto record = store.Register(Independent(1), ClientOf(budget), nullptr);
  ASSERT_TRUE(record.ok()) << record.status();
  const auto wait = []() -> absl::StatusOr<GraphStore::OnMade> {
    return absl::InternalError("a small graph is not waited for");
  };
  std::set<const LoadedPlan*> plans;
  std::vector<std::shared_ptr<LoadedPlan>> held;
  for (int again = 0; again < 2; ++again) {
    for (const bool group : {false, true}) {
      for (const bool slots : {false, true}) {
        PlanVariant variant;
        variant.one_domain = OneDomain{{group}, slots};
        const auto plan =
            store.PlanOf(*record, variant, ClientOf(budget), {absl::OkStatus(), wait});
        ASSERT_TRUE(plan.ok()) << plan.status();
        plans.insert(plan->get());
        held.push_back(*plan);
      }
    }
  }
  EXPECT_EQ(plans.size(), 4u);
}

// The plans of one graph go with it: more work than a slice has the time for.
TEST(GraphStoreTest, WhatASliceHasNoTimeToTakeApartGoesInOthersAndStaysChargedUntilThen) {
  std::set<PlanId> unloaded;
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  GraphStore store({}, nullptr, [&unloaded](DeviceIndex, PlanId plan) { unloaded.insert(plan); });
  constexpr int kCollectives = 8;
  absl::StatusOr<std::shared_ptr<GraphRecord>> record =
      store.Register(Independent(kCollectives), ClientOf(budget), nullptr);
  ASSERT_TRUE(record.ok()) << record.status();
  std::vector<int32_t> order(kCollectives);
  std::iota(order.begin(), order.end(), 0);
  constexpr uint64_t kPlans = GraphRecord::kMaxPlans;
  for (uint64_t i = 1; i <= kPlans; ++i) {
    std::next_permutation(order.begin(), order.end());
    const auto plan = InOrder(&store, *record, order, budget);
    ASSERT_TRUE(plan.ok()) << plan.status();
    (*plan)->locations[0].emplace_back(DeviceIndex(0), PlanId(i));
  }
  const int64_t charged = budget->held(Resource::kGraphBytes);
  {
    const WorkSlice slice;
    record->reset();
    EXPECT_GT(SliceWork(), kTurnWork);
    EXPECT_LT(SliceWork(), 2 * kTurnWork);
  }
  EXPECT_LT(unloaded.size(), kPlans);
  int slices = 1;
  for (bool more = true; more; ++slices) {
    const uint64_t left = kPlans - unloaded.size();
    const int64_t held = budget->held(Resource::kGraphBytes);
    EXPECT_GE(held, charged / static_cast<int64_t>(kPlans) * static_cast<int64_t>(left) / 2);
    const WorkSlice slice;
    more = store.Continue();
    EXPECT_LT(SliceWork(), 2 * kTurnWork);
  }
  EXPECT_GE(slices, 3);
  EXPECT_EQ(unloaded.size(), kPlans);
  EXPECT_EQ(budget->held(Resource::kGraphBytes), 0);
}

TEST(GraphStoreTest, KeepsThePlansOfTheLastOrders) {
  std::set<PlanId> unloaded;
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  GraphStore store({}, nullptr, [&unloaded](DeviceIndex, PlanId plan) { unloaded.insert(plan); });
  constexpr int kCollectives = 5;
  absl::StatusOr<std::shared_ptr<GraphRecord>> record =
      store.Register(Independent(kCollectives), ClientOf(budget), nullptr);
  ASSERT_TRUE(record.ok()) << record.status();
  std::vector<int32_t> order(kCollectives);
  std::iota(order.begin(), order.end(), 0);
  std::shared_ptr<LoadedPlan> held;
  std::vector<std::vector<int32_t>> orders;
  constexpr uint64_t kOrders = GraphRecord::kMaxPlans + 44;
  for (uint64_t i = 1; i <= kOrders; ++i) {
    std::next_permutation(order.begin(), order.end());
    orders.push_back(order);
    const absl::StatusOr<std::shared_ptr<LoadedPlan>> plan =
        InOrder(&store, *record, order, budget);
    ASSERT_TRUE(plan.ok()) << plan.status();
    (*plan)->locations[0].emplace_back(DeviceIndex(0), PlanId(i));
    if (i == 1) held = *plan;
    // What is asked for again stays.
    if (i < 2) continue;
    const auto second = InOrder(&store, *record, orders[1], budget);
    ASSERT_TRUE(second.ok()) << second.status();
    EXPECT_EQ((*second)->locations[0][0].second, PlanId(2));
  }
  EXPECT_EQ((*record)->plans.size(), GraphRecord::kMaxPlans);
  // All but those, and the one that a run holds.
  EXPECT_EQ(unloaded.size(), kOrders - GraphRecord::kMaxPlans - 1);
  EXPECT_EQ(unloaded.count(PlanId(1)), 0u);
  EXPECT_EQ(unloaded.count(PlanId(kOrders)), 0u);
  EXPECT_GT(budget->held(Resource::kGraphBytes), 0);
  held.reset();
  EXPECT_EQ(unloaded.count(PlanId(1)), 1u);
  record->reset();
  EXPECT_EQ(unloaded.size(), static_cast<size_t>(kOrders));
}

TEST(GraphStoreTest, PlansBesideTheMainOneAreChargedToWhoAskedForThem) {
  const BudgetRef poor = Budget::OfNode(100);
  const BudgetRef rich = Budget::OfNode(int64_t{1} << 30);
  GraphStore store({}, nullptr, [](DeviceIndex, PlanId) {});
  auto record = store.Register(Independent(3), ClientOf(poor),
                               nullptr);  // the record itself is for its names to pay
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_GT((*record)->bytes, 100);
  const std::vector<int32_t> order = {2, 1, 0};
  EXPECT_EQ(ErrorOf(InOrder(&store, *record, order, poor).status()).reason, Reason::kOutOfMemory);
  EXPECT_EQ((*record)->plans.size(), 0u);
  ASSERT_TRUE(InOrder(&store, *record, order, rich).ok());
  EXPECT_GT(rich->used(), 100);
  EXPECT_TRUE(InOrder(&store, *record, order, poor).ok()) << "it is there";
  record->reset();
  EXPECT_EQ(rich->used(), 0);
}

// Tenants share a graph's record, and wait for what is made of it together.
TEST(GraphStoreTest, ThatTheFirstWhoAsksCannotPayIsNothingToTheOthers) {
  Mutex mutex;
  CondVar posted;
  std::deque<std::function<void()>> posts;
  Background background([&](std::function<void()> post) {
    MutexLock lock(&mutex);
    posts.push_back(std::move(post));
    posted.SignalAll();
  });
  const auto run_one = [&] {
    std::function<void()> post;
    {
      MutexLock lock(&mutex);
      while (posts.empty()) posted.Wait(&mutex);
      post = std::move(posts.front());
      posts.pop_front();
    }
    post();
  };
  GraphStore::Options options;
  options.max_inline_bytes = 0;  // all are large
  GraphStore store(options, &background, [](DeviceIndex, PlanId) {});
  const BudgetRef poor = Budget::OfNode(100);
  const BudgetRef rich = Budget::OfNode(int64_t{1} << 30);
  std::shared_ptr<GraphRecord> record;
  const std::string encoded = Independent(3);
  const auto registered = store.Register(
      encoded, ClientOf(rich), [&](const absl::StatusOr<std::shared_ptr<GraphRecord>>& made) {
        ASSERT_TRUE(made.ok()) << made.status();
        record = *made;
      });
  ASSERT_TRUE(registered.ok()) << registered.status();
  while (record == nullptr) run_one();

  std::vector<std::pair<std::string, absl::Status>> told;
  const auto ask = [&](const std::string& who, const BudgetRef& budget) {
    const auto wait = [&told, who]() -> absl::StatusOr<GraphStore::OnMade> {
      return GraphStore::OnMade(
          [&told, who](const absl::Status& status) { told.emplace_back(who, status); });
    };
    const absl::StatusOr<std::shared_ptr<LoadedPlan>> plan =
        store.PlanOf(record, {{2, 1, 0}, {}, {}}, ClientOf(budget), {absl::OkStatus(), wait});
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *plan;
  };
  EXPECT_EQ(ask("poor", poor), nullptr);
  EXPECT_EQ(ask("rich", rich), nullptr);
  while (told.empty()) run_one();
  ASSERT_EQ(told.size(), 2u);
  EXPECT_EQ(told[0].first, "poor");
  EXPECT_EQ(ErrorOf(told[0].second).reason, Reason::kOutOfMemory);
  EXPECT_EQ(told[1].first, "rich");
  EXPECT_TRUE(told[1].second.ok()) << told[1].second;
  told.clear();
  EXPECT_EQ(ask("rich", rich), nullptr) << "it has to be made again";
  while (told.empty()) run_one();
  EXPECT_TRUE(told[0].second.ok()) << told[0].second;
  EXPECT_NE(ask("rich", rich), nullptr);
  background.Stop();
}

TEST(GraphStoreTest, RefusesGraphsThatAreTooMuchAndKeepsNothingOfThem) {
  const auto register_in = [](const std::string& encoded, int64_t max_nodes, int64_t max_bytes) {
    GraphStore::Options options;
    options.limits.max_nodes = max_nodes;
    options.max_graph_bytes = max_bytes;
    GraphStore store(options, nullptr, [](DeviceIndex, PlanId) {});
    return store.Register(encoded, ClientOf(Budget::OfNode(int64_t{1} << 30)), nullptr).status();
  };
  const std::string three = Independent(3);
  const int64_t memory = MemoryOf(*DecodeGraph(three));
  EXPECT_TRUE(register_in(three, 3, memory).ok());
  EXPECT_EQ(ErrorOf(register_in(three, 2, memory)).message,
            "graph: number of nodes: expected from 0 to 2, got 3");
  EXPECT_EQ(ErrorOf(register_in(three, 3, memory - 1)).reason, Reason::kQuota);

  // As many zeros as a staging arena holds are no graph of millions of nodes.
  Graph many;
  many.nodes.resize(static_cast<size_t>(kMaxClientGraphBytes) / sizeof(Node));
  const Error error = ErrorOf(register_in(EncodeGraph(many), 1 << 20, kMaxClientGraphBytes));
  EXPECT_EQ(error.reason, Reason::kQuota) << error.message;
}

// Few bytes that take long are worked on where large graphs are.
TEST(GraphStoreTest, APlanOfManyPiecesIsMadeInTheBackground) {
  std::vector<std::function<void()>> posted;
  Mutex mutex;
  CondVar changed;
  Background background([&](std::function<void()> closure) {
    MutexLock lock(&mutex);
    posted.push_back(std::move(closure));
    changed.Signal();
  });
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  {
    GraphStore store({}, &background, [](DeviceIndex, PlanId) {});
    // As large as graphs of the node thread's are.
    const std::string common = Independent(70);
    EXPECT_GT(common.size(), 3000u);
    EXPECT_LE(common.size(), 4096u);
    const auto small = store.Register(common, ClientOf(budget), nullptr);
    ASSERT_TRUE(small.ok()) << small.status();
    EXPECT_NE(*small, nullptr);
    EXPECT_FALSE((*small)->large);
    // All the pieces between many ranks.
    constexpr int kSize = 1024;
    testing::RankBuilder builder(0, kSize);
    builder.set_wants_grad(false);
    const ValueIndex x = builder.Input(TensorType(DType::kF32, {kSize}));
    for (int i = 0; i < 20; ++i) {
      GraphOutput output;
      output.value = builder.ApplyCollective("all_to_all_single", {x})[0];
      builder.graph().AddOutput(output);
    }
    const std::string encoded = EncodeGraph(builder.graph().Build());
    EXPECT_LE(encoded.size(), 4096u);
    for (int i = 0; i < 2; ++i) {
      absl::StatusOr<std::shared_ptr<GraphRecord>> made(nullptr);
      const auto at_once = store.Register(
          encoded, ClientOf(budget),
          [&](absl::StatusOr<std::shared_ptr<GraphRecord>> record) { made = std::move(record); });
      ASSERT_TRUE(at_once.ok()) << at_once.status();
      ASSERT_EQ(*at_once, nullptr);
      while (made.ok() && *made == nullptr) {
        std::vector<std::function<void()>> closures;
        {
          MutexLock lock(&mutex);
          while (posted.empty()) changed.Wait(&mutex);
          closures.swap(posted);
        }
        for (const auto& closure : closures) closure();
      }
      ASSERT_TRUE(made.ok()) << made.status();
      EXPECT_TRUE((*made)->large);
    }
    background.Stop();
  }
}

}  // namespace
}  // namespace chorus::node
