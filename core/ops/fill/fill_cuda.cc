#include "core/ops/fill/fill_cuda.h"

#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/fill/fill_kernels.h"
#include "core/ops/host_arithmetic.h"
#include "core/tensor/rounding.h"

namespace chorus {
namespace {

// The bits of one element of `dtype` that is `value`, in the lower bytes.
uint64_t BitsOf(const AttributeValue& value, DType dtype) {
  uint64_t bits = 0;
  const auto keep = [&bits](auto element) { std::memcpy(&bits, &element, sizeof(element)); };
  if (dtype == DType::kBool) {
    keep(static_cast<uint8_t>(absl::get<int64_t>(value)));
    return bits;
  }
  VisitNumbers(
      dtype,
      [&](auto t) {
        using T = decltype(t);
        if constexpr (std::is_integral<T>::value) {
          keep(static_cast<T>(absl::get<int64_t>(value)));
        } else {
          keep(RoundTo<T>(absl::get<double>(value)));
        }
      },
      [] {});
  return bits;
}

CudaKernelOrError Make(const CudaGpu& gpu, const NodeView& node,
                       absl::Span<const TensorType> outputs) {
  const TensorType& out = outputs[0];
  const uint64_t bits = BitsOf(*FindAttribute(node.attributes, "value"), out.dtype);
  auto kernel = std::make_unique<LaunchedKernel>(CudaKernel::FactsOf(node, outputs));
  CHORUS_RETURN_IF_ERROR(VisitWidth(
      out.dtype,
      [&](auto t) {
        using T = decltype(t);
        cuda::FillArgs<T> args;
        args.count = out.num_elements();
        args.value = static_cast<T>(bits);
        return kernel->Add(
            gpu, absl::StrCat("fill_", sizeof(T)), args.count, args,
            +[](const KernelCall& call, const KernelFault&, cuda::FillArgs<T>* to) {
              to->out = OutputAs<T>(call, 0);
            });
      },
      [&] { return NoCudaKernel(node, outputs); }));
  return std::unique_ptr<CudaKernel>(std::move(kernel));
}

constexpr CudaKernelEntry kEntries[] = {{"fill", Make}};

}  // namespace

absl::Span<const CudaKernelEntry> FillCudaKernels() { return kEntries; }

}  // namespace chorus
