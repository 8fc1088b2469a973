#include "core/ops/slice/slice.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/checked_attributes.h"

namespace chorus {
namespace {

using Types = absl::StatusOr<std::vector<TensorType>>;

Types InferSlice(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const size_t axis, CheckedAxis(node));
  const int64_t begin = IntAttribute(node.attributes, "begin");
  const int64_t end = IntAttribute(node.attributes, "end");
  TensorType type = node.input(0);
  if (begin < 0 || end < begin || end > type.dims[axis].size) {
    return ShapeError(node,
                      absl::StrCat("0 <= begin <= end <= ", type.dims[axis].size, " along axis ",
                                   axis, " of ", type.ToString()),
                      absl::StrCat("[", begin, ",", end, ")"));
  }
  type.dims[axis] = Dim(end - begin);
  return std::vector<TensorType>{type};
}

Attributes SliceAttributes(int64_t axis, int64_t begin, int64_t end) {
  return {{"axis", axis}, {"begin", begin}, {"end", end}};
}

absl::StatusOr<InputGradients> SliceGradient(GradientContext& c) {
  const int64_t axis = IntAttribute(c.node().attributes, "axis");
  const int64_t begin = IntAttribute(c.node().attributes, "begin");
  const int64_t end = IntAttribute(c.node().attributes, "end");
  const int64_t size = c.input_type(0).dims[axis].size;
  CHORUS_ASSIGN_OR_RETURN(
      const ValueIndex g,
      c.Emit("pad", {*c.grad(0)}, {{"after", size - end}, {"axis", axis}, {"before", begin}}));
  return InputGradients{g};
}

Types InferPad(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const size_t axis, CheckedAxis(node));
  const int64_t before = IntAttribute(node.attributes, "before");
  const int64_t after = IntAttribute(node.attributes, "after");
  // Each is bounded alone, so that their sum cannot overflow.
  if (before < 0 || after < 0 || before > kMaxValueBytes || after > kMaxValueBytes) {
    return ShapeError(node, absl::StrCat("'before' and 'after' from 0 to ", kMaxValueBytes),
                      absl::StrCat(before, " and ", after));
  }
  TensorType type = node.input(0);
  type.dims[axis] = Dim(before + type.dims[axis].size + after);
  return std::vector<TensorType>{type};
}

absl::StatusOr<InputGradients> PadGradient(GradientContext& c) {
  const int64_t axis = IntAttribute(c.node().attributes, "axis");
  const int64_t before = IntAttribute(c.node().attributes, "before");
  const int64_t size = c.input_type(0).dims[axis].size;
  CHORUS_ASSIGN_OR_RETURN(const ValueIndex g, c.Emit("slice", {*c.grad(0)},
                                                     SliceAttributes(axis, before, before + size)));
  return InputGradients{g};
}

Types InferConcat(const NodeView& node) {
  CHORUS_ASSIGN_OR_RETURN(const size_t axis, CheckedAxis(node));
  TensorType type = node.input(0);
  for (int i = 1; i < node.num_inputs(); ++i) {
    TensorType other = node.input(i);
    const bool same_rank = other.dims.size() == type.dims.size();
    const int64_t size = same_rank ? other.dims[axis].size : 0;
    if (same_rank) other.dims[axis] = node.input(0).dims[axis];
    if (other != node.input(0)) {
      return ShapeError(
          node, absl::StrCat("inputs like ", node.input(0).ToString(), " but for axis ", axis),
          absl::StrCat(node.input(i).ToString(), " as input ", i));
    }
    // Cannot overflow: sizes are at most kMaxValueBytes (2^40), inputs at most 2^20.
    type.dims[axis].size += size;
  }
  return std::vector<TensorType>{type};
}

absl::StatusOr<InputGradients> ConcatGradient(GradientContext& c) {
  const int64_t axis = IntAttribute(c.node().attributes, "axis");
  InputGradients result(c.num_inputs());
  int64_t begin = 0;
  for (int i = 0; i < c.num_inputs(); ++i) {
    const int64_t end = begin + c.input_type(i).dims[axis].size;
    if (c.needs(i)) {
      CHORUS_ASSIGN_OR_RETURN(result[i],
                              c.Emit("slice", {*c.grad(0)}, SliceAttributes(axis, begin, end)));
    }
    begin = end;
  }
  return result;
}

Types InferPackedRows(const NodeView& node) {
  const TensorType& x = node.input(0);
  const int64_t parts = IntAttribute(node.attributes, "parts");
  if (parts < 1 || x.dims.empty() || x.dims[0].size % parts != 0) {
    return ShapeError(node, "a tensor with rows that are as many in each of its 'parts'",
                      absl::StrCat(x.ToString(), " and ", parts, " parts"));
  }
  const TensorType count(DType::kI64, {1});
  if (node.input(1) != count) {
    return ShapeError(node, absl::StrCat(count.ToString(), " as input 1, the rows that count"),
                      node.input(1).ToString());
  }
  return std::vector<TensorType>{x};
}

// Each is the other's adjoint.
absl::StatusOr<InputGradients> PackedRowsGradient(GradientContext& c) {
  InputGradients result(2);
  const char* const adjoint = c.node().op == "pack_rows" ? "unpack_rows" : "pack_rows";
  CHORUS_ASSIGN_OR_RETURN(result[0],
                          c.Emit(adjoint, {*c.grad(0), c.input(1)}, c.node().attributes));
  return result;
}

Saved SaveCount(const NodeSpec&, int, int num_outputs) { return {1, num_outputs}; }

constexpr AttributeSpec kAxis = {"axis", AttributeSpec::Kind::kInt, true, "a dimension's number"};

const OpDef* MakeSlice() {
  auto* def = new OpDef;
  def->name = "slice";
  def->doc = "A range along one axis.";
  def->attributes = {kAxis,
                     {"begin", AttributeSpec::Kind::kInt, true, "first index"},
                     {"end", AttributeSpec::Kind::kInt, true, "one past the last index"}};
  def->min_inputs = def->max_inputs = 1;
  def->infer_types = InferSlice;
  def->gradient = SliceGradient;
  return def;
}

const OpDef* MakePad() {
  auto* def = new OpDef;
  def->name = "pad";
  def->doc = "Zeros around a tensor along one axis.";
  def->attributes = {{"after", AttributeSpec::Kind::kInt, true, "zeros after"},
                     kAxis,
                     {"before", AttributeSpec::Kind::kInt, true, "zeros before"}};
  def->min_inputs = def->max_inputs = 1;
  def->infer_types = InferPad;
  def->gradient = PadGradient;
  return def;
}

const OpDef* MakeConcat() {
  auto* def = new OpDef;
  def->name = "concat";
  def->doc = "Tensors one after another along one axis.";
  def->attributes = {kAxis};
  def->min_inputs = 1;
  def->max_inputs = -1;
  def->infer_types = InferConcat;
  def->gradient = ConcatGradient;
  return def;
}

const OpDef* MakePackedRows(absl::string_view name, absl::string_view doc) {
  auto* def = new OpDef;
  def->name = name;
  def->doc = doc;
  def->attributes = {{"parts", AttributeSpec::Kind::kInt, true, "parts of equal rows"}};
  def->min_inputs = def->max_inputs = 2;
  def->fallible = kIntegerDTypes;
  def->infer_types = InferPackedRows;
  def->gradient = PackedRowsGradient;
  def->gradient_saves = SaveCount;
  return def;
}

}  // namespace

absl::Span<const OpDef* const> SliceOps() {
  static const auto* const ops = new std::vector<const OpDef*>{
      MakeConcat(),
      MakePackedRows("pack_rows", "The rows of each part that count, one after the other."),
      MakePad(),
      MakeSlice(),
      MakePackedRows("unpack_rows", "Rows that stand one after the other, back in their parts."),
  };
  return *ops;
}

}  // namespace chorus
