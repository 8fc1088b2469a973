// What the handlers share, and how they name sessions to clients.
//
// Threads: constant once the server runs; what it points to is thread-safe. Ownership: the
// daemon's, as is what it points to. Errors: said at ParseSession().
#ifndef CHORUS_SERVER_SERVICE_CONTEXT_H_
#define CHORUS_SERVER_SERVICE_CONTEXT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/alarms.h"
#include "core/base/ids.h"
#include "core/node/info.h"
#include "core/node/node_loop.h"
#include "server/attach/attach_server.h"
#include "server/peers.h"
#include "server/service/call_turns.h"
#include "server/service/farewell.h"
#include "server/service/room.h"
#include "server/service/worker.h"
#include "server/tenant_log.h"

namespace chorus::server {

inline constexpr char kDaemonVersion[] = "chorusd 0.1.0";

inline constexpr int64_t kMaxIncarnation = (int64_t{1} << (63 - node::kSessionIdBits)) - 1;

struct ServiceContext {
  node::NodeLoop* loop = nullptr;
  ServiceWorker* worker = nullptr;
  Alarms* alarms = nullptr;
  PeerTable* peers = nullptr;
  Farewell* farewell = nullptr;
  TenantLog* log = nullptr;
  Room* parsing = nullptr;          // for messages that are being parsed
  SharedRoom* answers = nullptr;    // for what clients have not read yet
  SharedRoom* streams = nullptr;    // for what comes on streams of commands
  CallTurns* reads = nullptr;       // of requests, until the node has them, and has written them
  CallTurns* answering = nullptr;   // of answers, until gRPC has done with them
  AttachServer* attach = nullptr;   // null: the daemon listens on TCP alone
  int64_t incarnation = 0;          // 1 .. kMaxIncarnation, other after each start
  absl::Duration max_wait;          // of one call, whatever deadline its client set
  absl::Duration read_timeout;      // for a request to come, once it is read
  absl::Duration download_timeout;  // for a client to take one part
  std::string backend;              // "host"
  std::string attach_path;          // empty: none
  int32_t max_tensors = 0;
  int32_t max_graphs = 0;
};

// Sessions' names on the wire carry the daemon's incarnation, so that a name from before a restart
// is told from an unknown one. They are positive, whatever their bits say.
int64_t WireSession(int64_t incarnation, SessionId session);
// NOT_FOUND (SESSION_LOST): of another start of the daemon. INVALID_ARGUMENT: no session's name.
absl::StatusOr<SessionId> ParseSession(int64_t incarnation, int64_t name);
// 0 for no session.
int64_t WireSessionOrZero(int64_t incarnation, SessionId session);

absl::Status SessionLost(int64_t name);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_CONTEXT_H_
