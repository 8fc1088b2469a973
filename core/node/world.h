// What the node keeps of one world: its members, its agreement, results reserved in common.
//
// Threads: the node thread. Ownership: the table of worlds and each member's session share a world.
// Errors: said at each function.
#ifndef CHORUS_CORE_NODE_WORLD_H_
#define CHORUS_CORE_NODE_WORLD_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/base/split_hash_map.h"
#include "core/collective/decisions.h"
#include "core/node/agreement.h"
#include "core/node/requests.h"
#include "core/node/timers.h"
#include "core/runtime/budget.h"
#include "core/runtime/buffer.h"

namespace chorus::node {

class CommunicatorLease;
struct MeetingPoints;
struct Session;

struct World : std::enable_shared_from_this<World> {
  struct Member {
    std::shared_ptr<Session> session;  // null: not joined yet, left, or dead
    DeviceIndex device;
    int32_t pid = -1;
    enum class State { kMissing, kJoined, kLeft, kDead } state = State::kMissing;
    OnJoined on_joined;       // while others are missing
    OnReformed on_reformed;   // while others have not asked
    TimerQueue::Id patience;  // of the one that waits
  };

  // What it holds is charged to `budget`.
  explicit World(BudgetRef budget)
      : rows(std::move(budget), Resource::kAgreementBytes, int64_t{64} << 10) {}

  WorldId id;
  Charge count_charge;  // it is one of its tenant's
  SteppedCharge rows;   // of its agreement, and its groups; its tenant's, too
  std::string tenant;
  std::string name;
  std::vector<Member> members;  // by rank
  int first_size = 0;           // of when it was made; a Reform leaves fewer
  SequencerOptions options;
  std::unique_ptr<Agreement> agreement;  // null until all have joined
  absl::Time first_joined;
  // One copy of an equal result for each domain of its members: reserved by the first voter there,
  // taken by the others, let go at launch.
  struct SharedResult {
    int domain = 0;
    int32_t output = 0;
    BufferRef buffer;
  };
  SplitHashMap<InstanceKey, absl::InlinedVector<SharedResult, 1>> shared;
  // Buffers for the results of groups of equal work, by the id of their values: reserved by the
  // first run that has the group, taken by the others, let go at launch.
  SplitHashMap<Hash128, std::shared_ptr<std::vector<BufferRef>>> equal_work;
  // By the hash of a rank and a line: the error that tells of gradients that it gave up. Each is
  // told once in a while: the list is begun anew when it is long. Where two have one hash the
  // second is not told, which is rare, and better than to keep a thousand worlds' texts.
  static constexpr size_t kMostGivenUp = 256;
  static constexpr int64_t kGivenUpBytes = int64_t{16} << 10;  // of the list, while it grows too
  absl::flat_hash_map<uint64_t, ErrorId> given_up;
  size_t given_up_next = 0;  // of a launch, the collective from which on to tell of them
  // That its ranks call something in different lines, in the order in which it was seen: to be
  // written down (runs.h); and how many more there are, for which there was no memory.
  std::deque<std::shared_ptr<const Error>> warnings;
  int64_t warning_bytes = 0;
  int64_t warnings_left_out = 0;
  // Of the short way of runs (short_way.h): null until there was one; whether runs stand there, and
  // what has them make way.
  std::shared_ptr<MeetingPoints> points;
  bool stands_short = false;
  std::function<void()> make_way;
  // Of its members' devices, and nobody else's. Null until they are launched together.
  std::shared_ptr<CommunicatorLease> communicators;

  // Before anything else. RESOURCE_EXHAUSTED kOutOfMemory.
  absl::Status MakeMembers(int size);
  // Charges for what its agreement has, and may have for so many calls that come next, with their
  // names (Sequencer::PathBytes). RESOURCE_EXHAUSTED kOutOfMemory: ranks that keep what could be
  // differentiated hold much of it.
  absl::Status ReserveCalls(size_t calls, int64_t path_bytes = 0) {
    return Reserve(calls, path_bytes, 0, 0);
  }
  // The same for a group that may come next.
  absl::Status ReserveGroup(size_t members) { return Reserve(0, 0, 1, members); }
  // One more of its warnings, or the first one less, for which its tenant is charged while it
  // waits.
  void AddWarning(std::shared_ptr<const Error> warning);
  std::shared_ptr<const Error> TakeWarning();
  bool warns() const { return !warnings.empty() || warnings_left_out > 0; }
  // What is charged beyond what there is: for what its agreement has given up, until it is gone.
  Charge TakeBeyond() { return rows.TakeBeyond(BytesWith(0, 0, 0, 0)); }

  int size() const { return static_cast<int>(members.size()); }
  bool formed() const { return agreement != nullptr; }

 private:
  // Whatever comes: of ranks, of the causes of epochs that have ended, and of what was given up.
  static int64_t FixedBytes(int size);
  // Of all that there is and this much more.
  int64_t BytesWith(size_t calls, int64_t path_bytes, size_t groups, size_t group_members) const;
  absl::Status Reserve(size_t calls, int64_t path_bytes, size_t groups, size_t group_members) {
    return rows.Cover(BytesWith(calls, path_bytes, groups, group_members));
  }
};

// FAILED_PRECONDITION kWrongState, for a request that comes before all ranks have joined.
absl::Status NotFormed(const World& world);

// Says in `error` that a session which is told it goes on in epoch `open_epoch` of `world`. Where a
// call failed alone no epoch has ended.
void SayOpenEpoch(const World& world, Epoch open_epoch, Error* error);

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_WORLD_H_
