// Gradients of first and second order: of every collective against naive loops, and of what is made
// of them and local ops against the naive evaluator and finite differences.
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "client/testing/fake_daemon.h"
#include "gmock/gmock.h"
#include "tests/conformance/cases.h"
#include "tests/conformance/collectives.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

using ::testing::ElementsAre;

// --- Each collective ----------------------------------------------------------------------------

// With y = A x, the loss sum(u y^2) and S = sum(v dL/dx):
//   dL/dx = At (2 u y),  dS/dx = At (2 u (A v)).
// S is taken from the gradient that is in use, so both orders must be right.
struct Expectation {
  std::vector<Tuple<double>> first;
  std::vector<Tuple<double>> second;
};

// Small enough that f32 holds every intermediate result exactly.
double Small(int rank, int64_t i, int64_t salt) {
  return static_cast<double>(((rank + 1) * 3 + i * 5 + salt * 7) % 9 - 4);
}

std::vector<double> Smalls(int rank, int64_t size, int64_t salt) {
  std::vector<double> values;
  for (int64_t i = 0; i < size; ++i) values.push_back(Small(rank, i, salt));
  return values;
}

constexpr int64_t kWeightSalt = 100;
constexpr int64_t kDirectionSalt = 200;

Expectation Expect(Kind kind, int ranks, int64_t size) {
  std::vector<Tuple<double>> x(static_cast<size_t>(ranks));
  std::vector<Tuple<double>> v(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    const Place p{kind, r, ranks, size};
    for (int i = 0; i < p.num_inputs(); ++i) {
      x[static_cast<size_t>(r)].push_back(Smalls(r, p.input_size(), i));
      v[static_cast<size_t>(r)].push_back(Smalls(r, p.input_size(), kDirectionSalt + i));
    }
  }
  const auto weighted = [&](std::vector<Tuple<double>> y) {
    for (int r = 0; r < ranks; ++r) {
      Tuple<double>& mine = y[static_cast<size_t>(r)];
      for (size_t o = 0; o < mine.size(); ++o) {
        if (!mine[o].has_value()) continue;
        const std::vector<double> u =
            Smalls(r, static_cast<int64_t>(mine[o]->size()), kWeightSalt + static_cast<int64_t>(o));
        for (size_t i = 0; i < u.size(); ++i) (*mine[o])[i] *= 2 * u[i];
      }
    }
    return y;
  };
  Expectation expected;
  expected.first = ApplyTransposed(kind, size, weighted(Apply(kind, size, x)));
  expected.second = ApplyTransposed(kind, size, weighted(Apply(kind, size, v)));
  return expected;
}

template <typename T>
Tensor UploadAs(const World& world, const std::vector<double>& values) {
  return Upload(world, std::vector<T>(values.begin(), values.end()));
}

// The gradients of both orders, of all inputs: first, then second.
template <typename T>
absl::StatusOr<std::vector<Tensor>> BothOrders(const Place& p, const World& world,
                                               const std::vector<Tensor>& in) {
  const std::vector<Tensor> y = Call(p, world, DTypeOf<T>(), in);
  std::vector<Tensor> losses;
  std::vector<Tensor> absents;
  for (size_t o = 0; o < y.size(); ++o) {
    if (y[o].absent()) {
      absents.push_back(y[o]);
    } else {
      const std::vector<double> u =
          Smalls(p.rank, y[o].num_elements(), kWeightSalt + static_cast<int64_t>(o));
      losses.push_back(Sum(y[o] * y[o] * UploadAs<T>(world, u)));
    }
  }
  losses.insert(losses.end(), absents.begin(), absents.end());
  BackwardOptions create;
  create.create_graph = true;
  CHORUS_ASSIGN_OR_RETURN(std::vector<Tensor> first, Grad(losses, in, create));
  std::vector<Tensor> again;
  for (size_t i = 0; i < first.size(); ++i) {
    const std::vector<double> v =
        Smalls(p.rank, p.input_size(), kDirectionSalt + static_cast<int64_t>(i));
    // Constants too: the others may need this rank.
    again.push_back(Sum(first[i] * UploadAs<T>(world, v)));
  }
  CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> second, Grad(again, in));
  std::vector<Tensor> all;
  for (const Tensor& g : first) all.push_back(g.Detach());
  all.insert(all.end(), second.begin(), second.end());
  return all;
}

template <typename T>
void CheckGradients(const Place& p, const World& world, bool compiled) {
  SCOPED_TRACE(absl::StrCat("rank ", p.rank, " of ", p.ranks, ", ", DTypeName(DTypeOf<T>()), "[",
                            p.size, "]", compiled ? ", compiled" : ""));
  std::vector<Tensor> in;
  for (int i = 0; i < p.num_inputs(); ++i) {
    in.push_back(UploadAs<T>(world, Smalls(p.rank, p.input_size(), i)).RequireGrad());
  }
  absl::StatusOr<std::vector<Tensor>> got;
  if (compiled) {
    absl::Status traced;
    const Compiled function = Compile([&](const std::vector<Tensor>& inputs) {
      absl::StatusOr<std::vector<Tensor>> both = BothOrders<T>(p, world, inputs);
      traced = both.status();
      return both.ok() ? *both : std::vector<Tensor>{Tensor()};
    });
    got = function.Run(in);
    ASSERT_TRUE(traced.ok()) << traced;
  } else {
    got = BothOrders<T>(p, world, in);
  }
  ASSERT_TRUE(got.ok()) << got.status();
  const Expectation expected = Expect(p.kind, p.ranks, p.size);
  for (size_t i = 0; i < in.size(); ++i) {
    const auto as = [](const absl::optional<std::vector<double>>& values) {
      return std::vector<T>(values->begin(), values->end());
    };
    EXPECT_EQ(Values<T>((*got)[i]), as(expected.first[static_cast<size_t>(p.rank)][i]))
        << "first order, input " << i;
    EXPECT_EQ(Values<T>((*got)[in.size() + i]), as(expected.second[static_cast<size_t>(p.rank)][i]))
        << "second order, input " << i;
  }
}

void CheckKind(const ConformanceParam& param, Kind kind) {
  Matrix matrix;
  matrix.ranks = {1, 2, 3, 5, 8};
  matrix.sizes = {0, 1, 7, kChunkElements + 1};
  matrix.dtypes = 2;
  CheckCases(param, kind, matrix, [](const Place& place, const World& world, const Case& one) {
    if (one.dtype == 0) CheckGradients<float>(place, world, one.compiled);
    if (one.dtype == 1) CheckGradients<double>(place, world, one.compiled);
  });
}

TEST_P(Conformance, AllReduceHasGradientsOfBothOrders) { CheckKind(GetParam(), Kind::kAllReduce); }
TEST_P(Conformance, BroadcastHasGradientsOfBothOrders) { CheckKind(GetParam(), Kind::kBroadcast); }
TEST_P(Conformance, ReduceHasGradientsOfBothOrders) { CheckKind(GetParam(), Kind::kReduce); }
TEST_P(Conformance, AllGatherHasGradientsOfBothOrders) { CheckKind(GetParam(), Kind::kAllGather); }
TEST_P(Conformance, ReduceScatterHasGradientsOfBothOrders) {
  CheckKind(GetParam(), Kind::kReduceScatter);
}
TEST_P(Conformance, GatherHasGradientsOfBothOrders) {
  CheckKind(GetParam(), Kind::kGather);
  CheckKind(GetParam(), Kind::kGatherIntoTensor);
}
TEST_P(Conformance, ScatterHasGradientsOfBothOrders) {
  CheckKind(GetParam(), Kind::kScatter);
  CheckKind(GetParam(), Kind::kScatterTensor);
}
TEST_P(Conformance, FormsOfOneTensorHaveGradientsOfBothOrders) {
  CheckKind(GetParam(), Kind::kAllGatherIntoTensor);
  CheckKind(GetParam(), Kind::kReduceScatterTensor);
}
TEST_P(Conformance, AllToAllHasGradientsOfBothOrders) {
  CheckKind(GetParam(), Kind::kAllToAll);
  CheckKind(GetParam(), Kind::kAllToAllSingle);
}
TEST_P(Conformance, SendAndRecvHaveGradientsOfBothOrders) { CheckKind(GetParam(), Kind::kShift); }
TEST_P(Conformance, ExchangesHaveGradientsOfBothOrders) { CheckKind(GetParam(), Kind::kExchange); }

// --- Compositions -------------------------------------------------------------------------------

// What each rank computes, from its leaves to what its loss depends on. Ranks may differ.
struct Composition {
  const char* name;
  int ranks;
  std::vector<Shape> inputs;
  std::function<std::vector<Tensor>(const World& world, const std::vector<Tensor>& in)> compute;
};

std::vector<Composition> Compositions() {
  return {
      {"a layer whose weights are reduced",
       3,
       {{2, 3}, {3, 2}},
       [](const World& world, const std::vector<Tensor>& in) {
         const Tensor w = AllReduce(in[1], world) * 0.25;
         return std::vector<Tensor>{Sin(MatMul(in[0], w))};
       }},
      {"a chain of collectives",
       3,
       {{3}},
       [](const World& world, const std::vector<Tensor>& in) {
         const Tensor a = AllReduce(Sin(in[0]), world);
         const std::vector<Tensor> b = AllGather(a * in[0], world);
         const Tensor c = ReduceScatter({Cos(b[2]), b[0] * b[1], b[1] + in[0]}, world);
         return std::vector<Tensor>{Broadcast(c * c, 1, world), c};
       }},
      {"ranks with other local graphs",
       3,
       {{2}},
       [](const World& world, const std::vector<Tensor>& in) {
         Tensor x = in[0];
         for (int i = 0; i < world.rank(); ++i) x = Sin(x) * in[0] + x;
         const Tensor y = AllReduce(x, world);
         if (world.rank() == 1) return std::vector<Tensor>{y, Cos(y) * in[0]};
         return std::vector<Tensor>{Sum(y * y)};
       }},
      {"a ring of sends and a reduction to one",
       3,
       {{2}},
       [](const World& world, const std::vector<Tensor>& in) {
         const int next = (world.rank() + 1) % 3;
         const Tensor sent = Send(Sin(in[0]), next, world);
         const Tensor got = Recv(DType::kF64, {2}, (world.rank() + 2) % 3, world);
         return std::vector<Tensor>{sent, Reduce(got * in[0] * got, 2, world)};
       }},
      {"views of one tensor",
       2,
       {{4, 2}},
       [](const World& world, const std::vector<Tensor>& in) {
         const Tensor rows = Concat({Slice(in[0], 0, 2, 4), Slice(in[0], 0, 0, 2)}, 0);
         const Tensor y = AllReduce(Transpose(rows), world);
         // Each value far from zero, on this side or on that: a difference of two crosses no
         // corner.
         const Tensor far =
             Reshape(y, {8}) + FromHost<double>(world, {4, -4, 4, -4, 4, -4, 4, -4}, {8});
         const Tensor z = Relu(far) + Expand(Sum(y), {8});
         // Its order of axes is not its own inverse.
         const Tensor turned = Transpose(Reshape(y * y, {2, 2, 2}), {1, 2, 0});
         return std::vector<Tensor>{Sum(Reshape(z * z, {2, 4}), {1}), -y, turned};
       }},
      {"every reduction",
       3,
       {{3, 2}},
       [](const World& world, const std::vector<Tensor>& in) {
         const Tensor x = Sin(in[0]) + in[0];
         std::vector<Tensor> rows;
         for (int i = 0; i < 3; ++i) rows.push_back(Slice(x, 0, i, i + 1));
         // Far apart, with another rank in front from element to element: a difference of two
         // values crosses nothing.
         std::vector<double> apart;
         for (int i = 0; i < 6; ++i) apart.push_back(6 * ((world.rank() + i) % 3));
         const Tensor z = x + FromHost<double>(world, apart, {3, 2});
         std::vector<Tensor> far;
         for (int i = 0; i < 3; ++i) far.push_back(Slice(z, 0, i, i + 1));
         return std::vector<Tensor>{
             AllReduce(x, world, Reduction::kProduct),
             Reduce(x, 1, world, Reduction::kProduct),
             ReduceScatter(rows, world, Reduction::kProduct),
             ReduceScatterTensor(x, world, Reduction::kProduct, {0, 2, 1}),
             AllReduce(z, world, Reduction::kMax),
             Reduce(z, 2, world, Reduction::kMin),
             ReduceScatter(far, world, Reduction::kMax),
             ReduceScatterTensor(z, world, Reduction::kMin, {1, 0, 2}),
             AllReduce(x, world, Reduction::kAvg) * x,
             Reduce(x, 0, world, Reduction::kAvg),
             ReduceScatterTensor(x, world, ReduceOp::PremulSum(0.5 + world.rank())),
             AllReduce(x * x, world, ReduceOp::PremulSum(2.0 - world.rank())),
         };
       }},
      {"pieces of different rows",
       3,
       {{4, 2}},
       [](const World& world, const std::vector<Tensor>& in) {
         const int r = world.rank();
         const std::vector<int64_t> rows = {0, 1, 3};
         const Tensor own = Slice(Sin(in[0]), 0, 0, rows[static_cast<size_t>(r)]);
         std::vector<Tensor> y = AllGather(own, world, rows);
         y.push_back(AllGatherIntoTensor(own, world, rows) * in[0]);
         const std::vector<Tensor> gathered = Gather(own, 2, world, rows);
         y.insert(y.end(), gathered.begin(), gathered.end());
         y.push_back(GatherIntoTensor(own, 1, world, rows));
         y.push_back(ScatterTensor(r == 0 ? Sin(in[0]) : Tensor(), DType::kF64,
                                   {rows[static_cast<size_t>(r)], 2}, 0, world, rows));
         // Columns are cut: one for rank 0, none for rank 1, one for rank 2.
         y.push_back(ReduceScatterTensor(in[0] * in[0], world, {}, {1, 0, 1}, 1));
         // (r + k) % 2 rows from r to k.
         std::vector<Tensor> pieces;
         std::vector<int64_t> counts;
         for (int k = 0; k < 3; ++k) {
           counts.push_back((r + k) % 2);
           pieces.push_back(Slice(in[0], 0, k, k + counts.back()));
         }
         const std::vector<Tensor> swapped = AllToAll(pieces, world, counts);
         y.insert(y.end(), swapped.begin(), swapped.end());
         y.push_back(AllToAllSingle(Concat(pieces, 0), world, counts, counts));
         for (Tensor& t : y) {
           if (!t.absent()) t = t * t;
         }
         return y;
       }},
      {"a group in another order, coalesced",
       3,
       {{2}, {1, 3}},
       [](const World& world, const std::vector<Tensor>& in) {
         const Tensor a = Sin(in[0]);
         if (world.rank() == 1) return std::vector<Tensor>{a * in[0]};
         const Group group = *world.NewGroup({2, 0});
         std::vector<Tensor> y = AllReduceCoalesced({a, in[1]}, group, Reduction::kProduct);
         for (const Tensor& t : BroadcastCoalesced({in[1], a}, 1, group)) y.push_back(t * t);
         for (const Tensor& t : ReduceCoalesced({a, in[1]}, 0, group)) {
           y.push_back(t.absent() ? t : t * t);
         }
         y.push_back(ReduceScatterTensorCoalesced({a}, group)[0]);
         return y;
       }},
  };
}

using Numbers = std::vector<std::vector<double>>;  // by input or output

int64_t Count(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

Numbers Random(const std::vector<Shape>& shapes, std::mt19937_64* random) {
  std::uniform_real_distribution<double> uniform(-1.5, 1.5);
  Numbers numbers;
  for (const Shape& shape : shapes) {
    numbers.emplace_back();
    for (int64_t i = 0; i < Count(shape); ++i) numbers.back().push_back(uniform(*random));
  }
  return numbers;
}

std::vector<Tensor> Leaves(const Composition& c, const World& world, const Numbers& x) {
  std::vector<Tensor> leaves;
  for (size_t i = 0; i < x.size(); ++i) {
    leaves.push_back(FromHost<double>(world, x[i], c.inputs[i]).RequireGrad());
  }
  return leaves;
}

// Weights of output `index` in the loss: other ones for each rank and element.
Tensor Weighted(const World& world, const Tensor& y, size_t index) {
  std::vector<double> weights;
  for (int64_t i = 0; i < y.num_elements(); ++i) {
    weights.push_back(1 + 0.5 * world.rank() - 0.25 * static_cast<double>(i) +
                      0.125 * static_cast<double>(index));
  }
  return Sum(y * FromHost<double>(world, weights, y.shape()));
}

struct Results {
  std::vector<Tensor> losses;
  std::vector<Tensor> first;
  std::vector<Tensor> inner;  // <v, first>
  std::vector<Tensor> second;
};

// Nothing here waits: all ranks may be done by one thread, one after the other.
absl::StatusOr<Results> Differentiate(const Composition& c, const World& world, const Numbers& x,
                                      const Numbers& v) {
  const std::vector<Tensor> in = Leaves(c, world, x);
  const std::vector<Tensor> y = c.compute(world, in);
  Results results;
  std::vector<Tensor> roots;
  std::vector<Tensor> absents;
  for (size_t o = 0; o < y.size(); ++o) {
    if (y[o].absent()) {
      absents.push_back(y[o]);
      continue;
    }
    roots.push_back(Weighted(world, y[o], o));
    results.losses.push_back(roots.back().Detach());
  }
  // The gradients lead to all collectives that the first order took part in, on every rank.
  std::vector<Tensor> again;
  roots.insert(roots.end(), absents.begin(), absents.end());
  BackwardOptions create;
  create.create_graph = true;
  CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> first, Grad(roots, in, create));
  for (size_t i = 0; i < first.size(); ++i) {
    results.first.push_back(first[i].Detach());
    const Tensor product = Sum(first[i] * FromHost<double>(world, v[i], c.inputs[i]));
    results.inner.push_back(product.Detach());
    if (product.requires_grad()) again.push_back(product);
  }
  CHORUS_ASSIGN_OR_RETURN(results.second, Grad(again, in));
  return results;
}

// All ranks of a composition by the naive evaluator.
struct Evaluated {
  double loss = 0;             // of all ranks
  double inner = 0;            // of all ranks
  std::vector<Numbers> first;  // by rank
  std::vector<Numbers> second;
};

Numbers ReadAll(const std::vector<Tensor>& tensors) {
  Numbers numbers;
  for (const Tensor& tensor : tensors) numbers.push_back(Values<double>(tensor));
  return numbers;
}

double Total(const Numbers& numbers) {
  double total = 0;
  for (const std::vector<double>& values : numbers) {
    for (const double value : values) total += value;
  }
  return total;
}

Evaluated EvaluateNaively(const Composition& c, const std::vector<Numbers>& x,
                          const std::vector<Numbers>& v) {
  chorus::testing::FakeDaemon daemon;
  std::vector<Session> sessions;
  std::vector<Results> results;
  for (int r = 0; r < c.ranks; ++r) {
    sessions.push_back(daemon.Open());
    WorldOptions join;
    join.name = "naive";
    join.rank = r;
    join.size = c.ranks;
    const World world = *sessions.back().Join(join);
    absl::StatusOr<Results> mine =
        Differentiate(c, world, x[static_cast<size_t>(r)], v[static_cast<size_t>(r)]);
    EXPECT_TRUE(mine.ok()) << mine.status();
    if (!mine.ok()) return {};
    results.push_back(*std::move(mine));
  }
  Evaluated evaluated;
  for (const Results& mine : results) {
    evaluated.loss += Total(ReadAll(mine.losses));
    evaluated.inner += Total(ReadAll(mine.inner));
    evaluated.first.push_back(ReadAll(mine.first));
    evaluated.second.push_back(ReadAll(mine.second));
  }
  return evaluated;
}

double Dot(const std::vector<Numbers>& a, const std::vector<Numbers>& b) {
  double dot = 0;
  for (size_t r = 0; r < a.size(); ++r) {
    for (size_t k = 0; k < a[r].size(); ++k) {
      for (size_t i = 0; i < a[r][k].size(); ++i) dot += a[r][k][i] * b[r][k][i];
    }
  }
  return dot;
}

std::vector<Numbers> Moved(std::vector<Numbers> x, double step, const std::vector<Numbers>& d) {
  for (size_t r = 0; r < x.size(); ++r) {
    for (size_t k = 0; k < x[r].size(); ++k) {
      for (size_t i = 0; i < x[r][k].size(); ++i) x[r][k][i] += step * d[r][k][i];
    }
  }
  return x;
}

TEST_P(Conformance, CompositionsHaveGradientsOfBothOrders) {
  // Of the derivatives themselves; of central differences with the step below.
  constexpr double kSame = 1e-12;
  constexpr double kDifference = 1e-6;
  constexpr double kStep = 1e-5;
  std::mt19937_64 random(TestSeed());
  for (const Composition& c : Compositions()) {
    SCOPED_TRACE(c.name);
    std::vector<Numbers> x, v, d;
    for (int r = 0; r < c.ranks; ++r) {
      x.push_back(Random(c.inputs, &random));
      v.push_back(Random(c.inputs, &random));
      d.push_back(Random(c.inputs, &random));
    }
    const Evaluated expected = EvaluateNaively(c, x, v);
    ASSERT_FALSE(HasFailure());
    // The expected derivatives are derivatives.
    const Evaluated above = EvaluateNaively(c, Moved(x, kStep, d), v);
    const Evaluated below = EvaluateNaively(c, Moved(x, -kStep, d), v);
    const double first = Dot(expected.first, d);
    const double second = Dot(expected.second, d);
    EXPECT_NEAR(first, (above.loss - below.loss) / (2 * kStep),
                kDifference * (1 + std::abs(first)));
    EXPECT_NEAR(second, (above.inner - below.inner) / (2 * kStep),
                kDifference * (1 + std::abs(second)));
    // And those of the system are the same.
    Job job(GetParam(), c.ranks);
    job.Run([&](int rank, World& world) {
      const size_t r = static_cast<size_t>(rank);
      const absl::StatusOr<Results> got = Differentiate(c, world, x[r], v[r]);
      ASSERT_TRUE(got.ok()) << got.status();
      const auto expect_same = [&](const std::vector<Tensor>& tensors, const Numbers& numbers,
                                   const char* what) {
        for (size_t k = 0; k < tensors.size(); ++k) {
          const std::vector<double> values = Values<double>(tensors[k]);
          ASSERT_EQ(values.size(), numbers[k].size());
          for (size_t i = 0; i < values.size(); ++i) {
            EXPECT_NEAR(values[i], numbers[k][i], kSame * (1 + std::abs(numbers[k][i])))
                << what << " by input " << k << " at " << i << " on rank " << rank;
          }
        }
      };
      expect_same(got->first, expected.first[r], "first order");
      expect_same(got->second, expected.second[r], "second order");
    });
    if (HasFailure()) return;
  }
}

// --- Ranks that do not take part like the others ------------------------------------------------

Tensor Leaf(const World& world, const std::vector<double>& values) {
  return Upload(world, values).RequireGrad();
}

TEST_P(Conformance, ARankThatDropsItsResultCountsAsZerosInTheGradient) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const Tensor x = Leaf(world, {1.0 + rank, 2});
    Tensor y = AllReduce(x, world);
    if (rank == 1) {
      y = Tensor();
      return;
    }
    ASSERT_TRUE(Backward(Sum(y * y) * (rank + 1)).ok());
    // 2 y (1 + 3), without rank 1's part of the loss.
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(2 * 6 * 4, 2 * 6 * 4));
  });
}

TEST_P(Conformance, ARankWithoutATapeCountsAsZerosInTheGradient) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    const Tensor x = Leaf(world, {1.0 + rank});
    if (rank == 2) {
      const NoGrad no_grad;
      EXPECT_THAT(Values<double>(AllReduce(x, world)), ElementsAre(6));
      return;
    }
    const Tensor y = AllReduce(x, world);
    ASSERT_TRUE(Backward(Sum(y * 5)).ok());
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(10));
  });
}

// The gradients of an all_reduce are summed in the tree over all ranks of the group, whichever is
// absent.
TEST_P(Conformance, GradientsAreOneTreeOverAllPlacesWhoeverIsAbsent) {
  const auto weight = [](int rank, int64_t i) {
    return 1.0f / static_cast<float>(3 + 7 * rank + i) * (i % 2 == 0 ? 1e3f : 1.0f);
  };
  const bool everything = GetParam().cover == ConformanceParam::kEverything;
  for (const int ranks : everything ? std::vector<int>{2, 3, 4, 5, 6, 9} : std::vector<int>{4, 5}) {
    // No rank, each one, and each two.
    std::vector<std::pair<int, int>> absent = {{-1, -1}};
    for (int a = 0; a < ranks; ++a) {
      absent.push_back({a, a});
      for (int b = a + 1; b < ranks && ranks > 2; ++b) absent.push_back({a, b});
    }
    Job job(GetParam(), ranks);
    job.Run([&](int rank, World& world) {
      for (const auto& [a, b] : absent) {
        for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg}) {
          SCOPED_TRACE(absl::StrCat("rank ", rank, " of ", ranks, " without ", a, " and ", b, ", ",
                                    ReductionName(reduction)));
          const auto present = [a = a, b = b](int r) { return r != a && r != b; };
          constexpr int64_t kSize = 40;
          std::vector<float> mine;
          std::vector<float> expected;
          for (int64_t i = 0; i < kSize; ++i) {
            mine.push_back(weight(rank, i));
            const std::function<absl::optional<float>(int, int)> tree =
                [&](int lo, int n) -> absl::optional<float> {
              if (n == 1 && !present(lo)) return absl::nullopt;
              if (n == 1) return weight(lo, i);
              int p = 1;
              while (2 * p < n) p *= 2;
              const auto left = tree(lo, p);
              const auto right = tree(lo + p, n - p);
              if (!left.has_value() || !right.has_value()) return left.has_value() ? left : right;
              return *left + *right;
            };
            const float sum = *tree(0, ranks);
            const bool average = reduction == Reduction::kAvg;
            expected.push_back(average ? sum / static_cast<float>(ranks) : sum);
          }
          const Tensor x = Upload(world, mine).RequireGrad();
          Tensor y = AllReduce(x, world, reduction);
          if (!present(rank)) continue;
          ASSERT_TRUE(Backward(Sum(y * Upload(world, mine))).ok());
          EXPECT_EQ(Values<float>(x.grad()), expected);
        }
      }
    });
  }
}

// Where bytes only move, what the absent one would have given must be written by somebody: memory
// that was used before shows it.
TEST_P(Conformance, ARankThatDropsWhatWasMovedCountsAsZerosInTheGradient) {
  Job job(GetParam(), 3);
  job.Run([](int rank, World& world) {
    for (int step = 0; step < 5; ++step) {
      const std::vector<Tensor> x = {Leaf(world, {1, 2}), Leaf(world, {3, 4}), Leaf(world, {5, 6})};
      const Tensor chunk = ReduceScatter(x, world);
      if (rank != 1) {
        ASSERT_TRUE(Backward(Sum(chunk * (rank + 1))).ok());
        EXPECT_THAT(Values<double>(x[0].grad()), ElementsAre(1, 1));
        EXPECT_THAT(Values<double>(x[1].grad()), ElementsAre(0, 0));
        EXPECT_THAT(Values<double>(x[2].grad()), ElementsAre(3, 3));
      }
    }
    for (int step = 0; step < 5 && rank < 2; ++step) {
      // Once from the lower rank to the higher, once the other way.
      const bool sends = rank == step % 2;
      if (!sends) {
        Recv(DType::kF64, {2}, 1 - rank, world);
        continue;
      }
      const Tensor x = Leaf(world, {7, 8});
      const Tensor sent = Send(x, 1 - rank, world);
      const auto g = Grad({Sum(x * x), sent}, {x});
      ASSERT_TRUE(g.ok()) << g.status();
      EXPECT_THAT(Values<double>((*g)[0]), ElementsAre(14, 16));
    }
  });
}

TEST_P(Conformance, ARankWhoseInputIsFrozenStillHasItsPartOfTheLoss) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const Tensor x = rank == 0 ? Upload<double>(world, {1}) : Leaf(world, {2});
    const Tensor y = AllReduce(x, world);
    ASSERT_TRUE(Backward(Sum(y * (rank == 0 ? 10.0 : 3.0))).ok());
    if (rank == 1) {
      EXPECT_THAT(Values<double>(x.grad()), ElementsAre(13));
    }
  });
}

TEST_P(Conformance, ARankThatNeverReadsItsResultsHoldsNobodyUp) {
  Job job(GetParam(), 2);
  std::vector<Tensor> kept(40);
  job.Run([&kept](int rank, World& world) {
    for (int step = 0; step < 20; ++step) {
      const Tensor x = Leaf(world, {1.0 + rank, 1.0 * step});
      const Tensor y = AllReduce(x, world);
      ASSERT_TRUE(Backward(Sum(y * y)).ok());
      if (rank == 1) {
        kept[static_cast<size_t>(2 * step)] = y;
        kept[static_cast<size_t>(2 * step + 1)] = x.grad();
        continue;
      }
      EXPECT_THAT(Values<double>(y), ElementsAre(3, 2 * step));
      EXPECT_THAT(Values<double>(x.grad()), ElementsAre(4 * 3, 4 * 2 * step));
    }
  });
  // They are there all the same.
  EXPECT_THAT(Values<double>(kept[38]), ElementsAre(3, 38));
}

TEST_P(Conformance, GradientsAreMatchedByTheForwardInstanceNotByTheirOrder) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const Tensor x = Leaf(world, {1.0 + rank});
    const Tensor a = AllReduce(x, world);
    const Tensor b = AllReduce(x * 2, world);
    const Tensor first = Sum(a * a);
    const Tensor second = Sum(b * b);
    // da/dx: 2*3*2 = 12; db/dx: 2*6*2*2 = 48, in whichever order they are asked for.
    ASSERT_TRUE(Backward(rank == 0 ? first : second).ok());
    ASSERT_TRUE(Backward(rank == 0 ? second : first).ok());
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(60));
  });
}

TEST_P(Conformance, AGradientIsAskedForAgainInTheNextEpoch) {
  Job job(GetParam(), 2);
  job.Run([](int rank, World& world) {
    const Tensor x = Leaf(world, {1.0 + rank});
    const Tensor y = AllReduce(x, world);
    ASSERT_TRUE(y.Wait().ok());
    const Tensor bad = AllReduce(Upload(world, std::vector<float>(1 + rank)), world);
    EXPECT_EQ(ErrorOf(bad.Wait()).reason, Reason::kMismatch);
    EXPECT_EQ(world.epoch(), 2);
    ASSERT_TRUE(Backward(Sum(y * y)).ok());
    EXPECT_THAT(Values<double>(x.grad()), ElementsAre(2 * 3 * 2));
  });
}

// --- Where a class is all but certain ------------------------------------------------------------

using Row = std::vector<long double>;

// A number, and how large what it is the sum of is: no sum is nearer than its terms.
struct Sized {
  long double value = 0;
  long double size = 0;
};
Sized operator*(const Sized& a, const Sized& b) { return {a.value * b.value, a.size * b.size}; }
Sized operator+(const Sized& a, const Sized& b) { return {a.value + b.value, a.size + b.size}; }
Sized operator-(const Sized& a, const Sized& b) { return {a.value - b.value, a.size + b.size}; }
Sized Exact(long double x) { return {x, std::abs(x)}; }

Row SoftmaxOf(const Row& x) {
  long double sum = 0;
  for (const long double other : x) sum += std::exp(other);
  Row p;
  for (const long double each : x) p.push_back(std::exp(each) / sum);
  return p;
}

// Gradients of sum(c f(x)) and of <v, that>, of one row, as sums in which nothing is taken from 1.
struct Saturated {
  std::vector<Sized> first;
  std::vector<Sized> second;
};

// p_i sum_j p_j (u_i - u_j).
std::vector<Sized> Centered(const Row& p, const std::vector<Sized>& u) {
  std::vector<Sized> out(p.size());
  for (size_t i = 0; i < p.size(); ++i) {
    for (size_t j = 0; j < p.size(); ++j) {
      if (j != i) out[i] = out[i] + Exact(p[i] * p[j]) * (u[i] - u[j]);
    }
  }
  return out;
}
std::vector<Sized> Exactly(const Row& row, long double scale = 1) {
  std::vector<Sized> sized;
  for (const long double x : row) sized.push_back(Exact(x * scale));
  return sized;
}

Saturated ExpectSoftmax(const Row& x, const Row& c, const Row& v) {
  const Row p = SoftmaxOf(x);
  std::vector<Sized> inner(p.size());
  for (size_t i = 0; i < p.size(); ++i) {
    for (size_t j = 0; j < p.size(); ++j) {
      inner[i] = inner[i] + Exact(p[j] * (v[i] - v[j]) * (c[i] - c[j]));
    }
  }
  return {Centered(p, Exactly(c)), Centered(p, inner)};
}
// Of -log softmax[label] where c is -1 at the label and 0 elsewhere.
Saturated ExpectLogSoftmax(const Row& x, const Row& c, const Row& v) {
  const Row p = SoftmaxOf(x);
  Saturated expected;
  long double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    Sized first;
    for (size_t j = 0; j < p.size(); ++j) {
      if (j != i) first = first + (Exact(c[i] * p[j]) - Exact(c[j] * p[i]));
    }
    expected.first.push_back(first);
    sum += c[i];
  }
  expected.second = Centered(p, Exactly(v, -sum));
  return expected;
}
Saturated ExpectSigmoid(const Row& x, const Row& c, const Row& v) {
  Saturated expected;
  for (size_t i = 0; i < x.size(); ++i) {
    const long double slope = 1 / ((1 + std::exp(x[i])) * (1 + std::exp(-x[i])));
    expected.first.push_back(Exact(c[i] * slope));
    expected.second.push_back(Exact(-c[i] * v[i] * slope * std::tanh(x[i] / 2)));
  }
  return expected;
}
Saturated ExpectTanh(const Row& x, const Row& c, const Row& v) {
  Saturated expected;
  for (size_t i = 0; i < x.size(); ++i) {
    const long double slope = 1 / (std::cosh(x[i]) * std::cosh(x[i]));
    expected.first.push_back(Exact(c[i] * slope));
    expected.second.push_back(Exact(-2 * c[i] * v[i] * slope * std::tanh(x[i])));
  }
  return expected;
}

TEST_P(Conformance, GradientsOfBothOrdersHaveTheirDigitsWhereAClassIsAllButCertain) {
  struct Precision {
    DType dtype;
    double far;  // so far that it is all but certain, and small numbers still are normal ones
    long double tolerance;
    long double least;
  };
  const Precision precisions[] = {{DType::kF64, 36, 1e-13L, 0},
                                  {DType::kF32, 20, 2e-6L, 0},
                                  {DType::kBF16, 20, 0.03L, 0},
                                  {DType::kF16, 6, 0.004L, 1e-6L}};
  Job job(GetParam(), 1);
  job.Run([&](int, World& world) {
    for (const Precision& p : precisions) {
      const auto f = static_cast<long double>(p.far);
      for (const Row& x : {Row{0, 0, f}, Row{f, 0, 1}, Row{0.5, -f, 1}, Row{0, f, f}}) {
        for (const Row& v :
             {Row{1, 1, 0}, Row{1, 0, 0}, Row{0, 1, 0}, Row{0, 0, 1}, Row{1, -2, 3}}) {
          const auto numbers = [&](const Row& row) {
            return FromHost<double>(world, std::vector<double>(row.begin(), row.end()), {1, 3});
          };
          // `loss` of x in the dtype; its gradients are cast to f64, in which they are exact.
          const auto check = [&](const std::string& what,
                                 const std::function<Tensor(const Tensor& x)>& loss,
                                 const Saturated& expected) {
            SCOPED_TRACE(absl::StrCat(what, " ", DTypeName(p.dtype), " of ", double(x[0]), " ",
                                      double(x[1]), " ", double(x[2]), " along ", double(v[0]), " ",
                                      double(v[1]), " ", double(v[2])));
            const Tensor leaf = numbers(x).RequireGrad();
            BackwardOptions create;
            create.create_graph = true;
            const auto first = Grad({Sum(loss(Cast(leaf, p.dtype)))}, {leaf}, create);
            ASSERT_TRUE(first.ok()) << first.status();
            const auto second = Grad({Sum((*first)[0] * numbers(v))}, {leaf});
            ASSERT_TRUE(second.ok()) << second.status();
            const auto near = [&](const Tensor& got, const std::vector<Sized>& right) {
              const std::vector<double> values = Values<double>(got);
              ASSERT_EQ(values.size(), right.size());
              for (size_t i = 0; i < right.size(); ++i) {
                EXPECT_LE(std::abs(values[i] - right[i].value),
                          p.tolerance * right[i].size + p.least)
                    << "element " << i << ": got " << values[i] << ", right is "
                    << double(right[i].value);
              }
            };
            {
              SCOPED_TRACE("first order");
              near((*first)[0], expected.first);
            }
            SCOPED_TRACE("second order");
            near((*second)[0], expected.second);
          };
          const Row c = {1, 0.5, -2};
          const Tensor weights = Cast(numbers(c), p.dtype);
          check(
              "softmax", [&](const Tensor& t) { return Softmax(t) * weights; },
              ExpectSoftmax(x, c, v));
          check(
              "log_softmax", [&](const Tensor& t) { return LogSoftmax(t) * weights; },
              ExpectLogSoftmax(x, c, v));
          check(
              "sigmoid", [&](const Tensor& t) { return Sigmoid(t) * weights; },
              ExpectSigmoid(x, c, v));
          check(
              "tanh", [&](const Tensor& t) { return Tanh(t) * weights; }, ExpectTanh(x, c, v));
          for (int64_t label = 0; label < 3; ++label) {
            Row loss(3, 0);
            loss[static_cast<size_t>(label)] = -1;
            const Tensor labels = FromHost<int64_t>(world, {label}, {1});
            const Tensor chosen = Cast(numbers(loss), p.dtype);
            const std::string with = absl::StrCat(" with label ", label);
            check(
                "cross_entropy" + with, [&](const Tensor& t) { return CrossEntropy(t, labels); },
                ExpectLogSoftmax(x, loss, v));
            check(
                "cross_entropy, one ignored," + with,
                [&](const Tensor& t) { return CrossEntropy(t, labels, -1); },
                ExpectLogSoftmax(x, loss, v));
            check(
                "log_softmax" + with, [&](const Tensor& t) { return LogSoftmax(t) * chosen; },
                ExpectLogSoftmax(x, loss, v));
          }
        }
      }
    }
  });
}

TEST_P(Conformance, LossesOfWhatIsAllButCertainAreNotZero) {
  Job job(GetParam(), 1);
  job.Run([](int, World& world) {
    const Tensor x = FromHost<float>(world, {0, 0, 20}, {1, 3});
    const Tensor labels = FromHost<int64_t>(world, {2}, {1});
    const float loss = static_cast<float>(std::log1p(2 * std::exp(-20.0)));
    EXPECT_NEAR(Values<float>(CrossEntropy(x, labels))[0], loss, 1e-6 * loss);
    EXPECT_NEAR(Values<float>(LogSoftmax(x))[2], -loss, 1e-6 * loss);
    const Tensor half = Cast(x, DType::kBF16);
    EXPECT_NEAR(Values<float>(Cast(CrossEntropy(half, labels), DType::kF32))[0], loss, 4e-3 * loss);
    // Along the other dimension, rows side by side.
    EXPECT_NEAR(Values<float>(LogSoftmax(Reshape(x, {3, 1}), 0))[2], -loss, 1e-6 * loss);
  });
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
