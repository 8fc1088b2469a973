#include "core/backend/cuda/testing/test_kernel_factory.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/backend/cuda/testing/test_kernels.h"
#include "core/base/error.h"
#include "core/ops/op.h"
#include "core/ops/registry.h"

extern "C" {
extern const unsigned char chorus_cuda_test_kernels_begin[];
extern const unsigned char chorus_cuda_test_kernels_end[];
}

namespace chorus {
namespace {

class TestKernel : public CudaKernel {
 public:
  TestKernel(Facts facts, cuda::Function function, int64_t count)
      : CudaKernel(std::move(facts)), function_(function), count_(count) {}

  bool reports() const override {
    return facts().op != "test_affine" && facts().op != "test_scratch";
  }
  absl::Status Failure(uint64_t /*element*/, const ReadInput& /*read*/) const override {
    return absl::AbortedError("test_fail fails");
  }
  absl::Status Enqueue(int64_t /*part*/, const KernelCall& call, const KernelFault& fault,
                       const CudaGpu& gpu, cuda::Stream stream) const override {
    const auto in = [&](size_t i) { return reinterpret_cast<const float*>(call.inputs[i]); };
    auto* const out = reinterpret_cast<float*>(call.outputs[0]);
    if (reports()) {
      cuda::FailArgs args;
      args.fault = reinterpret_cast<uint64_t*>(fault.word);
      args.value = fault.first;
      return gpu.Launch(function_, args, 1, stream);
    }
    if (facts().op == "test_affine") {
      const cuda::AffineArgs args = {in(0), in(1), out, count_};
      return gpu.Launch(function_, args, count_, stream);
    }
    const cuda::ScratchArgs args = {in(0), reinterpret_cast<float*>(call.workspace), out, count_};
    return gpu.Launch(function_, args, count_, stream);
  }

 private:
  const cuda::Function function_;
  const int64_t count_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaKernel>> MakeCudaTestKernel(
    const CudaGpu& gpu, const NodeView& node, absl::Span<const TensorType> outputs) {
  const std::string op(node.op);
  const bool fails = op == "test_fail" || op == "neg";
  if (!fails && op != "test_affine" && op != "test_scratch") {
    return absl::InternalError(absl::StrCat("no kernel for ", op));
  }
  CHORUS_ASSIGN_OR_RETURN(const cuda::Function function, gpu.Find(fails ? "test_fail" : op));
  CudaKernel::Facts facts;
  facts.op = op;
  facts.source = std::string(node.source);
  const OpDef* const def = FindOp(node.op);
  facts.op_may_fail = def == nullptr || MayFail(*def, node);  // the suite's own ops may
  for (const TensorType* input : node.inputs) facts.input_bytes.push_back(input->num_bytes());
  for (const TensorType& output : outputs) facts.output_bytes.push_back(output.num_bytes());
  if (op == "test_scratch") facts.workspace_bytes = facts.output_bytes[0];
  return std::unique_ptr<CudaKernel>(
      std::make_unique<TestKernel>(std::move(facts), function, outputs[0].num_elements()));
}

KernelImage TestKernelImage() {
  return {chorus_cuda_test_kernels_begin,
          static_cast<size_t>(chorus_cuda_test_kernels_end - chorus_cuda_test_kernels_begin)};
}

}  // namespace chorus
