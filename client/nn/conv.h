// Layers for images [n, channels, height, width] and sequences [n, channels, length]: convolutions
// and pooling. Each says in its errors where it stands in the tree, what it expected and what it
// got.
//
// Threads: chorus/nn/module.h. Ownership: a layer owns its variables. Errors: in the results; sizes
//   that make no sense in a constructor come with Init and with every call.
#ifndef CHORUS_CLIENT_NN_CONV_H_
#define CHORUS_CLIENT_NN_CONV_H_

#include <cstdint>
#include <string>

#include "chorus/functional/conv.h"
#include "chorus/nn/module.h"

namespace chorus {
namespace nn {

// What convolutions have in common: weight, and bias [out] unless there is none. Both begin evenly
// within 1 / sqrt(k) of 0, where k is how many of the weight's numbers belong to one of its first
// dimension.
class Convolution : public Module {
 public:
  const Variable& weight() const { return weight_; }
  const Variable& bias() const { return bias_; }

 protected:
  Convolution(std::string kind, const Shape& weight, int64_t out, bool bias);
  // y plus a channel's bias.
  Tensor Biased(const Tensor& y) const;

 private:
  Variable weight_;
  Variable bias_;
};

// chorus::Conv1d; weight [out, in / groups, kernel].
class Conv1d : public Convolution {
 public:
  Conv1d(int64_t in, int64_t out, int64_t kernel, const Conv1dOptions& options = Conv1dOptions(),
         bool bias = true);
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

 private:
  const int64_t in_;
  const int64_t out_;
  const int64_t kernel_;
  const Conv1dOptions options_;
};

// chorus::Conv2d; weight [out, in / groups, kernel height, kernel width].
class Conv2d : public Convolution {
 public:
  Conv2d(int64_t in, int64_t out, HeightWidth kernel,
         const Conv2dOptions& options = Conv2dOptions(), bool bias = true);
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

 private:
  const int64_t in_;
  const int64_t out_;
  const HeightWidth kernel_;
  const Conv2dOptions options_;
};

// chorus::ConvTranspose2d; weight [in, out / groups, kernel height, kernel width].
class ConvTranspose2d : public Convolution {
 public:
  ConvTranspose2d(int64_t in, int64_t out, HeightWidth kernel,
                  const ConvTranspose2dOptions& options = ConvTranspose2dOptions(),
                  bool bias = true);
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

 private:
  const int64_t in_;
  const int64_t out_;
  const HeightWidth kernel_;
  const ConvTranspose2dOptions options_;
};

// chorus::MaxPool2d.
class MaxPool2d : public Module {
 public:
  explicit MaxPool2d(HeightWidth kernel, const MaxPool2dOptions& options = MaxPool2dOptions());
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

 private:
  const HeightWidth kernel_;
  const MaxPool2dOptions options_;
};

// chorus::AvgPool2d.
class AvgPool2d : public Module {
 public:
  explicit AvgPool2d(HeightWidth kernel, const AvgPool2dOptions& options = AvgPool2dOptions());
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

 private:
  const HeightWidth kernel_;
  const AvgPool2dOptions options_;
};

// chorus::AdaptiveAvgPool2d.
class AdaptiveAvgPool2d : public Module {
 public:
  explicit AdaptiveAvgPool2d(HeightWidth size);
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

 private:
  const HeightWidth size_;
};

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_CONV_H_
