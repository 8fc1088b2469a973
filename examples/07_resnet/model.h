// A small residual network (He et al. 2016), of nn's layers: what lessons 7 and 8, the tests and
// the benchmark train.
//
// Threads: chorus/nn/module.h. Ownership: the model is the caller's. Errors: as nn's layers.
#ifndef CHORUS_EXAMPLES_RESNET_MODEL_H_
#define CHORUS_EXAMPLES_RESNET_MODEL_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "chorus/nn/nn.h"

namespace resnet {

// What normalises so many channels.
using Norm = std::function<std::shared_ptr<chorus::nn::Module>(int64_t channels)>;
std::shared_ptr<chorus::nn::Module> BatchNorm(int64_t channels);

struct Sizes {
  int64_t channels = 1;  // of an image
  int64_t width = 16;    // channels of the first stage; each further one has twice as many, on
  int64_t stages = 3;    // images half as high and wide
  int64_t blocks = 1;    // of a stage
  int64_t classes = 10;
};

// [n, channels, height, width] to [n, classes]: a convolution, the blocks, the mean over what is
// left of the image, and a linear layer.
std::shared_ptr<chorus::nn::Module> Resnet(const Sizes& sizes = {}, const Norm& norm = &BatchNorm);

}  // namespace resnet

#endif  // CHORUS_EXAMPLES_RESNET_MODEL_H_
