#include "core/runtime/executor.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "core/backend/cuda/testing/test_gpu.h"
#include "core/backend/host/host_backend.h"
#include "core/backend/sim/sim_backend.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/ops/cuda_kernels.h"
#include "core/ops/testing/rank_builder.h"
#include "core/ops/testing/value.h"
#include "core/runtime/testing/gang_rig.h"
#include "gtest/gtest.h"

namespace chorus {
namespace testing {
namespace {

using Session = GangRig::Session;

ThreadPool* Pool() {
  static ThreadPool* const pool = new ThreadPool(3);
  return pool;
}

std::unique_ptr<Backend> OpenHost(int devices, uint64_t) {
  HostBackendOptions options;
  options.devices = devices;
  options.pool = Pool();
  options.make_kernel = &MakeReferenceKernel;
  return CreateHostBackend(options);
}

// Every item goes through the pool, in small pieces.
std::unique_ptr<Backend> OpenHostOnPool(int devices, uint64_t) {
  HostBackendOptions options;
  options.devices = devices;
  options.pool = Pool();
  options.make_kernel = &MakeReferenceKernel;
  options.inline_bytes = 0;
  options.chunk_bytes = 128;
  return CreateHostBackend(options);
}

std::unique_ptr<Backend> OpenSimOf(int devices, uint64_t seed, int devices_per_domain) {
  static uint64_t opened = 0;
  SimBackendOptions options;
  options.devices = devices;
  options.seed = seed + ++opened;
  options.devices_per_domain = devices_per_domain;
  options.make_kernel = &MakeReferenceKernel;
  return CreateSimBackend(options);
}
std::unique_ptr<Backend> OpenSim(int devices, uint64_t seed) { return OpenSimOf(devices, seed, 1); }
std::unique_ptr<Backend> OpenSimShared(int devices, uint64_t seed) {
  return OpenSimOf(devices, seed, devices);
}

// A GPU has no reference kernels: these are its own, with the bits of the reference for whole
// numbers.
std::unique_ptr<Backend> OpenCuda(int devices, uint64_t seed) {
  CudaBackendOptions options;
  options.devices = devices;
  options.make_kernel = &MakeCudaKernel;
  options.memory_bytes = int64_t{256} << 20;
  options.chunk_bytes = int64_t{4} << 20;
  return OpenTestGpu(options, seed);
}

struct Param {
  std::string name;
  std::unique_ptr<Backend> (*open)(int devices, uint64_t seed);
  int ranks;
};

std::ostream& operator<<(std::ostream& os, const Param& param) { return os << param.name; }

uint64_t Seed() {
  static const uint64_t seed = [] {
    const char* const text = std::getenv("CHORUS_TEST_SEED");
    const uint64_t value = text != nullptr ? std::strtoull(text, nullptr, 10)
                                           : static_cast<uint64_t>(absl::GetCurrentTimeNanos());
    std::printf("CHORUS_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

TensorType F32(std::vector<int64_t> sizes) {
  TensorType type(DType::kF32, {});
  for (const int64_t size : sizes) type.dims.emplace_back(size);
  return type;
}

// `may_alias`: the input that it may take the memory of; -1: none.
void AddOutput(RankBuilder* b, ValueIndex v, int32_t may_alias = -1) {
  GraphOutput output;
  output.value = v;
  output.may_alias = may_alias;
  b->graph().AddOutput(output);
}

// An input that may be given away.
ValueIndex AddState(RankBuilder* b, const TensorType& type) {
  GraphInput input;
  input.type = type;
  input.role = InputRole::kState;
  input.donatable = true;
  return b->graph().AddInput(input);
}

class ExecutorTest : public ::testing::TestWithParam<Param> {
 protected:
  ExecutorTest() : random_(Seed()), rig_(GetParam().open(GetParam().ranks, Seed())) {}

  int ranks() const { return GetParam().ranks; }

  // One session a rank, each on its own device, all in group 0.
  Session MakeSession(RankBuilder* b) {
    Session session;
    session.graph = b->graph().Build();
    session.devices = {b->rank()};
    session.groups = {0};
    for (const GraphInput& input : session.graph.inputs) {
      session.inputs.push_back(RandomWhole(input.type, -3, 3, &random_));
    }
    return session;
  }

  template <typename F>
  std::vector<Session> Sessions(const F& build) {
    std::vector<Session> sessions;
    for (int r = 0; r < ranks(); ++r) {
      RankBuilder b(r, ranks());
      build(&b);
      sessions.push_back(MakeSession(&b));
    }
    return sessions;
  }

  std::mt19937_64 random_;
  GangRig rig_;
};

TEST_P(ExecutorTest, OneAllReduceOfAnySize) {
  for (const int64_t size : {0, 1, 7, 1031, 40009}) {
    EXPECT_EQ(rig_.Check(Sessions(
                  [&](RankBuilder* b) { AddOutput(b, b->AllReduce(b->Input(F32({size})))); })),
              "")
        << size;
  }
}

TEST_P(ExecutorTest, LocalOpsBeforeAndAfterACollective) {
  EXPECT_EQ(rig_.Check(Sessions([&](RankBuilder* b) {
    const ValueIndex x = b->Input(F32({33}));
    const ValueIndex y = b->Op("mul", {b->Op("relu", {x}), x});
    const ValueIndex z = b->AllReduce(y);
    AddOutput(b, b->Op("add", {b->Op("neg", {z}), x}));
  })),
            "");
}

TEST_P(ExecutorTest, CollectivesInARowWithAndWithoutWorkBetween) {
  EXPECT_EQ(rig_.Check(Sessions([&](RankBuilder* b) {
    const ValueIndex x = b->Input(F32({257}));
    const ValueIndex twice = b->AllReduce(b->AllReduce(x));
    const ValueIndex other = b->AllReduce(b->Op("neg", {x}));
    const ValueIndex third = b->AllReduce(b->Op("add", {twice, other}));
    AddOutput(b, third);
    AddOutput(b, twice);
    AddOutput(b, b->Op("mul", {other, x}));
  })),
            "");
}

TEST_P(ExecutorTest, EveryKindOfCollective) {
  EXPECT_EQ(rig_.Check(Sessions([&](RankBuilder* b) {
    const TensorType type = F32({19});
    const ValueIndex x = b->Input(type);
    const ValueIndex doubled = b->Op("add", {x, x});
    std::vector<ValueIndex> gathered = b->AllGather(doubled);
    ValueIndex sum = gathered[0];
    for (size_t i = 1; i < gathered.size(); ++i) sum = b->Op("add", {sum, gathered[i]});
    AddOutput(b, sum);
    AddOutput(b, gathered.back());
    b->Barrier();
    AddOutput(b, b->ReduceScatter(gathered));
    const int root = b->size() - 1;
    const ValueIndex seen =
        b->Broadcast(b->rank() == root ? b->Op("neg", {doubled}) : ValueIndex(), type, root);
    AddOutput(b, seen);
    AddOutput(b, b->Op("mul", {seen, x}));
    for (const ValueIndex v : b->Reduce(seen, 0)) AddOutput(b, b->Op("neg", {v}));
    // What was broadcast is broadcast on: an operand that stands with another rank.
    const ValueIndex again = b->Broadcast(b->rank() == 0 ? seen : ValueIndex(), type, 0);
    AddOutput(b, b->Op("add", {again, x}));
  })),
            "");
}

// Rows of the piece from one member to another.
int64_t RowsBetween(int from, int to) { return (from * 3 + to * 2) % 4; }

// Rows differ, and list and single-tensor forms of one collective meet.
TEST_P(ExecutorTest, PiecesOfDifferentRows) {
  EXPECT_EQ(rig_.Check(Sessions([&](RankBuilder* b) {
    const int rank = b->rank();
    const bool one = rank % 2 == 0;
    const auto make = [&](int64_t rows) { return b->Op("neg", {b->Input(F32({rows, 5}))}); };
    const auto output = [&](const std::vector<ValueIndex>& values) {
      for (const ValueIndex v : values) AddOutput(b, b->Op("neg", {v}));
    };
    const auto use = [&](const std::vector<ValueIndex>& values) {
      output(values);
      for (const ValueIndex v : values) AddOutput(b, v);
    };
    std::vector<int64_t> own_rows;  // by member
    std::vector<int64_t> sent;
    std::vector<int64_t> received;
    int64_t all_own = 0;
    int64_t all_sent = 0;
    for (int m = 0; m < ranks(); ++m) {
      own_rows.push_back(RowsBetween(m, m));
      sent.push_back(RowsBetween(rank, m));
      received.push_back(RowsBetween(m, rank));
      all_own += own_rows.back();
      all_sent += sent.back();
    }
    const auto pieces = [&](const std::vector<int64_t>& rows) {
      std::vector<ValueIndex> values;
      for (const int64_t n : rows) values.push_back(make(n));
      return values;
    };

    Collective gather = b->MakeCollective(CollectiveKind::kAllGather);
    gather.counts = own_rows;
    const ValueIndex x = make(own_rows[static_cast<size_t>(rank)]);
    use(b->Emit(gather, {x}, {}, one ? "all_gather_into_tensor" : "all_gather"));
    use(b->Emit(gather, {x}, {}, one ? "all_gather" : "all_gather_into_tensor"));

    for (const int32_t root : {0, ranks() - 1}) {
      Collective c = b->MakeCollective(CollectiveKind::kGather);
      c.root = GroupRank(root);
      if (rank == root) c.counts = own_rows;
      use(b->Emit(c, {x}, {}, root == 0 ? "gather_into_tensor" : "gather"));
      c = b->MakeCollective(CollectiveKind::kScatter);
      c.root = GroupRank(root);
      if (rank != root) {
        use(b->Emit(c, {}, TypeAttributes(F32({own_rows[static_cast<size_t>(rank)], 5}))));
      } else if (root == 0) {
        use(b->Emit(c, pieces(own_rows)));
      } else {
        c.counts = own_rows;
        use(b->Emit(c, {make(all_own)}, {}, "scatter_tensor"));
      }
    }

    Collective scatter = b->MakeCollective(CollectiveKind::kReduceScatter);
    if (one) {
      use(b->Emit(scatter, pieces(own_rows)));
    } else {
      scatter.counts = own_rows;
      use(b->Emit(scatter, {make(all_own)}, {}, "reduce_scatter_tensor"));
    }

    Collective exchange = b->MakeCollective(CollectiveKind::kAllToAll);
    if (one) {
      exchange.counts = received;
      use(b->Emit(exchange, pieces(sent)));
    } else {
      exchange.counts = sent;
      exchange.counts.insert(exchange.counts.end(), received.begin(), received.end());
      use(b->Emit(exchange, {make(all_sent)}, {}, "all_to_all_single"));
    }
  })),
            "");
}

// Counts are operands: what comes and how much of it is only known when it runs.
TEST_P(ExecutorTest, PiecesWhoseRowsComeAtRunTime) {
  const int64_t capacity = 4 * ranks();
  for (const bool expect : {false, true}) {
    SCOPED_TRACE(expect ? "expected rows are said" : "whatever comes");
    std::vector<Session> sessions;
    for (int rank = 0; rank < ranks(); ++rank) {
      RankBuilder b(rank, ranks());
      std::vector<std::vector<int64_t>> counts;  // the inputs behind the first
      const auto add_counts = [&](std::vector<int64_t> rows) {
        counts.push_back(std::move(rows));
        const auto size = static_cast<int64_t>(counts.back().size());
        return b.Input(TensorType(DType::kI64, {size}));
      };
      const ValueIndex x = b.Op("neg", {b.Input(F32({capacity, 3}))});
      const auto emit = [&](const char* op, Collective c, std::vector<int64_t> sends,
                            std::vector<int64_t> receives) {
        std::vector<ValueIndex> inputs;
        if (!sends.empty()) inputs.push_back(x);
        c.runtime_counts_input = static_cast<int32_t>(inputs.size());
        c.runtime_count_maximum = capacity + 1;
        if (!sends.empty()) inputs.push_back(add_counts(std::move(sends)));
        if (expect && !receives.empty()) inputs.push_back(add_counts(std::move(receives)));
        const Attributes type = inputs.empty() || b.graph().TypeOf(inputs[0]).dtype == DType::kI64
                                    ? TypeAttributes(F32({capacity + 1, 3}))
                                    : Attributes();
        for (const ValueIndex v : b.Emit(c, inputs, type, op)) AddOutput(&b, v);
      };
      std::vector<int64_t> own_rows;
      std::vector<int64_t> sent;
      std::vector<int64_t> received;
      for (int m = 0; m < ranks(); ++m) {
        own_rows.push_back(RowsBetween(m, m));
        sent.push_back(RowsBetween(rank, m));
        received.push_back(RowsBetween(m, rank));
      }
      const int64_t mine = own_rows[static_cast<size_t>(rank)];
      const int32_t root = ranks() - 1;
      emit("all_to_all_single", b.MakeCollective(CollectiveKind::kAllToAll), sent, received);
      emit("all_gather_into_tensor", b.MakeCollective(CollectiveKind::kAllGather), {mine},
           own_rows);
      emit("reduce_scatter_tensor", b.MakeCollective(CollectiveKind::kReduceScatter), own_rows,
           {mine});
      Collective greatest = b.MakeCollective(CollectiveKind::kReduceScatter);
      greatest.reduction = Reduction::kMax;
      emit("reduce_scatter_tensor", greatest, own_rows, {mine});
      Collective gather = b.MakeCollective(CollectiveKind::kGather);
      gather.root = GroupRank(root);
      emit("gather_into_tensor", gather, {mine}, rank == root ? own_rows : std::vector<int64_t>());
      Collective scatter = b.MakeCollective(CollectiveKind::kScatter);
      scatter.root = GroupRank(root);
      emit("scatter_tensor", scatter, rank == root ? own_rows : std::vector<int64_t>(), {mine});
      Session session = MakeSession(&b);
      ASSERT_EQ(session.inputs.size(), 1 + counts.size());
      for (size_t i = 0; i < counts.size(); ++i) {
        session.inputs[1 + i] =
            MakeValue<int64_t>({static_cast<int64_t>(counts[i].size())}, counts[i]);
      }
      sessions.push_back(std::move(session));
    }
    EXPECT_EQ(rig_.Check(sessions), "");
  }
}

TEST_P(ExecutorTest, EqualPiecesInListsAndSingleTensors) {
  EXPECT_EQ(rig_.Check(Sessions([&](RankBuilder* b) {
    const bool one = b->rank() % 2 == 1;
    const ValueIndex x = b->Op("neg", {b->Input(F32({2 * ranks(), 3}))});
    std::vector<ValueIndex> pieces;
    for (int m = 0; m < ranks(); ++m) pieces.push_back(b->Input(F32({2, 3})));
    const auto emit = [&](CollectiveKind kind, const char* single) {
      const Collective c = b->MakeCollective(kind);
      const std::vector<ValueIndex> results =
          one ? b->Emit(c, {x}, {}, single) : b->Emit(c, pieces);
      for (const ValueIndex v : results) AddOutput(b, v);
    };
    emit(CollectiveKind::kAllToAll, "all_to_all_single");
    emit(CollectiveKind::kReduceScatter, "reduce_scatter_tensor");
  })),
            "");
}

// Every reduction, with what backward needs of it; some ranks want no gradient.
TEST_P(ExecutorTest, EveryReductionAndItsExtras) {
  for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg, Reduction::kPremulSum,
                                    Reduction::kProduct, Reduction::kMin, Reduction::kMax}) {
    SCOPED_TRACE(ReductionName(reduction));
    EXPECT_EQ(rig_.Check(Sessions([&](RankBuilder* b) {
      const TensorType type = F32({2, 7});
      const auto emit = [&](Collective c, std::vector<ValueIndex> inputs,
                            absl::string_view op = "") {
        c.reduction = reduction;
        c.wants_grad = b->rank() != 1;
        if (reduction == Reduction::kPremulSum) inputs.push_back(b->Input(F32({})));
        for (const ValueIndex v : b->Emit(c, inputs, {}, op)) AddOutput(b, v);
      };
      const ValueIndex x = b->Input(type);
      emit(b->MakeCollective(CollectiveKind::kAllReduce), {b->Op("neg", {x})});
      Collective reduce = b->MakeCollective(CollectiveKind::kReduce);
      reduce.root = GroupRank(ranks() - 1);
      emit(reduce, {b->Op("neg", {x})});
      std::vector<ValueIndex> pieces;
      for (int m = 0; m < ranks(); ++m) pieces.push_back(b->Op("neg", {b->Input(type)}));
      emit(b->MakeCollective(CollectiveKind::kReduceScatter), pieces);
      // In one tensor, of pieces of different rows.
      Collective one = b->MakeCollective(CollectiveKind::kReduceScatter);
      int64_t rows = 0;
      for (int m = 0; m < ranks(); ++m) {
        one.counts.push_back(RowsBetween(m, m));
        rows += one.counts.back();
      }
      emit(one, {b->Op("neg", {b->Input(F32({rows, 3}))})}, "reduce_scatter_tensor");
    })),
              "");
  }
}

TEST_P(ExecutorTest, SendAndRecvRoundARing) {
  if (ranks() == 1) return;  // a ring of one has no other member to send to
  EXPECT_EQ(rig_.Check(Sessions([&](RankBuilder* b) {
    const TensorType type = F32({64});
    const ValueIndex x = b->Op("add", {b->Input(type), b->Input(type)});
    const int next = (b->rank() + 1) % b->size();
    const int previous = (b->rank() + b->size() - 1) % b->size();
    // Rank 0 sends first, the others pass on what they got.
    ValueIndex got = -1;
    if (b->rank() == 0) {
      b->Send(x, next);
      got = b->Recv(type, previous);
    } else {
      got = b->Recv(type, previous);
      b->Send(b->Op("add", {got, x}), next);
    }
    AddOutput(b, b->Op("mul", {got, x}));
    AddOutput(b, got);
  })),
            "");
}

TEST_P(ExecutorTest, OutputsThatAreInputsAliasesOrRepeated) {
  EXPECT_EQ(rig_.Check(Sessions([&](RankBuilder* b) {
    const ValueIndex x = b->Input(F32({2, 6}));
    b->Input(F32({5}));  // unused
    const Attributes flat = {{"dims", std::vector<int64_t>{12}}};
    AddOutput(b, x);
    AddOutput(b, b->Op("reshape", {x}, flat));
    const ValueIndex y = b->Op("neg", {x});
    const ValueIndex z = b->Op("reshape", {y}, flat);
    AddOutput(b, z);
    AddOutput(b, z);
    AddOutput(b, y);
    const ValueIndex w = b->AllReduce(z);
    AddOutput(b, w);
    AddOutput(b, w);
    b->Op("add", {w, z});  // it is not read
  })),
            "");
}

// The same program on all ranks: local ops and collectives on whatever there is so far.
void BuildRandom(RankBuilder* b, uint64_t seed, int nodes) {
  std::mt19937_64 random(seed);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const std::vector<TensorType> types = {F32({40}), F32({3}), F32({129})};
  std::vector<std::vector<ValueIndex>> values(types.size());
  for (size_t t = 0; t < types.size(); ++t) {
    values[t].push_back(b->Input(types[t]));
    values[t].push_back(b->Input(types[t]));
  }
  for (int n = 0; n < nodes; ++n) {
    const size_t t = below(types.size());
    const auto pick = [&] {
      // Mostly recent values, so that older ones die and their memory is used again.
      const size_t back = std::min<size_t>(values[t].size(), 1 + below(4));
      return values[t][values[t].size() - back];
    };
    const int root = static_cast<int>(below(static_cast<size_t>(b->size())));
    switch (below(12)) {
      case 0:
        values[t].push_back(b->AllReduce(pick()));
        break;
      case 1: {
        const ValueIndex v = pick();
        values[t].push_back(b->Broadcast(b->rank() == root ? v : ValueIndex(), types[t], root));
        break;
      }
      case 2: {
        const std::vector<ValueIndex> all = b->AllGather(pick());
        values[t].push_back(all[below(all.size())]);
        values[t].push_back(all[below(all.size())]);
        break;
      }
      case 3: {
        std::vector<ValueIndex> chunks;
        for (int i = 0; i < b->size(); ++i) chunks.push_back(pick());
        values[t].push_back(b->ReduceScatter(chunks));
        break;
      }
      case 4: {
        const ValueIndex v = pick();
        const std::vector<ValueIndex> reduced = b->Reduce(v, root);
        values[t].push_back(reduced.empty() ? v : reduced[0]);
        break;
      }
      case 5:
      case 6:
        values[t].push_back(b->Op("relu", {pick()}));
        break;
      case 7:
        values[t].push_back(b->Op("neg", {pick()}));
        break;
      default: {
        const ValueIndex a = pick();
        values[t].push_back(b->Op("add", {a, pick()}));
        break;
      }
    }
  }
  for (const auto& of_type : values) {
    for (size_t i = 0; i < of_type.size(); ++i) {
      if (i + 1 == of_type.size() || below(8) == 0) AddOutput(b, of_type[i]);
    }
  }
}

TEST_P(ExecutorTest, RandomProgramsGiveWhatTheReferenceGives) {
  for (int round = 0; round < 12; ++round) {
    const uint64_t seed = random_();
    EXPECT_EQ(rig_.Check(Sessions([&](RankBuilder* b) { BuildRandom(b, seed, 60); })), "")
        << "program " << seed;
  }
}

TEST_P(ExecutorTest, SessionsMayBeLaunchedInAnyOrder) {
  std::vector<int> order;
  for (int r = 0; r < ranks(); ++r) order.push_back(r);
  for (int round = 0; round < 4; ++round) {
    std::shuffle(order.begin(), order.end(), random_);
    rig_.set_launch_order(order);
    const uint64_t seed = random_();
    EXPECT_EQ(rig_.Check(Sessions([&](RankBuilder* b) { BuildRandom(b, seed, 30); })), "")
        << "program " << seed;
  }
}

// Gangs follow each other without a wait on the host: `after` alone orders them.
TEST_P(ExecutorTest, LaunchesReadWhatEarlierOnesWriteLater) {
  const auto build = [](RankBuilder* b) {
    const ValueIndex x = b->Input(F32({500}));
    AddOutput(b, b->AllReduce(b->Op("relu", {x})));
    AddOutput(b, b->Op("neg", {x}));
  };
  const auto local = [](RankBuilder* b) {
    const ValueIndex x = b->Input(F32({500}));
    AddOutput(b, b->Op("add", {x, b->Input(F32({500}))}));
  };
  const auto eager = [](RankBuilder* b) { AddOutput(b, b->AllReduce(b->Input(F32({500})))); };
  std::vector<Session> first = Sessions(build);
  std::vector<Session> second = Sessions(local);
  std::vector<Session> third = Sessions(eager);
  std::vector<Session> fourth = Sessions(eager);
  std::vector<Session> fifth = Sessions(local);
  const auto a = rig_.Prepare(first);
  for (int r = 0; r < ranks(); ++r) {
    second[static_cast<size_t>(r)].inputs = {{a.get(), r, 0}, {a.get(), r, 1}};
  }
  const auto b = rig_.Prepare(second);
  for (int r = 0; r < ranks(); ++r) third[static_cast<size_t>(r)].inputs = {{b.get(), r, 0}};
  const auto c = rig_.Prepare(third);
  for (int r = 0; r < ranks(); ++r) fourth[static_cast<size_t>(r)].inputs = {{c.get(), r, 0}};
  const auto d = rig_.Prepare(fourth);
  for (int r = 0; r < ranks(); ++r) {
    fifth[static_cast<size_t>(r)].inputs = {{d.get(), r, 0}, {b.get(), r, 0}};
  }
  const auto e = rig_.Prepare(fifth);
  for (const auto* result : {&a, &b, &c, &d, &e}) rig_.Start(**result);
  for (const auto* result : {&a, &b, &c, &d, &e}) ASSERT_TRUE(rig_.Wait(**result).ok());
  EXPECT_EQ(rig_.Differences(first, *a), "");
  EXPECT_EQ(rig_.Differences(second, *b), "");
  EXPECT_EQ(rig_.Differences(third, *c), "");
  EXPECT_EQ(rig_.Differences(fourth, *d), "");
  EXPECT_EQ(rig_.Differences(fifth, *e), "");
}

// Uploads and downloads have a stream of their own: they do not wait for a plan's work that waits
// for another rank.
TEST_P(ExecutorTest, CopiesGoOnBesideWorkThatWaits) {
  if (ranks() == 1) return;  // nothing waits for another rank
  const std::vector<Session> sessions = Sessions([&](RankBuilder* b) {
    const ValueIndex sum = b->AllReduce(b->Input(F32({8})));
    AddOutput(b, b->Op("neg", {sum}));
  });
  const auto result = rig_.Prepare(sessions);
  ASSERT_TRUE(result->status.ok()) << result->status;
  const auto launch = [&](size_t i) {
    rig_.Send(result->messages[i].first, result->messages[i].second);
  };
  launch(0);
  const int device = result->messages[0].first;
  const DeviceAddress address = rig_.Allocate(device, 4);
  ASSERT_TRUE(rig_.Upload(device, address, "abcd").ok());
  EXPECT_EQ(rig_.Download(device, address, 4), "abcd");
  for (size_t i = 1; i < result->messages.size(); ++i) launch(i);
  EXPECT_TRUE(rig_.Wait(*result).ok());
  EXPECT_EQ(rig_.Differences(sessions, *result), "");
}

// On both streams what needs them waits for them.
// What stands in one lane, work and copies, is nothing to another.
TEST_P(ExecutorTest, LanesDoNotWaitForEachOther) {
  if (ranks() == 1) return;  // nothing waits for another rank
  const auto graphs = [this] {
    return Sessions([&](RankBuilder* b) {
      const ValueIndex x = b->Input(F32({8}));
      AddOutput(b, b->Op("neg", {b->AllReduce(b->Op("add", {x, x}))}));
    });
  };
  const std::vector<Session> held_sessions = graphs();
  const std::vector<Session> sessions = graphs();
  const auto held = rig_.Prepare(held_sessions);
  ASSERT_TRUE(held->status.ok()) << held->status;
  const auto launch = [&](size_t i) {
    rig_.Send(held->messages[i].first, held->messages[i].second);
  };
  launch(0);
  const int device = held->messages[0].first;
  // Behind it, for it reads what that makes: the lane's copies stand still.
  std::string late(4, '\0');
  rig_.executor(device)->Download(TransferId(1'000'000), /*lane=*/0, &late[0],
                                  rig_.Allocate(device, 4), 4, held->messages[0].second.launch);
  for (const int32_t lane : {1, kMaxLanes - 1}) {
    rig_.set_lane(lane);
    const auto result = rig_.Launch(sessions);
    EXPECT_TRUE(rig_.Wait(*result).ok()) << lane;
    EXPECT_EQ(rig_.Differences(sessions, *result), "") << lane;
  }
  for (size_t i = 1; i < held->messages.size(); ++i) launch(i);
  EXPECT_TRUE(rig_.Wait(*held).ok());
  EXPECT_EQ(rig_.Differences(held_sessions, *held), "");
}

// Several programs at once, each in its lane.
TEST_P(ExecutorTest, RandomProgramsInLanesGiveWhatTheReferenceGives) {
  for (int round = 0; round < 4; ++round) {
    std::vector<std::vector<Session>> programs;
    std::vector<std::unique_ptr<GangRig::Result>> results;
    for (const int32_t lane : {0, 1, 2}) {
      rig_.set_lane(lane);
      const uint64_t seed = random_();
      programs.push_back(Sessions([&](RankBuilder* b) { BuildRandom(b, seed, 30); }));
      results.push_back(rig_.Prepare(programs.back()));
      ASSERT_TRUE(results.back()->status.ok()) << results.back()->status;
    }
    for (const auto& result : results) rig_.Start(*result);
    for (size_t i = 0; i < results.size(); ++i) {
      rig_.set_lane(static_cast<int32_t>(i));
      EXPECT_TRUE(rig_.Wait(*results[i]).ok());
      EXPECT_EQ(rig_.Differences(programs[i], *results[i]), "") << "lane " << i;
    }
  }
}

TEST_P(ExecutorTest, BytesMayComeWithTheLaunch) {
  for (int round = 0; round < 20; ++round) {
    const std::vector<Session> sessions = Sessions([&](RankBuilder* b) {
      const ValueIndex x = b->Input(F32({12}));
      const ValueIndex y = b->Input(F32({16}));
      if (round % 3 != 0) AddOutput(b, b->AllReduce(y));
      if (round % 3 != 1) AddOutput(b, b->Op("neg", {x}));
    });
    const auto result = rig_.Prepare(sessions);
    ASSERT_TRUE(result->status.ok()) << result->status;
    // Other bytes stand there before.
    for (size_t s = 0; s < sessions.size(); ++s) {
      const auto& [device, prepared] = result->messages[s];
      LaunchMessage message = prepared;
      for (const int32_t input : {0, 1}) {
        const std::string& bytes = sessions[s].inputs[static_cast<size_t>(input)].value->bytes;
        const DeviceAddress address = message.buffers[static_cast<size_t>(input)];
        ASSERT_TRUE(rig_.Upload(device, address, std::string(bytes.size(), '\x55')).ok());
        message.inlines.push_back({input, {bytes.begin(), bytes.end()}});
      }
      rig_.Send(device, message);
    }
    ASSERT_TRUE(rig_.Wait(*result).ok());
    ASSERT_EQ(rig_.Differences(sessions, *result), "");
  }
}

TEST_P(ExecutorTest, BytesForABufferThatThePlanDoesNotHaveAreRefused) {
  const std::vector<Session> sessions =
      Sessions([&](RankBuilder* b) { AddOutput(b, b->Op("neg", {b->Input(F32({1}))})); });
  const auto result = rig_.Prepare(sessions);
  ASSERT_TRUE(result->status.ok()) << result->status;
  const auto& [device, prepared] = result->messages[0];
  for (const int32_t buffer : {-1, static_cast<int32_t>(prepared.buffers.size())}) {
    LaunchMessage message = prepared;
    message.launch = rig_.NextLaunch();
    message.inlines = {{buffer, {'a', 'b', 'c', 'd'}}};
    rig_.Send(device, message);
    const CompletionMessage completion = rig_.CompletionOf(message.launch);
    EXPECT_EQ(completion.status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(completion.held_back);
  }
}

TEST_P(ExecutorTest, RanksMayAgreeOnAnotherOrderThanTheirPrograms) {
  // Rank 0 writes its collectives the other way round; all run them as rank 0 does.
  std::vector<Session> sessions;
  for (int r = 0; r < ranks(); ++r) {
    GroupSlot slot;
    slot.size = ranks();
    slot.held = {GroupRank(r)};
    slot.device_slots = {0};
    RankBuilder b(r, ranks());
    b.graph().AddGroupSlot(slot);
    const ValueIndex x = b.Input(F32({65}));
    const ValueIndex y = b.Input(F32({9}));
    const auto in_group = [&](int32_t group, ValueIndex v) {
      Collective c = b.MakeCollective(CollectiveKind::kAllReduce);
      c.group_slot = group;
      return b.Emit(c, {v})[0];
    };
    ValueIndex first = -1;
    ValueIndex second = -1;
    if (r == 0) {
      second = in_group(1, b.Op("neg", {y}));
      first = in_group(0, b.Op("relu", {x}));
    } else {
      first = in_group(0, b.Op("relu", {x}));
      // Between them, on the compute stream, what needs the one and what the other needs.
      AddOutput(&b, b.Op("add", {first, x}));
      second = in_group(1, b.Op("neg", {y}));
    }
    AddOutput(&b, first);
    AddOutput(&b, b.Op("mul", {second, y}));
    sessions.push_back(MakeSession(&b));
    sessions.back().groups = {0, 1};
    if (r != 0) sessions.back().order = {1, 0};
  }
  EXPECT_EQ(rig_.Check(sessions), "");
}

TEST_P(ExecutorTest, AbsentMembersOfAGradientGiveZeros) {
  if (ranks() < 3) return;
  // The gradients of an all_gather, an all_reduce, a broadcast from 0 and a reduce to 0; the last
  // rank and rank 0 take part in some of them only.
  std::vector<Session> sessions;
  for (int r = 0; r < ranks(); ++r) {
    RankBuilder b(r, ranks());
    const TensorType type = F32({23});
    const ValueIndex x = b.Input(type);
    int slots = 0;
    const auto bound = [&](CollectiveKind kind) {
      Collective c = b.MakeCollective(kind);
      c.instance.kind = InstanceRef::Kind::kBound;
      c.instance.slot = slots++;
      return c;
    };
    Session session;
    const ValueIndex doubled = b.Op("add", {x, x});
    if (r != ranks() - 1) {
      AddOutput(&b, b.Emit(bound(CollectiveKind::kAllReduce), {doubled})[0]);
      for (const ValueIndex v : b.Emit(bound(CollectiveKind::kAllGather), {doubled})) {
        AddOutput(&b, v);
        AddOutput(&b, b.Op("add", {v, x}));
      }
      session.instances = {"all_reduce", "all_gather"};
    }
    if (r != 0) {
      Collective broadcast = bound(CollectiveKind::kBroadcast);
      broadcast.root = GroupRank(0);
      AddOutput(&b, b.Op("add", {b.Emit(broadcast, {}, TypeAttributes(type))[0], x}));
      session.instances.push_back("broadcast");
    }
    const std::vector<std::string> instances = session.instances;
    session = MakeSession(&b);
    session.graph.num_instance_slots = slots;
    session.instances = instances;
    sessions.push_back(std::move(session));
  }
  EXPECT_EQ(rig_.Check(sessions), "");
}

TEST_P(ExecutorTest, ValuesCrossDeviceSlotsByCopies) {
  if (ranks() < 2) return;
  const TensorType type = F32({77});
  RankBuilder b(0, 1, 2);
  const ValueIndex x = b.Input(type, 0);
  const ValueIndex y = b.Input(type, 1);
  const ValueIndex doubled = b.Op("add", {x, x});
  const ValueIndex there = b.Op("copy", {doubled}, {}, 1);
  const ValueIndex used = b.Op("mul", {there, y}, {}, 1);
  const ValueIndex back = b.Op("copy", {used}, {}, 0);
  AddOutput(&b, b.Op("add", {back, x}));
  AddOutput(&b, there);
  AddOutput(&b, b.Op("copy", {x}, {}, 1));
  AddOutput(&b, b.Op("copy", {x}, {}, 0));
  for (int i = 0; i < 3; ++i) {
    Session session = MakeSession(&b);
    session.devices = {1, 0};
    EXPECT_EQ(rig_.Check({session}), "");
  }
}

// An optimiser's step in place: parameter and momentum take over their memory.
TEST_P(ExecutorTest, OutputsTakeOverDonatedInputs) {
  RankBuilder b(0, 1);
  const TensorType type = F32({300});
  std::vector<ValueIndex> state;
  for (int i = 0; i < 2; ++i) state.push_back(AddState(&b, type));
  const ValueIndex gradient = b.Input(type);
  const ValueIndex momentum = b.Op("add", {state[1], gradient});
  const ValueIndex parameter = b.Op("add", {state[0], b.Op("neg", {momentum})});
  AddOutput(&b, parameter, /*may_alias=*/0);
  AddOutput(&b, momentum, /*may_alias=*/1);
  const std::vector<Session> sessions = {MakeSession(&b)};
  rig_.set_donate(true);
  const auto result = rig_.Launch(sessions);
  ASSERT_TRUE(rig_.Wait(*result).ok());
  EXPECT_EQ(rig_.Differences(sessions, *result), "");
  const GangRig::Result::OnSession& on = result->sessions[0];
  for (const int i : {0, 1}) {
    EXPECT_EQ(on.plan.outputs[static_cast<size_t>(i)].donor, i);
    EXPECT_EQ(on.addresses[static_cast<size_t>(i)],
              on.addresses[static_cast<size_t>(on.plan.outputs[static_cast<size_t>(i)].buffer)]);
  }
}

// "neg", which must not fail, and "div", which of integers may, fail; other ops are the
// reference's.
class FailingKernel : public HostKernel {
 public:
  FailingKernel() : HostKernel(1, 1) {}
  absl::Status Run(const HostBuffers&, int64_t, int64_t) const override {
    return BadType("it fails");
  }
};

HostKernelOrError MakeFailingKernel(const NodeView& node, absl::Span<const TensorType> outputs) {
  if (node.op != "neg" && node.op != "div") return MakeReferenceKernel(node, outputs);
  return std::unique_ptr<HostKernel>(std::make_unique<FailingKernel>());
}

// A launch pays for holding back only where something may fail: a kernel of its own, or a launch
// whose results it reads. What happens where nothing may fail and something does shows which it is.
TEST(HoldBackTest, IsForLaunchesInWhichSomethingMayFail) {
  HostBackendOptions options;
  options.devices = 1;
  options.pool = Pool();
  options.make_kernel = &MakeFailingKernel;
  GangRig rig(CreateHostBackend(options));
  rig.set_donate(true);
  const TensorType type(DType::kI64, {300});
  const Value twos = FromDoubles(type, std::vector<double>(300, 2));
  // p' = p + op(x, x), where p' may stand where p does; then what became of it.
  const auto launch = [&](const std::string& op, size_t operands, const GangRig::Source& x,
                          CompletionMessage* completion, bool overwrites = true) {
    RankBuilder b(0, 1);
    const ValueIndex p = AddState(&b, type);
    const std::vector<ValueIndex> all(operands, b.Input(type));
    AddOutput(&b, b.Op("add", {p, b.Op(op, all)}), /*may_alias=*/overwrites ? 0 : -1);
    Session session;
    session.graph = b.graph().Build();
    session.devices = {0};
    session.groups = {0};
    session.inputs = {twos, x};
    std::unique_ptr<GangRig::Result> result = rig.Launch({session});
    EXPECT_TRUE(result->status.ok()) << result->status;
    EXPECT_EQ(result->sessions[0].plan.outputs[0].donor, overwrites ? 0 : -1);
    *completion = rig.CompletionOf(result->sessions[0].launches[0]);
    return result;
  };
  CompletionMessage completion;
  launch("neg", 1, twos, &completion);
  EXPECT_EQ(ErrorOf(completion.status).reason, Reason::kInternal) << completion.status;
  EXPECT_FALSE(completion.held_back);
  const auto failed = launch("div", 2, twos, &completion);
  EXPECT_EQ(ErrorOf(completion.status).reason, Reason::kBadType) << completion.status;
  EXPECT_TRUE(completion.held_back);
  EXPECT_EQ(rig.Output(*failed, 0, 0), twos);  // the input stands there as it was
  const auto behind = launch("mul", 2, {failed.get(), 0, 0}, &completion);
  EXPECT_EQ(ErrorOf(completion.status).reason, Reason::kExecFailed) << completion.status;
  EXPECT_TRUE(completion.held_back);
  launch("mul", 2, {behind.get(), 0, 0}, &completion);
  EXPECT_TRUE(completion.held_back);
  // What has nothing to hold back fails with what it reads, too, for those that read its results.
  const auto between = launch("mul", 2, {failed.get(), 0, 0}, &completion, /*overwrites=*/false);
  EXPECT_EQ(ErrorOf(completion.status).reason, Reason::kExecFailed) << completion.status;
  launch("mul", 2, {between.get(), 0, 0}, &completion);
  EXPECT_TRUE(completion.held_back);
  const auto sound = launch("mul", 2, twos, &completion);
  EXPECT_TRUE(completion.status.ok()) << completion.status;
  launch("neg", 1, {sound.get(), 0, 0}, &completion);
  EXPECT_FALSE(completion.held_back);
  // What nobody asks for is forgotten.
  rig.executor(0)->Settled(failed->sessions[0].launches[0]);
  const auto forgiven = launch("mul", 2, {failed.get(), 0, 0}, &completion);
  EXPECT_TRUE(completion.status.ok()) << completion.status;
  // What somebody may ask for is not, however many of others fail meanwhile, and they are not all
  // that has been before.
  const auto second = launch("div", 2, twos, &completion);
  for (int i = 0; i < 2000; ++i) {
    LaunchMessage unknown;
    unknown.launch = rig.NextLaunch();
    unknown.plan = PlanId(77);
    rig.Send(0, unknown);
    ASSERT_EQ(rig.WaitFor(unknown.launch).code(), absl::StatusCode::kNotFound);
  }
  launch("mul", 2, {forgiven.get(), 0, 0}, &completion);
  EXPECT_TRUE(completion.status.ok()) << completion.status;
  launch("mul", 2, {second.get(), 0, 0}, &completion);
  EXPECT_EQ(ErrorOf(completion.status).reason, Reason::kExecFailed) << completion.status;
}

// The thread that learns what the GPU has done finds all of it at once, as it does after a long
// callback: a launch that would overwrite what was donated to it asks for failures behind the
// collective that the failed launch ends with, not before.
TEST(HoldBackTest, OnAGpuAFailureIsKnownBeforeWhoeverReadsTheResultAsks) {
  GangRig rig(OpenCuda(1, Seed()));
  rig.set_donate(true);
  const TensorType type(DType::kI64, {300});
  const auto values = [&](double value) {
    return FromDoubles(type, std::vector<double>(300, value));
  };
  const auto session = [](RankBuilder* b, std::vector<GangRig::Source> inputs) {
    Session made;
    made.graph = b->graph().Build();
    made.devices = {0};
    made.groups = {0};
    made.inputs = std::move(inputs);
    return made;
  };
  RankBuilder divides(0, 1);
  const ValueIndex dividend = divides.Input(type);
  AddOutput(&divides, divides.Op("div", {dividend, divides.Input(type)}));
  AddOutput(&divides, divides.AllReduce(dividend));
  const auto failed = rig.Prepare({session(&divides, {values(2), values(0)})});
  ASSERT_TRUE(failed->status.ok()) << failed->status;
  RankBuilder overwrites(0, 1);
  const ValueIndex state = AddState(&overwrites, type);
  const ValueIndex sum = overwrites.Input(type);
  AddOutput(&overwrites, overwrites.Op("add", {state, sum}), /*may_alias=*/0);
  const auto behind = rig.Prepare({session(&overwrites, {values(5), {failed.get(), 0, 1}})});
  ASSERT_TRUE(behind->status.ok()) << behind->status;
  ASSERT_EQ(behind->sessions[0].plan.outputs[0].donor, 0);

  const auto stream = rig.backend()->device(0)->CreateStream();
  std::promise<void> held;
  std::promise<void> released;
  stream->Callback([&](const absl::Status&) {
    held.set_value();
    released.get_future().get();
  });
  held.get_future().get();
  rig.Start(*failed);
  rig.Start(*behind);
  AwaitTestGpu();
  released.set_value();
  EXPECT_FALSE(rig.Wait(*failed).ok());
  const CompletionMessage completion = rig.CompletionOf(behind->sessions[0].launches[0]);
  EXPECT_TRUE(completion.held_back);
  EXPECT_EQ(ErrorOf(completion.status).reason, Reason::kExecFailed) << completion.status;
  EXPECT_EQ(rig.Output(*behind, 0, 0), values(5)) << "what was donated is kept";
}

TEST_P(ExecutorTest, OneSessionMayHoldAllRanks) {
  GroupSlot slot;
  slot.size = ranks();
  for (int r = 0; r < ranks(); ++r) {
    slot.held.emplace_back(r);
    slot.device_slots.push_back(r);
  }
  GraphBuilder b(ranks(), {slot});
  Session session;
  session.groups = {0};
  std::vector<ValueIndex> sums;
  for (int r = 0; r < ranks(); ++r) {
    GraphInput input;
    input.type = F32({31});
    input.device_slot = r;
    const ValueIndex x = b.AddInput(input);
    NodeSpec spec;
    spec.op = "add";
    spec.inputs = {x, x};
    spec.device_slot = r;
    const ValueIndex doubled = (*b.Emit(spec))[0];
    NodeSpec reduce;
    reduce.op = "all_reduce";
    reduce.inputs = {doubled};
    reduce.device_slot = r;
    reduce.collective = Collective();
    reduce.collective->kind = CollectiveKind::kAllReduce;
    reduce.collective->rank = GroupRank(r);
    reduce.collective->reduction = Reduction::kSum;
    const auto reduced = b.Emit(reduce);
    ASSERT_TRUE(reduced.ok()) << reduced.status();
    GraphOutput output;
    output.value = (*reduced)[0];
    b.AddOutput(output);
    session.devices.push_back(ranks() - 1 - r);
  }
  session.graph = b.Build();
  for (const GraphInput& input : session.graph.inputs) {
    session.inputs.push_back(RandomWhole(input.type, -3, 3, &random_));
  }
  EXPECT_EQ(rig_.Check({session}), "");
}

// --- Waits ---

// Takes the `n`-th wait out of a device plan, with its record; false when there are fewer.
bool DropWait(DevicePlan* plan, int n) {
  for (size_t i = 0; i < plan->steps.size(); ++i) {
    if (plan->steps[i].wait < 0 || n-- > 0) continue;
    for (size_t k = i; k-- > 0;) {
      if (plan->steps[k].record != plan->steps[i].wait) continue;
      plan->steps[k].record = -1;
      break;
    }
    plan->steps[i].wait = -1;
    return true;
  }
  return false;
}

// sim shows what a missing wait does: each one of this plan turns some seed's results wrong.
TEST(WaitTest, EveryWaitIsMissedOnSim) {
  constexpr int kRanks = 2;
  constexpr int kSeeds = 60;
  std::mt19937_64 random(Seed());
  std::vector<Session> sessions;
  for (int r = 0; r < kRanks; ++r) {
    RankBuilder b(r, kRanks);
    const ValueIndex x = b.Input(F32({50}));
    const ValueIndex sum = b.AllReduce(b.Op("relu", {x}));
    const ValueIndex scatter = b.ReduceScatter({b.Op("add", {sum, x}), b.Op("mul", {sum, x})});
    AddOutput(&b, b.Op("neg", {scatter}));
    Session session;
    session.graph = b.graph().Build();
    session.devices = {r};
    session.groups = {0};
    session.inputs.push_back(RandomWhole(F32({50}), 1, 9, &random));
    sessions.push_back(std::move(session));
  }
  int waits = 0;
  for (bool dropped = true; dropped; ++waits) {
    int seeds = 0;
    bool wrong = false;
    for (; seeds < kSeeds && dropped && !wrong; ++seeds) {
      GangRig rig(OpenSim(kRanks, Seed()));
      rig.set_mutate([&](DevicePlan* plan) { dropped = DropWait(plan, waits); });
      const std::string differences = rig.Check(sessions);
      wrong = dropped && !differences.empty();
    }
    if (!dropped) break;
    EXPECT_TRUE(wrong) << "wait " << waits << " is not missed in " << seeds << " seeds";
  }
  EXPECT_EQ(waits, 4);
}

// --- Plans ---

std::string NegatedTimes(const GangRig& rig, int times) {
  RankBuilder b(0, 1);
  ValueIndex value = b.Input(F32({4}));
  for (int i = 0; i < times; ++i) value = b.Op("neg", {value});
  AddOutput(&b, value);
  return CompilePlan(b.graph().Build(), rig.Options())->device_plans[0];
}

TEST_P(ExecutorTest, PlansAreLoadedOnOtherThreadsBesideTheWork) {
  Executor& executor = *rig_.executor(0);
  const std::string plan = NegatedTimes(rig_, 20);
  constexpr uint64_t kPlans = 50;
  const auto load = [&](uint64_t first) {
    for (uint64_t i = 0; i < kPlans; ++i) {
      EXPECT_TRUE(rig_.LoadPlan(0, PlanId(first + i), plan).ok());
    }
  };
  std::thread one(load, 1000);
  std::thread other(load, 2000);
  for (int i = 0; i < 20; ++i) {
    RankBuilder b(0, 1);
    AddOutput(&b, b.Op("neg", {b.Input(F32({3}))}));
    EXPECT_EQ(rig_.Check({MakeSession(&b)}), "");
  }
  one.join();
  other.join();
  EXPECT_EQ(rig_.LoadPlan(0, PlanId(2000), plan).code(), absl::StatusCode::kInvalidArgument);
  // Known, though not with these buffers.
  for (const uint64_t id : {1000 + kPlans - 1, 2000 + kPlans - 1}) {
    LaunchMessage message;
    message.launch = rig_.NextLaunch();
    message.plan = PlanId(id);
    rig_.Send(0, message);
    EXPECT_EQ(rig_.WaitFor(message.launch).code(), absl::StatusCode::kInvalidArgument);
    executor.UnloadPlan(PlanId(id));
    EXPECT_TRUE(rig_.LoadPlan(0, PlanId(id), plan).ok()) << "the id is free again";
  }
}

TEST_P(ExecutorTest, WhatIsLeftOfAPlanIsTheCallers) {
  Executor& executor = *rig_.executor(0);
  const std::string plan = NegatedTimes(rig_, 20);
  ASSERT_TRUE(rig_.LoadPlan(0, PlanId(1000), plan).ok());
  std::shared_ptr<void> left = executor.UnloadPlan(PlanId(1000));
  EXPECT_NE(left, nullptr);
  EXPECT_EQ(left.use_count(), 1);
  EXPECT_EQ(executor.UnloadPlan(PlanId(1000)), nullptr);
  EXPECT_TRUE(rig_.LoadPlan(0, PlanId(1000), plan).ok()) << "the id is free again";
}

// --- Slices ---

TEST_P(ExecutorTest, ALargeLaunchIsEnqueuedInSlicesAndWhatComesBehindWaits) {
  constexpr int kSteps = 7;
  RankBuilder b(0, 1);
  ValueIndex value = b.Input(F32({4}));
  for (int i = 0; i < kSteps; ++i) value = b.Op("neg", {value});
  AddOutput(&b, value);
  const auto plan = CompilePlan(b.graph().Build(), rig_.Options());
  ASSERT_TRUE(plan.ok()) << plan.status();
  Executor& executor = *rig_.executor(0);
  ASSERT_TRUE(rig_.LoadPlan(0, PlanId(1000), plan->device_plans[0]).ok());
  const std::vector<float> ones = {1, 1, 1, 1};
  const std::string in(reinterpret_cast<const char*>(ones.data()), 16);
  LaunchMessage messages[3];
  bool unfinished = false;
  for (LaunchMessage& message : messages) {
    message.launch = rig_.NextLaunch();
    message.plan = PlanId(&message == &messages[2] ? 1001 : 1000);  // the last one's is unknown
    for (const BufferSpec& spec : plan->buffers) {
      message.buffers.push_back(rig_.Allocate(0, std::max<int64_t>(spec.bytes, 16)));
      if (spec.kind == BufferSpec::Kind::kInput) {
        ASSERT_TRUE(rig_.Upload(0, message.buffers.back(), in).ok());
      }
    }
  }
  for (int i = 0; i < 3; ++i) {
    unfinished = rig_.Send(0, messages[i]);
    EXPECT_TRUE(unfinished);
  }
  int slices = 1;
  while (unfinished) {
    unfinished = executor.Continue();
    ++slices;
  }
  EXPECT_GE(slices, 2 * kSteps / 2);
  EXPECT_FALSE(executor.Continue());
  for (const LaunchMessage& message : {messages[0], messages[1]}) {
    ASSERT_TRUE(rig_.WaitFor(message.launch).ok());
    const Plan::Output& output = plan->outputs[0];
    const std::string out = rig_.Download(0,
                                          message.buffers[static_cast<size_t>(output.buffer)] +
                                              static_cast<DeviceAddress>(output.offset),
                                          16, message.launch);
    float first = 0;
    std::memcpy(&first, out.data(), sizeof(first));
    EXPECT_EQ(first, -1);
  }
  EXPECT_EQ(rig_.WaitFor(messages[2].launch).code(), absl::StatusCode::kNotFound);
}

// Nor is it behind a large launch of another lane that it is enqueued.
TEST_P(ExecutorTest, LanesTakeTurnsToBeEnqueued) {
  constexpr int kSteps = 100;
  constexpr int kFewSteps = 7;
  const auto prepare = [&](int32_t lane, int steps) {
    RankBuilder b(0, 1);
    ValueIndex value = b.Input(F32({4}));
    for (int i = 0; i < steps; ++i) value = b.Op("neg", {value});
    AddOutput(&b, value);
    rig_.set_lane(lane);
    return rig_.Prepare({MakeSession(&b)});
  };
  Executor& executor = *rig_.executor(0);
  const auto launch = [&](const GangRig::Result& result) {
    return rig_.Send(0, result.messages[0].second);
  };
  const auto launch_of = [](const GangRig::Result& result) {
    return result.messages[0].second.launch;
  };
  const auto large = prepare(0, kSteps);
  const auto behind = prepare(0, 1);
  const auto small = prepare(1, 1);
  const auto other = prepare(2, kFewSteps);
  EXPECT_TRUE(launch(*large));
  EXPECT_TRUE(launch(*behind));
  EXPECT_TRUE(launch(*small)) << "the first one has more";
  EXPECT_TRUE(rig_.CompletionOf(launch_of(*small), /*enqueue=*/false).status.ok());
  // Of two that have more each has every second turn. What ends at once comes behind the other.
  EXPECT_TRUE(launch(*other));
  LaunchMessage unknown;
  unknown.launch = rig_.NextLaunch();
  unknown.lane = 2;
  EXPECT_TRUE(rig_.Send(0, unknown));
  for (int turns = 0; !rig_.HasCompleted(unknown.launch); ++turns) {
    ASSERT_LE(turns, 2 * (kFewSteps + 1)) << "a turn is a step at least";
    EXPECT_TRUE(executor.Continue()) << "the large one has more";
  }
  for (const auto* result : {large.get(), behind.get(), other.get()}) {
    EXPECT_TRUE(rig_.CompletionOf(launch_of(*result)).status.ok());
  }
}

// --- Failures ---

class ExecutorFailureTest : public ExecutorTest {
 protected:
  absl::Status LaunchBytes(const LaunchMessage& message) {
    rig_.Send(0, message);
    return rig_.WaitFor(message.launch);
  }

  Plan CompileEager() {
    RankBuilder b(0, ranks());
    AddOutput(&b, b.Op("neg", {b.AllReduce(b.Input(F32({4})))}));
    auto plan = CompilePlan(b.graph().Build(), rig_.Options());
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }
  LaunchMessage MessageFor(const Plan& plan) {
    LaunchMessage message;
    message.launch = rig_.NextLaunch();
    message.plan = PlanId(1000);
    for (const BufferSpec& spec : plan.buffers) {
      message.buffers.push_back(rig_.Allocate(0, spec.bytes));
    }
    std::vector<int> devices;
    for (int r = 0; r < ranks(); ++r) devices.push_back(r);
    message.collectives.emplace_back();
    message.collectives.back().communicator = rig_.CommunicatorOf(devices);
    return message;
  }
  // Of an all_reduce, where the launch on device 1 is not as it should be.
  void ExpectAllRefused(const std::function<void(LaunchMessage*)>& spoil, absl::string_view why) {
    if (ranks() < 2) return;
    const auto gang = rig_.Prepare(
        Sessions([](RankBuilder* b) { AddOutput(b, b->AllReduce(b->Input(F32({4})))); }));
    ASSERT_TRUE(gang->status.ok()) << gang->status;
    for (auto [device, message] : gang->messages) {
      if (device == 1) spoil(&message);
      rig_.Send(device, message);
    }
    for (const auto& launched : gang->messages) {
      const absl::Status status = rig_.WaitFor(launched.second.launch);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), why)) << status;
    }
  }
};

TEST_P(ExecutorFailureTest, LaunchesThatNameUnknownThingsCompleteWithAnError) {
  const Plan plan = CompileEager();
  LaunchMessage message = MessageFor(plan);
  EXPECT_EQ(LaunchBytes(message).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(rig_.LoadPlan(0, PlanId(1000), plan.device_plans[0]).ok());
  EXPECT_EQ(rig_.LoadPlan(0, PlanId(1000), plan.device_plans[0]).code(),
            absl::StatusCode::kInvalidArgument);
  message.launch = rig_.NextLaunch();
  message.buffers.pop_back();
  EXPECT_EQ(LaunchBytes(message).code(), absl::StatusCode::kInvalidArgument);
  message = MessageFor(plan);
  message.collectives[0].communicator = CommunicatorId(77);
  EXPECT_EQ(LaunchBytes(message).code(), absl::StatusCode::kNotFound);
  message = MessageFor(plan);
  message.collectives[0].communicator = CommunicatorId();
  EXPECT_EQ(LaunchBytes(message).code(), absl::StatusCode::kInvalidArgument);
  message = MessageFor(plan);
  message.collectives.clear();
  EXPECT_EQ(LaunchBytes(message).code(), absl::StatusCode::kInvalidArgument);
  for (const int32_t group : {-1, 0}) {
    message = MessageFor(plan);
    message.left_out = {group};
    EXPECT_EQ(LaunchBytes(message).code(), absl::StatusCode::kInvalidArgument) << group;
  }
}

TEST_P(ExecutorFailureTest, ALaunchThatIsRefusedEndsThoseThatWaitForItsCalls) {
  ExpectAllRefused([](LaunchMessage* message) { message->buffers.pop_back(); }, "buffers");
}

TEST_P(ExecutorFailureTest, ACallThatIsRefusedEndsThoseThatWaitForIt) {
  // Its input's.
  ExpectAllRefused([](LaunchMessage* message) { message->buffers[0] = 0; }, "without memory");
}

TEST_P(ExecutorFailureTest, AnAbortEndsTheLaunchThatWaitsAndLeavesTheDeviceUsable) {
  if (ranks() < 2) return;
  const Plan plan = CompileEager();
  ASSERT_TRUE(rig_.LoadPlan(0, PlanId(1000), plan.device_plans[0]).ok());
  const LaunchMessage message = MessageFor(plan);
  rig_.Send(0, message);
  const CommunicatorId id = message.collectives[0].communicator;
  // It goes while the launch uses it.
  rig_.executor(0)->AbortCommunicator(id, absl::AbortedError("rank 1 died"));
  for (int r = 0; r < ranks(); ++r) rig_.executor(r)->CloseCommunicator(id);
  const absl::Status status = rig_.WaitFor(message.launch);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(ErrorOf(status).message, "rank 1 died");
  // The next gang opens new ones.
  GangRig fresh(GetParam().open(ranks(), Seed()));
  EXPECT_EQ(fresh.Check(
                Sessions([&](RankBuilder* b) { AddOutput(b, b->AllReduce(b->Input(F32({4})))); })),
            "");
  RankBuilder alone(0, 1);
  AddOutput(&alone, alone.Op("neg", {alone.Input(F32({3}))}));
  EXPECT_EQ(rig_.Check({MakeSession(&alone)}), "");
}

TEST_P(ExecutorFailureTest, OfALaunchThatIsAbandonedKernelsThatHaveNotBegunAreLeftOut) {
  if (ranks() < 2) return;
  const auto gang = rig_.Prepare(Sessions([](RankBuilder* b) {
    const ValueIndex x = b->Input(F32({4}));
    const ValueIndex y = b->Op("add", {b->AllReduce(x), x});  // no other rank computes it
    AddOutput(b, y);
    AddOutput(b, b->Op("neg", {y}));
  }));
  ASSERT_TRUE(gang->status.ok()) << gang->status;
  std::vector<Value> before;
  for (const int output : {0, 1}) before.push_back(rig_.Output(*gang, 0, output));
  // Rank 0's comes first: it waits for the others, and its kernels for that.
  std::sort(gang->messages.begin(), gang->messages.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [device, message] : gang->messages) {
    rig_.Send(device, message);
    if (device == 0) rig_.executor(0)->Abandon(message.launch);
  }
  for (const auto& [device, message] : gang->messages) {
    const absl::Status status = rig_.WaitFor(message.launch);
    EXPECT_EQ(ErrorOf(status).reason, device == 0 ? Reason::kCancelled : Reason::kUnspecified)
        << status;
    // It has ended, and there never was another.
    rig_.executor(device)->Abandon(message.launch);
    rig_.executor(device)->Abandon(LaunchId(1'000'000));
  }
  for (const int output : {0, 1}) {
    EXPECT_EQ(rig_.Output(*gang, 0, output), before[static_cast<size_t>(output)]) << output;
    EXPECT_FALSE(rig_.Output(*gang, 1, output) == before[static_cast<size_t>(output)]) << output;
  }
  EXPECT_EQ(rig_.Check(Sessions([](RankBuilder* b) {
    const ValueIndex sum = b->AllReduce(b->Input(F32({4})));
    AddOutput(b, b->Op("neg", {b->Op("neg", {sum})}));
  })),
            "");
}

TEST_P(ExecutorFailureTest, OfALaunchThatIsAbandonedBeforeItsTurnNothingIsDone) {
  const auto prepare = [&](int32_t lane, int steps) {
    RankBuilder b(0, 1);
    ValueIndex value = b.Input(F32({4}));
    for (int i = 0; i < steps; ++i) value = b.Op("neg", {value});
    AddOutput(&b, value);
    rig_.set_lane(lane);
    return rig_.Prepare({MakeSession(&b)});
  };
  std::vector<std::unique_ptr<GangRig::Result>> results;
  for (const int32_t lane : {0, 1}) {
    for (const int steps : {40, 1, 6}) results.push_back(prepare(lane, steps));
  }
  for (const auto& result : results) {
    EXPECT_TRUE(rig_.Send(0, result->messages[0].second)) << "the first one has more";
  }
  const auto launch_of = [&](size_t i) { return results[i]->messages[0].second.launch; };
  for (const size_t abandoned : {1, 5}) rig_.executor(0)->Abandon(launch_of(abandoned));
  for (const size_t i : {0, 1, 2, 3, 4, 5}) {
    const absl::Status status = rig_.CompletionOf(launch_of(i)).status;
    const bool was_abandoned = i == 1 || i == 5;
    EXPECT_EQ(ErrorOf(status).reason, was_abandoned ? Reason::kCancelled : Reason::kUnspecified)
        << i << ": " << status;
  }
}

TEST_P(ExecutorFailureTest, PlansMustBeSoundBeforeTheyAreLoaded) {
  const std::string bytes = CompileEager().device_plans[0];
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(rig_.LoadPlan(0, PlanId(1000), bytes.substr(0, size)).code(),
              absl::StatusCode::kInvalidArgument)
        << size;
  }
  absl::StatusOr<DevicePlan> plan = DecodeDevicePlan(bytes);
  ASSERT_TRUE(plan.ok());
  plan->nodes[0].node.op = "no_such_op";
  EXPECT_FALSE(rig_.LoadPlan(0, PlanId(1000), EncodeDevicePlan(*plan)).ok());
  plan->nodes[0].node.op = "neg";
  // A GPU's kernel of it wants none.
  if (int64_t& workspace = plan->steps.back().workspace_bytes; workspace != 0) {
    const std::string sound = absl::StrCat(workspace);
    workspace = 3;
    const absl::Status small = rig_.LoadPlan(0, PlanId(1000), EncodeDevicePlan(*plan));
    EXPECT_EQ(ErrorOf(small).message,
              "a device plan has 3 bytes of workspace for neg, expected " + sound);
  }
  plan->nodes[0].node.outputs[0] = F32({5});
  EXPECT_EQ(rig_.LoadPlan(0, PlanId(1000), EncodeDevicePlan(*plan)).code(),
            absl::StatusCode::kInvalidArgument);
}

std::vector<Param> Params(const std::vector<int>& ranks) {
  std::vector<Param> params;
  for (const int r : ranks) {
    params.push_back({absl::StrCat("host_", r), &OpenHost, r});
    params.push_back({absl::StrCat("host_on_pool_", r), &OpenHostOnPool, r});
    params.push_back({absl::StrCat("sim_", r), &OpenSim, r});
    params.push_back({absl::StrCat("sim_shared_", r), &OpenSimShared, r});
    params.push_back({absl::StrCat("cuda_", r), &OpenCuda, r});
  }
  return params;
}
std::string Name(const ::testing::TestParamInfo<Param>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Backends, ExecutorTest, ::testing::ValuesIn(Params({1, 2, 3, 5, 8})),
                         Name);
INSTANTIATE_TEST_SUITE_P(Backends, ExecutorFailureTest, ::testing::ValuesIn(Params({1, 3})), Name);

}  // namespace
}  // namespace testing
}  // namespace chorus
