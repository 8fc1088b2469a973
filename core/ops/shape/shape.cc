#include "core/ops/shape/shape.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/error.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferCopy(const NodeView& node) {
  return std::vector<TensorType>{node.input(0)};
}

absl::StatusOr<InputGradients> CopyGradient(GradientContext& c) {
  const int32_t device = c.DeviceOf(c.input(0));
  if (device == c.DeviceOf(*c.grad(0))) return InputGradients{c.grad(0)};
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.EmitOn(device, "copy", {*c.grad(0)}));
  return InputGradients{g};
}

absl::StatusOr<std::vector<TensorType>> InferReshape(const NodeView& node) {
  const TensorType& input = node.input(0);
  const std::vector<int64_t> dims = IntsAttribute(node.attributes, "dims");
  TensorType type(input.dtype, {});
  for (const int64_t size : dims) type.dims.emplace_back(size);
  // The check comes first: a product of unchecked sizes may overflow.
  if (!type.Validate(kMaxValueBytes).ok() || type.num_elements() != input.num_elements()) {
    return ShapeError(
        node,
        absl::StrCat("dims with the ", input.num_elements(), " elements of ", input.ToString()),
        absl::StrCat("[", absl::StrJoin(dims, ","), "]"));
  }
  return std::vector<TensorType>{type};
}

absl::StatusOr<InputGradients> ReshapeGradient(GradientContext& c) {
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g,
                          c.Emit("reshape", {*c.grad(0)}, {{"dims", c.input_type(0).sizes()}}));
  return InputGradients{g};
}

absl::StatusOr<std::vector<TensorType>> InferTranspose(const NodeView& node) {
  const TensorType& input = node.input(0);
  const std::vector<int64_t> perm = IntsAttribute(node.attributes, "perm");
  std::vector<bool> seen(input.dims.size(), false);
  bool permutes = perm.size() == input.dims.size();
  for (size_t i = 0; permutes && i < perm.size(); ++i) {
    permutes = perm[i] >= 0 && perm[i] < static_cast<int64_t>(seen.size()) && !seen[perm[i]];
    if (permutes) seen[perm[i]] = true;
  }
  if (!permutes) {
    return ShapeError(node,
                      absl::StrCat("a permutation of the ", input.dims.size(), " dimensions of ",
                                   input.ToString()),
                      absl::StrCat("[", absl::StrJoin(perm, ","), "]"));
  }
  TensorType type(input.dtype, {});
  for (const int64_t from : perm) type.dims.push_back(input.dims[from]);
  return std::vector<TensorType>{type};
}

absl::StatusOr<InputGradients> TransposeGradient(GradientContext& c) {
  const std::vector<int64_t> perm = IntsAttribute(c.node().attributes, "perm");
  std::vector<int64_t> inverse(perm.size());
  for (size_t i = 0; i < perm.size(); ++i) inverse[perm[i]] = static_cast<int64_t>(i);
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g,
                          c.Emit("transpose", {*c.grad(0)}, {{"perm", inverse}}));
  return InputGradients{g};
}

const OpDef* MakeCopy() {
  auto* def = new OpDef;
  def->name = "copy";
  def->doc = "The same tensor on another device.";
  def->min_inputs = def->max_inputs = 1;
  def->infer_types = InferCopy;
  def->gradient = CopyGradient;
  def->alias = OutputAlias::kInput;
  def->input_use = InputUse::kCopySource;
  def->crosses_devices = true;
  def->elementwise = true;
  return def;
}

const OpDef* MakeReshape() {
  auto* def = new OpDef;
  def->name = "reshape";
  def->doc = "The same elements in another shape.";
  def->attributes = {{"dims", AttributeSpec::Kind::kInts, true, "the result's shape"}};
  def->min_inputs = def->max_inputs = 1;
  def->infer_types = InferReshape;
  def->gradient = ReshapeGradient;
  def->alias = OutputAlias::kInput;
  def->input_use = InputUse::kCopySource;
  return def;
}

const OpDef* MakeTranspose() {
  auto* def = new OpDef;
  def->name = "transpose";
  def->doc = "Permutes dimensions.";
  def->attributes = {
      {"perm", AttributeSpec::Kind::kInts, true, "result dimension i is input dimension perm[i]"}};
  def->min_inputs = def->max_inputs = 1;
  def->infer_types = InferTranspose;
  def->gradient = TransposeGradient;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> ShapeOps() {
  static const auto* const ops =
      new std::vector<const OpDef*>{MakeCopy(), MakeReshape(), MakeTranspose()};
  return *ops;
}

}  // namespace chorus
