// Lesson 9: a mixture of experts, one on each rank, learns Fashion-MNIST.
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "chorus/chorus.h"
#include "chorus/data/progress_bar.h"
#include "chorus/functional/math.h"
#include "chorus/functional/nn.h"
#include "chorus/nn/nn.h"
#include "core/base/error.h"
#include "examples/07_resnet/images.h"
#include "examples/09_moe/layer.h"

ABSL_FLAG(std::string, plot, "", "An SVG file for the losses; empty: none.");

namespace {

namespace nn = chorus::nn;
using chorus::DType;
using chorus::Tensor;
constexpr int64_t kPixels = 784, kWidth = 64, kHidden = 128, kBatch = 64, kSteps = 200;

struct Model : nn::Module {
  explicit Model(const chorus::Group& group)
      : Module("Model"), experts(Add<moe::Moe>("moe", kWidth, kHidden, group)) {}
  Tensor Embed(const Tensor& images) {
    return Relu(in(Reshape(Cast(images, DType::kF32), {-1, kPixels}) * (1.0 / 255)));
  }
  Tensor Forward(const Tensor& images) override {
    const Tensor x = Embed(images);
    return out(x + experts(x));
  }
  moe::Moe& experts;
  nn::Linear& in = Add<nn::Linear>("in", kPixels, kWidth);
  nn::Linear& out = Add<nn::Linear>("out", kWidth, 10);
};

absl::Status Run() {
  CHORUS_ASSIGN_OR_RETURN(const chorus::Session session, chorus::Session::Open());
  CHORUS_ASSIGN_OR_RETURN(const chorus::World world, session.Join());
  CHORUS_ASSIGN_OR_RETURN(resnet::Images images,
                          resnet::Images::Open("train", world, kBatch, world.rank(), world.size()));
  Model model(world);
  CHORUS_RETURN_IF_ERROR(model.Init(world, /*seed=*/1));
  nn::AdamW optimizer(model.parameters(), {});
  nn::TrainStep::Options options;
  options.on_gradients =
      moe::AddShared(model.parameters(), model.experts.expert_parameters(), world);
  const auto loss_of = [&](const auto& in) {
    const Tensor loss = nn::CrossEntropyLoss(model(in[0]), in[1]);
    return (loss + model.experts.Balance(model.Embed(in[0])) * 0.05) * (1.0 / world.size());
  };
  nn::TrainStep step(&model, &optimizer, loss_of, options);
  chorus::data::ProgressBar progress(world.rank() == 0 ? stdout : stderr, kSteps);
  std::vector<Tensor> batch;
  for (int64_t i = 1; i <= kSteps; ++i) {
    CHORUS_RETURN_IF_ERROR(world.Step(i));
    CHORUS_ASSIGN_OR_RETURN(batch, images.Next());
    CHORUS_ASSIGN_OR_RETURN(const Tensor loss, step(batch));
    CHORUS_ASSIGN_OR_RETURN(const float value, AllReduce(loss, world).Item<float>());
    if (world.rank() == 0) progress.Show(i, value);
  }
  const std::string plot = absl::GetFlag(FLAGS_plot);
  if (world.rank() == 0 && !plot.empty()) CHORUS_RETURN_IF_ERROR(progress.WritePlot(plot));
  // Which expert has learned what: of the last batch, by class, the images that go to each.
  const chorus::NoGrad no_grad;
  const Tensor expert = OneHot(model.experts.ExpertOf(model.Embed(batch[0])), world.size());
  const Tensor table = AllReduce(MatMul(Transpose(OneHot(batch[1], 10)), expert), world);
  CHORUS_RETURN_IF_ERROR(table.Wait());
  if (world.rank() == 0) std::cout << "experts by class: " << table << std::endl;
  return chorus::Barrier(world).Wait();
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = Run();
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
