// Who calls: the tenant of an RPC.
//
// gRPC tells nothing about a client on a Unix socket. So the daemon accepts those connections
// itself, reads SO_PEERCRED, notes it under the descriptor's number and hands the descriptor over;
// in a handler gRPC then names the peer "fd:NUMBER".
// A number is given out again only after thousands of others: a call of a closed connection that is
// still on its way must not meet the credentials of a newer one.
//
// Threads: thread-safe.
#ifndef CHORUS_SERVER_PEERS_H_
#define CHORUS_SERVER_PEERS_H_

#include <sys/types.h>

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/base/mutex.h"
#include "core/base/unique_fd.h"
#include "server/unix_listener.h"

namespace chorus {

struct Caller {
  std::string tenant;  // "uid:1000", "loopback"
  bool is_unix = false;
  uid_t uid = 0;           // of a Unix caller
  bool is_daemon = false;  // a Unix caller of the daemon's own uid
  // May open sessions without the attach socket: the daemon's own uid, and loopback TCP, which the
  // operator has allowed to everybody.
  bool may_write() const { return is_daemon || !is_unix; }
  // Empty for those who may see every tenant's things.
  absl::string_view sees() const {
    return is_daemon ? absl::string_view() : absl::string_view(tenant);
  }
};

class PeerTable {
 public:
  // `daemon_uid`: whose processes are trusted without attaching.
  explicit PeerTable(uid_t daemon_uid);

  // Notes a connection's peer and returns its descriptor under the number that gRPC shall get.
  // RESOURCE_EXHAUSTED: no descriptor is free.
  absl::StatusOr<UniqueFd> Add(UniqueFd connection, const PeerCredentials& peer);

  // `peer` as gRPC names it. UNAUTHENTICATED: it is not known.
  absl::StatusOr<Caller> Resolve(absl::string_view peer) const;

 private:
  const uid_t daemon_uid_;
  const int first_;  // the range of numbers
  const int last_;
  mutable Mutex mutex_;
  int next_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<int, PeerCredentials> peers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace chorus

#endif  // CHORUS_SERVER_PEERS_H_
