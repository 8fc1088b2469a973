// Members of worlds, and their groups, as a session has them.
//
// Threads: any; what is annotated is guarded by the session's lock, the rest is atomic or does not
//   change while the member is used.
// Ownership: a member lives as long as a handle of it, or a tape entry or compiled function that
//   was recorded with it; it owns its groups. The graphs of its calls go with it, or when it
//   leaves.
// Errors: BeginStep's.
#ifndef CHORUS_CLIENT_INTERNAL_MEMBER_H_
#define CHORUS_CLIENT_INTERNAL_MEMBER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "client/internal/call_table.h"
#include "client/internal/group_counters.h"
#include "client/internal/releases.h"
#include "client/internal/session_lock.h"
#include "core/base/ids.h"
#include "core/base/mutex.h"

namespace chorus {
namespace internal {

class MemberCore;
class SessionCore;

// A group as one member sees it. Owned by its member as long as that lives: the counters are the
// names of its instances, and only World::Step and Reform set them back. A daemon lets a world have
// so many groups and no more.
struct GroupCore {
  MemberCore* member = nullptr;
  GroupId id;
  // Not guarded: only a Reform changes them, and no other thread may use the group meanwhile.
  std::vector<int> ranks;              // world ranks, by rank in the group
  int rank = -1;                       // this member's, in the group
  std::atomic<bool> alive{true};       // false: gone with a Reform
  std::atomic<int64_t> generation{0};  // counts Reforms
  GroupCounters counters ABSL_GUARDED_BY(session_lock);
  CallTable calls ABSL_GUARDED_BY(session_lock);
};

// Source and destination of what goes through an end of a group's pairs.
std::pair<GroupRank, GroupRank> Between(const GroupCore& group, const PairEnd& end);

// A world all of whose members are one session's and go together: with the last of them (of the
// handles, and of what was recorded with them) the session leaves it, once its runs there are over.
class OwnWorld {
 public:
  template <typename Session>
  explicit OwnWorld(std::shared_ptr<Session> s)
      : releases_(&s->releases()), session_(std::move(s)) {}
  ~OwnWorld();
  OwnWorld(const OwnWorld&) = delete;
  OwnWorld& operator=(const OwnWorld&) = delete;

  void Add(const MemberCore& member);

 private:
  Releases* const releases_;
  const std::shared_ptr<SessionCore> session_;
  Mutex mutex_;
  GoneWorld gone_ ABSL_GUARDED_BY(mutex_);
};

// A member of a world.
class MemberCore : public std::enable_shared_from_this<MemberCore> {
 public:
  template <typename Session>
  MemberCore(std::shared_ptr<Session> s, std::string n)
      : releases(&s->releases()), session(std::move(s)), name(std::move(n)) {}
  ~MemberCore();

  // Begins a step. INVALID_ARGUMENT: not above its last one.
  absl::Status BeginStep(int64_t n) ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Begins one that nobody has asked for, and that has no number in what BeginStep takes.
  void BeginOwnStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);
  // Sets the counts of all that it calls to nothing.
  void ResetCounts() ABSL_EXCLUSIVE_LOCKS_REQUIRED(session_lock);

  Releases* const releases;  // the session's
  const std::shared_ptr<SessionCore> session;
  const std::string name;
  WorldId world;
  int device_slot = 0;
  bool compares_lines = false;     // WorldOptions::check_call_sites
  GroupCore* everybody = nullptr;  // the first of the groups
  std::atomic<int> rank{-1};
  std::atomic<int> size{0};
  std::atomic<Epoch> epoch{Epoch(0)};
  std::atomic<int64_t> step{0};       // in which its calls are, those of its own counted
  std::atomic<int64_t> own_steps{0};  // how many of these it has begun by itself
  // Null: it leaves when it is told to. Set before the member is used.
  std::shared_ptr<OwnWorld> own_world;
  std::atomic<bool> left{false};              // it was told to
  Epoch since ABSL_GUARDED_BY(session_lock);  // with which its membership began
  std::deque<std::unique_ptr<GroupCore>> groups ABSL_GUARDED_BY(session_lock);
  // Requests of NewGroup in the step, by list.
  absl::flat_hash_map<std::vector<int>, int64_t> group_requests ABSL_GUARDED_BY(session_lock);
  // Why it takes part in nothing more in this step: it is not known what it would have called.
  absl::Status out_of_line ABSL_GUARDED_BY(session_lock);
  // Modules whose calls pass gates with it (gate.h): a call for gradients whose roots have failed
  // may have led to them.
  std::atomic<int> gated_modules{0};
  // Tape entries with collectives of it from before this order have no gradient any more: a call
  // for gradients was refused, and what it would have asked for is not known.
  std::atomic<uint64_t> tapes_lost_before{0};
  std::atomic<uint64_t> gates_lost_before{0};  // the same of gates, not before that
  absl::Status why_tapes_lost ABSL_GUARDED_BY(session_lock);
};

// A session's members that live.
class MemberTable {
 public:
  void Add(const std::shared_ptr<MemberCore>& member);
  // Those that live now.
  std::vector<std::shared_ptr<MemberCore>> members() const;
  size_t size() const { return members_.size(); }  // at most twice as many

 private:
  std::vector<std::weak_ptr<MemberCore>> members_;
  size_t trim_at_ = 64;
};

}  // namespace internal
}  // namespace chorus

#endif  // CHORUS_CLIENT_INTERNAL_MEMBER_H_
