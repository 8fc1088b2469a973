// A client's session, and all of a node's sessions.
//
// Threads: the node thread. Ownership: the table and the session's runs share a session, which owns
// its log, its names and its memory. Errors: said at each function.
#ifndef CHORUS_CORE_NODE_SESSION_H_
#define CHORUS_CORE_NODE_SESSION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/base/unique_fd.h"
#include "core/base/work.h"
#include "core/node/command_log.h"
#include "core/node/completions.h"
#include "core/node/info.h"
#include "core/node/names.h"
#include "core/node/options.h"
#include "core/node/patience.h"
#include "core/node/requests.h"
#include "core/node/timers.h"
#include "core/node/turns.h"
#include "core/runtime/arena.h"
#include "core/runtime/budget.h"
#include "core/runtime/buffer.h"
#include "core/runtime/memory.h"
#include "core/transport/ring.h"
#include "core/transport/session_memory.h"

namespace chorus::node {

class CommunicatorLease;
struct MeetingPoint;
struct RunTemplates;
struct World;

// The user that sessions act for, and what belongs to all of them. A tenant has one set of result
// arenas: a descriptor exposes its whole file, so arenas are never shared across tenants; within a
// tenant they are, which keeps touched memory for its next world. Its work on devices has a lane of
// its own (core/runtime/messages.h), of which there are kMaxLanes: beside that of others.
struct Tenant {
  std::string name;
  BudgetRef budget;  // within the node's
  ArenaSet::Ptr arenas;
  Turns turns;  // within the node
  int32_t lane = 0;
  int64_t standing = 0;  // of its runs, on the short way (short_way.h)
  // The largest holders of its memory, in words, and when they were looked for.
  std::string holders;
  absl::Time holders_at = absl::InfinitePast();
};

// What counts as one of a session's waits as long as it is there. RESOURCE_EXHAUSTED kQuota: it has
// too many; kOutOfMemory: it cannot be charged.
struct WaitCharge {
  Charge count_charge;
  Charge bytes;
};
absl::StatusOr<std::shared_ptr<WaitCharge>> ChargeWait(const BudgetRef& session);

struct Session : std::enable_shared_from_this<Session> {
  struct Membership {
    std::shared_ptr<World> world;
    Rank rank;
    Epoch epoch{1};  // that the session has entered
  };
  // The memory of the run that its log has come to, where that takes more than a turn to reserve.
  struct Reservation {
    int64_t work = 0;  // of this turn
    // What there is by now, until the run is prepared again and finds it in its tenant's arenas:
    // nobody else is given it meanwhile.
    std::vector<BufferRef> buffers;
    Charge rows;  // of that list

    // This turn makes more: half a slice of arenas, for to prepare the run again takes about as
    // long. They alone are counted: a run whose memory there is gets all of it.
    bool goes_on() const { return work <= kMaxSliceWork / 2; }
    // What `allocate` gives; null where this turn has made its share.
    template <typename Allocate>
    absl::StatusOr<BufferRef> Make(Allocate allocate) {
      if (!goes_on()) return BufferRef();
      const int64_t before = SliceWork();
      absl::StatusOr<BufferRef> buffer = allocate();
      work += SliceWork() - before;
      return buffer;
    }
    // The run is to be prepared again, in a turn in which less is left to do.
    bool takes_turns() const { return work > kTurnWork; }
  };

  Session(SessionId session, const OpenSessionRequest& opened, std::shared_ptr<Tenant> of_tenant,
          const CommandLog::Shared& logs, const Names::Limits& limits, const Budget::Limits& bounds,
          News* news)
      : id(session),
        request(opened),
        tenant(std::move(of_tenant)),
        budget(Budget::Within(tenant->budget, absl::StrCat("session ", id.value()), bounds)),
        run_charge(budget, Resource::kRunBytes, int64_t{64} << 10),
        completions(news),
        log(logs, tenant->name, budget, &completions),
        names(limits, budget, &completions) {}

  bool dead() const { return state == SessionState::kDead; }

  // Identity and lease.
  const SessionId id;
  const OpenSessionRequest request;
  const std::shared_ptr<Tenant> tenant;
  const BudgetRef budget;  // within the tenant's: what it holds is charged there
  Charge count_charge;     // it is one of so many
  SteppedCharge run_charge;
  std::vector<DeviceIndex> devices;
  SessionState state = SessionState::kActive;
  absl::Duration lease;
  absl::Time lease_until = absl::InfiniteFuture();
  TimerQueue::Id lease_timer;
  TimerQueue::Id detach_timer;

  Completions completions;
  CommandLog log;
  Names names;
  absl::flat_hash_map<ArenaId, std::shared_ptr<Arena>> staging;
  int64_t staging_bytes = 0;
  std::vector<RunHandle> runs;      // under way, in no order
  int64_t run_bytes = 0;            // of their rows (RunState::bytes)
  int64_t failing = 0;              // what must have failed before its log goes on (runs.h)
  bool looks_for_unwanted = false;  // what it has launched and nobody wants is to be abandoned
  // What goes on then.
  std::vector<std::function<void(const std::shared_ptr<Session>& self)>> when_failed;
  Patience patience;  // with memory that its command is refused for now
  Reservation reservation;
  std::vector<Membership> memberships;
  // The short way of its runs (short_way.h): null until it has had one; and where one stands.
  std::shared_ptr<RunTemplates> templates;
  MeetingPoint* stands_at = nullptr;
  // For copies between its devices in runs of its own. Null until there is one.
  std::shared_ptr<CommunicatorLease> communicators;

  // Shared memory of an attached session.
  Charge memory_bytes;
  Charge memory_descriptors;
  std::shared_ptr<SessionMemory> memory;
  std::shared_ptr<const UniqueFd> memory_file;  // the daemon's own, to ask whether clients hold it
  UniqueFd client_fd;                           // what clients get
  std::unique_ptr<SubmissionRingReader> ring;
  absl::Time last_frame = absl::InfinitePast();  // that came through it
  UniqueFd wake_fd;

  // Its turns.
  std::shared_ptr<Turns> process;  // within the tenant; of all sessions of one process
  int64_t last_turn = 0;
  std::function<void(const std::shared_ptr<Session>&)> goes_on;  // null: nothing does
};

// Calls `then` in the session's next turn (rings.h), unless it ends before.
using InNextTurn = std::function<void(const std::shared_ptr<Session>& session,
                                      std::function<void(const std::shared_ptr<Session>&)> then)>;

// The sessions that live, and what is remembered of those that died.
class SessionTable {
 public:
  // Ends a session whose lease or grace is over: `how`, in words for its peers.
  using Expire = std::function<void(const std::shared_ptr<Session>& session, const std::string& how,
                                    absl::Time now)>;
  // `options` and `timers` outlive it. `last_session`: as if there had been so many.
  SessionTable(const NodeOptions* options, int device_count, TimerQueue* timers, Expire expire,
               int64_t last_session = 0);
  // Sessions and worlds hold each other; so do sessions and what waits for their tensors.
  ~SessionTable();

  using TenantNamed = std::function<std::shared_ptr<Tenant>(const std::string& name)>;
  // INVALID_ARGUMENT, NOT_FOUND: the devices that are asked for; RESOURCE_EXHAUSTED kQuota: as the
  // budget says, or there were kMaxSessionId.
  absl::StatusOr<std::shared_ptr<Session>> Open(const OpenSessionRequest& request,
                                                const TenantNamed& tenant_named,
                                                const CommandLog::Shared& logs, News* news,
                                                absl::Time now);
  void RenewLease(Session* session, absl::Time now) const;
  void SetDetached(const std::shared_ptr<Session>& session, bool detached, absl::Time now);
  // It is dead; `died`: how, in words for its peers; empty: it was closed. It is found no more.
  void Remove(Session* session, const std::string& died);

  // NOT_FOUND kSessionLost, with how it died where that is known.
  absl::StatusOr<std::shared_ptr<Session>> Find(SessionId id) const;
  // Of one that has died lately, too.
  absl::StatusOr<std::string> TenantOf(SessionId id) const;
  template <typename Fn>
  void ForEach(Fn fn) const {
    for (const auto& entry : sessions_) fn(entry.second);
  }

 private:
  int32_t on_device(DeviceIndex device) const {
    return on_device_[static_cast<size_t>(device.value())];
  }
  absl::StatusOr<std::vector<DeviceIndex>> ChooseDevices(const OpenSessionRequest& request) const;
  void ArmLease(const std::shared_ptr<Session>& session);
  void ForgetDeath();

  const NodeOptions* const options_;
  TimerQueue* const timers_;
  const Expire expire_;
  int64_t last_session_;
  absl::flat_hash_map<SessionId, std::shared_ptr<Session>> sessions_;
  std::vector<int32_t> on_device_;  // how many of them, by device
  // The last of those that died, for owners that ask again.
  struct Death {
    std::string tenant;
    std::string how;
  };
  std::map<SessionId, Death> deaths_;
  // Each has as many as it can while others have more: of whoever has most the oldest is forgotten.
  absl::flat_hash_map<std::string, std::set<SessionId>> deaths_of_;  // by tenant
};

// NOT_FOUND kSessionLost. `how` it died; empty: not known any more, or it was closed.
absl::Status SessionLost(absl::string_view how);

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_SESSION_H_
