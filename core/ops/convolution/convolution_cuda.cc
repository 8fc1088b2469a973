#include "core/ops/convolution/convolution_cuda.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/cuda/blas.h"
#include "core/cuda/dnn.h"
#include "core/cuda/room.h"
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

using Gives = DnnProblem::Gives;

struct Operands {
  cuda::DevicePtr x = 0;
  cuda::DevicePtr w = 0;
  cuda::DevicePtr y = 0;
};
Operands OperandsOf(Gives gives, const KernelCall& call) {
  const cuda::DevicePtr result = call.outputs[0];
  switch (gives) {
    case Gives::kY:
      return {call.inputs[0], call.inputs[1], result};
    case Gives::kX:
      return {result, call.inputs[1], call.inputs[0]};
    case Gives::kW:
      break;
  }
  return {call.inputs[0], result, call.inputs[1]};
}

// --- By cuDNN -----------------------------------------------------------------------------------

class ByDnn final : public CudaKernel {
 public:
  // Null: not by cuDNN.
  static CudaKernelOrError MakeOrNull(const CudaGpu& gpu, const NodeView& node,
                                      absl::Span<const TensorType> outputs,
                                      const ConvolutionSizes& s, Gives gives);

  int64_t calls() const override { return DnnConvolution::kCalls; }
  absl::Status Enqueue(int64_t /*part*/, const KernelCall& call, const KernelFault& /*fault*/,
                       const CudaGpu& gpu, cuda::Stream stream) const override {
    const Operands at = OperandsOf(gives_, call);
    return convolution_->Enqueue(gpu.api(), at.x, at.w, at.y,
                                 static_cast<cuda::DevicePtr>(call.workspace), stream);
  }

 private:
  ByDnn(Facts facts, Gives gives, std::unique_ptr<DnnConvolution> convolution)
      : CudaKernel(std::move(facts)), gives_(gives), convolution_(std::move(convolution)) {}

  const Gives gives_;
  const std::unique_ptr<DnnConvolution> convolution_;
};

CudaKernelOrError ByDnn::MakeOrNull(const CudaGpu& gpu, const NodeView& node,
                                    absl::Span<const TensorType> outputs, const ConvolutionSizes& s,
                                    Gives gives) {
  const Window& over_h = s.windows[0];
  const Window& over_w = s.windows[1];
  DnnProblem problem;
  problem.gives = gives;
  problem.type = outputs[0].dtype == DType::kF64 ? cuda::DnnType::kF64 : cuda::DnnType::kF32;
  problem.x = {s.batch, s.groups * s.in, s.x[0], s.x[1]};
  problem.w = {s.groups * s.out, s.in, over_h.kernel, over_w.kernel};
  problem.y = {s.batch, s.groups * s.out, s.y[0], s.y[1]};
  problem.stride = {over_h.stride, over_w.stride};
  problem.padding = {over_h.padding, over_w.padding};
  problem.dilation = {over_h.dilation, over_w.dilation};
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<DnnConvolution> convolution,
                          gpu.MakeConvolution(problem));
  if (convolution == nullptr) return nullptr;
  Facts facts = FactsOf(node, outputs);
  facts.workspace_bytes = convolution->workspace_bytes();
  return std::unique_ptr<CudaKernel>(new ByDnn(std::move(facts), gives, std::move(convolution)));
}

// --- By matrix products -------------------------------------------------------------------------

// Less work than so many products of elements is done at once by one of the kernels above: on an
// H100 they are as fast for half as many. Larger slabs were faster there, up to 512 MiB
// (docs/gpu.md), but a run is charged for them.
constexpr double kLeastProducts = 1 << 20;
constexpr int64_t kSlabBytes = int64_t{32} << 20;
// Of one sample, unfolded.
constexpr double kMostSampleBytes = 128 << 20;

// Where a tap is over one element of x at each place, and each is at one, it is not: x is unfolded
// as it is.
bool IsUnfolded(const ConvolutionSizes& s) {
  return std::any_of(s.windows.begin(), s.windows.end(), [](const Window& window) {
    return window.kernel != 1 || window.stride != 1 || window.padding != 0;
  });
}

// Samples by slabs, each a part of the kernel. A slab is unfolded into the workspace, and its
// samples multiplied by cuBLASLt:
//   y = w unfolded;   x = folded w^T y;   w = the sum of y unfolded^T over the samples of a slab,
// added to those of the slabs before; then those of the samples are added up.
template <typename T>
class ByProducts final : public CudaKernel {
 public:
  // Null: not by products.
  static absl::StatusOr<std::unique_ptr<CudaKernel>> MakeOrNull(
      const CudaGpu& gpu, const NodeView& node, absl::Span<const TensorType> outputs,
      const ConvolutionSizes& s, Gives gives);

  int64_t parts() const override { return slabs() + (plan_.gives == Gives::kW ? 1 : 0); }
  int64_t calls() const override { return BlasProduct::kCalls + 1; }
  absl::Status Enqueue(int64_t part, const KernelCall& call, const KernelFault& fault,
                       const CudaGpu& gpu, cuda::Stream stream) const override;

 private:
  // What it is made of.
  struct Plan {
    Gives gives = Gives::kY;
    bool unfolds = false;
    int64_t batch = 0;
    int64_t samples = 0;  // of a slab; fewer in the last
    // Elements of a sample, and of the weights.
    int64_t x = 0;
    int64_t y = 0;
    int64_t unfolded = 0;
    int64_t weights = 0;
    cuda::UnfoldedAxis height;
    cuda::UnfoldedAxis width;
    // Kernels.
    cuda::Function unfold = nullptr;
    cuda::Function fold = nullptr;
    cuda::Function add_up = nullptr;
    // In the workspace, from its first aligned byte.
    int64_t sums_at = 0;
    int64_t product_at = 0;
    std::unique_ptr<BlasProduct> product;
    std::unique_ptr<BlasProduct> last;  // of the last slab, where that has fewer samples
  };

  ByProducts(Facts facts, Plan plan) : CudaKernel(std::move(facts)), plan_(std::move(plan)) {}

  int64_t slabs() const { return cuda::Quotient(plan_.batch, plan_.samples); }
  static cuda::UnfoldedAxis Axis(const Window& window, int64_t x, int64_t y, int64_t elements);
  template <typename Args>
  static Args ArgsOf(const Plan& plan, int64_t count) {
    Args args;
    args.count = count;
    args.height = plan.height;
    args.width = plan.width;
    return args;
  }

  const Plan plan_;
};

template <typename T>
cuda::UnfoldedAxis ByProducts<T>::Axis(const Window& window, int64_t x, int64_t y,
                                       int64_t elements) {
  cuda::UnfoldedAxis axis;
  axis.sources = cuda::Division(x, elements);
  axis.places = cuda::Division(y, elements);
  axis.taps = cuda::Division(window.kernel, elements);
  axis.stride = cuda::Division(window.stride, x + window.padding);
  axis.padding = window.padding;
  axis.dilation = window.dilation;
  return axis;
}

template <typename T>
absl::StatusOr<std::unique_ptr<CudaKernel>> ByProducts<T>::MakeOrNull(
    const CudaGpu& gpu, const NodeView& node, absl::Span<const TensorType> outputs,
    const ConvolutionSizes& s, Gives gives) {
  const Window& over_h = s.windows[0];
  const Window& over_w = s.windows[1];
  Plan plan;
  plan.gives = gives;
  plan.unfolds = IsUnfolded(s);
  const int64_t places = s.y[0] * s.y[1];
  const int64_t rows = s.in * over_h.kernel * over_w.kernel;
  // What all of it makes may be larger than any number of these.
  const double unfolded = static_cast<double>(rows) * static_cast<double>(places);
  const double products = unfolded * static_cast<double>(s.out) * static_cast<double>(s.batch);
  // Where x has no elements there is nothing to unfold, however much padding is multiplied.
  if (s.x[0] * s.x[1] == 0) return nullptr;
  if (s.groups != 1 || std::min(s.in, s.out) < 2 || products < kLeastProducts ||
      (plan.unfolds && unfolded * sizeof(T) > kMostSampleBytes)) {
    return nullptr;
  }

  plan.batch = s.batch;
  plan.x = s.in * s.x[0] * s.x[1];
  plan.y = s.out * places;
  plan.unfolded = rows * places;
  plan.weights = s.out * rows;
  // What a sample has in the workspace.
  int64_t largest = plan.unfolds ? std::max(plan.unfolded, plan.y) : 1;
  if (gives == Gives::kW) largest = std::max(largest, plan.weights);
  const int64_t most = std::max<int64_t>(1, kSlabBytes / (largest * int64_t{sizeof(T)}));
  plan.samples = cuda::Quotient(s.batch, cuda::Quotient(s.batch, most));
  const int64_t elements = plan.samples * std::max(plan.unfolded, plan.x);
  plan.height = Axis(over_h, s.x[0], s.y[0], elements);
  plan.width = Axis(over_w, s.x[1], s.y[1], elements);

  BlasProblem problem;
  problem.type = sizeof(T) == sizeof(double) ? cuda::BlasType::kF64 : cuda::BlasType::kF32;
  problem.one_a = gives != Gives::kW;
  if (gives == Gives::kY) {
    problem.rows = s.out;
    problem.columns = places;
    problem.depth = rows;
    problem.aligned_b = plan.unfolds;
  } else if (gives == Gives::kX) {
    problem.transpose_a = true;
    problem.rows = rows;
    problem.columns = places;
    problem.depth = s.out;
    problem.aligned_c = plan.unfolds;
  } else {
    problem.transpose_b = true;
    problem.rows = s.out;
    problem.columns = rows;
    problem.depth = places;
    problem.aligned_b = plan.unfolds;
    problem.aligned_c = true;
  }
  problem.batch = plan.samples;
  plan.product = gpu.MakeProduct(problem);
  if (plan.product == nullptr) return nullptr;
  int64_t product_bytes = plan.product->workspace_bytes();
  problem.batch = s.batch % plan.samples;
  if (problem.batch != 0) {
    plan.last = gpu.MakeProduct(problem);
    if (plan.last == nullptr) return nullptr;
    product_bytes = std::max(product_bytes, plan.last->workspace_bytes());
  }

  const std::string dtype(DTypeName(outputs[0].dtype));
  CHORUS_ASSIGN_OR_RETURN(plan.unfold, gpu.Find("convolution_unfold_" + dtype));
  CHORUS_ASSIGN_OR_RETURN(plan.fold, gpu.Find("convolution_fold_" + dtype));
  CHORUS_ASSIGN_OR_RETURN(plan.add_up, gpu.Find("convolution_weight_grad_sum_" + dtype));
  const auto room = [&](bool used, int64_t of_a_sample) {
    return used ? RoomFrom(plan.samples * of_a_sample * int64_t{sizeof(T)}) : 0;
  };
  plan.sums_at = room(plan.unfolds, plan.unfolded);
  plan.product_at = plan.sums_at + room(gives == Gives::kW, plan.weights);
  Facts facts = FactsOf(node, outputs);
  facts.workspace_bytes = WorkspaceOf(plan.product_at + product_bytes);
  return std::unique_ptr<CudaKernel>(new ByProducts(std::move(facts), std::move(plan)));
}

template <typename T>
absl::Status ByProducts<T>::Enqueue(int64_t part, const KernelCall& call,
                                    const KernelFault& /*fault*/, const CudaGpu& gpu,
                                    cuda::Stream stream) const {
  const auto at = [](cuda::DevicePtr base, int64_t elements) {
    return base + static_cast<cuda::DevicePtr>(elements) * sizeof(T);
  };
  const auto workspace =
      static_cast<cuda::DevicePtr>(RoomFrom(static_cast<int64_t>(call.workspace)));
  const cuda::DevicePtr sums = workspace + static_cast<cuda::DevicePtr>(plan_.sums_at);
  const cuda::DevicePtr scratch = workspace + static_cast<cuda::DevicePtr>(plan_.product_at);
  const Gives gives = plan_.gives;
  const auto [x, w, y] = OperandsOf(gives, call);
  if (part == slabs()) {
    cuda::WeightGradSumArgs<T> args;
    args.sums = reinterpret_cast<const T*>(sums);
    args.out = reinterpret_cast<T*>(w);
    args.parts = plan_.samples;
    args.count = plan_.weights;
    return gpu.Launch(plan_.add_up, args, args.count, stream);
  }
  const int64_t first = part * plan_.samples;
  const int64_t samples = std::min(plan_.samples, plan_.batch - first);
  const BlasProduct& product = samples == plan_.samples ? *plan_.product : *plan_.last;
  const cuda::DevicePtr x_here = at(x, first * plan_.x);
  const cuda::DevicePtr y_here = at(y, first * plan_.y);
  const cuda::DevicePtr rows = plan_.unfolds ? workspace : x_here;
  if (plan_.unfolds && gives != Gives::kX) {
    auto args = ArgsOf<cuda::UnfoldArgs<T>>(plan_, samples * plan_.unfolded);
    args.x = reinterpret_cast<const T*>(x_here);
    args.rows = reinterpret_cast<T*>(rows);
    CHORUS_RETURN_IF_ERROR(gpu.Launch(plan_.unfold, args, cuda::ThreadsFor(args.count), stream));
  }
  switch (gives) {
    case Gives::kY:
      return product.Enqueue(gpu.api(), w, rows, y_here, scratch, stream);
    case Gives::kX:
      CHORUS_RETURN_IF_ERROR(product.Enqueue(gpu.api(), w, y_here, rows, scratch, stream));
      break;
    case Gives::kW:
      return product.Enqueue(gpu.api(), y_here, rows, sums, scratch, stream, /*adds=*/first > 0);
  }
  if (!plan_.unfolds) return absl::OkStatus();
  auto args = ArgsOf<cuda::FoldArgs<T>>(plan_, samples * plan_.x);
  args.rows = reinterpret_cast<const T*>(rows);
  args.x = reinterpret_cast<T*>(x_here);
  return gpu.Launch(plan_.fold, args, cuda::ThreadsFor(args.count), stream);
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
  const Gives gives = gives_w ? Gives::kW : gives_x ? Gives::kX : Gives::kY;
  // A product of matrices as they lie is cuBLASLt's.
  std::unique_ptr<CudaKernel> kernel;
  const auto make_by_products = [&]() -> absl::Status {
    CHORUS_ASSIGN_OR_RETURN(kernel, ByProducts<T>::MakeOrNull(gpu, node, outputs, s, gives));
    return absl::OkStatus();
  };
  const bool unfolds = IsUnfolded(s);
  if (!unfolds) CHORUS_RETURN_IF_ERROR(make_by_products());
  if (kernel == nullptr) {
    CHORUS_ASSIGN_OR_RETURN(kernel, ByDnn::MakeOrNull(gpu, node, outputs, s, gives));
  }
  if (kernel == nullptr && unfolds) CHORUS_RETURN_IF_ERROR(make_by_products());
  if (kernel != nullptr) return kernel;
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
