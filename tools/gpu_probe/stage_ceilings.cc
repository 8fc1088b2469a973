// The driver, what this GPU does at most, and P11: that this very program runs here.
#include <gnu/libc-version.h>
#include <sys/utsname.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/gpu_probe/gpu.h"
#include "tools/gpu_probe/stages.h"

namespace chorus {
namespace probe {
namespace {

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

std::vector<double> Rates(const std::vector<double>& micros, double bytes) {
  std::vector<double> rates;
  for (const double m : micros) rates.push_back(bytes / m * 1e-3);
  return rates;
}

absl::Status TellDevice(const Gpu& gpu, Recorder* recorder) {
  const cuda::Api& api = gpu.api();
  char name[256] = "";
  CHORUS_CUDA(api, DeviceGetName, name, sizeof(name), gpu.device());
  char id[32] = "";
  CHORUS_CUDA(api, DeviceGetPCIBusId, id, sizeof(id), gpu.device());
  int driver = 0;
  CHORUS_CUDA(api, DriverGetVersion, &driver);
  size_t total = 0;
  CHORUS_CUDA(api, DeviceTotalMem, &total, gpu.device());
  CHORUS_ASSIGN_OR_RETURN(const int64_t free, gpu.FreeBytes());
  CHORUS_ASSIGN_OR_RETURN(const int major, gpu.Attribute(cuda::DeviceAttribute::kCapabilityMajor));
  CHORUS_ASSIGN_OR_RETURN(const int minor, gpu.Attribute(cuda::DeviceAttribute::kCapabilityMinor));
  CHORUS_ASSIGN_OR_RETURN(const int engines,
                          gpu.Attribute(cuda::DeviceAttribute::kAsyncEngineCount));
  recorder->Fact("device", absl::StrCat(name, ", PCI ", id));
  recorder->Fact("the driver is for CUDA", VersionText(driver));
  recorder->Fact("compute capability", absl::StrCat(major, ".", minor));
  recorder->Number("multiprocessors", gpu.multiprocessors(), "");
  recorder->Number("memory", static_cast<double>(total) / (1 << 20), "MiB");
  recorder->Number("memory, free", static_cast<double>(free) / (1 << 20), "MiB");
  recorder->Number("L2 cache", static_cast<double>(gpu.l2_bytes()) / (1 << 20), "MiB");
  recorder->Number("copy engines", engines, "");
  std::string kernels;
  int version = 0;
  for (const auto& [kernel, function] : gpu.kernels()) {
    int registers = 0;
    int local = 0;
    CHORUS_CUDA(api, FuncGetAttribute, &registers, cuda::FunctionAttribute::kRegisters, function);
    CHORUS_CUDA(api, FuncGetAttribute, &local, cuda::FunctionAttribute::kLocalBytes, function);
    CHORUS_CUDA(api, FuncGetAttribute, &version, cuda::FunctionAttribute::kBinaryVersion, function);
    absl::StrAppend(&kernels, kernels.empty() ? "" : ", ", kernel, " ", registers);
    if (local > 0) absl::StrAppend(&kernels, " (", local, " B of local memory)");
  }
  recorder->Fact("kernels are compiled for", absl::StrCat("sm_", version));
  recorder->Fact("registers", kernels);
  return absl::OkStatus();
}

absl::Status MeasureCopies(Gpu* gpu, cuda::Stream stream, Recorder* recorder) {
  const cuda::Api& api = gpu->api();
  const int64_t bytes = std::min<int64_t>(int64_t{1} << 30, gpu->most_bytes() / 4 / 4096 * 4096);
  CHORUS_ASSIGN_OR_RETURN(const Memory from, gpu->Allocate(bytes));
  CHORUS_ASSIGN_OR_RETURN(const Memory to, gpu->Allocate(bytes));
  CHORUS_RETURN_IF_ERROR(gpu->FillPattern(from.get(), bytes, 1, true, stream));
  const auto on_device = [&]() -> absl::Status {
    CHORUS_CUDA(api, MemcpyDtoDAsync, to.get(), from.get(), bytes, stream);
    return absl::OkStatus();
  };
  CHORUS_ASSIGN_OR_RETURN(const auto driver_micros, gpu->TimeMicros(stream, 9, 4, on_device));
  recorder->Numbers("copy on the device, cuMemcpyDtoD, read and written",
                    Rates(driver_micros, 2.0 * bytes), "GB/s");
  CopyArgs args;
  args.from = from.as<Pack>();
  args.to = to.as<Pack>();
  args.packs = bytes / 16;
  CHORUS_ASSIGN_OR_RETURN(const auto kernel_micros, gpu->TimeMicros(stream, 9, 4, [&] {
    return gpu->Launch(gpu->kernel("copy"), args, gpu->Wave("copy"), stream);
  }));
  recorder->Numbers("copy on the device, our kernel, read and written",
                    Rates(kernel_micros, 2.0 * bytes), "GB/s");

  const int64_t host_bytes = std::min<int64_t>(256 << 20, bytes);
  CHORUS_ASSIGN_OR_RETURN(const Pinned pinned, gpu->AllocatePinned(host_bytes));
  CHORUS_ASSIGN_OR_RETURN(const auto up, gpu->TimeMicros(stream, 7, 1, [&]() -> absl::Status {
    CHORUS_CUDA(api, MemcpyHtoDAsync, to.get(), pinned.host.get(), host_bytes, stream);
    return absl::OkStatus();
  }));
  recorder->Numbers("host to device, pinned", Rates(up, host_bytes), "GB/s");
  CHORUS_ASSIGN_OR_RETURN(const auto down, gpu->TimeMicros(stream, 7, 1, [&]() -> absl::Status {
    CHORUS_CUDA(api, MemcpyDtoHAsync, pinned.host.get(), to.get(), host_bytes, stream);
    return absl::OkStatus();
  }));
  recorder->Numbers("device to host, pinned", Rates(down, host_bytes), "GB/s");
  return absl::OkStatus();
}

absl::Status MeasureLaunches(const Gpu& gpu, cuda::Stream stream, Recorder* recorder) {
  const cuda::Function empty = gpu.kernel("empty");
  CHORUS_ASSIGN_OR_RETURN(const auto back_to_back, gpu.TimeMicros(stream, 9, 1000, [&] {
    return gpu.Launch(empty, EmptyArgs{}, 1, stream, 32);
  }));
  recorder->Numbers("1,000 empty kernels in a row, each", back_to_back, "us");
  std::vector<double> calls;
  std::vector<double> waits;
  for (int n = 0; n < 500; ++n) {
    const double start = NowSeconds();
    CHORUS_RETURN_IF_ERROR(gpu.Launch(empty, EmptyArgs{}, 1, stream, 32));
    const double launched = NowSeconds();
    CHORUS_RETURN_IF_ERROR(gpu.Synchronize(stream));
    calls.push_back(1e6 * (launched - start));
    waits.push_back(1e6 * (NowSeconds() - start));
  }
  recorder->Numbers("the call that launches a kernel", calls, "us");
  recorder->Numbers("launch and cuStreamSynchronize", waits, "us");
  return absl::OkStatus();
}

}  // namespace

absl::Status RunDriver(StageContext* context) {
  CHORUS_ASSIGN_OR_RETURN(const cuda::Api api, cuda::LoadApi(context->libraries));
  CHORUS_CUDA(api, Init, 0);
  int count = 0;
  CHORUS_CUDA(api, DeviceGetCount, &count);
  if (count == 0) return MakeError(Reason::kWrongState, "the driver has no GPU");
  return absl::OkStatus();
}

absl::Status RunCeilings(StageContext* context) {
  Recorder* const recorder = context->recorder;
  const double start = NowSeconds();
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  recorder->Number("driver, context and kernels loaded in", NowSeconds() - start, "s");
  CHORUS_RETURN_IF_ERROR(TellDevice(*gpu, recorder));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  CHORUS_RETURN_IF_ERROR(MeasureLaunches(*gpu, stream.get(), recorder));
  return MeasureCopies(gpu.get(), stream.get(), recorder);
}

absl::Status RunP11(StageContext* context) {
  Recorder* const recorder = context->recorder;
  recorder->Fact("C library", absl::StrCat("glibc ", gnu_get_libc_version()));
  utsname system{};
  if (uname(&system) == 0) {
    recorder->Fact("kernel",
                   absl::StrCat(system.sysname, " ", system.release, " ", system.machine));
  }
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  int driver = 0;
  CHORUS_CUDA(gpu->api(), DriverGetVersion, &driver);
  recorder->Fact("the driver is for CUDA", VersionText(driver));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  CHORUS_ASSIGN_OR_RETURN(const Memory memory, gpu->Allocate(1 << 20));
  CHORUS_RETURN_IF_ERROR(gpu->FillPattern(memory.get(), memory.bytes, 11, false, stream.get()));
  CHORUS_ASSIGN_OR_RETURN(const uint64_t wrong,
                          gpu->CountWrong(memory.get(), memory.bytes, 11, stream.get()));
  Judge judge;
  judge.True(
      "this program, built on Debian 12, runs here, and its kernels compute what they should",
      wrong == 0);
  recorder->Say("P11", judge.verdict());
  return absl::OkStatus();
}

}  // namespace probe
}  // namespace chorus
