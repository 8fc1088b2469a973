#include "core/ops/shape/shape_cuda.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/shape/shape_kernels.h"

namespace chorus {
namespace {

class Copy final : public CudaKernel {
 public:
  using CudaKernel::CudaKernel;
  absl::Status Enqueue(int64_t /*part*/, const KernelCall& call, const KernelFault&,
                       const CudaGpu& gpu, cuda::Stream stream) const override {
    const int64_t bytes = facts().output_bytes[0];
    if (bytes == 0 || call.inputs[0] == call.outputs[0]) return absl::OkStatus();
    return gpu.Check(gpu.api().MemcpyDtoDAsync(call.outputs[0], call.inputs[0],
                                               static_cast<size_t>(bytes), stream),
                     "cuMemcpyDtoDAsync");
  }
};

CudaKernelOrError MakeCopy(const CudaGpu&, const NodeView& node,
                           absl::Span<const TensorType> outputs) {
  return std::unique_ptr<CudaKernel>(std::make_unique<Copy>(CudaKernel::FactsOf(node, outputs)));
}

// The result's dimensions, last first, as strides in the input.
cuda::Loops Transposed(const NodeView& node) {
  const std::vector<int64_t> perm = IntsAttribute(node.attributes, "perm");
  const std::vector<int64_t> sizes = node.input(0).sizes();
  const std::vector<int64_t> strides = RowMajorStrides(sizes);
  cuda::Loops loops;
  for (size_t i = perm.size(); i-- > 0;) loops.Append(sizes[perm[i]], strides[perm[i]]);
  return loops;
}

template <typename T>
absl::Status AddMove(const CudaGpu& gpu, const cuda::Loops& from, int64_t count,
                     LaunchedKernel* kernel) {
  cuda::LoopedMoveArgs<T> args;
  args.count = count;
  args.from = from;
  return kernel->Add(
      gpu, absl::StrCat("transpose_", sizeof(T)), cuda::ThreadsFor(count), args,
      +[](const KernelCall& call, const KernelFault&, cuda::LoopedMoveArgs<T>* to) {
        to->in = InputAs<T>(call, 0);
        to->out = OutputAs<T>(call, 0);
      });
}

// Loop 0 does not go along the input's last dimension; that one does.
template <typename T>
absl::Status AddPatches(const CudaGpu& gpu, const cuda::Loops& loops, int along,
                        LaunchedKernel* kernel) {
  cuda::TransposePatchesArgs<T> args;
  args.across = loops.size[0];
  args.across_stride = loops.stride[0];
  args.along = loops.size[along];
  int64_t planes = 1;
  int64_t stride = loops.size[0];
  for (int d = 1; d < loops.count; ++d) {
    if (d == along) {
      args.along_stride = stride;
    } else {
      // As they are: both have the same turns.
      args.from.size[args.from.count] = args.to.size[args.to.count] = loops.size[d];
      args.from.stride[args.from.count++] = loops.stride[d];
      args.to.stride[args.to.count++] = stride;
      planes *= loops.size[d];
    }
    stride *= loops.size[d];
  }
  const auto patches = [](int64_t size, int64_t of) { return (size + of - 1) / of; };
  args.threads = planes * patches(args.along, args.kAlong) * patches(args.across, args.kAcross) *
                 args.kThreads;
  return kernel->Add(
      gpu, absl::StrCat("transpose_patches_", sizeof(T)), args.threads, args,
      +[](const KernelCall& call, const KernelFault&, cuda::TransposePatchesArgs<T>* to) {
        to->in = InputAs<T>(call, 0);
        to->out = OutputAs<T>(call, 0);
      });
}

CudaKernelOrError MakeTranspose(const CudaGpu& gpu, const NodeView& node,
                                absl::Span<const TensorType> outputs) {
  const cuda::Loops loops = Transposed(node);
  int along = 0;
  while (along < loops.count && loops.stride[along] != 1) ++along;
  // Patches that are mostly empty would keep threads for nothing.
  const bool in_patches =
      along > 0 && along < loops.count && loops.size[along] >= 8 && loops.size[0] >= 4;
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  CHORUS_RETURN_IF_ERROR(VisitWidth(
      outputs[0].dtype,
      [&](auto t) {
        using T = decltype(t);
        if (in_patches) return AddPatches<T>(gpu, loops, along, kernel.get());
        return AddMove<T>(gpu, loops, outputs[0].num_elements(), kernel.get());
      },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

constexpr CudaKernelEntry kEntries[] = {
    {"copy", MakeCopy}, {"reshape", MakeCopy}, {"transpose", MakeTranspose}};

}  // namespace

absl::Span<const CudaKernelEntry> ShapeCudaKernels() { return kEntries; }

}  // namespace chorus
