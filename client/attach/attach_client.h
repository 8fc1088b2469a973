// The client's end of the attach socket (core/transport/attach/protocol.h).
//
// Threads: every method may be called from any thread; requests go one after another.
// Deadlines: by SteadyNow (core/base/clock.h). Each request ends by its own. A late answer is
//   thrown away, with its descriptors.
// Ownership: it owns the connection and the doorbell's descriptor; descriptors that a request gives
//   are the caller's.
// Errors: of a request what the daemon answers, or DEADLINE_EXCEEDED (TRANSPORT_TIMEOUT); neither
//   says that the connection is gone. UNAVAILABLE (DAEMON_LOST), or what the daemon has said before
//   it closed: the connection is gone and stays gone; so is the session's channel. Open another.
#ifndef CHORUS_CLIENT_ATTACH_ATTACH_CLIENT_H_
#define CHORUS_CLIENT_ATTACH_ATTACH_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/base/ids.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "core/transport/attach/packet.h"
#include "core/transport/attach/protocol.h"

namespace chorus {

class AttachClient {
 public:
  // Connects to the attach socket at `path` and proves who this process is. Whose daemon it talks
  // to: client/attach/daemon_socket.h.
  // UNAVAILABLE (DAEMON_LOST): nobody listens there. PERMISSION_DENIED (NOT_ATTACHED): another
  // user's. UNIMPLEMENTED (VERSION): the text has both versions. DEADLINE_EXCEEDED
  // (TRANSPORT_TIMEOUT): somebody listens and does not answer.
  static absl::StatusOr<std::unique_ptr<AttachClient>> Connect(
      const std::string& path, absl::Time deadline, absl::Span<const uint32_t> daemon_uids = {});
  AttachClient(const AttachClient&) = delete;
  AttachClient& operator=(const AttachClient&) = delete;

  // For OpenSessionRequest.attach_token, once.
  const std::string& token() const { return token_; }
  // Other after each start of the daemon.
  int64_t incarnation() const { return incarnation_; }
  const std::string& daemon_version() const { return daemon_version_; }
  // The daemon's page that says whether it sleeps; to be mapped read-only.
  int doorbell_fd() const { return doorbell_.get(); }
  // For a watcher: POLLRDHUP tells that the daemon is gone. Nobody else reads or writes it.
  int socket_fd() const { return socket_.get(); }
  // Why the daemon has closed the connection, or is about to, if it has said so; else OK. For when
  // it is gone: answers that are under way are thrown away.
  absl::Status Goodbye();

  // The rest needs the session that was opened with the token; PERMISSION_DENIED before that.
  struct SessionMemoryFds {
    UniqueFd memory;
    UniqueFd wake;  // an eventfd
  };
  absl::StatusOr<SessionMemoryFds> SessionMemory(absl::Time deadline);
  // It is mapped (MapSessionMemory): the daemon looks at it from now on.
  absl::Status ConfirmMemory(absl::Time deadline);

  struct Staging {
    ArenaId arena;
    int64_t bytes = 0;
    UniqueFd fd;  // to be mapped shared and writable, then confirmed
  };
  absl::StatusOr<Staging> CreateStaging(int64_t bytes, absl::Time deadline);
  // Its file is mapped for writing: seals it against what the daemon would have to wait for, and
  // says so. Before that no command may use it.
  absl::Status ConfirmStaging(const Staging& staging, absl::Time deadline);
  absl::Status ReleaseStaging(ArenaId arena, absl::Time deadline);

  struct ResultArenaFd {
    int64_t bytes = 0;
    UniqueFd fd;  // to be mapped read-only
  };
  absl::StatusOr<ResultArenaFd> ResultArena(ArenaId arena, absl::Time deadline);

 private:
  struct Answer {
    AttachReply reply;
    std::vector<UniqueFd> fds;
  };

  AttachClient(std::string path, UniqueFd socket)
      : path_(std::move(path)), socket_(std::move(socket)) {}

  // Sends `request` and waits for its answer, which must carry `fds` descriptors when it is OK.
  absl::StatusOr<Answer> Ask(AttachRequest request, size_t fds, absl::Time deadline);

  // The next packet, if there is one. Keeps what is an answer to no request: why the connection
  // closes.
  absl::StatusOr<absl::optional<Answer>> Receive() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string path_;
  const UniqueFd socket_;
  // Constant once Connect has returned.
  std::string token_;
  int64_t incarnation_ = 0;
  std::string daemon_version_;
  UniqueFd doorbell_;

  Mutex mutex_;
  uint32_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  absl::Status goodbye_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace chorus

#endif  // CHORUS_CLIENT_ATTACH_ATTACH_CLIENT_H_
