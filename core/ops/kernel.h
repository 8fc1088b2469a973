// A local op's kernel as its caller knows it, whatever device it is for: what a launch takes. What
// a kernel computes, and where, is in host_kernel.h and cuda_kernel.h.
//
// Threads: kernels are immutable. Ownership: said at Kernel. Errors: none here; a launch's are
// those of its stream (core/backend/backend.h).
#ifndef CHORUS_CORE_OPS_KERNEL_H_
#define CHORUS_CORE_OPS_KERNEL_H_

#include <atomic>
#include <cstdint>

#include "absl/container/inlined_vector.h"

namespace chorus {

// An address in the address space of a device's domain (Backend::domain). Only backends with
// host_addressable may turn it into a pointer. 0: no memory (zero bytes).
using DeviceAddress = uint64_t;

// A local op made ready for a device: attributes and types were read when it was made, running it
// only needs addresses. Usable on every device of the backend that made it; it must not outlive
// the backend and must outlive the calls that use it.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual int64_t workspace_bytes() const = 0;  // see KernelCall::workspace
};

struct KernelCall {
  const Kernel* kernel = nullptr;
  absl::InlinedVector<DeviceAddress, 4> inputs;  // of the types that the kernel was made for
  absl::InlinedVector<DeviceAddress, 2> outputs;
  // The kernel's workspace_bytes() of scratch, aligned to 64 bytes: nothing else may use them from
  // what comes before this call on its stream to what comes behind it. What they hold before and
  // after means nothing.
  DeviceAddress workspace = 0;
  // Set when its turn comes: the kernel is left out. Null: it never is. Must stand until a Callback
  // behind it.
  const std::atomic<bool>* unless = nullptr;
  // Set at any time: nobody wants what the kernel makes, and it may be left out. Null, or stands,
  // as above.
  const std::atomic<bool>* unwanted = nullptr;
};

}  // namespace chorus

#endif  // CHORUS_CORE_OPS_KERNEL_H_
