#include "examples/07_resnet/model.h"

#include "chorus/chorus.h"

namespace resnet {
namespace {

namespace nn = chorus::nn;
using chorus::Tensor;
using Layer = std::shared_ptr<nn::Module>;

// The norm behind it has a bias.
Layer Conv(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  chorus::Conv2dOptions options;
  options.stride = stride;
  options.padding = kernel / 2;
  return nn::Make<nn::Conv2d>(in, out, kernel, options, /*bias=*/false);
}

struct Block : nn::Module {
  Block(int64_t in, int64_t out, int64_t stride, const Norm& norm)
      : Module("Block"),
        body(Add<nn::Sequential>("body",
                                 nn::Modules{Conv(in, out, 3, stride), norm(out), nn::ReluLayer(),
                                             Conv(out, out, 3, 1), norm(out)})),
        skip(Add<nn::Sequential>("skip", in == out && stride == 1
                                             ? nn::Modules{}
                                             : nn::Modules{Conv(in, out, 1, stride), norm(out)})) {}
  Tensor Forward(const Tensor& x) override { return Relu(skip(x) + body(x)); }

  nn::Sequential& body;
  nn::Sequential& skip;
};

}  // namespace

Layer BatchNorm(int64_t channels) { return nn::Make<nn::BatchNorm>(channels); }

Layer Resnet(const Sizes& sizes, const Norm& norm) {
  int64_t width = sizes.width;
  nn::Modules layers = {Conv(sizes.channels, width, 3, 1), norm(width), nn::ReluLayer()};
  for (int64_t i = 0; i < sizes.stages * sizes.blocks; ++i) {
    const bool halves = i > 0 && i % sizes.blocks == 0;
    layers.push_back(nn::Make<Block>(width, halves ? 2 * width : width, halves ? 2 : 1, norm));
    if (halves) width *= 2;
  }
  layers.push_back(nn::Make<nn::AdaptiveAvgPool2d>(1));
  layers.push_back(nn::FlattenLayer());
  layers.push_back(nn::Make<nn::Linear>(width, sizes.classes));
  return nn::Make<nn::Sequential>(layers);
}

}  // namespace resnet
