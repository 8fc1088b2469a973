#include "core/ops/cuda_kernels.h"

#include "absl/container/flat_hash_map.h"
#include "core/ops/cuda_kernel_images.h"
#include "core/ops/cuda_kernel_list.h"

// Where each family's image lies (tools/bazel/cuda.bzl).
extern "C" {
#define CHORUS_SYMBOLS(family)                          \
  extern const unsigned char chorus_##family##_begin[]; \
  extern const unsigned char chorus_##family##_end[];
CHORUS_CUDA_KERNEL_IMAGES(CHORUS_SYMBOLS)
#undef CHORUS_SYMBOLS
}

namespace chorus {
namespace {

#define CHORUS_FAMILY(name) name##CudaKernels,
constexpr absl::Span<const CudaKernelEntry> (*kFamilies[])() = {CHORUS_CUDA_KERNELS(CHORUS_FAMILY)};
#undef CHORUS_FAMILY

using Factories = absl::flat_hash_map<absl::string_view, CudaKernelFactory>;

const Factories& TheFactories() {
  static const Factories* const factories = [] {
    auto* all = new Factories;
    for (const auto family : kFamilies) {
      for (const CudaKernelEntry& entry : family()) all->emplace(entry.op, entry.make);
    }
    return all;
  }();
  return *factories;
}

}  // namespace

CudaKernelOrError MakeCudaKernel(const CudaGpu& gpu, const NodeView& node,
                                 absl::Span<const TensorType> outputs) {
  const auto it = TheFactories().find(node.op);
  if (it == TheFactories().end()) return NoCudaKernel(node, outputs);
  return it->second(gpu, node, outputs);
}

bool HasCudaKernel(absl::string_view op) { return TheFactories().contains(op); }

std::vector<KernelImage> CudaKernelImages() {
  return {
#define CHORUS_IMAGE(family) \
  {chorus_##family##_begin, static_cast<size_t>(chorus_##family##_end - chorus_##family##_begin)},
      CHORUS_CUDA_KERNEL_IMAGES(CHORUS_IMAGE)
#undef CHORUS_IMAGE
  };
}

}  // namespace chorus
