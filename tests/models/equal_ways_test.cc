// One model, one batch, and every way in which it can be trained: on one device or on four, in one
// process or as ranks, call by call or as one graph. All give the same losses and parameters but
// for the order in which floating-point numbers are added, and each the same bits every time.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/types/optional.h"
#include "benchmarks/transformer.h"
#include "chorus/chorus.h"
#include "chorus/functional/math.h"
#include "chorus/nn/nn.h"
#include "chorus/parallel.h"
#include "examples/07_resnet/model.h"
#include "gtest/gtest.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace {

using conformance::ConformanceParam;
using conformance::DirectCluster;
using conformance::Job;
using conformance::JobOptions;
using conformance::Values;
using parallel::DeviceGroup;

using Doubles = std::vector<double>;
using Tensors = std::vector<Tensor>;
constexpr int kParts = 4;     // devices, or ranks
constexpr int64_t kRows = 8;  // of a batch, over all parts
constexpr int kSteps = 3;

// --- Models -------------------------------------------------------------------------------------

struct Model {
  const char* name;
  // `ranks`: who has the other rows, if anybody.
  std::function<std::shared_ptr<nn::Module>(const absl::optional<Group>& ranks)> make;
  // Rows [begin, end) of a step's batch: what the model takes, and labels.
  std::function<Tensors(const DeviceRef& device, DType dtype, int step, int64_t begin, int64_t end)>
      batch;
};
std::ostream& operator<<(std::ostream& os, const Model& model) { return os << model.name; }

// Integers below `limit`, for each row others.
Tensor Integers(const DeviceRef& device, int step, int64_t begin, int64_t end, int64_t each,
                int64_t limit, int64_t salt) {
  std::vector<int32_t> values;
  for (int64_t i = begin * each; i < end * each; ++i) {
    values.push_back(static_cast<int32_t>((i * i * 7 + i * 13 + salt * 5 + step * 3) % limit));
  }
  return FromHost(device, values, each == 1 ? Shape{end - begin} : Shape{end - begin, each});
}

Model TransformerModel() {
  constexpr int64_t kContext = 5, kSymbols = 11;
  return {"Transformer",
          [](const absl::optional<Group>&) {
            bench::TransformerSizes sizes;
            sizes.symbols = kSymbols;
            sizes.context = kContext;
            sizes.width = 8;
            sizes.heads = 2;
            return bench::Transformer(sizes);
          },
          [](const DeviceRef& device, DType, int step, int64_t begin, int64_t end) {
            return Tensors{Integers(device, step, begin, end, kContext, kSymbols, 0),
                           Integers(device, step, begin, end, kContext, kSymbols, 1)};
          }};
}

using NormOf = std::function<resnet::Norm(const absl::optional<Group>& ranks)>;
Model ResnetModel(const char* name, const NormOf& norm) {
  constexpr int64_t kSide = 7, kClasses = 3;
  return {name,
          [norm](const absl::optional<Group>& ranks) {
            resnet::Sizes sizes;
            sizes.channels = 2;
            sizes.width = 4;
            sizes.stages = 2;
            sizes.classes = kClasses;
            return resnet::Resnet(sizes, norm(ranks));
          },
          [](const DeviceRef& device, DType dtype, int step, int64_t begin, int64_t end) {
            constexpr int64_t kPixels = 2 * kSide * kSide;
            Doubles pixels;
            for (int64_t i = begin * kPixels; i < end * kPixels; ++i) {
              pixels.push_back(std::sin(12.9898 * static_cast<double>(i + 1) + 78.233 * step));
            }
            return Tensors{Cast(FromHost(device, pixels, {end - begin, 2, kSide, kSide}), dtype),
                           Integers(device, step, begin, end, 1, kClasses, 2)};
          }};
}

// What normalises alike however a batch is cut: a row by itself, or all rows wherever they are.
Model GroupNormResnet() {
  return ResnetModel("GroupNormResnet", [](const absl::optional<Group>&) {
    return [](int64_t channels) { return nn::Make<nn::GroupNorm>(2, channels); };
  });
}
Model SyncBatchNormResnet() {
  return ResnetModel("SyncBatchNormResnet", [](const absl::optional<Group>& ranks) {
    return [ranks](int64_t channels) {
      nn::BatchNormOptions options;
      options.replicas = true;
      if (ranks.has_value()) options.ranks = *ranks;
      return nn::Make<nn::BatchNorm>(channels, options);
    };
  });
}
Model BatchNormResnet() {
  return ResnetModel("BatchNormResnet",
                     [](const absl::optional<Group>&) { return &resnet::BatchNorm; });
}

// --- Ways ---------------------------------------------------------------------------------------

struct Trained {
  Doubles losses;                               // by step
  std::vector<std::vector<Doubles>> variables;  // before each step and behind the last one

  void Keep(const nn::Module& module) {
    variables.emplace_back();
    for (const nn::Variable& variable : module.variables()) {
      variables.back().push_back(Values<double>(Cast(variable().Detach(), DType::kF64)));
    }
  }
  void Keep(const Tensor& loss, const nn::Module& module) {
    losses.push_back(Values<double>(Cast(loss.Detach(), DType::kF64)).at(0));
    Keep(module);
  }
};

Tensor LossOf(nn::Module& model, const Tensors& batch) {
  return nn::CrossEntropyLoss(model(batch[0]), batch[1]);
}

nn::Sgd::Options Rate() {
  nn::Sgd::Options options;
  options.momentum = 0.9;
  return options;
}

// `ranks`: whose losses' mean is kept, where there are some. `share`: and whose gradients', which a
// DistributedDataParallel sees to by itself.
void TrainEagerly(nn::Module* model, const absl::optional<Group>& ranks, bool share,
                  const std::function<Tensors(int step)>& batch, Trained* trained) {
  nn::Sgd sgd(model->parameters(), Rate());
  trained->Keep(*model);
  for (int step = 0; step < kSteps; ++step) {
    const Tensor loss = LossOf(*model, batch(step));
    ASSERT_TRUE(Backward(loss).ok());
    const NoGrad no_grad;
    Tensors gradients = sgd.gradients();
    for (Tensor& gradient : gradients) {
      if (share) gradient = AllReduce(gradient, *ranks, Reduction::kAvg);
    }
    const absl::Status updated = sgd.Step(gradients);
    ASSERT_TRUE(updated.ok()) << updated;
    const Tensor alone = loss.Detach();
    trained->Keep(ranks.has_value() ? AllReduce(alone, *ranks, Reduction::kAvg) : alone, *model);
  }
}

void TrainCompiled(nn::Module* model, const absl::optional<Group>& ranks, bool share,
                   const std::function<Tensors(int step)>& batch, Trained* trained) {
  nn::Sgd sgd(model->parameters(), Rate());
  nn::TrainStep::Options options;
  if (share) options.ranks = ranks;
  nn::TrainStep train(
      model, &sgd, [model](const Tensors& in) { return LossOf(*model, in); }, options);
  trained->Keep(*model);
  for (int step = 0; step < kSteps; ++step) {
    const absl::StatusOr<Tensor> loss = train(batch(step));
    ASSERT_TRUE(loss.ok()) << loss.status();
    const bool alone = share || !ranks.has_value();
    trained->Keep(alone ? *loss : AllReduce(*loss, *ranks, Reduction::kAvg), *model);
  }
  EXPECT_EQ(train.traces(), 1);
}

enum class Where { kOneDevice, kDevices, kRanks, kDistributed };
struct Way {
  const char* name;
  Where where;
  bool compiled;
};
constexpr Way kReference = {"one device, eagerly", Where::kOneDevice, false};
constexpr Way kWays[] = {
    kReference,
    {"one device, compiled", Where::kOneDevice, true},
    {"four by DataParallel, eagerly", Where::kDevices, false},
    {"four by DataParallel, compiled", Where::kDevices, true},
    {"four ranks, eagerly", Where::kRanks, false},
    {"four ranks by TrainStep", Where::kRanks, true},
    {"four ranks by DistributedDataParallel, eagerly", Where::kDistributed, false},
    {"four ranks by DistributedDataParallel, compiled", Where::kDistributed, true},
};

// By rank, where there are some.
std::vector<Trained> Train(const Model& model, const Way& way, DType dtype) {
  JobOptions options;
  options.ranks = way.where == Where::kOneDevice ? 1 : kParts;
  if (way.where == Where::kDevices) options.sessions = 1;
  Job job(ConformanceParam{"Host", DirectCluster("host")}, options);
  const bool on_ranks = way.where == Where::kRanks || way.where == Where::kDistributed;
  std::vector<Trained> trained(on_ranks ? kParts : 1);
  const auto train = [&](const DeviceRef& device, const absl::optional<Group>& ranks,
                         const DeviceGroup* devices, int64_t begin, int64_t end, Trained* result) {
    std::shared_ptr<nn::Module> module = model.make(ranks);
    ASSERT_TRUE(module->Init(device, 1, dtype).ok());
    if (devices != nullptr) module = std::make_shared<nn::DataParallel>(module, *devices);
    if (way.where == Where::kDistributed) {
      const auto made = nn::DistributedDataParallel::Create(module, *ranks);
      ASSERT_TRUE(made.ok()) << made.status();
      module = *made;
    }
    const auto batch = [&](int step) { return model.batch(device, dtype, step, begin, end); };
    if (way.compiled) {
      TrainCompiled(module.get(), ranks, way.where == Where::kRanks, batch, result);
    } else {
      TrainEagerly(module.get(), ranks, way.where == Where::kRanks, batch, result);
    }
  };
  if (on_ranks) {
    job.Run([&](int rank, World& world) {
      train(world, world.group(), nullptr, rank * kRows / kParts, (rank + 1) * kRows / kParts,
            &trained[static_cast<size_t>(rank)]);
    });
  } else {
    const Session& session = job.session(0);
    const absl::StatusOr<DeviceGroup> devices = DeviceGroup::Create(session);
    EXPECT_TRUE(devices.ok()) << devices.status();
    if (!devices.ok()) return trained;
    const bool all = way.where == Where::kDevices;
    train(session, absl::nullopt, all ? &*devices : nullptr, 0, kRows, &trained[0]);
  }
  return trained;
}

// --- Comparisons --------------------------------------------------------------------------------

bool SameBits(const Doubles& a, const Doubles& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

void ExpectSameBits(const Trained& got, const Trained& expected) {
  EXPECT_TRUE(SameBits(got.losses, expected.losses));
  ASSERT_EQ(got.variables.size(), expected.variables.size());
  for (size_t step = 0; step < got.variables.size(); ++step) {
    for (size_t i = 0; i < got.variables[step].size(); ++i) {
      EXPECT_TRUE(SameBits(got.variables[step][i], expected.variables[step][i]))
          << "variable " << i << " after " << step << " steps";
    }
  }
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The largest difference of a number, by the largest number of its tensor.
double Difference(const Trained& got, const Trained& expected) {
  double worst = 0;
  const auto compare = [&worst](const Doubles& a, const Doubles& b) {
    ASSERT_EQ(a.size(), b.size());
    double largest = 0;
    for (const double value : b) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < a.size(); ++i) {
      if (a[i] == b[i]) continue;
      const double difference = std::abs(a[i] - b[i]) / std::max(largest, 1e-300);
      // Nothing is worse than a NaN.
      worst = std::max(worst, std::isnan(difference) ? kInfinity : difference);
    }
  };
  compare(got.losses, expected.losses);
  EXPECT_EQ(got.variables.size(), expected.variables.size());
  for (size_t step = 0; step < expected.variables.size(); ++step) {
    for (size_t i = 0; i < expected.variables[step].size(); ++i) {
      compare(got.variables[step][i], expected.variables[step][i]);
    }
  }
  return worst;
}

class EqualWaysTest : public ::testing::TestWithParam<std::tuple<Model, DType>> {};

TEST_P(EqualWaysTest, GiveTheSameWithinReductionOrderAndTheirOwnBits) {
  const auto& [model, dtype] = GetParam();
  const Trained reference = Train(model, kReference, dtype).at(0);
  ASSERT_EQ(reference.losses.size(), static_cast<size_t>(kSteps));
  // Every variable changes, but for what softmax does not see.
  const std::vector<nn::NamedVariable> named = model.make(absl::nullopt)->named_variables();
  for (size_t i = 0; i < named.size(); ++i) {
    if (absl::EndsWith(named[i].name, "key.bias")) continue;
    EXPECT_NE(reference.variables[0][i], reference.variables[1][i]) << named[i].name;
  }
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    const std::vector<Trained> first = Train(model, way, dtype);
    EXPECT_LE(Difference(first[0], reference), dtype == DType::kF64 ? 1e-12 : 1e-4);
    for (const Trained& rank : first) ExpectSameBits(rank, first[0]);
    for (const Trained& rank : Train(model, way, dtype)) ExpectSameBits(rank, first[0]);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EqualWaysTest,
                         ::testing::Combine(::testing::Values(TransformerModel(), GroupNormResnet(),
                                                              SyncBatchNormResnet()),
                                            ::testing::Values(DType::kF32, DType::kF64)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) +
                                  (std::get<1>(info.param) == DType::kF64 ? "F64" : "F32");
                         });

// Batch norms that share no batch see the rows of their rank, or device, alone: four of either are
// equal, and one device with all rows is something else.
TEST(BatchNormTest, PartsAreEqualToPartsAndNotToTheWhole) {
  const Model model = BatchNormResnet();
  const Trained devices = Train(model, {"", Where::kDevices, false}, DType::kF64)[0];
  const Trained compiled = Train(model, {"", Where::kDevices, true}, DType::kF64)[0];
  const Trained ranks = Train(model, {"", Where::kRanks, true}, DType::kF64)[0];
  const Trained whole = Train(model, kReference, DType::kF64)[0];
  EXPECT_LE(Difference(compiled, devices), 1e-12);
  EXPECT_LE(Difference(ranks, devices), 1e-12);
  EXPECT_GE(Difference(whole, devices), 1e-3);
}

// A layer behind one that refuses is called with a tensor that has no shape.
TEST(TransformerTest, ATextThatIsTooLongIsTheErrorOfTheModel) {
  Job job(ConformanceParam{"Host", DirectCluster("host")}, 1);
  job.Run([](int, World& world) {
    bench::TransformerSizes sizes;
    sizes.context = 4;
    const std::shared_ptr<nn::Module> model = bench::Transformer(sizes);
    ASSERT_TRUE(model->Init(world, 1).ok());
    const std::string text((*model)(Zeros(world, DType::kI32, {1, 5})).status().message());
    EXPECT_NE(text.find("with n to 4, got"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace chorus
