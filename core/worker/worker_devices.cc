#include "core/worker/worker_devices.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <thread>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/backend/backend_options.h"
#include "core/base/address_ranges.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/ops/node_spec.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/size_class.h"
#include "core/worker/answers.h"
#include "core/worker/channel.h"
#include "core/worker/protocol.h"
#include "core/worker/under_way.h"
#include "core/worker/window.h"
#include "core/worker/worker_process.h"

namespace chorus::worker {
namespace {

constexpr int64_t kAlignment = 256;  // of addresses

absl::Status Lost(absl::string_view what) { return MakeError(Reason::kDeviceLost, what); }

std::string BytesOf(const ToWorker& message) {
  ByteWriter bytes;
  Encode(message, &bytes);
  return bytes.Take();
}

std::string BytesOf(const EventMessage& event) {
  ByteWriter bytes;
  EncodeEvent(event, &bytes);
  return bytes.Take();
}

// The node of a question, which answers are kept by.
std::string BytesOf(const NodeView& view, absl::Span<const TensorType> outputs) {
  DevicePlan::Kernel kernel;
  kernel.node.op = std::string(view.op);
  kernel.node.version = view.version;
  kernel.node.attributes.assign(view.attributes.begin(), view.attributes.end());
  kernel.node.outputs.assign(outputs.begin(), outputs.end());
  for (const TensorType* type : view.inputs) kernel.input_types.push_back(*type);
  DevicePlan plan;
  plan.nodes.push_back(std::move(kernel));
  return EncodeDevicePlan(plan);
}

class FarDevices final : public WorkerDevices {
 public:
  explicit FarDevices(WorkerOptions options) : options_(std::move(options)) {}

  ~FarDevices() override {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
      if (channel_ != nullptr) channel_->Wake();
      changed_.SignalAll();
    }
    if (keeper_.joinable()) keeper_.join();
    if (sender_.joinable()) sender_.join();
  }

  absl::Status Begin() {
    absl::optional<absl::Status> start_status;
    keeper_ = std::thread([this, &start_status] { Keep(&start_status); });
    MutexLock lock(&mutex_);
    while (!start_status.has_value()) changed_.Wait(&mutex_);
    if (start_status->ok()) sender_ = std::thread([this] { SendQueued(); });
    return *start_status;
  }

  const DevicesInfo& info() const override { return info_; }
  pid_t pid() const override {
    MutexLock lock(&mutex_);
    return up_ ? pid_ : -1;
  }

  absl::StatusOr<int64_t> WorkspaceBytes(const NodeView& node,
                                         absl::Span<const TensorType> outputs) const override {
    return const_cast<FarDevices*>(this)->Ask(BytesOf(node, outputs));
  }

  absl::StatusOr<DeviceAddress> Allocate(int device, int64_t bytes) override {
    MutexLock lock(&mutex_);
    Proxy& proxy = *proxies_[static_cast<size_t>(device)];
    if (proxy.lost) return Detached(proxy.why);
    const int domain = info_.domains[static_cast<size_t>(device)];
    // A byte more, so that what is empty at the end of it is not at the beginning of another.
    const absl::optional<DeviceAddress> address =
        addresses_[static_cast<size_t>(domain)].Take(bytes + 1);
    if (!address.has_value()) {
      return MakeError(Reason::kOutOfMemory,
                       absl::StrCat("device ", info_.backend, ":", device, ": need ", bytes,
                                    " bytes, and all of its addresses are taken"));
    }
    const Queue::iterator row = PostLocked(BytesOf(MapMemory{domain, *address, bytes}));
    if (row != queue_.end()) row->maps = *address;
    mapped_[*address] = row;
    return *address;
  }
  int64_t Free(int device, DeviceAddress address) override {
    MutexLock lock(&mutex_);
    const int domain = info_.domains[static_cast<size_t>(device)];
    addresses_[static_cast<size_t>(domain)].GiveBack(address);
    const auto mapped = mapped_.find(address);
    if (mapped == mapped_.end()) return 0;  // an earlier worker had it
    const Queue::iterator row = mapped->second;
    mapped_.erase(mapped);
    // Whatever named the memory has ended, so nothing behind this row does: the worker need not
    // know of it. The first of the queue may be on its way by now.
    if (row != queue_.end() && row != queue_.begin()) {
      queue_.erase(row);
      return 0;
    }
    const Queue::iterator unmap = PostLocked(BytesOf(UnmapMemory{domain, address}));
    if (unmap == queue_.end()) return 0;
    unmap->frees = ++last_free_;
    return last_free_;
  }
  int64_t freed() const override {
    MutexLock lock(&mutex_);
    return freed_;
  }

  std::unique_ptr<Executor> OpenExecutor(int device, Executor::OnEvent on_event,
                                         DeviceExecutorOptions) override {
    {
      MutexLock lock(&events_mutex_);
      on_event_[static_cast<size_t>(device)] = std::move(on_event);
    }
    return std::make_unique<FarExecutor>(this, device);
  }

 private:
  struct Proxy {
    bool lost = false;  // until its executor recovers
    absl::Status why;   // of the last loss
    UnderWay under_way;
  };
  // What the worker makes kernels for, one behind the other: a device's plan, or (device -1) the
  // answer to a question.
  using Load = std::pair<int, uint64_t>;
  // In the order of the calls: a message, or an upload, which is sent in pieces. How many there are
  // is for clients to decide, which have been charged for more than they take: of plans
  // MemoryOfLoadedPart, of launches what the node charges for a run (Preparer::ChargeRows), of
  // uploads, and of what maps and unmaps memory, DeviceSet::kBytesPerBuffer.
  struct Queued {
    std::string message;
    absl::optional<Load> load;  // that it asks for
    DeviceAddress maps = 0;     // the memory that it tells of
    int64_t frees = 0;          // the number of the Free() that it tells of
    int device = -1;            // an upload's
    TransferId transfer;
  };
  using Queue = std::list<Queued>;
  struct Question {
    bool answered = false;
    absl::Status status;
    int64_t bytes = 0;
  };

  class FarExecutor final : public Executor {
   public:
    FarExecutor(FarDevices* devices, int device) : devices_(devices), device_(device) {}
    ~FarExecutor() override { devices_->Close(device_); }

    void LoadPlan(PlanId id, absl::string_view plan) override {
      const auto status = devices_->Post(
          device_, worker::LoadPlan{device_, id, plan},
          [id](UnderWay* under_way) { under_way->Add(id); }, Load(device_, id.value()));
      if (!status.ok()) devices_->Say(device_, LoadedMessage{id, status});
    }
    std::shared_ptr<void> UnloadPlan(PlanId id) override {
      devices_->Post(device_, worker::UnloadPlan{device_, id}).IgnoreError();
      return nullptr;
    }
    void OpenCommunicator(CommunicatorId id, absl::Span<const int> devices, int member) override {
      worker::OpenCommunicator open;
      open.device = device_;
      open.communicator = id;
      open.member = member;
      open.devices.assign(devices.begin(), devices.end());
      const auto status =
          devices_->Post(device_, open, [id](UnderWay* under_way) { under_way->Add(id); });
      if (!status.ok()) devices_->Say(device_, OpenedMessage{id, status});
    }
    void AbortCommunicator(CommunicatorId id, absl::Status why) override {
      devices_->Post(device_, worker::AbortCommunicator{device_, id, std::move(why)}).IgnoreError();
    }
    void CloseCommunicator(CommunicatorId id) override {
      devices_->Post(device_, worker::CloseCommunicator{device_, id}).IgnoreError();
    }
    bool Launch(absl::string_view launch) override {
      const LaunchId id = LaunchOf(launch);
      const auto status = devices_->Post(device_, worker::Launch{device_, launch},
                                         [id](UnderWay* under_way) { under_way->Add(id); });
      if (!status.ok()) {
        devices_->Say(device_, CompletionMessage{id, status, /*held_back=*/true});
      }
      return false;
    }
    bool Continue() override { return false; }
    void Abandon(LaunchId launch) override {
      devices_->Post(device_, worker::Abandon{device_, launch}).IgnoreError();
    }
    void Settled(LaunchId launch) override {
      devices_->Post(device_, worker::Settled{device_, launch, {}}).IgnoreError();
    }
    void Settled(TransferId upload) override {
      devices_->Post(device_, worker::Settled{device_, {}, upload}).IgnoreError();
    }
    void Upload(TransferId id, int32_t lane, DeviceAddress to, const void* from,
                int64_t bytes) override {
      UnderWay::Transfer transfer;
      transfer.lane = lane;
      transfer.address = to;
      transfer.bytes = bytes;
      transfer.from = static_cast<const char*>(from);
      const auto status = devices_->PostUpload(device_, id, transfer);
      if (!status.ok()) devices_->Say(device_, TransferredMessage{id, status});
    }
    void Download(TransferId id, int32_t lane, void* to, DeviceAddress from, int64_t bytes,
                  LaunchId after) override {
      UnderWay::Transfer transfer;
      transfer.lane = lane;
      transfer.address = from;
      transfer.bytes = bytes;
      transfer.to = static_cast<char*>(to);
      const auto status =
          devices_->Post(device_, worker::Download{device_, id, lane, from, bytes, after},
                         [&](UnderWay* under_way) { under_way->Add(id, transfer); });
      if (!status.ok()) devices_->Say(device_, TransferredMessage{id, status});
    }
    void Recover() override { devices_->Recover(device_); }
    void Kill(absl::string_view why) override { devices_->Kill(Lost(why)); }

   private:
    FarDevices* const devices_;
    const int device_;
  };

  Proxy& ProxyOf(int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return *proxies_[static_cast<size_t>(device)];
  }

  // --- To the worker ----------------------------------------------------------------------------

  // Returns where it waits; the end of the queue: it has been sent.
  Queue::iterator PostLocked(std::string message, absl::optional<Load> load = absl::nullopt)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (up_ && queue_.empty()) {
      const absl::StatusOr<bool> is_sent = channel_->TrySend(message);
      if (is_sent.ok() && *is_sent) {
        if (load.has_value()) loading_.insert(*load);
        return queue_.end();
      }
    }
    Queued entry;
    entry.message = std::move(message);
    entry.load = load;
    changed_.SignalAll();
    return queue_.insert(queue_.end(), std::move(entry));
  }

  // Refused while the device is lost; else `note` has noted what will be answered.
  template <typename Note>
  absl::Status Post(int device, const ToWorker& message, Note note,
                    absl::optional<Load> load = absl::nullopt) ABSL_LOCKS_EXCLUDED(mutex_) {
    std::string bytes = BytesOf(message);
    MutexLock lock(&mutex_);
    Proxy& proxy = ProxyOf(device);
    if (proxy.lost) return Detached(proxy.why);
    note(&proxy.under_way);
    PostLocked(std::move(bytes), load);
    return absl::OkStatus();
  }
  absl::Status Post(int device, const ToWorker& message) {
    return Post(device, message, [](UnderWay*) {});
  }

  absl::Status PostUpload(int device, TransferId id, const UnderWay::Transfer& transfer) {
    MutexLock lock(&mutex_);
    Proxy& proxy = ProxyOf(device);
    if (proxy.lost) return Detached(proxy.why);
    proxy.under_way.Add(id, transfer);
    Queued entry;
    entry.device = device;
    entry.transfer = id;
    queue_.push_back(std::move(entry));
    changed_.SignalAll();
    return absl::OkStatus();
  }

  // What did not fit into the channel at once, and uploads: on a thread of its own, in order. The
  // first of the queue stays there until it is sent, so that nothing passes it.
  void SendQueued() {
    MutexLock lock(&mutex_);
    while (!stopping_) {
      if (!up_ || queue_.empty()) {
        changed_.Wait(&mutex_);
        continue;
      }
      const int64_t life = life_;
      if (!SendPing(life)) continue;
      if (queue_.front().device >= 0) {
        SendUpload(life);
      } else {
        const std::string message = std::move(queue_.front().message);
        // Before it is sent, for it may be answered before this thread has the mutex again.
        if (queue_.front().load.has_value()) loading_.insert(*queue_.front().load);
        SendNow(message, life);
      }
      // One that was asked for meanwhile, while there is an entry that keeps others from sending.
      if (life == life_ && SendPing(life)) PopSent();
    }
    sender_ended_ = true;
    changed_.SignalAll();
  }

  void PopSent() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Queued& sent = queue_.front();
    const auto mapped = mapped_.find(sent.maps);
    // Given back meanwhile, its address may be another's, which a row behind this one tells of.
    if (mapped != mapped_.end() && mapped->second == queue_.begin()) mapped->second = queue_.end();
    if (sent.frees != 0) freed_ = sent.frees;
    queue_.pop_front();
  }

  // Lets go of the mutex meanwhile. False: the worker is another one by now, or the channel of no
  // use.
  bool SendNow(const std::string& message, int64_t life) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (life != life_) return false;
    const std::shared_ptr<Channel> channel = channel_;
    mutex_.Unlock();
    const absl::Status status = channel->Send(message, [this, life]() -> absl::Status {
      MutexLock lock(&mutex_);
      if (life == life_ && !stopping_) return absl::OkStatus();
      return Lost("");
    });
    mutex_.Lock();
    if (status.ok() || life != life_) return life == life_;
    killed_ = status;
    channel->Wake();
    while (life == life_ && !stopping_) changed_.Wait(&mutex_);
    return false;
  }

  // The one that is asked for, if it is: it passes what waits for the worker to get further.
  bool SendPing(int64_t life) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !std::exchange(wants_ping_, false) || SendNow(BytesOf(Ping()), life);
  }

  void SendUpload(int64_t life) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Queued entry = std::move(queue_.front());
    UnderWay& under_way = ProxyOf(entry.device).under_way;
    const UnderWay::Transfer* const current = under_way.Find(entry.transfer);
    if (current == nullptr) return;
    const UnderWay::Transfer transfer = *current;
    const std::shared_ptr<Window> window = window_;
    // While its bytes are read nobody else says that it has ended.
    sending_ = entry.transfer;
    int64_t bytes_sent = 0;
    do {
      while (life == life_ && !stopping_ && free_slots_.empty()) {
        if (!wants_ping_) changed_.Wait(&mutex_);
        if (!SendPing(life)) break;
      }
      if (life != life_ || stopping_) break;
      worker::Upload piece;
      piece.device = entry.device;
      piece.transfer = entry.transfer;
      piece.lane = transfer.lane;
      piece.to = transfer.address + static_cast<DeviceAddress>(bytes_sent);
      piece.slot = free_slots_.back();
      piece.bytes = std::min(transfer.bytes - bytes_sent, kSlotBytes);
      piece.is_last = bytes_sent + piece.bytes == transfer.bytes;
      free_slots_.pop_back();
      mutex_.Unlock();
      std::memcpy(window->upload_slot(piece.slot), transfer.from + bytes_sent,
                  static_cast<size_t>(piece.bytes));
      const std::string message = BytesOf(piece);
      mutex_.Lock();
      // It stands: nobody else has said that it has ended.
      under_way.Find(entry.transfer)->bytes_done += piece.bytes;
      if (!SendNow(message, life)) break;
      bytes_sent += piece.bytes;
    } while (bytes_sent < transfer.bytes);
    sending_ = TransferId();
    if (bytes_sent == transfer.bytes && life == life_) return;
    // It was left to this thread to say so, unless the worker had said it.
    if (under_way.Find(entry.transfer) == nullptr) return;
    const absl::Status why = Detached(ProxyOf(entry.device).why);
    under_way.End(entry.transfer);
    changed_.SignalAll();
    mutex_.Unlock();
    Say(entry.device, TransferredMessage{entry.transfer, why.ok() ? Lost("the end") : why});
    mutex_.Lock();
  }

  // --- Questions --------------------------------------------------------------------------------

  // Answers are kept, and a worker that is lost is asked again. UNAVAILABLE kDeviceLost: there is
  // none; DEADLINE_EXCEEDED kExecTimeout: it is still at what it loads.
  absl::StatusOr<int64_t> Ask(const std::string& node) {
    const absl::Duration patience = options_.start_timeout + options_.kill_timeout;
    const absl::Time deadline = SteadyNow() + patience;
    MutexLock lock(&mutex_);
    if (const absl::optional<int64_t> answer = answers_.Find(node)) return *answer;
    for (;;) {
      const uint64_t id = ++last_question_;
      questions_[id];
      PostLocked(BytesOf(AskWorkspace{id, node}), Load(-1, id));
      const int64_t life = life_;
      while (!questions_[id].answered && life == life_ && !stopping_) {
        const absl::Duration left = deadline - SteadyNow();
        if (left <= absl::ZeroDuration()) break;
        changed_.WaitFor(&mutex_, left);
      }
      const Question question = std::move(questions_[id]);
      questions_.erase(id);
      if (question.answered) {
        if (!question.status.ok()) return question.status;
        answers_.Keep(node, question.bytes);
        return question.bytes;
      }
      if (!stopping_ && SteadyNow() < deadline) continue;
      if (stopping_ || !up_ || life != life_) return Lost("the worker of the devices is lost");
      return MakeError(Reason::kExecTimeout,
                       absl::StrCat("the worker of the devices has not said within ",
                                    absl::FormatDuration(patience),
                                    " what scratch a kernel wants: it is still at what it loads"));
    }
  }

  // --- From the worker --------------------------------------------------------------------------

  void Say(int device, const EventMessage& event) { SayBytes(device, BytesOf(event)); }
  void SayBytes(int device, absl::string_view bytes) ABSL_LOCKS_EXCLUDED(events_mutex_, mutex_) {
    MutexLock lock(&events_mutex_);
    const Executor::OnEvent& on_event = on_event_[static_cast<size_t>(device)];
    if (on_event != nullptr) on_event(bytes);
  }

  absl::Status CheckDevice(int32_t device) const {
    if (device >= 0 && device < info_.count()) return absl::OkStatus();
    return Lost(absl::StrCat("it speaks of device ", device));
  }

  absl::Status Take(const Ready&) { return Lost("it says twice that it is ready"); }
  absl::Status Take(const NotReady& message) {
    if (message.why.ok()) return Lost("it is not ready, and does not say why");
    gives_up_ = ErrorOf(message.why).message;
    return Lost(gives_up_);
  }
  absl::Status Take(const Pong&) { return absl::OkStatus(); }

  absl::Status Take(const Event& message) {
    CHORUS_RETURN_IF_ERROR(CheckDevice(message.device));
    CHORUS_ASSIGN_OR_RETURN(const EventMessage event, DecodeEvent(message.bytes));
    {
      MutexLock lock(&mutex_);
      if (!ProxyOf(message.device).under_way.End(event)) {
        return Lost("it answers what it was not asked");
      }
      if (const auto* const loaded = absl::get_if<LoadedMessage>(&event)) {
        NoteLoaded({message.device, loaded->plan.value()});
      }
      if (closing_) changed_.SignalAll();
    }
    SayBytes(message.device, message.bytes);
    return absl::OkStatus();
  }

  absl::Status Take(const Uploaded& message) {
    MutexLock lock(&mutex_);
    const bool is_taken =
        message.slot >= 0 && message.slot < kSlots &&
        std::find(free_slots_.begin(), free_slots_.end(), message.slot) == free_slots_.end();
    if (!is_taken) return Lost(absl::StrCat("it gives back slot ", message.slot));
    free_slots_.push_back(message.slot);
    changed_.SignalAll();
    return absl::OkStatus();
  }

  absl::Status Take(const Downloaded& message) {
    CHORUS_RETURN_IF_ERROR(CheckDevice(message.device));
    char* to = nullptr;
    std::shared_ptr<Window> window;
    {
      MutexLock lock(&mutex_);
      UnderWay::Transfer* const transfer = ProxyOf(message.device).under_way.Find(message.transfer);
      // Pieces come in order, each once and as large as it may be: each is answered.
      if (transfer == nullptr || transfer->is_upload() || message.slot < 0 ||
          message.slot >= kSlots || transfer->has_last || message.offset != transfer->bytes_done ||
          message.bytes != std::min(kSlotBytes, transfer->bytes - transfer->bytes_done)) {
        return Lost("it sends bytes that were not asked for");
      }
      transfer->bytes_done += message.bytes;
      transfer->has_last = transfer->bytes_done == transfer->bytes;
      to = transfer->to + message.offset;
      window = window_;
    }
    // Only this thread says that the transfer has ended: until then its memory stands.
    if (message.bytes > 0) {  // nothing may come to no place
      std::memcpy(to, window->download_slot(message.slot), static_cast<size_t>(message.bytes));
    }
    MutexLock lock(&mutex_);
    PostLocked(BytesOf(FreeSlot{message.slot}));
    return absl::OkStatus();
  }

  absl::Status Take(const Workspace& message) {
    MutexLock lock(&mutex_);
    NoteLoaded({-1, message.question});
    const auto it = questions_.find(message.question);
    if (it == questions_.end()) return absl::OkStatus();  // nobody waits any more
    if (message.status.ok() && message.bytes < 0) {
      return Lost(absl::StrCat("it asks for a workspace of ", message.bytes, " bytes"));
    }
    it->second = {true, Detached(message.status), message.bytes};
    if (message.status.ok() && message.bytes > SizeClass::kLargestBytes) {
      it->second.status =
          MakeError(Reason::kOutOfMemory,
                    absl::StrCat("a kernel that wants ", message.bytes,
                                 " bytes of workspace, at most ", SizeClass::kLargestBytes));
    }
    changed_.SignalAll();
    return absl::OkStatus();
  }

  // The worker has got further, unless it was not asked for that.
  void NoteLoaded(const Load& load) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (loading_.erase(load) > 0) loading_since_ = SteadyNow();
  }

  // --- Its life ---------------------------------------------------------------------------------

  // Starts the worker and takes what it says until it ends, then the next one.
  void Keep(absl::optional<absl::Status>* start_status) {
    bool is_first = true;
    int short_lives = 0;
    for (;;) {
      absl::Status status = Open(is_first);
      {
        MutexLock lock(&mutex_);
        if (is_first) {
          *start_status = status;
          changed_.SignalAll();
          if (!status.ok()) return;
        }
        is_first = false;
        if (stopping_ && !status.ok()) return;
      }
      if (status.ok()) {
        const absl::Time start = SteadyNow();
        const absl::Status end_status = Receive();
        {
          MutexLock lock(&mutex_);
          if (stopping_) break;
        }
        Lose(end_status);
        // One that can be opened and not used is not opened all the time.
        constexpr int kMostShortLives = 16;
        short_lives = SteadyNow() - start < absl::Seconds(1) ? short_lives + 1 : 0;
        if (short_lives > kMostShortLives && !PauseUnlessStopping()) return;
        if (!AwaitEnd()) return;
        continue;
      }
      Log(absl::StrCat("the devices' worker does not start: ", ErrorOf(status).message));
      FailAll(
          Lost(absl::StrCat("the device's worker does not start again: ", ErrorOf(status).message)),
          /*lost=*/false);
      process_.Kill();
      if (!PauseUnlessStopping() || !AwaitEnd()) return;
    }
    End();
  }

  // False: this is to end.
  bool PauseUnlessStopping() {
    const absl::Time next = SteadyNow() + absl::Seconds(1);
    MutexLock lock(&mutex_);
    while (!stopping_ && SteadyNow() < next) changed_.WaitFor(&mutex_, next - SteadyNow());
    return !stopping_;
  }

  absl::Status Open(bool is_first) {
    Channel::Descriptors worker_descriptors;
    CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Channel> channel,
                            Channel::Create(kLongestToDaemon, &worker_descriptors));
    CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Window> window, Window::Create());
    std::vector<int> inherited_fds;
    for (const UniqueFd& fd : worker_descriptors) inherited_fds.push_back(fd.get());
    inherited_fds.push_back(window->fd());
    CHORUS_ASSIGN_OR_RETURN(process_, WorkerProcess::Start(options_.command, inherited_fds));
    gives_up_.clear();
    // Its end is its own now: that it closes tells that it has ended.
    for (UniqueFd& fd : worker_descriptors) fd.Reset();
    absl::StatusOr<DevicesInfo> info = AwaitReady(channel.get());
    if (!info.ok()) {
      absl::Status why = info.status();
      if (ErrorOf(why).reason == Reason::kDeviceLost) {
        const absl::optional<std::string> ending = process_.Wait(absl::Seconds(1));
        why = MakeError(Reason::kWrongState,
                        absl::StrCat(options_.command[0], " ", ending.value_or("does not serve")));
      }
      return why;
    }
    if (is_first) {
      MutexLock lock(&events_mutex_);
      on_event_.resize(static_cast<size_t>(info->count()));
    }
    MutexLock lock(&mutex_);
    if (is_first) {
      info_ = *std::move(info);
      int domains = 0;
      for (const int domain : info_.domains) domains = std::max(domains, domain + 1);
      for (int i = 0; i < domains; ++i) {
        addresses_.emplace_back(kAlignment).Add(FirstAddressOf(i), kDomainBytes);
      }
      for (int i = 0; i < info_.count(); ++i) proxies_.push_back(std::make_unique<Proxy>());
    } else if (info->domains != info_.domains) {
      return MakeError(Reason::kWrongState, "it has other devices than before");
    }
    channel_ = std::move(channel);
    window_ = std::move(window);
    pid_ = process_.pid();
    wants_ping_ = false;
    free_slots_.clear();
    for (int slot = 0; slot < kSlots; ++slot) free_slots_.push_back(slot);
    killed_ = absl::OkStatus();
    up_ = true;
    changed_.SignalAll();
    return absl::OkStatus();
  }

  absl::StatusOr<DevicesInfo> AwaitReady(Channel* channel) {
    const absl::Time deadline = SteadyNow() + options_.start_timeout;
    std::string bytes;
    for (;;) {
      CHORUS_ASSIGN_OR_RETURN(const bool received, channel->Receive(&bytes));
      if (received) break;
      const absl::Duration left = deadline - SteadyNow();
      if (left <= absl::ZeroDuration()) {
        return MakeError(Reason::kExecTimeout,
                         absl::StrCat(options_.command[0], " has not opened its devices within ",
                                      absl::FormatDuration(options_.start_timeout)));
      }
      {
        MutexLock lock(&mutex_);
        if (stopping_) return Lost("the end");
      }
      CHORUS_RETURN_IF_ERROR(channel->Wait(std::min(left, absl::Milliseconds(100))));
    }
    CHORUS_ASSIGN_OR_RETURN(const ToDaemon message, DecodeToDaemon(bytes));
    const auto* not_ready = absl::get_if<NotReady>(&message);
    if (not_ready != nullptr && !not_ready->why.ok()) return not_ready->why;
    const auto* ready = absl::get_if<Ready>(&message);
    const auto is_domain = [&](int domain) { return domain >= 0 && domain < kMaxDevices; };
    if (ready == nullptr || ready->info.domains.empty() ||
        ready->info.domains.size() > static_cast<size_t>(kMaxDevices) ||
        !std::all_of(ready->info.domains.begin(), ready->info.domains.end(), is_domain)) {
      return MakeError(Reason::kWrongState,
                       absl::StrCat(options_.command[0], " is no worker of this version"));
    }
    DevicesInfo info = ready->info;
    info.is_far = true;
    return info;
  }

  // Returns why the worker is of no more use; OK when this is to stop.
  absl::Status Receive() {
    std::shared_ptr<Channel> channel;
    {
      MutexLock lock(&mutex_);
      channel = channel_;
    }
    absl::Time last_heard = SteadyNow();
    loading_since_ = last_heard;
    absl::Time last_turn = last_heard;
    bool has_pinged = false;
    std::string bytes;
    // One that never stops talking is looked at all the same.
    constexpr int kInARow = 64;
    for (int in_a_row = 0;;) {
      CHORUS_ASSIGN_OR_RETURN(const bool received, channel->Receive(&bytes));
      if (received) {
        last_heard = SteadyNow();
        has_pinged = false;
        CHORUS_ASSIGN_OR_RETURN(const ToDaemon message, DecodeToDaemon(bytes));
        CHORUS_RETURN_IF_ERROR(absl::visit([this](const auto& m) { return Take(m); }, message));
        if (++in_a_row < kInARow) continue;
      }
      in_a_row = 0;
      const absl::Time now = SteadyNow();
      {
        MutexLock lock(&mutex_);
        if (stopping_) return absl::OkStatus();
        if (!killed_.ok()) return killed_;
        // A turn waits for a quarter of that: this process itself stood still, not the worker.
        const bool stood_still = now - last_turn >= options_.kill_timeout / 2;
        last_turn = now;
        bool is_idle = queue_.empty() && questions_.empty();
        for (const std::unique_ptr<Proxy>& proxy : proxies_) {
          is_idle = is_idle && proxy->under_way.empty();
        }
        if (is_idle || stood_still) last_heard = now;
        if (loading_.empty() || stood_still) loading_since_ = now;
        if (now - loading_since_ >= options_.load_timeout) {
          return Lost(absl::StrCat("it has got no further with what it loads for ",
                                   absl::FormatDuration(options_.load_timeout)));
        }
        if (now - last_heard >= options_.kill_timeout) {
          return Lost(absl::StrCat("it has not answered for ",
                                   absl::FormatDuration(options_.kill_timeout)));
        }
        if (now - last_heard >= options_.kill_timeout / 2 && !std::exchange(has_pinged, true)) {
          wants_ping_ = !queue_.empty();
          if (wants_ping_) {
            changed_.SignalAll();
          } else {
            PostLocked(BytesOf(Ping()));
          }
        }
      }
      if (received) continue;
      CHORUS_RETURN_IF_ERROR(channel->Wait(
          std::min({absl::Seconds(1), options_.kill_timeout / 4, options_.load_timeout / 4})));
    }
  }

  void Log(const std::string& line) const {
    if (options_.log != nullptr) options_.log(line);
  }

  void Lose(const absl::Status& end_status) {
    const pid_t pid = process_.pid();
    // Most often it has ended by itself, and how says more than that its socket is closed.
    absl::optional<std::string> how = process_.Wait(absl::Milliseconds(100));
    if (!how.has_value()) {
      process_.Kill();
      how = absl::StrCat("was ended: ", ErrorOf(end_status).message);
    } else if (!gives_up_.empty()) {
      absl::StrAppend(&*how, ": ", gives_up_);
    }
    const std::string text = absl::StrCat("its worker (pid ", pid, ") ", *how);
    Log(absl::StrCat("the devices are lost: ", text));
    FailAll(Lost(text), /*lost=*/true);
  }

  // The worker has ended or was killed: returns when the kernel has let go of it, and of the
  // devices with it. Meanwhile it shares no memory with anything that goes on: its window is its
  // own. False: this is to end.
  bool AwaitEnd() {
    const pid_t pid = process_.pid();
    const absl::Time since = SteadyNow();
    bool has_logged = false;
    while (!process_.Wait(absl::Milliseconds(100)).has_value()) {
      {
        MutexLock lock(&mutex_);
        if (stopping_) return false;
      }
      if (SteadyNow() - since < options_.kill_timeout) continue;
      const std::string text =
          absl::StrCat("its worker (pid ", pid, ") was killed and does not end");
      if (!std::exchange(has_logged, true)) Log(absl::StrCat("the devices stay lost: ", text));
      FailAll(Lost(text), /*lost=*/false);
    }
    return true;
  }

  // Everything that was asked for ends. `lost`: with the devices.
  void FailAll(const absl::Status& why, bool lost) {
    std::vector<std::pair<int, EventMessage>> events;
    {
      MutexLock lock(&mutex_);
      ++life_;
      up_ = false;
      if (lost) answers_ = Answers();  // the next one's may be others
      if (lost) mapped_.clear();
      // Memory that has been handed out since devices were lost is the next worker's.
      for (auto row = queue_.begin(); row != queue_.end();) {
        const auto mapped = mapped_.find(row->maps);
        const bool stays = mapped != mapped_.end() && mapped->second == row;
        row = stays ? std::next(row) : queue_.erase(row);
      }
      freed_ = last_free_;
      loading_.clear();
      for (int device = 0; device < info_.count(); ++device) {
        Proxy& proxy = ProxyOf(device);
        const std::string text =
            absl::StrCat("device ", info_.backend, ":", device, ": ", ErrorOf(why).message);
        proxy.why = Lost(text);
        // With a status of their own, which other threads do not copy.
        for (EventMessage& event : proxy.under_way.EndAll(Lost(text), sending_)) {
          events.emplace_back(device, std::move(event));
        }
        if (!lost) continue;
        proxy.lost = true;
        events.emplace_back(device, LostMessage{Lost(text)});
      }
      changed_.SignalAll();
    }
    for (const auto& event : events) Say(event.first, event.second);
  }

  void Recover(int device) {
    MutexLock lock(&mutex_);
    ProxyOf(device).lost = false;
  }

  void Kill(const absl::Status& why) {
    MutexLock lock(&mutex_);
    if (!up_) return;
    killed_ = why;
    channel_->Wake();
  }

  // The executor ends: nothing is under way any more, or is by force.
  void Close(int device) {
    const absl::Time deadline = SteadyNow() + options_.kill_timeout;
    {
      MutexLock lock(&mutex_);
      closing_ = true;
      while (!ProxyOf(device).under_way.empty()) {
        const absl::Duration left = deadline - SteadyNow();
        if (left > absl::ZeroDuration()) {
          changed_.WaitFor(&mutex_, left);
          continue;
        }
        if (up_ && killed_.ok()) {
          killed_ = Lost("its work does not end");
          channel_->Wake();
        }
        changed_.WaitFor(&mutex_, absl::Seconds(1));
      }
    }
    MutexLock lock(&events_mutex_);
    on_event_[static_cast<size_t>(device)] = nullptr;
  }

  // In an orderly way, if it lets itself be ended so.
  void End() {
    std::shared_ptr<Channel> channel;
    {
      MutexLock lock(&mutex_);
      while (!sender_ended_) changed_.Wait(&mutex_);
      channel = channel_;
    }
    channel->Send(BytesOf(Stop()), [] { return Lost("the end"); }).IgnoreError();
    if (!process_.Wait(options_.kill_timeout).has_value()) {
      Log(absl::StrCat("the devices' worker (pid ", process_.pid(),
                       ") does not end: it is killed"));
    }
    process_ = WorkerProcess();
  }

  const WorkerOptions options_;
  DevicesInfo info_;  // does not change, once there is a worker

  // Held while an event is told, so that none is once Close() has ended: before the locks of what
  // is told (the launcher's), never together with mutex_.
  Mutex events_mutex_;
  std::vector<Executor::OnEvent> on_event_ ABSL_GUARDED_BY(events_mutex_);

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool up_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t life_ ABSL_GUARDED_BY(mutex_) = 0;  // counts workers that were lost
  absl::Status killed_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Channel> channel_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Window> window_ ABSL_GUARDED_BY(mutex_);
  Queue queue_ ABSL_GUARDED_BY(mutex_);
  // The memory that the worker knows, or comes to know by the row that is named; the end of the
  // queue: it does.
  std::map<DeviceAddress, Queue::iterator> mapped_ ABSL_GUARDED_BY(mutex_);
  int64_t last_free_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t freed_ ABSL_GUARDED_BY(mutex_) = 0;  // of these, told up to this one
  // That the worker has been sent and not told the end of. What is still in the queue may wait for
  // others' uploads in front of it, which says nothing of the worker.
  absl::flat_hash_set<Load> loading_ ABSL_GUARDED_BY(mutex_);
  bool wants_ping_ ABSL_GUARDED_BY(mutex_) = false;  // by the thread that sends
  TransferId sending_ ABSL_GUARDED_BY(mutex_);
  std::vector<int32_t> free_slots_ ABSL_GUARDED_BY(mutex_);  // to the worker
  // By domain: what nobody holds. A loss changes nothing there: what stood at an address is lost as
  // long as somebody may ask for it.
  std::vector<AddressRanges> addresses_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Proxy>> proxies_ ABSL_GUARDED_BY(mutex_);  // by device
  Answers answers_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, Question> questions_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_question_ ABSL_GUARDED_BY(mutex_) = 0;
  pid_t pid_ ABSL_GUARDED_BY(mutex_) = -1;
  bool sender_ended_ ABSL_GUARDED_BY(mutex_) = false;
  // The keeper's, as what follows: the worker, and since when `loading_` has been without an end of
  // one.
  WorkerProcess process_;
  absl::Time loading_since_;
  std::string gives_up_;  // why it ends, as it says itself; "": it has not said so
  std::thread keeper_;
  std::thread sender_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerDevices>> WorkerDevices::Start(WorkerOptions options) {
  auto devices = std::make_unique<FarDevices>(std::move(options));
  CHORUS_RETURN_IF_ERROR(devices->Begin());
  return std::unique_ptr<WorkerDevices>(std::move(devices));
}

}  // namespace chorus::worker
