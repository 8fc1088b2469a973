// The submission rings of attached sessions: whose turn it is to be looked at, and what wakes the
// node when it sleeps.
//
// Threads: the node thread.
#ifndef CHORUS_CORE_NODE_RINGS_H_
#define CHORUS_CORE_NODE_RINGS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/unique_fd.h"
#include "core/node/requests.h"
#include "core/node/session.h"
#include "core/transport/doorbell.h"
#include "core/transport/ring.h"

namespace chorus::node {

class Rings {
 public:
  // `take` gets each frame; what it refuses ends the session, whose bytes cannot be believed any
  // more: `end` is told, with how, in words for the session's peers.
  using Take = std::function<absl::Status(const std::shared_ptr<Session>& session,
                                          absl::string_view frame, absl::Time now)>;
  using End = std::function<void(const std::shared_ptr<Session>& session, const std::string& how,
                                 absl::Time now)>;
  Rings(int32_t max_tensors, Take take, End end);
  Rings(const Rings&) = delete;
  Rings& operator=(const Rings&) = delete;

  // Makes the session's shared memory, at the first call. RESOURCE_EXHAUSTED: no memory, or no
  // descriptor.
  absl::StatusOr<SessionDescriptors> Attach(const std::shared_ptr<Session>& session);
  // The session has ended; its shared memory goes.
  void Detach(Session* session);

  // Takes the frames that are there, some of each ring. Whether there were any.
  bool Poll(absl::Time now);
  // Calls `sleep` unless a ring has a frame or `busy` says so; while it runs, clients ring their
  // wake descriptors. Whether it was called.
  bool SleepUnless(const std::function<bool()>& busy, const std::function<void()>& sleep);

  int doorbell_fd() const { return doorbell_->fd(); }
  // Every client, of what it does not need any more.
  void AskToLetGo() { doorbell_->AskToLetGo(); }
  // Descriptor of an epoll set of all sessions' wake descriptors.
  int wake_epoll_fd() const { return wake_epoll_.get(); }

 private:
  bool PollOne(const std::shared_ptr<Session>& session, absl::Time now);

  const int32_t max_tensors_;
  const Take take_;
  const End end_;
  std::unique_ptr<Doorbell> doorbell_;
  UniqueFd wake_epoll_;
  // First the `active_` ones, which have sent something lately and which every Poll looks at, then
  // the quiet ones in turns.
  std::vector<std::shared_ptr<Session>> polled_;
  size_t active_ = 0;
  size_t next_quiet_ = 0;     // place in `polled_`
  bool look_at_all_ = false;  // the next time
  FrameBuffer frame_;         // the frame at hand, copied out of its ring
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_RINGS_H_
