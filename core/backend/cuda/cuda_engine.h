// The queues of the `cuda` backend's logical devices, all of which live on one GPU.
//
// The engine hands work over (core/backend/stream_engine.h): an item has passed when the driver has
// it, and from there on the GPU keeps the order, by its streams and events. Nothing ever spins on
// the GPU: a collective is handed over when all its members stand at it, as one kernel behind the
// events of all their streams. So what was handed over always ends.
//
// What the host learns, it learns where a stream has come to a callback (gpu_watch.h): its thread
// runs the callbacks, and lets streams go on that ask the host something (a kernel's `unless`, a
// veto, runtime counts). Bytes of host memory that is not pinned go through a buffer that is, on a
// thread of their own (bounce_copier.h).
//
// A stream of the GPU may serve several of ours, which then are in one order more than they need
// be: clients cannot make the GPU have more of them. So many calls at most are handed over and not
// known to have ended, for the driver would keep a caller beyond that: a kernel of many comes to
// it part by part.
//
// Threads: any, as StreamEngine; the watch and the copier have one each.
// Ownership: the GPU and its memory must outlive it.
// Errors: those of backend.h. An error of the driver that its context does not survive, or that
//   would leave streams without their order, ends every item from then on with it, and no callback
//   is lost.
#ifndef CHORUS_CORE_BACKEND_CUDA_CUDA_ENGINE_H_
#define CHORUS_CORE_BACKEND_CUDA_CUDA_ENGINE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/backend/cuda/bounce_copier.h"
#include "core/backend/cuda/gpu_memory.h"
#include "core/backend/cuda/gpu_pool.h"
#include "core/backend/cuda/gpu_watch.h"
#include "core/backend/cuda/kernels/move_program.h"
#include "core/backend/stream_engine.h"
#include "core/base/mutex.h"
#include "core/cuda/gpu.h"
#include "core/ops/cuda_kernel.h"

namespace chorus {

class CudaEngine : public StreamEngine {
 public:
  // The driver's error: there are no streams to be had, or no pinned memory.
  static absl::StatusOr<std::unique_ptr<CudaEngine>> Create(const CudaGpu* gpu,
                                                            const GpuMemory* memory, int devices);
  // Waits for what was handed over. Callbacks that have not run by then never do.
  ~CudaEngine() override;

  // kDeviceLost: why the context is of no use any more.
  absl::Status lost() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // The GPU's memory as collectives see it. The numbers that a list depends on have been brought to
  // the host before it is made, and those that come of it are taken along.
  class Space : public AddressSpace {
   public:
    explicit Space(const GpuMemory* memory) : memory_(memory) {}
    bool host_addressable() const override { return false; }
    absl::Status Resolve(int device, DeviceAddress address, int64_t bytes,
                         void** pointer) const override;
    absl::Status Read(int device, DeviceAddress from, int64_t bytes, void* to) const override;
    absl::Status Write(int device, DeviceAddress to, int64_t bytes,
                       const void* from) const override;

    void Clear() const;

    const GpuMemory* const memory_;
    // Used with the engine's mutex held.
    mutable absl::flat_hash_map<DeviceAddress, std::string> numbers;
    mutable std::vector<std::pair<DeviceAddress, std::string>> results;
  };

  using Slab = GpuPool::Slab;
  // A kernel that can tell of a failure, as it was called.
  struct Reporting {
    const CudaKernel* kernel = nullptr;
    absl::InlinedVector<DeviceAddress, 4> inputs;
  };
  // A stream of the GPU.
  struct Queue {
    cuda::Stream stream = nullptr;
    cuda::Event gather_event = nullptr;   // recorded by Gather, and waited for at once
    cuda::Event release_event = nullptr;  // the last collective that ran on it has ended
    int index = 0;                        // in queues_, and of what watches it
    int64_t in_flight = 0;                // calls of the driver
    int64_t since_mark = 0;               // those since the last that `in_flight` will be told of
    std::vector<StreamState*> throttled;  // wait until less is in flight
  };
  // A kernel of which the driver has the parts before `next_part`.
  struct Launching {
    KernelCall call;  // without a kernel: there is none
    KernelFault fault;
    int64_t next_part = 0;
  };
  // Of an event's record.
  struct Mark {
    uint64_t position = 0;
    cuda::Event event = nullptr;
    uint64_t last_callback = 0;
  };
  struct CudaStream : StreamState {
    Queue* queue = nullptr;  // null: it has had no work
    Launching launching;     // its rest comes before all items
    std::deque<Mark> marks;  // by position
    // What comes next must wait for the collectives that ran there; nothing has come since. Of
    // collectives in a row no stream but the one that they run on is given anything.
    Queue* awaited_queue = nullptr;
    // The last callback, by its id, that stands in front of what is enqueued next.
    uint64_t last_callback = 0;
    uint64_t trimmed_callback = 0;  // of marks that are not kept
    // Since the last callback: where kernels that can fail tell it, and these.
    Slab* fault = nullptr;
    std::vector<Reporting> reporting;
  };
  using Numbers = std::vector<std::pair<DeviceAddress, int64_t>>;  // address and bytes of each

  CudaEngine(const CudaGpu* gpu, std::unique_ptr<Space> space, int devices);
  absl::Status Start();

  void Schedule() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ScheduleElsewhere() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::unique_ptr<StreamState> MakeState() const override { return std::make_unique<CudaStream>(); }
  bool HandsOver() const override { return true; }
  bool HostHasPassed(StreamState* stream) override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PassWait(StreamState* stream, const WaitItem& wait) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // --- Handing over: all with the mutex held, on any thread, in the GPU's context ---

  void RunStream(CudaStream* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False: the stream is in other hands.
  bool HandOver(CudaStream* stream, Item* item, absl::Status* status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HandOverRecord(CudaStream* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<KernelFault> FaultOf(CudaStream* stream, const KernelCall& call)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the call. False: as HandOverParts.
  bool HandOverKernel(CudaStream* stream, KernelCall* call, absl::Status* status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What is left of `launching`. False: the driver takes no more now, and the stream waits.
  bool HandOverParts(CudaStream* stream, absl::Status* status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False: its bytes go by way of the copier.
  bool HandOverCopy(CudaStream* stream, const CopyItem& item, absl::Status* status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandOverCallback(CudaStream* stream, CallbackItem* callback)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HandOverMeeting(Meeting* meeting) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Brings the numbers that the meeting's list depends on to the host, and goes on when they are
  // there.
  absl::Status FetchNumbers(Meeting* meeting, const Numbers& numbers,
                            const std::vector<CudaStream*>& streams)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GoOnWithNumbers(Meeting* meeting, const Numbers& numbers, Slab* slab,
                       const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // The meeting's list on the first member's stream, behind the others', which then wait for it.
  absl::Status HandOverList(Meeting* meeting, const std::vector<CudaStream*>& streams)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LaunchList(const CollectiveWork::List& list, CudaStream* stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WriteResults(CudaStream* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  static std::vector<CudaStream*> MembersOf(const Meeting& meeting);
  // What follows on the first stream waits for what all of them have now.
  absl::Status Gather(const std::vector<CudaStream*>& streams)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What follows on the others waits for what the first has now, which is a collective.
  absl::Status Release(const std::vector<CudaStream*>& streams)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CatchUp(CudaStream* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitFor(Queue* queue, cuda::Event event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `done` is called on the watching thread when the stream has come here.
  void Tell(Queue* queue, std::function<void(absl::Status)> done, absl::Status status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Queue* QueueOf(CudaStream* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the stream must wait until earlier calls have ended: then it is woken.
  bool IsFull(CudaStream* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts calls of the driver that are about to be made.
  void Count(Queue* queue, int64_t calls = 1) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // When the stream has come here.
  void GiveBack(Slab* slab, Queue* queue) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TrimMarks(CudaStream* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The driver's result, as a status; what a context does not survive is remembered, and given for
  // it.
  absl::Status Check(cuda::Result result, const char* call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckLaunch(const absl::Status& status, Queue* queue)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of what orders the streams, or tells the host: where it is missing, later work would run too
  // early. So the context is given up, also where it survives, and everything ends with why, which
  // is returned.
  absl::Status Require(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // --- On the watch's thread ---

  void CallbackHasRun(uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);
  // What a fault word says, which may be nothing.
  absl::Status FailureOf(const Slab& fault, const std::vector<Reporting>& reporting)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Which the device's streams share.
  static constexpr int kQueuesPerDevice = 4;
  // With so many calls in flight in a queue no item or part of a kernel is begun there; the one
  // before may have brought it beyond that. From about a thousand on the driver makes a thread that
  // launches wait, and that thread holds the mutex.
  static constexpr int64_t kMostInFlight = 512;
  static constexpr int64_t kMarkEvery = 64;
  static constexpr size_t kKeptMarks = 16;
  // Smaller copies from the host take a slab, and nobody waits for them.
  static constexpr int64_t kSmallCopyBytes = 4096;

  const CudaGpu* const gpu_;
  const std::unique_ptr<Space> owned_space_;
  const int devices_;
  cuda::Stream reading_ = nullptr;  // the watch's thread's

  std::vector<std::unique_ptr<Queue>> queues_;           // kQueuesPerDevice of each device
  std::vector<int> next_queue_ ABSL_GUARDED_BY(mutex_);  // by device
  GpuPool pool_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_callback_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<uint64_t> unfinished_ ABSL_GUARDED_BY(mutex_);    // callbacks that have not run
  std::vector<CudaStream*> asking_ ABSL_GUARDED_BY(mutex_);  // wait for some of these
  cuda::MoveProgram program_ ABSL_GUARDED_BY(mutex_);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);  // why the context is of no use any more
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;

  // Called with mutex_ held; they call back without their locks.
  std::unique_ptr<GpuWatch> watch_;
  std::unique_ptr<BounceCopier> copier_;
};

}  // namespace chorus

#endif  // CHORUS_CORE_BACKEND_CUDA_CUDA_ENGINE_H_
