#include "core/ops/norm/norm_cuda.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/norm/norm.h"
#include "core/ops/norm/norm_kernels.h"

namespace chorus {
namespace {

using cuda::Division;
using cuda::kCombined;
using cuda::MomentsArgs;
using cuda::MomentsCombineArgs;
using cuda::NormalizeArgs;
using cuda::NormalizeGradArgs;
using cuda::NormCombineArgs;
using cuda::NormIndices;
using cuda::NormParts;
using cuda::NormRow;
using cuda::NormRowsArgs;
using cuda::NormSumsArgs;

// As many threads as keep a large GPU busy.
constexpr int64_t kThreads = int64_t{1} << 17;
// What a thread should have at least, where one launch combines what they found; where it takes
// more launches; and at most, for its sums' sake.
constexpr int64_t kLeastElements = 16;
constexpr int64_t kSomeElements = 64;
constexpr int64_t kMostElements = 1024;
// So few elements of a thread are not worth a launch more.
constexpr int64_t kFewElements = 128;
// As many threads as read memory together.
constexpr int64_t kNeighbours = 32;

int64_t Groups(int64_t results) { return (results + kCombined - 1) / kCombined; }

NormParts PartsOf(int64_t before, int64_t rows, int64_t run) {
  const int64_t size = before * run;
  NormParts parts;
  parts.rows = rows;
  parts.run = run;
  parts.rows_first = run < kNeighbours;
  int64_t wanted = std::max(kThreads / std::max<int64_t>(rows, 1), size / kMostElements);
  if (!parts.rows_first) wanted = std::max(wanted, kNeighbours);
  if (size <= kCombined * kFewElements) wanted = std::min(wanted, kCombined);
  const int64_t small = std::min((size + kLeastElements - 1) / kLeastElements, kCombined);
  parts.parts = std::max<int64_t>(1, std::min(wanted, std::max(small, size / kSomeElements)));
  parts.by_neighbours = Division(parts.rows_first ? rows : parts.parts, parts.items());
  parts.part_size = size / parts.parts;
  parts.longer_parts = size % parts.parts;
  if (size == 0) return parts;
  parts.step_within = parts.parts % run;
  parts.step = parts.parts / run * rows * run + parts.step_within;
  parts.over_run = (rows - 1) * run;
  return parts;
}

NormIndices IndicesOf(const NormSizes& s) {
  return {Division(s.run, s.size), Division(s.rows, s.size), Division(s.stretch, s.size),
          Division(s.weights, s.size)};
}

// How much of the workspace the results of parts take, `kinds` of each: the first place, and a
// second one for the results of groups of these, unless there is one. Later ones stand in the two
// by turns.
int64_t NumbersOf(const NormParts& parts, int64_t kinds) {
  const int64_t groups = Groups(parts.parts);
  return kinds * parts.rows * (parts.parts + (groups > 1 ? groups : 0));
}

template <typename T>
T* Workspace(const KernelCall& call) {
  return reinterpret_cast<T*>(call.workspace);
}

template <typename T>
CudaKernelOrError MakeMoments(const CudaGpu& gpu, const NormSizes& s, const std::string& dtype,
                              CudaKernel::Facts facts) {
  MomentsArgs<T> args;
  args.parts = PartsOf(s.before, s.rows, s.run);
  args.center = s.center;
  facts.workspace_bytes = NumbersOf(args.parts, 2) * int64_t{sizeof(T)};
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat("moments_parts_", dtype), args.parts.items(), args,
      +[](const KernelCall& call, const KernelFault&, MomentsArgs<T>* to) {
        to->x = InputAs<T>(call, 0);
        to->to = Workspace<T>(call);
      }));
  MomentsCombineArgs<T> combine;
  combine.parts = args.parts;
  combine.center = s.center;
  combine.results = args.parts.parts;
  combine.parts_of_result = 1;
  combine.to_first = 2 * args.parts.items();
  do {
    combine.groups = Groups(combine.results);
    const bool is_last = combine.groups == 1;
    if (is_last) combine.to_first = 0;
    const auto to_output =
        +[](const KernelCall& call, const KernelFault&, MomentsCombineArgs<T>* to) {
          to->from = Workspace<T>(call);
          to->to = OutputAs<T>(call, 0);
        };
    const auto to_workspace =
        +[](const KernelCall& call, const KernelFault&, MomentsCombineArgs<T>* to) {
          to->from = to->to = Workspace<T>(call);
        };
    CHORUS_RETURN_IF_ERROR(kernel->Add(gpu, absl::StrCat("moments_combine_", dtype),
                                       s.rows * combine.groups, combine,
                                       is_last ? to_output : to_workspace));
    std::swap(combine.from_first, combine.to_first);
    combine.results = combine.groups;
    combine.parts_of_result *= kCombined;
  } while (combine.results > 1);
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

template <typename T>
CudaKernelOrError MakeNormalize(const CudaGpu& gpu, const NormSizes& s, const std::string& dtype,
                                CudaKernel::Facts facts) {
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  NormalizeArgs<T> args;
  args.indices = IndicesOf(s);
  args.size = s.size;
  args.rows = s.rows;
  args.epsilon = static_cast<T>(s.epsilon);
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat("normalize_", dtype), s.size, args,
      +[](const KernelCall& call, const KernelFault&, NormalizeArgs<T>* to) {
        to->x = InputAs<T>(call, 0);
        to->moments = InputAs<T>(call, 1);
        to->weights = InputAs<T>(call, 2);
        to->biases = InputAs<T>(call, 3);
        to->y = OutputAs<T>(call, 0);
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

template <typename T>
NormSumsArgs<T> SumsOf(const NormSizes& s, const NormParts& parts) {
  NormSumsArgs<T> args;
  args.parts = parts;
  args.indices = IndicesOf(s);
  args.rows = s.rows;
  args.epsilon = static_cast<T>(s.epsilon);
  return args;
}

// Adds up the results of parts, of `rows` rows with all kinds, from `first` of the workspace on,
// until there are `most` of a row at most; if that is 1, in the output. What is left is args'.
template <typename T>
absl::Status AddCombines(const CudaGpu& gpu, const std::string& dtype, int64_t rows,
                         int64_t results, int64_t first, int64_t most, LaunchedKernel* kernel,
                         NormCombineArgs<T>* args) {
  args->rows = rows;
  args->results = results;
  args->from_first = first;
  args->to_first = first + rows * results;
  while (args->results > most) {
    args->groups = Groups(args->results);
    const bool to_output = args->groups == 1;
    if (to_output) args->to_first = 0;
    const auto bind_output =
        +[](const KernelCall& call, const KernelFault&, NormCombineArgs<T>* to) {
          to->from = Workspace<T>(call);
          to->to = OutputAs<T>(call, 0);
        };
    const auto bind_workspace =
        +[](const KernelCall& call, const KernelFault&, NormCombineArgs<T>* to) {
          to->from = to->to = Workspace<T>(call);
        };
    CHORUS_RETURN_IF_ERROR(kernel->Add(gpu, absl::StrCat("normalize_combine_", dtype),
                                       rows * args->groups, *args,
                                       to_output ? bind_output : bind_workspace));
    std::swap(args->from_first, args->to_first);
    args->results = args->groups;
  }
  return absl::OkStatus();
}

template <typename T>
CudaKernelOrError MakeNormalizeGrad(const CudaGpu& gpu, const NormSizes& s,
                                    const std::string& dtype, CudaKernel::Facts facts) {
  // In the workspace: what is known of each row, and what it is made of.
  const int64_t first = s.rows * int64_t{sizeof(NormRow<T>) / sizeof(T)};
  NormSumsArgs<T> sums = SumsOf<T>(s, PartsOf(s.before, s.rows, s.run));
  sums.to_first = first;
  facts.workspace_bytes = (first + NumbersOf(sums.parts, 2)) * int64_t{sizeof(T)};
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  if (s.size == 0) return std::unique_ptr<CudaKernel>(std::move(kernel));
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat("normalize_grad_parts_", dtype), sums.parts.items(), sums,
      +[](const KernelCall& call, const KernelFault&, NormSumsArgs<T>* to) {
        to->x = InputAs<T>(call, 0);
        to->moments = InputAs<T>(call, 1);
        to->weights = InputAs<T>(call, 2);
        to->g = InputAs<T>(call, 3);
        to->to = Workspace<T>(call);
      }));
  NormCombineArgs<T> combine;
  CHORUS_RETURN_IF_ERROR(AddCombines(gpu, dtype, 2 * s.rows, sums.parts.parts, first, kCombined,
                                     kernel.get(), &combine));
  NormRowsArgs<T> of_rows;
  of_rows.from_first = combine.from_first;
  of_rows.rows = s.rows;
  of_rows.results = combine.results;
  of_rows.row_size = s.row_size();
  of_rows.epsilon = static_cast<T>(s.epsilon);
  of_rows.center = s.center;
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat("normalize_grad_rows_", dtype), s.rows, of_rows,
      +[](const KernelCall& call, const KernelFault&, NormRowsArgs<T>* to) {
        to->from = Workspace<T>(call);
        to->moments = InputAs<T>(call, 1);
        to->to = Workspace<NormRow<T>>(call);
      }));
  NormalizeGradArgs<T> args;
  args.indices = sums.indices;
  args.size = s.size;
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat("normalize_grad_", dtype), s.size, args,
      +[](const KernelCall& call, const KernelFault&, NormalizeGradArgs<T>* to) {
        to->x = InputAs<T>(call, 0);
        to->moments = InputAs<T>(call, 1);
        to->weights = InputAs<T>(call, 2);
        to->g = InputAs<T>(call, 3);
        to->of_rows = Workspace<NormRow<T>>(call);
        to->dx = OutputAs<T>(call, 0);
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

template <typename T, bool kToOutput>
void BindWeightGrad(const KernelCall& call, const KernelFault&, NormSumsArgs<T>* to) {
  to->x = InputAs<T>(call, 0);
  to->moments = InputAs<T>(call, 1);
  to->g = InputAs<T>(call, 2);
  to->to = kToOutput ? OutputAs<T>(call, 0) : Workspace<T>(call);
}
template <typename T>
CudaKernelOrError MakeNormalizeWeightGrad(const CudaGpu& gpu, const NormSizes& s,
                                          const std::string& dtype, CudaKernel::Facts facts) {
  const int64_t outer = s.size == 0 ? 0 : s.size / (s.weights * s.stretch);
  const NormSumsArgs<T> sums = SumsOf<T>(s, PartsOf(outer, s.weights, s.stretch));
  const bool is_one = sums.parts.parts == 1;
  facts.workspace_bytes = is_one ? 0 : NumbersOf(sums.parts, 1) * int64_t{sizeof(T)};
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  CHORUS_RETURN_IF_ERROR(kernel->Add(gpu, absl::StrCat("normalize_weight_grad_parts_", dtype),
                                     sums.parts.items(), sums,
                                     is_one ? BindWeightGrad<T, true> : BindWeightGrad<T, false>));
  NormCombineArgs<T> combine;
  CHORUS_RETURN_IF_ERROR(
      AddCombines(gpu, dtype, s.weights, sums.parts.parts, 0, 1, kernel.get(), &combine));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

using Maker = CudaKernelOrError (*)(const CudaGpu& gpu, const NormSizes& s,
                                    const std::string& dtype, CudaKernel::Facts facts);
template <Maker kMakeF32, Maker kMakeF64>
CudaKernelOrError Make(const CudaGpu& gpu, const NodeView& node,
                       absl::Span<const TensorType> outputs) {
  CHORUS_ASSIGN_OR_RETURN(const NormSizes sizes, SizesOfNorm(node));
  switch (node.input(0).dtype) {
    case DType::kF32:
      return kMakeF32(gpu, sizes, "f32", CudaKernel::FactsOf(node, outputs));
    case DType::kF64:
      return kMakeF64(gpu, sizes, "f64", CudaKernel::FactsOf(node, outputs));
    default:
      return NoCudaKernel(node, outputs);
  }
}

constexpr CudaKernelEntry kEntries[] = {
    {"moments", Make<MakeMoments<float>, MakeMoments<double>>},
    {"normalize", Make<MakeNormalize<float>, MakeNormalize<double>>},
    {"normalize_grad", Make<MakeNormalizeGrad<float>, MakeNormalizeGrad<double>>},
    {"normalize_weight_grad",
     Make<MakeNormalizeWeightGrad<float>, MakeNormalizeWeightGrad<double>>},
};

}  // namespace

absl::Span<const CudaKernelEntry> NormCudaKernels() { return kEntries; }

}  // namespace chorus
