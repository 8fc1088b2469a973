#include "core/ops/host_kernels.h"

#include "absl/container/flat_hash_map.h"
#include "core/ops/host_kernel_list.h"

namespace chorus {
namespace {

#define CHORUS_FAMILY(name) name##HostKernels,
constexpr absl::Span<const HostKernelEntry> (*kFamilies[])() = {CHORUS_HOST_KERNELS(CHORUS_FAMILY)};
#undef CHORUS_FAMILY

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

HostKernelOrError MakeHostKernel(const NodeView& node, absl::Span<const TensorType> outputs) {
  const auto it = TheFactories().find(node.op);
  if (it == TheFactories().end()) return NoHostKernel(node, outputs);
  return it->second(node, outputs);
}

}  // namespace chorus
