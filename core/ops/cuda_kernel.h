// A local op's computation on a GPU.
//
// A kernel is made once for a node, when a graph is registered; enqueuing it only needs addresses.
// What its threads do is a plain function of the folder's *_kernels.h, which CPUs run as well:
// there is no #ifdef and no barrier in it; threads are numbered by a Lane and write different
// memory. A reduction of few rows is cut into parts whose results lie in the workspace, and a
// second launch takes these together, so that bits do not depend on how many threads there are.
//
// Threads: kernels are immutable. Ownership: a kernel must outlive the launches that use it
// (core/ops/kernel.h). Memory: as core/ops/host_kernel.h says. Errors: only kernels of
// ops that say so fail for what inputs hold (MayFail of core/ops/op.h), and they tell it by a word.
//
// What each *_cuda.h gives is a table of constants: any thread may read it, nobody owns it, nothing
// fails.
#ifndef CHORUS_CORE_OPS_CUDA_KERNEL_H_
#define CHORUS_CORE_OPS_CUDA_KERNEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/error.h"
#include "core/cuda/gpu.h"
#include "core/ops/kernel.h"
#include "core/ops/op.h"

namespace chorus {

// Where a kernel tells that it failed: the least of what its threads write (cuda::StoreLeast of
// device.h), `first` plus the element of which they found it.
struct KernelFault {
  cuda::DevicePtr word = 0;
  uint64_t first = 0;
};

// Bytes of an input of a call that has failed, from an offset in it on. The driver's error. What
// stands there may have been overwritten since, by what comes behind the call.
using ReadInput =
    std::function<absl::Status(size_t input, int64_t offset, int64_t bytes, void* to)>;

class CudaKernel : public Kernel {
 public:
  struct Facts {
    std::string op;
    std::string source;        // the trainer's line, or empty
    bool op_may_fail = false;  // MayFail of core/ops/op.h
    // What each operand and the workspace must have.
    std::vector<int64_t> input_bytes;
    std::vector<int64_t> output_bytes;
    int64_t workspace_bytes = 0;
  };
  // What is known without the kernel; there is no workspace.
  static Facts FactsOf(const NodeView& node, absl::Span<const TensorType> outputs);

  explicit CudaKernel(Facts facts) : facts_(std::move(facts)) {}
  int64_t workspace_bytes() const final { return facts_.workspace_bytes; }
  const Facts& facts() const { return facts_; }

  // It comes to the driver in so many parts, none of them long: a stream holds a number of calls,
  // and a kernel may be thousands.
  virtual int64_t parts() const { return 1; }
  // How many calls of the driver a part is, about.
  virtual int64_t calls() const { return 1; }
  // Whether it can tell of a failure.
  virtual bool reports() const { return false; }
  // Of what was told of that element.
  virtual absl::Status Failure(uint64_t /*element*/, const ReadInput& /*read*/) const {
    return absl::OkStatus();
  }
  // Puts a part on the stream, on which those before it are, and nothing else has used the call's
  // memory since. Operands are what they should be; `fault` is of use if it reports. The driver's
  // error: no later part is wanted then.
  virtual absl::Status Enqueue(int64_t part, const KernelCall& call, const KernelFault& fault,
                               const CudaGpu& gpu, cuda::Stream stream) const = 0;

 private:
  const Facts facts_;
};

// A kernel of launches, each a part, that differ from call to call in their addresses only.
class LaunchedKernel final : public CudaKernel {
 public:
  using Failing = std::function<absl::Status(uint64_t element, const ReadInput& read)>;
  // `failure` is Failure(), of those that report.
  explicit LaunchedKernel(Facts facts, Failing failure = nullptr)
      : CudaKernel(std::move(facts)), failure_(std::move(failure)) {}

  // Launches the kernel called `name`, behind those that were added before, by about so many
  // threads; not at all by none. `bind` sets the addresses in a copy of `args`. INTERNAL kInternal:
  // there is no such kernel.
  template <typename Args>
  absl::Status Add(const CudaGpu& gpu, const std::string& name, int64_t threads, const Args& args,
                   void (*bind)(const KernelCall& call, const KernelFault& fault, Args* args)) {
    if (threads == 0) return absl::OkStatus();
    CHORUS_ASSIGN_OR_RETURN(const cuda::Function function, gpu.Find(name));
    launches_.push_back([function, threads, args, bind](const KernelCall& call,
                                                        const KernelFault& fault, const CudaGpu& on,
                                                        cuda::Stream stream) {
      Args bound = args;
      bind(call, fault, &bound);
      return on.Launch(function, bound, threads, stream);
    });
    return absl::OkStatus();
  }

  int64_t parts() const override { return static_cast<int64_t>(launches_.size()); }
  bool reports() const override { return failure_ != nullptr; }
  absl::Status Failure(uint64_t element, const ReadInput& read) const override {
    return failure_(element, read);
  }
  absl::Status Enqueue(int64_t part, const KernelCall& call, const KernelFault& fault,
                       const CudaGpu& gpu, cuda::Stream stream) const override {
    return launches_[static_cast<size_t>(part)](call, fault, gpu, stream);
  }

 private:
  const Failing failure_;
  std::vector<std::function<absl::Status(const KernelCall& call, const KernelFault& fault,
                                         const CudaGpu& gpu, cuda::Stream stream)>>
      launches_;
};

// Operands as the kernels' bodies take them.
template <typename T>
const T* InputAs(const KernelCall& call, size_t i) {
  return reinterpret_cast<const T*>(call.inputs[i]);
}
template <typename T>
T* OutputAs(const KernelCall& call, size_t i) {
  return reinterpret_cast<T*>(call.outputs[i]);
}

// What an op's folder offers the list in cuda_kernels.cc, as HostKernelFactory does, for one GPU.
using CudaKernelOrError = absl::StatusOr<std::unique_ptr<CudaKernel>>;
using CudaKernelFactory = CudaKernelOrError (*)(const CudaGpu& gpu, const NodeView& node,
                                                absl::Span<const TensorType> outputs);
struct CudaKernelEntry {
  absl::string_view op;
  CudaKernelFactory make = nullptr;
};

// INTERNAL: what a factory answers for types that its op's rule admits and it has no kernel for.
absl::Status NoCudaKernel(const NodeView& node, absl::Span<const TensorType> outputs);

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_CUDA_KERNEL_H_
