#include "core/ops/sort/sort_cuda.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_rows.h"
#include "core/ops/sort/sort_kernels.h"

namespace chorus {
namespace {

using cuda::SortLayout;
using cuda::SortMergeArgs;
using cuda::SortRuns;
using cuda::SortRunsArgs;

// What a launch leaves behind: runs, and where they stand.
struct Level {
  SortRuns runs;
  int64_t entries = 0;  // of a row
  bool in_output = false;
  SortLayout layout;
};

SortRuns RunsOf(const HostRows& x, int64_t k, int64_t length) {
  SortRuns runs;
  runs.size = x.size;
  runs.stride = x.stride;
  runs.length = length;
  runs.kept = std::min(length, k);
  runs.count = (x.size + length - 1) / length;
  return runs;
}

// Of k > 0: the launches' results, the last of which is the output. Adds up the workspace.
std::vector<Level> LevelsOf(const HostRows& x, int64_t k, int64_t* workspace_bytes) {
  std::vector<Level> levels;
  for (int64_t length = cuda::kSortedEntries;; length *= 2) {
    Level level;
    level.runs = RunsOf(x, k, length);
    const int64_t before_last = level.runs.count - 1;
    level.entries = before_last * level.runs.kept + level.runs.Kept(before_last);
    levels.push_back(level);
    if (level.runs.count == 1) break;
  }
  // By turns in two arrays, of which the last launch reads the first.
  int64_t most[2] = {0, 0};
  const size_t last = levels.size() - 1;
  for (size_t i = 0; i < last; ++i) {
    int64_t& needed = most[(last - 1 - i) % 2];
    needed = std::max(needed, levels[i].entries * x.count());
  }
  const bool in_output = most[1] <= k * x.count();
  for (size_t i = 0; i < last; ++i) {
    const bool second = (last - 1 - i) % 2 == 1;
    const int64_t entries = levels[i].entries;
    levels[i].in_output = second && in_output;
    levels[i].layout = {second && !in_output ? most[0] : 0, entries * x.stride, entries,
                        levels[i].runs.kept, 1};
  }
  levels[last].in_output = true;
  levels[last].layout = {0, k * x.stride, 1, 0, x.stride};
  *workspace_bytes = (most[0] + (in_output ? 0 : most[1])) * int64_t{sizeof(uint64_t)};
  return levels;
}

uint64_t* EntriesOf(const KernelCall& call, bool in_output) {
  return in_output ? OutputAs<uint64_t>(call, 0) : reinterpret_cast<uint64_t*>(call.workspace);
}

template <typename T, bool kToOutput>
void BindRuns(const KernelCall& call, const KernelFault&, SortRunsArgs<T>* args) {
  args->x = InputAs<T>(call, 0);
  args->to = EntriesOf(call, kToOutput);
}
template <typename T, bool kReadsX, bool kFromOutput>
void BindMerge(const KernelCall& call, const KernelFault&, SortMergeArgs<T>* args) {
  if (kReadsX) args->x = InputAs<T>(call, 0);
  args->from = EntriesOf(call, kFromOutput);
  args->to = EntriesOf(call, !kFromOutput);
}
// Where both are in the workspace.
template <typename T, bool kReadsX>
void BindMergeWithin(const KernelCall& call, const KernelFault&, SortMergeArgs<T>* args) {
  if (kReadsX) args->x = InputAs<T>(call, 0);
  args->from = args->to = EntriesOf(call, false);
}

// T: what is merged, which is read again where kReadsX.
template <typename T, bool kReadsX>
absl::Status AddMerges(const CudaGpu& gpu, const HostRows& x, absl::Span<const Level> levels,
                       const std::string& name, uint64_t index_mask, bool descending,
                       LaunchedKernel* kernel) {
  for (size_t i = 1; i < levels.size(); ++i) {
    const Level& from = levels[i - 1];
    const Level& to = levels[i];
    SortMergeArgs<T> args;
    args.from_layout = from.layout;
    args.to_layout = to.layout;
    args.mask = i + 1 == levels.size() ? index_mask : ~uint64_t{0};
    args.from_runs = from.runs;
    args.to_kept = to.runs.kept;
    args.to_count = to.runs.count;
    args.pieces = (to.runs.kept + cuda::kMergedEntries - 1) / cuda::kMergedEntries;
    args.items = x.count() * to.runs.count * args.pieces;
    if (descending) args.flip = static_cast<KeyType<T>>(~KeyType<T>{0});
    const auto bind = from.in_output ? BindMerge<T, kReadsX, true>
                      : to.in_output ? BindMerge<T, kReadsX, false>
                                     : BindMergeWithin<T, kReadsX>;
    CHORUS_RETURN_IF_ERROR(kernel->Add(gpu, name, args.items, args, bind));
  }
  return absl::OkStatus();
}

CudaKernelOrError MakeArgSort(const CudaGpu& gpu, const NodeView& node,
                              absl::Span<const TensorType> outputs) {
  const int64_t axis = IntAttribute(node.attributes, "axis");
  const HostRows x(node.input(0), axis);
  const int64_t k = outputs[0].dims[axis].size;
  const bool descending = IntAttribute(node.attributes, "descending") == 1;
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  std::vector<Level> levels;
  if (k > 0) levels = LevelsOf(x, k, &facts.workspace_bytes);
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  if (levels.empty()) return std::unique_ptr<CudaKernel>(std::move(kernel));

  const auto add = [&](auto t) -> absl::Status {
    using T = decltype(t);
    constexpr bool kHasRoom = sizeof(KeyType<T>) < sizeof(uint64_t);
    bool packed = false;
    uint64_t index_mask = ~uint64_t{0};
    if constexpr (kHasRoom) {
      // One index less than there is room for, so that no entry is the last there could be.
      packed = static_cast<uint64_t>(x.size) <= PackedEntry<KeyType<T>>::kIndexMask;
      if (packed) index_mask = PackedEntry<KeyType<T>>::kIndexMask;
    }
    const std::string dtype(DTypeName(node.input(0).dtype));
    SortRunsArgs<T> args;
    args.layout = levels[0].layout;
    args.mask = levels.size() == 1 ? index_mask : ~uint64_t{0};
    args.runs = levels[0].runs;
    args.items = x.count() * args.runs.count;
    if (descending) args.flip = static_cast<KeyType<T>>(~KeyType<T>{0});
    CHORUS_RETURN_IF_ERROR(kernel->Add(
        gpu, absl::StrCat("arg_sort_", packed ? "" : "wide_", "runs_", dtype), args.items, args,
        levels[0].in_output ? BindRuns<T, true> : BindRuns<T, false>));
    if (packed) {
      return AddMerges<Bool, false>(gpu, x, levels, "arg_sort_merge_8", index_mask, false,
                                    kernel.get());
    }
    return AddMerges<T, true>(gpu, x, levels, absl::StrCat("arg_sort_wide_merge_", dtype),
                              index_mask, descending, kernel.get());
  };
  if (node.input(0).dtype == DType::kBool) {
    CHORUS_RETURN_IF_ERROR(add(Bool()));
  } else {
    CHORUS_RETURN_IF_ERROR(
        VisitNumbers(node.input(0).dtype, add, [&] { return NoCudaKernel(node, outputs); }));
  }
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

constexpr CudaKernelEntry kEntries[] = {{"arg_sort", MakeArgSort}};

}  // namespace

absl::Span<const CudaKernelEntry> SortCudaKernels() { return kEntries; }

}  // namespace chorus
