#include "core/ops/host_kernels.h"

#include "absl/container/flat_hash_map.h"
#include "core/ops/compare/compare_host.h"
#include "core/ops/cross_entropy/cross_entropy_host.h"
#include "core/ops/elementwise/elementwise_host.h"
#include "core/ops/fill/fill_host.h"
#include "core/ops/index/index_host.h"
#include "core/ops/matmul/matmul_host.h"
#include "core/ops/random/random_host.h"
#include "core/ops/reduction/reduction_host.h"
#include "core/ops/shape/shape_host.h"
#include "core/ops/slice/slice_host.h"
#include "core/ops/softmax/softmax_host.h"
#include "core/ops/sum/sum_host.h"

namespace chorus {
namespace {

// The list. An op or family is one line here.
constexpr absl::Span<const HostKernelEntry> (*kFamilies[])() = {
    CompareHostKernels,       //
    CrossEntropyHostKernels,  //
    ElementwiseHostKernels,   //
    FillHostKernels,          //
    IndexHostKernels,         //
    MatmulHostKernels,        //
    RandomHostKernels,        //
    ReductionHostKernels,     //
    ShapeHostKernels,         //
    SliceHostKernels,         //
    SoftmaxHostKernels,       //
    SumHostKernels,           //
};

using Factories = absl::flat_hash_map<absl::string_view, HostKernelFactory>;

const Factories& TheFactories() {
  static const Factories* const factories = [] {
    auto* all = new Factories;
    for (const auto family : kFamilies) {
      for (const HostKernelEntry& entry : family()) all->emplace(entry.op, entry.make);
    }
    return all;
  }();
  return *factories;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostKernel>> MakeHostKernel(const NodeView& node,
                                                           absl::Span<const TensorType> outputs) {
  const auto it = TheFactories().find(node.op);
  if (it == TheFactories().end()) return NoHostKernel(node, outputs);
  return it->second(node, outputs);
}

}  // namespace chorus
