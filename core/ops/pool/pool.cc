#include "core/ops/pool/pool.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/checked_attributes.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;

// With the sizes of y in the place of those of x.
TensorType TypeOfY(TensorType x, const PoolSizes& sizes) {
  for (size_t d = 0; d < 2; ++d) x.dims[2 + d] = Dim(sizes.y[d]);
  return x;
}

Types InferAvgPool(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckedFlag(node, "count_padding").status());
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, node.input(0)));
  return std::vector<TensorType>{TypeOfY(node.input(0), sizes)};
}

// The x of attribute `size` of which a pooling gives input 0.
absl::StatusOr<TensorType> TypeOfPooled(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const auto size, PairAttribute(node, "size", 1, kMaxValueBytes, 1));
  TensorType x = node.input(0);
  if (x.dims.size() == 4) {
    x.dims[2] = Dim(size[0]);
    x.dims[3] = Dim(size[1]);
  }
  CHORUS_RETURN_IF_ERROR(x.Validate(kMaxValueBytes));
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, x));
  const TensorType expected = TypeOfY(x, sizes);
  if (node.input(0) == expected) return x;
  return ShapeError(node, absl::StrCat(expected.ToString(), ", which ", x.ToString(), " gives"),
                    node.input(0).ToString());
}

Types InferAvgPoolGrad(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckedFlag(node, "count_padding").status());
  CHORUS_ASSIGN_OR_RETURN(const TensorType x, TypeOfPooled(node));
  return std::vector<TensorType>{x};
}

Types InferMaxPoolIndex(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, node.input(0)));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (sizes.x[0] > kMost / sizes.x[1]) {
    return ShapeError(node, absl::StrCat("at most ", kMost, " elements of a channel"),
                      node.input(0).ToString());
  }
  TensorType type = TypeOfY(node.input(0), sizes);
  type.dtype = DType::kI32;
  return std::vector<TensorType>{type};
}

// An index for each place of a pooling of x.
absl::Status CheckIndex(const NodeView& node, TensorType y) {
  y.dtype = DType::kI32;
  if (node.input(1) == y) return absl::OkStatus();
  return ShapeError(node, absl::StrCat(y.ToString(), " as input 1"), node.input(1).ToString());
}

Types InferMaxPoolTake(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, node.input(0)));
  const TensorType y = TypeOfY(node.input(0), sizes);
  CHORUS_RETURN_IF_ERROR(CheckIndex(node, y));
  return std::vector<TensorType>{y};
}

Types InferMaxPoolGrad(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const TensorType x, TypeOfPooled(node));
  CHORUS_RETURN_IF_ERROR(CheckIndex(node, node.input(0)));
  return std::vector<TensorType>{x};
}

// The node's but for `size`.
Attributes WithoutSize(const GradientContext& c) {
  Attributes attributes;
  for (const Attribute& attribute : c.node().attributes) {
    if (attribute.name != "size") attributes.push_back(attribute);
  }
  return attributes;
}

// The node's and that of input 0.
Attributes WithSize(const GradientContext& c) {
  Attributes attributes = WithoutSize(c);
  const auto at = std::find_if(attributes.begin(), attributes.end(),
                               [](const Attribute& a) { return a.name > "size"; });
  const std::vector<Dim>& dims = c.input_type(0).dims;
  attributes.insert(at, {"size", std::vector<int64_t>{dims[2].size, dims[3].size}});
  return attributes;
}

Gradients AvgPoolGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("avg_pool_grad", {*c.grad(0)}, WithSize(c)));
  return InputGradients{g};
}

Gradients AvgPoolGradGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("avg_pool", {*c.grad(0)}, WithoutSize(c)));
  return InputGradients{g};
}

// Of input 0 alone, which is there.
Gradients ByIndex(GradientContext* c, absl::string_view op, Attributes attributes) {
  InputGradients result(2);
  CHORUS_ASSIGN_OR_RETURN(result[0],
                          c->Emit(op, {*c->grad(0), c->input(1)}, std::move(attributes)));
  return result;
}
Gradients MaxPoolTakeGradient(GradientContext& c) {
  return ByIndex(&c, "max_pool_grad", WithSize(c));
}
Gradients MaxPoolGradGradient(GradientContext& c) {
  return ByIndex(&c, "max_pool_take", WithoutSize(c));
}
Saved SaveIndex(const NodeSpec&, int, int num_outputs) { return {1, num_outputs}; }

constexpr auto kInts = AttributeSpec::Kind::kInts;
constexpr AttributeSpec kCountPadding = {"count_padding", AttributeSpec::Kind::kInt, false,
                                         "1: the divisor counts padding too"};
constexpr AttributeSpec kDilation = {"dilation", kInts, false, "how far the taps are apart"};
constexpr AttributeSpec kKernel = {"kernel", kInts, true, "the window's height and width"};
constexpr AttributeSpec kPadding = {"padding", kInts, false, "on both sides: none if absent"};
constexpr AttributeSpec kSize = {"size", kInts, true, "height and width of the result"};
constexpr AttributeSpec kStride = {"stride", kInts, false,
                                   "how far the places are apart: 1 and 1 if absent"};

OpDef* Make(absl::string_view name, absl::string_view doc, std::vector<AttributeSpec> attributes,
            DTypes dtypes, decltype(OpDef::infer_types) infer, decltype(OpDef::gradient) gradient) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->attributes = std::move(attributes);
  def->min_inputs = def->max_inputs = 1;
  def->dtypes = dtypes;
  def->infer_types = infer;
  def->gradient = gradient;
  return def;
}

const OpDef* MakeByIndex(absl::string_view name, absl::string_view doc,
                         std::vector<AttributeSpec> attributes, decltype(OpDef::infer_types) infer,
                         decltype(OpDef::gradient) gradient) {
  OpDef* const def = Make(name, doc, std::move(attributes), kNumberDTypes, infer, gradient);
  def->min_inputs = def->max_inputs = 2;
  def->gradient_saves = SaveIndex;
  return def;
}

}  // namespace

absl::StatusOr<PoolSizes> SizesOfPool(const NodeView& node, const TensorType& x) {
  if (x.dims.size() != 4) return ShapeError(node, "x [n, channels, h, w]", x.ToString());
  CHORUS_ASSIGN_OR_RETURN(const auto kernel, PairAttribute(node, "kernel", 1, kMostOfWindow, 1));
  PoolSizes s;
  CHORUS_ASSIGN_OR_RETURN(s.windows, WindowsOf(node, kernel));
  for (size_t d = 0; d < 2; ++d) {
    const Window& window = s.windows[d];
    s.x[d] = x.dims[2 + d].size;
    s.y[d] = window.PlacesOver(s.x[d]);
    if (2 * window.padding > window.extent()) {
      return ShapeError(node,
                        absl::StrCat("at most half a window of padding, ", window.extent() / 2,
                                     " along dimension ", 2 + d),
                        absl::StrCat(window.padding));
    }
    // Taps that are so far apart may all be over padding.
    const int64_t apart = window.padding > 0 ? window.dilation : 1;
    const int64_t least = std::max(apart, window.extent() - 2 * window.padding);
    if (s.x[d] < least) {
      return ShapeError(node, absl::StrCat("an x of at least ", least, " along dimension ", 2 + d),
                        x.ToString());
    }
  }
  s.planes = x.dims[0].size * x.dims[1].size;
  return s;
}

absl::Span<const OpDef* const> PoolOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      Make("avg_pool", "The mean under a window that slides over two dimensions.",
           {kCountPadding, kKernel, kPadding, kStride}, kFloatingDTypes, InferAvgPool,
           AvgPoolGradient),
      Make("avg_pool_grad", "The adjoint of avg_pool.",
           {kCountPadding, kKernel, kPadding, kSize, kStride}, kFloatingDTypes, InferAvgPoolGrad,
           AvgPoolGradGradient),
      Make("max_pool_index", "Where the largest element under a window is, in its channel.",
           {kDilation, kKernel, kPadding, kStride}, kNumberDTypes, InferMaxPoolIndex, nullptr),
      MakeByIndex("max_pool_grad", "The adjoint of max_pool_take.",
                  {kDilation, kKernel, kPadding, kSize, kStride}, InferMaxPoolGrad,
                  MaxPoolGradGradient),
      MakeByIndex("max_pool_take", "What is at each place's index, under its window.",
                  {kDilation, kKernel, kPadding, kStride}, InferMaxPoolTake, MaxPoolTakeGradient),
  };
  return *ops;
}

}  // namespace chorus
