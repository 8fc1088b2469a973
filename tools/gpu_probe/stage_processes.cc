// P8: a process that is killed in the middle of a kernel. P10: two contexts on one GPU. P12:
// compute-sanitizer.
#include <glob.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "core/cuda/nccl_api.h"
#include "tools/gpu_probe/assumptions.h"
#include "tools/gpu_probe/gpu.h"
#include "tools/gpu_probe/stages.h"

namespace chorus {
namespace probe {
namespace {

constexpr double kMiB = 1 << 20;

// The numbers of a message that has `count` of them; its text as an error otherwise.
absl::StatusOr<std::vector<double>> NumbersOf(const std::string& text, size_t count) {
  std::vector<double> numbers;
  for (const absl::string_view part : absl::StrSplit(text, ' ')) {
    double number = 0;
    if (!absl::SimpleAtod(part, &number)) return absl::InternalError(text);
    numbers.push_back(number);
  }
  if (numbers.size() != count) return absl::InternalError(text);
  return numbers;
}

absl::StatusOr<double> Ask(const Helper& helper, const std::string& question, double seconds) {
  CHORUS_RETURN_IF_ERROR(helper.channel.Send(question));
  CHORUS_ASSIGN_OR_RETURN(const std::string text, helper.channel.Receive(seconds));
  CHORUS_ASSIGN_OR_RETURN(const auto numbers, NumbersOf(text, 1));
  return numbers[0];
}

// --- P10 ---

constexpr uint32_t kRounds = 200;
constexpr uint32_t kRoundsThatCount = 10;
constexpr int64_t kFlagDistance = 256;  // bytes between the flags of the two sides

// Two kernels of two processes count up in turns. Nothing: they do.
absl::Status ProbeFlags(const StageContext& context, Judge* judge) {
  Recorder* const recorder = context.recorder;
  CHORUS_ASSIGN_OR_RETURN(const Helper first, context.Start("ping_pong", {"first"}));
  UniqueFd chunk;
  CHORUS_ASSIGN_OR_RETURN(const std::string bytes, first.channel.Receive(15, &chunk));
  if (!chunk.valid()) return absl::InternalError(bytes);
  CHORUS_ASSIGN_OR_RETURN(const Helper second, context.Start("ping_pong", {"second"}));
  CHORUS_RETURN_IF_ERROR(second.channel.Send(bytes, chunk.get()));
  CHORUS_ASSIGN_OR_RETURN(const std::string ready, second.channel.Receive(15));
  if (ready != "ready") return absl::InternalError(ready);
  for (const Helper* helper : {&first, &second}) {
    CHORUS_RETURN_IF_ERROR(helper->channel.Send("go"));
  }
  double reached = kRounds;
  for (const Helper* helper : {&first, &second}) {
    CHORUS_ASSIGN_OR_RETURN(const std::string text, helper->channel.Receive(kFlagSeconds + 5));
    CHORUS_ASSIGN_OR_RETURN(const auto numbers, NumbersOf(text, 2));
    const std::string side = helper == &first ? "first" : "second";
    recorder->Number("rounds that the " + side + " process's kernel saw", numbers[0], "");
    if (numbers[0] > 1) {
      recorder->Number("a round, the " + side + " process", numbers[1] / (numbers[0] - 1) / 1e3,
                       "us");
    }
    reached = std::min(reached, numbers[0]);
  }
  judge->AtLeast("rounds through flags of two contexts", reached, kRoundsThatCount);
  return absl::OkStatus();
}

absl::Status ProbeNccl(const StageContext& context, Judge* judge) {
  Recorder* const recorder = context.recorder;
  const auto start = [&](int rank) {
    return context.Start("nccl_rank", {absl::StrCat(rank)},
                         {absl::StrCat("NCCL_HOSTID=gpu-probe-", rank), "NCCL_SOCKET_IFNAME=lo",
                          "NCCL_IB_DISABLE=1", "NCCL_DEBUG=WARN"});
  };
  CHORUS_ASSIGN_OR_RETURN(const Helper zero, start(0));
  CHORUS_ASSIGN_OR_RETURN(const Helper one, start(1));
  CHORUS_ASSIGN_OR_RETURN(const std::string id, zero.channel.Receive(15));
  if (!absl::StartsWith(id, "id ")) return absl::UnavailableError(id);
  CHORUS_RETURN_IF_ERROR(one.channel.Send(id));
  CHORUS_RETURN_IF_ERROR(zero.channel.Send(id));
  for (const Helper* helper : {&zero, &one}) {
    CHORUS_ASSIGN_OR_RETURN(const std::string text, helper->channel.Receive(kNcclSeconds + 5));
    const std::string rank = helper == &zero ? "rank 0" : "rank 1";
    const auto numbers = NumbersOf(text, 4);
    if (!numbers.ok()) {
      recorder->Fact("NCCL, " + rank, text);
      judge->True("NCCL runs two ranks on one GPU (" + rank + ": " + text + ")", false);
      continue;
    }
    if (helper == &zero) {
      const int version = static_cast<int>((*numbers)[0]);
      recorder->Fact("NCCL",
                     absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100));
    }
    recorder->Number("NCCL, init, " + rank, (*numbers)[1], "s");
    recorder->Number("NCCL, all-reduce of 1 MiB, median, " + rank, (*numbers)[2], "ms");
    judge->AtMost("wrong sums of NCCL at " + rank, (*numbers)[3], 0);
  }
  return absl::OkStatus();
}

// What is wrong with the status of a non-blocking call by the deadline. OK: it has succeeded.
absl::Status AwaitNccl(const cuda::NcclApi& nccl, cuda::NcclComm comm, cuda::NcclResult result,
                       double deadline, const char* call) {
  while (result == cuda::NcclResult::kInProgress) {
    if (NowSeconds() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(call, " is not done in time"));
    }
    SleepSeconds(0.0005);
    if (nccl.CommGetAsyncError(comm, &result) != cuda::NcclResult::kSuccess) break;
  }
  if (result == cuda::NcclResult::kSuccess) return absl::OkStatus();
  const char* const last = nccl.GetLastError(comm);
  return absl::InternalError(
      absl::StrCat(call, ": ", nccl.GetErrorString(result), "; ", last == nullptr ? "" : last));
}

// --- P12 ---

std::string FindSanitizer() {
  const char* const path = std::getenv("PATH");
  std::vector<std::string> folders =
      absl::StrSplit(path == nullptr ? "" : path, ':', absl::SkipEmpty());
  for (const char* pattern :
       {"/usr/local/cuda/bin", "/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer",
        "/opt/cuda/bin", "/opt/cuda*/bin", "/opt/nvidia/*/compute-sanitizer",
        "/opt/nvidia/compute-sanitizer*"}) {
    glob_t matches{};
    if (glob(pattern, 0, nullptr, &matches) == 0) {
      folders.insert(folders.end(), matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
    }
    globfree(&matches);
  }
  for (const std::string& folder : folders) {
    const std::string program = folder + "/compute-sanitizer";
    if (access(program.c_str(), X_OK) == 0) return program;
  }
  return "";
}

}  // namespace

absl::Status RunP8(StageContext* context) {
  Recorder* const recorder = context->recorder;
  CHORUS_ASSIGN_OR_RETURN(const Helper watcher, context->Start("watch"));
  std::vector<double> ends;
  std::vector<double> frees;
  std::vector<double> kernels;
  std::vector<double> fresh;
  bool late = false;
  for (int round = 0; round < 3 && !late; ++round) {
    CHORUS_ASSIGN_OR_RETURN(const double free_before, Ask(watcher, "free", 15));
    CHORUS_ASSIGN_OR_RETURN(Helper spinner, context->Start("spin"));
    CHORUS_ASSIGN_OR_RETURN(const std::string spinning, spinner.channel.Receive(15));
    if (spinning != "spinning") return absl::InternalError(spinning);
    if (round == 0) {
      const auto beside = Ask(watcher, "kernel", 5);
      if (beside.ok()) {
        recorder->Number("a kernel of another process while one spins", *beside, "ms");
      } else {
        // The answer comes when nothing spins any more.
        recorder->Fact("a kernel of another process while one spins", beside.status().message());
        spinner.process.Kill();
        CHORUS_RETURN_IF_ERROR(watcher.channel.Receive(15).status());
        continue;
      }
      CHORUS_ASSIGN_OR_RETURN(const double free_beside, Ask(watcher, "free", 15));
      recorder->Number("memory that the spinning process has", free_before - free_beside, "MiB");
    }
    const double killed = NowSeconds();
    spinner.process.Signal(SIGKILL);
    CHORUS_RETURN_IF_ERROR(watcher.channel.Send(absl::StrCat("await ", free_before)));
    const auto ended = spinner.process.Wait(10);
    if (ended.ok()) ends.push_back(NowSeconds() - killed);
    CHORUS_ASSIGN_OR_RETURN(const std::string text, watcher.channel.Receive(15));
    const auto numbers = NumbersOf(text, 2);
    if (!numbers.ok()) {
      recorder->Fact("after the kill", text);
      late = true;
      break;
    }
    frees.push_back((*numbers)[0] - killed);
    kernels.push_back((*numbers)[1] - killed);
    const double start = NowSeconds();
    CHORUS_ASSIGN_OR_RETURN(const Helper next, context->Start("free_memory"));
    CHORUS_RETURN_IF_ERROR(next.channel.Receive(15).status());
    fresh.push_back(NowSeconds() - start);
  }
  recorder->Numbers("from SIGKILL until the process is gone", ends, "s");
  recorder->Numbers("from SIGKILL until its memory is free", frees, "s");
  recorder->Numbers("from SIGKILL until another process's kernel has run", kernels, "s");
  recorder->Numbers("a new process, from its start until it has a context", fresh, "s");
  Judge judge;
  if (frees.empty() && !late) {
    judge.Unknown("how soon memory is free");
  } else if (late) {
    judge.True("the GPU's memory is free 10 s after SIGKILL", false);
  } else {
    judge.AtMost("slowest return of memory", *std::max_element(frees.begin(), frees.end()),
                 kMostFreeSeconds, " s");
    judge.AtMost("slowest kernel of another process",
                 *std::max_element(kernels.begin(), kernels.end()), kMostFreeSeconds, " s");
  }
  recorder->Say("P8", judge.verdict());
  return absl::OkStatus();
}

absl::Status SpinUntilKilled(RoleContext* context) {
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const Memory memory, gpu->Allocate(std::min<int64_t>(
                                                   int64_t{1} << 30, gpu->most_bytes() / 2)));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  CHORUS_RETURN_IF_ERROR(gpu->FillPattern(memory.get(), memory.bytes, 8, false, stream.get()));
  CHORUS_ASSIGN_OR_RETURN(const Pinned spins, gpu->Spin(gpu->multiprocessors(), stream.get()));
  CHORUS_RETURN_IF_ERROR(context->channel.Send("spinning"));
  (void)context->channel.Receive(20);  // it is killed meanwhile
  return absl::OkStatus();
}

absl::Status WatchGpu(RoleContext* context) {
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  const auto kernel = [&] {
    CHORUS_RETURN_IF_ERROR(gpu->Launch(gpu->kernel("empty"), EmptyArgs{}, 1, stream.get(), 32));
    return gpu->Synchronize(stream.get());
  };
  CHORUS_RETURN_IF_ERROR(kernel());
  while (true) {
    const auto question = context->channel.Receive(30);
    if (!question.ok()) return absl::OkStatus();  // nobody asks any more
    if (*question == "free") {
      CHORUS_ASSIGN_OR_RETURN(const int64_t free, gpu->FreeBytes());
      CHORUS_RETURN_IF_ERROR(context->channel.Send(absl::StrCat(free / kMiB)));
    } else if (*question == "kernel") {
      const double start = NowSeconds();
      CHORUS_RETURN_IF_ERROR(kernel());
      CHORUS_RETURN_IF_ERROR(context->channel.Send(absl::StrCat(1e3 * (NowSeconds() - start))));
    } else {
      double free_before = 0;
      if (!absl::SimpleAtod(absl::StripPrefix(*question, "await "), &free_before)) {
        return absl::InvalidArgumentError(*question);
      }
      const double deadline = NowSeconds() + 10;
      double free = 0;
      while (free < free_before - kFreeMemorySlackMiB) {
        if (NowSeconds() > deadline) {
          return absl::DeadlineExceededError(absl::StrFormat(
              "%.0f MiB are free after 10 s, %.0f MiB were before", free, free_before));
        }
        CHORUS_ASSIGN_OR_RETURN(const int64_t bytes, gpu->FreeBytes());
        free = bytes / kMiB;
      }
      const double freed = NowSeconds();
      CHORUS_RETURN_IF_ERROR(kernel());
      CHORUS_RETURN_IF_ERROR(
          context->channel.Send(absl::StrFormat("%.6f %.6f", freed, NowSeconds())));
    }
  }
}

absl::Status RunP10(StageContext* context) {
  Judge judge;
  const absl::Status flags = ProbeFlags(*context, &judge);
  if (!flags.ok()) {
    context->recorder->Fact("flags of two contexts", flags.message());
    judge.Unknown("flags of two contexts (" + std::string(flags.message()) + ")");
  }
  const absl::Status nccl = ProbeNccl(*context, &judge);
  if (absl::IsUnavailable(nccl)) {
    context->recorder->Fact("NCCL", nccl.message());
    judge.Unknown("NCCL (" + std::string(nccl.message()) + ")");
  } else if (!nccl.ok()) {
    context->recorder->Fact("NCCL", nccl.message());
    judge.True("NCCL runs two ranks on one GPU (" + std::string(nccl.message()) + ")", false);
  }
  context->recorder->Say("P10", judge.verdict());
  return absl::OkStatus();
}

absl::Status PlayPingPong(RoleContext* context) {
  const bool first = context->arguments == std::vector<std::string>{"first"};
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  Chunk chunk;
  if (first) {
    CHORUS_ASSIGN_OR_RETURN(chunk, gpu->CreateChunk(2 << 20));
    CHORUS_CUDA(gpu->api(), MemsetD8Async, chunk.get(), 0, chunk.bytes, stream.get());
    CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream.get()));
    CHORUS_ASSIGN_OR_RETURN(const UniqueFd fd, gpu->ExportChunk(chunk));
    CHORUS_RETURN_IF_ERROR(context->channel.Send(absl::StrCat(chunk.bytes), fd.get()));
  } else {
    UniqueFd fd;
    CHORUS_ASSIGN_OR_RETURN(const std::string text, context->channel.Receive(15, &fd));
    int64_t bytes = 0;
    if (!absl::SimpleAtoi(text, &bytes)) return absl::InvalidArgumentError(text);
    CHORUS_ASSIGN_OR_RETURN(chunk, gpu->ImportChunk(fd.get(), bytes));
    CHORUS_RETURN_IF_ERROR(context->channel.Send("ready"));
  }
  CHORUS_ASSIGN_OR_RETURN(const Pinned result, gpu->AllocatePinned(64));
  PingPongArgs args;
  const cuda::DevicePtr one = chunk.get();
  const cuda::DevicePtr other = chunk.get() + kFlagDistance;
  args.mine = reinterpret_cast<uint32_t*>(first ? one : other);
  args.theirs = reinterpret_cast<const uint32_t*>(first ? other : one);
  args.rounds = kRounds;
  args.first = first ? 1 : 0;
  args.limit_nanos = static_cast<int64_t>(kFlagSeconds * 1e9);
  args.reached = reinterpret_cast<uint32_t*>(result.device);
  args.took_nanos = reinterpret_cast<uint64_t*>(result.device + 8);
  CHORUS_RETURN_IF_ERROR(context->channel.Receive(15).status());
  CHORUS_RETURN_IF_ERROR(gpu->Launch(gpu->kernel("ping_pong"), args, 1, stream.get(), 32));
  CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream.get()));
  uint64_t took = 0;
  std::memcpy(&took, result.as<char>() + 8, sizeof(took));
  return context->channel.Send(absl::StrCat(*result.as<uint32_t>(), " ", took));
}

absl::Status BeNcclRank(RoleContext* context) {
  const int rank = context->arguments == std::vector<std::string>{"1"} ? 1 : 0;
  constexpr int64_t kCount = (1 << 20) / 4;
  auto loaded = cuda::LoadNcclApi(context->libraries);
  if (!loaded.ok()) return absl::UnavailableError(ErrorOf(loaded.status()).message);
  const cuda::NcclApi nccl = *std::move(loaded);
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  int version = 0;
  nccl.GetVersion(&version);
  cuda::NcclId id;
  if (rank == 0) {
    const cuda::NcclResult result = nccl.GetUniqueId(&id);
    if (result != cuda::NcclResult::kSuccess) {
      return absl::InternalError(absl::StrCat("ncclGetUniqueId: ", nccl.GetErrorString(result)));
    }
    CHORUS_RETURN_IF_ERROR(context->channel.Send(
        "id " + absl::BytesToHexString(absl::string_view(id.bytes, sizeof(id.bytes)))));
  }
  CHORUS_ASSIGN_OR_RETURN(const std::string text, context->channel.Receive(15));
  const std::string bytes = absl::HexStringToBytes(absl::StripPrefix(text, "id "));
  if (bytes.size() != sizeof(id.bytes)) return absl::InternalError(text);
  std::memcpy(id.bytes, bytes.data(), sizeof(id.bytes));

  const double start = NowSeconds();
  const double deadline = start + kNcclSeconds;
  cuda::NcclConfig config;
  config.blocking = 0;
  cuda::NcclComm comm = nullptr;
  const cuda::NcclResult result = nccl.CommInitRankConfig(&comm, 2, id, rank, &config);
  CHORUS_RETURN_IF_ERROR(AwaitNccl(nccl, comm, result, deadline, "ncclCommInitRankConfig"));
  const double init_seconds = NowSeconds() - start;

  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  CHORUS_ASSIGN_OR_RETURN(const Memory from, gpu->Allocate(4 * kCount));
  CHORUS_ASSIGN_OR_RETURN(const Memory to, gpu->Allocate(4 * kCount));
  std::vector<float> values(kCount);
  // Whole numbers, so that the sum is exact.
  const auto value = [](int of_rank, int64_t i) {
    return static_cast<float>((of_rank + 1) * 1000 + i % 997);
  };
  for (int64_t i = 0; i < kCount; ++i) values[i] = value(rank, i);
  CHORUS_CUDA(gpu->api(), MemcpyHtoDAsync, from.get(), values.data(), 4 * kCount, stream.get());
  CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream.get()));
  std::vector<double> millis;
  for (int round = 0; round < 5; ++round) {
    const double begin = NowSeconds();
    const cuda::NcclResult reduced =
        nccl.AllReduce(from.as<void>(), to.as<void>(), kCount, cuda::NcclType::kFloat32,
                       cuda::NcclReduction::kSum, comm, stream.get());
    CHORUS_RETURN_IF_ERROR(AwaitNccl(nccl, comm, reduced, deadline, "ncclAllReduce"));
    while (true) {
      const cuda::Result done = gpu->api().StreamQuery(stream.get());
      if (done == cuda::Result::kSuccess) break;
      if (done != cuda::Result::kNotReady) {
        return cuda::ToStatus(gpu->api(), done, "the all-reduce's kernel");
      }
      if (NowSeconds() > deadline) {
        return absl::DeadlineExceededError("the all-reduce is not done in time");
      }
      SleepSeconds(0.0001);
    }
    millis.push_back(1e3 * (NowSeconds() - begin));
  }
  CHORUS_CUDA(gpu->api(), MemcpyDtoHAsync, values.data(), to.get(), 4 * kCount, stream.get());
  CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream.get()));
  int64_t wrong = 0;
  for (int64_t i = 0; i < kCount; ++i) wrong += values[i] != value(0, i) + value(1, i);
  std::sort(millis.begin(), millis.end());
  CHORUS_RETURN_IF_ERROR(context->channel.Send(
      absl::StrCat(version, " ", init_seconds, " ", millis[millis.size() / 2], " ", wrong)));
  // The other rank may still be using the connection; the one who asked ends both.
  (void)context->channel.Receive(10);
  return absl::OkStatus();
}

absl::Status RunP12(StageContext* context) {
  Recorder* const recorder = context->recorder;
  const std::string program = FindSanitizer();
  if (program.empty()) {
    recorder->Say("P12", {Decision::kNotDecided, "no compute-sanitizer on PATH or in /usr/local"});
    return absl::OkStatus();
  }
  recorder->Fact("program", program);
  const UniqueFd log = TemporaryFile();
  Child::Options options;
  options.output = log.get();
  std::vector<std::string> argv = {program,
                                   "--tool",
                                   "memcheck",
                                   "--target-processes",
                                   "all",
                                   SelfPath(),
                                   "--child=start_wrong_writer"};
  const double start = NowSeconds();
  CHORUS_ASSIGN_OR_RETURN(Child child, Child::Start(argv, options));
  const auto status = child.Wait(40);
  recorder->Number("took", NowSeconds() - start, "s");
  const std::string text = ContentOf(log.get());
  std::string lines;
  int writes = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const bool is_write = absl::StrContains(line, "Invalid __global__ write");
    writes += is_write;
    if (is_write || absl::StrContains(line, "ERROR SUMMARY") ||
        absl::StrContains(line, "not supported") || absl::StrContains(line, "Error:")) {
      if (lines.size() < 600) absl::StrAppend(&lines, lines.empty() ? "" : " / ", line);
    }
  }
  recorder->Fact("it says", lines.empty() ? text.substr(0, 600) : lines);
  Judge judge;
  if (!status.ok()) {
    judge.True("compute-sanitizer ends within 40 s", false);
  } else if (absl::StrContains(text, "Device not supported")) {
    judge.Unknown("compute-sanitizer does not support this device or its runtime");
  } else {
    // Only the process that the one under it starts writes where it must not.
    judge.True("compute-sanitizer finds the bad write of a child's child",
               writes > 0 && absl::StrContains(text, "out_of_bounds"));
    judge.True("the child's child ran under it to its end",
               absl::StrContains(text, "the wrong writer ends"));
  }
  recorder->Say("P12", judge.verdict());
  return absl::OkStatus();
}

absl::Status StartWrongWriter(RoleContext* /*context*/) {
  CHORUS_ASSIGN_OR_RETURN(Child child, Child::Start({SelfPath(), "--child=write_wrongly"}, {}));
  return child.Wait(35).status();
}

absl::Status WriteWrongly(RoleContext* context) {
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  constexpr int64_t kCount = 256;
  CHORUS_ASSIGN_OR_RETURN(const Memory memory, gpu->Allocate(4 * kCount));
  OutOfBoundsArgs args;
  args.words = memory.as<uint32_t>();
  args.count = kCount;
  args.writes = kCount + 8;
  CHORUS_RETURN_IF_ERROR(gpu->Launch(gpu->kernel("out_of_bounds"), args, 3, stream.get()));
  // Under compute-sanitizer an error from here on is what is wanted.
  const absl::Status status = gpu->Synchronize(stream.get());
  const std::string text =
      absl::StrCat("the wrong writer ends: ", status.ok() ? "nothing noticed" : "noticed", "\n");
  (void)!write(STDOUT_FILENO, text.data(), text.size());
  return absl::OkStatus();
}

}  // namespace probe
}  // namespace chorus
