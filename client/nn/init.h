// First values of parameters, by their usual names. Numbers are drawn on the device, by Philox, and
// depend on the seed, the dtype and the shape alone.
//
// fan_in and fan_out of a weight [out, in, ...] are the sizes of a unit's inputs and outputs: in
// and out times the product of the rest; of a vector both are its size.
//
// Threads: any. Ownership: an Initializer is a value. Errors: in the tensors that it gives.
#ifndef CHORUS_CLIENT_NN_INIT_H_
#define CHORUS_CLIENT_NN_INIT_H_

#include "chorus/nn/module.h"

namespace chorus {
namespace nn {
namespace init {

Initializer Constant(double value);
Initializer Zeros();
Initializer Ones();
// Evenly in [low, high); mean and standard deviation.
Initializer Uniform(double low, double high);
Initializer Normal(double mean = 0, double deviation = 1);
// Normal, cut off at `low` and `high`: numbers beyond are drawn anew, 16 times in all, and then the
// bound.
Initializer TruncatedNormal(double mean, double deviation, double low, double high);
// Glorot and Bengio 2010: variance 2 gain^2 / (fan_in + fan_out).
Initializer XavierUniform(double gain = 1);
Initializer XavierNormal(double gain = 1);
// He et al. 2015: variance gain^2 / fan_in; the gain of relu is sqrt(2).
Initializer KaimingUniform(double gain = 1.4142135623730951);
Initializer KaimingNormal(double gain = 1.4142135623730951);
// Evenly within 1 / sqrt(fan_in) of 0: what Linear and convolutions begin with.
Initializer FanInUniform(int64_t fan_in);

}  // namespace init
}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_INIT_H_
