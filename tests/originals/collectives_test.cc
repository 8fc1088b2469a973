// PyTorch's own tests of torch.distributed.nn.functional, of the functional collectives and of
// torch.cuda.comm and nccl: their names, sizes and figures. What they test that is not here, and
// why, is in docs/nn.md.
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/functional/shape.h"
#include "chorus/nn/nn.h"
#include "chorus/parallel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/cluster.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace {

using conformance::DirectCluster;
using conformance::Job;
using conformance::Values;
using parallel::DeviceGroup;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::SizeIs;

using Floats = std::vector<float>;
using Tensors = std::vector<Tensor>;

Tensor Fill(const World& world, const Shape& shape, double value) {
  return Full(world, DType::kF32, shape, value).RequireGrad();
}
// So many elements, each of them so.
template <typename Matcher>
auto All(size_t elements, Matcher matcher) {
  return AllOf(SizeIs(elements), Each(matcher));
}
Tensor SumOfSines(const Tensor& y) { return Sum(Sin(y)); }

// Theirs are of two ranks, of 5 x 5, with x = 1 + rank.
class C10dSpawnTest : public ::testing::Test {
 protected:
  Job job_{{"Host", DirectCluster("host")}, 2};
};
class GlooTest : public C10dSpawnTest {};
class NcclTest : public C10dSpawnTest {};

// Every element of x's gradient, which a loss of every rank's has come to.
void ExpectGrad(const Tensor& x, double wanted) {
  EXPECT_EQ(x.grad().shape(), x.shape());
  EXPECT_THAT(Values<float>(x.grad()), All(static_cast<size_t>(x.num_elements()),
                                           FloatNear(static_cast<float>(wanted), 1e-6F)));
}

TEST_F(C10dSpawnTest, Broadcast) {
  job_.Run([](int rank, World& world) {
    const Tensor x = Fill(world, {5, 5}, 1 + rank);
    const Tensor y = Broadcast(x, 1, world);
    EXPECT_THAT(Values<float>(y), All(25, 2));
    ASSERT_TRUE(Backward(SumOfSines(y)).ok());
    // Theirs gives zeros to a tensor that is not looked at.
    EXPECT_EQ(x.grad().defined(), rank == 1);
    if (rank == 1) ExpectGrad(x, 2 * std::cos(2));
  });
}

TEST_F(C10dSpawnTest, Reduce) {
  job_.Run([](int rank, World& world) {
    const Tensor x = Fill(world, {5, 5}, 1 + rank);
    const Tensor y = Reduce(x, 1, world);
    if (rank == 1) {
      EXPECT_THAT(Values<float>(y), All(25, 3));
    }
    ASSERT_TRUE(Backward(rank == 1 ? SumOfSines(y) : y).ok());
    ExpectGrad(x, std::cos(3));
  });
}

TEST_F(C10dSpawnTest, Allreduce) {
  job_.Run([](int rank, World& world) {
    const Tensor x = Fill(world, {5, 5}, 1 + rank);
    const Tensor y = AllReduce(x, world);
    EXPECT_THAT(Values<float>(y), All(25, 3));
    ASSERT_TRUE(Backward(SumOfSines(y)).ok());
    ExpectGrad(x, 2 * std::cos(3));
  });
}

TEST_F(C10dSpawnTest, AllGather) {
  job_.Run([](int rank, World& world) {
    const Tensor x = Fill(world, {5, 5}, 1 + rank);
    const Tensors parts = AllGather(x, world);
    ASSERT_EQ(parts.size(), 2u);
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(Values<float>(parts[static_cast<size_t>(i)]), All(25, 1 + i));
    }
    ASSERT_TRUE(Backward(SumOfSines(parts[0] + parts[1])).ok());
    ExpectGrad(x, 2 * std::cos(3));
  });
}

TEST_F(C10dSpawnTest, AllToAll) {
  job_.Run([](int rank, World& world) {
    const Tensors xs = {Fill(world, {5, 5}, 1 + 2 * rank), Fill(world, {5, 5}, 1 + 2 * rank)};
    const Tensors parts = AllToAll(xs, world);
    ASSERT_EQ(parts.size(), 2u);
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(Values<float>(parts[static_cast<size_t>(i)]), All(25, 1 + 2 * i));
    }
    ASSERT_TRUE(Backward(SumOfSines(parts[0] + parts[1])).ok());
    for (const Tensor& x : xs) ExpectGrad(x, std::cos(4));
  });
}

TEST_F(C10dSpawnTest, AllToAllSingle) {
  job_.Run([](int rank, World& world) {
    const std::vector<int64_t> splits = {rank + 1, 2 * (rank + 1)};
    const Tensor x = Fill(world, {3 * (rank + 1), 5}, rank + 1);
    const Tensor y = AllToAllSingle(x, world, splits, {rank + 1, 2 * (rank + 1)});
    const Tensors parts = Split(y, splits);
    for (int j = 0; j < 2; ++j) {
      EXPECT_THAT(Values<float>(parts[static_cast<size_t>(j)]),
                  All(static_cast<size_t>(5 * (rank + 1) * (j + 1)), j + 1));
    }
    ASSERT_TRUE(Backward(SumOfSines(y)).ok());
    ExpectGrad(x, std::cos(rank + 1));
  });
}

TEST_F(C10dSpawnTest, SharedBroadcast) {
  job_.Run([](int rank, World& world) {
    EXPECT_THAT(Values<float>(Broadcast(Fill(world, {2, 2}, rank), 0, world)), All(4, 0));
  });
}
TEST_F(C10dSpawnTest, SharedAllreduce) {
  job_.Run([](int /*rank*/, World& world) {
    EXPECT_THAT(Values<float>(AllReduce(Fill(world, {2, 2}, 1), world)), All(4, 2));
  });
}
TEST_F(C10dSpawnTest, SharedAllgather) {
  job_.Run([](int rank, World& world) {
    const Tensors parts = AllGather(Fill(world, {2, 2}, rank), world);
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(Values<float>(parts[static_cast<size_t>(i)]), All(4, i));
    }
  });
}
TEST_F(GlooTest, SharedAllgatherChunk) {
  job_.Run([](int rank, World& world) {
    const Tensor whole = FromHost<float>(world, {0, 1, 2, 3}, {2, 2});
    const Tensors rows = AllGather(Chunk(whole, 2)[static_cast<size_t>(rank)], world);
    EXPECT_THAT(Values<float>(rows[0]), ElementsAre(0, 1));
    EXPECT_THAT(Values<float>(rows[1]), ElementsAre(2, 3));
  });
}

TEST_F(GlooTest, Gather) {
  job_.Run([](int rank, World& world) {
    const Tensor x = Fill(world, {5, 5}, 1 + rank);
    const Tensors parts = Gather(x, 1, world);
    if (rank == 0) {
      // Theirs has zeros here.
      EXPECT_TRUE(parts[0].absent());
      ASSERT_TRUE(Backward(parts[0]).ok());
    } else {
      for (int i = 0; i < 2; ++i) {
        EXPECT_THAT(Values<float>(parts[static_cast<size_t>(i)]), All(25, 1 + i));
      }
      ASSERT_TRUE(Backward(SumOfSines(parts[0] + parts[1])).ok());
    }
    ExpectGrad(x, std::cos(3));
  });
}

TEST_F(GlooTest, Scatter) {
  job_.Run([](int rank, World& world) {
    const Tensors xs = {Fill(world, {5, 5}, 1), Fill(world, {5, 5}, 2)};
    const Tensor y = Scatter(rank == 1 ? xs : Tensors(), DType::kF32, {5, 5}, 1, world);
    EXPECT_THAT(Values<float>(y), All(25, 1 + rank));
    ASSERT_TRUE(Backward(SumOfSines(y)).ok());
    // Theirs gives a rank that is not the root zeros for tensors that are not looked at.
    EXPECT_EQ(xs[0].grad().defined(), rank == 1);
    if (rank == 0) return;
    ExpectGrad(xs[0], std::cos(1));
    ExpectGrad(xs[1], std::cos(2));
  });
}

TEST_F(GlooTest, BroadcastSubgroupWithNonzeroGlobalSrc) {
  job_.Run([](int rank, World& world) {
    if (rank == 0) return;
    const auto group = world.NewGroup({1});
    ASSERT_TRUE(group.ok()) << group.status();
    const Tensor x = Fill(world, {5, 5}, 1);
    const Tensor y = Broadcast(x, group->GroupRankOf(1), *group);
    ASSERT_TRUE(Backward(Sum(y)).ok());
    ExpectGrad(x, 1);
  });
}

TEST_F(NcclTest, SharedReduce) {
  job_.Run([](int rank, World& world) {
    const Tensor x = Fill(world, {2, 2}, 1);
    const Tensor y = Reduce(x, 0, world);
    if (rank == 0) {
      EXPECT_THAT(Values<float>(y), All(4, 2));
    }
    EXPECT_THAT(Values<float>(x), All(4, 1));
  });
}

TEST_F(NcclTest, ReduceScatter) {
  job_.Run([](int rank, World& world) {
    const Tensors xs = {Fill(world, {5, 5}, 1 + rank), Fill(world, {5, 5}, 2 + rank)};
    const Tensor y = ReduceScatter(xs, world);
    EXPECT_THAT(Values<float>(y), All(25, 3 + 2 * rank));
    ASSERT_TRUE(Backward(SumOfSines(y)).ok());
    ExpectGrad(xs[0], std::cos(3));
    ExpectGrad(xs[1], std::cos(5));
  });
}

TEST_F(NcclTest, AllGatherBase) {
  job_.Run([](int rank, World& world) {
    const Tensor x = Fill(world, {5, 5}, 1 + rank);
    const Tensor y = AllGatherIntoTensor(x, world);
    ASSERT_EQ(y.shape(), Shape({10, 5}));
    const Tensors blocks = Split(y, 5);
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(Values<float>(blocks[static_cast<size_t>(i)]), All(25, 1 + i));
    }
    ASSERT_TRUE(Backward(SumOfSines(Sum(Reshape(y, {2, 5, 5}), 0))).ok());
    ExpectGrad(x, 2 * std::cos(3));
  });
}

// --- DistributedDataParallelSingleProcessTest ---------------------------------------------------

// Ten iterations of Adam on the sum, on one rank: as without it.
TEST(DistributedDataParallelSingleProcessTest, Cpu) {
  Job job({"Host", DirectCluster("host")}, 1);
  const World& world = job.world(0);
  const auto plain = std::make_shared<nn::Linear>(2, 2);
  const auto module = std::make_shared<nn::Linear>(2, 2);
  ASSERT_TRUE(plain->Init(world, 1).ok());
  ASSERT_TRUE(module->Init(world, 1).ok());
  const auto model = nn::DistributedDataParallel::Create(module, world);
  ASSERT_TRUE(model.ok()) << model.status();
  nn::Adam::Options rate;
  rate.learning_rate = 1e-3;
  nn::Adam plain_adam(plain->parameters(), rate);
  nn::Adam adam(module->parameters(), rate);
  const Tensor x = nn::init::Normal()(world, DType::kF32, {30, 2}, 7);
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(Backward(Sum((*plain)(x))).ok());
    ASSERT_TRUE(plain_adam.Step().ok());
    ASSERT_TRUE(Backward(Sum((**model)(x))).ok());
    ASSERT_TRUE(adam.Step().ok());
  }
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(Values<float>(module->parameters()[i]()), Values<float>(plain->parameters()[i]()));
  }
}

// Their net: an LSTM of three layers of 256, 12 sequences of 100 steps, and a Linear of the last
// output; it only has to train.
TEST(DistributedDataParallelSingleProcessTest, Rnn) {
  class Net : public nn::Module {
   public:
    Net() : Module("Net") {}
    Tensor Forward(const Tensor& x) override {
      const Tensor y = lstm_(x);
      return head_(Reshape(Slice(y, 0, 99, 100), {12, 256}));
    }

   private:
    static nn::RnnOptions Layers() {
      nn::RnnOptions options;
      options.layers = 3;
      return options;
    }
    nn::Lstm& lstm_ = Add<nn::Lstm>("lstm", 256, 256, Layers());
    nn::Linear& head_ = Add<nn::Linear>("head", 256, 256);
  };
  Job job({"Host", DirectCluster("host")}, 1);
  const World& world = job.world(0);
  const auto net = std::make_shared<Net>();
  ASSERT_TRUE(net->Init(world, 1).ok());
  const auto model = nn::DistributedDataParallel::Create(net, world);
  ASSERT_TRUE(model.ok()) << model.status();
  nn::Sgd sgd(net->parameters(), {});
  const Tensor x = nn::init::Normal()(world, DType::kF32, {100, 12, 256}, 3);
  const Tensor target = nn::init::Uniform(0, 1)(world, DType::kF32, {12, 256}, 4);
  Floats losses;
  for (int i = 0; i < 3; ++i) {
    const Tensor loss = nn::MseLoss((**model)(x), target);
    const absl::Status backward = Backward(loss);
    ASSERT_TRUE(backward.ok()) << backward;
    ASSERT_TRUE(sgd.Step().ok());
    losses.push_back(Values<float>(loss)[0]);
  }
  EXPECT_LT(losses[2], losses[0]);
}

// --- test_functional_differentials.py: four ranks -----------------------------------------------

class FunctionalDifferentialsTest : public ::testing::Test {
 protected:
  Job job_{{"Host", DirectCluster("host")}, 4};
};

TEST_F(FunctionalDifferentialsTest, AllReduce) {
  struct Case {
    ReduceOp op;
    float result;
    Floats grads;  // by rank
  };
  const std::vector<Case> cases = {
      {Reduction::kSum, 6, {4, 4, 4, 4}},         {Reduction::kAvg, 1.5, {1, 1, 1, 1}},
      {Reduction::kMin, 0, {4, 0, 0, 0}},         {Reduction::kMax, 3, {0, 0, 0, 4}},
      {ReduceOp::PremulSum(.5), 3, {2, 2, 2, 2}},
  };
  job_.Run([&](int rank, World& world) {
    for (const Case& c : cases) {
      const Tensor x = Fill(world, {3, 3}, rank);
      const Tensor y = AllReduce(x, world, c.op);
      EXPECT_THAT(Values<float>(y), All(9, c.result));
      ASSERT_TRUE(Backward(Sum(y)).ok());
      EXPECT_THAT(Values<float>(x.grad()), All(9, c.grads[static_cast<size_t>(rank)]));
    }
  });
}

// Element i is held by the ranks with r + i < 4.
TEST_F(FunctionalDifferentialsTest, Ties) {
  job_.Run([](int rank, World& world) {
    Floats values;
    Floats wanted;
    for (int i = 0; i < 4; ++i) {
      const bool holds = rank + i < 4;
      values.push_back(holds ? 1 : 0);
      wanted.push_back(holds ? 4.0F / static_cast<float>(4 - i) : 0);
    }
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const double sign : {1.0, -1.0}) {
        const Reduction op = sign > 0 ? Reduction::kMax : Reduction::kMin;
        for (const bool coalesced : {false, true}) {
          const Tensor x = Cast(FromHost(world, values, {4}) * sign, dtype).Detach().RequireGrad();
          const Tensor y =
              coalesced ? AllReduceCoalesced({x}, world, op)[0] : AllReduce(x, world, op);
          ASSERT_TRUE(Backward(Sum(y)).ok());
          const Floats grads = Values<float>(Cast(x.grad(), DType::kF32));
          for (size_t i = 0; i < 4; ++i) {
            // bf16 has 8 bits.
            EXPECT_NEAR(grads[i], wanted[i], dtype == DType::kF32 ? 1e-6 : 4e-3) << i;
          }
        }
      }
    }
  });
}

TEST_F(FunctionalDifferentialsTest, NanIsTheFirstRanksAlone) {
  job_.Run([](int rank, World& world) {
    Floats values(9, static_cast<float>(rank));
    if (rank == 0) values[0] = std::nanf("");
    const Tensor x = FromHost(world, values, {3, 3}).RequireGrad();
    const Tensor y = AllReduce(x, world, Reduction::kMax);
    EXPECT_TRUE(std::isnan(Values<float>(y)[0]));
    ASSERT_TRUE(Backward(Sum(y)).ok());
    const Floats grads = Values<float>(x.grad());
    EXPECT_EQ(grads[0], rank == 0 ? 4 : 0);
    for (size_t i = 1; i < 9; ++i) EXPECT_EQ(grads[i], rank == 3 ? 4 : 0);
  });
}

TEST_F(FunctionalDifferentialsTest, AllGatherTensor) {
  job_.Run([](int rank, World& world) {
    for (const int64_t dim : {0, 1, 2}) {
      const Tensor x = Fill(world, {3, 3, 3}, rank);
      const Tensor y = AllGatherIntoTensor(x, world, {}, dim);
      Shape shape = {3, 3, 3};
      shape[static_cast<size_t>(dim)] = 12;
      ASSERT_EQ(y.shape(), shape);
      const Tensors blocks = Split(y, 3, dim);
      for (int r = 0; r < 4; ++r) {
        EXPECT_THAT(Values<float>(blocks[static_cast<size_t>(r)]), All(27, r));
      }
      ASSERT_TRUE(Backward(Sum(y)).ok());
      ExpectGrad(x, 4);
    }
  });
}

TEST_F(FunctionalDifferentialsTest, ReduceScatterTensor) {
  job_.Run([](int rank, World& world) {
    for (const int64_t dim : {0, 1}) {
      const Tensor x = Fill(world, dim == 0 ? Shape{16, 3} : Shape{3, 16}, rank);
      const Tensor y = ReduceScatterTensor(x, world, Reduction::kSum, {}, dim);
      EXPECT_EQ(y.shape(), dim == 0 ? Shape({4, 3}) : Shape({3, 4}));
      EXPECT_THAT(Values<float>(y), All(12, 6));
      ASSERT_TRUE(Backward(Sum(y)).ok());
      ExpectGrad(x, 1);
    }
  });
}

TEST_F(FunctionalDifferentialsTest, AllToAllSingle) {
  job_.Run([](int rank, World& world) {
    const Tensor x = Fill(world, {8, 3}, rank);
    const Tensor y = AllToAllSingle(x, world);
    const Tensors blocks = Split(y, 2);
    for (int r = 0; r < 4; ++r) {
      EXPECT_THAT(Values<float>(blocks[static_cast<size_t>(r)]), All(6, r));
    }
    ASSERT_TRUE(Backward(Sum(y)).ok());
    ExpectGrad(x, 1);
  });
}

// --- test_functional_api.py: two ranks ----------------------------------------------------------

TEST_F(C10dSpawnTest, FunctionalApiBackward) {
  job_.Run([](int rank, World& world) {
    const Tensor t = Fill(world, {4, 2}, 1);
    const Tensor swapped = AllToAllSingle(t * 2, world);
    EXPECT_THAT(Values<float>(swapped), All(8, 2));
    ASSERT_TRUE(Backward(Sum(swapped)).ok());
    ExpectGrad(t, 2);

    const Tensor gathered = Fill(world, {4, 2}, 1);
    const Tensor all = GatherIntoTensor(gathered * 2, 0, world);
    ASSERT_TRUE(Backward(rank == 0 ? Sum(all) : all).ok());
    ExpectGrad(gathered, 2);

    const Tensor whole = Fill(world, {4, 2}, 2);
    const Tensor piece = ScatterTensor(rank == 0 ? whole : Tensor(), DType::kF32, {2, 2}, 0, world);
    EXPECT_THAT(Values<float>(piece), All(4, 2));
    ASSERT_TRUE(Backward(Sum(piece)).ok());
    if (rank == 0) ExpectGrad(whole, 1);
  });
}

// --- test_nccl.py, TestCudaComm: two devices of one process
// ---------------------------------------

class CommTest : public ::testing::Test {
 protected:
  void SetUp() override {
    conformance::ClusterOptions options;
    options.devices = 2;
    absl::StatusOr<std::unique_ptr<conformance::Cluster>> cluster = DirectCluster("host")(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    const absl::StatusOr<Session> session = cluster_->Open({0, 1});
    ASSERT_TRUE(session.ok()) << session.status();
    const absl::StatusOr<DeviceGroup> group = DeviceGroup::Create(*session);
    ASSERT_TRUE(group.ok()) << group.status();
    devices_ = *group;
  }
  Tensor On(int index, const Floats& values, const Shape& shape) const {
    return FromHost(devices_.device(index), values, shape);
  }
  // Of any numbers that a seed gives.
  Floats Random(int64_t count, uint64_t seed) const {
    return Values<float>(nn::init::Uniform(0, 1)(devices_.device(0), DType::kF32, {count}, seed));
  }

  std::unique_ptr<conformance::Cluster> cluster_;
  DeviceGroup devices_;
};

TEST_F(CommTest, NcclBroadcastReduceAllReduceAllGatherReduceScatter) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(DTypeName(dtype));
    const auto floats = [](const Tensor& x) { return Values<float>(Cast(x, DType::kF32)); };
    const Tensors xs = {Cast(On(0, Random(128, 1), {128}), dtype),
                        Cast(On(1, Random(128, 2), {128}), dtype)};
    const Floats sum = floats(xs[0] + CopyTo(xs[1], devices_.device(0)));
    for (const Tensor& copy : parallel::Broadcast(xs[0], devices_)) {
      EXPECT_EQ(floats(copy), floats(xs[0]));
    }
    EXPECT_EQ(floats(parallel::ReduceAdd(xs, devices_)), sum);
    Tensors all;
    Tensors gathered;
    Tensors scattered;
    for (int d = 0; d < 2; ++d) {
      all.push_back(AllReduce(xs[static_cast<size_t>(d)], devices_.world(d)));
    }
    for (int d = 0; d < 2; ++d) {
      gathered.push_back(AllGatherIntoTensor(xs[static_cast<size_t>(d)], devices_.world(d)));
    }
    for (int d = 0; d < 2; ++d) {
      scattered.push_back(
          ReduceScatterTensor(Slice(xs[static_cast<size_t>(d)], 0, 0, 64), devices_.world(d)));
    }
    Floats both = floats(xs[0]);
    const Floats second = floats(xs[1]);
    both.insert(both.end(), second.begin(), second.end());
    for (size_t d = 0; d < 2; ++d) {
      EXPECT_EQ(floats(all[d]), sum);
      EXPECT_EQ(floats(gathered[d]), both);
      const auto begin = sum.begin() + static_cast<int64_t>(32 * d);
      EXPECT_EQ(floats(scattered[d]), Floats(begin, begin + 32));
    }
  }
}

TEST_F(CommTest, Broadcast) {
  const Floats values = Random(25, 3);
  for (int from = 0; from < 2; ++from) {
    const Tensors copies = parallel::Broadcast(On(from, values, {5, 5}), devices_);
    for (int d = 0; d < 2; ++d) {
      EXPECT_EQ(copies[static_cast<size_t>(d)].device().slot(), devices_.device(d).slot());
      EXPECT_EQ(Values<float>(copies[static_cast<size_t>(d)]), values);
    }
  }
}

// Tensors of several types around a buffer of 100 bytes, and empty ones around one of 256.
TEST_F(CommTest, BroadcastCoalescedAndReduceAddCoalesced) {
  const auto mixed = [&](int device, bool with_empty) {
    Tensors xs;
    const std::vector<DType> dtypes = {DType::kI64, DType::kI64, DType::kF32, DType::kI64,
                                       DType::kI32, DType::kF32, DType::kI64, DType::kF32};
    for (size_t i = 0; i < dtypes.size(); ++i) {
      const int64_t size = with_empty && i % 3 == 1 ? 0 : static_cast<int64_t>(5 * (i + 1));
      Floats values = Random(size, 10 * i + static_cast<uint64_t>(device));
      for (float& value : values) value = std::floor(value * 100);
      xs.push_back(Cast(On(device, values, {size}), dtypes[i]));
    }
    return xs;
  };
  for (const bool with_empty : {false, true}) {
    const int64_t buffer = with_empty ? 256 : 100;
    const std::vector<Tensors> xs = {mixed(0, with_empty), mixed(1, with_empty)};
    const auto copies = parallel::BroadcastCoalesced(xs[0], devices_, buffer);
    const Tensors sums = parallel::ReduceAddCoalesced(xs, devices_, 0, buffer);
    for (size_t i = 0; i < xs[0].size(); ++i) {
      const auto doubles = [](const Tensor& x) { return Values<double>(Cast(x, DType::kF64)); };
      for (size_t d = 0; d < 2; ++d) {
        EXPECT_EQ(copies[d][i].dtype(), xs[0][i].dtype());
        EXPECT_EQ(doubles(copies[d][i]), doubles(xs[0][i]));
      }
      EXPECT_EQ(doubles(sums[i]), doubles(xs[0][i] + CopyTo(xs[1][i], devices_.device(0))));
    }
  }
}

TEST_F(CommTest, Scatter) {
  struct Case {
    Shape shape;
    int64_t dim;
    std::vector<int64_t> sizes;
  };
  for (const Case& c :
       std::vector<Case>{{{4, 4}, 0, {}}, {{4, 4}, 1, {}}, {{4, 4}, -2, {}}, {{6, 4}, 0, {2, 4}}}) {
    const Tensor x = On(0, Random(c.shape[0] * c.shape[1], 4), c.shape);
    const Tensors chunks = parallel::Scatter(x, devices_, c.sizes, c.dim);
    const int64_t dim = (c.dim + 2) % 2;
    int64_t begin = 0;
    for (size_t d = 0; d < 2; ++d) {
      const int64_t size = c.sizes.empty() ? 2 : c.sizes[d];
      EXPECT_EQ(Values<float>(chunks[d]), Values<float>(Slice(x, dim, begin, begin + size)));
      EXPECT_EQ(chunks[d].device().slot(), devices_.device(static_cast<int>(d)).slot());
      begin += size;
    }
  }
}

TEST_F(CommTest, Gather) {
  const Tensors xs = {On(0, Random(10, 5), {2, 5}), On(1, Random(10, 6), {2, 5})};
  for (const int64_t dim : {0, 1, -1}) {
    for (int destination = 0; destination < 2; ++destination) {
      const Tensor y = parallel::Gather(xs, devices_, destination, dim);
      const Tensor wanted = Concat({xs[0], CopyTo(xs[1], devices_.device(0))}, (dim + 2) % 2);
      EXPECT_EQ(y.shape(), wanted.shape());
      EXPECT_EQ(Values<float>(y), Values<float>(wanted));
      EXPECT_EQ(y.device().slot(), devices_.device(destination).slot());
    }
  }
}

}  // namespace
}  // namespace chorus
