#include "chorus/nn/init.h"

#include <algorithm>
#include <cmath>

#include "chorus/functional/math.h"
#include "chorus/math.h"

namespace chorus {
namespace nn {
namespace init {
namespace {

struct Fans {
  double in = 1;
  double out = 1;
};

Fans FansOf(const Shape& shape) {
  Fans fans;
  if (shape.empty()) return fans;
  fans.in = static_cast<double>(shape[shape.size() > 1 ? 1 : 0]);
  fans.out = static_cast<double>(shape[0]);
  for (size_t i = 2; i < shape.size(); ++i) {
    fans.in *= static_cast<double>(shape[i]);
    fans.out *= static_cast<double>(shape[i]);
  }
  fans.in = std::max(fans.in, 1.0);
  fans.out = std::max(fans.out, 1.0);
  return fans;
}

// Of a variance that the shape decides.
template <typename Variance>
Initializer UniformOf(Variance variance) {
  return [variance](const DeviceRef& device, DType dtype, const Shape& shape, uint64_t seed) {
    const double bound = std::sqrt(3 * variance(FansOf(shape)));
    return Uniform(-bound, bound)(device, dtype, shape, seed);
  };
}
template <typename Variance>
Initializer NormalOf(Variance variance) {
  return [variance](const DeviceRef& device, DType dtype, const Shape& shape, uint64_t seed) {
    return Normal(0, std::sqrt(variance(FansOf(shape))))(device, dtype, shape, seed);
  };
}

}  // namespace

Initializer Constant(double value) {
  return [value](const DeviceRef& device, DType dtype, const Shape& shape, uint64_t) {
    return Full(device, dtype, shape, value);
  };
}
Initializer Zeros() { return Constant(0); }
Initializer Ones() { return Constant(1); }

Initializer Uniform(double low, double high) {
  return [low, high](const DeviceRef& device, DType dtype, const Shape& shape, uint64_t seed) {
    const Tensor y =
        RandomUniform(device, dtype, shape, static_cast<int64_t>(seed)) * (high - low) + low;
    // The sum may be rounded up to the end that is left out.
    return Where(y < std::max(low, high), y, low);
  };
}

Initializer Normal(double mean, double deviation) {
  return
      [mean, deviation](const DeviceRef& device, DType dtype, const Shape& shape, uint64_t seed) {
        return RandomNormal(device, dtype, shape, static_cast<int64_t>(seed)) * deviation + mean;
      };
}

Initializer TruncatedNormal(double mean, double deviation, double low, double high) {
  return [=](const DeviceRef& device, DType dtype, const Shape& shape, uint64_t seed) {
    constexpr int kDraws = 16;
    const auto draw = [&](int i) {
      return RandomNormal(device, dtype, shape, static_cast<int64_t>(seed), i) * deviation + mean;
    };
    Tensor x = draw(0);
    for (int i = 1; i < kDraws; ++i) {
      x = Where(LogicalAnd(x >= low, x <= high), x, draw(i));
    }
    return Clamp(x, low, high);
  };
}

Initializer XavierUniform(double gain) {
  return UniformOf([gain](const Fans& fans) { return 2 * gain * gain / (fans.in + fans.out); });
}
Initializer XavierNormal(double gain) {
  return NormalOf([gain](const Fans& fans) { return 2 * gain * gain / (fans.in + fans.out); });
}
Initializer KaimingUniform(double gain) {
  return UniformOf([gain](const Fans& fans) { return gain * gain / fans.in; });
}
Initializer KaimingNormal(double gain) {
  return NormalOf([gain](const Fans& fans) { return gain * gain / fans.in; });
}

Initializer FanInUniform(int64_t fan_in) {
  const double bound = fan_in > 0 ? 1 / std::sqrt(static_cast<double>(fan_in)) : 0;
  return Uniform(-bound, bound);
}

}  // namespace init
}  // namespace nn
}  // namespace chorus
