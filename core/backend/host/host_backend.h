// The devices that every machine has: k virtual ones, computed by the CPU.
//
// Streams are strands: a stream's work runs in order, on whichever thread is at hand. Small work
// runs at once inside the call that enqueued it, or that enqueued what it waited for; more of it
// than HostBackendOptions::inline_bytes goes to the pool, large items cut over all of the pool's
// threads. No thread ever blocks for a stream: one that waits for an event or for the members of a
// collective is taken up again by the thread that lets it go on. So there may be more devices than
// cores.
//
// Elementwise kernels that wait behind each other run together, a block of elements at a time: what
// one leaves for the next is still in the cache. The bits are those of one by one.
//
// Threads: everything is thread-safe, which is more than backend.h promises. Ownership: the pool is
// the caller's, and outlives the backend; what is not freed goes with it. Errors: backend.h's;
// making one cannot fail.
#ifndef CHORUS_CORE_BACKEND_HOST_HOST_BACKEND_H_
#define CHORUS_CORE_BACKEND_HOST_HOST_BACKEND_H_

#include <cstdint>
#include <memory>

#include "core/backend/backend.h"
#include "core/backend/backend_options.h"

namespace chorus {

// chunk_bytes: 0 is 512 KiB.
struct HostBackendOptions : BackendOptions {
  int64_t memory_bytes = int64_t{1} << 40;  // that all devices may allocate together
  // Work up to this many bytes read and written runs where it is enqueued, and so much of larger
  // work, while the pool's threads wake up. That takes about as long as the waking, some 20 us
  // (benchmarks/backend_bench).
  int64_t inline_bytes = 2 << 20;
};

std::unique_ptr<Backend> CreateHostBackend(const HostBackendOptions& options);

// Where a size of chunks is given, work of one chunk is small work.
std::unique_ptr<Backend> OpenHost(const BackendOptions& options);

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_HOST_HOST_BACKEND_H_
