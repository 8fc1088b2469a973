#include "core/ops/compare/compare_cuda.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "core/ops/cuda_elements.h"

namespace chorus {
namespace {

std::string NameFor(absl::string_view op, const TensorType& type) {
  return absl::StrCat(op, "_", DTypeName(type.dtype));
}

// Comparisons and logic.
CudaKernelOrError MakeCompare(const CudaGpu& gpu, const NodeView& node,
                              absl::Span<const TensorType> outputs) {
  return MakeElements(gpu, node, outputs, NameFor(node.op, node.input(0)));
}

// a > b is b < a.
CudaKernelOrError MakeGt(const CudaGpu& gpu, const NodeView& node,
                         absl::Span<const TensorType> outputs) {
  return MakeSwappedElements(gpu, node, outputs, NameFor("lt", node.input(0)));
}
CudaKernelOrError MakeGe(const CudaGpu& gpu, const NodeView& node,
                         absl::Span<const TensorType> outputs) {
  return MakeSwappedElements(gpu, node, outputs, NameFor("le", node.input(0)));
}

CudaKernelOrError MakeXor(const CudaGpu& gpu, const NodeView& node,
                          absl::Span<const TensorType> outputs) {
  return MakeElements(gpu, node, outputs, NameFor("ne", node.input(0)));
}

CudaKernelOrError MakeWhere(const CudaGpu& gpu, const NodeView& node,
                            absl::Span<const TensorType> outputs) {
  return MakeElements(gpu, node, outputs, absl::StrCat("where_", DTypeBytes(outputs[0].dtype)));
}

CudaKernelOrError MakeCast(const CudaGpu& gpu, const NodeView& node,
                           absl::Span<const TensorType> outputs) {
  return MakeElements(gpu, node, outputs, NameFor(NameFor("cast", node.input(0)), outputs[0]));
}

constexpr CudaKernelEntry kEntries[] = {
    {"cast", MakeCast},
    {"eq", MakeCompare},
    {"ge", MakeGe},
    {"gt", MakeGt},
    {"le", MakeCompare},
    {"logical_and", MakeCompare},
    {"logical_not", MakeCompare},
    {"logical_or", MakeCompare},
    {"logical_xor", MakeXor},
    {"lt", MakeCompare},
    {"ne", MakeCompare},
    {"where", MakeWhere},
};

}  // namespace

absl::Span<const CudaKernelEntry> CompareCudaKernels() { return kEntries; }

}  // namespace chorus
