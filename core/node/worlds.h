// Worlds: joining, groups, leaving, refusing, reforming.
//
// Threads: the node thread. Ownership: the table, its members' sessions and actions under way share
// a world. Errors: those of requests.h and docs/errors.md; the caller records them.
#ifndef CHORUS_CORE_NODE_WORLDS_H_
#define CHORUS_CORE_NODE_WORLDS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/collective/instance.h"
#include "core/node/agreement.h"
#include "core/node/background.h"
#include "core/node/failures.h"
#include "core/node/options.h"
#include "core/node/requests.h"
#include "core/node/session.h"
#include "core/node/timers.h"
#include "core/node/world.h"
#include "core/transport/command.h"

namespace chorus::node {

class Worlds {
 public:
  // The runs of a session that a world has votes of, and that go with its rank, which has left.
  using VotedRuns =
      std::function<std::vector<RunHandle>(const World& world, const Session& session, Rank rank)>;
  // All outlive it. `queue` carries out what its worlds agree on.
  Worlds(const NodeOptions* options, TimerQueue* timers, ActionQueue* queue, Background* background,
         Failures* failures, VotedRuns voted_runs)
      : options_(options),
        timers_(timers),
        queue_(queue),
        background_(background),
        failures_(failures),
        voted_runs_(std::move(voted_runs)) {}
  Worlds(const Worlds&) = delete;
  Worlds& operator=(const Worlds&) = delete;

  // --- Requests (LocalNode) -------------------------------------------------------------------
  void Join(const std::shared_ptr<Session>& session, const JoinRequest& request, absl::Time now,
            OnJoined done);
  // The caller waits no more for the others: it has not joined.
  void WithdrawJoin(const Session& session, const std::string& name, Rank rank, absl::Time now) {
    EndJoin(session, name, rank, now);
  }
  absl::StatusOr<GroupId> CreateGroup(const Session& session, const CreateGroupRequest& request);
  absl::Status Leave(const Session& session, WorldId world, Rank rank, absl::Time now);
  absl::Status Abort(const Session& session, const AbortWorldRequest& request, absl::Time now);
  void Reform(const Session& session, const ReformWorldRequest& request, absl::Time now,
              OnReformed done);
  // The caller waits no more for the others: it has not asked.
  void WithdrawReform(const Session& session, WorldId world, Rank rank);

  // --- Commands of a session's log ------------------------------------------------------------
  // How many of the entries, from the first, the slice had time for: one at least.
  size_t DropTape(const Session& session, absl::Span<const chorus::DropTape::Entry> entries,
                  absl::Time now);
  absl::Status EnterEpoch(Session* session, const chorus::EnterEpoch& command);
  // Never OK: the session gets its own error back, with the epoch that is open.
  absl::Status Refuse(const Session& session, const chorus::Refuse& command, absl::Time now);

  // --- By the node ----------------------------------------------------------------------------
  // The session has ended: it leaves its worlds; `died`: how, in words for its peers; empty: in an
  // orderly way. It leaves as many as the slice has time for, the others in the turns that come, or
  // when somebody wants its rank.
  void RemoveSession(const std::shared_ptr<Session>& session, const std::string& died,
                     absl::Time now);
  // Goes on with that, for a turn's share. False: there is nothing.
  bool Continue(absl::Time now);
  // Runs `then` when the sessions that have ended by now have left: now, or in a Continue().
  void AfterLeaving(std::function<void()> then);
  // Ends every world's epoch and every wait with `why`; reforming is refused from then on.
  void Stop(const Error& why, absl::Time now);

  template <typename Fn>
  void ForEach(Fn fn) const {
    for (const auto& entry : worlds_) fn(*entry.second);
  }

 private:
  struct MemberRef {
    std::shared_ptr<World> world;
    World::Member* member;
  };
  absl::StatusOr<MemberRef> FindMember(const Session& session, WorldId world, Rank rank) const;
  // Null where the session's tenant has none of this name.
  std::shared_ptr<World> FindByName(const Session& session, const std::string& name) const;
  absl::StatusOr<std::shared_ptr<World>> FindOrMake(const Session& session,
                                                    const JoinRequest& request, absl::Time now);
  absl::Status CheckJoin(const Session& session, const JoinRequest& request) const;
  void LimitJoin(const std::shared_ptr<World>& world, Rank rank, absl::Duration patience,
                 absl::Time now);
  // The call of a rank that waits for the others, which has not joined from then on. Null: the
  // session has no such rank, or it waits no more.
  OnJoined EndJoin(const Session& session, const std::string& name, Rank rank, absl::Time now);
  // Tells the ranks that have joined `world` and wait for `rank` that it was refused. Nothing where
  // nobody waits for it: `rank` may be any number, of a request that was not understood too. The
  // world is one of the session's tenant, so no other user's request reaches it.
  void RefuseJoined(const std::shared_ptr<World>& world, Rank rank, const Session& session,
                    const absl::Status& why, absl::Time now);
  void Form(const std::shared_ptr<World>& world, absl::Time now);
  void RemoveMember(const std::shared_ptr<World>& world, Rank rank, const std::string& died,
                    absl::Time now);
  // Of sessions that have ended, and are about to leave.
  void RemoveEnded(const std::shared_ptr<World>& world, absl::Time now);
  void DropIfEmpty(const std::shared_ptr<World>& world);
  void LimitReform(const std::shared_ptr<World>& world, Rank rank, absl::Duration patience,
                   absl::Time now);
  // The call that waits there, with its time; null: none does.
  OnJoined TakeJoiner(World::Member* member);
  OnReformed TakeReformer(World::Member* member);
  void TryReform(const std::shared_ptr<World>& world, absl::Time now);

  const NodeOptions* const options_;
  TimerQueue* const timers_;
  ActionQueue* const queue_;
  Background* const background_;
  Failures* const failures_;
  const VotedRuns voted_runs_;
  int64_t last_world_ = 0;
  absl::flat_hash_map<WorldId, std::shared_ptr<World>> worlds_;
  std::map<std::pair<std::string, std::string>, std::shared_ptr<World>> by_name_;
  // In this order.
  struct Leaving {
    std::shared_ptr<Session> session;  // null: nobody leaves, `then` is run
    std::string died;
    std::function<void()> then;
  };
  std::deque<Leaving> leaving_;
  bool stopped_ = false;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_WORLDS_H_
