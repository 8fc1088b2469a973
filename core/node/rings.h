// The submission rings of attached sessions: which are looked at, whose turn it is, and what wakes
// the node when it sleeps.
//
// A session that asks for little is heard soon, however much others ask for: a Poll() gives turns
// until a slice's work is done; where that was not enough for all of them, and for a while after so
// much, it is the turn of the tenant for which least has been done, and within it of the process.
// So a process has not more turns for having more sessions.
//
// Threads: the node thread. Ownership: owns the doorbell; each session owns its shared memory.
// Errors: a ring with malformed bytes ends its session.
#ifndef CHORUS_CORE_NODE_RINGS_H_
#define CHORUS_CORE_NODE_RINGS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/unique_fd.h"
#include "core/node/options.h"
#include "core/node/requests.h"
#include "core/node/session.h"
#include "core/node/turns.h"
#include "core/runtime/held_files.h"
#include "core/transport/doorbell.h"
#include "core/transport/ring.h"

namespace chorus::node {

class Rings {
 public:
  // `take` gets each frame; where it refuses one the session's bytes cannot be believed any more,
  // and `end` is called, with the cause in words for the session's peers.
  using Take = std::function<absl::Status(const std::shared_ptr<Session>& session,
                                          absl::string_view frame, absl::Time now)>;
  using End = std::function<void(const std::shared_ptr<Session>& session, const std::string& how,
                                 absl::Time now)>;
  // `held` takes the shared memory of sessions that have ended. It and `options` outlive this.
  Rings(const NodeOptions* options, HeldFiles* held, Take take, End end);
  Rings(const Rings&) = delete;
  Rings& operator=(const Rings&) = delete;

  // Makes the session's shared memory, at the first call. RESOURCE_EXHAUSTED: no memory, or no
  // descriptor.
  absl::StatusOr<SessionDescriptors> Attach(const std::shared_ptr<Session>& session);
  // The client has mapped and sealed it (MapSessionMemory). It is not touched before: a thread that
  // touches memory out of which a client takes pages waits for that. FAILED_PRECONDITION: there is
  // none. INVALID_ARGUMENT: it is not sealed. A second call does nothing.
  absl::Status Confirm(const std::shared_ptr<Session>& session);
  // The session has ended; its shared memory goes, and is charged as long as clients hold it.
  void Detach(Session* session);

  // Calls `then` in the session's next turn, instead of looking at its ring: its log, which is
  // parked, has more to do than a turn has the time for. Once at a time; not if the session ends.
  void GoOnLater(const std::shared_ptr<Session>& session,
                 std::function<void(const std::shared_ptr<Session>&)> then);

  // Takes the frames that are there, some of each ring. Whether there were any. Rings that have
  // been silent are not looked at: their clients ring, which is seen within kLookForRungEvery.
  static constexpr absl::Duration kLookForRungEvery = absl::Microseconds(20);
  static constexpr absl::Duration kQuietAfter = absl::Milliseconds(20);
  // How long turns are in order after a Poll() that has done a slice's work.
  static constexpr absl::Duration kInOrderFor = absl::Milliseconds(20);
  bool Poll(absl::Time now);
  // Calls `sleep` unless a ring has a frame or `busy` says so; while it runs, clients ring their
  // wake descriptors. Whether it was called.
  bool SleepUnless(const std::function<bool()>& busy, const std::function<void()>& sleep);

  int doorbell_fd() const { return doorbell_->fd(); }
  // Asks every client to let go of arenas that it does not need any more.
  void AskToLetGo() { doorbell_->AskToLetGo(); }
  // Descriptor of an epoll set of all sessions' wake descriptors: readable when a client has rung,
  // until the next Poll().
  int wake_epoll_fd() const { return wake_epoll_.get(); }

 private:
  void FindWaiting(absl::Time now);
  void PutInOrder();
  int64_t TakeTurn(const std::shared_ptr<Session>& session, absl::Time now);
  void TakeFrames(const std::shared_ptr<Session>& session, absl::Time now);
  void LookAtRung(absl::Time now);

  const NodeOptions* const options_;
  HeldFiles* const held_;
  const Take take_;
  const End end_;
  std::unique_ptr<Doorbell> doorbell_;
  UniqueFd wake_epoll_;
  std::vector<std::shared_ptr<Session>> active_;  // every Poll looks at them
  std::vector<Session*> waiting_;                 // of these, for a turn; null: it has ended
  bool some_wait_ = false;                        // some had no turn in the last Poll
  absl::Time in_order_until_ = absl::InfinitePast();
  Turns turns_;  // of tenants
  int64_t last_turn_ = 0;
  int64_t round_ = 0;  // of turns
  // Those that have been silent: their clients ring.
  absl::flat_hash_map<SessionId, std::shared_ptr<Session>> quiet_;
  absl::Time next_look_for_rung_ = absl::InfinitePast();
  FrameBuffer frame_;  // the frame at hand, copied out of its ring
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_RINGS_H_
