// The daemon's end of the attach socket (core/transport/attach/protocol.h).
//
// Threads: one of its own does the handshakes; requests are carried out on the node thread, which
//   also sends their answers. Claim, Bind and Attached come from any thread; Stop and the
//   destructor from the owner's.
// Ownership: it owns its listeners and connections; descriptors that it sends stay the node's.
// Errors: a client that breaks the protocol, or does not read its answers, loses its connection;
//   nobody else notices. A connection that has opened no session in time is closed, and so is one
//   whose session has ended, after a while.
#ifndef CHORUS_SERVER_ATTACH_ATTACH_SERVER_H_
#define CHORUS_SERVER_ATTACH_ATTACH_SERVER_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/ids.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "core/node/node_loop.h"
#include "core/transport/attach/packet.h"
#include "core/transport/attach/protocol.h"
#include "server/client_socket.h"
#include "server/own_memory.h"
#include "server/tenant_log.h"

namespace chorus::server {

struct AttachOptions {
  int64_t incarnation = 0;
  std::string daemon_version;
  // For a handshake, and then for Sessions.Open.
  absl::Duration handshake_timeout = absl::Seconds(10);
  absl::Duration open_timeout = absl::Seconds(60);
  // In all; one uid has ShareOf of them. One that was closed counts until its client has read the
  // descriptors that it was sent, or is gone.
  int max_connections = kDefaultMaxConnections;
};

class AttachServer {
 public:
  // `log` outlives it, and `loop` its Stop.
  AttachServer(std::vector<UniqueFd> listeners, AttachOptions options, node::NodeLoop* loop,
               TenantLog* log);
  // Listens no more and closes every connection; sessions are then detached. Afterwards no token is
  // known and nobody is attached: the node thread may still ask.
  void Stop();
  // Stops, if nobody has.
  ~AttachServer();

  // What a token is worth.
  struct Client {
    uint64_t connection = 0;
    pid_t pid = -1;
    UniqueFd pidfd;
  };
  // Takes a token, once. PERMISSION_DENIED (NOT_ATTACHED): unknown, used, of another uid, or its
  // connection has closed. RESOURCE_EXHAUSTED (QUOTA): no descriptor for it; it stays good.
  absl::StatusOr<Client> Claim(absl::string_view token, uid_t uid);
  // From now on the connection's requests are for `session`, which the claimer has opened. False:
  // the connection has closed meanwhile; the session is detached from the start.
  bool Bind(uint64_t connection, SessionId session);
  // Whether a process has a connection with a session, or is about to.
  bool Attached(pid_t pid) const;
  // Tells every client why its connection will close: an answer to no request (id 0).
  void SayGoodbye(const absl::Status& why);

 private:
  struct Connection {
    uint64_t id = 0;
    ClientSocket socket;
    pid_t pid = -1;
    uid_t uid = 0;
    UniqueFd pidfd;
    enum class State { kNew, kChallenged, kWelcome, kClaimed, kBound } state = State::kNew;
    std::string secret;                            // the nonce, then the token
    SessionId session;                             // kBound
    absl::Time deadline = absl::InfiniteFuture();  // by SetDeadlineLocked; of all but kBound

    // Requests that the node has not answered. At kMaxAsked the socket is watched for its end
    // alone.
    static constexpr int kMaxAsked = 16;
    std::shared_ptr<const UniqueFd> epoll;  // the server's: an answer may come after its end
    Mutex unanswered_mutex;
    int unanswered ABSL_GUARDED_BY(unanswered_mutex) = 0;
    // Descriptors that were sent to the client and, for all the node knows, not read. Its thread's
    // to write, before it sends.
    std::atomic<int> unread_fds{0};
    // The node has one more, or one less.
    void Asked();
    void Answered();
    bool MayAsk();
    // Whether so many descriptors more may be on their way to the client.
    bool MayHave(int descriptors);
  };
  using ConnectionRef = std::shared_ptr<Connection>;

  void Loop();
  // Takes those that are there, so many at a time.
  void Accept(int listener);
  void Add(ClientSocket socket);
  // Reads what `connection` has sent. Closes it when it is at fault, or gone (`has_ended`: it sends
  // no more).
  void Receive(const ConnectionRef& connection, bool has_ended);
  // An error closes the connection after it was told.
  absl::Status Handle(const ConnectionRef& connection, const AttachRequest& request,
                      const Packet& packet);
  absl::Status HandleHello(const ConnectionRef& connection, const AttachRequest& request);
  absl::Status HandleProof(const ConnectionRef& connection, const AttachRequest& request,
                           const Packet& packet);
  // Runs `answer` on the node thread. It answers one request, or lets it be answered: this counts
  // as one that waits for its answer until nobody has `asker` any more.
  void AskNode(const ConnectionRef& connection,
               std::function<void(node::LocalNode& node, const ConnectionRef& asker)> answer);
  void CarryOut(const ConnectionRef& connection, const AttachRequest& request, SessionId session);
  void Close(const ConnectionRef& connection);
  // A line of the log: what the connection's process did.
  void Say(google::LogSeverity severity, const Connection& connection, absl::string_view what);
  // InfiniteFuture: none.
  void SetDeadlineLocked(Connection* connection, absl::Time deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // It counts no more.
  void UncountLocked(const Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Closes what is overdue; milliseconds to the next look, -1: none.
  int Sweep();
  // Closes, on the node thread, those of `bound_connections` whose session has ended.
  void CloseEnded(std::vector<ConnectionRef> bound_connections);

  std::vector<UniqueFd> listeners_;  // the thread's, then Stop's
  const AttachOptions options_;
  node::NodeLoop* const loop_;
  TenantLog* const log_;
  const std::shared_ptr<const UniqueFd> epoll_;
  const UniqueFd stop_;  // an eventfd

  absl::Time next_look_;  // the thread's

  mutable Mutex mutex_;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, ConnectionRef> connections_ ABSL_GUARDED_BY(mutex_);
  // Closed, but their clients have not read what they were sent: descriptors, too.
  std::vector<ConnectionRef> unread_ ABSL_GUARDED_BY(mutex_);
  // Of those that have one: a sweep, before each wait, looks at the first.
  absl::btree_set<std::pair<absl::Time, uint64_t>> deadlines_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, ConnectionRef> tokens_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uid_t, int32_t> per_uid_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<pid_t, int32_t> attached_ ABSL_GUARDED_BY(mutex_);  // kClaimed and kBound

  std::thread thread_;
};

// 128 bits that nobody can guess.
std::string RandomToken();

}  // namespace chorus::server

#endif  // CHORUS_SERVER_ATTACH_ATTACH_SERVER_H_
