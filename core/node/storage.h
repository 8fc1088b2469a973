// Where the bytes of sessions stand: staging, results, device memory, and their ways there and
// back.
//
// Threads: the node thread; transfers end in a Launcher::Drain(). Ownership: owns the memory of
// devices; tenants own result arenas, sessions staging, and buffers keep what they stand in.
// Errors: said at each function.
#ifndef CHORUS_CORE_NODE_STORAGE_H_
#define CHORUS_CORE_NODE_STORAGE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/node/background.h"
#include "core/node/cell.h"
#include "core/node/client_target.h"
#include "core/node/info.h"
#include "core/node/launcher.h"
#include "core/node/options.h"
#include "core/node/patience.h"
#include "core/node/requests.h"
#include "core/node/session.h"
#include "core/node/timers.h"
#include "core/runtime/arena.h"
#include "core/runtime/buffer.h"
#include "core/runtime/devices.h"
#include "core/runtime/held_files.h"
#include "core/runtime/memory.h"
#include "core/runtime/memory_thread.h"
#include "core/transport/command.h"

namespace chorus::node {

class Storage {
 public:
  // All outlive it. `budget`: the node's. `paths` counts how bytes took their way. `ask_to_let_go`
  // is called when files are gone, but clients still hold their pages.
  Storage(const NodeOptions* options, BudgetRef budget, Devices* devices, Launcher* launcher,
          Background* background, const Clock* clock, TimerQueue* timers, PathCounters* paths,
          std::function<void()> ask_to_let_go);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  // The tenant of that name, made where there is none; it lives as long as it is referred to.
  std::shared_ptr<Tenant> TenantNamed(const std::string& name);
  // Null: it has no session.
  std::shared_ptr<const Tenant> FindTenant(absl::string_view name) const;

  // --- Staging arenas -------------------------------------------------------------------------
  // INVALID_ARGUMENT: no bytes. RESOURCE_EXHAUSTED: kQuota, the session's; kOutOfMemory. Where its
  // memory is on its way `done` is called when that is there.
  void CreateStaging(const std::shared_ptr<Session>& session, int64_t bytes, OnStaging done) {
    CreateStaging(session, bytes, Patience(), std::move(done));
  }
  absl::StatusOr<std::shared_ptr<Arena>> FindStaging(const Session& session, ArenaId arena) const;
  // That may be touched. WRONG_STATE: Arena::may_change().
  absl::StatusOr<std::shared_ptr<Arena>> FindStable(const Session& session, ArenaId arena) const;
  absl::Status ReleaseStaging(Session* session, ArenaId arena);
  absl::Status WriteStaging(const Session& session, ArenaId arena, int64_t offset,
                            absl::string_view bytes);
  // The bytes of one range, where they stand: a client may go on writing there.
  absl::StatusOr<BufferRef> FindStaged(const Session& session, const ExternalRange& range,
                                       int64_t bytes) const;

  // --- Results and inputs ---------------------------------------------------------------------
  absl::StatusOr<int> ResultArenaFd(const Session& session, ArenaId arena) const;
  // RESOURCE_EXHAUSTED kOutOfMemory, as wherever results' memory is taken here: it may be for now.
  absl::StatusOr<BufferRef> Allocate(Tenant* tenant, DeviceIndex device, int64_t bytes);
  // The same for a run of the session that is being prepared. Null: this turn has made its share of
  // arenas, and the run is to be prepared again (Session::Reservation).
  absl::StatusOr<BufferRef> Reserve(Session* session, DeviceIndex device, int64_t bytes);
  // What Bind() will copy the bytes of such a range to in host memory, in the same way: given back
  // to the tenant just before, it is found there. Failure: as Bind().
  absl::Status ReserveCopy(Session* session, const ExternalRange& range, const TensorType& type,
                           bool stable, std::vector<BufferRef>* buffers);
  // Runs `then`, in a later turn, when what is on its way back to the kernel of the tenant by now
  // is there (of all, where it has nothing there), or at `until`: a caller that was refused
  // memory for now asks again.
  void AwaitMemory(const Tenant& tenant, absl::Time until, std::function<void()> then);
  // The same of a command of the session's log, to which `answer` came; what `ask_again` gives is
  // called then, with OK. False: that was the answer, or how it is asked again cannot be kept.
  using AskAgain = absl::FunctionRef<absl::StatusOr<std::function<void(const absl::Status&)>>()>;
  bool AwaitMemory(Session* session, const absl::Status& answer, AskAgain ask_again);
  // The node ends: a caller that waits for memory, or would, is told so (DrainingError), in a turn
  // that comes.
  void StopWaiting() { stopped_ = true; }
  // Where the launch brings the bytes along: a buffer for them, which is not the host's.
  // INVALID_ARGUMENT: there are more or fewer than `type` has.
  absl::StatusOr<BufferRef> BindInline(const Session& session, const InlineData& data,
                                       const TensorType& type, DeviceIndex device);
  // What a copy from or to staging memory takes, beside the bytes, until the background has made
  // it.
  static constexpr int64_t kBytesToCopyLater = 1024;
  // The bytes that `binding` names, as a buffer that the device can read. `stable`: they must not
  // change any more, so client-writable memory is copied.
  enum class Arrival : uint8_t {
    kThere,
    kInOrder,  // on their way, which launches on this device see that name the upload
    kLater,    // no launch may read them before `arrived` is called
  };
  struct Bound {
    BufferRef buffer;
    DeviceAddress address = 0;
    Arrival arrival = Arrival::kThere;
    TransferId upload;  // kInOrder
  };
  // Not called where they are there.
  using OnArrived = std::function<void(Arrival, const absl::Status&)>;
  // Of many bindings: those moves of bytes that this slice has no time for, all kLater. Null where
  // one is bound alone.
  struct Moves;
  absl::StatusOr<Bound> Bind(const Session& session, const Binding& binding, const TensorType& type,
                             DeviceIndex device, bool stable, OnArrived arrived,
                             std::shared_ptr<Moves>* moves = nullptr);
  // Makes them in turns that come, when all is bound. Null: there are none.
  void MakeMoves(std::shared_ptr<Moves> moves);
  // Calls `step` until it is false: as often as this slice has time for, and then in turns that
  // come.
  void InTurns(std::function<bool()> step);

  // Where an output of a run of the session is to be written in client memory. INVALID_ARGUMENT:
  // not inside the arena, or elements share memory. RESOURCE_EXHAUSTED kOutOfMemory: what is on its
  // way needs host memory, which is reserved as Reserve() does.
  absl::StatusOr<ClientTarget> FindTarget(Session* session, const ExternalRange& range,
                                          const TensorType& type);
  // Writes what stands at `address`, in a buffer of the caller's, which keeps it until `done` is
  // called, perhaps at once. Failures are the device's.
  using OnWritten = std::function<void(const absl::Status&)>;
  void WriteOut(const Tenant& tenant, DeviceIndex device, DeviceAddress address,
                const TensorType& type, const ClientTarget& target, OnWritten done);

  // --- Reading --------------------------------------------------------------------------------
  // Calls `done` when the host can read the cell, or with the reason why it never can. `done` must
  // not hold the cell. Returns what waits in the cell's `on_settled`; 0: nothing.
  using OnReadable = std::function<void(const CellRef& cell, const absl::Status& status)>;
  Waiters<CellRef>::Id WhenReadable(const CellRef& cell, const std::shared_ptr<Tenant>& tenant,
                                    OnReadable done);
  // RESOURCE_EXHAUSTED kQuota: too many tensors are being read already. Returns the deadline's
  // timer, which waits as long as `done` does.
  TimerQueue::Id ReadTensor(const Session& session, TensorId id, absl::Time deadline,
                            OnTensor done);

  bool host() const { return host_; }                // the devices' memory is the host's
  const Budget& budget() const { return *budget_; }  // the node's
  int64_t live_buffers() const;
  int64_t idle_bytes() const;  // of all tenants
  // What is done with here while clients hold its pages.
  HeldFiles* held() { return &held_; }
  int64_t client_held_bytes() const { return held_.bytes(); }
  // Results' memory of tenants that have gone, which goes in slices and is charged until then.
  LeftSets* left() { return &left_; }

 private:
  void LookAtHeldLater(absl::Time now);
  void AwaitMemory(std::function<bool()> is_there, absl::Time until, std::function<void()> then);
  // As Patience::Waits; at the node's end nobody waits, and that is the answer.
  bool Waits(Patience* patience, absl::Status* answer) const;
  void CreateStaging(const std::shared_ptr<Session>& session, int64_t bytes, Patience patience,
                     OnStaging done);
  absl::StatusOr<StagingArena> MakeStaging(Session* session, int64_t bytes);
  // Of one that is settled.
  void MakeReadable(const CellRef& cell, const std::shared_ptr<Tenant>& tenant, Patience patience,
                    OnReadable done);
  // Keeps `keep`, which holds the source, until it is copied.
  template <typename Keep>
  TransferId Upload(DeviceIndex device, int32_t lane, const BufferRef& target, const char* source,
                    Keep keep, Arrival arrival, OnArrived arrived);
  // Puts elements of client memory in order, beside the node thread.
  void Gather(const Session& session, std::shared_ptr<Arena> arena, const ExternalRange& range,
              const TensorType& type, int64_t work, BufferRef copy, std::function<void()> gathered);
  // From host memory, which stands until `done`.
  void Spread(const std::string& tenant, const char* from, const TensorType& type,
              const ClientTarget& target, std::function<void()> done);
  // Copies ranges of elements in the background, which take so much `work`, a part at a time:
  // others' work comes in between. `done` stays on this thread.
  template <typename Copy>
  void InParts(const std::string& tenant, int64_t elements, int64_t work, Copy copy,
               std::function<void()> done);

  const NodeOptions* const options_;
  const bool host_;
  Launcher* const launcher_;
  Background* const background_;
  const Clock* const clock_;
  TimerQueue* const timers_;
  PathCounters* const paths_;
  const BudgetRef budget_;
  const Budget::Limits share_;  // of one tenant
  MemoryThread memory_thread_;
  HeldFiles held_;
  LeftSets left_;
  std::vector<std::unique_ptr<DeviceSet>> device_sets_;  // by device; empty on the host
  struct TenantEntry {
    std::weak_ptr<Tenant> tenant;
    std::weak_ptr<Budget> budget;  // outlives it while something is charged
  };
  absl::flat_hash_map<std::string, TenantEntry> tenants_;
  int32_t LeastUsedLane() const;
  // What waits for a range of a buffer that is on its way to the host: ranks have results in
  // common, and a rank may ask twice.
  using DownloadKey = std::tuple<const Buffer*, int64_t, int64_t>;  // its offset and bytes
  struct Reader {
    CellRef cell;  // of this range
    OnReadable done;
  };
  // Tells them in the order in which they came.
  void TellReaders(std::shared_ptr<std::deque<Reader>> readers, const absl::Status& status);
  absl::flat_hash_map<DownloadKey, std::deque<Reader>> downloads_;
  bool stopped_ = false;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_STORAGE_H_
