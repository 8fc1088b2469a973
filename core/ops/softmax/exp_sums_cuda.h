// The launches that find the ExpSum of each row of a tensor, for softmax and what is made of it.
//
// Threads: pure functions. Ownership: none. Errors: those of LaunchedKernel::Add.
#ifndef CHORUS_CORE_OPS_SOFTMAX_EXP_SUMS_CUDA_H_
#define CHORUS_CORE_OPS_SOFTMAX_EXP_SUMS_CUDA_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/cuda_kernel.h"
#include "core/ops/cuda_rows.h"
#include "core/ops/softmax/softmax_kernels.h"

namespace chorus {

// Elements of a part at least: of fewer the division by which a thread finds them costs more.
inline constexpr int64_t kLeastOfRow = 16;

// Of rows of input 0, whose C++ type is T.
template <typename T>
absl::Status AddExpSums(const CudaGpu& gpu, DType dtype, const cuda::RowParts& rows,
                        const PartStates& states, LaunchedKernel* kernel) {
  using A = Arithmetic<T>;
  cuda::ExpSumArgs<T> args;
  args.states = Offset<cuda::ExpSum<A>>(states.from_parts(rows));
  args.rows = rows;
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, absl::StrCat("softmax_exps_", DTypeName(dtype)), rows.count(), args,
      +[](const KernelCall& call, const KernelFault&, cuda::ExpSumArgs<T>* to) {
        to->x = InputAs<T>(call, 0);
        Place(call, &to->states);
      }));
  return AddMerges<cuda::ExpSum<A>>(gpu, sizeof(A) == 8 ? "softmax_merge_f64" : "softmax_merge_f32",
                                    rows, states, kernel);
}

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_SOFTMAX_EXP_SUMS_CUDA_H_
