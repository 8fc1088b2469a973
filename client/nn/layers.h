// Layers. Each says in its errors where it stands in the tree, what it expected and what it got.
//
// Threads: chorus/nn/module.h. Ownership: a layer owns its variables. Errors: in the results; sizes
//   that make no sense in a constructor come with Init and with every call.
#ifndef CHORUS_CLIENT_NN_LAYERS_H_
#define CHORUS_CLIENT_NN_LAYERS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "chorus/functional/math.h"
#include "chorus/nn/module.h"

namespace chorus {
namespace nn {

// --- Functions ----------------------------------------------------------------------------------

// x Phi(x), with the error function, or with tanh (Hendrycks and Gimpel 2016). Half types are
// computed in f32, and rounded once.
enum class GeluForm { kExact, kTanh };
Tensor Gelu(const Tensor& x, GeluForm form = GeluForm::kExact, CallSite site = CallSite::Here());
Tensor Silu(const Tensor& x, CallSite site = CallSite::Here());  // x sigmoid(x)

// Over the last `dims` axes: (x - mean) / sqrt(variance + epsilon), with the variance of all.
Tensor LayerNormalize(const Tensor& x, int64_t dims, double epsilon,
                      CallSite site = CallSite::Here());

// Each element with probability 1 - p over 1 - p, else 0: which, by seed and offset alone. Half
// types are rounded once. `p` is from 0 to 1.
Tensor DropElements(const Tensor& x, double p, const RandomNumber& seed, const RandomNumber& offset,
                    CallSite site = CallSite::Here());

// softmax(q k^T / sqrt(d) + mask) v of [..., n, d], [..., m, d] and [..., m, e]. `mask`, unless it
// is undefined, is broadcast to [..., n, m] (kBadType where it would widen that): of bool, true
// where a query may look (as in PyTorch's scaled_dot_product_attention; its MultiheadAttention
// means the opposite), or numbers that are added. A query that may look at nothing gets NaN, and so
// do the gradients of all that it was computed from.
Tensor Attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const Tensor& mask = Tensor(), CallSite site = CallSite::Here());
// [n, n] of bool: true on and below the diagonal.
Tensor CausalMask(const DeviceRef& device, int64_t n, CallSite site = CallSite::Here());
// The same for the n steps of x [..., n, width], on its device. The error of x, where it has one:
// what Module::operator() calls Forward with has no shape then.
Tensor CausalMask(const Tensor& x, CallSite site = CallSite::Here());

// --- Random numbers of layers -------------------------------------------------------------------

// While one lives, layers on this thread that drop draw by `seed` and `offset`; each call has
// numbers of its own, by how many there have been before in the scope. Without any the seed is 0
// and the offset counts the calls of the process.
//
// A compiled function (chorus/compile.h) opens its own, whose `offset` is an input, such as the
// step's number: other numbers, the same graph. TrainStep does. One around Run would be for the
// trace alone: without one of the function's own a call that drops fails, FAILED_PRECONDITION
// kWrongState.
class RandomScope {
 public:
  explicit RandomScope(uint64_t seed, const RandomNumber& offset = 0);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

  struct Numbers {
    int64_t seed;
    RandomNumber offset;
  };
  // Of the next call on this thread.
  static Numbers Next();

 private:
  const uint64_t seed_;
  const RandomNumber offset_;
  const bool in_trace_;  // it is a compiled function's own
  uint64_t calls_ = 0;
  RandomScope* const outer_;
};

// --- Layers with parameters ---------------------------------------------------------------------

// [..., in] to [..., out]: x W^T + b. weight [out, in], bias [out]; both begin evenly within
// 1 / sqrt(in) of 0.
class Linear : public Module {
 public:
  Linear(int64_t in, int64_t out, bool bias = true);
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;
  const Variable& weight() const { return weight_; }
  const Variable& bias() const { return bias_; }

 private:
  const int64_t in_;
  const int64_t out_;
  Variable weight_;
  Variable bias_;
};

// Rows of a table [count, width] by integers [...]: [..., width]. The table begins normally
// distributed; `padding`: that row begins with 0 and gets no gradient (-1: none).
class Embedding : public Module {
 public:
  Embedding(int64_t count, int64_t width, int64_t padding = -1);
  Tensor Forward(const Tensor& indices) override;
  std::string description() const override;
  const Variable& weight() const { return weight_; }

 private:
  const int64_t count_;
  const int64_t width_;
  const int64_t padding_;
  Variable weight_;
};

// [..., n, width] plus the first n rows of a table [length, width], which begins normally
// distributed with deviation 0.02.
class PositionEmbedding : public Module {
 public:
  PositionEmbedding(int64_t length, int64_t width);
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

 private:
  const int64_t length_;
  const int64_t width_;
  Variable weight_;
};

// Over the last axes, of `shape`: normalised, times weight, plus bias.
class LayerNorm : public Module {
 public:
  explicit LayerNorm(int64_t width) : LayerNorm(Shape{width}) {}
  explicit LayerNorm(const Shape& shape, double epsilon = 1e-5, bool affine = true);
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

 private:
  const Shape shape_;
  const double epsilon_;
  Variable weight_;
  Variable bias_;
};

// Over the last axis: x / sqrt(mean(x^2) + epsilon), times weight (Zhang and Sennrich 2019).
class RmsNorm : public Module {
 public:
  explicit RmsNorm(int64_t width, double epsilon = 1e-6);
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

 private:
  const int64_t width_;
  const double epsilon_;
  Variable weight_;
};

// [n, channels, ...]: each sample's channels normalised in `groups` of equal size; weight and bias
// are a channel's.
class GroupNorm : public Module {
 public:
  GroupNorm(int64_t groups, int64_t channels, double epsilon = 1e-5, bool affine = true);
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

 private:
  const int64_t groups_;
  const int64_t channels_;
  const double epsilon_;
  Variable weight_;
  Variable bias_;
};

// DropElements in training, else x.
class Dropout : public Module {
 public:
  explicit Dropout(double p = 0.5);
  Tensor Forward(const Tensor& x) override;
  std::string description() const override;

 private:
  const double p_;
};

// Attention of `heads` heads with projections: of [batch, n, width]. Self-attention where it is
// called with one tensor.
class MultiheadAttention : public Module {
 public:
  MultiheadAttention(int64_t width, int64_t heads, bool bias = true);
  Tensor Forward(const Tensor& x) override;
  using Module::operator();
  // `mask`: Attention's, broadcast to [batch, heads, n, m].
  Tensor operator()(const Tensor& x, const Tensor& mask, CallSite site = CallSite::Here()) {
    return (*this)(x, x, x, mask, site);
  }
  Tensor operator()(const Tensor& query, const Tensor& key, const Tensor& value,
                    const Tensor& mask = Tensor(), CallSite site = CallSite::Here());
  std::string description() const override;

 private:
  Tensor Heads(const Tensor& x) const;
  // Between the hooks.
  Tensor Attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
                CallSite site);

  const int64_t width_;
  const int64_t heads_;
  Linear& query_;
  Linear& key_;
  Linear& value_;
  Linear& out_;
};

// For Sequential.
std::shared_ptr<Module> ReluLayer();
std::shared_ptr<Module> GeluLayer(GeluForm form = GeluForm::kExact);
std::shared_ptr<Module> SiluLayer();
std::shared_ptr<Module> TanhLayer();
std::shared_ptr<Module> SigmoidLayer();
std::shared_ptr<Module> SoftmaxLayer(int64_t axis = -1);
// From axis `begin` on.
std::shared_ptr<Module> FlattenLayer(int64_t begin = 1);

}  // namespace nn
}  // namespace chorus

#endif  // CHORUS_CLIENT_NN_LAYERS_H_
