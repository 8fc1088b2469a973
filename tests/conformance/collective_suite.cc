// Every reduction of every dtype in every form, ranks that want other things, coalesced calls,
// pieces that do not meet, and the devices of one session.
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "chorus/functional/shape.h"
#include "chorus/parallel.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// --- Reductions ---------------------------------------------------------------------------------

// A power of two: AVG is exact in every dtype.
constexpr int kMembers = 4;
constexpr int64_t kElements = 13;

// Small enough that every product of four is exact in half types, and with ties.
int Whole(int rank, int64_t i) { return static_cast<int>((rank * 5 + i * 3 + i / 4) % 5) - 2; }

template <typename T>
T As(int value) {
  if constexpr (std::is_same_v<T, bool>) return value > 0;
  if constexpr (std::is_integral_v<T>) return static_cast<T>(value);
  return T(static_cast<float>(value));
}

double FactorOf(int rank) { return 0.5 * (rank - 1); }

template <typename T>
T Expected(Reduction reduction, int64_t i) {
  double y = 0;
  int64_t bits = 0;
  for (int r = 0; r < kMembers; ++r) {
    // What the element is: 254 for a u8 of -2.
    const T element = As<T>(Whole(r, i));
    const double x = static_cast<double>(element);
    switch (reduction) {
      case Reduction::kProduct:
        y = r == 0 ? x : y * x;
        break;
      case Reduction::kMin:
        y = r == 0 || x < y ? x : y;
        break;
      case Reduction::kMax:
        y = r == 0 || x > y ? x : y;
        break;
      case Reduction::kPremulSum:
        y += FactorOf(r) * x;
        break;
      case Reduction::kBand:
        bits = r == 0 ? static_cast<int64_t>(x) : bits & static_cast<int64_t>(x);
        break;
      case Reduction::kBor:
        bits |= static_cast<int64_t>(x);
        break;
      case Reduction::kBxor:
        bits ^= static_cast<int64_t>(x);
        break;
      default:
        y += x;
    }
  }
  if (reduction == Reduction::kAvg) y /= kMembers;
  const bool bitwise = reduction == Reduction::kBand || reduction == Reduction::kBor ||
                       reduction == Reduction::kBxor;
  if constexpr (std::is_same_v<T, bool>) {
    return bitwise ? bits != 0 : y != 0;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bitwise ? bits : static_cast<int64_t>(y));
  } else {
    return T(static_cast<float>(y));
  }
}

template <typename T>
void CheckReductions(int rank, const World& world) {
  constexpr bool kWhole = std::is_integral_v<T>;
  std::vector<Reduction> reductions = {Reduction::kSum, Reduction::kProduct, Reduction::kMin,
                                       Reduction::kMax};
  if (kWhole) {
    reductions.insert(reductions.end(), {Reduction::kBand, Reduction::kBor, Reduction::kBxor});
  } else {
    reductions.insert(reductions.end(), {Reduction::kAvg, Reduction::kPremulSum});
  }
  std::vector<T> mine;
  for (int64_t i = 0; i < kElements; ++i) mine.push_back(As<T>(Whole(rank, i)));
  const Tensor x = FromHost<T>(world, mine, {kElements});
  const std::vector<int64_t> rows = {5, 0, 7, 1};
  const std::vector<int64_t> begins = {0, 5, 5, 12};
  std::vector<Tensor> pieces;
  for (size_t k = 0; k < rows.size(); ++k) {
    pieces.push_back(Slice(x, 0, begins[k], begins[k] + rows[k]));
  }
  for (const Reduction reduction : reductions) {
    SCOPED_TRACE(absl::StrCat(ReductionName(reduction), " of ", DTypeName(DTypeOf<T>())));
    const ReduceOp op = reduction == Reduction::kPremulSum ? ReduceOp::PremulSum(FactorOf(rank))
                                                           : ReduceOp(reduction);
    const size_t index = static_cast<size_t>(rank);
    std::vector<T> all;
    for (int64_t i = 0; i < kElements; ++i) all.push_back(Expected<T>(reduction, i));
    const std::vector<T> part(all.begin() + begins[index],
                              all.begin() + begins[index] + rows[index]);
    const auto check = [&] {
      EXPECT_EQ(Values<T>(AllReduce(x, world, op)), all);
      const Tensor reduced = Reduce(x, 2, world, op);
      EXPECT_EQ(reduced.absent(), rank != 2);
      if (rank == 2) {
        EXPECT_EQ(Values<T>(reduced), all);
      }
      EXPECT_EQ(Values<T>(ReduceScatter(pieces, world, op)), part);
      EXPECT_EQ(Values<T>(ReduceScatterTensor(x, world, op, rows)), part);
    };
    check();
    if (kWhole) continue;
    // The same without what a gradient would need; and where only some need it.
    {
      const NoGrad no_grad;
      check();
    }
    if (rank % 2 == 0) {
      check();
    } else {
      const NoGrad no_grad;
      check();
    }
  }
}

TEST_P(Conformance, EveryReductionOfEveryDType) {
  Job job(GetParam(), kMembers);
  job.Run([](int rank, World& world) {
    CheckReductions<float>(rank, world);
    CheckReductions<double>(rank, world);
    CheckReductions<F16>(rank, world);
    CheckReductions<BF16>(rank, world);
    CheckReductions<int8_t>(rank, world);
    CheckReductions<uint8_t>(rank, world);
    CheckReductions<int16_t>(rank, world);
    CheckReductions<int32_t>(rank, world);
    CheckReductions<int64_t>(rank, world);
    CheckReductions<bool>(rank, world);
  });
}

// Every byte goes where it should, whatever it means.
template <typename T>
void CheckMoves(int rank, const World& world) {
  SCOPED_TRACE(DTypeName(DTypeOf<T>()));
  const auto values = [](int r, int64_t size) {
    std::vector<T> v;
    for (int64_t i = 0; i < size; ++i) v.push_back(As<T>(Whole(r, i)));
    return v;
  };
  const std::vector<int64_t> rows = {1, 4, 0};
  const auto own = [&](int r) { return values(r, rows[static_cast<size_t>(r)]); };
  const Tensor x = FromHost<T>(world, own(rank), {rows[static_cast<size_t>(rank)]});
  const std::vector<Tensor> all = AllGather(x, world, rows);
  std::vector<T> joined;
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(Values<T>(all[static_cast<size_t>(r)]), own(r));
    const std::vector<T> piece = own(r);
    joined.insert(joined.end(), piece.begin(), piece.end());
  }
  EXPECT_EQ(Values<T>(AllGatherIntoTensor(x, world, rows)), joined);
  const Tensor whole = rank == 1 ? FromHost<T>(world, joined, {5}) : Tensor();
  EXPECT_EQ(Values<T>(ScatterTensor(whole, DTypeOf<T>(), x.shape(), 1, world, rows)), own(rank));
  // Numbers beside tensors travel with the run.
  if (DTypeOf<T>() != DType::kBool) {
    std::vector<T> more;
    for (int64_t i = 0; i < rows[static_cast<size_t>(rank)]; ++i) {
      more.push_back(As<T>(Whole(rank, i) * 2));
    }
    EXPECT_EQ(Values<T>(x * 2), more);
  }
}

TEST_P(Conformance, EveryDTypeMoves) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    CheckMoves<float>(rank, world);
    CheckMoves<double>(rank, world);
    CheckMoves<F16>(rank, world);
    CheckMoves<BF16>(rank, world);
    CheckMoves<int8_t>(rank, world);
    CheckMoves<uint8_t>(rank, world);
    CheckMoves<int16_t>(rank, world);
    CheckMoves<int32_t>(rank, world);
    CheckMoves<int64_t>(rank, world);
    CheckMoves<bool>(rank, world);
  });
}

// --- Ranks that want other things ---------------------------------------------------------------

Tensor Leaf(const World& world, const std::vector<double>& values) {
  return Upload(world, values).RequireGrad();
}

// x = {2, r, 3}: ranks 0 and 2 ask for gradients; rank 1 recorded nothing.
TEST_P(Conformance, ARankWithoutATapeHasNoPartInTheGradientOfAnExtreme) {
  Job job(GetParam(), 3);
  for (const Reduction reduction : {Reduction::kMax, Reduction::kMin, Reduction::kProduct}) {
    SCOPED_TRACE(ReductionName(reduction));
    job.Run([&](int rank, World& world) {
      const Tensor x = Leaf(world, {2, 1.0 * rank, 3});
      if (rank == 1) {
        const NoGrad no_grad;
        EXPECT_TRUE(AllReduce(x, world, reduction).Wait().ok());
        return;
      }
      const Tensor y = AllReduce(x, world, reduction);
      ASSERT_TRUE(Backward(Sum(y * (rank + 1))).ok());
      // The weights of the losses: 1 + 3.
      std::vector<double> expected = {4.0 / 3, 0, 4.0 / 3};
      if (reduction == Reduction::kMax && rank == 2) expected[1] = 4;
      if (reduction == Reduction::kMin && rank == 0) expected[1] = 4;
      // 2 * 2, the others' middle elements, 3 * 3.
      if (reduction == Reduction::kProduct) expected = {16, rank == 0 ? 8.0 : 0.0, 36};
      const std::vector<double> g = Values<double>(x.grad());
      ASSERT_EQ(g.size(), 3u);
      for (size_t i = 0; i < 3; ++i) EXPECT_DOUBLE_EQ(g[i], expected[i]) << "element " << i;
    });
  }
}

TEST_P(Conformance, ARankThatDropsItsResultCountsAsZerosInTheGradientOfAProduct) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const Tensor x = Leaf(world, {2.0 + rank});
    Tensor y = AllReduce(x, world, Reduction::kProduct);
    const Tensor z = ReduceScatterTensor(Leaf(world, {1, 1, 1}), world, Reduction::kMax);
    if (rank == 1) {
      y = Tensor();
      return;
    }
    ASSERT_TRUE(Backward(Sum(y * (rank + 1))).ok());
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(4 * 24 / (2 + rank)));
  });
}

// Nobody off the root computes anything: what they take part in is named by the absent result.
TEST_P(Conformance, AbsentResultsLeadToTheGradientsOfReductions) {
  Job job(GetParam(), 3);
  for (const bool compiled : {false, true}) {
    job.Run([&](int rank, World& world) {
      const std::vector<Tensor> in = {Leaf(world, {2.0 + rank}), Leaf(world, {2.0 + rank})};
      absl::Status inner;
      const auto step = [&](const std::vector<Tensor>& x) {
        const Tensor y = Reduce(x[0], 1, world, Reduction::kProduct);
        const Tensor z = Reduce(x[1], 1, world, Reduction::kMin);
        const auto g = Grad({y.absent() ? y : Sum(y), z.absent() ? z : Sum(z * 5)}, x);
        inner = g.status();
        return g.ok() ? *g : std::vector<Tensor>{Tensor()};
      };
      std::vector<Tensor> g;
      if (compiled) {
        const auto run = Compile(step).Run(in);
        ASSERT_TRUE(run.ok()) << run.status() << inner;
        g = *run;
      } else {
        g = step(in);
      }
      ASSERT_TRUE(inner.ok()) << inner;
      EXPECT_THAT(Values<double>(g[0]), ElementsAre(24 / (2 + rank)));
      EXPECT_THAT(Values<double>(g[1]), ElementsAre(rank == 0 ? 5 : 0));
    });
  }
}

// --- Coalesced ----------------------------------------------------------------------------------

// Not whole numbers, so that another order of anything shows; on a group in another order than the
// world's.
TEST_P(Conformance, CoalescedCallsGiveTheBitsOfSingleOnes) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    if (rank == 1) return;
    const Group group = *world.NewGroup({2, 0});
    std::vector<Tensor> xs[2];
    std::vector<Tensor> ys[2];
    for (const bool coalesced : {false, true}) {
      std::vector<Tensor>& x = xs[coalesced];
      std::vector<Tensor>& y = ys[coalesced];
      for (int i = 0; i < 40; ++i) {
        std::vector<float> values;
        for (int k = 0; k <= 2 * (i % 5); ++k) values.push_back(0.1f * (rank + 1) + 0.7f * k + i);
        x.push_back(Upload(world, values).RequireGrad());
      }
      if (coalesced) {
        y = AllReduceCoalesced(x, group, ReduceOp::PremulSum(0.3));
        for (const Tensor& t : AllReduceCoalesced(y, group, Reduction::kProduct)) y.push_back(t);
      } else {
        for (const Tensor& t : x) y.push_back(AllReduce(t, group, ReduceOp::PremulSum(0.3)));
        for (int i = 0; i < 40; ++i) y.push_back(AllReduce(y[i], group, Reduction::kProduct));
      }
      Tensor loss = Sum(y[0]);
      for (size_t i = 1; i < y.size(); ++i) loss = loss + Sum(y[i] * (1.0f + 0.01f * i));
      ASSERT_TRUE(Backward(loss).ok());
    }
    for (size_t i = 0; i < ys[0].size(); ++i) {
      EXPECT_EQ(Values<float>(ys[0][i]), Values<float>(ys[1][i])) << i;
    }
    for (size_t i = 0; i < xs[0].size(); ++i) {
      EXPECT_EQ(Values<float>(xs[0][i].grad()), Values<float>(xs[1][i].grad())) << i;
    }
  });
}

TEST_P(Conformance, ManySmallTensorsGoTogether) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const NoGrad no_grad;
    for (int step = 0; step < 3; ++step) {
      std::vector<Tensor> xs;
      for (int i = 0; i < 300; ++i) xs.push_back(Scalar<float>(world, rank + i + step));
      const std::vector<Tensor> ys = AllReduceCoalesced(xs, world);
      ASSERT_EQ(ys.size(), xs.size());
      for (int i = 0; i < 300; ++i) {
        EXPECT_THAT(Values<float>(ys[i]), ElementsAre(2 * (i + step) + 1));
      }
    }
  });
}

// --- Pieces that do not meet --------------------------------------------------------------------

TEST_P(Conformance, RowsThatDoNotMeetAreAMismatchOnEveryRank) {
  Job job(GetParam(), 2);
  using Call = std::function<Tensor(int rank, const World& world)>;
  const struct {
    const char* name;
    Call call;
  } cases[] = {
      {"all_gather",
       [](int rank, const World& w) {
         // Rank 1 has two rows; rank 0 expects three.
         return AllGather(Upload(w, std::vector<float>(rank + 1)), w,
                          rank == 0 ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{1, 2})[0];
       }},
      {"all_to_all",
       [](int rank, const World& w) {
         const std::vector<int64_t> rows = {1, 1};
         return AllToAll(
             {Upload(w, std::vector<float>(1)), Upload(w, std::vector<float>(rank == 0 ? 2 : 1))},
             w, rows)[0];
       }},
      {"all_to_all_single",
       [](int /*rank*/, const World& w) {
         // Rank 0 expects two rows of rank 1, which sends it one; rank 1 one, and is sent two.
         return AllToAllSingle(Upload(w, std::vector<float>(3)), w, {1, 2}, {1, 2});
       }},
      {"scatter",
       [](int rank, const World& w) {
         std::vector<Tensor> xs;
         if (rank == 0) xs = {Upload(w, std::vector<float>(1)), Upload(w, std::vector<float>(2))};
         return Scatter(xs, DType::kF32, {rank == 0 ? 1 : 5}, 0, w);
       }},
      {"gather_into_tensor",
       [](int rank, const World& w) {
         return GatherIntoTensor(Upload(w, std::vector<float>(rank + 1)), 0, w,
                                 rank == 0 ? std::vector<int64_t>{1, 1} : std::vector<int64_t>{});
       }},
      {"reduction",
       [](int rank, const World& w) {
         return AllReduce(Scalar<float>(w, 1), w, rank == 0 ? Reduction::kMin : Reduction::kMax);
       }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    job.Run([&](int rank, World& world) {
      const absl::Status status = c.call(rank, world).Wait();
      EXPECT_EQ(ErrorOf(status).reason, Reason::kMismatch) << status;
      EXPECT_THAT(Values<float>(AllReduce(Scalar<float>(world, 1), world)), ElementsAre(2));
    });
  }
}

TEST_P(Conformance, ACallThatIsRefusedOnOneRankIsHeardOfByTheOthers) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const Tensor x = Upload(world, std::vector<float>(3));
    const Tensor y = rank == 1 ? AllToAll({x, x}, world)[0] : AllToAll({x, x, x}, world)[0];
    const absl::Status status = y.Wait();
    EXPECT_EQ(ErrorOf(status).reason, rank == 1 ? Reason::kBadType : Reason::kPeerRefused)
        << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("one input for each of 3 members"));
    EXPECT_THAT(Values<float>(AllReduce(Scalar<float>(world, 1), world)), ElementsAre(3));
  });
}

// --- Rows that are known when it runs -----------------------------------------------------------

// The splits of a step change with every step: the same compiled step each time.
TEST_P(Conformance, RaggedAllToAllGoesThereAndBackInOneGraph) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const Compiled step = Compile([&world](const std::vector<Tensor>& in) {
      const Ragged there = AllToAllRagged(in[0], in[1], 8, world);
      // An expert: squares what came, and sends it back.
      const Ragged back = AllToAllRagged(there.values * there.values, there.counts, 6, world);
      const auto g = Grad({Sum(back.values * in[2])}, {in[0]});
      return std::vector<Tensor>{back.values, back.counts, g.ok() ? (*g)[0] : Tensor()};
    });
    for (int i = 0; i < 3; ++i) {
      std::vector<int64_t> counts;
      std::vector<double> x, weights, squares, gradient;
      for (int k = 0; k < 3; ++k) counts.push_back((rank + k + i) % 3);
      int64_t sent = 0;
      for (const int64_t n : counts) sent += n;
      for (int64_t row = 0; row < 6; ++row) {
        const double v = 1.0 + rank + static_cast<double>(row);
        x.push_back(v);
        weights.push_back(static_cast<double>(row - 2));
        squares.push_back(row < sent ? v * v : 0);
        gradient.push_back(row < sent ? 2 * v * weights.back() : 0);
      }
      const auto y = step.Run({FromHost<double>(world, x, {6, 1}).RequireGrad(),
                               FromHost<int64_t>(world, counts, {3}),
                               FromHost<double>(world, weights, {6, 1})});
      ASSERT_TRUE(y.ok()) << y.status();
      EXPECT_EQ(Values<double>((*y)[0]), squares);
      EXPECT_EQ(Values<int64_t>((*y)[1]), counts);
      EXPECT_EQ(Values<double>((*y)[2]), gradient);
    }
    EXPECT_EQ(step.traces(), 1);
  });
}

TEST_P(Conformance, RaggedFormsMoveAndReduceWhatTheCountsSay) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const double v = rank + 1;
    const Tensor x = Leaf(world, {v, 10 * v, 100 * v});
    const Tensor z = Leaf(world, {1, 2, 3, 4});
    const auto counts = [&](const std::vector<int64_t>& c) {
      return FromHost<int64_t>(world, c, {static_cast<int64_t>(c.size())});
    };
    const Ragged all = AllGatherRagged(x, counts({rank}), 4, world);
    const Ragged one = GatherRagged(x, counts({3 - rank}), 6, 1, world);
    const Ragged part =
        ScatterRagged(rank == 2 ? z : Tensor(), rank == 2 ? counts({1, 0, 3}) : Tensor(),
                      DType::kF64, {3}, 2, world);
    const Ragged most = ReduceScatterRagged(z * v, counts({2, 1, 1}), 2, world, Reduction::kMax);
    EXPECT_EQ(Values<double>(all.values), (std::vector<double>{2, 3, 30, 0}));
    EXPECT_EQ(Values<int64_t>(all.counts), (std::vector<int64_t>{0, 1, 2}));
    if (rank == 1) {
      EXPECT_EQ(Values<double>(one.values), (std::vector<double>{1, 10, 100, 2, 20, 3}));
    }
    EXPECT_EQ(Values<int64_t>(part.counts), std::vector<int64_t>{rank == 0   ? 1
                                                                 : rank == 1 ? 0
                                                                             : 3});
    const std::vector<double> expected[] = {{3, 6}, {9, 0}, {12, 0}};
    EXPECT_EQ(Values<double>(most.values), expected[rank]);
    ASSERT_TRUE(Backward({Sum(all.values), Sum(part.values * 2), Sum(most.values * 7),
                          rank == 1 ? Sum(one.values * 5) : one.values})
                    .ok());
    const std::vector<double> gradients[] = {{5, 5, 5}, {8, 5, 0}, {8, 3, 0}};
    EXPECT_EQ(Values<double>(x.grad()), gradients[rank]);
    EXPECT_EQ(Values<double>(z.grad()), std::vector<double>(4, rank == 2 ? 23 : 0));
  });
}

// A result that all ranks get is one only where all have as much room for it.
TEST_P(Conformance, RaggedRoomMayDifferFromRankToRank) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    for (int round = 0; round < 8; ++round) {
      // Rank 1, and then another one, has the least.
      const int64_t room = 2000 + 1500 * ((rank + 2 + round) % 3);
      const Tensor x = Leaf(world, {rank + 1.0, rank + 11.0});
      const Tensor count = FromHost<int64_t>(world, {rank == 2 ? 2 : 1}, {1});
      const Ragged all = AllGatherRagged(x, count, room, world);
      std::vector<double> expected = {1, 2, 3, 13};
      expected.resize(static_cast<size_t>(room), 0);
      EXPECT_EQ(Values<double>(all.values), expected);
      EXPECT_EQ(Values<int64_t>(all.counts), (std::vector<int64_t>{1, 1, 2}));

      // The gradient of rows that no piece takes is nothing, however many a rank has.
      std::vector<double> rows(static_cast<size_t>(room), 5);
      Tensor z = FromHost<double>(world, rows, {room}).RequireGrad();
      const Tensor counts = FromHost<int64_t>(world, {1, 2, 1}, {3});
      const Ragged part = ReduceScatterRagged(z, counts, 2, world);
      ASSERT_TRUE(Backward({Sum(part.values * (rank + 1.0)), Sum(all.values)}).ok());
      std::vector<double> gradient = {1, 2, 2, 3};
      gradient.resize(static_cast<size_t>(room), 0);
      EXPECT_EQ(Values<double>(z.grad()), gradient);
      EXPECT_EQ(Values<double>(x.grad()), (std::vector<double>{3, rank == 2 ? 3.0 : 0.0}));
    }
  });
}

TEST_P(Conformance, ARaggedProductHasGradientsOfBothOrders) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const Tensor z = Leaf(world, {1, 2, 3, 4});
    const Tensor counts = FromHost<int64_t>(world, {2, 1, 1}, {3});
    const Ragged y = ReduceScatterRagged(z * (rank + 1.0), counts, 2, world, Reduction::kProduct);
    const std::vector<double> products[] = {{6, 48}, {162, 0}, {384, 0}};
    EXPECT_EQ(Values<double>(y.values), products[rank]);
    BackwardOptions create;
    create.create_graph = true;
    // What stands behind the rows that came reaches nobody.
    const auto g = Grad({Sum((y.values + 1.0) * (rank + 1.0))}, {z}, create);
    ASSERT_TRUE(g.ok()) << g.status();
    EXPECT_EQ(Values<double>((*g)[0]), (std::vector<double>{6, 24, 108, 288}));
    ASSERT_TRUE(Backward(Sum((*g)[0])).ok());
    EXPECT_EQ(Values<double>(z.grad()), (std::vector<double>{12, 24, 72, 144}));
  });
}

TEST_P(Conformance, RaggedRowsThatDoNotFitAreAnErrorOnEveryRank) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    for (const int64_t sent : {5, -1, 3}) {
      const Tensor x = Upload(world, std::vector<float>(4));
      // Rank 1 sends more than it has, less than nothing, or more than there is room for.
      const Ragged y =
          AllToAllRagged(x, FromHost<int64_t>(world, {rank == 1 ? sent : 1, 1}, {2}), 3, world);
      const absl::Status status = y.values.Wait();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << sent << ": " << status;
      EXPECT_THAT(Values<float>(AllReduce(Scalar<float>(world, 1), world)), ElementsAre(2));
    }
  });
}

// --- The devices of one session -----------------------------------------------------------------

class OneSession {
 public:
  explicit OneSession(const ConformanceParam& param, int devices) {
    ClusterOptions options;
    options.devices = devices;
    options.seed = TestSeed();
    absl::StatusOr<std::unique_ptr<Cluster>> cluster = param.open(options);
    EXPECT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    std::vector<int> all;
    for (int d = 0; d < devices; ++d) all.push_back(d);
    absl::StatusOr<Session> session = cluster_->Open(all);
    EXPECT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    absl::StatusOr<parallel::DeviceGroup> group = parallel::DeviceGroup::Create(session_);
    EXPECT_TRUE(group.ok()) << group.status();
    devices_ = *std::move(group);
  }
  const Session& session() const { return session_; }
  const parallel::DeviceGroup& devices() const { return devices_; }

 private:
  std::unique_ptr<Cluster> cluster_;
  Session session_;
  parallel::DeviceGroup devices_;
};

TEST_P(Conformance, DevicesOfOneSessionBroadcastAndAdd) {
  const OneSession one(GetParam(), 3);
  const Tensor x = FromHost<double>(one.session().device(1), {1, 2}, {2}).RequireGrad();
  const Tensor frozen = FromHost<int64_t>(one.session().device(1), {5}, {});
  const std::vector<std::vector<Tensor>> y = BroadcastCoalesced({x, frozen}, one.devices(), 24);
  std::vector<Tensor> cubes;
  for (int d = 0; d < 3; ++d) {
    EXPECT_EQ(y[d][0].device().slot(), d);
    EXPECT_THAT(Values<int64_t>(y[d][1]), ElementsAre(5));
    EXPECT_FALSE(y[d][1].requires_grad());
    cubes.push_back(y[d][0] * y[d][0] * y[d][0] * (d + 1));
  }
  const Tensor sum = ReduceAdd(cubes, one.devices(), 2);
  EXPECT_THAT(Values<double>(sum), ElementsAre(6, 48));
  BackwardOptions create;
  create.create_graph = true;
  const auto g = Grad({Sum(sum)}, {x}, create);
  ASSERT_TRUE(g.ok()) << g.status();
  EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(18, 72));
  ASSERT_TRUE(Backward(Sum((*g)[0])).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(36, 72));
}

TEST_P(Conformance, DevicesOfOneSessionScatterAndGather) {
  const OneSession one(GetParam(), 3);
  const std::vector<double> values = {1, 2, 3, 4, 5, 6, 7, 8};
  for (const bool host : {false, true}) {
    parallel::HostTensor memory = parallel::HostTensor::Of(values, {2, 4});
    Tensor x;
    std::vector<Tensor> y;
    if (host) {
      const std::vector<Tensor> straight = Scatter(memory, one.devices(), {1, 0, 3}, -1);
      EXPECT_THAT(Values<double>(straight[2]), ElementsAre(2, 3, 4, 6, 7, 8));
      memory.RequireGrad(one.devices());
      x = memory.tensor();
      y = Scatter(memory, one.devices(), {}, 1);
    } else {
      x = FromHost<double>(one.session().device(2), values, {2, 4}).RequireGrad();
      y = Scatter(x, one.devices(), {}, 1);
    }
    // Two for each; none for the last device.
    ASSERT_EQ(y.size(), 2u);
    EXPECT_THAT(Values<double>(y[1]), ElementsAre(3, 4, 7, 8));
    const Tensor z = Gather({y[0] * y[0], y[1] * y[1] * y[1]}, one.devices(), 1, -1);
    EXPECT_THAT(Values<double>(z), ElementsAre(1, 4, 27, 64, 25, 36, 343, 512));
    ASSERT_TRUE(Backward(Sum(z)).ok());
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(2, 4, 27, 48, 10, 12, 147, 192));
    const parallel::HostTensor home = GatherToHost(y, one.devices(), 1);
    const absl::StatusOr<std::vector<double>> back = home.Read<double>();
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(*back, values);
  }
}

// One device's part of the loss alone: nobody waits for the others'.
TEST_P(Conformance, AResultOfOneDeviceThatIsNotUsedHoldsNobodyUp) {
  const OneSession one(GetParam(), 3);
  const Tensor x = FromHost<double>(one.session(), {3}, {1}).RequireGrad();
  const std::vector<Tensor> y = Broadcast(x, one.devices());
  ASSERT_TRUE(Backward(Sum(y[1] * y[1])).ok());
  EXPECT_THAT(Values<double>(x.grad()), ElementsAre(6));
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
