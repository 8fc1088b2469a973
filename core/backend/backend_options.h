// What every backend is opened with. A backend's own header has what else it can be told.
//
// Threads: plain data. Ownership: refers to the pool, which must outlive the backend. Errors: said
// at CheckDeviceCount(); OpenBackend (backends.h) says what else is refused.
#ifndef CHORUS_CORE_BACKEND_BACKEND_OPTIONS_H_
#define CHORUS_CORE_BACKEND_BACKEND_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "core/base/thread_pool.h"
#include "core/ops/host_kernel.h"

namespace chorus {

struct BackendOptions {
  int devices = 1;                          // logical devices; at most kMaxDevices
  ThreadPool* pool = nullptr;               // for work of the CPU; must outlive the backend
  HostKernelFactory make_kernel = nullptr;  // MakeHostKernel of core/ops/host_kernels.h
  // Of what a backend chooses at random; 0: a random one.
  uint64_t seed = 0;
  // How many devices are of one domain (Backend::domain), in their order, where a backend can have
  // that either way; 0: as it has it without being told.
  int devices_per_domain = 0;
  // Work of the CPU is cut into pieces of about so many bytes read and written; 0: as suits the
  // backend. Tests cut it small, so that small tensors have several pieces.
  int64_t chunk_bytes = 0;
};
inline constexpr int kMaxDevices = 64;

// INVALID_ARGUMENT kMalformed: not 1 to kMaxDevices.
absl::Status CheckDeviceCount(int devices);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_BACKEND_OPTIONS_H_
