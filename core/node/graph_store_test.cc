#include "core/node/graph_store.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/base/work.h"
#include "core/graph/encoding.h"
#include "core/graph/graph.h"
#include "core/node/background.h"
#include "core/ops/testing/rank_builder.h"
#include "core/runtime/plan/plan.h"
#include "core/runtime/testing/hostile_graphs.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

UnloadedPart NothingIsLoaded(DeviceIndex, PlanId) { return {}; }

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

// The node thread's: what the background posts waits until the test runs it.
class Posts {
 public:
  Background& background() { return background_; }
  void RunNext() {
    std::function<void()> next;
    {
      MutexLock lock(&mutex_);
      while (posts_.empty()) posted_.Wait(&mutex_);
      next = std::move(posts_.front());
      posts_.pop_front();
    }
    next();
  }
  // Waits until there is one, and lets it wait.
  void AwaitNext() {
    MutexLock lock(&mutex_);
    while (posts_.empty()) posted_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar posted_;
  std::deque<std::function<void()>> posts_;
  Background background_{[this](std::function<void()> post) {
    MutexLock lock(&mutex_);
    posts_.push_back(std::move(post));
    posted_.SignalAll();
  }};
};

GraphStore::Options AllLarge() {
  GraphStore::Options options;
  options.max_inline_bytes = 0;
  return options;
}

// Its input has a dimension that runs fix.
std::string OfAnySize(int nodes) {
  testing::RankBuilder builder;
  ValueIndex x = builder.Input(TensorType(DType::kF32, {64}));
  for (int i = 0; i < nodes; ++i) x = builder.Op("neg", {x});
  GraphOutput output;
  output.value = x;
  builder.graph().AddOutput(output);
  Graph graph = builder.graph().Build();
  graph.inputs[0].type.dims[0] = Dim::Symbol(0, 64);
  return EncodeGraph(graph);
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

// A large graph; `look` is called before each post.
absl::StatusOr<std::shared_ptr<GraphRecord>> MakeLarge(
    GraphStore* store, const std::string& encoded, const BudgetRef& budget, Posts* posts,
    const std::function<void()>& look = [] {}) {
  absl::optional<absl::StatusOr<std::shared_ptr<GraphRecord>>> made;
  const auto at_once = store->Register(
      encoded, ClientOf(budget),
      [&](absl::StatusOr<std::shared_ptr<GraphRecord>> record) { made = std::move(record); });
  EXPECT_TRUE(at_once.ok() && *at_once == nullptr) << at_once.status();
  if (!at_once.ok() || *at_once != nullptr) return at_once;
  while (!made.has_value()) {
    posts->AwaitNext();
    look();
    posts->RunNext();
  }
  return *std::move(made);
}

// However few bytes it comes in: its kernels take long to make, and have memory of their own.
TEST(GraphStoreTest, AGraphWithSlowKernelsIsTheBackgrounds) {
  testing::RankBuilder builder;
  const ValueIndex x = builder.Input(TensorType(DType::kF32, {1, 1, 5, 5}));
  const ValueIndex w = builder.Input(TensorType(DType::kF32, {1, 1, 3, 3}));
  GraphOutput output;
  output.value = builder.Op("convolution", {x, w});
  builder.graph().AddOutput(output);
  const std::string encoded = EncodeGraph(builder.graph().Build());
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  Posts posts;
  GraphStore store({}, &posts.background(), NothingIsLoaded);
  const auto record = MakeLarge(&store, encoded, budget, &posts);
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_TRUE((*record)->large);
  EXPECT_EQ((*record)->main.kernel_bytes, std::vector<int64_t>{256 << 10});
  EXPECT_GE((*record)->bytes, 256 << 10);
  posts.background().Stop();  // it has what is dropped here
}

// For the text of an error of memory: nobody looks for it at the time.
TEST(GraphStoreTest, AGraphKnowsItsNodeWithTheLargestResult) {
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  GraphStore store({}, nullptr, NothingIsLoaded);
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
  GraphStore store({}, nullptr, NothingIsLoaded);
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
  GraphStore store({}, nullptr, [&unloaded](DeviceIndex, PlanId plan) {
    unloaded.insert(plan);
    return UnloadedPart();
  });
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
  GraphStore store({}, nullptr, [&unloaded](DeviceIndex, PlanId plan) {
    unloaded.insert(plan);
    return UnloadedPart();
  });
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
  GraphStore store({}, nullptr, NothingIsLoaded);
  auto record = store.Register(Independent(3), ClientOf(rich), nullptr);
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(rich->used(), (*record)->bytes);
  const std::vector<int32_t> order = {2, 1, 0};
  EXPECT_EQ(ErrorOf(InOrder(&store, *record, order, poor).status()).reason, Reason::kOutOfMemory);
  EXPECT_EQ((*record)->plans.size(), 0u);
  ASSERT_TRUE(InOrder(&store, *record, order, rich).ok());
  EXPECT_GT(rich->used(), (*record)->bytes + 100);
  EXPECT_TRUE(InOrder(&store, *record, order, poor).ok()) << "it is there";
  record->reset();
  EXPECT_EQ(rich->used(), 0);
}

// Tenants share a graph's record, and wait for what is made of it together.
TEST(GraphStoreTest, ThatTheFirstWhoAsksCannotPayIsNothingToTheOthers) {
  Posts posts;
  GraphStore store(AllLarge(), &posts.background(), NothingIsLoaded);
  const BudgetRef poor = Budget::OfNode(100);
  const BudgetRef rich = Budget::OfNode(int64_t{1} << 30);
  const std::shared_ptr<GraphRecord> record = *MakeLarge(&store, Independent(3), rich, &posts);

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
  while (told.empty()) posts.RunNext();
  ASSERT_EQ(told.size(), 2u);
  EXPECT_EQ(told[0].first, "poor");
  EXPECT_EQ(ErrorOf(told[0].second).reason, Reason::kOutOfMemory);
  EXPECT_EQ(told[1].first, "rich");
  EXPECT_TRUE(told[1].second.ok()) << told[1].second;
  told.clear();
  EXPECT_EQ(ask("rich", rich), nullptr) << "it has to be made again";
  while (told.empty()) posts.RunNext();
  EXPECT_TRUE(told[0].second.ok()) << told[0].second;
  EXPECT_NE(ask("rich", rich), nullptr);
  posts.background().Stop();
}

TEST(GraphStoreTest, RefusesGraphsThatAreTooMuchAndKeepsNothingOfThem) {
  const auto register_in = [](const std::string& encoded, int64_t max_nodes, int64_t max_bytes) {
    GraphStore::Options options;
    options.limits.max_nodes = max_nodes;
    options.max_graph_bytes = max_bytes;
    GraphStore store(options, nullptr, NothingIsLoaded);
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

// --- What is charged while something is made ---

constexpr int64_t kMuch = int64_t{1} << 30;

int64_t HeldOf(const BudgetRef& budget) { return budget->held(Resource::kGraphBytes); }

// With what it is at its maxima, which comes with it.
int64_t BytesOf(GraphRecord& record) {
  const std::shared_ptr<GraphRecord> at_maxima = record.at_sizes.Find(record.maxima);
  return record.bytes + (at_maxima == nullptr ? 0 : at_maxima->bytes);
}

TEST(GraphStoreTest, AGraphIsChargedBeforeEachStepOfMakingIt) {
  Posts posts;
  const BudgetRef budget = Budget::OfNode(kMuch);
  const std::string encoded = Independent(70);
  const Graph graph = *DecodeGraph(encoded);
  const int64_t copy = static_cast<int64_t>(encoded.size());
  const int64_t bytes_to_plan = *MemoryToPlan(graph, AllLarge().plan.limits);
  GraphStore store(AllLarge(), &posts.background(), NothingIsLoaded);
  std::vector<int64_t> held;
  auto record = MakeLarge(&store, encoded, budget, &posts, [&] { held.push_back(HeldOf(budget)); });
  ASSERT_TRUE(record.ok()) << record.status();
  // Nothing is made yet; it is decoded and checked; it is planned.
  ASSERT_EQ(held.size(), 3u);
  EXPECT_EQ(held[0], 0);
  EXPECT_GT(held[1], copy + MemoryOf(graph));
  EXPECT_EQ(held[2], copy + MemoryOf(graph) + bytes_to_plan);
  EXPECT_EQ(HeldOf(budget), (*record)->bytes) << "what it takes, once it is there";

  held.clear();
  const BudgetRef other = Budget::OfNode(0);
  auto found = MakeLarge(&store, encoded, other, &posts, [&] { held.push_back(HeldOf(other)); });
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, *record);
  EXPECT_EQ(held, std::vector<int64_t>{0}) << "nothing is made of what is there";
  // Until it is gone; also where nobody names it, for the session that asked has ended.
  *found = nullptr;
  *record = nullptr;
  EXPECT_GT(HeldOf(budget), 0);
  posts.RunNext();
  EXPECT_EQ(HeldOf(budget), 0);
  posts.background().Stop();
}

TEST(GraphStoreTest, VariantsAreChargedBeforeTheyAreMade) {
  Posts posts;
  const BudgetRef budget = Budget::OfNode(kMuch);
  GraphStore store(AllLarge(), &posts.background(), NothingIsLoaded);
  const auto record = *MakeLarge(&store, Independent(70), budget, &posts);
  const int64_t before = HeldOf(budget);
  std::vector<int32_t> order(70);
  std::iota(order.rbegin(), order.rend(), 0);
  absl::optional<absl::Status> told;
  const auto wait = [&told]() -> absl::StatusOr<GraphStore::OnMade> {
    return GraphStore::OnMade([&told](const absl::Status& status) { told = status; });
  };
  const auto ask = [&] {
    return store.PlanOf(record, {order, {}, {}}, ClientOf(budget), {absl::OkStatus(), wait});
  };
  ASSERT_EQ(*ask(), nullptr);
  posts.RunNext();
  EXPECT_EQ(HeldOf(budget), before + record->bytes_to_plan);
  posts.RunNext();
  ASSERT_TRUE(told.has_value() && told->ok());
  const auto plan = *ask();
  ASSERT_NE(plan, nullptr);
  EXPECT_EQ(HeldOf(budget), before + plan->charge.amount());
  posts.background().Stop();
}

// Nine zero bytes are a node.
std::string Bomb(size_t nodes) {
  Graph graph;
  graph.nodes.resize(nodes);
  return EncodeGraph(graph);
}

// Each with what it is charged for while it is made, on the thread on which it is.
TEST(GraphStoreTest, MakingTakesNoMoreThanIsChargedForIt) {
  std::vector<std::pair<std::string, std::string>> graphs;
  for (const testing::HostileGraph kind : testing::kHostileGraphs) {
    for (const int size : {20, 1000}) {
      graphs.emplace_back(testing::NameOf(kind),
                          EncodeGraph(testing::MakeHostileGraph(kind, size)));
    }
  }
  graphs.emplace_back("independent", Independent(1000));
  graphs.emplace_back("sizes", OfAnySize(1000));
  graphs.emplace_back("bomb", Bomb(100000));
  graphs.emplace_back("no graph", std::string(5000, 'x'));
  for (const auto& [name, encoded] : graphs) {
    Posts posts;
    absl::optional<HeapUse> heap;
    posts.background().Do(
        "", [&heap] { heap.emplace(); }, [] {});
    posts.RunNext();
    const BudgetRef budget = Budget::OfNode(kMuch);
    int64_t charged = 0;
    {
      GraphStore store(AllLarge(), &posts.background(), NothingIsLoaded);
      const auto record = MakeLarge(&store, encoded, budget, &posts,
                                    [&] { charged = std::max(charged, HeldOf(budget)); });
      EXPECT_EQ(record.ok(), name != "bomb" && name != "no graph") << record.status();
      EXPECT_EQ(HeldOf(budget), record.ok() ? BytesOf(**record) : 0) << name;
      int64_t most = 0;
      posts.background().Do(
          "", [&] { most = heap->most_bytes(); }, [] {});
      posts.RunNext();
      // Beside it, what a text and the jobs themselves take.
      EXPECT_LE(most, charged + 4096) << name;
      std::printf("%-20s %9zu bytes: %10lld charged, %10lld taken\n", name.c_str(), encoded.size(),
                  static_cast<long long>(charged), static_cast<long long>(most));
      posts.background().Stop();
    }
  }
}

TEST(GraphStoreTest, WhoCannotBeChargedHasNothingMade) {
  const BudgetRef node = Budget::OfNode(kMuch);
  for (const bool is_large : {false, true}) {
    // Not more than the inline bytes, and more than their copy.
    constexpr int64_t kLittle = 8000;
    for (const std::string& encoded : {Independent(70), Bomb(400)}) {
      Budget::Limits limits;
      limits.bytes[static_cast<size_t>(Domain::kHost)] = kLittle;
      const BudgetRef session = Budget::Within(node, "session 1", limits);
      Posts posts;
      GraphStore store(is_large ? AllLarge() : GraphStore::Options(), &posts.background(),
                       NothingIsLoaded);
      absl::optional<HeapUse> heap;
      posts.background().Do(
          "", [&heap] { heap.emplace(); }, [] {});
      posts.RunNext();
      const HeapUse here;
      const absl::Status status =
          is_large ? MakeLarge(&store, encoded, session, &posts).status()
                   : store.Register(encoded, ClientOf(session), nullptr).status();
      int64_t most = here.most_bytes();
      posts.background().Do(
          "", [&] { most = std::max(most, heap->most_bytes()); }, [] {});
      posts.RunNext();
      EXPECT_EQ(ErrorOf(status).reason, Reason::kOutOfMemory) << status;
      EXPECT_THAT(
          ErrorOf(status).message,
          ::testing::MatchesRegex(absl::StrCat(
              "to make a graph of ", encoded.size(),
              " bytes: out of memory: [0-9]+ bytes are needed, 8000 of the 8000 that session 1 may "
              "hold are free")));
      EXPECT_LE(most, 4096) << "texts";
      EXPECT_EQ(node->used(), 0);
      posts.background().Stop();
    }
  }
}

// What has been released is as good as free, though the background has not come to it.
TEST(GraphStoreTest, WhatHasGoneIsTakenApartBeforeWhoNeedsItsMemoryIsRefused) {
  const std::string encoded = Independent(70);
  // Makes a graph, lets it go and makes it again.
  const auto status_within = [&](int64_t bytes) {
    Posts posts;
    const BudgetRef budget = Budget::OfNode(bytes);
    GraphStore store(AllLarge(), &posts.background(), NothingIsLoaded);
    absl::StatusOr<std::shared_ptr<GraphRecord>> record =
        MakeLarge(&store, encoded, budget, &posts);
    if (!record.ok()) return record.status();
    // Others have asked the background for something before, the node too.
    Mutex mutex;
    CondVar changed;
    bool open = false;
    posts.background().Do(
        "another",
        [&] {
          MutexLock lock(&mutex);
          while (!open) changed.Wait(&mutex);
        },
        [] {});
    posts.background().Do(
        "", [] {}, [] {});
    *record = nullptr;
    absl::Status status = absl::UnknownError("it waits");
    bool told = false;
    const auto on_made = [&](const absl::StatusOr<std::shared_ptr<GraphRecord>>& made) {
      status = made.status();
      told = true;
    };
    EXPECT_TRUE(store.Register(encoded, ClientOf(budget), on_made).ok());
    {
      MutexLock lock(&mutex);
      open = true;
      changed.SignalAll();
    }
    while (!told) posts.RunNext();
    posts.background().Stop();
    return status;
  };
  int64_t enough = 0;  // for one, while it is made
  {
    Posts posts;
    const BudgetRef budget = Budget::OfNode(kMuch);
    GraphStore store(AllLarge(), &posts.background(), NothingIsLoaded);
    const auto look = [&] { enough = std::max(enough, budget->used()); };
    ASSERT_TRUE(MakeLarge(&store, encoded, budget, &posts, look).ok());
    posts.background().Stop();
  }
  EXPECT_EQ(status_within(enough), absl::OkStatus());
  EXPECT_EQ(ErrorOf(status_within(enough - 1)).reason, Reason::kOutOfMemory);
}

TEST(GraphStoreTest, WhatIsChargedForMakingGoesWhenTheNodeEnds) {
  for (const int answers : {0, 1, 2}) {
    Posts posts;
    const BudgetRef budget = Budget::OfNode(kMuch);
    GraphStore store(AllLarge(), &posts.background(), NothingIsLoaded);
    const auto never = [](const absl::StatusOr<std::shared_ptr<GraphRecord>>&) { FAIL(); };
    const std::string encoded = Independent(70);
    ASSERT_TRUE(store.Register(encoded, ClientOf(budget), never).ok());
    for (int i = 0; i < answers; ++i) posts.RunNext();
    posts.AwaitNext();
    EXPECT_EQ(HeldOf(budget) > 0, answers > 0);
    posts.background().Stop();
    EXPECT_EQ(HeldOf(budget), 0);
  }
}

// Few bytes that take long are worked on where large graphs are.
// Others have their turns between the sizes, or orders, that runs ask for.
TEST(GraphStoreTest, WhatIsMadeOfASmallGraphCountsEachNode) {
  constexpr int kNodes = 180;
  const BudgetRef budget = Budget::OfNode(kMuch);
  GraphStore store({}, nullptr, NothingIsLoaded);
  const std::string encoded = OfAnySize(kNodes);
  EXPECT_LE(encoded.size(), 4096u);
  const auto wait = []() -> absl::StatusOr<GraphStore::OnMade> {
    return absl::InternalError("a small graph is not waited for");
  };
  std::shared_ptr<GraphRecord> record;
  const auto work_of = [](auto make) {
    const WorkSlice slice;
    make();
    return SliceWork();
  };
  const int64_t to_register =
      work_of([&] { record = *store.Register(encoded, ClientOf(budget), nullptr); });
  EXPECT_GE(to_register, 20 * kNodes);
  EXPECT_LE(to_register, kMaxSliceWork - kTurnWork);
  const auto at_size = [&] {
    ASSERT_TRUE(store.AtSizes(record, {7}, ClientOf(budget), {absl::OkStatus(), wait}).ok());
  };
  EXPECT_GE(work_of(at_size), 20 * kNodes);
  EXPECT_LT(work_of(at_size), 20) << "it is there";
  const auto at = *store.AtSizes(record, {7}, ClientOf(budget), {absl::OkStatus(), wait});
  const auto in_other_order = [&] {
    ASSERT_TRUE(
        store.PlanOf(at, {{}, {}, OneDomain{{}, false}}, ClientOf(budget), {absl::OkStatus(), wait})
            .ok());
  };
  EXPECT_GE(work_of(in_other_order), 20 * kNodes);
}

TEST(GraphStoreTest, APlanOfManyPiecesIsMadeInTheBackground) {
  Posts posts;
  const BudgetRef budget = Budget::OfNode(int64_t{1} << 30);
  {
    GraphStore store({}, &posts.background(), NothingIsLoaded);
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
      const auto made = MakeLarge(&store, encoded, budget, &posts);
      ASSERT_TRUE(made.ok()) << made.status();
      EXPECT_TRUE((*made)->large);
    }
    posts.background().Stop();
  }
}

}  // namespace
}  // namespace chorus::node
