// chorusd as an object: everything that main.cc starts, for main.cc and for tests.
//
// Threads: Start, Drain and the destructor from one thread. Ownership: it owns all that serves, and
// the node. Errors: said at Start().
#ifndef CHORUS_SERVER_DAEMON_H_
#define CHORUS_SERVER_DAEMON_H_

#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/node/node.h"
#include "core/runtime/devices.h"
#include "server/listen_address.h"
#include "server/own_memory.h"
#include "server/tenant_log.h"
#include "server/unix_listener.h"

namespace chorus::server {

struct DaemonOptions {
  std::vector<ListenAddress> listen;
  bool insecure_loopback = false;
  SocketAccess access;
  node::NodeOptions node;
  absl::Duration max_wait = absl::Minutes(10);      // of one call
  absl::Duration read_timeout = absl::Seconds(10);  // for a request to come whole, once it is read
  // For a client to take a part of a tensor, or another answer from its call's deadline on.
  absl::Duration download_timeout = absl::Seconds(60);
  // For a connection to say what it is for: to open its session, to make its first call.
  absl::Duration attach_open_timeout = absl::Seconds(60);
  // Of a connection of gRPC between two calls, unless its process is attached. Not shorter than a
  // lease.
  absl::Duration idle_timeout = absl::Minutes(15);
  // Connections of each kind, attach and gRPC, at a time; 7/8 of them for one uid, or by TCP. Fewer
  // where the process has not eight descriptors for each.
  int max_connections = kDefaultMaxConnections;
  // Calls of gRPC under way, streams of commands included, of which there are `max_streams`; 7/8 as
  // above. What each costs: server/own_memory.h.
  int max_calls = kDefaultMaxCalls;
  int max_streams = kDefaultMaxStreams;
  // Of answers that are not small, and of outcomes, until their clients have read them.
  int64_t answer_bytes = kMaxAnswerBytes;
  // Of a drain, beside its deadline: with a node thread that has much to do (one that does not come
  // to what is asked of it by then is passed by), and with clients, to take the last errors.
  absl::Duration drain_patience = absl::Seconds(5);
  absl::Duration farewell_patience = absl::Milliseconds(500);
  // Refuses arenas where the daemon's cgroup, if that is its own, has more than all accounts may
  // (core/runtime/memory_guard.h). Not for devices that have host memory which is in no account.
  bool guards_memory = true;
  // Writes the lines that clients cause; null: glog does.
  TenantLog::Write write_line;
  // Whose processes may write without attaching.
  uid_t trusted_uid = geteuid();
};

class Daemon {
 public:
  // Takes the paths' locks, listens and serves. The daemon has `devices`.
  // FAILED_PRECONDITION, INVALID_ARGUMENT: an address that cannot be served, or a gRPC library that
  // it does not know. INTERNAL: gRPC does not start. Nothing is left behind.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(const DaemonOptions& options,
                                                       std::unique_ptr<Devices> devices);
  // Drains without patience where Drain was not called.
  ~Daemon();

  // What it listens on, with the ports that the system has chosen.
  const std::vector<ListenAddress>& addresses() const;
  int64_t incarnation() const;

  // Refuses what is new, waits for what is under way until `deadline`, then ends the rest with
  // UNAVAILABLE (DRAINING) and, after `farewell_patience` for its calls and as long again for what
  // gRPC says, every connection. Nothing is served when it returns. It waits for no client; the
  // destructor waits for work that the devices have.
  void Drain(absl::Time deadline);

 private:
  struct Impl;
  explicit Daemon(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_DAEMON_H_
