#include "core/backend/sim/sim_backend.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "core/backend/cpu_engine.h"
#include "core/backend/sim/sim_memory.h"
#include "core/base/clock.h"
#include "core/base/error.h"

namespace chorus {
namespace {

class SimEngine : public CpuEngine {
 public:
  SimEngine(const SimBackendOptions& options, uint64_t seed, const AddressSpace* space)
      : CpuEngine(options.make_kernel, space),
        patience_(options.patience),
        random_(seed),
        thread_([this] { Work(); }) {}

  ~SimEngine() override {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
    }
    changed_.SignalAll();
    thread_.join();
  }

 private:
  // How the next stream is chosen. Kept for some steps and then drawn anew.
  enum class Mode { kAny, kOldest, kLatest, kAhead, kStarved };
  static constexpr int kModes = 5;

  void Schedule() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ++enqueued_;
    changed_.Signal();
  }
  void ScheduleElsewhere() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { Schedule(); }

  void Work() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    while (true) {
      while (ready_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (stopping_) return;
      if (steps_left_ == 0) DrawMode();
      if (mode_ != Mode::kOldest) Hold();
      if (stopping_) return;
      Step(Pick());
    }
  }

  void DrawMode() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    mode_ = static_cast<Mode>(random_() % kModes);
    steps_left_ = 1 + random_() % 32;
    chosen_ = ready_[random_() % ready_.size()];
  }

  // Lets the program go on for as long as it keeps enqueuing, within patience_. Work that is ready
  // anyway is not what the program is waiting for; a lone starved stream may well be.
  void Hold() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const absl::Time end = SteadyNow() + patience_;
    const absl::Duration quiet = patience_ / 8;
    while (!stopping_ && SteadyNow() < end) {
      const uint64_t before = enqueued_;
      if (before == held_at_) return;  // nothing new since the last time
      const absl::Time until = std::min(end, SteadyNow() + quiet);
      while (!stopping_ && SteadyNow() < until) {
        changed_.WaitFor(&mutex_, until - SteadyNow());
      }
      if (enqueued_ == before) break;
    }
    held_at_ = enqueued_;
  }

  StreamState* Pick() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    --steps_left_;
    const size_t n = ready_.size();
    size_t pick = random_() % n;
    switch (mode_) {
      case Mode::kAny:
        break;
      case Mode::kOldest:
        pick = 0;
        break;
      case Mode::kLatest:
        pick = n - 1;
        break;
      case Mode::kAhead: {
        const auto it = std::find(ready_.begin(), ready_.end(), chosen_);
        if (it != ready_.end()) pick = it - ready_.begin();
        break;
      }
      case Mode::kStarved:
        if (n > 1 && ready_[pick] == chosen_) pick = (pick + 1) % n;
        break;
    }
    StreamState* stream = ready_[pick];
    ready_.erase(ready_.begin() + pick);
    return stream;
  }

  // One piece of work of one stream.
  void Step(StreamState* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Item work;
    if (!Begin(stream, &work)) return;
    mutex_.Unlock();
    absl::Status status;
    Meeting* meeting = nullptr;
    if (auto* callback = absl::get_if<CallbackItem>(&work)) {
      callback->done(std::move(callback->status));
      callback->done = nullptr;  // what it holds is released outside the mutex
    } else if (auto* collective = absl::get_if<CollectiveItem>(&work)) {
      meeting = collective->meeting;
      status = RunMeeting(meeting);
    } else if (auto* kernel = absl::get_if<KernelCall>(&work)) {
      status = RunKernel(*kernel, stream->device);
    } else {
      status = RunCopy(absl::get<CopyItem>(work), stream->device);
    }
    mutex_.Lock();
    if (meeting != nullptr) {
      FinishMeeting(meeting, status);
    } else {
      Advance(stream, status);
      Requeue(stream);
    }
  }

  absl::Status RunMeeting(Meeting* meeting) {
    CHORUS_RETURN_IF_ERROR(PrepareMeeting(meeting));
    constexpr int64_t kWhole = std::numeric_limits<int64_t>::max() / 2;
    CollectiveWork& work = WorkOf(meeting);
    const int64_t chunks = work.Cut(kWhole);
    for (int64_t i = 0; i < chunks; ++i) work.RunChunk(i, /*streaming=*/false);
    return absl::OkStatus();
  }

  absl::Status RunKernel(const KernelCall& call, int device) {
    CHORUS_ASSIGN_OR_RETURN(const ResolvedKernel resolved, Resolve(call, device));
    return resolved.Run(0, resolved.prepared->kernel->units());
  }

  absl::Status RunCopy(const CopyItem& item, int device) {
    CHORUS_ASSIGN_OR_RETURN(const ResolvedCopy copy, Resolve(item, device));
    CopyBytes(copy.to, copy.from, copy.bytes, /*streaming=*/false);
    return absl::OkStatus();
  }

  const absl::Duration patience_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  Mode mode_ ABSL_GUARDED_BY(mutex_) = Mode::kAny;
  uint64_t steps_left_ ABSL_GUARDED_BY(mutex_) = 0;
  const StreamState* chosen_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t enqueued_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t held_at_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar changed_;
  std::thread thread_;  // last: it uses all of the above
};

class SimDevice : public Device {
 public:
  SimDevice(int index, CpuEngine* engine, SimMemory* memory)
      : index_(index), engine_(engine), memory_(memory) {}
  absl::StatusOr<DeviceAddress> Allocate(int64_t bytes) override {
    return memory_->Allocate(index_, bytes);
  }
  void Free(DeviceAddress address) override { memory_->Free(index_, address); }
  std::unique_ptr<Stream> CreateStream() override { return engine_->CreateStream(index_); }
  std::unique_ptr<Event> CreateEvent() override { return engine_->CreateEvent(); }
  absl::StatusOr<std::unique_ptr<Kernel>> MakeKernel(
      const NodeView& node, absl::Span<const TensorType> outputs) override {
    return engine_->MakeKernel(node, outputs);
  }

 private:
  const int index_;
  CpuEngine* const engine_;
  SimMemory* const memory_;
};

class SimBackend : public Backend {
 public:
  SimBackend(const SimBackendOptions& options, uint64_t seed)
      : memory_(options.memory_bytes, std::max(options.devices_per_domain, 1)),
        engine_(options, seed, &memory_) {
    for (int i = 0; i < options.devices; ++i) {
      devices_.push_back(std::make_unique<SimDevice>(i, &engine_, &memory_));
    }
  }
  absl::string_view name() const override { return "sim"; }
  int device_count() const override { return static_cast<int>(devices_.size()); }
  int cores_per_device() const override { return 1; }
  Device* device(int index) override { return devices_[index].get(); }
  bool host_addressable() const override { return false; }
  int domain(int device) const override { return memory_.domain(device); }
  absl::StatusOr<int64_t> WorkspaceBytes(const NodeView& node,
                                         absl::Span<const TensorType> outputs) const override {
    return engine_.WorkspaceBytes(node, outputs);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> OpenCommunicator(uint64_t id,
                                                                 absl::Span<const int> devices,
                                                                 int member) override {
    CHORUS_RETURN_IF_ERROR(CheckDevices(*this, id, devices));
    return engine_.OpenCommunicator(id, devices, member);
  }

 private:
  SimMemory memory_;  // outlives the work that uses it
  SimEngine engine_;
  std::vector<std::unique_ptr<SimDevice>> devices_;
};

}  // namespace

std::unique_ptr<Backend> CreateSimBackend(const SimBackendOptions& options) {
  const uint64_t seed = options.seed != 0 ? options.seed : std::random_device()() | 1u;
  std::fprintf(stderr, "sim backend: seed=%llu\n", static_cast<unsigned long long>(seed));
  return std::make_unique<SimBackend>(options, seed);
}

std::unique_ptr<Backend> OpenSim(const BackendOptions& options) {
  SimBackendOptions sim;
  static_cast<BackendOptions&>(sim) = options;
  return CreateSimBackend(sim);
}

}  // namespace chorus
