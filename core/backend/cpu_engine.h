// What the CPU's engines have in common beyond their queues: kernels, and how calls and copies
// become work on pointers. `host` runs what is ready at once, `sim` picks among it by a seeded
// generator.
//
// Threads: as StreamEngine; resolved work runs outside the mutex. Ownership: kernels are the
// callers'. Errors: those of backend.h.
#ifndef CHORUS_CORE_BACKEND_CPU_ENGINE_H_
#define CHORUS_CORE_BACKEND_CPU_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/backend/stream_engine.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernel.h"

namespace chorus {

class CpuEngine : public StreamEngine {
 public:
  // `make_kernel` is MakeHostKernel (core/ops/host_kernels.h), or a test's. `space`:
  // StreamEngine's.
  CpuEngine(HostKernelFactory make_kernel, const AddressSpace* space)
      : StreamEngine(space), make_kernel_(make_kernel) {}

  absl::StatusOr<std::unique_ptr<Kernel>> MakeKernel(const NodeView& node,
                                                     absl::Span<const TensorType> outputs);
  absl::StatusOr<int64_t> WorkspaceBytes(const NodeView& node,
                                         absl::Span<const TensorType> outputs) const;

 protected:
  // The task is for backends that run streams on a pool.
  struct CpuStream : StreamState, ThreadPool::Task {
    std::vector<KernelCall> chain;  // what TakeChain has taken
  };

  // What KernelCall::kernel points to.
  struct PreparedKernel : Kernel {
    int64_t workspace_bytes() const override { return kernel->workspace_bytes(); }

    std::unique_ptr<HostKernel> kernel;
    std::vector<int64_t> input_bytes;
    std::vector<int64_t> output_bytes;
    int64_t cost = 0;
    // May be one of a chain: the op is elementwise, a unit is an element, and there is no
    // workspace, which may be the next kernel's too. Which inputs have the output's type.
    bool elementwise = false;
    std::vector<bool> input_is_like_output;
    std::string op;
    bool may_fail = false;  // its op says so
    std::string source;
  };
  struct ResolvedKernel {
    // Units [begin, end). Failure: KernelFailure's.
    absl::Status Run(int64_t begin, int64_t end) const;

    const PreparedKernel* prepared = nullptr;
    absl::InlinedVector<const void*, 4> inputs;
    absl::InlinedVector<void*, 2> outputs;
    absl::Span<char> workspace;
  };
  struct ResolvedCopy {
    void* to = nullptr;
    const void* from = nullptr;
    int64_t bytes = 0;
  };

  std::unique_ptr<StreamState> MakeState() const override { return std::make_unique<CpuStream>(); }

  // Takes those of the kernels behind `first`, which Begin gave, that may run with it block by
  // block of elements: elementwise ones of as many elements, which have nothing in memory in common
  // with each other but element by element. Each counts as work that Begin gave.
  void TakeChain(CpuStream* stream, const KernelCall& first) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Without the mutex: only the thread that Begin gave the work to may use them.
  absl::StatusOr<ResolvedCopy> Resolve(const CopyItem& item, int device) const;
  absl::StatusOr<ResolvedKernel> Resolve(const KernelCall& call, int device) const;
  static int64_t CostOf(const KernelCall& call);

 private:
  const HostKernelFactory make_kernel_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CPU_ENGINE_H_
