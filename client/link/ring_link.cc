#include "client/link/ring_link.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "client/link/mapping.h"
#include "core/base/bytes.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/failpoint.h"
#include "core/base/mutex.h"
#include "core/transport/completion.h"
#include "core/transport/doorbell.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"

namespace chorus {
namespace internal {
namespace {

constexpr absl::Duration kRequestTimeout = absl::Seconds(30);

class RingLink : public RpcLink {
 public:
  RingLink(OpenedSession opened, std::unique_ptr<DoorbellView> doorbell,
           std::unique_ptr<SessionMemory> memory, UniqueFd wake)
      : RpcLink(std::move(opened)),
        doorbell_(std::move(doorbell)),
        memory_(std::move(memory)),
        submitter_(memory_.get(), doorbell_.get(), std::move(wake), Options()),
        waiter_(memory_.get(), Options()) {
    StartWatching();
  }
  ~RingLink() override { StopWatching(); }

  Transport transport() const override { return Transport::kRing; }
  int32_t max_tensors() const override {
    const int32_t slots = static_cast<int32_t>(memory_->tensor_slots());
    const int32_t daemon = RpcLink::max_tensors();
    return daemon > 0 ? std::min(slots, daemon) : slots;
  }

  absl::Status Submit(const Command& command) override {
    encoder_.Clear();
    EncodeFrame(command, &encoder_);
    return Named(submitter_.Submit(encoder_.bytes(), this->opened().submit_timeout));
  }

  absl::StatusOr<absl::optional<RunOutcome>> Peek(Sequence sequence) override {
    auto outcome = waiter_.Run(sequence);
    if (outcome.ok() || !waiter_.MayGoOn(sequence)) return outcome;
    return absl::optional<RunOutcome>();
  }

  absl::Status WaitCommand(Sequence sequence, absl::Duration timeout) override {
    const absl::Time deadline = SteadyNow() + timeout;
    const absl::StatusOr<RunOutcome> outcome = waiter_.WaitForRun(sequence, deadline);
    if (outcome.ok()) return FetchError(outcome->code, outcome->error);
    if (ErrorOf(outcome.status()).reason == Reason::kOutcomeForgotten) {
      return WaitByRpc(sequence, deadline - SteadyNow());
    }
    return Named(outcome.status());
  }

  absl::StatusOr<bool> WaitTensor(TensorId tensor, Sequence, absl::Duration timeout) override {
    CHORUS_ASSIGN_OR_RETURN(const TensorRecord record,
                            Await(tensor, CompletionWaiter::Until::kDone, timeout));
    return record.state == TensorState::kOnDevice;
  }

  absl::Status Read(TensorId tensor, Sequence, char* out, int64_t bytes,
                    absl::Duration timeout) override {
    CHORUS_ASSIGN_OR_RETURN(const std::shared_ptr<const char> data, Locate(tensor, bytes, timeout));
    std::memcpy(out, data.get(), static_cast<size_t>(bytes));
    CHORUS_FAILPOINT("ring_link.result_copied");
    // A run that was given the tensor may have written there meanwhile: its name tells before. What
    // has no state just now is between two, and says nothing of either.
    std::atomic_thread_fence(std::memory_order_acquire);
    return Await(tensor, CompletionWaiter::Until::kReadable, timeout).status();
  }
  absl::StatusOr<std::shared_ptr<const char>> MapTensor(TensorId tensor, Sequence, int64_t bytes,
                                                        absl::Duration timeout) override {
    return Locate(tensor, bytes, timeout);
  }

  absl::StatusOr<Staging> CreateStaging(int64_t bytes) override {
    CHORUS_RETURN_IF_ERROR(liveness());
    AttachClient& attach = *this->opened().attach;
    absl::StatusOr<AttachClient::Staging> granted =
        attach.CreateStaging(bytes, SteadyNow() + kRequestTimeout);
    if (!granted.ok()) return Named(granted.status());
    absl::StatusOr<Staging> staging = MapStaging(*granted, bytes);
    // What nobody can use would be charged until the session ends.
    if (!staging.ok()) {
      attach.ReleaseStaging(granted->arena, SteadyNow() + kRequestTimeout).IgnoreError();
    }
    return staging;
  }
  absl::Status WriteStaging(ArenaId arena, int64_t offset, absl::string_view bytes) override {
    MutexLock lock(&mutex_);
    const auto row = staging_.find(arena.value());
    if (row == staging_.end()) return UnknownName("no such staging arena");
    std::memcpy(row->second->data() + offset, bytes.data(), bytes.size());
    return absl::OkStatus();
  }
  void UnmapStaging(ArenaId arena) override {
    MutexLock lock(&mutex_);
    staging_.erase(arena.value());
  }

 protected:
  void OnLost() override { waiter_.WakeAll(); }

 private:
  WaitOptions Options() {
    WaitOptions options;
    options.liveness = [this] { return liveness(); };
    return options;
  }

  absl::StatusOr<Staging> MapStaging(const AttachClient::Staging& created, int64_t bytes) {
    if (created.bytes < bytes) {
      return MakeError(Reason::kInternal, absl::StrCat("a staging arena: expected ", bytes,
                                                       " bytes, got ", created.bytes));
    }
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Mapping> mapping,
                            Mapping::Make(created.fd.get(), created.bytes, PROT_READ | PROT_WRITE));
    CHORUS_RETURN_IF_ERROR(
        Named(this->opened().attach->ConfirmStaging(created, SteadyNow() + kRequestTimeout)));
    Staging staging;
    staging.arena = created.arena;
    staging.data = mapping->data();
    MutexLock lock(&mutex_);
    staging_[created.arena.value()] = std::move(mapping);
    return staging;
  }

  absl::StatusOr<TensorRecord> Await(TensorId tensor, CompletionWaiter::Until until,
                                     absl::Duration timeout) {
    // Mostly it is there already, and then no clock is read.
    absl::StatusOr<TensorRecord> record = waiter_.Tensor(tensor);
    const auto done = [&] {
      return record->state == TensorState::kReady || record->state == TensorState::kFailed ||
             (record->state == TensorState::kOnDevice && until == CompletionWaiter::Until::kDone);
    };
    if (!record.ok() || !done()) {
      record = waiter_.WaitForTensor(tensor, until, SteadyNow() + timeout);
    }
    if (!record.ok()) return Named(record.status());
    if (record->state == TensorState::kFailed) return FetchError(record->code, record->error);
    return record;
  }

  // A readable tensor's bytes, mapped as long as this is held.
  absl::StatusOr<std::shared_ptr<const char>> Locate(TensorId tensor, int64_t bytes,
                                                     absl::Duration timeout) {
    CHORUS_ASSIGN_OR_RETURN(const TensorRecord record,
                            Await(tensor, CompletionWaiter::Until::kReadable, timeout));
    std::shared_ptr<const Mapping> arena;
    {
      MutexLock lock(&mutex_);
      LetGo();
      const auto row = results_.find(record.arena.value());
      if (row == results_.end()) {
        CHORUS_ASSIGN_OR_RETURN(arena, MapResults(record.arena));
        results_[record.arena.value()] = arena;
      } else {
        arena = row->second;
      }
    }
    if (record.bytes != bytes || record.offset < 0 || record.offset > arena->bytes() - bytes) {
      return MakeError(
          Reason::kInternal,
          absl::StrCat("a tensor of ", bytes, " bytes is said to be ", record.bytes, " bytes at ",
                       record.offset, " of an arena of ", arena->bytes()));
    }
    const char* const data = arena->data() + record.offset;
    return std::shared_ptr<const char>(arena, data);
  }
  // Where the daemon has asked for it: arenas that it has no more keep their memory as long as they
  // are mapped here, and their names may come to stand for others. What a caller still holds stays
  // mapped for that one alone; the next reader maps it again.
  void LetGo() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const uint32_t requests = doorbell_->let_go();
    if (requests == let_go_) return;
    let_go_ = requests;
    results_.clear();
  }
  absl::StatusOr<std::shared_ptr<const Mapping>> MapResults(ArenaId arena)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    CHORUS_RETURN_IF_ERROR(liveness());
    const absl::StatusOr<AttachClient::ResultArenaFd> granted =
        this->opened().attach->ResultArena(arena, SteadyNow() + kRequestTimeout);
    if (!granted.ok()) return Named(granted.status());
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<Mapping> mapping,
                            Mapping::Make(granted->fd.get(), granted->bytes, PROT_READ));
    return std::shared_ptr<const Mapping>(std::move(mapping));
  }

  const std::unique_ptr<DoorbellView> doorbell_;
  const std::unique_ptr<SessionMemory> memory_;
  Submitter submitter_;
  CompletionWaiter waiter_;
  ByteWriter encoder_;  // Submit's

  Mutex mutex_;
  absl::flat_hash_map<int32_t, std::shared_ptr<const Mapping>> results_ ABSL_GUARDED_BY(mutex_);
  uint32_t let_go_ ABSL_GUARDED_BY(mutex_) = 0;  // as the daemon asked last
  absl::flat_hash_map<int32_t, std::unique_ptr<Mapping>> staging_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<Link>> MakeRingLink(OpenedSession opened, absl::Time deadline) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<DoorbellView> doorbell,
                          DoorbellView::Map(opened.attach->doorbell_fd()));
  CHORUS_ASSIGN_OR_RETURN(AttachClient::SessionMemoryFds fds,
                          opened.attach->SessionMemory(deadline));
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<SessionMemory> memory,
                          MapSessionMemory(fds.memory.get()));
  CHORUS_RETURN_IF_ERROR(opened.attach->ConfirmMemory(deadline));
  return std::unique_ptr<Link>(std::make_unique<RingLink>(std::move(opened), std::move(doorbell),
                                                          std::move(memory), std::move(fds.wake)));
}

}  // namespace internal
}  // namespace chorus
