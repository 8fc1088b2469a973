#include "tools/gpu_probe/assumptions.h"

namespace chorus {
namespace probe {
namespace {

constexpr Assumption kAssumptions[] = {
    {"P1", "memfd pages mapped RW before FUTURE_WRITE can be pinned at full speed",
     "bounce ring of cuMemHostAlloc"},
    {"P2", "chunk fds held by chorusd keep memory and contents past SIGKILL of the exporter",
     "separate owner process, or tensors lost"},
    {"P3", "pinned sequence word beats event query and host function", "event polling"},
    {"P4", "k=8 (19 streams) run concurrently", "fewer streams"},
    {"P5", "explicit graph + captured cuBLASLt node; <= 1.5 us a node", "whole-stream capture"},
    {"P6", "ordered reduce reaches copy rate", "tune; cp.async.bulk"},
    {"P7", "interpreter >= 80 % of roofline up to ~8 ops", "NVRTC in background"},
    {"P8", "SIGKILL with a spinning kernel frees the GPU in < 1 s", "longer kill_timeout"},
    {"P9", "cuBLASLt with a pinned algorithm: bits equal over processes, 64 B offsets, load",
     "matmul kernels of our own"},
    {"P10",
     "two contexts on one GPU make progress on each other's flags; NCCL 2 ranks by HOSTID over lo",
     "other processes' contexts and NCCL only on stand-ins"},
    {"P11", "Debian 12 binaries run on the GPU machine's Linux", "build there"},
    {"P12", "compute-sanitizer follows the worker", "kernel tests only"},
};

}  // namespace

absl::Span<const Assumption> Assumptions() { return kAssumptions; }

const Assumption* FindAssumption(const std::string& id) {
  for (const Assumption& assumption : kAssumptions) {
    if (id == assumption.id) return &assumption;
  }
  return nullptr;
}

}  // namespace probe
}  // namespace chorus
