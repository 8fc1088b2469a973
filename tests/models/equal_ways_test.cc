// One model, one batch, and every way in which it can be trained: on one device or on four, in one
// process or as ranks, call by call or as one graph. All give the same losses and parameters but
// for the order in which floating-point numbers are added, and each the same bits every time.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
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
  std::function<std::shared_ptr<nn::Module>()> make;
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
          [] {
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

Model ResnetModel(const char* name, const resnet::Norm& norm) {
  constexpr int64_t kSide = 7, kClasses = 3;
  return {name,
          [norm] {
            resnet::Sizes sizes;
            sizes.channels = 2;
            sizes.width = 4;
            sizes.stages = 2;
            sizes.classes = kClasses;
            return resnet::Resnet(sizes, norm);
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

// What normalises alike however a batch is cut. (A norm whose statistics cross ranks and devices
// may stand here too.)
Model NormedResnet() {
  return ResnetModel("Resnet",
                     [](int64_t channels) { return nn::Make<nn::GroupNorm>(2, channels); });
}

// --- Ways ---------------------------------------------------------------------------------------

struct Trained {
  Doubles losses;                                // by step
  std::vector<std::vector<Doubles>> parameters;  // before each step and behind the last one

  void Keep(const nn::Module& module) {
    parameters.emplace_back();
    for (const nn::Variable& variable : module.parameters()) {
      parameters.back().push_back(Values<double>(Cast(variable().Detach(), DType::kF64)));
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

// `ranks`: who has the other rows, if anybody.
void TrainEagerly(nn::Module* model, const absl::optional<Group>& ranks,
                  const std::function<Tensors(int step)>& batch, Trained* trained) {
  nn::Sgd sgd(model->parameters(), Rate());
  trained->Keep(*model);
  for (int step = 0; step < kSteps; ++step) {
    Tensor loss = LossOf(*model, batch(step));
    if (ranks.has_value()) loss = loss * (1.0 / ranks->size());
    ASSERT_TRUE(Backward(loss).ok());
    const NoGrad no_grad;
    loss = loss.Detach();
    Tensors gradients = sgd.gradients();
    if (ranks.has_value()) {
      for (Tensor& gradient : gradients) gradient = AllReduce(gradient, *ranks);
      loss = AllReduce(loss, *ranks);
    }
    const absl::Status updated = sgd.Step(gradients);
    ASSERT_TRUE(updated.ok()) << updated;
    trained->Keep(loss, *model);
  }
}

void TrainCompiled(nn::Module* model, const absl::optional<Group>& ranks,
                   const std::function<Tensors(int step)>& batch, Trained* trained) {
  nn::Sgd sgd(model->parameters(), Rate());
  nn::TrainStep::Options options;
  options.ranks = ranks;
  nn::TrainStep train(
      model, &sgd, [model](const Tensors& in) { return LossOf(*model, in); }, options);
  trained->Keep(*model);
  for (int step = 0; step < kSteps; ++step) {
    const absl::StatusOr<Tensor> loss = train(batch(step));
    ASSERT_TRUE(loss.ok()) << loss.status();
    trained->Keep(*loss, *model);
  }
  EXPECT_EQ(train.traces(), 1);
}

enum class Where { kOneDevice, kDevices, kRanks };
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
};

// By rank, where there are some.
std::vector<Trained> Train(const Model& model, const Way& way, DType dtype) {
  JobOptions options;
  options.ranks = way.where == Where::kOneDevice ? 1 : kParts;
  if (way.where == Where::kDevices) options.sessions = 1;
  Job job(ConformanceParam{"Host", DirectCluster("host")}, options);
  std::vector<Trained> trained(way.where == Where::kRanks ? kParts : 1);
  const auto train = [&](const DeviceRef& device, const absl::optional<Group>& ranks,
                         const DeviceGroup* devices, int64_t begin, int64_t end, Trained* result) {
    std::shared_ptr<nn::Module> module = model.make();
    ASSERT_TRUE(module->Init(device, 1, dtype).ok());
    if (devices != nullptr) module = std::make_shared<nn::DataParallel>(module, *devices);
    const auto batch = [&](int step) { return model.batch(device, dtype, step, begin, end); };
    if (way.compiled) {
      TrainCompiled(module.get(), ranks, batch, result);
    } else {
      TrainEagerly(module.get(), ranks, batch, result);
    }
  };
  if (way.where == Where::kRanks) {
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
  ASSERT_EQ(got.parameters.size(), expected.parameters.size());
  for (size_t step = 0; step < got.parameters.size(); ++step) {
    for (size_t i = 0; i < got.parameters[step].size(); ++i) {
      EXPECT_TRUE(SameBits(got.parameters[step][i], expected.parameters[step][i]))
          << "parameter " << i << " after " << step << " steps";
    }
  }
}

// The largest difference of a number, by the largest number of its tensor.
double Difference(const Trained& got, const Trained& expected) {
  double worst = 0;
  const auto compare = [&worst](const Doubles& a, const Doubles& b) {
    ASSERT_EQ(a.size(), b.size());
    double largest = 0;
    for (const double value : b) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < a.size(); ++i) {
      // A NaN counts too.
      const double difference = std::abs(a[i] - b[i]) / std::max(largest, 1e-300);
      if (a[i] != b[i] && !(difference <= worst)) worst = difference;
    }
  };
  compare(got.losses, expected.losses);
  EXPECT_EQ(got.parameters.size(), expected.parameters.size());
  for (size_t step = 0; step < expected.parameters.size(); ++step) {
    for (size_t i = 0; i < expected.parameters[step].size(); ++i) {
      compare(got.parameters[step][i], expected.parameters[step][i]);
    }
  }
  return worst;
}

class EqualWaysTest : public ::testing::TestWithParam<std::tuple<Model, DType>> {};

TEST_P(EqualWaysTest, GiveTheSameWithinReductionOrderAndTheirOwnBits) {
  const auto& [model, dtype] = GetParam();
  const Trained reference = Train(model, kReference, dtype).at(0);
  ASSERT_EQ(reference.losses.size(), static_cast<size_t>(kSteps));
  // Every parameter is trained, but for what softmax does not see.
  size_t i = 0;
  for (const nn::NamedVariable& named : model.make()->named_variables()) {
    if (!named.variable.is_parameter()) continue;
    if (!absl::EndsWith(named.name, "key.bias")) {
      EXPECT_NE(reference.parameters[0][i], reference.parameters[1][i]) << named.name;
    }
    ++i;
  }
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    const std::vector<Trained> first = Train(model, way, dtype);
    EXPECT_LE(Difference(first[0], reference), dtype == DType::kF64 ? 1e-12 : 1e-5);
    for (const Trained& rank : first) ExpectSameBits(rank, first[0]);
    for (const Trained& rank : Train(model, way, dtype)) ExpectSameBits(rank, first[0]);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EqualWaysTest,
                         ::testing::Combine(::testing::Values(TransformerModel(), NormedResnet()),
                                            ::testing::Values(DType::kF32, DType::kF64)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) +
                                  (std::get<1>(info.param) == DType::kF64 ? "F64" : "F32");
                         });

// Plain batch norms see the rows of their rank, or device, alone: four of either are equal, and one
// device with all rows is something else.
TEST(BatchNormTest, PartsAreEqualToPartsAndNotToTheWhole) {
  const Model model = ResnetModel("Resnet", &resnet::BatchNorm);
  const Trained devices = Train(model, {"", Where::kDevices, false}, DType::kF64)[0];
  const Trained compiled = Train(model, {"", Where::kDevices, true}, DType::kF64)[0];
  const Trained ranks = Train(model, {"", Where::kRanks, true}, DType::kF64)[0];
  const Trained whole = Train(model, kReference, DType::kF64)[0];
  EXPECT_LE(Difference(compiled, devices), 1e-12);
  EXPECT_LE(Difference(ranks, devices), 1e-12);
  EXPECT_GE(Difference(whole, devices), 1e-3);
}

}  // namespace
}  // namespace chorus
