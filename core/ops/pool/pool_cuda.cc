#include "core/ops/pool/pool_cuda.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/pool/pool.h"
#include "core/ops/pool/pool_kernels.h"

namespace chorus {
namespace {

using cuda::AvgPoolArgs;
using cuda::AvgPoolGradArgs;
using cuda::Division;
using cuda::MaxPoolGradArgs;
using cuda::MaxPoolIndexArgs;
using cuda::MaxPoolTakeArgs;
using cuda::PoolShape;
using cuda::PoolSide;

// As many threads as keep a large GPU busy, and what a thread should have at least.
constexpr int64_t kThreads = int64_t{1} << 17;
constexpr int64_t kTapsOfPart = 32;
// What one thread takes together.
constexpr int64_t kMostParts = 256;

PoolSide SideOf(const PoolSizes& s, size_t d, int64_t count) {
  PoolSide side;
  side.kernel = s.windows[d].kernel;
  side.stride = s.windows[d].stride;
  side.padding = s.windows[d].padding;
  side.dilation = s.windows[d].dilation;
  side.x = s.x[d];
  side.y = s.y[d];
  side.by_x = Division(side.x, count);
  side.by_y = Division(side.y, count);
  side.by_stride = Division(side.stride, side.x + side.padding);
  return side;
}

PoolShape ShapeOf(const PoolSizes& s, bool in_parts) {
  PoolShape shape;
  shape.x_count = s.planes * s.x[0] * s.x[1];
  shape.y_count = s.planes * s.y[0] * s.y[1];
  const int64_t kernel_h = s.windows[0].kernel;
  const int64_t kernel_w = s.windows[1].kernel;
  int64_t parts = 1;
  if (in_parts && shape.y_count > 0) {
    parts = std::min({kernel_h * kernel_w / kTapsOfPart, kThreads / shape.y_count, kMostParts});
    parts = std::max<int64_t>(parts, 1);
  }
  const int64_t parts_w = std::min(parts, kernel_w);
  const int64_t parts_h = std::min(parts / parts_w, kernel_h);
  const int64_t most = std::max(shape.x_count, shape.y_count * parts_h * parts_w);
  shape.h = SideOf(s, 0, most);
  shape.w = SideOf(s, 1, most);
  shape.h.parts = parts_h;
  shape.w.parts = parts_w;
  shape.by_parts = Division(parts_h * parts_w, most);
  return shape;
}

CudaKernel::Facts FactsOf(const NodeView& node, absl::Span<const TensorType> outputs,
                          const PoolShape& shape, size_t bytes_of_part) {
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  if (shape.parts() > 1) {
    facts.workspace_bytes = shape.y_count * shape.parts() * static_cast<int64_t>(bytes_of_part);
  }
  return facts;
}

// The kernel called `op`, and of more than one part what takes them together.
template <typename Args>
CudaKernelOrError Launches(const CudaGpu& gpu, const NodeView& node, DType dtype,
                           CudaKernel::Facts facts, const Args& args,
                           void (*bind)(const KernelCall& call, const KernelFault&, Args* args)) {
  const int64_t parts = args.shape.parts();
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  CHORUS_RETURN_IF_ERROR(kernel->Add(gpu, absl::StrCat(node.op, "_", DTypeName(dtype)),
                                     args.shape.y_count * parts, args, bind));
  if (parts > 1) {
    CHORUS_RETURN_IF_ERROR(kernel->Add(gpu, absl::StrCat(node.op, "_combine_", DTypeName(dtype)),
                                       args.shape.y_count, args, bind));
  }
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

CudaKernelOrError MakeAvgPool(const CudaGpu& gpu, const NodeView& node,
                              absl::Span<const TensorType> outputs) {
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, node.input(0)));
  const DType dtype = node.input(0).dtype;
  return VisitFloating(
      dtype,
      [&](auto t) {
        using T = decltype(t);
        AvgPoolArgs<T> args;
        args.shape = ShapeOf(sizes, /*in_parts=*/true);
        args.count_padding = IntAttribute(node.attributes, "count_padding") != 0;
        return Launches(
            gpu, node, dtype, FactsOf(node, outputs, args.shape, sizeof(*args.sums)), args,
            +[](const KernelCall& call, const KernelFault&, AvgPoolArgs<T>* to) {
              to->x = InputAs<T>(call, 0);
              to->y = OutputAs<T>(call, 0);
              to->sums = reinterpret_cast<Arithmetic<T>*>(call.workspace);
            });
      },
      [&] { return CudaKernelOrError(NoCudaKernel(node, outputs)); });
}

CudaKernelOrError MakeAvgPoolGrad(const CudaGpu& gpu, const NodeView& node,
                                  absl::Span<const TensorType> outputs) {
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, outputs[0]));
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  CHORUS_RETURN_IF_ERROR(VisitFloating(
      outputs[0].dtype,
      [&](auto t) {
        using T = decltype(t);
        AvgPoolGradArgs<T> args;
        args.shape = ShapeOf(sizes, /*in_parts=*/false);
        args.count_padding = IntAttribute(node.attributes, "count_padding") != 0;
        return kernel->Add(
            gpu, absl::StrCat("avg_pool_grad_", DTypeName(outputs[0].dtype)), args.shape.x_count,
            args, +[](const KernelCall& call, const KernelFault&, AvgPoolGradArgs<T>* to) {
              to->g = InputAs<T>(call, 0);
              to->x = OutputAs<T>(call, 0);
            });
      },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

CudaKernelOrError MakeMaxPoolIndex(const CudaGpu& gpu, const NodeView& node,
                                   absl::Span<const TensorType> outputs) {
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, node.input(0)));
  const DType dtype = node.input(0).dtype;
  return VisitNumbers(
      dtype,
      [&](auto t) {
        using T = decltype(t);
        MaxPoolIndexArgs<T> args;
        args.shape = ShapeOf(sizes, /*in_parts=*/true);
        return Launches(
            gpu, node, dtype, FactsOf(node, outputs, args.shape, sizeof(*args.found)), args,
            +[](const KernelCall& call, const KernelFault&, MaxPoolIndexArgs<T>* to) {
              to->x = InputAs<T>(call, 0);
              to->y = OutputAs<int32_t>(call, 0);
              to->found = reinterpret_cast<int32_t*>(call.workspace);
            });
      },
      [&] { return CudaKernelOrError(NoCudaKernel(node, outputs)); });
}

CudaKernelOrError MakeMaxPoolTake(const CudaGpu& gpu, const NodeView& node,
                                  absl::Span<const TensorType> outputs) {
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, node.input(0)));
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  CHORUS_RETURN_IF_ERROR(VisitWidth(
      outputs[0].dtype,
      [&](auto t) {
        using T = decltype(t);
        MaxPoolTakeArgs<T> args;
        args.shape = ShapeOf(sizes, /*in_parts=*/false);
        return kernel->Add(
            gpu, absl::StrCat("max_pool_take_", sizeof(T)), args.shape.y_count, args,
            +[](const KernelCall& call, const KernelFault&, MaxPoolTakeArgs<T>* to) {
              to->x = InputAs<T>(call, 0);
              to->index = InputAs<int32_t>(call, 1);
              to->y = OutputAs<T>(call, 0);
            });
      },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

CudaKernelOrError MakeMaxPoolGrad(const CudaGpu& gpu, const NodeView& node,
                                  absl::Span<const TensorType> outputs) {
  CHORUS_ASSIGN_OR_RETURN(const PoolSizes sizes, SizesOfPool(node, outputs[0]));
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  CHORUS_RETURN_IF_ERROR(VisitNumbers(
      outputs[0].dtype,
      [&](auto t) {
        using T = decltype(t);
        MaxPoolGradArgs<T> args;
        args.shape = ShapeOf(sizes, /*in_parts=*/false);
        return kernel->Add(
            gpu, absl::StrCat("max_pool_grad_", DTypeName(outputs[0].dtype)), args.shape.x_count,
            args, +[](const KernelCall& call, const KernelFault&, MaxPoolGradArgs<T>* to) {
              to->g = InputAs<T>(call, 0);
              to->index = InputAs<int32_t>(call, 1);
              to->x = OutputAs<T>(call, 0);
            });
      },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

constexpr CudaKernelEntry kEntries[] = {{"avg_pool", MakeAvgPool},
                                        {"avg_pool_grad", MakeAvgPoolGrad},
                                        {"max_pool_grad", MakeMaxPoolGrad},
                                        {"max_pool_index", MakeMaxPoolIndex},
                                        {"max_pool_take", MakeMaxPoolTake}};

}  // namespace

absl::Span<const CudaKernelEntry> PoolCudaKernels() { return kEntries; }

}  // namespace chorus
