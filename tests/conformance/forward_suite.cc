// Values of every collective, eager and compiled, against naive loops.
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/conformance/cases.h"
#include "tests/conformance/collectives.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

template <typename T>
void Check(const Place& p, const World& world, bool compiled) {
  SCOPED_TRACE(absl::StrCat("rank ", p.rank, " of ", p.ranks, ", ", DTypeName(DTypeOf<T>()), "[",
                            p.size, "]", compiled ? ", compiled" : ""));
  std::vector<Tuple<T>> all(static_cast<size_t>(p.ranks));
  std::vector<Tensor> inputs;
  for (int r = 0; r < p.ranks; ++r) {
    const Place place{p.kind, r, p.ranks, p.size};
    for (int i = 0; i < place.num_inputs(); ++i) {
      all[static_cast<size_t>(r)].push_back(Elements<T>(r, place.input_size(), i));
      if (r == p.rank) inputs.push_back(Upload(world, Elements<T>(r, place.input_size(), i)));
    }
  }
  std::vector<Tensor> outputs;
  if (compiled) {
    const Compiled function = Compile(
        [&p, &world](const std::vector<Tensor>& in) { return Call(p, world, DTypeOf<T>(), in); });
    absl::StatusOr<std::vector<Tensor>> run = function.Run(inputs);
    ASSERT_TRUE(run.ok()) << run.status();
    outputs = *std::move(run);
  } else {
    outputs = Call(p, world, DTypeOf<T>(), inputs);
  }
  const Tuple<T> expected = Apply<T>(p.kind, p.size, all)[static_cast<size_t>(p.rank)];
  ASSERT_EQ(outputs.size(), expected.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    ASSERT_EQ(outputs[i].absent(), !expected[i].has_value()) << outputs[i].status();
    if (!expected[i].has_value()) {
      EXPECT_TRUE(outputs[i].Wait().ok()) << outputs[i].Wait();
      continue;
    }
    EXPECT_EQ(outputs[i].shape(), Shape({static_cast<int64_t>(expected[i]->size())}));
    EXPECT_EQ(Values<T>(outputs[i]), *expected[i]) << "output " << i;
  }
}

void CheckKind(const ConformanceParam& param, Kind kind) {
  Matrix matrix;
  matrix.ranks = {1, 2, 3, 5, 8};
  // Zero, one, primes, and either side of a chunk: of work for two ranks, and for eight.
  matrix.sizes = {0, 1, 2, 7, 97, 341, 1023, 1024, 1025, 2049};
  matrix.dtypes = 4;
  CheckCases(param, kind, matrix, [](const Place& place, const World& world, const Case& one) {
    if (one.dtype == 0) Check<float>(place, world, one.compiled);
    if (one.dtype == 1) Check<double>(place, world, one.compiled);
    if (one.dtype == 2) Check<int64_t>(place, world, one.compiled);
    if (one.dtype == 3) Check<uint8_t>(place, world, one.compiled);
  });
}

TEST_P(Conformance, AllReduceGivesEveryRankTheSum) { CheckKind(GetParam(), Kind::kAllReduce); }
TEST_P(Conformance, BroadcastGivesEveryRankTheRootsTensor) {
  CheckKind(GetParam(), Kind::kBroadcast);
}
TEST_P(Conformance, ReduceGivesTheRootAloneTheSum) { CheckKind(GetParam(), Kind::kReduce); }
TEST_P(Conformance, AllGatherGivesEveryRankEveryTensor) { CheckKind(GetParam(), Kind::kAllGather); }
TEST_P(Conformance, ReduceScatterGivesEachRankItsSum) {
  CheckKind(GetParam(), Kind::kReduceScatter);
}
TEST_P(Conformance, SendAndRecvMoveTensorsAroundARing) { CheckKind(GetParam(), Kind::kShift); }
TEST_P(Conformance, SendAndRecvMeetByTagInBothDirections) {
  CheckKind(GetParam(), Kind::kExchange);
}
TEST_P(Conformance, GatherGivesTheRootEveryTensor) { CheckKind(GetParam(), Kind::kGather); }
TEST_P(Conformance, GatherIntoTensorGivesTheRootOneOfAll) {
  CheckKind(GetParam(), Kind::kGatherIntoTensor);
}
TEST_P(Conformance, ScatterGivesEachRankItsTensor) { CheckKind(GetParam(), Kind::kScatter); }
TEST_P(Conformance, ScatterTensorGivesEachRankItsPart) {
  CheckKind(GetParam(), Kind::kScatterTensor);
}
TEST_P(Conformance, AllGatherIntoTensorGivesEveryRankOneOfAll) {
  CheckKind(GetParam(), Kind::kAllGatherIntoTensor);
}
TEST_P(Conformance, ReduceScatterTensorGivesEachRankItsPartOfTheSum) {
  CheckKind(GetParam(), Kind::kReduceScatterTensor);
}
TEST_P(Conformance, AllToAllGivesEachRankWhatAllHaveForIt) {
  CheckKind(GetParam(), Kind::kAllToAll);
}
TEST_P(Conformance, AllToAllSingleGivesEachRankItsPartOfAll) {
  CheckKind(GetParam(), Kind::kAllToAllSingle);
}
TEST_P(Conformance, BarrierIsPassedByAll) { CheckKind(GetParam(), Kind::kBarrier); }

// Not whole numbers: from four ranks on any other order of summation gives other bits.
float Rounding(int rank, int64_t i) {
  return 1.0f / static_cast<float>(3 + 7 * rank + i) * (i % 2 == 0 ? 1e6f : 1.0f);
}

// T(lo, n) of element `i`.
float TreeSum(int lo, int n, int64_t i) {
  if (n == 1) return Rounding(lo, i);
  int p = 1;
  while (2 * p < n) p *= 2;
  return TreeSum(lo, p, i) + TreeSum(lo + p, n - p, i);
}

// Every form, piece and destination, coalesced and compiled: the same tree, so the same bits.
TEST_P(Conformance, BitsAreThoseOfOneTreeOnAllRanksInAllFormsAndRuns) {
  constexpr int64_t kSize = 3 * kChunkElements + 5;
  for (int ranks = 1; ranks <= 9; ++ranks) {
    SCOPED_TRACE(absl::StrCat(ranks, " ranks"));
    std::vector<float> sum;
    std::vector<float> average;
    bool differs = false;
    for (int64_t i = 0; i < kSize; ++i) {
      sum.push_back(TreeSum(0, ranks, i));
      average.push_back(sum.back() / static_cast<float>(ranks));
      float left_to_right = Rounding(0, i);
      for (int r = 1; r < ranks; ++r) left_to_right += Rounding(r, i);
      differs = differs || left_to_right != sum.back();
    }
    EXPECT_EQ(differs, ranks > 3);
    std::vector<int64_t> rows(static_cast<size_t>(ranks), kSize / ranks);
    rows[0] += kSize % ranks;
    const auto same = [](const Tensor& got, const std::vector<float>& expected) {
      const std::vector<float> values = Values<float>(got);
      return values.size() == expected.size() &&
             std::memcmp(values.data(), expected.data(), values.size() * sizeof(float)) == 0;
    };
    Job job(GetParam(), ranks);
    job.Run([&](int rank, World& world) {
      std::vector<float> mine;
      for (int64_t i = 0; i < kSize; ++i) mine.push_back(Rounding(rank, i));
      const int64_t begin = rank == 0 ? 0 : rows[0] + (rank - 1) * rows.back();
      const int64_t end = begin + rows[static_cast<size_t>(rank)];
      const std::vector<float> part(sum.begin() + begin, sum.begin() + end);
      const Tensor x = Upload(world, mine);
      std::vector<Tensor> pieces;
      int64_t at = 0;
      for (const int64_t n : rows) {
        pieces.push_back(
            Upload(world, std::vector<float>(mine.begin() + at, mine.begin() + at + n)));
        at += n;
      }
      const Compiled twice = Compile([&](const std::vector<Tensor>& in) {
        return std::vector<Tensor>{AllReduce(in[0] * 1.0f, world),
                                   ReduceScatterTensor(in[0], world, {}, rows)};
      });
      for (int run = 0; run < 2; ++run) {
        EXPECT_TRUE(same(AllReduce(x, world), sum));
        EXPECT_TRUE(same(AllReduce(x, world, Reduction::kAvg), average));
        const Tensor reduced = Reduce(x, ranks - 1, world);
        EXPECT_TRUE(rank < ranks - 1 || same(reduced, sum));
        EXPECT_TRUE(same(ReduceScatterTensor(x, world, {}, rows), part));
        EXPECT_TRUE(same(ReduceScatter(pieces, world), part));
        const std::vector<Tensor> coalesced = AllReduceCoalesced({pieces[0], x}, world);
        ASSERT_EQ(coalesced.size(), 2);
        EXPECT_TRUE(same(coalesced[0], std::vector<float>(sum.begin(), sum.begin() + rows[0])));
        EXPECT_TRUE(same(coalesced[1], sum));
        const auto compiled = twice.Run({x});
        ASSERT_TRUE(compiled.ok()) << compiled.status();
        EXPECT_TRUE(same((*compiled)[0], sum));
        EXPECT_TRUE(same((*compiled)[1], part));
      }
    });
  }
}

TEST_P(Conformance, TensorsOfManyDimensionsKeepTheirShape) {
  Job job(GetParam(), 2);
  job.Run([&](int rank, World& world) {
    const Tensor x = FromHost<float>(world, Elements<float>(rank, 24), {2, 3, 1, 4});
    const Tensor y = AllReduce(x, world);
    EXPECT_EQ(y.shape(), Shape({2, 3, 1, 4}));
    const std::vector<float> a = Elements<float>(0, 24);
    const std::vector<float> b = Elements<float>(1, 24);
    std::vector<float> transposed;
    for (int64_t i : {0, 1}) {
      for (int64_t j : {0, 1, 2, 3}) {
        for (int64_t k : {0, 1, 2}) {
          const size_t at = static_cast<size_t>(i * 12 + k * 4 + j);
          transposed.push_back(a[at] + b[at]);
        }
      }
    }
    EXPECT_EQ(Values<float>(Transpose(y, {0, 3, 2, 1})), transposed);
    EXPECT_EQ(Values<float>(AllReduce(Scalar<float>(world, 2), world)), std::vector<float>({4}));
  });
}

// Larger than one message of any transport, and than one block of staging memory.
TEST_P(Conformance, LargeTensorsGoInAndOutWhole) {
  constexpr int64_t kSize = (5 << 20) / 4 + 13;
  Job job(GetParam(), 2);
  job.Run([&](int rank, World& world) {
    const std::vector<float> mine = Elements<float>(rank, kSize);
    const std::vector<float> other = Elements<float>(1 - rank, kSize);
    const std::vector<float> sum = Values<float>(AllReduce(Upload(world, mine), world));
    ASSERT_EQ(sum.size(), mine.size());
    for (size_t i = 0; i < sum.size(); ++i) {
      ASSERT_EQ(sum[i], mine[i] + other[i]) << "at " << i;
    }
  });
}

TEST_P(Conformance, TensorsOfOneElementTravelInline) {
  Job job(GetParam(), 3);
  job.Run([&](int rank, World& world) {
    for (int i = 0; i < 20; ++i) {
      const Tensor x = Scalar<double>(world, rank * 10 + i);
      EXPECT_EQ(Values<double>(AllReduce(x, world) * 2), std::vector<double>({60.0 + 6 * i}));
    }
  });
}

// Nobody waits between the steps: each depends on the one before it on every rank.
TEST_P(Conformance, LongChainsRunWithoutWaiting) {
  constexpr int kSteps = 60;
  Job job(GetParam(), 3);
  job.Run([&](int rank, World& world) {
    const NoGrad no_grad;
    Tensor x = Upload(world, Elements<double>(rank, 50));
    std::vector<double> expected(50);
    for (int64_t i = 0; i < 50; ++i) {
      for (int r = 0; r < 3; ++r) expected[static_cast<size_t>(i)] += Element<double>(r, i);
    }
    for (int step = 0; step < kSteps; ++step) {
      x = AllReduce(x, world);
      // The sum of three equal tensors, less two of them: the first sum again.
      if (step > 0) x = x - 2 * Upload(world, expected);
    }
    EXPECT_EQ(Values<double>(x), expected);
  });
}

}  // namespace
}  // namespace conformance
}  // namespace chorus
