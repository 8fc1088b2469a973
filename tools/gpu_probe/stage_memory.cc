// P1: files in memory, pinned. P2: memory of the GPU that outlives its process.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "benchmarks/stats.h"
#include "tools/gpu_probe/assumptions.h"
#include "tools/gpu_probe/gpu.h"
#include "tools/gpu_probe/stages.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010  // Linux 5.1
#endif

namespace chorus {
namespace probe {
namespace {

constexpr double kMiB = 1 << 20;

double Median(std::vector<double> samples) { return bench::StatsOf(std::move(samples)).p50; }

// --- P1 ---

// As an arena of the daemon's is made (core/runtime/arena.cc): mapped for writing first, sealed
// then.
struct SealedFile {
  UniqueFd fd;
  void* writable = nullptr;  // mapped before the seal
  void* readable = nullptr;  // mapped after it, for reading, as whoever gets the descriptor may
  size_t bytes = 0;
};

absl::StatusOr<SealedFile> MakeSealedFile(size_t bytes) {
  const auto error = [](const char* call) {
    return absl::InternalError(absl::StrCat(call, ": ", strerror(errno)));
  };
  SealedFile file;
  file.bytes = bytes;
  file.fd = UniqueFd(memfd_create("gpu_probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.fd.valid()) return error("memfd_create");
  if (ftruncate(file.fd.get(), static_cast<off_t>(bytes)) != 0) return error("ftruncate");
  file.writable =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file.fd.get(), 0);
  if (file.writable == MAP_FAILED) return error("mmap for writing");
  if (fcntl(file.fd.get(), F_ADD_SEALS,
            F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return error("F_ADD_SEALS");
  }
  file.readable = mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, file.fd.get(), 0);
  if (file.readable == MAP_FAILED) return error("mmap for reading");
  return file;
}

// What is copied between, in one direction or both at once, and how fast that was.
struct Route {
  std::string name;
  void* up = nullptr;    // read; null: not in this direction
  void* down = nullptr;  // written
  std::vector<double> rates;
};

absl::Status MeasureRoute(const Gpu& gpu, const Memory& memory, int64_t bytes, cuda::Stream up,
                          cuda::Stream down, Route* route) {
  const cuda::Api& api = gpu.api();
  const double start = NowSeconds();
  if (route->up != nullptr) {
    CHORUS_CUDA(api, MemcpyHtoDAsync, memory.get(), route->up, bytes, up);
  }
  if (route->down != nullptr) {
    CHORUS_CUDA(api, MemcpyDtoHAsync, route->down, memory.get() + bytes, bytes, down);
  }
  CHORUS_RETURN_IF_ERROR(gpu.Synchronize(up));
  CHORUS_RETURN_IF_ERROR(gpu.Synchronize(down));
  const double moved = (route->up != nullptr ? 1.0 : 0.0) + (route->down != nullptr ? 1.0 : 0.0);
  route->rates.push_back(moved * static_cast<double>(bytes) / (NowSeconds() - start) * 1e-9);
  return absl::OkStatus();
}

// Registers, and tells how that went.
bool Register(const cuda::Api& api, void* data, size_t bytes, unsigned int flags, const char* what,
              Recorder* recorder) {
  const double start = NowSeconds();
  const cuda::Result result = api.MemHostRegister(data, bytes, flags);
  const double seconds = NowSeconds() - start;
  recorder->Fact(absl::StrCat("cuMemHostRegister, ", what),
                 result == cuda::Result::kSuccess
                     ? absl::StrFormat("works, %.0f ms a GiB", 1e3 * seconds * 1024 * kMiB / bytes)
                     : cuda::ResultText(api, result));
  return result == cuda::Result::kSuccess;
}

// --- P2 ---

constexpr int64_t kChunkBytes = int64_t{512} << 20;
constexpr uint64_t kChunkSeed = 2;

absl::StatusOr<double> FreeMiB(const StageContext& context) {
  CHORUS_ASSIGN_OR_RETURN(const Helper helper, context.Start("free_memory"));
  CHORUS_ASSIGN_OR_RETURN(const std::string text, helper.channel.Receive(10));
  double free = 0;
  if (!absl::SimpleAtod(text, &free)) return absl::InternalError(text);
  return free;
}

// What became of a chunk whose owner was killed.
struct Survival {
  bool exported = false;
  double wrong_words = std::nan("");  // of what another process reads then
  double charged_mib = std::nan("");  // while the descriptor is open
  double kept_mib = std::nan("");     // after it was closed
  double chunk_mib = std::nan("");
};

absl::Status KillOwner(const StageContext& context, bool spinning, double free_before,
                       Survival* survival) {
  UniqueFd chunk;
  int64_t bytes = 0;
  {
    CHORUS_ASSIGN_OR_RETURN(Helper owner, context.Start("own_chunk", {spinning ? "spin" : "rest"}));
    CHORUS_ASSIGN_OR_RETURN(const std::string text, owner.channel.Receive(15, &chunk));
    if (!absl::SimpleAtoi(text, &bytes) || !chunk.valid()) return absl::InternalError(text);
    survival->exported = true;
    survival->chunk_mib = static_cast<double>(bytes) / kMiB;
    owner.process.Signal(SIGKILL);
    CHORUS_ASSIGN_OR_RETURN(const int status, owner.process.Wait(10));
    if (status != 128 + SIGKILL) return absl::InternalError("the owner had ended before");
  }
  CHORUS_ASSIGN_OR_RETURN(const double free_held, FreeMiB(context));
  survival->charged_mib = free_before - free_held;
  {
    CHORUS_ASSIGN_OR_RETURN(Helper reader, context.Start("read_chunk", {absl::StrCat(bytes)}));
    CHORUS_RETURN_IF_ERROR(reader.channel.Send("chunk", chunk.get()));
    CHORUS_ASSIGN_OR_RETURN(const std::string text, reader.channel.Receive(15));
    double wrong_words = 0;  // which SimpleAtod sets whatever it reads
    if (!absl::SimpleAtod(text, &wrong_words)) return absl::InternalError(text);
    survival->wrong_words = wrong_words;
    (void)reader.process.Wait(5);
  }
  chunk.Reset();
  // A driver may give memory back a moment later.
  const double deadline = NowSeconds() + 4;
  do {
    CHORUS_ASSIGN_OR_RETURN(const double free_after, FreeMiB(context));
    survival->kept_mib = free_before - free_after;
  } while (survival->kept_mib > kFreeMemorySlackMiB && NowSeconds() < deadline);
  return absl::OkStatus();
}

}  // namespace

absl::Status RunP1(StageContext* context) {
  Recorder* const recorder = context->recorder;
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  const cuda::Api& api = gpu->api();
  const int64_t bytes = std::min<int64_t>(256 << 20, gpu->most_bytes() / 4 / 4096 * 4096);
  CHORUS_ASSIGN_OR_RETURN(const SealedFile file, MakeSealedFile(static_cast<size_t>(bytes)));
  CHORUS_ASSIGN_OR_RETURN(const SealedFile other, MakeSealedFile(static_cast<size_t>(bytes)));
  Judge judge;
  const bool registered = Register(api, file.writable, file.bytes, cuda::kHostRegisterPortable,
                                   "mapped RW before the seal", recorder);
  judge.True("cuMemHostRegister takes a sealed file's RW mapping", registered);
  const bool read_only_flag =
      Register(api, other.readable, other.bytes, cuda::kHostRegisterReadOnly,
               "mapped for reading after the seal, READ_ONLY", recorder);
  bool readable = read_only_flag;
  if (!read_only_flag) {
    readable = Register(api, other.readable, other.bytes, cuda::kHostRegisterPortable,
                        "mapped for reading after the seal, no flag", recorder);
  }
  if (!registered) {
    recorder->Say("P1", judge.verdict());
    return absl::OkStatus();
  }
  CHORUS_ASSIGN_OR_RETURN(const Pinned pinned, gpu->AllocatePinned(bytes));
  CHORUS_ASSIGN_OR_RETURN(const Pinned pinned_too, gpu->AllocatePinned(bytes));
  CHORUS_ASSIGN_OR_RETURN(const Memory memory, gpu->Allocate(2 * bytes));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream up, gpu->CreateStream());
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream down, gpu->CreateStream());

  // What comes back must be what was sent, through the very pages.
  CHORUS_RETURN_IF_ERROR(gpu->FillPattern(memory.get() + bytes, bytes, 1, false, down.get()));
  CHORUS_CUDA(api, MemcpyDtoHAsync, file.writable, memory.get() + bytes, bytes, down.get());
  CHORUS_RETURN_IF_ERROR(gpu->Synchronize(down.get()));
  CHORUS_CUDA(api, MemcpyHtoDAsync, memory.get(), file.writable, bytes, up.get());
  CHORUS_ASSIGN_OR_RETURN(const uint64_t wrong, gpu->CountWrong(memory.get(), bytes, 1, up.get()));
  const auto* const words = static_cast<const uint32_t*>(file.readable);
  uint64_t wrong_on_host = 0;
  for (int64_t i = 0; i < bytes / 4; i += 1021) wrong_on_host += words[i] != PatternWord(1, i);
  judge.True("bytes arrive, and other mappings of the file see them",
             wrong == 0 && wrong_on_host == 0);

  std::vector<Route> routes = {
      {"host to device, cuMemHostAlloc", pinned.host.get(), nullptr, {}},
      {"host to device, sealed file", file.writable, nullptr, {}},
      {"device to host, cuMemHostAlloc", nullptr, pinned.host.get(), {}},
      {"device to host, sealed file", nullptr, file.writable, {}},
      {"both at once, cuMemHostAlloc", pinned.host.get(), pinned_too.host.get(), {}},
  };
  // Both at once want two files: one that is read, one that is written.
  CHORUS_ASSIGN_OR_RETURN(const SealedFile third, MakeSealedFile(static_cast<size_t>(bytes)));
  const bool second = api.MemHostRegister(third.writable, third.bytes,
                                          cuda::kHostRegisterPortable) == cuda::Result::kSuccess;
  if (second) routes.push_back({"both at once, sealed files", file.writable, third.writable, {}});
  if (readable) {
    routes.push_back(
        {"host to device, sealed file mapped for reading", other.readable, nullptr, {}});
  }
  for (int round = -1; round < 9; ++round) {
    for (Route& route : routes) {
      CHORUS_RETURN_IF_ERROR(MeasureRoute(*gpu, memory, bytes, up.get(), down.get(), &route));
      if (round < 0) route.rates.clear();
    }
  }
  for (const Route& route : routes) recorder->Numbers(route.name, route.rates, "GB/s");
  const auto share = [&](size_t ours, size_t pinned_route) {
    return Median(routes[ours].rates) / Median(routes[pinned_route].rates);
  };
  const std::string of = " of cuMemHostAlloc's rate";
  judge.AtLeast("host to device" + of, share(1, 0), kLeastPinnedShare);
  judge.AtLeast("device to host" + of, share(3, 2), kLeastPinnedShare);
  if (second) {
    judge.AtLeast("both at once" + of, share(5, 4), kLeastPinnedShare);
  } else {
    judge.Unknown("both at once");
  }
  recorder->Say("P1", judge.verdict());
  return absl::OkStatus();
}

absl::Status RunP2(StageContext* context) {
  Recorder* const recorder = context->recorder;
  // This process never calls the driver, as chorusd does not.
  CHORUS_ASSIGN_OR_RETURN(const double free_before, FreeMiB(*context));
  recorder->Number("free before", free_before, "MiB");
  Judge judge;
  for (const bool spinning : {false, true}) {
    const std::string when = spinning ? ", killed while a kernel ran" : ", killed at rest";
    Survival survival;
    const absl::Status status = KillOwner(*context, spinning, free_before, &survival);
    if (!status.ok()) recorder->Fact("stopped" + when, status.message());
    if (!std::isnan(survival.wrong_words)) {
      recorder->Number("wrong words that another process reads" + when, survival.wrong_words, "");
    }
    if (!std::isnan(survival.charged_mib)) {
      recorder->Number("taken while the descriptor is open" + when, survival.charged_mib, "MiB");
    }
    if (!std::isnan(survival.kept_mib)) {
      recorder->Number("taken after it was closed" + when, survival.kept_mib, "MiB");
    }
    // A read that fails after an export that worked is an answer, too.
    if (!status.ok() && std::isnan(survival.wrong_words)) {
      if (survival.exported) {
        judge.True("another process can read the chunk" + when + " (" +
                       std::string(status.message()) + ")",
                   false);
      } else {
        judge.Unknown("the contents" + when + " (" + std::string(status.message()) + ")");
      }
      continue;
    }
    judge.AtMost("wrong words" + when, survival.wrong_words, 0);
    judge.AtLeast("memory stays taken" + when, survival.charged_mib,
                  survival.chunk_mib - kFreeMemorySlackMiB, " MiB");
    judge.AtMost("memory still taken after the descriptor was closed" + when, survival.kept_mib,
                 kFreeMemorySlackMiB, " MiB");
  }
  recorder->Say("P2", judge.verdict());
  return absl::OkStatus();
}

absl::Status OwnChunk(RoleContext* context) {
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const Chunk chunk,
                          gpu->CreateChunk(std::min(kChunkBytes, gpu->most_bytes() / 2)));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  CHORUS_RETURN_IF_ERROR(
      gpu->FillPattern(chunk.get(), chunk.bytes, kChunkSeed, false, stream.get()));
  CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream.get()));
  CHORUS_ASSIGN_OR_RETURN(const UniqueFd fd, gpu->ExportChunk(chunk));
  Pinned spins;
  if (context->arguments == std::vector<std::string>{"spin"}) {
    CHORUS_ASSIGN_OR_RETURN(spins, gpu->Spin(1, stream.get()));
  }
  CHORUS_RETURN_IF_ERROR(context->channel.Send(absl::StrCat(chunk.bytes), fd.get()));
  (void)context->channel.Receive(20);  // it is killed meanwhile
  return absl::OkStatus();
}

absl::Status ReadChunk(RoleContext* context) {
  int64_t bytes = 0;
  if (context->arguments.size() != 1 || !absl::SimpleAtoi(context->arguments[0], &bytes)) {
    return absl::InvalidArgumentError("read_chunk wants a number of bytes");
  }
  UniqueFd fd;
  CHORUS_RETURN_IF_ERROR(context->channel.Receive(10, &fd).status());
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const Chunk chunk, gpu->ImportChunk(fd.get(), bytes));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  CHORUS_ASSIGN_OR_RETURN(const uint64_t wrong,
                          gpu->CountWrong(chunk.get(), bytes, kChunkSeed, stream.get()));
  return context->channel.Send(absl::StrCat(wrong));
}

absl::Status TellFreeMemory(RoleContext* context) {
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const int64_t free, gpu->FreeBytes());
  return context->channel.Send(absl::StrCat(static_cast<double>(free) / kMiB));
}

}  // namespace probe
}  // namespace chorus
