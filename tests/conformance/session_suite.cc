// Groups, sessions of several ranks and devices, and the ways by which bytes come in.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/internal/access.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "tests/conformance/backends.h"
#include "tests/conformance/collectives.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

using internal::Link;
using internal::MakeTensor;
using internal::SessionCore;
using internal::SessionLock;
using internal::SessionOf;
using internal::TensorData;
using internal::TensorDataPtr;

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// --- Groups -------------------------------------------------------------------------------------

TEST_P(Conformance, PlacesInAnUnsortedGroupAreThoseOfItsList) {
  Job job(GetParam(), 4);
  job.Run([](int rank, World& world) {
    const std::vector<int> members = {3, 0, 2};
    if (rank == 1) {
      EXPECT_FALSE(world.NewGroup(members).ok());
      return;
    }
    const NoGrad no_grad;
    const absl::StatusOr<Group> group = world.NewGroup(members);
    ASSERT_TRUE(group.ok()) << group.status();
    const int rank_in_group = rank == 3 ? 0 : rank == 0 ? 1 : 2;
    EXPECT_EQ(group->rank(), rank_in_group);
    EXPECT_EQ(group->GroupRankOf(2), 2);
    const Tensor x = Upload<double>(world, {10.0 * rank, 1});
    EXPECT_THAT(Values<double>(AllReduce(x, *group)), ElementsAre(50, 3));
    EXPECT_THAT(Values<double>(Broadcast(x, 0, *group)), ElementsAre(30, 1));
    const std::vector<Tensor> all = AllGather(x, *group);
    ASSERT_EQ(all.size(), 3u);
    for (size_t p = 0; p < 3; ++p) {
      EXPECT_THAT(Values<double>(all[p]), ElementsAre(10 * members[p], 1));
    }
    const Tensor chunk = ReduceScatter({x, x * 2, x * 3}, *group);
    EXPECT_THAT(Values<double>(chunk),
                ElementsAre(50 * (rank_in_group + 1), 3 * (rank_in_group + 1)));
    const Tensor reduced = Reduce(x, 2, *group);
    EXPECT_EQ(reduced.absent(), rank != 2);
    if (rank == 2) {
      EXPECT_THAT(Values<double>(reduced), ElementsAre(50, 3));
    }
    const Tensor sent = Send(x, (rank_in_group + 1) % 3, *group);
    const Tensor got = Recv(DType::kF64, {2}, (rank_in_group + 2) % 3, *group);
    EXPECT_THAT(Values<double>(got),
                ElementsAre(10 * members[static_cast<size_t>(rank_in_group + 2) % 3], 1));
    EXPECT_TRUE(sent.Wait().ok());
  });
}

struct Grid {
  Group row;
  Group column;
};

// Ranks 0 to 3 as a square.
Grid MakeGrid(int rank, const World& world) {
  const absl::StatusOr<Group> row =
      world.NewGroup(rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3});
  const absl::StatusOr<Group> column =
      world.NewGroup(rank % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3});
  EXPECT_TRUE(row.ok() && column.ok());
  return row.ok() && column.ok() ? Grid{*row, *column} : Grid{};
}

TEST_P(Conformance, AGraphMayUseTwoGroups) {
  Job job(GetParam(), 4);
  job.Run([](int rank, World& world) {
    const Grid grid = MakeGrid(rank, world);
    const auto gradient = [&](const std::vector<Tensor>& in) {
      const Tensor a = AllReduce(in[0], grid.row);
      const Tensor b = AllReduce(a * a, grid.column);
      const auto g = Grad({Sum(b) * (rank + 1)}, {in[0]});
      return g.ok() ? std::vector<Tensor>{b.Detach(), (*g)[0]}
                    : std::vector<Tensor>{Tensor(), Tensor()};
    };
    const Tensor x = Upload<double>(world, {1.0 + rank}).RequireGrad();
    const Compiled compiled = Compile(gradient);
    for (int i = 0; i < 3; ++i) {
      const std::vector<Tensor> eager = gradient({x});
      const auto run = compiled.Run({x});
      ASSERT_TRUE(run.ok()) << run.status();
      // a: 3 and 7. The weights of a column's losses are 4 and 6, of both columns 10.
      const double a = rank < 2 ? 3 : 7;
      for (const std::vector<Tensor>& out : {eager, *run}) {
        EXPECT_THAT(Values<double>(out[0]), ElementsAre(9 + 49));
        EXPECT_THAT(Values<double>(out[1]), ElementsAre(2 * a * 10));
      }
    }
  });
}

// Nothing says which of the two comes first, and the ranks' programs say different things.
TEST_P(Conformance, IndependentGroupsMayBeUsedInDifferentOrders) {
  Job job(GetParam(), 4);
  job.Run([](int rank, World& world) {
    const Grid grid = MakeGrid(rank, world);
    const auto both = [&](const std::vector<Tensor>& in) {
      Tensor row, column;
      if (rank % 3 == 0) {
        row = AllReduce(in[0], grid.row);
        column = AllReduce(in[0], grid.column);
      } else {
        column = AllReduce(in[0], grid.column);
        row = AllReduce(in[0], grid.row);
      }
      return std::vector<Tensor>{row, column, row * column};
    };
    const Compiled compiled = Compile(both);
    const NoGrad no_grad;
    for (int i = 0; i < 10; ++i) {
      const Tensor x = Upload<double>(world, {1.0 + rank, 1.0 * i});
      const auto run = compiled.Run({x});
      ASSERT_TRUE(run.ok()) << run.status();
      const double row = rank < 2 ? 3 : 7;
      const double column = rank % 2 == 0 ? 4 : 6;
      for (const std::vector<Tensor>& out : {both({x}), *run}) {
        EXPECT_THAT(Values<double>(out[0]), ElementsAre(row, 2 * i));
        EXPECT_THAT(Values<double>(out[1]), ElementsAre(column, 2 * i));
        EXPECT_THAT(Values<double>(out[2]), ElementsAre(row * column, 4 * i * i));
      }
    }
  });
}

// Rank 0 needs the first group's result for the second's, rank 1 the second's for the first's.
void CheckCircle(const ConformanceParam& param, bool compiled) {
  Job job(param, 2);
  job.Run([compiled](int rank, World& world) {
    const NoGrad no_grad;
    const absl::StatusOr<Group> one = world.NewGroup({0, 1});
    const absl::StatusOr<Group> two = world.NewGroup({1, 0});
    ASSERT_TRUE(one.ok() && two.ok());
    const auto chain = [&](const std::vector<Tensor>& in) {
      const Tensor first = AllReduce(in[0], rank == 0 ? *one : *two);
      return std::vector<Tensor>{AllReduce(first, rank == 0 ? *two : *one)};
    };
    const Tensor x = Upload<double>(world, {1});
    absl::StatusOr<std::vector<Tensor>> out;
    if (compiled) {
      out = Compile(chain).Run({x});
    } else {
      out = chain({x});
    }
    ASSERT_TRUE(out.ok()) << out.status();
    const Error error = ErrorOf((*out)[0].Wait());
    EXPECT_EQ(error.code, absl::StatusCode::kInvalidArgument) << error.message;
    EXPECT_EQ(error.reason, Reason::kOrderCycle) << error.message;
    EXPECT_THAT(error.message, HasSubstr("group 1"));
    EXPECT_THAT(error.message, HasSubstr("group 2"));
    EXPECT_EQ(world.epoch(), 2);
    EXPECT_THAT(Values<double>(AllReduce(x, *one)), ElementsAre(2));
    EXPECT_THAT(Values<double>(AllReduce(x, *two)), ElementsAre(2));
  });
}

TEST_P(Conformance, ACircleBetweenGroupsOfOneGraphIsRefused) { CheckCircle(GetParam(), true); }
TEST_P(Conformance, ACircleBetweenGroupsOfEagerCallsIsRefused) { CheckCircle(GetParam(), false); }

// Rank 0 makes the world's second call ahead of the other group's, rank 1 behind it, and out of
// what that gave: so what rank 0 gives to the other group may not wait for the second call.
TEST_P(Conformance, AnOpWaitsForNoOtherCallOfItsOperandsGroup) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const NoGrad no_grad;
    const absl::StatusOr<Group> other = world.NewGroup({1, 0});
    ASSERT_TRUE(other.ok()) << other.status();
    const Tensor x = Upload<double>(world, {1.0 + rank});
    const Tensor first = AllReduce(x, world);
    Tensor second, between, scaled;
    if (rank == 0) {
      second = AllReduce(x, world);
      scaled = 100 * second;
      between = AllReduce(10 * first, *other);
    } else {
      between = AllReduce(10 * first, *other);
      second = AllReduce(between, world);
      scaled = 100 * second;
    }
    EXPECT_THAT(Values<double>(between), ElementsAre(60));
    EXPECT_THAT(Values<double>(scaled), ElementsAre(6100));
  });
}

// The same of gradients, which ranks ask for in any order, all in one group.
TEST_P(Conformance, AnOpWaitsForNoOtherGradientOfItsOperandsGroup) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const Tensor x = Upload<double>(world, {1.0 + rank}).RequireGrad();
    const Tensor first = AllReduce(x, world);
    const Tensor second = AllReduce(x, world);
    const auto gradient = [&x](const Tensor& y, const Tensor& seed) {
      BackwardOptions options;
      options.seeds = {seed};
      const auto gradients = Grad({y}, {x}, options);
      EXPECT_TRUE(gradients.ok()) << gradients.status();
      return gradients.ok() ? (*gradients)[0] : Tensor();
    };
    const Tensor one = Upload<double>(world, {1.0 + rank});
    Tensor of_first, of_second, scaled;
    if (rank == 0) {
      of_second = gradient(second, one);
      scaled = 100 * of_second;
      of_first = gradient(first, 10 * first);
    } else {
      of_first = gradient(first, 10 * first);
      of_second = gradient(second, of_first);
      scaled = 100 * of_second;
    }
    EXPECT_THAT(Values<double>(of_first), ElementsAre(60));
    EXPECT_THAT(Values<double>(scaled), ElementsAre(6100));
  });
}

// A program in which each rank computes from its own values, and meets the others in groups of the
// same members. Every statement makes a value of each rank, out of earlier ones: it adds two, or
// sums one of each rank.
class OrderedProgram {
 public:
  static constexpr int kLeaves = 2;

  OrderedProgram(uint64_t seed, int ranks, int groups) : ranks_(ranks), random_(seed) {
    for (int s = 0; s < kStatements; ++s) {
      Statement statement;
      if (Below(2) == 0) statement.group = Below(groups);
      for (int r = 0; r < ranks; ++r) {
        statement.operands.emplace_back(Below(kLeaves + s), Below(kLeaves + s));
      }
      statements_.push_back(std::move(statement));
    }
    for (int r = 0; r < ranks; ++r) orders_.push_back(DrawOrder(r));
  }

  static double Leaf(int rank, int leaf) { return 1 + rank + 10 * leaf; }

  // A rank's values in its order, and the gradient of all their sum in its leaves.
  std::vector<Tensor> Run(int rank, const World& world, const std::vector<Group>& groups) const {
    std::vector<Tensor> values(kLeaves + statements_.size());
    for (int leaf = 0; leaf < kLeaves; ++leaf) {
      values[static_cast<size_t>(leaf)] = Scalar<double>(world, Leaf(rank, leaf)).RequireGrad();
    }
    for (const int s : orders_[static_cast<size_t>(rank)]) {
      const Statement& statement = statements_[static_cast<size_t>(s)];
      const auto [a, b] = statement.operands[static_cast<size_t>(rank)];
      const Tensor& first = values[static_cast<size_t>(a)];
      values[static_cast<size_t>(kLeaves + s)] =
          statement.group < 0 ? first + values[static_cast<size_t>(b)]
                              : AllReduce(first, groups[static_cast<size_t>(statement.group)]);
    }
    const std::vector<Tensor> leaves(values.begin(), values.begin() + kLeaves);
    const absl::StatusOr<std::vector<Tensor>> gradients = Grad(values, leaves);
    EXPECT_TRUE(gradients.ok()) << gradients.status();
    if (gradients.ok()) values.insert(values.end(), gradients->begin(), gradients->end());
    return values;
  }

  // What Run gives, of all ranks.
  std::vector<std::vector<double>> Expected() const {
    const size_t count = kLeaves + statements_.size();
    const auto ranks = static_cast<size_t>(ranks_);
    std::vector<std::vector<double>> values(ranks, std::vector<double>(count));
    std::vector<std::vector<double>> gradients(ranks, std::vector<double>(count, 1));
    for (size_t r = 0; r < ranks; ++r) {
      for (int leaf = 0; leaf < kLeaves; ++leaf) {
        values[r][static_cast<size_t>(leaf)] = Leaf(static_cast<int>(r), leaf);
      }
    }
    for (size_t s = 0; s < statements_.size(); ++s) {
      double sum = 0;
      for (size_t r = 0; r < ranks; ++r) sum += First(s, r, &values);
      for (size_t r = 0; r < ranks; ++r) {
        values[r][kLeaves + s] =
            statements_[s].group < 0 ? First(s, r, &values) + Second(s, r, &values) : sum;
      }
    }
    for (size_t s = statements_.size(); s-- > 0;) {
      double sum = 0;
      for (size_t r = 0; r < ranks; ++r) sum += gradients[r][kLeaves + s];
      for (size_t r = 0; r < ranks; ++r) {
        const bool local = statements_[s].group < 0;
        First(s, r, &gradients) += local ? gradients[r][kLeaves + s] : sum;
        if (local) Second(s, r, &gradients) += gradients[r][kLeaves + s];
      }
    }
    for (size_t r = 0; r < ranks; ++r) {
      values[r].insert(values[r].end(), gradients[r].begin(), gradients[r].begin() + kLeaves);
    }
    return values;
  }

 private:
  static constexpr int kStatements = 16;

  struct Statement {
    int group = -1;                             // -1: a local op
    std::vector<std::pair<int, int>> operands;  // by rank
  };

  int Below(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
  double& First(size_t s, size_t rank, std::vector<std::vector<double>>* of) const {
    return (*of)[rank][static_cast<size_t>(statements_[s].operands[rank].first)];
  }
  double& Second(size_t s, size_t rank, std::vector<std::vector<double>>* of) const {
    return (*of)[rank][static_cast<size_t>(statements_[s].operands[rank].second)];
  }
  // Any in which operands come first, and a group's calls as they are numbered.
  std::vector<int> DrawOrder(int rank) {
    std::vector<int> order;
    std::vector<bool> done(statements_.size(), false);
    const auto is_there = [&](int value) {
      return value < kLeaves || done[static_cast<size_t>(value - kLeaves)];
    };
    while (order.size() < statements_.size()) {
      std::vector<int> ready;
      std::set<int> waiting;  // groups with a call that comes first
      for (int s = 0; s < static_cast<int>(statements_.size()); ++s) {
        if (done[static_cast<size_t>(s)]) continue;
        const Statement& statement = statements_[static_cast<size_t>(s)];
        const auto [a, b] = statement.operands[static_cast<size_t>(rank)];
        const bool local = statement.group < 0;
        const bool first = local || waiting.insert(statement.group).second;
        if (first && is_there(a) && (!local || is_there(b))) ready.push_back(s);
      }
      order.push_back(ready[static_cast<size_t>(Below(static_cast<int>(ready.size())))]);
      done[static_cast<size_t>(order.back())] = true;
    }
    return order;
  }

  const int ranks_;
  std::mt19937_64 random_;
  std::vector<Statement> statements_;
  std::vector<std::vector<int>> orders_;  // by rank
};

TEST_P(Conformance, ItsDataAloneOrdersARanksCallsOfDifferentGroups) {
  constexpr int kRanks = 3;
  constexpr int kPrograms = 50;
  Job job(GetParam(), kRanks);
  job.Run([](int rank, World& world) {
    std::vector<Group> groups = {world.group()};
    for (const std::vector<int>& members : {std::vector<int>{2, 0, 1}, std::vector<int>{0, 1, 2}}) {
      const absl::StatusOr<Group> group = world.NewGroup(members);
      ASSERT_TRUE(group.ok()) << group.status();
      groups.push_back(*group);
    }
    for (int p = 0; p < kPrograms; ++p) {
      ASSERT_TRUE(world.Step(p + 1).ok());
      const uint64_t seed = TestSeed() + static_cast<uint64_t>(p);
      const OrderedProgram program(seed, kRanks, static_cast<int>(groups.size()));
      const std::vector<double> expected = program.Expected()[static_cast<size_t>(rank)];
      const std::vector<Tensor> values = program.Run(rank, world, groups);
      ASSERT_EQ(values.size(), expected.size()) << "program " << seed;
      for (size_t v = 0; v < values.size(); ++v) {
        ASSERT_THAT(Values<double>(values[v]), ElementsAre(expected[v]))
            << "program " << seed << ", value " << v << " of rank " << rank;
      }
    }
  });
}

// --- Sessions of several ranks and devices ------------------------------------------------------

void CheckEveryKind(Job* job) {
  job->Run([job](int rank, World& world) {
    const NoGrad no_grad;
    for (int k = 0; k < static_cast<int>(Kind::kCount); ++k) {
      for (const int64_t size : {int64_t{1}, kChunkElements + 1}) {
        const Place p{static_cast<Kind>(k), rank, job->size(), size};
        std::vector<Tuple<double>> all(static_cast<size_t>(p.ranks));
        std::vector<Tensor> in;
        for (int r = 0; r < p.ranks; ++r) {
          const Place place{p.kind, r, p.ranks, size};
          for (int i = 0; i < place.num_inputs(); ++i) {
            const std::vector<double> x = Elements<double>(r, place.input_size(), i);
            all[static_cast<size_t>(r)].push_back(x);
            if (r == rank) in.push_back(Upload(world, x));
          }
        }
        const std::vector<Tensor> out = Call(p, world, DType::kF64, in);
        const Tuple<double> expected = Apply<double>(p.kind, size, all)[static_cast<size_t>(rank)];
        ASSERT_EQ(out.size(), expected.size());
        for (size_t i = 0; i < out.size(); ++i) {
          ASSERT_EQ(out[i].absent(), !expected[i].has_value());
          if (expected[i].has_value()) {
            EXPECT_EQ(Values<double>(out[i]), *expected[i]) << "kind " << k << " output " << i;
          }
        }
      }
    }
  });
}

TEST_P(Conformance, AllRanksMayBeOfOneSession) {
  JobOptions options;
  options.ranks = 4;
  options.sessions = 1;
  Job job(GetParam(), options);
  CheckEveryKind(&job);
}

TEST_P(Conformance, SomeRanksMayShareASession) {
  JobOptions options;
  options.ranks = 5;
  options.sessions = 2;
  Job job(GetParam(), options);
  CheckEveryKind(&job);
}

TEST_P(Conformance, OneGraphMaySpeakForAllRanks) {
  JobOptions options;
  options.ranks = 3;
  options.sessions = 1;
  Job job(GetParam(), options);
  const Compiled f = Compile([&job](const std::vector<Tensor>& in) {
    std::vector<Tensor> losses;
    std::vector<Tensor> out;
    for (const int r : {2, 0, 1}) {
      const Tensor y = AllReduce(in[static_cast<size_t>(r)], job.world(r));
      losses.push_back(Sum(y * y) * (r + 1));
      out.push_back(y);
    }
    const auto g = Grad(losses, in);
    if (!g.ok()) return std::vector<Tensor>{Tensor()};
    out.insert(out.end(), g->begin(), g->end());
    return out;
  });
  std::vector<Tensor> inputs;
  for (int r = 0; r < 3; ++r) {
    inputs.push_back(Upload<double>(job.world(r), {1.0 + r, 2}).RequireGrad());
  }
  for (int i = 0; i < 3; ++i) {
    const auto out = f.Run(inputs);
    ASSERT_TRUE(out.ok()) << out.status();
    for (size_t o = 0; o < 3; ++o) {
      EXPECT_THAT(Values<double>((*out)[o]), ElementsAre(6, 6));
      EXPECT_THAT(Values<double>((*out)[3 + o]), ElementsAre(2 * 6 * 6, 2 * 6 * 6));
    }
  }
}

// What data parallelism in one process is made of: copies to devices, and their gradients.
TEST_P(Conformance, TensorsAndGradientsCrossTheDevicesOfASession) {
  JobOptions options;
  options.ranks = 3;
  options.sessions = 1;
  Job job(GetParam(), options);
  const Session& session = job.session(0);
  const auto gradient = [&session](const std::vector<Tensor>& in) {
    Tensor total;
    for (int d = 0; d < 3; ++d) {
      const Tensor there = CopyTo(in[0], session.device(d));
      const Tensor part = CopyTo(Sum(there * there) * (d + 1), session.device(0));
      total = d == 0 ? part : total + part;
    }
    BackwardOptions create;
    create.create_graph = true;
    const auto g = Grad({total}, {in[0]}, create);
    if (!g.ok()) return std::vector<Tensor>{Tensor()};
    const Tensor g1 = CopyTo((*g)[0], session.device(1));
    const auto h = Grad({CopyTo(Sum(g1 * g1), session.device(2))}, {in[0]});
    if (!h.ok()) return std::vector<Tensor>{Tensor()};
    return std::vector<Tensor>{total.Detach(), (*g)[0].Detach(), (*h)[0]};
  };
  const Tensor x = FromHost<double>(session.device(0), {1, -2, 3}, {3}).RequireGrad();
  const Compiled compiled = Compile(gradient);
  for (int i = 0; i < 3; ++i) {
    const auto run = compiled.Run({x});
    ASSERT_TRUE(run.ok()) << run.status();
    // total = 6 |x|^2, g = 12 x, S = 144 |x|^2, h = 288 x.
    for (const std::vector<Tensor>& out : {gradient({x}), *run}) {
      ASSERT_EQ(out.size(), 3u);
      EXPECT_THAT(Values<double>(out[0]), ElementsAre(6 * 14));
      EXPECT_THAT(Values<double>(out[1]), ElementsAre(12, -24, 36));
      EXPECT_THAT(Values<double>(out[2]), ElementsAre(288, -576, 864));
    }
  }
}

TEST_P(Conformance, TwoSessionsOfOneProcessDoNotMeet) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const Tensor mine = Upload<double>(world, {1.0 + rank});
    for (int i = 0; i < 20; ++i) {
      EXPECT_THAT(Values<double>(mine * (i + 1) + mine), ElementsAre((rank + 1) * (i + 2)));
    }
  });
  const Tensor other = Upload<double>(job.world(1), {1});
  EXPECT_EQ(AllReduce(other, job.world(0)).Wait().code(), absl::StatusCode::kInvalidArgument);
}

// --- Bytes that come in -------------------------------------------------------------------------

TEST_P(Conformance, MappedMemoryIsReadWhereItIs) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const NoGrad no_grad;
    constexpr int64_t kSize = kChunkElements + 3;
    const absl::StatusOr<MappedTensor<float>> x = Map<float>(world, {kSize});
    if (!x.ok()) {
      // Only where no memory is shared.
      EXPECT_EQ(x.status().code(), absl::StatusCode::kUnimplemented) << x.status();
      const Transport transport =
          internal::SessionFrom(internal::SessionOf(world.device())).transport();
      EXPECT_TRUE(transport == Transport::kStream || transport == Transport::kUnary);
      return;
    }
    for (int step = 0; step < 5; ++step) {
      std::vector<float> expected;
      for (int64_t i = 0; i < kSize; ++i) {
        (*x)[static_cast<size_t>(i)] = Element<float>(rank, i, step);
        expected.push_back(Element<float>(0, i, step) + Element<float>(1, i, step));
      }
      const Tensor sum = AllReduce(*x, world);
      const Tensor frozen = *x * 2;
      EXPECT_EQ(Values<float>(sum), expected);
      ASSERT_TRUE(frozen.Wait().ok());
      // What is no operand of a reduction was copied before it was used.
      (*x)[0] = 1000;
      const std::vector<float> doubled = Values<float>(frozen);
      ASSERT_EQ(doubled.size(), expected.size());
      EXPECT_EQ(doubled[0], 2 * Element<float>(rank, 0, step));
    }
  });
}

// A matrix of 5 x 4 inside one of 7 x 9, by its columns: as trainers hand over slices of their own
// tensors. The SDK has no call for it yet, so the commands are written by hand.
TEST_P(Conformance, InputsMayBeStridedRangesOfStagingMemory) {
  constexpr int64_t kRows = 5;
  constexpr int64_t kColumns = 4;
  constexpr int64_t kPitch = 9;
  constexpr int64_t kOffset = 2 * kPitch + 3;
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const std::vector<float> whole = Elements<float>(rank, 7 * kPitch);
    std::vector<float> mine, sum;
    for (int64_t c = 0; c < kColumns; ++c) {
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t at = kOffset + r * kPitch + c;
        mine.push_back(whole[static_cast<size_t>(at)]);
        sum.push_back(Element<float>(0, at) + Element<float>(1, at));
      }
    }
    const std::shared_ptr<SessionCore> core = SessionOf(world.device());
    const int64_t bytes = static_cast<int64_t>(whole.size() * sizeof(float));
    const absl::StatusOr<Link::Staging> staging = core->link().CreateStaging(bytes);
    ASSERT_TRUE(staging.ok()) << staging.status();
    const absl::string_view view(reinterpret_cast<const char*>(whole.data()),
                                 static_cast<size_t>(bytes));
    if (staging->data != nullptr) {
      std::copy(view.begin(), view.end(), staging->data);
    } else {
      const absl::Status written = core->link().WriteStaging(staging->arena, 0, view);
      ASSERT_TRUE(written.ok()) << written;
    }
    // As a tensor of the daemon's, and as the operand of a reduction.
    auto data = std::make_shared<TensorData>(core);
    Tensor copied;
    {
      SessionLock lock(core.get());
      ASSERT_TRUE(lock.status().ok());
      data->info = core->interner().Type(TensorType(DType::kF32, {kColumns, kRows}));
      data->staging = staging->data;
      data->external.arena = staging->arena;
      data->external.offset = kOffset * static_cast<int64_t>(sizeof(float));
      data->external.strides = {1, kPitch};
      data->state.store(TensorData::State::kExternal, std::memory_order_release);
      const absl::StatusOr<TensorDataPtr> copy = core->Freeze(*data);
      ASSERT_TRUE(copy.ok()) << copy.status();
      copied = MakeTensor(*copy);
    }
    const NoGrad no_grad;
    const Tensor x = MakeTensor(data);
    EXPECT_EQ(Values<float>(copied), mine);
    EXPECT_EQ(Values<float>(x * 1), mine);
    EXPECT_EQ(Values<float>(AllReduce(x, world)), sum);
  });
}

TEST_P(Conformance, DonatedParametersAreReplacedStepByStep) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    constexpr int64_t kSize = 200;
    CompileOptions donate;
    donate.donate = {0};
    const Compiled step = Compile(
        [&world](const std::vector<Tensor>& in) {
          const Tensor loss = Sum(in[0] * in[0] * in[1]);
          const auto g = Grad({loss}, {in[0]});
          if (!g.ok()) return std::vector<Tensor>{Tensor()};
          return std::vector<Tensor>{in[0] - 0.0625 * AllReduce((*g)[0], world)};
        },
        donate);
    std::vector<double> expected = Elements<double>(7, kSize);
    Tensor w = Upload(world, expected).RequireGrad();
    Tensor kept;
    std::vector<double> kept_values;
    for (int i = 0; i < 8; ++i) {
      if (i == 3) {
        // Somebody else holds it: it stays as it is.
        kept = w.Detach();
        kept_values = expected;
      }
      const auto out =
          step.Run({w, Upload(world, std::vector<double>(kSize, rank == i % 3 ? 1 : 0))});
      ASSERT_TRUE(out.ok()) << out.status();
      for (double& value : expected) value -= 0.0625 * 2 * value;
      w = (*out)[0].Detach().RequireGrad();
    }
    const std::vector<double> got = Values<double>(w);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-9);
    const std::vector<double> still = Values<double>(kept);
    for (size_t i = 0; i < still.size(); ++i) EXPECT_NEAR(still[i], kept_values[i], 1e-9);
  });
}

TEST_P(Conformance, ADonatedTensorIsGoneAndOneThatSomebodyHoldsIsNot) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const NoGrad no_grad;
    CompileOptions donate;
    donate.donate = {0};
    const Compiled step = Compile(
        [&world](const std::vector<Tensor>& in) {
          return std::vector<Tensor>{in[0] - AllReduce(in[1], world)};
        },
        donate);
    const std::vector<double> ones(50, 1);
    Tensor w = Upload(world, Elements<double>(rank, 50));
    std::vector<double> expected = Elements<double>(rank, 50);
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(w.Wait().ok());
      const Tensor kept = i == 2 ? w.Detach() : Tensor();
      const auto out = step.Run({w, Upload(world, ones)});
      ASSERT_TRUE(out.ok()) << out.status();
      const std::vector<double> before = expected;
      for (double& value : expected) value -= 2;
      EXPECT_EQ(Values<double>((*out)[0]), expected);
      const auto read = w.Read<double>();
      if (i == 2) {
        EXPECT_EQ(Values<double>(kept), before);
      } else {
        EXPECT_EQ(ErrorOf(read.status()).reason, Reason::kDonated) << read.status();
        EXPECT_THAT(read.status().message(), HasSubstr("was donated to run"));
        EXPECT_EQ(ErrorOf((w * 2).Wait()).reason, Reason::kDonated);
      }
      w = (*out)[0].Detach();
    }
  });
}

TEST_P(ConformanceInside, MemoryIsBackWhenTheSessionsAreClosed) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const Tensor x = Upload(world, Elements<float>(rank, 100000)).RequireGrad();
    const Tensor y = AllReduce(x, world);
    ASSERT_TRUE(Backward(Sum(y * y)).ok());
    ASSERT_TRUE(x.grad().Wait().ok());
  });
  EXPECT_GT(job.cluster().Counts().memory_in_use, 0);
  for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(job.session(rank).Close().ok());
  // Large graphs go in the background.
  const absl::Time deadline = absl::Now() + absl::FromChrono(kWaitTimeout);
  while (job.cluster().Counts().memory_in_use > 0 && absl::Now() < deadline) {
  }
  EXPECT_EQ(job.cluster().Counts().memory_in_use, 0);
  EXPECT_EQ(ErrorOf(AllReduce(Scalar<float>(job.world(0), 1), job.world(0)).Wait()).reason,
            Reason::kSessionLost);
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
