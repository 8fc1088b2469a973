// Every collective as the SDK records it: forms, rows, dimensions, reductions, what its tape keeps,
// and what it refuses.
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "client/testing/fake_daemon.h"
#include "client/testing/ranks.h"
#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::ElementsAre;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::Ranks;
using testing::Values;

using Doubles = std::vector<double>;

Tensor Leaf(const DeviceRef& device, const Doubles& values, const Shape& shape) {
  return FromHost<double>(device, values, shape).RequireGrad();
}
Tensor Leaf(const DeviceRef& device, const Doubles& values) {
  return Leaf(device, values, {static_cast<int64_t>(values.size())});
}
Tensor Row(const DeviceRef& device, const Doubles& values) {
  return FromHost<double>(device, values, {static_cast<int64_t>(values.size())});
}

// Calls `f` for each rank, in one thread: nothing waits before all have called.
template <typename F>
auto Each(const Ranks& ranks, const F& f) {
  std::vector<decltype(f(0, ranks.worlds[0]))> results;
  for (int r = 0; r < ranks.size(); ++r) results.push_back(f(r, ranks.worlds[r]));
  return results;
}

// Both losses are 40,000 times the result: their sum has no room in f16, what comes of it has.
TEST(CollectivesTest, SumsOfHalfGradientsAreRoundedWhenTheyAreGradients) {
  const struct {
    ReduceOp op;
    std::vector<float> x, gradient;  // by rank
  } cases[] = {{Reduction::kMax, {1, 1}, {40000, 40000}},
               {Reduction::kMin, {1, 1}, {40000, 40000}},
               {ReduceOp::PremulSum(0.5), {1, 1}, {40000, 40000}},
               {Reduction::kAvg, {1, 1}, {40000, 40000}},
               {Reduction::kProduct, {0.5, 0}, {0, 40000}},
               {Reduction::kProduct, {0.25, 0.5}, {40000, 20000}}};
  for (const auto& test : cases) {
    FakeDaemon daemon;
    Ranks ranks(2, &daemon);
    std::vector<Tensor> x;
    std::vector<Tensor> y;
    for (int r = 0; r < 2; ++r) {
      x.push_back(FromHost<F16>(ranks.worlds[r], {F16(test.x[r])}, {1}).RequireGrad());
      y.push_back(AllReduce(x[r], ranks.worlds[r], test.op));
    }
    for (int r = 0; r < 2; ++r) ASSERT_TRUE(Backward(Sum(y[r] * 40000)).ok());
    for (int r = 0; r < 2; ++r) {
      EXPECT_EQ(x[r].grad().dtype(), DType::kF16);
      EXPECT_EQ(float(Values<F16>(x[r].grad())[0]), test.gradient[r])
          << "case " << &test - cases << ", rank " << r;
    }
  }
}

// --- Moves --------------------------------------------------------------------------------------

TEST(CollectivesTest, GatherGivesTheRootEveryTensor) {
  FakeDaemon daemon;
  Ranks ranks(3, &daemon);
  const auto even =
      Each(ranks, [](int r, const World& w) { return Gather(Row(w, {1.0 * r}), 1, w); });
  const auto uneven = Each(ranks, [](int r, const World& w) {
    return Gather(Row(w, Doubles(static_cast<size_t>(r), r)), 2, w,
                  r == 2 ? std::vector<int64_t>{0, 1, 2} : std::vector<int64_t>{});
  });
  for (int r = 0; r < 3; ++r) {
    ASSERT_EQ(even[r].size(), r == 1 ? 3u : 1u);
    if (r != 1) {
      EXPECT_TRUE(even[r][0].absent());
      EXPECT_TRUE(even[r][0].Wait().ok()) << even[r][0].Wait();
    }
  }
  for (int k = 0; k < 3; ++k) {
    EXPECT_THAT(Values<double>(even[1][k]), ElementsAre(k));
    EXPECT_EQ(uneven[2][k].shape(), Shape({k}));
    EXPECT_EQ(Values<double>(uneven[2][k]), Doubles(static_cast<size_t>(k), k));
  }
}

TEST(CollectivesTest, ScatterGivesEachMemberItsPiece) {
  FakeDaemon daemon;
  Ranks ranks(3, &daemon);
  const auto y = Each(ranks, [](int r, const World& w) {
    std::vector<Tensor> xs;
    if (r == 2) xs = {Row(w, {}), Row(w, {1}), Row(w, {2, 3})};
    return Scatter(xs, DType::kF64, {r}, 2, w);
  });
  EXPECT_THAT(Values<double>(y[0]), ElementsAre());
  EXPECT_THAT(Values<double>(y[1]), ElementsAre(1));
  EXPECT_THAT(Values<double>(y[2]), ElementsAre(2, 3));
}

TEST(CollectivesTest, AllToAllTakesPiecesOfAnyRows) {
  FakeDaemon daemon;
  Ranks ranks(3, &daemon);
  // Rank r sends (r + k) % 3 rows of value 10 r + k to member k.
  const auto y = Each(ranks, [](int r, const World& w) {
    std::vector<Tensor> xs;
    std::vector<int64_t> rows;
    for (int k = 0; k < 3; ++k) {
      xs.push_back(Row(w, Doubles(static_cast<size_t>((r + k) % 3), 10 * r + k)));
      rows.push_back((r + k) % 3);
    }
    return AllToAll(xs, w, rows);
  });
  const auto z = Each(ranks, [](int r, const World& w) {
    Doubles x;
    std::vector<int64_t> rows;
    for (int k = 0; k < 3; ++k) {
      x.insert(x.end(), static_cast<size_t>((r + k) % 3), 10 * r + k);
      rows.push_back((r + k) % 3);
    }
    return AllToAllSingle(Row(w, x), w, rows, rows);
  });
  const auto even = Each(ranks, [](int r, const World& w) {
    return AllToAllSingle(Row(w, {10.0 * r, 10.0 * r + 1, 10.0 * r + 2}), w);
  });
  for (int r = 0; r < 3; ++r) {
    Doubles all;
    for (int k = 0; k < 3; ++k) {
      const Doubles piece(static_cast<size_t>((r + k) % 3), 10 * k + r);
      EXPECT_EQ(Values<double>(y[r][k]), piece) << r << " from " << k;
      all.insert(all.end(), piece.begin(), piece.end());
    }
    EXPECT_EQ(Values<double>(z[r]), all);
    EXPECT_THAT(Values<double>(even[r]), ElementsAre(r, 10 + r, 20 + r));
  }
}

TEST(CollectivesTest, FormsOfOneTensorGoAlongAnyDimension) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  // [2, 3, 2] as two pieces along dimension 1, of one and two rows.
  const Doubles whole = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  const Doubles first = {0, 1, 6, 7};
  const Doubles second = {2, 3, 4, 5, 8, 9, 10, 11};
  for (const int64_t dim : {1, -2}) {
    const auto mine = [&](int r, const World& w) {
      return r == 0 ? FromHost<double>(w, first, {2, 1, 2})
                    : FromHost<double>(w, second, {2, 2, 2});
    };
    const std::vector<int64_t> rows = {1, 2};
    const auto all = Each(ranks, [&](int r, const World& w) {
      return AllGatherIntoTensor(mine(r, w), w, rows, dim);
    });
    const auto gathered = Each(ranks, [&](int r, const World& w) {
      return GatherIntoTensor(mine(r, w), 1, w, rows, dim);
    });
    const auto scattered = Each(ranks, [&](int r, const World& w) {
      const Tensor x = r == 0 ? FromHost<double>(w, whole, {2, 3, 2}) : Tensor();
      return ScatterTensor(x, DType::kF64, {2, 1 + r, 2}, 0, w, rows, dim);
    });
    const auto reduced = Each(ranks, [&](int r, const World& w) {
      return ReduceScatterTensor(FromHost<double>(w, whole, {2, 3, 2}) * (r + 1), w, {}, rows, dim);
    });
    for (int r = 0; r < 2; ++r) {
      EXPECT_EQ(all[r].shape(), Shape({2, 3, 2}));
      EXPECT_EQ(Values<double>(all[r]), whole);
      EXPECT_EQ(scattered[r].shape(), Shape({2, 1 + r, 2}));
      EXPECT_EQ(Values<double>(scattered[r]), r == 0 ? first : second);
      Doubles tripled = r == 0 ? first : second;
      for (double& x : tripled) x *= 3;
      EXPECT_EQ(Values<double>(reduced[r]), tripled);
    }
    EXPECT_TRUE(gathered[0].absent());
    EXPECT_EQ(Values<double>(gathered[1]), whole);
  }
}

TEST(CollectivesTest, PiecesWithoutDimensionsAreRowsOfOneTensor) {
  FakeDaemon daemon;
  Ranks ranks(3, &daemon);
  const auto all = Each(
      ranks, [](int r, const World& w) { return AllGatherIntoTensor(Scalar<double>(w, r), w); });
  const auto one = Each(
      ranks, [](int r, const World& w) { return GatherIntoTensor(Scalar<double>(w, r), 0, w); });
  const auto list = Each(ranks, [](int r, const World& w) {
    return AllToAll({Scalar<double>(w, r), Scalar<double>(w, r), Scalar<double>(w, r)}, w);
  });
  for (int r = 0; r < 3; ++r) {
    EXPECT_THAT(Values<double>(all[r]), ElementsAre(0, 1, 2));
    EXPECT_EQ(list[r][2].shape(), Shape());
    EXPECT_THAT(Values<double>(list[r][2]), ElementsAre(2));
  }
  EXPECT_THAT(Values<double>(one[0]), ElementsAre(0, 1, 2));
}

TEST(CollectivesTest, BothFormsMeetWherePiecesHaveNoDimensions) {
  FakeDaemon daemon;
  Ranks ranks(3, &daemon);
  const NoGrad no_grad;
  const auto all = Each(ranks, [](int r, const World& w) {
    const Tensor x = Scalar<double>(w, r);
    return r == 0 ? AllGatherIntoTensor(x, w) : AllGather(x, w)[2];
  });
  const auto one = Each(ranks, [](int r, const World& w) {
    const Tensor x = Scalar<double>(w, r);
    return r == 0 ? GatherIntoTensor(x, 0, w) : Gather(x, 0, w)[0];
  });
  EXPECT_THAT(Values<double>(all[0]), ElementsAre(0, 1, 2));
  for (int r = 1; r < 3; ++r) EXPECT_THAT(Values<double>(all[r]), ElementsAre(2));
  EXPECT_THAT(Values<double>(one[0]), ElementsAre(0, 1, 2));
}

// Rank 0 gives the same tensor each time: only its rows, or the other inputs, tell.
TEST(CollectivesTest, EqualCallsOfOneLineAreToldApartByRowsAndByEveryInput) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  // One call after the other: the last one is looked at first.
  for (const int64_t n : {2, 3, 2}) {
    const auto all = Each(ranks, [n](int r, const World& w) {
      return AllGatherIntoTensor(Row(w, Doubles(static_cast<size_t>(r == 0 ? 1 : n), r)), w,
                                 {1, n});
    });
    for (int r = 0; r < 2; ++r) {
      ASSERT_EQ(all[r].shape(), Shape({1 + n}));
      EXPECT_EQ(Values<double>(all[r])[static_cast<size_t>(n)], 1);
    }
  }
  for (const int64_t n : {2, 3, 2}) {
    const auto swapped = Each(ranks, [n](int r, const World& w) {
      std::vector<Tensor> xs;
      for (int k = 0; k < 2; ++k) {
        xs.push_back(Row(w, Doubles(static_cast<size_t>(r == k ? 1 : n), r)));
      }
      return AllToAll(xs, w, r == 0 ? std::vector<int64_t>{1, n} : std::vector<int64_t>{n, 1});
    });
    for (int r = 0; r < 2; ++r) {
      EXPECT_EQ(Values<double>(swapped[r][1 - r]), Doubles(static_cast<size_t>(n), 1 - r));
    }
  }
}

TEST(CollectivesTest, RowsThatChangeWithEveryCallDoNotFillTheDaemon) {
  FakeDaemon daemon;
  Ranks ranks(1, &daemon);
  const World& w = ranks.worlds[0];
  const NoGrad no_grad;
  // More than what is kept of one group, and of all of them.
  constexpr int kCalls = 5000;
  const Tensor x = Row(w, {1, 2, 3});
  for (int i = 0; i < kCalls; ++i) {
    const absl::StatusOr<Group> group = i % 500 == 0 ? w.NewGroup({0}) : absl::StatusOr<Group>(w);
    ASSERT_TRUE(group.ok());
    const Tensor y = AllGather(Zeros(w, DType::kF64, {i}), *group, {i})[0];
    EXPECT_EQ(y.shape(), Shape({i}));
    if (i % 100 == 0) {
      EXPECT_THAT(Values<double>(AllToAll({x}, w, {3})[0]), ElementsAre(1, 2, 3));
      EXPECT_LT(daemon.live_graphs(), kCalls / 2) << "after " << i;
    }
  }
}

TEST(CollectivesTest, BatchesOfSendsAndRecvs) {
  FakeDaemon daemon;
  Ranks ranks(3, &daemon);
  const auto y = Each(ranks, [](int r, const World& w) {
    return BatchSendRecv({Transfer::Recv(DType::kF64, {1}, (r + 2) % 3, 5),
                          Transfer::Send(Row(w, {1.0 * r}), (r + 1) % 3, 5),
                          Transfer::Send(Row(w, {1.0 * r, 7}), (r + 2) % 3),
                          Transfer::Recv(DType::kF64, {2}, (r + 1) % 3)},
                         w);
  });
  for (int r = 0; r < 3; ++r) {
    EXPECT_THAT(Values<double>(y[r][0]), ElementsAre((r + 2) % 3));
    EXPECT_TRUE(y[r][1].absent());
    EXPECT_THAT(Values<double>(y[r][3]), ElementsAre((r + 1) % 3, 7));
  }
}

// --- Ragged -------------------------------------------------------------------------------------

Tensor Counts(const DeviceRef& device, const std::vector<int64_t>& counts) {
  return FromHost<int64_t>(device, counts, {static_cast<int64_t>(counts.size())});
}

// Rank r sends r + k rows of value 10 r + k to member k.
TEST(RaggedTest, AllToAllTakesAnotherSplitWithoutAnotherGraph) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    for (const int added_rows : {0, 1}) {
      std::vector<Tensor> x;
      std::vector<Ragged> y;
      for (int r = 0; r < 2; ++r) {
        const World& w = ranks.worlds[r];
        Doubles values;
        for (int k = 0; k < 2; ++k) {
          values.insert(values.end(), static_cast<size_t>(r + k + added_rows), 10 * r + k);
        }
        values.resize(6, 99);  // not sent
        x.push_back(Leaf(w, values, {6, 1}));
        y.push_back(AllToAllRagged(x[r], Counts(w, {r + added_rows, r + 1 + added_rows}), 5, w));
      }
      for (int r = 0; r < 2; ++r) {
        Doubles expected(static_cast<size_t>(r + added_rows), r);
        expected.insert(expected.end(), static_cast<size_t>(r + 1 + added_rows), 10 + r);
        expected.resize(5, 0);
        EXPECT_EQ(y[r].values.shape(), Shape({5, 1}));
        EXPECT_EQ(Values<double>(y[r].values), expected);
        EXPECT_EQ(Values<int64_t>(y[r].counts),
                  (std::vector<int64_t>{r + added_rows, r + 1 + added_rows}));
        EXPECT_FALSE(y[r].counts.requires_grad());
        const absl::Status status =
            Backward(Sum(y[r].values * y[r].values * static_cast<double>(r + 2)));
        ASSERT_TRUE(status.ok()) << status;
      }
      for (int r = 0; r < 2; ++r) {
        Doubles expected;
        for (int k = 0; k < 2; ++k) {
          expected.insert(expected.end(), static_cast<size_t>(r + k + added_rows),
                          2 * (10 * r + k) * (k + 2));
        }
        expected.resize(6, 0);
        EXPECT_EQ(Values<double>(x[r].grad()), expected);
      }
    }
    // Each rank's forward, its gradient, and the local ops between: none for the second split.
    EXPECT_LE(daemon.counts().registered, 2 * 6);
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

TEST(RaggedTest, EveryOtherForm) {
  FakeDaemon daemon;
  {
    Ranks ranks(3, &daemon);
    std::vector<Tensor> x, z;
    std::vector<Ragged> all, one, part, sum;
    for (int r = 0; r < 3; ++r) {
      const World& w = ranks.worlds[r];
      const double v = r + 1;
      x.push_back(Leaf(w, {v, 10 * v, 100 * v}));
      z.push_back(Leaf(w, {1, 2, 3, 4}));
      all.push_back(AllGatherRagged(x[r], Scalar<int64_t>(w, r), 4, w));
      one.push_back(GatherRagged(x[r], Counts(w, {3 - r}), 6, 1, w));
      part.push_back(ScatterRagged(r == 2 ? z[r] : Tensor(),
                                   r == 2 ? Counts(w, {1, 0, 3}) : Tensor(), DType::kF64, {3}, 2,
                                   w));
      sum.push_back(ReduceScatterRagged(z[r] * v, Counts(w, {2, 1, 1}), 2, w, Reduction::kMax));
    }
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(Values<double>(all[r].values), (Doubles{2, 3, 30, 0}));
      EXPECT_EQ(Values<int64_t>(all[r].counts), (std::vector<int64_t>{0, 1, 2}));
      EXPECT_EQ(one[r].values.absent(), r != 1);
      EXPECT_EQ(one[r].counts.absent(), r != 1);
    }
    EXPECT_EQ(Values<double>(one[1].values), (Doubles{1, 10, 100, 2, 20, 3}));
    EXPECT_EQ(Values<double>(part[0].values), (Doubles{1, 0, 0}));
    EXPECT_EQ(Values<double>(part[2].values), (Doubles{2, 3, 4}));
    EXPECT_EQ(Values<int64_t>(part[1].counts), (std::vector<int64_t>{0}));
    EXPECT_EQ(Values<double>(sum[0].values), (Doubles{3, 6}));
    EXPECT_EQ(Values<double>(sum[2].values), (Doubles{12, 0}));
    for (int r = 0; r < 3; ++r) {
      std::vector<Tensor> roots = {Sum(all[r].values), Sum(part[r].values * 2.0),
                                   Sum(sum[r].values * 7.0)};
      roots.push_back(one[r].values.absent() ? one[r].values : Sum(one[r].values * 5.0));
      const absl::Status status = Backward(roots);
      ASSERT_TRUE(status.ok()) << status;
    }
    EXPECT_EQ(Values<double>(x[0].grad()), (Doubles{5, 5, 5}));
    EXPECT_EQ(Values<double>(x[1].grad()), (Doubles{3 + 5, 5, 0}));
    EXPECT_EQ(Values<double>(x[2].grad()), (Doubles{3 + 5, 3, 0}));
    EXPECT_EQ(Values<double>(z[0].grad()), (Doubles{0, 0, 0, 0}));
    EXPECT_EQ(Values<double>(z[2].grad()), (Doubles{2 + 21, 2 + 21, 2 + 21, 2 + 21}));
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

// The gradient goes by the counts of its call, whatever the trainer's own memory holds by then.
TEST(RaggedTest, CountsInMappedMemoryMayBeRefilled) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    std::vector<Tensor> x;
    std::vector<MappedTensor<int64_t>> counts;
    std::vector<std::vector<Tensor>> y(2);
    for (int r = 0; r < 2; ++r) {
      x.push_back(Leaf(ranks.worlds[r], {1.0 + r, 10.0 + r, 100.0 + r}, {3, 1}));
      absl::StatusOr<MappedTensor<int64_t>> mapped = Map<int64_t>(ranks.worlds[r], {2});
      ASSERT_TRUE(mapped.ok());
      counts.push_back(*std::move(mapped));
    }
    // Rank 0 gets so many rows of each rank; rank 1 one.
    for (const int64_t rows : {1, 2}) {
      for (int r = 0; r < 2; ++r) {
        counts[r][0] = rows;
        counts[r][1] = 1;
        y[r].push_back(AllToAllRagged(x[r], counts[r], 4, ranks.worlds[r]).values);
      }
      for (int r = 0; r < 2; ++r) ASSERT_TRUE(y[r].back().Wait().ok());
    }
    EXPECT_EQ(Values<double>(y[0][0]), (Doubles{1, 2, 0, 0}));
    EXPECT_EQ(Values<double>(y[0][1]), (Doubles{1, 10, 2, 11}));
    EXPECT_EQ(Values<double>(y[1][0]), (Doubles{10, 11, 0, 0}));
    EXPECT_EQ(Values<double>(y[1][1]), (Doubles{100, 101, 0, 0}));
    for (int r = 0; r < 2; ++r) {
      counts[r][0] = 77;
      const double weight = r + 1;
      const absl::Status status = Backward({Sum(y[r][0] * weight), Sum(y[r][1] * (10 * weight))});
      ASSERT_TRUE(status.ok()) << status;
    }
    for (int r = 0; r < 2; ++r) {
      // To rank 0, first 1 and then 2 rows; to rank 1 the row behind these.
      EXPECT_EQ(Values<double>(x[r].grad()), (Doubles{1 + 10, 2 + 10, 20}));
    }
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

TEST(RaggedTest, BadInputIsRefused) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const World& w = ranks.worlds[0];
  const Tensor x = Row(w, {1, 2});
  const Tensor two = Counts(w, {1, 1});
  const struct {
    const char* text;
    std::function<Ragged()> call;
  } cases[] = {
      {"i64[2] as input 1, the rows that are sent, got f64[2]",
       [&] { return AllToAllRagged(x, x, 2, w); }},
      {"i64[1] as input 1", [&] { return AllGatherRagged(x, two, 2, w); }},
      {"an undefined one", [&] { return AllToAllRagged(x, Tensor(), 2, w); }},
      {"a tensor with rows", [&] { return AllToAllRagged(Scalar<double>(w, 1), two, 2, w); }},
      {"rows as the output's, got -1", [&] { return AllToAllRagged(x, two, -1, w); }},
      {"rows like those of f32[2], which the root says, got f64[2]",
       [&] { return ScatterRagged(x, two, DType::kF32, {2}, 0, w); }},
      {"a group, got none", [&] { return AllToAllRagged(x, two, 2, Group()); }},
  };
  for (const auto& c : cases) {
    const Ragged y = c.call();
    EXPECT_FALSE(y.values.status().ok()) << c.text;
    EXPECT_THAT(std::string(y.values.status().message()), HasSubstr(c.text));
    EXPECT_FALSE(y.counts.Wait().ok());
  }
}

// --- Reductions ---------------------------------------------------------------------------------

// x_r = {2, r, -1} of each rank r of 3.
const struct {
  Reduction reduction;
  Doubles all;
} kReductions[] = {
    {Reduction::kSum, {6, 3, -3}},     {Reduction::kAvg, {2, 1, -1}},
    {Reduction::kProduct, {8, 0, -1}}, {Reduction::kMin, {2, 0, -1}},
    {Reduction::kMax, {2, 2, -1}},     {Reduction::kPremulSum, {12, 8, -6}},
};

ReduceOp OpFor(Reduction reduction, int rank) {
  return reduction == Reduction::kPremulSum ? ReduceOp::PremulSum(rank + 1) : ReduceOp(reduction);
}

TEST(CollectivesTest, EveryReductionInEveryForm) {
  FakeDaemon daemon;
  Ranks ranks(3, &daemon);
  for (const auto& c : kReductions) {
    SCOPED_TRACE(std::string(ReductionName(c.reduction)));
    const auto x = [](int r, const World& w) { return Leaf(w, {2, 1.0 * r, -1}); };
    const auto piece = [&](int r, const World& w, int64_t i) {
      return Slice(x(r, w), 0, i, i + 1);
    };
    const auto all = Each(
        ranks, [&](int r, const World& w) { return AllReduce(x(r, w), w, OpFor(c.reduction, r)); });
    const auto one = Each(
        ranks, [&](int r, const World& w) { return Reduce(x(r, w), 1, w, OpFor(c.reduction, r)); });
    const auto list = Each(ranks, [&](int r, const World& w) {
      return ReduceScatter({piece(r, w, 0), piece(r, w, 1), piece(r, w, 2)}, w,
                           OpFor(c.reduction, r));
    });
    const auto tensor = Each(ranks, [&](int r, const World& w) {
      return ReduceScatterTensor(x(r, w), w, OpFor(c.reduction, r));
    });
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(Values<double>(all[r]), c.all);
      EXPECT_EQ(one[r].absent(), r != 1);
      EXPECT_EQ(Values<double>(list[r]), Doubles{c.all[r]});
      EXPECT_EQ(Values<double>(tensor[r]), Doubles{c.all[r]});
    }
    EXPECT_EQ(Values<double>(one[1]), c.all);
  }
}

TEST(CollectivesTest, AnotherFactorIsNoOtherGraph) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  for (int i = 0; i < 4; ++i) {
    const auto y = Each(ranks, [&](int r, const World& w) {
      return AllReduce(Row(w, {1}), w, ReduceOp::PremulSum(i + r));
    });
    for (const Tensor& t : y) EXPECT_THAT(Values<double>(t), ElementsAre(2 * i + 1));
  }
  EXPECT_EQ(daemon.counts().registered, 2);
}

// --- Gradients ----------------------------------------------------------------------------------

// dL/dx of L = sum_r (r + 1) * (sum of this rank's outputs), for x_r = {2, r, -1} of 3 ranks.
TEST(CollectiveGradientTest, EveryReductionInEveryForm) {
  FakeDaemon daemon;
  {
    Ranks ranks(3, &daemon);
    for (const auto& c : kReductions) {
      SCOPED_TRACE(std::string(ReductionName(c.reduction)));
      // The gradient of the result's element i by x_r's, by hand.
      const auto slope = [&](int r, int i) -> double {
        switch (c.reduction) {
          case Reduction::kAvg:
            return 1.0 / 3;
          case Reduction::kPremulSum:
            return r + 1;
          case Reduction::kMin:
          case Reduction::kMax: {
            if (i != 1) return 1.0 / 3;
            return r == (c.reduction == Reduction::kMin ? 0 : 2) ? 1 : 0;
          }
          case Reduction::kProduct:
            return i == 0 ? 4 : i == 2 ? 1 : r == 0 ? 2 : 0;
          default:
            return 1;
        }
      };
      const auto check = [&](const char* form, const std::vector<Tensor>& x,
                             const std::function<double(int)>& weight_of_element) {
        for (int r = 0; r < 3; ++r) {
          const Doubles g = Values<double>(x[r].grad());
          ASSERT_EQ(g.size(), 3u);
          for (int i = 0; i < 3; ++i) {
            EXPECT_DOUBLE_EQ(g[i], slope(r, i) * weight_of_element(i))
                << form << ", rank " << r << ", element " << i;
          }
        }
      };
      const auto leaves = [&] {
        return Each(ranks, [](int r, const World& w) { return Leaf(w, {2, 1.0 * r, -1}); });
      };
      std::vector<Tensor> x = leaves();
      std::vector<Tensor> y = Each(
          ranks, [&](int r, const World& w) { return AllReduce(x[r], w, OpFor(c.reduction, r)); });
      for (int r = 0; r < 3; ++r) ASSERT_TRUE(Backward(Sum(y[r] * (r + 1))).ok());
      check("all_reduce", x, [](int) { return 6; });

      x = leaves();
      y = Each(ranks,
               [&](int r, const World& w) { return Reduce(x[r], 1, w, OpFor(c.reduction, r)); });
      for (int r = 0; r < 3; ++r) {
        const absl::Status status = Backward(r == 1 ? Sum(y[r] * 5) : y[r]);
        ASSERT_TRUE(status.ok()) << status;
      }
      check("reduce", x, [](int) { return 5; });

      x = leaves();
      y = Each(ranks, [&](int r, const World& w) {
        return ReduceScatterTensor(x[r], w, OpFor(c.reduction, r));
      });
      for (int r = 0; r < 3; ++r) ASSERT_TRUE(Backward(Sum(y[r] * (r + 1))).ok());
      check("reduce_scatter_tensor", x, [](int i) { return i + 1; });

      x = leaves();
      y = Each(ranks, [&](int r, const World& w) {
        return ReduceScatter({Slice(x[r], 0, 0, 1), Slice(x[r], 0, 1, 2), Slice(x[r], 0, 2, 3)}, w,
                             OpFor(c.reduction, r));
      });
      for (int r = 0; r < 3; ++r) ASSERT_TRUE(Backward(Sum(y[r] * (r + 1))).ok());
      check("reduce_scatter", x, [](int i) { return i + 1; });
    }
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

// y = x_0 x_1 x_2, L = w y with w = 1 + 2 + 3; G_r = 6 prod of the others; S = sum v_r G_r.
// dS/dx_j = 6 sum_{r != j} v_r x_k, k the third.
TEST(CollectiveGradientTest, DoubleBackwardOfAProductFlowsThroughItsFactors) {
  for (const bool compiled : {false, true}) {
    SCOPED_TRACE(compiled ? "compiled" : "eager");
    FakeDaemon daemon;
    {
      Ranks ranks(3, &daemon);
      // One zero, and two.
      const Doubles xs[] = {{2, 0, 0}, {3, 5, 0}, {7, 11, 13}};
      const double v[] = {1, 10, 100};
      std::vector<Tensor> x, g, second;
      const auto both = [&](int r, const World& w,
                            const Tensor& leaf) -> absl::StatusOr<std::vector<Tensor>> {
        BackwardOptions create;
        create.create_graph = true;
        const Tensor y = AllReduce(leaf, w, Reduction::kProduct);
        CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> first,
                                Grad({Sum(y * (r + 1))}, {leaf}, create));
        CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> again,
                                Grad({Sum(first[0] * v[r]) + Sum(y * 0)}, {leaf}));
        return std::vector<Tensor>{first[0].Detach(), again[0]};
      };
      for (int r = 0; r < 3; ++r) {
        const World& w = ranks.worlds[r];
        x.push_back(Leaf(w, xs[r]));
        absl::StatusOr<std::vector<Tensor>> results;
        if (compiled) {
          absl::Status traced;
          const Compiled function = Compile([&](const std::vector<Tensor>& in) {
            absl::StatusOr<std::vector<Tensor>> results = both(r, w, in[0]);
            traced = results.status();
            return results.ok() ? *results : std::vector<Tensor>{Tensor()};
          });
          results = function.Run({x[r]});
          ASSERT_TRUE(traced.ok()) << traced;
        } else {
          results = both(r, w, x[r]);
        }
        ASSERT_TRUE(results.ok()) << results.status();
        g.push_back((*results)[0]);
        second.push_back((*results)[1]);
      }
      for (int r = 0; r < 3; ++r) {
        const int j = (r + 1) % 3;
        const int k = (r + 2) % 3;
        Doubles first_expected, second_expected;
        for (int i = 0; i < 3; ++i) {
          first_expected.push_back(6 * xs[j][i] * xs[k][i]);
          second_expected.push_back(6 * (v[j] * xs[k][i] + v[k] * xs[j][i]));
        }
        EXPECT_EQ(Values<double>(g[r]), first_expected);
        EXPECT_EQ(Values<double>(second[r]), second_expected);
      }
    }
    EXPECT_EQ(daemon.live_tapes(), 0);
  }
}

TEST(CollectiveGradientTest, NanIsHeldByTheRankThatHasItAndReachesNoOther) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<Tensor> x, y;
  for (int r = 0; r < 2; ++r) {
    x.push_back(Leaf(ranks.worlds[r], {r == 0 ? nan : 1, 1.0 + r}));
    y.push_back(AllReduce(x[r], ranks.worlds[r], Reduction::kMax));
  }
  for (int r = 0; r < 2; ++r) {
    // The gradient of element 1 is NaN.
    ASSERT_TRUE(Backward(Sum(y[r] * Row(ranks.worlds[r], {1, nan}))).ok());
  }
  EXPECT_EQ(Values<double>(x[0].grad()), (Doubles{2, 0}));
  EXPECT_EQ(Values<double>(x[1].grad())[0], 0);
  EXPECT_TRUE(std::isnan(Values<double>(x[1].grad())[1]));
}

TEST(CollectiveGradientTest, EveryMove) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    std::vector<Tensor> a, b, c, d, e, f, roots[2];
    for (int r = 0; r < 2; ++r) {
      const World& w = ranks.worlds[r];
      a.push_back(Leaf(w, Doubles(static_cast<size_t>(1 + r), 1)));
      b.push_back(Leaf(w, Doubles(static_cast<size_t>(1 + r), 1)));
      c.push_back(Leaf(w, {1, 2, 3}));
      d.push_back(Leaf(w, {1, 2, 3}));
      e.push_back(Leaf(w, {1, 2, 3, 4}, {2, 2}));
      f.push_back(Leaf(w, {1, 2, 3}));
    }
    const std::vector<int64_t> rows = {1, 2};
    for (int r = 0; r < 2; ++r) {
      const World& w = ranks.worlds[r];
      const auto add = [&](const Tensor& y, const Doubles& weights) {
        roots[r].push_back(y.absent() ? y : Sum(y * FromHost<double>(w, weights, y.shape())));
      };
      const std::vector<Tensor> gathered = Gather(a[r], 1, w, rows);
      if (r == 0) {
        add(gathered[0], {});
      } else {
        add(gathered[0], {5});
        add(gathered[1], {6, 7});
      }
      add(GatherIntoTensor(b[r], 0, w, rows), {5, 6, 7});
      add(Scatter({Slice(c[r], 0, 0, 1), Slice(c[r], 0, 1, 3)}, DType::kF64, {1 + r}, 1, w),
          r == 0 ? Doubles{5} : Doubles{6, 7});
      add(ScatterTensor(d[r], DType::kF64, {1 + r}, 0, w, rows),
          r == 0 ? Doubles{5} : Doubles{6, 7});
      // Columns: [2, 1] from each, [2, 2] to each.
      add(AllGatherIntoTensor(e[r], w, {}, 1), {1, 2, 3, 4, 5, 6, 7, 8});
      add(AllToAllSingle(f[r], w, r == 0 ? rows : std::vector<int64_t>{2, 1},
                         r == 0 ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{2, 1}),
          r == 0 ? Doubles{1, 2, 3} : Doubles{4, 5, 6});
    }
    for (int r = 0; r < 2; ++r) {
      const absl::Status status = Backward(roots[r]);
      ASSERT_TRUE(status.ok()) << status;
    }
    EXPECT_EQ(Values<double>(a[0].grad()), Doubles({5}));
    EXPECT_EQ(Values<double>(a[1].grad()), Doubles({6, 7}));
    EXPECT_EQ(Values<double>(b[0].grad()), Doubles({5}));
    EXPECT_EQ(Values<double>(b[1].grad()), Doubles({6, 7}));
    EXPECT_EQ(Values<double>(c[1].grad()), Doubles({5, 6, 7}));
    EXPECT_FALSE(c[0].grad().defined());
    EXPECT_EQ(Values<double>(d[0].grad()), Doubles({5, 6, 7}));
    EXPECT_EQ(Values<double>(e[0].grad()), Doubles({2, 4, 10, 12}));
    EXPECT_EQ(Values<double>(e[1].grad()), Doubles({6, 8, 14, 16}));
    // Rank 0 keeps 1 row and sends 2; rank 1 sends 2 and keeps 1.
    EXPECT_EQ(Values<double>(f[0].grad()), Doubles({1, 4, 5}));
    EXPECT_EQ(Values<double>(f[1].grad()), Doubles({2, 3, 6}));
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

// --- What a tape keeps --------------------------------------------------------------------------

// Large enough that releasing it is not put off.
constexpr int64_t kLarge = 1 << 16;

TEST(TapeTest, ExtraOutputsAreThereExactlyWhereTheCallIsRecorded) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const auto live_after = [&](ReduceOp op, bool record) {
    const int before = daemon.live_tensors();
    const auto call = [&](int, const World& w) {
      return AllReduce(Zeros(w, DType::kF32, {kLarge}), w, op);
    };
    std::vector<Tensor> y;
    if (record) {
      y = Each(ranks, call);
    } else {
      const NoGrad no_grad;
      y = Each(ranks, call);
    }
    for (const Tensor& t : y) EXPECT_TRUE(t.Wait().ok()) << t.Wait();
    // The operands are gone.
    return daemon.live_tensors() - before;
  };
  for (const Reduction reduction : {Reduction::kMin, Reduction::kMax}) {
    EXPECT_EQ(live_after(reduction, true), 2 * 2);
    EXPECT_EQ(live_after(reduction, false), 2);
  }
  EXPECT_EQ(live_after(Reduction::kProduct, true), 2 * 3);
  EXPECT_EQ(live_after(Reduction::kProduct, false), 2);
  // Neither needs its operand, nor anything else.
  EXPECT_EQ(live_after(Reduction::kSum, true), 2);
  EXPECT_EQ(live_after(ReduceOp::PremulSum(2), true), 2);
}

TEST(TapeTest, ACompiledFunctionHasExtraOutputsOnlyWhereItTakesTheGradient) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  std::vector<std::vector<Tensor>> y;
  for (int r = 0; r < 2; ++r) {
    const World& w = ranks.worlds[r];
    const Compiled function = Compile([&w](const std::vector<Tensor>& in) {
      // What comes behind values that are taken out.
      const Tensor most = AllReduce(in[0], w, Reduction::kMax);
      const Tensor product = AllReduce(most * in[0], w, Reduction::kProduct);
      const auto g = Grad({Sum(AllReduce(in[0], w, Reduction::kMin))}, {in[0]});
      return std::vector<Tensor>{product + most, g.ok() ? (*g)[0] : Tensor()};
    });
    const auto run = function.Run({Leaf(w, {2.0 + r, 5.0 - r})});
    ASSERT_TRUE(run.ok()) << run.status();
    y.push_back(*run);
  }
  EXPECT_EQ(Values<double>(y[0][0]), (Doubles{3 * 3 * 6 + 3, 5 * 5 * 20 + 5}));
  EXPECT_EQ(Values<double>(y[0][1]), (Doubles{2, 0}));
  EXPECT_EQ(Values<double>(y[1][1]), (Doubles{0, 2}));
}

// --- Coalesced ----------------------------------------------------------------------------------

// Tensors that differ by rank, place and dtype.
std::vector<Tensor> Mixed(int rank, const World& w, int count) {
  std::vector<Tensor> xs;
  for (int i = 0; i < count; ++i) {
    const double value = 0.1 * (rank + 1) + i;
    if (i % 3 == 0) xs.push_back(Leaf(w, {value, value * 3}));
    if (i % 3 == 1) {
      xs.push_back(FromHost<float>(w, {static_cast<float>(value)}, {1, 1}).RequireGrad());
    }
    if (i % 3 == 2) xs.push_back(FromHost<int64_t>(w, {rank + i, i, 7, 8}, {2, 2}));
  }
  return xs;
}

void ExpectSame(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.dtype(), b.dtype()) << a.status() << b.status();
  ASSERT_EQ(a.absent(), b.absent());
  EXPECT_EQ(a.shape(), b.shape());
  if (a.absent()) return;
  if (a.dtype() == DType::kF64) {
    EXPECT_EQ(Values<double>(a), Values<double>(b));
  } else if (a.dtype() == DType::kF32) {
    EXPECT_EQ(Values<float>(a), Values<float>(b));
  } else {
    EXPECT_EQ(Values<int64_t>(a), Values<int64_t>(b));
  }
}

TEST(CoalescedTest, ResultsAndGradientsAreThoseOfTheSingleCallsInOneRun) {
  using Calls = std::function<std::vector<Tensor>(int, const World&, const std::vector<Tensor>&)>;
  const auto flat = [](const std::vector<std::vector<Tensor>>& lists) {
    std::vector<Tensor> all;
    for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  };
  const auto each = [](const std::vector<Tensor>& xs, const std::function<Tensor(Tensor)>& f) {
    std::vector<Tensor> ys;
    for (const Tensor& x : xs) ys.push_back(f(x));
    return ys;
  };
  const struct {
    const char* name;
    Calls coalesced, single;
  } cases[] = {
      {"all_reduce",
       [](int, const World& w, const std::vector<Tensor>& xs) { return AllReduceCoalesced(xs, w); },
       [&](int, const World& w, const std::vector<Tensor>& xs) {
         return each(xs, [&](const Tensor& x) { return AllReduce(x, w); });
       }},
      {"all_reduce MAX",
       [](int, const World& w, const std::vector<Tensor>& xs) {
         return AllReduceCoalesced(xs, w, Reduction::kMax);
       },
       [&](int, const World& w, const std::vector<Tensor>& xs) {
         return each(xs, [&](const Tensor& x) { return AllReduce(x, w, Reduction::kMax); });
       }},
      {"broadcast",
       [](int, const World& w, const std::vector<Tensor>& xs) {
         return BroadcastCoalesced(xs, 1, w);
       },
       [&](int, const World& w, const std::vector<Tensor>& xs) {
         return each(xs, [&](const Tensor& x) { return Broadcast(x, 1, w); });
       }},
      {"reduce PRODUCT",
       [](int, const World& w, const std::vector<Tensor>& xs) {
         return ReduceCoalesced(xs, 0, w, Reduction::kProduct);
       },
       [&](int, const World& w, const std::vector<Tensor>& xs) {
         return each(xs, [&](const Tensor& x) { return Reduce(x, 0, w, Reduction::kProduct); });
       }},
      {"all_gather",
       [&](int, const World& w, const std::vector<Tensor>& xs) {
         return flat(AllGatherCoalesced(xs, w));
       },
       [&](int, const World& w, const std::vector<Tensor>& xs) {
         std::vector<std::vector<Tensor>> lists;
         for (const Tensor& x : xs) lists.push_back(AllGather(x, w));
         return flat(lists);
       }},
      {"all_gather_into_tensor",
       [](int, const World& w, const std::vector<Tensor>& xs) {
         return AllGatherIntoTensorCoalesced(xs, w);
       },
       [&](int, const World& w, const std::vector<Tensor>& xs) {
         return each(xs, [&](const Tensor& x) { return AllGatherIntoTensor(x, w); });
       }},
      {"reduce_scatter",
       [](int, const World& w, const std::vector<Tensor>& xs) {
         std::vector<std::vector<Tensor>> lists;
         for (const Tensor& x : xs) lists.push_back({x, x * 2});
         return ReduceScatterCoalesced(lists, w);
       },
       [&](int, const World& w, const std::vector<Tensor>& xs) {
         return each(xs, [&](const Tensor& x) { return ReduceScatter({x, x * 2}, w); });
       }},
      {"reduce_scatter_tensor",
       [&](int, const World& w, const std::vector<Tensor>& xs) {
         return ReduceScatterTensorCoalesced(each(xs,
                                                  [](const Tensor& x) {
                                                    return Concat({x, x}, 0);
                                                  }),
                                             w);
       },
       [&](int, const World& w, const std::vector<Tensor>& xs) {
         return each(xs, [&](const Tensor& x) {
           return ReduceScatterTensor(Concat({x, x}, 0), w);
         });
       }},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    FakeDaemon daemon;
    {
      Ranks ranks(2, &daemon);
      constexpr int kTensors = 7;
      std::vector<std::vector<Tensor>> gradients[2];
      std::vector<std::vector<Tensor>> results[2];
      for (const bool coalesced : {false, true}) {
        std::vector<std::vector<Tensor>> xs;
        for (int r = 0; r < 2; ++r) xs.push_back(Mixed(r, ranks.worlds[r], kTensors));
        for (int round = 0; round < 2; ++round) {
          const int runs = daemon.counts().runs;
          const int registered = daemon.counts().registered;
          results[coalesced].clear();
          for (int r = 0; r < 2; ++r) {
            const Calls& call = coalesced ? c.coalesced : c.single;
            results[coalesced].push_back(call(r, ranks.worlds[r], xs[r]));
            for (const Tensor& y : results[coalesced][r]) {
              ASSERT_TRUE(y.status().ok()) << y.status();
            }
          }
          if (!coalesced) continue;
          // One for each rank, and one for what it was made of.
          EXPECT_LE(daemon.counts().runs - runs, 4);
          if (round > 0) {
            EXPECT_EQ(daemon.counts().registered, registered);
          }
        }
        for (int r = 0; r < 2; ++r) {
          std::vector<Tensor> roots;
          for (size_t i = 0; i < results[coalesced][r].size(); ++i) {
            const Tensor& y = results[coalesced][r][i];
            if (!y.requires_grad()) continue;
            // Not all: an entry that is not asked for counts as zeros, or is asked by the others.
            roots.push_back(y.absent() ? y : Sum(y * y * (r + 2.0)));
          }
          BackwardOptions retain;
          retain.retain_graph = true;
          const absl::Status status = Backward(roots, retain);
          ASSERT_TRUE(status.ok()) << status;
        }
        for (int r = 0; r < 2; ++r) {
          gradients[coalesced].emplace_back();
          for (const Tensor& x : xs[r]) gradients[coalesced][r].push_back(x.grad());
        }
      }
      for (int r = 0; r < 2; ++r) {
        ASSERT_EQ(results[0][r].size(), results[1][r].size());
        for (size_t i = 0; i < results[0][r].size(); ++i)
          ExpectSame(results[0][r][i], results[1][r][i]);
        for (int i = 0; i < kTensors; ++i) {
          ASSERT_EQ(gradients[0][r][i].defined(), gradients[1][r][i].defined());
          if (gradients[0][r][i].defined()) ExpectSame(gradients[0][r][i], gradients[1][r][i]);
        }
      }
    }
    EXPECT_EQ(daemon.live_tapes(), 0);
  }
}

TEST(CoalescedTest, EachResultHasATapeEntryOfItsOwn) {
  FakeDaemon daemon;
  {
    Ranks ranks(2, &daemon);
    std::vector<std::vector<Tensor>> x, y;
    for (int r = 0; r < 2; ++r) {
      x.push_back({Leaf(ranks.worlds[r], {1}), Leaf(ranks.worlds[r], {2})});
      y.push_back(AllReduceCoalesced(x[r], ranks.worlds[r]));
    }
    // Rank 1 drops one of them.
    y[1][0] = Tensor();
    ASSERT_TRUE(Backward(Sum(y[0][0] * 3)).ok());
    EXPECT_THAT(Values<double>(x[0][0].grad()), ElementsAre(3));
    for (int r = 0; r < 2; ++r) ASSERT_TRUE(Backward(Sum(y[r][1] * 5)).ok());
    EXPECT_THAT(Values<double>(x[1][1].grad()), ElementsAre(10));
    EXPECT_FALSE(x[1][0].grad().defined());
  }
  EXPECT_EQ(daemon.live_tapes(), 0);
}

TEST(CoalescedTest, NothingInIsNothingOut) {
  FakeDaemon daemon;
  Ranks ranks(1, &daemon);
  EXPECT_TRUE(AllReduceCoalesced({}, ranks.worlds[0]).empty());
  EXPECT_TRUE(AllGatherCoalesced({}, ranks.worlds[0]).empty());
  EXPECT_EQ(daemon.counts().runs, 0);
}

TEST(CoalescedTest, ManyTensorsAreFewRuns) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  std::vector<std::vector<Tensor>> y;
  for (int r = 0; r < 2; ++r) {
    std::vector<Tensor> xs;
    for (int i = 0; i < 1000; ++i) xs.push_back(Scalar<double>(ranks.worlds[r], i + r));
    const NoGrad no_grad;
    y.push_back(AllReduceCoalesced(xs, ranks.worlds[r]));
  }
  EXPECT_LE(daemon.counts().runs, 4);
  for (int i = 0; i < 1000; ++i) EXPECT_THAT(Values<double>(y[1][i]), ElementsAre(2 * i + 1));
}

// No more than have to: a sum has one result however many ranks there are.
TEST(CoalescedTest, TensorsOfManyRanksAreFewRuns) {
  FakeDaemon daemon;
  Ranks ranks(32, &daemon);
  const NoGrad no_grad;
  const int before = daemon.counts().runs;
  std::vector<Tensor> last;
  for (int r = 0; r < ranks.size(); ++r) {
    const std::vector<Tensor> xs(100, Scalar<double>(ranks.worlds[r], 1));
    last.push_back(AllReduceCoalesced(xs, ranks.worlds[r], Reduction::kAvg)[99]);
  }
  EXPECT_EQ(daemon.counts().runs - before, ranks.size());
  for (const Tensor& y : last) EXPECT_THAT(Values<double>(y), ElementsAre(1));
}

// More than a graph may have collectives, and off the root they have no operands.
TEST(CoalescedTest, AVeryLongBroadcastGoesInSeveralRuns) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const NoGrad no_grad;
  std::vector<std::vector<Tensor>> y;
  for (int r = 0; r < 2; ++r) {
    std::vector<Tensor> xs(2048, Scalar<double>(ranks.worlds[r], r));
    xs.push_back(Scalar<double>(ranks.worlds[r], 7 + r));
    y.push_back(BroadcastCoalesced(xs, 0, ranks.worlds[r]));
  }
  EXPECT_THAT(Values<double>(y[1][2047]), ElementsAre(0));
  EXPECT_THAT(Values<double>(y[1][2048]), ElementsAre(7));
}

TEST(CoalescedTest, AnErrorIsEverybodysAndNamesTheIndex) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const World& w = ranks.worlds[0];
  const std::vector<Tensor> y = AllReduceCoalesced(
      {Row(w, {1}), FromHost<int64_t>(w, {1}, {1}), Row(w, {2})}, w, Reduction::kAvg);
  ASSERT_EQ(y.size(), 3u);
  for (const Tensor& t : y) EXPECT_THAT(std::string(t.status().message()), HasSubstr("index 1"));
  const std::vector<Tensor> z = AllReduceCoalesced({Row(w, {1}), Tensor()}, w);
  EXPECT_THAT(std::string(z[0].status().message()), HasSubstr("index 1"));
  // The other rank hears of it.
  const std::vector<Tensor> other =
      AllReduceCoalesced({Row(ranks.worlds[1], {1})}, ranks.worlds[1]);
  EXPECT_EQ(ErrorOf(other[0].Wait()).reason, Reason::kPeerRefused);
}

// Of a call that goes in several runs too: no result of it is left, whichever run is refused, and
// the index is that of the list.
TEST(CoalescedTest, AnErrorInALaterRunIsEverybodys) {
  FakeDaemon daemon;
  Ranks ranks(2, &daemon);
  const World& w = ranks.worlds[0];
  const NoGrad no_grad;
  std::vector<Tensor> xs(2200, Row(w, {1}));
  const struct {
    Tensor bad;
    ReduceOp op;
  } cases[] = {{Tensor(), Reduction::kSum}, {FromHost<int64_t>(w, {1}, {1}), Reduction::kAvg}};
  for (const auto& c : cases) {
    xs[2150] = c.bad;
    const int before = daemon.counts().runs;
    const std::vector<Tensor> y = AllReduceCoalesced(xs, w, c.op);
    EXPECT_EQ(daemon.counts().runs, before + 1) << "the first run was sent";
    ASSERT_EQ(y.size(), xs.size());
    for (const Tensor& t : y) {
      ASSERT_THAT(std::string(t.status().message()), HasSubstr("at index 2150 of"));
    }
  }
  // The other rank hears of it.
  const std::vector<Tensor> other =
      AllReduceCoalesced({Row(ranks.worlds[1], {1})}, ranks.worlds[1]);
  EXPECT_EQ(ErrorOf(other[0].Wait()).reason, Reason::kPeerRefused);
}

// --- Bad input ----------------------------------------------------------------------------------

TEST(CollectivesTest, BadInputIsRefusedWithATextOfItsOwn) {
  FakeDaemon daemon;
  Ranks ranks(3, &daemon);
  const Session stranger = daemon.Open();
  const World& w = ranks.worlds[0];
  const Tensor x = Row(w, {1, 2, 3});
  const Tensor scalar = Scalar<double>(w, 1);
  const Tensor whole = FromHost<int64_t>(w, {1, 2, 3}, {3});
  const Tensor failed = MatMul(x, x);
  const struct {
    const char* text;
    std::function<Tensor()> call;
  } cases[] = {
      {"a root within the group of 3, got 3", [&] { return Broadcast(x, 3, w); }},
      {"a root within the group of 3, got -1",
       [&] { return Reduce(x, Group(w).GroupRankOf(7), w); }},
      {"a peer within the group of 3, got 5", [&] { return Send(x, 5, w); }},
      {"a peer other than the rank itself", [&] { return Send(x, 0, w); }},
      {"a tag of 0 or more", [&] { return Recv(DType::kF64, {1}, 1, w, -2); }},
      {"an undefined one", [&] { return AllReduce(Tensor(), w); }},
      {"an undefined one", [&] { return AllGather(Tensor(), w)[0]; }},
      {"an undefined one",
       [&] {
         return AllToAll({x, Tensor(), x}, w)[2];
       }},
      {"tensors of one session", [&] { return AllReduce(Row(stranger, {1}), w); }},
      {"matmul", [&] { return GatherIntoTensor(failed, 0, w); }},
      {"one input for each of 3 members, got 2",
       [&] {
         return ReduceScatter({x, x}, w);
       }},
      {"one input for each of 3 members",
       [&] {
         return AllToAll({x, x, x, x}, w)[0];
       }},
      {"at least 1 input", [&] { return ReduceScatter({}, w); }},
      {"one input for each of 3 members on the root, got none",
       [&] { return Scatter({}, DType::kF64, {3}, 0, w); }},
      {"tensor 0, as f64[2], which it says, got f64[3]",
       [&] {
         return Scatter({x, x, x}, DType::kF64, {2}, 0, w);
       }},
      {"inputs like f64[3]",
       [&] {
         return AllToAll({x, scalar, x}, w)[0];
       }},
      {"3 members, or none",
       [&] {
         return AllGather(x, w, {3, 3})[0];
       }},
      {"4 rows as input 0",
       [&] {
         return AllGather(x, w, {4, 3, 3})[0];
       }},
      {"-1 as count 1",
       [&] {
         return AllGather(x, w, {3, -1, 3})[0];
       }},
      {"counts, or rows that divide by 3 members",
       [&] {
         return ReduceScatterTensor(Row(w, {1, 2}), w);
       }},
      {"a tensor with rows", [&] { return ReduceScatterTensor(scalar, w); }},
      {"2 rows as input 0, by the counts",
       [&] {
         return ReduceScatterTensor(x, w, {}, {1, 1, 0});
       }},
      {"an axis from -1 to 0", [&] { return AllGatherIntoTensor(x, w, {}, 1); }},
      {"an axis of the pieces, f64[1], got 1",
       [&] { return ScatterTensor(x, DType::kF64, {1}, 0, w, {}, 1); }},
      {"2 rows for this rank",
       [&] {
         return ScatterTensor(x, DType::kF64, {1}, 0, w, {2, 1, 0});
       }},
      {"pieces like f32[1], which the root says, got f64[1]",
       [&] { return ScatterTensor(x, DType::kF32, {1}, 0, w); }},
      {"each of 3 members, or neither, got 3 and 0",
       [&] {
         return AllToAllSingle(x, w, {1, 1, 1});
       }},
      {"1 rows from rank 0, which it sends to itself",
       [&] {
         return AllToAllSingle(x, w, {1, 1, 1}, {0, 1, 1});
       }},
      {"floating point for AVG", [&] { return AllReduce(whole, w, Reduction::kAvg); }},
      {"integers or bool for BAND", [&] { return AllReduce(x, w, Reduction::kBand); }},
      {"got no factor", [&] { return AllReduce(x, w, Reduction::kPremulSum); }},
      {"floating point for PREMUL_SUM",
       [&] { return AllReduce(whole, w, ReduceOp::PremulSum(2)); }},
      {"a group, got none", [&] { return AllToAllSingle(x, Group()); }},
      {"a group, got none", [&] { return Scatter({x}, DType::kF64, {3}, 0, Group()); }},
      {"a group, got none", [&] { return ScatterTensor(x, DType::kF64, {3}, 0, Group()); }},
  };
  for (const auto& c : cases) {
    const int64_t epoch = w.epoch();
    const Tensor y = c.call();
    EXPECT_EQ(y.status().code(), absl::StatusCode::kInvalidArgument) << y.status();
    EXPECT_THAT(std::string(y.status().message()), HasSubstr(c.text));
    EXPECT_FALSE(y.Wait().ok());
    if (std::string(c.text) == "a group, got none") continue;
    EXPECT_THAT(ErrorOf(y.status()).source, HasSubstr("collectives_test.cc"));
    EXPECT_EQ(w.epoch(), epoch + 1) << c.text;
  }
}

}  // namespace
}  // namespace chorus
