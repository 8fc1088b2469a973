#include "core/worker/worker.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/base/thread_pool.h"
#include "core/ops/node_spec.h"
#include "core/runtime/device_plan.h"
#include "core/runtime/devices.h"
#include "core/runtime/executor.h"
#include "core/worker/protocol.h"

namespace chorus::worker {
namespace {

// The memory of each domain, as the daemon names it and as the backend does. The serving thread's.
class Memory {
 public:
  explicit Memory(Backend* backend) : backend_(backend) {
    for (int i = 0; i < backend->device_count(); ++i) {
      const auto domain = static_cast<size_t>(backend->domain(i));
      if (domain >= domains_.size()) domains_.resize(domain + 1);
      if (domains_[domain].device == nullptr) domains_[domain].device = backend->device(i);
    }
  }
  ~Memory() {
    for (const Domain& domain : domains_) {
      for (const auto& piece : domain.pieces) domain.device->Free(piece.second.address);
    }
  }

  // INVALID_ARGUMENT kMalformed: what no daemon asks for.
  absl::Status Map(const MapMemory& request) {
    CHORUS_RETURN_IF_ERROR(Check(request.domain));
    Domain& domain = domains_[static_cast<size_t>(request.domain)];
    const auto [at, added] = domain.pieces.try_emplace(request.begin);
    if (!added) return Malformed(absl::StrCat("memory at ", absl::Hex(request.begin), " twice"));
    const absl::StatusOr<DeviceAddress> address = domain.device->Allocate(request.bytes);
    at->second = {request.bytes, address.value_or(0), address.status()};
    return absl::OkStatus();
  }
  absl::Status Unmap(const UnmapMemory& request) {
    CHORUS_RETURN_IF_ERROR(Check(request.domain));
    Domain& domain = domains_[static_cast<size_t>(request.domain)];
    const auto piece = domain.pieces.find(request.begin);
    if (piece == domain.pieces.end()) return absl::OkStatus();  // an earlier worker had it
    domain.device->Free(piece->second.address);
    domain.pieces.erase(piece);
    return absl::OkStatus();
  }

  // Where the backend has it. UNAVAILABLE kDeviceLost: an earlier worker had it;
  // RESOURCE_EXHAUSTED kOutOfMemory: there was no memory for it.
  absl::StatusOr<DeviceAddress> Find(int device, DeviceAddress address) const {
    if (address == 0) return address;
    const int index = DomainOf(address);
    CHORUS_RETURN_IF_ERROR(Check(index));
    const Domain& domain = domains_[static_cast<size_t>(index)];
    auto piece = domain.pieces.upper_bound(address);
    if (piece != domain.pieces.begin()) {
      --piece;
      const DeviceAddress offset = address - piece->first;
      if (offset <= static_cast<DeviceAddress>(piece->second.bytes)) {
        if (!piece->second.status.ok()) return Detached(piece->second.status);
        return piece->second.address + offset;
      }
    }
    return MakeError(Reason::kDeviceLost,
                     absl::StrCat("device ", backend_->name(), ":", device,
                                  ": what stood in its memory was lost with its worker"));
  }

 private:
  struct Piece {
    int64_t bytes = 0;
    DeviceAddress address = 0;
    absl::Status status;  // why there is no memory for it
  };
  struct Domain {
    Device* device = nullptr;
    absl::btree_map<DeviceAddress, Piece> pieces;
  };

  absl::Status Check(int domain) const {
    if (domain >= 0 && static_cast<size_t>(domain) < domains_.size()) return absl::OkStatus();
    return Malformed(absl::StrCat("memory of domain ", domain));
  }

  Backend* const backend_;
  std::vector<Domain> domains_;
};

template <typename Message, typename = void>
struct NamesDevice : std::false_type {};
template <typename Message>
struct NamesDevice<Message, std::void_t<decltype(Message::device)>> : std::true_type {};

class Server {
 public:
  Server(Channel* channel, Window* window, Backend* backend)
      : channel_(channel), window_(window), backend_(backend), memory_(backend) {
    for (int slot = 0; slot < kSlots; ++slot) free_slots_.push_back(slot);
    for (int i = 0; i < backend->device_count(); ++i) {
      DeviceExecutorOptions options;
      options.prepare = [this, i](LaunchMessage* launch) { return FindMemory(i, launch); };
      executors_.push_back(CreateDeviceExecutor(
          backend, i, [this, i](absl::string_view event) { OnEvent(i, event); },
          std::move(options)));
    }
  }

  absl::Status Run() {
    Say(Ready{DevicesOf(backend_)->info()});
    std::string message;
    while (!stopping_) {
      bool worked = Continue();
      CHORUS_ASSIGN_OR_RETURN(const bool received, channel_->Receive(&message));
      if (received) {
        CHORUS_ASSIGN_OR_RETURN(const ToWorker request, DecodeToWorker(message));
        CHORUS_RETURN_IF_ERROR(absl::visit([this](const auto& m) { return Take(m); }, request));
        worked = true;
      }
      worked |= GoOnDownloading();
      if (failed_.load(std::memory_order_acquire)) {
        return MakeError(Reason::kDeviceLost, "the daemon takes no events");
      }
      if (absl::Status status = backend_->lost(); !status.ok()) {
        // Behind what has been said of the work that was lost first.
        Say(NotReady{status});
        return status;
      }
      if (!worked) CHORUS_RETURN_IF_ERROR(channel_->Wait(absl::Seconds(1)));
    }
    return absl::OkStatus();
  }

 private:
  // A part of a transfer that the backend has.
  struct Piece {
    bool is_upload = false;
    int32_t slot = 0;
    int64_t offset = 0;
    int64_t bytes = 0;
    bool is_last = false;
  };
  struct Transfer {
    std::deque<Piece> pieces;
    absl::Status status;  // the first failure
  };
  struct Downloading {
    Download request;
    int64_t bytes_begun = 0;
  };

  // --- What is said: on any thread ---

  void Say(const ToDaemon& message) {
    ByteWriter bytes;
    Encode(message, &bytes);
    MutexLock lock(&say_mutex_);
    const absl::Status status = channel_->Send(bytes.bytes(), [] { return absl::OkStatus(); });
    if (!status.ok()) failed_.store(true, std::memory_order_release);
  }

  void OnEvent(int device, absl::string_view bytes) {
    // The serving thread may be waiting.
    if (!backend_->lost().ok()) channel_->Wake();
    const absl::StatusOr<EventMessage> event = DecodeEvent(bytes);
    if (event.ok() && absl::holds_alternative<TransferredMessage>(*event)) {
      return OnTransferred(device, absl::get<TransferredMessage>(*event));
    }
    Event message;
    message.device = device;
    message.bytes = bytes;
    Say(message);
  }

  // Of one piece: the pieces of a transfer end in their order. Of a download no more is said behind
  // one that failed, for the daemon takes them one behind the other.
  void OnTransferred(int device, const TransferredMessage& message) {
    Piece piece;
    absl::Status status;
    {
      MutexLock lock(&transfers_mutex_);
      const auto it = transfers_.find(message.transfer);
      if (it == transfers_.end()) return;
      it->second.status.Update(message.status);
      piece = it->second.pieces.front();
      it->second.pieces.pop_front();
      status = Detached(it->second.status);
      if (piece.is_last) transfers_.erase(it);
      if (!piece.is_upload && !status.ok()) free_slots_.push_back(piece.slot);
    }
    if (piece.is_upload) {
      Say(Uploaded{piece.slot});
    } else if (status.ok()) {
      Say(Downloaded{device, message.transfer, piece.slot, piece.offset, piece.bytes});
    } else {
      channel_->Wake();  // a slot is free
    }
    if (piece.is_last) SayTransferred(device, message.transfer, status);
  }

  void SayTransferred(int device, TransferId transfer, const absl::Status& status) {
    ByteWriter bytes;
    EncodeEvent(TransferredMessage{transfer, status}, &bytes);
    Event message;
    message.device = device;
    message.bytes = bytes.bytes();
    Say(message);
  }

  // --- What is asked: on the serving thread ---

  bool Continue() {
    bool has_more = false;
    for (auto& executor : executors_) has_more |= executor->Continue();
    return has_more;
  }

  absl::Status FindMemory(int device, LaunchMessage* launch) const {
    for (DeviceAddress& address : launch->buffers) {
      // What other devices of the run use stands there too.
      const bool is_own = DomainOf(address) == backend_->domain(device);
      const absl::StatusOr<DeviceAddress> backend_address = memory_.Find(device, address);
      if (!backend_address.ok() && is_own) return backend_address.status();
      address = backend_address.value_or(0);
    }
    return absl::OkStatus();
  }

  template <typename Message>
  absl::Status Take(const Message& request) {
    if constexpr (NamesDevice<Message>::value) {
      if (request.device < 0 || static_cast<size_t>(request.device) >= executors_.size()) {
        return MakeError(Reason::kDeviceLost,
                         absl::StrCat("the daemon asks for device ", request.device));
      }
      return Do(request, executors_[static_cast<size_t>(request.device)].get());
    } else {
      return Do(request);
    }
  }

  absl::Status Do(const MapMemory& request) { return memory_.Map(request); }
  absl::Status Do(const UnmapMemory& request) { return memory_.Unmap(request); }
  absl::Status Do(const LoadPlan& request, Executor* executor) {
    loading_.Post([executor, plan = request.plan, bytes = std::string(request.bytes)] {
      executor->LoadPlan(plan, bytes);
    });
    return absl::OkStatus();
  }
  absl::Status Do(const UnloadPlan& request, Executor* executor) {
    loading_.Post([plan = executor->UnloadPlan(request.plan)]() mutable { plan.reset(); });
    return absl::OkStatus();
  }
  absl::Status Do(const OpenCommunicator& request, Executor* executor) {
    executor->OpenCommunicator(request.communicator, request.devices, request.member);
    return absl::OkStatus();
  }
  absl::Status Do(const AbortCommunicator& request, Executor* executor) {
    executor->AbortCommunicator(request.communicator, request.why);
    return absl::OkStatus();
  }
  absl::Status Do(const CloseCommunicator& request, Executor* executor) {
    executor->CloseCommunicator(request.communicator);
    return absl::OkStatus();
  }
  absl::Status Do(const Launch& request, Executor* executor) {
    executor->Launch(request.bytes);
    return absl::OkStatus();
  }
  absl::Status Do(const Abandon& request, Executor* executor) {
    executor->Abandon(request.launch);
    return absl::OkStatus();
  }
  absl::Status Do(const Settled& request, Executor* executor) {
    if (request.launch != LaunchId()) executor->Settled(request.launch);
    if (request.upload != TransferId()) executor->Settled(request.upload);
    return absl::OkStatus();
  }

  static absl::Status CheckLane(int32_t lane) {
    if (lane >= 0 && lane < kMaxLanes) return absl::OkStatus();
    return MakeError(Reason::kDeviceLost, absl::StrCat("the daemon asks for lane ", lane));
  }

  absl::Status Do(const Upload& request, Executor* executor) {
    if (request.slot < 0 || request.slot >= kSlots || request.bytes < 0 ||
        request.bytes > kSlotBytes) {
      return MakeError(Reason::kDeviceLost, "the daemon uploads from beyond the window");
    }
    CHORUS_RETURN_IF_ERROR(CheckLane(request.lane));
    const absl::StatusOr<DeviceAddress> to = memory_.Find(request.device, request.to);
    {
      MutexLock lock(&transfers_mutex_);
      Transfer& transfer = transfers_[request.transfer];
      transfer.pieces.push_back(
          {/*is_upload=*/true, request.slot, 0, request.bytes, request.is_last});
    }
    if (to.ok()) {
      executor->Upload(request.transfer, request.lane, *to, window_->upload_slot(request.slot),
                       request.bytes);
    } else {
      OnTransferred(request.device, {request.transfer, to.status()});
    }
    return absl::OkStatus();
  }

  absl::Status Do(const Download& request, Executor*) {
    CHORUS_RETURN_IF_ERROR(CheckLane(request.lane));
    downloading_.push_back({request, 0});
    return absl::OkStatus();
  }
  absl::Status Do(const FreeSlot& request) {
    if (request.slot < 0 || request.slot >= kSlots) {
      return MakeError(Reason::kDeviceLost, "the daemon frees what is beyond the window");
    }
    MutexLock lock(&transfers_mutex_);
    free_slots_.push_back(request.slot);
    return absl::OkStatus();
  }

  // Begins as much of downloads as there are slots. Whether that was any.
  bool GoOnDownloading() {
    bool has_begun = false;
    while (!downloading_.empty()) {
      Downloading& next = downloading_.front();
      const Download& request = next.request;
      const absl::StatusOr<DeviceAddress> from = memory_.Find(request.device, request.from);
      if (!from.ok()) {
        SayTransferred(request.device, request.transfer, from.status());
        downloading_.pop_front();
        continue;
      }
      Piece piece;
      piece.offset = next.bytes_begun;
      piece.bytes = std::min(request.bytes - next.bytes_begun, kSlotBytes);
      piece.is_last = next.bytes_begun + piece.bytes == request.bytes;
      {
        MutexLock lock(&transfers_mutex_);
        if (free_slots_.empty()) return has_begun;
        piece.slot = free_slots_.back();
        free_slots_.pop_back();
        transfers_[request.transfer].pieces.push_back(piece);
      }
      has_begun = true;
      next.bytes_begun += piece.bytes;
      const Download download = request;
      if (piece.is_last) downloading_.pop_front();
      executors_[static_cast<size_t>(download.device)]->Download(
          download.transfer, download.lane, window_->download_slot(piece.slot),
          *from + static_cast<DeviceAddress>(piece.offset), piece.bytes, download.after);
    }
    return has_begun;
  }

  absl::Status Do(const AskWorkspace& request) {
    loading_.Post([this, question = request.question, node = std::string(request.node)] {
      Workspace answer;
      answer.question = question;
      absl::StatusOr<int64_t> bytes = WorkspaceOf(node);
      answer.status = bytes.status();
      if (bytes.ok()) answer.bytes = *bytes;
      Say(answer);
    });
    return absl::OkStatus();
  }
  absl::StatusOr<int64_t> WorkspaceOf(absl::string_view bytes) const {
    CHORUS_ASSIGN_OR_RETURN(const DevicePlan plan, DecodeDevicePlan(bytes));
    if (plan.nodes.size() != 1) return Malformed("expected one node");
    absl::InlinedVector<const TensorType*, 4> types;
    for (const TensorType& type : plan.nodes[0].input_types) types.push_back(&type);
    return backend_->WorkspaceBytes(ViewOf(plan.nodes[0].node, types), plan.nodes[0].node.outputs);
  }

  absl::Status Do(const Ping&) {
    Say(Pong());
    return absl::OkStatus();
  }
  absl::Status Do(const Stop&) {
    stopping_ = true;
    return absl::OkStatus();
  }

  Channel* const channel_;
  Window* const window_;
  Backend* const backend_;
  bool stopping_ = false;
  std::atomic<bool> failed_{false};
  // The channel's senders take turns, each until there is room for what it says: so it is held
  // until the daemon has read. Nothing else is taken meanwhile.
  Mutex say_mutex_;
  Memory memory_;
  std::deque<Downloading> downloading_;
  Mutex transfers_mutex_;  // neither under this one
  absl::flat_hash_map<TransferId, Transfer> transfers_ ABSL_GUARDED_BY(transfers_mutex_);
  std::vector<int32_t> free_slots_ ABSL_GUARDED_BY(transfers_mutex_);
  // Their ends wait for the work that they have, which uses the rest.
  std::vector<std::unique_ptr<Executor>> executors_;
  // Makes kernels, beside all that is asked: the first that needs a library waits until that is
  // loaded, for seconds. Ends before the executors, which it uses.
  ThreadPool loading_{1};
};

}  // namespace

absl::Status Serve(Channel* channel, Window* window, Backend* backend) {
  Server server(channel, window, backend);
  return server.Run();
}

void Refuse(Channel* channel, const absl::Status& why) {
  ByteWriter bytes;
  Encode(NotReady{why}, &bytes);
  channel->Send(bytes.bytes(), [] { return absl::OkStatus(); }).IgnoreError();
}

}  // namespace chorus::worker
