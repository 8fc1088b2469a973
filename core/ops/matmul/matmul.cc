#include "core/ops/matmul/matmul.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/checked_attributes.h"

namespace chorus {
namespace {

absl::StatusOr<std::vector<TensorType>> InferMatmul(const NodeView& node) {
  const TensorType& a = node.input(0);
  const TensorType& b = node.input(1);
  const auto got = [&] { return absl::StrCat(a.ToString(), " and ", b.ToString()); };
  const size_t batch = a.dims.size() - 2;
  if (a.dims.size() < 2 || b.dims.size() != a.dims.size() ||
      !std::equal(a.dims.begin(), a.dims.end() - 2, b.dims.begin())) {
    return ShapeError(node, "two matrices, or two tensors of them with equal leading dimensions",
                      got());
  }
  if (a.dtype != b.dtype) return ShapeError(node, "inputs of one dtype", got());
  CHORUS_ASSIGN_OR_RETURN(const size_t ta, CheckedFlag(node, "transpose_a"));
  CHORUS_ASSIGN_OR_RETURN(const size_t tb, CheckedFlag(node, "transpose_b"));
  if (a.dims[batch + 1 - ta] != b.dims[batch + tb]) {
    return ShapeError(node,
                      absl::StrCat("as many columns on the left as rows on the right (transpose_a=",
                                   ta, ", transpose_b=", tb, ")"),
                      got());
  }
  TensorType type = a;
  type.dims[batch] = a.dims[batch + ta];
  type.dims[batch + 1] = b.dims[batch + 1 - tb];
  return std::vector<TensorType>{type};
}

Attributes Flags(bool transpose_a, bool transpose_b) {
  Attributes attributes;
  if (transpose_a) attributes.push_back({"transpose_a", int64_t{1}});
  if (transpose_b) attributes.push_back({"transpose_b", int64_t{1}});
  return attributes;
}

absl::StatusOr<InputGradients> MatmulGradient(GradientContext& c) {
  const bool ta = IntAttribute(c.node().attributes, "transpose_a") != 0;
  const bool tb = IntAttribute(c.node().attributes, "transpose_b") != 0;
  const ValueIndex g = *c.grad(0);
  InputGradients result(2);
  if (c.needs(0)) {
    CHORUS_ASSIGN_OR_RETURN(result[0], ta ? c.Emit("matmul", {c.input(1), g}, Flags(tb, true))
                                          : c.Emit("matmul", {g, c.input(1)}, Flags(false, !tb)));
  }
  if (c.needs(1)) {
    CHORUS_ASSIGN_OR_RETURN(result[1], tb ? c.Emit("matmul", {g, c.input(0)}, Flags(true, ta))
                                          : c.Emit("matmul", {c.input(0), g}, Flags(!ta, false)));
  }
  return result;
}

}  // namespace

absl::Span<const OpDef* const> MatmulOps() {
  static const auto* const ops = [] {
    auto* def = new OpDef;
    def->name = "matmul";
    def->doc = "Matrix products; either factor may be transposed.";
    def->attributes = {
        {"transpose_a", AttributeSpec::Kind::kInt, false, "1: the left factor is transposed"},
        {"transpose_b", AttributeSpec::Kind::kInt, false, "1: the right factor is transposed"},
    };
    def->min_inputs = def->max_inputs = 2;
    def->dtypes = kFloatingDTypes | OneDType(DType::kI64);
    def->infer_types = InferMatmul;
    def->gradient = MatmulGradient;
    def->gradient_saves = SaveInputs;
    return new std::vector<const OpDef*>{def};
  }();
  return *ops;
}

}  // namespace chorus
