#include "core/ops/convolution/convolution.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;
using Gradients = absl::StatusOr<InputGradients>;

TensorType TypeOfY(const ConvolutionSizes& s, DType dtype) {
  return TensorType(dtype, {s.batch, s.groups * s.out, s.y[0], s.y[1]});
}

absl::Status CheckOperands(const NodeView& node) {
  const TensorType& a = node.input(0);
  const TensorType& b = node.input(1);
  if (a.dims.size() == 4 && b.dims.size() == 4 && a.dtype == b.dtype) return absl::OkStatus();
  return ShapeError(node, "two tensors of four dimensions and one dtype",
                    absl::StrCat(a.ToString(), " and ", b.ToString()));
}

Types InferConvolution(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckOperands(node));
  CHORUS_ASSIGN_OR_RETURN(const ConvolutionSizes sizes,
                          SizesOfConvolution(node, node.input(0), node.input(1)));
  return std::vector<TensorType>{TypeOfY(sizes, node.input(0).dtype)};
}

// Of x and w, one of which `node` gives: `y` is one of its inputs.
absl::Status CheckY(const NodeView& node, const TensorType& x, const TensorType& w, int y) {
  CHORUS_ASSIGN_OR_RETURN(const ConvolutionSizes sizes, SizesOfConvolution(node, x, w));
  const TensorType expected = TypeOfY(sizes, x.dtype);
  if (node.input(y) == expected) return absl::OkStatus();
  return ShapeError(node,
                    absl::StrCat(expected.ToString(), " as input ", y, ", which a convolution of ",
                                 x.ToString(), " by ", w.ToString(), " gives"),
                    node.input(y).ToString());
}

Types InferDataGrad(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckOperands(node));
  CHORUS_ASSIGN_OR_RETURN(const auto size, PairAttribute(node, "size", 0, kMaxValueBytes, 0));
  const TensorType& w = node.input(1);
  const int64_t groups = IntAttribute(node.attributes, "groups", 1);
  // Beyond that x could not be, and their product not be told.
  if (groups < 1 || groups > std::max<int64_t>(w.dims[0].size, 1)) {
    return ShapeError(node, absl::StrCat("groups that divide the outputs of ", w.ToString()),
                      absl::StrCat(groups));
  }
  if (w.dims[1].size > kMaxValueBytes / groups) {
    return ShapeError(node, "no more channels than a tensor can have",
                      absl::StrCat(groups, " groups of ", w.ToString()));
  }
  const TensorType x(w.dtype, {node.input(0).dims[0], groups * w.dims[1].size, size[0], size[1]});
  CHORUS_RETURN_IF_ERROR(x.Validate(kMaxValueBytes));
  CHORUS_RETURN_IF_ERROR(CheckY(node, x, w, 0));
  return std::vector<TensorType>{x};
}

Types InferWeightGrad(const NodeView& node) {
  CHORUS_RETURN_IF_ERROR(CheckOperands(node));
  CHORUS_ASSIGN_OR_RETURN(const auto size, PairAttribute(node, "size", 1, kMaxValueBytes, 1));
  const TensorType& x = node.input(0);
  const int64_t groups = IntAttribute(node.attributes, "groups", 1);
  if (groups < 1 || x.dims[1].size % groups != 0) {
    return ShapeError(node, absl::StrCat("groups that divide the channels of ", x.ToString()),
                      absl::StrCat(groups));
  }
  const TensorType w(x.dtype, {node.input(1).dims[1], x.dims[1].size / groups, size[0], size[1]});
  CHORUS_RETURN_IF_ERROR(w.Validate(kMaxValueBytes));
  CHORUS_RETURN_IF_ERROR(CheckY(node, x, w, 1));
  return std::vector<TensorType>{w};
}

// The node's, with another `size`, or none.
Attributes With(const GradientContext& c, std::vector<int64_t> size) {
  Attributes attributes;
  for (const Attribute& attribute : c.node().attributes) {
    if (attribute.name != "size") attributes.push_back(attribute);
  }
  if (size.empty()) return attributes;
  const auto at = std::find_if(attributes.begin(), attributes.end(),
                               [](const Attribute& a) { return a.name > "size"; });
  attributes.insert(at, {"size", std::move(size)});
  return attributes;
}

absl::StatusOr<ValueIndex> Convolve(GradientContext* c, ValueIndex x, ValueIndex w) {
  return c->Emit("convolution", {x, w}, With(*c, {}));
}
std::vector<int64_t> LastTwo(const TensorType& type) {
  return {type.dims[2].size, type.dims[3].size};
}
// `like`: the type of what comes out.
absl::StatusOr<ValueIndex> DataGrad(GradientContext* c, ValueIndex y, ValueIndex w,
                                    const TensorType& like) {
  return c->Emit("convolution_data_grad", {y, w}, With(*c, LastTwo(like)));
}
absl::StatusOr<ValueIndex> WeightGrad(GradientContext* c, ValueIndex x, ValueIndex y,
                                      const TensorType& like) {
  return c->Emit("convolution_weight_grad", {x, y}, With(*c, LastTwo(like)));
}

Gradients ConvolutionGradient(GradientContext& c) {
  const ValueIndex g = *c.grad(0);
  InputGradients result(2);
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(result[0], DataGrad(&c, g, c.input(1), c.input_type(0)));
  }
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(result[1], WeightGrad(&c, c.input(0), g, c.input_type(1)));
  }
  return result;
}

Gradients DataGradGradient(GradientContext& c) {
  const ValueIndex g = *c.grad(0);
  InputGradients result(2);
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(result[0], Convolve(&c, g, c.input(1)));
  }
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(result[1], WeightGrad(&c, g, c.input(0), c.input_type(1)));
  }
  return result;
}

Gradients WeightGradGradient(GradientContext& c) {
  const ValueIndex g = *c.grad(0);
  InputGradients result(2);
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(result[0], DataGrad(&c, c.input(1), g, c.input_type(0)));
  }
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(result[1], Convolve(&c, c.input(0), g));
  }
  return result;
}

const OpDef* Make(absl::string_view name, absl::string_view doc, absl::string_view size,
                  decltype(OpDef::infer_types) infer, decltype(OpDef::gradient) gradient) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  constexpr auto kInts = AttributeSpec::Kind::kInts;
  def->attributes = {
      {"dilation", kInts, false, "how far the taps are apart: 1 and 1 if absent"},
      {"groups", AttributeSpec::Kind::kInt, false, "of channels that do not see each other"},
      {"padding", kInts, false, "zeros on both sides: none if absent"},
  };
  if (!size.empty()) def->attributes.push_back({"size", kInts, true, size});
  def->attributes.push_back({"stride", kInts, false, "how far the places are apart: 1 and 1"});
  def->min_inputs = def->max_inputs = 2;
  def->dtypes = OneDType(DType::kF32) | OneDType(DType::kF64);
  // oneDNN's: measured 4 to 250 KiB.
  def->kernel_bytes = 256 << 10;
  def->infer_types = infer;
  def->gradient = gradient;
  def->gradient_saves = SaveInputs;
  return def;
}

}  // namespace

absl::StatusOr<ConvolutionSizes> SizesOfConvolution(const NodeView& node, const TensorType& x,
                                                    const TensorType& w) {
  ConvolutionSizes s;
  s.groups = IntAttribute(node.attributes, "groups", 1);
  s.batch = x.dims[0].size;
  s.in = w.dims[1].size;
  const auto got = [&] { return absl::StrCat(x.ToString(), " and ", w.ToString()); };
  // More groups than outputs are none, and their products might not be told.
  if (s.groups < 1 || s.groups > std::max<int64_t>(w.dims[0].size, 1) ||
      w.dims[0].size % s.groups != 0 || x.dims[1].size % s.groups != 0 ||
      x.dims[1].size / s.groups != s.in) {
    return ShapeError(node,
                      absl::StrCat("x [n, groups in, h, w] and weights [out, in, kh, kw] with out "
                                   "a multiple of groups=",
                                   s.groups),
                      got());
  }
  s.out = w.dims[0].size / s.groups;
  std::array<int64_t, 2> kernel{};
  for (size_t d = 0; d < 2; ++d) {
    kernel[d] = w.dims[2 + d].size;
    s.x[d] = x.dims[2 + d].size;
  }
  if (kernel[0] < 1 || kernel[1] < 1) {
    return ShapeError(node, "weights with one tap at least", w.ToString());
  }
  CHORUS_ASSIGN_OR_RETURN(s.windows, WindowsOf(node, kernel));
  for (size_t d = 0; d < 2; ++d) {
    s.y[d] = s.windows[d].PlacesOver(s.x[d]);
    if (s.y[d] == 0) {
      return ShapeError(
          node,
          absl::StrCat("an x of at least ", s.windows[d].extent() - 2 * s.windows[d].padding,
                       " along dimension ", 2 + d, ", for the weights"),
          got());
    }
  }
  return s;
}

absl::Span<const OpDef* const> ConvolutionOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      Make("convolution", "Sums of products with weights that slide over two dimensions.", "",
           InferConvolution, ConvolutionGradient),
      Make("convolution_data_grad", "The adjoint of convolution in x: a transposed convolution.",
           "height and width of the result", InferDataGrad, DataGradGradient),
      Make("convolution_weight_grad", "The adjoint of convolution in its weights.",
           "height and width of the weights", InferWeightGrad, WeightGradGradient),
  };
  return *ops;
}

}  // namespace chorus
