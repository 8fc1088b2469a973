#include "chorus/nn/layers.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "chorus/functional/nn.h"
#include "chorus/functional/op.h"
#include "chorus/functional/shape.h"
#include "chorus/math.h"
#include "chorus/nn/init.h"
#include "client/internal/local.h"
#include "client/internal/trace.h"
#include "client/nn/compute_type.h"
#include "client/nn/normalize.h"
#include "core/base/error.h"
#include "core/base/mix_bits.h"

namespace chorus {
namespace nn {
namespace {

using internal::BroadcastShapes;
using internal::Fail;
using internal::IsUsable;
using internal::Trace;
using internal::TracesSizes;
using internal::TypeText;

// Over the last `dims` dimensions.
Norm LayerNormOver(const Tensor& x, int64_t dims, double epsilon) {
  const auto rank = static_cast<int64_t>(x.shape().size());
  return {{0, rank - dims}, {rank - dims, rank}, epsilon};
}

// a b^T, without a copy of b^T.
Tensor TransposedMatMul(const Tensor& a, const Tensor& b) {
  if (IsUsable(a) && IsUsable(b) && a.shape().size() >= 2 && a.shape().size() == b.shape().size() &&
      std::equal(a.shape().begin(), a.shape().end() - 2, b.shape().begin())) {
    return Op("matmul", {a, b}, {{"transpose_b", int64_t{1}}});
  }
  return MatMul(a, Transpose(b));
}

thread_local RandomScope* innermost_random = nullptr;

}  // namespace

// --- Functions ----------------------------------------------------------------------------------

Tensor Gelu(const Tensor& x, GeluForm form, CallSite site) {
  const CallSiteScope lines(site);
  // In a half type the sum with 1 cancels below 0, and x^3 is soon infinite.
  return InComputeType(x, [form](const Tensor& v) {
    if (form == GeluForm::kExact) return v * 0.5 * (Erf(v * std::sqrt(0.5)) + 1);
    constexpr double kSqrtOfTwoOverPi = 0.7978845608028654;
    return v * 0.5 * (Tanh((v + v * v * v * 0.044715) * kSqrtOfTwoOverPi) + 1);
  });
}

Tensor Silu(const Tensor& x, CallSite site) {
  const CallSiteScope lines(site);
  return InComputeType(x, [](const Tensor& v) { return v * Sigmoid(v); });
}

Tensor LayerNormalize(const Tensor& x, int64_t dims, double epsilon, CallSite site) {
  const CallSiteScope lines(site);
  if (!IsUsable(x)) return x * 1;
  return NormalizeRows(x, LayerNormOver(x, dims, epsilon));
}

Tensor DropElements(const Tensor& x, double p, const RandomNumber& seed, const RandomNumber& offset,
                    CallSite site) {
  const CallSiteScope lines(site);
  if (!IsUsable(x)) return x * 1;
  if (!(p >= 0 && p <= 1)) {
    return Fail(x, BadType(absl::StrCat("DropElements: expected a p from 0 to 1, got ", p)), site);
  }
  const Tensor mask = RandomUniform(x.device(), DType::kF32, x.shape(), seed, offset) >= p;
  const double scale = p < 1 ? 1 / (1 - p) : 0;
  return Where(mask, InComputeType(x, [scale](const Tensor& wide) { return wide * scale; }), 0);
}

Tensor Attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask,
                 CallSite site) {
  const CallSiteScope lines(site);
  if (!IsUsable(query)) return MatMul(query, key);
  const double width = query.shape().empty() ? 1 : static_cast<double>(query.shape().back());
  const Tensor scaled =
      InComputeType(query, [width](const Tensor& v) { return v * (1 / std::sqrt(width)); });
  Tensor scores = TransposedMatMul(scaled, key);
  if (IsUsable(scores) && IsUsable(mask)) {
    // Else the scores would be stretched as well.
    Shape shape = scores.shape();
    if (!BroadcastShapes(mask.shape(), &shape) || shape != scores.shape()) {
      return Fail(query,
                  BadType(absl::StrCat("Attention: expected a mask that stretches to the scores, ",
                                       TypeText(scores), ", got ", TypeText(mask))),
                  site);
    }
  }
  if (mask.defined()) {
    scores = mask.dtype() == DType::kBool
                 ? Where(mask, scores, -std::numeric_limits<double>::infinity())
                 : scores + mask;
  }
  return MatMul(Softmax(scores), value);
}

Tensor CausalMask(const DeviceRef& device, int64_t n, CallSite site) {
  const CallSiteScope lines(site);
  std::vector<int32_t> positions;
  for (int64_t i = 0; i < n; ++i) positions.push_back(static_cast<int32_t>(i));
  const Tensor row = FromHost(device, positions, {1, n});
  return Reshape(row, {n, 1}) >= row;
}

Tensor CausalMask(const Tensor& x, CallSite site) {
  if (!IsUsable(x)) {
    const CallSiteScope lines(site);
    return x * 1;
  }
  if (x.shape().size() < 2) {
    return Fail(x, BadType(absl::StrCat("CausalMask: expected [..., n, width], got ", TypeText(x))),
                site);
  }
  return CausalMask(x.device(), x.shape()[x.shape().size() - 2], site);
}

// --- Random numbers of layers -------------------------------------------------------------------

RandomScope::RandomScope(uint64_t seed, const RandomNumber& offset)
    : seed_(seed),
      offset_(offset),
      in_trace_(Trace::Current() != nullptr),
      outer_(std::exchange(innermost_random, this)) {}
RandomScope::~RandomScope() { innermost_random = outer_; }

RandomScope::Numbers RandomScope::Next() {
  RandomScope* const scope = innermost_random;
  if (Trace::Current() != nullptr && (scope == nullptr || !scope->in_trace_)) {
    return {0, internal::Fail(
                   Tensor(),
                   MakeError(Reason::kWrongState,
                             "a layer that drops, in a compiled function, would draw the numbers "
                             "of its trace at every call: open a RandomScope in the function, with "
                             "an input as its offset, or use TrainStep"),
                   CallSite::Here())};
  }
  if (scope == nullptr) {
    static std::atomic<int64_t> calls{0};
    return {0, calls.fetch_add(1, std::memory_order_relaxed)};
  }
  return {static_cast<int64_t>(
              MixBits(kMixStep + (scope->seed_ ^ MixBits(kMixStep + scope->calls_++)))),
          scope->offset_};
}

// --- Linear -------------------------------------------------------------------------------------

Linear::Linear(int64_t in, int64_t out, bool bias) : Module("Linear"), in_(in), out_(out) {
  weight_ = AddParameter("weight", {out, in}, init::FanInUniform(in));
  if (bias) bias_ = AddParameter("bias", {out}, init::FanInUniform(in));
}

Tensor Linear::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  if (IsUsable(x) && (x.shape().empty() || x.shape().back() != in_)) {
    return Refuse(x, absl::StrCat("expected [..., ", in_, "], got ", TypeText(x)));
  }
  if (!IsUsable(x)) return MatMul(x, weight_());
  Shape shape = x.shape();
  const int64_t count =
      std::accumulate(shape.begin(), shape.end() - 1, int64_t{1}, std::multiplies<int64_t>());
  shape.back() = out_;
  const Tensor rows = shape.size() == 2 ? x : Reshape(x, {count, in_});
  const Tensor y = TransposedMatMul(rows, weight_());
  const Tensor shifted = bias_.defined() ? y + bias_() : y;
  return shape.size() == 2 ? shifted : Reshape(shifted, shape);
}

std::string Linear::description() const { return absl::StrCat("in=", in_, ", out=", out_); }

// --- Embedding ----------------------------------------------------------------------------------

Embedding::Embedding(int64_t count, int64_t width, int64_t padding)
    : Module("Embedding"), count_(count), width_(width), padding_(padding) {
  if (padding < -1 || padding >= count) {
    RefuseAll(absl::StrCat("expected a padding row from 0 to ", count - 1, ", or -1 for none, got ",
                           padding));
  }
  const Initializer normal = init::Normal();
  weight_ =
      AddParameter("weight", {count, width},
                   [=](const DeviceRef& device, DType dtype, const Shape& shape, uint64_t seed) {
                     const Tensor table = normal(device, dtype, shape, seed);
                     if (padding < 0) return table;
                     const Tensor row = FromHost<int64_t>(device, {padding}, {1});
                     const Tensor is_padding = OneHot(row, count, DType::kBool);
                     return Where(Reshape(is_padding, {count, 1}), 0, table);
                   });
}

Tensor Embedding::Forward(const Tensor& indices) {
  const CallSiteScope lines(site());
  const Tensor rows = Take(weight_(), indices);
  if (padding_ < 0 || !IsUsable(rows)) return rows;
  const Tensor is_padding =
      Unsqueeze(Equal(Cast(indices, DType::kI64), static_cast<double>(padding_)), -1);
  return Where(is_padding, rows.Detach(), rows);
}

std::string Embedding::description() const {
  return absl::StrCat("count=", count_, ", width=", width_,
                      padding_ < 0 ? "" : absl::StrCat(", padding=", padding_));
}

PositionEmbedding::PositionEmbedding(int64_t length, int64_t width)
    : Module("PositionEmbedding"), length_(length), width_(width) {
  weight_ = AddParameter("weight", {length, width}, init::Normal(0, 0.02));
}

Tensor PositionEmbedding::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  if (!IsUsable(x)) return x + weight_();
  if (x.shape().size() < 2 || x.shape().back() != width_ ||
      x.shape()[x.shape().size() - 2] > length_) {
    return Refuse(x, absl::StrCat("expected [..., n, ", width_, "] with n to ", length_, ", got ",
                                  TypeText(x)));
  }
  const int64_t n = x.shape()[x.shape().size() - 2];
  // Where the length varies the largest is traced, too: there is a slice of all then.
  const bool whole = n == length_ && !TracesSizes();
  return x + (whole ? weight_() : Slice(weight_(), 0, 0, n));
}

std::string PositionEmbedding::description() const {
  return absl::StrCat("length=", length_, ", width=", width_);
}

// --- Norms --------------------------------------------------------------------------------------

LayerNorm::LayerNorm(const Shape& shape, double epsilon, bool affine)
    : Module("LayerNorm"), shape_(shape), epsilon_(epsilon) {
  if (shape.empty()) RefuseAll("expected the sizes of one axis at least, got none");
  if (!affine) return;
  weight_ = AddParameter("weight", shape, init::Ones());
  bias_ = AddParameter("bias", shape, init::Zeros());
}

Tensor LayerNorm::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  if (!IsUsable(x)) return x * 1;
  const bool fits = x.shape().size() >= shape_.size() &&
                    std::equal(shape_.rbegin(), shape_.rend(), x.shape().rbegin());
  if (!fits) {
    return Refuse(
        x, absl::StrCat("expected [..., ", absl::StrJoin(shape_, ", "), "], got ", TypeText(x)));
  }
  const Norm norm = LayerNormOver(x, static_cast<int64_t>(shape_.size()), epsilon_);
  return weight_.defined() ? NormalizeRows(x, norm, weight_(), bias_()) : NormalizeRows(x, norm);
}

std::string LayerNorm::description() const {
  return absl::StrCat(absl::StrJoin(shape_, ", "), ", epsilon=", epsilon_);
}

RmsNorm::RmsNorm(int64_t width, double epsilon)
    : Module("RmsNorm"), width_(width), epsilon_(epsilon) {
  weight_ = AddParameter("weight", {width}, init::Ones());
}

Tensor RmsNorm::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  if (!IsUsable(x)) return x * 1;
  if (x.shape().empty() || x.shape().back() != width_) {
    return Refuse(x, absl::StrCat("expected [..., ", width_, "], got ", TypeText(x)));
  }
  Norm norm = LayerNormOver(x, 1, epsilon_);
  norm.center = false;
  return NormalizeRows(x, norm, weight_());
}

std::string RmsNorm::description() const { return absl::StrCat(width_, ", epsilon=", epsilon_); }

GroupNorm::GroupNorm(int64_t groups, int64_t channels, double epsilon, bool affine)
    : Module("GroupNorm"), groups_(groups), channels_(channels), epsilon_(epsilon) {
  if (groups < 1 || channels % groups != 0) {
    RefuseAll(
        absl::StrCat("expected groups that divide the channels, got ", groups, " and ", channels));
  }
  if (!affine) return;
  weight_ = AddParameter("weight", {channels}, init::Ones());
  bias_ = AddParameter("bias", {channels}, init::Zeros());
}

Tensor GroupNorm::Forward(const Tensor& x) {
  const CallSiteScope lines(site());
  if (!IsUsable(x)) return x * 1;
  if (x.shape().size() < 2 || x.shape()[1] != channels_) {
    return Refuse(x, absl::StrCat("expected [n, ", channels_, ", ...], got ", TypeText(x)));
  }
  Shape grouped = x.shape();
  grouped[1] = channels_ / groups_;
  grouped.insert(grouped.begin() + 1, groups_);
  const Norm norm = {{0, 2}, {1, 3}, epsilon_};
  const auto in_groups = [this](const Variable& parameter) {
    return parameter.defined() ? Reshape(parameter(), {groups_, channels_ / groups_}) : Tensor();
  };
  return Reshape(NormalizeRows(Reshape(x, grouped), norm, in_groups(weight_), in_groups(bias_)),
                 x.shape());
}

std::string GroupNorm::description() const {
  return absl::StrCat("groups=", groups_, ", channels=", channels_, ", epsilon=", epsilon_);
}

// --- Dropout ------------------------------------------------------------------------------------

Dropout::Dropout(double p) : Module("Dropout"), p_(p) {
  if (!(p >= 0 && p <= 1)) RefuseAll(absl::StrCat("expected a probability, got ", p));
}

Tensor Dropout::Forward(const Tensor& x) {
  if (!training() || p_ == 0) return x;
  const CallSiteScope lines(site());
  const RandomScope::Numbers numbers = RandomScope::Next();
  return DropElements(x, p_, numbers.seed, numbers.offset);
}

std::string Dropout::description() const { return absl::StrCat("p=", p_); }

// --- Attention ----------------------------------------------------------------------------------

MultiheadAttention::MultiheadAttention(int64_t width, int64_t heads, bool bias)
    : Module("MultiheadAttention"),
      width_(width),
      heads_(heads),
      query_(Add<Linear>("query", width, width, bias)),
      key_(Add<Linear>("key", width, width, bias)),
      value_(Add<Linear>("value", width, width, bias)),
      out_(Add<Linear>("out", width, width, bias)) {
  if (heads < 1 || width % heads != 0) {
    RefuseAll(absl::StrCat("expected heads that divide the width, got ", heads, " and ", width));
  }
}

// [batch, n, width] to [batch, heads, n, width / heads].
Tensor MultiheadAttention::Heads(const Tensor& x) const {
  if (!IsUsable(x)) return x;
  const Shape& dims = x.shape();
  return Transpose(Reshape(x, {dims[0], dims[1], heads_, width_ / heads_}),
                   std::vector<int64_t>{0, 2, 1, 3});
}

Tensor MultiheadAttention::Forward(const Tensor& x) { return Attend(x, x, x, Tensor(), site()); }

Tensor MultiheadAttention::operator()(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const Tensor& mask, CallSite site) {
  if (heads_ < 1 || width_ % heads_ != 0) return Module::operator()(query, site);
  return ThroughHooks(query, Attend(query, key, value, mask, site));
}

Tensor MultiheadAttention::Attend(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const Tensor& mask, CallSite site) {
  const CallSiteScope lines(site);
  for (const Tensor* x : {&query, &key, &value}) {
    if (IsUsable(*x) && (x->shape().size() != 3 || x->shape()[2] != width_)) {
      return Refuse(*x, absl::StrCat("expected [batch, n, ", width_, "], got ", TypeText(*x)));
    }
  }
  const Tensor y = Attention(Heads(query_(query, site)), Heads(key_(key, site)),
                             Heads(value_(value, site)), mask);
  if (!IsUsable(y)) return out_(y, site);
  return out_(Reshape(Transpose(y, std::vector<int64_t>{0, 2, 1, 3}), query.shape()), site);
}

std::string MultiheadAttention::description() const {
  return absl::StrCat("width=", width_, ", heads=", heads_);
}

// --- For Sequential -----------------------------------------------------------------------------

std::shared_ptr<Module> ReluLayer() {
  return std::make_shared<Lambda>("Relu", [](const Tensor& x) { return Relu(x); });
}
std::shared_ptr<Module> GeluLayer(GeluForm form) {
  return std::make_shared<Lambda>("Gelu", [form](const Tensor& x) { return Gelu(x, form); });
}
std::shared_ptr<Module> SiluLayer() {
  return std::make_shared<Lambda>("Silu", [](const Tensor& x) { return Silu(x); });
}
std::shared_ptr<Module> TanhLayer() {
  return std::make_shared<Lambda>("Tanh", [](const Tensor& x) { return Tanh(x); });
}
std::shared_ptr<Module> SigmoidLayer() {
  return std::make_shared<Lambda>("Sigmoid", [](const Tensor& x) { return Sigmoid(x); });
}
std::shared_ptr<Module> SoftmaxLayer(int64_t axis) {
  return std::make_shared<Lambda>("Softmax", [axis](const Tensor& x) { return Softmax(x, axis); });
}
std::shared_ptr<Module> FlattenLayer(int64_t begin) {
  return std::make_shared<Lambda>("Flatten", [begin](const Tensor& x) {
    // Where there is nothing to flatten, an axis of one element.
    const bool is_axis = begin < static_cast<int64_t>(x.shape().size());
    return is_axis ? Flatten(x, begin) : Unsqueeze(x, -1);
  });
}

}  // namespace nn
}  // namespace chorus
