// Lesson 7: a residual network with batch norms learns Fashion-MNIST, on any number of ranks.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_format.h"
#include "chorus/chorus.h"
#include "chorus/data/progress_bar.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "chorus/nn/nn.h"
#include "core/base/error.h"
#include "examples/07_resnet/images.h"
#include "examples/07_resnet/model.h"

ABSL_FLAG(std::string, plot, "", "An SVG file for the losses; empty: none.");

namespace {

namespace nn = chorus::nn;
using chorus::Tensor;
constexpr int64_t kBatch = 32, kSteps = 200, kTests = 1000;

absl::Status Run() {
  CHORUS_ASSIGN_OR_RETURN(const chorus::Session session, chorus::Session::Open());
  CHORUS_ASSIGN_OR_RETURN(const chorus::World world, session.Join());
  const int rank = world.rank(), ranks = world.size();
  CHORUS_ASSIGN_OR_RETURN(resnet::Images images,
                          resnet::Images::Open("train", world, kBatch, rank, ranks));
  CHORUS_ASSIGN_OR_RETURN(resnet::Images tests,
                          resnet::Images::Open("t10k", world, kTests / ranks, rank, ranks));
  const std::shared_ptr<nn::Module> model = resnet::Resnet();
  CHORUS_RETURN_IF_ERROR(model->Init(world, /*seed=*/1));
  const auto logits = [&](const Tensor& x) {
    return (*model)(Cast(x, chorus::DType::kF32) * (1.0 / 255));
  };
  nn::Sgd::Options options;
  options.momentum = 0.9;
  options.nesterov = true;
  nn::Sgd optimizer(model->parameters(), options);
  optimizer.SetSchedule(nn::WarmUp(10, nn::CosineDecay(kSteps - 10)));
  const auto loss_of = [&](const auto& in) { return nn::CrossEntropyLoss(logits(in[0]), in[1]); };
  nn::TrainStep step(model.get(), &optimizer, loss_of, {world.group()});
  chorus::data::ProgressBar progress(rank == 0 ? stdout : stderr, kSteps);
  for (int64_t i = 1; i <= kSteps; ++i) {
    CHORUS_RETURN_IF_ERROR(world.Step(i));
    CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> batch, images.Next());
    CHORUS_ASSIGN_OR_RETURN(const Tensor loss, step(batch));
    CHORUS_ASSIGN_OR_RETURN(const float value, loss.Item<float>());
    if (rank == 0) progress.Show(i, value);
  }
  const std::string plot = absl::GetFlag(FLAGS_plot);
  if (rank == 0 && !plot.empty()) CHORUS_RETURN_IF_ERROR(progress.WritePlot(plot));
  const chorus::NoGrad no_grad;
  model->Eval();
  CHORUS_ASSIGN_OR_RETURN(const std::vector<Tensor> test, tests.Next());
  const Tensor right = Equal(ArgMax(logits(test[0])), Cast(test[1], chorus::DType::kI64));
  const Tensor share =
      AllReduce(Mean(Cast(right, chorus::DType::kF32)), world, chorus::Reduction::kAvg);
  CHORUS_ASSIGN_OR_RETURN(const float accuracy, share.Item<float>());
  if (rank == 0) {
    progress.Say(absl::StrFormat("%.0f of 10 test images are put into their class", 10 * accuracy));
  }
  return chorus::Barrier(world).Wait();
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = Run();
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
