#include "core/ops/convolution/convolution_cuda.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/convolution/convolution.h"
#include "core/ops/convolution/convolution_kernels.h"

namespace chorus {
namespace {

// --- A convolution, and its adjoint in x --------------------------------------------------------

cuda::ConvolutionAxis ForwardAxis(const Window& window, int64_t x, int64_t y) {
  cuda::ConvolutionAxis axis;
  axis.results = axis.places = y;
  axis.sources = x;
  axis.taps = window.kernel;
  axis.source_stride = window.stride;
  axis.source_step = window.dilation;
  axis.padding = -window.padding;
  return axis;
}

// Of x from 0 to below `modulus` the one by which x * number is 1 modulo it; the two have no common
// divisor.
int64_t Inverse(int64_t number, int64_t modulus) {
  // Euclid's algorithm: each remainder is its factor times the number.
  int64_t last = modulus;
  int64_t last_factor = 0;
  int64_t rest = number % modulus;
  int64_t factor = 1 % modulus;
  while (rest > 1) {
    const int64_t times = last / rest;
    last = std::exchange(rest, last - times * rest);
    last_factor = std::exchange(factor, last_factor - times * factor);
  }
  return factor < 0 ? factor + modulus : factor;
}

// What x gets of y.
cuda::ConvolutionAxis AdjointAxis(const Window& window, int64_t x, int64_t y) {
  cuda::ConvolutionAxis axis;
  axis.results = x;
  axis.sources = y;
  axis.taps = window.kernel;
  axis.classes = std::min(window.stride, x);
  axis.stride = window.stride;
  axis.places = cuda::Quotient(x, window.stride);
  axis.padding = window.padding;
  axis.dilation = window.dilation;
  axis.common = std::gcd(window.stride, window.dilation);
  axis.source_step = -window.dilation / axis.common;
  axis.tap_step = window.stride / axis.common;
  axis.inverse = Inverse(window.dilation / axis.common, axis.tap_step);
  return axis;
}

template <typename T, int kRows>
CudaKernelOrError Gather(const CudaGpu& gpu, const NodeView& node,
                         absl::Span<const TensorType> outputs, const ConvolutionSizes& s,
                         bool gives_x, const char* kernel_name) {
  const Window& over_h = s.windows[0];
  const Window& over_w = s.windows[1];
  const auto axis = gives_x ? AdjointAxis : ForwardAxis;
  cuda::ConvolutionArgs<T, kRows> args;
  args.groups = s.groups;
  args.depth = gives_x ? s.out : s.in;
  // Of weights that there are none of, no number may hold the taps.
  const int64_t taps = args.depth == 0 ? 0 : over_h.kernel * over_w.kernel;
  args.weight_row = gives_x ? taps : s.in * taps;
  args.weight_deep = gives_x ? s.in * taps : taps;
  args.height = axis(over_h, s.x[0], s.y[0]);
  args.width = axis(over_w, s.x[1], s.y[1]);
  args.tiling.rows = gives_x ? s.in : s.out;
  args.tiling.columns = s.batch * args.height.places * args.width.places;
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat(kernel_name, DTypeName(outputs[0].dtype)), args.threads(), args,
      +[](const KernelCall& call, const KernelFault&, cuda::ConvolutionArgs<T, kRows>* to) {
        to->source = InputAs<T>(call, 0);
        to->weights = InputAs<T>(call, 1);
        to->result = OutputAs<T>(call, 0);
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

// --- Its adjoint in the weights -----------------------------------------------------------------

// Of so many sums over so many places each. As many as the largest GPUs have threads at a time, but
// of some places each; whole warps where there are several, which then read places that follow one
// another.
int64_t PartsOf(int64_t threads, int64_t places) {
  constexpr int64_t kThreads = int64_t{1} << 17;
  constexpr int64_t kLeastPlaces = 64;
  constexpr int64_t kWarp = 32;
  const int64_t most = std::min(kThreads / threads, places / kLeastPlaces);
  if (most >= kWarp) return most / kWarp * kWarp;
  int64_t parts = 1;
  while (parts * 2 <= most) parts *= 2;
  return parts;
}

cuda::ConvolutionWindow WeightWindow(const Window& window, int64_t x, int64_t y) {
  return {x, y, window.kernel, window.stride, window.padding, window.dilation};
}

template <typename T, int kTile>
CudaKernelOrError GatherWeights(const CudaGpu& gpu, const NodeView& node,
                                absl::Span<const TensorType> outputs, const ConvolutionSizes& s,
                                const char* kernel_name) {
  using Args = cuda::WeightGradArgs<T, kTile>;
  using SumArgs = cuda::WeightGradSumArgs<T>;
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  Args args;
  args.batch = s.batch;
  args.groups = s.groups;
  args.height = WeightWindow(s.windows[0], s.x[0], s.y[0]);
  args.width = WeightWindow(s.windows[1], s.x[1], s.y[1]);
  args.tiling.rows = s.out;
  args.tiling.columns = s.in;
  args.parts = PartsOf(args.threads(), s.batch * s.y[0] * s.y[1]);
  args.step.column = args.parts % s.y[1];
  args.step.row = args.parts / s.y[1] % s.y[0];
  args.step.sample = args.parts / s.y[1] / s.y[0];
  const bool has_parts = args.parts > 1;
  // The weights' sums of each part.
  if (has_parts) facts.workspace_bytes = args.parts * outputs[0].num_bytes();
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  const std::string dtype(DTypeName(outputs[0].dtype));
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, kernel_name + dtype, args.threads(), args,
      +[](const KernelCall& call, const KernelFault&, Args* to) {
        to->x = InputAs<T>(call, 0);
        to->y = InputAs<T>(call, 1);
        to->sums = to->parts > 1 ? reinterpret_cast<T*>(call.workspace) : OutputAs<T>(call, 0);
      }));
  if (has_parts) {
    SumArgs sums;
    sums.parts = args.parts;
    sums.count = outputs[0].num_elements();
    CHORUS_RETURN_IF_ERROR(kernel->Add(
        gpu, "convolution_weight_grad_sum_" + dtype, sums.count, sums,
        +[](const KernelCall& call, const KernelFault&, SumArgs* to) {
          to->sums = reinterpret_cast<const T*>(call.workspace);
          to->out = OutputAs<T>(call, 0);
        }));
  }
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

// --- The table ----------------------------------------------------------------------------------

template <typename T>
CudaKernelOrError MakeOf(const CudaGpu& gpu, const NodeView& node,
                         absl::Span<const TensorType> outputs) {
  if (outputs[0].num_elements() == 0) {
    return std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  }
  const bool gives_x = node.op == "convolution_data_grad";
  const bool gives_w = node.op == "convolution_weight_grad";
  CHORUS_ASSIGN_OR_RETURN(const ConvolutionSizes s,
                          SizesOfConvolution(node, gives_x ? outputs[0] : node.input(0),
                                             gives_w ? outputs[0] : node.input(1)));
  // Where tiles would be of one channel on a side, they are of one; else few are idle.
  if (gives_w) {
    return std::min(s.in, s.out) == 1
               ? GatherWeights<T, 1>(gpu, node, outputs, s, "convolution_weight_grad_narrow_")
               : GatherWeights<T, 4>(gpu, node, outputs, s, "convolution_weight_grad_");
  }
  return (gives_x ? s.in : s.out) == 1
             ? Gather<T, 1>(gpu, node, outputs, s, gives_x, "convolution_narrow_")
             : Gather<T, 4>(gpu, node, outputs, s, gives_x, "convolution_");
}

CudaKernelOrError Make(const CudaGpu& gpu, const NodeView& node,
                       absl::Span<const TensorType> outputs) {
  switch (outputs[0].dtype) {
    case DType::kF32:
      return MakeOf<float>(gpu, node, outputs);
    case DType::kF64:
      return MakeOf<double>(gpu, node, outputs);
    default:
      return NoCudaKernel(node, outputs);
  }
}

constexpr CudaKernelEntry kEntries[] = {
    {"convolution", Make}, {"convolution_data_grad", Make}, {"convolution_weight_grad", Make}};

}  // namespace

absl::Span<const CudaKernelEntry> ConvolutionCudaKernels() { return kEntries; }

}  // namespace chorus
