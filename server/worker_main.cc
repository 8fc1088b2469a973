// chorus-worker: has devices for the chorusd that starts it (core/worker/worker_devices.h). Not for
// people: what it is told and asked comes by descriptors of that daemon.
#include "core/worker/worker_main.h"

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "core/backend/backends.h"
#include "core/backend/cuda/cuda_backend.h"
#include "core/backend/cuda/kernels/kernel_image.h"
#include "core/backend/fault/fault_backend.h"
#include "core/base/error.h"
#include "core/base/thread_pool.h"
#include "core/cuda/cublaslt_api.h"
#include "core/cuda/cuda_api.h"
#include "core/cuda/cudnn_api.h"
#include "core/ops/cuda_kernels.h"
#include "core/ops/host_kernels.h"
#include "server/heap.h"

ABSL_FLAG(std::string, backend, "sim", "Of the devices: sim or cuda.");
ABSL_FLAG(int32_t, devices, 1, "How many; of one GPU with cuda.");
ABSL_FLAG(int32_t, gpu, 0, "Which one, as the driver counts them.");
ABSL_FLAG(uint64_t, seed, 0, "Of what the backend chooses at random; 0: a random one.");
ABSL_FLAG(std::string, fault_script, "", "For tests: core/backend/fault/fault_script.h.");

namespace chorus::server {
namespace {

absl::StatusOr<std::unique_ptr<Backend>> OpenGpu() {
  CHORUS_ASSIGN_OR_RETURN(cuda::Api loaded, cuda::LoadApi({}));
  static const auto& api = *new cuda::Api(loaded);  // it outlives the backend
  CudaBackendOptions options;
  options.api = &api;
  options.gpu = absl::GetFlag(FLAGS_gpu);
  options.devices = absl::GetFlag(FLAGS_devices);
  options.make_kernel = MakeCudaKernel;
  options.libraries = {[] { return cuda::LoadBlasApi({}); }, [] { return cuda::LoadDnnApi({}); }};
  options.images = CudaKernelImages();
  options.images.push_back({cuda::kernel_image(), cuda::kernel_image_bytes()});
  return CreateCudaBackend(options);
}

absl::StatusOr<std::unique_ptr<Backend>> OpenSound(ThreadPool* pool) {
  if (absl::GetFlag(FLAGS_backend) == "cuda") return OpenGpu();
  BackendOptions options;
  options.devices = absl::GetFlag(FLAGS_devices);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.pool = pool;
  options.make_kernel = MakeHostKernel;
  return OpenBackend(absl::GetFlag(FLAGS_backend), options);
}

absl::StatusOr<std::unique_ptr<Backend>> Open(ThreadPool* pool) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, OpenSound(pool));
  return WithFaults(std::move(backend), absl::GetFlag(FLAGS_fault_script));
}

}  // namespace
}  // namespace chorus::server

int main(int argc, char** argv) {
  chorus::server::BoundHeaps();
  absl::SetProgramUsageMessage("Has devices for the chorusd that starts it.");
  absl::ParseCommandLine(argc, argv);
  // Read when the driver starts. By default 16 streams take 1.7 times as long as one (docs/gpu.md,
  // P4). What the environment says counts.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  chorus::ThreadPool pool(chorus::UsableCpus());
  return chorus::worker::WorkerMain([&pool] { return chorus::server::Open(&pool); });
}
