#include "core/backend/host/host_backend.h"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "core/backend/cpu_engine.h"
#include "core/backend/reduction.h"
#include "core/base/error.h"
#include "core/base/work.h"

namespace chorus {
namespace {

constexpr int64_t kAlignment = 64;
// What an item costs beside its bytes, in bytes: a caller is not kept by any number of small items.
constexpr int64_t kItemCost = 512;
// Kernels state their cost in bytes or multiply-adds: so much of it runs where it is enqueued, and
// larger kernels are cut into pieces of it.
constexpr int64_t kInlineKernelCost = 256 << 10;
// So many elements of each kernel of a chain at a time: what they work on stays in the first cache.
constexpr int64_t kBlockElements = 2048;
// Work that reads and writes more than this writes past the caches, which would have to read each
// line before it is overwritten and keep what nobody reads soon. (The cache that the system reports
// is the whole machine's, of which a process has a share.)
constexpr int64_t kStreamingBytes = 8 << 20;

class HostEngine : public CpuEngine {
 public:
  explicit HostEngine(const HostBackendOptions& options)
      : CpuEngine(options.make_kernel, nullptr), options_(options) {}

  ~HostEngine() override {
    MutexLock lock(&mutex_);
    closing_ = true;
    ready_.clear();
    while (in_flight_ > 0) landed_.Wait(&mutex_);
  }

  int cores() const { return options_.pool->size(); }
  int64_t inline_bytes() const { return options_.inline_bytes; }

 private:
  // The engine whose ready streams this thread is running, further up its stack: callbacks may
  // enqueue, and what that makes ready is run when they have returned.
  static thread_local const HostEngine* draining;

  void Schedule() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ready_.empty() || draining == this) return;
    Drain(/*on_pool=*/false);
  }

  void ScheduleElsewhere() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { PostReady(); }

  void PostReady() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (StreamState* stream : ready_) PostStream(static_cast<CpuStream*>(stream));
    ready_.clear();
  }

  void PostStream(CpuStream* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ++in_flight_;
    stream->run = [](ThreadPool::Task* task) {
      auto* state = static_cast<CpuStream*>(task);
      static_cast<HostEngine*>(state->engine)->RunPosted(state);
    };
    options_.pool->Post(stream);
  }

  void RunPosted(CpuStream* stream) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(&mutex_);
    ready_.push_back(stream);
    Drain(/*on_pool=*/true);
    Land();
  }

  void Land() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (--in_flight_ == 0) landed_.SignalAll();
  }

  void Drain(bool on_pool) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (closing_) {
      ready_.clear();
      return;
    }
    const HostEngine* const outer = draining;
    draining = this;
    // Whatever is enqueued one by one in one slice of a thread's work has this in common.
    const int64_t given = options_.inline_bytes - SliceWork() * kBytesOfWork;
    int64_t budget = given;
    while (!ready_.empty()) {
      if (budget < 0) {
        PostReady();
        break;
      }
      auto* const stream = static_cast<CpuStream*>(ready_.front());
      ready_.erase(ready_.begin());
      RunStream(stream, on_pool, &budget);
    }
    draining = outer;
    CountWork((given - budget) / kBytesOfWork);
  }

  void RunStream(CpuStream* stream, bool on_pool, int64_t* budget)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Item work;
    while (!closing_ && Begin(stream, &work)) {
      auto* const kernel = absl::get_if<KernelCall>(&work);
      if (kernel != nullptr) TakeChain(stream, *kernel);
      mutex_.Unlock();
      absl::Status status;
      bool ended = true;
      Meeting* meeting = nullptr;
      if (auto* callback = absl::get_if<CallbackItem>(&work)) {
        callback->done(std::move(callback->status));
        callback->done = nullptr;  // what it holds is released outside the mutex
        *budget -= kItemCost;
      } else if (auto* collective = absl::get_if<CollectiveItem>(&work)) {
        meeting = collective->meeting;
        status = RunMeeting(meeting, on_pool, budget, &ended);
      } else if (kernel != nullptr) {
        status = RunKernels(stream, *kernel, on_pool, budget, &ended);
      } else {
        status = RunCopy(stream, absl::get<CopyItem>(work), on_pool, budget, &ended);
      }
      mutex_.Lock();
      if (!ended) return;
      if (meeting != nullptr) {
        FinishMeeting(meeting, status);
        return;  // this stream is in ready_ like those of the other members, if it has more to do
      }
      if (kernel != nullptr) {
        EndKernels(stream, status);
      } else {
        Advance(stream, status);
      }
      if (*budget < 0) {
        Requeue(stream);
        return;
      }
    }
  }

  // Runs the chunks on the pool. `finish` is called with the mutex held when they have ended.
  // A thread of the pool works on them itself, another only with the budget that it has left.
  template <typename Chunk, typename Finish>
  void RunOnPool(int64_t chunks, int64_t chunk_cost, bool on_pool, int64_t* budget, Chunk chunk,
                 Finish finish) ABSL_LOCKS_EXCLUDED(mutex_) {
    const int64_t own_chunks = on_pool ? chunks : std::max<int64_t>(0, *budget / chunk_cost);
    *budget -= std::min(own_chunks, chunks) * chunk_cost;
    {
      MutexLock lock(&mutex_);
      ++in_flight_;
    }
    RunInChunks(options_.pool, chunks, own_chunks, std::move(chunk), [this, finish] {
      MutexLock lock(&mutex_);
      finish();
      // Where this thread joined in the work, it is draining already.
      if (draining != this) Drain(/*on_pool=*/true);
      Land();
    });
  }

  // Whether work of so many bytes is small. The caller has something else to do when its share
  // is used up.
  bool RunsHere(int64_t traffic, bool on_pool, int64_t budget) const {
    return traffic <= options_.inline_bytes && (on_pool || traffic <= std::max<int64_t>(budget, 0));
  }

  absl::Status RunMeeting(Meeting* meeting, bool on_pool, int64_t* budget, bool* ended)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    CHORUS_RETURN_IF_ERROR(PrepareMeeting(meeting));
    CollectiveWork& work = WorkOf(meeting);
    const int64_t traffic = work.traffic_bytes();
    *budget -= kItemCost;
    if (RunsHere(traffic, on_pool, *budget)) {
      work.RunWhole();
      *budget -= traffic;
      return absl::OkStatus();
    }
    *ended = false;
    const int64_t chunks = work.Cut(work.ChunkBytes(options_.chunk_bytes));
    const bool streaming = traffic > kStreamingBytes;
    RunOnPool(
        chunks, options_.chunk_bytes, on_pool, budget,
        [&work, streaming](int64_t i) { work.RunChunk(i, streaming); },
        [this, meeting]()
            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { FinishMeeting(meeting, absl::OkStatus()); });
    return absl::OkStatus();
  }

  absl::Status RunCopy(StreamState* stream, const CopyItem& item, bool on_pool, int64_t* budget,
                       bool* ended) ABSL_LOCKS_EXCLUDED(mutex_) {
    CHORUS_ASSIGN_OR_RETURN(const ResolvedCopy copy, Resolve(item, stream->device));
    *budget -= kItemCost;
    if (RunsHere(2 * copy.bytes, on_pool, *budget)) {
      CopyBytes(copy.to, copy.from, copy.bytes, false);
      *budget -= 2 * copy.bytes;
      return absl::OkStatus();
    }
    *ended = false;
    const int64_t chunk_bytes = std::max<int64_t>(1, options_.chunk_bytes / 2);
    const bool streaming = 2 * copy.bytes > kStreamingBytes;
    RunOnPool((copy.bytes + chunk_bytes - 1) / chunk_bytes, options_.chunk_bytes, on_pool, budget,
              [copy, chunk_bytes, streaming](int64_t i) {
                const int64_t begin = i * chunk_bytes;
                CopyBytes(static_cast<char*>(copy.to) + begin,
                          static_cast<const char*>(copy.from) + begin,
                          std::min(chunk_bytes, copy.bytes - begin), streaming);
              },
              [this, stream]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                Advance(stream, absl::OkStatus());
                Requeue(stream);
              });
    return absl::OkStatus();
  }

  // A kernel, or a chain of them: whatever one of them leaves for another is read again while it
  // still is in the cache.
  struct KernelRun {
    absl::InlinedVector<ResolvedKernel, 4> kernels;
    Mutex mutex;
    // Of the first chunk that has failed: what is told does not depend on which thread was first.
    int64_t failed_chunk ABSL_GUARDED_BY(mutex) = 0;
    absl::Status status ABSL_GUARDED_BY(mutex);

    int64_t units() const { return kernels[0].prepared->kernel->units(); }

    absl::Status Run(int64_t begin, int64_t end) const {
      const int64_t block = kernels.size() == 1 ? end - begin : kBlockElements;
      absl::Status status;
      for (; begin < end; begin += block) {
        for (const ResolvedKernel& kernel : kernels) {
          status.Update(kernel.Run(begin, std::min(end, begin + block)));
        }
      }
      return status;
    }
  };

  // `first` and the stream's chain.
  absl::Status RunKernels(CpuStream* stream, const KernelCall& first, bool on_pool, int64_t* budget,
                          bool* ended) ABSL_LOCKS_EXCLUDED(mutex_) {
    int64_t cost = CostOf(first);
    for (const KernelCall& call : stream->chain) cost += CostOf(call);
    *budget -= kItemCost * static_cast<int64_t>(1 + stream->chain.size());
    const auto resolve = [&](KernelRun* run) {
      CHORUS_ASSIGN_OR_RETURN(ResolvedKernel resolved, Resolve(first, stream->device));
      run->kernels.push_back(std::move(resolved));
      for (const KernelCall& call : stream->chain) {
        CHORUS_ASSIGN_OR_RETURN(resolved, Resolve(call, stream->device));
        run->kernels.push_back(std::move(resolved));
      }
      return absl::OkStatus();
    };
    if (cost <= kInlineKernelCost && RunsHere(4 * cost, on_pool, *budget)) {
      KernelRun run;
      CHORUS_RETURN_IF_ERROR(resolve(&run));
      *budget -= 4 * cost;
      return run.Run(0, run.units());
    }
    auto run = std::make_shared<KernelRun>();
    CHORUS_RETURN_IF_ERROR(resolve(run.get()));
    *ended = false;
    const int64_t units = run->units();
    const int64_t chunks = std::min(units, (cost + kInlineKernelCost - 1) / kInlineKernelCost);
    const int64_t units_per_chunk = (units + chunks - 1) / chunks;
    RunOnPool((units + units_per_chunk - 1) / units_per_chunk, options_.inline_bytes + 1, on_pool,
              budget,
              [run, units, units_per_chunk](int64_t i) {
                const int64_t begin = i * units_per_chunk;
                absl::Status status = run->Run(begin, std::min(units, begin + units_per_chunk));
                if (status.ok()) return;
                MutexLock lock(&run->mutex);
                if (!run->status.ok() && run->failed_chunk < i) return;
                run->failed_chunk = i;
                run->status = std::move(status);
              },
              [this, stream, run]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                absl::Status status;
                {
                  MutexLock lock(&run->mutex);
                  status = run->status;
                }
                EndKernels(stream, status);
                Requeue(stream);
              });
    return absl::OkStatus();
  }

  void EndKernels(CpuStream* stream, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (size_t i = 0; i < stream->chain.size(); ++i) Advance(stream, absl::OkStatus());
    Advance(stream, status);
  }

  const HostBackendOptions options_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t in_flight_ ABSL_GUARDED_BY(mutex_) = 0;  // posted streams and chunked work
  CondVar landed_;
};

thread_local const HostEngine* HostEngine::draining = nullptr;

class HostMemory {
 public:
  explicit HostMemory(int64_t limit) : limit_(limit) {}
  ~HostMemory() {
    for (const auto& block : blocks_) std::free(reinterpret_cast<void*>(block.first));
  }

  absl::StatusOr<DeviceAddress> Allocate(int64_t bytes) {
    if (bytes < 0) return BadType(absl::StrCat("an allocation of ", bytes, " bytes"));
    if (bytes == 0) return DeviceAddress{0};
    MutexLock lock(&mutex_);
    const int64_t free_bytes = limit_ - used_;
    void* memory = nullptr;
    if (bytes <= free_bytes) {
      memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    }
    if (memory == nullptr) {
      return MakeError(Reason::kOutOfMemory, absl::StrCat("host devices: need ", bytes, " bytes, ",
                                                          free_bytes, " of ", limit_, " are free"));
    }
    const auto address = reinterpret_cast<DeviceAddress>(memory);
    blocks_[address] = bytes;
    used_ += bytes;
    return address;
  }

  void Free(DeviceAddress address) {
    MutexLock lock(&mutex_);
    const auto it = blocks_.find(address);
    if (it == blocks_.end()) return;
    used_ -= it->second;
    blocks_.erase(it);
    std::free(reinterpret_cast<void*>(address));
  }

 private:
  const int64_t limit_;
  Mutex mutex_;
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<DeviceAddress, int64_t> blocks_ ABSL_GUARDED_BY(mutex_);
};

class HostDevice : public Device {
 public:
  HostDevice(int index, CpuEngine* engine, HostMemory* memory)
      : index_(index), engine_(engine), memory_(memory) {}
  absl::StatusOr<DeviceAddress> Allocate(int64_t bytes) override {
    return memory_->Allocate(bytes);
  }
  void Free(DeviceAddress address) override { memory_->Free(address); }
  std::unique_ptr<Stream> CreateStream() override { return engine_->CreateStream(index_); }
  std::unique_ptr<Event> CreateEvent() override { return engine_->CreateEvent(); }
  absl::StatusOr<std::unique_ptr<Kernel>> MakeKernel(
      const NodeView& node, absl::Span<const TensorType> outputs) override {
    return engine_->MakeKernel(node, outputs);
  }

 private:
  const int index_;
  CpuEngine* const engine_;
  HostMemory* const memory_;
};

class HostBackend : public Backend {
 public:
  explicit HostBackend(const HostBackendOptions& options)
      : memory_(options.memory_bytes), engine_(options) {
    for (int i = 0; i < options.devices; ++i) {
      devices_.push_back(std::make_unique<HostDevice>(i, &engine_, &memory_));
    }
  }
  absl::string_view name() const override { return "host"; }
  int device_count() const override { return static_cast<int>(devices_.size()); }
  int cores_per_device() const override { return engine_.cores(); }
  Device* device(int index) override { return devices_[index].get(); }
  bool host_addressable() const override { return true; }
  int64_t at_once_bytes() const override { return engine_.inline_bytes(); }
  int domain(int) const override { return 0; }
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
  HostMemory memory_;  // outlives the work that uses it
  HostEngine engine_;
  std::vector<std::unique_ptr<HostDevice>> devices_;
};

}  // namespace

std::unique_ptr<Backend> CreateHostBackend(const HostBackendOptions& options) {
  HostBackendOptions whole = options;
  if (whole.chunk_bytes == 0) whole.chunk_bytes = 512 << 10;
  return std::make_unique<HostBackend>(whole);
}

std::unique_ptr<Backend> OpenHost(const BackendOptions& options) {
  HostBackendOptions host;
  static_cast<BackendOptions&>(host) = options;
  if (options.chunk_bytes != 0) host.inline_bytes = options.chunk_bytes;
  return CreateHostBackend(host);
}

}  // namespace chorus
