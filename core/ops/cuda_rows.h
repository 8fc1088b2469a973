// How kernels of GPUs cut rows into parts (core/ops/device_rows.h), and where the results of parts
// lie until they are one.
//
// Threads: pure functions. Ownership: none. Errors: those of LaunchedKernel::Add.
#ifndef CHORUS_CORE_OPS_CUDA_ROWS_H_
#define CHORUS_CORE_OPS_CUDA_ROWS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "core/base/error.h"
#include "core/ops/cuda_kernel.h"
#include "core/ops/device_rows.h"
#include "core/ops/host_rows.h"

namespace chorus {

// Into as many parts as keep a GPU busy and let neighbours read neighbouring elements, of at least
// so many elements each, but for the last ones, and of kMostTerms at most (core/ops/long_sums.h).
cuda::RowParts CutRows(const HostRows& rows, int64_t least);
// The same of rows that stand one after the other.
cuda::RowParts CutRows(int64_t count, int64_t size, int64_t least);

// Makes a pointer of a kernel's arguments, which until now was so many bytes from the workspace's
// start, an address.
template <typename T>
void Place(const KernelCall& call, T** pointer) {
  *pointer = reinterpret_cast<T*>(call.workspace + reinterpret_cast<uintptr_t>(*pointer));
}
template <typename T>
T* Offset(int64_t bytes) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(bytes));
}

// How many results of a row a thread takes together.
inline constexpr int64_t kMergedParts = 64;

// Memory of the workspace for what parts give: `result`, a state of each row, and two arrays
// between which states go back and forth until there is but one of each row.
struct PartStates {
  int64_t result = 0;
  int64_t first = 0;
  int64_t second = 0;

  // Where the parts put theirs.
  int64_t from_parts(const cuda::RowParts& rows) const { return rows.parts == 1 ? result : first; }
};
// At `end` of the workspace, which they move. A state of each row, of so many bytes.
int64_t PlaceResult(const cuda::RowParts& rows, int64_t state_bytes, int64_t* end);
// That and the two arrays, which reductions that follow each other may share: those of states whose
// sizes are divisors of state_bytes.
PartStates PlaceStates(const cuda::RowParts& rows, int64_t state_bytes, int64_t* end);

// Adds the launches of the kernel called `merge` that take what parts gave together.
template <typename State>
absl::Status AddMerges(const CudaGpu& gpu, const std::string& merge, const cuda::RowParts& rows,
                       const PartStates& states, LaunchedKernel* kernel) {
  int64_t from = states.first;
  int64_t to = states.second;
  for (int64_t left = rows.parts; left > 1;) {
    cuda::MergeArgs<State> args;
    args.rows = {rows.outer, left, rows.stride, (left + kMergedParts - 1) / kMergedParts};
    left = args.rows.parts;
    args.from = Offset<const State>(from);
    args.to = Offset<State>(left == 1 ? states.result : to);
    CHORUS_RETURN_IF_ERROR(kernel->Add(
        gpu, merge, args.rows.count(), args,
        +[](const KernelCall& call, const KernelFault&, cuda::MergeArgs<State>* bound) {
          Place(call, &bound->from);
          Place(call, &bound->to);
        }));
    std::swap(from, to);
  }
  return absl::OkStatus();
}

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CUDA_ROWS_H_
