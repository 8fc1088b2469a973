#include "core/backend/cuda/cuda_engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/backend/cuda/kernels/moves.h"
#include "core/base/device.h"
#include "core/base/error.h"

namespace chorus {
namespace {

// In a fault word nobody has told anything. Its lower bits are the element.
constexpr uint64_t kNoFault = ~uint64_t{0};
constexpr int kElementBits = 40;

const void* PointerOf(DeviceAddress address) { return reinterpret_cast<const void*>(address); }
void* MutablePointerOf(DeviceAddress address) { return reinterpret_cast<void*>(address); }

// After these the context goes on as before.
bool Survives(cuda::Result result) {
  return result == cuda::Result::kSuccess || result == cuda::Result::kInvalidValue ||
         result == cuda::Result::kOutOfMemory || result == cuda::Result::kNotSupported ||
         result == cuda::Result::kNotReady;
}

// Whether a kernel's operands and workspace are there.
absl::Status CheckOperands(const GpuMemory& memory, const KernelCall& call) {
  const auto* const kernel = static_cast<const CudaKernel*>(call.kernel);
  const CudaKernel::Facts& facts = kernel->facts();
  if (call.inputs.size() != facts.input_bytes.size() ||
      call.outputs.size() != facts.output_bytes.size()) {
    return MakeError(Reason::kInternal,
                     absl::StrCat("a kernel of ", facts.input_bytes.size(), " inputs and ",
                                  facts.output_bytes.size(), " outputs was launched with ",
                                  call.inputs.size(), " and ", call.outputs.size()));
  }
  const auto check = [&](DeviceAddress address, int64_t bytes) {
    return bytes == 0 ? absl::OkStatus() : memory.Check(address, bytes);
  };
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    CHORUS_RETURN_IF_ERROR(check(call.inputs[i], facts.input_bytes[i]));
  }
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    CHORUS_RETURN_IF_ERROR(check(call.outputs[i], facts.output_bytes[i]));
  }
  if (facts.workspace_bytes > 0 && call.workspace == 0) {
    return MakeError(Reason::kInternal,
                     absl::StrCat(facts.op, ": a kernel that wants ", facts.workspace_bytes,
                                  " bytes of workspace was launched without any"));
  }
  return check(call.workspace, facts.workspace_bytes);
}

}  // namespace

// --- The GPU's memory as collectives see it ---

absl::Status CudaEngine::Space::Resolve(int /*device*/, DeviceAddress address, int64_t bytes,
                                        void** pointer) const {
  CHORUS_RETURN_IF_ERROR(memory_->Check(address, bytes));
  *pointer = MutablePointerOf(address);
  return absl::OkStatus();
}

absl::Status CudaEngine::Space::Read(int /*device*/, DeviceAddress from, int64_t bytes,
                                     void* to) const {
  const auto it = numbers.find(from);
  if (it == numbers.end() || it->second.size() < static_cast<size_t>(bytes)) {
    return MakeError(Reason::kInternal, "a number of the device was not brought to the host");
  }
  std::memcpy(to, it->second.data(), static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status CudaEngine::Space::Write(int /*device*/, DeviceAddress to, int64_t bytes,
                                      const void* from) const {
  CHORUS_RETURN_IF_ERROR(memory_->Check(to, bytes));
  results.emplace_back(to, std::string(static_cast<const char*>(from), static_cast<size_t>(bytes)));
  return absl::OkStatus();
}

void CudaEngine::Space::Clear() const {
  numbers.clear();
  results.clear();
}

// --- Beginning and end ---

absl::StatusOr<std::unique_ptr<CudaEngine>> CudaEngine::Create(const CudaGpu* gpu,
                                                               const GpuMemory* memory,
                                                               int devices) {
  std::unique_ptr<CudaEngine> engine(new CudaEngine(gpu, std::make_unique<Space>(memory), devices));
  CHORUS_RETURN_IF_ERROR(engine->Start());
  return engine;
}

CudaEngine::CudaEngine(const CudaGpu* gpu, std::unique_ptr<Space> space, int devices)
    : StreamEngine(space.get()),
      gpu_(gpu),
      owned_space_(std::move(space)),
      devices_(devices),
      pool_(gpu) {}

absl::Status CudaEngine::Start() {
  gpu_->Enter();
  const cuda::Api& api = gpu_->api();
  std::vector<cuda::Stream> streams;
  for (int n = 0; n < kQueuesPerDevice * devices_; ++n) {
    queues_.push_back(std::make_unique<Queue>());
    Queue& queue = *queues_.back();
    queue.index = n;
    CHORUS_CUDA(api, StreamCreateWithPriority, &queue.stream, cuda::kStreamNonBlocking, 0);
    CHORUS_CUDA(api, EventCreate, &queue.gather_event, cuda::kEventDisableTiming);
    CHORUS_CUDA(api, EventCreate, &queue.release_event, cuda::kEventDisableTiming);
    streams.push_back(queue.stream);
  }
  CHORUS_CUDA(api, StreamCreateWithPriority, &reading_, cuda::kStreamNonBlocking, 0);
  {
    MutexLock lock(&mutex_);
    next_queue_.assign(static_cast<size_t>(devices_), 0);
  }
  GpuWatch::Listener listener;
  listener.on_wake = [this] {
    MutexLock lock(&mutex_);
    Schedule();
  };
  listener.on_overdue = [this](cuda::Stream stream) {
    MutexLock lock(&mutex_);
    if (lost_.ok()) Check(gpu_->api().StreamQuery(stream), "cuStreamQuery").IgnoreError();
  };
  CHORUS_ASSIGN_OR_RETURN(watch_, GpuWatch::Create(gpu_, streams, std::move(listener)));
  CHORUS_ASSIGN_OR_RETURN(copier_, BounceCopier::Create(gpu_));
  return absl::OkStatus();
}

CudaEngine::~CudaEngine() {
  {
    MutexLock lock(&mutex_);
    closing_ = true;
    ready_.clear();
  }
  if (copier_ != nullptr) copier_->Stop();
  if (watch_ != nullptr) watch_->Stop();
  gpu_->Enter();
  const cuda::Api& api = gpu_->api();
  for (const auto& queue : queues_) {
    if (queue->stream == nullptr) continue;
    api.StreamSynchronize(queue->stream);
    api.StreamDestroy(queue->stream);
    if (queue->gather_event != nullptr) api.EventDestroy(queue->gather_event);
    if (queue->release_event != nullptr) api.EventDestroy(queue->release_event);
  }
  if (reading_ != nullptr) api.StreamDestroy(reading_);
}

absl::Status CudaEngine::lost() const {
  MutexLock lock(&mutex_);
  return Detached(lost_);
}

// --- Handing over ---

void CudaEngine::Schedule() {
  if (ready_.empty() || closing_) return;
  gpu_->Enter();
  while (!ready_.empty()) {
    auto* const stream = static_cast<CudaStream*>(ready_.front());
    ready_.erase(ready_.begin());
    RunStream(stream);
  }
}

void CudaEngine::ScheduleElsewhere() {
  if (!ready_.empty()) watch_->Wake();
}

void CudaEngine::RunStream(CudaStream* stream) {
  if (stream->launching.call.kernel != nullptr) {
    absl::Status status;
    if (!HandOverParts(stream, &status)) return;
    Advance(stream, status);
  }
  Item item;
  while (!IsFull(stream)) {
    if (!Begin(stream, &item)) return;
    if (auto* const collective = absl::get_if<CollectiveItem>(&item)) {
      // This stream is in ready_ like those of the other members, if it has more to do.
      return HandOverMeeting(collective->meeting);
    }
    if (lost_.ok()) CatchUp(stream).IgnoreError();  // a loss is what the item finds
    absl::Status status = lost_;
    if (status.ok() || absl::holds_alternative<CallbackItem>(item)) {
      if (!HandOver(stream, &item, &status)) return;
    }
    Advance(stream, status);
  }
}

bool CudaEngine::HandOver(CudaStream* stream, Item* item, absl::Status* status) {
  if (auto* const callback = absl::get_if<CallbackItem>(item)) {
    HandOverCallback(stream, callback);
    *status = absl::OkStatus();
    return true;
  }
  if (absl::holds_alternative<RecordItem>(*item)) {
    *status = HandOverRecord(stream);
  } else if (auto* const kernel = absl::get_if<KernelCall>(item)) {
    return HandOverKernel(stream, kernel, status);
  } else {
    return HandOverCopy(stream, absl::get<CopyItem>(*item), status);
  }
  return true;
}

CudaEngine::Queue* CudaEngine::QueueOf(CudaStream* stream) {
  if (stream->queue == nullptr) {
    int& next = next_queue_[static_cast<size_t>(stream->device)];
    stream->queue = queues_[static_cast<size_t>(kQueuesPerDevice * stream->device + next)].get();
    next = (next + 1) % kQueuesPerDevice;
  }
  return stream->queue;
}

absl::Status CudaEngine::Check(cuda::Result result, const char* call) {
  if (result == cuda::Result::kSuccess) return absl::OkStatus();
  absl::Status status = gpu_->Check(result, call);
  return Survives(result) ? status : Require(std::move(status));
}

absl::Status CudaEngine::Require(absl::Status status) {
  if (status.ok()) return status;
  if (lost_.ok()) {
    lost_ = MakeError(Reason::kDeviceLost, absl::StrCat("GPU ", gpu_->pci_id(), " (", gpu_->name(),
                                                        ") is lost: ", ErrorOf(status).message));
    watch_->Lose(lost_);
  }
  return Detached(lost_);
}

bool CudaEngine::IsFull(CudaStream* stream) {
  Queue* const queue = QueueOf(stream);
  if (queue->in_flight < kMostInFlight || !lost_.ok()) return false;
  stream->state = StreamState::State::kBlocked;
  queue->throttled.push_back(stream);
  return true;
}

void CudaEngine::Count(Queue* queue, int64_t calls) {
  queue->in_flight += calls;
  queue->since_mark += calls;
  if (queue->since_mark < kMarkEvery) return;
  Tell(
      queue,
      [this, queue, num_calls = std::exchange(queue->since_mark, 0)](const absl::Status&) {
        MutexLock lock(&mutex_);
        queue->in_flight -= num_calls;
        std::vector<StreamState*> throttled;
        throttled.swap(queue->throttled);
        for (StreamState* stream : throttled) Resume(stream);
        Schedule();
      },
      absl::OkStatus());
}

void CudaEngine::TrimMarks(CudaStream* stream) {
  while (stream->marks.size() > kKeptMarks) {
    const Mark& oldest = stream->marks.front();
    if (gpu_->api().EventQuery(oldest.event) != cuda::Result::kSuccess) return;
    stream->trimmed_callback = oldest.last_callback;
    pool_.GiveBack(oldest.event);
    stream->marks.pop_front();
  }
}

absl::Status CudaEngine::HandOverRecord(CudaStream* stream) {
  // What waits takes a record that is missing for one that has passed.
  absl::StatusOr<cuda::Event> event_or = pool_.TakeEvent();
  CHORUS_RETURN_IF_ERROR(Require(event_or.status()));
  const cuda::Event event = *event_or;
  const absl::Status status =
      Require(Check(gpu_->api().EventRecord(event, QueueOf(stream)->stream), "cuEventRecord"));
  if (!status.ok()) {
    pool_.GiveBack(event);
    return status;
  }
  stream->marks.push_back({stream->completed + 1, event, stream->last_callback});
  TrimMarks(stream);
  Count(QueueOf(stream));
  return absl::OkStatus();
}

void CudaEngine::PassWait(StreamState* stream, const WaitItem& wait) {
  auto* const waiter = static_cast<CudaStream*>(stream);
  auto* const source = static_cast<CudaStream*>(wait.on);
  const auto mark =
      std::lower_bound(source->marks.begin(), source->marks.end(), wait.position,
                       [](const Mark& m, uint64_t position) { return m.position < position; });
  if (mark == source->marks.end() || mark->position != wait.position) {
    // The GPU has passed it; callbacks in front of it may not have run.
    waiter->last_callback = std::max(waiter->last_callback, source->trimmed_callback);
    return;
  }
  waiter->last_callback = std::max(waiter->last_callback, mark->last_callback);
  Queue* const queue = QueueOf(waiter);
  // From here on the stream has something of its own. A loss is what the next item finds.
  CatchUp(waiter).IgnoreError();
  if (queue != source->queue) WaitFor(queue, mark->event).IgnoreError();
}

absl::Status CudaEngine::WaitFor(Queue* queue, cuda::Event event) {
  Count(queue);
  return Require(Check(gpu_->api().StreamWaitEvent(queue->stream, event, 0), "cuStreamWaitEvent"));
}

absl::Status CudaEngine::CatchUp(CudaStream* stream) {
  Queue* const awaited_queue = std::exchange(stream->awaited_queue, nullptr);
  return awaited_queue == nullptr ? absl::OkStatus()
                                  : WaitFor(QueueOf(stream), awaited_queue->release_event);
}

absl::Status CudaEngine::Gather(const std::vector<CudaStream*>& streams) {
  CudaStream* const first = streams[0];
  Queue* const queue = QueueOf(first);
  CHORUS_RETURN_IF_ERROR(CatchUp(first));
  for (size_t i = 1; i < streams.size(); ++i) {
    CudaStream* const other = streams[i];
    first->last_callback = std::max(first->last_callback, other->last_callback);
    if (other->awaited_queue != nullptr) {
      // That collective was behind all that the other stream has.
      if (other->awaited_queue == queue) continue;
      CHORUS_RETURN_IF_ERROR(WaitFor(queue, other->awaited_queue->release_event));
      continue;
    }
    Queue* const other_queue = QueueOf(other);
    if (other_queue == queue) continue;
    Count(other_queue);
    CHORUS_RETURN_IF_ERROR(Check(
        gpu_->api().EventRecord(other_queue->gather_event, other_queue->stream), "cuEventRecord"));
    CHORUS_RETURN_IF_ERROR(WaitFor(queue, other_queue->gather_event));
  }
  return absl::OkStatus();
}

absl::Status CudaEngine::Release(const std::vector<CudaStream*>& streams) {
  CudaStream* const first = streams[0];
  Queue* const queue = QueueOf(first);
  bool has_others = false;
  for (size_t i = 1; i < streams.size(); ++i) {
    streams[i]->last_callback = std::max(streams[i]->last_callback, first->last_callback);
    // What has been gathered on its own queue is behind it.
    streams[i]->awaited_queue = QueueOf(streams[i]) == queue ? nullptr : queue;
    has_others |= streams[i]->awaited_queue != nullptr;
  }
  if (!has_others) return absl::OkStatus();
  Count(queue);
  return Require(
      Check(gpu_->api().EventRecord(queue->release_event, queue->stream), "cuEventRecord"));
}

absl::StatusOr<KernelFault> CudaEngine::FaultOf(CudaStream* stream, const KernelCall& call) {
  const auto* const kernel = static_cast<const CudaKernel*>(call.kernel);
  if (!kernel->reports()) return KernelFault();
  Queue* const queue = QueueOf(stream);
  if (stream->fault == nullptr) {
    CHORUS_ASSIGN_OR_RETURN(stream->fault, pool_.TakeSlab(sizeof(kNoFault)));
    Count(queue);
    CHORUS_RETURN_IF_ERROR(Check(
        gpu_->api().MemsetD8Async(stream->fault->device, 0xff, sizeof(kNoFault), queue->stream),
        "cuMemsetD8Async"));
  }
  stream->reporting.push_back({kernel, call.inputs});
  return KernelFault{stream->fault->device, (stream->reporting.size() - 1) << kElementBits};
}

bool CudaEngine::HandOverKernel(CudaStream* stream, KernelCall* call, absl::Status* status) {
  *status = CheckOperands(*owned_space_->memory_, *call);
  if (!status->ok()) return true;
  const absl::StatusOr<KernelFault> fault = FaultOf(stream, *call);
  *status = fault.status();
  if (!fault.ok()) return true;
  stream->launching = {std::move(*call), *fault, 0};
  return HandOverParts(stream, status);
}

bool CudaEngine::HandOverParts(CudaStream* stream, absl::Status* status) {
  Launching& launching = stream->launching;
  const auto& kernel = *static_cast<const CudaKernel*>(launching.call.kernel);
  Queue* const queue = QueueOf(stream);
  *status = lost_;
  while (status->ok() && launching.next_part < kernel.parts()) {
    if (IsFull(stream)) return false;
    *status = CheckLaunch(kernel.Enqueue(launching.next_part++, launching.call, launching.fault,
                                         *gpu_, queue->stream),
                          queue);
    Count(queue, kernel.calls());
    status->Update(lost_);
  }
  launching.call.kernel = nullptr;
  return true;
}

absl::Status CudaEngine::CheckLaunch(const absl::Status& status, Queue* queue) {
  // Whether the context survives it, the stream tells.
  if (status.ok()) return status;
  Check(gpu_->api().StreamQuery(queue->stream), "cuStreamQuery").IgnoreError();
  return lost_.ok() ? status : Detached(lost_);
}

bool CudaEngine::HandOverCopy(CudaStream* stream, const CopyItem& item, absl::Status* status) {
  if (item.bytes == 0) return true;
  using Direction = CopyItem::Direction;
  const GpuMemory& memory = *owned_space_->memory_;
  if (item.direction != Direction::kToHost) *status = memory.Check(item.to, item.bytes);
  if (item.direction != Direction::kFromHost) status->Update(memory.Check(item.from, item.bytes));
  if (!status->ok()) return true;
  const cuda::Api& api = gpu_->api();
  Queue* const queue = QueueOf(stream);
  const auto bytes = static_cast<size_t>(item.bytes);
  if (item.direction == Direction::kOnDevice) {
    Count(queue);
    *status =
        Check(api.MemcpyDtoDAsync(item.to, item.from, bytes, queue->stream), "cuMemcpyDtoDAsync");
    return true;
  }
  const bool from_host = item.direction == Direction::kFromHost;
  if (gpu_->IsPinned(PointerOf(from_host ? item.from : item.to), item.bytes)) {
    Count(queue);
    *status =
        from_host
            ? Check(api.MemcpyHtoDAsync(item.to, PointerOf(item.from), bytes, queue->stream),
                    "cuMemcpyHtoDAsync")
            : Check(api.MemcpyDtoHAsync(MutablePointerOf(item.to), item.from, bytes, queue->stream),
                    "cuMemcpyDtoHAsync");
    return true;
  }
  if (from_host && item.bytes <= kSmallCopyBytes) {
    auto slab = pool_.TakeSlab(item.bytes);
    *status = slab.status();
    if (!slab.ok()) return true;
    std::memcpy((*slab)->host.host, PointerOf(item.from), bytes);
    Count(queue);
    *status = Check(api.MemcpyHtoDAsync(item.to, (*slab)->host.host, bytes, queue->stream),
                    "cuMemcpyHtoDAsync");
    GiveBack(*slab, queue);
    return true;
  }
  BounceCopier::Copy copy;
  copy.stream = queue->stream;
  copy.from_host = from_host;
  copy.host = MutablePointerOf(from_host ? item.from : item.to);
  copy.device = from_host ? item.to : item.from;
  copy.bytes = item.bytes;
  copy.done = [this, stream](const BounceCopier::Answer& answer) {
    MutexLock lock(&mutex_);
    absl::Status copied = Check(answer.result, answer.call);
    if (answer.loses_order) copied = Require(std::move(copied));
    Advance(stream, copied);
    Requeue(stream);
    Schedule();
  };
  copier_->Add(std::move(copy));
  return false;
}

void CudaEngine::HandOverCallback(CudaStream* stream, CallbackItem* callback) {
  const uint64_t id = ++last_callback_;
  unfinished_.insert(id);
  stream->last_callback = id;
  Queue* const queue = QueueOf(stream);
  absl::Status status = std::move(callback->status);
  Slab* const fault = std::exchange(stream->fault, nullptr);
  if (fault != nullptr && lost_.ok()) {
    Count(queue);
    status.Update(Check(gpu_->api().MemcpyDtoHAsync(fault->host.host, fault->device,
                                                    sizeof(kNoFault), queue->stream),
                        "cuMemcpyDtoHAsync"));
  }
  Tell(
      queue,
      [this, id, fault, reporting = std::move(stream->reporting),
       done = std::move(callback->done)](absl::Status result) {
        if (fault != nullptr) {
          if (result.ok()) result = FailureOf(*fault, reporting);
          MutexLock lock(&mutex_);
          pool_.GiveBack(fault);
        }
        done(std::move(result));
        CallbackHasRun(id);
      },
      std::move(status));
  stream->reporting.clear();
  callback->done = nullptr;
}

absl::Status CudaEngine::FailureOf(const Slab& fault, const std::vector<Reporting>& reporting) {
  uint64_t fault_word = kNoFault;
  std::memcpy(&fault_word, fault.host.host, sizeof(fault_word));
  if (fault_word == kNoFault) return absl::OkStatus();
  const Reporting& report = reporting[static_cast<size_t>(fault_word >> kElementBits)];
  const auto read = [&](size_t input, int64_t offset, int64_t bytes, void* to) {
    const DeviceAddress from = report.inputs[input] + static_cast<DeviceAddress>(offset);
    CHORUS_RETURN_IF_ERROR(owned_space_->memory_->Check(from, bytes));
    CHORUS_CUDA(gpu_->api(), MemcpyDtoHAsync, fault.host.host, from, static_cast<size_t>(bytes),
                reading_);
    CHORUS_CUDA(gpu_->api(), StreamSynchronize, reading_);
    std::memcpy(to, fault.host.host, static_cast<size_t>(bytes));
    return absl::OkStatus();
  };
  const CudaKernel::Facts& facts = report.kernel->facts();
  const uint64_t element = fault_word & ((uint64_t{1} << kElementBits) - 1);
  return KernelFailure(report.kernel->Failure(element, read), facts.op, facts.source,
                       facts.op_may_fail);
}

void CudaEngine::Tell(Queue* queue, std::function<void(absl::Status)> done, absl::Status status) {
  Count(queue);
  // A word that will not be written is no reason not to call: what waits learns of it.
  Require(Check(watch_->Await(queue->index, std::move(done), std::move(status)),
                "cuStreamWriteValue32"))
      .IgnoreError();
}

bool CudaEngine::HostHasPassed(StreamState* stream) {
  auto* const cuda_stream = static_cast<CudaStream*>(stream);
  if (unfinished_.empty() || *unfinished_.begin() > cuda_stream->last_callback) return true;
  asking_.push_back(cuda_stream);
  return false;
}

void CudaEngine::CallbackHasRun(uint64_t id) {
  MutexLock lock(&mutex_);
  unfinished_.erase(id);
  size_t num_asking = 0;
  for (CudaStream* stream : asking_) {
    if (unfinished_.empty() || *unfinished_.begin() > stream->last_callback) {
      Resume(stream);
    } else {
      asking_[num_asking++] = stream;
    }
  }
  asking_.resize(num_asking);
  Schedule();
}

void CudaEngine::GiveBack(Slab* slab, Queue* queue) {
  Tell(
      queue,
      [this, slab](const absl::Status&) {
        MutexLock lock(&mutex_);
        pool_.GiveBack(slab);
      },
      absl::OkStatus());
}

// --- Collectives ---

std::vector<CudaEngine::CudaStream*> CudaEngine::MembersOf(const Meeting& meeting) {
  std::vector<StreamState*> states;
  StreamsOf(meeting, &states);
  std::vector<CudaStream*> streams;
  for (StreamState* state : states) streams.push_back(static_cast<CudaStream*>(state));
  return streams;
}

void CudaEngine::HandOverMeeting(Meeting* meeting) {
  absl::Status status = lost_;
  if (status.ok()) {
    const std::vector<CudaStream*> streams = MembersOf(*meeting);
    const Numbers numbers = NumbersOf(meeting);
    owned_space_->Clear();
    if (!numbers.empty()) {
      status = FetchNumbers(meeting, numbers, streams);
      if (status.ok()) return;
    } else {
      status = PrepareMeeting(meeting);
      if (status.ok()) status = HandOverList(meeting, streams);
    }
  }
  FinishMeeting(meeting, status);
}

absl::Status CudaEngine::FetchNumbers(Meeting* meeting, const Numbers& numbers,
                                      const std::vector<CudaStream*>& streams) {
  int64_t bytes = 0;
  for (const auto& [address, size] : numbers) {
    CHORUS_RETURN_IF_ERROR(owned_space_->memory_->Check(address, size));
    bytes += size;
  }
  CHORUS_ASSIGN_OR_RETURN(Slab* const slab, pool_.TakeSlab(bytes));
  Queue* const queue = QueueOf(streams[0]);
  absl::Status asked = Gather(streams);
  char* to = static_cast<char*>(slab->host.host);
  for (const auto& [address, size] : numbers) {
    if (!asked.ok()) break;
    Count(queue);
    asked =
        Check(gpu_->api().MemcpyDtoHAsync(to, address, static_cast<size_t>(size), queue->stream),
              "cuMemcpyDtoHAsync");
    to += size;
  }
  if (!asked.ok()) {
    GiveBack(slab, queue);
    return asked;
  }
  Tell(
      queue,
      [this, meeting, numbers, slab](const absl::Status& status) {
        GoOnWithNumbers(meeting, numbers, slab, status);
      },
      absl::OkStatus());
  return absl::OkStatus();
}

void CudaEngine::GoOnWithNumbers(Meeting* meeting, const Numbers& numbers, Slab* slab,
                                 const absl::Status& status) {
  MutexLock lock(&mutex_);
  if (closing_) return;
  gpu_->Enter();
  owned_space_->Clear();
  const char* from = static_cast<const char*>(slab->host.host);
  for (const auto& [address, size] : numbers) {
    // Of several that begin at one address the longest has them all.
    std::string& number = owned_space_->numbers[address];
    if (number.size() < static_cast<size_t>(size)) number.assign(from, static_cast<size_t>(size));
    from += size;
  }
  pool_.GiveBack(slab);
  absl::Status result = status.ok() ? lost_ : status;
  if (result.ok()) result = PrepareMeeting(meeting);
  if (result.ok()) result = HandOverList(meeting, MembersOf(*meeting));
  FinishMeeting(meeting, result);
  Schedule();
}

absl::Status CudaEngine::HandOverList(Meeting* meeting, const std::vector<CudaStream*>& streams) {
  CHORUS_RETURN_IF_ERROR(Gather(streams));
  CHORUS_RETURN_IF_ERROR(LaunchList(WorkOf(meeting).list(), streams[0]));
  // The list uses the others' memory, whatever becomes of its results.
  absl::Status status = WriteResults(streams[0]);
  status.Update(Release(streams));
  return status;
}

absl::Status CudaEngine::LaunchList(const CollectiveWork::List& list, CudaStream* stream) {
  if (list.moves.empty()) return absl::OkStatus();
  const auto address_of = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  program_.Clear();
  for (const CollectiveWork::Move& move : list.moves) {
    program_.AddMove(move.count, move.element_bytes);
    for (int i = 0; i < move.num_inputs; ++i) {
      program_.AddInput(address_of(list.inputs[static_cast<size_t>(move.first_input + i)]));
    }
    for (int i = 0; i < move.num_outputs; ++i) {
      program_.AddOutput(address_of(list.outputs[static_cast<size_t>(move.first_output + i)]));
    }
    for (int i = 0; move.first_holders >= 0 && i < move.num_inputs; ++i) {
      program_.AddHolders(address_of(list.holders[static_cast<size_t>(move.first_holders + i)]));
    }
    for (int i = 0; i < move.num_factors; ++i) {
      const CollectiveWork::Factor& factor =
          list.factors[static_cast<size_t>(move.first_factor + i)];
      program_.AddFactor(factor.input, address_of(factor.to));
    }
  }
  Reduction reduction = Reduction::kNone;
  if (IsReducing(list.common.kind)) {
    reduction = list.common.reduction;
    CHORUS_RETURN_IF_ERROR(program_.SetSteps(list.steps.data(), list.num_operands));
    for (const void* const scale : list.scales) program_.AddScale(address_of(scale));
    program_.set_divisor(list.divisor);
  }
  CHORUS_ASSIGN_OR_RETURN(const cuda::Function kernel,
                          gpu_->Find(cuda::MoveKernelName(reduction, list.common.dtype)));
  Queue* const queue = QueueOf(stream);
  const absl::Span<const char> bytes = program_.Bytes();
  Slab* slab = nullptr;
  absl::Status status;
  if (bytes.size() > static_cast<size_t>(cuda::MoveArgs::kInlineBytes)) {
    CHORUS_ASSIGN_OR_RETURN(slab, pool_.TakeSlab(static_cast<int64_t>(bytes.size())));
    std::memcpy(slab->host.host, bytes.data(), bytes.size());
    Count(queue);
    status = Check(
        gpu_->api().MemcpyHtoDAsync(slab->device, slab->host.host, bytes.size(), queue->stream),
        "cuMemcpyHtoDAsync");
  }
  if (status.ok()) {
    Count(queue);
    status =
        CheckLaunch(gpu_->Launch(kernel, program_.Arguments(slab == nullptr ? 0 : slab->device),
                                 program_.units(), queue->stream),
                    queue);
  }
  if (slab != nullptr) GiveBack(slab, queue);
  return status;
}

absl::Status CudaEngine::WriteResults(CudaStream* stream) {
  if (owned_space_->results.empty()) return absl::OkStatus();
  int64_t bytes = 0;
  for (const auto& result : owned_space_->results)
    bytes += static_cast<int64_t>(result.second.size());
  CHORUS_ASSIGN_OR_RETURN(Slab* const slab, pool_.TakeSlab(bytes));
  Queue* const queue = QueueOf(stream);
  char* at = static_cast<char*>(slab->host.host);
  absl::Status status;
  for (const auto& [address, value] : owned_space_->results) {
    std::memcpy(at, value.data(), value.size());
    Count(queue);
    status.Update(Check(gpu_->api().MemcpyHtoDAsync(address, at, value.size(), queue->stream),
                        "cuMemcpyHtoDAsync"));
    at += value.size();
  }
  GiveBack(slab, queue);
  return status;
}

}  // namespace chorus
