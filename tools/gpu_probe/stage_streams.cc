// P3: how soon the host sees that something is done. P4: how much runs at a time.
#include <sched.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "benchmarks/stats.h"
#include "tools/gpu_probe/assumptions.h"
#include "tools/gpu_probe/gpu.h"
#include "tools/gpu_probe/stages.h"

namespace chorus {
namespace probe {
namespace {

// --- P3 ---

// Spins until `done`, as a strand of the daemon would. DEADLINE_EXCEEDED after two seconds.
template <typename Done>
absl::Status SpinUntil(const Done& done) {
  double start = 0;
  for (int64_t looks = 1; !done(); ++looks) {
    cuda::Relax();
    // The clock, and the processor for others, only where it takes long anyway.
    if (looks % 4096 != 0) continue;
    if (start == 0) start = NowSeconds();
    if (NowSeconds() - start > 2) return absl::DeadlineExceededError("it never completes");
    sched_yield();
  }
  return absl::OkStatus();
}

// A way for the host to see that a kernel is done.
struct Way {
  std::string name;
  std::function<absl::Status()> once;
  std::vector<double> micros;
};

void CountFromHost(void* count) {
  static_cast<std::atomic<uint32_t>*>(count)->fetch_add(1, std::memory_order_release);
}

// --- P4 ---

constexpr int kDevices = 8;  // logical ones
constexpr int64_t kKernelNanos = 200'000;
constexpr int kKernelsInARow = 3;
constexpr int64_t kCopiedBytes = 8
                                 << 20;  // half of it each way, in less time than the kernels take

// A GPU with the streams that the design gives it.
struct DesignStreams {
  std::vector<OwnedStream> work;  // compute and comm of each logical device
  OwnedStream up;
  OwnedStream down;
  OwnedStream meeting;
};

class StreamsTest {
 public:
  explicit StreamsTest(Gpu* gpu) : gpu_(*gpu) {}

  absl::Status Open() {
    for (int n = 0; n < 2 * kDevices; ++n) {
      CHORUS_ASSIGN_OR_RETURN(OwnedStream stream, gpu_.CreateStream());
      streams_.work.push_back(std::move(stream));
      CHORUS_ASSIGN_OR_RETURN(OwnedEvent event, gpu_.CreateEvent(false));
      events_.push_back(std::move(event));
    }
    CHORUS_ASSIGN_OR_RETURN(streams_.up, gpu_.CreateStream());
    CHORUS_ASSIGN_OR_RETURN(streams_.down, gpu_.CreateStream());
    CHORUS_ASSIGN_OR_RETURN(streams_.meeting, gpu_.CreateStream());
    CHORUS_ASSIGN_OR_RETURN(opened_, gpu_.CreateEvent());
    CHORUS_ASSIGN_OR_RETURN(closed_, gpu_.CreateEvent());
    CHORUS_ASSIGN_OR_RETURN(met_, gpu_.CreateEvent(false));
    CHORUS_ASSIGN_OR_RETURN(memory_, gpu_.Allocate(kCopiedBytes));
    CHORUS_ASSIGN_OR_RETURN(host_, gpu_.AllocatePinned(kCopiedBytes));
    // Kernels are loaded at their first use, which would wait for all that runs.
    CHORUS_RETURN_IF_ERROR(Short(streams_.meeting.get()));
    CHORUS_RETURN_IF_ERROR(
        gpu_.Launch(gpu_.kernel("empty"), EmptyArgs{}, 1, streams_.meeting.get(), 32));
    return gpu_.Synchronize(streams_.meeting.get());
  }

  // How long kKernelsInARow kernels on each of `count` streams take, and copies beside them if
  // wanted, in microseconds. All streams wait at a gate until everything has been queued.
  absl::StatusOr<double> Wall(int count, bool copies) {
    const cuda::Api& api = gpu_.api();
    const cuda::Stream meeting = streams_.meeting.get();
    SpinArgs gate;
    gate.nanos = 3'000'000;
    CHORUS_RETURN_IF_ERROR(gpu_.Launch(gpu_.kernel("spin"), gate, 1, meeting, 32));
    CHORUS_CUDA(api, EventRecord, opened_.get(), meeting);
    // Stream by stream, the order in which shared queues would hold others up most.
    for (int n = 0; n < count; ++n) {
      const cuda::Stream stream = streams_.work[n].get();
      CHORUS_CUDA(api, StreamWaitEvent, stream, opened_.get(), 0);
      for (int k = 0; k < kKernelsInARow; ++k) CHORUS_RETURN_IF_ERROR(Short(stream));
      CHORUS_CUDA(api, EventRecord, events_[n].get(), stream);
    }
    if (copies) {
      const int64_t half = memory_.bytes / 2;
      CHORUS_CUDA(api, StreamWaitEvent, streams_.up.get(), opened_.get(), 0);
      CHORUS_CUDA(api, MemcpyHtoDAsync, memory_.get(), host_.host.get(), half, streams_.up.get());
      CHORUS_CUDA(api, StreamWaitEvent, streams_.down.get(), opened_.get(), 0);
      CHORUS_CUDA(api, MemcpyDtoHAsync, host_.as<char>() + half, memory_.get() + half, half,
                  streams_.down.get());
    }
    for (int n = 0; n < count; ++n) {
      CHORUS_CUDA(api, StreamWaitEvent, meeting, events_[n].get(), 0);
    }
    CHORUS_CUDA(api, EventRecord, closed_.get(), meeting);
    CHORUS_RETURN_IF_ERROR(gpu_.Synchronize(meeting));
    CHORUS_RETURN_IF_ERROR(gpu_.Synchronize(streams_.up.get()));
    CHORUS_RETURN_IF_ERROR(gpu_.Synchronize(streams_.down.get()));
    float milliseconds = 0;
    CHORUS_CUDA(api, EventElapsedTime, &milliseconds, opened_.get(), closed_.get());
    return 1e3 * milliseconds;
  }

  // A collective of k logical devices: their events, one kernel, their release. In a row, each.
  absl::StatusOr<std::vector<double>> Meetings(int count) {
    const cuda::Api& api = gpu_.api();
    return gpu_.TimeMicros(streams_.meeting.get(), 7, 50, [&]() -> absl::Status {
      for (int n = 0; n < count; ++n) {
        CHORUS_CUDA(api, EventRecord, events_[n].get(), streams_.work[n].get());
        CHORUS_CUDA(api, StreamWaitEvent, streams_.meeting.get(), events_[n].get(), 0);
      }
      CHORUS_RETURN_IF_ERROR(
          gpu_.Launch(gpu_.kernel("empty"), EmptyArgs{}, 1, streams_.meeting.get(), 32));
      CHORUS_CUDA(api, EventRecord, met_.get(), streams_.meeting.get());
      for (int n = 0; n < count; ++n) {
        CHORUS_CUDA(api, StreamWaitEvent, streams_.work[n].get(), met_.get(), 0);
      }
      return absl::OkStatus();
    });
  }

 private:
  absl::Status Short(cuda::Stream stream) const {
    SpinArgs args;
    args.nanos = kKernelNanos;
    return gpu_.Launch(gpu_.kernel("spin"), args, 4, stream, 32);
  }

  Gpu& gpu_;
  DesignStreams streams_;
  std::vector<OwnedEvent> events_;
  OwnedEvent opened_;
  OwnedEvent closed_;
  OwnedEvent met_;
  Memory memory_;
  Pinned host_;
};

}  // namespace

absl::Status RunP3(StageContext* context) {
  Recorder* const recorder = context->recorder;
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  const cuda::Api& api = gpu->api();
  int least = 0;
  int greatest = 0;
  CHORUS_CUDA(api, CtxGetStreamPriorityRange, &least, &greatest);
  recorder->Fact("priorities of streams", absl::StrCat(least, " to ", greatest));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream plain, gpu->CreateStream());
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream urgent, gpu->CreateStream(greatest));
  CHORUS_ASSIGN_OR_RETURN(const OwnedEvent event, gpu->CreateEvent(false));
  CHORUS_ASSIGN_OR_RETURN(const Pinned pinned, gpu->AllocatePinned(4096));
  uint32_t* const word = pinned.as<uint32_t>();
  std::atomic<uint32_t> called{0};
  uint32_t sequence = 0;

  const auto empty = [&](cuda::Stream stream) {
    return gpu->Launch(gpu->kernel("empty"), EmptyArgs{}, 1, stream, 32);
  };
  const auto seen = [&] { return cuda::LoadShared(word) == sequence; };
  const auto by_kernel = [&](cuda::Stream stream) -> absl::Status {
    WriteWordArgs args;
    args.word = reinterpret_cast<uint32_t*>(pinned.device);
    args.value = ++sequence;
    CHORUS_RETURN_IF_ERROR(gpu->Launch(gpu->kernel("write_word"), args, 1, stream, 32));
    return SpinUntil(seen);
  };
  const auto by_stream = [&](cuda::Stream stream) -> absl::Status {
    CHORUS_RETURN_IF_ERROR(empty(stream));
    CHORUS_CUDA(api, StreamWriteValue32, stream, pinned.device, ++sequence,
                cuda::kWriteValueDefault);
    return SpinUntil(seen);
  };
  const auto by_event = [&]() -> absl::Status {
    CHORUS_RETURN_IF_ERROR(empty(plain.get()));
    CHORUS_CUDA(api, EventRecord, event.get(), plain.get());
    cuda::Result result = cuda::Result::kNotReady;
    CHORUS_RETURN_IF_ERROR(SpinUntil([&] {
      result = api.EventQuery(event.get());
      return result != cuda::Result::kNotReady;
    }));
    return cuda::ToStatus(api, result, "cuEventQuery");
  };
  const auto by_function = [&]() -> absl::Status {
    const uint32_t before = called.load();
    CHORUS_RETURN_IF_ERROR(empty(plain.get()));
    CHORUS_CUDA(api, LaunchHostFunc, plain.get(), &CountFromHost, &called);
    return SpinUntil([&] { return called.load(std::memory_order_acquire) != before; });
  };
  const auto by_waiting = [&]() -> absl::Status {
    CHORUS_RETURN_IF_ERROR(empty(plain.get()));
    return gpu->Synchronize(plain.get());
  };
  std::vector<Way> ways = {
      {"a kernel writes a pinned word", [&] { return by_kernel(plain.get()); }, {}},
      {"event query", by_event, {}},
      {"host function", by_function, {}},
      {"cuStreamWriteValue32", [&] { return by_stream(plain.get()); }, {}},
      {"a kernel writes a pinned word, urgent stream", [&] { return by_kernel(urgent.get()); }, {}},
      {"cuStreamWriteValue32, urgent stream", [&] { return by_stream(urgent.get()); }, {}},
      {"cuStreamSynchronize", by_waiting, {}},
  };
  std::map<std::string, absl::Status> failures;
  for (int round = 0; round < 6; ++round) {
    for (Way& way : ways) {
      if (failures.count(way.name) > 0) continue;
      for (int n = 0; n < 300; ++n) {
        const double start = NowSeconds();
        const absl::Status status = way.once();
        if (!status.ok()) {
          failures[way.name] = status;
          recorder->Fact("stopped: " + way.name, status.message());
          break;
        }
        // The first round warms up.
        if (round > 0) way.micros.push_back(1e6 * (NowSeconds() - start));
      }
    }
  }
  std::map<std::string, double> medians;
  for (Way& way : ways) {
    if (way.micros.empty() || failures.count(way.name) > 0) continue;
    const double p99 = bench::Percentile(&way.micros, 0.99);
    medians[way.name] = recorder->Numbers("from launch to seen: " + way.name, way.micros, "us");
    recorder->Number("the same, 99th percentile: " + way.name, p99, "us");
  }
  const auto median = [&](const char* name) {
    const auto row = medians.find(name);
    return row == medians.end() ? std::nan("") : row->second;
  };
  Judge judge;
  const double ours = median("a kernel writes a pinned word");
  if (std::isnan(ours)) {
    judge.True("a word that a kernel writes is seen", false);
  } else {
    judge.AtMost("pinned word against event query", ours / median("event query"), 1, " x");
    judge.AtMost("pinned word against host function", ours / median("host function"), 1, " x");
  }
  recorder->Say("P3", judge.verdict());
  return absl::OkStatus();
}

absl::Status RunP4(StageContext* context) {
  Recorder* const recorder = context->recorder;
  Judge judge;
  for (const char* connections : {"", "32"}) {
    std::vector<std::string> environment;
    std::string with = ", default connections";
    if (*connections != '\0') {
      environment.push_back(absl::StrCat("CUDA_DEVICE_MAX_CONNECTIONS=", connections));
      with = absl::StrCat(", ", connections, " connections");
    }
    CHORUS_ASSIGN_OR_RETURN(const Helper helper, context->Start("streams", {}, environment));
    std::map<std::string, double> values;
    while (true) {
      const auto text = helper.channel.Receive(15);
      if (!text.ok() || *text == "end") {
        if (!text.ok()) recorder->Fact("stopped" + with, text.status().message());
        break;
      }
      const std::vector<std::string> parts = absl::StrSplit(*text, '\t');
      std::vector<double> samples;
      for (size_t n = 2; n < parts.size(); ++n) {
        double value = 0;
        if (absl::SimpleAtod(parts[n], &value)) samples.push_back(value);
      }
      if (samples.empty()) {
        recorder->Fact("stopped" + with, *text);
        continue;
      }
      values[parts[0]] = recorder->Numbers(parts[0] + with, samples, parts[1]);
    }
    if (*connections == '\0') continue;
    const auto value = [&](const char* name) {
      const auto row = values.find(name);
      return row == values.end() ? std::nan("") : row->second;
    };
    const double one = value("1 stream");
    judge.AtMost("8 streams against 1" + with, value("8 streams") / one, kMostConcurrentStretch,
                 " x");
    judge.AtMost("16 streams and copies both ways against 1" + with,
                 value("16 streams and copies") / one, kMostConcurrentStretch, " x");
  }
  recorder->Say("P4", judge.verdict());
  return absl::OkStatus();
}

absl::Status RunStreams(RoleContext* context) {
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  StreamsTest test(gpu.get());
  CHORUS_RETURN_IF_ERROR(test.Open());
  const auto tell = [&](const std::string& name, const std::vector<double>& micros) {
    std::string text = name + "\tus";
    for (const double m : micros) absl::StrAppend(&text, "\t", m);
    return context->channel.Send(text);
  };
  for (const auto& [name, count, copies] : std::vector<std::tuple<std::string, int, bool>>{
           {"1 stream", 1, false},
           {"8 streams", kDevices, false},
           {"16 streams", 2 * kDevices, false},
           {"16 streams and copies", 2 * kDevices, true}}) {
    std::vector<double> micros;
    for (int round = -1; round < 7; ++round) {
      CHORUS_ASSIGN_OR_RETURN(const double wall, test.Wall(count, copies));
      if (round >= 0) micros.push_back(wall);
    }
    CHORUS_RETURN_IF_ERROR(tell(name, micros));
  }
  for (const int count : {2, 4, kDevices}) {
    CHORUS_ASSIGN_OR_RETURN(const auto micros, test.Meetings(count));
    CHORUS_RETURN_IF_ERROR(tell(absl::StrCat("a meeting of ", count, " streams"), micros));
  }
  return context->channel.Send("end");
}

}  // namespace probe
}  // namespace chorus
