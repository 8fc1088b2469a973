// Lesson 8: the network of lesson 7 on four devices of one process.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "chorus/chorus.h"
#include "chorus/data/progress_bar.h"
#include "chorus/functional/math.h"
#include "chorus/nn/nn.h"
#include "chorus/parallel.h"
#include "core/base/error.h"
#include "examples/07_resnet/images.h"
#include "examples/07_resnet/model.h"

ABSL_FLAG(std::string, plot, "", "An SVG file for the losses; empty: none.");

namespace {

namespace nn = chorus::nn;
using chorus::Tensor;
constexpr int64_t kBatch = 64, kSteps = 100;

absl::Status Run() {
  chorus::SessionOptions four;
  four.device_count = 4;
  CHORUS_ASSIGN_OR_RETURN(const chorus::Session session, chorus::Session::Open(four));
  CHORUS_ASSIGN_OR_RETURN(const auto devices, chorus::parallel::DeviceGroup::Create(session));
  CHORUS_ASSIGN_OR_RETURN(resnet::Images images, resnet::Images::Open("train", session, kBatch));
  const std::shared_ptr<nn::Module> module = resnet::Resnet();
  CHORUS_RETURN_IF_ERROR(module->Init(devices.device(0), /*seed=*/1));
  nn::DataParallel model(module, devices);
  nn::Sgd::Options options;
  options.momentum = 0.9;
  nn::Sgd optimizer(model.parameters(), options);
  const auto loss_of = [&](const auto& in) {
    return nn::CrossEntropyLoss(model(Cast(in[0], chorus::DType::kF32) * (1.0 / 255)), in[1]);
  };
  nn::TrainStep step(&model, &optimizer, loss_of);
  chorus::data::ProgressBar progress(stdout, kSteps);
  for (int64_t i = 1; i <= kSteps; ++i) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> batch, images.Next());
    CHORUS_ASSIGN_OR_RETURN(const Tensor loss, step(batch));
    CHORUS_ASSIGN_OR_RETURN(const float value, loss.Item<float>());
    progress.Show(i, value);
  }
  const std::string plot = absl::GetFlag(FLAGS_plot);
  if (!plot.empty()) CHORUS_RETURN_IF_ERROR(progress.WritePlot(plot));
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = Run();
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
