#include "core/ops/cum_sum/cum_sum_cuda.h"

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/cum_sum/cum_sum_kernels.h"
#include "core/ops/host_arithmetic.h"
#include "core/ops/host_rows.h"

namespace chorus {
namespace {

template <typename T>
using Bind = void (*)(const KernelCall& call, const KernelFault& fault, cuda::CumSumArgs<T>* args);

// Elements of a part, where rows are cut: a thread adds up so many, and one that adds up a row's
// parts no more.
int64_t PartLength(const HostRows& rows) {
  constexpr int64_t kLeast = 32;
  constexpr int64_t kManyRows = int64_t{1} << 14;
  if (rows.count() >= kManyRows) return rows.size;
  int64_t length = kLeast;
  while (length < rows.size / length) length *= 2;
  return length;
}

// All of each row.
template <typename T>
cuda::CumSumArgs<T> WholeRows(const HostRows& rows, bool reverse) {
  cuda::CumSumArgs<T> args;
  args.parts = args.rows = rows.size == 0 ? 0 : rows.count();
  args.size = args.length = rows.size;
  args.stride = rows.stride;
  args.reverse = reverse;
  return args;
}

template <typename T>
CudaKernelOrError MakeInOrder(const CudaGpu& gpu, CudaKernel::Facts facts, const HostRows& rows,
                              bool reverse, const std::string& name) {
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  const cuda::CumSumArgs<T> args = WholeRows<T>(rows, reverse);
  CHORUS_RETURN_IF_ERROR(kernel->Add(
      gpu, name, args.parts, args,
      +[](const KernelCall& call, const KernelFault&, cuda::CumSumArgs<T>* to) {
        to->in = InputAs<T>(call, 0);
        to->out = OutputAs<T>(call, 0);
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

// The sums of all parts but each row's last; what they are up to each; then all elements. In the
// workspace are these sums, by part and row: a row's are as far apart as there are rows.
template <typename T>
CudaKernelOrError MakeInParts(const CudaGpu& gpu, CudaKernel::Facts facts, const HostRows& rows,
                              bool reverse) {
  cuda::CumSumArgs<T> sums = WholeRows<T>(rows, reverse);
  sums.length = PartLength(rows);
  const int64_t in_row = rows.size == 0 ? 0 : (rows.size + sums.length - 1) / sums.length;
  const std::string name = absl::StrCat("cum_sum_", sizeof(T));
  if (in_row <= 1) return MakeInOrder<T>(gpu, std::move(facts), rows, reverse, name);
  sums.parts = rows.count() * in_row;
  cuda::CumSumArgs<T> totals = sums;
  totals.parts -= rows.count();
  facts.workspace_bytes = totals.parts * static_cast<int64_t>(sizeof(T));
  cuda::CumSumArgs<T> before;
  before.parts = before.rows = before.stride = rows.count();
  before.size = before.length = in_row - 1;
  auto kernel = std::make_unique<LaunchedKernel>(std::move(facts));
  const auto add = [&](const std::string& kernel_name, const cuda::CumSumArgs<T>& args,
                       Bind<T> bind) {
    return kernel->Add(gpu, kernel_name, args.parts, args, bind);
  };
  CHORUS_RETURN_IF_ERROR(add(
      absl::StrCat("cum_sum_totals_", sizeof(T)), totals,
      +[](const KernelCall& call, const KernelFault&, cuda::CumSumArgs<T>* to) {
        to->in = InputAs<T>(call, 0);
        to->out = reinterpret_cast<T*>(call.workspace);
      }));
  CHORUS_RETURN_IF_ERROR(add(
      name, before, +[](const KernelCall& call, const KernelFault&, cuda::CumSumArgs<T>* to) {
        to->in = to->out = reinterpret_cast<T*>(call.workspace);
      }));
  CHORUS_RETURN_IF_ERROR(add(
      name, sums, +[](const KernelCall& call, const KernelFault&, cuda::CumSumArgs<T>* to) {
        to->in = InputAs<T>(call, 0);
        to->out = OutputAs<T>(call, 0);
        to->before = reinterpret_cast<const T*>(call.workspace);
      }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

CudaKernelOrError MakeCumSum(const CudaGpu& gpu, const NodeView& node,
                             absl::Span<const TensorType> outputs) {
  const DType dtype = outputs[0].dtype;
  const HostRows rows(outputs[0], IntAttribute(node.attributes, "axis"));
  const bool reverse = IntAttribute(node.attributes, "reverse") == 1;
  CudaKernel::Facts facts = CudaKernel::FactsOf(node, outputs);
  return VisitNumbers(
      dtype,
      [&](auto t) {
        using T = decltype(t);
        if constexpr (std::is_integral<T>::value) {
          return MakeInParts<std::make_unsigned_t<T>>(gpu, std::move(facts), rows, reverse);
        } else {
          return MakeInOrder<T>(gpu, std::move(facts), rows, reverse,
                                absl::StrCat("cum_sum_", DTypeName(dtype)));
        }
      },
      [&] { return CudaKernelOrError(NoCudaKernel(node, outputs)); });
}

constexpr CudaKernelEntry kEntries[] = {{"cum_sum", MakeCumSum}};

}  // namespace

absl::Span<const CudaKernelEntry> CumSumCudaKernels() { return kEntries; }

}  // namespace chorus
